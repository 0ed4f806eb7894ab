//! Receives that wait for a probe: what comes under one tag of one peer is for the one that was asked for first.

use std::collections::HashMap;
use std::os::raw::c_int;

/// What such a receive waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Awaited {
    pub(crate) peer: usize,
    pub(crate) tag: c_int,
    /// It is a user's message.
    pub(crate) user: bool,
}

/// The places of such receives. No look at one goes through others, of which there may be as many as ranks.
#[derive(Default)]
pub(crate) struct Probing {
    /// By place, if that one waits.
    links: Vec<Option<Link>>,
    /// The last that waits for the same.
    last: HashMap<Awaited, usize>,
}

struct Link {
    awaited: Awaited,
    /// The next ones in their line that wait for the same.
    before: Option<usize>,
    after: Option<usize>,
}

impl Probing {
    /// With room for so many at once.
    pub(crate) fn with_room(places: usize) -> Self {
        // A map that is at most half full never grows for what has left it.
        Probing { links: Vec::with_capacity(places), last: HashMap::with_capacity(2 * places) }
    }

    /// The receive at `place` waits from now on, behind all that do already.
    pub(crate) fn add(&mut self, place: usize, awaited: Awaited) {
        let before = self.last.insert(awaited, place);
        self.relink(before, |link| link.after = Some(place));
        if place >= self.links.len() {
            self.links.resize_with(place + 1, || None);
        }
        self.links[place] = Some(Link { awaited, before, after: None });
    }

    /// Whether an earlier receive waits for the same.
    pub(crate) fn is_behind(&self, place: usize) -> bool {
        self.links.get(place).and_then(Option::as_ref).is_some_and(|link| link.before.is_some())
    }

    /// The receive at `place` waits no more, if it did.
    pub(crate) fn remove(&mut self, place: usize) {
        let Some(Link { awaited, before, after }) = self.links.get_mut(place).and_then(Option::take) else {
            return;
        };
        self.relink(before, |link| link.after = after);
        self.relink(after, |link| link.before = before);
        match (before, after) {
            (_, Some(_)) => {}
            (Some(before), None) => drop(self.last.insert(awaited, before)),
            (None, None) => drop(self.last.remove(&awaited)),
        }
    }

    /// None waits any more.
    pub(crate) fn clear(&mut self) {
        self.links.clear();
        self.last.clear();
    }

    fn relink(&mut self, place: Option<usize>, change: impl FnOnce(&mut Link)) {
        if let Some(link) = place.and_then(|place| self.links[place].as_mut()) {
            change(link);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_for_the_same_has_it_in_turn() {
        let (one, other) = (Awaited { peer: 1, tag: 7, user: true }, Awaited { peer: 2, tag: 7, user: true });
        let mut probing = Probing::with_room(2);
        for (place, awaited) in [(4, one), (0, one), (3, other), (2, one), (1, one)] {
            probing.add(place, awaited);
        }
        let behind = |probing: &Probing| [0, 1, 2, 3, 4, 5].map(|place| probing.is_behind(place));
        assert_eq!(behind(&probing), [true, true, true, false, false, false]);
        // From the middle, twice, and from both ends.
        probing.remove(2);
        probing.remove(2);
        assert_eq!(behind(&probing), [true, true, false, false, false, false]);
        probing.remove(4);
        assert_eq!(behind(&probing), [false, true, false, false, false, false]);
        probing.remove(1);
        probing.add(5, one);
        assert_eq!(behind(&probing), [false, false, false, false, false, true]);
        probing.remove(0);
        probing.remove(5);
        probing.remove(3);
        assert!(probing.last.is_empty() && probing.links.iter().all(Option::is_none));
        probing.add(0, other);
        probing.clear();
        probing.add(1, other);
        assert!(!probing.is_behind(1));
    }
}
