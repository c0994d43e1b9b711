//! A modelled DNS server: what it says of the one name that all gateways ask for.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::future::BoxFuture;
use kvgate::s3::dns::{AddressLookup, Carrier, DnsError, NameAddresses};
use tokio::time::sleep;

use super::rgw::lock;

const ROUND_TRIP: Duration = Duration::from_millis(1);
/// A and AAAA.
const QUESTIONS: u64 = 2;
/// What EDNS lets through by UDP, and the bytes of one record.
const UDP_BYTES: usize = 1232;
const RECORD_BYTES: usize = 16;

pub struct Names {
    listed: Mutex<Vec<SocketAddr>>,
    ttl: Duration,
    /// Addresses of a UDP answer that does not say that it was cut, picked at random each time.
    cut: Option<usize>,
    questions: AtomicU64,
    by_tcp: AtomicU64,
}

impl Names {
    pub fn new(ttl: Duration, cut: Option<usize>) -> Self {
        Self {
            listed: Mutex::default(),
            ttl,
            cut,
            questions: AtomicU64::new(0),
            by_tcp: AtomicU64::new(0),
        }
    }

    pub fn change(&self, change: impl FnOnce(&mut Vec<SocketAddr>)) {
        change(&mut lock(&self.listed));
    }

    /// By UDP and by TCP.
    pub fn questions(&self) -> (u64, u64) {
        (
            self.questions.load(Ordering::Relaxed),
            self.by_tcp.load(Ordering::Relaxed),
        )
    }

    fn answer(&self, carrier: Carrier) -> NameAddresses {
        let mut addresses = lock(&self.listed).clone();
        let by_tcp = carrier == Carrier::Tcp;
        let counter = if by_tcp { &self.by_tcp } else { &self.questions };
        counter.fetch_add(QUESTIONS, Ordering::Relaxed);
        match self.cut.filter(|_| !by_tcp) {
            Some(most) => {
                fastrand::shuffle(&mut addresses);
                addresses.truncate(most);
            }
            // It says that it was cut: the same question goes by TCP.
            None if !by_tcp && addresses.len() * RECORD_BYTES > UDP_BYTES => {
                self.by_tcp.fetch_add(1, Ordering::Relaxed);
            }
            None => {}
        }
        addresses.sort_unstable();
        NameAddresses {
            addresses,
            ttl: self.ttl,
            failure: None,
        }
    }
}

/// One gateway's questions.
pub struct Asks(pub Arc<Names>);

impl AddressLookup for Asks {
    fn look_up(&mut self, carrier: Carrier) -> BoxFuture<'_, Result<NameAddresses, DnsError>> {
        Box::pin(async move {
            sleep(ROUND_TRIP).await;
            Ok(self.0.answer(carrier))
        })
    }
}
