//! Each collective on memory inside larger buffers, of which nothing else may change: at odd addresses, where registered
//! memory does not start with what is called, in place and not.

use super::calls::algorithms;
use super::{Keep, Part, Sample, data, same};
use collectives::schedule::{Call, Kind};
use collectives::{Buffer, Communicator, Element, ReduceOp, View, ViewMut, oracle};
use std::fmt::Display;

pub(super) const CASES: &[Part] = &[("inside larger buffers", |c| {
    inside::<f32>(&c);
    inside::<u8>(&c);
})];

fn inside<T: Sample>(comm: &Communicator) {
    let members: Vec<usize> = (0..comm.size()).collect();
    for (i, kind) in Kind::COLLECTIVES.into_iter().enumerate() {
        for (s, count) in [17, 130, 2051].into_iter().enumerate() {
            let (op, root) = (ReduceOp::ALL[(i + s) % 5], (i + s) % comm.size());
            let call = Call { op, root, ..Call::new(kind, T::DTYPE, count) };
            algorithms(comm, call, i + s, |keep, _| every::<T>(comm, &members, call, keep));
        }
    }
}

/// Elements before and behind: so many that nothing is aligned any more.
const AROUND: usize = 61;

/// What a call is given, in the middle of a buffer.
struct Inside<T: Element> {
    buffer: Buffer<T>,
    around: Vec<T>,
}

impl<T: Element> Inside<T> {
    fn of(content: &[T], keep: Keep, comm: &Communicator) -> Self {
        let around: Vec<T> = (0..2 * AROUND).map(|i| oracle::sample(comm.rank(), i)).collect();
        let whole = [&around[..AROUND], content, &around[AROUND..]].concat();
        Inside { buffer: keep.buffer(comm, &whole), around }
    }

    fn view(&self) -> View<'_, T> {
        self.buffer.view().slice(AROUND..self.buffer.len() - AROUND)
    }

    fn view_mut(&mut self) -> ViewMut<'_, T> {
        let end = self.buffer.len() - AROUND;
        self.buffer.view_mut().slice(AROUND..end)
    }

    #[track_caller]
    fn holds(&self, content: &[T], what: impl Display) {
        same(self.view().host(), content, &what);
        let whole = self.buffer.host();
        same(&whole[..AROUND], &self.around[..AROUND], format_args!("{what}: before it"));
        same(&whole[AROUND + content.len()..], &self.around[AROUND..], format_args!("{what}: behind it"));
    }
}

/// Makes `call` out of place and in place, between ranks of which r brings what `members[r]` has.
pub(super) fn every<T: Sample>(comm: &Communicator, members: &[usize], call: Call, keep: Keep) {
    let (rank, n) = (comm.rank(), comm.size());
    let Call { kind, op, root, count, .. } = call;
    let what = format!("{call} between {members:?}, {keep:?}");
    let in_place = format!("{what}, in place");
    let input = format!("{what}: the input");
    let at_root = rank == root;
    let all = |len: usize| -> Vec<Vec<T>> { members.iter().map(|&m| data(count + 9, m, len)).collect() };
    let (parts, wholes) = (all(count), all(n * count));
    let slices: Vec<&[T]> = parts.iter().map(Vec::as_slice).collect();
    let own = rank * count..(rank + 1) * count;
    let given = |content: &[T]| Inside::of(content, keep, comm);
    let zeros = vec![T::default(); n * count];
    let blank = |len: usize| given(&zeros[..len]);
    // A buffer for all parts that has its own only.
    let mut partly = zeros.clone();
    partly[own.clone()].copy_from_slice(&parts[rank]);
    match kind {
        Kind::ReduceScatter => {
            let shards: Vec<&[T]> = wholes.iter().map(|whole| &whole[own.clone()]).collect();
            let expected = oracle::reduce(op, &shards);
            let (send, mut recv) = (given(&wholes[rank]), blank(count));
            comm.reduce_scatter(send.view(), recv.view_mut(), op).expect("works");
            recv.holds(&expected, &what);
            let mut acc = Inside::of(&vec![T::Acc::default(); count], keep, comm);
            comm.reduce_scatter_acc(send.view(), acc.view_mut(), op).expect("works");
            acc.holds(&oracle::reduce_wide(op, &shards), format_args!("{what}, acc"));
            send.holds(&wholes[rank], input);
            let mut whole = wholes[rank].clone();
            whole[own].copy_from_slice(&expected);
            let mut data = given(&wholes[rank]);
            comm.reduce_scatter_in_place(data.view_mut(), op).expect("works");
            data.holds(&whole, in_place);
        }
        Kind::AllGather => {
            let (send, mut recv) = (given(&parts[rank]), blank(n * count));
            comm.all_gather(send.view(), recv.view_mut()).expect("works");
            recv.holds(&parts.concat(), &what);
            send.holds(&parts[rank], input);
            let mut data = given(&partly);
            comm.all_gather_in_place(data.view_mut()).expect("works");
            data.holds(&parts.concat(), in_place);
        }
        Kind::AllReduce => {
            let expected = oracle::reduce(op, &slices);
            let (send, mut recv) = (given(&parts[rank]), blank(count));
            comm.all_reduce(send.view(), recv.view_mut(), op).expect("works");
            recv.holds(&expected, &what);
            send.holds(&parts[rank], input);
            let mut data = given(&parts[rank]);
            comm.all_reduce_in_place(data.view_mut(), op).expect("works");
            data.holds(&expected, in_place);
        }
        Kind::Broadcast => {
            let mut data = if at_root { given(&parts[root]) } else { blank(count) };
            comm.broadcast(data.view_mut(), root).expect("works");
            data.holds(&parts[root], what);
        }
        Kind::Reduce => {
            let expected = oracle::reduce(op, &slices);
            let (send, mut recv) = (given(&parts[rank]), blank(count));
            comm.reduce(send.view(), at_root.then(|| recv.view_mut()), op, root).expect("works");
            recv.holds(if at_root { &expected } else { &zeros[..count] }, &what);
            send.holds(&parts[rank], input);
            let mut data = given(&parts[rank]);
            comm.reduce_in_place(data.view_mut(), op, root).expect("works");
            data.holds(if at_root { &expected } else { &parts[rank] }, in_place);
        }
        Kind::Gather => {
            let gathered = parts.concat();
            let (send, mut recv) = (given(&parts[rank]), blank(n * count));
            comm.gather(send.view(), at_root.then(|| recv.view_mut()), root).expect("works");
            recv.holds(if at_root { &gathered } else { &zeros }, &what);
            send.holds(&parts[rank], input);
            let mut data = given(if at_root { &partly } else { &parts[rank] });
            comm.gather_in_place(data.view_mut(), root).expect("works");
            data.holds(if at_root { &gathered } else { &parts[rank] }, in_place);
        }
        Kind::Scatter => {
            let (send, mut recv) = (given(&wholes[root]), blank(count));
            comm.scatter(at_root.then(|| send.view()), recv.view_mut(), root).expect("works");
            recv.holds(&wholes[root][own.clone()], &what);
            send.holds(&wholes[root], input);
            let mut data = if at_root { given(&wholes[root]) } else { blank(count) };
            comm.scatter_in_place(data.view_mut(), root).expect("works");
            data.holds(if at_root { &wholes[root] } else { &wholes[root][own] }, in_place);
        }
        Kind::AllToAll => {
            let slices: Vec<&[T]> = wholes.iter().map(Vec::as_slice).collect();
            let expected = oracle::all_to_all(&slices, rank);
            let (send, mut recv) = (given(&wholes[rank]), blank(n * count));
            comm.all_to_all(send.view(), recv.view_mut()).expect("works");
            recv.holds(&expected, &what);
            send.holds(&wholes[rank], input);
            let mut data = given(&wholes[rank]);
            comm.all_to_all_in_place(data.view_mut()).expect("works");
            data.holds(&expected, in_place);
        }
        Kind::Barrier => comm.barrier().expect("works"),
        Kind::Send | Kind::Recv => unreachable!("messages have peers"),
    }
}
