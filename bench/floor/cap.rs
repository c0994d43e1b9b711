//! A proxy that lets only so many bytes a second through, as a slower network would: for endpoints that share cores, and
//! would otherwise all be as slow as those are.
//!
//! All connections share the rate of what comes back; what goes to the server is not limited. The rate is what a file
//! says, and is read again while it runs.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::Error;

/// Let through at a time. Connections take turns, so small pieces share better.
const PIECE: usize = 32 << 10;
/// The burst that may be let through at once after a pause.
const BURST: Duration = Duration::from_millis(20);
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Listens, and never ends. `rate`: a number of bytes a second, or a file that has one.
pub fn run(listen: SocketAddr, to: SocketAddr, rate: &str) -> Result<(), Error> {
    let (first, file) = match rate.parse() {
        Ok(number) => (number, None),
        Err(_) => (read(Path::new(rate))?, Some(PathBuf::from(rate))),
    };
    let cap = Arc::new(Cap::new(first));
    if let Some(file) = file {
        let cap = Arc::clone(&cap);
        thread::spawn(move || {
            loop {
                thread::sleep(LOOK_EVERY);
                // It may be written right now.
                if let Ok(rate) = read(&file) {
                    cap.set(rate);
                }
            }
        });
    }
    let listener = TcpListener::bind(listen)?;
    loop {
        let (client, _) = listener.accept()?;
        let cap = Arc::clone(&cap);
        // A client that goes away ends its threads; a server that is not there, its client.
        thread::spawn(move || forward(&client, to, &cap));
    }
}

fn read(file: &Path) -> Result<u64, Error> {
    Ok(std::fs::read_to_string(file)?.trim().parse()?)
}

fn forward(client: &TcpStream, to: SocketAddr, cap: &Cap) -> io::Result<()> {
    let server = TcpStream::connect(to)?;
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    // Small buffers: what the cap holds back, the server must feel.
    rustix::net::sockopt::set_socket_recv_buffer_size(&server, PIECE)?;
    rustix::net::sockopt::set_socket_send_buffer_size(client, 4 * PIECE)?;
    let (mut from_client, mut to_server) = (client.try_clone()?, server.try_clone()?);
    thread::spawn(move || {
        // Either side may close at any time.
        let _ = io::copy(&mut from_client, &mut to_server);
        let _ = to_server.shutdown(Shutdown::Write);
    });
    let answered = answer(&server, client, cap);
    let _ = client.shutdown(Shutdown::Both);
    let _ = server.shutdown(Shutdown::Both);
    answered
}

fn answer(mut server: &TcpStream, mut client: &TcpStream, cap: &Cap) -> io::Result<()> {
    let mut piece = vec![0; PIECE];
    loop {
        let len = server.read(&mut piece)?;
        if len == 0 {
            return Ok(());
        }
        cap.wait(len);
        client.write_all(&piece[..len])?;
    }
}

/// When the next bytes may go.
struct Cap(Mutex<State>);

struct State {
    bytes_per_second: u64,
    free_at: Instant,
}

impl Cap {
    fn new(bytes_per_second: u64) -> Self {
        Self(Mutex::new(State {
            bytes_per_second,
            free_at: Instant::now(),
        }))
    }

    fn set(&self, bytes_per_second: u64) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .bytes_per_second = bytes_per_second;
    }

    /// Waits for the turn of so many bytes.
    fn wait(&self, bytes: usize) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let begin = state.free_at.max(now.checked_sub(BURST).unwrap_or(now));
        let takes = Duration::from_secs_f64(bytes as f64 / state.bytes_per_second.max(1) as f64);
        state.free_at = begin + takes;
        let until = state.free_at;
        drop(state);
        thread::sleep(until.saturating_duration_since(now));
    }
}
