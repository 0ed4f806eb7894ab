//! Training as its users see it: the same bits on every stage and transport, on the host and on devices, and the numbers
//! of PyTorch. One program, because every one compiles the kernels anew.

mod bits;
mod device;
mod parity;
mod toy;

#[path = "../../../models/tests/reference/mod.rs"]
mod reference;

use collectives::Float;
use zero::Trainer;

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
