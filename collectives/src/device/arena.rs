//! One piece of memory for many buffers: a device rounds each allocation up to megabytes, and a plan that is true to
//! the byte must not.

use crate::buffer::{Buffer, Memory};
use crate::error::{Error, Result};
use std::ptr::NonNull;
use std::sync::Arc;

/// What every buffer starts at a multiple of.
pub const ALIGNMENT: usize = 256;

/// Memory that is handed out from its start to its end.
pub struct Arena {
    whole: Arc<Buffer<u8>>,
    used: usize,
}

impl Arena {
    /// Bytes of an arena for buffers of these lengths in bytes.
    pub fn needed(lengths: impl IntoIterator<Item = usize>) -> usize {
        lengths.into_iter().map(|bytes| bytes.next_multiple_of(ALIGNMENT)).sum()
    }

    /// All of `memory`, to be handed out.
    pub fn new(memory: Memory) -> Self {
        Arena { whole: Arc::new(Buffer::from_memory(memory)), used: 0 }
    }

    /// The next `bytes`. They keep the whole arena alive.
    ///
    /// # Errors
    /// The arena is too small.
    pub fn take(&mut self, bytes: usize) -> Result<Memory> {
        let end = bytes.checked_next_multiple_of(ALIGNMENT).and_then(|bytes| self.used.checked_add(bytes));
        let Some(end) = end.filter(|&end| end <= self.whole.len()) else {
            return Err(Error::System {
                what: format!("{bytes} bytes of an arena of {}", self.whole.len()),
                source_text: format!("{} are in use", self.used),
            });
        };
        let view = self.whole.view();
        let start = view.as_ptr().wrapping_add(self.used).cast_mut();
        self.used = end;
        let start = NonNull::new(start).expect("memory is not at 0");
        // SAFETY: zeroed, used by nobody else because `used` only grows, aligned because allocations are to at least
        // 64 and host memory needs no more, and alive as long as the owner.
        Ok(unsafe { Memory::from_raw(start, bytes, view.place(), Box::new(self.whole.clone())) })
    }

    /// All of it.
    pub fn bytes(&self) -> usize {
        self.whole.len()
    }

    /// Bytes handed out so far, with what lies between buffers.
    pub fn used(&self) -> usize {
        self.used
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_apart_aligned_and_fill_the_arena() {
        let lengths = [1, 256, 0, 257, 64, 4096, 3];
        let total = Arena::needed(lengths);
        let mut arena = Arena::new(Memory::host(total));
        let mut buffers: Vec<Buffer<u8>> =
            lengths.iter().map(|&bytes| Buffer::from_memory(arena.take(bytes).unwrap())).collect();
        assert_eq!(arena.used(), total);
        for (i, buffer) in buffers.iter_mut().enumerate() {
            assert_eq!(buffer.len(), lengths[i]);
            assert_eq!(buffer.view().as_ptr() as usize % 64, 0);
            buffer.host_mut().fill(i as u8 + 1);
        }
        drop(arena);
        assert!(buffers.iter().enumerate().all(|(i, b)| b.host().iter().all(|&x| x == i as u8 + 1)));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let mut arena = Arena::new(Memory::host(512));
        arena.take(200).unwrap();
        let error = arena.take(257).err().unwrap().to_string();
        assert!(error.contains("257 bytes") && error.contains("256 are in use"), "{error}");
        // Lengths that wrap around, with and without what is in use.
        for bytes in [usize::MAX, usize::MAX - 255, usize::MAX - 511] {
            assert!(arena.take(bytes).is_err());
        }
        arena.take(256).unwrap();
    }
}
