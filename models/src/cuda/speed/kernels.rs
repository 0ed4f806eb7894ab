//! What is timed.

use super::ATTENTION_WGMMA;
use super::Work::{Computed, Moved};
use super::timing::Bench;
use crate::config::LlamaConfig;
use crate::cuda::attention::modules as attention_modules;
use crate::cuda::trial::AttentionTrial;
use crate::cuda::{self, Coefficients, TensorCores, sources};
use crate::llama::chunk;
use crate::ops::{AttentionShape, Normed, Turn};
use collectives::device::{Module, Queue, Streams, reduce};
use collectives::{Element, ReduceOp, Result, View, bf16};

type T = bf16;
const BYTES: usize = size_of::<T>();

/// The modules of each group.
pub(super) fn modules(config: &LlamaConfig, shared: usize) -> Vec<(&'static str, Module)> {
    let plain = |group, source| (group, Module::new(source, T::DTYPE));
    let mut all = vec![
        plain("norm", &sources::RMSNORM),
        plain("rope", &sources::ROPE),
        plain("swiglu", &sources::SWIGLU),
        plain("embedding", &sources::EMBEDDING),
        plain("cross_entropy", &sources::CROSS_ENTROPY),
        plain("optimizer", &sources::ADAMW),
        plain("optimizer", &sources::SQUARES),
        ("reduce", Module::reduce(T::DTYPE)),
    ];
    for (group, by) in [("attention", TensorCores::Mma), (ATTENTION_WGMMA, TensorCores::Wgmma)] {
        let of = |width| {
            attention_modules(by, T::DTYPE, width, true).into_iter().map(move |module| (group, module))
        };
        all.extend(suiting(by, config, shared).flat_map(of));
    }
    all
}

/// The model's own heads, then the other width that tensor cores take, on as many columns.
fn widths(config: &LlamaConfig) -> [usize; 2] {
    [config.head_dim, if config.head_dim == 128 { 64 } else { 128 }]
}

/// Those that such kernels take; the other width only where a block has so much shared memory.
fn suiting(by: TensorCores, config: &LlamaConfig, shared: usize) -> impl Iterator<Item = usize> {
    let own = config.head_dim;
    let fits = move |width| attention_modules(by, T::DTYPE, width, true).iter().all(|m| m.shared <= shared);
    let suits = move |width| by.check(T::DTYPE, width).is_ok() && (width == own || fits(width));
    widths(config).into_iter().filter(move |&width| suits(width))
}

/// A plain copy, which shows what the memory can do.
pub(super) fn copy<Q: Streams>(b: &mut Bench<'_, Q>, _: &LlamaConfig, _: usize) -> Result<()> {
    let bytes = 8 * b.scale.elements;
    let (from, mut to) = (b.zeros::<u8>(bytes)?, b.zeros::<u8>(bytes)?);
    let (from_at, to_at) = (from.view().as_ptr() as u64, to.view_mut().as_mut_ptr() as u64);
    // SAFETY: both buffers are that long and kept.
    b.time("copy", "copy", Moved(2 * bytes), |q| unsafe { q.0.copy(from_at, to_at, bytes) })
}

pub(super) fn norms<Q: Streams>(b: &mut Bench<'_, Q>, config: &LlamaConfig, n: usize) -> Result<()> {
    let h = config.hidden;
    let (x, weight) = (b.noise::<T>(n * h, 1.0)?, b.noise::<T>(h, 1.0)?);
    let d_out = b.noise::<T>(n * h, 1.0)?;
    let (mut out, mut d_weight) = (b.zeros::<T>(n * h)?, b.zeros::<T>(h)?);
    let mut partials = b.zeros::<f32>(cuda::norm_partials(n) * h)?;
    b.time("norm", "norm", Moved(2 * n * h * BYTES), |q| {
        q.launch(&cuda::norm(x.view(), None, weight.view(), 1e-5, out.view_mut()))
    })?;
    b.time("norm", "norm backward, adding", Moved(4 * n * h * BYTES), |q| {
        let parts = &mut partials.view_mut();
        let (d_x, d_weight) = (out.view_mut(), d_weight.view_mut());
        let normed = Normed { x: x.view(), weight: weight.view(), eps: 1e-5 };
        cuda::norm_backward(normed, d_out.view(), d_x, true, d_weight, parts)
            .iter()
            .try_for_each(|launch| q.launch(launch))
    })
}

pub(super) fn elementwise<Q: Streams>(b: &mut Bench<'_, Q>, config: &LlamaConfig, n: usize) -> Result<()> {
    let (heads, width, f, length) = (config.heads, config.head_dim, config.ffn, b.scale.length);
    let angles = b.noise::<f32>(length * width, 1.0)?;
    let mut x = b.noise::<T>(n * heads * width, 1.0)?;
    let bytes = 2 * x.len() * BYTES;
    b.time("rope", "rope of queries", Moved(bytes), |q| {
        q.launch(&cuda::rope(x.view_mut(), angles.view(), heads, width, length, Turn::Forward))
    })?;
    let (mut gate, mut up) = (b.noise::<T>(n * f, 1.0)?, b.noise::<T>(n * f, 1.0)?);
    let mut wide = b.noise::<T>(n * f, 1.0)?;
    b.time("swiglu", "swiglu", Moved(3 * n * f * BYTES), |q| {
        q.launch(&cuda::swiglu(gate.view(), up.view(), wide.view_mut()))
    })?;
    b.time("swiglu", "swiglu backward", Moved(6 * n * f * BYTES), |q| {
        q.launch(&cuda::swiglu_backward(gate.view_mut(), up.view_mut(), wide.view_mut()))
    })
}

/// Tokens that are spread over the vocabulary.
fn spread(n: usize, vocab: usize) -> Vec<u32> {
    (0..n).map(|i| (i * 7919 % vocab) as u32).collect()
}

pub(super) fn embeddings<Q: Streams>(b: &mut Bench<'_, Q>, config: &LlamaConfig, n: usize) -> Result<()> {
    let h = config.hidden;
    let tokens = spread(n, config.vocab);
    let mut order: Vec<u64> =
        tokens.iter().enumerate().map(|(i, &t)| u64::from(t) << 32 | i as u64).collect();
    order.sort_unstable();
    let (tokens, order) = (b.given(&tokens)?, b.given(&order)?);
    let mut table = b.zeros::<T>(config.vocab * h)?;
    let (d_out, mut out) = (b.noise::<T>(n * h, 1.0)?, b.zeros::<T>(n * h)?);
    b.time("embedding", "embedding", Moved(2 * n * h * BYTES), |q| {
        q.launch(&cuda::embed(tokens.view(), table.view(), out.view_mut()))
    })?;
    b.time("embedding", "embedding backward, adding", Moved(3 * n * h * BYTES), |q| {
        q.launch(&cuda::embed_backward(order.view(), d_out.view(), table.view_mut(), true))
    })
}

pub(super) fn attention<Q: Streams>(b: &mut Bench<'_, Q>, config: &LlamaConfig, n: usize) -> Result<()> {
    attention_by(TensorCores::Mma, "attention", b, config, n)
}

pub(super) fn attention_wgmma<Q: Streams>(
    b: &mut Bench<'_, Q>,
    config: &LlamaConfig,
    n: usize,
) -> Result<()> {
    attention_by(TensorCores::Wgmma, ATTENTION_WGMMA, b, config, n)
}

fn attention_by<Q: Streams>(
    by: TensorCores,
    group: &'static str,
    b: &mut Bench<'_, Q>,
    config: &LlamaConfig,
    n: usize,
) -> Result<()> {
    let (rows, length) = (b.scale.rows, b.scale.length);
    for width in suiting(by, config, b.scale.shared) {
        let heads = (config.heads * config.head_dim / width).max(1);
        let groups = config.heads / config.kv_heads;
        let kv_heads = if heads.is_multiple_of(groups) { heads / groups } else { heads };
        let shape = AttentionShape { rows, length, heads, kv_heads, width };
        let ((q, kv), sums) = (AttentionTrial::<T>::lengths(shape), AttentionTrial::<T>::sums(shape));
        let mut a = AttentionTrial::<T> {
            shape,
            q: b.noise(q, 1.0)?,
            k: b.noise(kv, 1.0)?,
            v: b.noise(kv, 1.0)?,
            d_out: b.noise(q, 1.0)?,
            out: b.zeros(q)?,
            log_sums: b.zeros(sums)?,
            delta: b.zeros(sums)?,
            d_q: b.zeros(q)?,
            d_k: b.zeros(kv)?,
            d_v: b.zeros(kv)?,
        };
        // Of products of queries and keys, without what the causal mask takes off.
        let flops = |products: f64| Computed(products * (n * heads * width) as f64 * (length + 1) as f64);
        let word = if by == TensorCores::Wgmma { ", wgmma" } else { "" };
        let name = format!("attention {rows} x {length}, {heads} heads of {width} over {kv_heads}{word}");
        b.time(group, name, flops(2.0), |q| q.launch(&a.forward(by)))?;
        for (name, products, which) in [
            ("  backward (5 products counted, 7 done)", 5.0, 0..3),
            ("    gradient of queries (3 products)", 3.0, 1..2),
            ("    gradients of keys and values (4)", 4.0, 2..3),
        ] {
            b.time(group, format!("{name}{word}"), flops(products), |q| {
                let which = which.clone();
                a.backward(by, |launches| launches[which].iter().try_for_each(|launch| q.launch(launch)))
            })?;
        }
    }
    Ok(())
}

pub(super) fn cross_entropy<Q: Streams>(b: &mut Bench<'_, Q>, config: &LlamaConfig, n: usize) -> Result<()> {
    let (n, vocab) = (chunk(n, config.vocab), config.vocab);
    let mut logits = b.noise::<T>(n * vocab, 4.0)?;
    let targets = b.given(&spread(n, vocab))?;
    let mut losses = b.zeros::<f32>(n)?;
    let bytes = 2 * n * vocab * BYTES;
    b.time("cross_entropy", "cross-entropy and its gradient (one read)", Moved(bytes), |q| {
        q.launch(&cuda::cross_entropy(logits.view_mut(), targets.view(), losses.view_mut(), Some(1.0)))
    })
}

pub(super) fn optimizer<Q: Streams>(b: &mut Bench<'_, Q>, _: &LlamaConfig, _: usize) -> Result<()> {
    let n = b.scale.elements;
    let (grad, mut param) = (b.noise::<T>(n, 0.1)?, b.noise::<T>(n, 1.0)?);
    let [mut master, mut m, mut v] = [b.zeros::<f32>(n)?, b.zeros::<f32>(n)?, b.zeros::<f32>(n)?];
    // Those of some step.
    let c = Coefficients {
        one_minus_beta1: 0.1,
        beta2: 0.95,
        one_minus_beta2: 0.05,
        eps: 1e-8,
        step_size: 1e-3,
        root_correction: 1.0,
        keep: 1.0,
        gradient_factor: 1.0,
    };
    b.time("optimizer", "AdamW with f32 master", Moved(n * (2 * BYTES + 24)), |q| {
        let (m, v, param) = (m.view_mut(), v.view_mut(), param.view_mut());
        q.launch(&cuda::adamw(&c, grad.view(), Some(master.view_mut()), m, v, param, 0..n))
    })?;
    let mut sum = b.zeros::<u64>(cuda::SQUARES_WORDS)?;
    b.time("optimizer", "squares of the norm", Moved(n * BYTES), |q| {
        q.launch(&cuda::squares::<T, T>(grad.view(), sum.view_mut()))
    })?;
    let part = n / 8;
    let inputs: Vec<View<'_, T>> = (0..8).map(|i| grad.view().slice(i * part..(i + 1) * part)).collect();
    let addresses: Vec<u64> = inputs.iter().map(|view| view.as_ptr() as u64).collect();
    let addresses = b.given(&addresses)?;
    let mut sum = b.zeros::<T>(part)?;
    b.time("reduce", "canonical sum of 8 inputs", Moved(9 * part * BYTES), |q| {
        q.launch(&reduce(ReduceOp::Sum, &inputs, addresses.view(), sum.view_mut()))
    })
}
