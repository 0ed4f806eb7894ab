//! The control groups that this process is in, which limit what it may take.

use std::path::{Path, PathBuf};

/// A system may have both side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Version {
    First,
    Second,
}

/// The directories of this process's control group of `controller` and of all around it, of either version.
pub(crate) fn around(controller: &str) -> Vec<(PathBuf, Version)> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    below(Path::new("/sys/fs/cgroup"), &groups, controller)
}

/// The same of a process in `groups`, which lie below `mount`. A group is such as `0::/job/step`, or `4:cpuacct,cpu:/job` in
/// the first version, where the tree has the controller's name, by a link if there are two. Inside a container the path of
/// the first version may be that of the host, which does not exist here; then the mount itself is the group.
pub(crate) fn below(mount: &Path, groups: &str, controller: &str) -> Vec<(PathBuf, Version)> {
    let mut all = Vec::new();
    for group in groups.lines() {
        let parts: Vec<&str> = group.splitn(3, ':').collect();
        let [_, controllers, own] = parts[..] else { continue };
        let (tree, version) = match controllers {
            "" if mount.join("unified").is_dir() => (mount.join("unified"), Version::Second),
            "" => (mount.to_owned(), Version::Second),
            list if list.split(',').any(|one| one == controller) => (mount.join(controller), Version::First),
            _ => continue,
        };
        let own = tree.join(own.trim_start_matches('/'));
        let inside = own.ancestors().take_while(|group| group.starts_with(&tree));
        all.extend(inside.map(|group| (group.to_owned(), version)));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(mount: &Path, groups: &str) -> String {
        let all = below(mount, groups, "memory");
        let relative = |(path, version): &(PathBuf, Version)| {
            format!("{version:?}:{}", path.strip_prefix(mount).unwrap().display())
        };
        all.iter().map(relative).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn every_group_above_counts() {
        let nowhere = Path::new("/nowhere");
        assert_eq!(paths(nowhere, "0::/a/b\n"), "Second:a/b Second:a Second:");
        assert_eq!(paths(nowhere, "5:cpu:/x\n4:pids,memory:/a\n"), "First:memory/a First:memory");
        assert_eq!(paths(nowhere, "garbage"), "");
    }

    #[test]
    fn beside_the_first_version_the_second_has_a_tree_of_its_own() {
        let mount = tempfile::tempdir().unwrap();
        std::fs::create_dir(mount.path().join("unified")).unwrap();
        assert_eq!(paths(mount.path(), "0::/a\n"), "Second:unified/a Second:unified");
    }
}
