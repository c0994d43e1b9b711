//! Refused configurations: all problems at once, each with the text to type.

use super::*;

#[test]
fn many_problems_are_told_at_once() {
    let pairs = [("KVGATE__S3__RETRY_BUDGET", "lots"), ("KVGATE__NOPE__X", "1")];
    let flags = [flag("s3.region", "mars 1", "--region")];
    let result = load(Some(&fixture("bad-many.toml")), env(&pairs), &flags);
    let text = result.as_ref().unwrap_err().to_string();
    assert!(text.starts_with("14 problems in the configuration\n"), "{text}");
    assert!(!text.contains("hunter2"), "{text}");
    assert!(
        text.contains("bad-many.toml): unknown key; did you mean `part_size`?"),
        "{text}"
    );
    assert!(
        text.contains("nope.x (environment KVGATE__NOPE__X): unknown key; the sections are s3, dns"),
        "{text}"
    );
    assert_problems(
        result,
        &[
            ("bucket", "did you mean `bucket` in section `s3`?"),
            (
                "s3.endpoint",
                "does not begin with http:// or https://; write http://host[:port]",
            ),
            ("s3.part_sise", "did you mean `part_size`?"),
            (
                "s3.retries",
                "\"21\" is too large; allowed is a whole number from 0 to 20",
            ),
            (
                "s3.probe",
                "\"hed\" is not one of auto, head, attributes; did you mean \"head\"?",
            ),
            ("s3.secret_key", "AWS_SECRET_ACCESS_KEY"),
            ("s3.path_style", "\"yes\" is neither true nor false"),
            ("lookpu", "unknown section; did you mean `lookup`?"),
            (
                "lookup.deadline",
                "\"-1\" is negative; write a duration such as 50ms",
            ),
            (
                "lookup.concurrency",
                "\"0\" is too small; allowed is a whole number from 1 to 4096",
            ),
            (
                "lookup.size",
                "did you mean `size` in section `arena` or `size` in section `disk` or `size` in section `gc`?",
            ),
            ("s3.retry_budget", "\"lots\" is not a whole number"),
            ("s3.region", "\"mars 1\" is not a region name"),
            ("nope.x", "the sections are"),
        ],
    );
}

#[test]
fn the_wrong_shape_is_a_problem_and_no_panic() {
    assert_problems(
        load_file("bad-types.yaml"),
        &[
            ("s3.bucket", "is a table; write 3 to 63"),
            ("s3.prefix", "must be text, in quotes"),
            ("s3.retries", "is a list; write a whole number from 0 to 20"),
            ("s3.part_size", "\"true\" is not a number with a unit"),
            ("s3.path_style", "\"1\" is neither true nor false"),
            ("s3.connect_timeout", "\"1.5\" has no unit"),
            ("s3.region", "\"\" is not a region name"),
            ("lookup", "is a section, not a value; its keys are strategy"),
        ],
    );
}

#[test]
fn names_that_the_config_crate_would_read_as_paths() {
    let text = "\"s3[99999999999]\" = 1\n\"s3.bucket\" = \"x\"\n[s3]\n\"a\\nb\" = 1\n[s3.retries]\nx = 1\n";
    assert_problems(
        load_text(text),
        &[
            ("s3[99999999999]", "unknown key"),
            ("s3.bucket", "did you mean `bucket` in section `s3`?"),
            ("s3.a\nb", "unknown key; section `s3` has endpoint, bucket"),
            ("s3.retries", "is a table"),
        ],
    );
    assert_problems(
        load_env(&[("KVGATE__S3[9999999999]__X", "")]),
        &[("s3[9999999999].x", "unknown key")],
    );
}

#[test]
fn which_environment_variables_are_configuration() {
    let ignored = [
        ("KVGATE_TEST_S3", "x"),
        // Kubernetes has such for services.
        ("KVGATE_PEERS_PORT", "tcp://10.0.0.1:9181"),
        ("KVGATE_", "x"),
        ("KVGAT\u{e9}", "x"),
        ("PATH", "x"),
    ];
    assert_eq!(load_env(&ignored).unwrap().config, Config::default());
    assert_problems(
        load_env(&[
            ("KVGATE__S3__PARTSIZE", "1"),
            ("KVGATE__S4__BUCKET", "1"),
            ("KVGATE__BUCKET", "1"),
            ("kvgate__s3__prefix", "1"),
            ("KVGATE__S3", "1"),
            ("KVGATE__", "1"),
            ("KVGATE__S3__RETRIES__X", "1"),
            ("KVGATE_S3_PART_SIZE", "1"),
            ("KVGATE__S3_REGION", "1"),
            ("KVGATE_DISK__PATHS", "1"),
        ]),
        &[
            ("s3.partsize", "did you mean `KVGATE__S3__PART_SIZE`?"),
            ("s4.bucket", "did you mean `KVGATE__S3__BUCKET`?"),
            ("bucket", "did you mean `KVGATE__S3__BUCKET`?"),
            ("s3.prefix", "did you mean `KVGATE__S3__PREFIX`?"),
            ("s3", "unknown key; the sections are"),
            ("", "unknown key; the sections are"),
            ("s3.retries.x", "did you mean `KVGATE__S3__RETRIES`?"),
            ("s3.part_size", "did you mean `KVGATE__S3__PART_SIZE`?"),
            ("s3_region", "did you mean `KVGATE__S3__REGION`?"),
            ("disk.paths", "did you mean `KVGATE__DISK__PATHS`?"),
        ],
    );
}

#[test]
fn an_unknown_override_is_a_problem() {
    let flags = [flag("s3.bukcet", "x", "--bucket")];
    assert_problems(
        load(None, env(&[]), &flags),
        &[("s3.bukcet", "did you mean `s3.bucket`?")],
    );
}

#[test]
fn files_that_cannot_be_used() {
    for (name, snippets) in [
        ("bad-syntax.toml", &["is not valid TOML", "line 3, column 13"][..]),
        ("bad-syntax.yaml", &["is not valid YAML", "line 3"]),
        ("bad-syntax.json", &["is not valid JSON", "line 4 column 3"]),
        ("bad-root.yaml", &["is not valid YAML", "expected a map"]),
        (
            "bad-extension.ini",
            &["unknown extension \"ini\"; use .toml, .yaml, .yml or .json"],
        ),
        ("missing.toml", &["cannot be read: No such file"]),
    ] {
        let text = load_file(name).unwrap_err().to_string();
        assert_eq!(text.lines().count(), 2, "{text}");
        for snippet in snippets.iter().chain(&[name]) {
            assert!(text.contains(snippet), "no {snippet:?} in {text}");
        }
    }
    let mut deep = tempfile::Builder::new().suffix(".yaml").tempfile().unwrap();
    write!(deep, "log:\n{}", "- ".repeat(10_000)).unwrap();
    let result = load(Some(deep.path()), env(&[]), &[]);
    assert_problems(result, &[("", "line 2 is longer than 512 bytes")]);
    let folder = tempfile::Builder::new().suffix(".toml").tempdir().unwrap();
    assert_problems(
        load(Some(folder.path()), env(&[]), &[]),
        &[("", "cannot be read: Is a directory")],
    );
    assert_problems(load_text(&"#".repeat(1 << 17)), &[("", "larger than 64KiB")]);
}

#[test]
fn a_file_that_cannot_be_used_does_not_hide_other_problems() {
    let pairs = [("KVGATE__S3__PROBE", "x")];
    let result = load(Some(&fixture("bad-syntax.toml")), env(&pairs), &[]);
    assert_problems(
        result,
        &[
            ("", "is not valid TOML"),
            ("s3.probe", "is not one of auto, head, attributes"),
        ],
    );
}

#[test]
fn values_that_do_not_go_together() {
    assert_problems(
        load_file("bad-together.toml"),
        &[
            ("s3.retry_base", "3s is longer than s3.retry_max, 2s"),
            ("dns.min_ttl", "2m is longer than dns.max_ttl, 1m"),
            (
                "endpoints.breaker_open",
                "2m is longer than endpoints.breaker_open_max, 30s",
            ),
            (
                "endpoints.window",
                "4MiB is not between endpoints.window_min, 8MiB",
            ),
            ("dns.srv", "s3.endpoint must be one URL"),
            (
                "load.in_flight",
                "256MiB is smaller than one part; write at least s3.part_size, 512MiB",
            ),
            ("s3.ca_file", "s3.endpoint is http://"),
            ("s3.path_style", "s3.endpoint is an IP address; write true"),
        ],
    );
}

#[test]
fn a_bucket_that_needs_another_authentication_is_refused() {
    for (name, why) in [
        ("kv--use1-az4--x-s3", "name a general purpose bucket"),
        ("kv-ab12--op-s3", "which S3 reserves"),
    ] {
        assert_problems(load_env(&[("KVGATE__S3__BUCKET", name)]), &[("s3.bucket", why)]);
    }
}

#[test]
fn limits_are_inclusive() {
    let size = |value| {
        load_env(&[
            ("KVGATE__S3__PART_SIZE", value),
            ("KVGATE__LOAD__IN_FLIGHT", "1TiB"),
            ("KVGATE__STORE__IN_FLIGHT", "1TiB"),
        ])
    };
    assert_eq!(size("1MiB").unwrap().config.s3.part_size, ByteSize(MIB));
    assert_eq!(size("5GiB").unwrap().config.s3.part_size, ByteSize(5120 * MIB));
    assert_problems(
        size("1048575"),
        &[("s3.part_size", "too small; allowed is a size from 1MiB to 5GiB")],
    );
    assert_problems(
        size("5.1GiB"),
        &[("s3.part_size", "too large; allowed is a size from 1MiB to 5GiB")],
    );
    let wait = |value| load_env(&[("KVGATE__LOOKUP__ABSENT_TTL", value)]);
    assert_eq!(wait("0").unwrap().config.lookup.absent_ttl, Duration::ZERO);
    assert_problems(
        wait("61m"),
        &[("lookup.absent_ttl", "allowed is a duration from 0s to 1h")],
    );
    assert_problems(
        wait("soon"),
        &[(
            "lookup.absent_ttl",
            "in ns, us, ms, s, m, h, d; allowed is a duration",
        )],
    );
}
