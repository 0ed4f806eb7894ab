//! Flags of the commands that run no ranks.

use super::{Number, Precision};
use clap::Args;
use std::path::PathBuf;

/// Flags of `tokenize`.
#[derive(Args, Debug, Clone)]
#[command(after_help = "Examples:
  caravan tokenize --data shakespeare.txt --out shakespeare.bin
  caravan tokenize --data docs src --tokenizer path/to/tokenizer.json --out corpus.bin
  caravan tokenize --data books --tokenizer tokenizer.json --append-eod --shard-tokens 1e8 --out books.bin
      writes books-00001.bin, books-00002.bin and so on, which 'caravan train --data books-*.bin' takes

The file has llm.c's format: 256 little-endian int32 of header (20240520, 1, count), then u16 tokens; with a \
vocabulary above 65536 the header is (20240801, 7, count) and tokens are u32. One file holds at most 2147483647 tokens; \
train and eval read several as one.")]
pub struct TokenizeArgs {
    /// Text files or directories (their .rs, .md and .txt files, without what links to directories lead to), in this order.
    #[arg(long, value_name = "PATH", num_args = 1.., required = true)]
    pub data: Vec<PathBuf>,
    /// 'bytes' or a Hugging Face tokenizer.json.
    #[arg(long, value_name = "bytes|FILE", default_value = "bytes")]
    pub tokenizer: PathBuf,
    /// Put the tokenizer's token that ends a text (eos_token of special_tokens_map.json or tokenizer_config.json beside its
    /// tokenizer.json) behind each file that does not end with it. Without it, unless the tokenizer.json itself puts a token there,
    /// files go on as the next.
    #[arg(long)]
    pub append_eod: bool,
    /// The token file to write.
    #[arg(long, value_name = "FILE")]
    pub out: PathBuf,
    /// Write several files of so many tokens each, the last of what is left: NAME-00001.bin, NAME-00002.bin and so on of --out
    /// NAME.bin. All of them appear at the end, or none; of an earlier run there must be none.
    #[arg(long, value_name = "N")]
    pub shard_tokens: Option<Number>,
    /// Print one JSON object instead of a sentence.
    #[arg(long)]
    pub json: bool,
}

/// Flags of `report`.
#[derive(Args, Debug, Clone)]
#[command(after_help = "Examples:
  caravan report run.jsonl
  caravan report stage1.jsonl stage3.jsonl --out stages.html --title 'ZeRO 1 and 3'

The page is one file of HTML that loads nothing: results, losses, speed and exposed communication step by step, where the time \
of a step went, memory by class, ranks, and the settings in which the trainings differ. Of a run that is under way it shows what \
there is by then; steps that a resumed run made again are there once.")]
pub struct ReportArgs {
    /// What 'caravan train --metrics' wrote, up to seven of them; speeds are set beside the first one's.
    #[arg(value_name = "RUN.jsonl", required = true)]
    pub metrics: Vec<PathBuf>,
    /// The page to write; it appears under its name when it is complete.
    #[arg(short = 'o', long, value_name = "FILE.html", default_value = "report.html")]
    pub out: PathBuf,
    /// What stands at its top.
    #[arg(long, value_name = "TEXT")]
    pub title: Option<String>,
}

/// Flags of `checkpoint`.
#[derive(Args, Debug, Clone)]
#[command(after_help = "Examples:
  caravan checkpoint state
  caravan checkpoint state --verify
  caravan checkpoint state/step-500 --save model --dtype bf16

A state has the weights and both moments of the optimizer in f32, each as a Hugging Face directory, and training.json, which \
tells of every file its length and the CRC-32 of its bytes, as zlib has it. Its weights are a model as they are, too, for \
'caravan eval' and, of shapes that it takes, transformers.")]
pub struct CheckpointArgs {
    /// What 'caravan train --checkpoint' was given, of which the last state is meant, or a step-N in it.
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
    /// Read all of it, and compare it with what was written.
    #[arg(long)]
    pub verify: bool,
    /// Write the weights as a Hugging Face directory, once they have been compared likewise.
    #[arg(long, value_name = "DIR")]
    pub save: Option<PathBuf>,
    /// What the model of --save holds them as [default: what the training computed with].
    #[arg(long, value_enum, requires = "save")]
    pub dtype: Option<Precision>,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Flags of `sbatch`.
#[derive(Args, Debug, Clone)]
#[command(after_help = "Examples:
  caravan sbatch --nodes 2 --ranks-per-node 8 --gpus-per-rank 1 -- train --device cuda --model 32m --data corpus.bin
  caravan sbatch --nodes 4 --ranks-per-node 16 --time 30:00 -- bench all_reduce --transport mpi > job.sh
  caravan sbatch --nodes 2 --cpus-per-rank 8 -- train | sbatch --qos short --mem 64G

Whatever else sbatch takes is given to sbatch itself, but for how ranks are dealt to nodes, which is in blocks. The script \
starts one process a rank with srun; a rank that fails ends the job. A job that saves and does not resume is not \
requeued. With --transport mpi, srun gets what the MPI of this build needs: --mpi=pmix for Open MPI, --mpi=pmi2 for MPICH, \
--mpi=cray_shasta for Cray's.")]
pub struct SbatchArgs {
    /// Nodes of the job.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub nodes: usize,
    /// Ranks on each node.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub ranks_per_node: usize,
    /// GPUs of each rank: 1 with train or eval --device cuda and bench --transport nccl, else to be left away. Every rank
    /// sees all those of its node, which NCCL needs to go from one directly to another, and computes on one.
    #[arg(long, value_name = "N")]
    pub gpus_per_rank: Option<usize>,
    /// GPUs of each node, for ranks that share them (--share-gpus); otherwise as many as it has ranks.
    #[arg(long, value_name = "N", conflicts_with = "gpus_per_rank")]
    pub gpus_per_node: Option<usize>,
    /// Processor cores of each rank.
    #[arg(long, value_name = "N")]
    pub cpus_per_rank: Option<usize>,
    /// The job's time limit, as Slurm writes it: minutes (90), hours, minutes and seconds (1:30:00), days and hours (1-12), and
    /// so on; 0 and UNLIMITED are none.
    #[arg(long, value_name = "TIME")]
    pub time: Option<String>,
    /// How many seconds before the job's time is up its training is asked to stop and to save, up to 65535; with train
    /// --save or --checkpoint. Slurm looks about once a minute, and shows a job that was stopped as failed, with 143. Without
    /// this it asks when the time is up, and kills soon after (KillWait, usually 30 s).
    #[arg(long, value_name = "SECONDS")]
    pub stop_before: Option<u16>,
    /// The partition.
    #[arg(long, value_name = "NAME")]
    pub partition: Option<String>,
    /// The account.
    #[arg(long, value_name = "NAME")]
    pub account: Option<String>,
    /// The job's name [default: caravan-COMMAND].
    #[arg(long, value_name = "NAME")]
    pub job_name: Option<String>,
    /// Where the job's output goes [default: %x-%j.out].
    #[arg(long, value_name = "FILE")]
    pub output: Option<String>,
    /// How srun serves MPI [default: with --transport mpi pmix for Open MPI, pmi2 for MPICH and cray_shasta for Cray's, else
    /// Slurm's own default].
    #[arg(long, value_name = "PLUGIN")]
    pub mpi: Option<String>,
    /// The command and its flags, after --.
    #[arg(last = true, value_name = "COMMAND", required = true)]
    pub command: Vec<String>,
}

/// Flags of `doctor`.
#[derive(Args, Debug, Clone)]
#[command(after_help = "Examples:
  caravan doctor
  caravan doctor --json")]
pub struct DoctorArgs {
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}
