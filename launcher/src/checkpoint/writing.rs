//! Writing a checkpoint: each rank its own part, at once or beside the next steps, from a copy of it.
//!
//! Rank 0 makes the files, each rank writes its part, and rank 0 gives it its name. Whoever waits for a disk is a thread: the
//! ranks only ask each other whether all have come so far.

use super::claim::Claim;
use super::pen::{self, Attempt, Named, Pen, take_away_before};
use super::worker::{Task, Worker};
use super::{Checkpoints, name, pen_place};
use crate::agree;
use crate::failure::{Failure, Result};
use crate::plan::TrainPlan;
use crate::save::Companions;
use collectives::{Buffer, Communicator, Float, ReduceOp};
use models::hf::{Part, Parts, Piece, SaveOptions, sync_dir};
use std::mem;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use zero::{Kept, Trainer};

/// How long a rank waits for its thread before all ask each other again.
const PATIENCE: Duration = Duration::from_millis(20);

/// Of the state: the weights and both moments.
type Each<T> = [T; Kept::ALL.len()];
/// What came of something, or why not.
type Outcome<T> = std::result::Result<T, String>;
/// What a thread does, what it gives back in any case, and what comes of it.
type Job<A, B> = Task<(A, Outcome<B>)>;

/// What rank 0 has for writing them, and nobody else.
pub struct Lead {
    /// Its directory.
    pub claim: Arc<Mutex<Claim>>,
    /// What goes with the weights.
    pub companions: Arc<Companions>,
}

/// A state that is to be kept, of a training after its last step.
#[derive(Clone, Copy)]
pub struct Due<'a> {
    /// The training.
    pub plan: &'a TrainPlan,
    /// Where it is to be, and how many stay beside it.
    pub checkpoints: &'a Checkpoints,
    /// Whether an evaluation was made there.
    pub evaluated: bool,
    /// After which step the last one was; 0 for none.
    pub before: usize,
}

/// Who writes it.
#[derive(Clone, Copy)]
pub struct Writers<'b> {
    /// Rank 0's share.
    pub lead: Option<&'b Lead>,
    /// This rank's thread.
    pub worker: &'b Worker,
}

/// How it is written.
pub enum Manner {
    /// From where it is, while the run stands still.
    Standing,
    /// Beside the next steps, from a copy that is made at once, where there is room for it.
    Beside(Option<Buffer<f32>>),
}

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
}

/// A checkpoint on its way to the disk. All ranks have it at once, and ask together how far it is.
pub struct Writing<'a> {
    checkpoints: &'a Checkpoints,
    step: usize,
    parts: Each<Parts>,
    /// Rank 0's, unless its thread has it.
    pen: Option<Pen>,
    /// What is copied, until there are files for it.
    own: Option<Own>,
    /// Where it was copied to, once it is written.
    copy: Option<Buffer<f32>>,
    stage: Stage,
}

enum Stage {
    /// Rank 0 makes the files.
    Begun(Job<Option<Pen>, ()>),
    /// They are there.
    Open,
    /// Each rank writes its part.
    Written(Job<Option<Buffer<f32>>, Each<Vec<Piece>>>),
    /// Rank 0 gives it its name.
    Named(Job<(), Named>),
    /// It has it, or some rank was refused something.
    Over(Outcome<Named>),
}

impl<'a> Writing<'a> {
    /// Begins to write a state, waiting for the files where the run stands still. What is refused is told at its
    /// [end](Self::end).
    ///
    /// # Errors
    /// Another rank fails.
    pub fn begin<T: Float>(
        trainer: &mut Trainer<T>,
        due: Due<'a>,
        Writers { lead, worker }: Writers<'_>,
        manner: Manner,
    ) -> Result<Self> {
        let Due { plan, checkpoints, .. } = due;
        let standing = trainer.standing();
        let step = standing.steps as usize;
        let remarks = lead.map(|lead| lead.companions.remarks()).unwrap_or_default();
        let options = SaveOptions { remarks, ..SaveOptions::default() };
        let place = pen_place(&checkpoints.dir, step);
        let of =
            |kept| Parts::plan(&place.join(name(kept)), &plan.model.config, &options).map_err(Failure::run);
        let [weights, first, second] = Kept::ALL.map(of);
        let parts = [weights?, first?, second?];
        let begun = match lead {
            Some(Lead { claim, companions }) => {
                let mut pen = Pen::new(&due, Arc::clone(claim), standing);
                let (parts, companions) = (parts.clone(), Arc::clone(companions));
                worker.give(move || match begin(&mut pen, &parts, &companions) {
                    Ok(()) => (Some(pen), Ok(())),
                    Err(e) => (None, Err(e.to_string())),
                })
            }
            None => Task::done((None, Ok(()))),
        };
        let stage = Stage::Begun(begun);
        let mut writing = Writing { checkpoints, step, parts, pen: None, own: None, copy: None, stage };
        let beside = matches!(manner, Manner::Beside(_));
        while !beside && matches!(writing.stage, Stage::Begun(_)) {
            writing.go_on(trainer.comm(), worker, true)?;
        }
        if let Stage::Over(_) = writing.stage {
            return Ok(writing);
        }
        let own = writing.export(trainer, manner)?;
        match beside {
            true => writing.own = Some(own),
            false => writing.stage = Stage::Written(worker.give(|| own.finish())),
        }
        Ok(writing)
    }

    /// This rank's part, written or copied.
    fn export<T: Float>(&self, trainer: &mut Trainer<T>, manner: Manner) -> Result<Own> {
        let (room, refused) = match manner {
            Manner::Standing => (None, None),
            Manner::Beside(Some(room)) => (Some(room), None),
            // The thread that had it has ended.
            Manner::Beside(None) => (None, Some("the room for a copy is lost".to_owned())),
        };
        let mut own = Own {
            parts: self.parts.each_ref().map(Parts::part),
            copied: room.map(|room| Copied { room, used: 0, ranges: Vec::new() }),
            refused,
        };
        for kept in Kept::ALL {
            trainer.export_state(kept, &mut |spec, range, values| {
                // After a refusal the others are still accompanied through the rest.
                if own.refused.is_none() {
                    own.refused = match values.iter().all(|value| value.is_finite()) {
                        true => own.take(kept, &spec.name, range, values).err().map(|e| e.to_string()),
                        // Nothing goes on from that.
                        false => Some(format!(
                            "{kept} of {} after step {} are not all finite",
                            spec.name, self.step
                        )),
                    };
                }
                Ok(())
            })?;
        }
        Ok(own)
    }

    /// What came of it, and where it was copied to, once it has its name or was refused; all ask together, and `wait` a moment for
    /// each other's threads or do not.
    ///
    /// # Errors
    /// Another rank fails.
    pub fn end(
        &mut self,
        comm: &Communicator,
        worker: &Worker,
        wait: bool,
    ) -> Result<Option<(Written, Option<Buffer<f32>>)>> {
        self.go_on(comm, worker, wait)?;
        let Stage::Over(outcome) = &mut self.stage else { return Ok(None) };
        let said =
            |why: &dyn std::fmt::Display| format!("--checkpoint {}: {why}", self.checkpoints.dir.display());
        let whole = outcome.is_ok();
        let (named, refused) = match mem::replace(outcome, Ok(Named::default())) {
            Ok(named) => (named, None),
            Err(why) => (Named::default(), Some(said(&why))),
        };
        let Named { remark, going } = named;
        if !going.is_empty() {
            worker.give(move || pen::remove(&going));
        }
        let refused = refused.filter(|_| comm.rank() == 0).map(Failure::run);
        let remark = remark.map(|why| said(&why));
        Ok(Some((Written { step: self.step, whole, refused, remark }, self.copy.take())))
    }

    /// Asks once whether all ranks have come so far, and goes on with what is next if so.
    fn go_on(&mut self, comm: &Communicator, worker: &Worker, wait: bool) -> Result<()> {
        self.stage = match mem::replace(&mut self.stage, Stage::Open) {
            Stage::Begun(task) => match ask(comm, task, wait)? {
                Asked::Waits(task) => Stage::Begun(task),
                Asked::Done(pen, outcome) => {
                    self.pen = pen;
                    match (outcome, self.own.take()) {
                        (Err(why), own) => {
                            self.copy = own.and_then(Own::room);
                            Stage::Over(Err(why))
                        }
                        (Ok(()), Some(own)) => Stage::Written(worker.give(|| own.finish())),
                        (Ok(()), None) => Stage::Open,
                    }
                }
            },
            Stage::Written(task) => match ask(comm, task, wait)? {
                Asked::Waits(task) => Stage::Written(task),
                Asked::Done(copy, outcome) => {
                    self.copy = copy;
                    match outcome {
                        Ok(pieces) => Stage::Named(self.name(comm, worker, &pieces)?),
                        Err(why) => Stage::Over(Err(why)),
                    }
                }
            },
            Stage::Named(task) => match ask(comm, task, wait)? {
                Asked::Waits(task) => Stage::Named(task),
                Asked::Done(_, outcome) => Stage::Over(outcome),
            },
            same @ (Stage::Open | Stage::Over(_)) => same,
        };
        if let Some(pen) = self.pen.take_if(|_| matches!(self.stage, Stage::Over(_))) {
            // What is not whole goes.
            worker.give(move || drop(pen));
        }
        Ok(())
    }

    /// Has rank 0 give it its name, by what all ranks have written.
    fn name(
        &mut self,
        comm: &Communicator,
        worker: &Worker,
        mine: &Each<Vec<Piece>>,
    ) -> Result<Job<(), Named>> {
        let mut sums = Vec::new();
        for ((kept, parts), mine) in Kept::ALL.into_iter().zip(&self.parts).zip(mine) {
            let packed: Vec<u64> = mine.iter().flat_map(|piece| piece.pack()).collect();
            if let Some(all) = agree::gather(comm, &packed)? {
                let pieces = all.iter().flat_map(|rank| rank.as_chunks::<4>().0);
                sums.push((kept, parts.sums(pieces.map(|&piece| Piece::unpack(piece)).collect())));
            }
        }
        let Some(mut pen) = self.pen.take() else { return Ok(Task::done(((), Ok(Named::default())))) };
        Ok(worker.give(move || {
            let finish = || -> Attempt<Named> {
                sums.into_iter().try_for_each(|(kept, sums)| sums.map(|sums| pen.tell(kept, sums)))?;
                pen.finish()
            };
            ((), finish().map_err(|e| e.to_string()))
        }))
    }
}

impl Lead {
    /// Takes away what is not to stay beside the state after `step`, if that lasts: a run that was killed as it gave the last one
    /// its name has left more, or one that was to keep more.
    pub fn settle(&self, checkpoints: &Checkpoints, step: usize, worker: &Worker) {
        let (dir, keep, claim) = (checkpoints.dir.clone(), checkpoints.keep, Arc::clone(&self.claim));
        worker.give(move || {
            let ours = claim.lock().unwrap_or_else(PoisonError::into_inner).holds();
            if ours && sync_dir(&dir).is_ok() {
                pen::remove(&take_away_before(&dir, keep, step).going);
            }
        });
    }
}

impl Drop for Lead {
    fn drop(&mut self) {
        // A thread may still have it where the run ends before its time, whose directory is then nobody's.
        if let Ok(mut claim) = self.claim.try_lock() {
            claim.end();
        }
    }
}

/// Makes the directories, with all but what ranks write.
fn begin(pen: &mut Pen, parts: &Each<Parts>, companions: &Companions) -> Attempt<()> {
    pen.begin()?;
    for (kept, parts) in Kept::ALL.into_iter().zip(parts) {
        let companions = if kept == Kept::Weights { companions.files() } else { &[] };
        pen.tell(kept, parts.begin(companions)?);
    }
    Ok(())
}

/// What ranks hear when they ask each other.
enum Asked<A, B> {
    /// Some thread is still at it.
    Waits(Job<A, B>),
    /// None is. What this rank's has given back, and what came of all.
    Done(A, Outcome<B>),
}

/// Whether all ranks' threads are done with something, and if one was refused it, why.
fn ask<A: Default, B>(comm: &Communicator, mut task: Job<A, B>, wait: bool) -> Result<Asked<A, B>> {
    let mine = task.result(if wait { PATIENCE } else { Duration::ZERO });
    let refused = mine.is_some_and(|mine| mine.as_ref().is_none_or(|(_, outcome)| outcome.is_err()));
    let mut any = [mine.is_none(), refused].map(u8::from);
    comm.all_reduce_in_place(&mut any[..], ReduceOp::Max)?;
    let [waits, refused] = any.map(|flag| flag > 0);
    if waits {
        return Ok(Asked::Waits(task));
    }
    let ended = || (A::default(), Err("the thread that writes checkpoints has ended".into()));
    let (held, outcome) = task.take().unwrap_or_else(ended);
    if !refused {
        return Ok(Asked::Done(held, outcome));
    }
    let said = agree::exchange(comm, &outcome.err().unwrap_or_default())?;
    let first = said.into_iter().enumerate().find(|(_, why)| !why.is_empty());
    let why = match first {
        Some((rank, why)) if rank > 0 => format!("rank {}: {why}", comm.job_rank(rank)),
        first => first.map(|(_, why)| why).unwrap_or_default(),
    };
    Ok(Asked::Done(held, Err(why)))
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
    /// Why there is no more of it.
    refused: Option<String>,
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

    /// Writes what is not yet written, and brings all to the disk.
    fn finish(mut self) -> (Option<Buffer<f32>>, Outcome<Each<Vec<Piece>>>) {
        let written = match self.refused.take() {
            None => self.write().map_err(|e| e.to_string()),
            Some(why) => Err(why),
        };
        let [weights, first, second] = self.parts;
        let finish = || Ok([weights.finish()?, first.finish()?, second.finish()?]);
        let outcome = written.and_then(|()| finish().map_err(|e: models::Error| e.to_string()));
        (self.copied.map(|copied| copied.room), outcome)
    }

    /// Where it was copied to.
    fn room(self) -> Option<Buffer<f32>> {
        self.copied.map(|copied| copied.room)
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
