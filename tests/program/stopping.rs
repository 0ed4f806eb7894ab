//! Runs that are asked to end before their time, as batch systems do: what was learnt is kept, and nothing else stays.

use crate::bench;
use harness::{Bench, ENDLESS, Outcome, json_lines, signal};
use rustix::process::Signal;
use std::fs;
use std::process::Command;

/// Fails the test unless the run stopped with this code after a step, which it gives, and said that it saved its model; and
/// unless its metrics say the same.
#[track_caller]
fn stopped(bench: &Bench, outcome: &Outcome, code: i32) -> u64 {
    assert_eq!(outcome.code, Some(code), "{}", outcome.stderr);
    let said: Vec<&str> = outcome.stderr.lines().filter(|line| line.starts_with("caravan: ")).collect();
    let [said] = said[..] else { panic!("one sentence, not: {}", outcome.stderr) };
    let lines = json_lines(&bench.path("m.jsonl"));
    let summary = &lines.last().unwrap()["summary"];
    let steps = summary["steps"].as_u64().unwrap();
    let expected = format!(
        "caravan: interrupted by signal {}; the weights after step {steps} were saved to out",
        code - 128
    );
    assert_eq!(said, expected);
    let last = lines.iter().filter_map(|line| line["step"].as_u64()).next_back();
    assert_eq!((last, summary["saved"].as_str()), (Some(steps), Some("out")));
    for rank in summary["ranks"].as_array().unwrap() {
        assert_eq!(rank["memory"]["total"], rank["predicted_bytes"], "{rank}");
    }
    steps
}

/// Fails the test unless the saved weights are those of a run that was to make so many steps.
#[track_caller]
fn same_as_after(bench: &Bench, steps: u64, flags: &str) {
    let train = "train --model nano --data text.txt --micro-batch 1 --schedule constant --warmup 0 --sample 0 --quiet";
    bench.run(&format!("{train} {flags} --steps {steps} --save whole")).success();
    let weights = |of: &str| fs::read(bench.path(of).join("model.safetensors")).unwrap();
    assert!(weights("out") == weights("whole"), "{flags}: after {steps} steps");
}

#[test]
fn a_run_that_is_asked_to_end_keeps_what_it_has_learnt() {
    for (name, code, flags) in [
        (Signal::TERM, 143, "--ranks 3 --stage 3"),
        (Signal::USR1, 138, "--ranks 2 --stage 1 --accumulate 3"),
        (Signal::TERM, 143, "--ranks 2 --stage 2 --transport threads"),
        (Signal::USR1, 138, "--ranks 1"),
    ] {
        let bench = bench();
        let run = bench.endless(bench.command(&format!("{ENDLESS} --schedule constant --warmup 0 {flags}")));
        // Whoever asks every process of a job, and the program that asks its ranks, say it more than once.
        bench.processes().iter().for_each(|&process| signal(process, name));
        let outcome = bench.finish(run);
        let steps = stopped(&bench, &outcome, code);
        let table = format!("{steps} steps, ");
        assert!(outcome.stdout.contains(&table) && outcome.stdout.ends_with("saved to out\n"), "{outcome:?}");
        assert_eq!(bench.names(), ["m.jsonl", "out", "text.txt"]);
        same_as_after(&bench, steps, flags);
        bench.nothing_left();
    }
}

#[test]
fn all_ranks_stop_with_one_that_is_asked_to() {
    for (victim, flags) in [(0, "--ranks 2 --stage 0"), (2, "--ranks 3 --stage 3 --accumulate 2")] {
        let bench = bench();
        let run = bench
            .endless(bench.command(&format!("{ENDLESS} --schedule constant --warmup 0 --quiet {flags}")));
        signal(bench.ranks()[victim].1, Signal::TERM);
        let steps = stopped(&bench, &bench.finish(run), 143);
        same_as_after(&bench, steps, flags);
        bench.nothing_left();
    }
}

/// By then the model is saved already.
#[test]
fn a_last_evaluation_is_cut_short() {
    for flags in ["--ranks 2 --stage 3", "--ranks 2 --transport threads", "--ranks 1"] {
        let bench = bench();
        bench.text("text.txt", 4_000_000);
        let train = "train --model nano --data text.txt --steps 5 --micro-batch 1 --val-fraction 0.9";
        let run = bench.command(&format!("{train} --metrics m.jsonl --save out {flags}")).spawn().unwrap();
        let run = bench.until(run, "the model is saved", || bench.path("out").is_dir());
        signal(run.id(), Signal::TERM);
        let words = "interrupted by signal 15; all steps were made, and the last evaluation was not; the model was \
                     saved to out";
        let outcome = bench.finish(run).refusal(143, &[words]);
        assert!(outcome.stdout.contains("5 steps, "), "{}", outcome.stdout);
        let lines = json_lines(&bench.path("m.jsonl"));
        let summary = &lines.last().unwrap()["summary"];
        assert!(summary["saved"] == "out" && summary["validation_loss"].is_null(), "{summary}");
        bench.text("few.txt", 2000);
        bench.run("eval --model out --data few.txt --quiet").success();
        bench.nothing_left();
    }
}

/// Also where only a state is kept.
#[test]
fn a_sample_is_cut_short() {
    for (kept, there) in [("--save out", "out"), ("--checkpoint ckpt", "ckpt/step-2")] {
        let bench = bench();
        bench.text("text.txt", 3000);
        let train = "train --model nano --data text.txt --steps 2 --micro-batch 1 --sample 1000000 --ranks 2";
        let run = bench.command(&format!("{train} --metrics m.jsonl {kept}")).spawn().unwrap();
        let summary = || fs::read_to_string(bench.path("m.jsonl")).is_ok_and(|text| text.contains("summary"));
        let run = bench.until(run, "all else is made", summary);
        signal(run.id(), Signal::TERM);
        let words = "interrupted by signal 15; the sample was not made, all else was";
        bench.finish(run).refusal(143, &[words]);
        assert!(bench.path(there).is_dir(), "{kept}");
        bench.nothing_left();
    }
}

/// An evaluation on the way is cut short, too, and the run with it.
#[test]
fn an_evaluation_between_steps_is_cut_short() {
    let bench = bench();
    bench.text("text.txt", 4_000_000);
    let train = "train --model nano --data text.txt --steps 100000000 --micro-batch 1 --val-fraction 0.9";
    let flags = "--eval-every 3 --eval-tokens 3000000 --ranks 2 --metrics m.jsonl --save out --quiet";
    let run = bench.command(&format!("{train} {flags}")).spawn().unwrap();
    let steps = || fs::read_to_string(bench.path("m.jsonl")).map_or(0, |text| text.lines().count());
    let run = bench.until(run, "it evaluates", || steps() == 4);
    signal(run.id(), Signal::TERM);
    assert_eq!(stopped(&bench, &bench.finish(run), 143), 3);
    bench.nothing_left();
}

#[test]
fn a_model_that_cannot_be_kept_is_no_success() {
    let bench = bench();
    let mut command = Command::new("bash");
    let run = format!("exec {} {ENDLESS} --ranks 2 --transport threads", env!("CARGO_BIN_EXE_caravan"));
    let run = run.replace("--metrics m.jsonl", "");
    // Of 250 KB of weights; and of metrics, in whose place is what it says, written by another process.
    command.args(["-c", &format!("exec 2> >(tee said >&2); ulimit -c 0 -f 64; {run}")]);
    bench.prepare(&mut command);
    bench.text("text.txt", 20_000);
    let run = command.spawn().unwrap();
    let said = || fs::read_to_string(bench.path("said")).unwrap_or_default();
    let run = bench.until(run, "its second step", || said().contains("\nstep 2/"));
    signal(run.id(), Signal::TERM);
    let outcome = bench.finish(run);
    let last = outcome.stderr.lines().last().unwrap();
    let begins = last.starts_with("caravan: interrupted by signal 15; --save: ");
    assert!(outcome.code == Some(1) && begins && last.contains("File too large"), "{outcome:?}");
    assert_eq!(bench.names(), ["said", "text.txt"]);
    bench.nothing_left();
}

#[test]
fn a_model_and_a_state_that_cannot_be_kept_are_both_told_of() {
    let bench = bench();
    bench.text("text.txt", 20_000);
    let mut command = Command::new("bash");
    let train = "train --model nano --data text.txt --steps 4 --micro-batch 1 --transport threads --checkpoint c --save out";
    let run = format!("ulimit -c 0 -f 64; exec {} {train}", env!("CARGO_BIN_EXE_caravan"));
    command.args(["-c", &run]);
    bench.prepare(&mut command);
    let outcome = bench.finish(command.spawn().unwrap());
    let last = outcome.stderr.lines().last().unwrap();
    let both =
        ["--save: cannot write", "; --checkpoint c: ", "the run went on without a checkpoint of step "];
    assert!(outcome.code == Some(1) && both.iter().all(|words| last.contains(words)), "{outcome:?}");
    assert_eq!(bench.names(), ["c", "text.txt"]);
    bench.nothing_left();
}

/// Something else has ended it, and what it was asked to does not hide that.
#[test]
fn a_rank_that_dies_before_it_stops_is_a_failure() {
    let bench = bench();
    let run = bench.endless(bench.command(&format!("{ENDLESS} --ranks 2")));
    let ranks = bench.ranks();
    // It cannot stop, as long as one stands still.
    signal(ranks[1].1, Signal::STOP);
    signal(run.id(), Signal::TERM);
    std::thread::sleep(std::time::Duration::from_millis(300));
    signal(ranks[1].1, Signal::KILL);
    bench.finish(run).refusal(1, &["asked to end by signal 15; rank 1 was killed by signal 9"]);
    bench.nothing_half_written();
}

/// Nothing would be kept, so nothing is waited for.
#[test]
fn a_run_that_saves_nothing_ends_at_once() {
    for (name, code) in [(Signal::TERM, 143), (Signal::USR1, 138)] {
        let bench = bench();
        let run = bench.endless(bench.command(&ENDLESS.replace("--save out", "--ranks 2")));
        signal(run.id(), name);
        bench.finish(run).refusal(code, &["interrupted by signal", "all 2 ranks have ended"]);
        bench.nothing_half_written();
    }
}

/// Who has asked it to end need not wait until it does.
#[test]
fn an_interrupt_ends_a_run_that_is_about_to_stop() {
    let bench = bench();
    let run = bench.endless(bench.command(&format!("{ENDLESS} --ranks 2")));
    let ranks = bench.ranks();
    // It cannot, as long as one stands still.
    signal(ranks[1].1, Signal::STOP);
    signal(run.id(), Signal::TERM);
    std::thread::sleep(std::time::Duration::from_secs(4));
    assert_eq!(bench.ranks(), ranks, "they are let alone");
    signal(run.id(), Signal::INT);
    bench.finish(run).refusal(130, &["interrupted by signal 2; all 2 ranks have ended"]);
    bench.nothing_half_written();
}

/// torchrun ends its workers with itself, but where it is killed; a shell that waits for one outlives it.
#[test]
fn a_rank_of_a_torchrun_that_is_killed_is_asked_to_end() {
    let bench = bench();
    let torchrun = bench.path("torchrun");
    std::os::unix::fs::symlink("/bin/sh", &torchrun).unwrap();
    let mut agent = Command::new(torchrun);
    bench.prepare(&mut agent);
    agent.env("TORCHELASTIC_RUN_ID", "none").envs([("RANK", "0"), ("WORLD_SIZE", "1")]);
    agent
        .args(["-c", &format!("sh -c '{} {ENDLESS} --quiet; exit $?'; true", env!("CARGO_BIN_EXE_caravan"))]);
    let run = bench.endless(agent);
    signal(run.id(), Signal::KILL);
    // All that holds its streams has ended.
    bench.finish(run);
    assert_eq!(json_lines(&bench.path("m.jsonl")).last().unwrap()["summary"]["saved"], "out");
}
