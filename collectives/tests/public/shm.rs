//! The suite that every transport passes, here over shared memory, where each rank is a process.

use crate::ranks::{self, PATIENCE, connect, not_for_ever, run, this_test};
use collectives::bootstrap;
use collectives::transport::Tag;
use collectives::{Buffer, Communicator, Options, Progress};
use conformance::{Case, cases, p2p, standard, windowed};
use harness::Waited;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Runs every case that leaves its processes alive, each in a group of its own.
fn suite(test: &str, n: usize, chosen: fn(&Case) -> bool, progress: Progress) {
    run(test, &[n], |mut transport| {
        let (rank, all) = (transport.rank(), (0..n).collect::<Vec<usize>>());
        for (i, case) in cases().iter().filter(|c| !c.fails && chosen(c)).enumerate() {
            let start = Instant::now();
            let group = transport.subgroup(&all, 1_000_000 + i as u64, PATIENCE).expect("a group");
            let options = Options { progress, ..(case.options)() };
            (case.run)(Communicator::new(group, options).expect("a communicator"));
            if rank == 0 {
                eprintln!("{n} ranks, {}: {:.2?}", case.name, start.elapsed());
            }
        }
    });
}

#[test]
fn one_rank() {
    suite(this_test!(), 1, |_| true, Progress::Inline);
}

#[test]
fn two_ranks() {
    suite(this_test!(), 2, |_| true, Progress::Inline);
}

#[test]
fn three_ranks() {
    suite(this_test!(), 3, |_| true, Progress::Inline);
}

#[test]
fn four_ranks() {
    suite(this_test!(), 4, |_| true, Progress::Inline);
}

#[test]
fn five_ranks() {
    suite(this_test!(), 5, |_| true, Progress::Inline);
}

#[test]
fn default_windows() {
    run(this_test!(), &[3], |transport| {
        (windowed().run)(Communicator::new(transport, standard()).expect("a communicator"));
    });
}

#[test]
fn with_progress_threads() {
    let chosen = |case: &Case| !["reduce", "all_reduce", "reduce_scatter"].contains(&case.name);
    suite(this_test!(), 2, chosen, Progress::Thread { cpu: None });
}

/// A rank need not wait for who still reads what it has shown in a group that it leaves, nor lose the memory of it.
#[test]
fn groups_are_left_before_all_have_read() {
    let each = 512 << 10;
    // Less than what would be lost.
    let options = bootstrap::Options { segment_limit: Some(12 << 20), ..ranks::options() };
    // Files, because who waits for a message reads meanwhile.
    let give = |what| std::fs::write(ranks::folder().join(what), []).expect("a file");
    let await_one = |what| {
        let mut waited = Waited::begin();
        while std::fs::remove_file(ranks::folder().join(what)).is_err() {
            not_for_ever(&mut waited);
            std::thread::sleep(Duration::from_micros(100));
        }
    };
    let body = || {
        let transport = bootstrap::shm_group(&ranks::identity(), &options).expect("a group");
        let world = Communicator::new(transport, standard()).expect("a communicator");
        for i in 0..24u8 {
            let group = world.split(Some(0), 0).expect("works").expect("a group");
            if world.rank() == 0 {
                await_one("begun");
                group.broadcast(&mut vec![i; each][..], 0).expect("works");
                drop(group);
                give("left");
            } else {
                let read = group.start_broadcast(Buffer::<u8>::zeroed(each), 0).expect("starts");
                give("begun");
                await_one("left");
                assert!(read.wait().expect("works").host().iter().all(|&byte| byte == i));
            }
        }
    };
    for report in ranks::job(this_test!(), &[2], body) {
        assert_eq!(report.exit_code(), 0, "{:?}", report.sentence());
    }
}

#[test]
fn failures() {
    ranks::failures(this_test!(), &[2, 3], connect);
}

/// Each group has its own entry in the rank's memory, also where two threads form theirs in the same moment.
#[test]
fn threads_form_groups_at_once() {
    run(this_test!(), &[1], |mut transport| {
        let two = [0, 1].map(|context| transport.subgroup(&[0], context, PATIENCE).expect("a group"));
        let ready = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for (thread, mut parent) in (0..).zip(two) {
                let ready = &ready;
                scope.spawn(move || {
                    for turn in 1..8_000 {
                        ready.fetch_add(1, Ordering::SeqCst);
                        while ready.load(Ordering::SeqCst) < 2 * turn {
                            std::thread::yield_now();
                        }
                        let mut form = || parent.subgroup(&[0], 2 * turn + thread, PATIENCE);
                        let _group = form().expect("a group");
                        assert!(form().is_err(), "it is where it was put");
                    }
                });
            }
        });
    });
}

/// Who can do without a message of a rank that has left goes on with the others.
#[test]
fn a_message_that_does_not_come_any_more_fails_no_other() {
    run(this_test!(), &[3], |mut transport| {
        let mut group = transport.subgroup(&[0, 1, 2], 1, PATIENCE).expect("a group");
        p2p::barrier(&mut *group, 1);
        let mut word = [0u8; 8];
        match group.rank() {
            0 => {
                let mut from = |rank| {
                    // SAFETY: `word` stays until the group has gone.
                    let request = unsafe { group.recv(rank, Tag(2), word.as_mut_ptr(), 8).expect("posted") };
                    ranks::wait(&mut *group, request)
                };
                let left = from(2).expect_err("it has left").to_string();
                assert!(left.contains("rank 2 left before"), "{left}");
                from(1).expect("it comes late");
            }
            1 => {
                std::thread::sleep(Duration::from_millis(300));
                // SAFETY: `word` stays until it is sent.
                let request = unsafe { group.send(0, Tag(2), word.as_ptr(), 8).expect("posted") };
                ranks::wait(&mut *group, request).expect("sent");
            }
            _ => std::thread::sleep(Duration::from_millis(50)),
        }
        drop(group);
        p2p::barrier(&mut *transport, 3);
    });
}

#[test]
fn groups_that_cannot_be_are_refused() {
    run(this_test!(), &[1], |mut transport| {
        let mut form = |context| transport.subgroup(&[0], context, PATIENCE);
        let mut groups = vec![form(0).expect("a group")];
        let refused = form(0).map(drop).expect_err("it is there already").to_string();
        assert!(refused.contains("still in use"), "{refused}");
        let refused = loop {
            match form(groups.len() as u64) {
                Ok(group) => groups.push(group),
                Err(error) => break error.to_string(),
            }
        };
        let most = format!("it is in {} already", groups.len());
        assert!(groups.len() > 300 && refused.contains(&most), "{refused}");
        groups.clear();
        form(0).expect("there is room again");
    });
}
