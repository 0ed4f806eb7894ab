//! The exactly summable data, and what each operation makes of it, against naive sums.

use super::*;

/// Combines in the type itself, in the given order, rounding after each step.
fn fold<T: Exact>(op: ReduceOp, values: &[T]) -> T {
    let float = T::PRECISION > 0;
    let mut acc = values[0];
    for &x in &values[1..] {
        acc = match op {
            ReduceOp::Sum | ReduceOp::Average if float => T::from_number(acc.number() + x.number()),
            ReduceOp::Product if float => T::from_number(acc.number() * x.number()),
            ReduceOp::Sum | ReduceOp::Average => T::from_bits(acc.bits().wrapping_add(x.bits())),
            ReduceOp::Product => T::from_bits(acc.bits().wrapping_mul(x.bits())),
            ReduceOp::Min => {
                if below(x, acc) {
                    x
                } else {
                    acc
                }
            }
            ReduceOp::Max => {
                if below(acc, x) {
                    x
                } else {
                    acc
                }
            }
        };
    }
    acc
}

fn exact_in_any_order<T: Exact>() {
    for ranks in [1, 2, 3, 4, 5, 8, 16, 100, 300] {
        for op in ReduceOp::ALL {
            let data = Data { seed: 7, ranks, op: Some(op), foreign: false };
            let mut distinct = std::collections::HashSet::new();
            for index in 0..200 {
                let values: Vec<T> = (0..ranks).map(|r| data.contribution(index, r)).collect();
                let expected = data.reduced::<T>(index);
                distinct.insert(expected.bits());
                let reversed: Vec<T> = values.iter().rev().copied().collect();
                let middle: Vec<T> =
                    values[ranks / 2..].iter().chain(&values[..ranks / 2]).copied().collect();
                for order in [&values, &reversed, &middle] {
                    let mut got = fold(op, order);
                    if op == ReduceOp::Average {
                        got = average(got.number(), ranks);
                    }
                    assert_eq!(got.bits(), expected.bits(), "{} {op} {ranks} ranks, {index}", T::DTYPE);
                }
                assert!(expected.number().is_finite());
            }
            // The mean of a hundred bytes that do not overflow together is next to nothing, the largest of
            // three hundred is next to 127.
            let least = if T::PRECISION == 0 && ranks > 16 { 0 } else { 2 };
            assert!(distinct.len() > least, "{} {op} {ranks}: {} values", T::DTYPE, distinct.len());
        }
    }
}

#[test]
fn reductions_are_exact_in_every_type_and_any_order() {
    exact_in_any_order::<f32>();
    exact_in_any_order::<f64>();
    exact_in_any_order::<f16>();
    exact_in_any_order::<bf16>();
    exact_in_any_order::<i8>();
    exact_in_any_order::<u8>();
    exact_in_any_order::<i32>();
    exact_in_any_order::<u32>();
    exact_in_any_order::<i64>();
    exact_in_any_order::<u64>();
}

/// As NCCL averages floats: each contribution times the rounded 1/ranks, rounded, and then added up one by one.
fn multiplied_first<T: Exact>(data: &Data, index: usize) -> T {
    let inverse = T::from_number(1.0 / data.ranks as f64).number();
    let each = (0..data.ranks)
        .map(|rank| T::from_number(data.contribution::<T>(index, rank).number() * inverse))
        .collect::<Vec<_>>();
    fold(ReduceOp::Sum, &each)
}

/// Over which numbers of ranks averages cannot be checked; all others' are right, and are not all alike.
fn averages_multiplied_first<T: Exact>(ranks: &[usize]) -> Vec<usize> {
    let mut impossible = Vec::new();
    for &ranks in ranks {
        let data = Data { seed: 3, ranks, op: Some(ReduceOp::Average), foreign: true };
        if data.obstacle::<T>().is_some() {
            impossible.push(ranks);
            continue;
        }
        let mut distinct = std::collections::HashSet::new();
        for index in 0..300 {
            let (found, expected) = (multiplied_first::<T>(&data, index), data.reduced::<T>(index));
            assert_eq!(found.bits(), expected.bits(), "{} over {ranks} ranks, {index}", T::DTYPE);
            distinct.insert(expected.bits());
        }
        assert!(distinct.len() > 3, "{} over {ranks} ranks: {distinct:?}", T::DTYPE);
    }
    impossible
}

#[test]
fn an_average_is_exact_even_when_multiplied_by_a_rounded_reciprocal_first() {
    let ranks: Vec<usize> = (1..=128).collect();
    let none: [usize; 0] = [];
    // Whichever number of 8 bits is multiplied by 95, and then by 1/95 as bf16 has it, comes back as another.
    assert_eq!(averages_multiplied_first::<bf16>(&ranks), [95, 99, 109, 115, 121, 122]);
    assert_eq!(averages_multiplied_first::<bf16>(&[256, 257, 1000]), [257, 1000]);
    assert_eq!(averages_multiplied_first::<f16>(&ranks), none);
    // A float times 41 times 1/41 is not the float, for most.
    assert_eq!(averages_multiplied_first::<f32>(&ranks), none);
    assert_eq!(averages_multiplied_first::<f64>(&ranks), none);
    let data = Data { seed: 3, ranks: 95, op: Some(ReduceOp::Average), foreign: true };
    let why = data.obstacle::<bf16>().unwrap();
    assert!(why.contains("over 95 ranks every bf16 rounds") && why.contains("-c 0"), "{why}");
    assert_eq!(Data { foreign: false, ..data }.obstacle::<bf16>(), None);
    assert_eq!(Data { op: Some(ReduceOp::Sum), ..data }.obstacle::<bf16>(), None);
}

#[test]
fn every_rank_and_most_elements_count() {
    // Leaving one rank out, or taking one twice, must show in most elements.
    for (ranks, foreign) in [2, 4, 7].into_iter().flat_map(|ranks| [(ranks, false), (ranks, true)]) {
        for op in [ReduceOp::Sum, ReduceOp::Average, ReduceOp::Product] {
            let data = Data { seed: 1, ranks, op: Some(op), foreign };
            for left_out in 0..ranks {
                let differ = (0..1000).filter(|&i| {
                    let values: Vec<bf16> =
                        (0..ranks).filter(|&r| r != left_out).map(|r| data.contribution(i, r)).collect();
                    let mut got = fold(op, &values);
                    if op == ReduceOp::Average {
                        got = average(got.number(), ranks);
                    }
                    got.bits() != data.reduced::<bf16>(i).bits()
                });
                assert!(differ.count() > 600, "{op} over {ranks} without {left_out}");
            }
        }
    }
}

#[test]
fn a_single_wrong_bit_is_counted() {
    let data = Data { seed: 5, ranks: 3, op: Some(ReduceOp::Sum), foreign: false };
    let len = TILE + 1000;
    let counts = Counts { send: 3 * len, receive: len, count: len };
    let expectation = Expectation::<f32>::new(Operation::ReduceScatter, &data, 2, 0, counts);
    let mut received: Vec<f32> = (2 * len..3 * len).map(|i| data.reduced(i)).collect();
    assert_eq!(expectation.wrong(&received), 0);
    received[TILE + 1] = f32::from_bits(received[TILE + 1].to_bits() ^ 1);
    received[0] = f32::NAN;
    assert_eq!(expectation.wrong(&received), 2);
    received.rotate_left(64);
    assert!(expectation.wrong(&received) as usize > len * 9 / 10, "a shifted result passes for right");
}

#[test]
fn parts_that_change_places_are_seen_also_if_they_are_of_whole_tiles() {
    let data = Data { seed: 5, ranks: 4, op: Some(ReduceOp::Sum), foreign: false };
    for part in [TILE, 2 * TILE, 3 * TILE, 1 << 16, 1 << 10] {
        let len = 4 * part;
        let counts = Counts { send: len, receive: len, count: len };
        let expectation = |operation| Expectation::<i32>::new(operation, &data, 1, 2, counts);
        for operation in [Operation::AllReduce, Operation::Broadcast] {
            let mut received: Vec<i32> = match operation {
                Operation::AllReduce => (0..len).map(|i| data.reduced(i)).collect(),
                _ => (0..len).map(|i| data.contribution(i, 2)).collect(),
            };
            assert_eq!(expectation(operation).wrong(&received), 0, "{operation:?} of parts of {part}");
            let (first, last) = received.split_at_mut(3 * part);
            first[..part].swap_with_slice(last);
            let wrong = expectation(operation).wrong(&received) as usize;
            assert!(wrong > 2 * part * 9 / 10, "{operation:?} of parts of {part}: {wrong}");
        }
        // What is filled in is the same sequence, from its start on.
        let mut filled = vec![0; len];
        expectation(Operation::AllReduce).fill(&mut filled);
        assert!(filled.iter().enumerate().all(|(i, &x)| x == data.contribution::<i32>(i, 1)), "{part}");
    }
}

#[test]
fn no_two_parts_of_usual_sizes_are_alike() {
    let sizes = (0..28).map(|log| 1 << log).chain((1..9).map(|tiles| tiles * TILE));
    for part in sizes.clone().chain((0..28).map(|log| 3 << log)) {
        let few = 64.min(part);
        for (a, b) in (0..64).flat_map(|a| (0..a).map(move |b| (b, a))) {
            let alike = |&i: &usize| place(a * part + i * (part / few)) == place(b * part + i * (part / few));
            assert!((0..few).filter(alike).count() <= few / 4, "{a} and {b} of {part}");
        }
    }
}

#[test]
fn each_operation_expects_its_own_layout() {
    let data = Data { seed: 9, ranks: 3, op: None, foreign: false };
    let part = 12;
    let given: Vec<Vec<i32>> =
        (0..3).map(|r| (0..3 * part).map(|i| data.contribution(i, r)).collect()).collect();
    let rank = 1;
    let root = 2;
    let at = |operation: Operation, rank| {
        let giver = if operation == Operation::SendRecv { 0 } else { root };
        Expectation::<i32>::new(operation, &data, rank, giver, operation.counts(4 * 3 * part, 4, 3))
    };
    let of = |operation| at(operation, rank);
    let gathered: Vec<i32> = given.iter().flat_map(|g| g[..part].to_vec()).collect();
    let exchanged: Vec<i32> = given.iter().flat_map(|g| g[rank * part..(rank + 1) * part].to_vec()).collect();
    for (operation, right) in [
        (Operation::AllGather, gathered.clone()),
        (Operation::AllToAll, exchanged),
        (Operation::Broadcast, given[root].clone()),
        (Operation::Scatter, given[root][part..2 * part].to_vec()),
        (Operation::SendRecv, given[0].clone()),
    ] {
        assert_eq!(of(operation).wrong(&right), 0, "{operation:?}");
        let zeros = vec![0; right.len()];
        assert_eq!(of(operation).wrong(&zeros) as usize, right.len(), "{operation:?}");
    }
    // Gather's result is undefined but on the root.
    assert_eq!(of(Operation::Gather).wrong(&gathered[..0]), 0);
    let at_root = at(Operation::Gather, root);
    assert_eq!((at_root.wrong(&gathered), at_root.wrong(&[0; 36])), (0, 36));
    let mut send = vec![0; part];
    of(Operation::AllGather).fill(&mut send);
    assert_eq!(send, given[rank][..part]);
}

#[test]
fn only_what_is_compared_is_made() {
    // Of 4096 elements over 128 ranks each compares with 32 at once, where it has parts.
    let bytes = |operation: Operation| footprint(operation, operation.counts(4 * 4096, 4, 128), 4) / 4;
    for (operation, own, compared) in [
        (Operation::AllReduce, 4096, 4096),
        (Operation::ReduceScatter, 4096, 32),
        (Operation::AllToAll, 4096, 32),
        (Operation::Scatter, 4096, 32),
        (Operation::AllGather, 32, 32),
        (Operation::Gather, 32, 32),
    ] {
        assert_eq!(bytes(operation), own + compared, "{operation:?}");
    }
    // A call that gets few elements asks for those alone, and not for those of another repetition.
    let data = Data { seed: 5, ranks: 3, op: Some(ReduceOp::Sum), foreign: false };
    let counts = Counts { send: 3 * TILE, receive: 8, count: 8 };
    let at = |rank| Expectation::<u64>::new(Operation::ReduceScatter, &data, rank, 0, counts);
    let received = |start: usize| (start..start + 8).map(|i| data.reduced(i)).collect::<Vec<u64>>();
    assert_eq!((at(2).wrong(&received(16)), at(2).wrong(&received(16 + TILE))), (0, 8));
    assert_eq!(at(2).wrong(&received(15)), 8);
}

#[test]
fn modest_integers_stay_within_their_type() {
    fn check<T: Exact>() {
        for (ranks, op) in
            [2, 3, 5, 40].into_iter().flat_map(|n| [(n, ReduceOp::Sum), (n, ReduceOp::Product)])
        {
            let data = Data { seed: 11, ranks, op: Some(op), foreign: true };
            for index in 0..200 {
                let each = (0..ranks).map(|rank| data.contribution::<T>(index, rank).number());
                let (least, most) = match (T::SIGNED, 8 * size_of::<T>().min(6) as i32) {
                    (true, bits) => (-(2f64.powi(bits - 1)), 2f64.powi(bits - 1) - 1.0),
                    (false, bits) => (0.0, 2f64.powi(bits) - 1.0),
                };
                let all = match op {
                    ReduceOp::Sum => each.clone().map(f64::abs).sum::<f64>(),
                    _ => each.clone().map(f64::abs).product(),
                };
                assert!(all <= most && each.clone().all(|x| x >= least), "{op:?} {ranks} {all}");
                let exact: f64 = if op == ReduceOp::Sum { each.sum() } else { each.product() };
                assert_eq!(data.reduced::<T>(index).number(), exact);
            }
        }
    }
    check::<i8>();
    check::<u8>();
    check::<i32>();
    check::<u32>();
    check::<i64>();
    check::<u64>();
}
