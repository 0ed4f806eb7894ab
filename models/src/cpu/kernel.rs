//! Register tiles of the matrix product, one per instruction set.
//!
//! Operands are packed into 32-bit lanes: one f32, or two bf16 that are neighbours along k. Every element of a
//! result is one chain of fused multiply-adds over k in ascending order, so all kernels that
//! widen give the same bits on every machine, for every blocking and however the work is split. The kernels of native bf16
//! instructions and of AMX, which add two products at a time, and AMX's sums of blocks along k, have bits of their own; they
//! depend on k, and not on where in a result an element is or on how the work is split.

#[cfg(target_arch = "x86_64")]
use super::amx::{Amx, Tiles};
use super::operands::Left;
use super::pack::{self, LEFT_STRIDE, Mat};
use collectives::device::MatmulPrecision;
use collectives::{DType, Float, bf16, simd};

/// The product of packed operands, a tile of up to `MR` x `NR` results at a time.
pub(super) trait Kernel: Copy + Send + Sync + 'static {
    /// Rows of the largest tile.
    const MR: usize;
    /// Columns of every tile; a multiple of 16 divides packing into whole blocks.
    const NR: usize;
    /// Elements along k in one lane.
    const STEP: usize;
    /// Rows of the left operand packed at a time at most; a multiple of `MR`.
    const ROWS: usize = 168;
    /// Lanes along k packed at a time at most; at least 512 elements.
    const DEPTH: usize = pack::DEPTH;
    /// Lanes of the right operand packed at a time at most: with the rows of the left, about the second cache level.
    const RIGHT: usize = 1 << 19;
    /// Packed lanes along k are a multiple of this, the last ones zeros.
    const LANES: usize = 1;
    /// Numbers whose sum a packed element is.
    const PARTS: usize = 1;

    /// `ends.out[r][c] = ends.start[r][c] + sum over k of a[r][k] * b[k][c] + ends.add[r][c]`, in lanes along k.
    /// Element `a[r][k]` is at `r * stride + k`, or at `r + k * stride` if `ACROSS`; `b[k][c]` at
    /// `k * b_stride + c`. Rows are rounded up to even ones.
    ///
    /// # Safety
    /// The processor has this kernel's instructions; `a`, `b` and `ends` reach as far as the formula says for
    /// rows rounded up to even and at most `MR`.
    unsafe fn tile<const ACROSS: bool>(
        rows: usize,
        k: usize,
        a: *const u32,
        stride: usize,
        b: *const u32,
        b_stride: usize,
        ends: Ends,
    );

    /// Packs rows `0..rows`, columns `0..k` of a left operand into `depth` lanes along k.
    ///
    /// # Safety
    /// The processor has this kernel's instructions.
    #[inline(always)]
    unsafe fn pack_left<'a, E: Float>(
        a: Mat<'_, E>,
        rows: usize,
        k: usize,
        depth: usize,
        out: &'a mut [u32],
    ) -> Left<'a> {
        if a.column == 1 {
            pack::left_along::<Self, E>(a, rows, k, out);
            Left::along::<Self>(out, LEFT_STRIDE)
        } else {
            pack::left_across::<Self, E>(a, rows, k, out);
            Left::across::<Self>(out, depth)
        }
    }

    /// Packs rows `0..k`, columns `0..n` of a right operand into panels of `NR` columns, with `depth` lanes along k of `PARTS`
    /// parts.
    ///
    /// # Safety
    /// The processor has this kernel's instructions.
    #[inline(always)]
    unsafe fn pack_right<E: Float>(b: Mat<'_, E>, k: usize, n: usize, depth: usize, out: &mut [u32]) {
        pack::right::<Self, E>(b, k, n, depth * Self::NR, out);
    }

    /// Transposes a block of 16 x 16 lanes: lane i of row r, which starts at `source + r * row` elements, goes
    /// to `out[i * NR + r]`.
    ///
    /// # Safety
    /// The processor has this kernel's instructions; 16 rows of 16 lanes can be read, and `out` has
    /// 15 * NR + 16 lanes.
    #[inline(always)]
    unsafe fn transpose<E: Float>(source: *const E, row: usize, out: *mut u32) {
        for r in 0..16 {
            for i in 0..16 {
                // SAFETY: r and i are below 16.
                unsafe {
                    let at = source.add(r * row + i * Self::STEP);
                    *out.add(i * Self::NR + r) = lane::<Self, E>(*at, *at.add(Self::STEP - 1));
                }
            }
        }
    }
}

/// Where the sums of a tile start and end, and what comes after them.
#[derive(Clone, Copy)]
pub(super) struct Ends {
    /// Sums to go on from, with rows NR apart; null for zeros.
    pub start: *const f32,
    /// What is added to the finished sums, with rows `stride` apart; null for nothing.
    pub add: *const f32,
    /// Where they go, with rows `stride` apart.
    pub out: *mut f32,
    /// Between rows.
    pub stride: usize,
    /// Right operands that are read after this tile: a kernel may ask for them meanwhile.
    pub next: *const u32,
}

impl Ends {
    /// A whole tile of its own, started at zero or from what it holds.
    #[inline(always)]
    pub(super) fn tile<K: Kernel>(sums: &mut [f32], resume: bool) -> Self {
        let out = sums[..K::MR * K::NR].as_mut_ptr();
        let start = if resume { out.cast_const() } else { std::ptr::null() };
        Ends { start, add: std::ptr::null(), out, stride: K::NR, next: std::ptr::null() }
    }
}

/// A number as it is multiplied.
#[inline(always)]
pub(super) fn operand<K: Kernel>(x: f32) -> f32 {
    if K::STEP == 1 { x } else { <bf16 as Float>::from_f32(x).to_f32() }
}

/// One lane: an element widened to f32, or a pair of bf16, the first one low, rounded if it was wider.
#[inline(always)]
pub(super) fn lane<K: Kernel, E: Float>(low: E, high: E) -> u32 {
    if K::STEP == 1 {
        low.to_f32().to_bits()
    } else {
        let rounded = |x: E| match E::DTYPE {
            DType::Bf16 => x.to_f32(),
            _ => operand::<K>(x.to_f32()),
        };
        // A bf16 is the upper half of its f32.
        (rounded(low).to_bits() >> 16) | (rounded(high).to_bits() & 0xffff_0000)
    }
}

/// Work that is generic over the kernel; its `run` must be `#[inline(always)]`, so that it is compiled with the
/// kernel's instructions.
pub(super) trait Task {
    /// Whether operands and result are f32.
    #[cfg(target_arch = "x86_64")]
    const F32: bool = false;
    /// Whether the kernel of bf16 pairs is worth packing for.
    #[cfg(target_arch = "x86_64")]
    const PAIRS: bool = true;

    /// Does the work.
    fn run<K: Kernel>(self);
}

/// A kernel chosen at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Isa {
    /// Fused multiply-adds on whatever vectors the build targets.
    Portable,
    /// AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// AVX-512 with dot products of bf16 pairs.
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    /// AMX, for operands of bf16.
    #[cfg(target_arch = "x86_64")]
    Amx,
    /// AMX, for operands of f32 as sums of two bf16.
    #[cfg(target_arch = "x86_64")]
    AmxOfTwo,
    /// AMX, for operands of f32 as sums of three.
    #[cfg(target_arch = "x86_64")]
    AmxOfThree,
}

impl Isa {
    /// The kernel for operands that have to be widened to f32, or are f32.
    pub(super) fn single() -> Isa {
        match simd::level() {
            #[cfg(target_arch = "x86_64")]
            simd::Level::Avx512 => Isa::Avx512,
            #[cfg(target_arch = "x86_64")]
            simd::Level::Avx2 => Isa::Avx2,
            _ => Isa::Portable,
        }
    }

    /// The kernel for products of f32 that are so close.
    pub(super) fn full(precision: MatmulPrecision) -> Isa {
        #[cfg(target_arch = "x86_64")]
        if Isa::AmxOfThree.available() {
            return match precision {
                MatmulPrecision::Highest => Isa::AmxOfThree,
                MatmulPrecision::High => Isa::AmxOfTwo,
            };
        }
        // Nothing else is faster than all of their bits.
        let _ = precision;
        Isa::single()
    }

    /// The kernel for bf16 operands: AMX before all others. Native dot products only where they are twice as fast as f32: AMD's run
    /// two a cycle; Intel's one every other cycle, half the speed of widening the operands to f32.
    pub(super) fn half() -> Isa {
        #[cfg(target_arch = "x86_64")]
        if Isa::Amx.available() {
            return Isa::Amx;
        }
        #[cfg(target_arch = "x86_64")]
        if Isa::Avx512Bf16.available() && simd::vendor() == simd::AMD {
            return Isa::Avx512Bf16;
        }
        Isa::single()
    }

    /// Whether this processor, at this thread's level, has the instructions.
    pub(super) fn available(self) -> bool {
        match self {
            Isa::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => simd::level() >= simd::Level::Avx2,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => simd::level() >= simd::Level::Avx512,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 => {
                simd::level() >= simd::Level::Avx512 && std::is_x86_feature_detected!("avx512bf16")
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Amx | Isa::AmxOfTwo | Isa::AmxOfThree => Isa::Avx512Bf16.available() && simd::tiles(),
        }
    }

    /// Runs `task` compiled for this kernel.
    pub(super) fn run<T: Task>(self, task: T) {
        assert!(self.available(), "{self:?} on a processor without it");
        #[cfg(target_arch = "x86_64")]
        match self {
            // SAFETY: available, as asserted.
            Isa::Avx512Bf16 if const { T::PAIRS } => return unsafe { x86::avx512bf16(task) },
            // SAFETY: as above.
            Isa::Amx => return unsafe { x86::amx::<1>(task) },
            // Not compiled for other types, with which no model of f32 has to do.
            // SAFETY: as above.
            Isa::AmxOfTwo if const { T::F32 } => return unsafe { x86::amx::<2>(task) },
            // SAFETY: as above.
            Isa::AmxOfThree if const { T::F32 } => return unsafe { x86::amx::<3>(task) },
            _ => {}
        }
        self.run_widened(task);
    }

    /// The same for a task that widens everything to f32, which is not compiled for another kernel.
    ///
    /// # Panics
    /// The kernel is not one of [`single`](Self::single).
    pub(super) fn run_widened(self, task: impl Task) {
        assert!(self.available(), "{self:?} on a processor without it");
        match self {
            Isa::Portable => task.run::<portable::Portable>(),
            // SAFETY: available, as asserted.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { x86::avx2(task) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { x86::avx512(task) },
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Bf16 | Isa::Amx | Isa::AmxOfTwo | Isa::AmxOfThree => {
                unreachable!("a kernel of bf16, or of parts of f32, for a task of other types")
            }
        }
    }
}

/// Whether this processor multiplies f32 faster where bits of them may be lost ([`MatmulPrecision::High`]).
pub fn has_faster_products() -> bool {
    Isa::full(MatmulPrecision::High) != Isa::full(MatmulPrecision::Highest)
}

/// Rounds `rows` up to a compiled tile and calls it.
macro_rules! pick {
    ($rows:expr, [$($r:literal),+], $call:ident $arguments:tt) => {
        match $rows {
            $(r if r <= $r => $call::<$r, ACROSS> $arguments,)+
            _ => unreachable!("a tile higher than the kernel's"),
        }
    };
}

mod portable;

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::super::transpose;
    use super::{Amx, Ends, Kernel, Task, Tiles};
    use collectives::Float;
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx2,fma")]
    pub(super) fn avx2(task: impl Task) {
        task.run::<Avx2>();
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx2,fma")]
    pub(super) fn avx512(task: impl Task) {
        task.run::<Avx512>();
    }

    #[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx2,fma")]
    pub(super) fn avx512bf16(task: impl Task) {
        task.run::<Avx512Bf16>();
    }

    #[target_feature(enable = "avx512bf16,avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx2,fma")]
    pub(super) fn amx<const PARTS: usize>(task: impl Task) {
        // SAFETY: whoever calls this has looked for AMX.
        let _tiles = unsafe { Tiles::new() };
        task.run::<Amx<PARTS>>();
    }

    /// Defines the loop over k once for each kernel: only the vector type and the step differ.
    macro_rules! kernel {
        ($name:ident, $doc:literal, $features:literal, $mr:literal, $lanes:literal, $step:literal, [$($rows:literal),+],
         $zero:ident, $load:ident, $store:ident, $splat:ident, $add:ident, $fma:expr $(, $transpose:item)?) => {
            #[doc = $doc]
            #[derive(Clone, Copy)]
            pub(in super::super) struct $name;

            impl $name {
                // Not inlined: one copy serves every product and attention.
                #[target_feature(enable = $features)]
                unsafe fn rows_of<const ROWS: usize, const ACROSS: bool>(
                    k: usize,
                    a: *const u32,
                    stride: usize,
                    b: *const u32,
                    b_stride: usize,
                    ends: Ends,
                ) {
                    // SAFETY: the caller's promise covers every address; the instructions are there.
                    unsafe {
                        let mut sums = [[$zero(); 2]; ROWS];
                        if !ends.start.is_null() {
                            for (r, sums) in sums.iter_mut().enumerate() {
                                sums[0] = $load(ends.start.add(r * 2 * $lanes));
                                sums[1] = $load(ends.start.add(r * 2 * $lanes + $lanes));
                            }
                        }
                        // Results come from far: stores that wait for their lines one after the other would take
                        // longer than the sums.
                        for r in 0..ROWS {
                            let out = ends.out.add(r * ends.stride).cast::<i8>();
                            _mm_prefetch::<_MM_HINT_ET0>(out);
                            _mm_prefetch::<_MM_HINT_ET0>(out.add(8 * $lanes - 1));
                        }
                        for i in 0..k {
                            let b0 = $load(b.add(i * b_stride).cast());
                            let b1 = $load(b.add(i * b_stride + $lanes).cast());
                            for (r, sums) in sums.iter_mut().enumerate() {
                                let at = if ACROSS { r + i * stride } else { r * stride + i };
                                let a = $splat(*a.add(at).cast());
                                sums[0] = $fma(a, b0, sums[0]);
                                sums[1] = $fma(a, b1, sums[1]);
                            }
                        }
                        for (r, sums) in sums.iter().enumerate() {
                            let at = r * ends.stride;
                            let (mut low, mut high) = (sums[0], sums[1]);
                            if !ends.add.is_null() {
                                low = $add(low, $load(ends.add.add(at)));
                                high = $add(high, $load(ends.add.add(at + $lanes)));
                            }
                            $store(ends.out.add(at), low);
                            $store(ends.out.add(at + $lanes), high);
                        }
                    }
                }
            }

            impl Kernel for $name {
                const MR: usize = $mr;
                const NR: usize = 2 * $lanes;
                const STEP: usize = $step;

                #[inline(always)]
                unsafe fn tile<const ACROSS: bool>(
                    rows: usize,
                    k: usize,
                    a: *const u32,
                    stride: usize,
                    b: *const u32,
                    b_stride: usize,
                    ends: Ends,
                ) {
                    #[inline(always)]
                    unsafe fn call<const ROWS: usize, const ACROSS: bool>(
                        k: usize,
                        a: *const u32,
                        stride: usize,
                        b: *const u32,
                        b_stride: usize,
                        ends: Ends,
                    ) {
                        // SAFETY: the caller's promise, passed on.
                        unsafe { $name::rows_of::<ROWS, ACROSS>(k, a, stride, b, b_stride, ends) }
                    }
                    // SAFETY: the caller's promise, passed on.
                    unsafe { pick!(rows, [$($rows),+], call(k, a, stride, b, b_stride, ends)) }
                }

                $($transpose)?
            }
        };
    }

    kernel!(
        Avx2,
        "6 x 16: twelve of sixteen registers hold sums.",
        "avx2,fma",
        6,
        8,
        1,
        [2, 4, 6],
        _mm256_setzero_ps,
        _mm256_loadu_ps,
        _mm256_storeu_ps,
        _mm256_set1_ps,
        _mm256_add_ps,
        |a, b, c| _mm256_fmadd_ps(a, b, c),
        #[inline(always)]
        unsafe fn transpose<E: Float>(source: *const E, row: usize, out: *mut u32) {
            // SAFETY: the caller's promise, passed on.
            unsafe { transpose::avx2::<Self, E>(source, row, out) }
        }
    );

    kernel!(
        Avx512,
        "14 x 32: 28 of 32 registers hold sums.",
        "avx512f",
        14,
        16,
        1,
        [2, 4, 6, 8, 10, 12, 14],
        _mm512_setzero_ps,
        _mm512_loadu_ps,
        _mm512_storeu_ps,
        _mm512_set1_ps,
        _mm512_add_ps,
        |a, b, c| _mm512_fmadd_ps(a, b, c),
        #[inline(always)]
        unsafe fn transpose<E: Float>(source: *const E, row: usize, out: *mut u32) {
            // SAFETY: the caller's promise, passed on.
            unsafe { transpose::avx512::<Self, E>(source, row, out) }
        }
    );

    kernel!(
        Avx512Bf16,
        "14 x 32 with two products a lane and step.",
        "avx512f,avx512bf16",
        14,
        16,
        2,
        [2, 4, 6, 8, 10, 12, 14],
        _mm512_setzero_ps,
        _mm512_loadu_ps,
        _mm512_storeu_ps,
        _mm512_set1_ps,
        _mm512_add_ps,
        |a: __m512, b: __m512, c| _mm512_dpbf16_ps(
            c,
            std::mem::transmute::<__m512, __m512bh>(a),
            std::mem::transmute::<__m512, __m512bh>(b)
        ),
        #[inline(always)]
        unsafe fn transpose<E: Float>(source: *const E, row: usize, out: *mut u32) {
            // SAFETY: the caller's promise, passed on.
            unsafe { transpose::avx512::<Self, E>(source, row, out) }
        }
    );
}
