//! One rank of a training: how it is made, and what it holds.

use crate::clip::Norm;
use crate::config::{Config, Placement};
use crate::error::{Error, Result};
use crate::grads::Grads;
use crate::hands::Clock;
use crate::kernels::{Device, Host, Kernels, Needs, Offloaded};
use crate::memory::Ledger;
use crate::optimizer::{Optimizer, Source};
use crate::params::Params;
use crate::plan::Plan;
use crate::standing::Standing;
use collectives::device::{PRODUCT_WORKSPACE, Queue, SharedQueue, Streams};
use collectives::trace::Trace;
use collectives::{Communicator, Float};
use models::Model;
use std::sync::Arc;

pub use export::Sink;
pub use state::{Kept, StateSink, StateSource};

/// One rank of a training run.
pub struct Trainer<T: Float> {
    pub(crate) model: Box<dyn Model<T>>,
    pub(crate) comm: Communicator,
    pub(crate) kernels: Box<dyn Kernels<T>>,
    pub(crate) plan: Arc<Plan>,
    pub(crate) params: Params<T>,
    pub(crate) grads: Grads<T>,
    pub(crate) optimizer: Optimizer,
    pub(crate) norm: Norm,
    pub(crate) ledger: Ledger,
    pub(crate) clock: Clock,
    pub(crate) standing: Standing,
    /// Why something was broken off in its midst, where not all ranks did so together.
    pub(crate) broken: Option<String>,
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

    pub(crate) fn with(
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
        if let Some(digest) = optimizer.start(&plan, model.units(), &mut *kernels, &mut params, source)? {
            check_weights(&comm, digest)?;
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

    /// Refuses what would come upon something half done.
    pub(crate) fn whole(&self) -> Result<()> {
        self.comm.progress()?;
        let broken = |why| format!("a trainer that has failed ({why}): make another");
        self.broken.as_ref().map_or(Ok(()), |why| Err(Error::Config { problem: broken(why) }))
    }

    /// What came of something that may have been broken off.
    pub(crate) fn after<R>(&mut self, outcome: Result<R>) -> Result<R> {
        self.broken = outcome.as_ref().err().filter(|error| !error.leaves_whole()).map(Error::to_string);
        outcome
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
pub(crate) fn plan_for<T: Float>(
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

mod export;
mod forward;
mod state;
