//! The tokens of a training: how many a step takes, whether there are as many, and where they are kept.

use super::{Ranks, usage};
use crate::args::TrainArgs;
use crate::data::Feed;
use crate::failure::{Failure, Result};
use crate::human;
use crate::ranks::lead;
use collectives::Communicator;
use collectives::bootstrap::{Identity, spawn};

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
