//! The advice for an unknown key: the nearest known one, or else all known ones.

use super::schema::SECTIONS;

/// Says that `section.key` is no key, and what to type instead. `spell` writes a known key as the source does;
/// `section` is empty for a key outside all sections.
pub(super) fn key_advice(section: &str, key: &str, spell: impl Fn(&str, &str) -> String) -> String {
    if let Some(hint) = credentials_hint(key) {
        return hint;
    }
    let mut known = Vec::new();
    if let Some(keys) = keys_of(section) {
        known.extend(nearest(key, keys.iter().copied()).map(|key| spell(section, key)));
    } else if let Some(near) = nearest_section(section) {
        known.extend(
            nearest(key, keys_of(near).unwrap_or_default().iter().copied()).map(|key| spell(near, key)),
        );
    }
    if known.is_empty() {
        // The right key in the wrong section.
        let homes = SECTIONS.iter().filter(|(_, keys)| keys.contains(&key));
        known.extend(homes.map(|(section, _)| spell(section, key)));
    }
    match (known.is_empty(), keys_of(section)) {
        (false, _) => format!("unknown key; did you mean {}?", known.join(" or ")),
        (true, Some(keys)) => format!("unknown key; section `{section}` has {}", keys.join(", ")),
        (true, None) => format!("unknown key; {}", all_sections()),
    }
}

pub(super) fn section_advice(section: &str) -> String {
    match nearest_section(section) {
        Some(near) => format!("unknown section; did you mean `{near}`?"),
        None => format!("unknown section; {}", all_sections()),
    }
}

pub(super) fn keys_of(section: &str) -> Option<&'static [&'static str]> {
    SECTIONS
        .iter()
        .find(|(name, _)| *name == section)
        .map(|(_, keys)| *keys)
}

/// The candidate within a typing error of `word`.
pub(super) fn nearest<'a>(word: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    // Longer words are no typing error, and the comparison is quadratic.
    const WORD_BYTES_MAX: usize = 64;

    if word.len() > WORD_BYTES_MAX {
        return None;
    }
    let word = word.to_lowercase();
    let distance_max = (word.len() / 3).max(1);
    candidates
        .map(|candidate| (strsim::damerau_levenshtein(&word, candidate), candidate))
        .filter(|(distance, _)| *distance <= distance_max)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

fn nearest_section(section: &str) -> Option<&'static str> {
    nearest(section, SECTIONS.iter().map(|(name, _)| *name))
}

fn all_sections() -> String {
    let names: Vec<&str> = SECTIONS.iter().map(|(name, _)| *name).collect();
    format!("the sections are {}", names.join(", "))
}

fn credentials_hint(key: &str) -> Option<String> {
    const HINT: &str = "unknown key; credentials come only from the AWS chain: AWS_ACCESS_KEY_ID \
        and AWS_SECRET_ACCESS_KEY, a profile, or the machine's role";

    let key = key.to_lowercase();
    let meant = ["secret", "access_key", "password", "credential"];
    meant
        .iter()
        .any(|word| key.contains(word))
        .then(|| HINT.to_owned())
}
