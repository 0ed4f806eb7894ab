//! Whether the tokens of texts fit in memory.

use crate::failure::{Failure, Result};
use crate::human;

/// Where they have to fit.
pub(super) struct Room {
    /// Bytes of the texts.
    pub(super) text: u64,
    /// How many keep their tokens.
    pub(super) ranks: u64,
    /// Bytes of memory.
    pub(super) have: u64,
}

impl Room {
    /// Whether so many bytes fit, once for each rank.
    pub(super) fn check(&self, bytes: u64) -> Result<()> {
        let by = match self.ranks {
            1 => String::new(),
            ranks => format!(" by each of {ranks} ranks"),
        };
        match bytes.saturating_mul(self.ranks) <= self.have {
            true => Ok(()),
            false => Err(Failure::usage(format!(
                "--data has {} of text, whose tokens are kept in memory{by}, and this machine has {}: 'caravan \
                 tokenize' makes a token file of it, which is read from the disk",
                human::bytes(self.text),
                human::bytes(self.have)
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_whose_tokens_do_not_fit_in_memory_are_refused() {
        let of = |ranks, gib: u64| Room { text: 17 << 30, ranks, have: 32 << 30 }.check(gib << 30);
        of(1, 0).unwrap();
        of(1, 32).unwrap();
        of(2, 16).unwrap();
        let e = of(1, 33).unwrap_err();
        assert!(e.code() == 2 && e.to_string().contains("has 17.0 GiB of text"), "{e}");
        assert!(
            e.to_string().contains("in memory, and this machine has 32.0 GiB: 'caravan tokenize'"),
            "{e}"
        );
        let e = of(4, 9).unwrap_err().to_string();
        assert!(e.contains("in memory by each of 4 ranks, and"), "{e}");
    }
}
