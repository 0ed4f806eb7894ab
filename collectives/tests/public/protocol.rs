//! The shared-memory transport between real processes: publishing and reading, messages, subgroups, memory.

use crate::ranks::{PATIENCE, identity, job, options, pattern, run, this_test, until, wait};
use collectives::bootstrap::{Options, shm_group};
use collectives::transport::{Tag, Transport};
use collectives::{Buffer, Error, Result};
use conformance::p2p;

/// A buffer that peers can read where it is.
fn shared(t: &mut dyn Transport, data: &[u8]) -> Buffer<u8> {
    let mut buffer = Buffer::from_memory(t.alloc(data.len()).expect("shared memory"));
    buffer.host_mut().copy_from_slice(data);
    buffer
}

fn publish(t: &mut dyn Transport, sequence: u64, fingerprint: u64, data: &[u8]) {
    until(t, |t| {
        let direct = t.direct().expect("direct access");
        // SAFETY: inline, or registered and kept by the caller until all have finished.
        Ok(unsafe { direct.publish(sequence, fingerprint, data.as_ptr(), data.len())? }.then_some(()))
    })
    .expect("published");
}

/// This rank has read all of the call.
fn finish(t: &mut dyn Transport, sequence: u64) {
    // SAFETY: what was read is a copy.
    unsafe { t.direct().expect("direct access").finish(sequence) };
}

fn read(t: &mut dyn Transport, peer: usize, sequence: u64) -> (Vec<u8>, u64) {
    until(t, |t| {
        let found = t.direct().expect("direct access").published(peer, sequence)?;
        // SAFETY: published, and not finished yet.
        Ok(found.map(|(at, bytes, f)| (unsafe { std::slice::from_raw_parts(at, bytes) }.to_vec(), f)))
    })
    .expect("a peer's range")
}

#[test]
fn every_rank_reads_what_every_rank_published() {
    run(this_test!(), &[1, 2, 3, 5], |mut t| {
        let t = &mut *t;
        let (me, n) = (t.rank(), t.size());
        let (depth, inline) = {
            let direct = t.direct().expect("direct access");
            (direct.depth(), direct.inline_limit())
        };
        let sizes = [0, 1, 31, 32, 33, 64, 100, inline - 1, inline, inline + 1, 100_000, 1 << 20];
        // Several times round the slots, with more than one call in flight.
        for sequence in 0..2 * depth + 7 {
            let bytes = sizes[(sequence % sizes.len() as u64) as usize];
            let mine = pattern(me, sequence, bytes);
            let kept = (bytes > inline).then(|| shared(t, &mine));
            publish(t, sequence, sequence * 10 + me as u64, kept.as_ref().map_or(&mine[..], |b| b.host()));
            for peer in 0..n {
                let (data, fingerprint) = read(t, peer, sequence);
                assert_eq!(fingerprint, sequence * 10 + peer as u64);
                assert!(
                    data == pattern(peer, sequence, bytes),
                    "call {sequence}, {bytes} bytes of rank {peer}"
                );
            }
            finish(t, sequence);
            if kept.is_some() {
                for peer in 0..n {
                    let over = |t: &mut dyn Transport| {
                        Ok(t.direct().expect("d").finished(peer, sequence).then_some(()))
                    };
                    until(t, over).expect("finished");
                }
            }
        }
    });
}

#[test]
fn a_slot_waits_for_the_slowest_reader() {
    run(this_test!(), &[3], |mut t| {
        let t = &mut *t;
        let depth = t.direct().expect("direct access").depth();
        if t.rank() == 0 {
            for sequence in 0..depth {
                publish(t, sequence, 0, &[sequence as u8]);
            }
            // Rank 2 has not read anything before it hears from us.
            for peer in 1..3 {
                read(t, peer, 0);
            }
            finish(t, 0);
            let byte = 7u8;
            // SAFETY: inline.
            let early = unsafe { t.direct().expect("d").publish(depth, 0, &byte, 1) }.expect("no error");
            assert!(!early, "rank 2 still reads call 0");
            let request = send(t, 2, 1, &[1]);
            wait(t, request).expect("sent");
            publish(t, depth, 0, &[byte]);
        } else {
            publish(t, 0, 0, &[]);
            if t.rank() == 2 {
                assert_eq!(recv(t, 0, 1, 1), [1]);
            }
            for sequence in 0..=depth {
                let expected = if sequence == depth { 7 } else { sequence as u8 };
                assert_eq!(read(t, 0, sequence).0, [expected]);
                finish(t, sequence);
            }
        }
    });
}

fn send(t: &mut dyn Transport, to: usize, tag: u64, data: &[u8]) -> collectives::transport::Request {
    // SAFETY: every caller keeps the data until the request is complete.
    unsafe { t.send(to, Tag(tag), data.as_ptr(), data.len()) }.expect("posted")
}

fn recv(t: &mut dyn Transport, from: usize, tag: u64, bytes: usize) -> Vec<u8> {
    let mut data = vec![0u8; bytes];
    // SAFETY: waited for below.
    let request = unsafe { t.recv(from, Tag(tag), data.as_mut_ptr(), bytes) }.expect("posted");
    wait(t, request).expect("received");
    data
}

const SIZES: [usize; 12] =
    [0, 1, 32, 33, 4000, 8 << 10, (8 << 10) + 1, 65_536, 100_001, 1 << 20, 3_000_001, 5 << 20];

#[test]
fn messages_of_every_size_between_all_pairs() {
    run(this_test!(), &[1, 2, 3, 5], |mut t| {
        let t = &mut *t;
        let (me, n) = (t.rank(), t.size());
        for (step, &bytes) in SIZES.iter().enumerate() {
            // Also to itself; odd steps from memory that peers cannot read, even ones from memory they can.
            let data: Vec<Vec<u8>> = (0..n).map(|to| pattern(me * 100 + to, step as u64, bytes)).collect();
            let kept: Vec<Buffer<u8>> =
                if step % 2 == 0 { data.iter().map(|d| shared(t, d)).collect() } else { vec![] };
            let mut arrived: Vec<Vec<u8>> = vec![vec![0; bytes]; n];
            let mut requests = Vec::new();
            for (from, room) in arrived.iter_mut().enumerate() {
                // SAFETY: all requests are waited for below.
                requests.push(
                    unsafe { t.recv(from, Tag(step as u64), room.as_mut_ptr(), bytes) }.expect("posted"),
                );
            }
            for (to, own) in data.iter().enumerate() {
                let source = kept.get(to).map_or(&own[..], |b| b.host());
                requests.push(send(t, to, step as u64, source));
            }
            for request in requests {
                wait(t, request).expect("moved");
            }
            for (from, data) in arrived.iter().enumerate() {
                assert!(
                    *data == pattern(from * 100 + me, step as u64, bytes),
                    "{bytes} bytes from {from} to {me}"
                );
            }
        }
    });
}

#[test]
fn tags_match_whatever_the_order() {
    run(this_test!(), &[2, 4], |mut t| {
        let t = &mut *t;
        let (me, n) = (t.rank(), t.size());
        let (next, previous) = ((me + 1) % n, (me + n - 1) % n);
        // More large messages at once than the channel has places for, and small ones among them, two per tag.
        let bytes = |tag: u64| if tag.is_multiple_of(3) { 20_000 + tag as usize } else { 5 + tag as usize };
        let data: Vec<(u64, Vec<u8>)> = (0..400u64).map(|i| (i / 2, pattern(me, i, bytes(i / 2)))).collect();
        let sent: Vec<_> = data.iter().map(|(tag, d)| send(t, next, *tag, d)).collect();
        // Received from the last tag to the first; of each tag in the order sent.
        for tag in (0..200u64).rev() {
            for i in [2 * tag, 2 * tag + 1] {
                assert!(
                    recv(t, previous, tag, bytes(tag)) == pattern(previous, i, bytes(tag)),
                    "message {i}"
                );
            }
        }
        for request in sent {
            wait(t, request).expect("sent");
        }
    });
}

#[test]
fn messages_are_as_over_the_other_transports() {
    run(this_test!(), &[1, 2, 3, 4], |mut t| p2p::suite(&mut *t));
}

#[test]
fn a_message_of_another_length_diverges_and_its_first_bytes_come() {
    run(this_test!(), &[2], |mut t| {
        let t = &mut *t;
        p2p::wrong_lengths(t);
        // In the ring, through it in pieces, and from where it lies.
        let lengths = [(12, 8), (8, 12), (300_000, 40_000), (40_000, 300_000)];
        let cases = lengths.into_iter().flat_map(|lengths| [(lengths, false), (lengths, true)]);
        for (tag, ((sent, posted), in_place)) in (10u64..).zip(cases) {
            let data = pattern(0, tag, sent);
            let (late, both) = (tag % 4 < 2, sent.min(posted));
            if t.rank() == 0 {
                let kept = in_place.then(|| shared(t, &data));
                let request = send(t, 1, tag, kept.as_ref().map_or(&data[..], |b| b.host()));
                if late {
                    let told = send(t, 1, 1, &[]);
                    wait(t, told).expect("sent");
                }
                wait(t, request).expect("taken all the same");
                continue;
            }
            if late {
                // What was sent before is here.
                recv(t, 0, 1, 0);
            }
            let mut room = vec![0u8; posted];
            // SAFETY: the room outlives the request.
            let request = unsafe { t.recv(0, Tag(tag), room.as_mut_ptr(), posted) }.expect("posted");
            let error = wait(t, request).expect_err("another length");
            let Error::Diverged { rank: 1, peer: 0, mine, theirs, .. } = &error else { panic!("{error}") };
            assert_eq!([mine, theirs], [&format!("{posted} bytes"), &format!("{sent} bytes")]);
            assert!(room[..both] == data[..both] && room[both..].iter().all(|&b| b == 0), "tag {tag}");
        }
        barrier(t, 2);
    });
}

/// All ranks have come here.
fn barrier(t: &mut dyn Transport, tag: u64) {
    let n = t.size();
    let sent: Vec<_> = (0..n).map(|to| send(t, to, tag, &[])).collect();
    (0..n).for_each(|from| drop(recv(t, from, tag, 0)));
    sent.into_iter().for_each(|r| wait(t, r).expect("sent"));
}

#[test]
fn groups_are_apart_and_their_memory_comes_back() {
    run(this_test!(), &[2, 5], |mut world| {
        let (me, n) = (world.rank(), world.size());
        // More groups one after the other than can be open at once.
        for round in 0..400u64 {
            let parity: Vec<usize> = (0..n).rev().filter(|r| r % 2 == me % 2).collect();
            let mut group = world.subgroup(&parity, round, PATIENCE).expect("a group");
            assert_eq!((group.size(), parity[group.rank()]), (parity.len(), me));
            // The same tags and calls at once in both groups.
            let t = &mut *group;
            publish(t, 0, round, &[me as u8]);
            for (peer, &rank) in parity.iter().enumerate() {
                assert_eq!(read(t, peer, 0), (vec![rank as u8], round));
            }
            finish(t, 0);
            let (next, previous) = ((t.rank() + 1) % t.size(), (t.rank() + t.size() - 1) % t.size());
            let data = [me as u8, round as u8];
            let request = send(t, next, 0, &data);
            assert_eq!(recv(t, previous, 0, 2), [parity[previous] as u8, round as u8]);
            wait(t, request).expect("sent");
        }
        barrier(&mut *world, 99);
    });
}

/// Whoever leaves a group before the others do still has its part of it.
#[test]
fn memory_of_groups_that_all_have_left_can_be_taken() {
    let reports = job(this_test!(), &[2], || {
        let limited = Options { segment_limit: Some(16 << 20), ..options() };
        let mut world = shm_group(&identity(), &limited).expect("a group");
        let group = |context| world.subgroup(&[0, 1], context, PATIENCE).expect("a group");
        let groups: Vec<_> = (0..16).map(group).collect();
        // In pieces, because what the world keeps may lie anywhere.
        let eight =
            |world: &mut dyn Transport| (0..8).map(|_| world.alloc(1 << 20)).collect::<Result<Vec<_>>>();
        assert!(eight(&mut *world).is_err(), "half of it is theirs");
        drop(groups);
        barrier(&mut *world, 1);
        eight(&mut *world).expect("their memory");
        barrier(&mut *world, 2);
    });
    for report in reports {
        assert_eq!(report.exit_code(), 0, "{:?}", report.sentence());
    }
}

#[test]
fn a_group_must_make_sense() {
    run(this_test!(), &[2], |mut world| {
        let me = world.rank();
        for (members, words) in
            [(vec![me, 7], "rank 7"), (vec![1 - me], "without this rank"), (vec![me, me], "twice")]
        {
            match world.subgroup(&members, 1, PATIENCE) {
                Err(error) => assert!(error.to_string().contains(words), "{error}"),
                Ok(_) => panic!("{members:?} is no group"),
            }
        }
        let _first = world.subgroup(&[me], 5, PATIENCE).expect("a group");
        assert!(world.subgroup(&[me], 5, PATIENCE).is_err(), "the same group twice at once");
        assert!(world.subgroup(&[me], 6, PATIENCE).is_ok());
        barrier(&mut *world, 1);
    });
}

#[test]
fn more_ranks_than_cores_make_progress_asleep() {
    run(this_test!(), &[5], |mut t| {
        let t = &mut *t;
        let n = t.size();
        for sequence in 0..3000u64 {
            publish(t, sequence, 0, &sequence.to_le_bytes());
            for peer in 0..n {
                assert_eq!(read(t, peer, sequence).0, sequence.to_le_bytes());
            }
            finish(t, sequence);
        }
    });
}

#[test]
fn memory_that_is_not_there_is_an_error() {
    run(this_test!(), &[2], |mut t| {
        let all: u64 = std::fs::read_to_string("/proc/meminfo")
            .expect("meminfo")
            .lines()
            .find_map(|l| l.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB")?.parse().ok())
            .expect("a number");
        let refused = |result: Result<collectives::Memory>| match result {
            Err(error) => error.to_string(),
            Ok(_) => panic!("more memory than the machine has"),
        };
        let text = refused(t.alloc((all as usize) << 11));
        assert!(text.contains("shared memory on rank") && text.contains("GiB"), "{text}");
        // Within the address space, but not all of it can be free: this test runs in it.
        let text = refused(t.alloc((all as usize) << 10));
        assert!(text.contains("available") || text.contains("may allocate"), "{text}");
        // Nothing of it was kept.
        let buffer = shared(&mut *t, &[1; 100]);
        assert!(t.direct().expect("d").registered(buffer.host().as_ptr(), 100));
        assert!(!t.direct().expect("d").registered([0u8; 100].as_ptr(), 100));
        barrier(&mut *t, 1);
    });
}
