//! Matrix products: every kernel, layout and addend, with rows, columns and k that divide into nothing.

use super::*;

const SHAPES: [(usize, usize, usize); 9] = [
    (1, 1, 1),
    (2, 32, 16),
    (3, 5, 7),
    (14, 32, 33),
    (15, 33, 17),
    (64, 64, 65),
    (31, 70, 130),
    (170, 100, 19),
    // More than one block along k, and two of columns.
    (29, 530, 1100),
];

/// A product of a model of `T`, and what it should be.
fn product_of<T: Float, L: Float, R: Float, O: Float>(
    cpu: &mut Cpu,
    shape: (usize, usize, usize),
    layout: u32,
    plus: u32,
) -> (Vec<O>, Vec<f64>) {
    let (m, n, k) = shape;
    let (a, b) = (values::<L>(m * k, 1), values::<R>(k * n, 2));
    let (old, other) = (values::<O>(m * n, 3), values::<O>(m * n, 4));
    let (ta, tb) = (layout & 1 > 0, layout & 2 > 0);
    let left = if ta { Matrix::new(a.as_slice(), k, m).t() } else { Matrix::new(a.as_slice(), m, k) };
    let right = if tb { Matrix::new(b.as_slice(), n, k).t() } else { Matrix::new(b.as_slice(), k, n) };
    let (wide_a, wide_b) = (wide(&a), wide(&b));
    let added = match plus {
        0 => vec![0.0; m * n],
        1 => wide(&old),
        _ => wide(&other),
    };
    let mut exact = added;
    for i in 0..m {
        for j in 0..n {
            let a = |p: usize| wide_a[if ta { p * m + i } else { i * k + p }];
            let b = |p: usize| wide_b[if tb { j * k + p } else { p * n + j }];
            exact[i * n + j] += (0..k).map(|p| a(p) * b(p)).sum::<f64>();
        }
    }
    let mut out = old;
    let plus = [Plus::Nothing, Plus::Old, Plus::Other(other.as_slice().into())][plus as usize];
    Ops::<T>::product(cpu, out.as_mut_slice().into(), plus, left, right);
    (out, exact)
}

/// Kernels that widen bf16 operands, which have the same bits at every level.
fn widening(threads: usize) -> Cpu {
    let mut cpu = cpu(threads);
    (cpu.half, cpu.full) = (Isa::single(), Isa::single());
    cpu
}

fn check_products<T: Float, L: Float, R: Float, O: Float>(tolerance: f64) {
    for shape in SHAPES {
        for layout in 0..4 {
            for plus in 0..3 {
                let types = format!("{} x {} -> {}", L::DTYPE, R::DTYPE, O::DTYPE);
                let at = format!("{types} {shape:?} layout {layout} plus {plus}");
                let mut first = None;
                at_each_level(|level| {
                    // What is the same everywhere once for each layout: the baseline of x86 has no fused multiply-add, and
                    // calls a function for each.
                    let large = shape.0 * shape.1 * shape.2 > 1_000_000;
                    if level == Level::Baseline && large && plus != layout % 3 {
                        return;
                    }
                    let (out, exact) = product_of::<T, L, R, O>(&mut widening(1), shape, layout, plus);
                    let far = distance(&out, &exact);
                    assert!(far < tolerance, "{at} {level:?}: {far}");
                    let (threaded, _) = product_of::<T, L, R, O>(&mut widening(3), shape, layout, plus);
                    assert_eq!(distance(&threaded, &wide(&out)), 0.0, "{at} {level:?} with three threads");
                    let first = first.get_or_insert_with(|| bits(&out));
                    assert_eq!(*first, bits(&out), "{at} {level:?}");
                });
            }
        }
    }
}

#[test]
fn products_of_f32() {
    check_products::<f32, f32, f32, f32>(2e-6);
}

#[test]
fn products_of_bf16() {
    check_products::<bf16, bf16, bf16, f32>(2e-6);
    check_products::<bf16, bf16, bf16, bf16>(5e-3);
}

#[test]
fn products_of_bf16_and_work() {
    check_products::<bf16, f32, bf16, bf16>(5e-3);
    check_products::<bf16, bf16, f32, f32>(2e-6);
}

#[test]
fn products_of_f16() {
    check_products::<f16, f16, f16, f32>(2e-6);
}

/// Kernels of a model of bf16, or of f32, that have bits of their own.
#[cfg(target_arch = "x86_64")]
fn own(isa: Isa, threads: usize) -> Cpu {
    let mut cpu = cpu(threads);
    (cpu.half, cpu.full) = (isa, isa);
    cpu
}

#[cfg(target_arch = "x86_64")]
fn check_own<T: Float, L: Float, R: Float, O: Float>(isa: Isa, tolerance: f64) {
    for shape in SHAPES {
        for layout in 0..4 {
            for plus in 0..3 {
                // What blocks do is the same for every addend.
                if shape.0 * shape.1 * shape.2 > 1_000_000 && plus != layout % 3 {
                    continue;
                }
                let at =
                    format!("{isa:?} {} x {} -> {} {shape:?} {layout} {plus}", L::DTYPE, R::DTYPE, O::DTYPE);
                let (out, exact) = product_of::<T, L, R, O>(&mut own(isa, 1), shape, layout, plus);
                let far = distance(&out, &exact);
                assert!(far < tolerance, "{at}: {far}");
                let (threaded, _) = product_of::<T, L, R, O>(&mut own(isa, 3), shape, layout, plus);
                assert_eq!(bits(&threaded), bits(&out), "{at} with three threads");
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn native_bf16_products_where_the_processor_has_them() {
    for isa in [Isa::Avx512Bf16, Isa::Amx] {
        if !isa.available() {
            harness::skip(&format!("this processor has no {isa:?}"));
            continue;
        }
        check_own::<bf16, bf16, bf16, f32>(isa, 2e-6);
        // f32 is rounded on the way.
        check_own::<bf16, f32, bf16, f32>(isa, 5e-3);
        check_own::<bf16, bf16, f32, f32>(isa, 5e-3);
        check_own::<bf16, bf16, bf16, bf16>(isa, 5e-3);
        check_own::<bf16, f32, bf16, bf16>(isa, 5e-3);
    }
}

#[cfg(target_arch = "x86_64")]
#[test]
fn f32_products_of_parts_where_the_processor_has_them() {
    if !Isa::AmxOfThree.available() {
        return harness::skip("this processor has no AMX");
    }
    check_own::<f32, f32, f32, f32>(Isa::AmxOfThree, 2e-6);
    // 2^-16, which a sum of one product may reach.
    check_own::<f32, f32, f32, f32>(Isa::AmxOfTwo, 1.6e-5);
}

/// A number times one is that number, whichever f32 whose parts these units do not take for zero, from either side; and what
/// is no number, whatever its bits, leaves none of what it meets a number.
#[cfg(target_arch = "x86_64")]
#[test]
fn three_parts_are_all_of_an_f32() {
    if !Isa::AmxOfThree.available() {
        return harness::skip("this processor has no AMX");
    }
    const SIDE: usize = 48;
    let mut ones = vec![0f32; SIDE * SIDE];
    ones.iter_mut().step_by(SIDE + 1).for_each(|x| *x = 1.0);
    let mut state = 1u64;
    let mut random = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 32) as u32
    };
    let mut numbers = vec![0f32; SIDE * SIDE];
    for x in numbers.iter_mut() {
        // Exponents from 2^-102 to 2^127, of which the largest part is no infinity.
        let bits = random();
        let exponent = 25 + (bits >> 23 & 0xff) % 229;
        *x = f32::from_bits((bits & !(0xff << 23)) | exponent << 23);
    }
    // Those of which each part is rounded away from zero, or is a half.
    let edges = [0x3f80_8000, 0x3f80_7fff, 0x3fff_ffff, 0xbf80_8080, 0x3f7f_8000, 0x7f7f_7fff, 0x0d00_0001];
    numbers.iter_mut().zip(edges).for_each(|(x, bits)| *x = f32::from_bits(bits));
    let product = |isa: Isa, left: Matrix<'_, f32>, right: Matrix<'_, f32>| {
        let mut out = vec![0f32; SIDE * SIDE];
        Ops::<f32>::product(&mut own(isa, 1), out.as_mut_slice().into(), Plus::Nothing, left, right);
        out
    };
    fn square(of: &[f32], turned: bool) -> Matrix<'_, f32> {
        let whole = Matrix::new(of, SIDE, SIDE);
        if turned { whole.t() } else { whole }
    }
    for turned in [false, true] {
        let right = product(Isa::AmxOfThree, square(&numbers, turned), square(&ones, false));
        let left = product(Isa::AmxOfThree, square(&ones, false), square(&numbers, turned));
        for (i, j) in (0..SIDE).flat_map(|i| (0..SIDE).map(move |j| (i, j))) {
            let number = numbers[if turned { j * SIDE + i } else { i * SIDE + j }].to_bits();
            assert_eq!(right[i * SIDE + j].to_bits(), number, "{number:#x} times one, turned: {turned}");
            assert_eq!(left[i * SIDE + j].to_bits(), number, "one times {number:#x}, turned: {turned}");
        }
        for isa in [Isa::AmxOfTwo, Isa::AmxOfThree] {
            for none in [0x7fff_ffff, 0xffff_ffff, 0x7f80_0001, 0x7fc0_0000, 0xffff_8000u32] {
                let mut numbers = numbers.clone();
                let (row, column) = (random() as usize % SIDE, random() as usize % SIDE);
                numbers[row * SIDE + column] = f32::from_bits(none);
                let (row, column) = if turned { (column, row) } else { (row, column) };
                let right = product(isa, square(&numbers, turned), square(&ones, false));
                let left = product(isa, square(&ones, false), square(&numbers, turned));
                for i in 0..SIDE {
                    assert!(right[row * SIDE + i].is_nan(), "{none:#x} by ones, {isa:?}, turned: {turned}");
                    assert!(left[i * SIDE + column].is_nan(), "ones by {none:#x}, {isa:?}, turned: {turned}");
                }
            }
        }
    }
}

#[test]
fn an_empty_inner_dimension_gives_zeros() {
    at_each_level(|level| {
        for (shape, threads) in [((3, 4, 0), 1), ((70, 64, 0), 3), ((3, 1100, 0), 1)] {
            for layout in 0..4 {
                // Also by the kernels of processors without tiles.
                for mut cpu in [cpu(threads), widening(threads)] {
                    let (out, _) = product_of::<f32, f32, f32, f32>(&mut cpu, shape, layout, 0);
                    assert!(out == vec![0.0; shape.0 * shape.1], "{shape:?}, layout {layout}, {level:?}");
                }
            }
        }
    });
}

/// What is too small for any f32 has its sign wherever in a result it is.
#[test]
fn a_negative_zero_is_one_in_every_column() {
    at_each_level(|level| {
        for columns in [1, 16, 17, 33, 70] {
            let (a, b, mut out) = ([1e-30f32], vec![-1e-30f32; columns], vec![1f32; columns]);
            let (left, right) = (Matrix::new(&a[..], 1, 1), Matrix::new(&b[..], 1, columns));
            let out_of = out.as_mut_slice().into();
            Ops::<f32>::product(&mut widening(1), out_of, Plus::Nothing, left, right);
            assert_eq!(bits(&out), vec![1u32 << 31; columns], "{columns} columns, {level:?}");
        }
    });
}

/// Unfinished sums of less memory: several stripes of rows, several blocks along k.
#[test]
fn stripes_change_no_bit_of_a_product() {
    let shape = (400, 33, 1100);
    for (layout, plus) in [(0, 0), (1, 1), (2, 2), (3, 0)] {
        at_each_level(|level| {
            let mut narrow = widening(1);
            // Room for 168 rows of 64 columns.
            narrow.words = Scratch::words(0) + 168 * 64;
            let (striped, exact) = product_of::<bf16, f32, bf16, f32>(&mut narrow, shape, layout, plus);
            let (whole, _) = product_of::<bf16, f32, bf16, f32>(&mut widening(1), shape, layout, plus);
            assert!(distance(&striped, &exact) < 2e-6, "{level:?} layout {layout}");
            assert_eq!(bits(&striped), bits(&whole), "{level:?} layout {layout}");
        });
    }
}

/// The same of tiles, of which the largest block has 768 rows.
#[cfg(target_arch = "x86_64")]
#[test]
fn stripes_change_no_bit_of_a_product_of_tiles() {
    if !Isa::Amx.available() {
        return harness::skip("this processor has no AMX");
    }
    let shape = (900, 33, 1100);
    for (isa, tolerance) in [(Isa::Amx, 5e-3), (Isa::AmxOfTwo, 1.6e-5), (Isa::AmxOfThree, 2e-6)] {
        for (layout, plus) in [(0, 0), (1, 1), (2, 2), (3, 0)] {
            let mut narrow = own(isa, 1);
            narrow.words = Scratch::words(0) + 768 * 64;
            let (striped, exact) = product_of::<f32, f32, f32, f32>(&mut narrow, shape, layout, plus);
            let (whole, _) = product_of::<f32, f32, f32, f32>(&mut own(isa, 1), shape, layout, plus);
            assert!(distance(&striped, &exact) < tolerance, "{isa:?} layout {layout}");
            assert_eq!(bits(&striped), bits(&whole), "{isa:?} layout {layout}");
        }
    }
}
