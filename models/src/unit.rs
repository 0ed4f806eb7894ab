//! What a trainer sees of a model: units with named tensors, and forward and backward of one unit at a time.
//!
//! A unit is what is gathered, computed and released together (the embedding, each block, the head). The model
//! owns activations and workspace; weights and gradients belong to the caller and are lent for one call, so
//! the model knows no ranks, shards or buckets.

use collectives::{Buffer, Element, Float, View, ViewMut};

/// One weight tensor of a unit.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorSpec {
    /// Its name in a Hugging Face checkpoint.
    pub name: String,
    /// Row-major shape, as in a Hugging Face checkpoint: a linear layer is (out, in).
    pub shape: Vec<usize>,
    /// Whether weight decay applies.
    pub decay: bool,
    /// How a new model starts.
    pub init: Init,
}

/// How a tensor starts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// All ones.
    Ones,
    /// Normal with mean 0 and this standard deviation.
    Normal(f32),
    /// The same, but for one row of zeros: that of the token which padding is.
    Padded {
        /// The standard deviation of all other rows.
        deviation: f32,
        /// The row of zeros.
        row: usize,
    },
}

impl Init {
    /// The same with another standard deviation, where there is one.
    pub fn with_deviation(self, deviation: f32) -> Self {
        match self {
            Init::Ones => Init::Ones,
            Init::Normal(_) => Init::Normal(deviation),
            Init::Padded { row, .. } => Init::Padded { deviation, row },
        }
    }
}

impl TensorSpec {
    /// Elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What is gathered, computed and released together.
#[derive(Clone, Debug, PartialEq)]
pub struct Unit {
    /// A short name for reports: `embed`, `block.3`, `head`.
    pub name: String,
    /// Its own tensors.
    pub tensors: Vec<TensorSpec>,
    /// Other units whose tensors its forward and backward read, and to whose gradients its backward
    /// contributes (the head of a tied model uses the embedding).
    pub uses: Vec<usize>,
    /// Whether its backward reads its own weights; where it does not, they need not be gathered for that.
    pub backward_reads: bool,
}

/// Weights as lent to the model: tensor `tensor` of unit `unit`, row-major. The model asks for each when it comes to it,
/// between two computations, so that who lends may do something small meanwhile.
pub trait Weights<T: Element>: Sync {
    /// Only the current unit and those it `uses` may be asked for.
    fn tensor(&self, unit: usize, tensor: usize) -> View<'_, T>;
}

/// Gradients as lent to the model, which asks for them as for [`Weights`].
pub trait Gradients<T: Element>: Send {
    /// Only the current unit and those it `uses` may be asked for. A unit's first contribution in a backward
    /// pass overwrites (`=`), later ones add (`+=`); what is there before the first is arbitrary.
    fn tensor(&mut self, unit: usize, tensor: usize) -> ViewMut<'_, T>;

    /// The model has made its last contribution to this tensor in this backward pass, so that its reduction
    /// may start while the unit's backward goes on. Called once a tensor and backward pass.
    fn ready(&mut self, unit: usize, tensor: usize);
}

/// All of them, by unit and tensor.
impl<T: Element> Weights<T> for Vec<Vec<Buffer<T>>> {
    fn tensor(&self, unit: usize, tensor: usize) -> View<'_, T> {
        self[unit][tensor].view()
    }
}

/// As [`Weights`]; nobody waits for one alone.
impl<T: Element> Gradients<T> for Vec<Vec<Buffer<T>>> {
    fn tensor(&mut self, unit: usize, tensor: usize) -> ViewMut<'_, T> {
        self[unit][tensor].view_mut()
    }

    fn ready(&mut self, _: usize, _: usize) {}
}

/// One micro-batch: `tokens` and `targets` are (rows, length), row-major.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Inputs.
    pub tokens: &'a [u32],
    /// What each position should predict.
    pub targets: &'a [u32],
    /// Sequences.
    pub rows: usize,
    /// Tokens of a sequence.
    pub length: usize,
}

/// A model of consecutive units with hand-written forward and backward.
///
/// One micro-batch is `begin`, `forward_unit(0..n-1)`, then `backward_unit(n-1)` down to `backward_unit(0)`.
/// The last unit's backward includes its forward and the loss, because the fused cross-entropy never holds all
/// logits; its `forward_unit` is for evaluation, where no backward follows.
pub trait Model<T: Float>: Send {
    /// The units in forward order.
    fn units(&self) -> &[Unit];

    /// Starts a micro-batch, at most as large as the model was built for. Every token's loss gradient is
    /// multiplied by `gradient_scale` (usually one over the tokens of the whole step).
    fn begin(&mut self, batch: &Batch<'_>, gradient_scale: f32);

    /// Forward of one unit; reads only `weights` of this unit and those it uses.
    fn forward_unit(&mut self, unit: usize, weights: &dyn Weights<T>);

    /// Backward of one unit; see [`Gradients::tensor`] for who overwrites and who adds.
    fn backward_unit(&mut self, unit: usize, weights: &dyn Weights<T>, gradients: &mut dyn Gradients<T>);

    /// The losses of the micro-batch's tokens in their order, valid after the last unit's forward or backward. A device
    /// may have to be waited for.
    fn losses(&mut self) -> &[f32];

    /// Their sum.
    fn loss(&mut self) -> f64 {
        self.losses().iter().map(|&loss| f64::from(loss)).sum()
    }

    /// Logits at one position (`row * length + column`) after `forward_unit` of all units but the last;
    /// `out` holds the vocabulary. Reads weights of the last unit and those it uses.
    fn logits(&mut self, position: usize, weights: &dyn Weights<T>, out: &mut [f32]);

    /// Fails once something has failed that computes the model: nothing that has come of it since the last time is true
    /// then. To be asked before results are used.
    ///
    /// # Errors
    /// What a device has refused.
    fn check(&self) -> collectives::Result<()> {
        Ok(())
    }

    /// Runs `work`, which is not the model's, on one of the model's compute threads if there are several: what it
    /// divides with rayon's `join` then takes all of them.
    fn install(&self, work: &mut (dyn FnMut() + Send)) {
        work();
    }
}
