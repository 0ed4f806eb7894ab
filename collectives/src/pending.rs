//! A call in flight, which owns its buffers until it gives them back.

use crate::communicator::End;
use crate::error::Result;
use std::any::Any;

/// A started call. It owns the call's buffers: [`wait`](Self::wait) gives them back, so nothing can touch them
/// meanwhile, and leaking this value leaks them, and the communicator with them, so that to its peers this rank never leaves in
/// order. Dropping it lets the call go on; the communicator then keeps the buffers for as long as they are needed. Once the last
/// handle of the communicator goes, such a call has 5 s more, or the deadline where that is shorter: after that this rank fails
/// the group. Who leaves and knows that peers come later waits for its calls.
#[must_use = "a call that nobody waits for gives its result to nobody"]
pub struct Pending<B: Send + 'static> {
    end: End,
    id: u32,
    /// None once given back.
    buffers: Option<B>,
}

impl<B: Send + 'static> Pending<B> {
    pub(crate) fn new(end: End, id: u32, buffers: B) -> Self {
        Pending { end, id, buffers: Some(buffers) }
    }

    /// Returns the buffers when the call is over, or, where they lie on a device, when everything that the device's
    /// compute queue is given from then on comes after the call. After an error the communicator is unusable and the buffers'
    /// contents are arbitrary, so they are dropped.
    pub fn wait(mut self) -> Result<B> {
        // Taken only then: where waiting panics, the call may still be under way, and is left with its buffers.
        let waited = self.end.wait(self.id);
        let buffers = self.buffers.take().expect("only `wait` takes the buffers, and it consumes self");
        waited.map(|()| buffers)
    }

    /// Whether `wait` would return at once. Moves the call forward as far as it goes without waiting, and notices peers that
    /// are gone; how long to ask about one that is silent is the caller's to say.
    pub fn is_done(&self) -> bool {
        self.end.is_done(self.id)
    }

    /// The rank that the call waits for, where the host carries it.
    pub(crate) fn waits_for(&self) -> Option<usize> {
        self.end.waits_for(self.id)
    }
}

impl<B: Send + 'static> Drop for Pending<B> {
    fn drop(&mut self) {
        if let Some(buffers) = self.buffers.take() {
            let buffers: Box<dyn Any + Send> = Box::new(buffers);
            self.end.abandon(self.id, buffers);
        }
    }
}

impl<B: Send + 'static> std::fmt::Debug for Pending<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pending(call {})", self.id)
    }
}
