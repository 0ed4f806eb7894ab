//! Training and evaluating on GPUs, which the program emulates here: the same flags, plans, memory and errors, with the
//! kernels compiled for the processor.

use crate::bench;
use harness::{Bench, Outcome, json_lines, skip};
use std::process::Command;

/// Whether there is a compiler for the emulation's kernels.
pub fn can_emulate() -> bool {
    harness::cxx("the program on emulated GPUs").is_some()
}

/// The program's command on a machine with these GPUs, as `2,64M`.
fn on(bench: &Bench, gpus: &str, args: &str) -> Command {
    let mut command = bench.command(args);
    // Kernels that one test compiled serve the next.
    command.env("CARAVAN_EMULATED_DEVICE", gpus).env("CARAVAN_CACHE", env!("CARGO_TARGET_TMPDIR"));
    command
}

pub fn run(bench: &Bench, gpus: &str, args: &str) -> Outcome {
    bench.outcome(&mut on(bench, gpus, args))
}

const TRAIN: &str =
    "train --model nano --data text.txt --steps 3 --warmup 1 --sample 4 --eval-every 0 --threads 1";

/// Losses of all steps, and the summary.
fn losses(bench: &Bench) -> (Vec<f64>, serde_json::Value) {
    let lines = json_lines(&bench.path("m.jsonl"));
    let losses = lines.iter().filter(|l| l["step"].is_u64()).map(|l| l["loss"].as_f64().unwrap()).collect();
    let summary = lines.iter().find_map(|l| l.get("summary")).expect("a summary");
    (losses, summary.clone())
}

#[test]
fn a_model_trains_on_gpus_and_is_evaluated_there() {
    if !can_emulate() {
        return;
    }
    let bench = bench();
    // What is held out of it is evaluated, and emulating takes its time.
    bench.text("text.txt", 1500);
    let common = format!("{TRAIN} --seq 16 --micro-batch 2 --metrics m.jsonl --save saved");
    bench.run(&format!("{common} --transport threads --stage 0")).success();
    let (host, _) = losses(&bench);
    let mut first: Option<(Vec<f64>, Vec<u8>)> = None;
    let over_ucx = bench.offers("ucx").then_some("--stage 1 --transport ucx");
    let flags = [
        "--stage 0 --transport threads",
        "--stage 3 --transport shm --progress thread",
        "--stage 2 --transport shm --offload optimizer",
        "--ranks 2 --share-gpus --stage 1 --transport threads",
    ];
    for flags in flags.into_iter().chain(over_ucx) {
        let gpus = if flags.contains("share") { "1,256M" } else { "2,256M" };
        let outcome = run(&bench, gpus, &format!("{common} --device cuda {flags}")).success();
        for word in ["emulated GPU", "on the device", "on the host", "for transfers, on the host", "sample"] {
            let said = format!("{}{}", outcome.stderr, outcome.stdout);
            assert!(said.contains(word), "'{word}' in {said}");
        }
        assert_eq!(outcome.stdout.contains("optimizer, on the host"), flags.contains("offload"));
        let (got, summary) = losses(&bench);
        for (a, b) in got.iter().zip(&host) {
            assert!((a - b).abs() < 1e-2, "{flags}: losses {got:?}, on the host {host:?}");
        }
        for rank in summary["ranks"].as_array().unwrap() {
            assert_eq!(rank["memory"]["total"], rank["predicted_bytes"], "{flags}: held as predicted");
        }
        let weights = std::fs::read(bench.path("saved/model.safetensors")).unwrap();
        match &first {
            None => first = Some((got, weights)),
            Some(first) => assert!(*first == (got, weights), "{flags}: other bits"),
        }
    }
    let eval =
        "eval --model saved --data text.txt --seq 16 --ranks 1 --transport threads --json --dtype bf16";
    let loss = |outcome: Outcome| outcome.success().json()["loss"].as_f64().unwrap();
    let (here, there) =
        (loss(bench.run(eval)), loss(run(&bench, "1,256M", &format!("{eval} --device cuda"))));
    assert!((here - there).abs() < 1e-2, "{there} on a GPU, {here} on the processor");
    // 32 MiB are the library's.
    let eval = format!("{eval} --device cuda --micro-batch 64");
    let words = ["a rank needs", "GPU 0", "33.0 MiB", "this would fit: --micro-batch "];
    run(&bench, "1,33M", &eval).refusal(2, &words);
    run(&bench, "1,32M", &eval).refusal(2, &["a rank needs", "even for one token", "--device cpu"]);
    bench.nothing_left();
}

#[test]
fn a_rank_is_started_for_each_gpu_where_nobody_says_how_many() {
    if !can_emulate() {
        return;
    }
    let bench = bench();
    bench.text("text.txt", 1500);
    for (gpus, ranks) in [("1,256M", 1), ("3,256M", 3)] {
        let flags = format!("{TRAIN} --seq 16 --micro-batch 2 --metrics m.jsonl --device cuda");
        run(&bench, gpus, &flags).success();
        let (_, summary) = losses(&bench);
        assert_eq!(summary["ranks"].as_array().map(Vec::len), Some(ranks), "{summary}");
    }
    bench.nothing_left();
}

#[test]
fn what_does_not_fit_a_gpu_is_refused_with_what_would() {
    let bench = bench();
    bench.text("text.txt", 6000);
    let refused = |gpus: &str, flags: &str, words: &[&str]| {
        run(&bench, gpus, &format!("{TRAIN} {flags}")).refusal(2, words);
    };
    refused("1,256M", "--device cuda --ranks 2", &["2 ranks on 1 GPU", "--ranks 1", "--share-gpus"]);
    refused("1,256M", "--device cuda --ranks 3 --transport threads", &["3 ranks on 1 GPU", "--share-gpus"]);
    // 32 MiB are the library's.
    let large = "--device cuda --ranks 2 --stage 0 --micro-batch 16 --seq 64";
    let words = [
        "a rank needs 38.5 MiB",
        "GPU 0",
        "37.0 MiB",
        "any of these would fit: --offload optimizer (36.9 MiB), --micro-batch 8 (36.2 MiB)",
    ];
    refused("2,37M", large, &words);
    let small = "--device cuda --ranks 2 --stage 0 --micro-batch 2 --seq 16";
    refused("2,34M", small, &["--stage 1 (", "--stage 3 (", "--offload optimizer ("]);
    refused("2,33M", large, &["these together would fit: --stage 3 --recompute full --offload optimizer"]);
    refused("2,32M", large, &["even --stage 3", "smaller --model or --seq", "more ranks"]);
    refused("2,256M", "--offload optimizer", &["--offload optimizer", "--device cuda"]);
    refused("2,256M", "--cuda-graphs on", &["--cuda-graphs on", "--device cuda"]);
    refused("2,256M", "--cuda-graphs on --device cuda", &["--cuda-graphs on", "emulated"]);
    refused("2,256M", "--attention wgmma", &["--attention wgmma", "--device cuda"]);
    refused("2,256M", "--attention mma", &["--attention mma", "--device cuda"]);
    let other = ["wgmma", "16-bit elements and heads of 64 or 128", "heads of "];
    refused("2,256M", "--attention wgmma --device cuda", &other);
    refused("2,256M", "--share-gpus", &["--share-gpus", "--device cuda"]);
    refused("none", "--device cuda", &["CARAVAN_EMULATED_DEVICE=none"]);
}

#[test]
fn a_machine_without_a_gpu_says_what_is_missing() {
    if harness::nvidia_driver() {
        return skip("what a machine without a GPU says: this one has NVIDIA's driver");
    }
    let bench = bench();
    bench.text("text.txt", 6000);
    let words = ["--device cuda cannot be used", "NVIDIA's driver", "install", "--device cpu"];
    bench.run(&format!("{TRAIN} --device cuda --ranks 1")).refusal(2, &words);
    bench.nothing_left();
}

/// A driver that runs on the processor, as far as the program asks it before it gives up.
#[test]
fn a_driver_that_is_too_old_and_libraries_that_are_missing_are_named() {
    if harness::nvidia_driver() {
        return skip("old drivers and missing libraries: this machine has NVIDIA's driver");
    }
    let bench = bench();
    bench.text("text.txt", 6000);
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../collectives/tests/fake_cuda/driver.c");
    let mut compiler = Command::new("cc");
    compiler.args(["-O1", "-shared", "-fPIC", "-pthread", source, "-o"]);
    match compiler.arg(bench.path("libcuda.so.1")).status() {
        Ok(status) => assert!(status.success(), "{compiler:?}"),
        Err(_) => return skip("old drivers and missing libraries: no C compiler"),
    }
    let refused = |(variable, value): (&str, &str), words: &[&str]| {
        let mut command = bench.command(&format!("{TRAIN} --device cuda --ranks 1"));
        // No other folders: no Python, no toolkit.
        command.env("CARAVAN_CUDA_LIBRARIES", bench.path(".")).env("PATH", "/nowhere");
        for name in
            ["CUDA_HOME", "CUDA_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "HOME", "LD_LIBRARY_PATH"]
        {
            command.env_remove(name);
        }
        command.env(variable, value);
        bench.outcome(&mut command).refusal(2, words);
    };
    refused(
        ("FAKE_CUDA_HIDDEN", "1"),
        &["driver is there, but shows no GPU", "CUDA_VISIBLE_DEVICES", "the job"],
    );
    refused(
        ("FAKE_CUDA_VERSION", "11040"),
        &["--device cuda cannot be used", "CUDA 11.4", "12.0 or newer", "driver 525"],
    );
    if std::path::Path::new("/usr/local/cuda").exists() {
        skip("libraries of CUDA that are missing: /usr/local/cuda has them");
    } else {
        refused(
            ("FAKE_CUDA_VERSION", "12040"),
            &["--device cuda cannot be used", "was not found", "pip install"],
        );
    }
    bench.nothing_left();
}

/// Whoever does not ask for a GPU opens nothing of CUDA, and of UCX nothing either: that would take time, and memory of every
/// rank.
#[test]
fn what_is_not_asked_for_is_not_opened() {
    let bench = bench();
    bench.text("text.txt", 6000);
    let trap = bench.path("trap.c");
    std::fs::write(
        &trap,
        "#include <stdlib.h>\n__attribute__((constructor)) static void trap(void) { abort(); }\n",
    )
    .expect("a source");
    for name in ["libcuda.so.1", "libnvrtc.so.13", "libcublasLt.so.13", "libnccl.so.2", "libucp.so.0"] {
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC"]).arg(&trap).arg("-o").arg(bench.path(name));
        match compiler.status() {
            Ok(status) => assert!(status.success(), "{compiler:?}"),
            Err(_) => return skip("libraries that must not be opened: no C compiler"),
        }
    }
    let run = |args: &str| {
        let mut command = bench.command(args);
        command.env("CARAVAN_CUDA_LIBRARIES", bench.path(".")).env("LD_LIBRARY_PATH", bench.path("."));
        bench.outcome(&mut command)
    };
    run(&format!("{TRAIN} --ranks 2")).success();
    run("bench all_reduce -b 1K -e 1K -n 2 --ranks 2 --transport shm").success();
    // The traps are where the program looks.
    assert_eq!(run(&format!("{TRAIN} --ranks 1 --device cuda")).code, None, "aborted");
    bench.nothing_left();
}
