//! Checkpoints of which each rank writes its own part: at once, or beside the steps that follow.

use crate::bench;
use crate::disks::CARAVAN;
use harness::{Bench, ENDLESS, Outcome, cxx, is_root, json_lines, signal, skip};
use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const TRAIN: &str = "train --model nano --data text.txt --seq 16 --micro-batch 1 --sample 0 --quiet --metrics m.jsonl \
                     --checkpoint-every 2";

/// All files of the weights and moments below a directory of checkpoints, and what is in them.
fn files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let mut all = Vec::new();
    for state in fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()) {
        for part in ["weights", "first_moments", "second_moments"] {
            for file in fs::read_dir(state.join(part)).unwrap().map(|entry| entry.unwrap().path()) {
                let name = file.strip_prefix(dir).unwrap().display().to_string();
                all.push((name, fs::read(&file).unwrap()));
            }
        }
    }
    all.sort();
    all
}

/// What each line of the metrics is of, but for the first and the last.
fn lines(bench: &Bench) -> Vec<String> {
    let lines = json_lines(&bench.path("m.jsonl"));
    let of = |line: &Value| match (&line["step"], &line["checkpoint"]["step"]) {
        (Value::Number(step), _) => format!("step {step}"),
        (_, Value::Number(step)) => format!("checkpoint {step}"),
        _ => "other".to_owned(),
    };
    lines[1..lines.len() - 1].iter().map(of).collect()
}

#[test]
fn what_is_written_beside_the_run_is_what_stops_it_and_is_planned() {
    for (i, flags) in [
        "--ranks 2 --dtype bf16 --stage 3",
        "--ranks 3 --dtype f32 --stage 1 --transport threads",
        "--ranks 2 --dtype f32 --stage 0 --accumulate 2",
        "--ranks 1 --dtype f16 --stage 3",
    ]
    .into_iter()
    .enumerate()
    {
        let bench = bench();
        bench.text("text.txt", 3000);
        let train = format!("{TRAIN} {flags} --steps 6 --checkpoint-keep 9 --val-fraction 0");
        bench.run(&format!("{train} --checkpoint at-once")).success();
        assert_eq!(lines(&bench)[..3], ["step 1", "step 2", "checkpoint 2"], "{flags}");
        let memory = |bench: &Bench| {
            let summary = json_lines(&bench.path("m.jsonl")).pop().unwrap();
            let ranks = summary["summary"]["ranks"].as_array().unwrap().clone();
            ranks.iter().for_each(|rank| {
                assert_eq!(rank["memory"]["total"], rank["predicted_bytes"], "{flags}: {rank}");
            });
            ranks[0]["memory"]["total"].as_u64().unwrap()
        };
        let without = memory(&bench);
        let other = "--model nano --seq 16 --micro-batch 1";
        let planned = |more: &str| {
            let plan = bench.run(&format!("plan {other} {flags} {more} --json")).success().json();
            let stage = flags.split_once("--stage ").unwrap().1.as_bytes()[0] - b'0';
            plan["stages"][usize::from(stage)]["memory"]["total"].as_u64().unwrap()
        };

        bench.run(&format!("{train} --checkpoint beside --checkpoint-async")).success();
        assert!(files(&bench.path("at-once")) == files(&bench.path("beside")), "{flags}");
        // The run asks only after a step what has become of one, and waits for the last.
        let lines = lines(&bench);
        let at = |what: &str| {
            lines.iter().position(|line| line == what).unwrap_or_else(|| panic!("{what}: {lines:?}"))
        };
        assert!(at("checkpoint 2") > at("step 3") && at("checkpoint 4") > at("step 5"), "{flags}: {lines:?}");
        assert_eq!(
            lines.iter().filter(|line| line.starts_with("checkpoint")).count(),
            3,
            "{flags}: {lines:?}"
        );
        let copies = memory(&bench) - without;
        let ranks = [2, 3, 2, 1][i];
        // The model's 125248 parameters, and what pads shards.
        let own = 12 * 125_248 / ranks;
        assert!((own..own + own / 8).contains(&copies), "{flags}: {copies} for {own}");
        assert_eq!(planned("--checkpoint c --checkpoint-async") - planned(""), copies, "{flags}");
        for dir in ["at-once", "beside/step-4"] {
            bench.run(&format!("checkpoint {dir} --verify")).success();
        }
        bench
            .run(
                &format!("{train} --steps 8 --checkpoint beside --checkpoint-async --resume")
                    .replace("--steps 6 ", ""),
            )
            .success();
        bench.nothing_left();
    }
}

/// Two ranks that somebody starts, each as `words` say, which end in the program.
fn by_hand(bench: &Bench, words: [&str; 2], args: &str) -> [Outcome; 2] {
    let ranks = [0, 1].map(|rank| {
        let mut command = Command::new("unshare");
        command.args(["--mount", "bash", "-c", &format!("{} {CARAVAN} {args}", words[rank])]);
        bench.prepare(&mut command);
        let job = format!("parts-{}-{}", std::process::id(), bench.path("").display());
        command.envs([("CARAVAN_RANK", &*rank.to_string()), ("CARAVAN_WORLD", "2"), ("CARAVAN_JOB", &job)]);
        command.spawn().expect("unshare")
    });
    ranks.map(|rank| bench.finish(rank))
}

#[test]
fn a_rank_that_cannot_write_its_part_costs_the_checkpoint_and_is_named() {
    if !is_root() {
        return skip("a mount name space needs root");
    }
    for beside in ["", "--checkpoint-async"] {
        let bench = bench();
        bench.text("text.txt", 3000);
        fs::create_dir(bench.path("c")).unwrap();
        let args = format!("{TRAIN} --steps 4 --val-fraction 0 --save out --checkpoint c {beside}");
        // Rank 1 sees what comes there, and may change nothing.
        let closed = "mount --bind c c && mount -o remount,bind,ro c || exit 77; exec";
        let [zero, one] = by_hand(&bench, ["exec", closed], &args);
        if one.code == Some(77) {
            return skip(&format!("this machine lets root mount nothing: {}", one.stderr.trim()));
        }
        let words = [
            "--checkpoint c: rank 1: cannot open c/.step-4.unfinished/weights/model.safetensors",
            "Read-only file system",
            "the run went on without a checkpoint of step ",
        ];
        zero.refusal(1, &words);
        one.success();
        assert_eq!(lines(&bench), ["step 1", "step 2", "step 3", "step 4"], "{beside}");
        // Nothing of it stays, and the model is there.
        assert_eq!(bench.names(), ["c", "m.jsonl", "out", "text.txt"]);
        assert_eq!(fs::read_dir(bench.path("c")).unwrap().count(), 0);
        bench.nothing_left();
    }
}

#[test]
fn a_directory_that_a_rank_does_not_see_is_refused_before_the_first_step() {
    if !is_root() {
        return skip("a mount name space needs root");
    }
    let bench = bench();
    bench.text("text.txt", 3000);
    fs::create_dir(bench.path("c")).unwrap();
    let args = format!("{TRAIN} --steps 4 --checkpoint c");
    let [zero, one] = by_hand(&bench, ["exec", "mount -t tmpfs none c || exit 77; exec"], &args);
    if one.code == Some(77) {
        return skip(&format!("this machine lets root mount nothing: {}", one.stderr.trim()));
    }
    let words = ["--checkpoint c: rank 1 on ", "does not see", "name a directory that all hosts share"];
    zero.refusal(2, &words);
    assert_eq!(one.code, Some(2), "{one:?}");
    assert_eq!(bench.names(), ["c", "text.txt"]);
    assert_eq!(fs::read_dir(bench.path("c")).unwrap().count(), 0);
    bench.nothing_left();
}

/// Whatever is under way then.
#[test]
fn a_run_that_is_asked_to_end_keeps_its_last_step() {
    for flags in ["--ranks 2", "--ranks 2 --transport threads"] {
        let bench = bench();
        let beside = "--checkpoint c --checkpoint-every 3 --checkpoint-async --quiet";
        let run = bench.endless(bench.command(&format!("{ENDLESS} {flags} {beside}")));
        let run = bench.until(run, "it has a checkpoint", || {
            fs::read_dir(bench.path("c")).is_ok_and(|mut dir| {
                dir.any(|entry| entry.unwrap().file_name().to_string_lossy().starts_with("step-"))
            })
        });
        signal(run.id(), Signal::TERM);
        bench.finish(run).refusal(143, &["--resume goes on from c after step "]);
        let made = json_lines(&bench.path("m.jsonl"));
        let last = made.iter().rfind(|line| line["step"].is_u64()).unwrap()["step"].as_u64().unwrap();
        let names: Vec<_> = fs::read_dir(bench.path("c")).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, [&*format!("step-{last}")], "{flags}");
        bench.run("checkpoint c --verify").success();
        bench.nothing_left();
    }
}

/// What makes a disk as slow as that for a program that is started with it, if there is a compiler.
fn slow_disk(bench: &Bench, milliseconds: u32) -> Option<PathBuf> {
    let text = format!(
        "#include <sys/syscall.h>\n#include <unistd.h>\n\
         extern \"C\" int fsync(int file) {{ usleep({milliseconds} * 1000); return syscall(SYS_fsync, file); }}\n"
    );
    let mut command = Command::new(cxx("a slow disk")?);
    let [text, made] = [bench.file("slow.cpp", text), bench.path("slow.so")];
    let status = command.args(["-shared", "-fPIC", "-o"]).arg(&made).arg(text).status();
    assert!(status.unwrap().success());
    Some(made)
}

/// What is not whole goes, and what is gets its name, whatever rank 0's thread is at.
#[test]
fn a_rank_that_dies_meanwhile_leaves_nothing_half_written() {
    let bench = bench();
    bench.text("text.txt", 3000);
    let Some(slow) = slow_disk(&bench, 250) else { return };
    for (at, left) in [("", vec![]), ("/training.json", vec!["step-2"])] {
        let ranks = [0, 1].map(|rank| {
            let mut command = bench.command(&format!("{TRAIN} --steps 1000000 --checkpoint c"));
            let job = format!("dies-{}-{}", at.len(), std::process::id());
            let by_hand =
                [("CARAVAN_RANK", &*rank.to_string()), ("CARAVAN_WORLD", "2"), ("CARAVAN_JOB", &job)];
            command.envs(by_hand);
            if rank == 0 {
                command.env("LD_PRELOAD", &slow);
            }
            command.spawn().unwrap()
        });
        let [zero, mut one] = ranks;
        let begun = bench.path(&format!("c/.step-2.unfinished{at}"));
        let zero = bench.until(zero, "a checkpoint is so far", || begun.exists());
        one.kill().unwrap();
        one.wait().unwrap();
        bench.finish(zero).refusal(1, &["rank 1"]);
        let names: Vec<_> = fs::read_dir(bench.path("c")).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, left, "{at}");
    }
    bench.run("checkpoint c --verify").success();
    bench.nothing_left();
}

/// Whoever waits for a disk is a thread, and ranks that would wait for it longer than they wait for each other do not.
#[test]
fn a_slow_disk_is_no_silent_rank() {
    let bench = bench();
    bench.text("text.txt", 3000);
    let Some(slow) = slow_disk(&bench, 450) else { return };
    // The first beside a step, and the last while the run stands still.
    let train =
        TRAIN.replace("--metrics m.jsonl --checkpoint-every 2", "--checkpoint-every 1 --checkpoint-async");
    let mut command = bench.command(&format!("{train} --ranks 2 --steps 2 --checkpoint c --call-timeout 2"));
    command.env("LD_PRELOAD", slow);
    let outcome = bench.outcome(&mut command);
    // Rank 0 alone waits for a dozen each time.
    assert!(outcome.took > Duration::from_secs(8), "{outcome:?}");
    outcome.success();
    bench.run("checkpoint c --verify").success();
    bench.nothing_left();
}

/// As somebody does who has not seen that it is in use.
#[test]
fn a_directory_that_is_moved_away_is_made_anew() {
    let bench = bench();
    let has_state = |dir: &str| {
        fs::read_dir(bench.path(dir)).is_ok_and(|mut dir| {
            dir.any(|entry| entry.is_ok_and(|entry| entry.file_name().to_string_lossy().starts_with("step-")))
        })
    };
    let line = format!("{ENDLESS} --ranks 2 --checkpoint c --checkpoint-every 3 --quiet");
    let run = bench.endless(bench.command(&line));
    let run = bench.until(run, "it has a checkpoint", || has_state("c"));
    fs::rename(bench.path("c"), bench.path("aside")).unwrap();
    let run = bench.until(run, "it has another", || has_state("c"));
    bench
        .run(&format!("{TRAIN} --steps 2 --checkpoint c --resume"))
        .refusal(2, &["another run writes there"]);
    signal(run.id(), Signal::TERM);
    let told = bench.finish(run);
    assert!(
        [Some(143), Some(1)].contains(&told.code)
            && told.stderr.contains("--resume goes on from c after step "),
        "{told:?}"
    );
    bench.run("checkpoint c --verify").success();
    bench.nothing_left();
}
