//! The server of the receiving floor: `sendfile`, as nginx does it, without HTTP.

use std::fs::File;
use std::io::{self, Read};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::thread;

use rustix::fs::sendfile;

use crate::Error;
use crate::workload::Workload;

/// As nginx is configured: others get their turn after this much.
const SPAN_MAX: usize = 2 << 20;

pub fn run(listen: SocketAddr, folder: &Path) -> Result<(), Error> {
    let listener = TcpListener::bind(listen)?;
    loop {
        let (stream, _) = listener.accept()?;
        let folder = folder.to_owned();
        // A client that goes away ends its thread.
        thread::spawn(move || serve(stream, &folder));
    }
}

fn serve(mut stream: TcpStream, folder: &Path) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut open: Option<(u32, File)> = None;
    let (mut object, mut length, mut offset) = ([0; 4], [0; 4], [0; 8]);
    loop {
        stream.read_exact(&mut object)?;
        stream.read_exact(&mut length)?;
        stream.read_exact(&mut offset)?;
        let object = u32::from_le_bytes(object);
        let (mut left, mut offset) = (u32::from_le_bytes(length) as usize, u64::from_le_bytes(offset));
        if open.as_ref().is_none_or(|(number, _)| *number != object) {
            open = Some((object, File::open(folder.join(Workload::name(object)))?));
        }
        let Some((_, file)) = &open else { continue };
        while left > 0 {
            match sendfile(&stream, file, Some(&mut offset), left.min(SPAN_MAX))? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                sent => left -= sent,
            }
        }
    }
}
