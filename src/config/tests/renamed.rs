//! Keys and flags by their old names, with made-up renames.

use super::*;
use crate::config::renames::{RENAMES, Rename};
use crate::config::unknown::keys_of;

const MADE_UP: &[Rename] = &[
    rename("s3.parts", "s3.part_size"),
    rename("cache.eviction", "memory.policy"),
    rename("cache.age", "memory.ttl"),
    rename("--store-at", "--endpoint"),
];

const fn rename(old: &'static str, new: &'static str) -> Rename {
    Rename {
        old,
        new,
        refused_in: "9.0.0",
    }
}

fn load_made_up(
    text: &str,
    pairs: &[(&str, &str)],
    flags: &[Override],
) -> (PathBuf, Result<LoadedConfig, ConfigError>) {
    let mut file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    let loaded = load_renamed(Some(file.path()), env(pairs), flags, MADE_UP);
    (file.path().to_owned(), loaded)
}

fn warnings(loaded: &LoadedConfig) -> Vec<String> {
    loaded.warnings.iter().map(ToString::to_string).collect()
}

fn shown(loaded: &LoadedConfig, path: &str) -> Shown {
    loaded.show().into_iter().find(|key| key.path == path).unwrap()
}

#[test]
fn a_file_may_have_the_old_name_and_is_told_the_new_one_once() {
    let (file, loaded) = load_made_up("[s3]\nparts = \"32MiB\"\nbucket = \"kv-cache\"\n", &[], &[]);
    let loaded = loaded.unwrap();
    assert_eq!(loaded.config.s3.part_size, ByteSize(32 * MIB));
    assert_eq!(loaded.config.s3.bucket.as_deref(), Some("kv-cache"));
    let told = format!(
        "s3.parts (file {}): is called `s3.part_size` now: write that, since kvgate 9.0.0 refuses the old name",
        file.display()
    );
    assert_eq!(warnings(&loaded), [told]);
    let key = shown(&loaded, "s3.part_size");
    assert_eq!(key.origin, SettingOrigin::File(file));
    assert_eq!(key.written_as, Some("s3.parts"));
    assert_eq!(shown(&loaded, "s3.bucket").written_as, None);
}

#[test]
fn a_section_that_is_no_more_is_read_by_its_keys() {
    let text = "[cache]\neviction = \"lru\"\nage = \"5m\"\n";
    let loaded = load_made_up(text, &[], &[]).1.unwrap();
    let default = Config::default();
    assert_ne!(loaded.config.memory, default.memory);
    assert_eq!(shown(&loaded, "memory.policy").value, "lru");
    assert_eq!(shown(&loaded, "memory.ttl").value, "5m");
    assert_eq!(loaded.warnings.len(), 2);
    // Its other keys are as unknown as ever.
    let loaded = load_made_up("[cache]\neviction = \"lru\"\nsize = 1\n", &[], &[]).1;
    assert_problems(loaded, &[("cache", "unknown section")]);
}

#[test]
fn a_file_that_uses_new_and_old_names_of_different_keys() {
    let text = "[memory]\nttl = \"5m\"\n[cache]\neviction = \"lru\"\n";
    let loaded = load_made_up(text, &[], &[]).1.unwrap();
    assert_eq!(shown(&loaded, "memory.ttl").value, "5m");
    assert_eq!(shown(&loaded, "memory.policy").value, "lru");
    assert_eq!(loaded.warnings.len(), 1);
}

#[test]
fn the_environment_may_have_the_old_name() {
    let pairs = [("KVGATE__S3__PARTS", "32MiB")];
    let loaded = load_made_up("", &pairs, &[]).1.unwrap();
    assert_eq!(loaded.config.s3.part_size, ByteSize(32 * MIB));
    let told = "s3.parts (environment KVGATE__S3__PARTS): is called `KVGATE__S3__PART_SIZE` now: write that, since kvgate \
                9.0.0 refuses the old name";
    assert_eq!(warnings(&loaded), [told]);
    let key = shown(&loaded, "s3.part_size");
    assert_eq!(key.origin, SettingOrigin::Env("KVGATE__S3__PARTS".into()));
    assert_eq!(key.written_as, Some("s3.parts"));
    // In the wrong case it is no name at all; the advice has the new one.
    let loaded = load_made_up("", &[("kvgate__s3__parts", "32MiB")], &[]).1;
    assert_problems(
        loaded,
        &[("s3.parts", "unknown key; did you mean `KVGATE__S3__PART_SIZE`?")],
    );
}

#[test]
fn later_sources_win_over_earlier_ones_by_the_old_name_too() {
    let pairs = [("KVGATE__S3__PARTS", "32MiB")];
    let loaded = load_made_up("[s3]\nparts = \"8MiB\"\n", &pairs, &[]).1.unwrap();
    assert_eq!(loaded.config.s3.part_size, ByteSize(32 * MIB));
    // Both have to be changed.
    assert_eq!(loaded.warnings.len(), 2);

    let flags = [flag("s3.part_size", "64MiB", "--part-size")];
    let loaded = load_made_up("[s3]\nparts = \"8MiB\"\n", &[], &flags).1.unwrap();
    assert_eq!(loaded.config.s3.part_size, ByteSize(64 * MIB));
    assert_eq!(loaded.warnings.len(), 1);
    let key = shown(&loaded, "s3.part_size");
    assert_eq!(key.origin, SettingOrigin::Flag("--part-size"));
    assert_eq!(key.written_as, None, "the value is the flag's");
}

#[test]
fn both_names_are_a_problem_wherever_they_are() {
    let new = [("KVGATE__S3__PART_SIZE", "32MiB")];
    let old = [("KVGATE__S3__PARTS", "32MiB")];
    let both = [old[0], new[0]];
    for (text, pairs, other) in [
        (
            "[s3]\nparts = \"8MiB\"\npart_size = \"8MiB\"\n",
            &[][..],
            "(file ",
        ),
        (
            "[s3]\nparts = \"8MiB\"\n",
            &new[..],
            "(environment KVGATE__S3__PART_SIZE)",
        ),
        ("[s3]\npart_size = \"8MiB\"\n", &old[..], "(file "),
        ("", &both[..], "(environment KVGATE__S3__PART_SIZE)"),
    ] {
        let (_, loaded) = load_made_up(text, pairs, &[]);
        let told = loaded.as_ref().unwrap_err().to_string();
        assert!(told.contains(other), "{told}");
        assert_problems(loaded, &[("s3.parts", "which is given too")]);
    }
}

#[test]
fn a_flag_may_have_the_old_name() {
    let old = flag("s3.endpoint", "http://a:1", "--store-at");
    let new = flag("s3.endpoint", "http://b:1", "--endpoint");
    let loaded = load_made_up("", &[], std::slice::from_ref(&old)).1.unwrap();
    assert_eq!(loaded.config.s3.endpoint.as_deref(), Some("http://a:1"));
    let told = "--store-at (flag --store-at): is called `--endpoint` now: write that, since kvgate 9.0.0 refuses the old \
                name";
    assert_eq!(warnings(&loaded), [told]);
    let loaded = load_made_up("", &[], std::slice::from_ref(&new)).1.unwrap();
    assert!(loaded.warnings.is_empty());
    assert_problems(
        load_made_up("", &[], &[old, new]).1,
        &[(
            "--store-at",
            "is the old name of `--endpoint`, which is given too",
        )],
    );
}

#[test]
fn a_bad_value_is_told_by_the_name_that_was_written() {
    let loaded = load_made_up("[s3]\nparts = \"lots\"\n", &[], &[]).1;
    assert_problems(loaded, &[("s3.parts", "\"lots\" is not a number with a unit")]);
    let loaded = load_made_up("[s3.parts]\nx = 1\n", &[], &[]).1;
    assert_problems(loaded, &[("s3.parts", "is a table")]);
    // Of two keys that must fit together as well.
    let loaded = load_made_up(
        "[s3]\nparts = \"1GiB\"\n[load]\nin_flight = \"512MiB\"\n",
        &[],
        &[],
    )
    .1;
    assert_problems(loaded, &[("load.in_flight", "is smaller than one part")]);
}

#[test]
fn the_file_that_show_writes_has_the_new_names_alone() {
    let loaded = load_made_up("[s3]\nparts = \"32MiB\"\n", &[], &[]).1.unwrap();
    assert!(loaded.show().iter().all(|key| key.path != "s3.parts"));
    // For the chart's schema.
    assert_eq!(shown(&loaded, "memory.policy").old_names, ["cache.eviction"]);
    assert!(shown(&loaded, "s3.bucket").old_names.is_empty());
}

/// The table of this release: whoever renames a key sees here what is missing.
#[test]
fn the_renames_of_this_release_are_of_keys_that_there_are_and_end_with_it() {
    let numbers = |version: &str| -> Vec<u64> {
        let release = version.split('-').next().unwrap_or_default();
        release.split('.').map(|number| number.parse().unwrap()).collect()
    };
    let is_key = |path: &str| {
        let (section, key) = path.split_once('.').unwrap_or(("", path));
        keys_of(section).is_some_and(|keys| keys.contains(&key))
    };
    for Rename { old, new, refused_in } in RENAMES {
        assert_eq!(old.starts_with("--"), new.starts_with("--"), "{old} is now {new}");
        assert!(new.starts_with("--") || is_key(new), "{new} is no key");
        assert!(!is_key(old), "{old} is still a key");
        assert!(
            numbers(refused_in) > numbers(env!("CARGO_PKG_VERSION")),
            "this is release {refused_in}: take the entry of {old} out of src/config/renames.rs, and a flag's old name out \
             of its command"
        );
    }
}
