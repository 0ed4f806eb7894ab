//! The run for GPU machines, `benches/gpu.sh`: on emulated devices, on a driver that runs on the processor, and where there
//! is neither.

mod devices;
mod fake;

use devices::{bench, can_emulate, emulated};
use fake::fake;
use harness::{Bench, Outcome, json_lines, signal};
use rustix::process::Signal;
use std::path::Path;
use std::process::Command;

/// The run for GPU machines, with small models.
fn script(bench: &Bench) -> Command {
    script_into(bench, Some("results"))
}

/// The same with its results in a folder that is named, or not.
fn script_into(bench: &Bench, named: Option<&str>) -> Command {
    let mut command = Command::new("bash");
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches/gpu.sh")).args(named);
    bench.prepare(&mut command);
    command.env("CARAVAN", env!("CARGO_BIN_EXE_caravan")).env_remove("CARAVAN_EMULATED_DEVICE");
    // Where it is killed its files go, too.
    command.env("TMPDIR", bench.path("."));
    for (name, value) in
        [("MODEL", "nano"), ("ROWS", "1"), ("LENGTH", "8"), ("SMALL", "nano"), ("SMALL_LENGTH", "8")]
    {
        command.env(name, value);
    }
    command
        .env("LARGE", "nano")
        .env("STEPS", "4")
        .env("TEXT", "200")
        .env("PEAK", "989e12")
        .env("PYTHON", "/nowhere")
        .env_remove("ONLY");
    command
}

/// The longest: its name is among the first because tests begin in the order of their names, and at the end it would keep one
/// processor while another has nothing to do.
#[test]
fn a_run_for_gpu_machines_goes_through_on_an_emulated_one() {
    if !can_emulate() || !harness::installed("bash") {
        return;
    }
    let bench = bench();
    let mut command = script(&bench);
    emulated(&mut command);
    let outcome = bench.outcome(&mut command);
    let text = std::fs::read_to_string(bench.path("results/gpu.txt")).unwrap_or_default();
    assert_eq!(outcome.code, Some(0), "{text}{}", outcome.stderr);
    for words in [
        "ok     every kernel agrees with its definition",
        "ok     losses of stage-0 and cpu: 4 steps",
        "ok     losses and gradient norms of stage-3 and stage-0 are the same bits in 4 steps",
        "ok     losses and gradient norms of two-3 and two-0 are the same bits in 2 steps",
        "ok     losses and gradient norms of saving and twice are the same bits in 5 steps",
        "ok     losses of f32 and f32-cpu: 5 steps",
        "ok     evaluation in f32 on the processor",
        "ok     evaluation in bf16 on the processor",
        "ok     losses of high and f32-cpu: 5 steps",
        "ok     losses of f16 and f16-cpu: 5 steps",
        "ok     scaled and scaled-cpu skip the same 3 of 8 steps",
        "ok     losses of scaled and scaled-cpu: 8 steps",
        "ok     losses of text and text-cpu: 6 steps",
        "ok     evaluations within text and text-cpu: 2",
        "ok     losses and gradient norms of resumed and text are the same bits in 3 steps",
        "ok     memory of stage-3 is what was predicted",
        "ok     memory of two-3 is what was predicted",
        "timed: ",
        "TFLOP/s (6 N + attention), MFU",
        "of 989 TFLOP/s",
        "ok     losses of mma and timed: 20 steps",
        "ok     memory of large is what was predicted",
        // What an emulated one does not have is left out, and said to be.
        "skip   PyTorch: no Python here has one that sees a GPU",
        "skip   NCCL: ",
        "skip   CUDA graphs: emulated GPUs have none",
        "nothing failed",
    ] {
        let (_, list) = text.split_once("what was shown").unwrap_or_default();
        assert!(list.contains(words), "'{words}' is not in {text}");
    }
    assert!(text.contains("product logits"), "{text}");
    let runs = json_lines(&bench.path("results/metrics.jsonl"));
    assert_eq!(runs.iter().filter(|line| line["file"].is_string()).count(), 25, "twenty-five runs");
    let names = std::fs::read_dir(bench.path("results")).expect("results").count();
    assert_eq!(names, 5, "gpu.txt, checks, kernels, metrics, and all of it for benches/results");
    bench.nothing_left();
}

#[test]
fn the_run_for_gpu_machines_says_what_is_wrong() {
    if !can_emulate() || !harness::installed("bash") {
        return;
    }
    let bench = bench();
    // Too little memory for any training.
    let mut command = script(&bench);
    emulated(&mut command);
    command.env("CARAVAN_EMULATED_DEVICE", "1,1M").env("ONLY", "speed large");
    let outcome = bench.outcome(&mut command);
    let text = std::fs::read_to_string(bench.path("results/gpu.txt")).unwrap_or_default();
    assert_eq!(outcome.code, Some(1), "{text}");
    assert!(text.contains("WRONG  failed (2): caravan train") && text.contains("SOMETHING FAILED"), "{text}");
    let mut command = script(&bench);
    emulated(&mut command);
    command.env("ONLY", "everything");
    assert_eq!(bench.outcome(&mut command).code, Some(2));
}

#[test]
fn results_go_where_they_are_asked_for_else_to_the_folder_of_the_environment_else_here() {
    if !can_emulate() || !harness::installed("bash") {
        return;
    }
    for (named, out, place) in
        [(Some("results"), Some("out"), "results"), (None, Some("out"), "out"), (None, None, ".")]
    {
        let bench = bench();
        let mut command = script_into(&bench, named);
        emulated(&mut command);
        // Nothing is run but what says which parts there are.
        command.env("ONLY", "everything").env_remove("OUT").envs(out.map(|out| ("OUT", out)));
        let outcome = bench.outcome(&mut command);
        assert_eq!(outcome.code, Some(2), "{}", outcome.stderr);
        for folder in ["results", "out", "."] {
            let told = std::fs::read_to_string(bench.path(folder).join("gpu.txt")).unwrap_or_default();
            assert_eq!(told.contains("ONLY names parts of"), folder == place, "{folder}: {told}");
        }
    }
}

#[test]
fn what_there_is_no_time_for_is_no_failure() {
    if !can_emulate() || !harness::installed("bash") {
        return;
    }
    let bench = bench();
    let mut command = script(&bench);
    emulated(&mut command);
    command.env("BUDGET", "5").env("ONLY", "check train speed mma");
    let text = bench.outcome(&mut command).success().stdout;
    let (_, list) = text.split_once("what was shown").unwrap_or_default();
    for words in ["no time is left for caravan bench kernels --check", "nothing is compared with stage-3"] {
        assert!(list.contains(&format!("skip   {words}")), "'{words}' is not in {text}");
    }
    assert!(!list.contains("ok  ") && !list.contains("WRONG"), "{text}");
}

/// What asks cuBLASLt for products, and everything that a training run asks the driver for: that the calls are right. What
/// kernels compute is shown on emulated devices; here they do nothing.
#[test]
fn products_and_training_call_the_driver_and_its_libraries_rightly() {
    let Some(folder) = fake() else { return };
    let bench = bench();
    let mut products = bench.command("bench kernels --check products");
    products.env("CARAVAN_CUDA_LIBRARIES", folder).env("CARAVAN_CACHE", bench.path("cache"));
    let text = bench.outcome(&mut products).success().stdout;
    assert!(text.contains("ok    products of every orientation") && text.contains("Fake GPU 0"), "{text}");

    let mut command = script(&bench);
    command.env("CARAVAN_CUDA_LIBRARIES", folder).env("ONLY", "train more speed kernels large graphs");
    let outcome = bench.outcome(&mut command);
    let text = std::fs::read_to_string(bench.path("results/gpu.txt")).unwrap_or_default();
    let (_, list) = text.split_once("what was shown").unwrap_or_default();
    for words in ["memory of stage-0 is", "memory of stage-3 is", "memory of timed is", "memory of large is"]
    {
        assert!(list.contains(&format!("ok     {words} what was predicted")), "'{words}' is not in {text}");
    }
    for words in
        ["small-graphs-on: ", "graphs-off: ", "small-graphs-on and small-graphs-off are the same bits"]
    {
        assert!(list.contains(words), "'{words}' is not in {text}");
    }
    // All that is wrong are losses, which nothing has computed, and what nothing has found to overflow.
    let wrong: Vec<&str> = list.lines().filter(|line| line.starts_with("WRONG")).collect();
    let losses = [
        "losses of stage-0 and cpu",
        "losses of f32 and f32-cpu",
        "evaluation in f32 on the processor",
        "evaluation in bf16 on the processor",
        "losses of high and f32-cpu",
        "losses of f16 and f16-cpu",
        "scaled and scaled-cpu do not skip the same",
        "losses of scaled and scaled-cpu",
        "losses of text and text-cpu",
        "evaluations within text and text-cpu",
    ];
    assert!(wrong.len() == losses.len(), "{text}");
    assert!(wrong.iter().zip(losses).all(|(line, what)| line.contains(what)), "{text}");
    assert_eq!(outcome.code, Some(1), "{text}{}", outcome.stderr);

    // Two ranks, whose GPUs reach each other over NCCL, or through the host and then with the optimizer there.
    for flags in [
        "--transport nccl+threads --stage 0",
        "--transport nccl+threads --stage 3",
        "--transport shm --stage 3 --offload optimizer --recompute full",
    ] {
        let flags =
            format!("train --model nano --data random --steps 3 --seq 16 --ranks 2 --device cuda {flags}");
        let mut train = bench.command(&flags);
        train.env("CARAVAN_CUDA_LIBRARIES", folder).env("CARAVAN_CACHE", bench.path("cache"));
        bench.outcome(&mut train).success();
    }
    bench.nothing_left();
}

#[test]
fn the_run_for_gpu_machines_measures_nccl() {
    let Some(folder) = fake() else { return };
    let bench = bench();
    let mut command = script(&bench);
    command.env("CARAVAN_CUDA_LIBRARIES", folder).env("ONLY", "nccl").env("WIRE", "nccl+threads");
    command.env("TYPE", "int32");
    let outcome = bench.outcome(&mut command);
    let text = std::fs::read_to_string(bench.path("results/gpu.txt")).unwrap_or_default();
    assert_eq!(outcome.code, Some(1), "{text}{}", outcome.stderr);
    let (_, list) = text.split_once("what was shown").unwrap_or_default();
    for words in ["all_reduce (native)", "all_gather (auto)", "send_recv (auto)"] {
        let words = format!("ok     {words} of 2 ranks over NCCL on one GPU by NCCL_");
        assert!(list.contains(&words), "'{words}' is not in {text}");
    }
    // Kernels that sum do nothing there, and what comes after the first failure would fail too.
    assert_eq!(list.matches("WRONG").count(), 1, "{text}");
    assert!(
        list.contains("caravan bench reduce ") && list.contains("NCCL on one GPU by NCCL_MULTI"),
        "{text}"
    );
}

/// What lies in a folder, in the order of names.
fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).expect("a folder");
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// What the script has written in a file of its results.
fn result(bench: &Bench, file: &str) -> String {
    std::fs::read_to_string(bench.path(&format!("results/{file}"))).unwrap_or_default()
}

/// The script on a driver of which a kernel does something bad.
fn with_a_bad_kernel(bench: &Bench, folder: &Path, parts: &str, bad: (&str, &str)) -> Outcome {
    let mut command = script(bench);
    command.env("CARAVAN_CUDA_LIBRARIES", folder).env("ONLY", parts).env(bad.0, bad.1);
    // Some compute-sanitizer, before any that there may be.
    let tools = bench.path("tools");
    std::fs::create_dir_all(&tools).expect("a folder");
    let tool = tools.join("compute-sanitizer");
    std::fs::write(&tool, "#!/bin/sh\necho \"sanitized $*\"\n").expect("a file");
    std::fs::set_permissions(&tool, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("a program");
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{}:{path}", tools.display()));
    // What hangs is waited for; what only takes long on a busy machine should not be taken for it.
    command.env("PATIENCE", if bad.0 == "FAKE_CUDA_HANG" { "5" } else { "30" });
    bench.outcome(&mut command)
}

#[test]
fn a_kernel_that_ruins_the_device_or_hangs_costs_no_other_its_check() {
    let Some(folder) = fake() else { return };
    for (variable, end) in [("FAKE_CUDA_FAULT", "a fake error"), ("FAKE_CUDA_HANG", "it did not end")] {
        let bench = bench();
        let outcome = with_a_bad_kernel(&bench, folder, "check", (variable, "swiglu_forward"));
        let text = result(&bench, "gpu.txt");
        assert_eq!(outcome.code, Some(1), "{text}{}", outcome.stderr);
        let (_, list) = text.split_once("what was shown").unwrap_or_default();
        let of = |case: &str| list.lines().find(|line| line.contains(&format!("check of {case}:")));
        for case in ["swiglu_and_its_backward", "an_f32_llama_with_tied_embeddings"] {
            assert!(of(case).is_some_and(|line| line.contains(end)), "{case} of {text}");
        }
        // Others come after it: in the second process, and in the third.
        for case in ["embeddings", "heads_of_128_on_tensor_cores", "a_bf16_llama_with_tensor_core_attention"]
        {
            assert!(of(case).is_some(), "{case} of {text}");
        }
        // One that needs no kernel goes through there, as the list of what was run says. The file is of the first process.
        assert!(text.contains("ok    products of every orientation"), "{text}");
        let first = result(&bench, "checks.json");
        assert!(first.contains("\"case\": \"products_of_every_orientation\""), "{first}");
        assert!(first.contains("\"state\": \"not run\""), "{first}");
        // A machine that is lent may give no more files than eight, whatever fails.
        let mut files: Vec<String> = names(&bench.path("results"));
        files.retain(|name| !name.starts_with("gpu_"));
        assert_eq!(files, ["checks.json", "gpu.txt", "memcheck.txt", "metrics.jsonl"]);
        let sanitized = result(&bench, "memcheck.txt");
        assert!(
            sanitized.contains("--tool memcheck") && sanitized.contains("--check swiglu_and"),
            "{sanitized}"
        );
        bench.nothing_left();
    }
}

#[test]
fn a_step_that_fails_on_the_device_is_repeated_with_launches_that_are_awaited() {
    let Some(folder) = fake() else { return };
    let bench = bench();
    let outcome = with_a_bad_kernel(&bench, folder, "speed", ("FAKE_CUDA_FAULT", "swiglu_forward"));
    let text = result(&bench, "gpu.txt");
    assert_eq!(outcome.code, Some(1), "{text}{}", outcome.stderr);
    let (_, list) = text.split_once("what was shown").unwrap_or_default();
    let line = list.lines().find(|line| line.contains("timed with CUDA_LAUNCH_BLOCKING=1: "));
    assert!(line.is_some_and(|line| line.contains("swiglu_forward")), "{text}");
}

#[test]
fn a_host_with_too_little_memory_for_the_large_model_is_no_failure() {
    let Some(folder) = fake() else { return };
    let bench = bench();
    let outcome = with_a_bad_kernel(&bench, folder, "large", ("FAKE_CUDA_PAGES", "100000"));
    let text = result(&bench, "gpu.txt");
    assert_eq!(outcome.code, Some(0), "{text}{}", outcome.stderr);
    let (_, list) = text.split_once("what was shown").unwrap_or_default();
    assert!(list.contains("skip   the host has too little memory (1): caravan train"), "{text}");
    assert!(text.contains("page-locking"), "{text}");
}

/// Runs a part of the script by itself.
fn part(bench: &Bench, text: &str) -> Outcome {
    let mut command = Command::new("bash");
    command.args(["-c", text]);
    bench.prepare(&mut command);
    command.env("BENCHES", Path::new(env!("CARGO_MANIFEST_DIR")).join("../benches"));
    bench.outcome(&mut command)
}

/// The checks alone, with a program that is ended while it compiles, and once more when a check has begun.
const SLOW: &str = r#"
eval "$(sed -n '/^cases() {/,/^}/p; /^checks() {/,/^}/p' "$BENCHES/gpu.sh")"
results=. work=. patience=60 caravan=caravan tries=0
wrong() { :; }
memcheck() { :; }
step() {
    outcome=hung tries=$((tries + 1))
    echo "try $tries: $patience s"
    case $tries in 1) states=("not run" "not run") ;; 2) states=(ok "not run") ;; *) states=("not run") ;; esac
    for i in "${!states[@]}"; do printf '"case": "%s",
"state": "%s"
' "case $i" "${states[i]}"; done >"$file"
    return 1
}
checks checks 150
"#;

#[test]
fn a_program_that_is_ended_while_it_compiles_has_as_long_the_next_time() {
    if !harness::installed("bash") {
        return;
    }
    let told = part(&bench(), SLOW).stdout;
    assert_eq!(told, "try 1: 60 s\ntry 2: 60 s\ntry 3: 20 s\n");
}

#[test]
fn what_was_shown_names_no_folders_of_the_machine_wherever_they_lie() {
    if !harness::installed("bash") {
        return;
    }
    let bench = bench();
    let record = r#"
        . "$BENCHES/gpu_metrics.sh"
        here=$BENCHES facts= results=$PWD/'a|b[c' work=$PWD/'a|b[c/tmp.&1'
        mkdir -p "$work" && : >"$results/metrics.jsonl"
        printf '%s\n' "ran in $work/model, wrote $results/x.json (/usr/lib/site-packages/y)" >"$results/gpu.txt"
        record
    "#;
    let outcome = part(&bench, record);
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    let files = std::fs::read_dir(bench.path("a|b[c")).expect("results").map(|entry| entry.unwrap().path());
    let file =
        files.into_iter().find(|file| file.extension().is_some_and(|end| end == "md")).expect("a file");
    let text = std::fs::read_to_string(file).expect("text");
    assert!(text.contains("\nran in WORK/model, wrote RESULTS/x.json (site-packages/y)\n"), "{text}");
}

#[test]
fn metrics_are_there_when_the_run_is_stopped() {
    if !can_emulate() || !harness::installed("bash") {
        return;
    }
    let bench = bench();
    let mut command = script(&bench);
    emulated(&mut command);
    command.env("ONLY", "train").env("STEPS", "20");
    let child = command.spawn().expect("starts");
    let child = bench
        .until(child, "stage 0 has trained", || result(&bench, "metrics.jsonl").contains("stage-0.jsonl"));
    signal(child.id(), Signal::TERM);
    assert_eq!(bench.finish(child).code, Some(143));
    let lines = json_lines(&bench.path("results/metrics.jsonl"));
    for file in ["cpu.jsonl", "stage-0.jsonl"] {
        assert!(lines.iter().any(|line| line["file"] == file), "{lines:?}");
    }
    assert!(lines.iter().filter(|line| line["step"].is_number()).count() >= 40, "{lines:?}");
    bench.nothing_left();
}

#[test]
fn the_run_for_gpu_machines_says_that_there_is_none() {
    if !harness::installed("bash") {
        return;
    }
    if harness::nvidia_driver() {
        return harness::skip("a machine without a GPU: NVIDIA's driver is here");
    }
    let bench = bench();
    let outcome = bench.outcome(&mut script(&bench));
    assert_eq!(outcome.code, Some(3), "{}", outcome.stderr);
    for words in ["no GPU that can be used", "NVIDIA's driver was not found"] {
        assert!(outcome.stderr.contains(words), "{}", outcome.stderr);
    }
    assert!(!bench.path("results").exists());
}
