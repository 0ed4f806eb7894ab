//! Ranks as processes of this program, and what becomes of how they ended.

use crate::failure::{Failure, Result, USAGE, VERDICT, stopped_by};
use crate::out;
use crate::plan::Ranks;
use crate::train::stop;
use crate::transports::{EXECUTABLE, Transport};
use collectives::bootstrap::Ending;
use collectives::bootstrap::spawn::{self, Report};
use collectives::transport::ucx::Segments;
use std::io::IsTerminal;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Runs the ranks.
///
/// # Errors
/// The failure of the rank that failed first.
pub(super) fn supervise(ranks: &Ranks, variables: Vec<(&'static str, String)>) -> Result<()> {
    let mut arguments = std::env::args_os();
    let name = arguments.next().unwrap_or_else(|| "caravan".into());
    let arguments: Vec<_> = arguments.collect();
    let mut segments = None;
    let report = spawn::supervise(ranks.world, ranks.on_request, |_| {
        let mut command = Command::new(EXECUTABLE);
        command.arg0(&name).args(&arguments).envs(variables.clone());
        if ranks.transport == Transport::Ucx {
            // Only now, when a signal no longer ends this process at once, which would leave them behind.
            let segments = segments.get_or_insert_with(Segments::for_ranks);
            command.envs(segments.as_ref().map(Segments::variable));
        }
        command
    })?;
    drop(segments);
    if report.interrupted.is_some() && std::io::stderr().is_terminal() {
        // Ends the line of a bar, and what the terminal shows of the key behind it.
        out::last_note("");
    }
    let code = exit_code(&report);
    match (report.sentence(), said(&report)) {
        (None, _) => Ok(()),
        (_, Some(code)) => Err(Failure::Told { code }),
        (Some(text), _) if code == USAGE => Err(Failure::usage(report.announced.unwrap_or(text))),
        (Some(text), _) => Err(Failure::Ranks { text, code }),
    }
}

/// The exit code of a run whose rank 0 has said itself what came of it.
fn said(report: &Report) -> Option<u8> {
    let (first, _) = report.first_failure.as_ref()?;
    match report.endings[*first] {
        Ending::Exited(VERDICT) => Some(1),
        Ending::Exited(code) if stop::REQUESTS.iter().any(|&signal| code == stopped_by(signal as u8)) => {
            Some(code)
        }
        _ => None,
    }
}

/// What becomes of the code of the rank that failed first: one that is no rank's of this program, as 101 of a panic, says
/// no more than that the run failed.
fn exit_code(report: &Report) -> u8 {
    match report.exit_code() {
        code if report.interrupted.is_some() => code,
        code @ (0 | USAGE) => code,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_ends_with_one_of_the_codes_that_the_help_names() {
        let report = |ending: Ending, interrupted| Report {
            endings: vec![Ending::Exited(0), ending],
            first_failure: ending.failed().then(|| (1, ending.to_string())),
            announced: None,
            interrupted,
            asked: None,
            killed: Vec::new(),
            left: Vec::new(),
        };
        let ended = |ending, interrupted| exit_code(&report(ending, interrupted));
        for (ending, code) in [
            (Ending::Exited(0), 0),
            (Ending::Exited(1), 1),
            (Ending::Exited(USAGE), 2),
            // A panic; what a rank may have taken for a signal; an abort.
            (Ending::Exited(101), 1),
            (Ending::Exited(139), 1),
            (Ending::Killed(6), 1),
        ] {
            assert_eq!(ended(ending, None), code, "{ending}");
        }
        assert_eq!(ended(Ending::Exited(101), Some(2)), 130);
        assert_eq!(ended(Ending::Killed(15), Some(15)), 143);
        // All have gone through before it reached them.
        assert_eq!(ended(Ending::Exited(0), Some(15)), 0);
        let told = |code, interrupted| said(&report(Ending::Exited(code), interrupted));
        for (code, interrupted, expected) in [
            (VERDICT, None, Some(1)),
            (VERDICT, Some(15), Some(1)),
            (143, None, Some(143)),
            (143, Some(15), Some(143)),
            (138, None, Some(138)),
            (130, Some(2), None),
            (1, Some(15), None),
        ] {
            assert_eq!(told(code, interrupted), expected, "{code} {interrupted:?}");
        }
    }
}
