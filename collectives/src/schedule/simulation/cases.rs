//! Every collective by every algorithm between 6 and 64 ranks.

use super::super::{Algorithm, Call, Group, Kind, Local, Schedule, Space, Step, Tuning};
use super::{Simulation, Symbols, element, mix};
use crate::element::DType;
use crate::transport::{Nodes, Tells};
use std::sync::Arc;

/// Elements that `rank` passes in and gets back, of which it needs those that it has no use for nowhere.
fn lengths(call: &Call, rank: usize, size: usize) -> (usize, usize) {
    let (count, all, at_root) = (call.count, call.count * size, rank == call.root);
    match call.kind {
        Kind::ReduceScatter => (all, count),
        Kind::AllGather => (count, all),
        Kind::AllToAll => (all, all),
        Kind::Gather => (count, if at_root { all } else { 0 }),
        Kind::Scatter => (if at_root { all } else { 0 }, count),
        Kind::Reduce => (count, if at_root { count } else { 0 }),
        _ => (count, count),
    }
}

/// Where in the one buffer of an in-place call `rank` has what it passes in, and where what it gets, by elements.
fn places(call: &Call, rank: usize) -> (usize, usize) {
    let (own, at_root) = (rank * call.count, rank == call.root);
    match call.kind {
        _ if !call.in_place => (0, 0),
        Kind::AllGather => (own, 0),
        Kind::Gather if at_root => (own, 0),
        Kind::ReduceScatter => (0, own),
        Kind::Scatter if at_root => (0, own),
        _ => (0, 0),
    }
}

/// Buffers with what `rank` passes in; what else is in them is of no call.
fn buffers(call: &Call, rank: usize, size: usize) -> [Vec<u8>; 2] {
    let (symbols, element) = (Symbols { dtype: call.dtype }, call.dtype.size());
    let ((send, receive), (input, _)) = (lengths(call, rank, size), places(call, rank));
    let old = |elements: usize| (0..elements).map(|i| mix((rank + i) as u64) as u8).collect::<Vec<u8>>();
    let (mut sends, receives) = match call.in_place {
        true => (old((input + send).max(receive) * element), Vec::new()),
        false => (old(send * element), old(receive * call.out_size())),
    };
    if call.kind != Kind::Broadcast || rank == call.root {
        for (i, place) in sends[input * element..].chunks_mut(element).take(send).enumerate() {
            place.copy_from_slice(&symbols.given(rank, i).to_le_bytes()[..element]);
        }
    }
    if call.in_place { [Vec::new(), sends] } else { [sends, receives] }
}

/// What `rank` has to get, as far as it gets anything.
fn expected(call: &Call, rank: usize, size: usize) -> Vec<u64> {
    let (symbols, count) = (Symbols { dtype: call.dtype }, call.count);
    let sum = |i: usize| symbols.tree(&(0..size).map(|r| symbols.given(r, i)).collect::<Vec<u64>>());
    let of_all =
        |from: usize| (0..size).flat_map(move |r| (from..from + count).map(move |i| symbols.given(r, i)));
    let own = rank * count;
    let values: Vec<u64> = match call.kind {
        Kind::ReduceScatter => (own..own + count).map(sum).collect(),
        Kind::AllReduce => (0..count).map(sum).collect(),
        Kind::Reduce if rank == call.root => (0..count).map(sum).collect(),
        Kind::AllGather => of_all(0).collect(),
        Kind::Gather if rank == call.root => of_all(0).collect(),
        Kind::AllToAll => of_all(own).collect(),
        Kind::Broadcast => (0..count).map(|i| symbols.given(call.root, i)).collect(),
        Kind::Scatter => (own..own + count).map(|i| symbols.given(call.root, i)).collect(),
        _ => Vec::new(),
    };
    values.into_iter().map(|x| Symbols::kept(x, call.out_size())).collect()
}

/// Carries `call` out between ranks of this group and compares what each gets. `turn` is of the case: it decides in which
/// order ranks have their turns, and whose buffers peers can read where they are.
fn carry(call: Call, group: &Group, algorithm: Algorithm, turn: usize) -> Simulation {
    carry_changed(call, group, algorithm, turn, |_| ())
}

/// Makes another schedule of one.
type Change = fn(&mut Schedule);

/// The same, where `change` makes something else of the schedule of rank 3.
fn carry_changed(call: Call, group: &Group, algorithm: Algorithm, turn: usize, change: Change) -> Simulation {
    let size = group.size;
    let schedule = |rank: usize| {
        let local = Local {
            send_registered: (rank + turn).is_multiple_of(2),
            recv_registered: (rank / 2 + turn).is_multiple_of(2),
        };
        // One buffer is either or not.
        let local =
            if call.in_place { Local { recv_registered: local.send_registered, ..local } } else { local };
        let mut schedule = Schedule::new(call, &Group { rank, ..group.clone() }, local, Some(algorithm));
        assert_eq!(schedule.choice.algorithm, algorithm, "what carries {call} of rank {rank}");
        if rank == 3 {
            change(&mut schedule);
        }
        schedule
    };
    let buffers = (0..size).map(|rank| buffers(&call, rank, size)).collect();
    let mut all = Simulation::new((0..size).map(schedule).collect(), buffers);
    let mut order: Vec<usize> = (0..size).collect();
    match turn % 3 {
        0 => {}
        1 => order.reverse(),
        _ => order.sort_by_key(|&rank| mix((rank + turn) as u64)),
    }
    let what = format!("{call} in place {} by {algorithm} between {size}, {:?}", call.in_place, group.nodes);
    if call.kind == Kind::Barrier {
        let late = turn % size;
        all.run(&order, turn.is_multiple_of(2), Some(late));
        assert!(
            (0..size).all(|rank| !all.is_done(rank)),
            "{what}: somebody leaves before rank {late} has entered"
        );
    }
    all.run(&order, turn.is_multiple_of(2), None);
    for rank in 0..size {
        let (at, steps) = (all.ranks[rank].at, all.ranks[rank].schedule.steps.len());
        assert!(all.is_done(rank), "{what}: rank {rank} waits for ever in step {at} of {steps}");
        assert!(all.ranks[rank].posted.is_empty(), "{what}: rank {rank} leaves what is under way");
        let ((_, place), bytes) = (places(&call, rank), call.out_size());
        let expected = expected(&call, rank, size);
        let result = &all.ranks[rank].memory[1][place * bytes..];
        let wrong = expected.iter().enumerate().find(|&(i, &x)| element(result, bytes, i) != x);
        assert_eq!(wrong, None, "{what}: on rank {rank}");
    }
    all
}

/// Few bytes a round, so that short calls have several.
fn tuning() -> Tuning {
    Tuning {
        staging: 2048,
        round: 2048,
        window: 1024,
        windowed: 1024,
        piece: 64,
        frame: 64,
        ..Tuning::default()
    }
}

/// What ranks may be joined by, with as many nodes as make a difference.
fn groups(size: usize) -> Vec<Group> {
    let plain = Group { tuning: tuning(), ..Group::plain(0, size) };
    let nodes = |nodes: Nodes| Group { nodes: Some(Arc::new(nodes)), ..plain.clone() };
    let dealt: Vec<usize> = (0..size).map(|rank| rank % 5).collect();
    let uneven: Vec<usize> = (0..size).map(|rank| rank * rank / 7 % 4).collect();
    vec![
        plain.clone(),
        Group { tells: Tells::Collectives, ..plain.clone() },
        Group { direct: Some(0), ..plain.clone() },
        Group { direct: Some(256), ..plain.clone() },
        // Several of them.
        nodes(Nodes::blocks(size, 8.min(size / 2)).unwrap()),
        nodes(Nodes::of(&dealt)),
        nodes(Nodes::of(&uneven)),
    ]
}

/// Goes through all of them between `size` ranks joined in these ways, `all` types of sums by each or one after the other.
fn suite(size: usize, groups: &[Group], all: bool) {
    let mut turn = 0;
    for group in groups {
        for kind in Kind::COLLECTIVES {
            for &algorithm in Algorithm::candidates(kind, group) {
                let types = [DType::F64, DType::Bf16, DType::I32];
                let dtypes = match kind.reduces() {
                    true if all => types.to_vec(),
                    true => vec![types[turn % 3]],
                    false => vec![DType::F64],
                };
                for dtype in dtypes {
                    turn += 1;
                    let few = [0, 1, 5][turn / 3 % 3];
                    let many = if kind.counts_a_part() { 35 } else { 7 * size + 3 };
                    for (count, in_place) in [(few, turn % 4 < 2), (many, turn % 4 >= 2)] {
                        let count = if kind == Kind::Barrier { 0 } else { count };
                        let in_place = in_place || kind == Kind::Broadcast;
                        let root = if kind.rooted() { turn % size } else { 0 };
                        let wide = kind == Kind::ReduceScatter && dtype == DType::Bf16 && !in_place;
                        let call = Call { root, in_place, wide, ..Call::new(kind, dtype, count) };
                        let all = carry(call, group, algorithm, turn);
                        // Who exchanges in rounds has two of them under way.
                        let most = all.ranks.iter().map(|rank| rank.most).max().unwrap_or(0);
                        let rounds = matches!(kind, Kind::AllToAll | Kind::ReduceScatter)
                            && algorithm == Algorithm::Pairwise;
                        let counted = all.ranks.iter().all(|rank| rank.most <= rank.schedule.posted);
                        assert!(counted, "messages of {call} that are under way are counted");
                        assert!(!rounds || most <= 6 * (size - 1), "{most} messages of {call} at once");
                    }
                }
            }
        }
    }
}

/// Powers of two, their neighbours, and what is a multiple of several of them.
#[test]
fn all_algorithms_between_6_to_16_ranks() {
    for size in [6, 7, 8, 12, 13, 15, 16] {
        suite(size, &groups(size), false);
    }
}

#[test]
fn all_algorithms_between_17_ranks() {
    suite(17, &groups(17), true);
}

#[test]
fn all_algorithms_between_64_ranks() {
    let groups = groups(64);
    suite(64, &[groups[0].clone(), groups[2].clone(), groups[4].clone(), groups[6].clone()], false);
}

#[test]
fn what_is_wrong_is_found() {
    fn at(schedule: &Schedule, is: fn(&Step) -> bool) -> usize {
        schedule.steps.iter().rposition(is).expect("such a step")
    }
    fn leave_out(schedule: &mut Schedule, is: fn(&Step) -> bool) {
        let last = at(schedule, is);
        schedule.steps.remove(last);
    }
    let changes: [(&str, Change); 6] = [
        ("a wait left out", |s| leave_out(s, |step| matches!(step, Step::Wait { .. }))),
        ("a message left out", |s| leave_out(s, |step| matches!(step, Step::Send { .. }))),
        ("a sum left out", |s| leave_out(s, |step| matches!(step, Step::Reduce { .. }))),
        ("a sum in another order", |s| s.operands.swap(0, 1)),
        ("what another rank should get", |s| {
            let sent = |step: &mut Step| match step {
                Step::Frame { payload: span, .. } | Step::Send { span, .. } if span.space == Space::Send => {
                    span.offset = 0;
                }
                _ => {}
            };
            s.steps.iter_mut().for_each(sent);
        }),
        ("a place for two messages", |s| {
            let window = at(s, |step| matches!(step, Step::Recv { span, .. } if span.space == Space::Recv));
            let Step::Recv { span: place, .. } = s.steps[window] else { unreachable!("just found") };
            for step in &mut s.steps {
                if let Step::Recv { span, .. } = step
                    && span.space == Space::Recv
                    && span.bytes == place.bytes
                {
                    *span = place;
                }
            }
        }),
    ];
    let group = Group { tuning: tuning(), ..Group::plain(0, 17) };
    let call = Call::new(Kind::AllReduce, DType::F64, 7 * 17);
    let algorithm = Algorithm::PairwiseReduceScatterAllGather;
    carry(call, &group, algorithm, 0);
    for (what, change) in changes {
        let found = std::panic::catch_unwind(|| drop(carry_changed(call, &group, algorithm, 0, change)));
        assert!(found.is_err(), "{what} passes for right");
    }
}
