//! Ranks on processors of their own. The scheduler may put two ranks on one processor for their first milliseconds, and
//! short calls then take ten times as long.

use crate::failure::{Failure, Result};
use rustix::io::Errno;
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::collections::BTreeMap;

/// Whether ranks that are started here stay each on its share of the processors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binding {
    /// No.
    None,
    /// As far as the system shows which processors there are.
    Default,
    /// Yes, as was asked for.
    Asked,
}

/// Binds the calling thread to the share of `rank` of the processors that it may use; with more ranks than processors
/// it stays as it is, unless it was asked for.
///
/// # Errors
/// The system's refusal, or too few processors.
pub fn to_share(binding: Binding, rank: usize, ranks: usize) -> Result<()> {
    let refused =
        |e| Failure::run(format!("binding rank {rank} to its processors failed ({e}): take --bind none"));
    let Some(allowed) = allowed(binding, sched_getaffinity).map_err(refused)? else { return Ok(()) };
    let allowed: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu)).collect();
    let Some(share) = share(&cores(allowed.iter().copied(), core_of), rank, ranks) else {
        return match binding {
            Binding::Asked => Err(Failure::usage(format!(
                "--bind core: {ranks} ranks do not have a processor each, which are {}: lower --ranks, or take --bind none",
                listed(&allowed)
            ))),
            _ => Ok(()),
        };
    };
    let mut set = CpuSet::new();
    share.iter().for_each(|&cpu| set.set(cpu));
    sched_setaffinity(None, &set).map_err(refused)
}

/// The processors that this thread may use, in their order; none where the system does not show them.
pub fn processors() -> Vec<usize> {
    let shown = sched_getaffinity(None).ok();
    let is_set = |&cpu: &usize| shown.as_ref().is_some_and(|set| set.is_set(cpu));
    (0..CpuSet::MAX_CPU).filter(is_set).collect()
}

/// Processors as Linux lists them, such as `0-3,8`.
pub fn listed(processors: &[usize]) -> String {
    let runs = processors.chunk_by(|before, next| before + 1 == *next);
    let run = |run: &[usize]| match run {
        [one] => one.to_string(),
        [first, .., last] => format!("{first}-{last}"),
        [] => String::new(),
    };
    runs.map(run).collect::<Vec<_>>().join(",")
}

/// The processors that this thread may use, where it is to be bound.
fn allowed(
    binding: Binding,
    read: impl FnOnce(Option<Pid>) -> std::result::Result<CpuSet, Errno>,
) -> std::result::Result<Option<CpuSet>, Errno> {
    match (binding, (binding != Binding::None).then(|| read(None)).transpose()) {
        // The system has room for more processors than such a set: 1024.
        (Binding::Default, Err(Errno::INVAL)) => Ok(None),
        (_, found) => found,
    }
}

/// The package and core that a processor is a thread of, where the system says so.
fn core_of(cpu: usize) -> Option<(usize, usize)> {
    let number = |name: &str| {
        let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/{name}");
        std::fs::read_to_string(path).ok()?.trim().parse().ok()
    };
    Some((number("physical_package_id")?, number("core_id")?))
}

/// The processors by their cores, neighbours of one package beside each other.
fn cores(
    allowed: impl Iterator<Item = usize>,
    core_of: impl Fn(usize) -> Option<(usize, usize)>,
) -> Vec<Vec<usize>> {
    let mut cores: BTreeMap<_, Vec<usize>> = BTreeMap::new();
    for cpu in allowed {
        let core = core_of(cpu).map_or((None, cpu), |(package, core)| (Some(package), core));
        cores.entry(core).or_default().push(cpu);
    }
    cores.into_values().collect()
}

/// The part of `rank`: whole cores where there are as many as ranks, else processors; None where there are too few of these,
/// too.
fn share(cores: &[Vec<usize>], rank: usize, ranks: usize) -> Option<Vec<usize>> {
    if cores.len() >= ranks {
        let each = cores.len() / ranks;
        return Some(cores[rank * each..(rank + 1) * each].concat());
    }
    let all = cores.concat();
    let each = all.len() / ranks;
    (each > 0).then(|| all[rank * each..(rank + 1) * each].to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_that_cannot_be_counted_matter_to_who_asks_for_them() {
        let of = |binding, found: std::result::Result<(), Errno>| {
            allowed(binding, |_| found.map(|()| CpuSet::new())).map(|set| set.is_some())
        };
        assert_eq!(of(Binding::Default, Err(Errno::INVAL)), Ok(false));
        assert_eq!(of(Binding::Asked, Err(Errno::INVAL)), Err(Errno::INVAL));
        assert_eq!(of(Binding::Default, Err(Errno::PERM)), Err(Errno::PERM));
        assert_eq!(of(Binding::None, Err(Errno::PERM)), Ok(false));
        assert_eq!(of(Binding::Default, Ok(())), Ok(true));
    }

    #[test]
    fn processors_are_listed_as_by_the_system() {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap();
        assert_eq!(listed(&processors()), list.trim());
        assert_eq!([listed(&[]), listed(&[4]), listed(&[0, 1, 2, 5, 7, 8])], ["", "4", "0-2,5,7-8"]);
    }

    #[test]
    fn shares_are_apart_and_equal() {
        let cores = cores([0, 1, 4, 5, 9].into_iter(), |_| None);
        assert_eq!(share(&cores, 0, 2), Some(vec![0, 1]));
        assert_eq!(share(&cores, 1, 2), Some(vec![4, 5]));
        assert_eq!(share(&cores, 4, 5), Some(vec![9]));
        assert_eq!(share(&cores, 0, 6), None);
    }

    #[test]
    fn threads_of_one_core_stay_together() {
        // As Linux numbers them: the second threads of four cores on two packages come after all first ones.
        let cores = cores(0..8, |cpu| Some((cpu % 4 / 2, cpu % 2)));
        assert_eq!(cores, [[0, 4], [1, 5], [2, 6], [3, 7]]);
        assert_eq!(share(&cores, 1, 2), Some(vec![2, 6, 3, 7]));
        assert_eq!(share(&cores, 2, 3), Some(vec![2, 6]));
        assert_eq!(share(&cores, 3, 4), Some(vec![3, 7]));
        assert_eq!(share(&cores, 1, 8), Some(vec![4]));
        assert_eq!(share(&cores, 4, 5), Some(vec![2]));
    }
}
