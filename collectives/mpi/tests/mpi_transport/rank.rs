//! What one rank does in each case; the tests start the ranks and look at how they end.

use crate::launch::FOLDER;
use crate::{leaving, native, worlds};
use collectives::bootstrap::{self, Identity};
use collectives::schedule::{Call, Kind};
use collectives::transport::hierarchical::Hierarchical;
use collectives::transport::{PerNode, Tag, Transport};
use collectives::{Buffer, Communicator, DType, Error, Options, Progress, ReduceOp};
use collectives_mpi::{MpiTransport, Start, library};
use conformance::{Case, cases, p2p, planned, standard, windowed};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Before the name of a case that goes wrong: over shared memory inside nodes of two ranks, and MPI between them.
pub const NODES: &str = "nodes: ";

/// How long ranks wait inside MPI where one sleeps.
pub const LATE: Duration = Duration::from_secs(1);

/// This process's part in `case`.
pub fn plays(case: &str) {
    match case {
        "one_thread" => return one_thread(),
        "awaited_elsewhere" => return awaited_elsewhere(),
        "sent_too_late" => return sent_too_late(),
        "without_deadline" => {
            worlds::without_deadline();
            return println!("rank done");
        }
        _ => {}
    }
    let call_timeout = if case.ends_with("late") { LATE } else { Start::default().call_timeout };
    let caught: fn() -> bool = if case == "outlived_panic" { || true } else { || false };
    let mut t = MpiTransport::world(&Start { call_timeout, caught, ..Start::default() }).unwrap();
    match case {
        "suite" => {
            // The launcher's view and MPI's agree.
            let me = Identity::from_env().unwrap().unwrap();
            assert_eq!((me.rank, me.world), (t.rank(), t.size()));
            p2p::suite(&mut t);
            // Large messages in several parts.
            t.split_above(20_000);
            p2p::suite(&mut t);
        }
        "wrong_lengths" => p2p::wrong_lengths(&mut t),
        "half_a_group" => p2p::half_a_group(&mut t),
        "outlived_panic" => {
            p2p::outlived_panic(&mut t);
            all_are_done(t.rank(), t.size());
        }
        "conformance" => conformance(&mut t, |case| !case.fails, Progress::Inline),
        "threads" => conformance(
            &mut t,
            |case| case.name.contains("flight") || case.name == "split",
            Progress::Thread { cpu: None },
        ),
        "windowed" => {
            let group = t.subgroup(&(0..t.size()).collect::<Vec<_>>(), 1, p2p::PATIENCE).unwrap();
            (windowed().run)(Communicator::new(group, standard()).unwrap());
        }
        "nodes" => conformance(&mut nodes(t, PerNode::Block(2)), |case| !case.fails, Progress::Inline),
        "nodes in turn" => conformance(
            &mut nodes(t, PerNode::Cyclic(2)),
            |case| !case.fails && !["all_reduce", "reduce", "all_to_all"].contains(&case.name),
            Progress::Inline,
        ),
        "native" => native::collectives(&t),
        "planned" => {
            let group = t.subgroup(&(0..t.size()).collect::<Vec<_>>(), 1, p2p::PATIENCE).unwrap();
            planned::rank(Communicator::new(group, standard()).unwrap());
        }
        "second_start" => {
            let again = MpiTransport::world(&Start::default()).unwrap();
            assert_eq!((again.rank(), again.size()), (t.rank(), t.size()));
            drop((t, again));
            let error =
                MpiTransport::world(&Start::default()).err().expect("MPI cannot start again").to_string();
            assert!(error.contains("cannot be started again"), "{error}");
            println!("rank done");
            return;
        }
        "worlds_at_once" => worlds::at_once(t),
        "worlds_in_turn" => worlds::in_turn(t),
        "too_many_groups" => worlds::too_many_groups(t),
        "left_before_it_comes" => worlds::left_before_it_comes(t),
        "exchanges" => worlds::exchanges(t),
        "users_tags" => users_tags(t),
        "far_ahead" => far_ahead(t),
        "in_rounds" => in_rounds(t),
        "own_words" => {
            // SAFETY: MPI looks at the address and refuses, so nothing is read.
            let error =
                unsafe { t.send(0, Tag(1), std::ptr::null(), 100) }.expect_err("no address").to_string();
            for words in [library().as_str(), "MPI_Isend on rank", "nvalid buffer pointer"] {
                assert!(error.contains(words), "'{words}' is not in: {error}");
            }
            p2p::barrier(&mut t, 1);
        }
        "early_leaver" => return leaving::early_leaver(t),
        "busy_peers" => leaving::busy_peers(t),
        "groups_in_turn" => leaving::groups_in_turn(t),
        "leaves a message late" => leaving::leaves_a_message(t),
        "stays_away" => return leaving::stays_away(t, false),
        "stays_away_from_a_message" => return leaving::stays_away(t, true),
        // The last rank dies without a word; the launcher must end the others, who wait for it.
        "killed" => {
            if t.rank() == t.size() - 1 {
                p2p::barrier(&mut t, 1);
                std::process::abort();
            }
            let from = t.size() - 1;
            println!("error: {}", p2p::barrier_and_wait_for_nothing(&mut t, from));
        }
        // Ended or asleep while the others are inside MPI, which says nothing of it.
        case if case.starts_with("inside MPI") => return inside(case, t),
        case if case.starts_with("found by MPI") => return found_by_mpi(case, t),
        "panics" => {
            if t.rank() == 1 {
                p2p::barrier(&mut t, 1);
                panic!("something impossible");
            }
            println!("error: {}", p2p::barrier_and_wait_for_nothing(&mut t, 1));
        }
        // On a thread that nobody joins, while all ranks wait for each other.
        "panics elsewhere" => {
            p2p::barrier(&mut t, 1);
            if t.rank() == 1 {
                std::thread::spawn(|| panic!("something impossible"));
            }
            let next = (t.rank() + 1) % t.size();
            println!("error: {}", p2p::wait_for_nothing(&mut t, next));
        }
        // An error that unwinds as errors do: told to the peers, then the transport goes, then a code for the launcher.
        "fails" => {
            let code = if t.rank() == 1 {
                p2p::barrier(&mut t, 1);
                let error = Error::system("writing the checkpoint", "No space left on device");
                t.abort(&error);
                tell(&error);
                1
            } else {
                let error = p2p::barrier_and_wait_for_nothing(&mut t, 0);
                tell(&error);
                2
            };
            drop(t);
            std::process::exit(code);
        }
        // One case after which MPI may be of no use any more.
        other => {
            let all = cases();
            let (name, over_nodes) = other.strip_prefix(NODES).map_or((other, false), |name| (name, true));
            let case = all.iter().find(|c| c.fails && c.name == name).expect("a known case");
            let (rank, size) = (t.rank(), t.size());
            let mut t: Box<dyn Transport> =
                if over_nodes { Box::new(nodes(t, PerNode::Block(2))) } else { Box::new(t) };
            let mut group = t.subgroup(&(0..size).collect::<Vec<_>>(), 1, p2p::PATIENCE).unwrap();
            if case.waits() {
                p2p::meet(&mut *group);
            }
            (case.run)(Communicator::new(group, (case.options)()).unwrap());
            all_are_done(rank, size);
        }
    }
    println!("rank done");
}

/// MPI that was started for one thread works there, and refuses others.
fn one_thread() {
    let mut t = MpiTransport::world(&Start { one_thread: true, ..Start::default() }).unwrap();
    p2p::sizes(&mut t, &[3, 5000, 100_000]);
    conformance(&mut t, |case| !case.fails && case.name.contains("all_reduce"), Progress::Inline);
    let group = t.subgroup(&(0..t.size()).collect::<Vec<_>>(), 1, p2p::PATIENCE).unwrap();
    let comm = Communicator::new(group, Options::default()).unwrap();
    comm.barrier().unwrap();
    let elsewhere = std::thread::scope(|scope| scope.spawn(|| comm.barrier()).join().unwrap());
    let text = elsewhere.expect_err("another thread").to_string();
    assert!(text.contains("of one thread only"), "{text}");
    all_are_done(t.rank(), t.size());
}

/// A receive that is awaited on a thread which may not call MPI fails, and gives its memory back: nothing moves MPI
/// any more, because it would write there.
fn awaited_elsewhere() {
    let mut t = MpiTransport::world(&Start { one_thread: true, ..Start::default() }).unwrap();
    let (rank, size) = (t.rank(), t.size());
    let group = t.subgroup(&(0..size).collect::<Vec<_>>(), 1, p2p::PATIENCE).unwrap();
    let comm = Communicator::new(group, Options::default()).unwrap();
    let awaited = comm.start_recv(Buffer::<u8>::zeroed(100), (rank + 1) % size, 3).unwrap();
    let text = std::thread::spawn(|| awaited.wait()).join().unwrap().expect_err("another thread").to_string();
    assert!(text.contains("of one thread only"), "{text}");
    let text = t.check().expect_err("given up").to_string();
    assert!(text.contains("another of its groups") && text.contains("of one thread only"), "{text}");
    drop((comm, t));
    let text = MpiTransport::world(&Start::default()).err().expect("MPI was given up").to_string();
    assert!(text.contains("cannot be started again"), "{text}");
    all_are_done(rank, size);
}

/// A group is given up on a thread that may not call MPI while it receives: what is sent then does not come, because the
/// memory for it is given back.
fn sent_too_late() {
    let mut t = MpiTransport::world(&Start { one_thread: true, ..Start::default() }).unwrap();
    let (rank, size) = (t.rank(), t.size());
    let mut group = t.subgroup(&(0..size).collect::<Vec<_>>(), 1, p2p::PATIENCE).unwrap();
    p2p::barrier(&mut *group, 1);
    let mut space = [if rank == 0 { 7u8 } else { 1 }; 100];
    if rank == 0 {
        // SAFETY: `space` stays until the process ends.
        unsafe { group.recv(1, Tag(3), space.as_mut_ptr(), 100).unwrap() };
        std::thread::spawn(move || drop(group)).join().unwrap();
        say("given up");
        await_word("sent");
        // Each look at what peers say would move the message, too.
        let until = Instant::now() + Duration::from_millis(300);
        while Instant::now() < until {
            let _ = t.check();
        }
        // SAFETY: MPI may have written there since.
        let now = unsafe { space.as_ptr().cast::<[u8; 100]>().read_volatile() };
        assert_eq!(now, [7; 100]);
        t.check().expect_err("given up");
    } else {
        await_word("given up");
        // SAFETY: `space` stays until the process ends.
        unsafe { group.send(0, Tag(3), space.as_ptr(), 100).unwrap() };
        say("sent");
    }
    all_are_done(rank, size);
}

/// The last rank dies or sleeps where the others wait for it in a call of MPI that blocks; none of them returns.
fn inside(case: &str, mut t: MpiTransport) {
    let native = t.native().unwrap();
    let call = Call::new(Kind::AllReduce, DType::F32, 8);
    p2p::barrier(&mut t, 1);
    if t.rank() == t.size() - 1 {
        std::thread::sleep(Duration::from_millis(300));
        if case.ends_with("late") {
            std::thread::sleep(p2p::PATIENCE);
        }
        std::process::abort();
    }
    if case.contains("at its end") {
        drop((native, t));
    } else if case.contains("started") {
        let _ = native.start(call, Buffer::<f32>::zeroed(8), Buffer::zeroed(8)).unwrap().wait();
    } else {
        let _ = native.run(call, &[0f32; 8], &mut [0f32; 8]);
    }
    println!("got out");
}

/// In one piece, between which nothing of other ranks comes in a launcher's output.
pub fn tell(error: &Error) {
    let line = format!("error: {error}\n");
    eprint!("{line}");
}

/// MPI says that the last rank has ended, which here only stays away; the others fail as they would of a rank of another host.
fn found_by_mpi(case: &str, mut t: MpiTransport) {
    p2p::barrier(&mut t, 1);
    if t.rank() == t.size() - 1 {
        std::thread::sleep(Duration::from_millis(300));
        say("ended");
        std::thread::sleep(p2p::PATIENCE);
        return;
    }
    if case.ends_with("at its end") {
        drop(t);
    } else {
        let other = 1 - t.rank();
        tell(&p2p::wait_for_nothing(&mut t, other));
        drop(t);
        std::process::exit(1);
    }
    println!("got out");
}

/// Shared memory inside nodes of so many ranks, and MPI between them.
fn nodes(mut outer: MpiTransport, per_node: PerNode) -> Hierarchical {
    let identity = Identity::from_env().unwrap().unwrap();
    let options = bootstrap::Options { timeout: p2p::PATIENCE, ..Default::default() };
    let nodes = bootstrap::nodes_of(&mut outer, &options, Some(per_node)).unwrap();
    let inner = bootstrap::shm_inside(&mut outer, &identity, &options, &nodes).unwrap();
    Hierarchical::new("shm+mpi", inner, Box::new(outer), nodes).unwrap()
}

fn conformance(t: &mut dyn Transport, wanted: fn(&Case) -> bool, progress: Progress) {
    let all: Vec<usize> = (0..t.size()).collect();
    for (number, case) in cases().iter().enumerate() {
        if !wanted(case) {
            continue;
        }
        if t.rank() == 0 {
            eprintln!("{}", case.name);
        }
        let group = t.subgroup(&all, number as u64, p2p::PATIENCE).unwrap();
        let options = Options { progress, ..(case.options)() };
        (case.run)(Communicator::new(group, options).unwrap());
    }
}

/// Tells the other ranks this word without MPI, for which they need not look at it.
pub fn say(word: &str) {
    std::fs::write(folder().join(word), "").unwrap();
}

/// Returns once a rank has said this word.
pub fn await_word(word: &str) {
    let until = Instant::now() + p2p::PATIENCE;
    while !folder().join(word).exists() {
        assert!(Instant::now() < until, "'{word}' was not said");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn folder() -> PathBuf {
    std::env::var(FOLDER).unwrap().into()
}

/// Returns when all ranks have come here, without MPI: a launcher ends the others when one ends without MPI_Finalize.
fn all_are_done(rank: usize, size: usize) -> ! {
    println!("rank done");
    say(&rank.to_string());
    (0..size).for_each(|rank| await_word(&rank.to_string()));
    std::process::exit(0);
}

/// Users' messages have a communicator of their own, and a tag beyond the library's limit is refused.
fn users_tags(mut t: MpiTransport) {
    let user = |tag: u64| Tag(1 << 63 | tag);
    let (rank, n) = (t.rank(), t.size());
    let (to, from) = ((rank + 1) % n, (rank + n - 1) % n);
    let out = [[rank as u8, 1], [rank as u8, 2]];
    let mut into = [[0u8; 2]; 2];
    // SAFETY: the buffers stay until the wait is over.
    let requests = unsafe {
        [
            t.send(to, Tag(7), out[0].as_ptr(), 2).unwrap(),
            t.send(to, user(7), out[1].as_ptr(), 2).unwrap(),
            t.recv(from, user(7), into[1].as_mut_ptr(), 2).unwrap(),
            t.recv(from, Tag(7), into[0].as_mut_ptr(), 2).unwrap(),
        ]
    };
    p2p::wait(&mut t, &requests).unwrap();
    assert_eq!(into, [[from as u8, 1], [from as u8, 2]]);
    // SAFETY: refused, so nothing is posted.
    let error = unsafe { t.send(to, user(u32::MAX as u64), out[0].as_ptr(), 2) }.unwrap_err().to_string();
    assert!(error.contains("4294967295") && error.contains("takes 0 to"), "{error}");
    // SAFETY: as above.
    let error = unsafe {
        t.send(to, Tag(1 << 40), out[0].as_ptr(), 0).unwrap();
        t.send(to, Tag(0), out[0].as_ptr(), 0).unwrap_err().to_string()
    };
    assert!(error.contains("can be told apart"), "{error}");
    let mut nothing = [0u8; 1];
    // SAFETY: nothing is received.
    let last = unsafe { t.recv(from, Tag(1 << 40), nothing.as_mut_ptr(), 0).unwrap() };
    p2p::wait(&mut t, &[last]).unwrap();
    // Through a communicator such a tag is an argument that does not fit, and nobody hears of it.
    let comm = Communicator::new(Box::new(t), standard()).unwrap();
    let error = comm.send(&out[0][..], to, u32::MAX).unwrap_err();
    assert!(matches!(error, Error::Argument { .. }) && error.to_string().contains("takes 0 to"), "{error}");
    let sent = comm.start_send(Buffer::<u8>::zeroed(2), to, 7).unwrap();
    comm.recv(&mut [0u8; 2][..], from, 7).unwrap();
    sent.wait().unwrap();
}

/// Many more calls than the library could tell apart, started at once; some bring several messages.
fn far_ahead(mut t: MpiTransport) {
    const CALLS: usize = 60;
    t.narrow(4);
    let comm = Communicator::new(Box::new(t), standard()).unwrap();
    let n = comm.size();
    let elements = |call: usize| [3, 5000, 100_000][call % 3];
    let start = |call: usize| {
        let mut data = Buffer::<u32>::zeroed(n * elements(call));
        data.host_mut().iter_mut().enumerate().for_each(|(i, x)| *x = (call + i + comm.rank()) as u32);
        comm.start_all_reduce_in_place(data, ReduceOp::Sum).unwrap()
    };
    let started: Vec<_> = (0..CALLS).map(start).collect();
    // A message waits for none of them.
    let (to, from) = ((comm.rank() + 1) % n, (comm.rank() + n - 1) % n);
    let sent = comm.start_send(Buffer::<u8>::zeroed(10), to, 1).unwrap();
    comm.recv(&mut [0u8; 10][..], from, 1).unwrap();
    sent.wait().unwrap();
    // The last is waited for first.
    for (call, pending) in started.into_iter().enumerate().rev() {
        let reduced = pending.wait().unwrap();
        let right = |i: usize| (n * (call + i) + n * (n - 1) / 2) as u32;
        assert!(reduced.host().iter().enumerate().all(|(i, &x)| x == right(i)), "call {call}");
    }
}

/// Reductions of so much that several messages are under way between each two ranks, none of which has been asked for.
fn in_rounds(t: MpiTransport) {
    let comm = Communicator::new(Box::new(t), standard()).unwrap();
    let (n, part) = (comm.size(), 700_000);
    let mine = vec![comm.rank() as f32 + 1.0; n * part];
    let right = (n * (n + 1) / 2) as f32;
    let mut shard = vec![0f32; part];
    comm.reduce_scatter(&mine[..], &mut shard[..], ReduceOp::Sum).unwrap();
    assert!(shard.iter().all(|&x| x == right));
    let mut all = mine;
    comm.all_reduce_in_place(&mut all[..], ReduceOp::Sum).unwrap();
    assert!(all.iter().all(|&x| x == right));
}
