//! What a GPU makes of the kernels: `gpu [MODEL] [ROWS] [LENGTH]`.
//!
//! Prints the time of each kernel against what the memory or the tensor cores could do at best, measured by a plain copy
//! and taken from the data sheet. Needs a GPU and no network.

mod kernels;
mod timing;

use collectives::device::cuda::Gpu;
use models::LlamaConfig;
use std::process::ExitCode;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), String> {
    let mut arguments = std::env::args().skip(1);
    let model = arguments.next().unwrap_or_else(|| "llama-3.2-1b".into());
    let mut number = |name: &str, default: usize| match arguments.next() {
        None => Ok(default),
        Some(text) => {
            text.parse().ok().filter(|&n| n > 0).ok_or(format!("{name} is '{text}', not a number from 1"))
        }
    };
    let (rows, length) = (number("ROWS", 8)?, number("LENGTH", 2048)?);
    let config = LlamaConfig::preset(&model).map_err(|e| e.to_string())?;
    let gpu = Gpu::open(0).map_err(|e| e.to_string())?;
    let p = gpu.properties();
    let (major, minor) = gpu.newest_cuda();
    println!(
        "{}, {}, {} multiprocessors, {:.1} GiB, driver for CUDA {major}.{minor}",
        p.name,
        p.machine,
        p.multiprocessors,
        p.memory as f64 / (1u64 << 30) as f64
    );
    kernels::table(&gpu, &config, rows, length).map_err(|e| e.to_string())
}
