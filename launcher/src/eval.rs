//! `caravan eval`: mean loss of a model directory, or of the state of a training, on given tokens.

use crate::agree::Signature;
use crate::args::{Colour, DeviceKind, EvalArgs, Precision};
use crate::checkpoint::State;
use crate::data::{self, Feed, Input, held};
use crate::device::{self, Device};
use crate::evaluate::{mean_loss, rounds};
use crate::failure::{Failure, Result};
use crate::human::{self, several};
use crate::machine;
use crate::out;
use crate::plan::{MicroBatch, ModelChoice, Ranks, at_least_one, check_tokens, on_hosts, tokens_in_memory};
use crate::progress::Progress;
use crate::tokenizer::Share;
use collectives::bootstrap::{Identity, spawn};
use collectives::device::{Arena, PRODUCT_WORKSPACE};
use collectives::{Buffer, Communicator, Float};
use models::tokens::Windows;
use models::{LlamaConfig, MatmulPrecision, Recompute, Unit};
use serde_json::json;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The longest default sequence.
const LONGEST: usize = 1024;

/// An evaluation in which everything is known and checked.
pub struct EvalPlan {
    /// What is evaluated.
    pub model: ModelChoice,
    /// Whose weights these are, if a training's.
    pub state: Option<State>,
    /// What was asked for as tokens.
    pub data: Vec<PathBuf>,
    /// The tokens.
    pub feed: Feed,
    /// Windows over all tokens; what they leave is a last, shorter one.
    pub windows: Windows,
    /// Who evaluates.
    pub ranks: Ranks,
    /// On what.
    pub device: Device,
    /// Of weights and activations.
    pub dtype: Precision,
    /// The batches.
    pub batch: MicroBatch,
    json: bool,
    quiet: bool,
    colour: Colour,
}

/// What can be said of flags on any machine, and how close products are to be to exact ones.
///
/// # Errors
/// Numbers that make no sense, flags that do not go together, and random tokens beside files.
pub fn check_anywhere(args: &EvalArgs) -> Result<MatmulPrecision> {
    on_hosts("eval", &args.ranks)?;
    device::check_flags(&args.device, false, args.ranks.share_gpus)?;
    check_threads(args)?;
    let precision = device::matmul_precision(&args.device, args.dtype)?;
    at_least_one("--micro-batch", args.micro_batch)?;
    args.seq.map_or(Ok(()), |seq| at_least_one("--seq", seq))?;
    data::check_names("--data", &args.data)?;
    data::check_alone(&args.data)?;
    Ok(precision)
}

/// Refuses threads that would have nothing to do.
fn check_threads(args: &EvalArgs) -> Result<()> {
    match args.ranks.threads.filter(|_| args.device.device == DeviceKind::Cuda) {
        Some(threads) => Err(Failure::usage(format!(
            "--threads {threads} is for --device cpu: with --device cuda all of eval is computed on the GPU; leave it away"
        ))),
        None => Ok(()),
    }
}

/// Refuses what is not there.
///
/// # Errors
/// Nothing of this name, or `nano`, which other commands know.
fn check_weights(model: &Path) -> Result<()> {
    if !model.metadata().is_err_and(|e| e.kind() == ErrorKind::NotFound) {
        return Ok(());
    }
    let name = model.to_string_lossy();
    let what = match LlamaConfig::preset(&name) {
        Ok(_) => "is a shape, which has no weights to evaluate",
        Err(_) => "is not there",
    };
    Err(Failure::usage(format!(
        "--model {name} {what}: give a model's directory, such as train --save writes, or what train --checkpoint was given"
    )))
}

/// The model in a directory, or the weights of the state that it is or that is the last in it.
///
/// # Errors
/// No whole model, and no state; one that is not whole or cannot be read.
fn open(dir: &Path) -> Result<(ModelChoice, Option<State>)> {
    let unreadable = |e| Failure::usage(format!("--model {}: {e}", dir.display()));
    // States that lie in a model's directory are not what was named.
    let found = match dir.join("config.json").symlink_metadata().is_ok() {
        true => None,
        false => State::weights_of(dir, unreadable)?,
    };
    match found {
        Some((state, weights)) => Ok((ModelChoice::of(weights), Some(state))),
        None => Ok((ModelChoice::directory(dir)?, None)),
    }
}

impl EvalPlan {
    /// As `--attention` names the kernels of attention; none on the processor.
    pub fn attention(&self) -> Option<&'static str> {
        self.device.attention(self.dtype.dtype(), self.model.config.head_dim)
    }

    /// After how many steps of its training weights of a state are.
    fn step(&self) -> Option<usize> {
        self.state.as_ref().map(State::step)
    }

    /// Checks every flag of `eval`.
    ///
    /// # Errors
    /// The first thing that cannot be done, in one sentence.
    pub fn new(args: &EvalArgs, identity: Option<&Identity>) -> Result<Self> {
        let precision = check_anywhere(args)?;
        let unasked = device::ranks_unasked(&args.device, &args.ranks, identity);
        let mut ranks = Ranks::plan(&args.ranks, unasked, identity)?;
        let device = Device::plan(&args.device, &ranks, identity)?;
        ranks.compute_on(args.device.device, args.ranks.threads);
        ranks.reads_data = true;
        check_weights(&args.model)?;
        let (model, state) = open(&args.model)?;
        let input = Input::find(&args.data, identity.is_some() && ranks.world > 1)?;
        held::check_mixed("--data", &args.data, &input, "--data {}/*val*.bin")?;
        ranks.check_inputs("--data", input.token_files(), identity)?;
        if let (Some(tokenizer), false) = (&args.tokenizer, input.is_text()) {
            return Err(Failure::usage(format!(
                "--tokenizer {} is for text, and --data are tokens already: leave it away",
                tokenizer.display()
            )));
        }
        ranks.check_inputs("--tokenizer", args.tokenizer.as_slice(), identity)?;
        let mut tokenizer = model.tokenizer(args.tokenizer.as_deref(), input.is_text())?;
        if args.append_eod {
            model.append_eod(tokenizer.as_mut(), input.is_text())?;
        }
        let length = model.sequence(args.seq, LONGEST)?;
        let feed = Feed::open(input, None, tokenizer.as_ref(), model.config.vocab, Share::of(identity))?;
        let windows = feed.windows(length)?;
        let length = windows.length();
        check_tokens(&feed, identity)?;
        // A batch larger than the data would only reserve memory.
        let rows = args.micro_batch.min(windows.count());
        let (dtype, json, quiet, colour) =
            (args.dtype, args.json, args.ranks.quiet, args.ranks.color.unwrap_or_default());
        let (recompute, threads) = (Recompute::NoBackward, ranks.threads);
        let batch = MicroBatch { rows, length, recompute, precision, threads };
        // Whether the device's kernels take the model is known before any rank starts.
        model.footprint(&batch, dtype, &device)?;
        let data = args.data.clone();
        let plan =
            EvalPlan { model, state, data, feed, windows, ranks, device, dtype, batch, json, quiet, colour };
        plan.check_memory(identity)?;
        Ok(plan)
    }

    /// Whether this machine can hold its ranks, each with the whole model. GPUs are looked at before ranks are started
    /// here: those that others start may have been given some, which they look at themselves.
    fn check_memory(&self, identity: Option<&Identity>) -> Result<()> {
        let (ranks, batch) = (self.ranks.world, &self.batch);
        if self.device.gpus().is_none() {
            let footprint = self.model.footprint(batch, self.dtype, &self.device)?;
            let model = footprint.activations + footprint.workspace + self.weights().sum::<usize>();
            let control = self.ranks.control_bytes(machine::ranks_here(ranks, identity));
            let each = model + batch.token_bytes() + collectives::ready_bytes(ranks) + control;
            let tokens = tokens_in_memory(&self.feed, ranks, identity);
            let all = (each as u64).saturating_mul(ranks as u64).saturating_add(tokens);
            let advice = self.memory_advice(identity) + machine::text_advice(tokens, all);
            // Who started ranks has looked at all of them, and holds the tokens by now.
            return match spawn::supervised() {
                true => Ok(()),
                false => machine::check_memory(ranks, identity, all, &advice),
            };
        }
        if identity.is_some() {
            return Ok(());
        }
        for (gpu, room) in self.device.rooms(ranks, false) {
            device::check_evaluation(&gpu, room, batch, |batch| self.arena(batch))?;
        }
        Ok(())
    }

    /// What would make it take less memory of the host, of that which it does not do yet.
    fn memory_advice(&self, identity: Option<&Identity>) -> String {
        let fewer = self.ranks.fewer(1, identity);
        let lower = [("--micro-batch", self.batch.rows > 1), ("--seq", true), ("--ranks", fewer)];
        let take = [("--dtype bf16", self.dtype == Precision::F32), ("a smaller --model", true)];
        format!("lower {}, or take {}", human::either(lower), human::either(take))
    }

    /// Bytes of each tensor of the model.
    fn weights(&self) -> impl Iterator<Item = usize> {
        let element = self.dtype.dtype().size();
        let tensors = self.model.config.units().into_iter().flat_map(|unit| unit.tensors);
        tensors.map(move |tensor| tensor.len() * element)
    }

    /// Bytes of the one piece of memory on a device that everything lies in.
    ///
    /// # Errors
    /// A micro-batch that is too large to be computed.
    pub fn arena(&self, batch: &MicroBatch) -> Result<usize> {
        let footprint = self.model.footprint(batch, self.dtype, &self.device)?;
        Ok(footprint.arena + Arena::needed(self.weights().chain([PRODUCT_WORKSPACE])))
    }
}

/// What must be the same on every rank.
pub fn signature(plan: &EvalPlan) -> Signature {
    vec![
        ("command", "eval".to_owned()),
        ("version", machine::VERSION.to_owned()),
        ("--model", format!("{:?}", plan.model.config)),
        // While ranks start, a training may put the next in its place.
        ("state of --model", plan.step().map_or("none".to_owned(), |step| format!("after step {step}"))),
        ("weights of --model", plan.model.fingerprint()),
        ("--data", plan.feed.fingerprint()),
        ("--seq", plan.windows.length().to_string()),
        ("--micro-batch", plan.batch.rows.to_string()),
        ("--dtype", plan.dtype.name()),
        ("--device", plan.device.name().to_owned()),
        ("--matmul-precision", plan.batch.matmul_precision(plan.dtype).unwrap_or("none").to_owned()),
        ("--attention", plan.attention().unwrap_or("none").to_owned()),
    ]
}

/// Evaluates as one rank of the run; rank 0 shows.
pub fn rank<T: Float>(plan: &EvalPlan, comm: &Communicator) -> Result<()> {
    let start = Instant::now();
    let length = plan.windows.length();
    let (mut model, mut place) = device::evaluation::<T>(plan, comm)?;
    let weights = load::<T>(&plan.model, model.units(), &mut place)?;
    let last = model.units().len() - 1;
    let (windows, rest) = (&plan.windows, plan.windows.rest());
    let rounds = rounds(windows, plan.batch.rows, rest, comm.size());
    let mut progress = Progress::of_rounds(rounds, plan.quiet || comm.rank() > 0, plan.colour);
    let mut round = 0;
    let whose = (plan.model.name.as_str(), plan.dtype);
    let room = || Buffer::<u32>::try_zeroed(plan.batch.rows * length);
    let (mut inputs, mut targets) = (room()?, room()?);
    let room = [inputs.host_mut(), targets.host_mut()];
    let loss = mean_loss(plan.feed.tokens(), windows, rest, room, whose, comm, |batch, sums| {
        progress.round("evaluating", round, rounds);
        round += 1;
        let Some(batch) = batch else { return Ok(()) };
        model.begin(batch, 0.0);
        (0..=last).for_each(|unit| model.forward_unit(unit, &weights));
        sums.set(model.losses());
        Ok(model.check()?)
    });
    progress.finish();
    let loss = loss?;
    if comm.rank() > 0 {
        return Ok(());
    }
    let windows = plan.windows.count() + usize::from(rest > 0);
    let tokens = plan.windows.count() * length + rest;
    let seconds = start.elapsed().as_secs_f64();
    if plan.json {
        out::line(json!({
            "model": plan.model.name,
            "step": plan.step(),
            "data": plan.feed.json(&plan.data),
            "loss": loss,
            "perplexity": loss.exp(),
            "tokens": tokens,
            "windows": windows,
            "seq": length,
            "dtype": plan.dtype.name(),
            "ranks": plan.ranks.world,
            "transport": plan.ranks.label,
            "device": plan.device.name(),
            "attention": plan.attention(),
            "matmul_precision": plan.batch.products(plan.dtype, &plan.device),
            "seconds": seconds,
        }))?;
    } else if plan.quiet {
        out::line(loss)?;
    } else {
        out::line(format_args!(
            "loss {loss:.6} (perplexity {:.4}){} on {} in {} of {length}{}, {}{}, in {}",
            loss.exp(),
            plan.state.as_ref().map_or(String::new(), |state| format!(" of {}", state.dir().display())),
            several(tokens, "token"),
            several(windows, "window"),
            if rest > 0 { format!(", the last of {rest}") } else { String::new() },
            plan.dtype.name(),
            plan.batch.products_remark(&plan.device),
            human::seconds(seconds)
        ))?;
    }
    Ok(())
}

/// All weights of a model, held whole: each tensor is read to the host, and then moved to its place.
fn load<T: Float>(
    model: &ModelChoice,
    units: &[Unit],
    place: &mut dyn FnMut(Buffer<T>) -> Result<Buffer<T>>,
) -> Result<Vec<Vec<Buffer<T>>>> {
    let Some(weights) = &model.weights else {
        return Err(Failure::run(format!("model {} has no weights to evaluate", model.name)));
    };
    let mut tensor = |spec: &models::TensorSpec| {
        let mut buffer = Buffer::try_zeroed(spec.len())?;
        weights.read_range(&spec.name, 0..spec.len(), buffer.host_mut()).map_err(Failure::run)?;
        place(buffer)
    };
    let unit = |unit: &Unit| unit.tensors.iter().map(&mut tensor).collect::<Result<_>>();
    units.iter().map(unit).collect()
}
