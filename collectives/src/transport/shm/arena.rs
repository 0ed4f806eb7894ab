//! Allocation in a segment: ranges of a large sparse mapping whose pages are reserved before anybody touches them,
//! so that running out is an error here and never a SIGBUS later.

use super::budget;
use crate::bootstrap::memfd::SharedMap;
use crate::buffer::HUGE;
use crate::error::{Error, Result};
use crate::locked;
use crate::pages;
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Pages are reserved in pieces, with a look at what is left before each, because other ranks take memory too.
const PIECE: usize = 64 << 20;
/// So much is taken before it is asked again what is left, for which a dozen files are read: less than what other processes
/// take meanwhile, and with small buffers most of the time that these would cost.
const UNASKED: usize = 1 << 20;
/// What this process has taken since it last asked.
static TAKEN: AtomicUsize = AtomicUsize::new(0);

/// The free ranges of a segment.
pub(super) struct Arena {
    /// (offset, bytes) by offset, never touching each other.
    free: Mutex<Vec<(usize, usize)>>,
    page: usize,
    capacity: usize,
    /// What of this process is limited so that there is not more.
    limit: Option<&'static str>,
}

impl Arena {
    /// Over `start..end` of a segment, which would end later but for a `limit` of this process.
    pub fn new(start: usize, end: usize, limit: Option<&'static str>) -> Self {
        let page = rustix::param::page_size();
        let start = start.next_multiple_of(HUGE.max(page));
        let capacity = end.saturating_sub(start) / page * page;
        Arena { free: Mutex::new(vec![(start, capacity)]), page, capacity, limit }
    }

    /// Bytes that a request for `bytes` really takes.
    pub fn rounded(&self, bytes: usize) -> usize {
        bytes.max(1).next_multiple_of(self.page)
    }

    /// Takes a range and reserves its pages, all zero.
    pub fn alloc(&self, map: &SharedMap, bytes: usize, rank: usize) -> Result<usize> {
        let refused = |why: String| {
            Error::system(
                format!("allocating {} of shared memory on rank {rank}", budget::human(bytes as u64)),
                format!("{why}; use smaller buffers or fewer ranks on this host"),
            )
        };
        let limit =
            self.limit.map_or(String::new(), |of| format!(" by its limit of {of}, which can be raised"));
        if bytes > self.capacity {
            let most = budget::human(self.capacity as u64);
            return Err(refused(format!("a rank may allocate {most} in all{limit}")));
        }
        let bytes = self.rounded(bytes);
        let offset = self.take(bytes).ok_or_else(|| {
            let free: usize = self.lock().iter().map(|r| r.1).sum();
            let (free, all) = (budget::human(free as u64), budget::human(self.capacity as u64));
            refused(format!("{free} of the {all} that a rank may allocate{limit} are free"))
        })?;
        reserve(map, offset, bytes).map_err(|why| {
            // Nobody has written there: what has pages reads as zero, whether these go or not.
            // SAFETY: the range is inside the mapping, and nobody's.
            let _ = unsafe { pages::remove(map.at(offset, bytes).as_ptr(), bytes) };
            self.put_back(offset, bytes);
            refused(why)
        })?;
        Ok(offset)
    }

    /// Gives a range back: its pages at once, its addresses for the next request.
    pub fn release(&self, map: &SharedMap, offset: usize, bytes: usize) {
        let bytes = self.rounded(bytes);
        let range = map.at(offset, bytes).as_ptr();
        // SAFETY: the range is this caller's alone and inside the mapping; its pages become holes that read as zero.
        if unsafe { pages::remove(range, bytes) }.is_err() {
            // Without hole punching the pages stay, so the promise of zeroes has to be kept by hand.
            // SAFETY: as above.
            unsafe { range.write_bytes(0, bytes) };
        }
        self.put_back(offset, bytes);
    }

    /// Gives the addresses of a range back, which reads as zero.
    fn put_back(&self, offset: usize, bytes: usize) {
        let mut free = self.lock();
        let at = free.partition_point(|&(o, _)| o < offset);
        free.insert(at, (offset, bytes));
        if at + 1 < free.len() && free[at].0 + free[at].1 == free[at + 1].0 {
            free[at].1 += free.remove(at + 1).1;
        }
        if at > 0 && free[at - 1].0 + free[at - 1].1 == free[at].0 {
            free[at - 1].1 += free.remove(at).1;
        }
    }

    /// The first range that fits, of huge pages if it can be.
    fn take(&self, bytes: usize) -> Option<usize> {
        let mut free = self.lock();
        let first = |align: usize| {
            free.iter().enumerate().find_map(|(i, &(offset, len))| {
                let start = offset.next_multiple_of(align);
                (start - offset <= len && len - (start - offset) >= bytes).then_some((i, start))
            })
        };
        let huge = (bytes >= HUGE).then(|| first(HUGE)).flatten();
        let (at, start) = huge.or_else(|| first(self.page))?;
        let (offset, len) = free.remove(at);
        let (before, after) = (start - offset, offset + len - (start + bytes));
        if after > 0 {
            free.insert(at, (start + bytes, after));
        }
        if before > 0 {
            free.insert(at, (offset, before));
        }
        Some(start)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<(usize, usize)>> {
        // A panic while it was held left the list as it was or complete: both are fine to go on with.
        locked(&self.free)
    }
}

/// Gives every page of the range memory now, or says what is missing.
pub(super) fn reserve(map: &SharedMap, offset: usize, bytes: usize) -> std::result::Result<(), String> {
    let enough = |wanted: usize| {
        let before = TAKEN.fetch_add(wanted, Ordering::Relaxed);
        if before.saturating_add(wanted) <= UNASKED {
            return Ok(());
        }
        let left = budget::available();
        if wanted as u64 <= left.bytes {
            TAKEN.store(0, Ordering::Relaxed);
            return Ok(());
        }
        // Who asks for less next is told, too.
        TAKEN.store(UNASKED, Ordering::Relaxed);
        Err(format!("only {} are available ({})", budget::human(left.bytes), left.source))
    };
    enough(bytes)?;
    let mut at = offset;
    while at < offset + bytes {
        let piece = PIECE.min(offset + bytes - at);
        if at > offset {
            enough(piece)?;
        }
        populate(map, at, piece).map_err(|e| match e {
            // What would have been a SIGBUS at the first touch.
            Errno::FAULT | Errno::NOSPC | Errno::NOMEM => "the system has no memory left for it".to_owned(),
            other => other.to_string(),
        })?;
        at += piece;
    }
    Ok(())
}

fn populate(map: &SharedMap, offset: usize, bytes: usize) -> std::result::Result<(), Errno> {
    let range = map.at(offset, bytes).as_ptr();
    loop {
        // SAFETY: the range is inside the mapping; populating changes no byte.
        match unsafe { madvise(range.cast(), bytes, Advice::LinuxPopulateWrite) } {
            Ok(()) => return Ok(()),
            Err(Errno::INTR | Errno::AGAIN) => {}
            // Before Linux 5.14: reserve through the file.
            Err(Errno::INVAL) => return map.reserve(offset, bytes),
            Err(e) => return Err(e),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bootstrap::memfd;
    use std::os::fd::AsFd;

    fn arena(bytes: usize) -> (SharedMap, Arena) {
        let fd = memfd::create("caravan-test", bytes).unwrap();
        (SharedMap::new(fd.as_fd()).unwrap(), Arena::new(0, bytes, None))
    }

    #[test]
    fn ranges_are_aligned_disjoint_and_come_back() {
        let (map, arena) = arena(64 << 20);
        let sizes = [1, 4096, 3 << 20, 100, 5 << 20, 2 << 20];
        let offsets: Vec<usize> = sizes.iter().map(|&s| arena.alloc(&map, s, 0).unwrap()).collect();
        for (i, (&a, &s)) in offsets.iter().zip(&sizes).enumerate() {
            assert_eq!(a % if s >= HUGE { HUGE } else { 4096 }, 0);
            for (&b, &t) in offsets.iter().zip(&sizes).skip(i + 1) {
                assert!(a + s <= b || b + t <= a, "{a}+{s} and {b}+{t}");
            }
        }
        for i in [2, 0, 5, 1, 4, 3] {
            arena.release(&map, offsets[i], sizes[i]);
        }
        assert_eq!(*arena.lock(), [(0, 64 << 20)]);
    }

    #[test]
    fn what_fits_is_given_where_no_huge_page_begins() {
        let (map, arena) = arena(4 << 20);
        let first = arena.alloc(&map, 1, 0).unwrap();
        let offset = arena.alloc(&map, 3 << 20, 0).unwrap();
        assert_eq!(offset, first + 4096);
        arena.release(&map, offset, 3 << 20);
        arena.release(&map, first, 1);
        assert_eq!(*arena.lock(), [(0, 4 << 20)]);
    }

    #[test]
    fn memory_comes_back_zeroed() {
        let (map, arena) = arena(8 << 20);
        for _ in 0..3 {
            let offset = arena.alloc(&map, 10_000, 0).unwrap();
            // SAFETY: this test's own range.
            let bytes = unsafe { std::slice::from_raw_parts_mut(map.at(offset, 10_000).as_ptr(), 10_000) };
            assert!(bytes.iter().all(|&b| b == 0));
            bytes.fill(7);
            arena.release(&map, offset, 10_000);
        }
    }

    #[test]
    fn too_much_says_what_there_is() {
        let (map, arena) = arena(8 << 20);
        let _first = arena.alloc(&map, 5 << 20, 3).unwrap();
        let text = arena.alloc(&map, 4 << 20, 3).unwrap_err().to_string();
        assert!(text.contains("4.0 MiB") && text.contains("rank 3") && text.contains("8.0 MiB"), "{text}");
        let text = arena.alloc(&map, 9 << 20, 3).unwrap_err().to_string();
        assert!(text.contains("9.0 MiB") && text.contains("8.0 MiB in all"), "{text}");
        // Freed again, so the failed attempts left nothing behind.
        assert!(arena.alloc(&map, 2 << 20, 3).is_ok());
    }

    #[test]
    fn more_than_the_machine_has_is_an_error() {
        let huge = (budget::total() as usize).saturating_mul(4);
        let (map, arena) = arena(huge);
        let text = arena.alloc(&map, huge - HUGE, 0).unwrap_err().to_string();
        assert!(text.contains("are available"), "{text}");
    }
}
