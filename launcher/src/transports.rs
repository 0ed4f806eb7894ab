//! Which transports there are, which this machine can use, and why not the others.

use crate::failure::{Failure, Result};
use crate::human;
use crate::machine::Machine;

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
    pub fn choose(name: &str, machine: &Machine) -> Result<Self> {
        let chosen = match name {
            "auto" | "shm" => Transport::Shm,
            "threads" => Transport::Threads,
            _ => {
                return Err(Failure::usage(format!(
                    "transport '{name}' is not in this build: it has shm and threads, and auto, which is shm"
                )));
            }
        };
        match chosen.obstacle(machine) {
            Some(why) => Err(Failure::usage(format!(
                "transport {} cannot be used: {why}; --transport threads needs none of that",
                chosen.name()
            ))),
            None => Ok(chosen),
        }
    }

    /// Why this machine cannot use it, if it cannot.
    fn obstacle(self, machine: &Machine) -> Option<String> {
        match (self, machine.shm) {
            (Transport::Threads, _) => None,
            (Transport::Shm, None) => Some("there is no /dev/shm".into()),
            (Transport::Shm, Some((_, 0))) => Some("/dev/shm is full".into()),
            (Transport::Shm, Some(_)) => None,
        }
    }
}

/// Every transport by name, whether it can be used, and a remark or the reason why not.
pub fn survey(machine: &Machine) -> Vec<(&'static str, bool, String)> {
    let free = machine.shm.map_or(0, |s| s.1);
    let here = [
        (Transport::Threads, "ranks as threads of one process".to_owned()),
        (Transport::Shm, format!("processes; {} free in /dev/shm", human::bytes(free))),
    ];
    let rows = here.into_iter().map(|(t, remark)| match t.obstacle(machine) {
        Some(why) => (t.name(), false, why),
        None => (t.name(), true, remark),
    });
    let missing = ["mpi", "ucx", "nccl"].map(|name| (name, false, "not in this build".to_owned()));
    rows.chain(missing).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transport_that_cannot_be_had_says_what_can() {
        let machine = Machine { shm: Some((1 << 30, 1 << 30)), ..Machine::probe() };
        assert_eq!(Transport::choose("auto", &machine).unwrap(), Transport::Shm);
        assert_eq!(Transport::choose("threads", &machine).unwrap(), Transport::Threads);
        let e = Transport::choose("mpi", &machine).unwrap_err();
        assert!(
            e.code() == 2 && e.to_string().contains("'mpi'") && e.to_string().contains("shm and threads")
        );
        let bare = Machine { shm: None, ..machine };
        let e = Transport::choose("shm", &bare).unwrap_err().to_string();
        assert!(e.contains("/dev/shm") && e.contains("--transport threads"), "{e}");
        assert!(survey(&bare).iter().any(|(name, usable, why)| *name == "shm" && !usable && !why.is_empty()));
    }
}
