//! Daemons in this process that are each other's peers, over one S3 server.

use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;

use kvgate::format::ChunkHash;

use crate::support::daemon::{Serving, Site};
use crate::support::fixture::Prompt;

/// What all nodes of a fleet know.
pub struct Fleet {
    pub members: Vec<SocketAddr>,
    pub token_file: PathBuf,
}

impl Fleet {
    /// Addresses for so many nodes. No two nodes of a test have the same.
    pub fn new(site: &Site, nodes: usize) -> Self {
        let held: Vec<TcpListener> = (0..nodes)
            .map(|_| TcpListener::bind("127.0.0.1:0").unwrap())
            .collect();
        let token_file = site.home.path().join("fleet-token");
        std::fs::write(&token_file, "the-fleets-token\n").unwrap();
        Self {
            members: held.iter().map(|one| one.local_addr().unwrap()).collect(),
            token_file,
        }
    }

    /// Starts node `i`.
    pub async fn serve(&self, site: &Site, i: usize, settings: &[(&'static str, &str)]) -> Serving {
        let members: Vec<String> = self.members.iter().map(ToString::to_string).collect();
        let (members, listen) = (members.join(","), self.members[i].to_string());
        let socket = site
            .home
            .path()
            .join(format!("node-{i}.sock"))
            .display()
            .to_string();
        let token_file = self.token_file.display().to_string();
        let ours = [
            ("api.socket", socket.as_str()),
            ("peers.members", &members),
            ("peers.listen", &listen),
            ("peers.token_file", &token_file),
            // Machines that run many tests are slow.
            ("peers.first_byte", "10s"),
            ("peers.stall", "10s"),
        ];
        let settings: Vec<_> = ours.into_iter().chain(settings.iter().copied()).collect();
        let serving = site.serve(&settings).await;
        serving.ready().await;
        serving
    }

    /// Starts all of them.
    pub async fn serve_all(&self, site: &Site, settings: &[(&'static str, &str)]) -> Vec<Serving> {
        let mut nodes = Vec::new();
        for i in 0..self.members.len() {
            nodes.push(self.serve(site, i, settings).await);
        }
        nodes
    }

    /// The number of the node that owns a chunk, as `of` sees it.
    pub fn owner(&self, of: &Serving, prompt: &Prompt, chunk: &ChunkHash) -> usize {
        let peers = of.node.gateway().peers().expect("it has peers");
        let owner = peers
            .owner(&(prompt.space.key(), *chunk))
            .expect("none is left alone");
        let at = self.members.iter().position(|one| *one == owner);
        at.expect("a member")
    }
}

/// GETs that S3 was sent.
pub fn gets(node: &Serving) -> u64 {
    node.node.status().s3.requests.get
}

/// How often something became of what a node asked its peers, by word.
pub fn asked(node: &Serving, word: &str) -> u64 {
    let peers = node.node.gateway().peers().expect("it has peers");
    let counts = peers.figures.asked.read();
    counts
        .filter(|(name, _)| *name == word)
        .map(|(_, count)| count)
        .sum()
}

/// The same of what it answered.
pub fn answered(node: &Serving, word: &str) -> u64 {
    let peers = node.node.gateway().peers().expect("it has peers");
    let counts = peers.figures.answered.read();
    counts
        .filter(|(name, _)| *name == word)
        .map(|(_, count)| count)
        .sum()
}

/// Certificates of an authority of its own, as the settings of `[peers]`.
pub fn certificates(folder: &std::path::Path, name: &str) -> Vec<(&'static str, String)> {
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
    let mut ca = CertificateParams::new(Vec::new()).unwrap();
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca = CertifiedIssuer::self_signed(ca, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let own = CertificateParams::new(vec![name.to_owned()]).unwrap();
    let own = own.signed_by(&key, &ca).unwrap();
    std::fs::create_dir_all(folder).unwrap();
    let file = |file: &str, text: String| {
        let path = folder.join(file);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    vec![
        ("peers.cert_file", file("cert.pem", own.pem())),
        ("peers.key_file", file("key.pem", key.serialize_pem())),
        ("peers.ca_file", file("ca.pem", ca.pem())),
        ("peers.server_name", name.to_owned()),
    ]
}
