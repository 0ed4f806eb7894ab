//! What a word was probably meant as that is no flag or no command here: names that other trainers have for the same, and
//! those under which commands are listed.

use clap::Command;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use std::ffi::OsString;

/// Flags of other trainers, and ours, where [`foreign`](super::foreign) has nothing more to say of them.
const OTHERS: [(&str, &str); 5] = [
    ("--zero", "stage"),
    ("--zero-stage", "stage"),
    ("--batch-size", "micro-batch"),
    ("--gradient-accumulation", "accumulate"),
    ("--learning-rate", "lr"),
];

/// The same error of the command line `words`, with suggestions that lead somewhere.
pub fn meant(mut error: clap::Error, command: &Command, words: &[OsString]) -> clap::Error {
    match (error.kind(), error.get(ContextKind::InvalidArg), error.get(ContextKind::SuggestedSubcommand)) {
        (ErrorKind::UnknownArgument, Some(ContextValue::String(word)), _) => {
            let word = word.replace('_', "-");
            let ours = OTHERS.iter().find(|(theirs, _)| *theirs == word).map(|(_, ours)| *ours);
            let asked = words.get(1).and_then(|name| command.find_subcommand(name));
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
