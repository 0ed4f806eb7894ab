//! Starts the ranks of a run and gives each its communicator.

mod late;
mod own;

use crate::agree;
use crate::args::RankArgs;
use crate::bench::native::Native;
use crate::bind;
use crate::failure::{Failure, Result, VERDICT};
use crate::machine::PROGRAM;
use crate::mpi;
use crate::out;
use crate::plan::Ranks;
use crate::transports::Transport;
use collectives::bootstrap::spawn;
use collectives::bootstrap::{self, Board, Identity, Launcher, Rendezvous, variables};
use collectives::transport::ucx::{self, UcxTransport};
use collectives::transport::{Nodes, PerNode, threads};
use collectives::{Communicator, Error};
use std::cell::RefCell;
use std::process::ExitCode;
use std::time::Duration;

/// How long a launcher takes to pass a sentence on before it is asked to end the job.
const SENTENCE: Duration = Duration::from_secs(1);

/// This process among the ranks that something has started, if it is one.
///
/// # Errors
/// Variables of its environment that make no sense.
pub fn identity() -> Result<Option<Identity>> {
    Identity::from_env().map_err(|e| match e {
        collectives::Error::Launch(text) => Failure::Usage(text),
        e => Failure::usage(e),
    })
}

/// Runs `body` as every rank of the run: here as the rank that `identity` says this process is, as threads of this
/// process, or as processes that are this one again with the same arguments, and `variables` in their environment.
///
/// # Errors
/// The failure of the rank that failed first.
pub fn launch(
    ranks: &Ranks,
    identity: Option<&Identity>,
    variables: Vec<(&'static str, String)>,
    body: &(dyn Fn(Communicator) -> Result<()> + Sync),
) -> Result<()> {
    launch_with_native(ranks, identity, variables, &|comm, _| body(comm))
}

/// The same for a body that also takes the transport's own collectives, which it gets if `ranks` wants them.
///
/// # Errors
/// As [`launch`].
pub fn launch_with_native(
    ranks: &Ranks,
    identity: Option<&Identity>,
    variables: Vec<(&'static str, String)>,
    body: &(dyn Fn(Communicator, Option<Native>) -> Result<()> + Sync),
) -> Result<()> {
    match (identity, ranks.transport) {
        (Some(identity), _) => as_rank(ranks, identity, body),
        (None, Transport::Threads) => as_threads(ranks, &|comm| body(comm, None)),
        (None, Transport::Mpi) => Err(Failure::usage(format!(
            "--transport mpi gets its ranks from mpirun or srun: take 'mpirun -n {} caravan ...'",
            ranks.world
        ))),
        (None, Transport::Shm | Transport::Ucx) => own::supervise(ranks, variables),
    }
}

/// Whether something else than this program has started the ranks.
pub fn started_elsewhere(identity: Option<&Identity>) -> bool {
    identity.is_some() && !spawn::supervised()
}

/// This process is a rank already.
fn as_rank(
    ranks: &Ranks,
    identity: &Identity,
    body: &dyn Fn(Communicator, Option<Native>) -> Result<()>,
) -> Result<()> {
    let mut group = None;
    // Others bind their ranks themselves. Before anything is started, so that threads of this rank stay with it.
    let bound = match spawn::supervised() {
        true => bind::to_share(ranks.bind, identity.rank, identity.world),
        false => Ok(()),
    };
    let done = bound.and_then(|()| connect(ranks, identity)).and_then(|(comm, native)| {
        group = Some(comm.clone());
        body(comm, native)
    });
    let Err(failure) = done else { return Ok(()) };
    if failure.is_verdict() {
        // No rank has failed, and all may have come to it: rank 0 says it.
        return if identity.rank == 0 { Err(pronounce(failure)) } else { Ok(()) };
    }
    let board = board(identity);
    // The board has to have a cause before the others notice: one that has ended without a cause on the board would be
    // taken for it. What follows from another rank's failure is kept there for when none ever comes.
    let cause = !matches!(failure, Failure::Consequence(_));
    match &board {
        Some(board) if cause => board.announce(identity.rank, &failure.to_string()),
        Some(board) => board.note(identity.rank, &failure.to_string()),
        None => {}
    }
    if board.is_none() {
        // Before others hear of it: a launcher may end this rank as soon as the first of them has ended.
        match failure {
            Failure::Common(_) => out::note(format_args!("caravan: {failure}")),
            _ => out::note(format_args!("caravan: {}{failure}", whose(Some(identity)))),
        }
    }
    if let (Some(comm), true) = (&group, cause) {
        comm.abort(&failure.to_string());
    }
    if cause && board.is_none() {
        // Ranks that have met notice a failure, but for one that hangs. That and who never came have to be ended.
        end_job(identity, failure.code());
    }
    Err(Failure::Told { code: failure.code() })
}

/// Where a rank tells its supervisor, if it has one, why it fails.
fn board(identity: &Identity) -> Option<Board> {
    match identity.launcher {
        Launcher::Caravan => Board::inherited().ok().flatten(),
        _ => None,
    }
}

/// What `rank` says before a library, out of which it does not come, ends with the process.
fn last_word(rank: usize, why: &Error) {
    match Board::inherited() {
        Ok(Some(board)) => board.announce(rank, &why.to_string()),
        _ => out::note(format_args!("caravan: rank {rank}: {why}")),
    }
}

/// Reports how a command with ranks has failed. Of a rank that has not met the others the supervisor tells it: once,
/// however many ranks fail alike. Where there is none, the others, who may wait for it, are ended.
pub fn report(failure: &Failure, ranks: Option<&RankArgs>) -> ExitCode {
    let identity = Identity::from_env().ok().flatten();
    // What is anything else is told already, or of ranks that have met.
    let (Some(identity), Failure::Usage(text) | Failure::Run(text)) = (identity, failure) else {
        return failure.report();
    };
    if let Some(board) = board(&identity) {
        board.announce(identity.rank, text);
        return ExitCode::from(failure.code());
    }
    let code = match text {
        _ if identity.world == 1 => failure.report(),
        _ => {
            out::note(format_args!("caravan: {}{text}", whose(Some(&identity))));
            ExitCode::from(failure.code())
        }
    };
    absent(&identity, failure.code(), text, ranks);
    code
}

/// Before a sentence of one of several ranks, which may be on several hosts: other files lie there.
pub fn whose(identity: Option<&Identity>) -> String {
    match identity.filter(|identity| identity.world > 1) {
        Some(identity) => format!("rank {} on {}: ", identity.rank, bootstrap::host_name()),
        None => String::new(),
    }
}

/// Says the verdict where a supervisor would take it for the rank's failure.
fn pronounce(verdict: Failure) -> Failure {
    if !spawn::supervised() {
        return verdict;
    }
    verdict.report();
    let code = if let Failure::Stopped { .. } = verdict { verdict.code() } else { VERDICT };
    Failure::Told { code }
}

/// What rank 0 of ranks that others have started looks at for all of them, who hear of its failure: where `caravan` starts
/// them, it has looked before.
pub fn lead(
    identity: Option<&Identity>,
    comm: &Communicator,
    look: impl FnOnce() -> Result<()>,
) -> Result<()> {
    if identity.is_some() && comm.rank() == 0 { look() } else { Ok(()) }
}

/// The others would wait for this rank, which has failed before it could meet them and has said why. Where nobody surely ends
/// them it meets them to tell them, as long as they would wait for it: srun lets them wait unless it was told otherwise, torchrun
/// on other hosts, and of ranks by hand each is on its own.
pub fn absent(identity: &Identity, code: u8, why: &str, ranks: Option<&RankArgs>) {
    let ends_all = std::env::var("SLURM_KILL_BAD_EXIT").is_ok_and(|set| set.trim() == "1");
    let alone = match identity.launcher {
        Launcher::Slurm => !ends_all,
        Launcher::TorchRun => true,
        Launcher::Caravan => !spawn::supervised(),
        Launcher::OpenMpi | Launcher::Pmi | Launcher::Alone => false,
    };
    if alone && identity.world > 1 {
        let asked =
            ranks.and_then(|ranks| Duration::try_from_secs_f64(ranks.rendezvous_timeout.value()).ok());
        let options = meeting(asked.unwrap_or(bootstrap::Options::default().timeout));
        // Who are not there hear of nothing, and of this rank that it has not come.
        let _ = Rendezvous::decline(identity, &options, why);
    }
    end_job(identity, code);
}

/// How ranks of this program meet.
pub fn meeting(timeout: Duration) -> bootstrap::Options {
    bootstrap::Options { timeout, program: PROGRAM, ..Default::default() }
}

/// Ends the ranks that hear nothing of this one's failure, once its sentence has gone its way through the launcher, and those
/// who hear of it had the time to end.
fn end_job(identity: &Identity, code: u8) {
    // Alone it has none, and may be one of several commands of a script, which the launcher would end.
    if identity.launcher == Launcher::Pmi && identity.world > 1 {
        std::thread::sleep(SENTENCE);
        identity.end_job(code);
    }
}

/// The communicator over all ranks of the job, and its transport's own collectives if those are wanted.
fn connect(ranks: &Ranks, identity: &Identity) -> Result<(Communicator, Option<Native>)> {
    if identity.world > 1 && ranks.transport == Transport::Threads {
        return Err(Failure::usage(format!(
            "--transport threads has its ranks in one process, but {} started {}: take --transport shm",
            identity.launcher.name(),
            identity.world
        )));
    }
    let options = meeting(ranks.rendezvous_timeout);
    // Who have met, and know who shares a host.
    let mut met = None;
    let (transport, native): (Box<dyn collectives::transport::Transport>, _) = match ranks.transport {
        Transport::Shm | Transport::Threads => {
            let group = bootstrap::shm_over(met.insert(meet(ranks, identity, &options)?), &options);
            let with_flag = |e| match Failure::from(e) {
                Failure::Usage(text) => Failure::usage(format!("{text} (--transport)")),
                other => other,
            };
            (group.map_err(with_flag)?, None)
        }
        Transport::Ucx => {
            let rendezvous = met.insert(meet(ranks, identity, &options)?);
            let (within, call_timeout) = (options.timeout, ranks.options.deadline);
            let start = ucx::Start { within, call_timeout, tell: last_word };
            (Box::new(UcxTransport::join(rendezvous, &start)?), None)
        }
        Transport::Mpi => {
            // MPI does not say which rank has not come, so ranks meet before, where they surely can.
            let here = identity.local_size == Some(identity.world);
            let addressed = identity.rendezvous.is_some() && identity.launcher != Launcher::OpenMpi;
            let meets = here || addressed || std::env::var_os(variables::RENDEZVOUS).is_some();
            if meets {
                drop(meet(ranks, identity, &options)?);
            }
            mpi::connect(ranks, identity, &options, meets)?
        }
    };
    let knowing = met.as_ref().map(|met| ranks.met(met.local_ranks().len(), identity));
    if let (Some((_, Some(advice))), 0) = (&knowing, identity.rank) {
        out::note(format_args!("caravan: {advice}"));
    }
    let ranks = knowing.as_ref().map_or(ranks, |(ranks, _)| ranks);
    let (met, per_node) = (RefCell::new(met), ranks.layers.per_node);
    let transport = ranks.layers.over(
        &ranks.label,
        transport,
        |outer| match &*met.borrow() {
            Some(rendezvous) => rendezvous.nodes(per_node),
            None => bootstrap::nodes_of(outer, &options, per_node),
        },
        |outer, nodes| match &mut *met.borrow_mut() {
            Some(rendezvous) => rendezvous.shm_inside(nodes, &options),
            None => bootstrap::shm_inside(outer, identity, &options, nodes),
        },
    )?;
    Ok((ranks.communicator(transport)?, native))
}

/// Meets the other ranks, whose calls must fit this one's.
fn meet(ranks: &Ranks, identity: &Identity, options: &bootstrap::Options) -> Result<Rendezvous> {
    let mut rendezvous =
        Rendezvous::join(identity, options).map_err(|e| late::perhaps_slow(e, ranks, identity))?;
    agree::check_by(identity.rank, |blob| rendezvous.exchange(blob), &ranks.signature())
        .map_err(|e| late::perhaps_others(e, identity))?;
    Ok(rendezvous)
}

/// Ranks as threads of this process.
fn as_threads(ranks: &Ranks, body: &(dyn Fn(Communicator) -> Result<()> + Sync)) -> Result<()> {
    let ended: Vec<Result<()>> = std::thread::scope(|scope| {
        let start = |(rank, member)| {
            std::thread::Builder::new().spawn_scoped(scope, move || {
                bind::to_share(ranks.bind, rank, ranks.world)?;
                body(communicator(ranks, member)?)
            })
        };
        let threads: Vec<_> = threads::group(ranks.world).into_iter().enumerate().map(start).collect();
        let join =
            |(rank, thread): (usize, std::io::Result<std::thread::ScopedJoinHandle<'_, _>>)| match thread {
                Ok(thread) => {
                    thread.join().unwrap_or_else(|_| Err(Failure::run(format!("rank {rank} panicked"))))
                }
                Err(e) => Err(collectives::Error::start("start a thread for it", e).into()),
            };
        threads.into_iter().enumerate().map(join).collect()
    });
    let failures = || ended.iter().enumerate().filter_map(|(rank, r)| r.as_ref().err().map(|e| (rank, e)));
    let cause = failures()
        .find(|(_, e)| !matches!(e, Failure::Consequence(_)) && !e.is_verdict())
        .or_else(|| failures().find(|(_, e)| e.is_verdict()))
        .or_else(|| failures().next());
    match cause {
        None => Ok(()),
        // What makes no sense, or was no success, is no rank's failure.
        Some((_, failure))
            if matches!(failure, Failure::Usage(_) | Failure::Common(_)) || failure.is_verdict() =>
        {
            Err(failure.clone())
        }
        Some((rank, failure)) => {
            let text = format!("rank {rank} failed: {failure}");
            Err(Failure::Ranks { text, code: failure.code() })
        }
    }
}

/// The communicator of a rank that is a thread.
fn communicator(ranks: &Ranks, member: threads::Threads) -> Result<Communicator> {
    let transport = ranks.layers.over(
        &ranks.label,
        Box::new(member),
        |outer| {
            let (size, per_node) = (outer.size(), ranks.layers.per_node);
            Nodes::by_hand(size, per_node.unwrap_or(PerNode::Block(size)))
        },
        |outer, nodes| {
            let node = nodes.with(outer.rank());
            (node.len() > 1)
                .then(|| outer.subgroup(node, node[0] as u64, ranks.rendezvous_timeout))
                .transpose()
        },
    )?;
    ranks.communicator(transport)
}
