//! A sample of text from the trained model.

use crate::failure::Result;
use crate::plan::TrainPlan;
use crate::progress::Progress;
use crate::train::stop;
use collectives::{Communicator, Float};
use models::Batch;
use std::time::{Duration, Instant};
use zero::Trainer;

/// Divides logits before sampling: below 1, likely tokens become likelier.
const TEMPERATURE: f32 = 0.8;
/// What the text starts from.
const START: &str = "\n";

/// How long a sample may take: each token is a forward of the whole model, which ranks may have to gather for it.
const PATIENCE: Duration = Duration::from_secs(30);

/// What a model writes.
pub struct Sample {
    /// Its text.
    pub text: String,
    /// How many tokens that is.
    tokens: usize,
    /// Whether the model has ended it.
    ended: bool,
}

impl Sample {
    /// What is said of a sample that is shorter than `asked`.
    pub fn remark(&self, asked: usize) -> String {
        match (self.ended, self.tokens < asked) {
            (true, _) => format!(" ({} of {asked} tokens: the text ends there)", self.tokens),
            (_, true) => format!(" ({} of {asked} tokens: more take longer than {PATIENCE:?})", self.tokens),
            _ => String::new(),
        }
    }
}

/// Generates `plan.sample` tokens, or as many as come before one of those that are `ends` of a text or are made in
/// [`PATIENCE`], and gives their text. Every rank calls it: on stage 3 they hold the model together. Rank 0 shows the sample, and
/// says which tokens are ends. None when no sample was asked for, or nobody knows which text tokens are.
///
/// # Errors
/// A rank was asked to end, or a collective fails, as when another rank does.
pub fn generate<T: Float>(
    trainer: &mut Trainer<T>,
    plan: &TrainPlan,
    ends: &[u32],
    progress: &mut Progress,
) -> Result<Option<Sample>> {
    let Some(tokenizer) = plan.tokenizer.as_ref().filter(|_| plan.sample > 0) else { return Ok(None) };
    let vocab = plan.model.config.vocab;
    // Whatever this tokenizer has against it: a trained model is there.
    let mut tokens = tokenizer.prompt(START).unwrap_or_default();
    tokens.retain(|&token| (token as usize) < vocab);
    if tokens.is_empty() {
        tokens.push(0);
    }
    let start = tokens.len();
    let mut logits = vec![0f32; vocab];
    let mut random = Random(plan.seed);
    let targets = vec![0; plan.batch.length];
    // Tokens that the tokenizer does not know cannot be shown, and some that it has the model may lack.
    let known = tokenizer.vocab().min(vocab);
    let has_ended = |made: &[u32]| made.last().is_some_and(|last| ends.contains(last));
    let began = Instant::now();
    for made in 0..plan.sample {
        let enough = enough(trainer.comm(), has_ended(&tokens[start..]), began.elapsed());
        if enough.map_err(|e| e.remark("the sample was not made, all else was"))? && made > 0 {
            break;
        }
        progress.round("sampling", made, plan.sample);
        let window = &tokens[tokens.len().saturating_sub(plan.batch.length)..];
        let length = window.len();
        let batch = Batch { tokens: window, targets: &targets[..length], rows: 1, length };
        trainer.logits(&batch, length - 1, &mut logits)?;
        tokens.push(choose(&logits[..known], random.uniform()));
    }
    let ended = has_ended(&tokens[start..]);
    if ended {
        tokens.pop();
    }
    let made = &tokens[start..];
    Ok(Some(Sample { text: tokenizer.decode(made), tokens: made.len(), ended }))
}

/// Whether the text has ended, or ranks have sampled for long enough, by what rank 0 knows and its clock: all go on together,
/// or none does.
///
/// # Errors
/// A rank was asked to end, or another fails.
fn enough(comm: &Communicator, ended: bool, sampled: Duration) -> Result<bool> {
    stop::any_or(comm, comm.rank() == 0 && (ended || sampled > PATIENCE))
}

/// The token at which the cumulative probability passes `uniform`.
fn choose(logits: &[f32], uniform: f64) -> u32 {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f64> = logits.iter().map(|l| f64::from((l - most) / TEMPERATURE).exp()).collect();
    let mut left = uniform * weights.iter().sum::<f64>();
    for (token, weight) in weights.into_iter().enumerate() {
        left -= weight;
        if left < 0.0 {
            return token as u32;
        }
    }
    logits.len() as u32 - 1
}

/// Splitmix64.
struct Random(u64);

impl Random {
    /// In [0, 1).
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        (collectives::mix(self.0) >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Colour;
    use crate::device;
    use crate::plan::tests::plan;
    use crate::tokenizer::Tokenizer;
    use collectives::Options;
    use zero::Ledger;

    #[test]
    fn a_token_is_drawn_from_what_follows_the_last_of_as_many_as_a_sequence_has() {
        let plan = plan(
            "--model nano --data random --tokenizer bytes --dtype f32 --seq 8 --micro-batch 1 --steps 1 --ranks 1 \
             --transport threads --sample 40",
        );
        let comm = Communicator::threads(1).remove(0);
        let mut trainer =
            device::trainer::<f32>(&plan, comm, Ledger::default(), &std::sync::mpsc::channel().0).unwrap();
        let mut progress = Progress::of_rounds(1, true, Colour::Never);
        let sample = generate(&mut trainer, &plan, &[], &mut progress).unwrap().expect("a sample");
        // By hand, in sequences that are always whole: what stands behind a token says nothing of what follows it.
        let (mut tokens, mut random) = (vec![u32::from(b'\n')], Random(plan.seed));
        let mut logits = vec![0.0; 256];
        for _ in 0..40 {
            let mut row = tokens[tokens.len().saturating_sub(8)..].to_vec();
            let last = row.len() - 1;
            row.resize(8, 0);
            let batch = Batch { tokens: &row, targets: &[0; 8], rows: 1, length: 8 };
            trainer.logits(&batch, last, &mut logits).unwrap();
            tokens.push(choose(&logits, random.uniform()));
        }
        assert_eq!((sample.text, sample.tokens), (Tokenizer::Bytes.decode(&tokens[1..]), 40));
    }

    /// Of a model that has learnt nothing, so that any byte may come.
    #[test]
    fn a_text_is_over_before_the_first_token_that_ends_one_on_any_number_of_ranks() {
        let plan = |ranks| {
            plan(&format!(
                "--model nano --data random --tokenizer bytes --dtype f32 --seq 8 --micro-batch 1 --steps 1 --ranks {ranks} \
                 --transport threads --sample 40"
            ))
        };
        for mut plan in [1, 2].map(plan) {
            let sampled = |plan: &TrainPlan, ends: &[u32]| {
                let of_rank = |comm: Communicator| {
                    // Which tokens are ends is rank 0's to say.
                    let ends = if comm.rank() == 0 { ends } else { &[] };
                    let made = &std::sync::mpsc::channel().0;
                    let mut trainer = device::trainer::<f32>(plan, comm, Ledger::default(), made).unwrap();
                    let mut progress = Progress::of_rounds(1, true, Colour::Never);
                    generate(&mut trainer, plan, ends, &mut progress).unwrap().expect("a sample")
                };
                Communicator::on_threads(plan.ranks.world, Options::default(), of_rank).remove(0)
            };
            let whole = sampled(&plan, &[]);
            assert_eq!((whole.tokens, whole.remark(40)), (40, String::new()));
            let letter = whole.text.chars().filter(char::is_ascii).nth(5).expect("some ASCII");
            let (before, _) = whole.text.split_once(letter).unwrap();
            let ends = [1000, letter as u32];
            let cut = sampled(&plan, &ends);
            assert!(cut.ended && cut.text == before && cut.tokens < 40, "{:?} of {:?}", cut.text, whole.text);
            let all: Vec<u32> = (0..256).collect();
            let none = sampled(&plan, &all);
            assert_eq!((none.text.as_str(), none.tokens), ("", 0));
            // Also before one that is the last that was asked for.
            plan.sample = cut.tokens + 1;
            let last = sampled(&plan, &ends);
            assert_eq!((last.text.as_str(), last.tokens, last.ended), (before, cut.tokens, true));
        }
    }

    #[test]
    fn ranks_stop_together_when_rank_0_has_sampled_for_long_or_its_text_has_ended() {
        let (late, soon) = (2 * PATIENCE, Duration::ZERO);
        for (ended, sampled, expected) in [
            ([false, false], [late, soon], true),
            ([false, false], [soon, late], false),
            ([true, false], [soon, soon], true),
            ([false, true], [soon, soon], false),
        ] {
            let found = Communicator::on_threads(2, Options::default(), |comm| {
                enough(&comm, ended[comm.rank()], sampled[comm.rank()]).unwrap()
            });
            assert_eq!(found, [expected; 2]);
        }
    }

    #[test]
    fn a_sample_that_was_cut_short_says_so() {
        let of = |tokens, ended| Sample { text: String::new(), tokens, ended }.remark(240);
        assert_eq!(of(7, false), " (7 of 240 tokens: more take longer than 30s)");
        assert_eq!(of(7, true), " (7 of 240 tokens: the text ends there)");
        assert_eq!(of(240, false), "");
    }

    #[test]
    fn tokens_come_as_often_as_their_probability_says() {
        // Probabilities 1/4, 1/4, 1/2 at this temperature.
        let logits = [0.0, 0.0, TEMPERATURE * 2f32.ln()];
        let mut random = Random(3);
        let mut seen = [0i32; 3];
        for _ in 0..40_000 {
            seen[choose(&logits, random.uniform()) as usize] += 1;
        }
        for (count, expected) in seen.into_iter().zip([10_000, 10_000, 20_000]) {
            assert!((count - expected).abs() < 500, "{seen:?}");
        }
        assert_eq!(choose(&[f32::NEG_INFINITY, 5.0], 0.0), 1);
        assert_eq!(choose(&[5.0, f32::NEG_INFINITY], 1.0 - f64::EPSILON), 0);
    }
}
