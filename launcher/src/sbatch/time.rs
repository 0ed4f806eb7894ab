//! Times as Slurm reads them.

use crate::failure::{Failure, Result};

/// So many seconds before it was to, Slurm may ask a job at most.
pub const EARLY: u64 = 60;

/// Slurm counts seconds in so many bits.
const MOST: u64 = i32::MAX as u64;

/// Seconds of a job whose `--time` is `text`, which Slurm rounds up to whole minutes; None of one without an end.
///
/// # Errors
/// Slurm would refuse it.
pub fn limit(text: &str) -> Result<Option<u64>> {
    if ["unlimited", "infinite", "-1"].contains(&&*text.to_ascii_lowercase()) {
        return Ok(None);
    }
    let seconds = seconds(text).filter(|&seconds| seconds <= MOST).ok_or_else(|| {
        Failure::usage(format!(
            "--time {text} is no time to Slurm: give MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, DAYS-HOURS, \
             DAYS-HOURS:MINUTES or DAYS-HOURS:MINUTES:SECONDS, of up to 68 years, or UNLIMITED"
        ))
    })?;
    // As Slurm has it: no time at all is no limit.
    Ok(Some(seconds.div_ceil(60) * 60).filter(|&seconds| seconds > 0))
}

/// Seconds of minutes, with seconds or hours around them or days before.
fn seconds(text: &str) -> Option<u64> {
    let number = |part: &str| match part.bytes().all(|b| b.is_ascii_digit()) {
        true => part.parse().ok(),
        false => None,
    };
    let (days, rest) = text.split_once('-').map_or((None, text), |(days, rest)| (Some(days), rest));
    let parts = rest.split(':').map(number).collect::<Option<Vec<u64>>>()?;
    let (hours, minutes, seconds) = match (days, &parts[..]) {
        (None, &[minutes]) => (0, minutes, 0),
        (None, &[minutes, seconds]) => (0, minutes, seconds),
        (Some(_), &[hours]) => (hours, 0, 0),
        (Some(_), &[hours, minutes]) => (hours, minutes, 0),
        (_, &[hours, minutes, seconds]) => (hours, minutes, seconds),
        _ => return None,
    };
    let days: u64 = days.map_or(Some(0), number)?;
    let hours = days.checked_mul(24)?.checked_add(hours)?;
    hours.checked_mul(60)?.checked_add(minutes)?.checked_mul(60)?.checked_add(seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_slurm_reads_them() {
        for (time, seconds) in [
            ("5", Some(300)),
            ("5:30", Some(360)),
            ("0:01", Some(60)),
            ("1:00:05", Some(3660)),
            ("2-1", Some(49 * 3600)),
            ("2-1:30", Some(49 * 3600 + 1800)),
            ("0-00:00:07", Some(60)),
            ("0-00:01:00", Some(60)),
            ("0", None),
            ("00:00:00", None),
            ("UNLIMITED", None),
            ("infinite", None),
            ("-1", None),
        ] {
            assert_eq!(limit(time).unwrap(), seconds, "{time}");
        }
        for time in [
            "abc",
            "1:2:3:4",
            "1-0:0:0:0",
            "1-2-3",
            "1h",
            "+5",
            "1.5",
            ":5",
            "-",
            "-2",
            "99999999999999999999",
            "999999999999999999-1",
            "24856-0",
        ] {
            let e = limit(time).expect_err(time);
            assert!(e.code() == 2 && e.to_string().starts_with(&format!("--time {time} is no time")), "{e}");
        }
    }
}
