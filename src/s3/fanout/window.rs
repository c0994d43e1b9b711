//! Bytes that one endpoint may have in flight. The window grows while that brings throughput.

use std::time::Duration;

use tokio::time::Instant;

/// Bytes that one endpoint may have in flight.
#[derive(Debug, Clone, Copy)]
pub struct WindowOptions {
    pub start: usize,
    pub min: usize,
    pub max: usize,
}

/// How much it grows at a time.
const GROWTH: f64 = 1.5;
/// Growing it by half is worth it if throughput becomes this many times as high.
const GAIN: f64 = 1.1;
/// Epochs to keep it after it did not, or after it shrank.
const HOLD: u32 = 16;
/// An epoch lasts until a window of bytes came, and at least this time.
const EPOCH: Duration = Duration::from_millis(50);
/// Answers of the same moment shrink it once.
const SHRINK_EVERY: Duration = Duration::from_millis(200);

/// Grows while that brings throughput, shrinks when the endpoint says that it is too much.
#[derive(Debug)]
pub(super) struct Window {
    options: WindowOptions,
    bytes: usize,
    began: Instant,
    idle_since: Option<Instant>,
    /// In this epoch.
    came: usize,
    /// With this in flight, nothing would have had to wait; 0: nothing had to, so throughput does not say what the endpoint
    /// can do with this window.
    wanted: usize,
    /// Bytes a second in the last epoch; 0 before the first.
    throughput: f64,
    trend: Trend,
    shrank: Option<Instant>,
}

#[derive(Debug)]
enum Trend {
    /// From the window and the throughput before.
    Growing {
        from: usize,
        throughput: f64,
    },
    Holding {
        epochs: u32,
    },
}

impl Window {
    pub fn new(options: WindowOptions, now: Instant) -> Self {
        Self {
            bytes: options.start.clamp(options.min, options.max),
            options,
            began: now,
            idle_since: Some(now),
            came: 0,
            wanted: 0,
            throughput: 0.0,
            trend: Trend::Holding { epochs: 0 },
            shrank: None,
        }
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes a second, lately.
    pub fn throughput(&self) -> f64 {
        self.throughput
    }

    /// Nothing is in flight any more.
    pub fn idles(&mut self, now: Instant) {
        self.idle_since = Some(now);
    }

    /// Something is in flight; the time without counts for nothing.
    pub fn works(&mut self, now: Instant) {
        if let Some(since) = self.idle_since.take() {
            self.began += now - since;
        }
    }

    /// A request could not be sent for lack of room: with it, `wanted` bytes would have been in flight.
    pub fn is_full(&mut self, wanted: usize) {
        self.wanted = self.wanted.max(wanted);
    }

    /// Bytes of a body, or of an upload, are through.
    pub fn came(&mut self, bytes: usize, now: Instant) {
        self.came = self.came.saturating_add(bytes);
        let elapsed = now - self.began;
        if elapsed < EPOCH || self.came < self.bytes {
            return;
        }
        self.throughput = self.came as f64 / elapsed.as_secs_f64();
        if self.wanted > 0 {
            self.adapt();
        }
        self.epoch(now);
    }

    fn adapt(&mut self) {
        match &mut self.trend {
            Trend::Growing { from, throughput } if self.throughput < *throughput * GAIN => {
                self.bytes = *from;
                self.trend = Trend::Holding { epochs: HOLD };
            }
            Trend::Holding { epochs: left @ 1.. } => *left -= 1,
            _ if self.bytes < self.options.max => {
                self.trend = Trend::Growing {
                    from: self.bytes,
                    throughput: self.throughput,
                };
                // Less than what waits is room for nothing more, and would show no gain.
                self.bytes = scaled(self.bytes, GROWTH).max(self.wanted).min(self.options.max);
            }
            _ => self.trend = Trend::Holding { epochs: HOLD },
        }
    }

    /// The endpoint is overloaded: a 503, a time-out.
    pub fn shrink(&mut self, now: Instant) {
        if self.shrank.is_some_and(|at| now - at < SHRINK_EVERY) {
            return;
        }
        self.shrank = Some(now);
        self.bytes = (self.bytes / 2).max(self.options.min);
        self.trend = Trend::Holding { epochs: HOLD };
        self.epoch(now);
    }

    fn epoch(&mut self, now: Instant) {
        self.began = now;
        self.came = 0;
        self.wanted = 0;
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a window is small and positive"
)]
fn scaled(bytes: usize, factor: f64) -> usize {
    (bytes as f64 * factor) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;
    const OPTIONS: WindowOptions = WindowOptions {
        start: 8 * MIB,
        min: 2 * MIB,
        max: 100 * MIB,
    };

    /// An endpoint whose throughput grows with its window up to `most` bytes in flight, kept full for so many epochs.
    fn driven(window: &mut Window, now: &mut Instant, most: usize, epochs: usize) {
        for _ in 0..epochs {
            window.is_full(window.bytes() + 1);
            let came = window.bytes();
            // Twice a second, what is in flight comes; of what is more than it can do, nothing.
            *now += Duration::from_secs_f64(0.5 * (came as f64 / most as f64).max(1.0));
            window.came(came, *now);
        }
    }

    #[test]
    fn it_grows_while_throughput_does() {
        let mut now = Instant::now();
        let mut window = Window::new(OPTIONS, now);
        driven(&mut window, &mut now, 40 * MIB, 200);
        let settled = window.bytes();
        assert!((25 * MIB..=60 * MIB).contains(&settled), "{settled}");
        driven(&mut window, &mut now, 1000 * MIB, 100);
        assert!(window.bytes() > 80 * MIB, "{}", window.bytes());
    }

    /// A request of half a window more let in nothing, so throughput stayed, and the window went back.
    #[test]
    fn it_grows_by_what_waits() {
        let mut now = Instant::now();
        let mut window = Window::new(OPTIONS, now);
        let large = 8 * MIB;
        for _ in 0..100 {
            let in_flight = window.bytes() / large * large;
            window.is_full(in_flight + large);
            now += Duration::from_secs(1);
            window.came(in_flight, now);
        }
        assert!(window.bytes() > 80 * MIB, "{}", window.bytes());
    }

    #[test]
    fn it_stays_where_nothing_waits() {
        let mut now = Instant::now();
        let mut window = Window::new(OPTIONS, now);
        for _ in 0..100 {
            now += Duration::from_millis(100);
            window.came(8 * MIB, now);
        }
        assert_eq!(window.bytes(), OPTIONS.start);
        assert!(window.throughput() > 79.0 * MIB as f64, "{}", window.throughput());
    }

    #[test]
    fn time_without_requests_does_not_count() {
        let mut now = Instant::now();
        let mut window = Window::new(OPTIONS, now);
        for _ in 0..8 {
            now += Duration::from_secs(60);
            window.works(now);
            now += Duration::from_millis(100);
            window.came(MIB, now);
            window.idles(now);
        }
        assert!(window.throughput() > 9.9 * MIB as f64, "{}", window.throughput());
    }

    #[test]
    fn it_shrinks_once_for_answers_of_the_same_moment() {
        let mut now = Instant::now();
        let mut window = Window::new(OPTIONS, now);
        for _ in 0..10 {
            window.shrink(now);
        }
        assert_eq!(window.bytes(), 4 * MIB);
        for _ in 0..10 {
            now += Duration::from_secs(1);
            window.shrink(now);
        }
        assert_eq!(window.bytes(), OPTIONS.min);
        driven(&mut window, &mut now, 40 * MIB, 200);
        assert!(window.bytes() > 20 * MIB, "it recovers");
    }
}
