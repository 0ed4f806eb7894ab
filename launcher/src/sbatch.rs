//! `caravan sbatch`: a Slurm script that runs a command of this program on several nodes.

use crate::args::{Cli, Command, RankArgs, SbatchArgs};
use crate::bench;
use crate::failure::{Failure, Result};
use crate::layers::between;
use crate::out;
use crate::plan::{Numbers, at_least_one};
use clap::Parser;
use collectives::MAX_SIZE;
use std::fmt::Write;

/// Prints the script.
///
/// # Errors
/// Numbers that make no job, or a command that could not run in it.
pub fn sbatch(args: &SbatchArgs) -> Result<()> {
    let program = std::env::current_exe()
        .map_err(|e| Failure::run(format!("where this program lies, for the script to call: {e}")))?;
    out::text(script(args, &program.to_string_lossy())?)?;
    Ok(())
}

fn script(args: &SbatchArgs, program: &str) -> Result<String> {
    for (flag, value) in [
        ("--nodes", Some(args.nodes)),
        ("--ranks-per-node", Some(args.ranks_per_node)),
        ("--gpus-per-rank", args.gpus_per_rank),
        ("--cpus-per-rank", args.cpus_per_rank),
    ] {
        if value.is_some_and(|v| v == 0 || v > MAX_SIZE) {
            return Err(Failure::usage(format!(
                "{flag} {}: 1 to {MAX_SIZE} are possible",
                value.unwrap_or(0)
            )));
        }
    }
    for (flag, text) in [
        ("--job-name", args.job_name.as_ref()),
        ("--time", args.time.as_ref()),
        ("--partition", args.partition.as_ref()),
        ("--account", args.account.as_ref()),
        ("--output", args.output.as_ref()),
    ] {
        // A line of #SBATCH ends where the line ends, and is split at spaces.
        if text.is_some_and(|t| t.is_empty() || t.contains(char::is_whitespace)) {
            return Err(Failure::usage(format!("{flag} '{}': one word is needed", text.map_or("", |t| t))));
        }
    }
    let world = args.nodes * args.ranks_per_node;
    if world > MAX_SIZE {
        return Err(Failure::usage(format!(
            "--nodes {} with --ranks-per-node {} make {world} ranks: a run has at most {MAX_SIZE}",
            args.nodes, args.ranks_per_node
        )));
    }
    let (name, ranks) = inner(&args.command, world)?;
    check(&ranks, args, world)?;
    let mut text = String::from("#!/bin/bash\n");
    let mut option = |name: &str, value: &str| {
        let _ = writeln!(text, "#SBATCH --{name}={value}");
    };
    option("job-name", args.job_name.as_deref().unwrap_or(&format!("caravan-{name}")));
    option("nodes", &args.nodes.to_string());
    option("ntasks-per-node", &args.ranks_per_node.to_string());
    if let Some(cpus) = args.cpus_per_rank {
        option("cpus-per-task", &cpus.to_string());
    }
    if let Some(gpus) = args.gpus_per_rank {
        option("gpus-per-task", &gpus.to_string());
    }
    option("output", args.output.as_deref().unwrap_or("%x-%j.out"));
    for (name, value) in [("time", &args.time), ("partition", &args.partition), ("account", &args.account)] {
        if let Some(value) = value {
            option(name, value);
        }
    }
    let mut srun = vec!["srun".to_owned(), "--kill-on-bad-exit=1".into()];
    if let Some(mpi) = args.mpi.as_deref().or((between(&ranks.transport) == "mpi").then_some("pmix")) {
        srun.push(format!("--mpi={}", quote(mpi)));
    }
    if let Some(cpus) = args.cpus_per_rank {
        // Since Slurm 22.05 a step does not inherit this from its job.
        srun.push(format!("--cpus-per-task={cpus}"));
    }
    srun.push(quote(program));
    srun.extend(args.command.iter().map(|word| quote(word)));
    let _ = write!(
        text,
        "set -euo pipefail\n\n\
         # Strangers on the same network cannot join: a secret for this job, which srun hands to every rank.\n\
         CARAVAN_TOKEN=$(head -c 16 /dev/urandom | od -An -v -tx1 | tr -d ' \\n')\n\
         export CARAVAN_TOKEN\n\n\
         {}\n",
        srun.join(" ")
    );
    Ok(text)
}

/// The name of the command that the script will run with `world` ranks, and its flags about them.
fn inner(words: &[String], world: usize) -> Result<(&'static str, RankArgs)> {
    let all = ["caravan".to_owned()].into_iter().chain(words.iter().cloned());
    let cli = Cli::try_parse_from(all).map_err(|e| {
        let text = e.to_string();
        let line = text.lines().next().unwrap_or_default();
        let line = line.strip_prefix("error: ").unwrap_or(line);
        Failure::usage(format!("the command after --: {line}"))
    })?;
    match cli.command {
        Command::Train(args) => {
            Numbers::check(&args)?;
            Ok(("train", args.ranks))
        }
        Command::Eval(args) => {
            at_least_one("--micro-batch", args.micro_batch)?;
            Ok(("eval", args.ranks))
        }
        Command::Bench(args) => match args.command.ranks() {
            Some(ranks) => {
                bench::check(&args, world)?;
                Ok(("bench", ranks.clone()))
            }
            None => Err(Failure::usage("the command after -- runs no ranks: take train, eval or bench")),
        },
        _ => Err(Failure::usage("the command after -- runs no ranks: take train, eval or bench")),
    }
}

/// Whether those flags fit the job.
fn check(ranks: &RankArgs, args: &SbatchArgs, world: usize) -> Result<()> {
    if let Some(asked) = ranks.ranks.filter(|&asked| asked != world) {
        return Err(Failure::usage(format!(
            "--ranks {asked}, but {} nodes with {} ranks each make {world}: leave --ranks away",
            args.nodes, args.ranks_per_node
        )));
    }
    match between(&ranks.transport) {
        "threads" if world > 1 => Err(Failure::usage(
            "--transport threads has its ranks in one process, and srun starts one process a rank: take auto",
        )),
        "shm" if args.nodes > 1 => Err(Failure::usage(format!(
            "--transport {} joins the ranks of one node, and these are on {}: take auto, shm+ucx or shm+mpi",
            ranks.transport, args.nodes
        ))),
        _ => Ok(()),
    }
}

/// A word as the shell takes it for one.
fn quote(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(line: &str) -> Result<String> {
        match Cli::try_parse_from(line.split(' ')).unwrap().command {
            Command::Sbatch(args) => script(&args, "/opt/my tools/caravan"),
            _ => unreachable!("{line}"),
        }
    }

    #[test]
    fn a_job_of_two_nodes() {
        let text = of(
            "caravan sbatch --nodes 2 --ranks-per-node 8 --gpus-per-rank 1 --cpus-per-rank 4 --time 1:00:00 \
                       -- train --model llama-3.2-1b --data it's.bin",
        )
        .unwrap();
        for line in [
            "#!/bin/bash",
            "#SBATCH --job-name=caravan-train",
            "#SBATCH --nodes=2",
            "#SBATCH --ntasks-per-node=8",
            "#SBATCH --gpus-per-task=1",
            "#SBATCH --cpus-per-task=4",
            "#SBATCH --time=1:00:00",
            "srun --kill-on-bad-exit=1 --cpus-per-task=4 '/opt/my tools/caravan' train --model llama-3.2-1b --data \
             'it'\\''s.bin'",
        ] {
            assert!(text.lines().any(|l| l == line), "{line}\nin\n{text}");
        }
        let options = text.lines().skip(1).take_while(|l| l.starts_with("#SBATCH ")).count();
        assert_eq!(
            options,
            text.matches("#SBATCH").count(),
            "Slurm reads options before the first command only"
        );
    }

    #[test]
    fn mpi_comes_with_its_plugin() {
        let text = of("caravan sbatch --nodes 2 -- bench all_reduce --transport mpi").unwrap();
        assert!(text.contains("srun --kill-on-bad-exit=1 --mpi=pmix "), "{text}");
        let text = of("caravan sbatch --nodes 2 --mpi pmi2 -- bench all_reduce --transport mpi").unwrap();
        assert!(text.contains(" --mpi=pmi2 "), "{text}");
    }

    #[test]
    fn what_could_not_run_is_refused() {
        for (line, words) in [
            ("--nodes 0 -- train", &["--nodes 0"][..]),
            ("--nodes 16385 -- train", &["--nodes 16385", "1 to 16384"]),
            ("--nodes 1025 --ranks-per-node 16 -- train", &["--nodes 1025", "16400 ranks", "at most 16384"]),
            ("--nodes 2 --ranks-per-node 4 -- train --ranks 2", &["--ranks 2", "2 nodes", "8"]),
            ("--nodes 2 -- train --transport shm", &["shm", "one node"]),
            ("--nodes 2 -- train --transport threads", &["threads", "srun"]),
            ("-- train --speed 11", &["after --", "--speed"]),
            ("-- train --stage 9", &["--stage 9", "0"]),
            ("-- train --steps 0", &["--steps 0", "at least 1"]),
            ("-- eval --model m --data d --micro-batch 0", &["--micro-batch 0", "at least 1"]),
            ("-- bench all_reduce -n 0", &["-n 0"]),
            ("--nodes 2 -- bench broadcast -r 2", &["-r 2", "from 0 to 1"]),
            ("--nodes 2 -- bench overlap -d all", &["-d all"]),
            ("--nodes 2 -- bench overlap -b 6", &["-b 6", "f32"]),
            ("--nodes 2 -- bench overlap -t 18446744073709551615", &["-t 1844", "at most 1000000"]),
            ("-- bench tune", &["one rank"]),
            ("-- doctor", &["no ranks", "train"]),
            ("-- bench plot a.json -o b.svg", &["no ranks"]),
            ("--job-name a\tb -- train", &["--job-name", "one word"]),
        ] {
            let e = of(&format!("caravan sbatch {line}")).expect_err(line);
            assert_eq!(e.code(), 2);
            assert!(words.iter().all(|w| e.to_string().contains(w)), "{line}: {e}");
        }
    }
}
