//! The built program, as people type it, and a place to run it in.

use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use kvgate::embedded::EmbeddedS3;
use serde_json::Value;
use tempfile::TempDir;
use tokio::process::Command;

pub const BUCKET: &str = "kv-program";
pub const PREFIX: &str = "t";

/// A server with an empty bucket, and a folder where the program runs and finds it.
pub struct Place {
    pub s3: EmbeddedS3,
    pub home: TempDir,
}

impl Place {
    pub async fn new() -> Self {
        let s3 = EmbeddedS3::start(None, None).await.unwrap();
        let home = TempDir::new().unwrap();
        let place = Self { s3, home };
        std::fs::create_dir(place.bucket()).unwrap();
        place
    }

    /// The folder behind the bucket.
    pub fn bucket(&self) -> PathBuf {
        self.s3.root().join(BUCKET)
    }

    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = kvgate(self.home.path(), args);
        command
            .current_dir(self.home.path())
            .env("AWS_ACCESS_KEY_ID", self.s3.access_key())
            .env("AWS_SECRET_ACCESS_KEY", self.s3.secret_key())
            .env("KVGATE__S3__ENDPOINT", self.s3.endpoint())
            .env("KVGATE__S3__BUCKET", BUCKET)
            .env("KVGATE__S3__PREFIX", PREFIX);
        command
    }

    pub async fn say(&self, args: &[&str]) -> Said {
        Said::new(self.command(args).output().await.unwrap())
    }
}

/// A command without the environment's credentials and configuration.
pub fn kvgate(home: &Path, args: &[&str]) -> Command {
    kvgate_under(&[], home, args)
}

/// The same, run by another program.
pub fn kvgate_under(wrapper: &[&str], home: &Path, args: &[&str]) -> Command {
    let words = [wrapper, &[env!("CARGO_BIN_EXE_kvgate")]].concat();
    let mut command = Command::new(words[0]);
    command.args(&words[1..]);
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("AWS_") || text.to_uppercase().starts_with("KVGATE__") {
            command.env_remove(&name);
        }
    }
    command
        .env("AWS_EC2_METADATA_DISABLED", "true")
        .env("HOME", home)
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

/// The output of a command.
#[derive(Debug)]
pub struct Said {
    pub status: i32,
    pub out: String,
    pub err: String,
}

impl Said {
    pub fn new(output: Output) -> Self {
        Self {
            status: output.status.code().unwrap_or(-1),
            out: String::from_utf8(output.stdout).unwrap(),
            err: String::from_utf8(output.stderr).unwrap(),
        }
    }

    #[track_caller]
    pub fn exits(self, status: i32) -> Self {
        assert_eq!(self.status, status, "{self:?}");
        assert!(!self.err.contains("panicked"), "{self:?}");
        self
    }

    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Both outputs, for messages that may stand in either.
    #[track_caller]
    pub fn says(self, parts: &[&str]) -> Self {
        for part in parts {
            assert!(
                self.out.contains(part) || self.err.contains(part),
                "{part:?} is missing: {self:?}"
            );
        }
        self
    }
}

pub async fn say(args: &[&str]) -> Said {
    let home = TempDir::new().unwrap();
    Said::new(kvgate(home.path(), args).output().await.unwrap())
}
