//! What flags choose among, by name.

use clap::ValueEnum;
use collectives::{DType, Progress};
use models::MatmulPrecision;
use models::cuda::TensorCores;

/// As a flag names one of those that it chooses among.
pub fn named(choice: impl ValueEnum) -> String {
    choice.to_possible_value().map_or(String::new(), |value| value.get_name().to_owned())
}

/// On or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// Yes.
    On,
    /// No.
    Off,
}

/// The type of weights, activations and gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Precision {
    /// bfloat16 weights and activations, and in training gradients, beside f32 master weights and moments.
    #[value(alias = "bfloat16")]
    Bf16,
    /// IEEE's half precision likewise, with losses that are scaled (--loss-scale).
    #[value(alias = "float16", alias = "fp16", alias = "half")]
    F16,
    /// f32 throughout.
    #[value(alias = "float32", alias = "fp32")]
    F32,
}

impl Precision {
    /// As `--dtype` names it.
    pub fn name(self) -> String {
        named(self)
    }

    /// The type of elements.
    pub fn dtype(self) -> DType {
        match self {
            Precision::Bf16 => DType::Bf16,
            Precision::F16 => DType::F16,
            Precision::F32 => DType::F32,
        }
    }
}

/// How close products of f32 are to exact ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Closeness {
    /// As close as f32 can tell.
    Highest,
    /// By 16 bits of each number in AMX, or by 11 on GPUs (TF32), which is faster.
    High,
}

impl Closeness {
    /// What models are told.
    pub fn precision(self) -> MatmulPrecision {
        match self {
            Closeness::Highest => MatmulPrecision::Highest,
            Closeness::High => MatmulPrecision::High,
        }
    }
}

/// How the learning rate goes after its warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Shape {
    /// Stays at --lr.
    Constant,
    /// Straight down to --min-lr.
    Linear,
    /// Half a cosine down to --min-lr.
    Cosine,
    /// DeepSpeed's of that name, to the step: stays at --lr.
    #[value(name = "WarmupLR")]
    WarmupLr,
    /// DeepSpeed's: straight down to --warmup-from.
    #[value(name = "WarmupDecayLR")]
    WarmupDecayLr,
    /// DeepSpeed's: half a cosine down to --min-lr.
    #[value(name = "WarmupCosineLR")]
    WarmupCosineLr,
}

/// How the learning rate rises in its warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Rise {
    /// By as much in each step.
    Linear,
    /// As the logarithm of the steps, faster at first.
    Log,
}

impl Rise {
    /// As `--warmup-shape` names it.
    pub fn name(self) -> String {
        named(self)
    }
}

impl Shape {
    /// As `--schedule` names it.
    pub fn name(self) -> String {
        named(self)
    }

    /// Whether steps are counted as DeepSpeed's schedules count them.
    pub fn of_deepspeed(self) -> bool {
        matches!(self, Shape::WarmupLr | Shape::WarmupDecayLr | Shape::WarmupCosineLr)
    }

    /// Whether it comes down at all.
    pub fn comes_down(self) -> bool {
        !matches!(self, Shape::Constant | Shape::WarmupLr)
    }

    /// Whether it comes down to --min-lr.
    pub fn has_floor(self) -> bool {
        matches!(self, Shape::Linear | Shape::Cosine | Shape::WarmupCosineLr)
    }
}

/// The order in which windows of the training tokens are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Order {
    /// Windows at random places, the same for the same --seed.
    Shuffled,
    /// Window s starts at token s*T; micro-batch a of rank r in step k is number g = (k*A + a)*W + r, counted from 0, and
    /// takes windows g*B to g*B + B - 1, where A is --accumulate, B --micro-batch and W the number of ranks. After --resume
    /// with other batches k counts from there, and windows from behind those that were taken.
    Sequential,
}

impl Order {
    /// As `--order` names it.
    pub fn name(self) -> String {
        named(self)
    }
}

/// Which activations backward computes again instead of keeping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Recompute {
    /// None: everything that backward reads is kept.
    None,
    /// All of a block's but its input.
    Full,
}

impl Recompute {
    /// As models take it.
    pub fn of_models(self) -> models::Recompute {
        match self {
            Recompute::None => models::Recompute::None,
            Recompute::Full => models::Recompute::Full,
        }
    }
}

/// Who moves started calls forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mover {
    /// A thread of each rank.
    Thread,
    /// The computing thread, as it starts them, looks at them and waits for them.
    Inline,
}

impl Mover {
    /// As `--progress` names it.
    pub fn name(self) -> String {
        named(self)
    }

    /// As the communicator takes it.
    pub fn options(self) -> Progress {
        match self {
            Mover::Thread => Progress::Thread { cpu: None },
            Mover::Inline => Progress::Inline,
        }
    }
}

/// What ranks compute on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DeviceKind {
    /// The processor.
    Cpu,
    /// NVIDIA GPUs, one for each rank unless they share some (--share-gpus).
    #[value(alias = "gpu")]
    Cuda,
}

/// The instructions by which attention multiplies on a GPU's tensor cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Attention {
    /// wgmma where GPUs, elements and heads are for it, else mma.
    Auto,
    /// Products of warps, on any GPU.
    Mma,
    /// Products of warpgroups, on Hopper (sm_90): 16-bit types, heads of 64 and 128.
    Wgmma,
}

impl Attention {
    /// The kernels for such elements and heads, where GPUs are all Hopper's or not.
    pub fn kernels(self, hopper: bool, element: DType, width: usize) -> TensorCores {
        match self {
            Attention::Wgmma => TensorCores::Wgmma,
            Attention::Auto if hopper && TensorCores::Wgmma.check(element, width).is_ok() => {
                TensorCores::Wgmma
            }
            Attention::Auto | Attention::Mma => TensorCores::Mma,
        }
    }
}

/// What leaves the device for memory of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Offload {
    /// Nothing.
    None,
    /// The optimizer's state, which the processor then updates.
    Optimizer,
}

/// When output is coloured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Colour {
    /// On a terminal.
    #[default]
    Auto,
    /// Wherever a bar is drawn.
    Always,
    /// Never.
    Never,
}
