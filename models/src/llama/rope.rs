//! The angles of rotary position embedding: transformers', whose models were trained with them. It computes in 32 bits, where
//! a position of 100000 turns by up to a hundredth more or less than it should. The system's functions would differ between
//! machines; here are additions, products, quotients and square roots only.

use crate::config::{Rope, RopeScaling};
use std::f64::consts::{FRAC_2_PI, TAU};

/// The angle that each of `width / 2` pairs turns per position.
fn frequencies(rope: &Rope, width: usize) -> Vec<f32> {
    (0..width / 2).map(|i| scaled(plain(rope, i, width), rope.scaling)).collect()
}

/// That of pair `i` without stretching.
fn plain(rope: &Rope, i: usize, width: usize) -> f32 {
    let theta = f64::from(rope.theta as f32);
    1.0 / power(theta, f64::from((2 * i) as f32 / width as f32)) as f32
}

/// What no pair turns by more per position, for a shape that may still be any.
pub(crate) fn fastest(rope: &Rope, width: usize) -> f32 {
    let plain = [0, width / 2 - 1].map(|i| plain(rope, i, width)).into_iter().fold(0.0, f32::max);
    match rope.scaling {
        RopeScaling::None => plain,
        RopeScaling::Linear { factor } => plain / factor as f32,
        RopeScaling::Llama3 { factor, .. } => plain.max(plain / factor as f32),
    }
}

fn scaled(frequency: f32, scaling: RopeScaling) -> f32 {
    match scaling {
        RopeScaling::None => frequency,
        RopeScaling::Linear { factor } => frequency / factor as f32,
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
            let (factor, context) = (factor as f32, original_context as f64);
            let wavelength = 1.0 / frequency * TAU as f32;
            if wavelength < (context / high_freq_factor) as f32 {
                return frequency;
            }
            if wavelength > (context / low_freq_factor) as f32 {
                return frequency / factor;
            }
            let turns = 1.0 / wavelength * context as f32;
            let smooth = (turns - low_freq_factor as f32) / (high_freq_factor - low_freq_factor) as f32;
            (1.0 - smooth) * frequency / factor + smooth * frequency
        }
    }
}

/// `base` to an exponent in [0, 1): a product of square roots of square roots, one for each bit of the exponent.
fn power(base: f64, mut exponent: f64) -> f64 {
    let (mut root, mut product) = (base, 1.0);
    while exponent > 0.0 {
        root = root.sqrt();
        exponent *= 2.0;
        if exponent >= 1.0 {
            product *= root;
            exponent -= 1.0;
        }
    }
    product
}

/// A quarter of a turn, in parts whose products with whole numbers below 2^28 are exact, and the rest.
const QUARTER: [f64; 3] = [1.570796251296997, 7.549789415861596e-8, 5.390302858158119e-15];

/// The largest angle that is told exactly, 2^28.
pub(crate) const LARGEST_ANGLE: f32 = (1 << 28) as f32;

/// Sine and cosine of an angle between 0 and [`LARGEST_ANGLE`].
fn sin_cos(angle: f64) -> (f64, f64) {
    let quarters = (angle * FRAC_2_PI + 0.5).floor();
    let x = QUARTER.iter().fold(angle, |x, part| x - quarters * part);
    // Taylor's series, 1 - x^2/(1*2) (1 - x^2/(3*4) (…)), of which the rest is below 10^-19 within an eighth of a turn.
    let series = |first: u32| {
        let denominators = (0..9).rev().map(|i| f64::from((first + 2 * i + 1) * (first + 2 * i + 2)));
        denominators.fold(1.0, |sum, denominator| 1.0 - x * x / denominator * sum)
    };
    let (sin, cos) = (x * series(1), series(0));
    match quarters as u64 % 4 {
        0 => (sin, cos),
        1 => (cos, -sin),
        2 => (-sin, -cos),
        _ => (-cos, sin),
    }
}

/// For each position, the cosines of the pairs' angles, then their sines: (length, width).
pub(super) fn angles(rope: &Rope, length: usize, width: usize, out: &mut [f32]) {
    let frequencies = frequencies(rope, width);
    for (position, row) in out.chunks_exact_mut(width).take(length).enumerate() {
        turn(position, &frequencies, row);
    }
}

fn turn(position: usize, frequencies: &[f32], row: &mut [f32]) {
    let (cos, sin) = row.split_at_mut(frequencies.len());
    for ((to_cos, to_sin), frequency) in cos.iter_mut().zip(sin).zip(frequencies) {
        let (sin, cos) = sin_cos(f64::from(position as f32 * frequency));
        (*to_cos, *to_sin) = (cos as f32, sin as f32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::SafeTensors;

    const LLAMA3: RopeScaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 8192,
    };

    /// By the formulas, which transformers' numbers are close to.
    #[test]
    fn each_scaling_is_what_it_is_called() {
        let base: Vec<f64> = (0..64).map(|i| 500_000f64.powf(-f64::from(i) / 64.0)).collect();
        let expected = |scaling, e: f64| match scaling {
            RopeScaling::None => e,
            RopeScaling::Linear { factor } => e / factor,
            RopeScaling::Llama3 { .. } => {
                let wavelength = TAU / e;
                let smooth = ((8192.0 / wavelength - 1.0) / 3.0).clamp(0.0, 1.0);
                (1.0 - smooth) * e / 8.0 + smooth * e
            }
        };
        for scaling in [RopeScaling::None, RopeScaling::Linear { factor: 4.0 }, LLAMA3] {
            let found = frequencies(&Rope { theta: 500_000.0, scaling }, 128);
            for (found, e) in found.into_iter().zip(&base) {
                let ratio = f64::from(found) / expected(scaling, *e);
                assert!((ratio - 1.0).abs() < 1e-6, "{scaling:?}: {ratio}");
            }
        }
    }

    #[test]
    fn angles_are_those_of_transformers_at_every_position() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/reference/angles.safetensors");
        let bytes = std::fs::read(file).unwrap();
        let all = SafeTensors::deserialize(&bytes).unwrap();
        let words = |name: &str| all.tensor(name).unwrap().data().to_vec();
        let positions: Vec<u8> = words("positions");
        let positions = positions.chunks_exact(4).map(|four| u32::from_le_bytes(four.try_into().unwrap()));
        let linear = RopeScaling::Linear { factor: 2.5 };
        for (name, scaling) in [("plain", RopeScaling::None), ("linear", linear), ("llama3", LLAMA3)] {
            let frequencies = frequencies(&Rope { theta: 500_000.0, scaling }, 128);
            let mut found = [0f32; 128];
            for (position, row) in positions.clone().zip(words(name).chunks_exact(4 * 128)) {
                turn(position as usize, &frequencies, &mut found);
                for (found, four) in found.iter().zip(row.chunks_exact(4)) {
                    let expected = f32::from_le_bytes(four.try_into().unwrap());
                    // PyTorch's own functions are right to a unit in the last place.
                    assert!((found - expected).abs() <= 6e-8, "{name} at {position}: {found} {expected}");
                }
            }
        }
    }

    #[test]
    fn sines_and_powers_are_those_of_the_system() {
        let angles =
            (0..200_000).map(|i| f64::from(i as f32 * i as f32 * 0.37)).filter(|angle| *angle < 2.6e8);
        for angle in angles {
            let ((sin, cos), (e_sin, e_cos)) = (sin_cos(angle), angle.sin_cos());
            assert!((sin - e_sin).abs() < 3e-16 && (cos - e_cos).abs() < 3e-16, "{angle}: {sin} {cos}");
        }
        for (base, i) in
            [1.5, 1e4, 5e5, 8e6, 1e12].into_iter().flat_map(|base| (0..97).map(move |i| (base, i)))
        {
            let exponent = f64::from(i as f32 / 97.0);
            let (found, expected) = (power(base, exponent), base.powf(exponent));
            assert!((found / expected - 1.0).abs() < 1e-14, "{base}^{exponent}: {found}");
        }
    }
}
