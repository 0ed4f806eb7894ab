//! Checkpoints: the state of a training on the disk, from which it goes on with the same bits.
//!
//! `DIR/step-500` has the weights in f32 and both moments of the optimizer, each as a Hugging Face directory of the model's
//! shape, and `training.json`: the step, and the settings that it was made with. It comes under that name whole, and those
//! before it go only then.

use crate::about::generator;
use crate::args::TrainArgs;
use crate::failure::{Failure, Result};
use crate::files;
use crate::plan::{ModelChoice, TrainPlan};
use crate::save::Companions;
use crate::train::signature;
use collectives::{DType, Float, ReduceOp};
use models::hf::{self, SaveOptions, Writer};
use serde_json::{Map, Value, json};
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use zero::{Kept, Trainer};

/// What says that a directory is one, and of which step.
const TRAINING: &str = "training.json";
/// Before the number of a step.
const STEP: &str = "step-";
/// Before and behind it, until it is whole.
const UNFINISHED: [&str; 2] = [".step-", ".unfinished"];

/// Settings that change what is learnt: of these it is told that they are others now. The shape has to be the same.
const TOLD: [&str; 18] = [
    "--data",
    "--val-data",
    "--tokenizer",
    "--dtype",
    "--steps",
    "--micro-batch",
    "--accumulate",
    "--seq",
    "--lr",
    "--min-lr",
    "--warmup",
    "--schedule",
    "--weight-decay",
    "--beta1",
    "--beta2",
    "--eps",
    "--clip",
    "--order",
];

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
    /// Steps that were made before.
    pub made: usize,
    /// Where it goes on.
    pub from: Option<State>,
}

/// A checkpoint that was found.
pub struct State {
    /// Steps that were made.
    pub step: usize,
    dir: PathBuf,
    settings: Map<String, Value>,
    moments: [hf::Checkpoint; 2],
}

/// Steps between checkpoints where nobody says how many.
const EVERY: usize = 1000;

impl Checkpoints {
    /// What the flags of a training ask for, if anything.
    ///
    /// # Errors
    /// Flags that say something of no checkpoints; a state that nobody asked to go on from, or that has all steps.
    pub fn asked(args: &TrainArgs) -> Result<Option<Checkpoints>> {
        let Some(dir) = args.checkpoint.clone() else {
            let every = args.checkpoint_every.map(|every| format!("--checkpoint-every {every}"));
            return match every.or(args.resume.then(|| "--resume".to_owned())) {
                Some(flag) => Err(Failure::usage(format!("{flag} is of --checkpoint DIR: add that"))),
                None => Ok(None),
            };
        };
        files::check_name("--checkpoint", &dir, "the name of a directory")?;
        let from = State::last(&dir)?;
        let found = from.as_ref().map(|state| state.step);
        match found {
            Some(step) if !args.resume => Err(Failure::usage(format!(
                "--checkpoint {} has the state after step {step}: add --resume to go on from it, or name another directory",
                dir.display()
            ))),
            Some(step) if step >= args.steps => Err(Failure::usage(format!(
                "--checkpoint {} has the state after step {step}, and there are {} --steps: raise them to go on",
                dir.display(),
                args.steps
            ))),
            _ => Ok(Some(Checkpoints {
                dir,
                every: args.checkpoint_every.unwrap_or(EVERY),
                made: found.unwrap_or(0),
                from,
            })),
        }
    }

    /// Refuses what would lie in the directory of checkpoints, or that in it.
    ///
    /// # Errors
    /// The `flag` and its path.
    pub fn check_apart(dir: &Path, flag: &str, path: &Path) -> Result<()> {
        let place = |path: &Path| files::place(path).unwrap_or_else(|| path.to_owned());
        let (one, other) = (place(dir), place(path));
        match one.starts_with(&other) || other.starts_with(&one) {
            true => Err(Failure::usage(format!(
                "{flag} {} and --checkpoint {} lie in each other: name places apart",
                path.display(),
                dir.display()
            ))),
            false => Ok(()),
        }
    }

    /// Whether one is made after this step, counted from 1.
    pub fn due(&self, step: usize) -> bool {
        self.every > 0 && step.is_multiple_of(self.every)
    }
}

impl State {
    /// The last one in `dir`, if there is any.
    ///
    /// # Errors
    /// One that cannot be read, or is not whole.
    pub fn last(dir: &Path) -> Result<Option<State>> {
        let Some((step, dir)) = steps(dir)?.into_iter().max_by_key(|(step, _)| *step) else {
            return Ok(None);
        };
        let refuse = |why: String| Failure::usage(format!("--checkpoint: {}: {why}", dir.display()));
        let text = fs::read_to_string(dir.join(TRAINING)).map_err(|e| refuse(format!("{TRAINING}: {e}")))?;
        let told: Value = serde_json::from_str(&text).map_err(|e| refuse(format!("{TRAINING}: {e}")))?;
        let settings = told["settings"].as_object().filter(|_| told["step"] == json!(step));
        let settings =
            settings.ok_or_else(|| refuse(format!("{TRAINING} is not that of step {step}")))?.clone();
        let open = |kept| hf::Checkpoint::open(dir.join(name(kept))).map_err(Failure::usage);
        let moments = [open(Kept::FirstMoments)?, open(Kept::SecondMoments)?];
        Ok(Some(State { step, dir, settings, moments }))
    }

    /// Gives the model its weights, whatever it was named by.
    ///
    /// # Errors
    /// A model of another shape, or weights that cannot be read.
    pub fn hand_weights(&self, model: &mut ModelChoice) -> Result<()> {
        let (there, asked) = (self.settings.get("--model"), format!("{:?}", model.config));
        if there.and_then(Value::as_str) != Some(&asked) {
            return Err(Failure::usage(format!(
                "--model {} has another shape than the training in {}: name that one's, or another --checkpoint",
                model.name,
                self.dir.display()
            )));
        }
        model.weights =
            Some(hf::Checkpoint::open(self.dir.join(name(Kept::Weights))).map_err(Failure::usage)?);
        Ok(())
    }

    /// Has `trainer`, which was made with the weights, go on from here. All ranks call it.
    ///
    /// # Errors
    /// Moments that cannot be read, which all ranks say.
    pub fn restore<T: Float>(&self, trainer: &mut Trainer<T>) -> Result<()> {
        let [first, second] = &self.moments;
        let restored = trainer.restore(self.step as u64, &mut |kept, spec, range, out| {
            let from = if kept == Kept::FirstMoments { first } else { second };
            from.read_range(&spec.name, range, out).map_err(|e| e.to_string())
        });
        Ok(restored?)
    }

    /// What is otherwise now than when it was made, in words.
    pub fn differences(&self, plan: &TrainPlan) -> String {
        let now = signature(plan);
        let other = now.iter().filter(|(flag, _)| TOLD.contains(flag)).filter_map(|(flag, value)| {
            let then = self.settings.get(*flag)?.as_str()?;
            (then != value).then(|| match *flag {
                "--data" | "--val-data" | "--tokenizer" => format!("another {flag}"),
                _ => format!("{flag} {value} instead of {then}"),
            })
        });
        let ranks = self.settings.get("ranks").and_then(Value::as_str).unwrap_or_default();
        let world = plan.ranks.world.to_string();
        let ranks = (ranks != world).then(|| format!("{world} ranks instead of {ranks}"));
        other.chain(ranks).collect::<Vec<_>>().join(", ")
    }
}

/// The checkpoints in a directory, which need not be there.
fn steps(dir: &Path) -> Result<Vec<(usize, PathBuf)>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(Failure::usage(format!("--checkpoint {}: {e}", dir.display()))),
    };
    let step = |path: PathBuf| {
        let number = path.file_name()?.to_str()?.strip_prefix(STEP)?.parse().ok()?;
        Some((number, path))
    };
    Ok(entries.flatten().filter_map(|entry| step(entry.path())).collect())
}

/// Whether checkpoints of a model of so many parameters can be made there.
///
/// # Errors
/// What is in the way: among others anything that is no checkpoint.
pub fn check_destination(dir: &Path, parameters: u64) -> Result<()> {
    let refuse = |why: &str| Err(Failure::usage(format!("--checkpoint {}: {why}", dir.display())));
    match fs::read_dir(dir) {
        Ok(entries) => {
            let ours = |name: &str| name.starts_with(STEP) || name.starts_with(UNFINISHED[0]);
            if let Some(other) = entries.flatten().find(|entry| !entry.file_name().to_str().is_some_and(ours))
            {
                let other = other.file_name();
                return refuse(&format!(
                    "has {}, which is no checkpoint: name a directory that has nothing else",
                    other.to_string_lossy()
                ));
            }
        }
        Err(e) if e.kind() == ErrorKind::NotFound => {}
        Err(e) => return refuse(&e.to_string()),
    }
    let bytes = Kept::ALL.len() as u64 * parameters * DType::F32.size() as u64;
    let first = dir.join(format!("{}0{}", UNFINISHED[0], UNFINISHED[1]));
    hf::check_destination(&first, bytes).map(drop).map_err(|e| Failure::usage(format!("--checkpoint: {e}")))
}

/// Writes the state of a training after its last step; rank 0 holds the pen, and nobody goes on before it has put it down. What
/// it was refused is told on rank 0 alone, as a value, because the ranks stand together; then the checkpoint before is there.
///
/// # Errors
/// The ranks cannot bring the state together.
pub fn write<T: Float>(
    trainer: &mut Trainer<T>,
    plan: &TrainPlan,
    companions: &Companions,
) -> Result<Result<()>> {
    let checkpoints = plan.checkpoints.as_ref().expect("a training that makes checkpoints");
    let step = trainer.steps() as usize;
    let lead = trainer.comm().rank() == 0;
    let mut pen = Pen { dir: &checkpoints.dir, step, refused: None };
    if lead {
        pen.attempt(Pen::begin);
    }
    for kept in Kept::ALL {
        let mut writer = match lead {
            true => pen.attempt(|pen| pen.part(plan, companions, kept)),
            false => None,
        };
        let mut refused = None;
        let exported = trainer.export_state(
            kept,
            Some(&mut |spec, values| {
                // After a refusal the others are still accompanied through the rest.
                if let Some(open) = &mut writer
                    && let Err(e) = open.add(&spec.name, values)
                {
                    (writer, refused) = (None, Some(e));
                }
                Ok(())
            }),
        );
        exported?;
        pen.attempt(|_| match (refused, writer) {
            (Some(e), _) => Err(e.into()),
            (None, Some(writer)) => Ok(writer.finish()?),
            (None, None) => Ok(()),
        });
    }
    if lead {
        pen.attempt(|pen| pen.finish(plan));
    }
    // The others wait here for the pen.
    trainer.comm().all_reduce_in_place(&mut [0u8][..], ReduceOp::Max)?;
    Ok(pen.refused.map_or(Ok(()), |why| {
        // A half one takes room, and nothing else.
        remove_unfinished(&checkpoints.dir);
        Err(Failure::run(format!("--checkpoint {}: {why}", checkpoints.dir.display())))
    }))
}

/// Removes what was begun by who cannot go on with it, as far as it can be removed.
pub fn remove_unfinished(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_name().to_str().is_some_and(|name| name.starts_with(UNFINISHED[0])) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Where a checkpoint is until it is whole.
fn pen_place(dir: &Path, step: usize) -> PathBuf {
    dir.join(format!("{}{step}{}", UNFINISHED[0], UNFINISHED[1]))
}

/// What writes a checkpoint, until it is refused something.
struct Pen<'a> {
    dir: &'a Path,
    step: usize,
    refused: Option<String>,
}

type Attempt<T> = std::result::Result<T, Box<dyn std::error::Error>>;

impl Pen<'_> {
    /// What comes of it, if nothing was refused before.
    fn attempt<R>(&mut self, work: impl FnOnce(&Self) -> Attempt<R>) -> Option<R> {
        if self.refused.is_some() {
            return None;
        }
        work(self).inspect_err(|e| self.refused = Some(e.to_string())).ok()
    }

    fn place(&self) -> PathBuf {
        pen_place(self.dir, self.step)
    }

    /// Makes room: what was begun before and is not whole goes.
    fn begin(&self) -> Attempt<()> {
        fs::create_dir_all(self.dir)?;
        remove_unfinished(self.dir);
        Ok(fs::create_dir(self.place())?)
    }

    fn part(&self, plan: &TrainPlan, companions: &Companions, kept: Kept) -> Attempt<Writer> {
        let options = SaveOptions { remarks: companions.remarks(), ..SaveOptions::default() };
        let place = self.place().join(name(kept));
        let mut writer = Writer::create(place, &plan.model.config, DType::F32, &options)?;
        if kept == Kept::Weights {
            companions.add_to(&mut writer)?;
        }
        Ok(writer)
    }

    /// Gives it its name, and takes those before away.
    fn finish(&self, plan: &TrainPlan) -> Attempt<()> {
        let settings = signature(plan).into_iter().map(|(flag, value)| (flag.to_owned(), Value::from(value)));
        let mut settings: Map<String, Value> = settings.collect();
        settings.insert("ranks".into(), plan.ranks.world.to_string().into());
        let told = json!({"generator": generator(), "step": self.step, "settings": settings});
        let place = self.place();
        let mut file = File::create(place.join(TRAINING))?;
        file.write_all(format!("{told:#}\n").as_bytes())?;
        file.sync_all()?;
        File::open(&place)?.sync_all()?;
        let whole = self.dir.join(format!("{STEP}{}", self.step));
        fs::rename(&place, &whole)?;
        File::open(self.dir)?.sync_all()?;
        for (_, other) in steps(self.dir).unwrap_or_default().into_iter().filter(|(_, other)| *other != whole)
        {
            fs::remove_dir_all(other)?;
        }
        Ok(())
    }
}
