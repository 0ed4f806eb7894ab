//! Configurations as flags.

use super::*;
use crate::args::{Cli, TrainArgs};
use crate::failure::sentence;
use clap::CommandFactory;

/// A configuration beside `flags` of train: what becomes of it, or why nothing does. Its name is ds.json in both.
fn read(config: &str, flags: &str) -> std::result::Result<File, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ds.json");
    fs::write(&path, config).unwrap();
    let mut command = Cli::command();
    let words = ["caravan", "train"].into_iter().chain(flags.split_whitespace());
    let matches = command.try_get_matches_from_mut(words).unwrap_or_else(|e| panic!("{flags}: {e}"));
    let (name, typed) = matches.subcommand().unwrap();
    let file = File::read(&path, command.find_subcommand(name).unwrap(), typed);
    let short = |text: String| text.replace(&path.display().to_string(), "ds.json");
    Ok(File { path: "ds.json".into(), ..file.map_err(short)? })
}

fn words(config: &str, flags: &str) -> String {
    let file = read(config, flags).unwrap_or_else(|e| panic!("{config}: {e}"));
    file.words().collect::<Vec<_>>().join(" ")
}

/// The words for what a file says, without DeepSpeed's defaults.
fn said(config: &str, flags: &str) -> String {
    let mut file = read(config, flags).unwrap_or_else(|e| panic!("{config}: {e}"));
    file.told.words.retain(|word| word.said.is_some());
    file.words().collect::<Vec<_>>().join(" ")
}

fn refusal(config: &str, flags: &str) -> String {
    read(config, flags).err().unwrap_or_else(|| panic!("{config} {flags}"))
}

/// A whole command line with a configuration.
fn train(config: &str, flags: &str) -> std::result::Result<TrainArgs, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ds.json");
    fs::write(&path, config).unwrap();
    let path = path.display().to_string();
    let words = ["caravan", "train", "--deepspeed", &path].into_iter().chain(flags.split_whitespace());
    match Cli::read(words) {
        Ok(mut cli) => Ok(cli.command.train().unwrap().clone()),
        Err(e) => Err(sentence(&e).replace(&path, "ds.json")),
    }
}

/// As users copy them.
const ZERO2_OFFLOAD: &str = r#"{
  "train_batch_size": 64, "train_micro_batch_size_per_gpu": 16, "fp16": {"enabled": true},
  "zero_optimization": {
    "stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true}, "contiguous_gradients": true
  },
  "gradient_accumulation_steps": 4, "gradient_clipping": 1.0
}"#;
const ZERO3_OFFLOAD: &str = r#"{
  "train_batch_size": 256, "gradient_accumulation_steps": 16, "gradient_clipping": 1.0,
  "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 16},
  "zero_optimization": {
    "stage": 3,
    "offload_optimizer": {"device": "cpu", "pin_memory": true},
    "offload_param": {"device": "cpu", "pin_memory": true},
    "overlap_comm": true, "contiguous_gradients": true, "reduce_bucket_size": 500000000,
    "stage3_prefetch_bucket_size": 500000000, "stage3_param_persistence_threshold": 1000000
  }
}"#;

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
            // Of a block that is off nobody needs to know more.
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
}

#[test]
fn what_is_not_supported_is_refused_with_what_would_work() {
    for (config, flags, words) in [
        (
            r#"{"optimizer": {"type": "Lion", "params": {"x": 1}}}"#,
            "",
            "optimizer.type \"Lion\" is not supported: take \"AdamW\"",
        ),
        (r#"{"optimizer": {"params": {"lr": 1}}}"#, "", "optimizer.type is not there: take \"AdamW\""),
        (
            r#"{"optimizer": {"type": "Adam", "params": {"adam_w_mode": false, "weight_decay": 0.1}}}"#,
            "",
            "take true, or weight_decay 0",
        ),
        (
            r#"{"scheduler": {"type": "OneCycle", "params": {"x": 1}}}"#,
            "",
            "scheduler.type \"OneCycle\" is not supported: take \"WarmupLR\"",
        ),
        (
            r#"{"scheduler": {"type": "WarmupDecayLR"}}"#,
            "",
            "scheduler.params.total_num_steps is not there: WarmupDecayLR needs it",
        ),
        (
            r#"{"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 5}}}"#,
            "",
            "total_num_steps is no key of WarmupLR",
        ),
        (
            r#"{"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cosine"}}}"#,
            "",
            "warmup_type \"cosine\": take \"linear\" or \"log\"",
        ),
        (
            r#"{"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}"#,
            "",
            "warmup_num_steps 0: it must be at least 1",
        ),
        (
            r#"{"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 5, "cos_min_ratio": 2}}}"#,
            "",
            "from 0 to 1",
        ),
        (
            r#"{"fp16": {"enabled": true}, "bf16": {"enabled": true}}"#,
            "",
            "fp16.enabled and bf16.enabled are both true",
        ),
        (r#"{"bf16": {}, "bfloat16": {}}"#, "", "bf16 and bfloat16 are the same"),
        (
            r#"{"fp16": {"enabled": true, "initial_scale_power": 200}}"#,
            "",
            "initial_scale_power 200: f32 has powers of two up to 127",
        ),
        (r#"{"fp16": {"enabled": true, "loss_scale": -1}}"#, "", "fp16.loss_scale -1: it must be above 0"),
        (
            r#"{"bf16": {"enabled": true, "bf16_optimizer_states": true}}"#,
            "",
            "bf16.bf16_optimizer_states true is not supported",
        ),
        (r#"{"bf16": {"enabled": true}, "communication_data_type": "fp32"}"#, "", "take \"bf16\" or null"),
        (
            r#"{"data_types": {"grad_accum_dtype": "bf16"}}"#,
            "",
            "data_types.grad_accum_dtype \"bf16\" is not supported",
        ),
        (
            r#"{"zero_optimization": {"stage": 4}}"#,
            "",
            "zero_optimization.stage 4: there are the stages 0, 1, 2 and 3",
        ),
        (
            r#"{"zero_optimization": {"stage": "three"}}"#,
            "",
            "zero_optimization.stage \"three\": a number is needed",
        ),
        (
            r#"{"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}"#,
            "",
            "take \"cpu\", the memory of the host",
        ),
        (
            r#"{"zero_optimization": {"offload_param": {"device": "tape"}}}"#,
            "",
            "\"none\" and \"cpu\" are supported",
        ),
        (r#"{"zero_optimization": {"cpu_offload_param": true}}"#, "--device cuda", "parameters stay on GPUs"),
        (
            r#"{"zero_optimization": {"zero_quantized_weights": true}}"#,
            "",
            "zero_quantized_weights true is not supported",
        ),
        (
            r#"{"zero_optimization": {"zero_hpz_partition_size": 8}}"#,
            "",
            "zero_hpz_partition_size 8 is not supported",
        ),
        (r#"{"zero_optimization": {"mics_shard_size": 4}}"#, "", "mics_shard_size 4 is not supported"),
        (r#"{"activation_checkpointing": {"cpu_checkpointing": true}}"#, "", "--recompute full"),
        (r#"{"train_batch_size": 1.5}"#, "", "train_batch_size 1.5: a whole number from 0 is needed"),
        (
            r#"{"stage": 1}"#,
            "",
            "stage is no key of DeepSpeed's: a similar one exists: zero_optimization.stage",
        ),
        ("{\"a\": 1, // why\n}", "", "line 1 column"),
        (r#"{"bf16": {"enabled": true, "enabled": true}}"#, "", "the key 'enabled' stands twice at line 1"),
    ] {
        let told = refusal(config, flags);
        assert!(
            told.starts_with("ds.json: ") && told.contains(words) && !told.contains('\n'),
            "{config}: {told}"
        );
    }
}

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
    // The same in other words is the same.
    for (config, flags) in [
        (r#"{"train_micro_batch_size_per_gpu": 16}"#, "--micro-batch 16"),
        (r#"{"bf16": {"enabled": true}}"#, "--dtype BFloat16"),
        (r#"{"optimizer": {"type": "AdamW", "params": {"lr": 0.001}}}"#, "--lr 1e-3"),
        (r#"{"zero_optimization": {"reduce_bucket_size": 1048576}}"#, "--bucket-size 4M"),
        (r#"{"zero_optimization": {"reduce_bucket_size": 1048576}}"#, "--bucket-size 2M --dtype bf16"),
        (r#"{"scheduler": {"type": "WarmupLR"}}"#, "--schedule warmuplr"),
    ] {
        assert!(read(config, flags).is_ok(), "{config} {flags}");
    }
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
    assert!(sentence(&folder).starts_with("--deepspeed .: it is no file"), "{folder}");
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
            (args.dtype.name(), (args.micro_batch, args.accumulate), &*args.stage),
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
