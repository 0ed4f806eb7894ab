//! How much memory may still be taken: the host's, and every memory limit that this process is under. Shared pages
//! beyond a control group's limit do not fail, they get somebody killed, so it is asked before.

use std::path::{Path, PathBuf};

/// Where version 2 and version 1 have a control group's limit.
const LIMITS: [&str; 2] = ["memory.max", "memory.limit_in_bytes"];

/// What is available, and what says so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Available {
    /// As many as can be counted, where nothing says.
    pub bytes: u64,
    /// In words, without an article.
    pub source: String,
}

/// What this process and others of its host may still take: the smallest of all limits that apply.
pub fn available() -> Available {
    let read = |path: &Path| std::fs::read_to_string(path).ok();
    let host = read(Path::new("/proc/meminfo")).and_then(|text| meminfo(&text, "MemAvailable:"));
    let mut least = Available { bytes: host.unwrap_or(u64::MAX), source: "free memory of this host".into() };
    let groups = read(Path::new("/proc/self/cgroup")).unwrap_or_default();
    for directory in memory_groups(&groups, Path::new("/sys/fs/cgroup")) {
        if let Some(bytes) = left_in(&directory, read)
            && bytes < least.bytes
        {
            least = Available { bytes, source: format!("memory limit of {}", directory.display()) };
        }
    }
    least
}

/// The least memory limit of the control groups that this process is in, of either version; none if nothing limits it.
pub fn limit() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let directories = memory_groups(&groups, Path::new("/sys/fs/cgroup"));
    let limits = directories.iter().flat_map(|d| LIMITS.map(|file| std::fs::read_to_string(d.join(file))));
    // Version 1 says "none" by a number beyond all memory, version 2 by a word.
    limits.flatten().filter_map(|text| text.trim().parse().ok()).filter(|&limit| limit < total()).min()
}

/// The host's whole memory.
pub(super) fn total() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram as u64 * u64::from(info.mem_unit.max(1))
}

fn meminfo(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix(field))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib << 10)
}

/// The directories of this process's memory control group and all above it, of either version. Inside a container
/// the path of version 1 may be that of the host, which does not exist here; then the mount itself is the group.
fn memory_groups(proc_cgroup: &str, mount: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for line in proc_cgroup.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        let root = match controllers {
            "" if mount.join("unified").is_dir() => mount.join("unified"),
            "" => mount.to_owned(),
            list if list.split(',').any(|c| c == "memory") => mount.join("memory"),
            _ => continue,
        };
        let below = path.trim_start_matches('/');
        all.extend(Path::new(below).ancestors().map(|part| root.join(part)));
    }
    all
}

/// What a control group still allows: its limit, less what is used, plus the file cache that would give way.
fn left_in(directory: &Path, read: impl Fn(&Path) -> Option<String>) -> Option<u64> {
    let number = |file: &str| read(&directory.join(file))?.trim().parse::<u64>().ok();
    // Of version 1 only what is called total is also of the groups inside, as what is used is.
    let (limit, used, cached) = match number(LIMITS[0]) {
        Some(limit) => (limit, number("memory.current")?, ["inactive_file ", "active_file "]),
        None => {
            let used = number("memory.usage_in_bytes")?;
            (number(LIMITS[1])?, used, ["total_inactive_file ", "total_active_file "])
        }
    };
    let stat = read(&directory.join("memory.stat")).unwrap_or_default();
    let cache: u64 = cached
        .iter()
        .filter_map(|f| stat.lines().find_map(|l| l.strip_prefix(f))?.trim().parse::<u64>().ok())
        .sum();
    Some(limit.saturating_sub(used).saturating_add(cache.min(used)))
}

/// `1.5 GiB`, for messages.
pub(super) fn human(bytes: u64) -> String {
    for (unit, name) in [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")] {
        if bytes >= unit {
            return format!("{:.1} {name}", bytes as f64 / unit as f64);
        }
    }
    format!("{bytes} bytes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read() {
        let text = "MemTotal:       24684092 kB\nMemAvailable:   1024 kB\n";
        assert_eq!(meminfo(text, "MemAvailable:"), Some(1 << 20));
        assert_eq!(meminfo(text, "Missing:"), None);
        assert!(available().bytes > 0 && total() > 0);
    }

    #[test]
    fn every_group_above_counts() {
        let mount = Path::new("/nowhere");
        let paths = |text| {
            memory_groups(text, mount).iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(paths("0::/a/b\n"), "/nowhere/a/b /nowhere/a /nowhere/");
        assert_eq!(paths("5:cpu:/x\n4:memory:/a\n"), "/nowhere/memory/a /nowhere/memory/");
        assert_eq!(paths("garbage"), "");
    }

    #[test]
    fn limits_of_both_versions() {
        let v2 = |path: &Path| match path.file_name()?.to_str()? {
            "memory.max" => Some("1000\n".to_owned()),
            "memory.current" => Some("900\n".to_owned()),
            "memory.stat" => Some("anon 5\ninactive_file 30\nactive_file 20\n".to_owned()),
            _ => None,
        };
        assert_eq!(left_in(Path::new("/g"), v2), Some(150));
        let v1 = |path: &Path| match path.file_name()?.to_str()? {
            "memory.limit_in_bytes" => Some("1000".to_owned()),
            "memory.usage_in_bytes" => Some("400".to_owned()),
            "memory.stat" => Some(
                "inactive_file 1\nactive_file 0\ntotal_inactive_file 200\ntotal_active_file 70\n".to_owned(),
            ),
            _ => None,
        };
        assert_eq!(left_in(Path::new("/g"), v1), Some(870));
        let unlimited = |path: &Path| path.ends_with("memory.max").then(|| "max\n".to_owned());
        assert_eq!(left_in(Path::new("/g"), unlimited), None);
    }

    #[test]
    fn sizes_read_well() {
        assert_eq!((human(512), human(3 << 29)), ("512 bytes".into(), "1.5 GiB".into()));
    }
}
