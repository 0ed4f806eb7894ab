//! Delays are those of the model. Of times only lower bounds are asserted, which hold however busy the machine is; deadlines
//! leave ranks that share processors the time to answer.

use collectives::transport::emulated::Emulated;
use collectives::transport::{Nodes, Request, Tag, Transport, threads};
use collectives::{Communicator, Options, ReduceOp};
use std::sync::Barrier;
use std::time::{Duration, Instant};

fn wait(t: &mut dyn Transport, request: Request) -> collectives::Result<()> {
    while !t.test(request)? {
        t.check()?;
        t.park(Duration::from_millis(1));
    }
    Ok(())
}

fn emulated(inner: threads::Threads, link: &str, nodes: Nodes) -> Emulated {
    Emulated::new("slow", Box::new(inner), link.parse().expect("a link"), nodes).expect("a transport")
}

/// `body` on each of `n` ranks behind `link`, and what each gives back.
fn on_ranks<R: Send>(n: usize, link: &str, body: impl Fn(Emulated) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let start = |t| {
            let body = &body;
            scope.spawn(move || body(emulated(t, link, Nodes::apart(n))))
        };
        let all: Vec<_> = threads::group(n).into_iter().map(start).collect();
        all.into_iter().map(|thread| thread.join().expect("a rank")).collect()
    })
}

/// How long it took, from before the first rank sent, until rank 0 had `count` messages of `bytes` from each other.
fn many_to_one(n: usize, link: &str, count: u64, bytes: usize) -> Duration {
    let (ready, begun) = (Barrier::new(n), Instant::now());
    let ended = on_ranks(n, link, |mut t| {
        let mut space = vec![vec![0u8; bytes]; n * count as usize];
        ready.wait();
        let rank = t.rank();
        let mut requests = Vec::new();
        // SAFETY: the buffers outlive the waits below.
        unsafe {
            if rank > 0 {
                for tag in 0..count {
                    requests.push(t.send(0, Tag(tag), space[0].as_ptr(), bytes).expect("sends"));
                }
            } else {
                for (i, space) in space[..(n - 1) * count as usize].iter_mut().enumerate() {
                    let (from, tag) = (1 + i % (n - 1), (i / (n - 1)) as u64);
                    requests.push(t.recv(from, Tag(tag), space.as_mut_ptr(), bytes).expect("receives"));
                }
            }
        }
        for request in requests {
            wait(&mut t, request).expect("works");
        }
        begun.elapsed()
    });
    ended[0]
}

#[test]
fn a_message_takes_latency_and_length() {
    let took = many_to_one(2, "latency=5ms,bandwidth=10MB/s", 1, 50_000);
    assert!(took >= Duration::from_millis(10), "{took:?}");
    let took = many_to_one(2, "latency=2ms,hops=3", 1, 0);
    assert!(took >= Duration::from_millis(6), "{took:?}");
}

#[test]
fn messages_share_a_port_at_either_end() {
    // Four follow one another from one rank, three meet at one rank: four and six times 2 ms.
    let took = many_to_one(2, "latency=1ms,bandwidth=10MB/s", 4, 20_000);
    assert!(took >= Duration::from_millis(9), "{took:?}");
    let took = many_to_one(4, "latency=1ms,bandwidth=10MB/s", 2, 20_000);
    assert!(took >= Duration::from_millis(13), "{took:?}");
}

#[test]
fn a_send_is_over_when_it_has_left() {
    let took = on_ranks(2, "bandwidth=10MB/s", |mut t| {
        let (mut space, start) = (vec![0u8; 40_000], Instant::now());
        // SAFETY: the buffer outlives the wait.
        let request = unsafe {
            match t.rank() {
                0 => t.send(1, Tag(1), space.as_ptr(), space.len()),
                _ => t.recv(0, Tag(1), space.as_mut_ptr(), space.len()),
            }
        };
        wait(&mut t, request.expect("posts")).expect("works");
        start.elapsed()
    });
    assert!(took[0] >= Duration::from_millis(4), "{took:?}");
}

#[test]
fn collectives_take_as_long_as_their_bytes() {
    let took = on_ranks(3, "latency=100us,bandwidth=100MB/s", |t| {
        let comm = Communicator::new(Box::new(t), Options::default()).expect("a communicator");
        let mut data = vec![1f32; 300_000];
        comm.barrier().expect("works");
        let start = Instant::now();
        comm.all_reduce_in_place(&mut data[..], ReduceOp::Sum).expect("works");
        assert!(data.iter().all(|&x| x == 3.0));
        start.elapsed()
    });
    // The last rank to get through has sent and received 2/3 of the data twice since all had begun.
    let last = took.into_iter().max().expect("ranks");
    assert!(last >= Duration::from_millis(16), "{last:?}");
}

/// So long a rank may be silent: a busy machine has time enough to let it run.
const DEADLINE: Duration = Duration::from_secs(2);

/// Four seconds' bytes in one call, over a link at which a silent peer is given up much earlier.
#[test]
fn a_peer_in_the_midst_of_a_long_message_is_not_silent() {
    type Calls = fn(&Communicator, &mut [u8], &mut [u8]) -> collectives::Result<()>;
    let calls: [(&str, Calls); 6] = [
        ("all_gather", |comm, one, all| comm.all_gather(&one[..], all)),
        ("gather", |comm, one, all| comm.gather(&one[..], (comm.rank() == 1).then(|| all.into()), 1)),
        ("scatter", |comm, one, all| comm.scatter((comm.rank() == 1).then(|| (&all[..]).into()), one, 1)),
        ("broadcast", |comm, one, _| comm.broadcast(one, 1)),
        ("all_to_all", |comm, one, all| {
            one.fill(7);
            let sent = [&one[..], &one[..]].concat();
            comm.all_to_all(&sent[..], all)
        }),
        ("send and recv", |comm, one, _| match comm.rank() {
            0 => comm.send(&one[..], 1, 5),
            _ => comm.recv(one, 0, 5),
        }),
    ];
    let mut options = Options { deadline: DEADLINE, ..Options::default() };
    options.tuning.longest = 1 << 20;
    std::thread::scope(|scope| {
        for (name, call) in calls {
            scope.spawn(move || {
                let took = on_ranks(2, "bandwidth=5MB/s", |t| {
                    let comm = Communicator::new(Box::new(t), options).expect("a communicator");
                    let (mut one, mut all) = (vec![0u8; 20_000_000], vec![0u8; 40_000_000]);
                    let start = Instant::now();
                    call(&comm, &mut one, &mut all).unwrap_or_else(|error| panic!("{name}: {error}"));
                    start.elapsed()
                });
                assert!(took.iter().max() >= Some(&Duration::from_millis(3990)), "{name}: {took:?}");
            });
        }
    });
}

/// Ranks that wait for one in a long transfer with another, or for their turn in one with many, hear that it gets further.
#[test]
fn who_is_in_a_long_transfer_with_another_is_not_silent() {
    type Calls = fn(&Communicator, &mut [u8], &mut [u8]) -> collectives::Result<()>;
    let calls: [(&str, usize, Calls); 4] = [
        ("a message of others", 10_000_000, |comm, one, _| {
            match comm.rank() {
                1 => comm.send(&one[..], 2, 5)?,
                2 => comm.recv(one, 1, 5)?,
                _ => {}
            }
            comm.barrier()
        }),
        ("scatter", 2_000_000, |comm, one, all| {
            comm.scatter((comm.rank() == 1).then(|| (&all[..]).into()), one, 1)
        }),
        ("gather", 2_000_000, |comm, one, all| {
            comm.gather(&one[..], (comm.rank() == 1).then(|| all.into()), 1)?;
            comm.barrier()
        }),
        ("calls of two groups", 10_000_000, |comm, one, _| {
            let pair = comm.split(Some((comm.rank() / 2) as u32), 0)?.expect("all have a colour");
            if comm.rank() / 2 == 1 {
                pair.broadcast(one, 1)?;
            }
            comm.barrier()
        }),
    ];
    let mut options = Options { deadline: DEADLINE, ..Options::default() };
    options.tuning.longest = 1 << 19;
    const RANKS: usize = 6;
    std::thread::scope(|scope| {
        for (name, len, call) in calls {
            scope.spawn(move || {
                on_ranks(RANKS, "bandwidth=2.5MB/s", |t| {
                    let comm = Communicator::new(Box::new(t), options).expect("a communicator");
                    let (mut one, mut all) = (vec![0u8; len], vec![0u8; len * RANKS]);
                    call(&comm, &mut one, &mut all).unwrap_or_else(|error| panic!("{name}: {error}"));
                });
            });
        }
    });
}

#[test]
fn memory_is_not_read_directly_and_nodes_are_told() {
    let mut all = threads::group(4);
    let nodes = Nodes::blocks(4, 2).expect("nodes");
    let mut t = emulated(all.remove(0), "latency=1us,bandwidth=2GB/s", nodes.clone());
    assert!(t.direct().is_none());
    assert_eq!(t.nodes(), Some(&nodes));
    assert_eq!(t.name(), "slow");
    let wrong = Emulated::new(
        "slow",
        Box::new(all.remove(0)),
        "latency=1us".parse().expect("a link"),
        Nodes::apart(3),
    );
    assert!(wrong.err().expect("4 ranks").to_string().contains("nodes of 3 ranks"));
}

#[test]
fn another_clock_is_an_error() {
    let mut ranks = threads::group(2).into_iter();
    let (mut plain, other) = (ranks.next().expect("a rank"), ranks.next().expect("a rank"));
    let mut t = emulated(other, "latency=1us", Nodes::apart(2));
    let header = [7u8; 24];
    let mut space = [0u8; 8];
    // SAFETY: the buffers outlive the requests.
    let request = unsafe {
        plain.send(1, Tag(1), header.as_ptr(), header.len()).expect("sends");
        plain.send(1, Tag(1), space.as_ptr(), space.len()).expect("sends");
        t.recv(0, Tag(1), space.as_mut_ptr(), space.len()).expect("receives")
    };
    let text = wait(&mut t, request).expect_err("not our clock").to_string();
    assert!(text.contains("rank 0 runs on another machine"), "{text}");
}
