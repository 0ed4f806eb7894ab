//! Opens a rank's device and puts its model and its trainer there.

use super::{Device, Gpus, Need, fit};
use crate::eval::EvalPlan;
use crate::failure::{Failure, Result};
use crate::gpus;
use crate::plan::{MicroBatch, ModelChoice, TrainPlan};
use collectives::device::cuda::{Gpu, Stream};
use collectives::device::emulation::{EmulatedQueue, Emulator};
use collectives::device::{Cache, PRODUCT_WORKSPACE, Queue, SharedQueue, Streams, Urgency};
use collectives::{Alone, Buffer, Carrier, Communicator, Element, Float, Order, Staged};
use models::{Accounts, Llama, Model};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use zero::{Ledger, Trainer};

/// What carries calls where no wire joins devices.
fn beside_a_wire<Q: Streams>(
    comm: &Communicator,
    compute: &SharedQueue<Q>,
    need: &Need,
    ledger: &Ledger,
) -> Result<Arc<dyn Carrier>> {
    Ok(match comm.size() {
        1 => Arc::new(Alone::new(comm, compute.clone())?),
        _ => Arc::new(Staged::planned(comm, compute.clone(), need.largest_call, &ledger.host)?),
    })
}

/// This rank's trainer, where the plan places it. What its device has to say later, and is no failure, goes to `remarks`.
///
/// # Errors
/// The device cannot be used, has too little memory, or is another rank's too.
pub fn trainer<T: Float>(
    plan: &TrainPlan,
    comm: Communicator,
    ledger: Ledger,
    remarks: &Sender<String>,
) -> Result<Trainer<T>> {
    match &plan.device {
        Device::Cpu => {
            let model = plan.model.build::<T>(&plan.batch, &ledger.of_model())?;
            Ok(Trainer::new(model, comm, &plan.zero, ledger, &mut *plan.source()?)?)
        }
        Device::Cuda(gpus) => {
            let (gpu, room) = open(gpus, &comm, plan.ranks.nccl)?;
            let name = super::called(gpu.ordinal(), &gpu.properties().name);
            fit::check(plan, &name, room)?;
            if let Some(remark) = gpus::too_few_connections().filter(|_| comm.size() > 1) {
                // Nobody listens where the run is over already.
                let _ = remarks.send(remark);
            }
            let stream = Stream::new(&gpu, Urgency::Low)?.gathering(plan.cuda_graphs, remarks);
            let ranks = &plan.ranks;
            on_queue(stream, gpus, plan, comm, ledger, |comm, compute, need, ledger| {
                match comm.size() > 1 && ranks.nccl {
                    true => gpus::over_nccl(comm, compute, ranks, Order::Canonical, Some(&ledger.workspace)),
                    false => beside_a_wire(comm, compute, need, ledger),
                }
            })
        }
        Device::Emulated(gpus) => {
            let number = gpus.of(comm.rank());
            fit::check(plan, &format!("emulated GPU {number}"), gpus.each[number].memory)?;
            on_queue(emulated()?, gpus, plan, comm, ledger, beside_a_wire)
        }
    }
}

/// This rank's GPU, and how much of its memory a plan may take: what is free now, and its share where others have the GPU
/// too, without what CUDA's libraries take afterwards.
fn open(gpus: &Gpus, comm: &Communicator, nccl: bool) -> Result<(Gpu, usize)> {
    let gpu = Gpu::open(gpus.of(comm.rank()))?;
    let sharers = gpus.sharers(comm, &gpu)?;
    let (free, total) = gpu.free_memory()?;
    let room = free.min(super::share(total, sharers));
    let here = gpus.identity.as_ref().and_then(|identity| identity.local_size).unwrap_or(comm.size());
    let peers = nccl.then(|| super::nccl_peers(here, comm.size()));
    Ok((gpu, room.saturating_sub(super::reserve(peers))))
}

fn emulated() -> Result<EmulatedQueue> {
    Ok(emulator()?.queue(0))
}

/// What emulates GPUs.
pub(super) fn emulator() -> Result<Emulator> {
    let folder = Cache::of_user().folder().map_or_else(std::env::temp_dir, |folder| folder.to_path_buf());
    std::fs::create_dir_all(&folder).map_err(|e| {
        let folder = folder.display();
        Failure::run(format!(
            "emulating a GPU takes a folder to build in: {folder}: {e}; CARAVAN_CACHE names another"
        ))
    })?;
    let built = Emulator::build(&[], &folder).map_err(Failure::run)?;
    built.ok_or_else(|| Failure::usage("emulating a GPU takes a C++ compiler ($CXX, c++, g++ or clang++)"))
}

/// On this queue, for whose memory `carrier` makes what carries collectives.
fn on_queue<T: Float, Q: Streams>(
    queue: Q,
    gpus: &Gpus,
    plan: &TrainPlan,
    comm: Communicator,
    ledger: Ledger,
    carrier: impl FnOnce(&Communicator, &SharedQueue<Q>, &Need, &Ledger) -> Result<Arc<dyn Carrier>>,
) -> Result<Trainer<T>> {
    let compute = SharedQueue::new(queue);
    let need = plan.need(&plan.zero, &plan.batch)?;
    compute.reserve(need.arena)?;
    let carrier = carrier(&comm, &compute, &need, &ledger)?;
    let comm = comm.with_carrier(carrier);
    let model = model::<T, Q>(gpus, &plan.model, &plan.batch, &compute, &ledger.of_model())?;
    let source = &mut *plan.source()?;
    Ok(Trainer::on_device(&compute, plan.batch.threads, model, comm, &plan.zero, ledger, source)?)
}

fn model<T: Float, Q: Streams>(
    gpus: &Gpus,
    choice: &ModelChoice,
    batch: &MicroBatch,
    compute: &SharedQueue<Q>,
    accounts: &Accounts,
) -> Result<Box<dyn Model<T>>> {
    let MicroBatch { rows, length, recompute, precision, .. } = *batch;
    let config = &choice.config;
    let by = gpus.kernels(T::DTYPE, config.head_dim);
    let made = Llama::<T, _>::on_device(by, config, rows, length, recompute, compute.clone(), accounts);
    Ok(Box::new(made.map_err(Failure::run)?.precise_to(precision)))
}

/// A model for forwards alone, and what moves its weights to where it reads them.
pub type Evaluation<T> = (Box<dyn Model<T>>, Box<dyn FnMut(Buffer<T>) -> Result<Buffer<T>>>);

/// This rank's model for an evaluation, where the plan places it.
///
/// # Errors
/// As [`trainer`].
pub fn evaluation<T: Float>(plan: &EvalPlan, comm: &Communicator) -> Result<Evaluation<T>> {
    let batch = &plan.batch;
    match &plan.device {
        Device::Cpu => Ok((plan.model.build::<T>(batch, &Accounts::default())?, Box::new(Ok))),
        Device::Cuda(gpus) => {
            let (gpu, room) = open(gpus, comm, plan.ranks.nccl)?;
            let name = super::called(gpu.ordinal(), &gpu.properties().name);
            fit::check_evaluation(&name, room, batch, |batch| plan.arena(batch))?;
            forwards(Stream::new(&gpu, Urgency::Low)?, gpus, plan, batch)
        }
        Device::Emulated(gpus) => {
            let number = gpus.of(comm.rank());
            let name = format!("emulated GPU {number}");
            fit::check_evaluation(&name, gpus.each[number].memory, batch, |batch| plan.arena(batch))?;
            forwards(emulated()?, gpus, plan, batch)
        }
    }
}

fn forwards<T: Float, Q: Streams>(
    queue: Q,
    gpus: &Gpus,
    plan: &EvalPlan,
    batch: &MicroBatch,
) -> Result<Evaluation<T>> {
    let compute = SharedQueue::new(queue);
    compute.reserve(plan.arena(batch)?)?;
    compute.clone().lend(compute.clone().memory(PRODUCT_WORKSPACE)?);
    let model = model::<T, Q>(gpus, &plan.model, batch, &compute, &Accounts::default())?;
    let moved = move |values: Buffer<T>| Ok(upload(&mut compute.clone(), &values)?);
    Ok((model, Box::new(moved)))
}

/// A copy in the device's memory.
fn upload<E: Element, Q: Queue>(
    queue: &mut SharedQueue<Q>,
    values: &Buffer<E>,
) -> collectives::Result<Buffer<E>> {
    let mut there = Buffer::<E>::from_memory(queue.memory(values.len() * size_of::<E>())?);
    queue.fill(&mut there, values.host())?;
    Ok(there)
}
