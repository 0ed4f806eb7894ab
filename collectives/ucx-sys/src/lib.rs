//! Bindings of the part of UCX's `ucp` interface that tagged messages need, opened at run time so that a build
//! never needs UCX and one binary serves machines with and without it. Nothing here is safe or clever: it is the
//! C interface as Rust types; `caravan-collectives` builds its transport on it.
#![warn(missing_docs)]

mod types;

pub use types::*;

use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::ManuallyDrop;

/// The library's file name: the interface's major version 1 has had this name since 2018.
pub const SONAME: &str = "libucp.so.0";
/// The oldest version whose layouts are those of this crate.
pub const OLDEST: (u32, u32) = (1, 13);

const LIBUCS: &str = "libucs.so.0";
const PUSH_HANDLER: &[u8] = b"ucs_log_push_handler\0";

macro_rules! functions {
    ($($(#[$doc:meta])* $name:ident: fn($($arg:ty),*) $(-> $ret:ty)?;)*) => {
        /// The functions of an opened libucp, which stays open: from when it is loaded on, what every thread asks the system about
        /// memory goes through it, and a thread that does would come back to what is no longer there.
        pub struct Ucp {
            $($(#[$doc])* pub $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
            /// Has a handler called before UCX's own for what is logged.
            pub ucs_log_push_handler: unsafe extern "C" fn(ucs_log_func_t),
            ucs_status_string: unsafe extern "C" fn(ucs_status_t) -> *const c_char,
            version: (u32, u32, u32),
        }

        impl Ucp {
            fn resolve(ucp: &Library, ucs: &Library, version: (u32, u32, u32)) -> Result<Self, String> {
                // SAFETY: the names and types are those of UCX's headers, checked against it by tests/layout.rs.
                unsafe {
                    Ok(Ucp {
                        $($name: *ucp.get(concat!(stringify!($name), "\0").as_bytes())
                            .map_err(|e| format!("{SONAME} lacks {}: {e}", stringify!($name)))?,)*
                        ucs_log_push_handler: *ucs.get(PUSH_HANDLER)
                            .map_err(|e| format!("{LIBUCS} lacks ucs_log_push_handler: {e}"))?,
                        ucs_status_string: *ucs.get(b"ucs_status_string\0")
                            .map_err(|e| format!("{LIBUCS} lacks ucs_status_string: {e}"))?,
                        version,
                    })
                }
            }
        }
    };
}

functions! {
    /// Reads the configuration from `UCX_*` environment variables.
    ucp_config_read: fn(*const c_char, *const c_char, *mut Handle) -> ucs_status_t;
    /// Changes one value of a configuration.
    ucp_config_modify: fn(Handle, *const c_char, *const c_char) -> ucs_status_t;
    /// Frees a configuration.
    ucp_config_release: fn(Handle);
    /// Creates a context for an interface version (major, minor).
    ucp_init_version: fn(c_uint, c_uint, *const ucp_params_t, Handle, *mut Handle) -> ucs_status_t;
    /// Destroys a context.
    ucp_cleanup: fn(Handle);
    /// Creates a worker.
    ucp_worker_create: fn(Handle, *const ucp_worker_params_t, *mut Handle) -> ucs_status_t;
    /// Destroys a worker.
    ucp_worker_destroy: fn(Handle);
    /// The worker's address, to be given to peers.
    ucp_worker_get_address: fn(Handle, *mut *mut c_void, *mut usize) -> ucs_status_t;
    /// Frees an address.
    ucp_worker_release_address: fn(Handle, *mut c_void);
    /// Moves communication forward; the number of events handled.
    ucp_worker_progress: fn(Handle) -> c_uint;
    /// Connects to a worker.
    ucp_ep_create: fn(Handle, *const ucp_ep_params_t, *mut Handle) -> ucs_status_t;
    /// Closes an endpoint, after a flush unless forced.
    ucp_ep_close_nbx: fn(Handle, *const ucp_request_param_t) -> ucs_status_ptr_t;
    /// Sends a message.
    ucp_tag_send_nbx: fn(Handle, *const c_void, usize, ucp_tag_t, *const ucp_request_param_t) -> ucs_status_ptr_t;
    /// Posts a receive.
    ucp_tag_recv_nbx: fn(Handle, *mut c_void, usize, ucp_tag_t, ucp_tag_t, *const ucp_request_param_t)
        -> ucs_status_ptr_t;
    /// Looks for a message that no receive has met, and takes it out where the number is not 0; null where there is none.
    ucp_tag_probe_nb: fn(Handle, ucp_tag_t, ucp_tag_t, c_int, *mut ucp_tag_recv_info_t) -> *mut c_void;
    /// Receives a message that was taken out.
    ucp_tag_msg_recv_nbx: fn(Handle, *mut c_void, usize, *mut c_void, *const ucp_request_param_t)
        -> ucs_status_ptr_t;
    /// The state of a request.
    ucp_request_check_status: fn(*mut c_void) -> ucs_status_t;
    /// The state of a receive, and what came.
    ucp_tag_recv_request_test: fn(*mut c_void, *mut ucp_tag_recv_info_t) -> ucs_status_t;
    /// Cancels a request; it still has to complete and to be freed.
    ucp_request_cancel: fn(Handle, *mut c_void);
    /// Gives a request back.
    ucp_request_free: fn(*mut c_void);
}

/// `ucs_log_push_handler` of the libucs that something else has loaded into this process, if anything has: it stays loaded.
pub fn loaded_log_push_handler() -> Option<unsafe extern "C" fn(ucs_log_func_t)> {
    use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
    // SAFETY: runs no initialisers, because nothing is loaded that was not.
    let ucs = unsafe { Library::open(Some(LIBUCS), RTLD_NOW | RTLD_LOCAL | libc::RTLD_NOLOAD) }.ok()?;
    // SAFETY: the name and type are those of UCX's headers, checked against them by tests/layout.rs.
    let push = unsafe { *ucs.get(PUSH_HANDLER).ok()? };
    std::mem::forget(ucs);
    Some(push)
}

impl Ucp {
    /// Opens the system's libucp and checks its version. The error says what was looked for and what would bring it.
    pub fn load() -> Result<Self, String> {
        Self::load_from(SONAME)
    }

    /// Opens `file` (a path or a name for the loader's search path) as libucp.
    pub fn load_from(file: &str) -> Result<Self, String> {
        let open = |name: &str| {
            // SAFETY: UCX's initialisers are made for dlopen; MPI libraries load it so. It is never closed.
            unsafe { Library::new(name) }.map(ManuallyDrop::new)
        };
        let ucp = open(file).map_err(|e| {
            format!("{file} was not found ({e}); install UCX 1.13 or newer (Debian and Ubuntu: libucx0)")
        })?;
        // libucp depends on libucs, which is therefore already loaded; this only takes a handle of it.
        let ucs = open(LIBUCS).map_err(|e| format!("{file} is there but {LIBUCS} is not ({e})"))?;
        type GetVersion = unsafe extern "C" fn(*mut c_uint, *mut c_uint, *mut c_uint);
        // SAFETY: the type is that of ucp.h.
        let get: GetVersion =
            unsafe { *ucp.get(b"ucp_get_version\0").map_err(|e| format!("{file} is not UCX: {e}"))? };
        let (mut major, mut minor, mut release) = (0, 0, 0);
        // SAFETY: three valid places to write to.
        unsafe { get(&mut major, &mut minor, &mut release) };
        if major != OLDEST.0 || minor < OLDEST.1 {
            return Err(format!(
                "{file} is UCX {major}.{minor}.{release}; version {}.{} or a newer {}.x is needed",
                OLDEST.0, OLDEST.1, OLDEST.0
            ));
        }
        Self::resolve(&ucp, &ucs, (major, minor, release))
    }

    /// Major, minor and release number.
    pub fn version(&self) -> (u32, u32, u32) {
        self.version
    }

    /// UCX's own words for a status.
    pub fn status(&self, status: ucs_status_t) -> String {
        // SAFETY: returns a string that lives as long as the library, or of the calling thread until its next call.
        let text = unsafe { (self.ucs_status_string)(status) };
        if text.is_null() {
            return format!("status {status}");
        }
        // SAFETY: a string of C, copied at once.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}
