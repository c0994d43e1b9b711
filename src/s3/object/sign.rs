//! SigV4 for the two calls that are made by the thousand, HEAD and ranged GET. The crate's own signer costs more than the
//! request; this one keeps the day's key, as an HMAC that has taken it in. Key derivation is the crate's.

use std::borrow::Cow;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use aws_credential_types::Credentials;
use aws_sigv4::sign::v4::generate_signing_key;
use aws_smithy_types::DateTime;
use aws_smithy_types::date_time::Format;
use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use crate::format::hex;

/// These requests have no payload.
const UNSIGNED: &str = "UNSIGNED-PAYLOAD";
/// Credentials that expire so soon are asked for again.
pub(super) const EXPIRES_SOON: Duration = Duration::from_secs(15);

/// The request to sign.
pub(super) struct Signable<'a> {
    pub method: &'a str,
    /// As in the Host header.
    pub host: &'a str,
    /// Encoded, without a query.
    pub path: &'a str,
    /// The other headers, names in lower case.
    pub headers: &'a [(&'a str, &'a str)],
}

pub(super) struct Signer {
    region: String,
    day: Mutex<Option<Arc<Day>>>,
}

/// All that stays the same for a day with the same credentials.
pub(super) struct Day {
    credentials: Credentials,
    /// Since 1970.
    number: u64,
    mac: Hmac<Sha256>,
    /// `YYYYMMDD`.
    date: String,
    /// `YYYYMMDD/REGION/s3/aws4_request`.
    scope: String,
}

impl Signer {
    pub fn new(region: String) -> Self {
        Self {
            region,
            day: Mutex::new(None),
        }
    }

    /// The last key, as long as the credentials are fresh and it is the same day.
    pub fn known(&self, now: SystemTime) -> Option<Arc<Day>> {
        let day = self.lock().clone()?;
        let lasts = day
            .credentials
            .expiry()
            .is_none_or(|expiry| expiry > now + EXPIRES_SOON);
        (lasts && day.number == day_number(now)).then_some(day)
    }

    /// Credentials were just resolved: they are known from here on.
    pub fn learn(&self, credentials: &Credentials, now: SystemTime) -> Arc<Day> {
        let day = Arc::new(self.new_day(credentials, now));
        *self.lock() = Some(Arc::clone(&day));
        day
    }

    fn new_day(&self, credentials: &Credentials, now: SystemTime) -> Day {
        let seconds = i64::try_from(since_1970(now).as_secs()).unwrap_or_default();
        let text = DateTime::from_secs(seconds)
            .fmt(Format::DateTime)
            .unwrap_or_default();
        let date: String = text.chars().filter(char::is_ascii_digit).take(8).collect();
        let key = generate_signing_key(credentials.secret_access_key(), now, &self.region, "s3");
        Day {
            credentials: credentials.clone(),
            number: day_number(now),
            mac: Hmac::new_from_slice(key.as_ref()).expect("HMAC takes keys of any length"),
            scope: format!("{date}/{}/s3/aws4_request", self.region),
            date,
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Arc<Day>>> {
        self.day.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Day {
    /// The headers to add, all but Host.
    pub fn sign(&self, now: SystemTime, request: &Signable<'_>) -> Vec<(&'static str, Cow<'_, str>)> {
        let token = self.credentials.session_token();
        let stamp = stamp(&self.date, now);
        let mut signed: Vec<(&str, &str)> = Vec::with_capacity(8);
        signed.extend(request.headers);
        signed.extend([
            ("host", request.host),
            ("x-amz-content-sha256", UNSIGNED),
            ("x-amz-date", &stamp),
        ]);
        signed.extend(token.map(|token| ("x-amz-security-token", token)));
        // Canonical: names in lower case, in order.
        signed.sort_unstable();

        let mut authorization = String::with_capacity(384);
        let key_id = self.credentials.access_key_id();
        authorization.extend(["AWS4-HMAC-SHA256 Credential=", key_id, "/", &self.scope]);
        authorization.push_str(", SignedHeaders=");
        let names = authorization.len();
        let mut canonical = String::with_capacity(1024);
        canonical.extend([request.method, "\n", request.path, "\n\n"]);
        for (name, value) in &signed {
            canonical.extend([name, ":", value.trim(), "\n"]);
            authorization.extend([name, ";"]);
        }
        authorization.pop();
        canonical.extend(["\n", &authorization[names..], "\n", UNSIGNED]);

        let digest = hex::encode(&Sha256::digest(canonical.as_bytes()));
        let mut mac = self.mac.clone();
        for part in ["AWS4-HMAC-SHA256\n", &stamp, "\n", &self.scope, "\n", &digest] {
            mac.update(part.as_bytes());
        }
        let signature = hex::encode(&mac.finalize().into_bytes());
        authorization.extend([", Signature=", &signature]);
        let mut headers = Vec::with_capacity(4);
        headers.extend([
            ("authorization", authorization.into()),
            ("x-amz-content-sha256", UNSIGNED.into()),
            ("x-amz-date", stamp.into()),
        ]);
        headers.extend(token.map(|token| ("x-amz-security-token", token.into())));
        headers
    }
}

impl std::fmt::Debug for Signer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Signer({})", self.region)
    }
}

/// `YYYYMMDDTHHMMSSZ`.
fn stamp(date: &str, now: SystemTime) -> String {
    let second = since_1970(now).as_secs() % 86_400;
    format!(
        "{date}T{:02}{:02}{:02}Z",
        second / 3600,
        second / 60 % 60,
        second % 60
    )
}

fn day_number(now: SystemTime) -> u64 {
    since_1970(now).as_secs() / 86_400
}

fn since_1970(now: SystemTime) -> Duration {
    now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use aws_sigv4::http_request::{
        PayloadChecksumKind, PercentEncodingMode, SignableBody, SignableRequest, SigningSettings,
        UriPathNormalizationMode, sign,
    };
    use aws_sigv4::sign::v4::SigningParams;

    /// The slow obvious twin: the crate's signer, told to sign the same headers.
    fn authorization_of_the_crate(
        credentials: &Credentials,
        now: SystemTime,
        method: &str,
        url: &str,
        headers: &[(&str, &str)],
    ) -> String {
        let mut settings = SigningSettings::default();
        settings.percent_encoding_mode = PercentEncodingMode::Single;
        settings.payload_checksum_kind = PayloadChecksumKind::XAmzSha256;
        settings.uri_path_normalization_mode = UriPathNormalizationMode::Disabled;
        let identity = credentials.clone().into();
        let params = SigningParams::builder()
            .identity(&identity)
            .region("eu-west-1")
            .name("s3")
            .time(now)
            .settings(settings)
            .build()
            .unwrap()
            .into();
        let request = SignableRequest::new(
            method,
            url,
            headers.iter().copied(),
            SignableBody::UnsignedPayload,
        )
        .unwrap();
        let (instructions, _) = sign(request, &params).unwrap().into_parts();
        let (headers, _) = instructions.into_parts();
        let authorization = headers.iter().find(|header| header.name() == "authorization");
        authorization.unwrap().value().to_owned()
    }

    #[test]
    fn signs_as_the_crate_does() {
        let signer = Signer::new("eu-west-1".into());
        let day = 86_400;
        for (round, seconds) in [1_000_000_000, 1_000_000_000 + day, 1_000_000_000 + 3 * day]
            .into_iter()
            .enumerate()
        {
            let now = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
            for (key, token) in [("AKID", None), ("OTHER", Some("session/token=="))] {
                let credentials =
                    Credentials::from_keys(key, format!("secret{round}"), token.map(Into::into));
                for (method, host, path, headers) in [
                    ("HEAD", "rgw:8000", "/kv/a/b%20c", vec![]),
                    (
                        "GET",
                        "kv.rgw",
                        "/k",
                        vec![("range", "bytes=0-9"), ("if-match", "\"e\"")],
                    ),
                ] {
                    let request = Signable {
                        method,
                        host,
                        path,
                        headers: &headers,
                    };
                    let day = signer.learn(&credentials, now);
                    let signed = day.sign(now, &request);
                    let url = format!("http://{host}{path}");
                    let expected = authorization_of_the_crate(&credentials, now, method, &url, &headers);
                    assert_eq!(signed[0], ("authorization", expected.into()), "{method} {url}");
                }
            }
        }
    }

    #[test]
    fn credentials_are_known_while_they_are_fresh() {
        let signer = Signer::new("eu-west-1".into());
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
        let known = |now| Some(signer.known(now)?.credentials.clone());
        assert_eq!(known(now), None);
        let lasting = Credentials::from_keys("a", "b", None);
        signer.learn(&lasting, now);
        assert_eq!(known(now), Some(lasting));
        assert_eq!(
            known(now + Duration::from_secs(86_400)),
            None,
            "another day has another key"
        );
        let expiring = Credentials::new("a", "b", None, Some(now + Duration::from_secs(60)), "test");
        signer.learn(&expiring, now);
        assert_eq!(known(now), Some(expiring));
        assert_eq!(known(now + Duration::from_secs(50)), None, "they expire soon");
    }
}
