//! Block r of the root ends on rank r.

use super::{Algorithm, Build, Peers, Span, hierarchical};

pub(super) fn build(b: &mut Build) {
    let (rank, size, root, block) = (b.group.rank, b.group.size, b.call.root, b.call.bytes());
    let at_root = rank == root;
    let own = Span::send(rank * block, block);
    // In place, the root's own block stays where it is.
    let place = if b.call.in_place && at_root { rank * block } else { 0 };
    let place = Span::recv(place, block);
    match b.algorithm() {
        Algorithm::Local => b.copy(own, place),
        Algorithm::DirectRead => {
            let exposure = match at_root {
                true => {
                    let mut others = b.blocks();
                    others.remove(rank);
                    b.expose(Span::send(0, size * block), others, size - 1, block, false)
                }
                false => b.expose_nothing(size - 1, block),
            };
            let keep = |b: &mut Build| {
                if at_root {
                    b.copy(own, place);
                }
            };
            let sources = (!at_root).then_some(Peers::One(root));
            b.exchange(&exposure, sources, (Peers::All, true), keep, |b, part| {
                b.read(part, root, (rank * block, rank - usize::from(rank > root)), place);
            });
        }
        Algorithm::Hierarchical => hierarchical::scatter(b, own, place),
        _ => {
            if at_root {
                for to in b.others() {
                    b.send(to, Span::send(to * block, block), 0);
                }
                b.copy(own, place);
            } else {
                b.recv(root, place, 0);
            }
            b.wait(0);
        }
    }
}
