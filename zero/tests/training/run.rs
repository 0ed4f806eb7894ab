//! A Llama on ranks that each have an emulated device, or none.

use crate::resumed::State;
use crate::toy::Over;
use collectives::device::emulation::{EmulatedQueue, EmulatedWire, Emulator};
use collectives::device::{Arena, Queue, SharedQueue};
use collectives::{Alone, Carrier, Communicator, Float, Order, Staged, Wired, staged_bytes, wired_bytes};
use models::{Batch, Llama, LlamaConfig, Recompute, TensorSpec};
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Instant;
use zero::{Batches, Config, Kept, Ledger, Memory, NoBatch, Placement, Trainer};

/// Kernels on the processor; `None`, with the reason among the skips, where there is no C++ compiler.
pub fn emulator() -> Option<&'static Emulator> {
    static EMULATOR: OnceLock<Option<Emulator>> = OnceLock::new();
    let build = || {
        let built = Emulator::build(&[], Path::new(env!("CARGO_TARGET_TMPDIR"))).expect("builds");
        harness::made_by_cxx("training on an emulated device", built)
    };
    EMULATOR.get_or_init(build).as_ref()
}

/// Scratch memory of a carrier over a wire.
const SCRATCH: usize = 1 << 16;

/// A run.
#[derive(Clone)]
pub struct Run {
    pub world: usize,
    pub over: Over,
    pub zero: Config,
    pub model: LlamaConfig,
    pub rows: usize,
    pub length: usize,
    pub recompute: Recompute,
    /// That compute the model, where it is on the host.
    pub threads: usize,
    pub steps: usize,
    /// Where it goes on, if not at the start: `steps` counts those before.
    pub from: Option<Arc<State>>,
    /// Whether its state is wanted.
    pub keep: bool,
    /// Whether the last but one of them is of a shorter batch.
    pub ragged: bool,
    pub lr: f32,
    /// Whether devices are joined by a wire, as by NCCL, instead of through the host.
    pub wire: bool,
    /// The order in which devices run what nothing orders, or none to run everything at once.
    pub late: Option<u64>,
}

/// What came out of it.
pub struct Ran {
    pub losses: Vec<f64>,
    pub norms: Vec<u64>,
    pub evaluation: Vec<u32>,
    pub weights: Vec<u32>,
    /// Of rank 0.
    pub state: Option<State>,
    pub held: Memory,
    pub predicted: Memory,
    /// What was reserved on the device, and what of it was taken.
    pub arena: Option<(usize, usize)>,
}

impl Ran {
    /// What must not depend on stages, placement and order.
    pub fn bits(&self) -> (Vec<u64>, &[u64], &[u32], &[u32]) {
        let losses = self.losses.iter().map(|loss| loss.to_bits()).collect();
        (losses, &self.norms, &self.evaluation, &self.weights)
    }
}

/// Tokens that look like a language: each follows from the last, mostly.
struct Tokens {
    rows: usize,
    length: usize,
    vocab: u32,
    rank: usize,
    world: usize,
    step: usize,
    accumulate: usize,
    tokens: Vec<u32>,
    targets: Vec<u32>,
}

impl Batches for Tokens {
    fn micro_batch(&mut self, index: usize) -> Result<Batch<'_>, NoBatch> {
        let number = (self.step * self.accumulate + index) * self.world + self.rank;
        let mut state = (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut last = number as u32 % self.vocab;
        for (token, target) in self.tokens.iter_mut().zip(&mut self.targets) {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let next = if state >> 61 == 0 { (state >> 33) as u32 } else { last * 3 + 1 } % self.vocab;
            (*token, *target, last) = (last, next, next);
        }
        let (rows, length, n) = (self.rows, self.length, self.rows * self.length);
        Ok(Batch { tokens: &self.tokens[..n], targets: &self.targets[..n], rows, length })
    }
}

/// Trains on threads.
pub fn train<T: Float>(run: &Run) -> Vec<Ran> {
    std::thread::scope(|scope| {
        let ranks = run.over.ranks(run.world).into_iter().zip(EmulatedWire::group(run.world));
        let handles: Vec<_> =
            ranks.map(|(comm, wire)| scope.spawn(move || rank::<T>(run, comm(), wire))).collect();
        handles.into_iter().map(|h| h.join().unwrap()).collect()
    })
}

fn rank<T: Float>(run: &Run, comm: Communicator, wire: EmulatedWire) -> Ran {
    let (rank, world) = (comm.rank(), comm.size());
    let ledger = Ledger::default();
    let mut source = |spec: &TensorSpec, range: std::ops::Range<usize>, out: &mut [f32]| {
        match &run.from {
            Some(from) => from.give(Kept::Weights, spec, range, out),
            None => models::init_range(spec, 7, range, out),
        }
        Ok(())
    };
    let mut queue = None;
    let mut trainer = match run.zero.placement {
        Placement::Host => {
            let Run { model, rows, length, recompute, threads, .. } = run;
            let model = Llama::<T>::new(model, *rows, *length, *recompute, *threads, &ledger.of_model());
            Trainer::new(Box::new(model.unwrap()), comm, &run.zero, ledger, &mut source).unwrap()
        }
        _ => {
            let shared = SharedQueue::new(queue_of(run, rank));
            let (needed, largest) = arena::<T>(run, rank);
            shared.reserve(needed).unwrap();
            let carrier: Arc<dyn Carrier> = match world {
                1 => Arc::new(Alone::new(&comm, shared.clone()).unwrap()),
                _ if run.wire => {
                    let compute = shared.clone();
                    let account = &ledger.workspace;
                    let (order, limit) = (Order::Canonical, Some(SCRATCH));
                    Arc::new(Wired::planned(&comm, compute, wire, order, limit, account).unwrap())
                }
                _ => Arc::new(Staged::planned(&comm, shared.clone(), largest, &ledger.host).unwrap()),
            };
            let comm = comm.with_carrier(carrier);
            let accounts = ledger.of_model();
            let made = Llama::<T, _>::on_device(
                Default::default(),
                &run.model,
                run.rows,
                run.length,
                run.recompute,
                shared.clone(),
                &accounts,
            );
            let model = Box::new(made.unwrap());
            queue = Some(shared.clone());
            Trainer::on_device(&shared, 2, model, comm, &run.zero, ledger, &mut source).unwrap()
        }
    };
    let first = run.from.as_ref().map_or(0, |from| {
        from.restore(&mut trainer);
        from.standing.steps as usize
    });
    let n = run.rows * run.length;
    let mut tokens = Tokens {
        rows: run.rows,
        length: run.length,
        vocab: run.model.vocab as u32,
        rank,
        world,
        step: 0,
        accumulate: run.zero.accumulate,
        tokens: vec![0; n],
        targets: vec![0; n],
    };
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    let (mut timed, start) = (0.0, Instant::now());
    for step in first..run.steps {
        tokens.step = step;
        let short = run.ragged && step + 2 == run.steps;
        (tokens.rows, tokens.length) = if short { (1, run.length - 2) } else { (run.rows, run.length) };
        let done = trainer.step(&mut tokens, run.lr).unwrap();
        let published = if done.skipped { crate::published_bytes(trainer.plan()) } else { 0 };
        assert_eq!(done.bytes_sent, crate::step_bytes(trainer.plan()) - published);
        if run.zero.placement.on_device() {
            // Between events of the device, whose intervals do not overlap.
            let parts = [done.compute_seconds, done.exposed_communication_seconds, done.optimizer_seconds];
            assert!(parts[0] > 0.0 && parts.iter().all(|&part| part >= 0.0), "{parts:?}");
            assert!(step == first || parts[2] > 0.0, "the last step's update is in {parts:?}");
            timed += parts.iter().sum::<f64>();
            assert!(timed <= start.elapsed().as_secs_f64(), "{timed} s in less time");
        }
        losses.push(done.loss);
        norms.push(done.grad_norm.to_bits());
    }
    (tokens.step, tokens.rank) = (run.steps, 0);
    let evaluation = trainer
        .evaluate(Some(&tokens.micro_batch(0).unwrap()))
        .unwrap()
        .iter()
        .map(|l| l.to_bits())
        .collect();
    let weights = crate::weights(&mut trainer);
    let state = run.keep.then(|| State::of(&mut trainer));
    let mut predicted = zero::memory::predict(trainer.plan(), footprint::<T>(run)).with_engine(
        trainer.plan(),
        &trainer.comm().group(),
        run.wire,
    );
    match (world > 1 && run.zero.placement.on_device(), run.wire) {
        (true, true) => predicted.workspace += wired_bytes(world, Some(SCRATCH)).iter().sum::<usize>(),
        (true, false) => predicted.host += staged_bytes(zero::memory::largest_call(trainer.plan())),
        (false, _) => {}
    }
    let held = trainer.ledger().held();
    let arena = queue.as_ref().and_then(SharedQueue::reserved);
    if let Some(queue) = &mut queue {
        queue.synchronize().unwrap();
    }
    Ran { losses, norms, evaluation, weights, state, held, predicted, arena }
}

fn queue_of(run: &Run, rank: usize) -> EmulatedQueue {
    let emulator = emulator().expect("asked before");
    match run.late {
        Some(seed) => emulator.late_queue(seed + rank as u64),
        None => emulator.queue(0),
    }
}

fn footprint<T: Float>(run: &Run) -> models::Footprint {
    let Run { model, rows, length, recompute, threads, .. } = run;
    match run.zero.placement {
        Placement::Host => models::footprint(model, *rows, *length, T::DTYPE, *recompute, *threads).unwrap(),
        _ => models::device_footprint(model, *rows, *length, T::DTYPE, *recompute).unwrap(),
    }
}

/// Bytes of the arena, and of the largest call through the host.
fn arena<T: Float>(run: &Run, rank: usize) -> (usize, usize) {
    let units = run.model.units();
    let plan = zero::Plan::new(&units, T::DTYPE, &run.zero, rank, run.world);
    let carrier = match run.world > 1 && run.wire {
        true => Arena::needed(wired_bytes(run.world, Some(SCRATCH))),
        false => 0,
    };
    (zero::memory::arena(&plan, footprint::<T>(run)) + carrier, zero::memory::largest_call(&plan))
}
