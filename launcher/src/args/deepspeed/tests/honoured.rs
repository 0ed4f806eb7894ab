//! What becomes of what a file says.

use super::*;

#[test]
fn what_users_copy_becomes_flags() {
    assert_eq!(said(ZERO2_OFFLOAD, ""), "--clip=1 --stage=2 --dtype=f16 --micro-batch=16 --accumulate=4");
    assert_eq!(
        said(ZERO2_OFFLOAD, "--device cuda"),
        "--clip=1 --stage=2 --dtype=f16 --offload=optimizer --micro-batch=16 --accumulate=4"
    );
    assert_eq!(
        said(ZERO3_OFFLOAD, "--micro-batch 4"),
        "--clip=1 --stage=3 --dtype=f16 \
         --loss-scale=initial=65536,window=1000,hysteresis=2,min=1,consecutive=off --bucket-size=1000000000 --accumulate=16"
    );
    let told = refusal(ZERO3_OFFLOAD, "--device cuda");
    assert!(
        told.starts_with(
            "ds.json: zero_optimization.offload_param.device \"cpu\" is not supported with --device cuda"
        ),
        "{told}"
    );
    for (name, inline) in [("zero2_offload.json", ZERO2_OFFLOAD), ("zero3_offload.json", ZERO3_OFFLOAD)] {
        let Some(path) = harness::shared(&format!("configs/{name}")) else { continue };
        assert_eq!(read(&fs::read_to_string(path).unwrap(), ""), read(inline, ""));
    }
}

#[test]
fn nothing_of_a_file_is_passed_over_in_silence() {
    fn paths(value: &Value, above: &str, all: &mut Vec<String>) {
        let Value::Object(block) = value else { return all.push(above.to_owned()) };
        for (key, value) in block {
            paths(value, &if above.is_empty() { key.clone() } else { format!("{above}.{key}") }, all);
        }
    }
    for config in [
        ZERO2_OFFLOAD,
        ZERO3_OFFLOAD,
        EVERYTHING,
        r#"{"train_batch_size": "auto", "fp16": {"enabled": "auto", "loss_scale": "auto", "hysteresis": "auto"},
            "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto",
            "offload_optimizer": {"device": "auto"}, "stage3_prefetch_bucket_size": "auto"},
            "gradient_clipping": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto",
            "eps": "auto", "weight_decay": "auto"}}, "communication_data_type": "auto",
            "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_min_lr": "auto",
            "warmup_max_lr": "auto", "warmup_num_steps": "auto", "warmup_type": "auto"}}}"#,
        r#"{"fp16": {"enabled": false, "loss_scale": 0, "hysteresis": 3}, "bf16": {"enabled": false},
            "communication_data_type": null, "zero_optimization": {"cpu_offload": false, "cpu_offload_param": true},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": null}}}"#,
        r#"{"fp16": {"enabled": true, "loss_scale": 128, "hysteresis": 3}, "zero_optimization": true}"#,
    ] {
        let file = read(config, "").unwrap();
        let told = &file.told;
        let mut all: Vec<&str> = told.words.iter().flat_map(|word| word.key.split(", ")).collect();
        all.extend(told.same.iter().chain(&told.left).map(String::as_str));
        all.extend(told.ignored.iter().flat_map(|(_, keys)| keys).map(String::as_str));
        all.extend(file.batch.all.map(|_| "train_batch_size"));
        let mut there = Vec::new();
        paths(&serde_json::from_str(config).unwrap(), "", &mut there);
        for path in there {
            // Of a block that is off, or changes nothing, nobody needs to know more.
            let above = path.split('.').next().unwrap_or_default();
            assert!(
                all.contains(&&*path) || all.contains(&above),
                "{path} of {config} is told nowhere: {told:?}"
            );
        }
        // Nor twice.
        let mut keys: Vec<_> = told.same.iter().chain(&told.left).collect();
        keys.sort();
        assert!(keys.windows(2).all(|pair| pair[0] != pair[1]), "{keys:?}");
    }
}

const EVERYTHING: &str = r#"{
  "train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2,
  "steps_per_print": 10, "gradient_clipping": 0.5, "bf16": {"enabled": true, "check_grad_overflow": true},
  "fp16": {"enabled": false, "loss_scale": 0}, "communication_data_type": "bf16",
  "data_types": {"grad_accum_dtype": "fp32"}, "prescale_gradients": false, "gradient_predivide_factor": 1.0,
  "optimizer": {"type": "Adam", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-9, "weight_decay": 0.01,
    "torch_adam": true, "adam_w_mode": true, "bias_correction": true}},
  "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 100, "warmup_num_steps": 10,
    "warmup_min_ratio": 0.1, "cos_min_ratio": 0.05, "warmup_type": "linear"}},
  "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 0, "reduce_bucket_size": 5e6,
    "zero_hpz_partition_size": 1, "offload_param": {"device": "none"}, "offload_optimizer": {"device": "none"}},
  "tensorboard": {"enabled": true, "output_path": "out"}, "wall_clock_breakdown": true,
  "activation_checkpointing": {"partition_activations": false, "number_checkpoints": 4},
  "aio": {"block_size": 1048576}, "elasticity": {"enabled": false}
}"#;

#[test]
fn every_value_that_is_honoured_becomes_its_flag() {
    assert_eq!(
        said(EVERYTHING, ""),
        "--clip=0.5 --eps=1e-9 --stage=3 --dtype=bf16 --bucket-size=10000000 --prefetch=off --beta1=0.9 --beta2=0.95 \
         --weight-decay=0.01 --lr=0.0003 --schedule=WarmupCosineLR --warmup=10 --warmup-shape=linear --schedule-steps=100 \
         --warmup-from=2.9999999999999997e-5 --min-lr=1.4999999999999999e-5 --micro-batch=4 --accumulate=2"
    );
    let args = train(EVERYTHING, "--steps 50").unwrap();
    assert_eq!(
        (args.micro_batch, args.accumulate, args.stage.as_str(), args.dtype),
        (4, 2, "3", Precision::Bf16)
    );
    let resolved = args.for_ranks(4, false).unwrap();
    assert_eq!((resolved.micro_batch, resolved.accumulate), (4, 2));
    let told = args.for_ranks(3, false).unwrap_err().to_string();
    assert!(told.contains("which make 24: take --ranks 4, or take train_batch_size 24"), "{told}");
}

#[test]
fn deepspeeds_defaults_hold_where_neither_the_file_nor_a_flag_says_something() {
    // Without a block of the optimizer or of the schedule, those are the flags' own, as another client's would be.
    assert_eq!(words("{}", ""), "--stage=0 --dtype=f32 --clip=1");
    assert_eq!(words("{}", "--stage 2 --dtype bf16 --clip 3"), "");
    assert_eq!(
        words(r#"{"optimizer": {"type": "AdamW"}}"#, ""),
        "--stage=0 --dtype=f32 --beta1=0.9 --beta2=0.999 --eps=1e-8 --weight-decay=0 --lr=0.001 --clip=1"
    );
    assert_eq!(
        words(r#"{"optimizer": {"type": "AdamW"}}"#, "--lr 1e-4 --beta2 0.95"),
        "--stage=0 --dtype=f32 --beta1=0.9 --eps=1e-8 --weight-decay=0 --clip=1"
    );
    // PyTorch's own has another.
    let torch = words(r#"{"optimizer": {"type": "AdamW", "params": {"torch_adam": true}}}"#, "");
    assert!(torch.contains("--weight-decay=0.01"), "{torch}");
    assert_eq!(words(r#"{"zero_optimization": true, "fp16": {}}"#, ""), "--stage=1 --dtype=f32 --clip=1");
    // "auto" is what the flags say.
    let auto = r#"{"zero_optimization": {"stage": "auto"}, "bf16": {"enabled": "auto"}, "gradient_clipping": "auto"}"#;
    assert_eq!(words(auto, ""), "");
}

/// As transformers' documentation has it, whose trainer fills in what is "auto".
#[test]
fn what_another_trainer_would_fill_in_is_left_to_the_flags() {
    let config = r#"{
      "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
        "min_loss_scale": 1},
      "bf16": {"enabled": "auto"},
      "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
      "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
        "warmup_num_steps": "auto"}},
      "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": true},
        "offload_param": {"device": "cpu", "pin_memory": true}, "overlap_comm": true, "contiguous_gradients": true,
        "sub_group_size": 1e9, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": true},
      "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
      "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false
    }"#;
    assert_eq!(words(config, ""), "--stage=3 --schedule=WarmupLR --warmup-shape=log");
    let args = train(config, "--lr 2e-5 --warmup 10 --micro-batch 2 --steps 100").unwrap();
    assert_eq!((args.lr.to_string().as_str(), args.warmup, args.micro_batch), ("2e-5", Some(10), 2));
    assert!(crate::plan::check_anywhere(&args, 2).is_ok());
}

#[test]
fn schedules_become_flags_with_deepspeeds_defaults() {
    let of = |kind: &str, params: &str, flags: &str| {
        let config = format!(
            r#"{{"zero_optimization": {{"stage": 0}}, "bf16": {{"enabled": true}}, "gradient_clipping": 1.0,
                "scheduler": {{"type": "{kind}", "params": {{{params}}}}}}}"#
        );
        let all = words(&config, flags);
        all.split_once("--dtype=bf16 ").unwrap().1.to_owned()
    };
    assert_eq!(
        of("WarmupLR", "", ""),
        "--schedule=WarmupLR --warmup=1000 --warmup-shape=log --warmup-from=0"
    );
    assert_eq!(
        of("WarmupLR", r#""warmup_max_lr": 0.01, "warmup_min_lr": 1e-5, "warmup_num_steps": 5"#, ""),
        "--lr=0.01 --schedule=WarmupLR --warmup=5 --warmup-shape=log --warmup-from=1e-5"
    );
    assert_eq!(
        of("WarmupLR", r#""warmup_num_steps": 0"#, ""),
        "--schedule=WarmupLR --warmup=0 --warmup-shape=log --warmup-from=0"
    );
    // Which has a highest rate of its own.
    assert_eq!(
        of("WarmupDecayLR", r#""total_num_steps": 100, "warmup_type": "linear""#, ""),
        "--lr=0.001 --schedule=WarmupDecayLR --warmup=1000 --warmup-shape=linear --schedule-steps=100 --warmup-from=0"
    );
    assert_eq!(
        of(
            "WarmupDecayLR",
            r#""total_num_steps": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto""#,
            ""
        ),
        "--schedule=WarmupDecayLR --warmup-shape=log --warmup-from=0"
    );
    // Parts of the rate that the flags have.
    assert_eq!(
        of("WarmupCosineLR", r#""total_num_steps": 100, "warmup_min_ratio": 0.25"#, "--lr 0.5 --warmup 3"),
        "--schedule=WarmupCosineLR --warmup-shape=log --schedule-steps=100 --warmup-from=0.125 --min-lr=5e-5"
    );
    let file = r#"{"optimizer": {"type": "AdamW", "params": {"lr": 1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01}}}"#;
    let ignored = read(file, "").unwrap().told.ignored;
    assert_eq!(ignored[0].1, ["optimizer.params.lr"]);
}

#[test]
fn losses_are_scaled_as_the_file_says() {
    let of = |fp16: &str| {
        let all = said(&format!(r#"{{"fp16": {{"enabled": true{fp16}}}}}"#), "");
        all.replace("--dtype=f16", "").trim().to_owned()
    };
    assert_eq!(of(""), "");
    assert_eq!(of(r#", "loss_scale": 0"#), "--loss-scale=dynamic");
    assert_eq!(of(r#", "loss_scale": 1024.0, "hysteresis": 4"#), "--loss-scale=1024");
    assert_eq!(
        of(r#", "initial_scale_power": 4, "loss_scale_window": 500, "consecutive_hysteresis": true"#),
        "--loss-scale=initial=16,window=500,hysteresis=2,min=1,consecutive=on"
    );
    assert_eq!(said(r#"{"fp16": {"enabled": false, "initial_scale_power": 4}}"#, ""), "--dtype=f32");
    // As DeepSpeed checks those only that it uses.
    assert_eq!(
        of(r#", "loss_scale": 128, "min_loss_scale": 0, "initial_scale_power": 200"#),
        "--loss-scale=128"
    );
    for unused in [
        r#"{"bf16": {"enabled": true}, "fp16": {"enabled": false, "loss_scale_window": 0}}"#,
        r#"{"bf16": {"enabled": true}, "fp16": {"initial_scale_power": 200, "hysteresis": 99999999999}}"#,
    ] {
        let file = read(unused, "").unwrap();
        assert!(file.told.ignored.iter().any(|(why, _)| why == "losses are scaled in f16 only"), "{unused}");
    }
    // Which goes on where this would not.
    let fixed = read(r#"{"fp16": {"enabled": true, "loss_scale": 128}}"#, "").unwrap();
    let words = "fp16.loss_scale as --loss-scale 128 (two overflows in a row end the run, where DeepSpeed goes on skipping, \
                 and it multiplies the mean over all ranks, not each rank's own loss)";
    assert!(fixed.lines((1, 1), 1).contains(words));
    for (fp16, word) in [(r#""loss_scale": 0"#, "dynamic"), (r#""initial_scale_power": 4"#, "initial=16,")] {
        let scaled = read(&format!(r#"{{"fp16": {{"enabled": true, {fp16}}}}}"#), "").unwrap();
        let told = scaled.lines((1, 1), 1);
        let words = "(it multiplies the mean over all ranks, not each rank's own loss)";
        assert!(told.contains(&format!("--loss-scale {word}")) && told.contains(words), "{told}");
    }
}

#[test]
fn what_changes_nothing_is_ignored_for_the_reason_that_holds() {
    for (config, key, reason) in [
        (
            r#"{"zero_optimization": {"stage": 2, "stage3_prefetch_bucket_size": 0}}"#,
            "zero_optimization.stage3_prefetch_bucket_size",
            "nothing is gathered before stage 3",
        ),
        (
            r#"{"zero_optimization": {"stage": 3, "prefetch_bucket_size": 5e7}}"#,
            "zero_optimization.prefetch_bucket_size",
            "one unit is gathered ahead, whatever its size (0 turns that off)",
        ),
        (r#"{"amp": {"enabled": "auto", "opt_level": "auto"}}"#, "amp", "it is switched off"),
        (r#"{"elasticity": {"max_train_batch_size": 2000}}"#, "elasticity", "it is switched off"),
    ] {
        let ignored = read(config, "").unwrap().told.ignored;
        assert_eq!(ignored, [(reason.to_owned(), vec![key.to_owned()])], "{config}");
    }
    assert_eq!(said(r#"{"zero_optimization": {"stage": -0}}"#, ""), "--stage=0");
}
