//! Groups of a rank over UCX, which share a worker: how many there can be, and what one of them that fails is to the others.

use crate::ucx_processes::{available, errors, passes};
use collectives::Error;
use collectives::transport::ucx::UcxTransport;
use collectives::transport::{Tag, Transport};
use conformance::p2p;

/// As many groups as tags tell apart, and one more.
pub fn too_many(t: &mut UcxTransport) {
    let mut groups: Vec<_> = (1..4096).map(|i| t.subgroup(&[0], i, p2p::PATIENCE).unwrap()).collect();
    let error = t.subgroup(&[0], 4096, p2p::PATIENCE).err().expect("tags hold no more");
    assert!(matches!(error, Error::System { .. }) && error.to_string().contains("4096 already"), "{error}");
    groups.pop();
    t.subgroup(&[0], 4096, p2p::PATIENCE).expect("one has ended");
}

/// What nobody received of a group does not come to one that has its number later.
pub fn numbers_again(t: &mut UcxTransport) {
    const SIZES: [usize; 3] = [0, 100, 20_000];
    t.narrow(3);
    let rank = t.rank();
    for round in 0..6u64 {
        let mut group = t.subgroup(&[0, 1], round, p2p::PATIENCE).unwrap();
        // What is left is under the tags of the group after the next, which has the same number.
        for (size, tag) in SIZES.into_iter().zip(round / 2 * 10..) {
            let sent = [tag, tag + 10].map(|tag| p2p::message(0, 1, tag + 100 * round, size));
            let mut space = vec![0u8; size];
            // SAFETY: `sent` and `space` stay until the wait is over.
            let requests = unsafe {
                match rank {
                    0 => [(0, tag), (1, tag + 10)]
                        .map(|(i, tag)| group.send(1, Tag(tag << 16), sent[i].as_ptr(), size).unwrap())
                        .to_vec(),
                    _ => vec![group.recv(0, Tag(tag << 16), space.as_mut_ptr(), size).unwrap()],
                }
            };
            p2p::wait(&mut *group, &requests).unwrap();
            assert!(rank == 0 || space == sent[0], "round {round}, {size} bytes");
        }
        p2p::barrier(&mut *group, u64::from(u16::MAX));
    }
}

/// Rank 0 leaves a group when rank 1, which has left it long ago, knows another by its number.
pub fn late_farewell(t: &mut UcxTransport) {
    t.narrow(3);
    let rank = t.rank();
    let mut old = Some(t.subgroup(&[0, 1], 0, p2p::PATIENCE).unwrap());
    p2p::barrier(t, 1);
    if rank == 1 {
        old = None;
    }
    p2p::barrier(t, 2);
    // Its number is another, as for rank 0 all are.
    drop(t.subgroup(&[0, 1], 1, p2p::PATIENCE).unwrap());
    p2p::barrier(t, 4);
    let mut group = t.subgroup(&[0, 1], 2, p2p::PATIENCE).unwrap();
    drop(old);
    p2p::barrier(t, 3);
    // Where one of them has left, nothing more is awaited of it.
    group.check().unwrap();
    let (sent, mut come) = ([7u8; 100], [0u8; 100]);
    for from in [0, 1] {
        // SAFETY: both stay until the wait is over.
        let request = unsafe {
            match rank == from {
                true => group.send(1 - from, Tag(9 << 16), sent.as_ptr(), sent.len()),
                false => group.recv(from, Tag(9 << 16), come.as_mut_ptr(), come.len()),
            }
        };
        p2p::wait(&mut *group, &[request.unwrap()]).unwrap();
    }
    assert_eq!(come, sent);
}

/// Rank 0 gives a group up with a message that rank 1, which waits for it in another, does not take.
pub fn cannot_end_a_message(t: &mut UcxTransport) {
    let mut group = t.subgroup(&[0, 1], 1, p2p::PATIENCE).unwrap();
    let message = vec![1u8; 4 << 20];
    p2p::barrier(t, 1);
    if t.rank() == 1 {
        return println!("error: {}", p2p::wait_for_nothing(t, 0));
    }
    // SAFETY: `message` stays until the group has ended.
    unsafe { group.send(1, Tag(7), message.as_ptr(), message.len()).unwrap() };
    group.abort(&Error::system("writing the checkpoint", "No space left on device"));
    println!("error: {}", t.check().expect_err("given up"));
}

/// Rank 1 leaves a group without taking what rank 0 has sent it, and waits for it in another.
pub fn left_without_taking(t: &mut UcxTransport) {
    let mut group = t.subgroup(&[0, 1], 1, p2p::PATIENCE).unwrap();
    let message = vec![1u8; 4 << 20];
    if t.rank() == 1 {
        p2p::barrier(t, 1);
        drop(group);
        return println!("error: {}", p2p::wait_for_nothing(t, 0));
    }
    // SAFETY: `message` stays until the group has ended.
    unsafe { group.send(1, Tag(7), message.as_ptr(), message.len()).unwrap() };
    p2p::barrier(t, 1);
    drop(group);
    println!("error: {}", t.check().expect_err("given up"));
}

#[test]
fn a_message_that_its_receiver_has_left_holds_nobody_up() {
    if !available() {
        return;
    }
    for tls in ["posix,cma", "tcp"] {
        for error in errors("left_without_taking", 2, tls, &[0, 1]) {
            assert!(error.contains("left the group without taking a message"), "{tls}: {error}");
        }
    }
}

#[test]
fn more_groups_than_tags_tell_apart_are_refused() {
    passes("too_many_groups", 1, "self");
}

#[test]
fn what_nobody_received_does_not_come_to_a_later_group() {
    for tls in ["posix,cma", "tcp"] {
        passes("numbers_again", 2, tls);
    }
}

#[test]
fn who_leaves_a_group_late_does_not_leave_another() {
    for tls in ["posix,cma", "tcp"] {
        passes("late_farewell", 2, tls);
    }
}

#[test]
fn a_rank_that_cannot_end_a_message_says_why_in_all_its_groups() {
    if !available() {
        return;
    }
    for tls in ["posix,cma", "tcp"] {
        for error in errors("cannot_end_a_message", 2, tls, &[0, 1]) {
            let why = "failed in another of its groups: writing the checkpoint: No space left";
            assert!(error.contains(why), "{tls}: {error}");
        }
    }
}
