//! `kvgate doctor` on good servers, on lacking ones, and on each thing that goes wrong: what it names, and its advice.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, SystemTime};

use aws_credential_types::Credentials;
use aws_sdk_s3::config::{BehaviorVersion, Region};
use kvgate::arena::{Arena, ArenaOptions};
use kvgate::format::Space;
use serde_json::Value;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::process::Command;

use crate::support::backends::{Backend, on_backends, skip_because};
use crate::support::capped::Capped;
use crate::support::daemon::Site;
use crate::support::dns_server::{A, DnsServer, Dnsmasq, Record, Reply};
use crate::support::fixture::soon;
use crate::support::fleet::certificates;
use crate::support::program::{PREFIX, Place, Said, kvgate, kvgate_under};
use crate::support::tls_front::TlsFront;
use crate::support::way;

const BUCKET: &str = "kvgate-it";
const NAME: &str = "s3.kvgate.test";

on_backends! {
    each_server_is_judged_by_what_it_does: embedded, rgw, minio, rclone, swift;
    wrong_keys_are_told_from_all_else: rgw, minio;
}

/// The findings of one examination.
#[derive(Debug)]
struct Findings {
    json: Value,
    status: i32,
}

impl Findings {
    #[track_caller]
    fn of(said: &Said) -> Self {
        assert!(!said.err.contains("panicked"), "{said:?}");
        let json = said.json();
        let findings = Self {
            json,
            status: said.status,
        };
        for finding in findings.all() {
            let needs = matches!(finding["verdict"].as_str(), Some("warning" | "failed"));
            let advice = finding["do"].as_str().unwrap_or_default();
            assert!(!needs || !advice.is_empty(), "nothing to do: {finding}");
        }
        let failed = findings.json["failed"].as_u64().unwrap();
        assert_eq!(findings.status, i32::from(failed > 0), "{findings:?}");
        findings
    }

    fn all(&self) -> &[Value] {
        self.json["findings"].as_array().unwrap()
    }

    fn verdict(&self, check: &str) -> Vec<&str> {
        let of = self.all().iter().filter(|finding| finding["check"] == check);
        of.filter_map(|finding| finding["verdict"].as_str()).collect()
    }

    /// One of this check has this verdict, and these words in what was seen or is to do.
    #[track_caller]
    fn has(&self, check: &str, verdict: &str, words: &[&str]) -> &Self {
        let fits = |finding: &&Value| {
            let text = finding.to_string();
            finding["check"] == check
                && finding["verdict"] == verdict
                && words.iter().all(|word| text.contains(word))
        };
        assert!(
            self.all().iter().any(|finding| fits(&finding)),
            "no {check} that is {verdict} with {words:?}: {self:#?}"
        );
        self
    }

    /// Nothing but these checks failed.
    #[track_caller]
    fn fails_only(&self, checks: &[&str]) -> &Self {
        for finding in self.all().iter().filter(|finding| finding["verdict"] == "failed") {
            let check = finding["check"].as_str().unwrap();
            assert!(checks.contains(&check), "{finding}");
        }
        assert_eq!(checks.is_empty(), self.status == 0, "{self:#?}");
        self
    }
}

/// The parts of S3 alone.
const S3_ALONE: [&str; 10] = [
    "doctor", "--json", "--skip", "engines", "--skip", "memory", "--skip", "gpu", "--skip", "api",
];

fn examination(backend: &Backend, endpoint: &str) -> Command {
    examination_under(&[], backend, endpoint)
}

fn examination_under(wrapper: &[&str], backend: &Backend, endpoint: &str) -> Command {
    let mut command = kvgate_under(wrapper, Path::new("/nonexistent"), &S3_ALONE);
    command
        .arg("--transfer-size=1MiB")
        .env("KVGATE__S3__ENDPOINT", endpoint)
        .env("KVGATE__S3__BUCKET", BUCKET)
        .env("KVGATE__S3__PREFIX", "doctor")
        .envs(backend.credentials());
    command
}

async fn findings(command: &mut Command) -> Findings {
    Findings::of(&Said::new(command.output().await.unwrap()))
}

async fn rgw(test: &str) -> Option<Backend> {
    let backend = Backend::find("rgw", test).await?;
    backend.store().await;
    Some(backend)
}

async fn each_server_is_judged_by_what_it_does(backend: &Backend) {
    let store = backend.store().await;
    let prefix = format!("doctor-{:016x}", fastrand::u64(..));
    let mut command = examination(backend, &backend.endpoints[0]);
    let found = findings(command.env("KVGATE__S3__PREFIX", &prefix)).await;
    found.fails_only(&[]);
    for check in [
        "configuration",
        "dns",
        "addresses",
        "clock",
        "credentials",
        "region",
        "bucket",
        "path_style",
        "write",
        "read",
    ] {
        assert_eq!(found.verdict(check), ["ok"], "{check}: {found:#?}");
    }
    found.has("cleanup", "ok", &["nothing is left"]);
    found.has("transfer", found.verdict("transfer")[0], &["MiB/s"]);
    let nothing_honoured = || {
        found
            .has("if_none_match", "warning", &[])
            .has("if_match", "warning", &[]);
    };
    match backend.name {
        "rclone" => {
            nothing_honoured();
            found
                .has("if_none_match", "warning", &["silently overwrites"])
                .has("range", "warning", &["200 in place of 206"])
                .has("get_if_match", "warning", &["answered with 200"]);
        }
        "swift" => {
            nothing_honoured();
            found.has("if_none_match", "warning", &["not implemented", "501"]);
            found.has("range", "ok", &["206"]);
        }
        name => {
            for check in ["range", "get_if_match", "if_none_match", "if_match"] {
                assert_eq!(found.verdict(check), ["ok"], "{check}: {found:#?}");
            }
            let attributes = if name == "minio" { "works" } else { "asked by HEAD" };
            found.has("attributes", "ok", &[attributes]);
        }
    }
    let left = store.list(&prefix, None, soon()).await.unwrap();
    assert_eq!(left.objects, [], "nothing is left");
}

async fn wrong_keys_are_told_from_all_else(backend: &Backend) {
    backend.store().await;
    for (variable, words) in [
        ("AWS_ACCESS_KEY_ID", "no such access key"),
        (
            "AWS_SECRET_ACCESS_KEY",
            "secret key is not that of this access key",
        ),
    ] {
        let found = findings(examination(backend, &backend.endpoints[0]).env(variable, "nobodys")).await;
        found
            .has("credentials", "failed", &[words])
            .has("bucket", "not_checked", &["does not accept the credentials"])
            .has("transfer", "not_checked", &[])
            .fails_only(&["credentials"]);
        assert!(
            !found.json.to_string().contains(backend.credentials()[1].1),
            "no secrets"
        );
    }
    let mut other = examination(backend, &backend.endpoints[0]);
    let found = findings(other.env("KVGATE__S3__BUCKET", "kvgate-no-such")).await;
    found
        .has("bucket", "failed", &["no bucket kvgate-no-such", "--bucket"])
        .fails_only(&["bucket"]);
}

#[tokio::test]
async fn a_wrong_region_is_named_with_the_right_one() {
    let Some(minio) = Backend::find("minio", "doctor::a_wrong_region_is_named_with_the_right_one").await
    else {
        return;
    };
    minio.store().await;
    let mut command = examination(&minio, &minio.endpoints[0]);
    let found = findings(command.args(["--region", "mars-north-1"])).await;
    found
        .has("region", "failed", &["mars-north-1", "--region us-east-1"])
        .has("bucket", "not_checked", &["the region is wrong"])
        .fails_only(&["region"]);
}

/// The server itself refuses; `faketime` moves the clock of our process alone.
#[tokio::test]
async fn a_clock_that_is_off_by_an_hour() {
    let Some(rgw) = rgw("doctor::a_clock_that_is_off_by_an_hour").await else {
        return;
    };
    for (shift, side) in [("+1h", "behind"), ("-1h", "ahead of")] {
        let found = findings(&mut examination_under(
            &["faketime", "-f", shift],
            &rgw,
            &rgw.endpoints[0],
        ))
        .await;
        found
            .has("clock", "failed", &[side, "date -u"])
            .has("clock", "failed", &["RequestTimeTooSkewed", "NTP"])
            .has("credentials", "not_checked", &["clocks differ"])
            .fails_only(&["clock"]);
    }
    let minutes = findings(&mut examination_under(
        &["faketime", "-f", "+5m"],
        &rgw,
        &rgw.endpoints[0],
    ))
    .await;
    minutes.has("clock", "warning", &["300 s", "NTP"]).fails_only(&[]);
}

#[tokio::test]
async fn names_that_do_not_resolve_and_answers_that_are_cut() {
    let test = "doctor::names_that_do_not_resolve_and_answers_that_are_cut";
    let Some(rgw) = rgw(test).await else { return };
    let host = rgw.endpoints[0].trim_start_matches("http://");
    let (address, port) = host.split_once(':').unwrap();
    let Some(server) = Dnsmasq::start(test, &[address.to_owned()]) else {
        return;
    };
    let ask = |name: &str| {
        let mut command = examination(&rgw, &format!("http://{name}:{port}"));
        command.env("KVGATE__DNS__SERVERS", server.address.to_string());
        command
    };
    let good = findings(&mut ask(NAME)).await;
    good.has("dns", "ok", &[NAME, address, "TTL 1 s"])
        .has("dns", "ok", &["same 1 A records by UDP and by TCP"])
        .fails_only(&[]);

    let unknown = findings(&mut ask("nowhere.kvgate.test")).await;
    unknown
        .has(
            "dns",
            "failed",
            &["nowhere.kvgate.test does not exist", "spelled"],
        )
        .has("bucket", "not_checked", &["gives no address"])
        .fails_only(&["dns"]);
    let mut by_host = ask(NAME);
    let by_host = findings(by_host.env("KVGATE__S3__PATH_STYLE", "false")).await;
    by_host.has(
        "dns",
        "failed",
        &["kvgate-it.s3.kvgate.test", "path_style = true"],
    );

    server.set(&[address.to_owned(), "127.9.9.9".to_owned()]);
    let half = findings(&mut ask(NAME)).await;
    half.has("addresses", "ok", &["1 of 2 answer"])
        .has(
            "addresses",
            "warning",
            &["127.9.9.9:", "refused", "uses the other addresses"],
        )
        .fails_only(&[]);

    // The proxy listens on all addresses of this machine.
    let everywhere = Capped::start("0.0.0.0:0".parse().unwrap(), host.parse().unwrap(), 1 << 30).await;
    let everywhere = everywhere.unwrap();
    let many: Vec<String> = (1..=100).map(|last| format!("127.9.9.{last}")).collect();
    server.set(&many);
    let mut command = ask(NAME);
    command.env(
        "KVGATE__S3__ENDPOINT",
        format!("http://{NAME}:{}", everywhere.address().port()),
    );
    let cut = findings(&mut command).await;
    cut.has("dns", "ok", &["says that it was cut (TC)", "TCP has all 100"])
        .has("addresses", "ok", &["100 of 100 answer"])
        .fails_only(&[]);
}

/// As Consul does: the answer by UDP has few records and no TC bit.
#[tokio::test]
async fn an_answer_that_was_cut_in_silence() {
    let place = Place::new().await;
    let endpoint = place.s3.endpoint();
    let port = endpoint.rsplit_once(':').unwrap().1;
    let record = |last: u8| Record::a(NAME, 0, Ipv4Addr::new(127, 0, 0, last));
    let server = DnsServer::start(move |question| {
        let records = match (question.kind, question.tcp) {
            (A, true) => (1..=6).map(record).collect(),
            (A, false) => (1..=3).map(record).collect(),
            _ => Vec::new(),
        };
        vec![Reply::new(records)]
    })
    .await;
    for (tcp, verdict, words) in [
        ("false", "warning", "KVGATE__DNS__TCP=true"),
        ("true", "ok", "takes all"),
    ] {
        let mut command = place.command(&S3_ALONE);
        command
            .env("KVGATE__S3__ENDPOINT", format!("http://{NAME}:{port}"))
            .env("KVGATE__DNS__SERVERS", server.address.to_string())
            .env("KVGATE__DNS__TCP", tcp);
        let found = findings(&mut command).await;
        found
            .has("dns", verdict, &["3 A records by UDP and 6 by TCP", words])
            .fails_only(&[]);
    }

    let silent = DnsServer::start_without_tcp(|_| {
        vec![Reply::faulty(
            Vec::new(),
            crate::support::dns_server::Fault::Truncated,
        )]
    })
    .await;
    let mut command = place.command(&S3_ALONE);
    command
        .env("KVGATE__S3__ENDPOINT", format!("http://{NAME}:{port}"))
        .env("KVGATE__DNS__SERVERS", silent.address.to_string());
    findings(&mut command)
        .await
        .has("dns", "failed", &["TCP has no answer", "Let TCP, too, through"])
        .fails_only(&["dns"]);
}

#[tokio::test]
async fn a_certificate_of_an_authority_that_nobody_named() {
    let place = Place::new().await;
    let front = TlsFront::new(&place.s3.endpoint());
    let ask = |endpoint: &str| {
        let mut command = place.command(&S3_ALONE);
        command.env("KVGATE__S3__ENDPOINT", endpoint);
        command
    };
    findings(&mut ask(&front.endpoint))
        .await
        .has(
            "tls",
            "failed",
            &["UnknownIssuer", "ca_file", "KVGATE__S3__CA_FILE"],
        )
        .has("bucket", "not_checked", &["no address"])
        .fails_only(&["tls"]);
    findings(ask(&front.endpoint).env("KVGATE__S3__CA_FILE", &front.ca_file))
        .await
        .has("tls", "ok", &["trusted", "14 days"])
        .fails_only(&[]);
    let other_name = front.endpoint.replace("127.0.0.1", "127.0.0.1.kvgate.test");
    let dns = DnsServer::start(|question| {
        let records = match question.kind {
            A => vec![Record::a(&question.name, 1, Ipv4Addr::LOCALHOST)],
            _ => Vec::new(),
        };
        vec![Reply::new(records)]
    })
    .await;
    let mut command = ask(&other_name);
    command
        .env("KVGATE__S3__CA_FILE", &front.ca_file)
        .env("KVGATE__DNS__SERVERS", dns.address.to_string());
    findings(&mut command)
        .await
        .has(
            "tls",
            "failed",
            &["not valid for name", "Use a name that the certificate has"],
        )
        .fails_only(&["tls"]);
    findings(&mut ask(&place.s3.endpoint().replace("http:", "https:")))
        .await
        .has("tls", "failed", &["http://"])
        .fails_only(&["tls"]);
    findings(&mut ask(&front.endpoint.replace("https:", "http:")))
        .await
        .has("addresses", "failed", &["https://"])
        .fails_only(&["addresses"]);
}

#[tokio::test]
async fn a_real_radosgw_with_tls() {
    let test = "doctor::a_real_radosgw_with_tls";
    let Some(rgw) = rgw(test).await else { return };
    let (Ok(endpoints), Ok(ca)) = (
        std::env::var("KVGATE_TEST_RGW_TLS_ENDPOINTS"),
        std::env::var("KVGATE_TEST_RGW_TLS_CA"),
    ) else {
        return skip_because(test, "radosgw does not listen with TLS (KVGATE_CEPH_SSL_PORT)");
    };
    let endpoint = endpoints.split_whitespace().next().unwrap();
    findings(&mut examination(&rgw, endpoint))
        .await
        .has("tls", "failed", &["UnknownIssuer", "ca_file"])
        .fails_only(&["tls"]);
    findings(examination(&rgw, endpoint).env("KVGATE__S3__CA_FILE", ca))
        .await
        .has("tls", "ok", &["trusted"])
        .fails_only(&[]);
}

/// Ceph's second user may read and list by a policy of the bucket, and nothing else.
#[tokio::test]
async fn a_read_only_user_is_told_apart() {
    const READS: &str = "kvgate-doctor-reads";
    let test = "doctor::a_read_only_user_is_told_apart";
    let Some(rgw) = rgw(test).await else { return };
    let variable = |what: &str| std::env::var(format!("KVGATE_TEST_RGW_DENIED_{what}")).unwrap();
    let [(_, access), (_, secret)] = rgw.credentials();
    let config = aws_sdk_s3::Config::builder()
        .behavior_version(BehaviorVersion::latest())
        .region(Region::new("us-east-1"))
        .endpoint_url(&rgw.endpoints[0])
        .force_path_style(true)
        .http_client(aws_smithy_http_client::Builder::new().build_http())
        .credentials_provider(Credentials::from_keys(access, secret, None))
        .build();
    let owner = aws_sdk_s3::Client::from_conf(config);
    let _ = owner.create_bucket().bucket(READS).send().await;
    let policy = serde_json::json!({"Version": "2012-10-17", "Statement": [{
        "Effect": "Allow", "Principal": {"AWS": ["arn:aws:iam:::user/denied"]},
        "Action": ["s3:ListBucket", "s3:GetObject"],
        "Resource": [format!("arn:aws:s3:::{READS}"), format!("arn:aws:s3:::{READS}/*")],
    }]});
    owner
        .put_bucket_policy()
        .bucket(READS)
        .policy(policy.to_string())
        .send()
        .await
        .unwrap();
    let body = aws_sdk_s3::primitives::ByteStream::from(vec![7; 5000]);
    owner
        .put_object()
        .bucket(READS)
        .key("doctor/there")
        .body(body)
        .send()
        .await
        .unwrap();

    let reader = |bucket: &str| {
        let mut command = examination(&rgw, &rgw.endpoints[0]);
        command
            .env("KVGATE__S3__BUCKET", bucket)
            .env("AWS_ACCESS_KEY_ID", variable("ACCESS_KEY"))
            .env("AWS_SECRET_ACCESS_KEY", variable("SECRET_KEY"));
        command
    };
    findings(&mut reader(READS))
        .await
        .has("credentials", "ok", &["accepted"])
        .has("read", "ok", &["doctor/there can be read"])
        .has("range", "ok", &["206"])
        .has(
            "write",
            "failed",
            &["a read-only user", "AccessDenied", "s3:PutObject"],
        )
        .has("transfer", "not_checked", &["nothing may be written"])
        .fails_only(&["write"]);
    findings(reader(READS).env("KVGATE__MEMORY__STORE", "stop"))
        .await
        .has("write", "ok", &["sends no chunks to S3"])
        .fails_only(&[]);
    findings(&mut reader(BUCKET))
        .await
        .has("bucket", "failed", &["may not be listed", "s3:ListBucket"])
        .fails_only(&["bucket"]);
}

/// Nothing that it wrote stays, however far it came.
#[tokio::test]
async fn stopped_by_a_signal_it_removes_what_it_wrote() {
    let place = Place::new().await;
    let server: SocketAddr = place.s3.endpoint().trim_start_matches("http://").parse().unwrap();
    let slow = Capped::start("127.0.0.1:0".parse().unwrap(), server, 20 << 20)
        .await
        .unwrap();
    let objects = || {
        let files = std::process::Command::new("find")
            .arg(place.bucket())
            .args(["-type", "f", "-name", "transfer-*"])
            .output();
        String::from_utf8_lossy(&files.unwrap().stdout).lines().count()
    };
    for name in ["INT", "TERM"] {
        let mut command = place.command(&S3_ALONE);
        command
            .args(["--transfer-size=64MiB"])
            .env("KVGATE__S3__ENDPOINT", format!("http://{}", slow.address()));
        let child = command.spawn().unwrap();
        let pid = child.id().unwrap().to_string();
        let waits = tokio::time::Instant::now() + Duration::from_secs(60);
        while objects() == 0 {
            assert!(tokio::time::Instant::now() < waits, "nothing is written");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert!(
            std::process::Command::new("kill")
                .args([&format!("-{name}"), &pid])
                .status()
                .unwrap()
                .success()
        );
        let said = Said::new(child.wait_with_output().await.unwrap()).exits(1);
        assert_eq!(said.json()["stopped"], true, "{said:?}");
        let left = std::process::Command::new("find")
            .arg(place.bucket())
            .args(["-type", "f"])
            .output()
            .unwrap();
        assert_eq!(String::from_utf8_lossy(&left.stdout), "", "nothing is left");
    }
}

/// Each check ends in time, and says so.
#[tokio::test]
async fn a_server_that_never_answers_ends_it_no_later_than_told() {
    let hangs = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", hangs.local_addr().unwrap());
    let place = Place::new().await;
    let mut command = place.command(&S3_ALONE);
    command
        .args(["--timeout", "200ms"])
        .env("KVGATE__S3__ENDPOINT", endpoint);
    let ended = tokio::time::timeout(Duration::from_secs(60), findings(&mut command)).await;
    ended
        .expect("it ends")
        .has("addresses", "failed", &["200"])
        .fails_only(&["addresses"]);
}

/// Commands in a mount namespace of their own, so that nothing of it is seen outside.
fn with_mounts(script: &str, place: &Place, parts: &[&str]) -> Command {
    let script = format!("set -e; {script}; exec \"$@\"");
    let mut command = kvgate_under(
        &["unshare", "--mount", "sh", "-c", &script, "sh"],
        place.home.path(),
        &["doctor", "--json"],
    );
    command.args(parts.iter().flat_map(|part| ["--skip", part]));
    command
        .env("AWS_ACCESS_KEY_ID", place.s3.access_key())
        .env("AWS_SECRET_ACCESS_KEY", place.s3.secret_key())
        .env("KVGATE__S3__ENDPOINT", place.s3.endpoint())
        .env("KVGATE__S3__BUCKET", crate::support::program::BUCKET);
    command
}

#[tokio::test]
async fn a_full_disk_and_the_shared_memory_of_a_container() {
    if !rustix::process::geteuid().is_root() {
        let test = "doctor::a_full_disk_and_the_shared_memory_of_a_container";
        return skip_because(test, "it mounts file systems, which needs root");
    }
    let place = Place::new().await;
    let disk = place.home.path().join("disk");
    std::fs::create_dir(&disk).unwrap();
    let shown = disk.display();
    let others = ["s3", "engines", "gpu", "api"];

    let mount = format!(
        "mount -t tmpfs -o size=64m tmpfs /dev/shm; mount -t tmpfs -o size=256m,mode=0700 tmpfs {shown}"
    );
    let mut small = with_mounts(&mount, &place, &others);
    let found = findings(small.env("KVGATE__DISK__PATHS", &disk)).await;
    found
        .has(
            "arena",
            "failed",
            &["/dev/shm", "64 MiB in all", "--shm-size=2g", "emptyDir"],
        )
        .has("disk", "warning", &["256 MiB free", "100GiB"])
        .has("disk", "warning", &["is in memory"])
        .fails_only(&["arena"]);

    let mut fits = with_mounts(&mount, &place, &others);
    fits.env("KVGATE__ARENA__SIZE", "32MiB")
        .env("KVGATE__LOAD__RESERVE", "8MiB")
        .env("KVGATE__STORE__WRITE_BEHIND", "8MiB");
    findings(&mut fits)
        .await
        .has("arena", "ok", &["32 MiB fit"])
        .fails_only(&[]);

    let full = format!(
        "mount -t tmpfs -o size=80m,mode=0700 tmpfs {shown}; head -c 100M /dev/zero >{shown}/fills 2>/dev/null || true"
    );
    let mut full = with_mounts(&full, &place, &others);
    let found = findings(full.env("KVGATE__DISK__PATHS", &disk)).await;
    found
        .has("disk", "failed", &["is full", "0 B of 80 MiB", "[disk] size"])
        .has("direct_io", "failed", &["No space left"])
        .fails_only(&["disk", "direct_io"]);
}

#[tokio::test]
async fn this_machine() {
    let place = Place::new().await;
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let open = place.home.path().join("open");
    std::fs::create_dir(&open).unwrap();
    std::fs::set_permissions(&open, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let mut command = place.command(&["doctor", "--json", "--skip", "s3", "--skip", "engines"]);
    command
        .arg("--timeout=4s")
        .env("KVGATE__API__LISTEN", &address)
        .env("KVGATE__API__SOCKET", open.join("kvgate.sock"))
        .env("KVGATE__API__TOKEN_FILE", open.join("none"))
        .env("KVGATE__DISK__PATHS", open.join("new"))
        .env("KVGATE__DISK__SIZE", "1MiB");
    let found = findings(&mut command).await;
    found
        .has("port", "failed", &[&address, "ss -ltnp"])
        .has("socket", "ok", &["is free"])
        .has("socket", "warning", &["other users may write", "chmod go-w"])
        .has("token", "failed", &["none"])
        .has("disk", "ok", &["not made yet"])
        .fails_only(&["port", "token"]);
    assert!(!open.join("new").exists(), "it makes nothing");

    let long = format!("/tmp/{}/kvgate.sock", "x".repeat(120));
    let mut command = place.command(&["doctor", "--json", "--skip", "s3", "--skip", "engines"]);
    findings(command.env("KVGATE__API__SOCKET", long)).await.has(
        "socket",
        "failed",
        &["longer", "shorter path"],
    );
    let mut command = place.command(&["doctor", "--json", "--skip", "engines"]);
    findings(command.env("KVGATE__ARENA__SIZE", "much"))
        .await
        .has("configuration", "failed", &["arena.size", "much"])
        .has("bucket", "not_checked", &["configuration"])
        .fails_only(&["configuration"]);
    let mut command = place.command(&["doctor", "--json", "--skip", "s3", "--skip", "engines"]);
    findings(command.env("KVGATE__ARENA__SIZE", "64MiB")).await.has(
        "configuration",
        "failed",
        &["no room", "Raise [arena] size"],
    );
}

/// Only the kvgate that answers at the socket may have the arena.
#[tokio::test]
async fn an_arena_of_another_kvgate() {
    let place = Place::new().await;
    let path = place.home.path().join("arena");
    let options = ArenaOptions {
        size: 1 << 20,
        path: Some(path.clone()),
        ..ArenaOptions::default()
    };
    let _other = Arena::new(&options).unwrap();
    let socket = place.home.path().join("kvgate.sock");
    let ask = || {
        let mut command = place.command(&["doctor", "--json"]);
        let others = ["s3", "engines", "gpu", "disks", "api"];
        command.args(others.iter().flat_map(|part| ["--skip", part]));
        command
            .env("KVGATE__ARENA__PATH", &path)
            .env("KVGATE__API__SOCKET", &socket);
        command
    };
    let words = ["nobody answers at [api] socket", "another [arena] path"];
    findings(&mut ask()).await.has("arena", "failed", &words);
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let found = findings(&mut ask()).await;
    found.has("arena", "ok", &["belongs to a kvgate that runs"]);
    drop(listener);
    findings(&mut ask()).await.has("arena", "failed", &words);
}

/// `serve` would say the same, and not start.
#[tokio::test]
async fn keys_and_the_secrets_of_peers_are_read() {
    let place = Place::new().await;
    let file = |name: &str, text: &str, mode: u32| {
        let path = place.home.path().join(name);
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
        path
    };
    let key = file("acme.key", &"a1".repeat(32), 0o400);
    let keys = |source: &str| {
        let text = format!("[[tenant]]\nname = \"acme\"\nkeys = \"{source}\"\n");
        file("keys.toml", &text, 0o644)
    };
    let ask = |settings: &[(&str, &str)]| {
        let mut command = place.command(&["doctor", "--json"]);
        let others = ["s3", "engines", "gpu", "disks", "api", "memory"];
        command.args(others.iter().flat_map(|part| ["--skip", part]));
        command.envs(settings.iter().copied());
        command
    };
    let none = findings(&mut ask(&[])).await;
    assert!(none.verdict("keys").is_empty() && none.verdict("peers").is_empty());

    let named = keys(&format!("file:{}", key.display()));
    let with_keys = [("KVGATE__KEYS__FILE", named.to_str().unwrap())];
    let found = findings(&mut ask(&with_keys)).await;
    found.has("keys", "ok", &["keys.toml"]).fails_only(&[]);
    keys("file:/nowhere/acme.key");
    let found = findings(&mut ask(&with_keys)).await;
    found
        .has(
            "keys",
            "failed",
            &["acme", "/nowhere/acme.key can't be read", "docs/KEYS.md"],
        )
        .fails_only(&["keys"]);

    let token = file("token", "", 0o400);
    let members = ("KVGATE__PEERS__MEMBERS", "127.0.0.1:1");
    let with_token = [members, ("KVGATE__PEERS__TOKEN_FILE", token.to_str().unwrap())];
    let found = findings(&mut ask(&with_token)).await;
    found
        .has(
            "peers",
            "failed",
            &["[peers] token_file", "one line", "docs/PEERS.md"],
        )
        .fails_only(&["peers"]);
    let token = file("good", "fleet\n", 0o400);
    let with_token = [members, ("KVGATE__PEERS__TOKEN_FILE", token.to_str().unwrap())];
    let found = findings(&mut ask(&with_token)).await;
    found.has("peers", "ok", &["token"]).fails_only(&[]);
    let pem = token.to_str().unwrap();
    let with_tls = [
        members,
        ("KVGATE__PEERS__CERT_FILE", pem),
        ("KVGATE__PEERS__KEY_FILE", pem),
        ("KVGATE__PEERS__CA_FILE", pem),
        ("KVGATE__PEERS__SERVER_NAME", "fleet.test"),
    ];
    let found = findings(&mut ask(&with_tls)).await;
    found
        .has("peers", "failed", &["[peers] cert_file", "no certificate"])
        .fails_only(&["peers"]);
    let mut command = ask(&[members]);
    for (key, value) in certificates(&place.home.path().join("tls"), "fleet.test") {
        let name = format!("KVGATE__{}", key.replace('.', "__").to_uppercase());
        command.env(name, value);
    }
    let found = findings(&mut command).await;
    found
        .has("peers", "ok", &["authority can be used"])
        .fails_only(&[]);
}

/// Of Pythons without an engine; tests/engines has those with one.
#[tokio::test]
async fn pythons() {
    let home = TempDir::new().unwrap();
    let broken = home.path().join("python3");
    std::fs::write(&broken, "#!/bin/sh\nexit 3\n").unwrap();
    std::fs::set_permissions(&broken, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let hangs = home.path().join("hangs");
    std::fs::write(&hangs, "#!/bin/sh\nexec sleep 1000\n").unwrap();
    std::fs::set_permissions(&hangs, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let skip_all = ["s3", "memory", "disks", "gpu", "api"];
    let ask = |python: &str, timeout: &str| {
        let mut command = kvgate(
            home.path(),
            &["doctor", "--json", "--python", python, "--timeout", timeout],
        );
        command.args(skip_all.iter().flat_map(|part| ["--skip", part]));
        command
    };
    findings(&mut ask("/nonexistent/python", "30s")).await.has(
        "engines",
        "failed",
        &["/nonexistent/python", "--python"],
    );
    findings(&mut ask(broken.to_str().unwrap(), "30s")).await.has(
        "engines",
        "failed",
        &["no Python that works", "exit status: 3"],
    );
    findings(&mut ask(hangs.to_str().unwrap(), "300ms")).await.has(
        "engines",
        "failed",
        &["did not end within 300ms", "--timeout"],
    );
    findings(&mut ask("/usr/bin/python3", "30s"))
        .await
        .has("engines", "not_checked", &["neither an engine nor kvgate"])
        .fails_only(&[]);
}

/// Why the other node does not hit.
#[tokio::test]
async fn the_spaces_of_two_nodes_are_compared() {
    let json = |revision: &str, tokens: u32| {
        format!(
            r#"{{"model":"tiny","revision":"{revision}","chunk_tokens":{tokens},"mha":{{"layers":2,"heads":2,"head_dim":8}}}}"#
        )
    };
    let (one, other) = (Site::new().await, Site::new().await);
    let (node, there) = (
        one.serve(&[]).await,
        other.serve(&[("api.listen", "127.0.0.1:0")]).await,
    );
    let url = format!("http://{}", there.address.unwrap());
    let socket = one.config(&[]).api.socket.display().to_string();
    let ask = |compare: &[&str]| {
        let mut command = kvgate(one.home.path(), &["doctor", "--json", "--socket", &socket]);
        command.args(
            ["s3", "engines", "memory", "gpu", "disks", "api"]
                .iter()
                .flat_map(|part| ["--skip", part]),
        );
        command.args(compare.iter().flat_map(|node| ["--compare", node]));
        command
    };
    findings(&mut ask(&[&url]))
        .await
        .has("spaces", "warning", &["no engine has declared a space"]);
    let space = |text: &str| Space::from_json(text).unwrap();
    node.client.declare(&space(&json("abc123", 16))).await.unwrap();
    there.client.declare(&space(&json("def456", 32))).await.unwrap();
    let words = [
        "tiny",
        "abc123",
        "def456",
        "revision",
        "chunk_tokens is 16",
        "32",
        "same commit",
    ];
    findings(&mut ask(&[&url]))
        .await
        .has("spaces", "failed", &words)
        .fails_only(&["spaces"]);
    let file = one.home.path().join("space.json");
    std::fs::write(&file, json("def456", 16)).unwrap();
    let file = file.to_str().unwrap();
    findings(&mut ask(&[&socket, file]))
        .await
        .has("spaces", "failed", &["revision", "def456"])
        .fails_only(&["spaces"]);
    let signed = one.home.path().join("signed.json");
    let text = json("def456", 16).replacen('{', r#"{"protection":"signed","#, 1);
    std::fs::write(&signed, text).unwrap();
    findings(&mut ask(&[file, signed.to_str().unwrap()]))
        .await
        .has(
            "spaces",
            "failed",
            &["protection is", "none", "signed", "keys demand"],
        )
        .fails_only(&["spaces"]);
    there.client.declare(&space(&json("abc123", 16))).await.unwrap();
    findings(&mut ask(&[&url]))
        .await
        .has("spaces", "ok", &["1 spaces are the same"])
        .fails_only(&[]);
    findings(&mut ask(&["http://127.0.0.1:1"])).await.has(
        "spaces",
        "failed",
        &["--compare http://HOST:PORT"],
    );
    node.end().await;
    there.end().await;
}

/// It said that the user must be allowed to remove chunks, which ceph/apply.py allows to no node.
#[tokio::test]
async fn what_it_may_not_remove_needs_no_right_to_remove_chunks() {
    const DENIED: &str = "HTTP/1.1 403 Forbidden\r\nContent-Length: 50\r\nx-amz-request-id: 1\r\nConnection: close\r\n\r\n\
                          <Error><Code>AccessDenied</Code><Message/></Error>";
    let place = Place::new().await;
    let is_delete = |piece: &[u8]| piece.starts_with(b"DELETE ");
    let way = way::that_answers(&place.s3.endpoint(), is_delete, usize::MAX, Some(DENIED)).await;
    let mut command = place.command(&S3_ALONE);
    let found = findings(command.args(["--transfer-size=1MiB", "--endpoint", &way])).await;
    let words = format!("{PREFIX}/.kvgate/doctor-*");
    found.has(
        "cleanup",
        "warning",
        &["may not be removed", &words, "chunks need no such right"],
    );
}

/// A killed examination leaves objects. One of today may still be under way.
#[tokio::test]
async fn objects_of_a_killed_examination_are_removed_by_a_later_one() {
    let place = Place::new().await;
    let own = place.bucket().join(PREFIX).join(".kvgate");
    let object = |name: &str, age: Duration| {
        let path = own.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let file = std::fs::File::create(&path).unwrap();
        file.set_modified(SystemTime::now() - age).unwrap();
        path
    };
    let hours = |hours: u64| Duration::from_secs(hours * 3600);
    let left = [
        object("doctor-0123456789abcdef/object", hours(25)),
        object("doctor-0123456789abcdef/transfer-0", hours(25)),
    ];
    let kept = [
        object("doctor-fedcba9876543210/object", hours(23)),
        object("gc-lease", hours(25)),
    ];
    let examine = async || findings(place.command(&S3_ALONE).arg("--transfer-size=1MiB")).await;
    let found = examine().await;
    found.fails_only(&[]);
    found.has("cleanup", "ok", &["2 objects", "killed"]);
    left.iter().for_each(|path| assert!(!path.exists(), "{path:?}"));
    kept.iter().for_each(|path| assert!(path.exists(), "{path:?}"));
    let found = examine().await;
    assert_eq!(found.verdict("cleanup"), ["ok"], "nothing to tell");
}

/// The report for people, and what is no examination at all.
#[tokio::test]
async fn text_and_usage() {
    let place = Place::new().await;
    let said = place
        .say(&[
            "doctor",
            "--skip",
            "engines",
            "--skip",
            "memory",
            "--skip",
            "gpu",
            "--transfer-size=1MiB",
        ])
        .await;
    said.exits(0)
        .says(&["ok           bucket", "0 failed", "cleanup"]);
    let said = place
        .say(&[
            "doctor", "--skip", "engines", "--bucket", "no-such", "--skip", "memory",
        ])
        .await;
    said.exits(1)
        .says(&["FAILED       bucket", "-> Create it", "not checked  write"]);
    place
        .say(&["doctor", "--skip", "all"])
        .await
        .exits(2)
        .says(&["s3, transfer, memory"]);
    place
        .say(&["doctor", "--timeout", "0s"])
        .await
        .exits(2)
        .says(&["--timeout"]);
    // A reader that has seen enough.
    let mut command = place.command(&["doctor", "--skip", "engines", "--skip", "memory"]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    assert!(child.wait().await.unwrap().success());
    let left = std::process::Command::new("find")
        .arg(place.bucket())
        .args(["-type", "f"])
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&left.stdout), "");
}
