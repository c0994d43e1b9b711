//! Valid configurations: their values, their sources, and how they are shown.

use super::*;
use crate::protocol::Strategy;

#[test]
fn defaults() {
    let config = Config::default();
    assert_eq!(config.s3.endpoint, None);
    assert_eq!(config.s3.region, "us-east-1");
    assert_eq!(config.s3.part_size, ByteSize(16 * MIB));
    assert_eq!(config.lookup.present_ttl, Duration::from_mins(10));
    assert_eq!(config.lookup.strategy, Strategy::Prefix);
    assert_eq!(config.log.level, LogLevel::Info);
}

#[test]
fn every_key_is_written_as_it_is_shown() {
    for loaded in [
        load(None, env(&[]), &[]).unwrap(),
        load_file("good.toml").unwrap(),
    ] {
        let shown = loaded.show();
        let again: Vec<Override> = shown
            .iter()
            .map(|row| flag(row.path, &row.value, "--again"))
            .collect();
        let again = load(None, env(&[]), &again).unwrap();
        assert_eq!(again.config, loaded.config);
        assert!(
            again
                .origins
                .values()
                .all(|origin| *origin == SettingOrigin::Flag("--again"))
        );
        assert_eq!(again.origins.len(), shown.len());
    }
}

#[test]
fn every_default_is_in_its_canonical_spelling_and_every_key_is_documented() {
    for row in load(None, env(&[]), &[]).unwrap().show() {
        assert_eq!(row.value, row.default, "{}", row.path);
        assert_eq!(row.origin, SettingOrigin::Default);
        assert!(row.doc.ends_with('.') && !row.accepts.is_empty(), "{}", row.path);
    }
}

#[test]
fn good_files_say_the_same_in_each_format() {
    let toml = load_file("good.toml").unwrap();
    assert_eq!(
        toml.config.s3.endpoint.as_deref(),
        Some("https://rgw.example:7480")
    );
    assert_eq!(toml.config.s3.retry_base, Duration::from_millis(100));
    assert_eq!(toml.config.arena.path, Some(PathBuf::from("/dev/shm/kvgate")));
    assert_eq!(toml.config.store.in_flight, ByteSize(128 * MIB));
    for row in toml.show() {
        assert_ne!(
            row.value, row.default,
            "good.toml leaves {} at its default",
            row.path
        );
        assert_eq!(row.origin, SettingOrigin::File(fixture("good.toml")));
    }
    assert_eq!(load_file("good.yaml").unwrap().config, toml.config);
    assert_eq!(load_file("good.json").unwrap().config, toml.config);
}

#[test]
fn later_sources_win_and_are_named() {
    let file = fixture("good.toml");
    let pairs = [
        ("KVGATE__S3__BUCKET", "from-env"),
        ("KVGATE__S3__PREFIX", "from-env"),
    ];
    let flags = [
        flag("s3.bucket", "first-flag", "--bucket"),
        flag("s3.bucket", "last-flag", "--bucket"),
    ];
    let loaded = load(Some(&file), env(&pairs), &flags).unwrap();

    assert_eq!(loaded.config.s3.bucket.as_deref(), Some("last-flag"));
    assert_eq!(loaded.config.s3.prefix, "from-env");
    assert_eq!(loaded.config.s3.region, "eu-central-1");
    assert_eq!(loaded.origins["s3.bucket"], SettingOrigin::Flag("--bucket"));
    assert_eq!(
        loaded.origins["s3.prefix"],
        SettingOrigin::Env("KVGATE__S3__PREFIX".to_owned())
    );
    assert_eq!(loaded.origins["s3.region"], SettingOrigin::File(file));
    assert_eq!(
        load(None, env(&[]), &[]).unwrap().origins["s3.region"],
        SettingOrigin::Default
    );
}

#[test]
fn empty_text_unsets_an_optional_key() {
    let unset = [("KVGATE__S3__CA_FILE", "")];
    let loaded = load(Some(&fixture("good.toml")), env(&unset), &[]).unwrap();
    assert_eq!(loaded.config.s3.ca_file, None);
    assert_problems(
        load_env(&[("KVGATE__S3__REGION", "")]),
        &[("s3.region", "is not a region name")],
    );
}

#[test]
fn a_section_without_keys_is_empty() {
    let mut file = tempfile::Builder::new().suffix(".yml").tempfile().unwrap();
    file.write_all(b"s3:\n  # bucket: x\nlog: {}\n").unwrap();
    assert_eq!(
        load(Some(file.path()), env(&[]), &[]).unwrap().config,
        Config::default()
    );
    assert_eq!(load_text("").unwrap().config, Config::default());
    assert_eq!(
        load_text("\u{feff}[log]\nlevel = 'warn'")
            .unwrap()
            .config
            .log
            .level,
        LogLevel::Warn
    );
}

#[test]
fn reports_serialise() {
    let loaded = load_env(&[("KVGATE__LOG__LEVEL", "warn")]).unwrap();
    let rows = serde_json::to_value(loaded.show()).unwrap();
    let row = rows
        .as_array()
        .unwrap()
        .iter()
        .find(|row| row["path"] == "log.level")
        .unwrap();
    assert_eq!(row["value"], "warn");
    assert_eq!(
        row["origin"],
        serde_json::json!({"kind": "env", "name": "KVGATE__LOG__LEVEL"})
    );
    assert_eq!(rows[0]["origin"], serde_json::json!({"kind": "default"}));

    let problems = serde_json::to_value(load_file("bad-extension.ini").unwrap_err()).unwrap();
    assert_eq!(problems[0]["origin"]["kind"], "file");
    assert_eq!(problems[0].get("path"), None);
}
