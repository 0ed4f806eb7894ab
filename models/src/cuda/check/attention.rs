//! Attention against the definition.

use super::bed::*;
use crate::cuda::trial::AttentionTrial;
use crate::cuda::{self, TensorCores, TensorCores::*};
use crate::ops::AttentionShape;
use collectives::device::Queue;
use collectives::{Buffer, DType, Float, bf16, f16};

/// A query: its sequence, its head, its position, and the places of its element 0 and of its keys'.
fn each_query(s: AttentionShape, mut one: impl FnMut(usize, usize, &dyn Fn(usize) -> usize)) {
    for row in 0..s.rows {
        for head in 0..s.heads {
            for i in 0..s.length {
                let own = ((row * s.length + i) * s.heads + head) * s.width;
                let kv_head = head / (s.heads / s.kv_heads);
                let key = |j: usize| ((row * s.length + j) * s.kv_heads + kv_head) * s.width;
                one(i, own, &key);
            }
        }
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The probabilities of a query over its keys, and the logarithm of their denominator.
fn probabilities(scores: &[f64]) -> (Vec<f64>, f64) {
    let most = scores.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b));
    let sum: f64 = scores.iter().map(|s| (s - most).exp()).sum();
    (scores.iter().map(|s| (s - most).exp() / sum).collect(), most + sum.ln())
}

/// The definition in f64: results and logarithms.
fn forward(s: AttentionShape, q: &[f64], k: &[f64], v: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let (mut out, mut log_sums) = (vec![0.0; q.len()], Vec::new());
    let scale = 1.0 / (s.width as f64).sqrt();
    each_query(s, |i, own, key| {
        let scores: Vec<f64> =
            (0..=i).map(|j| dot(&q[own..own + s.width], &k[key(j)..key(j) + s.width]) * scale).collect();
        let (p, log_sum) = probabilities(&scores);
        log_sums.push(log_sum);
        for (j, p) in p.iter().enumerate() {
            (0..s.width).for_each(|c| out[own + c] += p * v[key(j) + c]);
        }
    });
    (out, log_sums)
}

/// Gradients of q, k and v in f64. `out` is what the forward stored: that its rounding is felt where terms cancel is
/// a property of the algorithm, not an error of its implementation.
fn backward(s: AttentionShape, q: &[f64], k: &[f64], v: &[f64], out: &[f64], d_out: &[f64]) -> [Vec<f64>; 3] {
    let (mut d_q, mut d_k, mut d_v) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; k.len()]);
    let scale = 1.0 / (s.width as f64).sqrt();
    each_query(s, |i, own, key| {
        let all = own..own + s.width;
        let scores: Vec<f64> =
            (0..=i).map(|j| dot(&q[all.clone()], &k[key(j)..key(j) + s.width]) * scale).collect();
        let delta = dot(&out[all.clone()], &d_out[all.clone()]);
        for (j, p) in probabilities(&scores).0.iter().enumerate() {
            let ds = p * (dot(&d_out[all.clone()], &v[key(j)..key(j) + s.width]) - delta) * scale;
            for c in 0..s.width {
                d_q[own + c] += ds * k[key(j) + c];
                d_k[key(j) + c] += ds * q[own + c];
                d_v[key(j) + c] += p * d_out[own + c];
            }
        }
    });
    [d_q, d_k, d_v]
}

fn check<T: Float, Q: Queue>(
    bed: &Bed<Q>,
    by: TensorCores,
    rows: usize,
    length: usize,
    heads: usize,
    kv_heads: usize,
    width: usize,
) {
    let s = AttentionShape { rows, length, heads, kv_heads, width };
    let (q, kv) = AttentionTrial::<T>::lengths(s);
    let name = format!("attention of {rows} x {length}, {heads} heads over {kv_heads}, width {width}");
    let mut forwards = None;
    bed.in_every_order(&name, &mut |stream| {
        let sums = || bed.unwritten::<f32>(AttentionTrial::<T>::sums(s));
        let mut a = AttentionTrial::<T> {
            shape: s,
            q: bed.random(1, q, 1.5),
            k: bed.random(2, kv, 1.5),
            v: bed.random(3, kv, 1.0),
            d_out: bed.random(4, q, 1.0),
            out: bed.unwritten(q),
            log_sums: sums(),
            delta: sums(),
            d_q: bed.unwritten(q),
            d_k: bed.unwritten(kv),
            d_v: bed.unwritten(kv),
        };
        let (q, k, v) = (wide(&a.q), wide(&a.k), wide(&a.v));
        let (want, want_log_sums) = forwards.get_or_insert_with(|| forward(s, &q, &k, &v));
        stream.run([a.forward(by)]);
        bed.close(&name, &a.out, want);
        // Probabilities are summed as they are multiplied, so rounded to 16 bits.
        let error = a.log_sums.host().iter().zip(&*want_log_sums).map(|(a, b)| (f64::from(*a) - b).abs());
        let allowed = if size_of::<T>() == 2 { 4e-3 } else { 1e-5 };
        let error = error.fold(0.0, |most: f64, e| if e.is_nan() { f64::INFINITY } else { most.max(e) });
        bed.that(error < allowed, || format!("{name}: logarithms: error {error:.2e}"));

        a.backward(by, |launches| stream.run(launches));
        let want = backward(s, &q, &k, &v, &wide(&a.out), &wide(&a.d_out));
        // With a single key, the gradients of its score cancel to nothing.
        for (what, got, want) in
            [("d_q", &a.d_q, &want[0]), ("d_k", &a.d_k, &want[1]), ("d_v", &a.d_v, &want[2])]
        {
            bed.close_sums(&format!("{name}: {what}"), got, want, 0.1);
        }
        vec![bytes(&a.out), bytes(&a.log_sums), bytes(&a.d_q), bytes(&a.d_k), bytes(&a.d_v)]
    });
}

fn heads_of_64<Q: Queue>(bed: &Bed<Q>, by: TensorCores) {
    for (rows, length, heads, kv_heads) in
        [(2, 1, 1, 1), (1, 7, 2, 1), (1, 63, 1, 1), (5, 65, 3, 1), (1, 200, 4, 2), (1, 400, 2, 1)]
    {
        check::<bf16, Q>(bed, by, rows, length, heads, kv_heads, 64);
    }
    check::<f16, Q>(bed, by, 1, 130, 2, 1, 64);
}

fn heads_of_128<Q: Queue>(bed: &Bed<Q>, by: TensorCores) {
    for (rows, length, heads, kv_heads) in
        [(1, 1, 2, 2), (5, 7, 1, 1), (1, 63, 2, 1), (1, 65, 1, 1), (1, 200, 2, 1), (1, 400, 1, 1)]
    {
        check::<bf16, Q>(bed, by, rows, length, heads, kv_heads, 128);
    }
}

pub fn heads_of_64_on_tensor_cores<Q: Queue>(bed: &Bed<Q>) {
    heads_of_64(bed, Mma);
}

pub fn heads_of_128_on_tensor_cores<Q: Queue>(bed: &Bed<Q>) {
    heads_of_128(bed, Mma);
}

/// What that case takes of a block, which GPUs with 99 KiB do not have.
pub fn shared_of_128() -> usize {
    let modules = cuda::attention::modules(Mma, DType::Bf16, 128, true);
    modules.iter().map(|module| module.shared).max().unwrap_or(0)
}

pub fn heads_of_64_on_warpgroups<Q: Queue>(bed: &Bed<Q>) {
    heads_of_64(bed, Wgmma);
}

pub fn heads_of_128_on_warpgroups<Q: Queue>(bed: &Bed<Q>) {
    heads_of_128(bed, Wgmma);
}

pub fn plain_attention_for_f32_and_other_widths<Q: Queue>(bed: &Bed<Q>) {
    check::<f32, Q>(bed, Mma, 1, 70, 2, 1, 64);
    check::<f32, Q>(bed, Mma, 2, 37, 3, 3, 6);
    check::<f32, Q>(bed, Mma, 1, 33, 1, 1, 128);
    check::<bf16, Q>(bed, Mma, 2, 40, 4, 2, 16);
    check::<f16, Q>(bed, Mma, 1, 9, 2, 2, 40);
}

fn large_scores<Q: Queue>(bed: &Bed<Q>, by: TensorCores) {
    let s = AttentionShape { rows: 1, length: 80, heads: 1, kv_heads: 1, width: 64 };
    let (q, k) = (bed.random::<bf16>(5, 80 * 64, 20.0), bed.random::<bf16>(6, 80 * 64, 20.0));
    let v = bed.random::<bf16>(7, 80 * 64, 1.0);
    let want = forward(s, &wide(&q), &wide(&k), &wide(&v)).0;
    bed.in_every_order("attention of large scores", &mut |stream| {
        let (mut out, mut log_sums) = (bed.unwritten::<bf16>(q.len()), bed.unwritten::<f32>(80));
        stream.run([cuda::attention(
            by,
            s,
            q.view(),
            k.view(),
            v.view(),
            out.view_mut(),
            log_sums.view_mut(),
        )]);
        bed.close("attention of large scores", &out, &want);
        vec![bytes(&out)]
    });
}

pub fn large_scores_neither_overflow_nor_vanish<Q: Queue>(bed: &Bed<Q>) {
    large_scores(bed, Mma);
}

pub fn large_scores_on_warpgroups<Q: Queue>(bed: &Bed<Q>) {
    large_scores(bed, Wgmma);
}

pub fn memory_at_odd_addresses_goes_through_the_plain_kernel<Q: Queue>(bed: &Bed<Q>) {
    // Heads of 16 are compiled for the plain kernel only; one element off, vectors are impossible.
    let s = AttentionShape { rows: 1, length: 20, heads: 2, kv_heads: 1, width: 16 };
    let (q, k): (Buffer<bf16>, Buffer<bf16>) =
        (bed.random(1, 20 * 32 + 1, 1.0), bed.random(2, 20 * 16 + 1, 1.0));
    let (q, k) = (q.view().slice(1..641), k.view().slice(1..321));
    let widened =
        |x: collectives::View<'_, bf16>| x.host().iter().map(|x| f64::from(x.to_f32())).collect::<Vec<_>>();
    let want = forward(s, &widened(q), &widened(k), &widened(k)).0;
    bed.in_every_order("attention at odd addresses", &mut |stream| {
        let (mut out, mut log_sums) = (bed.unwritten::<bf16>(640), bed.unwritten::<f32>(40));
        stream.run([cuda::attention(Mma, s, q, k, k, out.view_mut(), log_sums.view_mut())]);
        bed.close("attention", &out, &want);
        vec![bytes(&out)]
    });
}
