//! The order in which a rank adds up the micro-batches of a step, as a value.
//!
//! Ranks are added in a balanced binary tree. Where micro-batches are too, A of them on W ranks make the same sum as 2A on
//! W/2 or A/2 on 2W: micro-batch a of rank r is leaf a * W + r of one tree, whose lower levels are among the ranks, as long
//! as W is a power of two. As with a binary counter, sums of 2^k micro-batches wait for their like.

use crate::config::Config;

/// Where the reduced gradient of a micro-batch goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The sum that it is added to.
    pub sum: usize,
    /// Whether it is the first there, and can be reduced into that memory.
    pub first: bool,
    /// How many sums are then added, each to the one before it, from this one on.
    pub merges: usize,
}

impl Config {
    /// Sums over micro-batches that are kept beside each other: none, where there is only one micro-batch.
    pub fn sums(&self) -> usize {
        match (self.accumulate, self.reproducible) {
            (0 | 1, _) => 0,
            (_, false) => 1,
            (micro_batches, true) => micro_batches.ilog2() as usize,
        }
    }

    /// Where that of a micro-batch goes, counted from 0. After the last, all are in the sum of number 0.
    pub fn place(&self, micro_batch: usize) -> Place {
        if !self.reproducible {
            return Place { sum: 0, first: micro_batch == 0, merges: 0 };
        }
        let last = micro_batch + 1 == self.accumulate;
        // One for each power of two that the micro-batches before are made of.
        let sums = micro_batch.count_ones() as usize;
        if sums == 0 || micro_batch.is_multiple_of(2) && !last {
            return Place { sum: sums, first: true, merges: 0 };
        }
        let merges = if last { sums } else { micro_batch.trailing_ones() as usize };
        Place { sum: sums - 1, first: false, merges: merges - 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is added to what, in words.
    fn carried_out(config: &Config) -> String {
        let mut sums = vec![String::new(); config.sums()];
        for micro_batch in 0..config.accumulate {
            let Place { sum, first, merges } = config.place(micro_batch);
            assert_eq!(first, sums[sum].is_empty(), "micro-batch {micro_batch} of {}", config.accumulate);
            sums[sum] = match first {
                true => micro_batch.to_string(),
                false => format!("({}+{micro_batch})", sums[sum]),
            };
            for upper in (sum - merges + 1..=sum).rev() {
                let added = std::mem::take(&mut sums[upper]);
                sums[upper - 1] = format!("({}+{added})", sums[upper - 1]);
            }
        }
        assert!(sums[1..].iter().all(String::is_empty), "{sums:?}");
        sums.swap_remove(0)
    }

    /// Pairs of neighbours, pairs of pairs, and so on; who has no neighbour waits for the next round.
    fn tree(mut terms: Vec<String>) -> String {
        while terms.len() > 1 {
            let pair = |pair: &[String]| match pair {
                [left, right] => format!("({left}+{right})"),
                alone => alone[0].clone(),
            };
            terms = terms.chunks(2).map(pair).collect();
        }
        terms.remove(0)
    }

    #[test]
    fn micro_batches_are_added_as_a_tree_of_them_says_in_as_few_sums_as_are_kept() {
        for accumulate in 2..=70 {
            let config = Config { accumulate, reproducible: true, ..Config::default() };
            let leaves: Vec<String> = (0..accumulate).map(|a| a.to_string()).collect();
            assert_eq!(carried_out(&config), tree(leaves.clone()));
            // None is kept in vain.
            let most = (0..accumulate).map(|a| config.place(a).sum).max().unwrap();
            assert_eq!(most + 1, config.sums());
            // Ranks' part of a tree is theirs, whichever power of two they are.
            for world in [2, 4, 8] {
                let ranks = leaves.chunks(world).map(|ranks| tree(ranks.to_vec())).collect();
                assert_eq!(tree(ranks), tree(leaves.clone()), "{accumulate} by {world} ranks");
            }
        }
    }

    #[test]
    fn otherwise_one_is_added_after_the_other() {
        let config = Config { accumulate: 4, ..Config::default() };
        assert_eq!(carried_out(&config), "(((0+1)+2)+3)");
        assert_eq!((config.sums(), Config { accumulate: 1, ..config }.sums()), (1, 0));
    }
}
