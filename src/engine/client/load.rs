//! A load's outcomes, read line by line as the daemon sends them.

use std::sync::Arc;

use bytes::{Buf, BytesMut};
use http_body_util::BodyExt;
use hyper::HeaderMap;
use hyper::body::Incoming;
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::time::Instant;

use super::connection::ApiConnection;
use super::{ClientError, check, version};
use crate::protocol::LoadLine;

/// A stream of JSON lines; its connection ends with it.
pub(super) struct StreamedLines {
    headers: HeaderMap,
    body: Incoming,
    buffer: BytesMut,
    connection: ApiConnection,
}

impl StreamedLines {
    pub async fn new(
        mut connection: ApiConnection,
        answer: hyper::Response<Incoming>,
    ) -> Result<Self, ClientError> {
        let (head, body) = answer.into_parts();
        if !head.status.is_success() {
            let body = connection.while_it_works(body.collect()).await?.to_bytes();
            check(head.status, &head.headers, &body)?;
            return Err(ClientError::Answer(format!("status {}", head.status)));
        }
        Ok(Self {
            headers: head.headers,
            body,
            buffer: BytesMut::new(),
            connection,
        })
    }

    /// None at the stream's end.
    pub async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, ClientError> {
        loop {
            if let Some(end) = self.buffer.iter().position(|&byte| byte == b'\n') {
                let line = self.buffer.split_to(end);
                self.buffer.advance(1);
                let parsed = serde_json::from_slice(&line);
                return parsed
                    .map(Some)
                    .map_err(|error| version::not_understood(&self.headers, error));
            }
            match self.connection.while_it_works(self.body.frame()).await {
                None => return Ok(None),
                Some(frame) => {
                    if let Ok(bytes) = frame?.into_data() {
                        self.buffer.extend_from_slice(&bytes);
                    }
                }
            }
        }
    }

    pub fn into_connection(self) -> ApiConnection {
        self.connection
    }
}

/// The outcomes of a load, as they come.
pub struct LoadLines {
    pub(super) lines: Option<StreamedLines>,
    pub(super) client: super::Client,
    /// By then a live node has ended the load.
    pub(super) until: Option<Instant>,
    /// The session's flag.
    pub(super) over: Arc<watch::Sender<bool>>,
}

impl LoadLines {
    /// None after the last one. A stream that is cut before its end is an error.
    pub async fn next(&mut self) -> Result<Option<LoadLine>, ClientError> {
        let Some(until) = self.until else {
            return self.next_line().await;
        };
        let line = tokio::time::timeout_at(until, self.next_line()).await;
        line.unwrap_or_else(|_| {
            // Slots that were lent to a lost answer end with the session.
            self.over.send_replace(true);
            Err(ClientError::Late(self.client.0.patience))
        })
    }

    async fn next_line(&mut self) -> Result<Option<LoadLine>, ClientError> {
        let Some(lines) = &mut self.lines else {
            return Ok(None);
        };
        match lines.next().await? {
            Some(LoadLine::End { .. }) => {
                // Only the end of the body follows.
                let rest: Option<LoadLine> = lines.next().await?;
                if rest.is_none()
                    && let Some(lines) = self.lines.take()
                {
                    let connection = lines.into_connection();
                    if connection.is_open() {
                        self.client.kept().push(connection);
                    }
                }
                Ok(None)
            }
            Some(line) => Ok(Some(line)),
            None => Err(ClientError::Answer("the load was cut before its end".into())),
        }
    }
}
