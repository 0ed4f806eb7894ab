//! On the host, with all threads of the pool that the caller is in.

use super::{Kernels, Update};
use crate::error::Result;
use crate::grads::Reduced;
use crate::optimizer::adamw::Part;
use crate::plan::NORM_BLOCK;
use collectives::{Buffer, Float, View, ViewMut};

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
        parted(sum.host(), x.host(), 1, add);
        Ok(())
    }

    fn round(&mut self, from: View<'_, f32>, to: ViewMut<'_, T>) -> Result<()> {
        parted(to.host(), from.host(), 1, round);
        Ok(())
    }

    fn squares(&mut self, gradient: Reduced<'_, T>, out: ViewMut<'_, f64>) -> Result<()> {
        match gradient {
            Reduced::Stored(g) => parted(out.host(), g.host(), NORM_BLOCK, squares::<T, T>),
            Reduced::Wide(g) => parted(out.host(), g.host(), NORM_BLOCK, squares::<T, f32>),
        }
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

    fn put(&mut self, values: &[f64], to: ViewMut<'_, f64>) -> Result<()> {
        to.host().copy_from_slice(values);
        Ok(())
    }

    fn numbers<'a>(&'a mut self, values: View<'a, f64>) -> Result<&'a [f64]> {
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
        part.update(coefficients, *keep);
    }
}

/// Elements that are worth another thread.
const GRAIN: usize = 64 * NORM_BLOCK;

/// `work` with all threads of the pool that this thread is in, if any, for results that are of `each` elements of `x` each:
/// which thread takes one changes no bit.
fn parted<A: Send, B: Sync>(out: &mut [A], x: &[B], each: usize, work: fn(&mut [A], &[B])) {
    if out.len() * each > GRAIN && rayon::current_thread_index().is_some() {
        let (low, high) = out.split_at_mut(out.len() / 2);
        let (first, second) = x.split_at(low.len() * each);
        rayon::join(|| parted(low, first, each, work), || parted(high, second, each, work));
    } else {
        work(out, x);
    }
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

/// Lanes of a block's sum: fixed, so that every instruction set adds in the same order.
const LANES: usize = 16;

/// Sums of squares of the blocks of `g`, each element rounded to `T` first.
#[inline(always)]
fn squares_body<T: Float, G: Float>(out: &mut [f64], g: &[G]) {
    for (block, out) in g.chunks_exact(NORM_BLOCK).zip(out) {
        let mut lanes = [0f64; LANES];
        for row in block.chunks_exact(LANES) {
            for (lane, x) in lanes.iter_mut().zip(row) {
                let x = f64::from(T::from_f32(x.to_f32()).to_f32());
                *lane += x * x;
            }
        }
        let mut width = LANES / 2;
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
            let mut squared = vec![0f64; x.len() / NORM_BLOCK];
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut work = || {
                parted(&mut sum, &x, 1, add);
                parted(&mut rounded, &sum, 1, round);
                parted(&mut squared, &sum, NORM_BLOCK, squares::<bf16, f32>);
            };
            if threads > 1 {
                pool.install(work)
            } else {
                work()
            }
            let bits = sum.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            (bits, rounded, squared.iter().map(|x| x.to_bits()).collect::<Vec<_>>())
        };
        assert_eq!(run(1), run(3));
    }
}
