//! Ranks that leave a group, in order or not, while others are still in it.

use crate::rank::{LATE, await_word, say, tell};
use crate::strict;
use collectives::Error;
use collectives::transport::{Tag, Transport};
use collectives_mpi::MpiTransport;
use conformance::p2p;
use std::time::{Duration, Instant};

/// Groups that their ranks leave one after the other, so that farewells come to who has left before: none is kept.
pub fn groups_in_turn(mut t: MpiTransport) {
    let all: Vec<usize> = (0..t.size()).collect();
    for number in 0..10 {
        let mut group = t.subgroup(&all, number, p2p::PATIENCE).unwrap();
        p2p::barrier(&mut *group, 1);
        std::thread::sleep(Duration::from_millis((t.rank() as u64 + number) % 3 * 5));
        drop(group);
    }
    p2p::barrier(&mut t, 1);
    // The last may still be on their way.
    let until = Instant::now() + Duration::from_secs(1);
    while Instant::now() < until {
        t.check().unwrap();
    }
    assert_eq!(t.untaken_words(), 0);
}

/// The first rank fails, perhaps `sending` what nobody takes, while the others, who have left in order, wait for it where
/// MPI ends; they need not.
pub fn stays_away(mut t: MpiTransport, sending: bool) {
    let message = vec![0; 4 << 20];
    let (rank, size) = (t.rank(), t.size());
    p2p::barrier(&mut t, 1);
    if rank > 0 {
        drop(t);
        println!("got out");
        say(&format!("{rank} got out"));
        // Launchers end the others as soon as one has ended.
        std::thread::sleep(p2p::PATIENCE);
        return;
    }
    if sending {
        // SAFETY: the message stays until the transport is gone.
        unsafe { t.send(1, Tag(2), message.as_ptr(), message.len()).unwrap() };
    }
    std::thread::sleep(Duration::from_millis(300));
    t.abort(&Error::system("writing the table", "No space left on device"));
    drop(t);
    (1..size).for_each(|rank| await_word(&format!("{rank} got out")));
    // So that the launcher has passed on what they have printed.
    std::thread::sleep(Duration::from_secs(2));
    std::process::exit(1);
}

/// The first rank leaves with a message under way that the second never takes, which waits for another.
pub fn leaves_a_message(mut t: MpiTransport) {
    let message = vec![0; 4 << 20];
    p2p::barrier(&mut t, 1);
    if t.rank() > 0 {
        return tell(&p2p::wait_for_nothing(&mut t, 0));
    }
    // SAFETY: the message stays until the transport is gone.
    unsafe { t.send(1, Tag(2), message.as_ptr(), message.len()).unwrap() };
    drop(t);
    // Who is told of it has time to say so before the launcher ends it.
    std::thread::sleep(2 * LATE);
    std::process::exit(1);
}

/// A rank leaves a group whose other members do not look at MPI until it has left, and so do not take its farewell.
pub fn busy_peers(mut t: MpiTransport) {
    strict::sends_wait_for_receivers();
    let all: Vec<usize> = (0..t.size()).collect();
    let mut group = t.subgroup(&all, 3, p2p::PATIENCE).unwrap();
    p2p::barrier(&mut *group, 1);
    if t.rank() > 0 {
        await_word("left");
    }
    drop(group);
    if t.rank() == 0 {
        say("left");
    }
    // What has gone by now was no loss.
    t.check().unwrap();
    p2p::barrier(&mut t, 2);
}

/// A group that a rank leaves: what it sent arrives, its end is no loss, and who waits for more learns that it left.
pub fn early_leaver(mut t: MpiTransport) {
    let rank = t.rank();
    let all: Vec<usize> = (0..t.size()).collect();
    let mut group = t.subgroup(&all, 3, p2p::PATIENCE).unwrap();
    let data = p2p::message(0, 1, 9, 200_000);
    let mut space = vec![0u8; 200_000];
    if rank == 0 {
        // SAFETY: `data` stays until the transport is gone, which waits for it.
        unsafe { group.send(1, Tag(9), data.as_ptr(), data.len()).unwrap() };
        drop(group);
    } else {
        if rank == 1 {
            std::thread::sleep(Duration::from_millis(50));
            // SAFETY: `space` stays until the wait is over.
            let request = unsafe { group.recv(0, Tag(9), space.as_mut_ptr(), space.len()).unwrap() };
            p2p::wait(&mut *group, &[request]).unwrap();
            p2p::assert_message(&space, 0, 1, 9);
        }
        let until = Instant::now() + Duration::from_millis(100);
        while Instant::now() < until {
            group.check().expect("rank 0 left in order");
        }
        let error = p2p::wait_for_nothing(&mut *group, 0).to_string();
        assert!(error.contains("rank 0 left the group"), "{error}");
        t.forgive();
        drop(group);
    }
    p2p::barrier(&mut t, 1);
    println!("rank done");
}
