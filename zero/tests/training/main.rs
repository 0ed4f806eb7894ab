//! Training as its users see it: the same bits on every stage and transport, on the host and on devices, and the numbers
//! of PyTorch. One program, because every one compiles the kernels anew.

mod bits;
mod crossed;
mod device;
mod parity;
mod resumed;
mod run;
mod scaled;
mod toy;
mod traced;

#[path = "../../../models/tests/reference/mod.rs"]
mod reference;

use collectives::Float;
use zero::{Home, Plan, Trainer};

/// Bytes that a rank sends in one step: every collective moves (world - 1) shards.
fn step_bytes(plan: &Plan) -> u64 {
    // What all tell each other beside: the digits of the norm, what is not finite, what the rank did, and the losses.
    let (mut elements, told) = (0, 20 + 1 + 1 + plan.config.accumulate);
    for (u, b) in plan.buckets() {
        let shard = plan.layout[u].bucket(b).shard_len();
        let gathers = match plan.weights[u] {
            Home::Slot(_) => plan.config.accumulate * plan.training.weights_live[u].len(),
            // Either the reduced gradient is handed round, or the updated parameters are.
            Home::Whole => 1,
        };
        elements += shard * (plan.config.accumulate + gathers);
    }
    let bytes = ((plan.world - 1) * (elements * plan.dtype.size() + told * size_of::<u64>())) as u64;
    assert_eq!(plan.sent_in_a_step(), bytes);
    bytes
}

/// Of them, those of parameters that were updated.
fn published_bytes(plan: &Plan) -> u64 {
    let told =
        plan.buckets().filter(|&(u, _)| plan.config.stage.shards_optimizer && plan.weights[u] == Home::Whole);
    let elements: usize = told.map(|(u, b)| plan.layout[u].bucket(b).shard_len()).sum();
    ((plan.world - 1) * elements * plan.dtype.size()) as u64
}

/// The bits of all weights, widened.
fn weights<T: Float>(trainer: &mut Trainer<T>) -> Vec<u32> {
    let mut bits = Vec::new();
    let mut take = |spec: &models::TensorSpec, values: &[T]| {
        assert_eq!(spec.len(), values.len());
        bits.extend(values.iter().map(|w| w.to_f32().to_bits()));
        Ok(())
    };
    trainer.export(Some(&mut take)).unwrap();
    bits
}
