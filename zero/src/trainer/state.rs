//! The whole state of a training, out of one trainer and into another that may have other ranks and another stage.
//!
//! What leaves, each rank shows its own part of, told by tensors and ranges of their elements, which no division of the model
//! changes; what enters, each rank takes its own part of. So nothing of it has to be sent.

use super::Trainer;
use crate::error::{Error, Result};
use crate::kernels::FLOATS;
use crate::plan::{Home, Plan};
use crate::scaling::Scale;
use crate::standing::Standing;
use crate::told::told_by;
use collectives::Float;
use models::TensorSpec;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

/// What of a training's state goes on with it, besides the number of its steps: each as many f32 as there are parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// f32 weights: the master's, or the parameters themselves where they are f32.
    Weights,
    /// The optimizer's means of gradients.
    FirstMoments,
    /// The optimizer's means of their squares.
    SecondMoments,
}

impl Kept {
    /// All of it.
    pub const ALL: [Kept; 3] = [Kept::Weights, Kept::FirstMoments, Kept::SecondMoments];
}

impl fmt::Display for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kept::Weights => "the weights",
            Kept::FirstMoments => "the first moments",
            Kept::SecondMoments => "the second moments",
        })
    }
}

/// Where exported state goes: is shown a range of a tensor's elements.
pub type StateSink<'a> = dyn FnMut(&TensorSpec, Range<usize>, &[f32]) -> std::result::Result<(), String> + 'a;

/// Where it comes from: fills a range of a tensor's elements.
pub type StateSource<'a> =
    dyn FnMut(Kept, &TensorSpec, Range<usize>, &mut [f32]) -> std::result::Result<(), String> + 'a;

impl<T: Float> Trainer<T> {
    /// Shows this rank's part of `kept` to `sink`: of every tensor in order some range of its elements or none, one piece after
    /// the other. Every rank calls it with the same `kept`, and each element is shown by one rank. Its bits are the same
    /// whatever the stage and the number of ranks. All go from unit to unit together; where a sink fails, it is shown no more,
    /// but the others hear nothing of it, and another export or step may follow.
    ///
    /// # Errors
    /// `sink` fails, which only its own rank says, a collective does, or [`restore`](Self::restore) has before.
    pub fn export_state(&mut self, kept: Kept, sink: &mut StateSink<'_>) -> Result<()> {
        self.whole()?;
        self.optimizer.check()?;
        let made = self.show_shards(kept, sink);
        self.after(made)
    }

    fn show_shards(&mut self, kept: Kept, sink: &mut StateSink<'_>) -> Result<()> {
        let plan = Arc::clone(&self.plan);
        let mut told = Told { sink: Some(sink), refused: None };
        // Without a master the parameters are f32 themselves.
        let parameters = kept == Kept::Weights && !plan.keeps_master();
        for unit in 0..plan.layout.len() {
            match parameters {
                true => self.show_parameters(unit, &mut told)?,
                false => self.show_state(kept, unit, &mut told)?,
            }
            // As in `export`: nobody waits longer for one who writes than a unit takes.
            self.comm.barrier()?;
        }
        told.refused.map_or(Ok(()), Err)
    }

    /// Shows this rank's part of the parameters of a unit.
    fn show_parameters(&mut self, unit: usize, told: &mut Told<'_, '_>) -> Result<()> {
        let Trainer { model, kernels, plan, params, .. } = self;
        if plan.weights[unit] == Home::Whole {
            // They may still be on their way; a shard is at home.
            params.gather(plan, unit)?;
        }
        let mut wide = Vec::new();
        for (tensor, spec) in model.units()[unit].tensors.iter().enumerate() {
            let (bucket, _) = plan.layout[unit].locate(tensor);
            let shard = plan.shard(unit, bucket).start;
            for Shown { of_bucket, of_tensor } in plan.shown(unit, tensor) {
                let all = params.shard(plan, unit, bucket);
                let values = kernels.elements(all.slice(of_bucket.start - shard..of_bucket.end - shard))?;
                wide.clear();
                wide.extend(values.iter().map(|x| x.to_f32()));
                told.tell(spec, of_tensor, &wide);
            }
        }
        Ok(())
    }

    /// Shows this rank's part of the optimizer's state of a unit.
    fn show_state(&mut self, kept: Kept, unit: usize, told: &mut Told<'_, '_>) -> Result<()> {
        let Trainer { model, kernels, plan, optimizer, .. } = self;
        for (tensor, spec) in model.units()[unit].tensors.iter().enumerate() {
            let (bucket, _) = plan.layout[unit].locate(tensor);
            let owned = plan.owned(unit, bucket).start;
            for Shown { of_bucket, of_tensor } in plan.shown(unit, tensor) {
                let all = optimizer.kept(kept, unit, bucket).expect("state that this configuration has");
                let values = kernels.floats(all.slice(of_bucket.start - owned..of_bucket.end - owned))?;
                told.tell(spec, of_tensor, values);
            }
        }
        Ok(())
    }

    /// Goes on from `standing` with the moments that `source` gives, tensor by tensor in order and part by part: the
    /// first moments of all ranges that this rank keeps, then the second. The weights are those that the trainer was made with,
    /// which have to be [`Kept::Weights`] of the same state. Every rank calls it, with the same state, before its first step.
    ///
    /// # Errors
    /// `source` fails, no training can be at `standing`, or ranks differ in it or, where each keeps all, in moments, which all
    /// ranks then say; steps were made before; or a collective fails. After an error the trainer makes no step until it is
    /// restored.
    pub fn restore(&mut self, standing: Standing, source: &mut StateSource<'_>) -> Result<()> {
        self.whole()?;
        let Standing { steps: made, .. } = self.standing;
        if made > 0 {
            // Its weights are no longer those that it was made with.
            return Err(Error::Config {
                problem: format!(
                    "a trainer after {made} steps, to be restored to {}: only one before its first step can be",
                    standing.steps
                ),
            });
        }
        let Trainer { model, comm, kernels, plan, optimizer, .. } = self;
        // Others may have another, and wait to hear of it.
        let nowhere =
            standing.skipped > standing.steps || standing.scale.is_some_and(|scale| !scale.can_be());
        let loaded = match nowhere {
            true => optimizer.refuse(format!("{standing:?}: no training stands there")),
            false => optimizer.load(plan, model.units(), &mut **kernels, source)?,
        };
        let standing = standing.scaled(&plan.config);
        // Where each rank has moments of its own, only they know of them.
        let digest = loaded.as_ref().map_or(0, |digest| digest.unwrap_or(0));
        let Standing { steps, skipped, scale } = standing;
        let [scale, since, left] =
            scale.map_or([0; 3], |Scale { scale, since, left }| [scale.to_bits(), since, left]);
        let scale = u64::from(scale) << 32 | u64::from(left);
        let mine = [u64::from(loaded.is_err()), steps, skipped, scale, since.into(), digest];
        let mut all = vec![0; mine.len() * comm.size()];
        comm.all_gather(&mine[..], &mut all[..])?;
        let ranks = || all.chunks_exact(mine.len());
        if let Some(rank) = ranks().position(|said| said[0] != 0) {
            let words = loaded.err().unwrap_or_default();
            let why = told_by(rank, comm, &words)?;
            return Err(Error::Restore { rank: comm.job_rank(rank), why });
        }
        if let Some(rank) = ranks().position(|said| said != &all[..mine.len()]) {
            let (theirs, first) = (&all[rank * mine.len()..], &all[..mine.len()]);
            let other = comm.job_rank(0);
            let why = match (0..mine.len()).find(|&at| theirs[at] != first[at]) {
                Some(1) => {
                    format!("it is to go on after {} steps, and rank {other} after {}", theirs[1], first[1])
                }
                Some(5) => {
                    format!("its moments are not those of rank {other}, and at stage 0 each keeps its own")
                }
                _ => format!("it has skipped other steps than rank {other}, or has another loss scale"),
            };
            return Err(Error::Restore { rank: comm.job_rank(rank), why });
        }
        optimizer.go_on();
        self.standing = standing;
        Ok(())
    }

    /// Waits for what is still on its way of the last update.
    ///
    /// # Errors
    /// A collective fails, as when another rank does, or something has failed before.
    pub fn settle(&mut self) -> Result<()> {
        self.whole()?;
        let whole = |unit: &usize| self.plan.weights[*unit] == Home::Whole;
        let settled = (0..self.plan.layout.len())
            .filter(whole)
            .try_for_each(|unit| self.params.gather(&self.plan, unit));
        self.after(settled)
    }

    /// How far the training has come, with what was before [`restore`](Self::restore).
    pub fn standing(&self) -> Standing {
        self.standing
    }
}

/// A piece of a tensor, as it lies in its bucket and in itself.
struct Shown {
    of_bucket: Range<usize>,
    of_tensor: Range<usize>,
}

impl Plan {
    /// The part of a tensor that lies in this rank's shard, piece by piece.
    fn shown(&self, unit: usize, tensor: usize) -> impl Iterator<Item = Shown> + use<> {
        let (bucket, place) = self.layout[unit].locate(tensor);
        let shard = self.shard(unit, bucket);
        let (first, end) = (place.start.max(shard.start), place.end.min(shard.end));
        (first..end).step_by(FLOATS).map(move |start| {
            let of_bucket = start..end.min(start + FLOATS);
            Shown { of_tensor: start - place.start..of_bucket.end - place.start, of_bucket }
        })
    }

    /// How many elements of each [`Kept`] a rank shows in an [export](Trainer::export_state) at most.
    pub fn shown_at_most(&self) -> usize {
        self.buckets().map(|(unit, bucket)| self.layout[unit].bucket(bucket).shard_len()).sum()
    }
}

/// Who is shown state, until it refuses.
struct Told<'a, 'b> {
    sink: Option<&'a mut StateSink<'b>>,
    refused: Option<Error>,
}

impl Told<'_, '_> {
    fn tell(&mut self, spec: &TensorSpec, range: Range<usize>, values: &[f32]) {
        let Some(sink) = self.sink.as_mut() else { return };
        if let Err(why) = sink(spec, range, values) {
            self.refused = Some(Error::Export { tensor: spec.name.clone(), why });
            self.sink = None;
        }
    }
}
