//! Products of matrices against their definition: what the library of products is asked for, in every orientation.

use super::bed::*;
use collectives::device::{MatmulPrecision, Product, Queue};
use collectives::{Buffer, Float, bf16, f16};

/// The definition in f64.
fn product<T: Float>([m, k, n]: [usize; 3], left: (&Buffer<T>, bool), right: (&Buffer<T>, bool)) -> Vec<f64> {
    let (a, b) = (wide(left.0), wide(right.0));
    let left = |row: usize, i: usize| if left.1 { a[i * m + row] } else { a[row * k + i] };
    let right = |i: usize, column: usize| if right.1 { b[column * k + i] } else { b[i * n + column] };
    let element = |at: usize| (0..k).map(|i| left(at / n, i) * right(i, at % n)).sum();
    (0..m * n).map(element).collect()
}

fn check<T: Float, O: Float, Q: Queue>(bed: &Bed<Q>, sizes: [usize; 3]) {
    let [m, k, n] = sizes;
    let (left, right) = (bed.random::<T>(1, m * k, 1.0), bed.random::<T>(2, k * n, 1.0));
    let other = bed.random::<O>(3, m * n, 1.0);
    for (from_left, from_right) in [(false, true), (true, false), (false, false), (true, true)] {
        let name = format!("product {m} x {k} x {n}, transposed {from_left} {from_right}, into {}", O::DTYPE);
        let want = product(sizes, (&left, from_left), (&right, from_right));
        let plus: Vec<f64> = want.iter().zip(wide(&other)).map(|(a, b)| a + b).collect();
        bed.in_every_order(&name, &mut |stream| {
            let (mut out, mut sum) = (bed.unwritten::<O>(m * n), bed.unwritten::<O>(m * n));
            let mut onto = bed.random::<O>(3, m * n, 1.0);
            let operands = ((left.view(), from_left), (right.view(), from_right));
            stream.multiply(&Product::new(sizes, operands.0, operands.1, out.view_mut()));
            stream.multiply(&Product::new(sizes, operands.0, operands.1, sum.view_mut()).plus(other.view()));
            stream.multiply(&Product::new(sizes, operands.0, operands.1, onto.view_mut()).plus_old());
            bed.close(&name, &out, &want);
            bed.close(&format!("{name}, added to another"), &sum, &plus);
            bed.close(&format!("{name}, added to itself"), &onto, &plus);
            vec![bytes(&out), bytes(&sum), bytes(&onto)]
        });
    }
}

/// Products of f32 that may lose bits of their inputs, as far as 11 are left.
fn check_high<Q: Queue>(bed: &Bed<Q>, sizes: [usize; 3]) {
    let [m, k, n] = sizes;
    let (left, right) = (bed.random::<f32>(1, m * k, 1.0), bed.random::<f32>(2, k * n, 1.0));
    let name = format!("product {m} x {k} x {n} of high precision");
    let want = product(sizes, (&left, false), (&right, true));
    bed.in_every_order(&name, &mut |stream| {
        let mut out = bed.unwritten::<f32>(m * n);
        let product = Product::new(sizes, (left.view(), false), (right.view(), true), out.view_mut());
        stream.multiply(&product.precise_to(MatmulPrecision::High));
        bed.within(&name, &out, &want, (k as f64).sqrt(), 1e-3);
        vec![bytes(&out)]
    });
}

pub fn products_of_every_orientation<Q: Queue>(bed: &Bed<Q>) {
    for sizes in [[64, 32, 48], [17, 40, 24], [1, 8, 8], [33, 7, 5]] {
        check::<bf16, bf16, Q>(bed, sizes);
        check::<bf16, f32, Q>(bed, sizes);
        check::<f16, f16, Q>(bed, sizes);
        check::<f32, f32, Q>(bed, sizes);
    }
}

/// Errors tell whether bits were lost, and are therefore not among those of other products: about 5e-4 by 11 bits, 1e-6 by 24. For
/// small ones a library may take all bits.
pub fn products_of_high_precision<Q: Queue>(bed: &Bed<Q>) {
    for sizes in [[64, 32, 48], [17, 40, 24], [1, 8, 8], [33, 7, 5], [128, 256, 256]] {
        check_high(bed, sizes);
    }
}
