//! How many processors the ranks of a host have between them.

use super::{Identity, Launcher};
use rustix::process::{Pid, getppid};
use rustix::thread::sched_getaffinity;
use std::sync::OnceLock;

/// Processors that this process may use, by its binding and its cgroup's quota.
pub fn processors() -> usize {
    // Asked once: a rank that is bound to its share of them later is no more crowded than before.
    static PROCESSORS: OnceLock<usize> = OnceLock::new();
    *PROCESSORS.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// Processors that all ranks of this host have between them, as far as it can be seen from here. A launcher that binds its
/// ranks may use more processors than each of them; where it does not bind them, they share what it leaves to this one.
pub fn processors_of_host(identity: Option<&Identity>) -> usize {
    let mine = processors();
    // Ranks that nothing has started are threads of this process.
    let launcher = identity.filter(|me| me.launcher != Launcher::Alone).and_then(|_| getppid());
    let bound = |pid: Option<Pid>| sched_getaffinity(pid).map(|set| set.count() as usize);
    match launcher.map(|launcher| (bound(None), bound(Some(launcher)))) {
        Some((Ok(here), Ok(there))) if there > here => there,
        _ => mine,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::thread::{CpuSet, sched_setaffinity};
    use std::process::Command;

    #[test]
    fn a_bound_rank_sees_what_its_launcher_has() {
        const LAUNCHER_HAS: &str = "CARAVAN_TEST_LAUNCHER_HAS";
        let Ok(has) = std::env::var(LAUNCHER_HAS) else {
            // The launcher: it starts this test again, as the rank.
            let name = "bootstrap::processors::tests::a_bound_rank_sees_what_its_launcher_has";
            let has = sched_getaffinity(Some(rustix::process::getpid())).unwrap().count();
            let mut rank = Command::new(std::env::current_exe().unwrap());
            let rank = rank.args([name, "--exact"]).env(LAUNCHER_HAS, has.to_string()).output().unwrap();
            let said = String::from_utf8_lossy(&rank.stdout);
            return assert!(rank.status.success() && said.contains("1 passed"), "{said}");
        };
        let allowed = sched_getaffinity(None).unwrap();
        let mut one = CpuSet::new();
        one.set((0..CpuSet::MAX_CPU).find(|&cpu| allowed.is_set(cpu)).unwrap());
        sched_setaffinity(None, &one).unwrap();
        assert_eq!(processors(), 1);
        assert_eq!(processors_of_host(None), 1);
        assert_eq!(processors_of_host(Some(&Identity::alone())), 1);
        let started = Identity { launcher: Launcher::Slurm, ..Identity::alone() };
        assert_eq!(processors_of_host(Some(&started)).to_string(), has);
    }
}
