//! Messages from device to device: those by which ranks meet, and those of users, which go together.

use super::{Lane, Message, State, Wire, Wired};
use crate::device::Streams;
use crate::element::DType;
use crate::error::Result;
use crate::schedule::{Call, Kind};
use std::time::Duration;

/// Between two looks whether devices have met.
const MEETING: Duration = Duration::from_micros(50);

impl<Q: Streams, W: Wire<Q>> Wired<Q, W> {
    /// A byte to and from every other rank over each lane. NCCL connects two ranks once both have come to their first
    /// message, while it holds their programs up; later they may come to it in different orders, and wait for each other.
    /// Devices that cannot reach each other show here first, so these are calls like others, which the watch ends.
    pub(super) fn meet(&self) -> Result<()> {
        let (rank, size) = (self.host.rank(), self.host.size());
        let state = &mut *self.lock();
        self.alive(state, |this, State { lanes, slots, scratch, messages, .. }| {
            let at = scratch.view_mut().as_mut_ptr();
            let mut ids = [0; Lane::ALL.len()];
            for (lane, id) in Lane::ALL.into_iter().zip(&mut ids) {
                *id = slots.take::<Q>(&this.compute, Call::new(Kind::AllToAll, DType::U8, 1), lane)?;
                let (slot, queue) = (slots.slot(*id), &mut lanes[lane as usize]);
                this.compute.record(&slot.given)?;
                queue.after(&slot.given)?;
                messages.clear();
                for peer in (0..size).filter(|&peer| peer != rank) {
                    let byte = |place| at.wrapping_add(lane as usize * size + place);
                    let message = |outgoing, place| Message { peer, outgoing, at: byte(place), bytes: 1 };
                    messages.extend([message(true, rank), message(false, peer)]);
                }
                // SAFETY: bytes of the scratch memory, each of another lane and rank; they are there before anything else is.
                slot.giving(|| unsafe { this.wire.exchange(lane, queue, messages) })?;
                queue.record(&slot.done)?;
            }
            for id in ids {
                while !Q::happened(&slots.slot(id).done)? {
                    if let Some(failed) = this.watch.failed() {
                        return Err(failed);
                    }
                    std::thread::sleep(MEETING);
                }
                slots.release(id);
            }
            Ok(())
        })
    }

    /// Gives the wire the messages that wait for it, all at once.
    pub(super) fn flush(&self, state: &mut State<Q>) -> Result<()> {
        if state.deferred.is_empty() {
            return Ok(());
        }
        let State { lanes, slots, messages, deferred, .. } = state;
        let queue = &mut lanes[Lane::Gathers as usize];
        messages.clear();
        for (id, message) in deferred.iter() {
            queue.after(&slots.slot(*id).given)?;
            messages.push(*message);
        }
        // They go together, so that the first stands for all.
        let first = slots.slot(deferred[0].0);
        // SAFETY: by whoever started them; received ranges are those of calls in flight, which share none.
        first.giving(|| unsafe { self.wire.exchange(Lane::Gathers, queue, messages) })?;
        for (id, _) in deferred.drain(..) {
            queue.record(&slots.slot(id).done)?;
        }
        Ok(())
    }
}
