//! Writing a checkpoint: rank 0 holds the pen, and what it writes has its name only once it is whole.

use super::{Checkpoints, FILES, KEPT_STATES, STEP, TRAINING, name, pen_place, remove_unfinished};
use crate::about::generator;
use crate::bench::now;
use crate::failure::{Failure, Result};
use crate::plan::TrainPlan;
use crate::save::Companions;
use crate::train::signature;
use collectives::trace::Trace;
use collectives::{DType, Float, ReduceOp};
use models::hf::{Checkpoint, SaveOptions, Writer, sync_dir};
use serde_json::{Map, Value, json};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use zero::{Kept, Scale, Standing, Trainer};

/// What came of writing a checkpoint. The ranks stand together then, and the one before is there where it is not.
pub struct Written {
    /// Whether it is there, as all ranks know.
    pub whole: bool,
    /// On rank 0, why it is not.
    pub refused: Option<Failure>,
    /// On rank 0, what has to be said of one that is there.
    pub remark: Option<String>,
}

/// Writes the state of a training after its last step, and whether it was `evaluated` there, where `checkpoints` are; rank 0
/// holds the pen, and nobody goes on before it has put it down.
///
/// # Errors
/// The ranks cannot bring the state together.
pub fn write<T: Float>(
    trainer: &mut Trainer<T>,
    plan: &TrainPlan,
    checkpoints: &Checkpoints,
    companions: &Companions,
    evaluated: bool,
) -> Result<Written> {
    let standing = trainer.standing();
    let step = standing.steps;
    let lead = trainer.comm().rank() == 0;
    let dir = &checkpoints.dir;
    let mut pen = Pen::new(checkpoints, standing, evaluated);
    let mut files = Map::new();
    if lead {
        pen.attempt(Pen::begin);
    }
    for kept in Kept::ALL {
        let mut writer = match lead {
            true => pen.attempt(|pen| pen.part(plan, companions, kept)),
            false => None,
        };
        let mut refused = None;
        trainer.export_state(
            kept,
            Some(&mut |spec, values| {
                // After a refusal the others are still accompanied through the rest.
                let Some(open) = &mut writer else { return Ok(()) };
                let wrong = match values.iter().all(|value| value.is_finite()) {
                    true => open.add(&spec.name, values).err().map(|e| e.to_string()),
                    // Nothing goes on from that.
                    false => Some(format!("{kept} of {} after step {step} are not all finite", spec.name)),
                };
                if wrong.is_some() {
                    (writer, refused) = (None, wrong);
                }
                Ok(())
            }),
        )?;
        let written = pen.attempt(|_| match (refused, writer) {
            (Some(why), _) => Err(why.into()),
            (None, Some(writer)) => Ok(writer.finish()?),
            (None, None) => Ok(Vec::new()),
        });
        files.extend(written.into_iter().flatten().map(|(file, sum)| {
            let told = json!({"bytes": sum.bytes, "crc32": format!("{:08x}", sum.crc32)});
            (format!("{}/{file}", name(kept)), told)
        }));
    }
    let finished = if lead { pen.attempt(|pen| pen.finish(plan, files)) } else { None };
    let remark = finished.flatten().map(|why| format!("--checkpoint {}: {why}", dir.display()));
    // The others wait here for the pen.
    let mut refused = [u8::from(pen.refused.is_some())];
    trainer.comm().all_reduce_in_place(&mut refused[..], ReduceOp::Max)?;
    let why = pen.refused.map(|why| {
        // A half one takes room, and nothing else.
        let _ = fs::remove_dir_all(pen_place(dir, step as usize));
        Failure::run(format!("--checkpoint {}: {why}", dir.display()))
    });
    Ok(Written { whole: refused == [0], refused: why, remark })
}

/// What writes a checkpoint, until it is refused something.
pub(super) struct Pen<'a> {
    checkpoints: &'a Checkpoints,
    standing: Standing,
    evaluated: bool,
    refused: Option<String>,
}

type Attempt<T> = std::result::Result<T, Box<dyn std::error::Error>>;

impl<'a> Pen<'a> {
    pub(super) fn new(checkpoints: &'a Checkpoints, standing: Standing, evaluated: bool) -> Self {
        Pen { checkpoints, standing, evaluated, refused: None }
    }

    /// What comes of it, if nothing was refused before.
    fn attempt<R>(&mut self, work: impl FnOnce(&Self) -> Attempt<R>) -> Option<R> {
        if self.refused.is_some() {
            return None;
        }
        work(self).inspect_err(|e| self.refused = Some(e.to_string())).ok()
    }

    fn place(&self) -> PathBuf {
        pen_place(&self.checkpoints.dir, self.step())
    }

    fn step(&self) -> usize {
        self.standing.steps as usize
    }

    /// Makes room: what was begun before and is not whole goes.
    fn begin(&self) -> Attempt<()> {
        fs::create_dir_all(&self.checkpoints.dir)?;
        remove_unfinished(&self.checkpoints.dir);
        Ok(fs::create_dir(self.place())?)
    }

    fn part(&self, plan: &TrainPlan, companions: &Companions, kept: Kept) -> Attempt<Writer> {
        // Whatever shape is trained goes on from it; that transformers loads the weights, too, is no condition.
        let options =
            SaveOptions { remarks: companions.remarks(), for_transformers: false, ..SaveOptions::default() };
        let place = self.place().join(name(kept));
        let mut writer = Writer::create(place, &plan.model.config, DType::F32, &options)?;
        if kept == Kept::Weights {
            companions.add_to(&mut writer)?;
        }
        Ok(writer)
    }

    /// Gives it its name, with what is told of its `files`, and takes those before away. What has to be said of it, if anything.
    fn finish(&self, plan: &TrainPlan, files: Map<String, Value>) -> Attempt<Option<String>> {
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
            FILES: files,
        });
        let place = self.place();
        let mut file = File::create(place.join(TRAINING))?;
        file.write_all(format!("{told:#}\n").as_bytes())?;
        file.sync_all()?;
        sync_dir(&place)?;
        self.take_place(sync_dir)
    }

    /// The same of what is written, with `sync` to bring names to the disk.
    pub(super) fn take_place(&self, sync: impl Fn(&Path) -> models::Result<()>) -> Attempt<Option<String>> {
        let (place, step) = (self.place(), self.step());
        // Where there are no locks another run may have taken some of it away.
        Kept::ALL.into_iter().try_for_each(|kept| Checkpoint::open(place.join(name(kept))).map(drop))?;
        fs::rename(&place, self.checkpoints.dir.join(format!("{STEP}{step}")))?;
        // It is there from here on. Should its name not last, those before are what is left.
        if let Err(e) = sync(&self.checkpoints.dir) {
            let why =
                format!("the state after step {step} is here, but its name may not survive a power failure");
            return Ok(Some(format!("{why}: {e}")));
        }
        self.checkpoints.take_away_before(step);
        Ok(None)
    }
}
