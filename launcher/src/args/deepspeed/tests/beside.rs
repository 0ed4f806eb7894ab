//! A file beside flags that were typed, on whole command lines.

use super::*;

#[test]
fn a_flag_that_says_something_else_is_refused_with_both() {
    for (config, flags, words) in [
        (
            r#"{"train_micro_batch_size_per_gpu": 16}"#,
            "--micro-batch 8",
            "--micro-batch 8, and ds.json says train_micro_batch_size_per_gpu 16: say it in one place, or \"auto\" there",
        ),
        (
            r#"{"bf16": {"enabled": true}}"#,
            "--dtype f32",
            "--dtype f32, and ds.json says bf16.enabled true, which is --dtype bf16: say it in one place, or \"auto\" there",
        ),
        (
            r#"{"zero_optimization": {"stage": 2}}"#,
            "--stage 3",
            "--stage 3, and ds.json says zero_optimization.stage 2: say",
        ),
        (
            r#"{"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95]}}}"#,
            "--beta2 0.999",
            "--beta2 0.999, and ds.json says optimizer.params.betas [0.9,0.95], which is --beta2 0.95: say",
        ),
    ] {
        let told = refusal(config, flags);
        assert!(told.starts_with(words), "{told}");
    }
}

#[test]
fn a_flag_that_says_the_same_in_other_words_is_typed_once() {
    let fp16 = r#"{"fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000,
        "hysteresis": 2, "min_loss_scale": 1}}"#;
    for (config, flags) in [
        (r#"{"zero_optimization": {"stage": 2}}"#, "--stage 2"),
        (r#"{"gradient_clipping": 1}"#, "--clip 1.0"),
        (r#"{"train_micro_batch_size_per_gpu": 16}"#, "--micro-batch 16"),
        (r#"{"bf16": {"enabled": true}}"#, "--dtype BFloat16"),
        (r#"{"fp16": {"enabled": true}}"#, "--dtype float16"),
        (r#"{"optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}"#, "--lr 1e-3"),
        (r#"{"zero_optimization": {"reduce_bucket_size": 1048576}}"#, "--bucket-size 4M"),
        (r#"{"zero_optimization": {"reduce_bucket_size": 1048576}}"#, "--bucket-size 2M --dtype bf16"),
        (r#"{"scheduler": {"type": "WarmupLR"}}"#, "--schedule warmuplr"),
        (fp16, "--loss-scale dynamic"),
        (fp16, "--loss-scale initial=65536"),
        (r#"{"fp16": {"enabled": true, "loss_scale": 0}}"#, "--loss-scale window=1000,hysteresis=2"),
    ] {
        let args = train(config, flags).unwrap_or_else(|e| panic!("{config} {flags}: {e}"));
        // What the file says is told all the same.
        let flag = flags.split_once(' ').unwrap().0;
        assert!(args.configuration.unwrap().lines((1, 1), 1).contains(&format!(" as {flag} ")), "{flags}");
    }
    let told = train(fp16, "--loss-scale initial=4096").unwrap_err();
    assert!(told.starts_with("--loss-scale initial=4096, and ds.json says fp16.loss_scale, "), "{told}");
}

#[test]
fn a_type_that_is_switched_off_is_not_trained_in() {
    let (half, bf16) = (
        r#"{"fp16": {"enabled": "auto"}, "bf16": {"enabled": false}}"#,
        r#"{"fp16": {"enabled": false}, "bf16": {"enabled": "auto"}}"#,
    );
    for (config, flags, dtype) in [
        (half, "", "f32"),
        (half, "--dtype fp16", "f16"),
        (half, "--dtype f32", "f32"),
        (bf16, "", "bf16"),
        (bf16, "--dtype bf16", "bf16"),
        (bf16, "--dtype f32", "f32"),
    ] {
        let args = train(config, flags).unwrap_or_else(|e| panic!("{config} {flags}: {e}"));
        assert_eq!(args.dtype.name(), dtype, "{config} {flags}");
    }
    for (config, flags, words) in [
        (
            half,
            "--dtype bf16",
            "bf16.enabled false, and --dtype bf16 says something else: take another --dtype, or bf16.enabled \"auto\"",
        ),
        (bf16, "--dtype half", "fp16.enabled false, and --dtype f16 says something else"),
    ] {
        let told = train(config, flags).unwrap_err();
        assert!(told.starts_with("ds.json: ") && told.contains(words), "{told}");
    }
}

#[test]
fn an_adam_whose_weights_decay_by_the_gradient_is_taken_where_they_do_not_decay() {
    let of = |more: &str| {
        format!(r#"{{"optimizer": {{"type": "Adam", "params": {{"adam_w_mode": false{more}}}}}}}"#)
    };
    let torch = of(r#", "torch_adam": true"#);
    let auto = of(r#", "weight_decay": "auto""#);
    // PyTorch's Adam has no decay of its own, either.
    for (config, flags) in
        [(&of(""), ""), (&torch, ""), (&auto, "--weight-decay 0.0"), (&of(r#", "weight_decay": 0"#), "")]
    {
        let args = train(config, flags).unwrap_or_else(|e| panic!("{config} {flags}: {e}"));
        assert_eq!(args.weight_decay.value(), 0.0, "{config} {flags}");
        assert!(args.configuration.unwrap().lines((1, 1), 1).contains("adam_w_mode"), "{config}");
    }
    for (config, flags, words) in [
        (&auto, "", "take true, or --weight-decay 0, with which both are the same"),
        (&auto, "--weight-decay 0.01", "take true, or --weight-decay 0, with"),
        (&torch, "--weight-decay 0.01", "take true, or --weight-decay 0, with"),
        (&of(r#", "weight_decay": 0.01"#), "", "take true, or weight_decay 0, with"),
    ] {
        let told = train(config, flags).unwrap_err();
        assert!(told.contains("optimizer.params.adam_w_mode false is not supported"), "{told}");
        assert!(told.contains(words), "{told}");
    }
}

#[test]
fn what_a_file_leaves_to_defaults_is_not_told_to_change_nothing() {
    let config = r#"{"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}"#;
    let args = train(config, "--warmup 0").unwrap();
    assert!(crate::plan::check_anywhere(&args, 2).is_ok());
    let args = train(config, "--schedule-steps 5").unwrap();
    let told = crate::plan::check_anywhere(&args, 2).unwrap_err().to_string();
    assert!(told.starts_with("--schedule-steps 5 with --schedule WarmupLR, which never"), "{told}");
}

#[test]
fn whole_command_lines_have_the_file_as_if_it_was_typed() {
    let args =
        train(r#"{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}"#, "--steps 7 --seed 3")
            .unwrap();
    assert_eq!((args.dtype, args.stage.as_str(), args.steps, args.seed), (Precision::Bf16, "2", 7, 3));
    let file = args.configuration.as_ref().unwrap();
    let lines = file.lines((12, 1), 2);
    for words in [
        "ds.json: honoured: zero_optimization.stage as --stage 2, bf16.enabled as --dtype bf16",
        "ds.json: left to the flags, by \"auto\" or because it is not there: optimizer, scheduler, train_batch_size",
        "ds.json: DeepSpeed's defaults of what it does not say: --clip 1",
    ] {
        assert!(lines.lines().any(|line| line.ends_with(words)), "{lines}");
    }
    assert_eq!(file.json()["flags"]["--stage"], "2");
    // What flags are refused for later has the place where it was said.
    let config = r#"{"optimizer": {"type": "AdamW", "params": {"eps": 0}}}"#;
    let args = train(config, "").unwrap();
    let told = args.placed(crate::plan::check_anywhere(&args, 2).unwrap_err()).to_string();
    assert!(told.starts_with("--eps 0: ") && told.contains("(--eps is optimizer.params.eps of "), "{told}");
    let none = train("{}", "--deepspeed other.json").unwrap_err();
    assert!(none.contains("cannot be used multiple times"), "{none}");
    let missing = Cli::read(["caravan", "plan", "--deepspeed_config", "no/such.json"]).unwrap_err();
    assert!(sentence(&missing).starts_with("--deepspeed no/such.json: "), "{missing}");
    assert_eq!(missing.exit_code(), 2);
    let folder = Cli::read(["caravan", "plan", "--deepspeed-config", "."]).unwrap_err();
    assert!(sentence(&folder).starts_with("--deepspeed .: it is no regular file"), "{folder}");
}

#[test]
fn what_users_copy_trains_in_f16_as_it_is() {
    for (config, flags, world, batch, stage) in [
        (ZERO2_OFFLOAD, "", 1, (16, 4), "2"),
        (ZERO3_OFFLOAD, "--micro-batch 4", 4, (4, 16), "3"),
        (ZERO3_OFFLOAD, "", 8, (2, 16), "3"),
    ] {
        let args = train(config, flags).unwrap_or_else(|e| panic!("{config}: {e}"));
        let args = args.for_ranks(world, false).unwrap();
        assert_eq!(
            (&*args.dtype.name(), (args.micro_batch, args.accumulate), &*args.stage),
            ("f16", batch, stage)
        );
        crate::plan::check_anywhere(&args, world).unwrap_or_else(|e| panic!("{config}: {e}"));
    }
    for fp16 in [
        r#""loss_scale": 0"#,
        r#""loss_scale": 1024"#,
        r#""initial_scale_power": 4, "loss_scale_window": 500, "hysteresis": 1, "min_loss_scale": 2, "consecutive_hysteresis": true"#,
    ] {
        let args = train(&format!(r#"{{"fp16": {{"enabled": true, {fp16}}}}}"#), "")
            .unwrap_or_else(|e| panic!("{fp16}: {e}"));
        crate::plan::check_anywhere(&args, 2).unwrap_or_else(|e| panic!("{fp16}: {e}"));
    }
    let told = train(r#"{"fp16": {"enabled": true, "loss_scale": 0}}"#, "--loss-scale 1024").unwrap_err();
    assert!(
        told.contains("--loss-scale 1024, and ds.json says fp16.loss_scale 0, which is --loss-scale dynamic"),
        "{told}"
    );
    // Where the type is left to the flags, and its scale is not.
    let config =
        r#"{"fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 500, "hysteresis": "auto"}}"#;
    let scale = "--loss-scale=initial=65536,window=500,hysteresis=2,min=1,consecutive=off";
    assert!(words(config, "--dtype fp16").contains(scale));
    assert!(train(config, "--dtype half").is_ok() && !words(config, "").contains("--loss-scale"));
}
