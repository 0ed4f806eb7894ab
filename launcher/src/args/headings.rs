//! Under which heading of its help each flag of `train` stands.

use clap::Arg;

const HEADINGS: [(&str, &[&str]); 6] = [
    (
        "Model and data",
        &["model", "data", "tokenizer", "append_eod", "seq", "order", "val_data", "val_fraction", "seed"],
    ),
    (
        "Ranks",
        &[
            "ranks",
            "transport",
            "ranks_per_node",
            "share_gpus",
            "emulate_link",
            "tuning",
            "threads",
            "rendezvous_timeout",
            "call_timeout",
            "progress",
        ],
    ),
    (
        "Device and numbers",
        &["device", "attention", "matmul_precision", "offload", "cuda_graphs", "dtype", "loss_scale"],
    ),
    (
        "Steps and ZeRO",
        &[
            "deepspeed",
            "stage",
            "steps",
            "micro_batch",
            "accumulate",
            "reproducible",
            "recompute",
            "prefetch",
            "bucket_size",
        ],
    ),
    (
        "Optimizer",
        &[
            "lr",
            "min_lr",
            "warmup",
            "warmup_shape",
            "warmup_from",
            "schedule",
            "schedule_steps",
            "weight_decay",
            "beta1",
            "beta2",
            "eps",
            "clip",
        ],
    ),
    (
        "Output",
        &[
            "eval_every",
            "eval_tokens",
            "metrics",
            "trace",
            "trace_steps",
            "checkpoint",
            "checkpoint_every",
            "checkpoint_keep",
            "checkpoint_async",
            "resume",
            "save",
            "sample",
            "color",
            "quiet",
        ],
    ),
];

/// The flag under its heading.
pub fn headed(flag: Arg) -> Arg {
    let id = flag.get_id().to_string();
    match HEADINGS.iter().find(|(_, flags)| flags.contains(&&*id)) {
        Some((heading, _)) => flag.help_heading(*heading),
        None => flag,
    }
}
