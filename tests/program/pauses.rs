//! Readers of what a run says that pause, as behind `| less` or a terminal's Ctrl-S.

use crate::bench;
use harness::Bench;
use serde_json::Value;
use std::process::Command;
use std::time::Duration;

/// Starts a run whose output goes into one pipe, which is full already, and waits for longer than a call may take before
/// anything is read. What it says.
fn read_late(bench: &Bench, flags: &str) -> String {
    let mut command = Command::new("bash");
    let run = format!("head -c 65536 /dev/zero; exec {} {flags} 2>&1", env!("CARGO_BIN_EXE_caravan"));
    command.args(["-c", &format!("{run} --ranks 2 --call-timeout 2")]);
    bench.prepare(&mut command);
    let child = command.spawn().unwrap();
    let child = bench.until(child, "its ranks are there", || bench.ranks().len() == 2);
    std::thread::sleep(Duration::from_secs(4));
    let said = bench.finish(child).success().stdout;
    bench.nothing_left();
    said.trim_start_matches('\0').to_owned()
}

#[test]
fn a_reader_that_pauses_stops_no_training() {
    let bench = bench();
    bench.text("text.txt", 8000);
    let train = "train --model nano --data text.txt --steps 12 --eval-every 4 --micro-batch 1 --sample 20";
    let said = read_late(&bench, &format!("{train} --save out --metrics /dev/stdout"));
    // Nothing is missing of what stays: each line of metrics, in order, and each evaluation.
    let lines = said.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let metrics: Vec<Value> = lines.collect();
    let steps: Vec<i64> = metrics.iter().filter_map(|line| line["step"].as_i64()).collect();
    assert_eq!(steps, (1..=12).collect::<Vec<_>>(), "{said}");
    assert!(metrics[0]["run"].is_object() && metrics[metrics.len() - 1]["summary"].is_object(), "{said}");
    for step in [4, 8, 12] {
        assert!(said.contains(&format!("\nstep {step}  validation loss ")), "{said}");
    }
    assert!(said.contains("saved to out") && said.contains("\nsample\n"), "{said}");
    let said = read_late(&bench, "eval --model out --data text.txt");
    assert!(said.contains("loss"), "{said}");
}
