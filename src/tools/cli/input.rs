//! Input of commands: files, the standard input, numbers and hashes in them.

use std::fs::File;
use std::io::{self, IsTerminal, Read};

use super::error::CliError;
use super::output::tell;
use crate::config::units::ByteSize;
use crate::format::ChunkHash;

/// A text file, or the standard input for `-`.
pub fn read(name: &str, limit: ByteSize) -> Result<String, CliError> {
    let stdin = name == "-";
    let shown = if stdin { "the standard input" } else { name };
    if stdin && io::stdin().is_terminal() {
        tell("reading the standard input; end it with Ctrl-D");
    }
    let mut text = String::new();
    let opened: io::Result<Box<dyn Read>> = match stdin {
        true => Ok(Box::new(io::stdin().lock())),
        false => File::open(name).map(|file| Box::new(file) as Box<dyn Read>),
    };
    let taken = opened.and_then(|source| source.take(limit.bytes() + 1).read_to_string(&mut text));
    match taken {
        Ok(taken) if taken as u64 > limit.bytes() => Err(CliError::usage(format!(
            "{shown} is larger than {limit}: that can't be what is meant"
        ))),
        Ok(_) => Ok(text),
        Err(error) => Err(CliError::usage(format!("can't read {shown}: {error}"))),
    }
}

/// Token ids: a JSON array, or numbers with white space or commas between.
pub fn tokens(text: &str) -> Result<Vec<u32>, CliError> {
    let text = text.trim();
    if text.starts_with('[') {
        return serde_json::from_str(text).map_err(|error| {
            CliError::usage(format!("the tokens are no JSON array of whole numbers: {error}"))
        });
    }
    words(text)
        .enumerate()
        .map(|(index, word)| {
            word.parse().map_err(|_| {
                CliError::usage(format!(
                    "token {index} is {:?}, not a whole number from 0 to {}. Give token ids with spaces, commas or \
                     line ends between them, or a JSON array; text must go through the model's tokenizer first",
                    shortened(word),
                    u32::MAX
                ))
            })
        })
        .collect()
}

/// Chunk hashes in hex, with white space or commas between.
pub fn hashes(text: &str) -> Result<Vec<ChunkHash>, CliError> {
    words(text)
        .enumerate()
        .map(|(index, word)| {
            let hash = word.parse();
            hash.map_err(|error| CliError::usage(format!("hash {index}: {error}")))
        })
        .collect()
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| c.is_whitespace() || c == ',')
        .filter(|word| !word.is_empty())
}

fn shortened(word: &str) -> String {
    word.chars().take(40).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_as_people_and_programs_write_them() {
        for text in [
            "1 2 3",
            "1,2,3",
            "1\n2\r\n3\n",
            "[1, 2, 3]",
            " [1,\n2,3] ",
            "1, 2,\t3,",
        ] {
            assert_eq!(tokens(text).unwrap(), [1, 2, 3], "{text:?}");
        }
        assert!(tokens("").unwrap().is_empty());
        for text in [
            "1 two",
            "-1",
            "4294967296",
            "1.5",
            "[1, 2",
            "[1, null]",
            "{}",
            "0x10",
        ] {
            assert!(matches!(tokens(text), Err(CliError::Usage(_))), "{text:?}");
        }
    }
}
