//! Shard r of the reduction ends on rank r.

use super::contributions::Contributions;
use super::exposure::Part;
use super::{Algorithm, Build, Operand, Peers, Space, Span, hierarchical, piece};
use std::ops::Range;

pub(super) fn build(b: &mut Build) {
    let (rank, shard) = (b.group.rank, b.call.bytes());
    let own = rank * shard;
    let out = if b.call.in_place { own } else { 0 };
    let out = Span::recv(out, out_bytes(b, shard));
    let shards = b.blocks();
    match b.algorithm() {
        Algorithm::Local if out_is_input(b) => b.copy(Span::send(0, shard), out),
        Algorithm::Local => b.reduce(|_| Operand::Own(Space::Send, 0), out, b.call.count),
        Algorithm::DirectRead => direct(b, &shards, out, true),
        Algorithm::Hierarchical => hierarchical::reduce_scatter(b, &shards, out),
        _ => pairwise(b, &shards, out),
    }
}

fn out_is_input(b: &Build) -> bool {
    b.out_size() == b.call.dtype.size()
}

fn out_bytes(b: &Build, input: usize) -> usize {
    input / b.call.dtype.size() * b.out_size()
}

/// One pass over the peers' memory: rank r reads everybody's part r and reduces it to `out`.
pub(super) fn direct(b: &mut Build, parts: &[Range<usize>], out: Span, release: bool) {
    let (rank, size) = (b.group.rank, b.group.size);
    let total = parts[size - 1].end;
    let largest = parts[0].len();
    let mut others = parts.to_vec();
    let mine = others.remove(rank);
    let exposure = b.expose(Span::send(0, total), others, size - 1, largest, false);
    // The part for this rank is the rank-th piece of a later rank, which skips its own.
    let theirs = |r: usize| (mine.start, rank - usize::from(rank > r));
    let read = |b: &mut Build, part: &Part| b.read_reduced(part, mine.start, theirs, out);
    b.exchange(&exposure, Some(Peers::All), (Peers::All, release), |_| (), read);
}

/// Each pair of ranks exchanges its contributions in rounds; while one round is under way, the one before is
/// reduced to `out`. `parts` are byte ranges of the input.
pub(super) fn pairwise(b: &mut Build, parts: &[Range<usize>], out: Span) {
    let (rank, size, element) = (b.group.rank, b.group.size, b.call.dtype.size());
    let (per_round, rounds) = b.group.tuning.cut_reduction(size - 1, parts[0].len());
    let mut contributions = Contributions::new(b);
    let place = |b: &Build, k: usize| {
        let mine = piece(&parts[rank], k, per_round);
        out.slice(out_bytes(b, mine.start - parts[rank].start), out_bytes(b, mine.len()))
    };
    let post = |b: &mut Build, contributions: &mut Contributions, k: usize| {
        let (bytes, out) = (piece(&parts[rank], k, per_round).len(), place(b, k));
        for from in b.others().rev() {
            contributions.recv(b, from, bytes, k, out);
        }
        for to in b.others() {
            let theirs = piece(&parts[to], k, per_round);
            b.send(to, Span::send(theirs.start, theirs.len()), k);
        }
    };
    post(b, &mut contributions, 0);
    for k in 0..rounds {
        if k + 1 < rounds {
            post(b, &mut contributions, k + 1);
        }
        b.wait(k);
        let mine = piece(&parts[rank], k, per_round);
        let out = place(b, k);
        b.reduce(contributions.of(rank, mine.start, k), out, mine.len() / element);
    }
}
