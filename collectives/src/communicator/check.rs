//! Lengths, roots, peers and places of every call, checked once; what comes out are addresses.

use super::Communicator;
use crate::buffer::{Place, View, ViewMut};
use crate::element::{DType, Element, ReduceOp};
use crate::engine::Ends;
use crate::error::Result;
use crate::schedule::{Call, Kind};
use crate::watch::MAX_COUNT;

/// A buffer of a call: where, how long, of what.
#[derive(Clone, Copy)]
pub(super) struct Arm {
    ptr: *mut u8,
    len: usize,
    bytes: usize,
    /// `None` for no buffer at all.
    place: Option<Place>,
    dtype: DType,
}

impl Arm {
    pub fn input<T: Element>(view: View<'_, T>) -> Arm {
        let ptr = view.as_ptr().cast_mut().cast();
        Arm {
            ptr,
            len: view.len(),
            bytes: view.len() * size_of::<T>(),
            place: Some(view.place()),
            dtype: T::DTYPE,
        }
    }

    pub fn output<T: Element>(view: &mut ViewMut<'_, T>) -> Arm {
        let (len, place) = (view.len(), Some(view.place()));
        Arm { ptr: view.as_mut_ptr().cast(), len, bytes: len * size_of::<T>(), place, dtype: T::DTYPE }
    }

    fn nothing() -> Arm {
        // Never dereferenced, but aligned for any element.
        Arm { ptr: std::ptr::dangling_mut::<u64>().cast(), len: 0, bytes: 0, place: None, dtype: DType::U8 }
    }
}

/// A call whose arguments fit each other, with the buffers' addresses.
pub(super) struct Checked {
    pub call: Call,
    pub ends: Ends,
    /// Whether its buffers lie on a device, so that the carrier takes it.
    pub on_device: bool,
}

impl Communicator {
    fn short_enough(&self, call: &Call) -> Result<()> {
        if call.count <= MAX_COUNT {
            return Ok(());
        }
        let problem = format!("{} elements were asked for; one call takes up to {MAX_COUNT}", call.count);
        Err(self.argument(call.kind.name(), problem))
    }

    /// Whether `call`, of which there are no buffers yet, can be made here.
    pub(super) fn possible(&self, call: &Call) -> Result<()> {
        match call.kind.is_message() {
            true => self.peer_exists(call.kind, call.root)?,
            false => self.rank_exists(call.kind, "root", call.root)?,
        }
        if call.wide && call.kind != Kind::ReduceScatter {
            let problem =
                "f32 sums of 16-bit elements were asked for, which only reduce_scatter gives".into();
            return Err(self.argument(call.kind.name(), problem));
        }
        self.short_enough(call)
    }

    fn checked(&self, call: Call, send: Arm, recv: Arm) -> Result<Checked> {
        let refuse = |problem: String| Err(self.argument(call.kind.name(), problem));
        self.short_enough(&call)?;
        let places = [send.place, recv.place].into_iter().flatten();
        let on_device = places.clone().any(|place| !place.is_host());
        if on_device {
            let Some(carrier) = &self.carrier else {
                let place = places.clone().find(|place| !place.is_host()).expect("just seen");
                return refuse(format!(
                    "a buffer is in {place:?}, which transport {} cannot reach; use memory of the host",
                    self.transport
                ));
            };
            if let Some(place) = places.clone().find(|place| !carrier.reaches(*place)) {
                return refuse(format!(
                    "a buffer is in {place:?}, which {} does not reach in a call with buffers on a device; it takes calls \
                     with all buffers in memory from alloc, or all in memory of the host",
                    carrier.name()
                ));
            }
        }
        let ends = Ends { send: send.ptr, send_bytes: send.bytes, recv: recv.ptr, recv_bytes: recv.bytes };
        Ok(Checked { call, ends, on_device })
    }

    /// How long one of `size` equal shards of `whole` is.
    fn shard(&self, kind: Kind, whole: usize) -> Result<usize> {
        if whole.is_multiple_of(self.size) {
            return Ok(whole / self.size);
        }
        let would = whole.next_multiple_of(self.size);
        let size = self.size;
        let problem = format!("{whole} elements do not divide into {size} equal shards; {would} would");
        Err(self.argument(kind.name(), problem))
    }

    fn fits(&self, kind: Kind, send: Arm, recv: Arm, factors: (usize, usize)) -> Result<()> {
        let (s, r) = factors;
        if send.len.checked_mul(r).is_some_and(|a| Some(a) == recv.len.checked_mul(s)) {
            return Ok(());
        }
        let rule = match factors {
            (1, 1) => "they must be as long as each other".to_string(),
            (1, n) => format!("on {n} ranks recv must be {n} times as long"),
            (n, _) => format!("on {n} ranks send must be {n} times as long"),
        };
        let problem = format!("send has {} elements and recv {}; {rule}", send.len, recv.len);
        Err(self.argument(kind.name(), problem))
    }

    fn rank_exists(&self, kind: Kind, what: &str, rank: usize) -> Result<()> {
        if rank < self.size {
            return Ok(());
        }
        let problem = format!("{what} {rank} is not a rank of this group; ranks are 0 to {}", self.size - 1);
        Err(self.argument(kind.name(), problem))
    }

    fn peer_exists(&self, kind: Kind, peer: usize) -> Result<()> {
        self.rank_exists(kind, "peer", peer)?;
        if peer != self.rank {
            return Ok(());
        }
        let problem = format!("rank {peer} of this group is this rank itself; copy instead, or name another");
        Err(self.argument(kind.name(), problem))
    }

    pub(super) fn check_reduce_scatter(
        &self,
        send: Arm,
        recv: Arm,
        op: ReduceOp,
        wide: bool,
    ) -> Result<Checked> {
        self.fits(Kind::ReduceScatter, send, recv, (self.size, 1))?;
        let call = Call { op, wide, ..Call::new(Kind::ReduceScatter, send.dtype, recv.len) };
        self.checked(call, send, recv)
    }

    pub(super) fn check_reduce_scatter_in_place(&self, data: Arm, op: ReduceOp) -> Result<Checked> {
        let shard = self.shard(Kind::ReduceScatter, data.len)?;
        let call = Call { op, in_place: true, ..Call::new(Kind::ReduceScatter, data.dtype, shard) };
        self.checked(call, data, data)
    }

    pub(super) fn check_all_gather(&self, send: Arm, recv: Arm) -> Result<Checked> {
        self.fits(Kind::AllGather, send, recv, (1, self.size))?;
        self.checked(Call::new(Kind::AllGather, send.dtype, send.len), send, recv)
    }

    pub(super) fn check_all_gather_in_place(&self, data: Arm) -> Result<Checked> {
        let shard = self.shard(Kind::AllGather, data.len)?;
        let call = Call { in_place: true, ..Call::new(Kind::AllGather, data.dtype, shard) };
        self.checked(call, data, data)
    }

    pub(super) fn check_all_reduce(&self, send: Arm, recv: Arm, op: ReduceOp) -> Result<Checked> {
        self.fits(Kind::AllReduce, send, recv, (1, 1))?;
        self.checked(Call { op, ..Call::new(Kind::AllReduce, send.dtype, send.len) }, send, recv)
    }

    pub(super) fn check_all_reduce_in_place(&self, data: Arm, op: ReduceOp) -> Result<Checked> {
        let call = Call { op, in_place: true, ..Call::new(Kind::AllReduce, data.dtype, data.len) };
        self.checked(call, data, data)
    }

    pub(super) fn check_broadcast(&self, data: Arm, root: usize) -> Result<Checked> {
        self.rank_exists(Kind::Broadcast, "root", root)?;
        let call = Call { root, in_place: true, ..Call::new(Kind::Broadcast, data.dtype, data.len) };
        self.checked(call, data, data)
    }

    /// What the root alone gives, the output or, of a scatter, the input; what other ranks give there is not looked at.
    fn at_root(&self, kind: Kind, what: &str, arm: Option<Arm>, root: usize) -> Result<Arm> {
        self.rank_exists(kind, "root", root)?;
        match arm {
            _ if self.rank != root => Ok(Arm::nothing()),
            Some(arm) => Ok(arm),
            None => Err(self.argument(
                kind.name(),
                format!("rank {root} of this group is the root and must give {what}"),
            )),
        }
    }

    pub(super) fn check_reduce(
        &self,
        send: Arm,
        recv: Option<Arm>,
        op: ReduceOp,
        root: usize,
    ) -> Result<Checked> {
        let recv = self.at_root(Kind::Reduce, "recv", recv, root)?;
        if self.rank == root {
            self.fits(Kind::Reduce, send, recv, (1, 1))?;
        }
        self.checked(Call { op, root, ..Call::new(Kind::Reduce, send.dtype, send.len) }, send, recv)
    }

    pub(super) fn check_reduce_in_place(&self, data: Arm, op: ReduceOp, root: usize) -> Result<Checked> {
        self.rank_exists(Kind::Reduce, "root", root)?;
        let call = Call { op, root, in_place: true, ..Call::new(Kind::Reduce, data.dtype, data.len) };
        self.checked(call, data, data)
    }

    pub(super) fn check_gather(&self, send: Arm, recv: Option<Arm>, root: usize) -> Result<Checked> {
        let recv = self.at_root(Kind::Gather, "recv", recv, root)?;
        if self.rank == root {
            self.fits(Kind::Gather, send, recv, (1, self.size))?;
        }
        self.checked(Call { root, ..Call::new(Kind::Gather, send.dtype, send.len) }, send, recv)
    }

    pub(super) fn check_gather_in_place(&self, data: Arm, root: usize) -> Result<Checked> {
        self.rank_exists(Kind::Gather, "root", root)?;
        let block = if self.rank == root { self.shard(Kind::Gather, data.len)? } else { data.len };
        let call = Call { root, in_place: true, ..Call::new(Kind::Gather, data.dtype, block) };
        self.checked(call, data, data)
    }

    pub(super) fn check_scatter(&self, send: Option<Arm>, recv: Arm, root: usize) -> Result<Checked> {
        let send = self.at_root(Kind::Scatter, "send", send, root)?;
        if self.rank == root {
            self.fits(Kind::Scatter, send, recv, (self.size, 1))?;
        }
        self.checked(Call { root, ..Call::new(Kind::Scatter, recv.dtype, recv.len) }, send, recv)
    }

    pub(super) fn check_scatter_in_place(&self, data: Arm, root: usize) -> Result<Checked> {
        self.rank_exists(Kind::Scatter, "root", root)?;
        let block = if self.rank == root { self.shard(Kind::Scatter, data.len)? } else { data.len };
        let call = Call { root, in_place: true, ..Call::new(Kind::Scatter, data.dtype, block) };
        self.checked(call, data, data)
    }

    pub(super) fn check_all_to_all(&self, send: Arm, recv: Arm) -> Result<Checked> {
        self.fits(Kind::AllToAll, send, recv, (1, 1))?;
        let block = self.shard(Kind::AllToAll, send.len)?;
        self.checked(Call::new(Kind::AllToAll, send.dtype, block), send, recv)
    }

    pub(super) fn check_all_to_all_in_place(&self, data: Arm) -> Result<Checked> {
        let block = self.shard(Kind::AllToAll, data.len)?;
        let call = Call { in_place: true, ..Call::new(Kind::AllToAll, data.dtype, block) };
        self.checked(call, data, data)
    }

    /// One side of a message: `kind` is `Send` or `Recv`.
    pub(super) fn check_message(&self, kind: Kind, data: Arm, peer: usize, tag: u32) -> Result<Checked> {
        self.peer_exists(kind, peer)?;
        if tag > self.most_tag {
            let problem = format!("tag {tag} was asked for; {} takes 0 to {}", self.transport, self.most_tag);
            return Err(self.argument(kind.name(), problem));
        }
        self.checked(Call { root: peer, ..Call::new(kind, data.dtype, data.len) }, data, data)
    }

    pub(super) fn check_barrier(&self) -> Result<Checked> {
        let nothing = Arm::nothing();
        self.checked(Call::new(Kind::Barrier, DType::U8, 0), nothing, nothing)
    }
}
