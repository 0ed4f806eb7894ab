//! What programs must hold to, for many calls and group sizes.

use super::*;
use crate::element::DType;
use crate::schedule::Space;

fn every_call(count: usize, size: usize) -> Vec<Call> {
    let mut calls = Vec::new();
    for kind in Kind::ALL {
        for in_place in [false, true] {
            for root in [0, size - 1] {
                let messages = matches!(kind, Kind::Send | Kind::Recv | Kind::Barrier);
                if !messages {
                    calls.push(Call { in_place, root, ..Call::new(kind, DType::Bf16, count) });
                }
            }
        }
    }
    calls.push(Call { wide: true, ..Call::new(Kind::ReduceScatter, DType::Bf16, count) });
    calls
}

/// What every rank sends another is what that one expects, in the same order and in exchanges of the same number.
#[test]
fn both_sides_of_every_message_agree() {
    for size in 2..6 {
        for count in [0, 1, 100, 1000, 40_000] {
            for call in every_call(count, size) {
                let limit = least_scratch(size) + 3000;
                let programs: Vec<Program> =
                    (0..size).map(|rank| Program::new(&call, rank, size, Order::Canonical, limit)).collect();
                let between = |from: usize, to: usize| {
                    let side = |rank: usize, peer: usize, outgoing: bool| {
                        let mut lengths = Vec::new();
                        for step in &programs[rank].steps {
                            let Step::Exchange(range, _) = step else { continue };
                            let of = programs[rank].messages[range.clone()].iter();
                            let of = of.filter(|m| m.peer == peer && m.outgoing == outgoing);
                            lengths.extend(of.map(|m| m.span.bytes));
                        }
                        lengths
                    };
                    (side(from, to, true), side(to, from, false))
                };
                for from in 0..size {
                    for to in (0..size).filter(|&to| to != from) {
                        let (sent, expected) = between(from, to);
                        assert_eq!(sent, expected, "{call} of {size}, from {from} to {to}");
                    }
                }
                assert!(programs.iter().all(|p| p.scratch <= limit && p.lane == programs[0].lane));
            }
        }
    }
}

/// Within one exchange nothing that is received overlaps anything else, and scratch is as large as is said.
#[test]
fn exchanges_touch_disjoint_memory() {
    for size in 2..6 {
        for count in [1, 100, 1000, 40_000] {
            for call in every_call(count, size) {
                for rank in 0..size {
                    let program = Program::new(&call, rank, size, Order::Canonical, 20_000);
                    for step in &program.steps {
                        let Step::Exchange(range, _) = step else { continue };
                        let messages = &program.messages[range.clone()];
                        for (i, a) in messages.iter().enumerate() {
                            if a.span.space == Space::Scratch {
                                assert!(a.span.offset + a.span.bytes <= program.scratch);
                            }
                            for (j, b) in messages.iter().enumerate() {
                                // In place, input and output are one.
                                let space = |s: Space| {
                                    if call.in_place && s == Space::Send { Space::Recv } else { s }
                                };
                                let same = space(a.span.space) == space(b.span.space);
                                let apart = a.span.offset + a.span.bytes <= b.span.offset
                                    || b.span.offset + b.span.bytes <= a.span.offset;
                                let reads = a.outgoing && b.outgoing;
                                assert!(i == j || !same || apart || reads, "{call} on {rank} of {size}");
                            }
                        }
                    }
                }
            }
        }
    }
}

/// What arrives while a piece is summed touches neither the piece nor its result, and only once the other half's sum
/// is made does anything arrive there again.
#[test]
fn pieces_arrive_beside_the_sum_of_the_last_one() {
    for (kind, size) in [(Kind::ReduceScatter, 2), (Kind::ReduceScatter, 3), (Kind::AllReduce, 4)] {
        let call = Call { in_place: true, ..Call::new(kind, DType::Bf16, 4_000_000) };
        let program = Program::new(&call, 1, size, Order::Canonical, 64 << 20);
        let mut summed: Option<(usize, Vec<Span>, Span)> = None;
        let mut sums = 0;
        for step in &program.steps {
            match step {
                Step::Exchange(range, half) => {
                    let Some((last, inputs, out)) = &summed else { continue };
                    if half.is_none() {
                        continue;
                    }
                    assert_ne!(half, &Some(*last), "{call}: the half that is being summed");
                    for message in &program.messages[range.clone()] {
                        for busy in inputs.iter().chain([out]) {
                            let same = message.span.space == busy.space;
                            let apart = message.span.offset + message.span.bytes <= busy.offset
                                || busy.offset + busy.bytes <= message.span.offset;
                            assert!(!same || apart, "{call}: {message:?} and {busy:?}");
                        }
                    }
                }
                Step::Reduce { half, inputs, out, .. } => {
                    sums += 1;
                    summed = Some((*half, program.inputs[inputs.clone()].to_vec(), *out));
                }
                _ => {}
            }
        }
        assert!(sums >= 4, "{call}: {sums} pieces");
    }
    // What is short goes at once.
    let call = Call::new(Kind::ReduceScatter, DType::F32, 1000);
    let steps = Program::new(&call, 0, 4, Order::Canonical, 64 << 20).steps;
    assert_eq!(steps.iter().filter(|step| matches!(step, Step::Reduce { .. })).count(), 1);
}

#[test]
fn the_volume_is_the_least_possible() {
    for size in 2..6 {
        for kind in [Kind::ReduceScatter, Kind::AllReduce, Kind::AllToAll] {
            let call = Call::new(kind, DType::F32, 100_000);
            for rank in 0..size {
                let program = Program::new(&call, rank, size, Order::Canonical, 1 << 20);
                let sent = program.messages.iter().filter(|m| m.outgoing).map(|m| m.span.bytes);
                assert_eq!(sent.sum::<usize>(), call.volume(rank, size), "{call} on {rank} of {size}");
            }
        }
    }
}

#[test]
fn the_wire_sums_only_if_asked_to_and_gathers_always() {
    let steps = |kind, order| Program::new(&Call::new(kind, DType::F32, 8), 0, 2, order, 4096).steps;
    assert_eq!(steps(Kind::AllGather, Order::Canonical), [Step::Native]);
    assert_eq!(steps(Kind::AllReduce, Order::Native), [Step::Native]);
    assert!(!steps(Kind::AllReduce, Order::Canonical).contains(&Step::Native));
    assert!(!steps(Kind::AllToAll, Order::Native).contains(&Step::Native));
}
