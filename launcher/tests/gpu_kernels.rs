//! `bench kernels` on emulated devices, on a driver that runs on the processor, and where there is neither.

mod devices;
mod fake;

use devices::{bench, can_emulate, emulated};
use fake::fake;
use harness::{Bench, Outcome, signal};
use rustix::process::Signal;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

fn kernels(bench: &Bench, flags: &str) -> Outcome {
    let mut command = bench.command(&format!("bench kernels {flags}"));
    emulated(&mut command);
    bench.outcome(&mut command)
}

#[test]
fn kernels_are_checked_and_timed() {
    if !can_emulate() {
        return;
    }
    let bench = bench();
    let text = kernels(&bench, "--check norm swiglu --json checks.json").success().stdout;
    for words in ["ok    norms", "ok    a residual is added", "ok    swiglu and its backward", "emulated"] {
        assert!(text.contains(words), "'{words}' is not in {text}");
    }
    assert!(!text.contains("WRONG") && !text.contains("adamw"), "{text}");
    let written = bench.json("checks.json");
    let checks = &written["checks"];
    assert!(written["model"].is_null(), "{written}");
    assert!(checks[0]["comparisons"].as_u64() > Some(10) && checks[0]["worst_16_bit"].as_f64() < Some(1e-2));

    let flags = "norm product --model nano --micro-batch 1 --seq 16 --json times.json";
    let text = kernels(&bench, flags).success().stdout;
    for words in ["norm backward, adding", "product gate 16 x 64 x 176", "GB/s", "of a copy", "TFLOP/s"] {
        assert!(text.contains(words), "'{words}' is not in {text}");
    }
    let written = bench.json("times.json");
    let times = &written["times"];
    assert_eq!(written["model"], "nano");
    assert!(times[0]["kernel"] == "copy" && times[0]["seconds"].as_f64() > Some(0.0), "{times}");
}

#[test]
fn what_cannot_be_checked_or_timed_is_refused() {
    let bench = bench();
    for (flags, words) in [
        ("pigeon", &["'pigeon'", "cross_entropy"][..]),
        ("--check pigeon", &["'pigeon'", "swiglu_and_its_backward"]),
        ("--model pigeon", &["'pigeon'", "llama-3.2-1b"]),
        ("--seq 0", &["--seq", "at least 1"]),
        ("--check norms --without pigeon", &["'pigeon'", "swiglu_and_its_backward"]),
        ("--check norms --without norm", &["--without norm leaves nothing"]),
        ("--json nowhere/x.json", &["nowhere/x.json"]),
    ] {
        kernels(&bench, flags).refusal(2, words);
    }
    if harness::nvidia_driver() {
        harness::skip("a missing driver: this machine has one");
    } else {
        bench.run("bench kernels").refusal(2, &["a GPU cannot be used", "NVIDIA's driver was not found"]);
    }
}

/// On a driver whose kernels do nothing, so that only products are right.
fn on_a_fake(bench: &Bench, folder: &Path, flags: &str, variable: (&str, &str)) -> Command {
    let mut command = bench.command(&format!("bench kernels {flags}"));
    command.env("CARAVAN_CUDA_LIBRARIES", folder).env("CARAVAN_CACHE", bench.path("cache"));
    command.env(variable.0, variable.1);
    command
}

/// What the file says of each case.
fn states(bench: &Bench) -> Vec<String> {
    let of = |row: &serde_json::Value| {
        format!("{} {}", row["case"].as_str().unwrap(), row["state"].as_str().unwrap())
    };
    bench.json("c.json")["checks"].as_array().expect("cases").iter().map(of).collect()
}

#[test]
fn a_kernel_that_ruins_the_device_costs_no_other_case_its_name() {
    let Some(folder) = fake() else { return };
    let bench = bench();
    let flags =
        "--check swiglu_and_its_backward rotary_embeddings products_of_every_orientation --json c.json";
    let mut command = on_a_fake(&bench, folder, flags, ("FAKE_CUDA_FAULT", "swiglu_forward"));
    let outcome = bench.outcome(&mut command);
    assert_eq!(outcome.code, Some(1), "{}{}", outcome.stdout, outcome.stderr);
    let text = &outcome.stdout;
    for words in [
        "WRONG rotary embeddings",
        "# swiglu and its backward ...\n",
        "WRONG swiglu and its backward",
        "a fake error",
        "products of every orientation: not run, the context is lost",
    ] {
        assert!(text.contains(words), "'{words}' is not in {text}");
    }
    assert!(outcome.stderr.contains("and 1 were not run"), "{}", outcome.stderr);
    let [ran, faulty, rest] =
        ["rotary_embeddings wrong", "swiglu_and_its_backward wrong", "products_of_every_orientation not run"];
    assert_eq!(states(&bench), [ran, faulty, rest]);

    // A whole model, whose kernels end in a panic.
    let flags = "--check an_f32_llama_with_tied_embeddings --json c.json";
    let mut command = on_a_fake(&bench, folder, flags, ("FAKE_CUDA_FAULT", "swiglu_forward"));
    let outcome = bench.outcome(&mut command);
    assert_eq!(outcome.code, Some(1), "{}{}", outcome.stdout, outcome.stderr);
    assert_eq!(states(&bench), ["an_f32_llama_with_tied_embeddings wrong"]);
    assert!(outcome.stdout.contains("a fake error"), "{}", outcome.stdout);

    // Times: the row says so, and what was timed before it stays.
    let flags = "rope swiglu product --model nano --micro-batch 1 --seq 16 --json times.json";
    let mut command = on_a_fake(&bench, folder, flags, ("FAKE_CUDA_FAULT", "swiglu_forward"));
    let outcome = bench.outcome(&mut command);
    assert_eq!(outcome.code, Some(1), "{}{}", outcome.stdout, outcome.stderr);
    assert!(outcome.stderr.contains("takes no more work"), "{}", outcome.stderr);
    let written = bench.json("times.json");
    let kernels: Vec<&str> =
        written["times"].as_array().unwrap().iter().map(|row| row["kernel"].as_str().unwrap()).collect();
    assert_eq!(kernels, ["copy", "rope of queries", "swiglu"]);
    assert!(written["times"][2]["wrong"].as_str().unwrap().contains("a fake error"), "{written}");
}

#[test]
fn a_kernel_that_hangs_is_known_by_name() {
    let Some(folder) = fake() else { return };
    let bench = bench();
    let flags =
        "--check swiglu_and_its_backward rotary_embeddings products_of_every_orientation --json c.json";
    let child =
        on_a_fake(&bench, folder, flags, ("FAKE_CUDA_HANG", "swiglu_forward")).spawn().expect("starts");
    let hangs = || {
        std::fs::read_to_string(bench.path("c.json")).is_ok_and(|text| text.contains("not ended"))
            && states(&bench)[1] == "swiglu_and_its_backward not ended"
    };
    let child = bench.until(child, "a kernel hangs", hangs);
    signal(child.id(), Signal::KILL);
    assert_eq!(bench.finish(child).code, None);
    let rest = ["swiglu_and_its_backward not ended", "products_of_every_orientation not run"];
    assert_eq!(states(&bench)[1..], rest);
    // So is one that is timed.
    let flags = "norm swiglu --model nano --micro-batch 1 --seq 16 --json t.json --without copy";
    let child =
        on_a_fake(&bench, folder, flags, ("FAKE_CUDA_HANG", "swiglu_forward")).spawn().expect("starts");
    let last = || {
        let text = std::fs::read_to_string(bench.path("t.json")).unwrap_or_default();
        let rows = serde_json::from_str::<serde_json::Value>(&text).unwrap_or_default()["times"].take();
        rows.as_array().into_iter().flatten().last().cloned().unwrap_or_default()
    };
    let child = bench.until(child, "a kernel that is timed hangs", || last()["kernel"] == "swiglu");
    signal(child.id(), Signal::KILL);
    assert_eq!(bench.finish(child).code, None);
    let swiglu = serde_json::json!({"kernel": "swiglu", "group": "swiglu", "state": "not ended"});
    assert_eq!(last(), swiglu);
    let written = bench.json("t.json");
    assert!(
        written["times"][0]["seconds"].is_number() && written["times"][1]["seconds"].is_number(),
        "{written}"
    );
}

#[test]
fn kernels_that_do_not_compile_keep_no_others_from_running() {
    let Some(folder) = fake() else { return };
    let bench = bench();
    let flags = "--check swiglu_and_its_backward products_of_every_orientation --json c.json";
    let mut command = on_a_fake(&bench, folder, flags, ("FAKE_NVRTC_REFUSE", "swiglu.cu"));
    let outcome = bench.outcome(&mut command);
    assert_eq!(outcome.code, Some(1), "{}{}", outcome.stdout, outcome.stderr);
    for words in ["compiling swiglu", "ok    products of every orientation", "not all of them"] {
        assert!(outcome.stdout.contains(words), "'{words}' is not in {}", outcome.stdout);
    }
    assert_eq!(states(&bench), ["swiglu_and_its_backward wrong", "products_of_every_orientation ok"]);
    let flags = "swiglu rope norm --model nano --micro-batch 1 --seq 16 --json times.json --without copy";
    let mut command = on_a_fake(&bench, folder, flags, ("FAKE_NVRTC_REFUSE", "swiglu.cu"));
    let outcome = bench.outcome(&mut command);
    assert_eq!(outcome.code, Some(1), "{}{}", outcome.stdout, outcome.stderr);
    assert!(outcome.stderr.contains("2 of 5 kernels could not be timed"), "{}", outcome.stderr);
    let written = bench.json("times.json");
    let timed = written["times"].as_array().unwrap().iter().filter(|row| row["seconds"].is_number());
    let groups: Vec<&str> = timed.map(|row| row["group"].as_str().unwrap()).collect();
    assert_eq!(groups, ["norm", "norm", "rope"]);
}

/// A compiler that notes which file of results is there when it is to compile a kernel for no case yet, and refuses.
const NOTES_RESULTS: &str = "#!/bin/sh
[ -e c.json ] || exec \"$REAL_CXX\" \"$@\"
grep -q 'not ended' c.json || stat -c %i c.json >>seen
exit 1
";

/// Who watches it would think that the program hangs.
#[test]
fn the_file_of_checks_is_written_anew_while_kernels_are_compiled() {
    let Some(real) = harness::cxx("bench kernels on emulated GPUs") else { return };
    let bench = bench();
    let compiler = bench.file("cxx", NOTES_RESULTS);
    std::fs::set_permissions(&compiler, std::fs::Permissions::from_mode(0o755)).unwrap();
    let cases = "norms rotary_embeddings swiglu_and_its_backward";
    let mut command = bench.command(&format!("bench kernels --check {cases} --json c.json"));
    command.env("CARAVAN_EMULATED_DEVICE", "1,256M").env("CARAVAN_CACHE", bench.path("cache"));
    command.env("CXX", compiler).env("REAL_CXX", real);
    let allowed = sched_getaffinity(None).expect("the processors of this test");
    let mut one = CpuSet::new();
    one.set((0..CpuSet::MAX_CPU).find(|&cpu| allowed.is_set(cpu)).expect("a processor"));
    // SAFETY: one system call.
    unsafe { command.pre_exec(move || Ok(sched_setaffinity(None, &one)?)) };
    bench.outcome(&mut command).refusal(1, &["3 of 3 checks of kernels failed"]);
    let seen = std::fs::read_to_string(bench.path("seen")).expect("files that were seen");
    let mut files: Vec<&str> = seen.lines().collect();
    files.dedup();
    assert!(files.len() >= 3, "nine modules, of which one processor compiles four at once: {seen}");
}

/// A compiler that refuses a source, for whichever elements: before all cases, when it takes the folder of results away, and
/// again in a case, when it puts that back.
const TAKES_AWAY: &str = "#!/bin/sh
elements=$5
case \"$*\" in *swiglu.cu*)
    if [ -e tried$elements ]; then mv gone out; else : >tried$elements; mv out gone; fi
    exit 1
esac
exec \"$REAL_CXX\" \"$@\"
";

#[test]
fn a_disk_that_is_full_for_a_moment_costs_no_result() {
    let Some(real) = harness::cxx("bench kernels on emulated GPUs") else { return };
    let bench = bench();
    let compiler = bench.file("cxx", TAKES_AWAY);
    std::fs::set_permissions(&compiler, std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::create_dir(bench.path("out")).unwrap();
    let mut command = bench.command("bench kernels --check swiglu_and_its_backward --json out/c.json");
    command.env("CARAVAN_EMULATED_DEVICE", "1,256M").env("CARAVAN_CACHE", bench.path("cache"));
    command.env("CXX", compiler).env("REAL_CXX", real);
    let outcome = bench.outcome(&mut command).refusal(1, &["1 of 1 checks of kernels failed"]);
    assert!(!outcome.stderr.contains("writing"), "{}", outcome.stderr);
    let written = bench.json("out/c.json");
    assert_eq!((&written["complete"], &written["checks"][0]["state"]), (&true.into(), &"wrong".into()));
}
