//! Optimizer state of what this rank updates, and the update itself.

pub(crate) mod adamw;

pub use adamw::AdamW;

use crate::error::{Error, Result};
use crate::grads::Grads;
use crate::hands::Hands;
use crate::kernels::{Activity, FLOATS, Kernels, Update};
use crate::params::Params;
use crate::plan::{Home, Plan};
use crate::trainer::{Kept, StateSource};
use collectives::{Account, Buffer, Float, View};
use models::{TensorSpec, Unit};
use std::ops::Range;

/// Where initial weights come from: fills the elements `range` of a tensor. Called for the tensors in order, part by part, and
/// only for the ranges that this rank keeps. All ranks have to give the same.
pub type Source<'a> =
    dyn FnMut(&TensorSpec, Range<usize>, &mut [f32]) -> std::result::Result<(), String> + 'a;

/// The beginning of a digest by which ranks that all keep everything are compared; none where nobody is.
fn compared(plan: &Plan) -> Option<u64> {
    (plan.world > 1 && !plan.config.stage.shards_optimizer).then_some(0)
}

/// Of what came before, and these. It takes one thread longer than much else that is done with them.
fn digest_of(before: u64, values: &[f32]) -> u64 {
    let one = |digest: u64, x: &f32| {
        (digest.rotate_left(5) ^ u64::from(x.to_bits())).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    };
    values.iter().fold(before, one)
}

/// State of one rank's optimizer.
pub struct Optimizer {
    /// Per unit, per bucket.
    units: Vec<Vec<State>>,
    /// Whether moments have come from elsewhere that are not known to be all of a state.
    halfway: bool,
    /// The bucket in hand: where its tensors are, and what each keeps of its weights.
    ranges: Vec<(Range<usize>, f32)>,
}

/// State of the owned part of one bucket.
struct State {
    /// f32 weights, unless the parameters are f32 themselves.
    master: Option<Buffer<f32>>,
    m: Buffer<f32>,
    v: Buffer<f32>,
}

impl Optimizer {
    /// Zeroed state on `account`.
    pub fn new<T: Float>(plan: &Plan, kernels: &mut dyn Kernels<T>, account: &Account) -> Result<Self> {
        let mut units: Vec<Vec<State>> = (0..plan.layout.len()).map(|_| Vec::new()).collect();
        for (u, b) in plan.buckets() {
            let owned = plan.owned(u, b).len();
            let mut zeros = || Ok::<_, Error>(kernels.state(owned)?.booked(account));
            let master = if plan.keeps_master() { Some(zeros()?) } else { None };
            units[u].push(State { master, m: zeros()?, v: zeros()? });
        }
        let most = plan.buckets().map(|(u, b)| plan.layout[u].bucket(b).tensors().len()).max();
        Ok(Optimizer { units, halfway: false, ranges: Vec::with_capacity(most.unwrap_or(0)) })
    }

    /// Sets the owned weights from `source` and publishes them; gives back a digest of what came, where others have the same.
    pub fn start<T: Float>(
        &mut self,
        plan: &Plan,
        units: &[Unit],
        kernels: &mut dyn Kernels<T>,
        params: &mut Params<T>,
        source: &mut Source<'_>,
    ) -> Result<Option<u64>> {
        let mut digest = compared(plan);
        // A tensor can be larger than memory has room for twice; a chunk is worth drawing by several threads.
        const CHUNK: usize = 1 << 20;
        let longest = units.iter().flat_map(|unit| &unit.tensors).map(TensorSpec::len).max();
        let mut chunk = vec![0f32; CHUNK.min(longest.unwrap_or(0))];
        for (u, b) in plan.buckets() {
            let mut param = params.owned_mut(plan, u, b);
            let state = &mut self.units[u][b];
            for (tensor, of_tensor, of_owned) in plan.owned_pieces(u, b, CHUNK) {
                let spec = &units[u].tensors[tensor];
                let out = &mut chunk[..of_tensor.len()];
                source(spec, of_tensor, out).map_err(|why| Error::Init { tensor: spec.name.clone(), why })?;
                digest = digest.map(|before| digest_of(before, out));
                let master = state.master.as_mut().map(|master| master.view_mut().slice(of_owned.clone()));
                kernels.set(out, master, param.reborrow().slice(of_owned))?;
            }
            if plan.config.stage.shards_optimizer {
                params.publish(u, b)?;
            }
        }
        Ok(digest)
    }

    /// The update of this number of everything owned, bucket by bucket, each published while the next is updated.
    /// `gradient_factor` is as in [`Coefficients`](models::cuda::Coefficients).
    pub(crate) fn update<T: Float>(
        &mut self,
        hands: &mut Hands<'_, T>,
        params: &mut Params<T>,
        grads: &Grads<T>,
        number: u64,
        lr: f32,
        gradient_factor: f32,
    ) -> Result<()> {
        let (plan, model) = (hands.plan, hands.model);
        let c = plan.config.adamw.coefficients(number, lr, gradient_factor);
        let mut following = plan.buckets().skip(1);
        for (u, b) in plan.buckets() {
            let tensors = &model.units()[u].tensors;
            self.ranges.clear();
            for (tensor, _, range) in plan.owned_pieces(u, b, usize::MAX) {
                let keep = if tensors[tensor].decay { c.keep } else { 1.0 };
                // Neighbours without padding between are one range, and one launch on a device.
                match self.ranges.last_mut() {
                    Some((last, same)) if last.end == range.start && *same == keep => last.end = range.end,
                    _ => self.ranges.push((range, keep)),
                }
            }
            let State { master, m, v } = &mut self.units[u][b];
            let mut param = params.owned_mut(plan, u, b);
            let next = following.next().map(|(u, b)| grads.owned(plan, u, b));
            let mut done = Ok(());
            let kernels = &mut *hands.kernels;
            model.install(&mut || {
                let update = Update {
                    coefficients: &c,
                    gradient: grads.owned(plan, u, b),
                    master: master.as_mut().map(Buffer::view_mut),
                    m: m.view_mut(),
                    v: v.view_mut(),
                    param: param.reborrow(),
                    ranges: &self.ranges,
                };
                done = kernels.update(update, next);
            });
            done?;
            // Of stage 3 nobody holds anything that would have to be told.
            if plan.config.stage.shards_optimizer && plan.weights[u] == Home::Whole {
                // What was published before moves on only when someone looks.
                hands.communicate(Activity::Optimizer, |comm| {
                    params.publish(u, b)?;
                    Ok(comm.progress()?)
                })?;
            }
        }
        Ok(())
    }

    /// The moments of what is owned from `source`; gives back a digest of what came, where others have the same, or why it did
    /// not. Nothing goes on before [`go_on`](Self::go_on).
    pub fn load<T: Float>(
        &mut self,
        plan: &Plan,
        units: &[Unit],
        kernels: &mut dyn Kernels<T>,
        source: &mut StateSource<'_>,
    ) -> Result<std::result::Result<Option<u64>, String>> {
        self.halfway = true;
        let mut digest = compared(plan);
        let mut chunk = vec![0f32; FLOATS];
        for kept in [Kept::FirstMoments, Kept::SecondMoments] {
            for (u, b) in plan.buckets() {
                let State { m, v, .. } = &mut self.units[u][b];
                let state = if kept == Kept::FirstMoments { m } else { v };
                for (tensor, of_tensor, of_owned) in plan.owned_pieces(u, b, FLOATS) {
                    let spec = &units[u].tensors[tensor];
                    let out = &mut chunk[..of_tensor.len()];
                    if let Err(why) = source(kept, spec, of_tensor, out) {
                        return Ok(Err(format!("{kept} of {}: {why}", spec.name)));
                    }
                    digest = digest.map(|before| digest_of(before, out));
                    kernels.load(out, state.view_mut().slice(of_owned))?;
                }
            }
        }
        Ok(Ok(digest))
    }

    /// In place of loading: there is nothing to go on with, for this reason.
    pub fn refuse(&mut self, why: String) -> std::result::Result<Option<u64>, String> {
        self.halfway = true;
        Err(why)
    }

    /// What was loaded is whole.
    pub fn go_on(&mut self) {
        self.halfway = false;
    }

    /// Whether the state is one to go on with.
    pub fn check(&self) -> Result<()> {
        match self.halfway {
            false => Ok(()),
            true => Err(Error::Config {
                problem: "a trainer whose state was not restored as a whole: restore it, or make another"
                    .to_owned(),
            }),
        }
    }

    /// What is kept of what this rank owns of a bucket; no weights where only the parameters are.
    pub fn kept(&self, kept: Kept, unit: usize, bucket: usize) -> Option<View<'_, f32>> {
        let State { master, m, v } = &self.units[unit][bucket];
        match kept {
            Kept::Weights => master.as_ref().map(Buffer::view),
            Kept::FirstMoments => Some(m.view()),
            Kept::SecondMoments => Some(v.view()),
        }
    }
}
