//! Ranks on processors of their own. The scheduler may put two ranks on one processor for their first milliseconds, and
//! short calls then take ten times as long.

use crate::failure::{Failure, Result};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Binds the calling thread to the share of `rank` of the processors that it may use; with more ranks than processors
/// it stays as it is.
///
/// # Errors
/// The system's refusal.
pub fn to_share(rank: usize, ranks: usize) -> Result<()> {
    let refused =
        |e| Failure::run(format!("binding rank {rank} to its processors failed ({e}): take --bind none"));
    let allowed = sched_getaffinity(None).map_err(refused)?;
    let allowed: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu)).collect();
    let Some(share) = share(&allowed, rank, ranks) else { return Ok(()) };
    let mut set = CpuSet::new();
    share.iter().for_each(|&cpu| set.set(cpu));
    sched_setaffinity(None, &set).map_err(refused)
}

/// The part of `rank`; None where there are not as many as ranks.
fn share(allowed: &[usize], rank: usize, ranks: usize) -> Option<&[usize]> {
    let each = allowed.len() / ranks;
    (each > 0).then(|| &allowed[rank * each..(rank + 1) * each])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_apart_and_equal() {
        let allowed = [0, 1, 4, 5, 9];
        assert_eq!(share(&allowed, 0, 2), Some(&allowed[0..2]));
        assert_eq!(share(&allowed, 1, 2), Some(&allowed[2..4]));
        assert_eq!(share(&allowed, 4, 5), Some(&allowed[4..5]));
        assert_eq!(share(&allowed, 0, 6), None);
    }
}
