//! The tables.

use std::fmt::Write as _;

use super::ceph::RGW;
use super::rgw::Abilities;
use super::run::{Row, Took};
use super::scenario::{
    CORES, LONG, NIC_BYTES_PER_SECOND, OSD_BYTES_PER_SECOND, OSDS, PROMPTS, STEADY, Times,
};
use super::trace::Replay;

pub fn markdown(rows: &[Row]) -> String {
    let mut text = String::new();
    let Times {
        begin,
        fault,
        well,
        end,
    } = LONG;
    // Writing to a String can't fail.
    let _ = writeln!(
        text,
        "Each gateway gets {PROMPTS} prompts a second. Seconds {begin} to {fault} are the time before, {fault} to {well} \
         meanwhile, and up to {end} after. {}",
        model(),
    );
    let mut fleet = (0, 0);
    for row in rows {
        if (row.gateways, row.rgws) != fleet {
            fleet = (row.gateways, row.rgws);
            let rows: Vec<&Row> = rows
                .iter()
                .filter(|row| (row.gateways, row.rgws) == fleet)
                .collect();
            let _ = writeln!(text, "\n## {} gateways, {} RGWs\n", row.gateways, row.rgws);
            wanted(&mut text, &rows);
            times(&mut text, &rows);
            counts(&mut text, &rows);
        }
    }
    as_fleets_grow(&mut text, rows);
    text
}

/// What was to come out, and did or did not.
fn wanted(text: &mut String, rows: &[&Row]) {
    *text += "| wanted | got | at most | |\n|---|---:|---:|---|\n";
    for row in rows {
        let scenario = row.scenario;
        if STEADY.contains(&scenario) {
            let what = format!("{scenario}: p99, times what it was before");
            target(text, &what, row.p99_ratio(), 2.0);
        }
        if scenario.starts_with("all dead") {
            let what = "after an outage of all: the fullest 100 ms at an RGW, over the mean";
            target(text, what, row.peaks_after.in_100_ms, 3.0);
        }
        if scenario.ends_with("all load, peers") {
            let what = format!("{scenario}: times that RGWs sent each chunk");
            target(text, &what, row.shared_sent, 2.0);
        }
    }
    *text += "\n";
}

fn target(text: &mut String, what: &str, got: f64, most: f64) {
    let verdict = if got <= most { "kept" } else { "**MISSED**" };
    let _ = writeln!(text, "| {what} | {got:.2} | {most} | {verdict} |");
}

/// Requests for as many tokens, in the smallest fleet and in the largest.
fn as_fleets_grow(text: &mut String, rows: &[Row]) {
    let quiet: Vec<&Row> = rows.iter().filter(|row| row.scenario == "quiet").collect();
    let (Some(first), Some(last)) = (quiet.first(), quiet.last()) else {
        return;
    };
    if first.gateways == last.gateways {
        return;
    }
    *text += "\n## As the fleet grows\n\n| wanted | got | at most | |\n|---|---:|---:|---|\n";
    let what = format!(
        "requests for a token, {} gateways over {}",
        last.gateways, first.gateways
    );
    target(
        text,
        &what,
        last.requests_a_kilotoken[0] / first.requests_a_kilotoken[0],
        1.05,
    );
}

fn model() -> String {
    let Abilities { head, get, put, .. } = *RGW;
    let requests = [("HEAD", head), ("GET", get), ("PUT", put)].map(|(name, cost)| {
        format!(
            "a {name} {:.2} ms of CPU and {:.2} ms until it answers, {:.2} s of CPU and {:.2} s for a GiB",
            cost.cpu * 1e3,
            cost.latency * 1e3,
            cost.gib_cpu,
            cost.gib
        )
    });
    format!(
        "An RGW has {CORES} cores, {:.1} GB/s, and {OSDS} OSDs of {:.0} GB/s; {}.",
        NIC_BYTES_PER_SECOND / 1e9,
        OSD_BYTES_PER_SECOND / 1e9,
        requests.join("; "),
    )
}

/// Of traces.
pub fn replays(replays: &[Replay]) -> String {
    let mut text = format!("{}\n\n", model());
    text += "| gateways | RGWs | times as fast | prompts | chunks of one | of 100 chunks: loaded | there at any pace | of a prompt: \
             HEADs | GETs | PUTs | attempts a call | failed | lookup, ms: p50 | p99 | load, ms: p50 | p99 | p99.9 |\n";
    text += "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n";
    for row in replays {
        let Took {
            prompts,
            failed,
            lookup_ms,
            load_ms,
        } = &row.took;
        let [heads, gets, puts] = row.requests_a_prompt;
        // Writing to a String can't fail.
        let _ = writeln!(
            text,
            "| {} | {} | {:.0} | {prompts} | {:.1} | {:.1} | {:.1} | {heads:.1} | {gets:.1} | {puts:.1} | {:.3} | {failed} | \
             {:.1} | {:.1} | {:.0} | {:.0} | {:.0} |",
            row.gateways,
            row.rgws,
            row.speed,
            row.chunks_a_prompt,
            row.loaded_percent,
            row.most_percent,
            row.attempts_a_call,
            lookup_ms[0],
            lookup_ms[1],
            load_ms[0],
            load_ms[1],
            load_ms[2],
        );
    }
    text
}

/// Until a prompt's last chunk is there.
fn times(text: &mut String, rows: &[&Row]) {
    *text += "Milliseconds until a prompt's last chunk is there; and of its lookup alone.\n\n";
    *text += "| scenario | before: p50 | p99 | p99.9 | meanwhile: p50 | p99 | p99.9 | p99, times before | after: p99 | \
              lookup p99: before | meanwhile | failed |\n";
    *text += "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n";
    for row in rows {
        let load = |took: &Took| took.load_ms.map(|ms| format!("{ms:.0}")).join(" | ");
        let _ = writeln!(
            text,
            "| {} | {} | {} | {:.2} | {:.0} | {:.1} | {:.1} | {} of {} |",
            row.scenario,
            load(&row.before),
            load(&row.meanwhile),
            row.p99_ratio(),
            row.after.load_ms[1],
            row.before.lookup_ms[1],
            row.meanwhile.lookup_ms[1],
            row.before.failed + row.meanwhile.failed + row.after.failed,
            row.before.prompts + row.meanwhile.prompts + row.after.prompts,
        );
    }
}

fn counts(text: &mut String, rows: &[&Row]) {
    *text += "\n| scenario | requests for 1,000 tokens: before | meanwhile | attempts a call | most | peak over mean, 10 ms: \
              before | after | 100 ms: before | after | failed until avoided | after, s | back to 95 %: since then, s | since \
              it is well, s | connections | least used | DNS questions/s | by TCP | RGWs sent each chunk that all load | % of chunks from peers |\n";
    *text +=
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n";
    let seconds = |time: Option<f64>| time.map_or("never".to_owned(), |time| format!("{time:.1}"));
    for row in rows {
        let _ = writeln!(
            text,
            "| {} | {:.3} | {:.3} | {:.3} | {} | {:.1} | {:.1} | {:.1} | {:.1} | {} | {} | {} | {} | {} | {:.2} | {:.0} | \
             {:.0} | {:.2} | {:.1} |",
            row.scenario,
            row.requests_a_kilotoken[0],
            row.requests_a_kilotoken[1],
            row.attempts_a_call[1],
            row.attempts_most,
            row.peaks_before.in_10_ms,
            row.peaks_after.in_10_ms,
            row.peaks_before.in_100_ms,
            row.peaks_after.in_100_ms,
            row.failed_attempts,
            seconds(row.avoided_after_s),
            seconds(row.back_after_s[0]),
            seconds(row.back_after_s[1]),
            row.connections_peak,
            row.least_used,
            row.dns,
            row.dns_by_tcp,
            row.shared_sent,
            row.from_peers_percent,
        );
    }
}
