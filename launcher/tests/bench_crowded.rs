//! More ranks than processors: every operation of `bench` still ends, soon, with every element right.

use harness::{Bench, OPERATIONS, Outcome};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::os::unix::process::CommandExt;

/// Ranks on [`PROCESSORS`].
const RANKS: usize = 4;
/// However many the machine has.
const PROCESSORS: usize = 2;

/// Runs the program on the first of the processors that this test may use.
fn run(bench: &Bench, args: &str) -> Outcome {
    let allowed = sched_getaffinity(None).expect("the processors of this test");
    let mut few = CpuSet::new();
    (0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu)).take(PROCESSORS).for_each(|cpu| few.set(cpu));
    let mut command = bench.command(args);
    // SAFETY: between fork and exec the closure makes one system call.
    unsafe { command.pre_exec(move || Ok(sched_setaffinity(None, &few)?)) };
    bench.outcome(&mut command)
}

/// Every operation over `transport`; a stall is ended by the harness and is then no success.
fn every_operation(transport: &str) {
    let bench = Bench::new(env!("CARGO_BIN_EXE_caravan"));
    for operation in OPERATIONS.into_iter().chain(["barrier"]) {
        let sizes = if operation == "barrier" { "" } else { "-b 1K -e 64K -f 8" };
        let args = format!("bench {operation} {sizes} -n 10 --ranks {RANKS} --transport {transport}");
        let outcome = run(&bench, &args).success();
        assert!(outcome.stdout.contains("# Out of bounds values : 0 OK"), "{operation}: {}", outcome.stdout);
    }
    for form in ["overlap -b 16K -e 16K -n 3", "all_reduce --calls started -b 1K -e 64K -f 8 -n 10"] {
        run(&bench, &format!("bench {form} --ranks {RANKS} --transport {transport}")).success();
    }
    bench.nothing_left();
}

#[test]
fn over_shared_memory() {
    every_operation("shm");
}

#[test]
fn over_ucx() {
    let bench = Bench::new(env!("CARGO_BIN_EXE_caravan"));
    if !bench.offers("ucx") {
        return;
    }
    every_operation("ucx");
    bench.run("bench barrier -n 2 --transport ucx --json r.json").success();
    let json = bench.json("r.json");
    assert!(json["transport_library"].as_str().is_some_and(|name| name.starts_with("UCX")), "{json}");
}

/// What UCX says of variables that it does not know is no result, and that peers end while connections close is no error.
#[test]
fn what_ucx_logs_is_no_result() {
    let bench = Bench::new(env!("CARGO_BIN_EXE_caravan"));
    if !bench.offers("ucx") {
        return;
    }
    let ended = |variable: (&str, &str)| {
        let mut command = bench.command("bench barrier -n 2 -w 0 --transport ucx --ranks 16");
        command.env("UCX_TLS", "tcp,self").env(variable.0, variable.1);
        bench.outcome(&mut command).success()
    };
    let outcome = ended(("UCX_NOT_KNOWN", "1"));
    assert!(outcome.stderr.contains("UCX_NOT_KNOWN"), "{}", outcome.stderr);
    assert!(!outcome.stdout.contains("UCX"), "{}", outcome.stdout);
    for _ in 0..6 {
        let outcome = ended(("UCX_WARN_UNUSED_ENV_VARS", "n"));
        assert!(!outcome.stderr.contains("UCX"), "{}", outcome.stderr);
    }
}

#[test]
fn over_threads() {
    every_operation("threads");
}

/// More than connect to each other at the start: two connect with their first message, and part knowing of each other by what
/// they have said.
#[test]
fn over_ucx_between_ranks_that_mostly_never_speak() {
    let bench = Bench::new(env!("CARGO_BIN_EXE_caravan"));
    if !bench.offers("ucx") {
        return;
    }
    for (operation, tls) in [("broadcast", "all"), ("gather", "tcp,self")] {
        let mut command =
            bench.command(&format!("bench {operation} -b 64K -e 64K -n 2 -w 1 --ranks 66 --transport ucx"));
        command.env("UCX_TLS", tls).env("UCX_WARN_UNUSED_ENV_VARS", "n");
        let outcome = bench.outcome(&mut command).success();
        assert!(outcome.stdout.contains("# Out of bounds values : 0 OK"), "{operation}: {}", outcome.stdout);
    }
    bench.nothing_left();
}
