//! Other GPUs than those of 9.0, on libraries that run on the processor.

mod fake;

use fake::fake;
use harness::{Bench, Outcome};
use std::path::Path;

fn run(bench: &Bench, folder: &Path, args: &str) -> Outcome {
    on(bench, folder, "89", args)
}

fn on(bench: &Bench, folder: &Path, capability: &str, args: &str) -> Outcome {
    let mut command = bench.command(args);
    command.env("CARAVAN_CUDA_LIBRARIES", folder).env("CARAVAN_CACHE", bench.path("cache"));
    command.env("FAKE_CUDA_CAPABILITY", capability);
    bench.outcome(&mut command)
}

/// A driver may load a kernel when it is first named, and wait then for what the GPU is at, which may wait for a peer.
#[test]
fn every_kernel_is_loaded_before_the_first_is_launched() {
    let Some(folder) = fake() else { return };
    let bench = Bench::new(env!("CARGO_BIN_EXE_caravan"));
    for flags in ["", "--dtype f32", "--offload optimizer --stage 3", "--recompute full"] {
        let mut command = bench.command(&format!(
            "train --model nano --data random --seq 16 --micro-batch 2 --steps 2 --sample 0 --device cuda --ranks 1 {flags}"
        ));
        command.env("CARAVAN_CUDA_LIBRARIES", folder).env("CARAVAN_CACHE", bench.path("cache"));
        bench.outcome(command.env("FAKE_CUDA_PREPARED", "1")).success();
    }
    bench.nothing_left();
}

/// Attention's backward of heads of 128 takes more than a block has there in bf16, but not in f32, and its forward does not.
#[test]
fn a_small_gpu_evaluates_what_it_cannot_train() {
    let Some(folder) = fake() else { return };
    let bench = Bench::new(env!("CARGO_BIN_EXE_caravan"));
    bench.text("text.txt", 1500);
    let shape = serde_json::json!({
        "model_type": "llama", "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 1,
        "intermediate_size": 256, "vocab_size": 256,
    });
    std::fs::write(bench.path("shape.json"), shape.to_string()).expect("a file");
    let train = "train --model shape.json --data text.txt --seq 16 --micro-batch 2 --steps 2 --sample 0 --save saved \
                 --device cuda --ranks 2";
    let words =
        ["attention_backward:bf16:128 needs 132096 bytes", "GPU 0 (Fake GPU 0) has 101376", "--dtype f32"];
    run(&bench, folder, train).refusal(2, &words);
    run(&bench, folder, &format!("{train} --dtype f32")).success();
    let eval = "eval --model saved --data text.txt --seq 16 --dtype bf16 --device cuda --ranks 1";
    run(&bench, folder, eval).success();
    bench.nothing_left();
}

/// A norm's backward has a sum for each of a row's elements and rooms for those of warps in a block's shared memory.
#[test]
fn a_row_that_a_block_cannot_sum_is_refused_before_the_first_step() {
    let Some(folder) = fake() else { return };
    let bench = Bench::new(env!("CARGO_BIN_EXE_caravan"));
    let train = |width: usize| {
        let shape = serde_json::json!({
            "model_type": "llama", "hidden_size": width, "num_hidden_layers": 1, "num_attention_heads": 1,
            "head_dim": 64, "intermediate_size": 64, "vocab_size": 256,
        });
        let file = bench.file(&format!("{width}.json"), shape.to_string());
        let flags = "--data random --seq 4 --micro-batch 1 --steps 1 --sample 0 --device cuda --ranks 1";
        run(&bench, folder, &format!("train --model {} {flags}", file.display()))
    };
    train(25088).success();
    let words = ["rmsnorm:bf16 needs 101888 bytes", "GPU 0 (Fake GPU 0) has 101376", "no --dtype fits"];
    train(25344).refusal(2, &words);
    bench.nothing_left();
}

#[test]
fn a_gpu_that_is_newer_than_the_compiler_is_refused_with_what_brings_one() {
    let Some(folder) = fake() else { return };
    let bench = Bench::new(env!("CARGO_BIN_EXE_caravan"));
    let file = folder.join("libnvrtc.so.13").display().to_string();
    let words = [&file, "NVRTC 13.999", "sm_120a", "Fake GPU 0", "a newer CUDA toolkit or nvidia-cuda-nvrtc"];
    let train = "train --model nano --data random --steps 1 --device cuda --ranks 1";
    for command in [train, "bench kernels --check norms"] {
        on(&bench, folder, "120", command).refusal(2, &words);
    }
    let doctor = on(&bench, folder, "120", "doctor").success().stdout;
    assert!(words.iter().all(|word| doctor.contains(word)), "{doctor}");
    // What is too old for all kernels no compiler helps.
    let old = on(&bench, folder, "70", train).refusal(2, &["is sm_70", "sm_80 or newer"]).stderr;
    assert!(!old.contains("NVRTC"), "{old}");
    bench.nothing_left();
}

#[test]
fn a_compiler_that_knows_the_gpu_is_found_behind_those_that_do_not() {
    let Some(folder) = fake() else { return };
    let bench = Bench::new(env!("CARGO_BIN_EXE_caravan"));
    let file = |folder: &Path| folder.join("libnvrtc.so.13").display().to_string();
    let (older, newer) = (bench.path("older"), bench.path("newer"));
    harness::fake_nvrtc(&older, 90);
    harness::fake_nvrtc(&newer, 120);
    let with = |folders: &[&Path], args: &str| {
        let mut command = bench.command(args);
        command.env("CARAVAN_CUDA_LIBRARIES", std::env::join_paths(folders).expect("folders"));
        command.env("CARAVAN_CACHE", bench.path("cache")).env("FAKE_CUDA_CAPABILITY", "120");
        bench.outcome(&mut command)
    };
    let all = [older.as_path(), folder.as_path(), newer.as_path()];
    let doctor = with(&all, "doctor").success().stdout;
    assert!(doctor.contains(&file(&newer)) && !doctor.contains(&file(&older)), "{doctor}");
    let train = "train --model nano --data random --seq 16 --micro-batch 1 --steps 1 --sample 0 --device cuda --ranks 1";
    with(&all, train).success();
    with(&all[..2], train).refusal(2, &[&file(&older), &file(folder), "sm_120a, as Fake GPU 0 is"]);
    bench.nothing_left();
}

#[test]
fn a_gpu_that_no_rank_has_does_not_matter() {
    let Some(folder) = fake() else { return };
    let bench = Bench::new(env!("CARGO_BIN_EXE_caravan"));
    let last = |capability: &str, args: &str| {
        let mut command = bench.command(args);
        command.env("CARAVAN_CUDA_LIBRARIES", folder).env("CARAVAN_CACHE", bench.path("cache"));
        command.env("FAKE_CUDA_LAST", capability);
        bench.outcome(&mut command)
    };
    let train = "train --model nano --data random --seq 16 --micro-batch 1 --steps 1 --device cuda --transport shm --ranks";
    // One that the kernels do not run on, and one that the compiler does not know.
    for (capability, words) in [("70", "is sm_70"), ("120", "sm_120a, as Fake GPU 7 is")] {
        last(capability, &format!("{train} 2")).success();
        last(capability, &format!("{train} 8")).refusal(2, &[words]);
    }
    bench.nothing_left();
}
