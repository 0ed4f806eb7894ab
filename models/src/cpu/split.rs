//! How the threads of a rank divide their work: no bit of a result depends on it.

use super::kernel::{Isa, Kernel, Task};
use std::ops::Range;

/// Rows and columns of a kernel's tiles: parts of a product that begin and end elsewhere have tiles that are not full.
pub(super) fn tile(isa: Isa) -> (usize, usize) {
    struct Asked<'a>(&'a mut (usize, usize));
    impl Task for Asked<'_> {
        // Every kernel has one.
        #[cfg(target_arch = "x86_64")]
        const F32: bool = true;

        #[inline(always)]
        fn run<K: Kernel>(self) {
            *self.0 = (K::MR, K::NR);
        }
    }
    let mut tile = (1, 1);
    isa.run(Asked(&mut tile));
    tile
}

/// How many parts to split rows and columns of a result into for about `parts` in all, each as square as possible, when they are
/// cut between tiles.
pub(super) fn grid(
    rows: usize,
    columns: usize,
    parts: usize,
    (high, wide): (usize, usize),
) -> (usize, usize) {
    let fits = |across: usize| across.min(columns.div_ceil(wide)).max(1);
    (1..=parts)
        .map(|down| (down.min(rows.div_ceil(high)).max(1), fits(parts / down)))
        .max_by_key(|&(down, across)| {
            let side = (rows / down).min(columns / across);
            (down * across, side)
        })
        .unwrap_or((1, 1))
}

/// Part `i` of `len`, cut into `parts` at multiples of `step`.
pub(super) fn cut(len: usize, parts: usize, step: usize, i: usize) -> Range<usize> {
    let steps = len.div_ceil(step);
    (steps * i / parts * step).min(len)..(steps * (i + 1) / parts * step).min(len)
}

/// In how many pieces the heads of `groups` groups of `group` heads are computed by `threads` threads: so that the one with
/// most to do has least, and no more of them than that takes.
pub(super) fn pieces(groups: usize, group: usize, threads: usize) -> usize {
    let longest = |pieces: &usize| (groups * pieces).div_ceil(threads) * group.div_ceil(*pieces);
    (1..=group).min_by_key(longest).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grids_never_exceed_the_matrix_or_lose_a_part() {
        for (m, n, threads) in [(1, 1, 8), (1024, 512, 2), (1024, 512, 7), (28, 4096, 16), (5, 33, 3)] {
            for (high, wide) in [(14, 32), (32, 32), (6, 16)] {
                let (down, across) = grid(m, n, threads, (high, wide));
                assert!(down * across <= threads && down * across >= 1);
                let rows: Vec<_> = (0..down).map(|i| cut(m, down, high, i)).collect();
                let columns: Vec<_> = (0..across).map(|i| cut(n, across, wide, i)).collect();
                for (parts, len, step) in [(rows, m, high), (columns, n, wide)] {
                    assert!(
                        parts.iter().all(|part| part.start.is_multiple_of(step)),
                        "whole tiles but the last"
                    );
                    assert!(parts.windows(2).all(|two| two[0].end == two[1].start));
                    assert_eq!((parts[0].start, parts[parts.len() - 1].end), (0, len));
                }
            }
        }
    }

    #[test]
    fn each_kernel_says_its_tile() {
        assert_eq!(tile(Isa::Portable), (8, 16));
        #[cfg(target_arch = "x86_64")]
        for isa in [Isa::Amx, Isa::AmxOfTwo, Isa::AmxOfThree].into_iter().filter(|isa| isa.available()) {
            assert_eq!(tile(isa), (32, 32), "{isa:?}");
        }
    }
}
