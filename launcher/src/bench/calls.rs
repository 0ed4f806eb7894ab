//! The calls that are measured: each operation in each form.

use super::args::Calls;
use super::exact::Exact;
use super::messages::{self, Messages};
use super::native::{self, Native};
use super::operation::{Counts, Operation};
use super::slot::{InFlight, Lengths, Slot};
use crate::failure::Result;
use crate::gpus::RankGpu;
use collectives::device::SharedQueue;
use collectives::device::cuda::Stream;
use collectives::schedule::Call;
use collectives::{Communicator, Element, Order, ReduceOp, View, ViewMut};

/// Where the result of a call goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Into its own buffer.
    Out,
    /// Into the buffer of the input.
    In,
}

/// The ranks, and how they call each other.
pub struct Party {
    pub comm: Communicator,
    /// The transport's own collectives, when those are measured.
    pub native: Option<Native>,
    /// Where buffers are, when not on the host.
    pub device: Option<Gpus>,
}

/// The queue of the device on which buffers are, if they are on one.
pub type Queue<'a> = Option<&'a SharedQueue<Stream>>;

/// A rank's GPU, and who adds up.
pub struct Gpus {
    pub device: RankGpu,
    pub order: Order,
}

impl Party {
    /// The name of what moves the bytes that are measured.
    pub fn transport(&self) -> &str {
        let carrier = self.device.as_ref().and(self.comm.carrier());
        carrier.map_or(self.comm.transport_name(), |carrier| carrier.name())
    }

    /// Whether sums are made in an order, and by rules, that are not ours.
    pub fn foreign(&self) -> bool {
        self.native.is_some() || self.device.as_ref().is_some_and(|gpus| gpus.order == Order::Native)
    }

    /// The compute queue of the GPU, if there is one.
    pub fn queue(&self) -> Queue<'_> {
        self.device.as_ref().map(|gpus| &gpus.device.queue)
    }
}

impl Operation {
    /// The placements that the two halves of a row measure. They are the same where an operation has one form.
    pub fn placements(self, calls: Calls, native: bool) -> [Placement; 2] {
        use Placement::{In, Out};
        match (self, calls) {
            (Operation::Broadcast, _) => [In, In],
            (Operation::SendRecv | Operation::Barrier, _) => [Out, Out],
            (Operation::Gather | Operation::Scatter, _) | (_, Calls::Started) if native => [Out, Out],
            _ => [Out, In],
        }
    }
}

/// One operation on elements of one type, with what all its calls have in common.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    pub operation: Operation,
    pub calls: Calls,
    pub messages: Messages,
    pub placement: Placement,
    /// The library's own collectives make it.
    pub native: bool,
    pub op: ReduceOp,
    pub root: usize,
    pub counts: Counts,
}

/// Bytes of the buffers of all of `ranks` ranks for calls like these on elements of so many bytes.
pub fn footprint(calls: &[Work], element: usize, ranks: usize) -> u64 {
    let of = |rank| {
        let (send, receive) = Slot::<u8>::capacity(calls.iter().copied(), rank);
        (send as u64).saturating_add(receive as u64).saturating_mul(element as u64)
    };
    (0..ranks).map(of).fold(0, u64::saturating_add)
}

impl Work {
    /// A call of this size over `ranks`: sums, rank 0 as the root, and the operation's first placement.
    pub fn new(operation: Operation, calls: Calls, bytes: usize, element: usize, ranks: usize) -> Self {
        let counts = operation.counts(bytes, element, ranks);
        let [placement, _] = operation.placements(calls, false);
        let (messages, native) = (Messages::Ring, false);
        Work { operation, calls, messages, placement, native, op: ReduceOp::Sum, root: 0, counts }
    }

    /// What this rank's buffers hold. A rank that is not the root has no use for the long side of a gather or
    /// scatter.
    pub fn lengths(&self, rank: usize) -> Lengths {
        let Counts { send, receive, .. } = self.counts;
        let at_root = rank == self.root;
        match (self.operation, self.placement) {
            (Operation::Gather, Placement::In) => {
                Lengths { send: 0, receive: if at_root { receive } else { send } }
            }
            (Operation::Scatter, Placement::In) => {
                Lengths { send: 0, receive: if at_root { send } else { receive } }
            }
            (Operation::Gather, _) if !at_root => Lengths { send, receive: 0 },
            (Operation::Scatter, _) if !at_root => Lengths { send: 0, receive },
            (_, Placement::In) => Lengths { send: 0, receive: send.max(receive) },
            (_, Placement::Out) => Lengths { send, receive },
        }
    }

    /// Whether what this rank takes is the call's time.
    pub fn is_timed(&self, rank: usize, ranks: usize) -> bool {
        self.operation != Operation::SendRecv || self.messages.is_timed(rank, ranks)
    }

    /// Whose data a rank gets: the root's, or of a message its sender's.
    pub fn giver(&self, rank: usize, ranks: usize) -> usize {
        match self.operation {
            Operation::SendRecv => self.messages.from(rank, ranks).unwrap_or(rank),
            _ => self.root,
        }
    }

    /// What the tuner is asked about.
    pub fn call<T: Element>(&self, comm: &Communicator) -> Call {
        let root = match self.operation {
            Operation::SendRecv => messages::next(comm.rank(), comm.size()),
            o if o.rooted() => self.root,
            _ => 0,
        };
        let in_place = self.placement == Placement::In;
        Call { op: self.op, root, in_place, ..Call::new(self.operation.kind(), T::DTYPE, self.counts.count) }
    }

    /// Makes one call and waits for it.
    ///
    /// # Errors
    /// The call's.
    pub fn once<T: Exact>(&self, party: &Party, slot: &mut Slot<T>) -> Result<()> {
        let comm = &party.comm;
        if let Some(native) = &party.native {
            return native::several(native, self, self.call::<T>(comm), std::slice::from_mut(slot));
        }
        let both_ways = self.operation == Operation::SendRecv && self.messages != Messages::PingPong;
        if self.calls == Calls::Started || both_ways {
            let flight = self.start(comm, slot)?;
            return slot.finish(flight);
        }
        let Work { op, root, .. } = *self;
        let at_root = comm.rank() == root;
        let Slot { send: Some(send), receive: Some(receive) } = slot else { return Ok(()) };
        let (send, receive): (View<'_, T>, ViewMut<'_, T>) = (send.view(), receive.view_mut());
        match (self.operation, self.placement) {
            (Operation::AllReduce, Placement::Out) => comm.all_reduce(send, receive, op),
            (Operation::AllReduce, Placement::In) => comm.all_reduce_in_place(receive, op),
            (Operation::ReduceScatter, Placement::Out) => comm.reduce_scatter(send, receive, op),
            (Operation::ReduceScatter, Placement::In) => comm.reduce_scatter_in_place(receive, op),
            (Operation::AllGather, Placement::Out) => comm.all_gather(send, receive),
            (Operation::AllGather, Placement::In) => comm.all_gather_in_place(receive),
            (Operation::Broadcast, _) => comm.broadcast(receive, root),
            (Operation::Reduce, Placement::Out) => comm.reduce(send, at_root.then_some(receive), op, root),
            (Operation::Reduce, Placement::In) => comm.reduce_in_place(receive, op, root),
            (Operation::Gather, Placement::Out) => comm.gather(send, at_root.then_some(receive), root),
            (Operation::Gather, Placement::In) => comm.gather_in_place(receive, root),
            (Operation::Scatter, Placement::Out) => comm.scatter(at_root.then_some(send), receive, root),
            (Operation::Scatter, Placement::In) => comm.scatter_in_place(receive, root),
            (Operation::AllToAll, Placement::Out) => comm.all_to_all(send, receive),
            (Operation::AllToAll, Placement::In) => comm.all_to_all_in_place(receive),
            (Operation::SendRecv, _) => self.there_and_back(comm, send, receive),
            (Operation::Barrier, _) => comm.barrier(),
        }?;
        Ok(())
    }

    /// A message to the other rank of the pair, and one back.
    fn there_and_back<T: Exact>(
        &self,
        comm: &Communicator,
        send: View<'_, T>,
        receive: ViewMut<'_, T>,
    ) -> collectives::Result<()> {
        let rank = comm.rank();
        let Some(other) = self.messages.to(rank, comm.size()) else { return Ok(()) };
        if messages::first(rank) {
            comm.send(send, other, 0)?;
            return comm.recv(receive, other, 0);
        }
        comm.recv(receive, other, 0)?;
        comm.send(send, other, 0)
    }

    /// Starts one call on each slot, then waits for all.
    ///
    /// # Errors
    /// The calls'.
    pub fn several<T: Exact>(&self, party: &Party, slots: &mut [Slot<T>]) -> Result<()> {
        let comm = &party.comm;
        if let Some(native) = &party.native {
            return native::several(native, self, self.call::<T>(comm), slots);
        }
        if let [slot] = slots {
            return self.once(party, slot);
        }
        let flights = slots.iter_mut().map(|slot| self.start(comm, slot)).collect::<Result<Vec<_>>>()?;
        flights.into_iter().zip(slots).try_for_each(|(flight, slot)| slot.finish(flight))
    }

    /// Starts one call, which takes the slot's buffers until [`Slot::finish`].
    ///
    /// # Errors
    /// The call's.
    pub fn start<T: Exact>(&self, comm: &Communicator, slot: &mut Slot<T>) -> Result<InFlight<T>> {
        let Work { op, root, .. } = *self;
        let (Some(send), Some(receive)) = (slot.send.take(), slot.receive.take()) else {
            return Ok(InFlight::Nothing(comm.start_barrier()?));
        };
        let at_root = comm.rank() == root;
        let flight = match (self.operation, self.placement) {
            (Operation::AllReduce, Placement::Out) => {
                InFlight::Two(comm.start_all_reduce(send, receive, op)?)
            }
            (Operation::ReduceScatter, Placement::Out) => {
                InFlight::Two(comm.start_reduce_scatter(send, receive, op)?)
            }
            (Operation::AllGather, Placement::Out) => InFlight::Two(comm.start_all_gather(send, receive)?),
            (Operation::AllToAll, Placement::Out) => InFlight::Two(comm.start_all_to_all(send, receive)?),
            // What only the root needs stays in the slot elsewhere.
            (Operation::Reduce | Operation::Gather, Placement::Out) => {
                let (receive, unused) = if at_root { (Some(receive), None) } else { (None, Some(receive)) };
                slot.receive = unused;
                InFlight::ToRoot(match self.operation {
                    Operation::Reduce => comm.start_reduce(send, receive, op, root)?,
                    _ => comm.start_gather(send, receive, root)?,
                })
            }
            (Operation::Scatter, Placement::Out) => {
                let (send, unused) = if at_root { (Some(send), None) } else { (None, Some(send)) };
                slot.send = unused;
                InFlight::FromRoot(comm.start_scatter(send, receive, root)?)
            }
            (Operation::SendRecv, _) => {
                let (rank, ranks) = (comm.rank(), comm.size());
                let receive = match self.messages.from(rank, ranks) {
                    Some(from) => Some(comm.start_recv(receive, from, 0)?),
                    None => {
                        slot.receive = Some(receive);
                        None
                    }
                };
                let send = match self.messages.to(rank, ranks) {
                    Some(to) => Some(comm.start_send(send, to, 0)?),
                    None => {
                        slot.send = Some(send);
                        None
                    }
                };
                InFlight::Message { send, receive }
            }
            (Operation::AllReduce, Placement::In) => {
                slot.beside(send, comm.start_all_reduce_in_place(receive, op)?)
            }
            (Operation::ReduceScatter, Placement::In) => {
                slot.beside(send, comm.start_reduce_scatter_in_place(receive, op)?)
            }
            (Operation::AllGather, Placement::In) => {
                slot.beside(send, comm.start_all_gather_in_place(receive)?)
            }
            (Operation::Broadcast, _) => slot.beside(send, comm.start_broadcast(receive, root)?),
            (Operation::Reduce, Placement::In) => {
                slot.beside(send, comm.start_reduce_in_place(receive, op, root)?)
            }
            (Operation::Gather, Placement::In) => {
                slot.beside(send, comm.start_gather_in_place(receive, root)?)
            }
            (Operation::Scatter, Placement::In) => {
                slot.beside(send, comm.start_scatter_in_place(receive, root)?)
            }
            (Operation::AllToAll, Placement::In) => {
                slot.beside(send, comm.start_all_to_all_in_place(receive)?)
            }
            (Operation::Barrier, _) => {
                (slot.send, slot.receive) = (Some(send), Some(receive));
                InFlight::Nothing(comm.start_barrier()?)
            }
        };
        Ok(flight)
    }

    /// Where this rank puts its input, in the buffer that holds it.
    pub fn input<'a, T: Exact>(&self, whole: &'a mut [T], rank: usize) -> &'a mut [T] {
        let counts = &self.counts;
        match (self.operation, self.placement) {
            // In place, a rank's part starts at its place.
            (Operation::AllGather, Placement::In) => &mut whole[rank * counts.send..(rank + 1) * counts.send],
            (Operation::Gather, Placement::In) if rank == self.root => {
                &mut whole[rank * counts.send..(rank + 1) * counts.send]
            }
            // Only the root has something to give.
            (Operation::Scatter | Operation::Broadcast, _) if rank != self.root => &mut [],
            _ => whole,
        }
    }

    /// Where in its receiving buffer this rank finds its result.
    pub fn output<'a, T: Exact>(&self, whole: &'a [T], rank: usize, ranks: usize) -> &'a [T] {
        let counts = &self.counts;
        match (self.operation, self.placement) {
            // MPI leaves it at the start.
            (Operation::ReduceScatter, Placement::In) if self.native => &whole[..counts.receive],
            (Operation::ReduceScatter, Placement::In) => {
                &whole[rank * counts.receive..(rank + 1) * counts.receive]
            }
            (Operation::Scatter, Placement::In) if rank == self.root => {
                &whole[rank * counts.receive..(rank + 1) * counts.receive]
            }
            (Operation::Gather, _) if rank != self.root => &[],
            (Operation::SendRecv, _) if self.messages.from(rank, ranks).is_none() => &[],
            _ => whole,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mpi_leaves_a_part_in_place_at_the_start_and_ours_at_its_place() {
        let ours = Work {
            placement: Placement::In,
            ..Work::new(Operation::ReduceScatter, Calls::Blocking, 48, 4, 3)
        };
        let whole: Vec<f32> = (0..12u8).map(f32::from).collect();
        assert_eq!(ours.output(&whole, 2, 3), [8.0, 9.0, 10.0, 11.0]);
        assert_eq!(Work { native: true, ..ours }.output(&whole, 2, 3), [0.0, 1.0, 2.0, 3.0]);
    }
}
