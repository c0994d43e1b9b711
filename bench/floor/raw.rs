//! The clients of the floor. A request is 16 bytes, little-endian: object (4), length (4), offset (8). What is sent
//! begins with its length (8) and is answered with one byte.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread;

use crate::Error;
use crate::measure::{Measured, Meter};
use crate::workload::{Part, Queue, Workload};

pub fn receive(server: SocketAddr, workload: &Workload) -> Result<Measured, Error> {
    run(server, workload, "read", receive_part)
}

pub fn send(server: SocketAddr, workload: &Workload) -> Result<Measured, Error> {
    run(server, workload, "write", send_part)
}

fn receive_part(stream: &mut TcpStream, part: &mut Part) -> io::Result<()> {
    let length = u32::try_from(part.slot.len()).map_err(io::Error::other)?;
    let mut request = [0; 16];
    request[..4].copy_from_slice(&part.object.to_le_bytes());
    request[4..8].copy_from_slice(&length.to_le_bytes());
    request[8..].copy_from_slice(&part.offset.to_le_bytes());
    stream.write_all(&request)?;
    // Each call asks for all that is missing.
    stream.read_exact(&mut part.slot)
}

fn send_part(stream: &mut TcpStream, part: &mut Part) -> io::Result<()> {
    stream.write_all(&(part.slot.len() as u64).to_le_bytes())?;
    stream.write_all(&part.slot)?;
    stream.read_exact(&mut [0])
}

/// One thread and one connection for each part in flight. Each has transferred a part before the meter starts.
fn run(
    server: SocketAddr,
    workload: &Workload,
    phase: &'static str,
    transfer: fn(&mut TcpStream, &mut Part) -> io::Result<()>,
) -> Result<Measured, Error> {
    let queue = Queue::new(workload)?;
    let mut streams = Vec::new();
    for _ in 0..workload.in_flight {
        let mut stream = TcpStream::connect(server)?;
        stream.set_nodelay(true)?;
        let mut part = queue.borrow()?;
        transfer(&mut stream, &mut part)?;
        queue.give_back(part);
        streams.push(stream);
    }
    let work = |mut stream: TcpStream| {
        while let Some(mut part) = queue.take() {
            transfer(&mut stream, &mut part)?;
            queue.give_back(part);
        }
        Ok(())
    };
    let meter = Meter::start()?;
    thread::scope(|scope| {
        let threads: Vec<_> = streams
            .into_iter()
            .map(|stream| scope.spawn(|| work(stream)))
            .collect();
        let results = threads
            .into_iter()
            .map(|thread| thread.join().expect("a worker panicked"));
        results.collect::<io::Result<()>>()
    })?;
    let measured = meter.stop(phase, workload.ops(), workload.bytes())?;
    if phase == "read" {
        queue.check()?;
    }
    Ok(measured)
}
