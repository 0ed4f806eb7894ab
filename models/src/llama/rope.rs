//! The angles of rotary position embedding.

use crate::config::{Rope, RopeScaling};
use std::f64::consts::TAU;

/// The angle that each of `width / 2` pairs turns per position.
fn frequencies(rope: &Rope, width: usize) -> impl Iterator<Item = f64> {
    let Rope { theta, scaling } = *rope;
    (0..width / 2).map(move |i| {
        let frequency = theta.powf(-((2 * i) as f64) / width as f64);
        match scaling {
            RopeScaling::None => frequency,
            RopeScaling::Linear { factor } => frequency / factor,
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                let turns = original_context as f64 * frequency / TAU;
                let high = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                let high = high.clamp(0.0, 1.0);
                frequency * (high + (1.0 - high) / factor)
            }
        }
    })
}

/// For each position, the cosines of the pairs' angles, then their sines: (length, width).
pub(super) fn angles(rope: &Rope, length: usize, width: usize, out: &mut [f32]) {
    for (position, row) in out.chunks_exact_mut(width).take(length).enumerate() {
        let (cos, sin) = row.split_at_mut(width / 2);
        for ((cos, sin), frequency) in cos.iter_mut().zip(sin).zip(frequencies(rope, width)) {
            let angle = position as f64 * frequency;
            (*cos, *sin) = (angle.cos() as f32, angle.sin() as f32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_scaling_is_hugging_faces() {
        let plain: Vec<f64> = frequencies(&Rope::plain(10_000.0), 8).collect();
        assert_eq!(plain.len(), 4);
        for (f, e) in plain.iter().zip([1.0, 0.1, 0.01, 0.001]) {
            assert!((f / e - 1.0).abs() < 1e-12);
        }
        let linear = Rope { theta: 10_000.0, scaling: RopeScaling::Linear { factor: 4.0 } };
        for (f, e) in frequencies(&linear, 8).zip(&plain) {
            assert!((f * 4.0 / e - 1.0).abs() < 1e-12);
        }
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8192,
        };
        let llama3 = Rope { theta: 500_000.0, scaling };
        let base: Vec<f64> = frequencies(&Rope::plain(500_000.0), 128).collect();
        for (f, e) in frequencies(&llama3, 128).zip(base) {
            // The formula as transformers writes it, by wavelength.
            let wavelength = TAU / e;
            let expected = if wavelength < 8192.0 / 4.0 {
                e
            } else if wavelength > 8192.0 {
                e / 8.0
            } else {
                let smooth = (8192.0 / wavelength - 1.0) / 3.0;
                (1.0 - smooth) * e / 8.0 + smooth * e
            };
            assert!((f / expected - 1.0).abs() < 1e-12, "{f} {expected}");
        }
    }
}
