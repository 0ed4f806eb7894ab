//! What is computed without being learnt from: losses and logits.

use super::Trainer;
use crate::error::Result;
use crate::hands::Meanwhile;
use crate::params::Lent;
use crate::schedule::Action;
use collectives::Float;
use models::Batch;
use std::sync::Arc;

impl<T: Float> Trainer<T> {
    /// The token losses of `batch` (nats) in their order; a rank without one takes part in the gathers only.
    ///
    /// # Errors
    /// A collective fails, as when another rank does.
    ///
    /// # Panics
    /// A batch that [`Model::begin`](models::Model::begin) does not take, as a larger one than the model was built for.
    pub fn evaluate(&mut self, batch: Option<&Batch<'_>>) -> Result<&[f32]> {
        self.whole()?;
        let made = self.pass_forward(batch);
        self.after(made)?;
        Ok(if batch.is_some() { self.model.losses() } else { &[] })
    }

    fn pass_forward(&mut self, batch: Option<&Batch<'_>>) -> Result<()> {
        if let Some(batch) = batch {
            self.model.begin(batch, 0.0);
        }
        let plan = Arc::clone(&self.plan);
        for &action in &plan.evaluation.actions {
            match action {
                Action::Forward(_) if batch.is_none() => {}
                action => self.perform(action)?,
            }
        }
        if batch.is_some() {
            // A device is waited for here.
            self.model.losses();
        }
        self.model.check()?;
        // As the norm's numbers, they may be made of weights that never came.
        Ok(self.comm.progress()?)
    }

    /// Logits at `position` of `batch` (row * length + column), into `out` of the vocabulary's length. Every
    /// rank calls it, with the same batch.
    ///
    /// # Errors
    /// A collective fails, as when another rank does.
    ///
    /// # Panics
    /// A batch that [`Model::begin`](models::Model::begin) does not take, a position outside it, or `out` of another length.
    pub fn logits(&mut self, batch: &Batch<'_>, position: usize, out: &mut [f32]) -> Result<()> {
        self.whole()?;
        let made = self.pass_to_logits(batch, position, out);
        self.after(made)
    }

    fn pass_to_logits(&mut self, batch: &Batch<'_>, position: usize, out: &mut [f32]) -> Result<()> {
        self.model.begin(batch, 0.0);
        let head = self.model.units().len() - 1;
        let plan = Arc::clone(&self.plan);
        for &action in &plan.evaluation.actions {
            match action {
                Action::Forward(unit) if unit == head => {
                    let Trainer { model, comm, plan, params, .. } = self;
                    model.logits(position, &Lent { plan, params, meanwhile: &Meanwhile::new(comm) }, out);
                }
                action => self.perform(action)?,
            }
        }
        self.model.check()?;
        Ok(self.comm.progress()?)
    }
}
