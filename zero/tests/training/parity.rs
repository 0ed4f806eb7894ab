//! Ten AdamW steps agree with PyTorch's on the same weights and batches, on one rank and divided over several.

use crate::reference::{Reference, Tokens, VARIANTS, distance};
use collectives::{Communicator, Float, bf16};
use models::{Batch, Llama, Recompute};
use zero::{AdamW, Batches, Config, Ledger, NoBatch, Stage, Trainer};

/// The rows of a batch that one rank takes.
struct Share {
    tokens: Tokens,
    rank: usize,
    world: usize,
}

impl Batches for Share {
    fn micro_batch(&mut self, _index: usize) -> Result<Batch<'_>, NoBatch> {
        let rows = self.tokens.rows / self.world;
        let part = rows * self.tokens.length;
        let range = self.rank * part..(self.rank + 1) * part;
        Ok(Batch {
            tokens: &self.tokens.inputs[range.clone()],
            targets: &self.tokens.targets[range],
            rows,
            length: self.tokens.length,
        })
    }
}

struct Trace {
    losses: Vec<f64>,
    norms: Vec<f64>,
    weights: Vec<(String, Vec<f32>)>,
}

fn train<T: Float>(variant: &str, world: usize, stage: u8) -> Trace {
    let run = |comm: Communicator| {
        let reference = Reference::open(variant);
        let checkpoint = reference.checkpoint();
        let o = reference.optimizer();
        let config = Config {
            stage: Stage::try_from(stage).unwrap(),
            adamw: AdamW {
                beta1: o.beta1 as f32,
                beta2: o.beta2 as f32,
                eps: o.eps as f32,
                weight_decay: o.weight_decay as f32,
            },
            clip: Some(o.clip as f32),
            ..Config::default()
        };
        let Tokens { rows, length, .. } = reference.batch(0);
        let ledger = Ledger::default();
        let accounts = ledger.of_model();
        let model = Llama::<T>::new(checkpoint.config(), rows / world, length, Recompute::None, 1, &accounts)
            .unwrap();
        let mut source = |spec: &models::TensorSpec, range: std::ops::Range<usize>, out: &mut [f32]| {
            checkpoint.read_range(&spec.name, range, out).map_err(|e| e.to_string())
        };
        let (rank, world) = (comm.rank(), comm.size());
        let mut trainer = Trainer::new(Box::new(model), comm, &config, ledger, &mut source).unwrap();
        let mut trace = Trace { losses: vec![], norms: vec![], weights: vec![] };
        for step in 0..10 {
            let tokens = reference.batch(step % reference.batches());
            let step = trainer.step(&mut Share { tokens, rank, world }, o.lr as f32).unwrap();
            trace.losses.push(step.loss);
            trace.norms.push(step.grad_norm);
        }
        trainer
            .export(Some(&mut |spec, values| {
                trace.weights.push((spec.name.clone(), values.iter().map(|w| w.to_f32()).collect()));
                Ok(())
            }))
            .unwrap();
        trace
    };
    std::thread::scope(|scope| {
        let ranks = Communicator::threads(world).into_iter();
        let handles: Vec<_> = ranks.map(|comm| scope.spawn(move || run(comm))).collect();
        handles.into_iter().map(|h| h.join().unwrap()).next_back().unwrap()
    })
}

#[test]
fn f32_follows_pytorch_within_1e_4() {
    for variant in VARIANTS {
        let reference = Reference::open(variant);
        for (world, stage) in [(1, 0), (2, 3)] {
            let trace = train::<f32>(variant, world, stage);
            for (what, ours, theirs) in [
                ("loss", &trace.losses, reference.doubles("f32.trace.loss")),
                ("norm", &trace.norms, reference.doubles("f32.trace.norm")),
            ] {
                for (step, (a, b)) in ours.iter().zip(&theirs).enumerate() {
                    assert!((a - b).abs() < 1e-4 * b.abs(), "{variant} step {step}: {what} {a} for {b}");
                }
            }
            for (name, values) in &trace.weights {
                let key = format!("f32.final.{name}");
                if reference.has(&key) {
                    let d = distance(values, &reference.floats(&key));
                    assert!(d < 1e-4, "{variant}: {name} ends {d} away");
                }
            }
        }
    }
}

#[test]
fn bf16_stays_within_twice_pytorchs_own_distance() {
    for variant in VARIANTS {
        let reference = Reference::open(variant);
        for (world, stage) in [(1, 0), (2, 3)] {
            let trace = train::<bf16>(variant, world, stage);
            for (what, ours) in [("loss", &trace.losses), ("norm", &trace.norms)] {
                let exact = reference.doubles(&format!("f32.trace.{what}"));
                let (mine, allowed) = (distance(ours, &exact), 2.0 * reference.bf16_distance(what));
                assert!(
                    mine <= allowed,
                    "{variant} at {world} ranks: {what} is {mine} away, {allowed} allowed"
                );
            }
        }
    }
}
