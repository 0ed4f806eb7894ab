//! Functions and sums over f32 with the same bits on every machine, written so that loops over them vectorise.

use collectives::Float;

/// Partial sums of a long addition: one for each lane of the widest vector.
pub(super) const LANES: usize = 16;

/// e^x to about one unit in the last place; 0 below -86.98, where 2^(n-1) would be denormal; infinity above 88.8.
/// Multiplications and additions are fused by name: a third fewer instructions where the processor has them fused, and the
/// same bits where a library does it.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    // Adding and subtracting 1.5 * 2^23 rounds to an integer, which the low bits then hold.
    const ROUND: f32 = 12_582_912.0;
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Comparisons and not `min`, so that a NaN stays one.
    let bounded = if x > 89.0 { 89.0 } else { x };
    let bounded = if bounded < -88.0 { -88.0 } else { bounded };
    let shifted = bounded.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_LOW, n.mul_add(-LN2_HIGH, bounded));
    let mut p = 1.987_569_1e-4f32;
    for coefficient in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5] {
        p = p.mul_add(r, coefficient);
    }
    p = p.mul_add(r * r, r) + 1.0;
    // 2^(n-1) twice: 2^128 itself would overflow.
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(126) << 23;
    let e = p * f32::from_bits(exponent) * 2.0;
    if x < -86.98 { 0.0 } else { e }
}

/// The natural logarithm of a positive, normal number, to f32's precision, or of what is no number, which it stays.
#[inline(always)]
pub(super) fn ln(x: f32) -> f32 {
    let bits = x.to_bits();
    // x = m * 2^e with m between sqrt(1/2) and sqrt(2).
    let e = (bits.wrapping_sub(0x3f35_04f3) as i32) >> 23;
    let m = f64::from(f32::from_bits(bits.wrapping_sub((e << 23) as u32)));
    let z = (m - 1.0) / (m + 1.0);
    let zz = z * z;
    let mut series = 1.0 / 15.0;
    for k in [13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0] {
        series = series * zz + 1.0 / k;
    }
    let ln = (f64::from(e) * std::f64::consts::LN_2 + 2.0 * z * series) as f32;
    if x.is_nan() { x } else { ln }
}

/// The sum of products.
#[inline(always)]
pub(super) fn dot<A: Float, B: Float>(a: &[A], b: &[B]) -> f32 {
    let mut lanes = [0f32; LANES];
    let (a_chunks, a_rest) = a.as_chunks::<LANES>();
    let (b_chunks, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for l in 0..LANES {
            lanes[l] += a[l].to_f32() * b[l].to_f32();
        }
    }
    for (lane, (a, b)) in lanes.iter_mut().zip(a_rest.iter().zip(b_rest)) {
        *lane += a.to_f32() * b.to_f32();
    }
    tree(lanes)
}

/// The largest element; minus infinity if there is none.
#[inline(always)]
pub(super) fn max(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for l in 0..LANES {
            lanes[l] = if chunk[l] > lanes[l] { chunk[l] } else { lanes[l] };
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane = if x > lane { *x } else { *lane };
    }
    upper(lanes)
}

/// Replaces x by `exp(x * scale - shift)` and gives the sum.
#[inline(always)]
pub(super) fn exp_sum(x: &mut [f32], scale: f32, shift: f32) -> f32 {
    let mut lanes = [0f32; LANES];
    let (chunks, rest) = x.as_chunks_mut::<LANES>();
    for chunk in chunks {
        for l in 0..LANES {
            chunk[l] = exp(chunk[l] * scale - shift);
            lanes[l] += chunk[l];
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *x = exp(*x * scale - shift);
        *lane += *x;
    }
    tree(lanes)
}

/// The largest of the lanes.
#[inline(always)]
pub(super) fn upper(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for l in 0..width {
            lanes[l] = if lanes[l + width] > lanes[l] { lanes[l + width] } else { lanes[l] };
        }
        width /= 2;
    }
    lanes[0]
}

/// Adds up the lanes.
#[inline(always)]
pub(super) fn tree(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for l in 0..width {
            lanes[l] += lanes[l + width];
        }
        width /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_and_ln_are_within_two_units_of_the_last_place() {
        let worst = |f: fn(f32) -> f32, exact: fn(f64) -> f64, xs: &mut dyn Iterator<Item = f32>| {
            let mut worst = 0f64;
            for x in xs {
                let (y, e) = (f(x), exact(f64::from(x)));
                let unit =
                    f64::from(f32::from_bits((e as f32).abs().to_bits() + 1)) - f64::from((e as f32).abs());
                worst = worst.max((f64::from(y) - e).abs() / unit);
            }
            worst
        };
        let grid = (-869_800..887_000).map(|i| i as f32 * 1e-4);
        assert!(worst(exp, f64::exp, &mut grid.clone()) < 2.0);
        let positive = (1..200_000).map(|i| i as f32 * 0.013).chain((0..80).map(|i| 2f32.powi(i - 40) * 1.1));
        assert!(worst(ln, f64::ln, &mut positive.clone()) < 1.0);
    }

    #[test]
    fn the_edges_of_exp() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-100.0), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(88.9), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
        assert_eq!(ln(1.0), 0.0);
        assert!(ln(f32::NAN).is_nan() && exp(f32::NAN).is_nan());
    }

    #[test]
    fn sums_take_every_element_once() {
        for n in [0, 1, 15, 16, 17, 100] {
            let mut x: Vec<f32> = (0..n).map(|i| i as f32).collect();
            assert_eq!(dot(&x, &vec![2.0; n]), (n * n.saturating_sub(1)) as f32);
            assert_eq!(max(&x), if n == 0 { f32::NEG_INFINITY } else { (n - 1) as f32 });
            assert!((exp_sum(&mut x, 0.0, 0.0) - n as f32).abs() < 1e-4);
        }
    }
}
