//! What the engine holds for calls is what was said beforehand, to the byte, however many calls are in flight; and calls
//! that wait for memory do not hold up each other.

use collectives::schedule::{Call, Kind};
use collectives::{Buffer, Communicator, DType, Element, ReduceOp, bf16, oracle, scratch_bytes};

/// Elements of a shard: several rounds, and few enough to be quick.
const SHARD: usize = 300_000;
/// Elements that two ranks give each other whole: in place, and readable, that takes memory for a copy.
const WHOLE: usize = 100_000;
/// Elements of a message that a fingerprint travels with, where one does: more than a call in flight has memory for anyway.
const MESSAGE: usize = 800;
/// Calls in flight at once: more than have memory at once.
const FLIGHTS: usize = 6;

fn sum<T: Element>(size: usize, at: usize) -> T {
    let all: Vec<[T; 1]> = (0..size).map(|rank| [oracle::sample::<T>(rank, at)]).collect();
    oracle::reduce(ReduceOp::Sum, &all.iter().map(<[T; 1]>::as_slice).collect::<Vec<_>>())[0]
}

fn filled<T: Element>(comm: &Communicator, len: usize) -> Buffer<T> {
    let mut buffer = comm.alloc(len).expect("memory");
    buffer.host_mut().iter_mut().enumerate().for_each(|(i, x)| *x = oracle::sample(comm.rank(), i));
    buffer
}

/// Every rank's part, which checks what is held.
pub fn rank(comm: Communicator) {
    let (me, size) = (comm.rank(), comm.size());
    let scatter = Call::new(Kind::ReduceScatter, DType::F32, SHARD);
    let gather = Call { in_place: true, ..Call::new(Kind::AllGather, DType::Bf16, SHARD) };
    let all = Call { in_place: true, ..Call::new(Kind::AllReduce, DType::Bf16, SHARD) };
    let whole = Call { in_place: true, ..Call::new(Kind::AllReduce, DType::Bf16, WHOLE) };
    let (to, from) = ((me + 1) % size, (me + size - 1) % size);
    let message = |kind, peer| Call { root: peer, ..Call::new(kind, DType::F64, MESSAGE) };
    let calls = [scatter, gather, all, whole, message(Kind::Send, to), message(Kind::Recv, from)];
    let planned = scratch_bytes(&comm.group(), &calls);
    let held = comm.scratch();
    comm.reserve(&calls).expect("memory");
    assert_eq!(held.bytes(), planned, "rank {me} of {size}, reserved");
    for _ in 0..2 {
        let mut scattered = Vec::new();
        let mut gathered = Vec::new();
        let mut sums = Vec::new();
        for _ in 0..FLIGHTS {
            let recv = comm.alloc(SHARD).expect("memory");
            let pending = comm.start_reduce_scatter::<f32>(filled(&comm, SHARD * size), recv, ReduceOp::Sum);
            scattered.push(pending.expect("starts"));
            let pending = comm.start_all_gather_in_place::<bf16>(filled(&comm, SHARD * size));
            gathered.push(pending.expect("starts"));
            let pending = comm.start_all_reduce_in_place::<bf16>(filled(&comm, WHOLE), ReduceOp::Sum);
            sums.push(pending.expect("starts"));
        }
        let reduced = comm.start_all_reduce_in_place::<bf16>(filled(&comm, SHARD), ReduceOp::Sum);
        // Messages need no place behind collectives that wait for one: their peers may make them first.
        let (mut sent, mut received) = (Buffer::<f64>::zeroed(MESSAGE), vec![0f64; MESSAGE]);
        sent.host_mut().fill(me as f64 + 1.0);
        let message = comm.start_send(sent, to, 7).expect("starts");
        comm.recv(&mut received[..], from, 7).expect("arrives");
        assert!(received.iter().all(|&x| x == from as f64 + 1.0));
        message.wait().expect("left");
        // The last first: it can only come once those before it have given their memory back.
        let reduced = reduced.expect("starts").wait().expect("works");
        for pending in scattered.into_iter().rev() {
            let (_, recv) = pending.wait().expect("works");
            for i in (0..SHARD).step_by(9973) {
                assert_eq!(recv.host()[i].to_bits(), sum::<f32>(size, me * SHARD + i).to_bits());
            }
        }
        for pending in gathered {
            let whole = pending.wait().expect("works");
            for i in (0..SHARD * size).step_by(9973) {
                assert_eq!(whole.host()[i], oracle::sample::<bf16>(i / SHARD, i));
            }
        }
        for pending in sums {
            let whole = pending.wait().expect("works");
            for i in (0..WHOLE).step_by(9973) {
                assert_eq!(whole.host()[i], sum::<bf16>(size, i));
            }
        }
        for i in (0..SHARD).step_by(9973) {
            assert_eq!(reduced.host()[i], sum::<bf16>(size, i));
        }
        assert_eq!(held.bytes(), planned, "rank {me} of {size}, used");
    }
    many(&comm.split(Some(0), 0).expect("works").expect("a color was given"));
    beside_many(&comm.split(Some(0), 0).expect("works").expect("a color was given"));
}

/// Small calls and messages that nobody planned, beside more calls in flight than have memory of their own.
fn beside_many(comm: &Communicator) {
    let (me, size) = (comm.rank(), comm.size());
    let call = Call { in_place: true, ..Call::new(Kind::AllGather, DType::F32, SHARD) };
    let (planned, held) = (scratch_bytes(&comm.group(), &[call]), comm.scratch());
    comm.reserve(&[call]).expect("memory");
    let start = |_| comm.start_all_gather_in_place::<f32>(filled(comm, SHARD * size)).expect("starts");
    let started: Vec<_> = (0..40).map(start).collect();
    let mut flags = [me as u8, 1];
    comm.all_reduce_in_place(&mut flags[..], ReduceOp::Max).expect("works");
    assert_eq!(flags, [size as u8 - 1, 1]);
    let (to, from) = ((me + 1) % size, (me + size - 1) % size);
    let (sent, mut received) = (Buffer::<u64>::zeroed(256), [1u64; 256]);
    let message = comm.start_send(sent, to, 7).expect("starts");
    comm.recv(&mut received[..], from, 7).expect("arrives");
    message.wait().expect("left");
    assert_eq!(received, [0; 256]);
    started.into_iter().for_each(|pending| drop(pending.wait().expect("works")));
    assert_eq!(held.bytes(), planned, "rank {me} of {size}, beside many");
}

/// More calls than have memory of their own, whose little they need is planned too.
fn many(comm: &Communicator) {
    const COUNT: usize = 150_000;
    let call = Call::new(Kind::ReduceScatter, DType::F32, COUNT);
    let (planned, held) = (scratch_bytes(&comm.group(), &[call]), comm.scratch());
    comm.reserve(&[call]).expect("memory");
    let start = |_| {
        let (send, recv) =
            (comm.alloc(COUNT * comm.size()).expect("memory"), comm.alloc(COUNT).expect("memory"));
        comm.start_reduce_scatter::<f32>(send, recv, ReduceOp::Sum).expect("starts")
    };
    let started: Vec<_> = (0..40).map(start).collect();
    // The last have no place of their own, and go first the next time.
    started.into_iter().for_each(|pending| drop(pending.wait().expect("works")));
    (0..2)
        .map(start)
        .collect::<Vec<_>>()
        .into_iter()
        .for_each(|pending| drop(pending.wait().expect("works")));
    assert_eq!(held.bytes(), planned, "rank {} of {}, many", comm.rank(), comm.size());
}
