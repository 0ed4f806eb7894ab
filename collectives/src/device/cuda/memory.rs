//! Memory of a GPU, and page-locked memory of the host that it can copy from and to by itself.

use super::gpu::Gpu;
use crate::buffer::{Memory, Place};
use crate::error::{Error, Result};
use cuda_sys::driver::{HOST_PORTABLE, OUT_OF_MEMORY};
use std::ptr::NonNull;

/// Gives memory back when dropped.
struct Owner {
    gpu: Gpu,
    piece: Option<Piece>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.piece.take().into_iter().for_each(|piece| self.gpu.release(piece));
    }
}

/// Memory that a GPU reaches.
enum Piece {
    /// Of the GPU.
    Device(u64),
    /// Of the host, page-locked since it was taken.
    Pinned(usize),
    /// Of the host, taken by somebody else and page-locked later.
    Registered(usize, Memory),
}

/// What is freed later, and for how many streams it has to wait.
#[derive(Default)]
pub(super) struct Kept {
    holds: usize,
    pieces: Vec<Piece>,
}

/// While there is one, no memory of the GPU is freed: a stream keeps work that it has not given to the driver, which
/// therefore does not know yet what has to wait for it.
pub(super) struct Hold {
    gpu: Gpu,
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut kept = self.gpu.kept();
        kept.holds -= 1;
        let pieces = if kept.holds == 0 { std::mem::take(&mut kept.pieces) } else { Vec::new() };
        drop(kept);
        pieces.into_iter().for_each(|piece| self.gpu.free(piece));
    }
}

impl Gpu {
    /// Puts off the freeing of memory.
    pub(super) fn hold(&self) -> Hold {
        self.kept().holds += 1;
        Hold { gpu: self.clone() }
    }

    /// Frees memory, unless somebody puts that off.
    fn release(&self, piece: Piece) {
        let mut kept = self.kept();
        match kept.holds {
            0 => {
                drop(kept);
                self.free(piece);
            }
            _ => kept.pieces.push(piece),
        }
    }

    fn free(&self, piece: Piece) {
        // SAFETY: taken or registered below, once; the driver waits for work that it was given.
        unsafe {
            let _ = self.enter();
            match piece {
                Piece::Device(address) => {
                    (self.driver().free)(address);
                }
                Piece::Pinned(address) => {
                    (self.driver().free_host)(address as *mut _);
                }
                Piece::Registered(start, memory) => {
                    (self.driver().unregister_host)(start as *mut _);
                    drop(memory);
                }
            }
        }
    }

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
        let owner = Owner { gpu: self.clone(), piece: Some(Piece::Device(address)) };
        let null = std::ptr::null_mut();
        // SAFETY: just allocated; the default stream and the wait leave nothing under way.
        unsafe {
            self.check("clearing memory", (self.driver().fill)(address, 0, bytes.max(1), null))?;
            self.check("clearing memory", (self.driver().stream_synchronize)(null))?;
        }
        Ok(whole(owner, address, bytes, Place::Device(self.ordinal())))
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
        let piece = Piece::Registered(start as usize, memory);
        let owner = Owner { gpu: self.clone(), piece: Some(piece) };
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
        let owner = Owner { gpu: self.clone(), piece: Some(Piece::Pinned(pointer as usize)) };
        Ok(whole(owner, pointer as u64, bytes, Place::Pinned))
    }
}

fn whole(owner: Owner, address: u64, bytes: usize, place: Place) -> Memory {
    let pointer = NonNull::new(address as *mut u8).expect("memory that was just taken is not at 0");
    // SAFETY: zeroed, aligned to at least 64, and freed when the owner drops.
    unsafe { Memory::from_raw(pointer, bytes, place, Box::new(owner)) }
}
