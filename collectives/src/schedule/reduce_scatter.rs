//! Shard r of the reduction ends on rank r.

use super::contributions::Contributions;
use super::exposure::Part;
use super::messages::Messages;
use super::{Algorithm, Build, Operand, Peers, Space, Span, hierarchical};
use std::ops::Range;

pub(super) fn build(b: &mut Build) {
    let (rank, size, shard) = (b.group.rank, b.group.size, b.call.bytes());
    let own = rank * shard;
    let out = if b.call.in_place { own } else { 0 };
    match b.algorithm() {
        Algorithm::Local if out_is_input(b) => b.copy(Span::send(0, shard), Span::recv(0, shard)),
        Algorithm::Local => {
            b.reduce(|_| Operand::Own(Space::Send, 0), Span::recv(0, out_bytes(b, shard)), b.call.count)
        }
        Algorithm::DirectRead => {
            let parts: Vec<Range<usize>> = (0..size).map(|r| r * shard..(r + 1) * shard).collect();
            direct(b, &parts, out, true);
        }
        Algorithm::Hierarchical => {
            let parts: Vec<Range<usize>> = (0..size).map(|r| r * shard..(r + 1) * shard).collect();
            let mut m = Messages::new(size);
            hierarchical::reduce_scatter(b, &mut m, &parts, Span::recv(out, out_bytes(b, shard)));
        }
        _ => {
            let parts: Vec<Range<usize>> = (0..size).map(|r| r * shard..(r + 1) * shard).collect();
            let mut m = Messages::new(size);
            pairwise(b, &mut m, &parts, Span::recv(out, out_bytes(b, shard)));
        }
    }
}

fn out_is_input(b: &Build) -> bool {
    b.out_size() == b.call.dtype.size()
}

fn out_bytes(b: &Build, input: usize) -> usize {
    input / b.call.dtype.size() * b.out_size()
}

/// One pass over the peers' memory: rank r reads everybody's part r and reduces it to `Recv[out..]`.
pub(super) fn direct(b: &mut Build, parts: &[Range<usize>], out: usize, release: bool) {
    let (rank, size, element) = (b.group.rank, b.group.size, b.call.dtype.size());
    let total = parts[size - 1].end;
    let largest = parts[0].len();
    let others: Vec<Range<usize>> = (0..size).filter(|&p| p != rank).map(|p| parts[p].clone()).collect();
    let exposure = b.expose(Span::send(0, total), others, size - 1, largest, false);
    let mine = parts[rank].clone();
    let read = move |b: &mut Build, part: Part| {
        let bytes = part.of(mine.len());
        // The part for this rank is the rank-th piece of a later rank, which skips its own.
        let operand = |r: usize| match r {
            r if r == rank => Operand::Own(Space::Send, mine.start + bytes.start),
            r => Operand::Peer(part.remote(r, mine.start, rank - usize::from(rank > r))),
        };
        let at = out + out_bytes(b, bytes.start);
        let to = Span::recv(at, out_bytes(b, bytes.len()));
        b.reduce(operand, to, bytes.len() / element);
    };
    b.exchange(&exposure, Some(Peers::All), (Peers::All, release), |_| (), read);
}

/// Each pair of ranks exchanges its contributions in rounds; while one round is under way, the one before is
/// reduced to `out`. `parts` are byte ranges of the input.
pub(super) fn pairwise(b: &mut Build, m: &mut Messages, parts: &[Range<usize>], out: Span) {
    let (rank, size, element) = (b.group.rank, b.group.size, b.call.dtype.size());
    let (per_round, rounds) = b.group.tuning.cut_reduction(size - 1, parts[0].len());
    let mut contributions = Contributions::new(b);
    let cut = |part: &Range<usize>, k: usize| {
        (part.start + k * per_round).min(part.end)..(part.start + (k + 1) * per_round).min(part.end)
    };
    let place = |b: &Build, k: usize| {
        let mine = cut(&parts[rank], k);
        out.slice(out_bytes(b, mine.start - parts[rank].start), out_bytes(b, mine.len()))
    };
    let post = |b: &mut Build, m: &mut Messages, contributions: &mut Contributions, k: usize| {
        let (bytes, out) = (cut(&parts[rank], k).len(), place(b, k));
        for i in 1..size {
            contributions.recv(b, m, (rank + size - i) % size, bytes, k, out);
        }
        for to in b.others() {
            let theirs = cut(&parts[to], k);
            b.send(m, to, Span::send(theirs.start, theirs.len()), k);
        }
    };
    post(b, m, &mut contributions, 0);
    for k in 0..rounds {
        if k + 1 < rounds {
            post(b, m, &mut contributions, k + 1);
        }
        b.wait(m, k);
        let mine = cut(&parts[rank], k);
        let out = place(b, k);
        b.reduce(contributions.of(rank, mine.start, k), out, mine.len() / element);
    }
}
