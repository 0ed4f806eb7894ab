//! The root's data ends on every rank.

use super::exposure::Part;
use super::messages::Messages;
use super::{Algorithm, Build, Peers, Span, Step};

pub(super) fn build(b: &mut Build) {
    match b.algorithm() {
        Algorithm::Local => {}
        Algorithm::DirectRead => direct(b),
        Algorithm::Binomial => {
            let (parent, children) = binomial(b.group.size, relative(b));
            tree(b, parent, &children);
        }
        _ => {
            let (me, size) = (relative(b), b.group.size);
            let next: Vec<usize> = (me + 1 < size).then_some(me + 1).into_iter().collect();
            tree(b, me.checked_sub(1), &next);
        }
    }
}

/// This rank's distance behind the root.
fn relative(b: &Build) -> usize {
    (b.group.rank + b.group.size - b.call.root) % b.group.size
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

/// Parent and children in a binomial tree, by distance behind the root; the largest subtree comes first.
fn binomial(size: usize, me: usize) -> (Option<usize>, Vec<usize>) {
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

/// Passes the data on piece by piece: a rank forwards one piece while the next arrives.
fn tree(b: &mut Build, parent: Option<usize>, children: &[usize]) {
    let (size, root, bytes) = (b.group.size, b.call.root, b.call.bytes());
    let rank = |relative: usize| (relative + root) % size;
    let budget = (b.group.tuning.round / 4).max(b.group.tuning.tree);
    let (per_round, rounds) = b.group.tuning.cut(1, bytes, budget);
    let piece = |k: usize| k * per_round..((k + 1) * per_round).min(bytes);
    let mut m = Messages::new(size);
    if let Some(parent) = parent {
        for k in 0..rounds {
            let range = piece(k);
            b.recv(&mut m, rank(parent), Span::recv(range.start, range.len()), k);
        }
    }
    for k in 0..rounds {
        if parent.is_some() {
            b.wait(&mut m, k);
        }
        for &child in children {
            let range = piece(k);
            // At the root, input and output are one buffer.
            b.send(&mut m, rank(child), Span::recv(range.start, range.len()), rounds);
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
