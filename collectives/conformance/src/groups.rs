//! Groups made from a group.

use super::every::every;
use super::{Keep, Part, same};
use collectives::schedule::{Call, Kind};
use collectives::{Buffer, Communicator, DType, ReduceOp};

pub(super) const CASES: &[Part] = &[
    ("split", split),
    ("nested groups", nested),
    ("two groups in flight", two_in_flight),
    ("a group that goes", going),
];

/// With default sizes: what is long is still on its way.
pub(super) const LARGE: &[Part] = &[("a group formed meanwhile", meanwhile)];

/// Checks a group whose rank r is rank `members[r]` of the first, by every collective, with the first and the last as root.
fn works(comm: &Communicator, members: &[usize]) {
    assert_eq!(comm.size(), members.len());
    for (i, kind) in Kind::COLLECTIVES.into_iter().enumerate() {
        for root in [0, members.len() - 1] {
            let call = Call { root, ..Call::new(kind, DType::F32, 600) };
            every::<f32>(comm, members, call, Keep::ALL[i % 3]);
            let call = Call { root, op: ReduceOp::Max, ..Call::new(kind, DType::U64, 5) };
            every::<u64>(comm, members, call, Keep::ALL[(i + 1) % 3]);
        }
    }
}

fn split(comm: Communicator) {
    let (rank, n) = (comm.rank(), comm.size());
    for turn in 0..3 {
        // Odd and even, in reverse order.
        let color = rank as u32 % 2;
        let half = comm.split(Some(color), -(rank as i64)).expect("works").expect("a color was given");
        let members: Vec<usize> = (0..n).rev().filter(|r| r % 2 == color as usize).collect();
        works(&half, &members);
        // Equal keys keep the order of ranks; rank 0 stays out.
        let rest = comm.split((rank > 0).then_some(7), 0).expect("works");
        assert_eq!(rest.is_none(), rank == 0);
        // Groups work at once, in different orders of calls.
        if let Some(rest) = rest {
            works(&rest, &(1..n).collect::<Vec<usize>>());
        }
        works(&half, &members);
        works(&comm, &(0..n).collect::<Vec<usize>>());
        assert!(comm.split(None, turn).expect("works").is_none());
    }
}

/// Some ranks wait first in the one group and then in the other, the rest the other way round: who waits in one must move
/// the other on.
fn two_in_flight(comm: Communicator) {
    let (rank, n) = (comm.rank(), comm.size());
    let other = comm.split(Some(0), 0).expect("works").expect("a color was given");
    for turn in 0..20 {
        let sums = |comm: &Communicator| {
            let started = comm.start_all_reduce_in_place(Buffer::copy_of(&[1u64; 2000]), ReduceOp::Sum);
            let started = started.expect("starts");
            move || {
                same(started.wait().expect("works").host(), &[n as u64; 2000], format_args!("turn {turn}"))
            }
        };
        let (here, there) = (sums(&comm), sums(&other));
        if (rank + turn) % 2 == 0 {
            here();
            there();
        } else {
            there();
            here();
        }
    }
}

/// Some ranks drop a group, and a call of it, before they wait in another: the rest come to that call only afterwards.
fn going(comm: Communicator) {
    let (rank, n) = (comm.rank(), comm.size());
    let start = |comm: &Communicator| {
        comm.start_all_reduce_in_place(Buffer::copy_of(&[1u64; 2000]), ReduceOp::Sum).expect("starts")
    };
    for turn in 0..4 {
        let gone = comm.split(Some(0), 0).expect("works").expect("a color was given");
        let sum = start(&comm);
        if (rank + turn) % 2 == 0 {
            drop(start(&gone));
            drop(gone);
            same(sum.wait().expect("works").host(), &[n as u64; 2000], format_args!("turn {turn}"));
        } else {
            same(sum.wait().expect("works").host(), &[n as u64; 2000], format_args!("turn {turn}"));
            let sum = start(&gone).wait().expect("works");
            same(sum.host(), &[n as u64; 2000], format_args!("turn {turn}, the group that goes"));
        }
    }
}

/// A group's first call, whose messages may not all be posted yet, is under way while some of its ranks form another.
fn meanwhile(comm: Communicator) {
    let (rank, n) = (comm.rank(), comm.size());
    for turn in 0..8u8 {
        let group = comm.split(Some(0), 0).expect("works").expect("a color was given");
        let whole = vec![turn + 1; 2 << 20];
        let given = if rank == 0 { Buffer::copy_of(&whole) } else { Buffer::zeroed(whole.len()) };
        let under_way = group.start_broadcast(given, 0).expect("starts");
        let rest = group.split((rank > 0).then_some(7), 0).expect("works");
        if let Some(rest) = rest {
            works(&rest, &(1..n).collect::<Vec<usize>>());
        }
        same(under_way.wait().expect("works").host(), &whole, format_args!("turn {turn}"));
    }
}

fn nested(comm: Communicator) {
    let (rank, n) = (comm.rank(), comm.size());
    let low = rank < n.div_ceil(2);
    let part = comm.split(Some(u32::from(low)), 0).expect("works").expect("a color was given");
    let same_color = comm.clone().split(Some(0), 0).expect("works").expect("a color was given");
    let members: Vec<usize> = (0..n).filter(|r| (*r < n.div_ceil(2)) == low).collect();
    let inner = part.split(Some(part.rank() as u32 % 2), 0).expect("works").expect("a color was given");
    let inner_members: Vec<usize> =
        members.iter().enumerate().filter(|(i, _)| i % 2 == part.rank() % 2).map(|(_, &m)| m).collect();
    drop(comm);
    works(&inner, &inner_members);
    works(&part, &members);
    drop(part);
    works(&inner, &inner_members);
    works(&same_color, &(0..n).collect::<Vec<usize>>());
}
