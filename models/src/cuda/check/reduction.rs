//! Reductions in canonical order, bit for bit against those of `collectives`.

use super::bed::*;
use collectives::device::{self, Queue};
use collectives::{Buffer, Element, ReduceOp, bf16, f16};

fn check<T: Element, Q: Queue>(bed: &Bed<Q>) {
    for (ranks, n) in
        [(1, 9), (2, 300), (3, 65), (4, 7), (5, 40), (7, 33), (8, 200), (9, 17), (16, 5), (33, 70)]
    {
        let inputs: Vec<Buffer<T>> = (0..ranks)
            .map(|rank| {
                let data: Vec<T> = (0..n).map(|i| collectives::oracle::sample(rank, i)).collect();
                bed.copy_of(&data)
            })
            .collect();
        let slices: Vec<&[T]> = inputs.iter().map(|b| b.host()).collect();
        let views: Vec<_> = inputs.iter().map(|b| b.view()).collect();
        let addresses: Vec<u64> = views.iter().map(|v| v.as_ptr() as u64).collect();
        let addresses = bed.copy_of(&addresses);
        for op in ReduceOp::ALL {
            let want = collectives::oracle::reduce(op, &slices);
            let want_wide = collectives::oracle::reduce_wide(op, &slices);
            let name = format!("{op} of {ranks} x {n} {}", T::DTYPE);
            bed.in_every_order(&name, &mut |stream| {
                let mut out = bed.buffer::<T>(n);
                stream.run([device::reduce(op, &views, addresses.view(), out.view_mut())]);
                let same = bytes(&out) == collectives::bytes_of(&want);
                bed.that(same, || format!("{name}: not the bits of the processor"));
                let mut wide = bed.buffer::<T::Acc>(n);
                stream.run([device::reduce(op, &views, addresses.view(), wide.view_mut())]);
                let same = bytes(&wide) == collectives::bytes_of(&want_wide);
                bed.that(same, || format!("{name}: not the bits of the processor, unrounded"));
                vec![bytes(&out), bytes(&wide)]
            });
        }
    }
}

pub fn reductions_have_the_bits_of_the_processor<Q: Queue>(bed: &Bed<Q>) {
    macro_rules! each {
        ($($t:ty)*) => { $(check::<$t, Q>(bed);)* };
    }
    each!(f32 f64 f16 bf16 i32 u32 i64 u64 i8 u8);
}
