//! The SDK's HTTP client, over connections of our own: endpoint, connection, request, answer. Bodies of ranged GETs land
//! in slots.

use std::sync::Arc;
use std::time::Duration;

use aws_smithy_runtime_api::client::http::{
    HttpClient, HttpConnector, HttpConnectorFuture, HttpConnectorSettings, SharedHttpConnector,
};
use aws_smithy_runtime_api::client::orchestrator::{HttpRequest, HttpResponse};
use aws_smithy_runtime_api::client::result::ConnectorError;
use aws_smithy_runtime_api::client::runtime_components::RuntimeComponents;
use aws_smithy_runtime_api::http::StatusCode;
use aws_smithy_types::body::SdkBody;
use bytes::Bytes;
use dashmap::DashMap;
use foldhash::fast::RandomState;

use super::body;
use super::connection::{Connection, Outgoing};
use super::error::NetError;
use super::head::ResponseHead;
use super::host::{self, Host, ServerAddress};
use super::landing::{Landing, LandingCell};
use super::pool::{Origin, Pool};
use super::stats::{NetCounters, Traffic, add};
use crate::metrics::Times;
use crate::metrics::trace::{self, OpenSpan};
use crate::s3::dns::{NameState, Resolver};
use crate::s3::fanout::{
    Class, EndpointOptions, EndpointState, Hedge, Held, Loss, Outcome, Permit, Requests, Route,
};

/// The most bytes that are read of a refusal. S3's have some hundred.
const REFUSAL_BYTES_MAX: usize = 64 << 10;

/// Limits, and whom to trust.
#[derive(Debug, Clone)]
pub struct NetOptions {
    pub tls: Arc<rustls::ClientConfig>,
    /// To connect, TLS included, where the SDK's settings don't say.
    pub connect_timeout: Duration,
    /// Longest time in which not a byte is sent or received.
    pub stall_timeout: Duration,
    /// How long a connection is kept after a request.
    pub idle_timeout: Duration,
    /// Connections in use at a time, to all endpoints of one origin.
    pub connections_max: usize,
    /// Bytes of a body that does not land.
    pub answer_bytes_max: usize,
    pub endpoints: EndpointOptions,
    pub dns: Resolver,
    /// A host, and where it is, it and the buckets under its name, if DNS does not say it of the name itself.
    pub places: Option<(String, Vec<ServerAddress>)>,
    /// The name that certificates have, if it is not the host's.
    pub server_name: Option<String>,
}

/// The SDK's HTTP client. Clones share their connections.
#[derive(Clone)]
pub struct NetClient(Arc<Inner>);

struct Inner {
    options: Arc<NetOptions>,
    hosts: DashMap<Origin, Arc<Host>, RandomState>,
    counters: Arc<NetCounters>,
}

impl NetClient {
    pub fn new(options: NetOptions) -> Self {
        Self(Arc::new(Inner {
            options: Arc::new(options),
            hosts: DashMap::default(),
            counters: Arc::default(),
        }))
    }

    /// A client with connections of its own that judges certificates as of another time.
    pub(crate) fn at_time(&self, time: Arc<dyn rustls::time_provider::TimeProvider>) -> Self {
        let mut options = NetOptions::clone(&self.0.options);
        let mut tls = rustls::ClientConfig::clone(&options.tls);
        tls.time_provider = time;
        // A session that is resumed has no certificate to judge.
        tls.resumption = rustls::client::Resumption::disabled();
        options.tls = Arc::new(tls);
        Self::new(options)
    }

    pub fn traffic(&self) -> Traffic {
        self.0.counters.read()
    }

    /// Whether no endpoint of an origin works that would be used.
    pub fn is_out_of_reach(&self, origin: &Origin) -> bool {
        self.host(origin).endpoints().are_out_of_reach()
    }

    /// Bytes that the endpoints of an origin may have in flight.
    pub fn window_bytes(&self, origin: &Origin) -> usize {
        self.host(origin).endpoints().window_bytes()
    }

    /// Of requests that had to wait for room at the endpoints of an origin.
    pub fn window_waits(&self, origin: &Origin) -> Times {
        self.host(origin).endpoints().waits()
    }

    /// Of requests that had to wait for a connection to an origin.
    pub fn connection_waits(&self, origin: &Origin) -> Times {
        self.host(origin).turns()
    }

    /// The names that the endpoints of an origin come from.
    pub fn names(&self, origin: &Origin) -> Vec<NameState> {
        self.host(origin).names()
    }

    /// Where the addresses of an origin come from.
    pub(crate) fn places(&self, origin: &Origin) -> Vec<ServerAddress> {
        host::places(origin, &self.0.options)
    }

    pub fn endpoints(&self, origin: &Origin) -> Vec<EndpointState> {
        self.host(origin).endpoints().states()
    }

    /// Of all endpoints, also of those that have left.
    pub fn totals(&self, origin: &Origin) -> Requests {
        self.host(origin).endpoints().totals()
    }

    /// How requests that move `bytes` of body are hedged.
    pub fn hedge(&self, origin: &Origin, bytes: usize) -> impl Hedge + use<> {
        self.host(origin).endpoints().hedge(bytes)
    }

    /// Closes the idle connections to an origin that is not asked any more.
    pub fn forget(&self, origin: &Origin) {
        self.0.hosts.remove(origin);
    }

    fn host(&self, origin: &Origin) -> Arc<Host> {
        if let Some(host) = self.0.hosts.get(origin) {
            return Arc::clone(&host);
        }
        let entry = self.0.hosts.entry(origin.clone());
        let new = || Host::new(origin.clone(), &self.0.options, &self.0.counters);
        Arc::clone(&entry.or_insert_with(|| Arc::new(new())))
    }

    async fn call(&self, request: HttpRequest, connect_timeout: Duration) -> Result<HttpResponse, NetError> {
        let target = Url::parse(request.uri())?;
        let head = request_head(&request, &target)?;
        let outgoing = Outgoing {
            head: head.as_bytes(),
            body: request.body().bytes().ok_or(NetError::Body)?,
            bodyless: request.method() == "HEAD",
        };
        let cell = request.extension::<LandingCell>();
        let route = request.extension::<Route>().cloned().unwrap_or_default();
        let (head, body) = self
            .send(&target.origin, &outgoing, cell, &route, connect_timeout)
            .await?;
        let is_elsewhere = body.is_empty() && (cell.is_some() || !head.is_success());
        response(&head, body, is_elsewhere)
    }

    /// One request to one endpoint. The body of a 2xx answer lands if there is a cell for it, and is empty then.
    pub(crate) async fn send(
        &self,
        origin: &Origin,
        outgoing: &Outgoing<'_>,
        cell: Option<&LandingCell>,
        route: &Route,
        connect_timeout: Duration,
    ) -> Result<(ResponseHead, Bytes), NetError> {
        let host = self.host(origin);
        let class = match outgoing.body.is_empty() {
            true => Class::Load,
            false => Class::Store,
        };
        let bytes = outgoing.body.len() + cell.map_or(0, LandingCell::len);
        let mut span = trace::begin("request");
        let mut permit = host.permit(class, bytes, route, connect_timeout).await?;
        let _turn = host.turn(&mut permit, route).await;
        trace::mark(&mut span, "sent");
        let sent = self
            .send_over(&mut permit, outgoing, cell, route, connect_timeout, &mut span)
            .await;
        trace::end(span, || {
            let answer = match &sent {
                Ok((head, _)) => ("status", head.status.to_string()),
                Err(error) => ("error", error.to_string()),
            };
            vec![("address", permit.payload().address().to_string()), answer]
        });
        match outcome(&sent) {
            Some(outcome) => permit.end(outcome),
            None => drop(permit),
        }
        sent
    }

    async fn send_over(
        &self,
        permit: &mut Permit<Pool>,
        outgoing: &Outgoing<'_>,
        cell: Option<&LandingCell>,
        route: &Route,
        connect_timeout: Duration,
        span: &mut Option<OpenSpan>,
    ) -> Result<(ResponseHead, Bytes), NetError> {
        let pool = Arc::clone(permit.payload());
        let (mut connection, head) = self.exchange(&pool, outgoing, connect_timeout).await?;
        trace::mark(span, "answered");
        permit.answered(outgoing.body.len());
        let body = if let Some(cell) = cell.filter(|_| head.is_success()) {
            self.land(&mut connection, &head, cell, route, permit).await?;
            Bytes::new()
        } else if head.is_success() {
            body::collect(&mut connection, head.framing, self.0.options.answer_bytes_max).await?
        } else {
            match body::collect(&mut connection, head.framing, REFUSAL_BYTES_MAX).await {
                // The status says enough.
                Err(NetError::TooLong { .. }) => return Ok((head, Bytes::new())),
                body => body?,
            }
        };
        if connection.is_reusable(&head) {
            pool.keep(connection);
        }
        Ok((head, body))
    }

    /// Sends the request, over a kept connection if there is one; should that turn out to be closed, over a new one.
    async fn exchange(
        &self,
        pool: &Pool,
        outgoing: &Outgoing<'_>,
        connect_timeout: Duration,
    ) -> Result<(Connection, ResponseHead), NetError> {
        if let Some(mut kept) = pool.kept() {
            match kept.exchange(outgoing).await {
                Err(error) if error.before_answer() => add(&self.0.counters.stale, 1),
                answer => return answer.map(|head| (kept, head)),
            }
        }
        // Boxed: rare, and its future is large.
        let mut new = Box::pin(pool.connect(connect_timeout)).await?;
        let head = new.exchange(outgoing).await?;
        Ok((new, head))
    }

    async fn land(
        &self,
        connection: &mut Connection,
        head: &ResponseHead,
        cell: &LandingCell,
        route: &Route,
        permit: &mut Permit<Pool>,
    ) -> Result<(), NetError> {
        cell.expect().check(head)?;
        let mut landing = cell.claim(route.start()).await;
        let len = cell.len();
        let mut landed = 0;
        let progress = |landing: &mut Held<Landing>, bytes: usize| {
            landing.arrived(landed, bytes);
            landed += bytes;
            landing.progress(landed, len);
            permit.moved(bytes);
        };
        let copied = connection.land(&mut landing, progress).await?;
        add(&self.0.counters.landed_bytes, len);
        add(
            &self.0.counters.copied_bytes,
            if connection.copies() { len } else { copied },
        );
        Ok(())
    }
}

/// The verdict of a request that was sent on its endpoint, if any.
fn outcome(sent: &Result<(ResponseHead, Bytes), NetError>) -> Option<Outcome> {
    match sent {
        Ok((head, _)) => Some(Outcome::Answered { status: head.status }),
        // It works; what it sent is not what was asked for.
        Err(NetError::Mismatch(_) | NetError::TooLong { .. }) => Some(Outcome::Answered { status: 400 }),
        Err(NetError::Timeout { .. }) => Some(Outcome::Lost(Loss::Timeout)),
        Err(
            NetError::Connect { .. }
            | NetError::Closed
            | NetError::Io(_)
            | NetError::Head(_)
            | NetError::Framing(_)
            | NetError::Cut { .. },
        ) => Some(Outcome::Lost(Loss::Connection)),
        Err(_) => None,
    }
}

impl std::fmt::Debug for NetClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NetClient({:?})", self.traffic())
    }
}

/// The SDK's view: one for each set of time limits.
#[derive(Debug)]
struct Timed {
    client: NetClient,
    connect_timeout: Duration,
    /// For callers that wait for small answers: the sources of credentials. S3's own calls have the client's limits.
    read_timeout: Option<Duration>,
}

impl HttpClient for NetClient {
    fn http_connector(&self, settings: &HttpConnectorSettings, _: &RuntimeComponents) -> SharedHttpConnector {
        SharedHttpConnector::new(Timed {
            client: self.clone(),
            connect_timeout: settings
                .connect_timeout()
                .unwrap_or(self.0.options.connect_timeout),
            read_timeout: settings.read_timeout(),
        })
    }
}

impl HttpConnector for Timed {
    fn call(&self, request: HttpRequest) -> HttpConnectorFuture {
        let (client, connect, read) = (self.client.clone(), self.connect_timeout, self.read_timeout);
        HttpConnectorFuture::new(async move {
            let call = client.call(request, connect);
            let answer = match read {
                None => call.await,
                // Not counted: to connect, which may take its own time.
                Some(limit) => tokio::time::timeout(connect + limit, call).await.unwrap_or({
                    Err(NetError::Timeout {
                        what: "whole answer",
                        limit,
                    })
                }),
            };
            answer.map_err(for_sdk)
        })
    }
}

/// As the SDK sorts errors; the [`NetError`] stays inside.
fn for_sdk(error: NetError) -> ConnectorError {
    match error {
        NetError::Timeout { .. } => ConnectorError::timeout(error.into()),
        NetError::Connect { .. } | NetError::Resolve { .. } => {
            ConnectorError::io(error.into()).never_connected()
        }
        NetError::Url(_) | NetError::Body => ConnectorError::user(error.into()),
        _ => ConnectorError::io(error.into()),
    }
}

/// A URL, taken apart.
pub struct Url<'a> {
    pub(crate) origin: Origin,
    /// For the Host header: without the port where it is the scheme's own, as it is signed.
    pub authority: &'a str,
    /// With the query.
    pub path: &'a str,
}

impl<'a> Url<'a> {
    pub fn parse(url: &'a str) -> Result<Self, NetError> {
        let bad = || NetError::Url(url.to_owned());
        let (scheme, rest) = url.split_once("://").ok_or_else(bad)?;
        let (tls, own_port) = match scheme {
            "http" => (false, 80),
            "https" => (true, 443),
            _ => return Err(bad()),
        };
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let (authority, path) = rest.split_at(end);
        // `[::1]:80` has colons in the brackets.
        let (host, port) = match authority.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => (host, port.parse().map_err(|_| bad())?),
            _ => (authority, own_port),
        };
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let name = bare.unwrap_or(host);
        if name.is_empty() || authority.contains('@') || (bare.is_none() && host.contains(':')) {
            return Err(bad());
        }
        Ok(Self {
            origin: Origin {
                tls,
                host: name.to_owned(),
                port,
            },
            authority: if port == own_port { host } else { authority },
            path: if path.is_empty() { "/" } else { path },
        })
    }
}

/// A request's head as it goes over the wire.
pub(crate) fn head_of<'a>(
    method: &str,
    path: &str,
    headers: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> String {
    let mut head = String::with_capacity(1024);
    let slash = if path.starts_with('/') { "" } else { "/" };
    head.extend([method, " ", slash, path, " HTTP/1.1\r\n"]);
    for (name, value) in headers {
        head.extend([name, ": ", value, "\r\n"]);
    }
    head.push_str("\r\n");
    head
}

fn request_head(request: &HttpRequest, target: &Url<'_>) -> Result<String, NetError> {
    let headers = request.headers();
    let host = (!headers.contains_key("host")).then_some(("host", target.authority));
    let len = request.body().bytes().ok_or(NetError::Body)?.len();
    let has_body = len > 0 || matches!(request.method(), "PUT" | "POST");
    let len = (has_body && !headers.contains_key("content-length")).then(|| len.to_string());
    let len = len.as_deref().map(|len| ("content-length", len));
    Ok(head_of(
        request.method(),
        target.path,
        host.into_iter().chain(headers).chain(len),
    ))
}

/// `is_elsewhere`: the body is in its slot, or was not read, so the SDK sees an empty one.
fn response(head: &ResponseHead, body: Bytes, is_elsewhere: bool) -> Result<HttpResponse, NetError> {
    let odd = || NetError::Head("a header is none");
    let status = StatusCode::try_from(head.status).map_err(|_| odd())?;
    let mut response = HttpResponse::new(status, SdkBody::from(body));
    for (name, value) in head.headers() {
        let value = match name {
            // The SDK would wait for the bytes.
            "content-length" if is_elsewhere => "0",
            _ => value,
        };
        let (name, value) = (name.to_owned(), value.to_owned());
        response
            .headers_mut()
            .try_append(name, value)
            .map_err(|_| odd())?;
    }
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_taken_apart() {
        for (url, host, port, authority, path) in [
            ("http://rgw:8000/b/k?x=1", "rgw", 8000, "rgw:8000", "/b/k?x=1"),
            ("https://rgw/b", "rgw", 443, "rgw", "/b"),
            ("https://rgw:443/b", "rgw", 443, "rgw", "/b"),
            ("http://rgw:443", "rgw", 443, "rgw:443", "/"),
            (
                "http://127.0.0.1?list-type=2",
                "127.0.0.1",
                80,
                "127.0.0.1",
                "?list-type=2",
            ),
            ("http://[::1]:8000/", "::1", 8000, "[::1]:8000", "/"),
            ("http://[::1]/", "::1", 80, "[::1]", "/"),
        ] {
            let target = Url::parse(url).unwrap();
            let origin = Origin {
                tls: url.starts_with("https"),
                host: host.into(),
                port,
            };
            assert_eq!(
                (target.origin, target.authority, target.path),
                (origin, authority, path),
                "{url}"
            );
        }
        for bad in [
            "rgw:8000/b",
            "ftp://rgw/",
            "http:///b",
            "http://rgw:x/",
            "http://a@rgw/",
            "http://::1/",
            "",
        ] {
            assert!(Url::parse(bad).is_err(), "{bad}");
        }
    }
}
