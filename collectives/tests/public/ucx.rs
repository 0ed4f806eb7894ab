//! The UCX transport between real processes over each of UCX's transports that a machine without special hardware
//! has. The processes are this test program again, as `rank_process`.

use crate::ranks::finish;
use crate::ucx_groups;
use crate::ucx_processes::{CASE, available, errors, passes, start, start_with, text};
use collectives::bootstrap::{Identity, Options, Rendezvous};
use collectives::transport::ucx::{Start, UcxTransport};
use collectives::transport::{Request, Tag, Transport};
use collectives::{Communicator, Error, Options as Behaviour, Progress, ReduceOp, Result};
use conformance::{Case, cases, each, p2p};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

fn connect(start: &Start) -> UcxTransport {
    let identity = Identity::from_env().unwrap().unwrap();
    let mut meeting = Rendezvous::join(&identity, &Options::default()).unwrap();
    let exchange = &mut |blob: Vec<u8>| meeting.exchange(&blob);
    UcxTransport::connect(identity.rank, identity.world, start, exchange).unwrap()
}

/// One rank of the case that the environment names; nothing when this is run as an ordinary test.
#[test]
fn rank_process() {
    let Ok(case) = std::env::var(CASE) else { return };
    let call_timeout = match case.as_str() {
        "left_waiting" => Duration::from_millis(100),
        _ => Start::default().call_timeout,
    };
    let mut t = connect(&Start { call_timeout, ..Start::default() });
    match case.as_str() {
        "suite" => {
            p2p::suite(&mut t);
            p2p::suite(&mut t);
        }
        "wrong_lengths" => p2p::wrong_lengths(&mut t),
        "half_a_group" => p2p::half_a_group(&mut t),
        "outlived_panic" => p2p::outlived_panic(&mut t),
        // What has come already is there at once; what comes instead is the error that it is anywhere.
        "awaited" => {
            let sent = p2p::message(0, 1, 7, 100);
            let posted = |t: &mut UcxTransport, tag: u64, looks: u32| {
                let mut space = vec![0u8; 60 + 40 * usize::from(tag == 7)];
                // SAFETY: `space` stays until the wait is over.
                let request = unsafe { t.recv_awaited(0, Tag(tag), space.as_mut_ptr(), space.len(), looks)? };
                p2p::wait(t, &[request]).map(|()| (request == Request::DONE, space))
            };
            for tag in [7, 8, 8] {
                if t.rank() == 0 {
                    // SAFETY: `sent` stays until the wait is over.
                    let request = unsafe { t.send(1, Tag(tag), sent.as_ptr(), sent.len()).unwrap() };
                    p2p::wait(&mut t, &[request]).unwrap();
                }
            }
            p2p::barrier(&mut t, 1);
            if t.rank() == 1 {
                let (at_once, space) = posted(&mut t, 7, 1000).unwrap();
                p2p::assert_message(&space, 0, 1, 7);
                assert!(at_once);
                let [at_once, later] =
                    [1000, 0].map(|looks| posted(&mut t, 8, looks).unwrap_err().to_string());
                assert_eq!(at_once, later);
                assert!(at_once.contains("100 bytes"), "{at_once}");
            }
            p2p::barrier(&mut t, 2);
        }
        // What was sent arrives although the sender has gone, and the end of a rank in order is no loss.
        "early_leaver" => {
            let rank = t.rank();
            for tag in 0..20 {
                let data = p2p::message(0, 1, tag, 200_000);
                let mut space = vec![0u8; 200_000];
                if rank == 0 {
                    // SAFETY: `data` stays until the wait is over.
                    let request = unsafe { t.send(1, Tag(tag), data.as_ptr(), data.len()).unwrap() };
                    p2p::wait(&mut t, &[request]).unwrap();
                } else if rank == 1 {
                    std::thread::sleep(Duration::from_millis(10));
                    // SAFETY: `space` stays until the wait is over.
                    let request = unsafe { t.recv(0, Tag(tag), space.as_mut_ptr(), space.len()).unwrap() };
                    p2p::wait(&mut t, &[request]).unwrap();
                    p2p::assert_message(&space, 0, 1, tag);
                }
            }
            if rank > 0 {
                std::thread::sleep(Duration::from_millis(300));
                t.check().expect("rank 0 left in order");
                let mut rest = t.subgroup(&(1..t.size()).collect::<Vec<_>>(), 1, p2p::PATIENCE).unwrap();
                p2p::barrier(&mut *rest, 1);
            }
        }
        // Rank 1 is about something else for longer than rank 0 waits for it at its end.
        "left_waiting" => {
            let message = vec![1u8; 4 << 20];
            let met = p2p::try_barrier(&mut t, 1);
            if t.rank() == 0 {
                met.unwrap();
                // SAFETY: `message` stays until the transport has ended.
                unsafe { t.send(1, Tag(7), message.as_ptr(), message.len()).unwrap() };
                drop(t);
            } else {
                std::thread::sleep(Duration::from_secs(3));
                println!("error: {}", met.err().unwrap_or_else(|| p2p::wait_for_nothing(&mut t, 0)));
            }
        }
        // The last rank dies without a word; the others wait for it.
        "killed" => {
            let last = t.size() - 1;
            if t.rank() == last {
                p2p::barrier(&mut t, 1);
                std::process::abort();
            }
            println!("error: {}", p2p::barrier_and_wait_for_nothing(&mut t, last));
        }
        // The last rank dies when a peer knows of a message that it has yet to fetch from that rank's memory.
        "killed_before_its_message_is_fetched" => {
            let (last, mut data) = (t.size() - 1, vec![1u8; 4 << 20]);
            if t.rank() == last {
                let me = std::process::id().to_le_bytes();
                // SAFETY: `data` stays for as long as the process does.
                unsafe { t.send(0, Tag(7), data.as_ptr(), data.len()).unwrap() };
                for peer in 0..last {
                    // SAFETY: `me` stays until the wait is over.
                    let told = unsafe { t.send(peer, Tag(8), me.as_ptr(), me.len()).unwrap() };
                    p2p::wait(&mut t, &[told]).unwrap();
                }
                p2p::barrier(&mut t, 1);
                std::process::abort();
            }
            let mut of = [0u8; 4];
            // SAFETY: `of` stays until the wait is over.
            let told = unsafe { t.recv(last, Tag(8), of.as_mut_ptr(), of.len()).unwrap() };
            p2p::wait(&mut t, &[told]).unwrap();
            // Who comes out of the barrier late may find the end of the last rank there.
            let fetched = p2p::try_barrier(&mut t, 1).and_then(|()| {
                until_ended(u32::from_le_bytes(of));
                if t.rank() > 0 {
                    let until = Instant::now() + p2p::PATIENCE;
                    while Instant::now() < until {
                        t.check()?;
                    }
                    return Ok(());
                }
                // SAFETY: `data` stays until the transport has failed.
                let request = unsafe { t.recv(last, Tag(7), data.as_mut_ptr(), data.len())? };
                p2p::wait(&mut t, &[request])
            });
            println!("error: {}", fetched.unwrap_err());
        }
        // The others wait for a rank that lives.
        "aborted" => {
            if t.rank() == 1 {
                p2p::barrier(&mut t, 1);
                t.abort(&Error::system("writing the checkpoint", "No space left on device"));
            } else {
                println!("error: {}", p2p::barrier_and_wait_for_nothing(&mut t, 0));
            }
        }
        "too_many_groups" => ucx_groups::too_many(&mut t),
        "numbers_again" => ucx_groups::numbers_again(&mut t),
        "late_farewell" => ucx_groups::late_farewell(&mut t),
        "cannot_end_a_message" => ucx_groups::cannot_end_a_message(&mut t),
        "left_without_taking" => ucx_groups::left_without_taking(&mut t),
        "leaves_before_sending" => {
            if t.rank() == 0 {
                println!("error: {}", p2p::barrier_and_wait_for_nothing(&mut t, 1));
            } else {
                p2p::barrier(&mut t, 1);
            }
        }
        // The root is thousands of calls ahead before the last rank begins.
        "ahead" => {
            let comm = Communicator::new(Box::new(t), Behaviour::default()).unwrap();
            let mut word = [comm.rank() as u32];
            let last = comm.size() - 1;
            if comm.rank() == last {
                comm.recv(&mut word[..], 0, 0).unwrap();
            }
            for _ in 0..3000 {
                comm.broadcast(&mut word[..], 0).unwrap();
            }
            assert_eq!(word, [0]);
            if comm.rank() == 0 {
                comm.send(&word[..], last, 0).unwrap();
            }
        }
        // More calls than its tags tell apart, one after the other.
        "many" => {
            let comm = Communicator::new(Box::new(t), Behaviour::default()).unwrap();
            for i in 0..70_000u32 {
                let mut sum = [i + comm.rank() as u32];
                comm.all_reduce_in_place(&mut sum[..], ReduceOp::Max).unwrap();
                assert_eq!(sum, [i + comm.size() as u32 - 1]);
            }
        }
        "conformance" => conformance(&mut t, |case| !case.fails, Progress::Inline),
        "threads" => conformance(
            &mut t,
            |case| !case.fails && (case.name.contains("flight") || case.name == "split"),
            Progress::Thread { cpu: None },
        ),
        other => {
            // A case of the suite after which nothing works any more.
            let all = cases();
            let case = all.iter().find(|c| c.fails && job_name(c.name) == other).expect("a known case");
            if case.waits() {
                p2p::meet(&mut t);
            }
            (case.run)(Communicator::new(Box::new(t), (case.options)()).unwrap());
        }
    }
}

/// Returns once a process has ended, whether or not it was collected.
fn until_ended(process: u32) {
    let until = Instant::now() + p2p::PATIENCE;
    let stat = || std::fs::read_to_string(format!("/proc/{process}/stat"));
    // Its state comes behind its name, which is in parentheses.
    while stat().is_ok_and(|stat| stat.rsplit_once(") ").is_some_and(|(_, state)| !state.starts_with('Z'))) {
        assert!(Instant::now() < until, "process {process} does not end");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn job_name(case: &str) -> String {
    case.replace(' ', "-")
}

/// Runs the cases of the suite, each in a group of its own.
fn conformance(t: &mut UcxTransport, wanted: fn(&Case) -> bool, progress: Progress) {
    let all: Vec<usize> = (0..t.size()).collect();
    for (number, case) in cases().iter().enumerate().filter(|(_, case)| wanted(case)) {
        if t.rank() == 0 {
            eprintln!("{}", case.name);
        }
        let group = t.subgroup(&all, number as u64, p2p::PATIENCE).unwrap();
        let behaviour = Behaviour { progress, ..(case.options)() };
        (case.run)(Communicator::new(group, behaviour).unwrap());
    }
}

/// How many ranks run the whole suite over one of UCX's transports: some, which are every number from 1 to 5 over one or
/// the other, or with `CARAVAN_ALL_RANKS` every number over each.
fn worlds(few: &[usize]) -> impl Iterator<Item = usize> {
    let all = std::env::var_os("CARAVAN_ALL_RANKS").is_some();
    (1..=5).filter(move |n| all || few.contains(n))
}

#[test]
fn conformance_suite_over_tcp() {
    for ranks in worlds(&[2, 3]) {
        passes("conformance", ranks, "self,tcp");
    }
}

#[test]
fn conformance_suite_over_shared_memory() {
    for ranks in worlds(&[1, 4, 5]) {
        passes("conformance", ranks, "self,posix,cma");
    }
}

#[test]
fn calls_in_flight_with_progress_threads() {
    for ranks in worlds(&[2]) {
        passes("threads", ranks, "self,posix,cma");
    }
    for ranks in worlds(&[3]) {
        passes("threads", ranks, "self,tcp");
    }
}

#[test]
fn conformance_suite_where_something_goes_wrong() {
    each(cases().iter().filter(|c| c.fails), |case| {
        passes(&job_name(case.name), 3, "self,posix,cma");
        passes(&job_name(case.name), 2, "self,tcp");
    });
}

#[test]
fn messages_between_threads_of_one_process() {
    if !available() {
        return;
    }
    let (hub, blobs): (Vec<_>, Vec<_>) = (0..3).map(|_| channel::<Vec<Vec<u8>>>()).unzip();
    let (up, down) = channel::<(usize, Vec<u8>)>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut all = vec![Vec::new(); 3];
            for (rank, blob) in (0..3).map(|_| down.recv().unwrap()) {
                all[rank] = blob;
            }
            hub.iter().for_each(|h| h.send(all.clone()).unwrap());
        });
        for (rank, inbox) in blobs.into_iter().enumerate() {
            let up = up.clone();
            scope.spawn(move || {
                let mut exchange = |blob: Vec<u8>| -> Result<Vec<Vec<u8>>> {
                    up.send((rank, blob)).unwrap();
                    Ok(inbox.recv().unwrap())
                };
                let mut t = UcxTransport::connect(rank, 3, &Start::default(), &mut exchange).unwrap();
                p2p::suite(&mut t);
            });
        }
    });
}

#[test]
fn a_rank_that_does_not_connect_is_waited_for_as_long_as_asked() {
    if !available() {
        return;
    }
    let within = Duration::from_millis(50);
    let start = Start { within, ..Start::default() };
    let (card, cards) = channel::<Vec<u8>>();
    let (failed, over) = channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            // It tells its address and goes no further.
            let mut exchange = |mine: Vec<u8>| {
                card.send(mine).unwrap();
                over.recv().unwrap();
                Err(Error::Launch("the other has failed".into()))
            };
            assert!(UcxTransport::connect(1, 2, &start, &mut exchange).is_err());
        });
        let mut exchange = |mine: Vec<u8>| Ok(vec![mine, cards.recv().unwrap()]);
        let error = UcxTransport::connect(0, 2, &start, &mut exchange).err().expect("rank 1 is silent");
        failed.send(()).unwrap();
        assert!(
            matches!(error, Error::Timeout { rank: 0, peer: 1, after, .. } if after == within),
            "{error}"
        );
    });
}

#[test]
fn a_rank_that_leaves_waits_for_its_peers_as_long_as_asked() {
    if !available() {
        return;
    }
    let error = &errors("left_waiting", 2, "posix,cma", &[1])[0];
    // Where the message fills the queue, no word gets past it.
    let said = "to leave a group with a message under way on rank 0: no answer from rank 1 within 100ms";
    assert!(error.contains(said) || error.contains("rank 0 ended"), "{error}");
}

#[test]
fn messages_of_every_size_and_order_over_shared_memory() {
    passes("suite", 1, "self,posix,cma");
    passes("suite", 2, "posix,cma");
    passes("suite", 4, "posix");
}

#[test]
fn messages_of_every_size_and_order_over_tcp() {
    passes("suite", 2, "tcp");
    passes("suite", 3, "tcp,self");
}

#[test]
fn messages_of_every_size_and_order_over_what_ucx_chooses() {
    passes("suite", 3, "all");
}

#[test]
fn other_lengths_are_errors() {
    passes("wrong_lengths", 2, "posix,cma");
    passes("wrong_lengths", 2, "tcp");
}

#[test]
fn an_awaited_message_that_is_there_takes_no_request() {
    passes("awaited", 2, "posix,cma");
    passes("awaited", 2, "tcp");
}

#[test]
fn a_group_that_a_rank_does_not_come_to_is_an_error() {
    passes("half_a_group", 2, "posix,cma");
}

#[test]
fn a_rank_that_has_come_down_is_named_though_it_lives_on() {
    for tls in ["posix,cma", "tcp"] {
        passes("outlived_panic", 2, tls);
    }
}

#[test]
fn leaving_early_loses_nothing() {
    passes("early_leaver", 3, "posix,cma");
    passes("early_leaver", 3, "tcp");
}

#[test]
fn a_root_may_run_far_ahead() {
    passes("ahead", 2, "posix,cma");
    passes("ahead", 3, "tcp");
}

#[test]
fn more_calls_than_tags_tell_apart_may_follow_each_other() {
    passes("many", 2, "posix,cma");
}

#[test]
fn a_killed_rank_is_named_by_the_others() {
    if !available() {
        return;
    }
    let lost = format!("rank 2 on {} is unreachable", collectives::bootstrap::host_name());
    for tls in ["posix,cma", "tcp", "all"] {
        for error in errors("killed", 3, tls, &[0, 1]) {
            assert!(error.contains("rank 2 ended") || error.contains(&lost), "{tls}: {error}");
        }
    }
}

#[test]
fn a_rank_that_is_killed_before_its_message_is_fetched_ends_nobody_without_a_word() {
    if !available() {
        return;
    }
    for tls in ["posix,cma", "all"] {
        for error in errors("killed_before_its_message_is_fetched", 3, tls, &[0, 1]) {
            assert!(error.contains("rank 2 ended"), "{tls}: {error}");
        }
    }
}

#[test]
fn a_rank_that_gives_up_tells_the_others_why() {
    if !available() {
        return;
    }
    for tls in ["posix,cma", "tcp"] {
        for error in errors("aborted", 3, tls, &[0, 2]) {
            assert!(error.contains("rank 1 gave up") && error.contains("No space left"), "{tls}: {error}");
        }
    }
}

#[test]
fn a_rank_that_left_is_not_waited_for() {
    if !available() {
        return;
    }
    let error = &errors("leaves_before_sending", 2, "posix,cma", &[0])[0];
    assert!(error.contains("rank 1 left the group"), "{error}");
}

#[test]
fn unknown_ucx_transports_are_explained() {
    if !available() {
        return;
    }
    let outputs = finish(start("suite", 2, "nosuchtransport"));
    for output in &outputs {
        let all = text(output);
        assert!(!output.status.success() && all.contains("UCX_TLS=nosuchtransport"), "{all}");
    }
}

#[test]
fn queues_and_segments_that_do_not_fit_are_refused() {
    if !available() {
        return;
    }
    let sizes = |rank| [None, Some(("UCX_POSIX_FIFO_ELEM_SIZE", "256"))][rank];
    for output in &finish(start_with("suite", 2, "posix,cma", sizes)) {
        let all = text(output);
        assert!(
            !output.status.success() && all.contains("rank 1") && all.contains("POSIX_FIFO_ELEM_SIZE=256"),
            "{all}"
        );
    }
    // Over TCP what is longer than the other expects would be written past its end.
    let sizes = |rank| [None, Some(("UCX_TCP_RX_SEG_SIZE", "32K"))][rank];
    for output in &finish(start_with("suite", 2, "tcp", sizes)) {
        let all = text(output);
        assert!(
            !output.status.success() && all.contains("rank 1") && all.contains("RX_SEG_SIZE=32K"),
            "{all}"
        );
    }
    // The user's own, alike for all.
    let same = |_| Some(("UCX_POSIX_FIFO_ELEM_SIZE", "256"));
    for output in &finish(start_with("suite", 2, "posix,cma", same)) {
        assert!(output.status.success(), "{}", text(output));
    }
}
