//! What schedules will go by between ranks that have not met: for plans of runs, which may be for other machines.

use super::{Nodes, Tells, shm};
use crate::schedule::{Group, Tuning};
use std::sync::Arc;

/// What carries messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Medium {
    /// Memory of one process.
    Threads,
    /// Memory of one host.
    Shm,
    /// UCX, which inside a host copies.
    Ucx,
    /// An MPI that sends messages at once up to the size that they are copied behind their headers.
    Mpi,
}

/// What will join ranks.
#[derive(Clone, Debug)]
pub struct Expected {
    /// Between all of them, or between their nodes.
    pub between: Medium,
    /// Inside nodes, where that is another.
    pub inside: Option<Medium>,
    /// Which ranks share a node, where that makes a difference.
    pub nodes: Option<Nodes>,
    /// Whether messages are held back as by a link.
    pub link: bool,
}

impl Expected {
    /// The group of `rank`, one of `size`, whose algorithms change by `tuning`.
    pub fn group(&self, rank: usize, size: usize, tuning: Tuning) -> Group {
        let nodes = self.nodes.as_ref();
        let together = self.inside.filter(|_| nodes.is_none_or(|nodes| nodes.count() <= 1));
        // What delays messages lets nobody read past it.
        let alone = Some(self.between).filter(|_| self.inside.is_none() && !self.link);
        let direct = alone.or(together) == Some(Medium::Shm);
        let frame = if self.between == Medium::Shm { shm::frame(size) } else { usize::MAX };
        let tells = match alone {
            Some(Medium::Ucx) => Tells::Everything,
            Some(Medium::Mpi) => Tells::Collectives,
            _ => Tells::Nothing,
        };
        Group {
            rank,
            size,
            direct: direct.then_some(shm::INLINE_LIMIT),
            nodes: nodes.filter(|nodes| nodes.matter()).cloned().map(Arc::new),
            tells,
            one_memory: matches!(alone, Some(Medium::Ucx | Medium::Mpi)),
            tuning: Tuning { frame: tuning.frame.min(frame), ..tuning },
        }
    }
}
