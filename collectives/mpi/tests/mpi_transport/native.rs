//! MPI's own collectives.

use collectives::schedule::{Call, Kind};
use collectives::transport::Transport;
use collectives::{Buffer, DType, ReduceOp, bf16};
use collectives_mpi::{Family, MpiTransport, family};
use harness::Counting;

/// Exactly summable data, so that MPI's order of summation does not matter.
pub fn collectives(t: &MpiTransport) {
    let (rank, n) = (t.rank(), t.size());
    let native = t.native().unwrap();
    let count = 1000;
    let whole: Vec<f32> = (0..n * count).map(|i| (i % 97 + rank) as f32).collect();
    let sum: Vec<f32> = (0..n * count).map(|i| (0..n).map(|r| (i % 97 + r) as f32).sum()).collect();
    let own = rank * count..(rank + 1) * count;
    let gathered: Vec<f32> = (0..n * count).map(|i| (i % 97 + i / count) as f32).collect();
    let shard: Vec<f32> = gathered[own.clone()].to_vec();
    let call = |kind, count| Call::new(kind, DType::F32, count);
    let rooted = |kind, count| Call { root: n - 1, ..call(kind, count) };

    let mut out = vec![0.0; count];
    native.run(call(Kind::ReduceScatter, count), &whole, &mut out).unwrap();
    assert_eq!(out, sum[own.clone()]);
    let mut data = whole.clone();
    native.run_in_place(call(Kind::ReduceScatter, count), &mut data).unwrap();
    assert_eq!(data[..count], sum[own.clone()]);
    let mut all = vec![0.0; n * count];
    native.run(call(Kind::AllGather, count), &shard, &mut all).unwrap();
    assert_eq!(all, gathered);
    let mut data = vec![0.0; n * count];
    data[own.clone()].copy_from_slice(&shard);
    native.run_in_place(call(Kind::AllGather, count), &mut data).unwrap();
    assert_eq!(data, gathered);
    let mut out = vec![0.0; n * count];
    native.run(call(Kind::AllReduce, n * count), &whole, &mut out).unwrap();
    assert_eq!(out, sum);
    let mut data = whole.clone();
    native.run_in_place(call(Kind::AllReduce, n * count), &mut data).unwrap();
    assert_eq!(data, sum);
    let max = Call { op: ReduceOp::Max, ..call(Kind::AllReduce, count) };
    native.run(max, &whole[..count], &mut out[..count]).unwrap();
    assert_eq!(out[..count], (0..count).map(|i| (i % 97 + n - 1) as f32).collect::<Vec<_>>());
    let mut data = if rank == n - 1 { sum.clone() } else { vec![0.0; n * count] };
    native.run_in_place(rooted(Kind::Broadcast, n * count), &mut data).unwrap();
    assert_eq!(data, sum);
    let mut out = vec![0.0; if rank == n - 1 { count } else { 0 }];
    native.run(rooted(Kind::Reduce, count), &whole[..count], &mut out).unwrap();
    assert!(rank < n - 1 || out == sum[..count]);
    let mut out = vec![0.0; if rank == n - 1 { n * count } else { 0 }];
    native.run(rooted(Kind::Gather, count), &shard, &mut out).unwrap();
    assert!(rank < n - 1 || out == gathered);
    let mut out = vec![0.0; count];
    let empty: &[f32] = &[];
    native
        .run(rooted(Kind::Scatter, count), if rank == n - 1 { &gathered } else { empty }, &mut out)
        .unwrap();
    assert_eq!(out, shard);
    let mut out = vec![0.0; n * count];
    native.run(call(Kind::AllToAll, count), &whole, &mut out).unwrap();
    let expected: Vec<f32> =
        (0..n * count).map(|i| ((rank * count + i % count) % 97 + i / count) as f32).collect();
    assert_eq!(out, expected);
    native.run::<f32>(call(Kind::Barrier, 0), &[], &mut []).unwrap();

    // Nothing that takes memory is between a caller and MPI, whose shortest calls take a microsecond.
    let mut data = whole.clone();
    let before = Counting::here();
    native.run(call(Kind::AllGather, count), &shard, &mut all).unwrap();
    native.run_in_place(call(Kind::ReduceScatter, count), &mut data).unwrap();
    native.run(call(Kind::AllToAll, count), &whole, &mut all).unwrap();
    assert_eq!(Counting::here(), before, "allocations in three of MPI's own collectives");

    let started = native
        .start(call(Kind::ReduceScatter, count), Buffer::copy_of(&whole), Buffer::<f32>::zeroed(count))
        .unwrap();
    let (_, out) = started.wait().unwrap();
    assert_eq!(out.host(), &sum[own]);
    // One that nobody waits for runs to its end and frees its memory then.
    let dropped =
        native.start(call(Kind::AllReduce, count), Buffer::copy_of(&whole[..count]), Buffer::zeroed(count));
    drop(dropped.unwrap());

    // 16-bit floats can be moved but not added.
    let half = vec![bf16::from_f32(rank as f32); count];
    let mut halves = vec![bf16::ZERO; n * count];
    native.run(Call::new(Kind::AllGather, DType::Bf16, count), &half, &mut halves).unwrap();
    assert!((0..n * count).all(|i| halves[i].to_f32() == (i / count) as f32));
    let one = &[0.0f32; 1];
    let refused = [
        (native.run(Call::new(Kind::AllReduce, DType::Bf16, count), &half, &mut halves), "bf16"),
        (
            native.run(Call { op: ReduceOp::Average, ..call(Kind::AllReduce, 1) }, one, &mut [0.0]),
            "no average",
        ),
        (native.run(call(Kind::AllGather, 1 << 40), one, &mut [0.0]), "take up to 2147483647"),
        (native.run(call(Kind::AllGather, 10), &[0.0f32; 9], &mut [0.0; 99]), "9 elements in"),
        (native.run(Call { root: n, ..call(Kind::Reduce, 1) }, one, &mut [0.0]), "root"),
        (native.run(call(Kind::Send, 1), one, &mut [0.0]), "not a collective of MPI"),
    ];
    // What would be refused can be asked before anything is there for it.
    let unasked = native.check(&call(Kind::AllReduce, 1 << 31)).expect_err("too many").to_string();
    assert!(
        unasked.contains("2147483648 elements") && unasked.contains("take up to 2147483647"),
        "{unasked}"
    );
    native.check(&call(Kind::AllReduce, (1 << 31) - 1)).unwrap();
    // MPI multiplies what each has by the ranks, and Open MPI not only in a reduce_scatter.
    let most = ((1 << 31) - 1) / n;
    for kind in [Kind::ReduceScatter, Kind::AllGather, Kind::AllToAll, Kind::Gather, Kind::Scatter] {
        let multiplied = kind == Kind::ReduceScatter || family() == Family::OpenMpi;
        native.check(&call(kind, most)).unwrap();
        assert_eq!(native.check(&call(kind, most + 1)).is_err(), n == 1 || multiplied, "{kind:?}");
    }
    // Nothing, which lies at the address that MPI_IN_PLACE has.
    let nothing = |kind| Call::new(kind, DType::U8, 0);
    for kind in [Kind::ReduceScatter, Kind::AllReduce, Kind::AllGather, Kind::AllToAll] {
        native.run::<u8>(nothing(kind), &[], &mut []).unwrap();
    }
    for (result, words) in refused {
        let text = result.expect_err(words).to_string();
        assert!(text.contains(words), "{text}");
    }
}
