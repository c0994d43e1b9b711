//! The server that PUTs are measured against: it throws bodies away in the kernel, so that what they cost is the
//! client's. It answers as much of S3 as a client asks for before and after it writes.

use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use rustix::net::{RecvFlags, recv};

use crate::Error;

/// Never written to: with `MSG_TRUNC`, TCP only drops the bytes.
const SCRATCH: usize = 8 << 20;

/// Lengths of what was put, by path.
type Objects = Arc<Mutex<HashMap<String, u64>>>;

pub fn run(raw: SocketAddr, http: SocketAddr) -> Result<(), Error> {
    let (raw, http) = (TcpListener::bind(raw)?, TcpListener::bind(http)?);
    let objects = Objects::default();
    thread::spawn(move || accept(&raw, drain));
    accept(&http, move |stream| answer(stream, &objects))?;
    Ok(())
}

fn accept(
    listener: &TcpListener,
    serve: impl Fn(TcpStream) -> io::Result<()> + Clone + Send + 'static,
) -> io::Result<()> {
    loop {
        let (stream, _) = listener.accept()?;
        stream.set_nodelay(true)?;
        let serve = serve.clone();
        // A client that goes away ends its thread.
        thread::spawn(move || serve(stream));
    }
}

fn drain(mut stream: TcpStream) -> io::Result<()> {
    let mut scratch = vec![0; SCRATCH];
    let mut length = [0; 8];
    loop {
        stream.read_exact(&mut length)?;
        discard(&stream, u64::from_le_bytes(length), &mut scratch)?;
        stream.write_all(&[1])?;
    }
}

fn discard(stream: &TcpStream, mut left: u64, scratch: &mut [u8]) -> io::Result<()> {
    while left > 0 {
        let most = usize::try_from(left).map_or(scratch.len(), |left| left.min(scratch.len()));
        match recv(stream, &mut scratch[..most], RecvFlags::TRUNC)?.1 {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            dropped => left -= dropped as u64,
        }
    }
    Ok(())
}

struct Head {
    method: String,
    path: String,
    query: String,
    length: u64,
    expects_continue: bool,
}

fn answer(stream: TcpStream, objects: &Objects) -> io::Result<()> {
    let mut scratch = vec![0; SCRATCH];
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut writer = stream;
    while let Some(head) = read_head(&mut reader)? {
        if head.expects_continue {
            writer.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
        }
        // Bytes that came with the head lie in the reader.
        let buffered = head.length.min(reader.buffer().len() as u64);
        reader.consume(usize::try_from(buffered).unwrap_or(0));
        discard(&writer, head.length - buffered, &mut scratch)?;
        writer.write_all(respond(&head, objects).as_bytes())?;
    }
    Ok(())
}

/// None at the end of the connection.
fn read_head(reader: &mut BufReader<TcpStream>) -> io::Result<Option<Head>> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let mut words = line.split_whitespace().map(str::to_owned);
    let method = words.next().unwrap_or_default();
    let target = words.next().unwrap_or_default();
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    let mut head = Head {
        method,
        path: path.into(),
        query: query.into(),
        length: 0,
        expects_continue: false,
    };
    loop {
        line.clear();
        if reader.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let Some((name, value)) = line.split_once(':') else {
            return Ok(Some(head)); // the empty line
        };
        if name.eq_ignore_ascii_case("content-length") {
            head.length = value.trim().parse().map_err(io::Error::other)?;
        }
        head.expects_continue |= name.eq_ignore_ascii_case("expect");
    }
}

fn respond(head: &Head, objects: &Objects) -> String {
    let mut objects = objects.lock().unwrap_or_else(PoisonError::into_inner);
    let (status, length, body) = match (head.method.as_str(), objects.get(&head.path)) {
        ("PUT", _) => {
            objects.insert(head.path.clone(), head.length);
            ("200 OK", 0, "")
        }
        ("DELETE", _) => {
            objects.remove(&head.path);
            ("204 No Content", 0, "")
        }
        ("HEAD", Some(length)) => ("200 OK", *length, ""),
        ("HEAD", None) => ("404 Not Found", 0, ""),
        ("GET", _) if head.query.contains("list-type=2") => ("200 OK", 0, "<ListBucketResult/>"),
        _ => ("404 Not Found", 0, "<Error><Code>NoSuchKey</Code></Error>"),
    };
    let length = length.max(body.len() as u64);
    format!(
        "HTTP/1.1 {status}\r\ncontent-length: {length}\r\netag: \"00000000000000000000000000000000\"\r\n\
         last-modified: Sat, 01 Jan 2022 00:00:00 GMT\r\nx-amz-request-id: sink\r\n\r\n{body}"
    )
}
