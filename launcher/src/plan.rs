//! From literal flags to a validated plan: everything that can be checked is checked before any rank starts.

mod advice;
mod anywhere;
mod asked;
mod inputs;
mod launched;
mod model;
mod numbers;
mod outputs;
mod ranks;
mod scaling;
mod shape;
mod steps;
mod traced;
mod what;

pub use anywhere::{Anywhere, check_anywhere};
pub use asked::{Asked, on_hosts};
pub use launched::by_itself;
pub use model::{MicroBatch, ModelChoice};
pub use numbers::{Numbers, at_least_one};
pub use ranks::{Ranks, UNASKED, unasked_threads, with_ranks};
pub use scaling::{read as scaling_read, told as scaling_told};
pub use shape::Shape;
pub use steps::{check_tokens, lead_tokens, tokens_in_memory};
pub use traced::Traced;
pub use what::{sequence, trainable};

use crate::args::{Mover, Offload, Order, Precision, RankArgs, Switch, TrainArgs, deepspeed};
use crate::checkpoint::{self, Checkpoints, State};
use crate::data::Feed;
use crate::device::{self, Device, Need};
use crate::failure::{Failure, Result};
use crate::human;
use crate::machine::{self, Machine};
use crate::rate::Rate;
use crate::tokenizer::Tokenizer;
use crate::train::stop;
use anywhere::check_flags;
use collectives::bootstrap::{Identity, spawn};
use collectives::schedule::Group;
use models::tokens::BatchPlan;
use outputs::{check_written, outputs};
use std::path::PathBuf;
use steps::Taken;
use what::What;

/// The longest default sequence of `train`: beyond it, attention dominates a CPU's step.
const TRAIN_SEQ: usize = 256;

/// Steps between evaluations, where something is held out for them.
const EVAL_EVERY: usize = 500;

/// Tokens of each of them but the last.
const EVAL_TOKENS: usize = 1 << 20;

/// A training run in which everything is known and checked.
pub struct TrainPlan {
    /// What is trained.
    pub model: ModelChoice,
    /// Text to tokens and back, if it is known.
    pub tokenizer: Option<Tokenizer>,
    /// What was asked for as tokens; empty for the default.
    pub data: Vec<PathBuf>,
    /// And as tokens to hold out whole.
    pub val_data: Vec<PathBuf>,
    /// The tokens.
    pub feed: Feed,
    /// Who trains.
    pub ranks: Ranks,
    /// What was asked of them.
    pub asked: RankArgs,
    /// On what.
    pub device: Device,
    /// Whether kernels are launched as graphs where that can be.
    pub cuda_graphs: bool,
    /// The trainer's part.
    pub zero: zero::Config,
    /// Of weights, activations and gradients.
    pub dtype: Precision,
    /// Optimizer steps.
    pub steps: usize,
    /// Tokens of a step of all ranks.
    pub step_tokens: usize,
    /// Tokens that were trained on before this run.
    pub tokens_before: u64,
    /// The shape of a micro-batch.
    pub batch: MicroBatch,
    /// The learning rate of each step.
    pub rate: Rate,
    /// Of weights, data order and sample.
    pub seed: u64,
    /// Which tokens make which batch.
    pub batches: BatchPlan,
    /// The order of windows.
    pub order: Order,
    /// Who moves calls forward while ranks compute.
    pub progress: Mover,
    /// Steps between evaluations; 0 means at the end only.
    pub eval_every: usize,
    /// Tokens of each but the last, which takes all.
    pub eval_tokens: usize,
    /// The part of the tokens that is held out for them.
    pub val_fraction: f64,
    /// Where to write metrics.
    pub metrics: Option<PathBuf>,
    /// Of which steps to write where they go.
    pub traced: Option<Traced>,
    /// What is kept of its state, and where it goes on.
    pub checkpoints: Option<Checkpoints>,
    /// Where to write the model.
    pub save: Option<PathBuf>,
    /// Tokens of the sample, which is for whoever reads the output.
    pub sample: usize,
    /// The configuration that flags came from.
    pub configuration: Option<deepspeed::File>,
}

impl TrainPlan {
    /// Checks every flag of `train`.
    ///
    /// # Errors
    /// The first thing that cannot be done, in one sentence.
    pub fn new(args: &TrainArgs, identity: Option<&Identity>) -> Result<Self> {
        let unasked = device::ranks_unasked(&args.device, &args.ranks, identity);
        let mut ranks = Ranks::plan(&args.ranks, unasked, identity)?;
        let args = &*args.for_ranks(ranks.world, identity.is_some())?;
        let Anywhere { numbers, precision } = check_flags(args, ranks.world)?;
        let device = train_on(args, &mut ranks, identity)?;
        let Numbers { rate, val_fraction, zero } = numbers;
        let zero = zero::Config { placement: placement(args, &device), ..zero };
        if let Some(dir) = args.checkpoint.as_deref().filter(|_| identity.is_none()) {
            // Before anything is read that another run takes away.
            checkpoint::clean(dir)?;
        }
        let checkpoints = Checkpoints::asked(args)?;
        let traced = Traced::asked(args, checkpoints.as_ref().map_or(0, Checkpoints::made))?;
        let what = What::open(args, &ranks, identity)?;
        what.check_written(args, checkpoints.as_ref(), identity)?;
        let state = checkpoints.as_ref().and_then(|checkpoints| checkpoints.from.as_ref());
        state.map_or(Ok(()), |state| state.check_shape(&what.model))?;
        let What { model, inputs, tokenizer, sample, length } = what;
        let of_tokens = (model.config.vocab, tokenizer.as_ref(), length);
        let whose = (&ranks, identity);
        let Taken { feed, val_fraction, batches, step_tokens, before } =
            Taken::plan(args, inputs, of_tokens, val_fraction, state, whose)?;
        let recompute = args.recompute.of_models();
        let (rows, threads) = (args.micro_batch, ranks.threads);
        let batch = MicroBatch { rows, length, recompute, precision, threads };
        let plan = TrainPlan {
            model,
            tokenizer,
            data: args.data.clone(),
            val_data: args.val_data.clone(),
            feed,
            batches,
            ranks,
            asked: args.ranks.clone(),
            cuda_graphs: cuda_graphs(args, &device)?,
            device,
            zero,
            dtype: args.dtype,
            steps: args.steps,
            step_tokens,
            tokens_before: before,
            batch,
            rate,
            seed: args.seed,
            order: args.order,
            progress: args.progress,
            eval_every: args.eval_every.unwrap_or(EVAL_EVERY),
            eval_tokens: args.eval_tokens.unwrap_or(EVAL_TOKENS),
            val_fraction,
            metrics: args.metrics.clone(),
            traced,
            checkpoints,
            save: args.save.clone(),
            sample,
            configuration: args.configuration.clone(),
        };
        plan.check_memory(identity)?;
        Ok(plan)
    }

    /// Whether what rank 0 will write can be written.
    ///
    /// # Errors
    /// What is in the way.
    pub fn check_written(&self) -> Result<()> {
        let outputs =
            outputs(self.metrics.as_deref(), self.traced.as_ref().map(|traced| traced.path.as_path()));
        let data = self.feed.named();
        check_written(
            &self.model,
            self.tokenizer.as_ref(),
            &data,
            self.dtype,
            self.save.as_deref(),
            &outputs,
        )?;
        let checkpoints = self.checkpoints.as_ref();
        checkpoints
            .map_or(Ok(()), |c| checkpoint::check_destination(c, self.model.config.parameters(), self.steps))
    }

    /// Where first weights come from.
    ///
    /// # Errors
    /// Those of a checkpoint cannot be read.
    pub fn source(&self) -> Result<Box<zero::Source<'_>>> {
        match self.state() {
            Some(state) => Ok(state.weights()?),
            None => Ok(Box::new(self.model.source(self.seed, self.batch.threads))),
        }
    }

    /// Where it goes on, if not at the start.
    pub fn state(&self) -> Option<&State> {
        self.checkpoints.as_ref().and_then(|checkpoints| checkpoints.from.as_ref())
    }

    /// Steps that were made before this run.
    pub fn made_before(&self) -> usize {
        self.checkpoints.as_ref().map_or(0, Checkpoints::made)
    }

    /// Whether a run that is asked to end keeps something.
    pub fn keeps(&self) -> bool {
        self.save.is_some() || self.checkpoints.is_some()
    }

    /// Tokens that have been trained on after so many steps, with those before this run.
    pub fn tokens_after(&self, steps: usize) -> u64 {
        let made = steps.saturating_sub(self.made_before()) as u64;
        self.tokens_before + made * self.step_tokens as u64
    }

    /// What its memory follows from.
    fn shape(&self) -> Shape<'_> {
        let (world, nccl) = (self.ranks.world, self.ranks.nccl);
        let copies = self.checkpoints.as_ref().is_some_and(|checkpoints| checkpoints.beside);
        Shape { model: &self.model, dtype: self.dtype, device: &self.device, world, nccl, copies }
    }

    /// What a rank of `group` will hold, to the byte.
    ///
    /// # Errors
    /// A micro-batch that is too large to be computed.
    pub fn predict(&self, group: &Group) -> Result<zero::Memory> {
        let (shape, need) = (self.shape(), self.need(&self.zero, &self.batch)?);
        Ok(shape.held(&need, &shape.sharded(&self.zero, group.rank), group))
    }

    /// What the model and its state need with other settings, and what of it lies on the device.
    ///
    /// # Errors
    /// A micro-batch that is too large to be computed, or a model that the device's kernels do not take.
    pub fn need(&self, zero: &zero::Config, batch: &MicroBatch) -> Result<Need> {
        self.shape().need(zero, batch)
    }

    /// As `--attention` names the kernels of attention; none on the processor.
    pub fn attention(&self) -> Option<&'static str> {
        self.device.attention(self.dtype.dtype(), self.model.config.head_dim)
    }

    /// As `--offload` names it.
    pub fn offload(&self) -> &'static str {
        offload(self.zero.placement)
    }

    /// Bytes of the host that a rank holds at least, whichever flags but those of model, ranks and placement are changed.
    fn least_memory(&self) -> Result<u64> {
        let zero = zero::Config { stage: zero::Stage::ALL[3], accumulate: 1, ..self.zero.clone() };
        let batch = MicroBatch { rows: 1, length: 1, recompute: models::Recompute::Full, ..self.batch };
        let need = self.need(&zero, &batch)?.memory;
        Ok((need.total() - need.on_device(zero.placement)) as u64)
    }

    /// Whether this machine can hold its ranks. GPUs are looked at before ranks are started here: those that others start
    /// may have been given some, which they look at themselves.
    fn check_memory(&self, identity: Option<&Identity>) -> Result<()> {
        let need = self.need(&self.zero, &self.batch)?;
        if identity.is_none() {
            for (gpu, room) in self.device.rooms(self.ranks.world, self.ranks.nccl) {
                device::check(self, &gpu, room)?;
            }
        }
        if spawn::supervised() {
            // Who started this rank has looked at all of them, and the tokens are held by now.
            return Ok(());
        }
        let ranks = self.ranks.world;
        let here = machine::ranks_here(ranks, identity);
        let (shape, known) = (self.shape(), self.ranks.expected()?);
        let held = match &known {
            Some(group) => shape.held(&need, &shape.sharded(&self.zero, 0), group).total(),
            // What the engine needs for calls beside is known once ranks have met.
            None => need.memory.total() + collectives::ready_bytes(ranks),
        };
        // What is on a GPU that is emulated is here, too.
        let elsewhere = match self.device {
            Device::Emulated(_) => 0,
            _ => need.memory.on_device(self.zero.placement),
        };
        let host = held - elsewhere + self.ranks.control_bytes(here);
        let tokens = tokens_in_memory(&self.feed, ranks, identity);
        let all = (host as u64).saturating_mul(ranks as u64).saturating_add(tokens);
        let advice = match self.least_memory()?.saturating_mul(here as u64) {
            least if least > Machine::probe().usable_memory() => format!(
                "what is trained, its gradients and the optimizer's state alone take {}, so take a smaller --model",
                human::bytes(least)
            ),
            _ => advice::of_memory(&self.zero, &self.batch, ranks, self.ranks.fewer(1, identity)),
        };
        let tokenised = machine::text_advice(tokens, all);
        let forecast = "'caravan plan' with the same flags says what ranks hold at each stage";
        machine::check_memory(ranks, identity, all, &format!("{advice}{tokenised}; {forecast}"))
    }
}

/// On what ranks train, and what follows for them from that.
fn train_on(args: &TrainArgs, ranks: &mut Ranks, identity: Option<&Identity>) -> Result<Device> {
    ranks.options.progress = args.progress.options();
    ranks.on_request = stop::on_request(args.save.is_some() || args.checkpoint.is_some());
    let device = Device::plan(&args.device, ranks, identity)?;
    ranks.compute_on(args.device.device, args.ranks.threads);
    ranks.reads_data = true;
    Ok(device)
}

/// As `--offload` names it.
pub fn offload(placement: zero::Placement) -> &'static str {
    match placement {
        zero::Placement::Offloaded => "optimizer",
        _ => "none",
    }
}

/// As `--recompute` names it.
pub fn recompute(which: models::Recompute) -> &'static str {
    match which {
        models::Recompute::Full => "full",
        models::Recompute::None | models::Recompute::NoBackward => "none",
    }
}

/// Where weights and optimizer state live.
pub fn placement(args: &TrainArgs, device: &Device) -> zero::Placement {
    match (device, args.offload) {
        (Device::Cpu, _) => zero::Placement::Host,
        (_, Offload::None) => zero::Placement::Device,
        (_, Offload::Optimizer) => zero::Placement::Offloaded,
    }
}

/// Whether kernels are launched as graphs.
fn cuda_graphs(args: &TrainArgs, device: &Device) -> Result<bool> {
    match (device, args.cuda_graphs) {
        (_, Some(Switch::Off)) | (Device::Cpu, _) | (Device::Emulated(_), None) => Ok(false),
        (Device::Cuda(_), None | Some(Switch::On)) => Ok(true),
        (Device::Emulated(_), Some(Switch::On)) => {
            usage("--cuda-graphs on is for GPUs, and emulated ones have no graphs: leave it away".into())
        }
    }
}

fn usage<T>(text: String) -> Result<T> {
    Err(Failure::Usage(text))
}

#[cfg(test)]
pub mod tests;
