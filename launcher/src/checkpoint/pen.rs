//! What rank 0 does for a checkpoint beside its own part: the directory before anything is in it, and its name once all is.

use super::{Checkpoints, FILES, KEPT_STATES, Leaving, STEP, TRAINING, name, pen_place, remove_unfinished};
use crate::about::generator;
use crate::bench::now;
use crate::plan::TrainPlan;
use crate::train::signature;
use collectives::trace::Trace;
use models::hf::{Checkpoint, Sum, sync_dir};
use serde_json::{Map, Value, json};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use zero::{Kept, Scale, Standing};

/// What comes of something that the system may refuse.
pub(super) type Attempt<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// What has its name.
#[derive(Default)]
pub(super) struct Named {
    /// What has to be said of it, if anything.
    pub(super) remark: Option<String>,
    /// What it takes the place of.
    pub(super) leaving: Leaving,
}

/// What makes the directory, and gives it its name; dropped before that, it takes it away.
pub(super) struct Pen<'a> {
    checkpoints: &'a Checkpoints,
    standing: Standing,
    evaluated: bool,
    /// What is told of the files.
    files: Map<String, Value>,
    /// Whether something lies there that has no name yet.
    begun: bool,
}

impl<'a> Pen<'a> {
    pub(super) fn new(checkpoints: &'a Checkpoints, standing: Standing, evaluated: bool) -> Self {
        Pen { checkpoints, standing, evaluated, files: Map::new(), begun: false }
    }

    fn place(&self) -> PathBuf {
        pen_place(&self.checkpoints.dir, self.step())
    }

    fn step(&self) -> usize {
        self.standing.steps as usize
    }

    /// Makes room: what was begun before and is not whole goes.
    pub(super) fn begin(&mut self) -> Attempt<()> {
        fs::create_dir_all(&self.checkpoints.dir)?;
        remove_unfinished(&self.checkpoints.dir);
        fs::create_dir(self.place())?;
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

    /// Gives it its name, and takes those before away.
    pub(super) fn finish(&mut self, plan: &TrainPlan) -> Attempt<Named> {
        let settings = signature(plan).into_iter().map(|(flag, value)| (flag.to_owned(), Value::from(value)));
        let mut settings: Map<String, Value> = settings.collect();
        settings.insert("ranks".into(), plan.ranks.world.to_string().into());
        settings.insert(KEPT_STATES.into(), self.checkpoints.keep.to_string().into());
        let told = json!({
            "generator": generator(),
            "step": self.step(),
            "skipped": self.standing.skipped,
            "evaluated": self.evaluated,
            "loss_scale": self.standing.scale.map(|Scale { scale, since, left }| json!({
                "scale": f64::from(scale), "since": since, "left": left
            })),
            "written": now(),
            // Two of the same second are not the same.
            "clock": Trace::now(),
            "settings": settings,
            FILES: std::mem::take(&mut self.files),
        });
        let place = self.place();
        let mut file = File::create(place.join(TRAINING))?;
        file.write_all(format!("{told:#}\n").as_bytes())?;
        file.sync_all()?;
        // What is in files is on the disk, and now so are their names.
        Kept::ALL.into_iter().try_for_each(|kept| sync_names(&place.join(name(kept))))?;
        sync_dir(&place)?;
        self.take_place(sync_dir)
    }

    /// The same of what is written, with `sync` to bring names to the disk.
    pub(super) fn take_place(&mut self, sync: impl Fn(&Path) -> models::Result<()>) -> Attempt<Named> {
        let (place, step) = (self.place(), self.step());
        // Where there are no locks another run may have taken some of it away.
        Kept::ALL.into_iter().try_for_each(|kept| Checkpoint::open(place.join(name(kept))).map(drop))?;
        fs::rename(&place, self.checkpoints.dir.join(format!("{STEP}{step}")))?;
        self.begun = false;
        // It is there from here on. Should its name not last, those before are what is left.
        if let Err(e) = sync(&self.checkpoints.dir) {
            let why =
                format!("the state after step {step} is here, but its name may not survive a power failure");
            return Ok(Named { remark: Some(format!("{why}: {e}")), ..Named::default() });
        }
        Ok(Named { remark: None, leaving: self.checkpoints.take_away_before(step) })
    }
}

impl Drop for Pen<'_> {
    fn drop(&mut self) {
        if self.begun {
            // A half one takes room, and nothing else.
            let _ = fs::remove_dir_all(self.place());
        }
    }
}

/// Brings the names in a directory, and in those in it, to the disk.
fn sync_names(dir: &Path) -> Attempt<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            sync_dir(&entry.path())?;
        }
    }
    Ok(sync_dir(dir)?)
}
