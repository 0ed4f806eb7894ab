//! Checkpoints: the state of a training on the disk, from which it goes on with the same bits.
//!
//! `DIR/step-500` has the weights in f32 and both moments of the optimizer, each as a Hugging Face directory of the model's
//! shape, and `training.json`: the step, and the settings that it was made with. It comes under that name whole, and those
//! before it go only then.

use crate::about::generator;
use crate::args::TrainArgs;
use crate::failure::{Failure, Result};
use crate::files;
use crate::human;
use crate::plan::{ModelChoice, TrainPlan, scaling_told};
use crate::save::Companions;
use crate::train::signature;
use collectives::trace::Trace;
use collectives::{DType, Float, ReduceOp};
use models::hf::{self, SaveOptions, Writer};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde_json::{Map, Value, json};
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use zero::{Kept, Scale, Source, Standing, Trainer};

/// What says that a directory is one, and of which step.
const TRAINING: &str = "training.json";
/// Before the number of a step.
const STEP: &str = "step-";
/// Before and behind it, until it is whole.
const UNFINISHED: [&str; 2] = [".step-", ".unfinished"];

/// Settings that change what is learnt: of these it is told that they are others now. The shape has to be the same.
const TOLD: [&str; 27] = [
    "--data",
    "--val-data",
    "--tokenizer",
    "--dtype",
    LOSS_SCALE,
    "--steps",
    "--micro-batch",
    "--accumulate",
    "--seq",
    "--lr",
    "--min-lr",
    "--warmup",
    "--warmup-shape",
    "--warmup-from",
    "--schedule",
    "--schedule-steps",
    "--weight-decay",
    "--beta1",
    "--beta2",
    "--eps",
    "--clip",
    "--order",
    "--seed",
    "--matmul-precision",
    "--device",
    "--attention",
    "--reproducible",
];

/// What the scale of a loss goes on by.
const LOSS_SCALE: &str = "--loss-scale";

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
    /// Where it goes on.
    pub from: Option<State>,
}

/// A checkpoint that was found.
pub struct State {
    /// How far it had come.
    pub standing: Standing,
    /// What tells it from others of that step.
    pub mark: String,
    dir: PathBuf,
    settings: Map<String, Value>,
}

/// Steps between checkpoints where nobody says how many.
const EVERY: usize = 1000;

impl Checkpoints {
    /// What the flags of a training ask for, if anything.
    ///
    /// # Errors
    /// Flags that say something of no checkpoints; a state that nobody asked to go on from, or of a later step than the last.
    /// One that has all steps is gone on from, so that the same command may be given once more, as in a chain of jobs.
    pub fn asked(args: &TrainArgs) -> Result<Option<Checkpoints>> {
        Checkpoints::check_flags(args)?;
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
            _ => Ok(Some(Checkpoints { dir, every: args.checkpoint_every.unwrap_or(EVERY), from })),
        }
    }

    /// What can be said of the flags on any machine.
    ///
    /// # Errors
    /// Flags that say something of no checkpoints, or a dash.
    pub fn check_flags(args: &TrainArgs) -> Result<()> {
        if let Some(dir) = &args.checkpoint {
            return files::check_name("--checkpoint", dir, "the name of a directory");
        }
        let every = args.checkpoint_every.map(|every| format!("--checkpoint-every {every}"));
        match every.or(args.resume.then(|| "--resume".to_owned())) {
            Some(flag) => Err(Failure::usage(format!("{flag} is of --checkpoint DIR: add that"))),
            None => Ok(()),
        }
    }

    /// Refuses what would lie in the directory of checkpoints, or that in it.
    ///
    /// # Errors
    /// The `flag` and its path.
    pub fn check_apart(dir: &Path, flag: &str, path: &Path) -> Result<()> {
        // A directory that is there has a place, too.
        let place = |path: &Path| {
            let there = path.canonicalize().ok().or_else(|| files::place(path));
            there.unwrap_or_else(|| path.to_owned())
        };
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

    /// Steps that were made before.
    pub fn made(&self) -> usize {
        self.from.as_ref().map_or(0, State::step)
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
        let standing = standing(step as u64, &told)
            .ok_or_else(|| refuse(format!("{TRAINING} has a loss_scale or skipped steps that cannot be")))?;
        let mark = format!("{:016x}", collectives::digest(text.bytes()));
        let state = State { standing, mark, dir, settings };
        // Not to be found out of when ranks have started; nor held open, while later ones take its place.
        Kept::ALL.into_iter().try_for_each(|kept| state.open(kept).map(drop))?;
        Ok(Some(state))
    }

    /// One of which nothing is known but its step.
    #[cfg(test)]
    pub fn after(step: usize) -> State {
        let standing = Standing { steps: step as u64, ..Standing::default() };
        State { standing, mark: String::new(), dir: PathBuf::new(), settings: Map::new() }
    }

    /// Steps that were made.
    pub fn step(&self) -> usize {
        self.standing.steps as usize
    }

    fn open(&self, kept: Kept) -> Result<hf::Checkpoint> {
        hf::Checkpoint::open(self.dir.join(name(kept))).map_err(Failure::usage)
    }

    /// Whether it is of a model of this shape.
    ///
    /// # Errors
    /// It is not.
    pub fn check_shape(&self, model: &ModelChoice) -> Result<()> {
        let (there, asked) = (self.settings.get("--model"), format!("{:?}", model.config));
        if there.and_then(Value::as_str) != Some(&asked) {
            return Err(Failure::usage(format!(
                "--model {} has another shape than the training in {}: name that one's, or another --checkpoint",
                model.name,
                self.dir.display()
            )));
        }
        Ok(())
    }

    /// Its weights.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn weights(&self) -> Result<Box<Source<'static>>> {
        let weights = self.open(Kept::Weights)?;
        Ok(Box::new(move |spec, range, out| {
            weights.read_range(&spec.name, range, out).map_err(|e| e.to_string())
        }))
    }

    /// Has `trainer`, which was made with the weights, go on from here. All ranks call it.
    ///
    /// # Errors
    /// Moments that cannot be read, which all ranks say.
    pub fn restore<T: Float>(&self, trainer: &mut Trainer<T>, plan: &TrainPlan) -> Result<()> {
        let (first, second) = (self.open(Kept::FirstMoments)?, self.open(Kept::SecondMoments)?);
        // By other rules a scale begins anew.
        let then = self.settings.get(LOSS_SCALE).and_then(Value::as_str);
        let scale = self.standing.scale.filter(|_| then == Some(&scaling_told(plan.zero.scaling)));
        let restored = trainer.restore(Standing { scale, ..self.standing }, &mut |kept, spec, range, out| {
            let from = if kept == Kept::FirstMoments { &first } else { &second };
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

/// Where a training stands after so many steps, as told beside them; what is not told is of one without a scale.
fn standing(steps: u64, told: &Value) -> Option<Standing> {
    let skipped = told.get("skipped").map_or(Some(0), Value::as_u64).filter(|&skipped| skipped <= steps)?;
    let scale = match told.get("loss_scale").filter(|scale| !scale.is_null()) {
        None => None,
        Some(scale) => {
            let count = |name| scale[name].as_u64().and_then(|count| u32::try_from(count).ok());
            let factor = scale["scale"].as_f64().map(|x| x as f32).filter(|x| x.is_finite() && *x > 0.0)?;
            Some(Scale { scale: factor, since: count("since")?, left: count("left")? })
        }
    };
    Some(Standing { steps, skipped, scale })
}

/// The checkpoints in a directory, which need not be there.
fn steps(dir: &Path) -> Result<Vec<(usize, PathBuf)>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(Failure::usage(format!("--checkpoint {}: {e}", dir.display()))),
    };
    let step = |path: PathBuf| Some((number(path.file_name()?.to_str()?)?, path));
    Ok(entries.flatten().filter_map(|entry| step(entry.path())).collect())
}

/// Whether checkpoints of a model of so many parameters can be made there.
///
/// # Errors
/// What is in the way: among others anything that is no checkpoint.
pub fn check_destination(checkpoints: &Checkpoints, parameters: u64) -> Result<()> {
    let dir = &checkpoints.dir;
    let refuse = |why: &str| Err(Failure::usage(format!("--checkpoint {}: {why}", dir.display())));
    // What a run has left that was killed takes room.
    clean(dir);
    match fs::read_dir(dir) {
        Ok(entries) => {
            let ours = |name: &str| number(name).is_some() || is_unfinished(name);
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
    let place = hf::check_destination(&pen_place(dir, 0), 0);
    let place = place.map_err(|e| Failure::usage(format!("--checkpoint: {e}")))?;
    // The one before goes only once the next is whole.
    let each = Kept::ALL.len() as u64 * parameters * DType::F32.size() as u64;
    let (there, several) = (checkpoints.made() > 0, checkpoints.every > 0);
    let needed = if several && !there { 2 * each } else { each };
    let existing = place.ancestors().find(|path| path.exists()).unwrap_or(dir);
    match rustix::fs::statvfs(existing) {
        // One without a limit, as a tmpfs may be, has no blocks.
        Ok(disk) if disk.f_blocks > 0 && disk.f_bavail.saturating_mul(disk.f_frsize) < needed => {
            refuse(&format!(
                "a checkpoint takes {}, of which two are there while one takes the place of the other, and its disk has {} free: \
             make room, or name a directory on another disk",
                human::bytes(each),
                human::bytes(disk.f_bavail.saturating_mul(disk.f_frsize))
            ))
        }
        _ => Ok(()),
    }
}

/// The step of a checkpoint of this name.
fn number(name: &str) -> Option<usize> {
    name.strip_prefix(STEP)?.parse().ok()
}

/// Whether a checkpoint has this name that is not whole.
fn is_unfinished(name: &str) -> bool {
    let step = name.strip_prefix(UNFINISHED[0]).and_then(|rest| rest.strip_suffix(UNFINISHED[1]));
    step.is_some_and(|step| step.parse::<usize>().is_ok())
}

/// What came of writing a checkpoint. The ranks stand together then, and the one before is there where it is not.
pub struct Written {
    /// Whether it is there, as all ranks know.
    pub whole: bool,
    /// On rank 0, why it is not.
    pub refused: Option<Failure>,
}

/// Writes the state of a training after its last step below `dir`; rank 0 holds the pen, and nobody goes on before it has put it down.
///
/// # Errors
/// The ranks cannot bring the state together.
pub fn write<T: Float>(
    trainer: &mut Trainer<T>,
    plan: &TrainPlan,
    dir: &Path,
    companions: &Companions,
) -> Result<Written> {
    let standing = trainer.standing();
    let step = standing.steps;
    let lead = trainer.comm().rank() == 0;
    let mut pen = Pen { dir, standing, refused: None };
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
        pen.attempt(|_| match (refused, writer) {
            (Some(why), _) => Err(why.into()),
            (None, Some(writer)) => Ok(writer.finish()?),
            (None, None) => Ok(()),
        });
    }
    if lead {
        pen.attempt(|pen| pen.finish(plan));
    }
    // The others wait here for the pen.
    let mut refused = [u8::from(pen.refused.is_some())];
    trainer.comm().all_reduce_in_place(&mut refused[..], ReduceOp::Max)?;
    let why = pen.refused.map(|why| {
        // A half one takes room, and nothing else.
        remove_unfinished(dir);
        Failure::run(format!("--checkpoint {}: {why}", dir.display()))
    });
    Ok(Written { whole: refused == [0], refused: why })
}

/// A directory of checkpoints that no other run writes to.
pub struct Claim {
    /// Locked as long as it is open; none where a file system locks no directories.
    _lock: Option<File>,
}

impl Claim {
    /// Of a directory, which is made if it is not there.
    ///
    /// # Errors
    /// Another run writes there, or the system's refusal.
    pub fn of(dir: &Path) -> Result<Claim> {
        let refuse =
            |why: &dyn std::fmt::Display| Failure::usage(format!("--checkpoint {}: {why}", dir.display()));
        fs::create_dir_all(dir).map_err(|e| refuse(&e))?;
        let open = File::open(dir).map_err(|e| refuse(&e))?;
        match flock(&open, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Claim { _lock: Some(open) }),
            Err(Errno::WOULDBLOCK) => {
                Err(refuse(&"another run writes there: wait for its end, or name another directory"))
            }
            Err(_) => Ok(Claim { _lock: None }),
        }
    }
}

/// Removes what a run has left that ended in the midst of a checkpoint, unless another writes there.
pub fn clean(dir: &Path) {
    if dir.is_dir()
        && let Ok(_claim) = Claim::of(dir)
    {
        remove_unfinished(dir);
    }
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

/// What writes a checkpoint, until it is refused something.
struct Pen<'a> {
    dir: &'a Path,
    standing: Standing,
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
        pen_place(self.dir, self.step())
    }

    fn step(&self) -> usize {
        self.standing.steps as usize
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
        let told = json!({
            "generator": generator(),
            "step": self.step(),
            "skipped": self.standing.skipped,
            "loss_scale": self.standing.scale.map(|Scale { scale, since, left }| json!({
                "scale": f64::from(scale), "since": since, "left": left
            })),
            "written": Trace::now(),
            "settings": settings,
        });
        let place = self.place();
        let mut file = File::create(place.join(TRAINING))?;
        file.write_all(format!("{told:#}\n").as_bytes())?;
        file.sync_all()?;
        File::open(&place)?.sync_all()?;
        let whole = self.dir.join(format!("{STEP}{}", self.step()));
        fs::rename(&place, &whole)?;
        File::open(self.dir)?.sync_all()?;
        // It is there, whatever becomes of those before; over NFS what somebody has open stays.
        for (_, other) in
            steps(self.dir).unwrap_or_default().into_iter().filter(|(step, _)| *step < self.step())
        {
            let _ = fs::remove_dir_all(other);
        }
        Ok(())
    }
}
