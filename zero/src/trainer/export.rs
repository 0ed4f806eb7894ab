//! Whole tensors, out of a trainer.

use super::Trainer;
use crate::error::{Error, Result};
use crate::hands::Meanwhile;
use crate::kernels::PART;
use crate::params::Lent;
use collectives::Float;
use models::{TensorSpec, Weights};

/// Where exported weights go: called with every tensor in order, its elements one part after the other.
pub type Sink<'a, T> = dyn FnMut(&TensorSpec, &[T]) -> std::result::Result<(), String> + 'a;

impl<T: Float> Trainer<T> {
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
}
