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
    for command in ["all_reduce", "overlap", "tune"] {
        let child =
            bench.command(&format!("bench {command} -b 1K -e 1K -n 200000 --ranks 2")).spawn().unwrap();
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
