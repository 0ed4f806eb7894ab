//! The command line as typed: literal flags with their help, nothing checked beyond their types.

mod choices;
pub mod deepspeed;
mod headings;
mod meant;
mod number;
mod others;
mod reading;

pub use choices::{
    Attention, Closeness, Colour, DeviceKind, Mover, Offload, Order, Precision, Recompute, Rise, Shape,
    Switch, named,
};
pub use number::Number;
pub use others::{CheckpointArgs, DoctorArgs, ReportArgs, SbatchArgs, TokenizeArgs};

use crate::machine::VERSION;
use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;

/// Trains Llamas over many ranks, with ZeRO stages 0 to 3 over one collectives crate.
#[derive(Parser, Debug)]
#[command(name = "caravan", version = VERSION, arg_required_else_help = true, propagate_version = true)]
#[command(
    after_help = "Exit codes: 0 done, 1 the run failed, 2 wrong usage, 128 + signal when interrupted.\n\
    'caravan COMMAND --help' shows every flag and examples."
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Train a Llama on text, token files or random tokens.
    Train(Box<TrainArgs>),
    /// Say what each rank of a training would hold and send, without running it.
    Plan(Box<PlanArgs>),
    /// Mean loss of a model directory, or of the state of a training, on given tokens.
    Eval(EvalArgs),
    /// Measure collectives, their overlap with computation, and what suits this machine.
    Bench(Box<crate::bench::BenchArgs>),
    /// Turn text into a token file, made once for every train and eval.
    Tokenize(TokenizeArgs),
    /// Put trainings side by side on a page, from the metrics that they wrote.
    Report(ReportArgs),
    /// What a state on the disk is of, whether it is as it was written, and its weights as a model.
    Checkpoint(CheckpointArgs),
    /// Print a Slurm script that runs a command on several nodes.
    Sbatch(SbatchArgs),
    /// What this machine offers, and why something is missing.
    Doctor(DoctorArgs),
}

impl Command {
    /// The flags of a training, if it is of one.
    pub fn train(&mut self) -> Option<&mut TrainArgs> {
        match self {
            Command::Train(train) => Some(train),
            Command::Plan(plan) => Some(&mut plan.train),
            _ => None,
        }
    }

    /// The flags about ranks, if it runs any.
    pub fn ranks(&self) -> Option<&RankArgs> {
        match self {
            Command::Train(args) => Some(&args.ranks),
            Command::Eval(args) => Some(&args.ranks),
            Command::Bench(args) => args.command.ranks(),
            Command::Plan(_)
            | Command::Tokenize(_)
            | Command::Report(_)
            | Command::Checkpoint(_)
            | Command::Sbatch(_)
            | Command::Doctor(_) => None,
        }
    }
}

/// Flags of commands that compute.
#[derive(Args, Debug, Clone)]
pub struct DeviceArgs {
    /// What ranks compute on. GPU k of a machine is that of its ranks k, k + GPUs, ...
    #[arg(long, value_enum, default_value_t = DeviceKind::Cpu)]
    pub device: DeviceKind,
    /// The instructions by which attention multiplies on GPUs. Sums are made in another order, so bits differ.
    #[arg(long, value_enum, default_value_t = Attention::Auto)]
    pub attention: Attention,
    /// How close products of f32 (--dtype f32) are to exact ones, as PyTorch names it: as close as f32 can tell, or, where the
    /// processor has AMX, by 16 bits of each number, and on GPUs by 11 (TF32), which is faster. bf16 is always whole.
    #[arg(long, value_enum, default_value_t = Closeness::Highest)]
    pub matmul_precision: Closeness,
}

/// Flags of every command that runs ranks.
#[derive(Args, Debug, Clone)]
pub struct RankArgs {
    /// Ranks: data-parallel processes, or threads with --transport threads. May exceed the number of cores
    /// [default: 2, on GPUs one for each of this machine, or as many as mpirun, srun or torchrun started].
    #[arg(long, value_name = "N")]
    pub ranks: Option<usize>,
    /// How ranks reach each other: shm (processes over shared memory), threads (of one process), mpi (under mpirun
    /// or srun), ucx, shm+mpi or shm+ucx (shared memory inside nodes, messages between), shm+shm or threads+threads (to try
    /// out nodes on one host), or auto: shm on one host, shm+mpi or shm+ucx on several. nccl is between GPUs, one for each
    /// rank, of train and of bench of one operation; nccl+threads, nccl+ucx and so on say what carries the rest.
    #[arg(long, value_name = "NAME", default_value = "auto")]
    pub transport: String,
    /// Ranks of a node, for shm+mpi, shm+ucx, shm+shm, threads+threads and emulated links: K that follow each other, or K that
    /// are dealt out in turn, as by 'srun --distribution=cyclic' [default: the ranks of a host; behind a link, 1].
    #[arg(long, value_name = "K[:cyclic]")]
    pub ranks_per_node: Option<String>,
    /// Lets ranks share a GPU, whose memory and time they then divide.
    #[arg(long)]
    pub share_gpus: bool,
    /// Holds messages between nodes back as such links would: latency=20us,bandwidth=1.25GB/s, to which hops=2,
    /// inside-latency=1us and inside-bandwidth=20GB/s may be added, with commas between. On one machine only.
    #[arg(long, value_name = "LINK")]
    pub emulate_link: Option<String>,
    /// A tuning table from 'bench tune' for the choice of algorithms, at sizes that it tried; at others, and without one, a cost
    /// model chooses [default: $CARAVAN_TUNING].
    #[arg(long, value_name = "FILE")]
    pub tuning: Option<PathBuf>,
    /// Compute threads of each rank of train and eval [default: cores / ranks of the host, at least 1, at most
    /// those that the rank is bound to].
    #[arg(long, value_name = "K")]
    pub threads: Option<usize>,
    /// Seconds that ranks wait for each other at the start.
    #[arg(long, value_name = "SECONDS", default_value = "60")]
    pub rendezvous_timeout: Number,
    /// Seconds that a rank may be silent later while another waits for it; then the run ends and names it. One that gets further
    /// with others meanwhile is waited for ten times as long. It has to be longer than 32 MiB take over the slowest link.
    #[arg(long, value_name = "SECONDS", default_value = "600")]
    pub call_timeout: Number,
    /// Colours of the bar that train and eval draw [default: auto, which leaves them away where NO_COLOR is set].
    #[arg(long, value_enum, value_name = "WHEN")]
    pub color: Option<Colour>,
    /// No progress, no tables, no sample: errors, and the loss that eval is for.
    #[arg(long, short)]
    pub quiet: bool,
}

/// Flags of `train`.
#[derive(Args, Debug, Clone)]
#[command(after_help = "Examples:
  caravan train
      a small Llama on the sources and documents under this directory, 2 ranks, ZeRO stage 3, bf16
  caravan train --data shakespeare.txt --model baby --micro-batch 6 --steps 2000 --save out
  caravan train --model 32m --data random --stage 2 --seq 256 --micro-batch 4 --steps 20 --metrics run.jsonl
  caravan train --model llama-3.2-1b --data corpus.bin --device cuda --ranks 1 --seq 2048 --micro-batch 8
  caravan train --model path/to/llama --data corpus.bin --lr 2e-5 --warmup 100 --recompute full --save tuned
  caravan train --model 32m --data corpus.bin --steps 5000 --deepspeed ds_config.json")]
#[command(mut_args(headings::headed))]
pub struct TrainArgs {
    /// A known shape (nano, baby, 32m, llama-3.2-1b, ...) with new weights, a Hugging Face config.json, which is another
    /// shape with new weights, or a Hugging Face directory whose weights are loaded (./nano, if it has the name of a shape).
    #[arg(long, value_name = "NAME|FILE.json|DIR", default_value = "baby")]
    pub model: PathBuf,
    /// Text files, token files, directories (their .rs, .md and .txt files or their .bin token files, without hidden
    /// directories, target, node_modules, __pycache__, models below them, and what links to directories lead to), pipes such as
    /// /dev/stdin, or 'random' [default: text files of at most 128 KiB below here]. Of token files 2^26 tokens, all over
    /// them, are compared with the model's vocabulary before the first step, the others as they are read.
    #[arg(long, value_name = "PATH", num_args = 1..)]
    pub data: Vec<PathBuf>,
    /// Files to hold out whole, named as those of --data: what evaluations are of. Nothing is held out of --data then.
    #[arg(long, value_name = "PATH", num_args = 1.., conflicts_with = "val_fraction")]
    pub val_data: Vec<PathBuf>,
    /// 'bytes' or a Hugging Face tokenizer.json [default: the one in the model's directory, or beside the config.json that
    /// --model names, else bytes for text; a directory whose model has a larger vocabulary and was not trained on bytes has
    /// to be given one].
    #[arg(long, value_name = "bytes|FILE")]
    pub tokenizer: Option<PathBuf>,
    /// Put the tokenizer's token that ends a text (eos_token of special_tokens_map.json or tokenizer_config.json beside its
    /// tokenizer.json) behind each file that does not end with it. Without it, unless the tokenizer.json itself puts a token there,
    /// files go on as the next.
    #[arg(long)]
    pub append_eod: bool,
    /// A DeepSpeed configuration, in JSON, in place of the flags that it stands for. What it says of them, what is ignored and
    /// why is shown; what is not supported is refused. Flags say what it does not, or leaves to them with "auto".
    #[arg(long, value_name = "FILE", aliases = ["deepspeed-config", "deepspeed_config"])]
    pub deepspeed: Option<PathBuf>,
    /// The same, read.
    #[arg(skip)]
    pub configuration: Option<deepspeed::File>,
    /// Ranks and how they talk.
    #[command(flatten)]
    pub ranks: RankArgs,
    /// What they compute on.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// What leaves the device for memory of the host.
    #[arg(long, value_enum, default_value_t = Offload::None)]
    pub offload: Offload,
    /// Launch sequences of kernels that come again as CUDA graphs, so that the host need not launch each kernel. The bits
    /// are the same either way. By default they are, on GPUs that are not emulated.
    #[arg(long, value_enum)]
    pub cuda_graphs: Option<Switch>,
    /// ZeRO stage: 0 shards nothing, 1 optimizer state, 2 also gradients, 3 also parameters.
    #[arg(long, value_name = "0..3", default_value = "3")]
    pub stage: String,
    /// The type of weights, activations and gradients.
    #[arg(long, value_enum, ignore_case = true, default_value_t = Precision::Bf16)]
    pub dtype: Precision,
    /// What losses of --dtype f16 are multiplied by, so that small gradients are not lost: a number for all steps, or dynamic,
    /// by the rules and settings of DeepSpeed: initial=65536,window=1000,hysteresis=2,min=1,consecutive=off, of which those can
    /// be given that are to be others. It multiplies the mean loss over all ranks, DeepSpeed's each rank's own. A step whose
    /// gradient overflows is skipped [default: dynamic].
    #[arg(long, value_name = "S|dynamic|SETTINGS")]
    pub loss_scale: Option<String>,
    /// Optimizer steps.
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub steps: usize,
    /// Sequences per rank and micro-batch.
    #[arg(long, value_name = "B", default_value_t = 12)]
    pub micro_batch: usize,
    /// Micro-batches per rank and step.
    #[arg(long, value_name = "A", default_value_t = 1)]
    pub accumulate: usize,
    /// Add micro-batches in the order in which ranks are added, so that a run's bits are the same on 1, 2, 4 or any other
    /// power of two of ranks that have as many micro-batches together, --ranks times --accumulate. From 4 micro-batches of a
    /// rank on that takes memory for more than one sum of gradients: for log2 of --accumulate, rounded down.
    #[arg(long)]
    pub reproducible: bool,
    /// Tokens of a sequence [default: the model's context, at most 256].
    #[arg(long, value_name = "T")]
    pub seq: Option<usize>,
    /// Learning rate after warm-up.
    #[arg(long, value_name = "RATE", default_value = "0.001")]
    pub lr: Number,
    /// The learning rate that a linear or cosine schedule comes down to: the step after the last would have it
    /// [default: a tenth of --lr].
    #[arg(long, value_name = "RATE")]
    pub min_lr: Option<Number>,
    /// Steps during which the learning rate rises to --lr [default: a tenth of --schedule-steps, at most 100].
    #[arg(long, value_name = "N")]
    pub warmup: Option<usize>,
    /// How it rises [default: linear].
    #[arg(long, value_enum, value_name = "SHAPE")]
    pub warmup_shape: Option<Rise>,
    /// The learning rate that it rises from [default: 0].
    #[arg(long, value_name = "RATE")]
    pub warmup_from: Option<Number>,
    /// How the learning rate goes after warm-up. DeepSpeed's schedules have at each step the rate that DeepSpeed has there.
    #[arg(long, value_enum, ignore_case = true, default_value_t = Shape::Cosine)]
    pub schedule: Shape,
    /// The step, counted from 0, at which the schedule has come down, or for WarmupDecayLR the one before that, as DeepSpeed
    /// counts; later ones stay there [default: --steps].
    #[arg(long, value_name = "N")]
    pub schedule_steps: Option<usize>,
    /// AdamW's decoupled weight decay (matrices and embeddings; norms have none).
    #[arg(long, value_name = "X", default_value = "0.1")]
    pub weight_decay: Number,
    /// AdamW's decay of the first moment.
    #[arg(long, value_name = "X", default_value = "0.9")]
    pub beta1: Number,
    /// AdamW's decay of the second moment.
    #[arg(long, value_name = "X", default_value = "0.99")]
    pub beta2: Number,
    /// AdamW's epsilon.
    #[arg(long, value_name = "X", default_value = "1e-8")]
    pub eps: Number,
    /// The largest global norm of the gradient; 0 clips nothing.
    #[arg(long, value_name = "NORM", default_value = "1")]
    pub clip: Number,
    /// Seed of new weights, of the order of data and of the sample.
    #[arg(long, value_name = "S", default_value_t = 1337)]
    pub seed: u64,
    /// The order of training windows.
    #[arg(long, value_enum, default_value_t = Order::Shuffled)]
    pub order: Order,
    /// Which activations backward computes again.
    #[arg(long, value_enum, default_value_t = Recompute::None)]
    pub recompute: Recompute,
    /// Steps between evaluations on the held-out tokens; 0 evaluates at the end only [default: 500].
    #[arg(long, value_name = "N")]
    pub eval_every: Option<usize>,
    /// Tokens of an evaluation, the first of those held out, in whole sequences only and at least one; the one at the end takes
    /// all of them [default: 1048576].
    #[arg(long, value_name = "N")]
    pub eval_tokens: Option<usize>,
    /// The part of the tokens, at their end, that is held out [default: 0.1, of data that nobody named at most 131072
    /// tokens; 0 if random or sequential].
    #[arg(long, value_name = "X")]
    pub val_fraction: Option<Number>,
    /// Write one JSON object a line: the run, each step, evaluation and checkpoint, the summary.
    #[arg(long, value_name = "FILE")]
    pub metrics: Option<PathBuf>,
    /// Write where a few steps go: what each rank computes, what it waits for, and its calls in flight, for Perfetto
    /// (ui.perfetto.dev) or Chrome (chrome://tracing). On GPUs profilers of theirs do that.
    #[arg(long, value_name = "FILE.json")]
    pub trace: Option<PathBuf>,
    /// The steps that --trace is of, counted from 1 [default: 3-5].
    #[arg(long, value_name = "FIRST-LAST")]
    pub trace_steps: Option<String>,
    /// Keep the state of the training below this directory: f32 weights and both moments of the optimizer, as often as
    /// --checkpoint-every says, at the end, and when SIGTERM or SIGUSR1 asks the run to end. Each takes the place of the one
    /// before, or of the oldest of --checkpoint-keep, once it is whole. Each rank writes its own part, so that all have to see
    /// the directory.
    #[arg(long, value_name = "DIR")]
    pub checkpoint: Option<PathBuf>,
    /// Steps between checkpoints; 0 makes one when the run ends only [default: 1000].
    #[arg(long, value_name = "N")]
    pub checkpoint_every: Option<usize>,
    /// The last so many checkpoints stay [default: 1]. --resume goes on from the last: from an earlier one where those behind it
    /// are taken away.
    #[arg(long, value_name = "N")]
    pub checkpoint_keep: Option<usize>,
    /// Write checkpoints beside the steps that follow, but for the one at the end: each rank from a copy of its own part, of
    /// 12 bytes a parameter divided by the ranks. Without it the run stands still meanwhile.
    #[arg(long)]
    pub checkpoint_async: bool,
    /// Go on from the state in --checkpoint with the same bits as if nothing had ended; without one there, begin anew. --stage
    /// and all that is said of how ranks talk may be others. So may --ranks: a step takes --ranks times --accumulate
    /// micro-batches then, and has the same bits only with --reproducible and as many of them as before.
    #[arg(long)]
    pub resume: bool,
    /// Write the trained model as a Hugging Face directory, once, at the end. It
    /// has no state of the optimizer, which --checkpoint keeps: a run that starts from it begins its schedule and its order of
    /// data anew, best with another --seed. By SIGTERM or SIGUSR1 the run stops between two steps and saves, but
    /// under Open MPI's mpirun by SIGUSR1 only; Ctrl-C ends it at once.
    #[arg(long, value_name = "DIR")]
    pub save: Option<PathBuf>,
    /// At stage 3, gather the next unit's parameters while this one computes [default: on]. The bits are the same either way.
    #[arg(long, value_enum)]
    pub prefetch: Option<Switch>,
    /// Who moves calls forward while ranks compute. A thread is one more beside the --threads of each rank, which by
    /// default leave it a processor: over messages it sends and fetches the next, over shm it copies and adds. The bits are the
    /// same either way.
    #[arg(long, value_enum, value_name = "WHO", default_value_t = Mover::Inline)]
    pub progress: Mover,
    /// Bytes of a bucket, the piece of a unit that is reduced at once; suffixes K, M and G (or KiB, MiB, GiB) are powers of 1024.
    /// The bits are the same for every size.
    #[arg(long, value_name = "BYTES", default_value = "64M")]
    pub bucket_size: String,
    /// Tokens of generated text to show at the end, or as many as come before one that ends a text or are made in 30 s; 0 for
    /// none. Drawn at a temperature of 0.8, by --seed, as what follows the end of a line.
    #[arg(long, value_name = "N", default_value_t = 240)]
    pub sample: usize,
}

/// Flags of `plan`: those of `train`, of whose command line it takes the place.
#[derive(Args, Debug, Clone)]
#[command(after_help = "Examples:
  caravan plan --model 32m --ranks 8 --seq 256 --micro-batch 4
      what a rank holds at each stage on this host
  caravan plan --model llama-3.1-8b --device cuda --transport nccl --ranks 8 --seq 4096 --micro-batch 1 --recompute full
  caravan plan --model config.json --transport shm+ucx --ranks-per-node 8 --ranks 64 --json

What train would read is not looked at but for the model's shape: data, tokenizer, GPUs and launchers need not be there. What \
engines hold over MPI is that of an MPI whose own limits for short messages are above 8 KiB.")]
pub struct PlanArgs {
    /// The training.
    #[command(flatten)]
    pub train: TrainArgs,
    /// Print one JSON object, with every byte.
    #[arg(long)]
    pub json: bool,
}

/// Flags of `eval`.
#[derive(Args, Debug, Clone)]
#[command(after_help = "Examples:
  caravan eval --model out --data shakespeare.txt
  caravan eval --model out --data val.bin --ranks 4 --dtype f32 --json")]
pub struct EvalArgs {
    /// A Hugging Face directory, such as train --save wrote; or what train --checkpoint was given, whose last state is taken,
    /// or a step-N in it.
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Text files, token files, directories (their .rs, .md and .txt files, or their token files named .bin, without what
    /// links to directories lead to), or pipes of text such as /dev/stdin.
    #[arg(long, value_name = "PATH", num_args = 1.., required = true)]
    pub data: Vec<PathBuf>,
    /// 'bytes' or a Hugging Face tokenizer.json [default: the one in the model's directory, or bytes if it is of bytes].
    #[arg(long, value_name = "bytes|FILE")]
    pub tokenizer: Option<PathBuf>,
    /// Put the tokenizer's token that ends a text (eos_token of special_tokens_map.json or tokenizer_config.json beside its
    /// tokenizer.json) behind each file that does not end with it. Without it, unless the tokenizer.json itself puts a token there,
    /// files go on as the next.
    #[arg(long)]
    pub append_eod: bool,
    /// Ranks and how they talk.
    #[command(flatten)]
    pub ranks: RankArgs,
    /// What they compute on.
    #[command(flatten)]
    pub device: DeviceArgs,
    /// The type of weights and activations.
    #[arg(long, value_enum, ignore_case = true, default_value_t = Precision::F32)]
    pub dtype: Precision,
    /// Sequences per rank and batch. On a processor no bit of the result depends on them, nor on --ranks and --threads.
    #[arg(long, value_name = "B", default_value_t = 8)]
    pub micro_batch: usize,
    /// Tokens of a sequence; the last may be shorter [default: the model's context, at most 1024].
    #[arg(long, value_name = "T")]
    pub seq: Option<usize>,
    /// Print one JSON object with every digit; a perplexity above every number is null.
    #[arg(long)]
    pub json: bool,
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use clap::CommandFactory;

    /// The flags of `bench`.
    pub fn bench(flags: &str) -> crate::bench::BenchArgs {
        let words = ["caravan", "bench"].into_iter().chain(flags.split_whitespace());
        let Command::Bench(args) = Cli::read(words).expect(flags).command else { panic!("{flags}") };
        *args
    }

    /// The flags of `train`.
    pub fn train(flags: &str) -> TrainArgs {
        let words = ["caravan", "train"].into_iter().chain(flags.split_whitespace());
        let Command::Train(args) = Cli::read(words).expect(flags).command else { panic!("{flags}") };
        *args
    }

    #[test]
    fn a_negative_number_is_a_value_wherever_a_flag_takes_one() {
        assert!(Cli::read(["caravan", "train", "--lr", "-1", "--tuning", "-1"]).is_ok());
        for flag in ["--ranks", "--steps"] {
            let text = crate::failure::sentence(&Cli::read(["caravan", "train", flag, "-1"]).unwrap_err());
            assert!(text.contains("'-1'") && text.contains(flag), "{text}");
        }
        let unknown = Cli::read(["caravan", "train", "-1"]).unwrap_err();
        assert_eq!(unknown.kind(), clap::error::ErrorKind::UnknownArgument);
    }

    #[test]
    fn every_flag_of_train_stands_under_a_heading() {
        let train = Cli::command().find_subcommand("train").cloned().unwrap();
        for arg in train.get_arguments() {
            assert!(arg.get_help_heading().is_some(), "{}", arg.get_id());
        }
    }

    #[test]
    fn help_names_no_flag_that_the_command_lacks() {
        let mut cli = Cli::command();
        cli.build();
        let mut help = |path: &[&str]| {
            let sub = path.iter().fold(&mut cli, |sub, name| sub.find_subcommand_mut(name).unwrap());
            sub.render_long_help().to_string().split_whitespace().collect::<Vec<_>>().join(" ")
        };
        for path in [&["train"][..], &["eval"], &["bench", "overlap"], &["bench", "tune"]] {
            let help = help(path);
            assert!(
                !help.contains("--algo native") && help.contains("over the slowest link [default: 600]"),
                "{help}"
            );
            assert!(help.contains("hops=2, inside-latency=1us"), "{help}");
        }
        assert!(
            help(&["bench", "all_reduce"]).contains("with --algo native, than all that a call sends takes")
        );
        assert!(help(&["train"]).contains("[default: 1e-8]"));
    }

    #[test]
    fn other_names_of_types_and_devices_are_taken() {
        for (name, dtype) in [
            ("bfloat16", Precision::Bf16),
            ("BF16", Precision::Bf16),
            ("float32", Precision::F32),
            ("fp32", Precision::F32),
        ] {
            assert_eq!(train(&format!("--dtype {name}")).dtype, dtype, "{name}");
        }
        assert_eq!(train("--device gpu").device.device, DeviceKind::Cuda);
    }

    #[test]
    fn every_subcommand_has_help_with_examples() {
        let mut cli = Cli::command();
        Cli::command().debug_assert();
        for sub in cli.get_subcommands_mut() {
            let name = sub.get_name().to_owned();
            let help = sub.render_long_help().to_string();
            assert!(help.contains("Examples:"), "{name} has no examples");
            assert!(help.contains(&format!("caravan {name}")), "{name}'s examples do not call it");
            for arg in sub.get_arguments().filter(|a| !a.is_hide_set()) {
                assert!(arg.get_help().is_some(), "{name} {} has no help", arg.get_id());
            }
        }
    }
}
