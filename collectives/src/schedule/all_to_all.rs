//! Block r of every rank ends on rank r.

use super::{Algorithm, Build, Peers, Span, Step, hierarchical, piece};

pub(super) fn build(b: &mut Build) {
    let (rank, size, block) = (b.group.rank, b.group.size, b.call.bytes());
    let (own, place) = (Span::send(rank * block, block), Span::recv(rank * block, block));
    match b.algorithm() {
        Algorithm::Local => b.copy(own, place),
        Algorithm::DirectRead => {
            let mut others = b.blocks();
            others.remove(rank);
            // In place, what arrives overwrites what peers have yet to read, so they read a copy.
            let copy = b.call.in_place;
            let exposure = b.expose(Span::send(0, size * block), others, size - 1, block, copy);
            let keep = |b: &mut Build| b.copy(own, place);
            b.exchange(&exposure, Some(Peers::All), (Peers::All, true), keep, |b, part| {
                for peer in b.others() {
                    let piece = (rank * block, rank - usize::from(rank > peer));
                    b.read(part, peer, piece, Span::recv(peer * block, block));
                }
            });
        }
        Algorithm::Hierarchical => hierarchical::all_to_all(b, own, place),
        _ if b.call.in_place => pairwise_in_place(b),
        _ => {
            let (per_round, rounds) = pieces(b);
            let blocks = b.blocks();
            let cut = |peer: usize, k: usize| piece(&blocks[peer], k, per_round);
            let post = |b: &mut Build, k: usize| {
                for from in b.others().rev() {
                    let range = cut(from, k);
                    b.recv(from, Span::recv(range.start, range.len()), k);
                }
                for to in b.others() {
                    let range = cut(to, k);
                    b.send(to, Span::send(range.start, range.len()), k);
                }
            };
            // Two rounds are under way at once: many ranks in many rounds would have more messages than libraries take well.
            post(b, 0);
            for k in 0..rounds {
                if k + 1 < rounds {
                    post(b, k + 1);
                }
                if k == 0 {
                    b.copy(own, place);
                }
                b.wait(k);
            }
        }
    }
}

/// Bytes per round and rounds of the pairwise exchanges. Both forms use the same, because ranks may mix them.
fn pieces(b: &Build) -> (usize, usize) {
    b.group.tuning.cut(b.group.size - 1, b.call.bytes(), b.group.tuning.round)
}

/// A block that arrives replaces the one that goes to the same rank, so each round lands in scratch first.
fn pairwise_in_place(b: &mut Build) {
    let size = b.group.size;
    let (per_round, rounds) = pieces(b);
    let blocks = b.blocks();
    let cut = |peer: usize, k: usize| piece(&blocks[peer], k, per_round);
    let mut windows: Vec<Option<Span>> = vec![None; size];
    for k in 0..rounds {
        let mut arrived = vec![Span::scratch(0, 0); size];
        for from in b.others().rev() {
            let bytes = cut(from, k).len();
            arrived[from] = b.recv_scratch(from, bytes, k, &mut windows[from]);
        }
        for to in b.others() {
            let range = cut(to, k);
            b.send(to, Span::send(range.start, range.len()), k);
        }
        b.wait(k);
        for from in b.others() {
            let range = cut(from, k);
            if !range.is_empty() {
                b.push(Step::Copy { from: arrived[from], to: Span::recv(range.start, range.len()) });
            }
        }
    }
}
