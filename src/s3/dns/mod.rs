//! A live list of socket addresses for a name: asked for in the background, so that no request ever waits for DNS.
//!
//! [`Resolver::watch`] starts a task for a [`AddressSource`] that asks again whenever the shortest TTL of the records it used
//! has passed, between a floor and a ceiling. While DNS fails the last good addresses stay, and the error is told
//! beside them: a name that can't be resolved says nothing about the servers behind it.
//!
//! hickory carries the messages (`servers`): UDP with repetitions, TCP when truncated, ids and ports that can't be
//! guessed. The meaning of an answer is decided here. hickory's own resolver is not used for it: it asks the next
//! server after a time-out but not after SERVFAIL, can't tell a family without records from one that failed, and over TCP
//! takes an answer to any question. So there is no cache of hickory's either, and every lookup begins anew, with
//! `/etc/resolv.conf` and the hosts file as they are now.
//!
//! An answer by UDP may have been cut without saying so, as Consul does it. So where one differs from what is known, TCP is
//! asked as well, and tells what is gone; where TCP does not answer, addresses that an answer lacks stay for a while.
//!
//! It never knows S3 or HTTP, nor which address is a good one.

mod answer;
mod error;
mod inspect;
mod lookup;
mod servers;
mod watch;

pub use error::DnsError;
pub use inspect::{Answered, NameInspected, ServerAnswers, inspect};
pub use servers::Carrier;
pub use watch::{AddressLookup, AddressSource, DnsOptions, NameAddresses, NameState, Resolved, Resolver};
