//! Attention against the definition.

use crate::tools::*;
use collectives::{Buffer, Float, bf16, f16};
use models::cuda;
use models::{AttentionBackward, AttentionShape};

/// The definition in f64: results, logarithms, and gradients of q, k, v.
struct Oracle {
    out: Vec<f64>,
    log_sums: Vec<f64>,
    d_q: Vec<f64>,
    d_k: Vec<f64>,
    d_v: Vec<f64>,
}

fn oracle(s: AttentionShape, q: &[f64], k: &[f64], v: &[f64], d_out: &[f64]) -> Oracle {
    let (group, scale) = (s.heads / s.kv_heads, 1.0 / (s.width as f64).sqrt());
    let mut o = Oracle {
        out: vec![0.0; q.len()],
        log_sums: vec![0.0; s.rows * s.heads * s.length],
        d_q: vec![0.0; q.len()],
        d_k: vec![0.0; k.len()],
        d_v: vec![0.0; k.len()],
    };
    for (row, head, i) in (0..s.rows)
        .flat_map(|r| (0..s.heads).flat_map(move |h| (0..s.length).map(move |i| (r, h, i))))
    {
        let at = |token: usize, head: usize, heads: usize| ((row * s.length + token) * heads + head) * s.width;
        let own = at(i, head, s.heads);
        let key = |j: usize| at(j, head / group, s.kv_heads);
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
        let row_of = |x: &[f64], at: usize| x[at..at + s.width].to_vec();
        let (mine, d) = (row_of(q, own), row_of(d_out, own));
        let scores: Vec<f64> = (0..=i).map(|j| dot(&mine, &k[key(j)..key(j) + s.width]) * scale).collect();
        let most = scores.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b));
        let sum: f64 = scores.iter().map(|s| (s - most).exp()).sum();
        o.log_sums[(row * s.heads + head) * s.length + i] = most + sum.ln();
        let p: Vec<f64> = scores.iter().map(|s| (s - most).exp() / sum).collect();
        for (j, p) in p.iter().enumerate() {
            for c in 0..s.width {
                o.out[own + c] += p * v[key(j) + c];
                o.d_v[key(j) + c] += p * d[c];
            }
        }
        let delta = dot(&o.out[own..own + s.width], &d);
        for (j, p) in p.iter().enumerate() {
            let ds = p * (dot(&d, &v[key(j)..key(j) + s.width]) - delta) * scale;
            for c in 0..s.width {
                o.d_q[own + c] += ds * k[key(j) + c];
                o.d_k[key(j) + c] += ds * q[own + c];
            }
        }
    }
    o
}

fn check<T: Float>(rows: usize, length: usize, heads: usize, kv_heads: usize, width: usize) {
    let s = AttentionShape { rows, length, heads, kv_heads, width };
    let n = rows * length;
    let (q, k) = (random::<T>(1, n * heads * width, 1.5), random::<T>(2, n * kv_heads * width, 1.5));
    let (v, d_out) = (random::<T>(3, n * kv_heads * width, 1.0), random::<T>(4, n * heads * width, 1.0));
    let want = oracle(s, &wide(&q), &wide(&k), &wide(&v), &wide(&d_out));
    in_every_order(|stream| {
        let (mut out, mut log_sums) = (unwritten::<T>(q.len()), unwritten::<f32>(n * heads));
        let launch = cuda::attention(s, q.view(), k.view(), v.view(), out.view_mut(), log_sums.view_mut());
        stream.run([launch]);
        let name = format!("{rows} x {length}, {heads} heads over {kv_heads}, width {width}:");
        assert_close(&format!("{name} attention"), &out, &want.out);
        // Probabilities are summed as they are multiplied, so rounded to 16 bits.
        let error = log_sums.host().iter().zip(&want.log_sums).map(|(a, b)| (f64::from(*a) - b).abs());
        let allowed = if size_of::<T>() == 2 { 4e-3 } else { 1e-5 };
        let error = error.fold(0.0, f64::max);
        assert!(error < allowed, "{name} logarithms: error {error:.2e}");

        let (mut d_q, mut d_k) = (unwritten::<T>(q.len()), unwritten::<T>(k.len()));
        let (mut d_v, mut delta) = (unwritten::<T>(k.len()), unwritten::<f32>(n * heads));
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
        stream.run(cuda::attention_backward(s, a, &mut delta.view_mut()));
        assert_close(&format!("{name} d_q"), &d_q, &want.d_q);
        assert_close(&format!("{name} d_k"), &d_k, &want.d_k);
        assert_close(&format!("{name} d_v"), &d_v, &want.d_v);
        vec![bytes(&out), bytes(&log_sums), bytes(&d_q), bytes(&d_k), bytes(&d_v)]
    });
}

#[test]
fn heads_of_64_on_tensor_cores() {
    for (rows, length, heads, kv_heads) in [(2, 1, 1, 1), (1, 7, 2, 1), (1, 63, 1, 1), (2, 65, 3, 1), (1, 200, 4, 2)] {
        check::<bf16>(rows, length, heads, kv_heads, 64);
    }
    check::<f16>(1, 130, 2, 1, 64);
}

#[test]
fn heads_of_128_on_tensor_cores() {
    for (rows, length, heads, kv_heads) in [(1, 1, 2, 2), (2, 7, 1, 1), (1, 63, 2, 1), (1, 65, 1, 1), (1, 200, 2, 1)] {
        check::<bf16>(rows, length, heads, kv_heads, 128);
    }
}

#[test]
fn plain_attention_for_f32_and_other_widths() {
    check::<f32>(1, 70, 2, 1, 64);
    check::<f32>(2, 37, 3, 3, 6);
    check::<f32>(1, 33, 1, 1, 128);
    check::<bf16>(2, 40, 4, 2, 16);
    check::<f16>(1, 9, 2, 2, 40);
}

#[test]
fn large_scores_neither_overflow_nor_vanish() {
    let s = AttentionShape { rows: 1, length: 80, heads: 1, kv_heads: 1, width: 64 };
    let (q, k) = (random::<bf16>(5, 80 * 64, 20.0), random::<bf16>(6, 80 * 64, 20.0));
    let v = random::<bf16>(7, 80 * 64, 1.0);
    let want = oracle(s, &wide(&q), &wide(&k), &wide(&v), &vec![0.0; q.len()]);
    in_every_order(|stream| {
        let (mut out, mut log_sums) = (unwritten::<bf16>(q.len()), unwritten::<f32>(80));
        stream.run([cuda::attention(s, q.view(), k.view(), v.view(), out.view_mut(), log_sums.view_mut())]);
        assert_close("attention of large scores", &out, &want.out);
        vec![bytes(&out)]
    });
}

#[test]
fn memory_at_odd_addresses_goes_through_the_plain_kernel() {
    // Heads of 16 are compiled for the plain kernel only; one element off, vectors are impossible.
    let s = AttentionShape { rows: 1, length: 20, heads: 2, kv_heads: 1, width: 16 };
    let (q, k): (Buffer<bf16>, Buffer<bf16>) = (random(1, 20 * 32 + 1, 1.0), random(2, 20 * 16 + 1, 1.0));
    let (q, k) = (q.view().slice(1..641), k.view().slice(1..321));
    let widened = |x: collectives::View<'_, bf16>| x.host().iter().map(|x| f64::from(x.to_f32())).collect::<Vec<_>>();
    let want = oracle(s, &widened(q), &widened(k), &widened(k), &vec![0.0; 640]);
    in_every_order(|stream| {
        let (mut out, mut log_sums) = (unwritten::<bf16>(640), unwritten::<f32>(40));
        stream.run([cuda::attention(s, q, k, k, out.view_mut(), log_sums.view_mut())]);
        assert_close("attention", &out, &want.out);
        vec![bytes(&out)]
    });
}
