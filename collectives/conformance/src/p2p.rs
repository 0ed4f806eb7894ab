//! What every transport owes the engine, asked at the level of messages. Each rank calls these with its transport.

use collectives::transport::{Request, Tag, Transport};
use collectives::{Error, Result};
use std::time::{Duration, Instant};

/// A test that takes longer hangs.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Around inline, eager and rendezvous limits of the libraries, with odd lengths.
pub const SIZES: [usize; 18] = [
    0,
    1,
    7,
    8,
    64,
    255,
    1000,
    4096,
    8191,
    8192,
    8193,
    16385,
    65536,
    65537,
    262144,
    1 << 20,
    (1 << 20) + 1,
    5_000_001,
];

/// Byte `i` of the message that `from` sends `to` under `tag`.
pub fn byte(from: usize, to: usize, tag: u64, i: usize) -> u8 {
    let x = (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ tag.wrapping_mul(0xff51_afd7_ed55_8ccd);
    (x >> 32) as u8 ^ (from * 31 + to * 7) as u8
}

pub fn message(from: usize, to: usize, tag: u64, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| byte(from, to, tag, i)).collect()
}

pub fn assert_message(got: &[u8], from: usize, to: usize, tag: u64) {
    if let Some(i) = (0..got.len()).find(|&i| got[i] != byte(from, to, tag, i)) {
        panic!("byte {i} of {} from rank {from} to rank {to}, tag {tag}", got.len());
    }
}

/// Until all of `requests` are complete, or the transport says why not.
pub fn wait(t: &mut dyn Transport, requests: &[Request]) -> Result<()> {
    let mut open = std::collections::VecDeque::from(requests.to_vec());
    let until = Instant::now() + PATIENCE;
    let mut idle = 0;
    // One that is not through at a time, as the engine does: each test moves all, and a library may yield in it.
    while let Some(&first) = open.front() {
        if t.test(first)? {
            open.pop_front();
            continue;
        }
        open.rotate_left(1);
        t.check()?;
        idle += 1;
        if idle > 200 {
            t.park(Duration::from_millis(1));
        }
        assert!(Instant::now() < until, "rank {}: {} messages never came through", t.rank(), open.len());
    }
    Ok(())
}

/// A barrier, then an endless wait for a message that never comes; how either ends.
pub fn barrier_and_wait_for_nothing(t: &mut dyn Transport, from: usize) -> Error {
    match try_barrier(t, 1) {
        Ok(()) => wait_for_nothing(t, from),
        Err(error) => error,
    }
}

/// An endless wait for a message that never comes; how it ends.
pub fn wait_for_nothing(t: &mut dyn Transport, from: usize) -> Error {
    let mut space = [0u8; 8];
    // SAFETY: `space` lives until the transport is gone or the message came; nothing is ever sent.
    let request = unsafe { t.recv(from, Tag(99_999), space.as_mut_ptr(), 8) };
    match request.and_then(|r| wait(t, &[r])) {
        Ok(()) => panic!("a message that nobody sent"),
        Err(error) => error,
    }
}

/// All ranks have come here.
pub fn barrier(t: &mut dyn Transport, tag: u64) {
    try_barrier(t, tag).unwrap();
}

/// All ranks have come to a case that waits, however late: only from now on they are missed after its own deadline. In others
/// somebody could fail before all are out of this.
pub fn meet(t: &mut dyn Transport) {
    barrier(t, 99_998);
}

/// All ranks have come here, unless one was lost meanwhile.
pub fn try_barrier(t: &mut dyn Transport, tag: u64) -> Result<()> {
    let (rank, size) = (t.rank(), t.size());
    let mut space = vec![0u8; size];
    let mut requests = Vec::new();
    let word = [1u8];
    for peer in (0..size).filter(|&p| p != rank) {
        // SAFETY: both buffers live until `wait` has seen all requests complete.
        unsafe {
            requests.push(t.recv(peer, Tag(tag), space[peer..].as_mut_ptr(), 1)?);
            requests.push(t.send(peer, Tag(tag), word.as_ptr(), 1)?);
        }
    }
    wait(t, &requests)
}

/// Every rank sends every rank one message of each size; all are under way at once.
pub fn sizes(t: &mut dyn Transport, sizes: &[usize]) {
    let (rank, size) = (t.rank(), t.size());
    for (number, &bytes) in sizes.iter().enumerate() {
        let tag = 1000 + number as u64;
        let out: Vec<Vec<u8>> = (0..size).map(|to| message(rank, to, tag, bytes)).collect();
        let mut into: Vec<Vec<u8>> = (0..size).map(|_| vec![0xaa; bytes]).collect();
        let mut requests = Vec::new();
        for peer in (0..size).map(|i| (rank + i) % size) {
            // SAFETY: the buffers live, and stay as they are, until `wait` has seen all requests complete.
            unsafe {
                // Half of the receives come late, so that both expected and unexpected messages occur.
                if number % 2 == 0 {
                    requests.push(t.recv(peer, Tag(tag), into[peer].as_mut_ptr(), bytes).unwrap());
                    requests.push(t.send(peer, Tag(tag), out[peer].as_ptr(), bytes).unwrap());
                } else {
                    requests.push(t.send(peer, Tag(tag), out[peer].as_ptr(), bytes).unwrap());
                }
            }
        }
        if number % 2 == 1 {
            for (peer, space) in into.iter_mut().enumerate() {
                // SAFETY: as above.
                requests.push(unsafe { t.recv(peer, Tag(tag), space.as_mut_ptr(), bytes).unwrap() });
            }
        }
        wait(t, &requests).unwrap();
        for (from, got) in into.iter().enumerate() {
            assert_message(got, from, rank, tag);
        }
    }
}

/// Many messages between each pair at once, received in another order than they were sent; tags that differ only in
/// high bits; and messages of one tag, which must come in order.
pub fn tags(t: &mut dyn Transport) {
    let (rank, size) = (t.rank(), t.size());
    // As the engine counts: calls in the upper bits, messages of a call in the lower ones.
    let tags: Vec<u64> = (0..64).map(|i| (i / 8) << 16 | (i % 8)).collect();
    let bytes = |i: usize| [24, 3000, 100_000][i % 3];
    let out: Vec<Vec<Vec<u8>>> = (0..size)
        .map(|to| tags.iter().enumerate().map(|(i, &tag)| message(rank, to, tag, bytes(i))).collect())
        .collect();
    let mut into: Vec<Vec<Vec<u8>>> =
        (0..size).map(|_| (0..tags.len()).map(|i| vec![0; bytes(i)]).collect()).collect();
    let mut requests = Vec::new();
    for (to, all) in out.iter().enumerate() {
        for (data, &tag) in all.iter().zip(&tags) {
            // SAFETY: `out` stays as it is until `wait` has seen all requests complete.
            requests.push(unsafe { t.send(to, Tag(tag), data.as_ptr(), data.len()).unwrap() });
        }
    }
    for (from, all) in into.iter_mut().enumerate() {
        for step in 0..tags.len() {
            // 37 and 64 share no divisor: a permutation.
            let i = (step * 37 + from) % tags.len();
            let space = &mut all[i];
            // SAFETY: as above.
            requests.push(unsafe { t.recv(from, Tag(tags[i]), space.as_mut_ptr(), space.len()).unwrap() });
        }
    }
    wait(t, &requests).unwrap();
    for (from, all) in into.iter().enumerate() {
        for (got, &tag) in all.iter().zip(&tags) {
            assert_message(got, from, rank, tag);
        }
    }
    same_tag(t);
}

fn same_tag(t: &mut dyn Transport) {
    let (rank, size) = (t.rank(), t.size());
    const MESSAGES: usize = 50;
    // Small and large in turn, so that the quick ones could overtake.
    let bytes = |i: usize| if i.is_multiple_of(2) { 200_000 } else { 16 };
    let out: Vec<Vec<u8>> = (0..MESSAGES).map(|i| message(rank, 0, i as u64, bytes(i))).collect();
    let mut into: Vec<Vec<Vec<u8>>> =
        (0..size).map(|_| (0..MESSAGES).map(|i| vec![0; bytes(i)]).collect()).collect();
    let mut requests = Vec::new();
    for i in 0..MESSAGES {
        for (peer, spaces) in into.iter_mut().enumerate() {
            // SAFETY: the buffers live, and stay as they are, until `wait` has seen all requests complete.
            unsafe {
                requests.push(t.send(peer, Tag(5), out[i].as_ptr(), bytes(i)).unwrap());
                requests.push(t.recv(peer, Tag(5), spaces[i].as_mut_ptr(), bytes(i)).unwrap());
            }
        }
    }
    wait(t, &requests).unwrap();
    for (from, all) in into.iter().enumerate() {
        for (i, got) in all.iter().enumerate() {
            assert_message(got, from, 0, i as u64);
        }
    }
}

/// Groups of the even and the odd ranks, in descending order, with a group of all beneath: the same tags at the same
/// time in all of them.
pub fn subgroups(t: &mut dyn Transport) {
    let (rank, size) = (t.rank(), t.size());
    let members: Vec<usize> = (0..size).rev().filter(|r| r % 2 == rank % 2).collect();
    let mut half = t.subgroup(&members, 0x1234_5678_9abc_def0 + (rank % 2) as u64, PATIENCE).unwrap();
    let all: Vec<usize> = (0..size).collect();
    let mut whole = t.subgroup(&all, 77, PATIENCE).unwrap();
    assert_eq!((half.size(), whole.size(), whole.rank()), (members.len(), size, rank));
    assert_eq!(members[half.rank()], rank);
    assert_eq!(half.name(), t.name());
    for round in 0..3u64 {
        let bytes = [10, 5000, 300_000][round as usize];
        let groups: [&mut dyn Transport; 3] = [&mut *half, &mut *whole, t];
        let mut under_way = Vec::new();
        for (number, group) in groups.into_iter().enumerate() {
            let (me, n) = (group.rank(), group.size());
            let salt = 100 * number as u64 + round;
            let out: Vec<Vec<u8>> = (0..n).map(|to| message(me, to, salt, bytes)).collect();
            let mut into: Vec<Vec<u8>> = (0..n).map(|_| vec![0; bytes]).collect();
            let mut requests = Vec::new();
            for peer in 0..n {
                // SAFETY: the buffers are kept in `under_way` until `wait` has seen all requests complete; moving a
                // Vec does not move its bytes.
                unsafe {
                    requests.push(group.send(peer, Tag(round), out[peer].as_ptr(), bytes).unwrap());
                    requests.push(group.recv(peer, Tag(round), into[peer].as_mut_ptr(), bytes).unwrap());
                }
            }
            under_way.push((requests, out, into, salt));
        }
        let groups: [&mut dyn Transport; 3] = [&mut *half, &mut *whole, t];
        for (group, (requests, _out, into, salt)) in groups.into_iter().zip(&under_way) {
            wait(group, requests).unwrap();
            for (from, got) in into.iter().enumerate() {
                assert_message(got, from, group.rank(), *salt);
            }
        }
    }
    // A group of a group.
    let ends: Vec<usize> = if size > 1 { vec![0, size - 1] } else { vec![0] };
    if ends.contains(&rank) {
        let mut pair = whole.subgroup(&ends, 5, PATIENCE).unwrap();
        sizes(&mut *pair, &[3, 100_000]);
        barrier(&mut *pair, 1);
    }
}

/// A message of another length than was posted is an error that says so. Between ranks 0 and 1.
pub fn wrong_lengths(t: &mut dyn Transport) {
    for (tag, sent, posted) in [
        (1u64, 100usize, 50usize),
        (2, 50, 100),
        (3, 300_000, 200_000),
        (4, 200_000, 300_000),
        (5, 3500, 1500),
        (6, 1500, 3500),
    ] {
        let data = vec![1u8; sent];
        let mut space = vec![0u8; posted.max(sent)];
        match t.rank() {
            // SAFETY: both buffers live until the request has ended.
            0 => unsafe {
                let request = t.send(1, Tag(tag), data.as_ptr(), sent).unwrap();
                // Whether the sender hears of it depends on the library.
                let _ = wait(t, &[request]);
            },
            // SAFETY: as above.
            1 => unsafe {
                let error = t
                    .recv(0, Tag(tag), space.as_mut_ptr(), posted)
                    .and_then(|r| wait(t, &[r]))
                    .expect_err("a message of another length");
                assert!(matches!(error, Error::Diverged { rank: 1, peer: 0, .. }), "{error}");
                assert!(error.to_string().contains(&format!("{posted} bytes")), "{error}");
                assert!(space[posted..].iter().all(|&byte| byte == 0), "what lies behind is another's");
            },
            _ => {}
        }
    }
}

/// Who forms a group waits for its members as long as it was told. Between ranks 0 and 1, which does not come.
pub fn half_a_group(t: &mut dyn Transport) {
    let within = Duration::from_millis(50);
    if t.rank() == 0 {
        let error = t.subgroup(&[0, 1], 8, within).err().expect("rank 1 does not come");
        assert!(
            matches!(error, Error::Timeout { rank: 0, peer: 1, after, .. } if after == within),
            "{error}"
        );
    }
    barrier(t, 1);
}

/// A rank that has come down in one group is named there although its process lives on. Between two ranks.
pub fn outlived_panic(t: &mut dyn Transport) {
    let mut group = t.subgroup(&[0, 1], 6, PATIENCE).unwrap();
    barrier(&mut *group, 1);
    if t.rank() == 0 {
        let error = wait_for_nothing(&mut *group, 1).to_string();
        assert!(error.contains("rank 1 gave up: panicked"), "{error}");
        // For this rank 1 lives on.
        return t.abort(&Error::GivenUp("it has heard of it".into()));
    }
    let comes_down = move || {
        let _group = group;
        panic!("on purpose");
    };
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(comes_down)).is_err());
    wait_for_nothing(t, 0);
}

/// A rank that does not exist is an error, and a group that no rank can be in.
pub fn wrong_ranks(t: &mut dyn Transport) {
    let beyond = t.size();
    let mut space = [0u8; 4];
    // SAFETY: refused, so nothing is posted.
    unsafe {
        let error = t.send(beyond, Tag(0), space.as_ptr(), 4).expect_err("no such rank").to_string();
        assert!(error.contains(&format!("the group has {beyond}")), "{error}");
        assert!(t.recv(beyond, Tag(0), space.as_mut_ptr(), 4).is_err());
    }
    let me = t.rank();
    for (members, words) in
        [(vec![me, beyond], "the group has"), (vec![me, me], "twice"), (vec![], "without")]
    {
        let error = t.subgroup(&members, 9, PATIENCE).err().expect("no such group").to_string();
        assert!(error.contains(words), "{error}");
    }
}

/// Everything that does not end a transport.
pub fn suite(t: &mut dyn Transport) {
    sizes(t, &SIZES);
    tags(t);
    subgroups(t);
    wrong_ranks(t);
    barrier(t, 4242);
}
