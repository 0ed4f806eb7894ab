//! Where the time of a forward and backward goes: `step_time [MODEL] [f32|bf16] [ROWS] [LENGTH] [THREADS] [full]`.
//!
//! Prints the median step, then each kernel's time, calls and, for matrix products and attention, GFLOP/s over all calls and
//! in the fastest, which others on the machine held up least (2mnk for each product; attention without what the causal mask
//! takes off).

use collectives::{Buffer, Element, Float, View, ViewMut, bf16};
use models::{
    Accounts, AttentionBackward, AttentionShape, Batch, Llama, LlamaConfig, MatmulPrecision, Matrix, Model,
    Normed, Ops, Plus, Recompute, Team, Turn, init_range,
};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// What is known of a kernel.
#[derive(Default)]
struct Row {
    seconds: f64,
    calls: usize,
    flops: f64,
    /// Operations a second in the fastest call.
    best: f64,
}

/// Rows by kernel.
type Table = Arc<Mutex<BTreeMap<String, Row>>>;

/// Kernels that note how long each took.
struct Timed<O> {
    inner: O,
    table: Table,
}

impl<O> Timed<O> {
    fn note<R>(&mut self, name: impl Into<String>, flops: f64, f: impl FnOnce(&mut O) -> R) -> R {
        let start = Instant::now();
        let result = f(&mut self.inner);
        let seconds = start.elapsed().as_secs_f64();
        let mut table = self.table.lock().expect("one thread");
        let entry = table.entry(name.into()).or_default();
        entry.seconds += seconds;
        entry.calls += 1;
        entry.flops += flops;
        entry.best = entry.best.max(flops / seconds);
        result
    }
}

fn attention_flops(s: &AttentionShape, products: usize) -> f64 {
    (s.rows * s.heads * s.width * s.length * (s.length + 1) * products) as f64
}

impl<T: Float, O: Ops<T>> Ops<T> for Timed<O> {
    type Work = O::Work;

    fn team(&self) -> Team {
        self.inner.team()
    }

    fn precise_to(&mut self, precision: MatmulPrecision) {
        self.inner.precise_to(precision);
    }

    fn upload<E: Element>(&mut self, from: &[E], to: ViewMut<'_, E>) {
        self.note("copy", 0.0, |o| o.upload(from, to));
    }

    fn fetch<E: Element>(&mut self, from: View<'_, E>, to: ViewMut<'_, E>) {
        Ops::<T>::fetch(&mut self.inner, from, to);
    }

    fn finish(&mut self) {
        Ops::<T>::finish(&mut self.inner);
    }

    fn download<E: Element>(&mut self, from: View<'_, E>, to: &mut [E]) {
        self.note("copy", 0.0, |o| o.download(from, to));
    }

    fn product<L: Float, R: Float, P: Float>(
        &mut self,
        out: ViewMut<'_, P>,
        plus: Plus<'_, P>,
        l: Matrix<'_, L>,
        r: Matrix<'_, R>,
    ) {
        let order = |t: bool| if t { "^T" } else { "" };
        let name = format!(
            "product {:5} x {:5} x {:5} A{} B{}",
            l.rows,
            r.columns,
            l.columns,
            order(l.transposed),
            order(r.transposed)
        );
        let flops = 2.0 * (l.rows * l.columns) as f64 * r.columns as f64;
        self.note(name, flops, |o| Ops::<T>::product(o, out, plus, l, r));
    }

    fn embed(&mut self, tokens: View<'_, u32>, table: View<'_, T>, out: ViewMut<'_, T>) {
        self.note("embed", 0.0, |o| o.embed(tokens, table, out));
    }

    fn embed_backward(
        &mut self,
        order: View<'_, u64>,
        d: View<'_, O::Work>,
        table: ViewMut<'_, T>,
        add: bool,
    ) {
        self.note("embed backward", 0.0, |o| o.embed_backward(order, d, table, add));
    }

    fn norm(&mut self, x: View<'_, T>, weight: View<'_, T>, eps: f32, out: ViewMut<'_, O::Work>) {
        self.note("norm", 0.0, |o| o.norm(x, weight, eps, out));
    }

    fn norm_backward(
        &mut self,
        normed: Normed<'_, T>,
        d_out: View<'_, O::Work>,
        d_x: ViewMut<'_, O::Work>,
        add: bool,
        d_weight: ViewMut<'_, T>,
    ) {
        self.note("norm backward", 0.0, |o| o.norm_backward(normed, d_out, d_x, add, d_weight));
    }

    fn rope<E: Float>(
        &mut self,
        x: ViewMut<'_, E>,
        angles: View<'_, f32>,
        heads: usize,
        width: usize,
        length: usize,
        turn: Turn,
    ) {
        self.note("rope", 0.0, |o| Ops::<T>::rope(o, x, angles, heads, width, length, turn));
    }

    fn attention(
        &mut self,
        shape: AttentionShape,
        q: View<'_, T>,
        k: View<'_, T>,
        v: View<'_, T>,
        out: ViewMut<'_, T>,
        log_sums: ViewMut<'_, f32>,
    ) {
        self.note("attention", attention_flops(&shape, 2), |o| o.attention(shape, q, k, v, out, log_sums));
    }

    fn attention_backward(&mut self, shape: AttentionShape, a: AttentionBackward<'_, T, O::Work>) {
        self.note("attention backward", attention_flops(&shape, 5), |o| o.attention_backward(shape, a));
    }

    fn swiglu(&mut self, gate: View<'_, T>, up: View<'_, T>, out: ViewMut<'_, O::Work>) {
        self.note("swiglu", 0.0, |o| o.swiglu(gate, up, out));
    }

    fn swiglu_backward(&mut self, gate: ViewMut<'_, T>, up: ViewMut<'_, T>, d_out: ViewMut<'_, O::Work>) {
        self.note("swiglu backward", 0.0, |o| o.swiglu_backward(gate, up, d_out));
    }

    fn losses(&mut self, logits: ViewMut<'_, O::Work>, targets: View<'_, u32>, losses: ViewMut<'_, f32>) {
        self.note("cross-entropy", 0.0, |o| o.losses(logits, targets, losses));
    }

    fn cross_entropy<'a>(
        &mut self,
        logits: ViewMut<'a, O::Work>,
        targets: View<'_, u32>,
        losses: ViewMut<'_, f32>,
        room: ViewMut<'a, T>,
        scale: f32,
    ) -> View<'a, T> {
        self.note("cross-entropy", 0.0, |o| o.cross_entropy(logits, targets, losses, room, scale))
    }
}

fn measure<T: Float>(config: &LlamaConfig, rows: usize, length: usize, threads: usize, recompute: Recompute) {
    let accounts = Accounts::default();
    let model = Llama::<T>::new(config, rows, length, recompute, threads, &accounts);
    let model = model.unwrap_or_else(|e| panic!("{e}"));
    let table = Table::default();
    // SAFETY: each call is one of the inner kernels, with what the model gave.
    let mut model = unsafe { model.with_ops(|inner| Timed { inner, table: table.clone() }) };
    let units = config.units();
    let new = |start: bool| -> Vec<Vec<Buffer<T>>> {
        let tensor = |spec: &models::TensorSpec| {
            let mut values = vec![0.0; spec.len()];
            if start {
                init_range(spec, 1, 0..spec.len(), &mut values);
            }
            Buffer::copy_of(&values.into_iter().map(T::from_f32).collect::<Vec<T>>())
        };
        units.iter().map(|u| u.tensors.iter().map(tensor).collect()).collect()
    };
    let (weights, mut gradients) = (new(true), new(false));
    let n = rows * length;
    let tokens: Vec<u32> = (0..=n as u64).map(|i| (i * 2_654_435_761 % config.vocab as u64) as u32).collect();
    let batch = Batch { tokens: &tokens[..n], targets: &tokens[1..], rows, length };
    let last = units.len() - 1;
    let steps = 15;
    let mut times = Vec::new();
    for step in 0..steps + 2 {
        if step == 2 {
            table.lock().expect("one thread").clear();
        }
        let start = Instant::now();
        model.begin(&batch, 1.0 / n as f32);
        (0..last).for_each(|u| model.forward_unit(u, &weights));
        (0..=last).rev().for_each(|u| model.backward_unit(u, &weights, &mut gradients));
        times.push(start.elapsed().as_secs_f64());
    }
    let mut times = times.split_off(2);
    times.sort_by(f64::total_cmp);
    let table = table.lock().expect("one thread");
    let products = || table.iter().filter(|(name, _)| name.starts_with("product"));
    let (seconds, flops) = products().fold((0.0, 0.0), |(s, f), (_, row)| (s + row.seconds, f + row.flops));
    println!(
        "{} rows {rows} length {length} threads {threads} {recompute:?}: median {:.2} ms, least {:.2} ms, \
         {:.0} tokens/s; products {:.2} ms at {:.1} GFLOP/s; loss {:.4}; activations {:.1} MB, workspace {:.1} MB",
        T::DTYPE,
        times[steps / 2] * 1e3,
        times[0] * 1e3,
        n as f64 / times[steps / 2],
        seconds * 1e3 / steps as f64,
        flops / seconds / 1e9,
        model.loss() / n as f64,
        accounts.activations.bytes() as f64 / 1e6,
        accounts.workspace.bytes() as f64 / 1e6,
    );
    for (name, Row { seconds, calls, flops, best }) in &*table {
        let rate = match *flops > 0.0 {
            true => format!("{:8.1} GFLOP/s, {:8.1} at best", flops / seconds / 1e9, best / 1e9),
            false => String::new(),
        };
        println!("  {name:44} {:9.3} ms {:5} calls {rate}", seconds * 1e3 / steps as f64, calls / steps);
    }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let get = |i: usize, default: &str| args.get(i).cloned().unwrap_or(default.to_string());
    let config = LlamaConfig::preset(&get(0, "32m")).unwrap_or_else(|e| panic!("{e}"));
    let number = |i, default| get(i, default).parse().unwrap_or_else(|e| panic!("argument {i}: {e}"));
    let (rows, length, threads) = (number(2, "4"), number(3, "256"), number(4, "1"));
    let recompute = if get(5, "none") == "full" { Recompute::Full } else { Recompute::None };
    match get(1, "f32").as_str() {
        "bf16" => measure::<bf16>(&config, rows, length, threads, recompute),
        _ => measure::<f32>(&config, rows, length, threads, recompute),
    }
}
