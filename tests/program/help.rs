//! The help of every command.

use crate::bench;
use harness::OPERATIONS;

/// What a help lists as commands below it.
fn commands(help: &str) -> Vec<String> {
    let listed =
        help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let first = listed.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let names = first.filter_map(|line| line.split_whitespace().next().map(str::to_owned));
    names.filter(|name| name != "help").collect()
}

#[test]
fn every_command_has_help_with_examples() {
    let bench = bench();
    let help = |command: &str| bench.run(&format!("{command} --help")).success().stdout;
    let all = commands(&help(""));
    assert_eq!(
        all,
        ["train", "plan", "eval", "bench", "tokenize", "report", "checkpoint", "sbatch", "doctor"]
    );
    let below = commands(&help("bench"));
    assert!(
        OPERATIONS
            .iter()
            .chain(&["barrier", "overlap", "tune", "kernels", "plot"])
            .all(|name| { below.iter().any(|listed| listed == name) }),
        "{below:?}"
    );
    for command in all.into_iter().chain(below.iter().map(|name| format!("bench {name}"))) {
        let said = help(&command);
        // Operations share theirs.
        assert!(said.contains("Examples:\n  caravan "), "{command}: {said}");
    }
}
