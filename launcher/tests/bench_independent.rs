//! The benchmark's times and bus bandwidths beside what is known without it: the emulated link, which no call can beat,
//! and the clock of this test, which the calls together cannot outlast; with nccl-tests' definitions written out once
//! more. Both bounds hold however busy the machine is. Where it is idle they are close to each other.

use harness::Bench;
use std::time::Instant;

const RANKS: usize = 2;
const LINK: &str = "latency=20us,bandwidth=500MB/s";
const BANDWIDTH: f64 = 500e6;
const BYTES: usize = 16 << 20;
const CALLS: usize = 8;

/// The table's only row: the first numbers of the out-of-place half, which follow six labels, are a call's time in
/// microseconds, and its algorithm's and bus bandwidth. And for how many seconds the program ran.
fn printed(operation: &str) -> ([f64; 3], f64) {
    let line = format!(
        "bench {operation} -b {BYTES} -e {BYTES} -n {CALLS} -w 1 -c 0 --ranks {RANKS} --transport threads \
         --emulate-link {LINK}"
    );
    let start = Instant::now();
    let outcome = Bench::new(env!("CARGO_BIN_EXE_caravan")).run(&line).success();
    let wall = start.elapsed().as_secs_f64();
    let row = outcome.stdout.lines().find(|l| !l.starts_with('#') && !l.trim().is_empty()).expect("a row");
    let numbers = row.split_whitespace().skip(5).map(|word| word.parse().expect("a number"));
    let numbers: Vec<f64> = numbers.take(3).collect();
    (numbers.try_into().expect("three numbers"), wall)
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
        let ([us, algorithm, bus], wall) = printed(operation);
        // By definition a bus bandwidth is what each link must carry at least.
        let least = BYTES as f64 * factor / BANDWIDTH * 1e6;
        let most = wall / CALLS as f64 * 1e6;
        let seen = format!(
            "{operation}: {us} us, {algorithm} and {bus} GB/s; a call takes from {least} to {most} us"
        );
        assert!(us >= least * 0.999 && us <= most, "{seen}");
        // Two places are printed.
        assert!((algorithm - BYTES as f64 / us / 1e3).abs() < 0.006, "{seen}");
        assert!((bus - BYTES as f64 / us / 1e3 * factor).abs() < 0.006, "{seen}");
    }
}
