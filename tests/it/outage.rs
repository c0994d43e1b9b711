//! Real radosgws that stop, and real rights that go: unknown, not absent, and right again without a restart.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use aws_credential_types::Credentials;
use kvgate::cache::gateway::{AfterMiss, Gateway, StoreOutcome};
use kvgate::protocol::Strategy;
use kvgate::s3::object::{ErrorKind, S3, S3Options};
use tokio::sync::Mutex;

use crate::support::backends::{Backend, on_backends, open};
use crate::support::fixture::{
    Prompt, Site, arena_empties, load_codes, lookup, soon, store_all, store_chunk,
};

on_backends! {
    a_stopped_rgw: rgw;
    rights_that_go_half_way: rgw;
    tls_with_a_ca_of_ones_own: rgw;
    killed_while_it_stores: rgw;
}

/// Held by tests that stop one of the radosgw, and by those that need all of them.
pub static ALL_RGW: Mutex<()> = Mutex::const_new(());

pub fn rgw(action: &str, address: &str) {
    rgw_with(action, address, "");
}

/// `options`: of the radosgw that is started.
pub fn rgw_with(action: &str, address: &str, options: &str) {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/ceph/rgw.sh");
    let status = Command::new("bash")
        .args([script, action, address])
        .env("KVGATE_CEPH_RGW_ARGS", options)
        .status()
        .unwrap();
    assert!(status.success(), "rgw.sh {action} {address}");
}

async fn a_stopped_rgw(backend: &Backend) {
    let _alone = ALL_RGW.lock().await;
    let site = Site::new(backend.store().await).await;
    let prompt = Prompt::new(4);
    store_all(&site.gateway(), &prompt).await;
    let endpoint = backend.endpoints.last().unwrap();
    let address = endpoint.trim_start_matches("http://").split(':').next().unwrap();
    let options = S3Options {
        endpoint: Some(endpoint.clone()),
        ..backend.options()
    };
    let gateway = site.gateway_over(open(&options).await);
    assert_eq!(lookup(&gateway, &prompt, Strategy::Prefix).await.prefix, 4);
    gateway.forget_existence();

    rgw("stop", address);
    for strategy in [Strategy::Exact, Strategy::Prefix] {
        let found = lookup(&gateway, &prompt, strategy).await;
        assert_eq!(
            (found.mask.count(), found.unknown.count()),
            (0, 4),
            "{strategy:?}"
        );
        assert_eq!(found.error.unwrap().kind, ErrorKind::Connect);
    }
    assert_eq!(
        load_codes(&gateway, &prompt, AfterMiss::Continue).await,
        ["unknown"; 4]
    );
    let more = Prompt::new(1);
    assert!(matches!(
        store_chunk(&gateway, &more, 0).await,
        StoreOutcome::Failed(_)
    ));
    arena_empties(&gateway).await;

    rgw("start", address);
    assert_eq!(lookup(&gateway, &prompt, Strategy::Prefix).await.prefix, 4);
    assert_eq!(load_codes(&gateway, &prompt, AfterMiss::Stop).await, ["ok"; 4]);
    assert!(matches!(
        store_chunk(&gateway, &more, 0).await,
        StoreOutcome::Stored
    ));

    // Hung instead of gone: time-outs end it.
    gateway.forget_existence();
    let hasty = S3Options {
        request_timeout: Duration::from_millis(300),
        ..options
    };
    let hasty = site.gateway_over(Arc::new(S3::connect(&hasty).await.unwrap()));
    rgw("pause", address);
    let found = lookup(&hasty, &prompt, Strategy::Exact).await;
    let codes = load_codes(&hasty, &prompt, AfterMiss::Continue).await;
    rgw("resume", address);
    assert_eq!((found.mask.count(), found.unknown.count()), (0, 4));
    assert_eq!(found.error.unwrap().kind, ErrorKind::Timeout);
    assert_eq!(codes, ["unknown"; 4]);
    assert_eq!(load_codes(&hasty, &prompt, AfterMiss::Stop).await, ["ok"; 4]);
}

/// A second user, whom the bucket's policy lets in, and then no longer.
async fn rights_that_go_half_way(backend: &Backend) {
    let key =
        |what: &str| std::env::var(format!("KVGATE_TEST_RGW_DENIED_{what}_KEY")).expect("a second user");
    let options = backend.options();
    let owner = owner_client(&options);
    let bucket = "kvgate-it-shared";
    let _ = owner.create_bucket().bucket(bucket).send().await;
    let policy = |allowed: bool| {
        // The guest's objects are its own: without an explicit Deny they stay readable.
        let deny = format!(
            r#", {{"Effect": "Deny", "Principal": "*", "Action": ["s3:GetObject", "s3:PutObject"],
                "Resource": ["arn:aws:s3:::{bucket}/*"]}}"#
        );
        format!(
            r#"{{"Version": "2012-10-17", "Statement": [{{"Effect": "Allow", "Principal": "*", "Action": "s3:*",
                "Resource": ["arn:aws:s3:::{bucket}", "arn:aws:s3:::{bucket}/*"]}}{}]}}"#,
            if allowed { "" } else { &deny }
        )
    };
    let guest = S3Options {
        bucket: bucket.into(),
        credentials: Some(Credentials::from_keys(key("ACCESS"), key("SECRET"), None)),
        ..options
    };
    let set = async |allowed: bool| {
        owner
            .put_bucket_policy()
            .bucket(bucket)
            .policy(policy(allowed))
            .send()
            .await
            .map(drop)
            .unwrap();
    };
    set(true).await;
    let site = Site::new(open(&guest).await).await;
    let prompt = Prompt::new(4);
    let gateway: Gateway = site.gateway();
    store_all(&gateway, &prompt).await;
    assert_eq!(lookup(&gateway, &prompt, Strategy::Prefix).await.prefix, 4);

    set(false).await;
    assert_eq!(
        load_codes(&gateway, &prompt, AfterMiss::Continue).await,
        ["unknown"; 4]
    );
    gateway.forget_existence();
    let found = lookup(&gateway, &prompt, Strategy::Exact).await;
    assert_eq!(
        (found.mask.count(), found.unknown.count()),
        (0, 4),
        "denied is not absent"
    );
    assert_eq!(found.error.unwrap().kind, ErrorKind::Denied);
    let more = Prompt::new(1);
    assert!(matches!(
        store_chunk(&gateway, &more, 0).await,
        StoreOutcome::Failed(_)
    ));

    set(true).await;
    assert_eq!(lookup(&gateway, &prompt, Strategy::Exact).await.prefix, 4);
    assert_eq!(load_codes(&gateway, &prompt, AfterMiss::Stop).await, ["ok"; 4]);
    assert!(matches!(
        store_chunk(&gateway, &more, 0).await,
        StoreOutcome::Stored
    ));
}

fn owner_client(options: &S3Options) -> aws_sdk_s3::Client {
    let config = aws_sdk_s3::Config::builder()
        .behavior_version(aws_sdk_s3::config::BehaviorVersion::latest())
        .http_client(aws_smithy_http_client::Builder::new().build_http())
        .endpoint_url(options.endpoint.clone().unwrap())
        .region(aws_sdk_s3::config::Region::new("us-east-1"))
        .credentials_provider(options.credentials.clone().unwrap())
        .force_path_style(true)
        .request_checksum_calculation(aws_sdk_s3::config::RequestChecksumCalculation::WhenRequired);
    aws_sdk_s3::Client::from_conf(config.build())
}

async fn tls_with_a_ca_of_ones_own(backend: &Backend) {
    let endpoints = std::env::var("KVGATE_TEST_RGW_TLS_ENDPOINTS").expect("radosgw with TLS");
    let ca_file = PathBuf::from(std::env::var("KVGATE_TEST_RGW_TLS_CA").expect("its certificate"));
    let endpoint = endpoints.split_whitespace().next().unwrap().to_owned();
    let untrusting = S3Options {
        endpoint: Some(endpoint),
        ..backend.options()
    };
    let error = open(&untrusting).await.check_bucket(soon()).await.unwrap_err();
    assert_eq!(error.kind, ErrorKind::Connect, "{error}");
    assert!(error.to_string().contains("[s3] ca_file"), "{error}");

    let site = Site::new(backend.store().await).await;
    let options = S3Options {
        ca_file: Some(ca_file),
        ..untrusting.clone()
    };
    let gateway = site.gateway_over(open(&options).await);
    let prompt = Prompt::new(4);
    store_all(&gateway, &prompt).await;
    assert_eq!(
        load_codes(&site.gateway(), &prompt, AfterMiss::Stop).await,
        ["ok"; 4],
        "read over plain HTTP"
    );
    gateway.forget_existence();
    assert_eq!(load_codes(&gateway, &prompt, AfterMiss::Stop).await, ["ok"; 4]);

    for (name, bytes) in [
        ("empty", &b""[..]),
        (
            "junk",
            b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        ),
    ] {
        let path = std::env::temp_dir().join(format!("kvgate-{name}-{}.pem", std::process::id()));
        std::fs::write(&path, bytes).unwrap();
        let result = S3::connect(&S3Options {
            ca_file: Some(path.clone()),
            ..untrusting.clone()
        })
        .await;
        std::fs::remove_file(&path).unwrap();
        assert!(result.err().unwrap().to_string().contains("ca_file"), "{name}");
    }
}

/// SIGKILL at random moments of a demo that stores: no half object is ever visible, and what is visible is whole.
async fn killed_while_it_stores(backend: &Backend) {
    let times = if std::env::var_os("KVGATE_TEST_FULL").is_some() {
        100
    } else {
        8
    };
    let store = backend.store().await;
    let (mut chunks, mut interrupted) = (0, 0);
    for run in 0..times {
        let prefix = format!("killed-{}-{:08x}-{run}", std::process::id(), fastrand::u32(..));
        let kvgate = |args: &[&str]| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_kvgate"));
            command.args(args).args(["--endpoint", &backend.endpoints[0]]);
            command
                .args(["--bucket", "kvgate-it", "--prefix", &prefix])
                .envs(backend.credentials());
            command
        };
        let mut demo = kvgate(&["demo", "--keep", "--model", "deepseek-v3", "--tokens", "1024"])
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        // space.json goes first: at 1 no chunk may be there yet.
        let objects = fastrand::usize(1..=4);
        while count(&store, &prefix).await < objects && demo.try_wait().unwrap().is_none() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        tokio::time::sleep(Duration::from_millis(fastrand::u64(0..100))).await;
        interrupted += usize::from(demo.try_wait().unwrap().is_none());
        demo.kill().unwrap();
        demo.wait().unwrap();
        chunks += count(&store, &prefix).await - 1;
        let verify = kvgate(&["verify", "--json"]).output().unwrap();
        let report = String::from_utf8_lossy(&verify.stdout);
        assert!(
            verify.status.success(),
            "{report}{}",
            String::from_utf8_lossy(&verify.stderr)
        );
    }
    assert!(
        interrupted > times / 2,
        "{interrupted} of {times} were killed while they ran"
    );
    assert!(chunks > 0, "some chunks were stored before");
}

/// Objects, but for the start-up probe's.
async fn count(store: &Arc<dyn kvgate::s3::object::ObjectStore>, prefix: &str) -> usize {
    let objects = store.list(prefix, None, soon()).await.unwrap().objects;
    objects
        .iter()
        .filter(|object| !object.key.contains("/.kvgate/"))
        .count()
}
