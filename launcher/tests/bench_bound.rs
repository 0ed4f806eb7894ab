//! Ranks that `bench` starts stay each on its share of the processors, with all their threads.

use harness::{Bench, signal};
use rustix::process::Signal;
use std::collections::BTreeSet;
use std::fs;

/// The processors that the threads of a process may use, as the system lists them.
fn allowed(pid: u32) -> BTreeSet<String> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let status = |thread: fs::DirEntry| fs::read_to_string(thread.path().join("status")).ok();
    let list = |status: String| {
        let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        line.map(|list| list.trim().to_owned())
    };
    threads.filter_map(status).filter_map(list).collect()
}

#[test]
fn every_bench_binds_all_threads_of_its_ranks() {
    if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
        return harness::skip("ranks on processors of their own: there is one");
    }
    let bench = Bench::new(env!("CARGO_BIN_EXE_caravan"));
    let everywhere = allowed(std::process::id());
    for command in ["all_reduce -N 0 -n 100", "overlap -n 1000000", "tune -n 1000000"] {
        let child = bench.command(&format!("bench {command} -b 1K -e 1K --ranks 2")).spawn().unwrap();
        // Each rank has one share for all its threads, which is not the other's.
        let apart = || {
            let each: Vec<_> = bench.ranks().into_iter().map(|(_, pid)| allowed(pid)).collect();
            let one = |shares: &BTreeSet<String>| shares.len() == 1 && *shares != everywhere;
            each.len() == 2 && each.iter().all(one) && each[0] != each[1]
        };
        let child = bench.until(child, "each rank is bound to a share of its own", apart);
        signal(child.id(), Signal::INT);
        assert_eq!(bench.finish(child).code, Some(130));
    }
}

/// What was asked for and cannot be had is an error, and what is only usual is left away.
#[test]
fn more_ranks_than_processors_are_bound_only_by_default() {
    let bench = Bench::new(env!("CARGO_BIN_EXE_caravan"));
    let ranks = std::thread::available_parallelism().map_or(1, usize::from) + 1;
    let command = format!("bench barrier -n 3 --ranks {ranks}");
    bench.run(&command).success();
    for transport in ["shm", "threads"] {
        let words = ["--bind core", &format!("{ranks} ranks"), "--bind none"];
        bench.run(&format!("{command} --bind core --transport {transport}")).refusal(2, &words);
    }
    bench.nothing_left();
}

/// On processors that are shared, whoever computes beside a progress thread has to know.
#[test]
fn overlap_says_that_progress_threads_have_no_processors() {
    let bench = Bench::new(env!("CARGO_BIN_EXE_caravan"));
    let ranks = std::thread::available_parallelism().map_or(1, usize::from);
    if ranks > 16 {
        return harness::skip("ranks on all processors: there are many");
    }
    for (flags, says) in [("", true), ("--bind none", true), ("--progress inline", false)] {
        let flags = format!("--ranks {} -b 4K -e 4K -n 2 --json o.json {flags}", ranks.max(2));
        let shown = bench.run(&format!("bench overlap all_gather {flags}")).success().stdout;
        assert_eq!(shown.contains("for both products and progress threads"), says, "{flags}: {shown}");
        let json: serde_json::Value = bench.json("o.json");
        assert_eq!(json["processors"].as_array().unwrap().len(), ranks.max(2));
        let row = &json["overlap"][0];
        assert!(row["side"] == 48 || row["side"] == 16, "{row}");
    }
}
