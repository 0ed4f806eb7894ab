//! Files and directories that are not whole yet, so that a process that ends before they are leaves nothing, however
//! it ends.
//!
//! Such a file has no name (`O_TMPFILE`): the kernel frees it with its process. What needs a name before it is whole,
//! because the file system has no nameless files or because a name in use is replaced, is called
//! `NAME.tmp-HOST-PROCESS-ATTEMPT` and locked for as long as it is open. What a killed process leaves of that is locked
//! no more, and goes with [`remove_unfinished`] or the next file of that name on the same host: others may not see its
//! locks.

use collectives::digest;
use rustix::fs::{AtFlags, CWD, FlockOperation, Mode, OFlags, StatxAttributes, StatxFlags, flock};
use rustix::io::Errno;
use rustix::system::uname;
use std::ffi::OsStr;
use std::fs::{self, File, FileType, OpenOptions, Permissions};
use std::io::{Error, ErrorKind, Result};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, fchown};
use std::path::{Path, PathBuf};

/// More unfinished things of one name than this are no coincidence.
const ATTEMPTS: usize = 1000;
/// The longest name of a file that Linux has, in bytes.
const LONGEST_NAME: usize = 255;
/// Where nameless files are reached to be named.
const DESCRIPTORS: &str = "/proc/self/fd";
/// Who may read, write and search: what is replaced passes it on.
const RIGHTS: u32 = 0o777;
/// That what is made in a directory is of the directory's group.
const OF_ITS_GROUP: u32 = 0o2000;

/// A file that takes its name, and the place of what had it, when it is whole. Dropped before, it leaves nothing.
#[derive(Debug)]
pub struct NewFile {
    path: PathBuf,
    file: File,
    /// The name that it has meanwhile, if it has to have one.
    named: Option<PathBuf>,
}

impl NewFile {
    /// Starts what is to become `path`. Links are not followed.
    ///
    /// # Errors
    /// A path that ends in no file's name (`new/`) or in one too long to be replaced, or the system's refusal to create files
    /// there.
    pub fn create(path: impl AsRef<Path>) -> Result<Self> {
        Self::create_with(path.as_ref().to_owned(), give_name)
    }

    /// The same where files are named so.
    fn create_with(path: PathBuf, give_name: GiveName) -> Result<Self> {
        let named = |name: &OsStr| path.as_os_str().as_bytes().ends_with(name.as_bytes());
        if !path.file_name().is_some_and(named) {
            return Err(Error::new(ErrorKind::IsADirectory, "it names a directory"));
        }
        let room = LONGEST_NAME - format!(".{}-{}-{ATTEMPTS}", unfinished(), std::process::id()).len();
        if path.symlink_metadata().is_ok() && path.file_name().is_some_and(|name| name.len() > room) {
            // What is to take a name in use has a longer one meanwhile.
            let why = format!("a file whose name has more than {room} bytes cannot be replaced");
            return Err(Error::new(ErrorKind::InvalidFilename, why));
        }
        remove_unfinished(&path);
        let dir = parent(&path);
        let new = match takes_nameless(dir, give_name).then(|| nameless(dir)).flatten() {
            Some(file) => NewFile { path, file, named: None },
            None => Self::named(path)?,
        };
        keep_rights(&new.file, &new.path)?;
        Ok(new)
    }

    fn named(path: PathBuf) -> Result<Self> {
        let (named, file) = first_free(&path, &unfinished(), |name| claim(name, File::create_new(name)?))?;
        Ok(NewFile { path, file, named: Some(named) })
    }

    /// To be written to.
    pub fn file(&mut self) -> &mut File {
        &mut self.file
    }

    /// Brings it to the disk, and gives it its name.
    ///
    /// # Errors
    /// The system's refusal; what had the name keeps it.
    pub fn finish(mut self) -> Result<()> {
        self.file.sync_all()?;
        if self.named.is_none() {
            match give_name(&self.file, &self.path) {
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {
                    // Only a named file can take another's place.
                    let (named, ()) =
                        first_free(&self.path, &unfinished(), |name| give_name(&self.file, name))?;
                    self.named = Some(named);
                }
                done => return done,
            }
        }
        let Some(named) = &self.named else { return Ok(()) };
        fs::rename(named, &self.path)?;
        self.named = None;
        Ok(())
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let Some(named) = &self.named {
            // A refusal here has nobody to tell.
            let _ = fs::remove_file(named);
        }
    }
}

/// Gives a file that was made the rights of what it is to replace, if there is such a file: what was closed to others is so
/// from the start. Where the system refuses, it gives no rights of its own either.
pub(crate) fn keep_rights(made: &File, replaced: &Path) -> Result<()> {
    if let Ok(there) = replaced.symlink_metadata()
        && there.is_file()
    {
        let rights = passed_on(&there, &made.metadata()?, |gid| fchown(made, None, Some(gid)));
        let _ = made.set_permissions(Permissions::from_mode(rights));
    }
    Ok(())
}

/// Gives what was made the group of what is `there`, and says which rights it may have then: another group gets none that
/// others have not.
fn passed_on(there: &fs::Metadata, made: &fs::Metadata, give: impl FnOnce(u32) -> Result<()>) -> u32 {
    let rights = there.mode() & RIGHTS;
    match made.gid() == there.gid() || give(there.gid()).is_ok() {
        true => rights,
        false => rights & (!0o070 | rights << 3),
    }
}

/// A file without a name in `dir`, locked; None where the file system, or the system, has none such.
pub(crate) fn nameless(dir: &Path) -> Option<File> {
    if !Path::new(DESCRIPTORS).is_dir() {
        return None;
    }
    let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
    // Any other refusal is met again, and told, by who then creates a named one.
    let file = File::from(rustix::fs::open(dir, flags, Mode::from_raw_mode(0o666)).ok()?);
    lock(&file);
    Some(file)
}

/// How a nameless file is named.
pub(crate) type GiveName = fn(&File, &Path) -> Result<()>;

/// Whether nameless files can be made in `dir` and then be named: some systems grant the one and refuse the other, which
/// is too late once a file is whole.
pub(crate) fn takes_nameless(dir: &Path, give_name: GiveName) -> bool {
    // A short name, that none is too long for that of the file itself.
    let trial = dir.join(".trial");
    remove_unfinished(&trial);
    let Some(file) = nameless(dir) else { return false };
    let named = first_free(&trial, &unfinished(), |name| give_name(&file, name));
    named.is_ok_and(|(name, ())| fs::remove_file(name).is_ok())
}

/// Names a nameless file.
pub(crate) fn give_name(file: &File, name: &Path) -> Result<()> {
    let descriptor = format!("{DESCRIPTORS}/{}", file.as_raw_fd());
    Ok(rustix::fs::linkat(CWD, descriptor, CWD, name, AtFlags::SYMLINK_FOLLOW)?)
}

/// A directory beside `target` that becomes it, and its lock.
pub(crate) fn directory(target: &Path) -> Result<(PathBuf, File)> {
    let there = fs::metadata(target).ok();
    first_free(target, &unfinished(), |name| {
        fs::create_dir(name)?;
        match open_made(name, there.as_ref()) {
            Err(e) if e.kind() == ErrorKind::NotFound => Err(taken_away()),
            Err(e) => {
                // Another refusal here has nobody to tell.
                let _ = fs::remove_dir(name);
                Err(e)
            }
            Ok(made) => claim(name, made),
        }
    })
}

/// A directory that was just made, with the rights of what is `there` in its place.
fn open_made(name: &Path, there: Option<&fs::Metadata>) -> Result<File> {
    let made = fs::metadata(name)?;
    let (rights, group) = match there {
        // As a file's.
        Some(there) => (passed_on(there, &made, |gid| chown(name, None, Some(gid))), there.mode()),
        None => (made.mode() & RIGHTS, 0),
    };
    // This process has to write there, whatever its umask. chmod would take away what a directory has of the one around.
    let of_its_group = (group | made.mode()) & OF_ITS_GROUP;
    let _ = fs::set_permissions(name, Permissions::from_mode(rights | of_its_group | 0o700));
    File::open(name)
}

/// Locks what was just made with this name. Before, it looked like what a killed process left, and who took it away for
/// that has used the name up.
fn claim(name: &Path, made: File) -> Result<File> {
    if lock(&made) && is_called(&made, name) { Ok(made) } else { Err(taken_away()) }
}

fn taken_away() -> Error {
    ErrorKind::AlreadyExists.into()
}

/// Removes what killed processes of this host left of what was to become `target`. What is of living ones is locked,
/// and stays; so does what another host has, whose locks may not be seen here.
pub fn remove_unfinished(target: impl AsRef<Path>) {
    for (path, kind, _) in unfinished_of(target.as_ref()) {
        // NFS locks a file for one alone only where it is open for writing, as who makes it has it.
        let open = OpenOptions::new().read(kind.is_dir()).write(kind.is_file()).open(&path);
        // It may have gone while it was opened, and the name be that of something living.
        if let Ok(there) = open
            && flock(&there, FlockOperation::NonBlockingLockExclusive).is_ok()
            && is_called(&there, &path)
        {
            remove(&path, kind);
        }
    }
}

/// Removes what this process has under way of what was to become `target`: it ends, and other threads of it may still write.
pub fn abandon(target: impl AsRef<Path>) {
    let (target, own) = (target.as_ref(), std::process::id().to_string());
    // A name that no writer takes. A directory is taken from its writer in one step: while it was emptied, it might still have
    // become the target, and what has its name then is what was there before.
    let away = beside(target, &format!("{}-{own}-{}", unfinished(), ATTEMPTS + 1));
    for (path, kind, _) in unfinished_of(target).filter(|(_, _, process)| *process == own) {
        match kind.is_dir() {
            false => remove(&path, kind),
            true if fs::rename(&path, &away).is_ok() => remove(&away, kind),
            true => {}
        }
    }
}

/// What cannot be removed is not in the way of anything: the next name is another.
fn remove(path: &Path, kind: FileType) {
    let _ = if kind.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
}

/// What processes of this host have made, or left, of what is to become `target`, and which of them.
fn unfinished_of(target: &Path) -> impl Iterator<Item = (PathBuf, FileType, String)> {
    let target = std::path::absolute(target).unwrap_or_default();
    let there = target.parent().zip(target.file_name()).and_then(|(parent, name)| {
        let prefix = [name.as_bytes(), b".", unfinished().as_bytes(), b"-"].concat();
        Some((fs::read_dir(parent).ok()?, prefix))
    });
    there.into_iter().flat_map(|(entries, prefix)| {
        entries.flatten().filter_map(move |entry| {
            let process = process_of(entry.file_name().as_bytes().strip_prefix(prefix.as_slice())?)?;
            // Not what a link of that name leads to, and no pipe, which would be waited for.
            let kind = entry.file_type().ok().filter(|kind| kind.is_dir() || kind.is_file())?;
            Some((entry.path(), kind, process))
        })
    })
}

/// The kind of names that are cleaned up: this host's own.
fn unfinished() -> String {
    format!("tmp-{:016x}", digest(uname().nodename().to_bytes().iter().copied()))
}

/// The process that had it, if this is the end of a name that [`first_free`] gives, `PROCESS-ATTEMPT`.
fn process_of(end: &[u8]) -> Option<String> {
    let number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    let (process, attempt) = std::str::from_utf8(end).ok()?.split_once('-')?;
    (number(process) && number(attempt)).then(|| process.to_owned())
}

/// The first name of this kind beside `target` that `take` gets, and what it got.
pub(crate) fn first_free<R>(
    target: &Path,
    kind: &str,
    take: impl Fn(&Path) -> Result<R>,
) -> Result<(PathBuf, R)> {
    let mut attempt = 0;
    loop {
        let name = beside(target, &format!("{kind}-{}-{attempt}", std::process::id()));
        match take(&name) {
            Err(e) if e.kind() == ErrorKind::AlreadyExists && attempt < ATTEMPTS => attempt += 1,
            taken => return Ok((name, taken?)),
        }
    }
}

/// Whether something is mounted at `path`, whose place nothing else can take. Where the system does not say, it says so
/// when that is tried.
pub fn is_mount_point(path: impl AsRef<Path>) -> bool {
    let asked = rustix::fs::statx(CWD, path.as_ref(), AtFlags::empty(), StatxFlags::empty());
    asked.is_ok_and(|found| found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

/// `target` with `.suffix` at its end.
pub(crate) fn beside(target: &Path, suffix: &str) -> PathBuf {
    let mut name = target.as_os_str().to_owned();
    name.push(".");
    name.push(suffix);
    PathBuf::from(name)
}

/// The directory that a path is in.
pub fn parent(path: &Path) -> &Path {
    path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Whether nobody else has it locked. The kernel unlocks it when this process ends, however it does.
fn lock(file: &File) -> bool {
    // Where there are no locks nothing is cleaned up; where they hold on one host only, as those of directories over
    // NFS, names tell hosts apart.
    flock(file, FlockOperation::NonBlockingLockExclusive) != Err(Errno::WOULDBLOCK)
}

/// Whether it is still this file that has the name.
fn is_called(file: &File, name: &Path) -> bool {
    let of = |found: fs::Metadata| (found.dev(), found.ino());
    match (file.metadata(), fs::symlink_metadata(name)) {
        (Ok(opened), Ok(named)) => of(opened) == of(named),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap();
        let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Nameless where the file system can, and named.
    fn both(path: &Path) -> [NewFile; 2] {
        [NewFile::create(path).unwrap(), NewFile::named(path.to_owned()).unwrap()]
    }

    #[test]
    fn what_was_closed_to_others_stays_so() {
        let home = tempfile::tempdir().unwrap();
        let rights = |path: &Path| path.metadata().unwrap().mode() & RIGHTS;
        let path = home.path().join("f");
        NewFile::create(&path).unwrap().finish().unwrap();
        for closed in [0o600, 0o664] {
            fs::set_permissions(&path, Permissions::from_mode(closed)).unwrap();
            let new = NewFile::create(&path).unwrap();
            assert_eq!(new.file.metadata().unwrap().mode() & RIGHTS, closed);
            new.finish().unwrap();
            assert_eq!(rights(&path), closed);
        }
        let dir = home.path().join("d");
        fs::create_dir(&dir).unwrap();
        for closed in [0o700, 0o775] {
            fs::set_permissions(&dir, Permissions::from_mode(closed)).unwrap();
            assert_eq!(rights(&directory(&dir).unwrap().0), closed);
        }
        // A group's own stays the group's, also what is made in it.
        fs::set_permissions(&dir, Permissions::from_mode(0o2770)).unwrap();
        let mode = directory(&dir).unwrap().0.metadata().unwrap().mode();
        assert_eq!(mode & (RIGHTS | OF_ITS_GROUP), 0o2770);
        // Not everybody may give a file to a group.
        if chown(&dir, None, Some(12_345)).is_err() {
            return;
        }
        fs::set_permissions(&dir, Permissions::from_mode(0o754)).unwrap();
        let made = directory(&dir).unwrap().0.metadata().unwrap();
        assert_eq!((made.gid(), made.mode() & RIGHTS), (12_345, 0o754));
        let (there, other) = (dir.metadata().unwrap(), home.path().metadata().unwrap());
        assert_eq!(passed_on(&there, &other, |_| Err(Errno::PERM.into())), 0o744);
    }

    #[test]
    fn a_file_takes_its_name_when_it_is_whole() {
        for way in 0..2 {
            let home = tempfile::tempdir().unwrap();
            let path = home.path().join("f");
            for text in ["first", "second"] {
                let [mut nameless, mut named] = both(&path);
                let new = if way == 0 { &mut nameless } else { &mut named };
                new.file().write_all(text.as_bytes()).unwrap();
                assert!(text == "first" || fs::read_to_string(&path).unwrap() == "first");
                let [this, other] = if way == 0 { [nameless, named] } else { [named, nameless] };
                drop(other);
                this.finish().unwrap();
                assert_eq!(fs::read_to_string(&path).unwrap(), text);
                assert_eq!(names(home.path()), ["f"]);
            }
        }
    }

    #[test]
    fn where_nameless_files_cannot_be_named_they_have_names_from_the_start() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("f");
        let mut new = NewFile::create_with(path.clone(), |_, _| Err(Errno::PERM.into())).unwrap();
        assert_eq!(names(home.path()).len(), 1);
        new.file().write_all(b"whole").unwrap();
        new.finish().unwrap();
        assert_eq!(
            (names(home.path()), fs::read_to_string(path).unwrap()),
            (vec!["f".into()], "whole".into())
        );
    }

    #[test]
    fn what_is_dropped_or_cannot_be_named_leaves_nothing() {
        let home = tempfile::tempdir().unwrap();
        drop(both(&home.path().join("f")));
        assert_eq!(names(home.path()), [""; 0]);
        let taken = home.path().join("d");
        fs::create_dir(&taken).unwrap();
        for new in both(&taken) {
            assert!(new.finish().is_err(), "a directory is in the way");
        }
        assert_eq!(names(home.path()), ["d"]);
        assert!(NewFile::create(home.path().join("none/f")).is_err());
        for path in ["new/", "new/.", ".."] {
            let e = NewFile::create(home.path().join(path)).unwrap_err();
            assert!(e.to_string().contains("names a directory"), "{path}: {e}");
        }
        assert_eq!(names(home.path()), ["d"]);
    }

    #[test]
    fn what_killed_processes_left_goes_and_what_lives_stays() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("f");
        let living = NewFile::named(path.clone()).unwrap();
        let kept = names(home.path());
        let this = digest(uname().nodename().to_bytes().iter().copied());
        fs::write(home.path().join(format!("f.tmp-{this:016x}-1-0")), "half").unwrap();
        fs::create_dir(home.path().join(format!("f.tmp-{this:016x}-2-0"))).unwrap();
        // Another host's, whose locks may not be seen here, and a user's own.
        let others = [format!("f.tmp-{:016x}-1-0", !this), "f.tmp-2024-05".into(), "f.tmp-old".into()];
        others.iter().for_each(|name| fs::write(home.path().join(name), "not ours").unwrap());
        drop(NewFile::create(&path).unwrap());
        let mut expected = [&kept[..], &others].concat();
        expected.sort();
        assert_eq!(names(home.path()), expected);
        drop(living);
    }

    #[test]
    fn what_was_taken_away_before_it_was_locked_is_not_used() {
        let home = tempfile::tempdir().unwrap();
        let name = home.path().join("f");
        let make = || File::create_new(&name).unwrap();
        let taken = |made| claim(&name, made).unwrap_err().kind() == ErrorKind::AlreadyExists;
        // By who is about to remove it, has removed it, and was followed by somebody else.
        let made = make();
        let cleaner = File::open(&name).unwrap();
        cleaner.lock().unwrap();
        assert!(taken(made));
        drop(cleaner);
        fs::remove_file(&name).unwrap();
        let (made, ()) = (make(), fs::remove_file(&name).unwrap());
        assert!(taken(made.try_clone().unwrap()));
        let other = make();
        assert!(taken(made));
        claim(&name, other).unwrap();
    }

    #[test]
    fn what_a_process_has_under_way_goes_with_it() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("f");
        // Of another process, locked or not, and of another target.
        let kept =
            [format!("f.{}-1-0", unfinished()), format!("g.{}-{}-0", unfinished(), std::process::id())];
        kept.iter().for_each(|name| fs::write(home.path().join(name), "x").unwrap());
        let own = NewFile::named(path.clone()).unwrap();
        let (dir, _lock) = directory(&path).unwrap();
        fs::write(dir.join("model.safetensors"), "x").unwrap();
        assert_eq!(names(home.path()).len(), 4);
        abandon(&path);
        assert_eq!(names(home.path()), kept);
        drop(own);
    }

    #[test]
    fn a_name_too_long_to_be_replaced_is_refused_before_anything_is_written() {
        let home = tempfile::tempdir().unwrap();
        for (long, first, again) in [(200, true, true), (240, true, false)] {
            let path = home.path().join("x".repeat(long));
            let write = || NewFile::create(&path).map(|file| file.finish().unwrap());
            assert_eq!(write().is_ok(), first);
            let second = write();
            assert_eq!(second.is_ok(), again);
            assert!(second.err().is_none_or(|e| e.to_string().contains("cannot be replaced")));
        }
    }
}
