//! The same bits: losses and weights do not depend on stage, transport, bucket size, prefetching or recomputation, nor, where
//! that is asked for, on the number of ranks.

use crate::bench;
use harness::{Bench, json_lines};

/// Every step's loss and gradient norm with all digits, and the bytes of the saved weights.
fn trace(bench: &Bench, flags: &str) -> (Vec<String>, Vec<u8>) {
    let fixed = "train --seq 16 --steps 4 --warmup 1 --sample 0 --eval-every 0 --quiet";
    bench.run(&format!("{fixed} --metrics m.jsonl --save saved {flags}")).success();
    let progress = &json_lines(&bench.path("m.jsonl"))[0]["run"]["progress"];
    assert_eq!(progress, if flags.contains("--progress thread") { "thread" } else { "inline" });
    bench.trace("m.jsonl", "saved")
}

/// The same for the smallest model on text.
fn compare(common: &str, variants: &[&str]) {
    compare_of(&format!("--model nano --data text.txt {common}"), variants);
}

/// Compares every variant with stage 0 over threads in one bucket.
fn compare_of(common: &str, variants: &[&str]) {
    let bench = bench();
    bench.text("text.txt", 6000);
    let base = trace(&bench, &format!("{common} --stage 0 --transport threads"));
    assert_ne!(base.0[0], base.0[3], "the model moves");
    for variant in variants {
        let other = trace(&bench, &format!("{common} {variant}"));
        assert_eq!(base.0, other.0, "{common} {variant}");
        assert!(base.1 == other.1, "weights of {common} {variant}");
    }
    bench.nothing_left();
}

const VARIANTS: [&str; 10] = [
    "--stage 1 --transport threads",
    "--stage 2 --transport threads",
    "--stage 3 --transport threads",
    "--stage 0 --transport shm",
    "--stage 1 --transport shm",
    "--stage 2 --transport shm --bucket-size 4K",
    "--stage 3 --transport shm",
    "--stage 3 --transport shm --prefetch off --bucket-size 20K",
    "--stage 3 --transport threads --bucket-size 1 --recompute full",
    "--stage 0 --transport shm --bucket-size 1 --recompute full",
];

/// Behind emulated links, and with nodes that are joined by another transport than their ranks.
const LAYERS: [&str; 4] = [
    "--stage 3 --transport threads --emulate-link latency=20us,bandwidth=1GB/s",
    "--stage 2 --transport shm --ranks-per-node 2 --emulate-link latency=20us,bandwidth=1GB/s,inside-latency=1us",
    "--stage 3 --transport shm+shm --ranks-per-node 2 --bucket-size 20K",
    "--stage 1 --transport threads+threads --ranks-per-node 2 --emulate-link bandwidth=2GB/s",
];

#[test]
fn nodes_and_links() {
    compare("--ranks 3 --micro-batch 1", &LAYERS);
}

/// Who moves messages on, and how often, over messages as over shared memory.
#[test]
fn progress_of_calls() {
    let mut variants = vec![
        "--stage 3 --transport threads --progress thread --threads 2",
        "--stage 2 --transport shm --progress thread --bucket-size 20K",
        "--stage 1 --transport shm+shm --ranks-per-node 2 --progress thread --bucket-size 4K",
    ];
    if bench().offers("ucx") {
        variants.extend([
            "--stage 0 --transport ucx --bucket-size 20K",
            "--stage 2 --transport ucx --progress thread --bucket-size 4K",
            "--stage 3 --transport ucx --threads 2",
            "--stage 3 --transport shm+ucx --ranks-per-node 2 --progress thread",
        ]);
    }
    compare("--ranks 3 --micro-batch 1", &variants);
}

#[test]
fn every_stage_over_ucx() {
    if !bench().offers("ucx") {
        return;
    }
    let variants = [
        "--stage 0 --transport ucx",
        "--stage 1 --transport ucx --bucket-size 4K",
        "--stage 2 --transport ucx",
        "--stage 3 --transport ucx --prefetch off --bucket-size 20K",
    ];
    for common in ["--ranks 1 --micro-batch 3", "--ranks 2 --micro-batch 2", "--ranks 4 --micro-batch 1"] {
        compare(common, &variants);
    }
}

#[test]
fn one_rank() {
    compare("--ranks 1 --micro-batch 3", &VARIANTS);
}

#[test]
fn two_ranks() {
    compare("--ranks 2 --micro-batch 2", &VARIANTS);
}

#[test]
fn three_ranks() {
    compare("--ranks 3 --micro-batch 1", &VARIANTS);
}

#[test]
fn four_ranks() {
    compare("--ranks 4 --micro-batch 1", &VARIANTS);
}

#[test]
fn two_ranks_in_f32() {
    compare("--ranks 2 --micro-batch 2 --dtype f32", &VARIANTS);
}

/// Products that may lose bits lose the same ones everywhere, and what was asked for is in the metrics.
#[test]
fn two_ranks_in_f32_of_high_precision() {
    compare("--ranks 2 --micro-batch 2 --dtype f32 --matmul-precision high", &VARIANTS[2..8]);
    let bench = bench();
    bench.text("text.txt", 6000);
    // As bits are lost by AMX only, what was done is what is said.
    let high = bench.run("train --data text.txt --steps 1 --sample 0 --dtype f32 --matmul-precision high");
    let is_faster = high.success().stderr.contains("f32 with products of high precision");
    for (flags, named) in [
        (
            "--dtype f32 --matmul-precision high",
            serde_json::json!(if is_faster { "high" } else { "highest" }),
        ),
        ("--dtype f32", serde_json::json!("highest")),
        ("--dtype bf16", serde_json::Value::Null),
    ] {
        trace(&bench, &format!("--model nano --data text.txt --micro-batch 2 {flags}"));
        assert_eq!(json_lines(&bench.path("m.jsonl"))[0]["run"]["matmul_precision"], named, "{flags}");
    }
    let flags = "--data text.txt --matmul-precision high";
    bench.run(&format!("train {flags}")).refusal(2, &["--matmul-precision high", "bf16", "--dtype f32"]);
    bench.run(&format!("eval --model saved --dtype bf16 {flags}")).refusal(2, &["--matmul-precision high"]);
    let evaluated = bench.run(&format!("eval --model saved --json {flags}")).success().stdout;
    let evaluated: serde_json::Value = serde_json::from_str(&evaluated).expect("JSON");
    assert_eq!(evaluated["matmul_precision"], if is_faster { "high" } else { "highest" });
}

/// Ranks that share nothing evenly, and one that shares nothing.
#[test]
fn one_and_three_ranks_in_f32() {
    compare("--ranks 1 --micro-batch 2 --dtype f32", &VARIANTS[2..6]);
    compare("--ranks 3 --micro-batch 1 --dtype f32", &VARIANTS[..8]);
}

/// The embedding's gradient comes from both ends of the model.
#[test]
fn tied_models() {
    let tied = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/reference/tied");
    let of = |ranks: &str| format!("--model {tied} --data random {ranks}");
    compare_of(&of("--ranks 2 --micro-batch 2"), &VARIANTS);
    compare_of(&of("--ranks 3 --micro-batch 1 --dtype f32"), &VARIANTS[..8]);
}

#[test]
fn two_ranks_that_accumulate() {
    compare("--ranks 2 --micro-batch 1 --accumulate 3", &VARIANTS);
}

#[test]
fn any_power_of_two_of_ranks_where_a_run_is_reproducible() {
    let bench = bench();
    // So short that its windows come again, in another order.
    bench.text("text.txt", 500);
    for dtype in ["bf16", "f32"] {
        // Eight micro-batches a step, whoever has them.
        let of = |flags: &str| {
            let fixed = "--model nano --data text.txt --micro-batch 1 --reproducible";
            trace(&bench, &format!("{fixed} --dtype {dtype} {flags}"))
        };
        let alone = of("--ranks 1 --accumulate 8 --transport threads --stage 0");
        for flags in [
            "--ranks 1 --accumulate 8 --stage 3",
            "--ranks 2 --accumulate 4 --stage 3 --bucket-size 20K",
            "--ranks 4 --accumulate 2 --stage 1 --transport threads",
            "--ranks 8 --accumulate 1 --stage 2",
            "--ranks 4 --accumulate 2 --stage 3 --transport shm+shm --ranks-per-node 2",
        ] {
            let other = of(flags);
            assert_eq!(alone.0, other.0, "{dtype} {flags}");
            assert!(alone.1 == other.1, "weights of {dtype} {flags}");
        }
    }
    bench.nothing_left();
    let other = bench.run("train --model nano --data text.txt --ranks 6 --reproducible");
    other.refusal(2, &["--reproducible with 6 ranks", "take 4 or 8"]);
}

#[test]
fn threads_of_a_rank_change_nothing() {
    compare("--ranks 2 --micro-batch 2", &["--threads 2 --transport threads", "--threads 3 --stage 3"]);
}
