//! After the first steps, a training step allocates nothing: counted by the process's allocator, over all
//! ranks at once.

use collectives::bootstrap::{Identity, Options, shm_group};
use collectives::device::SharedQueue;
use collectives::device::emulation::Emulator;
use collectives::{Alone, Carrier, Communicator, DType, Staged, bf16};
use harness::Counting;
use models::{Batch, Llama, LlamaConfig, Recompute, TensorSpec};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;
use zero::memory::largest_call;
use zero::{Batches, Config, Ledger, NoBatch, Placement, Plan, Stage, Trainer};

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

/// Groups of `world` ranks over shared memory, whose ranks meet as processes would.
fn over_shm(world: usize) -> Vec<Communicator> {
    static RUNS: AtomicUsize = AtomicUsize::new(0);
    let run = RUNS.fetch_add(1, Ordering::Relaxed);
    let job = format!("caravan-test-allocation-{}-{run}", std::process::id());
    let rank = |rank: usize| {
        let identity = Identity {
            rank,
            world,
            local_rank: Some(rank),
            local_size: Some(world),
            job: Some(job.clone()),
            ..Identity::alone()
        };
        let transport = shm_group(&identity, &Options::default()).unwrap();
        Communicator::new(transport, collectives::Options::default()).unwrap()
    };
    std::thread::scope(|scope| {
        let rank = &rank;
        let handles: Vec<_> = (0..world).map(|r| scope.spawn(move || rank(r))).collect();
        handles.into_iter().map(|h| h.join().unwrap()).collect()
    })
}

/// Allocations of steps 4 to 8 of all `ranks` together, on the host or each with a device of its own.
fn count(
    ranks: Vec<Communicator>,
    stage: u8,
    accumulate: usize,
    device: Option<(&Emulator, Placement)>,
) -> usize {
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
            ..Config::default()
        };
        let accounts = ledger.of_model();
        let mut trainer = match device {
            None => {
                let model = Llama::<bf16>::new(&config, 2, length, Recompute::None, 1, &accounts).unwrap();
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
                let plan = Plan::new(&config.units(), DType::Bf16, &zero, rank, world);
                let largest = largest_call(&plan);
                let carrier: Arc<dyn Carrier> = match world {
                    1 => Arc::new(Alone::new(&comm, queue.clone()).unwrap()),
                    _ => Arc::new(Staged::planned(&comm, queue.clone(), largest, &ledger.host).unwrap()),
                };
                let comm = comm.with_carrier(carrier);
                let none = Recompute::None;
                let model = Llama::<bf16, _>::on_device(&config, 2, length, none, queue.clone(), &accounts);
                let model = Box::new(model.unwrap());
                Trainer::on_device(&queue, 1, model, comm, &zero, ledger, &mut source).unwrap()
            }
        };
        let tokens = (0..2 * length as u32).collect();
        let mut batches = Fixed { tokens, length, late: Duration::ZERO };
        let mut counted = (0, 0);
        for step in 0..8 {
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
        counted.1 - counted.0
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
    for world in [1, 2, 3] {
        for stage in 0..4 {
            for accumulate in [1, 2] {
                for (transport, ranks) in
                    [("shm", over_shm(world)), ("threads", Communicator::threads(world))]
                {
                    let n = count(ranks, stage, accumulate, None);
                    assert_eq!(
                        n, 0,
                        "{world} ranks over {transport}, stage {stage}, {accumulate} micro-batches"
                    );
                }
            }
        }
    }
    let built = Emulator::build(&[], Path::new(env!("CARGO_TARGET_TMPDIR"))).unwrap();
    let Some(emulator) = built else {
        return harness::skip("beside an emulated device: no C++ compiler ($CXX, c++, g++ or clang++)");
    };
    for (world, stage, accumulate, placement) in
        [(1, 0, 2, Placement::Device), (2, 3, 1, Placement::Device), (2, 2, 2, Placement::Offloaded)]
    {
        let n = count(over_shm(world), stage, accumulate, Some((&emulator, placement)));
        assert_eq!(n, 0, "{world} ranks, stage {stage}, {accumulate} micro-batches, {placement:?}");
    }
}
