//! Starts the ranks of a run and gives each its communicator.

use crate::failure::{Failure, Result};
use crate::plan::Ranks;
use crate::transports::Transport;
use collectives::Communicator;
use collectives::bootstrap::{self, Board, Identity, Launcher, spawn};
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Where every process finds its program, also when the file was replaced meanwhile.
const PROGRAM: &str = "/proc/self/exe";

/// Runs `body` as every rank of the run: here as the rank that `identity` says this process is, as threads of this
/// process, or as processes that are this one again with the same arguments, and `variable` in their environment.
///
/// # Errors
/// The failure of the rank that failed first.
pub fn launch(
    ranks: &Ranks,
    identity: Option<&Identity>,
    variable: Option<(&'static str, String)>,
    body: &(dyn Fn(Communicator) -> Result<()> + Sync),
) -> Result<()> {
    match (identity, ranks.transport) {
        (Some(identity), _) => as_rank(ranks, identity, body),
        (None, Transport::Threads) => as_threads(ranks, body),
        (None, Transport::Shm) => supervise(ranks, variable),
    }
}

/// This process is a rank already.
fn as_rank(ranks: &Ranks, identity: &Identity, body: &dyn Fn(Communicator) -> Result<()>) -> Result<()> {
    let done = connect(ranks, identity).and_then(body);
    let Err(failure) = done else { return Ok(()) };
    let board = match identity.launcher {
        Launcher::Caravan => Board::inherited().ok().flatten(),
        _ => None,
    };
    let Some(board) = board else {
        let text = format!("rank {}: {failure}", identity.rank);
        return Err(Failure::Ranks { text, code: failure.code() });
    };
    // What follows from another rank's failure is not announced: the board has the cause.
    if !matches!(failure, Failure::Consequence(_)) {
        board.announce(identity.rank, &failure.to_string());
    }
    Err(Failure::Told { code: failure.code() })
}

/// The communicator over all ranks of the job.
fn connect(ranks: &Ranks, identity: &Identity) -> Result<Communicator> {
    if identity.world > 1 && ranks.transport == Transport::Threads {
        return Err(Failure::usage(format!(
            "--transport threads has its ranks in one process, but {} started {}: take --transport shm",
            identity.launcher.name(),
            identity.world
        )));
    }
    let options = bootstrap::Options { timeout: ranks.rendezvous_timeout, ..Default::default() };
    let transport = bootstrap::shm_group(identity, &options)?;
    Ok(Communicator::new(transport, ranks.options)?)
}

/// Ranks as threads of this process.
fn as_threads(ranks: &Ranks, body: &(dyn Fn(Communicator) -> Result<()> + Sync)) -> Result<()> {
    let members = Communicator::threads_with(ranks.world, ranks.options)?;
    let ended: Vec<Result<()>> = std::thread::scope(|scope| {
        let threads: Vec<_> = members.into_iter().map(|comm| scope.spawn(move || body(comm))).collect();
        let join = |(rank, thread): (usize, std::thread::ScopedJoinHandle<'_, Result<()>>)| {
            thread.join().unwrap_or_else(|_| Err(Failure::run(format!("rank {rank} panicked"))))
        };
        threads.into_iter().enumerate().map(join).collect()
    });
    let failures = || ended.iter().enumerate().filter_map(|(rank, r)| r.as_ref().err().map(|e| (rank, e)));
    let cause = failures().find(|(_, e)| !matches!(e, Failure::Consequence(_))).or_else(|| failures().next());
    match cause {
        None => Ok(()),
        Some((rank, failure)) => {
            let text = format!("rank {rank} failed: {failure}");
            Err(Failure::Ranks { text, code: failure.code() })
        }
    }
}

/// Ranks as processes of this program.
fn supervise(ranks: &Ranks, variable: Option<(&'static str, String)>) -> Result<()> {
    let mut arguments = std::env::args_os();
    let name = arguments.next().unwrap_or_else(|| "caravan".into());
    let arguments: Vec<_> = arguments.collect();
    let report = spawn::supervise(ranks.world, |_| {
        let mut command = Command::new(PROGRAM);
        command.arg0(&name).args(&arguments).envs(variable.clone());
        command
    })?;
    match report.sentence() {
        None => Ok(()),
        Some(text) => Err(Failure::Ranks { text, code: report.exit_code() }),
    }
}
