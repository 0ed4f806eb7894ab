//! `--deepspeed FILE`: a DeepSpeed configuration in place of the flags that it stands for. What it says is written down as
//! words of the command line, which is then read again, so that all that holds of flags holds of it.

mod batch;
mod document;
mod json;
mod keys;
mod schedule;
mod table;
mod words;

use super::{DeviceKind, Number, Precision, TrainArgs};
use crate::failure::{Failure, Result};
use crate::files;
use crate::human;
use crate::plan::scaling_read;
use batch::Batch;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command};
use document::Document;
use keys::Told;
use serde_json::{Value, json};
use std::borrow::Cow;
use std::path::{Path, PathBuf};
use words::{Beside, Word};

/// A configuration, and what becomes of each of its keys.
#[derive(Clone, Debug, PartialEq)]
pub struct File {
    path: PathBuf,
    told: Told,
    batch: Batch,
}

impl File {
    /// Reads the file at `path` beside the flags of a `command` that were typed.
    ///
    /// # Errors
    /// What cannot be read or is not supported, and a flag that says something else, in one sentence with the file's name.
    pub fn read(path: &Path, command: &Command, typed: &ArgMatches) -> std::result::Result<Self, String> {
        let name = path.display();
        let text = files::read_regular(path).map_err(|e| format!("--deepspeed {name}: {e}"))?;
        let file = json::parse(&text).and_then(|value| {
            let document = Document(value);
            // Others have other keys.
            words::optimizer_type(&document)?;
            schedule::schedule_type(&document)?;
            let mut told = keys::check(&document)?;
            words::read(&document, &beside(typed), &mut told)?;
            let batch = Batch::read(
                &document,
                ["micro_batch", "accumulate"].map(|id| is_typed(typed, id)),
                &mut told,
            )?;
            Ok(File { path: path.to_owned(), told, batch })
        });
        let mut file = file.map_err(|e| format!("{name}: {e}"))?;
        for word in &mut file.told.words {
            word.typed = is_typed(typed, &id(word.flag));
        }
        for word in &file.told.words {
            file.compare(word, command, typed)?;
        }
        file.told.words.retain(|word| word.said.is_some() || !word.typed);
        Ok(file)
    }

    /// Whether a flag that was typed says the same as the file.
    fn compare(&self, word: &Word, command: &Command, typed: &ArgMatches) -> std::result::Result<(), String> {
        let (Some(said), Some(arg)) =
            (&word.said, command.get_arguments().find(|arg| *arg.get_id() == id(word.flag)))
        else {
            return Ok(());
        };
        let raw = typed.get_raw(arg.get_id().as_str()).and_then(|mut all| all.next_back());
        let Some(raw) = raw.filter(|_| word.typed) else { return Ok(()) };
        let (raw, flag) = (raw.to_string_lossy(), word.flag);
        if same(arg, &raw, &word.value) {
            return Ok(());
        }
        let meant =
            if *said == word.value { String::new() } else { format!(", which is {flag} {}", word.value) };
        Err(format!(
            "{flag} {raw}, and {} says {}{meant}: say it in one place, or \"auto\" there",
            self.path.display(),
            format!("{} {said}", word.key).trim_end()
        ))
    }

    /// The words that it adds to a command line: a flag stands there once, which says the same where it was typed.
    pub fn words(&self) -> impl Iterator<Item = String> {
        let added = self.told.words.iter().filter(|word| !word.typed);
        added.map(|word| format!("{}={}", word.flag, word.value))
    }

    /// A sentence that begins with a flag that the file has said, with where it is said.
    pub fn place(&self, text: String) -> String {
        let begins =
            |word: &&Word| text.strip_prefix(word.flag).is_some_and(|rest| rest.starts_with([' ', ':']));
        // Clap's own name the flag behind the value.
        let named = |word: &&Word| text.contains(&format!("'{} <", word.flag));
        match self.told.words.iter().find(begins).or_else(|| self.told.words.iter().find(named)) {
            Some(word) => {
                let says = if word.said.is_some() { "is" } else { "is DeepSpeed's default of" };
                format!("{text} ({} {says} {} of {})", word.flag, word.key, self.path.display())
            }
            None => text,
        }
    }

    /// What becomes of it, for people, of a run with such a batch.
    pub fn lines(&self, (rows, accumulate): (usize, usize), world: usize) -> String {
        let name = self.path.display();
        let as_flag = |word: &Word| {
            let remark = if word.remark.is_empty() { String::new() } else { format!(" ({})", word.remark) };
            format!("{} as {} {}{remark}", word.key, word.flag, word.value)
        };
        let of = |said: bool| self.told.words.iter().filter(move |word| word.said.is_some() == said);
        let batch = self.batch.all.map(|all| {
            format!(
                "train_batch_size {all} as {} x {} x {}",
                human::several(rows, "sequence"),
                human::several(accumulate, "micro-batch"),
                human::several(world, "rank")
            )
        });
        let honoured: Vec<String> = batch.into_iter().chain(of(true).map(as_flag)).collect();
        let unsaid: Vec<String> = of(false).map(|word| format!("{} {}", word.flag, word.value)).collect();
        let parts = [
            ("honoured: ", honoured.join(", ")),
            ("what there is anyway: ", self.told.same.join(", ")),
            ("left to the flags, by \"auto\" or because it is not there: ", self.told.left.join(", ")),
            ("DeepSpeed's defaults of what it does not say: ", unsaid.join(", ")),
        ];
        let told = parts
            .iter()
            .filter(|(_, text)| !text.is_empty())
            .map(|(what, text)| format!("{name}: {what}{text}"));
        let ignored =
            self.told.ignored.iter().map(|(why, keys)| format!("{name}: ignored {}: {why}", keys.join(", ")));
        told.chain(ignored).collect::<Vec<_>>().join("\n")
    }

    /// The same for programs.
    pub fn json(&self) -> Value {
        let flags = self.told.words.iter().map(|word| (word.flag.to_owned(), word.value.clone().into()));
        let ignored = self
            .told
            .ignored
            .iter()
            .flat_map(|(why, keys)| keys.iter().map(|key| (key.clone(), why.clone().into())));
        json!({
            "file": self.path.display().to_string(),
            "train_batch_size": self.batch.all,
            "flags": flags.collect::<serde_json::Map<_, _>>(),
            "as_it_is": self.told.same,
            "left_to_flags": self.told.left,
            "ignored": ignored.collect::<serde_json::Map<_, _>>(),
        })
    }
}

impl TrainArgs {
    /// The same flags for `world` ranks, which something else has `started` or not, with the batch that a configuration
    /// leaves to be found.
    ///
    /// # Errors
    /// A batch that so many ranks cannot make.
    pub fn for_ranks(&self, world: usize, started: bool) -> Result<Cow<'_, Self>> {
        let Some(file) = &self.configuration else { return Ok(Cow::Borrowed(self)) };
        let flags = (self.micro_batch, self.accumulate);
        let found = file.batch.of(flags, world, started);
        let (micro_batch, accumulate) =
            found.map_err(|e| Failure::usage(format!("{}: {e}", file.path.display())))?;
        Ok(Cow::Owned(TrainArgs { micro_batch, accumulate, ..self.clone() }))
    }

    /// A failure that is about a flag which a configuration has said, with where it is said.
    pub fn placed(&self, failure: Failure) -> Failure {
        match (failure, &self.configuration) {
            (Failure::Usage(text), Some(file)) => Failure::Usage(file.place(text)),
            (failure, _) => failure,
        }
    }
}

/// As clap calls a flag.
fn id(flag: &str) -> String {
    flag.trim_start_matches('-').replace('-', "_")
}

fn is_typed(typed: &ArgMatches, id: &str) -> bool {
    // Not every flag that a file may stand for has to be there.
    matches!(typed.try_contains_id(id), Ok(true)) && typed.value_source(id) == Some(ValueSource::CommandLine)
}

/// What the flags say that a file's own meaning depends on.
fn beside(typed: &ArgMatches) -> Beside {
    let value = |id, value: Option<String>| (value.unwrap_or_default(), is_typed(typed, id));
    Beside {
        cuda: typed.get_one::<DeviceKind>("device") == Some(&DeviceKind::Cuda),
        dtype: value("dtype", typed.get_one::<Precision>("dtype").map(|dtype| dtype.name())),
        stage: value("stage", typed.get_one::<String>("stage").cloned()),
        lr: value("lr", typed.get_one::<Number>("lr").map(Number::to_string)),
        decay: value("weight_decay", typed.get_one::<Number>("weight_decay").map(Number::to_string)),
    }
}

/// Whether two values of a flag mean the same.
fn same(arg: &Arg, one: &str, other: &str) -> bool {
    let named = |text: &str| {
        let possible = arg.get_possible_values();
        possible
            .into_iter()
            .find(|value| value.matches(text, arg.is_ignore_case_set()))
            .map(|value| value.get_name().to_owned())
    };
    let number = |text: &str| text.parse::<f64>().ok();
    let bytes = |text: &str| human::parse_bytes(text).ok().filter(|_| *arg.get_id() == "bucket_size");
    let scaling = |text: &str| scaling_read(text).ok().filter(|_| *arg.get_id() == "loss_scale");
    one == other
        || named(one).is_some_and(|name| named(other) == Some(name))
        || number(one).is_some_and(|value| number(other) == Some(value))
        || bytes(one).is_some_and(|value| bytes(other) == Some(value))
        || scaling(one).is_some_and(|value| scaling(other) == Some(value))
}

#[cfg(test)]
mod tests;
