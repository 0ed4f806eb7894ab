//! Configurations as flags.

use super::*;
use crate::args::{Cli, TrainArgs};
use crate::failure::sentence;
use clap::CommandFactory;
use std::fs;

mod beside;
mod honoured;
mod refused;

/// A configuration beside `flags` of train: what becomes of it, or why nothing does. Its name is ds.json in both.
fn read(config: &str, flags: &str) -> std::result::Result<File, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ds.json");
    fs::write(&path, config).unwrap();
    let mut command = Cli::command();
    let words = ["caravan", "train"].into_iter().chain(flags.split_whitespace());
    let matches = command.try_get_matches_from_mut(words).unwrap_or_else(|e| panic!("{flags}: {e}"));
    let (name, typed) = matches.subcommand().unwrap();
    let file = File::read(&path, command.find_subcommand(name).unwrap(), typed);
    let short = |text: String| text.replace(&path.display().to_string(), "ds.json");
    Ok(File { path: "ds.json".into(), ..file.map_err(short)? })
}

fn words(config: &str, flags: &str) -> String {
    let file = read(config, flags).unwrap_or_else(|e| panic!("{config}: {e}"));
    file.words().collect::<Vec<_>>().join(" ")
}

/// The words for what a file says, without DeepSpeed's defaults.
fn said(config: &str, flags: &str) -> String {
    let mut file = read(config, flags).unwrap_or_else(|e| panic!("{config}: {e}"));
    file.told.words.retain(|word| word.said.is_some());
    file.words().collect::<Vec<_>>().join(" ")
}

fn refusal(config: &str, flags: &str) -> String {
    read(config, flags).err().unwrap_or_else(|| panic!("{config} {flags}"))
}

/// A whole command line with a configuration.
fn train(config: &str, flags: &str) -> std::result::Result<TrainArgs, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ds.json");
    fs::write(&path, config).unwrap();
    let path = path.display().to_string();
    let words = ["caravan", "train", "--deepspeed", &path].into_iter().chain(flags.split_whitespace());
    match Cli::read(words) {
        Ok(mut cli) => Ok(cli.command.train().unwrap().clone()),
        Err(e) => Err(sentence(&e).replace(&path, "ds.json")),
    }
}

/// As users copy them.
const ZERO2_OFFLOAD: &str = r#"{
  "train_batch_size": 64, "train_micro_batch_size_per_gpu": 16, "fp16": {"enabled": true},
  "zero_optimization": {
    "stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true}, "contiguous_gradients": true
  },
  "gradient_accumulation_steps": 4, "gradient_clipping": 1.0
}"#;
const ZERO3_OFFLOAD: &str = r#"{
  "train_batch_size": 256, "gradient_accumulation_steps": 16, "gradient_clipping": 1.0,
  "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 16},
  "zero_optimization": {
    "stage": 3,
    "offload_optimizer": {"device": "cpu", "pin_memory": true},
    "offload_param": {"device": "cpu", "pin_memory": true},
    "overlap_comm": true, "contiguous_gradients": true, "reduce_bucket_size": 500000000,
    "stage3_prefetch_bucket_size": 500000000, "stage3_param_persistence_threshold": 1000000
  }
}"#;
