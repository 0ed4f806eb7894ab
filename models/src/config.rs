//! The shape of a Llama: presets by name, what makes a shape valid, and what it costs.

use crate::error::{Error, Result};
use crate::llama::{LARGEST_ANGLE, fastest};

/// The shape and constants of a Llama; all lengths in elements.
#[derive(Clone, Debug, PartialEq)]
pub struct LlamaConfig {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Transformer blocks.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; each serves `heads / kv_heads` query heads.
    pub kv_heads: usize,
    /// Width of a head; usually, but not necessarily, `hidden / heads`.
    pub head_dim: usize,
    /// Width of the feed-forward layer.
    pub ffn: usize,
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// The longest sequence.
    pub context: usize,
    /// Rotary position embedding.
    pub rope: Rope,
    /// The epsilon of RMSNorm.
    pub norm_eps: f32,
    /// Whether the head's matrix is the embedding's.
    pub tied: bool,
    /// The token whose lookups teach its row of the embedding nothing, if there is one: transformers' `pad_token_id`.
    pub padding: Option<u32>,
}

/// Rotary position embedding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// The base of the frequencies: pair i of a head of width d turns by `theta^(-2i/d)` per position.
    pub theta: f64,
    /// How the frequencies are stretched for a longer context.
    pub scaling: RopeScaling,
}

/// How rotary frequencies are stretched for a longer context.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RopeScaling {
    /// As they are.
    None,
    /// All frequencies divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3's: low frequencies divided by `factor`, high ones kept, a linear blend between.
    Llama3 {
        /// The divisor of low frequencies.
        factor: f64,
        /// Wavelengths above `original_context / low_freq_factor` are low frequencies.
        low_freq_factor: f64,
        /// Wavelengths below `original_context / high_freq_factor` are high frequencies.
        high_freq_factor: f64,
        /// The context that the model was first trained with.
        original_context: usize,
    },
}

impl Rope {
    /// Rotary embedding without stretching.
    pub const fn plain(theta: f64) -> Self {
        Rope { theta, scaling: RopeScaling::None }
    }

    /// Llama 3's, whose published models differ only in the factor.
    const fn llama3(factor: f64) -> Self {
        let scaling = RopeScaling::Llama3 {
            factor,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8192,
        };
        Rope { theta: 500_000.0, scaling }
    }

    fn validate(&self) -> Result<()> {
        // Angles are made of them in f32.
        let positive = |name: &str, x: f64| match (x as f32).is_finite() && x as f32 > 0.0 {
            true => Ok(()),
            false => Err(Error::config(format!(
                "rope {name} is {x:?}: it must be a positive number that f32 holds"
            ))),
        };
        positive("theta", self.theta)?;
        match self.scaling {
            RopeScaling::None => Ok(()),
            RopeScaling::Linear { factor } => positive("scaling factor", factor),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                positive("scaling factor", factor)?;
                positive("low_freq_factor", low_freq_factor)?;
                positive("high_freq_factor", high_freq_factor)?;
                if (high_freq_factor - low_freq_factor) as f32 <= 0.0 {
                    return Err(Error::config(format!(
                        "rope high_freq_factor is {high_freq_factor:?} and low_freq_factor {low_freq_factor:?}: \
                         the high one must be larger"
                    )));
                }
                if original_context == 0 {
                    return Err(Error::config(
                        "rope original_max_position_embeddings is 0: it must be at least 1",
                    ));
                }
                Ok(())
            }
        }
    }
}

impl LlamaConfig {
    /// The names that [`preset`](Self::preset) knows, smallest first.
    pub const PRESETS: [&str; 8] = [
        "nano",
        "baby",
        "32m",
        "llama-3.2-1b",
        "llama-2-7b",
        "llama-3.1-8b",
        "llama-3.1-70b",
        "llama-3.1-405b",
    ];

    /// A known shape by name: one of [`PRESETS`](Self::PRESETS). `nano`, `baby` and `32m` are this project's; the
    /// others are the published ones, to the constants of their config.json.
    ///
    /// # Errors
    /// An unknown name, listing the known ones.
    pub fn preset(name: &str) -> Result<Self> {
        // Ours have the constants that transformers' LlamaConfig has by default, to compare like with like.
        let ours = LlamaConfig {
            hidden: 64,
            layers: 2,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            ffn: 176,
            vocab: 256,
            context: 64,
            rope: Rope::plain(10_000.0),
            norm_eps: 1e-6,
            tied: false,
            padding: None,
        };
        let llama31 = LlamaConfig {
            hidden: 4096,
            layers: 32,
            heads: 32,
            kv_heads: 8,
            head_dim: 128,
            ffn: 14336,
            vocab: 128_256,
            context: 131_072,
            rope: Rope::llama3(8.0),
            norm_eps: 1e-5,
            tied: false,
            padding: None,
        };
        Ok(match name {
            "nano" => ours,
            "baby" => LlamaConfig {
                hidden: 128,
                layers: 4,
                heads: 4,
                kv_heads: 4,
                head_dim: 32,
                ffn: 344,
                vocab: 256,
                context: 64,
                ..ours
            },
            "32m" => LlamaConfig {
                hidden: 512,
                layers: 8,
                heads: 8,
                kv_heads: 4,
                head_dim: 64,
                ffn: 1376,
                vocab: 8192,
                context: 1024,
                ..ours
            },
            "llama-3.2-1b" => LlamaConfig {
                hidden: 2048,
                layers: 16,
                heads: 32,
                kv_heads: 8,
                head_dim: 64,
                ffn: 8192,
                rope: Rope::llama3(32.0),
                tied: true,
                ..llama31
            },
            "llama-2-7b" => LlamaConfig {
                kv_heads: 32,
                ffn: 11008,
                vocab: 32_000,
                context: 4096,
                rope: Rope::plain(10_000.0),
                ..llama31
            },
            "llama-3.1-8b" => llama31,
            "llama-3.1-70b" => LlamaConfig { hidden: 8192, layers: 80, heads: 64, ffn: 28672, ..llama31 },
            "llama-3.1-405b" => LlamaConfig { hidden: 16384, layers: 126, heads: 128, ffn: 53248, ..llama31 },
            _ => {
                return Err(Error::config(format!(
                    "unknown model '{name}': known are {}, a Hugging Face config.json, or a directory with one and its \
                     weights",
                    Self::PRESETS.join(", ")
                )));
            }
        })
    }

    /// Whether a model of this shape can be built.
    ///
    /// # Errors
    /// One sentence that names the first size that is wrong, and what would fit.
    pub fn validate(&self) -> Result<()> {
        let sizes = [
            ("hidden", self.hidden),
            ("layers", self.layers),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("ffn", self.ffn),
            ("vocab", self.vocab),
            ("context", self.context),
        ];
        for (name, size) in sizes {
            if size == 0 {
                return Err(Error::config(format!("the model's {name} is 0: it must be at least 1")));
            }
            // Layers are listed one by one, so that a corrupt configuration must not ask for billions.
            let bits = if name == "layers" { 16 } else { 30 };
            if size > 1 << bits {
                return Err(Error::config(format!(
                    "the model's {name} is {size}: at most 2^{bits} is possible"
                )));
            }
        }
        // Below this no size in bytes of weights, gradients and the optimizer's state can overflow. Those of activations
        // depend on the micro-batch, and are bounded with it.
        if self.wide_parameters() > 1 << 50 {
            return Err(Error::config(format!(
                "the model would have {} parameters: at most 2^50 are possible",
                self.wide_parameters()
            )));
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(Error::config(format!(
                "{} heads cannot share {} key/value heads evenly: kv_heads must divide heads",
                self.heads, self.kv_heads
            )));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(Error::config(format!(
                "head_dim is {}: it must be even, because rotary embedding turns pairs",
                self.head_dim
            )));
        }
        if !(self.norm_eps.is_finite() && self.norm_eps >= 0.0) {
            return Err(Error::config(format!(
                "the norm's epsilon is {:?}: it must be zero or a small positive number",
                self.norm_eps
            )));
        }
        self.rope.validate()?;
        // Sequences are no longer than either.
        let positions = self.context.min(1 << 28) as f32;
        match fastest(&self.rope, self.head_dim) * positions <= LARGEST_ANGLE {
            true => Ok(()),
            false => Err(Error::config(format!(
                "the rope turns by more than {LARGEST_ANGLE} radians within {} positions: a larger theta or scaling factor, or \
                 a shorter context, is needed",
                self.context
            ))),
        }
    }

    /// The head width of a configuration that does not give one.
    ///
    /// # Errors
    /// `heads` does not divide `hidden`.
    pub(crate) fn default_head_dim(hidden: usize, heads: usize) -> Result<usize> {
        match heads {
            0 => Err(Error::config("the model's heads is 0: it must be at least 1")),
            _ if hidden.is_multiple_of(heads) => Ok(hidden / heads),
            _ => Err(Error::config(format!(
                "hidden size {hidden} cannot be split into {heads} heads: heads must divide it"
            ))),
        }
    }

    /// Parameters, counting tied ones once.
    pub fn parameters(&self) -> u64 {
        u64::try_from(self.wide_parameters()).unwrap_or(u64::MAX)
    }

    /// Sizes of a valid model are at most 2^30, so that no product below overflows.
    fn wide_parameters(&self) -> u128 {
        let [hidden, heads, kv, dim, ffn] =
            [self.hidden, self.heads, self.kv_heads, self.head_dim, self.ffn].map(|x| x as u128);
        let attention = hidden * dim * (2 * heads + 2 * kv);
        let block = attention + 3 * hidden * ffn + 2 * hidden;
        let table = self.vocab as u128 * hidden;
        let tables = if self.tied { table } else { 2 * table };
        tables + self.layers as u128 * block + hidden
    }

    /// Floating-point operations of forward and backward per token of a sequence of `length`, by the
    /// convention of PaLM, nanoGPT and llm.c: 6 per parameter, plus 12 per layer, head width, head and
    /// position for attention (the causal half is not taken off, recomputation is not added).
    pub fn flops_per_token(&self, length: usize) -> f64 {
        let attention = 12.0 * (self.layers * self.heads * self.head_dim) as f64 * length as f64;
        6.0 * self.parameters() as f64 + attention
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_are_valid_and_have_the_published_parameter_counts() {
        let published = [
            ("nano", 125_248),
            ("baby", 857_216),
            ("32m", 31_597_056),
            ("llama-3.2-1b", 1_235_814_400),
            ("llama-2-7b", 6_738_415_616),
            ("llama-3.1-8b", 8_030_261_248),
            ("llama-3.1-70b", 70_553_706_496),
            ("llama-3.1-405b", 405_853_388_800),
        ];
        assert_eq!(published.map(|p| p.0), LlamaConfig::PRESETS);
        for (name, count) in published {
            let config = LlamaConfig::preset(name).unwrap();
            config.validate().unwrap();
            assert_eq!(config.parameters(), count, "{name}");
        }
    }

    /// Parameters say nothing of positions, of the context, or of how heads share keys and values. Those of Llama 3.1 are as in
    /// the config.json of meta-llama's repositories; the other published ones are compared where such files are read.
    #[test]
    fn presets_have_the_shapes_that_they_are_known_for() {
        let plain = Rope { theta: 1e4, scaling: RopeScaling::None };
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8192,
        };
        let llama31 = Rope { theta: 5e5, scaling };
        for (name, [hidden, layers, heads, kv_heads, head_dim, ffn, vocab, context], rope, norm_eps) in [
            ("nano", [64, 2, 4, 2, 16, 176, 256, 64], plain, 1e-6),
            ("baby", [128, 4, 4, 4, 32, 344, 256, 64], plain, 1e-6),
            ("32m", [512, 8, 8, 4, 64, 1376, 8192, 1024], plain, 1e-6),
            ("llama-3.1-8b", [4096, 32, 32, 8, 128, 14_336, 128_256, 131_072], llama31, 1e-5),
            ("llama-3.1-70b", [8192, 80, 64, 8, 128, 28_672, 128_256, 131_072], llama31, 1e-5),
            ("llama-3.1-405b", [16_384, 126, 128, 8, 128, 53_248, 128_256, 131_072], llama31, 1e-5),
        ] {
            let (tied, padding) = (false, None);
            let known = LlamaConfig {
                hidden,
                layers,
                heads,
                kv_heads,
                head_dim,
                ffn,
                vocab,
                context,
                rope,
                norm_eps,
                tied,
                padding,
            };
            assert_eq!(LlamaConfig::preset(name).unwrap(), known, "{name}");
        }
    }

    #[test]
    fn an_unknown_preset_lists_the_known_ones() {
        let text = LlamaConfig::preset("llama-9").unwrap_err().to_string();
        assert!(text.contains("'llama-9'"), "{text}");
        assert!(LlamaConfig::PRESETS.iter().all(|name| text.contains(name)), "{text}");
    }

    #[test]
    fn invalid_shapes_are_named() {
        let nano = LlamaConfig::preset("nano").unwrap();
        let llama3 = |low_freq_factor, high_freq_factor, original_context| Rope {
            theta: 1e4,
            scaling: RopeScaling::Llama3 { factor: 8.0, low_freq_factor, high_freq_factor, original_context },
        };
        let linear = |factor| Rope { theta: 1e4, scaling: RopeScaling::Linear { factor } };
        LlamaConfig { rope: linear(3e-7), ..nano.clone() }.validate().unwrap();
        let cases = [
            (LlamaConfig { layers: 0, ..nano.clone() }, "layers is 0"),
            (LlamaConfig { vocab: usize::MAX, ..nano.clone() }, "vocab is 18446744073709551615"),
            (LlamaConfig { vocab: 1 << 30, hidden: 1 << 30, ..nano.clone() }, "at most 2^50"),
            (LlamaConfig { kv_heads: 3, ..nano.clone() }, "4 heads cannot share 3"),
            (LlamaConfig { head_dim: 15, ..nano.clone() }, "head_dim is 15"),
            (LlamaConfig { norm_eps: -1e30, ..nano.clone() }, "epsilon is -1e30: it must"),
            (LlamaConfig { norm_eps: f32::NAN, ..nano.clone() }, "epsilon is NaN"),
            (LlamaConfig { rope: Rope::plain(-1.0), ..nano.clone() }, "theta is -1.0: it must"),
            (LlamaConfig { rope: Rope::plain(1e-50), ..nano.clone() }, "theta is 1e-50: it must"),
            (LlamaConfig { rope: Rope::plain(1e300), ..nano.clone() }, "theta is 1e300: it must"),
            (LlamaConfig { rope: Rope::plain(1e-44), ..nano.clone() }, "a larger theta or scaling factor"),
            (LlamaConfig { rope: linear(1e-46), ..nano.clone() }, "scaling factor is 1e-46: it must"),
            (LlamaConfig { rope: linear(1e39), ..nano.clone() }, "a positive number that f32 holds"),
            (LlamaConfig { rope: linear(2e-7), ..nano.clone() }, "radians within 64 positions"),
            (LlamaConfig { rope: llama3(1e-45, 1.1e-45, 64), ..nano.clone() }, "high one must be larger"),
            (
                LlamaConfig { rope: llama3(4e30, 1.0, 64), ..nano.clone() },
                "low_freq_factor 4e30: the high one",
            ),
            (LlamaConfig { rope: llama3(1.0, 4.0, 0), ..nano.clone() }, "original_max_position"),
        ];
        for (config, expected) in cases {
            let text = config.validate().unwrap_err().to_string();
            assert!(text.contains(expected), "{text}");
        }
        assert_eq!(LlamaConfig::default_head_dim(64, 4), Ok(16));
        assert!(LlamaConfig::default_head_dim(64, 0).is_err());
        let text = LlamaConfig::default_head_dim(64, 5).unwrap_err().to_string();
        assert!(text.contains("64") && text.contains('5'), "{text}");
    }

    #[test]
    fn flops_follow_the_convention() {
        let baby = LlamaConfig::preset("baby").unwrap();
        assert_eq!(baby.flops_per_token(64), 6.0 * 857_216.0 + 12.0 * 4.0 * 128.0 * 64.0);
    }
}
