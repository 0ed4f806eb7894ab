//! What each rank has ends on every rank in as many steps as 2 has to be doubled to reach their number (Bruck's algorithm):
//! after step k a rank has what 2^(k+1) ranks had, itself and those after it, and passes all that on.
//!
//! Every pair of ranks would exchange as many bytes, but in n - 1 messages a rank instead of log2(n).

use super::{Build, Operand, Space, Span};

/// Every rank's shard ends on every rank.
pub(super) fn all_gather(b: &mut Build, own: Span, place: Span) {
    let (size, shard) = (b.group.size, b.call.bytes());
    b.copy(own, place);
    spread(b, Span::recv(0, size * shard));
}

/// All contributions end on every rank, which then reduces them.
pub(super) fn all_reduce(b: &mut Build) {
    let (rank, size, bytes) = (b.group.rank, b.group.size, b.call.bytes());
    let all = b.scratch(size * bytes);
    b.copy(Span::send(0, bytes), all.slice(rank * bytes, bytes));
    spread(b, all);
    let operand = |r: usize| Operand::Own(Space::Scratch, all.offset + r * bytes);
    b.reduce(operand, Span::recv(0, bytes), b.call.count);
}

/// Fills `all`, the blocks of all ranks in rank order, of which this rank has its own.
fn spread(b: &mut Build, all: Span) {
    let (rank, size) = (b.group.rank, b.group.size);
    let block = all.bytes / size;
    // The blocks of so many ranks from this one on: one piece, or two where they begin again with rank 0.
    let blocks = |from: usize, count: usize| {
        let before = count.min(size - from);
        let first = all.slice(from * block, before * block);
        [first, all.slice(0, (count - before) * block)].into_iter().filter(|piece| piece.bytes > 0).collect()
    };
    let (mut have, mut step) = (1, 0);
    while have < size {
        let (count, after) = (have.min(size - have), (rank + have) % size);
        let given: Vec<Span> = blocks(rank, count);
        let got: Vec<Span> = blocks(after, count);
        b.send_all((rank + size - have) % size, &given, step);
        b.recv_all(after, &got, step);
        b.wait(step);
        have += count;
        step += 1;
    }
}
