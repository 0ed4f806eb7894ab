//! Ranks that somebody starts one by one on two hosts, and networks that do not carry what they send.

use crate::across_hosts::Hosts;
use crate::{CARAVAN, bench};
use harness::{Bench, ENDLESS, Outcome, signal};
use rustix::process::Signal;
use std::fs;
use std::process::Child;
use std::time::{Duration, Instant};

/// So soon it is seen that a host is gone: far more than README promises.
const NOTICED: Duration = Duration::from_secs(90);

/// Starts rank 0 on the first host and rank 1 on the second, with these words before `caravan`, and gives them time to end.
fn each(bench: &Bench, hosts: &Hosts<'_>, port: u32, words: [&str; 2], args: &str) -> [Outcome; 2] {
    started(bench, hosts, port, words, args).map(|rank| bench.finish(rank))
}

/// The same, only started.
fn started(bench: &Bench, hosts: &Hosts<'_>, port: u32, words: [&str; 2], args: &str) -> [Child; 2] {
    let enter = bench.path("enter").display().to_string();
    [0, 1].map(|rank| {
        let (host, address) = (&hosts.names[rank], &hosts.addresses[0]);
        let port = 20_000 + (std::process::id() + 97 * port) % 10_000;
        let line = format!(
            "{enter} {host} env CARAVAN_RANK={rank} CARAVAN_WORLD=2 CARAVAN_JOB=hand-{} \
             CARAVAN_RENDEZVOUS={address}:{port} {} {CARAVAN} {args}",
            std::process::id(),
            words[rank]
        );
        hosts.command(&line).spawn().expect("a rank")
    })
}

/// Two ranks over UCX that have made their first steps of a training without end, with `metrics` and flags after it, and how many
/// lines are there.
fn training<'a>(
    bench: &'a Bench,
    hosts: &Hosts<'_>,
    port: u32,
    metrics: &str,
    words: [&str; 2],
) -> ([Child; 2], impl Fn() -> usize + use<'a>) {
    let run = ENDLESS.replace("m.jsonl", metrics);
    let args = format!("{run} --quiet --transport ucx --threads 1");
    let [zero, one] = started(bench, hosts, port, words, &args);
    let path = bench.path(metrics.split(' ').next().expect("a file"));
    let made = move || fs::read_to_string(&path).map_or(0, |text| text.lines().count());
    ([bench.until(zero, "its first steps are done", || made() > 3), one], made)
}

/// Whether UCX is there, and this no build that does with it what the one without MPI has done.
fn offers_ucx(bench: &Bench) -> bool {
    !cfg!(feature = "mpi") && bench.offers("ucx")
}

#[test]
fn ranks_by_hand_hear_why_one_of_them_takes_no_part() {
    let bench = bench();
    for who in [0, 1] {
        let since = Instant::now();
        let ranks = [0, 1].map(|rank| {
            let mut command = bench.command(match rank == who {
                true => "train --data nowhere.txt",
                false => "bench all_reduce -n 1 -b 1K -e 1K",
            });
            let (rank, job) = (rank.to_string(), format!("absent-{who}-{}", std::process::id()));
            command.envs([("CARAVAN_RANK", &*rank), ("CARAVAN_WORLD", "2"), ("CARAVAN_JOB", &job)]);
            command.spawn().expect("a rank")
        });
        let begins = format!("rank {who} on ");
        for (rank, end) in ranks.map(|rank| bench.finish(rank)).into_iter().enumerate() {
            let told = [&*begins, ": --data nowhere.txt: there is no"];
            end.refusal(if rank == who { 2 } else { 1 }, &told);
        }
        assert!(since.elapsed() < Duration::from_secs(50), "{:?}", since.elapsed());
    }
    bench.nothing_left();
}

/// Before anybody knows where it is, others wait for that.
#[test]
fn a_rank_whose_ucx_does_not_open_tells_all_others_why() {
    let bench = bench();
    if !offers_ucx(&bench) {
        return;
    }
    let since = Instant::now();
    let ranks = [0, 1, 2].map(|rank| {
        let mut command = bench.command("bench all_reduce -n 1 -b 1K -e 1K --transport ucx");
        let (number, job) = (rank.to_string(), format!("unopened-{}", std::process::id()));
        command.envs([("CARAVAN_RANK", &*number), ("CARAVAN_WORLD", "3"), ("CARAVAN_JOB", &job)]);
        if rank == 2 {
            command.env("UCX_TLS", "no_such_way");
        }
        command.spawn().expect("a rank")
    });
    for (rank, end) in ranks.map(|rank| bench.finish(rank)).into_iter().enumerate() {
        end.refusal(if rank == 2 { 2 } else { 1 }, &["UCX", "no_such_way"]);
    }
    assert!(since.elapsed() < Duration::from_secs(50), "{:?}", since.elapsed());
    bench.nothing_left();
}

/// The network that UCX is given takes what is sent and carries it nowhere.
#[test]
fn a_peer_that_ucx_cannot_reach_is_named_in_time_by_all() {
    let bench = bench();
    if !offers_ucx(&bench) {
        return;
    }
    let Some(hosts) = Hosts::make(&bench) else { return };
    for (at, host) in hosts.names.iter().enumerate() {
        let [mine, other] = [at, 1 - at].map(|host| format!("10.59.{host}"));
        let (network, _) = hosts.addresses[0].rsplit_once('.').unwrap();
        let device = hosts.device(at);
        for line in [
            "link add a0 type veth peer name a1".to_owned(),
            format!("addr add {mine}.1/24 dev a0"),
            "link set a0 up".to_owned(),
            "link set a1 up".to_owned(),
            format!("neigh add {network}.60 lladdr 02:00:00:00:00:99 dev {device} nud permanent"),
            format!("route add {other}.0/24 via {network}.60"),
        ] {
            let outcome = hosts.run(&format!("ip -n {host} {line}"));
            assert_eq!(outcome.code, Some(0), "{line}: {}", outcome.stderr);
        }
    }
    let args = "bench all_reduce -n 1 -b 1K -e 1K --transport ucx --rendezvous-timeout 6";
    let since = Instant::now();
    let ends = each(&bench, &hosts, 0, ["UCX_TLS=tcp,self UCX_NET_DEVICES=a0"; 2], args);
    assert!(since.elapsed() < Duration::from_secs(30), "{:?}", since.elapsed());
    for end in &ends {
        let words = [
            "no answer within 4.5s, connecting to rank ",
            "UCX_NET_DEVICES=a0 there; set UCX_NET_DEVICES on each host",
        ];
        assert!(end.code == Some(1) && words.iter().all(|word| end.stderr.contains(word)), "{end:?}");
    }
    // What works is what is said.
    let set = [0, 1].map(|host| format!("UCX_TLS=tcp,self UCX_NET_DEVICES={}", hosts.device(host)));
    for end in each(&bench, &hosts, 1, [&set[0], &set[1]], args) {
        end.success();
    }
    drop(hosts);
    bench.nothing_left();
}

#[test]
fn a_silent_rank_is_told_with_its_host() {
    let bench = bench();
    if !offers_ucx(&bench) {
        return;
    }
    let Some(hosts) = Hosts::make(&bench) else { return };
    bench.text("text.txt", 20_000);
    let flags = "m.jsonl --call-timeout 3";
    let ([zero, one], _) = training(&bench, &hosts, 4, flags, [""; 2]);
    let silent = bench.ranks_by("CARAVAN_RANK").into_iter().find(|&(rank, _)| rank == 1).expect("it runs").1;
    signal(silent, Signal::STOP);
    let told = ["no answer from rank 1 within 3s".to_owned(), format!("; rank 1 runs on {}", hosts.names[1])];
    bench.finish(zero).refusal(1, &told.each_ref().map(String::as_str));
    signal(silent, Signal::KILL);
    bench.finish(one);
    drop(hosts);
    bench.nothing_left();
}

/// Nothing says that it is, and what is under way to it is sent again for a quarter of an hour. But who needs that network only
/// to have met goes on.
#[test]
fn a_host_that_is_gone_without_a_word_is_noticed() {
    let bench = bench();
    if !offers_ucx(&bench) {
        return;
    }
    let Some(hosts) = Hosts::make(&bench) else { return };
    bench.text("text.txt", 20_000);
    // Nor do processes of another host end before this one's eyes.
    let far = [0, 1].map(|host| {
        let device = hosts.device(host);
        format!("UCX_TLS=tcp,self UCX_NET_DEVICES={device} unshare --pid --fork --mount-proc")
    });
    let (lost, _) = training(&bench, &hosts, 5, "lost.jsonl", far.each_ref().map(String::as_str));
    let ([zero, one], made) = training(&bench, &hosts, 6, "near.jsonl", ["UCX_TLS=posix,self"; 2]);
    let down = hosts.run(&format!("ip -n {} link set {} down", hosts.names[1], hosts.device(1)));
    assert_eq!(down.code, Some(0), "{}", down.stderr);
    for (rank, end) in lost.into_iter().enumerate() {
        let host = &hosts.names[1 - rank];
        let told = format!(
            "rank {} on {host} is unreachable: its host, or the way to it, does not answer",
            1 - rank
        );
        let took = bench.finish(end).refusal(1, &[&told]).took;
        assert!(took < NOTICED, "rank {rank}: {took:?}");
    }
    let further = |zero, what| {
        let before = made();
        bench.until(zero, what, || made() > before + 10)
    };
    let zero = further(zero, "its steps go on");
    // Nor is it lost when one of its ranks is long, which has been heard of since.
    let (_, pausing) =
        bench.ranks_by("CARAVAN_RANK").into_iter().find(|&(rank, _)| rank == 1).expect("it runs");
    signal(pausing, Signal::STOP);
    std::thread::sleep(Duration::from_secs(13));
    signal(pausing, Signal::CONT);
    let zero = further(zero, "its steps go on after a pause");
    for (_, rank) in bench.ranks_by("CARAVAN_RANK") {
        signal(rank, Signal::KILL);
    }
    for rank in [zero, one] {
        bench.finish(rank);
    }
    drop(hosts);
    bench.nothing_left();
}

#[test]
fn ranks_whose_ucx_may_use_other_ways_hear_what_differs() {
    let bench = bench();
    if !offers_ucx(&bench) {
        return;
    }
    let Some(hosts) = Hosts::make(&bench) else { return };
    let args = "bench all_reduce -n 1 -b 1K -e 1K --transport ucx --rendezvous-timeout 20";
    for (at, words) in
        [["UCX_TLS=tcp,self", "UCX_TLS=self"], ["UCX_TLS=self", "UCX_TLS=tcp,self"]].into_iter().enumerate()
    {
        for end in each(&bench, &hosts, 2 + at as u32, words, args) {
            let said = ["UCX_TLS=self ", "UCX_TLS=tcp,self ", "set UCX_TLS alike for all ranks"];
            assert!(end.code == Some(1) && said.iter().all(|word| end.stderr.contains(word)), "{end:?}");
        }
    }
    drop(hosts);
    bench.nothing_left();
}
