//! RMSNorm, the rotary embedding and SwiGLU.

use super::sources;
use crate::ops::{Normed, Turn};
use collectives::device::{Launch, Module, address, aligned, twice};
use collectives::{DType, Float, View, ViewMut};

const THREADS: usize = 256;
/// Of a block that has one row of a norm.
const MOST_ROW_THREADS: usize = 1024;

/// Threads of a kernel that takes 16 bytes of one element type a thread, and the rest singly.
pub(super) fn threads_for(n: usize, at_once: usize, vectors: bool) -> usize {
    if vectors { n / at_once + n % at_once } else { n }
}

/// `out = x / sqrt(mean(x^2) + eps) * weight`, over rows of `weight`'s length. With `residual`, x + residual is
/// written to `sum` and normalised; its second half is `sum`.
pub fn norm<'a, T: Float>(
    x: View<'a, T>,
    residual: Option<(View<'a, T>, ViewMut<'a, T>)>,
    weight: View<'a, T>,
    eps: f32,
    out: ViewMut<'a, T>,
) -> Launch<'a> {
    let width = weight.len();
    assert!(x.len() == out.len() && x.len() % width == 0, "whole rows of inputs and results of a norm");
    let (residual, sum) = residual.unzip();
    if let (Some(residual), Some(sum)) = (&residual, &sum) {
        assert!(
            residual.len() == x.len() && sum.len() == x.len(),
            "a residual as long as the input of a norm"
        );
    }
    let module = Module::new(&sources::RMSNORM, T::DTYPE);
    Launch::new(module, "rmsnorm_forward", [x.len() / width, 1, 1], row_threads::<T>(width))
        .write(out)
        .maybe_write(sum)
        .read(x)
        .maybe_read(residual)
        .read(weight)
        .int(width)
        .float(eps)
}

/// What norms over rows of `width` launch, with their backward if that is asked for.
pub(super) fn norm_module(element: DType, width: usize, backward: bool) -> Module {
    Module::new(&sources::RMSNORM, element).shared(if backward { backward_shared(width) } else { 0 })
}

/// Bytes of shared memory of a block of a norm's backward: for two rows in turn two sums of each warp, and a sum for each
/// weight.
fn backward_shared(width: usize) -> usize {
    (2 * 2 * (MOST_ROW_THREADS / 32) + width) * size_of::<f32>()
}

/// As many threads as a row has groups of 16 bytes, at most a block.
fn row_threads<T: Float>(width: usize) -> usize {
    width.div_ceil(16 / size_of::<T>()).next_multiple_of(32).min(MOST_ROW_THREADS)
}

/// Rows of partial sums that the backward of a norm over `rows` rows needs: a function of the shape alone, so that
/// the order of the sums is the same on each GPU.
pub fn norm_partials(rows: usize) -> usize {
    rows.div_ceil(16).clamp(1, 512)
}

/// Backward of [`norm`]: `d_x` is overwritten, or added to if `add`; `d_weight` is overwritten. `partials` is
/// workspace of [`norm_partials`] rows. To be run in order.
pub fn norm_backward<'a, T: Float>(
    Normed { x, weight, eps }: Normed<'a, T>,
    d_out: View<'a, T>,
    d_x: ViewMut<'a, T>,
    add: bool,
    d_weight: ViewMut<'a, T>,
    partials: &'a mut ViewMut<'_, f32>,
) -> [Launch<'a>; 2] {
    let width = weight.len();
    let rows = x.len() / width;
    assert!(
        x.len() == rows * width && d_out.len() == x.len() && d_x.len() == x.len(),
        "whole rows of a norm"
    );
    assert_eq!(d_weight.len(), width, "one gradient for each weight of a norm");
    let parts = norm_partials(rows);
    let partials = partials.reborrow().slice(0..parts * width);
    // SAFETY: the first is of the launch that makes them, the other of the one that adds them.
    let [partials, sums] = unsafe { twice(partials) };
    let module = Module::new(&sources::RMSNORM, T::DTYPE);
    let rows_launch = Launch::new(module, "rmsnorm_backward", [parts, 1, 1], row_threads::<T>(width))
        .shared(backward_shared(width))
        .write(d_x)
        .write(partials)
        .read(x)
        .read(weight)
        .read(d_out)
        .int(rows)
        .int(width)
        .float(eps)
        .flag(add);
    // There are few blocks: each has a warp for every part, or all that there can be.
    let sum_threads = (32 * parts).min(MOST_ROW_THREADS);
    let sum_launch = Launch::new(module, "rmsnorm_dweight", [width.div_ceil(32), 1, 1], sum_threads)
        .write(d_weight)
        .read(sums.into())
        .int(parts)
        .int(width)
        .flag(false);
    [rows_launch, sum_launch]
}

/// Turns each head of `x` (tokens, heads * width) in place; token t stands at position t % length. `angles` (length
/// or more, width) holds the cosines of the width/2 pairs, then their sines.
pub fn rope<'a, T: Float>(
    x: ViewMut<'a, T>,
    angles: View<'a, f32>,
    heads: usize,
    width: usize,
    length: usize,
    turn: Turn,
) -> Launch<'a> {
    assert!(
        width.is_multiple_of(2) && x.len().is_multiple_of(heads * width),
        "whole tokens of {heads} heads of {width}"
    );
    assert!(angles.len() >= length * width, "angles of {length} positions");
    let at_once = 16 / size_of::<T>();
    let vectors = (width / 2).is_multiple_of(at_once) && aligned(&[address(x.as_view()), address(angles)]);
    let items = x.len() / 2 / if vectors { at_once } else { 1 };
    assert!(items <= (1 << 32) - THREADS, "a rotary embedding of less than 2^32 items");
    let module = Module::new(&sources::ROPE, T::DTYPE);
    Launch::new(module, "rope", [items.div_ceil(THREADS), 1, 1], THREADS)
        .write(x)
        .read(angles)
        .long(items)
        .int(heads)
        .int(length)
        .int(width)
        .float(if turn == Turn::Forward { 1.0 } else { -1.0 })
        .flag(vectors)
}

/// `out = gate * sigmoid(gate) * up`.
pub fn swiglu<'a, T: Float>(gate: View<'a, T>, up: View<'a, T>, out: ViewMut<'a, T>) -> Launch<'a> {
    let n = gate.len();
    assert!(up.len() == n && out.len() == n, "gate, up and their product");
    let vectors = aligned(&[address(gate), address(up), address(out.as_view())]);
    let threads = threads_for(n, 16 / size_of::<T>(), vectors);
    let module = Module::new(&sources::SWIGLU, T::DTYPE);
    Launch::new(module, "swiglu_forward", [threads.div_ceil(THREADS), 1, 1], THREADS)
        .write(out)
        .read(gate)
        .read(up)
        .long(n)
        .flag(vectors)
}

/// Backward of [`swiglu`], in place: `gate` and `up` become their gradients, and `d_out` becomes `out`.
pub fn swiglu_backward<'a, T: Float>(
    gate: ViewMut<'a, T>,
    up: ViewMut<'a, T>,
    d_out: ViewMut<'a, T>,
) -> Launch<'a> {
    let n = gate.len();
    assert!(up.len() == n && d_out.len() == n, "gate, up and their gradient");
    let vectors = aligned(&[address(gate.as_view()), address(up.as_view()), address(d_out.as_view())]);
    let threads = threads_for(n, 16 / size_of::<T>(), vectors);
    let module = Module::new(&sources::SWIGLU, T::DTYPE);
    Launch::new(module, "swiglu_backward", [threads.div_ceil(THREADS), 1, 1], THREADS)
        .write(gate)
        .write(up)
        .write(d_out)
        .long(n)
        .flag(vectors)
}
