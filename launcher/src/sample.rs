//! A sample of text from the trained model.

use crate::failure::Result;
use crate::plan::TrainPlan;
use collectives::Float;
use models::Batch;
use zero::Trainer;

/// Divides logits before sampling: below 1, likely tokens become likelier.
const TEMPERATURE: f32 = 0.8;
/// What the text starts from.
const START: &str = "\n";

/// Generates `plan.sample` tokens and gives their text. Every rank calls it: on stage 3 they hold the model
/// together. None when no sample was asked for, or nobody knows which text tokens are.
pub fn generate<T: Float>(trainer: &mut Trainer<T>, plan: &TrainPlan) -> Result<Option<String>> {
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
    for _ in 0..plan.sample {
        let window = &tokens[tokens.len().saturating_sub(plan.batch.length)..];
        let length = window.len();
        let batch = Batch { tokens: window, targets: &targets[..length], rows: 1, length };
        trainer.logits(&batch, length - 1, &mut logits)?;
        tokens.push(choose(&logits[..known], random.uniform()));
    }
    Ok(Some(tokenizer.decode(&tokens[start..])))
}

/// The token at which the cumulative probability passes `uniform`.
fn choose(logits: &[f32], uniform: f64) -> u32 {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |logit: f32| f64::from((logit - most) / TEMPERATURE).exp();
    let mut left = uniform * logits.iter().map(|&l| weight(l)).sum::<f64>();
    for (token, &logit) in logits.iter().enumerate() {
        left -= weight(logit);
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
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
