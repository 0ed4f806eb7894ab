//! After construction a Llama on one thread allocates nothing, nor does reading its batches.

use collectives::{Buffer, Float, bf16};
use harness::Counting;
use models::tokens::{BatchPlan, Order, Source, TokenFile, TokenWidth, TokenWriter, Tokens, Windows};
use models::{Accounts, Batch, Llama, LlamaConfig, Model, Recompute};

#[global_allocator]
static COUNTING: Counting = Counting;

fn nothing_is_allocated<T: Float>(recompute: Recompute) {
    let config = LlamaConfig::preset("nano").unwrap();
    let (rows, length) = (2, 33);
    let mut model = Llama::<T>::new(&config, rows, length, recompute, 1, &Accounts::default()).unwrap();
    let filled = |value: f32| -> Vec<Vec<Buffer<T>>> {
        let units = config.units();
        let tensor = |t: &models::TensorSpec| Buffer::copy_of(&vec![T::from_f32(value); t.len()]);
        units.iter().map(|u| u.tensors.iter().map(tensor).collect()).collect()
    };
    let (weights, mut gradients) = (filled(0.01), filled(0.0));
    let tokens: Vec<u32> = (0..(rows * length) as u32).map(|i| i * 7 % 256).collect();
    let batch = Batch { tokens: &tokens, targets: &tokens, rows, length };
    let mut logits = vec![0.0; config.vocab];
    let last = model.units().len() - 1;
    let before = Counting::here();
    for _ in 0..2 {
        model.begin(&batch, 1.0);
        (0..=last).for_each(|u| model.forward_unit(u, &weights));
        model.logits(5, &weights, &mut logits);
        (0..=last).rev().for_each(|u| model.backward_unit(u, &weights, &mut gradients));
    }
    let loss = model.loss();
    let allocations = Counting::here() - before;
    assert!(loss.is_finite());
    assert_eq!(allocations, 0, "{} {recompute:?}", T::DTYPE);
}

#[test]
fn a_step_on_one_thread_allocates_nothing() {
    for recompute in [Recompute::None, Recompute::Full] {
        nothing_is_allocated::<f32>(recompute);
        nothing_is_allocated::<bf16>(recompute);
    }
}

#[test]
fn reading_a_batch_of_files_allocates_nothing() {
    let home = tempfile::tempdir().unwrap();
    let file = |width: TokenWidth| {
        let path = home.path().join(format!("{width:?}.bin"));
        let mut writer = TokenWriter::create(&path, width).unwrap();
        writer.push(&(0..10_000).map(|i| i % 97).collect::<Vec<_>>()).unwrap();
        writer.finish().unwrap();
        Source::File(TokenFile::open(&path).unwrap())
    };
    let tokens = Tokens::new(vec![file(TokenWidth::U16), file(TokenWidth::U32)], 97);
    let windows = Windows::new(0..tokens.len(), 3000).unwrap();
    let plan = BatchPlan::new(windows, Order::Shuffled { seed: 1 }, 2, 1, 1).unwrap();
    let (mut inputs, mut targets) = (vec![0; 6000], vec![0; 6000]);
    let before = Counting::here();
    for index in 0..9 {
        plan.read(&tokens, 2 * index, &mut inputs, &mut targets).unwrap();
    }
    assert_eq!(Counting::here() - before, 0);
}
