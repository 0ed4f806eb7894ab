//! Writing a checkpoint: each rank its own part, at once or beside the next steps, from a copy of it.

use super::pen::{Attempt, Named, Pen};
use super::{Checkpoints, Leaving, name, pen_place};
use crate::agree;
use crate::failure::{Failure, Result};
use crate::plan::TrainPlan;
use crate::save::Companions;
use collectives::{Buffer, Communicator, Float, ReduceOp};
use models::hf::{Part, Parts, Piece, SaveOptions};
use std::ops::Range;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;
use zero::{Kept, Trainer};

/// How long a rank waits for its own part before all ask each other again, so that nobody waits longer for a rank that waits for
/// a disk.
const PATIENCE: Duration = Duration::from_millis(20);

/// Of the state: the weights and both moments.
type Each<T> = [T; Kept::ALL.len()];

/// What came of writing a checkpoint. The ranks stand together then, and the one before is there where it is not.
pub struct Written {
    /// After which step it is, or would be.
    pub step: usize,
    /// Whether it is there, as all ranks know.
    pub whole: bool,
    /// On rank 0, why it is not.
    pub refused: Option<Failure>,
    /// On rank 0, what has to be said of one that is there.
    pub remark: Option<String>,
    /// On rank 0, what it takes the place of.
    pub leaving: Leaving,
    /// Where the state was copied to.
    pub copy: Option<Buffer<f32>>,
}

/// A checkpoint on its way to the disk. All ranks have it at once, and ask together how far it is.
pub struct Writing<'a> {
    plan: &'a TrainPlan,
    checkpoints: &'a Checkpoints,
    step: usize,
    parts: Each<Parts>,
    /// Rank 0's.
    pen: Option<Pen<'a>>,
    /// What comes of this rank's part,
    thread: Receiver<Mine>,
    /// once it has come.
    mine: Option<Mine>,
}

/// What came of a rank's part, and where it was copied to.
type Mine = (Outcome, Option<Buffer<f32>>);
/// The pieces of it, or why there are no more.
type Outcome = std::result::Result<Each<Vec<Piece>>, String>;

impl<'a> Writing<'a> {
    /// Begins to write the state of a training after its last step, and whether it was `evaluated` there: from where it is, or,
    /// so that the training can go on meanwhile, from a `copy` of this rank's part. What is refused is told at its
    /// [end](Self::end).
    ///
    /// # Errors
    /// Another rank fails.
    pub fn begin<T: Float>(
        trainer: &mut Trainer<T>,
        plan: &'a TrainPlan,
        checkpoints: &'a Checkpoints,
        companions: &Companions,
        evaluated: bool,
        copy: Option<Buffer<f32>>,
    ) -> Result<Self> {
        let standing = trainer.standing();
        let step = standing.steps as usize;
        let parts = parts(plan, checkpoints, companions, step)?;
        let mut pen = (trainer.comm().rank() == 0).then(|| Pen::new(checkpoints, standing, evaluated));
        let begun = pen.as_mut().map_or(Ok(()), |pen| begin(pen, &parts, companions));
        let (tell, thread) = channel();
        let mut writing = Writing { plan, checkpoints, step, parts, pen, thread, mine: None };
        // Nobody else opens what is not there yet.
        let mut refused = [u8::from(begun.is_err())];
        trainer.comm().all_reduce_in_place(&mut refused[..], ReduceOp::Max)?;
        if refused != [0] {
            let mine = begun.map(|()| Default::default()).map_err(|e| e.to_string());
            writing.mine = Some((mine, copy));
            return Ok(writing);
        }
        let mut mine = Own {
            parts: writing.parts.each_ref().map(Parts::part),
            copied: copy.map(|room| Copied { room, used: 0, ranges: Vec::new() }),
        };
        let mut refused = None;
        for kept in Kept::ALL {
            trainer.export_state(kept, &mut |spec, range, values| {
                // After a refusal the others are still accompanied through the rest.
                if refused.is_some() {
                    return Ok(());
                }
                refused = match values.iter().all(|value| value.is_finite()) {
                    true => mine.take(kept, &spec.name, range, values).err().map(|e| e.to_string()),
                    // Nothing goes on from that.
                    false => Some(format!("{kept} of {} after step {step} are not all finite", spec.name)),
                };
                Ok(())
            })?;
        }
        // Nobody hears of it where the run has ended.
        let work = move || drop(tell.send(mine.finish(refused)));
        if let Err(e) = thread::Builder::new().name("checkpoint".into()).spawn(work) {
            writing.mine = Some((Err(format!("no thread can be started to write it: {e}")), None));
        }
        Ok(writing)
    }

    /// What came of it, once all ranks have written their parts; all ask together, and `wait` a moment for that or do not.
    ///
    /// # Errors
    /// Another rank fails.
    pub fn end(&mut self, comm: &Communicator, wait: bool) -> Result<Option<Written>> {
        if self.mine.is_none() {
            self.mine = match self.thread.recv_timeout(if wait { PATIENCE } else { Duration::ZERO }) {
                Ok(mine) => Some(mine),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => {
                    Some((Err("the thread that writes it has ended".into()), None))
                }
            };
        }
        let refused = self.mine.as_ref().is_some_and(|(outcome, _)| outcome.is_err());
        let mut any = [self.mine.is_none(), refused].map(u8::from);
        comm.all_reduce_in_place(&mut any[..], ReduceOp::Max)?;
        let [writes, refused] = any.map(|flag| flag > 0);
        if writes {
            return Ok(None);
        }
        let Some((outcome, copy)) = self.mine.take() else { return Ok(None) };
        let finished = match outcome {
            Ok(pieces) if !refused => self.finish(comm, &pieces)?,
            outcome => Err(told_by(comm, &outcome.err().unwrap_or_default())?.into()),
        };
        // What is not whole goes.
        let lead = self.pen.take().is_some();
        let mut lost = [u8::from(finished.is_err())];
        comm.all_reduce_in_place(&mut lost[..], ReduceOp::Max)?;
        let said =
            |why: &dyn std::fmt::Display| format!("--checkpoint {}: {why}", self.checkpoints.dir.display());
        let whole = lost == [0];
        let (refused, named) = match finished {
            Ok(named) => (None, named),
            Err(why) => (Some(Failure::run(said(&why))).filter(|_| lead), Named::default()),
        };
        let Named { remark, leaving } = named;
        let remark = remark.map(|why| said(&why));
        Ok(Some(Written { step: self.step, whole, refused, remark, leaving, copy }))
    }

    /// Gives it its name, by what all ranks have written: the inner error is rank 0's.
    fn finish(&mut self, comm: &Communicator, mine: &Each<Vec<Piece>>) -> Result<Attempt<Named>> {
        let mut sums = Vec::new();
        for ((kept, parts), mine) in Kept::ALL.into_iter().zip(&self.parts).zip(mine) {
            let packed: Vec<u64> = mine.iter().flat_map(|piece| piece.pack()).collect();
            if let Some(all) = agree::gather(comm, &packed)? {
                let pieces = all.iter().flat_map(|rank| rank.as_chunks::<4>().0);
                sums.push((kept, parts.sums(pieces.map(|&piece| Piece::unpack(piece)).collect())));
            }
        }
        let Some(pen) = &mut self.pen else { return Ok(Ok(Named::default())) };
        let finish = || {
            sums.into_iter().try_for_each(|(kept, sums)| sums.map(|sums| pen.tell(kept, sums)))?;
            pen.finish(self.plan)
        };
        Ok(finish())
    }
}

/// The directories of the state after a step.
fn parts(
    plan: &TrainPlan,
    checkpoints: &Checkpoints,
    companions: &Companions,
    step: usize,
) -> Result<Each<Parts>> {
    // Whatever shape is trained goes on from it; that transformers loads the weights, too, is no condition.
    let options =
        SaveOptions { remarks: companions.remarks(), for_transformers: false, ..SaveOptions::default() };
    let place = pen_place(&checkpoints.dir, step);
    let of = |kept| Parts::plan(&place.join(name(kept)), &plan.model.config, &options).map_err(Failure::run);
    let [weights, first, second] = Kept::ALL.map(of);
    Ok([weights?, first?, second?])
}

/// Makes them, with all but what ranks write.
fn begin(pen: &mut Pen<'_>, parts: &Each<Parts>, companions: &Companions) -> Attempt<()> {
    pen.begin()?;
    for (kept, parts) in Kept::ALL.into_iter().zip(parts) {
        let companions = if kept == Kept::Weights { companions.files() } else { &[] };
        pen.tell(kept, parts.begin(companions)?);
    }
    Ok(())
}

/// Why some rank has not written its part: each says why it has not, if so.
fn told_by(comm: &Communicator, why: &str) -> Result<String> {
    let said = agree::exchange(comm, why)?;
    let first = said.into_iter().enumerate().find(|(_, why)| !why.is_empty());
    Ok(match first {
        Some((0, why)) => why,
        Some((rank, why)) => format!("rank {}: {why}", comm.job_rank(rank)),
        None => "a rank has not written its part".into(),
    })
}

/// Elements of the copies of this rank's part.
pub fn copied_state(plan: &zero::Plan) -> usize {
    Kept::ALL.len() * plan.shown_at_most()
}

/// A rank's own part.
struct Own {
    parts: Each<Part>,
    /// What is still to be written to them, where it is copied first.
    copied: Option<Copied>,
}

/// A copy of it: the elements of ranges of weights, one after another.
struct Copied {
    room: Buffer<f32>,
    used: usize,
    ranges: Vec<(Kept, String, Range<usize>)>,
}

impl Own {
    /// Writes or copies a range of a weight.
    fn take(&mut self, kept: Kept, name: &str, range: Range<usize>, values: &[f32]) -> models::Result<()> {
        let Some(Copied { room, used, ranges }) = &mut self.copied else {
            return self.parts[kept as usize].write(name, range, values);
        };
        room.host_mut()[*used..][..values.len()].copy_from_slice(values);
        *used += values.len();
        match ranges.last_mut() {
            Some((of, last, before)) if (*of, &**last, before.end) == (kept, name, range.start) => {
                before.end = range.end;
            }
            _ => ranges.push((kept, name.to_owned(), range)),
        }
        Ok(())
    }

    /// Writes what is not yet written, unless something was `refused`, and brings all to the disk.
    fn finish(mut self, refused: Option<String>) -> Mine {
        let outcome = match refused {
            None => self.write().and_then(|()| {
                let [weights, first, second] = self.parts;
                Ok([weights.finish()?, first.finish()?, second.finish()?])
            }),
            Some(why) => return (Err(why), self.copied.map(|copied| copied.room)),
        };
        (outcome.map_err(|e| e.to_string()), self.copied.map(|copied| copied.room))
    }

    fn write(&mut self) -> models::Result<()> {
        let Some(Copied { room, ranges, .. }) = &self.copied else { return Ok(()) };
        let mut rest = room.host();
        for (kept, name, range) in ranges {
            let (values, others) = rest.split_at(range.len());
            self.parts[*kept as usize].write(name, range.clone(), values)?;
            rest = others;
        }
        Ok(())
    }
}
