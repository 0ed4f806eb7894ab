//! Where a rank's micro-batches come from.

use super::stop;
use crate::failure::Result;
use crate::plan::TrainPlan;
use collectives::{Account, Buffer};
use models::Batch;
use std::time::Instant;
use zero::{Batches, NoBatch};

/// Makes the micro-batches of one rank.
pub(super) struct Loader<'a> {
    plan: &'a TrainPlan,
    rank: usize,
    step: usize,
    tokens: Buffer<u32>,
    targets: Buffer<u32>,
    /// Spent on this step's batches.
    pub(super) seconds: f64,
}

impl<'a> Loader<'a> {
    /// With memory for one micro-batch on `account`.
    ///
    /// # Errors
    /// The system has no more memory.
    pub(super) fn new(plan: &'a TrainPlan, rank: usize, account: &Account) -> Result<Self> {
        let room =
            || Buffer::try_zeroed(plan.batch.rows * plan.batch.length).map(|room| room.booked(account));
        Ok(Loader { plan, rank, step: 0, tokens: room()?, targets: room()?, seconds: 0.0 })
    }

    /// The same memory, between steps: for tokens and for what they predict.
    pub(super) fn room(&mut self) -> [&mut [u32]; 2] {
        [self.tokens.host_mut(), self.targets.host_mut()]
    }

    /// The batches of `step` are next.
    pub(super) fn start(&mut self, step: usize) {
        self.step = step;
        self.seconds = 0.0;
    }
}

impl Batches for Loader<'_> {
    fn micro_batch(&mut self, index: usize) -> std::result::Result<Batch<'_>, NoBatch> {
        if let Some(signal) = stop::asked() {
            return Err(NoBatch::Stop(signal));
        }
        let began = Instant::now();
        let plan = self.plan;
        let first = plan.batches.first(self.step as u64, index, self.rank);
        let [tokens, targets] = self.room();
        plan.batches.read(plan.feed.tokens(), first, tokens, targets).map_err(|e| e.to_string())?;
        self.seconds += began.elapsed().as_secs_f64();
        let (rows, length) = (plan.batch.rows, plan.batch.length);
        Ok(Batch { tokens: self.tokens.host(), targets: self.targets.host(), rows, length })
    }
}
