//! Whether what a file would take the place of may go: an earlier one of its own kind, and nothing else.

use crate::bench::CSV_NAMES;
use crate::failure::{Failure, Result};
use models::tokens::TokenFile;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Result as Io};
use std::path::Path;

/// What a command writes, each by what it begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Of a training, in JSON lines.
    Metrics,
    /// Tokens in llm.c's format.
    Tokens,
    /// Of a measurement.
    Json,
    /// The same as a table.
    Csv,
    /// The same as a figure.
    Svg,
    /// Of a training's steps.
    Trace,
    /// Of trainings side by side.
    Page,
}

/// The first name in a trace.
const OF_TRACES: &str = "\"displayTimeUnit\"";

impl Kind {
    /// What it is called.
    fn name(self) -> &'static str {
        match self {
            Kind::Metrics => "metrics of a run",
            Kind::Tokens => "token file",
            Kind::Json => "JSON of 'caravan bench'",
            Kind::Csv => "CSV of 'caravan bench'",
            Kind::Svg => "SVG of 'caravan bench'",
            Kind::Trace => "trace of 'caravan train'",
            Kind::Page => "page of 'caravan report'",
        }
    }

    /// Whether this is one, as far as that can be seen without reading all of it.
    fn is(self, path: &Path) -> Io<bool> {
        /// What stands before that in JSON: names are in their order there, and rows come after it.
        const MOST: u64 = 64 << 20;
        /// And elsewhere.
        const START: u64 = 4096;
        if self == Kind::Tokens {
            return TokenFile::looks_like(path).map_err(std::io::Error::other);
        }
        let file = File::open(path)?;
        if self == Kind::Json {
            let lines = BufReader::new(file.take(MOST)).lines();
            // A trace has the same line, behind one of its own.
            let mut lines =
                lines.take_while(|line| !line.as_ref().is_ok_and(|line| line.starts_with(OF_TRACES)));
            let ours = |line: &Io<String>| match line {
                Ok(line) => line.trim_start().starts_with("\"generator\": \"caravan "),
                Err(_) => true,
            };
            return lines.find(ours).map_or(Ok(false), |line| line.map(|_| true));
        }
        let mut start = Vec::new();
        file.take(START).read_to_end(&mut start)?;
        let text = String::from_utf8_lossy(&start);
        Ok(match self {
            Kind::Metrics => text.starts_with("{\"run\":"),
            Kind::Csv => text.starts_with(CSV_NAMES),
            Kind::Trace => {
                text.strip_prefix("{\n").is_some_and(|text| text.starts_with(OF_TRACES))
                    && text.contains("\n\"generator\": \"caravan ")
            }
            Kind::Page => text.starts_with("<!DOCTYPE html>") && text.contains("<!-- generator: caravan "),
            _ => text.starts_with("<svg") && text.contains("<!-- generator: caravan "),
        })
    }
}

/// Refuses to write a file of this `kind` over one that is another: a name that was mistyped costs nothing that way. What is
/// empty, or no regular file, holds nothing.
///
/// # Errors
/// What is there, and what to do.
pub fn check_replaced(flag: &str, path: &Path, kind: Kind) -> Result<()> {
    let Some(there) = path.metadata().ok().filter(|there| there.is_file() && there.len() > 0) else {
        return Ok(());
    };
    if super::standard(path).is_some() {
        return Ok(());
    }
    match kind.is(path) {
        Ok(true) => Ok(()),
        // What cannot be read as such is none.
        Ok(false) | Err(_) => Err(Failure::usage(format!(
            "{flag} {}: a file of {} bytes is there that is no {}, and would be lost: take another name or remove it",
            path.display(),
            there.len(),
            kind.name()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_earlier_file_of_the_kind_may_go() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        let header = |magic: i32| [magic.to_le_bytes(), 1i32.to_le_bytes()].concat();
        let csv = format!("{CSV_NAMES},i_min_us\nall_reduce,shm\n");
        for (kind, good) in [
            (Kind::Metrics, [&b"{\"run\":{\"steps\":1}}\n{\"step\":1}\n"[..], b"{\"run\":null}"]),
            (Kind::Tokens, [&header(20_240_520), &header(20_240_801)]),
            (
                Kind::Json,
                [
                    &b"{\n  \"args\": [],\n  \"generator\": \"caravan 0.9.0\"\n}"[..],
                    b"\"generator\": \"caravan 1\"",
                ],
            ),
            (Kind::Csv, [csv.as_bytes(), CSV_NAMES.as_bytes()]),
            (
                Kind::Trace,
                [
                    &b"{\n\"displayTimeUnit\": \"ms\",\n\"generator\": \"caravan 0.9.0\",\n"[..],
                    b"{\n\"displayTimeUnit\": \"ms\",\n\"generator\": \"caravan 1\"\n}",
                ],
            ),
            (
                Kind::Svg,
                [
                    &b"<svg width=\"1\">\n<!-- generator: caravan 1 -->\n</svg>"[..],
                    b"<svg><!-- generator: caravan 0.9.0 -->",
                ],
            ),
            (
                Kind::Page,
                [
                    &b"<!DOCTYPE html>\n<html lang=\"en\">\n<!-- generator: caravan 1 -->\n<head>"[..],
                    b"<!DOCTYPE html>\n<html>\n<!-- generator: caravan 0.9.0 -->",
                ],
            ),
        ] {
            let check = |content: &[u8]| {
                std::fs::write(&path, content).unwrap();
                check_replaced("--flag", &path, kind)
            };
            for good in good {
                check(good).unwrap();
            }
            check(b"").unwrap();
            for bad in [
                &b"precious"[..],
                b"{\"model_type\": \"llama\"}",
                b"\n",
                b"\xff\xfe\x00",
                b"{\n  \"a\": 1\n}\n",
                b"<svg width=\"1\">\n</svg>",
                b"<!DOCTYPE html>\n<html>\n<!-- generator: another 1 -->\n",
                b"{\n\"displayTimeUnit\": \"ms\",\n\"generator\": \"another 1\"\n}",
            ] {
                let e = check(bad).unwrap_err();
                let words = ["--flag ", kind.name(), "take another name or remove it"];
                assert!(
                    e.code() == 2 && words.iter().all(|word| e.to_string().contains(word)),
                    "{kind:?}: {e}"
                );
                assert_eq!(std::fs::read(&path).unwrap(), bad);
            }
        }
        // What is no file has nothing to lose, and what is not there neither.
        for path in ["/dev/null", "/dev/stdout", "/no/such"] {
            check_replaced("--flag", Path::new(path), Kind::Metrics).unwrap();
        }
    }
}
