//! What goes wrong on one rank becomes an error on every rank, and never a hang.

use super::{small, standard};
use collectives::schedule::{Algorithm, Kind};
use collectives::{Communicator, Error, Options, ReduceOp, Result};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

type Failing = (&'static str, fn(Communicator), fn() -> Options);

pub(super) const CASES: &[Failing] = &[
    ("different kinds", |c| diverge(c, "all_reduce of 10 f32, sum", "all_gather of 10 f32", kinds), small),
    (
        "different counts",
        |c| diverge(c, "all_reduce of 10 f32, sum", "all_reduce of 11 f32, sum", counts),
        small,
    ),
    (
        "different large counts",
        |c| diverge(c, "reduce_scatter of 5000 f32", "reduce_scatter of 10000 f32", large_counts),
        standard,
    ),
    (
        "different kinds of middling size",
        |c| diverge(c, "all_gather of 2048 f32", "all_to_all of 2048 f32", middling_kinds),
        standard,
    ),
    (
        "different types from a root",
        |c| diverge(c, "broadcast of 3000 f32, root 0", "broadcast of 3000 i32, root 0", types_from_a_root),
        standard,
    ),
    ("different types", |c| diverge(c, "all_reduce of 8 f32, sum", "all_reduce of 8 u32, sum", types), small),
    (
        "different operations",
        |c| diverge(c, "all_reduce of 9 f32, sum", "all_reduce of 9 f32, max", ops),
        small,
    ),
    (
        "different counts over messages",
        |c| diverge(c, "all_reduce of 10 f32, sum", "all_reduce of 11 f32, sum", counts_over_messages),
        standard,
    ),
    (
        "different lengths of a message",
        |c| diverge(c, "a message of 11 f32", "a message of 10 f32", lengths),
        standard,
    ),
    (
        "a long message for a short one",
        |c| diverge(c, "a message of 11 f32", "a message of 9000 f32", long_for_short),
        small,
    ),
    (
        "a long call for a short one",
        |c| diverge(c, "all_gather of 9000 f32", "all_gather of 11 f32", long_counts),
        small,
    ),
    (
        "a message of nothing",
        |c| diverge(c, "a message of 3000 f32", "a message of 0 f32", nothing_for_something),
        standard,
    ),
    (
        "a root that has nothing",
        |c| diverge(c, "broadcast of 3000 f32", "broadcast of 0 f32", nothing_from_a_root),
        standard,
    ),
    (
        "different roots",
        |c| diverge(c, "broadcast of 10 f32, root 0", "broadcast of 10 f32, root ", roots),
        small,
    ),
    ("different kinds in a part", kinds_in_a_part, small),
    ("a rank that leaves", leaves, small),
    // Pieces of a message would go at once, however long it is.
    ("a rank that leaves messages", leaves_messages, standard),
    ("a rank that leaves a part", |c| leaves_part(c, gather), small),
    ("a rank that leaves messages of a part", |c| leaves_part(c, receive), small),
    ("a failure in another group", another_group, small),
    ("a silent rank", |c| silent(&c, &c, sum, "all_reduce of 3 f32"), impatient),
    ("a rank that is silent for two threads", |c| silent(&c, &c, two_receive, "recv of 100 u8"), impatient),
    (
        "a rank that is silent in a part",
        |c| silent_in_a_part(c, sum, |_| "all_reduce of 3 f32".into()),
        impatient,
    ),
    (
        "a rank that sends nothing in a part",
        |c| silent_in_a_part(c, receive, |last| format!("recv of 100 u8 from rank {last}")),
        impatient,
    ),
    ("a chain of ranks that wait for a silent one", chain, impatient),
    ("the same from group to group", chain_of_groups, impatient),
    ("poisoned", poisoned, small),
];

/// Long enough for ranks that share processors to answer, which they have a quarter of it for.
const DEADLINE: Duration = Duration::from_secs(2);

fn impatient() -> Options {
    Options { deadline: DEADLINE, ..small() }
}

/// The last rank calls something else; every rank gets an error, and somebody's names both sides.
fn diverge(comm: Communicator, ours: &str, theirs: &str, call: fn(&Communicator, bool) -> Result<()>) {
    let odd = comm.rank() == comm.size() - 1;
    let error = call(&comm, odd).and_then(|()| comm.barrier()).expect_err("ranks diverged");
    let text = error.to_string();
    if let Error::Diverged { rank, peer, .. } = error {
        assert_eq!(rank, comm.job_rank(comm.rank()), "{text}");
        assert!([rank, peer].contains(&comm.job_rank(comm.size() - 1)), "{text}");
    }
    match &error {
        Error::Diverged { .. } | Error::PeerLost { .. } => {
            assert!(text.contains("diverged"), "{text}");
            assert!(text.contains(ours) && text.contains(theirs), "'{text}' names '{ours}' and '{theirs}'");
        }
        _ => panic!("not a divergence: {text}"),
    }
    // Whatever is called now fails in the same way.
    assert_eq!(comm.barrier().expect_err("poisoned").to_string(), text);
}

fn kinds(comm: &Communicator, odd: bool) -> Result<()> {
    match odd {
        false => comm.all_reduce_in_place(&mut [1f32; 10][..], ReduceOp::Sum),
        true => comm.all_gather(&[1f32; 10][..], &mut vec![0f32; 10 * comm.size()][..]),
    }
}

/// The rank that calls something else is the first of the job.
fn kinds_in_a_part(comm: Communicator) {
    match reversed(&comm) {
        Ok(part) => diverge(part, "all_reduce of 10 f32, sum", "all_gather of 10 f32", kinds),
        // Others have the part already, and have come to the end of it.
        Err(error) => assert!(error.to_string().contains("diverged"), "{error}"),
    }
}

fn counts(comm: &Communicator, odd: bool) -> Result<()> {
    comm.all_reduce_in_place(&mut vec![1f32; 10 + usize::from(odd)][..], ReduceOp::Sum)
}

fn counts_over_messages(comm: &Communicator, odd: bool) -> Result<()> {
    // Every transport has it, also where others are chosen because peers' memory can be read.
    comm.force(Kind::AllReduce, Some(Algorithm::ExchangeAll))?;
    counts(comm, odd)
}

/// The last rank sends one element less to the first than that one expects: of a longer message some libraries drop all.
fn lengths(comm: &Communicator, odd: bool) -> Result<()> {
    match comm.rank() {
        0 => comm.recv(&mut [0f32; 11][..], comm.size() - 1, 3),
        _ if odd => comm.send(&[1f32; 10][..], 0, 3),
        _ => Ok(()),
    }
}

/// What goes in pieces, where what goes whole is waited for. Of the opposite some libraries drop all, as above.
fn long_for_short(comm: &Communicator, odd: bool) -> Result<()> {
    match comm.rank() {
        0 => comm.recv(&mut [0f32; 11][..], comm.size() - 1, 3),
        _ if odd => comm.send(&[1f32; 9000][..], 0, 3),
        _ => Ok(()),
    }
}

fn long_counts(comm: &Communicator, odd: bool) -> Result<()> {
    let count = if odd { 11 } else { 9000 };
    comm.all_gather(&vec![1f32; count][..], &mut vec![0f32; count * comm.size()][..])
}

/// Of a message of nothing only the fingerprint comes, where fingerprints travel; what is to follow it never does.
fn nothing_for_something(comm: &Communicator, odd: bool) -> Result<()> {
    match comm.rank() {
        0 => comm.recv(&mut [0f32; 3000][..], comm.size() - 1, 3),
        _ if odd => comm.send(&[0f32; 0][..], 0, 3),
        _ => Ok(()),
    }
}

/// The same from a root, with whom some algorithms have no rank's messages but one's.
fn nothing_from_a_root(comm: &Communicator, odd: bool) -> Result<()> {
    let count = if odd { 0 } else { 3000 };
    comm.broadcast(&mut vec![0f32; count][..], comm.size() - 1)
}

/// Nobody waits for the one that takes itself for the root, so this call may end well, and some after it.
fn roots(comm: &Communicator, odd: bool) -> Result<()> {
    comm.broadcast(&mut [1f32; 10][..], if odd { comm.size() - 1 } else { 0 })?;
    (0..200).try_for_each(|_| comm.barrier())
}

fn large_counts(comm: &Communicator, odd: bool) -> Result<()> {
    let count = 5000 * (1 + usize::from(odd)) * comm.size();
    comm.reduce_scatter_in_place(&mut vec![1f32; count][..], ReduceOp::Sum)
}

fn middling_kinds(comm: &Communicator, odd: bool) -> Result<()> {
    let (one, mut all) = (vec![1f32; 2048], vec![0f32; 2048 * comm.size()]);
    match odd {
        false => comm.all_gather(&one[..], &mut all[..]),
        true => comm.all_to_all_in_place(&mut all[..]),
    }
}

fn types_from_a_root(comm: &Communicator, odd: bool) -> Result<()> {
    match odd {
        false => comm.broadcast(&mut vec![1f32; 3000][..], 0),
        true => comm.broadcast(&mut vec![1i32; 3000][..], 0),
    }
}

fn types(comm: &Communicator, odd: bool) -> Result<()> {
    match odd {
        false => comm.all_reduce_in_place(&mut [1f32; 8][..], ReduceOp::Sum),
        true => comm.all_reduce_in_place(&mut [1u32; 8][..], ReduceOp::Sum),
    }
}

fn ops(comm: &Communicator, odd: bool) -> Result<()> {
    let op = if odd { ReduceOp::Max } else { ReduceOp::Sum };
    comm.all_reduce_in_place(&mut [1f32; 9][..], op)
}

/// A rank that ends without a word while others still count on it is named.
fn leaves(comm: Communicator) {
    let works = comm.barrier();
    let last = comm.size() - 1;
    if comm.rank() == last {
        return works.expect("works");
    }
    // Another rank may have noticed, and given up, before this one is out of the barrier.
    let error = works.and_then(|()| gather(&comm)).expect_err("a rank left");
    let text = error.to_string();
    assert!(matches!(error, Error::PeerLost { .. }), "{text}");
    assert!(text.contains(&format!("rank {last}")), "{text}");
}

/// Messages that the last rank leaves without taking, too long for any transport to keep for it, name that rank.
fn leaves_messages(comm: Communicator) {
    let works = comm.barrier();
    let last = comm.size() - 1;
    if comm.rank() == last {
        return works.expect("works");
    }
    let send = || comm.send(&vec![0u8; 4 << 20][..], last, 1);
    let error = works.and_then(|()| send()).expect_err("nobody takes it");
    let text = error.to_string();
    assert!(matches!(error, Error::PeerLost { .. }), "{text}");
    assert!(text.contains(&format!("rank {last}")), "{text}");
}

/// A rank that leaves one group, while it stays in another, is named by those who count on it there.
fn leaves_part(comm: Communicator, wait: fn(&Communicator) -> Result<()>) {
    let part = reversed(&comm).and_then(|part| part.barrier().map(|()| part));
    let last = comm.size() - 1;
    if comm.rank() == last {
        drop(part.expect("works"));
        // They say so: what is learnt from the end of their processes, or at the deadline, comes later.
        let error = comm.barrier().expect_err("the others have given up");
        let later = ["ended (process", "unreachable"].iter().any(|how| error.to_string().contains(how));
        return assert!(!later && matches!(error, Error::PeerLost { .. }), "{error}");
    }
    // Another rank may have noticed, and given up, before this one is out of the barrier.
    let error = part.and_then(|part| wait(&part)).expect_err("a rank left");
    let text = error.to_string();
    assert!(matches!(error, Error::PeerLost { .. }), "{text}");
    assert!(text.contains(&format!("rank {last}")), "{text}");
}

fn gather(comm: &Communicator) -> Result<()> {
    comm.all_gather_in_place(&mut vec![0u8; 600_000 * comm.size()][..])
}

/// From the last rank of the group that was reversed.
fn receive(comm: &Communicator) -> Result<()> {
    comm.recv(&mut [0u8; 100][..], 0, 1)
}

/// Two threads wait for the last rank, each for a message of its own.
fn two_receive(comm: &Communicator) -> Result<()> {
    let receive = |tag| comm.recv(&mut [0u8; 100][..], comm.size() - 1, tag);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| receive(2));
        let mine = receive(1);
        other.join().expect("a thread").and(mine)
    })
}

/// All ranks in the reverse order: errors there name them as everywhere.
fn reversed(comm: &Communicator) -> Result<Communicator> {
    Ok(comm.split(Some(0), -(comm.rank() as i64))?.expect("this rank is in it"))
}

/// A rank that gives one group up, and leaves another in which somebody waits for it, says why there.
fn another_group(comm: Communicator) {
    let group = comm.split(Some(0), 0).and_then(|group| comm.barrier().map(|()| group));
    if comm.rank() == 0 {
        return group.expect("works").expect("a group").abort("the disk is full");
    }
    // A rank that comes out of the barrier late may hear of it there.
    let waited = group.and_then(|_group| match comm.rank() {
        1 => comm.recv(&mut [0u8; 8][..], 0, 1),
        _ => comm.barrier(),
    });
    let text = waited.expect_err("rank 0 gave up").to_string();
    assert!(text.contains("the disk is full"), "{text}");
}

/// A rank that is there but does not take part is named after the deadline.
fn silent(comm: &Communicator, group: &Communicator, wait: fn(&Communicator) -> Result<()>, what: &str) {
    // By files, because who looked at the group meanwhile would answer there.
    static CASES: AtomicU32 = AtomicU32::new(0);
    let mut case = [std::process::id(), CASES.fetch_add(1, Ordering::Relaxed)];
    comm.broadcast(&mut case[..], 0).expect("works");
    let [process, number] = case;
    let heard = |rank| std::env::temp_dir().join(format!("caravan-silent-{process}-{number}-{rank}"));
    group.barrier().expect("works");
    let last = comm.size() - 1;
    if comm.rank() == last {
        let until = Instant::now() + 20 * DEADLINE;
        for rank in 0..last {
            while std::fs::remove_file(heard(rank)).is_err() {
                assert!(Instant::now() < until, "rank {rank} waits for a silent one for ever");
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        assert!(group.barrier().is_err(), "the others have given up");
        return;
    }
    let text = wait(group).expect_err("a rank is silent").to_string();
    std::fs::write(heard(comm.rank()), []).expect("a file");
    assert!(text.contains(&format!("no answer from rank {last} within {DEADLINE:?}")), "{text}");
    assert!(text.contains(what), "{text}");
    // Of somebody nothing has come, though it may be one who waits for the last itself.
    assert!(text.contains("nothing of rank") || what.starts_with("recv"), "{text}");
    assert!(text.contains("; before it came") && text.contains("barrier"), "{text}");
}

/// Whoever the call names is called as everywhere.
fn silent_in_a_part(comm: Communicator, wait: fn(&Communicator) -> Result<()>, what: fn(usize) -> String) {
    silent(&comm, &reversed(&comm).expect("a group"), wait, &what(comm.size() - 1));
}

/// All in one group.
fn chain(comm: Communicator) {
    wait_in_turn(&comm, &comm, comm.rank() + 1);
}

/// Each rank shares a group with the next alone, so that the first cannot ask the last.
fn chain_of_groups(comm: Communicator) {
    let (rank, last) = (comm.rank(), comm.size() - 1);
    let pair = |first| comm.split((first..first + 2).contains(&rank).then_some(0), 0).expect("works");
    let pairs: Vec<_> = (0..last).map(pair).collect();
    let group = pairs[rank.min(last - 1)].as_ref().expect("this rank is in it");
    wait_in_turn(&comm, group, 1);
}

/// Each rank waits in `group` for the `next`, the first of them longest. The last looks whether anything has happened, and
/// takes no part.
fn wait_in_turn(comm: &Communicator, group: &Communicator, next: usize) {
    comm.barrier().expect("works");
    let (rank, last) = (comm.rank(), comm.size() - 1);
    let error = if rank == last {
        let until = Instant::now() + 10 * DEADLINE;
        loop {
            match group.progress() {
                Err(error) => break error,
                Ok(()) => assert!(Instant::now() < until, "rank {rank} never heard that it was missed"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    } else {
        std::thread::sleep(DEADLINE / 8 * rank as u32);
        group.recv(&mut [0u8; 100][..], next, 1).expect_err("the last rank is silent")
    };
    let text = error.to_string();
    assert!(text.contains(&format!("no answer from rank {last} within {DEADLINE:?}")), "{text}");
    if rank == 0 && last > 1 {
        assert!(matches!(error, Error::Timeout { peer, .. } if peer == last), "{text}");
        assert!(text.contains(&format!("rank {} waits as well", last - 1)), "{text}");
        // Some launchers end the job with its first rank; the others come to their own deadlines first.
        std::thread::sleep(DEADLINE / 2);
    }
}

fn sum(comm: &Communicator) -> Result<()> {
    comm.all_reduce_in_place(&mut [0f32; 3][..], ReduceOp::Sum)
}

/// A call in flight when something else fails ends with that failure.
fn poisoned(comm: Communicator) {
    let started = comm.start_all_reduce_in_place(collectives::Buffer::<f32>::zeroed(5000), ReduceOp::Sum);
    let started = match started {
        Ok(started) => started,
        // The others have come to the end of it.
        Err(error) => return assert!(error.to_string().contains("diverged"), "{error}"),
    };
    let odd = comm.rank() == comm.size() - 1;
    let first = ops(&comm, odd).and_then(|()| comm.barrier()).expect_err("ranks diverged").to_string();
    if let Err(error) = started.wait() {
        assert_eq!(error.to_string(), first);
    }
    let after = comm.start_barrier().expect_err("poisoned").to_string();
    assert_eq!(after, first);
    assert_eq!(comm.progress().expect_err("poisoned").to_string(), first);
}
