//! The story of one training step.
//!
//! For each micro-batch, the schedule's actions in order: gather a unit, compute it, release it; backward the
//! same way, each gradient bucket's reduction starting as soon as it is ready. Then, once: finish the
//! reductions, measure the global norm, update this rank's share, and publish it while the next is updated.

use crate::clip::{self, Norm};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::grads::{Borrowed, Grads};
use crate::memory::Ledger;
use crate::optimizer::{Optimizer, Source};
use crate::params::{Lent, Params};
use crate::plan::Plan;
use crate::schedule::Action;
use collectives::{Communicator, Float};
use models::{Batch, Model, TensorSpec, Weights};
use std::time::Instant;

/// One rank of a training run.
pub struct Trainer<T: Float> {
    model: Box<dyn Model<T>>,
    comm: Communicator,
    plan: Plan,
    params: Params<T>,
    grads: Grads<T>,
    optimizer: Optimizer,
    norm: Norm,
    ledger: Ledger,
}

/// Where the micro-batches of a step come from. All ranks give batches of one shape.
pub trait Batches {
    /// Micro-batch `index` of this rank in this step.
    fn micro_batch(&mut self, index: usize) -> Batch<'_>;
}

/// What one step did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Step {
    /// Mean loss over the tokens of all ranks and micro-batches.
    pub loss: f64,
    /// Euclidean norm of the gradient of that mean, before clipping.
    pub grad_norm: f64,
    /// Tokens of all ranks.
    pub tokens: usize,
    /// Bytes that this rank sent.
    pub bytes_sent: u64,
    /// Wall time.
    pub seconds: f64,
    /// Of it, in the model's forward and backward.
    pub compute_seconds: f64,
    /// Of it, in the optimizer.
    pub optimizer_seconds: f64,
    /// Of it, in starting, advancing and awaiting collectives: what overlap did not hide.
    pub exposed_communication_seconds: f64,
}

impl<T: Float> Trainer<T> {
    /// Plans, allocates and sets the initial weights from `source`; every buffer is booked on `ledger`.
    pub fn new(
        model: Box<dyn Model<T>>,
        comm: Communicator,
        config: &Config,
        ledger: Ledger,
        source: &mut Source<'_>,
    ) -> Result<Self> {
        let units = model.units();
        let reads: Vec<bool> = (0..units.len()).map(|u| model.backward_reads_weights(u)).collect();
        let plan = Plan::new(units, &reads, T::DTYPE, config, comm.rank(), comm.size());
        let mut params = Params::new(&plan, &comm, &ledger.parameters, &ledger.buckets)?;
        let grads = Grads::new(&plan, &comm, &ledger.gradients, &ledger.buckets)?;
        let mut optimizer = Optimizer::new(&plan, &ledger.optimizer);
        let norm = Norm::new(&plan, &comm, &ledger.workspace)?;
        optimizer.start(&plan, &comm, units, &mut params, source)?;
        Ok(Trainer { model, comm, plan, params, grads, optimizer, norm, ledger })
    }

    /// One optimizer step over `accumulate` micro-batches of every rank.
    pub fn step(&mut self, batches: &mut dyn Batches, lr: f32) -> Result<Step> {
        let mut clock = Clock::start(&self.comm);
        let mut report = Step::default();
        let micro_batches = self.plan.config.accumulate;
        let mut loss = 0.0;
        for index in 0..micro_batches {
            let batch = batches.micro_batch(index);
            report.tokens = batch.rows * batch.length * micro_batches * self.plan.world;
            self.model.begin(&batch, (1.0 / report.tokens as f64) as f32);
            self.grads.begin(index);
            for at in 0..self.plan.training.actions.len() {
                self.perform(self.plan.training.actions[at])?;
            }
            loss += self.model.loss();
        }
        report.compute_seconds = clock.lap(&self.comm);

        self.grads.finish(&self.plan, &self.comm)?;
        let global = self.norm.global(&self.plan, &self.comm, &self.grads, loss)?;
        report.loss = global.loss / report.tokens as f64;
        report.grad_norm = global.norm;
        if !global.norm.is_finite() {
            return Err(Error::NotFinite { step: self.optimizer.steps() + 1, norm: global.norm });
        }
        let clip = clip::factor(global.norm, self.plan.config.clip);
        let units = self.model.units();
        self.optimizer.update(&self.plan, &self.comm, units, &mut self.params, &self.grads, lr, clip)?;
        report.optimizer_seconds = clock.lap(&self.comm);
        clock.finish(&self.comm, &mut report);
        Ok(report)
    }

    /// One action of a pass.
    fn perform(&mut self, action: Action) -> Result<()> {
        let Trainer { model, comm, plan, params, grads, .. } = self;
        match action {
            Action::Prefetch(unit) => params.prefetch(plan, comm, unit)?,
            Action::Gather(unit) => params.gather(plan, comm, unit)?,
            Action::Forward(unit) => model.forward_unit(unit, &Lent { plan, params }),
            Action::Open(unit) => grads.open(plan, unit)?,
            Action::Backward(unit) => {
                model.backward_unit(unit, &Lent { plan, params }, &mut Borrowed { plan, comm, grads });
            }
            Action::Close(unit) => grads.close(unit)?,
            Action::Release(unit) => params.release(plan, unit),
        }
        // Without a progress thread, what was started moves only when someone calls.
        Ok(comm.progress()?)
    }

    /// The sum of the token losses of `batch`; a rank without one takes part in the gathers only.
    pub fn evaluate(&mut self, batch: Option<&Batch<'_>>) -> Result<f64> {
        if let Some(batch) = batch {
            self.model.begin(batch, 0.0);
        }
        for at in 0..self.plan.evaluation.actions.len() {
            match self.plan.evaluation.actions[at] {
                Action::Forward(_) if batch.is_none() => {}
                action => self.perform(action)?,
            }
        }
        Ok(if batch.is_some() { self.model.loss() } else { 0.0 })
    }

    /// Logits at `position` of `batch` (row * length + column), into `out` of the vocabulary's length. Every
    /// rank calls it, with the same batch.
    pub fn logits(&mut self, batch: &Batch<'_>, position: usize, out: &mut [f32]) -> Result<()> {
        self.model.begin(batch, 0.0);
        let head = self.model.units().len() - 1;
        for at in 0..self.plan.evaluation.actions.len() {
            match self.plan.evaluation.actions[at] {
                Action::Forward(unit) if unit == head => {
                    let Trainer { model, plan, params, .. } = self;
                    model.logits(position, &Lent { plan, params }, out);
                }
                action => self.perform(action)?,
            }
        }
        Ok(())
    }

    /// Gathers every tensor in order and shows it to `sink`. Every rank calls it and sees the same values.
    pub fn export(
        &mut self,
        sink: &mut dyn FnMut(&TensorSpec, &[T]) -> std::result::Result<(), String>,
    ) -> Result<()> {
        for unit in 0..self.model.units().len() {
            self.params.gather(&self.plan, &self.comm, unit)?;
            for (tensor, spec) in self.model.units()[unit].tensors.iter().enumerate() {
                let lent = Lent { plan: &self.plan, params: &self.params };
                sink(spec, lent.tensor(unit, tensor).host())
                    .map_err(|why| Error::Export { tensor: spec.name.clone(), why })?;
            }
            self.params.release(&self.plan, unit);
        }
        Ok(())
    }

    /// Where everything is.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The ranks of this run.
    pub fn comm(&self) -> &Communicator {
        &self.comm
    }

    /// What is held.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }
}

/// Splits a step's wall time into its phases and what collectives took of each.
struct Clock {
    start: Instant,
    lap: Instant,
    /// Seconds in collectives, and bytes sent, when the step and the lap began.
    first: (f64, u64),
    exposed: f64,
}

impl Clock {
    fn start(comm: &Communicator) -> Self {
        let now = Instant::now();
        let first = Clock::read(comm);
        Clock { start: now, lap: now, first, exposed: first.0 }
    }

    fn read(comm: &Communicator) -> (f64, u64) {
        let stats = comm.stats();
        (stats.exposed_seconds, stats.bytes_sent)
    }

    /// Seconds since the last lap outside collectives.
    fn lap(&mut self, comm: &Communicator) -> f64 {
        let (exposed, _) = Clock::read(comm);
        let seconds = self.lap.elapsed().as_secs_f64() - (exposed - self.exposed);
        (self.lap, self.exposed) = (Instant::now(), exposed);
        seconds
    }

    fn finish(self, comm: &Communicator, report: &mut Step) {
        let (exposed, bytes) = Clock::read(comm);
        report.seconds = self.start.elapsed().as_secs_f64();
        report.exposed_communication_seconds = exposed - self.first.0;
        report.bytes_sent = bytes - self.first.1;
    }
}
