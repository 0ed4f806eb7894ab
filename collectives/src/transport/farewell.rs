//! Which peers have left a group in order, for transports whose library does not tell.

use std::time::{Duration, Instant};

/// After a peer has left in order, what it sent before may still be on its way for this long.
const AFTER_LEAVING: Duration = Duration::from_secs(1);

/// How a peer has left that was to take a message.
pub const NOT_TAKEN: &str = "left the group without taking a message";
/// How one has left that was to send a message.
pub const NOT_SENT: &str = "left the group while a message from it was awaited";

/// By ranks of the group.
pub struct Farewells {
    left: Vec<Option<Instant>>,
    count: usize,
}

impl Farewells {
    /// Of a group of `size`, which nobody has left.
    pub fn none(size: usize) -> Self {
        Farewells { left: vec![None; size], count: 0 }
    }

    /// `peer` has said goodbye.
    pub fn note(&mut self, peer: usize) {
        if self.left[peer].replace(Instant::now()).is_none() {
            self.count += 1;
        }
    }

    /// Whether `peer` has said goodbye.
    #[inline]
    pub fn has_left(&self, peer: usize) -> bool {
        self.left[peer].is_some()
    }

    /// Whether `peer` has left too long ago for anything of it to come any more, and so for a message that it was taking
    /// to be still under way.
    #[inline]
    pub fn is_done_with(&self, peer: usize) -> bool {
        self.count > 0 && self.left[peer].is_some_and(|at| at.elapsed() > AFTER_LEAVING)
    }
}
