//! Attention: on tensor cores for 16-bit elements and head sizes 64 and 128, plainly otherwise.

use super::sources;
use crate::error::{Error, Result};
use crate::ops::{AttentionBackward, AttentionShape};
use collectives::device::{Launch, Module, Source, address, aligned, twice};
use collectives::{DType, Float, View, ViewMut};

/// The widest head of the plain kernels.
pub const WIDEST_HEAD: usize = 256;

/// The instructions by which attention multiplies on tensor cores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TensorCores {
    /// Products of warps, which every GPU with tensor cores has.
    #[default]
    Mma,
    /// Products of warpgroups, which Hopper alone has (`sm_90a`).
    Wgmma,
}

impl TensorCores {
    /// Whether there are such kernels for a model's elements and heads; products of warps come with others beside them.
    ///
    /// # Errors
    /// There are none.
    pub fn check(self, element: DType, width: usize) -> Result<()> {
        match self == TensorCores::Mma || suits_tensor_cores(element, width) {
            true => Ok(()),
            false => Err(Error::config(format!(
                "attention with wgmma takes 16-bit elements and heads of 64 or 128, and these are heads of {width} in {element}"
            ))),
        }
    }
}

/// The tiles of one of the kernels on tensor cores, as in its source.
struct Tiles {
    /// Rows that a block owns.
    rows: usize,
    /// Of a block.
    threads: usize,
    /// Stages of the rows that pass by, and rows of one.
    others: [usize; 2],
}

/// Sequences whose tiles come together in the kernels on tensor cores, as in their sources.
const TOGETHER: usize = 4;

/// Their grid: a block for each tile of each head of each sequence.
fn tiled_grid(heads: usize, tiles: usize, rows: usize) -> [usize; 3] {
    [heads, TOGETHER * tiles, rows.div_ceil(TOGETHER)]
}

/// The kernels on tensor cores: the forward, which owns queries, and the backwards for queries, and for keys and values.
#[derive(Clone, Copy)]
enum Tiled {
    Forward,
    Queries,
    Keys,
}

fn tiles(by: TensorCores, kernel: Tiled, width: usize) -> Tiles {
    let (rows, threads, others) = match (by, kernel, width) {
        (TensorCores::Mma, Tiled::Forward, 64) => (128, 128, [2, 64]),
        (TensorCores::Mma, Tiled::Forward, _) => (128, 128, [2, 48]),
        (TensorCores::Mma, _, 64) => (128, 128, [2, 64]),
        (TensorCores::Mma, ..) => (128, 256, [2, 64]),
        (TensorCores::Wgmma, Tiled::Forward | Tiled::Queries, 64) => (128, 256, [3, 64]),
        (TensorCores::Wgmma, Tiled::Forward | Tiled::Queries, _) => (192, 384, [3, 64]),
        (TensorCores::Wgmma, Tiled::Keys, 64) => (192, 384, [3, 64]),
        (TensorCores::Wgmma, Tiled::Keys, _) => (128, 256, [3, 64]),
    };
    Tiles { rows, threads, others }
}

/// Bytes of shared memory of a block: the tiles that it owns (the forward one, the backwards two), and stages of two that pass
/// by; with keys and values owned, stages also hold what belongs to the rows of queries.
fn shared(by: TensorCores, kernel: Tiled, element: DType, width: usize) -> usize {
    let Tiles { rows, others: [stages, others], .. } = tiles(by, kernel, width);
    let owned = if matches!(kernel, Tiled::Forward) { rows } else { 2 * rows };
    let passing = stages * others;
    let of_rows = if matches!(kernel, Tiled::Keys) { 2 * passing * size_of::<f32>() } else { 0 };
    (owned + 2 * passing) * width * element.size() + of_rows
}

/// The forward's source, and the backward's.
fn tiled_sources(by: TensorCores) -> [&'static Source; 2] {
    match by {
        TensorCores::Mma => [&sources::ATTENTION_FORWARD, &sources::ATTENTION_BACKWARD],
        TensorCores::Wgmma => [&sources::ATTENTION_FORWARD_WGMMA, &sources::ATTENTION_BACKWARD_WGMMA],
    }
}

/// Of a block of either kernel for deltas: a thread for 8 elements of a head on tensor cores, a warp for a head otherwise.
const DELTA_THREADS: usize = 256;

/// Queries or keys of a block of the plain kernels, and rows of its tiles.
const PLAIN_ROWS: usize = 8;
const PLAIN_TILE: usize = 32;
const PLAIN_THREADS: usize = 32 * PLAIN_ROWS;

fn plain_shared(width: usize) -> usize {
    size_of::<f32>() * (2 * PLAIN_TILE * (width + 1) + PLAIN_ROWS * (2 * width + 2 * PLAIN_TILE))
}

/// Whether the kernels on tensor cores take these elements and heads.
fn suits_tensor_cores(element: DType, width: usize) -> bool {
    matches!(element, DType::Bf16 | DType::F16) && matches!(width, 64 | 128)
}

fn on_tensor_cores<T: Float>(width: usize, addresses: &[u64]) -> bool {
    suits_tensor_cores(T::DTYPE, width) && aligned(addresses)
}

/// What attention of such heads in aligned memory launches, with its backward if that is asked for: that takes long to
/// compile, and more shared memory than some GPUs have.
pub(super) fn modules(by: TensorCores, element: DType, width: usize, has_backward: bool) -> Vec<Module> {
    let module = |source, bytes| Module::with_head(source, element, width).shared(bytes);
    if !suits_tensor_cores(element, width) {
        return vec![module(&sources::ATTENTION_PLAIN, plain_shared(width))];
    }
    let [forward, backward] = tiled_sources(by);
    let of = |kernel| shared(by, kernel, element, width);
    let mut modules = vec![module(forward, of(Tiled::Forward))];
    if has_backward {
        modules.push(module(backward, of(Tiled::Queries).max(of(Tiled::Keys))));
    }
    if has_backward && by == TensorCores::Wgmma {
        modules.push(module(&sources::ATTENTION_BACKWARD, 0)); // for its deltas
    }
    modules
}

fn check<T: Float>(shape: AttentionShape, q: View<'_, T>, k: View<'_, T>, v: View<'_, T>) {
    let AttentionShape { rows, length, heads, kv_heads, width } = shape;
    assert!(heads.is_multiple_of(kv_heads), "{heads} heads over {kv_heads} key/value heads");
    assert!(width <= WIDEST_HEAD, "a head of {width}: at most {WIDEST_HEAD} is possible on CUDA");
    assert_eq!(q.len(), rows * length * heads * width, "queries of attention");
    assert!(
        k.len() == rows * length * kv_heads * width && v.len() == k.len(),
        "keys and values of attention"
    );
}

fn scale(width: usize) -> f32 {
    (1.0 / (width as f64).sqrt()) as f32
}

/// Causal softmax attention: `q` and `out` (n, heads * width), `k` and `v` (n, kv_heads * width); `log_sums` (rows,
/// heads, length) gets the logarithm of each softmax's denominator.
///
/// # Panics
/// A head wider than 256, or lengths that do not fit the shape.
pub fn attention<'a, T: Float>(
    by: TensorCores,
    shape: AttentionShape,
    q: View<'a, T>,
    k: View<'a, T>,
    v: View<'a, T>,
    out: ViewMut<'a, T>,
    log_sums: ViewMut<'a, f32>,
) -> Launch<'a> {
    check(shape, q, k, v);
    let AttentionShape { rows, length, heads, kv_heads, width } = shape;
    assert!(out.len() == q.len() && log_sums.len() == rows * heads * length, "results of attention");
    let fast = on_tensor_cores::<T>(width, &[address(q), address(k), address(v), address(out.as_view())]);
    let launch = if fast {
        let module = Module::with_head(tiled_sources(by)[0], T::DTYPE, width);
        let Tiles { rows: per_block, threads, .. } = tiles(by, Tiled::Forward, width);
        let grid = tiled_grid(heads, length.div_ceil(per_block), rows);
        let shared = shared(by, Tiled::Forward, T::DTYPE, width);
        Launch::new(module, "attention_forward", grid, threads).shared(shared)
    } else {
        let module = Module::with_head(&sources::ATTENTION_PLAIN, T::DTYPE, width);
        let grid = [heads, length.div_ceil(PLAIN_ROWS), rows];
        Launch::new(module, "attention_forward", grid, PLAIN_THREADS).shared(plain_shared(width))
    };
    // The kernel on tensor cores keeps scores in powers of two.
    let scale = if fast { scale(width) * std::f32::consts::LOG2_E } else { scale(width) };
    let launch = launch
        .write(out)
        .write(log_sums)
        .read(q)
        .read(k)
        .read(v)
        .int(length)
        .int(heads / kv_heads)
        .int(heads * width)
        .int(kv_heads * width)
        .float(scale);
    if fast { launch.int(rows) } else { launch }
}

/// Backward of [`attention`]; `delta` (rows, heads, length) is workspace. To be run in order.
///
/// # Panics
/// As [`attention`].
pub fn attention_backward<'a, T: Float>(
    by: TensorCores,
    shape: AttentionShape,
    a: AttentionBackward<'a, T, T>,
    delta: &'a mut ViewMut<'_, f32>,
) -> [Launch<'a>; 3] {
    check(shape, a.q, a.k, a.v);
    let AttentionShape { rows, length, heads, kv_heads, width } = shape;
    let n = rows * length;
    assert!(a.out.len() == n * heads * width && a.d_out.len() == a.out.len(), "results of attention");
    assert!(a.d_q.len() == a.q.len(), "gradients of queries");
    assert!(a.d_k.len() == a.k.len() && a.d_v.len() == a.k.len(), "gradients of keys and values");
    assert_eq!(a.log_sums.len(), n * heads, "one logarithm for each query and head");
    let delta = delta.reborrow().slice(0..n * heads);
    let inputs = [address(a.q), address(a.k), address(a.v), address(a.out), address(a.d_out)];
    let outputs = [address(a.d_q.as_view()), address(a.d_k.as_view()), address(a.d_v.as_view())];
    let fast = on_tensor_cores::<T>(width, &inputs) && aligned(&outputs);
    // Deltas have no products.
    let source = if fast { &sources::ATTENTION_BACKWARD } else { &sources::ATTENTION_PLAIN };
    let of_deltas = Module::with_head(source, T::DTYPE, width);
    let module = if fast { Module::with_head(tiled_sources(by)[1], T::DTYPE, width) } else { of_deltas };
    let per_block_of_deltas = DELTA_THREADS / if fast { width / 8 } else { 32 };
    // SAFETY: the first is of the launch that makes the deltas, the other of those that read them.
    let [written, delta] = unsafe { twice(delta) };
    let delta = View::from(delta);
    let blocks_of_deltas = (n * heads).div_ceil(per_block_of_deltas);
    let deltas = Launch::new(of_deltas, "attention_delta", [blocks_of_deltas, 1, 1], DELTA_THREADS)
        .write(written)
        .read(a.out)
        .read(a.d_out)
        .long(n * heads)
        .int(length)
        .int(heads);
    let common = |launch: Launch<'a>| {
        let launch = launch
            .read(a.q)
            .read(a.k)
            .read(a.v)
            .read(a.d_out)
            .read(a.log_sums)
            .read(delta)
            .int(length)
            .int(heads / kv_heads)
            .int(heads * width)
            .int(kv_heads * width)
            .float(scale(width));
        if fast { launch.int(rows) } else { launch }
    };
    let walk = |kernel: Tiled, name, heads: usize| {
        if fast {
            let Tiles { rows: per_block, threads, .. } = tiles(by, kernel, width);
            let grid = tiled_grid(heads, length.div_ceil(per_block), rows);
            Launch::new(module, name, grid, threads).shared(shared(by, kernel, T::DTYPE, width))
        } else {
            let grid = [heads, length.div_ceil(PLAIN_ROWS), rows];
            Launch::new(module, name, grid, PLAIN_THREADS).shared(plain_shared(width))
        }
    };
    let queries = walk(Tiled::Queries, "attention_backward_q", heads).write(a.d_q);
    let keys = walk(Tiled::Keys, "attention_backward_kv", kv_heads).write(a.d_k).write(a.d_v);
    [deltas, common(queries), common(keys)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::elementwise;
    use crate::cuda::ops::CudaShape;
    use crate::ops::Normed;
    use collectives::{Buffer, bf16};

    #[test]
    fn what_is_prepared_asks_for_as_much_shared_memory_as_what_is_launched() {
        fn of<T: Float>(by: TensorCores, width: usize) {
            let shape = AttentionShape { rows: 1, length: 8, heads: 2, kv_heads: 1, width };
            let buffer = |heads: usize| Buffer::<T>::zeroed(8 * heads * width);
            let [q, out, d_out, mut d_q] = [2; 4].map(buffer);
            let [k, v, mut d_k, mut d_v] = [1; 4].map(buffer);
            let [log_sums, mut delta] = [16; 2].map(Buffer::<f32>::zeroed);
            let (mut forward_out, mut forward_sums) = (buffer(2), Buffer::<f32>::zeroed(16));
            let cuda = CudaShape { tokens: 8, heads: 2, hidden: 2 * width, width, backward: true };
            let modules = cuda.modules(by, T::DTYPE).unwrap();
            let most = |name: &str| modules.iter().find(|m| m.source.name == name).map_or(0, |m| m.shared);
            let forwards = CudaShape { backward: false, ..cuda }.modules(by, T::DTYPE).unwrap();
            let (out_view, sums_view) = (forward_out.view_mut(), forward_sums.view_mut());
            let forward = attention(by, shape, q.view(), k.view(), v.view(), out_view, sums_view);
            assert_eq!(forward.shared as usize, most(forward.module.source.name), "{}", forward.module);
            assert_eq!(forwards.iter().map(|m| m.shared).max(), Some(forward.shared as usize));
            assert!(forwards.iter().all(|m| !m.source.name.starts_with("attention_backward")));
            let backward = AttentionBackward {
                q: q.view(),
                k: k.view(),
                v: v.view(),
                out: out.view(),
                log_sums: log_sums.view(),
                d_out: d_out.view(),
                d_q: d_q.view_mut(),
                d_k: d_k.view_mut(),
                d_v: d_v.view_mut(),
            };
            let mut delta = delta.view_mut();
            let launches = attention_backward(by, shape, backward, &mut delta);
            let asked = launches.iter().map(|launch| launch.shared as usize).max();
            assert_eq!(asked, Some(most(launches[1].module.source.name)), "{}", launches[1].module);
            let (weight, mut d_weight) = (Buffer::<T>::zeroed(2 * width), Buffer::<T>::zeroed(2 * width));
            let normed = Normed { x: q.view(), weight: weight.view(), eps: 1e-5 };
            let (mut d_x, mut partials) = (buffer(2), Buffer::<f32>::zeroed(2 * width));
            let (d_x, d_weight, partials) = (d_x.view_mut(), d_weight.view_mut(), &mut partials.view_mut());
            let launches = elementwise::norm_backward(normed, d_out.view(), d_x, false, d_weight, partials);
            let asked = launches.iter().map(|launch| launch.shared as usize).max();
            assert_eq!(asked, Some(most(launches[0].module.source.name)), "{}", launches[0].module);
        }
        for width in [64, 128] {
            of::<bf16>(TensorCores::Mma, width);
            of::<bf16>(TensorCores::Wgmma, width);
        }
        of::<f32>(TensorCores::Mma, 128);
    }
}
