//! Each address's part of a phase: the difference between its counters at the start and at the end.

use serde::Serialize;

use crate::s3::fanout::{EndpointState, Requests};

const MIB: f64 = (1_u64 << 20) as f64;

/// The traffic of one address in a phase, and the address's state at the phase's end.
#[derive(Debug, Clone, Serialize)]
pub struct Endpoint {
    /// Finished requests.
    pub requests: u64,
    /// Percent of all addresses' bytes, or of their requests where no bytes moved.
    pub share_percent: f64,
    /// Average over the whole phase.
    pub mib_per_s: f64,
    /// Its totals are those of the phase.
    #[serde(flatten)]
    pub state: EndpointState,
}

/// The traffic of each address between two states of the fan-out, `seconds` apart. An address missing from the
/// second is left out: its traffic is no longer known.
pub(super) fn between(before: &[EndpointState], after: Vec<EndpointState>, seconds: f64) -> Vec<Endpoint> {
    let phase = |mut state: EndpointState| {
        let known = before.iter().find(|known| known.address == state.address);
        // An address that was removed and came back counts from zero.
        if let Some(known) = known.filter(|known| known.totals.total() <= state.totals.total()) {
            state.totals = state.totals.since(&known.totals);
        }
        state
    };
    let states: Vec<EndpointState> = after.into_iter().map(phase).collect();
    let all = sum(states.iter());
    let endpoint = |state: EndpointState| {
        let totals = &state.totals;
        let (part, whole) = match all.bytes {
            0 => (totals.total(), all.total()),
            bytes => (totals.bytes, bytes),
        };
        Endpoint {
            requests: totals.total(),
            share_percent: part as f64 * 100.0 / whole.max(1) as f64,
            mib_per_s: totals.bytes as f64 / MIB / seconds,
            state,
        }
    };
    let mut endpoints: Vec<Endpoint> = states.into_iter().map(endpoint).collect();
    endpoints.sort_by_key(|endpoint| endpoint.state.address);
    endpoints
}

/// The sum of all addresses' requests.
pub(super) fn sum<'a>(states: impl Iterator<Item = &'a EndpointState>) -> Requests {
    states.fold(Requests::default(), |sum, state| sum.and(&state.totals))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::s3::fanout::BreakerPhase;

    fn state(address: &str, ok: u64, bytes: u64) -> EndpointState {
        EndpointState {
            address: address.parse().unwrap(),
            breaker: BreakerPhase::Closed,
            window_bytes: 1,
            in_flight_bytes: 0,
            in_flight: 0,
            latency_us: None,
            bytes_per_second: 0,
            denied_in_a_row: 0,
            totals: Requests {
                ok,
                bytes,
                ..Requests::default()
            },
        }
    }

    #[test]
    fn only_what_is_new_counts() {
        let before = ["10.0.0.1:80", "10.0.0.2:80", "10.0.0.9:80"].map(|address| state(address, 5, 500));
        let after = vec![
            state("10.0.0.3:80", 1, 100),
            state("10.0.0.1:80", 8, 800),
            state("10.0.0.2:80", 2, 100),
        ];
        let split = between(&before, after, 2.0);
        let shown: Vec<(u64, u64, f64)> = split
            .iter()
            .map(|one| (one.requests, one.state.totals.bytes, one.share_percent))
            .collect();
        assert_eq!(shown, [(3, 300, 60.0), (2, 100, 20.0), (1, 100, 20.0)]);
        assert!((split[0].mib_per_s * MIB - 150.0).abs() < 1e-6);
    }

    #[test]
    fn without_bytes_requests_are_shared() {
        let split = between(
            &[],
            vec![state("10.0.0.1:80", 3, 0), state("10.0.0.2:80", 1, 0)],
            1.0,
        );
        assert_eq!([split[0].share_percent, split[1].share_percent], [75.0, 25.0]);
        let idle = between(&[], vec![state("10.0.0.1:80", 0, 0)], 1.0);
        assert_eq!((idle[0].requests, idle[0].share_percent), (0, 0.0));
    }
}
