//! What is shown while a run goes, and where.

use crate::bench;
use harness::{installed, json_lines};
use std::process::Command;

#[test]
fn output_for_machines_has_no_progress_and_no_colour() {
    let bench = bench();
    bench.text("text.txt", 20_000);
    let flags = "train --model nano --data text.txt --steps 2 --micro-batch 1";
    let quiet = bench.run(&format!("{flags} --quiet")).success();
    assert_eq!((quiet.stdout.as_str(), quiet.stderr.as_str()), ("", ""));
    let plain = bench.run(flags).success();
    assert!(!plain.stdout.contains('\x1b') && !plain.stderr.contains('\x1b'));
}

#[test]
fn a_run_goes_on_when_nobody_reads_its_progress() {
    let bench = bench();
    bench.text("text.txt", 8000);
    for (transport, metrics) in [("shm", "a.jsonl"), ("threads", "b.jsonl")] {
        let flags = "--model nano --data text.txt --steps 3 --micro-batch 1 --sample 0";
        let mut unread = bench
            .command(&format!("train {flags} --transport {transport} --metrics {metrics}"))
            .spawn()
            .unwrap();
        drop((unread.stdout.take(), unread.stderr.take()));
        assert_eq!(bench.finish(unread).code, Some(0));
        let lines = json_lines(&bench.path(metrics));
        assert!(lines.last().unwrap()["summary"].is_object(), "{lines:?}");
    }
}

/// What a run shows on a terminal of this kind.
fn on_terminal(kind: &str, args: &str) -> String {
    let bench = bench();
    bench.text("text.txt", 20_000);
    let mut command = Command::new("script");
    command.args(["-qec", &format!("{} {args}", env!("CARGO_BIN_EXE_caravan")), "/dev/null"]);
    bench.prepare(&mut command);
    command.env("TERM", kind);
    bench.outcome(&mut command).success().stdout
}

/// There no bar can be drawn, and lines can.
#[test]
fn a_terminal_that_draws_no_bar_gets_lines() {
    if !installed("script") {
        return;
    }
    let train = "train --model nano --data text.txt --steps 2 --micro-batch 1 --sample 0";
    let shown = on_terminal("dumb", train);
    assert!(shown.contains("step 1/2  loss ") && shown.contains("step 2/2  loss "), "{shown}");
    let shown = on_terminal("xterm", train);
    assert!(!shown.contains("step 1/2") && shown.contains("\x1b"), "{shown}");
    assert!(shown.contains(" 1/2  loss ") && shown.contains(" 2/2  loss "), "{shown}");
    assert!(shown.contains("evaluating 0/") && !shown.contains("0s left"), "{shown}");
}
