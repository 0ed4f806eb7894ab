//! Ten AdamW steps agree with PyTorch's on the same weights and batches, on one rank and divided over several,
//! and with rows that are added up one after the other.

use crate::reference::{Reference, Tokens, VARIANTS, distance};
use collectives::{Communicator, Float, Options, bf16};
use models::{Batch, Llama, Recompute};
use zero::{AdamW, Batches, Config, Ledger, NoBatch, Stage, Trainer};

/// The rows of a batch that one rank takes, one micro-batch after the other.
struct Share {
    tokens: Tokens,
    rank: usize,
    world: usize,
    accumulate: usize,
}

impl Batches for Share {
    fn micro_batch(&mut self, index: usize) -> Result<Batch<'_>, NoBatch> {
        let rows = self.tokens.rows / (self.world * self.accumulate);
        let part = rows * self.tokens.length;
        let first = (self.rank * self.accumulate + index) * part;
        let range = first..first + part;
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

/// A trainer of the reference's weights, for batches of so many rows.
fn start<T: Float>(reference: &Reference, rows: usize, comm: Communicator, config: &Config) -> Trainer<T> {
    let (checkpoint, ledger) = (reference.checkpoint(), Ledger::default());
    let (length, accounts) = (reference.batch(0).length, ledger.of_model());
    let model = Llama::new(checkpoint.config(), rows, length, Recompute::None, 1, &accounts).unwrap();
    let mut source = |spec: &models::TensorSpec, range: std::ops::Range<usize>, out: &mut [f32]| {
        checkpoint.read_range(&spec.name, range, out).map_err(|e| e.to_string())
    };
    Trainer::new(Box::new(model), comm, config, ledger, &mut source).unwrap()
}

/// What each rank comes to.
fn on_ranks<R: Send>(world: usize, run: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
    Communicator::on_threads(world, Options::default(), run)
}

/// Ranks, stage, and micro-batches that each rank adds up: a batch of two rows is one step however it is divided.
const WAYS: [(usize, u8, usize); 4] = [(1, 0, 1), (2, 3, 1), (1, 0, 2), (1, 3, 2)];

fn train<T: Float>(variant: &str, (world, stage, accumulate): (usize, u8, usize)) -> Trace {
    let run = |comm: Communicator| {
        let reference = Reference::open(variant);
        let o = reference.optimizer();
        let config = Config {
            stage: Stage::try_from(stage).unwrap(),
            accumulate,
            adamw: AdamW {
                beta1: o.beta1 as f32,
                beta2: o.beta2 as f32,
                eps: o.eps as f32,
                weight_decay: o.weight_decay as f32,
            },
            clip: Some(o.clip as f32),
            ..Config::default()
        };
        let (rank, world) = (comm.rank(), comm.size());
        let rows = reference.batch(0).rows / (world * accumulate);
        let mut trainer = start::<T>(&reference, rows, comm, &config);
        let mut trace = Trace { losses: vec![], norms: vec![], weights: vec![] };
        for step in 0..10 {
            let tokens = reference.batch(step % reference.batches());
            let mut share = Share { tokens, rank, world, accumulate };
            let step = trainer.step(&mut share, o.lr as f32).unwrap();
            assert_eq!(step.tokens, share.tokens.inputs.len());
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
    on_ranks(world, run).pop().unwrap()
}

#[test]
fn f32_follows_pytorch_within_1e_4() {
    for variant in VARIANTS {
        let reference = Reference::open(variant);
        for way in WAYS {
            let trace = train::<f32>(variant, way);
            for (what, ours, theirs) in [
                ("loss", &trace.losses, reference.doubles("f32.trace.loss")),
                ("norm", &trace.norms, reference.doubles("f32.trace.norm")),
            ] {
                for (step, (a, b)) in ours.iter().zip(&theirs).enumerate() {
                    let close = (a - b).abs() < 1e-4 * b.abs();
                    assert!(close, "{variant} {way:?} step {step}: {what} {a} for {b}");
                }
            }
            for (name, values) in &trace.weights {
                let key = format!("f32.final.{name}");
                if reference.has(&key) {
                    let d = distance(values, &reference.floats(&key));
                    assert!(d < 1e-4, "{variant} {way:?}: {name} ends {d} away");
                }
            }
        }
    }
}

#[test]
fn bf16_stays_within_twice_pytorchs_own_distance() {
    for variant in VARIANTS {
        let reference = Reference::open(variant);
        for way in WAYS {
            let trace = train::<bf16>(variant, way);
            for (what, ours) in [("loss", &trace.losses), ("norm", &trace.norms)] {
                let exact = reference.doubles(&format!("f32.trace.{what}"));
                let (mine, allowed) = (distance(ours, &exact), 2.0 * reference.bf16_distance(what));
                assert!(mine <= allowed, "{variant} {way:?}: {what} is {mine} away, {allowed} allowed");
            }
        }
    }
}

/// What a sample is drawn from, at every position of every row.
#[test]
fn logits_of_a_divided_model_are_pytorchs() {
    for variant in VARIANTS {
        let reference = Reference::open(variant);
        let Tokens { rows, length, inputs, targets } = reference.batch(0);
        let batch = Batch { tokens: &inputs, targets: &targets, rows, length };
        let theirs = reference.floats("f32.logits");
        let vocab = theirs.len() / (rows * length);
        let of_ranks = on_ranks(2, |comm| {
            let mut trainer = start::<f32>(&reference, rows, comm, &Config::default());
            let mut logits = vec![f32::NAN; theirs.len()];
            for (position, out) in logits.chunks_mut(vocab).enumerate() {
                trainer.logits(&batch, position, out).unwrap();
            }
            logits
        });
        for (position, theirs) in theirs.chunks(vocab).enumerate() {
            for (rank, logits) in of_ranks.iter().enumerate() {
                let far = distance(&logits[position * vocab..][..vocab], theirs);
                assert!(far < 1e-5, "{variant}: position {position} is {far} away on rank {rank}");
            }
        }
    }
}
