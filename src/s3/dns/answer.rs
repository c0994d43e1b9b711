//! The meaning of an answer's records. Pure: no I/O.

use std::net::IpAddr;

use hickory_resolver::proto::rr::{Name, RData, Record, RecordType};

/// CNAMEs followed within one answer. Good chains have one or two.
const CHAIN_MAX: usize = 16;

/// The records that were asked for, or where to ask on.
#[derive(Debug, PartialEq)]
pub(super) enum Reading {
    Records(Records),
    /// The answer ends with a CNAME to a name that it says nothing more about; the shortest TTL up to there.
    Alias(Name, u32),
}

#[derive(Debug, PartialEq)]
pub(super) struct Records {
    pub data: Vec<RData>,
    /// Seconds: the shortest of all records used, CNAMEs included.
    pub ttl: u32,
}

/// Reads the answer section. Only records of the name asked for, or of where its CNAMEs lead, are used: what else a
/// server adds is nobody's business.
pub(super) fn read(asked: &Name, kind: RecordType, answers: &[Record]) -> Option<Reading> {
    let (mut name, mut ttl, mut alias) = (asked, u32::MAX, false);
    for _ in 0..CHAIN_MAX {
        let Some((target, record_ttl)) = cname(name, answers) else {
            break;
        };
        (name, ttl, alias) = (target, ttl.min(record_ttl), true);
    }
    let of_name = || {
        answers
            .iter()
            .filter(|record| record.name == *name && record.record_type() == kind)
            // A record without any bytes, which hickory lets pass as part of a dynamic update.
            .filter(|record| !matches!(record.data, RData::Update0(_)))
    };
    let data: Vec<_> = of_name().map(|record| record.data.clone()).collect();
    if !data.is_empty() {
        let ttl = of_name().fold(ttl, |ttl, record| ttl.min(record.ttl));
        return Some(Reading::Records(Records { data, ttl }));
    }
    alias.then(|| Reading::Alias(name.clone(), ttl))
}

fn cname<'a>(name: &Name, answers: &'a [Record]) -> Option<(&'a Name, u32)> {
    answers.iter().find_map(|record| match &record.data {
        RData::CNAME(target) if record.name == *name => Some((&target.0, record.ttl)),
        _ => None,
    })
}

/// The targets with the lowest priority number, and their ports. Weights are not used: the fan-out measures how
/// each address fares. A target of "." says that there is no such service.
pub(super) fn srv_targets(records: &[RData]) -> Vec<(Name, u16)> {
    let services = || {
        records.iter().filter_map(|data| match data {
            RData::SRV(srv) if !srv.target.is_root() => Some(srv),
            _ => None,
        })
    };
    let lowest = services().map(|srv| srv.priority).min();
    let mut targets: Vec<_> = services()
        .filter(|srv| Some(srv.priority) == lowest)
        .map(|srv| (srv.target.clone(), srv.port))
        .collect();
    targets.sort();
    targets.dedup();
    targets
}

pub(super) fn addresses(records: &[RData]) -> Vec<IpAddr> {
    records.iter().filter_map(RData::ip_addr).collect()
}

#[cfg(test)]
mod tests {
    use hickory_resolver::proto::rr::rdata::{A, CNAME, SRV};

    use super::*;

    fn name(name: &str) -> Name {
        name.parse().unwrap()
    }

    fn a(owner: &str, ttl: u32, last: u8) -> Record {
        Record::from_rdata(name(owner), ttl, RData::A(A::new(10, 0, 0, last)))
    }

    fn alias(owner: &str, ttl: u32, target: &str) -> Record {
        Record::from_rdata(name(owner), ttl, RData::CNAME(CNAME(name(target))))
    }

    fn srv(priority: u16, port: u16, target: &str) -> RData {
        RData::SRV(SRV::new(priority, 1, port, name(target)))
    }

    fn read_a(answers: &[Record]) -> Option<Reading> {
        read(&name("s3.test."), RecordType::A, answers)
    }

    #[test]
    fn the_shortest_ttl_of_the_whole_chain_counts_and_order_does_not() {
        let answers = [
            a("c.test.", 30, 2),
            alias("b.test.", 7, "c.test."),
            alias("s3.test.", 60, "b.test."),
            a("c.test.", 20, 1),
        ];
        let Some(Reading::Records(records)) = read_a(&answers) else {
            panic!("records");
        };
        assert_eq!((records.data.len(), records.ttl), (2, 7));
    }

    #[test]
    fn records_that_were_not_asked_for_are_not_used() {
        let answers = [a("other.test.", 1, 9), a("S3.Test.", 60, 1)];
        let Some(Reading::Records(records)) = read_a(&answers) else {
            panic!("records");
        };
        assert_eq!(
            (addresses(&records.data), records.ttl),
            (vec![[10, 0, 0, 1].into()], 60)
        );
        assert_eq!(read_a(&answers[..1]), None);
        assert_eq!(read(&name("s3.test."), RecordType::AAAA, &answers), None);
    }

    #[test]
    fn a_chain_without_an_end_says_where_to_ask_on() {
        let answers = [alias("s3.test.", 60, "b.test."), alias("b.test.", 5, "c.test.")];
        assert_eq!(read_a(&answers), Some(Reading::Alias(name("c.test."), 5)));
        let circle = [alias("s3.test.", 60, "b.test."), alias("b.test.", 5, "s3.test.")];
        assert_eq!(read_a(&circle), Some(Reading::Alias(name("s3.test."), 5)));
    }

    #[test]
    fn of_srv_the_lowest_priority_number() {
        let records = [
            srv(20, 1, "far.test."),
            srv(10, 9001, "b.test."),
            srv(10, 9000, "a.test."),
            srv(10, 9000, "a.test."),
            srv(0, 0, "."),
        ];
        let expected = [(name("a.test."), 9000), (name("b.test."), 9001)];
        assert_eq!(srv_targets(&records), expected);
        assert_eq!(srv_targets(&records[4..]), []);
    }
}
