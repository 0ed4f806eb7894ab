//! What measurements between ranks have in common before these start.

use super::native::Native;
use super::verdict::{self, Verdict};
use crate::args::RankArgs;
use crate::bind::Binding;
use crate::failure::{Failure, Result};
use crate::machine;
use crate::plan::{Ranks, UNASKED, on_hosts};
use crate::ranks::{identity, lead, started_elsewhere};
use collectives::Communicator;
use collectives::bootstrap::Identity;

/// Ranks that are to be started, or that this process is one of.
pub struct Start {
    pub identity: Option<Identity>,
    pub ranks: Ranks,
}

impl Start {
    /// Those of `command`, whose memory is the host's, and who go by a table if they are `tuned`.
    ///
    /// # Errors
    /// What of the flags is for ranks on GPUs, or describes none.
    pub fn on_hosts(command: &str, args: &RankArgs, tuned: bool) -> Result<Self> {
        let identity = identity()?;
        on_hosts(command, args)?;
        let ranks = match tuned {
            true => Ranks::plan(args, UNASKED, identity.as_ref())?,
            false => Ranks::untuned(args, UNASKED, identity.as_ref())?,
        };
        unshared(args)?;
        Ok(Start { identity, ranks })
    }

    /// Takes the processors for them that were asked for, which are none over NCCL.
    ///
    /// # Errors
    /// As [`check_bind`].
    pub fn bind(&mut self, bind: Binding, nccl: bool) -> Result<()> {
        check_bind(bind, started_elsewhere(self.identity.as_ref()), nccl)?;
        self.ranks.bind = if nccl { Binding::None } else { bind };
        Ok(())
    }

    /// Whether fewer of them, but no fewer than `least`, can be asked for.
    pub fn fewer(&self, least: usize) -> bool {
        self.ranks.fewer(least, self.identity.as_ref())
    }

    /// Whether all of them together can have so many bytes.
    ///
    /// # Errors
    /// They cannot, and `lower`, what would take some off.
    pub fn check_memory(&self, bytes: u64, lower: &str) -> Result<()> {
        machine::check_memory(self.ranks.world, self.identity.as_ref(), bytes, lower)
    }

    /// Runs `body` as every rank, if what is written is `writable` where it will be: here, or by rank 0 of those that others have
    /// started.
    ///
    /// # Errors
    /// As [`verdict::launch`], or that of `writable`.
    pub fn go(
        &self,
        writable: &(dyn Fn() -> Result<()> + Sync),
        body: &(dyn Fn(Communicator, Option<Native>) -> Result<Verdict> + Sync),
    ) -> Result<()> {
        let identity = self.identity.as_ref();
        if identity.is_none() {
            writable()?;
        }
        verdict::launch(&self.ranks, identity, &|comm, native| {
            lead(identity, &comm, writable)?;
            body(comm, native)
        })
    }
}

/// Refuses processors for ranks that this program does not start itself on the host: whatever starts them binds them.
///
/// # Errors
/// What it is for.
pub fn check_bind(bind: Binding, started: bool, nccl: bool) -> Result<()> {
    let why = match (bind, started, nccl) {
        (Binding::Asked, true, _) => "ranks that caravan starts itself: take the launcher's own binding",
        (Binding::Asked, _, true) => "ranks whose memory is the host's: leave it away",
        _ => return Ok(()),
    };
    Err(Failure::usage(format!("--bind core is for {why}")))
}

/// Refuses what is for ranks on GPUs.
///
/// # Errors
/// What it is for.
pub fn unshared(args: &RankArgs) -> Result<()> {
    match args.share_gpus {
        true => {
            Err(Failure::usage("--share-gpus is for ranks on GPUs: add --transport nccl to an operation"))
        }
        false => Ok(()),
    }
}
