//! The clients of the floor. A request is 16 bytes, little-endian: object (4), length (4), offset (8). What is sent
//! begins with its length (8) and is answered with one byte.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::slice;
use std::thread;

use kvgate::net::LowWater;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use crate::Error;
use crate::measure::{Measured, Meter};
use crate::workload::{Part, Queue, Workload};

/// A thread for each core, and the connections divided among them.
pub fn receive(server: SocketAddr, workload: &Workload) -> Result<Measured, Error> {
    let queue = Queue::new(workload)?;
    let mut lines = Vec::new();
    for stream in connect(server, workload)? {
        let mut line = Line::new(stream);
        line.ask(queue.borrow()?)?;
        receive_parts(slice::from_mut(&mut line), &queue, || None)?;
        lines.push(line);
    }
    let threads = thread::available_parallelism()?.get();
    let share = lines.len().div_ceil(threads);
    let measured = measure("read", workload, &mut lines, share, |lines| {
        receive_parts(lines, &queue, || queue.take())
    })?;
    queue.check()?;
    Ok(measured)
}

/// A thread for each connection.
pub fn send(server: SocketAddr, workload: &Workload) -> Result<Measured, Error> {
    let queue = Queue::new(workload)?;
    let mut streams = connect(server, workload)?;
    for stream in &mut streams {
        let part = queue.borrow()?;
        send_part(stream, &part)?;
        queue.give_back(part);
    }
    measure("write", workload, &mut streams, 1, |streams| {
        for stream in streams {
            while let Some(part) = queue.take() {
                send_part(stream, &part)?;
                queue.give_back(part);
            }
        }
        Ok(())
    })
}

fn connect(server: SocketAddr, workload: &Workload) -> io::Result<Vec<TcpStream>> {
    let connect = |_| {
        let stream = TcpStream::connect(server)?;
        stream.set_nodelay(true)?;
        Ok(stream)
    };
    (0..workload.in_flight).map(connect).collect()
}

/// A thread for each `share` of the connections. All of them have transferred a part before, so nothing is new.
fn measure<T: Send>(
    phase: &'static str,
    workload: &Workload,
    connections: &mut [T],
    share: usize,
    work: impl Fn(&mut [T]) -> io::Result<()> + Sync,
) -> Result<Measured, Error> {
    let meter = Meter::start()?;
    thread::scope(|scope| {
        let work = &work;
        let shares = connections.chunks_mut(share);
        let threads: Vec<_> = shares.map(|share| scope.spawn(move || work(share))).collect();
        let results = threads
            .into_iter()
            .map(|thread| thread.join().expect("a worker panicked"));
        results.collect::<io::Result<()>>()
    })?;
    meter.stop(phase, workload.ops(), workload.bytes())
}

/// A connection, and what is under way on it.
struct Line {
    stream: TcpStream,
    low_water: LowWater,
    part: Option<Part>,
    /// Bytes of the part.
    landed: usize,
}

impl Line {
    fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            low_water: LowWater::plain(),
            part: None,
            landed: 0,
        }
    }

    fn ask(&mut self, part: Part) -> io::Result<()> {
        let length = u32::try_from(part.slot.len()).map_err(io::Error::other)?;
        let mut request = [0; 16];
        request[..4].copy_from_slice(&part.object.to_le_bytes());
        request[4..8].copy_from_slice(&length.to_le_bytes());
        request[8..].copy_from_slice(&part.offset.to_le_bytes());
        self.low_water.expect(&self.stream, part.slot.len())?;
        (self.part, self.landed) = (Some(part), 0);
        self.stream.write_all(&request)
    }

    /// Reads once, and answers the part if that was the last of it.
    fn land(&mut self) -> io::Result<Option<Part>> {
        let Some(part) = &mut self.part else {
            return Ok(None);
        };
        let missing = &mut part.slot[self.landed..];
        match recv(&self.stream, &mut *missing, RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok((landed, _)) if landed == missing.len() => return Ok(self.part.take()),
            Ok((landed, _)) => {
                self.low_water.expect(&self.stream, missing.len() - landed)?;
                self.landed += landed;
            }
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(None)
    }
}

/// Until `next` has nothing more for any of them.
fn receive_parts(lines: &mut [Line], queue: &Queue, next: impl Fn() -> Option<Part>) -> io::Result<()> {
    loop {
        for line in &mut *lines {
            if line.part.is_none()
                && let Some(part) = next()
            {
                line.ask(part)?;
            }
        }
        let mut busy: Vec<_> = lines.iter_mut().filter(|line| line.part.is_some()).collect();
        if busy.is_empty() {
            return Ok(());
        }
        let polls = busy.iter().map(|line| PollFd::new(&line.stream, PollFlags::IN));
        let mut polls: Vec<_> = polls.collect();
        poll(&mut polls, None)?;
        let readable: Vec<_> = polls.iter().map(|poll| !poll.revents().is_empty()).collect();
        for (line, _) in busy.iter_mut().zip(readable).filter(|(_, readable)| *readable) {
            if let Some(part) = line.land()? {
                queue.give_back(part);
            }
        }
    }
}

fn send_part(stream: &mut TcpStream, part: &Part) -> io::Result<()> {
    stream.write_all(&(part.slot.len() as u64).to_le_bytes())?;
    stream.write_all(&part.slot)?;
    stream.read_exact(&mut [0])
}
