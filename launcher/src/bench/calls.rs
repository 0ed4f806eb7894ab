//! The calls that are measured: one slot of buffers per call in flight, and each operation in each form.

use super::args::Calls;
use super::device;
use super::exact::{Exact, Expectation, next, previous};
use super::native::{self, Native};
use super::operation::{Counts, Operation};
use crate::failure::Result;
use crate::gpus::RankGpu;
use collectives::device::SharedQueue;
use collectives::device::cuda::Stream;
use collectives::schedule::Call;
use collectives::{Buffer, Communicator, Element, Order, Pending, ReduceOp, View, ViewMut};

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
    /// Messages go from even ranks to odd ones only.
    pub one_way: bool,
    pub placement: Placement,
    /// The library's own collectives make it.
    pub native: bool,
    pub op: ReduceOp,
    pub root: usize,
    pub counts: Counts,
}

/// The buffers of one call. `send` is unused in place; `receive` then is the one buffer.
pub struct Slot<T: Element> {
    pub(super) send: Option<Buffer<T>>,
    pub(super) receive: Option<Buffer<T>>,
}

/// Elements of the two buffers of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Lengths {
    send: usize,
    receive: usize,
}

/// Bytes of the buffers of all of `ranks` ranks for calls like these on elements of so many bytes.
pub fn footprint(calls: &[Work], element: usize, ranks: usize) -> u64 {
    let of = |rank| {
        let (send, receive) = Slot::<u8>::capacity(calls.iter().copied(), rank);
        (send as u64).saturating_add(receive as u64).saturating_mul(element as u64)
    };
    (0..ranks).map(of).fold(0, u64::saturating_add)
}

/// A started call.
pub enum InFlight<T: Element> {
    Two(Pending<(Buffer<T>, Buffer<T>)>),
    ToRoot(Pending<(Buffer<T>, Option<Buffer<T>>)>),
    FromRoot(Pending<(Option<Buffer<T>>, Buffer<T>)>),
    One(Pending<Buffer<T>>),
    Message { send: Option<Pending<Buffer<T>>>, receive: Option<Pending<Buffer<T>>> },
    Nothing(Pending<()>),
}

impl Work {
    /// A call of this size over `ranks`: sums, rank 0 as the root, and the operation's first placement.
    pub fn new(operation: Operation, calls: Calls, bytes: usize, element: usize, ranks: usize) -> Self {
        let counts = operation.counts(bytes, element, ranks);
        let [placement, _] = operation.placements(calls, false);
        let (one_way, native) = (false, false);
        Work { operation, calls, one_way, placement, native, op: ReduceOp::Sum, root: 0, counts }
    }

    /// What this rank's buffers hold. A rank that is not the root has no use for the long side of a gather or
    /// scatter.
    fn lengths(&self, rank: usize) -> Lengths {
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

    /// Whether this rank gets a message of send_recv.
    fn receives(&self, rank: usize) -> bool {
        !self.one_way || rank % 2 == 1
    }

    /// Whether this rank sends a message of send_recv.
    fn sends(&self, rank: usize, ranks: usize) -> bool {
        !self.one_way || rank.is_multiple_of(2) && rank + 1 < ranks
    }

    /// Whether this rank has no part in any message of send_recv.
    pub fn idle(&self, rank: usize, ranks: usize) -> bool {
        self.operation == Operation::SendRecv && !self.receives(rank) && !self.sends(rank, ranks)
    }

    /// What the tuner is asked about.
    pub fn call<T: Element>(&self, comm: &Communicator) -> Call {
        let root = match self.operation {
            Operation::SendRecv => next(comm.rank(), comm.size()),
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
        if self.calls == Calls::Started || self.operation == Operation::SendRecv {
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
            (Operation::SendRecv | Operation::Barrier, _) => comm.barrier(),
        }?;
        Ok(())
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
        // In place the other buffer stays in its slot.
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
                let receive = match self.receives(rank) {
                    true => Some(comm.start_recv(receive, previous(rank, ranks), 0)?),
                    false => {
                        slot.receive = Some(receive);
                        None
                    }
                };
                let send = match self.sends(rank, ranks) {
                    true => Some(comm.start_send(send, next(rank, ranks), 0)?),
                    false => {
                        slot.send = Some(send);
                        None
                    }
                };
                InFlight::Message { send, receive }
            }
            (operation, _) => {
                slot.send = Some(send);
                match operation {
                    Operation::AllReduce => InFlight::One(comm.start_all_reduce_in_place(receive, op)?),
                    Operation::ReduceScatter => {
                        InFlight::One(comm.start_reduce_scatter_in_place(receive, op)?)
                    }
                    Operation::AllGather => InFlight::One(comm.start_all_gather_in_place(receive)?),
                    Operation::Broadcast => InFlight::One(comm.start_broadcast(receive, root)?),
                    Operation::Reduce => InFlight::One(comm.start_reduce_in_place(receive, op, root)?),
                    Operation::Gather => InFlight::One(comm.start_gather_in_place(receive, root)?),
                    Operation::Scatter => InFlight::One(comm.start_scatter_in_place(receive, root)?),
                    Operation::AllToAll => InFlight::One(comm.start_all_to_all_in_place(receive)?),
                    Operation::SendRecv | Operation::Barrier => {
                        slot.receive = Some(receive);
                        InFlight::Nothing(comm.start_barrier()?)
                    }
                }
            }
        };
        Ok(flight)
    }

    /// Where this rank puts its input, in the buffer that holds it.
    fn input<'a, T: Exact>(&self, whole: &'a mut [T], rank: usize) -> &'a mut [T] {
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
    fn output<'a, T: Exact>(&self, whole: &'a [T], rank: usize) -> &'a [T] {
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
            (Operation::SendRecv, _) if !self.receives(rank) => &[],
            _ => whole,
        }
    }
}

impl<T: Exact> Slot<T> {
    /// Buffers for calls of up to `counts`; `registered` takes them from the transport.
    ///
    /// # Errors
    /// The transport has no more memory.
    pub fn new(comm: &Communicator, send: usize, receive: usize, registered: bool) -> Result<Self> {
        let new = |len: usize| -> Result<Buffer<T>> {
            Ok(if registered { comm.alloc(len)? } else { Buffer::zeroed(len) })
        };
        Ok(Slot { send: Some(new(send)?), receive: Some(new(receive)?) })
    }

    /// The longest `send` and `receive` of this rank over several calls.
    pub fn capacity(calls: impl Iterator<Item = Work>, rank: usize) -> (usize, usize) {
        calls.fold((0, 0), |most, work| {
            let lengths = work.lengths(rank);
            (most.0.max(lengths.send), most.1.max(lengths.receive))
        })
    }

    /// Sets the buffers' lengths for a call.
    pub fn fit(&mut self, work: &Work, rank: usize) {
        let lengths = work.lengths(rank);
        self.send = self.send.take().map(|b| b.with_len(lengths.send));
        self.receive = self.receive.take().map(|b| b.with_len(lengths.receive));
    }

    /// Puts this rank's contribution where the call takes it, and something else everywhere else.
    ///
    /// # Errors
    /// The device's.
    pub fn fill(&mut self, work: &Work, rank: usize, queue: Queue<'_>, from: &Expectation<T>) -> Result<()> {
        let placements = [Placement::Out, Placement::In];
        for (buffer, holds) in [&mut self.send, &mut self.receive].into_iter().zip(placements) {
            let Some(buffer) = buffer else { continue };
            let fill = |content: &mut [T]| {
                content.fill(T::from_bits(0x5a5a_5a5a_5a5a_5a5a));
                if work.placement == holds {
                    from.fill(work.input(content, rank));
                }
            };
            match queue {
                None => fill(buffer.host_mut()),
                Some(queue) => {
                    let mut content = vec![T::default(); buffer.len()];
                    fill(&mut content);
                    device::upload(queue, &content, buffer)?;
                }
            }
        }
        Ok(())
    }

    /// Wrong elements of this rank's result.
    ///
    /// # Errors
    /// The device's.
    pub fn wrong(&self, work: &Work, rank: usize, queue: Queue<'_>, from: &Expectation<T>) -> Result<u64> {
        let Some(buffer) = &self.receive else { return Ok(0) };
        Ok(match queue {
            None => from.wrong(work.output(buffer.host(), rank)),
            Some(queue) => from.wrong(work.output(&device::download(queue, buffer)?, rank)),
        })
    }

    /// Writes this rank's contribution anew, as whoever computes one for each call does: no other processor's cache has it then.
    pub fn renew(&mut self, work: &Work, rank: usize) {
        let buffer = if work.placement == Placement::Out { &mut self.send } else { &mut self.receive };
        if let Some(buffer) = buffer {
            work.input(buffer.host_mut(), rank).fill(T::from_number(1.0));
        }
    }

    /// Writes to all memory, so that its pages are there.
    pub fn touch(&mut self) {
        for buffer in [&mut self.send, &mut self.receive].into_iter().flatten() {
            buffer.host_mut().fill(T::from_number(1.0));
        }
    }

    /// Waits for a started call and takes its buffers back.
    ///
    /// # Errors
    /// The call's.
    pub fn finish(&mut self, flight: InFlight<T>) -> Result<()> {
        match flight {
            InFlight::Two(pending) => {
                let (send, receive) = pending.wait()?;
                (self.send, self.receive) = (Some(send), Some(receive));
            }
            InFlight::ToRoot(pending) => {
                let (send, receive) = pending.wait()?;
                self.send = Some(send);
                self.receive = receive.or(self.receive.take());
            }
            InFlight::FromRoot(pending) => {
                let (send, receive) = pending.wait()?;
                self.receive = Some(receive);
                self.send = send.or(self.send.take());
            }
            InFlight::One(pending) => self.receive = Some(pending.wait()?),
            InFlight::Message { send, receive } => {
                if let Some(receive) = receive {
                    self.receive = Some(receive.wait()?);
                }
                if let Some(send) = send {
                    self.send = Some(send.wait()?);
                }
            }
            InFlight::Nothing(pending) => pending.wait()?,
        }
        Ok(())
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
        assert_eq!(ours.output(&whole, 2), [8.0, 9.0, 10.0, 11.0]);
        assert_eq!(Work { native: true, ..ours }.output(&whole, 2), [0.0, 1.0, 2.0, 3.0]);
    }
}
