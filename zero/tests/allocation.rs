//! After the first steps, a training step allocates nothing, but for what rayon does where it computes with several threads:
//! counted by the process's allocator, over all ranks at once.

use collectives::bootstrap::{Identity, Options, shm_group};
use collectives::device::SharedQueue;
use collectives::device::emulation::Emulator;
use collectives::transport::emulated::Emulated;
use collectives::transport::hierarchical::Hierarchical;
use collectives::transport::ucx::{self, UcxTransport};
use collectives::transport::{Nodes, Transport, threads};
use collectives::{
    Alone, Carrier, Communicator, DType, Float, Options as Behaviour, Progress, Staged, bf16, f16,
};
use harness::Counting;
use models::{Batch, Llama, LlamaConfig, Model, Recompute, TensorSpec};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;
use zero::memory::largest_call;
use zero::{Action, Batches, Config, Home, Ledger, NoBatch, Placement, Plan, Scaling, Stage, Trainer};

#[global_allocator]
static COUNTING: Counting = Counting;

struct Fixed {
    tokens: Vec<u32>,
    length: usize,
    /// How long each takes to come.
    late: Duration,
}

impl Batches for Fixed {
    fn micro_batch(&mut self, _index: usize) -> Result<Batch<'_>, NoBatch> {
        std::thread::sleep(self.late);
        Ok(Batch { tokens: &self.tokens, targets: &self.tokens, rows: 2, length: self.length })
    }
}

/// How late one rank is in the steps that are counted, so that the others have all their calls under way.
const LATE: Duration = Duration::from_millis(5);

/// What each rank makes of its number and how many there are, all at the same time.
fn at_once<T: Send>(world: usize, make: impl Fn(usize) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let make = &make;
        let handles: Vec<_> = (0..world).map(|rank| scope.spawn(move || make(rank))).collect();
        handles.into_iter().map(|h| h.join().unwrap()).collect()
    })
}

/// A group of `world` ranks over shared memory, which meet as processes would.
fn over_shm(world: usize) -> Vec<Communicator> {
    static RUNS: AtomicUsize = AtomicUsize::new(0);
    let run = RUNS.fetch_add(1, Ordering::Relaxed);
    let job = format!("caravan-test-allocation-{}-{run}", std::process::id());
    at_once(world, |rank| {
        let transport = shm_group(&Identity::on_this_host(rank, world, &job), &Options::default()).unwrap();
        Communicator::new(transport, Behaviour::default()).unwrap()
    })
}

/// Over UCX, whose own memory is not counted.
fn over_ucx(world: usize) -> Vec<Communicator> {
    let (cards, meeting) = (Mutex::new(vec![Vec::new(); world]), Barrier::new(world));
    at_once(world, |rank| {
        let mut exchange = |mine: Vec<u8>| {
            cards.lock().unwrap()[rank] = mine;
            meeting.wait();
            Ok(cards.lock().unwrap().clone())
        };
        let transport = UcxTransport::connect(rank, world, &ucx::Start::default(), &mut exchange).unwrap();
        Communicator::new(Box::new(transport), Behaviour::default()).unwrap()
    })
}

/// Over threads as `wrap` has them, whose ranks behave as `options` say.
fn over_threads(
    world: usize,
    options: Behaviour,
    wrap: fn(Box<dyn Transport>) -> Box<dyn Transport>,
) -> Vec<Communicator> {
    let group: Vec<_> = threads::group(world).into_iter().map(|rank| Mutex::new(Some(rank))).collect();
    at_once(world, |rank| {
        let transport = group[rank].lock().unwrap().take().unwrap();
        Communicator::new(wrap(Box::new(transport)), options).unwrap()
    })
}

/// Nodes of two ranks, joined by a link.
fn nodes(mut outer: Box<dyn Transport>) -> Box<dyn Transport> {
    let nodes = Nodes::blocks(outer.size(), 2).unwrap();
    let here = nodes.with(outer.rank());
    let within = Behaviour::default().deadline;
    let inner = (here.len() > 1).then(|| outer.subgroup(here, 77 + here[0] as u64, within).unwrap());
    Box::new(Hierarchical::new("nodes", inner, link(outer), nodes).unwrap())
}

fn link(plain: Box<dyn Transport>) -> Box<dyn Transport> {
    let apart = Nodes::apart(plain.size());
    Box::new(Emulated::new("link", plain, "latency=2us,bandwidth=5GB/s".parse().unwrap(), apart).unwrap())
}

/// What a run is of, beside its ranks.
#[derive(Clone, Copy, Debug)]
struct Run {
    stage: u8,
    accumulate: usize,
    recompute: Recompute,
    prefetch: bool,
    /// That compute the model of a rank on the host.
    threads: usize,
}

/// Steps that are counted, after three others.
const COUNTED: usize = 5;

/// What rayon allocates in the steps that are counted, of a rank with several threads: a block for each 63 pieces of work that
/// come from outside its pool. What these divide further takes nothing.
fn blocks(plan: &Plan) -> usize {
    let (micro_batches, buckets) = (plan.config.accumulate, plan.buckets().count());
    let computes = |action: &&Action| matches!(action, Action::Forward(_) | Action::Backward(_));
    let units = plan.training.actions.iter().filter(computes).count();
    let rounds = |(unit, _): &(usize, usize)| micro_batches > 1 && plan.gradients[*unit] == Home::Whole;
    let sums = (micro_batches - 1) * buckets + plan.buckets().filter(rounds).count();
    // With one update a bucket, and the norm.
    let pieces = micro_batches * units + sums + buckets + 1;
    (COUNTED * pieces).div_ceil(63)
}

/// Allocations of the steps that are counted of all `ranks` together, on the host or each with a device of its own, beyond
/// those of rayon.
fn count<T: Float>(ranks: Vec<Communicator>, run: Run, device: Option<(&Emulator, Placement)>) -> usize {
    let Run { stage, accumulate, recompute, prefetch, threads } = run;
    let world = ranks.len();
    let barrier = Barrier::new(world);
    let rank = |comm: Communicator| {
        let rank = comm.rank();
        // More buckets than a communicator has places for from the start.
        let config = LlamaConfig { layers: 5, ..LlamaConfig::preset("nano").unwrap() };
        let ledger = Ledger::default();
        let length = config.context.min(16);
        let mut source = |spec: &TensorSpec, range: std::ops::Range<usize>, out: &mut [f32]| {
            models::init_range(spec, 7, range, out);
            Ok(())
        };
        let mut zero = Config {
            stage: Stage::try_from(stage).unwrap(),
            bucket_bytes: 8 << 10,
            accumulate,
            // In several sums.
            reproducible: accumulate > 3,
            prefetch,
            // Of which the first steps are skipped that are counted.
            scaling: (T::DTYPE == DType::F16).then(|| Scaling {
                initial: 1e15,
                hysteresis: 5,
                ..Scaling::default()
            }),
            ..Config::default()
        };
        let accounts = ledger.of_model();
        let mut trainer = match device {
            None => {
                let model = Llama::<T>::new(&config, 2, length, recompute, threads, &accounts).unwrap();
                if threads > 1 {
                    // All have begun, and have what they take for themselves.
                    Model::install(&model, &mut || drop(rayon::broadcast(|_| ())));
                }
                let trainer = Trainer::new(Box::new(model), comm, &zero, ledger, &mut source).unwrap();
                assert!(trainer.plan().buckets().count() > 32);
                trainer
            }
            Some((emulator, placement)) => {
                zero.placement = placement;
                // Fewer buckets and a smaller vocabulary: emulating takes its time.
                zero.bucket_bytes = 64 << 10;
                let (layers, heads, kv_heads) = (2, 2, 1);
                let config =
                    LlamaConfig { hidden: 32, head_dim: 16, layers, heads, kv_heads, vocab: 40, ..config };
                let queue = SharedQueue::new(emulator.queue(0));
                // As the program plans it: how many calls are under way at once depends on timing.
                let plan = Plan::new(&config.units(), T::DTYPE, &zero, rank, world);
                let largest = largest_call(&plan);
                let carrier: Arc<dyn Carrier> = match world {
                    1 => Arc::new(Alone::new(&comm, queue.clone()).unwrap()),
                    _ => Arc::new(Staged::planned(&comm, queue.clone(), largest, &ledger.host).unwrap()),
                };
                let comm = comm.with_carrier(carrier);
                let by = Default::default();
                let model =
                    Llama::<T, _>::on_device(by, &config, 2, length, recompute, queue.clone(), &accounts);
                let model = Box::new(model.unwrap());
                Trainer::on_device(&queue, 1, model, comm, &zero, ledger, &mut source).unwrap()
            }
        };
        let tokens = (0..2 * length as u32).collect();
        let mut batches = Fixed { tokens, length, late: Duration::ZERO };
        let mut counted = (0, 0);
        for step in 0..3 + COUNTED {
            if step == 3 {
                barrier.wait();
                counted.0 = Counting::all();
                barrier.wait();
                batches.late = if rank + 1 == world && world > 1 { LATE } else { Duration::ZERO };
            }
            trainer.step(&mut batches, 1e-3).unwrap();
        }
        barrier.wait();
        counted.1 = Counting::all();
        barrier.wait();
        let rayon = if threads > 1 { blocks(trainer.plan()) } else { 0 };
        (counted.1 - counted.0).saturating_sub(world * rayon)
    };
    std::thread::scope(|scope| {
        let rank = &rank;
        let handles: Vec<_> = ranks.into_iter().map(|comm| scope.spawn(move || rank(comm))).collect();
        handles.into_iter().map(|h| h.join().unwrap()).max().unwrap()
    })
}

// One test: another would allocate beside it.
#[test]
fn a_steady_step_allocates_nothing() {
    let usual = Run { stage: 0, accumulate: 1, recompute: Recompute::None, prefetch: true, threads: 1 };
    for world in [1, 2, 3] {
        for stage in 0..4 {
            for accumulate in [1, 2] {
                for (transport, ranks) in
                    [("shm", over_shm(world)), ("threads", Communicator::threads(world))]
                {
                    let run = Run { stage, accumulate, ..usual };
                    assert_eq!(count::<bf16>(ranks, run, None), 0, "{world} ranks over {transport}, {run:?}");
                }
            }
        }
    }
    for (stage, accumulate) in [(0, 5), (3, 4)] {
        let run = Run { stage, accumulate, ..usual };
        assert_eq!(count::<bf16>(over_shm(2), run, None), 0, "2 ranks, {run:?}");
    }
    for (world, stage, accumulate) in [(1, 0, 2), (2, 3, 1), (2, 1, 3), (3, 2, 2)] {
        let run = Run { stage, accumulate, threads: 2, ..usual };
        assert_eq!(count::<bf16>(over_shm(world), run, None), 0, "{world} ranks, {run:?}");
    }
    for stage in [0, 3] {
        let run = Run { stage, ..usual };
        assert_eq!(count::<f16>(over_shm(2), run, None), 0, "2 ranks in f16, {run:?}");
    }
    let offered = ucx::library();
    if let Err(why) = &offered {
        harness::skip(&format!("beside UCX: {why}"));
    }
    let threaded = Behaviour { progress: Progress::Thread { cpu: None }, ..Behaviour::default() };
    for (stage, recompute, prefetch) in
        [(0, Recompute::Full, true), (2, Recompute::None, true), (3, Recompute::Full, false)]
    {
        let run = Run { stage, recompute, prefetch, ..usual };
        for (transport, ranks) in [
            ("shm", over_shm(2)),
            ("threads with a thread for progress each", over_threads(2, threaded, |plain| plain)),
            ("a link", over_threads(2, Behaviour::default(), link)),
            ("nodes", over_threads(4, Behaviour::default(), nodes)),
        ] {
            assert_eq!(count::<f32>(ranks, run, None), 0, "ranks over {transport}, {run:?}");
        }
        if offered.is_ok() {
            assert_eq!(count::<bf16>(over_ucx(3), run, None), 0, "3 ranks over UCX, {run:?}");
        }
    }
    let built = Emulator::build(&[], Path::new(env!("CARGO_TARGET_TMPDIR"))).unwrap();
    let Some(emulator) = harness::made_by_cxx("allocations beside an emulated device", built) else { return };
    for (world, stage, accumulate, placement) in
        [(1, 0, 2, Placement::Device), (2, 3, 1, Placement::Device), (2, 2, 2, Placement::Offloaded)]
    {
        let run = Run { stage, accumulate, ..usual };
        let n = count::<bf16>(over_shm(world), run, Some((&emulator, placement)));
        assert_eq!(n, 0, "{world} ranks, {run:?}, {placement:?}");
    }
}
