//! The root's data ends on every rank.

use super::exposure::Part;
use super::hierarchical::View;
use super::messages::Messages;
use super::{Algorithm, Build, Peers, Span, Step};

pub(super) fn build(b: &mut Build) {
    match b.algorithm() {
        Algorithm::Local => {}
        Algorithm::DirectRead => direct(b),
        Algorithm::Binomial => {
            let at = from_root(b).at(b.group.rank, binomial);
            tree(b, at);
        }
        Algorithm::Hierarchical => {
            let shape = if b.call.bytes() <= b.group.tuning.tree { binomial } else { chain };
            let (view, root) = (View::of(&b.group), b.call.root);
            // Between nodes first: that takes longer.
            let mut at = List(view.speakers(root)).at(b.group.rank, shape);
            at.and(List(view.behind_speaker(root)).at(b.group.rank, shape));
            tree(b, at);
        }
        _ => {
            let at = from_root(b).at(b.group.rank, chain);
            tree(b, at);
        }
    }
}

/// Ranks that a tree joins; the first is its root.
pub(super) struct List(pub Vec<usize>);

/// All ranks in order, from the root on.
fn from_root(b: &Build) -> List {
    List((0..b.group.size).map(|i| (b.call.root + i) % b.group.size).collect())
}

/// Where one rank is in a tree.
#[derive(Default)]
pub(super) struct At {
    pub parent: Option<usize>,
    pub children: Vec<usize>,
}

impl At {
    /// And in another, of which it is the root if it is any other rank of this one.
    fn and(&mut self, other: At) {
        self.parent = self.parent.or(other.parent);
        self.children.extend(other.children);
    }
}

/// Parent and children of a place in a tree over as many places.
type Shape = fn(usize, usize) -> (Option<usize>, Vec<usize>);

impl List {
    /// Where `rank` is in the tree of this shape; nowhere if it is not in the list.
    pub fn at(&self, rank: usize, shape: Shape) -> At {
        let Some(me) = self.0.iter().position(|&r| r == rank) else { return At::default() };
        let (parent, children) = shape(self.0.len(), me);
        let rank = |place: usize| self.0[place];
        At { parent: parent.map(rank), children: children.into_iter().map(rank).collect() }
    }
}

fn direct(b: &mut Build) {
    let bytes = b.call.bytes();
    let root = b.call.root;
    let at_root = b.group.rank == root;
    let whole = 0..bytes;
    let exposure = match at_root {
        true => b.expose(Span::send(0, bytes), vec![whole], 1, bytes, false),
        false => b.expose_nothing(1, bytes),
    };
    let sources = (!at_root).then_some(Peers::One(root));
    let read = move |b: &mut Build, part: Part| {
        let range = part.of(bytes);
        if !range.is_empty() {
            let to = Span::recv(range.start, range.len());
            b.push(Step::Read { from: part.remote(root, 0, 0), to });
        }
    };
    b.exchange(&exposure, sources, (Peers::All, true), |_| (), read);
}

/// A binomial tree; the largest subtree comes first.
pub(super) fn binomial(size: usize, me: usize) -> (Option<usize>, Vec<usize>) {
    let reach = if me == 0 { size.next_power_of_two() } else { 1 << me.trailing_zeros() };
    let parent = (me > 0).then(|| me & (me - 1));
    let mut children = Vec::new();
    let mut distance = reach / 2;
    while distance > 0 {
        if me + distance < size {
            children.push(me + distance);
        }
        distance /= 2;
    }
    (parent, children)
}

/// Each place passes on to the next.
fn chain(size: usize, me: usize) -> (Option<usize>, Vec<usize>) {
    (me.checked_sub(1), (me + 1 < size).then_some(me + 1).into_iter().collect())
}

/// Passes the data on piece by piece: a rank forwards one piece while the next arrives.
fn tree(b: &mut Build, At { parent, children }: At) {
    let (size, bytes) = (b.group.size, b.call.bytes());
    let budget = (b.group.tuning.round / 4).max(b.group.tuning.tree);
    // Nobody passes pieces on between two.
    let budget = if size == 2 { bytes } else { budget };
    let (per_round, rounds) = b.group.tuning.cut(1, bytes, budget);
    let piece = |k: usize| k * per_round..((k + 1) * per_round).min(bytes);
    let mut m = Messages::new(size);
    if let Some(parent) = parent {
        for k in 0..rounds {
            let range = piece(k);
            b.recv(&mut m, parent, Span::recv(range.start, range.len()), k);
        }
    }
    for k in 0..rounds {
        if parent.is_some() {
            b.wait(&mut m, k);
        }
        for &child in &children {
            let range = piece(k);
            // At the root, input and output are one buffer.
            b.send(&mut m, child, Span::recv(range.start, range.len()), rounds);
        }
    }
    if !children.is_empty() {
        b.wait(&mut m, rounds);
    }
}

#[cfg(test)]
mod tests {
    use super::binomial;

    #[test]
    fn every_rank_has_one_parent_that_lists_it() {
        for size in 1..40 {
            for me in 0..size {
                let (parent, children) = binomial(size, me);
                assert_eq!(parent.is_none(), me == 0);
                for child in children {
                    assert_eq!(binomial(size, child).0, Some(me), "{child} of {size}");
                }
                if let Some(parent) = parent {
                    assert!(binomial(size, parent).1.contains(&me), "{me} of {size}");
                }
            }
        }
    }
}
