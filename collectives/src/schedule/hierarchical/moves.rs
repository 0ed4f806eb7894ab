//! Blocks that pass through partners unchanged.
//!
//! Gathering to all sends a block once to each node instead of to each rank. Where every block has one receiver, nodes
//! cannot save bytes; there they save messages, because what a node sends one rank comes in one. Those wait for their
//! last piece inside the node, so long blocks are better sent alone, which the tuner does.

use super::{Passing, View, cut};
use crate::schedule::{Build, Span, piece};
use std::ops::Range;

/// Everybody's part ends on every rank; part r is `own` on rank r. Messages are of groups from `group` on. Of the rounds in
/// which parts come from other nodes and are passed on, two are under way at once.
pub(in crate::schedule) fn all_gather(
    b: &mut Build,
    own: Span,
    parts: &[Range<usize>],
    group: usize,
    meanwhile: impl FnOnce(&mut Build),
) {
    // Between two nodes a round brings one piece. Of two that would together just fill a link, each would have to be passed
    // on at once.
    let passing = Passing::new(b, parts, Span::recv, 1);
    let Passing { view, per_round, rounds, .. } = &passing;
    let rank = view.rank;
    let elsewhere = |of: usize| view.served_by(of).into_iter().filter(move |&r| r != of).collect::<Vec<_>>();
    let served = elsewhere(rank);
    let passed_on: Vec<(usize, Vec<usize>)> = view.mates().map(|mate| (mate, elsewhere(mate))).collect();
    let (from_mates, arrived, ended) = (group, |k: usize| group + 1 + 2 * k, |k: usize| group + 2 + 2 * k);
    let post = |b: &mut Build, k: usize| {
        for (&from, place) in served.iter().zip(passing.pieces(b, &served, k).0) {
            b.recv(from, place, arrived(k));
        }
        for (from, ranks) in &passed_on {
            match passing.pieces(b, ranks, k) {
                (pieces, true) => b.recv_all(*from, &pieces, ended(k)),
                (pieces, false) => pieces.iter().for_each(|&piece| b.recv(*from, piece, ended(k))),
            }
        }
        let range = piece(&(0..own.bytes), k, *per_round);
        for node in view.others() {
            b.send(view.partner(node, rank), own.slice(range.start, range.len()), ended(k));
        }
    };
    for from in view.mates() {
        b.recv(from, Span::recv(parts[from].start, parts[from].len()), from_mates);
    }
    post(b, 0);
    for to in view.mates() {
        b.send(to, own, from_mates);
    }
    meanwhile(b);
    for k in 0..*rounds {
        if k > 0 {
            b.wait(ended(k - 1));
        }
        if k + 1 < *rounds {
            post(b, k + 1);
        }
        b.wait(arrived(k));
        let parcel = passing.parcel(b, &served, k);
        for to in view.mates() {
            parcel.iter().for_each(|&piece| b.send(to, piece, ended(k)));
        }
    }
    b.wait(ended(rounds - 1));
    b.wait(from_mates);
}

/// Carries a call that moves blocks of one length in rounds, each of a part of every block.
fn in_rounds(b: &mut Build, mut carry: impl FnMut(&mut Build, &View, Round)) {
    let (view, block) = (View::of(&b.group), b.call.bytes());
    // A rank has parts of about as many blocks at once as there are ranks.
    let (per_round, rounds) = cut(b, &view, b.group.size, block);
    let (start, mut most) = (b.schedule.scratch, 0);
    for k in 0..rounds {
        // When a round is over, nothing is left of it there.
        b.schedule.scratch = start;
        carry(b, &view, Round { block, range: piece(&(0..block), k, per_round), group: 2 * k });
        most = most.max(b.schedule.scratch);
    }
    b.schedule.scratch = most;
}

/// One of them.
struct Round {
    /// Bytes of a block.
    block: usize,
    /// Those of it that this round moves.
    range: Range<usize>,
    /// Its messages are of this group and the next.
    group: usize,
}

impl Round {
    /// Its part of the block of `rank` in memory that has one for each rank.
    fn of(&self, rank: usize, memory: fn(usize, usize) -> Span) -> Span {
        memory(rank * self.block + self.range.start, self.range.len())
    }

    /// The same of several ranks.
    fn all(&self, ranks: &[usize], memory: fn(usize, usize) -> Span) -> Vec<Span> {
        ranks.iter().map(|&rank| self.of(rank, memory)).collect()
    }

    /// Its part of one block.
    fn part(&self, block: Span) -> Span {
        block.slice(self.range.start, self.range.len())
    }
}

/// Every rank's block, `own`, ends on the root: from each other node in one message. The root keeps its own at `place`.
pub(in crate::schedule) fn gather(b: &mut Build, own: Span, place: Span) {
    let (rank, root) = (b.group.rank, b.call.root);
    in_rounds(b, |b, view, round| {
        let (own, bytes, last) = (round.part(own), round.range.len(), round.group + 1);
        let speaker = view.partner(view.node(), root);
        if rank == root {
            for from in view.mates() {
                b.recv(from, round.of(from, Span::recv), last);
            }
            for node in view.others() {
                let theirs = round.all(&view.nodes.all()[node], Span::recv);
                b.recv_all(view.partner(node, root), &theirs, last);
            }
            b.copy(own, round.part(place));
        } else if rank == speaker {
            let all = b.scratch(view.nodes.with(rank).len() * bytes);
            let at = |rank: usize| all.slice(view.place(rank) * bytes, bytes);
            for from in view.mates() {
                b.recv(from, at(from), round.group);
            }
            b.copy(own, at(rank));
            b.wait(round.group);
            b.send(root, all, last);
        } else {
            b.send(speaker, own, last);
        }
        b.wait(last);
    });
}

/// Block r of the root ends on rank r, at `place`: to each other node in one message. The root's is `own`.
pub(in crate::schedule) fn scatter(b: &mut Build, own: Span, place: Span) {
    let (rank, root) = (b.group.rank, b.call.root);
    in_rounds(b, |b, view, round| {
        let (place, bytes, last) = (round.part(place), round.range.len(), round.group + 1);
        let speaker = view.partner(view.node(), root);
        if rank == root {
            for node in view.others() {
                let theirs = round.all(&view.nodes.all()[node], Span::send);
                b.send_all(view.partner(node, root), &theirs, last);
            }
            for to in view.mates() {
                b.send(to, round.of(to, Span::send), last);
            }
            b.copy(round.part(own), place);
        } else if rank == speaker {
            let room = view.nodes.with(rank).len() * bytes;
            let all = b.recv_scratch(root, room, round.group, &mut None);
            let at = |rank: usize| all.slice(view.place(rank) * bytes, bytes);
            b.wait(round.group);
            for to in view.mates() {
                b.send(to, at(to), last);
            }
            b.copy(at(rank), place);
        } else {
            b.recv(speaker, place, last);
        }
        b.wait(last);
    });
}

/// Block r of every rank ends on rank r: from each other node in one message. A rank's own goes from `own` to `place`.
pub(in crate::schedule) fn all_to_all(b: &mut Build, own: Span, place: Span) {
    let rank = b.group.rank;
    in_rounds(b, |b, view, round| {
        let (bytes, last) = (round.range.len(), round.group + 1);
        // To each mate go its own block and those for the ranks that it deals with.
        let served = view.served_by(rank);
        let room = served.len() * bytes;
        let mates: Vec<usize> = view.mates().collect();
        let arrived: Vec<Span> =
            mates.iter().map(|&from| b.recv_scratch(from, room, round.group, &mut None)).collect();
        for &to in &mates {
            b.send_all(to, &round.all(&view.served_by(to), Span::send), round.group);
        }
        b.wait(round.group);
        // Everything that leaves this node lies elsewhere before what arrives replaces it in place.
        let part = |i: usize, of: usize| match mates.iter().position(|&mate| mate == of) {
            Some(from) => arrived[from].slice(i * bytes, bytes),
            None => round.of(served[i], Span::send),
        };
        let parcel = |b: &mut Build, i: usize| {
            let parts: Vec<Span> = view.nodes.with(rank).iter().map(|&of| part(i, of)).collect();
            b.pack(&parts)
        };
        let elsewhere = (0..served.len()).filter(|&i| served[i] != rank);
        let parcels: Vec<(usize, Span)> = elsewhere.map(|i| (served[i], parcel(b, i))).collect();
        for node in view.others() {
            let theirs = round.all(&view.nodes.all()[node], Span::recv);
            b.recv_all(view.partner(node, rank), &theirs, last);
        }
        for (to, parcel) in parcels {
            b.send(to, parcel, last);
        }
        b.copy(round.part(own), round.part(place));
        let mine = served.iter().position(|&r| r == rank).expect("every rank deals with itself");
        for &mate in &mates {
            b.copy(part(mine, mate), round.of(mate, Span::recv));
        }
        b.wait(last);
    });
}

#[cfg(test)]
mod tests {
    use crate::element::DType;
    use crate::schedule::{Algorithm, Call, Group, Kind, Local, Schedule, Step};
    use crate::transport::Nodes;
    use std::sync::Arc;

    /// Of a rank among 12 on nodes of 4, by the places of their ranks.
    fn schedule(kind: Kind, bytes: usize, rank: usize) -> Schedule {
        let nodes = Some(Arc::new(Nodes::blocks(12, 4).unwrap()));
        let group = Group { nodes, ..Group::plain(rank, 12) };
        let call = Call::new(kind, DType::U8, bytes);
        Schedule::new(call, &group, Local::default(), Some(Algorithm::Hierarchical))
    }

    #[test]
    fn no_more_messages_are_under_way_the_longer_blocks_are() {
        for rank in [0, 5] {
            let posted = |mib: usize| schedule(Kind::AllGather, mib << 20, rank).posted;
            assert!(posted(4) <= 2 * posted(1), "{} and {}", posted(4), posted(1));
            assert_eq!(posted(64), posted(4));
        }
    }

    #[test]
    fn few_bytes_go_to_a_mate_in_one_message() {
        let sent = |kind, bytes| {
            let schedule = schedule(kind, bytes, 5);
            let is = |step: &&Step| matches!(step, Step::Send { .. });
            schedule.steps.iter().filter(is).count()
        };
        // To 3 mates its own and in one what 2 ranks elsewhere have sent, and to each of those its own.
        assert_eq!([10, 3_000, 8_000].map(|bytes| sent(Kind::AllGather, bytes)), [8, 8, 11]);
        // To 3 mates what they deal with for 3 ranks, and to 2 of those partial results.
        assert_eq!([10, 2_000, 8_000].map(|bytes| sent(Kind::ReduceScatter, bytes)), [5, 5, 11]);
    }

    #[test]
    fn scratch_does_not_grow_with_blocks() {
        for nodes in [&[0, 0, 1, 1][..], &[0, 1, 0, 1], &[0, 1, 1, 2, 2, 2]] {
            for kind in [Kind::Gather, Kind::Scatter, Kind::AllToAll] {
                for rank in 0..nodes.len() {
                    let nodes = Some(Arc::new(Nodes::of(nodes)));
                    let size = nodes.as_ref().map_or(0, |nodes| nodes.world());
                    let group = Group { nodes, ..Group::plain(rank, size) };
                    let scratch = |bytes| {
                        let call = Call::new(kind, DType::U8, bytes);
                        Schedule::new(call, &group, Local::default(), Some(Algorithm::Hierarchical)).scratch
                    };
                    assert_eq!(scratch(4 << 20), scratch(16 << 20), "{kind}");
                    assert!(scratch(16 << 20) < 4 * group.tuning.round, "{kind}");
                }
            }
        }
    }
}
