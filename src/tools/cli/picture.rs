//! A lookup's answer as a picture of at most 64 signs, for a terminal.

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
    fn one_sign_a_chunk_or_a_lot() {
        assert_eq!(picture(&lookup(8)), ("#=##.?-.".into(), 1));
        assert_eq!(picture(&lookup(0)), (String::new(), 1));
        let (signs, each) = picture(&lookup(1000));
        assert_eq!((signs.len(), each), (63, 16));
        assert_eq!(signs, format!("~{}", ".".repeat(62)));
    }
}
