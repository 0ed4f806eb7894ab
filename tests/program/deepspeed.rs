//! DeepSpeed's configurations in place of flags.

use crate::bench;
use harness::{Bench, json_lines};
use serde_json::{Value, json};

/// Small enough for every test.
const SMALL: &str =
    "--model nano --seq 16 --data random --steps 4 --sample 0 --threads 1 --transport threads";

/// Losses, norms and rates of a run that has left its metrics.
fn steps(bench: &Bench) -> Vec<Value> {
    let lines = json_lines(&bench.path("m.jsonl"));
    let steps = lines.iter().filter(|line| line["step"].is_u64());
    steps.map(|line| json!([line["loss"], line["grad_norm"], line["lr"], line["tokens"]])).collect()
}

#[test]
fn a_configuration_trains_as_the_flags_that_it_stands_for() {
    let bench = bench();
    let config = json!({
        "train_batch_size": 12, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5, "bf16": {"enabled": true},
        "zero_optimization": {
            "stage": 2, "reduce_bucket_size": 5e3, "contiguous_gradients": true, "overlap_comm": true,
            "offload_optimizer": {"device": "cpu", "pin_memory": true}
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.8, 0.95], "weight_decay": 0.02}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": 6, "warmup_max_lr": 0.01, "warmup_num_steps": 2, "warmup_type": "linear"}
        },
        "steps_per_print": 10, "_note": "from a model's README"
    });
    bench.file("ds.json", config.to_string());
    let outcome =
        bench.run(&format!("train {SMALL} --ranks 2 --metrics m.jsonl --deepspeed ds.json")).success();
    for words in [
        "ZeRO stage 2, bf16\n",
        "4 steps of 2 ranks x 2 micro-batches x 3 sequences x 16 tokens\n",
        "ds.json: honoured: train_batch_size 12 as 3 sequences x 2 micro-batches x 2 ranks, gradient_clipping as --clip 0.5",
        "optimizer.params.weight_decay as --weight-decay 0.02 (of matrices and embeddings: norms have none)",
        "ds.json: what there is anyway: optimizer.type\n",
        "ds.json: DeepSpeed's defaults of what it does not say: --eps 1e-8, --warmup-from 0\n",
        "ds.json: ignored zero_optimization.contiguous_gradients: gradients are always contiguous\n",
        "ds.json: ignored zero_optimization.offload_optimizer.device: with --device cpu all is in memory of the host anyway\n",
        "ds.json: ignored steps_per_print: ",
    ] {
        assert!(outcome.stderr.contains(words), "'{words}' is not in {}", outcome.stderr);
    }
    let by_file = steps(&bench);
    let run = &json_lines(&bench.path("m.jsonl"))[0]["run"];
    assert_eq!(
        (&run["deepspeed"]["flags"]["--stage"], &run["deepspeed"]["train_batch_size"]),
        (&json!("2"), &json!(12))
    );
    assert_eq!(
        (&run["micro_batch"], &run["schedule"], &run["schedule_steps"]),
        (&json!(3), &json!("WarmupDecayLR"), &json!(6))
    );
    let flags = "--accumulate 2 --micro-batch 3 --clip 0.5 --dtype bf16 --stage 2 --bucket-size 10000 --lr 0.01 --beta1 0.8 \
                 --beta2 0.95 --eps 1e-8 --weight-decay 0.02 --schedule WarmupDecayLR --schedule-steps 6 --warmup 2";
    bench.run(&format!("train {SMALL} --ranks 2 --metrics m.jsonl {flags} --quiet")).success();
    assert_eq!((by_file.len(), &by_file), (4, &steps(&bench)));
    let rates: Vec<_> = steps(&bench).iter().map(|step| step[2].as_f64().unwrap()).collect();
    assert_eq!(rates, [0.0, 0.0, 0.005, 0.01]);
    assert_eq!(json_lines(&bench.path("m.jsonl"))[0]["run"]["deepspeed"], json!(null));
    // Processes read it for themselves.
    let processes = SMALL.replace("--transport threads", "--transport shm");
    bench
        .run(&format!("train {processes} --ranks 2 --metrics m.jsonl --deepspeed ds.json --quiet"))
        .success();
    assert_eq!(by_file, steps(&bench));
    bench.nothing_left();
}

#[test]
fn a_configuration_that_does_not_fit_is_wrong_usage() {
    let bench = bench();
    bench.file(
        "ds.json",
        r#"{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 4,
            "bf16": {"enabled": true}, "zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"eps": 0}}}"#,
    );
    bench.file("odd.json", r#"{"zero_optimization": {"stge": 2}}"#);
    for (flags, words) in [
        (
            "--ranks 2 --deepspeed ds.json",
            &[
                "ds.json: train_batch_size 64",
                "16 x",
                "4 x 2 ranks",
                "make 128: take --ranks 1, or take train_batch_size 128",
            ][..],
        ),
        (
            "--ranks 1 --deepspeed ds.json --micro-batch 8",
            &[
                "--micro-batch 8, and ds.json says train_micro_batch_size_per_gpu 16",
                "say it in one place, or \"auto\" there",
            ],
        ),
        (
            "--ranks 1 --deepspeed-config ds.json",
            &["--eps 0: ", "(--eps is optimizer.params.eps of ds.json)"],
        ),
        ("--deepspeed_config odd.json", &["odd.json: zero_optimization.stge", "zero_optimization.stage"]),
        ("--deepspeed none.json", &["--deepspeed none.json: ", "No such file"]),
    ] {
        bench.run(&format!("train {SMALL} {flags}")).refusal(2, words);
        bench.run(&format!("plan --model nano --seq 16 {flags}")).refusal(2, words);
    }
    bench
        .run("sbatch --nodes 2 -- train --deepspeed ds.json")
        .refusal(2, &["x 2 ranks", "start 1 rank, or take train_batch_size 128"]);
    bench.nothing_left();
}

#[test]
fn a_plan_takes_a_configuration_and_says_what_becomes_of_it() {
    let bench = bench();
    bench.file(
        "ds.json",
        r#"{"train_batch_size": 48, "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": true},
            "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 0}}"#,
    );
    let outcome = bench.run("plan --model nano --seq 16 --ranks 4 --deepspeed ds.json").success();
    for words in [
        "a step of 3 micro-batches x 4 sequences x 16 tokens",
        "ds.json: honoured: train_batch_size 48 as 4 sequences x 3 micro-batches x 4 ranks, ",
        "zero_optimization.stage3_prefetch_bucket_size as --prefetch off",
    ] {
        assert!(outcome.stdout.contains(words), "'{words}' is not in {}", outcome.stdout);
    }
    let outcome = bench.run("plan --json --model nano --seq 16 --ranks 4 --deepspeed ds.json").success();
    let plan = outcome.json();
    assert_eq!((&plan["accumulate"], &plan["deepspeed"]["flags"]["--prefetch"]), (&json!(3), &json!("off")));
    let outcome = bench.run("plan --json --model nano --seq 16 --ranks 4").success();
    assert_eq!(outcome.json()["deepspeed"], json!(null));
}

/// With as many ranks, and no other flag that says what a file is for.
#[test]
fn what_users_copy_trains_as_it_is() {
    let bench = bench();
    for (name, ranks, batch) in [
        ("zero2_offload.json", 1, "1 rank x 4 micro-batches x 16 sequences x 8 tokens"),
        ("zero3_offload.json", 2, "2 ranks x 16 micro-batches x 8 sequences x 8 tokens"),
    ] {
        let Some(path) = harness::shared(&format!("configs/{name}")) else { continue };
        let small = SMALL.replace("--seq 16", "--seq 8").replace("--steps 4", "--steps 1");
        let outcome =
            bench.run(&format!("train {small} --ranks {ranks} --deepspeed {}", path.display())).success();
        assert!(outcome.stderr.contains(batch) && outcome.stderr.contains("f16"), "{}", outcome.stderr);
    }
    bench.nothing_left();
}
