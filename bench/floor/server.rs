//! The server of the receiving floor: `sendfile` from one thread, as nginx with one worker does it, without HTTP.

use std::fs::File;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::sendfile;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use crate::Error;
use crate::workload::Workload;

/// As nginx is configured: others get their turn after this much.
const SPAN_MAX: usize = 2 << 20;

pub fn run(listen: SocketAddr, folder: &Path) -> Result<(), Error> {
    let listener = TcpListener::bind(listen)?;
    let mut clients: Vec<Client> = Vec::new();
    loop {
        let waits = clients
            .iter()
            .map(|client| PollFd::new(&client.stream, client.waits_for()));
        let mut polls: Vec<_> = waits.collect();
        polls.push(PollFd::new(&listener, PollFlags::IN));
        poll(&mut polls, None)?;
        let mut ready: Vec<_> = polls.iter().map(|poll| !poll.revents().is_empty()).collect();
        let arrives = ready.pop().unwrap_or(false);
        let mut ready = ready.into_iter();
        // One that goes away, or asks for what isn't there, is forgotten.
        clients.retain_mut(|client| !ready.next().unwrap_or(false) || client.go_on(folder).is_ok());
        if arrives {
            clients.push(Client::new(listener.accept()?.0)?);
        }
    }
}

struct Client {
    stream: TcpStream,
    request: [u8; 16],
    /// Bytes of it that are here.
    asked: usize,
    answer: Option<Answer>,
}

/// The rest of an answer that is still to be sent.
struct Answer {
    file: File,
    offset: u64,
    left: usize,
}

impl Client {
    fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(Self {
            stream,
            request: [0; 16],
            asked: 0,
            answer: None,
        })
    }

    fn waits_for(&self) -> PollFlags {
        match self.answer {
            Some(_) => PollFlags::OUT,
            None => PollFlags::IN,
        }
    }

    fn go_on(&mut self, folder: &Path) -> io::Result<()> {
        let moved = match &mut self.answer {
            None => {
                recv(&self.stream, &mut self.request[self.asked..], RecvFlags::empty()).map(|(len, _)| len)
            }
            Some(answer) => sendfile(
                &self.stream,
                &answer.file,
                Some(&mut answer.offset),
                answer.left.min(SPAN_MAX),
            ),
        };
        let moved = match moved {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(moved) => moved,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        match &mut self.answer {
            None => {
                self.asked += moved;
                if self.asked == self.request.len() {
                    self.answer = Some(Answer::to(&self.request, folder)?);
                    self.asked = 0;
                }
            }
            Some(answer) => {
                answer.left -= moved;
                if answer.left == 0 {
                    self.answer = None;
                }
            }
        }
        Ok(())
    }
}

impl Answer {
    fn to(request: &[u8; 16], folder: &Path) -> io::Result<Self> {
        let [object, length, low, high] = [0, 4, 8, 12].map(|at| {
            let bytes = request[at..].first_chunk().expect("there are 16");
            u32::from_le_bytes(*bytes)
        });
        Ok(Self {
            file: File::open(folder.join(Workload::name(object)))?,
            offset: u64::from(high) << 32 | u64::from(low),
            left: length as usize,
        })
    }
}
