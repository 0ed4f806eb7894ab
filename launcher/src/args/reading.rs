//! From words to flags, also those that a file stands for.

use super::{Cli, deepspeed, meant};
use crate::failure;
use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches};
use std::ffi::OsString;

impl Cli {
    /// Reads a command line, its first word the program's name. Every flag's value may be a negative number: where that
    /// makes no sense, what is wrong is the value and not an unknown flag `-1`.
    ///
    /// # Errors
    /// Clap's, also where help or the version was asked for.
    pub fn read(words: impl IntoIterator<Item = impl Into<OsString> + Clone>) -> Result<Self, clap::Error> {
        let mut command = with_negative_numbers(Cli::command());
        let words: Vec<OsString> = words.into_iter().map(Into::into).collect();
        let (mut cli, matches) = Self::parsed(&mut command, &words)?;
        let path = cli.command.train().and_then(|train| train.deepspeed.clone());
        let (Some(path), Some((name, typed))) = (path, matches.subcommand()) else { return Ok(cli) };
        let unreadable = |text| clap::Error::raw(ErrorKind::ValueValidation, format!("{text}\n"));
        let flags = command.find_subcommand(name).unwrap_or(&command);
        let file = deepspeed::File::read(&path, flags, typed).map_err(unreadable)?;
        // Behind the names of the program and of the command.
        let (begin, typed) = words.split_at(2);
        let all: Vec<OsString> =
            begin.iter().cloned().chain(file.words().map(Into::into)).chain(typed.iter().cloned()).collect();
        let read = Self::parsed(&mut command, &all);
        let (mut cli, _) = read.map_err(|e| unreadable(file.place(failure::sentence(&e))))?;
        if let Some(train) = cli.command.train() {
            train.configuration = Some(file);
        }
        Ok(cli)
    }

    /// Reads words as they are.
    fn parsed(
        command: &mut clap::Command,
        words: &[OsString],
    ) -> Result<(Self, clap::ArgMatches), clap::Error> {
        let matches = command.try_get_matches_from_mut(words);
        let matches = matches.map_err(|e| meant::meant(e, command, words))?;
        let cli = Cli::from_arg_matches(&matches).map_err(|e| e.format(command))?;
        Ok((cli, matches))
    }
}

fn with_negative_numbers(command: clap::Command) -> clap::Command {
    let flag = |arg: clap::Arg| {
        let takes = !arg.is_positional() && arg.get_action().takes_values();
        arg.allow_negative_numbers(takes)
    };
    command.mut_args(flag).mut_subcommands(with_negative_numbers)
}
