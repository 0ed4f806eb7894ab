//! Writing results that no cache can keep: past the caches, so that the processor does not first read what it is
//! about to overwrite.

use crate::schedule::{Schedule, Space};
use crate::simd;
use std::sync::OnceLock;

/// Bytes that are reduced in the first-level cache before they are written: so few that the processor is fetching
/// the next ones while it writes.
pub(super) const TILE: usize = 512;

/// Which results no cache can keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Past {
    /// Those of which a rank writes at least so many bytes in one go.
    From(usize),
    /// Those of calls whose ranks read and write more than this cache holds.
    Shared(Shared),
}

impl Past {
    /// On this processor. Measured with 2 ranks: Intel's server processors write past their caches faster as soon as
    /// their second level (2 MiB) cannot keep a result; AMD's last level, which few processors share, is faster than memory
    /// for as long as it keeps everything. Other processors have no such stores here.
    pub(super) fn here() -> Past {
        if !cfg!(target_arch = "x86_64") {
            return Past::From(usize::MAX);
        }
        static HERE: OnceLock<Past> = OnceLock::new();
        *HERE.get_or_init(|| {
            let shared = Shared::of_this_processor().filter(|_| simd::vendor() == simd::AMD);
            shared.map_or(Past::From(2 << 20), Past::Shared)
        })
    }

    /// Whether what this rank itself writes to `space` goes past the caches.
    pub(super) fn takes(self, schedule: &Schedule, space: Space) -> bool {
        space != Space::Scratch
            && match self {
                Past::From(bytes) => schedule.piece() >= bytes,
                Past::Shared(cache) => {
                    schedule.touched(cache.processors.min(schedule.group.size)) > cache.bytes
                }
            }
    }
}

/// The last level of cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shared {
    bytes: usize,
    /// Processors that share it.
    processors: usize,
}

impl Shared {
    /// As the system describes it for its first processor.
    fn of_this_processor() -> Option<Shared> {
        let read =
            |name| std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index3/{name}")).ok();
        Shared::described(read("size")?.trim(), read("shared_cpu_list")?.trim())
    }

    /// From such as `32768K` and `0-7,64-71`.
    fn described(size: &str, list: &str) -> Option<Shared> {
        let bytes = size.strip_suffix('K')?.parse::<usize>().ok()? << 10;
        let count = |range: &str| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            Some(last.parse::<usize>().ok()?.checked_sub(first.parse().ok()?)? + 1)
        };
        let processors = list.split(',').map(count).sum::<Option<usize>>()?;
        Some(Shared { bytes, processors })
    }
}

/// Room for a tile, in whole cache lines.
#[repr(align(64))]
pub(super) struct Tile(pub [u8; TILE]);

/// Copies `bytes` from `src` to `dst` past the caches where the processor can. Other ranks see the result only
/// after [`fence`].
///
/// # Safety
/// Both ranges are valid and disjoint.
pub(super) unsafe fn copy(src: *const u8, dst: *mut u8, bytes: usize) {
    // SAFETY: the caller's.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        x86::copy(src, dst, bytes);
        #[cfg(not(target_arch = "x86_64"))]
        std::ptr::copy_nonoverlapping(src, dst, bytes);
    }
}

/// Starts fetching what will be read next; what lies behind a buffer's end is never touched.
#[inline(always)]
pub(super) fn prefetch(src: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    x86::prefetch(src, bytes);
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (src, bytes);
}

/// Orders what [`copy`] wrote before everything that follows.
pub(super) fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has SSE.
    unsafe {
        std::arch::x86_64::_mm_sfence()
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use crate::simd::{Level, level};
    use std::arch::x86_64::*;

    const LINE: usize = 64;

    /// # Safety
    /// Both ranges are valid and disjoint.
    pub(super) unsafe fn copy(src: *const u8, dst: *mut u8, bytes: usize) {
        // SAFETY: the caller's.
        unsafe {
            // Stores go to whole cache lines.
            let head = dst.align_offset(LINE).min(bytes);
            std::ptr::copy_nonoverlapping(src, dst, head);
            let (src, dst, bytes) = (src.add(head), dst.add(head), bytes - head);
            let lines = bytes / LINE;
            match level() {
                // SAFETY: `level` never exceeds what the processor was detected to have.
                Level::Avx512 => lines_by_64(src, dst, lines),
                _ => lines_by_16(src, dst, lines),
            }
            let done = lines * LINE;
            std::ptr::copy_nonoverlapping(src.add(done), dst.add(done), bytes - done);
        }
    }

    /// # Safety
    /// Both ranges of `lines` cache lines are valid and disjoint, and `dst` starts at one.
    #[target_feature(enable = "avx512f")]
    unsafe fn lines_by_64(src: *const u8, dst: *mut u8, lines: usize) {
        for at in (0..lines).map(|line| line * LINE) {
            // SAFETY: the caller's.
            unsafe { _mm512_stream_si512(dst.add(at).cast(), _mm512_loadu_si512(src.add(at).cast())) };
        }
    }

    /// # Safety
    /// As for [`lines_by_64`].
    unsafe fn lines_by_16(src: *const u8, dst: *mut u8, lines: usize) {
        for at in (0..lines).map(|line| line * LINE) {
            // SAFETY: the caller's.
            unsafe {
                let (from, to) = (src.add(at).cast::<__m128i>(), dst.add(at).cast::<__m128i>());
                let x = [0, 1, 2, 3].map(|i| _mm_loadu_si128(from.add(i)));
                for (i, x) in x.into_iter().enumerate() {
                    _mm_stream_si128(to.add(i), x);
                }
            }
        }
    }

    #[inline(always)]
    pub(super) fn prefetch(src: *const u8, bytes: usize) {
        for at in (0..bytes).step_by(LINE) {
            // SAFETY: a hint, which neither faults nor changes anything, whatever the address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(src.wrapping_add(at).cast()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Level, with_level};

    #[test]
    fn the_system_describes_a_shared_cache() {
        let complex = Shared { bytes: 32 << 20, processors: 16 };
        assert_eq!(Shared::described("32768K", "0-7,64-71"), Some(complex));
        assert_eq!(Shared::described("32768K", "3"), Some(Shared { processors: 1, ..complex }));
        for (size, list) in [("32M", "0-1"), ("32768K", "1-0"), ("32768K", "")] {
            assert_eq!(Shared::described(size, list), None);
        }
    }

    #[test]
    fn a_shared_cache_keeps_what_all_ranks_read_and_write() {
        use crate::element::DType;
        use crate::schedule::{Call, Group, Kind, Local};
        let cache = Shared { bytes: 32 << 20, processors: 2 };
        let streams = |past: Past, kind: Kind, size: usize, bytes: usize| {
            let group = Group { direct: Some(0), ..Group::plain(0, size) };
            let schedule = Schedule::new(Call::new(kind, DType::U8, bytes), &group, Local::default(), None);
            past.takes(&schedule, Space::Recv)
        };
        let shared = |kind, size, mib: usize| streams(Past::Shared(cache), kind, size, mib << 20);
        // A third of the cache for what each of two ranks reads, and for what both write.
        assert!(!shared(Kind::ReduceScatter, 2, 5) && shared(Kind::ReduceScatter, 2, 6));
        assert!(!shared(Kind::AllReduce, 2, 8) && shared(Kind::AllReduce, 2, 9));
        assert!(!shared(Kind::Reduce, 2, 10) && shared(Kind::Reduce, 2, 11));
        // Of sixty-four ranks two share it, and read from all.
        assert!(shared(Kind::AllGather, 64, 1) && !shared(Kind::AllGather, 2, 1));
        assert!(!streams(Past::From(2 << 20), Kind::AllReduce, 2, 3 << 20));
        assert!(streams(Past::From(2 << 20), Kind::AllReduce, 2, 4 << 20));
    }

    #[test]
    fn copies_every_alignment_and_length() {
        Level::available().for_each(|level| with_level(level, copies));
    }

    fn copies() {
        let src: Vec<u8> = (0..1000u32).map(|i| (i * 7) as u8).collect();
        for from in [0, 1, 17] {
            for to in [0, 1, 63] {
                for bytes in [0, 1, 63, 64, 65, 128, 700] {
                    let mut dst = vec![0u8; 1000];
                    // SAFETY: both ranges are inside their vectors.
                    unsafe { copy(src.as_ptr().add(from), dst.as_mut_ptr().add(to), bytes) };
                    fence();
                    assert_eq!(dst[to..to + bytes], src[from..from + bytes]);
                    assert!(dst[..to].iter().chain(&dst[to + bytes..]).all(|&b| b == 0));
                }
            }
        }
    }
}
