//! The benchmark's bus bandwidth beside a measurement that shares nothing with it: a loop of calls of the library,
//! timed here from the first to the last, with nccl-tests' definitions written out once more. An emulated link makes
//! calls long enough for both to find the same.

use collectives::transport::emulated::Emulated;
use collectives::transport::{Nodes, threads};
use collectives::{Communicator, Options, ReduceOp};
use harness::Bench;
use std::time::Instant;

const RANKS: usize = 2;
const LINK: &str = "latency=20us,bandwidth=50MB/s";
const BYTES: usize = 1 << 20;
const CALLS: u32 = 6;

/// Seconds a call of `operation` takes here, on the mean of `CALLS` in a row.
fn seconds(operation: &str) -> f64 {
    let floats = BYTES / 4;
    let rank = |transport: threads::Threads| {
        let nodes = Nodes::apart(RANKS);
        let link = LINK.parse().expect("a link");
        let transport = Emulated::new("slow", Box::new(transport), link, nodes).expect("a transport");
        let comm = Communicator::new(Box::new(transport), Options::default()).expect("a communicator");
        let (all, own) = (vec![1f32; floats], vec![1f32; floats / RANKS]);
        let (mut all_out, mut own_out) = (all.clone(), own.clone());
        let mut call = || match operation {
            "all_reduce" => comm.all_reduce(&all[..], &mut all_out[..], ReduceOp::Sum),
            "reduce_scatter" => comm.reduce_scatter(&all[..], &mut own_out[..], ReduceOp::Sum),
            "all_gather" => comm.all_gather(&own[..], &mut all_out[..]),
            _ => comm.all_to_all(&all[..], &mut all_out[..]),
        };
        call().expect("works");
        let start = Instant::now();
        (0..CALLS).for_each(|_| call().expect("works"));
        start.elapsed().as_secs_f64() / f64::from(CALLS)
    };
    std::thread::scope(|scope| {
        let ranks: Vec<_> = threads::group(RANKS).into_iter().map(|t| scope.spawn(move || rank(t))).collect();
        let times: Vec<f64> = ranks.into_iter().map(|r| r.join().expect("a rank")).collect();
        times.iter().sum::<f64>() / times.len() as f64
    })
}

/// The seventh and eighth number of the table's only row: time and bandwidths of the out-of-place half follow the six
/// labels.
fn printed(operation: &str) -> f64 {
    let line = format!(
        "bench {operation} -b {BYTES} -e {BYTES} -n {CALLS} -w 1 -c 0 --ranks {RANKS} --transport threads \
         --emulate-link {LINK}"
    );
    let outcome = Bench::new(env!("CARGO_BIN_EXE_caravan")).run(&line).success();
    let row = outcome.stdout.lines().find(|l| !l.starts_with('#') && !l.trim().is_empty()).expect("a row");
    row.split_whitespace().nth(7).expect("a bus bandwidth").parse().expect("a number")
}

#[test]
fn bus_bandwidths_agree_with_a_measurement_of_the_tests_own() {
    let n = RANKS as f64;
    for (operation, factor) in [
        ("all_reduce", 2.0 * (n - 1.0) / n),
        ("reduce_scatter", (n - 1.0) / n),
        ("all_gather", (n - 1.0) / n),
        ("all_to_all", (n - 1.0) / n),
    ] {
        // Whatever else the machine does lengthens one measurement or the other, now and then.
        let mut seen = Vec::new();
        let agrees = (0..8).any(|_| {
            let (theirs, own) = (printed(operation), BYTES as f64 / 1e9 / seconds(operation) * factor);
            seen.push((theirs, own));
            (theirs / own - 1.0).abs() < 0.1
        });
        assert!(agrees, "{operation}: {seen:?} GB/s, printed and measured here");
    }
}
