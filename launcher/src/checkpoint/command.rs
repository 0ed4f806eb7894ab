//! `caravan checkpoint`: what a state on the disk is of, whether it is still as it was written, and its weights as a model.

use super::state::State;
use super::{FILES, STEP, TRAINING, foreign, lie_apart, name, steps};
use crate::args::{CheckpointArgs, Precision};
use crate::failure::{Failure, Result};
use crate::files;
use crate::human::{self, several};
use crate::leftovers;
use crate::out;
use clap::ValueEnum;
use collectives::{Float, bf16, f16};
use models::LlamaConfig;
use models::hf::{self, SaveOptions, Sum, Writer};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use zero::Kept;

/// Elements of a weight that are read and written at once.
const PIECE: usize = 1 << 20;

/// Characters of a line of flags.
const WIDTH: usize = 100;

/// Says what it is, compares it with what was written, and writes its weights as a model, as far as that was asked.
///
/// # Errors
/// There is none, or it cannot be read; it is not as it was written; the model cannot be written.
pub fn checkpoint(args: &CheckpointArgs) -> Result<()> {
    files::check_name("checkpoint", &args.dir, "the name of a directory")?;
    let refused =
        |e| damage(args, &args.dir, Failure::usage(format!("checkpoint {}: {e}", args.dir.display())));
    let (step, dir) = State::found(&args.dir, refused)?;
    let damaged = |why| damage(args, &dir, why);
    let state = State::read(step, dir.clone()).map_err(damaged)?;
    let weights = state.open(Kept::Weights).map_err(damaged)?;
    let told = told_files(&state).map_err(damaged)?;
    let others = beside(&state)?;
    let dtype = args.dtype.or(of_training(&state)).unwrap_or(Precision::F32);
    if let Some(save) = &args.save {
        files::check_name("--save", save, "the name of a directory")?;
        check_place(&state, save)?;
        let bytes = weights.config().parameters().saturating_mul(dtype.dtype().size() as u64);
        hf::check_destination(save, bytes).map_err(|e| Failure::usage(format!("--save: {e}")))?;
        hf::check_loadable(weights.config()).map_err(|e| {
            let here = state.dir().join(name(Kept::Weights));
            let as_it_is = format!("'caravan eval --model {}' takes this one as it is", here.display());
            Failure::usage(format!("--save: {e}, and {as_it_is}"))
        })?;
    }
    if !args.json {
        out::text(out::harmless(&description(&state, weights.config(), &told, &others)))?;
    }
    if args.verify {
        verify(&state, &told, &Kept::ALL, !args.json).map_err(damaged)?;
    } else if args.save.is_some() {
        // A model is not made of what is not as it was written.
        verify(&state, &told, &[Kept::Weights], false).map_err(damaged)?;
    }
    if let Some(save) = &args.save {
        // It is made beside the directory, not beside a link to it.
        leftovers::go_with(save.canonicalize().as_deref().unwrap_or(save));
        let written = match dtype {
            Precision::Bf16 => export::<bf16>(&weights, save),
            Precision::F16 => export::<f16>(&weights, save),
            Precision::F32 => export::<f32>(&weights, save),
        };
        written.map_err(|e| Failure::run(format!("--save: {e}")))?;
    }
    if args.json {
        let saved =
            args.save.as_ref().map(|dir| json!({"dir": dir.display().to_string(), "dtype": dtype.name()}));
        return out::line(json!({
            "dir": state.dir().display().to_string(), "parameters": weights.config().parameters(),
            "bytes": bytes(&told), "others": others, "training": state.told(), "verified": args.verify, "saved": saved,
        }));
    }
    if let Some(save) = &args.save {
        out::line(format_args!("  saved          in {} as {}", dtype.name(), save.display()))?;
    }
    Ok(())
}

/// What is wrong with a state: not with what was asked, if that is whether it is whole. Who asks for JSON is told in it, too.
/// With one that has gone meanwhile nothing is.
fn damage(args: &CheckpointArgs, dir: &Path, why: Failure) -> Failure {
    if let Some(gone) = State::gone(dir) {
        return gone;
    }
    if !args.verify {
        return why;
    }
    let why = why.to_string();
    let told = json!({"dir": dir.display().to_string(), "verified": false, "wrong": why});
    let said = if args.json { out::line(told) } else { Ok(()) };
    said.err().unwrap_or(Failure::Run(why))
}

/// A file of the state, and what was written.
type Told = (String, Sum);

/// Those that are told of beside it.
///
/// # Errors
/// What is told of one cannot be.
fn told_files(state: &State) -> Result<Vec<Told>> {
    let sum = |told: &Value| {
        let crc32 = u32::from_str_radix(told["crc32"].as_str()?, 16).ok()?;
        Some(Sum { bytes: told["bytes"].as_u64()?, crc32 })
    };
    let files = state.told()[FILES].as_object().into_iter().flatten();
    let read = |(name, told)| match sum(told) {
        Some(sum) => Ok((String::clone(name), sum)),
        None => Err(refused(state, format!("what {TRAINING} tells of {name} is no length and CRC-32"))),
    };
    files.map(read).collect()
}

/// Names of the states beside it, in order.
fn beside(state: &State) -> Result<Vec<String>> {
    let own = state.place();
    let refused = |e| refused(state, format!("what lies beside it: {e}"));
    let mut all = own.parent().map_or(Ok(Vec::new()), steps).map_err(refused)?;
    all.retain(|(_, dir)| *dir != own);
    all.sort_unstable();
    Ok(all.into_iter().map(|(step, _)| format!("{STEP}{step}")).collect())
}

/// It is not as it was written, as far as that is known.
fn refused(state: &State, why: String) -> Failure {
    Failure::run(format!("checkpoint {}: {why}", state.dir().display()))
}

/// Refuses what would lie in the state, or among those that a training goes on from, which has nothing else there.
fn check_place(state: &State, save: &Path) -> Result<()> {
    let own = state.place();
    let among = own.parent().filter(|dir| foreign(dir).is_ok_and(|other| other.is_none()));
    match lie_apart(among.unwrap_or(&own), save) {
        true => Ok(()),
        false => Err(Failure::usage(format!(
            "--save {} and the states that {} is one of lie in each other: name a place apart",
            save.display(),
            state.dir().display()
        ))),
    }
}

fn bytes(files: &[Told]) -> u64 {
    files.iter().map(|(_, sum)| sum.bytes).sum()
}

/// What the training computed with.
fn of_training(state: &State) -> Option<Precision> {
    Precision::from_str(state.setting("--dtype")?, false).ok()
}

/// In a few lines.
fn description(state: &State, config: &LlamaConfig, files: &[Told], others: &[String]) -> String {
    let mut all = format!("{}: the state after step {}", state.dir().display(), state.step());
    let steps = state.setting("--steps").filter(|steps| *steps != state.step().to_string());
    all += &steps.map_or(String::new(), |steps| format!(" of {steps}"));
    if let Some(written) = state.told()["written"].as_str() {
        all += &format!(", written {written}");
    }
    let mut line = |name: &str, text: String| all += &format!("\n  {name:<15}{text}");
    line("model", format!("{}: {} parameters", shape(config), human::count(config.parameters() as f64)));
    if !files.is_empty() {
        let (size, count) = (human::bytes(bytes(files)), several(files.len(), "file"));
        line("on the disk", format!("{size} in {count}: weights and both moments of the optimizer, in f32"));
    }
    if !others.is_empty() {
        line("beside it", others.join(", "));
    }
    let ranks = state.setting("ranks").and_then(|ranks| ranks.parse().ok()).unwrap_or(1);
    let tokens = human::count(state.tokens as f64);
    line("trained by", format!("{}, on {tokens} tokens", several(ranks, "rank")));
    let (mut name, mut flags) = ("with", String::new());
    for flag in state.learnt_with() {
        if !flags.is_empty() && flags.len() + flag.len() > WIDTH {
            line(name, std::mem::take(&mut flags));
            name = "";
        }
        flags += if flags.is_empty() { "" } else { " " };
        flags += &flag;
    }
    line(name, flags);
    if let Some(scale) = state.standing.scale {
        let skipped = several(state.standing.skipped as usize, "step");
        line("loss scale", format!("{}, and {skipped} skipped", human::as_written(scale.scale)));
    }
    all + "\n"
}

/// A model's, in words.
fn shape(config: &LlamaConfig) -> String {
    let layers = several(config.layers, "layer");
    let heads = match config.heads == config.kv_heads {
        true => several(config.heads, "head"),
        false => format!("{}, {} of keys and values", several(config.heads, "head"), config.kv_heads),
    };
    let tied = if config.tied { ", tied" } else { "" };
    format!(
        "{layers}, hidden {}, {heads}, FFN {}, vocabulary {}{tied}, context {}",
        config.hidden, config.ffn, config.vocab, config.context
    )
}

/// Compares the files of these parts with what was written, and may say of each that it is the same.
///
/// # Errors
/// One that is not, or of which nothing is told.
fn verify(state: &State, told: &[Told], parts: &[Kept], said: bool) -> Result<()> {
    for file in files_of(state, told, parts)? {
        let Some((_, then)) = told.iter().find(|(name, _)| *name == file) else {
            return Err(refused(
                state,
                format!("what was written as {file} is not told: it cannot be compared"),
            ));
        };
        let now = Sum::of_file(&state.dir().join(&file)).map_err(|e| refused(state, e.to_string()))?;
        if now.bytes != then.bytes {
            let lengths = format!("{} bytes were written, and {} are there", then.bytes, now.bytes);
            return Err(refused(state, format!("{file} is not as it was written: {lengths}")));
        }
        if now.crc32 != then.crc32 {
            let sums = format!("the CRC-32 of its bytes was {:08x}, and is {:08x}", then.crc32, now.crc32);
            return Err(refused(state, format!("{file} is not as it was written: {sums}")));
        }
        if said {
            let (size, crc32) = (human::bytes(now.bytes), now.crc32);
            out::line(format_args!("  {:<15}{size:>9}  crc32 {crc32:08x}  {file}", "as written"))?;
        }
    }
    Ok(())
}

/// The files of these parts: those that are told of, and those that are there.
fn files_of(state: &State, told: &[Told], parts: &[Kept]) -> Result<BTreeSet<String>> {
    let mut all = BTreeSet::new();
    for kept in parts {
        let part = name(*kept);
        let of_it = told.iter().filter(|(file, _)| file.split_once('/').is_some_and(|(its, _)| its == part));
        all.extend(of_it.map(|(file, _)| file.clone()));
        let there = state.open(*kept)?;
        let within =
            |path: PathBuf| Some(format!("{part}/{}", path.strip_prefix(there.dir()).ok()?.to_str()?));
        all.extend(there.files().into_iter().filter_map(within));
    }
    Ok(all)
}

/// Writes the weights as a model that holds them as `T`, with what lies beside them.
fn export<T: Float>(weights: &hf::Checkpoint, save: &Path) -> models::Result<()> {
    let options = SaveOptions { remarks: weights.remarks().clone(), ..SaveOptions::default() };
    // To find out whether the model that it replaces can be moved is to move it, for a moment.
    let writer = leftovers::in_one_piece(|| Writer::create(save, weights.config(), T::DTYPE, &options));
    let mut writer = writer?;
    for (name, content) in weights.companions()? {
        writer.add_file(&name, &content)?;
    }
    let mut values = Vec::new();
    for spec in weights.config().units().into_iter().flat_map(|unit| unit.tensors) {
        for start in (0..spec.len()).step_by(PIECE) {
            let range = start..spec.len().min(start + PIECE);
            values.resize(range.len(), T::from_f32(0.0));
            weights.read_range(&spec.name, range, &mut values)?;
            if let Some(value) = values.iter().find(|value| !value.to_f32().is_finite()) {
                let text =
                    format!("{} has {} as {}: take another --dtype", spec.name, value.to_f32(), T::DTYPE);
                return Err(models::Error::format(save, text));
            }
            writer.add(&spec.name, &values)?;
        }
    }
    leftovers::in_one_piece(|| writer.finish())
}
