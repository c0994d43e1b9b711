//! Traces of several kinds from a seed, for tests of the policies. They were made before any policy ran on them, all but
//! [`conversations`].
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "times and ranks are small"
)]

use crate::tools::replay::Prompt;

struct Ids(u64);
impl Ids {
    fn take(&mut self, n: usize) -> Vec<u64> {
        let a = self.0;
        self.0 += n as u64;
        (a..self.0).collect()
    }
}

fn exp(rng: &mut fastrand::Rng, mean: f64) -> f64 {
    -mean * (1.0 - rng.f64()).ln()
}

/// rank by Zipf of exponent 1
fn zipf(rng: &mut fastrand::Rng, n: usize, s: f64) -> usize {
    // inverse of the continuous one
    let u = rng.f64();
    if (s - 1.0).abs() < 1e-9 {
        return (((n as f64 + 1.0).ln() * u).exp() - 1.0) as usize % n;
    }
    let h = ((n as f64 + 1.0).powf(1.0 - s) - 1.0) * u + 1.0;
    (h.powf(1.0 / (1.0 - s)) - 1.0) as usize % n
}

fn zipf_documents(seed: u64, documents: usize, s: f64) -> Vec<Prompt> {
    let (mut rng, mut ids) = (fastrand::Rng::with_seed(seed), Ids(1));
    let docs: Vec<Vec<u64>> = (0..documents)
        .map(|_| {
            let n = rng.usize(2..40);
            ids.take(n)
        })
        .collect();
    let mut at = 0.0;
    (0..6000)
        .map(|_| {
            at += exp(&mut rng, 300.0);
            let mut blocks = docs[zipf(&mut rng, documents, s)].clone();
            let n = rng.usize(0..4);
            blocks.extend(ids.take(n));
            Prompt {
                at_ms: at as u64,
                blocks,
                output_tokens: 0,
            }
        })
        .collect()
}

/// A hot set, and scans through what is never asked again.
fn scans(seed: u64) -> Vec<Prompt> {
    let (mut rng, mut ids) = (fastrand::Rng::with_seed(seed), Ids(1));
    let hot: Vec<Vec<u64>> = (0..100).map(|_| ids.take(15)).collect();
    let mut at = 0.0;
    (0..5000)
        .map(|i| {
            at += exp(&mut rng, 400.0);
            let scanning = (i / 250) % 2 == 1;
            let blocks = if scanning && rng.f64() < 0.8 {
                ids.take(40)
            } else {
                let h = rng.usize(..100);
                hot[h].clone()
            };
            Prompt {
                at_ms: at as u64,
                blocks,
                output_tokens: 0,
            }
        })
        .collect()
}

/// Round and round over the same documents.
fn loops(seed: u64, documents: usize, each: usize) -> Vec<Prompt> {
    let mut ids = Ids(1 + (seed << 32));
    let docs: Vec<Vec<u64>> = (0..documents).map(|_| ids.take(each)).collect();
    (0..6000)
        .map(|i| Prompt {
            at_ms: i as u64 * 500,
            blocks: docs[i % documents].clone(),
            output_tokens: 0,
        })
        .collect()
}

/// Agents: a long shared head (tools), steps a few seconds apart that each add a bit.
fn agents(seed: u64) -> Vec<Prompt> {
    let (mut rng, mut ids) = (fastrand::Rng::with_seed(seed), Ids(1));
    let heads: Vec<Vec<u64>> = (0..6).map(|_| ids.take(40)).collect();
    let mut out = Vec::new();
    let mut begin = 0.0;
    for _ in 0..500 {
        begin += exp(&mut rng, 8000.0);
        let mut at = begin;
        let h = zipf(&mut rng, 6, 1.0);
        let mut blocks = heads[h].clone();
        for _ in 0..rng.usize(3..25) {
            let n = rng.usize(1..6);
            blocks.extend(ids.take(n));
            out.push(Prompt {
                at_ms: at as u64,
                blocks: blocks.clone(),
                output_tokens: 0,
            });
            at += 1000.0 + exp(&mut rng, 5000.0);
        }
    }
    out.sort_by_key(|p| p.at_ms);
    out
}

/// People who talk: turns by a log-normal time to think.
fn chats(seed: u64, think_s: f64, gap_ms: f64, n: usize) -> Vec<Prompt> {
    let (mut rng, mut ids) = (fastrand::Rng::with_seed(seed), Ids(1));
    let mut out = Vec::new();
    let mut begin = 0.0;
    for _ in 0..n {
        begin += exp(&mut rng, gap_ms);
        let mut at = begin;
        let mut blocks = Vec::new();
        loop {
            let m = rng.usize(1..20);
            blocks.extend(ids.take(m));
            out.push(Prompt {
                at_ms: at as u64,
                blocks: blocks.clone(),
                output_tokens: 0,
            });
            if rng.f64() < 0.5 {
                break;
            }
            let normal = (0..12).map(|_| rng.f64()).sum::<f64>() - 6.0;
            at += 1000.0 * think_s * (0.8 * normal).exp();
        }
    }
    out.sort_by_key(|p| p.at_ms);
    out
}

/// Recency is everything: each prompt is one of the latest, with a chance that halves every few.
fn recent(seed: u64) -> Vec<Prompt> {
    let (mut rng, mut ids) = (fastrand::Rng::with_seed(seed), Ids(1));
    let mut stack: Vec<Vec<u64>> = Vec::new();
    let mut at = 0.0;
    (0..6000)
        .map(|_| {
            at += exp(&mut rng, 500.0);
            let depth = exp(&mut rng, 60.0) as usize;
            let doc = if rng.f64() < 0.3 || depth >= stack.len() {
                let n = rng.usize(2..40);
                ids.take(n)
            } else {
                let i = stack.len() - 1 - depth;
                stack.remove(i)
            };
            stack.push(doc.clone());
            Prompt {
                at_ms: at as u64,
                blocks: doc,
                output_tokens: 0,
            }
        })
        .collect()
}

/// One after the other, with other prompts each time.
fn phases(parts: Vec<Vec<Prompt>>) -> Vec<Prompt> {
    let (mut out, mut at, mut id) = (Vec::new(), 0, 0);
    for part in parts {
        let (mut last, mut most) = (0, 0);
        for p in part {
            last = last.max(p.at_ms);
            let blocks: Vec<u64> = p.blocks.iter().map(|b| (b % (1 << 32)) + id).collect();
            most = most.max(blocks.iter().copied().max().unwrap_or(0));
            out.push(Prompt {
                at_ms: at + p.at_ms,
                blocks,
                output_tokens: 0,
            });
        }
        at += last;
        id = most + 1;
    }
    out
}

/// Each document is asked for exactly twice after one another, hot ones come late: what was used often is over.
fn once_more(seed: u64) -> Vec<Prompt> {
    let (mut rng, mut ids) = (fastrand::Rng::with_seed(seed), Ids(1));
    let mut out = Vec::new();
    let mut at = 0.0;
    for i in 0..800 {
        at += exp(&mut rng, 3000.0);
        let (n, uses) = (rng.usize(5..40), if i % 4 == 0 { 8 } else { 2 });
        let doc = ids.take(n);
        let mut t = at;
        for _ in 0..uses {
            out.push(Prompt {
                at_ms: t as u64,
                blocks: doc.clone(),
                output_tokens: 0,
            });
            t += exp(&mut rng, 20_000.0);
        }
    }
    out.sort_by_key(|p| p.at_ms);
    out
}

/// Most prompts are long and come once; some are short, and go on after a minute or so, and again.
pub(super) fn conversations() -> Vec<Prompt> {
    let (mut rng, mut ids) = (fastrand::Rng::with_seed(26), Ids(1));
    let (mut out, mut begin) = (Vec::new(), 0.0);
    for _ in 0..3000 {
        begin += exp(&mut rng, 1000.0);
        let mut at = begin;
        if rng.f64() < 0.7 {
            let n = rng.usize(30..60);
            out.push(Prompt {
                at_ms: at as u64,
                blocks: ids.take(n),
                output_tokens: 0,
            });
            continue;
        }
        let mut blocks = Vec::new();
        loop {
            let n = rng.usize(1..5);
            blocks.extend(ids.take(n));
            out.push(Prompt {
                at_ms: at as u64,
                blocks: blocks.clone(),
                output_tokens: 0,
            });
            if rng.f64() < 0.15 {
                break;
            }
            at += 20_000.0 + exp(&mut rng, 40_000.0);
        }
    }
    out.sort_by_key(|prompt| prompt.at_ms);
    out
}

pub(super) fn all() -> Vec<(&'static str, Vec<Prompt>)> {
    let head = |p: Vec<Prompt>, n: usize| p.into_iter().take(n).collect::<Vec<_>>();
    vec![
        ("zipf 0.7", zipf_documents(1, 2000, 0.7)),
        ("zipf 1.0", zipf_documents(2, 2000, 1.0)),
        ("zipf 1.3", zipf_documents(3, 2000, 1.3)),
        ("scans", scans(4)),
        ("loops", loops(5, 300, 20)),
        ("agents", agents(6)),
        ("chats 60 s", chats(7, 60.0, 1000.0, 3000)),
        ("chats 5 min", chats(8, 300.0, 500.0, 3000)),
        ("chats 5 s", chats(9, 5.0, 300.0, 3000)),
        ("recent", recent(10)),
        ("once more", once_more(11)),
        (
            "chats, then recent",
            phases(vec![
                head(chats(12, 60.0, 1000.0, 2000), 3000),
                head(recent(13), 3000),
            ]),
        ),
        (
            "recent, then zipf, then loops",
            phases(vec![
                head(recent(14), 2000),
                head(zipf_documents(15, 1000, 1.0), 2000),
                head(loops(16, 200, 20), 2000),
            ]),
        ),
        (
            "loops, then agents, then recent",
            phases(vec![
                head(loops(17, 300, 20), 1500),
                agents(18),
                head(recent(19), 3000),
            ]),
        ),
        (
            "scans, then once more, then chats",
            phases(vec![
                head(scans(20), 2000),
                once_more(21),
                chats(22, 30.0, 1000.0, 1500),
            ]),
        ),
    ]
}
