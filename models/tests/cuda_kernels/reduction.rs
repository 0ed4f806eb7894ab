//! Reductions in canonical order, bit for bit against those of `collectives`.

use crate::tools::*;
use collectives::device;
use collectives::{Buffer, Element, ReduceOp, bf16, f16};

fn check<T: Element>(make: impl Fn(u64) -> T) {
    for (ranks, n) in
        [(1, 9), (2, 300), (3, 65), (4, 7), (5, 40), (7, 33), (8, 200), (9, 17), (16, 5), (33, 70)]
    {
        let inputs: Vec<Buffer<T>> = (0..ranks)
            .map(|rank| {
                let data: Vec<T> = (0..n).map(|i| make((rank * 7919 + i * 104_729 + 1) as u64)).collect();
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
    let noise = |x: u64| x.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 11;
    let unit = |x: u64| noise(x) as f64 / (1u64 << 53) as f64 * 4.0 - 2.0;
    check::<f32>(|x| unit(x) as f32);
    check::<f64>(unit);
    check::<f16>(|x| f16::from_f64(unit(x)));
    check::<bf16>(|x| bf16::from_f64(unit(x)));
    check::<i32>(|x| noise(x) as i32);
    check::<u32>(|x| noise(x) as u32);
    check::<i64>(|x| noise(x).wrapping_mul(x) as i64);
    check::<u64>(|x| noise(x).wrapping_mul(x));
    check::<i8>(|x| noise(x) as i8);
    check::<u8>(|x| noise(x) as u8);
}
