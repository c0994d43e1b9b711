//! Keeps a name's addresses up to date in the background. While DNS fails the old ones stay.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use serde::Serialize;
use tokio::sync::watch;

use super::error::DnsError;
use super::lookup::NameLookup;
use super::servers::Carrier;

/// The least time between two lookups, also with a lower `[dns] min_ttl`.
const WAIT_MIN: Duration = Duration::from_millis(10);

/// The part of the time that chance adds to it: gateways that started together must not ask together for ever.
const JITTER: f64 = 0.25;

/// So many answers by UDP in a row may lack an address that stays. Where each has 3 of 10 addresses at random, as many lack
/// one in 17.
const LACKED_BY: u64 = 8;

/// Where addresses come from.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum AddressSource {
    /// A name and a port: all its A and AAAA records. A literal IP is its own address, with or without brackets.
    Host { name: String, port: u16 },
    /// A SRV name: the targets with the lowest priority number, each with its own port. Weights are not used: the
    /// fan-out measures how each address fares.
    Srv { name: String },
}

#[derive(Debug, Clone)]
pub struct DnsOptions {
    /// Asked in this order, each one when those before it failed. Empty: the system's (`/etc/resolv.conf`), with its
    /// search list; these here take every name as it is.
    pub servers: Vec<SocketAddr>,
    /// Ask by TCP alone; otherwise by UDP first, and by TCP where an answer says that it was cut, or differs from the last.
    pub tcp: bool,
    /// The floor of TTLs, and the wait after a failure.
    pub min_ttl: Duration,
    /// The ceiling of TTLs; where both disagree the floor wins. Also how long an address stays that answers by UDP lack,
    /// while TCP does not tell whether it is gone; and for [`LACKED_BY`] answers, which may take longer.
    pub max_ttl: Duration,
    /// One lookup as a whole.
    pub timeout: Duration,
}

/// Keeps lists of addresses up to date. Clones are cheap.
#[derive(Clone)]
pub struct Resolver {
    options: Arc<DnsOptions>,
    lookups: Lookups,
}

type Lookups = Arc<dyn Fn(&AddressSource) -> Box<dyn AddressLookup> + Send + Sync>;

/// Looks one source up, again and again: a [`Resolver`]'s way to DNS.
pub trait AddressLookup: Send {
    fn look_up(&mut self, carrier: Carrier) -> BoxFuture<'_, Result<NameAddresses, DnsError>>;
}

/// At least one family of one name had addresses.
#[derive(Debug)]
pub struct NameAddresses {
    /// Sorted, without duplicates.
    pub addresses: Vec<SocketAddr>,
    /// The shortest of all records used.
    pub ttl: Duration,
    /// The error of a family (IPv4, IPv6) that failed beside one that did not.
    pub failure: Option<DnsError>,
}

/// The state of an [`AddressSource`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Resolved {
    /// The time of the last good answer. It changes without notice. None before it, and for an address that needs no DNS.
    pub answered: Option<Instant>,
    /// Sorted, without duplicates. The last good answer: kept while DNS fails. Empty until there was one.
    pub addresses: Arc<[SocketAddr]>,
    /// Why the last lookup failed: a sentence with the name and what to check. None after a good one, and before the
    /// first ended.
    pub error: Option<Arc<str>>,
}

/// A name and its addresses, for operators.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NameState {
    pub name: String,
    pub addresses: usize,
    /// Since the last good answer. None before it, and for an address that needs no DNS.
    pub age_seconds: Option<u64>,
    /// Why the last lookup failed.
    pub error: Option<String>,
}

impl NameState {
    pub fn new(name: &AddressSource, resolved: &Resolved) -> Self {
        Self {
            name: name.to_string(),
            addresses: resolved.addresses.len(),
            age_seconds: resolved.answered.map(|answered| answered.elapsed().as_secs()),
            error: resolved.error.as_deref().map(str::to_owned),
        }
    }
}

impl Resolver {
    /// Sends nothing and reads no file: what is wrong with the system's configuration is an error of the lookups.
    pub fn new(options: DnsOptions) -> Self {
        let asked = Arc::new(options.clone());
        let lookup = move |source: &AddressSource| -> Box<dyn AddressLookup> {
            Box::new(NameLookup::new(Arc::clone(&asked), source.clone()))
        };
        Self::over(options, lookup)
    }

    /// Over lookups of another kind: a model of DNS.
    pub fn over(
        options: DnsOptions,
        lookups: impl Fn(&AddressSource) -> Box<dyn AddressLookup> + Send + Sync + 'static,
    ) -> Self {
        Self {
            options: Arc::new(options),
            lookups: Arc::new(lookups),
        }
    }

    /// The addresses, refreshed in the background for as long as a receiver lives. It changes only when addresses or
    /// error differ. Needs a tokio runtime.
    ///
    /// A literal IP needs no DNS and no task: it is there at once, and `changed` says that nothing will follow.
    pub fn watch(&self, source: &AddressSource) -> watch::Receiver<Resolved> {
        let (tell, told) = watch::channel(Resolved::default());
        if let Some(address) = source.literal() {
            tell.send_replace(Resolved {
                answered: None,
                addresses: [address].into(),
                error: None,
            });
            return told;
        }
        let refresh = Refresh {
            options: Arc::clone(&self.options),
            source: source.clone(),
            lookup: (self.lookups)(source),
            is_cut: false,
            seen: BTreeMap::new(),
            answers: 0,
            tell: tell.clone(),
        };
        tokio::spawn(async move {
            tokio::select! {
                () = tell.closed() => {}
                () = refresh.run() => {}
            }
        });
        told
    }
}

impl fmt::Debug for Resolver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Resolver({:?})", self.options)
    }
}

impl AddressSource {
    pub(super) fn name(&self) -> &str {
        match self {
            Self::Host { name, .. } | Self::Srv { name } => name,
        }
    }

    /// The address itself, where it is one.
    pub fn literal(&self) -> Option<SocketAddr> {
        let Self::Host { name, port } = self else {
            return None;
        };
        let bare = name.strip_prefix('[').and_then(|name| name.strip_suffix(']'));
        let ip: IpAddr = bare.unwrap_or(name).parse().ok()?;
        Some(SocketAddr::new(ip, *port))
    }
}

impl fmt::Display for AddressSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host { name, port } => write!(f, "{name}:{port}"),
            Self::Srv { name } => write!(f, "SRV {name}"),
        }
    }
}

struct Refresh {
    options: Arc<DnsOptions>,
    source: AddressSource,
    lookup: Box<dyn AddressLookup>,
    /// Answers by UDP lack addresses, and don't say so: TCP is asked first.
    is_cut: bool,
    /// When an answer had each address last, and which one that was.
    seen: BTreeMap<SocketAddr, (tokio::time::Instant, u64)>,
    /// Answers so far.
    answers: u64,
    tell: watch::Sender<Resolved>,
}

impl Refresh {
    async fn run(mut self) {
        loop {
            let result = self.look_up().await;
            let wait = wait(&result, &self.options);
            self.publish(result);
            tokio::time::sleep(wait.mul_f64(1.0 + JITTER * fastrand::f64())).await;
        }
    }

    /// The addresses of the name, with those that an answer may have left out.
    async fn look_up(&mut self) -> Result<NameAddresses, DnsError> {
        if self.options.tcp {
            return self.lookup.look_up(Carrier::Tcp).await;
        }
        if self.is_cut
            && let Ok(all) = self.lookup.look_up(Carrier::Tcp).await
        {
            return Ok(self.saw(all, true));
        }
        let found = self.lookup.look_up(Carrier::Both).await?;
        if found.addresses == *self.tell.borrow().addresses {
            return Ok(self.saw(found, true));
        }
        let (few, ttl) = (found.addresses.clone(), found.ttl);
        let failure = found.failure.is_some();
        let found = self.saw(found, false);
        // What came is used at once; TCP tells what is gone.
        self.publish(Ok(NameAddresses {
            addresses: found.addresses.clone(),
            ttl,
            failure: None,
        }));
        match self.lookup.look_up(Carrier::Tcp).await {
            Ok(all) => {
                let is_part = few
                    .iter()
                    .all(|address| all.addresses.binary_search(address).is_ok());
                if is_part && few.len() < all.addresses.len() && !failure && all.failure.is_none() {
                    self.is_cut = true;
                    let (few, all) = (few.len(), all.addresses.len());
                    tracing::info!(source = %self.source, few, all, "DNS cuts its answers by UDP: TCP is asked");
                }
                Ok(self.saw(all, true))
            }
            Err(error) => {
                tracing::debug!(source = %self.source, "TCP does not tell whether that is all: {error}");
                Ok(found)
            }
        }
    }

    /// Remembers what an answer has. Where it may not be `whole`, those that others had lately are in it, too.
    fn saw(&mut self, mut answer: NameAddresses, whole: bool) -> NameAddresses {
        let now = tokio::time::Instant::now();
        if whole {
            self.seen.clear();
        }
        self.answers += 1;
        let last = (now, self.answers);
        self.seen
            .extend(answer.addresses.iter().map(|&address| (address, last)));
        self.seen.retain(|_, (seen, answer)| {
            now - *seen < self.options.max_ttl || self.answers - *answer <= LACKED_BY
        });
        answer.addresses = self.seen.keys().copied().collect();
        answer
    }

    fn publish(&self, result: Result<NameAddresses, DnsError>) {
        let last = self.tell.borrow().clone();
        let next = match result {
            Ok(found) => {
                if let Some(failure) = found.failure {
                    tracing::debug!(source = %self.source, "one family could not be resolved: {failure}");
                }
                Resolved {
                    answered: Some(Instant::now()),
                    addresses: found.addresses.into(),
                    error: None,
                }
            }
            Err(error) => Resolved {
                answered: last.answered,
                addresses: Arc::clone(&last.addresses),
                error: Some(error.to_string().into()),
            },
        };
        let has_changed = next.addresses != last.addresses || next.error != last.error;
        if has_changed {
            self.log(&last, &next);
        }
        self.tell.send_if_modified(|told| {
            *told = next;
            has_changed
        });
    }

    fn log(&self, last: &Resolved, next: &Resolved) {
        let source = &self.source;
        match (&last.error, &next.error) {
            (None, Some(error)) => {
                let kept = next.addresses.len();
                tracing::warn!(%source, kept, "name resolution fails: {error}");
            }
            (Some(_), Some(error)) => tracing::debug!(%source, "name resolution still fails: {error}"),
            (Some(_), None) => tracing::info!(%source, "name resolution works again"),
            (None, None) => {}
        }
        let (added, removed) = difference(&last.addresses, &next.addresses);
        if last.addresses.is_empty() {
            tracing::debug!(%source, addresses = ?next.addresses, "resolved");
        } else if !(added.is_empty() && removed.is_empty()) {
            let addresses = next.addresses.len();
            tracing::info!(%source, addresses, ?added, ?removed, "addresses changed");
        }
    }
}

/// The time until the next lookup, at least.
fn wait(result: &Result<NameAddresses, DnsError>, options: &DnsOptions) -> Duration {
    let ttl = match result {
        Ok(NameAddresses {
            failure: None, ttl, ..
        }) => (*ttl).min(options.max_ttl),
        _ => Duration::ZERO,
    };
    ttl.max(options.min_ttl).max(WAIT_MIN)
}

/// The difference of two sets, both ways. Both are sorted.
fn difference(last: &[SocketAddr], next: &[SocketAddr]) -> (Vec<SocketAddr>, Vec<SocketAddr>) {
    let without = |these: &[SocketAddr], others: &[SocketAddr]| {
        let gone = these
            .iter()
            .filter(|address| others.binary_search(address).is_err());
        gone.copied().collect()
    };
    (without(next, last), without(last, next))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    const OPTIONS: DnsOptions = DnsOptions {
        servers: Vec::new(),
        tcp: false,
        min_ttl: Duration::from_secs(1),
        max_ttl: Duration::from_secs(60),
        timeout: Duration::from_secs(5),
    };

    fn host(name: &str) -> AddressSource {
        AddressSource::Host {
            name: name.into(),
            port: 9000,
        }
    }

    fn no_target() -> DnsError {
        DnsError::NoTarget { name: "s3".into() }
    }

    fn found(ttl: u64) -> NameAddresses {
        NameAddresses {
            addresses: Vec::new(),
            ttl: Duration::from_secs(ttl),
            failure: None,
        }
    }

    #[test]
    fn a_literal_ip_needs_neither_dns_nor_a_runtime() {
        for (name, address) in [
            ("10.0.0.1", "10.0.0.1:9000"),
            ("::1", "[::1]:9000"),
            ("[2001:db8::1]", "[2001:db8::1]:9000"),
        ] {
            let told = Resolver::new(OPTIONS).watch(&host(name));
            let resolved = told.borrow().clone();
            assert_eq!(*resolved.addresses, [address.parse().unwrap()]);
            assert_eq!(resolved.error, None);
            assert!(told.has_changed().is_err(), "nothing will follow");
        }
        assert_eq!(host("10.0.0.1.example").literal(), None);
    }

    #[test]
    fn the_wait_is_the_ttl_between_floor_and_ceiling() {
        let seconds = |result| wait(&result, &OPTIONS).as_secs();
        assert_eq!(
            [0, 1, 30, 86400].map(|ttl| seconds(Ok(found(ttl)))),
            [1, 1, 30, 60]
        );
        assert_eq!(seconds(Err(no_target())), 1);
        let half = NameAddresses {
            failure: Some(no_target()),
            ..found(30)
        };
        assert_eq!(seconds(Ok(half)), 1, "what failed is asked for again soon");
        let never = DnsOptions {
            min_ttl: Duration::ZERO,
            max_ttl: Duration::ZERO,
            ..OPTIONS
        };
        assert!(wait(&Ok(found(30)), &never) > Duration::ZERO);
    }

    /// Says always the same, and counts the questions in each second.
    struct Counted(Arc<Mutex<[u32; 100]>>, tokio::time::Instant);

    impl AddressLookup for Counted {
        fn look_up(&mut self, _: Carrier) -> BoxFuture<'_, Result<NameAddresses, DnsError>> {
            let second = usize::try_from(self.1.elapsed().as_secs()).unwrap();
            if let Some(asked) = self.0.lock().unwrap().get_mut(second) {
                *asked += 1;
            }
            Box::pin(async { Ok(found(10)) })
        }
    }

    #[tokio::test(start_paused = true)]
    async fn those_that_start_together_ask_at_different_times() {
        fastrand::seed(7);
        let (asked, start) = (Arc::new(Mutex::new([0; 100])), tokio::time::Instant::now());
        let counted = Arc::clone(&asked);
        let resolver = Resolver::over(OPTIONS, move |_| Box::new(Counted(Arc::clone(&counted), start)));
        let watches: Vec<_> = (0..200).map(|_| resolver.watch(&host("s3"))).collect();
        tokio::time::sleep(Duration::from_secs(100)).await;
        let asked = asked.lock().unwrap();
        assert_eq!(asked[0], 200);
        // 18 a second, once they are apart.
        assert!(asked[70..].iter().all(|asked| *asked < 60), "{asked:?}");
        drop(watches);
    }

    /// Ten addresses, of which an answer by UDP has three, others each time.
    struct Cut {
        asked: Arc<Mutex<(u32, u32)>>,
        has_tcp: bool,
        ttl: u64,
    }

    impl AddressLookup for Cut {
        fn look_up(&mut self, carrier: Carrier) -> BoxFuture<'_, Result<NameAddresses, DnsError>> {
            let mut asked = self.asked.lock().unwrap();
            let first = asked.0 % 10;
            let all = if carrier == Carrier::Tcp {
                asked.1 += 1;
                self.has_tcp.then_some(0..10)
            } else {
                asked.0 += 3;
                Some(first..first + 3)
            };
            let ttl = self.ttl;
            let address = |n: u32| ([10, 0, 0, u8::try_from(n % 10).unwrap()], 80).into();
            let mut addresses: Vec<_> = all.iter().cloned().flatten().map(address).collect();
            addresses.sort_unstable();
            Box::pin(async move {
                all.map(|_| NameAddresses {
                    addresses,
                    ..found(ttl)
                })
                .ok_or_else(no_target)
            })
        }
    }

    /// The addresses after ten of these answers, and the questions.
    async fn of_cut_answers(has_tcp: bool, ttl: u64) -> (usize, (u32, u32)) {
        let asked = Arc::default();
        let counted = Arc::clone(&asked);
        let resolver = Resolver::over(OPTIONS, move |_| {
            let asked = Arc::clone(&counted);
            Box::new(Cut { asked, has_tcp, ttl })
        });
        let told = resolver.watch(&host("s3"));
        tokio::time::sleep(Duration::from_secs(10 * ttl)).await;
        let addresses = told.borrow().addresses.len();
        (addresses, *asked.lock().unwrap())
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_was_cut_is_asked_for_by_tcp_from_then_on() {
        let (addresses, (by_udp, by_tcp)) = of_cut_answers(true, 1).await;
        assert_eq!((addresses, by_udp), (10, 3));
        assert!(by_tcp >= 8, "{by_tcp}");
    }

    #[tokio::test(start_paused = true)]
    async fn without_tcp_addresses_stay_that_an_answer_lacks() {
        assert_eq!(of_cut_answers(false, 1).await.0, 10);
        // Each question comes after all that the ceiling keeps.
        assert_eq!(of_cut_answers(false, 60).await.0, 10);
        assert_eq!(of_cut_answers(false, 3600).await.0, 10);
    }

    /// The first answer has an address that no other has.
    #[tokio::test(start_paused = true)]
    async fn without_tcp_an_address_goes_that_many_answers_lack() {
        struct Leaving(Arc<Mutex<u64>>);
        impl AddressLookup for Leaving {
            fn look_up(&mut self, carrier: Carrier) -> BoxFuture<'_, Result<NameAddresses, DnsError>> {
                let address = |n: u8| SocketAddr::from(([10, 0, 0, n], 80));
                if carrier == Carrier::Tcp {
                    return Box::pin(async { Err(no_target()) });
                }
                let mut asked = self.0.lock().unwrap();
                *asked += 1;
                let mut addresses = vec![address(1)];
                addresses.extend((*asked == 1).then(|| address(2)));
                Box::pin(async {
                    Ok(NameAddresses {
                        addresses,
                        ..found(60)
                    })
                })
            }
        }
        let asked = Arc::default();
        let counted = Arc::clone(&asked);
        let resolver = Resolver::over(OPTIONS, move |_| Box::new(Leaving(Arc::clone(&counted))));
        let mut told = resolver.watch(&host("s3"));
        for addresses in [2, 1] {
            let is = |resolved: &Resolved| resolved.addresses.len() == addresses;
            told.wait_for(is).await.unwrap();
        }
        assert_eq!(*asked.lock().unwrap(), 1 + LACKED_BY + 1);
    }

    /// Nothing is left out of an answer that is the same as before, so TCP has nothing to say.
    #[tokio::test(start_paused = true)]
    async fn an_answer_that_stays_is_no_question_by_tcp() {
        struct Same(Arc<Mutex<u32>>);
        impl AddressLookup for Same {
            fn look_up(&mut self, carrier: Carrier) -> BoxFuture<'_, Result<NameAddresses, DnsError>> {
                *self.0.lock().unwrap() += u32::from(carrier == Carrier::Tcp);
                let addresses = vec![([10, 0, 0, 1], 80).into()];
                Box::pin(async {
                    Ok(NameAddresses {
                        addresses,
                        ..found(1)
                    })
                })
            }
        }
        let by_tcp = Arc::default();
        let counted = Arc::clone(&by_tcp);
        let resolver = Resolver::over(OPTIONS, move |_| Box::new(Same(Arc::clone(&counted))));
        let _told = resolver.watch(&host("s3"));
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!(*by_tcp.lock().unwrap(), 1, "the first answer alone");
    }

    #[test]
    fn the_difference_has_both_sides() {
        let addresses =
            |last: &[u8]| -> Vec<SocketAddr> { last.iter().map(|&n| ([10, 0, 0, n], 80).into()).collect() };
        let (added, removed) = difference(&addresses(&[1, 2, 3]), &addresses(&[2, 4]));
        assert_eq!((added, removed), (addresses(&[4]), addresses(&[1, 3])));
    }
}
