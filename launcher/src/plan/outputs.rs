//! Whether what a training writes can be written, and takes the place of nothing that it reads.

use super::{ModelChoice, usage};
use crate::args::Precision;
use crate::failure::{Failure, Result};
use crate::files::{self, Kind, Output, Way};
use crate::tokenizer::Tokenizer;
use std::path::{Path, PathBuf};

/// Whether the model and the files can be written, and all be kept.
///
/// # Errors
/// What is in the way.
pub fn check_written(
    model: &ModelChoice,
    tokenizer: Option<&Tokenizer>,
    data: &[PathBuf],
    dtype: Precision,
    save: Option<&Path>,
    files: &[Output<'_>],
) -> Result<()> {
    let bytes = model.config.parameters() * dtype.dtype().size() as u64;
    save.map_or(Ok(()), |dir| files::check_name("--save", dir, "the name of a directory"))?;
    let place = save.map(|dir| {
        let without = |e| Failure::usage(format!("--save: {e}, and this one be trained without that"));
        models::hf::check_loadable(&model.config).map_err(without)?;
        models::hf::check_destination(dir, bytes).map_err(|e| Failure::usage(format!("--save: {e}")))
    });
    let place = place.transpose()?;
    if let Some(place) = &place {
        check_kept(model, tokenizer, data, place)?;
    }
    for Output { flag, file, .. } in files {
        if let (Some(model), Some(place)) = (&place, files::place(file)) {
            check_beside(flag, file, &place, model)?;
        }
    }
    files::check_outputs(files, &[])
}

/// The files of these names.
pub fn outputs<'a>(metrics: Option<&'a Path>, trace: Option<&'a Path>) -> Vec<Output<'a>> {
    let metrics =
        metrics.map(|file| Output { flag: "--metrics", file, way: Way::Growing, kind: Kind::Metrics });
    let trace = trace.map(|file| Output::whole("--trace", file, Kind::Trace));
    metrics.into_iter().chain(trace).collect()
}

/// Refuses a `place` of the saved model where one lies of which the run reads a part only, but the one that it goes on from;
/// and one that has any of the `data`.
fn check_kept(
    model: &ModelChoice,
    tokenizer: Option<&Tokenizer>,
    data: &[PathBuf],
    place: &Path,
) -> Result<()> {
    if let Some(file) = data.iter().find(|file| lies_in(file, place)) {
        return usage(format!(
            "--save {} would replace {}, which is among the data: name another directory, or only the data that are meant",
            place.display(),
            file.display()
        ));
    }
    let refuse = |read: &Path, what: &str| {
        usage(format!(
            "--save {} would replace all that lies beside {}, from which only the {what} is taken: name another directory",
            place.display(),
            read.display()
        ))
    };
    if let Some(shape) = model.described().filter(|shape| lies_in(shape, place)) {
        return refuse(shape, "shape");
    }
    let own = model.weights.as_ref().and_then(|weights| weights.dir().canonicalize().ok());
    match tokenizer.and_then(Tokenizer::path).filter(|file| lies_in(file, place)) {
        Some(file) if own.as_deref() != Some(place) => refuse(&file, "tokenizer"),
        _ => Ok(()),
    }
}

/// Whether a file, or the link to it that was named, is in the directory `place`, which is given without links.
fn lies_in(file: &Path, place: &Path) -> bool {
    let there = [file.canonicalize(), models::parent(file).canonicalize()];
    there.into_iter().flatten().any(|there| there.starts_with(place))
}

/// Refuses a file whose `place` the model's directory has, or that has the directory's.
pub fn check_beside(flag: &str, file: &Path, place: &Path, model: &Path) -> Result<()> {
    match place.starts_with(model) || model.starts_with(place) {
        true => usage(format!(
            "{flag} {} lies in the way of --save {}, which the model replaces as a whole: name a file elsewhere",
            file.display(),
            model.display()
        )),
        false => Ok(()),
    }
}
