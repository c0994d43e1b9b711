//! DNS servers for tests: one that answers what a test wants, over UDP and TCP at one port; and a real dnsmasq.
//!
//! The scripted one writes its messages by itself, not with the crate that kvgate reads them with.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::task::JoinSet;

pub const A: u16 = 1;
pub const AAAA: u16 = 28;
pub const SRV: u16 = 33;

pub const SERVFAIL: u8 = 2;
pub const NXDOMAIN: u8 = 3;
pub const REFUSED: u8 = 5;

/// The bytes that every client can take over UDP. Longer answers are truncated, also where EDNS allows more.
const UDP_MAX: usize = 512;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// In lower case, without the final dot.
    pub name: String,
    pub kind: u16,
    pub tcp: bool,
}

#[derive(Debug, Clone)]
pub struct Record {
    name: String,
    ttl: u32,
    kind: u16,
    data: Vec<u8>,
}

impl Record {
    pub fn a(name: &str, ttl: u32, address: Ipv4Addr) -> Self {
        Self::new(name, ttl, A, address.octets().into())
    }

    pub fn aaaa(name: &str, ttl: u32, address: Ipv6Addr) -> Self {
        Self::new(name, ttl, AAAA, address.octets().into())
    }

    pub fn cname(name: &str, ttl: u32, target: &str) -> Self {
        Self::new(name, ttl, 5, encoded(target))
    }

    pub fn srv(name: &str, ttl: u32, priority: u16, port: u16, target: &str) -> Self {
        let mut data = [priority, 1, port].map(u16::to_be_bytes).concat();
        data.extend(encoded(target));
        Self::new(name, ttl, SRV, data)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    fn new(name: &str, ttl: u32, kind: u16, data: Vec<u8>) -> Self {
        let name = name.into();
        Self {
            name,
            ttl,
            kind,
            data,
        }
    }
}

/// One message to send back.
#[derive(Debug, Clone, Default)]
pub struct Reply {
    pub records: Vec<Record>,
    pub code: u8,
    pub after: Duration,
    pub fault: Fault,
}

/// The faults of a message.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Fault {
    #[default]
    None,
    /// Over UDP, whatever its length; over TCP it is whole.
    Truncated,
    OtherId,
    OtherQuestion,
    NoQuestion,
    /// These bytes after the id, and nothing else.
    Nonsense(Vec<u8>),
}

impl Reply {
    pub fn new(records: Vec<Record>) -> Self {
        Self {
            records,
            ..Self::default()
        }
    }

    pub fn error(code: u8) -> Self {
        Self {
            code,
            ..Self::default()
        }
    }

    pub fn faulty(records: Vec<Record>, fault: Fault) -> Self {
        Self {
            fault,
            ..Self::new(records)
        }
    }

    fn message(&self, id: [u8; 2], question: &Question) -> Vec<u8> {
        let id = match self.fault {
            Fault::OtherId => id.map(|byte| !byte),
            _ => id,
        };
        if let Fault::Nonsense(bytes) = &self.fault {
            return [&id, bytes.as_slice()].concat();
        }
        let mut message = self.message_of(id, question, &self.records, false);
        if !question.tcp && (self.fault == Fault::Truncated || message.len() > UDP_MAX) {
            message = self.message_of(id, question, &[], true);
        }
        message
    }

    fn message_of(&self, id: [u8; 2], question: &Question, records: &[Record], truncated: bool) -> Vec<u8> {
        // An answer, recursion was asked for and is had.
        let flags = 0x8180 | u16::from(truncated) << 9 | u16::from(self.code);
        let asked = match self.fault {
            Fault::NoQuestion => None,
            Fault::OtherQuestion => Some("elsewhere.test"),
            _ => Some(question.name.as_str()),
        };
        let counts = [u16::from(asked.is_some()), records.len() as u16, 0, 0];
        let mut message = [
            &id,
            &flags.to_be_bytes()[..],
            &counts.map(u16::to_be_bytes).concat(),
        ]
        .concat();
        if let Some(asked) = asked {
            message.extend(encoded(asked));
            message.extend([question.kind, 1].map(u16::to_be_bytes).concat());
        }
        for record in records {
            message.extend(encoded(&record.name));
            message.extend([record.kind, 1].map(u16::to_be_bytes).concat());
            message.extend(record.ttl.to_be_bytes());
            message.extend((record.data.len() as u16).to_be_bytes());
            message.extend(&record.data);
        }
        message
    }
}

/// A name on the wire, not compressed.
fn encoded(name: &str) -> Vec<u8> {
    let labels = name.split('.').filter(|label| !label.is_empty());
    let mut bytes: Vec<u8> = labels
        .flat_map(|label| std::iter::once(label.len() as u8).chain(label.bytes()))
        .collect();
    bytes.push(0);
    bytes
}

type Script = Box<dyn FnMut(&Question) -> Vec<Reply> + Send>;

struct Shared {
    script: Mutex<Script>,
    asked: Mutex<Vec<Question>>,
}

/// Answers by its script as long as it lives. Needs a tokio runtime.
pub struct DnsServer {
    pub address: SocketAddr,
    shared: Arc<Shared>,
    _tasks: JoinSet<()>,
}

impl DnsServer {
    /// All replies to a question are sent, in this order; none means silence.
    pub async fn start(script: impl FnMut(&Question) -> Vec<Reply> + Send + 'static) -> Self {
        Self::new(Box::new(script), true).await
    }

    /// Refuses TCP.
    pub async fn start_without_tcp(script: impl FnMut(&Question) -> Vec<Reply> + Send + 'static) -> Self {
        Self::new(Box::new(script), false).await
    }

    async fn new(script: Script, with_tcp: bool) -> Self {
        let (tcp, udp) = loop {
            let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
            if let Ok(udp) = UdpSocket::bind(tcp.local_addr().unwrap()).await {
                break (tcp, udp);
            }
        };
        let address = tcp.local_addr().unwrap();
        let shared = Arc::new(Shared {
            script: Mutex::new(script),
            asked: Mutex::default(),
        });
        let mut tasks = JoinSet::new();
        tasks.spawn(serve_udp(Arc::new(udp), Arc::clone(&shared)));
        if with_tcp {
            tasks.spawn(serve_tcp(tcp, Arc::clone(&shared)));
        }
        Self {
            address,
            shared,
            _tasks: tasks,
        }
    }

    /// From now on.
    pub fn script(&self, script: impl FnMut(&Question) -> Vec<Reply> + Send + 'static) {
        *self.shared.script.lock().unwrap() = Box::new(script);
    }

    /// Everything that was asked so far.
    pub fn asked(&self) -> Vec<Question> {
        self.shared.asked.lock().unwrap().clone()
    }
}

impl Shared {
    /// The messages to send back, and when.
    fn answer(&self, request: &[u8], tcp: bool) -> Vec<(Duration, Vec<u8>)> {
        let Some(question) = question(request, tcp) else {
            return Vec::new();
        };
        self.asked.lock().unwrap().push(question.clone());
        let replies = (self.script.lock().unwrap())(&question);
        let id = [request[0], request[1]];
        let messages = replies
            .iter()
            .map(|reply| (reply.after, reply.message(id, &question)));
        messages.collect()
    }
}

fn question(request: &[u8], tcp: bool) -> Option<Question> {
    let (mut name, mut at) = (String::new(), 12);
    while let len @ 1.. = usize::from(*request.get(at)?) {
        let label = request.get(at + 1..at + 1 + len)?;
        if !name.is_empty() {
            name.push('.');
        }
        name.push_str(&String::from_utf8_lossy(label).to_lowercase());
        at += 1 + len;
    }
    let kind = u16::from_be_bytes([*request.get(at + 1)?, *request.get(at + 2)?]);
    Some(Question { name, kind, tcp })
}

async fn serve_udp(socket: Arc<UdpSocket>, shared: Arc<Shared>) {
    let mut tasks = JoinSet::new();
    let mut request = [0; 4096];
    while let Ok((len, from)) = socket.recv_from(&mut request).await {
        for (after, message) in shared.answer(&request[..len], false) {
            if after.is_zero() {
                let _ = socket.send_to(&message, from).await;
                continue;
            }
            let socket = Arc::clone(&socket);
            tasks.spawn(async move {
                tokio::time::sleep(after).await;
                let _ = socket.send_to(&message, from).await;
            });
        }
    }
}

async fn serve_tcp(listener: TcpListener, shared: Arc<Shared>) {
    let mut tasks = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let shared = Arc::clone(&shared);
        tasks.spawn(async move {
            let _ = serve_connection(stream, &shared).await;
        });
    }
}

async fn serve_connection(mut stream: TcpStream, shared: &Shared) -> std::io::Result<()> {
    loop {
        let mut request = vec![0; stream.read_u16().await?.into()];
        stream.read_exact(&mut request).await?;
        for (after, message) in shared.answer(&request, true) {
            tokio::time::sleep(after).await;
            stream.write_u16(message.len() as u16).await?;
            stream.write_all(&message).await?;
        }
    }
}

/// A dnsmasq of a test's own (`tests/servers/dns.sh`), gone when this is dropped. Its name has a TTL of 1 s.
pub struct Dnsmasq {
    pub address: SocketAddr,
    pub name: &'static str,
    folder: tempfile::TempDir,
}

impl Dnsmasq {
    /// None where dnsmasq isn't there: says so loudly, and fails where it is required.
    pub fn start(test: &str, addresses: &[String]) -> Option<Self> {
        if std::env::var_os("KVGATE_TEST_DNS_SERVER").is_none() {
            crate::support::backends::skip(test, "dns");
            return None;
        }
        // A port that was free a moment ago need not be so now.
        for _ in 0..5 {
            let address = std::net::UdpSocket::bind("127.0.0.1:0")
                .and_then(|socket| socket.local_addr())
                .unwrap();
            let dnsmasq = Self {
                address,
                name: "s3.kvgate.test",
                folder: tempfile::tempdir().unwrap(),
            };
            if dnsmasq.command("up", addresses).status().unwrap().success() {
                return Some(dnsmasq);
            }
        }
        panic!("dns.sh up");
    }

    /// No address at all: the name does not exist.
    pub fn set(&self, addresses: &[String]) {
        self.run("set", addresses);
    }

    pub fn kill(&self) {
        self.run("down", &[]); // By SIGKILL.
    }

    fn run(&self, action: &str, addresses: &[String]) {
        let status = self.command(action, addresses).status().unwrap();
        assert!(status.success(), "dns.sh {action}");
    }

    fn command(&self, action: &str, addresses: &[String]) -> Command {
        let mut command = Command::new("bash");
        command
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/servers/dns.sh"))
            .arg(action)
            .args(addresses)
            .env("KVGATE_DNS_DIR", self.folder.path().join("dns"))
            .env("KVGATE_DNS_ADDR", self.address.ip().to_string())
            .env("KVGATE_DNS_PORT", self.address.port().to_string())
            .env("KVGATE_DNS_NAME", self.name);
        command
    }
}

impl Drop for Dnsmasq {
    fn drop(&mut self) {
        let _ = self.command("down", &[]).status();
    }
}
