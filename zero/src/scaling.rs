//! Scaling of the loss, for types whose smallest numbers gradients are below: f16 has none between 0 and 6e-8.
//!
//! Every gradient is multiplied with the loss, and divided before anything is made of it. Where one gets too large for its
//! type, the step is skipped: all ranks know it by the norm, which they have alike. Powers of two change no bit of what
//! neither gets too large nor too small. The rules are those of DeepSpeed's dynamic loss scale.

/// No scale grows beyond this one, with which the smallest gradient that is not 0 is infinite in f16.
const MOST: f32 = (1u128 << 64) as f32;
/// Nor is one smaller than this: what it is divided by stays finite.
const LEAST: f32 = 1.0 / MOST;

/// How the loss is scaled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scaling {
    /// The scale of the first step.
    pub initial: f32,
    /// The scale that a training ends at rather than go below.
    pub least: f32,
    /// So many steps after one that was skipped, and not the first of them, the scale doubles, and again after as many; 0
    /// leaves it as it is.
    pub window: u32,
    /// The scale is halved by the overflow of this number, at least the first; those before it are only skipped.
    pub hysteresis: u32,
    /// Whether a step that is not skipped has overflows counted anew; otherwise a doubling does.
    pub consecutive: bool,
}

impl Default for Scaling {
    fn default() -> Self {
        Scaling { initial: 65536.0, least: 1.0, window: 1000, hysteresis: 2, consecutive: false }
    }
}

impl Scaling {
    /// One scale for all steps: two overflows, one after the other, end the training.
    pub fn fixed(scale: f32) -> Self {
        Scaling { initial: scale, least: scale, window: 0, hysteresis: 2, consecutive: true }
    }

    /// The first that is no rule to go by, and what would be.
    ///
    /// # Errors
    /// The rule, and what would do.
    pub fn check(&self) -> Result<(), String> {
        match self {
            Scaling { least, .. } if !(LEAST..=MOST).contains(least) => {
                Err(format!("the least loss scale is {least:?}: it has to be from {LEAST:?} to {MOST:?}"))
            }
            Scaling { initial, least, .. } if !(*least..=MOST).contains(initial) => Err(format!(
                "the loss scale is {initial:?}: it has to be from {least:?}, the least, to {MOST:?}"
            )),
            Scaling { hysteresis: 0, .. } => {
                Err("a loss scale that is halved by the overflow of number 0: at least 1 is needed"
                    .to_owned())
            }
            _ => Ok(()),
        }
    }
}

/// Where a training with a scale stands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    /// The scale of the next step.
    pub scale: f32,
    /// Steps since the last one that was skipped.
    pub since: u32,
    /// Overflows up to the one that halves the scale.
    pub left: u32,
}

impl Scale {
    /// At the start.
    pub fn new(rules: &Scaling) -> Self {
        Scale { scale: rules.initial, since: 0, left: rules.hysteresis }
    }

    /// Whether a training can stand there.
    pub fn can_be(&self) -> bool {
        (LEAST..=MOST).contains(&self.scale) && self.left > 0
    }

    /// Whether a training by these rules can stand there.
    pub(crate) fn follows(&self, rules: &Scaling) -> bool {
        let never_grows = rules.window == 0;
        rules.least <= self.scale
            && (!never_grows || self.scale <= rules.initial)
            && self.left <= rules.hysteresis
    }

    /// After a step whose gradient was finite.
    pub(crate) fn keep(&mut self, rules: &Scaling) {
        let after = self.since;
        self.since = after.saturating_add(1);
        let grows = rules.window > 0 && after > 0 && after.is_multiple_of(rules.window);
        if grows || rules.consecutive {
            self.left = rules.hysteresis;
        }
        if grows {
            self.scale = (2.0 * self.scale).min(MOST);
        }
    }

    /// After a step whose gradient was not; whether there is another scale to go on with.
    pub(crate) fn overflow(&mut self, rules: &Scaling) -> bool {
        self.since = 0;
        if self.left > 1 {
            self.left -= 1;
            return true;
        }
        let goes_on = self.scale > rules.least;
        self.scale = (self.scale / 2.0).max(rules.least);
        goes_on
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scale_of_other_rules_is_told_by_what_these_lead_to() {
        let (rules, fixed) = (Scaling::default(), Scaling::fixed(64.0));
        let at = |scale, left| Scale { scale, since: 3, left };
        for (rules, scale, follows) in [
            (rules, at(65536.0, 2), true),
            (rules, at(1.0, 1), true),
            (rules, at(MOST, 2), true),
            (rules, at(0.5, 2), false),
            (rules, at(1.0, 3), false),
            (fixed, at(64.0, 1), true),
            (fixed, at(65536.0, 2), false),
            (fixed, at(32.0, 2), false),
        ] {
            assert_eq!(scale.follows(&rules), follows, "{scale:?} by {rules:?}");
        }
    }

    /// The scale before each step, of which those in `overflows` are skipped, and whether the last can be gone on from.
    fn scales(rules: &Scaling, overflows: &[usize], steps: usize) -> (Vec<f32>, bool) {
        let (mut scale, mut goes_on, mut seen) = (Scale::new(rules), true, Vec::new());
        for step in 0..steps {
            seen.push(scale.scale);
            match overflows.contains(&step) {
                true => goes_on = scale.overflow(rules),
                false => scale.keep(rules),
            }
        }
        (seen, goes_on)
    }

    /// Overflows in steps 5 and 6 with a hysteresis of 1, in 0, 2, 4 and 5 with one of 2 and with one that is consecutive.
    const EXPECTED: [[f32; 12]; 3] = [
        [8.0, 8.0, 8.0, 16.0, 16.0, 32.0, 16.0, 8.0, 8.0, 8.0, 16.0, 16.0],
        [8.0, 8.0, 8.0, 4.0, 4.0, 2.0, 1.0, 1.0, 1.0, 2.0, 2.0, 4.0],
        [8.0, 8.0, 8.0, 8.0, 8.0, 8.0, 4.0, 4.0, 4.0, 8.0, 8.0, 16.0],
    ];

    /// The expected ones are those of DeepSpeed 0.19.8: `DynamicLossScaler(8, 2, 1, hysteresis, consecutive)` of
    /// `deepspeed.runtime.fp16.loss_scaler`, whose `cur_scale` is printed before `update_scale(step in overflows)`.
    #[test]
    fn scales_go_as_deepspeeds_do() {
        let rules = Scaling { initial: 8.0, least: 1.0, window: 2, hysteresis: 1, consecutive: false };
        let (seen, goes_on) = scales(&rules, &[5, 6], 12);
        assert_eq!(seen, EXPECTED[0]);
        assert!(goes_on);
        for (expected, consecutive) in [(1, false), (2, true)] {
            let rules = Scaling { hysteresis: 2, consecutive, ..rules };
            assert_eq!(scales(&rules, &[0, 2, 4, 5], 12).0, EXPECTED[expected], "{consecutive}");
        }
    }

    #[test]
    fn the_least_scale_is_the_last() {
        let rules = Scaling { initial: 4.0, least: 2.0, hysteresis: 1, ..Scaling::default() };
        assert_eq!(scales(&rules, &[0], 2), (vec![4.0, 2.0], true));
        assert!(!scales(&rules, &[0, 1], 2).1);
        // What is no power of two of the least stops at it as well.
        let rules = Scaling { least: 3.0, ..rules };
        assert_eq!(scales(&rules, &[0], 2), (vec![4.0, 3.0], true));
    }

    #[test]
    fn a_fixed_scale_stays_and_bears_single_overflows() {
        let rules = Scaling::fixed(128.0);
        assert_eq!(scales(&rules, &[1, 3, 5], 5000), (vec![128.0; 5000], true));
        assert!(!scales(&rules, &[1, 3, 4], 5).1);
    }

    #[test]
    fn a_scale_does_not_grow_without_end() {
        let rules = Scaling { window: 1, ..Scaling::default() };
        assert_eq!(scales(&rules, &[], 300).0[299], MOST);
    }

    #[test]
    fn rules_make_sense_or_say_why_not() {
        assert_eq!(Scaling::default().check(), Ok(()));
        assert_eq!(Scaling::fixed(0.5).check(), Ok(()));
        let default = Scaling::default();
        for (rules, words) in [
            (Scaling::fixed(0.0), "the least loss scale is 0.0"),
            (Scaling::fixed(f32::NAN), "to 1.8446744e19"),
            (Scaling { least: 1e-40, ..default }, "from 5.421011e-20"),
            (Scaling { initial: 0.5, ..default }, "from 1.0, the least, to"),
            (Scaling { initial: f32::INFINITY, ..default }, "the loss scale is inf"),
            (Scaling { hysteresis: 0, ..default }, "number 0"),
        ] {
            let said = rules.check().unwrap_err();
            assert!(said.contains(words), "{said}");
        }
    }
}
