//! How much memory may still be taken: the host's, and every memory limit that this process is under. Shared pages
//! beyond a control group's limit do not fail, they get somebody killed, so it is asked before.

use crate::cgroup::{self, Version};
use std::path::Path;

/// Where a control group has its limit.
fn limit_file(version: Version) -> &'static str {
    match version {
        Version::First => "memory.limit_in_bytes",
        Version::Second => "memory.max",
    }
}

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
    for (directory, version) in cgroup::around("memory") {
        if let Some(bytes) = left_in(&directory, version, read)
            && bytes < least.bytes
        {
            least = Available { bytes, source: format!("memory limit of {}", directory.display()) };
        }
    }
    least
}

/// The least memory limit of the control groups that this process is in, of either version; none if nothing limits it.
pub fn limit() -> Option<u64> {
    let limits = cgroup::around("memory").into_iter().filter_map(|(directory, version)| {
        std::fs::read_to_string(directory.join(limit_file(version))).ok()?.trim().parse().ok()
    });
    // Version 1 says "none" by a number beyond all memory, version 2 by a word.
    limits.filter(|&limit| limit < total()).min()
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

/// What a control group still allows: its limit, less what is used, plus the file cache that would give way.
fn left_in(directory: &Path, version: Version, read: impl Fn(&Path) -> Option<String>) -> Option<u64> {
    let number = |file: &str| read(&directory.join(file))?.trim().parse::<u64>().ok();
    let (used, cached) = match version {
        // Only what is called total is also of the groups inside, as what is used is.
        Version::First => ("memory.usage_in_bytes", ["total_inactive_file ", "total_active_file "]),
        Version::Second => ("memory.current", ["inactive_file ", "active_file "]),
    };
    let (limit, used) = (number(limit_file(version))?, number(used)?);
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
    fn limits_of_both_versions() {
        let v2 = |path: &Path| match path.file_name()?.to_str()? {
            "memory.max" => Some("1000\n".to_owned()),
            "memory.current" => Some("900\n".to_owned()),
            "memory.stat" => Some("anon 5\ninactive_file 30\nactive_file 20\n".to_owned()),
            _ => None,
        };
        assert_eq!(left_in(Path::new("/g"), Version::Second, v2), Some(150));
        let v1 = |path: &Path| match path.file_name()?.to_str()? {
            "memory.limit_in_bytes" => Some("1000".to_owned()),
            "memory.usage_in_bytes" => Some("400".to_owned()),
            "memory.stat" => Some(
                "inactive_file 1\nactive_file 0\ntotal_inactive_file 200\ntotal_active_file 70\n".to_owned(),
            ),
            _ => None,
        };
        assert_eq!(left_in(Path::new("/g"), Version::First, v1), Some(870));
        let unlimited = |path: &Path| path.ends_with("memory.max").then(|| "max\n".to_owned());
        assert_eq!(left_in(Path::new("/g"), Version::Second, unlimited), None);
    }

    #[test]
    fn sizes_read_well() {
        assert_eq!((human(512), human(3 << 29)), ("512 bytes".into(), "1.5 GiB".into()));
    }
}
