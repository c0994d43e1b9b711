//! One binary for all integration tests. Those of `conformance` and `damage` run on every S3 server that is there;
//! `tests/run.sh` brings the real ones up.

#![allow(clippy::cast_possible_truncation, clippy::too_many_lines)]

mod abuse;
mod admission;
mod bench;
mod callers;
mod checksums;
mod cli;
mod client;
mod conformance;
mod connector;
mod daemon;
mod damage;
mod demo;
mod dns;
mod doctor;
mod events;
mod fanout;
mod fanout_rgw;
mod faults;
mod hostile;
mod keys;
mod kinds;
mod lookups;
mod metrics;
mod on_the_way;
mod operations;
mod orders;
mod otlp;
mod outage;
mod peers;
mod processes;
mod protocol;
mod rekey;
mod routers;
mod secrets;
mod shared_loads;
mod support;
mod tiers;
mod traces;
mod unsent;
mod upkeep;
mod vectors;
mod wire;
