//! Blocks that pass through partners unchanged.
//!
//! Gathering to all sends a block once to each node instead of to each rank. Where every block has one receiver, nodes
//! cannot save bytes; there they save messages, because what a node sends one rank comes in one. Those wait for their
//! last piece inside the node, so long blocks are better sent alone, which the tuner does.

use super::{View, cut, piece};
use crate::schedule::messages::Messages;
use crate::schedule::{Build, Span};
use std::ops::Range;

/// Everybody's part ends on every rank; part r is `own` on rank r. Messages are of groups from `group` on.
pub(in crate::schedule) fn all_gather(
    b: &mut Build,
    m: &mut Messages,
    own: Span,
    parts: &[Range<usize>],
    group: usize,
    meanwhile: impl FnOnce(&mut Build),
) {
    let view = View::of(&b.group);
    let rank = view.rank;
    let mates: Vec<usize> = view.mates().collect();
    let elsewhere = |of: usize| view.served_by(of).into_iter().filter(move |&r| r != of).collect::<Vec<_>>();
    let served = elsewhere(rank);
    let (per_round, rounds) = cut(b, &view, 2, parts[0].len());
    let end = group + rounds;
    let place = |r: usize, k: usize| {
        let range = piece(&parts[r], k, per_round);
        Span::recv(range.start, range.len())
    };
    for k in 0..rounds {
        for &from in &served {
            b.recv(m, from, place(from, k), group + k);
        }
    }
    for &from in &mates {
        b.recv(m, from, Span::recv(parts[from].start, parts[from].len()), end);
        let passed_on = elsewhere(from);
        for k in 0..rounds {
            for &r in &passed_on {
                b.recv(m, from, place(r, k), end);
            }
        }
    }
    for k in 0..rounds {
        let range = piece(&(0..own.bytes), k, per_round);
        for node in view.others() {
            b.send(m, view.partner(node, rank), own.slice(range.start, range.len()), end);
        }
    }
    for &to in &mates {
        b.send(m, to, own, end);
    }
    meanwhile(b);
    for k in 0..rounds {
        b.wait(m, group + k);
        for &to in &mates {
            for &r in &served {
                b.send(m, to, place(r, k), end);
            }
        }
    }
    b.wait(m, end);
}

/// The blocks of some ranks in memory that has one of `bytes` for each rank.
fn blocks(ranks: &[usize], bytes: usize, of: fn(usize, usize) -> Span) -> Vec<Span> {
    ranks.iter().map(|rank| of(rank * bytes, bytes)).collect()
}

/// Every rank's block, `own`, ends on the root: from each other node in one message. The root keeps its own at `place`.
pub(in crate::schedule) fn gather(b: &mut Build, own: Span, place: Span) {
    let (view, root, bytes) = (View::of(&b.group), b.call.root, b.call.bytes());
    let (rank, mut m) = (view.rank, Messages::new(view.nodes.world()));
    let speaker = view.partner(view.node(), root);
    if rank == root {
        for from in view.mates() {
            b.recv(&mut m, from, Span::recv(from * bytes, bytes), 0);
        }
        for node in view.others() {
            let theirs = blocks(&view.nodes.all()[node], bytes, Span::recv);
            b.recv_all(&mut m, view.partner(node, root), &theirs, 0);
        }
        b.copy(own, place);
    } else if rank == speaker {
        let all = b.scratch(view.nodes.with(rank).len() * bytes);
        let at = |rank: usize| all.slice(view.place(rank) * bytes, bytes);
        for from in view.mates() {
            b.recv(&mut m, from, at(from), 0);
        }
        b.copy(own, at(rank));
        b.wait(&mut m, 0);
        b.send(&mut m, root, all, 0);
    } else {
        b.send(&mut m, speaker, own, 0);
    }
    b.wait(&mut m, 0);
}

/// Block r of the root ends on rank r, at `place`: to each other node in one message. The root's is `own`.
pub(in crate::schedule) fn scatter(b: &mut Build, own: Span, place: Span) {
    let (view, root, bytes) = (View::of(&b.group), b.call.root, b.call.bytes());
    let (rank, mut m) = (view.rank, Messages::new(view.nodes.world()));
    let speaker = view.partner(view.node(), root);
    if rank == root {
        for node in view.others() {
            let theirs = blocks(&view.nodes.all()[node], bytes, Span::send);
            b.send_all(&mut m, view.partner(node, root), &theirs, 0);
        }
        for to in view.mates() {
            b.send(&mut m, to, Span::send(to * bytes, bytes), 0);
        }
        b.copy(own, place);
    } else if rank == speaker {
        let room = view.nodes.with(rank).len() * bytes;
        let all = b.recv_scratch(&mut m, root, room, 0, &mut None);
        let at = |rank: usize| all.slice(view.place(rank) * bytes, bytes);
        b.wait(&mut m, 0);
        for to in view.mates() {
            b.send(&mut m, to, at(to), 0);
        }
        b.copy(at(rank), place);
    } else {
        b.recv(&mut m, speaker, place, 0);
    }
    b.wait(&mut m, 0);
}

/// Block r of every rank ends on rank r: from each other node in one message. A rank's own goes from `own` to `place`.
pub(in crate::schedule) fn all_to_all(b: &mut Build, own: Span, place: Span) {
    let (view, bytes) = (View::of(&b.group), b.call.bytes());
    let (rank, mut m) = (view.rank, Messages::new(view.nodes.world()));
    // To each mate go its own block and those for the ranks that it deals with.
    let served = view.served_by(rank);
    let room = served.len() * bytes;
    let mates: Vec<usize> = view.mates().collect();
    let arrived: Vec<Span> =
        mates.iter().map(|&from| b.recv_scratch(&mut m, from, room, 0, &mut None)).collect();
    for &to in &mates {
        b.send_all(&mut m, to, &blocks(&view.served_by(to), bytes, Span::send), 0);
    }
    b.wait(&mut m, 0);
    // Everything that leaves this node lies elsewhere before what arrives replaces it in place.
    let part = |i: usize, of: usize| match mates.iter().position(|&mate| mate == of) {
        Some(from) => arrived[from].slice(i * bytes, bytes),
        None => Span::send(served[i] * bytes, bytes),
    };
    let parcel = |b: &mut Build, i: usize| {
        let parts: Vec<Span> = view.nodes.with(rank).iter().map(|&of| part(i, of)).collect();
        b.pack(&parts)
    };
    let elsewhere = (0..served.len()).filter(|&i| served[i] != rank);
    let parcels: Vec<(usize, Span)> = elsewhere.map(|i| (served[i], parcel(b, i))).collect();
    for node in view.others() {
        let theirs = blocks(&view.nodes.all()[node], bytes, Span::recv);
        b.recv_all(&mut m, view.partner(node, rank), &theirs, 1);
    }
    for (to, parcel) in parcels {
        b.send(&mut m, to, parcel, 1);
    }
    b.copy(own, place);
    let mine = served.iter().position(|&r| r == rank).expect("every rank deals with itself");
    for &mate in &mates {
        b.copy(part(mine, mate), Span::recv(mate * bytes, bytes));
    }
    b.wait(&mut m, 1);
}
