//! The backward of attention, which reads without looking at lengths, refuses any that its shape does not have.

use super::*;

const SHAPE: AttentionShape = AttentionShape { rows: 2, length: 3, heads: 2, kv_heads: 1, width: 4 };
const QUERIES: usize = 2 * 3 * 2 * 4;
const KEYS: usize = 2 * 3 * 4;
const SUMS: usize = 2 * 3 * 2;

/// With so many elements of queries, keys, values, results, their gradients and logarithms.
fn backward(lengths: [usize; 6]) {
    let [q, k, v, out, d_out, log_sums] = lengths.map(Buffer::<f32>::zeroed);
    let (mut d_q, mut d_k, mut d_v) =
        (Buffer::zeroed(QUERIES), Buffer::<f32>::zeroed(KEYS), Buffer::<f32>::zeroed(KEYS));
    let (threads, rows, hidden, sequences, length) = (1, 1, 1, 2, 3);
    let (heads, kv_heads, width, depth, backward) = (2, 1, 4, 4, true);
    let shape =
        CpuShape { threads, rows, hidden, sequences, length, heads, kv_heads, width, depth, backward };
    let memory = CpuMemory { words: Buffer::zeroed(shape.words()), partial: Buffer::zeroed(shape.partial()) };
    let a = AttentionBackward {
        q: q.view(),
        k: k.view(),
        v: v.view(),
        out: out.view(),
        log_sums: log_sums.view(),
        d_out: d_out.view(),
        d_q: d_q.view_mut(),
        d_k: d_k.view_mut(),
        d_v: d_v.view_mut(),
    };
    Ops::<f32>::attention_backward(&mut Cpu::new(&shape, memory).unwrap(), SHAPE, a);
}

#[test]
fn those_of_the_shape_are_taken() {
    backward([QUERIES, KEYS, KEYS, QUERIES, QUERIES, SUMS]);
}

#[test]
#[should_panic(expected = "queries and results of attention")]
fn short_queries() {
    backward([QUERIES - 1, KEYS, KEYS, QUERIES, QUERIES, SUMS]);
}

#[test]
#[should_panic(expected = "keys and values of attention")]
fn short_keys() {
    backward([QUERIES, KEYS - 1, KEYS, QUERIES, QUERIES, SUMS]);
}

#[test]
#[should_panic(expected = "keys and values of attention")]
fn short_values() {
    backward([QUERIES, KEYS, KEYS - 1, QUERIES, QUERIES, SUMS]);
}

#[test]
#[should_panic(expected = "queries and results of attention")]
fn short_results() {
    backward([QUERIES, KEYS, KEYS, QUERIES - 1, QUERIES, SUMS]);
}

#[test]
#[should_panic(expected = "queries and results of attention")]
fn short_gradients_of_results() {
    backward([QUERIES, KEYS, KEYS, QUERIES, QUERIES - 1, SUMS]);
}

#[test]
#[should_panic(expected = "one logarithm for each query and head")]
fn short_logarithms() {
    backward([QUERIES, KEYS, KEYS, QUERIES, QUERIES, SUMS - 1]);
}
