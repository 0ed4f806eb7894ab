//! `caravan plan`: what each rank of a training would hold and send at each ZeRO stage, to the byte, before there are any
//! ranks, and also where they could not run.

mod table;

use crate::args::{PlanArgs, Precision, TrainArgs, deepspeed};
use crate::device::{self, Device};
use crate::failure::{Failure, Result};
use crate::machine::Machine;
use crate::out;
use crate::plan::{self, Anywhere, Asked, MicroBatch, ModelChoice, Shape};
use crate::transports::{self, Transport};
use crate::tuning;
use collectives::MAX_SIZE;
use collectives::bootstrap;
use collectives::schedule::Tuning;
use collectives::transport::Expected;
use serde_json::{Value, json};
use zero::{Memory, Stage};

/// Of more ranks than this only the first and the last are looked at one by one: the others differ from them by what the
/// engine works in, at most.
const LOOKED_AT: usize = 64;

/// GPUs of a host of which nobody knows how many it has: few have more.
const GPUS: usize = 8;

/// Does what the flags say.
///
/// # Errors
/// What `train` would refuse of them on any machine, nodes that nobody knows, or a standard output that takes nothing.
pub fn plan(args: &PlanArgs) -> Result<()> {
    let forecast = Forecast::new(&args.train).map_err(|e| args.train.placed(e))?;
    match args.json {
        true => out::line(forecast.json()),
        false => out::text(forecast.text()),
    }
}

/// What a training would hold and send.
struct Forecast {
    model: ModelChoice,
    world: usize,
    /// What carries its calls, as `--transport` and tuning tables name it.
    label: String,
    /// How many of the ranks a host has, if that is known.
    here: Option<usize>,
    /// Bytes in which each keeps what those see of each other.
    control: usize,
    device: Device,
    dtype: Precision,
    batch: MicroBatch,
    /// With whichever stage.
    zero: zero::Config,
    /// In the order of stages.
    stages: Vec<Outcome>,
    /// The configuration that flags came from.
    configuration: Option<deepspeed::File>,
}

/// What it comes to at one stage.
#[derive(Clone, Copy, Debug)]
struct Outcome {
    stage: Stage,
    /// Of the rank that holds most.
    memory: Memory,
    /// Bytes of its parameters, gradients and optimizer's state that are padding, in the mean over ranks.
    padding: usize,
    /// Bytes that a rank takes of a GPU, with what lies between its buffers and what CUDA's libraries take.
    gpu: usize,
    /// Bytes that the rank sends in a step that sends most.
    sent: u64,
}

impl Forecast {
    fn new(args: &TrainArgs) -> Result<Self> {
        let unasked = device::ranks_unasked(&args.device, &args.ranks, None);
        let world = args.ranks.ranks.unwrap_or(unasked);
        if !(1..=MAX_SIZE).contains(&world) {
            return Err(Failure::usage(format!("--ranks {world}: a run has from 1 to {MAX_SIZE} ranks")));
        }
        let args = &*args.for_ranks(world, false)?;
        let Anywhere { numbers, precision } = plan::check_anywhere(args, world)?;
        let joined = Joined::new(args, world)?;
        let device = Device::elsewhere(&args.device);
        let placement = plan::placement(args, &device);
        let zero = zero::Config { placement, ..numbers.zero };
        let model = plan::trainable(args)?;
        let threads = args.ranks.threads.unwrap_or_else(|| {
            let here = joined.here.unwrap_or(world);
            plan::unasked_threads(
                bootstrap::processors_of_host(None),
                here,
                args.device.device,
                args.progress,
            )
        });
        let batch = MicroBatch {
            rows: args.micro_batch,
            length: plan::sequence(args, &model)?,
            recompute: args.recompute.of_models(),
            precision,
            threads,
        };
        let (dtype, nccl, copies) = (args.dtype, joined.nccl, args.checkpoint_async);
        let shape = Shape { model: &model, dtype, device: &device, world, nccl, copies };
        let outcome = |&stage: &Stage| {
            let zero = zero::Config { stage, ..zero.clone() };
            let need = shape.need(&zero, &batch)?;
            let mut plan = shape.sharded(&zero, 0);
            let (padding, mut memory, mut sent) = (zero::memory::padding(&plan), need.memory, 0);
            for rank in (0..world).filter(|rank| rank.min(&(world - 1 - rank)) < &(LOOKED_AT / 2)) {
                plan.rank = rank;
                let held = shape.held(&need, &plan, &joined.expected.group(rank, world, joined.tuning));
                memory = if held.total() > memory.total() { held } else { memory };
                sent = plan.sent_in_a_step().max(sent);
            }
            let peers =
                joined.nccl.then(|| device::nccl_peers(joined.here.unwrap_or(world.min(GPUS)), world));
            let gpu = if placement.on_device() { need.arena + device::reserve(peers) } else { 0 };
            Ok(Outcome { stage, memory, padding, gpu, sent })
        };
        let stages = Stage::ALL.iter().map(outcome).collect::<Result<_>>()?;
        let Joined { label, here, control, .. } = joined;
        let configuration = args.configuration.clone();
        Ok(Forecast { world, label, here, control, dtype, batch, zero, stages, device, model, configuration })
    }

    fn json(&self) -> Value {
        let stages = self.stages.iter().map(|at| {
            let memory = crate::report::memory_json(&at.memory);
            let device = at.memory.on_device(self.zero.placement);
            json!({
                "stage": at.stage.level(),
                "memory": memory,
                "padding_bytes": at.padding,
                "device_bytes": device,
                "gpu_bytes": at.gpu,
                "bytes_sent": at.sent,
            })
        });
        json!({
            "model": self.model.name,
            "parameters": self.model.config.parameters(),
            "ranks": self.world,
            "ranks_of_a_host": self.here,
            "control_bytes": self.control,
            "transport": self.label,
            "device": self.device.name(),
            "offload": plan::offload(self.zero.placement),
            "dtype": self.dtype.name(),
            "micro_batch": self.batch.rows,
            "accumulate": self.zero.accumulate,
            "reproducible": self.zero.reproducible,
            "seq": self.batch.length,
            "recompute": plan::recompute(self.batch.recompute),
            "threads": self.batch.threads,
            "bucket_bytes": self.zero.bucket_bytes,
            "stages": stages.collect::<Vec<Value>>(),
            "deepspeed": self.configuration.as_ref().map(deepspeed::File::json),
            "machine": Machine::probe().json(),
        })
    }
}

/// How the ranks would reach each other.
struct Joined {
    nccl: bool,
    label: String,
    here: Option<usize>,
    control: usize,
    expected: Expected,
    tuning: Tuning,
}

impl Joined {
    fn new(args: &TrainArgs, world: usize) -> Result<Self> {
        let asked = Asked::new(&args.ranks, world)?;
        // Without hosts that are known there is one, where auto is this.
        let (layers, transport) = (asked.layers, asked.transport.unwrap_or(Transport::Shm));
        let Some(expected) = layers.expected(transport, world)? else {
            return Err(Failure::usage(format!(
                "--transport {} takes nodes from hosts, which nobody knows yet: add --ranks-per-node K",
                args.ranks.transport
            )));
        };
        // Links are emulated on one machine only.
        let between_hosts = matches!(transport, Transport::Mpi | Transport::Ucx) && !expected.link;
        let here = match (&expected.nodes, between_hosts) {
            // GPUs that are more than a host has are on several, whatever else is between those.
            (None, false) if asked.nccl && asked.transport.is_none() && world > GPUS => None,
            (_, false) => Some(world),
            (Some(nodes), true) => Some(nodes.largest()),
            (None, true) => None,
        };
        let label = layers.label(transport);
        let mut tuning = layers.tuning(world);
        if let Some(path) = tuning::named(args.ranks.tuning.as_ref()) {
            let tune = format!("'caravan bench tune --ranks {world} {} -o FILE'", layers.flags(transport));
            let read = match world {
                1 => tuning::read(&path).map(|_| tuning),
                _ => tuning::load(&path, &label, world, &tune, tuning),
            };
            tuning = read.map_err(|e| tuning::told(args.ranks.tuning.as_ref(), e))?;
            tuning::check(&expected.group(0, world, tuning), || label.clone())?;
        }
        let label = format!("{}{label}", transports::nccl_prefix(asked.nccl));
        let control = layers.control_bytes(transport, world, here.unwrap_or(1));
        Ok(Joined { nccl: asked.nccl, label, here, control, expected, tuning })
    }
}
