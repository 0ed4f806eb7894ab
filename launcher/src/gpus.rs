//! Which GPU a rank has, and how GPUs reach each other.

use crate::failure::{Failure, Result};
use crate::plan::Ranks;
use collectives::bootstrap::{Identity, Launcher};
use collectives::device::SharedQueue;
use collectives::device::cuda::{Gpu, Nccl, Stream, Survey, Urgency, share_gpu};
use collectives::{Account, Carrier, Communicator, Order, Wired};
use std::sync::Arc;

/// What says that ranks may share a GPU, by NCCL's own names.
const PERMISSIONS: [&str; 2] = ["NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_HOSTID"];

/// A rank's GPU with the queue that it computes on.
pub struct RankGpu {
    pub gpu: Gpu,
    pub queue: SharedQueue<Stream>,
}

/// Why ranks of this machine cannot reach each other over NCCL, if they cannot.
pub fn obstacle() -> Option<String> {
    let survey = Survey::take();
    let none = || Some("there is no GPU".to_owned()).filter(|_| survey.gpus.iter().all(Vec::is_empty));
    let missing = survey.driver.as_ref().err().or(survey.nccl.as_ref().err());
    missing.or(survey.gpus.as_ref().err()).cloned().or_else(none)
}

/// What NCCL is here, for a list of what there is.
pub fn library() -> Option<String> {
    let nccl = Survey::take().nccl.ok()?;
    Some(format!("NCCL {}", nccl.version))
}

/// Sets what lets NCCL take several ranks on one GPU, as far as the user has not. The first thing that a process does,
/// that of the ranks and the one that starts them.
pub fn permit_sharing(identity: Option<&Identity>) {
    let Ok(nccl) = Survey::take().nccl else { return };
    let mut numbers = nccl.version.split('.').map(|n| n.parse::<u32>().unwrap_or(0));
    let mut next = || numbers.next().unwrap_or(0);
    let version = next() * 10_000 + next() * 100 + next();
    for (name, value) in share_gpu(version, identity.map(|i| i.rank)) {
        if std::env::var_os(name).is_none() {
            // SAFETY: by the caller's place at the start of the program, there is no other thread that could read
            // the environment meanwhile.
            unsafe { std::env::set_var(name, value) };
        }
    }
}

/// The number of the GPU of a rank that is the `local`-th of `here` on its host, which has `gpus`.
fn ordinal(local: usize, here: usize, gpus: usize, shared: bool) -> std::result::Result<usize, String> {
    match gpus {
        0 => Err("there is no GPU here".into()),
        gpus if local < gpus => Ok(local),
        gpus if shared => Ok(local % gpus),
        gpus => Err(format!(
            "{here} ranks on a host with {gpus} GPU{}: start at most {gpus} (--ranks {gpus}), or, to try things out, let \
             ranks share one with --share-gpus",
            if gpus == 1 { "" } else { "s" }
        )),
    }
}

impl RankGpu {
    /// The GPU of this rank, which is a process that `identity` describes or a thread.
    ///
    /// # Errors
    /// More ranks than GPUs, or a GPU that cannot be used.
    pub fn open(comm: &Communicator, ranks: &Ranks, identity: Option<&Identity>) -> Result<Self> {
        let local = identity.map_or(Some(comm.rank()), |i| i.local_rank).unwrap_or(comm.rank());
        let here = identity.and_then(|i| i.local_size).unwrap_or(comm.size());
        let set = |name: &&str| std::env::var(name).is_ok_and(|value| !["", "0"].contains(&value.as_str()));
        // Another launcher may show each rank a GPU of its own as the only one. Whether two have one is compared later,
        // by what GPUs say of themselves.
        let dealt = identity.is_some_and(|i| i.launcher != Launcher::Caravan);
        let shared = ranks.share_gpus || dealt || PERMISSIONS.iter().any(set);
        let ordinal = ordinal(local, here, Gpu::count()?, shared).map_err(Failure::usage)?;
        let gpu = Gpu::open(ordinal)?;
        let queue = SharedQueue::new(Stream::new(&gpu, Urgency::Normal)?);
        Ok(RankGpu { gpu, queue })
    }
}

/// Carries calls on memory of the GPU of `compute` over NCCL, with memory that was planned for it if it is booked on an
/// account.
///
/// # Errors
/// NCCL's, a rank that does not come, or two with one GPU.
pub fn over_nccl(
    comm: &Communicator,
    compute: &SharedQueue<Stream>,
    ranks: &Ranks,
    order: Order,
    planned: Option<&Account>,
) -> Result<Arc<dyn Carrier>> {
    let gpu = compute.lock().gpu().clone();
    let wire = Nccl::connect(comm, &gpu, ranks.rendezvous_timeout)?;
    Ok(Arc::new(match planned {
        Some(account) => Wired::planned(comm, compute.clone(), wire, order, None, account)?,
        None => Wired::new(comm, compute.clone(), wire, order)?,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_has_a_gpu_or_is_told_what_would_work() {
        assert_eq!(ordinal(3, 8, 8, false), Ok(3));
        assert_eq!(ordinal(3, 4, 2, true), Ok(1));
        let text = ordinal(1, 2, 1, false).unwrap_err();
        assert!(text.contains("2 ranks on a host with 1 GPU:") && text.contains("--share-gpus"), "{text}");
        assert!(ordinal(0, 1, 0, true).is_err());
    }
}
