//! An allocator that counts. A test that counts has it as its own:
//!
//! ```ignore
//! #[global_allocator]
//! static COUNTING: Counting = Counting;
//! ```

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The system's allocator, which counts how often memory is taken, and how much of it is held.
pub struct Counting;

static ALL: AtomicUsize = AtomicUsize::new(0);
static HELD: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static HERE: Cell<usize> = const { Cell::new(0) };
    static FIRST: Cell<Option<bool>> = const { Cell::new(None) };
}

impl Counting {
    /// By all threads so far but the process's first, which in a test program may have something to say of tests that take
    /// long.
    pub fn all() -> usize {
        ALL.load(Ordering::Relaxed)
    }

    /// By this thread so far.
    pub fn here() -> usize {
        HERE.get()
    }

    /// Bytes that the process holds.
    pub fn held() -> usize {
        HELD.load(Ordering::Relaxed)
    }

    fn count(&self, bytes: usize) {
        HELD.fetch_add(bytes, Ordering::Relaxed);
        let first = FIRST.get().unwrap_or_else(|| {
            let first = rustix::thread::gettid() == rustix::process::getpid();
            FIRST.set(Some(first));
            first
        });
        if !first {
            ALL.fetch_add(1, Ordering::Relaxed);
        }
        HERE.set(HERE.get() + 1);
    }
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.count(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.count(layout.size());
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        self.count(new_size);
        HELD.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}
