//! SigV4 for the two calls that are made by the thousand, HEAD and ranged GET. The crate's own signer costs more than the
//! request; this one keeps the day's key. Key derivation and HMAC are the crate's.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use aws_credential_types::Credentials;
use aws_sigv4::sign::v4::{calculate_signature, generate_signing_key};
use aws_smithy_runtime_api::client::orchestrator::HttpRequest;
use aws_smithy_types::DateTime;
use aws_smithy_types::date_time::Format;
use sha2::{Digest, Sha256};

use crate::chunk::hex;
use crate::net::{NetError, Target};

/// The payload has digests of its own, and these requests have none.
const UNSIGNED: &str = "UNSIGNED-PAYLOAD";

pub(super) struct Signer {
    region: String,
    day: Mutex<Option<Arc<Day>>>,
}

/// All that stays the same for a day with the same credentials.
struct Day {
    credentials: Credentials,
    /// Since 1970.
    number: u64,
    key: Vec<u8>,
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

    /// Signs a request without a query: its method, path, host and all headers that it has.
    pub fn sign(
        &self,
        credentials: &Credentials,
        now: SystemTime,
        request: &mut HttpRequest,
    ) -> Result<(), NetError> {
        let day = self.day(credentials, now);
        let stamp = stamp(now);
        let Target { authority, path, .. } = Target::parse(request.uri())?;
        let (host, path, method) = (authority.to_owned(), path.to_owned(), request.method().to_owned());
        let headers = request.headers_mut();
        headers.insert("host", host);
        headers.insert("x-amz-content-sha256", UNSIGNED);
        headers.insert("x-amz-date", stamp.clone());
        if let Some(token) = credentials.session_token() {
            headers.insert("x-amz-security-token", token.to_owned());
        }
        // Canonical: names in lower case, in order.
        let mut signed: Vec<(&str, &str)> = headers.iter().collect();
        signed.sort_unstable();
        let mut canonical = String::with_capacity(512);
        canonical.extend([&*method, "\n", &*path, "\n\n"]);
        for (name, value) in &signed {
            canonical.extend([*name, ":", value.trim(), "\n"]);
        }
        let names: Vec<&str> = signed.iter().map(|(name, _)| *name).collect();
        let names = names.join(";");
        canonical.extend(["\n", &names, "\n", UNSIGNED]);
        let digest = hex::encode(&Sha256::digest(canonical.as_bytes()));
        let to_sign = ["AWS4-HMAC-SHA256\n", &stamp, "\n", &day.scope, "\n", &digest].concat();
        let signature = calculate_signature(&day.key, to_sign.as_bytes());
        let authorization = [
            "AWS4-HMAC-SHA256 Credential=",
            credentials.access_key_id(),
            "/",
            &day.scope,
            ", SignedHeaders=",
            &names,
            ", Signature=",
            &signature,
        ];
        headers.insert("authorization", authorization.concat());
        Ok(())
    }

    fn day(&self, credentials: &Credentials, now: SystemTime) -> Arc<Day> {
        let number = since_1970(now).as_secs() / 86_400;
        let mut kept = self.day.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(day) = &*kept
            && day.number == number
            && day.credentials == *credentials
        {
            return Arc::clone(day);
        }
        let key = generate_signing_key(credentials.secret_access_key(), now, &self.region, "s3");
        let day = Arc::new(Day {
            credentials: credentials.clone(),
            number,
            key: key.as_ref().to_vec(),
            scope: format!("{}/{}/s3/aws4_request", &stamp(now)[..8], self.region),
        });
        *kept = Some(Arc::clone(&day));
        day
    }
}

impl std::fmt::Debug for Signer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Signer({})", self.region)
    }
}

/// `YYYYMMDDTHHMMSSZ`.
fn stamp(now: SystemTime) -> String {
    let seconds = i64::try_from(since_1970(now).as_secs()).unwrap_or_default();
    let text = DateTime::from_secs(seconds)
        .fmt(Format::DateTime)
        .unwrap_or_default();
    text.chars().filter(|c| !matches!(c, '-' | ':')).collect()
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
    use aws_smithy_types::body::SdkBody;

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
                for (method, url, headers) in [
                    ("HEAD", "http://rgw:8000/kv/a/b%20c", vec![]),
                    (
                        "GET",
                        "https://kv.rgw/k",
                        vec![("range", "bytes=0-9"), ("if-match", "\"e\"")],
                    ),
                ] {
                    let mut request = HttpRequest::new(SdkBody::empty());
                    request.set_method(method).unwrap();
                    request.set_uri(url).unwrap();
                    for (name, value) in &headers {
                        request.headers_mut().insert(*name, *value);
                    }
                    signer.sign(&credentials, now, &mut request).unwrap();
                    let expected = authorization_of_the_crate(&credentials, now, method, url, &headers);
                    assert_eq!(
                        request.headers().get("authorization").unwrap(),
                        expected,
                        "{method} {url}"
                    );
                }
            }
        }
    }
}
