//! One rank's training run: batches, steps, evaluations, what is shown and what is written.

use crate::agree::Signature;
use crate::bench::tuning;
use crate::device;
use crate::evaluate::mean_loss;
use crate::failure::{Failure, Result};
use crate::files;
use crate::human;
use crate::machine::{Machine, versions};
use crate::metrics::Metrics;
use crate::out;
use crate::plan::TrainPlan;
use crate::progress::{Progress, Tick};
use crate::report::{self, RankReport, memory_json};
use crate::sample;
use crate::save;
use crate::tokenizer::Tokenizer;
use collectives::{Communicator, Float};
use models::{Batch, Recompute};
use serde_json::json;
use std::time::Instant;
use zero::{Batches, Ledger, Placement, Step};

/// What must be the same on every rank: who differs would compute something else, or make other calls.
pub fn signature(plan: &TrainPlan) -> Signature {
    let model = &plan.model.config;
    let (rate, adamw) = (&plan.rate, &plan.zero.adamw);
    vec![
        ("command", "train".to_owned()),
        ("version", env!("CARGO_PKG_VERSION").to_owned()),
        ("--model", format!("{model:?}")),
        ("weights of --model", plan.model.fingerprint()),
        ("--tokenizer", plan.tokenizer.as_ref().map_or("not known".to_owned(), Tokenizer::fingerprint)),
        ("--data", plan.feed.fingerprint()),
        ("--device", plan.device.name().to_owned()),
        ("--offload", plan.offload().to_owned()),
        ("--cuda-graphs", plan.cuda_graphs.to_string()),
        ("--stage", plan.zero.stage.level().to_string()),
        ("--dtype", plan.dtype.name().to_owned()),
        ("--steps", plan.steps.to_string()),
        ("--micro-batch", plan.batch.rows.to_string()),
        ("--accumulate", plan.zero.accumulate.to_string()),
        ("--recompute", recompute(plan).to_owned()),
        ("--seq", plan.batch.length.to_string()),
        ("--lr", rate.peak.to_string()),
        ("--min-lr", rate.floor.to_string()),
        ("--warmup", rate.warmup.to_string()),
        ("--schedule", rate.shape.name().to_owned()),
        ("--weight-decay", adamw.weight_decay.to_string()),
        ("--beta1", adamw.beta1.to_string()),
        ("--beta2", adamw.beta2.to_string()),
        ("--eps", adamw.eps.to_string()),
        ("--clip", plan.zero.clip.unwrap_or(0.0).to_string()),
        ("--seed", plan.seed.to_string()),
        ("--order", plan.order.name().to_owned()),
        ("--eval-every", plan.eval_every.to_string()),
        ("--eval-tokens", plan.eval_tokens.to_string()),
        ("--save", files::wanted(plan.save.as_deref())),
        ("--prefetch", plan.zero.prefetch.to_string()),
        ("--bucket-size", plan.zero.bucket_bytes.to_string()),
        ("--sample", plan.sample.to_string()),
    ]
}

/// As `--recompute` names it.
fn recompute(plan: &TrainPlan) -> &'static str {
    match plan.batch.recompute {
        Recompute::Full => "full",
        Recompute::None => "none",
    }
}

/// What a user wants to see of a run.
#[derive(Clone, Copy, Debug)]
pub struct Show {
    /// Nothing but errors.
    pub quiet: bool,
    /// When to colour.
    pub colour: crate::args::Colour,
}

/// Steps over which shown speed is averaged.
const RECENT: f64 = 20.0;

/// Trains as one rank of the run; rank 0 shows and writes.
pub fn rank<T: Float>(plan: &TrainPlan, comm: Communicator, show: Show) -> Result<()> {
    let lead = comm.rank() == 0;
    let me = comm.rank();
    let mut metrics = match &plan.metrics {
        Some(path) if lead => Some(Metrics::create(path)?),
        _ => None,
    };
    if let Some(metrics) = &mut metrics {
        metrics.line(&json!({"run": describe(plan)}))?;
    }
    let mut progress = Progress::new(plan.steps, show.quiet || !lead, show.colour);
    progress.line(&headline(plan));
    let companions = match plan.save {
        Some(_) if lead => save::companions(plan)?,
        _ => vec![],
    };

    let predicted = plan.predict(&comm.group())?;
    let mut trainer = device::trainer::<T>(plan, comm, Ledger::default())?;

    let mut loader = Loader::new(plan, me);
    let mut account = RankReport { predicted: predicted.total(), ..RankReport::default() };
    let mut last = Step::default();
    let mut pace = Pace::default();
    let held_out = plan.feed.held_out(plan.batch.length);
    let mut validation = None;
    let start = Instant::now();
    for step in 0..plan.steps {
        let began = Instant::now();
        let lr = plan.rate.at(step);
        loader.start(step);
        let done = trainer.step(&mut loader, lr as f32)?;
        loader.check()?;
        let seconds = began.elapsed().as_secs_f64();
        account.compute += done.compute_seconds;
        account.exposed += done.exposed_communication_seconds;
        account.optimizer += done.optimizer_seconds;
        account.data += loader.seconds;
        account.bytes_sent += done.bytes_sent;
        pace.add(done.tokens, seconds);
        let held = trainer.ledger().held();
        if let Some(metrics) = &mut metrics {
            metrics.line(&json!({
                "step": step + 1,
                "loss": done.loss,
                "grad_norm": done.grad_norm,
                "lr": lr,
                "tokens": done.tokens,
                "seconds": seconds,
                "tokens_per_second": done.tokens as f64 / seconds,
                "compute_seconds": done.compute_seconds,
                "exposed_communication_seconds": done.exposed_communication_seconds,
                "optimizer_seconds": done.optimizer_seconds,
                "bytes_sent": done.bytes_sent,
                "memory": memory_json(&held),
            }))?;
        }
        progress.tick(&Tick {
            step: step + 1,
            loss: done.loss,
            grad_norm: done.grad_norm,
            tokens_per_second: pace.tokens_per_second(),
            memory: held.total() as u64,
        });
        last = done;
        let due = plan.eval_every > 0 && (step + 1) % plan.eval_every == 0;
        let last_step = step + 1 == plan.steps;
        if let Some(windows) = held_out.as_ref().filter(|_| due || last_step) {
            let began = Instant::now();
            let some = windows.first(if last_step { usize::MAX } else { plan.eval_tokens });
            let comm = trainer.comm().clone();
            let rounds = some.count().div_ceil(plan.batch.rows).div_ceil(comm.size());
            let mut round = 0;
            let loss = mean_loss(plan.feed.tokens(), &some, plan.batch.rows, 0, &comm, |batch| {
                progress.evaluating(round, rounds);
                round += 1;
                Ok(trainer.evaluate(batch)?)
            })?;
            account.evaluation += began.elapsed().as_secs_f64();
            progress.line(&format!("step {}  validation loss {loss:.4}", step + 1));
            if let Some(metrics) = &mut metrics {
                let tokens = some.count() * some.length();
                metrics.line(&json!({"evaluation": {"step": step + 1, "loss": loss, "tokens": tokens}}))?;
            }
            validation = Some(loss);
        }
    }
    account.total = start.elapsed().as_secs_f64();
    account.memory = trainer.ledger().held();
    account.peak_rss = report::peak_rss();
    progress.finish();
    let ranks = account.gather(trainer.comm())?;
    // What took hours is kept first, and what became of it told whether or not it could be.
    let saved = match &plan.save {
        Some(dir) => save::model(&mut trainer, plan, dir, &companions),
        None => Ok(()),
    };
    let kept = plan.save.as_ref().filter(|_| saved.is_ok());
    let mut tell = || {
        let tokens = plan.steps * plan.step_tokens;
        let speed = tokens as f64 / (account.total - account.evaluation);
        if let Some(metrics) = &mut metrics {
            metrics.line(&json!({"summary": {
                "steps": plan.steps,
                "tokens": tokens,
                "seconds": account.total,
                "tokens_per_second": speed,
                "loss": last.loss,
                "validation_loss": validation,
                "predicted_memory": memory_json(&predicted),
                "ranks": ranks.iter().enumerate().map(|(r, report)| report.json(r)).collect::<Vec<_>>(),
                "saved": kept,
            }}))?;
        }
        if show.quiet {
            return Ok(());
        }
        out::line(report::table(&ranks, plan.steps, plan.zero.placement))?;
        let held_out = validation.map_or(String::new(), |v| format!(", validation loss {v:.4}"));
        out::line(format_args!(
            "{} steps, {} tokens in {} ({} tokens/s); training loss {:.4}{held_out}",
            plan.steps,
            human::count(tokens as f64),
            human::seconds(account.total),
            human::count(speed),
            last.loss
        ))?;
        kept.map_or(Ok(()), |dir| out::line(format_args!("saved to {}", dir.display())))
    };
    let told = if lead { tell() } else { Ok(()) };
    saved.and(told)?;
    let text = sample::generate(&mut trainer, plan)?.filter(|_| lead);
    text.map_or(Ok(()), |text| out::line(format_args!("sample\n{}", indent(&text))))
}

/// Makes the micro-batches of one rank.
struct Loader<'a> {
    plan: &'a TrainPlan,
    rank: usize,
    step: usize,
    tokens: Vec<u32>,
    targets: Vec<u32>,
    /// Spent on this step's batches.
    seconds: f64,
    failed: Option<Failure>,
}

impl<'a> Loader<'a> {
    fn new(plan: &'a TrainPlan, rank: usize) -> Self {
        let n = plan.batch.rows * plan.batch.length;
        Loader { plan, rank, step: 0, tokens: vec![0; n], targets: vec![0; n], seconds: 0.0, failed: None }
    }

    fn start(&mut self, step: usize) {
        self.step = step;
        self.seconds = 0.0;
    }

    /// What went wrong with a batch of this step.
    fn check(&mut self) -> Result<()> {
        self.failed.take().map_or(Ok(()), Err)
    }
}

impl Batches for Loader<'_> {
    fn micro_batch(&mut self, index: usize) -> Batch<'_> {
        let began = Instant::now();
        let plan = self.plan;
        let number = plan.batches.index(self.step as u64, index, self.rank);
        if let Err(e) = plan.batches.read(plan.feed.tokens(), number, &mut self.tokens, &mut self.targets) {
            // The step takes what is there; the run ends before anything is made of it.
            self.failed.get_or_insert(Failure::run(e));
            self.tokens.fill(0);
            self.targets.fill(0);
        }
        self.seconds += began.elapsed().as_secs_f64();
        Batch {
            tokens: &self.tokens,
            targets: &self.targets,
            rows: plan.batch.rows,
            length: plan.batch.length,
        }
    }
}

/// A moving average of speed.
#[derive(Default)]
struct Pace {
    tokens: f64,
    seconds: f64,
}

impl Pace {
    fn add(&mut self, tokens: usize, seconds: f64) {
        let keep = 1.0 - 1.0 / RECENT;
        self.tokens = self.tokens * keep + tokens as f64;
        self.seconds = self.seconds * keep + seconds;
    }

    fn tokens_per_second(&self) -> f64 {
        self.tokens / self.seconds.max(1e-9)
    }
}

/// One line that says what is about to happen.
fn headline(plan: &TrainPlan) -> String {
    let micro = match plan.zero.accumulate {
        1 => String::new(),
        n => format!(" x {n} micro-batches"),
    };
    let weights = match &plan.model.weights {
        Some(weights) => format!("weights of {}", weights.dir().display()),
        None => "new weights".to_owned(),
    };
    // Which text tokens are, or why nobody can tell.
    let tokenizer = match (&plan.tokenizer, plan.sample) {
        (Some(tokenizer), _) => format!(", tokenizer {}", tokenizer.name()),
        (None, 0) => String::new(),
        (None, _) => ", tokenizer not known: no sample will be shown (--tokenizer names it)".to_owned(),
    };
    format!(
        "training {} ({} parameters, {weights}) on {} x {}{} over {}, ZeRO stage {}, {}{}\n\
         {}{tokenizer}; {} of {}{micro} x {} sequences x {} tokens",
        plan.model.name,
        human::count(plan.model.config.parameters() as f64),
        several(plan.ranks.world, "rank"),
        several(plan.ranks.threads, "thread"),
        plan.device.describe(),
        plan.ranks.asked(),
        plan.zero.stage,
        plan.dtype.name(),
        match plan.zero.placement {
            Placement::Offloaded => ", optimizer on the host",
            _ => "",
        },
        plan.feed.describe(),
        several(plan.steps, "step"),
        several(plan.ranks.world, "rank"),
        plan.batch.rows,
        plan.batch.length
    )
}

/// `1 rank`, `2 ranks`.
fn several(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

/// The configuration of the run, the machine and the versions.
fn describe(plan: &TrainPlan) -> serde_json::Value {
    let model = &plan.model.config;
    json!({
        "model": {
            "name": plan.model.name,
            "parameters": model.parameters(),
            "hidden": model.hidden,
            "layers": model.layers,
            "heads": model.heads,
            "kv_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "ffn": model.ffn,
            "vocab": model.vocab,
            "context": model.context,
            "tied": model.tied,
            "from_directory": plan.model.weights.is_some(),
        },
        "data": plan.feed.json(),
        "tokenizer": plan.tokenizer.as_ref().map(Tokenizer::name),
        "ranks": plan.ranks.world,
        "transport": plan.ranks.asked(),
        "ranks_per_node": plan.asked.ranks_per_node,
        "emulate_link": plan.asked.emulate_link,
        "share_gpus": plan.asked.share_gpus,
        "tuning": tuning::named(plan.asked.tuning.as_ref()),
        "rendezvous_timeout": plan.asked.rendezvous_timeout,
        "call_timeout": plan.asked.call_timeout,
        "threads": plan.ranks.threads,
        "device": plan.device.name(),
        "offload": plan.offload(),
        "cuda_graphs": plan.cuda_graphs,
        "stage": plan.zero.stage.level(),
        "dtype": plan.dtype.name(),
        "steps": plan.steps,
        "micro_batch": plan.batch.rows,
        "accumulate": plan.zero.accumulate,
        "seq": plan.batch.length,
        "flops_per_token": model.flops_per_token(plan.batch.length),
        "lr": plan.rate.peak,
        "min_lr": plan.rate.floor,
        "warmup": plan.rate.warmup,
        "schedule": plan.rate.shape.name(),
        "weight_decay": plan.zero.adamw.weight_decay,
        "beta1": plan.zero.adamw.beta1,
        "beta2": plan.zero.adamw.beta2,
        "eps": plan.zero.adamw.eps,
        "clip": plan.zero.clip,
        "seed": plan.seed,
        "order": plan.order.name(),
        "recompute": recompute(plan),
        "prefetch": plan.zero.prefetch,
        "bucket_bytes": plan.zero.bucket_bytes,
        "eval_every": plan.eval_every,
        "eval_tokens": plan.eval_tokens,
        "val_fraction": plan.val_fraction,
        "sample": plan.sample,
        "save": plan.save,
        "machine": Machine::probe().json(),
        "versions": versions(),
    })
}

/// Text of a model, indented, without what a terminal would obey.
fn indent(text: &str) -> String {
    let shown = text.replace(|c: char| c.is_control() && c != '\n' && c != '\t', "\u{fffd}");
    shown.lines().map(|line| format!("  {line}")).collect::<Vec<_>>().join("\n")
}
