//! The floor by io_uring: the bytes that `raw::receive` takes, into the same slots, by rings of the kernel's. A thread for
//! each core has a ring of its own (`SINGLE_ISSUER`, `DEFER_TASKRUN`), its share of the connections as registered files, and sends
//! requests by it too. `bench/receive.py` compares the ways.
//!
//! Not here: `SQPOLL`, whose kernel thread is CPU as well, and receiving without a copy (zcrx), which wants a network card
//! that splits headers from payload.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread;

use clap::ValueEnum;
use io_uring::squeue::{Entry, Flags};
use io_uring::types::{BufRingEntry, CancelBuilder, Fixed};
use io_uring::{IoUring, cqueue, opcode};
use kvgate::s3::net::LowWater;
use memmap2::MmapMut;

use crate::Error;
use crate::measure::Measured;
use crate::raw::{connect, measure, request};
use crate::workload::{Part, Queue, Workload};

/// Of linux/io_uring.h: wait before the first try to receive.
const POLL_FIRST: u16 = 1;
/// Of linux/io_uring.h: what is received into a buffer moves its start on.
const BUFFERS_INCREMENTAL: u16 = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum With {
    /// Wake up when as much is there as kvgate waits for.
    LowWater,
    /// A receive is done when the whole part is there.
    WaitAll,
    /// A receive waits before it looks.
    PollFirst,
    /// One receive for all that a connection will ever get; slots are given to it as buffers.
    Multishot,
    /// A system call waits for four completions.
    Batch,
}

pub fn receive(server: SocketAddr, workload: &Workload, with: &[With]) -> Result<Measured, Error> {
    // Less than the low water would be left at the end, and nothing would wake it up.
    if with.contains(&With::WaitAll) && with.contains(&With::LowWater) {
        return Err("--with wait-all can't go with low-water".into());
    }
    let queue = Queue::new(workload)?;
    let lines = connect(server, workload)?.into_iter().map(Line::new);
    let mut lines = lines.collect::<io::Result<Vec<_>>>()?;
    let share = lines.len().div_ceil(thread::available_parallelism()?.get());
    let work = |lines: &mut [Line], queue: &Queue| receive_parts(lines, queue, with);
    let measured = measure("read", workload, &queue, &mut lines, share, work)?;
    queue.check()?;
    Ok(measured)
}

/// A connection, and what is under way on it. On an error the program ends, so nothing is freed that the kernel may write to.
struct Line {
    stream: TcpStream,
    low_water: LowWater,
    request: [u8; 16],
    part: Option<Part>,
    /// Bytes of the part.
    landed: usize,
    /// The page of a ring of one buffer.
    buffer: MmapMut,
    armed: bool,
}

impl Line {
    fn new(stream: TcpStream) -> io::Result<Self> {
        Ok(Self {
            stream,
            low_water: LowWater::plain(),
            request: [0; 16],
            part: None,
            landed: 0,
            buffer: MmapMut::map_anon(size_of::<BufRingEntry>())?,
            armed: false,
        })
    }

    fn ask(&mut self, part: Part, with: &[With]) -> io::Result<()> {
        self.request = request(&part)?;
        (self.part, self.landed) = (Some(part), 0);
        if with.contains(&With::Multishot) {
            self.lend();
        }
        self.wait_for_many(with)
    }

    fn wait_for_many(&mut self, with: &[With]) -> io::Result<()> {
        let missing = self.missing().len();
        match with.contains(&With::LowWater) {
            true => self.low_water.expect(&self.stream, missing),
            false => Ok(()),
        }
    }

    fn missing(&mut self) -> &mut [u8] {
        match &mut self.part {
            Some(part) => &mut part.slot[self.landed..],
            None => &mut [],
        }
    }

    /// Gives the kernel the slot as the next buffer of the connection.
    #[expect(clippy::cast_ptr_alignment, reason = "it is a page")]
    fn lend(&mut self) {
        let (address, len) = (self.missing().as_mut_ptr() as u64, self.missing().len());
        let entry = self.buffer.as_mut_ptr().cast::<BufRingEntry>();
        // SAFETY: the page has room for one entry and is aligned. The kernel reads it once the tail has moved on.
        unsafe {
            (*entry).set_addr(address);
            (*entry).set_len(u32::try_from(len).unwrap_or(u32::MAX));
            let tail = &*BufRingEntry::tail(entry).cast::<AtomicU16>();
            tail.fetch_add(1, Ordering::Release);
        }
    }

    fn receive(&mut self, number: u16, with: &[With]) -> Option<Entry> {
        if with.contains(&With::Multishot) {
            let armed = std::mem::replace(&mut self.armed, true);
            return (!armed).then(|| opcode::RecvMulti::new(Fixed(number.into()), number).build());
        }
        let missing = self.missing();
        let len = u32::try_from(missing.len()).unwrap_or(u32::MAX);
        let receive = opcode::Recv::new(Fixed(number.into()), missing.as_mut_ptr(), len);
        let flags = if with.contains(&With::WaitAll) {
            libc::MSG_WAITALL
        } else {
            0
        };
        let first = if with.contains(&With::PollFirst) {
            POLL_FIRST
        } else {
            0
        };
        Some(receive.flags(flags).ioprio(first).build())
    }

    /// The part, if that was the last of it.
    fn landed(&mut self, bytes: i32, more: bool, with: &[With]) -> io::Result<Option<Part>> {
        self.armed = more;
        let bytes = usize::try_from(bytes).map_err(|_| io::Error::from_raw_os_error(-bytes))?;
        if bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.landed += bytes;
        if self.missing().is_empty() {
            return Ok(self.part.take());
        }
        self.wait_for_many(with)?;
        Ok(None)
    }
}

fn receive_parts(lines: &mut [Line], queue: &Queue, with: &[With]) -> io::Result<()> {
    // A request and a receive each.
    let entries = u32::try_from(2 * lines.len()).map_err(io::Error::other)?;
    let mut ring = IoUring::builder()
        .setup_single_issuer()
        .setup_defer_taskrun()
        .build(entries)?;
    let files: Vec<_> = lines.iter().map(|line| line.stream.as_raw_fd()).collect();
    ring.submitter().register_files(&files)?;
    let numbers = 0..u16::try_from(lines.len()).map_err(io::Error::other)?;
    if with.contains(&With::Multishot) {
        for (number, line) in numbers.clone().zip(&mut *lines) {
            line.buffer.fill(0);
            line.armed = false;
            // SAFETY: the page outlives the ring.
            unsafe {
                ring.submitter().register_buf_ring_with_flags(
                    line.buffer.as_ptr() as u64,
                    1,
                    number,
                    BUFFERS_INCREMENTAL,
                )?;
            }
        }
    }
    let mut idle: Vec<u16> = numbers.collect();
    let together = if with.contains(&With::Batch) { 4 } else { 1 };
    loop {
        while let Some(number) = idle.last().copied()
            && let Some(part) = queue.take()
        {
            idle.pop();
            let line = &mut lines[usize::from(number)];
            line.ask(part, with)?;
            let send = opcode::Send::new(Fixed(number.into()), line.request.as_ptr(), 16).build();
            push(&mut ring, number, send.flags(Flags::SKIP_SUCCESS))?;
            if let Some(receive) = line.receive(number, with) {
                push(&mut ring, number, receive)?;
            }
        }
        let busy = lines.len() - idle.len();
        if busy == 0 {
            // What is armed would take the next bytes of the connection.
            return match with.contains(&With::Multishot) {
                true => ring.submitter().register_sync_cancel(None, CancelBuilder::any()),
                false => Ok(()),
            };
        }
        ring.submit_and_wait(together.min(busy))?;
        let done: Vec<_> = ring.completion().collect();
        for done in done {
            let number = u16::try_from(done.user_data()).map_err(io::Error::other)?;
            let line = &mut lines[usize::from(number)];
            match line.landed(done.result(), cqueue::more(done.flags()), with)? {
                Some(part) => {
                    queue.give_back(part);
                    idle.push(number);
                }
                None => {
                    if let Some(receive) = line.receive(number, with) {
                        push(&mut ring, number, receive)?;
                    }
                }
            }
        }
    }
}

fn push(ring: &mut IoUring, number: u16, entry: Entry) -> io::Result<()> {
    // SAFETY: requests and slots stay where they are, and slots untouched, until their completion.
    unsafe { ring.submission().push(&entry.user_data(number.into())) }.map_err(io::Error::other)
}
