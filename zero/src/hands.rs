//! What ZeRO's own part of a step works with, and where its time goes.

use crate::doing::Doing;
use crate::error::Result;
use crate::kernels::{Activity, Kernels};
use crate::plan::Plan;
use collectives::trace::{Begun, Trace};
use collectives::{Communicator, Float, Pending, Progress};
use models::Model;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Where everything is, who the ranks are, what computes, and the clock.
pub(crate) struct Hands<'a, T: Float> {
    pub plan: &'a Plan,
    pub comm: &'a Communicator,
    pub model: &'a dyn Model<T>,
    pub kernels: &'a mut dyn Kernels<T>,
    pub clock: &'a mut Clock,
}

impl<T: Float> Hands<'_, T> {
    /// Awaits a collective; a device's queue does.
    pub fn wait<B: Send + 'static>(&mut self, pending: Pending<B>) -> Result<B> {
        self.kernels.mark(Activity::Communication)?;
        Ok(self.clock.communicate(|| pending.wait())?)
    }

    /// Starts or awaits what a device's queue waits for before it goes `back_to` what it did.
    pub fn communicate<R>(
        &mut self,
        back_to: Activity,
        work: impl FnOnce(&Communicator) -> Result<R>,
    ) -> Result<R> {
        self.kernels.mark(Activity::Communication)?;
        let done = self.clock.communicate(|| work(self.comm))?;
        self.kernels.mark(back_to)?;
        Ok(done)
    }

    /// Runs arithmetic that is part of computing the gradient.
    pub fn compute(&mut self, work: impl FnOnce(&mut dyn Kernels<T>) -> Result<()>) -> Result<()> {
        self.kernels.mark(Activity::Compute)?;
        let kernels = &mut *self.kernels;
        self.clock.compute(|| work(kernels))
    }

    /// The same with all of the model's threads.
    pub fn compute_on_all(
        &mut self,
        mut work: impl FnMut(&mut dyn Kernels<T>) -> Result<()> + Send,
    ) -> Result<()> {
        let model = self.model;
        self.compute(|kernels| {
            let mut done = Ok(());
            model.install(&mut || done = work(kernels));
            done
        })
    }
}

/// Where the wall time of this thread goes.
#[derive(Default)]
pub(crate) struct Clock {
    /// Whether messages stand still unless this rank looks at them.
    looks: bool,
    /// Who wants to know more.
    pub trace: Option<Trace>,
    pub compute: Duration,
    pub communication: Duration,
}

impl Clock {
    /// Of a rank of `comm`. A thread of its own looks at calls by itself, and the host of a device is through with a unit long
    /// before the device is: what it does between units is enough.
    pub fn of(comm: &Communicator) -> Self {
        let looks = comm.options().progress == Progress::Inline && comm.carrier().is_none();
        Clock { looks, ..Clock::default() }
    }

    /// Forgets where the time went.
    pub fn restart(&mut self) {
        (self.compute, self.communication) = Default::default();
    }

    /// Something begins that may be in a trace.
    pub fn begin(&self) -> Option<Begun> {
        self.trace.as_ref().map(Trace::begin)
    }

    /// What began then is over.
    pub fn end(&self, (doing, which): (Doing, usize), begun: Option<Begun>) {
        if let (Some(trace), Some(begun)) = (&self.trace, begun) {
            match doing {
                // It ends after all that lies in it.
                Doing::Step => trace.end_reserved(doing.of(which), begun),
                _ => trace.end(doing.of(which), begun),
            }
        }
    }

    /// Runs what computes the model, or adds up its gradients.
    pub fn compute<R>(&mut self, f: impl FnOnce() -> R) -> R {
        let start = Instant::now();
        let result = f();
        self.compute += start.elapsed();
        result
    }

    /// Runs what starts, advances or awaits collectives.
    pub fn communicate<R>(&mut self, f: impl FnOnce() -> R) -> R {
        let start = Instant::now();
        let result = Doing::Exposed.traced(0, self.trace.as_ref(), f);
        self.communication += start.elapsed();
        result
    }

    /// Runs the model's forward or backward, in the midst of which collectives are started and moved on.
    pub fn compute_beside<R>(
        &mut self,
        comm: &Communicator,
        (doing, unit): (Doing, usize),
        f: impl FnOnce(&Meanwhile<'_>) -> R,
    ) -> R {
        let trace = self.trace.clone();
        let meanwhile = Meanwhile { looks: self.looks, trace: trace.as_ref(), ..Meanwhile::new(comm) };
        let result = self.compute(|| doing.traced(unit, meanwhile.trace, || f(&meanwhile)));
        let communication = Duration::from_nanos(meanwhile.nanoseconds.into_inner());
        self.compute = self.compute.saturating_sub(communication);
        self.communication += communication;
        result
    }
}

/// What is done for collectives while the model computes, and how long that takes. The model asks for tensors on whichever
/// of its threads it is.
pub(crate) struct Meanwhile<'a> {
    comm: &'a Communicator,
    looks: bool,
    trace: Option<&'a Trace>,
    nanoseconds: AtomicU64,
}

impl<'a> Meanwhile<'a> {
    /// Of calls of `comm`, which nobody looks at.
    pub fn new(comm: &'a Communicator) -> Self {
        Meanwhile { comm, looks: false, trace: None, nanoseconds: AtomicU64::new(0) }
    }

    /// Does something for collectives.
    pub fn communicate<R>(&self, f: impl FnOnce(&Communicator) -> R) -> R {
        let start = Instant::now();
        let result = Doing::Exposed.traced(0, self.trace, || f(self.comm));
        self.nanoseconds.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        result
    }

    /// Moves on what was started, between two computations: of a long collective the next messages are posted only as those
    /// before them are found to have come. What fails is told by the next call.
    pub fn look(&self) {
        if self.looks {
            let _ = self.communicate(Communicator::progress);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::grads::Grads;
    use crate::plan::Home;
    use crate::recorder::{Nobody, Recorder, WORK, backward, units};
    use crate::stage::Stage;
    use collectives::{Account, DType};

    #[test]
    fn adding_up_micro_batches_is_computing_and_no_communication() {
        let units = units(5);
        for (level, expected) in [(0, ["add", "round"]), (2, ["add", "clear"])] {
            let stage = Stage::try_from(level).unwrap();
            let config = Config { stage, accumulate: 2, ..Config::default() };
            let plan = &Plan::new(&units, DType::F32, &config, 0, 1);
            assert_eq!(plan.gradients[0] == Home::Whole, level == 0);
            let comm = &Communicator::threads(1).remove(0);
            let mut grads = Grads::<f32>::new(plan, comm, &Account::default(), &Account::default()).unwrap();
            let (mut kernels, mut clock) = (Recorder::default(), Clock::default());
            let mut hands = Hands { plan, comm, model: &Nobody, kernels: &mut kernels, clock: &mut clock };
            (0..2).for_each(|micro_batch| backward(&mut grads, &mut hands, micro_batch));
            grads.finish(&mut hands).unwrap();
            let done = kernels.log.lock().unwrap().clone();
            assert!(expected.iter().all(|what| done.iter().any(|(done, _)| done == what)));
            let adds = done.iter().filter(|(what, _)| *what == "add").count();
            assert_eq!(adds, units.len());
            for (what, marked) in &done {
                assert_eq!(*marked, Some(Activity::Compute), "{what} at stage {level}");
            }
            assert_eq!(
                kernels.marked == Some(Activity::Communication),
                level == 0,
                "what was waited for last"
            );
            assert!(clock.compute >= WORK * done.len() as u32, "{:?}", clock.compute);
        }
    }
}
