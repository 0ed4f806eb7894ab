//! The embedding's lookup and the sum of its gradient by token.

use crate::ops::NO_ROW;
use collectives::Float;
use std::ops::Range;

/// Copies rows of the table.
pub(super) fn embed<T: Float>(tokens: &[u32], table: &[T], out: &mut [T], hidden: usize) {
    for (&token, out) in tokens.iter().zip(out.chunks_exact_mut(hidden)) {
        out.copy_from_slice(&table[token as usize * hidden..][..hidden]);
    }
}

/// Columns of the sum that are kept in registers and the first cache.
const STRIP: usize = 256;

/// Adds up the rows of `d_out` by token, over these columns. `order` holds `token << 32 | position`, ascending,
/// so a token's contributions are added in the order of their positions, in f32, and rounded once. Those of `NO_ROW`, which
/// are the last, are left out.
///
/// # Safety
/// `d_table` has a row for every token, and nobody else touches these columns.
pub(super) unsafe fn embed_backward<T: Float>(
    order: &[u64],
    d_out: &[f32],
    d_table: *mut T,
    vocab: usize,
    hidden: usize,
    columns: Range<usize>,
    add: bool,
) {
    if !add {
        for token in 0..vocab {
            // SAFETY: inside the table, in our columns.
            unsafe { strip(d_table, hidden, token, &columns) }.fill(T::default());
        }
    }
    for same in order.chunk_by(|a, b| a >> 32 == b >> 32) {
        let token = (same[0] >> 32) as usize;
        if token == NO_ROW as usize {
            break;
        }
        assert!(token < vocab, "token {token} of a vocabulary of {vocab}");
        for c0 in columns.clone().step_by(STRIP) {
            let columns = c0..columns.end.min(c0 + STRIP);
            let mut sum = [0f32; STRIP];
            for &entry in same {
                let position = entry as u32 as usize;
                add_row(&mut sum[..columns.len()], &d_out[position * hidden..][columns.clone()]);
            }
            // SAFETY: inside the table, in our columns.
            let out = unsafe { strip(d_table, hidden, token, &columns) };
            finish(out, &sum[..columns.len()]);
        }
    }
}

/// # Safety
/// The columns of this row are inside the table and ours.
unsafe fn strip<'a, T>(table: *mut T, hidden: usize, token: usize, columns: &Range<usize>) -> &'a mut [T] {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts_mut(table.add(token * hidden + columns.start), columns.len()) }
}

collectives::simd_dispatch! {
    fn add_row(sum: &mut [f32], x: &[f32]) = add_row_body;
    fn finish<T: Float>(out: &mut [T], sum: &[f32]) = finish_body;
}

#[inline(always)]
fn add_row_body(sum: &mut [f32], x: &[f32]) {
    for (sum, x) in sum.iter_mut().zip(x) {
        *sum += x;
    }
}

/// What the row holds is zero, or another unit's contribution.
#[inline(always)]
fn finish_body<T: Float>(out: &mut [T], sum: &[f32]) {
    for (out, sum) in out.iter_mut().zip(sum) {
        *out = T::from_f32(out.to_f32() + sum);
    }
}
