//! Sums in canonical order: how fast one core reduces the contributions of several ranks. Each bench first checks
//! its result, so that a fast wrong kernel shows as a failure and not as progress.

use collectives::reduce::reduce;
use collectives::{Float, ReduceOp, bf16};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;

fn sums<T: Float>(c: &mut Criterion) {
    let mut group = c.benchmark_group(format!("sum {}", T::DTYPE));
    for ranks in [2, 4, 8] {
        for kib in [32, 4096] {
            let len = (kib << 10) / size_of::<T>();
            // Small whole numbers: every sum is exact in every type.
            let input =
                |rank: usize| -> Vec<T> { (0..len).map(|i| T::from_f32(((i + rank) % 13) as f32)).collect() };
            let inputs: Vec<Vec<T>> = (0..ranks).map(input).collect();
            let views: Vec<&[T]> = inputs.iter().map(|v| &v[..]).collect();
            let mut out = vec![T::from_f32(0.0); len];
            reduce(ReduceOp::Sum, &views, &mut out);
            for (i, sum) in out.iter().enumerate() {
                let expected = (0..ranks).map(|rank| ((i + rank) % 13) as f32).sum::<f32>();
                assert_eq!(sum.to_f32(), expected, "element {i}");
            }
            group.throughput(Throughput::Bytes((len * size_of::<T>() * (ranks + 1)) as u64));
            group.bench_function(BenchmarkId::new(format!("{ranks} ranks"), format!("{kib} KiB")), |b| {
                b.iter(|| reduce(ReduceOp::Sum, black_box(&views), black_box(&mut out)));
            });
        }
    }
    group.finish();
}

fn benches(c: &mut Criterion) {
    sums::<f32>(c);
    sums::<bf16>(c);
}

criterion_group!(all, benches);
criterion_main!(all);
