//! What one rank of a run keeps of its state: what is there, what is under way, and who writes it.

use super::worker::Worker;
use super::writing::{Due, Lead, Manner, Writers, Writing, Written, copied_state};
use super::{Checkpoints, check_seen};
use crate::failure::Result;
use crate::plan::TrainPlan;
use crate::save::Companions;
use collectives::{Account, Buffer, Communicator, Float};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use zero::Trainer;

/// How long a rank 0 that fails waits for its part in a checkpoint.
const AT_THE_END: Duration = Duration::from_secs(2);

/// The checkpoints of a run, as one rank has them. All ranks call the same of it.
pub struct Keeping<'a> {
    plan: &'a TrainPlan,
    checkpoints: &'a Checkpoints,
    /// Steps of the last one, and of the last that was tried.
    kept: usize,
    tried: usize,
    /// The one that is under way, and where this rank's part of one is copied to.
    writing: Option<Writing<'a>>,
    /// What writes it, and rank 0's share in that.
    worker: Worker,
    lead: Option<Lead>,
    copy: Option<Buffer<f32>>,
}

impl<'a> Keeping<'a> {
    /// Takes the directory for this run, if it keeps anything: `companions` go with the weights.
    ///
    /// # Errors
    /// Another run has the directory, or not all ranks see it.
    pub fn begin(
        plan: &'a TrainPlan,
        comm: &Communicator,
        companions: &Arc<Companions>,
    ) -> Result<Option<Self>> {
        let Some(checkpoints) = &plan.checkpoints else { return Ok(None) };
        let lead = match comm.rank() {
            0 => {
                let claim = Arc::new(Mutex::new(checkpoints.claim()?));
                Some(Lead { claim, companions: Arc::clone(companions) })
            }
            _ => None,
        };
        check_seen(&checkpoints.dir, comm)?;
        // Rank 0's may have all parts, and be about to give them their name.
        let worker = Worker::start(if lead.is_some() { AT_THE_END } else { Duration::ZERO })?;
        let made = checkpoints.made();
        let (kept, tried) = (made, made);
        Ok(Some(Keeping { plan, checkpoints, kept, tried, writing: None, worker, lead, copy: None }))
    }

    /// Takes the memory for copies, booked on an account, where there are any.
    ///
    /// # Errors
    /// There is none.
    pub fn reserve(&mut self, plan: &zero::Plan, account: &Account) -> Result<()> {
        if self.checkpoints.beside {
            let mut room = Buffer::try_zeroed(copied_state(plan))?.booked(account);
            // Or its pages would come with the first copy.
            room.host_mut().fill(0.0);
            self.copy = Some(room);
        }
        Ok(())
    }

    /// After which step the last one is, or 0.
    pub fn kept(&self) -> usize {
        self.kept
    }

    /// Whether one is under way.
    pub fn waits(&self) -> bool {
        self.writing.is_some()
    }

    /// Whether the one after step `made` was tried already, so that nothing is left to make: what is not to stay beside the last
    /// one goes then.
    pub fn settle(&self, made: usize) -> bool {
        if made == self.tried
            && let Some(lead) = &self.lead
        {
            lead.settle(self.checkpoints, self.kept, &self.worker);
        }
        made == self.tried
    }

    /// Begins to keep the state of `trainer`, after whose last step an evaluation was made or not, at once or `beside` the next
    /// steps. None is under way.
    ///
    /// # Errors
    /// Another rank fails.
    pub fn make<T: Float>(&mut self, trainer: &mut Trainer<T>, evaluated: bool, beside: bool) -> Result<()> {
        self.tried = trainer.standing().steps as usize;
        let due = Due { plan: self.plan, checkpoints: self.checkpoints, evaluated, before: self.kept };
        let writers = Writers { lead: self.lead.as_ref(), worker: &self.worker };
        let manner = if beside { Manner::Beside(self.copy.take()) } else { Manner::Standing };
        self.writing = Some(Writing::begin(trainer, due, writers, manner)?);
        Ok(())
    }

    /// What came of the one that is under way, if it is over: all ranks ask together, and `wait` a moment or do not.
    ///
    /// # Errors
    /// Another rank fails.
    pub fn ask(&mut self, comm: &Communicator, wait: bool) -> Result<Option<Written>> {
        let Some(writing) = &mut self.writing else { return Ok(None) };
        let Some((written, copy)) = writing.end(comm, &self.worker, wait)? else { return Ok(None) };
        self.writing = None;
        self.copy = copy.or(self.copy.take());
        if written.whole {
            self.kept = written.step;
        }
        Ok(Some(written))
    }

    /// Waits until what is no state any more is off the disk: there will be no other.
    pub fn rest(&mut self) {
        self.worker.rest();
    }
}
