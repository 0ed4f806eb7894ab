//! Panics of the tokenizers library as errors.

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

thread_local! {
    /// Whether this thread's panics are caught and told as errors.
    static CAUGHT: Cell<bool> = const { Cell::new(false) };
}

/// Whether a panic of this thread is caught here.
#[cfg(feature = "mpi")]
pub fn catches() -> bool {
    CAUGHT.get()
}

/// What `work` gives; a panic of the library, which takes some files for good that it then cannot use, is an error, and
/// nobody else tells it.
pub(super) fn guarded<T>(work: impl FnOnce() -> T) -> std::result::Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !CAUGHT.get() {
                usual(info);
            }
        }));
    });
    CAUGHT.set(true);
    let done = panic::catch_unwind(AssertUnwindSafe(work));
    CAUGHT.set(false);
    done.map_err(|panic| {
        let words = panic.downcast_ref::<String>().map(String::as_str);
        let words = words.or(panic.downcast_ref::<&str>().copied()).unwrap_or("no words");
        format!("the tokenizers library panics of it ({words})")
    })
}
