//! The same bits on every stage, transport, bucketing, prefetching, rank and, where that is asked for, number of ranks;
//! memory and traffic as planned.

use crate::toy::{Over, Ran, Trace, run};
use collectives::{Float, bf16};
use zero::{AdamW, Config, Stage};

fn config(stage: u8, bucket_bytes: usize, prefetch: bool, accumulate: usize) -> Config {
    Config {
        stage: Stage::try_from(stage).unwrap(),
        bucket_bytes,
        prefetch,
        accumulate,
        adamw: AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1 },
        clip: Some(0.5),
        ..Config::default()
    }
}

fn check<T: Float>(world: usize, tied: bool, accumulate: usize) {
    let mut expected: Option<Trace> = None;
    let mut totals = [0; 4];
    for stage in 0..4 {
        for (bucket_bytes, prefetch, over) in [
            (1 << 30, true, Over::Threads),
            (1 << 30, true, Over::Shm),
            (4096, true, Over::Shm),
            (9000, false, Over::Threads),
            (9000, false, Over::Shm),
        ] {
            let config = config(stage, bucket_bytes, prefetch, accumulate);
            let what = format!("{world} ranks over {over:?}, tied {tied}, {config:?}");
            let ran = run::<T>(over, world, &config, 3, tied, 4);
            for Ran { trace, held, predicted, steps, planned_bytes } in ran {
                assert_eq!(held, predicted, "{what}");
                for step in &steps {
                    assert_eq!(step.bytes_sent, planned_bytes, "{what}");
                }
                if bucket_bytes == 1 << 30 {
                    totals[stage as usize] = held.total();
                }
                match &expected {
                    None => expected = Some(trace),
                    Some(expected) => assert!(*expected == trace, "{what} differs from stage 0"),
                }
            }
        }
    }
    assert!(totals.is_sorted_by(|a, b| a >= b), "a higher stage holds more: {totals:?} at {world} ranks");
    let losses: Vec<f64> = expected.unwrap().losses.iter().map(|&b| f64::from_bits(b)).collect();
    assert!(losses.iter().all(|l| l.is_finite()) && losses[3] < losses[0], "{losses:?}");
}

#[test]
fn one_rank() {
    check::<f32>(1, false, 1);
    check::<bf16>(1, true, 2);
}

#[test]
fn two_ranks() {
    check::<f32>(2, true, 1);
    check::<bf16>(2, false, 1);
    check::<bf16>(2, true, 3);
}

#[test]
fn three_ranks() {
    check::<f32>(3, false, 2);
    check::<bf16>(3, true, 1);
}

#[test]
fn four_ranks() {
    check::<f32>(4, true, 2);
    check::<bf16>(4, false, 3);
}

/// As many micro-batches of all ranks together, whose sums round otherwise in most orders.
#[test]
fn any_power_of_two_of_ranks_gives_the_same_bits_where_a_run_is_reproducible() {
    fn traces<T: Float>(micro_batches: usize, reproducible: bool) -> Vec<Trace> {
        let worlds = [1, 2, 4, 8].into_iter().filter(|world| micro_batches.is_multiple_of(*world));
        let divisions = worlds.flat_map(|world| (0..4).map(move |stage| (world, stage)));
        let run = |(world, stage): (usize, u8)| {
            let usual = config(stage, 9000, stage % 2 == 1, micro_batches / world);
            let config = Config { reproducible, ..usual };
            let ran = run::<T>(Over::Threads, world, &config, 2, true, 3);
            ran.into_iter().map(move |Ran { trace, held, predicted, .. }| {
                assert_eq!(held, predicted, "{world} ranks, {config:?}");
                trace
            })
        };
        divisions.flat_map(run).collect()
    }
    fn differ(traces: &[Trace]) -> usize {
        traces.iter().filter(|&trace| *trace != traces[0]).count()
    }
    for micro_batches in [8, 12, 24] {
        assert_eq!(differ(&traces::<f32>(micro_batches, true)), 0, "{micro_batches} in f32");
        assert_eq!(differ(&traces::<bf16>(micro_batches, true)), 0, "{micro_batches} in bf16");
    }
    assert_ne!(differ(&traces::<f32>(8, false)), 0, "the order of additions makes no difference here");
}
