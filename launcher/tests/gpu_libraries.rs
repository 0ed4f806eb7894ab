//! What a training asks CUDA's libraries for, and what it says of them, on ones that run on the processor: nothing twice, and
//! each stream for what it is made for.

mod fake;

use fake::fake;
use harness::{Bench, json_lines};
use serde_json::json;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Trains on such GPUs, with kernels kept in `cache`.
fn train(bench: &Bench, folder: &Path, flags: &str) -> Command {
    let mut command = bench.command(&format!(
        "train --model nano --data random --steps 4 --seq 16 --micro-batch 2 --val-fraction 0 --sample 0 --device cuda {flags}"
    ));
    command.env("CARAVAN_CUDA_LIBRARIES", folder).env("CARAVAN_CACHE", bench.path("cache"));
    command
}

#[test]
fn how_a_product_is_computed_is_asked_once_for_each_shape() {
    let Some(folder) = fake() else { return };
    let bench = Bench::new(env!("CARGO_BIN_EXE_caravan"));
    for graphs in ["on", "off"] {
        let log = bench.path(&format!("{graphs}.log"));
        let mut command = train(&bench, folder, &format!("--ranks 1 --cuda-graphs {graphs}"));
        bench.outcome(command.env("FAKE_CUDA_LOG", &log)).success();
        let log = fs::read_to_string(log).expect("a log");
        // The optimizer ends a step.
        let (first, later) = log.split_once("\nadamw ").expect("a step");
        let asked = |part: &str| part.lines().filter(|line| *line == "- chosen").count();
        let products = |part: &str| part.lines().filter(|line| line.starts_with("product ")).count();
        assert!(asked(first) > 3 && products(later) >= 3 * products(first) && products(first) > 0);
        assert_eq!(asked(later), 0, "--cuda-graphs {graphs}: after the first step");
        // Layers have the same shapes.
        assert!(asked(first) < products(first), "{} of {}", asked(first), products(first));
    }
    bench.nothing_left();
}

#[test]
fn kernels_that_were_compiled_once_are_compiled_by_no_run_after() {
    let Some(folder) = fake() else { return };
    let bench = Bench::new(env!("CARGO_BIN_EXE_caravan"));
    bench.outcome(&mut train(&bench, folder, "--ranks 1")).success();
    let refusing = |flags: &str| {
        let mut command = train(&bench, folder, flags);
        bench.outcome(command.env("FAKE_NVRTC_REFUSE", "*"))
    };
    refusing("--ranks 1").success();
    refusing("--ranks 2 --transport threads --stage 2").success();
    // Of another type, and for another architecture, they are others.
    refusing("--ranks 1 --dtype f32").refusal(1, &["compil"]);
    let mut other = train(&bench, folder, "--ranks 1");
    other.env("FAKE_NVRTC_REFUSE", "*").env("FAKE_CUDA_CAPABILITY", "89");
    bench.outcome(&mut other).refusal(1, &["compil"]);
    bench.nothing_left();
}

/// What computing waits for goes first, then what it does not wait for: sums move while it computes, and it fills the rest.
#[test]
fn streams_have_the_priority_of_what_they_are_for() {
    let Some(folder) = fake() else { return };
    let bench = Bench::new(env!("CARGO_BIN_EXE_caravan"));
    let log = bench.path("priorities");
    let mut command = train(&bench, folder, "--ranks 2 --transport nccl+threads --stage 3");
    bench.outcome(command.env("FAKE_CUDA_PRIORITIES", &log)).success();
    let text = fs::read_to_string(log).expect("a log");
    let all = |name: &str| -> BTreeSet<i32> {
        let lines = text.lines().filter_map(|line| line.split_once(' '));
        lines
            .filter(|(_, what)| *what == name)
            .map(|(priority, _)| priority.parse().expect("a number"))
            .collect()
    };
    let of = |name: &str| {
        let all = all(name);
        assert_eq!(all.len(), 1, "{name}: {all:?}");
        all.into_iter().next().expect("one")
    };
    let compute = ["product", "swiglu_forward", "adamw"].map(of);
    assert_eq!(compute, [compute[0]; 3]);
    // The smaller the number, the more urgent.
    let (reductions, gathers) = (of("reduce"), of("ncclAllGather"));
    assert!(gathers < reductions && reductions < compute[0], "{gathers} {reductions} {compute:?}");
    // Contributions to sums, and what has the urgency of gathers.
    assert_eq!(all("ncclSend"), [gathers, reductions].into());
    bench.nothing_left();
}

#[test]
fn metrics_say_which_gpus_and_libraries_a_run_had() {
    let Some(folder) = fake() else { return };
    let bench = Bench::new(env!("CARGO_BIN_EXE_caravan"));
    bench.outcome(&mut train(&bench, folder, "--ranks 1 --metrics m.jsonl")).success();
    let run = &json_lines(&bench.path("m.jsonl"))[0]["run"];
    let gpus = run["cuda"]["gpus"].as_array().expect("GPUs");
    let known = ["name", "capability", "memory"].map(|key| gpus[0][key].clone());
    assert_eq!(known, [json!("Fake GPU 0"), json!(90), json!(4u64 << 30)]);
    let libraries = run["cuda"]["libraries"].as_array().expect("libraries");
    for (name, version) in
        [("driver", "CUDA 13.1"), ("NVRTC", "13.999"), ("cuBLASLt", "13.0.0"), ("NCCL", "2.30")]
    {
        let found = libraries.iter().find(|library| library["name"] == name).expect(name);
        assert!(found["version"].as_str().is_some_and(|v| v.contains(version)), "{found}");
    }
    let told = run["env"].as_array().expect("an environment");
    let cache = format!("CARAVAN_CACHE={}", bench.path("cache").display());
    assert!(told.iter().any(|variable| *variable == *cache), "{told:?}");
    bench.nothing_left();
}
