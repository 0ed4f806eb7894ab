//! The global gradient norm and loss: the same bits for every stage, bucketing and number of ranks that hold it.
//!
//! Each rank sums squares in f64 over the fixed blocks of its shard, and those sums without rounding. What the ranks have
//! come to is gathered and added: with nothing rounded, the bits do not tell where one shard ends and the next begins.

use crate::error::Result;
use crate::exact::{ExactSum, WORDS};
use crate::grads::Grads;
use crate::hands::Hands;
use crate::kernels::Activity;
use crate::plan::Plan;
use collectives::{Account, Buffer, Communicator, Float};

/// What the ranks tell each other in a step, kept between steps.
pub struct Norm {
    /// (world, words of a sum + 1 + micro-batches): a rank's sum of squares, what it did, and its losses as bits.
    told: Buffer<u64>,
    /// Words of one rank.
    stride: usize,
    /// This rank's, after its sum.
    after: Vec<u64>,
}

/// What all ranks have to do alike in a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Terms {
    /// Tokens of a micro-batch.
    pub tokens: u32,
    /// The learning rate.
    pub lr: f32,
}

impl Terms {
    fn pack(self) -> u64 {
        u64::from(self.tokens) << 32 | u64::from(self.lr.to_bits())
    }

    fn unpack(packed: u64) -> Self {
        Terms { tokens: (packed >> 32) as u32, lr: f32::from_bits(packed as u32) }
    }
}

/// The loss of a rank that has none: no number, and none that a computation gives; with its lowest 9 bits it says why.
const NO_LOSS: u64 = 0x7ff8_6e6f_6c6f_7400;

/// Of these, the one that says that a number follows.
const STOP: u64 = 0x100;

/// What a rank gives that has no loss: it failed, or it stops for a reason with this number.
pub fn no_loss(stop: Option<u8>) -> f64 {
    f64::from_bits(NO_LOSS | stop.map_or(0, |why| STOP | u64::from(why)))
}

/// What a rank said by [`no_loss`], if that is what it gave.
fn without(loss: f64) -> Option<Option<u8>> {
    let why = loss.to_bits() ^ NO_LOSS;
    (why < 2 * STOP).then(|| (why >= STOP).then_some(why as u8))
}

/// What the ranks found together.
pub struct Global {
    /// The sum of all losses, in the order of micro-batches: the first of every rank, then their second.
    pub loss: f64,
    /// The first rank without a loss, and the number that it gave for it, if it did.
    pub without: Option<(usize, Option<u8>)>,
    /// The first rank that did otherwise than rank 0, and what both did.
    pub unlike: Option<(usize, [Terms; 2])>,
    /// The Euclidean norm of the whole gradient.
    pub norm: f64,
}

impl Norm {
    /// Words that each rank contributes.
    pub fn stride(plan: &Plan) -> usize {
        WORDS + 1 + plan.config.accumulate
    }

    /// Bytes of all ranks' words.
    pub fn bytes(plan: &Plan) -> usize {
        plan.world * Norm::stride(plan) * size_of::<u64>()
    }

    /// Memory on `account`.
    pub fn new(plan: &Plan, comm: &Communicator, account: &Account) -> Result<Self> {
        let stride = Norm::stride(plan);
        let told = comm.alloc(plan.world * stride)?.booked(account);
        Ok(Norm { told, stride, after: vec![0; stride - WORDS] })
    }

    /// The loss of a micro-batch of this rank in the step in hand.
    pub fn set_loss(&mut self, micro_batch: usize, loss: f64) {
        self.after[1 + micro_batch] = loss.to_bits();
    }

    /// This rank's part of the norm: the sum of squares of its shards of the reduced gradient.
    pub(crate) fn squares<T: Float>(&mut self, hands: &mut Hands<'_, T>, grads: &Grads<T>) -> Result<()> {
        let Hands { plan, model, kernels, .. } = hands;
        let mine = plan.rank * self.stride;
        let mut sum = self.told.view_mut().slice(mine..mine + WORDS);
        kernels.clear_words(sum.reborrow())?;
        let mut done = Ok(());
        model.install(&mut || {
            done = plan
                .buckets()
                .try_for_each(|(u, b)| kernels.squares(grads.shard(plan, u, b), sum.reborrow()));
        });
        done
    }

    /// The norm of the reduced gradient over all ranks, after their [`squares`](Self::squares), and the sum of what they
    /// gave as losses.
    pub(crate) fn global<T: Float>(&mut self, hands: &mut Hands<'_, T>, terms: Terms) -> Result<Global> {
        let (told, after, stride) = (&mut self.told, &mut self.after, self.stride);
        let mine = hands.plan.rank * stride;
        after[0] = terms.pack();
        hands.kernels.put(after, told.view_mut().slice(mine + WORDS..mine + stride))?;
        hands.communicate(Activity::Optimizer, |comm| Ok(comm.all_gather_in_place(&mut *told)?))?;

        let told = hands.kernels.numbers(told.view());
        // Between devices, calls that were given up end like others, with whatever was there: only who carries them knows.
        hands.comm.progress()?;
        let told = told?;
        let of_ranks = |at: usize| told.iter().skip(WORDS + at).step_by(stride);
        let losses = |micro_batch: usize| of_ranks(1 + micro_batch).map(|&bits| f64::from_bits(bits));
        let without = losses(0).map(without).enumerate().find_map(|(rank, said)| said.map(|why| (rank, why)));
        let loss = (0..stride - WORDS - 1).flat_map(losses).sum();
        let first = told[WORDS];
        // By their bits: a learning rate may be no number.
        let unlike = of_ranks(0).position(|&other| other != first);
        let unlike = unlike.map(|rank| (rank, [first, told[rank * stride + WORDS]].map(Terms::unpack)));
        let mut squares = ExactSum::ZERO;
        told.chunks_exact(stride).for_each(|rank| squares.merge(&rank[..WORDS]));
        Ok(Global { loss, without, unlike, norm: squares.total().sqrt() })
    }
}

/// The factor that brings a gradient of this norm down to `clip`; PyTorch's, its epsilon included.
pub fn factor(norm: f64, clip: Option<f32>) -> f32 {
    match clip {
        Some(most) => (f64::from(most) / (norm + 1e-6)).min(1.0) as f32,
        None => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_loss_is_none_that_a_computation_gives() {
        for why in [None, Some(0), Some(15), Some(255)] {
            assert_eq!(without(no_loss(why)), Some(why));
            assert!(no_loss(why).is_nan());
        }
        for loss in [0.0, -1.0, f64::NAN, -f64::NAN, f64::INFINITY, f64::INFINITY - f64::INFINITY] {
            assert_eq!(without(loss), None, "{loss}");
        }
    }

    /// PyTorch's `clip_grad_norm_`: a gradient that is short enough is not made longer.
    #[test]
    fn only_gradients_above_the_clip_are_brought_down_to_it() {
        for norm in [0.0, 1e-9, 0.5, 2.0 - 1e-5] {
            assert_eq!(factor(norm, Some(2.0)), 1.0, "{norm}");
        }
        for norm in [2.5, 8.0, 1e20] {
            let clipped = f64::from(factor(norm, Some(2.0))) * norm;
            assert!((clipped - 2.0).abs() < 1e-5, "{norm} to {clipped}");
        }
        for norm in [0.0, 0.5, 1e20] {
            assert_eq!(factor(norm, None), 1.0, "{norm}");
        }
    }
}
