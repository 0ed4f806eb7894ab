//! Anonymous shared memory of fixed size: visible in no file system, gone with its last user, whoever kills whom.

use crate::error::{Error, Result};
use crate::pages;
use crate::transport::blame;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::{Resource, getrlimit};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// An empty file that is visible in no file system and that a program which is started does not get. Systems can refuse those
/// that might be executed (`vm.memfd_noexec`); kernels before 6.3 do not know the flag that says that it will not be.
///
/// # Errors
/// The system's own.
pub fn anonymous(name: &str) -> rustix::io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    match rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        Err(rustix::io::Errno::INVAL) => rustix::fs::memfd_create(name, flags),
        made => made,
    }
}

/// What a system's error of such files says, with what it is about where that is not in its words.
pub fn words(error: rustix::io::Errno) -> String {
    match error {
        rustix::io::Errno::FBIG => format!("{error}: the limit of file sizes (ulimit -f) can be raised"),
        other => other.to_string(),
    }
}

/// Creates an anonymous file of `bytes` that can neither shrink (which would turn reads of it into SIGBUS) nor grow.
/// Its pages exist only once they are written or reserved.
pub(crate) fn create(name: &str, bytes: usize) -> Result<OwnedFd> {
    let refused = |e: rustix::io::Errno| {
        Error::system(format!("creating {bytes} bytes of shared memory ({name}) with memfd_create"), words(e))
    };
    let fd = anonymous(name).map_err(refused)?;
    rustix::fs::ftruncate(&fd, bytes as u64).map_err(refused)?;
    rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
        .map_err(refused)?;
    Ok(fd)
}

/// A mapping of such a file, readable and writable, shared with every process that maps it.
pub(crate) struct SharedMap {
    ptr: NonNull<u8>,
    bytes: usize,
    fd: Option<OwnedFd>,
}

// SAFETY: the mapping is plain memory; who may touch which part when is the business of its users.
unsafe impl Send for SharedMap {}
// SAFETY: as above; through &SharedMap only atomics and raw pointers are handed out.
unsafe impl Sync for SharedMap {}

impl SharedMap {
    /// Maps the whole file, refusing one that could shrink under us.
    pub fn new(fd: BorrowedFd<'_>) -> Result<Self> {
        let refused = |e: rustix::io::Errno| Error::system("mapping shared memory", e);
        let seals = rustix::fs::fcntl_get_seals(fd).map_err(refused)?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(Error::system("mapping shared memory", "the file is not sealed against shrinking"));
        }
        let bytes = usize::try_from(rustix::fs::fstat(fd).map_err(refused)?.st_size)
            .map_err(|_| Error::system("mapping shared memory", "its size is negative"))?;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address that the kernel picks touches no existing memory.
        let raw = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                flags,
                fd.as_fd(),
                0,
            )
        }
        .map_err(|e| {
            let limited = getrlimit(Resource::As).current.is_some() && e == rustix::io::Errno::NOMEM;
            let raised = ": the limit of address space (ulimit -v) can be raised";
            let words = format!("{e}{}", if limited { raised } else { "" });
            Error::system(format!("mapping {bytes} bytes of shared memory"), words)
        })?;
        let ptr =
            NonNull::new(raw.cast()).ok_or_else(|| Error::system("mapping shared memory", "address 0"))?;
        Ok(SharedMap { ptr, bytes, fd: None })
    }

    /// Keeps the file open too, for [`reserve`](Self::reserve).
    pub fn keeping(mut self, fd: OwnedFd) -> Self {
        self.fd = Some(fd);
        self
    }

    /// Gives a range memory through the kept file, for kernels that cannot do it through the mapping.
    pub fn reserve(&self, offset: usize, bytes: usize) -> std::result::Result<(), rustix::io::Errno> {
        let fd = self.fd.as_ref().ok_or(rustix::io::Errno::BADF)?;
        // A signal, as one that asks for a save, ends it, and before Linux 5.14 takes back what it has done.
        rustix::io::retry_on_intr(|| {
            rustix::fs::fallocate(fd, rustix::fs::FallocateFlags::empty(), offset as u64, bytes as u64)
        })
    }

    /// Bytes mapped.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The address of `bytes` at `offset`. Panics when they are not inside: offsets from peers are checked before.
    pub fn at(&self, offset: usize, bytes: usize) -> NonNull<u8> {
        assert!(
            offset.checked_add(bytes).is_some_and(|end| end <= self.bytes),
            "{bytes} bytes at {offset} of {}",
            self.bytes
        );
        // SAFETY: inside the mapping by the assertion.
        unsafe { self.ptr.add(offset) }
    }

    /// The control word at `offset`.
    pub fn u64(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8), "a u64 at offset {offset}");
        // SAFETY: inside the mapping, aligned, and every process touches control words only through atomics.
        unsafe { AtomicU64::from_ptr(self.at(offset, 8).as_ptr().cast()) }
    }

    /// The control word at `offset`.
    pub fn u32(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4), "a u32 at offset {offset}");
        // SAFETY: as in `u64`.
        unsafe { AtomicU32::from_ptr(self.at(offset, 4).as_ptr().cast()) }
    }

    /// The write-once text at `offset`, which occupies [`NOTE_BYTES`].
    pub fn note(&self, offset: usize) -> Note<'_> {
        self.at(offset, NOTE_BYTES);
        Note { map: self, offset }
    }
}

impl Drop for SharedMap {
    fn drop(&mut self) {
        // SAFETY: mapped in `new`, unmapped once; nothing handed out outlives the map.
        if let Err(e) = unsafe { pages::unmap(self.ptr.as_ptr(), self.bytes) } {
            debug_assert!(false, "munmap: {e}");
        }
    }
}

/// Room of a [`Note`].
pub(crate) const NOTE_BYTES: usize = 1024;
const NOTE_HEADER: usize = 16;

/// A short text that one process writes once and others read: why a rank gave up. Beside the text it carries one
/// number, for the rank that is to blame.
pub(crate) struct Note<'a> {
    map: &'a SharedMap,
    offset: usize,
}

impl Note<'_> {
    const WRITING: u32 = 1;
    const WRITTEN: u32 = 2;

    /// Writes, unless a text is there or being written already.
    pub fn write(&self, number: u32, text: &str) {
        let state = self.map.u32(self.offset);
        if state.compare_exchange(0, Self::WRITING, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return;
        }
        let text = blame::cut(text, NOTE_BYTES - NOTE_HEADER);
        let len = text.len();
        self.map.u32(self.offset + 4).store(number, Ordering::Relaxed);
        self.map.u32(self.offset + 8).store(len as u32, Ordering::Relaxed);
        let room = self.map.at(self.offset + NOTE_HEADER, len);
        // SAFETY: inside the mapping; this process alone won the exchange above, and readers wait for WRITTEN.
        unsafe { room.as_ptr().copy_from_nonoverlapping(text.as_ptr(), len) };
        state.store(Self::WRITTEN, Ordering::Release);
    }

    /// Whether nobody has begun to write.
    pub fn is_blank(&self) -> bool {
        self.map.u32(self.offset).load(Ordering::Relaxed) == 0
    }

    /// The number and the text, once written.
    pub fn read(&self) -> Option<(u32, String)> {
        if self.map.u32(self.offset).load(Ordering::Acquire) != Self::WRITTEN {
            return None;
        }
        let number = self.map.u32(self.offset + 4).load(Ordering::Relaxed);
        let len = self.map.u32(self.offset + 8).load(Ordering::Relaxed) as usize;
        let mut text = vec![0u8; len.min(NOTE_BYTES - NOTE_HEADER)];
        let room = self.map.at(self.offset + NOTE_HEADER, text.len());
        // SAFETY: inside the mapping; written before the release that the load above acquired, never again after.
        unsafe { text.as_mut_ptr().copy_from_nonoverlapping(room.as_ptr(), text.len()) };
        Some((number, String::from_utf8_lossy(&text).into_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_mappings_show_one_memory() {
        let fd = create("caravan-test", 8192).unwrap();
        let (a, b) = (SharedMap::new(fd.as_fd()).unwrap(), SharedMap::new(fd.as_fd()).unwrap());
        a.u64(4096).store(7, Ordering::Relaxed);
        assert_eq!((b.u64(4096).load(Ordering::Relaxed), b.bytes()), (7, 8192));
    }

    #[test]
    fn a_note_is_written_once_and_cut_at_a_character() {
        let fd = create("caravan-test", 4096).unwrap();
        let map = SharedMap::new(fd.as_fd()).unwrap();
        assert!(map.note(64).read().is_none() && map.note(64).is_blank());
        let long = "ä".repeat(NOTE_BYTES);
        map.note(64).write(3, &long);
        map.note(64).write(4, "too late");
        assert!(!map.note(64).is_blank());
        let (number, text) = map.note(64).read().unwrap();
        assert_eq!(number, 3);
        assert!(long.starts_with(&text) && text.len() > NOTE_BYTES - NOTE_HEADER - 2);
    }

    #[test]
    fn a_file_that_could_shrink_is_refused() {
        let file = anonymous("loose").unwrap();
        rustix::fs::ftruncate(&file, 4096).unwrap();
        assert!(SharedMap::new(file.as_fd()).is_err());
    }
}
