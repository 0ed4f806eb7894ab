//! What a run keeps: in between, where it ends before its time, and at its end.

use super::trace::Tracing;
use super::{Run, indent};
use crate::args::RankArgs;
use crate::checkpoint::{Keeping, Written};
use crate::failure::{Failure, Result};
use crate::printed;
use crate::progress::Progress;
use crate::sample;
use crate::save::{self, Saved, Wanted};
use collectives::Float;
use models::tokens::Windows;
use serde_json::json;
use std::path::Path;
use std::time::Instant;

impl<T: Float> Run<'_, T> {
    /// Keeps the state after the last step, unless it is kept already, at once or `beside` the next steps. What is refused costs
    /// no more than that.
    pub(super) fn checkpoint(&mut self, beside: bool) -> Result<()> {
        self.await_checkpoint()?;
        let Some(keeping) = self.keeping.as_mut() else { return Ok(()) };
        if keeping.settle(self.made) {
            return Ok(());
        }
        let began = Instant::now();
        self.record.sync(&self.progress);
        keeping.make(&mut self.trainer, self.validation.is_some(), beside)?;
        self.account.checkpoints += began.elapsed().as_secs_f64();
        if beside { Ok(()) } else { self.await_checkpoint() }
    }

    /// Waits for the checkpoint that is under way.
    fn await_checkpoint(&mut self) -> Result<()> {
        while self.keeping.as_ref().is_some_and(Keeping::waits) {
            self.ask_for_checkpoint(true)?;
        }
        Ok(())
    }

    /// Says what came of the checkpoint that is under way, if it is over: all ranks ask together, and `wait` a moment or do not.
    pub(super) fn ask_for_checkpoint(&mut self, wait: bool) -> Result<()> {
        let (Some(keeping), Some(checkpoints)) = (&mut self.keeping, &self.plan.checkpoints) else {
            return Ok(());
        };
        let began = Instant::now();
        let written = keeping.ask(self.trainer.comm(), wait)?;
        self.account.checkpoints += began.elapsed().as_secs_f64();
        let Some(Written { step, whole, refused, remark }) = written else { return Ok(()) };
        if whole {
            let path = checkpoints.dir.display().to_string();
            self.record.line(&self.progress, || json!({"checkpoint": {"step": step, "path": path}}));
        }
        if let Some(remark) = remark {
            self.progress.alarm(&remark);
        }
        if let Some(why) = refused {
            self.record.without(("a checkpoint", &format!(" of step {step}")), &self.progress, &why);
        }
        Ok(())
    }

    /// What a run comes to because of `failure`. All ranks come to a verdict at the same point, before they update anything
    /// and with nothing under way between them: so what they have can still be kept.
    pub(super) fn end_early(mut self, failure: Failure) -> Failure {
        if !failure.is_verdict() {
            return failure;
        }
        // It is worth what it was.
        if let Err(e) = self.await_checkpoint() {
            return e;
        }
        let missing = self.tracing.as_ref().and_then(Tracing::missing);
        let told = self.rescue(failure);
        let told = match missing {
            Some(missing) if told.is_verdict() => told.remark(&missing),
            _ => told,
        };
        self.with_losses(told)
    }

    /// What a run comes to, and what could not be recorded of it: for who reads that this rank waits, so that no other may wait
    /// for it any more.
    fn with_losses(&mut self, told: Failure) -> Failure {
        self.rest();
        match (told, std::mem::take(&mut self.record).end()) {
            (told, Ok(())) => told,
            (told @ Failure::Stopped { .. }, Err(lost)) => Failure::Verdict(format!("{told}; {lost}")),
            (Failure::Run(told), Err(lost)) => Failure::Run(format!("{told}; {lost}")),
            (told, Err(lost)) => told.remark(&lost.to_string()),
        }
    }

    /// Keeps what a verdict leaves to keep, and says what came of that.
    fn rescue(&mut self, failure: Failure) -> Failure {
        let failure = match &self.plan.checkpoints {
            Some(checkpoints) if self.sound && self.done() > 0 => {
                if let Err(e) = self.checkpoint(false) {
                    // Of ranks that no longer stand together nobody can say more.
                    return e;
                }
                match self.keeping.as_ref().map_or(0, Keeping::kept) {
                    0 => failure,
                    step => {
                        let dir = checkpoints.dir.display();
                        failure.remark(&format!("--resume goes on from {dir} after step {step}"))
                    }
                }
            }
            _ => failure,
        };
        let Some(dir) = self.plan.save.as_deref() else { return failure };
        let steps = self.made;
        if self.done() == 0 {
            return failure.remark("nothing was trained, so nothing was saved");
        }
        let wanted = if self.sound { Wanted::Any } else { Wanted::Rescued };
        let Saved { not_finite, kept, written } = match self.save(wanted) {
            Ok(saved) => saved,
            // Of ranks that no longer stand together nobody can say more.
            Err(e) => return e,
        };
        // All ranks know whether there is something, and only rank 0 of a refusal.
        let told = match (written, kept, not_finite) {
            (Err(e), ..) => Failure::Verdict(format!("{failure}; {e}")),
            (Ok(()), true, lost) => {
                let worth = if self.sound && lost == 0 { "" } else { ", and may be of no use" };
                let told = format!("the weights after step {steps} were saved to {}{worth}", dir.display());
                failure.remark(&told)
            }
            (Ok(()), false, 0) => {
                let left = format!("{} was left as it was", dir.display());
                Failure::Verdict(format!(
                    "{failure}; {left}, because the weights after step {steps} may be worth less"
                ))
            }
            (Ok(()), false, lost) => {
                Failure::Verdict(format!("{failure}; {}: nothing was saved", self.ruin(lost, steps)))
            }
        };
        if !matches!(told, Failure::Stopped { .. }) {
            return told;
        }
        match self.account_for(Some(dir)) {
            Ok(()) => told,
            Err(e @ Failure::Consequence(_)) => e,
            // What could not be shown or recorded does not take away what was kept.
            Err(e) => Failure::Verdict(format!("{told}; {e}")),
        }
    }

    /// What took hours is kept first, whatever comes of the last evaluation, and what the run came to is told whether or
    /// not it could be kept.
    pub(super) fn finish(mut self, held_out: Option<&Windows>) -> Result<()> {
        // The model first: what is ended in between makes its last steps again, and the model.
        let Saved { not_finite, kept, written } = self.save(Wanted::Any)?;
        self.checkpoint(false)?;
        let dir = self.plan.save.as_deref().filter(|_| written.is_ok());
        let kept = dir.filter(|_| kept);
        let ended = match self.conclude(held_out, kept, not_finite) {
            Ok(()) => None,
            Err(failure) if !failure.is_verdict() => {
                self.show_place(kept);
                // Others may wait for this rank, or for why it fails.
                return written.and(Err(failure));
            }
            Err(unread @ Failure::Unread(_)) => {
                self.show_place(kept);
                Some(unread)
            }
            Err(ruin @ Failure::Verdict(_)) => Some(match (dir.map(Path::display), kept) {
                (Some(dir), Some(_)) => ruin.remark(&format!("what was saved to {dir} may be of no use")),
                (Some(dir), None) => ruin.remark(&format!("{dir} was left as it was")),
                (None, _) => ruin,
            }),
            Err(stopped) => Some(stopped),
        };
        let ended = match (written, ended) {
            (Ok(()), ended) => ended,
            (Err(refused), None) => Some(refused),
            // What could not be kept may have been worth nothing, or was about to be evaluated.
            (Err(refused), Some(verdict)) => Some(Failure::Run(format!("{refused}; {verdict}"))),
        };
        if let Some(ended) = ended {
            return Err(self.with_losses(ended));
        }
        if self.plan.save.is_some() && kept.is_none() && not_finite == 0 {
            // Rank 0 was refused, and has left.
            return Ok(());
        }
        let shown = self.show_sample();
        // Nobody waits for this rank any more.
        self.progress.end();
        self.rest();
        std::mem::take(&mut self.record).end().and(shown)
    }

    /// Whoever reads why a run fails has to know that the model is there.
    fn show_place(&self, kept: Option<&Path>) {
        if self.trainer.comm().rank() == 0 && !self.plan.asked.quiet {
            let _ = printed::alone(Self::place(kept));
        }
    }

    /// Has all ranks make a sample, which rank 0 shows.
    fn show_sample(&mut self) -> Result<()> {
        let lead = self.trainer.comm().rank() == 0;
        let RankArgs { quiet, color, .. } = self.plan.asked;
        let mut progress = Progress::of_rounds(self.plan.sample, quiet || !lead, color.unwrap_or_default());
        let ends = self.plan.tokenizer.as_ref().map_or(Vec::new(), |known| self.companions.ends(known));
        let sample = sample::generate(&mut self.trainer, self.plan, &ends, &mut progress);
        progress.finish();
        self.pass_on();
        match sample?.filter(|_| lead) {
            Some(sample) => {
                let remark = sample.remark(self.plan.sample);
                printed::alone(format!("sample{remark}\n{}\n", indent(&sample.text)))
            }
            None => Ok(()),
        }
    }

    /// Waits until what is no state any more is off the disk.
    fn rest(&mut self) {
        if let Some(keeping) = &mut self.keeping {
            keeping.rest();
        }
    }

    /// Writes the model where one is wanted. What rank 0 was refused is told once the run is over: nobody else knows of it.
    fn save(&mut self, wanted: Wanted) -> Result<Saved> {
        let Some(dir) = &self.plan.save else {
            return Ok(Saved { not_finite: 0, kept: false, written: Ok(()) });
        };
        let began = Instant::now();
        let saved = save::model(&mut self.trainer, self.plan, dir, &self.companions, wanted)?;
        self.apart += began.elapsed();
        Ok(saved)
    }

    /// Says that so many weights are lost.
    pub(super) fn ruin(&self, not_finite: usize, steps: usize) -> String {
        let (model, all) = (&self.plan.model, self.plan.model.config.parameters());
        format!("{not_finite} of the {all} weights of {} after step {steps} are not finite", model.name)
    }
}
