//! Writing results that no cache can keep: past the caches, so that the processor does not first read what it is
//! about to overwrite.

/// Bytes that are reduced in the first-level cache before they are written.
pub(super) const TILE: usize = 2 << 10;

/// Copies `bytes` from `src` to `dst` past the caches where the processor can. Other ranks see the result only
/// after [`fence`].
///
/// # Safety
/// Both ranges are valid and disjoint.
pub(super) unsafe fn copy(src: *const u8, dst: *mut u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller's.
    unsafe {
        use std::arch::x86_64::*;
        // Stores go to whole cache lines.
        let head = dst.align_offset(64).min(bytes);
        std::ptr::copy_nonoverlapping(src, dst, head);
        let (src, dst, bytes) = (src.add(head), dst.add(head), bytes - head);
        let lines = bytes / 64;
        for line in 0..lines {
            let (from, to) = (src.add(line * 64).cast::<__m128i>(), dst.add(line * 64).cast::<__m128i>());
            let x = [
                _mm_loadu_si128(from),
                _mm_loadu_si128(from.add(1)),
                _mm_loadu_si128(from.add(2)),
                _mm_loadu_si128(from.add(3)),
            ];
            _mm_stream_si128(to, x[0]);
            _mm_stream_si128(to.add(1), x[1]);
            _mm_stream_si128(to.add(2), x[2]);
            _mm_stream_si128(to.add(3), x[3]);
        }
        let done = lines * 64;
        std::ptr::copy_nonoverlapping(src.add(done), dst.add(done), bytes - done);
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: the caller's.
    unsafe {
        std::ptr::copy_nonoverlapping(src, dst, bytes)
    }
}

/// Orders what [`copy`] wrote before everything that follows.
pub(super) fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has SSE.
    unsafe {
        std::arch::x86_64::_mm_sfence()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_every_alignment_and_length() {
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
