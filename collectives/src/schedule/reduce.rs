//! The reduction ends on the root.

use super::contributions::Contributions;
use super::exposure::Part;
use super::{Algorithm, Build, Peers, Span, hierarchical, piece, reduce_scatter};

pub(super) fn build(b: &mut Build) {
    let bytes = b.call.bytes();
    match b.algorithm() {
        Algorithm::Local => b.copy(Span::send(0, bytes), Span::recv(0, bytes)),
        Algorithm::DirectRead => direct(b),
        Algorithm::Linear => linear(b),
        Algorithm::HierarchicalExchange => hierarchical::exchange(b, &[b.call.root]),
        _ => scatter_gather(b),
    }
}

/// The root reads everybody's input and reduces it in one pass.
fn direct(b: &mut Build) {
    let (rank, root, bytes) = (b.group.rank, b.call.root, b.call.bytes());
    let whole = 0..bytes;
    let (exposure, sources) = match rank == root {
        true => (b.expose_nothing(1, bytes), Some(Peers::All)),
        false => (b.expose(Span::send(0, bytes), vec![whole], 1, bytes, false), None),
    };
    let read = |b: &mut Build, part: &Part| b.read_reduced(part, 0, |_| (0, 0), Span::recv(0, bytes));
    b.exchange(&exposure, sources, (Peers::One(root), true), |_| (), read);
}

/// Everybody sends its input to the root, in rounds; the root reduces one while the next arrives.
fn linear(b: &mut Build) {
    let (rank, root, bytes) = (b.group.rank, b.call.root, b.call.bytes());
    let element = b.call.dtype.size();
    let (per_round, rounds) = b.group.tuning.cut_for_root(&b.group, bytes);
    let cut = |k: usize| piece(&(0..bytes), k, per_round);
    if rank != root {
        for k in 0..rounds {
            let range = cut(k);
            b.send(root, Span::send(range.start, range.len()), 0);
        }
        return b.wait(0);
    }
    let mut contributions = Contributions::new(b);
    for k in 0..=rounds {
        if k < rounds {
            let range = cut(k);
            for from in b.others() {
                let out = Span::recv(range.start, range.len());
                contributions.recv(b, from, range.len(), k, out);
            }
        }
        if k > 0 {
            let range = cut(k - 1);
            b.wait(k - 1);
            let operand = contributions.of(rank, range.start, k - 1);
            b.reduce(operand, Span::recv(range.start, range.len()), range.len() / element);
        }
    }
}

/// Each rank reduces its part, then sends it to the root.
fn scatter_gather(b: &mut Build) {
    let (rank, root) = (b.group.rank, b.call.root);
    let parts = b.parts();
    let own = match rank == root {
        true => Span::recv(parts[rank].start, parts[rank].len()),
        false => b.scratch(parts[rank].len()),
    };
    match b.algorithm() {
        Algorithm::Hierarchical => hierarchical::reduce_scatter(b, &parts, own),
        _ => reduce_scatter::pairwise(b, &parts, own),
    }
    let group = usize::MAX;
    if rank == root {
        for from in b.others() {
            b.recv(from, Span::recv(parts[from].start, parts[from].len()), group);
        }
    } else {
        b.send(root, own, group);
    }
    b.wait(group);
}
