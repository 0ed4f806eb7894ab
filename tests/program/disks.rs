//! Disks: full ones, such as fill up, and what lies there. Nothing is left half-written, and what can be kept is.

use crate::bench;
use harness::{Bench, Outcome, is_root, json_lines, skip};
use std::fs;
use std::process::Command;

pub const CARAVAN: &str = env!("CARGO_BIN_EXE_caravan");

/// Runs shell commands with a disk of this size at `disk`.
pub fn with_disk(bench: &Bench, size: &str, run: &str) -> Option<Outcome> {
    with_mount(bench, &format!("-t tmpfs -o size={size} none"), run)
}

/// Runs shell commands with what is so mounted at `disk`, in a mount name space that goes with the process. None, and a skip,
/// where that cannot be.
fn with_mount(bench: &Bench, what: &str, run: &str) -> Option<Outcome> {
    if !is_root() {
        skip("mounting a small disk needs root");
        return None;
    }
    fs::create_dir_all(bench.path("disk")).unwrap();
    let run = format!("mount {what} disk || exit 77; {run}");
    let mut command = Command::new("unshare");
    command.args(["--mount", "bash", "-c", &run]);
    bench.prepare(&mut command);
    let outcome = match command.spawn() {
        Ok(child) => bench.finish(child),
        Err(e) => {
            skip(&format!("unshare cannot be started: {e}"));
            return None;
        }
    };
    if outcome.code == Some(77) || outcome.stderr.starts_with("unshare:") {
        skip(&format!("this machine lets root mount nothing: {}", outcome.stderr.trim()));
        return None;
    }
    Some(outcome)
}

#[test]
fn a_disk_that_is_full_when_saving_leaves_nothing() {
    for flags in ["--ranks 2", "--ranks 2 --transport threads", "--ranks 1"] {
        let bench = bench();
        bench.text("text.txt", 8000);
        // There is room for the 250496 bytes of weights, and not for all that goes with them.
        let run = format!(
            "{CARAVAN} train --model nano --data text.txt --steps 2 --micro-batch 1 --sample 0 --quiet {flags} \
             --metrics m.jsonl --save disk/out; code=$?; ls -A disk; exit $code"
        );
        let Some(outcome) = with_disk(&bench, "248k", &run) else { return };
        let outcome = outcome.refusal(1, &["--save", "disk/out", "No space left"]);
        assert_eq!(outcome.stdout, "", "nothing of the model stays");
        let lines = harness::json_lines(&bench.path("m.jsonl"));
        assert_eq!(lines[2]["step"], 2);
        // What the run has shown is not lost with its model.
        let summary = &lines[lines.len() - 1]["summary"];
        assert!(summary["loss"].is_f64() && summary["saved"].is_null(), "{summary}");
        bench.nothing_left();
    }
}

#[test]
fn a_disk_that_is_full_when_a_result_is_written_keeps_what_was_there() {
    let bench_all = "bench all_reduce -b 64 -e 1M -f 2 -n 20 -w 1 --transport threads";
    // Of the kind that is written, as far as its beginning goes.
    let (bin, json, csv, svg) = (
        r"\210\330\064\001",
        "\"generator\": \"caravan 0\"",
        "operation,transport,ranks,placement,size_bytes,count,type,redop,root,time_us,algbw_gb_per_s,busbw_gb_per_s,wrong,\
         min_us,p50_us,p95_us,p99_us,max_us,algorithm,why,messages",
        "<svg><!-- generator: caravan 0.9.0 -->",
    );
    let page = "<!DOCTYPE html><!-- generator: caravan 0.9.0 -->";
    for (line, file, old) in [
        ("tokenize --data text.txt --out disk/t.bin", "t.bin", bin),
        (&format!("{bench_all} --json disk/r.json"), "r.json", json),
        (&format!("{bench_all} --csv disk/r.csv"), "r.csv", csv),
        (&format!("{bench_all} --plot disk/r.svg"), "r.svg", svg),
        ("report m.jsonl -o disk/r.html", "r.html", page),
    ] {
        let bench = bench();
        bench.text("text.txt", 8000);
        bench.file("m.jsonl", "{\"run\":{}}\n{\"step\":1,\"loss\":2.0}\n");
        // What was there has a page and so has what is new, which takes two at least.
        let run = format!(
            "printf '{old}' >disk/{file}; {CARAVAN} {line} >said; code=$?; cat disk/{file}; ls -A disk; exit $code"
        );
        let Some(outcome) = with_disk(&bench, "8k", &run) else { return };
        let outcome = outcome.refusal(1, &[&format!("disk/{file}"), "No space left"]);
        let kept = outcome.stdout.strip_suffix(&format!("{file}\n")).expect("the file and nothing else");
        // Or the first rows, whole, which still had room.
        let rows = file == "r.csv" && kept.starts_with("operation,") && kept.ends_with('\n');
        let old = if old == bin { "\u{fffd}\u{fffd}4\u{1}" } else { old };
        assert!(kept == old || rows, "{kept}");
        bench.nothing_left();
    }
}

#[test]
fn a_disk_that_is_full_before_a_token_is_written_is_no_wrong_argument() {
    let bench = bench();
    bench.text("text.txt", 8000);
    let run = format!(
        "head -c 4096 /dev/zero >disk/full; {CARAVAN} tokenize --data text.txt --out disk/t.bin; code=$?; ls -A disk; exit $code"
    );
    let Some(outcome) = with_disk(&bench, "4k", &run) else { return };
    let outcome = outcome.refusal(1, &["cannot write tokens to disk/t.bin", "No space left"]);
    assert_eq!(outcome.stdout, "full\n");
    bench.nothing_left();
}

#[test]
fn a_tuning_table_that_cannot_be_written_is_not_there() {
    let bench = bench();
    let run = format!(
        "head -c 4096 /dev/zero >disk/full; {CARAVAN} bench tune -b 1K -e 1K -n 1 -w 0 --transport threads \
         -o disk/table >said; code=$?; ls -A disk; exit $code"
    );
    let Some(outcome) = with_disk(&bench, "4k", &run) else { return };
    let outcome = outcome.refusal(1, &["disk/table", "No space left"]);
    // An empty one would be no table to whoever is given it.
    assert_eq!(outcome.stdout, "full\n");
    bench.nothing_left();
}

#[test]
fn what_is_mounted_is_not_replaced() {
    for (line, words) in [
        (
            "train --model nano --data text.txt --steps 1 --micro-batch 1 --save disk",
            ["disk: ", "is mounted there"],
        ),
        ("tokenize --data text.txt --out disk/b", ["--out disk/b: ", "is mounted there"]),
        ("bench barrier -n 1 --json disk/b", ["--json disk/b: ", "is mounted there"]),
    ] {
        let bench = bench();
        bench.text("text.txt", 8000);
        let run = format!("cd disk && touch a b && mount --bind a b && cd .. && exec {CARAVAN} {line}");
        let Some(outcome) = with_disk(&bench, "1m", &run) else { return };
        outcome.refusal(2, &words);
        bench.nothing_left();
    }
}

/// Metrics are worth less than the model that they are about.
#[test]
fn a_disk_that_fills_up_with_metrics_keeps_whole_lines_and_costs_no_model() {
    for transport in ["shm", "threads"] {
        let bench = bench();
        bench.text("text.txt", 8000);
        let run = format!(
            "{CARAVAN} train --model nano --data text.txt --steps 100 --micro-batch 1 --sample 0 --quiet \
             --transport {transport} --metrics disk/m.jsonl --save out; code=$?; cp disk/m.jsonl .; ls -A disk; exit $code"
        );
        let Some(outcome) = with_disk(&bench, "8k", &run) else { return };
        let words = ["cannot write metrics to disk/m.jsonl", "No space left", "the run went on without them"];
        let outcome = outcome.refusal(1, &words);
        assert_eq!(outcome.stdout, "m.jsonl\n");
        // Told when it happens, too, and no rank's failure.
        let (first, last) = outcome.stderr.trim_end().split_once('\n').expect("two lines");
        assert!(
            first.starts_with("cannot write metrics") && first.ends_with("goes on without them"),
            "{first}"
        );
        assert!(!last.contains('\n') && !last.contains("rank 0 failed"), "{last}");
        // The run and some steps fit, and no summary.
        let lines = harness::json_lines(&bench.path("m.jsonl"));
        assert_eq!(lines[lines.len() - 1]["step"], lines.len() - 1);
        assert!(lines.len() < 100);
        bench.run("eval --model out --data text.txt").success();
        bench.nothing_left();
    }
}

/// Whoever sees how a run has failed should know that its metrics are not all there.
#[test]
fn metrics_that_are_missing_are_told_with_whatever_ends_the_run() {
    let bench = bench();
    bench.text("text.txt", 8000);
    let run = format!(
        "exec {CARAVAN} train --model nano --data text.txt --steps 1000 --warmup 1000 --lr 1e3 --clip 0 \
         --micro-batch 1 --quiet --metrics disk/m.jsonl"
    );
    let Some(outcome) = with_disk(&bench, "8k", &run) else { return };
    outcome.refusal(1, &["gradient norm is NaN", "cannot write metrics to disk/m.jsonl", "went on without"]);
}

#[test]
fn a_file_that_may_not_grow_leaves_nothing() {
    let bench = bench();
    bench.text("text.txt", 8000);
    // Of 250 KB of weights, 17 KB of tokens and several KB of JSON. Shared memory is a file too.
    let train = "train --model nano --data text.txt --steps 1 --micro-batch 1 --sample 0 --quiet --save out";
    let measure = "bench all_reduce -b 64 -e 4K -f 2 -n 20 --transport threads --json r.json --quiet";
    for (kibibytes, args, words) in [
        (64, &*format!("{train} --transport threads"), ["--save", "out", "File too large"]),
        (64, &*format!("{train} --transport shm"), ["shared memory", "memfd", "File too large"]),
        (8, "tokenize --data text.txt --out t.bin", ["write", "t.bin", "File too large"]),
        (1, measure, ["writing", "r.json", "File too large"]),
    ] {
        let mut command = Command::new("bash");
        command.args(["-c", &format!("ulimit -c 0 -f {kibibytes}; exec {CARAVAN} {args}")]);
        bench.prepare(&mut command);
        bench.outcome(&mut command).refusal(1, &words);
        assert_eq!(bench.names(), ["text.txt"]);
        bench.nothing_left();
    }
}

/// Whoever makes room and trains again should know what would come of it.
#[test]
fn a_model_that_cannot_be_saved_and_is_ruined_is_told_as_both() {
    let bench = bench();
    bench.text("text.txt", 8000);
    let train =
        "train --model nano --data text.txt --steps 1 --micro-batch 1 --lr 1e38 --clip 0 --sample 0 --quiet";
    for ranks in ["--ranks 2", "--ranks 1"] {
        let mut command = Command::new("bash");
        let run = format!("exec {CARAVAN} {train} --transport threads {ranks} --save out");
        command.args(["-c", &format!("ulimit -c 0 -f 64; {run}")]);
        bench.prepare(&mut command);
        let words = ["--save", "File too large", "; the loss of nano after step 1 is NaN", "--lr"];
        bench.outcome(&mut command).refusal(1, &words);
        bench.nothing_left();
    }
}

#[test]
fn a_disk_without_room_is_found_before_training() {
    let bench = bench();
    bench.text("text.txt", 8000);
    let run = format!("exec {CARAVAN} train --model nano --data text.txt --save disk/out");
    if let Some(outcome) = with_disk(&bench, "128k", &run) {
        outcome.refusal(2, &["250496 bytes", "131072 free"]);
    }
}

#[test]
fn metrics_that_cannot_be_written_end_the_run() {
    let bench = bench();
    bench.text("text.txt", 8000);
    let flags = "train --model nano --data text.txt --micro-batch 1 --metrics /dev/full --quiet";
    bench.run(flags).refusal(1, &["/dev/full", "No space left"]);
    bench.run(&format!("{flags} --transport threads")).refusal(1, &["/dev/full", "No space left"]);
    bench.nothing_left();
}

#[test]
fn standard_output_that_goes_to_a_file_keeps_what_is_there() {
    let bench = bench();
    bench.text("text.txt", 8000);
    let to_log = |flags: &str| {
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("exec {CARAVAN} {flags} --quiet >> log")]);
        bench.prepare(&mut shell);
        bench.outcome(&mut shell).success();
        fs::read_to_string(bench.path("log")).unwrap()
    };
    bench.file("log", "{\"before\": 1}\n");
    let train = "train --model nano --data text.txt --steps 2 --micro-batch 1 --sample 0";
    let trained = to_log(&format!("{train} --metrics /dev/stdout"));
    let keys: Vec<String> = json_lines(&bench.path("log"))
        .iter()
        .map(|line| line.as_object().unwrap().keys().next().unwrap().clone())
        .collect();
    assert_eq!(
        (&keys[0], &keys[1], keys.last().unwrap()),
        (&"before".into(), &"run".into(), &"summary".into())
    );
    let measured = to_log("bench all_reduce -b 1K -e 1K -n 1 --json /dev/fd/1");
    assert!(
        measured.starts_with(&trained)
            && measured.trim_end().ends_with('}')
            && measured.len() > trained.len()
    );
}

/// A container's file system lets no directory be moved that is part of its image. An empty one gives way.
#[test]
fn a_model_of_an_image_is_refused_before_training_and_an_empty_directory_is_filled() {
    let bench = bench();
    bench.text("text.txt", 8000);
    let train = "train --model nano --data text.txt --steps 2 --micro-batch 1 --sample 0 --val-fraction 0 --quiet --ranks 1";
    bench.run(&format!("{train} --save image/model")).success();
    for dir in ["image/empty", "changes", "work"] {
        fs::create_dir_all(bench.path(dir)).unwrap();
    }
    let overlay = "-t overlay -o lowerdir=image,upperdir=changes,workdir=work,redirect_dir=off overlay";
    let save = |to: &str| {
        with_mount(
            &bench,
            overlay,
            &format!("{CARAVAN} {train} --save disk/{to}; c=$?; ls disk/{to}; exit $c"),
        )
    };
    let Some(filled) = save("empty") else { return };
    let model = "config.json\nmodel.safetensors\ntokenizer.json\ntokenizer_config.json\n";
    assert_eq!(filled.success().stdout, model);
    let refused =
        save("model").expect("it was mounted before").refusal(2, &["disk/model", "part of the image"]);
    assert_eq!(refused.stdout, model);
    let changed = fs::read_dir(bench.path("changes")).unwrap().count();
    assert_eq!(changed, 1, "nothing lies beside what was empty");
    save("new").expect("it was mounted before").success();
    bench.nothing_left();
}
