//! Every collective, type, operation and algorithm, in place or not, blocking or not.

use super::{Keep, Part, Sample, data, dawdle, everyone, same};
use collectives::schedule::{Call, Kind, Tuning};
use collectives::{Communicator, DType, ReduceOp, bf16, f16, oracle};

pub(super) const CASES: &[Part] = &[
    ("reduce_scatter", |c| types!(reduce_scatter, &c, SIZES)),
    ("all_gather", |c| types!(all_gather, &c, SIZES)),
    ("all_reduce", |c| types!(all_reduce, &c, SIZES)),
    ("broadcast", |c| types!(broadcast, &c, SIZES)),
    ("reduce", |c| types!(reduce, &c, SIZES)),
    ("gather", |c| types!(gather, &c, SIZES)),
    ("scatter", |c| types!(scatter, &c, SIZES)),
    ("all_to_all", |c| types!(all_to_all, &c, SIZES)),
    ("barrier", barrier),
];

/// With the sizes that real calls have: around the default switch points.
pub(super) const LARGE: &[Part] = &[
    ("large reduce_scatter", |c| {
        // Of shards, so that with more ranks a whole is not larger.
        let counts = [LARGE_COUNTS[0], 2 * LARGE_COUNTS[1] / c.size()];
        reduce_scatter::<f32>(&c, Sizes::of(&counts));
        reduce_scatter::<bf16>(&c, Sizes::of(&counts));
        others!(reduce_scatter, &c, &counts[1..]);
    }),
    ("large all_gather", |c| all_gather::<bf16>(&c, LARGE_SIZES)),
    ("large all_reduce", |c| {
        all_reduce::<f32>(&c, LARGE_SIZES);
        others!(all_reduce, &c, &LARGE_COUNTS[1..]);
    }),
    ("large broadcast", |c| broadcast::<f64>(&c, LARGE_SIZES)),
    ("large reduce", |c| {
        reduce::<f32>(&c, LARGE_SIZES);
        others!(reduce, &c, &LARGE_COUNTS[1..]);
    }),
    ("large gather", |c| gather::<i32>(&c, LARGE_SIZES)),
    ("large scatter", |c| scatter::<f16>(&c, LARGE_SIZES)),
    ("large all_to_all", |c| all_to_all::<u8>(&c, LARGE_SIZES)),
];

/// Around the limit at which default rounds become windows, both of parts and of whole inputs. Above it calls of several in
/// flight stop in the middle of a reduction, also where a result is longer than the inputs.
pub(super) fn windowed(comm: Communicator) {
    let (n, limit) = (comm.size(), Tuning::default().windowed / size_of::<f64>());
    reduce_scatter::<f64>(&comm, Sizes::of(&[limit, limit + 1]).by(Operations::Two));
    all_reduce::<f64>(&comm, Sizes::of(&[n * limit, n * limit + 1]).by(Operations::Two));
    reduce::<f64>(&comm, Sizes::of(&[limit, n * limit + 1]).by(Operations::Two));
    reduce_scatter::<bf16>(&comm, Sizes::of(&[4 * limit + 1]).by(Operations::One(ReduceOp::Sum)));
    reduce_scatter::<i8>(&comm, Sizes::of(&[8 * limit + 1]).by(Operations::One(ReduceOp::Average)));
}

/// Lengths of calls, and through which operations a reduction goes at each.
#[derive(Clone, Copy)]
struct Sizes<'a> {
    counts: &'a [usize],
    operations: Operations,
}

#[derive(Clone, Copy)]
enum Operations {
    /// All for two types, and for each at the last length; two for the others, different ones for each type and length.
    Thinned,
    /// Two, different ones for each length.
    Two,
    /// This one.
    One(ReduceOp),
}

impl<'a> Sizes<'a> {
    const fn of(counts: &'a [usize]) -> Self {
        Sizes { counts, operations: Operations::Thinned }
    }

    const fn by(self, operations: Operations) -> Self {
        Sizes { operations, ..self }
    }

    fn each(self) -> impl Iterator<Item = (usize, &'a usize)> {
        self.counts.iter().enumerate()
    }

    /// Those at length number `size`.
    fn operations<T: Sample>(self, size: usize) -> impl Iterator<Item = ReduceOp> {
        let turn = size + T::DTYPE as usize;
        let whole = matches!(T::DTYPE, DType::F32 | DType::Bf16) || size + 1 == self.counts.len();
        let goes = move |(o, op): &(usize, ReduceOp)| match self.operations {
            Operations::Thinned => whole || (o + turn) % 5 < 2,
            Operations::Two => (o + size) % 5 < 2,
            Operations::One(only) => *op == only,
        };
        ReduceOp::ALL.into_iter().enumerate().filter(goes).map(|(_, op)| op)
    }
}

const SIZES: Sizes<'_> = Sizes::of(&[0, 1, 3, 17, 64, 65, 130, 515]);
const LARGE_COUNTS: &[usize] = &[4097, 70_001];
const LARGE_SIZES: Sizes<'_> = Sizes::of(LARGE_COUNTS);

/// Types of which the first is made by kernels of its own, each by one operation, another with each number of ranks.
macro_rules! others {
    ($run:ident, $comm:expr, $counts:expr) => {{
        let op = |i: usize| Operations::One(ReduceOp::ALL[(i + $comm.size()) % 5]);
        $run::<f16>($comm, Sizes::of($counts).by(op(0)));
        $run::<i8>($comm, Sizes::of($counts).by(op(1)));
        $run::<u64>($comm, Sizes::of($counts).by(op(2)));
    }};
}
use others;

macro_rules! types {
    ($run:ident, $comm:expr, $sizes:expr) => {{
        $run::<f32>($comm, $sizes);
        $run::<f64>($comm, $sizes);
        $run::<f16>($comm, $sizes);
        $run::<bf16>($comm, $sizes);
        $run::<i32>($comm, $sizes);
        $run::<u32>($comm, $sizes);
        $run::<i64>($comm, $sizes);
        $run::<u64>($comm, $sizes);
        $run::<i8>($comm, $sizes);
        $run::<u8>($comm, $sizes);
    }};
}
use types;

/// Runs `body`, which makes `call` or others of its kind, with every algorithm that can carry that kind, and last with the
/// tuner's own choice. Every third combination of sizes and operations does, to save time: which one is decided by `index`.
pub(super) fn algorithms(comm: &Communicator, call: Call, index: usize, mut body: impl FnMut(Keep, &str)) {
    let keep = Keep::ALL[index % 3];
    let all = comm.algorithms(call.kind);
    if all.len() > 1 {
        for &algorithm in all {
            comm.force(call.kind, Some(algorithm)).expect("a candidate");
            assert_eq!(comm.choice(&call).expect("a call").algorithm, algorithm, "what carries {call}");
            body(keep, algorithm.name());
        }
        comm.force(call.kind, None).expect("no algorithm");
    }
    body(keep, "auto");
}

fn reduce_scatter<T: Sample>(comm: &Communicator, sizes: Sizes<'_>) {
    let (rank, n) = (comm.rank(), comm.size());
    for (s, &count) in sizes.each() {
        let all = everyone::<T>(count + 1, n, n * count);
        let own = rank * count..(rank + 1) * count;
        let shards: Vec<&[T]> = all.iter().map(|x| &x[own.clone()]).collect();
        for (o, op) in sizes.operations::<T>(s).enumerate() {
            let expected = oracle::reduce(op, &shards);
            let wide = oracle::reduce_wide(op, &shards);
            let call = Call { op, ..Call::new(Kind::ReduceScatter, T::DTYPE, count) };
            algorithms(comm, call, s + o, |keep, how| {
                let what = format!("reduce_scatter of {count} {}, {op}, {keep:?}, {how}", T::DTYPE);
                let send = keep.buffer(comm, &all[rank]);
                let mut recv = keep.empty(comm, count);
                comm.reduce_scatter(&send, &mut recv, op).expect("works");
                same(recv.host(), &expected, &what);
                let mut acc = keep.empty(comm, count);
                comm.reduce_scatter_acc(&send, &mut acc, op).expect("works");
                same(acc.host(), &wide, format_args!("{what}, acc"));
                same(send.host(), &all[rank], format_args!("{what}: the input"));

                let mut data = keep.buffer(comm, &all[rank]);
                comm.reduce_scatter_in_place(&mut data, op).expect("works");
                let mut full = all[rank].clone();
                full[own.clone()].copy_from_slice(&expected);
                same(data.host(), &full, format_args!("{what}, in place"));

                recv.host_mut().fill(T::default());
                acc.host_mut().fill(T::Acc::default());
                dawdle(comm, s);
                let a = comm.start_reduce_scatter(send, recv, op).expect("starts");
                let b =
                    comm.start_reduce_scatter_acc(keep.buffer(comm, &all[rank]), acc, op).expect("starts");
                data.host_mut().copy_from_slice(&all[rank]);
                let c = comm.start_reduce_scatter_in_place(data, op).expect("starts");
                same(c.wait().expect("works").host(), &full, format_args!("{what}, started in place"));
                same(b.wait().expect("works").1.host(), &wide, format_args!("{what}, started, acc"));
                same(a.wait().expect("works").1.host(), &expected, format_args!("{what}, started"));
            });
        }
    }
}

fn all_gather<T: Sample>(comm: &Communicator, sizes: Sizes<'_>) {
    let (rank, n) = (comm.rank(), comm.size());
    for (s, &count) in sizes.each() {
        let all = everyone::<T>(count + 2, n, count);
        let expected = all.concat();
        let own = rank * count..(rank + 1) * count;
        for turn in 0..3 {
            let call = Call::new(Kind::AllGather, T::DTYPE, count);
            algorithms(comm, call, s + turn, |keep, how| {
                let what = format!("all_gather of {count} {}, {keep:?}, {how}", T::DTYPE);
                let send = keep.buffer(comm, &all[rank]);
                let mut recv = keep.empty(comm, n * count);
                comm.all_gather(&send, &mut recv).expect("works");
                same(recv.host(), &expected, &what);
                let mut data = keep.empty(comm, n * count);
                data.host_mut()[own.clone()].copy_from_slice(&all[rank]);
                comm.all_gather_in_place(&mut data).expect("works");
                same(data.host(), &expected, format_args!("{what}, in place"));
                dawdle(comm, s);
                recv.host_mut().fill(T::default());
                data.host_mut().fill(T::default());
                data.host_mut()[own.clone()].copy_from_slice(&all[rank]);
                let a = comm.start_all_gather(send, recv).expect("starts");
                let b = comm.start_all_gather_in_place(data).expect("starts");
                same(b.wait().expect("works").host(), &expected, format_args!("{what}, started in place"));
                same(a.wait().expect("works").1.host(), &expected, format_args!("{what}, started"));
            });
        }
    }
}

fn all_reduce<T: Sample>(comm: &Communicator, sizes: Sizes<'_>) {
    let (rank, n) = (comm.rank(), comm.size());
    for (s, &count) in sizes.each() {
        let all = everyone::<T>(count + 3, n, count);
        let slices: Vec<&[T]> = all.iter().map(Vec::as_slice).collect();
        for (o, op) in sizes.operations::<T>(s).enumerate() {
            let expected = oracle::reduce(op, &slices);
            let call = Call { op, ..Call::new(Kind::AllReduce, T::DTYPE, count) };
            algorithms(comm, call, s + o, |keep, how| {
                let what = format!("all_reduce of {count} {}, {op}, {keep:?}, {how}", T::DTYPE);
                let send = keep.buffer(comm, &all[rank]);
                let mut recv = keep.empty(comm, count);
                comm.all_reduce(&send, &mut recv, op).expect("works");
                same(recv.host(), &expected, &what);
                same(send.host(), &all[rank], format_args!("{what}: the input"));
                let mut data = keep.buffer(comm, &all[rank]);
                comm.all_reduce_in_place(&mut data, op).expect("works");
                same(data.host(), &expected, format_args!("{what}, in place"));
                recv.host_mut().fill(T::default());
                dawdle(comm, s);
                let a = comm.start_all_reduce(send, recv, op).expect("starts");
                let again = keep.buffer(comm, &all[rank]);
                let b = comm.start_all_reduce_in_place(again, op).expect("starts");
                same(b.wait().expect("works").host(), &expected, format_args!("{what}, started in place"));
                same(a.wait().expect("works").1.host(), &expected, format_args!("{what}, started"));
            });
        }
    }
}

fn broadcast<T: Sample>(comm: &Communicator, sizes: Sizes<'_>) {
    let (rank, n) = (comm.rank(), comm.size());
    for (s, &count) in sizes.each() {
        for root in 0..n {
            let expected = data::<T>(count + 4, root, count);
            let mine = if rank == root { expected.clone() } else { vec![T::default(); count] };
            let call = Call { root, ..Call::new(Kind::Broadcast, T::DTYPE, count) };
            algorithms(comm, call, s + root, |keep, how| {
                let what = format!("broadcast of {count} {} from {root}, {keep:?}, {how}", T::DTYPE);
                let mut buffer = keep.buffer(comm, &mine);
                comm.broadcast(&mut buffer, root).expect("works");
                same(buffer.host(), &expected, &what);
                dawdle(comm, s);
                let started = comm.start_broadcast(keep.buffer(comm, &mine), root).expect("starts");
                same(started.wait().expect("works").host(), &expected, format_args!("{what}, started"));
            });
        }
    }
}

fn reduce<T: Sample>(comm: &Communicator, sizes: Sizes<'_>) {
    let (rank, n) = (comm.rank(), comm.size());
    for (s, &count) in sizes.each() {
        let all = everyone::<T>(count + 5, n, count);
        let slices: Vec<&[T]> = all.iter().map(Vec::as_slice).collect();
        for (o, op) in sizes.operations::<T>(s).enumerate() {
            let root = (s + o) % n;
            let expected = oracle::reduce(op, &slices);
            let call = Call { op, root, ..Call::new(Kind::Reduce, T::DTYPE, count) };
            algorithms(comm, call, s / 2 + o, |keep, how| {
                let what = format!("reduce of {count} {}, {op}, to {root}, {keep:?}, {how}", T::DTYPE);
                let send = keep.buffer(comm, &all[rank]);
                let mut recv = keep.empty(comm, count);
                let at_root = rank == root;
                comm.reduce(&send, at_root.then(|| recv.view_mut()), op, root).expect("works");
                if at_root {
                    same(recv.host(), &expected, &what);
                }
                let kept = if at_root { &expected } else { &all[rank] };
                let mut data = keep.buffer(comm, &all[rank]);
                comm.reduce_in_place(&mut data, op, root).expect("works");
                same(data.host(), kept, format_args!("{what}, in place"));
                dawdle(comm, s);
                recv.host_mut().fill(T::default());
                let a = comm.start_reduce(send, at_root.then_some(recv), op, root).expect("starts");
                let again = keep.buffer(comm, &all[rank]);
                let b = comm.start_reduce_in_place(again, op, root).expect("starts");
                same(b.wait().expect("works").host(), kept, format_args!("{what}, started in place"));
                let (send, recv) = a.wait().expect("works");
                same(send.host(), &all[rank], format_args!("{what}: the input"));
                if let Some(recv) = recv {
                    same(recv.host(), &expected, format_args!("{what}, started"));
                }
            });
        }
    }
}

fn gather<T: Sample>(comm: &Communicator, sizes: Sizes<'_>) {
    let (rank, n) = (comm.rank(), comm.size());
    for (s, &count) in sizes.each() {
        let all = everyone::<T>(count + 6, n, count);
        let expected = all.concat();
        for root in 0..n {
            let at_root = rank == root;
            let call = Call { root, ..Call::new(Kind::Gather, T::DTYPE, count) };
            algorithms(comm, call, s + root, |keep, how| {
                let what = format!("gather of {count} {} to {root}, {keep:?}, {how}", T::DTYPE);
                let send = keep.buffer(comm, &all[rank]);
                let mut recv = keep.empty(comm, n * count);
                comm.gather(&send, at_root.then(|| recv.view_mut()), root).expect("works");
                if at_root {
                    same(recv.host(), &expected, &what);
                }
                let mut whole = vec![T::default(); n * count];
                whole[rank * count..(rank + 1) * count].copy_from_slice(&all[rank]);
                let mut data = if at_root { keep.buffer(comm, &whole) } else { send };
                comm.gather_in_place(&mut data, root).expect("works");
                let kept = if at_root { &expected } else { &all[rank] };
                same(data.host(), kept, format_args!("{what}, in place"));
                recv.host_mut().fill(T::default());
                let send = keep.buffer(comm, &all[rank]);
                let a = comm.start_gather(send, at_root.then_some(recv), root).expect("starts");
                let again = keep.buffer(comm, if at_root { &whole } else { &all[rank] });
                let b = comm.start_gather_in_place(again, root).expect("starts");
                same(b.wait().expect("works").host(), kept, format_args!("{what}, started in place"));
                if let (_, Some(recv)) = a.wait().expect("works") {
                    same(recv.host(), &expected, format_args!("{what}, started"));
                }
            });
        }
    }
}

fn scatter<T: Sample>(comm: &Communicator, sizes: Sizes<'_>) {
    let (rank, n) = (comm.rank(), comm.size());
    for (s, &count) in sizes.each() {
        for root in 0..n {
            let at_root = rank == root;
            let whole = data::<T>(count + 7, root, n * count);
            let expected = &whole[rank * count..(rank + 1) * count];
            let call = Call { root, ..Call::new(Kind::Scatter, T::DTYPE, count) };
            algorithms(comm, call, s + root, |keep, how| {
                let what = format!("scatter of {count} {} from {root}, {keep:?}, {how}", T::DTYPE);
                let send = keep.buffer(comm, &whole);
                let mut recv = keep.empty(comm, count);
                comm.scatter(at_root.then(|| send.view()), &mut recv, root).expect("works");
                same(recv.host(), expected, &what);
                let kept = if at_root { &whole } else { expected };
                let mut data = if at_root { send } else { keep.empty(comm, count) };
                comm.scatter_in_place(&mut data, root).expect("works");
                same(data.host(), kept, format_args!("{what}, in place"));
                recv.host_mut().fill(T::default());
                let send = at_root.then(|| keep.buffer(comm, &whole));
                let a = comm.start_scatter(send, recv, root).expect("starts");
                let again = if at_root { keep.buffer(comm, &whole) } else { keep.empty(comm, count) };
                let b = comm.start_scatter_in_place(again, root).expect("starts");
                same(b.wait().expect("works").host(), kept, format_args!("{what}, started in place"));
                same(a.wait().expect("works").1.host(), expected, format_args!("{what}, started"));
            });
        }
    }
}

fn all_to_all<T: Sample>(comm: &Communicator, sizes: Sizes<'_>) {
    let (rank, n) = (comm.rank(), comm.size());
    for (s, &count) in sizes.each() {
        let all = everyone::<T>(count + 8, n, n * count);
        let slices: Vec<&[T]> = all.iter().map(Vec::as_slice).collect();
        let expected = oracle::all_to_all(&slices, rank);
        for turn in 0..3 {
            let call = Call::new(Kind::AllToAll, T::DTYPE, count);
            algorithms(comm, call, s + turn, |keep, how| {
                let what = format!("all_to_all of {count} {}, {keep:?}, {how}", T::DTYPE);
                let send = keep.buffer(comm, &all[rank]);
                let mut recv = keep.empty(comm, n * count);
                comm.all_to_all(&send, &mut recv).expect("works");
                same(recv.host(), &expected, &what);
                let mut data = keep.buffer(comm, &all[rank]);
                comm.all_to_all_in_place(&mut data).expect("works");
                same(data.host(), &expected, format_args!("{what}, in place"));
                // One rank in place, another not, is one call too.
                if rank % 2 == 0 {
                    recv.host_mut().fill(T::default());
                    comm.all_to_all(&send, &mut recv).expect("works");
                } else {
                    data.host_mut().copy_from_slice(&all[rank]);
                    comm.all_to_all_in_place(&mut data).expect("works");
                }
                let found = if rank % 2 == 0 { &recv } else { &data };
                same(found.host(), &expected, format_args!("{what}, mixed"));
                dawdle(comm, s);
                recv.host_mut().fill(T::default());
                data.host_mut().copy_from_slice(&all[rank]);
                let a = comm.start_all_to_all(send, recv).expect("starts");
                let b = comm.start_all_to_all_in_place(data).expect("starts");
                same(b.wait().expect("works").host(), &expected, format_args!("{what}, started in place"));
                same(a.wait().expect("works").1.host(), &expected, format_args!("{what}, started"));
            });
        }
    }
}

/// Of a clock that all processes of a host share.
fn nanoseconds() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Nobody leaves a barrier before the last has entered, by the clock of the host: each round, one rank comes late.
fn barrier(comm: Communicator) {
    let n = comm.size();
    for step in 0..3 * n {
        algorithms(&comm, Call::new(Kind::Barrier, DType::U8, 0), step, |_, _| {
            if comm.rank() == step % n {
                std::thread::sleep(std::time::Duration::from_micros(200));
            }
            let mut last = [nanoseconds()];
            match step % 2 {
                0 => comm.barrier().expect("works"),
                _ => comm.start_barrier().expect("starts").wait().expect("works"),
            }
            let left = nanoseconds();
            comm.all_reduce_in_place(&mut last[..], ReduceOp::Max).expect("works");
            assert!(left >= last[0], "left {} ns before the last had entered", last[0] - left);
        });
    }
}
