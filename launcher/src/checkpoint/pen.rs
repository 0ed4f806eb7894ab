//! What rank 0 does for a checkpoint beside its own part: the directory before anything is in it, and its name once all is.

use super::claim::Claim;
use super::writing::Due;
use super::{FILES, KEPT_STATES, STEP, TRAINING, name, pen_place, remove_unfinished, steps};
use crate::about::{generator, now};
use crate::train::signature;
use collectives::trace::Trace;
use models::hf::{Checkpoint, Sum, sync_dir};
use rustix::io::Errno;
use serde_json::{Map, Value, json};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use zero::{Kept, Scale, Standing};

/// What comes of something that the system may refuse.
pub(super) type Attempt<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// What has its name.
#[derive(Debug, Default)]
pub(super) struct Named {
    /// What has to be said of it, if anything.
    pub(super) remark: Option<String>,
    /// What it has taken the place of, and is still to be removed.
    pub(super) going: Vec<PathBuf>,
}

/// What makes the directory, and gives it its name; dropped before that, it takes it away.
pub(super) struct Pen {
    dir: PathBuf,
    keep: usize,
    claim: Arc<Mutex<Claim>>,
    step: usize,
    /// The last state of this run, or of which it goes on; 0 for none.
    before: usize,
    /// All that is told of the state but for its files and when it was written.
    told: Map<String, Value>,
    /// What is told of the files.
    files: Map<String, Value>,
    /// Whether something lies there that has no name yet.
    begun: bool,
}

impl Pen {
    /// Of the state of a training that stands there.
    pub(super) fn new(due: &Due<'_>, claim: Arc<Mutex<Claim>>, standing: Standing) -> Self {
        let Due { plan, checkpoints, evaluated, before } = *due;
        let settings = signature(plan).into_iter().map(|(flag, value)| (flag.to_owned(), Value::from(value)));
        let mut settings: Map<String, Value> = settings.collect();
        settings.insert("ranks".into(), plan.ranks.world.to_string().into());
        settings.insert(KEPT_STATES.into(), checkpoints.keep.to_string().into());
        let scale = standing.scale.map(
            |Scale { scale, since, left }| json!({"scale": f64::from(scale), "since": since, "left": left}),
        );
        let told = [
            ("generator", generator()),
            ("step", standing.steps.into()),
            ("tokens", plan.tokens_after(standing.steps as usize).into()),
            ("skipped", standing.skipped.into()),
            ("evaluated", evaluated.into()),
            ("loss_scale", scale.unwrap_or_default()),
            ("settings", settings.into()),
        ];
        Pen {
            dir: checkpoints.dir.clone(),
            keep: checkpoints.keep,
            claim,
            step: standing.steps as usize,
            before,
            told: told.map(|(name, value)| (name.to_owned(), value)).into_iter().collect(),
            files: Map::new(),
            begun: false,
        }
    }

    fn place(&self) -> PathBuf {
        pen_place(&self.dir, self.step)
    }

    /// Makes room: what was begun before and is not whole goes.
    pub(super) fn begin(&mut self) -> Attempt<()> {
        self.claim.lock().unwrap_or_else(PoisonError::into_inner).renew(self.before)?;
        remove_unfinished(&self.dir);
        let place = self.place();
        fs::create_dir(&place).map_err(|e| format!("cannot create {}: {e}", place.display()))?;
        self.begun = true;
        Ok(())
    }

    /// Has it told of these files that they are as they were written.
    pub(super) fn tell(&mut self, kept: Kept, files: Vec<(String, Sum)>) {
        self.files.extend(files.into_iter().map(|(file, sum)| {
            let told = json!({"bytes": sum.bytes, "crc32": format!("{:08x}", sum.crc32)});
            (format!("{}/{file}", name(kept)), told)
        }));
    }

    /// Gives it its name, and takes theirs from those before.
    pub(super) fn finish(&mut self) -> Attempt<Named> {
        let mut told = std::mem::take(&mut self.told);
        told.insert("written".into(), now().into());
        // Two of the same second are not the same.
        told.insert("clock".into(), Trace::now().into());
        told.insert(FILES.into(), std::mem::take(&mut self.files).into());
        let place = self.place();
        let written = File::create(place.join(TRAINING)).and_then(|mut file| {
            file.write_all(format!("{:#}\n", Value::from(told)).as_bytes())?;
            file.sync_all()
        });
        written.map_err(|e| format!("cannot write {}: {e}", place.join(TRAINING).display()))?;
        // What is in files is on the disk, and now so are their names.
        Kept::ALL.into_iter().try_for_each(|kept| sync_names(&place.join(name(kept))))?;
        sync_dir(&place)?;
        self.take_place(sync_dir)
    }

    /// The same of what is written, with `sync` to bring names to the disk.
    pub(super) fn take_place(&mut self, sync: impl Fn(&Path) -> models::Result<()>) -> Attempt<Named> {
        let place = self.place();
        // Where there are no locks another run may have taken some of it away.
        Kept::ALL.into_iter().try_for_each(|kept| Checkpoint::open(place.join(name(kept))).map(drop))?;
        let named = self.dir.join(format!("{STEP}{}", self.step));
        fs::rename(&place, &named).map_err(|e| format!("cannot move it to {}: {e}", named.display()))?;
        self.begun = false;
        // It is there from here on. Should its name not last, those before are what is left.
        if let Err(e) = sync(&self.dir) {
            let why = "is here, but its name may not survive a power failure";
            let remark = format!("the state after step {} {why}: {e}", self.step);
            return Ok(Named { remark: Some(remark), going: Vec::new() });
        }
        Ok(take_away_before(&self.dir, self.keep, self.step))
    }
}

impl Drop for Pen {
    fn drop(&mut self) {
        if self.begun {
            // A half one takes room, and nothing else.
            let _ = fs::remove_dir_all(self.place());
        }
    }
}

/// Takes their names from the states that are not to stay beside the one after `step`, which is there: each goes whole, so that
/// who reads it finds all of it, or nothing. What is in them is still to be removed, which takes long of many bytes.
pub(super) fn take_away_before(dir: &Path, keep: usize, step: usize) -> Named {
    if !dir.join(format!("{STEP}{step}")).is_dir() {
        return Named::default();
    }
    let mut before = steps(dir).unwrap_or_default();
    before.retain(|(other, _)| *other < step);
    before.sort_unstable();
    before.truncate((before.len() + 1).saturating_sub(keep));
    let mut named = Named::default();
    for (other, dir_of_it) in before {
        let going = pen_place(dir, other);
        match fs::rename(&dir_of_it, &going) {
            Ok(()) => named.going.push(going),
            // As an overlay says of what is part of an image.
            Err(e) if Errno::from_io_error(&e) == Some(Errno::XDEV) => {
                // Without that it is no state.
                let _ = fs::remove_file(dir_of_it.join(TRAINING));
                named.going.push(dir_of_it);
            }
            Err(e) => {
                named.remark = Some(format!("the state after step {other}, which was to go, stays: {e}"))
            }
        }
    }
    named
}

/// Removes directories, as far as they can be removed: over NFS what somebody has open stays.
pub(super) fn remove(going: &[PathBuf]) {
    going.iter().for_each(|dir| drop(fs::remove_dir_all(dir)));
}

/// Brings the names in a directory, and in those in it, to the disk.
fn sync_names(dir: &Path) -> Attempt<()> {
    let refused = |e| format!("cannot list {}: {e}", dir.display());
    for entry in fs::read_dir(dir).map_err(refused)? {
        let entry = entry.map_err(refused)?;
        if entry.file_type()?.is_dir() {
            sync_dir(&entry.path())?;
        }
    }
    Ok(sync_dir(dir)?)
}
