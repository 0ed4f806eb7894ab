//! A whole Llama on the emulated device against the one on the CPU: the same host code that drives a GPU, so grids,
//! arguments, strides, order and memory.

use crate::emulator::emulator;
use crate::tools::*;
use collectives::device::{Queue, cuda};
use collectives::{Buffer, Element, Float, View, ViewMut, bf16};
use models::cuda::Cuda;
use models::{
    Accounts, Batch, Gradients, Init, Llama, LlamaConfig, Model, Recompute, TensorSpec, Unit, Weights,
};

/// Weights or gradients by unit and tensor.
struct Tensors<T: Element>(Vec<Vec<Buffer<T>>>);

impl<T: Float> Tensors<T> {
    fn random(units: &[Unit]) -> Self {
        let tensor = |spec: &TensorSpec| {
            let (base, deviation) = if spec.decay { (0.0, 0.1) } else { (1.0, 0.3) };
            let drawn = TensorSpec { init: Init::Normal(deviation), ..spec.clone() };
            let mut values = vec![0.0; spec.len()];
            models::init_range(&drawn, 3, 0..spec.len(), &mut values);
            copy_of(&values.into_iter().map(|x| T::from_f32(base + x)).collect::<Vec<T>>())
        };
        Tensors(units.iter().map(|u| u.tensors.iter().map(tensor).collect()).collect())
    }

    fn unwritten(units: &[Unit]) -> Self {
        let tensor = |spec: &TensorSpec| unwritten(spec.len());
        Tensors(units.iter().map(|u| u.tensors.iter().map(tensor).collect()).collect())
    }
}

impl<T: Element> Weights<T> for Tensors<T> {
    fn tensor(&self, unit: usize, tensor: usize) -> View<'_, T> {
        self.0[unit][tensor].view()
    }
}

impl<T: Element> Gradients<T> for Tensors<T> {
    fn tensor(&mut self, unit: usize, tensor: usize) -> ViewMut<'_, T> {
        self.0[unit][tensor].view_mut()
    }

    fn ready(&mut self, _: usize, _: usize) {}
}

/// The loss, the gradients, and the loss again of a forward alone.
fn step<T: Float>(
    model: &mut dyn Model<T>,
    rows: usize,
    length: usize,
    vocab: usize,
) -> (f64, Tensors<T>, f64) {
    let weights = Tensors::<T>::random(model.units());
    let mut gradients = Tensors::unwritten(model.units());
    let n = rows * length;
    let tokens: Vec<u32> = (0..n).map(|i| ((i * i + 3 * i) % vocab) as u32).collect();
    let targets: Vec<u32> = (0..n).map(|i| ((i * 7 + 1) % vocab) as u32).collect();
    let batch = Batch { tokens: &tokens, targets: &targets, rows, length };
    let units = model.units().len();
    model.begin(&batch, 1.0 / n as f32);
    (0..units - 1).for_each(|unit| model.forward_unit(unit, &weights));
    (0..units).rev().for_each(|unit| model.backward_unit(unit, &weights, &mut gradients));
    let loss = model.loss();
    model.begin(&batch, 0.0);
    (0..units).for_each(|unit| model.forward_unit(unit, &weights));
    (loss, gradients, model.loss())
}

fn check<T: Float>(config: &LlamaConfig, rows: usize, length: usize, tolerance: f64) {
    let case = Case { config, rows, length, tolerance };
    if let Some(emulator) = emulator() {
        case.run::<T, _>(|seed| emulator.queue(seed));
    }
    if let Some(gpu) = gpu() {
        case.run::<T, _>(|_| cuda::Stream::new(gpu, cuda::Urgency::Normal).unwrap());
    }
}

struct Case<'a> {
    config: &'a LlamaConfig,
    rows: usize,
    length: usize,
    tolerance: f64,
}

impl Case<'_> {
    fn run<T: Float, Q: Queue>(&self, queue: impl Fn(u64) -> Q) {
        let Case { config, rows, length, tolerance } = *self;
        let accounts = Accounts::default();
        let mut cpu = Llama::<T>::new(config, rows, length, Recompute::None, 1, &accounts).unwrap();
        let (want_loss, want, _) = step(&mut cpu, rows, length, config.vocab);
        let mut first: Option<Tensors<T>> = None;
        for (seed, recompute) in [(0, Recompute::None), (1, Recompute::None), (2, Recompute::Full)] {
            let accounts = Accounts::default();
            let made = Llama::<T, _>::on_device(config, rows, length, recompute, queue(seed), &accounts);
            let mut device = made.unwrap();
            let planned = Llama::<T, Cuda<Q>>::device_footprint(config, rows, length, recompute).unwrap();
            assert_eq!(planned.activations, accounts.activations.bytes(), "activations as planned");
            assert_eq!(planned.workspace, accounts.workspace.bytes(), "workspace as planned");
            let (loss, got, again) = step(&mut device, rows, length, config.vocab);
            assert_eq!(loss, again, "the loss of the backward's forward and of a forward alone");
            assert!((loss - want_loss).abs() < tolerance * want_loss, "loss {loss}, on the CPU {want_loss}");
            for (unit, (got, want)) in got.0.iter().zip(&want.0).enumerate() {
                for (tensor, (got, want)) in got.iter().zip(want).enumerate() {
                    let (got, want) = (wide(got), wide(want));
                    let error: f64 = got.iter().zip(&want).map(|(a, b)| (a - b) * (a - b)).sum();
                    let size: f64 = want.iter().map(|b| b * b).sum();
                    let error = (error / size).sqrt();
                    assert!(error < tolerance, "gradient of {unit}.{tensor}: error {error:.2e}");
                }
            }
            let bits = |t: &Tensors<T>| t.0.iter().flatten().map(bytes).collect::<Vec<_>>();
            if let Some(first) = &first {
                assert!(
                    bits(first) == bits(&got),
                    "neither the order of threads nor recomputing changes a bit"
                );
            }
            first.get_or_insert(got);
        }
    }
}

fn small(head_dim: usize, tied: bool) -> LlamaConfig {
    LlamaConfig {
        hidden: 96,
        layers: 2,
        heads: 2,
        kv_heads: 1,
        head_dim,
        ffn: 136,
        vocab: 101,
        context: 64,
        tied,
        ..LlamaConfig::preset("nano").unwrap()
    }
}

#[test]
fn a_bf16_llama_with_tensor_core_attention_agrees_with_the_cpu() {
    check::<bf16>(&small(64, false), 2, 17, 3e-2);
}

#[test]
fn an_f32_llama_with_tied_embeddings_agrees_with_the_cpu() {
    check::<f32>(&small(6, true), 2, 9, 1e-4);
}

#[test]
fn a_head_that_is_too_wide_is_refused() {
    let Some(emulator) = emulator() else { return };
    let config = small(258, false);
    let accounts = Accounts::default();
    let refused = Llama::<bf16, _>::on_device(&config, 1, 4, Recompute::None, emulator.queue(0), &accounts);
    let text = refused.err().unwrap().to_string();
    assert!(text.contains("258") && text.contains("at most 256"), "{text}");
}
