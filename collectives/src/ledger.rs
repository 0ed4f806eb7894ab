//! Bytes held, per account: what a plan predicted is compared with what these counters saw.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A counter of bytes that are held now. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Account(Arc<AtomicUsize>);

impl Account {
    /// Bytes held now.
    pub fn bytes(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn add(&self, bytes: usize) {
        self.0.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn sub(&self, bytes: usize) {
        self.0.fetch_sub(bytes, Ordering::Relaxed);
    }
}
