//! What a training reads: its data, those that are held out whole, and what makes tokens of them.

use super::steps::with_held_out;
use super::{ModelChoice, Ranks, usage};
use crate::args::TrainArgs;
use crate::data::{self, Feed, Input, held};
use crate::failure::Result;
use crate::save;
use crate::tokenizer::{Share, Tokenizer};
use crate::tuning;
use collectives::bootstrap::Identity;
use std::path::PathBuf;

/// The most that is held out of data that nobody named, so that evaluating does not take longer the more text lies here.
const HELD_OUT_UNASKED: usize = 1 << 17;

/// What was found of the data, before any of it is read.
pub struct Inputs {
    /// None of random tokens.
    data: Option<Input>,
    /// Those of `--val-data`, if any.
    held: Option<Input>,
}

impl Inputs {
    /// What `--data` and `--val-data` name, for ranks of which this process may be one.
    ///
    /// # Errors
    /// Nothing of that name, text beside tokens, or a stream that several would read.
    pub fn find(args: &TrainArgs, ranks: &Ranks, identity: Option<&Identity>) -> Result<Self> {
        data::check_random(&args.data)?;
        let of_several = identity.is_some() && ranks.world > 1;
        let data = match data::is_random(&args.data) {
            true => None,
            false => Some(Input::find(&args.data, of_several)?),
        };
        let held = held::find(&args.data, &args.val_data, of_several)?;
        for (flag, paths, input) in [("--data", &args.data, &data), ("--val-data", &args.val_data, &held)] {
            let Some(input) = input else { continue };
            held::check_mixed(flag, paths, input, "--data {}/*train*.bin --val-data {}/*val*.bin")?;
            ranks.check_inputs(flag, input.token_files(), identity)?;
        }
        Ok(Inputs { data, held })
    }

    fn all(&self) -> impl Iterator<Item = &Input> {
        self.data.iter().chain(&self.held)
    }

    /// What was named of them, or stands for that.
    pub fn named(&self) -> Vec<PathBuf> {
        self.all().flat_map(Input::named).cloned().collect()
    }

    /// What makes tokens of text, and text of a `sample` of so many, if it is known. Padding that it would take for another
    /// token is none.
    ///
    /// # Errors
    /// One that is for nothing, cannot be read, or does not fit `model`.
    pub fn tokenizer(
        &self,
        args: &TrainArgs,
        model: &mut ModelChoice,
        (ranks, identity): (&Ranks, Option<&Identity>),
        sample: usize,
    ) -> Result<Option<Tokenizer>> {
        let for_text = self.all().any(Input::is_text);
        if let (Some(tokenizer), false) = (&args.tokenizer, for_text || args.save.is_some() || sample > 0) {
            return usage(format!(
                "--tokenizer {} is for text, for the sample and for --save, and --data are tokens already, with no sample \
                 (--sample 0 or --quiet) and no --save: leave it away",
                tokenizer.display()
            ));
        }
        ranks.check_inputs("--tokenizer", args.tokenizer.as_slice(), identity)?;
        let mut tokenizer = model.tokenizer(args.tokenizer.as_deref(), for_text)?;
        if args.append_eod {
            model.append_eod(tokenizer.as_mut(), for_text)?;
        }
        if let (Some(_), Some(tokenizer)) = (model.config.padding, &tokenizer)
            && save::names_others_tokens(model, tokenizer)?
        {
            model.config.padding = None;
        }
        Ok(tokenizer)
    }

    /// All files that the training reads.
    ///
    /// # Errors
    /// What lies beside the tokenizer cannot be looked at.
    pub fn files(
        &self,
        args: &TrainArgs,
        model: &ModelChoice,
        tokenizer: Option<&Tokenizer>,
    ) -> Result<Vec<PathBuf>> {
        let beside = tokenizer.map(save::beside).transpose()?.unwrap_or_default();
        let data = self.all().flat_map(Input::files).cloned();
        let of_text = tokenizer.and_then(Tokenizer::path).into_iter();
        let of_text = of_text.chain(beside.into_iter().map(|(_, path)| path));
        Ok(data
            .chain(model.files())
            .chain(of_text)
            .chain(tuning::named(args.ranks.tuning.as_ref()))
            .collect())
    }

    /// The tokens, for a training on so many in sequences of `length`. A `fraction` of them is held out, or less of what nobody
    /// named: that is given back, too.
    ///
    /// # Errors
    /// They cannot be read or made, or so many cannot be held out.
    pub fn feed(
        self,
        args: &TrainArgs,
        (vocab, tokenizer): (usize, Option<&Tokenizer>),
        (tokens, length): (usize, usize),
        fraction: f64,
        identity: Option<&Identity>,
    ) -> Result<(Feed, f64)> {
        let feed = match self.data {
            None => {
                let all = tokens.saturating_add(length + 1);
                Feed::random(args.seed, vocab, with_held_out(all, fraction, length))
            }
            Some(data) => Feed::open(data, self.held, tokenizer, vocab, Share::of(identity))?,
        };
        let unasked = args.data.is_empty() && args.val_fraction.is_none();
        let most = if unasked { HELD_OUT_UNASKED } else { usize::MAX };
        let feed = feed.hold_out(fraction, most)?;
        let fraction = fraction.min(most as f64 / feed.tokens().len() as f64);
        Ok((feed, fraction))
    }
}
