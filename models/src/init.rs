//! How a new model starts: any range of any tensor from the seed, so that each rank fills only its shard.
//!
//! Every element is a function of (seed, tensor name, index) by integer arithmetic and by IEEE additions,
//! products, divisions and square roots only. The system's `ln` and `cos` would differ between machines; so the
//! bits depend neither on the machine nor on world, stage or order.

use crate::unit::{Init, TensorSpec};
use collectives::{digest, mix};
use std::ops::Range;

/// Fills `out` with elements `range` (row-major) of the new tensor `spec`. The same seed, name and index give
/// the same value whatever the range.
///
/// # Panics
/// `range` is not inside the tensor, or `out` is of another length.
pub fn init_range(spec: &TensorSpec, seed: u64, range: Range<usize>, out: &mut [f32]) {
    assert!(range.start <= range.end && range.end <= spec.len(), "{range:?} of {} elements", spec.len());
    assert_eq!(range.len(), out.len(), "one place per element of the range");
    match spec.init {
        Init::Ones => out.fill(1.0),
        Init::Normal(deviation) => normal(spec, seed, deviation, range, out),
        Init::Padded { deviation, row } => {
            normal(spec, seed, deviation, range.clone(), out);
            let length = spec.len() / spec.shape[0];
            let start = (row * length).clamp(range.start, range.end);
            let end = ((row + 1) * length).clamp(range.start, range.end);
            out[start - range.start..end - range.start].fill(0.0);
        }
    }
}

/// Elements `range` of a tensor that is normal with mean 0.
fn normal(spec: &TensorSpec, seed: u64, deviation: f32, range: Range<usize>, out: &mut [f32]) {
    let stream = Stream::new(seed, &spec.name);
    for (value, index) in out.iter_mut().zip(range) {
        *value = (normal_quantile(stream.uniform(index as u64)) * f64::from(deviation)) as f32;
    }
}

/// Random bits as a function of an index: a counter-based generator.
pub(crate) struct Stream {
    offset: u64,
    key: u64,
}

impl Stream {
    /// The stream of this seed and name.
    pub(crate) fn new(seed: u64, name: &str) -> Self {
        let offset = mix(digest(name.bytes()) ^ mix(seed));
        Stream { offset, key: mix(offset ^ 0x6a09_e667_f3bc_c908) }
    }

    /// 64 uniform bits.
    #[inline(always)]
    pub(crate) fn bits(&self, index: u64) -> u64 {
        // Two rounds with a key between them: streams are not shifted copies of each other.
        mix(mix(self.offset.wrapping_add(index.wrapping_mul(0x9e37_79b9_7f4a_7c15))) ^ self.key)
    }

    /// Uniform in (0, 1), never at an end.
    #[inline(always)]
    fn uniform(&self, index: u64) -> f64 {
        ((self.bits(index) >> 12) as f64 + 0.5) * (1.0 / (1u64 << 52) as f64)
    }
}

/// The number below which a standard normal falls with probability `p`, to about 1e-7: algorithm AS 241
/// (Wichura 1988), its PPND7 form.
#[inline(always)]
fn normal_quantile(p: f64) -> f64 {
    let q = p - 0.5;
    if q.abs() <= 0.425 {
        let r = 0.180625 - q * q;
        let above = ((59.109374720 * r + 159.29113202) * r + 50.434271938) * r + 3.3871327179;
        let below = ((67.187563600 * r + 78.757757664) * r + 17.895169469) * r + 1.0;
        return q * above / below;
    }
    let r = (-ln(if q < 0.0 { p } else { 1.0 - p })).sqrt();
    let tail = if r <= 5.0 {
        let r = r - 1.6;
        let above = ((0.17023821103 * r + 1.3067284816) * r + 2.7568153900) * r + 1.4234372777;
        above / ((0.12021132975 * r + 0.73700164250) * r + 1.0)
    } else {
        let r = r - 5.0;
        let above = ((0.017337203997 * r + 0.42868294337) * r + 3.0812263860) * r + 6.6579051150;
        above / ((0.012258202635 * r + 0.24197894225) * r + 1.0)
    };
    if q < 0.0 { -tail } else { tail }
}

/// Natural logarithm of a positive normal number, by its exponent and the series of atanh.
fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut exponent = (bits >> 52) as i64 - 1023;
    let mut mantissa = f64::from_bits((bits & 0x000f_ffff_ffff_ffff) | 0x3ff0_0000_0000_0000);
    if mantissa > std::f64::consts::SQRT_2 {
        mantissa *= 0.5;
        exponent += 1;
    }
    // ln m = 2 atanh((m-1)/(m+1)), with |s| < 0.172.
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let square = s * s;
    let mut sum = 0.0;
    for odd in [19.0, 17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0] {
        sum = sum * square + 1.0 / odd;
    }
    2.0 * s * sum + exponent as f64 * std::f64::consts::LN_2
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(name: &str, init: Init) -> TensorSpec {
        TensorSpec { name: name.into(), shape: vec![500, 400], decay: true, init }
    }

    fn whole(name: &str, seed: u64) -> Vec<f32> {
        let spec = spec(name, Init::Normal(0.02));
        let mut out = vec![0.0; spec.len()];
        init_range(&spec, seed, 0..spec.len(), &mut out);
        out
    }

    #[test]
    fn any_range_has_the_bits_of_the_whole() {
        let all = whole("a", 1);
        let spec = spec("a", Init::Normal(0.02));
        for range in [0..1, 17..4113, 199_999..200_000, 5..5] {
            let mut part = vec![9.0; range.len()];
            init_range(&spec, 1, range.clone(), &mut part);
            assert!(part.iter().zip(&all[range]).all(|(a, b)| a.to_bits() == b.to_bits()));
        }
    }

    /// Pinned, so that a seed means the same model in every version and on every machine.
    #[test]
    fn bits_are_pinned() {
        let got: Vec<u32> =
            whole("model.embed_tokens.weight", 1337)[..4].iter().map(|x| x.to_bits()).collect();
        assert_eq!(got, PINNED);
    }
    const PINNED: [u32; 4] = [1020933602, 3163785842, 1017491900, 3162563551];

    #[test]
    fn elements_are_independent_standard_normals() {
        let x: Vec<f64> = whole("a", 1).iter().map(|&x| f64::from(x) / 0.02).collect();
        let n = x.len() as f64;
        let moment = |k: i32| x.iter().map(|v| v.powi(k)).sum::<f64>() / n;
        // Five standard errors of each moment of 200000 samples.
        assert!(moment(1).abs() < 5.0 / n.sqrt());
        assert!((moment(2) - 1.0).abs() < 5.0 * (2.0 / n).sqrt());
        assert!(moment(3).abs() < 5.0 * (15.0 / n).sqrt());
        assert!((moment(4) - 3.0).abs() < 5.0 * (96.0 / n).sqrt());
        // Neither neighbours, nor other names, nor other seeds correlate.
        let others = [whole("b", 1), whole("a", 2), whole("a", 1).split_off(1), whole("a", 1).split_off(400)];
        for other in others {
            let correlation =
                x.iter().zip(&other).map(|(a, &b)| a * f64::from(b) / 0.02).sum::<f64>() / other.len() as f64;
            assert!(correlation.abs() < 5.0 / (other.len() as f64).sqrt(), "{correlation}");
        }
    }

    #[test]
    fn quantiles_and_logarithms_are_accurate() {
        // From Python's statistics.NormalDist().inv_cdf.
        let known = [
            (0.5, 0.0),
            (0.6, 0.2533471031357998),
            (0.975, 1.9599639845400536),
            (1e-3, -3.090232306167813),
            (1e-9, -5.9978070150076865),
            (1e-15, -7.941345326170997),
        ];
        for (p, z) in known {
            assert!((normal_quantile(p) - z).abs() < 2e-7 * (1.0 + z.abs()), "{p}: {}", normal_quantile(p));
        }
        for x in [1e-16, 0.1, 0.7072, 0.7069, 1.0 - 1e-9, 1.0, 1.5, 3e10] {
            assert!((ln(x) - f64::ln(x)).abs() <= 1e-15 * (1.0 + f64::ln(x).abs()), "{x}");
        }
        assert!(Stream::new(0, "").uniform(0) > 0.0);
    }

    #[test]
    fn one_row_starts_as_zeros_whatever_the_range() {
        let (plain, padded) = (whole("a", 1), spec("a", Init::Padded { deviation: 0.02, row: 7 }));
        let row = 7 * 400..8 * 400;
        for range in
            [0..plain.len(), 0..row.start, 0..row.start + 1, row.start + 5..row.end - 5, row.end..row.end + 3]
        {
            let mut part = vec![9.0; range.len()];
            init_range(&padded, 1, range.clone(), &mut part);
            for (index, value) in range.zip(part) {
                assert_eq!(value, if row.contains(&index) { 0.0 } else { plain[index] }, "{index}");
            }
        }
    }

    #[test]
    fn norms_start_as_ones() {
        let mut out = [0.0; 3];
        init_range(&spec("norm", Init::Ones), 1, 7..10, &mut out);
        assert_eq!(out, [1.0; 3]);
    }
}
