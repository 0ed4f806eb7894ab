//! That a loss is awaited, and nothing of what the device was given after it.

use crate::emulator::emulator;
use collectives::device::emulation::EmulatedQueue;
use collectives::device::{Queue, SharedQueue};
use collectives::{Buffer, bf16};
use models::cuda::TensorCores;
use models::{Accounts, Batch, Llama, LlamaConfig, Model, Recompute, Unit};

/// Weights that are all zero, in memory of the device.
fn zeros(units: &[Unit], queue: &mut SharedQueue<EmulatedQueue>) -> Vec<Vec<Buffer<bf16>>> {
    let mut tensor = |len: usize| Buffer::from_memory(queue.memory(len * size_of::<bf16>()).unwrap());
    let unit = |unit: &Unit| unit.tensors.iter().map(|spec| tensor(spec.len())).collect();
    units.iter().map(unit).collect()
}

#[test]
fn a_loss_is_there_before_what_was_asked_for_later_is_done() {
    let Some(emulator) = emulator() else { return };
    // A queue that does nothing before somebody waits for it.
    let mut queue = SharedQueue::new(emulator.late_queue(1));
    let config = LlamaConfig { layers: 1, ..LlamaConfig::preset("nano").unwrap() };
    let (by, accounts) = (TensorCores::default(), Accounts::default());
    let made =
        Llama::<bf16, _>::on_device(by, &config, 1, 4, Recompute::NoBackward, queue.clone(), &accounts);
    let mut model = made.unwrap();
    let (units, weights) = (model.units().len(), zeros(model.units(), &mut queue));
    model.begin(&Batch { tokens: &[1; 4], targets: &[2; 4], rows: 1, length: 4 }, 0.0);
    (0..units).for_each(|unit| model.forward_unit(unit, &weights));
    // As the backward of the other units, which takes the device longer than all before.
    (0..100).for_each(|_| model.forward_unit(1, &weights));
    let end = queue.event().unwrap();
    queue.record(&end).unwrap();
    let loss = model.loss();
    model.check().unwrap();
    assert!((loss - 4.0 * (config.vocab as f64).ln()).abs() < 0.1, "{loss}");
    assert!(!EmulatedQueue::happened(&end).unwrap(), "the queue still has work");
    queue.synchronize().unwrap();
    assert!(EmulatedQueue::happened(&end).unwrap());
}
