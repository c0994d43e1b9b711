//! Where the keys of tenants come from: a file, the environment, or a command such as a vault's. `docs/KEYS.md`.
//!
//! The file of `[keys] file` only says where each key is, and has none. No message repeats what was read, a command, or
//! words of that file that can't be understood: they may be a secret. Its commands run as the daemon's user, so others
//! may not write it.

use std::collections::HashMap;
use std::fmt;
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ::config::{Value, ValueKind};
use serde::Deserialize;
use zeroize::Zeroizing;

use super::file::read_file;
use super::schema::Keys;
use crate::format::{Keyring, Protection, TenantKeys, TenantSecret};

/// A key has 64 digits; a command may say a little around them.
const KEY_BYTES_MAX: u64 = 4096;
/// How often a command is asked whether it has ended.
const TICK: Duration = Duration::from_millis(10);
/// Nobody but the owner may write a key's file, and nobody but owner and group read it.
const TOO_OPEN: u32 = 0o027;
/// Nobody but the owner may write the file that names the keys.
const WRITABLE: u32 = 0o022;

/// All that is wrong with the keys.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the keys of [keys] file {}: {}", .file.display(), .problems.join("; "))]
pub struct KeysError {
    file: PathBuf,
    problems: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KeysFile {
    #[serde(default)]
    tenant: Vec<Tenant>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tenant {
    name: String,
    protection: Option<String>,
    secret: Option<KeySource>,
    #[serde(default)]
    keys: Sources,
}

/// One source or several. A failure to read it names no value.
#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "`keys` is a list of sources: file:PATH, env:NAME, command:COMMAND"
)]
enum Sources {
    One(KeySource),
    Several(Vec<KeySource>),
}

impl Default for Sources {
    fn default() -> Self {
        Self::Several(Vec::new())
    }
}

/// The place of one key.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
enum KeySource {
    File(PathBuf),
    Env(String),
    Command(String),
}

impl TryFrom<String> for KeySource {
    type Error = &'static str;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        match text.split_once(':') {
            Some(("file", path)) if Path::new(path).is_absolute() => Ok(Self::File(path.into())),
            Some(("env", name)) if !name.is_empty() && TenantSecret::from_hex(name).is_err() => {
                Ok(Self::Env(name.into()))
            }
            Some(("command", command)) if !command.trim().is_empty() => Ok(Self::Command(command.into())),
            _ => {
                Err("a source is file:/ABSOLUTE/PATH, env:NAME or command:COMMAND, and never the key itself")
            }
        }
    }
}

impl fmt::Display for KeySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "file {}", path.display()),
            Self::Env(name) => write!(f, "environment variable {name}"),
            // It may have a password.
            Self::Command(_) => f.write_str("its command"),
        }
    }
}

/// Reads the keys of all tenants. Waits for commands, each for `[keys] timeout` at most.
///
/// # Errors
///
/// All problems, at once.
pub fn read_keys(keys: &Keys) -> Result<Keyring, KeysError> {
    let Some(file) = &keys.file else {
        return Ok(Keyring::default());
    };
    let mut problems = Vec::new();
    let tenants = read_tenants(file).unwrap_or_else(|problem| {
        problems.push(problem);
        Vec::new()
    });
    let mut ring = HashMap::new();
    for tenant in tenants {
        let Tenant {
            name,
            protection,
            secret,
            keys: sources,
        } = tenant;
        let words = Protection::WORDS;
        let protection = protection.and_then(|word| {
            let found = words.iter().find(|(one, _)| *one == word);
            if found.is_none() {
                let words: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
                problems.push(format!(
                    "tenant {name:?}: `protection` is one of {}",
                    words.join(", ")
                ));
            }
            found.map(|(_, protection)| *protection)
        });
        let mut key_of = |what: &str, source: KeySource| {
            let key = source.read(keys.timeout);
            key.map_err(|problem| problems.push(format!("tenant {name:?}, {what}: {source} {problem}")))
                .ok()
        };
        let secret = secret.and_then(|source| key_of("secret", source));
        let sources = match sources {
            Sources::One(source) => vec![source],
            Sources::Several(sources) => sources,
        };
        let each = sources.into_iter().zip(1..);
        let mut own: Vec<TenantSecret> = each
            .filter_map(|(source, number)| key_of(&format!("key {number}"), source))
            .collect();
        if own.is_empty() {
            own.extend(secret.clone());
        }
        if own.is_empty() && problems.is_empty() {
            problems.push(format!("tenant {name:?} has neither `secret` nor `keys`"));
        }
        let has = TenantKeys {
            protection,
            secret,
            keys: own,
        };
        if ring.insert(name.clone(), has).is_some() {
            problems.push(format!("tenant {name:?} is there twice"));
        }
    }
    match problems.is_empty() {
        true => Ok(Keyring::new(ring)),
        false => Err(KeysError {
            file: file.clone(),
            problems,
        }),
    }
}

/// Reads a tenant's secret from a file that others can't read.
///
/// # Errors
///
/// What to do about the file; never what is in it.
pub fn read_secret(file: &Path) -> Result<TenantSecret, String> {
    let source = KeySource::File(file.to_owned());
    let secret = source.read(Duration::ZERO);
    secret.map_err(|problem| format!("{source} {problem}"))
}

fn read_tenants(file: &Path) -> Result<Vec<Tenant>, String> {
    if let Ok(of) = file.metadata() {
        is_closed(&of, WRITABLE, "go-w")?;
    }
    let table = read_file(file).map_err(|problem| place_alone(&problem))?;
    let read: Result<KeysFile, _> = Value::new(None, ValueKind::Table(table)).try_deserialize();
    read.map(|file| file.tenant)
        .map_err(|error| format!("it can't be understood: {}", without_values(&error.to_string())))
}

/// What a parser says, but of the text only the line.
fn place_alone(problem: &str) -> String {
    let (what, told) = problem.split_once(": ").unwrap_or((problem, ""));
    if !what.starts_with("is not valid") {
        return problem.to_owned();
    }
    let line = told.split_once("line ").map_or("", |(_, rest)| rest);
    let line: String = line.chars().take_while(char::is_ascii_digit).collect();
    match line.is_empty() {
        true => what.to_owned(),
        false => format!("{what}: see line {line}"),
    }
}

/// What was expected, and not what was there.
fn without_values(error: &str) -> String {
    let Some((there, expected)) = error.split_once(", expected ") else {
        return error.to_owned();
    };
    let what = there.split(['`', '"', ':']).next().unwrap_or_default();
    format!("{}, expected {expected}", what.trim_end())
}

impl KeySource {
    fn read(&self, timeout: Duration) -> Result<TenantSecret, String> {
        let text = match self {
            Self::File(path) => read_closed(path)?,
            Self::Env(name) => match std::env::var(name) {
                Ok(text) => Zeroizing::new(text),
                Err(_) => return Err("is not set".into()),
            },
            Self::Command(command) => run(command, timeout)?,
        };
        TenantSecret::from_hex(&text)
            .map_err(|_| "has no key: a key is 64 hex digits, from `openssl rand -hex 32`".into())
    }
}

/// A file that others can't read.
fn read_closed(path: &Path) -> Result<Zeroizing<String>, String> {
    let file = File::open(path).map_err(|error| unread(&error))?;
    is_closed(
        &file.metadata().map_err(|error| unread(&error))?,
        TOO_OPEN,
        "0400",
    )?;
    text_of(file)
}

fn unread(error: &io::Error) -> String {
    let what = format!("can't be read: {error}");
    if error.kind() != io::ErrorKind::PermissionDenied {
        return what;
    }
    let user = rustix::process::geteuid().as_raw();
    format!(
        "{what}: chown it to user {user}, or chgrp it to a group of that user and chmod 0440 it; and let that user into \
         its folder"
    )
}

/// Whether the file has none of these rights, and nobody else owns it.
fn is_closed(of: &Metadata, too_open: u32, chmod: &str) -> Result<(), String> {
    if of.mode() & too_open != 0 {
        let mode = of.mode() & 0o777;
        return Err(format!(
            "has the mode {mode:04o}, so others could have read or written it: chmod {chmod} it"
        ));
    }
    let own = rustix::process::geteuid().as_raw();
    if ![0, own].contains(&of.uid()) {
        return Err(format!(
            "is user {}'s, neither root's nor this process's: chown it",
            of.uid()
        ));
    }
    Ok(())
}

fn run(command: &str, timeout: Duration) -> Result<Zeroizing<String>, String> {
    let failed = |error: io::Error| format!("can't be run: {error}");
    let mut child = Command::new("/bin/sh")
        .args(["-c", command])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let output = child
        .stdout
        .take()
        .map(|output| std::thread::spawn(|| text_of(output)));
    let ends = Instant::now() + timeout;
    let status = loop {
        if let Some(status) = child.try_wait().map_err(failed)? {
            break status;
        }
        if Instant::now() >= ends {
            // It may have ended this moment.
            let _ = child.kill();
            let _ = child.wait();
            return Err(format!(
                "did not end within {timeout:?}: see it run, or raise [keys] timeout"
            ));
        }
        std::thread::sleep(TICK);
    };
    if !status.success() {
        return Err(format!("failed with {status}"));
    }
    // It ends with the output, which a child of the command may hold open.
    while output.as_ref().is_some_and(|output| !output.is_finished()) {
        if Instant::now() >= ends {
            return Err(format!("kept its output open for {timeout:?}"));
        }
        std::thread::sleep(TICK);
    }
    let text = output.map(std::thread::JoinHandle::join);
    text.and_then(Result::ok)
        .unwrap_or_else(|| Err("gave no output".into()))
}

fn text_of(from: impl Read) -> Result<Zeroizing<String>, String> {
    let mut text = Zeroizing::new(String::new());
    let read = from.take(KEY_BYTES_MAX).read_to_string(&mut text);
    read.map_err(|_| "gives no text: a key is 64 hex digits".to_owned())?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{DigestKind, KeyError, KeyId, Space};
    use std::os::unix::fs::PermissionsExt;

    const KEY: &str = "aa11aa11aa11aa11aa11aa11aa11aa11aa11aa11aa11aa11aa11aa11aa11aa11";

    struct Folder(tempfile::TempDir);

    impl Folder {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn file(&self, name: &str, text: &str, mode: u32) -> String {
            let path = self.0.path().join(name);
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            path.to_str().unwrap().to_owned()
        }

        fn read(&self, text: &str) -> Result<Keyring, KeysError> {
            self.read_as(text, "keys.toml", 0o644)
        }

        fn read_as(&self, text: &str, name: &str, mode: u32) -> Result<Keyring, KeysError> {
            let file = self.file(name, text, mode);
            read_keys(&Keys {
                file: Some(file.into()),
                timeout: Duration::from_millis(500),
            })
        }

        fn refused(&self, tenant: &str) -> String {
            let text = format!("[[tenant]]\nname = \"acme\"\n{tenant}");
            let error = self.read(&text).unwrap_err();
            let said = format!("{error} {error:?}");
            assert!(!said.contains(&KEY[4..20]) && !said.contains("hunter2"), "{said}");
            said
        }
    }

    fn space(tenant: &str, protection: &str) -> Space {
        let json = format!(
            r#"{{"model": "m", "revision": "1", "tenant": "{tenant}", "protection": "{protection}",
                "mha": {{"layers": 1, "heads": 1, "head_dim": 1}}}}"#
        );
        Space::from_json(&json).unwrap()
    }

    #[test]
    fn keys_come_from_a_file_and_a_command() {
        let folder = Folder::new();
        let file = folder.file("acme", &format!("{KEY}\n"), 0o400);
        let ring = folder
            .read(&format!(
                r#"
                [[tenant]]
                name = "acme"
                protection = "signed"
                secret = "file:{file}"
                [[tenant]]
                name = "other.Name"
                secret = "file:{file}"
                keys = ["command:printf %064d 7", "file:{file}"]
                [[tenant]]
                name = ""
                keys = "command: cat {file}"
                "#
            ))
            .unwrap();
        let id = |name, protection| {
            let digest = ring.writes(&space(name, protection), DigestKind::Crc64Nvme);
            digest.map(|digest| format!("{digest:?}"))
        };
        let [of_key, of_seven] = [KEY.to_owned(), format!("{:064}", 7)].map(|hex| {
            format!(
                "Signed(SigningKey({}))",
                KeyId::of(&TenantSecret::from_hex(&hex).unwrap())
            )
        });
        assert_eq!(id("acme", "signed"), Ok(of_key.clone()));
        assert_eq!(id("other.Name", "signed"), Ok(of_seven));
        assert_eq!(id("", "signed"), Ok(of_key));
        assert!(matches!(id("nobody", "signed"), Err(KeyError::NoKey { .. })));
        assert!(ring.check(&space("nobody", "none")).is_ok());
        assert!(ring.check(&space("other.Name", "none")).is_ok());
        let refused = ring.check(&space("acme", "none")).unwrap_err();
        assert!(matches!(refused, KeyError::Protection { .. }));
        assert!(
            ring.secret(&space("", "none")).is_none(),
            "keys alone don't name chunks"
        );
        assert!(ring.secret(&space("acme", "none")).is_some());
        assert!(!format!("{ring:?}").contains(&KEY[..8]), "{ring:?}");
    }

    #[test]
    fn each_problem_says_what_to_do_and_never_the_key() {
        let folder = Folder::new();
        let open = folder.file("open", KEY, 0o404);
        let short = folder.file("short", &KEY[1..], 0o400);
        for (tenant, told) in [
            (format!("secret = \"file:{open}\""), "chmod 0400"),
            (format!("secret = \"file:{short}\""), "64 hex digits"),
            ("secret = \"file:/nowhere/at/all\"".into(), "can't be read"),
            ("secret = \"env:KVGATE_TEST_NOT_SET\"".into(), "is not set"),
            ("secret = \"command:exit 3\"".into(), "failed with"),
            ("secret = \"command:sleep 60\"".into(), "did not end within"),
            (
                "secret = \"command:sleep 3 & echo x\"".into(),
                "kept its output open",
            ),
            (
                format!("secret = \"command:echo {}\"", &KEY[1..]),
                "64 hex digits",
            ),
            (format!("secret = \"{KEY}\""), "a source is file:"),
            (format!("keys = \"{KEY}\""), "list of sources"),
            (format!("keys = [\"{KEY}\"]"), "list of sources"),
            ("protection = \"signed\"".into(), "neither `secret` nor `keys`"),
            (
                "protection = \"sighned\"".into(),
                "`protection` is one of none, signed, encrypted",
            ),
            ("keyz = \"env:X\"".into(), "unknown field, expected one of `name`"),
            (
                format!("{KEY} = \"env:X\""),
                "unknown field, expected one of `name`",
            ),
            (format!("secret = \"env:{KEY}\""), "a source is file:"),
            (
                "secret = \"command:: hunter2; exit 3\"".into(),
                "tenant \"acme\", secret: its command failed",
            ),
            (
                "keys = [\"env:KVGATE_TEST_NOT_SET\", \"command:exit 3 # hunter2\"]".into(),
                "tenant \"acme\", key 2: its command failed",
            ),
            (format!("secret = {KEY}"), "is not valid TOML: see line 3"),
            (
                format!("[[tenant]]\nname = [\"{KEY}\"]\nsecret = \"env:X\""),
                "expected a string",
            ),
        ] {
            let said = folder.refused(&tenant);
            assert!(said.contains(told), "{tenant}: {said}");
        }
        let whole = folder
            .read(&format!("tenant = \"{KEY}\""))
            .unwrap_err()
            .to_string();
        assert!(
            whole.contains("expected a sequence") && !whole.contains(&KEY[4..20]),
            "{whole}"
        );
        for (name, text) in [
            ("keys.yaml", format!("tenant:\n- name: a\n  secret: [{KEY}\n")),
            ("keys.json", format!("{{\"tenant\": [{{\"secret\": {KEY}}}]}}")),
        ] {
            let said = folder.read_as(&text, name, 0o644).unwrap_err().to_string();
            assert!(said.contains("see line") && !said.contains(&KEY[4..20]), "{said}");
        }
        let twice = format!(
            "keys = \"command:echo {}\"\n[[tenant]]\nname = \"acme\"\nkeys = \"env:X\"",
            "7".repeat(64)
        );
        let said = folder.refused(&twice);
        assert!(
            said.contains("is there twice") && said.contains("is not set"),
            "{said}"
        );
    }

    /// Root may read everything, so no file is refused to it.
    #[test]
    fn a_file_that_may_not_be_read_says_who_must_own_it() {
        let said = unread(&io::Error::from(io::ErrorKind::PermissionDenied));
        let user = rustix::process::geteuid().as_raw();
        assert!(said.contains(&format!("chown it to user {user}")), "{said}");
        assert!(said.contains("chgrp") && said.contains("chmod 0440"), "{said}");
        let said = unread(&io::Error::from(io::ErrorKind::NotFound));
        assert!(!said.contains("chown"), "{said}");
    }

    /// Its commands run as the daemon's user.
    #[test]
    fn a_file_of_keys_that_others_may_write_is_refused() {
        let folder = Folder::new();
        let text = format!("[[tenant]]\nname = \"a\"\nkeys = \"command:echo {KEY}\"");
        for (mode, is_good) in [(0o644, true), (0o664, false), (0o646, false), (0o440, true)] {
            let read = folder.read_as(&text, "keys.toml", mode);
            assert_eq!(read.is_ok(), is_good, "{mode:o}");
            if let Err(error) = read {
                assert!(error.to_string().contains("chmod go-w"), "{error}");
            }
        }
    }
}
