//! Reductions in canonical order, bit for bit against those of `collectives`.

use super::bed::*;
use collectives::device::{self, Queue};
use collectives::{Buffer, Element, ReduceOp, bf16, f16, oracle};

fn check<T: Element, Q: Queue>(bed: &Bed<Q>) {
    for (ranks, n) in
        [(1, 9), (2, 300), (3, 65), (4, 7), (5, 40), (7, 33), (8, 200), (9, 17), (16, 5), (33, 70)]
    {
        compare::<T, Q>(bed, &ReduceOp::ALL, (ranks, n), oracle::sample);
    }
    // In as many of two ranks as there are pairs.
    for (ranks, n) in [(2, 410), (3, 1), (4, 33), (5, 2), (8, 35)] {
        compare::<T, Q>(bed, &ReduceOp::ALL, (ranks, n), oracle::edge);
    }
    if size_of::<T>() == 1 {
        for ranks in [128, 200, 255, 256, 300] {
            compare::<T, Q>(bed, &[ReduceOp::Average], (ranks, 35), |rank, i| oracle::edge(rank, i + rank));
        }
    }
}

fn compare<T: Element, Q: Queue>(
    bed: &Bed<Q>,
    ops: &[ReduceOp],
    (ranks, n): (usize, usize),
    given: fn(usize, usize) -> T,
) {
    let input = |rank| bed.copy_of(&(0..n).map(|i| given(rank, i)).collect::<Vec<T>>());
    let inputs: Vec<Buffer<T>> = (0..ranks).map(input).collect();
    let slices: Vec<&[T]> = inputs.iter().map(|b| b.host()).collect();
    let views: Vec<_> = inputs.iter().map(|b| b.view()).collect();
    let addresses: Vec<u64> = views.iter().map(|v| v.as_ptr() as u64).collect();
    let addresses = bed.copy_of(&addresses);
    for &op in ops {
        let want = oracle::reduce(op, &slices);
        let want_wide = oracle::reduce_wide(op, &slices);
        let name = format!("{op} of {ranks} x {n} {}", T::DTYPE);
        bed.in_every_order(&name, &mut |stream| {
            let mut out = bed.buffer::<T>(n);
            stream.run([device::reduce(op, &views, addresses.view(), out.view_mut())]);
            let same = oracle::alike(out.host(), &want);
            bed.that(same, || format!("{name}: not the bits of the processor"));
            let mut wide = bed.buffer::<T::Acc>(n);
            stream.run([device::reduce(op, &views, addresses.view(), wide.view_mut())]);
            let same = oracle::alike(wide.host(), &want_wide);
            bed.that(same, || format!("{name}: not the bits of the processor, unrounded"));
            vec![bytes(&out), bytes(&wide)]
        });
    }
}

pub fn reductions_have_the_bits_of_the_processor<Q: Queue>(bed: &Bed<Q>) {
    macro_rules! each {
        ($($t:ty)*) => { $(check::<$t, Q>(bed);)* };
    }
    each!(f32 f64 f16 bf16 i32 u32 i64 u64 i8 u8);
}
