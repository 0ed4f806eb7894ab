//! Writing the trained model as a Hugging Face directory.

use crate::failure::{Failure, Result};
use crate::plan::TrainPlan;
use crate::tokenizer::Tokenizer;
use collectives::Float;
use models::hf::{SaveOptions, Writer};
use std::path::Path;
use zero::Trainer;

/// The tokenizer's file in a model directory.
pub const TOKENIZER: &str = "tokenizer.json";
/// What goes with a model whatever its tokenizer is.
const GENERATION: &str = "generation_config.json";

/// Files that go beside the weights, by name.
pub type Companions = Vec<(&'static str, Vec<u8>)>;

/// What goes beside the weights: the tokenizer's file, and what the directory that the training started from has, but
/// for files of a tokenizer that was not used. Read before the training, whatever happens to it meanwhile.
///
/// # Errors
/// A file that cannot be read.
pub fn companions(plan: &TrainPlan) -> Result<Companions> {
    let own = plan.model.weights.as_ref().map(|weights| weights.companions());
    let mut companions = own.transpose().map_err(Failure::usage)?.unwrap_or_default();
    let Some(tokenizer) = &plan.tokenizer else { return Ok(companions) };
    let used = tokenizer.file()?;
    let theirs = companions.iter().find(|(name, _)| *name == TOKENIZER);
    if used.is_none() || theirs.map(|(_, content)| content) != used.as_ref() {
        companions.retain(|(name, _)| *name == GENERATION);
        companions.extend(used.map(|content| (TOKENIZER, content)));
    }
    Ok(companions)
}

/// Writes the model; rank 0 holds the pen.
///
/// # Errors
/// What the system refuses; then nothing of the model stays.
pub fn model<T: Float>(
    trainer: &mut Trainer<T>,
    plan: &TrainPlan,
    dir: &Path,
    companions: &Companions,
) -> Result<()> {
    let failed = |e: models::Error| Failure::run(format!("--save: {e}"));
    let mut writer = None;
    if trainer.comm().rank() == 0 {
        let token_ids = plan.model.weights.as_ref().map(|w| w.token_ids().clone()).unwrap_or_default();
        let of_bytes = matches!(plan.tokenizer, Some(Tokenizer::Bytes));
        let options = SaveOptions { token_ids, of_bytes, ..SaveOptions::default() };
        let mut new = Writer::create(dir, &plan.model.config, T::DTYPE, &options).map_err(failed)?;
        for (name, content) in companions {
            new.add_file(name, content).map_err(failed)?;
        }
        writer = Some(new);
    }
    let mut refused = None;
    let exported = trainer.export(&mut |spec, values| match &mut writer {
        None => Ok(()),
        Some(writer) => writer.add(&spec.name, values).map_err(|e| {
            let text = e.to_string();
            refused = Some(e);
            text
        }),
    });
    if let Some(e) = refused {
        return Err(failed(e));
    }
    exported?;
    match writer {
        Some(writer) => writer.finish().map_err(failed),
        None => Ok(()),
    }
}
