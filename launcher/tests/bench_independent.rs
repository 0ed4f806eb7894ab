//! The benchmark's times and bus bandwidths beside what is known without it: the emulated link, which no call can beat,
//! and the clock of this test, which all calls of a run together cannot outlast; with nccl-tests' definitions written out
//! once more. Both bounds hold however busy the machine is. Where it is idle they are close to each other: no call is made
//! that is not timed, so that what remains is the program's start.

use harness::Bench;
use std::time::Instant;

const RANKS: usize = 2;
const LINK: &str = "latency=20us,bandwidth=500MB/s";
const BANDWIDTH: f64 = 500e6;
const BYTES: usize = 16 << 20;
/// Of each half of the row.
const CALLS: usize = 8;

/// The halves of the table's only row, out of place and in place, which follow five labels: of each a call's time in
/// microseconds, its algorithm's and bus bandwidth, and that nothing was checked. And for how many seconds the program ran.
fn printed(operation: &str) -> ([[f64; 3]; 2], f64) {
    let line = format!(
        "bench {operation} -b {BYTES} -e {BYTES} -n {CALLS} -w 0 -c 0 --ranks {RANKS} --transport threads \
         --emulate-link {LINK}"
    );
    let start = Instant::now();
    let outcome = Bench::new(env!("CARGO_BIN_EXE_caravan")).run(&line).success();
    let wall = start.elapsed().as_secs_f64();
    let row = outcome.stdout.lines().find(|l| !l.starts_with('#') && !l.trim().is_empty()).expect("a row");
    let words: Vec<&str> = row.split_whitespace().skip(5).collect();
    let half = |words: &[&str]| {
        assert_eq!((words.len(), words[3]), (4, "N/A"), "{row}");
        [0, 1, 2].map(|at| words[at].parse().expect("a number"))
    };
    let halves: Vec<[f64; 3]> = words.chunks(4).map(half).collect();
    (halves.try_into().expect("two halves"), wall)
}

#[test]
fn times_and_bandwidths_lie_between_the_link_and_the_clock() {
    let n = RANKS as f64;
    for (operation, factor) in [
        ("all_reduce", 2.0 * (n - 1.0) / n),
        ("reduce_scatter", (n - 1.0) / n),
        ("all_gather", (n - 1.0) / n),
        ("all_to_all", (n - 1.0) / n),
    ] {
        let (halves, wall) = printed(operation);
        // By definition a bus bandwidth is what each link must carry at least.
        let least = BYTES as f64 * factor / BANDWIDTH * 1e6;
        // Times are means over ranks, each of which made its calls one after the other.
        let together: f64 = halves.iter().map(|[us, ..]| us * CALLS as f64 / 1e6).sum();
        assert!(together <= wall, "{operation}: {halves:?} of {CALLS} calls each within {wall} s");
        for [us, algorithm, bus] in halves {
            let seen =
                format!("{operation}: {us} us, {algorithm} and {bus} GB/s; a call takes {least} us at least");
            assert!(us >= least * 0.999, "{seen}");
            // Two places are printed.
            assert!((algorithm - BYTES as f64 / us / 1e3).abs() < 0.006, "{seen}");
            assert!((bus - BYTES as f64 / us / 1e3 * factor).abs() < 0.006, "{seen}");
        }
    }
}
