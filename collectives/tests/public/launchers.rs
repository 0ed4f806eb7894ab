//! Ranks started by other people's launchers find each other. A launcher that is not installed is skipped, aloud.

use crate::ranks::{connect, identity, is_rank, rank_of, this_test};
use collectives::bootstrap::{Identity, Launcher};
use collectives::{Communicator, Options, ReduceOp};
use harness::Bench;
use std::process::Command;

/// In a rank: who it is, and a sum over all ranks that proves that they met.
fn sum(launcher: Launcher) {
    let me: Identity = identity();
    assert_eq!((me.launcher, me.world, me.local_size), (launcher, 3, Some(3)));
    let comm = Communicator::new(connect().expect("a group"), Options::default()).expect("a communicator");
    let mut numbers = [me.rank as i64, 1];
    comm.all_reduce_in_place(&mut numbers[..], ReduceOp::Sum).expect("a sum");
    assert_eq!(numbers, [3, 3]);
}

/// Runs this test's ranks under `program`, twice, the second time with a shell in between as job scripts have it.
fn under(test: &str, program: &str, arguments: &[&str], launcher: Launcher) {
    if is_rank(test) {
        return sum(launcher);
    }
    if !harness::installed(program) {
        return;
    }
    let rank = rank_of(test);
    for shell in [false, true] {
        let mut command = Command::new(program);
        command.args(arguments).args(["-n", "3"]);
        if shell {
            command.args(["sh", "-c", r#""$0" "$@"; exit $?"#]);
        }
        command.arg(rank.get_program()).args(rank.get_args());
        for (name, value) in rank.get_envs() {
            command.env(name, value.expect("a value"));
        }
        let bench = Bench::new(program);
        bench.prepare(&mut command);
        let outcome = bench.outcome(&mut command);
        let text = outcome.stdout + &outcome.stderr;
        assert_eq!(outcome.code, Some(0), "{program}, shell: {shell}: {text}");
        assert_eq!(text.matches("1 passed").count(), 3, "{text}");
    }
}

#[test]
fn open_mpi() {
    let root = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"];
    under(this_test!(), "mpirun.openmpi", &root, Launcher::OpenMpi);
}

#[test]
fn mpich() {
    under(this_test!(), "mpirun.mpich", &[], Launcher::Pmi);
}
