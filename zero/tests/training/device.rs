//! Training on a device, emulated on the processor: the same bits on every stage, with everything that no event orders
//! in any order, with the optimizer's state here or there; losses as on the host; memory as planned.

use crate::run::{Ran, Run, emulator, train};
use crate::toy::{Over, Toy};
use collectives::device::SharedQueue;
use collectives::{Communicator, Float, bf16};
use models::{LlamaConfig, Recompute};
use zero::{Config, Ledger, Placement, Stage, Trainer};

pub fn tiny() -> LlamaConfig {
    LlamaConfig {
        hidden: 32,
        layers: 2,
        heads: 2,
        kv_heads: 1,
        head_dim: 16,
        ffn: 40,
        vocab: 41,
        context: 32,
        tied: false,
        ..LlamaConfig::preset("nano").unwrap()
    }
}

pub fn a_run(world: usize, stage: u8, accumulate: usize, placement: Placement) -> Run {
    let zero = Config {
        stage: Stage::try_from(stage).unwrap(),
        bucket_bytes: 16 << 10,
        accumulate,
        reproducible: true,
        placement,
        clip: Some(0.7),
        ..Config::default()
    };
    Run {
        world,
        over: Over::Threads,
        zero,
        model: tiny(),
        rows: 2,
        length: 7,
        recompute: Recompute::None,
        threads: 1,
        steps: 3,
        from: None,
        keep: false,
        // The losses of few batches are too far apart to be compared where some are shorter.
        ragged: world > 1 || accumulate > 2,
        lr: 1e-2,
        wire: false,
        late: None,
    }
}

/// What is held, is what was predicted, and the arena is full.
fn check_memory(ran: &Ran, what: &str) {
    assert_eq!(ran.held, ran.predicted, "{what}");
    let (used, reserved) = ran.arena.expect("an arena");
    // A group of one takes a word only if it has to widen.
    assert!(used <= reserved && reserved - used <= 256, "{what}: {used} of {reserved} bytes");
}

/// What every stage and placement gives, unless there is no emulation.
fn stages<T: Float>(world: usize, accumulate: usize) -> Option<Ran> {
    emulator()?;
    let mut expected: Option<Ran> = None;
    for stage in 0..4 {
        let seed = 10 * world as u64 + u64::from(stage);
        let runs = [
            (Placement::Device, None),
            (Placement::Device, Some(seed)),
            (Placement::Offloaded, Some(seed + 100)),
            (Placement::Offloaded, None),
        ];
        // Every stage on a device and offloaded, in one order or another, over a wire and through the host.
        for (which, (placement, late)) in
            [runs[stage as usize % 2], runs[2 + stage as usize / 2]].into_iter().enumerate()
        {
            let wire = (usize::from(stage) + which) % 2 == 0;
            let run = Run { late, wire, ..a_run(world, stage, accumulate, placement) };
            let what = format!("{world} ranks, stage {stage}, {placement:?}, wire {wire}, late {late:?}");
            for ran in train::<T>(&run) {
                check_memory(&ran, &what);
                match &expected {
                    None => expected = Some(ran),
                    Some(expected) => assert!(expected.bits() == ran.bits(), "{what}: other bits"),
                }
            }
        }
    }
    let losses = &expected.as_ref().unwrap().losses;
    assert!(losses.iter().all(|l| l.is_finite()) && losses[2] < losses[0], "{losses:?}");
    expected
}

#[test]
fn one_rank() {
    stages::<f32>(1, 1);
    stages::<bf16>(1, 2);
}

#[test]
fn two_ranks() {
    stages::<bf16>(2, 1);
    // As many micro-batches on one.
    let (two, one) = (stages::<f32>(2, 2), stages::<f32>(1, 4));
    assert!(two.as_ref().map(Ran::bits) == one.as_ref().map(Ran::bits), "other bits on one rank");
}

#[test]
fn three_ranks() {
    stages::<bf16>(3, 2);
}

/// The measure for a GPU, here for the emulation: 20 steps, each loss within 1e-2 of the CPU's.
#[test]
fn twenty_losses_are_those_of_the_host() {
    if emulator().is_none() {
        return;
    }
    let nano = LlamaConfig::preset("nano").unwrap();
    let of = |placement, steps| {
        let run = a_run(1, 0, 1, placement);
        Run { model: nano.clone(), rows: 2, length: 24, steps, lr: 1e-3, recompute: Recompute::Full, ..run }
    };
    let host = train::<bf16>(&of(Placement::Host, 20)).remove(0);
    let device = train::<bf16>(&of(Placement::Device, 20)).remove(0);
    for (step, (a, b)) in device.losses.iter().zip(&host.losses).enumerate() {
        assert!((a - b).abs() < 1e-2, "step {step}: loss {a}, on the host {b}");
    }
    assert!(host.losses[19] < host.losses[0] - 0.1, "{:?}", host.losses);
}

#[test]
fn a_placement_on_the_host_or_a_communicator_of_the_host_is_refused() {
    let Some(emulator) = emulator() else { return };
    let queue = SharedQueue::new(emulator.queue(0));
    for (placement, words) in [
        (Placement::Host, "Host for a trainer on a device: Device or Offloaded,"),
        (
            Placement::Device,
            "a communicator without a carrier for a device's memory for a trainer on a device",
        ),
    ] {
        let (comm, toy) = (Communicator::threads(1).remove(0), Box::new(Toy::new(1, false)));
        let config = Config { placement, ..Config::default() };
        let source = &mut |_: &_, _, _: &mut [f32]| Ok(());
        let made = Trainer::<f32>::on_device(&queue, 1, toy, comm, &config, Ledger::default(), source);
        let text = made.err().unwrap().to_string();
        assert!(text.contains(words), "{text}");
    }
}
