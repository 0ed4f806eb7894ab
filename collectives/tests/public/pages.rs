//! What registers memory with network cards hears of pages that are given back: here libucm, which tells UCX's caches of
//! registrations.

use crate::ranks::{run, this_test};
use collectives::Buffer;
use libloading::Library;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

/// What listens, and what it cannot be loaded without.
const LIBRARIES: [&str; 2] = ["libucs.so.0", "libucm.so.0"];
/// `UCM_EVENT_VM_UNMAPPED`: of pages that are unmapped, and of those that an advice takes away.
const UNMAPPED: c_int = 1 << 17;

/// `vm_unmapped` of `ucm_event_t`.
#[repr(C)]
struct Event {
    address: usize,
    size: usize,
}

/// The address that is asked about, and how many bytes from it on were last heard to be gone.
static ADDRESS: AtomicUsize = AtomicUsize::new(0);
static GONE: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" fn hear(_kind: c_int, event: *mut Event, _arg: *mut c_void) {
    // SAFETY: libucm's own event, of the only kind that was asked for.
    let Event { address, size } = unsafe { event.read() };
    let asked = ADDRESS.load(Ordering::Relaxed);
    if (address..address + size).contains(&asked) {
        GONE.store(address + size - asked, Ordering::Relaxed);
    }
}

/// Has libucm tell `hear` for as long as the process lives.
fn listen(ucm: Library) {
    type SetHandler = unsafe extern "C" fn(
        c_int,
        c_int,
        unsafe extern "C" fn(c_int, *mut Event, *mut c_void),
        *mut c_void,
    ) -> i8;
    // SAFETY: the name and type are those of ucm.h; the handler allocates nothing.
    let status = unsafe {
        let set = ucm.get::<SetHandler>(b"ucm_set_event_handler\0").expect("a function of libucm");
        set(UNMAPPED, 0, hear, std::ptr::null_mut())
    };
    assert_eq!(status, 0, "libucm cannot listen");
    std::mem::forget(ucm);
}

/// What is heard to be gone of `memory` when that is dropped.
fn gone(mut memory: Buffer<u8>) -> usize {
    GONE.store(0, Ordering::Relaxed);
    ADDRESS.store(memory.view_mut().as_mut_ptr() as usize, Ordering::Relaxed);
    drop(memory);
    GONE.load(Ordering::Relaxed)
}

#[test]
fn who_registers_memory_hears_that_it_is_given_back() {
    const BYTES: usize = 4 << 20;
    // SAFETY: their initialisers are made for dlopen; UCX is loaded so.
    let opened = LIBRARIES.map(|name| unsafe { Library::new(name) });
    let [ucs, ucm] = match opened {
        [Ok(ucs), Ok(ucm)] => [ucs, ucm],
        [Err(why), _] | [_, Err(why)] => return harness::skip(&format!("{why} (Debian: libucx0)")),
    };
    // In a process of its own: listening changes how the C library begins.
    run(this_test!(), &[1], move |mut transport| {
        listen(ucm);
        std::mem::forget(ucs);
        let mut shared = || transport.alloc(BYTES).expect("memory");
        assert_eq!(gone(Buffer::zeroed(BYTES)), BYTES, "memory of the process");
        assert_eq!(gone(Buffer::from_memory(shared())), BYTES, "a range of the segment");
        let last = Buffer::<u8>::from_memory(shared()).view_mut().as_mut_ptr() as usize;
        GONE.store(0, Ordering::Relaxed);
        ADDRESS.store(last, Ordering::Relaxed);
        drop(transport);
        assert!(GONE.load(Ordering::Relaxed) > BYTES, "the segment");
    });
}
