//! How many processors the ranks of a host have between them.

use super::{Identity, Launcher, hosts};
use crate::cgroup::{self, Version};
use crate::process::Stat;
use rustix::process::{Pid, getppid};
use rustix::thread::sched_getaffinity;
use std::path::PathBuf;
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
    let launcher =
        identity.filter(|me| me.launcher != Launcher::Alone).and_then(|me| process_of(me.launcher));
    let bound = |pid: Option<Pid>| sched_getaffinity(pid).map(|set| set.count() as usize);
    match launcher.map(|launcher| (bound(None), bound(Some(launcher)))) {
        // What binds ranks leaves them under the same quota.
        Some((Ok(here), Ok(there))) if there > here => within(there, cpu_quota()),
        _ => mine,
    }
}

/// So many processors, or as many whole ones as a quota leaves of them, as the standard library counts them.
fn within(processors: usize, quota: Option<f64>) -> usize {
    quota.map_or(processors, |quota| processors.min((quota as usize).max(1)))
}

/// Processors' worth of time that the cgroups around this process leave it, where they limit it.
pub fn cpu_quota() -> Option<f64> {
    least(limits(cgroup::around("cpu")))
}

/// The limits of groups, as `cpu.max` has them.
fn limits(groups: Vec<(PathBuf, Version)>) -> impl Iterator<Item = String> {
    groups.into_iter().filter_map(|(group, version)| {
        let read = |name| std::fs::read_to_string(group.join(name)).ok();
        match version {
            Version::Second => read("cpu.max"),
            // Where there is no quota it is -1.
            Version::First => {
                let (quota, period) = (read("cpu.cfs_quota_us")?, read("cpu.cfs_period_us")?);
                Some(format!("{} {}", quota.trim(), period.trim()))
            }
        }
    })
}

/// The least of these limits, each a quota of time in a period.
fn least(limits: impl Iterator<Item = String>) -> Option<f64> {
    let processors = |limit: String| {
        let (quota, period) = limit.trim().split_once(' ')?;
        let (quota, period): (u64, u64) = (quota.parse().ok()?, period.parse().ok()?);
        (period > 0).then(|| quota as f64 / period as f64)
    };
    limits.filter_map(processors).min_by(f64::total_cmp)
}

/// The process that started the ranks of this host, also from behind a script, a container's runtime or a profiler: who
/// speaks PMI with this one, the nearest ancestor that is called as the launcher's are, or else the parent.
fn process_of(launcher: Launcher) -> Option<Pid> {
    if launcher == Launcher::Pmi
        && let Some(manager) = hosts::pmi_manager()
    {
        return Pid::from_raw(manager as i32);
    }
    above(launcher, getppid(), about)
}

/// The same among those above a process with this parent, of which `about` says name and parent.
fn above(launcher: Launcher, parent: Option<Pid>, about: impl Fn(Pid) -> About) -> Option<Pid> {
    let starts =
        |name: &Option<String>| name.as_ref().map_or(launcher.is_hidden(), |name| launcher.has(name));
    walk(parent, about).find(|(_, name)| starts(name)).map(|(pid, _)| pid).or(parent)
}

/// Names of the processes above this one, the nearest first, as far as they can be seen from here.
pub(super) fn ancestors() -> impl Iterator<Item = String> {
    walk(getppid(), about).filter_map(|(_, name)| name)
}

/// The nearest process above this one whose name `is` one that is looked for.
pub(super) fn nearest_above(is: impl Fn(&str) -> bool) -> Option<Pid> {
    walk(getppid(), about).find(|(_, name)| name.as_deref().is_some_and(&is)).map(|(pid, _)| pid)
}

/// A process and those above it, the last of which may have no name that can be seen.
fn walk(from: Option<Pid>, about: impl Fn(Pid) -> About) -> impl Iterator<Item = (Pid, Option<String>)> {
    let mut next = from;
    std::iter::from_fn(move || {
        let pid = next?;
        let (name, parent) = about(pid).unzip();
        next = parent.flatten();
        Some((pid, name))
    })
}

/// The name of the process with this number, if it can be seen from here.
pub(super) fn name_of(pid: u32) -> Option<String> {
    Stat::of(pid).map(|stat| stat.name)
}

/// Name and parent of a process that can be seen.
type About = Option<(String, Option<Pid>)>;

fn about(pid: Pid) -> About {
    let stat = Stat::of(pid.as_raw_nonzero().get() as u32)?;
    Some((stat.name, stat.parent))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::thread::{CpuSet, sched_setaffinity};
    use std::process::Command;

    #[test]
    fn who_started_the_ranks_is_found_behind_a_script_and_where_it_is_hidden() {
        let [script, step, init] = [30, 20, 1].map(|pid| Pid::from_raw(pid).unwrap());
        let about = |hidden: bool| {
            move |pid: Pid| match pid {
                _ if pid == script => Some(("bash".to_owned(), Some(step))),
                _ if hidden => None,
                _ if pid == step => Some(("slurmstepd".to_owned(), Some(init))),
                _ => Some(("systemd".to_owned(), None)),
            }
        };
        let found = |launcher, hidden| above(launcher, Some(script), about(hidden));
        assert_eq!([false, true].map(|hidden| found(Launcher::Slurm, hidden)), [Some(step); 2]);
        assert_eq!([false, true].map(|hidden| found(Launcher::OpenMpi, hidden)), [Some(script); 2]);
    }

    #[test]
    fn the_least_quota_around_a_process_counts() {
        let of = |limits: &[&str]| least(limits.iter().map(|limit| limit.to_string()));
        assert_eq!(of(&["max 100000\n", "800000 100000\n", "350000 100000\n"]), Some(3.5));
        assert_eq!(of(&["20000 100000\n"]), Some(0.2));
        assert_eq!([Some(3.5), Some(0.2), Some(90.0), None].map(|quota| within(64, quota)), [3, 1, 64, 64]);
        for none in [&["max 100000\n"][..], &["", "1 0\n", "x"], &[]] {
            assert_eq!(of(none), None);
        }
    }

    #[test]
    fn quotas_of_both_versions_of_cgroups_are_found() {
        let root = tempfile::tempdir().unwrap();
        let limit = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let of = |groups: &str| least(limits(cgroup::below(root.path(), groups, "cpu")));
        limit("job/step/cpu.max", "max 100000\n");
        limit("job/cpu.max", "300000 100000\n");
        assert_eq!(of("0::/job/step\n"), Some(3.0));
        let first = "5:memory:/x\n4:cpuacct,cpu:/slurm/job\n0::/\n";
        assert_eq!(of(first), None);
        limit("cpu/slurm/job/cpu.cfs_quota_us", "-1\n");
        limit("cpu/slurm/job/cpu.cfs_period_us", "100000\n");
        assert_eq!(of(first), None);
        limit("cpu/slurm/cpu.cfs_quota_us", "150000\n");
        limit("cpu/slurm/cpu.cfs_period_us", "100000\n");
        assert_eq!(of(first), Some(1.5));
    }

    /// This test again, by another process.
    fn again(program: &str, args: &[&str], level: &str, has: &str) {
        let mut command = Command::new(program);
        let ran = command.args(args).env(LEVEL, level).env(LAUNCHER_HAS, has).output().unwrap();
        let said = String::from_utf8_lossy(&ran.stdout);
        assert!(ran.status.success() && said.contains("1 passed"), "{said}");
    }

    const NAME: &str = "bootstrap::processors::tests::a_bound_rank_sees_what_its_launcher_has";
    const LEVEL: &str = "CARAVAN_TEST_LEVEL";
    const LAUNCHER_HAS: &str = "CARAVAN_TEST_LAUNCHER_HAS";

    #[test]
    fn a_bound_rank_sees_what_its_launcher_has() {
        let this = std::env::current_exe().unwrap();
        let this = this.to_str().unwrap();
        let bind = || {
            let allowed = sched_getaffinity(None).unwrap();
            let mut one = CpuSet::new();
            one.set((0..CpuSet::MAX_CPU).find(|&cpu| allowed.is_set(cpu)).unwrap());
            sched_setaffinity(None, &one).unwrap();
        };
        let has = std::env::var(LAUNCHER_HAS).unwrap_or_default();
        match std::env::var(LEVEL).as_deref() {
            // The launcher: it starts a rank, and by a name that is srun's, what wraps one.
            Err(_) => {
                let count = sched_getaffinity(Some(rustix::process::getpid())).unwrap().count() as usize;
                let has = within(count, cpu_quota()).to_string();
                again(this, &[NAME, "--exact"], "rank", &has);
                let dir = tempfile::tempdir().unwrap();
                let step = dir.path().join("slurmstepd");
                std::os::unix::fs::symlink("/bin/sh", &step).unwrap();
                let line = format!("'{this}' {NAME} --exact --nocapture; true");
                again(step.to_str().unwrap(), &["-c", &line], "wrapper", &has);
            }
            Ok("wrapper") => {
                bind();
                again(this, &[NAME, "--exact"], "rank", &has);
            }
            Ok(_) => {
                bind();
                assert_eq!(processors(), 1);
                assert_eq!(processors_of_host(None), 1);
                assert_eq!(processors_of_host(Some(&Identity::alone())), 1);
                let started = Identity { launcher: Launcher::Slurm, ..Identity::alone() };
                assert_eq!(processors_of_host(Some(&started)).to_string(), has);
            }
        }
    }
}
