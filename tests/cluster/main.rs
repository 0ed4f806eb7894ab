//! The program under the launchers of clusters: mpirun of Open MPI and of MPICH, a real Slurm on this machine, and
//! two hosts that are network name spaces. What is not installed is skipped, with the reason.
//!
//! With the feature `mpi` the same tests run over MPI, under the launcher of the library that was built in.

mod across_hosts;
// By their names among the first to begin, because the longest of all is there.
mod allocations;
mod by_hand;
mod launchers;
mod native;

use harness::Bench;
use std::process::Command;
use std::time::Duration;

/// The program under test.
const CARAVAN: &str = env!("CARGO_BIN_EXE_caravan");

/// So soon after one of its ranks was killed, whichever, all of a job has ended: README promises that.
const PROMISED: Duration = Duration::from_secs(5);

fn bench() -> Bench {
    Bench::new(CARAVAN)
}

/// A launcher of MPI programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mpirun {
    OpenMpi,
    Mpich,
}

impl Mpirun {
    const ALL: [Mpirun; 2] = [Mpirun::OpenMpi, Mpirun::Mpich];

    fn program(self) -> &'static str {
        match self {
            Mpirun::OpenMpi => "mpirun.openmpi",
            Mpirun::Mpich => "mpirun.mpich",
        }
    }

    /// Where it tells a process its rank.
    fn rank_variable(self) -> &'static str {
        match self {
            Mpirun::OpenMpi => "OMPI_COMM_WORLD_RANK",
            Mpirun::Mpich => "PMI_RANK",
        }
    }

    /// Whether what a job said when this rank of it was killed names the rank. Of Open MPI's it does always: mpirun says it,
    /// and ranks do that find it themselves. Hydra kills the others at the same moment, most often before they could say
    /// anything, and itself names processes and hosts only.
    #[track_caller]
    fn names_the_killed(self, victim: usize, stderr: &str) {
        if self == Mpirun::OpenMpi {
            assert!(stderr.contains(&format!("rank {victim} ")), "rank {victim} is not named: {stderr}");
        }
    }

    /// With which `srun --mpi` Slurm starts its programs.
    fn plugin(self) -> &'static str {
        match self {
            Mpirun::OpenMpi => "pmix",
            Mpirun::Mpich => "pmi2",
        }
    }

    /// Flags with which root may start any number of ranks on any number of cores.
    fn flags(self) -> &'static [&'static str] {
        match self {
            Mpirun::OpenMpi => &["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"],
            Mpirun::Mpich => &[],
        }
    }

    /// Those that are tried: the ones that are installed, or only that of the MPI that is built in, because a build
    /// without MPI tries the others. What is missing is skipped aloud.
    fn tried() -> Vec<Mpirun> {
        let all = Self::built_in().map_or(Self::ALL.to_vec(), |one| vec![one]);
        all.into_iter().filter(|m| harness::installed(m.program())).collect()
    }

    /// The launcher, ready for its ranks.
    fn command(self, bench: &Bench) -> Command {
        let mut command = Command::new(self.program());
        command.args(self.flags());
        bench.prepare(&mut command);
        // Open MPI keeps files of a session there, which the test looks for.
        command.env("TMPDIR", bench.path("."));
        command
    }

    /// `-n RANKS caravan ARGS`, once for each of these.
    fn run(self, bench: &Bench, parts: &[(usize, &str)]) -> Command {
        let mut command = self.command(bench);
        for (at, (ranks, args)) in parts.iter().enumerate() {
            if at > 0 {
                command.arg(":");
            }
            command.args(["-n", &ranks.to_string()]);
            command.args(args.split_whitespace());
        }
        command
    }

    /// The library that the program was built against, if it was built against one.
    fn built_in() -> Option<Mpirun> {
        if !cfg!(feature = "mpi") {
            return None;
        }
        let doctor = bench().run("doctor --json").success().json();
        let rows = doctor["transports"].as_array().cloned().unwrap_or_default();
        let mpi = rows.into_iter().find(|row| row["name"] == "mpi").expect("a row about mpi");
        let remark = mpi["remark"].as_str().unwrap_or_default();
        let found = [("Open MPI", Mpirun::OpenMpi), ("MPICH", Mpirun::Mpich)];
        let found = found.into_iter().find(|(name, _)| remark.contains(name));
        Some(found.unwrap_or_else(|| panic!("an unknown MPI: {remark}")).1)
    }

    /// The transports that are tried between ranks of one host.
    fn transports() -> Vec<&'static str> {
        match Self::built_in() {
            Some(_) => vec!["mpi"],
            None if bench().offers("ucx") => vec!["shm", "ucx"],
            None => vec!["shm"],
        }
    }
}

/// A short training run, without what differs between runs.
const TRAIN: &str =
    "train --model nano --data text.txt --seq 16 --steps 4 --warmup 1 --micro-batch 1 --sample 0 --quiet";

/// The flags of a run whose trace is wanted.
fn traced(name: &str, flags: &str) -> String {
    format!("{TRAIN} --metrics {name}.jsonl --save {name} {flags}")
}

/// Fails the test unless both runs gave the same bits.
#[track_caller]
fn same(bench: &Bench, one: &str, other: &str) {
    let [one_trace, other_trace] = [one, other].map(|name| bench.trace(&format!("{name}.jsonl"), name));
    assert_eq!(one_trace.0, other_trace.0, "{one} and {other}");
    assert!(one_trace.1 == other_trace.1, "weights of {one} and {other}");
}
