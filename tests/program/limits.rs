//! A system that gives too little: the error names what, and how to get more.

use crate::bench;
use harness::{is_root, skip};
use std::process::Command;

#[test]
fn too_few_open_files_are_named() {
    let bench = bench();
    let program = env!("CARGO_BIN_EXE_caravan");
    let line = format!("ulimit -n 100; exec {program} bench barrier --ranks 64 -n 1 -w 0");
    let mut command = Command::new("sh");
    bench.prepare(command.args(["-c", &line]));
    let outcome = bench.finish(command.spawn().expect("a shell"));
    outcome.refusal(1, &["limit of open files (ulimit -n)"]);
}

#[test]
fn too_little_shared_memory_is_named_where_ucx_takes_it() {
    let bench = bench();
    if !bench.offers("ucx") {
        return;
    }
    if !is_root() {
        return skip("UCX in a small /dev/shm: a file system is mounted as root");
    }
    let program = env!("CARGO_BIN_EXE_caravan");
    let run = format!("exec {program} bench barrier --ranks 3 --transport ucx -n 1 -w 0");
    let line = format!("mount -t tmpfs -o size=9m none /dev/shm && {run}");
    let mut command = Command::new("unshare");
    bench.prepare(command.args(["--mount", "sh", "-c", &line]));
    let outcome = bench.finish(command.spawn().expect("unshare"));
    if outcome.stderr.contains("unshare:") || outcome.stderr.contains("mount:") {
        return skip(&format!("UCX in a small /dev/shm: {}", outcome.stderr.trim()));
    }
    outcome.refusal(1, &["/dev/shm", "KiB free", "UCX_TLS=^sm"]);
}
