//! One portable loop, compiled for several instruction sets and chosen at run time.
//!
//! A kernel is written once as an `#[inline(always)]` function of plain loops. [`simd_dispatch!`] compiles that
//! body for AVX-512, for AVX2 and for the build's baseline. Rust never contracts `a * b + c` and never reorders
//! floating-point additions, so every level gives the same bits: what differs is only how many elements one
//! instruction takes. A body that adds over many elements must fix its own lanes (say, 16 partial sums), or the
//! additions stay one after the other.
//!
//! [`simd_dispatch!`]: crate::simd_dispatch

use std::cell::Cell;

/// An instruction set that kernels are compiled for, from the narrowest to the widest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// What the build targets: SSE2 on x86-64, NEON on aarch64.
    Baseline,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 F, BW, CD, DQ and VL.
    Avx512,
}

impl Level {
    /// The widest that this processor runs.
    pub fn detected() -> Level {
        #[cfg(target_arch = "x86_64")]
        {
            use std::is_x86_feature_detected as has;
            if !(has!("avx2") && has!("fma")) {
                return Level::Baseline;
            }
            let wide = has!("avx512f") && has!("avx512bw") && has!("avx512cd");
            match wide && has!("avx512dq") && has!("avx512vl") {
                true => Level::Avx512,
                false => Level::Avx2,
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        Level::Baseline
    }

    /// Every level that this processor runs, for tests and benchmarks that compare them.
    pub fn available() -> impl Iterator<Item = Level> {
        let widest = Level::detected();
        [Level::Baseline, Level::Avx2, Level::Avx512].into_iter().filter(move |&l| l <= widest)
    }
}

/// Who made the processor, as CPUID spells it; zeros where there is no such instruction.
pub fn vendor() -> [u8; 12] {
    #[cfg(target_arch = "x86_64")]
    {
        let leaf = std::arch::x86_64::__cpuid(0);
        let mut name = [0; 12];
        for (part, register) in name.chunks_exact_mut(4).zip([leaf.ebx, leaf.edx, leaf.ecx]) {
            part.copy_from_slice(&register.to_le_bytes());
        }
        name
    }
    #[cfg(not(target_arch = "x86_64"))]
    [0; 12]
}

/// Whether the processor's instruction for copying is fast at any length (FSRM), so that kernels copy by it.
pub(crate) fn copies_fast() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let leaf = |number| std::arch::x86_64::__cpuid_count(number, 0);
        leaf(0).eax >= 7 && leaf(7).edx & 1 << 4 != 0
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Whether the processor multiplies tiles of bf16 (AMX), and the system lets this process do so.
pub fn tiles() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        use std::sync::LazyLock;
        static ALLOWED: LazyLock<bool> = LazyLock::new(|| {
            let leaf = |number| std::arch::x86_64::__cpuid_count(number, 0);
            let (bf16, tiles) = (1 << 22, 1 << 24);
            if leaf(0).eax < 7 || leaf(7).edx & (bf16 | tiles) != bf16 | tiles {
                return false;
            }
            // ARCH_REQ_XCOMP_PERM for the tiles' data: Linux keeps their 8 KiB only for those that have asked.
            const ASK: (libc::c_int, libc::c_ulong) = (0x1023, 18);
            // SAFETY: asks for what all threads of this process may use; no memory is touched.
            unsafe { libc::syscall(libc::SYS_arch_prctl, ASK.0, ASK.1) == 0 }
        });
        *ALLOWED
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// The [`vendor`] of AMD's processors.
pub const AMD: [u8; 12] = *b"AuthenticAMD";

thread_local! {
    static LEVEL: Cell<Option<Level>> = const { Cell::new(None) };
}

/// The level that this thread's kernels use: the detected one, unless inside [`with_level`].
#[inline]
pub fn level() -> Level {
    LEVEL.with(|cell| match cell.get() {
        Some(level) => level,
        None => {
            let level = Level::detected();
            cell.set(Some(level));
            level
        }
    })
}

/// Runs `f` with this thread's kernels at `level`, or the widest one that the processor has if that is
/// narrower. For tests and benchmarks that compare levels.
pub fn with_level<R>(level: Level, f: impl FnOnce() -> R) -> R {
    struct Restore(Option<Level>);
    impl Drop for Restore {
        fn drop(&mut self) {
            LEVEL.with(|cell| cell.set(self.0));
        }
    }
    let _restore = Restore(LEVEL.with(|cell| cell.replace(Some(level.min(Level::detected())))));
    f()
}

/// Compiles portable bodies for every [`Level`] and makes functions that pick one.
///
/// ```
/// collectives::simd_dispatch! {
///     /// y += x
///     pub fn add<T: collectives::Float>(y: &mut [f32], x: &[T]) = add_body;
/// }
///
/// #[inline(always)]
/// fn add_body<T: collectives::Float>(y: &mut [f32], x: &[T]) {
///     for (y, x) in y.iter_mut().zip(x) {
///         *y += x.to_f32();
///     }
/// }
///
/// let mut y = [1.0, 2.0];
/// add(&mut y, &[10.0f32, 20.0]);
/// assert_eq!(y, [11.0, 22.0]);
/// ```
#[macro_export]
macro_rules! simd_dispatch {
    ($(
        $(#[$attribute:meta])*
        $visibility:vis fn $name:ident $(<$($generic:ident : $bound:path),+ $(,)?>)?
            ($($argument:ident : $type:ty),* $(,)?) $(-> $result:ty)? = $body:ident;
    )*) => {$(
        $(#[$attribute])*
        $visibility fn $name $(<$($generic: $bound),+>)? ($($argument: $type),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx2,fma")]
                fn avx512 $(<$($generic: $bound),+>)? ($($argument: $type),*) $(-> $result)? {
                    $body $(::<$($generic),+>)? ($($argument),*)
                }
                #[target_feature(enable = "avx2,fma")]
                fn avx2 $(<$($generic: $bound),+>)? ($($argument: $type),*) $(-> $result)? {
                    $body $(::<$($generic),+>)? ($($argument),*)
                }
                match $crate::simd::level() {
                    $crate::simd::Level::Avx512 => {
                        // SAFETY: `level` never exceeds what the processor was detected to have.
                        return unsafe { avx512 $(::<$($generic),+>)? ($($argument),*) };
                    }
                    $crate::simd::Level::Avx2 => {
                        // SAFETY: as above.
                        return unsafe { avx2 $(::<$($generic),+>)? ($($argument),*) };
                    }
                    $crate::simd::Level::Baseline => {}
                }
            }
            $body $(::<$($generic),+>)? ($($argument),*)
        }
    )*};
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::Float;

    crate::simd_dispatch! {
        fn sum<T: Float>(x: &[T]) -> f32 = sum_body;
        fn scale(x: &mut [f32], by: f32) = scale_body;
    }

    #[inline(always)]
    fn sum_body<T: Float>(x: &[T]) -> f32 {
        let mut lanes = [0f32; 16];
        let (chunks, rest) = x.as_chunks::<16>();
        for chunk in chunks {
            for (lane, x) in lanes.iter_mut().zip(chunk) {
                *lane += x.to_f32() * 1.1;
            }
        }
        lanes.iter().sum::<f32>() + rest.iter().map(|x| x.to_f32() * 1.1).sum::<f32>()
    }

    #[inline(always)]
    fn scale_body(x: &mut [f32], by: f32) {
        for x in x {
            *x = *x * by + 0.3;
        }
    }

    #[test]
    fn every_level_gives_the_same_bits() {
        let x: Vec<f32> = (0..1003).map(|i| (i as f32 * 0.7).sin()).collect();
        let run = || {
            let mut y = x.clone();
            scale(&mut y, 1.7);
            let narrow: Vec<crate::bf16> = y.iter().map(|&y| Float::from_f32(y)).collect();
            (sum(&y).to_bits(), sum(&narrow).to_bits(), y)
        };
        let widest = run();
        for level in Level::available() {
            assert_eq!(with_level(level, run), widest, "{level:?}");
        }
    }

    #[test]
    fn a_level_is_restored_and_never_above_the_processor() {
        let before = level();
        with_level(Level::Avx512, || assert!(level() <= Level::detected()));
        with_level(Level::Baseline, || assert_eq!(level(), Level::Baseline));
        assert_eq!(level(), before);
    }
}
