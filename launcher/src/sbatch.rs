//! `caravan sbatch`: a Slurm script that runs a command of this program on several nodes.

mod gpus;
mod time;

use crate::args::{Cli, Command, DeviceArgs, DeviceKind, RankArgs, SbatchArgs};
use crate::bench;
use crate::data;
use crate::eval;
use crate::failure::{self, Failure, Result};
use crate::human::{several, typed};
use crate::mpi;
use crate::out;
use crate::plan::{Asked, check_anywhere};
use crate::transports::Transport;
use collectives::MAX_SIZE;
use collectives::transport::Nodes;
use std::fmt::Write;

/// How the script starts its ranks.
const SRUN: &str = "srun --export=ALL --kill-on-bad-exit=1 --wait=0 --distribution=block --mem=0";

/// Prints the script.
///
/// # Errors
/// Numbers that make no job, or a command that could not run in it.
pub fn sbatch(args: &SbatchArgs) -> Result<()> {
    let program = std::env::current_exe()
        .map_err(|e| Failure::run(format!("where this program lies, for the script to call: {e}")))?;
    let name = program.to_str().filter(|_| program.is_file()).ok_or_else(|| {
        let there = program.display();
        let text = "which a script cannot call: start it by a name in UTF-8 of a file that is there";
        Failure::run(format!("this program is {there}, {text}"))
    })?;
    out::text(script(args, name)?)?;
    Ok(())
}

fn script(args: &SbatchArgs, program: &str) -> Result<String> {
    Ok(written(args, program, &checked(args)?))
}

/// What the script will run, once its numbers, its words and all of that are checked.
fn checked(args: &SbatchArgs) -> Result<Inner> {
    for (flag, value) in [
        ("--nodes", Some(args.nodes)),
        ("--ranks-per-node", Some(args.ranks_per_node)),
        ("--gpus-per-rank", args.gpus_per_rank),
        ("--gpus-per-node", args.gpus_per_node),
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
        ("--mpi", args.mpi.as_ref()),
    ] {
        // A line of #SBATCH ends where the line or a comment begins or ends, is split at spaces, and knows quotes. A name
        // of a plugin is one such word, too.
        let odd = |c: char| c.is_whitespace() || ['\'', '"', '\\', '#'].contains(&c);
        if let Some(text) = text.filter(|text| text.is_empty() || text.contains(odd)) {
            return Err(Failure::usage(format!("{flag} '{text}': one word without quotes and # is needed")));
        }
    }
    let time =
        args.time.as_deref().map(|text| time::limit(text).map(|seconds| (text, seconds))).transpose()?;
    let world = args.nodes * args.ranks_per_node;
    if world > MAX_SIZE {
        return Err(Failure::usage(format!(
            "--nodes {} with --ranks-per-node {} make {world} ranks: a run has at most {MAX_SIZE}",
            args.nodes, args.ranks_per_node
        )));
    }
    let inner = Inner::read(&args.command, world)?;
    inner.check(args, world)?;
    if let Some(seconds) = args.stop_before {
        let refuse = |why: String| Err(Failure::usage(format!("--stop-before {seconds}: {why}")));
        if !inner.saves {
            return refuse(format!(
                "what this {} has done by then would not be kept: it is for train --save DIR or --checkpoint DIR",
                inner.name
            ));
        }
        match time {
            _ if seconds == 0 => {
                return refuse("at least 1 second before its end a job can be asked to stop".into());
            }
            Some((text, None)) => {
                return refuse(format!("--time {text} has no end before which the job could be asked"));
            }
            Some((text, Some(all))) if u64::from(seconds) + time::EARLY >= all => {
                return refuse(format!(
                    "the job might be asked as it begins, for --time {text} is {all} seconds, of whole minutes, and Slurm may \
                     ask {} seconds early",
                    time::EARLY
                ));
            }
            _ => {}
        }
    }
    Ok(inner)
}

/// The text of the script.
fn written(args: &SbatchArgs, program: &str, inner: &Inner) -> String {
    let mut text = String::from("#!/bin/bash\n");
    let mut option = |name: &str, value: &str| {
        let _ = writeln!(text, "#SBATCH --{name}={value}");
    };
    option("job-name", args.job_name.as_deref().unwrap_or(&format!("caravan-{}", inner.name)));
    option("nodes", &args.nodes.to_string());
    option("ntasks-per-node", &args.ranks_per_node.to_string());
    if let Some(cpus) = args.cpus_per_rank {
        option("cpus-per-task", &cpus.to_string());
    }
    if let Some(gpus) = gpus::of_a_node(args) {
        // Not --gpus-per-task, with which each rank would see a GPU of its own only, and NCCL could not go directly from one
        // to another. Ranks take theirs by their number on the node.
        option("gpus-per-node", &gpus.to_string());
    }
    option("output", args.output.as_deref().unwrap_or("%x-%j.out"));
    if inner.resumes {
        // One that is requeued has the same number, and what it said before is worth as much.
        option("open-mode", "append");
    }
    for (name, value) in [("time", &args.time), ("partition", &args.partition), ("account", &args.account)] {
        if let Some(value) = value {
            option(name, value);
        }
    }
    if let Some(seconds) = args.stop_before {
        // To the ranks, and not to the shell of the script.
        option("signal", &format!("TERM@{seconds}"));
    }
    if inner.saves && !inner.resumes {
        // A job that begins anew would in the end replace what it has saved before by what it has learnt since.
        text.push_str("#SBATCH --no-requeue\n");
    }
    // All of the script's environment, also where the job itself took none of the submitter's; and ranks that have come to
    // their end leave rank 0 the time that it needs to write, whatever WaitTime the site has. Ranks of a node follow each other,
    // and have all of the job's memory there, whatever an allocation in which the job was submitted had asked for.
    let mut srun: Vec<String> = SRUN.split(' ').map(str::to_owned).collect();
    let usual = || mpi::plugin().filter(|_| inner.asked.transport == Some(Transport::Mpi));
    if let Some(mpi) = args.mpi.as_deref().or_else(usual) {
        srun.push(format!("--mpi={}", typed(mpi)));
    }
    if let Some(cpus) = args.cpus_per_rank {
        // Since Slurm 22.05 a step does not inherit this from its job.
        srun.push(format!("--cpus-per-task={cpus}"));
    }
    srun.push(typed(program));
    srun.extend(args.command.iter().map(|word| typed(word)));
    let _ = write!(
        text,
        "set -euo pipefail\n\n\
         # Strangers on the same network cannot join: a secret for this job, which srun hands to every rank.\n\
         CARAVAN_TOKEN=$(head -c 16 /dev/urandom | od -An -v -tx1 | tr -d ' \\n')\n\
         export CARAVAN_TOKEN\n\
         # As --kill-on-bad-exit below, which ranks do not see: one that fails need not tell the others itself.\n\
         export SLURM_KILL_BAD_EXIT=1\n\n\
         # Submitted from inside a step: srun would take that step's processors for those that were asked for.\n\
         if [ -n \"${{SLURM_CPU_BIND_LIST:-}}\" ]; then\n    \
         unset SLURM_CPU_BIND SLURM_CPU_BIND_LIST SLURM_CPU_BIND_TYPE SLURM_CPU_BIND_VERBOSE\n\
         fi\n\
         # Or from an allocation that asked for more, or deals it out among its tasks: srun would take that for this job's.\n\
         unset SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_GPUS_PER_SOCKET SLURM_GPUS_PER_TASK SLURM_GPU_BIND SLURM_GRES\n\
         unset SLURM_TRES_PER_TASK SLURM_NTASKS_PER_GPU SLURM_NTASKS_PER_TRES{}\n\n\
         {}\n",
        // Of these two a step may have one.
        args.cpus_per_rank.map_or("", |_| " SLURM_CPUS_PER_GPU"),
        srun.join(" ")
    );
    text
}

/// The command that the script will run.
struct Inner {
    name: &'static str,
    ranks: RankArgs,
    asked: Asked,
    /// The flag with which its ranks compute or measure on GPUs, and whether it was given.
    gpus: (&'static str, bool),
    /// Whether it keeps what it has when it is asked to end.
    saves: bool,
    /// Whether it goes on where it ended, if it is started again.
    resumes: bool,
}

impl Inner {
    /// Checks all that running it with `world` ranks would, but for what depends on machines and files.
    fn read(words: &[String], world: usize) -> Result<Self> {
        let all = ["caravan".to_owned()].into_iter().chain(words.iter().cloned());
        let cli = Cli::read(all).map_err(|e| match failure::asks_for_help(&e) {
            true => Failure::usage(
                "the command after -- shows help and runs no ranks: take train, eval, or bench and an operation",
            ),
            false => Failure::usage(format!("the command after --: {}", failure::sentence(&e))),
        })?;
        let none = || Failure::usage("the command after -- runs no ranks: take train, eval or bench");
        let cuda = |args: &DeviceArgs| ("--device cuda", args.device == DeviceKind::Cuda);
        let inner = |name, ranks: &RankArgs, asked, gpus| {
            let ranks = ranks.clone();
            Inner { name, ranks, asked, gpus, saves: false, resumes: false }
        };
        match &cli.command {
            Command::Train(args) => {
                let asked = Asked::new(&args.ranks, world)?;
                let resolved = args.for_ranks(world, true)?;
                check_anywhere(&resolved, world).map_err(|e| args.placed(e))?;
                data::check_no_stream("--data", &args.data)?;
                data::check_no_stream("--val-data", &args.val_data)?;
                let saves = args.save.is_some() || args.checkpoint.is_some();
                let inner = inner("train", &args.ranks, asked, cuda(&args.device));
                Ok(Inner { saves, resumes: args.resume, ..inner })
            }
            Command::Eval(args) => {
                let asked = Asked::new(&args.ranks, world)?;
                eval::check_anywhere(args)?;
                data::check_no_stream("--data", &args.data)?;
                Ok(inner("eval", &args.ranks, asked, cuda(&args.device)))
            }
            Command::Bench(args) => {
                let ranks = args.command.ranks().ok_or_else(none)?;
                let asked = Asked::new(ranks, world)?;
                bench::check(args, world, &asked)?;
                Ok(inner("bench", ranks, asked, ("--transport nccl", asked.nccl)))
            }
            _ => Err(none()),
        }
    }

    /// Whether it fits the job.
    fn check(&self, args: &SbatchArgs, world: usize) -> Result<()> {
        if let Some(asked) = self.ranks.ranks.filter(|&asked| asked != world) {
            return Err(Failure::usage(format!(
                "--ranks {asked}, but {} with {} each make {world}: leave --ranks away",
                several(args.nodes, "node"),
                several(args.ranks_per_node, "rank")
            )));
        }
        match self.asked.transport {
            Some(Transport::Threads) if world > 1 => Err(Failure::usage(
                "--transport threads has its ranks in one process, and srun starts one process a rank: take auto",
            )),
            Some(Transport::Shm) if args.nodes > 1 => Err(Failure::usage(format!(
                "--transport {} joins the ranks of one node, and these are on {}: take auto, shm+ucx or shm+mpi",
                self.ranks.transport, args.nodes
            ))),
            // The script calls this program.
            Some(mpi @ Transport::Mpi) => mpi.obstacle().map_or(Ok(()), |why| {
                Err(Failure::usage(format!("--transport {} cannot be used: {why}", self.ranks.transport)))
            }),
            _ => Ok(()),
        }?;
        if let (Some(link), true) = (&self.ranks.emulate_link, args.nodes > 1) {
            return Err(Failure::usage(format!(
                "--emulate-link {link} holds messages back by the clock of one machine, and these ranks are on {}: take \
                 --nodes 1, or leave --emulate-link away",
                args.nodes
            )));
        }
        if let Some(given) = self.asked.layers.per_node {
            let (nodes, each) = (Nodes::by_hand(world, given)?, args.ranks_per_node);
            let spans = |ranks: &Vec<usize>| ranks.windows(2).any(|pair| pair[0] / each != pair[1] / each);
            if nodes.all().iter().any(spans) {
                return Err(Failure::usage(format!(
                    "--ranks-per-node {given} of this {}: some of these nodes would span two of Slurm's, which have {each} ranks \
                     each, one after another: take a divisor of that, or leave it away",
                    self.name
                )));
            }
        }
        gpus::check(args, self.name, self.gpus, self.ranks.share_gpus)
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn of(line: &str) -> Result<String> {
        match Cli::read(line.split(' ')).unwrap().command {
            Command::Sbatch(args) => script(&args, "/opt/my tools/caravan"),
            _ => unreachable!("{line}"),
        }
    }

    #[test]
    fn a_job_of_two_nodes() {
        let text = of(
            "caravan sbatch --nodes 2 --ranks-per-node 8 --gpus-per-rank 1 --cpus-per-rank 4 --time 1:00:00 \
                       --stop-before 300 -- train --device cuda --model llama-3.2-1b --data it's.bin --save m",
        )
        .unwrap();
        for line in [
            "#!/bin/bash",
            "#SBATCH --job-name=caravan-train",
            "#SBATCH --nodes=2",
            "#SBATCH --ntasks-per-node=8",
            "#SBATCH --gpus-per-node=8",
            "#SBATCH --cpus-per-task=4",
            "#SBATCH --time=1:00:00",
            "#SBATCH --signal=TERM@300",
            "#SBATCH --no-requeue",
            &format!(
                "{SRUN} --cpus-per-task=4 '/opt/my tools/caravan' train --device cuda --model llama-3.2-1b --data 'it'\\''s.bin' \
                 --save m"
            ),
        ] {
            assert!(text.lines().any(|l| l == line), "{line}\nin\n{text}");
        }
        assert!(
            !text.contains("gpus-per-task") && !text.contains("gpu-bind"),
            "each sees all of its node: {text}"
        );
        let options = text.lines().skip(1).take_while(|l| l.starts_with("#SBATCH ")).count();
        assert_eq!(
            options,
            text.matches("#SBATCH").count(),
            "Slurm reads options before the first command only"
        );
    }

    #[test]
    fn a_job_that_resumes_may_be_requeued_and_keeps_its_log() {
        let append = "#SBATCH --open-mode=append\n";
        let text = of("caravan sbatch --nodes 2 -- train --checkpoint c --resume --save m").unwrap();
        assert!(text.contains(append) && !text.contains("requeue"), "it goes on where it was: {text}");
        let text = of("caravan sbatch --nodes 2 -- train --checkpoint c --save m").unwrap();
        assert!(!text.contains(append) && text.contains("requeue"), "it begins anew: {text}");
    }

    #[test]
    fn mpi_comes_with_its_plugin() {
        let Some(plugin) = mpi::plugin() else {
            let e = of("caravan sbatch --nodes 2 -- bench all_reduce --transport mpi").unwrap_err();
            assert!(e.code() == 2 && e.to_string().contains("--features mpi"), "{e}");
            // srun starts processes, and the hosts may be several: nothing else does without.
            assert!(!e.to_string().contains("needs none of that"), "{e}");
            return;
        };
        for transport in ["mpi", "shm+mpi"] {
            let text =
                of(&format!("caravan sbatch --nodes 2 -- bench all_reduce --transport {transport}")).unwrap();
            assert!(!text.contains("requeue"), "it saves nothing: {text}");
            assert!(text.contains(&format!("{SRUN} --mpi={plugin} ")), "{text}");
        }
        let text = of("caravan sbatch --nodes 2 --mpi other -- bench all_reduce --transport mpi").unwrap();
        assert!(text.contains(" --mpi=other "), "{text}");
        let text = of("caravan sbatch --nodes 2 -- bench all_reduce").unwrap();
        assert!(!text.contains("--mpi"), "{text}");
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
            ("--stop-before 60 -- train", &["--stop-before 60", "train --save", "--checkpoint DIR"]),
            ("--stop-before 0 -- train --save m", &["--stop-before 0", "at least 1"]),
            (
                "--stop-before 600 --time 5 -- train --save m",
                &["--stop-before 600", "--time 5 is 300 seconds"],
            ),
            (
                "--stop-before 60 --time 0:30 -- train --save m",
                &["--stop-before 60", "--time 0:30 is 60 seconds"],
            ),
            ("--stop-before 60 --time 2 -- train --save m", &["--time 2 is 120 seconds", "60 seconds early"]),
            ("--time abc -- train", &["--time abc", "UNLIMITED"]),
            (
                "--stop-before 60 --time UNLIMITED -- train --save m",
                &["--stop-before 60", "--time UNLIMITED has no end"],
            ),
            ("--stop-before 60 --time 0 -- train --save m", &["--stop-before 60", "--time 0 has no end"]),
            (
                "--nodes 2 --ranks-per-node 4 -- train --transport shm+ucx --ranks-per-node 3",
                &["--ranks-per-node 3 of this train", "4 ranks each", "a divisor"],
            ),
            ("--ranks-per-node 2 -- bench all_reduce --bind core", &["--bind core", "caravan starts itself"]),
            (
                "--gpus-per-node 1 -- eval --device cuda --model m --data d --threads 4",
                &["--threads 4", "--device cpu"],
            ),
            (
                "-- bench all_reduce --tuning t --algo linear",
                &["--tuning t", "--algo auto", "leave one of them away"],
            ),
            ("--stop-before 60 -- bench all_reduce", &["--stop-before 60", "this bench", "train --save"]),
            ("-- train --speed 11", &["after --", "--speed"]),
            ("-- train --stage 9", &["--stage 9", "0"]),
            ("-- train --matmul-precision high", &["--matmul-precision high", "add --dtype f32"]),
            ("-- train --steps 0", &["--steps 0", "at least 1"]),
            ("-- eval --model m --data d --micro-batch 0", &["--micro-batch 0", "at least 1"]),
            ("-- train --model 32m --seq 4096", &["--seq 4096", "32m has a context of 1024"]),
            ("-- train --seq 0", &["--seq 0", "at least 1"]),
            ("-- eval --model m --data d --seq 0", &["--seq 0", "at least 1"]),
            ("-- train --data random x", &["--data random stands alone"]),
            ("-- eval --model m --data x random", &["--data random stands alone"]),
            ("-- train --micro-batch 1000000000 --accumulate 1000000000", &["2^40 tokens", "--micro-batch"]),
            ("-- train --model d --seq 1000000000 --accumulate 1000000000", &["2^40 tokens"]),
            ("-- train --save m --metrics m/run.jsonl", &["--metrics m/run.jsonl", "--save m,"]),
            ("-- bench all_reduce --json there/a --csv there/./a", &["--csv there/./a", "--json is written"]),
            ("-- train --data -", &["--data -", "/dev/stdin"]),
            ("-- eval --model m --data -", &["--data -", "/dev/stdin"]),
            (
                "--nodes 2 -- train --data /dev/stdin",
                &["--data /dev/stdin", "a script", "'caravan tokenize'"],
            ),
            ("-- train --data d --val-data /proc/self/fd/3", &["--val-data /proc/self/fd/3", "name a file"]),
            ("-- eval --model m --data /dev/fd/63", &["--data /dev/fd/63", "name a file"]),
            ("--nodes 2 -- bench all_reduce --algo chain", &["--algo chain", "all_reduce", "bruck, "]),
            ("-- bench all_reduce -n 0", &["-n 0"]),
            ("--nodes 2 -- bench broadcast -r 2", &["-r 2", "from 0 to 1"]),
            ("--nodes 2 -- bench overlap -d all", &["-d all"]),
            ("--nodes 2 -- bench overlap -b 6", &["-b 6", "f32"]),
            ("--nodes 2 -- bench overlap -t 18446744073709551615", &["-t 1844", "at most 1000000"]),
            ("-- bench tune", &["one rank", "start 2 ranks or more"]),
            ("-- bench send_recv", &["from rank to rank", "start 2 ranks or more"]),
            ("--nodes 2 -- bench all_reduce -g 8", &["-g 8", "start 16 ranks"]),
            ("-- train --transport pigeon", &["'pigeon'", "shm"]),
            ("-- train --transport ucx+shm", &["ucx+shm", "shm+ucx"]),
            ("-- train --emulate-link nonsense", &["--emulate-link nonsense"]),
            (
                "--nodes 2 -- bench all_reduce --emulate-link latency=1us",
                &["--emulate-link latency=1us", "one machine", "on 2", "--nodes 1"],
            ),
            (
                "--nodes 2 -- train --transport shm+ucx --ranks-per-node x",
                &["--ranks-per-node x", "4:cyclic"],
            ),
            ("--nodes 2 -- train --transport shm+ucx --ranks-per-node 3", &["--ranks-per-node 3", "2 ranks"]),
            (
                "--nodes 2 --ranks-per-node 4 -- train --transport shm+ucx --ranks-per-node 2:cyclic",
                &["--ranks-per-node 2:cyclic", "which have 4 ranks each, one after another"],
            ),
            ("-- train --threads 0", &["--threads 0", "1 to 1024"]),
            ("-- train --call-timeout 0", &["--call-timeout 0", "at least 0.001"]),
            ("-- train --share-gpus", &["--share-gpus", "--device cuda"]),
            ("-- train --transport nccl", &["--transport nccl", "--device cuda"]),
            ("-- train --offload optimizer", &["--offload optimizer", "--device cuda"]),
            ("-- eval --model m --data d --transport nccl", &["nccl", "eval", "--transport auto"]),
            ("-- bench overlap --transport nccl+shm", &["nccl", "bench overlap", "--transport shm"]),
            ("-- bench all_reduce --algo native", &["--algo native", "auto has none", "--transport mpi"]),
            ("-- bench all_reduce --algo native --transport ucx", &["--algo native", "ucx has none"]),
            ("-- bench all_reduce --algo native --transport shm+mpi", &["--algo native", "mpi by itself"]),
            ("--nodes 2 -- bench tune --threads 4", &["--threads 4", "train and eval"]),
            ("--nodes 2 -- bench overlap --share-gpus", &["--share-gpus", "--transport nccl"]),
            ("-- bench all_reduce --plot x.png", &["--plot x.png", "x.svg"]),
            ("-- doctor", &["no ranks", "train"]),
            ("-- bench", &["shows help and runs no ranks", "bench and an operation"]),
            ("-- train --help", &["shows help and runs no ranks"]),
            ("-- bench --version", &["shows help and runs no ranks"]),
            ("-- bench plot a.json -o b.svg", &["no ranks"]),
            ("--job-name a\tb -- train", &["--job-name", "one word"]),
            ("--job-name it's -- train", &["--job-name 'it's'", "without quotes"]),
            ("--mpi= -- train", &["--mpi ''", "one word"]),
            ("--output run#1 -- train", &["--output 'run#1'", "without quotes and #"]),
        ] {
            let e = of(&format!("caravan sbatch {line}")).expect_err(line);
            assert_eq!(e.code(), 2);
            assert!(words.iter().all(|w| e.to_string().contains(w)), "{line}: {e}");
        }
    }
}
