//! What of CUDA is on this machine, and what is missing.

use super::gpu::{Gpu, Properties};
use crate::bootstrap::spawn::unsignalled;
use crate::device::compile::{Machine, knowing};
use crate::error::Error;
use cuda_sys::cublaslt::CublasLt;
use cuda_sys::driver::Driver;
use cuda_sys::nccl::Nccl;
use std::ffi::c_int;

/// A library: the file and its version, or what is missing and what brings it.
pub type Found = Result<Library, String>;

/// A library that can be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Library {
    /// Its path, or the name by which the loader found it.
    pub file: String,
    /// Its version.
    pub version: String,
}

/// What of CUDA is on this machine.
#[derive(Clone, Debug)]
pub struct Survey {
    /// The driver; its version says which CUDA it supports.
    pub driver: Found,
    /// Whether there is a part of the driver in the system's kernel, and which version.
    pub module: Option<String>,
    /// The GPUs in the driver's order, or why it has none.
    pub gpus: Result<Vec<Properties>, String>,
    /// The compiler of kernels, if it knows these GPUs.
    pub nvrtc: Found,
    /// Products of matrices.
    pub cublaslt: Found,
    /// Collectives between GPUs.
    pub nccl: Found,
}

impl Survey {
    /// Looks. Threads that the driver starts for that take no signals: those are for this process.
    pub fn take() -> Self {
        unsignalled(|| Self::look(Nccl::load, usize::MAX))
    }

    /// The same of the first so many GPUs, with which others that are not used have nothing to do, and without NCCL, which is
    /// large and slow to open.
    pub fn of_first(gpus: usize) -> Self {
        unsignalled(|| Self::look(|| Err("NCCL was not looked for".into()), gpus))
    }

    fn look(nccl: fn() -> Result<Nccl, String>, most: usize) -> Self {
        let driver = Driver::load();
        // Without a driver no library is too new.
        let mut newest = u32::MAX;
        let driver = driver.map(|driver| {
            let mut version: c_int = 0;
            // SAFETY: a valid place to write to.
            unsafe { (driver.driver_version)(&mut version) };
            newest = version as u32 / 1000;
            let version = format!("for CUDA {newest}.{} and older", version as u32 % 1000 / 10);
            Library { file: driver.file().to_owned(), version }
        });
        let gpus = match &driver {
            Ok(_) => gpus(most).map_err(words),
            Err(why) => Err(why.clone()),
        };
        // Older ones no compiler helps.
        let suit = |gpu: &&Properties| gpu.machine.capability >= Machine::OLDEST.capability;
        let suiting = gpus.iter().flatten().filter(suit).map(|gpu| (gpu.machine, gpu.name.as_str()));
        let nvrtc = knowing(newest, &suiting.collect::<Vec<_>>()).map(|library| {
            let (major, minor) = library.number();
            Library { file: library.file().to_owned(), version: format!("{major}.{minor}") }
        });
        Survey {
            module: module(),
            gpus,
            driver,
            nvrtc,
            cublaslt: CublasLt::load(newest).map(|library| {
                // SAFETY: asks for a constant.
                let version = unsafe { (library.version)() };
                let version = format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100);
                Library { file: library.file().to_owned(), version }
            }),
            nccl: nccl().map(|library| Library {
                file: library.file().to_owned(),
                version: Nccl::numbers(library.number()),
            }),
        }
    }

    /// The version of NCCL as one number (23003 is 2.30.3), if there is one. Nothing else of CUDA is opened for it.
    pub fn nccl_number() -> Option<u32> {
        Nccl::load().ok().map(|library| library.number())
    }

    /// The libraries by name, and what each is for.
    pub fn libraries(&self) -> [(&'static str, &'static str, &Found); 4] {
        [
            ("driver", "what all else needs", &self.driver),
            ("NVRTC", "compiles the kernels", &self.nvrtc),
            ("cuBLASLt", "multiplies matrices", &self.cublaslt),
            ("NCCL", "connects GPUs", &self.nccl),
        ]
    }
}

fn gpus(most: usize) -> crate::error::Result<Vec<Properties>> {
    (0..Gpu::count()?.min(most)).map(Gpu::look).collect()
}

fn words(error: Error) -> String {
    match error {
        Error::System { what, source_text } => format!("{what}: {source_text}"),
        other => other.to_string(),
    }
}

/// The version of the driver's kernel module, as `580.159.03`.
fn module() -> Option<String> {
    let text = std::fs::read_to_string("/proc/driver/nvidia/version")
        .or_else(|_| std::fs::read_to_string("/sys/module/nvidia/version"))
        .ok()?;
    let version = |word: &&str| word.contains('.') && word.chars().all(|c| c.is_ascii_digit() || c == '.');
    text.split_whitespace().find(version).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_says_what_brings_it_and_what_is_there_has_a_file() {
        let survey = Survey::take();
        for (name, _, found) in survey.libraries() {
            match found {
                Ok(library) => assert!(!library.file.is_empty() && !library.version.is_empty(), "{name}"),
                Err(why) => assert!(why.contains("install") || why.contains("NVIDIA"), "{name}: {why}"),
            }
        }
        assert!(survey.driver.is_ok() || survey.gpus.is_err());
        assert!(Survey::of_first(1).nccl.unwrap_err().contains("not looked for"));
    }
}
