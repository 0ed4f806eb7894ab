//! Runs that end before their time: killed ranks, signals, failures. Every rank ends, and nothing stays.

use crate::bench;
use collectives::digest;
use harness::{Bench, ENDLESS, Outcome, Waited, in_shared_memory, installed, signal, skip};
use rustix::fs::{Mode, OFlags};
use rustix::process::Signal;
use rustix::system::uname;
use std::fs;
use std::io::{PipeReader, PipeWriter, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::{Child, Command};
use std::time::Duration;

/// A run that takes for ever, started and under way.
fn endless(bench: &Bench, flags: &str) -> Child {
    bench.endless(bench.command(&format!("{ENDLESS} {flags}")))
}

/// So soon after one of its ranks was killed, whichever, all of a job has ended: README promises that.
const PROMISED: Duration = Duration::from_secs(5);

/// Where UCX makes the segments of a job that this process started.
fn places(process: u32) -> Vec<String> {
    in_shared_memory(&format!("caravan-ucx-{process}-"))
}

const NONE: [String; 0] = [];

const CARAVAN: &str = env!("CARGO_BIN_EXE_caravan");

/// One of the ranks of a run is killed: the others end in time and name it, and nothing stays.
fn one_is_killed(ranks: usize, victim: usize, flags: &str) {
    let bench = bench();
    let run = endless(&bench, &format!("--ranks {ranks} {flags}"));
    let (id, members) = (run.id(), bench.ranks());
    assert_eq!(members.iter().map(|m| m.0).collect::<Vec<_>>(), (0..ranks).collect::<Vec<_>>());
    // As if it were killed while it saves.
    let host = digest(uname().nodename().to_bytes().iter().copied());
    fs::create_dir(bench.path(&format!("out.tmp-{host:016x}-1-0"))).unwrap();
    signal(members[victim].1, Signal::KILL);
    let outcome = bench.finish(run).refusal(1, &[&format!("rank {victim}"), "killed by signal 9"]);
    // The supervisor would say so, had a rank not ended by itself in its grace.
    assert!(!outcome.stderr.contains("did not end by"), "{}", outcome.stderr);
    bench.nothing_half_written();
    assert_eq!(places(id), NONE);
    let took = outcome.took;
    assert!(took < PROMISED, "rank {victim} of {ranks} {flags}: all of it ended after {took:?}");
}

#[test]
fn a_killed_rank_ends_the_others_by_name() {
    for (ranks, victim, stage) in [(2, 1, 3), (3, 0, 2), (3, 1, 3), (3, 2, 0), (4, 2, 1)] {
        one_is_killed(ranks, victim, &format!("--stage {stage}"));
    }
}

#[test]
fn a_killed_rank_is_named_whatever_carries_messages() {
    let link = "--emulate-link latency=20us,bandwidth=1GB/s";
    one_is_killed(3, 0, link);
    one_is_killed(4, 3, &format!("--transport shm+shm --ranks-per-node 2 {link}"));
    if bench().offers("ucx") {
        for victim in 0..3 {
            one_is_killed(3, victim, "--transport ucx");
        }
        one_is_killed(4, 0, "--transport shm+ucx --ranks-per-node 2");
        one_is_killed(4, 3, "--transport shm+ucx --ranks-per-node 2");
    }
}

#[test]
fn a_rank_that_stands_still_is_named() {
    for transport in ["shm", "ucx"].into_iter().filter(|&name| name == "shm" || bench().offers(name)) {
        for (ranks, victim, stage) in [(2, 1, 3), (3, 0, 1)] {
            let flags = format!("--transport {transport} --ranks {ranks} --stage {stage} --call-timeout 2");
            let bench = bench();
            let run = endless(&bench, &flags);
            signal(bench.ranks()[victim].1, Signal::STOP);
            bench.finish(run).refusal(1, &[&format!("rank {victim}"), "2s"]);
            bench.nothing_half_written();
        }
    }
}

#[test]
fn an_interrupt_ends_every_rank() {
    let over = if bench().offers("ucx") { "ucx" } else { "shm" };
    for (name, code, over) in
        [(Signal::INT, 130, "shm"), (Signal::HUP, 129, "shm"), (Signal::QUIT, 131, over)]
    {
        let bench = bench();
        let run = endless(&bench, &format!("--ranks 3 --transport {over}"));
        let process = run.id();
        signal(process, name);
        bench.finish(run).refusal(code, &["interrupted by signal"]);
        bench.nothing_half_written();
        assert_eq!(places(process), NONE);
    }
}

/// UCX has a use of its own for this signal.
#[test]
fn a_hangup_ends_a_rank_over_ucx() {
    let bench = bench();
    if !bench.offers("ucx") {
        return skip("hangups over UCX: there is none");
    }
    let run = endless(&bench, "--ranks 2 --transport ucx");
    signal(bench.ranks()[1].1, Signal::HUP);
    bench.finish(run).refusal(1, &["rank 1", "killed by signal 1"]);
    bench.nothing_left();
}

/// A UCX that starts a thread as it is loaded, as one with FUSE does, and in which ranks then stand still.
const WITH_A_THREAD: &str = "
#include <pthread.h>
#include <unistd.h>
static void *sleeps(void *nothing) { for (;;) pause(); }
__attribute__((constructor)) static void begin(void) { pthread_t thread; pthread_create(&thread, 0, sleeps, 0); }
void ucp_get_version(unsigned *major, unsigned *minor, unsigned *release) { *major = 1; *minor = 18; *release = 0; }
int ucp_config_read(void *prefix, void *file, void **config) { for (;;) pause(); }
void ucs_log_push_handler(void *handler) {}
#define UNUSED(name) void name(void) {}
UNUSED(ucp_config_modify) UNUSED(ucp_config_release) UNUSED(ucp_init_version) UNUSED(ucp_cleanup)
UNUSED(ucp_worker_create) UNUSED(ucp_worker_destroy) UNUSED(ucp_worker_get_address)
UNUSED(ucp_worker_release_address) UNUSED(ucp_worker_progress) UNUSED(ucp_ep_create) UNUSED(ucp_ep_close_nbx)
UNUSED(ucp_tag_send_nbx) UNUSED(ucp_tag_recv_nbx) UNUSED(ucp_request_check_status)
UNUSED(ucp_tag_probe_nb) UNUSED(ucp_tag_msg_recv_nbx)
UNUSED(ucp_tag_recv_request_test) UNUSED(ucp_request_cancel) UNUSED(ucp_request_free) UNUSED(ucs_status_string)
";

/// A signal to a process goes to any of its threads that does not block it.
#[test]
fn threads_of_ucx_take_no_signal_of_the_supervisor() {
    let bench = bench();
    bench.text("text.txt", 6000);
    let source = bench.file("ucx.c", WITH_A_THREAD);
    for name in ["libucp.so.0", "libucs.so.0"] {
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-pthread", "-Wl,-z,nodelete"]).arg(&source);
        match compiler.arg("-o").arg(bench.path(name)).status() {
            Ok(status) => assert!(status.success(), "{compiler:?}"),
            Err(_) => return skip("threads of UCX and signals: no C compiler"),
        }
    }
    for (name, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129)] {
        let mut command = bench.command(&format!("{ENDLESS} --ranks 2 --transport ucx"));
        command.env("LD_LIBRARY_PATH", bench.path("."));
        let run = command.spawn().expect("the program starts");
        let run = bench.until(run, "its ranks have started", || bench.ranks().len() == 2);
        signal(run.id(), name);
        bench.finish(run).refusal(code, &["interrupted by signal", "all 2 ranks have ended"]);
    }
    bench.nothing_left();
}

/// A pipe that is full, at whose other end somebody sits who does not read.
fn full_pipe() -> (PipeReader, PipeWriter) {
    let (reader, mut full) = std::io::pipe().unwrap();
    let flags = rustix::fs::fcntl_getfl(&full).unwrap();
    rustix::fs::fcntl_setfl(&full, flags | OFlags::NONBLOCK).unwrap();
    while full.write(b".").is_ok() {}
    rustix::fs::fcntl_setfl(&full, flags).unwrap();
    (reader, full)
}

/// The exit code of a run that is asked to end, and does soon.
#[track_caller]
fn ends_by(mut run: Child, name: Signal) -> Option<i32> {
    signal(run.id(), name);
    let mut waited = Waited::begin();
    loop {
        match run.try_wait().unwrap() {
            Some(status) => return status.code(),
            None if waited.so_far() > PROMISED => panic!("it waits"),
            None => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

#[test]
fn an_interrupted_run_does_not_wait_until_its_words_are_read() {
    for (name, code, flags) in [
        (Signal::INT, 130, "--quiet"),
        (Signal::TERM, 143, "--ranks 2"),
        (Signal::TERM, 143, "--ranks 2 --transport threads"),
    ] {
        let ((_reader, said), (_printed_to, printed)) = (full_pipe(), full_pipe());
        let bench = bench();
        let mut command = bench.command(&format!("{ENDLESS} {flags}"));
        command.stderr(said).stdout(printed);
        let run = bench.endless(command);
        assert_eq!(ends_by(run, name), Some(code), "{flags}");
        let kept: &[&str] = if name == Signal::TERM { &["out"] } else { &[] };
        assert_eq!(bench.names(), [&["m.jsonl"], kept, &["text.txt"]].concat());
        bench.nothing_left();
    }
}

/// What there was to do is done, but for a sample that nobody would see.
#[test]
fn a_run_that_is_over_waits_for_a_reader_until_it_is_asked_to_end() {
    for (transport, sample) in [("shm", 20), ("threads", 20), ("shm", 0)] {
        let ((_reader, said), (_printed_to, printed)) = (full_pipe(), full_pipe());
        let bench = bench();
        bench.text("text.txt", 3000);
        let train =
            "train --model nano --data text.txt --steps 2 --micro-batch 1 --metrics m.jsonl --save out";
        let flags = format!("--ranks 2 --transport {transport} --sample {sample}");
        let mut command = bench.command(&format!("{train} {flags}"));
        let run = command.stderr(said).stdout(printed).spawn().unwrap();
        let is_over = || fs::read_to_string(bench.path("m.jsonl")).is_ok_and(|text| text.contains("summary"));
        let run = bench.until(run, "it is over", is_over);
        std::thread::sleep(Duration::from_millis(300));
        let code = if sample > 0 { 143 } else { 0 };
        assert_eq!(ends_by(run, Signal::TERM), Some(code), "{flags}");
        assert_eq!(bench.names(), ["m.jsonl", "out", "text.txt"]);
        bench.nothing_left();
    }
}

/// Lines of metrics that a run has written.
fn steps(bench: &Bench) -> usize {
    fs::read_to_string(bench.path("m.jsonl")).unwrap().lines().count()
}

/// Returns once a run has made 20 more steps.
#[track_caller]
fn goes_on(bench: &Bench, run: Child) -> Child {
    let before = steps(bench);
    bench.until(run, "20 more steps are made", || steps(bench) >= before + 20)
}

/// Without a shell that minds its jobs (`ssh -t host caravan`, `docker exec -it`) nobody would let it go on.
#[test]
fn ctrl_z_where_nobody_could_let_it_go_on_does_not_stop_a_run() {
    if !installed("setsid") {
        return;
    }
    let bench = bench();
    let mut command = Command::new("setsid");
    command.args([CARAVAN].into_iter().chain(ENDLESS.split_whitespace()));
    bench.prepare(&mut command);
    let run = bench.endless(command);
    signal(run.id(), Signal::TSTP);
    let run = goes_on(&bench, run);
    signal(run.id(), Signal::INT);
    assert_eq!(bench.finish(run).code, Some(130));
    bench.nothing_half_written();
}

#[test]
fn data_that_change_during_a_run_do_not_kill_it() {
    // Text is taken once: what an editor does to it is nothing to the run.
    let bench = crate::bench();
    let run = endless(&bench, "");
    fs::write(bench.path("text.txt"), "short").unwrap();
    let run = goes_on(&bench, run);
    signal(run.id(), Signal::INT);
    assert_eq!(bench.finish(run).code, Some(130));
    // Token files are read as they lie.
    let bench = crate::bench();
    bench.text("text.txt", 20_000);
    bench.run("tokenize --data text.txt --out t.bin").success();
    let run = bench.endless(bench.command(&ENDLESS.replace("text.txt", "t.bin")));
    fs::File::options().write(true).open(bench.path("t.bin")).unwrap().set_len(2000).unwrap();
    bench.finish(run).refusal(1, &["t.bin", "fewer now", "must not change"]);
    bench.nothing_left();
}

/// Saving comes before the evaluation of all that is held out: what goes wrong there costs no model.
#[test]
fn an_evaluation_that_fails_at_the_end_leaves_the_saved_model() {
    for flags in ["--ranks 3 --stage 0", "--ranks 2 --stage 3", "--ranks 2 --stage 1 --transport threads"] {
        let bench = bench();
        let words = ["t.bin", "fewer now", "must not change"];
        let outcome = trained_while_what_is_held_out_goes(&bench, flags).refusal(1, &words);
        assert!(outcome.stdout.contains("\"step\":300,"), "{}", outcome.stdout);
        assert!(!outcome.stdout.contains("summary"), "{}", outcome.stdout);
        assert!(outcome.stdout.ends_with("saved to out\n"), "{}", outcome.stdout);
        the_model_is_worth_something(&bench);
    }
}

/// One between two steps, which the model outlives as it does a batch that cannot be read.
#[test]
fn an_evaluation_that_fails_on_the_way_keeps_the_model() {
    for flags in ["--ranks 1", "--ranks 3 --stage 0", "--ranks 2 --stage 3", "--ranks 2 --transport threads"]
    {
        let bench = bench();
        let words = ["no tokens to evaluate", "t.bin", "fewer now", "after step 200 were saved to out"];
        let flags = format!("{flags} --eval-every 200");
        let outcome = trained_while_what_is_held_out_goes(&bench, &flags).refusal(1, &words);
        assert!(!outcome.stderr.contains("no use") && !outcome.stderr.contains("--lr"), "{}", outcome.stderr);
        the_model_is_worth_something(&bench);
    }
}

/// 300 steps, in which the tokens go that are held out, before the 150th.
fn trained_while_what_is_held_out_goes(bench: &Bench, flags: &str) -> Outcome {
    bench.text("text.txt", 20_000);
    bench.run("tokenize --data text.txt --out t.bin").success();
    let train = "train --model nano --data t.bin --steps 300 --seq 8 --micro-batch 1";
    let mut run = bench
        .command(&format!("{train} {flags} --metrics /dev/stdout --save out"))
        .spawn()
        .expect("the program starts");
    // A pipe holds the lines of half of these steps at most, so that the run waits until they are read.
    run.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    // What is held out goes, two bytes a token behind a header; what is trained on stays.
    let file = fs::File::options().write(true).open(bench.path("t.bin")).unwrap();
    file.set_len(1024 + 2 * 18_000).unwrap();
    bench.finish(run)
}

fn the_model_is_worth_something(bench: &Bench) {
    let loss = bench.run("eval --model out --data text.txt --json").success().json()["loss"].clone();
    assert!(loss.as_f64().unwrap() < 5.0, "{loss}");
    assert_eq!(bench.names(), ["out", "t.bin", "text.txt"]);
    bench.nothing_left();
}

/// Where the system has no more memory for the optimizer's state, a sentence says so.
#[test]
fn memory_that_the_system_refuses_is_an_error() {
    let bench = bench();
    let train = "train --model 32m --data random --seq 8 --micro-batch 1 --val-fraction 0 --sample 0 --quiet --ranks 1 \
                 --threads 1 --transport threads --metrics m.jsonl --steps";
    // What it takes where there is enough.
    let run = bench.endless(bench.command(&format!("{train} 100000000")));
    let status = fs::read_to_string(format!("/proc/{}/status", run.id())).unwrap();
    signal(run.id(), Signal::KILL);
    bench.finish(run);
    let Some(peak) = status.lines().find_map(|line| line.strip_prefix("VmPeak:")) else {
        return skip("this system does not say how many addresses a process has had");
    };
    let peak: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
    let text = fs::read_to_string(bench.path("m.jsonl")).unwrap();
    let step: serde_json::Value = serde_json::from_str(text.lines().nth(1).unwrap()).unwrap();
    let optimizer = step["memory"]["optimizer"].as_u64().unwrap();
    assert!(optimizer > 256 << 20, "{optimizer}");
    // It is what is taken last.
    let run = format!("ulimit -v {}; exec {CARAVAN} {train} 1", peak - optimizer / 2 / 1024);
    let mut command = Command::new("bash");
    command.args(["-c", &run]);
    bench.prepare(&mut command);
    let words = ["rank 0 failed: allocating", "bytes of memory: the system has no more"];
    bench.outcome(&mut command).refusal(1, &words);
    bench.nothing_left();
}

/// UCX's segments have names for some milliseconds of a start: whoever ends it then leaves none, nor does a job whose
/// starting process was killed once another has started.
#[test]
fn nothing_of_ucx_is_left_in_shared_memory() {
    let bench = bench();
    if !bench.offers("ucx") {
        return;
    }
    let run = endless(&bench, "--transport ucx");
    let id = run.id();
    assert_eq!(places(id).len(), 1);
    signal(id, Signal::KILL);
    bench.finish(run);
    bench.run("bench barrier --transport ucx -n 10").success();
    assert_eq!(places(id), NONE);
    for wait in (0..80).step_by(8) {
        let run = bench.command(&format!("{ENDLESS} --transport ucx")).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(wait));
        let id = run.id();
        signal(id, Signal::INT);
        bench.finish(run);
        assert_eq!(places(id), NONE, "ended after {wait} ms");
    }
    // As soon as there is something to leave.
    let run = bench.command(&format!("{ENDLESS} --transport ucx")).spawn().unwrap();
    let id = run.id();
    let run = bench.until(run, "there is a place for files of UCX", || !places(id).is_empty());
    signal(id, Signal::INT);
    bench.finish(run);
    assert_eq!(places(id), NONE);
    bench.nothing_half_written();
}

#[test]
fn a_run_under_nohup_outlives_its_terminal() {
    let bench = bench();
    let mut command = Command::new("nohup");
    command.args([CARAVAN].into_iter().chain(ENDLESS.split_whitespace()));
    bench.prepare(&mut command);
    let run = bench.endless(command);
    signal(run.id(), Signal::HUP);
    // Were the first taken, it would be the one that the exit code names.
    signal(run.id(), Signal::INT);
    assert_eq!(bench.finish(run).code, Some(130));
    bench.nothing_half_written();
}

/// What a script starts in its background is to stay when Ctrl-C ends the script.
#[test]
fn a_run_in_the_background_of_a_script_outlives_an_interrupt() {
    let bench = bench();
    let mut command = Command::new("bash");
    command.args(["-c", &format!("trap '' INT; exec {CARAVAN} {ENDLESS}")]);
    bench.prepare(&mut command);
    let run = bench.endless(command);
    signal(run.id(), Signal::INT);
    let run = goes_on(&bench, run);
    signal(run.id(), Signal::HUP);
    assert_eq!(bench.finish(run).code, Some(129));
    bench.nothing_left();
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
fn a_signal_while_tokens_are_written_leaves_nothing() {
    for name in [Signal::INT, Signal::TERM, Signal::KILL] {
        let bench = bench();
        bench.text("text.txt", 8000);
        assert!(Command::new("mkfifo").arg(bench.path("pipe")).status().unwrap().success());
        let run = bench.command("tokenize --data text.txt pipe --out t.bin").spawn().unwrap();
        // Opening waits for the reader: the text's tokens are written by then, and the pipe's never come.
        let _writer = fs::OpenOptions::new().write(true).open(bench.path("pipe")).unwrap();
        signal(run.id(), name);
        assert_eq!(bench.finish(run).code, None);
        assert_eq!(bench.names(), ["pipe", "text.txt"], "{name:?}");
        bench.nothing_left();
    }
}

/// Whether this process has written more than a megabyte to a file that has no name yet.
fn writes_nameless(process: u32) -> bool {
    let open = fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten().flatten();
    let nameless = |entry: fs::DirEntry| {
        let memory =
            fs::read_link(entry.path()).is_ok_and(|name| name.to_string_lossy().starts_with("/memfd:"));
        !memory && entry.path().metadata().is_ok_and(|file| file.nlink() == 0 && file.len() > 1 << 20)
    };
    open.into_iter().any(nameless)
}

#[test]
fn a_signal_while_a_model_is_written_leaves_nothing() {
    let bench = bench();
    let nameless = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    if let Err(e) = rustix::fs::open(bench.path("."), nameless, Mode::RUSR) {
        return skip(&format!("the file system of scratch folders has no files without names: {e}"));
    }
    // 130 MB of weights, with no supervisor that would clean up.
    let train = "train --model 32m --data random --seq 8 --micro-batch 1 --steps 1 --sample 0 --quiet --ranks 1 --threads 1 \
                 --dtype f32 --transport threads --save out";
    let mut run = bench.command(train).spawn().unwrap();
    while !writes_nameless(run.id()) {
        if run.try_wait().unwrap().is_some() {
            bench.finish(run).success();
            panic!("no file without a name was seen until the run ended, and here there can be some");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    signal(run.id(), Signal::KILL);
    assert_eq!(bench.finish(run).code, None);
    assert_eq!(bench.names(), [""; 0]);
    bench.nothing_left();
}

/// Of so many tokens only parts are looked at before the start: what lies between is met on the way, and all that was learnt
/// until then is kept.
#[test]
fn a_rank_that_cannot_read_its_tokens_ends_the_run_and_keeps_its_model() {
    let bench = bench();
    let (count, bad) = ((1usize << 26) + (1 << 16), (1 << 16) + 9000);
    let header = [20240520i32, 1, count as i32].map(i32::to_le_bytes).concat();
    bench.file("large.bin", header);
    let file = fs::OpenOptions::new().write(true).open(bench.path("large.bin")).unwrap();
    file.set_len(1024 + 2 * count as u64).unwrap();
    file.write_all_at(&300u16.to_le_bytes(), 1024 + 2 * bad).unwrap();
    let train = "train --model nano --data large.bin --val-fraction 0 --order sequential --micro-batch 192 \
                 --sample 0 --quiet";
    let words = ["has no tokens to train on", "token 74536", "large.bin", "300", "256", "saved to kept"];
    let told = bench.run(&format!("{train} --ranks 2 --steps 9 --save kept")).refusal(1, &words);
    assert!(!told.stderr.contains("failed") && !told.stderr.contains("no use"), "{}", told.stderr);
    assert!(!told.stderr.contains("after step 0"), "{}", told.stderr);
    bench.text("text.txt", 8000);
    bench.run("eval --model kept --data text.txt --json").success();
    bench.nothing_left();
}
