//! Ranks that do not all come, come twice, disagree, or are not of the job.

use crate::ranks::{finish, identity, is_rank, rank_of, this_test};
use collectives::bootstrap::{Options, Rendezvous, shm_group};
use collectives::transport::shm::ShmTransport;
use collectives::transport::{Nodes, PerNode, Transport};
use std::io::{Read, Write};
use std::process::{Child, Command, Output, Stdio, exit};
use std::time::Duration;

/// Starts one rank by hand, as an unknown launcher would.
fn start(test: &str, rank: usize, world: usize, more: &[(&str, &str)]) -> Child {
    let job = format!("{test}-{}", std::process::id());
    rank_of(test)
        .env("CARAVAN_RANK", rank.to_string())
        .env("CARAVAN_WORLD", world.to_string())
        .env("CARAVAN_JOB", job)
        .envs(more.iter().copied())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a rank")
}

/// The rank's part: meet, build the group, exchange; the error goes to standard error.
fn meet(timeout: Duration) -> ! {
    let me = identity();
    let options = Options { timeout, ..Options::default() };
    let met = Rendezvous::join(&me, &options).and_then(|mut meeting| {
        let all = meeting.exchange(format!("rank {}", me.rank).as_bytes())?;
        assert!(all.iter().enumerate().all(|(r, blob)| *blob == format!("rank {r}").into_bytes()));
        assert_eq!(meeting.local_ranks(), (0..me.world).collect::<Vec<_>>());
        assert_eq!(meeting.host_names().len(), 1);
        meeting.barrier()?;
        drop(meeting);
        // A second meeting of the same job at the same place.
        shm_group(&me, &options)
    });
    match met {
        Ok(group) => {
            assert_eq!((group.rank(), group.size()), (me.rank, me.world));
            exit(0)
        }
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "{error}");
            exit(1)
        }
    }
}

fn ended(child: Child) -> Output {
    finish(vec![child]).remove(0)
}

fn text(child: Child) -> String {
    let output = ended(child);
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stderr).trim().to_owned()
}

fn succeeds(child: Child) {
    let output = ended(child);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn missing_ranks_are_named_to_all() {
    let test = this_test!();
    if is_rank(test) {
        // The test reads it.
        let _ = writeln!(std::io::stderr());
        meet(Duration::from_secs(if identity().rank == 3 { 2 } else { 8 }));
    }
    // Rank 0 begins to wait when the other has begun to look for it: of one that is late as well the sentence would say so.
    let mut two = start(test, 2, 5, &[]);
    two.stderr.as_mut().expect("a pipe").read_exact(&mut [0]).expect("it runs");
    for child in [start(test, 0, 5, &[]), two] {
        let text = text(child);
        assert!(text.contains("ranks 1, 3 and 4 of 5 did not arrive"), "{text}");
    }
    let alone = text(start(test, 3, 5, &[]));
    assert!(alone.contains("no answer from rank 0") && alone.contains(test), "{alone}");
    assert!(alone.contains("CARAVAN_RENDEZVOUS=host:port of rank 0"), "{alone}");
}

#[test]
fn why_a_rank_takes_no_part_is_told_to_all() {
    let test = this_test!();
    if is_rank(test) {
        let me = identity();
        if std::env::var_os("DECLINES").is_some() {
            let declined = Rendezvous::decline(&me, &Options::default(), "it has no data");
            assert!(declined.is_ok(), "{declined:?}");
            exit(0);
        }
        meet(Duration::from_secs(60));
    }
    for who in [0, 2] {
        let run = format!("{}-{who}", std::process::id());
        let of = |rank| match rank == who {
            true => vec![("CARAVAN_JOB", run.as_str()), ("DECLINES", "1")],
            false => vec![("CARAVAN_JOB", run.as_str())],
        };
        let ranks: Vec<Child> = (0..3).map(|rank| start(test, rank, 3, &of(rank))).collect();
        for (rank, child) in ranks.into_iter().enumerate() {
            match rank == who {
                true => succeeds(child),
                false => {
                    let said = text(child);
                    let home = collectives::bootstrap::host_name();
                    assert!(said.contains(&format!("rank {who} on {home}: it has no data")), "{said}");
                }
            }
        }
    }
}

/// Or else the others would wait for it in the first call that they make.
#[test]
fn a_rank_that_cannot_map_the_memory_of_another_fails_all() {
    let test = this_test!();
    if is_rank(test) {
        if identity().rank == 1 {
            let room = rustix::process::Rlimit { current: Some(1 << 30), maximum: None };
            rustix::process::setrlimit(rustix::process::Resource::As, room).expect("a limit");
        }
        meet(Duration::from_secs(20));
    }
    if harness::memory() < 2 << 20 {
        return harness::skip("segments that are too large to map: this machine's are not");
    }
    let [zero, one, two] = [0, 1, 2].map(|rank| start(test, rank, 3, &[])).map(text);
    let words = ["bytes of shared memory: Cannot allocate memory", "address space (ulimit -v)"];
    for (text, gave_up) in [(one, false), (zero, true), (two, true)] {
        assert!(words.iter().all(|words| text.contains(words)), "{text}");
        assert_eq!(text.contains("rank 1 gave up: mapping"), gave_up, "{text}");
    }
}

/// Between the meeting of all and that of its node, here one of those that are smaller than the host.
#[test]
fn a_rank_that_is_lost_before_its_node_meets_is_named_by_all() {
    let test = this_test!();
    if is_rank(test) {
        let me = identity();
        let options = Options { timeout: Duration::from_secs(600), ..Options::default() };
        let mut meeting = Rendezvous::join(&me, &options).expect("a meeting");
        if me.rank != 3 {
            let error =
                meeting.shm_inside(&Nodes::of(&[0, 0, 1, 1, 2]), &options).err().expect("rank 3 is lost");
            eprintln!("{error}");
        }
        exit(i32::from(me.rank != 3));
    }
    let ranks = [0, 1, 2, 3, 4].map(|rank| start(test, rank, 5, &[]));
    for (rank, child) in ranks.into_iter().enumerate().filter(|&(rank, _)| rank != 3) {
        let said = text(child);
        assert!(said.contains("rank 3 was lost"), "rank {rank}: {said}");
    }
}

#[test]
fn a_rank_that_is_stopped_does_not_run_out_of_time() {
    let test = this_test!();
    // Of the time in which it is stopped a second counts.
    let timeout = Duration::from_secs(8);
    if is_rank(test) {
        meet(timeout);
    }
    let job = format!("stopped-{}", std::process::id());
    let more = [("CARAVAN_JOB", job.as_str())];
    let mut zero = start(test, 0, 2, &more);
    while !std::fs::read_to_string("/proc/net/unix").expect("a list of sockets").contains(&job) {
        assert!(zero.try_wait().expect("a child").is_none(), "{}", text(zero));
        std::thread::sleep(Duration::from_millis(5));
    }
    harness::signal(zero.id(), rustix::process::Signal::STOP);
    std::thread::sleep(timeout + Duration::from_millis(500));
    harness::signal(zero.id(), rustix::process::Signal::CONT);
    let one = start(test, 1, 2, &more);
    succeeds(zero);
    succeeds(one);
}

#[test]
fn worlds_must_agree_and_ranks_be_one() {
    let test = this_test!();
    if is_rank(test) {
        meet(Duration::from_secs(20));
    }
    for (rank, world) in [(1, 3), (5, 8)] {
        let (zero, other) = (start(test, 0, 4, &[]), start(test, rank, world, &[]));
        let (zero, other) = (text(zero), text(other));
        assert!(zero.contains("rank 0 was started for 4 ranks but rank"), "{zero}");
        assert!(zero.contains(&format!("for {world}")), "{zero}");
        assert!(other.contains("was started for 4 ranks"), "{other}");
    }
    let twice = [start(test, 1, 3, &[]), start(test, 1, 3, &[])];
    let zero = text(start(test, 0, 3, &[]));
    assert!(zero.contains("two processes are rank 1") && zero.contains("set CARAVAN_JOB"), "{zero}");
    for child in twice {
        assert!(text(child).contains("two processes are rank 1"));
    }
}

#[test]
fn a_stranger_is_sent_away_and_the_job_goes_on() {
    let test = this_test!();
    if is_rank(test) {
        meet(Duration::from_secs(20));
    }
    let ours = [("CARAVAN_TOKEN", "secret")];
    let zero = start(test, 0, 2, &ours);
    let stranger = text(start(test, 1, 2, &[("CARAVAN_TOKEN", "guessed")]));
    assert!(stranger.contains("the secret of this process, of job"), "{stranger}");
    let one = start(test, 1, 2, &ours);
    succeeds(zero);
    succeeds(one);
}

#[test]
fn ranks_meet_over_tcp_too() {
    let test = this_test!();
    if is_rank(test) {
        meet(Duration::from_secs(20));
    }
    let address = format!("127.0.0.1:{}", harness::ports::free_port());
    // What does not speak the protocol, or nothing at all, does no harm.
    let more = [("CARAVAN_RENDEZVOUS", address.as_str()), ("CARAVAN_TOKEN", "secret")];
    let mut zero = start(test, 0, 3, &more);
    let silent = loop {
        match std::net::TcpStream::connect(&address) {
            Ok(stream) => break stream,
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
        assert_eq!(zero.try_wait().expect("our own"), None, "rank 0 listens");
    };
    let mut rude = std::net::TcpStream::connect(&address).expect("connected");
    rude.write_all(b"GET / HTTP/1.1\r\n\r\n").expect("sent");
    let others = [start(test, 1, 3, &more), start(test, 2, 3, &more)];
    succeeds(zero);
    others.into_iter().for_each(succeeds);
    drop(silent);
}

#[test]
fn several_hosts_need_an_address() {
    let test = this_test!();
    if is_rank(test) {
        meet(Duration::from_secs(20));
    }
    let text = text(start(test, 0, 4, &[("CARAVAN_LOCAL_RANK", "0"), ("CARAVAN_LOCAL_SIZE", "2")]));
    assert!(text.contains("CARAVAN_RENDEZVOUS=host:port"), "{text}");
}

/// Two network namespaces joined by a veth pair are two hosts for everything that matters here.
struct TwoHosts([String; 2]);

impl TwoHosts {
    fn new() -> Result<Self, String> {
        let ip = |arguments: &str| {
            let output = Command::new("ip").args(arguments.split(' ')).output().map_err(|e| e.to_string())?;
            match output.status.success() {
                true => Ok(()),
                false => Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()),
            }
        };
        let id = std::process::id() % 100_000;
        let hosts = TwoHosts([format!("cvn{id}a"), format!("cvn{id}b")]);
        let [a, b] = &hosts.0;
        ip(&format!("netns add {a}"))?;
        ip(&format!("netns add {b}"))?;
        ip(&format!("link add {a} netns {a} type veth peer name {b} netns {b}"))?;
        for (host, address) in [(a, "10.77.9.1"), (b, "10.77.9.2")] {
            ip(&format!("-n {host} addr add {address}/24 dev {host}"))?;
            ip(&format!("-n {host} link set {host} up"))?;
            ip(&format!("-n {host} link set lo up"))?;
        }
        Ok(hosts)
    }
}

impl Drop for TwoHosts {
    fn drop(&mut self) {
        for host in &self.0 {
            // Removes the veth pair too; what was never created cannot be removed.
            let _ = Command::new("ip").args(["netns", "del", host]).stderr(Stdio::null()).status();
        }
    }
}

/// The part of a rank of two hosts: who is where, descriptors within the host, and what shared memory says.
fn meet_across_hosts() {
    let me = identity();
    let options = Options { timeout: Duration::from_secs(20), ..Options::default() };
    let mut meeting = Rendezvous::join(&me, &options).expect("a meeting");
    assert_eq!(meeting.host_names().len(), 2);
    assert_eq!(meeting.nodes(None).unwrap(), Nodes::of(&[0, 1, 0, 1, 1]));
    let local: Vec<usize> = (0..5).filter(|r| [0, 1, 0, 1, 1][*r] == [0, 1, 0, 1, 1][me.rank]).collect();
    assert_eq!(meeting.local_ranks(), local);
    let blobs = meeting.exchange_local(&[me.rank as u8]).expect("blobs");
    assert_eq!(blobs, local.iter().map(|&r| vec![r as u8]).collect::<Vec<_>>());
    let mut group = ShmTransport::connect(&mut meeting, &options).expect("the host's group");
    assert_eq!((group.size(), local[group.rank()]), (local.len(), me.rank));
    assert!(group.alloc(1000).is_ok());
    assert_eq!(meeting.nodes(None).expect("nodes"), Nodes::of(&[0, 1, 0, 1, 1]));
    let text = meeting.nodes(Some(PerNode::Block(2))).expect_err("they span hosts").to_string();
    assert!(text.contains("rank 0 runs on") && text.contains("rank 1 on"), "{text}");
    // A node that is its host, and nodes that are smaller, of which one rank is alone.
    for (nodes, sizes) in [([0, 1, 0, 1, 1], [2, 3, 2, 3, 3]), ([0, 1, 0, 2, 2], [2, 1, 2, 2, 2])] {
        let inside = meeting.shm_inside(&Nodes::of(&nodes), &options).expect("the node's group");
        assert_eq!(inside.map_or(1, |inside| inside.size()), sizes[me.rank], "rank {} of {nodes:?}", me.rank);
    }
    meeting.barrier().expect("all");
    drop((group, meeting));
    let Err(error) = shm_group(&me, &options) else { panic!("shared memory between hosts") };
    let text = error.to_string();
    assert!(text.contains("transport shm cannot be used") && text.contains("are on 2"), "{text}");
    exit(0);
}

#[test]
fn several_hosts_meet_and_know_who_shares_one() {
    let test = this_test!();
    if is_rank(test) {
        return meet_across_hosts();
    }
    let hosts = match TwoHosts::new() {
        Ok(hosts) => hosts,
        Err(why) => return harness::skip(&format!("no network namespaces: {why}")),
    };
    let ranks: Vec<Child> = (0..5)
        .map(|rank| {
            let host = &hosts.0[[0, 1, 0, 1, 1][rank]];
            let command = rank_of(test);
            let mut inside = Command::new("ip");
            inside.args(["netns", "exec", host]).arg(command.get_program()).args(command.get_args());
            inside.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
            inside
                .env("CARAVAN_RANK", rank.to_string())
                .env("CARAVAN_WORLD", "5")
                .env("CARAVAN_JOB", format!("{test}-{}", std::process::id()))
                .env("CARAVAN_RENDEZVOUS", "10.77.9.1:20777")
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .expect("a rank")
        })
        .collect();
    ranks.into_iter().for_each(succeeds);
}
