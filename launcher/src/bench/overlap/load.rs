//! What computes beside a collective.

use crate::bench::statistics::median;
use gemmkit::{MatMut, MatRef, Parallelism};
use std::time::Instant;

/// Side of the square matrices: a product of some microseconds, so that their number fits any call.
pub(super) const SIDE: usize = 48;

/// Square matrix products on the calling thread, whose operands stay in the cache.
pub(super) struct Load {
    left: Vec<f32>,
    right: Vec<f32>,
    out: Vec<f32>,
}

impl Load {
    pub fn new() -> Self {
        let matrix = |k: usize| (0..SIDE * SIDE).map(|i| ((i * k) % 7) as f32).collect();
        Load { left: matrix(3), right: matrix(5), out: vec![0.0; SIDE * SIDE] }
    }

    /// Multiplies `products` times.
    pub fn run(&mut self, products: usize) {
        for _ in 0..products {
            let left = MatRef::from_row_major(std::hint::black_box(&self.left[..]), SIDE, SIDE);
            let right = MatRef::from_row_major(&self.right, SIDE, SIDE);
            let out = MatMut::from_row_major(&mut self.out, SIDE, SIDE);
            gemmkit::gemm(1.0, left, right, 0.0, out, Parallelism::Serial);
        }
        std::hint::black_box(&self.out);
    }

    /// Seconds of one product: the median over batches.
    pub fn calibrate(&mut self) -> f64 {
        self.run(100);
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
        load.run(2);
        for (i, j) in [(0, 0), (3, 17), (SIDE - 1, SIDE - 1)] {
            let exact: f32 = (0..SIDE).map(|k| load.left[i * SIDE + k] * load.right[k * SIDE + j]).sum();
            assert_eq!(load.out[i * SIDE + j], exact);
        }
        assert!(load.calibrate() > 0.0);
    }
}
