//! The story of one training step.
//!
//! For each micro-batch, the schedule's actions in order: gather a unit, compute it, release it; backward the
//! same way, each gradient bucket's reduction starting as soon as it is ready. Then, once: finish the
//! reductions, measure the global norm, update this rank's share, and publish it while the next is updated.

use crate::clip::{self, Norm, Terms};
use crate::config::{Config, Placement};
use crate::doing::Doing;
use crate::error::{Error, Result};
use crate::grads::{Borrowed, Grads};
use crate::hands::{Clock, Hands, Meanwhile};
use crate::kernels::{Activity, Device, Elapsed, Host, Kernels, Needs, Offloaded, PART};
use crate::memory::Ledger;
use crate::optimizer::{Optimizer, Source};
use crate::params::{Lent, Params};
use crate::plan::Plan;
use crate::schedule::Action;
use crate::standing::Standing;
use batches::{NOTHING, alike};
use collectives::device::{PRODUCT_WORKSPACE, Queue, SharedQueue, Streams};
use collectives::trace::Trace;
use collectives::{Communicator, Float};
use models::{Model, TensorSpec, Weights};
use std::sync::Arc;
use std::time::Instant;
use told::told_by;

pub use batches::{Batches, NoBatch};
pub use state::{Kept, StateSink, StateSource};

/// One rank of a training run.
pub struct Trainer<T: Float> {
    model: Box<dyn Model<T>>,
    comm: Communicator,
    kernels: Box<dyn Kernels<T>>,
    plan: Arc<Plan>,
    params: Params<T>,
    grads: Grads<T>,
    optimizer: Optimizer,
    norm: Norm,
    ledger: Ledger,
    clock: Clock,
    standing: Standing,
    /// Why something was broken off in its midst, where not all ranks did so together.
    broken: Option<String>,
}

/// Where exported weights go: called with every tensor in order, its elements one part after the other.
pub type Sink<'a, T> = dyn FnMut(&TensorSpec, &[T]) -> std::result::Result<(), String> + 'a;

/// What one step did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Step {
    /// Mean loss over the tokens of all ranks and micro-batches.
    pub loss: f64,
    /// Euclidean norm of the gradient of that mean, before clipping; not finite where the step was skipped.
    pub grad_norm: f64,
    /// What the loss was scaled by: 1 where it is not.
    pub loss_scale: f64,
    /// Whether the scaled gradient was too large for its type, and nothing was updated.
    pub skipped: bool,
    /// Tokens of all ranks.
    pub tokens: usize,
    /// Bytes that this rank sent.
    pub bytes_sent: u64,
    /// Wall time.
    pub seconds: f64,
    /// Of it, in the model's forward and backward, and in adding up micro-batches. On a device this and the two below are
    /// times of its compute queue between events, from the norm of the step before to this one's, so that the host need not
    /// wait for the end of a step to know them.
    pub compute_seconds: f64,
    /// Of it, in the optimizer.
    pub optimizer_seconds: f64,
    /// Of it, in starting, advancing and awaiting collectives: what overlap did not hide.
    pub exposed_communication_seconds: f64,
}

impl<T: Float> Trainer<T> {
    /// Plans, allocates and sets the initial weights from `source`; every buffer is booked on `ledger`.
    ///
    /// # Errors
    /// A placement on a device or no micro-batches in `config`, memory that is refused, a failure of `source`, or of
    /// another rank. The group is given up then, so that nobody waits in it for this rank: who wants to try again makes
    /// another beforehand.
    ///
    /// # Panics
    /// The model has no units.
    pub fn new(
        model: Box<dyn Model<T>>,
        comm: Communicator,
        config: &Config,
        ledger: Ledger,
        source: &mut Source<'_>,
    ) -> Result<Self> {
        Trainer::or_give_up(comm, |comm| {
            let plan = plan_for(&*model, config, false, &comm)?;
            Trainer::with(Box::new(Host), plan, model, comm, ledger, source)
        })
    }

    /// The same on the device of `queue`, which is the model's: `comm` has a carrier for its memory. The optimizer's
    /// state is where `config` places it, with `threads` threads of this rank to update it where that is the host.
    ///
    /// # Errors
    /// As [`new`](Self::new), but for a placement on the host; or something of CUDA is missing.
    ///
    /// # Panics
    /// The model has no units.
    pub fn on_device<Q: Streams>(
        queue: &SharedQueue<Q>,
        threads: usize,
        model: Box<dyn Model<T>>,
        comm: Communicator,
        config: &Config,
        ledger: Ledger,
        source: &mut Source<'_>,
    ) -> Result<Self> {
        Trainer::or_give_up(comm, |comm| {
            let plan = plan_for(&*model, config, true, &comm)?;
            let needs = Needs::of(&plan);
            queue.clone().lend(queue.clone().memory(PRODUCT_WORKSPACE)?.booked(&ledger.workspace));
            let device = Device::new::<T>(queue.clone(), &needs, &ledger.host)?;
            let kernels: Box<dyn Kernels<T>> = match plan.config.placement {
                Placement::Offloaded => Box::new(Offloaded::new(device, &needs, threads, &ledger.host)?),
                _ => Box::new(device),
            };
            Trainer::with(kernels, plan, model, comm, ledger, source)
        })
    }

    /// What `make` makes; the group is given up where it fails.
    fn or_give_up(comm: Communicator, make: impl FnOnce(Communicator) -> Result<Self>) -> Result<Self> {
        let group = comm.clone();
        make(comm).inspect_err(|error| group.abort(&format!("its trainer could not be made: {error}")))
    }

    fn with(
        mut kernels: Box<dyn Kernels<T>>,
        plan: Plan,
        model: Box<dyn Model<T>>,
        comm: Communicator,
        ledger: Ledger,
        source: &mut Source<'_>,
    ) -> Result<Self> {
        comm.reserve(&plan.calls())?;
        let ledger = Ledger { engine: comm.scratch(), placement: plan.config.placement, ..ledger };
        let mut params = Params::new(&plan, &comm, &ledger.parameters, &ledger.buckets)?;
        let grads = Grads::new(&plan, &comm, &ledger.gradients, &ledger.buckets)?;
        let mut optimizer = Optimizer::new(&plan, &mut *kernels, &ledger.optimizer)?;
        let norm = Norm::new(&plan, &comm, &ledger.workspace)?;
        let weights = optimizer.start(&plan, model.units(), &mut *kernels, &mut params, source)?;
        if !plan.config.stage.shards_optimizer {
            check_weights(&comm, weights)?;
        }
        let clock = Clock::of(&comm);
        let plan = Arc::new(plan);
        let standing = Standing::default().scaled(&plan.config);
        let broken = None;
        Ok(Trainer {
            model,
            comm,
            kernels,
            plan,
            params,
            grads,
            optimizer,
            norm,
            ledger,
            clock,
            standing,
            broken,
        })
    }

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
    /// A batch that [`Model::begin`] does not take, as a larger one than the model was built for.
    pub fn step(&mut self, batches: &mut dyn Batches, lr: f32) -> Result<Step> {
        self.whole()?;
        self.optimizer.check()?;
        let made = self.make_step(batches, lr);
        self.after(made)
    }

    /// Refuses what would come upon something half done.
    fn whole(&self) -> Result<()> {
        self.comm.progress()?;
        let broken = |why| format!("a trainer that has failed ({why}): make another");
        self.broken.as_ref().map_or(Ok(()), |why| Err(Error::Config { problem: broken(why) }))
    }

    /// What came of something that may have been broken off.
    fn after<R>(&mut self, outcome: Result<R>) -> Result<R> {
        self.broken = outcome.as_ref().err().filter(|error| !error.leaves_whole()).map(Error::to_string);
        outcome
    }

    fn make_step(&mut self, batches: &mut dyn Batches, lr: f32) -> Result<Step> {
        let (start, before) = (Instant::now(), self.comm.stats());
        self.clock.restart();
        let traced = self.clock.begin();
        let mut report = Step { loss_scale: self.standing.loss_scale(), ..Step::default() };
        let number = self.standing.steps + 1;
        let plan = Arc::clone(&self.plan);
        let micro_batches = plan.config.accumulate;
        let (mut first, mut without) = (None, None);
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
            report.tokens = batch.rows * batch.length * micro_batches * plan.world;
            self.model.begin(&batch, (report.loss_scale / report.tokens as f64) as f32);
            self.grads.begin(index);
            for &action in &plan.training.actions {
                self.kernels.mark(self.activity(action))?;
                self.perform(action)?;
            }
        }
        let Trainer { model, comm, kernels, params, grads, optimizer, norm, clock, standing, .. } = self;
        let plan = &*plan;
        let rest = clock.begin();
        let mut hands = Hands { plan, comm, model: &**model, kernels: &mut **kernels, clock };
        grads.finish(&mut hands)?;
        hands.kernels.mark(Activity::Optimizer)?;

        let (update, communication) = (Instant::now(), hands.clock.communication);
        norm.squares(&mut hands, grads)?;
        // The host waits for a device here, where all that comes before the norm has been given to it: reductions that go
        // through the host stand still while it waits for something else.
        norm.set_loss(micro_batches - 1, model.loss());
        model.check()?;
        let mut hands = Hands { plan, comm, model: &**model, kernels: &mut **kernels, clock };
        match &without {
            None => {}
            Some(NoBatch::Failed(_)) => norm.set_loss(0, clip::no_loss(None)),
            Some(NoBatch::Stop(why)) => norm.set_loss(0, clip::no_loss(Some(*why))),
        }
        let tokens = report.tokens / (micro_batches * plan.world);
        let terms = Terms { tokens: tokens.try_into().unwrap_or(u32::MAX), lr };
        let global = norm.global(&mut hands, terms)?;
        if let Some((rank, stop)) = global.without {
            let words = if let Some(NoBatch::Failed(words)) = &without { words } else { "" };
            return Err(match stop {
                Some(why) => Error::Stopped { step: number, rank: comm.job_rank(rank), why },
                None => {
                    let why = told_by(rank, comm, words)?;
                    Error::Batch { step: number, rank: comm.job_rank(rank), why }
                }
            });
        }
        if let Some((rank, [first, other])) = global.unlike {
            return Err(Error::Unlike {
                step: number,
                rank: comm.job_rank(rank),
                tokens: other.tokens,
                lr: other.lr,
                other: comm.job_rank(0),
                others: first.tokens,
                other_lr: first.lr,
            });
        }
        if !(lr.is_finite() && lr >= 0.0) {
            // All ranks have it.
            return Err(Error::Rate { lr });
        }
        report.loss = global.loss / report.tokens as f64;
        report.grad_norm = global.norm / report.loss_scale;
        // No scale makes a loss finite.
        let finite = global.norm.is_finite() && global.loss.is_finite();
        report.skipped = !finite && global.loss.is_finite() && standing.skip(&plan.config);
        if !finite && !report.skipped {
            let scale = standing.scale.map(|scale| scale.scale);
            return Err(Error::not_finite(number, global.norm, global.loss, T::DTYPE, scale));
        }
        if finite {
            let clip = clip::factor(report.grad_norm, plan.config.clip);
            let factor = (f64::from(clip) / report.loss_scale) as f32;
            optimizer.update(&mut hands, params, grads, standing.update(&plan.config), lr, factor)?;
        }
        hands.clock.end((Doing::Update, 0), rest);
        // Asked for only now that the device has work again.
        let elapsed = hands.kernels.elapsed()?;

        let exposed = clock.communication - communication;
        report.optimizer_seconds = (update.elapsed() - exposed).as_secs_f64();
        report.compute_seconds = clock.compute.as_secs_f64();
        report.exposed_communication_seconds = clock.communication.as_secs_f64();
        if let Some(Elapsed { compute, communication, optimizer }) = elapsed {
            report.compute_seconds = compute;
            report.exposed_communication_seconds = communication;
            report.optimizer_seconds = optimizer;
        }
        kernels.mark(Activity::Other)?;
        report.bytes_sent = comm.stats().since(&before).bytes_sent;
        clock.end((Doing::Step, number as usize), traced);
        report.seconds = start.elapsed().as_secs_f64();
        Ok(report)
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
    fn perform(&mut self, action: Action) -> Result<()> {
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

    /// Gathers every tensor in order and shows it to `sink`. Every rank calls it, and those that have a sink see the same
    /// values; all go from unit to unit together. A sink that fails is shown no more, but the others hear nothing of it, and
    /// another export or step may follow.
    ///
    /// # Errors
    /// `sink` fails, which only its own rank says, or a collective does, as when another rank gives up.
    pub fn export(&mut self, sink: Option<&mut Sink<'_, T>>) -> Result<()> {
        self.whole()?;
        let made = self.show_units(sink);
        self.after(made)
    }

    fn show_units(&mut self, mut sink: Option<&mut Sink<'_, T>>) -> Result<()> {
        let mut refused = None;
        for unit in 0..self.model.units().len() {
            self.params.gather(&self.plan, unit)?;
            let sink = sink.as_mut().filter(|_| refused.is_none());
            let shown = sink.map_or(Ok(()), |sink| self.show(unit, sink));
            self.params.release(&self.plan, unit);
            match shown {
                Err(refusal @ Error::Export { .. }) => refused = Some(refusal),
                shown => shown?,
            }
            // Where nothing is gathered, too, nobody waits longer for one who writes than a unit takes, or a file that is full
            // on its way to the disk.
            self.comm.barrier()?;
        }
        refused.map_or(Ok(()), Err)
    }

    /// Shows every tensor of a gathered unit.
    fn show(&mut self, unit: usize, sink: &mut Sink<'_, T>) -> Result<()> {
        for (tensor, spec) in self.model.units()[unit].tensors.iter().enumerate() {
            let meanwhile = &Meanwhile::new(&self.comm);
            let lent = Lent { plan: &self.plan, params: &self.params, meanwhile };
            let all = lent.tensor(unit, tensor);
            for start in (0..all.len()).step_by(PART) {
                let values = self.kernels.elements(all.slice(start..all.len().min(start + PART)))?;
                sink(spec, values).map_err(|why| Error::Export { tensor: spec.name.clone(), why })?;
            }
        }
        Ok(())
    }

    /// From now on what this rank does, and its calls but for those of devices, go to `trace`, or to none.
    pub fn trace(&mut self, trace: Option<&Trace>) {
        self.comm.trace(trace);
        self.clock.trace = trace.cloned();
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

/// Whether all ranks begin with weights of this digest.
fn check_weights(comm: &Communicator, digest: u64) -> Result<()> {
    let mut all = vec![0; comm.size()];
    comm.all_gather(&[digest][..], &mut all[..])?;
    match all.iter().position(|other| *other != all[0]) {
        None => Ok(()),
        Some(rank) => Err(Error::Weights { rank: comm.job_rank(rank), other: comm.job_rank(0) }),
    }
}

/// The plan of this rank, which has a device or none.
///
/// # Errors
/// A configuration that does not fit that, or makes no sense.
fn plan_for<T: Float>(
    model: &dyn Model<T>,
    config: &Config,
    device: bool,
    comm: &Communicator,
) -> Result<Plan> {
    let placement = config.placement;
    config.check().map_err(|problem| Error::Config { problem })?;
    let problem = match (device, placement.on_device()) {
        (false, true) => format!(
            "the placement {placement:?} for a trainer without a device: Host, or Trainer::on_device, is needed"
        ),
        (true, false) => format!(
            "the placement {placement:?} for a trainer on a device: Device or Offloaded, or Trainer::new, is needed"
        ),
        _ if device != comm.carrier().is_some() => format!(
            "a communicator {} a carrier for a device's memory for a trainer {} a device: they go together",
            if device { "without" } else { "with" },
            if device { "on" } else { "without" }
        ),
        _ => return Ok(Plan::new(model.units(), T::DTYPE, config, comm.rank(), comm.size())),
    };
    Err(Error::Config { problem })
}

mod batches;
mod forward;
mod state;
#[cfg(test)]
mod tests;
mod told;
