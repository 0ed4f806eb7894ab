//! Where the ranks of one host make UCX's shared memory. UCX opens a file in /dev/shm, fills it, and takes its name away:
//! a rank that is killed in those milliseconds leaves megabytes under a name that nobody knows. Whoever starts the ranks
//! can give them a directory of their own instead, which goes when they have ended.

use std::fs::{self, DirBuilder, File};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// The variable by which UCX is told.
const VARIABLE: &str = "UCX_POSIX_DIR";
/// Where UCX would make it, and how our directories there begin.
const PLACE: &str = "/dev/shm";
const PREFIX: &str = "caravan-ucx-";
/// How many names are tried.
const ATTEMPTS: u32 = 16;
/// Room below which a worker may not have found what it takes at first, which is about 4.1 MiB with UCX 1.13.
const ROOM: u64 = 8 << 20;

/// What may be wrong where UCX refuses to make a worker: its own words for too little room are of many kinds.
pub(super) fn shortage() -> Option<String> {
    let place = std::env::var_os(VARIABLE).map_or(PLACE.into(), PathBuf::from);
    let about = rustix::fs::statvfs(&place).ok()?;
    let free = about.f_bavail * about.f_frsize;
    // One without a limit has no blocks.
    (about.f_blocks > 0 && free < ROOM).then(|| {
        format!(
            "{} has {} KiB free, of which UCX takes about 4.1 MiB a rank: enlarge it (docker run --shm-size=1g), or set \
             UCX_TLS=^sm",
            place.display(),
            free >> 10
        )
    })
}

/// A directory for the segments of ranks that this process starts; removed with all that is in it when this is dropped. If
/// the process is killed, the next that makes one removes it.
pub struct Segments {
    path: PathBuf,
    /// Locked for as long as this process lives.
    _lock: File,
}

impl Segments {
    /// None where the user has chosen a place, or where none can be made: then UCX says so better, if it needs one.
    pub fn for_ranks() -> Option<Segments> {
        match std::env::var_os(VARIABLE) {
            Some(_) => None,
            None => Self::inside(Path::new(PLACE)),
        }
    }

    /// What the ranks need in their environment.
    pub fn variable(&self) -> (&'static str, &Path) {
        (VARIABLE, &self.path)
    }

    /// Whether a variable of the environment is that of ranks that were given such a directory.
    pub fn are_told_by(name: &str, value: &str) -> bool {
        let ours = |path: &str| path.strip_prefix('/').is_some_and(|name| name.starts_with(PREFIX));
        name == VARIABLE && value.strip_prefix(PLACE).is_some_and(ours)
    }

    fn inside(place: &Path) -> Option<Segments> {
        remove_left(place);
        let number = std::process::id();
        (0..ATTEMPTS).find_map(|attempt| {
            let path = place.join(format!("{PREFIX}{number}-{attempt}"));
            // It may be there, made by a process of another container.
            DirBuilder::new().mode(0o700).create(&path).ok()?;
            match lock(&path) {
                Some(lock) if path.is_dir() => Some(Segments { path, _lock: lock }),
                // Another process has just looked whether it was left.
                _ => {
                    let _ = fs::remove_dir(&path);
                    None
                }
            }
        })
    }
}

impl Drop for Segments {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// The lock of a directory that no other process has.
fn lock(path: &Path) -> Option<File> {
    let there = File::open(path).ok()?;
    there.try_lock().ok().map(|()| there)
}

/// Removes the directories of processes that are no more; those of others are locked, or another user's.
fn remove_left(place: &Path) {
    for entry in fs::read_dir(place).into_iter().flatten().flatten() {
        let ours = entry.file_name().to_string_lossy().starts_with(PREFIX);
        if ours
            && entry.file_type().is_ok_and(|kind| kind.is_dir())
            && let Some(_lock) = lock(&entry.path())
        {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_of_ranks_is_told_from_one_that_a_user_has_chosen() {
        let given = Segments::for_ranks();
        if let Some((name, path)) = given.as_ref().map(Segments::variable) {
            assert!(Segments::are_told_by(name, path.to_str().unwrap()));
        }
        for place in ["/dev/shm", "/dev/shm/mine", "/tmp/caravan-ucx-1-0"] {
            assert!(!Segments::are_told_by(VARIABLE, place), "{place}");
        }
        assert!(!Segments::are_told_by("HOME", "/dev/shm/caravan-ucx-1-0"));
    }

    #[test]
    fn a_directory_goes_with_its_owner_or_with_the_next() {
        let place = tempfile::tempdir().unwrap();
        let names = || fs::read_dir(place.path()).unwrap().count();
        // Left by a process that was killed: there, but not locked.
        let left = place.path().join(format!("{PREFIX}1-0"));
        fs::create_dir(&left).unwrap();
        fs::write(left.join("ucx_shm_posix_1"), "").unwrap();
        fs::create_dir(place.path().join("of others")).unwrap();
        let first = Segments::inside(place.path()).unwrap();
        assert!(!left.exists() && first.path.is_dir());
        fs::write(first.path.join("ucx_shm_posix_2"), "").unwrap();
        let second = Segments::inside(place.path()).unwrap();
        assert_eq!(names(), 3, "who lives keeps what it has");
        assert_eq!(second.variable(), (VARIABLE, second.path.as_path()));
        drop((first, second));
        assert_eq!(names(), 1);
    }
}
