//! Bodies that don't land: errors, listings. Small, so they are buffered, up to a limit.

use bytes::{Buf, Bytes, BytesMut};

use super::connection::Connection;
use super::error::NetError;
use super::head::Framing;

/// A chunk's size with its extensions, or a trailer.
const LINE_BYTES_MAX: usize = 4 << 10;
const TRAILERS_MAX: usize = 32;

/// Reads a body to its end.
pub(super) async fn collect(
    connection: &mut Connection,
    framing: Framing,
    limit: usize,
) -> Result<Bytes, NetError> {
    match framing {
        Framing::Length(len) if len > limit => Err(NetError::TooLong { limit }),
        Framing::Length(len) => {
            connection.fill(len).await?;
            Ok(connection.ahead().split_to(len).freeze())
        }
        Framing::Chunked => chunked(connection, limit).await,
        Framing::Close => {
            while connection.more(usize::MAX).await? > 0 {
                if connection.ahead().len() > limit {
                    return Err(NetError::TooLong { limit });
                }
            }
            Ok(connection.ahead().split().freeze())
        }
    }
}

async fn chunked(connection: &mut Connection, limit: usize) -> Result<Bytes, NetError> {
    let mut body = BytesMut::new();
    loop {
        let line = line(connection).await?;
        let size = match httparse::parse_chunk_size(&line) {
            // It takes a line without a digit for a 0.
            Ok(httparse::Status::Complete((_, size))) if line[0].is_ascii_hexdigit() => {
                usize::try_from(size).unwrap_or(usize::MAX)
            }
            _ => return Err(NetError::Framing("a chunk's size can't be read")),
        };
        if size == 0 {
            break;
        }
        if size > limit - body.len() {
            return Err(NetError::TooLong { limit });
        }
        connection.fill(size + 2).await?;
        let ahead = connection.ahead();
        body.extend_from_slice(&ahead[..size]);
        let ends = ahead[size..size + 2] == *b"\r\n";
        ahead.advance(size + 2);
        if !ends {
            return Err(NetError::Framing("a chunk is longer than its size"));
        }
    }
    for _ in 0..=TRAILERS_MAX {
        if line(connection).await?.len() == 2 {
            return Ok(body.freeze());
        }
    }
    Err(NetError::Framing("too many trailers"))
}

/// The next line, with its CR LF.
async fn line(connection: &mut Connection) -> Result<BytesMut, NetError> {
    let mut seen = 0;
    loop {
        let ahead = connection.ahead();
        if let Some(at) = ahead[seen..].windows(2).position(|pair| pair == b"\r\n") {
            return Ok(ahead.split_to(seen + at + 2));
        }
        let len = ahead.len();
        if len > LINE_BYTES_MAX {
            return Err(NetError::Framing("a line is too long"));
        }
        // The CR may be the last byte so far.
        seen = len.saturating_sub(1);
        if connection.more(LINE_BYTES_MAX).await? == 0 {
            return Err(NetError::Cut {
                got: len,
                len: len + 1,
            });
        }
    }
}
