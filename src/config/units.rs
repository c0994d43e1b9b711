//! Sizes and durations in everyday notation: `64GiB`, `1.5 MiB`, `300s`, `1h30m`.
//!
//! Text is one or more numbers, each with a unit, largest unit first; a bare whole number is bytes
//! or seconds. The arithmetic is in integers, so only fractions of a byte or a nanosecond are lost. The printed
//! text is exact and reads back as the same value: so a size shows in a binary unit only where it divides, and in
//! bytes otherwise.
//!
//! Not for progress output, where a rounded "1.2 GiB/s" is wanted.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

pub const KIB: u64 = 1 << 10;
pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;
pub const TIB: u64 = 1 << 40;
const PIB: u64 = 1 << 50;

const NANOS_PER_SECOND: u64 = 1_000_000_000;

/// A number of bytes, written and shown as people do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteSize(pub u64);

impl ByteSize {
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.0
    }
}

impl FromStr for ByteSize {
    type Err = UnitError;

    fn from_str(text: &str) -> Result<Self, UnitError> {
        let bytes = SIZES.parse(text)?;
        u64::try_from(bytes)
            .map(Self)
            .map_err(|_| SIZES.error(text, Fault::TooLarge))
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [
            ("PiB", PIB),
            ("TiB", TIB),
            ("GiB", GIB),
            ("MiB", MIB),
            ("KiB", KIB),
        ];
        let exact = units
            .iter()
            .find(|(_, factor)| self.0 >= *factor && self.0.is_multiple_of(*factor));
        match exact {
            Some((name, factor)) => write!(f, "{}{name}", self.0 / factor),
            None => write!(f, "{}B", self.0),
        }
    }
}

/// Reads a duration such as `50ms`, `2.5s` or `1h30m`; a bare whole number is seconds.
///
/// # Errors
///
/// The problem, and the units there are.
pub fn parse_duration(text: &str) -> Result<Duration, UnitError> {
    let nanos = DURATIONS.parse(text)?;
    let per_second = u128::from(NANOS_PER_SECOND);
    let seconds = u64::try_from(nanos / per_second).map_err(|_| DURATIONS.error(text, Fault::TooLarge))?;
    // The remainder is below 10^9, so it always fits.
    let rest = u32::try_from(nanos % per_second).unwrap_or(0);
    Ok(Duration::new(seconds, rest))
}

/// Shows a duration exactly, as [`parse_duration`] reads it: `5m`, `1m30s`, `2s500ms`.
#[must_use]
pub fn show_duration(duration: Duration) -> String {
    let mut nanos = duration.as_nanos();
    let mut text = String::new();
    for (name, factor) in DURATIONS.units {
        let count = nanos / u128::from(*factor);
        nanos %= u128::from(*factor);
        if count > 0 {
            text.push_str(&count.to_string());
            text.push_str(name);
        }
    }
    if text.is_empty() { "0s".to_owned() } else { text }
}

/// Text that is no size or duration: the problem, and the text to write.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} {fault}; write {expected}, in {units}")]
pub struct UnitError {
    text: String,
    fault: Fault,
    expected: &'static str,
    units: String,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
enum Fault {
    #[error("is empty")]
    Empty,
    #[error("is negative")]
    Negative,
    #[error("is not a number with a unit")]
    Malformed,
    #[error("has no unit")]
    NoUnit,
    #[error("has the unknown unit {0:?}")]
    UnknownUnit(String),
    #[error("does not go from the largest unit to the smallest")]
    Order,
    #[error("is too large")]
    TooLarge,
}

struct Grammar {
    /// Largest first: a duration is shown from the largest unit down.
    units: &'static [(&'static str, u64)],
    /// The factor of a whole number without a unit.
    bare: u64,
    ignore_case: bool,
    expected: &'static str,
}

const SIZES: Grammar = Grammar {
    units: &[
        ("PiB", PIB),
        ("PB", 1_000_000_000_000_000),
        ("TiB", TIB),
        ("TB", 1_000_000_000_000),
        ("GiB", GIB),
        ("GB", 1_000_000_000),
        ("MiB", MIB),
        ("MB", 1_000_000),
        ("KiB", KIB),
        ("KB", 1_000),
        ("B", 1),
    ],
    bare: 1,
    // A size in bits is never meant here, and `64gib` is clear.
    ignore_case: true,
    expected: "a size such as 64GiB, 1.5MiB or 4096 (bytes)",
};

const DURATIONS: Grammar = Grammar {
    units: &[
        ("d", 86_400 * NANOS_PER_SECOND),
        ("h", 3_600 * NANOS_PER_SECOND),
        ("m", 60 * NANOS_PER_SECOND),
        ("s", NANOS_PER_SECOND),
        ("ms", 1_000_000),
        ("us", 1_000),
        ("ns", 1),
    ],
    bare: NANOS_PER_SECOND,
    ignore_case: false,
    expected: "a duration such as 50ms, 1h30m or 300 (seconds)",
};

impl Grammar {
    fn parse(&self, text: &str) -> Result<u128, UnitError> {
        self.total(text.trim()).map_err(|fault| self.error(text, fault))
    }

    fn total(&self, text: &str) -> Result<u128, Fault> {
        if text.is_empty() {
            return Err(Fault::Empty);
        }
        if text.starts_with('-') {
            return Err(Fault::Negative);
        }
        if text.bytes().all(|byte| byte.is_ascii_digit()) {
            return scale(text, self.bare);
        }
        let (mut total, mut smallest, mut rest) = (0_u128, u64::MAX, text);
        while !rest.is_empty() {
            let (number, after) = split_while(rest, |c| c.is_ascii_digit() || c == '.');
            let (unit, next) = split_while(after.trim_start(), char::is_alphabetic);
            let factor = match (number, unit) {
                ("", _) => return Err(Fault::Malformed),
                (_, "") if next.is_empty() => return Err(Fault::NoUnit),
                (_, "") => return Err(Fault::Malformed),
                _ => self
                    .factor(unit)
                    .ok_or_else(|| Fault::UnknownUnit(unit.to_owned()))?,
            };
            if factor >= smallest {
                return Err(Fault::Order);
            }
            total = total.checked_add(scale(number, factor)?).ok_or(Fault::TooLarge)?;
            (smallest, rest) = (factor, next.trim_start());
        }
        Ok(total)
    }

    fn factor(&self, unit: &str) -> Option<u64> {
        let same = |name: &str| name == unit || (self.ignore_case && name.eq_ignore_ascii_case(unit));
        self.units
            .iter()
            .find(|(name, _)| same(name))
            .map(|(_, factor)| *factor)
    }

    fn error(&self, text: &str, fault: Fault) -> UnitError {
        let names: Vec<&str> = self.units.iter().rev().map(|(name, _)| *name).collect();
        UnitError {
            text: text.to_owned(),
            fault,
            expected: self.expected,
            units: names.join(", "),
        }
    }
}

/// `number * factor`, rounded down to a whole.
fn scale(number: &str, factor: u64) -> Result<u128, Fault> {
    // Keeps 10^digits * factor below 2^128.
    const FRACTION_DIGITS_MAX: usize = 18;

    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    if whole.is_empty() || fraction.is_empty() || fraction.contains('.') {
        return Err(Fault::Malformed);
    }
    let fraction = &fraction[..fraction.len().min(FRACTION_DIGITS_MAX)];
    // Both are ASCII digits, so parsing fails only on overflow.
    let whole: u128 = whole.parse().map_err(|_| Fault::TooLarge)?;
    let part: u64 = fraction.parse().map_err(|_| Fault::TooLarge)?;
    let part =
        u128::from(part) * u128::from(factor) / 10_u128.pow(u32::try_from(fraction.len()).unwrap_or(0));
    whole
        .checked_mul(u128::from(factor))
        .and_then(|whole| whole.checked_add(part))
        .ok_or(Fault::TooLarge)
}

fn split_while(text: &str, belongs: impl Fn(char) -> bool) -> (&str, &str) {
    text.split_at(text.find(|c| !belongs(c)).unwrap_or(text.len()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn size(text: &str) -> Result<u64, String> {
        text.parse::<ByteSize>()
            .map(ByteSize::bytes)
            .map_err(|error| error.to_string())
    }

    fn nanos(text: &str) -> Result<u128, String> {
        parse_duration(text)
            .map(|duration| duration.as_nanos())
            .map_err(|error| error.to_string())
    }

    #[test]
    fn sizes_people_write() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("1B", 1),
            ("64GiB", 64 * GIB),
            ("64gib", 64 * GIB),
            (" 1.5 MiB ", 3 * MIB / 2),
            ("100MB", 100_000_000),
            ("1.1GiB", 1_181_116_006),
            ("1GiB 512MiB", 3 * GIB / 2),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text:?}");
        }
    }

    #[test]
    fn durations_people_write() {
        let ms = 1_000_000;
        for (text, expected) in [
            ("0", 0),
            ("300", 300_000 * ms),
            ("300s", 300_000 * ms),
            ("50ms", 50 * ms),
            ("2m", 120_000 * ms),
            ("1h30m", 5_400_000 * ms),
            ("1h 30m", 5_400_000 * ms),
            ("2.5s", 2_500 * ms),
            ("1d", 86_400_000 * ms),
            ("7us", 7_000),
            ("0.3ns", 0),
        ] {
            assert_eq!(nanos(text), Ok(expected), "{text:?}");
        }
    }

    #[test]
    fn a_refusal_says_why_and_lists_the_units() {
        let above_u64 = "18446744073709551616";
        let above_u128 = "9".repeat(50);
        for (text, why) in [
            ("", "\"\" is empty"),
            ("  ", "is empty"),
            ("-1", "is negative"),
            ("NaN", "is not a number"),
            ("inf", "is not a number"),
            ("+5", "is not a number"),
            ("5%", "is not a number"),
            ("5\u{0665}", "is not a number"),
            ("1.5", "has no unit"),
            ("1e9", "has the unknown unit \"e\""),
            ("3 parsecs", "has the unknown unit \"parsecs\""),
            (&above_u128, "is too large"),
        ] {
            for (error, units) in [
                (
                    size(text).unwrap_err(),
                    "in B, KB, KiB, MB, MiB, GB, GiB, TB, TiB, PB, PiB",
                ),
                (nanos(text).unwrap_err(), "in ns, us, ms, s, m, h, d"),
            ] {
                assert!(error.contains(why) && error.ends_with(units), "{text:?}: {error}");
            }
        }
        for text in [".5s", "1.s", "1.2.3s", "1s!"] {
            assert!(nanos(text).unwrap_err().contains("is not a number"), "{text:?}");
        }
        assert!(size(above_u64).unwrap_err().contains("is too large"));
        assert!(size("16384PiB").unwrap_err().contains("is too large"));
        assert!(nanos("300000000000000d").unwrap_err().contains("is too large"));
        assert!(nanos("30m1h").unwrap_err().contains("largest unit"));
        assert!(nanos("5m5m").unwrap_err().contains("largest unit"));
        assert!(nanos("1h30").unwrap_err().contains("has no unit"));
    }

    #[test]
    fn shown_in_the_largest_unit_that_is_exact() {
        for text in ["0B", "1000B", "1KiB", "1025B", "16MiB", "64GiB", "3PiB"] {
            assert_eq!(text.parse::<ByteSize>().unwrap().to_string(), text);
        }
        for text in [
            "0s", "50ms", "2s", "2s500ms", "5m", "1m30s", "1h30m", "1d", "1us1ns",
        ] {
            assert_eq!(show_duration(parse_duration(text).unwrap()), text);
        }
    }

    proptest! {
        #[test]
        fn a_shown_value_reads_back(
            bytes: u64,
            shift in 0_u32..64,
            seconds: u64,
            nanos in 0_u32..1_000_000_000,
        ) {
            let size = ByteSize(bytes >> shift << (shift / 2));
            prop_assert_eq!(size.to_string().parse::<ByteSize>(), Ok(size));
            let duration = Duration::new(seconds, nanos);
            prop_assert_eq!(parse_duration(&show_duration(duration)), Ok(duration));
        }

        #[test]
        fn any_text_is_read_or_refused(text: String, digits in "[0-9.]{0,60}[a-zA-Zµ ]{0,3}") {
            for text in [text, digits] {
                let _ = text.parse::<ByteSize>();
                let _ = parse_duration(&text);
            }
        }
    }
}
