//! NVRTC, the compiler of kernels. It needs no GPU.

use std::ffi::{CStr, c_char, c_int, c_void};

/// What every function returns; 0 is success.
pub type Status = c_int;
/// A program.
pub type Program = *mut c_void;

functions! {
    /// The functions of an opened libnvrtc.
    Nvrtc of "libnvrtc";
    /// Major and minor number.
    version = "nvrtcVersion": fn(*mut c_int, *mut c_int) -> Status;
    /// How many architectures it makes machine code for.
    architecture_count = "nvrtcGetNumSupportedArchs": fn(*mut c_int) -> Status;
    /// These, each as ten times the major number and the minor one, in ascending order.
    architectures = "nvrtcGetSupportedArchs": fn(*mut c_int) -> Status;
    /// A program from its text and name, and the texts and names of what it includes.
    create = "nvrtcCreateProgram": fn(
        *mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char,
    ) -> Status;
    /// Destroys a program.
    destroy = "nvrtcDestroyProgram": fn(*mut Program) -> Status;
    /// Compiles with options.
    compile = "nvrtcCompileProgram": fn(Program, c_int, *const *const c_char) -> Status;
    /// Bytes of the log, its NUL included.
    log_size = "nvrtcGetProgramLogSize": fn(Program, *mut usize) -> Status;
    /// The log.
    log = "nvrtcGetProgramLog": fn(Program, *mut c_char) -> Status;
    /// Bytes of the machine code.
    cubin_size = "nvrtcGetCUBINSize": fn(Program, *mut usize) -> Status;
    /// The machine code.
    cubin = "nvrtcGetCUBIN": fn(Program, *mut c_char) -> Status;
    /// What a status means.
    error_text = "nvrtcGetErrorString": fn(Status) -> *const c_char;
}

impl Nvrtc {
    /// Opens the first compiler that is found of the newest major version up to `newest` (what it makes must load in the driver)
    /// and that `suits`; if none does, the error has what that says of all of them.
    pub fn load(newest: u32, mut suits: impl FnMut(&Self) -> Result<(), String>) -> Result<Self, String> {
        let names: Vec<String> =
            (12..=newest.min(13)).rev().map(|major| format!("libnvrtc.so.{major}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let hint = "install the CUDA toolkit, or `pip install nvidia-cuda-nvrtc` (nvidia-cuda-nvrtc-cu12 for CUDA 12)";
        // Some wheels of CUDA 13 do not say that what the first compilation needs lies beside them.
        let companions = ["libnvrtc-builtins.so."];
        let what = "NVRTC, the compiler of CUDA kernels,";
        crate::find::open_accepted(what, &names, &companions, hint, |opened| {
            let nvrtc = Nvrtc::resolve(opened)?;
            suits(&nvrtc).map(|()| nvrtc)
        })
    }

    /// Its major and minor number.
    pub fn number(&self) -> (u32, u32) {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: two valid places to write to.
        unsafe { (self.version)(&mut major, &mut minor) };
        (major as u32, minor as u32)
    }

    /// The architectures that it makes machine code for, as 80, 90, 100; none if it does not say.
    pub fn known(&self) -> Vec<u32> {
        let mut count = 0;
        // SAFETY: a valid place to write to, and then as many as it says.
        unsafe {
            if (self.architecture_count)(&mut count) != 0 {
                return Vec::new();
            }
            let mut known = vec![0; count.max(0) as usize];
            match (self.architectures)(known.as_mut_ptr()) {
                0 => known.into_iter().map(|number| number as u32).collect(),
                _ => Vec::new(),
            }
        }
    }

    /// Its own words for a status.
    pub fn text(&self, status: Status) -> String {
        // SAFETY: returns a constant string for every status.
        let text = unsafe { CStr::from_ptr((self.error_text)(status)) };
        text.to_string_lossy().into_owned()
    }
}
