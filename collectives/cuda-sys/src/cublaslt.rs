//! cuBLASLt, products of matrices.

use crate::driver::Handle;
use std::ffi::{c_int, c_void};

/// What every function returns; 0 is success.
pub type Status = c_int;

/// f32.
pub const TYPE_F32: c_int = 0;
/// f16.
pub const TYPE_F16: c_int = 2;
/// bf16.
pub const TYPE_BF16: c_int = 14;
/// Accumulates in f32; of f32 inputs, without rounding them first.
pub const COMPUTE_F32: c_int = 68;
/// Accumulates in f32; f32 inputs lose all but 11 bits first.
pub const COMPUTE_TF32: c_int = 77;
/// For a matrix as it is.
pub const OPERATION_NONE: i32 = 0;
/// For its transpose.
pub const OPERATION_TRANSPOSE: i32 = 1;
/// The attribute of a product: which operation the left matrix gets.
pub const PRODUCT_LEFT: c_int = 3;
/// The right one.
pub const PRODUCT_RIGHT: c_int = 4;
/// The attribute of a preference: bytes of workspace (u64).
pub const PREFERENCE_WORKSPACE: c_int = 1;
/// Where parts of a split sum may meet (u32, bits; 0: sums are not split).
pub const PREFERENCE_REDUCTIONS: c_int = 3;
/// One of these bits: in the workspace, unrounded.
pub const REDUCTIONS_IN_COMPUTE_TYPE: u32 = 2;
/// The attribute of a preference: bytes to which the left matrix is aligned (u32).
pub const PREFERENCE_ALIGNMENT_LEFT: c_int = 5;
/// The right one.
pub const PREFERENCE_ALIGNMENT_RIGHT: c_int = 6;
/// What is added.
pub const PREFERENCE_ALIGNMENT_ADDED: c_int = 7;
/// The result.
pub const PREFERENCE_ALIGNMENT_RESULT: c_int = 8;

/// An algorithm, opaque but copied freely.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Algorithm {
    data: [u64; 8],
}

/// One answer of the heuristic.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Choice {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Bytes of workspace that it needs.
    pub workspace: usize,
    /// 0 if it can be used.
    pub status: Status,
    /// How well it fills the device.
    pub waves: f32,
    reserved: [c_int; 4],
}

functions! {
    /// The functions of an opened libcublasLt.
    CublasLt of "libcublasLt";
    /// 10000 * major + 100 * minor + patch.
    version = "cublasLtGetVersion": fn() -> usize;
    /// A handle, in the current context.
    create = "cublasLtCreate": fn(*mut Handle) -> Status;
    /// Destroys it.
    destroy = "cublasLtDestroy": fn(Handle) -> Status;
    /// A description of a product: how it is computed, and the type of its scales.
    product_create = "cublasLtMatmulDescCreate": fn(*mut Handle, c_int, c_int) -> Status;
    /// Changes it.
    product_set = "cublasLtMatmulDescSetAttribute": fn(Handle, c_int, *const c_void, usize) -> Status;
    /// Destroys it.
    product_destroy = "cublasLtMatmulDescDestroy": fn(Handle) -> Status;
    /// A description of a matrix: type, rows, columns, elements from one column to the next.
    layout_create = "cublasLtMatrixLayoutCreate": fn(*mut Handle, c_int, u64, u64, i64) -> Status;
    /// Destroys it.
    layout_destroy = "cublasLtMatrixLayoutDestroy": fn(Handle) -> Status;
    /// What the heuristic is to respect.
    preference_create = "cublasLtMatmulPreferenceCreate": fn(*mut Handle) -> Status;
    /// Changes it.
    preference_set = "cublasLtMatmulPreferenceSetAttribute": fn(Handle, c_int, *const c_void, usize) -> Status;
    /// Destroys it.
    preference_destroy = "cublasLtMatmulPreferenceDestroy": fn(Handle) -> Status;
    /// The best algorithms: handle, product, layouts of left, right, added and result, preference, how many.
    heuristic = "cublasLtMatmulAlgoGetHeuristic": fn(
        Handle, Handle, Handle, Handle, Handle, Handle, Handle, c_int, *mut Choice, *mut c_int,
    ) -> Status;
    /// result = alpha * left * right + beta * added.
    product = "cublasLtMatmul": fn(
        Handle, Handle, *const c_void, *const c_void, Handle, *const c_void, Handle, *const c_void, *const c_void,
        Handle, *mut c_void, Handle, *const Algorithm, *mut c_void, usize, Handle,
    ) -> Status;
}

impl CublasLt {
    /// Opens the first library that is found of the newest major version up to `newest`.
    pub fn load(newest: u32) -> Result<Self, String> {
        let names: Vec<String> =
            (12..=newest.min(13)).rev().map(|major| format!("libcublasLt.so.{major}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let hint =
            "install the CUDA toolkit, or `pip install nvidia-cublas` (nvidia-cublas-cu12 for CUDA 12)";
        CublasLt::resolve(crate::find::open("cuBLASLt", &names, &[], hint)?)
    }

    /// Words for a status.
    pub fn text(status: Status) -> String {
        let known = match status {
            1 => "not initialised",
            3 => "out of memory",
            7 => "an invalid value",
            8 => "not possible on this architecture",
            13 => "the execution failed",
            14 => "an internal error",
            15 => "not supported",
            _ => return format!("status {status}"),
        };
        format!("{known} (status {status})")
    }
}
