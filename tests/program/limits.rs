//! A system that gives too little: the error names what, and how to get more.

use crate::{bench, word_tokenizer};
use harness::{is_root, skip};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

#[test]
fn too_few_open_files_are_named() {
    let bench = bench();
    let program = env!("CARGO_BIN_EXE_caravan");
    let line = format!("ulimit -n 100; exec {program} bench barrier --ranks 64 -n 1 -w 0");
    let mut command = Command::new("sh");
    bench.prepare(command.args(["-c", &line]));
    let outcome = bench.outcome(&mut command);
    outcome.refusal(1, &["limit of open files (ulimit -n)"]);
}

#[test]
fn files_that_may_not_be_large_are_named_where_they_are_memory() {
    const BEFORE: &str = "{\"run\":\"the one before\"}\n";
    let bench = bench();
    bench.text("text.txt", 96_000);
    bench.file("m.jsonl", BEFORE);
    let train = "train --model nano --data text.txt --seq 32 --micro-batch 2 --steps 1 --sample 0 --quiet \
                 --metrics m.jsonl";
    // Too small for the tokens, for what ranks share to meet, and for what they allocate.
    for kibibytes in [50, 1000, 4000] {
        let line = format!("ulimit -c 0 -f {kibibytes}; exec {} {train}", env!("CARGO_BIN_EXE_caravan"));
        let mut command = Command::new("bash");
        bench.prepare(command.args(["-c", &line]));
        let outcome = bench.outcome(&mut command);
        outcome.refusal(1, &["file sizes (ulimit -f)", "can be raised"]);
        assert_eq!(fs::read_to_string(bench.path("m.jsonl")).unwrap(), BEFORE);
    }
    bench.nothing_left();
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
    let outcome = bench.outcome(&mut command);
    if outcome.stderr.contains("unshare:") || outcome.stderr.contains("mount:") {
        return skip(&format!("UCX in a small /dev/shm: {}", outcome.stderr.trim()));
    }
    outcome.refusal(1, &["/dev/shm", "KiB free", "UCX_TLS=^sm"]);
}

/// The system limits a user's threads, but not those of root: another user has none but the one that the program begins with.
#[test]
fn text_is_tokenised_by_one_thread_where_there_is_no_other() {
    let bench = bench();
    if !is_root() {
        return skip("tokenising without further threads: root becomes a user who has none");
    }
    bench.text("text.txt", 5 << 20);
    word_tokenizer(&bench, 64);
    let tokenize = "tokenize --data text.txt --tokenizer words-64.json --out";
    bench.run(&format!("{tokenize} all.bin")).success();
    fs::set_permissions(bench.path("."), fs::Permissions::from_mode(0o777)).unwrap();
    // Whoever may not reach the program's file has a copy.
    fs::copy(env!("CARGO_BIN_EXE_caravan"), bench.path("caravan")).unwrap();
    let mut command = Command::new("setpriv");
    let line = format!("ulimit -u 1 && exec ./caravan {tokenize} one.bin");
    command.args(["--reuid=61234", "--regid=61234", "--clear-groups", "bash", "-c", &line]);
    bench.prepare(&mut command);
    let cannot = |why: &str| skip(&format!("tokenising without further threads: {why}"));
    let outcome = match command.spawn() {
        Ok(child) => bench.finish(child),
        Err(e) => return cannot(&format!("setpriv cannot be started: {e}")),
    };
    // Where root is not allowed to become another, as in some containers.
    if outcome.stderr.contains("setpriv: ") {
        return cannot(outcome.stderr.trim());
    }
    outcome.success();
    assert!(fs::read(bench.path("one.bin")).unwrap() == fs::read(bench.path("all.bin")).unwrap());
}
