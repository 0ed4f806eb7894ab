//! Carries the calls of a group of one: nothing has to be sent, but results must be where they were asked for.

use super::Communicator;
use super::carrier::Carrier;
use crate::buffer::{Buffer, Memory, Place, View, ViewMut};
use crate::device::{Module, Queue, SharedQueue, reduce};
use crate::element::{DType, Element};
use crate::engine::{Ends, Priority, Stats};
use crate::error::{Error, Result};
use crate::locked;
use crate::schedule::Call;
use half::{bf16, f16};
use std::any::Any;
use std::sync::{Arc, Mutex};

/// A carrier for one rank: everything happens on the compute queue itself, so that nothing has to be waited for.
pub struct Alone<Q> {
    compute: SharedQueue<Q>,
    /// Where the kernel reads the address of its input, made when it is first needed.
    address: Mutex<Option<Buffer<u64>>>,
    stats: Mutex<Stats>,
    failed: Mutex<Option<Error>>,
}

impl<Q: Queue + 'static> Alone<Q> {
    /// A carrier on the device of `compute`, for a group of one.
    ///
    /// # Errors
    /// A group of more.
    pub fn new(group: &Communicator, compute: SharedQueue<Q>) -> Result<Self> {
        if group.size() != 1 {
            let problem = format!("a carrier for one rank alone was given a group of {}", group.size());
            return Err(Error::Launch(problem));
        }
        Ok(Alone { compute, address: Mutex::default(), stats: Mutex::default(), failed: Mutex::default() })
    }

    /// Writes 16-bit elements as f32.
    fn widen<T: Element>(&self, call: &Call, ends: &Ends) -> Result<()> {
        let (mut queue, place) = (self.compute.clone(), self.compute.place());
        let mut address = locked(&self.address);
        if address.is_none() {
            queue.prepare(&[Module::reduce(DType::Bf16), Module::reduce(DType::F16)])?;
            *address = Some(Buffer::from_memory(queue.memory(size_of::<u64>())?));
        }
        let address = address.as_mut().expect("just made");
        // The queue writes the address after the last kernel has read its own.
        // SAFETY: a place for one address, which stays as long as the queue.
        unsafe {
            queue.upload(&(ends.send as u64).to_ne_bytes(), address.view_mut().as_mut_ptr() as u64)?;
        }
        // SAFETY: the lengths were checked; whoever made the call keeps the buffers until it is done, and the kernel finds the
        // address of one of them where the queue has written it.
        unsafe {
            let from = View::<T>::from_raw(ends.send.cast(), call.count, place);
            let to = ViewMut::<T::Acc>::from_raw(ends.recv.cast(), call.count, place);
            queue.launch(&reduce(call.op, &[from], address.view(), to))
        }
    }
}

// SAFETY: of one rank, everything happens on the compute queue, in its order.
unsafe impl<Q: Queue + 'static> Carrier for Alone<Q> {
    fn name(&self) -> &str {
        "one device alone"
    }

    fn group(&self) -> (usize, usize) {
        (0, 1)
    }

    fn reaches(&self, place: Place) -> bool {
        place == self.compute.place()
    }

    fn alloc(&self, bytes: usize) -> Result<Memory> {
        self.compute.clone().memory(bytes)
    }

    unsafe fn start(&self, call: Call, ends: Ends, _: Option<u64>, _: Priority) -> Result<u32> {
        if let Some(failed) = &*locked(&self.failed) {
            return Err(failed.clone());
        }
        locked(&self.stats).calls += 1;
        if std::ptr::eq(ends.send, ends.recv) || ends.recv_bytes == 0 {
            return Ok(0);
        }
        match (call.wide, call.dtype) {
            (true, DType::Bf16) => self.widen::<bf16>(&call, &ends)?,
            (true, DType::F16) => self.widen::<f16>(&call, &ends)?,
            // SAFETY: by the caller; of one rank, the input is the result.
            _ => unsafe {
                self.compute.clone().copy(ends.send as u64, ends.recv as u64, ends.recv_bytes)?;
            },
        }
        Ok(0)
    }

    fn wait(&self, _: u32) -> Result<()> {
        self.progress()
    }

    fn is_done(&self, _: u32) -> bool {
        true
    }

    fn abandon(&self, _: u32, buffers: Box<dyn Any + Send>) {
        // Whatever frees device memory waits for the device.
        drop(buffers);
    }

    fn progress(&self) -> Result<()> {
        locked(&self.failed).clone().map_or(Ok(()), Err)
    }

    fn abort(&self, why: &str) {
        let mut failed = locked(&self.failed);
        failed.get_or_insert(Error::GivenUp(why.to_owned()));
    }

    fn stats(&self, host: &dyn Fn() -> Stats) -> Stats {
        locked(&self.stats).and(&host())
    }

    fn split(&self, host: Option<&Communicator>, _: Option<u32>) -> Result<Option<Arc<dyn Carrier>>> {
        let Some(host) = host else { return Ok(None) };
        Ok(Some(Arc::new(Alone::new(host, self.compute.clone())?)))
    }
}
