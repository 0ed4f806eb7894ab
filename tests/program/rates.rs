//! The learning rate of each step: that which is recorded, and that by which weights change.

use crate::bench;
use harness::{Bench, json_lines};
use serde_json::Value;
use std::fs;

/// The embedding of a model that was saved as f32.
fn embedding(bench: &Bench, model: &str) -> Vec<f32> {
    let bytes = fs::read(bench.path(model).join("model.safetensors")).unwrap();
    let (length, rest) = bytes.split_first_chunk().unwrap();
    let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let header: Value = serde_json::from_slice(header).unwrap();
    let place = &header["model.embed_tokens.weight"]["data_offsets"];
    let [from, to] = [0, 1].map(|end| place[end].as_u64().expect("a place") as usize);
    data[from..to].as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// With an epsilon beside which no gradient counts, a step at rate r does nothing but to take the r-th part of each weight of
/// a matrix from it, if the weight decay is 1.
#[test]
fn steps_are_recorded_and_made_at_the_rates_of_the_schedule() {
    let bench = bench();
    let run = |rate: &str, model: &str| {
        let flags = format!(
            "--data random --dtype f32 --ranks 1 --transport threads --micro-batch 1 --seq 8 --steps 7 --eps 1e30 \
             --weight-decay 1 {rate} --sample 0 --quiet --metrics m.jsonl --save {model}"
        );
        bench.run(&format!("train --model nano {flags}")).success();
        let lines = json_lines(&bench.path("m.jsonl"));
        lines.iter().filter_map(|line| line["lr"].as_f64()).collect::<Vec<_>>()
    };
    assert_eq!(run("--lr 0", "before"), [0.0; 7]);
    let before = embedding(&bench, "before");
    // Up in two steps, and down from 0.2 by a fifth of 0.15 in each that follows.
    for (schedule, expected) in [
        ("linear --min-lr 0.05", [0.1, 0.2, 0.2, 0.17, 0.14, 0.11, 0.08]),
        ("constant", [0.1, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2]),
    ] {
        let rates = run(&format!("--lr 0.2 --warmup 2 --schedule {schedule}"), "after");
        assert_eq!(rates.len(), expected.len());
        assert!(rates.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12), "{schedule}: {rates:?}");
        let kept: f64 = expected.iter().map(|rate| 1.0 - rate).product();
        for (before, after) in before.iter().zip(embedding(&bench, "after")) {
            let (after, due) = (f64::from(after), f64::from(*before) * kept);
            assert!((after - due).abs() <= 1e-5 * due.abs(), "{schedule}: {before} to {after} for {due}");
        }
    }
}
