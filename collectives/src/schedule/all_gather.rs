//! Every rank's shard ends on every rank.

use super::{Algorithm, Build, Peers, Span, bruck, hierarchical};
use std::ops::Range;

pub(super) fn build(b: &mut Build) {
    let (rank, shard) = (b.group.rank, b.call.bytes());
    let parts = b.blocks();
    let own = if b.call.in_place { rank * shard } else { 0 };
    let own = Span::send(own, shard);
    let place = Span::recv(rank * shard, shard);
    match b.algorithm() {
        Algorithm::Local => b.copy(own, place),
        Algorithm::DirectRead => direct(b, own, &parts, |b| b.copy(own, place)),
        Algorithm::Bruck => bruck::all_gather(b, own, place),
        Algorithm::Hierarchical => hierarchical::all_gather(b, own, &parts, 0, |b| b.copy(own, place)),
        _ => pairwise(b, own, &parts, 0, |b| b.copy(own, place)),
    }
}

/// One copy out of the peers' memory: part r of the output comes from rank r, which publishes `own`.
pub(super) fn direct(b: &mut Build, own: Span, parts: &[Range<usize>], meanwhile: impl FnOnce(&mut Build)) {
    let piece = 0..own.bytes;
    let exposure = b.expose(own, vec![piece], 1, parts[0].len(), false);
    b.exchange(&exposure, Some(Peers::All), (Peers::All, true), meanwhile, |b, part| {
        for peer in b.others() {
            b.read(part, peer, (0, 0), Span::recv(parts[peer].start, parts[peer].len()));
        }
    });
}

/// Each pair of ranks exchanges its parts; the messages are of `group`.
pub(super) fn pairwise(
    b: &mut Build,
    own: Span,
    parts: &[Range<usize>],
    group: usize,
    meanwhile: impl FnOnce(&mut Build),
) {
    for from in b.others().rev() {
        b.recv(from, Span::recv(parts[from].start, parts[from].len()), group);
    }
    for to in b.others() {
        b.send(to, own, group);
    }
    meanwhile(b);
    b.wait(group);
}
