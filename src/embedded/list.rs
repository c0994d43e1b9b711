//! `ListObjectsV2` over a folder tree. Blocking.
//!
//! Why not `s3s-fs`'s: that one fails when a file vanishes during the walk, gives no `ETag`s and
//! panics on odd delimiters. Every page walks the folders below the prefix again, skipping those
//! before the page; nothing is cached.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use s3s::dto::{CommonPrefix, ETag, ListObjectsV2Input, ListObjectsV2Output, Object, Timestamp};
use s3s::{S3Result, s3_error};

use super::objects::{ObjectPath, internal, is_absent};

/// S3's limit of a page.
const MAX_KEYS: i32 = 1000;

struct Found {
    key: String,
    len: u64,
    modified: SystemTime,
}

pub(super) fn list(root: &Path, input: ListObjectsV2Input) -> S3Result<ListObjectsV2Output> {
    let bucket = root.join(&input.bucket);
    if !bucket.is_dir() {
        return Err(s3_error!(NoSuchBucket));
    }
    let max_keys = input.max_keys.unwrap_or(MAX_KEYS);
    if max_keys < 0 {
        return Err(s3_error!(InvalidArgument, "max-keys must not be negative"));
    }
    let max_keys = max_keys.min(MAX_KEYS);
    let echoed = [
        &input.prefix,
        &input.delimiter,
        &input.start_after,
        &input.continuation_token,
    ];
    if echoed
        .into_iter()
        .flatten()
        .any(|text| text.contains(char::is_control))
    {
        return Err(s3_error!(InvalidArgument, "XML cannot carry control characters"));
    }
    let prefix = input.prefix.as_deref().unwrap_or_default();
    let delimiter = input.delimiter.as_deref().filter(|d| !d.is_empty());
    let token = input.continuation_token.as_deref().unwrap_or_default();
    let after = token.max(input.start_after.as_deref().unwrap_or_default());

    let mut found = Vec::new();
    let mut groups = BTreeSet::new();
    walk(&bucket, prefix, after, &mut |file: Found| {
        let rest = file.key.get(prefix.len()..).unwrap_or_default();
        match delimiter.and_then(|d| rest.find(d).map(|at| prefix.len() + at + d.len())) {
            Some(end) => {
                // `end` lies behind a whole delimiter, hence on a char boundary.
                let group = &file.key[..end];
                if group > after && !groups.contains(group) {
                    groups.insert(group.to_owned());
                }
            }
            None => found.push(file),
        }
    })
    .map_err(internal)?;

    found.sort_unstable_by(|a, b| a.key.cmp(&b.key));
    let total = found.len() + groups.len();
    let limit = usize::try_from(max_keys).unwrap_or_default();
    let (mut found, mut groups) = (found.into_iter().peekable(), groups.into_iter().peekable());
    let (mut contents, mut prefixes, mut last) = (Vec::new(), Vec::new(), None);
    while contents.len() + prefixes.len() < limit {
        let group_first = match (found.peek(), groups.peek()) {
            (Some(file), Some(group)) => *group < file.key,
            (None, Some(_)) => true,
            (_, None) => false,
        };
        if group_first {
            last = groups.next();
            prefixes.push(CommonPrefix { prefix: last.clone() });
        } else if let Some(file) = found.next() {
            last = Some(file.key.clone());
            contents.push(describe(root, &input.bucket, file)?);
        } else {
            break;
        }
    }

    let count = contents.len() + prefixes.len();
    let truncated = limit > 0 && count < total;
    Ok(ListObjectsV2Output {
        key_count: i32::try_from(count).ok(),
        max_keys: Some(max_keys),
        is_truncated: Some(truncated),
        next_continuation_token: last.filter(|_| truncated),
        contents: Some(contents),
        common_prefixes: Some(prefixes),
        // Keys go out as they are, so no `encoding_type`: a client would decode a second time.
        continuation_token: input.continuation_token,
        delimiter: input.delimiter,
        name: Some(input.bucket),
        prefix: input.prefix,
        start_after: input.start_after,
        ..ListObjectsV2Output::default()
    })
}

fn describe(root: &Path, bucket: &str, file: Found) -> S3Result<Object> {
    let record = ObjectPath::new(root, bucket, &file.key)?.record(file.len, file.modified);
    Ok(Object {
        e_tag: Some(ETag::Strong(record.etag)),
        key: Some(file.key),
        last_modified: Some(Timestamp::from(file.modified)),
        size: i64::try_from(file.len).ok(),
        ..Object::default()
    })
}

/// Calls `each` for every object with `prefix` and after `after`, in no order.
fn walk(bucket: &Path, prefix: &str, after: &str, each: &mut dyn FnMut(Found)) -> io::Result<()> {
    // Only the folder that the prefix names in full can hold matches.
    let start = prefix.rfind('/').map_or("", |at| &prefix[..=at]);
    if start
        .split_terminator('/')
        .any(|part| matches!(part, "" | "." | ".."))
    {
        return Ok(()); // no key has such a part
    }
    let mut folders: Vec<(PathBuf, String)> = vec![(bucket.join(start), start.to_owned())];
    while let Some((path, folder)) = folders.pop() {
        let entries = match fs::read_dir(path) {
            Err(error) if is_absent(&error) => continue,
            result => result?,
        };
        for entry in entries {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else {
                continue; // no object of ours
            };
            let mut key = format!("{folder}{name}");
            let meta = match entry.metadata() {
                Err(error) if is_absent(&error) => continue,
                result => result?,
            };
            if meta.is_dir() {
                key.push('/');
                let wanted = key.starts_with(prefix) || prefix.starts_with(&key);
                let ahead = key.as_str() > after || after.starts_with(&key);
                if wanted && ahead {
                    folders.push((entry.path(), key));
                }
            } else if key.starts_with(prefix) && key.as_str() > after {
                let valid = !name.contains(char::is_control);
                if meta.is_file() && valid {
                    each(Found {
                        key,
                        len: meta.len(),
                        modified: meta.modified()?,
                    });
                }
            }
        }
    }
    Ok(())
}
