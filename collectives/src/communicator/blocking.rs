//! Calls that return when they are over, or, on a device, when whatever its compute queue is given later comes after them.
//! They borrow slices, views or buffers.

use super::Communicator;
use super::check::{Arm, Checked};
use crate::buffer::{View, ViewMut};
use crate::element::{Element, ReduceOp};
use crate::error::Result;
use crate::schedule::Kind;

/// With n ranks; lengths in elements. Every method fails on lengths, roots or places that do not fit, when ranks
/// diverge, and when a peer is gone or silent past the deadline.
impl Communicator {
    /// What was checked is read where it was written: to copy it would wait for that to reach the cache.
    fn run(&self, checked: Result<Checked>, tag: Option<u32>) -> Result<()> {
        let Checked { call, ends, on_device } = match checked {
            Ok(ref checked) => checked,
            Err(error) => return Err(error),
        };
        let tag = tag.map(u64::from);
        if let Some(carrier) = &self.carrier {
            // SAFETY: as below; places were checked too, and whatever frees or uses a device's buffers is ordered after
            // its compute queue, which now comes after the call.
            let id = unsafe {
                match *on_device {
                    true => Some(carrier.start(*call, *ends, tag, self.priority)?),
                    false => carrier.start_of_host(*call, *ends, tag, self.priority)?,
                }
            };
            if let Some(id) = id {
                return carrier.wait(id);
            }
        }
        // SAFETY: the lengths were checked; the callers of this borrow the buffers until it returns.
        unsafe { self.handle.shared.call(call, ends, tag, self.priority) }
    }

    /// Shard r of the reduction of all ranks' `send` (n shards) ends in `recv` (one shard) of rank r.
    pub fn reduce_scatter<'s, 'r, T: Element>(
        &self,
        send: impl Into<View<'s, T>>,
        recv: impl Into<ViewMut<'r, T>>,
        op: ReduceOp,
    ) -> Result<()> {
        let (send, mut recv) = (send.into(), recv.into());
        self.run(self.check_reduce_scatter(Arm::input(send), Arm::output(&mut recv), op, false), None)
    }

    /// The same, but the shard is delivered in the accumulator's type without the final rounding: 16-bit
    /// elements travel, `f32` comes out.
    pub fn reduce_scatter_acc<'s, 'r, T: Element>(
        &self,
        send: impl Into<View<'s, T>>,
        recv: impl Into<ViewMut<'r, T::Acc>>,
        op: ReduceOp,
    ) -> Result<()> {
        let (send, mut recv) = (send.into(), recv.into());
        self.run(self.check_reduce_scatter(Arm::input(send), Arm::output(&mut recv), op, true), None)
    }

    /// The same in one buffer of n shards: rank r's shard of it becomes the result, the others stay as they are.
    pub fn reduce_scatter_in_place<'d, T: Element>(
        &self,
        data: impl Into<ViewMut<'d, T>>,
        op: ReduceOp,
    ) -> Result<()> {
        self.run(self.check_reduce_scatter_in_place(Arm::output(&mut data.into()), op), None)
    }

    /// Every rank's `send` (one shard) ends in `recv` (n shards, in rank order) of every rank.
    pub fn all_gather<'s, 'r, T: Element>(
        &self,
        send: impl Into<View<'s, T>>,
        recv: impl Into<ViewMut<'r, T>>,
    ) -> Result<()> {
        let (send, mut recv) = (send.into(), recv.into());
        self.run(self.check_all_gather(Arm::input(send), Arm::output(&mut recv)), None)
    }

    /// The same in one buffer of n shards, of which rank r brings the r-th.
    pub fn all_gather_in_place<'d, T: Element>(&self, data: impl Into<ViewMut<'d, T>>) -> Result<()> {
        self.run(self.check_all_gather_in_place(Arm::output(&mut data.into())), None)
    }

    /// The reduction of all ranks' `send` ends in `recv` of every rank; both are equally long.
    pub fn all_reduce<'s, 'r, T: Element>(
        &self,
        send: impl Into<View<'s, T>>,
        recv: impl Into<ViewMut<'r, T>>,
        op: ReduceOp,
    ) -> Result<()> {
        let (send, mut recv) = (send.into(), recv.into());
        self.run(self.check_all_reduce(Arm::input(send), Arm::output(&mut recv), op), None)
    }

    /// The same in one buffer.
    ///
    /// Two ranks that read each other's memory copy up to 256 KiB for that, to memory that [`reserve`](Self::reserve) takes
    /// beforehand.
    pub fn all_reduce_in_place<'d, T: Element>(
        &self,
        data: impl Into<ViewMut<'d, T>>,
        op: ReduceOp,
    ) -> Result<()> {
        self.run(self.check_all_reduce_in_place(Arm::output(&mut data.into()), op), None)
    }

    /// The root's `data` replaces that of every rank.
    pub fn broadcast<'d, T: Element>(&self, data: impl Into<ViewMut<'d, T>>, root: usize) -> Result<()> {
        self.run(self.check_broadcast(Arm::output(&mut data.into()), root), None)
    }

    /// The reduction of all ranks' `send` ends in `recv` of the root; other ranks' `recv` is not looked at.
    pub fn reduce<'s, T: Element>(
        &self,
        send: impl Into<View<'s, T>>,
        recv: Option<ViewMut<'_, T>>,
        op: ReduceOp,
        root: usize,
    ) -> Result<()> {
        let recv = recv.map(|mut recv| Arm::output(&mut recv));
        self.run(self.check_reduce(Arm::input(send.into()), recv, op, root), None)
    }

    /// The same in one buffer, which becomes the result on the root and stays as it is elsewhere.
    pub fn reduce_in_place<'d, T: Element>(
        &self,
        data: impl Into<ViewMut<'d, T>>,
        op: ReduceOp,
        root: usize,
    ) -> Result<()> {
        self.run(self.check_reduce_in_place(Arm::output(&mut data.into()), op, root), None)
    }

    /// Every rank's `send` (one block) ends in `recv` (n blocks, in rank order) of the root; other ranks' `recv`
    /// is not looked at.
    pub fn gather<'s, T: Element>(
        &self,
        send: impl Into<View<'s, T>>,
        recv: Option<ViewMut<'_, T>>,
        root: usize,
    ) -> Result<()> {
        let recv = recv.map(|mut recv| Arm::output(&mut recv));
        self.run(self.check_gather(Arm::input(send.into()), recv, root), None)
    }

    /// The same in one buffer: on the root n blocks, of which it brings its own; elsewhere the one block to send.
    pub fn gather_in_place<'d, T: Element>(
        &self,
        data: impl Into<ViewMut<'d, T>>,
        root: usize,
    ) -> Result<()> {
        self.run(self.check_gather_in_place(Arm::output(&mut data.into()), root), None)
    }

    /// Block r of the root's `send` (n blocks) ends in `recv` (one block) of rank r; other ranks' `send` is not
    /// looked at.
    pub fn scatter<'r, T: Element>(
        &self,
        send: Option<View<'_, T>>,
        recv: impl Into<ViewMut<'r, T>>,
        root: usize,
    ) -> Result<()> {
        let send = send.map(Arm::input);
        self.run(self.check_scatter(send, Arm::output(&mut recv.into()), root), None)
    }

    /// The same in one buffer: on the root n blocks, of which it keeps its own; elsewhere the one block to fill.
    pub fn scatter_in_place<'d, T: Element>(
        &self,
        data: impl Into<ViewMut<'d, T>>,
        root: usize,
    ) -> Result<()> {
        self.run(self.check_scatter_in_place(Arm::output(&mut data.into()), root), None)
    }

    /// Block r of every rank's `send` (n blocks) ends in `recv` (n blocks, in rank order) of rank r.
    pub fn all_to_all<'s, 'r, T: Element>(
        &self,
        send: impl Into<View<'s, T>>,
        recv: impl Into<ViewMut<'r, T>>,
    ) -> Result<()> {
        let (send, mut recv) = (send.into(), recv.into());
        self.run(self.check_all_to_all(Arm::input(send), Arm::output(&mut recv)), None)
    }

    /// The same in one buffer of n blocks.
    pub fn all_to_all_in_place<'d, T: Element>(&self, data: impl Into<ViewMut<'d, T>>) -> Result<()> {
        self.run(self.check_all_to_all_in_place(Arm::output(&mut data.into())), None)
    }

    /// Sends a message to rank `to`, which receives it under the same tag; messages of one tag between two ranks
    /// arrive in order. Returns when `data` is free again, which may be before it has arrived. MPI libraries take tags up to
    /// some number, all those below 2^17.
    pub fn send<'s, T: Element>(&self, data: impl Into<View<'s, T>>, to: usize, tag: u32) -> Result<()> {
        self.run(self.check_message(Kind::Send, Arm::input(data.into()), to, tag), Some(tag))
    }

    /// Receives a message of exactly this length and type from rank `from`.
    pub fn recv<'r, T: Element>(&self, data: impl Into<ViewMut<'r, T>>, from: usize, tag: u32) -> Result<()> {
        self.run(self.check_message(Kind::Recv, Arm::output(&mut data.into()), from, tag), Some(tag))
    }

    /// Returns when every rank has called it.
    pub fn barrier(&self) -> Result<()> {
        self.run(self.check_barrier(), None)
    }
}
