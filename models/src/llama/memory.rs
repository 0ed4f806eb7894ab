//! What a Llama holds while it runs: one list of buffers, from which both the memory and its prediction come.

use crate::config::LlamaConfig;
use crate::cpu::{CpuMemory, CpuShape, WIDEST_HEAD};
use crate::error::{Error, Result};
use collectives::device::Arena;
use collectives::{Account, Buffer, Element, Float, Memory};

/// Whether a block's activations are kept for its backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Recompute {
    /// All are kept.
    None,
    /// Only each block's input is kept; its backward computes the rest again, to the same bits.
    Full,
    /// There is no backward, as in an evaluation: nothing is kept, and nothing held for it.
    NoBackward,
}

/// Bytes that a model holds besides weights and gradients.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// What lives from the forward to the backward of a unit.
    pub activations: usize,
    /// What lives within one unit's forward or backward, tables and packed operands included.
    pub workspace: usize,
    /// Beside a device: memory of the host that it copies from and to. On a CPU that is workspace like any other.
    pub host: usize,
    /// Beside a device: activations and workspace as they lie in an arena, each buffer at a multiple of its alignment.
    pub arena: usize,
}

/// Where a model books its bytes.
#[derive(Clone, Debug, Default)]
pub struct Accounts {
    /// See [`Footprint::activations`].
    pub activations: Account,
    /// See [`Footprint::workspace`].
    pub workspace: Account,
    /// See [`Footprint::host`].
    pub host: Account,
}

/// Logits that exist at once are about this many, in whole tokens.
const LOGITS: usize = 4 << 20;
/// But at least these tokens, because each chunk adds to the head's whole gradient.
const CHUNK: usize = 256;
/// And no more than so many chunks: in a bf16 model each of them rounds that gradient, and many would lose of it what is
/// small beside the rest.
pub(super) const CHUNKS: usize = 16;
/// The elements of activations that [`Shape::new`] lets through are about this many: no size in bytes overflows.
const ELEMENTS: u128 = 1 << 56;

/// All lengths that follow from a configuration and a micro-batch.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    pub rows: usize,
    pub length: usize,
    pub tokens: usize,
    pub hidden: usize,
    pub layers: usize,
    /// heads * width
    pub q: usize,
    /// kv_heads * width
    pub kv: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub width: usize,
    pub ffn: usize,
    pub vocab: usize,
    /// Tokens whose logits exist at once.
    pub chunk: usize,
    /// Whether the gradient of logits takes their place.
    pub in_place: bool,
    pub recompute: Recompute,
    pub threads: usize,
}

/// The tokens of a micro-batch of `rows` sequences of `length` tokens.
///
/// # Errors
/// There are none, or more than 2^28.
pub(super) fn tokens(rows: usize, length: usize) -> Result<usize> {
    if rows == 0 || length == 0 {
        return Err(Error::config(format!(
            "a micro-batch of {rows} sequences of {length} tokens: both must be at least 1"
        )));
    }
    rows.checked_mul(length).filter(|&n| n <= 1 << 28).ok_or_else(|| {
        Error::config(format!(
            "a micro-batch of {rows} sequences of {length} tokens: at most 2^28 tokens are possible"
        ))
    })
}

impl Shape {
    /// Checks that such a model can be built.
    pub(super) fn new(
        config: &LlamaConfig,
        rows: usize,
        length: usize,
        recompute: Recompute,
        threads: usize,
    ) -> Result<Self> {
        config.validate()?;
        if length > config.context {
            return Err(Error::config(format!(
                "sequences of {length} tokens: the model's context is {}, so at most that many",
                config.context
            )));
        }
        let tokens = tokens(rows, length)?;
        if threads == 0 || threads > 4096 {
            return Err(Error::config(format!("{threads} compute threads: 1 to 4096 are possible")));
        }
        if config.head_dim > WIDEST_HEAD {
            return Err(Error::config(format!(
                "head_dim is {}: attention takes at most {WIDEST_HEAD}",
                config.head_dim
            )));
        }
        let (q, kv) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        let block = [config.hidden, q, kv, config.heads, config.ffn].map(|n| n as u128).iter().sum::<u128>();
        let elements = tokens as u128 * ((config.layers as u128 + 1) * block + config.vocab as u128);
        if elements > ELEMENTS {
            return Err(Error::config(format!(
                "a micro-batch of {rows} sequences of {length} tokens: with this model at most {} tokens are possible",
                ELEMENTS * tokens as u128 / elements
            )));
        }
        Ok(Shape {
            rows,
            length,
            tokens,
            hidden: config.hidden,
            layers: config.layers,
            q,
            kv,
            heads: config.heads,
            kv_heads: config.kv_heads,
            width: config.head_dim,
            ffn: config.ffn,
            vocab: config.vocab,
            chunk: (LOGITS / config.vocab).max(CHUNK).max(tokens.div_ceil(CHUNKS)).min(tokens),
            in_place: false,
            recompute,
            threads,
        })
    }

    /// Whether gradients are asked for.
    pub(super) fn has_backward(&self) -> bool {
        self.recompute != Recompute::NoBackward
    }

    /// Where the activations of block `layer` are.
    pub(super) fn slot(&self, layer: usize) -> usize {
        if self.recompute == Recompute::None { layer } else { 0 }
    }

    /// Where the residual stream before block `layer` is, or the last one.
    pub(super) fn stream(&self, layer: usize) -> usize {
        if self.has_backward() { layer } else { layer % 2 }
    }

    pub(super) fn cpu(&self) -> CpuShape {
        // Of the forward, and of the backward, which also sums over what the forward's products make, and over tokens.
        let inner = [self.hidden, self.q, self.ffn];
        let backward = [self.kv, self.vocab, self.tokens].into_iter().filter(|_| self.has_backward());
        CpuShape {
            threads: self.threads,
            rows: self.tokens,
            hidden: self.hidden,
            sequences: self.rows,
            length: self.length,
            heads: self.heads,
            kv_heads: self.kv_heads,
            width: self.width,
            depth: inner.into_iter().chain(backward).max().unwrap_or(0),
            backward: self.has_backward(),
        }
    }
}

/// Takes memory of a device: bytes, and whether it is the host that uses them.
pub(super) type DeviceMemory<'a> = dyn FnMut(usize, bool) -> collectives::Result<Memory> + 'a;

/// Gives buffers and counts their bytes; a planning one gives empty buffers.
pub(super) struct Allocator<'a> {
    accounts: Option<&'a Accounts>,
    counted: Footprint,
    device: Option<&'a mut DeviceMemory<'a>>,
    /// The buffers are a device's, also while planning.
    of_device: bool,
    /// What the device or the system refused first.
    refused: Option<collectives::Error>,
}

impl<'a> Allocator<'a> {
    pub(super) fn booking(accounts: &'a Accounts) -> Self {
        Allocator { accounts: Some(accounts), ..Allocator::planning() }
    }

    /// Memory of a device instead of the process's.
    pub(super) fn on_device(accounts: &'a Accounts, device: &'a mut DeviceMemory<'a>) -> Self {
        Allocator { device: Some(device), of_device: true, ..Allocator::booking(accounts) }
    }

    pub(super) fn planning() -> Self {
        let counted = Footprint::default();
        Allocator { accounts: None, counted, device: None, of_device: false, refused: None }
    }

    pub(super) fn planning_device() -> Self {
        Allocator { of_device: true, ..Allocator::planning() }
    }

    pub(super) fn counted(&self) -> Footprint {
        self.counted
    }

    /// Whether everything was there for a model of this shape.
    ///
    /// # Errors
    /// What was refused, what would be needed, and what needs less.
    pub(super) fn finish(self, shape: &Shape) -> Result<()> {
        let Some(refused) = self.refused else { return Ok(()) };
        let Footprint { activations, workspace, host, .. } = self.counted;
        let beside = if host > 0 { format!(", and copies {host} of the host") } else { String::new() };
        let less = match shape.recompute {
            Recompute::None => "a smaller micro-batch or recomputing activations",
            Recompute::Full | Recompute::NoBackward => "a smaller micro-batch",
        };
        Err(Error::config(format!(
            "{refused}; activations need {activations} bytes and workspace {workspace}{beside}, besides weights and \
             gradients: {less} needs less"
        )))
    }

    fn activation<E: Element>(&mut self, len: usize) -> Buffer<E> {
        let bytes = len * size_of::<E>();
        self.counted.activations += bytes;
        self.counted.arena += self.in_arena(bytes);
        self.take(self.accounts.map(|a| &a.activations), len, false)
    }

    pub(super) fn workspace<E: Element>(&mut self, len: usize) -> Buffer<E> {
        let bytes = len * size_of::<E>();
        self.counted.workspace += bytes;
        self.counted.arena += self.in_arena(bytes);
        self.take(self.accounts.map(|a| &a.workspace), len, false)
    }

    /// What a buffer of a device takes in an arena.
    fn in_arena(&self, bytes: usize) -> usize {
        if self.of_device { Arena::needed([bytes]) } else { 0 }
    }

    /// Workspace that the host reads and writes.
    fn host_workspace<E: Element>(&mut self, len: usize) -> Buffer<E> {
        let bytes = len * size_of::<E>();
        let (counted, account) = match self.of_device {
            true => (&mut self.counted.host, self.accounts.map(|a| &a.host)),
            false => (&mut self.counted.workspace, self.accounts.map(|a| &a.workspace)),
        };
        *counted += bytes;
        self.take(account, len, true)
    }

    fn take<E: Element>(&mut self, account: Option<&Account>, len: usize, host: bool) -> Buffer<E> {
        let account = account.filter(|_| self.refused.is_none() && len > 0);
        let Some(account) = account else { return Buffer::zeroed(0) };
        let taken = match &mut self.device {
            Some(device) => device(len * size_of::<E>(), host).map(Buffer::from_memory),
            None => Buffer::try_zeroed(len),
        };
        match taken {
            Ok(buffer) => buffer.booked(account),
            Err(error) => {
                self.refused = Some(error);
                Buffer::zeroed(0)
            }
        }
    }
}

/// What one block's backward needs besides its input. Shapes as in [`crate::ops::Ops`].
pub(super) struct BlockState<T: Float> {
    /// (n, Q) and (n, KV), after the rotary embedding.
    pub q: Buffer<T>,
    pub k: Buffer<T>,
    pub v: Buffer<T>,
    /// Attention's result (n, Q) and logarithms (rows, heads, length).
    pub attended: Buffer<T>,
    pub log_sums: Buffer<f32>,
    /// The residual stream between attention and feed-forward (n, H).
    pub middle: Buffer<T>,
    /// (n, F)
    pub gate: Buffer<T>,
    pub up: Buffer<T>,
}

/// Everything a Llama holds besides weights and gradients; `W` is the kernels' [`Work`](crate::ops::Ops::Work).
pub(super) struct State<T: Float, W: Float> {
    /// The residual stream before each block, and after the last (n, H); without a backward one goes in and one comes out.
    pub streams: Vec<Buffer<T>>,
    /// One for each block, or one for all where activations are not kept.
    pub blocks: Vec<BlockState<T>>,
    /// The gradient of the residual stream (n, H).
    pub d_stream: Buffer<W>,
    /// A norm's result and its gradient (n, H).
    pub normed: Buffer<W>,
    pub d_normed: Buffer<W>,
    /// The gradient of attention's result (n, Q), and of what goes in.
    pub d_attended: Buffer<W>,
    pub d_q: Buffer<W>,
    pub d_k: Buffer<W>,
    pub d_v: Buffer<W>,
    /// The feed-forward's activation, and its gradient (n, F).
    pub wide: Buffer<W>,
    /// (chunk, V); the gradient is empty where it takes the logits' place.
    pub logits: Buffer<W>,
    pub d_logits: Buffer<T>,
    /// (n)
    pub losses: Buffer<f32>,
    /// Losses on the host.
    pub host_losses: Buffer<f32>,
    pub tokens: Buffer<u32>,
    pub targets: Buffer<u32>,
    /// `token << 32 | position`, ascending, and where it is sorted.
    pub order: Buffer<u64>,
    pub host_order: Buffer<u64>,
    /// (length, width)
    pub angles: Buffer<f32>,
}

impl<T: Float, W: Float> State<T, W> {
    /// The one list of what a model holds.
    pub(super) fn new(s: &Shape, a: &mut Allocator<'_>) -> Self {
        let n = s.tokens;
        let (streams, kept) = match s.recompute {
            Recompute::None => (s.layers + 1, s.layers),
            Recompute::Full => (s.layers + 1, 1),
            Recompute::NoBackward => (2, 1),
        };
        // Tokens that gradients are held of.
        let d = if s.has_backward() { n } else { 0 };
        let d_logits = if s.has_backward() && !s.in_place { s.chunk * s.vocab } else { 0 };
        State {
            streams: (0..streams).map(|_| a.activation(n * s.hidden)).collect(),
            blocks: (0..kept)
                .map(|_| BlockState {
                    q: a.activation(n * s.q),
                    k: a.activation(n * s.kv),
                    v: a.activation(n * s.kv),
                    attended: a.activation(n * s.q),
                    log_sums: a.activation(n * s.heads),
                    middle: a.activation(n * s.hidden),
                    gate: a.activation(n * s.ffn),
                    up: a.activation(n * s.ffn),
                })
                .collect(),
            d_stream: a.workspace(d * s.hidden),
            normed: a.workspace(n * s.hidden),
            d_normed: a.workspace(d * s.hidden),
            d_attended: a.workspace(d * s.q),
            d_q: a.workspace(d * s.q),
            d_k: a.workspace(d * s.kv),
            d_v: a.workspace(d * s.kv),
            wide: a.workspace(n * s.ffn),
            logits: a.workspace(s.chunk * s.vocab),
            d_logits: a.workspace(d_logits),
            losses: a.workspace(n),
            host_losses: a.host_workspace(n),
            tokens: a.workspace(n),
            targets: a.workspace(n),
            order: a.workspace(d),
            host_order: a.host_workspace(d),
            angles: a.workspace(s.length * s.width),
        }
    }
}

/// The workspace of the CPU's kernels.
pub(super) fn cpu_memory(s: &Shape, a: &mut Allocator<'_>) -> CpuMemory {
    let cpu = s.cpu();
    CpuMemory { words: a.workspace(cpu.words()), partial: a.workspace(cpu.partial()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::llama::footprint;
    use collectives::DType;

    fn shape(name: &str, rows: usize, length: usize, recompute: Recompute) -> Shape {
        Shape::new(&LlamaConfig::preset(name).unwrap(), rows, length, recompute, 1).unwrap()
    }

    #[test]
    fn the_head_s_gradient_is_added_up_in_a_few_pieces() {
        for name in LlamaConfig::PRESETS {
            let context = LlamaConfig::preset(name).unwrap().context;
            for rows in [1, 3, 16, 100, 1000] {
                let shape = shape(name, rows, context.min(2048), Recompute::None);
                assert!(shape.tokens.div_ceil(shape.chunk) <= CHUNKS, "{shape:?}");
            }
        }
        // No larger than they have to be, which would take memory.
        let chunk = |rows| shape("llama-3.2-1b", rows, 2048, Recompute::None).chunk;
        assert_eq!([1, 2, 16].map(chunk), [256, 256, 2048]);
    }

    #[test]
    fn memory_that_is_refused_is_told_with_what_needs_less() {
        let refusal = |recompute| {
            let shape = shape("nano", 1, 8, recompute);
            let accounts = Accounts::default();
            let mut none = |_, _| Err(collectives::Error::system("take memory", "there is none"));
            let mut allocator = Allocator::on_device(&accounts, &mut none);
            State::<f32, f32>::new(&shape, &mut allocator);
            allocator.finish(&shape).unwrap_err().to_string()
        };
        // Losses (f32) and the order of tokens (u64).
        let [none, full] = [Recompute::None, Recompute::Full].map(refusal);
        assert!(none.contains(", and copies 96 of the host, besides"), "{none}");
        assert!(none.ends_with(": a smaller micro-batch or recomputing activations needs less"), "{none}");
        assert!(full.ends_with(": a smaller micro-batch needs less"), "{full}");
    }

    #[test]
    fn footprints_of_large_models_are_arithmetic() {
        let config = LlamaConfig::preset("llama-3.1-405b").unwrap();
        let of = |recompute| footprint(&config, 1, 8192, DType::Bf16, recompute, 1).unwrap();
        let (none, full) = (of(Recompute::None), of(Recompute::Full));
        // One residual stream for each block and one after the last; one block's own activations instead of 126.
        let stream = 8192 * 16384 * 2;
        let own = (none.activations - 127 * stream) / 126;
        assert_eq!(full.activations, 127 * stream + own);
        // One stream goes into a block, and one comes out.
        let alone = of(Recompute::NoBackward);
        assert_eq!(alone.activations, 2 * stream + own);
        assert!(alone.workspace < full.workspace);
        // Of attention and norms each thread has only what a forward works in, too.
        let small = LlamaConfig::preset("llama-3.2-1b").unwrap();
        let of = |recompute, rows, threads| {
            footprint(&small, rows, 1 << 17, DType::F32, recompute, threads).unwrap().workspace
        };
        let a_thread = |recompute| (of(recompute, 8, 64) - of(recompute, 8, 1)) / 63;
        let [forward, both] = [Recompute::NoBackward, Recompute::Full].map(a_thread);
        assert!(both > 250 << 20 && forward < both / 2, "{forward} and {both} bytes a thread");
        // And nothing where there are more threads than query heads.
        for recompute in [Recompute::NoBackward, Recompute::Full] {
            assert_eq!(of(recompute, 1, 64), of(recompute, 1, 32));
        }
        // Attention's share grows linearly.
        let longer = footprint(&config, 1, 16384, DType::Bf16, Recompute::None, 1).unwrap();
        assert_eq!(longer.activations, 2 * none.activations);
        assert!(longer.workspace < 3 * none.workspace);
    }
}
