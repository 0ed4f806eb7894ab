//! What is refused, and what is said of it.

use super::*;

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
            r#"{"optimizer": {"type": "auto"}}"#,
            "",
            "optimizer.type \"auto\" is not supported: take \"AdamW\"",
        ),
        (
            r#"{"scheduler": {"type": "auto"}}"#,
            "",
            "scheduler.type \"auto\" is not supported: take \"WarmupLR\"",
        ),
        (r#"{"scheduler": {}}"#, "", "scheduler.type is not there: take \"WarmupLR\""),
        (r#"{"optimizer": "AdamW"}"#, "", "optimizer \"AdamW\": a block of keys, {...}, is needed"),
        (r#"{"scheduler": "WarmupLR"}"#, "", "scheduler \"WarmupLR\": a block of keys, {...}, is needed"),
        (
            r#"{"zero_optimization": {"cpu_offload": true, "offload_optimizer": {"device": "none"}}}"#,
            "",
            "zero_optimization.cpu_offload is an older form of zero_optimization.offload_optimizer: take \
             zero_optimization.offload_optimizer alone",
        ),
        (
            r#"{"zero_optimization": {"cpu_offload_param": false, "offload_param": {}}}"#,
            "--device cuda",
            "zero_optimization.cpu_offload_param is an older form of zero_optimization.offload_param",
        ),
        (
            r#"{"zero_optimization": {"prefetch_bucket_size": 0, "stage3_prefetch_bucket_size": 5e7}}"#,
            "",
            "are the same: take zero_optimization.stage3_prefetch_bucket_size alone",
        ),
        (
            r#"{"fp16": {"enabled": true, "hysteresis": 99999999999}}"#,
            "",
            "fp16.hysteresis 99999999999: a whole number up to 4294967295 is needed",
        ),
        (
            r#"{"zero_optimization": {"reduce_bucket_size": 1e30}}"#,
            "",
            "a whole number up to 9007199254740992 is needed",
        ),
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
        (r#"{"zero_optimization": {"stage": 1e30}}"#, "", "there are the stages 0, 1, 2 and 3"),
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
