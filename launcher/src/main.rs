//! The `caravan` program: literal flags, a validated plan, a run.

mod args;
mod data;
mod doctor;
mod failure;
mod human;
mod machine;
mod metrics;
mod progress;
mod rate;
mod text;
mod tokenize;
mod tokenizer;
mod transports;

use args::{Cli, Command};
use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = match &cli.command {
        Command::Tokenize(args) => tokenize::tokenize(args),
        Command::Doctor(args) => doctor::doctor(args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(),
    }
}
