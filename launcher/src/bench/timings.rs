//! What a run's timings take: those of one size while it is measured, and all of them where they are kept for `--json`.

use super::plan::{Plan, Repeats};

/// Bytes of a timing.
const TIMING: u64 = size_of::<f64>() as u64;

/// Bytes of one while it is written: itself, as a value of the file's tree, and as text on a line of its own, as measured.
const WRITTEN: u64 = TIMING + 32 + 24;

/// Copies of a size's timings that each rank has at once: its own, those over ranks and on the slowest one, and what making
/// these takes.
const COPIES: u64 = 5;

/// The most bytes that timings take of all `ranks` together, beside the buffers of the calls.
pub fn footprint(plan: &Plan, ranks: usize) -> u64 {
    let each = if plan.each_rank(ranks) { ranks as u64 } else { 0 };
    let longest = plan.repeats.iterations(plan.repeats.sweep.begin) as u64;
    // Rank 0 has those of each rank twice while it sorts them by rank.
    let measured = (longest * TIMING).saturating_mul(ranks as u64 * COPIES + 2 * each);
    if !plan.json {
        return measured;
    }
    let halves = 2 * plan.dtypes.len() * plan.ops.len() * plan.roots(ranks).len();
    let calls = plan.repeats.calls().saturating_mul(halves as u64);
    let calls = calls.saturating_mul(plan.cycles.unwrap_or(1) as u64);
    let timings = calls.saturating_mul(1 + u64::from(plan.columns.per_call) + each);
    // They are kept while the last size is measured, and written after it.
    timings.saturating_mul(TIMING).saturating_add(measured).max(timings.saturating_mul(WRITTEN))
}

/// Lists of timings that `bench overlap` has of a size.
const LISTS: u64 = 7;
/// How often each rank has them: as they were measured, by list, and all together.
const LISTED: u64 = 3;

/// The same for `bench overlap`, of which those of `written` operations are kept for `--json`.
pub fn of_overlap(repeats: &Repeats, written: usize, ranks: usize) -> u64 {
    let longest = repeats.iterations(repeats.sweep.begin) as u64;
    let measured = (longest * TIMING).saturating_mul(LISTS * LISTED * ranks as u64);
    // Rank 0 keeps every rank's, as values of the file's tree.
    let kept = repeats.calls().saturating_mul(written as u64 * LISTS * ranks as u64);
    measured.saturating_add(kept.saturating_mul(WRITTEN - TIMING))
}

#[cfg(test)]
mod tests {
    use super::super::plan::tests::plan;
    use super::*;

    #[test]
    fn timings_that_are_written_count() {
        let of = |flags: &str| footprint(&plan(flags).unwrap(), 2);
        let million = 1_000_000;
        // Of one size: over ranks, and with -I on the slowest and on each, in both halves.
        let one = of("all_reduce -b 8 -e 8 -n 1000000 --json x");
        let single = of("all_reduce -b 8 -e 8 -n 1000000 -I 1 --json x");
        assert_eq!((one, single), (2 * million * WRITTEN, 8 * million * WRITTEN));
        // Twelve sizes of ten million are more than most machines have.
        assert!(of("all_reduce -n 10000000 -I 1 --json x -b 8 -e 64M") > 60_000_000_000);
        // Of a rank that is not timed none are written.
        let ring = of("send_recv -b 8 -e 8 -n 1000 -I 1 --json x");
        assert_eq!(of("send_recv --ping-pong -b 8 -e 8 -n 1000 -I 1 --json x") * 2, ring);
        for (flags, times) in [("-N 3", 3), ("-d all", 10), ("-o all", 5), ("-e 32 -f 2", 3)] {
            let more = of(&format!("all_reduce -b 8 -e 8 -n 1000000 --json x {flags}"));
            assert_eq!(more, times * one, "{flags}");
        }
        // Many ranks take more to measure what rank 0 keeps.
        let crowd = footprint(&plan("all_reduce -b 8 -e 8 -n 1000000 --json x").unwrap(), 64);
        assert_eq!(crowd, million * (64 * COPIES + 2) * TIMING);
    }

    #[test]
    fn timings_of_overlap_count() {
        let repeats = &plan("all_reduce -b 8 -e 8 -n 1000000").unwrap().repeats;
        assert_eq!(of_overlap(repeats, 0, 2), 7 * 3 * 2 * 8_000_000);
        assert_eq!(of_overlap(repeats, 3, 2) - of_overlap(repeats, 0, 2), 3 * 7 * 2 * 56_000_000);
    }

    #[test]
    fn what_nobody_writes_is_of_one_size() {
        let of = |flags: &str| footprint(&plan(flags).unwrap(), 4);
        assert_eq!(of("all_reduce -n 1000"), 4 * COPIES * 8 * 1000);
        assert_eq!(of("all_reduce -n 1000 -N 0 -d f64 -I 1"), of("all_reduce -n 1000"));
        // By size: eight of 1 KiB to 8 KiB, then so many that nobody could go through them.
        let many = of("all_reduce -b 1K -i 1K -e 1000G --json x");
        assert!(many > 2 * 20 * WRITTEN * 1_000_000_000, "{many}");
    }
}
