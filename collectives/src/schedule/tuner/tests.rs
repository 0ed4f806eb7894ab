//! Which algorithm carries what, and whether what is said of it is true.

use super::*;
use crate::element::DType;
use crate::transport::Nodes;
use std::sync::Arc;

fn all_reduce(group: &Group, bytes: usize) -> Choice {
    choose(&Call::new(Kind::AllReduce, DType::U8, bytes), group, None)
}

#[test]
fn a_link_moves_the_sizes_at_which_algorithms_change() {
    let group = |ranks, link: Option<(u64, f64)>| {
        let plain = Tuning::default();
        let tuning = link.map_or(plain, |(us, b)| plain.for_link(ranks, Duration::from_micros(us), b));
        Group { tuning, ..Group::plain(0, ranks) }
    };
    // 22 us at 1.25 GB/s are 27500 bytes. With 4 ranks half of what is sent is too much, which takes 0.4 ns a
    // byte; the quarter that is reduced late takes 0.03: 22000 / 0.43125 bytes are sent at most, by 3 messages.
    let cluster = group(4, Some((20, 1.25e9)));
    assert_eq!((cluster.tuning.tree, cluster.tuning.exchange_all), (27_500, 51_014));
    assert_eq!(all_reduce(&cluster, 17_004).algorithm, Algorithm::ExchangeAll);
    assert_eq!(all_reduce(&cluster, 17_005).algorithm, Algorithm::PairwiseReduceScatterAllGather);
    assert_eq!(all_reduce(&group(4, None), 17_004).algorithm, Algorithm::PairwiseReduceScatterAllGather);
    // Two ranks send no more than is needed: 22 us of reducing.
    let two = group(2, Some((20, 1.25e9)));
    assert_eq!(two.tuning.exchanged(2), 352_000);
    assert_eq!(all_reduce(&two, 352_000).algorithm, Algorithm::ExchangeAll);
    assert_eq!(all_reduce(&two, 352_001).algorithm, Algorithm::PairwiseReduceScatterAllGather);
    assert_eq!(all_reduce(&group(2, None), 128 << 10).algorithm, Algorithm::ExchangeAll);
    assert_eq!(
        all_reduce(&group(2, None), (128 << 10) + 1).algorithm,
        Algorithm::PairwiseReduceScatterAllGather
    );
    // Over a continent a round must fill 50 ms.
    let far = group(4, Some((50_000, 1e9))).tuning;
    assert!(far.round >= 64 << 20 && far.exchange_all == 4 << 20, "{far:?}");
    assert_eq!(group(2, Some((1, f64::INFINITY))).tuning.tree, 4 << 20);
}

#[test]
fn nodes_are_units_where_that_sends_less_between_them() {
    let group = |size, block| Group {
        nodes: Some(Arc::new(Nodes::blocks(size, block).unwrap())),
        ..Group::plain(0, size)
    };
    let of = |kind, dtype, count, group: &Group| choose(&Call::new(kind, dtype, count), group, None);
    let large = 1 << 20;
    for kind in [Kind::AllReduce, Kind::ReduceScatter, Kind::AllGather, Kind::Reduce] {
        let choice = of(kind, DType::F32, large, &group(8, 4));
        assert_eq!((choice.algorithm, choice.why), (Algorithm::Hierarchical, Why::Nodes(4)), "{kind}");
    }
    assert_eq!(all_reduce(&group(8, 4), 64).algorithm, Algorithm::HierarchicalExchange);
    let small = |kind| of(kind, DType::F32, 4, &group(8, 4)).algorithm;
    assert_eq!(small(Kind::Reduce), Algorithm::HierarchicalExchange);
    for kind in [Kind::Broadcast, Kind::Gather, Kind::Scatter, Kind::AllToAll, Kind::Barrier] {
        assert_eq!(small(kind), Algorithm::Hierarchical, "{kind}");
    }
    // Nodes must save more than half: 8 unrounded bf16 in one do, 4 do not, nor 3 f32 in two.
    let of_sums = |dtype, size, block| of(Kind::ReduceScatter, dtype, large, &group(size, block)).algorithm;
    assert_eq!(of_sums(DType::Bf16, 16, 8), Algorithm::Hierarchical);
    assert_eq!(of_sums(DType::Bf16, 8, 4), Algorithm::Pairwise);
    assert_eq!(of_sums(DType::F32, 9, 3), Algorithm::Pairwise);
    assert_eq!(of_sums(DType::F32, 8, 2), Algorithm::Pairwise);
    // Gathering saves in any case, also as the second half of an all_reduce.
    assert_eq!(of(Kind::AllGather, DType::Bf16, large, &group(8, 2)).algorithm, Algorithm::Hierarchical);
    assert_eq!(of(Kind::AllReduce, DType::Bf16, large, &group(8, 2)).algorithm, Algorithm::Hierarchical);
    assert_eq!(of(Kind::AllReduce, DType::Bf16, 64, &group(8, 2)).algorithm, Algorithm::ExchangeAll);
    assert_eq!(of(Kind::AllToAll, DType::F32, large, &group(8, 4)).algorithm, Algorithm::Pairwise);
}

#[test]
fn a_root_copies_all_of_one_other_input_at_once() {
    let of = |one_memory, size| Group { one_memory, ..Group::plain(0, size) };
    let rounds = |group: &Group, mib: usize| group.tuning.cut_for_root(group, mib << 20).1;
    assert_eq!([4, 64, 65].map(|mib| rounds(&of(true, 2), mib)), [1, 1, 2]);
    assert_eq!([2, 4].map(|mib| rounds(&of(false, 2), mib)), [1, 8]);
    assert!(rounds(&of(true, 3), 4) > 1);
}

#[test]
fn a_root_reduces_fewer_bytes_alone_the_more_ranks_there_are() {
    let plain = Tuning::default();
    assert_eq!([3, 4, 8, 64].map(|ranks| plain.reduced_alone(ranks)), [65536, 65536, 34_328, 17_986]);
    for (tuning, ranks) in [plain, plain.for_link(64, Duration::from_micros(20), 1.25e9)]
        .into_iter()
        .flat_map(|t| (3..200).map(move |n| (t, n)))
    {
        // In bytes that the link carries meanwhile: what the root receives, and what it waits for besides.
        let others = (ranks - 1) as f64;
        let alone = |bytes: f64| others * bytes;
        let together = |bytes: f64| {
            2.0 * others * bytes / ranks as f64 + tuning.tree as f64 + others * tuning.handled as f64
        };
        let limit = tuning.reduced_alone(ranks);
        assert!(alone(0.99 * limit as f64) < together(0.99 * limit as f64), "{ranks} ranks, {limit} bytes");
        let above = 1.01 * limit as f64;
        assert!(limit == tuning.tree || alone(above) > together(above), "{ranks} ranks, {limit} bytes");
    }
}

#[test]
fn many_ranks_pass_few_bytes_on_instead_of_sending_them_to_all() {
    let plain = Tuning::default();
    // Of 63 messages 57 are saved, each as long as 16 KiB, and 5 steps more take as long as 320 KiB.
    let doubled = |tuning: &Tuning, ranks, reduces| tuning.doubled(ranks, reduces, Effort::of_all(ranks));
    let limits = |reduces| [2, 3, 16, 22, 23, 64].map(|ranks| doubled(&plain, ranks, reduces));
    assert_eq!(limits(false), [0, 0, 0, 0, 744, 9622]);
    // To reduce all inputs takes about as long as to receive them.
    assert_eq!(limits(true), [0, 0, 0, 0, 364, 4736]);
    // And longer than that where a link carries more than a rank reduces.
    let fast = plain.for_link(64, Duration::from_micros(2), 50e9);
    assert!(doubled(&fast, 64, true) * 4 < doubled(&fast, 64, false));
    let endless = plain.for_link(64, Duration::from_micros(2), 1e12);
    assert!(Algorithm::Bruck.suits(doubled(&endless, 64, false), 64));
    let of = |kind, ranks, bytes| {
        let group = Group::plain(0, ranks);
        choose(&Call::new(kind, DType::U8, bytes), &group, None).algorithm
    };
    for (kind, limit, large) in [
        (Kind::AllGather, 9622, Algorithm::Pairwise),
        (Kind::AllReduce, 4736, Algorithm::PairwiseReduceScatterAllGather),
    ] {
        assert_eq!((of(kind, 64, limit), of(kind, 64, limit + 1)), (Algorithm::Bruck, large), "{kind}");
        assert_ne!(of(kind, 16, 0), Algorithm::Bruck, "{kind}");
    }
    for (tuning, ranks) in [plain, plain.for_link(64, Duration::from_micros(5), 1.25e9)]
        .into_iter()
        .flat_map(|t| (2..300usize).map(move |ranks| (t, ranks)))
    {
        // In bytes that the link carries meanwhile, of which as many are sent either way.
        let steps = f64::from(ranks.next_power_of_two().trailing_zeros());
        let all = tuning.tree as f64 + (ranks - 1) as f64 * tuning.handled as f64;
        let passed_on = steps * (tuning.tree + tuning.handled) as f64;
        assert!(doubled(&tuning, ranks, false) == 0 || passed_on < all, "{ranks} ranks");
        assert!(doubled(&tuning, ranks, false) > 0 || passed_on > all - ranks as f64, "{ranks} ranks");
    }
}

/// So many ranks on these nodes, behind a link of so many milliseconds and bytes per second.
fn behind(nodes: Nodes, link: Option<(u64, f64)>) -> Group {
    let (plain, size) = (Tuning::default(), nodes.world());
    let tuning = link.map_or(plain, |(ms, b)| plain.for_link(size, Duration::from_millis(ms), b));
    Group { nodes: Some(Arc::new(nodes)), tuning, ..Group::plain(0, size) }
}

fn dealt(ranks: usize, nodes: usize) -> Nodes {
    Nodes::of(&(0..ranks).map(|rank| rank % nodes).collect::<Vec<usize>>())
}

#[test]
fn a_root_joins_sums_of_nodes_alone_as_long_as_it_receives_little() {
    let of = |group: &Group, bytes: usize| {
        choose(&Call::new(Kind::Reduce, DType::F32, bytes / 4), group, None).algorithm
    };
    let blocks = |ranks, of| Nodes::blocks(ranks, of).unwrap();
    // 7 inputs of its node and a partial result or two parts of one, but 23 messages and a step more. Then 31 of its node.
    let near = behind(blocks(16, 8), None);
    assert_eq!(of(&near, 64 << 10), Algorithm::HierarchicalExchange);
    assert_eq!(of(&near, 68 << 10), Algorithm::Hierarchical);
    let wide = behind(blocks(64, 32), None);
    assert_eq!(of(&wide, 48 << 10), Algorithm::HierarchicalExchange);
    assert_eq!(of(&wide, 60 << 10), Algorithm::Hierarchical);
    // As much as without nodes where the tree joins ranks of different ones first.
    let cyclic = behind(dealt(16, 2), Some((1, 62.5e6)));
    assert_eq!(of(&cyclic, 4 << 10), Algorithm::HierarchicalExchange);
    assert_eq!(of(&cyclic, 60 << 10), Algorithm::PairwiseReduceScatterGather);
    // 15 partial results, of which a link carries one byte in 160 ns.
    let many = |ranks| behind(blocks(16 * ranks, ranks), Some((4, 6.25e6)));
    assert_eq!(of(&many(2), 24 << 10), Algorithm::PairwiseReduceScatterGather);
    assert_eq!(of(&many(4), 24 << 10), Algorithm::Hierarchical);
    assert_eq!(of(&many(4), 1 << 10), Algorithm::HierarchicalExchange);
    // What it receives is in its memory at once, however fast that comes.
    let large = behind(blocks(1024, 8), Some((1, 1e12)));
    assert!(Algorithm::HierarchicalExchange.suits(64 << 10, 1024));
    assert_eq!(of(&large, 64 << 10), Algorithm::HierarchicalExchange);
    assert_eq!(of(&large, 68 << 10), Algorithm::Hierarchical);
}

#[test]
fn ranks_of_many_nodes_pass_few_bytes_on_without_nodes() {
    let of = |kind, group: &Group, bytes: usize| choose(&Call::new(kind, DType::U8, bytes), group, None);
    let blocks = |ranks, of| Nodes::blocks(ranks, of).unwrap();
    // A rank's own to 15 mates and 63 nodes, and what comes from those to 15 mates, instead of 10 messages.
    let many = behind(blocks(1024, 16), None);
    let doubled = |choice: Choice| match choice {
        Choice { algorithm: Algorithm::Bruck, why: Why::Messages(limit), .. } => limit,
        _ => 0,
    };
    let limits = [Kind::AllGather, Kind::AllReduce].map(|kind| doubled(of(kind, &many, 8)));
    // A sum takes twice the steps and almost twice the messages, and here to reduce all inputs.
    assert_eq!(limits, [752, 1020]);
    for (kind, limit) in [Kind::AllGather, Kind::AllReduce].into_iter().zip(limits) {
        assert_eq!(of(kind, &many, limit + 1).algorithm, Algorithm::Hierarchical, "{kind}");
    }
    // Few messages more are no step more, least of all where a step takes long.
    for group in [behind(blocks(64, 8), None), behind(blocks(1024, 16), Some((1, 62.5e6)))] {
        assert_eq!(doubled(of(Kind::AllGather, &group, 8)), 0);
    }
    let five = behind(blocks(15, 5), Some((1, 62.5e6)));
    assert_eq!(of(Kind::AllReduce, &five, 2 << 10).algorithm, Algorithm::HierarchicalExchange);
    let pairs = behind(blocks(32, 2), Some((1, 62.5e6)));
    assert_eq!(of(Kind::AllReduce, &pairs, 8).algorithm, Algorithm::ExchangeAll);
}

#[test]
fn what_is_said_of_a_choice_is_true() {
    let plain = Tuning::default();
    let far = |ranks| plain.for_link(ranks, Duration::from_micros(500), 1e9);
    let groups = (1..=9).chain([40, 256]).flat_map(|size| {
        let nodes = |block| Some(Arc::new(Nodes::blocks(size, block).unwrap()));
        let mut places = vec![(Some(0), None), (None, None), (Some(0), nodes(size))];
        // Nodes make a difference where there are several, of several ranks.
        places.extend([2, 4].into_iter().filter(|&block| block < size).map(|block| (None, nodes(block))));
        places.into_iter().flat_map(move |(direct, nodes)| {
            [(plain, false), (plain, true), (far(size), false)].map(|(tuning, one_memory)| {
                let nodes = nodes.clone();
                Group { direct, nodes, one_memory, tuning, ..Group::plain(0, size) }
            })
        })
    });
    for group in groups {
        for kind in Kind::ALL {
            let candidates = Algorithm::candidates(kind, &group);
            for dtype in [DType::U8, DType::Bf16, DType::F32] {
                let at = |bytes: usize| {
                    let call = Call::new(kind, dtype, bytes / dtype.size());
                    let choice = choose(&call, &group, None);
                    // Of one call some ranks may be in place, and others not.
                    let in_place = choose(&Call { in_place: true, ..call }, &group, None);
                    assert_eq!(choice, in_place, "{kind} of {bytes} bytes of {dtype}, {group:?}");
                    choice
                };
                for bytes in (0..40).step_by(2).map(|bits| (1usize << bits) / 4 * 4) {
                    let Choice { algorithm, why, .. } = at(bytes);
                    let what = format!("{kind} of {bytes} bytes of {dtype}, {group:?}: {algorithm}, {why:?}");
                    assert!(candidates.contains(&algorithm), "{what}");
                    assert_eq!(why == Why::Only, candidates.len() == 1, "{what}");
                    let (small, large) = match why {
                        Why::Latency(limit) | Why::Messages(limit) => (bytes, limit + dtype.size()),
                        Why::Bandwidth(limit) => (limit, bytes),
                        _ => continue,
                    };
                    // The limit is in reach, and the choice changes there.
                    assert!(small < large && large < 1 << 41, "{what}");
                    assert_ne!(at(small).algorithm, at(large).algorithm, "{what}");
                }
            }
        }
    }
}

/// Whatever may be copied at once, no more is than there is.
#[test]
fn rounds_are_no_larger_than_what_they_carry() {
    let tuning = Tuning::default();
    for (pieces, largest, budget, expected) in [
        (16, 1000, usize::MAX, (1024, 1)),
        (1, 0, 1 << 20, (64, 1)),
        (2, 1 << 20, 1 << 20, (1 << 19, 2)),
        (1, usize::MAX, usize::MAX, (1 << 60, 16)),
    ] {
        assert_eq!(tuning.cut(pieces, largest, budget), expected);
    }
}
