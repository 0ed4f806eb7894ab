//! The types of `ucp/api/ucp.h` and `ucs/debug/log_def.h`, version 1.13, that the functions of this crate take.
//! Enumerations are plain integers, because a newer library may return values that this file does not know; handles are
//! opaque pointers. Later versions only append fields, guarded by the masks, so these layouts hold for every 1.x from
//! 1.13 on.
#![allow(non_camel_case_types)]

use std::ffi::{c_char, c_int, c_uint, c_void};

/// `ucs_status_t`: 0 done, 1 in progress, negative an error.
pub type ucs_status_t = i8;
/// `ucs_status_ptr_t`: null (done), a small negative number as a pointer (an error), or a request.
pub type ucs_status_ptr_t = *mut c_void;
/// `ucp_tag_t`.
pub type ucp_tag_t = u64;
/// A handle, opaque to us.
pub type Handle = *mut c_void;

/// `ucs_log_func_t`: file, line, function, level, a component's settings, format, and its arguments as a `va_list`, which as
/// a parameter is a pointer.
pub type ucs_log_func_t = unsafe extern "C" fn(
    *const c_char,
    c_uint,
    *const c_char,
    c_int,
    *const c_void,
    *const c_char,
    *mut c_void,
) -> c_int;

/// The operation was done.
pub const UCS_OK: ucs_status_t = 0;
/// The operation is under way.
pub const UCS_INPROGRESS: ucs_status_t = 1;
/// A longer message came than the receive had room for.
pub const UCS_ERR_MESSAGE_TRUNCATED: ucs_status_t = -9;
/// The request was cancelled.
pub const UCS_ERR_CANCELED: ucs_status_t = -16;
/// The end of the error range, for telling an error from a pointer.
pub const UCS_ERR_LAST: ucs_status_t = -100;

/// `UCS_LOG_LEVEL_FATAL`
pub const UCS_LOG_LEVEL_FATAL: c_int = 0;
/// `UCS_LOG_LEVEL_WARN`
pub const UCS_LOG_LEVEL_WARN: c_int = 2;
/// `UCS_LOG_FUNC_RC_STOP`
pub const UCS_LOG_FUNC_RC_STOP: c_int = 0;
/// `UCS_LOG_FUNC_RC_CONTINUE`
pub const UCS_LOG_FUNC_RC_CONTINUE: c_int = 1;

/// `UCP_PARAM_FIELD_FEATURES`
pub const UCP_PARAM_FIELD_FEATURES: u64 = 1 << 0;
/// `UCP_PARAM_FIELD_TAG_SENDER_MASK`
pub const UCP_PARAM_FIELD_TAG_SENDER_MASK: u64 = 1 << 4;
/// `UCP_PARAM_FIELD_ESTIMATED_NUM_EPS`
pub const UCP_PARAM_FIELD_ESTIMATED_NUM_EPS: u64 = 1 << 6;
/// `UCP_FEATURE_TAG`
pub const UCP_FEATURE_TAG: u64 = 1 << 0;
/// `UCP_WORKER_PARAM_FIELD_THREAD_MODE`
pub const UCP_WORKER_PARAM_FIELD_THREAD_MODE: u64 = 1 << 0;
/// `UCP_WORKER_PARAM_FIELD_FLAGS`
pub const UCP_WORKER_PARAM_FIELD_FLAGS: u64 = 1 << 5;
/// `UCP_WORKER_FLAG_IGNORE_REQUEST_LEAK`
pub const UCP_WORKER_FLAG_IGNORE_REQUEST_LEAK: u64 = 1 << 0;
/// `UCS_THREAD_MODE_SERIALIZED`
pub const UCS_THREAD_MODE_SERIALIZED: c_uint = 1;
/// `UCP_EP_PARAM_FIELD_REMOTE_ADDRESS`
pub const UCP_EP_PARAM_FIELD_REMOTE_ADDRESS: u64 = 1 << 0;
/// `UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE`
pub const UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE: u64 = 1 << 1;
/// `UCP_EP_PARAM_FIELD_ERR_HANDLER`
pub const UCP_EP_PARAM_FIELD_ERR_HANDLER: u64 = 1 << 2;
/// `UCP_ERR_HANDLING_MODE_NONE`
pub const UCP_ERR_HANDLING_MODE_NONE: c_uint = 0;
/// `UCP_ERR_HANDLING_MODE_PEER`
pub const UCP_ERR_HANDLING_MODE_PEER: c_uint = 1;
/// `UCP_EP_CLOSE_FLAG_FORCE`
pub const UCP_EP_CLOSE_FLAG_FORCE: u32 = 1 << 0;
/// `UCP_OP_ATTR_FIELD_FLAGS`
pub const UCP_OP_ATTR_FIELD_FLAGS: u32 = 1 << 4;
/// `UCP_OP_ATTR_FIELD_MEMORY_TYPE`
pub const UCP_OP_ATTR_FIELD_MEMORY_TYPE: u32 = 1 << 6;
/// `UCP_OP_ATTR_FLAG_NO_IMM_CMPL`
pub const UCP_OP_ATTR_FLAG_NO_IMM_CMPL: u32 = 1 << 16;
/// `UCP_OP_ATTR_FLAG_FAST_CMPL`
pub const UCP_OP_ATTR_FLAG_FAST_CMPL: u32 = 1 << 17;

/// `UCS_MEMORY_TYPE_HOST`
pub const UCS_MEMORY_TYPE_HOST: c_uint = 0;

/// `ucp_params_t`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ucp_params_t {
    /// Which of the fields below are set.
    pub field_mask: u64,
    /// `UCP_FEATURE_*`.
    pub features: u64,
    /// Bytes reserved in each request for its user.
    pub request_size: usize,
    /// Called once per request memory.
    pub request_init: Option<unsafe extern "C" fn(*mut c_void)>,
    /// Called when request memory goes.
    pub request_cleanup: Option<unsafe extern "C" fn(*mut c_void)>,
    /// The bits of a tag that name its sender.
    pub tag_sender_mask: u64,
    /// Whether workers of several threads share the context.
    pub mt_workers_shared: c_int,
    /// A hint: endpoints in all.
    pub estimated_num_eps: usize,
    /// A hint: processes per node.
    pub estimated_num_ppn: usize,
    /// A name for tracing.
    pub name: *const c_char,
}

/// `ucp_worker_params_t`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ucp_worker_params_t {
    /// Which of the fields below are set.
    pub field_mask: u64,
    /// `UCS_THREAD_MODE_*`.
    pub thread_mode: c_uint,
    /// `ucs_cpu_set_t`: 1024 bits.
    pub cpu_mask: [u64; 16],
    /// Events to wake up for.
    pub events: c_uint,
    /// The user's pointer.
    pub user_data: *mut c_void,
    /// An event file descriptor from outside.
    pub event_fd: c_int,
    /// `UCP_WORKER_FLAG_*`.
    pub flags: u64,
    /// A name for tracing.
    pub name: *const c_char,
    /// Alignment of active messages.
    pub am_alignment: usize,
    /// Sent with connection requests.
    pub client_id: u64,
}

/// `ucp_err_handler_t`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ucp_err_handler_t {
    /// Called with `arg`, the endpoint and the status when an endpoint fails.
    pub cb: Option<unsafe extern "C" fn(*mut c_void, Handle, ucs_status_t)>,
    /// The first argument of `cb`.
    pub arg: *mut c_void,
}

/// `ucs_sock_addr_t`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ucs_sock_addr_t {
    /// `struct sockaddr`.
    pub addr: *const c_void,
    /// Its length in bytes.
    pub addrlen: u32,
}

/// `ucp_ep_params_t`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ucp_ep_params_t {
    /// Which of the fields below are set.
    pub field_mask: u64,
    /// The remote worker's address.
    pub address: *const c_void,
    /// `UCP_ERR_HANDLING_MODE_*`.
    pub err_mode: c_uint,
    /// What to call when the endpoint fails.
    pub err_handler: ucp_err_handler_t,
    /// The user's pointer.
    pub user_data: *mut c_void,
    /// `UCP_EP_PARAMS_FLAGS_*`.
    pub flags: c_uint,
    /// For client-server connections.
    pub sockaddr: ucs_sock_addr_t,
    /// For client-server connections.
    pub conn_request: Handle,
    /// A name for tracing.
    pub name: *const c_char,
    /// For client-server connections.
    pub local_sockaddr: ucs_sock_addr_t,
}

/// `ucp_tag_recv_info_t`
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ucp_tag_recv_info_t {
    /// The tag of the message that came.
    pub sender_tag: ucp_tag_t,
    /// Its length in bytes.
    pub length: usize,
}

/// `ucp_request_param_t`. The two unions of C (callback, receive information) are one pointer each.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ucp_request_param_t {
    /// `UCP_OP_ATTR_*`: which fields below are set, and flags of the operation.
    pub op_attr_mask: u32,
    /// Flags of the particular call.
    pub flags: u32,
    /// Request memory from outside.
    pub request: *mut c_void,
    /// The callback of whichever kind the call takes.
    pub cb: *mut c_void,
    /// `ucp_datatype_t`; bytes when not set.
    pub datatype: u64,
    /// Passed to the callback.
    pub user_data: *mut c_void,
    /// For atomics.
    pub reply_buffer: *mut c_void,
    /// `ucs_memory_type_t`.
    pub memory_type: c_uint,
    /// Where a receive that completes at once puts what it got.
    pub recv_info: *mut ucp_tag_recv_info_t,
    /// Registration of the buffer.
    pub memh: Handle,
}

macro_rules! zeroed {
    ($($name:ident)*) => {$(
        impl $name {
            /// No field is set.
            // SAFETY: integers, null pointers and `None` functions: all zero is a value of each field.
            pub const UNSET: Self = unsafe { std::mem::zeroed() };
        }

        impl Default for $name {
            fn default() -> Self {
                Self::UNSET
            }
        }
    )*};
}
zeroed!(ucp_params_t ucp_worker_params_t ucp_ep_params_t ucp_request_param_t);

/// What a `ucs_status_ptr_t` means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Posted {
    /// Done at once; there is no request.
    Done,
    /// Failed; there is no request.
    Failed(ucs_status_t),
    /// Under way.
    Pending(*mut c_void),
}

/// Tells the three meanings of a `ucs_status_ptr_t` apart, as `UCS_PTR_IS_ERR` and its kin do in C.
#[inline]
pub fn posted(pointer: ucs_status_ptr_t) -> Posted {
    let value = pointer as isize;
    if value == 0 {
        Posted::Done
    } else if (UCS_ERR_LAST as isize..0).contains(&value) {
        Posted::Failed(value as ucs_status_t)
    } else {
        Posted::Pending(pointer)
    }
}
