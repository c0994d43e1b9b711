//! One binary for all integration tests. Those of `conformance` and `damage` run on every S3 server that is there;
//! `tests/run.sh` brings the real ones up.

mod backends;
mod conformance;
mod damage;
mod faults;
mod fixture;
mod lookups;
mod outage;
mod vectors;
