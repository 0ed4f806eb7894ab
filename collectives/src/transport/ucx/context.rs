//! A UCX context and one worker of it: owners of the library's handles, and errors in UCX's own words.

use super::{defaults, log};
use crate::bootstrap::spawn::unsignalled;
use crate::error::{Error, Result};
use crate::simd;
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::sync::Arc;
use ucx_sys::*;

/// An opened library and a context of it.
pub(super) struct Context {
    pub(super) ucp: Ucp,
    handle: Handle,
    library: String,
    rank: usize,
}

// SAFETY: its handle is only used to create a worker and, by the last owner, to clean up.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// The name and version of the UCX library that would be opened.
///
/// # Errors
/// [`Error::Unavailable`] with what was looked for and what would bring it.
pub fn library() -> Result<String> {
    // A UCX with FUSE starts a thread as it is loaded, which must not be the one that gets the signals that a supervisor catches.
    unsignalled(load).map(|(_, library)| library)
}

/// The library, with its name and version.
fn load() -> Result<(Ucp, String)> {
    let ucp = Ucp::load().map_err(|why| Error::Unavailable { name: "ucx".into(), why })?;
    let (major, minor, release) = ucp.version();
    Ok((ucp, format!("UCX {major}.{minor}.{release}")))
}

impl Context {
    /// Opens libucp and a context for about `size` peers. UCX itself reads `UCX_TLS`, `UCX_NET_DEVICES` and its other
    /// variables here.
    pub(super) fn open(rank: usize, size: usize) -> Result<Arc<Self>> {
        let (ucp, library) = load()?;
        log::listen(&ucp);
        let fail = |call: &'static str, status: ucs_status_t, ucp: &Ucp| Error::Unavailable {
            name: "ucx".into(),
            why: format!(
                "{library} failed in {call}: {} (UCX_TLS={}, UCX_NET_DEVICES={}; `ucx_info -d` lists what exists)",
                ucp.status(status),
                std::env::var("UCX_TLS").unwrap_or_else(|_| "all".into()),
                std::env::var("UCX_NET_DEVICES").unwrap_or_else(|_| "all".into()),
            ),
        };
        let mut config = null_mut();
        // SAFETY: null means the prefix UCX_ and no file; `config` is a valid place.
        let status = unsafe { (ucp.ucp_config_read)(null(), null(), &mut config) };
        if status != UCS_OK {
            return Err(fail("ucp_config_read", status, &ucp));
        }
        let variable = |name: &str| std::env::var(name).ok();
        let (major, minor, _) = ucp.version();
        for (name, value) in defaults::ours((major, minor), simd::copies_fast(), variable) {
            // SAFETY: a valid configuration and two C strings. A version without the option says so by a status, and then
            // its own value stays.
            unsafe { (ucp.ucp_config_modify)(config, name.as_ptr(), value.as_ptr()) };
        }
        let params = ucp_params_t {
            field_mask: UCP_PARAM_FIELD_FEATURES
                | UCP_PARAM_FIELD_TAG_SENDER_MASK
                | UCP_PARAM_FIELD_ESTIMATED_NUM_EPS,
            features: UCP_FEATURE_TAG,
            tag_sender_mask: super::tags::SOURCE_MASK,
            estimated_num_eps: size,
            ..Default::default()
        };
        let mut handle = null_mut();
        // SAFETY: parameters, configuration and the place for the result are valid.
        let status = unsafe { (ucp.ucp_init_version)(OLDEST.0, OLDEST.1, &params, config, &mut handle) };
        // SAFETY: read above, not used afterwards.
        unsafe { (ucp.ucp_config_release)(config) };
        if status != UCS_OK {
            return Err(fail("ucp_init", status, &ucp));
        }
        Ok(Arc::new(Context { ucp, handle, library, rank }))
    }

    /// Of UCX, major and minor.
    pub(super) fn version(&self) -> (u32, u32) {
        let (major, minor, _) = self.ucp.version();
        (major, minor)
    }

    /// UCX's refusal of `call`.
    pub(super) fn error(&self, call: &'static str, status: ucs_status_t) -> Error {
        self.error_text(call, self.ucp.status(status))
    }

    /// A refusal in our own words.
    pub(super) fn error_text(&self, call: &'static str, text: String) -> Error {
        Error::Library { library: self.library.clone(), call, rank: self.rank, text }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the last owner; every worker held an Arc of this and is gone.
        unsafe { (self.ucp.ucp_cleanup)(self.handle) }
    }
}

/// How messages are posted: constants, because what was just written to the stack is not to be read (see
/// [`turns`](super::turns)).
const SEND: ucp_request_param_t = of_host(0);
const SEND_COPIED: ucp_request_param_t = of_host(UCP_OP_ATTR_FLAG_FAST_CMPL);
/// UCX 1.13 fails to say how long a message was whose receive is done at once, so a request is asked for in every case.
const RECV: ucp_request_param_t = of_host(UCP_OP_ATTR_FLAG_NO_IMM_CMPL);

/// A message between memory of hosts: unless that is said, UCX looks up each buffer in what it knows of devices' memory, where
/// there are devices.
const fn of_host(flags: u32) -> ucp_request_param_t {
    ucp_request_param_t {
        op_attr_mask: flags | UCP_OP_ATTR_FIELD_MEMORY_TYPE,
        memory_type: UCS_MEMORY_TYPE_HOST,
        ..ucp_request_param_t::UNSET
    }
}

/// What moves the messages of a rank. One thread at a time uses it.
pub(super) struct Worker {
    pub(super) context: Arc<Context>,
    handle: Handle,
}

// SAFETY: created with UCS_THREAD_MODE_SERIALIZED, and turns keep calls one after another.
unsafe impl Send for Worker {}

impl Worker {
    pub(super) fn create(context: &Arc<Context>) -> Result<Self> {
        let params = ucp_worker_params_t {
            field_mask: UCP_WORKER_PARAM_FIELD_THREAD_MODE | UCP_WORKER_PARAM_FIELD_FLAGS,
            thread_mode: UCS_THREAD_MODE_SERIALIZED,
            // A job that fails drops its transports with messages under way; its own error is what to print.
            flags: UCP_WORKER_FLAG_IGNORE_REQUEST_LEAK,
            ..Default::default()
        };
        let mut handle = null_mut();
        // SAFETY: a valid context, parameters and place.
        let status = unsafe { (context.ucp.ucp_worker_create)(context.handle, &params, &mut handle) };
        if status != UCS_OK {
            let what = context.ucp.status(status);
            let text = super::segments::shortage().map_or(what.clone(), |room| format!("{what}; {room}"));
            return Err(context.error_text("ucp_worker_create", text));
        }
        Ok(Worker { context: context.clone(), handle })
    }

    pub(super) fn address(&self) -> Result<Vec<u8>> {
        let (mut address, mut bytes) = (null_mut(), 0);
        let ucp = &self.context.ucp;
        // SAFETY: valid worker and places; the bytes are copied before they are released.
        unsafe {
            let status = (ucp.ucp_worker_get_address)(self.handle, &mut address, &mut bytes);
            if status != UCS_OK {
                return Err(self.context.error("ucp_worker_get_address", status));
            }
            let copy = std::slice::from_raw_parts(address.cast::<u8>(), bytes).to_vec();
            (ucp.ucp_worker_release_address)(self.handle, address);
            Ok(copy)
        }
    }

    /// Moves communication forward; whether anything happened.
    pub(super) fn progress(&self) -> bool {
        // SAFETY: a valid worker, and not from inside a callback of it.
        unsafe { (self.context.ucp.ucp_worker_progress)(self.handle) != 0 }
    }

    /// Looks whether something has ended, and up to `looks` times more after moving messages: nothing ends within a turn but
    /// by that. It says whether anything moved, but not of what ends behind its back, as by an error, hence the last look.
    #[inline(always)]
    pub(super) fn look<E>(
        &self,
        looks: u32,
        mut ended: impl FnMut() -> std::result::Result<bool, E>,
    ) -> std::result::Result<bool, E> {
        let mut seen = ended();
        let mut moved = true;
        for _ in 0..looks {
            if !matches!(seen, Ok(false)) {
                return seen;
            }
            moved = self.progress();
            if moved {
                seen = ended();
            }
        }
        if moved { seen } else { ended() }
    }

    /// Connects to `address`. With `on_failure`, a lost peer calls it once; without, UCX need not notice losses.
    pub(super) fn connect(&self, address: &[u8], on_failure: Option<ucp_err_handler_t>) -> Result<Handle> {
        let mut params = ucp_ep_params_t {
            field_mask: UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE,
            address: address.as_ptr().cast(),
            err_mode: UCP_ERR_HANDLING_MODE_NONE,
            ..Default::default()
        };
        if let Some(handler) = on_failure {
            params.field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLER;
            params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
            params.err_handler = handler;
        }
        let mut endpoint = null_mut();
        // SAFETY: valid worker, parameters and place; the address came from a peer's ucp_worker_get_address.
        let status = unsafe { (self.context.ucp.ucp_ep_create)(self.handle, &params, &mut endpoint) };
        if status == UCS_OK { Ok(endpoint) } else { Err(self.context.error("ucp_ep_create", status)) }
    }

    /// Starts to close an endpoint.
    pub(super) fn close(&self, endpoint: Handle, force: bool) -> Posted {
        let param = ucp_request_param_t {
            op_attr_mask: UCP_OP_ATTR_FIELD_FLAGS,
            flags: if force { UCP_EP_CLOSE_FLAG_FORCE } else { 0 },
            ..Default::default()
        };
        // SAFETY: an endpoint of this worker, not used afterwards.
        posted(unsafe { (self.context.ucp.ucp_ep_close_nbx)(endpoint, &param) })
    }

    /// Posts a send; `copied` if it should rather be copied than announced where UCX would do the latter.
    ///
    /// # Safety
    /// As of [`Transport::send`](crate::transport::Transport::send); `endpoint` is one of this worker.
    #[inline(always)]
    pub(super) unsafe fn send(
        &self,
        endpoint: Handle,
        tag: ucp_tag_t,
        src: *const u8,
        bytes: usize,
        copied: bool,
    ) -> Posted {
        let how = if copied { &SEND_COPIED } else { &SEND };
        // SAFETY: the caller's promise.
        posted(unsafe { (self.context.ucp.ucp_tag_send_nbx)(endpoint, src.cast(), bytes, tag, how) })
    }

    /// Posts a receive of at most `bytes`, which is never done at once.
    ///
    /// # Safety
    /// As of [`Transport::recv`](crate::transport::Transport::recv).
    #[inline(always)]
    pub(super) unsafe fn recv(
        &self,
        tag: ucp_tag_t,
        mask: ucp_tag_t,
        dst: *mut u8,
        bytes: usize,
    ) -> Result<*mut c_void> {
        let ucp = &self.context.ucp;
        // SAFETY: the caller's promise.
        match posted(unsafe { (ucp.ucp_tag_recv_nbx)(self.handle, dst.cast(), bytes, tag, mask, &RECV) }) {
            Posted::Pending(request) => Ok(request),
            Posted::Failed(status) => Err(self.context.error("ucp_tag_recv_nbx", status)),
            Posted::Done => {
                Err(self.context.error_text("ucp_tag_recv_nbx", "no request was returned".into()))
            }
        }
    }

    /// Whether a message has come that no receive has met, of this tag but for the bits that `mask` leaves out. UCX walks
    /// through all that have come, of whichever tag.
    pub(super) fn has_unmet(&self, tag: ucp_tag_t, mask: ucp_tag_t) -> bool {
        let mut info = ucp_tag_recv_info_t::default();
        // SAFETY: a valid worker and place; nothing is taken out.
        unsafe { !(self.context.ucp.ucp_tag_probe_nb)(self.handle, tag, mask, 0, &mut info).is_null() }
    }

    /// Starts to receive such a message, of which at most `bytes` are taken; none where there is none. After an error it is
    /// gone.
    ///
    /// # Safety
    /// As of [`recv`](Self::recv).
    pub(super) unsafe fn recv_unmet(
        &self,
        tag: ucp_tag_t,
        mask: ucp_tag_t,
        dst: *mut u8,
        bytes: usize,
    ) -> std::result::Result<Option<*mut c_void>, ucs_status_t> {
        let ucp = &self.context.ucp;
        let mut info = ucp_tag_recv_info_t::default();
        // SAFETY: a valid worker and place; the caller's promise for the rest.
        let posted = unsafe {
            let message = (ucp.ucp_tag_probe_nb)(self.handle, tag, mask, 1, &mut info);
            if message.is_null() {
                return Ok(None);
            }
            posted((ucp.ucp_tag_msg_recv_nbx)(self.handle, dst.cast(), bytes, message, &RECV))
        };
        match posted {
            Posted::Pending(request) => Ok(Some(request)),
            Posted::Failed(status) => Err(status),
            Posted::Done => Err(UCS_ERR_CANCELED),
        }
    }

    /// The state of a send or of a close; frees the request once it is no longer under way.
    ///
    /// # Safety
    /// `request` came from this worker and was not yet reported as complete.
    pub(super) unsafe fn finished(&self, request: *mut c_void) -> ucs_status_t {
        let ucp = &self.context.ucp;
        // SAFETY: the caller's promise.
        unsafe {
            let status = (ucp.ucp_request_check_status)(request);
            if status != UCS_INPROGRESS {
                (ucp.ucp_request_free)(request);
            }
            status
        }
    }

    /// The state of a receive, and what came; frees the request once it is no longer under way.
    ///
    /// # Safety
    /// As of [`finished`](Self::finished), and a receive.
    pub(super) unsafe fn received(
        &self,
        request: *mut c_void,
        info: &mut ucp_tag_recv_info_t,
    ) -> ucs_status_t {
        let ucp = &self.context.ucp;
        // SAFETY: the caller's promise.
        unsafe {
            let status = (ucp.ucp_tag_recv_request_test)(request, info);
            if status != UCS_INPROGRESS {
                (ucp.ucp_request_free)(request);
            }
            status
        }
    }

    /// Asks for a request to complete as cancelled; it still has to be tested until it does.
    ///
    /// # Safety
    /// As of [`finished`](Self::finished).
    pub(super) unsafe fn cancel(&self, request: *mut c_void) {
        // SAFETY: the caller's promise.
        unsafe { (self.context.ucp.ucp_request_cancel)(self.handle, request) }
    }

    /// Ends the worker: nothing touches memory of its requests any more, and no other method may be called.
    pub(super) fn destroy(&mut self) {
        let handle = std::mem::replace(&mut self.handle, null_mut());
        if !handle.is_null() {
            // SAFETY: the only owner; endpoints that are still open go with it.
            unsafe { (self.context.ucp.ucp_worker_destroy)(handle) }
        }
    }

    /// Leaves the worker as it is, for good: nothing moves it any more, and no other method may be called.
    pub(super) fn abandon(&mut self) {
        self.handle = null_mut();
        // Its context must stay, too.
        std::mem::forget(self.context.clone());
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.destroy();
    }
}
