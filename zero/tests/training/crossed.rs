//! Settings that may not change a bit, crossed with those that do: any three of them meet in some run at each number of ranks,
//! and each run is compared with the plainest of the same numbers.

use crate::device::{a_run, tiny};
use crate::run::{Ran, Run, train};
use crate::toy::Over;
use collectives::{DType, bf16, f16};
use models::{LlamaConfig, Recompute};
use std::collections::{BTreeSet, HashMap};
use zero::{Config, Home, Placement, Plan, Scaling, Stage};

/// Rows that choose one of `choices[i]` in place i, such that any three places have every three choices in some row.
fn covering(choices: &[usize]) -> Vec<Vec<usize>> {
    let mut missing = BTreeSet::new();
    let pairs = |c: usize| (0..c).flat_map(move |b| (0..b).map(move |a| (a, b, c)));
    for (a, b, c) in (0..choices.len()).flat_map(pairs) {
        for number in 0..choices[a] * choices[b] * choices[c] {
            let (rest, of_a) = (number / choices[a], number % choices[a]);
            missing.insert([(a, of_a), (b, rest % choices[b]), (c, rest / choices[b])]);
        }
    }
    let mut rows = Vec::new();
    while let Some(first) = missing.first() {
        let mut row = vec![None; choices.len()];
        first.iter().for_each(|&(place, choice)| row[place] = Some(choice));
        for place in 0..choices.len() {
            let brought = |choice| {
                let chosen =
                    |&(p, c): &(usize, usize)| if p == place { c == choice } else { row[p] == Some(c) };
                missing.iter().filter(|three| three.iter().all(chosen)).count()
            };
            if row[place].is_none() {
                row[place] = (0..choices[place]).max_by_key(|&choice| brought(choice));
            }
        }
        missing.retain(|three| !three.iter().all(|&(place, choice)| row[place] == Some(choice)));
        rows.push(row.into_iter().flatten().collect());
    }
    rows
}

const ACCUMULATE: [usize; 3] = [1, 2, 3];
/// No limit, one that no gradient reaches, and one that all exceed.
const CLIP: [Option<f32>; 3] = [None, Some(f32::MAX), Some(0.1)];
/// Every tensor alone, some together, and all of a unit.
const BUCKET_BYTES: [usize; 3] = [1, 12 << 10, usize::MAX];

fn check(world: usize) {
    // By what numbers depend on.
    let mut plainest: HashMap<_, Ran> = HashMap::new();
    for row in covering(&[3, 3, 2, 3, 4, 2, 3, 2, 2, 2]) {
        let [number, accumulate, tied, clip, stage, prefetch, bucket, over, recompute, more] = row[..] else {
            unreachable!("a choice for each")
        };
        let (dtype, scaling, train) = [
            (DType::Bf16, None, train::<bf16> as fn(&Run) -> _),
            (DType::F32, None, train::<f32>),
            (DType::F16, Some(Scaling::default()), train::<f16>),
        ][number];
        let (clip, clipped) = (CLIP[clip], clip == 2);
        let config = Config {
            stage: Stage::ALL[0],
            accumulate: ACCUMULATE[accumulate],
            scaling,
            clip: CLIP[if clipped { 2 } else { 1 }],
            ..Config::default()
        };
        let plain = Run {
            model: LlamaConfig { layers: 5, tied: tied == 1, ..tiny() },
            zero: config.clone(),
            ragged: true,
            ..a_run(world, 0, 1, Placement::Host)
        };
        let run = Run {
            over: [Over::Threads, Over::Shm][over],
            zero: Config {
                stage: Stage::ALL[stage],
                clip,
                prefetch: prefetch == 1,
                bucket_bytes: BUCKET_BYTES[bucket],
                ..config
            },
            recompute: [Recompute::None, Recompute::Full][recompute],
            threads: 1 + more,
            ..plain.clone()
        };
        let Run { over, recompute, threads, zero, model, .. } = &run;
        let tied = model.tied;
        let what = format!(
            "{world} ranks over {over:?}, {dtype}, tied {tied}, {recompute:?}, {threads} threads, {zero:?}"
        );
        if world > 1 && zero.stage.shards_parameters {
            let plan = Plan::new(&model.units(), dtype, zero, 0, world);
            assert!(plan.weights.iter().all(|home| *home != Home::Whole), "{what} gathers not all");
        }
        let numbers = (number, accumulate, tied, clipped);
        let expected = plainest.entry(numbers).or_insert_with(|| train(&plain).remove(0));
        for ran in train(&run) {
            assert_eq!(ran.held, ran.predicted, "{what}");
            assert!(ran.bits() == expected.bits(), "{what}: other bits than of the plainest");
        }
    }
    for (&(number, accumulate, tied, clipped), Ran { losses, weights, .. }) in &plainest {
        assert!(losses.iter().all(|loss| loss.is_finite()), "{losses:?}");
        if let Some(other) = plainest.get(&(number, accumulate, tied, !clipped)) {
            assert!(*weights != other.weights, "no gradient is clipped");
        }
    }
}

#[test]
fn one_rank() {
    check(1);
}

#[test]
fn two_ranks() {
    check(2);
}

#[test]
fn three_ranks() {
    check(3);
}

#[test]
fn four_ranks() {
    check(4);
}
