//! Each kernel against a naive one in f64: on every instruction set, on odd shapes, and bit for bit between
//! instruction sets and numbers of threads.

mod products;

use super::*;
use crate::ops::{AttentionBackward, AttentionShape, NO_ROW, Normed};
use collectives::simd::{Level, with_level};
use collectives::{bf16, f16};

fn cpu(threads: usize) -> Cpu {
    let (rows, hidden, length, width, depth) = (300, 80, 1000, WIDEST_HEAD, 3000);
    let (sequences, heads, kv_heads, backward) = (1, 2, 1, true);
    let shape =
        CpuShape { threads, rows, hidden, sequences, length, heads, kv_heads, width, depth, backward };
    let memory = CpuMemory { words: Buffer::zeroed(shape.words()), partial: Buffer::zeroed(shape.partial()) };
    Cpu::new(&shape, memory).unwrap()
}

fn values<T: Float>(len: usize, seed: u32) -> Vec<T> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        T::from_f32((state >> 8) as f32 / 8_388_608.0 - 1.0)
    };
    (0..len).map(|_| next()).collect()
}

fn wide<T: Float>(x: &[T]) -> Vec<f64> {
    x.iter().map(|x| f64::from(x.to_f32())).collect()
}

/// The largest distance, over the largest value.
fn distance<T: Float>(got: &[T], exact: &[f64]) -> f64 {
    assert_eq!(got.len(), exact.len());
    let largest = exact.iter().fold(1e-30, |m: f64, x| m.max(x.abs()));
    let far = |(g, e): (&f64, &f64)| if (g - e).is_nan() { f64::INFINITY } else { (g - e).abs() };
    wide(got).iter().zip(exact).map(far).fold(0.0, f64::max) / largest
}

fn bits<T: Float>(x: &[T]) -> Vec<u32> {
    x.iter().map(|x| x.to_f32().to_bits()).collect()
}

/// Runs `f` with the kernels of each instruction set that this processor has.
fn at_each_level(mut f: impl FnMut(Level)) {
    for level in Level::available() {
        with_level(level, || f(level));
    }
}

/// The forward and backward of attention by its definition: out, log sums, d_q, d_k, d_v.
fn attention64(s: AttentionShape, q: &[f64], k: &[f64], v: &[f64], d_out: &[f64]) -> [Vec<f64>; 5] {
    let AttentionShape { rows, length, heads, kv_heads, width } = s;
    let scale = 1.0 / (width as f64).sqrt();
    let mut out = vec![0.0; q.len()];
    let mut log_sums = vec![0.0; rows * heads * length];
    let (mut d_q, mut d_k, mut d_v) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
    for row in 0..rows {
        for head in 0..heads {
            for i in 0..length {
                let at = ((row * length + i) * heads + head) * width;
                let key = |j: usize| ((row * length + j) * kv_heads + head / (heads / kv_heads)) * width;
                let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
                let own = &q[at..at + width];
                let scores: Vec<f64> = (0..=i).map(|j| dot(own, &k[key(j)..][..width]) * scale).collect();
                let largest = scores.iter().copied().fold(f64::MIN, f64::max);
                let sum: f64 = scores.iter().map(|s| (s - largest).exp()).sum();
                log_sums[(row * heads + head) * length + i] = largest + sum.ln();
                let p: Vec<f64> = scores.iter().map(|s| (s - largest).exp() / sum).collect();
                for c in 0..width {
                    out[at + c] = (0..=i).map(|j| p[j] * v[key(j) + c]).sum();
                }
                let d_own = &d_out[at..at + width];
                let d_p: Vec<f64> = (0..=i).map(|j| dot(d_own, &v[key(j)..][..width])).collect();
                let mean: f64 = dot(&p, &d_p);
                for j in 0..=i {
                    let d_score = p[j] * (d_p[j] - mean) * scale;
                    for c in 0..width {
                        d_q[at + c] += d_score * k[key(j) + c];
                        d_k[key(j) + c] += d_score * own[c];
                        d_v[key(j) + c] += p[j] * d_own[c];
                    }
                }
            }
        }
    }
    [out, log_sums, d_q, d_k, d_v]
}

fn attention_of<T: Float>(cpu: &mut Cpu, s: AttentionShape) -> ([Vec<f32>; 4], Vec<f32>, [Vec<f64>; 5]) {
    let n = s.rows * s.length;
    let q = values::<T>(n * s.heads * s.width, 1);
    let (k, v) = (values::<T>(n * s.kv_heads * s.width, 2), values::<T>(n * s.kv_heads * s.width, 3));
    let d_out = values::<f32>(q.len(), 4);
    let exact = attention64(s, &wide(&q), &wide(&k), &wide(&v), &wide(&d_out));
    let mut out = vec![T::default(); q.len()];
    let mut log_sums = vec![0.0; n * s.heads];
    let [q, k, v] = [&q, &k, &v].map(|x| View::from(x.as_slice()));
    cpu.attention(s, q, k, v, out.as_mut_slice().into(), log_sums.as_mut_slice().into());
    let (mut d_q, mut d_k) = (vec![0.0; q.len()], vec![0.0; k.len()]);
    let mut d_v = d_k.clone();
    let a = AttentionBackward {
        q,
        k,
        v,
        out: out.as_slice().into(),
        log_sums: log_sums.as_slice().into(),
        d_out: d_out.as_slice().into(),
        d_q: d_q.as_mut_slice().into(),
        d_k: d_k.as_mut_slice().into(),
        d_v: d_v.as_mut_slice().into(),
    };
    cpu.attention_backward(s, a);
    let out = out.into_iter().map(T::to_f32).collect();
    ([out, d_q, d_k, d_v], log_sums, exact)
}

#[test]
fn attention_agrees_with_its_definition() {
    let shape =
        |rows, length, heads, kv_heads, width| AttentionShape { rows, length, heads, kv_heads, width };
    let shapes = [
        shape(1, 1, 1, 1, 2),
        shape(2, 7, 4, 2, 6),
        shape(1, 65, 2, 1, 34),
        // Query heads of one key/value head by several threads, evenly and not.
        shape(1, 20, 6, 2, 8),
        shape(1, 33, 5, 1, 6),
        shape(3, 15, 3, 3, 16),
        shape(1, 250, 2, 1, 32),
        shape(1, 113, 1, 1, 80),
        // Keys in more than one block, and rows of scores as long as pages.
        shape(1, 530, 1, 1, 6),
        shape(1, 1000, 1, 1, 6),
        shape(1, 9, 1, 1, WIDEST_HEAD),
    ];
    for s in shapes {
        let mut first = None;
        at_each_level(|level| {
            let (got, log_sums, exact) = attention_of::<f32>(&mut cpu(1), s);
            for (got, exact) in got.iter().zip([&exact[0], &exact[2], &exact[3], &exact[4]]) {
                // With one token nothing depends on queries and keys.
                let most = exact.iter().fold(1e-30, |m: f64, x| m.max(x.abs()));
                let far = distance(got, exact) * if most < 1e-12 { most } else { 1.0 };
                assert!(far < 5e-6, "{s:?} {level:?}: {far}");
            }
            assert!(distance(&log_sums, &exact[1]) < 1e-6, "{s:?} {level:?}");
            let (threaded, ..) = attention_of::<f32>(&mut cpu(3), s);
            assert_eq!(threaded.each_ref().map(|x| bits(x)), got.each_ref().map(|x| bits(x)));
            let first = first.get_or_insert_with(|| got.each_ref().map(|x| bits(x)));
            assert_eq!(*first, got.each_ref().map(|x| bits(x)), "{s:?} {level:?}");
            // With AMX, where this processor has it, and without.
            for isa in [Isa::half(), Isa::single()] {
                let cpu = |threads| Cpu { half: isa, ..cpu(threads) };
                let (got, _, exact) = attention_of::<bf16>(&mut cpu(1), s);
                for (got, exact) in got.iter().zip([&exact[0], &exact[2], &exact[3], &exact[4]]) {
                    assert!(
                        s.length == 1 || distance(got, exact) < 2e-2,
                        "{s:?} {isa:?} {}",
                        distance(got, exact)
                    );
                }
                let (threaded, ..) = attention_of::<bf16>(&mut cpu(3), s);
                assert_eq!(threaded.each_ref().map(|x| bits(x)), got.each_ref().map(|x| bits(x)));
            }
        });
    }
}

#[test]
fn heads_are_divided_so_that_the_busiest_thread_has_least() {
    // Groups of heads, heads of a group, threads: pieces of each group.
    for (groups, group, threads, expected) in
        [(64, 4, 2, 1), (8, 4, 12, 4), (8, 4, 16, 2), (8, 4, 64, 4), (1, 32, 7, 7), (3, 1, 16, 1)]
    {
        assert_eq!(super::pieces(groups, group, threads), expected, "{groups} x {group} on {threads}");
    }
}

/// Of which a model has as many at once as it was built for, and more only if they are shorter.
#[test]
fn attention_with_less_memory_than_threads_has_the_same_bits() {
    let (threads, rows, hidden, sequences, length) = (3, 1, 1, 1, 700);
    let (heads, kv_heads, width, depth, backward) = (1, 1, WIDEST_HEAD, 1, true);
    let shape =
        CpuShape { threads, rows, hidden, sequences, length, heads, kv_heads, width, depth, backward };
    let memory = CpuMemory { words: Buffer::zeroed(shape.words()), partial: Buffer::zeroed(shape.partial()) };
    let mut scarce = Cpu::new(&shape, memory).unwrap();
    let shape = AttentionShape { rows: 3, length: 300, heads: 2, kv_heads: 1, width };
    let places = scarce.memory.words.len() / attention::words(shape.length, width, true);
    assert!((1..3).contains(&places), "memory for {places} of 3 threads at once");
    let (got, log_sums, _) = attention_of::<f32>(&mut scarce, shape);
    let (expected, expected_sums, _) = attention_of::<f32>(&mut cpu(1), shape);
    assert_eq!(got.each_ref().map(|x| bits(x)), expected.each_ref().map(|x| bits(x)));
    assert_eq!(bits(&log_sums), bits(&expected_sums));
}

/// A central difference of `f` at `x` along `direction`.
fn slope(f: impl Fn(&[f64]) -> f64, x: &[f64], direction: &[f64]) -> f64 {
    let at = |h: f64| f(&x.iter().zip(direction).map(|(x, d)| x + h * d).collect::<Vec<_>>());
    (at(1e-6) - at(-1e-6)) / 2e-6
}

fn dot64(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn norm64(x: &[f64], w: &[f64], eps: f64) -> Vec<f64> {
    let row = |x: &[f64]| {
        let s = 1.0 / (dot64(x, x) / w.len() as f64 + eps).sqrt();
        x.iter().zip(w).map(|(x, w)| x * s * w).collect::<Vec<_>>()
    };
    x.chunks(w.len()).flat_map(row).collect()
}

#[test]
fn norms_agree_with_their_definition_and_differences() {
    for (rows, h) in [(1, 2), (3, 17), (70, 33), (130, 64)] {
        let (x, w) = (values::<f32>(rows * h, 1), values::<f32>(h, 2));
        let (d_out, before) = (values::<f32>(rows * h, 3), values::<f32>(rows * h, 4));
        let eps = 1e-5;
        let mut results = Vec::new();
        at_each_level(|_| {
            for threads in [1, 3] {
                let mut cpu = cpu(threads);
                let (mut out, mut d_x, mut d_w) = (vec![0.0; x.len()], before.clone(), vec![0.0; h]);
                let v = |x: &[f32]| -> Vec<f32> { x.to_vec() };
                Ops::<f32>::norm(
                    &mut cpu,
                    x.as_slice().into(),
                    w.as_slice().into(),
                    eps,
                    out.as_mut_slice().into(),
                );
                cpu.norm_backward(
                    Normed { x: x.as_slice().into(), weight: w.as_slice().into(), eps },
                    d_out.as_slice().into(),
                    d_x.as_mut_slice().into(),
                    true,
                    d_w.as_mut_slice().into(),
                );
                results.push([v(&out), v(&d_x), v(&d_w)]);
            }
        });
        assert!(results.windows(2).all(|r| r[0] == r[1]), "{rows} x {h}: the same bits everywhere");
        let [out, d_x, d_w] = &results[0];
        let (x, w, d_out) = (wide(&x), wide(&w), wide(&d_out));
        let eps = f64::from(eps);
        assert!(distance(out, &norm64(&x, &w, eps)) < 1e-6);
        let d_x: Vec<f64> = wide(d_x).iter().zip(wide(&before)).map(|(d, b)| d - b).collect();
        let direction = wide(&values::<f32>(x.len(), 5));
        let numeric = slope(|x| dot64(&norm64(x, &w, eps), &d_out), &x, &direction);
        assert!(
            (numeric - dot64(&d_x, &direction)).abs()
                < 1e-4 * dot64(&d_x, &d_x).sqrt() * (x.len() as f64).sqrt()
        );
        let direction = wide(&values::<f32>(h, 6));
        let numeric = slope(|w| dot64(&norm64(&x, w, eps), &d_out), &w, &direction);
        assert!(
            (numeric - dot64(&wide(d_w), &direction)).abs()
                < 1e-4 * dot64(&wide(d_w), &wide(d_w)).sqrt() * (h as f64).sqrt()
        );
    }
}

#[test]
fn swiglu_agrees_with_its_definition_and_derivatives() {
    // Whose parts several threads take, too.
    for len in [1, 7, 33, 1000, 3 * 4096 + 7] {
        let scale = |x: Vec<f32>| x.into_iter().map(|x| x * 9.0).collect::<Vec<f32>>();
        let (gate, up, d) = (scale(values(len, 1)), values::<f32>(len, 2), values::<f32>(len, 3));
        let mut results = Vec::new();
        at_each_level(|_| {
            for threads in [1, 3] {
                let mut cpu = cpu(threads);
                let mut out = vec![0.0; len];
                cpu.swiglu(gate.as_slice().into(), up.as_slice().into(), out.as_mut_slice().into());
                let (mut d_gate, mut d_up, mut again) = (gate.clone(), up.clone(), d.clone());
                cpu.swiglu_backward(
                    d_gate.as_mut_slice().into(),
                    d_up.as_mut_slice().into(),
                    again.as_mut_slice().into(),
                );
                assert_eq!(again, out);
                results.push([out, d_gate, d_up]);
            }
        });
        let all_bits = |r: &[Vec<f32>; 3]| r.each_ref().map(|x| bits(x));
        assert!(results.windows(2).all(|r| all_bits(&r[0]) == all_bits(&r[1])), "the same bits everywhere");
        let of = |f: fn(f64, f64, f64) -> f64| -> Vec<f64> {
            (0..len).map(|i| f(f64::from(gate[i]), f64::from(up[i]), f64::from(d[i]))).collect()
        };
        let [out, d_gate, d_up] = &results[0];
        assert!(distance(out, &of(|g, u, _| g / (1.0 + (-g).exp()) * u)) < 1e-6);
        assert!(distance(d_up, &of(|g, _, d| g / (1.0 + (-g).exp()) * d)) < 1e-6);
        let slope = |g: f64, u: f64, d: f64| {
            let s = 1.0 / (1.0 + (-g).exp());
            d * u * (s + g * s * (1.0 - s))
        };
        assert!(distance(d_gate, &of(slope)) < 1e-6);
    }
}

#[test]
fn rotary_embedding_turns_and_turns_back() {
    let (heads, width, length, rows) = (3, 10, 7, 2);
    let angles: Vec<f32> = (0..length)
        .flat_map(|p| {
            let angle = move |i: usize| p as f64 * 0.7f64.powi(i as i32);
            let cos = (0..width / 2).map(move |i| angle(i).cos() as f32);
            cos.chain((0..width / 2).map(move |i| angle(i).sin() as f32))
        })
        .collect();
    let x = values::<f32>(rows * length * heads * width, 1);
    let mut results = Vec::new();
    at_each_level(|_| {
        for threads in [1, 3] {
            let mut cpu = cpu(threads);
            let mut y = x.clone();
            let view = View::from(angles.as_slice());
            let mut turn = |y: &mut [f32], turn| {
                Ops::<f32>::rope(&mut cpu, ViewMut::from(y), view, heads, width, length, turn);
            };
            turn(&mut y, Turn::Forward);
            for (i, (x, y)) in x.chunks(width).zip(y.chunks(width)).enumerate() {
                let p = i / heads % length;
                for j in 0..width / 2 {
                    let (s, c) = (p as f64 * 0.7f64.powi(j as i32)).sin_cos();
                    let (a, b) = (f64::from(x[j]), f64::from(x[j + width / 2]));
                    assert!((f64::from(y[j]) - (a * c - b * s)).abs() < 1e-6);
                    assert!((f64::from(y[j + width / 2]) - (b * c + a * s)).abs() < 1e-6);
                }
            }
            let turned = bits(&y);
            turn(&mut y, Turn::Back);
            assert!(distance(&y, &wide(&x)) < 1e-6);
            results.push([turned, bits(&y)]);
        }
    });
    assert!(results.windows(2).all(|r| r[0] == r[1]), "the same bits everywhere");
}

#[test]
fn cross_entropy_agrees_with_its_definition() {
    for (rows, vocab) in [(1, 1), (5, 37), (9, 256)] {
        let logits: Vec<f32> = values::<f32>(rows * vocab, 1).into_iter().map(|x| x * 20.0).collect();
        let targets: Vec<u32> = (0..rows).map(|r| (r * 11 % vocab) as u32).collect();
        let mut results = Vec::new();
        at_each_level(|_| {
            for threads in [1, 2] {
                let mut cpu = cpu(threads);
                let (mut losses, mut alone) = (vec![0.0; rows], vec![0.0; rows]);
                let mut lost = logits.clone();
                // Of f32 the gradient is where the logits were; of others it has a place of its own, and is rounded.
                let (logits_view, targets_view) = (lost.as_mut_slice().into(), targets.as_slice().into());
                let none: &mut [f32] = &mut [];
                let d = cpu.cross_entropy(
                    logits_view,
                    targets_view,
                    losses.as_mut_slice().into(),
                    none.into(),
                    0.25,
                );
                let d: Vec<f32> = d.host().to_vec();
                assert_eq!(bits(&d), bits(&lost));
                lost.clone_from(&logits);
                let mut room = vec![bf16::ZERO; rows * vocab];
                let (logits_view, room_view) = (lost.as_mut_slice().into(), room.as_mut_slice().into());
                let rounded = cpu.cross_entropy(
                    logits_view,
                    targets_view,
                    alone.as_mut_slice().into(),
                    room_view,
                    0.25,
                );
                assert!(rounded.host().iter().zip(&d).all(|(rounded, d)| *rounded == bf16::from_f32(*d)));
                assert_eq!(losses, alone);
                lost.clone_from(&logits);
                let (lost, targets_view) = (lost.as_mut_slice().into(), targets.as_slice().into());
                Ops::<f32>::losses(&mut cpu, lost, targets_view, alone.as_mut_slice().into());
                assert_eq!(losses, alone);
                for r in 0..rows {
                    let row = wide(&logits[r * vocab..][..vocab]);
                    let largest = row.iter().copied().fold(f64::MIN, f64::max);
                    let sum: f64 = row.iter().map(|x| (x - largest).exp()).sum();
                    let target = targets[r] as usize;
                    assert!((f64::from(losses[r]) - (largest + sum.ln() - row[target])).abs() < 2e-5);
                    for (j, x) in row.iter().enumerate() {
                        let exact = ((x - largest).exp() / sum - f64::from(u8::from(j == target))) * 0.25;
                        assert!((f64::from(d[r * vocab + j]) - exact).abs() < 1e-6);
                    }
                }
                results.push([bits(&losses), bits(&d)]);
            }
        });
        assert!(results.windows(2).all(|r| r[0] == r[1]), "{rows} x {vocab}: the same bits everywhere");
    }
}

#[test]
fn embedding_gradients_are_summed_by_token() {
    let tokens = [3u32, 0, 3, NO_ROW, 10, 3, 7, 0, NO_ROW];
    let mut order: Vec<u64> =
        tokens.iter().enumerate().map(|(i, &t)| u64::from(t) << 32 | i as u64).collect();
    order.sort_unstable();
    // Columns that one thread has alone, and that three divide.
    for ((vocab, hidden), add) in [((11, 70), false), ((11, 600), false), ((11, 600), true)] {
        let d = values::<f32>(tokens.len() * hidden, 1);
        let mut results = Vec::new();
        at_each_level(|_| {
            for threads in [1, 3] {
                let mut table = values::<f32>(vocab * hidden, 2);
                let mut exact = if add { wide(&table) } else { vec![0.0; vocab * hidden] };
                for (i, &t) in tokens.iter().enumerate().filter(|(_, t)| **t != NO_ROW) {
                    for c in 0..hidden {
                        exact[t as usize * hidden + c] += f64::from(d[i * hidden + c]);
                    }
                }
                let table_view = table.as_mut_slice().into();
                cpu(threads).embed_backward(
                    order.as_slice().into(),
                    View::<f32>::from(d.as_slice()),
                    table_view,
                    add,
                );
                assert!(distance(&table, &exact) < 1e-6);
                results.push(bits(&table));
            }
        });
        assert!(results.windows(2).all(|r| r[0] == r[1]), "{hidden} columns: the same bits everywhere");
    }
}
