//! What computes beside a collective.

use crate::bench::statistics::median;
use crate::failure::Result;
use gemmkit::{MatMut, MatRef, Parallelism};
use std::time::{Duration, Instant};

/// Sides of the square matrices: products of some microseconds, and shorter ones beside calls that take no longer.
pub(super) const SIDES: [usize; 2] = [48, 16];

/// So many of the longer products at least fit a call that is not too short for them.
const FEWEST: f64 = 10.0;

/// How long a processor computes before its products are timed: its clock and its caches settle only then.
const SETTLING: Duration = Duration::from_millis(20);

/// Square matrix products on the calling thread, whose operands stay in the cache.
pub(super) struct Load {
    side: usize,
    left: Vec<f32>,
    right: Vec<f32>,
    out: Vec<f32>,
}

impl Load {
    /// The longer products, as far as any.
    pub fn new() -> Self {
        let [side, _] = SIDES;
        let matrix = |k: usize| (0..side * side).map(|i| ((i * k) % 7) as f32).collect();
        Load { side, left: matrix(3), right: matrix(5), out: vec![0.0; side * side] }
    }

    /// Side of its matrices.
    pub fn side(&self) -> usize {
        self.side
    }

    /// Multiplies `products` times.
    pub fn run(&mut self, products: usize) {
        let side = self.side;
        let all = side * side;
        for _ in 0..products {
            let left = MatRef::from_row_major(std::hint::black_box(&self.left[..all]), side, side);
            let right = MatRef::from_row_major(&self.right[..all], side, side);
            let out = MatMut::from_row_major(&mut self.out[..all], side, side);
            gemmkit::gemm(1.0, left, right, 0.0, out, Parallelism::Serial);
        }
        std::hint::black_box(&self.out);
    }

    /// Takes the products that suit a call of so many seconds, and gives how many of them take as long, as far as their
    /// time alone says. `mean` is that of the ranks, which compute the same.
    ///
    /// # Errors
    /// Those of `mean`.
    pub fn suit(&mut self, call: f64, mean: impl Fn(f64) -> Result<f64>) -> Result<usize> {
        [self.side, _] = SIDES;
        let begun = Instant::now();
        while begun.elapsed() < SETTLING {
            self.run(10);
        }
        let mut product = mean(self.product())?;
        if call < FEWEST * product {
            [_, self.side] = SIDES;
            product = mean(self.product())?;
        }
        Ok(((call / product).round() as usize).max(1))
    }

    /// Seconds of one product: the median over batches.
    fn product(&mut self) -> f64 {
        let batch = |load: &mut Load| {
            let start = Instant::now();
            load.run(50);
            start.elapsed().as_secs_f64() / 50.0
        };
        median(&(0..9).map(|_| batch(self)).collect::<Vec<_>>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_products() {
        let mut load = Load::new();
        for side in SIDES {
            load.side = side;
            load.run(2);
            for (i, j) in [(0, 0), (3, 7), (side - 1, side - 1)] {
                let exact: f32 = (0..side).map(|k| load.left[i * side + k] * load.right[k * side + j]).sum();
                assert_eq!(load.out[i * side + j], exact);
            }
            assert!(load.product() > 0.0);
        }
    }

    #[test]
    fn short_calls_have_short_products() {
        let mut load = Load::new();
        let of =
            |load: &mut Load, call: f64| load.suit(call, |product| Ok(product.clamp(1e-6, 2e-6))).unwrap();
        assert!(of(&mut load, 1.0) >= 500_000 && load.side() == SIDES[0]);
        assert!(of(&mut load, 5e-6) <= 5 && load.side() == SIDES[1]);
        assert!(of(&mut load, 1.0) >= 500_000 && load.side() == SIDES[0]);
        assert_eq!(of(&mut load, 0.0), 1);
    }
}
