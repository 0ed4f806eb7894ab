//! Who is to blame for a failure that ranks pass on to each other in words: the rank that is lost, and not the one that has
//! noticed and gives up for it.

use crate::error::Error;

/// Before the words about another rank.
const ANOTHER: char = '\u{1}';

/// What a rank tells its peers when it gives up.
pub fn told(why: &Error) -> String {
    match why {
        Error::PeerLost { peer, how, .. } => format!("{ANOTHER}{peer} {how}"),
        other => other.to_string(),
    }
}

/// Whom peers are to blame when `rank` gives up for this, and for what: not that it has noticed.
pub(crate) fn of(why: &Error, rank: usize) -> (usize, String) {
    match why {
        Error::PeerLost { peer, how, .. } => (*peer, how.clone()),
        other => (rank, format!("failed: {other}")),
    }
}

/// What `rank` hears when `from` passes on that `peer` is lost.
pub(crate) fn passed_on(rank: usize, from: usize, peer: usize, how: String) -> Error {
    match peer == rank {
        // A peer that gave up because of this rank says nothing new about this rank.
        true => Error::PeerLost { rank, peer: from, how: format!("gave up: rank {rank} {how}") },
        false => Error::PeerLost { rank, peer, how },
    }
}

/// What `rank` hears when `from` tells it so; both are ranks of the job.
pub fn heard(rank: usize, from: usize, words: &str) -> Error {
    let another = |words: &str| {
        let (peer, how) = words.strip_prefix(ANOTHER)?.split_once(' ')?;
        Some((peer.parse().ok()?, how.to_owned()))
    };
    match another(words) {
        Some((peer, how)) => passed_on(rank, from, peer, how),
        None => Error::PeerLost { rank, peer: from, how: format!("gave up: {words}") },
    }
}

/// As much of a text as fits into so many bytes, in whole characters.
pub fn cut(text: &str, most: usize) -> &str {
    let mut end = text.len().min(most);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lost_rank_is_named_however_often_it_is_passed_on() {
        let killed = Error::PeerLost { rank: 1, peer: 2, how: "was killed by signal 9".into() };
        let first = heard(0, 1, &told(&killed));
        assert_eq!(first.to_string(), "rank 2 was killed by signal 9; rank 0 stops");
        assert_eq!(heard(3, 0, &told(&first)).to_string(), "rank 2 was killed by signal 9; rank 3 stops");
        let text = heard(2, 1, &told(&killed)).to_string();
        assert_eq!(text, "rank 1 gave up: rank 2 was killed by signal 9; rank 2 stops");
    }

    #[test]
    fn who_gives_up_by_itself_is_named_with_its_reason() {
        for words in ["the disk is full", "", "\u{1}", "\u{1}x y", "\u{1}7"] {
            let Error::PeerLost { rank, peer, how } = heard(0, 3, words) else { panic!("no loss") };
            assert_eq!((rank, peer, how), (0, 3, format!("gave up: {words}")));
        }
    }

    #[test]
    fn a_text_is_cut_between_characters() {
        let cuts = [0, 1, 2, 3, 4, 9].map(|most| cut("aéü", most));
        assert_eq!(cuts, ["", "a", "a", "aé", "aé", "aéü"]);
    }
}
