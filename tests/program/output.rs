//! Standard output that nobody reads, that is full, and that is closed.

use crate::bench;
use std::fs;
use std::process::Command;

#[test]
fn output_that_nobody_reads_is_no_failure_and_one_that_cannot_be_written_is() {
    let bench = bench();
    for args in ["doctor", "--help", "train --help", "--version", "bench all_reduce -e 4K -n 3"] {
        let (_, unread) = std::io::pipe().unwrap();
        let ended = bench.outcome(bench.command(args).stdout(unread));
        assert_eq!((ended.code, &*ended.stderr), (Some(0), ""), "{args}");
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let ended = bench.outcome(bench.command(args).stdout(full));
        assert_eq!(ended.code, Some(1), "{ended:?}");
        assert!(ended.stderr.contains("writing to standard output: No space left"), "{ended:?}");
    }
}

/// Rust's library opens what is closed before `main`, as what takes everything.
#[test]
fn output_that_is_closed_cannot_be_written() {
    let bench = bench();
    bench.text("text.txt", 20_000);
    let run = |line: &str| {
        let mut command = Command::new("bash");
        command.args(["-c", &format!("exec {} {line}", env!("CARGO_BIN_EXE_caravan"))]);
        bench.prepare(&mut command);
        bench.outcome(&mut command)
    };
    let train = "train --model nano --data text.txt --steps 1 --micro-batch 1";
    let all = ["doctor", "--version", "bench all_reduce -e 4K -n 3", train];
    for line in all {
        for closed in [">&-", "<&- >&-", "1</dev/null"] {
            run(&format!("{line} {closed}")).refusal(1, &["writing to standard output: it is not open"]);
        }
    }
    // Where nothing is to be printed, nothing is lost.
    run(&format!("{train} --quiet >&-")).success();
    for line in all {
        for open in [">/dev/null", "1<>/dev/null", "<&-", ">here 2>&-"] {
            run(&format!("{line} {open}")).success();
        }
    }
    bench.nothing_left();
}
