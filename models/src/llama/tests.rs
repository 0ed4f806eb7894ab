//! The whole model against a naive one in f64, and the promises about bits and memory.

use super::*;
use crate::config::{Rope, RopeScaling};
use crate::init::init_range;
use collectives::{Element, View, ViewMut, bf16};

/// Weights or gradients by unit and tensor.
#[derive(Clone, Debug, PartialEq)]
struct Tensors<T> {
    units: Vec<Vec<Vec<T>>>,
    ready: Vec<(usize, usize)>,
}

impl<T: Float> Tensors<T> {
    fn filled(units: &[Unit], value: f32) -> Self {
        let tensor = |t: &crate::TensorSpec| vec![T::from_f32(value); t.len()];
        let units = units.iter().map(|u| u.tensors.iter().map(tensor).collect()).collect();
        Tensors { units, ready: Vec::new() }
    }

    /// Larger than a trained model's, so that nothing is nearly linear, and no norm is all ones.
    fn random(units: &[Unit]) -> Self {
        let mut all = Tensors::filled(units, 0.0);
        for (unit, tensors) in units.iter().zip(&mut all.units) {
            for (spec, values) in unit.tensors.iter().zip(tensors) {
                let init = crate::Init::Normal(if spec.decay { 0.15 } else { 0.3 });
                let base = if spec.decay { 0.0 } else { 1.0 };
                let mut drawn = vec![0.0; spec.len()];
                init_range(&crate::TensorSpec { init, ..spec.clone() }, 7, 0..spec.len(), &mut drawn);
                *values = drawn.into_iter().map(|x| T::from_f32(base + x)).collect();
            }
        }
        all
    }

    fn wide(&self) -> Vec<Vec<Vec<f64>>> {
        let tensor = |t: &Vec<T>| t.iter().map(|x| f64::from(x.to_f32())).collect();
        self.units.iter().map(|u| u.iter().map(tensor).collect()).collect()
    }
}

impl<T: Element> Weights<T> for Tensors<T> {
    fn tensor(&self, unit: usize, tensor: usize) -> View<'_, T> {
        self.units[unit][tensor].as_slice().into()
    }
}

impl<T: Element> Gradients<T> for Tensors<T> {
    fn tensor(&mut self, unit: usize, tensor: usize) -> ViewMut<'_, T> {
        assert!(!self.ready.contains(&(unit, tensor)), "{unit}.{tensor} after it was ready");
        self.units[unit][tensor].as_mut_slice().into()
    }

    fn ready(&mut self, unit: usize, tensor: usize) {
        assert!(!self.ready.contains(&(unit, tensor)), "{unit}.{tensor} is ready twice");
        self.ready.push((unit, tensor));
    }
}

fn tokens(n: usize, vocab: usize, seed: u32) -> Vec<u32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) % vocab as u32
    };
    (0..n).map(|_| next()).collect()
}

struct Case {
    config: LlamaConfig,
    rows: usize,
    length: usize,
}

fn nano() -> LlamaConfig {
    LlamaConfig {
        layers: 2,
        hidden: 24,
        heads: 4,
        kv_heads: 2,
        head_dim: 6,
        ffn: 40,
        vocab: 37,
        context: 256,
        ..LlamaConfig::preset("nano").unwrap()
    }
}

fn scaled(scaling: RopeScaling) -> LlamaConfig {
    LlamaConfig { rope: Rope { theta: 10_000.0, scaling }, ..nano() }
}

fn cases() -> Vec<Case> {
    let llama3 = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 32,
    };
    let case = |config, rows, length| Case { config, rows, length };
    vec![
        case(nano(), 2, 7),
        case(nano(), 3, 1),
        case(nano(), 1, 65),
        case(LlamaConfig { tied: true, ..nano() }, 2, 9),
        case(scaled(RopeScaling::Linear { factor: 4.0 }), 1, 12),
        case(scaled(llama3), 1, 12),
        // One key/value head for all, wide heads, and more queries than one step of attention takes.
        case(LlamaConfig { kv_heads: 1, head_dim: 34, layers: 1, ..nano() }, 1, 130),
        case(LlamaConfig { kv_heads: 4, heads: 4, head_dim: 16, layers: 1, ..nano() }, 1, 33),
    ]
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// rows of x (n, k) times the transpose of w (m, k)
fn linear(x: &[Vec<f64>], w: &[f64]) -> Vec<Vec<f64>> {
    x.iter().map(|row| w.chunks(row.len()).map(|w| dot(row, w)).collect()).collect()
}

fn norm64(x: &[Vec<f64>], w: &[f64], eps: f64) -> Vec<Vec<f64>> {
    let row = |x: &Vec<f64>| {
        let scale = 1.0 / (dot(x, x) / x.len() as f64 + eps).sqrt();
        x.iter().zip(w).map(|(x, w)| x * scale * w).collect()
    };
    x.iter().map(row).collect()
}

fn rope64(config: &LlamaConfig, x: &mut [Vec<f64>], length: usize) {
    let d = config.head_dim;
    // The model's own frequencies are tested in rope.rs; here only how they are used.
    let mut angles = vec![0.0; length * d];
    rope::angles(&config.rope, length, d, &mut angles);
    for (i, row) in x.iter_mut().enumerate() {
        let angles = &angles[i % length * d..][..d];
        for head in row.chunks_mut(d) {
            for j in 0..d / 2 {
                let (c, s) = (f64::from(angles[j]), f64::from(angles[d / 2 + j]));
                let (a, b) = (head[j], head[d / 2 + j]);
                (head[j], head[d / 2 + j]) = (a * c - b * s, b * c + a * s);
            }
        }
    }
}

fn attention64(
    config: &LlamaConfig,
    q: &[Vec<f64>],
    k: &[Vec<f64>],
    v: &[Vec<f64>],
    length: usize,
) -> Vec<Vec<f64>> {
    let (d, group) = (config.head_dim, config.heads / config.kv_heads);
    let mut out = vec![vec![0.0; config.heads * d]; q.len()];
    for (i, out) in out.iter_mut().enumerate() {
        let start = i / length * length;
        for head in 0..config.heads {
            let own = &q[i][head * d..][..d];
            let at = head / group * d;
            let scores: Vec<f64> =
                (start..=i).map(|j| dot(own, &k[j][at..at + d]) / (d as f64).sqrt()).collect();
            let largest = scores.iter().copied().fold(f64::MIN, f64::max);
            let total: f64 = scores.iter().map(|s| (s - largest).exp()).sum();
            for (j, s) in scores.iter().enumerate() {
                let p = (s - largest).exp() / total;
                for c in 0..d {
                    out[head * d + c] += p * v[start + j][at + c];
                }
            }
        }
    }
    out
}

/// Logits of every token, by the definition.
fn logits64(config: &LlamaConfig, w: &[Vec<Vec<f64>>], tokens: &[u32], length: usize) -> Vec<Vec<f64>> {
    let (h, eps) = (config.hidden, f64::from(config.norm_eps));
    let add = |x: &mut [Vec<f64>], y: Vec<Vec<f64>>| {
        x.iter_mut().flatten().zip(y.into_iter().flatten()).for_each(|(x, y)| *x += y);
    };
    let mut x: Vec<Vec<f64>> = tokens.iter().map(|&t| w[0][0][t as usize * h..][..h].to_vec()).collect();
    for w in &w[1..=config.layers] {
        let normed = norm64(&x, &w[0], eps);
        let (mut q, mut k) = (linear(&normed, &w[1]), linear(&normed, &w[2]));
        rope64(config, &mut q, length);
        rope64(config, &mut k, length);
        let attended = attention64(config, &q, &k, &linear(&normed, &w[3]), length);
        add(&mut x, linear(&attended, &w[4]));
        let normed = norm64(&x, &w[5], eps);
        let mut gate = linear(&normed, &w[6]);
        for (g, u) in gate.iter_mut().flatten().zip(linear(&normed, &w[7]).into_iter().flatten()) {
            *g = *g / (1.0 + (-*g).exp()) * u;
        }
        add(&mut x, linear(&gate, &w[8]));
    }
    let head = &w[config.layers + 1];
    let normed = norm64(&x, &head[0], eps);
    linear(&normed, if config.tied { &w[0][0] } else { &head[1] })
}

fn loss64(logits: &[Vec<f64>], targets: &[u32]) -> f64 {
    let one = |(row, &t): (&Vec<f64>, &u32)| {
        let largest = row.iter().copied().fold(f64::MIN, f64::max);
        row.iter().map(|x| (x - largest).exp()).sum::<f64>().ln() + largest - row[t as usize]
    };
    logits.iter().zip(targets).map(one).sum()
}

struct Run<T> {
    loss: f64,
    evaluated: f64,
    gradients: Tensors<T>,
    logits: Vec<f32>,
}

/// The loss of one micro-batch, and the logits after its last token.
fn forward<T: Float>(
    model: &mut Llama<T>,
    weights: &Tensors<T>,
    rows: usize,
    length: usize,
    scale: f32,
) -> (f64, Vec<f32>) {
    let (n, vocab) = (rows * length, model.config.vocab);
    let (inputs, targets) = (tokens(n, vocab, 1), tokens(n, vocab, 2));
    model.begin(&Batch { tokens: &inputs, targets: &targets, rows, length }, scale);
    (0..model.units().len()).for_each(|unit| model.forward_unit(unit, weights));
    let (loss, mut logits) = (model.loss(), vec![0.0; vocab]);
    model.logits(n - 1, weights, &mut logits);
    (loss, logits)
}

/// One micro-batch; gradients start as NaN, which any `+=` before an `=` would keep.
fn run<T: Float>(
    model: &mut Llama<T>,
    weights: &Tensors<T>,
    rows: usize,
    length: usize,
    scale: f32,
) -> Run<T> {
    let (evaluated, logits) = forward(model, weights, rows, length, scale);
    let mut gradients = Tensors::filled(model.units(), f32::NAN);
    for unit in (0..model.units().len()).rev() {
        model.backward_unit(unit, weights, &mut gradients);
    }
    let tensors: usize = model.units().iter().map(|u| u.tensors.len()).sum();
    assert_eq!(gradients.ready.len(), tensors, "every tensor becomes ready");
    Run { loss: model.loss(), evaluated, gradients, logits }
}

fn model<T: Float>(
    config: &LlamaConfig,
    rows: usize,
    length: usize,
    recompute: Recompute,
    threads: usize,
) -> Llama<T> {
    Llama::new(config, rows, length, recompute, threads, &Accounts::default()).unwrap()
}

/// Relative error of the loss, of the logits and, the worst, of the derivatives.
fn errors<T: Float>(case: &Case) -> [f64; 3] {
    let Case { config, rows, length } = case;
    let (rows, length, n) = (*rows, *length, rows * length);
    let mut model = model::<T>(config, rows, length, Recompute::None, 1);
    let weights = Tensors::<T>::random(model.units());
    let got = run(&mut model, &weights, rows, length, 0.5);
    assert_eq!(got.loss, got.evaluated);
    let (inputs, targets) = (tokens(n, config.vocab, 1), tokens(n, config.vocab, 2));
    let mut wide = weights.wide();
    let exact = logits64(config, &wide, &inputs, length);
    let loss = loss64(&exact, &targets);
    let last = &exact[n - 1];
    let differences: Vec<f64> = last.iter().zip(&got.logits).map(|(e, &g)| e - f64::from(g)).collect();
    let logits = (dot(&differences, &differences) / dot(last, last)).sqrt();
    // Central differences of the naive loss along the gradient itself (its norm), and along a random direction.
    let total: f64 = got.gradients.wide().iter().flatten().map(|g| dot(g, g)).sum();
    let mut worst = 0f64;
    for unit in 0..wide.len() {
        for tensor in 0..wide[unit].len() {
            let gradient: Vec<f64> =
                got.gradients.units[unit][tensor].iter().map(|g| f64::from(g.to_f32())).collect();
            let size = dot(&gradient, &gradient).sqrt();
            assert!(size.is_finite(), "{unit}.{tensor}");
            let mut noise = vec![0.0; gradient.len()];
            let spec = crate::TensorSpec {
                init: crate::Init::Normal(1.0),
                ..model.units()[unit].tensors[tensor].clone()
            };
            init_range(&spec, 11, 0..spec.len(), &mut noise);
            let noise: Vec<f64> = noise.into_iter().map(f64::from).collect();
            for direction in [&gradient, &noise] {
                let step = 1e-5 / dot(direction, direction).sqrt().max(1e-30);
                let start = wide[unit][tensor].clone();
                let mut at = |sign: f64| {
                    for ((w, s), d) in wide[unit][tensor].iter_mut().zip(&start).zip(direction) {
                        *w = s + sign * step * d;
                    }
                    loss64(&logits64(config, &wide, &inputs, length), &targets)
                };
                let numeric = (at(1.0) - at(-1.0)) / (2.0 * step) * 0.5;
                wide[unit][tensor] = start;
                let analytic = dot(&gradient, direction);
                // With sequences of one token the gradients of queries and keys are zero, as far as an f32 can tell beside all
                // others: to some 1e-7 of them.
                let size = size.max(1e-2 * total.sqrt());
                worst = worst
                    .max((numeric - analytic).abs() / (size * dot(direction, direction).sqrt().max(1e-30)));
            }
        }
    }
    [(got.loss - loss).abs() / loss, logits, worst]
}

#[test]
fn f32_agrees_with_a_naive_model_and_its_finite_differences() {
    for case in cases() {
        let [loss, logits, gradients] = errors::<f32>(&case);
        let at = format!("{:?} {} x {}", case.config, case.rows, case.length);
        assert!(loss < 1e-6 && logits < 1e-5 && gradients < 1e-5, "{loss} {logits} {gradients} {at}");
    }
}

#[test]
fn bf16_agrees_with_a_naive_model_within_its_rounding() {
    for case in cases() {
        let [loss, logits, gradients] = errors::<bf16>(&case);
        let at = format!("{:?} {} x {}", case.config, case.rows, case.length);
        assert!(loss < 1e-2 && logits < 3e-2 && gradients < 5e-2, "{loss} {logits} {gradients} {at}");
    }
}

fn same<T: Float>(a: &Run<T>, b: &Run<T>) -> bool {
    let bits = |run: &Run<T>| -> Vec<u32> {
        run.gradients.units.iter().flatten().flatten().map(|x| x.to_f32().to_bits()).collect()
    };
    a.loss.to_bits() == b.loss.to_bits() && a.logits == b.logits && bits(a) == bits(b)
}

fn bits_do_not_depend<T: Float>() {
    for case in cases() {
        let Case { config, rows, length } = &case;
        let mut first = model::<T>(config, *rows, *length, Recompute::None, 1);
        let weights = Tensors::random(first.units());
        let once = run(&mut first, &weights, *rows, *length, 0.5);
        assert!(same(&once, &run(&mut first, &weights, *rows, *length, 0.5)), "run to run");
        for (recompute, threads) in [(Recompute::Full, 1), (Recompute::None, 2), (Recompute::Full, 3)] {
            let mut other = model::<T>(config, *rows, *length, recompute, threads);
            let got = run(&mut other, &weights, *rows, *length, 0.5);
            assert!(same(&once, &got), "{config:?} {recompute:?} {threads}");
        }
        // Built for more than the micro-batch.
        let mut large = model::<T>(config, rows + 1, length + 3, Recompute::None, 1);
        run(&mut large, &weights, rows + 1, length + 3, 1.0);
        assert!(same(&once, &run(&mut large, &weights, *rows, *length, 0.5)), "{config:?} in a larger model");
    }
}

#[test]
fn bits_depend_neither_on_recomputation_nor_threads_nor_room() {
    bits_do_not_depend::<f32>();
    bits_do_not_depend::<bf16>();
}

#[test]
fn losses_are_the_same_without_a_backward() {
    for Case { config, rows, length } in cases() {
        let mut whole = model::<bf16>(&config, rows, length, Recompute::None, 1);
        let mut alone = model::<bf16>(&config, rows, length, Recompute::NoBackward, 2);
        let weights = Tensors::random(whole.units());
        let once = run(&mut whole, &weights, rows, length, 0.5);
        // A second time in the same memory.
        for _ in 0..2 {
            let (loss, logits) = forward(&mut alone, &weights, rows, length, 0.5);
            assert_eq!((loss.to_bits(), &logits), (once.loss.to_bits(), &once.logits), "{config:?}");
        }
    }
}

#[test]
fn several_chunks_of_logits_give_the_gradients_of_one() {
    let config = LlamaConfig { layers: 1, tied: true, ..nano() };
    let (rows, length) = (3, 200);
    let mut whole = model::<f32>(&config, rows, length, Recompute::None, 1);
    let weights = Tensors::random(whole.units());
    let once = run(&mut whole, &weights, rows, length, 0.5);
    let mut chunked = model::<f32>(&config, rows, length, Recompute::None, 1);
    chunked.shape.chunk = 256;
    let got = run(&mut chunked, &weights, rows, length, 0.5);
    assert_eq!(once.loss, got.loss);
    for (a, b) in once.gradients.units.iter().flatten().zip(got.gradients.units.iter().flatten()) {
        let largest = a.iter().fold(0f32, |m, x| m.max(x.abs()));
        assert!(a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-5 * largest));
    }
}

#[test]
fn what_is_held_is_what_was_predicted() {
    for case in cases() {
        for (recompute, threads) in [(Recompute::None, 1), (Recompute::Full, 3), (Recompute::NoBackward, 1)] {
            let Case { config, rows, length } = &case;
            let accounts = Accounts::default();
            let held = |a: &Accounts| Footprint {
                activations: a.activations.bytes(),
                workspace: a.workspace.bytes(),
                ..Footprint::default()
            };
            let model = Llama::<bf16>::new(config, *rows, *length, recompute, threads, &accounts).unwrap();
            assert_eq!(
                held(&accounts),
                footprint(config, *rows, *length, DType::Bf16, recompute, threads).unwrap()
            );
            drop(model);
            assert_eq!(held(&accounts), Footprint::default());
            let model = Llama::<f32>::new(config, *rows, *length, recompute, threads, &accounts).unwrap();
            assert_eq!(
                held(&accounts),
                footprint(config, *rows, *length, DType::F32, recompute, threads).unwrap()
            );
            drop(model);
        }
        // Of f32 the gradient of logits is where they were, of bf16 beside them.
        let Case { config, rows, length } = &case;
        let d_logits = |dtype| {
            let of = |recompute| footprint(config, *rows, *length, dtype, recompute, 1).unwrap().workspace;
            of(Recompute::Full) - of(Recompute::NoBackward)
        };
        let chunk = Shape::new(config, *rows, *length, Recompute::Full, 1).unwrap().chunk;
        let beside = chunk * config.vocab * size_of::<bf16>();
        assert_eq!(d_logits(DType::Bf16) - d_logits(DType::F32), beside);
    }
}

#[test]
fn memory_that_the_system_does_not_have_is_an_error() {
    let config = LlamaConfig::preset("llama-3.1-405b").unwrap();
    let accounts = Accounts::default();
    // Of activations alone 2 PB, and no processor has so many addresses.
    let refused = Llama::<bf16>::new(&config, 1 << 11, 1 << 17, Recompute::None, 1, &accounts).err().unwrap();
    let text = refused.to_string();
    assert!(text.contains("the system has no more") && text.contains("activations need"), "{text}");
    assert_eq!((accounts.activations.bytes(), accounts.workspace.bytes()), (0, 0));
}

#[test]
fn what_cannot_be_built_is_an_error() {
    let config = nano();
    // Few parameters and few tokens by themselves, whose activations have more bytes than there are numbers.
    let wide = LlamaConfig {
        hidden: 2,
        layers: 16,
        heads: 1,
        kv_heads: 1,
        head_dim: 2,
        ffn: 1 << 30,
        context: 1 << 28,
        ..config.clone()
    };
    let most = footprint(&wide, 1, 3_947_580, DType::F32, Recompute::None, 1).unwrap();
    assert!(most.activations as u128 > 16 * 3_947_580 * (2 << 30) * 4, "{most:?}");
    let build = |config: &LlamaConfig, rows, length, threads| {
        let accounts = Accounts::default();
        Llama::<f32>::new(config, rows, length, Recompute::None, threads, &accounts)
            .err()
            .map(|e| e.to_string())
    };
    assert_eq!(build(&config, 1, 8, 1), None);
    let cases = [
        (build(&config, 0, 8, 1), "0 sequences of 8"),
        (build(&config, 1, 0, 1), "1 sequences of 0"),
        (build(&config, 1, 257, 1), "context is 256"),
        (build(&config, usize::MAX, 8, 1), "2^28"),
        (build(&wide, 1, 1 << 28, 1), "at most 3947580"),
        (build(&config, 1, 8, 0), "0 compute threads"),
        (build(&LlamaConfig { heads: 3, ..config.clone() }, 1, 8, 1), "3 heads"),
        (build(&LlamaConfig { head_dim: 514, ..config.clone() }, 1, 8, 1), "at most 512"),
        (footprint(&config, 1, 8, DType::I32, Recompute::None, 1).err().map(|e| e.to_string()), "i32"),
    ];
    for (error, expected) in cases {
        assert!(error.as_ref().is_some_and(|e| e.contains(expected)), "{error:?} {expected}");
    }
}
