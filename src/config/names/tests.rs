//! Names that are accepted, and names that are refused with the text to type.

use super::*;

fn refused<T: std::fmt::Debug>(check: fn(&str) -> Result<T, String>, cases: &[(&str, &str)]) {
    for (text, why) in cases {
        let fault = check(text).unwrap_err();
        assert!(fault.contains(why), "{text:?}: {fault}");
    }
}

#[test]
fn endpoints() {
    for good in [
        "http://rgw",
        "https://rgw.example:7480",
        "http://10.0.0.7:1",
        "http://[::1]:7480",
        "http://[::1]",
        "http://ceph_rgw:80",
    ] {
        assert_eq!(endpoint(good).as_deref(), Ok(good));
        assert_eq!(endpoint(&format!("{good}/")).as_deref(), Ok(good));
    }
    refused(
        endpoint,
        &[
            ("rgw:7480", "begin with http"),
            ("s3://rgw", "begin with http"),
            ("HTTP://rgw", "begin with http"),
            ("http://rgw/bucket", "path"),
            ("http://rgw//", "path"),
            ("http://rgw?x", "path"),
            ("http://rgw:", "port"),
            ("http://rgw:0", "port"),
            ("http://rgw:65536", "port"),
            ("http://rgw:+80", "port"),
            ("http://", "host"),
            ("http://:80", "host"),
            ("http://-rgw", "host"),
            ("http://rgw..example", "host"),
            ("http://10.0.0.300", "host"),
            ("http://[::g]", "host"),
            ("http://::1", "host"),
            ("http://r g w", "host"),
            ("http://rgw\n", "host"),
        ],
    );
}

#[test]
fn a_password_in_an_endpoint_is_not_repeated() {
    for text in [
        "https://user:hunter2@rgw",
        "user:hunter2@rgw",
        "https://rgw/?X-Amz-Signature=hunter2",
    ] {
        assert!(!endpoint(text).unwrap_err().contains("hunter2"));
    }
}

#[test]
fn hosts_of_endpoints() {
    for (text, host, address) in [
        ("http://rgw:7480", "rgw", false),
        ("https://10.0.0.7", "10.0.0.7", true),
        ("http://[::1]:80", "[::1]", true),
    ] {
        assert_eq!((host_of(text), is_address(host)), (host, address));
    }
}

#[test]
fn buckets() {
    let longest = "b".repeat(63);
    for good in ["abc", "kv-cache", "a.b.c", "0-0", &longest] {
        assert_eq!(bucket(good).as_deref(), Ok(good));
    }
    refused(
        bucket,
        &[
            ("ab", "is 2 characters"),
            (&"b".repeat(64), "is 64 characters"),
            ("Kv-cache", "'K'"),
            ("kv_cache", "'_'"),
            ("kv/cache", "'/'"),
            ("-kv", "begins or ends"),
            ("kv.", "begins or ends"),
            ("k..v", "two dots"),
            ("10.0.0.7", "IP address"),
            ("xn--kv", "reserves"),
            ("kv-s3alias", "reserves"),
        ],
    );
}

#[test]
fn prefixes() {
    let longest = "p".repeat(256);
    for good in ["", "kvgate", "a/b.c/d", &longest] {
        assert_eq!(prefix(good).as_deref(), Ok(good));
    }
    refused(
        prefix,
        &[
            ("/a", "begins or ends"),
            ("a/", "begins or ends"),
            ("a//b", "\"//\""),
            ("a/../b", "\"..\""),
            ("a b", "' '"),
            ("\u{e9}", "'\u{e9}'"),
            ("a\0", "'\\0'"),
            (&"p".repeat(257), "257 bytes"),
        ],
    );
}

#[test]
fn regions_and_paths() {
    assert_eq!(region("default").as_deref(), Ok("default"));
    refused(
        region,
        &[("", "is not"), ("eu west", "is not"), (&"r".repeat(65), "is not")],
    );
    assert_eq!(
        absolute_path("/dev/shm/kvgate"),
        Ok(PathBuf::from("/dev/shm/kvgate"))
    );
    assert_eq!(file_path("ca.pem"), Ok(PathBuf::from("ca.pem")));
    refused(
        absolute_path,
        &[("shm/kvgate", "does not begin with '/'"), ("/a\0", "control")],
    );
}
