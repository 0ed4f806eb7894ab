//! Several calls in flight, ended out of order, dropped, with priorities, with messages in between.

use super::{Keep, Part, data, dawdle, everyone, same};
use collectives::schedule::{Call, Kind};
use collectives::{Communicator, DType, Priority, ReduceOp, oracle};

pub(super) const CASES: &[Part] = &[
    ("many in flight", many_in_flight),
    ("dropped calls", dropped),
    ("messages", messages),
    ("messages between collectives", messages_between),
    ("arguments", arguments),
    ("counters", counters),
];

/// Twelve calls at once; every rank waits for them in an order of its own.
fn many_in_flight(comm: Communicator) {
    let (rank, n) = (comm.rank(), comm.size());
    let urgent = comm.with_priority(Priority::High);
    for turn in 0..12 {
        let keep = Keep::ALL[turn % 3];
        let count = [5, 200, 1000][turn / 3 % 3];
        let mut checks: Vec<Box<dyn FnOnce()>> = Vec::new();
        for k in 0..12 {
            dawdle(&comm, turn * 12 + k);
            let comm = if k % 3 == 0 { urgent.clone() } else { comm.clone() };
            let seed = turn * 100 + k;
            if k % 2 == 0 {
                let all = everyone::<f32>(seed, n, n * count);
                let own = rank * count..(rank + 1) * count;
                let shards: Vec<&[f32]> = all.iter().map(|x| &x[own.clone()]).collect();
                let expected = oracle::reduce(ReduceOp::Sum, &shards);
                let buffer = keep.buffer(&comm, &all[rank]);
                let started = comm.start_reduce_scatter_in_place(buffer, ReduceOp::Sum).expect("starts");
                checks.push(Box::new(move || {
                    let found = started.wait().expect("works");
                    same(&found.host()[own], &expected, format_args!("turn {turn}, call {k}"));
                }));
            } else {
                let all = everyone::<u32>(seed, n, count);
                let send = keep.buffer(&comm, &all[rank]);
                let started = comm.start_all_gather(send, keep.empty(&comm, n * count)).expect("starts");
                checks.push(Box::new(move || {
                    let found = started.wait().expect("works").1;
                    same(found.host(), &all.concat(), format_args!("turn {turn}, call {k}"));
                }));
            }
            if turn % 4 == 1 {
                comm.progress().expect("works");
            }
        }
        for k in 0..12 {
            // 5 and 12 share no factor, so every call comes once, from a start that depends on the rank.
            let len = checks.len();
            let check = checks.remove((k * 5 + rank * 7) % len);
            dawdle(&comm, k);
            check();
        }
    }
}

/// A call that nobody waits for still serves the others, and its memory lives until then.
fn dropped(comm: Communicator) {
    let (rank, n) = (comm.rank(), comm.size());
    for turn in 0..20 {
        let keep = Keep::ALL[turn % 3];
        let all = everyone::<f64>(turn, n, 300);
        let slices: Vec<&[f64]> = all.iter().map(Vec::as_slice).collect();
        let expected = oracle::reduce(ReduceOp::Average, &slices);
        let buffer = keep.buffer(&comm, &all[rank]);
        let started = comm.start_all_reduce_in_place(buffer, ReduceOp::Average).expect("starts");
        let dropper = turn % n;
        if rank == dropper && n > 1 {
            drop(started);
        } else {
            while !started.is_done() {
                std::thread::yield_now();
            }
            same(started.wait().expect("works").host(), &expected, format_args!("turn {turn}"));
        }
        // Whoever dropped makes progress here.
        comm.barrier().expect("works");
    }
}

/// Everybody to everybody under several tags, received in another order than sent.
fn messages(comm: Communicator) {
    let (rank, n) = (comm.rank(), comm.size());
    for (turn, len) in [0, 1, 33, 300, 5000, 40_000].into_iter().enumerate() {
        let keep = Keep::ALL[turn % 3];
        let content =
            |from: usize, to: usize, tag: u32| data::<i32>(from * 64 + to * 8 + tag as usize, from, len);
        let mut sends = Vec::new();
        for to in (0..n).filter(|&to| to != rank) {
            for tag in [3, 1, 2] {
                let buffer = keep.buffer(&comm, &content(rank, to, tag));
                sends.push((to, tag, comm.start_send(buffer, to, tag).expect("starts")));
            }
        }
        dawdle(&comm, turn);
        for from in (0..n).rev().filter(|&from| from != rank) {
            let early = comm.start_recv(keep.empty::<i32>(&comm, len), from, 2).expect("starts");
            for tag in [1, 3] {
                let mut buffer = keep.empty::<i32>(&comm, len);
                comm.recv(&mut buffer, from, tag).expect("works");
                same(buffer.host(), &content(from, rank, tag), format_args!("{len} from {from}, tag {tag}"));
            }
            same(
                early.wait().expect("works").host(),
                &content(from, rank, 2),
                format_args!("early of {len}"),
            );
        }
        for (to, tag, sent) in sends {
            let kept = sent.wait().expect("works");
            same(kept.host(), &content(rank, to, tag), format_args!("{len} to {to}, tag {tag}, as sent"));
        }
        // Messages of one tag arrive in order, long or short, awaited in any.
        let (next, before) = ((rank + 1) % n, (rank + n - 1) % n);
        if n > 1 {
            let content = |from: usize, i: usize| data::<u64>(from * 8 + i, i, [len, 3][i % 2]);
            let pending: Vec<_> = (0..6)
                .map(|i| comm.start_send(keep.buffer(&comm, &content(rank, i)), next, 9).expect("starts"))
                .collect();
            let start = |i: usize| comm.start_recv(keep.empty::<u64>(&comm, [len, 3][i % 2]), before, 9);
            let mut started: Vec<_> = (0..6).map(|i| Some(start(i).expect("starts"))).collect();
            for i in [5, 1, 0, 3, 2, 4] {
                let came = started[i].take().expect("waited for once").wait().expect("works");
                same(came.host(), &content(before, i), format_args!("{len}, message {i} of its tag"));
            }
            for p in pending {
                p.wait().expect("works");
            }
            // Of other types, too: what waits for its own receive is not taken for what another waits for.
            let (long, short) = (data::<u64>(rank, 1, len), data::<f32>(rank, 2, 3));
            let first = comm.start_send(keep.buffer(&comm, &long), next, 10).expect("starts");
            let second = comm.start_send(keep.buffer(&comm, &short), next, 10).expect("starts");
            let (mut came, mut last) = (vec![0u64; len], [0f32; 3]);
            comm.recv(&mut came[..], before, 10).expect("works");
            comm.recv(&mut last[..], before, 10).expect("works");
            same(&came, &data::<u64>(before, 1, len), format_args!("{len}, the long one"));
            same(&last, &data::<f32>(before, 2, 3), format_args!("{len}, the short one"));
            first.wait().expect("works");
            second.wait().expect("works");
        }
    }
}

/// Messages are apart from collectives: a rank may send before and receive after one.
fn messages_between(comm: Communicator) {
    let (rank, n) = (comm.rank(), comm.size());
    if n == 1 {
        return;
    }
    for turn in 0..10u32 {
        let word = [rank as u64 * 100 + u64::from(turn)];
        let (next, before) = ((rank + 1) % n, (rank + n - 1) % n);
        let mut heard = [u64::MAX];
        if rank % 2 == 0 {
            comm.send(&word[..], next, turn).expect("works");
            comm.barrier().expect("works");
        } else {
            comm.barrier().expect("works");
            comm.send(&word[..], next, turn).expect("works");
        }
        comm.recv(&mut heard[..], before, turn).expect("works");
        assert_eq!(heard[0], before as u64 * 100 + u64::from(turn));
    }
}

/// What does not fit is refused before anything moves, says why, and leaves the communicator usable.
fn arguments(comm: Communicator) {
    let n = comm.size();
    let refuse = |result: collectives::Result<()>, words: &[&str]| {
        let text = result.expect_err("must be refused").to_string();
        for word in words {
            assert!(text.contains(word), "'{text}' does not mention '{word}'");
        }
    };
    let mut out = [0f32; 3];
    let double = vec![0f32; 3 * n + 1];
    refuse(comm.reduce_scatter(&double[..], &mut out[..], ReduceOp::Sum), &["reduce_scatter", "elements"]);
    refuse(comm.all_gather(&double[..], &mut out[..]), &["all_gather", "recv"]);
    if n > 1 {
        let mut odd = vec![0f32; n + 1];
        refuse(comm.reduce_scatter_in_place(&mut odd[..], ReduceOp::Sum), &["divide", "equal shards"]);
        refuse(comm.all_gather_in_place(&mut odd[..]), &["divide"]);
        refuse(comm.all_to_all_in_place(&mut odd[..]), &["divide"]);
    }
    refuse(comm.broadcast(&mut out[..], n), &["root", "ranks are 0 to"]);
    refuse(comm.send(&out[..], n, 0), &["peer", "ranks are 0 to"]);
    refuse(comm.send(&out[..], comm.rank(), 0), &["this rank itself"]);
    refuse(comm.all_reduce(&out[..2], &mut [0f32; 3][..], ReduceOp::Sum), &["as long as"]);
    if comm.rank() == 0 {
        refuse(comm.reduce(&out[..], None, ReduceOp::Sum, 0), &["root", "recv"]);
        refuse(comm.scatter::<f32>(None, &mut out[..], 0), &["root", "send"]);
    }
    let rootless = Call::new(Kind::Broadcast, DType::F32, 3);
    let planned = |call| comm.explain(call, true).map(drop).and(comm.reserve(&[call]));
    refuse(planned(Call { root: n, ..rootless }), &["broadcast", "root", "ranks are 0 to"]);
    refuse(comm.reserve(&[Call { count: usize::MAX, ..rootless }]), &["broadcast", "one call takes up to"]);
    let message = Call { root: comm.rank(), ..Call::new(Kind::Send, DType::F32, 3) };
    refuse(comm.explain(message, true).map(drop), &["this rank itself"]);
    planned(rootless).expect("possible");
    assert!(comm.alloc::<u64>(usize::MAX / 4).is_err());
    comm.barrier().expect("still usable");
}

/// Counters tell what a plan can predict, whatever the algorithm.
fn counters(comm: Communicator) {
    let (rank, n) = (comm.rank(), comm.size());
    let count = 1000;
    let before = comm.stats();
    let mut whole = vec![0f32; n * count];
    comm.reduce_scatter_in_place(&mut whole[..], ReduceOp::Sum).expect("works");
    comm.all_gather_in_place(&mut whole[..]).expect("works");
    let found = comm.stats().since(&before);
    assert_eq!((found.calls, found.bytes_sent), (2, 2 * 4 * (n as u64 - 1) * count as u64));
    let call = Call::new(Kind::AllReduce, DType::F32, 7);
    let total: usize = (0..n).map(|r| call.volume(r, n)).sum();
    assert_eq!(total, 2 * (n - 1) * 7 * 4);
    let before = comm.stats();
    comm.all_reduce_in_place(&mut [0f32; 7][..], ReduceOp::Sum).expect("works");
    assert_eq!(comm.stats().since(&before).bytes_sent, call.volume(rank, n) as u64);
}
