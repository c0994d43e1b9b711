//! The clients of the floor. A request is 16 bytes, little-endian: object (4), length (4), offset (8). A body
//! to store begins with its length (8) and is answered with one byte.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread;

use kvgate::s3::net::LowWater;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use crate::Error;
use crate::measure::{Measured, Meter};
use crate::workload::{Part, Queue, Workload};

/// A thread for each core, and the connections divided among them. Bytes are dropped in the kernel if told so: what is left
/// of the cost is not the copy's.
pub fn receive(server: SocketAddr, workload: &Workload, drop: bool) -> Result<Measured, Error> {
    let how = if drop {
        RecvFlags::DONTWAIT | RecvFlags::TRUNC
    } else {
        RecvFlags::DONTWAIT
    };
    let queue = Queue::new(workload)?;
    let mut lines: Vec<_> = connect(server, workload)?.into_iter().map(Line::new).collect();
    let share = lines.len().div_ceil(thread::available_parallelism()?.get());
    let work = |lines: &mut [Line], queue: &Queue| receive_parts(lines, queue, how);
    let measured = measure("read", workload, &queue, &mut lines, share, work)?;
    if !how.contains(RecvFlags::TRUNC) {
        queue.check()?;
    }
    Ok(measured)
}

/// A thread for each connection.
pub fn send(server: SocketAddr, workload: &Workload) -> Result<Measured, Error> {
    let queue = Queue::new(workload)?;
    let mut streams = connect(server, workload)?;
    measure("write", workload, &queue, &mut streams, 1, send_parts)
}

pub fn connect(server: SocketAddr, workload: &Workload) -> io::Result<Vec<TcpStream>> {
    let connect = |_| {
        let stream = TcpStream::connect(server)?;
        stream.set_nodelay(true)?;
        Ok(stream)
    };
    (0..workload.in_flight).map(connect).collect()
}

pub fn request(part: &Part) -> io::Result<[u8; 16]> {
    let length = u32::try_from(part.slot.len()).map_err(io::Error::other)?;
    let mut request = [0; 16];
    request[..4].copy_from_slice(&part.object.to_le_bytes());
    request[4..8].copy_from_slice(&length.to_le_bytes());
    request[8..].copy_from_slice(&part.offset.to_le_bytes());
    Ok(request)
}

/// A thread for each `share` of the connections. All is done once before the meter starts, as `kvgate bench --warm-up`
/// does: TCP's windows grow by then.
pub fn measure<T: Send>(
    phase: &'static str,
    workload: &Workload,
    queue: &Queue,
    connections: &mut [T],
    share: usize,
    work: impl Fn(&mut [T], &Queue) -> io::Result<()> + Sync,
) -> Result<Measured, Error> {
    let mut transfer = || {
        queue.refill(workload);
        thread::scope(|scope| {
            let shares = connections.chunks_mut(share);
            let threads: Vec<_> = shares.map(|share| scope.spawn(|| work(share, queue))).collect();
            let results = threads
                .into_iter()
                .map(|thread| thread.join().expect("a worker panicked"));
            results.collect::<io::Result<()>>()
        })
    };
    transfer()?;
    let meter = Meter::start()?;
    transfer()?;
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
        let request = request(&part)?;
        self.low_water.expect(&self.stream, part.slot.len())?;
        (self.part, self.landed) = (Some(part), 0);
        self.stream.write_all(&request)
    }

    /// Reads once, and answers the part if that was the last of it.
    fn land(&mut self, how: RecvFlags) -> io::Result<Option<Part>> {
        let Some(part) = &mut self.part else {
            return Ok(None);
        };
        let missing = &mut part.slot[self.landed..];
        match recv(&self.stream, &mut *missing, how) {
            Ok((_, 0)) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok((_, landed)) if landed == missing.len() => return Ok(self.part.take()),
            Ok((_, landed)) => {
                self.low_water.expect(&self.stream, missing.len() - landed)?;
                self.landed += landed;
            }
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(None)
    }
}

fn receive_parts(lines: &mut [Line], queue: &Queue, how: RecvFlags) -> io::Result<()> {
    loop {
        for line in &mut *lines {
            if line.part.is_none()
                && let Some(part) = queue.take()
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
            if let Some(part) = line.land(how)? {
                queue.give_back(part);
            }
        }
    }
}

fn send_parts(streams: &mut [TcpStream], queue: &Queue) -> io::Result<()> {
    for stream in streams {
        while let Some(part) = queue.take() {
            stream.write_all(&(part.slot.len() as u64).to_le_bytes())?;
            stream.write_all(&part.slot)?;
            stream.read_exact(&mut [0])?;
            queue.give_back(part);
        }
    }
    Ok(())
}
