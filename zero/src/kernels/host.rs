//! On the host, with all threads of the pool that the caller is in.

use super::{Kernels, Update};
use crate::error::Result;
use crate::exact::ExactSum;
use crate::grads::Reduced;
use crate::optimizer::adamw::Part;
use crate::plan::NORM_BLOCK;
use collectives::{Buffer, Float, View, ViewMut};
use models::cuda::{Coefficients, NORM_LANES};

/// Everything in memory of the host.
pub struct Host;

/// As the models', for those that share generic code.
#[cfg(debug_assertions)]
#[used]
static COMPILED: (Seen<f32>, Seen<collectives::bf16>, Seen<collectives::f16>) =
    (|host| host, |host| host, |host| host);
#[cfg(debug_assertions)]
type Seen<T> = fn(&Host) -> &dyn Kernels<T>;

impl<T: Float> Kernels<T> for Host {
    fn state(&mut self, len: usize) -> Result<Buffer<f32>> {
        Ok(Buffer::try_zeroed(len)?)
    }

    fn clear(&mut self, out: ViewMut<'_, T>) -> Result<()> {
        out.host().fill(T::default());
        Ok(())
    }

    fn add(&mut self, sum: ViewMut<'_, f32>, x: View<'_, f32>) -> Result<()> {
        parted(sum.host(), x.host(), add);
        Ok(())
    }

    fn round(&mut self, from: View<'_, f32>, to: ViewMut<'_, T>) -> Result<()> {
        parted(to.host(), from.host(), round);
        Ok(())
    }

    fn clear_words(&mut self, words: ViewMut<'_, u64>) -> Result<()> {
        words.host().fill(0);
        Ok(())
    }

    fn squares(&mut self, gradient: Reduced<'_, T>, sum: ViewMut<'_, u64>) -> Result<()> {
        let mut squares = match gradient {
            Reduced::Stored(g) => sum_of_squares::<T, T>(g.host()),
            Reduced::Wide(g) => sum_of_squares::<T, f32>(g.host()),
        };
        let sum = sum.host();
        squares.merge(sum);
        sum.copy_from_slice(squares.words());
        Ok(())
    }

    fn update(&mut self, bucket: Update<'_, T>, _: Option<Reduced<'_, T>>) -> Result<()> {
        match bucket.gradient {
            Reduced::Stored(gradient) => on_host(bucket, gradient.host()),
            Reduced::Wide(gradient) => on_host(bucket, gradient.host()),
        }
        Ok(())
    }

    fn set(&mut self, values: &[f32], master: Option<ViewMut<'_, f32>>, param: ViewMut<'_, T>) -> Result<()> {
        if let Some(master) = master {
            master.host().copy_from_slice(values);
        }
        round(param.host(), values);
        Ok(())
    }

    fn put(&mut self, values: &[u64], to: ViewMut<'_, u64>) -> Result<()> {
        to.host().copy_from_slice(values);
        Ok(())
    }

    fn numbers<'a>(&'a mut self, values: View<'a, u64>) -> Result<&'a [u64]> {
        Ok(values.host())
    }

    fn elements<'a>(&'a mut self, values: View<'a, T>) -> Result<&'a [T]> {
        Ok(values.host())
    }

    fn load(&mut self, values: &[f32], to: ViewMut<'_, f32>) -> Result<()> {
        to.host().copy_from_slice(values);
        Ok(())
    }

    fn floats<'a>(&'a mut self, values: View<'a, f32>) -> Result<&'a [f32]> {
        Ok(values.host())
    }
}

/// Updates a bucket whose arrays, but for the gradient that is given instead, are the host's.
pub(super) fn on_host<T: Float, G: Float>(bucket: Update<'_, T>, gradient: &[G]) {
    let Update { coefficients, master, m, v, param, ranges, .. } = bucket;
    let mut master = master.map(ViewMut::host);
    let (m, v, param) = (m.host(), v.host(), param.host());
    for (range, keep) in ranges {
        let part = Part {
            gradient: &gradient[range.clone()],
            master: master.as_mut().map(|master| &mut master[range.clone()]),
            m: &mut m[range.clone()],
            v: &mut v[range.clone()],
            param: &mut param[range.clone()],
        };
        part.update(&Coefficients { keep: *keep, ..*coefficients });
    }
}

/// Elements that are worth another thread.
const GRAIN: usize = 64 * NORM_BLOCK;

/// Whether work on `elements` is divided between the threads of the pool that this thread is in, if any.
fn divided(elements: usize) -> bool {
    elements > GRAIN && rayon::current_thread_index().is_some()
}

/// `work` with all threads: which of them takes an element changes no bit.
fn parted<A: Send, B: Sync>(out: &mut [A], x: &[B], work: fn(&mut [A], &[B])) {
    if divided(out.len()) {
        let middle = out.len() / 2;
        let ((low, high), (first, second)) = (out.split_at_mut(middle), x.split_at(middle));
        rayon::join(|| parted(low, first, work), || parted(high, second, work));
    } else {
        work(out, x);
    }
}

/// The sum of squares over whole blocks, each element rounded to `T` first, with all threads: that of blocks has an order, and
/// theirs needs none.
fn sum_of_squares<T: Float, G: Float>(g: &[G]) -> ExactSum {
    if divided(g.len()) {
        let (low, high) = g.split_at(g.len() / NORM_BLOCK / 2 * NORM_BLOCK);
        let (mut sum, other) = rayon::join(|| sum_of_squares::<T, G>(low), || sum_of_squares::<T, G>(high));
        sum.merge(other.words());
        return sum;
    }
    let (mut sum, mut of_blocks) = (ExactSum::ZERO, [0.0; GRAIN / NORM_BLOCK]);
    for part in g.chunks(GRAIN) {
        let of_blocks = &mut of_blocks[..part.len() / NORM_BLOCK];
        squares::<T, G>(of_blocks, part);
        of_blocks.iter().for_each(|x| sum.add(*x));
    }
    sum
}

#[inline(always)]
fn add_body(sum: &mut [f32], x: &[f32]) {
    for (s, x) in sum.iter_mut().zip(x) {
        *s += x;
    }
}

#[inline(always)]
fn round_body<T: Float>(out: &mut [T], x: &[f32]) {
    for (o, x) in out.iter_mut().zip(x) {
        *o = T::from_f32(*x);
    }
}

collectives::simd_dispatch! {
    fn add(sum: &mut [f32], x: &[f32]) = add_body;
    pub(super) fn round<T: Float>(out: &mut [T], x: &[f32]) = round_body;
}

/// Sums of squares of the blocks of `g`, each element rounded to `T` first.
#[inline(always)]
fn squares_body<T: Float, G: Float>(out: &mut [f64], g: &[G]) {
    for (block, out) in g.chunks_exact(NORM_BLOCK).zip(out) {
        let mut lanes = [0f64; NORM_LANES];
        for row in block.chunks_exact(NORM_LANES) {
            for (lane, x) in lanes.iter_mut().zip(row) {
                let x = f64::from(T::from_f32(x.to_f32()).to_f32());
                *lane += x * x;
            }
        }
        let mut width = NORM_LANES / 2;
        while width > 0 {
            for i in 0..width {
                lanes[i] += lanes[i + width];
            }
            width /= 2;
        }
        *out = lanes[0];
    }
}

collectives::simd_dispatch! {
    fn squares<T: Float, G: Float>(out: &mut [f64], g: &[G]) = squares_body;
}

#[cfg(test)]
mod tests {
    use super::*;
    use collectives::bf16;

    #[test]
    fn threads_change_no_bit_of_sums() {
        let x: Vec<f32> = (0..3 * GRAIN + 5).map(|i| (i as f32).sin()).collect();
        let run = |threads: usize| {
            let mut sum: Vec<f32> = x.iter().map(|x| 1.0 - x).collect();
            let mut rounded = vec![bf16::ZERO; x.len()];
            let mut squared = ExactSum::ZERO;
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut work = || {
                parted(&mut sum, &x, add);
                parted(&mut rounded, &sum, round);
                squared = sum_of_squares::<bf16, f32>(&sum[..3 * GRAIN]);
            };
            if threads > 1 {
                pool.install(work)
            } else {
                work()
            }
            let bits = sum.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            (bits, rounded, squared)
        };
        assert_eq!(run(1), run(3));
    }
}
