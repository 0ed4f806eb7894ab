//! Whose a directory of checkpoints is.

use super::{last_step, remove_unfinished};
use crate::failure::{Failure, Result};
use crate::files::identity;
use models::hf;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// A directory of checkpoints that no other run writes to.
pub struct Claim {
    dir: PathBuf,
    /// Which it is, whatever is called so by then; none where it was given up.
    place: Option<(u64, u64)>,
    /// Locked as long as it is open; none where a file system locks no directories.
    lock: Option<File>,
    /// Whether its run is.
    over: bool,
}

impl Claim {
    /// Of a directory, which is made if it is not there.
    ///
    /// # Errors
    /// Another run writes there, or the system's refusal.
    pub fn of(dir: &Path) -> Result<Claim> {
        Claim::attempt(dir).map_err(|why| Failure::usage(format!("--checkpoint {}: {why}", dir.display())))
    }

    fn attempt(dir: &Path) -> std::result::Result<Claim, String> {
        // The last of `new/.` names nothing until `new` is there.
        let whole: PathBuf = dir.components().collect();
        let missing: Vec<&Path> = whole.ancestors().take_while(|dir| !dir.exists()).collect();
        fs::create_dir_all(&whole).map_err(|e| format!("cannot create it: {e}"))?;
        // What comes into it has a name only as long as it has.
        missing
            .into_iter()
            .filter(|made| !made.as_os_str().is_empty())
            .try_for_each(|made| hf::sync_dir(models::parent(made)))
            .map_err(|e| e.to_string())?;
        let open = File::open(dir).map_err(|e| e.to_string())?;
        let there = open.metadata().map_err(|e| e.to_string())?;
        let lock = match flock(&open, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Some(open),
            Err(Errno::WOULDBLOCK) => {
                return Err("another run writes there: wait for its end, or name another directory".into());
            }
            Err(_) => None,
        };
        Ok(Claim { dir: dir.to_owned(), place: Some(identity(&there)), lock, over: false })
    }

    /// Whether the directory is still the one that is claimed.
    pub(super) fn holds(&self) -> bool {
        fs::metadata(&self.dir).is_ok_and(|there| Some(identity(&there)) == self.place)
    }

    /// Gives it up for good.
    pub(super) fn end(&mut self) {
        (self.place, self.lock, self.over) = (None, None, true);
    }

    /// Claims the directory anew, should somebody have taken it away, or put another in its place, in which no other run may have
    /// written: the last state of this one is that after step `last`.
    pub(super) fn renew(&mut self, last: usize) -> std::result::Result<(), String> {
        if self.holds() {
            return Ok(());
        }
        if self.over {
            return Err("its run has ended".into());
        }
        // It may be the same under another number. Should this be refused, it is asked for again, whatever is there then.
        (self.place, self.lock) = (None, None);
        let anew = Claim::attempt(&self.dir)?;
        match last_step(&self.dir).map_err(|e| e.to_string())? {
            Some((step, _)) if step != last => Err(format!(
                "another directory is there now, with the state after step {step} of another run"
            )),
            _ => {
                *self = anew;
                Ok(())
            }
        }
    }

    /// Removes what a run has left that ended in the midst of a checkpoint. Where there are no locks it may be one under way,
    /// and goes only when the next is begun.
    fn clean(&self) {
        if self.lock.is_some() {
            remove_unfinished(&self.dir);
        }
    }
}

/// Removes what a run has left that ended in the midst of a checkpoint.
///
/// # Errors
/// Another run writes there, or the system's refusal.
pub fn clean(dir: &Path) -> Result<()> {
    if dir.is_dir() {
        Claim::of(dir)?.clean();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::pen_place;

    #[test]
    fn what_may_be_another_run_s_is_taken_away_only_under_a_lock() {
        let home = tempfile::tempdir().unwrap();
        let dir = home.path();
        let left = pen_place(dir, 7);
        fs::create_dir(&left).unwrap();
        let mut unlocked = Claim::of(dir).unwrap();
        unlocked.lock = None;
        unlocked.clean();
        assert!(left.exists());
        let held = Claim::of(dir).unwrap();
        let refused = clean(dir).unwrap_err().to_string();
        assert!(refused.contains("another run writes there"), "{refused}");
        assert!(left.exists());
        drop(held);
        clean(dir).unwrap();
        assert!(!left.exists());
    }

    /// What somebody moves away under a run, and puts in its place, is nobody's, the run's own, or another's.
    #[test]
    fn a_directory_that_is_another_now_is_claimed_anew_or_refused() {
        let home = tempfile::tempdir().unwrap();
        let [dir, aside] = ["c", "aside"].map(|name| home.path().join(name));
        let mut claim = Claim::of(&dir.join(".")).unwrap();
        claim.renew(0).unwrap();
        fs::rename(&dir, &aside).unwrap();
        claim.renew(3).unwrap();
        assert!(Claim::of(&dir).is_err(), "it is locked anew");
        drop(Claim::of(&aside).expect("and the other no more"));
        // With what somebody has put back.
        fs::rename(&dir, home.path().join("second")).unwrap();
        fs::create_dir_all(dir.join("step-3")).unwrap();
        claim.renew(3).unwrap();
        // Another run's.
        fs::rename(&dir, home.path().join("third")).unwrap();
        fs::create_dir_all(dir.join("step-9")).unwrap();
        let why = claim.renew(3).unwrap_err();
        assert!(why.contains("the state after step 9 of another run"), "{why}");
        fs::remove_dir(dir.join("step-9")).unwrap();
        let other = Claim::of(&dir).unwrap();
        let why = claim.renew(3).unwrap_err();
        assert!(why.contains("another run writes there"), "{why}");
        drop(other);
        claim.renew(3).unwrap();
        // Where it was refused another, its own is not locked any more.
        fs::rename(&dir, &aside).unwrap();
        fs::create_dir_all(dir.join("step-9")).unwrap();
        claim.renew(3).unwrap_err();
        fs::rename(&dir, home.path().join("fourth")).unwrap();
        fs::rename(&aside, &dir).unwrap();
        claim.renew(3).unwrap();
        assert!(Claim::of(&dir).is_err(), "it is locked again");
        claim.end();
        assert!(claim.renew(3).is_err() && !claim.holds() && Claim::of(&dir).is_ok());
    }
}
