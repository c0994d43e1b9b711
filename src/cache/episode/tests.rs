//! Tests of episodes: the lines that reach the log, under a paused clock.

use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tracing::subscriber::DefaultGuard;
use tracing_subscriber::fmt::MakeWriter;

use super::*;

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

impl Lines {
    /// Collects the lines that this thread logs from here on.
    fn taken() -> (Self, DefaultGuard) {
        let lines = Self::default();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::INFO)
            .with_ansi(false)
            .with_writer(lines.clone());
        (lines, tracing::subscriber::set_default(subscriber.finish()))
    }

    fn take(&self) -> Vec<String> {
        let bytes = std::mem::take(&mut *self.0.lock().unwrap());
        String::from_utf8(bytes)
            .unwrap()
            .lines()
            .map(str::to_owned)
            .collect()
    }
}

const MINUTE: Duration = Duration::from_mins(1);

#[tokio::test(start_paused = true)]
async fn a_long_outage_takes_a_line_a_minute() {
    let (lines, _guard) = Lines::taken();
    let episode = Episode::new("chunks wait", MINUTE);
    for number in 0..3000 {
        episode.tell(&format_args!("number {number}"));
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let told = lines.take();
    assert_eq!(told.len(), 5, "{told:#?}");
    assert!(told[0].ends_with("chunks wait: number 0"), "{told:#?}");
    assert!(
        told[1].contains("600 times more in 60s, the last time: number 600"),
        "{told:#?}"
    );
    assert!(told[2].contains("600 times more"), "{told:#?}");
    tokio::time::sleep(3 * MINUTE).await;
    let told = lines.take();
    assert_eq!(told.len(), 2, "{told:#?}");
    assert!(
        told[1].contains("that is over") && told[1].contains("all=3000"),
        "{told:#?}"
    );
    // Another one.
    episode.tell(&"again");
    assert!(lines.take()[0].ends_with("chunks wait: again"));
}

#[tokio::test(start_paused = true)]
async fn a_single_one_is_one_line_and_what_comes_and_goes_is_one_episode() {
    let (lines, _guard) = Lines::taken();
    let episode = Episode::new("chunks wait", MINUTE);
    episode.tell(&"once");
    tokio::time::sleep(3 * MINUTE).await;
    assert_eq!(lines.take().len(), 1);
    for _ in 0..20 {
        episode.tell(&"half a minute later");
        tokio::time::sleep(MINUTE / 2).await;
    }
    assert!(lines.take().len() <= 11);
}

#[test]
fn without_a_runtime_each_is_told() {
    let (lines, _guard) = Lines::taken();
    let episode = Episode::new("chunks wait", MINUTE);
    episode.tell(&"one");
    episode.tell(&"two");
    assert_eq!(lines.take().len(), 2);
}
