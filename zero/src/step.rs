//! The story of one training step.
//!
//! For each micro-batch, the schedule's actions in order: gather a unit, compute it, release it; backward the
//! same way, each gradient bucket's reduction starting as soon as it is ready. Then, once: finish the
//! reductions, measure the global norm, update this rank's share, and publish it while the next is updated.

use crate::clip::{self, Global, Terms};
use crate::doing::Doing;
use crate::error::{Error, Result};
use crate::grads::Borrowed;
use crate::hands::Hands;
use crate::kernels::{Activity, Elapsed};
use crate::params::Lent;
use crate::schedule::Action;
use crate::trainer::Trainer;
use batches::{NOTHING, alike};
use collectives::Float;
use std::sync::Arc;
use std::time::Instant;

pub use batches::{Batches, NoBatch};
pub use report::Step;

impl<T: Float> Trainer<T> {
    /// One optimizer step over `accumulate` micro-batches of every rank, at the learning rate `lr`. With a scale of the loss,
    /// one whose gradient is not finite updates nothing.
    ///
    /// # Errors
    /// `batches` has none or wants no more, ranks differ in tokens or `lr`, the loss or the gradient is not finite and no
    /// smaller scale of the loss could help: all ranks say so before anything is updated, so that [`export`](Self::export) still
    /// gives the weights of the step before. A collective fails, as when another rank does, or a device, or a model has not said
    /// of a gradient that it is ready: then all else fails, too.
    ///
    /// # Panics
    /// A batch that [`Model::begin`](models::Model::begin) does not take, as a larger one than the model was built for.
    pub fn step(&mut self, batches: &mut dyn Batches, lr: f32) -> Result<Step> {
        self.whole()?;
        self.optimizer.check()?;
        let made = self.make_step(batches, lr);
        self.after(made)
    }

    fn make_step(&mut self, batches: &mut dyn Batches, lr: f32) -> Result<Step> {
        let (start, before) = (Instant::now(), self.comm.stats());
        self.clock.restart();
        let (traced, number) = (self.clock.begin(), self.standing.steps + 1);
        let loss_scale = self.standing.loss_scale();

        let (tokens, without) = self.pass_batches(batches)?;
        let rest = self.clock.begin();
        self.finish_gradients()?;
        let (update, communication) = (Instant::now(), self.clock.communication);
        let terms = Terms { tokens: tokens.try_into().unwrap_or(u32::MAX), lr };
        let global = self.measure(terms, without.as_ref())?;
        self.check_alike(&global, terms, without)?;
        let updated = self.update(&global, lr)?;
        self.clock.end((Doing::Update, 0), rest);
        // Asked for only now that the device has work again.
        let elapsed = self.kernels.elapsed()?;

        let (update, exposed) = (update.elapsed(), self.clock.communication - communication);
        let elapsed = elapsed.unwrap_or(Elapsed {
            compute: self.clock.compute.as_secs_f64(),
            communication: self.clock.communication.as_secs_f64(),
            optimizer: (update - exposed).as_secs_f64(),
        });
        self.kernels.mark(Activity::Other)?;
        let bytes_sent = self.comm.stats().since(&before).bytes_sent;
        self.clock.end((Doing::Step, number as usize), traced);
        let tokens = tokens * self.plan.config.accumulate * self.plan.world;
        Ok(Step {
            loss: global.loss / tokens as f64,
            grad_norm: global.norm / loss_scale,
            loss_scale,
            skipped: !updated,
            tokens,
            bytes_sent,
            seconds: start.elapsed().as_secs_f64(),
            compute_seconds: elapsed.compute,
            optimizer_seconds: elapsed.optimizer,
            exposed_communication_seconds: elapsed.communication,
        })
    }

    /// Forward and backward of every micro-batch; the tokens of one, and why this rank was without, if it was.
    fn pass_batches(&mut self, batches: &mut dyn Batches) -> Result<(usize, Option<NoBatch>)> {
        let plan = Arc::clone(&self.plan);
        let micro_batches = plan.config.accumulate;
        let (mut first, mut without, mut tokens) = (None, None, 0);
        self.kernels.mark(Activity::Compute)?;
        for index in 0..micro_batches {
            let batch = batches.micro_batch(index).and_then(|batch| {
                let shape = (batch.rows, batch.length);
                Ok(alike(*first.get_or_insert(shape), shape, index).map(|()| batch)?)
            });
            let batch = batch.unwrap_or_else(|why| {
                // Peers count on this rank in every collective until the one in which all can hear of it.
                without = Some(why);
                NOTHING
            });
            if index > 0 {
                // The next one's are about to take its place.
                self.norm.set_loss(index - 1, self.model.loss());
                self.model.check()?;
            }
            tokens = batch.rows * batch.length;
            let all = tokens * micro_batches * plan.world;
            self.model.begin(&batch, (self.standing.loss_scale() / all as f64) as f32);
            self.grads.begin(index);
            for &action in &plan.training.actions {
                self.kernels.mark(self.activity(action))?;
                self.perform(action)?;
            }
        }
        Ok((tokens, without))
    }

    /// Awaits what is still reduced.
    fn finish_gradients(&mut self) -> Result<()> {
        let Trainer { model, comm, kernels, plan, grads, clock, .. } = self;
        grads.finish(&mut Hands { plan, comm, model: &**model, kernels: &mut **kernels, clock })?;
        kernels.mark(Activity::Optimizer)
    }

    /// The norm of the gradient and the loss over all ranks, and whether all have made the same step.
    fn measure(&mut self, terms: Terms, without: Option<&NoBatch>) -> Result<Global> {
        let Trainer { model, comm, kernels, plan, grads, norm, clock, .. } = self;
        norm.squares(&mut Hands { plan, comm, model: &**model, kernels: &mut **kernels, clock }, grads)?;
        // The host waits for a device here, where all that comes before the norm has been given to it: reductions that go
        // through the host stand still while it waits for something else.
        norm.set_loss(plan.config.accumulate - 1, model.loss());
        model.check()?;
        match without {
            None => {}
            Some(NoBatch::Failed(_)) => norm.set_loss(0, clip::no_loss(None)),
            Some(NoBatch::Stop(why)) => norm.set_loss(0, clip::no_loss(Some(*why))),
        }
        norm.global(&mut Hands { plan, comm, model: &**model, kernels: &mut **kernels, clock }, terms)
    }

    /// Updates this rank's share and publishes it; or nothing, where the scaled gradient was too large for its type. Whether it
    /// did.
    fn update(&mut self, global: &Global, lr: f32) -> Result<bool> {
        let Trainer { model, comm, kernels, plan, params, grads, optimizer, clock, standing, .. } = self;
        let (number, loss_scale) = (standing.steps + 1, standing.loss_scale());
        if !(global.norm.is_finite() && global.loss.is_finite()) {
            // No scale makes a loss finite.
            if global.loss.is_finite() && standing.skip(&plan.config) {
                return Ok(false);
            }
            let scale = standing.scale.map(|scale| scale.scale);
            return Err(Error::not_finite(number, global.norm, global.loss, T::DTYPE, scale));
        }
        let clip = clip::factor(global.norm / loss_scale, plan.config.clip);
        let factor = (f64::from(clip) / loss_scale) as f32;
        let mut hands = Hands { plan, comm, model: &**model, kernels: &mut **kernels, clock };
        optimizer.update(&mut hands, params, grads, standing.update(&plan.config), lr, factor)?;
        Ok(true)
    }

    /// What a device does in an action, or waits for.
    fn activity(&self, action: Action) -> Activity {
        match action {
            // What was started moves without the queue; what is awaited holds it up.
            Action::Gather(unit) if !self.params.is_whole(unit) => Activity::Communication,
            // Who opens memory for a gradient says itself that it awaits what is still reduced there.
            _ => Activity::Compute,
        }
    }

    /// One action of a pass.
    pub(crate) fn perform(&mut self, action: Action) -> Result<()> {
        let Trainer { model, comm, kernels, plan, params, grads, clock, .. } = self;
        match action {
            Action::Prefetch(unit) => clock.communicate(|| params.prefetch(plan, unit))?,
            Action::Gather(unit) => clock.communicate(|| params.gather(plan, unit))?,
            Action::Forward(unit) => {
                clock.compute_beside(comm, (Doing::Forward, unit), |meanwhile| {
                    model.forward_unit(unit, &Lent { plan, params, meanwhile });
                });
                model.check()?;
            }
            Action::Open(unit) => {
                let mut hands = Hands { plan, comm, model: &**model, kernels: &mut **kernels, clock };
                grads.open(&mut hands, unit)?;
            }
            Action::Backward(unit) => {
                clock.compute_beside(comm, (Doing::Backward, unit), |meanwhile| {
                    let gradients = &mut Borrowed { plan, meanwhile, grads };
                    model.backward_unit(unit, &Lent { plan, params, meanwhile }, gradients);
                });
                model.check()?;
            }
            // The others wait for what this rank will not bring.
            Action::Close(unit) => grads.close(unit).inspect_err(|why| comm.abort(&why.to_string()))?,
            Action::Release(unit) => params.release(plan, unit),
        }
        // Without a progress thread, what was started moves only when someone calls.
        Ok(clock.communicate(|| comm.progress())?)
    }
}

mod batches;
mod report;
#[cfg(test)]
mod tests;
mod verdict;
