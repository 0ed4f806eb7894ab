//! Calls in an order that nobody thought of: kinds, types, lengths and roots at random, several in flight, ended in any order
//! or not at all, on a group and on groups made from it, with messages in between. What is drawn depends on the seed alone,
//! so that a failure can be had again: `CARAVAN_TEST_SEEDS=7..8`.

mod bursts;

use super::{Keep, Part, Sample, data, dawdle, everyone, same};
use bursts::{Later, burst};
use collectives::schedule::Kind;
use collectives::{Buffer, Communicator, Pending, Priority, ReduceOp, Result, bf16, f16, mix, oracle};

pub(super) const CASES: &[Part] = &[("random calls in flight", |comm| seeds(comm, 600))];

/// With messages of which most go in pieces.
pub(super) const PIECES: &[Part] = &[("random calls in pieces", |comm| seeds(comm, 2000))];

/// With lengths that real calls have.
pub(super) const LARGE: &[Part] = &[("random large calls in flight", |comm| seeds(comm, 60_000))];

/// Steps for each seed.
const STEPS: usize = 60;
/// Groups at once, with the first.
const GROUPS: usize = 4;

/// Random numbers (splitmix64).
struct Draw(u64);

impl Draw {
    /// Its own for each of these.
    fn of(seed: usize, step: usize, rank: usize) -> Draw {
        let mut draw = Draw(seed as u64);
        for part in [step, rank] {
            draw.0 = draw.next() ^ part as u64;
        }
        draw
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    fn of_all<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    /// One of so many ranks, and another.
    fn pair(&mut self, n: usize) -> (usize, usize) {
        let from = self.below(n);
        (from, (from + 1 + self.below(n - 1)) % n)
    }

    /// Short and long ones, now and then none.
    fn length(&mut self, longest: usize) -> usize {
        match self.below(8) {
            0 => self.below(3),
            1..5 => self.below(longest / 16 + 1),
            _ => self.below(longest + 1),
        }
    }
}

/// A started call: waits for it and compares.
type Check = Box<dyn FnOnce()>;

fn seeds(comm: Communicator, longest: usize) {
    let seeds = std::env::var("CARAVAN_TEST_SEEDS").unwrap_or_else(|_| "0..8".into());
    let (first, end) = seeds.split_once("..").expect("seeds as 0..8");
    let number = |text: &str| text.parse::<usize>().expect("a seed");
    let seeds = number(first)..number(end);
    assert!(!seeds.is_empty(), "no seeds: {seeds:?}");
    for seed in seeds {
        random(&comm, seed, longest);
    }
}

fn random(comm: &Communicator, seed: usize, longest: usize) {
    let mut groups = vec![Some(comm.clone())];
    let mut flying: Vec<Check> = Vec::new();
    let mut later: Vec<(usize, Later)> = Vec::new();
    for step in 0..STEPS {
        for (_, then) in later.extract_if(.., |(at, _)| *at == step) {
            flying.extend(then());
        }
        let (mut all, mut own) = (Draw::of(seed, step, usize::MAX), Draw::of(seed, step, comm.rank()));
        let (chosen, action) = (all.below(groups.len()), all.below(20));
        if action == 0 {
            land(&mut flying, &mut own);
        }
        dawdle(comm, own.below(64));
        let Some(group) = groups[chosen].clone() else {
            if action == 0 {
                add(&mut groups, [None, None], &mut all);
            }
            continue;
        };
        match action {
            0 => {
                // Draws of all ranks, so that a group can be told from those that it is not in.
                let place = Draw::of(seed, step, group.rank()).below(3) as u32;
                let part = group.split((place < 2).then_some(place), own.below(3) as i64).expect("works");
                let (low, high) = if place == 0 { (part, None) } else { (None, part) };
                add(&mut groups, [low, high], &mut all);
            }
            1 => {
                let kind = all.of_all(&Kind::ALL);
                let algorithm = match all.below(3) {
                    0 => None,
                    _ => Some(all.of_all(group.algorithms(kind))),
                };
                group.force(kind, algorithm).expect("a candidate");
            }
            2..5 => {
                flying.extend(types!(message, &group, seed * STEPS + step, longest, &mut all, &mut own));
            }
            5..7 => {
                let at = step + 1 + all.below(6);
                let then = types!(burst, &group, seed * STEPS + step, longest, &mut all, &mut own);
                later.extend(then.map(|then| (at, then)));
            }
            _ => flying.extend(types!(collective, &group, seed * STEPS + step, longest, &mut all, &mut own)),
        }
        while flying.len() > own.below(12) {
            let check = flying.remove(own.below(flying.len()));
            // Nobody waits for some; they go on all the same.
            match own.below(12) {
                0 => drop(check),
                _ => check(),
            }
        }
    }
    flying.extend(later.into_iter().flat_map(|(_, then)| then()));
    land(&mut flying, &mut Draw::of(seed, STEPS, comm.rank()));
    for kind in Kind::ALL {
        comm.force(kind, None).expect("no algorithm");
    }
    comm.barrier().expect("works");
}

/// One of the types, the same on all ranks.
macro_rules! types {
    ($run:ident, $comm:expr, $seed:expr, $longest:expr, $all:expr, $own:expr) => {{
        let run = $all.of_all(&[
            $run::<f32>,
            $run::<f64>,
            $run::<f16>,
            $run::<bf16>,
            $run::<i32>,
            $run::<u32>,
            $run::<i64>,
            $run::<u64>,
            $run::<i8>,
            $run::<u8>,
        ]);
        run($comm, $seed, $longest, $all, $own)
    }};
}
use types;

/// Waits for all calls in flight, in some order.
fn land(flying: &mut Vec<Check>, own: &mut Draw) {
    while !flying.is_empty() {
        flying.remove(own.below(flying.len()))();
    }
}

/// Room for more groups is made by giving up others, never the first.
fn add(groups: &mut Vec<Option<Communicator>>, more: [Option<Communicator>; 2], all: &mut Draw) {
    for group in more {
        if groups.len() == GROUPS {
            groups.remove(1 + all.below(GROUPS - 1));
        }
        groups.push(group);
    }
}

/// A call with one buffer, carried out at once or started.
fn one<T: Sample>(
    blocking: bool,
    mut data: Buffer<T>,
    call: impl FnOnce(&mut Buffer<T>) -> Result<()>,
    start: impl FnOnce(Buffer<T>) -> Result<Pending<Buffer<T>>>,
    check: impl FnOnce(&[T]) + 'static,
) -> Option<Check> {
    if blocking {
        call(&mut data).expect("works");
        check(data.host());
        return None;
    }
    let started = start(data).expect("starts");
    Some(Box::new(move || check(started.wait().expect("works").host())))
}

/// A call that brings one buffer and fills another.
fn two<S: Send + 'static, R: Send + 'static>(
    blocking: bool,
    (mut send, mut recv): (S, R),
    call: impl FnOnce(&mut S, &mut R) -> Result<()>,
    start: impl FnOnce(S, R) -> Result<Pending<(S, R)>>,
    check: impl FnOnce(&S, &R) + 'static,
) -> Option<Check> {
    if blocking {
        call(&mut send, &mut recv).expect("works");
        check(&send, &recv);
        return None;
    }
    let started = start(send, recv).expect("starts");
    Some(Box::new(move || {
        let (send, recv) = started.wait().expect("works");
        check(&send, &recv);
    }))
}

fn message<T: Sample>(
    comm: &Communicator,
    seed: usize,
    longest: usize,
    all: &mut Draw,
    own: &mut Draw,
) -> Option<Check> {
    let (rank, n) = (comm.rank(), comm.size());
    if n == 1 {
        return None;
    }
    let ((from, to), tag) = (all.pair(n), all.below(3) as u32);
    let sent = data::<T>(seed, from, all.length(longest));
    let (blocking, keep) = (own.below(2) == 0, own.of_all(&Keep::ALL));
    let what = format!("call {seed}, {} {} from {from} to {to}, tag {tag}", sent.len(), T::DTYPE);
    if rank == from {
        let buffer = keep.buffer(comm, &sent);
        return one(
            blocking,
            buffer,
            |data| comm.send(&*data, to, tag),
            |data| comm.start_send(data, to, tag),
            move |kept| same(kept, &sent, what),
        );
    }
    if rank == to {
        let buffer = keep.empty(comm, sent.len());
        return one(
            blocking,
            buffer,
            |data| comm.recv(data, from, tag),
            |data| comm.start_recv(data, from, tag),
            move |found| same(found, &sent, what),
        );
    }
    None
}

fn collective<T: Sample>(
    comm: &Communicator,
    seed: usize,
    longest: usize,
    all: &mut Draw,
    own: &mut Draw,
) -> Option<Check> {
    let (rank, n) = (comm.rank(), comm.size());
    let kind = all.of_all(&Kind::COLLECTIVES);
    let (op, root, wide) = (all.of_all(&ReduceOp::ALL), all.below(n), all.below(3) == 0);
    let divided = matches!(kind, Kind::ReduceScatter | Kind::AllGather | Kind::AllToAll)
        || matches!(kind, Kind::Gather | Kind::Scatter);
    let count = all.length(if divided { longest / n } else { longest });
    // Of these every rank thinks for itself.
    let (blocking, in_place) = (own.below(2) == 0, own.below(2) == 0);
    let (keep, priority) = (own.of_all(&Keep::ALL), own.of_all(&[Priority::High, Priority::Low]));
    let comm = &comm.with_priority(priority);
    let what = format!(
        "call {seed}, rank {rank} of {n}, {kind} of {count} {}, {op}, root {root}, {keep:?}, in place: {in_place}, wide: {wide}",
        T::DTYPE
    );
    let at_root = rank == root;
    let own_part = rank * count..(rank + 1) * count;
    match kind {
        Kind::ReduceScatter => {
            let all = everyone::<T>(seed, n, n * count);
            let shards: Vec<&[T]> = all.iter().map(|x| &x[own_part.clone()]).collect();
            let shard = oracle::reduce(op, &shards);
            let data = keep.buffer(comm, &all[rank]);
            if wide {
                let shard = oracle::reduce_wide(op, &shards);
                return two(
                    blocking,
                    (data, keep.empty(comm, count)),
                    |send, recv| comm.reduce_scatter_acc(&*send, recv, op),
                    |send, recv| comm.start_reduce_scatter_acc(send, recv, op),
                    move |_, recv| same(recv.host(), &shard, what),
                );
            }
            if in_place {
                let mut whole = all[rank].clone();
                whole[own_part].copy_from_slice(&shard);
                return one(
                    blocking,
                    data,
                    |data| comm.reduce_scatter_in_place(data, op),
                    |data| comm.start_reduce_scatter_in_place(data, op),
                    move |found| same(found, &whole, what),
                );
            }
            two(
                blocking,
                (data, keep.empty(comm, count)),
                |send, recv| comm.reduce_scatter(&*send, recv, op),
                |send, recv| comm.start_reduce_scatter(send, recv, op),
                move |_, recv| same(recv.host(), &shard, what),
            )
        }
        Kind::AllGather => {
            let all = everyone::<T>(seed, n, count);
            let whole = all.concat();
            let mut data = keep.empty(comm, n * count);
            if in_place {
                data.host_mut()[own_part].copy_from_slice(&all[rank]);
                return one(
                    blocking,
                    data,
                    |data| comm.all_gather_in_place(data),
                    |data| comm.start_all_gather_in_place(data),
                    move |found| same(found, &whole, what),
                );
            }
            two(
                blocking,
                (keep.buffer(comm, &all[rank]), data),
                |send, recv| comm.all_gather(&*send, recv),
                |send, recv| comm.start_all_gather(send, recv),
                move |_, recv| same(recv.host(), &whole, what),
            )
        }
        Kind::AllReduce => {
            let all = everyone::<T>(seed, n, count);
            let sums = oracle::reduce(op, &all.iter().map(Vec::as_slice).collect::<Vec<_>>());
            let data = keep.buffer(comm, &all[rank]);
            if in_place {
                return one(
                    blocking,
                    data,
                    |data| comm.all_reduce_in_place(data, op),
                    |data| comm.start_all_reduce_in_place(data, op),
                    move |found| same(found, &sums, what),
                );
            }
            two(
                blocking,
                (data, keep.empty(comm, count)),
                |send, recv| comm.all_reduce(&*send, recv, op),
                |send, recv| comm.start_all_reduce(send, recv, op),
                move |_, recv| same(recv.host(), &sums, what),
            )
        }
        Kind::Broadcast => {
            let whole = data::<T>(seed, root, count);
            let mine = if at_root { keep.buffer(comm, &whole) } else { keep.empty(comm, count) };
            one(
                blocking,
                mine,
                |data| comm.broadcast(data, root),
                |data| comm.start_broadcast(data, root),
                move |found| same(found, &whole, what),
            )
        }
        Kind::Reduce => {
            let all = everyone::<T>(seed, n, count);
            let sums = oracle::reduce(op, &all.iter().map(Vec::as_slice).collect::<Vec<_>>());
            let data = keep.buffer(comm, &all[rank]);
            if in_place {
                let kept = if at_root { sums } else { all[rank].clone() };
                return one(
                    blocking,
                    data,
                    |data| comm.reduce_in_place(data, op, root),
                    |data| comm.start_reduce_in_place(data, op, root),
                    move |found| same(found, &kept, what),
                );
            }
            two(
                blocking,
                (data, at_root.then(|| keep.empty(comm, count))),
                |send, recv| comm.reduce(&*send, recv.as_mut().map(Buffer::view_mut), op, root),
                |send, recv| comm.start_reduce(send, recv, op, root),
                move |_, recv| recv.iter().for_each(|recv| same(recv.host(), &sums, &what)),
            )
        }
        Kind::Gather => {
            let all = everyone::<T>(seed, n, count);
            let whole = all.concat();
            if in_place {
                let mut mine = all[rank].clone();
                if at_root {
                    mine = vec![T::default(); n * count];
                    mine[own_part].copy_from_slice(&all[rank]);
                }
                let kept = if at_root { whole } else { mine.clone() };
                return one(
                    blocking,
                    keep.buffer(comm, &mine),
                    |data| comm.gather_in_place(data, root),
                    |data| comm.start_gather_in_place(data, root),
                    move |found| same(found, &kept, what),
                );
            }
            two(
                blocking,
                (keep.buffer(comm, &all[rank]), at_root.then(|| keep.empty(comm, n * count))),
                |send, recv| comm.gather(&*send, recv.as_mut().map(Buffer::view_mut), root),
                |send, recv| comm.start_gather(send, recv, root),
                move |_, recv| recv.iter().for_each(|recv| same(recv.host(), &whole, &what)),
            )
        }
        Kind::Scatter => {
            let whole = data::<T>(seed, root, n * count);
            let block = whole[own_part].to_vec();
            if in_place {
                let mine = if at_root { keep.buffer(comm, &whole) } else { keep.empty(comm, count) };
                let kept = if at_root { whole } else { block };
                return one(
                    blocking,
                    mine,
                    |data| comm.scatter_in_place(data, root),
                    |data| comm.start_scatter_in_place(data, root),
                    move |found| same(found, &kept, what),
                );
            }
            two(
                blocking,
                (at_root.then(|| keep.buffer(comm, &whole)), keep.empty(comm, count)),
                |send, recv| comm.scatter(send.as_ref().map(Buffer::view), recv, root),
                |send, recv| comm.start_scatter(send, recv, root),
                move |_, recv| same(recv.host(), &block, what),
            )
        }
        Kind::AllToAll => {
            let all = everyone::<T>(seed, n, n * count);
            let blocks = oracle::all_to_all(&all.iter().map(Vec::as_slice).collect::<Vec<_>>(), rank);
            let data = keep.buffer(comm, &all[rank]);
            if in_place {
                return one(
                    blocking,
                    data,
                    |data| comm.all_to_all_in_place(data),
                    |data| comm.start_all_to_all_in_place(data),
                    move |found| same(found, &blocks, what),
                );
            }
            two(
                blocking,
                (data, keep.empty(comm, n * count)),
                |send, recv| comm.all_to_all(&*send, recv),
                |send, recv| comm.start_all_to_all(send, recv),
                move |_, recv| same(recv.host(), &blocks, what),
            )
        }
        _ if blocking => {
            comm.barrier().expect("works");
            None
        }
        _ => {
            let started = comm.start_barrier().expect("starts");
            Some(Box::new(move || started.wait().expect("works")))
        }
    }
}
