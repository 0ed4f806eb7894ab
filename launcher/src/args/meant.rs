//! What a word was probably meant as that is no flag or no command here: names that other trainers have for the same, and
//! those under which commands are listed.

use clap::Command;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use std::ffi::OsString;

/// Flags of other trainers, which people have at their fingers, with ours of commands that have it, and what `train` and `plan`
/// say of it where that is more.
const OTHERS: [(&[&str], Option<&str>, Option<&str>); 12] = [
    (&["--zero", "--zero-stage"], Some("stage"), None),
    (&["--learning-rate"], Some("lr"), None),
    (&["--gradient-accumulation"], Some("accumulate"), None),
    (
        &["--gradient-accumulation-steps", "--grad-accum", "--accumulate-grad-batches"],
        Some("accumulate"),
        Some("take --accumulate"),
    ),
    (
        &["--per-device-train-batch-size", "--batch-size", "--micro-batch-size"],
        Some("micro-batch"),
        Some("take --micro-batch, how many sequences a rank has in a micro-batch"),
    ),
    (
        &["--resume-from", "--resume-from-checkpoint", "--load-checkpoint"],
        None,
        Some(
            "take --checkpoint DIR --resume, which go on from what --checkpoint DIR kept; of what --save wrote --model DIR \
             takes the weights",
        ),
    ),
    (
        &["--save-every", "--save-steps", "--save-interval", "--checkpoint-dir"],
        None,
        Some(
            "take --checkpoint DIR, --checkpoint-every N and --resume; a model is saved once, at the end, by --save DIR",
        ),
    ),
    (
        &["--save-total-limit", "--keep-last", "--max-checkpoints"],
        None,
        Some("take --checkpoint-keep N, how many of --checkpoint DIR stay"),
    ),
    (
        &["--config"],
        None,
        Some(
            "settings are flags, or DeepSpeed's: take --stage, --micro-batch, --accumulate, --dtype, --lr and --offload for \
             what it says, or --deepspeed FILE",
        ),
    ),
    (
        &["--fsdp"],
        None,
        Some("take --stage 3, the default, which shards parameters, gradients and the optimizer's state"),
    ),
    (
        &["--max-steps", "--train-iters", "--epochs", "--num-epochs", "--num-train-epochs"],
        None,
        Some(
            "take --steps, by which a run ends; a step takes --ranks times --accumulate times --micro-batch sequences",
        ),
    ),
    (
        &["--nproc-per-node", "--num-gpus", "--num-processes"],
        None,
        Some("take --ranks; ranks on several hosts are started by mpirun, srun or torchrun"),
    ),
];

/// The same error of the command line `words`, with what leads somewhere.
pub fn meant(mut error: clap::Error, command: &Command, words: &[OsString]) -> clap::Error {
    match (error.kind(), error.get(ContextKind::InvalidArg), error.get(ContextKind::SuggestedSubcommand)) {
        (ErrorKind::UnknownArgument, Some(ContextValue::String(word)), _) => {
            let theirs = word.replace('_', "-");
            let found = OTHERS.iter().find(|(names, ..)| names.contains(&&*theirs));
            let Some((_, ours, instead)) = found else { return error };
            let asked = words.get(1);
            let trains = asked.is_some_and(|name| name == "train" || name == "plan");
            if let Some(instead) = instead.filter(|_| trains) {
                let text = format!("there is no flag '{word}': {instead}\n");
                return clap::Error::raw(ErrorKind::UnknownArgument, text);
            }
            let asked = asked.and_then(|name| command.find_subcommand(name));
            let has = |flag: &&str| {
                asked.is_some_and(|asked| asked.get_arguments().any(|arg| arg.get_long() == Some(*flag)))
            };
            if let Some(flag) = ours.filter(has) {
                error.insert(ContextKind::SuggestedArg, ContextValue::String(format!("--{flag}")));
            }
        }
        (ErrorKind::InvalidSubcommand, _, Some(ContextValue::Strings(names))) => {
            let mut listed: Vec<String> = names.iter().map(|name| listed_as(command, name)).collect();
            let mut seen = Vec::new();
            listed.retain(|name| !seen.contains(name) && (seen.push(name.clone()), true).1);
            // As nccl-tests' programs are called, `all_reduce_perf`.
            let word = error.get(ContextKind::InvalidSubcommand).map_or(String::new(), ToString::to_string);
            if let Some(begun) = listed.iter().find(|name| word.starts_with(&format!("{name}_"))) {
                listed = vec![begun.clone()];
            }
            error.insert(ContextKind::SuggestedSubcommand, ContextValue::Strings(listed));
        }
        _ => {}
    }
    error
}

/// The name in the help of the command below `command` that this is another name of.
fn listed_as(command: &Command, name: &str) -> String {
    let below = command.get_subcommands().flat_map(|sub| sub.get_subcommands());
    let mut all = command.get_subcommands().chain(below);
    let found = all.find(|sub| sub.get_name() == name || sub.get_all_aliases().any(|alias| alias == name));
    found.map_or(name, Command::get_name).to_owned()
}

#[cfg(test)]
mod tests {
    use crate::args::Cli;
    use crate::failure::sentence;

    fn refused(line: &str) -> String {
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
            let text = refused(&format!("caravan train {flags}"));
            assert!(words.iter().all(|word| text.contains(word)) && !text.contains('\n'), "{text}");
        }
        // What is mistyped, or another command's, is said as ever.
        assert!(refused("caravan train --step 3").contains("a similar argument exists: '--steps'"));
        assert!(refused("caravan plan --resume-from c").contains("--checkpoint DIR --resume"));
        assert!(!refused("caravan bench all_reduce --resume-from c").contains("--checkpoint"));
        assert!(refused("caravan train --dtype f8").contains("possible values"));
    }

    #[test]
    fn flags_of_other_trainers_lead_to_ours() {
        for (flags, ours) in [
            ("train --zero 3", "'--stage'"),
            ("eval --model m --data d --batch-size 4", "'--micro-batch'"),
            ("train --gradient-accumulation 2", "'--accumulate'"),
            ("plan --zero_stage 2", "'--stage'"),
            ("train --gradient-accumulation=2", "'--accumulate'"),
        ] {
            let text = refused(&format!("caravan {flags}"));
            assert!(text.ends_with(&format!("a similar argument exists: {ours}")), "{text}");
        }
        // Nothing of the kind is there.
        assert!(!refused("caravan doctor --zero 3").contains("stage"));
    }

    #[test]
    fn of_a_commands_names_the_one_that_is_listed_is_suggested() {
        let text = refused("caravan bench all_reduce_perf");
        let said = "unrecognized subcommand 'all_reduce_perf'; a similar subcommand exists: 'all_reduce'";
        assert_eq!(text, said);
        let text = refused("caravan bench al_reduce");
        assert!(text.contains("'all_reduce'") && !text.contains("'allreduce'"), "{text}");
    }
}
