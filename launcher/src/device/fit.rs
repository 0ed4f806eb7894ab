//! Whether a training run fits a GPU, and which flags would make it fit.

use super::{Gpus, called};
use crate::args::Precision;
use crate::failure::{Failure, Result};
use crate::human;
use crate::plan::{MicroBatch, TrainPlan};
use models::{LlamaConfig, Recompute};
use zero::{Config, Memory, Placement, Stage};

/// What one rank needs.
#[derive(Clone, Copy, Debug)]
pub struct Need {
    /// Bytes per class, on the device and beside it.
    pub memory: Memory,
    /// Bytes of the one piece of memory that everything on the device lies in.
    pub arena: usize,
    /// Bytes of the buffers of the largest call that goes through the host.
    pub largest_call: usize,
}

/// Refuses a plan whose ranks do not fit on their GPU: `room` bytes are there for one.
///
/// # Errors
/// What is needed, what there is, and what would fit.
pub fn check(plan: &TrainPlan, gpu: &str, room: usize) -> Result<()> {
    let need = plan.need(&plan.zero, &plan.batch)?.arena;
    if need <= room {
        return Ok(());
    }
    let mut alone = Vec::new();
    for remedy in remedies(plan) {
        let needs = plan.need(&remedy.zero, &remedy.batch)?.arena;
        if needs <= room {
            alone.push(format!("{} ({})", remedy.flags, human::bytes(needs as u64)));
            // Smaller batches than the largest that fits would fit too.
            if remedy.batch.rows < plan.batch.rows {
                break;
            }
        }
    }
    let what = match alone.is_empty() {
        false => format!("any of these would fit: {}", alone.join(", ")),
        true => together(plan, room)?,
    };
    Err(Failure::usage(format!(
        "a rank needs {} on {gpu}, which has {} for it; {what}",
        human::bytes(need as u64),
        human::bytes(room as u64)
    )))
}

/// Refuses an evaluation that does not fit on the GPU of a rank: `room` bytes are there for it. What it needs is told
/// for so many sequences of so many tokens.
///
/// # Errors
/// What is needed, what there is, and what would fit.
pub fn check_evaluation(
    gpu: &str,
    room: usize,
    batch: &MicroBatch,
    need: impl Fn(&MicroBatch) -> Result<usize>,
) -> Result<()> {
    let needs = need(batch)?;
    if needs <= room {
        return Ok(());
    }
    let size = |bytes: usize| human::bytes(bytes as u64);
    let halves = |n: usize| std::iter::successors(Some(n / 2), |n| Some(n / 2)).take_while(|&n| n > 0);
    let fewer =
        halves(batch.rows).map(|rows| (format!("--micro-batch {rows}"), MicroBatch { rows, ..*batch }));
    let one = MicroBatch { rows: 1, ..*batch };
    let shorter = halves(batch.length)
        .map(|length| (format!("--micro-batch 1 --seq {length}"), MicroBatch { length, ..one }));
    for (flags, smaller) in fewer.chain(shorter) {
        let fits = need(&smaller)?;
        if fits <= room {
            return Err(Failure::usage(format!(
                "a rank needs {} on {gpu}, which has {} for it; this would fit: {flags} ({})",
                size(needs),
                size(room),
                size(fits)
            )));
        }
    }
    Err(Failure::usage(format!(
        "a rank needs {} on {gpu}, which has {} for it, and more than that even for one token: --device cpu, or a \
         smaller model",
        size(needs),
        size(room)
    )))
}

/// Refuses a model one of whose kernels no block of a GPU could hold, or that no kernels are for.
///
/// # Errors
/// What is needed, what there is, and what would fit.
pub fn check_kernels(
    gpus: &Gpus,
    config: &LlamaConfig,
    dtype: Precision,
    recompute: Recompute,
) -> Result<()> {
    // The most that a kernel asks for.
    let most = |dtype: Precision| {
        let by = gpus.kernels(dtype.dtype(), config.head_dim);
        let modules = models::device_modules(config, dtype.dtype(), recompute, by);
        modules.map(|modules| modules.into_iter().max_by_key(|module| module.shared))
    };
    let least = gpus.each.iter().enumerate().min_by_key(|(_, card)| card.shared);
    let (Some(kernel), Some((number, card))) = (most(dtype).map_err(Failure::usage)?, least) else {
        return Ok(());
    };
    if kernel.shared <= card.shared {
        return Ok(());
    }
    let hide = match gpus.each.iter().any(|other| kernel.shared <= other.shared) {
        true => " (CUDA_VISIBLE_DEVICES can hide it)",
        false => "",
    };
    let fitting = |other: Precision| {
        let needs = most(other).ok()??.shared;
        (needs <= card.shared).then(|| format!("this would fit: --dtype {} ({needs})", other.name()))
    };
    let advice = [Precision::F32, Precision::Bf16].into_iter().find_map(fitting);
    Err(Failure::usage(format!(
        "--dtype {}: {kernel} needs {} bytes of shared memory a block, and {} has {}{hide}; {}",
        dtype.name(),
        kernel.shared,
        called(number, &card.name),
        card.shared,
        advice.unwrap_or_else(|| "no --dtype fits: take --device cpu, or another model".into())
    )))
}

/// A change of flags, and what they then ask for.
struct Remedy {
    flags: String,
    zero: Config,
    batch: MicroBatch,
}

/// Changes of one flag each: to every higher stage, then what costs time, then smaller batches.
fn remedies(plan: &TrainPlan) -> Vec<Remedy> {
    let (zero, batch) = (&plan.zero, plan.batch);
    let mut all = Vec::new();
    let highest = highest(zero, plan.ranks.world);
    for stage in Stage::ALL.into_iter().filter(|s| (zero.stage.level() + 1..=highest).contains(&s.level())) {
        all.push(Remedy { flags: format!("--stage {stage}"), zero: Config { stage, ..zero.clone() }, batch });
    }
    if batch.recompute == Recompute::None {
        let batch = MicroBatch { recompute: Recompute::Full, ..batch };
        all.push(Remedy { flags: "--recompute full".into(), zero: zero.clone(), batch });
    }
    if zero.placement.optimizer_on_device() {
        let zero = Config { placement: Placement::Offloaded, ..zero.clone() };
        all.push(Remedy { flags: "--offload optimizer".into(), zero, batch });
    }
    let mut rows = batch.rows;
    while rows > 1 {
        rows /= 2;
        let batch = MicroBatch { rows, ..batch };
        all.push(Remedy { flags: format!("--micro-batch {rows}"), zero: zero.clone(), batch });
    }
    all
}

/// The highest stage that takes something off a device, which none does of a rank that has all and adds nothing up.
fn highest(zero: &Config, world: usize) -> u8 {
    match (world, zero.accumulate) {
        (1, 1) => 0,
        // Sums over micro-batches are there in any case, and then no whole gradients.
        (1, _) => 2,
        _ => 3,
    }
}

/// What all changes together would do.
fn together(plan: &TrainPlan, room: usize) -> Result<String> {
    let (several, highest) = (plan.ranks.world > 1, highest(&plan.zero, plan.ranks.world));
    let stage = if highest > 0 { Stage::ALL[usize::from(highest)] } else { plan.zero.stage };
    let zero = Config { stage, placement: Placement::Offloaded, ..plan.zero.clone() };
    let batch = |rows| MicroBatch { rows, recompute: Recompute::Full, ..plan.batch };
    let sharding = if highest > 0 { format!("--stage {highest} ") } else { String::new() };
    let flags = format!("{sharding}--recompute full --offload optimizer");
    let mut rows = plan.batch.rows;
    loop {
        let needs = plan.need(&zero, &batch(rows))?.arena;
        let size = human::bytes(needs as u64);
        if needs <= room {
            return Ok(format!("these together would fit: {flags} --micro-batch {rows} ({size})"));
        }
        if rows == 1 {
            return Ok(format!(
                "even {flags} --micro-batch 1 needs {size}: take a smaller --model or --seq{}",
                if several { ", or more ranks" } else { ", or several ranks with --stage 3" }
            ));
        }
        rows /= 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use collectives::DType;
    use models::{Footprint, LlamaConfig};

    #[test]
    fn stages_are_advised_where_they_take_something_off() {
        let of = |accumulate, world| highest(&Config { accumulate, ..Config::default() }, world);
        assert_eq!([of(1, 1), of(2, 1), of(1, 2), of(4, 3)], [0, 2, 3, 3]);
        // Of a rank by itself stage 2 takes whole gradients off, and stage 3 nothing more.
        let units = LlamaConfig::preset("nano").unwrap().units();
        let needs = |level, accumulate| {
            let (stage, placement) = (Stage::ALL[level], Placement::Device);
            let config = Config { stage, accumulate, placement, ..Config::default() };
            zero::memory::arena(&zero::Plan::new(&units, DType::F32, &config, 0, 1), Footprint::default())
        };
        assert!(needs(2, 2) < needs(1, 2) && needs(3, 2) == needs(2, 2) && needs(1, 2) == needs(0, 2));
        assert!((1..4).all(|level| needs(level, 1) == needs(0, 1)));
    }
}
