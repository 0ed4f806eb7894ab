//! Optimizer state of what this rank updates, and the update itself.

mod adamw;

pub use adamw::AdamW;

use crate::error::{Error, Result};
use crate::grads::{Grads, Reduced};
use crate::params::Params;
use crate::plan::Plan;
use crate::step::Clock;
use adamw::Part;
use collectives::{Account, Buffer, Communicator, DType, Float};
use models::{Model, Unit};
use std::ops::Range;

/// Where initial weights come from: fills the elements `range` of a tensor. Called for every tensor in order,
/// and only for the ranges that this rank keeps.
pub type Source<'a> =
    dyn FnMut(&models::TensorSpec, Range<usize>, &mut [f32]) -> std::result::Result<(), String> + 'a;

/// State of one rank's optimizer.
pub struct Optimizer {
    /// Per unit, per bucket.
    units: Vec<Vec<State>>,
    /// Optimizer steps made.
    steps: u64,
}

/// State of the owned part of one bucket.
struct State {
    /// f32 weights, unless the parameters are f32 themselves.
    master: Option<Buffer<f32>>,
    m: Buffer<f32>,
    v: Buffer<f32>,
}

/// Whether parameters of this type need f32 weights beside them.
pub fn keeps_master(dtype: DType) -> bool {
    dtype != DType::F32
}

impl Optimizer {
    /// Zeroed state on `account`.
    pub fn new(plan: &Plan, account: &Account) -> Self {
        let mut units: Vec<Vec<State>> = (0..plan.layout.len()).map(|_| Vec::new()).collect();
        for (u, b) in plan.buckets() {
            let owned = plan.owned(u, b).len();
            let zeros = || Buffer::zeroed(owned).booked(account);
            units[u].push(State { master: keeps_master(plan.dtype).then(zeros), m: zeros(), v: zeros() });
        }
        Optimizer { units, steps: 0 }
    }

    /// Sets the owned weights from `source` and publishes them.
    pub fn start<T: Float>(
        &mut self,
        plan: &Plan,
        comm: &Communicator,
        units: &[Unit],
        params: &mut Params<T>,
        source: &mut Source<'_>,
    ) -> Result<()> {
        // A tensor can be larger than memory has room for twice.
        const CHUNK: usize = 1 << 16;
        let mut chunk = vec![0f32; CHUNK];
        for (u, b) in plan.buckets() {
            let owned = plan.owned(u, b);
            let (base, stored) = params.stored_mut(plan, u, b);
            let state = &mut self.units[u][b];
            for (tensor, of_tensor, of_bucket) in plan.tensors_in(u, b, owned.clone()) {
                let spec = &units[u].tensors[tensor];
                for start in of_tensor.clone().step_by(CHUNK) {
                    let n = CHUNK.min(of_tensor.end - start);
                    let out = &mut chunk[..n];
                    source(spec, start..start + n, out)
                        .map_err(|why| Error::Init { tensor: spec.name.clone(), why })?;
                    let at = of_bucket.start + (start - of_tensor.start);
                    if let Some(master) = &mut state.master {
                        master.host_mut()[at - owned.start..][..n].copy_from_slice(out);
                    }
                    for (p, w) in stored[at - base..][..n].iter_mut().zip(out.iter()) {
                        *p = T::from_f32(*w);
                    }
                }
            }
            if plan.config.stage.shards_optimizer {
                params.publish(comm, u, b)?;
            }
        }
        Ok(())
    }

    /// One update of everything owned, bucket by bucket, each published while the next is updated.
    /// `clip` scales the gradient.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn update<T: Float>(
        &mut self,
        plan: &Plan,
        comm: &Communicator,
        model: &dyn Model<T>,
        params: &mut Params<T>,
        grads: &Grads<T>,
        lr: f32,
        clip: f32,
        clock: &mut Clock,
    ) -> Result<()> {
        self.steps += 1;
        let c = plan.config.adamw.coefficients(self.steps, lr, clip);
        for (u, b) in plan.buckets() {
            let owned = plan.owned(u, b);
            let (base, stored) = params.stored_mut(plan, u, b);
            let state = &mut self.units[u][b];
            let gradient = grads.owned(plan, u, b);
            let tensors = &model.units()[u].tensors;
            model.install(&mut || {
                for (tensor, _, range) in plan.tensors_in(u, b, owned.clone()) {
                    let keep = if tensors[tensor].decay { c.keep } else { 1.0 };
                    let of_owned = range.start - owned.start..range.end - owned.start;
                    let param = &mut stored[range.start - base..range.end - base];
                    match gradient {
                        Reduced::Stored(g) => state.part(g, of_owned, param).update(&c, keep),
                        Reduced::Wide(g) => state.part(g, of_owned, param).update(&c, keep),
                    }
                }
            });
            if plan.config.stage.shards_optimizer {
                clock.communicate(|| params.publish(comm, u, b))?;
            }
        }
        Ok(())
    }

    /// Optimizer steps made.
    pub fn steps(&self) -> u64 {
        self.steps
    }
}

impl State {
    /// The elements `range`, whose parameters are `param`.
    fn part<'a, T: Float, G: Float>(
        &'a mut self,
        gradient: &'a [G],
        range: Range<usize>,
        param: &'a mut [T],
    ) -> Part<'a, T, G> {
        Part {
            gradient: &gradient[range.clone()],
            master: self.master.as_mut().map(|master| &mut master.host_mut()[range.clone()]),
            m: &mut self.m.host_mut()[range.clone()],
            v: &mut self.v.host_mut()[range],
            param,
        }
    }
}
