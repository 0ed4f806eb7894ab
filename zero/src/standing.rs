//! How far a training has come, besides what its weights and moments say.

use crate::config::Config;
use crate::scaling::Scale;

/// Where a training stands.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Standing {
    /// Steps that were made, with those that were skipped.
    pub steps: u64,
    /// Of them, those that updated nothing.
    pub skipped: u64,
    /// The scale of the loss, where it is scaled.
    pub scale: Option<Scale>,
}

impl Standing {
    /// Steps that updated something.
    pub fn updates(&self) -> u64 {
        self.steps - self.skipped
    }

    /// What the loss of the next step is multiplied by.
    pub(crate) fn loss_scale(&self) -> f64 {
        self.scale.map_or(1.0, |scale| scale.scale.into())
    }

    /// The same with a scale if `config` wants one, begun where there is none yet or one that its rules cannot lead to, and else
    /// without.
    pub(crate) fn scaled(self, config: &Config) -> Self {
        let of =
            |rules| self.scale.filter(|scale| scale.follows(&rules)).unwrap_or_else(|| Scale::new(&rules));
        Standing { scale: config.scaling.map(of), ..self }
    }

    /// Counts a step that updates; the number of its update.
    pub(crate) fn update(&mut self, config: &Config) -> u64 {
        if let (Some(scale), Some(rules)) = (&mut self.scale, &config.scaling) {
            scale.keep(rules);
        }
        self.steps += 1;
        self.updates()
    }

    /// Skips a step whose gradient is not finite, if a scale is left that may do for another.
    pub(crate) fn skip(&mut self, config: &Config) -> bool {
        let (Some(scale), Some(rules)) = (&mut self.scale, &config.scaling) else { return false };
        let goes_on = scale.overflow(rules);
        if goes_on {
            (self.steps, self.skipped) = (self.steps + 1, self.skipped + 1);
        }
        goes_on
    }
}
