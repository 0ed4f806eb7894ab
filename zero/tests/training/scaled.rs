//! Scales of the loss: the same steps are skipped everywhere, a power of two changes no bit, and f16 learns as f32 does.

use crate::device::a_run;
use crate::resumed::State;
use crate::run::{Ran, Run, emulator, train};
use crate::toy::{Numbers, Over, Toy, noise};
use collectives::{Communicator, Float, Options, bf16, f16};
use models::{Recompute, TensorSpec};
use std::ops::Range;
use std::sync::Arc;
use zero::{Config, Ledger, Placement, Scaling, Stage, Trainer};

/// So large a first scale that some steps come to nothing, and so short a window that it grows again within a few.
const RESTLESS: Scaling =
    Scaling { initial: (1u64 << 22) as f32, least: 1.0, window: 2, hysteresis: 1, consecutive: false };

fn with(scaling: Option<Scaling>, run: Run) -> Run {
    Run { zero: Config { scaling, ..run.zero }, ..run }
}

/// Which steps were skipped.
fn skipped(ran: &Ran) -> Vec<bool> {
    ran.norms.iter().map(|&norm| !f64::from_bits(norm).is_finite()).collect()
}

/// Steps that are, among others that are not.
fn some(skipped: &[bool]) -> bool {
    skipped.contains(&true) && skipped.contains(&false)
}

#[test]
fn every_stage_skips_the_same_steps_and_has_the_same_bits() {
    for (world, accumulate) in [(1, 4), (2, 2), (4, 1), (3, 2)] {
        let mut expected: Option<Ran> = None;
        for stage in 0..4 {
            for (over, recompute, prefetch, bucket_bytes) in
                [(Over::Threads, Recompute::None, true, 1 << 30), (Over::Shm, Recompute::Full, false, 4096)]
            {
                let usual = a_run(world, stage, accumulate, Placement::Host);
                let zero = Config { scaling: Some(RESTLESS), prefetch, bucket_bytes, ..usual.zero };
                let run = Run { steps: 12, over, recompute, zero, ..usual };
                for ran in train::<f16>(&run) {
                    let what = format!("{world} ranks over {over:?}, stage {stage}");
                    assert_eq!(ran.held, ran.predicted, "{what}");
                    match &expected {
                        None => expected = Some(ran),
                        Some(expected) => assert!(ran.bits() == expected.bits(), "{what}"),
                    }
                }
            }
        }
        let skipped = skipped(&expected.unwrap());
        assert!(some(&skipped), "{world} ranks: {skipped:?}");
    }
}

/// As without one, where nothing is too large or too small.
#[test]
fn a_power_of_two_changes_no_bit() {
    fn check<T: Float>(placement: Placement, worlds: &[usize]) {
        for &world in worlds {
            let run = a_run(world, world as u8, 2, placement);
            let plain = train::<T>(&with(None, run.clone())).remove(0);
            let scaled = train::<T>(&with(Some(Scaling::fixed(1024.0)), run)).remove(0);
            assert!(plain.bits() == scaled.bits(), "{} on {world} ranks, {placement:?}", T::DTYPE);
        }
    }
    check::<f32>(Placement::Host, &[1, 3]);
    check::<bf16>(Placement::Host, &[2]);
    if emulator().is_some() {
        check::<bf16>(Placement::Device, &[1, 2]);
    }
}

#[test]
fn devices_skip_what_other_stages_and_places_of_the_state_do() {
    if emulator().is_none() {
        return;
    }
    let mut expected: Option<Ran> = None;
    for (world, stage, accumulate, placement) in [
        (1, 0, 2, Placement::Device),
        (2, 3, 1, Placement::Device),
        (2, 1, 1, Placement::Offloaded),
        (1, 2, 2, Placement::Offloaded),
    ] {
        let usual = Run { ragged: false, ..a_run(world, stage, accumulate, placement) };
        for ran in train::<f16>(&with(Some(RESTLESS), Run { steps: 8, ..usual })) {
            assert_eq!(ran.held, ran.predicted, "{world} devices, stage {stage}, {placement:?}");
            match &expected {
                None => expected = Some(ran),
                Some(expected) => {
                    assert!(ran.bits() == expected.bits(), "{world} devices, stage {stage}, {placement:?}");
                }
            }
        }
    }
    let skipped = skipped(&expected.unwrap());
    assert!(some(&skipped), "{skipped:?}");
}

#[test]
fn f16_learns_as_f32_does_and_more_closely_than_bf16() {
    let run = Run { steps: 30, lr: 2e-3, ..a_run(1, 0, 2, Placement::Host) };
    let losses =
        [train::<f32>(&run), train::<f16>(&with(Some(Scaling::default()), run.clone())), train::<bf16>(&run)];
    let [exact, f16, bf16] = losses.map(|mut ran| ran.remove(0).losses);
    assert!(exact[29] < exact[0] - 0.3, "{exact:?}");
    let far = |other: &[f64]| exact.iter().zip(other).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(far(&f16) < 1e-2 && far(&f16) < far(&bf16), "f16 {:.1e}, bf16 {:.1e}", far(&f16), far(&bf16));
}

/// A scale that has gone down and up is part of what goes on.
#[test]
fn a_scaled_training_goes_on_with_the_same_bits() {
    let of = |world: usize, stage, steps, from: Option<&Arc<State>>| {
        let usual = a_run(world, stage, 4 / world, Placement::Host);
        let run = Run { steps, from: from.cloned(), keep: true, ragged: false, ..usual };
        train::<f16>(&with(Some(RESTLESS), run)).remove(0)
    };
    let straight = of(1, 0, 12, None);
    let skips = skipped(&straight);
    assert!(some(&skips[..6]) && some(&skips[6..]), "{skips:?}");
    for (split, [first, next]) in [(1, [1, 2]), (3, [2, 4]), (6, [4, 1]), (9, [1, 4])] {
        let half = Arc::new(of(first, 3, split, None).state.unwrap());
        let resumed = of(next, 2, 12, Some(&half));
        let what = format!("{first} ranks, and {next} after {split} steps");
        let (losses, norms, evaluation, weights) = straight.bits();
        let expected = (losses[split..].to_vec(), &norms[split..], evaluation, weights);
        assert!(resumed.bits() == expected, "{what}: other bits");
        assert_eq!(resumed.state.unwrap().standing, straight.state.as_ref().unwrap().standing, "{what}");
    }
}

/// A toy on these ranks, with a scale of the loss.
fn toy<R: Send>(
    world: usize,
    stage: u8,
    scaling: Option<Scaling>,
    each: impl Fn(&mut Trainer<f16>, usize) -> R + Sync,
) -> Vec<R> {
    Communicator::on_threads(world, Options::default(), |comm| {
        let rank = comm.rank();
        let mut source = |spec: &TensorSpec, range: Range<usize>, out: &mut [f32]| {
            range.zip(out).for_each(|(i, x)| *x = noise(spec.name.len() as u32, 9, 9, i));
            Ok(())
        };
        let config = Config { stage: Stage::try_from(stage).unwrap(), scaling, ..Config::default() };
        let toy = Box::new(Toy::of_vocabulary(701, 2, false));
        let mut trainer = Trainer::new(toy, comm, &config, Ledger::default(), &mut source).unwrap();
        each(&mut trainer, rank)
    })
}

#[test]
fn a_skipped_step_changes_nothing_but_the_scale() {
    let scaling = Scaling { initial: f32::powi(2.0, 40), hysteresis: 2, ..Scaling::default() };
    for stage in 0..4 {
        toy(2, stage, Some(scaling), |trainer, rank| {
            let before = State::of(trainer);
            let weights = crate::weights(trainer);
            let scales = [40, 40, 39].map(|power| f64::powi(2.0, power));
            for (step, scale) in scales.into_iter().enumerate() {
                let done = trainer.step(&mut Numbers::new(step, rank, 2, 1), 0.01).unwrap();
                assert!(done.skipped && done.loss.is_finite() && !done.grad_norm.is_finite(), "{done:?}");
                assert_eq!(done.loss_scale, scale, "step {step}");
            }
            assert!(crate::weights(trainer) == weights, "weights at stage {stage}");
            let after = State::of(trainer);
            assert!(after.bits().1 == before.bits().1, "state at stage {stage}");
            assert_eq!((after.standing.steps, after.standing.skipped, after.standing.updates()), (3, 3, 0));
        });
    }
}

/// Of the first update, not of the first step: that is what the means of gradients are corrected for.
#[test]
fn updates_are_counted_without_the_steps_that_were_skipped() {
    let run = |scaling, first: usize, steps: usize| {
        toy(2, 1, Some(scaling), |trainer, rank| {
            let mut skipped = 0;
            for _ in first..first + steps {
                let number = trainer.standing().updates() as usize;
                let done = trainer.step(&mut Numbers::new(number, rank, 2, 1), 0.01).unwrap();
                skipped += usize::from(done.skipped);
            }
            (skipped, State::of(trainer).bits().1.map(|kept| kept.len()), crate::weights(trainer))
        })
        .remove(0)
    };
    let (none, _, expected) = run(Scaling::fixed(16.0), 0, 3);
    let high = Scaling { initial: f32::powi(2.0, 20), hysteresis: 1, ..Scaling::default() };
    let (some, ..) = run(high, 0, 1);
    assert_eq!((none, some), (0, 1));
    // How many it takes until a scale does.
    let (steps, (skipped, _, weights)) =
        (4..40).map(|steps| (steps, run(high, 0, steps))).find(|(steps, ran)| steps - ran.0 == 3).unwrap();
    assert_eq!(steps, skipped + 3);
    // 16 is a power of two, too, and so is what was found.
    assert!(weights == expected, "after {skipped} skipped steps");
}

#[test]
fn a_training_ends_where_no_smaller_scale_is_left_with_the_weights_before() {
    let high = f32::powi(2.0, 40);
    for (scaling, steps) in [
        (Scaling { initial: high, least: high / 4.0, hysteresis: 1, ..Scaling::default() }, 2),
        (Scaling::fixed(high), 1),
    ] {
        toy(2, 3, Some(scaling), |trainer, rank| {
            let weights = crate::weights(trainer);
            let mut said = None;
            for step in 0..=steps {
                assert!(said.is_none(), "{said:?} before step {step}");
                said = trainer.step(&mut Numbers::new(step, rank, 2, 1), 0.01).err().map(|e| e.to_string());
            }
            let words = [
                format!("step {}: the global gradient norm is ", steps + 1),
                format!(" with a loss scale of {}, below which none is left", f64::from(scaling.least)),
            ];
            let said = said.unwrap();
            assert!(said.starts_with(&words[0]) && said.contains(&words[1]), "{said}");
            assert_eq!(trainer.standing().steps, steps as u64);
            assert!(crate::weights(trainer) == weights);
        });
    }
    // Without one it is as ever.
    toy(1, 0, None, |trainer, rank| {
        let done = trainer.step(&mut Numbers::new(0, rank, 1, 1), 0.01).unwrap();
        assert_eq!((done.loss_scale, done.skipped), (1.0, false));
    });
}

#[test]
fn ranks_that_are_to_go_on_with_other_scales_are_refused() {
    for stage in [0, 3] {
        let said = toy(2, stage, Some(Scaling::default()), |trainer, rank| {
            let mut standing = trainer.standing();
            standing.scale.as_mut().unwrap().since = rank as u32;
            let zeros = &mut |_, _: &TensorSpec, _, out: &mut [f32]| {
                out.fill(0.0);
                Ok(())
            };
            trainer.restore(standing, zeros).unwrap_err().to_string()
        });
        let expected = "rank 1 cannot go on from the state that was kept: it has skipped other steps than rank 0, or has another \
                        loss scale";
        assert_eq!(said, [expected; 2], "stage {stage}");
    }
}
