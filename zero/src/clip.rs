//! The global gradient norm and loss: the same bits for every stage, bucketing and number of ranks that hold it.
//!
//! Each rank sums squares in f64 over the fixed blocks of its shard; the blocks' sums are gathered and added tensor by
//! tensor, whoever computed them: a block's place in its tensor alone says when it is added to what. While the host adds,
//! a device waits.

use crate::error::Result;
use crate::grads::Grads;
use crate::hands::Hands;
use crate::kernels::Activity;
use crate::plan::{NORM_BLOCK, Plan};
use collectives::{Account, Buffer, Communicator, Float};
use std::ops::Range;

/// Partial sums of all ranks, kept between steps.
pub struct Norm {
    /// (world, 1 + micro-batches + blocks of a rank): what each rank did, its losses, its blocks' sums of squares.
    partials: Buffer<f64>,
    /// f64 values of one rank.
    stride: usize,
    /// This rank's, before those of its blocks.
    before: Vec<f64>,
    /// Of each tensor, in their order.
    tensors: Vec<Place>,
    /// What the squares of each come to.
    totals: Vec<f64>,
}

/// Where the sums of a tensor's blocks lie.
struct Place {
    /// Its blocks among those of its bucket.
    blocks: Range<usize>,
    /// Blocks of the bucket that each rank has, and the place of their first among the rank's values.
    of_rank: usize,
    first: usize,
}

/// Blocks that one thread adds as fast as several would.
const GRAIN: usize = 1 << 14;

/// What all ranks have to do alike in a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Terms {
    /// Tokens of a micro-batch.
    pub tokens: u32,
    /// The learning rate.
    pub lr: f32,
}

impl Terms {
    /// As a number that nobody computes with.
    fn pack(self) -> f64 {
        f64::from_bits(u64::from(self.tokens) << 32 | u64::from(self.lr.to_bits()))
    }

    fn unpack(packed: f64) -> Self {
        let bits = packed.to_bits();
        Terms { tokens: (bits >> 32) as u32, lr: f32::from_bits(bits as u32) }
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
    /// Values that each rank contributes.
    pub fn stride(plan: &Plan) -> usize {
        let blocks = plan.buckets().map(|(u, b)| plan.layout[u].bucket(b).shard_len() / NORM_BLOCK);
        Norm::before(plan) + blocks.sum::<usize>()
    }

    /// Of these, those before its blocks'.
    fn before(plan: &Plan) -> usize {
        1 + plan.config.accumulate
    }

    /// Bytes of all ranks' values.
    pub fn bytes(plan: &Plan) -> usize {
        plan.world * Norm::stride(plan) * size_of::<f64>()
    }

    /// Memory on `account`.
    pub fn new(plan: &Plan, comm: &Communicator, account: &Account) -> Result<Self> {
        let stride = Norm::stride(plan);
        let before = vec![0.0; Norm::before(plan)];
        let (mut tensors, mut first) = (Vec::new(), before.len());
        for (u, b) in plan.buckets() {
            let bucket = plan.layout[u].bucket(b);
            let of_rank = bucket.shard_len() / NORM_BLOCK;
            tensors.extend(bucket.tensors().iter().map(|tensor| {
                let end = (tensor.offset + tensor.len).div_ceil(NORM_BLOCK);
                Place { blocks: tensor.offset / NORM_BLOCK..end, of_rank, first }
            }));
            first += of_rank;
        }
        let totals = vec![0.0; tensors.len()];
        let partials = comm.alloc(plan.world * stride)?.booked(account);
        Ok(Norm { partials, stride, before, tensors, totals })
    }

    /// The loss of a micro-batch of this rank in the step in hand.
    pub fn set_loss(&mut self, micro_batch: usize, loss: f64) {
        self.before[1 + micro_batch] = loss;
    }

    /// This rank's part of the norm: the sums of squares of its shards of the reduced gradient.
    pub(crate) fn squares<T: Float>(&mut self, hands: &mut Hands<'_, T>, grads: &Grads<T>) -> Result<()> {
        let Hands { plan, model, kernels, .. } = hands;
        let partials = &mut self.partials;
        let mut next = plan.rank * self.stride + self.before.len();
        let mut done = Ok(());
        model.install(&mut || {
            done = plan.buckets().try_for_each(|(u, b)| {
                let blocks = plan.layout[u].bucket(b).shard_len() / NORM_BLOCK;
                let out = partials.view_mut().slice(next..next + blocks);
                next += blocks;
                kernels.squares(grads.shard(plan, u, b), out)
            });
        });
        done
    }

    /// The norm of the reduced gradient over all ranks, after their [`squares`](Self::squares), and the sum of what they
    /// gave as losses.
    pub(crate) fn global<T: Float>(&mut self, hands: &mut Hands<'_, T>, terms: Terms) -> Result<Global> {
        let (mine, partials, before) = (hands.plan.rank * self.stride, &mut self.partials, self.before.len());
        self.before[0] = terms.pack();
        hands.kernels.put(&self.before, partials.view_mut().slice(mine..mine + before))?;
        hands.communicate(Activity::Optimizer, |comm| Ok(comm.all_gather_in_place(&mut *partials)?))?;

        let Hands { model, comm, kernels, .. } = hands;
        let partials = kernels.numbers(partials.view());
        // Between devices, calls that were given up end like others, with whatever was there: only who carries them knows.
        comm.progress()?;
        let partials = partials?;
        let of_ranks = |at: usize| partials.iter().skip(at).step_by(self.stride);
        let said = of_ranks(1).map(|&loss| without(loss));
        let without = said.enumerate().find_map(|(rank, said)| said.map(|why| (rank, why)));
        let loss = (1..before).flat_map(of_ranks).sum();
        let mut terms = of_ranks(0);
        let unlike = terms.next().and_then(|first| {
            // By their bits: a learning rate may be no number.
            let rank = 1 + terms.position(|other| other.to_bits() != first.to_bits())?;
            Some((rank, [*first, partials[rank * self.stride]].map(Terms::unpack)))
        });
        let (tensors, totals, stride) = (&self.tensors, &mut self.totals, self.stride);
        model.install(&mut || add_up(tensors, totals, &|place| place.total(partials, stride)));
        let sum: f64 = self.totals.iter().sum();
        Ok(Global { loss, without, unlike, norm: f64::sqrt(sum) })
    }
}

impl Place {
    /// The sum over the tensor's blocks, rank by rank, without what is padding alone.
    fn total(&self, partials: &[f64], stride: usize) -> f64 {
        let mut squares = Lanes::default();
        let Range { start: mut at, end } = self.blocks;
        while at < end {
            let (rank, of_rank) = (at / self.of_rank, at % self.of_rank);
            let here = (end - at).min(self.of_rank - of_rank);
            squares.add(&partials[rank * stride + self.first + of_rank..][..here]);
            at += here;
        }
        squares.total()
    }
}

/// The total of each tensor, by as many threads as there are: of large models on many ranks there are millions of blocks.
fn add_up(tensors: &[Place], totals: &mut [f64], total: &(impl Fn(&Place) -> f64 + Sync)) {
    let blocks: usize = tensors.iter().map(|place| place.blocks.len()).sum();
    if tensors.len() > 1 && blocks > GRAIN && rayon::current_thread_index().is_some() {
        let middle = tensors.len() / 2;
        let ((low, high), (first, second)) = (tensors.split_at(middle), totals.split_at_mut(middle));
        rayon::join(|| add_up(low, first, total), || add_up(high, second, total));
        return;
    }
    totals.iter_mut().zip(tensors).for_each(|(to, place)| *to = total(place));
}

/// Lanes of a tensor's sum. As many additions are under way at once, where one sum of all would wait for each.
const LANES: usize = 16;

/// The sum over the blocks of one tensor: block i goes to lane i % LANES, and the lanes are added in their order.
#[derive(Default)]
struct Lanes {
    sums: [f64; LANES],
    /// Blocks that were added.
    blocks: usize,
}

impl Lanes {
    /// Adds the next blocks, however the tensor is cut.
    fn add(&mut self, blocks: &[f64]) {
        let lane = self.blocks % LANES;
        let (row, rest) = blocks.split_at(blocks.len().min(LANES - lane));
        add(&mut self.sums[lane..], row);
        let rows = rest.chunks_exact(LANES);
        let last = rows.remainder();
        rows.for_each(|row| add(&mut self.sums, row));
        add(&mut self.sums, last);
        self.blocks += blocks.len();
    }

    fn total(&self) -> f64 {
        self.sums.iter().sum()
    }
}

/// sums += x, as far as there is x
fn add(sums: &mut [f64], x: &[f64]) {
    sums.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
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

    #[test]
    fn threads_change_no_bit_of_a_norm() {
        // 40 tensors of up to 3000 blocks, one after the other in one bucket of three ranks.
        let lengths = (0..40).map(|i| 1 + i * 7919 % 3000);
        let ends = lengths.scan(0, |end, len| {
            *end += len;
            Some(*end - len..*end)
        });
        let blocks: Vec<Range<usize>> = ends.collect();
        let (of_rank, first) = (blocks[39].end.div_ceil(3), 5);
        let stride = first + of_rank;
        let place = |blocks| Place { blocks, of_rank, first };
        let tensors: Vec<Place> = blocks.into_iter().map(place).collect();
        assert!(3 * of_rank > 2 * GRAIN, "enough for several threads");
        let partials: Vec<f64> = (0..3 * stride).map(|i| (i as f64).sin().abs()).collect();
        let of = |threads: usize| {
            let mut totals = vec![0.0; tensors.len()];
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| add_up(&tensors, &mut totals, &|place| place.total(&partials, stride)));
            totals.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        let expected = tensors.iter().map(|tensor| {
            let mut lanes = [0.0; LANES];
            for (i, block) in tensor.blocks.clone().enumerate() {
                lanes[i % LANES] += partials[block / of_rank * stride + first + block % of_rank];
            }
            lanes.iter().sum::<f64>().to_bits()
        });
        let expected: Vec<u64> = expected.collect();
        for threads in [1, 2, 3] {
            assert!(of(threads) == expected, "{threads} threads");
        }
    }

    #[test]
    fn cuts_of_a_tensor_change_no_bit_of_its_sum() {
        for blocks in [0, 1, 15, 16, 17, 100] {
            let values: Vec<f64> = (0..blocks).map(|i| f64::from(i).exp().sin().abs()).collect();
            let mut lanes = [0.0; LANES];
            values.iter().enumerate().for_each(|(i, x)| lanes[i % LANES] += x);
            let expected = lanes.iter().sum::<f64>().to_bits();
            for cut in [1, 3, 16, 33, 200] {
                let mut whole = Lanes::default();
                values.chunks(cut).for_each(|part| whole.add(part));
                assert_eq!(whole.total().to_bits(), expected, "{blocks} blocks in parts of {cut}");
            }
        }
    }
}
