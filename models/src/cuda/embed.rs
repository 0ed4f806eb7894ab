//! Rows of the embedding's table.

use super::sources;
use collectives::device::{Launch, Module, address, aligned};
use collectives::{Float, View, ViewMut};

const THREADS: usize = 256;
/// Entries of a block of the backward.
const WARPS: usize = THREADS / 32;

/// Rows of `table` (V, H) at `tokens` (n): `out` (n, H).
pub fn embed<'a, T: Float>(tokens: View<'a, u32>, table: View<'a, T>, out: ViewMut<'a, T>) -> Launch<'a> {
    let width = out.len() / tokens.len().max(1);
    assert_eq!(out.len(), tokens.len() * width, "one row for each token");
    let at_once = 16 / size_of::<T>();
    let vectors = width % at_once == 0 && aligned(&[address(table), address(out.as_view())]);
    let groups = if vectors { width / at_once } else { width };
    let items = tokens.len() * groups;
    assert!(items <= (1 << 32) - THREADS, "an embedding of less than 2^32 items");
    let module = Module::new(&sources::EMBEDDING, T::DTYPE);
    Launch::new(module, "embed_forward", [items.div_ceil(THREADS), 1, 1], THREADS)
        .write(out)
        .read(table)
        .read(tokens)
        .long(items)
        .int(groups)
        .int(width)
        .flag(vectors)
}

/// Sums the rows of `d_out` (n, H) by token into rows of `d_table` (V, H) for the tokens that occur: onto what is
/// there if `add`, or else overwriting; rows of other tokens are left alone. `order` (n) holds
/// `token << 32 | position`, ascending; what is `NO_ROW`'s teaches none.
pub fn embed_backward<'a, T: Float>(
    order: View<'a, u64>,
    d_out: View<'a, T>,
    d_table: ViewMut<'a, T>,
    add: bool,
) -> Launch<'a> {
    let n = order.len();
    let width = d_out.len() / n.max(1);
    assert!(d_out.len() == n * width && d_table.len() % width.max(1) == 0, "whole rows of an embedding");
    let at_once = 16 / size_of::<T>();
    let vectors = width % at_once == 0 && aligned(&[address(d_out), address(d_table.as_view())]);
    let at_once = if vectors { at_once } else { 1 };
    let blocks = n.div_ceil(WARPS) * width.div_ceil(32 * at_once);
    let module = Module::new(&sources::EMBEDDING, T::DTYPE);
    Launch::new(module, "embed_backward", [blocks, 1, 1], THREADS)
        .shared(THREADS * at_once * size_of::<f32>())
        .write(d_table)
        .read(d_out)
        .read(order)
        .int(n)
        .int(width)
        .flag(add)
        .flag(vectors)
}
