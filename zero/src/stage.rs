//! The ZeRO stage as data. Everything else asks these questions and never which number it is.

use std::fmt;
use std::str::FromStr;

/// What the ranks divide among themselves instead of each holding all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stage {
    level: u8,
    /// Each rank keeps optimizer state for its shard only, and publishes the parameters it updated.
    pub shards_optimizer: bool,
    /// Each rank keeps reduced gradients of its shard only; whole gradients live in shared slots.
    pub shards_gradients: bool,
    /// Each rank keeps its shard of the parameters only; whole units are gathered when they are used.
    pub shards_parameters: bool,
}

impl Stage {
    /// All stages in order.
    pub const ALL: [Stage; 4] = [Stage::new(0), Stage::new(1), Stage::new(2), Stage::new(3)];

    const fn new(level: u8) -> Self {
        Stage {
            level,
            shards_optimizer: level >= 1,
            shards_gradients: level >= 2,
            shards_parameters: level >= 3,
        }
    }

    /// The number that DeepSpeed gives it.
    pub fn level(self) -> u8 {
        self.level
    }
}

impl TryFrom<u8> for Stage {
    type Error = String;

    fn try_from(level: u8) -> Result<Self, String> {
        Stage::ALL
            .get(level as usize)
            .copied()
            .ok_or(format!("ZeRO stage {level} does not exist: 0, 1, 2 or 3"))
    }
}

impl FromStr for Stage {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let level: u8 = s.parse().map_err(|_| format!("ZeRO stage '{s}' does not exist: 0, 1, 2 or 3"))?;
        Stage::try_from(level)
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.level)
    }
}
