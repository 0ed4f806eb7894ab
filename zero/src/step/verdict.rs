//! What ends a step on all ranks, before anything is updated.

use super::NoBatch;
use crate::clip::{Global, Terms};
use crate::error::{Error, Result};
use crate::told::told_by;
use crate::trainer::Trainer;
use collectives::Float;

impl<T: Float> Trainer<T> {
    /// What all ranks come to where one was without a micro-batch, or has made another step than the others.
    pub(super) fn check_alike(&self, global: &Global, terms: Terms, without: Option<NoBatch>) -> Result<()> {
        let (comm, step) = (&self.comm, self.standing.steps + 1);
        if let Some((rank, stop)) = global.without {
            let words = if let Some(NoBatch::Failed(words)) = &without { words } else { "" };
            return Err(match stop {
                Some(why) => Error::Stopped { step, rank: comm.job_rank(rank), why },
                None => {
                    let why = told_by(rank, comm, words)?;
                    Error::Batch { step, rank: comm.job_rank(rank), why }
                }
            });
        }
        if let Some((rank, [first, other])) = global.unlike {
            return Err(Error::Unlike {
                step,
                rank: comm.job_rank(rank),
                tokens: other.tokens,
                lr: other.lr,
                other: comm.job_rank(0),
                others: first.tokens,
                other_lr: first.lr,
            });
        }
        match terms.lr.is_finite() && terms.lr >= 0.0 {
            true => Ok(()),
            // All ranks have it.
            false => Err(Error::Rate { lr: terms.lr }),
        }
    }
}
