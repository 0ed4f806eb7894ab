//! What calls of MPI return: that they have succeeded, or a code for why they have not.

use super::ffi;
use std::os::raw::{c_char, c_int};

/// Of a call that has succeeded.
pub(super) const OK: c_int = ffi::MPI_SUCCESS as c_int;

/// Whether what was posted is complete, or MPI's code where it has failed.
///
/// # Safety
/// A request that was posted and not yet reported complete; it is this thread's turn.
#[inline(always)]
pub(super) unsafe fn test(request: &mut ffi::MPI_Request) -> Result<bool, c_int> {
    let mut flag = 0;
    // SAFETY: by the caller; valid places.
    let code = unsafe { ffi::MPI_Test(request, &mut flag, ffi::RSMPI_STATUS_IGNORE) };
    if code == OK { Ok(flag != 0) } else { Err(code) }
}

/// MPI's text for an error code.
pub(super) fn text(code: c_int) -> String {
    let mut buffer = [0 as c_char; 4096];
    let mut length = 0;
    // SAFETY: the buffer is larger than any library's MPI_MAX_ERROR_STRING.
    let known = unsafe { ffi::MPI_Error_string(code, buffer.as_mut_ptr(), &mut length) };
    if known != OK {
        return format!("error code {code}");
    }
    let bytes: Vec<u8> = buffer[..(length as usize).min(buffer.len())].iter().map(|&c| c as u8).collect();
    // MPICH's texts are stacks of several lines.
    let text = String::from_utf8_lossy(&bytes);
    text.split(['\n', '\0']).map(str::trim).filter(|l| !l.is_empty()).collect::<Vec<_>>().join("; ")
}

/// Whether a code says that a longer message came than was posted.
pub(super) fn is_truncation(code: c_int) -> bool {
    let mut class = OK;
    // SAFETY: a valid place.
    let known = unsafe { ffi::MPI_Error_class(code, &mut class) };
    known == OK && class == ffi::MPI_ERR_TRUNCATE as c_int
}
