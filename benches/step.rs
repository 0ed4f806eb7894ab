//! Whole training steps of one rank: forward, backward, clipping, update. `nano` shows what a step costs besides
//! arithmetic, `32m` what arithmetic costs.

use collectives::{Communicator, Float, bf16};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use models::{Batch, Llama, LlamaConfig, Recompute};
use std::time::Duration;
use zero::{Batches, Config, Ledger, NoBatch, Trainer};

/// The same batch over and over.
struct Same {
    tokens: Vec<u32>,
    rows: usize,
    length: usize,
}

impl Batches for Same {
    fn micro_batch(&mut self, _: usize) -> Result<Batch<'_>, NoBatch> {
        Ok(Batch { tokens: &self.tokens, targets: &self.tokens, rows: self.rows, length: self.length })
    }
}

fn trainer<T: Float>(name: &str, rows: usize, length: usize) -> (Trainer<T>, Same) {
    let config = LlamaConfig::preset(name).expect("a preset");
    let ledger = Ledger::default();
    let accounts = ledger.of_model();
    let model = Llama::<T>::new(&config, rows, length, Recompute::None, 1, &accounts).expect("a model");
    let comm = Communicator::threads(1).remove(0);
    let mut source = |spec: &models::TensorSpec, range: std::ops::Range<usize>, out: &mut [f32]| {
        models::init_range(spec, 1, range, out);
        Ok(())
    };
    let mut trainer =
        Trainer::new(Box::new(model), comm, &Config::default(), ledger, &mut source).expect("a trainer");
    let tokens: Vec<u32> = (0..rows * length).map(|i| (i * 7 % 251) as u32).collect();
    let mut batches = Same { tokens, rows, length };
    // One batch is learnt by heart within a few steps, or the step is wrong.
    let first = trainer.step(&mut batches, 1e-3).expect("a step").loss;
    let later = (0..4).map(|_| trainer.step(&mut batches, 1e-3).expect("a step").loss).last();
    assert!(later < Some(first), "{first} to {later:?}");
    (trainer, batches)
}

fn step<T: Float>(c: &mut Criterion, name: &str, rows: usize, length: usize, samples: usize) {
    let mut group = c.benchmark_group(format!("step {name}"));
    group.throughput(Throughput::Elements((rows * length) as u64)).sample_size(samples);
    // Made when first asked for: a filter leaves benches out.
    let mut made = None;
    group.bench_function(format!("{}, {rows} x {length}", T::DTYPE), |b| {
        let (trainer, batches) = made.get_or_insert_with(|| trainer::<T>(name, rows, length));
        b.iter(|| trainer.step(batches, 0.0).expect("a step"));
    });
    group.finish();
}

fn benches(c: &mut Criterion) {
    step::<f32>(c, "nano", 2, 64, 50);
    step::<bf16>(c, "nano", 2, 64, 50);
    step::<f32>(c, "32m", 1, 256, 10);
    step::<bf16>(c, "32m", 1, 256, 10);
}

criterion_group! {
    name = all;
    config = Criterion::default().measurement_time(Duration::from_secs(4));
    targets = benches
}
criterion_main!(all);
