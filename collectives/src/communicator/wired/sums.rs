//! Sums pieces of a reduction in a queue of their own, while the next pieces are on their way.

use super::plan::HALVES;
use crate::buffer::{Buffer, View, ViewMut};
use crate::device::{Queue, SharedQueue, Streams, Urgency, reduce_addresses};
use crate::element::{DType, Element, bytes_of};
use crate::error::Result;
use crate::schedule::Call;
use half::{bf16, f16};

/// What sums pieces, and for each half of scratch memory what orders it with the lane of reductions.
pub(super) struct Sums<Q: Streams> {
    queue: Q,
    halves: [Half<Q::Event>; HALVES],
    /// Whether there are sums that the lane has not been made to come after.
    pending: bool,
}

struct Half<E> {
    /// The lane has received all contributions.
    arrived: E,
    /// They are summed.
    summed: E,
    /// Where the kernel reads their addresses.
    table: Buffer<u64>,
}

impl<Q: Streams> Sums<Q> {
    /// Beside `compute`; `table` takes memory for the addresses of one contribution of each rank.
    pub fn new(compute: &SharedQueue<Q>, table: impl Fn() -> Result<Buffer<u64>>) -> Result<Self> {
        let half = || -> Result<Half<Q::Event>> {
            Ok(Half { arrived: compute.event()?, summed: compute.event()?, table: table()? })
        };
        let halves = [half()?, half()?];
        Ok(Sums { queue: compute.sibling(Urgency::Normal)?, halves, pending: false })
    }

    /// The queue that sums.
    pub fn queue(&mut self) -> &mut Q {
        &mut self.queue
    }

    /// Sums what `addresses` point to, as soon as all that `lane` has been given is done; `lane` goes on beside it.
    ///
    /// # Safety
    /// As [`sum_any`].
    pub unsafe fn sum(
        &mut self,
        half: usize,
        lane: &mut Q,
        call: &Call,
        addresses: &[u64],
        elements: usize,
        out: *mut u8,
    ) -> Result<()> {
        let Half { arrived, summed, table } = &mut self.halves[half];
        lane.record(arrived)?;
        self.queue.after(arrived)?;
        // SAFETY: by the caller.
        unsafe { sum_any(&mut self.queue, call, addresses, table, elements, out)? };
        self.pending = true;
        self.queue.record(summed)
    }

    /// What `lane` is given next comes after the last sum of this half of scratch memory.
    pub fn await_half(&self, half: usize, lane: &mut Q) -> Result<()> {
        lane.after(&self.halves[half].summed)
    }

    /// What `lane` is given next comes after all sums, if there are any since it did last.
    pub fn await_all(&mut self, lane: &mut Q) -> Result<()> {
        match std::mem::take(&mut self.pending) {
            true => self.halves.iter().try_for_each(|half| lane.after(&half.summed)),
            false => Ok(()),
        }
    }
}

/// Sums what `addresses` point to.
///
/// # Safety
/// As many elements of the call's type lie at each address and fit at `out`, all on the queue's device, and stay until
/// the queue is done.
unsafe fn sum_any<Q: Queue>(
    queue: &mut Q,
    call: &Call,
    addresses: &[u64],
    table: &mut Buffer<u64>,
    elements: usize,
    out: *mut u8,
) -> Result<()> {
    macro_rules! sum {
        ($t:ty) => {
            match call.wide {
                true => sum::<$t, <$t as Element>::Acc, Q>(queue, call, addresses, table, elements, out),
                false => sum::<$t, $t, Q>(queue, call, addresses, table, elements, out),
            }
        };
    }
    // SAFETY: by the caller, for the type that the call names.
    unsafe {
        match call.dtype {
            DType::F32 => sum!(f32),
            DType::F64 => sum!(f64),
            DType::F16 => sum!(f16),
            DType::Bf16 => sum!(bf16),
            DType::I32 => sum!(i32),
            DType::I64 => sum!(i64),
            DType::U32 => sum!(u32),
            DType::U64 => sum!(u64),
            DType::I8 => sum!(i8),
            DType::U8 => sum!(u8),
        }
    }
}

/// # Safety
/// As [`sum_any`].
unsafe fn sum<T: Element, O: Element, Q: Queue>(
    queue: &mut Q,
    call: &Call,
    addresses: &[u64],
    table: &mut Buffer<u64>,
    elements: usize,
    out: *mut u8,
) -> Result<()> {
    let place = queue.place();
    // The queue writes them after the last kernel has read its own.
    // SAFETY: the table is as long as the group is large, and stays as long as the queue.
    unsafe { queue.upload(bytes_of(addresses), table.view_mut().as_mut_ptr() as u64)? };
    let table: View<'_, u64> = table.view().slice(0..addresses.len());
    let vectors = addresses.iter().all(|address| address % 16 == 0);
    // SAFETY: by the caller; the kernel finds the addresses where the queue has written them.
    unsafe {
        let out = ViewMut::<O>::from_raw(out.cast(), elements, place);
        queue.launch(&reduce_addresses::<T, O>(call.op, table, vectors, out))
    }
}
