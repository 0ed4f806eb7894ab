//! The tokens of a training: how many a step takes, whether there are as many, and where they are kept.

use super::inputs::Inputs;
use super::{Ranks, usage};
use crate::args::{Order, TrainArgs};
use crate::checkpoint::State;
use crate::data::Feed;
use crate::failure::{Failure, Result};
use crate::human;
use crate::ranks::lead;
use crate::tokenizer::Tokenizer;
use collectives::Communicator;
use collectives::bootstrap::{Identity, spawn};
use models::tokens::{self, BatchPlan, Windows};

/// The tokens of a training, and which of them its steps take.
pub struct Taken {
    /// All of them.
    pub feed: Feed,
    /// The part that is held out.
    pub val_fraction: f64,
    /// Which make which batch.
    pub batches: BatchPlan,
    /// How many a step of all ranks takes.
    pub step_tokens: usize,
    /// How many were trained on before.
    pub before: u64,
}

impl Taken {
    /// Reads or makes them, for a model of so many and sequences of a length. A `fraction` of them is to be held out.
    ///
    /// # Errors
    /// They cannot be read or made, are too few, or some that the model does not know.
    pub fn plan(
        args: &TrainArgs,
        inputs: Inputs,
        (vocab, tokenizer, length): (usize, Option<&Tokenizer>, usize),
        fraction: f64,
        state: Option<&State>,
        (ranks, identity): (&Ranks, Option<&Identity>),
    ) -> Result<Self> {
        let step_tokens = step_tokens(args, ranks.world, length)?;
        let (made, before) = state.map_or((0, 0), |state| (state.step(), state.tokens));
        let left = step_tokens.saturating_mul(args.steps.saturating_sub(made));
        let tokens = left.saturating_add(before as usize).max(step_tokens);
        let (feed, val_fraction) =
            inputs.feed(args, (vocab, tokenizer), (tokens, length), fraction, identity)?;
        check_batch(args, &feed, (ranks, identity), length, step_tokens)?;
        feed.check_held_out(args.val_fraction.as_ref(), val_fraction, length)?;
        check_tokens(&feed, identity)?;
        let order = match args.order {
            Order::Sequential => tokens::Order::Sequential,
            Order::Shuffled => tokens::Order::Shuffled { seed: args.seed },
        };
        let windows = Windows::new(feed.training(), length).map_err(Failure::usage)?;
        // Where a run goes on, its data do, whatever a step was before. With another length windows are others: as many tokens
        // are behind.
        let batches = BatchPlan::new(windows, order, args.micro_batch, args.accumulate, ranks.world)
            .map_err(Failure::usage)?
            .after(made as u64, before / length as u64);
        Ok(Taken { feed, val_fraction, batches, step_tokens, before })
    }
}

/// Bytes of the tokens that `ranks` keep in memory together: those that something else has started each their own, and those
/// that this process starts, as threads or not, one copy.
pub fn tokens_in_memory(feed: &Feed, ranks: usize, identity: Option<&Identity>) -> u64 {
    let copies = if identity.is_some() { ranks } else { 1 };
    feed.in_memory().saturating_mul(copies as u64)
}

/// Finds tokens that the model does not know, before any rank starts: of those that something else has started, rank 0 looks
/// once they have met and know that all have the same data ([`lead_tokens`]).
pub fn check_tokens(feed: &Feed, identity: Option<&Identity>) -> Result<()> {
    if identity.is_some() { Ok(()) } else { feed.check_tokens() }
}

/// The same of ranks that have met, unless the parent of this one has looked.
///
/// # Errors
/// The first token that the model does not know, on rank 0, of whose failure the others hear.
pub fn lead_tokens(feed: &Feed, identity: Option<&Identity>, comm: &Communicator) -> Result<()> {
    if spawn::supervised() { Ok(()) } else { lead(identity, comm, || feed.check_tokens()) }
}

/// Tokens of one optimizer step of all ranks.
pub fn step_tokens(args: &TrainArgs, world: usize, length: usize) -> Result<usize> {
    let factors = [world, args.accumulate, args.micro_batch, length];
    let product = factors.into_iter().try_fold(1usize, |n, f| n.checked_mul(f)).filter(|&n| n < 1 << 40);
    product.ok_or_else(|| {
        Failure::usage(format!(
            "one step of {} has more than 2^40 tokens: lower --micro-batch or --accumulate",
            step_in_words(args, world, length)
        ))
    })
}

/// What makes up a step.
fn step_in_words(args: &TrainArgs, world: usize, length: usize) -> String {
    let factors = [
        (world, "rank"),
        (args.accumulate, "micro-batch"),
        (args.micro_batch, "sequence"),
        (length, "token"),
    ];
    factors.map(|(n, what)| human::several(n, what)).join(" x ")
}

/// So many tokens that `needed` are left when a fraction of them is held out, of which one sequence of `length` and its
/// next token can be read.
pub fn with_held_out(needed: usize, fraction: f64, length: usize) -> usize {
    if fraction <= 0.0 {
        return needed;
    }
    // One more for rounding.
    let all = (needed as f64 / (1.0 - fraction)).max((length + 2) as f64 / fraction);
    (all.ceil() as usize).saturating_add(1)
}

/// Whether there is enough to fill one step.
pub fn check_batch(
    args: &TrainArgs,
    feed: &Feed,
    (ranks, identity): (&Ranks, Option<&Identity>),
    length: usize,
    step: usize,
) -> Result<()> {
    let (have, held, world) = (feed.training().len(), feed.held_out_tokens(), ranks.world);
    if have > step {
        return Ok(());
    }
    let lower = human::either([
        ("--accumulate", args.accumulate > 1),
        ("--micro-batch", args.micro_batch > 1),
        ("--seq", length > 1),
        ("--ranks", ranks.fewer(1, identity)),
        ("--val-fraction", !feed.names_held_out() && have + held > step),
    ]);
    let or = if lower.is_empty() { String::new() } else { format!(" or lower {lower}") };
    let aside = if held > 0 { format!(" beside {held} that are held out") } else { String::new() };
    usage(format!(
        "the data are shorter than one batch: a step takes {} and one more, {} tokens, and there are {have} for \
         training{aside}: give more --data{or}",
        step_in_words(args, world, length),
        step + 1
    ))
}
