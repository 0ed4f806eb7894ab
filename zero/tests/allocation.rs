//! After the first steps, a training step allocates nothing: counted by the process's allocator, over all
//! ranks at once.

use collectives::bootstrap::{Identity, Options, shm_group};
use collectives::{Communicator, bf16};
use models::{Accounts, Batch, Llama, LlamaConfig, Recompute, TensorSpec};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use zero::{Batches, Config, Ledger, Stage, Trainer};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

struct Fixed(Vec<u32>, usize);

impl Batches for Fixed {
    fn micro_batch(&mut self, _index: usize) -> Batch<'_> {
        Batch { tokens: &self.0, targets: &self.0, rows: 2, length: self.1 }
    }
}

/// Allocations of steps 4 to 8 of `world` ranks together.
fn count(world: usize, stage: u8, accumulate: usize) -> usize {
    let barrier = Barrier::new(world);
    let job = format!("caravan-test-allocation-{}-{world}-{stage}-{accumulate}", std::process::id());
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
        let comm = Communicator::new(transport, collectives::Options::default()).unwrap();
        let config = LlamaConfig::preset("nano").unwrap();
        let ledger = Ledger::default();
        let accounts =
            Accounts { activations: ledger.activations.clone(), workspace: ledger.workspace.clone() };
        let length = config.context.min(16);
        let model = Llama::<bf16>::new(&config, 2, length, Recompute::None, 1, &accounts).unwrap();
        let mut source = |spec: &TensorSpec, range: std::ops::Range<usize>, out: &mut [f32]| {
            models::init_range(spec, 7, range, out);
            Ok(())
        };
        let zero = Config {
            stage: Stage::try_from(stage).unwrap(),
            bucket_bytes: 8 << 10,
            accumulate,
            ..Config::default()
        };
        let mut trainer = Trainer::new(Box::new(model), comm, &zero, ledger, &mut source).unwrap();
        let mut batches = Fixed((0..2 * length as u32).collect(), length);
        let mut counted = (0, 0);
        for step in 0..8 {
            if step == 3 {
                barrier.wait();
                counted.0 = ALLOCATIONS.load(Ordering::Relaxed);
                barrier.wait();
            }
            trainer.step(&mut batches, 1e-3).unwrap();
        }
        barrier.wait();
        counted.1 = ALLOCATIONS.load(Ordering::Relaxed);
        barrier.wait();
        counted.1 - counted.0
    };
    std::thread::scope(|scope| {
        let rank = &rank;
        let handles: Vec<_> = (0..world).map(|r| scope.spawn(move || rank(r))).collect();
        handles.into_iter().map(|h| h.join().unwrap()).max().unwrap()
    })
}

// One test: another would allocate beside it.
#[test]
fn a_steady_step_allocates_nothing() {
    for world in [1, 2, 3] {
        for stage in 0..4 {
            for accumulate in [1, 2] {
                let n = count(world, stage, accumulate);
                assert_eq!(n, 0, "{world} ranks, stage {stage}, {accumulate} micro-batches");
            }
        }
    }
}
