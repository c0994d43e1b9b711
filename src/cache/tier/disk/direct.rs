//! Bytes between a slot and a file, past the page cache where the file system can.
//!
//! Direct I/O wants memory, offset and length at multiples of a block. Slots begin at one and their objects need not end
//! at one, so the last bytes go through a block of their own: the same way, so that a file is never partly in the page
//! cache.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;

use crate::arena::SLOT_ALIGN;

/// The unit of a file's room and of direct I/O.
pub(super) const BLOCK: usize = SLOT_ALIGN;

#[repr(C, align(4096))]
struct AlignedBlock([u8; BLOCK]);

const _: () = assert!(align_of::<AlignedBlock>() == BLOCK);

/// Whether direct I/O can use this memory; a part of a slot may begin anywhere.
pub(super) fn is_aligned(bytes: &[u8]) -> bool {
    bytes.as_ptr().addr().is_multiple_of(BLOCK)
}

/// Writes an empty file that was opened for direct I/O.
pub(super) fn write(file: &File, bytes: &[u8]) -> io::Result<()> {
    let (blocks, rest) = bytes.split_at(bytes.len() / BLOCK * BLOCK);
    write_blocks(file, blocks, 0)?;
    if !rest.is_empty() {
        let mut block = Box::new(AlignedBlock([0; BLOCK]));
        block.0[..rest.len()].copy_from_slice(rest);
        write_blocks(file, &block.0, blocks.len() as u64)?;
        file.set_len(bytes.len() as u64)?;
    }
    Ok(())
}

/// Reads a file of this length that was opened for direct I/O.
pub(super) fn read(file: &File, bytes: &mut [u8]) -> io::Result<()> {
    let (blocks, rest) = bytes.split_at_mut(bytes.len() / BLOCK * BLOCK);
    let blocks_len = blocks.len() as u64;
    read_blocks(file, blocks)?;
    if !rest.is_empty() {
        let mut block = Box::new(AlignedBlock([0; BLOCK]));
        let read = again(|| file.read_at(&mut block.0, blocks_len))?;
        let last = block.0[..read].get(..rest.len());
        rest.copy_from_slice(last.ok_or(ErrorKind::UnexpectedEof)?);
    }
    Ok(())
}

fn write_blocks(file: &File, mut bytes: &[u8], mut at: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        let written = whole_blocks(again(|| file.write_at(bytes, at))?);
        if written == 0 {
            return Err(ErrorKind::WriteZero.into());
        }
        bytes = &bytes[written..];
        at += written as u64;
    }
    Ok(())
}

fn read_blocks(file: &File, mut bytes: &mut [u8]) -> io::Result<()> {
    let mut at = 0;
    while !bytes.is_empty() {
        let read = whole_blocks(again(|| file.read_at(bytes, at))?);
        if read == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        bytes = &mut bytes[read..];
        at += read as u64;
    }
    Ok(())
}

/// The next transfer must begin at a block; what is beyond the last whole one moves again.
fn whole_blocks(len: usize) -> usize {
    len / BLOCK * BLOCK
}

/// Repeats the call until no signal interrupts it.
fn again(mut transfer: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
    loop {
        match transfer() {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}
