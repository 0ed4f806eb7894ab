//! `caravan doctor`: what a machine offers, and what would bring what is missing.

use crate::bench;

#[test]
fn doctor_says_what_there_is() {
    let bench = bench();
    let text = bench.run("doctor").success().stdout;
    assert!(text.contains("threads") && text.contains("memory"), "{text}");
    let json = bench.run("doctor --json").success().json();
    assert!(json["machine"]["cores"].as_u64().unwrap() >= 1);
    // What ranks compare is what is shown.
    let version = bench.run("--version").success().stdout;
    assert_eq!(version.trim(), format!("caravan {}", json["versions"]["caravan"].as_str().unwrap()));
    assert!(version.contains(" (") && version.trim().ends_with(')'), "{version}");
    let transports = json["transports"].as_array().unwrap();
    let usable =
        |name: &str| transports.iter().find(|t| t["name"] == name).unwrap()["usable"].as_bool().unwrap();
    assert!(usable("threads"));
    for row in transports.iter().filter(|row| row["usable"] == false) {
        assert!(!row["remark"].as_str().unwrap().is_empty(), "a reason in {row}");
    }
    let libraries = json["cuda"]["libraries"].as_array().unwrap();
    for name in ["driver", "NVRTC", "cuBLASLt", "NCCL"] {
        assert!(text.contains(name), "{text}");
        let row = libraries.iter().find(|row| row["name"] == name).unwrap();
        let word = |key: &str| row[key].as_str().is_some_and(|word| !word.is_empty());
        match row["usable"].as_bool().unwrap() {
            true => assert!(word("version") && word("file"), "{row}"),
            false => assert!(word("remark"), "{row}"),
        }
    }
    assert!(json["cuda"]["gpus"].is_array());
}

#[test]
fn doctor_says_which_rank_it_is() {
    let bench = bench();
    let doctor = |flags: &str, variables: &[(&str, &str)]| {
        let mut command = bench.command(&format!("doctor {flags}"));
        bench.outcome(command.envs(variables.iter().copied())).success()
    };
    let one =
        [("CARAVAN_RANK", "1"), ("CARAVAN_WORLD", "2"), ("CARAVAN_JOB", "j"), ("CARAVAN_TOKEN", "hush")];
    let json = doctor("--json", &one);
    assert!(!json.stdout.contains("hush"), "{}", json.stdout);
    let identity = &json.json()["identity"];
    assert_eq!(
        (&identity["rank"], &identity["world"], &identity["job"]),
        (&1.into(), &2.into(), &"j".into())
    );
    let said = doctor("", &one).stdout;
    assert!(
        said.contains("1 of 2, by whoever set CARAVAN_RANK, of job j\n") && !said.contains("hush"),
        "{said}"
    );
    assert!(doctor("", &one[..1]).stdout.contains("unknown: CARAVAN_RANK=1 is set but CARAVAN_WORLD is not"));
    let error = &doctor("--json", &one[..1]).json()["identity"]["error"];
    assert!(error.as_str().is_some_and(|why| why.contains("CARAVAN_WORLD is not")), "{error}");
    assert!(bench.run("doctor --json").success().json()["identity"].is_null());
}

#[test]
fn doctor_says_which_gpus_are_emulated() {
    let bench = bench();
    let doctor = |value: &str, flags: &str| {
        let mut command = bench.command(&format!("doctor {flags}"));
        bench.outcome(command.env("CARAVAN_EMULATED_DEVICE", value)).success()
    };
    let said = doctor("2,256M", "").stdout;
    assert!(said.contains("yes emulated 2 GPUs of 256.0 MiB each, which --device cuda takes"), "{said}");
    let json = doctor("2,256M", "--json").json();
    assert_eq!(
        (&json["cuda"]["emulated"]["gpus"], &json["cuda"]["emulated"]["memory"]),
        (&2.into(), &(256 << 20).into())
    );
    let said = doctor("none", "").stdout;
    assert!(said.contains("no  emulated CARAVAN_EMULATED_DEVICE=none: give a number"), "{said}");
    assert_eq!(doctor("none", "--json").json()["cuda"]["emulated"]["usable"], false);
    assert!(bench.run("doctor --json").success().json()["cuda"]["emulated"].is_null());
}

#[test]
fn doctor_sees_the_memory_that_a_control_group_grants() {
    let bench = bench();
    // As a batch system nests its jobs; version 1 and version 2 differ in the place.
    let run = format!(
        "group=/sys/fs/cgroup/memory; file=memory.limit_in_bytes
         [ -d $group ] || {{ group=/sys/fs/cgroup; file=memory.max; }}
         group=$group/caravan-$$; mkdir $group || exit 77
         (echo 1073741824 >$group/$file && echo $BASHPID >$group/cgroup.procs || exit 77; exec {} doctor --json)
         code=$?; rmdir $group; exit $code",
        env!("CARGO_BIN_EXE_caravan")
    );
    let mut command = std::process::Command::new("bash");
    command.args(["-c", &run]);
    bench.prepare(&mut command);
    let outcome = bench.outcome(&mut command);
    if outcome.code == Some(77) {
        return harness::skip(&format!(
            "no memory control group can be made here: {}",
            outcome.stderr.trim()
        ));
    }
    assert_eq!(outcome.success().json()["machine"]["cgroup_memory_bytes"], 1u64 << 30);
}

#[test]
fn doctor_says_what_brings_what_is_missing() {
    let bench = bench();
    // A folder whose libraries are none.
    for name in ["libcuda.so.1", "libnvrtc.so.13", "libcublasLt.so.13", "libnccl.so.2"] {
        bench.file(name, "no library");
    }
    let mut command = bench.command("doctor");
    command.env("CARAVAN_CUDA_LIBRARIES", bench.path("")).env("PATH", "/nowhere");
    let text = bench.outcome(&mut command).success().stdout;
    let line = |name: &str| {
        text.lines().find(|line| line.contains(name)).unwrap_or_else(|| panic!("{name}: {text}"))
    };
    for name in ["driver   ", "NVRTC", "cuBLASLt", "NCCL"] {
        let line = line(name);
        // Where the system has the real one, that is found first.
        assert!(line.contains("yes") || line.contains("cannot be opened"), "{line}");
    }
}
