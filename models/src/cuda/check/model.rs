//! A whole Llama on a device against the one on the CPU: the same host code that drives a GPU, so grids,
//! arguments, strides, order and memory.

use super::bed::*;
use super::copies;
use crate::config::{LlamaConfig, Rope};
use crate::cuda::TensorCores;
use crate::error::{Error, Result};
use crate::llama::{Accounts, Llama, Recompute, device_footprint};
use crate::unit::{Batch, Init, Model, TensorSpec, Unit};
use collectives::device::{Queue, SharedQueue};
use collectives::{Buffer, DType, Float, bf16, f16};

/// Weights or gradients by unit and tensor.
type Tensors<T> = Vec<Vec<Buffer<T>>>;

fn random<T: Float, Q: Queue>(bed: &Bed<Q>, units: &[Unit]) -> Tensors<T> {
    let tensor = |spec: &TensorSpec| {
        let (base, deviation) = if spec.decay { (0.0, 0.1) } else { (1.0, 0.3) };
        let drawn = TensorSpec { init: Init::Normal(deviation), ..spec.clone() };
        let mut values = vec![0.0; spec.len()];
        crate::init_range(&drawn, 3, 0..spec.len(), &mut values);
        bed.copy_of(&values.into_iter().map(|x| T::from_f32(base + x)).collect::<Vec<T>>())
    };
    units.iter().map(|u| u.tensors.iter().map(tensor).collect()).collect()
}

fn unwritten<T: Float, Q: Queue>(bed: &Bed<Q>, units: &[Unit]) -> Tensors<T> {
    let tensor = |spec: &TensorSpec| bed.unwritten(spec.len());
    units.iter().map(|u| u.tensors.iter().map(tensor).collect()).collect()
}

/// Each of them elsewhere.
fn each<T: Float>(
    tensors: &Tensors<T>,
    mut copy: impl FnMut(&Buffer<T>) -> collectives::Result<Buffer<T>>,
) -> Result<Tensors<T>> {
    let unit = |unit: &Vec<Buffer<T>>| unit.iter().map(&mut copy).collect();
    let all: collectives::Result<_> = tensors.iter().map(unit).collect();
    all.map_err(|error| Error::config(error.to_string()))
}

/// The loss, the gradients, and the loss again of a forward alone; on a queue with weights and gradients in its memory.
fn step<T: Float, Q: Queue>(
    bed: &Bed<Q>,
    queue: Option<&SharedQueue<Q>>,
    model: &mut dyn Model<T>,
    rows: usize,
    length: usize,
    vocab: usize,
) -> Result<(f64, Tensors<T>, f64)> {
    let mut weights = random::<T, Q>(bed, model.units());
    let mut gradients = unwritten(bed, model.units());
    if let Some(queue) = queue {
        weights = each(&weights, |tensor| copies::up(&mut queue.clone(), tensor))?;
        gradients = each(&gradients, |tensor| copies::up(&mut queue.clone(), tensor))?;
    }
    let n = rows * length;
    let tokens: Vec<u32> = (0..n).map(|i| ((i * i + 3 * i) % vocab) as u32).collect();
    let targets: Vec<u32> = (0..n).map(|i| ((i * 7 + 1) % vocab) as u32).collect();
    let batch = Batch { tokens: &tokens, targets: &targets, rows, length };
    let units = model.units().len();
    // Whose gradients would else be below its smallest numbers.
    let loss_scale = if T::DTYPE == DType::F16 { 1024.0 } else { 1.0 };
    model.begin(&batch, loss_scale / n as f32);
    (0..units - 1).for_each(|unit| model.forward_unit(unit, &weights));
    (0..units).rev().for_each(|unit| model.backward_unit(unit, &weights, &mut gradients));
    let loss = model.loss();
    model.begin(&batch, 0.0);
    (0..units).for_each(|unit| model.forward_unit(unit, &weights));
    let again = model.loss();
    model.check().map_err(|error| Error::config(error.to_string()))?;
    if let Some(queue) = queue {
        gradients = each(&gradients, |tensor| copies::down(&mut queue.clone(), tensor))?;
    }
    Ok((loss, gradients, again))
}

fn check<T: Float, Q: Queue>(
    bed: &Bed<Q>,
    by: TensorCores,
    config: &LlamaConfig,
    [rows, length]: [usize; 2],
    tolerance: f64,
) {
    let name = format!("a Llama of {} with heads of {}", T::DTYPE, config.head_dim);
    if let Err(error) = compare::<T, Q>(bed, by, &name, config, [rows, length], tolerance) {
        bed.that(false, || format!("{name}: {error}"));
    }
}

fn compare<T: Float, Q: Queue>(
    bed: &Bed<Q>,
    by: TensorCores,
    name: &str,
    config: &LlamaConfig,
    [rows, length]: [usize; 2],
    tolerance: f64,
) -> Result<()> {
    let mut cpu = Llama::<T>::new(config, rows, length, Recompute::None, 1, &Accounts::default())?;
    let (want_loss, want, _) = step(bed, None, &mut cpu, rows, length, config.vocab)?;
    let mut first: Option<Tensors<T>> = None;
    let last = bed.queues().last().into_iter();
    let kept = bed.queues().iter().map(|queue| (queue, Recompute::None));
    for (queue, recompute) in kept.chain(last.map(|queue| (queue, Recompute::Full))) {
        let accounts = Accounts::default();
        let mut device =
            Llama::<T, _>::on_device(by, config, rows, length, recompute, queue.clone(), &accounts)?;
        let planned = device_footprint(config, rows, length, T::DTYPE, recompute)?;
        let held = (accounts.activations.bytes(), accounts.workspace.bytes());
        bed.that((planned.activations, planned.workspace) == held, || {
            format!("{name}: it holds {held:?} bytes of activations and workspace, planned was {planned:?}")
        });
        let (loss, got, again) = step(bed, Some(queue), &mut device, rows, length, config.vocab)?;
        bed.that(loss == again, || format!("{name}: the loss of a forward alone is {again}, not {loss}"));
        let fine = (loss - want_loss).abs() < tolerance * want_loss;
        bed.that(fine, || format!("{name}: the loss is {loss}, on the processor {want_loss}"));
        for (unit, (got, want)) in got.iter().zip(&want).enumerate() {
            for (tensor, (got, want)) in got.iter().zip(want).enumerate() {
                let (got, want) = (wide(got), wide(want));
                let error: f64 = got.iter().zip(&want).map(|(a, b)| (a - b) * (a - b)).sum();
                let size: f64 = want.iter().map(|b| b * b).sum();
                let error = (error / size).sqrt();
                bed.record::<T>(error);
                bed.that(error < tolerance, || {
                    format!("{name}: the gradient of {unit}.{tensor}: error {error:.2e}")
                });
            }
        }
        let bits = |t: &Tensors<T>| t.iter().flatten().map(bytes).collect::<Vec<_>>();
        let same = first.as_ref().is_none_or(|first| bits(first) == bits(&got));
        bed.that(same, || format!("{name}: the order of threads, or recomputing, changes bits"));
        first.get_or_insert(got);
    }
    Ok(())
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
        rope: Rope::plain(10_000.0),
        norm_eps: 1e-6,
        tied,
        padding: Some(4),
    }
}

pub fn a_bf16_llama_with_tensor_core_attention<Q: Queue>(bed: &Bed<Q>) {
    check::<bf16, Q>(bed, TensorCores::Mma, &small(64, false), [2, 17], 3e-2);
}

pub fn a_bf16_llama_with_warpgroup_attention<Q: Queue>(bed: &Bed<Q>) {
    check::<bf16, Q>(bed, TensorCores::Wgmma, &small(64, false), [2, 17], 3e-2);
}

pub fn an_f16_llama_with_tensor_core_attention<Q: Queue>(bed: &Bed<Q>) {
    check::<f16, Q>(bed, TensorCores::Mma, &small(64, true), [2, 17], 4e-3);
}

pub fn an_f32_llama_with_tied_embeddings<Q: Queue>(bed: &Bed<Q>) {
    check::<f32, Q>(bed, TensorCores::Mma, &small(6, true), [2, 9], 1e-4);
}
