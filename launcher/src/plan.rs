//! From literal flags to a validated plan: everything that can be checked is checked before any rank starts.

mod model;
mod ranks;

pub use model::{MicroBatch, ModelChoice};
pub use ranks::Ranks;

use crate::args::{Offload, Order, Precision, RankArgs, Recompute, Shape, Switch, TrainArgs};
use crate::data::{self, Feed};
use crate::device::{Device, Need};
use crate::failure::{Failure, Result};
use crate::files::{self, Way};
use crate::human;
use crate::machine::Machine;
use crate::rate::Rate;
use crate::tokenizer::Tokenizer;
use collectives::bootstrap::Identity;
use collectives::device::Arena;
use collectives::schedule::Group;
use models::tokens::{self, BatchPlan, Windows};
use std::path::PathBuf;

/// The longest default sequence of `train`: beyond it, attention dominates a CPU's step.
const TRAIN_SEQ: usize = 256;

/// Steps between evaluations, where something is held out for them.
const EVAL_EVERY: usize = 500;

/// A training run in which everything is known and checked.
pub struct TrainPlan {
    /// What is trained.
    pub model: ModelChoice,
    /// Text to tokens and back.
    pub tokenizer: Tokenizer,
    /// The tokens.
    pub feed: Feed,
    /// Who trains.
    pub ranks: Ranks,
    /// What was asked of them.
    pub asked: RankArgs,
    /// On what.
    pub device: Device,
    /// The trainer's part.
    pub zero: zero::Config,
    /// Of weights, activations and gradients.
    pub dtype: Precision,
    /// Optimizer steps.
    pub steps: usize,
    /// Tokens of a step of all ranks.
    pub step_tokens: usize,
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
    /// Steps between evaluations; 0 means at the end only.
    pub eval_every: usize,
    /// The part of the tokens that is held out for them.
    pub val_fraction: f64,
    /// Where to write metrics.
    pub metrics: Option<PathBuf>,
    /// Where to write the model.
    pub save: Option<PathBuf>,
    /// Tokens of the sample.
    pub sample: usize,
}

impl TrainPlan {
    /// Checks every flag of `train`.
    ///
    /// # Errors
    /// The first thing that cannot be done, in one sentence.
    pub fn new(args: &TrainArgs, identity: Option<&Identity>) -> Result<Self> {
        let ranks = Ranks::plan(&args.ranks, identity)?;
        let device = Device::plan(&args.device, &ranks, identity)?;
        device.carries(&ranks)?;
        check_numbers(args)?;
        let zero = zero_config(args, placement(args, &device)?)?;
        let model = ModelChoice::open(&args.model)?;
        model.config.validate().map_err(Failure::usage)?;
        let tokenizer = model.tokenizer(args.tokenizer.as_deref())?;
        let length = model.sequence(args.seq, TRAIN_SEQ)?;
        let rate = rate(args)?;
        let bytes = model.config.parameters() * args.dtype.dtype().size() as u64;
        check_outputs(args, bytes)?;
        let step_tokens = step_tokens(args, ranks.world, length)?;
        let feed = if data::is_random(&args.data) {
            let all = step_tokens.saturating_mul(args.steps).saturating_add(length + 1);
            Feed::random(args.seed, model.config.vocab, all)
        } else {
            Feed::open(&args.data, &tokenizer, model.config.vocab)?
        };
        if let Some(file) = &args.metrics {
            files::check_apart("--metrics", file, feed.files())?;
        }
        let fraction = val_fraction(args)?;
        let feed = feed.hold_out(fraction)?;
        check_batch(args, &feed, ranks.world, length, step_tokens)?;
        feed.check_held_out(fraction, length)?;
        let order = match args.order {
            Order::Sequential => tokens::Order::Sequential,
            Order::Shuffled => tokens::Order::Shuffled { seed: args.seed },
        };
        let windows = Windows::new(feed.training(), length).map_err(Failure::usage)?;
        let batches = BatchPlan::new(windows, order, args.micro_batch, args.accumulate, ranks.world)
            .map_err(Failure::usage)?;
        let recompute = match args.recompute {
            Recompute::None => models::Recompute::None,
            Recompute::Full => models::Recompute::Full,
        };
        let batch = MicroBatch { rows: args.micro_batch, length, recompute, threads: ranks.threads };
        let plan = TrainPlan {
            model,
            tokenizer,
            feed,
            batches,
            ranks,
            asked: args.ranks.clone(),
            device,
            zero,
            dtype: args.dtype,
            steps: args.steps,
            step_tokens,
            batch,
            rate,
            seed: args.seed,
            order: args.order,
            eval_every: args.eval_every.unwrap_or(EVAL_EVERY),
            val_fraction: fraction,
            metrics: args.metrics.clone(),
            save: args.save.clone(),
            sample: args.sample,
        };
        if identity.is_none() {
            plan.check_memory()?;
        }
        Ok(plan)
    }

    /// What a rank of `group` will hold, to the byte.
    ///
    /// # Errors
    /// A micro-batch that is too large to be computed.
    pub fn predict(&self, group: &Group) -> Result<zero::Memory> {
        let memory = self.need(&self.zero, &self.batch)?.memory;
        Ok(memory.with_engine(&self.sharded(&self.zero, group.rank), group, self.ranks.nccl))
    }

    /// Where `rank` will keep what.
    fn sharded(&self, zero: &zero::Config, rank: usize) -> zero::Plan {
        let units = self.model.config.units();
        zero::Plan::new(&units, self.dtype.dtype(), zero, rank, self.ranks.world)
    }

    /// What the model and its state need with other settings, and what of it lies on the device.
    ///
    /// # Errors
    /// A micro-batch that is too large to be computed, or a model that the device's kernels do not take.
    pub fn need(&self, zero: &zero::Config, batch: &MicroBatch) -> Result<Need> {
        let plan = self.sharded(zero, 0);
        let footprint = self.model.footprint(batch, self.dtype, &self.device)?;
        let mut memory = zero::memory::predict(&plan, footprint);
        let mut arena = zero::memory::arena(&plan, footprint);
        let mut largest_call = 0;
        if zero.placement.on_device() && self.ranks.world > 1 {
            if self.ranks.nccl {
                let carrier = collectives::wired_bytes(self.ranks.world, None);
                memory.workspace += carrier.iter().sum::<usize>();
                arena += Arena::needed(carrier);
            } else {
                largest_call = zero::memory::largest_call(&plan);
                memory.host += collectives::staged_bytes(largest_call);
            }
        }
        Ok(Need { memory, arena, largest_call })
    }

    /// As `--offload` names it.
    pub fn offload(&self) -> &'static str {
        match self.zero.placement {
            zero::Placement::Offloaded => "optimizer",
            _ => "none",
        }
    }

    /// Whether this machine can hold all ranks. Found out only before they are started here: ranks that others
    /// start may be on several machines.
    fn check_memory(&self) -> Result<()> {
        let need = self.need(&self.zero, &self.batch)?.memory;
        if let Some(gpus) = self.device.gpus() {
            // Ranks are dealt to GPUs in turn, so that the first has most.
            let sharing = self.ranks.world.div_ceil(gpus.each.len());
            for (number, (name, memory)) in gpus.each.iter().enumerate().take(self.ranks.world) {
                crate::device::check(self, &format!("GPU {number} ({name})"), memory / sharing)?;
            }
        }
        let host = need.total() - need.on_device(self.zero.placement);
        let (each, ranks) = (host as u64, self.ranks.world as u64);
        let have = Machine::probe().usable_memory();
        match each.saturating_mul(ranks) <= have {
            true => Ok(()),
            false => usage(format!(
                "{ranks} ranks would hold {} each and this machine has {} of memory: take a smaller --model, \
                 --micro-batch or --seq, fewer --ranks, a higher --stage, or --recompute full",
                human::bytes(each),
                human::bytes(have)
            )),
        }
    }
}

/// Whether the model of so many bytes and the metrics can be written, and both be kept.
fn check_outputs(args: &TrainArgs, bytes: u64) -> Result<()> {
    let model = args.save.as_ref().map(|dir| models::hf::check_destination(dir, bytes));
    let model = model.transpose().map_err(Failure::usage)?;
    let Some(file) = &args.metrics else { return Ok(()) };
    files::check_writable("--metrics", file, Way::Growing)?;
    let place = std::path::absolute(file).and_then(|path| path.parent().unwrap_or(&path).canonicalize());
    match (model, place) {
        (Some(model), Ok(place)) if place.starts_with(&model) => usage(format!(
            "--metrics {} lies in --save {}, which the model replaces as a whole: name a file elsewhere",
            file.display(),
            model.display()
        )),
        _ => Ok(()),
    }
}

/// Tokens of one optimizer step of all ranks.
fn step_tokens(args: &TrainArgs, world: usize, length: usize) -> Result<usize> {
    let factors = [world, args.accumulate, args.micro_batch, length];
    let product = factors.into_iter().try_fold(1usize, |n, f| n.checked_mul(f)).filter(|&n| n < 1 << 40);
    product.ok_or_else(|| {
        Failure::usage(format!(
            "one step of {world} ranks x {} micro-batches x {} sequences x {length} tokens has more than 2^40 \
             tokens: lower --micro-batch or --accumulate",
            args.accumulate, args.micro_batch
        ))
    })
}

/// Whether there is enough to fill one step.
fn check_batch(args: &TrainArgs, feed: &Feed, world: usize, length: usize, step: usize) -> Result<()> {
    let have = feed.training().len();
    match have > step {
        true => Ok(()),
        false => usage(format!(
            "the data are shorter than one batch: a step takes {world} ranks x {} micro-batches x {} sequences x \
             {length} tokens and one more, {} tokens, and there are {have} for training: give more --data or lower \
             --micro-batch, --seq or --ranks",
            args.accumulate,
            args.micro_batch,
            step + 1
        )),
    }
}

/// What can be said of numbers without the machine and the files that the training needs.
pub fn check_numbers(args: &TrainArgs) -> Result<()> {
    at_least_one("--steps", args.steps)?;
    at_least_one("--micro-batch", args.micro_batch)?;
    at_least_one("--accumulate", args.accumulate)?;
    rate(args)?;
    val_fraction(args)?;
    zero_config(args, zero::Placement::Host).map(drop)
}

/// Where weights and optimizer state live.
fn placement(args: &TrainArgs, device: &Device) -> Result<zero::Placement> {
    match (device, args.offload) {
        (Device::Cpu, Offload::None) => Ok(zero::Placement::Host),
        (Device::Cpu, Offload::Optimizer) => usage(
            "--offload optimizer moves state from GPUs to the host, where --device cpu has it already: add \
             --device cuda, or leave --offload away"
                .into(),
        ),
        (_, Offload::None) => Ok(zero::Placement::Device),
        (_, Offload::Optimizer) => Ok(zero::Placement::Offloaded),
    }
}

/// What `zero` needs to know.
fn zero_config(args: &TrainArgs, placement: zero::Placement) -> Result<zero::Config> {
    let bucket_bytes =
        human::parse_bytes(&args.bucket_size).map_err(|e| Failure::usage(format!("--bucket-size: {e}")))?;
    if bucket_bytes == 0 {
        return usage("--bucket-size 0: a bucket holds at least 1 byte".into());
    }
    let adamw = zero::AdamW {
        beta1: decay("--beta1", args.beta1)?,
        beta2: decay("--beta2", args.beta2)?,
        eps: number("--eps", args.eps, "above 0 in 32 bits", |x| x as f32 > 0.0)? as f32,
        weight_decay: number("--weight-decay", args.weight_decay, "at least 0", |x| x >= 0.0)? as f32,
    };
    let clip = number("--clip", args.clip, "at least 0 (0 clips nothing)", |x| x >= 0.0)?;
    Ok(zero::Config {
        stage: args.stage.parse().map_err(|e| Failure::usage(format!("--stage {}: {e}", args.stage)))?,
        bucket_bytes,
        prefetch: args.prefetch == Switch::On,
        accumulate: args.accumulate,
        adamw,
        clip: (clip > 0.0).then_some(clip as f32),
        placement,
    })
}

fn rate(args: &TrainArgs) -> Result<Rate> {
    let peak = number("--lr", args.lr, "at least 0", |x| x >= 0.0)?;
    let range = format!("from 0 to --lr {peak}");
    let floor = match (args.schedule, args.min_lr) {
        (Shape::Constant, Some(floor)) => {
            return usage(format!(
                "--min-lr {floor} with --schedule constant, which never comes down to it: leave --min-lr away, or take \
                 --schedule linear or cosine"
            ));
        }
        (Shape::Constant, None) => peak,
        (_, asked) => {
            number("--min-lr", asked.unwrap_or(peak / 10.0), &range, |x| (0.0..=peak).contains(&x))?
        }
    };
    let warmup = args.warmup.unwrap_or((args.steps / 10).min(100));
    if warmup > args.steps {
        return usage(format!("--warmup {warmup}: there are {} --steps, so at most that", args.steps));
    }
    Ok(Rate { peak, floor, warmup, steps: args.steps, shape: args.schedule })
}

/// The fraction that is held out, as given or by the order's habit.
fn val_fraction(args: &TrainArgs) -> Result<f64> {
    let habit = if args.order == Order::Sequential || data::is_random(&args.data) { 0.0 } else { 0.1 };
    let asked = args.val_fraction.unwrap_or(habit);
    let fraction = number("--val-fraction", asked, "from 0 to below 1", |x| (0.0..1.0).contains(&x))?;
    match args.eval_every {
        Some(steps) if steps > 0 && fraction == 0.0 => usage(format!(
            "--eval-every {steps}: nothing is held out to evaluate on: add --val-fraction 0.1, or leave --eval-every \
             away"
        )),
        _ => Ok(fraction),
    }
}

/// A finite number in a range.
fn number(flag: &str, value: f64, range: &str, fits: impl Fn(f64) -> bool) -> Result<f64> {
    // What is finite in f64 may not be in the f32 that kernels take.
    match ((value as f32).is_finite(), fits(value)) {
        (true, true) => Ok(value),
        (true, false) => usage(format!("{flag} {value:?}: it must be {range}")),
        (false, _) => usage(format!("{flag} {value:?}: it must be finite in 32 bits, and {range}")),
    }
}

fn decay(flag: &str, value: f64) -> Result<f32> {
    let fits = |x: f64| (0.0..1.0).contains(&x) && (x as f32) < 1.0;
    Ok(number(flag, value, "from 0 to below 1 in 32 bits", fits)? as f32)
}

/// A count that makes no sense as 0.
pub fn at_least_one(flag: &str, value: usize) -> Result<()> {
    match value {
        0 => usage(format!("{flag} 0: it must be at least 1")),
        _ => Ok(()),
    }
}

fn usage<T>(text: String) -> Result<T> {
    Err(Failure::Usage(text))
}
