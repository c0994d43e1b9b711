//! The two forms in which Prometheus takes metrics: text, and protobuf, where histograms are native ones, too.
//!
//! The messages are those of Prometheus's `io.prometheus.client` (metrics.proto), as far as they are used here.

use std::fmt::Write;

use prost::Message;

use crate::metrics::{BOUNDS_US, Counts, FINE_FIRST, FINE_SCHEMA, Times};

/// The content type of the protobuf form.
pub const PROTOBUF: &str =
    "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited";
pub const TEXT: &str = "text/plain; version=0.0.4";
/// Times up to here, in seconds, are no time at all.
const ZERO: f64 = 1e-7;

/// Metrics, in their order.
#[derive(Default)]
pub struct Families(Vec<Family>);

struct Family {
    name: String,
    kind: Kind,
    help: String,
    series: Vec<Series>,
}

#[derive(Clone, Copy)]
enum Kind {
    Counter = 0,
    Gauge = 1,
    Histogram = 4,
}

struct Series {
    labels: Vec<(String, String)>,
    value: Value,
}

enum Value {
    Number(u64),
    /// Microseconds, shown as seconds.
    Time(u64),
    Times(Box<Times>),
}

/// The name and the word of a label, or none.
pub type Label<'a> = Option<(&'a str, &'a str)>;

impl Families {
    /// A metric whose series follow, by [`add`](Self::add). `kind`: `counter` or `gauge`.
    pub fn head(&mut self, name: &str, kind: &str, help: &str) {
        let kind = match kind {
            "counter" => Kind::Counter,
            _ => Kind::Gauge,
        };
        self.begin(name, kind, help);
    }

    fn begin(&mut self, name: &str, kind: Kind, help: &str) {
        self.0.push(Family {
            name: name.to_owned(),
            kind,
            help: help.to_owned(),
            series: Vec::new(),
        });
    }

    /// One series of the metric that was begun last.
    pub fn add(&mut self, labels: &[(&str, &str)], value: u64) {
        self.push(labels, Value::Number(value));
    }

    fn push(&mut self, labels: &[(&str, &str)], value: Value) {
        let owned = |(name, word): &(&str, &str)| ((*name).to_owned(), (*word).to_owned());
        if let Some(family) = self.0.last_mut() {
            let labels = labels.iter().map(owned).collect();
            family.series.push(Series { labels, value });
        }
    }

    pub fn gauge(&mut self, name: &str, help: &str, value: u64) {
        self.begin(name, Kind::Gauge, help);
        self.add(&[], value);
    }

    pub fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.begin(name, Kind::Counter, help);
        self.add(&[], value);
    }

    /// A series for each word, all there from the start.
    pub fn counts(&mut self, name: &str, help: &str, label: &str, counts: &Counts) {
        self.begin(name, Kind::Counter, help);
        for (word, count) in counts.read() {
            self.add(&[(label, word)], count);
        }
    }

    /// Times, in seconds. `of`: each with its label, or one without.
    pub fn times<'a>(&mut self, name: &str, help: &str, of: impl IntoIterator<Item = (Label<'a>, Times)>) {
        self.begin(name, Kind::Histogram, help);
        for (label, times) in of {
            self.push(label.as_slice(), Value::Times(Box::new(times)));
        }
    }

    /// One series for each label's value.
    pub fn lines(&mut self, name: &str, kind: &str, help: &str, label: &str, lines: &[(String, u64)]) {
        self.head(name, kind, help);
        for (of, value) in lines {
            self.add(&[(label, of)], *value);
        }
    }

    /// A gauge of times, in seconds: one series for each label's microseconds.
    pub fn seconds(&mut self, name: &str, help: &str, label: &str, lines: &[(String, u64)]) {
        self.begin(name, Kind::Gauge, help);
        for (of, us) in lines {
            self.push(&[(label, of)], Value::Time(*us));
        }
    }

    pub fn text(&self) -> String {
        let mut text = String::new();
        for family in &self.0 {
            let (name, help) = (&family.name, &family.help);
            let kind = match family.kind {
                Kind::Counter => "counter",
                Kind::Gauge => "gauge",
                Kind::Histogram => "histogram",
            };
            // Writing to a string does not fail; the same holds below.
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
            for series in &family.series {
                series.write(name, &mut text);
            }
        }
        text
    }

    /// Each metric as a message, its length before it.
    pub fn protobuf(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for family in &self.0 {
            let message = proto::MetricFamily {
                name: family.name.clone(),
                help: family.help.clone(),
                kind: family.kind as i32,
                metric: family.series.iter().map(Series::message).collect(),
            };
            bytes.extend(message.encode_length_delimited_to_vec());
        }
        bytes
    }
}

impl Series {
    fn write(&self, name: &str, text: &mut String) {
        let words = |bound: Option<&str>| {
            let labels = self
                .labels
                .iter()
                .map(|(name, word)| (name.as_str(), word.as_str()));
            let labels = labels.chain(bound.map(|bound| ("le", bound)));
            let words: Vec<_> = labels
                .map(|(name, word)| format!("{name}=\"{}\"", escaped(word)))
                .collect();
            match words.is_empty() {
                true => String::new(),
                false => format!("{{{}}}", words.join(",")),
            }
        };
        let alone = words(None);
        match &self.value {
            Value::Number(value) => {
                let _ = writeln!(text, "{name}{alone} {value}");
            }
            Value::Time(us) => {
                let _ = writeln!(text, "{name}{alone} {}", seconds(*us));
            }
            Value::Times(times) => {
                let mut count = 0;
                let bounds = BOUNDS_US.iter().map(|us| seconds(*us)).chain(["+Inf".to_owned()]);
                for (bound, bucket) in bounds.zip(times.buckets) {
                    count += bucket;
                    let _ = writeln!(text, "{name}_bucket{} {count}", words(Some(&bound)));
                }
                let sum = seconds(times.sum_us);
                let _ = writeln!(text, "{name}_sum{alone} {sum}\n{name}_count{alone} {count}");
            }
        }
    }

    fn message(&self) -> proto::Metric {
        let label = |(name, value): &(String, String)| proto::LabelPair {
            name: name.clone(),
            value: value.clone(),
        };
        let mut metric = proto::Metric {
            label: self.labels.iter().map(label).collect(),
            ..proto::Metric::default()
        };
        match &self.value {
            // Prometheus takes the one that the family's type says.
            Value::Number(value) => {
                let value = *value as f64;
                metric.gauge = Some(proto::Number { value });
                metric.counter = Some(proto::Number { value });
            }
            Value::Time(us) => {
                let value = *us as f64 / 1e6;
                metric.gauge = Some(proto::Number { value });
            }
            Value::Times(times) => metric.histogram = Some(histogram(times)),
        }
        metric
    }
}

/// Both kinds at once: whoever scrapes chooses.
fn histogram(times: &Times) -> proto::Histogram {
    let mut count = 0;
    let bounds = BOUNDS_US.iter().map(|us| *us as f64 / 1e6).chain([f64::INFINITY]);
    let bucket = bounds
        .zip(times.buckets)
        .map(|(upper_bound, bucket)| {
            count += bucket;
            proto::Bucket {
                cumulative_count: count,
                upper_bound,
            }
        })
        .collect();
    let (mut spans, mut deltas, mut before, mut next) = (Vec::<proto::BucketSpan>::new(), Vec::new(), 0, 0);
    for (at, filled) in (FINE_FIRST..).zip(times.fine).filter(|(_, filled)| *filled > 0) {
        match spans.last_mut().filter(|_| at == next) {
            Some(span) => span.length += 1,
            // From the end of the span before; the first from bucket 0.
            None => spans.push(proto::BucketSpan {
                offset: at - next,
                length: 1,
            }),
        }
        next = at + 1;
        let filled = i64::try_from(filled).unwrap_or(i64::MAX);
        deltas.push(filled - before);
        before = filled;
    }
    proto::Histogram {
        sample_count: times.fine.iter().sum::<u64>() + times.none,
        sample_sum: times.sum_us as f64 / 1e6,
        bucket,
        schema: FINE_SCHEMA,
        zero_threshold: ZERO,
        zero_count: times.none,
        positive_span: spans,
        positive_delta: deltas,
    }
}

fn escaped(word: &str) -> String {
    word.replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

fn seconds(us: u64) -> String {
    let text = format!("{}.{:06}", us / 1_000_000, us % 1_000_000);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

mod proto {
    #[derive(Clone, PartialEq, prost::Message)]
    pub struct MetricFamily {
        #[prost(string, tag = "1")]
        pub name: String,
        #[prost(string, tag = "2")]
        pub help: String,
        #[prost(int32, tag = "3")]
        pub kind: i32,
        #[prost(message, repeated, tag = "4")]
        pub metric: Vec<Metric>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub struct Metric {
        #[prost(message, repeated, tag = "1")]
        pub label: Vec<LabelPair>,
        #[prost(message, optional, tag = "2")]
        pub gauge: Option<Number>,
        #[prost(message, optional, tag = "3")]
        pub counter: Option<Number>,
        #[prost(message, optional, tag = "7")]
        pub histogram: Option<Histogram>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub struct LabelPair {
        #[prost(string, tag = "1")]
        pub name: String,
        #[prost(string, tag = "2")]
        pub value: String,
    }

    /// A counter's, and a gauge's.
    #[derive(Clone, PartialEq, prost::Message)]
    pub struct Number {
        #[prost(double, tag = "1")]
        pub value: f64,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub struct Histogram {
        #[prost(uint64, tag = "1")]
        pub sample_count: u64,
        #[prost(double, tag = "2")]
        pub sample_sum: f64,
        #[prost(message, repeated, tag = "3")]
        pub bucket: Vec<Bucket>,
        #[prost(sint32, tag = "5")]
        pub schema: i32,
        #[prost(double, tag = "6")]
        pub zero_threshold: f64,
        #[prost(uint64, tag = "7")]
        pub zero_count: u64,
        #[prost(message, repeated, tag = "12")]
        pub positive_span: Vec<BucketSpan>,
        #[prost(sint64, repeated, tag = "13")]
        pub positive_delta: Vec<i64>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub struct Bucket {
        #[prost(uint64, tag = "1")]
        pub cumulative_count: u64,
        #[prost(double, tag = "2")]
        pub upper_bound: f64,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub struct BucketSpan {
        #[prost(sint32, tag = "1")]
        pub offset: i32,
        #[prost(uint32, tag = "2")]
        pub length: u32,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::metrics::Histogram;

    #[test]
    fn a_native_histogram_has_every_time_in_its_bucket() {
        let histogram_of = |us: &[u64]| {
            let histogram = Histogram::default();
            us.iter()
                .for_each(|us| histogram.observe(Duration::from_micros(*us)));
            super::histogram(&histogram.read())
        };
        let times = [0, 1, 99, 100, 101, 1_000_000, 1_000_001, 64_000_000, u64::MAX / 2];
        let found = histogram_of(&times);
        assert_eq!((found.sample_count, found.zero_count, found.schema), (9, 1, 2));
        // The buckets, as Prometheus reads them: bucket i ends at 2^(i/4) seconds.
        let (mut at, mut filled, mut deltas) = (0, 0, found.positive_delta.iter());
        let mut buckets = Vec::new();
        for span in &found.positive_span {
            at += span.offset;
            for _ in 0..span.length {
                filled += deltas.next().unwrap();
                buckets.extend(std::iter::repeat_n(at, usize::try_from(filled).unwrap()));
                at += 1;
            }
        }
        assert_eq!(buckets.len(), times.len() - 1);
        for (us, bucket) in times[1..].iter().zip(&buckets).take(7) {
            let (seconds, end) = (*us as f64 / 1e6, 2f64.powf(f64::from(*bucket) / 4.0));
            assert!(
                seconds <= end * 1.000_001,
                "{us} us in a bucket that ends at {end}"
            );
            assert!(
                seconds > end / 2f64.powf(0.25) * 0.999_999,
                "{us} us in a bucket that ends at {end}"
            );
        }
        assert_eq!(histogram_of(&[]).sample_count, 0);
    }

    #[test]
    fn both_forms_say_the_same() {
        let mut families = Families::default();
        families.gauge("a_gauge", "One.", 7);
        families.lines("a_total", "counter", "Two.", "of", &[("x\"y\\\nz".to_owned(), 9)]);
        assert_eq!(
            families.text(),
            "# HELP a_gauge One.\n# TYPE a_gauge gauge\na_gauge 7\n\
             # HELP a_total Two.\n# TYPE a_total counter\na_total{of=\"x\\\"y\\\\\\nz\"} 9\n"
        );
        let bytes = families.protobuf();
        let mut rest = &bytes[..];
        let gauge = proto::MetricFamily::decode_length_delimited(&mut rest).unwrap();
        let counter = proto::MetricFamily::decode_length_delimited(&mut rest).unwrap();
        assert!(rest.is_empty());
        assert_eq!(
            (gauge.kind, gauge.metric[0].gauge.as_ref().unwrap().value),
            (1, 7.0)
        );
        assert_eq!(
            (counter.kind, counter.metric[0].label[0].value.as_str()),
            (0, "x\"y\\\nz")
        );
    }
}
