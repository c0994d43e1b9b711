//! kvgate's age rule among the lifecycle rules of a bucket.
//!
//! A bucket has one document for the rules of all its users, so it is read, changed and written whole. What others wrote
//! stays letter by letter: kvgate puts its own `<Rule>` in, or takes it out, and parses no other. S3 has no condition for
//! such a write: a change by others within the moment of the write is lost, and nothing tells of it. So the document is read
//! again just before, and it must be the one that the caller has seen; and afterwards, when all but kvgate's rule must be
//! what it was.

use super::Inventory;
use crate::s3::object::{ErrorKind, LifecycleRules, ObjectError};

/// The start of the ids of kvgate's rules; the prefix follows, so that two prefixes of a bucket have a rule each.
const ID: &str = "kvgate-age ";
/// The id of the same rule as `ceph/apply.py` wrote it before it took this one.
const OLD_ID: &str = "kvgate-chunks-expire";
const EMPTY: &str = concat!(
    r#"<LifecycleConfiguration xmlns="http://s3.amazonaws.com/doc/2006-03-01/">"#,
    "</LifecycleConfiguration>"
);
const RULE: (&str, &str) = ("<Rule>", "</Rule>");

/// The lifecycle rules of a bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lifecycle {
    /// The document; None where there are no rules.
    xml: Option<String>,
    /// See [`LifecycleRules`].
    smallest_moved: Option<String>,
    /// Ids of kvgate's rule and elements of it name this prefix.
    prefix: String,
}

/// One rule, as far as it is looked at.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[expect(clippy::struct_excessive_bools, reason = "fields of the report")]
pub struct LifecycleRule {
    pub id: String,
    pub prefix: String,
    pub enabled: bool,
    /// Days after which it removes objects.
    pub days: Option<u32>,
    /// It is kvgate's own for this prefix.
    pub ours: bool,
    /// It is kvgate's for another prefix.
    pub ours_elsewhere: bool,
    /// It takes chunks of this prefix.
    pub takes_chunks: bool,
}

/// Why the rules can't be changed.
#[derive(Debug, thiserror::Error)]
pub enum LifecycleError {
    #[error(transparent)]
    Object(#[from] ObjectError),
    #[error(
        "the server has no lifecycle rules ({0}): bound the bucket with `kvgate gc` or [gc] instead, which need none"
    )]
    Unsupported(ObjectError),
    #[error(
        "the server's lifecycle rules are no XML that kvgate can change: {0}. Change them with the server's own tools"
    )]
    Odd(&'static str),
    #[error(
        "others changed the rules meanwhile, so nothing was written: look at them with `kvgate lifecycle show`, and try again"
    )]
    Changed,
    #[error("the server took the rules, and gives others: {0}")]
    Lost(&'static str),
}

impl Lifecycle {
    fn new(rules: Option<LifecycleRules>, prefix: &str) -> Self {
        let (xml, smallest_moved) = rules.map(|rules| (rules.xml, rules.smallest_moved)).unzip();
        Self {
            xml,
            smallest_moved: smallest_moved.flatten(),
            prefix: prefix.to_owned(),
        }
    }

    fn id(&self) -> String {
        format!("{ID}{}", self.prefix)
    }

    /// The document's rules, each as its whole text.
    fn texts(&self) -> Result<Vec<&str>, LifecycleError> {
        let mut texts = Vec::new();
        let mut rest = self.xml.as_deref().unwrap_or_default();
        while let Some(start) = rest.find(RULE.0) {
            let end = rest[start..].find(RULE.1);
            let end = end.ok_or(LifecycleError::Odd("a rule does not end"))?;
            let end = start + end + RULE.1.len();
            texts.push(&rest[start..end]);
            rest = &rest[end..];
        }
        Ok(texts)
    }

    pub fn rules(&self) -> Result<Vec<LifecycleRule>, LifecycleError> {
        Ok(self.texts()?.into_iter().map(|text| self.read(text)).collect())
    }

    fn read(&self, text: &str) -> LifecycleRule {
        let of = |name: &str, text: &str| element(name, text).map(unescape).unwrap_or_default();
        let expiration = element("Expiration", text).unwrap_or_default();
        let (id, prefix) = (of("ID", text), of("Prefix", text));
        let enabled = of("Status", text) == "Enabled";
        let days = element("Days", expiration).and_then(|days| days.trim().parse().ok());
        let is_kvgates = id.starts_with(ID) || id == OLD_ID;
        let ours = id == self.id() || (id == OLD_ID && prefix == self.prefix);
        // Chunks have no tags.
        let has_tag = element("Tag", text).is_some();
        LifecycleRule {
            ours,
            ours_elsewhere: is_kvgates && !ours,
            takes_chunks: enabled && days.is_some() && !has_tag && self.prefix.starts_with(&prefix),
            id,
            prefix,
            enabled,
            days,
        }
    }

    /// The document with kvgate's rule for this prefix: after `days`, or without one.
    fn with_rule(&self, days: Option<u32>) -> Result<Option<String>, LifecycleError> {
        let texts = self.texts()?;
        let ours: Vec<&str> = texts
            .iter()
            .copied()
            .filter(|text| self.read(text).ours)
            .collect();
        let mut xml = self.xml.clone().unwrap_or_else(|| EMPTY.to_owned());
        for text in &ours {
            xml = xml.replacen(text, "", 1);
        }
        let Some(days) = days else {
            // A document without rules is refused.
            return Ok((texts.len() > ours.len()).then_some(xml));
        };
        let (id, prefix) = (escape(&self.id()), escape(&self.prefix));
        let rule = format!(
            "{}<ID>{id}</ID><Filter><Prefix>{prefix}</Prefix></Filter><Status>Enabled</Status>\
             <Expiration><Days>{days}</Days></Expiration>{}",
            RULE.0, RULE.1
        );
        let end = xml
            .rfind("</")
            .filter(|end| xml[*end..].contains("LifecycleConfiguration"));
        let end = match (end, xml.trim_end().ends_with("/>")) {
            (Some(end), _) => end,
            // One without content.
            (None, true) => {
                EMPTY.clone_into(&mut xml);
                xml.rfind("</").unwrap_or_default()
            }
            (None, false) => return Err(LifecycleError::Odd("the document does not end")),
        };
        xml.insert_str(end, &rule);
        Ok(Some(xml))
    }
}

/// The text within the first element of this name, without attributes.
fn element<'a>(name: &str, text: &'a str) -> Option<&'a str> {
    let (_, rest) = text.split_once(&format!("<{name}>"))?;
    rest.split_once(&format!("</{name}>")).map(|(inner, _)| inner)
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}

fn unescape(text: &str) -> String {
    text.replace("&lt;", "<")
        .replace("&gt;", ">")
        .replace("&quot;", "\"")
        .replace("&#34;", "\"")
        .replace("&apos;", "'")
        .replace("&#39;", "'")
        .replace("&amp;", "&")
}

impl Inventory {
    pub async fn lifecycle(&self) -> Result<Lifecycle, LifecycleError> {
        let rules = self.store.lifecycle(self.deadline()).await.map_err(unsupported)?;
        Ok(Lifecycle::new(rules, self.keys.as_str()))
    }

    /// Sets kvgate's rule for the prefix: chunks go so many days after they were stored or refreshed. None removes it.
    /// Rules of others stay. `before`: the rules as they were seen; others since then are left as they are. Returns the
    /// rules as the server then gives them.
    pub async fn set_lifecycle(
        &self,
        before: &Lifecycle,
        days: Option<u32>,
    ) -> Result<Lifecycle, LifecycleError> {
        let wanted = before.with_rule(days)?;
        if self.lifecycle().await? != *before {
            return Err(LifecycleError::Changed);
        }
        if wanted != before.xml {
            let wanted = wanted.map(|xml| LifecycleRules {
                xml,
                smallest_moved: before.smallest_moved.clone(),
            });
            let written = self.store.set_lifecycle(wanted.as_ref(), self.deadline());
            written.await.map_err(unsupported)?;
        }
        let after = self.lifecycle().await?;
        let ours = after.rules()?.into_iter().find(|rule| rule.ours);
        if ours.and_then(|rule| rule.days) != days {
            return Err(LifecycleError::Lost(
                "kvgate's rule is not as it was set; another change may have come in between. Try again",
            ));
        }
        // Without rules there is no setting either.
        let has_both = before.xml.is_some() && after.xml.is_some();
        let is_kept = !has_both || before.smallest_moved == after.smallest_moved;
        match is_kept && others(before)? == others(&after)? {
            true => Ok(after),
            false => Err(LifecycleError::Lost(
                "rules of others are not as they were. Look at them with the server's own tools",
            )),
        }
    }
}

/// The texts of all rules but kvgate's; a server may give them in another order.
fn others(rules: &Lifecycle) -> Result<Vec<&str>, LifecycleError> {
    let mut others = rules.texts()?;
    others.retain(|text| !rules.read(text).ours);
    others.sort_unstable();
    Ok(others)
}

fn unsupported(error: ObjectError) -> LifecycleError {
    match error.kind {
        ErrorKind::Unsupported => LifecycleError::Unsupported(error),
        _ => LifecycleError::Object(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Another's, with an element that no SDK knows, and spaces of its own.
    const FOREIGN: &str = "<Rule>\n <ID>logs &amp; more</ID><Status>Enabled</Status><Filter><And><Prefix>logs/</Prefix>\
        <Tag><Key>a</Key><Value>b</Value></Tag></And></Filter><Expiration><Days>9</Days></Expiration>\
        <Vendor:Own>1</Vendor:Own></Rule>";

    fn document(rules: &str) -> Lifecycle {
        let xml =
            format!("<?xml version=\"1.0\"?><LifecycleConfiguration>{rules}</LifecycleConfiguration>\n");
        read(Some(xml), "kv & co/")
    }

    fn read(xml: Option<String>, prefix: &str) -> Lifecycle {
        let rules = xml.map(|xml| LifecycleRules {
            xml,
            smallest_moved: None,
        });
        Lifecycle::new(rules, prefix)
    }

    #[test]
    fn the_rules_of_others_stay_letter_by_letter() {
        let before = document(FOREIGN);
        let with = before.with_rule(Some(30)).unwrap().unwrap();
        assert!(with.contains(FOREIGN), "{with}");
        let after = read(Some(with), "kv & co/");
        let rules = after.rules().unwrap();
        assert_eq!(rules.len(), 2);
        assert_eq!(
            (rules[0].id.as_str(), rules[0].ours, rules[0].takes_chunks),
            ("logs & more", false, false)
        );
        assert_eq!(
            (rules[1].days, rules[1].ours, rules[1].takes_chunks),
            (Some(30), true, true)
        );
        let other = after.with_rule(Some(7)).unwrap().unwrap();
        let other = read(Some(other), "kv & co/");
        assert_eq!(other.rules().unwrap()[1].days, Some(7));
        assert_eq!(other.with_rule(None).unwrap(), before.xml);
    }

    #[test]
    fn the_first_rule_makes_a_document_and_the_last_takes_it_away() {
        let none = read(None, "");
        let one = read(none.with_rule(Some(1)).unwrap(), "");
        assert_eq!(one.rules().unwrap().len(), 1);
        assert_eq!(one.with_rule(None).unwrap(), None);
        assert_eq!(none.with_rule(None).unwrap(), None);
        let empty = read(Some("<LifecycleConfiguration/>".into()), "");
        assert!(
            empty
                .with_rule(Some(1))
                .unwrap()
                .unwrap()
                .contains("<Days>1</Days>")
        );
    }

    #[test]
    fn each_prefix_has_a_rule_of_its_own() {
        let one = read(None, "a/").with_rule(Some(1)).unwrap();
        let both = read(one.clone(), "b/").with_rule(Some(2)).unwrap();
        assert_eq!(read(both.clone(), "a/").rules().unwrap().len(), 2);
        assert_eq!(read(both, "b/").with_rule(None).unwrap(), one);
    }

    #[test]
    fn the_rule_of_ceph_apply_is_kvgates_under_its_old_id() {
        let old = format!(
            "<Rule><ID>{OLD_ID}</ID><Filter><Prefix>a/</Prefix></Filter><Status>Enabled</Status>\
             <Expiration><Days>30</Days></Expiration></Rule>"
        );
        let old = document(&old).xml;
        let ours = read(old.clone(), "a/");
        let rules = ours.rules().unwrap();
        assert!(rules[0].ours && rules[0].takes_chunks && !rules[0].ours_elsewhere);
        assert_eq!(ours.with_rule(None).unwrap(), None);
        let new = read(ours.with_rule(Some(90)).unwrap(), "a/");
        let rules = new.rules().unwrap();
        assert_eq!(
            (rules.len(), rules[0].id.as_str(), rules[0].days),
            (1, "kvgate-age a/", Some(90))
        );
        let other = read(old, "b/").rules().unwrap();
        assert!(!other[0].ours && !other[0].takes_chunks && other[0].ours_elsewhere);
    }

    #[test]
    fn a_rule_for_tagged_objects_takes_no_chunks() {
        let tagged = FOREIGN.replace("logs/", "");
        assert!(!document(&tagged).rules().unwrap()[0].takes_chunks);
        let all = tagged.replace("<Tag><Key>a</Key><Value>b</Value></Tag>", "");
        assert!(document(&all).rules().unwrap()[0].takes_chunks);
    }

    #[test]
    fn a_cut_document_is_refused() {
        let cut = read(Some("<LifecycleConfiguration><Rule><ID>x</ID>".into()), "");
        assert!(cut.with_rule(Some(1)).is_err());
        let cut = read(Some("<LifecycleConfiguration>".into()), "");
        assert!(cut.with_rule(Some(1)).is_err());
    }
}
