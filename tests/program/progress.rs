//! What is shown while a run goes, and where.

use crate::bench;
use harness::json_lines;

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
        assert_eq!(unread.wait().unwrap().code(), Some(0));
        let lines = json_lines(&bench.path(metrics));
        assert!(lines.last().unwrap()["summary"].is_object(), "{lines:?}");
    }
}
