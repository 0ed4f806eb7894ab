//! Which transports there are, which this machine can use, and why not the others.

use crate::failure::{Failure, Result};
use rustix::fs::MemfdFlags;

/// How the ranks of a run reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Ranks are processes that read each other's memory.
    Shm,
    /// Ranks are threads of this process.
    Threads,
}

impl Transport {
    /// The name users choose it by.
    pub fn name(self) -> &'static str {
        match self {
            Transport::Shm => "shm",
            Transport::Threads => "threads",
        }
    }

    /// What `--transport NAME` means on this machine.
    ///
    /// # Errors
    /// An unknown name, or a transport that cannot be used here.
    pub fn choose(name: &str) -> Result<Self> {
        let chosen = match name {
            "auto" | "shm" => Transport::Shm,
            "threads" => Transport::Threads,
            _ => {
                return Err(Failure::usage(format!(
                    "transport '{name}' is not in this build: it has shm and threads, and auto, which is shm"
                )));
            }
        };
        match chosen.obstacle() {
            Some(why) => Err(Failure::usage(format!(
                "transport {} cannot be used: {why}; --transport threads needs none of that",
                chosen.name()
            ))),
            None => Ok(chosen),
        }
    }

    /// Why this machine cannot use it, if it cannot.
    fn obstacle(self) -> Option<String> {
        match self {
            Transport::Threads => None,
            Transport::Shm => {
                let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
                let refusal = rustix::fs::memfd_create("caravan-probe", flags).err()?;
                Some(format!("the system grants no anonymous shared memory (memfd_create): {refusal}"))
            }
        }
    }
}

/// Every transport by name, whether it can be used, and a remark or the reason why not.
pub fn survey() -> Vec<(&'static str, bool, String)> {
    let here = [
        (Transport::Threads, "ranks as threads of one process"),
        (Transport::Shm, "ranks as processes that read each other's memory (anonymous, not in /dev/shm)"),
    ];
    let rows = here.into_iter().map(|(transport, remark)| match transport.obstacle() {
        Some(why) => (transport.name(), false, why),
        None => (transport.name(), true, remark.to_owned()),
    });
    let missing = ["mpi", "ucx", "nccl"].map(|name| (name, false, "not in this build".to_owned()));
    rows.chain(missing).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transport_that_cannot_be_had_says_what_can() {
        assert_eq!(Transport::choose("auto").unwrap(), Transport::Shm);
        assert_eq!(Transport::choose("threads").unwrap(), Transport::Threads);
        let e = Transport::choose("pigeon").unwrap_err();
        assert!(
            e.code() == 2 && e.to_string().contains("'pigeon'") && e.to_string().contains("shm and threads")
        );
        for (name, usable, remark) in survey() {
            assert!(!remark.is_empty(), "{name} {usable}");
        }
    }
}
