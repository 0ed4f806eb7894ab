//! Logits, loss and every gradient against PyTorch and transformers, in f32 and bf16, for each model of
//! `reference/`.

use crate::reference::{Reference, VARIANTS, distance};
use collectives::{Float, View, ViewMut, bf16, f16};
use models::{
    Accounts, Batch, Gradients, Llama, LlamaConfig, MatmulPrecision, Model, Recompute, Weights,
    has_faster_products,
};
use std::collections::BTreeMap;

/// Tensors by unit and place, as weights or as gradients.
struct Tensors<T> {
    units: Vec<Vec<Vec<T>>>,
    ready: Vec<(usize, usize)>,
}

impl<T: Float> Tensors<T> {
    fn filled(config: &LlamaConfig, value: f32) -> Self {
        let tensor = |len| vec![T::from_f32(value); len];
        let units = config.units();
        let units = units.iter().map(|u| u.tensors.iter().map(|t| tensor(t.len())).collect()).collect();
        Tensors { units, ready: vec![] }
    }
}

impl<T: Float> Weights<T> for Tensors<T> {
    fn tensor(&self, unit: usize, tensor: usize) -> View<'_, T> {
        self.units[unit][tensor].as_slice().into()
    }
}

impl<T: Float> Gradients<T> for Tensors<T> {
    fn tensor(&mut self, unit: usize, tensor: usize) -> ViewMut<'_, T> {
        assert!(!self.ready.contains(&(unit, tensor)), "a contribution after the last");
        self.units[unit][tensor].as_mut_slice().into()
    }

    fn ready(&mut self, unit: usize, tensor: usize) {
        assert!(!self.ready.contains(&(unit, tensor)), "ready twice");
        self.ready.push((unit, tensor));
    }
}

/// Everything that the model computes for batch 0: loss, logits, gradients by name.
struct Computed {
    loss: f64,
    tensors: BTreeMap<String, Vec<f32>>,
}

fn compute<T: Float>(reference: &Reference, recompute: Recompute, threads: usize) -> Computed {
    compute_to::<T>(reference, recompute, threads, MatmulPrecision::Highest)
}

fn compute_to<T: Float>(
    reference: &Reference,
    recompute: Recompute,
    threads: usize,
    precision: MatmulPrecision,
) -> Computed {
    compute_with::<T>(reference, recompute, threads, precision, 1.0)
}

fn compute_with<T: Float>(
    reference: &Reference,
    recompute: Recompute,
    threads: usize,
    precision: MatmulPrecision,
    loss_scale: f32,
) -> Computed {
    let checkpoint = reference.checkpoint();
    let config = checkpoint.config();
    let units = config.units();
    let mut weights = Tensors::<T>::filled(config, 0.0);
    for (unit, spec) in weights.units.iter_mut().zip(&units) {
        for (values, spec) in unit.iter_mut().zip(&spec.tensors) {
            checkpoint.read_range(&spec.name, 0..spec.len(), values).unwrap();
        }
    }
    let tokens = reference.batch(0);
    let (rows, length) = (tokens.rows, tokens.length);
    let batch = Batch { tokens: &tokens.inputs, targets: &tokens.targets, rows, length };
    let model = Llama::<T>::new(config, rows, length, recompute, threads, &Accounts::default()).unwrap();
    let mut model = model.precise_to(precision);
    assert_eq!(model.units(), units);
    let last = units.len() - 1;

    model.begin(&batch, 1.0);
    (0..last).for_each(|u| model.forward_unit(u, &weights));
    let mut logits = vec![0.0; rows * length * config.vocab];
    for (position, out) in logits.chunks_mut(config.vocab).enumerate() {
        model.logits(position, &weights, out);
    }
    model.forward_unit(last, &weights);
    let evaluated = model.loss();

    // What is in a gradient before its first contribution must not matter.
    let mut gradients = Tensors::<T>::filled(config, f32::NAN);
    model.begin(&batch, loss_scale / (rows * length) as f32);
    (0..last).for_each(|u| model.forward_unit(u, &weights));
    (0..=last).rev().for_each(|u| model.backward_unit(u, &weights, &mut gradients));
    let loss = model.loss();
    assert_eq!(evaluated.to_bits(), loss.to_bits(), "evaluation and training have the same loss");
    assert_eq!(gradients.ready.len(), units.iter().map(|u| u.tensors.len()).sum::<usize>());

    let mut tensors = BTreeMap::from([("logits".to_string(), logits)]);
    for (values, spec) in gradients.units.iter().zip(&units).flat_map(|(v, u)| v.iter().zip(&u.tensors)) {
        let values = values.iter().map(|x| x.to_f32()).collect();
        tensors.insert(format!("grad.{}", spec.name), values);
    }
    Computed { loss: loss / (rows * length) as f64, tensors }
}

/// Of f16 numbers, whose gradients are those of a scaled loss.
fn compute_scaled(reference: &Reference) -> Computed {
    const SCALE: f32 = 4096.0;
    let mut computed = compute_with::<f16>(reference, Recompute::None, 1, MatmulPrecision::Highest, SCALE);
    let gradients = computed.tensors.iter_mut().filter(|(name, _)| name.starts_with("grad."));
    gradients.for_each(|(_, values)| values.iter_mut().for_each(|x| *x /= SCALE));
    computed
}

/// The bits of everything computed.
fn bits(computed: &Computed) -> Vec<u64> {
    let tensors = computed.tensors.values().flatten().map(|x| u64::from(x.to_bits()));
    tensors.chain([computed.loss.to_bits()]).collect()
}

#[test]
fn recomputation_and_threads_do_not_change_a_bit() {
    for name in VARIANTS {
        let reference = Reference::open(name);
        let (wide, half) =
            (compute::<f32>(&reference, Recompute::None, 1), compute::<bf16>(&reference, Recompute::None, 1));
        for (recompute, threads) in [(Recompute::Full, 1), (Recompute::None, 2), (Recompute::Full, 3)] {
            let again = compute::<f32>(&reference, recompute, threads);
            assert!(bits(&again) == bits(&wide), "{name} in f32, {recompute:?}, {threads} threads");
            let again = compute::<bf16>(&reference, recompute, threads);
            assert!(bits(&again) == bits(&half), "{name} in bf16, {recompute:?}, {threads} threads");
        }
    }
}

fn check_f32(precision: MatmulPrecision, bound: f64) {
    for name in VARIANTS {
        let reference = Reference::open(name);
        let computed = compute_to::<f32>(&reference, Recompute::None, 1, precision);
        let mut worst = (0.0, "");
        for (key, values) in &computed.tensors {
            let far = distance(values, &reference.floats(&format!("f32.{key}")));
            assert!(far < bound, "{name}: {key} is {far:.1e} from PyTorch's");
            worst = if far > worst.0 { (far, key) } else { worst };
        }
        let loss = distance(&[computed.loss], &reference.doubles("f32.loss"));
        assert!(loss < 1e-5, "{name}: loss {loss}");
        println!("{name}: loss {loss:.1e}, at most {:.1e} in {}", worst.0, worst.1);
    }
}

#[test]
fn f32_agrees_with_pytorch() {
    check_f32(MatmulPrecision::Highest, 1e-5);
}

#[test]
fn f32_of_high_precision_agrees_with_pytorch() {
    check_f32(MatmulPrecision::High, 1e-4);
    let reference = Reference::open(VARIANTS[0]);
    let of = |threads, precision| bits(&compute_to::<f32>(&reference, Recompute::None, threads, precision));
    let high = of(1, MatmulPrecision::High);
    assert!(high == of(3, MatmulPrecision::High), "three threads");
    let differs = high != of(1, MatmulPrecision::Highest);
    assert_eq!(differs, has_faster_products(), "bits are lost where that is faster");
}

#[test]
fn bf16_is_within_twice_pytorch_s_own_distance() {
    for name in VARIANTS {
        let reference = Reference::open(name);
        let computed = compute::<bf16>(&reference, Recompute::None, 1);
        let (mut worst, mut sum) = ((0.0, ""), 0.0);
        for (key, values) in &computed.tensors {
            let exact = reference.floats(&format!("f32.{key}"));
            let ours = distance(values, &exact);
            let theirs = distance(&reference.floats(&format!("bf16.{key}")), &exact);
            assert!(
                ours <= 2.0 * theirs,
                "{name}: {key} is {ours:.1e} from f32, PyTorch's bf16 {theirs:.1e}"
            );
            worst = if ours / theirs > worst.0 { (ours / theirs, key) } else { worst };
            sum += ours / theirs;
        }
        let mean = sum / computed.tensors.len() as f64;
        println!("{name}: {mean:.2} of PyTorch's distance on average, at most {:.2} in {}", worst.0, worst.1);
    }
}

/// f16 has three bits more than bf16.
#[test]
fn f16_is_within_a_quarter_of_pytorch_s_distance_in_bf16() {
    for name in VARIANTS {
        let reference = Reference::open(name);
        for (key, values) in &compute_scaled(&reference).tensors {
            let exact = reference.floats(&format!("f32.{key}"));
            let ours = distance(values, &exact);
            let theirs = distance(&reference.floats(&format!("bf16.{key}")), &exact);
            assert!(
                ours <= theirs / 4.0,
                "{name}: {key} is {ours:.1e} from f32, PyTorch's bf16 {theirs:.1e}"
            );
        }
    }
}
