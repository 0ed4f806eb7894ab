//! Which GPU a rank has, and how GPUs reach each other.

mod limits;

pub use limits::Limits;

use crate::failure::{Failure, Result};
use crate::human::several;
use crate::plan::Ranks;
use collectives::bootstrap::Identity;
use collectives::device::SharedQueue;
use collectives::device::cuda::{
    BLOCKING, Gpu, Nccl, Stream, Survey, Urgency, share_gpu, share_gpu_on_one_host,
};
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

/// The same as NCCL's own number (23003 is 2.30.3).
pub fn nccl_number() -> Option<u32> {
    Survey::nccl_number()
}

/// The variable by which NCCL here lets ranks share a GPU.
pub fn sharing() -> Option<&'static str> {
    share_gpu(Survey::nccl_number()?, Some(0)).first().map(|(name, _)| *name)
}

/// Keeps a file of NCCL's settings from having its calls wait for peers without an end; what the user's environment says of that
/// is refused when ranks meet.
pub const OF_NCCL: (&str, &str) = (BLOCKING, "0");

/// Sets [`OF_NCCL`] where nobody else has.
///
/// # Safety
/// No other thread runs that could read the environment meanwhile.
pub unsafe fn tame_nccl() {
    let (name, value) = OF_NCCL;
    if std::env::var_os(name).is_none() {
        // SAFETY: the caller's promise: nobody reads the environment meanwhile.
        unsafe { std::env::set_var(name, value) };
    }
}

/// What NVIDIA's driver goes by for how many queues of a GPU run side by side. Other trainers have it set to 1.
const CONNECTIONS: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

/// What is to be said of ranks on GPUs whose calls cannot go on beside computing, because the environment lets too few queues run
/// side by side: there are four, to compute and add, and for calls of both kinds.
pub fn too_few_connections() -> Option<String> {
    serial(&std::env::var(CONNECTIONS).ok()?)
}

fn serial(connections: &str) -> Option<String> {
    let few = connections.trim().parse::<u32>().is_ok_and(|connections| connections < 4);
    few.then(|| {
        format!("{CONNECTIONS}={connections} may keep calls from going on beside computing: unset it, or set it to 4 or more")
    })
}

/// Sets what lets NCCL take several ranks on one GPU, as far as the user has not. The first thing that a process does,
/// that of the ranks and the one that starts them: the driver, which may start threads, is not yet opened.
///
/// # Errors
/// An NCCL that lets ranks of one host share, as if each had a host of its own, and ranks on several hosts.
///
/// # Safety
/// No other thread runs that could read the environment meanwhile.
pub unsafe fn permit_sharing(identity: Option<&Identity>) -> Result<()> {
    let Some(version) = Survey::nccl_number() else { return Ok(()) };
    let apart = identity.is_some_and(|me| me.local_size.is_some_and(|here| here < me.world));
    if let (true, Some(why)) = (apart, share_gpu_on_one_host(version)) {
        return Err(Failure::usage(format!(
            "--share-gpus of ranks on several hosts: {why}; start one rank for each GPU"
        )));
    }
    for (name, value) in share_gpu(version, identity.map(|i| i.rank)) {
        if std::env::var_os(name).is_none() {
            // SAFETY: the caller's promise: nobody reads the environment meanwhile; opening NCCL has started no thread.
            unsafe { std::env::set_var(name, value) };
        }
    }
    Ok(())
}

/// Which of the `gpus` of its host a rank has, by its number among the ranks there: they are dealt to GPUs in turn.
/// Another launcher may show each rank a GPU of its own as the only one.
pub fn dealt(rank: usize, identity: Option<&Identity>, gpus: usize) -> usize {
    identity.map_or(rank, |i| i.local_rank.unwrap_or(rank)) % gpus
}

/// How many GPUs of its host, from the first on, its ranks have at most, of `world` in all.
pub fn used(world: usize, identity: Option<&Identity>) -> usize {
    match identity.map(|i| i.local_rank.and(i.local_size)) {
        None => world,
        Some(known) => known.unwrap_or(usize::MAX),
    }
}

/// Refuses `ranks` ranks that are started on a machine of `gpus` if some would share one without permission. Whether
/// ranks that others have started share one is compared later, by what GPUs say of themselves.
///
/// # Errors
/// More ranks than GPUs, with what would work.
pub fn check_share(ranks: usize, gpus: usize, permitted: bool) -> Result<()> {
    match ranks <= gpus || permitted {
        true => Ok(()),
        false => Err(Failure::usage(format!(
            "{} on {}: take --ranks {gpus}, or --share-gpus, with which ranks divide a GPU's memory and time",
            several(ranks, "rank"),
            several(gpus, "GPU")
        ))),
    }
}

/// The same for ranks over NCCL, whose own variables permit it too.
///
/// # Errors
/// As [`check_share`], or the driver's.
pub fn check_share_over_nccl(ranks: &Ranks) -> Result<()> {
    let set = |name: &&str| std::env::var(name).is_ok_and(|value| !["", "0"].contains(&value.as_str()));
    check_share(ranks.world, Gpu::count()?, ranks.share_gpus || PERMISSIONS.iter().any(set))
}

impl RankGpu {
    /// The GPU of this rank, which is a process that `identity` describes or a thread.
    ///
    /// # Errors
    /// There is no GPU, or one that cannot be used.
    pub fn open(comm: &Communicator, identity: Option<&Identity>) -> Result<Self> {
        let gpus = Gpu::count()?;
        if gpus == 0 {
            return Err(Failure::usage("there is no GPU here"));
        }
        let gpu = Gpu::open(dealt(comm.rank(), identity, gpus))?;
        let queue = SharedQueue::new(Stream::new(&gpu, Urgency::Low)?);
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
    fn who_lets_too_few_queues_run_side_by_side_is_told() {
        for (connections, told) in [("1", true), (" 3 ", true), ("4", false), ("32", false), ("", false)] {
            assert_eq!(serial(connections).is_some(), told, "{connections:?}");
        }
        assert!(serial("1").unwrap().starts_with("CUDA_DEVICE_MAX_CONNECTIONS=1 may keep"));
    }

    #[test]
    fn ranks_are_dealt_to_the_gpus_of_their_host_in_turn() {
        assert_eq!((0..6).map(|rank| dealt(rank, None, 4)).collect::<Vec<_>>(), [0, 1, 2, 3, 0, 1]);
        // Rank 9 of a job is the second of its node.
        let second = Identity { rank: 9, world: 16, local_rank: Some(1), ..Identity::alone() };
        assert_eq!(dealt(9, Some(&second), 4), 1);
        assert_eq!(dealt(9, Some(&Identity { local_rank: None, ..second.clone() }), 4), 1);
        // What lies behind them no rank has, if it is known how many ranks are here.
        assert_eq!(used(2, None), 2);
        let two = Identity { local_size: Some(2), ..second };
        assert_eq!(used(16, Some(&two)), 2);
        for unknown in
            [Identity { local_rank: None, ..two.clone() }, Identity { local_size: None, ..two.clone() }]
        {
            assert_eq!(used(16, Some(&unknown)), usize::MAX);
        }
    }

    #[test]
    fn a_gpu_is_shared_only_with_permission() {
        assert!(check_share(2, 2, false).is_ok() && check_share(3, 1, true).is_ok());
        let refused = check_share(2, 1, false).unwrap_err();
        let text = refused.to_string();
        assert!(refused.code() == 2 && text.contains("2 ranks on 1 GPU:"), "{text}");
        assert!(text.contains("--ranks 1") && text.contains("--share-gpus"), "{text}");
    }
}
