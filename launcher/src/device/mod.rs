//! What ranks compute on: the processor, or a GPU each.

mod fit;
mod open;

pub use fit::{Need, check, check_evaluation, check_kernels};
pub use open::{evaluation, trainer};

use crate::agree;
use crate::args::{Attention, Closeness, DeviceArgs, DeviceKind, Precision, RankArgs, named};
use crate::failure::{Failure, Result};
use crate::gpus;
use crate::human;
use crate::plan::{Ranks, UNASKED};
use collectives::bootstrap::Identity;
use collectives::device::Machine;
use collectives::device::cuda::{Gpu, Properties, Survey};
use collectives::device::emulation::Emulator;
use collectives::{Communicator, DType, MAX_SIZE};
use models::MatmulPrecision;
use models::cuda::TensorCores;

/// Says how many GPUs an emulation has, and how much memory each, as `2,64M`: `--device cuda` then runs on kernels that
/// are compiled for the processor. For tests of the whole path on machines without a GPU.
pub const EMULATION: &str = "CARAVAN_EMULATED_DEVICE";

/// What ranks compute on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Device {
    /// The processor.
    Cpu,
    /// A GPU each.
    Cuda(Gpus),
    /// A GPU each that is emulated on the processor.
    Emulated(Gpus),
}

/// What a plan has to know of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    /// Its name.
    pub name: String,
    /// Bytes of its memory.
    pub memory: usize,
    /// Bytes of shared memory that a block may have; of one that is emulated as many as anybody wants.
    pub shared: usize,
}

/// The GPUs of this machine that its ranks have, or all, where nothing says how many ranks there are here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpus {
    /// In their order; at least one, but where they are those of [another machine](Device::elsewhere).
    pub each: Vec<Card>,
    /// Whether ranks may share one.
    pub share: bool,
    /// How attention is to multiply on them.
    pub attention: Attention,
    /// Whether all are Hopper's, with its own instructions.
    pub hopper: bool,
    /// Who this process is among the ranks, if something has started several.
    identity: Option<Identity>,
}

/// Whether flags for ranks on GPUs come with such ranks.
///
/// # Errors
/// Those flags, with --device cpu.
pub fn check_flags(args: &DeviceArgs, nccl: bool, share_gpus: bool) -> Result<()> {
    match args.device {
        DeviceKind::Cuda => Ok(()),
        DeviceKind::Cpu if share_gpus => {
            Err(Failure::usage("--share-gpus is for ranks on GPUs: add --device cuda"))
        }
        DeviceKind::Cpu if nccl => Err(Failure::usage(
            "--transport nccl is between GPUs, and ranks compute on the processor: add --device cuda",
        )),
        DeviceKind::Cpu if args.attention != Attention::Auto => Err(Failure::usage(format!(
            "--attention {} is for GPUs: add --device cuda",
            named(args.attention)
        ))),
        DeviceKind::Cpu => Ok(()),
    }
}

/// How close products are to exact ones in a model of `dtype`.
///
/// # Errors
/// A choice that makes no difference there.
pub fn matmul_precision(args: &DeviceArgs, dtype: Precision) -> Result<MatmulPrecision> {
    match (args.matmul_precision, dtype) {
        (Closeness::High, Precision::Bf16 | Precision::F16) => Err(Failure::usage(format!(
            "--matmul-precision high is of products of f32, and numbers are {}: add --dtype f32, or leave it away",
            dtype.name()
        ))),
        (closeness, _) => Ok(closeness.precision()),
    }
}

/// Ranks that are started where nobody says how many: with --device cuda one for each GPU of this machine.
pub fn ranks_unasked(args: &DeviceArgs, ranks: &RankArgs, identity: Option<&Identity>) -> usize {
    match (args.device, ranks.ranks, identity) {
        (DeviceKind::Cuda, None, None) => one_for_each_gpu(),
        _ => UNASKED,
    }
}

/// As many ranks as this machine has GPUs, or as many as elsewhere.
pub fn one_for_each_gpu() -> usize {
    let gpus = match emulation() {
        Ok(Some(each)) => each.len(),
        // Whoever looks closer says why there is none.
        _ => Gpu::count().unwrap_or(0),
    };
    if gpus == 0 { UNASKED } else { gpus }
}

impl Device {
    /// Checks the flags, which [go together](check_flags), against what this machine has.
    ///
    /// # Errors
    /// Something of CUDA is missing, or there are too few GPUs.
    pub fn plan(args: &DeviceArgs, ranks: &Ranks, identity: Option<&Identity>) -> Result<Self> {
        if args.device == DeviceKind::Cpu {
            return Ok(Device::Cpu);
        }
        let (share, attention) = (ranks.share_gpus, args.attention);
        let of = |each, hopper| Gpus { each, share, attention, hopper, identity: identity.cloned() };
        let device = match emulation()? {
            Some(each) => Device::Emulated(of(each, false)),
            None => {
                let gpus = real(args.attention, gpus::used(ranks.world, identity)).map_err(|why| {
                    Failure::usage(format!(
                        "--device cuda cannot be used: {why}; --device cpu needs none of that"
                    ))
                })?;
                let hopper = gpus.iter().all(|gpu| gpu.machine == Machine::HOPPER);
                let card = |gpu| {
                    let Properties { name, memory, shared, .. } = gpu;
                    Card { name, memory, shared }
                };
                Device::Cuda(of(gpus.into_iter().map(card).collect(), hopper))
            }
        };
        if let (Device::Emulated(_), true) = (&device, ranks.nccl) {
            return Err(Failure::usage(
                "--transport nccl is between GPUs, and emulated ones it does not know: leave it away",
            ));
        }
        if let (Some(gpus), None) = (device.gpus(), identity) {
            gpus::check_share(ranks.world, gpus.each.len(), gpus.share)?;
        }
        Ok(device)
    }

    /// What these flags ask for on some other machine, whose GPUs nobody knows.
    pub fn elsewhere(args: &DeviceArgs) -> Self {
        let (each, attention) = (Vec::new(), args.attention);
        match args.device {
            DeviceKind::Cpu => Device::Cpu,
            DeviceKind::Cuda => {
                Device::Cuda(Gpus { each, share: true, attention, hopper: false, identity: None })
            }
        }
    }

    /// The GPUs, if it is not the processor.
    pub fn gpus(&self) -> Option<&Gpus> {
        match self {
            Device::Cpu => None,
            Device::Cuda(gpus) | Device::Emulated(gpus) => Some(gpus),
        }
    }

    /// The GPUs that `ranks` ranks of this machine have, and bytes of memory that a plan may take for each of these.
    pub fn rooms(&self, ranks: usize, nccl: bool) -> Vec<(String, usize)> {
        match self {
            Device::Cpu => Vec::new(),
            Device::Emulated(gpus) => {
                let sharers = gpus.sharers_of(ranks);
                gpus.named(ranks).map(|(name, memory)| (name, memory / sharers)).collect()
            }
            Device::Cuda(gpus) => {
                let (sharers, reserved) =
                    (gpus.sharers_of(ranks), reserve(nccl.then(|| nccl_peers(ranks, ranks))));
                let named = gpus.named(ranks);
                named.map(|(name, memory)| (name, share(memory, sharers).saturating_sub(reserved))).collect()
            }
        }
    }

    /// As `--attention` names the kernels of attention for such elements and heads; none on the processor.
    pub fn attention(&self, element: DType, width: usize) -> Option<&'static str> {
        self.gpus().map(|gpus| match gpus.kernels(element, width) {
            TensorCores::Mma => "mma",
            TensorCores::Wgmma => "wgmma",
        })
    }

    /// As `--device` names it, and reports do.
    pub fn name(&self) -> &'static str {
        match self {
            Device::Cpu => "cpu",
            Device::Cuda(_) => "cuda",
            Device::Emulated(_) => "cuda, emulated",
        }
    }

    /// For the first line of a run.
    pub fn describe(&self) -> String {
        match self {
            Device::Cpu => String::new(),
            Device::Cuda(gpus) => format!(" with a GPU each ({})", gpus.each[0].name),
            Device::Emulated(_) => " with an emulated GPU each".into(),
        }
    }
}

impl Gpus {
    /// The kernels of attention for such elements and heads.
    pub fn kernels(&self, element: DType, width: usize) -> TensorCores {
        self.attention.kernels(self.hopper, element, width)
    }

    /// Which of them rank `rank` of the run has.
    pub fn of(&self, rank: usize) -> usize {
        gpus::dealt(rank, self.identity.as_ref(), self.each.len())
    }

    /// How many of `ranks` ranks of this machine have its first GPU: they are dealt to GPUs in turn, so that it has most.
    fn sharers_of(&self, ranks: usize) -> usize {
        ranks.div_ceil(self.each.len())
    }

    /// The GPUs that `ranks` ranks of this machine have, and the memory of each.
    fn named(&self, ranks: usize) -> impl Iterator<Item = (String, usize)> {
        self.each
            .iter()
            .take(ranks)
            .enumerate()
            .map(|(number, card)| (called(number, &card.name), card.memory))
    }

    /// How many ranks have the GPU of this one, whoever has given it to them. Refuses more than one without permission. Every
    /// rank calls it.
    fn sharers(&self, comm: &Communicator, gpu: &Gpu) -> Result<usize> {
        let identity: String = gpu.uuid()?.iter().map(|byte| format!("{byte:02x}")).collect();
        let all = agree::exchange(comm, &identity)?;
        let twice = (0..all.len()).find_map(|b| (0..b).find(|&a| all[a] == all[b]).map(|a| (a, b)));
        match twice {
            Some((a, b)) if !self.share => Err(Failure::usage(format!(
                "ranks {a} and {b} have the same GPU ({}): start as many ranks as there are GPUs, or add --share-gpus, with which \
                 ranks divide a GPU's memory and time",
                gpu.properties().name
            ))),
            _ => Ok(all.iter().filter(|&other| *other == identity).count()),
        }
    }
}

/// A GPU in words.
fn called(number: usize, name: &str) -> String {
    format!("GPU {number} ({name})")
}

/// What CUDA takes of a GPU's memory for each process that uses it: about as much, which it does not say.
const CONTEXT: usize = 512 << 20;

/// The part of a GPU's memory that one of so many ranks has. Where one has it alone, what its context takes is not free when
/// that is asked for.
fn share(memory: usize, sharers: usize) -> usize {
    match sharers {
        1 => memory,
        n => (memory / n).saturating_sub(CONTEXT),
    }
}

/// What NCCL takes for each other rank of this machine, at most, as its sources suggest and no GPU has shown yet: in each of
/// two communicators 32 channels of 12 MiB; and for what it does not need them for.
const NCCL_PEER: usize = 2 * 32 * (12 << 20);
const NCCL: usize = 256 << 20;
/// Ranks of other hosts for which NCCL may keep as much on a GPU as for one of this host: the neighbours in its rings, where
/// the network reads and writes a GPU's memory.
const REMOTE: usize = 2;

/// The other ranks for which NCCL may keep channels on a GPU, of a world that has `here` on each host.
pub fn nccl_peers(here: usize, world: usize) -> usize {
    here - 1 + REMOTE.min(world - here)
}

/// What CUDA's libraries take of a GPU's memory beside a plan, about which they say nothing: kernels and what they spill,
/// handles; NCCL's channels to so many [other ranks](nccl_peers).
pub fn reserve(peers: Option<usize>) -> usize {
    (256 << 20) + peers.map_or(0, |peers| NCCL + peers * NCCL_PEER)
}

/// Where a program of one process computes.
pub enum Place {
    /// On the first GPU, which can be used.
    Gpu,
    /// On GPUs that this emulates.
    Emulated(Emulator),
}

/// Where a program of one process that needs a GPU computes.
///
/// # Errors
/// Something of CUDA is missing, or there is no GPU.
pub fn alone() -> Result<Place> {
    match emulation()? {
        Some(_) => Ok(Place::Emulated(open::emulator()?)),
        None => match real(Attention::Mma, 1) {
            Ok(_) => Ok(Place::Gpu),
            Err(why) => Err(Failure::usage(format!("a GPU cannot be used: {why}"))),
        },
    }
}

/// The first `used` GPUs of this machine, once everything that training needs beside them is found.
fn real(attention: Attention, used: usize) -> std::result::Result<Vec<Properties>, String> {
    let survey = Survey::of_first(used);
    let gpus = survey.gpus?;
    for found in [survey.nvrtc, survey.cublaslt] {
        found?;
    }
    if gpus.is_empty() {
        return Err("the driver is there, but no GPU (CUDA_VISIBLE_DEVICES may hide them)".into());
    }
    if let Some(old) = gpus.iter().find(|gpu| gpu.machine.capability < Machine::OLDEST.capability) {
        return Err(format!(
            "{} is {}, and the kernels need {} or newer (CUDA_VISIBLE_DEVICES can hide it)",
            old.name,
            old.machine,
            Machine::OLDEST
        ));
    }
    if let (Attention::Wgmma, Some(other)) =
        (attention, gpus.iter().find(|gpu| gpu.machine != Machine::HOPPER))
    {
        return Err(format!(
            "{} is {}, and --attention wgmma needs {} (CUDA_VISIBLE_DEVICES can hide it)",
            other.name,
            other.machine,
            Machine::HOPPER
        ));
    }
    Ok(gpus)
}

/// The GPUs of the emulation, if it was asked for.
///
/// # Errors
/// What was asked for is no emulation.
pub fn emulation() -> Result<Option<Vec<Card>>> {
    let Some(text) = std::env::var_os(EMULATION) else { return Ok(None) };
    let text = text.to_string_lossy();
    let wrong = || Failure::usage(format!("{EMULATION}={text}: give a number of GPUs and bytes, as 2,64M"));
    let (gpus, memory) = text.split_once(',').ok_or_else(wrong)?;
    let gpus: usize = gpus.parse().map_err(|_| wrong())?;
    let memory = human::parse_bytes(memory).map_err(|_| wrong())?;
    match gpus {
        // No rank more takes one of its own.
        0 | MAX_SIZE.. => Err(wrong()),
        n => Ok(Some(vec![Card { name: "emulated".into(), memory, shared: usize::MAX }; n])),
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::plan::{MicroBatch, ModelChoice};

    /// So many of Hopper's.
    pub fn gpus(n: usize) -> Gpus {
        let each = vec![Card { name: "H200".into(), memory: 1 << 37, shared: 227 << 10 }; n];
        Gpus { each, share: false, attention: Attention::Auto, hopper: true, identity: None }
    }

    #[test]
    fn ranks_on_a_gpu_divide_its_memory() {
        let room = |bytes| ("GPU 0 (H200)".to_owned(), bytes);
        assert_eq!(Device::Emulated(gpus(2)).rooms(3, false).into_iter().next(), Some(room(1 << 36)));
        assert_eq!(Device::Emulated(gpus(4)).rooms(3, false).len(), 3);
        // The libraries' part is nobody's.
        let left = |ranks, nccl| (1usize << 37) - Device::Cuda(gpus(2)).rooms(ranks, nccl)[0].1;
        assert_eq!((left(2, false), left(2, true)), (256 << 20, (512 << 20) + NCCL_PEER));
        // Ranks that share a GPU have a context each, and channels to all others.
        assert_eq!(left(3, true), (1 << 36) + CONTEXT + (512 << 20) + 2 * NCCL_PEER);
    }

    #[test]
    fn attention_takes_what_hopper_alone_has_where_it_can() {
        let by =
            |hopper, attention, element, width| Gpus { hopper, attention, ..gpus(1) }.kernels(element, width);
        assert_eq!(by(true, Attention::Auto, DType::Bf16, 64), TensorCores::Wgmma);
        assert_eq!(by(true, Attention::Auto, DType::Bf16, 128), TensorCores::Wgmma);
        for (hopper, element, width) in
            [(false, DType::Bf16, 64), (true, DType::F32, 64), (true, DType::Bf16, 32)]
        {
            assert_eq!(by(hopper, Attention::Auto, element, width), TensorCores::Mma);
        }
        assert_eq!(by(true, Attention::Mma, DType::Bf16, 64), TensorCores::Mma);
        // Refused later, with the reason.
        assert_eq!(by(true, Attention::Wgmma, DType::F32, 64), TensorCores::Wgmma);
    }

    #[test]
    fn what_the_kernels_do_not_take_is_refused_before_any_rank_starts() {
        let nano = models::LlamaConfig::preset("nano").unwrap();
        let batch = |rows| MicroBatch {
            rows,
            length: 8,
            recompute: models::Recompute::Full,
            precision: MatmulPrecision::Highest,
            threads: 1,
        };
        let refused = |config, batch, words: [&str; 2]| {
            let model = ModelChoice::new("wide", config);
            assert!(model.footprint(&batch, Precision::Bf16, &Device::Cpu).is_ok());
            let device = Device::Cuda(gpus(1));
            let refused = model.footprint(&batch, Precision::Bf16, &device).unwrap_err();
            let text = refused.to_string();
            assert!(refused.code() == 2 && words.iter().all(|word| text.contains(word)), "{text}");
        };
        refused(models::LlamaConfig { head_dim: 512, ..nano.clone() }, batch(1), ["512", "at most 256"]);
        refused(nano, batch(1 << 16), ["65536 sequences", "at most 65535"]);
    }

    #[test]
    fn kernels_that_no_block_of_a_gpu_could_hold_are_refused_with_what_would_fit() {
        use models::Recompute::{Full, NoBackward};
        let small = Card { name: "RTX".into(), memory: 24 << 30, shared: 99 << 10 };
        let Gpus { mut each, .. } = gpus(1);
        each.push(small);
        let device = Device::Cuda(Gpus { each, hopper: false, ..gpus(0) });
        let planned = |config: &models::LlamaConfig, dtype, recompute| {
            let precision = MatmulPrecision::Highest;
            let batch = MicroBatch { rows: 1, length: 8, recompute, precision, threads: 1 };
            ModelChoice::new("m", config.clone()).footprint(&batch, dtype, &device)
        };
        let config = models::LlamaConfig::preset("llama-2-7b").unwrap();
        let refused = planned(&config, Precision::Bf16, Full).unwrap_err();
        let text = "--dtype bf16: attention_backward:bf16:128 needs 132096 bytes of shared memory a block, and GPU 1 (RTX) \
                    has 101376 (CUDA_VISIBLE_DEVICES can hide it); this would fit: --dtype f32 (43264)";
        assert_eq!((refused.code(), refused.to_string().as_str()), (2, text));
        assert!(planned(&config, Precision::F32, Full).is_ok());
        assert!(planned(&config, Precision::Bf16, NoBackward).is_ok());
        // Sums for so wide a norm fit in no type there.
        let wide = models::LlamaConfig { hidden: 32768, ..config };
        let refused = planned(&wide, Precision::Bf16, Full).unwrap_err().to_string();
        assert!(refused.ends_with("no --dtype fits: take --device cpu, or another model"), "{refused}");
    }
}
