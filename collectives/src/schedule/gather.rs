//! Every rank's block ends on the root.

use super::{Algorithm, Build, Peers, Span, hierarchical};

pub(super) fn build(b: &mut Build) {
    let (rank, root, block) = (b.group.rank, b.call.root, b.call.bytes());
    let at_root = rank == root;
    // In place, the root's own block is where it belongs.
    let own = if b.call.in_place && at_root { rank * block } else { 0 };
    let own = Span::send(own, block);
    let place = Span::recv(rank * block, block);
    match b.algorithm() {
        Algorithm::Local => b.copy(own, place),
        Algorithm::DirectRead => {
            let whole = 0..block;
            let (exposure, sources) = match at_root {
                true => (b.expose_nothing(1, block), Some(Peers::All)),
                false => (b.expose(own, vec![whole], 1, block, false), None),
            };
            let keep = |b: &mut Build| {
                if at_root {
                    b.copy(own, place);
                }
            };
            b.exchange(&exposure, sources, (Peers::One(root), true), keep, |b, part| {
                for peer in b.others() {
                    b.read(part, peer, (0, 0), Span::recv(peer * block, block));
                }
            });
        }
        Algorithm::Hierarchical => hierarchical::gather(b, own, place),
        _ => {
            if at_root {
                for from in b.others() {
                    b.recv(from, Span::recv(from * block, block), 0);
                }
            } else {
                b.send(root, own, 0);
            }
            b.wait(0);
            if at_root {
                // Last, because it needs nobody, while the others may wait for this rank to take what they sent.
                b.copy(own, place);
            }
        }
    }
}
