//! Lower-case hex, for keys and answers.

/// Text that is not the hex that was asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} is {expected} hex digits (0-9a-f), but {got:?} was given")]
pub struct HexError {
    what: &'static str,
    expected: usize,
    got: String,
}

pub fn encode(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digits = bytes
        .iter()
        .flat_map(|byte| [DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]]);
    String::from_utf8(digits.collect()).expect("digits are ASCII")
}

/// Exactly `N` bytes from `2 * N` lower- or upper-case digits.
pub fn decode<const N: usize>(what: &'static str, text: &str) -> Result<[u8; N], HexError> {
    let error = || HexError {
        what,
        expected: 2 * N,
        got: text.chars().take(80).collect(),
    };
    let mut bytes = [0; N];
    if text.len() != 2 * N {
        return Err(error());
    }
    for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        let digit = |c: u8| (c as char).to_digit(16);
        let (Some(high), Some(low)) = (digit(pair[0]), digit(pair[1])) else {
            return Err(error());
        };
        *byte = u8::try_from(high * 16 + low).map_err(|_| error())?;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trips_and_refuses() {
        assert_eq!(encode(&[0, 10, 255]), "000aff");
        assert_eq!(decode::<3>("x", "000aFF"), Ok([0, 10, 255]));
        for bad in ["", "000af", "000afg", "000aff0", "00é"] {
            assert!(decode::<3>("x", bad).is_err(), "{bad}");
        }
    }
}
