//! Trainings that go on from a checkpoint: with the same bits as if nothing had ended, by other ranks and stages too.

use crate::disks::{CARAVAN, with_disk};
use crate::{bench, devices, odd_shape};
use harness::{Bench, json_lines, signal};
use rustix::process::Signal;
use serde_json::Value;
use std::fs;

const TRAIN: &str = "train --model nano --data text.txt --seq 16 --micro-batch 1 --warmup 1 --schedule constant --sample 0 --quiet \
                     --reproducible --metrics m.jsonl";

/// Every step's loss and norm in the metrics from the last line of a run on, and its steps.
fn steps(bench: &Bench) -> Vec<(u64, String)> {
    let lines = json_lines(&bench.path("m.jsonl"));
    let last = lines.iter().rposition(|line| line["run"].is_object()).expect("a run");
    let steps = lines[last..].iter().filter(|line| line["step"].is_u64());
    steps.map(|l| (l["step"].as_u64().unwrap(), format!("{} {}", l["loss"], l["grad_norm"]))).collect()
}

fn saved(bench: &Bench) -> Vec<u8> {
    fs::read(bench.path("saved/model.safetensors")).unwrap()
}

/// What lies in the directory of checkpoints.
fn kept(bench: &Bench) -> Vec<String> {
    let entries = fs::read_dir(bench.path("ckpt")).map_or(Vec::new(), |dir| dir.flatten().collect());
    let mut names: Vec<String> =
        entries.iter().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn a_training_goes_on_with_the_same_bits_on_other_ranks_and_stages() {
    let bench = bench();
    bench.text("text.txt", 3000);
    for dtype in ["bf16", "f32"] {
        let train = |flags: &str| bench.run(&format!("{TRAIN} --dtype {dtype} {flags}")).success().stderr;
        let fresh = || {
            let _ = fs::remove_dir_all(bench.path("ckpt"));
            let _ = fs::remove_file(bench.path("m.jsonl"));
        };
        train("--steps 9 --ranks 2 --accumulate 2 --save saved");
        let (whole, weights) = (steps(&bench), saved(&bench));
        assert_eq!(whole.len(), 9);
        fresh();

        let ckpt = "--checkpoint ckpt --resume";
        train(&format!("--steps 9 --ranks 2 --accumulate 2 {ckpt} --checkpoint-every 4 --save saved"));
        assert_eq!((kept(&bench), steps(&bench)), (vec!["step-9".to_owned()], whole.clone()));
        let lines = json_lines(&bench.path("m.jsonl"));
        let made: Vec<&Value> =
            lines.iter().map(|line| &line["checkpoint"]["step"]).filter(|s| s.is_u64()).collect();
        assert_eq!(made, [4, 8, 9]);

        for (flags, before) in [
            ("--ranks 4 --accumulate 1 --stage 3", 4),
            ("--ranks 1 --accumulate 4 --stage 0 --transport threads", 8),
            ("--ranks 2 --accumulate 2 --stage 1 --bucket-size 20K", 1),
        ] {
            fresh();
            let first = format!("--ranks 2 --accumulate 2 --stage 2 {ckpt} --steps {before}");
            train(&first);
            assert_eq!(kept(&bench), [format!("step-{before}")]);
            train(&format!("--steps 9 {flags} {ckpt} --save saved"));
            assert_eq!(steps(&bench), whole[before..], "{dtype} {flags}");
            assert!(saved(&bench) == weights, "weights of {dtype} {flags}");
            assert_eq!(kept(&bench), ["step-9"]);
            // Its metrics stand behind those of the run before.
            let lines = json_lines(&bench.path("m.jsonl"));
            let runs: Vec<&Value> = lines.iter().filter(|line| line["run"].is_object()).collect();
            let after: Vec<&Value> = runs.iter().map(|line| &line["run"]["resumed_after"]).collect();
            assert_eq!(after, [&Value::Null, &Value::from(before)]);
            let summary = &lines[lines.len() - 1]["summary"];
            assert_eq!(summary["steps"], 9 - before);
            // What a rank holds is what was planned, with what it has written and read.
            assert_eq!(summary["ranks"][0]["memory"], summary["predicted_memory"], "{flags}");
        }
        // The weights that are kept are a model, too, in f32.
        let eval = |model: &str| {
            let outcome = bench.run(&format!("eval --model {model} --data text.txt --json")).success();
            outcome.json()["loss"].as_f64().unwrap()
        };
        assert!(dtype == "bf16" || eval("ckpt/step-9/weights") == eval("saved"));
        fresh();
    }
    bench.nothing_left();
}

/// Its ranks ask each other how far they are while more buckets are under way than an engine has memory for beforehand.
#[test]
fn checkpoints_of_many_buckets_take_what_was_planned() {
    let bench = bench();
    for flags in ["--stage 1", "--stage 3", "--stage 2 --checkpoint-async", "--stage 0 --accumulate 3"] {
        let train = "train --model baby --data random --seq 16 --micro-batch 1 --steps 3 --bucket-size 4K --ranks 2 \
                     --sample 0 --val-fraction 0 --quiet --metrics run.jsonl --checkpoint ckpt --checkpoint-every 1";
        bench.run(&format!("{train} {flags}")).success();
        let lines = json_lines(&bench.path("run.jsonl"));
        let summary = &lines.last().unwrap()["summary"];
        for rank in 0..2 {
            assert_eq!(summary["ranks"][rank]["memory"], summary["predicted_memory"], "{flags}");
        }
        fs::remove_dir_all(bench.path("ckpt")).unwrap();
    }
    bench.nothing_left();
}

#[test]
fn a_training_that_is_asked_to_end_keeps_its_state_and_goes_on() {
    let bench = bench();
    bench.text("text.txt", 3000);
    let flags = "--ranks 2 --accumulate 2 --checkpoint ckpt --resume";
    let run =
        bench.command(&format!("{TRAIN} {flags} --steps 1000000 --checkpoint-every 0")).spawn().unwrap();
    let run = bench.until(run, "some steps are made", || {
        fs::read_to_string(bench.path("m.jsonl")).is_ok_and(|text| text.lines().count() > 5)
    });
    signal(run.id(), Signal::TERM);
    let outcome = bench.finish(run);
    let step: usize =
        kept(&bench).pop().and_then(|name| name.strip_prefix("step-")?.parse().ok()).expect("a checkpoint");
    outcome.refusal(
        143,
        &["interrupted by signal 15", &format!("--resume goes on from ckpt after step {step}")],
    );
    let last = step + 3;
    bench.run(&format!("{TRAIN} {flags} --steps {last}")).success();
    let went_on = steps(&bench);
    fs::remove_file(bench.path("m.jsonl")).unwrap();
    bench.run(&format!("{TRAIN} --ranks 2 --accumulate 2 --steps {last}")).success();
    assert_eq!(went_on, steps(&bench)[step..]);
    bench.nothing_left();
}

/// The metrics lack no line of a run that never ended.
#[test]
fn an_evaluation_that_was_cut_short_is_made_when_the_training_goes_on() {
    let bench = bench();
    bench.text("text.txt", 3000);
    bench.text("long.txt", 4_000_000);
    bench.text("short.txt", 500);
    let train = |flags: &str| format!("{TRAIN} --ranks 2 --eval-every 3 {flags}");
    let evaluations = || -> Vec<Value> {
        let lines = json_lines(&bench.path("m.jsonl"));
        lines.iter().filter_map(|line| line.get("evaluation")).cloned().collect()
    };
    let long = "--steps 9 --val-data long.txt --eval-tokens 3000000 --checkpoint ckpt";
    let run = bench.command(&train(long)).spawn().unwrap();
    let lines = || fs::read_to_string(bench.path("m.jsonl")).map_or(0, |text| text.lines().count());
    let run = bench.until(run, "it evaluates", || lines() == 4);
    signal(run.id(), Signal::TERM);
    bench.finish(run).refusal(143, &["--resume goes on from ckpt after step 3"]);
    assert_eq!(evaluations(), [Value::Null; 0]);
    // One that ends sooner, so that this test does.
    bench.run(&train("--steps 5 --val-data short.txt --checkpoint ckpt --resume")).success();
    let made = evaluations();
    bench.run(&train("--steps 5 --val-data short.txt")).success();
    assert_eq!(made, evaluations());
    assert_eq!(made.iter().map(|line| &line["step"]).collect::<Vec<_>>(), [3, 5]);
    bench.nothing_left();
}

/// As a job of a chain does whose predecessor has come to the end.
#[test]
fn a_training_that_is_over_ends_once_more_with_all_that_an_end_has() {
    let bench = bench();
    bench.text("text.txt", 3000);
    let train = |flags: &str| {
        let line = TRAIN.replace("--quiet", "");
        bench.run(&format!("{line} --steps 3 --ranks 2 --checkpoint ckpt --resume {flags}")).success().stdout
    };
    train("--save saved");
    let (weights, first) = (saved(&bench), json_lines(&bench.path("m.jsonl")));
    fs::remove_dir_all(bench.path("saved")).unwrap();
    let said = train("--save saved");
    assert!(said.contains("all 3 steps were made before, validation loss "), "{said}");
    assert!(said.contains("saved to saved") && saved(&bench) == weights, "{said}");
    assert_eq!(kept(&bench), ["step-3"]);
    let lines = json_lines(&bench.path("m.jsonl"));
    let end = |lines: &[Value]| lines[lines.len() - 1]["summary"].clone();
    let (one, other) = (end(&first), end(&lines));
    assert_eq!(one["validation_loss"], other["validation_loss"]);
    assert_eq!((&other["steps"], &other["loss"]), (&Value::from(0), &Value::Null));
    assert_eq!(steps(&bench), []);
    bench.nothing_left();
}

/// Also one that has gone down, with a schedule that does not count what was skipped.
#[test]
fn a_scaled_training_goes_on_at_its_scale() {
    let bench = bench();
    bench.text("text.txt", 3000);
    let train = |steps: usize, flags: &str| {
        let line = TRAIN.replace("--schedule constant", "--schedule linear --schedule-steps 12");
        let scale = "--dtype f16 --loss-scale initial=16777216,window=3,hysteresis=1";
        let line = format!("{} {scale} --steps {steps} --ranks 2 {flags}", line.replace("--quiet", ""));
        let said = bench.run(&line).success();
        let lines = json_lines(&bench.path("m.jsonl"));
        let last = lines.iter().rposition(|line| line["run"].is_object()).expect("a run");
        let of_step = |line: &Value| {
            ["step", "loss", "grad_norm", "lr", "loss_scale", "skipped"].map(|name| line[name].to_string())
        };
        let made: Vec<_> = lines[last..].iter().filter(|line| line["step"].is_u64()).map(of_step).collect();
        (made, lines[lines.len() - 1]["summary"]["skipped"].as_u64().unwrap(), said)
    };
    let (whole, skipped, said) = train(12, "--save saved");
    let weights = saved(&bench);
    let skips: Vec<usize> = (0..12).filter(|&step| whole[step][5] == "true").collect();
    assert!(skips[0] < 7 && *skips.last().unwrap() > 7 && skips.len() as u64 == skipped, "{whole:?}");
    assert!(said.stdout.contains(&format!("12 steps ({skipped} of them skipped)")), "{}", said.stdout);
    let first = skips[0];
    let words = format!("step {}  skipped: its gradient is too large for f16 at a loss scale of", first + 1);
    assert!(said.stderr.contains(&words), "{}", said.stderr);
    // The schedule waits for it.
    assert!(whole[first][3] == whole[first + 1][3] && whole[first][2] == "null", "{whole:?}");
    for before in [first + 1, 7] {
        train(before, "--checkpoint ckpt");
        let (made, ..) = train(12, "--checkpoint ckpt --resume --stage 1 --save saved");
        assert_eq!(made, whole[before..], "after {before}");
        assert!(saved(&bench) == weights, "weights after {before}");
        fs::remove_dir_all(bench.path("ckpt")).unwrap();
    }
    // By other rules it begins anew.
    train(7, "--checkpoint ckpt");
    let line = TRAIN.replace("--quiet", "");
    let flags = "--dtype f16 --loss-scale 64 --steps 8 --ranks 2 --checkpoint ckpt --resume";
    let said = bench.run(&format!("{line} {flags}")).success().stderr;
    assert!(said.contains("--loss-scale 64 instead of initial=16777216,window=3"), "{said}");
    let lines = json_lines(&bench.path("m.jsonl"));
    assert_eq!(lines.iter().rfind(|line| line["step"].is_u64()).unwrap()["loss_scale"], 64.0);
    bench.nothing_left();
}

#[test]
fn what_cannot_be_gone_on_with_is_told() {
    let bench = bench();
    bench.text("text.txt", 3000);
    bench.file("other/notes.txt", "precious");
    bench.run(&format!("{TRAIN} --steps 3 --checkpoint ckpt")).success();
    for (flags, words) in [
        ("--checkpoint ckpt", &["--checkpoint ckpt has the state after step 3", "add --resume"][..]),
        ("--checkpoint ckpt --resume --steps 2", &["after step 3", "--steps are 2: take 3", "or more"]),
        ("--checkpoint ckpt --resume --model baby", &["--model baby has another shape", "ckpt/step-3"]),
        ("--resume", &["--resume is of --checkpoint DIR"]),
        ("--checkpoint-every 5", &["--checkpoint-every 5 is of --checkpoint DIR"]),
        ("--checkpoint-keep 5", &["--checkpoint-keep 5 is of --checkpoint DIR"]),
        ("--checkpoint new --checkpoint-keep 0", &["--checkpoint-keep is 0", "1"]),
        ("--checkpoint other", &["--checkpoint other", "has notes.txt, which is no checkpoint"]),
        (
            "--checkpoint ckpt/step-3 --resume",
            &["ckpt/step-3: is a state itself, of --checkpoint ckpt: name"],
        ),
        ("--checkpoint text.txt", &["--checkpoint text.txt", "Not a directory"]),
        ("--checkpoint new --save new/m", &["--save new/m", "--checkpoint new lie in each other"]),
        ("--checkpoint ckpt --resume --save ckpt/step-3", &["--save ckpt/step-3", "lie in each other"]),
        ("--checkpoint new --metrics new/m.jsonl", &["--metrics new/m.jsonl", "lie in each other"]),
    ] {
        let train = TRAIN
            .replace("--metrics m.jsonl", if flags.contains("--metrics") { "" } else { "--metrics m.jsonl" });
        let train =
            train.replace("--model nano", if flags.contains("--model") { "" } else { "--model nano" });
        let steps = if flags.contains("--steps") { "" } else { "--steps 9" };
        bench.run(&format!("{train} {steps} {flags}")).refusal(2, words);
    }
    for named in ["ckpt", "ckpt/step-3"] {
        let words = ["has no config.json", "in its weights: --model ckpt/step-3/weights"];
        bench.run(&format!("train --steps 1 --model {named} --data text.txt")).refusal(2, &words);
    }
    assert_eq!(kept(&bench), ["step-3"]);
    // What is learnt otherwise from here on is said.
    let said = bench
        .run(&format!("{} --steps 5 --lr 1e-4 --checkpoint ckpt --resume", TRAIN.replace("--quiet", "")));
    let said = said.success().stderr;
    assert!(said.contains("goes on with --steps 5 instead of 3, --lr 0.0001 instead of 0.001"), "{said}");
    assert!(said.contains("after step 3"), "{said}");
    // Of the same text that more of it is held out, and of another that it is another.
    let on = |flags: &str| {
        let train = TRAIN.replace("--quiet", "");
        bench.run(&format!("{train} --steps 5 --checkpoint ckpt --resume {flags}")).success().stderr
    };
    let said = on("--lr 1e-4 --val-fraction 0.2");
    assert!(said.contains("goes on with 600 tokens held out instead of 300"), "{said}");
    bench.text("text.txt", 3001);
    assert!(on("").contains("another --data"));
    bench.text("text.txt", 3000);
    // One that is broken is no reason to begin anew.
    fs::remove_file(bench.path("ckpt/step-5/second_moments/model.safetensors")).unwrap();
    let train = format!("{TRAIN} --steps 9 --checkpoint ckpt --resume");
    bench.run(&train).refusal(2, &["ckpt/step-5/second_moments"]);
    bench.nothing_left();
}

#[test]
fn trainings_on_gpus_go_on_too_and_hold_what_was_planned() {
    let bench = bench();
    if !devices::can_emulate() {
        return;
    }
    bench.text("text.txt", 3000);
    for (flags, beside) in [
        ("--stage 3", ""),
        ("--stage 3 --transport threads", "--checkpoint-async --checkpoint-every 1"),
        ("--stage 1 --offload optimizer", "--checkpoint-async --checkpoint-every 1"),
    ] {
        let train = |more: &str| {
            let line = format!("{TRAIN} --ranks 2 --device cuda {flags} {more}");
            devices::run(&bench, "2,256M", &line).success();
            steps(&bench)
        };
        let whole = train("--steps 3");
        train(&format!("--steps 2 --checkpoint ckpt {beside}"));
        assert_eq!(train(&format!("--steps 3 --checkpoint ckpt --resume {beside}")), whole[2..], "{flags}");
        let lines = json_lines(&bench.path("m.jsonl"));
        for rank in lines[lines.len() - 1]["summary"]["ranks"].as_array().unwrap() {
            assert_eq!(rank["memory"]["total"], rank["predicted_bytes"], "{flags}: {rank}");
        }
        fs::remove_dir_all(bench.path("ckpt")).unwrap();
    }
    bench.nothing_left();
}

/// Nothing goes on from weights that are not finite, so what was before is kept.
#[test]
fn a_state_that_is_not_finite_takes_the_place_of_none() {
    let bench = bench();
    bench.text("text.txt", 3000);
    bench.run(&format!("{TRAIN} --steps 2 --checkpoint ckpt")).success();
    let train =
        format!("{TRAIN} --steps 3 --lr 1e38 --clip 0 --checkpoint ckpt --resume --checkpoint-every 1");
    let said = bench.run(&train);
    assert_eq!(said.code, Some(1), "{said:?}");
    assert_eq!(kept(&bench), ["step-2"], "{said:?}");
    bench.nothing_left();
}

/// What its heads do not divide is for nobody but this program.
#[test]
fn a_shape_that_transformers_would_refuse_goes_on_too() {
    let bench = bench();
    bench.text("text.txt", 3000);
    odd_shape(&bench);
    let train = |flags: &str| {
        let line = TRAIN.replace("--model nano", "--model odd.json");
        bench.run(&format!("{line} --ranks 2 {flags}")).success();
        steps(&bench)
    };
    let whole = train("--steps 5");
    train("--steps 3 --checkpoint ckpt");
    assert_eq!(train("--steps 5 --checkpoint ckpt --resume"), whole[3..]);
    assert_eq!(kept(&bench), ["step-5"]);
    // Its training is done: what is left to say is who takes it.
    let refused = bench.run("checkpoint ckpt --save m");
    let eval = "eval --model ckpt/step-5/weights";
    let refused = refused.refusal(2, &["5 heads", &format!("'caravan {eval}' takes this one as it is")]);
    assert!(!refused.stderr.contains("trained"), "{}", refused.stderr);
    bench.run(&format!("{eval} --data text.txt --seq 16")).success();
    bench.nothing_left();
}

/// A second run would take away what the first one writes.
#[test]
fn a_directory_is_one_run_s_at_a_time() {
    let bench = bench();
    bench.text("text.txt", 3000);
    let flags = "--checkpoint ckpt --checkpoint-every 5";
    let run = bench.command(&format!("{TRAIN} {flags} --steps 1000000")).spawn().unwrap();
    // What it tries the disk with at its start, before it can keep anything, is none.
    let whole = |name: &String| name.starts_with("step-");
    let run = bench.until(run, "it has a checkpoint", || kept(&bench).iter().any(whole));
    let other = TRAIN.replace("m.jsonl", "other.jsonl");
    let other = format!("{other} {flags} --resume --steps 1000000");
    bench.run(&other).refusal(2, &["--checkpoint ckpt", "another run writes there"]);
    signal(run.id(), Signal::TERM);
    bench.finish(run).refusal(143, &["--resume goes on from ckpt"]);
    assert_eq!(kept(&bench).len(), 1);
    bench.nothing_left();
}

/// A second run would write its own over what the first one has written.
#[test]
fn a_file_of_metrics_is_one_run_s_at_a_time() {
    let bench = bench();
    bench.text("text.txt", 3000);
    bench.run(&format!("{TRAIN} --steps 2 --checkpoint ckpt")).success();
    fs::remove_file(bench.path("m.jsonl")).unwrap();
    let run = bench.command(&format!("{TRAIN} --ranks 2 --steps 1000000 --save out")).spawn().unwrap();
    let whole = || fs::read_to_string(bench.path("m.jsonl")).unwrap_or_default();
    let run = bench.until(run, "some steps are made", || whole().lines().count() > 5);
    let before = whole();
    // Whether the other begins the file anew or goes on with it.
    for flags in ["--steps 2 --ranks 2", "--steps 3 --checkpoint ckpt --resume"] {
        bench
            .run(&format!("{TRAIN} {flags}"))
            .refusal(2, &["--metrics m.jsonl", "another run writes there: wait for its end"]);
    }
    signal(run.id(), Signal::TERM);
    bench.finish(run).refusal(143, &["interrupted by signal 15"]);
    assert!(whole().starts_with(&before));
    let lines = json_lines(&bench.path("m.jsonl"));
    let made: Vec<_> = lines.iter().filter_map(|line| line["step"].as_u64()).collect();
    assert_eq!(made, (1..=made.len() as u64).collect::<Vec<_>>());
    assert!(lines[lines.len() - 1]["summary"].is_object());
    // What has come to its end is in nobody's way.
    bench.run(&format!("{TRAIN} --steps 2")).success();
    assert_eq!(steps(&bench).len(), 2);
    bench.nothing_left();
}

/// As one that was killed between the name of the last and the end of those before it.
#[test]
fn a_run_with_nothing_left_to_do_takes_away_states_that_are_not_to_stay() {
    let bench = bench();
    bench.text("text.txt", 3000);
    let train = format!("{TRAIN} --ranks 2 --checkpoint ckpt --checkpoint-every 2 --steps 6");
    bench.run(&format!("{train} --checkpoint-keep 3")).success();
    assert_eq!(kept(&bench), ["step-2", "step-4", "step-6"]);
    bench.run(&format!("{train} --checkpoint-keep 2 --resume")).success();
    assert_eq!(kept(&bench), ["step-4", "step-6"]);
    bench.run(&format!("{train} --resume")).success();
    assert_eq!(kept(&bench), ["step-6"]);
    bench.nothing_left();
}

/// A disk that fills up costs the checkpoint, neither the one before nor the run.
#[test]
fn a_checkpoint_that_cannot_be_written_leaves_the_one_before() {
    let bench = bench();
    bench.text("text.txt", 3000);
    let train = format!("{CARAVAN} {TRAIN} --dtype f32 --ranks 2 --checkpoint disk/c --checkpoint-every 2");
    // Once there is one and not two, the room for the next is gone.
    let run = format!(
        "(until ls -d disk/c/step-* && mount -o remount,size=2200k disk; do :; done >/dev/null 2>&1) & \
         {train}0 --steps 400 --save out; code=$?; wait; ls -A disk/c; test -e out/config.json; echo model $?; exit $code"
    );
    let Some(outcome) = with_disk(&bench, "3200k", &run) else { return };
    let outcome = outcome.refusal(
        1,
        &["--checkpoint disk/c", "its disk has", "the run went on without a checkpoint of step "],
    );
    let left: Vec<&str> = outcome.stdout.lines().collect();
    let [.., state, model] = left[..] else { panic!("{left:?}") };
    assert!(state.starts_with("step-") && model == "model 0", "{left:?}");
    let tight = format!("{train} --steps 4");
    let small = with_disk(&bench, "1600k", &tight).expect("as before");
    small.refusal(2, &["--checkpoint disk/c", "takes 1.43 MiB", "two are there", "make room"]);
    let more = with_disk(&bench, "1600k", &format!("{tight} --checkpoint-keep 2")).expect("as before");
    more.refusal(2, &["takes 1.43 MiB, of which 2 are there in the end (--checkpoint-keep)"]);
    let many =
        with_disk(&bench, "1600k", &format!("{train} --steps 40 --checkpoint-keep 2")).expect("as before");
    many.refusal(2, &["of which 3 are there while one takes the place of the oldest (--checkpoint-keep 2)"]);
    // Of a training that is over no other is made.
    let full = "dd if=/dev/zero of=disk/other bs=1k count=1600 2>&-";
    let over = format!("{train} --steps 4; {full}; {train} --steps 4 --resume");
    let over = with_disk(&bench, "3200k", &over).expect("as before").success();
    assert_eq!(over.stderr, "");
    bench.nothing_left();
}

/// All ranks hear why, in as many words as it takes.
#[test]
fn a_checkpoint_that_is_refused_with_long_words_takes_no_memory() {
    let bench = bench();
    bench.text("text.txt", 3000);
    let dir = format!("disk/{}", vec!["x".repeat(120); 5].join("/"));
    let run = format!(
        "mkdir -p {dir}; (until ls -d {dir}/c/step-* && mount -o remount,size=2200k disk; do :; done >/dev/null 2>&1) & full=$!; \
         {CARAVAN} {TRAIN} --dtype f32 --ranks 2 --transport shm --checkpoint {dir}/c --checkpoint-every 20 --steps 400; \
         code=$?; kill $full 2>/dev/null; wait; exit $code"
    );
    let Some(outcome) = with_disk(&bench, "3200k", &run) else { return };
    outcome.refusal(1, &[&dir, "its disk has", "the run went on without a checkpoint of step "]);
    let lines = json_lines(&bench.path("m.jsonl"));
    let summary = &lines.last().unwrap()["summary"];
    for rank in 0..2 {
        assert_eq!(summary["ranks"][rank]["memory"], summary["predicted_memory"], "rank {rank}");
    }
    bench.nothing_left();
}
