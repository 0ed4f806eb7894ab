//! The `caravan` program: literal flags, a validated plan, a run.

// `json!` descends once for every field of the description of a run.
#![recursion_limit = "256"]
// They panic where nobody reads: `out` prints.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod about;
mod agree;
mod args;
mod bench;
mod bind;
mod checkpoint;
mod colours;
mod data;
mod device;
mod doctor;
mod eval;
mod evaluate;
mod failure;
mod files;
mod forecast;
mod gpus;
mod human;
mod layers;
mod leftovers;
mod limits;
mod machine;
mod metrics;
#[cfg_attr(not(feature = "mpi"), path = "mpi/absent.rs")]
mod mpi;
mod out;
mod plan;
mod printed;
mod progress;
mod ranks;
mod rate;
mod report;
mod runs;
mod sample;
mod save;
mod sbatch;
mod text;
mod tokenize;
mod tokenizer;
mod train;
mod transports;
mod tuning;

use args::{Cli, Command, EvalArgs, Precision, TrainArgs};
use clap::error::ErrorKind;
use collectives::bootstrap::{Identity, spawn};
use collectives::{bf16, f16};
use eval::EvalPlan;
use failure::Result;
use plan::TrainPlan;
use std::process::ExitCode;

fn main() -> ExitCode {
    limits::allow_files();
    // SAFETY: the program begins, and nothing before this starts a thread.
    unsafe {
        transports::tame_ucx();
        gpus::tame_nccl();
    }
    spawn::let_writes_fail();
    let cli = Cli::read(std::env::args_os()).unwrap_or_else(|unreadable| {
        let code = unreadable.exit_code();
        match unreadable.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
                if let Err(unprinted) = out::written(unreadable.print()) {
                    unprinted.report();
                    std::process::exit(unprinted.code().into());
                }
            }
            ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
                let _ = unreadable.print();
                never_came(code as u8, "it was given no command");
            }
            _ => {
                let why = failure::sentence(&unreadable);
                let identity = Identity::from_env().ok().flatten();
                let whose = ranks::whose(identity.as_ref().filter(|_| runs_ranks()));
                // Clap knows of its own which flag was wrong, and not of what a file says.
                let of_file =
                    unreadable.kind() == ErrorKind::ValueValidation && unreadable.context().next().is_none();
                let help = if of_file { "" } else { " (--help shows the flags)" };
                out::note(format_args!("caravan: {whose}{why}{help}"));
                never_came(code as u8, &why);
            }
        }
        std::process::exit(code)
    });
    let asked = cli.command.ranks();
    if asked.is_some_and(|asked| asked.share_gpus && transports::beside_nccl(&asked.transport).is_some())
        // SAFETY: nothing before this starts a thread.
        && let Err(failure) = unsafe { gpus::permit_sharing(Identity::from_env().ok().flatten().as_ref()) }
    {
        return ranks::report(&failure, asked);
    }
    if asked.is_some() {
        if let Ok(Some(identity)) = Identity::from_env()
            && let Err(failure) = limits::end_with(identity.launcher)
        {
            return ranks::report(&failure, asked);
        }
        machine::free();
    }
    if let Command::Tokenize(_) | Command::Checkpoint(_) = &cli.command {
        leftovers::listen();
    }
    let done = match &cli.command {
        Command::Train(args) => train(args),
        Command::Plan(args) => forecast::plan(args),
        Command::Eval(args) => eval(args),
        Command::Bench(args) => bench::bench(args),
        Command::Tokenize(args) => tokenize::tokenize(args),
        Command::Report(args) => runs::report(args),
        Command::Checkpoint(args) => checkpoint::checkpoint(args),
        Command::Sbatch(args) => sbatch::sbatch(args),
        Command::Doctor(args) => doctor::doctor(args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) if asked.is_some() => ranks::report(&failure, asked),
        Err(failure) => failure.report(),
    }
}

/// A rank that fails before there are ranks: the others may wait for it, whatever it was to do if its command is mistyped. Of
/// commands that run none nobody waits for anything, and other programs of the job go on.
fn never_came(code: u8, why: &str) {
    if runs_ranks()
        && let Ok(Some(identity)) = Identity::from_env()
    {
        ranks::absent(&identity, code, why, None);
    }
}

/// Whether the command does, or may, as far as it can be read.
fn runs_ranks() -> bool {
    let mut words = std::env::args_os().skip(1).filter_map(|word| word.into_string().ok());
    match words.next().as_deref() {
        None | Some("doctor" | "plan" | "tokenize" | "report" | "checkpoint" | "sbatch" | "help") => false,
        Some("bench") => !words.next().is_some_and(|what| what == "kernels" || what == "plot"),
        Some(_) => true,
    }
}

fn train(args: &TrainArgs) -> Result<()> {
    let identity = ranks::identity()?;
    let plan = TrainPlan::new(args, identity.as_ref()).map_err(|e| args.placed(e))?;
    let done = ranks::launch(&plan.ranks, identity.as_ref(), plan.feed.handover(), &|comm| {
        agree::check(&comm, &train::signature(&plan))?;
        plan::lead_tokens(&plan.feed, identity.as_ref(), &comm)?;
        ranks::lead(identity.as_ref(), &comm, || plan.check_written())?;
        match plan.dtype {
            Precision::Bf16 => train::rank::<bf16>(&plan, comm),
            Precision::F16 => train::rank::<f16>(&plan, comm),
            Precision::F32 => train::rank::<f32>(&plan, comm),
        }
    });
    // A rank that was killed while it saved could not clean up after itself; and over NFS files of a replaced model stay
    // beside its place as long as somebody has them open, as this process may have those that it started from.
    let saved = plan.save.clone().filter(|_| identity.as_ref().is_none_or(|rank| rank.rank == 0));
    let checkpoints = plan.checkpoints.as_ref().map(|checkpoints| checkpoints.dir.clone());
    drop(plan);
    if let Some(dir) = checkpoints.filter(|_| identity.as_ref().is_none_or(|rank| rank.rank == 0)) {
        // Unless another run has begun there.
        let _ = checkpoint::clean(&dir);
    }
    if let Some(dir) = saved {
        // It lies beside the directory, not beside a link to it.
        models::remove_unfinished(dir.canonicalize().as_deref().unwrap_or(&dir));
    }
    done
}

fn eval(args: &EvalArgs) -> Result<()> {
    let identity = ranks::identity()?;
    let plan = EvalPlan::new(args, identity.as_ref())?;
    ranks::launch(&plan.ranks, identity.as_ref(), plan.feed.handover(), &|comm| {
        agree::check(&comm, &eval::signature(&plan))?;
        plan::lead_tokens(&plan.feed, identity.as_ref(), &comm)?;
        match plan.dtype {
            Precision::Bf16 => eval::rank::<bf16>(&plan, &comm),
            Precision::F16 => eval::rank::<f16>(&plan, &comm),
            Precision::F32 => eval::rank::<f32>(&plan, &comm),
        }
    })
}
