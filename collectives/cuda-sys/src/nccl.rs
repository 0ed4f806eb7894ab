//! NCCL, collectives between GPUs: version 2.23.4 or newer.

use crate::driver::Handle;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

/// What every function returns; 0 is success.
pub type Status = c_int;
/// A communicator.
pub type Comm = *mut c_void;

/// Everything was done, or given to the stream.
pub const SUCCESS: Status = 0;
/// Not an error: a non-blocking communicator is still at it.
pub const IN_PROGRESS: Status = 7;
/// The oldest version whose non-blocking communicators launch every kernel from a thread of NCCL's own. In older ones whoever
/// gives a group launches its kernels itself, unless ranks have yet to connect: where a peer stands still and the queues of the
/// GPU are full, that call does not come back, and nothing else may be called meanwhile, not even to give up.
pub const OLDEST: u32 = 22304;
/// The version whose [`Config`] ours is.
const OF_CONFIG: u32 = 21800;
/// The oldest version that lets several ranks use one GPU when it is asked to.
pub const SHARED_GPU: u32 = 23003;
/// A field of [`Config`] that NCCL is to choose.
pub const UNDEFINED: c_int = c_int::MIN;
/// In [`Nccl::split`]: this rank is in no group.
pub const NO_COLOR: c_int = -1;

/// i8.
pub const TYPE_I8: c_int = 0;
/// u8.
pub const TYPE_U8: c_int = 1;
/// i32.
pub const TYPE_I32: c_int = 2;
/// u32.
pub const TYPE_U32: c_int = 3;
/// i64.
pub const TYPE_I64: c_int = 4;
/// u64.
pub const TYPE_U64: c_int = 5;
/// f16.
pub const TYPE_F16: c_int = 6;
/// f32.
pub const TYPE_F32: c_int = 7;
/// f64.
pub const TYPE_F64: c_int = 8;
/// bf16.
pub const TYPE_BF16: c_int = 9;

/// The sum.
pub const SUM: c_int = 0;
/// The product.
pub const PRODUCT: c_int = 1;
/// The greatest.
pub const MAX: c_int = 2;
/// The least.
pub const MIN: c_int = 3;
/// The sum divided by the number of ranks.
pub const AVERAGE: c_int = 4;

/// What names a group before it exists; one rank makes it, all are given it.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId {
    /// Opaque.
    pub bytes: [u8; 128],
}

/// How a communicator behaves, as version 2.18 knew it. Newer libraries take older ones' sizes and choose what those
/// do not have.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Config {
    pub(crate) size: usize,
    pub(crate) magic: c_uint,
    pub(crate) version: c_uint,
    /// 0: no call waits for a peer.
    pub blocking: c_int,
    /// Blocks that are scheduled together.
    pub cluster: c_int,
    /// The fewest blocks of a kernel.
    pub min_blocks: c_int,
    /// The most.
    pub max_blocks: c_int,
    /// The network to use, or null.
    pub network: *const c_char,
    /// Whether a split shares its parent's resources.
    pub split_share: c_int,
    // Newer versions have a field here, which they read along with ours: it must be undefined, not zero.
    _traffic_class: c_int,
}

impl Config {
    /// With everything left to NCCL but that no call waits.
    pub fn non_blocking() -> Self {
        Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: OF_CONFIG,
            blocking: 0,
            cluster: UNDEFINED,
            min_blocks: UNDEFINED,
            max_blocks: UNDEFINED,
            network: std::ptr::null(),
            split_share: UNDEFINED,
            _traffic_class: UNDEFINED,
        }
    }
}

functions! {
    /// The functions of an opened libnccl. Types and operations are the constants of this module; counts are in elements.
    Nccl of "libnccl";
    /// 10000 * major + 100 * minor + patch.
    version = "ncclGetVersion": fn(*mut c_int) -> Status;
    /// Names a new group.
    unique_id = "ncclGetUniqueId": fn(*mut UniqueId) -> Status;
    /// Joins a group: ranks, name, rank, configuration.
    init = "ncclCommInitRankConfig": fn(*mut Comm, c_int, UniqueId, c_int, *mut Config) -> Status;
    /// How a communicator is doing.
    async_error = "ncclCommGetAsyncError": fn(Comm, *mut Status) -> Status;
    /// Splits a group: color, key.
    split = "ncclCommSplit": fn(Comm, c_int, c_int, *mut Comm, *mut Config) -> Status;
    /// Starts to bring a communicator to its end.
    finalize = "ncclCommFinalize": fn(Comm) -> Status;
    /// Frees a communicator that was brought to its end.
    destroy = "ncclCommDestroy": fn(Comm) -> Status;
    /// Ends what is under way and frees a communicator.
    abort = "ncclCommAbort": fn(Comm) -> Status;
    /// From, to, count, type, operation.
    all_reduce = "ncclAllReduce": fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Handle) -> Status;
    /// From, to, count of a shard, type, operation.
    reduce_scatter = "ncclReduceScatter": fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Handle) -> Status;
    /// From, to, count of a shard, type.
    all_gather = "ncclAllGather": fn(*const c_void, *mut c_void, usize, c_int, Comm, Handle) -> Status;
    /// From, to, count, type, root.
    broadcast = "ncclBroadcast": fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Handle) -> Status;
    /// From, to, count, type, operation, root.
    reduce = "ncclReduce": fn(*const c_void, *mut c_void, usize, c_int, c_int, c_int, Comm, Handle) -> Status;
    /// From, count, type, peer.
    send = "ncclSend": fn(*const c_void, usize, c_int, c_int, Comm, Handle) -> Status;
    /// To, count, type, peer.
    recv = "ncclRecv": fn(*mut c_void, usize, c_int, c_int, Comm, Handle) -> Status;
    /// What this thread calls from now on happens at once,
    group_start = "ncclGroupStart": fn() -> Status;
    /// here.
    group_end = "ncclGroupEnd": fn() -> Status;
    /// What a status means.
    error_text = "ncclGetErrorString": fn(Status) -> *const c_char;
    /// More words about the process's last error; the communicator may be null.
    last_error = "ncclGetLastError": fn(Comm) -> *const c_char;
}

impl Nccl {
    /// Opens the library: the loader's, then those of Python environments.
    pub fn load() -> Result<Self, String> {
        let hint = "install libnccl2 of NVIDIA's repository, or `pip install nvidia-nccl-cu13` (nvidia-nccl-cu12 for \
                    CUDA 12)";
        let nccl =
            Nccl::resolve(crate::find::open("NCCL", &["libnccl.so.2"], &["libnvidia-ml.so.1"], hint)?)?;
        match too_old(nccl.number()) {
            Some(why) => {
                let there = "or name the folder of one that is there in CARAVAN_CUDA_LIBRARIES";
                Err(format!("{} is {why}: {hint}, {there}", nccl.file()))
            }
            None => Ok(nccl),
        }
    }

    /// Its version, as one number.
    pub fn number(&self) -> u32 {
        let mut number = 0;
        // SAFETY: a valid place to write to.
        unsafe { (self.version)(&mut number) };
        number.max(0) as u32
    }

    /// `2.30.3` of the number 23003.
    pub fn numbers(number: u32) -> String {
        format!("{}.{}.{}", number / 10000, number / 100 % 100, number % 100)
    }

    /// Its own words for a status, and what it has to add about the last error.
    pub fn text(&self, status: Status) -> String {
        // SAFETY: both return strings that live as long as the library, or null; no version looks at the communicator.
        let (text, more) =
            unsafe { (word((self.error_text)(status)), word((self.last_error)(std::ptr::null_mut()))) };
        match (text, more) {
            (Some(text), Some(more)) => format!("{text} ({more})"),
            (Some(text), None) => text,
            _ => format!("status {status}"),
        }
    }
}

/// # Safety
/// Null, or a string with a NUL.
unsafe fn word(text: *const c_char) -> Option<String> {
    // SAFETY: by the caller.
    let text = (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned());
    text.filter(|text| !text.is_empty())
}

fn too_old(number: u32) -> Option<String> {
    let [found, oldest] = [number, OLDEST].map(Nccl::numbers);
    (number < OLDEST).then(|| format!("NCCL {found}, and {oldest} or newer is needed"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_is_that_of_version_2_18() {
        // Offsets of nccl.h: size 0, magic 8, version 12, blocking 16, cgaClusterSize 20, minCTAs 24, maxCTAs 28,
        // netName 32, splitShare 40, and trafficClass 44 in newer ones.
        assert_eq!(size_of::<Config>(), 48);
        let offsets = [
            std::mem::offset_of!(Config, blocking),
            std::mem::offset_of!(Config, max_blocks),
            std::mem::offset_of!(Config, network),
            std::mem::offset_of!(Config, split_share),
            std::mem::offset_of!(Config, _traffic_class),
        ];
        assert_eq!(offsets, [16, 28, 32, 40, 44]);
        let config = Config::non_blocking();
        assert_eq!((config.size, config.magic, config.version, config.blocking), (48, 0xcafebeef, 21800, 0));
        assert_eq!((config._traffic_class, config.split_share), (UNDEFINED, UNDEFINED));
    }

    #[test]
    fn versions_are_written_with_dots() {
        assert_eq!(too_old(22304), None);
        assert_eq!(too_old(22203).unwrap(), "NCCL 2.22.3, and 2.23.4 or newer is needed");
        assert_eq!([21800, 23003, 22304].map(Nccl::numbers), ["2.18.0", "2.30.3", "2.23.4"]);
    }
}
