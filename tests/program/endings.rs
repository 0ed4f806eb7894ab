//! Runs that end before their time: killed ranks, signals, full disks. Every rank ends, and nothing stays.

use crate::bench;
use harness::{Bench, is_root, signal, skip};
use rustix::process::Signal;
use std::fs;
use std::process::{Child, Command};
use std::time::Duration;

/// A run that takes for ever, started and under way.
fn endless(bench: &Bench, flags: &str) -> Child {
    bench.text("text.txt", 20_000);
    let fixed =
        "train --model nano --data text.txt --steps 100000000 --micro-batch 1 --metrics m.jsonl --save out";
    let mut child = bench.command(&format!("{fixed} {flags}")).spawn().unwrap();
    loop {
        let lines = fs::read_to_string(bench.path("m.jsonl")).map_or(0, |text| text.lines().count());
        if lines > 3 {
            return child;
        }
        if let Some(status) = child.try_wait().unwrap() {
            panic!("the run ended by itself: {status}: {:?}", bench.finish(child));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A killed run leaves no model and no half a line.
fn nothing_half_written(bench: &Bench) {
    bench.nothing_left();
    harness::json_lines(&bench.path("m.jsonl"));
    let mut names: Vec<_> = fs::read_dir(bench.path(".")).unwrap().flatten().map(|e| e.file_name()).collect();
    names.sort();
    assert_eq!(names, ["m.jsonl", "text.txt"]);
}

#[test]
fn a_killed_rank_ends_the_others_by_name() {
    for (ranks, victim, stage) in [(2, 1, 3), (3, 0, 2), (4, 2, 1)] {
        let bench = bench();
        let run = endless(&bench, &format!("--ranks {ranks} --stage {stage}"));
        let members = bench.ranks();
        assert_eq!(members.iter().map(|m| m.0).collect::<Vec<_>>(), (0..ranks).collect::<Vec<_>>());
        signal(members[victim].1, Signal::KILL);
        let outcome = bench.finish(run).refusal(1, &[&format!("rank {victim}"), "killed by signal 9"]);
        // The supervisor would say so, had a rank not ended by itself in its grace.
        assert!(!outcome.stderr.contains("did not end by itself"), "{}", outcome.stderr);
        nothing_half_written(&bench);
    }
}

#[test]
fn an_interrupt_ends_every_rank() {
    for (name, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let bench = bench();
        let run = endless(&bench, "--ranks 3");
        signal(run.id(), name);
        let outcome = bench.finish(run);
        assert_eq!(outcome.code, Some(code), "{}", outcome.stderr);
        nothing_half_written(&bench);
    }
}

#[test]
fn ranks_do_not_outlive_a_killed_parent() {
    let bench = bench();
    let mut run = endless(&bench, "--ranks 2");
    signal(run.id(), Signal::KILL);
    run.wait().unwrap();
    bench.nothing_left();
}

#[test]
fn a_disk_that_is_full_when_saving_leaves_nothing() {
    let bench = bench();
    bench.text("text.txt", 8000);
    for transport in ["shm", "threads"] {
        // Files may not grow beyond 64 KiB, and the system says so instead of killing.
        let run = format!(
            "trap '' XFSZ; ulimit -f 64; exec {} train --model nano --data text.txt --steps 1 --micro-batch 1 \
             --sample 0 --quiet --transport {transport} --save out",
            env!("CARGO_BIN_EXE_caravan")
        );
        let mut command = Command::new("bash");
        command.args(["-c", &run]);
        bench.prepare(&mut command);
        bench.finish(command.spawn().unwrap()).refusal(1, &["--save", "write", "out", "File too large"]);
        let names: Vec<_> = fs::read_dir(bench.path(".")).unwrap().flatten().map(|e| e.file_name()).collect();
        assert_eq!(names, ["text.txt"]);
        bench.nothing_left();
    }
}

#[test]
fn a_disk_without_room_is_found_before_training() {
    if !is_root() {
        return skip("mounting a small disk needs root");
    }
    let bench = bench();
    bench.text("text.txt", 8000);
    fs::create_dir(bench.path("disk")).unwrap();
    // A mount of its own name space goes with the process.
    let run = format!(
        "mount -t tmpfs -o size=128k none disk || exit 77; exec {} train --model nano --data text.txt \
         --save disk/out",
        env!("CARGO_BIN_EXE_caravan")
    );
    let mut command = Command::new("unshare");
    command.args(["--mount", "bash", "-c", &run]);
    bench.prepare(&mut command);
    let outcome = match command.spawn() {
        Ok(child) => bench.finish(child),
        Err(e) => return skip(&format!("unshare cannot be started: {e}")),
    };
    if outcome.code == Some(77) || outcome.stderr.starts_with("unshare:") {
        return skip(&format!("this machine lets root mount nothing: {}", outcome.stderr.trim()));
    }
    outcome.refusal(2, &["250496 bytes", "131072 free"]);
}

#[test]
fn metrics_that_cannot_be_written_end_the_run() {
    let bench = bench();
    bench.text("text.txt", 8000);
    let flags = "train --model nano --data text.txt --micro-batch 1 --metrics /dev/full --quiet";
    bench.run(flags).refusal(1, &["/dev/full", "No space left"]);
    bench.run(&format!("{flags} --transport threads")).refusal(1, &["/dev/full", "No space left"]);
    bench.nothing_left();
}
