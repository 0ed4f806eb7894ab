//! A checkpoint that was found, and how a training goes on from it.

use super::{KEPT_STATES, TRAINING, is_state, last_step, name, number, unreadable};
use crate::data::Feed;
use crate::failure::{Failure, Result};
use crate::files;
use crate::human::several;
use crate::plan::{ModelChoice, TrainPlan, scaling_told};
use crate::train::signature;
use collectives::Float;
use models::{LlamaConfig, hf};
use serde_json::{Value, json};
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use zero::{Kept, Scale, Source, Standing, Trainer};

/// Settings that change what is learnt: of these it is told that they are others now. The shape has to be the same.
const TOLD: [&str; 28] = [
    DATA,
    "--val-data",
    "--tokenizer",
    "--append-eod",
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

/// Those of which what is kept says only whether they are others.
const DIGESTS: [&str; 3] = [DATA, "--val-data", "--tokenizer"];

/// Of it also how much is held out.
const DATA: &str = "--data";

/// More than any training takes, and few enough to be counted with those that follow.
const MOST_TOKENS: u64 = 1 << 62;

/// What the scale of a loss goes on by.
const LOSS_SCALE: &str = "--loss-scale";

/// What is told of each, and may be `null`.
const NEEDED: [&str; 4] = ["tokens", "skipped", "evaluated", "loss_scale"];

/// A checkpoint that was found.
pub struct State {
    /// How far it had come.
    pub standing: Standing,
    /// Tokens that were trained on.
    pub tokens: u64,
    /// Whether an evaluation was made after its last step.
    pub evaluated: bool,
    /// What tells it from others of that step.
    pub mark: String,
    dir: PathBuf,
    told: Value,
    /// The model's.
    shape: LlamaConfig,
}

impl State {
    /// The last one in `dir`, if there is any.
    ///
    /// # Errors
    /// One that cannot be read, or is not whole.
    pub fn last(dir: &Path) -> Result<Option<State>> {
        let last = last_step(dir).map_err(unreadable(dir))?;
        last.map(|(step, dir)| State::read(step, dir)).transpose()
    }

    /// Step and place of the last one in `dir`, or of the one that this is, whether it is whole or not.
    ///
    /// # Errors
    /// There is none, or `unreadable` of what the system refuses.
    pub fn found(dir: &Path, unreadable: impl Fn(io::Error) -> Failure) -> Result<(usize, PathBuf)> {
        State::sought(dir, unreadable)?.ok_or_else(|| {
            let has = if dir.is_dir() { "has no state" } else { "is no directory" };
            Failure::usage(format!(
                "checkpoint {}: {has}: name what 'caravan train --checkpoint' was given, or a step-N in it",
                dir.display()
            ))
        })
    }

    /// The same, if there is any.
    fn sought(dir: &Path, unreadable: impl Fn(io::Error) -> Failure) -> Result<Option<(usize, PathBuf)>> {
        // One that has lost what tells of it is one, too.
        let is_one = |dir: &PathBuf| is_state(dir) || dir.join(name(Kept::Weights)).is_dir();
        let own = dir.canonicalize().ok();
        let step = own.as_ref().and_then(|dir| number(dir.file_name()?.to_str()?));
        // What is in one may be looked at by nobody else.
        let told = own.as_ref().filter(|_| step.is_some()).map(|dir| dir.join(TRAINING).symlink_metadata());
        if let Some(Err(e)) = told
            && e.kind() == ErrorKind::PermissionDenied
        {
            return Err(unreadable(e));
        }
        let step = step.filter(|_| own.as_ref().is_some_and(is_one));
        match (step, fs::metadata(dir)) {
            (Some(step), _) => Ok(Some((step, dir.to_owned()))),
            (None, Ok(there)) if there.is_dir() => last_step(dir).map_err(unreadable),
            (None, Err(e)) if e.kind() != ErrorKind::NotFound => Err(unreadable(e)),
            (None, _) => Ok(None),
        }
    }

    /// Place and weights of the last one in `dir`, or of the one that this is, if there is any: for who goes on with nothing
    /// else of it.
    ///
    /// # Errors
    /// It cannot be read, or is not whole; `unreadable` of what the system refuses of `dir`.
    pub fn weights_of(
        dir: &Path,
        unreadable: impl Fn(io::Error) -> Failure,
    ) -> Result<Option<(State, hf::Checkpoint)>> {
        let Some((step, dir)) = State::sought(dir, unreadable)? else { return Ok(None) };
        let read = || {
            let state = State::read(step, dir.clone())?;
            let weights = state.open(Kept::Weights)?;
            Ok((state, weights))
        };
        read().map(Some).map_err(|why| State::gone(&dir).unwrap_or(why))
    }

    /// What is said of one that was found and has gone since. Of one that cannot be looked at nobody knows, and a link to
    /// nothing is still there.
    pub(super) fn gone(dir: &Path) -> Option<Failure> {
        let gone = dir.symlink_metadata().is_err_and(|e| e.kind() == ErrorKind::NotFound);
        gone.then(|| {
            Failure::run(format!(
                "checkpoint {}: a training has put a later state in its place meanwhile: look again",
                dir.display()
            ))
        })
    }

    /// The one of this step that lies in `dir`.
    ///
    /// # Errors
    /// It cannot be read, or is not whole.
    pub fn read(step: usize, dir: PathBuf) -> Result<State> {
        let refuse = |why: String| Failure::usage(format!("checkpoint {}: {why}", dir.display()));
        let text = files::read_regular(&dir.join(TRAINING));
        let text = text.map_err(|e| refuse(format!("{TRAINING}: {e}")))?;
        let told: Value = serde_json::from_str(&text).map_err(|e| refuse(format!("{TRAINING}: {e}")))?;
        if !told["settings"].is_object() || told["step"] != json!(step) {
            return Err(refuse(format!("{TRAINING} is not that of step {step}")));
        }
        if let Some(missing) = NEEDED.into_iter().find(|name| told.get(name).is_none()) {
            return Err(refuse(format!(
                "{TRAINING} has no \"{missing}\", which that of each state has that 'caravan train' keeps"
            )));
        }
        let standing = standing(step as u64, &told)
            .ok_or_else(|| refuse(format!("{TRAINING} has a loss_scale or skipped steps that cannot be")))?;
        let tokens = told["tokens"].as_u64().filter(|&tokens| tokens <= MOST_TOKENS);
        let tokens =
            tokens.ok_or_else(|| refuse(format!("{TRAINING} has a number of tokens that cannot be")))?;
        let evaluated = told["evaluated"] == json!(true);
        let mark = format!("{:016x}", collectives::digest(text.bytes()));
        // Not to be found out of when ranks have started; nor held open, while later ones take its place.
        let shape = open(&dir, Kept::Weights)?.config().clone();
        for moments in [Kept::FirstMoments, Kept::SecondMoments] {
            open(&dir, moments)?;
        }
        Ok(State { standing, tokens, evaluated, mark, dir, told, shape })
    }

    /// One of which nothing is known but its step.
    #[cfg(test)]
    pub fn after(step: usize) -> State {
        let standing = Standing { steps: step as u64, ..Standing::default() };
        let shape = LlamaConfig::preset("nano").expect("a preset");
        let (dir, told) = (PathBuf::new(), Value::Null);
        State { standing, tokens: 0, evaluated: true, mark: String::new(), dir, told, shape }
    }

    /// Steps that were made.
    pub fn step(&self) -> usize {
        self.standing.steps as usize
    }

    /// Where it lies.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The same, by which its parent is found, whatever it was called by.
    pub(super) fn place(&self) -> PathBuf {
        self.dir.canonicalize().unwrap_or_else(|_| self.dir.clone())
    }

    /// All that is told of it.
    pub fn told(&self) -> &Value {
        &self.told
    }

    /// A setting that it was made with.
    pub fn setting(&self, flag: &str) -> Option<&str> {
        self.told["settings"][flag].as_str()
    }

    /// The flags that changed what was learnt, without those of which only a digest is known.
    pub fn learnt_with(&self) -> Vec<String> {
        let shown = TOLD.into_iter().filter(|flag| !DIGESTS.contains(flag));
        shown.filter_map(|flag| Some(format!("{flag} {}", self.setting(flag)?))).collect()
    }

    pub(super) fn open(&self, kept: Kept) -> Result<hf::Checkpoint> {
        open(&self.dir, kept)
    }

    /// Whether it is of a model of this shape, whichever of its tokens is for padding.
    ///
    /// # Errors
    /// It is not.
    pub fn check_shape(&self, model: &ModelChoice) -> Result<()> {
        if self.shape != (LlamaConfig { padding: self.shape.padding, ..model.config.clone() }) {
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
        let then = self.setting(LOSS_SCALE);
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
            let then = self.setting(flag)?;
            let held_out = || Feed::held_otherwise(then, value).filter(|_| *flag == DATA);
            (then != value).then(|| match (DIGESTS.contains(flag), held_out()) {
                (true, Some([then, now])) => format!("{now} tokens held out instead of {then}"),
                (true, None) => format!("another {flag}"),
                (false, _) => format!("{flag} {value} instead of {then}"),
            })
        });
        let ranks = self.setting("ranks").unwrap_or_default();
        let world = plan.ranks.world;
        let ranks =
            (ranks != world.to_string()).then(|| format!("{} instead of {ranks}", several(world, "rank")));
        let told = |padding: Option<u32>| padding.map_or("none".to_owned(), |token| token.to_string());
        let [then, now] = [self.shape.padding, plan.model.config.padding].map(told);
        let padding = (then != now).then(|| format!("padding token {now} instead of {then}"));
        // The next takes those before it away.
        let keep = plan.checkpoints.as_ref().map(|checkpoints| checkpoints.keep.to_string());
        let keep = keep.zip(self.setting(KEPT_STATES)).filter(|(now, then)| now != then);
        let keep = keep.map(|(now, then)| format!("{KEPT_STATES} {now} instead of {then}"));
        other.chain(padding).chain(ranks).chain(keep).collect::<Vec<_>>().join(", ")
    }
}

/// A part of the checkpoint in `dir`.
fn open(dir: &Path, kept: Kept) -> Result<hf::Checkpoint> {
    hf::Checkpoint::open(dir.join(name(kept))).map_err(Failure::usage)
}

/// Where a training stands after so many steps, as told beside them.
fn standing(steps: u64, told: &Value) -> Option<Standing> {
    let skipped = told["skipped"].as_u64().filter(|&skipped| skipped <= steps)?;
    let scale = match &told["loss_scale"] {
        Value::Null => None,
        told => {
            let count = |name| told[name].as_u64().and_then(|count| u32::try_from(count).ok());
            let scale = told["scale"].as_f64()? as f32;
            let scale = Scale { scale, since: count("since")?, left: count("left")? };
            if !scale.can_be() {
                return None;
            }
            Some(scale)
        }
    };
    Some(Standing { steps, skipped, scale })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_told_of_a_scale_is_read_again_or_refused() {
        let plain = Some(Standing { steps: 7, ..Standing::default() });
        let scale = Some(Scale { scale: 512.0, since: 3, left: 2 });
        let whole = json!({"scale": 512.0, "since": 3, "left": 2});
        for (told, expected) in [
            (json!({"skipped": 0, "loss_scale": null}), plain),
            (json!({"skipped": 2, "loss_scale": whole}), Some(Standing { steps: 7, skipped: 2, scale })),
            (json!({"skipped": 8}), None),
            (json!({"skipped": -1}), None),
            (json!({"skipped": 0, "loss_scale": {"scale": 512.0, "since": 3}}), None),
            (json!({"skipped": 0, "loss_scale": {"scale": 1e-40, "since": 3, "left": 2}}), None),
            (json!({"skipped": 0, "loss_scale": {"scale": 512.0, "since": 3, "left": 0}}), None),
            (json!({"skipped": 0, "loss_scale": {"scale": 512.0, "since": 1u64 << 32, "left": 1}}), None),
            (json!({"skipped": 0, "loss_scale": 512.0}), None),
        ] {
            assert_eq!(standing(7, &told), expected, "{told}");
        }
    }
    #[test]
    fn a_state_that_does_not_tell_what_each_does_is_refused() {
        let home = tempfile::tempdir().unwrap();
        let all = json!({"step": 3, "settings": {}, "tokens": 9, "skipped": 0, "evaluated": true, "loss_scale": null});
        for missing in NEEDED {
            let mut told = all.clone();
            told.as_object_mut().unwrap().remove(missing);
            fs::write(home.path().join(TRAINING), told.to_string()).unwrap();
            let refused = State::read(3, home.path().to_owned()).err().expect(missing);
            let said = format!("training.json has no \"{missing}\", ");
            assert!(refused.code() == 2 && refused.to_string().contains(&said), "{refused}");
        }
    }
}
