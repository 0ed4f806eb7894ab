//! Calls that return at once. They take their buffers and give them back through a [`Pending`].

use super::Communicator;
use super::End;
use super::check::{Arm, Checked};
use crate::buffer::Buffer;
use crate::element::{Element, ReduceOp};
use crate::error::Result;
use crate::pending::Pending;
use crate::schedule::Kind;
use std::sync::Arc;

/// A rank's own input, and the buffer for the result that only the root needs.
type ToRoot<T> = (Buffer<T>, Option<Buffer<T>>);
/// The input that only the root needs, and a rank's own result.
type FromRoot<T> = (Option<Buffer<T>>, Buffer<T>);
/// A buffer and one of its accumulator's type.
type Wide<T> = (Buffer<T>, Buffer<<T as Element>::Acc>);

/// With n ranks; lengths in elements; `with_priority` gives a handle whose calls are urgent. What can go wrong
/// with the arguments is returned at once, in which case the buffers are dropped; the rest by [`Pending::wait`].
impl Communicator {
    fn launch<B: Send + 'static>(
        &self,
        checked: Checked,
        tag: Option<u32>,
        buffers: B,
    ) -> Result<Pending<B>> {
        let Checked { call, ends, on_device } = checked;
        let tag = tag.map(u64::from);
        if let Some(carrier) = &self.carrier {
            // SAFETY: as below; places were checked too.
            let id = unsafe {
                match on_device {
                    true => Some(carrier.start(call, ends, tag, self.priority)?),
                    false => carrier.start_of_host(call, ends, tag, self.priority)?,
                }
            };
            if let Some(id) = id {
                return Ok(Pending::new(End::Carrier(Arc::clone(carrier)), id, buffers));
            }
        }
        let shared = &self.handle.shared;
        // SAFETY: the lengths were checked, and the pending call owns the buffers, whose memory does not move
        // with them.
        let id = unsafe { shared.start(&call, &ends, tag, self.priority) }?;
        Ok(Pending::new(End::Engine(Arc::clone(shared)), id, buffers))
    }

    /// Starts a [`reduce_scatter`](Self::reduce_scatter).
    pub fn start_reduce_scatter<T: Element>(
        &self,
        send: Buffer<T>,
        mut recv: Buffer<T>,
        op: ReduceOp,
    ) -> Result<Pending<(Buffer<T>, Buffer<T>)>> {
        let arms = (Arm::input(send.view()), Arm::output(&mut recv.view_mut()));
        self.launch(self.check_reduce_scatter(arms.0, arms.1, op, false)?, None, (send, recv))
    }

    /// Starts a [`reduce_scatter_acc`](Self::reduce_scatter_acc).
    pub fn start_reduce_scatter_acc<T: Element>(
        &self,
        send: Buffer<T>,
        mut recv: Buffer<T::Acc>,
        op: ReduceOp,
    ) -> Result<Pending<Wide<T>>> {
        let arms = (Arm::input(send.view()), Arm::output(&mut recv.view_mut()));
        self.launch(self.check_reduce_scatter(arms.0, arms.1, op, true)?, None, (send, recv))
    }

    /// Starts a [`reduce_scatter_in_place`](Self::reduce_scatter_in_place).
    pub fn start_reduce_scatter_in_place<T: Element>(
        &self,
        mut data: Buffer<T>,
        op: ReduceOp,
    ) -> Result<Pending<Buffer<T>>> {
        let arm = Arm::output(&mut data.view_mut());
        self.launch(self.check_reduce_scatter_in_place(arm, op)?, None, data)
    }

    /// Starts an [`all_gather`](Self::all_gather).
    pub fn start_all_gather<T: Element>(
        &self,
        send: Buffer<T>,
        mut recv: Buffer<T>,
    ) -> Result<Pending<(Buffer<T>, Buffer<T>)>> {
        let arms = (Arm::input(send.view()), Arm::output(&mut recv.view_mut()));
        self.launch(self.check_all_gather(arms.0, arms.1)?, None, (send, recv))
    }

    /// Starts an [`all_gather_in_place`](Self::all_gather_in_place).
    pub fn start_all_gather_in_place<T: Element>(&self, mut data: Buffer<T>) -> Result<Pending<Buffer<T>>> {
        let arm = Arm::output(&mut data.view_mut());
        self.launch(self.check_all_gather_in_place(arm)?, None, data)
    }

    /// Starts an [`all_reduce`](Self::all_reduce).
    pub fn start_all_reduce<T: Element>(
        &self,
        send: Buffer<T>,
        mut recv: Buffer<T>,
        op: ReduceOp,
    ) -> Result<Pending<(Buffer<T>, Buffer<T>)>> {
        let arms = (Arm::input(send.view()), Arm::output(&mut recv.view_mut()));
        self.launch(self.check_all_reduce(arms.0, arms.1, op)?, None, (send, recv))
    }

    /// Starts an [`all_reduce_in_place`](Self::all_reduce_in_place).
    pub fn start_all_reduce_in_place<T: Element>(
        &self,
        mut data: Buffer<T>,
        op: ReduceOp,
    ) -> Result<Pending<Buffer<T>>> {
        let arm = Arm::output(&mut data.view_mut());
        self.launch(self.check_all_reduce_in_place(arm, op)?, None, data)
    }

    /// Starts a [`broadcast`](Self::broadcast).
    pub fn start_broadcast<T: Element>(
        &self,
        mut data: Buffer<T>,
        root: usize,
    ) -> Result<Pending<Buffer<T>>> {
        let arm = Arm::output(&mut data.view_mut());
        self.launch(self.check_broadcast(arm, root)?, None, data)
    }

    /// Starts a [`reduce`](Self::reduce).
    pub fn start_reduce<T: Element>(
        &self,
        send: Buffer<T>,
        mut recv: Option<Buffer<T>>,
        op: ReduceOp,
        root: usize,
    ) -> Result<Pending<ToRoot<T>>> {
        let arms = (Arm::input(send.view()), recv.as_mut().map(|recv| Arm::output(&mut recv.view_mut())));
        self.launch(self.check_reduce(arms.0, arms.1, op, root)?, None, (send, recv))
    }

    /// Starts a [`reduce_in_place`](Self::reduce_in_place).
    pub fn start_reduce_in_place<T: Element>(
        &self,
        mut data: Buffer<T>,
        op: ReduceOp,
        root: usize,
    ) -> Result<Pending<Buffer<T>>> {
        let arm = Arm::output(&mut data.view_mut());
        self.launch(self.check_reduce_in_place(arm, op, root)?, None, data)
    }

    /// Starts a [`gather`](Self::gather).
    pub fn start_gather<T: Element>(
        &self,
        send: Buffer<T>,
        mut recv: Option<Buffer<T>>,
        root: usize,
    ) -> Result<Pending<ToRoot<T>>> {
        let arms = (Arm::input(send.view()), recv.as_mut().map(|recv| Arm::output(&mut recv.view_mut())));
        self.launch(self.check_gather(arms.0, arms.1, root)?, None, (send, recv))
    }

    /// Starts a [`gather_in_place`](Self::gather_in_place).
    pub fn start_gather_in_place<T: Element>(
        &self,
        mut data: Buffer<T>,
        root: usize,
    ) -> Result<Pending<Buffer<T>>> {
        let arm = Arm::output(&mut data.view_mut());
        self.launch(self.check_gather_in_place(arm, root)?, None, data)
    }

    /// Starts a [`scatter`](Self::scatter).
    pub fn start_scatter<T: Element>(
        &self,
        send: Option<Buffer<T>>,
        mut recv: Buffer<T>,
        root: usize,
    ) -> Result<Pending<FromRoot<T>>> {
        let arms = (send.as_ref().map(|send| Arm::input(send.view())), Arm::output(&mut recv.view_mut()));
        self.launch(self.check_scatter(arms.0, arms.1, root)?, None, (send, recv))
    }

    /// Starts a [`scatter_in_place`](Self::scatter_in_place).
    pub fn start_scatter_in_place<T: Element>(
        &self,
        mut data: Buffer<T>,
        root: usize,
    ) -> Result<Pending<Buffer<T>>> {
        let arm = Arm::output(&mut data.view_mut());
        self.launch(self.check_scatter_in_place(arm, root)?, None, data)
    }

    /// Starts an [`all_to_all`](Self::all_to_all).
    pub fn start_all_to_all<T: Element>(
        &self,
        send: Buffer<T>,
        mut recv: Buffer<T>,
    ) -> Result<Pending<(Buffer<T>, Buffer<T>)>> {
        let arms = (Arm::input(send.view()), Arm::output(&mut recv.view_mut()));
        self.launch(self.check_all_to_all(arms.0, arms.1)?, None, (send, recv))
    }

    /// Starts an [`all_to_all_in_place`](Self::all_to_all_in_place).
    pub fn start_all_to_all_in_place<T: Element>(&self, mut data: Buffer<T>) -> Result<Pending<Buffer<T>>> {
        let arm = Arm::output(&mut data.view_mut());
        self.launch(self.check_all_to_all_in_place(arm)?, None, data)
    }

    /// Starts a [`send`](Self::send).
    pub fn start_send<T: Element>(&self, data: Buffer<T>, to: usize, tag: u32) -> Result<Pending<Buffer<T>>> {
        let arm = Arm::input(data.view());
        self.launch(self.check_message(Kind::Send, arm, to, tag)?, Some(tag), data)
    }

    /// Starts a [`recv`](Self::recv).
    pub fn start_recv<T: Element>(
        &self,
        mut data: Buffer<T>,
        from: usize,
        tag: u32,
    ) -> Result<Pending<Buffer<T>>> {
        let arm = Arm::output(&mut data.view_mut());
        self.launch(self.check_message(Kind::Recv, arm, from, tag)?, Some(tag), data)
    }

    /// Starts a [`barrier`](Self::barrier).
    pub fn start_barrier(&self) -> Result<Pending<()>> {
        self.launch(self.check_barrier()?, None, ())
    }
}
