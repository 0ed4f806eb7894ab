//! Reductions in stages: of some ranks' contributions to a partial result, of partial results to one, and of the last
//! ones to what a call gives. Partial results are in the accumulator's type, so nothing is rounded on the way; joined
//! as [`tree`](crate::schedule) prescribes they give the bits of a reduction in one go.

use super::float16;
use super::numbers::{Arithmetic, Deliver, Pair};
use super::{CHUNK, kernel};
use crate::element::{DType, ReduceOp};
use half::{bf16, f16};

/// What goes into a reduction and what comes out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Contributions become a partial result.
    First,
    /// Partial results become one.
    Middle,
    /// Partial results become the result: an average is divided, and 16-bit types are rounded unless the result is
    /// wide.
    Last,
}

/// The type that partial results of `dtype` have.
pub fn accumulator(dtype: DType) -> DType {
    match dtype {
        DType::F16 | DType::Bf16 => DType::F32,
        other => other,
    }
}

/// What a staged reduction is of.
#[derive(Clone, Copy, Debug)]
pub struct Staged {
    /// Of contributions and, unless wide, of the result.
    pub dtype: DType,
    /// How they are combined.
    pub op: ReduceOp,
    /// Whether the result stays in the accumulator's type.
    pub wide: bool,
    /// Ranks that contribute to the result.
    pub ranks: usize,
}

impl Staged {
    /// Bytes of an input's element at a stage.
    pub fn in_size(&self, stage: Stage) -> usize {
        match stage {
            Stage::First => self.dtype.size(),
            Stage::Middle | Stage::Last => accumulator(self.dtype).size(),
        }
    }

    /// Reduces `inputs`, in rank order, into `out`.
    ///
    /// # Safety
    /// As for a [`Kernel`](super::Kernel), with inputs and output of the types that the stage has.
    pub unsafe fn run(&self, stage: Stage, inputs: &[*const u8], out: *mut u8, count: usize) {
        // The division of an average comes at the end, over all ranks.
        let op = if self.op == ReduceOp::Average { ReduceOp::Sum } else { self.op };
        let acc = accumulator(self.dtype);
        let join = match stage {
            Stage::First => kernel(self.dtype, op, true, inputs.len()),
            Stage::Middle | Stage::Last => kernel(acc, op, false, inputs.len()),
        };
        let rounds = stage == Stage::Last && !self.wide && acc != self.dtype;
        // SAFETY: the caller's.
        unsafe {
            match rounds {
                true => self.rounded(join, inputs, out, count),
                false => join(inputs, out, count),
            }
            if stage == Stage::Last && self.op == ReduceOp::Average && !rounds {
                divide(acc, out, count, self.ranks);
            }
        }
    }

    /// Joins chunk by chunk and rounds each.
    ///
    /// # Safety
    /// As for `run`, with inputs of f32 and an output of a 16-bit type.
    unsafe fn rounded(&self, join: super::Kernel, inputs: &[*const u8], out: *mut u8, count: usize) {
        let mut chunk = [0f32; CHUNK];
        let mut parts = [std::ptr::null::<u8>(); 32];
        let mut more = Vec::new();
        let parts = match inputs.len() <= parts.len() {
            true => &mut parts[..inputs.len()],
            false => {
                more.resize(inputs.len(), std::ptr::null());
                &mut more[..]
            }
        };
        let mut start = 0;
        while start < count {
            let len = CHUNK.min(count - start);
            for (part, input) in parts.iter_mut().zip(inputs) {
                *part = input.wrapping_add(start * size_of::<f32>());
            }
            // SAFETY: start + len <= count; the chunk is this function's own.
            unsafe { join(parts, chunk.as_mut_ptr().cast(), len) };
            if self.op == ReduceOp::Average {
                chunk[..len].iter_mut().for_each(|x| *x = x.divide(self.ranks));
            }
            let to = out.wrapping_add(start * 2);
            // SAFETY: len elements of 16 bits, aligned to them, from there on.
            unsafe {
                match self.dtype {
                    DType::F16 => {
                        let to = std::slice::from_raw_parts_mut(to.cast::<f16>(), len);
                        float16::narrow(&chunk[..len], to);
                    }
                    _ => round(&chunk[..len], std::slice::from_raw_parts_mut(to.cast::<bf16>(), len)),
                }
            }
            start += len;
        }
    }
}

/// To nearest even.
fn round(from: &[f32], to: &mut [bf16]) {
    let (pairs, rest) = from.as_chunks::<2>();
    let (places, last) = to.as_chunks_mut::<2>();
    for (place, &pair) in places.iter_mut().zip(pairs) {
        let both: u32 = Deliver::<u32>::deliver(pair as Pair);
        *place = [bf16::from_bits(both as u16), bf16::from_bits((both >> 16) as u16)];
    }
    for (place, &x) in last.iter_mut().zip(rest) {
        *place = bf16::from_f32(x);
    }
}

/// Divides each element of an average's sum.
///
/// # Safety
/// `count` elements of `dtype` at `out`, aligned to them.
unsafe fn divide(dtype: DType, out: *mut u8, count: usize, ranks: usize) {
    /// # Safety
    /// As above, for `T`.
    unsafe fn each<T: Arithmetic>(out: *mut u8, count: usize, ranks: usize) {
        // SAFETY: the caller's.
        let all = unsafe { std::slice::from_raw_parts_mut(out.cast::<T>(), count) };
        all.iter_mut().for_each(|x| *x = x.divide(ranks));
    }
    // SAFETY: the caller's.
    unsafe {
        match dtype {
            DType::F32 | DType::F16 | DType::Bf16 => each::<f32>(out, count, ranks),
            DType::F64 => each::<f64>(out, count, ranks),
            DType::I32 => each::<i32>(out, count, ranks),
            DType::I64 => each::<i64>(out, count, ranks),
            DType::U32 => each::<u32>(out, count, ranks),
            DType::U64 => each::<u64>(out, count, ranks),
            DType::I8 => each::<i8>(out, count, ranks),
            DType::U8 => each::<u8>(out, count, ranks),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::Element;
    use crate::oracle;
    use crate::simd::{Level, with_level};

    /// The first two subtrees of six ranks, and the last: 4 contributions, then 2.
    fn check<T: Element>(edges: bool) {
        let given = |r: usize, i: usize| if edges { oracle::edge(r, i) } else { oracle::sample(r, i) };
        for count in [1, 2, 33, 513, 1100] {
            let data: Vec<Vec<T>> = (0..6).map(|r| (0..count).map(|i| given(r, i)).collect()).collect();
            let slices: Vec<&[T]> = data.iter().map(Vec::as_slice).collect();
            let addresses: Vec<*const u8> = slices.iter().map(|s| s.as_ptr().cast()).collect();
            for (op, level) in
                ReduceOp::ALL.into_iter().flat_map(|op| Level::available().map(move |l| (op, l)))
            {
                let staged = |wide| Staged { dtype: T::DTYPE, op, wide, ranks: 6 };
                let mut parts = vec![vec![T::Acc::default(); count]; 3];
                let mut out = vec![T::default(); count];
                let mut wide = vec![T::Acc::default(); count];
                with_level(level, || {
                    for (part, ranks) in parts.iter_mut().zip([0..2, 2..4, 4..6]) {
                        let to = part.as_mut_ptr().cast();
                        // SAFETY: slices of `count` elements, and a place for as many accumulators.
                        unsafe { staged(false).run(Stage::First, &addresses[ranks], to, count) };
                    }
                    let (low, high) = parts.split_at_mut(1);
                    let (low, high) =
                        (&mut low[0], high.iter().map(|p| p.as_ptr().cast()).collect::<Vec<_>>());
                    let to: *mut u8 = low.as_mut_ptr().cast();
                    // SAFETY: as above; the output of the second stage is its first input.
                    unsafe {
                        staged(false).run(Stage::Middle, &[to, high[0]], to, count);
                        staged(false).run(Stage::Last, &[to, high[1]], out.as_mut_ptr().cast(), count);
                        staged(true).run(Stage::Last, &[to, high[1]], wide.as_mut_ptr().cast(), count);
                    }
                });
                let what = format!("{} {op} of {count}, {level:?}", T::DTYPE);
                assert!(oracle::alike(&out, &oracle::reduce(op, &slices)), "{what}");
                assert!(oracle::alike(&wide, &oracle::reduce_wide(op, &slices)), "{what} wide");
            }
        }
    }

    #[test]
    fn stages_give_the_bits_of_one_go() {
        oracle::for_every_type!(check, false);
    }

    #[test]
    fn stages_give_the_bits_of_one_go_of_zeros_infinities_and_ends_of_ranges() {
        oracle::for_every_type!(check, true);
    }

    /// Each rank's contribution is a partial result, and all of them are joined at once.
    fn check_many<T: Element>() {
        for ranks in [32, 33, 128, 200, 255, 256, 300] {
            // More than one chunk where it is rounded.
            let count = if ranks < 100 { 700 } else { 40 };
            // Of so many edges of floats nothing is left but NaN.
            let one = |r: usize, i: usize| match T::DTYPE.is_integer() {
                true => oracle::edge(r, i + r),
                false => oracle::sample(r, i),
            };
            let data: Vec<Vec<T>> = (0..ranks).map(|r| (0..count).map(|i| one(r, i)).collect()).collect();
            let slices: Vec<&[T]> = data.iter().map(Vec::as_slice).collect();
            let mut parts = vec![vec![T::Acc::default(); count]; ranks];
            for op in [ReduceOp::Average, ReduceOp::Min] {
                let staged = Staged { dtype: T::DTYPE, op, wide: false, ranks };
                for (part, slice) in parts.iter_mut().zip(&slices) {
                    // SAFETY: a slice of `count` elements, and a place for as many accumulators.
                    unsafe {
                        staged.run(Stage::First, &[slice.as_ptr().cast()], part.as_mut_ptr().cast(), count);
                    }
                }
                let inputs: Vec<*const u8> = parts.iter().map(|part| part.as_ptr().cast()).collect();
                let mut out = vec![T::default(); count];
                // SAFETY: as above.
                unsafe { staged.run(Stage::Last, &inputs, out.as_mut_ptr().cast(), count) };
                assert!(
                    oracle::alike(&out, &oracle::reduce(op, &slices)),
                    "{} {op} of {ranks} ranks",
                    T::DTYPE
                );
            }
        }
    }

    #[test]
    fn many_partial_results_are_joined_at_once() {
        oracle::for_every_type!(check_many);
    }

    #[test]
    fn what_is_no_number_stays_none() {
        let parts = [[f32::NAN], [f32::INFINITY], [f32::NEG_INFINITY]];
        for ranks in [[0, 1], [1, 2]] {
            let inputs = ranks.map(|r| parts[r].as_ptr().cast::<u8>());
            let mut out = [bf16::ZERO];
            let staged = Staged { dtype: DType::Bf16, op: ReduceOp::Sum, wide: false, ranks: 2 };
            // SAFETY: one accumulator each, and a place for one result.
            unsafe { staged.run(Stage::Last, &inputs, out.as_mut_ptr().cast(), 1) };
            assert!(out[0].is_nan());
        }
    }
}
