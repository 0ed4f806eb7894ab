//! Where steps go, as `--trace` writes it.

use crate::bench;
use crate::disks::{CARAVAN, with_disk};
use harness::json_lines;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;

const TRAIN: &str = "train --model nano --data text.txt --seq 16 --micro-batch 2 --warmup 1 --sample 0";

/// Spans: rank, row, begin and end in microseconds, name.
fn spans(trace: &Value) -> Vec<(u64, u64, f64, f64, String)> {
    let events = trace["traceEvents"].as_array().expect("events").iter().filter(|event| event["ph"] == "X");
    events
        .map(|event| {
            let number = |name: &str| event[name].as_f64().expect("a number");
            let (pid, tid, begin) = (number("pid") as u64, number("tid") as u64, number("ts"));
            (pid, tid, begin, begin + number("dur"), event["name"].as_str().expect("a name").to_owned())
        })
        .collect()
}

#[test]
fn a_trace_has_the_steps_that_were_asked_for_of_every_rank() {
    let bench = bench();
    bench.text("text.txt", 6000);
    let losses = || -> Vec<(Value, Value)> {
        let lines = json_lines(&bench.path("m.jsonl"));
        let steps = lines.into_iter().filter(|line| line["step"].is_u64());
        steps.map(|line| (line["loss"].clone(), line["exposed_communication_seconds"].clone())).collect()
    };
    // Evaluations between them are no part of the steps.
    let flags = "--steps 6 --ranks 3 --accumulate 2 --eval-every 1 --metrics m.jsonl";
    bench.run(&format!("{TRAIN} {flags}")).success();
    let usual = losses();
    for (transport, stage) in [("shm", 3), ("threads", 1)] {
        let flags =
            format!("{flags} --transport {transport} --stage {stage} --trace t.json --trace-steps 2-4");
        let said = bench.run(&format!("{TRAIN} {flags}")).success().stderr;
        assert!(said.contains("trace of steps 2 to 4 in t.json: a step takes "), "{said}");
        let traced = losses();
        let loss = |all: &[(Value, Value)]| all.iter().map(|(loss, _)| loss.clone()).collect::<Vec<_>>();
        assert_eq!(loss(&usual), loss(&traced));

        let trace: Value = serde_json::from_str(&fs::read_to_string(bench.path("t.json")).unwrap()).unwrap();
        assert_eq!(trace["steps"], serde_json::json!([2, 4]));
        let all = spans(&trace);
        for rank in 0..3 {
            let mine: Vec<_> = all.iter().filter(|span| span.0 == rank).collect();
            let steps: Vec<_> = mine.iter().filter(|span| span.4.starts_with("step ")).collect();
            let names: Vec<&str> = steps.iter().map(|span| span.4.as_str()).collect();
            assert_eq!(names, ["step 2", "step 3", "step 4"], "rank {rank}");
            for (step, number) in steps.iter().zip(1..) {
                let mut within: BTreeMap<&str, (usize, f64)> = BTreeMap::new();
                for span in mine.iter().filter(|span| span.2 >= step.2 && span.3 <= step.3) {
                    let name = if span.1 == 0 { span.4.as_str() } else { span.4.split(' ').next().unwrap() };
                    let (count, sum) = within.entry(name).or_default();
                    (*count, *sum) = (*count + 1, *sum + span.3 - span.2);
                }
                for name in ["forward embed", "backward embed", "backward head"] {
                    assert_eq!(within.get(name).map(|found| found.0), Some(2), "{within:?}");
                }
                assert_eq!(within["update"].0, 1);
                // Rank 0 says how long it waited; what takes less than a microsecond is left out.
                let told = traced[number].1.as_f64().unwrap() * 1e6;
                let exposed = within["exposed communication"].1;
                assert!(rank > 0 || exposed <= told + 1.0, "{exposed} of {told} us");
            }
        }
        // Reductions of each unit and micro-batch, and of a step what it gathers, the norm's among it.
        let overlap = &trace["overlap"];
        let of = |kind: &str| {
            let found = overlap["of"].as_array().unwrap().iter().find(|calls| calls["calls"] == kind);
            found.unwrap_or_else(|| panic!("{kind} in {overlap}"))["calls_per_step"].as_f64().unwrap()
        };
        let units = 4.0;
        assert_eq!(of("reduce_scatter"), 2.0 * units, "{transport}");
        assert!(stage == 3 || of("all_gather") == units + 1.0, "{transport}, {overlap}");
        let seconds = |name: &str| overlap[name].as_f64().unwrap();
        assert!(seconds("exposed_seconds_per_step") <= seconds("seconds_per_step"), "{overlap}");
    }
    // An earlier one may go, and nothing else.
    bench.run(&format!("{TRAIN} --steps 1 --quiet --trace t.json")).success();
    bench.file("notes.json", "{}");
    let measure = "bench barrier --transport threads -n 1 -w 0 --json";
    bench.run(&format!("{measure} bench.json")).success();
    bench.run(&format!("{measure} t.json")).refusal(2, &["--json t.json", "would be lost"]);
    for (flags, words) in [
        ("--trace notes.json", &["--trace notes.json", "no trace of", "would be lost"][..]),
        ("--trace bench.json", &["--trace bench.json", "no trace of"]),
        ("--trace /dev/stdout", &["--trace /dev/stdout", "regular file"]),
        ("--trace text.txt", &["--trace text.txt", "which this run reads"]),
        ("--trace new.json --metrics ./new.json", &["--trace new.json", "--metrics is written there too"]),
        ("--trace out/t.json --save out", &["--trace out/t.json", "--save ", "replaces as a whole"]),
        ("--trace no/t.json", &["--trace no/t.json", "there is no directory no"]),
        ("--trace-steps 2", &["--trace-steps 2", "add that"]),
        ("--trace t.json --trace-steps 3-9", &["--trace-steps 3-9", "1-6"]),
    ] {
        bench.run(&format!("{TRAIN} --steps 6 {flags}")).refusal(2, words);
    }
    bench.nothing_left();
}

/// Whatever the length of what ranks tell each other for it: here some 2 KiB a step.
#[test]
fn a_trace_takes_nothing_that_was_not_planned() {
    let bench = bench();
    bench.text("text.txt", 5000);
    let train = "train --model baby --data text.txt --ranks 2 --micro-batch 1 --seq 16 --steps 3 --sample 0 --quiet \
                 --val-fraction 0 --metrics m.jsonl";
    for steps in ["2-2", "1-3"] {
        bench.run(&format!("{train} --trace t.json --trace-steps {steps}")).success();
        let lines = json_lines(&bench.path("m.jsonl"));
        let summary = &lines[lines.len() - 1]["summary"];
        for rank in summary["ranks"].as_array().expect("ranks") {
            assert_eq!(rank["memory"]["total"], rank["predicted_bytes"], "--trace-steps {steps}: {rank}");
        }
        assert_eq!(summary["ranks"][0]["memory"], summary["predicted_memory"], "--trace-steps {steps}");
    }
    bench.nothing_left();
}

/// A job that is started again has the command that it had the first time.
#[test]
fn a_training_that_goes_on_traces_what_is_left_to_make() {
    let bench = bench();
    bench.text("text.txt", 6000);
    let run = |steps: usize, flags: &str| {
        let ended =
            bench.run(&format!("{TRAIN} --checkpoint ckpt --resume --trace t.json --steps {steps} {flags}"));
        let ended = ended.success().stderr;
        let traced = fs::read_to_string(bench.path("t.json")).ok().map(|text| {
            fs::remove_file(bench.path("t.json")).unwrap();
            let trace: Value = serde_json::from_str(&text).expect("JSON");
            let names = spans(&trace).into_iter().map(|(.., name)| name);
            let steps: BTreeSet<String> = names.filter(|name| name.starts_with("step ")).collect();
            steps.into_iter().collect::<Vec<_>>()
        });
        (ended, traced)
    };
    let of = |steps: &[&str]| Some(steps.iter().map(|step| format!("step {step}")).collect::<Vec<_>>());
    assert_eq!(run(4, "--trace-steps 2-3").1, of(&["2", "3"]));
    // The later ones of those that were asked for.
    assert_eq!(run(6, "--trace-steps 3-5").1, of(&["5"]));
    for (steps, flags) in [(8, "--trace-steps 3-5"), (8, ""), (8, "--trace-steps 8")] {
        let (said, traced) = run(steps, flags);
        let words = "no trace is written to t.json: it is of steps that were made before";
        assert!(traced.is_none() && said.contains(words), "{flags}: {said}");
    }
    bench.nothing_left();
}

/// A disk that is full costs the trace, and neither the run nor its model.
#[test]
fn a_trace_that_cannot_be_written_costs_no_model() {
    let bench = bench();
    bench.text("text.txt", 6000);
    let run = format!(
        "{CARAVAN} {TRAIN} --steps 8 --trace disk/t.json --save out; code=$?; ls -A disk; test -e out/config.json; \
         echo model $?; exit $code"
    );
    let Some(outcome) = with_disk(&bench, "8k", &run) else { return };
    let outcome = outcome.refusal(1, &["disk/t.json", "No space left", "the run went on without a trace"]);
    assert!(
        outcome.stdout.contains("8 steps, ") && outcome.stdout.ends_with("model 0\n"),
        "{}",
        outcome.stdout
    );
    bench.nothing_left();
}
