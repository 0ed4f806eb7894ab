//! Where a device's time goes: events in its compute queue, between which it does one thing or waits for one.

use crate::error::Result;
use collectives::device::{SharedQueue, Streams};

/// What a device's compute queue does, or waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    /// The model's forward and backward, and adding up micro-batches.
    Compute,
    /// Collectives that it cannot go on without.
    Communication,
    /// The gradient's norm and the update.
    Optimizer,
    /// What belongs to no step.
    Other,
}

/// Seconds of a device by what it did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Elapsed {
    /// See [`Activity::Compute`]; the others likewise.
    pub compute: f64,
    /// Waiting for collectives.
    pub communication: f64,
    /// The optimizer.
    pub optimizer: f64,
}

/// Events that are made beyond those of the first steps.
const SPARE: usize = 16;

/// Events of the compute queue, each with what comes after it.
pub struct Meter<Q: Streams> {
    marks: Vec<(Activity, Q::Event)>,
    used: usize,
    /// Of those, the first ones that are known to have happened.
    reached: usize,
}

impl<Q: Streams> Default for Meter<Q> {
    fn default() -> Self {
        Meter { marks: Vec::new(), used: 0, reached: 0 }
    }
}

impl<Q: Streams> Meter<Q> {
    /// From here on the queue does this.
    ///
    /// # Errors
    /// The device's.
    pub fn mark(&mut self, queue: &SharedQueue<Q>, activity: Activity) -> Result<()> {
        if self.used > 0 && self.marks[self.used - 1].0 == activity {
            return Ok(());
        }
        if self.used == self.marks.len() {
            self.marks.push((activity, queue.timed_event()?));
        }
        let (place, event) = &mut self.marks[self.used];
        *place = activity;
        queue.record(event)?;
        self.used += 1;
        Ok(())
    }

    /// The device has done all that was given to it so far.
    pub fn reach(&mut self) {
        self.reached = self.used;
    }

    /// What was done between the first mark and the last that was reached; the next interval starts there.
    ///
    /// # Errors
    /// The device's.
    pub fn take(&mut self, queue: &SharedQueue<Q>) -> Result<Elapsed> {
        // Later steps have a few marks more than the first, and take no memory: not even to have as many to spare again.
        if self.marks.len() < self.used + SPARE / 2 {
            for _ in 0..SPARE {
                self.marks.push((Activity::Other, queue.timed_event()?));
            }
        }
        let mut elapsed = Elapsed::default();
        for pair in self.marks[..self.reached].windows(2) {
            let seconds = Q::seconds(&pair[0].1, &pair[1].1)?;
            match pair[0].0 {
                Activity::Compute => elapsed.compute += seconds,
                Activity::Communication => elapsed.communication += seconds,
                Activity::Optimizer => elapsed.optimizer += seconds,
                Activity::Other => {}
            }
        }
        let over = self.reached.saturating_sub(1);
        self.marks[..self.used].rotate_left(over);
        self.used -= over;
        self.reached -= over;
        Ok(elapsed)
    }
}
