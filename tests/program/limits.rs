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

#[test]
fn a_save_that_cannot_be_begun_leaves_nothing() {
    let bench = bench();
    bench.text("text.txt", 20_000);
    let shell = |line: String| {
        let mut command = Command::new("bash");
        bench.prepare(command.args(["-c", &line]));
        bench.outcome(&mut command)
    };
    let program = env!("CARGO_BIN_EXE_caravan");
    let train = "train --model nano --data text.txt --transport threads --ranks 1 --steps 1 --micro-batch 1 --sample 0 --quiet";
    let before = bench.names();
    // With each of them one file more is open until there is none for the next.
    for files in 4.. {
        let outcome = shell(format!("ulimit -n {files}; exec {program} {train} --save model"));
        if outcome.code == Some(0) {
            break;
        }
        assert!(outcome.stderr.contains("limit of open files (ulimit -n) is too low"), "{}", outcome.stderr);
        assert_eq!(bench.names(), before, "{files}: {}", outcome.stderr);
    }
    let told = shell(format!("ulimit -n 4; exec {program} eval --model model --data text.txt"));
    assert!(told.stderr.contains("ulimit -n") && !told.stderr.contains("UTF-8"), "{}", told.stderr);
    // A directory is its owner's also where no file is.
    shell(format!("umask 0400; exec {program} {train} --save closed")).success();
    assert_eq!(bench.path("closed").metadata().unwrap().permissions().mode() & 0o777, 0o777);
}

#[test]
fn a_system_without_proc_is_told_from_one_without_memory_or_tokens() {
    let bench = bench();
    if !is_root() {
        return skip("/proc is unmounted by root");
    }
    bench.text("text.txt", 20_000);
    let run = |args: &str| {
        let line = format!("umount -l /proc && exec {} {args}", env!("CARGO_BIN_EXE_caravan"));
        let mut command = Command::new("unshare");
        bench.prepare(command.args(["--mount", "sh", "-c", &line]));
        bench.outcome(&mut command)
    };
    let doctor = run("doctor");
    if ["unshare:", "umount:"].iter().any(|word| doctor.stderr.contains(word)) {
        return skip(&format!("/proc cannot be unmounted: {}", doctor.stderr.trim()));
    }
    for words in ["\nmemory      unknown\n", "  no  shm", "  yes threads"] {
        assert!(doctor.stdout.contains(words), "{}", doctor.stdout);
    }
    let words = ["transport shm", "no /proc/self/exe (is /proc mounted?)", "; --transport threads"];
    run("bench barrier --ranks 2 -n 1").refusal(2, &words);
    run("train --model nano --data text.txt --transport threads")
        .refusal(1, &["is /proc mounted?", "'caravan tokenize'"]);
    run("tokenize --data text.txt --out text.bin").success();
    run("train --model nano --data text.bin --transport threads --steps 1 --micro-batch 1 --sample 0")
        .success();
}

/// The system limits a user's threads, but not those of root: another user has none but the one that the program begins with.
#[test]
fn without_further_threads_text_is_tokenised_by_one_and_ranks_are_not_had() {
    let bench = bench();
    if !is_root() {
        return skip("a program without further threads: root becomes a user who has none");
    }
    bench.text("text.txt", 5 << 20);
    word_tokenizer(&bench, 64);
    let tokenize = "tokenize --data text.txt --tokenizer words-64.json --out";
    bench.run(&format!("{tokenize} all.bin")).success();
    fs::set_permissions(bench.path("."), fs::Permissions::from_mode(0o777)).unwrap();
    // Whoever may not reach the program's file has a copy.
    fs::copy(env!("CARGO_BIN_EXE_caravan"), bench.path("caravan")).unwrap();
    let run = |args: &str| {
        let mut command = Command::new("setpriv");
        let line = format!("ulimit -u 1 && exec ./caravan {args}");
        command.args(["--reuid=61234", "--regid=61234", "--clear-groups", "bash", "-c", &line]);
        bench.prepare(&mut command);
        command.spawn().map(|child| bench.finish(child))
    };
    let cannot = |why: &str| skip(&format!("a program without further threads: {why}"));
    let outcome = match run(&format!("{tokenize} one.bin")) {
        Ok(outcome) => outcome,
        Err(e) => return cannot(&format!("setpriv cannot be started: {e}")),
    };
    // Where root is not allowed to become another, as in some containers.
    if outcome.stderr.contains("setpriv: ") {
        return cannot(outcome.stderr.trim());
    }
    outcome.success();
    assert!(fs::read(bench.path("one.bin")).unwrap() == fs::read(bench.path("all.bin")).unwrap());
    for transport in ["shm", "threads"] {
        let ranks = run(&format!("bench barrier --ranks 2 -n 1 --transport {transport}")).unwrap();
        ranks.refusal(1, &["the limit of processes (ulimit -u, or pids.max of a container) may be too low"]);
    }
}
