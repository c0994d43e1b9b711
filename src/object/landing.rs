//! From a response into the slot. The seam for the landing connector: `S3::get` owns the slot while a request is under
//! way and gives it back, so a connector below the SDK can be handed it and read the socket straight into it. Today the
//! SDK hands over frames instead, and they are copied here.

use std::time::Duration;

use aws_sdk_s3::operation::get_object::GetObjectOutput;

use super::error::{ErrorKind, ObjectError, Operation};
use super::store::{GetRange, ObjectMeta, Result};
use crate::net::Landing;

/// Checks that the answer is the range that was asked for, then fills `into` with it. `stall` limits the time
/// without a byte.
pub(super) async fn land(
    get: &GetRange<'_>,
    meta: ObjectMeta,
    answer: GetObjectOutput,
    into: &mut Landing,
    stall: Duration,
) -> Result<ObjectMeta> {
    let error = |kind, detail: String| ObjectError::new(Operation::Get, get.key, kind, detail);
    assert_eq!(
        into.slot.len(),
        get.range.len(),
        "the slot's part and the range differ in length"
    );
    let wrong_len = |actual| {
        error(
            ErrorKind::Length {
                expected: get.object_len,
                actual: Some(actual),
            },
            String::new(),
        )
    };
    if meta.len != get.object_len as u64 {
        return Err(wrong_len(meta.len));
    }
    if answer
        .content_length()
        .is_none_or(|len| usize::try_from(len) != Ok(get.range.len()))
    {
        return Err(error(
            ErrorKind::Protocol,
            format!("a body of {:?} bytes", answer.content_length()),
        ));
    }
    let mut body = answer.body;
    let mut landed = 0;
    loop {
        let frame = tokio::time::timeout(stall, body.next())
            .await
            .map_err(|_| error(ErrorKind::Timeout, format!("no byte for {stall:?}")))?;
        let Some(frame) = frame else { break };
        let frame =
            frame.map_err(|cause| error(ErrorKind::Broken, format!("after {landed} bytes: {cause}")))?;
        let room = into.slot.get_mut(landed..landed + frame.len());
        let room = room.ok_or_else(|| error(ErrorKind::Protocol, "more bytes than announced".into()))?;
        room.copy_from_slice(&frame);
        into.arrived(landed, frame.len());
        landed += frame.len();
    }
    if landed == into.slot.len() {
        Ok(meta)
    } else {
        Err(error(
            ErrorKind::Broken,
            format!("{landed} of {} bytes", into.slot.len()),
        ))
    }
}

/// Length of the whole object, from the answer to a ranged GET.
///
/// Some servers answer 200 with a Content-Range, or 200 with the whole object: right where that was asked for.
pub(super) fn total_len(get: &GetRange<'_>, answer: &GetObjectOutput) -> Result<u64> {
    let error = |detail| ObjectError::new(Operation::Get, get.key, ErrorKind::Protocol, detail);
    let Some(range) = answer.content_range() else {
        let len = answer.content_length().unwrap_or(-1);
        return match u64::try_from(len) {
            Ok(len)
                if get.range.start == 0
                    && (len != get.object_len as u64 || get.range.end == get.object_len) =>
            {
                Ok(len)
            }
            _ => Err(error(format!(
                "a range was asked for, {len} bytes without Content-Range came"
            ))),
        };
    };
    let (bytes, total) =
        parse_content_range(range).ok_or_else(|| error(format!("Content-Range {range:?}")))?;
    // Cut short by the object's end: the length says so better than the range.
    let expected = get.range.start as u64..get.range.end as u64;
    if bytes != expected && total == get.object_len as u64 {
        return Err(error(format!(
            "Content-Range {range:?} where {expected:?} was asked for"
        )));
    }
    Ok(total)
}

/// `bytes FIRST-LAST/TOTAL`, as a half-open range and the total.
fn parse_content_range(text: &str) -> Option<(std::ops::Range<u64>, u64)> {
    let (range, total) = text
        .trim()
        .strip_prefix("bytes")?
        .trim_start_matches(['=', ' '])
        .split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last): (u64, u64) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
    Some((first..last.checked_add(1)?, total.trim().parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn total(range: std::ops::Range<usize>, content_range: Option<&str>, len: i64) -> Result<u64, ErrorKind> {
        let get = GetRange {
            key: "k",
            range,
            object_len: 100,
            if_match: None,
        };
        let answer = GetObjectOutput::builder()
            .set_content_range(content_range.map(Into::into))
            .content_length(len);
        total_len(&get, &answer.build()).map_err(|error| error.kind)
    }

    #[test]
    fn the_range_is_checked() {
        assert_eq!(total(10..20, Some("bytes 10-19/100"), 10), Ok(100));
        assert_eq!(
            total(10..20, Some("bytes=10-19/100"), 10),
            Ok(100),
            "as one vendor writes it"
        );
        assert_eq!(
            total(10..20, Some("bytes 10-14/15"), 5),
            Ok(15),
            "the caller sees the wrong length"
        );
        for wrong in [
            "bytes 0-9/100",
            "bytes 10-18/100",
            "bytes 10-19/*",
            "10-19",
            "bytes a-b/c",
            "",
        ] {
            assert_eq!(
                total(10..20, Some(wrong), 10),
                Err(ErrorKind::Protocol),
                "{wrong}"
            );
        }
        assert_eq!(total(0..100, None, 100), Ok(100), "200 with the whole object");
        assert_eq!(
            total(0..10, None, 50),
            Ok(50),
            "200 with an object of another length"
        );
        assert_eq!(total(0..10, None, 100), Err(ErrorKind::Protocol), "200 to a part");
        assert_eq!(total(10..20, None, 10), Err(ErrorKind::Protocol));
        assert_eq!(total(0..10, None, -1), Err(ErrorKind::Protocol));
    }
}
