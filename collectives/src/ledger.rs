//! Bytes held, per account: what a plan predicted is compared with what these counters saw.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A counter of bytes that are held now, and of the most that were held at once. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Account(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    now: AtomicUsize,
    peak: AtomicUsize,
}

impl Account {
    /// Bytes held now.
    pub fn bytes(&self) -> usize {
        self.0.now.load(Ordering::Relaxed)
    }

    /// The most bytes ever held at once.
    pub fn peak(&self) -> usize {
        self.0.peak.load(Ordering::Relaxed)
    }

    pub(crate) fn add(&self, bytes: usize) {
        let now = self.0.now.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.0.peak.fetch_max(now, Ordering::Relaxed);
    }

    pub(crate) fn sub(&self, bytes: usize) {
        self.0.now.fetch_sub(bytes, Ordering::Relaxed);
    }
}
