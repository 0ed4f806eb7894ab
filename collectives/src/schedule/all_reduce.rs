//! The reduction ends on every rank.

use super::contributions::Contributions;
use super::exposure::Part;
use super::{Algorithm, Build, KEPT, Peers, Span, all_gather, bruck, hierarchical, reduce_scatter, tuner};

pub(super) fn build(b: &mut Build) {
    let (rank, size, bytes) = (b.group.rank, b.group.size, b.call.bytes());
    let parts = b.parts();
    let own = Span::recv(parts[rank].start, parts[rank].len());
    match b.algorithm() {
        Algorithm::Local => b.copy(Span::send(0, bytes), Span::recv(0, bytes)),
        Algorithm::DirectReadAll => read_all(b),
        Algorithm::DirectReduceScatterAllGather => {
            // A peer that publishes its reduced part has read all it needs of the inputs, so part r of the
            // output may then be overwritten even where it is the input.
            reduce_scatter::direct(b, &parts, own, false);
            all_gather::direct(b, own, &parts, |_| ());
        }
        Algorithm::ExchangeAll => exchange_all(b),
        Algorithm::Bruck => bruck::all_reduce(b),
        Algorithm::HierarchicalExchange => hierarchical::exchange(b, &(0..size).collect::<Vec<usize>>()),
        Algorithm::Hierarchical => {
            match tuner::sums_pay(&b.group, b.call.dtype) {
                true => hierarchical::reduce_scatter(b, &parts, own),
                false => reduce_scatter::pairwise(b, &parts, own),
            }
            // Groups of messages that neither of the two has used.
            hierarchical::all_gather(b, own, &parts, usize::MAX / 2, |_| ());
        }
        _ => {
            reduce_scatter::pairwise(b, &parts, own);
            // Receives of the second phase overwrite an in-place input, which by then has been sent.
            all_gather::pairwise(b, own, &parts, usize::MAX, |_| ());
        }
    }
}

/// Everybody publishes the whole input and reduces everything. Where the output replaces the input, a small result
/// is kept aside until the peers have read the input, and a large input is copied for them piece by piece.
fn read_all(b: &mut Build) {
    let bytes = b.call.bytes();
    let whole = 0..bytes;
    let small = bytes <= KEPT;
    let exposure = b.expose(Span::send(0, bytes), vec![whole], 1, bytes, b.call.in_place && !small);
    let out = match b.call.in_place && small && !exposure.is_copied() {
        true => b.scratch(bytes),
        false => Span::recv(0, bytes),
    };
    let read = |b: &mut Build, part: &Part| b.read_reduced(part, 0, |_| (0, 0), out);
    b.exchange(&exposure, Some(Peers::All), (Peers::All, true), |_| (), read);
    b.copy(out, Span::recv(0, bytes));
}

/// Everybody sends the whole input to everybody.
fn exchange_all(b: &mut Build) {
    let (rank, bytes) = (b.group.rank, b.call.bytes());
    let mut contributions = Contributions::new(b);
    for from in b.others().rev() {
        contributions.recv(b, from, bytes, 0, Span::recv(0, bytes));
    }
    for to in b.others() {
        b.send(to, Span::send(0, bytes), 0);
    }
    b.wait(0);
    b.reduce(contributions.of(rank, 0, 0), Span::recv(0, bytes), b.call.count);
}
