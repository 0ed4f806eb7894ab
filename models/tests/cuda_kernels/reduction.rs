//! Reductions in canonical order, bit for bit against those of `collectives`.

use crate::tools::*;
use collectives::device;
use collectives::{Buffer, Element, ReduceOp};

fn check<T: Element>() {
    for (ranks, n) in
        [(1, 9), (2, 300), (3, 65), (4, 7), (5, 40), (7, 33), (8, 200), (9, 17), (16, 5), (33, 70)]
    {
        let inputs: Vec<Buffer<T>> = (0..ranks)
            .map(|rank| {
                let data: Vec<T> = (0..n).map(|i| collectives::oracle::sample(rank, i)).collect();
                copy_of(&data)
            })
            .collect();
        let slices: Vec<&[T]> = inputs.iter().map(|b| b.host()).collect();
        let views: Vec<_> = inputs.iter().map(|b| b.view()).collect();
        let addresses: Vec<u64> = views.iter().map(|v| v.as_ptr() as u64).collect();
        let addresses = copy_of(&addresses);
        for op in ReduceOp::ALL {
            let want = collectives::oracle::reduce(op, &slices);
            let want_wide = collectives::oracle::reduce_wide(op, &slices);
            in_every_order(|stream| {
                let mut out = buffer::<T>(n);
                stream.run([device::reduce(op, &views, addresses.view(), out.view_mut())]);
                assert_eq!(
                    bytes(&out),
                    collectives::oracle::bytes(&want),
                    "{op} of {ranks} x {n} {}",
                    T::DTYPE
                );
                let mut wide = buffer::<T::Acc>(n);
                stream.run([device::reduce(op, &views, addresses.view(), wide.view_mut())]);
                assert_eq!(
                    bytes(&wide),
                    collectives::oracle::bytes(&want_wide),
                    "{op} of {ranks} x {n} wide"
                );
                vec![bytes(&out), bytes(&wide)]
            });
        }
    }
}

#[test]
fn reductions_have_the_bits_of_the_collectives() {
    collectives::for_every_type!(check);
}
