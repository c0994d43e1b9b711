//! A way to a server on which some requests get another answer, or none.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt, copy, sink};
use tokio::net::TcpStream;

use super::backends::listen;

/// Its endpoint. The first `times` requests that `is_meant` takes for those, by what comes first of them, get `answer`.
pub async fn that_answers(
    endpoint: &str,
    is_meant: impl Fn(&[u8]) -> bool + Send + Sync + 'static,
    times: usize,
    answer: Option<&'static str>,
) -> String {
    let server = endpoint.strip_prefix("http://").unwrap().to_owned();
    let (listener, endpoint) = listen().await;
    let meant = Arc::new((is_meant, AtomicUsize::new(0)));
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let (mut answers, mut requests) = TcpStream::connect(&server).await.unwrap().into_split();
            let (mut asks, mut hears) = client.into_split();
            let meant = Arc::clone(&meant);
            tokio::spawn(async move {
                let (mut asked, mut answered) = (vec![0; 64 << 10], vec![0; 64 << 10]);
                loop {
                    tokio::select! {
                        len = asks.read(&mut asked) => {
                            let Ok(len @ 1..) = len else { return };
                            if meant.0(&asked[..len]) && meant.1.fetch_add(1, Ordering::Relaxed) < times {
                                let Some(answer) = answer else { return };
                                hears.write_all(answer.as_bytes()).await.unwrap();
                                // Closed with a body that nobody read, the connection would lose the answer.
                                let _ = copy(&mut asks, &mut sink()).await;
                                return;
                            }
                            requests.write_all(&asked[..len]).await.unwrap();
                        }
                        len = answers.read(&mut answered) => {
                            let Ok(len @ 1..) = len else { return };
                            if hears.write_all(&answered[..len]).await.is_err() {
                                return;
                            }
                        }
                    }
                }
            });
        }
    });
    endpoint
}
