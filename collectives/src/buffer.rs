//! Owned, typed memory wherever a transport or a device wants it, and borrowed views of it.

use crate::element::Element;
use crate::error::{Error, Result};
use crate::ledger::Account;
use crate::pages;
use rustix::mm::{self, Advice, MapFlags, ProtFlags};
use rustix::param::page_size;
use std::alloc::Layout;
use std::any::Any;
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::{NonNull, null_mut};

/// Where bytes live, and so who can touch them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// Ordinary process memory.
    Host,
    /// This rank's segment of a shared-memory transport, at this byte offset; peers read it directly.
    Shared {
        /// Bytes from the start of the owner's segment.
        offset: usize,
    },
    /// Page-locked host memory of a device.
    Pinned,
    /// Memory of the device with this ordinal; the host cannot dereference it.
    Device(usize),
}

impl Place {
    /// Whether host code may dereference pointers of this place.
    pub fn is_host(self) -> bool {
        !matches!(self, Place::Device(_))
    }
}

/// Raw memory with its owner: dropping it gives it back to whoever allocated it.
pub struct Memory {
    ptr: NonNull<u8>,
    bytes: usize,
    place: Place,
    _owner: Box<dyn Any + Send + Sync>,
    account: Option<Account>,
}

// SAFETY: Memory is the unique owner of its bytes; the pointer is not tied to a thread.
unsafe impl Send for Memory {}
// SAFETY: shared access through &Memory only reads.
unsafe impl Sync for Memory {}

impl Memory {
    /// Memory from an allocator that is not this module.
    ///
    /// # Safety
    /// `ptr..ptr+bytes` must be initialised, aligned to 64, used by nobody else on this rank for as long as
    /// `owner` lives, and dereferenceable by the host unless `place` is a device. `owner` neither holds a communicator nor
    /// calls one when it goes: that may be in the middle of another call.
    pub unsafe fn from_raw(
        ptr: NonNull<u8>,
        bytes: usize,
        place: Place,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Self {
        Memory { ptr, bytes, place, _owner: owner, account: None }
    }

    /// Zeroed process memory, aligned to 64 bytes. The process ends where the system has no more of it.
    pub fn host(bytes: usize) -> Self {
        let layout = || Layout::from_size_align(bytes, LINE).expect("a buffer below 2^63");
        Memory::try_host(bytes).unwrap_or_else(|| std::alloc::handle_alloc_error(layout()))
    }

    /// The same; none where the system has no more of it.
    pub fn try_host(bytes: usize) -> Option<Self> {
        let owned = HostBlock::zeroed(bytes)?;
        let ptr = owned.ptr;
        // SAFETY: HostBlock is zeroed, aligned, unique and freed only when the owner drops.
        Some(unsafe { Memory::from_raw(ptr, bytes, Place::Host, Box::new(owned)) })
    }

    /// Books these bytes on `account` until they are dropped.
    pub fn booked(mut self, account: &Account) -> Self {
        account.add(self.bytes);
        if let Some(old) = self.account.replace(account.clone()) {
            old.sub(self.bytes);
        }
        self
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Where the bytes live.
    pub fn place(&self) -> Place {
        self.place
    }

    /// The address, also on a device.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.ptr.as_ptr()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Some(account) = &self.account {
            account.sub(self.bytes);
        }
    }
}

/// One zeroed mapping of the process, or for little of it one allocation.
struct HostBlock {
    ptr: NonNull<u8>,
    bytes: usize,
}

/// A huge page. From this size on memory lies where the system can use them, so that fewer addresses have to be translated.
pub(crate) const HUGE: usize = 2 << 20;
const LINE: usize = 64;

/// What the system says where it has no memory.
pub(crate) const NO_MORE: &str = "the system has no more; use smaller buffers or fewer ranks on this host";

// SAFETY: HostBlock is only an owner; it never dereferences its pointer.
unsafe impl Send for HostBlock {}
// SAFETY: as above.
unsafe impl Sync for HostBlock {}

impl HostBlock {
    fn zeroed(bytes: usize) -> Option<Self> {
        let ptr = if bytes >= HUGE { map(bytes) } else { allocate(bytes) };
        Some(HostBlock { ptr: ptr?, bytes })
    }

    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes.max(LINE), LINE).expect("a small buffer")
    }
}

fn allocate(bytes: usize) -> Option<NonNull<u8>> {
    // SAFETY: the layout has a non-zero size.
    NonNull::new(unsafe { std::alloc::alloc_zeroed(HostBlock::layout(bytes)) })
}

/// Maps `bytes`, starting where a huge page can.
fn map(bytes: usize) -> Option<NonNull<u8>> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let whole = bytes.checked_add(HUGE)?;
    // SAFETY: a new mapping at an address that the system chooses; the parts that are unmapped are of it.
    unsafe {
        let raw = mm::mmap_anonymous(null_mut(), whole, access, MapFlags::PRIVATE).ok()?.cast::<u8>();
        let head = raw.align_offset(HUGE);
        let used = bytes.next_multiple_of(page_size());
        if head > 0 {
            let _ = pages::unmap(raw, head);
        }
        let ptr = raw.add(head);
        if head + used < whole {
            let _ = pages::unmap(ptr.add(used), whole - head - used);
        }
        // Systems without huge pages refuse, and small ones work as well.
        let _ = mm::madvise(ptr.cast(), used, Advice::LinuxHugepage);
        NonNull::new(ptr)
    }
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        // SAFETY: mapped or allocated in `zeroed` with this size, freed once.
        unsafe {
            if self.bytes >= HUGE {
                let _ = pages::unmap(self.ptr.as_ptr(), self.bytes.next_multiple_of(page_size()));
            } else {
                std::alloc::dealloc(self.ptr.as_ptr(), Self::layout(self.bytes));
            }
        }
    }
}

/// An owned, typed, fixed-length piece of memory. Lengths are in elements.
pub struct Buffer<T: Element> {
    memory: Memory,
    len: usize,
    _type: PhantomData<T>,
}

impl<T: Element> Buffer<T> {
    /// Zeroed process memory. Prefer `Communicator::alloc`, which knows what the transport likes best.
    pub fn zeroed(len: usize) -> Self {
        Buffer::from_memory(Memory::host(len.saturating_mul(size_of::<T>())))
    }

    /// The same, for who can say what it was for.
    ///
    /// # Errors
    /// The system has no more memory.
    pub fn try_zeroed(len: usize) -> Result<Self> {
        let bytes = len.saturating_mul(size_of::<T>());
        let refused = || Error::system(format!("allocating {bytes} bytes of memory"), NO_MORE);
        Memory::try_host(bytes).map(Buffer::from_memory).ok_or_else(refused)
    }

    /// Types raw memory; its length must be a multiple of the element.
    pub fn from_memory(memory: Memory) -> Self {
        assert_eq!(memory.bytes % size_of::<T>(), 0, "memory of a whole number of elements");
        let len = memory.bytes / size_of::<T>();
        Buffer { memory, len, _type: PhantomData }
    }

    /// The memory without its type.
    pub fn into_memory(self) -> Memory {
        self.memory
    }

    /// A copy of `data` in process memory.
    pub fn copy_of(data: &[T]) -> Self {
        let mut buffer = Buffer::zeroed(data.len());
        buffer.host_mut().copy_from_slice(data);
        buffer
    }

    /// Books the bytes on `account` until the buffer drops.
    pub fn booked(self, account: &Account) -> Self {
        let len = self.len;
        Buffer { memory: self.memory.booked(account), len, _type: PhantomData }
    }

    /// The same memory seen as its first `len` elements, so that one buffer serves units of several sizes.
    /// Panics when `len` exceeds [`capacity`](Self::capacity).
    pub fn with_len(mut self, len: usize) -> Self {
        assert!(len <= self.capacity(), "{len} elements of a buffer for {}", self.capacity());
        self.len = len;
        self
    }

    /// Elements that the memory can hold.
    pub fn capacity(&self) -> usize {
        self.memory.bytes / size_of::<T>()
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where the elements live.
    pub fn place(&self) -> Place {
        self.memory.place
    }

    /// Everything, for reading.
    pub fn view(&self) -> View<'_, T> {
        // SAFETY: the memory outlives the borrow and holds `len` initialised elements.
        unsafe { View::from_raw(self.memory.ptr.as_ptr().cast(), self.len, self.memory.place) }
    }

    /// Everything, for writing.
    pub fn view_mut(&mut self) -> ViewMut<'_, T> {
        // SAFETY: as in `view`, and the borrow is exclusive.
        unsafe { ViewMut::from_raw(self.memory.ptr.as_ptr().cast(), self.len, self.memory.place) }
    }

    /// The elements as a slice. Panics on device memory.
    pub fn host(&self) -> &[T] {
        self.view().host()
    }

    /// The elements as a mutable slice. Panics on device memory.
    pub fn host_mut(&mut self) -> &mut [T] {
        self.view_mut().host()
    }
}

impl<T: Element> std::fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer<{}>[{}] in {:?}", T::DTYPE, self.len, self.memory.place)
    }
}

/// A borrowed range of elements anywhere. On a device it is a typed address, not a slice.
#[derive(Clone, Copy)]
pub struct View<'a, T: Element> {
    ptr: *const T,
    len: usize,
    place: Place,
    _borrow: PhantomData<&'a [T]>,
}

/// A borrowed, exclusive range of elements anywhere.
pub struct ViewMut<'a, T: Element> {
    ptr: *mut T,
    len: usize,
    place: Place,
    _borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: a View is a shared borrow of Sync elements.
unsafe impl<T: Element> Send for View<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Element> Sync for View<'_, T> {}
// SAFETY: a ViewMut is an exclusive borrow of Send elements.
unsafe impl<T: Element> Send for ViewMut<'_, T> {}

fn at(place: Place, bytes: usize) -> Place {
    match place {
        Place::Shared { offset } => Place::Shared { offset: offset + bytes },
        other => other,
    }
}

impl<'a, T: Element> View<'a, T> {
    /// # Safety
    /// `len` initialised elements at `ptr`, in `place`, unchanged for `'a`.
    pub unsafe fn from_raw(ptr: *const T, len: usize, place: Place) -> Self {
        View { ptr, len, place, _borrow: PhantomData }
    }

    /// Elements.
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Where the elements live.
    pub fn place(self) -> Place {
        self.place
    }

    /// The address, also on a device.
    pub fn as_ptr(self) -> *const T {
        self.ptr
    }

    /// A part. Panics when out of range.
    pub fn slice(self, range: Range<usize>) -> View<'a, T> {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} elements", self.len);
        // SAFETY: inside this view.
        unsafe {
            View::from_raw(
                self.ptr.add(range.start),
                range.len(),
                at(self.place, range.start * size_of::<T>()),
            )
        }
    }

    /// The elements as a slice. Panics on device memory: a programming error, not a user's.
    pub fn host(self) -> &'a [T] {
        assert!(self.place.is_host(), "host access to {:?}", self.place);
        // SAFETY: host memory by the check; the constructor promised the rest.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }
}

impl<'a, T: Element> ViewMut<'a, T> {
    /// # Safety
    /// `len` initialised elements at `ptr`, in `place`, used by nobody else for `'a`.
    pub unsafe fn from_raw(ptr: *mut T, len: usize, place: Place) -> Self {
        ViewMut { ptr, len, place, _borrow: PhantomData }
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where the elements live.
    pub fn place(&self) -> Place {
        self.place
    }

    /// The address, also on a device.
    pub fn as_mut_ptr(&mut self) -> *mut T {
        self.ptr
    }

    /// A shorter borrow of the same elements.
    pub fn reborrow(&mut self) -> ViewMut<'_, T> {
        // SAFETY: the exclusive borrow of self covers the result.
        unsafe { ViewMut::from_raw(self.ptr, self.len, self.place) }
    }

    /// The same elements for reading.
    pub fn as_view(&self) -> View<'_, T> {
        // SAFETY: the shared borrow of self covers the result.
        unsafe { View::from_raw(self.ptr, self.len, self.place) }
    }

    /// A part. Panics when out of range.
    pub fn slice(self, range: Range<usize>) -> ViewMut<'a, T> {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} elements", self.len);
        // SAFETY: inside this view, which is consumed.
        unsafe {
            ViewMut::from_raw(
                self.ptr.add(range.start),
                range.len(),
                at(self.place, range.start * size_of::<T>()),
            )
        }
    }

    /// The elements as a mutable slice. Panics on device memory: a programming error, not a user's.
    pub fn host(self) -> &'a mut [T] {
        assert!(self.place.is_host(), "host access to {:?}", self.place);
        // SAFETY: host memory by the check; the constructor promised the rest.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.len) }
    }
}

impl<'a, T: Element> From<&'a [T]> for View<'a, T> {
    fn from(s: &'a [T]) -> Self {
        // SAFETY: a slice is initialised host memory.
        unsafe { View::from_raw(s.as_ptr(), s.len(), Place::Host) }
    }
}

impl<'a, T: Element> From<&'a mut [T]> for ViewMut<'a, T> {
    fn from(s: &'a mut [T]) -> Self {
        // SAFETY: a mutable slice is initialised, exclusive host memory.
        unsafe { ViewMut::from_raw(s.as_mut_ptr(), s.len(), Place::Host) }
    }
}

impl<'a, T: Element> From<&'a Buffer<T>> for View<'a, T> {
    fn from(b: &'a Buffer<T>) -> Self {
        b.view()
    }
}

impl<'a, T: Element> From<&'a mut Buffer<T>> for ViewMut<'a, T> {
    fn from(b: &'a mut Buffer<T>) -> Self {
        b.view_mut()
    }
}

impl<'a, T: Element> From<ViewMut<'a, T>> for View<'a, T> {
    fn from(v: ViewMut<'a, T>) -> Self {
        // SAFETY: the exclusive borrow is consumed and turns into a shared one of the same lifetime.
        unsafe { View::from_raw(v.ptr, v.len, v.place) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_not_there_is_an_error() {
        for len in [1 << 60, usize::MAX] {
            let refused = Buffer::<u32>::try_zeroed(len).map(drop).unwrap_err().to_string();
            let bytes = len.saturating_mul(4);
            assert!(refused.contains(&format!("{bytes} bytes")) && refused.contains("no more"), "{refused}");
        }
        assert_eq!(Buffer::<u32>::try_zeroed(5).unwrap().host(), [0; 5]);
    }
}
