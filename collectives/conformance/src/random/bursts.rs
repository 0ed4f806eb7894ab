//! Messages whose sender and receiver make other calls in between, which is theirs to do: messages are apart from the order
//! of collectives. Several under one tag, of which the first may be long, so that those behind it have to wait.

use super::{Check, Draw, Keep, Sample, data, same};
use collectives::Communicator;

/// What a rank does some steps later: it starts its part, or waits for what it has started, and not before, because its peer
/// may be held up until then by what this rank has yet to call.
pub(super) type Later = Box<dyn FnOnce() -> Vec<Check>>;

/// One of these; none for who has no part in it.
pub(super) fn burst<T: Sample>(
    comm: &Communicator,
    number: usize,
    longest: usize,
    all: &mut Draw,
    own: &mut Draw,
) -> Option<Later> {
    let (rank, n) = (comm.rank(), comm.size());
    if n == 1 {
        return None;
    }
    let ((from, to), early) = (all.pair(n), all.below(2));
    let count = 1 + all.below(3);
    // Mostly one in several pieces, and behind it such as need memory of the engine, which travel with a fingerprint.
    let length = |i| match (i, all.below(4)) {
        (_, 0) => all.length(longest),
        (0, _) => longest + all.below(7 * longest),
        _ => (4096 + all.below(4096)) / size_of::<T>(),
    };
    let lengths: Vec<usize> = (0..count).map(length).collect();
    if rank != from && rank != to {
        return None;
    }
    // No other call has it: who comes first with a tag gets what was sent first.
    let (comm, keep, tag) = (comm.clone(), own.of_all(&Keep::ALL), 3 + number as u32);
    let start = move || -> Vec<Check> {
        let one = |(i, len): (usize, usize)| -> Check {
            let sent = data::<T>(4 * number + i, from, len);
            let what = format!("burst {number}, message {i}, {len} {} from {from} to {to}", T::DTYPE);
            let started = match rank == from {
                true => comm.start_send(keep.buffer(&comm, &sent), to, tag),
                false => comm.start_recv(keep.empty::<T>(&comm, len), from, tag),
            };
            let started = started.expect("starts");
            Box::new(move || same(started.wait().expect("works").host(), &sent, what))
        };
        lengths.into_iter().enumerate().map(one).collect()
    };
    if [from, to][early] != rank {
        return Some(Box::new(start));
    }
    let started = start();
    Some(Box::new(move || started))
}
