//! Trainings that go on with steps of another size: none of their data come twice, and none are left out. And what it takes to
//! keep their states.

use crate::bench;
use harness::json_lines;
use serde_json::Value;
use std::fs;

const TRAIN: &str = "train --model nano --data text.txt --order sequential --dtype f32 --warmup 0 --sample 0 --quiet \
                     --checkpoint ckpt --metrics m.jsonl";

#[test]
fn data_go_on_where_they_were_whatever_a_step_is_now() {
    let bench = bench();
    // No part of it is like another.
    let text: Vec<u8> = (0..3000u64).map(|i| b' ' + (i.wrapping_mul(i * 31 + 7) >> 4) as u8 % 90).collect();
    bench.file("text.txt", &text);
    let told = || -> Value {
        serde_json::from_slice(&fs::read(bench.path("ckpt/step-3/training.json")).unwrap()).unwrap()
    };
    for (flags, rows, length) in [
        ("--ranks 1 --micro-batch 3 --seq 16", 3, 16),
        ("--ranks 3 --micro-batch 1 --accumulate 2 --seq 16", 6, 16),
        ("--ranks 2 --micro-batch 1 --seq 24", 2, 24),
    ] {
        bench.run(&format!("{TRAIN} --steps 3 --ranks 2 --micro-batch 2 --seq 16")).success();
        let taken = 3 * 2 * 2 * 16;
        assert_eq!(told()["tokens"], taken);
        // What comes next, as those weights find it.
        bench.file("next.txt", &text[taken..][..rows * length + 1]);
        let eval = format!(
            "eval --model ckpt/step-3/weights --data next.txt --tokenizer bytes --dtype f32 --ranks 1 --seq {length} --json"
        );
        let expected = bench.run(&eval).success().json()["loss"].as_f64().unwrap();
        bench.run(&format!("{TRAIN} --steps 4 --resume {flags}")).success();
        let steps = json_lines(&bench.path("m.jsonl"));
        let next = steps.iter().rfind(|line| line["step"] == 4).expect("a fourth step");
        let found = next["loss"].as_f64().unwrap();
        assert!((found / expected - 1.0).abs() < 1e-6, "{flags}: {found} for {expected}");
        fs::remove_dir_all(bench.path("ckpt")).unwrap();
        fs::remove_file(bench.path("m.jsonl")).unwrap();
    }
    bench.nothing_left();
}

/// A run stands still for them, and its speed is that of training alone.
#[test]
fn what_checkpoints_take_is_told_and_no_part_of_the_speed() {
    let bench = bench();
    bench.text("text.txt", 3000);
    let train =
        "train --model nano --data text.txt --steps 6 --micro-batch 1 --seq 16 --sample 0 --metrics m.jsonl";
    for (flags, takes) in [
        ("--checkpoint ckpt --checkpoint-every 1", true),
        ("--checkpoint beside --checkpoint-every 1 --checkpoint-async", true),
        ("", false),
    ] {
        let said = bench.run(&format!("{train} {flags}")).success().stdout;
        assert_eq!(said.contains(" of them checkpoints"), takes, "{said}");
        let summary = json_lines(&bench.path("m.jsonl")).pop().expect("a line")["summary"].clone();
        let number = |key: &str| summary[key].as_f64().unwrap_or_else(|| panic!("{key} in {summary}"));
        assert_eq!(number("checkpoint_seconds") > 0.0, takes, "{summary}");
        let training = number("seconds") - number("evaluation_seconds") - number("checkpoint_seconds");
        assert!((number("tokens_per_second") * training / number("tokens") - 1.0).abs() < 1e-9, "{summary}");
        for rank in summary["ranks"].as_array().unwrap() {
            let (kept, all) = (rank["checkpoint_seconds"].as_f64(), rank["seconds"].as_f64());
            assert!(kept < all && (kept > Some(0.0)) == takes, "{rank}");
        }
    }
    bench.nothing_left();
}
