//! A toy model whose gradients depend on weights, data and position, so that any mistake in gathering,
//! reducing, accumulating or publishing changes the bits; and a run of it on ranks as threads.

use collectives::bootstrap::{Identity, shm_group};
use collectives::{Communicator, Float, Options};
use models::{Batch, Gradients, Init, Model, TensorSpec, Unit, Weights};
use std::sync::atomic::{AtomicUsize, Ordering};
use zero::{AdamW, Batches, Config, Ledger, NoBatch, Placement, Step, Trainer};

pub struct Toy {
    units: Vec<Unit>,
    tied: bool,
    token: u32,
    scale: f32,
    loss: f64,
    rounded: f32,
}

impl Toy {
    /// An embedding, `blocks` blocks and a head; awkward sizes on purpose.
    pub fn new(blocks: usize, tied: bool) -> Self {
        Toy::of_vocabulary(7001, blocks, tied)
    }

    /// The same with an embedding, and perhaps a head, of so many elements.
    pub fn of_vocabulary(table: usize, blocks: usize, tied: bool) -> Self {
        let tensor = |name: String, n: usize, decay| TensorSpec {
            name,
            shape: vec![n],
            decay,
            init: Init::Normal(1.0),
        };
        let mut units = vec![Unit {
            name: "embed".into(),
            tensors: vec![tensor("table".into(), table, true)],
            uses: vec![],
            backward_reads: false,
        }];
        for b in 0..blocks {
            units.push(Unit {
                name: format!("block.{b}"),
                tensors: vec![
                    tensor(format!("{b}.norm"), 33, false),
                    tensor(format!("{b}.w"), 2500, true),
                    tensor(format!("{b}.v"), 1024, true),
                ],
                uses: vec![],
                backward_reads: true,
            });
        }
        let mut head = vec![tensor("norm".into(), 33, false)];
        if !tied {
            head.push(tensor("out".into(), table, true));
        }
        let uses = if tied { vec![0] } else { vec![] };
        units.push(Unit { name: "head".into(), tensors: head, uses, backward_reads: true });
        Toy { units, tied, token: 0, scale: 0.0, loss: 0.0, rounded: 0.0 }
    }

    fn add_to_loss<T: Float>(&mut self, unit: usize, weights: &dyn Weights<T>) {
        for t in 0..self.units[unit].tensors.len() {
            for (i, w) in weights.tensor(unit, t).host().iter().enumerate() {
                self.loss += f64::from((w.to_f32() - noise(self.token, unit, t, i)).powi(2));
            }
        }
    }

    fn gradient<T: Float>(
        &self,
        unit: usize,
        tensor: usize,
        w: Option<&dyn Weights<T>>,
        add: bool,
        gradients: &mut dyn Gradients<T>,
    ) {
        let weights: Option<Vec<T>> = w.map(|w| w.tensor(unit, tensor).host().to_vec());
        let out = gradients.tensor(unit, tensor).host();
        assert_eq!(out.len(), self.units[unit].tensors[tensor].len());
        for (i, g) in out.iter_mut().enumerate() {
            let w = weights.as_ref().map_or(0.0, |w| w[i].to_f32());
            let x = (w - noise(self.token, unit, tensor, i)) * self.scale;
            *g = T::from_f32(if add { g.to_f32() + x } else { x });
        }
    }
}

pub fn noise(token: u32, unit: usize, tensor: usize, i: usize) -> f32 {
    let mut x = (token as u64) << 40 ^ (unit as u64) << 32 ^ (tensor as u64) << 28 ^ i as u64;
    for _ in 0..3 {
        x = (x ^ (x >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
    (x >> 40) as f32 / (1 << 24) as f32 - 0.5
}

impl<T: Float> Model<T> for Toy {
    fn units(&self) -> &[Unit] {
        &self.units
    }

    fn begin(&mut self, batch: &Batch<'_>, gradient_scale: f32) {
        (self.token, self.scale, self.loss) = (batch.tokens[0], gradient_scale, 0.0);
    }

    fn forward_unit(&mut self, unit: usize, weights: &dyn Weights<T>) {
        self.add_to_loss(unit, weights);
    }

    fn backward_unit(&mut self, unit: usize, weights: &dyn Weights<T>, gradients: &mut dyn Gradients<T>) {
        let head = self.units.len() - 1;
        if unit == head {
            self.add_to_loss(unit, weights);
            if self.tied {
                self.gradient(0, 0, Some(weights), false, gradients);
            }
        }
        for t in (0..self.units[unit].tensors.len()).rev() {
            let weights = (unit != 0).then_some(weights);
            self.gradient(unit, t, weights, unit == 0 && self.tied, gradients);
            gradients.ready(unit, t);
        }
    }

    fn losses(&mut self) -> &[f32] {
        self.rounded = self.loss as f32;
        std::slice::from_ref(&self.rounded)
    }

    fn loss(&mut self) -> f64 {
        self.loss
    }

    fn logits(&mut self, _position: usize, _weights: &dyn Weights<T>, _out: &mut [f32]) {}
}

/// Micro-batch `a` of rank `r` of step `k` is named by one token.
pub struct Numbers {
    step: usize,
    rank: usize,
    world: usize,
    accumulate: usize,
    token: [u32; 1],
}

impl Numbers {
    pub fn new(step: usize, rank: usize, world: usize, accumulate: usize) -> Self {
        Numbers { step, rank, world, accumulate, token: [0] }
    }
}

impl Batches for Numbers {
    fn micro_batch(&mut self, index: usize) -> Result<Batch<'_>, NoBatch> {
        self.token = [((self.step * self.accumulate + index) * self.world + self.rank) as u32];
        Ok(Batch { tokens: &self.token, targets: &self.token, rows: 1, length: 1 })
    }
}

/// What must not depend on how the run was divided.
#[derive(Debug, PartialEq)]
pub struct Trace {
    pub losses: Vec<u64>,
    pub norms: Vec<u64>,
    pub evaluation: u32,
    pub weights: Vec<u32>,
}

/// One rank's run.
pub struct Ran {
    pub trace: Trace,
    pub held: zero::Memory,
    pub predicted: zero::Memory,
    pub steps: Vec<Step>,
    pub planned_bytes: u64,
}

/// What carries the bytes between the threads that are ranks here.
#[derive(Clone, Copy, Debug)]
pub enum Over {
    /// Messages.
    Threads,
    /// Peers' memory, read directly.
    Shm,
}

impl Over {
    /// Ways for `world` ranks to get their communicator, each to be called on its own thread.
    pub fn ranks(self, world: usize) -> Vec<Box<dyn FnOnce() -> Communicator + Send>> {
        static JOBS: AtomicUsize = AtomicUsize::new(0);
        let job = format!("caravan-test-{}-{}", std::process::id(), JOBS.fetch_add(1, Ordering::Relaxed));
        let shm = |rank| {
            let identity = Identity::on_this_host(rank, world, &job);
            move || {
                let transport = shm_group(&identity, &Default::default()).unwrap();
                Communicator::new(transport, Default::default()).unwrap()
            }
        };
        match self {
            Over::Threads => Communicator::threads(world).into_iter().map(|c| Box::new(|| c) as _).collect(),
            Over::Shm => (0..world).map(|rank| Box::new(shm(rank)) as _).collect(),
        }
    }
}

/// Trains `steps` steps on `world` threads.
pub fn run<T: Float>(
    over: Over,
    world: usize,
    config: &Config,
    blocks: usize,
    tied: bool,
    steps: usize,
) -> Vec<Ran> {
    std::thread::scope(|scope| {
        let ranks = over.ranks(world).into_iter();
        let handles: Vec<_> =
            ranks.map(|comm| scope.spawn(move || rank::<T>(comm(), config, blocks, tied, steps))).collect();
        handles.into_iter().map(|h| h.join().unwrap()).collect()
    })
}

fn rank<T: Float>(comm: Communicator, config: &Config, blocks: usize, tied: bool, steps: usize) -> Ran {
    let (rank, world) = (comm.rank(), comm.size());
    let mut source = |spec: &TensorSpec, range: std::ops::Range<usize>, out: &mut [f32]| {
        for (i, x) in range.zip(out) {
            *x = noise(spec.name.len() as u32, 9, 9, i);
        }
        Ok(())
    };
    let toy = Box::new(Toy::new(blocks, tied));
    let mut trainer = Trainer::<T>::new(toy, comm, config, Ledger::default(), &mut source).unwrap();
    let accumulate = config.accumulate;
    let reports: Vec<Step> = (0..steps)
        .map(|step| {
            let mut batches = Numbers { step, rank, world, accumulate, token: [0] };
            // A model that could not be saved is trained on.
            let refused = trainer.export(Some(&mut |_, _| Err("no space".into())));
            assert!(refused.unwrap_err().to_string().contains("no space"));
            trainer.step(&mut batches, 0.01).unwrap()
        })
        .collect();
    let token = [12345];
    let batch = Batch { tokens: &token, targets: &token, rows: 1, length: 1 };
    let evaluation = trainer.evaluate(Some(&batch)).unwrap()[0].to_bits();
    let weights = crate::weights(&mut trainer);
    let predicted = zero::memory::predict(trainer.plan(), models::Footprint::default()).with_engine(
        trainer.plan(),
        &trainer.comm().group(),
        false,
    );
    Ran {
        trace: Trace {
            losses: reports.iter().map(|r| r.loss.to_bits()).collect(),
            norms: reports.iter().map(|r| r.grad_norm.to_bits()).collect(),
            evaluation,
            weights,
        },
        held: trainer.ledger().held(),
        predicted,
        planned_bytes: crate::step_bytes(trainer.plan()),
        steps: reports,
    }
}

/// Of rank 1 a batch cannot be had.
struct Torn(Numbers);

impl Batches for Torn {
    fn micro_batch(&mut self, index: usize) -> Result<Batch<'_>, NoBatch> {
        match self.0.rank == 1 && index == 1 {
            true => Err(String::from("the disk is gone").into()),
            false => self.0.micro_batch(index),
        }
    }
}

#[test]
fn a_rank_without_a_batch_ends_the_step_of_all() {
    let config = Config { accumulate: 2, ..Config::default() };
    Communicator::on_threads(2, Options::default(), |comm| {
        let (rank, world) = (comm.rank(), comm.size());
        let mut source = |_: &TensorSpec, _: std::ops::Range<usize>, out: &mut [f32]| {
            out.fill(0.5);
            Ok(())
        };
        let toy = Box::new(Toy::new(1, false));
        let mut trainer = Trainer::<f32>::new(toy, comm, &config, Ledger::default(), &mut source).unwrap();
        let mut batches = Torn(Numbers { step: 0, rank, world, accumulate: 2, token: [0] });
        // Nobody takes a step for one that some made of other data.
        let said = trainer.step(&mut batches, 0.01).unwrap_err().to_string();
        assert_eq!(said, "step 1: rank 1 has no tokens to train on: the disk is gone");
    });
}

#[test]
fn a_configuration_that_a_trainer_cannot_follow_is_refused() {
    let refusal = |config: &Config| {
        let comm = Communicator::threads(1).remove(0);
        let toy = Box::new(Toy::new(1, false));
        let made = Trainer::<f32>::new(toy, comm, config, Ledger::default(), &mut |_, _, _| Ok(()));
        made.err().unwrap().to_string()
    };
    for placement in [Placement::Device, Placement::Offloaded] {
        let text = refusal(&Config { placement, ..Config::default() });
        assert!(text.contains(&format!("{placement:?} for a trainer without a device: Host,")), "{text}");
    }
    let text = refusal(&Config { accumulate: 0, ..Config::default() });
    assert!(text.starts_with("0 micro-batches"), "{text}");
    let adamw = |change: fn(&mut AdamW)| {
        let mut config = Config::default();
        change(&mut config.adamw);
        config
    };
    for (config, said) in [
        (adamw(|a| a.beta1 = 1.0), "beta1 is 1.0: it has to be from 0 to below 1"),
        (adamw(|a| a.beta2 = f32::NAN), "beta2 is NaN"),
        (adamw(|a| a.eps = 0.0), "eps is 0.0: it has to be above 0"),
        (adamw(|a| a.weight_decay = f32::INFINITY), "weight_decay is inf"),
        (Config { clip: Some(-1.0), ..Config::default() }, "clip is -1.0: it has to be above 0, or None"),
        (Config { clip: Some(f32::NAN), ..Config::default() }, "clip is NaN"),
    ] {
        assert!(refusal(&config).starts_with(said), "{}", refusal(&config));
    }
}

/// Ranks that would not train the same model hear of it, and of who differs.
#[test]
fn ranks_that_differ_are_told() {
    type Of<'a> = &'a (dyn Fn(usize) -> f32 + Sync);
    let rank = |comm: Communicator, level: u8, weights: Of<'_>, lr: Of<'_>, tokens: usize| {
        let config = Config { stage: level.try_into().unwrap(), ..Config::default() };
        let (rank, world) = (comm.rank(), comm.size());
        let mut source = |_: &TensorSpec, _: std::ops::Range<usize>, out: &mut [f32]| {
            out.fill(weights(rank));
            Ok(())
        };
        let toy = Box::new(Toy::new(1, false));
        let mut trainer = Trainer::<f32>::new(toy, comm, &config, Ledger::default(), &mut source)?;
        let mut batches = Wide(Numbers { step: 0, rank, world, accumulate: 1, token: [0] }, tokens);
        trainer.step(&mut batches, lr(rank)).map(|_| ())
    };
    let told = |level: u8, weights: Of<'_>, lr: Of<'_>, tokens: usize| -> Vec<Option<String>> {
        Communicator::on_threads(3, Options::default(), |comm| {
            rank(comm, level, weights, lr, tokens).err().map(|e| e.to_string())
        })
    };
    let (same, half) = (|_: usize| 0.5, |rank: usize| if rank == 1 { 0.25 } else { 0.5 });
    for level in 0..4 {
        assert_eq!(told(level, &same, &same, 1), [None, None, None]);
        let rates = "step 1: rank 1 has 1 tokens in a micro-batch and a learning rate of 2.5e-1, and rank 0 1 and 5e-1: all \
                     ranks have to be alike";
        assert_eq!(told(level, &same, &half, 1), vec![Some(rates.to_owned()); 3]);
        let tokens = "step 1: rank 2 has 2 tokens in a micro-batch and a learning rate of 5e-1, and rank 0 1 and 5e-1: all \
                      ranks have to be alike";
        assert_eq!(told(level, &same, &same, 2), vec![Some(tokens.to_owned()); 3]);
        let unlimited = "the learning rate is inf: it has to be at least 0";
        assert_eq!(told(level, &same, &|_| f32::INFINITY, 1), vec![Some(unlimited.to_owned()); 3]);
    }
    let weights = "the initial weights of rank 1 are not those of rank 0: at stage 0 each rank keeps its own, so they must be";
    assert_eq!(told(0, &half, &same, 1), vec![Some(weights.to_owned()); 3]);
    // Elsewhere a weight is that of who has it.
    assert_eq!(told(2, &half, &same, 1), [None, None, None]);
}

/// Of rank 2 a batch has so many tokens.
struct Wide(Numbers, usize);

impl Batches for Wide {
    fn micro_batch(&mut self, _: usize) -> Result<Batch<'_>, NoBatch> {
        let length = if self.0.rank == 2 { self.1 } else { 1 };
        Ok(Batch { tokens: &[7; 2][..length], targets: &[7; 2][..length], rows: 1, length })
    }
}
