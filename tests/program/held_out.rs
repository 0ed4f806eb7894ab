//! Files that are held out whole, and directories of which nobody says what is.

use crate::bench;
use harness::{Bench, json_lines};
use serde_json::{Value, json};
use std::fs;

const TRAIN: &str =
    "train --model nano --steps 4 --warmup 1 --micro-batch 2 --eval-every 2 --sample 0 --metrics m.jsonl";

/// The run, and what its evaluations came to.
fn evaluations(bench: &Bench, flags: &str) -> (Value, Vec<Value>) {
    bench.run(&format!("{TRAIN} {flags}")).success();
    let lines = json_lines(&bench.path("m.jsonl"));
    let all = lines.iter().filter_map(|line| line.get("evaluation")).cloned().collect();
    (lines[0]["run"].clone(), all)
}

#[test]
fn files_that_are_held_out_are_evaluated_whole_and_nothing_else_is() {
    let bench = bench();
    bench.text("a.txt", 20_000);
    let text = fs::read_to_string(bench.text("all.txt", 23_000)).unwrap();
    bench.file("b.txt", &text[20_000..]);
    for name in ["a", "b"] {
        bench.run(&format!("tokenize --data {name}.txt --out {name}.bin")).success();
    }
    let (run, all) = evaluations(&bench, "--data a.txt --val-data b.txt --save out");
    assert_eq!((&run["data"]["tokens"], &run["data"]["held_out"]), (&json!(20_000), &json!(0)));
    let held = &run["val_data"];
    assert_eq!((&held["tokens"], &held["paths"]), (&json!(3000), &json!(["b.txt"])), "{held}");
    assert_eq!(all.len(), 2);
    assert_eq!((&all[1]["step"], &all[1]["tokens"]), (&json!(4), &json!(2999)));
    let eval = bench.run("eval --model out --data b.txt --dtype bf16 --seq 64 --json").success().json();
    let [trained, after] = [&all[1]["loss"], &eval["loss"]].map(|loss| loss.as_f64().unwrap());
    assert!((trained - after).abs() < 1e-9, "{trained} {after}");

    // Whatever they are made of, and whoever reads them.
    for flags in [
        "--data a.bin --val-data b.bin --transport threads",
        "--data a.bin --val-data b.txt --stage 0",
        "--data a.txt --val-data b.bin --eval-tokens 1048576",
    ] {
        assert_eq!(evaluations(&bench, flags).1, all, "{flags}");
    }
    let (run, sequential) = evaluations(&bench, "--order sequential --data a.txt --val-data b.txt");
    assert!(run["data"]["held_out"] == 0 && sequential[1]["tokens"] == 2999, "{sequential:?}");
    assert_ne!(sequential[1]["loss"], all[1]["loss"]);
    bench.nothing_left();
}

#[test]
fn what_cannot_be_held_out_is_told_by_its_flag() {
    let bench = bench();
    bench.text("a.txt", 20_000);
    bench.text("b.txt", 3000);
    bench.text("short.txt", 64);
    bench.file("empty.txt", "");
    bench.file("noise", [0xff, 0xfe, 0, 1]);
    for (flags, words) in [
        ("--data a.txt --val-data no.txt", ["--val-data no.txt", "no such file"]),
        ("--data a.txt --val-data noise", ["--val-data noise", "--val-data takes UTF-8 text"]),
        ("--data a.txt --val-data a--data/no.txt", ["--val-data a--data/no.txt: ", "no such file"]),
        ("--data a.txt --val-data empty.txt", ["--val-data is empty: empty.txt", "no tokens"]),
        ("--data a.txt --val-data random", ["--val-data random: ", "./random"]),
        ("--data a.txt --val-data -", ["--val-data -", "/dev/stdin"]),
        ("--data a.txt --val-data b.txt b.txt", ["--val-data names b.txt twice", "once"]),
        ("--data a.txt --val-data short.txt", ["--val-data has 64 tokens", "a shorter --seq"]),
        ("--data a.txt b.txt --val-data ./b.txt", ["--val-data has ./b.txt", "trained on, too"]),
        ("--data random --val-data b.txt", ["--val-data beside --data random", "leave one"]),
        ("--data a.txt --val-data b.txt --val-fraction 0.1", ["--val-data", "--val-fraction"]),
        ("--data a.txt --val-data b.txt --save .", ["--save", "this run is in it"]),
    ] {
        bench.run(&format!("{TRAIN} {flags}")).refusal(2, &words);
    }
    // The model would take the place of what is evaluated.
    bench.file("held/b.txt", fs::read(bench.path("b.txt")).unwrap());
    bench
        .run(&format!("{TRAIN} --data a.txt --val-data held/b.txt --save held"))
        .refusal(2, &["--save", "held"]);
    assert!(!bench.path("m.jsonl").exists());
    bench.nothing_left();
}

/// As llm.c's scripts leave them.
#[test]
fn a_directory_with_files_for_training_and_for_validation_is_not_trained_on_as_one() {
    let bench = bench();
    bench.text("a.txt", 20_000);
    bench.text("b.txt", 3000);
    fs::create_dir(bench.path("d")).unwrap();
    for (text, name) in [("a", "tiny_shakespeare_train"), ("b", "tiny_shakespeare_val")] {
        bench.run(&format!("tokenize --data {text}.txt --out d/{name}.bin")).success();
    }
    let words =
        ["--data d ", "tiny_shakespeare_train.bin", "tiny_shakespeare_val.bin", "--val-data d/*val*.bin"];
    bench.run(&format!("{TRAIN} --data d")).refusal(2, &words);
    bench.run(&format!("{TRAIN} --data a.txt --val-data d")).refusal(2, &["--val-data d ", words[3]]);
    let flags = "--data d/tiny_shakespeare_train.bin --val-data d/tiny_shakespeare_val.bin";
    assert_eq!(evaluations(&bench, flags).1[1]["tokens"], 2999);
    fs::rename(bench.path("d/tiny_shakespeare_val.bin"), bench.path("val.bin")).unwrap();
    assert_eq!(evaluations(&bench, "--data d --val-data val.bin").0["data"]["tokens"], 20_000);
}

/// However much text lies where a run starts, which nobody has chosen.
#[test]
fn of_data_that_nobody_named_a_bounded_part_is_held_out() {
    let bench = bench();
    let text = fs::read(bench.text("t0.txt", 120_000)).unwrap();
    for file in 1..12 {
        bench.file(&format!("t{file}.txt"), &text);
    }
    let too_long = "train --model nano --micro-batch 100000";
    let told = bench.run(too_long).refusal(2, &["shorter than one batch"]).stderr;
    let held = told.split_once("beside ").and_then(|(_, rest)| rest.split(' ').next()?.parse::<usize>().ok());
    assert!(held.is_some_and(|held| held.abs_diff(1 << 17) <= 1), "{told}");
    bench.run(&format!("{too_long} --val-fraction 0.1")).refusal(2, &["beside 144000 that are held out"]);
    bench.run(&format!("{too_long} --data .")).refusal(2, &["beside 144000 that are held out"]);
}
