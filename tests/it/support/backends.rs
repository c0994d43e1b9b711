//! The S3 servers that tests run against.

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use aws_credential_types::Credentials;
use kvgate::embedded::EmbeddedS3;
use kvgate::s3::dns::DnsOptions;
use kvgate::s3::fanout::{AttemptPolicy, BreakerOptions, EndpointOptions, WindowOptions};
use kvgate::s3::object::{ObjectStore, S3, S3Options};
use tokio::net::TcpListener;

/// A server, up for as long as this lives, or its last clone.
#[derive(Clone)]
pub struct Backend {
    pub name: &'static str,
    pub endpoints: Vec<String>,
    access_key: String,
    secret_key: String,
    _embedded: Option<Arc<EmbeddedS3>>,
}

/// The name of each server in `tests/run.sh`, and in its variables.
const SERVERS: [(&str, &str, &str); 4] = [
    ("rgw", "ceph", "RGW"),
    ("minio", "minio", "MINIO"),
    ("rclone", "rclone", "RCLONE"),
    ("swift", "swift", "SWIFT"),
];

pub const RETRIES: AttemptPolicy = AttemptPolicy {
    retries: 4,
    base: Duration::from_millis(20),
    max: Duration::from_millis(200),
    budget: 1000,
    hedges: 10,
};

/// One attempt a call.
pub const ONCE: AttemptPolicy = AttemptPolicy {
    retries: 0,
    hedges: 0,
    ..RETRIES
};

/// As configured by default.
pub const ENDPOINTS: EndpointOptions = EndpointOptions {
    window: WindowOptions {
        start: 64 << 20,
        min: 8 << 20,
        max: 1 << 30,
    },
    breaker: BreakerOptions {
        failures: 5,
        open: Duration::from_secs(1),
        open_max: Duration::from_secs(30),
    },
    hedge_min: Duration::from_millis(20),
    subset: 16,
};

impl Backend {
    pub async fn embedded() -> Self {
        let server = EmbeddedS3::start(None, None)
            .await
            .expect("the embedded server starts");
        Self {
            name: "embedded",
            endpoints: vec![server.endpoint()],
            access_key: server.access_key().into(),
            secret_key: server.secret_key().into(),
            _embedded: Some(Arc::new(server)),
        }
    }

    /// None where the server isn't up: says so loudly, and fails where it is required.
    pub async fn find(name: &'static str, test: &str) -> Option<Self> {
        if name == "embedded" {
            return Some(Self::embedded().await);
        }
        let (_, server, upper) = SERVERS
            .into_iter()
            .find(|server| server.0 == name)
            .expect("a known server");
        let variable = |what: &str| std::env::var(format!("KVGATE_TEST_{upper}_{what}")).ok();
        let endpoints = variable("ENDPOINTS").or_else(|| variable("ENDPOINT"));
        let Some(endpoints) = endpoints else {
            skip(test, server);
            return None;
        };
        Some(Self {
            name,
            endpoints: endpoints.split_whitespace().map(Into::into).collect(),
            access_key: variable("ACCESS_KEY").expect("the access key beside the endpoint"),
            secret_key: variable("SECRET_KEY").expect("the secret key beside the endpoint"),
            _embedded: None,
        })
    }

    pub fn options(&self) -> S3Options {
        S3Options {
            credentials: Some(Credentials::from_keys(&self.access_key, &self.secret_key, None)),
            ..options(&self.endpoints[0])
        }
    }

    /// For a child process.
    pub fn credentials(&self) -> [(&str, &str); 2] {
        [
            ("AWS_ACCESS_KEY_ID", &self.access_key),
            ("AWS_SECRET_ACCESS_KEY", &self.secret_key),
        ]
    }

    /// The tests' bucket, made if it is missing.
    pub async fn store(&self) -> Arc<dyn ObjectStore> {
        let store = open(&self.options()).await;
        let deadline = super::fixture::soon();
        if store.check_bucket(deadline).await.is_err() {
            store
                .create_bucket(deadline)
                .await
                .expect("the bucket can be made");
        }
        store
    }
}

/// For a server that takes any credentials: one attempt a call.
pub fn options(endpoint: &str) -> S3Options {
    S3Options {
        endpoint: Some(endpoint.into()),
        bucket: "kvgate-it".into(),
        prefix: String::new(),
        region: "us-east-1".into(),
        path_style: true,
        ca_file: None,
        connect_timeout: Duration::from_secs(2),
        read_timeout: Duration::from_secs(10),
        request_timeout: Duration::from_secs(30),
        idle_timeout: Duration::from_secs(50),
        connections_max: 256,
        answer_bytes_max: 1 << 24,
        credentials: Some(Credentials::from_keys("key", "secret", None)),
        credentials_ttl: Duration::from_secs(60),
        attempts: ONCE,
        endpoints: ENDPOINTS,
        dns: DnsOptions {
            servers: Vec::new(),
            tcp: false,
            min_ttl: Duration::from_secs(1),
            max_ttl: Duration::from_secs(60),
            timeout: Duration::from_secs(2),
        },
        srv: None,
    }
}

/// With retries.
pub async fn open(options: &S3Options) -> Arc<dyn ObjectStore> {
    let options = S3Options {
        attempts: RETRIES,
        ..options.clone()
    };
    Arc::new(S3::connect(&options).await.expect("good options"))
}

/// A server of the test's own, and its endpoint.
pub async fn listen() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    (listener, endpoint)
}

/// Counts the test as skipped, or fails it where its server is required.
pub fn skip(test: &str, server: &str) {
    let required = std::env::var("KVGATE_TEST_REQUIRE").unwrap_or_default();
    assert!(
        !required.split(',').any(|name| name == server),
        "{server} is required (KVGATE_TEST_REQUIRE) but not up"
    );
    skip_because(test, &format!("{server} is not up (tests/run.sh brings it up)"));
}

/// Counts the test as skipped.
pub fn skip_because(test: &str, why: &str) {
    eprintln!("SKIPPED {test}: {why}");
    if let Ok(path) = std::env::var("KVGATE_TEST_SKIP_LOG") {
        let mut log = std::fs::OpenOptions::new()
            .append(true)
            .create(true)
            .open(path)
            .expect("the skip log");
        writeln!(log, "{test}: {why}").expect("the skip log can be written");
    }
}

/// Makes a test of `$test(Backend)` for each server named.
macro_rules! on_backends {
    ($($test:ident: $($backend:ident),+;)+) => {$(
        mod $test {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $backend() {
                    let test = concat!(module_path!(), "::", stringify!($backend));
                    if let Some(backend) = crate::support::backends::Backend::find(stringify!($backend), test).await {
                        super::$test(&backend).await;
                    }
                }
            )+
        }
    )+};
}
pub(crate) use on_backends;
