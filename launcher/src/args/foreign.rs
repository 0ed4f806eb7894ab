//! Flags of other trainers, which people have at their fingers: what `train`, and `plan` with it, has instead.

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// What stands behind a flag of one of these names.
const KNOWN: [(&[&str], &str); 9] = [
    (
        &["--resume-from", "--resume-from-checkpoint", "--load-checkpoint"],
        "take --checkpoint DIR --resume, which go on from what --checkpoint DIR kept; of what --save wrote --model DIR takes \
         the weights",
    ),
    (
        &["--save-every", "--save-steps", "--save-interval", "--checkpoint-dir"],
        "take --checkpoint DIR, --checkpoint-every N and --resume; a model is saved once, at the end, by --save DIR",
    ),
    (
        &["--save-total-limit", "--keep-last", "--max-checkpoints"],
        "take --checkpoint-keep N, how many of --checkpoint DIR stay",
    ),
    (
        &["--config"],
        "settings are flags, or DeepSpeed's: take --stage, --micro-batch, --accumulate, --dtype, --lr and --offload for what \
         it says, or --deepspeed FILE",
    ),
    (
        &["--fsdp"],
        "take --stage 3, the default, which shards parameters, gradients and the optimizer's state",
    ),
    (&["--gradient-accumulation-steps", "--grad-accum", "--accumulate-grad-batches"], "take --accumulate"),
    (
        &["--per-device-train-batch-size", "--batch-size", "--micro-batch-size"],
        "take --micro-batch, how many sequences a rank has in a micro-batch",
    ),
    (
        &["--max-steps", "--train-iters", "--epochs", "--num-epochs", "--num-train-epochs"],
        "take --steps, by which a run ends; a step takes --ranks times --accumulate times --micro-batch sequences",
    ),
    (
        &["--nproc-per-node", "--num-gpus", "--num-processes"],
        "take --ranks; ranks on several hosts are started by mpirun, srun or torchrun",
    ),
];

/// What is said of a flag that others have, where clap would only say that it is not known.
pub fn told(error: &clap::Error) -> Option<String> {
    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(word)) => Some(word.as_str()),
        _ => None,
    };
    let flag = context(ContextKind::InvalidArg)?;
    let of = |command: &str| error.to_string().contains(&format!("Usage: caravan {command}"));
    if !(of("train") || of("plan")) || error.kind() != ErrorKind::UnknownArgument {
        return None;
    }
    let name = flag.replace('_', "-");
    let (_, instead) = KNOWN.iter().find(|(names, _)| names.contains(&&*name))?;
    Some(format!("there is no flag '{flag}': {instead}"))
}

#[cfg(test)]
mod tests {
    use crate::args::Cli;
    use crate::failure::sentence;

    fn said(line: &str) -> String {
        sentence(&Cli::read(line.split(' ')).expect_err(line))
    }

    #[test]
    fn flags_of_other_trainers_are_refused_with_what_there_is_instead() {
        for (flags, words) in [
            (
                "--resume_from_checkpoint out",
                ["'--resume_from_checkpoint'", "--checkpoint DIR --resume", "--model DIR"],
            ),
            ("--save-every 100", ["'--save-every'", "--checkpoint-every N", "--save DIR"]),
            ("--checkpoint-dir out", ["'--checkpoint-dir'", "--checkpoint DIR", "--resume"]),
            ("--config run.yaml", ["'--config'", "--deepspeed FILE", "--micro-batch"]),
            ("--fsdp full_shard", ["'--fsdp'", "--stage 3", "shards"]),
            ("--gradient-accumulation-steps 4", ["'--gradient-accumulation-steps'", "take", "--accumulate"]),
            ("--gradient_accumulation_steps 4", ["'--gradient_accumulation_steps'", "take", "--accumulate"]),
            ("--per-device-train-batch-size 4", ["'--per-device-train-batch-size'", "take", "--micro-batch"]),
            ("--batch-size 4", ["'--batch-size'", "take", "--micro-batch"]),
            ("--save_total_limit 3", ["'--save_total_limit'", "--checkpoint-keep N", "--checkpoint DIR"]),
            ("--max-steps 4", ["'--max-steps'", "take --steps", "--accumulate"]),
            ("--num_train_epochs 1", ["'--num_train_epochs'", "take --steps", "--micro-batch"]),
            ("--nproc-per-node 4", ["'--nproc-per-node'", "take --ranks", "torchrun"]),
        ] {
            let text = said(&format!("caravan train {flags}"));
            assert!(words.iter().all(|word| text.contains(word)) && !text.contains('\n'), "{text}");
        }
        // What is mistyped, or another command's, is said as ever.
        assert!(said("caravan train --step 3").contains("a similar argument exists: '--steps'"));
        assert!(said("caravan plan --resume-from c").contains("--checkpoint DIR --resume"));
        assert!(!said("caravan bench all_reduce --resume-from c").contains("--checkpoint"));
        assert!(said("caravan train --dtype f8").contains("possible values"));
    }
}
