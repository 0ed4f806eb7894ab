//! What is trained and on what data, as far as that is known before any of these is read.

use super::inputs::Inputs;
use super::outputs::{check_written, outputs};
use super::{ModelChoice, Ranks, TRAIN_SEQ};
use crate::args::TrainArgs;
use crate::checkpoint::{self, Checkpoints};
use crate::failure::{Failure, Result};
use crate::files;
use crate::save;
use crate::tokenizer::Tokenizer;
use collectives::bootstrap::Identity;

/// What is trained.
pub struct What {
    /// The model.
    pub model: ModelChoice,
    /// Its data.
    pub inputs: Inputs,
    /// What makes tokens of text, and text of tokens, if it is known.
    pub tokenizer: Option<Tokenizer>,
    /// Tokens of the sample.
    pub sample: usize,
    /// And of a sequence.
    pub length: usize,
}

impl What {
    /// Opens it.
    ///
    /// # Errors
    /// A model that cannot be trained, data or a tokenizer that cannot be read or do not fit it.
    pub fn open(args: &TrainArgs, ranks: &Ranks, identity: Option<&Identity>) -> Result<Self> {
        let mut model = trainable(args)?;
        let inputs = Inputs::find(args, ranks, identity)?;
        let sample = if args.ranks.quiet { 0 } else { args.sample };
        let tokenizer = inputs.tokenizer(args, &mut model, (ranks, identity), sample)?;
        let length = sequence(args, &model)?;
        Ok(What { model, inputs, tokenizer, sample, length })
    }

    /// Whether what is written takes the place of nothing that is read, and can be written: where others start ranks, each may
    /// be on a host of its own, and rank 0, which writes, looks when they have met.
    ///
    /// # Errors
    /// What is in the way.
    pub fn check_written(
        &self,
        args: &TrainArgs,
        checkpoints: Option<&Checkpoints>,
        identity: Option<&Identity>,
    ) -> Result<()> {
        let (model, tokenizer) = (&self.model, self.tokenizer.as_ref());
        let outputs = outputs(args.metrics.as_deref(), args.trace.as_deref());
        if !outputs.is_empty() {
            let read = self.inputs.files(args, model, tokenizer)?;
            outputs.iter().try_for_each(|output| files::check_apart(output.flag, output.file, &read))?;
        }
        if identity.is_some() {
            return Ok(());
        }
        check_written(model, tokenizer, &self.inputs.named(), args.dtype, args.save.as_deref(), &outputs)?;
        if args.save.is_some() || checkpoints.is_some() {
            save::companions(model, tokenizer)?;
        }
        checkpoints
            .map_or(Ok(()), |kept| checkpoint::check_destination(kept, model.config.parameters(), args.steps))
    }
}

/// The model that flags name.
///
/// # Errors
/// There is none, or it cannot be trained.
pub fn trainable(args: &TrainArgs) -> Result<ModelChoice> {
    let model = ModelChoice::open(&args.model)?;
    model.config.validate().map_err(Failure::usage)?;
    model.check_trainable()?;
    Ok(model)
}

/// The tokens of a sequence.
///
/// # Errors
/// More than the model takes.
pub fn sequence(args: &TrainArgs, model: &ModelChoice) -> Result<usize> {
    model.sequence(args.seq, TRAIN_SEQ)
}
