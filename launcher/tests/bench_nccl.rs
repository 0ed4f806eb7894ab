//! `bench --transport nccl` on a driver and an NCCL that run on the processor, whose ranks are threads: that it goes
//! through, finds every element right, and says what it measured. Times mean nothing there.

mod fake;

use fake::fake;
use harness::Bench;
use std::path::Path;

fn run(bench: &Bench, folder: &Path, flags: &str) -> harness::Outcome {
    let mut command = bench.command(&format!("bench {flags}"));
    command.env("CARAVAN_CUDA_LIBRARIES", folder).env("CARAVAN_CACHE", bench.path("cache"));
    bench.outcome(&mut command)
}

#[test]
fn every_operation_between_gpus_is_measured_and_right() {
    let Some(folder) = fake() else { return };
    let bench = Bench::new(env!("CARGO_BIN_EXE_caravan"));
    for (operation, algorithm) in [
        ("all_reduce", "native, as asked for"),
        ("reduce_scatter", "native, as asked for"),
        ("all_gather", "native, NCCL's own"),
        ("broadcast", "native, NCCL's own"),
        ("reduce", "native, as asked for"),
        ("gather", "grouped"),
        ("scatter", "grouped"),
        ("all_to_all", "grouped"),
        ("send_recv", "grouped"),
    ] {
        let flags = format!("{operation} -b 64 -e 4K -f 8 -n 5 -d int32 --algo native --ranks 3");
        let text = run(&bench, folder, &format!("{flags} --transport nccl+threads")).success().stdout;
        for word in ["transport nccl 2.30", "Fake GPU 2", "between events", algorithm, ": 0 OK"] {
            assert!(text.contains(word), "{operation}: '{word}' is not in {text}");
        }
    }
    let flags =
        "all_reduce -b 64 -e 64 -n 3 -R 0 --algo native --ranks 2 --transport nccl+threads --json r.json";
    run(&bench, folder, flags).success();
    let json: serde_json::Value = bench.json("r.json");
    let library = json["transport_library"].as_str().unwrap_or_default();
    assert!(library.starts_with("NCCL 2.30"), "{json}");
    assert!(json["nccl_version"].as_u64().is_some_and(|number| number / 100 == 230), "{json}");
    assert_eq!(json["config"]["registered_buffers"], false);
    for blocking in 1..=3 {
        let flags =
            format!("all_reduce -b 64 -e 64 -n 3 -z {blocking} -m 2 -d float --algo native --ranks 2");
        let text = run(&bench, folder, &format!("{flags} --transport nccl+threads")).success().stdout;
        assert!(text.contains(": 0 OK") && !text.contains("between events"), "{text}");
    }
}

/// Whether an environment says so, or a file of settings, which the fake one has read.
#[test]
fn no_call_waits_for_peers_without_an_end() {
    let Some(folder) = fake() else { return };
    let bench = Bench::new(env!("CARGO_BIN_EXE_caravan"));
    let run = |variable: &str| {
        let mut command =
            bench.command("bench all_gather -b 64 -e 64 -n 2 --ranks 2 --transport nccl+threads");
        command.env("CARAVAN_CUDA_LIBRARIES", folder).env("CARAVAN_CACHE", bench.path("cache"));
        bench.outcome(command.env(variable, "1"))
    };
    run("FAKE_NCCL_WAITS").success();
    let said = run("NCCL_COMM_BLOCKING");
    assert!(
        said.code != Some(0) && said.stderr.contains("NCCL_COMM_BLOCKING=1 lets its calls wait"),
        "{}",
        said.stderr
    );
}

#[test]
fn a_table_of_the_environment_is_none_of_nccls() {
    let Some(folder) = fake() else { return };
    let bench = Bench::new(env!("CARGO_BIN_EXE_caravan"));
    bench.file("t.txt", "caravan-tuning 1\nshm 2 all_reduce all direct-read-all direct-read-all\n");
    let mut command = bench.command("bench all_gather -b 64 -e 64 -n 2 --ranks 3 --transport nccl+threads");
    command.env("CARAVAN_CUDA_LIBRARIES", folder).env("CARAVAN_CACHE", bench.path("cache"));
    command.env("CARAVAN_TUNING", "t.txt");
    bench.outcome(&mut command).success();
}

#[test]
fn what_cannot_be_between_gpus_is_refused() {
    let Some(folder) = fake() else { return };
    let bench = Bench::new(env!("CARGO_BIN_EXE_caravan"));
    for (flags, words) in [
        ("barrier --transport nccl+threads", &["barrier", "GPU"][..]),
        ("all_reduce -R 1 --transport nccl+threads", &["-R 1", "registered with NCCL", "take -R 0"]),
        ("all_reduce --algo ring --transport nccl+threads", &["--algo ring", "auto", "native"]),
        ("overlap reduce_scatter --transport nccl+threads", &["bench overlap", "--transport threads"]),
        ("all_reduce --share-gpus --transport threads", &["--share-gpus", "--transport nccl"]),
        ("all_reduce --transport nccl+pigeon", &["'pigeon'", "shm"]),
    ] {
        run(&bench, folder, flags).refusal(2, words);
    }
    let mut command = bench.command("train --model nano --data random --steps 1 --transport nccl+threads");
    command.env("CARAVAN_CUDA_LIBRARIES", folder);
    let refused = bench.outcome(&mut command);
    refused.refusal(2, &["--transport nccl", "add --device cuda"]);
    // More ranks than the eight GPUs.
    let text = run(&bench, folder, "all_gather -b 1K -e 1K -n 2 --ranks 9 --transport nccl+threads");
    text.refusal(2, &["9 ranks on 8 GPUs", "--share-gpus"]);
}

#[test]
fn without_a_driver_it_says_what_is_missing() {
    let bench = Bench::new(env!("CARGO_BIN_EXE_caravan"));
    if harness::nvidia_driver() {
        return harness::skip("bench over NCCL without a driver: there is one");
    }
    let outcome = bench.run("bench all_reduce --transport nccl");
    outcome.refusal(2, &["transport nccl cannot be used", "NVIDIA's driver was not found", "install"]);
    bench.nothing_left();
}
