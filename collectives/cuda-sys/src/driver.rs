//! The driver: devices, contexts, memory, streams, events, modules, graphs.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

/// What every function returns; 0 is success.
pub type Status = c_int;
/// A context, stream, event, module, function or graph.
pub type Handle = *mut c_void;
/// A device.
pub type Device = c_int;
/// An address of device memory.
pub type DevicePointer = u64;

/// Not enough memory.
pub const OUT_OF_MEMORY: Status = 2;
/// There is no GPU, or none that this process may see.
const NO_DEVICE: Status = 100;
/// Not an error: what was asked about is still under way.
pub const NOT_READY: Status = 600;
/// For streams: does not wait for the default stream.
pub const STREAM_NON_BLOCKING: c_uint = 1;
/// For events: order only, no times.
pub const EVENT_DISABLE_TIMING: c_uint = 2;
/// For events: with times.
pub const EVENT_DEFAULT: c_uint = 0;
/// For capture: only this thread's unsafe calls are refused meanwhile.
pub const CAPTURE_THREAD_LOCAL: c_int = 1;

/// The oldest CUDA that a driver must support, as it numbers versions.
const OLDEST: c_int = 12_000;

/// For memory of the host: page-locked for all contexts of the process.
pub const HOST_PORTABLE: c_uint = 1;

/// Multiprocessors of a device.
pub const DEVICE_MULTIPROCESSORS: c_int = 16;
/// Bytes of its second-level cache.
pub const DEVICE_L2_BYTES: c_int = 38;
/// The major number of its compute capability.
pub const DEVICE_CAPABILITY_MAJOR: c_int = 75;
/// The minor number.
pub const DEVICE_CAPABILITY_MINOR: c_int = 76;
/// Bytes of shared memory that a block may ask for.
pub const DEVICE_SHARED_BYTES: c_int = 97;
/// Bytes of static shared memory of a block of a function.
pub const FUNCTION_SHARED_BYTES: c_int = 1;
/// The most dynamic shared memory that a function may be launched with.
pub const FUNCTION_DYNAMIC_SHARED_BYTES: c_int = 8;

functions! {
    /// The functions of an opened libcuda.
    Driver of "libcuda";
    /// Must come first.
    init = "cuInit": fn(c_uint) -> Status;
    /// The newest CUDA that the driver supports: 1000 * major + 10 * minor.
    driver_version = "cuDriverGetVersion": fn(*mut c_int) -> Status;
    /// How many devices there are.
    device_count = "cuDeviceGetCount": fn(*mut c_int) -> Status;
    /// The device of this number.
    device = "cuDeviceGet": fn(*mut Device, c_int) -> Status;
    /// Its name.
    device_name = "cuDeviceGetName": fn(*mut c_char, c_int, Device) -> Status;
    /// Bytes of its memory.
    device_memory = "cuDeviceTotalMem_v2": fn(*mut usize, Device) -> Status;
    /// Sixteen bytes that no other GPU or partition has.
    device_uuid = "cuDeviceGetUuid_v2": fn(*mut [u8; 16], Device) -> Status;
    /// One of its properties.
    device_attribute = "cuDeviceGetAttribute": fn(*mut c_int, c_int, Device) -> Status;
    /// Takes part in the context that all libraries of the process share.
    context_retain = "cuDevicePrimaryCtxRetain": fn(*mut Handle, Device) -> Status;
    /// Gives it back.
    context_release = "cuDevicePrimaryCtxRelease_v2": fn(Device) -> Status;
    /// Makes a context the calling thread's.
    context_use = "cuCtxSetCurrent": fn(Handle) -> Status;
    /// The least and the greatest priority of streams; greater ones are smaller numbers.
    priorities = "cuCtxGetStreamPriorityRange": fn(*mut c_int, *mut c_int) -> Status;
    /// Free and total bytes.
    memory_info = "cuMemGetInfo_v2": fn(*mut usize, *mut usize) -> Status;
    /// Takes device memory.
    allocate = "cuMemAlloc_v2": fn(*mut DevicePointer, usize) -> Status;
    /// Gives it back.
    free = "cuMemFree_v2": fn(DevicePointer) -> Status;
    /// Takes page-locked host memory.
    allocate_host = "cuMemHostAlloc": fn(*mut *mut c_void, usize, c_uint) -> Status;
    /// Gives it back.
    free_host = "cuMemFreeHost": fn(*mut c_void) -> Status;
    /// Page-locks whole pages of the host that somebody else has taken.
    register_host = "cuMemHostRegister_v2": fn(*mut c_void, usize, c_uint) -> Status;
    /// Ends that.
    unregister_host = "cuMemHostUnregister": fn(*mut c_void) -> Status;
    /// Copies between any two places.
    copy = "cuMemcpyAsync": fn(DevicePointer, DevicePointer, usize, Handle) -> Status;
    /// Fills bytes.
    fill = "cuMemsetD8Async": fn(DevicePointer, u8, usize, Handle) -> Status;
    /// Creates a stream with flags and a priority.
    stream_create = "cuStreamCreateWithPriority": fn(*mut Handle, c_uint, c_int) -> Status;
    /// Destroys a stream, once its work is done.
    stream_destroy = "cuStreamDestroy_v2": fn(Handle) -> Status;
    /// Waits for all of a stream's work.
    stream_synchronize = "cuStreamSynchronize": fn(Handle) -> Status;
    /// Whether a stream's work is done.
    stream_query = "cuStreamQuery": fn(Handle) -> Status;
    /// What a stream gets from now on waits for an event.
    stream_wait = "cuStreamWaitEvent": fn(Handle, Handle, c_uint) -> Status;
    /// Creates an event.
    event_create = "cuEventCreate": fn(*mut Handle, c_uint) -> Status;
    /// Destroys an event.
    event_destroy = "cuEventDestroy_v2": fn(Handle) -> Status;
    /// The event is what a stream has been given so far.
    event_record = "cuEventRecord": fn(Handle, Handle) -> Status;
    /// Whether it has happened.
    event_query = "cuEventQuery": fn(Handle) -> Status;
    /// Waits for it.
    event_synchronize = "cuEventSynchronize": fn(Handle) -> Status;
    /// Milliseconds from one event to another.
    event_elapsed = "cuEventElapsedTime": fn(*mut f32, Handle, Handle) -> Status;
    /// Loads machine code.
    module_load = "cuModuleLoadData": fn(*mut Handle, *const c_void) -> Status;
    /// Unloads it.
    module_unload = "cuModuleUnload": fn(Handle) -> Status;
    /// A function of a module.
    module_function = "cuModuleGetFunction": fn(*mut Handle, Handle, *const c_char) -> Status;
    /// Changes a property of a function.
    function_set = "cuFuncSetAttribute": fn(Handle, c_int, c_int) -> Status;
    /// A property of a function.
    function_attribute = "cuFuncGetAttribute": fn(*mut c_int, c_int, Handle) -> Status;
    /// Launches a function: grid, block, shared memory, stream, addresses of arguments.
    launch = "cuLaunchKernel": fn(
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void,
    ) -> Status;
    /// What a stream gets from now on is recorded instead of run.
    capture_begin = "cuStreamBeginCapture_v2": fn(Handle, c_int) -> Status;
    /// The graph of what was recorded.
    capture_end = "cuStreamEndCapture": fn(Handle, *mut Handle) -> Status;
    /// Makes a graph ready to run.
    graph_instantiate = "cuGraphInstantiateWithFlags": fn(*mut Handle, Handle, u64) -> Status;
    /// Runs it.
    graph_launch = "cuGraphLaunch": fn(Handle, Handle) -> Status;
    /// Destroys a graph.
    graph_destroy = "cuGraphDestroy": fn(Handle) -> Status;
    /// Destroys a graph that was ready to run.
    graph_exec_destroy = "cuGraphExecDestroy": fn(Handle) -> Status;
    /// The name of a status.
    error_name = "cuGetErrorName": fn(Status, *mut *const c_char) -> Status;
    /// What it means.
    error_text = "cuGetErrorString": fn(Status, *mut *const c_char) -> Status;
}

impl Driver {
    /// Opens the driver's library and initialises it. The error says what is missing.
    pub fn load() -> Result<Self, String> {
        let hint = "install NVIDIA's driver, or, in a container, start it with its GPUs";
        let driver = Driver::resolve(crate::find::open("NVIDIA's driver", &["libcuda.so.1"], &[], hint)?)?;
        // SAFETY: the first call, with the only flags there are.
        let status = unsafe { (driver.init)(0) };
        match status {
            0 => driver.new_enough(),
            NO_DEVICE => Err("NVIDIA's driver is there, but shows no GPU: CUDA_VISIBLE_DEVICES may hide them, or the job has asked \
                              for none"
                .into()),
            _ => Err(format!("NVIDIA's driver does not start: {}", driver.text(status))),
        }
    }

    /// The oldest CUDA that the kernels and libraries are made for.
    fn new_enough(self) -> Result<Self, String> {
        let mut version = 0;
        // SAFETY: a valid place to write to.
        match unsafe { (self.driver_version)(&mut version) } {
            0 if version < OLDEST => Err(format!(
                "NVIDIA's driver supports CUDA {}.{}, and 12.0 or newer is needed: install driver 525 or newer",
                version / 1000,
                version % 1000 / 10
            )),
            _ => Ok(self),
        }
    }

    /// The driver's own words for a status.
    pub fn text(&self, status: Status) -> String {
        let word = |function: unsafe extern "C" fn(Status, *mut *const c_char) -> Status| {
            let mut text = std::ptr::null();
            // SAFETY: a valid place to write to; the strings live as long as the library.
            unsafe { (function(status, &mut text) == 0 && !text.is_null()).then(|| CStr::from_ptr(text)) }
        };
        match (word(self.error_name), word(self.error_text)) {
            (Some(name), Some(text)) => format!("{} ({})", text.to_string_lossy(), name.to_string_lossy()),
            _ => format!("status {status}"),
        }
    }
}
