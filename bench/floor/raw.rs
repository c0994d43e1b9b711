//! The clients of the floor. A request is 16 bytes, little-endian: object (4), length (4), offset (8). What is sent
//! begins with its length (8) and is answered with one byte.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread;

use kvgate::net::LowWater;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use crate::Error;
use crate::measure::{Measured, Meter};
use crate::workload::{Part, Queue, Workload};

pub fn receive(server: SocketAddr, workload: &Workload) -> Result<Measured, Error> {
    run(server, workload, "read", receive_part)
}

pub fn send(server: SocketAddr, workload: &Workload) -> Result<Measured, Error> {
    run(server, workload, "write", send_part)
}

struct Wire {
    stream: TcpStream,
    low_water: LowWater,
}

fn receive_part(Wire { stream, low_water }: &mut Wire, part: &mut Part) -> io::Result<()> {
    let length = u32::try_from(part.slot.len()).map_err(io::Error::other)?;
    let mut request = [0; 16];
    request[..4].copy_from_slice(&part.object.to_le_bytes());
    request[4..8].copy_from_slice(&length.to_le_bytes());
    request[8..].copy_from_slice(&part.offset.to_le_bytes());
    stream.write_all(&request)?;
    let mut missing = &mut part.slot[..];
    while !missing.is_empty() {
        // As kvgate does. A read that blocks would wait for the mark anew after it has taken some.
        low_water.expect(stream, missing.len())?;
        poll(&mut [PollFd::new(stream, PollFlags::IN)], None)?;
        let landed = match recv(&*stream, &mut *missing, RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok((landed, _)) => landed,
            Err(Errno::AGAIN) => 0,
            Err(error) => return Err(error.into()),
        };
        missing = &mut missing[landed..];
    }
    Ok(())
}

fn send_part(Wire { stream, .. }: &mut Wire, part: &mut Part) -> io::Result<()> {
    stream.write_all(&(part.slot.len() as u64).to_le_bytes())?;
    stream.write_all(&part.slot)?;
    stream.read_exact(&mut [0])
}

/// One thread and one connection for each part in flight. Each has transferred a part before the meter starts.
fn run(
    server: SocketAddr,
    workload: &Workload,
    phase: &'static str,
    transfer: fn(&mut Wire, &mut Part) -> io::Result<()>,
) -> Result<Measured, Error> {
    let queue = Queue::new(workload)?;
    let mut wires = Vec::new();
    for _ in 0..workload.in_flight {
        let stream = TcpStream::connect(server)?;
        stream.set_nodelay(true)?;
        let low_water = LowWater::plain();
        let mut wire = Wire { stream, low_water };
        let mut part = queue.borrow()?;
        transfer(&mut wire, &mut part)?;
        queue.give_back(part);
        wires.push(wire);
    }
    let work = |mut wire: Wire| {
        while let Some(mut part) = queue.take() {
            transfer(&mut wire, &mut part)?;
            queue.give_back(part);
        }
        Ok(())
    };
    let meter = Meter::start()?;
    thread::scope(|scope| {
        let threads: Vec<_> = wires.into_iter().map(|wire| scope.spawn(|| work(wire))).collect();
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
