//! Training with CUDA graphs, on a driver that runs on the processor: it is given the same work in the same order as
//! without.

mod fake;

use fake::fake;
use harness::{Bench, Outcome};
use std::path::Path;
use std::process::Command;

/// Trains on one such GPU; what the driver was given is in the file `NAME.log`.
fn train(bench: &Bench, folder: &Path, name: &str, flags: &str, refuse: &str) -> Outcome {
    bench.outcome(command(bench, folder, name, flags).env("FAKE_CUDA_REFUSE", refuse))
}

fn command(bench: &Bench, folder: &Path, name: &str, flags: &str) -> Command {
    let flags = format!(
        "train --model nano --data random --steps 4 --seq 16 --micro-batch 2 --val-fraction 0 --sample 0 \
         --ranks 1 --device cuda --metrics {name}.jsonl --save {name} {flags}"
    );
    let mut command = bench.command(&flags);
    command.env("CARAVAN_CUDA_LIBRARIES", folder).env("CARAVAN_CACHE", bench.path("cache"));
    command.env("FAKE_CUDA_LOG", bench.path(&format!("{name}.log")));
    command
}

/// What the driver did, and what it says of graphs.
fn log(bench: &Bench, name: &str) -> (Vec<String>, Vec<String>) {
    let text = std::fs::read_to_string(bench.path(&format!("{name}.log"))).expect("a log");
    text.lines().map(str::to_owned).partition(|line| !line.starts_with('-'))
}

fn values(bench: &Bench, name: &str, key: &str) -> Vec<String> {
    let lines = harness::json_lines(&bench.path(&format!("{name}.jsonl")));
    lines.iter().filter(|line| line[key].is_number()).map(|line| line[key].to_string()).collect()
}

#[test]
fn graphs_change_neither_the_work_nor_its_order() {
    let Some(folder) = fake() else { return };
    let bench = Bench::new(env!("CARGO_BIN_EXE_caravan"));
    for (case, flags) in
        ["--stage 0 --accumulate 2", "--stage 3 --dtype f32", "--recompute full --bucket-size 20K"]
            .into_iter()
            .enumerate()
    {
        let [off, on] = ["off", "on"].map(|switch| {
            let name = format!("{switch}-{case}");
            train(&bench, folder, &name, &format!("{flags} --cuda-graphs {switch}"), "").success();
            name
        });
        let ((work, none), (same, graphs)) = (log(&bench, &off), log(&bench, &on));
        let different = work.iter().zip(&same).position(|(a, b)| a != b);
        assert!(work.len() == same.len() && different.is_none(), "{flags}: {different:?}");
        assert!(work.iter().filter(|line| line.starts_with("adamw ")).count() >= 4, "{flags}");
        for key in ["loss", "grad_norm"] {
            let all = values(&bench, &off, key);
            assert!(all.len() >= 4 && all == values(&bench, &on, key), "{flags}: {key}");
        }
        let weights =
            |name: &str| std::fs::read(bench.path(&format!("{name}/model.safetensors"))).expect("a model");
        assert!(weights(&off) == weights(&on), "{flags}: weights");

        let count = |word: &str| graphs.iter().filter(|line| line.ends_with(word)).count();
        assert!(!none.iter().any(|line| line.contains("captured")));
        // Graphs are made in the second step at the latest, and launched in all later ones; what changes never is one.
        let made = count("- captured");
        assert!(made > 2 && count("- launched") >= 3 * made, "{flags}: {made} of {}", count("- launched"));
        assert_eq!(
            [made; 3],
            ["- made ready", "- graph destroyed", "- ready one destroyed"].map(count),
            "{flags}"
        );
    }
    bench.nothing_left();
}

/// Trains where the driver has memory for so many graphs, or launches of them, as `variable` says: the rest of the run is as
/// without, and says so once. What became of graphs, by the ends of the driver's lines.
fn short_of_memory(variable: &str, most: usize) -> Option<impl Fn(&str) -> usize> {
    let folder = fake()?;
    let bench = Bench::new(env!("CARGO_BIN_EXE_caravan"));
    train(&bench, folder, "off", "--cuda-graphs off", "").success();
    let mut command = command(&bench, folder, "on", "--cuda-graphs on --quiet");
    let told = bench.outcome(command.env(variable, most.to_string())).success().stderr;
    let words = "rank 0: GPU 0 has no memory left for a graph of ";
    assert!(told.matches(words).count() == 1 && told.lines().count() == 1, "{told}");
    let (work, graphs) = log(&bench, "on");
    assert!(work == log(&bench, "off").0, "{variable}={most}");
    for key in ["loss", "grad_norm"] {
        assert_eq!(values(&bench, "on", key), values(&bench, "off", key), "{variable}={most}: {key}");
    }
    bench.nothing_left();
    Some(move |word: &str| graphs.iter().filter(|line| line.ends_with(word)).count())
}

#[test]
fn a_gpu_without_memory_for_another_graph_takes_the_work_without() {
    for ready in [0, 2] {
        let Some(count) = short_of_memory("FAKE_CUDA_GRAPHS", ready) else { return };
        assert_eq!(
            ["- captured", "- graph destroyed", "- made ready", "- ready one destroyed"].map(&count),
            [ready + 1, ready + 1, ready, ready]
        );
        assert!(count("- launched") >= ready);
    }
}

/// Of one that has a place for a graph only until it is launched, the first time or later.
#[test]
fn a_gpu_without_memory_to_launch_a_graph_takes_the_work_without() {
    for launches in [0, 5] {
        let Some(count) = short_of_memory("FAKE_CUDA_LAUNCHES", launches) else { return };
        assert_eq!(count("- launched"), launches);
        assert_eq!(count("- made ready"), count("- ready one destroyed"));
    }
}

/// The library is told which products may lose bits of their inputs.
#[test]
fn products_of_high_precision_are_tf32() {
    let Some(folder) = fake() else { return };
    let bench = Bench::new(env!("CARGO_BIN_EXE_caravan"));
    let products = |precision: &str| {
        train(&bench, folder, precision, &format!("--dtype f32 --matmul-precision {precision}"), "")
            .success();
        let work = log(&bench, precision).0;
        ["product ", "product_of_tf32 "].map(|name| work.iter().filter(|line| line.starts_with(name)).count())
    };
    let ([all, none], [few, rounded]) = (products("highest"), products("high"));
    assert!(all > 0 && [none, few, rounded] == [0, 0, all], "{all} {none} {few} {rounded}");
    bench.nothing_left();
}

#[test]
fn a_kernel_that_is_refused_is_named() {
    let Some(folder) = fake() else { return };
    let bench = Bench::new(env!("CARGO_BIN_EXE_caravan"));
    let layers = 2;
    for (name, nth, words) in [("first", 1, ""), ("recorded", layers + 1, "recording a graph, ")] {
        let outcome =
            train(&bench, folder, name, "--cuda-graphs on --stage 0", &format!("swiglu_forward:{nth}"));
        let text =
            outcome.refusal(1, &[&format!("{words}launching swiglu_forward of swiglu:bf16 (GPU 0)")]).stderr;
        assert!(text.contains("a fake error"), "{text}");
        let graphs = log(&bench, name).1;
        let count = |word: &str| graphs.iter().filter(|line| line.ends_with(word)).count();
        assert!(count("- captured") == count("- graph destroyed"), "{graphs:?}");
    }
    bench.nothing_left();
}
