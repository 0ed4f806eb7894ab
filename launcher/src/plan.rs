//! From literal flags to a validated plan: everything that can be checked is checked before any rank starts.

use crate::args::{Offload, Order, Precision, RankArgs, Recompute, Switch, TrainArgs};
use crate::bench::tuning;
use crate::data::{self, Feed};
use crate::device::{Device, Need};
use crate::failure::{Failure, Result};
use crate::gpus;
use crate::human;
use crate::layers::Layers;
use crate::machine::{self, Machine};
use crate::rate::Rate;
use crate::tokenizer::Tokenizer;
use crate::transports::Transport;
use collectives::Float;
use collectives::bootstrap::Identity;
use models::hf::Checkpoint;
use models::tokens::{self, BatchPlan, Windows};
use models::{Accounts, Footprint, Llama, LlamaConfig, Model, TensorSpec};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// More ranks than this on one machine are a typing error.
const MOST_RANKS: usize = 1024;
/// The longest default sequence of `train`: beyond it, attention dominates a CPU's step.
const TRAIN_SEQ: usize = 256;

/// How many ranks, and how they reach each other.
#[derive(Clone, Debug)]
pub struct Ranks {
    /// All ranks of the run.
    pub world: usize,
    /// What reaches every one of them.
    pub transport: Transport,
    /// What lies over that.
    pub layers: Layers,
    /// The name of both together, in output and in tuning tables.
    pub label: String,
    /// Compute threads of each.
    pub threads: usize,
    /// How long they wait for each other at the start.
    pub rendezvous_timeout: Duration,
    /// How their communicators behave.
    pub options: collectives::Options,
    /// Whether the transport's own collectives are wanted beside ours.
    pub native: bool,
    /// Whether memory of GPUs goes over NCCL, and only the rest over the transport.
    pub nccl: bool,
    /// Whether ranks may share a GPU.
    pub share_gpus: bool,
}

impl Ranks {
    /// Checks the flags. `identity` is this process's place among the ranks, if something has started those.
    ///
    /// # Errors
    /// No ranks, too many, or a transport that cannot be used.
    pub fn plan(args: &RankArgs, identity: Option<&Identity>) -> Result<Self> {
        let world = match (args.ranks, identity.map(|i| i.world)) {
            (Some(asked), Some(there)) if asked != there => {
                return usage(format!(
                    "--ranks {asked}, but the launcher started {there}: leave --ranks away under mpirun and srun"
                ));
            }
            (_, Some(there)) => there,
            (asked, None) => asked.unwrap_or(2),
        };
        if world == 0 || world > MOST_RANKS {
            return usage(format!("--ranks {world}: a run has from 1 to {MOST_RANKS} ranks"));
        }
        // The cores of this host are for its own ranks.
        let here = identity.and_then(|i| i.local_size).unwrap_or(world).max(1);
        let threads = args.threads.unwrap_or_else(|| (machine::cores() / here).max(1));
        if threads == 0 || threads > 1024 {
            return usage(format!("--threads {threads}: a rank computes with 1 to 1024 threads"));
        }
        let seconds = args.rendezvous_timeout;
        if !(seconds.is_finite() && seconds > 0.0 && seconds <= 1e6) {
            return usage(format!(
                "--rendezvous-timeout {seconds}: ranks wait for more than 0 and at most 1e6 s"
            ));
        }
        let (nccl, host) = match args.transport.strip_prefix("nccl") {
            Some("") => (true, "auto"),
            Some(rest) if rest.starts_with('+') => (true, &rest[1..]),
            _ => (false, args.transport.as_str()),
        };
        let args = &RankArgs { transport: host.to_owned(), ..args.clone() };
        if let (true, Some(why)) = (nccl, gpus::obstacle()) {
            return usage(format!("transport nccl cannot be used: {why}"));
        }
        let (mut layers, between) = Layers::plan(args)?;
        let transport = Transport::choose(between, identity)?;
        if between == "auto" && matches!(transport, Transport::Mpi | Transport::Ucx) {
            layers.inside = Some(Transport::Shm);
        }
        let (label, flags) = (layers.label(transport), layers.flags(transport));
        let tuning = match tuning::named(args.tuning.as_ref()) {
            Some(path) => tuning::load(&path, &label, world, &flags)?,
            None => layers.tuning(world),
        };
        Ok(Ranks {
            world,
            transport,
            layers,
            label,
            threads,
            rendezvous_timeout: Duration::from_secs_f64(seconds),
            options: collectives::Options { tuning, ..Default::default() },
            native: false,
            nccl,
            share_gpus: args.share_gpus,
        })
    }

    /// What all ranks must have been asked for.
    pub fn asked(&self) -> String {
        format!("{}{}", if self.nccl { "nccl+" } else { "" }, self.label)
    }

    /// For commands that use no GPU.
    ///
    /// # Errors
    /// NCCL was asked for.
    pub fn on_hosts(&self, command: &str) -> Result<()> {
        match self.nccl {
            true => usage(format!(
                "--transport nccl is between GPUs, which {command} does not use: take --transport {}",
                self.label
            )),
            false => Ok(()),
        }
    }
}

/// What a source of weights gives back.
type Source = std::result::Result<(), String>;

/// The largest micro-batch, and how it is computed.
#[derive(Clone, Copy, Debug)]
pub struct MicroBatch {
    /// Sequences.
    pub rows: usize,
    /// Tokens of a sequence.
    pub length: usize,
    /// Which activations backward computes again.
    pub recompute: models::Recompute,
    /// Compute threads.
    pub threads: usize,
}

/// A model by name or directory.
pub struct ModelChoice {
    /// As the user named it.
    pub name: String,
    /// Its shape.
    pub config: LlamaConfig,
    /// Its weights, if it came from a directory.
    pub weights: Option<Checkpoint>,
}

impl ModelChoice {
    /// A known name, or a Hugging Face directory.
    ///
    /// # Errors
    /// An unknown name, or a directory whose content is not a whole model.
    pub fn open(name: &str) -> Result<Self> {
        let path = Path::new(name);
        if path.is_dir() {
            return Self::directory(path);
        }
        if path.exists() || name.contains('/') {
            return usage(format!(
                "--model {name} is not a directory: give a Hugging Face directory with config.json and \
                 model.safetensors, or one of {}",
                LlamaConfig::PRESETS.join(", ")
            ));
        }
        let config = LlamaConfig::preset(name).map_err(Failure::usage)?;
        Ok(ModelChoice { name: name.to_owned(), config, weights: None })
    }

    /// A Hugging Face directory.
    ///
    /// # Errors
    /// Whatever makes it not a whole model.
    pub fn directory(path: &Path) -> Result<Self> {
        let weights = Checkpoint::open(path).map_err(Failure::usage)?;
        let config = weights.config().clone();
        Ok(ModelChoice { name: path.display().to_string(), config, weights: Some(weights) })
    }

    /// The model without weights, its memory booked on `accounts`.
    ///
    /// # Errors
    /// A micro-batch that is too large to be computed, or threads that cannot be started.
    pub fn build<T: Float>(&self, batch: &MicroBatch, accounts: &Accounts) -> Result<Box<dyn Model<T>>> {
        let MicroBatch { rows, length, recompute, threads } = *batch;
        let model = Llama::<T>::new(&self.config, rows, length, recompute, threads, accounts);
        Ok(Box::new(model.map_err(Failure::run)?))
    }

    /// What [`build`](Self::build) will hold.
    ///
    /// # Errors
    /// A micro-batch that is too large to be computed.
    pub fn footprint(&self, batch: &MicroBatch, dtype: Precision, device: &Device) -> Result<Footprint> {
        let MicroBatch { rows, length, recompute, threads } = *batch;
        let (config, dtype) = (&self.config, dtype.dtype());
        let footprint = match device {
            Device::Cpu => models::footprint(config, rows, length, dtype, recompute, threads),
            _ => models::device_footprint(config, rows, length, dtype, recompute),
        };
        footprint.map_err(Failure::usage)
    }

    /// Where first weights come from: the directory, or the seed.
    pub fn source(&self, seed: u64) -> impl FnMut(&TensorSpec, Range<usize>, &mut [f32]) -> Source + '_ {
        move |spec, range, out| match &self.weights {
            Some(weights) => weights.read_range(&spec.name, range, out).map_err(|e| e.to_string()),
            None => {
                models::init_range(spec, seed, range, out);
                Ok(())
            }
        }
    }

    /// The tokenizer that was asked for; by default the model directory's own, else bytes.
    ///
    /// # Errors
    /// No tokenizer, or one with more tokens than the model knows.
    pub fn tokenizer(&self, asked: Option<&str>) -> Result<Tokenizer> {
        let own = self.weights.as_ref().map(|w| w.dir().join("tokenizer.json")).filter(|path| path.is_file());
        let own = own.map(|path| path.display().to_string());
        let tokenizer = Tokenizer::open(asked.or(own.as_deref()).unwrap_or("bytes"))?;
        let (has, fits) = (tokenizer.vocab(), self.config.vocab);
        if has > fits {
            return usage(format!(
                "tokenizer {} makes tokens up to {}, but model {} has a vocabulary of {fits}: take a tokenizer \
                 with at most {fits} tokens or a model with at least {has}",
                tokenizer.name(),
                has - 1,
                self.name
            ));
        }
        Ok(tokenizer)
    }

    /// The sequence length that was asked for, or the model's context up to `most`.
    ///
    /// # Errors
    /// Nothing, or more than the model's context.
    pub fn sequence(&self, asked: Option<usize>, most: usize) -> Result<usize> {
        let context = self.config.context;
        match asked.unwrap_or(context.min(most)) {
            0 => usage("--seq 0: a sequence has at least 1 token".into()),
            seq if seq > context => {
                let name = &self.name;
                usage(format!("--seq {seq}: model {name} has a context of {context} tokens, so at most that"))
            }
            seq => Ok(seq),
        }
    }
}

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
        let zero = zero_config(args, &device)?;
        let model = ModelChoice::open(&args.model)?;
        model.config.validate().map_err(Failure::usage)?;
        let tokenizer = model.tokenizer(args.tokenizer.as_deref())?;
        let length = model.sequence(args.seq, TRAIN_SEQ)?;
        at_least_one("--steps", args.steps)?;
        at_least_one("--micro-batch", args.micro_batch)?;
        at_least_one("--accumulate", args.accumulate)?;
        let rate = rate(args)?;
        if let Some(dir) = &args.save {
            let bytes = model.config.parameters() * args.dtype.dtype().size() as u64;
            models::hf::check_destination(dir, bytes).map_err(Failure::usage)?;
        }
        if let Some(file) = &args.metrics {
            data::check_destination("--metrics", file)?;
        }
        let step_tokens = step_tokens(args, ranks.world, length)?;
        let feed = if data::is_random(&args.data) {
            let all = step_tokens.saturating_mul(args.steps).saturating_add(length + 1);
            Feed::random(args.seed, model.config.vocab, all)
        } else {
            Feed::open(&args.data, &tokenizer, model.config.vocab)?
        };
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
            device,
            zero,
            dtype: args.dtype,
            steps: args.steps,
            step_tokens,
            batch,
            rate,
            seed: args.seed,
            order: args.order,
            eval_every: args.eval_every,
            metrics: args.metrics.clone(),
            save: args.save.clone(),
            sample: args.sample,
        };
        if identity.is_none() {
            plan.check_memory()?;
        }
        Ok(plan)
    }

    /// What one rank will hold, to the byte.
    ///
    /// # Errors
    /// A micro-batch that is too large to be computed.
    pub fn predict(&self) -> Result<zero::Memory> {
        Ok(self.need(&self.zero, &self.batch)?.memory)
    }

    /// The same for other settings, and what of it lies on the device.
    ///
    /// # Errors
    /// A micro-batch that is too large to be computed, or a model that the device's kernels do not take.
    pub fn need(&self, zero: &zero::Config, batch: &MicroBatch) -> Result<Need> {
        let units = self.model.config.units();
        // The embedding's backward only scatters; every other unit's reads its own weights.
        let reads: Vec<bool> = (0..units.len()).map(|unit| unit > 0).collect();
        let dtype = self.dtype.dtype();
        let plan = zero::Plan::new(&units, &reads, dtype, zero, 0, self.ranks.world);
        let footprint = self.model.footprint(batch, self.dtype, &self.device)?;
        let memory = zero::memory::predict(&plan, footprint);
        Ok(Need { memory, arena: zero::memory::arena(&plan, footprint) })
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
        let machine = Machine::probe();
        let have = machine.cgroup_memory.map_or(machine.memory, |limit| limit.min(machine.memory));
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

/// What `zero` needs to know.
fn zero_config(args: &TrainArgs, device: &Device) -> Result<zero::Config> {
    let bucket_bytes =
        human::parse_bytes(&args.bucket_size).map_err(|e| Failure::usage(format!("--bucket-size: {e}")))?;
    if bucket_bytes == 0 {
        return usage("--bucket-size 0: a bucket holds at least 1 byte".into());
    }
    let adamw = zero::AdamW {
        beta1: decay("--beta1", args.beta1)?,
        beta2: decay("--beta2", args.beta2)?,
        eps: number("--eps", args.eps, "above 0", |x| x > 0.0)? as f32,
        weight_decay: number("--weight-decay", args.weight_decay, "at least 0", |x| x >= 0.0)? as f32,
    };
    let placement = match (device, args.offload) {
        (Device::Cpu, Offload::None) => zero::Placement::Host,
        (Device::Cpu, Offload::Optimizer) => {
            return usage(
                "--offload optimizer moves state from GPUs to the host, where --device cpu has it already: add \
                 --device cuda, or leave --offload away"
                    .into(),
            );
        }
        (_, Offload::None) => zero::Placement::Device,
        (_, Offload::Optimizer) => zero::Placement::Offloaded,
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
    let floor = number("--min-lr", args.min_lr.unwrap_or(peak / 10.0), "from 0 to --lr", |x| {
        (0.0..=peak).contains(&x)
    })?;
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
    number("--val-fraction", asked, "from 0 to below 1", |x| (0.0..1.0).contains(&x))
}

/// A finite number in a range.
fn number(flag: &str, value: f64, range: &str, fits: impl Fn(f64) -> bool) -> Result<f64> {
    // What is finite in f64 may not be in the f32 that kernels take.
    match (value as f32).is_finite() && fits(value) {
        true => Ok(value),
        false => usage(format!("{flag} {value}: it must be {range}")),
    }
}

fn decay(flag: &str, value: f64) -> Result<f32> {
    let fits = |x: f64| (0.0..1.0).contains(&x) && (x as f32) < 1.0;
    Ok(number(flag, value, "from 0 to below 1", fits)? as f32)
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
