//! Softmax of a few rows of scores side by side: a single row is one long chain of dependent operations, and a processor
//! does several at once only if they stand next to each other.

use super::super::math::{LANES, exp, tree, upper};

/// Rows side by side; it divides [`LANES`].
pub(super) const ABREAST: usize = 4;

/// One vector of each row.
type Vectors = [f32; ABREAST * LANES];

/// [`ABREAST`] rows of scores, each up to the vector that holds the row's own key: which is the same vector for all of
/// them, because the first row's number is a multiple of their count.
pub(super) struct Abreast<'a> {
    scores: &'a mut [[f32; LANES]],
    /// Vectors between rows.
    stride: usize,
    /// Vectors that are seen.
    seen: usize,
    /// The place of the first row's own key in the last of them.
    own: usize,
}

impl<'a> Abreast<'a> {
    /// Rows from `row` on of `scores`, whose rows are `stride` elements apart, a multiple of a vector. The first sees the
    /// keys up to `key`.
    #[inline(always)]
    pub(super) fn new(scores: &'a mut [f32], stride: usize, row: usize, key: usize) -> Self {
        debug_assert!(stride.is_multiple_of(LANES) && key.is_multiple_of(ABREAST));
        let (scores, _) = scores[row * stride..(row + ABREAST) * stride].as_chunks_mut();
        Abreast { scores, stride: stride / LANES, seen: key / LANES + 1, own: key % LANES }
    }

    #[inline(always)]
    fn load(&self, vector: usize) -> Vectors {
        let mut all = [0.0; ABREAST * LANES];
        for (i, x) in all.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            *x = self.scores[i * self.stride + vector];
        }
        all
    }

    #[inline(always)]
    fn store(&mut self, vector: usize, all: &Vectors) {
        for (i, x) in all.as_chunks::<LANES>().0.iter().enumerate() {
            self.scores[i * self.stride + vector] = *x;
        }
    }

    /// Makes what a row does not see `to`, up to the end of its last vector, and 0 in the vector after that: other rows
    /// of its tile see less than a vector more.
    #[inline(always)]
    pub(super) fn mask(&mut self, to: f32) {
        let mut last = self.load(self.seen - 1);
        for (i, row) in last.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
            for (l, x) in row.iter_mut().enumerate() {
                *x = if l <= self.own + i { *x } else { to };
            }
        }
        self.store(self.seen - 1, &last);
        if self.seen < self.stride {
            self.store(self.seen, &[0.0; ABREAST * LANES]);
        }
    }

    /// The largest element of each row.
    #[inline(always)]
    pub(super) fn largest(&self) -> [f32; ABREAST] {
        let mut most = [f32::NEG_INFINITY; ABREAST * LANES];
        for v in 0..self.seen {
            for (most, x) in most.iter_mut().zip(self.load(v)) {
                *most = if x > *most { x } else { *most };
            }
        }
        each(&most, upper)
    }

    /// Replaces each x by `exp(x * scale - shift)` and gives the sum of each row.
    #[inline(always)]
    pub(super) fn exp_sum(&mut self, scale: f32, shift: [f32; ABREAST]) -> [f32; ABREAST] {
        let (shift, mut sums) = (spread(shift), [0.0; ABREAST * LANES]);
        for v in 0..self.seen {
            let mut x = self.load(v);
            for ((x, shift), sum) in x.iter_mut().zip(&shift).zip(&mut sums) {
                *x = exp(*x * scale - shift);
                *sum += *x;
            }
            self.store(v, &x);
        }
        each(&sums, tree)
    }

    /// Replaces scores by probabilities, and gradients of probabilities `d` by those of scores.
    #[inline(always)]
    pub(super) fn differentiate(
        &mut self,
        d: &mut Abreast<'_>,
        scale: f32,
        log_sum: [f32; ABREAST],
        delta: [f32; ABREAST],
    ) {
        let (log_sum, delta) = (spread(log_sum), spread(delta));
        for v in 0..self.seen {
            let (mut p, mut g) = (self.load(v), d.load(v));
            for (((p, g), log_sum), delta) in p.iter_mut().zip(&mut g).zip(&log_sum).zip(&delta) {
                *p = exp(*p * scale - log_sum);
                *g = *p * (*g - delta) * scale;
            }
            self.store(v, &p);
            d.store(v, &g);
        }
    }
}

/// Each row's value, for all its lanes.
#[inline(always)]
fn spread(values: [f32; ABREAST]) -> Vectors {
    std::array::from_fn(|i| values[i / LANES])
}

#[inline(always)]
fn each(all: &Vectors, fold: impl Fn([f32; LANES]) -> f32) -> [f32; ABREAST] {
    std::array::from_fn(|i| fold(all.as_chunks::<LANES>().0[i]))
}
