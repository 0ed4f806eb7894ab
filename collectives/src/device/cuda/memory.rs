//! Memory of a GPU, and page-locked memory of the host that it can copy from and to by itself.

use super::gpu::Gpu;
use crate::buffer::{Memory, Place};
use crate::error::{Error, Result};
use cuda_sys::driver::{HOST_PORTABLE, OUT_OF_MEMORY};
use std::ptr::NonNull;

/// Gives memory back when dropped.
struct Owner {
    gpu: Gpu,
    address: u64,
    pinned: bool,
}

impl Drop for Owner {
    fn drop(&mut self) {
        // SAFETY: allocated below, freed once; the driver waits for work that uses it.
        unsafe {
            let _ = self.gpu.enter();
            if self.pinned {
                (self.gpu.driver().free_host)(self.address as *mut _);
            } else {
                (self.gpu.driver().free)(self.address);
            }
        }
    }
}

/// Ends page-locking when dropped, and then gives the memory back.
struct Registered {
    gpu: Gpu,
    start: usize,
    _memory: Memory,
}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: registered below, once.
        unsafe {
            let _ = self.gpu.enter();
            (self.gpu.driver().unregister_host)(self.start as *mut _);
        }
    }
}

impl Gpu {
    /// Zeroed memory of the GPU, aligned to 256 bytes.
    ///
    /// # Errors
    /// There is not enough: the text says how much was asked for and how much is free.
    pub fn memory(&self, bytes: usize) -> Result<Memory> {
        self.enter()?;
        let mut address = 0;
        // The driver refuses 0 bytes.
        // SAFETY: a valid place to write to.
        let status = unsafe { (self.driver().allocate)(&mut address, bytes.max(1)) };
        if status == OUT_OF_MEMORY {
            let (free, total) = self.free_memory()?;
            return Err(Error::System {
                what: format!("{bytes} bytes of memory on GPU {}", self.ordinal()),
                source_text: format!("{free} of {total} bytes are free"),
            });
        }
        self.check("taking memory", status)?;
        let owner = Owner { gpu: self.clone(), address, pinned: false };
        let null = std::ptr::null_mut();
        // SAFETY: just allocated; the default stream and the wait leave nothing under way.
        unsafe {
            self.check("clearing memory", (self.driver().fill)(address, 0, bytes.max(1), null))?;
            self.check("clearing memory", (self.driver().stream_synchronize)(null))?;
        }
        Ok(whole(owner, bytes, Place::Device(self.ordinal())))
    }

    /// Whole pages of the host that somebody else has taken, page-locked until they are dropped.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn page_lock(&self, mut memory: Memory) -> Result<Memory> {
        self.enter()?;
        let (start, bytes, place) = (memory.as_mut_ptr(), memory.bytes(), memory.place());
        // SAFETY: the memory exists, and its pages are nobody else's.
        let status = unsafe { (self.driver().register_host)(start.cast(), bytes, HOST_PORTABLE) };
        self.check(&format!("page-locking {bytes} bytes of memory in {place:?}"), status)?;
        let owner = Registered { gpu: self.clone(), start: start as usize, _memory: memory };
        let pointer = NonNull::new(start).expect("memory is not at 0");
        // SAFETY: the owner's memory, which is unique.
        Ok(unsafe { Memory::from_raw(pointer, bytes, place, Box::new(owner)) })
    }

    /// Zeroed, page-locked memory of the host.
    ///
    /// # Errors
    /// There is not enough.
    pub fn pinned(&self, bytes: usize) -> Result<Memory> {
        self.enter()?;
        let mut pointer = std::ptr::null_mut();
        // SAFETY: a valid place to write to.
        let status = unsafe { (self.driver().allocate_host)(&mut pointer, bytes.max(1), HOST_PORTABLE) };
        self.check(&format!("page-locking {bytes} bytes of host memory"), status)?;
        // SAFETY: just allocated, as long as is said.
        unsafe { std::ptr::write_bytes(pointer.cast::<u8>(), 0, bytes) };
        let owner = Owner { gpu: self.clone(), address: pointer as u64, pinned: true };
        Ok(whole(owner, bytes, Place::Pinned))
    }
}

fn whole(owner: Owner, bytes: usize, place: Place) -> Memory {
    let pointer = NonNull::new(owner.address as *mut u8).expect("memory that was just taken is not at 0");
    // SAFETY: zeroed, aligned to at least 64, and freed when the owner drops.
    unsafe { Memory::from_raw(pointer, bytes, place, Box::new(owner)) }
}
