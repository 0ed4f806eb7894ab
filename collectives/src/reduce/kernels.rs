//! The loops: one pass for one, two and four inputs, a walk through the tree in chunks for any other number.

use super::CHUNK;
use super::numbers::{Deliver, Narrow, Operation, Pair};
use crate::element::{DType, Element};
use std::mem::MaybeUninit;

/// Levels of partial results, each holding a multiple of four leaves: enough for 2^18 ranks.
const LEVELS: usize = 17;

/// One combination of element, result and operation, as a single type parameter.
pub(super) trait Reduce: 'static {
    type In: Copy;
    type Acc: Copy + Default;
    type Out: Copy;
    /// Whether wider instruction sets pay: others reach memory speed with the baseline.
    const WIDE: bool;
    fn widen(x: Self::In) -> Self::Acc;
    fn join(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn finish(a: Self::Acc, ranks: usize) -> Self::Out;
}

pub(super) struct Reduction<T, O, Op>(std::marker::PhantomData<(T, O, Op)>);

impl<T: Narrow<O>, O: Element, Op: Operation> Reduce for Reduction<T, O, Op> {
    type In = T;
    type Acc = T::Acc;
    type Out = O;
    const WIDE: bool = matches!(T::DTYPE, DType::F32 | DType::Bf16);

    #[inline(always)]
    fn widen(x: T) -> T::Acc {
        Narrow::<O>::widen(x)
    }
    #[inline(always)]
    fn join(a: T::Acc, b: T::Acc) -> T::Acc {
        Op::join(a, b)
    }
    #[inline(always)]
    fn finish(a: T::Acc, ranks: usize) -> O {
        T::narrow(Op::finish(a, ranks))
    }
}

/// Two bf16 as one `u32`, the first in its lower half.
pub(super) struct Pairs<P, Op>(std::marker::PhantomData<(P, Op)>);

impl<P: Copy + 'static, Op: Operation> Reduce for Pairs<P, Op>
where
    Pair: Deliver<P>,
{
    type In = u32;
    type Acc = Pair;
    type Out = P;
    const WIDE: bool = true;

    #[inline(always)]
    fn widen(x: u32) -> Pair {
        [f32::from_bits(x << 16), f32::from_bits(x & 0xffff_0000)]
    }
    #[inline(always)]
    fn join(a: Pair, b: Pair) -> Pair {
        Op::join(a, b)
    }
    #[inline(always)]
    fn finish(a: Pair, ranks: usize) -> P {
        Op::finish(a, ranks).deliver()
    }
}

/// The arguments of a [`Kernel`](super::Kernel), whose contract holds for as long as this exists, and which of the elements.
#[derive(Clone, Copy)]
pub(super) struct Task<'a> {
    inputs: &'a [*const u8],
    out: *mut u8,
    from: usize,
    to: usize,
}

impl Task<'_> {
    /// # Safety
    /// `i < to`, and the kernel's contract.
    #[inline(always)]
    unsafe fn store<R: Reduce>(&self, i: usize, acc: R::Acc) {
        // SAFETY: in range by the caller.
        unsafe {
            self.out.cast::<R::Out>().add(i).write_unaligned(R::finish(acc, self.inputs.len()));
        }
    }
}

/// # Safety
/// `a` holds an element at `i`. Pairs are aligned for their halves only.
#[inline(always)]
unsafe fn load<R: Reduce>(a: *const u8, i: usize) -> R::Acc {
    // SAFETY: the caller's.
    R::widen(unsafe { a.cast::<R::In>().add(i).read_unaligned() })
}

/// All elements by one reduction.
///
/// # Safety
/// The contract of [`Kernel`](super::Kernel), for as many inputs as `W` takes.
pub(super) unsafe fn whole<W: Way, R: Reduce>(inputs: &[*const u8], out: *mut u8, count: usize) {
    W::run::<R>(Task { inputs, out, from: 0, to: count });
}

/// Two elements at a time by `P`, an odd last one by `R`.
///
/// # Safety
/// The contract of [`Kernel`](super::Kernel), for as many inputs as `W` takes.
pub(super) unsafe fn halves<W: Way, P: Reduce, R: Reduce>(inputs: &[*const u8], out: *mut u8, count: usize) {
    W::run::<P>(Task { inputs, out, from: 0, to: count / 2 });
    if !count.is_multiple_of(2) {
        Tree::run::<R>(Task { inputs, out, from: count - 1, to: count });
    }
}

crate::simd_dispatch! {
    fn one<R: Reduce>(task: Task<'_>) = one_body;
    fn two<R: Reduce>(task: Task<'_>) = two_body;
    fn four<R: Reduce>(task: Task<'_>) = four_body;
    fn tree<R: Reduce>(task: Task<'_>) = tree_body;
}

/// The way for a number of inputs.
pub(super) trait Way {
    fn run<R: Reduce>(task: Task<'_>);
}

macro_rules! ways {
    ($($way:ident: $dispatch:ident, $body:ident;)*) => {$(
        pub(super) struct $way;
        impl Way for $way {
            fn run<R: Reduce>(task: Task<'_>) {
                if R::WIDE { $dispatch::<R>(task) } else { $body::<R>(task) }
            }
        }
    )*};
}

ways! {
    One: one, one_body;
    Two: two, two_body;
    Four: four, four_body;
    Tree: tree, tree_body;
}

/// `out[i] = finish(value(i))` for a range in which nothing overlaps, or `value` reads at most `out[i]` itself.
/// Compilers see the second case only where both addresses come from one variable.
#[inline(always)]
fn each<R: Reduce>(task: Task<'_>, value: impl Fn(usize) -> R::Acc) {
    for i in task.from..task.to {
        // SAFETY: i < to.
        unsafe { task.store::<R>(i, value(i)) };
    }
}

#[inline(always)]
fn one_body<R: Reduce>(task: Task<'_>) {
    fixed::<R, 1>(task);
}

#[inline(always)]
fn two_body<R: Reduce>(task: Task<'_>) {
    let (a, b) = (task.inputs[0], task.inputs[1]);
    // SAFETY: `each` asks for elements of the task only.
    let join = |a: *const u8, b: *const u8, i: usize| unsafe { R::join(load::<R>(a, i), load::<R>(b, i)) };
    if std::ptr::addr_eq(a, task.out) {
        each::<R>(task, |i| join(task.out, b, i));
    } else if std::ptr::addr_eq(b, task.out) {
        each::<R>(task, |i| join(a, task.out, i));
    } else {
        fixed::<R, 2>(task);
    }
}

#[inline(always)]
fn four_body<R: Reduce>(task: Task<'_>) {
    replacing::<R, 4>(task);
}

/// In one pass over `N` inputs, none of which is the output.
#[inline(always)]
fn fixed<R: Reduce, const N: usize>(task: Task<'_>) {
    let inputs: [*const u8; N] = *task.inputs.first_chunk().expect("as many inputs as the way takes");
    each::<R>(task, |i| {
        // SAFETY: `each` asks for elements of the task only.
        unsafe { joined::<R, N>(&inputs, i) }
    });
}

/// The tree over `N` inputs at `i`.
///
/// # Safety
/// Each input holds an element at `i`.
#[inline(always)]
unsafe fn joined<R: Reduce, const N: usize>(inputs: &[*const u8; N], i: usize) -> R::Acc {
    // SAFETY: the caller's.
    let v = |r: usize| unsafe { load::<R>(inputs[r], i) };
    match N {
        1 => v(0),
        2 => R::join(v(0), v(1)),
        3 => R::join(R::join(v(0), v(1)), v(2)),
        _ => R::join(R::join(v(0), v(1)), R::join(v(2), v(3))),
    }
}

/// As `fixed`, but one of the inputs may be the output: a chunk of it is moved aside first.
#[inline(always)]
fn replacing<R: Reduce, const N: usize>(task: Task<'_>) {
    let Some(own) = task.inputs.iter().position(|&a| std::ptr::addr_eq(a, task.out)) else {
        return fixed::<R, N>(task);
    };
    let mut aside = [MaybeUninit::<R::In>::uninit(); CHUNK];
    let mut from = task.from;
    while from < task.to {
        let len = CHUNK.min(task.to - from);
        let mut inputs: [*const u8; N] = [std::ptr::null(); N];
        for (r, input) in inputs.iter_mut().enumerate() {
            // SAFETY: from < to, which is within each input.
            *input = unsafe { task.inputs[r].cast::<R::In>().add(from) }.cast();
        }
        // SAFETY: len elements from there on are of the task, and `aside` has room for them.
        unsafe {
            let bytes = len * size_of::<R::In>();
            std::ptr::copy_nonoverlapping(inputs[own], aside.as_mut_ptr().cast::<u8>(), bytes);
        }
        inputs[own] = aside.as_ptr().cast();
        // SAFETY: as for the inputs.
        let out = unsafe { task.out.cast::<R::Out>().add(from) }.cast();
        fixed::<R, N>(Task { inputs: &inputs, out, from: 0, to: len });
        from += len;
    }
}

type Partial<A> = [MaybeUninit<A>; CHUNK];

/// dst = dst ⊕ src, for the first `len` elements.
///
/// # Safety
/// Both are initialised up to `len`.
#[inline(always)]
unsafe fn merge<R: Reduce>(dst: &mut Partial<R::Acc>, src: &Partial<R::Acc>, len: usize) {
    for (d, s) in dst[..len].iter_mut().zip(&src[..len]) {
        // SAFETY: initialised by the caller.
        *d = MaybeUninit::new(unsafe { R::join(d.assume_init(), s.assume_init()) });
    }
}

/// Fills a partial result with the tree over `N` inputs from `start` on.
#[inline(always)]
fn gather<R: Reduce, const N: usize>(next: &mut [MaybeUninit<R::Acc>], inputs: &[*const u8], start: usize) {
    let inputs: [*const u8; N] = *inputs.first_chunk().expect("as many inputs as are gathered");
    for (k, p) in next.iter_mut().enumerate() {
        // SAFETY: start + k is of the task, whose inputs these are.
        *p = MaybeUninit::new(unsafe { joined::<R, N>(&inputs, start + k) });
    }
}

#[inline(always)]
fn tree_body<R: Reduce>(task: Task<'_>) {
    let n = task.inputs.len();
    assert!(n <= 4 << (LEVELS - 1), "{n} ranks");
    let mut partials: [Partial<R::Acc>; LEVELS] = [[MaybeUninit::uninit(); CHUNK]; LEVELS];
    let mut start = task.from;
    while start < task.to {
        let len = CHUNK.min(task.to - start);
        let mut depth = 0;
        let mut quads = 0usize;
        let mut rank = 0;
        while rank < n {
            let leaves = (n - rank).min(4);
            let next = &mut partials[depth][..len];
            let some = &task.inputs[rank..rank + leaves];
            match leaves {
                1 => gather::<R, 1>(next, some, start),
                2 => gather::<R, 2>(next, some, start),
                3 => gather::<R, 3>(next, some, start),
                _ => gather::<R, 4>(next, some, start),
            }
            depth += 1;
            rank += leaves;
            if leaves == 4 {
                // A binary counter: as many merges as the count of quads has trailing zeros.
                quads += 1;
                for _ in 0..quads.trailing_zeros() {
                    let (left, right) = partials.split_at_mut(depth - 1);
                    // SAFETY: both levels were written up to len.
                    unsafe { merge::<R>(&mut left[depth - 2], &right[0], len) };
                    depth -= 1;
                }
            }
        }
        while depth > 1 {
            let (left, right) = partials.split_at_mut(depth - 1);
            // SAFETY: both levels were written up to len.
            unsafe { merge::<R>(&mut left[depth - 2], &right[0], len) };
            depth -= 1;
        }
        for (k, p) in partials[0][..len].iter().enumerate() {
            // SAFETY: written above; start + k < to.
            unsafe { task.store::<R>(start + k, p.assume_init()) };
        }
        start += len;
    }
}
