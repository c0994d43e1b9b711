//! The head of an answer: status, headers, and how its body ends.

use std::mem::MaybeUninit;

use super::error::NetError;

/// An S3 answer's head has a few hundred bytes; metadata may bring it to 8 KiB.
pub(super) const HEAD_BYTES_MAX: usize = 32 << 10;
const HEADERS_MAX: usize = 100;

/// Status and headers.
#[derive(Debug, Clone)]
pub(crate) struct ResponseHead {
    pub status: u16,
    headers: Headers,
    pub framing: Framing,
    /// The connection may be used again.
    pub keep_alive: bool,
}

/// How a body ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Framing {
    Length(usize),
    Chunked,
    /// With the connection.
    Close,
}

impl ResponseHead {
    /// The first header of this name, which is in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)
    }

    /// Names, in lower case, and values.
    pub fn headers(&self) -> impl Iterator<Item = (&str, &str)> {
        self.headers.iter()
    }

    /// Bytes of the body, where that is known from the head.
    pub fn body_len(&self) -> Option<usize> {
        match self.framing {
            Framing::Length(len) => Some(len),
            Framing::Chunked | Framing::Close => None,
        }
    }

    pub fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }
}

/// All in one string: a small allocation for each name and value costs more than to parse them.
#[derive(Debug, Clone)]
struct Headers {
    text: String,
    /// Where a name and its value end; the next one begins there.
    ends: Vec<(usize, usize)>,
}

impl Headers {
    fn with_room_for(headers: &[httparse::Header<'_>]) -> Self {
        let bytes = headers
            .iter()
            .map(|header| header.name.len() + header.value.len());
        Self {
            text: String::with_capacity(bytes.sum()),
            ends: Vec::with_capacity(headers.len()),
        }
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.iter().find(|(key, _)| *key == name).map(|(_, value)| value)
    }

    fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        let mut start = 0;
        self.ends.iter().map(move |&(name_end, end)| {
            let header = (&self.text[start..name_end], &self.text[name_end..end]);
            start = end;
            header
        })
    }

    fn push(&mut self, name: &str, value: &str) {
        let start = self.text.len();
        self.text.push_str(name);
        self.text[start..].make_ascii_lowercase();
        let name_end = self.text.len();
        self.text.push_str(value);
        self.ends.push((name_end, self.text.len()));
    }
}

fn is_metadata(name: &str) -> bool {
    const PREFIX: &str = "x-amz-meta-";
    name.get(..PREFIX.len())
        .is_some_and(|start| start.eq_ignore_ascii_case(PREFIX))
}

/// The head at the front of `bytes` and its length, or None if there is more to come. `bodyless`: the answer to a HEAD.
///
/// Stricter than most clients: a head that another reader could understand in another way is refused.
pub(super) fn parse(bytes: &[u8], bodyless: bool) -> Result<Option<(ResponseHead, usize)>, NetError> {
    let mut headers = [const { MaybeUninit::uninit() }; HEADERS_MAX];
    let mut response = httparse::Response::new(&mut []);
    let parser = httparse::ParserConfig::default();
    let len = match parser.parse_response_with_uninit_headers(&mut response, bytes, &mut headers) {
        Ok(httparse::Status::Complete(len)) => len,
        Ok(httparse::Status::Partial) if bytes.len() >= HEAD_BYTES_MAX => {
            return Err(NetError::Head("its head is too long"));
        }
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(httparse::Error::TooManyHeaders) => return Err(NetError::Head("it has too many headers")),
        Err(_) => return Err(NetError::Head("its head can't be read")),
    };
    let (Some(status), Some(version)) = (response.code, response.version) else {
        return Err(NetError::Head("it has no status"));
    };
    if !(100..600).contains(&status) || status == 101 {
        return Err(NetError::Head("its status is none that can be asked for"));
    }
    let mut headers = Headers::with_room_for(response.headers);
    for header in response.headers.iter() {
        match std::str::from_utf8(header.value) {
            Ok(value) => headers.push(header.name, value),
            // Whoever wrote the object chose it.
            Err(_) if is_metadata(header.name) => {}
            Err(_) => return Err(NetError::Head("a header is not text")),
        }
    }
    let (mut stays, mut closes) = (version == 1, false);
    let mut content_length = None;
    let mut chunked = false;
    for (name, value) in headers.iter() {
        match name {
            "content-length" => {
                let len = parse_len(value).ok_or(NetError::Head("Content-Length is not a length"))?;
                if content_length.is_some_and(|before| before != len) {
                    return Err(NetError::Head("it has two Content-Lengths"));
                }
                content_length = Some(len);
            }
            "content-range" | "etag" if headers.get(name) != Some(value) => {
                return Err(NetError::Head("it has two Content-Ranges, or two ETags"));
            }
            "transfer-encoding" if value.trim().eq_ignore_ascii_case("chunked") && !chunked => chunked = true,
            "transfer-encoding" => return Err(NetError::Head("its Transfer-Encoding is not chunked")),
            "connection" => {
                let has = |word: &str| {
                    value
                        .split(',')
                        .any(|part| part.trim().eq_ignore_ascii_case(word))
                };
                stays |= has("keep-alive");
                closes |= has("close");
            }
            _ => {}
        }
    }
    let framing = match (chunked, content_length) {
        (true, Some(_)) => return Err(NetError::Head("it has a Content-Length and is chunked")),
        (true, None) if version == 0 => return Err(NetError::Head("it is chunked, which HTTP/1.0 has not")),
        _ if bodyless || status < 200 || status == 204 || status == 304 => Framing::Length(0),
        (true, None) => Framing::Chunked,
        (false, Some(len)) => Framing::Length(len),
        (false, None) => Framing::Close,
    };
    let head = ResponseHead {
        status,
        headers,
        framing,
        keep_alive: stays && !closes && framing != Framing::Close,
    };
    Ok(Some((head, len)))
}

/// Digits only: no sign, no list.
fn parse_len(text: &str) -> Option<usize> {
    let text = text.trim_matches([' ', '\t']);
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    text.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn head(lines: &str) -> Result<ResponseHead, String> {
        let text = format!("{}\r\n\r\n", lines.replace('\n', "\r\n"));
        match parse(text.as_bytes(), false) {
            Ok(Some((head, len))) => {
                assert_eq!(len, text.len());
                Ok(head)
            }
            Ok(None) => Err("partial".into()),
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn framing_and_keep_alive() {
        let length = head("HTTP/1.1 206 Partial Content\nContent-Length: 12\nETag: \"a\"").unwrap();
        assert_eq!((length.framing, length.keep_alive), (Framing::Length(12), true));
        assert_eq!(length.header("etag"), Some("\"a\""));
        let chunked = head("HTTP/1.1 200 OK\ntransfer-encoding: Chunked").unwrap();
        assert_eq!((chunked.framing, chunked.keep_alive), (Framing::Chunked, true));
        let until_close = head("HTTP/1.1 200 OK").unwrap();
        assert_eq!(
            (until_close.framing, until_close.keep_alive),
            (Framing::Close, false)
        );
        assert_eq!(
            head("HTTP/1.1 204 No Content").unwrap().framing,
            Framing::Length(0)
        );
        assert!(
            !head("HTTP/1.1 200 OK\nContent-Length: 1\nConnection: Close")
                .unwrap()
                .keep_alive
        );
        assert!(!head("HTTP/1.0 200 OK\nContent-Length: 1").unwrap().keep_alive);
        assert!(
            head("HTTP/1.0 200 OK\nContent-Length: 1\nConnection: keep-alive")
                .unwrap()
                .keep_alive
        );
        for connection in [
            "close\nConnection: keep-alive",
            "keep-alive\nConnection: close",
            "keep-alive, close",
        ] {
            let both = head(&format!(
                "HTTP/1.1 200 OK\nContent-Length: 1\nConnection: {connection}"
            ));
            assert!(!both.unwrap().keep_alive, "{connection}");
        }
        let twice = head("HTTP/1.1 200 OK\nContent-Length: 5\nContent-Length: 5").unwrap();
        assert_eq!(twice.framing, Framing::Length(5));
        let text = b"HTTP/1.1 200 OK\r\nContent-Length: 77\r\n\r\n";
        let (of_head, _) = parse(text, true).unwrap().unwrap();
        assert_eq!(of_head.framing, Framing::Length(0), "a HEAD's answer has no body");
    }

    #[test]
    fn trickery_is_refused() {
        for bad in [
            "HTTP/1.1 200 OK\nContent-Length: 5\nContent-Length: 6",
            "HTTP/1.1 200 OK\nContent-Length: 5\nTransfer-Encoding: chunked",
            "HTTP/1.1 206 Partial Content\nContent-Length: 5\nContent-Range: bytes 0-4/9\nContent-Range: bytes 1-5/9",
            "HTTP/1.1 200 OK\nContent-Length: 5\nETag: \"a\"\nEtag: \"b\"",
            "HTTP/1.1 200 OK\nTransfer-Encoding: gzip, chunked",
            "HTTP/1.0 200 OK\nTransfer-Encoding: chunked",
            "HTTP/1.1 200 OK\nTransfer-Encoding: chunked\nTransfer-Encoding: chunked",
            "HTTP/1.1 200 OK\nContent-Length: +5",
            "HTTP/1.1 200 OK\nContent-Length: -5",
            "HTTP/1.1 200 OK\nContent-Length: 5, 5",
            "HTTP/1.1 200 OK\nContent-Length:",
            "HTTP/1.1 200 OK\nContent-Length: 99999999999999999999999",
            "HTTP/1.1 200 OK\nContent-Length: 0x10",
            "HTTP/1.1 200 OK\nX: a\n folded",
            "HTTP/1.1 200 OK\nno colon",
            "HTTP/1.1 200 OK\nContent-Length : 5",
            "HTTP/1.1 101 Switching Protocols",
            "HTTP/1.1 999 What",
            "HTTP/2 200 OK",
            "SSH-2.0-OpenSSH",
            "<html>",
        ] {
            assert!(head(bad).is_err(), "{bad}");
        }
        let many = format!("HTTP/1.1 200 OK{}", "\na: b".repeat(HEADERS_MAX + 1));
        assert!(head(&many).is_err());
    }

    /// Who may write an object chooses its metadata, and must not take it from readers by that.
    #[test]
    fn metadata_that_is_no_text_is_passed_over() {
        let of = |name: &str| {
            let mut bytes = format!("HTTP/1.1 200 OK\r\n{name}: a").into_bytes();
            bytes.extend(b"\xff\r\netag: \"e\"\r\ncontent-length: 0\r\n\r\n");
            parse(&bytes, true).map(|head| head.unwrap().0)
        };
        let head = of("X-Amz-Meta-Owner").unwrap();
        assert_eq!(
            (head.header("etag"), head.header("x-amz-meta-owner")),
            (Some("\"e\""), None)
        );
        assert!(of("x-amz-version-id").is_err());
    }

    #[test]
    fn a_long_head_ends() {
        let mut bytes = b"HTTP/1.1 200 OK\r\nx: ".to_vec();
        bytes.resize(HEAD_BYTES_MAX - 1, b'a');
        assert!(parse(&bytes, false).unwrap().is_none());
        bytes.push(b'a');
        assert!(parse(&bytes, false).is_err());
    }

    proptest! {
        #[test]
        fn noise_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..2000), bodyless in any::<bool>()) {
            let _ = parse(&bytes, bodyless);
        }

        #[test]
        fn a_changed_byte_never_panics(at in any::<prop::sample::Index>(), byte in any::<u8>()) {
            let mut bytes = b"HTTP/1.1 206 Partial Content\r\nContent-Length: 12\r\nETag: \"a\"\r\nConnection: close\r\n\r\n".to_vec();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            let _ = parse(&bytes, false);
        }
    }
}
