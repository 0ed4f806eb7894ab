//! What the optimizer does to a shard: AdamW, norms, casts. Elementwise, or with the bits of the CPU's.

use super::elementwise::threads_for;
use super::sources;
use collectives::device::{Launch, Module, address, aligned};
use collectives::{DType, Element, Float, View, ViewMut};

const THREADS: usize = 256;
/// Elements of one thread of AdamW.
const ADAMW_AT_ONCE: usize = 4;

/// What is the same for every element of one step of AdamW, or of a range of them.
#[derive(Clone, Copy, Debug)]
pub struct Coefficients {
    /// 1 - beta1
    pub one_minus_beta1: f32,
    /// beta2
    pub beta2: f32,
    /// 1 - beta2
    pub one_minus_beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// lr / (1 - beta1^t)
    pub step_size: f32,
    /// 1 / sqrt(1 - beta2^t)
    pub root_correction: f32,
    /// What is kept of the weights: 1 - lr * weight_decay, or 1 where none decays.
    pub keep: f32,
    /// What the gradient is multiplied by: clipping's factor over the scale of the loss.
    pub gradient_factor: f32,
}

/// One step of AdamW on elements `range` of a shard, whose arrays are equally long. `G` is `T`, or f32 for a
/// gradient that was kept wide. Without `master`, the parameters are their own.
pub fn adamw<'a, T: Float, G: Float>(
    c: &Coefficients,
    grad: View<'a, G>,
    master: Option<ViewMut<'a, f32>>,
    m: ViewMut<'a, f32>,
    v: ViewMut<'a, f32>,
    param: ViewMut<'a, T>,
    range: std::ops::Range<usize>,
) -> Launch<'a> {
    let n = param.len();
    let same =
        grad.len() == n && m.len() == n && v.len() == n && master.as_ref().is_none_or(|w| w.len() == n);
    assert!(same && range.end <= n && range.start <= range.end, "arrays of one shard, and a range of it");
    let wide = kept_wide::<T, G>();
    let start = [address(grad), address(m.as_view()), address(v.as_view()), address(param.as_view())];
    let master_start = master.as_ref().map_or(0, |w| address(w.as_view()));
    assert!(aligned(&start) && aligned(&[master_start]), "shards that start at 16-byte boundaries");
    let threads =
        range.end.saturating_sub(range.start / ADAMW_AT_ONCE * ADAMW_AT_ONCE).div_ceil(ADAMW_AT_ONCE);
    let blocks = if range.is_empty() { 0 } else { threads.div_ceil(THREADS) };
    let launch = Launch::new(Module::new(&sources::ADAMW, T::DTYPE), "adamw", [blocks, 1, 1], THREADS)
        .write(param)
        .maybe_write(master)
        .write(m)
        .write(v)
        .read(grad)
        .long(range.start)
        .long(range.end)
        .flag(wide);
    let values = [
        c.one_minus_beta1,
        c.beta2,
        c.one_minus_beta2,
        c.eps,
        c.step_size,
        c.root_correction,
        c.keep,
        c.gradient_factor,
    ];
    values.into_iter().fold(launch, Launch::float)
}

/// Whether gradients of `G` for parameters of `T` were kept in f32, and have to be rounded first.
fn kept_wide<T: Float, G: Float>() -> bool {
    assert!(G::DTYPE == T::DTYPE || G::DTYPE == DType::F32, "gradients of {} for {}", G::DTYPE, T::DTYPE);
    G::DTYPE != T::DTYPE
}

/// A first moment below this is zero. Of a weight whose gradient stays zero, as the embedding's of a token that does not
/// come again, both moments would become subnormal and stay so, because what is taken off them is rounded away; and with
/// subnormal numbers processors are many times slower.
pub const LEAST_MOMENT: f32 = 1e-30;

/// Elements of a block of [`squares`], over which one partial sum runs.
pub const NORM_BLOCK: usize = 1024;

/// Lanes of a block's sum, which take its elements in turn: fixed, so that every instruction set adds in the same order.
pub const NORM_LANES: usize = 16;

/// Words of the sum of [`squares`]: 20 digits of 32 bits, the first of which counts 2^-298, then how many of the blocks' sums
/// were infinite, and above 32 bits how many were no number.
pub const SQUARES_WORDS: usize = 21;

/// Adds to `sum`, without rounding, the sums of squares in f64 of blocks of [`NORM_BLOCK`] elements, rounded to `T` first, in
/// the order of the CPU's.
pub fn squares<'a, T: Float, G: Float>(grad: View<'a, G>, sum: ViewMut<'a, u64>) -> Launch<'a> {
    let blocks = grad.len() / NORM_BLOCK;
    assert_eq!(grad.len(), blocks * NORM_BLOCK, "whole blocks of a gradient");
    assert_eq!(sum.len(), SQUARES_WORDS, "words of a sum");
    assert!(aligned(&[address(grad)]), "a gradient that starts at a 16-byte boundary");
    // As many threads share a block of 16 lanes as an element has bytes.
    let grid = blocks.div_ceil(THREADS / size_of::<G>());
    Launch::new(Module::new(&sources::SQUARES, T::DTYPE), "squares", [grid, 1, 1], THREADS)
        .write(sum)
        .read(grad)
        .long(blocks)
        .flag(kept_wide::<T, G>())
}

fn cast<'a, T: Float, From: Element, To: Element>(
    kernel: &'static str,
    from: View<'a, From>,
    to: ViewMut<'a, To>,
) -> Launch<'a> {
    let n = from.len();
    assert_eq!(to.len(), n, "as many results as inputs of {kernel}");
    let vectors = aligned(&[address(from), address(to.as_view())]);
    // Vectors are as long as those of the narrower type.
    let at_once = 16 / size_of::<From>().min(size_of::<To>());
    let blocks = threads_for(n, at_once, vectors).div_ceil(THREADS);
    Launch::new(Module::new(&sources::CAST, T::DTYPE), kernel, [blocks, 1, 1], THREADS)
        .write(to)
        .read(from)
        .long(n)
        .flag(vectors)
}

/// `to = from`, rounded to `T`.
pub fn narrow<'a, T: Float>(from: View<'a, f32>, to: ViewMut<'a, T>) -> Launch<'a> {
    cast::<T, f32, T>("narrow_all", from, to)
}

/// `to += from` in f32.
pub fn accumulate<'a, T: Float>(from: View<'a, T>, to: ViewMut<'a, f32>) -> Launch<'a> {
    cast::<T, T, f32>("accumulate", from, to)
}

/// Sets bit 0 of `found` if any element of `x` is infinite or not a number.
pub fn find_nonfinite<'a, T: Float>(x: View<'a, T>, found: ViewMut<'a, u32>) -> Launch<'a> {
    assert_eq!(found.len(), 1, "one word for what is found");
    let vectors = aligned(&[address(x)]);
    let blocks = threads_for(x.len(), 16 / size_of::<T>(), vectors).div_ceil(THREADS);
    Launch::new(Module::new(&sources::CAST, T::DTYPE), "find_nonfinite", [blocks, 1, 1], THREADS)
        .write(found)
        .read(x)
        .long(x.len())
        .flag(vectors)
}
