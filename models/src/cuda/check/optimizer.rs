//! What the optimizer runs, bit for bit against the loops of the CPU.

use super::bed::*;
use crate::cuda::{self, Coefficients, LEAST_MOMENT, NORM_BLOCK, NORM_LANES};
use collectives::device::Queue;
use collectives::{Float, Result, bf16, f16};
use std::ops::Range;

/// The loop of `zero/src/optimizer/adamw.rs`.
fn element(c: &Coefficients, w: f32, g: f32, m: &mut f32, v: &mut f32) -> f32 {
    let g = g * c.gradient_factor;
    let first = *m + (g - *m) * c.one_minus_beta1;
    let second = *v * c.beta2 + g * g * c.one_minus_beta2;
    *m = if first.abs() < LEAST_MOMENT { 0.0 } else { first };
    *v = if *m == 0.0 && second < f32::MIN_POSITIVE { 0.0 } else { second };
    w * c.keep - c.step_size * *m / (v.sqrt() * c.root_correction + c.eps)
}

fn check_adamw<T: Float, G: Float, Q: Queue>(bed: &Bed<Q>, n: usize, range: Range<usize>, with_master: bool) {
    let c = Coefficients {
        one_minus_beta1: 0.1,
        beta2: 0.99,
        one_minus_beta2: 0.01,
        eps: 1e-8,
        step_size: 3e-3,
        root_correction: 1.7,
        keep: 0.9997,
        gradient_factor: 0.73,
    };
    let mut grad = bed.random::<G>(1, n, 0.1);
    // Elements that were last seen long ago: moments that this step makes too small to keep.
    let unseen = || (0..n).step_by(3);
    unseen().for_each(|i| grad.host_mut()[i] = G::from_f32(0.0));
    let start = || {
        let (mut m, mut v) = (bed.random::<f32>(2, n, 0.1), bed.random::<f32>(3, n, 0.01));
        v.host_mut().iter_mut().for_each(|v| *v = v.abs());
        for i in unseen() {
            m.host_mut()[i] = if i % 2 == 0 { 1.05e-30 } else { -1.05e-30 };
            v.host_mut()[i] = f32::MIN_POSITIVE;
        }
        (bed.random::<f32>(4, n, 1.0), m, v, bed.random::<T>(5, n, 1.0))
    };
    let (mut w, mut m, mut v, mut p) = start();
    for i in range.clone() {
        let g = T::from_f32(grad.host()[i].to_f32()).to_f32();
        let old = if with_master { w.host()[i] } else { p.host()[i].to_f32() };
        let new = element(&c, old, g, &mut m.host_mut()[i], &mut v.host_mut()[i]);
        if with_master {
            w.host_mut()[i] = new;
        }
        p.host_mut()[i] = T::from_f32(new);
    }
    let want = vec![bytes(&w), bytes(&m), bytes(&v), bytes(&p)];
    let name = format!("AdamW on {range:?} of {n} {}", T::DTYPE);
    bed.in_every_order(&name, &mut |stream| {
        let (mut w, mut m, mut v, mut p) = start();
        let master = with_master.then(|| w.view_mut());
        let (m_view, v_view) = (m.view_mut(), v.view_mut());
        stream.run([cuda::adamw(&c, grad.view(), master, m_view, v_view, p.view_mut(), range.clone())]);
        let got = vec![bytes(&w), bytes(&m), bytes(&v), bytes(&p)];
        bed.that(got == want, || format!("{name}: not the bits of the processor"));
        got
    });
}

pub fn adamw_has_the_bits_of_the_processor<Q: Queue>(bed: &Bed<Q>) {
    for range in [0..3000, 0..0, 5..6, 1..3, 1..7, 3..1003, 4..2052, 2999..3000] {
        check_adamw::<bf16, bf16, Q>(bed, 3000, range.clone(), true);
        check_adamw::<bf16, f32, Q>(bed, 3000, range.clone(), true);
        check_adamw::<f16, f32, Q>(bed, 3000, range.clone(), true);
        check_adamw::<f32, f32, Q>(bed, 3000, range, false);
    }
}

/// One block of `squares_body` in `zero/src/kernels/host.rs`.
fn block_squares<T: Float, G: Float>(g: &[G]) -> f64 {
    let mut lanes = [0f64; NORM_LANES];
    for row in g.chunks_exact(NORM_LANES) {
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
    lanes[0]
}

/// The words of an exact sum to which numbers are added bit by bit: as often as each power of two is in them.
fn words_of(numbers: impl Iterator<Item = f64>) -> Vec<u64> {
    let (mut counts, mut others) = (vec![0u64; 640], 0);
    for x in numbers {
        let (field, mantissa) = ((x.to_bits() >> 52 & 0x7ff) as usize, x.to_bits() & ((1 << 52) - 1));
        match field {
            0 => assert_eq!(mantissa, 0, "squares of f32 are no subnormal f64"),
            0x7ff => others += if mantissa == 0 { 1 } else { 1 << 32 },
            _ => (0..=52)
                .filter(|bit| (mantissa | 1 << 52) >> bit & 1 == 1)
                .for_each(|bit| counts[field + bit + 298 - 1075] += 1),
        }
    }
    let digit = |bits: &[u64]| bits.iter().rev().fold(0, |sum, count| 2 * sum + count);
    counts.chunks(32).map(digit).chain([others]).collect()
}

fn check_squares<T: Float, G: Float, Q: Queue>(bed: &Bed<Q>, blocks: usize, scale: f64, special: &[f32]) {
    let mut g = bed.random::<G>(1, blocks * NORM_BLOCK, scale).host().to_vec();
    special
        .iter()
        .enumerate()
        .for_each(|(i, x)| g[(i * 7919 + 1000) % (blocks * NORM_BLOCK)] = G::from_f32(*x));
    let g = bed.copy_of::<G>(&g);
    // What was there stays in the sum.
    let before: Vec<u64> = (0..cuda::SQUARES_WORDS as u64).map(|i| (i * i) << 31).collect();
    let sums = words_of(g.host().chunks_exact(NORM_BLOCK).map(block_squares::<T, G>));
    let want: Vec<u64> = before.iter().zip(&sums).map(|(before, sum)| before + sum).collect();
    let name = format!("squares of {blocks} blocks of {} times {scale}", T::DTYPE);
    bed.in_every_order(&name, &mut |stream| {
        let mut sum = bed.copy_of::<u64>(&before);
        stream.run([cuda::squares::<T, G>(g.view(), sum.view_mut())]);
        bed.that(sum.host() == want, || format!("{name}: not the bits of the processor"));
        vec![bytes(&sum)]
    });
}

pub fn sums_of_squares_have_the_bits_of_the_processor<Q: Queue>(bed: &Bed<Q>) {
    for (blocks, scale) in [(1, 1e3), (15, 1e-3), (16, 1e-42), (65, 1e37), (130, 1.0), (600, 1e-12)] {
        check_squares::<bf16, bf16, Q>(bed, blocks, scale, &[]);
        check_squares::<bf16, f32, Q>(bed, blocks, scale, &[]);
        check_squares::<f32, f32, Q>(bed, blocks, scale, &[f32::MAX, f32::from_bits(1), -0.0]);
    }
    check_squares::<f16, f16, Q>(bed, 3, 1.0, &[f32::INFINITY]);
    check_squares::<f32, f32, Q>(bed, 7, 1.0, &[f32::NAN, f32::INFINITY, -f32::INFINITY, f32::NAN]);
}

fn check_casts<T: Float, Q: Queue>(bed: &Bed<Q>, n: usize, offset: usize) {
    let (x, y) = (bed.random::<f32>(1, n + offset, 1.0), bed.random::<T>(2, n + offset, 1.0));
    let (x, y) = (x.view().slice(offset..n + offset), y.view().slice(offset..n + offset));
    let name = format!("casts of {n} {}", T::DTYPE);
    bed.in_every_order(&name, &mut |stream| {
        let mut narrow = bed.unwritten::<T>(n);
        let mut sum = bed.random::<f32>(3, n, 1.0);
        let before = bed.random::<f32>(3, n, 1.0);
        stream.run([cuda::narrow(x, narrow.view_mut()), cuda::accumulate(y, sum.view_mut())]);
        for i in 0..n {
            let (x, y) = (x.host()[i], y.host()[i].to_f32());
            let same = narrow.host()[i] == T::from_f32(x)
                && sum.host()[i].to_bits() == (before.host()[i] + y).to_bits();
            bed.that(same, || format!("{name}: element {i} is not rounded once"));
        }
        vec![bytes(&narrow), bytes(&sum)]
    });
}

pub fn casts_round_once<Q: Queue>(bed: &Bed<Q>) {
    for n in [1, 7, 63, 65, 200, 2100] {
        check_casts::<bf16, Q>(bed, n, 0);
        check_casts::<f16, Q>(bed, n, 0);
        check_casts::<f32, Q>(bed, n, 0);
    }
    check_casts::<bf16, Q>(bed, 300, 1);
}

/// In page-locked memory, which the device reaches where it is.
fn find<Q: Queue>(bed: &Bed<Q>, n: usize, at: Option<usize>, value: f32) -> Result<()> {
    let (mut x, mut found) = (bed.pinned::<bf16>(n)?, bed.pinned::<u32>(1)?);
    x.host_mut().copy_from_slice(bed.random::<bf16>(1, n, 1.0).host());
    if let Some(at) = at {
        x.host_mut()[at] = Float::from_f32(value);
    }
    let name = format!("{value} at {at:?} of {n}");
    bed.in_every_order(&name, &mut |stream| {
        found.host_mut()[0] = 0;
        stream.run([cuda::find_nonfinite(x.view(), found.view_mut())]);
        let fine = found.host()[0] == u32::from(at.is_some());
        bed.that(fine, || format!("{name}: found {}", found.host()[0]));
        vec![bytes(&found)]
    });
    Ok(())
}

pub fn what_is_not_finite_is_found_wherever_it_is<Q: Queue>(bed: &Bed<Q>) {
    for n in [1, 65, 3001] {
        for (at, value) in
            [(None, 0.0), (Some(0), f32::NAN), (Some(n - 1), f32::INFINITY), (Some(n / 2), f32::NEG_INFINITY)]
        {
            if let Err(error) = find(bed, n, at, value) {
                bed.refused(error.to_string());
            }
        }
    }
}
