//! What the optimizer runs, bit for bit against the loops of the CPU.

use crate::tools::*;
use collectives::{Float, bf16, f16};
use models::cuda::{self, Coefficients};
use std::ops::Range;

/// The loop of `zero/src/optimizer/adamw.rs`.
fn element(c: &Coefficients, w: f32, g: f32, m: &mut f32, v: &mut f32) -> f32 {
    let g = g * c.clip;
    *m += (g - *m) * c.one_minus_beta1;
    *v = *v * c.beta2 + g * g * c.one_minus_beta2;
    w * c.keep - c.step_size * *m / (v.sqrt() * c.root_correction + c.eps)
}

fn check_adamw<T: Float, G: Float>(n: usize, range: Range<usize>, with_master: bool) {
    let c = Coefficients {
        one_minus_beta1: 0.1,
        beta2: 0.99,
        one_minus_beta2: 0.01,
        eps: 1e-8,
        step_size: 3e-3,
        root_correction: 1.7,
        keep: 0.9997,
        clip: 0.73,
    };
    let grad = random::<G>(1, n, 0.1);
    let start = || {
        let mut v = random::<f32>(3, n, 0.01);
        v.host_mut().iter_mut().for_each(|v| *v = v.abs());
        (random::<f32>(4, n, 1.0), random::<f32>(2, n, 0.1), v, random::<T>(5, n, 1.0))
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
    in_every_order(|stream| {
        let (mut w, mut m, mut v, mut p) = start();
        let master = with_master.then(|| w.view_mut());
        let (m_view, v_view) = (m.view_mut(), v.view_mut());
        stream.run([cuda::adamw(&c, grad.view(), master, m_view, v_view, p.view_mut(), range.clone())]);
        let got = vec![bytes(&w), bytes(&m), bytes(&v), bytes(&p)];
        assert!(got == want, "AdamW on {range:?} of {n} {}", T::DTYPE);
        got
    });
}

#[test]
fn adamw_has_the_bits_of_the_cpu() {
    for range in [0..3000, 0..0, 5..6, 1..7, 3..1003, 8..2048, 2999..3000] {
        check_adamw::<bf16, bf16>(3000, range.clone(), true);
        check_adamw::<bf16, f32>(3000, range.clone(), true);
        check_adamw::<f16, f32>(3000, range.clone(), true);
        check_adamw::<f32, f32>(3000, range, false);
    }
}

/// The loop of `zero/src/clip.rs`.
fn block_squares<T: Float, G: Float>(g: &[G]) -> f64 {
    let mut lanes = [0f64; 16];
    for row in g.chunks_exact(16) {
        for (lane, x) in lanes.iter_mut().zip(row) {
            let x = f64::from(T::from_f32(x.to_f32()).to_f32());
            *lane += x * x;
        }
    }
    let mut width = 8;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

fn check_squares<T: Float, G: Float>(blocks: usize) {
    let g = random::<G>(1, blocks * 1024, 1e3);
    let want: Vec<u64> = g.host().chunks_exact(1024).map(|b| block_squares::<T, G>(b).to_bits()).collect();
    in_every_order(|stream| {
        let mut out = copy_of::<f64>(&vec![f64::NAN; blocks]);
        stream.run([cuda::squares::<T, G>(g.view(), out.view_mut())]);
        assert_eq!(
            out.host().iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
            want,
            "{blocks} of {}",
            T::DTYPE
        );
        vec![bytes(&out)]
    });
}

#[test]
fn sums_of_squares_have_the_bits_of_the_cpu() {
    for blocks in [1, 15, 16, 33] {
        check_squares::<bf16, bf16>(blocks);
        check_squares::<bf16, f32>(blocks);
        check_squares::<f32, f32>(blocks);
    }
    check_squares::<f16, f16>(3);
}

fn check_casts<T: Float>(n: usize, offset: usize) {
    let (x, y) = (random::<f32>(1, n + offset, 1.0), random::<T>(2, n + offset, 1.0));
    let (x, y) = (x.view().slice(offset..n + offset), y.view().slice(offset..n + offset));
    let scale = 0.37f32;
    in_every_order(|stream| {
        let (mut narrow, mut widened) = (unwritten::<T>(n), unwritten::<f32>(n));
        let mut sum = random::<f32>(3, n, 1.0);
        let before = random::<f32>(3, n, 1.0);
        stream.run([
            cuda::narrow(x, narrow.view_mut(), scale),
            cuda::widen(y, widened.view_mut(), scale),
            cuda::accumulate(y, sum.view_mut()),
        ]);
        for i in 0..n {
            let (x, y) = (x.host()[i], y.host()[i].to_f32());
            assert_eq!(narrow.host()[i], T::from_f32(x * scale));
            assert_eq!(widened.host()[i].to_bits(), (y * scale).to_bits());
            assert_eq!(sum.host()[i].to_bits(), (before.host()[i] + y).to_bits());
        }
        vec![bytes(&narrow), bytes(&widened), bytes(&sum)]
    });
}

#[test]
fn casts_round_once() {
    for n in [1, 7, 63, 65, 200, 2100] {
        check_casts::<bf16>(n, 0);
        check_casts::<f16>(n, 0);
        check_casts::<f32>(n, 0);
    }
    check_casts::<bf16>(300, 1);
}

#[test]
fn what_is_not_finite_is_found_wherever_it_is() {
    for n in [1, 65, 3001] {
        for (at, value) in
            [(None, 0.0), (Some(0), f32::NAN), (Some(n - 1), f32::INFINITY), (Some(n / 2), f32::NEG_INFINITY)]
        {
            let mut x = random::<bf16>(1, n, 1.0);
            if let Some(at) = at {
                x.host_mut()[at] = Float::from_f32(value);
            }
            in_every_order(|stream| {
                let mut found = buffer::<u32>(1);
                stream.run([cuda::find_nonfinite(x.view(), found.view_mut())]);
                assert_eq!(found.host()[0], u32::from(at.is_some()), "{value} at {at:?} of {n}");
                vec![bytes(&found)]
            });
        }
    }
}
