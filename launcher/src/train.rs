//! One rank's training run: steps, evaluations, what is shown and what is written.

mod describe;
mod ending;
mod loader;
pub mod stop;
mod trace;

use crate::agree;
use crate::args::RankArgs;
use crate::checkpoint::Keeping;
use crate::device;
use crate::evaluate::{mean_loss, rounds};
use crate::failure::{Failure, Result};
use crate::human::{self, several};
use crate::metrics::Record;
use crate::out;
use crate::plan::TrainPlan;
use crate::printed::Printed;
use crate::progress::{Progress, Tick};
use crate::report::{self, RankReport, memory_json};
use crate::save::{self, Companions};
use crate::text;
use collectives::{Communicator, Float};
pub use describe::signature;
use loader::Loader;
use models::tokens::Windows;
use serde_json::json;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use trace::Tracing;
use zero::{Ledger, Memory, Step, Trainer};

/// What keeps weights finite.
const REMEDY: &str = "a lower --lr or a longer --warmup usually helps";

/// Steps over which shown speed is averaged.
const RECENT: f64 = 20.0;

/// Trains as one rank of the run; rank 0 shows and writes.
pub fn rank<T: Float>(plan: &TrainPlan, comm: Communicator) -> Result<()> {
    let mut run = Run::<T>::begin(plan, comm)?;
    if plan.keeps() {
        stop::listen()?;
    }
    let held_out = plan.feed.held_out(plan.batch.length);
    // After the last step all that is held out is evaluated.
    let due = |made: usize| made < plan.steps && plan.eval_every > 0 && made.is_multiple_of(plan.eval_every);
    let evaluate = |run: &mut Run<'_, T>, made: usize| match held_out.as_ref().filter(|_| due(made)) {
        Some(windows) => run.evaluate(made - 1, &windows.first(plan.eval_tokens), 0),
        None => Ok(()),
    };
    // The run before ended in the midst of one.
    if plan.state().is_some_and(|state| !state.evaluated)
        && let Err(failure) = evaluate(&mut run, plan.made_before())
    {
        return Err(run.end_early(failure));
    }
    for step in plan.made_before()..plan.steps {
        if let Err(failure) = run.step(step).and_then(|()| evaluate(&mut run, step + 1)) {
            return Err(run.end_early(failure));
        }
        let last = step + 1 == plan.steps;
        if let Some(checkpoints) =
            plan.checkpoints.as_ref().filter(|checkpoints| !last && checkpoints.due(step + 1))
        {
            run.checkpoint(checkpoints.beside)?;
        }
    }
    run.finish(held_out.as_ref())
}

/// One rank's run under way.
struct Run<'a, T: Float> {
    plan: &'a TrainPlan,
    trainer: Trainer<T>,
    /// The device's.
    remarks: Receiver<String>,
    tracing: Option<Tracing<'a>>,
    loader: Loader<'a>,
    /// Rank 0's, as the rest up to the account.
    record: Record,
    progress: Progress,
    companions: Arc<Companions>,
    account: RankReport,
    predicted: Memory,
    speed: Speed,
    start: Instant,
    /// What saving and traces took, and a step that came to nothing: no part of the run's time.
    apart: Duration,
    /// Steps that are made, with those before this run.
    made: usize,
    /// What is kept of its state on the way, if anything.
    keeping: Option<Keeping<'a>>,
    last: Step,
    validation: Option<f64>,
    /// What it ends with before its time is not that its weights are worth less.
    sound: bool,
}

impl<'a, T: Float> Run<'a, T> {
    /// Says what is about to happen, and takes all memory.
    fn begin(plan: &'a TrainPlan, comm: Communicator) -> Result<Self> {
        let me = comm.rank();
        let lead = me == 0;
        // Before anything is written anew.
        let mut unread = None;
        let companions = match lead {
            true if plan.keeps() => save::companions(&plan.model, plan.tokenizer.as_ref())?,
            // What a sample ends with is worth no failure.
            true if plan.sample > 0 => {
                save::companions(&plan.model, plan.tokenizer.as_ref()).unwrap_or_else(|why| {
                    unread = Some(why);
                    Companions::default()
                })
            }
            _ => Companions::default(),
        };
        let companions = Arc::new(companions);
        let mut keeping = Keeping::begin(plan, &comm, &companions)?;
        // Rank 0 writes them, and all know whether it does.
        let hosts = match &plan.metrics {
            Some(_) => agree::exchange(&comm, &collectives::bootstrap::host_name())?,
            None => Vec::new(),
        };
        let RankArgs { quiet, color, .. } = plan.asked;
        let progress = Progress::new(plan.steps, quiet || !lead, color.unwrap_or_default());
        progress.line(&describe::headline(plan));
        if let Some(remark) = text::structured(plan.data.iter().chain(&plan.val_data)) {
            progress.line(&remark);
        }
        if let Some(why) = unread {
            progress.alarm(&format!("the sample goes on where the model ends its text: {why}"));
        }
        if let Some(file) = &plan.configuration {
            progress.line(&file.lines((plan.batch.rows, plan.zero.accumulate), plan.ranks.world));
        }
        let predicted = plan.predict(&comm.group())?;
        let ledger = Ledger::default();
        let loader = Loader::new(plan, me, plan.zero.placement.of_host(&ledger.workspace, &ledger.host))?;
        let (say, remarks) = channel();
        let mut trainer = device::trainer::<T>(plan, comm.clone(), ledger, &say)?;
        if let Some(state) = plan.state() {
            state.restore(&mut trainer, plan)?;
            let differences = state.differences(plan);
            if !differences.is_empty() {
                progress.line(&format!("goes on with {differences}"));
            }
        }
        let ledger = trainer.ledger();
        let account = plan.zero.placement.of_host(&ledger.workspace, &ledger.host);
        keeping.as_mut().map_or(Ok(()), |keeping| keeping.reserve(trainer.plan(), account))?;
        let tracing = match &plan.traced {
            Some(traced) if traced.steps.is_empty() => {
                let path = traced.path.display();
                progress.line(&format!("no trace is written to {path}: it is {traced}"));
                None
            }
            traced => traced.as_ref().map(|traced| Tracing::begin(traced, &mut trainer)),
        };
        // Only now: a run that is refused leaves the metrics of the one before.
        let record = match &plan.metrics {
            Some(path) if lead => Record::begin(
                path,
                &json!({"run": describe::run(plan, &comm, &hosts)}),
                plan.made_before() > 0,
            )?,
            _ => Record::default(),
        };
        Ok(Run {
            plan,
            trainer,
            remarks,
            tracing,
            loader,
            record,
            progress,
            companions,
            account: RankReport { predicted: predicted.total(), ..RankReport::default() },
            predicted,
            speed: Speed::default(),
            start: Instant::now(),
            apart: Duration::ZERO,
            made: plan.made_before(),
            keeping,
            last: Step::default(),
            validation: None,
            sound: false,
        })
    }

    fn step(&mut self, step: usize) -> Result<()> {
        if let Some(tracing) = &mut self.tracing {
            tracing.before(step + 1, self.trainer.comm())?;
        }
        let began = Instant::now();
        // Where steps are skipped, the schedule waits.
        let lr = self.plan.rate.at(self.trainer.standing().updates() as usize);
        self.loader.start(step);
        let done = self.trainer.step(&mut self.loader, lr as f32).inspect_err(|e| {
            self.sound = !matches!(e, zero::Error::NotFinite { .. });
            self.apart += began.elapsed();
        })?;
        let seconds = began.elapsed().as_secs_f64();
        self.account.compute += done.compute_seconds;
        self.account.exposed += done.exposed_communication_seconds;
        self.account.optimizer += done.optimizer_seconds;
        self.account.data += self.loader.seconds;
        self.account.bytes_sent += done.bytes_sent;
        self.speed.add(done.tokens, seconds);
        let held = self.trainer.ledger().held();
        let scaled = self.trainer.standing().scale;
        self.record.line(&self.progress, || {
            let mut line = json!({
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
            });
            if scaled.is_some() {
                line["loss_scale"] = done.loss_scale.into();
                line["skipped"] = done.skipped.into();
            }
            line
        });
        if let Some(scale) = scaled.filter(|_| done.skipped) {
            self.progress.line(&format!(
                "step {}  skipped: its gradient is too large for {} at a loss scale of {}; the next is at {}",
                step + 1,
                T::DTYPE,
                done.loss_scale,
                f64::from(scale.scale)
            ));
        }
        self.progress.tick(&Tick {
            step: step + 1,
            loss: done.loss,
            grad_norm: done.grad_norm,
            tokens_per_second: self.speed.tokens_per_second(),
            memory: held.total() as u64,
        });
        self.pass_on();
        (self.made, self.last, self.validation) = (step + 1, done, None);
        self.trace()?;
        self.ask_for_checkpoint(false)
    }

    /// Says what the device has said.
    fn pass_on(&self) {
        for remark in self.remarks.try_iter() {
            self.progress.alarm(&format!("rank {}: {remark}", self.trainer.comm().rank()));
        }
    }

    /// After a step, the last of those that are traced or not.
    fn trace(&mut self) -> Result<()> {
        let Some(tracing) = &mut self.tracing else { return Ok(()) };
        let began = Instant::now();
        match tracing.after(self.made, self.plan, &mut self.trainer)? {
            Some(Ok(told)) => self.progress.line(&told),
            Some(Err(why)) => self.record.without(("a trace", ""), &self.progress, &why),
            None => {}
        }
        self.apart += began.elapsed();
        Ok(())
    }

    /// The mean loss over these windows and so many tokens behind them, after `step`.
    fn evaluate(&mut self, step: usize, windows: &Windows, rest: usize) -> Result<()> {
        let began = Instant::now();
        let (plan, comm) = (self.plan, self.trainer.comm().clone());
        let rounds = rounds(windows, plan.batch.rows, rest, comm.size());
        let mut round = 0;
        let model = format!("{} after step {}", plan.model.name, step + 1);
        let whose = (model.as_str(), plan.dtype);
        let loss =
            mean_loss(plan.feed.tokens(), windows, rest, self.loader.room(), whose, &comm, |batch, sums| {
                if self.plan.keeps() {
                    stop::any(&comm)?;
                }
                self.progress.round("evaluating", round, rounds);
                round += 1;
                sums.set(self.trainer.evaluate(batch)?);
                Ok(())
            });
        self.account.evaluation += began.elapsed().as_secs_f64();
        self.pass_on();
        let loss = loss.map_err(|e| match e {
            Failure::Stopped { .. } | Failure::Unread(_) => {
                self.sound = true;
                e
            }
            e => e.remark(REMEDY),
        })?;
        self.progress.line(&format!("step {}  validation loss {loss:.4}", step + 1));
        let tokens = windows.count() * windows.length() + rest;
        self.record.line(
            &self.progress,
            || json!({"evaluation": {"step": step + 1, "loss": loss, "tokens": tokens}}),
        );
        self.validation = Some(loss);
        Ok(())
    }

    /// Steps of this run.
    fn done(&self) -> usize {
        self.made - self.plan.made_before()
    }

    /// The last evaluation, of all that is held out, and the summary of a run whose model is `kept` there, with so many
    /// weights that are not finite: a loss that is not finite tells of them first, where one is taken.
    fn conclude(&mut self, held_out: Option<&Windows>, kept: Option<&Path>, not_finite: usize) -> Result<()> {
        let last = self.plan.steps - 1;
        self.validation = None;
        let evaluated = held_out.map_or(Ok(()), |windows| self.evaluate(last, windows, windows.rest()));
        self.progress.finish();
        let stopped = match evaluated {
            Err(stopped @ Failure::Stopped { .. }) => Some(stopped),
            evaluated => evaluated.map(|()| None)?,
        };
        if not_finite > 0 {
            return Err(Failure::Verdict(self.ruin(not_finite, self.plan.steps)).remark(REMEDY));
        }
        self.account_for(kept)?;
        stopped.map_or(Ok(()), |stopped| {
            let whole = "all steps were made, and the last evaluation was not";
            let saved =
                kept.map_or(String::new(), |dir| format!("; the model was saved to {}", dir.display()));
            Err(stopped.remark(&format!("{whole}{saved}")))
        })
    }

    /// What the steps that are made came to, by all ranks' accounts.
    fn account_for(&mut self, kept: Option<&Path>) -> Result<()> {
        self.progress.finish();
        self.account.total = (self.start.elapsed() - self.apart).as_secs_f64();
        self.account.memory = self.trainer.ledger().held();
        let comm = self.trainer.comm().clone();
        self.account.peak_rss = report::peak_rss(&comm);
        let ranks = self.account.gather(&comm)?;
        let text = if comm.rank() == 0 { self.summarize(&ranks, kept) } else { String::new() };
        let printed = Printed::new(&comm, self.plan.asked.quiet)?;
        printed.text(&text)?;
        printed.end()
    }

    /// Where the model is.
    fn place(kept: Option<&Path>) -> String {
        kept.map_or(String::new(), |dir| format!("saved to {}\n", dir.display()))
    }

    /// Records what the run came to, from all ranks' accounts, and gives it in words.
    fn summarize(&mut self, ranks: &[RankReport], kept: Option<&Path>) -> String {
        let plan = self.plan;
        let (steps, tokens) = (self.done(), self.done() * plan.step_tokens);
        let before = plan.state().map_or(0, |state| state.standing.skipped);
        let skipped = self.trainer.standing().skipped - before;
        // Of training alone: how much is held out, and how often it is looked at or kept, says nothing of the speed.
        let RankReport { total, evaluation, checkpoints, .. } = self.account;
        let speed = tokens as f64 / (total - evaluation - checkpoints);
        self.record.line(&self.progress, || {
            json!({"summary": {
                "steps": steps,
                "skipped": plan.zero.scaling.map(|_| skipped),
                "tokens": tokens,
                "seconds": total,
                "evaluation_seconds": evaluation,
                "checkpoint_seconds": checkpoints,
                "tokens_per_second": speed,
                "loss": (steps > 0).then_some(self.last.loss),
                "validation_loss": self.validation,
                "predicted_memory": memory_json(&self.predicted),
                "ranks": ranks.iter().enumerate().map(|(r, report)| report.json(r)).collect::<Vec<_>>(),
                "saved": kept.map(|path| path.display().to_string()),
            }})
        });
        let held_out = self.validation.map_or(String::new(), |v| format!(", validation loss {v:.4}"));
        let beside = [(evaluation, "evaluation"), (checkpoints, "checkpoints")];
        let beside = beside.into_iter().filter(|(seconds, _)| *seconds > 0.0);
        let beside: Vec<_> =
            beside.map(|(t, what)| format!("{} of them {what}", human::seconds(t))).collect();
        let speed = human::rate(speed);
        let speed = match beside.len() {
            0 => format!(" ({speed} tokens/s)"),
            _ => format!(", {} ({speed} tokens/s without)", beside.join(", ")),
        };
        let trained = match steps {
            0 => format!("all {} were made before{held_out}", several(plan.steps, "step")),
            _ => format!(
                "{}{}, {} tokens in {}{speed}; training loss {:.4}{held_out}",
                several(steps, "step"),
                if skipped > 0 { format!(" ({skipped} of them skipped)") } else { String::new() },
                human::count(tokens as f64),
                human::seconds(total),
                self.last.loss,
            ),
        };
        let table = report::table(ranks, steps, plan.zero.placement, out::columns());
        format!("{table}\n{trained}\n{}", Self::place(kept))
    }
}

/// A moving average of speed.
#[derive(Default)]
struct Speed {
    tokens: f64,
    seconds: f64,
}

impl Speed {
    fn add(&mut self, tokens: usize, seconds: f64) {
        let keep = 1.0 - 1.0 / RECENT;
        self.tokens = self.tokens * keep + tokens as f64;
        self.seconds = self.seconds * keep + seconds;
    }

    fn tokens_per_second(&self) -> f64 {
        self.tokens / self.seconds.max(1e-9)
    }
}

/// Text of a model, indented, without what a terminal would obey.
fn indent(text: &str) -> String {
    let shown = text.replace(|c: char| c.is_control() && c != '\n' && c != '\t', "\u{fffd}");
    shown.lines().map(|line| format!("  {line}")).collect::<Vec<_>>().join("\n")
}
