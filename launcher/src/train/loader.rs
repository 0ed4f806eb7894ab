//! Where a rank's micro-batches come from.

use crate::failure::{Failure, Result};
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
    failed: Option<Failure>,
}

impl<'a> Loader<'a> {
    pub(super) fn new(plan: &'a TrainPlan, rank: usize) -> Self {
        let n = plan.batch.rows * plan.batch.length;
        Loader { plan, rank, step: 0, tokens: vec![0; n], targets: vec![0; n], seconds: 0.0, failed: None }
    }

    /// The batches of `step` are next.
    pub(super) fn start(&mut self, step: usize) {
        self.step = step;
        self.seconds = 0.0;
    }

    /// What went wrong with a batch of this step.
    pub(super) fn check(&mut self) -> Result<()> {
        self.failed.take().map_or(Ok(()), Err)
    }
}

impl Batches for Loader<'_> {
    fn micro_batch(&mut self, index: usize) -> Batch<'_> {
        let began = Instant::now();
        let plan = self.plan;
        let number = plan.batches.index(self.step as u64, index, self.rank);
        if let Err(e) = plan.batches.read(plan.feed.tokens(), number, &mut self.tokens, &mut self.targets) {
            // The step takes what is there; the run ends before anything is made of it.
            self.failed.get_or_insert(Failure::run(e));
            self.tokens.fill(0);
            self.targets.fill(0);
        }
        self.seconds += began.elapsed().as_secs_f64();
        Batch {
            tokens: &self.tokens,
            targets: &self.targets,
            rows: plan.batch.rows,
            length: plan.batch.length,
        }
    }
}
