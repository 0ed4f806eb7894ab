//! What can be said of a training's flags on any machine, whatever its files hold.

use super::outputs::{check_beside, outputs};
use super::steps::step_tokens;
use super::{ModelChoice, Numbers, TRAIN_SEQ, Traced, usage};
use crate::args::{DeviceKind, Offload, Switch, TrainArgs};
use crate::checkpoint::Checkpoints;
use crate::data::{self, held};
use crate::device;
use crate::failure::Result;
use crate::files::{self, Output};
use crate::transports;
use models::{LlamaConfig, MatmulPrecision};

/// What flags say on any machine.
#[derive(Debug)]
pub struct Anywhere {
    /// What the numbers among them say.
    pub numbers: Numbers,
    /// How close products are to be to exact ones.
    pub precision: MatmulPrecision,
}

/// Checks the flags of a training by `world` ranks, which it has for so many, where nobody looks at where files lie.
///
/// # Errors
/// Those of [`check_flags`], and outputs that are in the model's way by their names.
pub fn check_anywhere(args: &TrainArgs, world: usize) -> Result<Anywhere> {
    let anywhere = check_flags(args, world)?;
    if let Some(model) = &args.save {
        outputs(args.metrics.as_deref(), args.trace.as_deref())
            .iter()
            .try_for_each(|output| check_beside(output.flag, output.file, output.file, model))?;
    }
    Ok(anywhere)
}

/// The same for who looks there next.
///
/// # Errors
/// Numbers that make no sense, flags that do not go together, a sequence that a known model does not take, too long a step,
/// random tokens beside files, and outputs in each other's way.
pub fn check_flags(args: &TrainArgs, world: usize) -> Result<Anywhere> {
    let numbers = Numbers::check(args, world)?;
    let nccl = transports::beside_nccl(&args.ranks.transport).is_some();
    device::check_flags(&args.device, nccl, args.ranks.share_gpus)?;
    let precision = device::matmul_precision(&args.device, args.dtype)?;
    check_device(args)?;
    Checkpoints::check_flags(args)?;
    Traced::asked(args, 0)?;
    data::check_names("--data", &args.data)?;
    data::check_alone(&args.data)?;
    held::check(&args.data, &args.val_data)?;
    let name = &*args.model.to_string_lossy();
    let length = match LlamaConfig::preset(name) {
        Ok(config) => ModelChoice::new(name, config).sequence(args.seq, TRAIN_SEQ)?,
        Err(_) => args.seq.unwrap_or(1),
    };
    step_tokens(args, world, length)?;
    let outputs = outputs(args.metrics.as_deref(), args.trace.as_deref());
    outputs.iter().try_for_each(|output| files::check_output_name(output.flag, output.file))?;
    for (flag, path) in [("--save", &args.save), ("--checkpoint", &args.checkpoint)] {
        path.as_ref().map_or(Ok(()), |path| files::check_name(flag, path, "the name of a directory"))?;
    }
    files::check_distinct(&outputs)?;
    check_apart(args, &outputs)?;
    Ok(Anywhere { numbers, precision })
}

/// Whether checkpoints have a place for themselves.
fn check_apart(args: &TrainArgs, outputs: &[Output<'_>]) -> Result<()> {
    let Some(dir) = &args.checkpoint else { return Ok(()) };
    let save = args.save.iter().map(|save| ("--save", save.as_path()));
    let mut all = outputs.iter().map(|output| (output.flag, output.file)).chain(save);
    all.try_for_each(|(flag, path)| Checkpoints::check_apart(dir, flag, path))
}

/// Whether flags of a training on GPUs come with them.
fn check_device(args: &TrainArgs) -> Result<()> {
    match (args.device.device, args.offload, args.cuda_graphs) {
        (DeviceKind::Cpu, Offload::Optimizer, _) => usage(
            "--offload optimizer moves state from GPUs to the host, where --device cpu has it already: add \
             --device cuda, or leave --offload away"
                .into(),
        ),
        (DeviceKind::Cpu, _, Some(Switch::On)) => {
            usage("--cuda-graphs on is for GPUs: add --device cuda".into())
        }
        _ => Ok(()),
    }
}
