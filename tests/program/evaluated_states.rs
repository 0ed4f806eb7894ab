//! `caravan eval` of the states that `train --checkpoint` keeps.

use crate::bench;
use crate::saving::as_nobody;
use harness::Bench;
use serde_json::Value;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};

const EVAL: &str = "eval --data text.txt --seq 16";

/// Whose training keeps the states after steps 2 and 4.
fn trained() -> Bench {
    let bench = bench();
    bench.text("text.txt", 3000);
    bench
        .run(
            "train --model nano --data text.txt --seq 16 --micro-batch 1 --warmup 1 --sample 0 --quiet --ranks 2 \
             --steps 4 --checkpoint ckpt --checkpoint-every 2 --checkpoint-keep 2 --save saved",
        )
        .success();
    bench
}

#[test]
fn a_state_has_the_loss_of_its_weights() {
    let bench = trained();
    let eval = |model: &str| bench.run(&format!("{EVAL} --model {model} --json")).success().json();
    let mut losses = Vec::new();
    for (named, step) in [("ckpt", 4), ("ckpt/step-4", 4), ("ckpt/step-2/", 2)] {
        let place = format!("ckpt/step-{step}/weights");
        let (state, weights) = (eval(named), eval(&place));
        assert!(state["loss"].is_f64() && state["loss"] == weights["loss"], "{named}: {state} {weights}");
        assert_eq!((&state["step"], &weights["step"]), (&Value::from(step), &Value::Null), "{named}");
        let model = state["model"].as_str().expect("a name");
        assert_eq!(bench.path(model).canonicalize().unwrap(), bench.path(&place).canonicalize().unwrap());
        losses.push(state["loss"].clone());
    }
    assert!(losses[0] == losses[1] && losses[0] != losses[2], "{losses:?}");
    // In words too, where several ranks look for it by themselves.
    let said = bench.run(&format!("{EVAL} --model ckpt --ranks 2")).success().stdout;
    assert!(said.contains(") of ckpt/step-4 on "), "{said}");
    let said = bench.run(&format!("{EVAL} --model saved")).success().stdout;
    assert!(said.contains(") on "), "{said}");
    // States that lie in a model's directory are not what its name means.
    fs::rename(bench.path("ckpt/step-2"), bench.path("saved/step-2")).unwrap();
    assert_eq!(eval("saved")["step"], Value::Null);
    bench.nothing_left();
}

#[test]
fn a_state_that_is_not_whole_is_told_as_checkpoint_tells_it() {
    let bench = trained();
    let both = |named: &str, words: &str| {
        let looked = bench.run(&format!("checkpoint {named}")).refusal(2, &[words]);
        let evaluated = bench.run(&format!("{EVAL} --model {named}")).refusal(2, &[words]);
        assert_eq!(looked.stderr, evaluated.stderr);
    };
    for (file, words) in [
        ("weights/model.safetensors", "ckpt/step-4/weights"),
        ("second_moments/config.json", "ckpt/step-4/second_moments"),
        ("training.json", "ckpt/step-4: training.json: No such file"),
    ] {
        let (path, aside) = (bench.path("ckpt/step-4").join(file), bench.path("aside"));
        fs::rename(&path, &aside).unwrap();
        both("ckpt", words);
        both("ckpt/step-4", words);
        fs::rename(aside, path).unwrap();
    }
    symlink("/nonexistent/step-9", bench.path("ckpt/step-9")).unwrap();
    both("ckpt", "step-9: training.json: No such file");
    fs::remove_file(bench.path("ckpt/step-9")).unwrap();
    // What is neither a state nor a model.
    fs::create_dir(bench.path("empty")).unwrap();
    bench.run(&format!("{EVAL} --model empty")).refusal(2, &["empty", "has no config.json"]);
    bench
        .run(&format!("{EVAL} --model ckpt/step-9"))
        .refusal(2, &["ckpt/step-9 is not there", "--checkpoint"]);
    let allow = |path: &str, mode: u32| {
        fs::set_permissions(bench.path(path), Permissions::from_mode(mode)).unwrap();
    };
    allow(".", 0o755);
    for (mode, named) in [(0o111, "ckpt"), (0, "ckpt"), (0, "ckpt/step-4")] {
        allow("ckpt", mode);
        let Some(outcome) = as_nobody(&bench, &format!("{EVAL} --model {named}")) else { break };
        outcome.refusal(2, &[&format!("--model {named}: Permission denied")]);
    }
    allow("ckpt", 0o755);
    bench.nothing_left();
}
