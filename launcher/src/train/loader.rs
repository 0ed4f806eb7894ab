//! Where a rank's micro-batches come from.

use crate::plan::TrainPlan;
use models::Batch;
use std::time::Instant;
use zero::Batches;

/// Makes the micro-batches of one rank.
pub(super) struct Loader<'a> {
    plan: &'a TrainPlan,
    rank: usize,
    step: usize,
    tokens: Vec<u32>,
    targets: Vec<u32>,
    /// Spent on this step's batches.
    pub(super) seconds: f64,
}

impl<'a> Loader<'a> {
    pub(super) fn new(plan: &'a TrainPlan, rank: usize) -> Self {
        let n = plan.batch.rows * plan.batch.length;
        Loader { plan, rank, step: 0, tokens: vec![0; n], targets: vec![0; n], seconds: 0.0 }
    }

    /// The batches of `step` are next.
    pub(super) fn start(&mut self, step: usize) {
        self.step = step;
        self.seconds = 0.0;
    }
}

impl Batches for Loader<'_> {
    fn micro_batch(&mut self, index: usize) -> Result<Batch<'_>, String> {
        let began = Instant::now();
        let plan = self.plan;
        let number = plan.batches.index(self.step as u64, index, self.rank);
        let read = plan.batches.read(plan.feed.tokens(), number, &mut self.tokens, &mut self.targets);
        read.map_err(|e| e.to_string())?;
        self.seconds += began.elapsed().as_secs_f64();
        let (rows, length) = (plan.batch.rows, plan.batch.length);
        Ok(Batch { tokens: &self.tokens, targets: &self.targets, rows, length })
    }
}
