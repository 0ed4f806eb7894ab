//! Every collective on buffers of a device, bit for bit with the oracle. Inputs are written by the compute queue right
//! before a call starts, and results are copied by it right after the wait: whoever carries the calls must order both.

use super::{Sample, data, everyone, same};
use collectives::device::{Queue, SharedQueue};
use collectives::{
    Buffer, Communicator, DType, Element, Pending, ReduceOp, bf16, bytes_of, bytes_of_mut, f16, oracle,
};

const SIZES: &[usize] = &[0, 1, 17, 130, 5000];

/// What one rank does: `comm` has a carrier for memory of `queue`'s device.
pub fn device<Q: Queue>(comm: &Communicator, queue: &SharedQueue<Q>) {
    each::<f32, Q>(comm, queue);
    each::<bf16, Q>(comm, queue);
    each::<f16, Q>(comm, queue);
    each::<i64, Q>(comm, queue);
    each::<u8, Q>(comm, queue);
    mixed(comm, queue);
    many_at_once(comm, queue);
    one_after_another(comm, queue);
    groups(comm, queue);
}

/// Memory of the device with these elements, which the queue still has to write.
fn upload<T: Element, Q: Queue>(comm: &Communicator, queue: &SharedQueue<Q>, content: &[T]) -> Buffer<T> {
    let mut buffer = comm.alloc::<T>(content.len()).expect("memory for a test");
    assert_eq!(buffer.place(), queue.place());
    write(queue, &mut buffer, content);
    buffer
}

fn write<T: Element, Q: Queue>(queue: &SharedQueue<Q>, buffer: &mut Buffer<T>, content: &[T]) {
    let to = buffer.view_mut().as_mut_ptr() as u64;
    // SAFETY: the buffer is as long and stays until the queue is done: freeing it waits.
    unsafe { queue.clone().upload(bytes_of(content), to).expect("copies") };
}

fn empty<T: Element, Q: Queue>(comm: &Communicator, queue: &SharedQueue<Q>, len: usize) -> Buffer<T> {
    upload(comm, queue, &vec![T::default(); len])
}

/// What the queue finds in a buffer when its turn comes.
fn found<T: Element, Q: Queue>(queue: &SharedQueue<Q>, buffer: &Buffer<T>) -> Vec<T> {
    let mut out = vec![T::default(); buffer.len()];
    let mut queue = queue.clone();
    // SAFETY: both are that long, and the call waits.
    unsafe { queue.download(buffer.view().as_ptr() as u64, bytes_of_mut(&mut out)) }.expect("copies");
    out
}

/// What one of two ranks does that receives more messages than calls have planned places before any is sent, with calls of
/// both between.
pub fn messages_and_calls<Q: Queue>(comm: &Communicator, queue: &SharedQueue<Q>) {
    const MANY: u32 = 9;
    let (rank, peer) = (comm.rank(), 1 - comm.rank());
    let of = |rank: usize, i: u32| vec![10 * i + rank as u32; 1000];
    let recv = |i| comm.start_recv(empty::<u32, Q>(comm, queue, 1000), peer, i).expect("starts");
    let received: Vec<_> = (0..MANY).map(recv).collect();
    let sum =
        |i| comm.start_all_reduce_in_place(upload(comm, queue, &of(rank, i)), ReduceOp::Max).expect("starts");
    let reduced: Vec<_> = (0..MANY).map(sum).collect();
    let send = |i| comm.start_send(upload(comm, queue, &of(rank, i)), peer, i).expect("starts");
    let sent: Vec<_> = (0..MANY).map(send).collect();
    for (i, received) in (0..).zip(received) {
        assert_eq!(found(queue, &received.wait().expect("comes")), of(peer, i));
    }
    for (i, reduced) in (0..).zip(reduced) {
        assert_eq!(found(queue, &reduced.wait().expect("ends")), of(1, i));
    }
    sent.into_iter().for_each(|sent| drop(sent.wait().expect("goes")));
}

/// More calls than have planned places, which one of two ranks starts only once it has a message that the other sends after
/// it has started them; and that wait for places while a message is waited for which the other sends once all are over.
pub fn calls_that_wait_for_places<Q: Queue>(comm: &Communicator, queue: &SharedQueue<Q>) {
    const MANY: u32 = 9;
    let (rank, peer) = (comm.rank(), 1 - comm.rank());
    let of = |rank: usize, i: u32| vec![10 * i + rank as u32; 1000];
    let start = || {
        let sum = |i| comm.start_all_reduce_in_place(upload(comm, queue, &of(rank, i)), ReduceOp::Max);
        (0..MANY).map(|i| sum(i).expect("starts")).collect::<Vec<_>>()
    };
    let finish = |reduced: Vec<Pending<Buffer<u32>>>, last_first: bool| {
        let mut numbered: Vec<_> = (0..).zip(reduced).collect();
        if last_first {
            numbered.reverse();
        }
        for (i, reduced) in numbered {
            assert_eq!(found(queue, &reduced.wait().expect("ends")), of(1, i));
        }
    };
    // One of the host's that comes after them.
    let of_host =
        || comm.start_all_reduce_in_place(Buffer::copy_of(&of(rank, 90)), ReduceOp::Max).expect("starts");
    let mut word = empty::<u32, Q>(comm, queue, 5);
    let (reduced, hosts) = match rank {
        0 => {
            let started = (start(), of_host());
            comm.send(&upload(comm, queue, &[7u32; 5]), peer, 1).expect("goes");
            started
        }
        _ => {
            comm.recv(&mut word, peer, 1).expect("comes");
            (start(), of_host())
        }
    };
    finish(reduced, rank == 0);
    assert_eq!(hosts.wait().expect("ends").host(), of(1, 90));
    let reduced = start();
    match rank {
        0 => {
            finish(reduced, true);
            comm.send(&upload(comm, queue, &[8u32; 5]), peer, 2).expect("goes");
        }
        _ => {
            comm.recv(&mut word, peer, 2).expect("comes");
            assert_eq!(found(queue, &word), [8; 5]);
            finish(reduced, false);
        }
    }
}

/// Calls of several groups that are made of the same ranks, started by all in one order and awaited in others.
pub fn groups_in_any_order<Q: Queue>(comm: &Communicator, queue: &SharedQueue<Q>) {
    let rank = comm.rank();
    let other = comm.split(Some(0), 0).expect("splits").expect("a group");
    let third = other.split(Some(0), 0).expect("splits").expect("a group");
    for turn in 0..6 {
        let groups = [comm, &other, &third];
        let data = |i: usize| vec![(100 * turn + 10 * i + rank) as u32; 700];
        let start =
            |i: usize| groups[i].start_all_reduce_in_place(upload(groups[i], queue, &data(i)), ReduceOp::Max);
        let mut started: Vec<_> = (0..3).map(|i| Some(start(i).expect("starts"))).collect();
        for at in 0..3 {
            // No two ranks in the same order.
            let i = if rank.is_multiple_of(2) { (at + turn) % 3 } else { (2 * 3 + turn - at) % 3 };
            let reduced = started[i].take().expect("once").wait().expect("ends");
            assert_eq!(found(queue, &reduced), vec![(100 * turn + 10 * i + comm.size() - 1) as u32; 700]);
        }
    }
}

/// The same where a rank does not wait for a call of one group before it waits for another's, or for the host.
pub fn groups_while_others_wait<Q: Queue>(comm: &Communicator, queue: &SharedQueue<Q>) {
    let (first, last) = (comm.rank() == 0, comm.size() as u32 - 1);
    let other = comm.split(Some(0), 0).expect("splits").expect("a group");
    for turn in 0..6u32 {
        let start = |group: &Communicator| {
            let mine = upload(group, queue, &vec![100 * turn + comm.rank() as u32; 700]);
            group.start_all_reduce_in_place(mine, ReduceOp::Max).expect("starts")
        };
        let check = |reduced| assert_eq!(found(queue, &reduced), vec![100 * turn + last; 700]);
        let reduced = start(&other);
        if first {
            comm.barrier().expect("all come");
            check(reduced.wait().expect("ends"));
        } else {
            check(reduced.wait().expect("ends"));
            comm.barrier().expect("all come");
        }
        let reduced = start(&other);
        if first {
            let later = start(comm);
            while !later.is_done() {}
            check(reduced.wait().expect("ends"));
            check(later.wait().expect("ends"));
        } else {
            check(reduced.wait().expect("ends"));
            check(start(comm).wait().expect("ends"));
        }
    }
}

/// Calls of the host among those of a device, which are in flight and may be on their way down for as long as they like.
pub fn host_among_device<Q: Queue>(comm: &Communicator, queue: &SharedQueue<Q>) {
    let (rank, size) = (comm.rank(), comm.size());
    for turn in 0..6u32 {
        let data = |i: u32| vec![100 * turn + 10 * i + rank as u32; 40];
        let all =
            |i: u32| (0..size as u32).flat_map(|r| vec![100 * turn + 10 * i + r; 40]).collect::<Vec<u32>>();
        let start = |i| {
            let buffers = (upload(comm, queue, &data(i)), empty::<u32, Q>(comm, queue, 40 * size));
            comm.start_all_gather(buffers.0, buffers.1).expect("starts")
        };
        let started: Vec<_> = (0..3).map(start).collect();
        let mut hosts = vec![0u32; 40 * size];
        comm.all_gather(&data(7)[..], &mut hosts[..]).expect("ends");
        assert_eq!(hosts, all(7));
        for (i, gathered) in (0..).zip(started) {
            assert_eq!(found(queue, &gathered.wait().expect("ends").1), all(i));
        }
        // A message that only the other rank waits for.
        if rank == 0 {
            let sent = comm.start_send(upload(comm, queue, &data(8)), size - 1, turn).expect("starts");
            comm.barrier().expect("all come");
            drop(sent.wait().expect("goes"));
        } else {
            if rank == size - 1 {
                let received = comm.start_recv(empty::<u32, Q>(comm, queue, 40), 0, turn).expect("starts");
                assert_eq!(found(queue, &received.wait().expect("comes")), vec![100 * turn + 80; 40]);
            }
            comm.barrier().expect("all come");
        }
    }
}

fn each<T: Sample, Q: Queue>(comm: &Communicator, queue: &SharedQueue<Q>) {
    let (rank, n) = (comm.rank(), comm.size());
    let op = if T::DTYPE == DType::Bf16 { ReduceOp::Average } else { ReduceOp::Sum };
    for (s, &count) in SIZES.iter().enumerate() {
        let what = |call: &str| format!("{call} of {count} {} on a device", T::DTYPE);
        let root = s % n;
        let at_root = rank == root;
        let own = rank * count..(rank + 1) * count;
        let up = |content: &[T]| upload(comm, queue, content);
        let blank = |len: usize| empty::<T, Q>(comm, queue, len);
        let check = |buffer: &Buffer<T>, expected: &[T], call: &str| {
            same(&found(queue, buffer), expected, what(call));
        };

        let all = everyone::<T>(count + 1, n, n * count);
        let shards: Vec<&[T]> = all.iter().map(|x| &x[own.clone()]).collect();
        let (sum, wide) = (oracle::reduce(op, &shards), oracle::reduce_wide(op, &shards));
        let (send, mut recv) = (up(&all[rank]), blank(count));
        comm.reduce_scatter(&send, &mut recv, op).expect("works");
        check(&recv, &sum, "reduce_scatter");
        let acc = empty::<T::Acc, Q>(comm, queue, count);
        let started = comm.start_reduce_scatter_acc(send, acc, op).expect("starts");
        let in_place = comm.start_reduce_scatter_in_place(up(&all[rank]), op).expect("starts");
        let mut full = all[rank].clone();
        full[own.clone()].copy_from_slice(&sum);
        check(&in_place.wait().expect("works"), &full, "reduce_scatter in place");
        let (send, acc) = started.wait().expect("works");
        same(&found(queue, &acc), &wide, what("reduce_scatter_acc"));
        check(&send, &all[rank], "the input of reduce_scatter");

        let slices: Vec<&[T]> = all.iter().map(Vec::as_slice).collect();
        let exchanged = oracle::all_to_all(&slices, rank);
        let started = comm.start_all_to_all(up(&all[rank]), blank(n * count)).expect("starts");
        let in_place = comm.start_all_to_all_in_place(up(&all[rank])).expect("starts");
        check(&started.wait().expect("works").1, &exchanged, "all_to_all");
        check(&in_place.wait().expect("works"), &exchanged, "all_to_all in place");

        let all = everyone::<T>(count + 2, n, count);
        let slices: Vec<&[T]> = all.iter().map(Vec::as_slice).collect();
        let (whole, sum) = (all.concat(), oracle::reduce(op, &slices));
        let blanks = vec![T::default(); n * count];
        let mut mine = blanks.clone();
        mine[own.clone()].copy_from_slice(&all[rank]);
        let started = comm.start_all_gather(up(&all[rank]), blank(n * count)).expect("starts");
        let in_place = comm.start_all_gather_in_place(up(&mine)).expect("starts");
        check(&in_place.wait().expect("works"), &whole, "all_gather in place");
        check(&started.wait().expect("works").1, &whole, "all_gather");

        let started = comm.start_all_reduce(up(&all[rank]), blank(count), op).expect("starts");
        let in_place = comm.start_all_reduce_in_place(up(&all[rank]), op).expect("starts");
        check(&in_place.wait().expect("works"), &sum, "all_reduce in place");
        check(&started.wait().expect("works").1, &sum, "all_reduce");

        let given = if at_root { up(&all[root]) } else { blank(count) };
        let started = comm.start_broadcast(given, root).expect("starts");
        check(&started.wait().expect("works"), &all[root], "broadcast");

        let (send, mut recv) = (up(&all[rank]), blank(count));
        comm.reduce(&send, at_root.then(|| recv.view_mut()), op, root).expect("works");
        check(&recv, if at_root { &sum } else { &blanks[..count] }, "reduce");
        let started = comm.start_reduce_in_place(send, op, root).expect("starts");
        check(&started.wait().expect("works"), if at_root { &sum } else { &all[rank] }, "reduce in place");

        let (send, mut recv) = (up(&all[rank]), blank(n * count));
        comm.gather(&send, at_root.then(|| recv.view_mut()), root).expect("works");
        check(&recv, if at_root { &whole } else { &blanks }, "gather");
        let given = if at_root { up(&mine) } else { send };
        let started = comm.start_gather_in_place(given, root).expect("starts");
        check(&started.wait().expect("works"), if at_root { &whole } else { &all[rank] }, "gather in place");

        let (send, mut recv) = (up(&whole), blank(count));
        comm.scatter(at_root.then(|| send.view()), &mut recv, root).expect("works");
        check(&recv, &all[rank], "scatter");
        let given = if at_root { send } else { blank(count) };
        let started = comm.start_scatter_in_place(given, root).expect("starts");
        check(&started.wait().expect("works"), if at_root { &whole } else { &all[rank] }, "scatter in place");

        if n > 1 {
            let (next, last) = ((rank + 1) % n, (rank + n - 1) % n);
            let sent = comm.start_send(up(&all[rank]), next, 7).expect("starts");
            let got = comm.start_recv(blank(count), last, 7).expect("starts");
            check(&got.wait().expect("works"), &all[last], "a message");
            let _ = sent.wait().expect("works");
        }
    }
}

/// A call takes buffers that all lie on the device, or none.
fn mixed<Q: Queue>(comm: &Communicator, queue: &SharedQueue<Q>) {
    let n = comm.size();
    let send = upload(comm, queue, &[1f32, 2.0]);
    let mut recv = Buffer::<f32>::zeroed(2 * n);
    let refused = comm.all_gather(&send, &mut recv).unwrap_err().to_string();
    assert!(refused.contains("all buffers in memory from alloc"), "{refused}");
    // Calls of the host go on beside.
    let mut host = vec![comm.rank() as i64; 3];
    comm.all_reduce_in_place(&mut host[..], ReduceOp::Max).expect("works");
    assert_eq!(host, [n as i64 - 1; 3]);
}

/// Waited for in another order than started, dropped, and written again as soon as the queue comes after them.
fn many_at_once<Q: Queue>(comm: &Communicator, queue: &SharedQueue<Q>) {
    let (rank, n) = (comm.rank(), comm.size());
    let count = 300;
    for round in 0..3 {
        let mut flights = Vec::new();
        for k in 0..40 {
            let all = everyone::<f32>(1000 * round + k, n, n * count);
            let buffer = upload(comm, queue, &all[rank]);
            let pending = comm.start_reduce_scatter_in_place(buffer, ReduceOp::Sum).expect("starts");
            if k % 5 == 4 {
                drop(pending);
            } else {
                flights.push((all, pending));
            }
        }
        while !flights.is_empty() {
            let (all, pending) = flights.swap_remove((7 * flights.len() + round) % flights.len());
            let own = rank * count..(rank + 1) * count;
            let shards: Vec<&[f32]> = all.iter().map(|x| &x[own.clone()]).collect();
            let mut buffer = pending.wait().expect("works");
            let mut copy = comm.alloc::<f32>(count).expect("memory for a test");
            let (from, to) = (buffer.view().slice(own).as_ptr() as u64, copy.view_mut().as_mut_ptr() as u64);
            // SAFETY: both are that long, and stay until the queue is done.
            unsafe { queue.clone().copy(from, to, count * size_of::<f32>()).expect("copies") };
            write(queue, &mut buffer, &data::<f32>(9, rank, n * count));
            same(&found(queue, &copy), &oracle::reduce(ReduceOp::Sum, &shards), "one of many");
        }
        comm.progress().expect("works");
    }
}

/// The next call starts before anybody has looked at the result of the last.
fn one_after_another<Q: Queue>(comm: &Communicator, queue: &SharedQueue<Q>) {
    let (rank, n) = (comm.rank(), comm.size());
    let mut results = Vec::new();
    for k in 0..30 {
        let all = everyone::<i64>(k, n, 700);
        let started = comm.start_all_reduce_in_place(upload(comm, queue, &all[rank]), ReduceOp::Sum);
        results.push((all, started.expect("starts").wait().expect("works")));
    }
    for (all, buffer) in results {
        let slices: Vec<&[i64]> = all.iter().map(Vec::as_slice).collect();
        same(&found(queue, &buffer), &oracle::reduce(ReduceOp::Sum, &slices), "one after another");
    }
}

/// Even and odd ranks apart; the last of them in none.
fn groups<Q: Queue>(comm: &Communicator, queue: &SharedQueue<Q>) {
    let (rank, n) = (comm.rank(), comm.size());
    let left_out = n > 2 && rank == n - 1;
    let color = (!left_out).then_some(rank as u32 % 2);
    let Some(group) = comm.split(color, -(rank as i64)).expect("works") else {
        assert!(left_out);
        return;
    };
    let members = (0..n).filter(|r| r % 2 == rank % 2 && !(n > 2 && *r == n - 1));
    let expected: Vec<i64> = members.rev().flat_map(|r| data::<i64>(3, r, 5)).collect();
    let whole = group.alloc::<i64>(expected.len()).expect("memory for a test");
    let mine = upload(&group, queue, &data::<i64>(3, rank, 5));
    let (_, whole) = group.start_all_gather(mine, whole).expect("starts").wait().expect("works");
    same(&found(queue, &whole), &expected, "all_gather in a group");
}
