//! Kernels for the CPU: packed matrix products in f32 accumulation, vector loops for everything else.

#[cfg(target_arch = "x86_64")]
mod amx;
mod attention;
mod compiled;
mod elementwise;
mod embed;
mod kernel;
#[cfg(test)]
mod lengths;
mod loss;
mod math;
mod operands;
mod pack;
mod product;
mod split;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod transpose;

use crate::error::Result;
use crate::ops::{AttentionBackward, AttentionShape, Matrix, Normed, Ops, Plus, Turn};
use crate::team::{Shared, Team};
use collectives::device::MatmulPrecision;
use collectives::{Buffer, DType, Element, Float, View, ViewMut};
use compiled::{is, known_as};
use kernel::Isa;
pub use kernel::has_faster_products;
use pack::Mat;
use product::{Addend, Out, Product, Scratch};
use split::{cut, grid, pieces, tile};

/// Rows whose gradient of a norm's weight is summed before the sums are added: fixed, for the same bits with
/// any number of threads.
const NORM_ROWS: usize = 64;

/// The widest head that attention takes: its scores are products of one block along it.
pub(crate) const WIDEST_HEAD: usize = pack::DEPTH;

/// What the CPU's workspace has to fit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CpuShape {
    /// Threads that compute.
    pub threads: usize,
    /// Rows of the largest norm.
    pub rows: usize,
    /// Their length.
    pub hidden: usize,
    /// Sequences of attention as long as the longest.
    pub sequences: usize,
    /// The longest sequence of attention.
    pub length: usize,
    /// Query heads of attention.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of an attention head.
    pub width: usize,
    /// The largest inner dimension of a product.
    pub depth: usize,
    /// Whether anything backward is computed.
    pub backward: bool,
}

impl CpuShape {
    /// Length of [`CpuMemory::words`]: of so many tasks as there are at once, which of attention may be fewer than threads.
    pub(crate) fn words(&self) -> usize {
        let attention = |heads: usize, backward| {
            self.threads.min(self.sequences * heads) * attention::words(self.length, self.width, backward)
        };
        let products = self.threads * Scratch::words(self.depth);
        let backward = if self.backward { attention(self.kv_heads, true) } else { 0 };
        products.max(attention(self.heads, false)).max(backward)
    }

    /// Length of [`CpuMemory::partial`].
    pub(crate) fn partial(&self) -> usize {
        if self.backward { (self.rows.div_ceil(NORM_ROWS) + 1) * self.hidden } else { 0 }
    }
}

/// The workspace of [`Cpu`].
pub(crate) struct CpuMemory {
    /// For each task at once, packed operands.
    pub words: Buffer<u32>,
    /// Partial sums of a norm's weight gradient, and one row more for their sum; nothing without a backward.
    pub partial: Buffer<f32>,
}

/// The CPU's kernels and their workspace.
pub struct Cpu {
    memory: CpuMemory,
    team: Team,
    /// Words of one thread's product.
    words: usize,
    /// The kernel of bf16 products.
    half: Isa,
    /// The kernel of f32 products.
    full: Isa,
}

impl Cpu {
    /// Kernels on `shape.threads` threads.
    ///
    /// # Errors
    /// The threads cannot be started.
    pub(crate) fn new(shape: &CpuShape, memory: CpuMemory) -> Result<Self> {
        let team = Team::new(shape.threads)?;
        let full = Isa::full(MatmulPrecision::default());
        Ok(Cpu { memory, team, words: Scratch::words(shape.depth), half: Isa::half(), full })
    }

    fn isa<T: Element>(&self) -> Isa {
        match T::DTYPE {
            DType::Bf16 if self.half.available() => self.half,
            DType::F32 if self.full.available() => self.full,
            _ => Isa::single(),
        }
    }

    /// The kernel of attention, whose own results are operands: those are packed for every kernel but such as widen, which reads
    /// them where they are. That takes what pairs of bf16, or three parts on AMX, save; not what AMX does with one.
    fn attention_isa<T: Element>(&self) -> Isa {
        match self.isa::<T>() {
            #[cfg(target_arch = "x86_64")]
            Isa::Amx => Isa::Amx,
            _ => Isa::single(),
        }
    }

    /// Every thread's words.
    fn scratch(&mut self) -> Shared<u32> {
        Shared(self.memory.words.view_mut().as_mut_ptr())
    }

    /// Runs `task(i, words)` for each i below `tasks`, each with `words` words of its own: as many at once as there are
    /// words for, where those are fewer than threads.
    fn each_with_words(&mut self, tasks: usize, words: usize, task: impl Fn(usize, &mut [u32]) + Sync) {
        let (places, scratch) = (self.memory.words.len() / words, self.scratch());
        assert!(places > 0, "words of a task");
        // SAFETY: a place belongs to one running task at a time, and all are inside the memory.
        let of = |place: usize| unsafe { scratch.part(place * words..(place + 1) * words) };
        if places >= self.team.count() {
            return self.team.each(tasks, |i, thread| task(i, of(thread)));
        }
        for start in (0..tasks).step_by(places) {
            self.team.each(places.min(tasks - start), |i, _| task(start + i, of(i)));
        }
    }

    /// The losses of rows of logits, and their gradients, where those go.
    fn rows_of_logits<T: Float>(
        &mut self,
        logits: ViewMut<'_, f32>,
        targets: View<'_, u32>,
        losses: ViewMut<'_, f32>,
        gradient: Gradient<'_, T>,
        scale: f32,
    ) {
        let (logits, targets, losses) = (logits.host(), targets.host(), losses.host());
        let rows = targets.len();
        let vocab = logits.len() / rows.max(1);
        assert!(losses.len() == rows && logits.len() == rows * vocab, "a loss and a row for each target");
        let (in_place, d_logits) = match gradient {
            Gradient::None => (false, None),
            Gradient::InPlace => (true, None),
            Gradient::Into(d) => {
                assert_eq!(d.len(), rows * vocab, "a gradient for each logit");
                (false, Some(Shared(d.host().as_mut_ptr())))
            }
        };
        let (logits, losses) = (Shared(logits.as_mut_ptr()), Shared(losses.as_mut_ptr()));
        self.team.split(rows, 1, |part| {
            let elements = part.start * vocab..part.end * vocab;
            // SAFETY: each task has its own rows of the three, whose lengths are asserted above.
            unsafe {
                let (logits, losses) = (logits.part(elements.clone()), losses.part(part.clone()));
                match &d_logits {
                    Some(d) => {
                        let d = d.part(elements);
                        loss::losses_and_gradients(logits, &targets[part], losses, d, scale);
                    }
                    None if in_place => loss::gradients_in_place(logits, &targets[part], losses, scale),
                    None => loss::losses(logits, &targets[part], losses),
                }
            }
        });
    }
}

/// Where the gradient of logits goes.
enum Gradient<'a, T: Element> {
    /// There is none.
    None,
    /// To where the logits are.
    InPlace,
    /// Here.
    Into(ViewMut<'a, T>),
}

impl<T: Float> Ops<T> for Cpu {
    /// What a product reads without packing, and nothing has to round.
    type Work = f32;

    fn team(&self) -> Team {
        self.team.clone()
    }

    fn precise_to(&mut self, precision: MatmulPrecision) {
        self.full = Isa::full(precision);
    }

    fn upload<E: Element>(&mut self, from: &[E], to: ViewMut<'_, E>) {
        to.host().copy_from_slice(from);
    }

    fn fetch<E: Element>(&mut self, from: View<'_, E>, to: ViewMut<'_, E>) {
        to.host().copy_from_slice(from.host());
    }

    fn finish(&mut self) {}

    fn download<E: Element>(&mut self, from: View<'_, E>, to: &mut [E]) {
        to.copy_from_slice(from.host());
    }

    fn product<L: Float, R: Float, O: Float>(
        &mut self,
        mut out: ViewMut<'_, O>,
        plus: Plus<'_, O>,
        left: Matrix<'_, L>,
        right: Matrix<'_, R>,
    ) {
        let (m, k, n) = (left.rows, left.columns, right.columns);
        assert_eq!(k, right.rows, "inner dimensions of a product");
        assert_eq!(out.len(), area(m, n), "the result of a product of {m} x {k} and {k} x {n}");
        assert!(out.place().is_host(), "host access to {:?}", out.place());
        let addend = match plus {
            Plus::Nothing => Addend::None,
            Plus::Old => Addend::Old,
            Plus::Other(other) => {
                assert_eq!(other.len(), area(m, n), "an addend of the result's shape");
                Addend::Other(other.host().as_ptr())
            }
        };
        let out = Out { pointer: out.as_mut_ptr(), stride: n, addend };
        let (left, right) = (mat(left), mat(right));
        let (isa, per_thread) = (self.isa::<T>(), self.words);
        let words = self.scratch();
        let (high, wide) = tile(isa);
        let (down, across) = grid(m, n, self.team.count(), (high, wide));
        self.team.each(down * across, |task, thread| {
            let rows = cut(m, down, high, task / across);
            let columns = cut(n, across, wide, task % across);
            if rows.is_empty() || columns.is_empty() {
                return;
            }
            // SAFETY: each thread has its own words, and each task its own rows and columns of the result,
            // whose length and whose addend's length are asserted above.
            unsafe {
                let scratch = &mut Scratch::new(words.part(thread * per_thread..(thread + 1) * per_thread));
                let out = out.from(rows.start, columns.start);
                let (left, right) = (left.from(rows.start, 0), right.from(0, columns.start));
                Product { m: rows.len(), n: columns.len(), k, left, right, out, scratch }.run(isa);
            }
        });
    }

    fn embed(&mut self, tokens: View<'_, u32>, table: View<'_, T>, out: ViewMut<'_, T>) {
        let hidden = out.len() / tokens.len().max(1);
        embed::embed(tokens.host(), table.host(), out.host(), hidden);
    }

    fn embed_backward(
        &mut self,
        order: View<'_, u64>,
        d_out: View<'_, f32>,
        mut d_table: ViewMut<'_, T>,
        add: bool,
    ) {
        let (order, d_out) = (order.host(), d_out.host());
        let hidden = d_out.len() / order.len().max(1);
        let vocab = d_table.len() / hidden.max(1);
        assert!(d_table.place().is_host(), "host access to {:?}", d_table.place());
        let table = Shared(d_table.as_mut_ptr());
        self.team.split(hidden, 64, |columns| {
            let table = &table;
            // SAFETY: the table has `vocab` rows, and each task its own columns.
            unsafe { embed::embed_backward(order, d_out, table.0, vocab, hidden, columns, add) }
        });
    }

    fn norm(&mut self, x: View<'_, T>, weight: View<'_, T>, eps: f32, out: ViewMut<'_, f32>) {
        let (x, weight, out) = (x.host(), weight.host(), out.host());
        assert_eq!(x.len(), out.len(), "as many results as inputs of a norm");
        let (h, out) = (weight.len(), Shared(out.as_mut_ptr()));
        self.team.split(x.len() / h, 16, |rows| {
            let part = rows.start * h..rows.end * h;
            // SAFETY: each task has its own rows of the result, which is as long as the input.
            let out = unsafe { out.part(part.clone()) };
            elementwise::norm(&x[part], weight, eps, out);
        });
    }

    fn norm_backward(
        &mut self,
        normed: Normed<'_, T>,
        d_out: View<'_, f32>,
        d_x: ViewMut<'_, f32>,
        add: bool,
        d_weight: ViewMut<'_, T>,
    ) {
        let Normed { x, weight, eps } = normed;
        let (x, weight, d_out, d_x) = (x.host(), weight.host(), d_out.host(), d_x.host());
        let h = weight.len();
        assert!(x.len() == d_out.len() && x.len() == d_x.len(), "as many gradients as inputs of a norm");
        let (sum, partial) = self.memory.partial.host_mut().split_at_mut(h);
        let blocks = (x.len() / h).div_ceil(NORM_ROWS);
        let partial = &mut partial[..blocks * h];
        partial.fill(0.0);
        let (sums, d_x) = (Shared(partial.as_mut_ptr()), Shared(d_x.as_mut_ptr()));
        self.team.each(blocks, |block, _| {
            let part = block * NORM_ROWS * h..x.len().min((block + 1) * NORM_ROWS * h);
            // SAFETY: each task has its own rows and its own partial sum.
            let (d_x, sum) = unsafe { (d_x.part(part.clone()), sums.part(block * h..(block + 1) * h)) };
            elementwise::norm_backward(&x[part.clone()], weight, eps, &d_out[part], d_x, add, sum);
        });
        elementwise::add_rows(partial, sum, d_weight.host());
    }

    fn rope<E: Float>(
        &mut self,
        x: ViewMut<'_, E>,
        angles: View<'_, f32>,
        heads: usize,
        width: usize,
        length: usize,
        turn: Turn,
    ) {
        let (x, angles, row) = (x.host(), &angles.host()[..length * width], heads * width);
        let (tokens, x) = (x.len() / row, Shared(x.as_mut_ptr()));
        self.team.split(tokens, 16, |part| {
            // SAFETY: each task has its own rows.
            let x = unsafe { x.part(part.start * row..part.end * row) };
            elementwise::rope(x, row, angles, width, part.start % length, turn);
        });
    }

    fn attention(
        &mut self,
        shape: AttentionShape,
        q: View<'_, T>,
        k: View<'_, T>,
        v: View<'_, T>,
        out: ViewMut<'_, T>,
        log_sums: ViewMut<'_, f32>,
    ) {
        let (q, k, v, out, log_sums) = (q.host(), k.host(), v.host(), out.host(), log_sums.host());
        let AttentionShape { rows, length, heads, kv_heads, width } = shape;
        let n = area(rows, length);
        let (queries, keys) = (area(area(n, heads), width), area(area(n, kv_heads), width));
        assert!(q.len() == queries && out.len() == queries, "queries and results of attention");
        assert!(k.len() == keys && v.len() == keys, "keys and values of attention");
        assert_eq!(log_sums.len(), area(n, heads), "one logarithm for each query and head");
        let (out, log_sums) = (Shared(out.as_mut_ptr()), Shared(log_sums.as_mut_ptr()));
        // Each task packs its keys and values, so query heads that share those are apart only where threads would be idle.
        let group = heads / kv_heads;
        let pieces = pieces(rows * kv_heads, group, self.team.count());
        let (isa, words) = (self.attention_isa::<T>(), attention::words(length, width, false));
        self.each_with_words(rows * kv_heads * pieces, words, |task, words| {
            let (piece, kv_head) = (task % pieces, task / pieces % kv_heads);
            let (sequence, first) = (task / pieces / kv_heads, kv_head * group);
            let heads = first + group * piece / pieces..first + group * (piece + 1) / pieces;
            let (out, log_sums) = (&out, &log_sums);
            // SAFETY: each task has its own heads of one sequence; the lengths are asserted above.
            unsafe {
                let (out, log_sums) = (out.0, log_sums.0);
                attention::Forward { shape, sequence, heads, q, k, v, out, log_sums, words }.run(isa);
            }
        });
    }

    fn attention_backward(&mut self, shape: AttentionShape, a: AttentionBackward<'_, T, f32>) {
        let (q, k, v, out) = (a.q.host(), a.k.host(), a.v.host(), a.out.host());
        let (log_sums, d_out) = (a.log_sums.host(), a.d_out.host());
        let (d_q, d_k, d_v) = (a.d_q.host(), a.d_k.host(), a.d_v.host());
        let AttentionShape { rows, length, heads, kv_heads, width } = shape;
        let n = area(rows, length);
        let (queries, keys) = (area(area(n, heads), width), area(area(n, kv_heads), width));
        assert!(
            q.len() == queries && out.len() == queries && d_out.len() == queries,
            "queries and results of attention"
        );
        assert!(k.len() == keys && v.len() == keys, "keys and values of attention");
        assert_eq!(log_sums.len(), area(n, heads), "one logarithm for each query and head");
        assert!(d_q.len() == queries, "gradients of queries");
        assert!(d_k.len() == keys && d_v.len() == keys, "gradients of keys and values");
        let (d_q, d_k, d_v) = (Shared(d_q.as_mut_ptr()), Shared(d_k.as_mut_ptr()), Shared(d_v.as_mut_ptr()));
        let (isa, words) = (self.attention_isa::<T>(), attention::words(length, width, true));
        self.each_with_words(rows * kv_heads, words, |task, words| {
            let (sequence, kv_head) = (task / kv_heads, task % kv_heads);
            let (d_q, d_k, d_v) = (&d_q, &d_k, &d_v);
            // SAFETY: each task has its own heads of one sequence; the lengths are asserted above.
            unsafe {
                let (d_q, d_k, d_v) = (d_q.0, d_k.0, d_v.0);
                attention::Backward {
                    shape,
                    sequence,
                    kv_head,
                    q,
                    k,
                    v,
                    out,
                    log_sums,
                    d_out,
                    d_q,
                    d_k,
                    d_v,
                    words,
                }
                .run(isa);
            }
        });
    }

    fn swiglu(&mut self, gate: View<'_, T>, up: View<'_, T>, out: ViewMut<'_, f32>) {
        let (gate, up, out) = (gate.host(), up.host(), out.host());
        assert!(gate.len() == up.len() && gate.len() == out.len(), "gate, up and their product");
        let shared = Shared(out.as_mut_ptr());
        self.team.split(gate.len(), 4096, |part| {
            // SAFETY: each task has its own part of the result, which is as long as the inputs.
            let out = unsafe { shared.part(part.clone()) };
            elementwise::swiglu(&gate[part.clone()], &up[part], out);
        });
    }

    fn swiglu_backward(&mut self, gate: ViewMut<'_, T>, up: ViewMut<'_, T>, d_out: ViewMut<'_, f32>) {
        let (gate, up, d_out) = (gate.host(), up.host(), d_out.host());
        assert!(gate.len() == up.len() && gate.len() == d_out.len(), "gate, up and their gradient");
        let len = gate.len();
        let (gate, up) = (Shared(gate.as_mut_ptr()), Shared(up.as_mut_ptr()));
        let d_out = Shared(d_out.as_mut_ptr());
        self.team.split(len, 4096, |part| {
            // SAFETY: each task has its own part of the three, which are equally long.
            unsafe {
                let (gate, up) = (gate.part(part.clone()), up.part(part.clone()));
                elementwise::swiglu_backward(gate, up, d_out.part(part));
            }
        });
    }

    fn losses(&mut self, logits: ViewMut<'_, f32>, targets: View<'_, u32>, losses: ViewMut<'_, f32>) {
        self.rows_of_logits::<T>(logits, targets, losses, Gradient::None, 0.0);
    }

    /// Of f32 the gradient takes the logits' place.
    fn cross_entropy<'a>(
        &mut self,
        mut logits: ViewMut<'a, f32>,
        targets: View<'_, u32>,
        losses: ViewMut<'_, f32>,
        room: ViewMut<'a, T>,
        scale: f32,
    ) -> View<'a, T> {
        if const { is::<T, f32>() } {
            self.rows_of_logits::<T>(logits.reborrow(), targets, losses, Gradient::InPlace, scale);
            // SAFETY: these are views of f32 both.
            return unsafe { known_as::<View<'a, f32>, View<'a, T>>(logits.into()) };
        }
        let mut d_logits = room.slice(0..logits.len());
        self.rows_of_logits(logits, targets, losses, Gradient::Into(d_logits.reborrow()), scale);
        d_logits.into()
    }
}

/// Elements of so many rows: a number that memory can hold, so that what is compared with it is what it says.
fn area(rows: usize, columns: usize) -> usize {
    rows.checked_mul(columns).expect("lengths that memory can hold")
}

/// A matrix as the packing reads it.
fn mat<T: Element>(m: Matrix<'_, T>) -> Mat<'_, T> {
    let data = m.data.host();
    assert_eq!(data.len(), area(m.rows, m.columns), "the elements of a matrix");
    if m.transposed { Mat::columns(data, m.rows) } else { Mat::rows(data, m.columns) }
}
