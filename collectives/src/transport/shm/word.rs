//! Atomic words, so that a model checker can run what is written over them.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// An atomic word: the real one, or a model checker's.
pub(super) trait Word<V> {
    fn get(&self, order: Ordering) -> V;
    fn set(&self, value: V, order: Ordering);
    fn swap(&self, value: V, order: Ordering) -> V;
    fn add(&self, value: V, order: Ordering);
}

macro_rules! words {
    ($($atomic:ty => $value:ty;)*) => {$(
        impl Word<$value> for $atomic {
            #[inline(always)]
            fn get(&self, order: Ordering) -> $value {
                self.load(order)
            }

            #[inline(always)]
            fn set(&self, value: $value, order: Ordering) {
                self.store(value, order);
            }

            #[inline(always)]
            fn swap(&self, value: $value, order: Ordering) -> $value {
                self.swap(value, order)
            }

            #[inline(always)]
            fn add(&self, value: $value, order: Ordering) {
                self.fetch_add(value, order);
            }
        }
    )*};
}

words! {
    AtomicU32 => u32;
    AtomicU64 => u64;
}

#[cfg(test)]
words! {
    loom::sync::atomic::AtomicU32 => u32;
    loom::sync::atomic::AtomicU64 => u64;
}
