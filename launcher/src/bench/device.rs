//! Collectives between GPUs: buffers on the device, times between events of its compute stream.

use super::calls::Gpus;
use super::operation::Operation;
use super::plan::{Algo, Plan};
use crate::failure::{Failure, Result};
use crate::gpus::{self, RankGpu};
use crate::plan::Ranks;
use collectives::bootstrap::Identity;
use collectives::device::Queue;
use collectives::device::cuda::Event;
use collectives::{Communicator, Order};

/// Whether a plan can be carried out between GPUs.
///
/// # Errors
/// What cannot, with what would work.
pub fn check(plan: &Plan) -> Result<()> {
    if plan.operation == Operation::Barrier {
        return Err(Failure::usage(
            "bench barrier has no data that could be on a GPU: take --transport shm, or another operation",
        ));
    }
    if plan.registered(true) {
        return Err(Failure::usage(
            "-R 1 asks for buffers that are registered with NCCL, and none here are: take -R 0, or leave it away",
        ));
    }
    match &plan.algo {
        Algo::Named(name) => Err(Failure::usage(format!(
            "--algo {name}: between GPUs there are auto, which sums in rank order, and native, NCCL's own"
        ))),
        Algo::Auto | Algo::Native => Ok(()),
    }
}

/// This rank's GPU, and the group whose calls on GPUs go over NCCL.
///
/// # Errors
/// The GPU's or NCCL's.
pub fn join(
    plan: &Plan,
    ranks: &Ranks,
    identity: Option<&Identity>,
    comm: Communicator,
) -> Result<(Communicator, Gpus)> {
    let device = RankGpu::open(&comm, identity)?;
    let order = if plan.algo == Algo::Native { Order::Native } else { Order::Canonical };
    let carrier = gpus::over_nccl(&comm, &device.queue, ranks, order, None)?;
    Ok((comm.with_carrier(carrier), Gpus { device, order }))
}

/// What carries an operation, and why.
pub fn algorithm(operation: Operation, native: bool) -> (&'static str, &'static str) {
    match operation {
        Operation::AllGather | Operation::Broadcast => ("native", "NCCL's own, which sums nothing"),
        _ if native => ("native", "as asked for: NCCL's own order of sums"),
        _ if operation.reduces() => ("canonical", "grouped messages, summed in rank order"),
        _ => ("grouped", "messages that go on at once"),
    }
}

/// Seconds of each of so many iterations of `calls` calls, per call, between events of the compute stream. The host runs
/// ahead of the GPU.
///
/// # Errors
/// The calls', the device's.
pub fn times(
    gpus: &Gpus,
    comm: &Communicator,
    (iterations, calls): (usize, usize),
    mut iteration: impl FnMut() -> Result<()>,
) -> Result<Vec<f64>> {
    let Gpus { device, .. } = gpus;
    let events =
        (0..=iterations).map(|_| Event::timed(&device.gpu)).collect::<collectives::Result<Vec<_>>>()?;
    device.queue.clone().synchronize()?;
    // Who begins early would measure how long the others took to come.
    comm.barrier()?;
    device.queue.lock().record(&events[0])?;
    for event in &events[1..] {
        iteration()?;
        device.queue.lock().record(event)?;
    }
    device.queue.clone().synchronize()?;
    let pairs = events.windows(2);
    pairs.map(|pair| Ok(pair[1].seconds_since(&pair[0])? / calls as f64)).collect()
}
