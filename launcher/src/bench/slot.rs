//! The buffers of a call, which change hands while it is under way.

use super::calls::{Placement, Queue, Work};
use super::exact::{Exact, Expectation};
use crate::failure::Result;
use collectives::{Buffer, Communicator, Element, Pending};

/// The buffers of one call. `send` is unused in place; `receive` then is the one buffer.
pub struct Slot<T: Element> {
    pub send: Option<Buffer<T>>,
    pub receive: Option<Buffer<T>>,
}

/// Elements of the two buffers of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lengths {
    pub send: usize,
    pub receive: usize,
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

impl<T: Exact> Slot<T> {
    /// Buffers for calls of up to `counts`; `registered` takes them from the transport.
    ///
    /// # Errors
    /// The transport, or the system, has no more memory.
    pub fn new(comm: &Communicator, send: usize, receive: usize, registered: bool) -> Result<Self> {
        let new = |len: usize| -> Result<Buffer<T>> {
            Ok(if registered { comm.alloc(len)? } else { Buffer::try_zeroed(len)? })
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
                    queue.fill(buffer, &content)?;
                }
            }
        }
        Ok(())
    }

    /// Wrong elements of this rank's result.
    ///
    /// # Errors
    /// The device's.
    pub fn wrong(
        &self,
        work: &Work,
        comm: &Communicator,
        queue: Queue<'_>,
        from: &Expectation<T>,
    ) -> Result<u64> {
        let Some(buffer) = &self.receive else { return Ok(0) };
        let (rank, ranks) = (comm.rank(), comm.size());
        Ok(match queue {
            None => from.wrong(work.output(buffer.host(), rank, ranks)),
            Some(queue) => {
                let mut content = vec![T::default(); buffer.len()];
                queue.fetch(buffer, &mut content)?;
                from.wrong(work.output(&content, rank, ranks))
            }
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

    /// A call that has the one buffer of a call in place; the other stays here.
    pub fn beside(&mut self, send: Buffer<T>, call: Pending<Buffer<T>>) -> InFlight<T> {
        self.send = Some(send);
        InFlight::One(call)
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
