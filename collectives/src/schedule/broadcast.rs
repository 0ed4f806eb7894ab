//! The root's data ends on every rank.

use super::exposure::Part;
use super::hierarchical::View;
use super::{Algorithm, Build, Peers, Span, Tuning, piece};

pub(super) fn build(b: &mut Build) {
    match b.algorithm() {
        Algorithm::Local => {}
        Algorithm::DirectRead => direct(b),
        Algorithm::Binomial => {
            let at = from_root(b).at(b.group.rank, binomial);
            pass_on(b, at, 0);
        }
        Algorithm::Hierarchical => over_nodes(b),
        _ => {
            let (at, between) = (from_root(b).at(b.group.rank, chain), between(b.group.size));
            pass_on(b, at, between);
        }
    }
}

/// A tree or a chain of nodes, and one inside each.
fn over_nodes(b: &mut Build) {
    let (view, root) = (View::of(&b.group), b.call.root);
    let (nodes, largest) = b.group.nodes.as_ref().map_or((1, 1), |nodes| (nodes.count(), nodes.largest()));
    let chained = |ranks: usize| b.call.bytes() > chain_above(&b.group.tuning, ranks);
    let shape = |ranks: usize| if chained(ranks) { chain } else { binomial };
    // Between nodes first: that takes longer.
    let mut at = List(view.speakers(root)).at(b.group.rank, shape(nodes));
    at.and(List(view.behind_speaker(root)).at(b.group.rank, shape(largest)));
    // Who speaks for its node also passes on inside it.
    let hops: usize =
        [nodes, largest].into_iter().filter(|&ranks| chained(ranks)).map(|ranks| ranks - 1).sum();
    pass_on(b, at, hops.saturating_sub(1));
}

/// Ranks of a chain that pass on what they get.
fn between(ranks: usize) -> usize {
    ranks.saturating_sub(2)
}

/// Above how many bytes a chain of so many ranks is faster than a binomial tree. A step is as long as t bytes take
/// (`tree`), of which a rank spends as long as s bytes take on a message (`handled`). Of B bytes, a chain that m ranks pass
/// on takes (m + 1)(t - s) + (sqrt(B) + sqrt(m s))^2, cut as [`pieces`] does, and a tree of d levels d (t + B).
pub(super) fn chain_above(tuning: &Tuning, ranks: usize) -> usize {
    let more = ranks.next_power_of_two().trailing_zeros().saturating_sub(1);
    if more == 0 {
        // Both are the same.
        return tuning.tree;
    }
    let (m, more) = (between(ranks) as f64, f64::from(more));
    let (t, s) = (tuning.tree as f64, tuning.handled as f64);
    let later = (m - more) * t - s;
    let root = (m * s).sqrt() + (m * s + more * later).max(0.0).sqrt();
    (root / more).powi(2) as usize
}

/// Bytes of a piece, and pieces, of data that so many ranks pass on one after the other. Each piece but the first costs a
/// message, and each rank waits for one piece: both together are least at their geometric mean. In a tree, where no rank
/// waits for all others, they are as long as they may be.
fn pieces(tuning: &Tuning, between: usize, bytes: usize) -> (usize, usize) {
    let longest = (tuning.round / 4).max(tuning.tree);
    let least = (bytes as f64 * tuning.handled as f64 / between as f64).sqrt() as usize;
    let piece = least.min(longest).max(tuning.frame.min(longest));
    tuning.cut(1, bytes, piece)
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
    let read = |b: &mut Build, part: &Part| b.read(part, root, (0, 0), Span::recv(0, bytes));
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

/// Passes the data on piece by piece: a rank forwards one piece while the next arrives. `between` is of the chains.
fn pass_on(b: &mut Build, At { parent, children }: At, between: usize) {
    let (size, bytes) = (b.group.size, b.call.bytes());
    // Nobody passes pieces on between two.
    let (per_round, rounds) = if size == 2 { (bytes, 1) } else { pieces(&b.group.tuning, between, bytes) };
    let cut = |k: usize| piece(&(0..bytes), k, per_round);
    if let Some(parent) = parent {
        for k in 0..rounds {
            let range = cut(k);
            b.recv(parent, Span::recv(range.start, range.len()), k);
        }
    }
    for k in 0..rounds {
        if parent.is_some() {
            b.wait(k);
        }
        for &child in &children {
            let range = cut(k);
            // At the root, input and output are one buffer.
            b.send(child, Span::recv(range.start, range.len()), rounds);
        }
    }
    if !children.is_empty() {
        b.wait(rounds);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

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

    #[test]
    fn a_chain_is_taken_where_its_pieces_make_it_faster() {
        let plain = Tuning::default();
        let far = plain.for_link(8, Duration::from_micros(100), 1e10);
        for (tuning, ranks) in
            [plain, far].into_iter().flat_map(|t| (3usize..100).map(move |ranks| (t, ranks)))
        {
            let levels = f64::from(ranks.next_power_of_two().trailing_zeros());
            // In bytes that the link carries meanwhile; pieces of any length.
            let chain = |bytes: usize| {
                let (t, s) = (tuning.tree as f64, tuning.handled as f64);
                let piece = (bytes as f64 * s / between(ranks) as f64).sqrt().min(bytes as f64);
                let passed = (ranks - 1) as f64 * (t - s) + between(ranks) as f64 * (s + piece);
                passed + bytes as f64 / piece * (s + piece)
            };
            let tree = |bytes: usize| levels * (tuning.tree + bytes) as f64;
            let limit = chain_above(&tuning, ranks);
            let near = |factor: f64| (limit as f64 * factor) as usize;
            assert!(chain(near(1.1)) < tree(near(1.1)), "{ranks} ranks, {limit} bytes");
            // Of three ranks both are the same below.
            assert!(tree(near(0.9)) <= chain(near(0.9)), "{ranks} ranks, {limit} bytes");
        }
        // What is large enough for a chain comes in several pieces.
        let cut = |ranks| pieces(&plain, between(ranks), chain_above(&plain, ranks) + 1).1;
        assert_eq!([4, 5, 8, 16, 64].map(cut), [6, 3, 9, 14, 37]);
        assert_eq!(pieces(&plain, 2, 64 << 20), (512 << 10, 128));
        assert_eq!(pieces(&plain, 0, 1 << 20), (512 << 10, 2));
    }
}
