//! What happens when a rank fails, leaves or dies.

use crate::ranks::{self, PATIENCE, connect, job, not_for_ever, pattern, this_test, until, wait};
use collectives::bootstrap::Ending;
use collectives::bootstrap::spawn::{OnRequest, supervise};
use collectives::transport::{Tag, Transport};
use collectives::{Buffer, Communicator, Error, Options, Result};
use harness::Waited;
use rustix::process::{Signal, kill_process};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Command, exit};
use std::time::{Duration, Instant};

/// Exit code of a rank that saw what it should.
const AS_EXPECTED: i32 = 77;

/// Waits for a message that never comes.
fn wait_in_vain(t: &mut dyn Transport, from: usize) -> Error {
    let mut room = [0u8; 8];
    // SAFETY: the room outlives the wait.
    let request = match unsafe { t.recv(from, Tag(1 << 40), room.as_mut_ptr(), 8) } {
        Ok(request) => request,
        Err(error) => return error,
    };
    wait(t, request).expect_err("nobody sends this")
}

/// Ends this rank with the code that says whether the error was the right one.
fn expect(error: &Error, words: &[&str]) -> ! {
    let text = error.to_string();
    match words.iter().find(|w| !text.contains(**w)) {
        None => exit(AS_EXPECTED),
        Some(word) => {
            eprintln!("{text:?} does not say {word:?}");
            exit(99)
        }
    }
}

fn pair(t: &mut dyn Transport, peer: usize, tag: u64) -> Result<()> {
    let (mine, mut theirs) = ([tag as u8; 3], [0u8; 3]);
    // SAFETY: both live until both requests are complete.
    let (a, b) = unsafe {
        (t.send(peer, Tag(tag), mine.as_ptr(), 3)?, t.recv(peer, Tag(tag), theirs.as_mut_ptr(), 3)?)
    };
    wait(t, a)?;
    wait(t, b)?;
    assert_eq!(mine, theirs);
    Ok(())
}

#[test]
fn a_killed_rank_ends_the_others_by_name() {
    let reports = job(this_test!(), &[4], || {
        let mut t = connect().expect("a group");
        let me = t.rank();
        let met = (0..50).try_for_each(|tag| pair(&mut *t, me ^ 1, tag));
        if me == 2 {
            met.as_ref().expect("rank 3 lives");
            kill_process(rustix::process::getpid(), Signal::KILL).expect("killed");
        }
        // Rank 0 and 1 wait for each other, not for the dead one, which may be through before they are.
        let error = met.err().unwrap_or_else(|| wait_in_vain(&mut *t, me ^ 1));
        expect(&error, &["rank 2 was killed by signal 9", &format!("rank {me} stops")]);
    });
    for report in reports {
        let survivor = Ending::Exited(AS_EXPECTED as u8);
        assert_eq!(report.endings, [survivor, survivor, Ending::Killed(9), survivor]);
        assert!(report.killed.is_empty(), "all ended by themselves within the grace");
        assert_eq!((report.exit_code(), report.interrupted), (1, None));
        assert_eq!(
            report.sentence().as_deref(),
            Some("rank 2 was killed by signal 9; the other ranks were stopped")
        );
    }
}

#[test]
fn who_only_asks_whether_a_call_is_over_hears_of_a_killed_rank() {
    let reports = job(this_test!(), &[3], || {
        let comm =
            Communicator::new(connect().expect("a group"), Options::default()).expect("a communicator");
        comm.barrier().expect("all are here");
        let me = comm.rank();
        if me == 2 {
            kill_process(rustix::process::getpid(), Signal::KILL).expect("killed");
        }
        let call = comm.start_recv(Buffer::<u8>::zeroed(8), 2, 0);
        let start = Instant::now();
        let error = match me {
            0 => call.and_then(|call| {
                while !call.is_done() && start.elapsed() < PATIENCE {
                    std::thread::yield_now();
                }
                call.wait().map(drop)
            }),
            _ => loop {
                match comm.progress() {
                    Ok(()) if start.elapsed() < PATIENCE => std::thread::yield_now(),
                    ended => break ended,
                }
            },
        };
        assert!(start.elapsed() < PATIENCE, "rank {me} never heard of it");
        expect(&error.expect_err("nobody sends this"), &["rank 2 was killed by signal 9"]);
    });
    for report in reports {
        let survivor = Ending::Exited(AS_EXPECTED as u8);
        assert_eq!(report.endings, [survivor, survivor, Ending::Killed(9)]);
    }
}

#[test]
fn a_failing_rank_says_why_to_all() {
    let reports = job(this_test!(), &[3], || {
        let mut t = connect().expect("a group");
        // Only once all are in: who is still on the way would not get in at all.
        let peers = if t.rank() == 1 { &[0, 2][..] } else { &[1] };
        peers.iter().for_each(|&peer| pair(&mut *t, peer, 1).expect("a message"));
        if t.rank() == 1 {
            t.abort(&Error::Launch("the disk is full".into()));
            exit(4);
        }
        let other = 2 - t.rank();
        let error = wait_in_vain(&mut *t, other);
        // What a rank passes on names the culprit, not the messenger.
        t.abort(&error);
        expect(&error, &["rank 1 failed: launch: the disk is full"]);
    });
    for report in reports {
        assert_eq!(report.exit_code(), 4);
        let sentence = report.sentence().expect("a failure");
        assert!(sentence.starts_with("rank 1 failed: launch: the disk is full"), "{sentence}");
        assert_eq!(report.endings[0], Ending::Exited(AS_EXPECTED as u8));
        assert_eq!(report.endings[2], Ending::Exited(AS_EXPECTED as u8));
    }
}

#[test]
fn a_panicking_rank_is_named() {
    let reports = job(this_test!(), &[2], || {
        let mut t = connect().expect("a group");
        let other = 1 - t.rank();
        pair(&mut *t, other, 1).expect("a message");
        if t.rank() == 1 {
            panic!("on purpose");
        }
        expect(&wait_in_vain(&mut *t, 1), &["rank 1 failed: panicked"]);
    });
    for report in reports {
        let first = report.first_failure.expect("a failure");
        assert_eq!((first.0, report.endings[0]), (1, Ending::Exited(AS_EXPECTED as u8)));
    }
}

/// Waits for a message without a look at whether its sender has failed.
fn recv_without_a_look(t: &mut dyn Transport, from: usize, tag: u64, bytes: usize) -> Vec<u8> {
    let mut room = vec![0u8; bytes];
    // SAFETY: the room outlives the wait.
    let request = unsafe { t.recv(from, Tag(tag), room.as_mut_ptr(), bytes) }.expect("posted");
    let mut waited = Waited::begin();
    while !t.test(request).expect("a message") {
        not_for_ever(&mut waited);
        std::thread::yield_now();
    }
    room
}

#[test]
fn who_took_a_message_may_leave_before_its_sender_looks() {
    const BYTES: usize = 1 << 20;
    ranks::run(this_test!(), &[2], |mut t| {
        let left = ranks::folder().join("left");
        if t.rank() == 1 {
            recv_without_a_look(&mut *t, 0, 1, BYTES);
            drop(t);
            return std::fs::write(left, []).expect("said that it has left");
        }
        let data = Buffer::<u8>::from_memory(t.alloc(BYTES).expect("shared memory"));
        // Too long to be copied: the receiver reads it where it is and answers.
        // SAFETY: the data stay until the end.
        let request = unsafe { t.send(1, Tag(1), data.view().as_ptr(), BYTES) }.expect("posted");
        let mut waited = Waited::begin();
        while !left.exists() {
            not_for_ever(&mut waited);
            std::thread::sleep(Duration::from_millis(1));
        }
        // Long enough for a look at who is still there.
        std::thread::sleep(Duration::from_millis(50));
        t.check().expect("nobody has failed");
        assert!(t.test(request).expect("it was taken"));
    });
}

#[test]
fn a_message_to_who_has_left_the_group_is_an_error() {
    ranks::run(this_test!(), &[2], |mut t| {
        let mut part = t.subgroup(&[1, 0], 5, PATIENCE).expect("a group");
        let (word, to) = ([7u8], 1 - t.rank());
        if t.rank() == 1 {
            drop(part);
            // SAFETY: as short a message is copied at once.
            let sent = unsafe { t.send(to, Tag(1), word.as_ptr(), 1) }.expect("posted");
            return wait(&mut *t, sent).expect("sent");
        }
        recv_without_a_look(&mut *t, 1, 1, 1);
        // SAFETY: as above; rank 1 is the first of the part.
        let refused =
            unsafe { part.send(0, Tag(2), word.as_ptr(), 1) }.expect_err("nobody takes it").to_string();
        assert!(refused.contains("rank 1 left the group"), "{refused}");
    });
}

#[test]
fn what_a_failed_rank_has_shown_stays_as_it_was() {
    const BYTES: usize = 1 << 20;
    let reports = job(this_test!(), &[2], || {
        let mut t = connect().expect("a group");
        let group = t.subgroup(&[0, 1], 1, PATIENCE).expect("a group");
        let options = Options { deadline: Duration::from_millis(100), ..Options::default() };
        let comm = Communicator::new(group, options).expect("a communicator");
        let (panics, fails, told) = (1, 2, 3);
        if t.rank() == 0 {
            // Messages that are too long to be copied: the receiver reads them where they are.
            let show = |t: &mut dyn Transport, tag: u64| {
                let mut data = Buffer::<u8>::from_memory(t.alloc(BYTES).expect("shared memory"));
                data.host_mut().copy_from_slice(&pattern(0, tag, BYTES));
                // SAFETY: the data are dropped only where this rank has failed.
                unsafe { t.send(1, Tag(tag), data.view().as_ptr(), BYTES) }.expect("posted");
                data
            };
            let data = show(&mut *t, panics);
            catch_unwind(AssertUnwindSafe(move || {
                let _data = data;
                panic!("on purpose");
            }))
            .expect_err("a panic");
            let data = show(&mut *t, fails);
            let mut whole = comm.alloc::<u8>(BYTES).expect("shared memory");
            whole.host_mut().copy_from_slice(&pattern(0, 0, BYTES));
            let error = comm.start_broadcast(whole, 0).expect("starts").wait().expect_err("nobody answers");
            drop(data);
            // SAFETY: as short a message is copied at once.
            unsafe { t.send(1, Tag(told), [0u8].as_ptr(), 1) }.expect("sent");
            expect(&error, &["no answer from rank 1"]);
        }
        recv_without_a_look(&mut *t, 0, told, 1);
        for tag in [panics, fails] {
            let whole = recv_without_a_look(&mut *t, 0, tag, BYTES);
            assert!(whole == pattern(0, tag, BYTES), "message {tag} has changed");
        }
        let mut whole = vec![0u8; BYTES];
        comm.broadcast(&mut whole[..], 0).expect("all that it takes is there");
        assert!(whole == pattern(0, 0, BYTES), "the root's data have changed");
        exit(AS_EXPECTED);
    });
    for report in reports {
        assert_eq!(report.endings, [Ending::Exited(AS_EXPECTED as u8); 2]);
    }
}

#[test]
fn leaving_in_order_is_no_failure_until_somebody_waits_for_it() {
    let reports = job(this_test!(), &[3], || {
        let mut t = connect().expect("a group");
        let me = t.rank();
        if me == 0 {
            // Sent, and gone before anybody receives it.
            let data = [5u8; 100];
            for to in [1, 2] {
                // SAFETY: waited for.
                let request = unsafe { t.send(to, Tag(7), data.as_ptr(), 100) }.expect("posted");
                wait(&mut *t, request).expect("sent");
            }
            return;
        }
        // Rank 0's process ends meanwhile, which concerns nobody.
        for tag in 0..100 {
            std::thread::sleep(Duration::from_millis(3));
            t.check().expect("no failure");
            pair(&mut *t, 3 - me, tag).expect("a message");
        }
        let mut room = [0u8; 100];
        // SAFETY: waited for.
        let request = unsafe { t.recv(0, Tag(7), room.as_mut_ptr(), 100) }.expect("posted");
        wait(&mut *t, request).expect("what was sent before");
        assert_eq!(room, [5u8; 100]);
        let published = until(&mut *t, |t| t.direct().expect("direct access").published(0, 0));
        let text = published.expect_err("it never will be").to_string();
        assert!(text.contains("rank 0 left its group before it came to a call"), "{text}");
        assert!(t.direct().expect("d").finished(0, 0), "it reads nothing any more");
        let text = wait_in_vain(&mut *t, 0).to_string();
        assert!(text.contains("rank 0 left before"), "{text}");
    });
    for report in reports {
        assert_eq!((report.exit_code(), report.sentence()), (0, None));
    }
}

#[test]
fn a_rank_that_vanishes_without_leaving_is_lost() {
    let reports = job(this_test!(), &[2], || {
        let mut t = connect().expect("a group");
        if t.rank() == 1 {
            exit(0);
        }
        expect(&wait_in_vain(&mut *t, 1), &["rank 1 exited with code 0"]);
    });
    for report in reports {
        assert_eq!(report.endings[0], Ending::Exited(AS_EXPECTED as u8));
    }
}

#[test]
fn a_rank_that_does_not_end_is_killed_after_the_grace() {
    let reports = job(this_test!(), &[2], || {
        let t = connect().expect("a group");
        if t.rank() == 0 {
            exit(3);
        }
        loop {
            std::thread::sleep(Duration::from_secs(60));
        }
    });
    for report in reports {
        assert_eq!((report.exit_code(), &report.killed[..]), (3, &[1][..]));
        let sentence = report.sentence().expect("a failure");
        assert!(sentence.contains("rank 0 exited with code 3; rank 1 did not end by itself"), "{sentence}");
    }
}

#[test]
fn a_rank_that_dies_before_the_rendezvous_ends_it() {
    let reports = job(this_test!(), &[3], || {
        if std::env::var("CARAVAN_RANK").is_ok_and(|r| r == "1") {
            exit(5);
        }
        match connect() {
            Err(error) => expect(&error, &["rank 1 exited with code 5"]),
            Ok(_) => exit(99),
        }
    });
    for report in reports {
        assert_eq!((report.exit_code(), &report.killed[..]), (5, &[][..]));
        for rank in [0, 2] {
            assert_eq!(report.endings[rank], Ending::Exited(AS_EXPECTED as u8), "rank {rank}");
        }
    }
}

#[test]
fn nothing_is_started_when_nothing_can_be() {
    assert!(
        supervise(0, OnRequest::EndAtOnce, |_| Command::new("true"))
            .unwrap_err()
            .to_string()
            .contains("0 ranks")
    );
    // The first rank starts and has to go again.
    let text = supervise(2, OnRequest::EndAtOnce, |rank| match rank {
        0 => {
            let mut command = Command::new("sleep");
            command.arg("1000");
            command
        }
        _ => Command::new("/nonexistent/program"),
    })
    .unwrap_err()
    .to_string();
    assert!(text.contains("starting rank 1 of 2") && text.contains("/nonexistent/program"), "{text}");
}
