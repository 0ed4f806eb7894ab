//! Reductions of what samples are not: zeros of either sign, infinities, what is no number, ends of ranges, and sums that lie
//! halfway between two numbers. Which NaN comes out is not promised; all else is, to the bit.

use super::calls::algorithms;
use super::{Keep, Part};
use collectives::schedule::{Call, Kind};
use collectives::{Communicator, Element, ReduceOp, bf16, f16, oracle};

pub(super) const CASES: &[Part] = &[("edges", |c| {
    edges::<f32>(&c);
    edges::<f64>(&c);
    edges::<f16>(&c);
    edges::<bf16>(&c);
    edges::<i32>(&c);
    edges::<u32>(&c);
    edges::<i64>(&c);
    edges::<u64>(&c);
    edges::<i8>(&c);
    edges::<u8>(&c);
})];

#[track_caller]
fn alike<T: Element>(found: &[T], expected: &[T], what: impl std::fmt::Display) {
    if let Some(at) = (0..expected.len()).find(|&i| !oracle::alike(&found[i..=i], &expected[i..=i])) {
        panic!("{what}: element {at} of {} is {:?}, not {:?}", found.len(), found[at], expected[at]);
    }
    assert_eq!(found.len(), expected.len(), "{what}: length");
}

fn edges<T: Element>(comm: &Communicator) {
    // Of a part, so that there are whole vectors and a rest.
    let count = 33;
    let (rank, n) = (comm.rank(), comm.size());
    // Other ones for each type and number of ranks.
    let from = 37 * (T::DTYPE as usize + 10 * n);
    let input = |r| (0..n * count).map(|i| oracle::edge(r, from + i)).collect();
    let all: Vec<Vec<T>> = (0..n).map(input).collect();
    let own = rank * count..(rank + 1) * count;
    let shards: Vec<&[T]> = all.iter().map(|x| &x[own.clone()]).collect();
    let slices: Vec<&[T]> = all.iter().map(Vec::as_slice).collect();
    for (o, op) in ReduceOp::ALL.into_iter().enumerate() {
        let (shard, wide) = (oracle::reduce(op, &shards), oracle::reduce_wide(op, &shards));
        let (expected, root) = (oracle::reduce(op, &slices), o % n);
        let call = |kind, count| Call { op, ..Call::new(kind, T::DTYPE, count) };
        let what = |call: Call, keep: Keep, how: &str| format!("{call}, {keep:?}, {how}");

        let scatter = call(Kind::ReduceScatter, count);
        algorithms(comm, scatter, o, |keep, how| {
            let what = what(scatter, keep, how);
            let (send, mut recv) = (keep.buffer(comm, &all[rank]), keep.empty(comm, count));
            comm.reduce_scatter(&send, &mut recv, op).expect("works");
            alike(recv.host(), &shard, &what);
            let mut acc = keep.empty(comm, count);
            comm.reduce_scatter_acc(&send, &mut acc, op).expect("works");
            alike(acc.host(), &wide, format_args!("{what}, acc"));
        });

        let reduce_all = call(Kind::AllReduce, n * count);
        algorithms(comm, reduce_all, o, |keep, how| {
            let mut data = keep.buffer(comm, &all[rank]);
            comm.all_reduce_in_place(&mut data, op).expect("works");
            alike(data.host(), &expected, what(reduce_all, keep, how));
        });

        let reduce = Call { root, ..call(Kind::Reduce, n * count) };
        algorithms(comm, reduce, o, |keep, how| {
            let mut recv = keep.empty(comm, n * count);
            let to = (rank == root).then(|| recv.view_mut());
            comm.reduce(&keep.buffer(comm, &all[rank]), to, op, root).expect("works");
            if rank == root {
                alike(recv.host(), &expected, what(reduce, keep, how));
            }
        });
    }
}
