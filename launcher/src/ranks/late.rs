//! What a rank says of others that have not come, or have come from elsewhere.

use crate::failure::Failure;
use crate::plan::{Ranks, by_itself};
use collectives::Error;
use collectives::bootstrap::{self, Identity, Launcher, spawn, variables};
use std::io::IsTerminal;

/// Nothing tells jobs apart that meet at one address, where no launcher's name of them is the same on all hosts.
pub(super) fn perhaps_others(failure: Failure, identity: &Identity) -> Failure {
    let unnamed = identity.launcher == Launcher::Pmi && std::env::var_os(variables::JOB).is_none();
    match failure {
        Failure::Common(text) if unnamed && identity.rendezvous.is_some() => Failure::Common(format!(
            "{text}; if they are of several jobs, give each job a CARAVAN_RENDEZVOUS and a CARAVAN_JOB of its own"
        )),
        failure => failure,
    }
}

/// What to do if others only take longer, as where a rank reads its data, and makes tokens of text, before it meets the others;
/// and if there are no others.
pub(super) fn perhaps_slow(error: Error, ranks: &Ranks, identity: &Identity) -> Error {
    const LATER: &str = "; if it still reads its data, --rendezvous-timeout SECONDS waits longer, and 'caravan tokenize' makes \
                         of text what is read at once";
    // That there is no way to a network or to a host, in the system's words.
    const UNREACHABLE: [&str; 2] = ["(os error 101)", "(os error 113)"];
    let later = if ranks.reads_data { LATER } else { "" };
    let advice = || {
        // Who is started by caravan is one of those that it started.
        let marks = bootstrap::marks().filter(|_| !spawn::supervised());
        let typed = std::io::stdin().is_terminal();
        later.to_owned() + &nobodys(identity.launcher.name(), identity.world, marks, typed)
    };
    match error {
        // No host that cannot be reached answers later.
        Error::Timeout { what, rank, peer, after, past }
            if UNREACHABLE.iter().any(|errno| what.contains(errno)) =>
        {
            Error::Timeout { what, rank, peer, after, past }
        }
        Error::Timeout { what, rank, peer, after, past } => {
            Error::Timeout { what, rank, peer, after, past: past + &advice() }
        }
        Error::Launch(text) if text.contains("did not arrive") => Error::Launch(text + &advice()),
        error => error,
    }
}

/// What to do where these marks of a launcher make a process one of `world` ranks of which others never come: it may have been
/// `typed` in the one shell that was started for all of them, as `srun -n 8 --pty bash` does; else the marks may be left of
/// what runs no more, or the others are no ranks of this program.
fn nobodys(name: &str, world: usize, marks: impl Iterator<Item = &'static str>, typed: bool) -> String {
    let mut marks = marks.peekable();
    if marks.peek().is_none() {
        return String::new();
    }
    match typed {
        true => format!("; if {name} started this shell for all ranks, {}", by_itself(marks)),
        false => format!("; if {name} did not start {world} of this command, {}", by_itself(marks)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::tests::train;
    use crate::plan::UNASKED;
    use std::time::Duration;

    #[test]
    fn who_cannot_be_reached_or_reads_nothing_is_not_taken_for_slow() {
        let mut ranks = Ranks::plan(&train("").ranks, UNASKED, None).unwrap();
        let mut said = |what: &str, reads_data| {
            let late = Error::timeout(what, 1, 0, Duration::from_secs(6));
            ranks.reads_data = reads_data;
            perhaps_slow(late, &ranks, &Identity::alone()).to_string().contains("still reads its data")
        };
        // Rank 0 listens only once it has read its data.
        let refused = "10.1.1.1:4000 says: Connection refused (os error 111)";
        assert!(said(refused, true));
        assert!(!said(refused, false));
        assert!(!said("10.1.1.1:4000 says: Network is unreachable (os error 101)", true));
    }

    #[test]
    fn who_was_not_started_as_a_rank_hears_how_to_start_them() {
        let said = |marks: &'static [&str], typed| nobodys("srun", 8, marks.iter().copied(), typed);
        let how = ", take 'env -u A -u B caravan ...', which starts them itself";
        let shell = format!("; if srun started this shell for all ranks{how}");
        let other = format!("; if srun did not start 8 of this command{how}");
        assert_eq!([said(&["A", "B"], true), said(&["A", "B"], false)], [shell, other]);
        assert_eq!([said(&[], true), said(&[], false)], ["", ""]);
    }
}
