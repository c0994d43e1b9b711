//! Pictures for a terminal: a lookup's answer in at most 64 signs, bars, and values over time.

use crate::cache::gateway::Lookup;

pub const LEGEND: &str = "# there, = inferred there, . not there, - inferred not there, ? unknown";
/// Signs in a picture, at most.
const WIDTH: usize = 64;

/// A line of signs, each for one chunk, or for several where they don't fit; `~` stands for a mixed group. Also
/// returns the number of chunks of a sign.
pub fn picture(lookup: &Lookup) -> (String, usize) {
    let each = lookup.chunks.div_ceil(WIDTH).max(1);
    let signs: Vec<char> = (0..lookup.chunks).map(|i| sign(lookup, i)).collect();
    let lot = |signs: &[char]| match signs {
        [first, rest @ ..] if rest.iter().all(|sign| sign == first) => *first,
        _ => '~',
    };
    (signs.chunks(each).map(lot).collect(), each)
}

fn sign(lookup: &Lookup, i: usize) -> char {
    let inferred = lookup.inferred.get(i);
    match (lookup.unknown.get(i), lookup.mask.get(i)) {
        (true, _) => '?',
        (_, true) if inferred => '=',
        (_, true) => '#',
        (_, false) if inferred => '-',
        (_, false) => '.',
    }
}

/// The latest values, from nothing to the highest of them.
pub fn spark(values: &[Option<f64>], width: usize) -> String {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let latest = &values[values.len().saturating_sub(width)..];
    let most = latest.iter().flatten().copied().fold(0.0, f64::max);
    let bar = |value: &Option<f64>| match value {
        Some(value) if most > 0.0 => BARS[rounded(value / most * 7.0).min(7)],
        Some(_) => BARS[0],
        None => ' ',
    };
    latest.iter().map(bar).collect()
}

/// A bar of at most `width` signs, as long as `part` is of `most`. Anything but nothing has a sign.
pub fn bar(part: u64, most: u64, width: usize) -> String {
    let signs = rounded(part as f64 / most.max(1) as f64 * width as f64);
    "█".repeat(signs.max(usize::from(part > 0)).min(width))
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a figure that is not negative"
)]
fn rounded(value: f64) -> usize {
    value.max(0.0).round() as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Mask;

    fn lookup(chunks: usize) -> Lookup {
        let mask = |is: fn(usize) -> bool| (0..chunks).map(is).collect::<Mask>();
        Lookup {
            chunks,
            mask: mask(|i| i < 4),
            unknown: mask(|i| i == 5),
            inferred: mask(|i| i == 1 || i == 6),
            prefix: 4,
            tiers: Vec::new(),
            asked: 0,
            error: None,
        }
    }

    #[test]
    fn a_bar_shows_that_there_is_something() {
        assert_eq!(bar(0, 10, 4), "");
        assert_eq!(bar(1, 1000, 4), "█");
        assert_eq!(bar(10, 10, 4), "████");
        assert_eq!(spark(&[Some(0.0), None, Some(7.0)], 3), "▁ █");
    }

    #[test]
    fn one_sign_a_chunk_or_a_lot() {
        assert_eq!(picture(&lookup(8)), ("#=##.?-.".into(), 1));
        assert_eq!(picture(&lookup(0)), (String::new(), 1));
        let (signs, each) = picture(&lookup(1000));
        assert_eq!((signs.len(), each), (63, 16));
        assert_eq!(signs, format!("~{}", ".".repeat(62)));
    }
}
