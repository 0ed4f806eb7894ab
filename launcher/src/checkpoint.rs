//! Checkpoints: the state of a training on the disk, from which it goes on with the same bits.
//!
//! `DIR/step-500` has the weights in f32 and both moments of the optimizer, each as a Hugging Face directory of the model's
//! shape, and `training.json`: the step, the tokens that were trained on, the settings that it was made with, and the sums of
//! all files. It comes under that name whole, and those before it that are not to stay go only then.

mod claim;
mod command;
mod keeping;
mod pen;
mod seen;
mod state;
#[cfg(test)]
mod tests;
mod worker;
mod writing;

pub use claim::{Claim, clean};
pub use command::checkpoint;
pub use keeping::Keeping;
pub use state::State;
pub use writing::{Written, copied_state};

use crate::args::TrainArgs;
use crate::failure::{Failure, Result};
use crate::files;
use crate::human;
use collectives::DType;
use models::hf;
use seen::check_seen;
use std::ffi::OsString;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use zero::Kept;

/// What says that a directory is one, and of which step.
const TRAINING: &str = "training.json";
/// In it, what tells of each file whether it is still as it was written.
const FILES: &str = "files";
/// Among its settings, how many states stay.
const KEPT_STATES: &str = "--checkpoint-keep";
/// Before the number of a step.
const STEP: &str = "step-";
/// Before and behind it, until it is whole.
const UNFINISHED: [&str; 2] = [".step-", ".unfinished"];

/// Where each part of the state lies.
fn name(kept: Kept) -> &'static str {
    match kept {
        Kept::Weights => "weights",
        Kept::FirstMoments => "first_moments",
        Kept::SecondMoments => "second_moments",
    }
}

/// Checkpoints that a training makes, and that from which it goes on.
pub struct Checkpoints {
    /// Where they are.
    pub dir: PathBuf,
    /// Steps between them; 0: only when the run ends.
    pub every: usize,
    /// How many stay once another is whole, at least that one.
    pub keep: usize,
    /// Whether those in between are written beside the steps after them.
    pub beside: bool,
    /// Where it goes on.
    pub from: Option<State>,
}

/// Steps between checkpoints where nobody says how many.
const EVERY: usize = 1000;
/// How many of them stay.
const KEEP: usize = 1;

impl Checkpoints {
    /// What the flags of a training, which [were checked](Self::check_flags), ask for, if anything.
    ///
    /// # Errors
    /// A state that nobody asked to go on from, or of a later step than the last. One that has all steps is gone on from, so
    /// that the same command may be given once more, as in a chain of jobs.
    pub fn asked(args: &TrainArgs) -> Result<Option<Checkpoints>> {
        let Some(dir) = args.checkpoint.clone() else { return Ok(None) };
        let from = State::last(&dir)?;
        let found = from.as_ref().map(State::step);
        match found {
            Some(step) if !args.resume => Err(Failure::usage(format!(
                "--checkpoint {} has the state after step {step}: add --resume to go on from it, or name another directory",
                dir.display()
            ))),
            Some(step) if step > args.steps => Err(Failure::usage(format!(
                "--checkpoint {} has the state after step {step}, and --steps are {}: take {step}, with which nothing is left but \
                 the end of the run, or more, which go on",
                dir.display(),
                args.steps
            ))),
            _ => {
                let (every, keep) =
                    (args.checkpoint_every.unwrap_or(EVERY), args.checkpoint_keep.unwrap_or(KEEP));
                Ok(Some(Checkpoints { dir, every, keep, beside: args.checkpoint_async, from }))
            }
        }
    }

    /// What can be said of the flags on any machine.
    ///
    /// # Errors
    /// Flags that say something of no checkpoints, or a dash.
    pub fn check_flags(args: &TrainArgs) -> Result<()> {
        if args.checkpoint_keep == Some(0) {
            return Err(Failure::usage("--checkpoint-keep is 0: at least the last one stays, 1"));
        }
        if let Some(dir) = &args.checkpoint {
            return files::check_name("--checkpoint", dir, "the name of a directory");
        }
        let every = args.checkpoint_every.map(|every| format!("--checkpoint-every {every}"));
        let keep = args.checkpoint_keep.map(|keep| format!("--checkpoint-keep {keep}"));
        let others = [(args.checkpoint_async, "--checkpoint-async"), (args.resume, "--resume")];
        let other = others.into_iter().find(|(asked, _)| *asked).map(|(_, flag)| flag.to_owned());
        match every.or(keep).or(other) {
            Some(flag) => Err(Failure::usage(format!("{flag} is of --checkpoint DIR: add that"))),
            None => Ok(()),
        }
    }

    /// Refuses what would lie in the directory of checkpoints, or that in it.
    ///
    /// # Errors
    /// The `flag` and its path.
    pub fn check_apart(dir: &Path, flag: &str, path: &Path) -> Result<()> {
        match lie_apart(dir, path) {
            true => Ok(()),
            false => Err(Failure::usage(format!(
                "{flag} {} and --checkpoint {} lie in each other: name places apart",
                path.display(),
                dir.display()
            ))),
        }
    }

    /// Steps that were made before.
    pub fn made(&self) -> usize {
        self.from.as_ref().map_or(0, State::step)
    }

    /// Their directory, for this run alone. What it was planned from may have been written over since.
    ///
    /// # Errors
    /// Another run writes there, or has written there; the system's refusal.
    pub fn claim(&self) -> Result<Claim> {
        let claim = Claim::of(&self.dir)?;
        let there = State::last(&self.dir)?;
        let mark = |state: Option<&State>| state.map(|state| (state.step(), state.mark.clone()));
        if mark(there.as_ref()) == mark(self.from.as_ref()) {
            return Ok(claim);
        }
        let told = |state: Option<&State>| match state {
            Some(state) => format!("the state after step {}", state.step()),
            None => "no state".to_owned(),
        };
        let (then, now) = (told(self.from.as_ref()), told(there.as_ref()));
        let other = if then == now { " of another run" } else { "" };
        Err(Failure::usage(format!(
            "--checkpoint {} had {then} when this run was planned, and has {now}{other} now: start it again",
            self.dir.display()
        )))
    }

    /// For how many more than are `there` a run up to step `last` needs room, which makes one at least: those before go only
    /// once the next is whole.
    fn more(&self, there: usize, last: usize) -> usize {
        let due = |upto: usize| upto.checked_div(self.every).unwrap_or(0);
        // The end is one, whether it is due or not.
        let made = due(last.saturating_sub(1)) - due(self.made().min(last.saturating_sub(1))) + 1;
        made.min((self.keep - there.min(self.keep)).saturating_add(1))
    }

    /// Whether one is made after this step, counted from 1.
    pub fn due(&self, step: usize) -> bool {
        self.every > 0 && step.is_multiple_of(self.every)
    }
}

/// Whether neither of two places, where something may be or not, lies in the other.
fn lie_apart(one: &Path, other: &Path) -> bool {
    // A directory that is there has a place, too.
    let place = |path: &Path| {
        let there = path.canonicalize().ok().or_else(|| files::place(path));
        there.unwrap_or_else(|| path.to_owned())
    };
    let (one, other) = (place(one), place(other));
    !one.starts_with(&other) && !other.starts_with(&one)
}

/// What lies in a directory of checkpoints and is none, if anything does.
fn foreign(dir: &Path) -> io::Result<Option<OsString>> {
    let ours = |name: &str| number(name).is_some() || is_unfinished(name);
    Ok(names(dir)?.into_iter().find(|name| !name.to_str().is_some_and(ours)))
}

/// The checkpoints in a directory, which need not be there.
fn steps(dir: &Path) -> io::Result<Vec<(usize, PathBuf)>> {
    let step = |name: &OsString| Some((number(name.to_str()?)?, dir.join(name)));
    Ok(names(dir)?.iter().filter_map(step).collect())
}

/// The last of them.
fn last_step(dir: &Path) -> io::Result<Option<(usize, PathBuf)>> {
    Ok(steps(dir)?.into_iter().max_by_key(|(step, _)| *step))
}

/// What lies in a directory, which need not be there.
fn names(dir: &Path) -> io::Result<Vec<OsString>> {
    match fs::read_dir(dir) {
        Ok(entries) => whole(entries.map(|entry| Ok(entry?.file_name()))),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(e),
    }
}

/// All that a directory names, or none of it: what is not named may be the last checkpoint.
fn whole(names: impl Iterator<Item = io::Result<OsString>>) -> io::Result<Vec<OsString>> {
    names.collect()
}

/// What is said of a directory of checkpoints that the system does not let be read.
fn unreadable(dir: &Path) -> impl Fn(io::Error) -> Failure {
    move |e| Failure::usage(format!("--checkpoint {}: {e}", dir.display()))
}

/// Whether checkpoints of a model of so many parameters can be made there, until the step that is the `last`.
///
/// # Errors
/// What is in the way: among others anything that is no checkpoint.
pub fn check_destination(checkpoints: &Checkpoints, parameters: u64, last: usize) -> Result<()> {
    let dir = &checkpoints.dir;
    let refuse = |why: &str| Err(Failure::usage(format!("--checkpoint {}: {why}", dir.display())));
    // What a run has left that was killed takes room.
    clean(dir)?;
    if is_state(dir) {
        // Also of `.`, whose name tells of no other.
        let its = dir.file_name().map_or_else(|| dir.join(".."), |_| models::parent(dir).to_owned());
        return refuse(&format!(
            "is a state itself, of --checkpoint {}: name that, whose last state --resume goes on from",
            its.display()
        ));
    }
    if let Some(other) = foreign(dir).map_err(unreadable(dir))? {
        return refuse(&format!(
            "has {}, which is no checkpoint: name a directory that has nothing else",
            other.to_string_lossy()
        ));
    }
    let place = hf::check_destination(&pen_place(dir, 0), 0);
    let place = place.map_err(|e| Failure::usage(format!("--checkpoint: {e}")))?;
    if checkpoints.made() == last {
        // There will be no other.
        return Ok(());
    }
    let each = Kept::ALL.len() as u64 * parameters * DType::F32.size() as u64;
    let there = steps(dir).map_err(unreadable(dir))?.len();
    let more = checkpoints.more(there, last);
    let needed = each.saturating_mul(more as u64);
    let existing = place.ancestors().find(|path| path.exists()).unwrap_or(dir);
    match rustix::fs::statvfs(existing) {
        // One without a limit, as a tmpfs may be, has no blocks.
        Ok(disk) if disk.f_blocks > 0 && disk.f_bavail.saturating_mul(disk.f_frsize) < needed => {
            let several = match (there + more, checkpoints.keep) {
                (1, _) => String::new(),
                (_, 1) => ", of which two are there while one takes the place of the other".to_owned(),
                (most, keep) if most > keep => {
                    format!(
                        ", of which {most} are there while one takes the place of the oldest (--checkpoint-keep {keep})"
                    )
                }
                (most, _) => format!(", of which {most} are there in the end (--checkpoint-keep)"),
            };
            refuse(&format!(
                "a checkpoint takes {}{several}, and its disk has {} free: make room, or name a directory on another disk",
                human::bytes(each),
                human::bytes(disk.f_bavail.saturating_mul(disk.f_frsize))
            ))
        }
        _ => Ok(()),
    }
}

/// Whether a directory is a state, and has none.
fn is_state(dir: &Path) -> bool {
    dir.join(TRAINING).is_file()
}

/// The weights of the state that a directory is, or of the last that it has: a model, for who names that.
pub fn weights_in(dir: &Path) -> Option<PathBuf> {
    let state = match is_state(dir) {
        true => dir.to_owned(),
        false => last_step(dir).ok()??.1,
    };
    let weights = state.join(name(Kept::Weights));
    hf::has_weights(&weights).then_some(weights)
}

/// The step of a checkpoint of this name.
fn number(name: &str) -> Option<usize> {
    let step = name.strip_prefix(STEP)?.parse().ok()?;
    // A copy under another name of that step, such as step-07, is somebody's own.
    (step > 0 && name == format!("{STEP}{step}")).then_some(step)
}

/// Whether a checkpoint has this name that is not whole.
fn is_unfinished(name: &str) -> bool {
    let step = name.strip_prefix(UNFINISHED[0]).and_then(|rest| rest.strip_suffix(UNFINISHED[1]));
    step.is_some_and(|step| step.parse::<usize>().is_ok())
}

/// Removes what was begun by who cannot go on with it, as far as it can be removed.
fn remove_unfinished(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_name().to_str().is_some_and(is_unfinished) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Where a checkpoint is until it is whole.
fn pen_place(dir: &Path, step: usize) -> PathBuf {
    dir.join(format!("{}{step}{}", UNFINISHED[0], UNFINISHED[1]))
}
