//! One binary for all integration tests. Those of `conformance` and `damage` run on every S3 server that is there;
//! `tests/run.sh` brings the real ones up.

#![allow(clippy::cast_possible_truncation, clippy::too_many_lines)]

mod abuse;
mod backends;
mod bench;
mod callers;
mod capped;
mod checksums;
mod cli;
mod client;
mod conformance;
mod connector;
mod damage;
mod demo;
mod dns;
mod dns_server;
mod fanout;
mod fanout_rgw;
mod faults;
mod fixture;
mod held;
mod hostile;
mod lookups;
mod meeting;
mod on_the_way;
mod operated;
mod orders;
mod outage;
mod processes;
mod program;
mod protocol;
mod rig;
mod secrets;
mod serve;
mod serving;
mod tiers;
mod tls_front;
mod unsent;
mod vectors;
mod wire;
