//! The same bits on every stage, transport, bucketing, prefetching and rank; memory and traffic as planned.

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
