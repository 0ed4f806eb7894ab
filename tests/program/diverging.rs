//! Losses, gradients and weights that are not finite: what is said of them, and what is kept.

use crate::bench;
use std::fs;

#[test]
fn a_model_that_is_not_finite_has_no_loss() {
    let bench = bench();
    bench.text("text.txt", 8000);
    let flags = "--steps 1 --micro-batch 1 --dtype f32 --sample 0 --quiet";
    bench.run(&format!("train --model nano --data text.txt {flags} --save m")).success();
    let path = bench.path("m/model.safetensors");
    let mut weights = fs::read(&path).unwrap();
    let half = weights.len() / 8 * 4;
    weights[half..].fill(0xff);
    fs::write(&path, weights).unwrap();
    bench.run("eval --model m --data text.txt --json").refusal(1, &["loss of m is NaN", "finite"]);
}

/// Nothing follows the last step but the evaluation that finds it out, and by then the model is saved.
#[test]
fn a_run_that_diverges_in_its_last_step_fails_and_says_what_its_model_is_worth() {
    let bench = bench();
    bench.text("text.txt", 8000);
    let train = "train --model nano --data text.txt --steps 1 --micro-batch 1 --lr 1e38 --clip 0 --sample 0 --save bad";
    for ranks in ["--ranks 2", "--ranks 2 --transport threads", "--ranks 1"] {
        let words = ["the loss of nano after step 1 is NaN", "--lr", "saved to bad may be of no use"];
        let trained = bench.run(&format!("{train} {ranks}")).refusal(1, &words);
        assert!(bench.path("bad/config.json").is_file() && !trained.stdout.contains("saved to"));
        let words = ["the loss of bad is NaN", "--dtype f32"];
        let evaluated = bench.run(&format!("eval --model bad --data text.txt {ranks}")).refusal(1, &words);
        // The next step finds it in its gradients.
        let longer = train.replace("--steps 1", "--steps 3").replace("--save bad", "--save none");
        let stopped =
            bench.run(&format!("{longer} {ranks}")).refusal(1, &["step 2", "gradient norm", "--lr"]);
        assert!(!bench.path("none").exists());
        // What a model is worth is no rank's fault.
        assert!([trained, evaluated, stopped].iter().all(|told| !told.stderr.contains("failed")));
        fs::remove_dir_all(bench.path("bad")).unwrap();
    }
    bench.nothing_left();
}

/// Nothing is updated by a step that fails for all ranks, so what was learnt until then can be kept.
#[test]
fn a_run_that_diverges_on_the_way_keeps_what_it_had_before() {
    let bench = bench();
    bench.text("text.txt", 8000);
    // After one such step weights are large and finite, and nothing that is computed with them is.
    let train = "train --model nano --data text.txt --micro-batch 1 --dtype f32 --schedule constant --warmup 0 --lr 1e15 \
                 --clip 0 --sample 0 --quiet";
    let weights = |dir: &str| fs::read(bench.path(dir).join("model.safetensors")).unwrap();
    bench.run(&format!("{train} --steps 1 --val-fraction 0 --save one")).success();
    let norm = "step 2: the global gradient norm is";
    for flags in ["--ranks 2", "--ranks 2 --transport threads --stage 0", "--ranks 1", "--ranks 3 --stage 1"]
    {
        let saved = |dir: &str| format!("; the weights after step 1 were saved to {dir}");
        bench.run(&format!("{train} {flags} --steps 3 --save norm")).refusal(1, &[norm, &saved("norm")]);
        let words = ["the loss of nano after step 1 is", "--lr", &saved("loss")];
        bench.run(&format!("{train} {flags} --steps 3 --eval-every 1 --save loss")).refusal(1, &words);
        assert!(weights("norm") == weights("loss"), "{flags}");
        for dir in ["norm", "loss"] {
            fs::remove_dir_all(bench.path(dir)).unwrap();
        }
    }
    bench.run(&format!("{train} --steps 3 --val-fraction 0 --save kept")).refusal(1, &[norm]);
    assert!(weights("kept") == weights("one"));
    // A directory that a script has made before is a place, and nothing that could be worth more.
    fs::create_dir(bench.path("made")).unwrap();
    let words = [norm, "; the weights after step 1 were saved to made"];
    bench.run(&format!("{train} --steps 3 --ranks 2 --save made")).refusal(1, &words);
    assert_eq!(fs::read_dir(bench.path("made")).unwrap().count(), 4);
    // Nothing that may be of no use takes the place of what is there.
    let words = [norm, "; kept was left as it was, because the weights after step 1 may be worth less"];
    bench.run(&format!("{train} --steps 3 --ranks 2 --save kept")).refusal(1, &words);
    assert!(weights("kept") == weights("one"));
    let ruined = train.replace("1e15", "1e38").replace("f32", "bf16");
    let words = [norm, "weights of nano after step 1 are not finite: nothing was saved"];
    bench.run(&format!("{ruined} --steps 3 --save kept")).refusal(1, &words);
    let from = train.replace("nano", "kept");
    let words = [
        "step 1: the global gradient norm is",
        "before any update: the weights are not all finite, or too large for f32 (--model)",
        "; nothing was trained, so nothing was saved",
    ];
    bench.run(&format!("{from} --steps 3 --save kept")).refusal(1, &words);
    assert!(weights("kept") == weights("one"));
    bench.nothing_left();
}

/// Where nothing is held out, no loss shows what the last update did.
#[test]
fn weights_that_the_last_update_ruined_are_no_success() {
    let bench = bench();
    bench.text("text.txt", 8000);
    let train = "train --model nano --data text.txt --order sequential --steps 1 --micro-batch 1 --warmup 0 --lr 1e38 \
                 --sample 0 --save bad";
    for ranks in ["--ranks 2", "--ranks 2 --transport threads", "--ranks 1"] {
        let words = [
            "of the 125248 weights of nano after step 1 are not finite",
            "--lr",
            "saved to bad may be of no use",
        ];
        let trained = bench.run(&format!("{train} {ranks}")).refusal(1, &words);
        assert!(bench.path("bad/config.json").is_file() && !trained.stdout.contains("saved to"));
        assert!(!trained.stderr.contains("failed"), "{}", trained.stderr);
        fs::remove_dir_all(bench.path("bad")).unwrap();
    }
    bench.nothing_left();
}

/// As those that a step on the way ruined do not: a model that has come to nothing takes the place of none.
#[test]
fn weights_that_the_last_update_ruined_leave_a_model_that_is_there() {
    let bench = bench();
    bench.text("text.txt", 8000);
    let train =
        "train --data text.txt --order sequential --steps 1 --micro-batch 1 --sample 0 --quiet --save kept";
    bench.run(&format!("{train} --model nano")).success();
    let weights = || fs::read(bench.path("kept/model.safetensors")).unwrap();
    let before = weights();
    let ruinous = format!("{train} --model kept --warmup 0 --lr 1e38 --metrics m.jsonl");
    for (flags, words) in [
        ("--ranks 2", ["weights of kept after step 1 are not finite", "; kept was left as it was"]),
        (
            "--ranks 2 --transport threads --val-fraction 0.2",
            ["the loss of kept", "; kept was left as it was"],
        ),
        ("--ranks 1", ["weights of kept after step 1 are not finite", "; kept was left as it was"]),
    ] {
        bench.run(&format!("{ruinous} {flags}")).refusal(1, &words);
        assert!(weights() == before, "{flags}");
    }
    bench.nothing_left();
}
