//! Each kernel alone, on the shapes of a model.

use crate::timing::{noise, peak, seconds, zeros};
use collectives::device::cuda::{Gpu, Stream, Urgency};
use collectives::device::{Product, Queue, reduce};
use collectives::{Buffer, ReduceOp, Result, View, bf16};
use models::cuda::{self, Coefficients};
use models::{AttentionBackward, AttentionShape, LlamaConfig, Turn};

/// Prints one line a kernel: its time, what it moved or computed in a second, and the share of the best.
struct Table {
    /// Bytes a second of a plain copy, read and written.
    copy: f64,
    peak: Option<f64>,
}

impl Table {
    fn moved(&self, name: &str, seconds: f64, bytes: usize) {
        let rate = bytes as f64 / seconds;
        let share = 100.0 * rate / self.copy;
        println!("{name:<44} {:>10.1} us {:>8.0} GB/s   {share:>5.1}% of a copy", seconds * 1e6, rate / 1e9);
    }

    fn computed(&self, name: &str, seconds: f64, flops: f64) {
        let rate = flops / seconds;
        let share = self.peak.map_or(String::new(), |peak| format!("{:>5.1}% of peak", 100.0 * rate / peak));
        println!("{name:<44} {:>10.1} us {:>8.1} TFLOP/s {share}", seconds * 1e6, rate / 1e12);
    }
}

type T = bf16;
const BYTES: usize = size_of::<T>();

/// The kernels of `config` for micro-batches of `rows` x `length` tokens.
pub fn table(gpu: &Gpu, config: &LlamaConfig, rows: usize, length: usize) -> Result<()> {
    let stream = &mut Stream::new(gpu, Urgency::Normal)?;
    let large = 1usize << 30;
    let (from, mut to) = (zeros::<u8>(gpu, large)?, zeros::<u8>(gpu, large)?);
    let (a, b) = (from.view().as_ptr() as u64, to.view_mut().as_mut_ptr() as u64);
    // SAFETY: both buffers are that long and kept.
    let time = seconds(stream, |s| unsafe { s.copy(a, b, large) })?;
    drop((from, to));
    let table = Table { copy: 2.0 * large as f64 / time, peak: peak(&gpu.properties().name) };
    println!("\ncopy: {:.0} GB/s, read and written", table.copy / 1e9);
    elementwise(gpu, stream, &table, config, rows * length, length)?;
    attention(gpu, stream, &table, config, rows, length)?;
    head(gpu, stream, &table, config)?;
    optimizer(gpu, stream, &table)?;
    products(gpu, stream, &table, config, rows * length)
}

fn elementwise(
    gpu: &Gpu,
    stream: &mut Stream,
    table: &Table,
    config: &LlamaConfig,
    n: usize,
    length: usize,
) -> Result<()> {
    let (h, f, width) = (config.hidden, config.ffn, config.head_dim);
    let x = noise::<T>(gpu, stream, n * h, 1.0)?;
    let weight = noise::<T>(gpu, stream, h, 1.0)?;
    let d_out = noise::<T>(gpu, stream, n * h, 1.0)?;
    let (mut out, mut d_weight) = (zeros::<T>(gpu, n * h)?, zeros::<T>(gpu, h)?);
    let mut partials = zeros::<f32>(gpu, cuda::norm_partials(n) * h)?;
    let time =
        seconds(stream, |s| s.launch(&cuda::norm(x.view(), None, weight.view(), 1e-5, out.view_mut())))?;
    table.moved("norm", time, 2 * n * h * BYTES);
    let time = seconds(stream, |s| {
        let parts = &mut partials.view_mut();
        let (d_x, d_weight) = (out.view_mut(), d_weight.view_mut());
        cuda::norm_backward(x.view(), weight.view(), 1e-5, d_out.view(), d_x, true, d_weight, parts)
            .iter()
            .try_for_each(|launch| s.launch(launch))
    })?;
    table.moved("norm backward, adding", time, 4 * n * h * BYTES);

    let angles = noise::<f32>(gpu, stream, length * width, 1.0)?;
    let mut q = noise::<T>(gpu, stream, n * config.heads * width, 1.0)?;
    let bytes = 2 * q.len() * BYTES;
    let time = seconds(stream, |s| {
        s.launch(&cuda::rope(q.view_mut(), angles.view(), config.heads, width, length, Turn::Forward))
    })?;
    table.moved("rope of queries", time, bytes);

    let mut gate = noise::<T>(gpu, stream, n * f, 1.0)?;
    let mut up = noise::<T>(gpu, stream, n * f, 1.0)?;
    let mut wide = noise::<T>(gpu, stream, n * f, 1.0)?;
    let time = seconds(stream, |s| s.launch(&cuda::swiglu(gate.view(), up.view(), wide.view_mut())))?;
    table.moved("swiglu", time, 3 * n * f * BYTES);
    let time = seconds(stream, |s| {
        s.launch(&cuda::swiglu_backward(gate.view_mut(), up.view_mut(), wide.view_mut()))
    })?;
    table.moved("swiglu backward", time, 6 * n * f * BYTES);

    let tokens: Vec<u32> = (0..n).map(|i| (i * 7919 % config.vocab) as u32).collect();
    let mut order: Vec<u64> =
        tokens.iter().enumerate().map(|(i, &t)| u64::from(t) << 32 | i as u64).collect();
    order.sort_unstable();
    let (tokens, order) = (pinned(gpu, &tokens)?, pinned(gpu, &order)?);
    let mut rows = zeros::<T>(gpu, config.vocab * h)?;
    let time = seconds(stream, |s| {
        s.launch(&cuda::embed_backward(order.view(), d_out.view(), rows.view_mut(), true))
    })?;
    table.moved("embedding backward, adding", time, 3 * n * h * BYTES);
    let time = seconds(stream, |s| s.launch(&cuda::embed(tokens.view(), rows.view(), out.view_mut())))?;
    table.moved("embedding", time, 2 * n * h * BYTES);
    Ok(())
}

/// Host data that the GPU reads in place.
fn pinned<E: collectives::Element>(gpu: &Gpu, data: &[E]) -> Result<Buffer<E>> {
    let mut buffer = Buffer::from_memory(gpu.pinned(size_of_val(data))?);
    buffer.host_mut().copy_from_slice(data);
    Ok(buffer)
}

fn attention(
    gpu: &Gpu,
    stream: &mut Stream,
    table: &Table,
    config: &LlamaConfig,
    rows: usize,
    length: usize,
) -> Result<()> {
    // The model's own heads, then the other width on as many columns.
    for width in [config.head_dim, 192 - config.head_dim.clamp(64, 128)] {
        let heads = (config.heads * config.head_dim / width).max(1);
        let kv_heads = (config.kv_heads * config.head_dim / width).clamp(1, heads);
        let shape = AttentionShape { rows, length, heads, kv_heads, width };
        let (n, group) = (rows * length, heads / kv_heads);
        let (q, kv) = (n * heads * width, n * kv_heads * width);
        let [q, d_out] = [noise::<T>(gpu, stream, q, 1.0)?, noise::<T>(gpu, stream, q, 1.0)?];
        let [k, v] = [noise::<T>(gpu, stream, kv, 1.0)?, noise::<T>(gpu, stream, kv, 1.0)?];
        let [mut out, mut d_q] = [zeros::<T>(gpu, q.len())?, zeros::<T>(gpu, q.len())?];
        let [mut d_k, mut d_v] = [zeros::<T>(gpu, kv)?, zeros::<T>(gpu, kv)?];
        let [mut log_sums, mut delta] = [zeros::<f32>(gpu, n * heads)?, zeros::<f32>(gpu, n * heads)?];
        // Without what the causal mask takes off.
        let flops = |products: f64| products * (n * heads * width) as f64 * (length + 1) as f64;
        let name = format!("{rows} x {length}, {heads} heads of {width}, group {group}");
        let time = seconds(stream, |s| {
            let (out, log_sums) = (out.view_mut(), log_sums.view_mut());
            s.launch(&cuda::attention(shape, q.view(), k.view(), v.view(), out, log_sums))
        })?;
        table.computed(&format!("attention {name}"), time, flops(2.0));
        let mut launches = |s: &mut Stream, which: std::ops::Range<usize>| {
            let a = AttentionBackward {
                q: q.view(),
                k: k.view(),
                v: v.view(),
                out: out.view(),
                log_sums: log_sums.view(),
                d_out: d_out.view(),
                d_q: d_q.view_mut(),
                d_k: d_k.view_mut(),
                d_v: d_v.view_mut(),
            };
            let delta = &mut delta.view_mut();
            cuda::attention_backward(shape, a, delta)[which].iter().try_for_each(|launch| s.launch(launch))
        };
        let time = seconds(stream, |s| launches(s, 0..3))?;
        table.computed("  backward (5 products counted, 7 done)", time, flops(5.0));
        let time = seconds(stream, |s| launches(s, 1..2))?;
        table.computed("    gradient of queries (3 products)", time, flops(3.0));
        let time = seconds(stream, |s| launches(s, 2..3))?;
        table.computed("    gradients of keys and values (4)", time, flops(4.0));
    }
    Ok(())
}

fn head(gpu: &Gpu, stream: &mut Stream, table: &Table, config: &LlamaConfig) -> Result<()> {
    let (n, v) = (2048, config.vocab);
    let logits = noise::<f32>(gpu, stream, n * v, 4.0)?;
    let targets: Vec<u32> = (0..n).map(|i| (i * 7919 % v) as u32).collect();
    let targets = pinned(gpu, &targets)?;
    let (mut losses, mut d_logits) = (zeros::<f32>(gpu, n)?, zeros::<T>(gpu, n * v)?);
    let time = seconds(stream, |s| {
        let (losses, d_logits) = (losses.view_mut(), Some(d_logits.view_mut()));
        s.launch(&cuda::cross_entropy(logits.view(), targets.view(), losses, d_logits, 1.0))
    })?;
    table.moved("cross-entropy and its gradient (one read)", time, n * v * (4 + BYTES));
    Ok(())
}

fn optimizer(gpu: &Gpu, stream: &mut Stream, table: &Table) -> Result<()> {
    let n = 1usize << 27;
    let grad = noise::<T>(gpu, stream, n, 0.1)?;
    let mut param = noise::<T>(gpu, stream, n, 1.0)?;
    let [mut master, mut m, mut v] = [zeros::<f32>(gpu, n)?, zeros::<f32>(gpu, n)?, zeros::<f32>(gpu, n)?];
    let c = coefficients();
    let time = seconds(stream, |s| {
        let (m, v, param) = (m.view_mut(), v.view_mut(), param.view_mut());
        s.launch(&cuda::adamw(&c, grad.view(), Some(master.view_mut()), m, v, param, 0..n))
    })?;
    table.moved("AdamW with f32 master", time, n * (2 * BYTES + 24));
    let mut sums = zeros::<f64>(gpu, n / 1024)?;
    let time = seconds(stream, |s| s.launch(&cuda::squares::<T, T>(grad.view(), sums.view_mut())))?;
    table.moved("squares of the norm", time, n * BYTES);
    let inputs: Vec<View<'_, T>> =
        (0..8).map(|i| grad.view().slice(i * (n / 8)..(i + 1) * (n / 8))).collect();
    let addresses: Vec<u64> = inputs.iter().map(|view| view.as_ptr() as u64).collect();
    let addresses = pinned(gpu, &addresses)?;
    let mut sum = zeros::<T>(gpu, n / 8)?;
    let time =
        seconds(stream, |s| s.launch(&reduce(ReduceOp::Sum, &inputs, addresses.view(), sum.view_mut())))?;
    table.moved("canonical sum of 8 inputs", time, 9 * (n / 8) * BYTES);
    Ok(())
}

/// Those of some step.
pub fn coefficients() -> Coefficients {
    Coefficients {
        one_minus_beta1: 0.1,
        beta2: 0.95,
        one_minus_beta2: 0.05,
        eps: 1e-8,
        step_size: 1e-3,
        root_correction: 1.0,
        keep: 1.0,
        clip: 1.0,
    }
}

fn products(gpu: &Gpu, stream: &mut Stream, table: &Table, config: &LlamaConfig, n: usize) -> Result<()> {
    let (h, f, q) = (config.hidden, config.ffn, config.heads * config.head_dim);
    let shapes = [
        ("queries", [n, h, q], false, true),
        ("gate", [n, h, f], false, true),
        ("down", [n, f, h], false, true),
        ("gradient of down", [h, n, f], true, false),
        ("gradient before down", [n, h, f], false, false),
        ("logits of 2048 tokens", [2048.min(n), h, config.vocab], false, true),
    ];
    for (name, [m, k, columns], left_transposed, right_transposed) in shapes {
        let left = noise::<T>(gpu, stream, m * k, 1.0)?;
        let right = noise::<T>(gpu, stream, k * columns, 1.0)?;
        let mut out = zeros::<T>(gpu, m * columns)?;
        let time = seconds(stream, |s| {
            let (left, right) = ((left.view(), left_transposed), (right.view(), right_transposed));
            s.product(&Product::new([m, k, columns], left, right, out.view_mut()))
        })?;
        let name = format!("product {name} {m} x {k} x {columns}");
        table.computed(&name, time, 2.0 * m as f64 * k as f64 * columns as f64);
    }
    Ok(())
}
