//! What a rank holds is what was planned, by the process's allocator and not by what buffers say of themselves: one that is
//! booked nowhere shows here.

use collectives::{Communicator, Float, bf16};
use harness::Counting;
use models::{Batch, Llama, LlamaConfig, Recompute, TensorSpec};
use zero::{Batches, Config, Ledger, NoBatch, Stage, Trainer};

#[global_allocator]
static COUNTING: Counting = Counting;

/// What of the process's memory is of which kind.
const MAPS: &str = "/proc/self/smaps";
const ROWS: usize = 3;
const LENGTH: usize = 32;
/// What mailboxes, schedules, lists and the plan take.
const ASIDE: usize = 1 << 20;

/// Bytes that the process holds: from the allocator, and from the system itself, which buffers of 2 MiB and more come from, in
/// huge pages.
fn held() -> usize {
    let maps = std::fs::read_to_string(MAPS).expect("what is mapped");
    let (mut size, mut huge) = (0, 0);
    for line in maps.lines() {
        let mut words = line.split_whitespace();
        match words.next() {
            Some("Size:") => {
                size = words.next().and_then(|kib| kib.parse::<usize>().ok()).expect("a size") << 10
            }
            Some("VmFlags:") if words.any(|flag| flag == "hg") => huge += size,
            _ => {}
        }
    }
    drop(maps);
    Counting::held() + huge
}

struct Same(Vec<u32>);

impl Batches for Same {
    fn micro_batch(&mut self, _index: usize) -> Result<Batch<'_>, NoBatch> {
        Ok(Batch { tokens: &self.0, targets: &self.0, rows: ROWS, length: LENGTH })
    }
}

fn check<T: Float>(stage: u8, accumulate: usize, recompute: Recompute) {
    let shape = LlamaConfig { layers: 6, ..LlamaConfig::preset("nano").unwrap() };
    let mut batches = Same((0..(ROWS * LENGTH) as u32).map(|i| i % 200).collect());
    let before = held();
    let comm = Communicator::threads(1).remove(0);
    let group = comm.group();
    let ledger = Ledger::default();
    let model = Llama::<T>::new(&shape, ROWS, LENGTH, recompute, 1, &ledger.of_model()).unwrap();
    let footprint = models::footprint(&shape, ROWS, LENGTH, T::DTYPE, recompute, 1).unwrap();
    let config = Config {
        stage: Stage::try_from(stage).unwrap(),
        bucket_bytes: 64 << 10,
        accumulate,
        ..Config::default()
    };
    let mut source = |spec: &TensorSpec, range: std::ops::Range<usize>, out: &mut [f32]| {
        models::init_range(spec, 7, range, out);
        Ok(())
    };
    let mut trainer = Trainer::new(Box::new(model), comm, &config, ledger, &mut source).unwrap();
    for _ in 0..3 {
        trainer.step(&mut batches, 1e-3).unwrap();
    }
    let held = held() - before;
    let planned =
        zero::memory::predict(trainer.plan(), footprint).with_engine(trainer.plan(), &group, false).total();
    let what = format!("{} at stage {stage}, {accumulate} micro-batches, {recompute:?}", T::DTYPE);
    assert!((planned..planned + ASIDE).contains(&held), "{what}: {held} bytes are held, {planned} planned");
    assert!(planned > 4 * ASIDE, "{what}: {planned} bytes are too few to tell");
}

// One test: another would allocate beside it.
#[test]
fn a_rank_holds_what_was_planned() {
    let there = |path: &str| std::path::Path::new(path).exists();
    if !there(MAPS) || !there("/sys/kernel/mm/transparent_hugepage") {
        return harness::skip(
            "what a rank holds: this system tells no huge pages, by which large buffers are known",
        );
    }
    for stage in 0..4 {
        check::<f32>(stage, 1, Recompute::None);
        check::<bf16>(stage, 2, Recompute::Full);
    }
}
