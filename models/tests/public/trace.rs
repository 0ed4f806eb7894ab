//! Ten steps of AdamW against PyTorch, with the plainest optimizer that there is: the gradients of several batches,
//! the weight-decay flags of the tensors and the reference data itself are what is checked here.

use crate::reference::{Reference, VARIANTS, distance};
use collectives::{Float, View, ViewMut, bf16};
use models::{Accounts, Batch, Gradients, Llama, Model, Recompute, TensorSpec, Weights};

/// One vector per tensor, tensors of all units in order.
struct Flat<T> {
    tensors: Vec<Vec<T>>,
    first: Vec<usize>,
}

impl<T: Float> Weights<T> for Flat<T> {
    fn tensor(&self, unit: usize, tensor: usize) -> View<'_, T> {
        self.tensors[self.first[unit] + tensor].as_slice().into()
    }
}

impl<T: Float> Gradients<T> for Flat<T> {
    fn tensor(&mut self, unit: usize, tensor: usize) -> ViewMut<'_, T> {
        self.tensors[self.first[unit] + tensor].as_mut_slice().into()
    }

    fn ready(&mut self, _: usize, _: usize) {}
}

struct Trace {
    losses: Vec<f64>,
    norms: Vec<f64>,
    weights: Vec<(TensorSpec, Vec<f32>)>,
}

fn trace<T: Float>(reference: &Reference) -> Trace {
    let checkpoint = reference.checkpoint();
    let config = checkpoint.config();
    let units = config.units();
    let mut first = vec![0];
    units.iter().for_each(|u| first.push(first[first.len() - 1] + u.tensors.len()));
    let specs: Vec<TensorSpec> = units.into_iter().flat_map(|u| u.tensors).collect();
    let zeros = || specs.iter().map(|s| vec![0.0f32; s.len()]).collect::<Vec<_>>();
    let (mut master, mut m, mut v) = (zeros(), zeros(), zeros());
    for (values, spec) in master.iter_mut().zip(&specs) {
        checkpoint.read_range(&spec.name, 0..spec.len(), values).unwrap();
    }
    let low = |all: &[Vec<f32>]| all.iter().map(|t| t.iter().map(|&x| T::from_f32(x)).collect()).collect();
    let mut gradients = Flat::<T> { tensors: low(&master), first: first.clone() };
    let batch = reference.batch(0);
    let mut model =
        Llama::<T>::new(config, batch.rows, batch.length, Recompute::None, 1, &Accounts::default()).unwrap();
    let settings = reference.optimizer();
    let (mut losses, mut norms) = (vec![], vec![]);
    for step in 0..10 {
        let weights = Flat::<T> { tensors: low(&master), first: first.clone() };
        let tokens = reference.batch(step % reference.batches());
        let (rows, length) = (tokens.rows, tokens.length);
        let batch = Batch { tokens: &tokens.inputs, targets: &tokens.targets, rows, length };
        model.begin(&batch, 1.0 / (rows * length) as f32);
        let last = first.len() - 2;
        (0..last).for_each(|u| model.forward_unit(u, &weights));
        (0..=last).rev().for_each(|u| model.backward_unit(u, &weights, &mut gradients));
        losses.push(model.loss() / (rows * length) as f64);

        let square = |x: &T| f64::from(x.to_f32()).powi(2);
        let norm = gradients.tensors.iter().flatten().map(square).sum::<f64>().sqrt();
        norms.push(norm);
        let scale = (settings.clip / (norm + 1e-6)).min(1.0);
        let correction = |beta: f64| 1.0 - beta.powi(step as i32 + 1);
        let (b1, b2) = (settings.beta1, settings.beta2);
        for (i, spec) in specs.iter().enumerate() {
            let decay = if spec.decay { settings.lr * settings.weight_decay } else { 0.0 };
            for (j, g) in gradients.tensors[i].iter().enumerate() {
                let g = f64::from(g.to_f32()) * scale;
                let (m, v, w) = (&mut m[i][j], &mut v[i][j], &mut master[i][j]);
                *m = (b1 * f64::from(*m) + (1.0 - b1) * g) as f32;
                *v = (b2 * f64::from(*v) + (1.0 - b2) * g * g) as f32;
                let (m, v) = (f64::from(*m) / correction(b1), f64::from(*v) / correction(b2));
                *w = (f64::from(*w) * (1.0 - decay) - settings.lr * m / (v.sqrt() + settings.eps)) as f32;
            }
        }
    }
    Trace { losses, norms, weights: specs.into_iter().zip(master).collect() }
}

#[test]
fn f32_follows_pytorch() {
    for name in VARIANTS {
        let reference = Reference::open(name);
        let trace = trace::<f32>(&reference);
        let losses = distance(&trace.losses, &reference.doubles("f32.trace.loss"));
        let norms = distance(&trace.norms, &reference.doubles("f32.trace.norm"));
        println!("{name}: losses {losses:.1e}, norms {norms:.1e}");
        assert!(losses < 1e-4 && norms < 1e-4, "{name}: losses {losses:.1e}, norms {norms:.1e}");
        for (spec, weights) in &trace.weights {
            let key = format!("f32.final.{}", spec.name);
            if reference.has(&key) {
                let far = distance(weights, &reference.floats(&key));
                assert!(far < 1e-4, "{name}: {} ends {far:.1e} from PyTorch's", spec.name);
            }
        }
    }
}

#[test]
fn bf16_stays_within_twice_pytorch_s_own_distance() {
    for name in VARIANTS {
        let reference = Reference::open(name);
        let trace = trace::<bf16>(&reference);
        for (what, ours) in [("loss", &trace.losses), ("norm", &trace.norms)] {
            let exact = reference.doubles(&format!("f32.trace.{what}"));
            let theirs = reference.bf16_distance(what);
            let ours = distance(ours, &exact);
            println!("{name}: {what} {:.2} of PyTorch's distance", ours / theirs);
            assert!(ours <= 2.0 * theirs, "{name}: {what} {ours:.1e} from f32, PyTorch's bf16 {theirs:.1e}");
        }
    }
}
