//! What GPUs promise.

/// What bounds kernels, as far as it is known.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Limits {
    /// Dense 16-bit FLOP/s, by the data sheet.
    pub flops: Option<f64>,
    /// Bytes a second of the memory, by the data sheet.
    pub bytes: Option<f64>,
    /// Bytes a second of a copy that was measured, read and written.
    pub copy: Option<f64>,
}

impl Limits {
    /// Those of the GPU of this name.
    pub fn of(name: &str) -> Self {
        // The first that all words of fit.
        let known: [(&[&str], f64, f64); 14] = [
            // By the memory of its processor, those with 96 GB of HBM3, and by its own.
            (&["GH200", "480GB"], 989e12, 4.0e12),
            (&["GH200", "120GB"], 989e12, 4.0e12),
            (&["GH200", "144G", "HBM3e"], 989e12, 4.9e12),
            (&["H200", "NVL"], 835e12, 4.8e12),
            (&["H200"], 989e12, 4.8e12),
            (&["H100", "PCIe"], 756e12, 2.0e12),
            (&["H100", "NVL"], 835e12, 3.9e12),
            (&["H100"], 989e12, 3.35e12),
            (&["H800", "PCIe"], 756e12, 2.0e12),
            (&["H800"], 989e12, 3.35e12),
            (&["B200"], 2250e12, 8e12),
            (&["A100", "40GB"], 312e12, 1.555e12),
            (&["A100", "PCIe"], 312e12, 1.935e12),
            (&["A100"], 312e12, 2.039e12),
        ];
        // A part of one, and boards that have more than one chip or another's power, promise something else.
        let unknown = ["MIG", "GB200", "GB300"].iter().any(|word| name.contains(word));
        let fits = |words: &[&str]| {
            // GH200 has H200 in it.
            let other = name.contains("GH200") && !words.contains(&"GH200");
            !unknown && !other && words.iter().all(|word| name.contains(word))
        };
        let found = known.iter().find(|(words, ..)| fits(words));
        match found {
            Some(&(_, flops, bytes)) => Limits { flops: Some(flops), bytes: Some(bytes), copy: None },
            None => Limits::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_drivers_are_known() {
        let of = |name| (Limits::of(name).flops, Limits::of(name).bytes);
        assert_eq!(of("NVIDIA H200"), (Some(989e12), Some(4.8e12)));
        assert_eq!(of("NVIDIA H100 80GB HBM3"), (Some(989e12), Some(3.35e12)));
        assert_eq!(of("NVIDIA H200 NVL").0, Some(835e12));
        for name in ["NVIDIA GH200 480GB", "NVIDIA GH200 120GB"] {
            assert_eq!(of(name), (Some(989e12), Some(4.0e12)), "{name}");
        }
        assert_eq!(of("NVIDIA GH200 144G HBM3e"), (Some(989e12), Some(4.9e12)));
        assert_eq!(of("NVIDIA GH200"), (None, None));
        assert_eq!(of("NVIDIA H800"), (Some(989e12), Some(3.35e12)));
        assert_eq!(of("NVIDIA H800 PCIe"), (Some(756e12), Some(2.0e12)));
        assert_eq!(of("NVIDIA H100 80GB HBM3 MIG 1g.10gb"), (None, None));
        assert_eq!(of("NVIDIA GB200"), (None, None));
        assert_eq!(of("NVIDIA H100 PCIe").1, Some(2.0e12));
        assert_eq!(of("NVIDIA A100-SXM4-80GB").1, Some(2.039e12));
        assert_eq!(Limits::of("Fake GPU 0"), Limits::default());
    }
}
