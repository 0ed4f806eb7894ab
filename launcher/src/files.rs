//! The files that a command writes: whether it can, found out before anything is done for them, and writing them whole.

mod label;
mod read;
mod replaced;

pub use label::label;
pub use models::is_there;
pub use read::{check_named, check_once, read_regular};
pub use replaced::{Kind, check_replaced};

use crate::failure::{Failure, Result};
use crate::out;
use models::{NewFile, is_mount_point, parent};
use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A process holds the locks of a file for as long as writing it takes.
const LOCK_WITHIN: Duration = Duration::from_secs(10);
/// Who reads what is written to a pipe comes so soon.
pub const READ_WITHIN: Duration = Duration::from_secs(10);

/// How a file is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// At the end and at once, in the place of what was there.
    Whole,
    /// Line by line, into what was there.
    Growing,
}

/// A file that a command writes.
#[derive(Clone, Copy, Debug)]
pub struct Output<'a> {
    /// What asks for it.
    pub flag: &'static str,
    /// Its name.
    pub file: &'a Path,
    pub way: Way,
    pub kind: Kind,
}

impl<'a> Output<'a> {
    /// One that is written at the end.
    pub fn whole(flag: &'static str, file: &'a Path, kind: Kind) -> Self {
        Output { flag, file, way: Way::Whole, kind }
    }
}

/// Finds out whether `path` can be written that way; leaves nothing behind.
///
/// # Errors
/// The flag, the path and the system's words.
pub fn check_writable(flag: &str, path: &Path, way: Way) -> Result<()> {
    let refuse = |e: &dyn std::fmt::Display| Failure::usage(format!("{flag} {}: {e}", path.display()));
    let deny = |e: std::io::Error| refuse(&format!("{e}; give a file that can be written"));
    check_output_name(flag, path)?;
    if standard(path).is_some() {
        return Ok(());
    }
    let path = match fs::metadata(path) {
        Ok(there) if there.is_dir() => return Err(refuse(&"is a directory; give a file")),
        // To open a pipe or a device may do something.
        Ok(there) if !there.is_file() => return Ok(()),
        Ok(_) if is_descriptor(path) => {
            let name = through_links(path);
            let named = if name.exists() { format!(", {}", name.display()) } else { String::new() };
            return Err(refuse(&format!("is a file that is open already: give the file's own name{named}")));
        }
        Ok(_) if way == Way::Growing => {
            return fs::OpenOptions::new().append(true).open(path).map(drop).map_err(deny);
        }
        Ok(_) if is_mount_point(path) => {
            return Err(refuse(&"a file is mounted there, which cannot be replaced; give another"));
        }
        Ok(_) => fs::canonicalize(path).map_err(deny)?,
        Err(e) if e.kind() != ErrorKind::NotFound => return Err(deny(e)),
        Err(_) => {
            let there = through_links(path);
            if !parent(&there).is_dir() {
                let folder = parent(&there).display();
                return Err(refuse(&format!("there is no directory {folder}: make it, or give another")));
            }
            there
        }
    };
    NewFile::create(path).map(drop).map_err(deny)
}

/// The same of all that a command writes, of which none may be written over another or take the place of what is `read` or of
/// what is not of its kind.
///
/// # Errors
/// The flag, the path, and what is in the way.
pub fn check_outputs(outputs: &[Output<'_>], read: &[PathBuf]) -> Result<()> {
    outputs.iter().try_for_each(|output| check_writable(output.flag, output.file, output.way))?;
    check_distinct(outputs)?;
    outputs.iter().try_for_each(|output| {
        check_apart(output.flag, output.file, read)?;
        check_replaced(output.flag, output.file, output.kind)
    })
}

/// Refuses `-`, which for other programs is a `stream` and here would be a file.
///
/// # Errors
/// What would be the stream, and what the file.
pub fn check_name(flag: &str, path: &Path, stream: &str) -> Result<()> {
    match path == Path::new("-") {
        true => Err(Failure::usage(format!("{flag} -: take {stream}, or ./- for one of that name"))),
        false => Ok(()),
    }
}

/// The same of a file that is written, for which the stream is the standard output.
///
/// # Errors
/// As [`check_name`].
pub fn check_output_name(flag: &str, path: &Path) -> Result<()> {
    check_name(flag, path, "/dev/stdout for the standard output")
}

/// Refuses outputs of which one would be written over another, as far as their names and what is here say so.
///
/// # Errors
/// The flags and the path.
pub fn check_distinct(outputs: &[Output<'_>]) -> Result<()> {
    for (i, Output { flag, file, .. }) in outputs.iter().enumerate() {
        check_output_name(flag, file)?;
        let there = place(file);
        let same = outputs[..i].iter().find(|earlier| there.is_some() && place(earlier.file) == there);
        if let Some(earlier) = same {
            return Err(Failure::usage(format!(
                "{flag} {}: {} is written there too; give each a file of its own",
                file.display(),
                earlier.flag
            )));
        }
    }
    Ok(())
}

/// Where a file is, or will be; None of what is no file, to which several may write.
pub fn place(path: &Path) -> Option<PathBuf> {
    if standard(path).is_some() {
        return None;
    }
    match fs::metadata(path) {
        Ok(there) => there.is_file().then(|| fs::canonicalize(path).ok())?,
        Err(_) => {
            let path = through_links(path);
            let folder = parent(&path);
            let there = fs::canonicalize(folder).or_else(|_| std::path::absolute(folder)).ok()?;
            Some(there.join(path.file_name()?))
        }
    }
}

/// Where a file will be that is made at `path`: links lead there also before it is.
pub fn through_links(path: &Path) -> PathBuf {
    links(path).last().unwrap_or_default()
}

/// Whether `path` is, or leads through, a descriptor of a process, such as `/dev/stdout`: whatever file is behind it is open
/// somewhere, and has more in it.
pub fn is_descriptor(path: &Path) -> bool {
    let descriptors = |dir: PathBuf| dir.starts_with("/proc") && dir.ends_with("fd");
    links(path).any(|at| parent(&at).canonicalize().is_ok_and(descriptors))
}

/// The path, and where each link on the way leads.
fn links(path: &Path) -> impl Iterator<Item = PathBuf> {
    /// As many as the system follows.
    const MOST: usize = 40;
    let next = |at: &PathBuf| fs::read_link(at).ok().map(|target| parent(at).join(target));
    std::iter::successors(Some(path.to_owned()), next).take(MOST)
}

/// Standard output or standard error, if `path` is a name of one of them, or leads to one. What they go to may be a file with
/// more in it, which is not ours: opened by this name anew it would be written from its start, or replaced.
pub fn standard(path: &Path) -> Option<File> {
    let open = |at: PathBuf| match at.to_str()? {
        "/dev/stdout" | "/dev/fd/1" | "/proc/self/fd/1" => {
            Some(std::io::stdout().as_fd().try_clone_to_owned())
        }
        "/dev/stderr" | "/dev/fd/2" | "/proc/self/fd/2" => {
            Some(std::io::stderr().as_fd().try_clone_to_owned())
        }
        _ => None,
    };
    links(path).find_map(open)?.ok().map(File::from)
}

/// What tells a file from all others, by whichever name.
pub fn identity(there: &fs::Metadata) -> (u64, u64) {
    (there.dev(), there.ino())
}

/// Whether a file can be made at this path without destroying one of `inputs`, by whichever name.
///
/// # Errors
/// The flag, and the file that it would overwrite.
pub fn check_apart(flag: &str, path: &Path, inputs: &[PathBuf]) -> Result<()> {
    let is = |path: &Path| path.metadata().ok().as_ref().map(identity);
    let Some(there) = is(path) else { return Ok(()) };
    match inputs.iter().find(|input| is(input) == Some(there)) {
        None => Ok(()),
        Some(input) => Err(Failure::usage(format!(
            "{flag} {} would overwrite {}, which this run reads: give it another name",
            path.display(),
            input.display()
        ))),
    }
}

/// Whether a file is asked for, as ranks compare it: each may give it a name of its own, and one of them writes it.
pub fn wanted(path: Option<&Path>) -> String {
    if path.is_some() { "given" } else { "not given" }.to_owned()
}

/// Writes all of `content`, or leaves what was there. Links are followed, and what is no file (a pipe), or
/// [`standard`], is written to instead of replaced.
///
/// # Errors
/// The path and the system's words.
pub fn write_whole(path: &Path, content: &[u8]) -> Result<()> {
    let written = match (standard(path), fs::metadata(path)) {
        (Some(open), _) => out::all(&open, content),
        (None, Ok(there)) if there.is_file() => {
            fs::canonicalize(path).and_then(|file| replace(&file, content))
        }
        (None, Ok(_)) => open_special(path, READ_WITHIN).and_then(|open| out::all(&open, content)),
        (None, Err(_)) => replace(&through_links(path), content),
    };
    written.map_err(|e| Failure::run(format!("writing {}: {e}", path.display())))
}

/// Opens for writing what is no regular file. To open a pipe that nobody reads would last for ever, and other ranks wait
/// meanwhile: its reader has to come `within` this.
pub fn open_special(path: &Path, within: Duration) -> std::io::Result<File> {
    let until = Instant::now() + within;
    loop {
        match rustix::fs::open(path, OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty()) {
            Ok(open) => {
                rustix::fs::fcntl_setfl(&open, OFlags::WRONLY)?;
                return Ok(File::from(open));
            }
            Err(Errno::NXIO) if Instant::now() < until => std::thread::sleep(Duration::from_millis(20)),
            Err(Errno::NXIO) => {
                let why = format!("it is a pipe or a device that nobody reads, after {within:?}");
                return Err(std::io::Error::other(why));
            }
            Err(e) => return Err(e.into()),
        }
    }
}

/// Writes whole what `change` makes of what is there at that moment (nothing, where there is no file), while no other
/// process that does so may come between.
///
/// # Errors
/// Those of `change`; the path and the system's words.
pub fn change_whole(path: &Path, change: impl FnOnce(&str) -> Result<String>) -> Result<()> {
    let Some(file) = place(path) else { return write_whole(path, change("")?.as_bytes()) };
    let failed = |e: std::io::Error| Failure::run(format!("writing {}: {e}", path.display()));
    let lock = locked(&file, LOCK_WITHIN);
    if lock.is_none() {
        out::note(format_args!(
            "caravan: {} cannot be locked: what another process writes there at this moment may be lost",
            file.display()
        ));
    }
    let old = match fs::read_to_string(&file) {
        Err(e) if e.kind() == ErrorKind::NotFound => String::new(),
        old => old.map_err(failed)?,
    };
    write_whole(&file, change(&old)?.as_bytes())
}

/// What keeps others from changing `file`, until it is dropped; None where there are no locks to be had. The folder's is for
/// who makes the file, and the file's own, if it is there, for hosts that share it: over NFS a folder's is known to one only.
fn locked(file: &Path, within: Duration) -> Option<[Option<File>; 2]> {
    let give_up = Instant::now() + within;
    let folder = exclusive(File::open(parent(file)).ok()?, give_up)?;
    // Who held it before may have put another file in its place.
    while let Ok(open) = fs::OpenOptions::new().read(true).write(true).open(file) {
        let open = exclusive(open, give_up)?;
        if same(&open, file) {
            return Some([Some(folder), Some(open)]);
        }
    }
    Some([Some(folder), None])
}

/// A file or folder with its lock, if that can be had in time.
fn exclusive(open: File, give_up: Instant) -> Option<File> {
    loop {
        match flock(&open, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Some(open),
            Err(Errno::WOULDBLOCK) if Instant::now() < give_up => {
                std::thread::sleep(Duration::from_millis(5))
            }
            Err(Errno::INTR) => {}
            Err(_) => return None,
        }
    }
}

/// Whether an open file has this name.
fn same(open: &File, name: &Path) -> bool {
    let is = |of: std::io::Result<fs::Metadata>| of.ok().as_ref().map(identity);
    is(open.metadata()) == is(fs::metadata(name))
}

/// A whole file in the place of what was there.
fn replace(path: &Path, content: &[u8]) -> std::io::Result<()> {
    let mut new = NewFile::create(path)?;
    new.file().write_all(content)?;
    new.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_written_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.json");
        check_writable("--json", &path, Way::Whole).unwrap();
        assert!(!path.exists() && fs::read_dir(dir.path()).unwrap().count() == 0);
        write_whole(&path, b"{}").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"{}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        let e = check_writable("--json", &dir.path().join("no/such/out.json"), Way::Whole).unwrap_err();
        let words = format!("there is no directory {}", dir.path().join("no/such").display());
        assert!(
            e.code() == 2 && e.to_string().starts_with("--json ") && e.to_string().contains(&words),
            "{e}"
        );
        assert!(
            check_writable("--json", dir.path(), Way::Whole)
                .unwrap_err()
                .to_string()
                .contains("is a directory")
        );
        // A directory in the way: the rename fails, and nothing of ours stays.
        let taken = dir.path().join("taken");
        fs::create_dir(&taken).unwrap();
        assert_eq!(write_whole(&taken, b"x").unwrap_err().code(), 1);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn changes_of_one_file_do_not_lose_each_other() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("table");
        let line = &|text: &str| change_whole(&path, |old| Ok(format!("{old}{text}\n")));
        std::thread::scope(|scope| {
            (0..8).for_each(|writer| {
                scope.spawn(move || (0..5).for_each(|i| line(&format!("{writer} {i}")).unwrap()));
            });
        });
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(text.lines().collect::<std::collections::HashSet<_>>().len(), 40, "{text}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        // A lock that is not to be had is said to be none.
        let _held = locked(&path, Duration::ZERO).unwrap();
        assert!(locked(&path, Duration::from_millis(20)).is_none());
    }

    #[test]
    fn a_change_that_fails_makes_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("table");
        let failed = change_whole(&path, |_| {
            assert!(!path.exists());
            Err(Failure::run("no"))
        });
        assert_eq!(failed.unwrap_err().to_string(), "no");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn no_two_outputs_are_the_same_file() {
        let dir = tempfile::tempdir().unwrap();
        let [new, same, old, link] = ["new", "./new", "old", "link"].map(|name| dir.path().join(name));
        fs::write(&old, "").unwrap();
        std::os::unix::fs::symlink("old", &link).unwrap();
        let check = |csv: &Path, json: &Path| {
            let (csv, json) =
                (Output::whole("--csv", csv, Kind::Csv), Output::whole("--json", json, Kind::Json));
            check_outputs(&[csv, json], &[])
        };
        for (csv, json) in [(&new, &new), (&new, &same), (&old, &old), (&old, &link)] {
            let e = check(csv, json).unwrap_err();
            let words = format!("--json {}: --csv is written there too", json.display());
            assert!(e.code() == 2 && e.to_string().starts_with(&words), "{e}");
        }
        check(&new, &old).unwrap();
        let null = Path::new("/dev/null");
        check(null, null).unwrap();
    }

    #[test]
    fn a_pipe_is_written_to_once_somebody_reads_it_and_not_waited_for_without_end() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)
            .unwrap();
        let e = open_special(&pipe, Duration::from_millis(50)).unwrap_err().to_string();
        assert!(e.contains("nobody reads"), "{e}");
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| fs::read(&pipe).unwrap());
            // More than a pipe holds, so that writing waits for the reader.
            write_whole(&pipe, &[7; 300_000]).unwrap();
            assert_eq!(reader.join().unwrap(), [7; 300_000]);
        });
    }

    #[test]
    fn links_and_devices_are_written_to_and_stay_what_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let [file, link, full] = ["run.json", "latest.json", "full"].map(|name| dir.path().join(name));
        fs::write(&file, "old").unwrap();
        std::os::unix::fs::symlink("run.json", &link).unwrap();
        std::os::unix::fs::symlink("/dev/full", &full).unwrap();
        check_writable("--json", &link, Way::Whole).unwrap();
        write_whole(&link, b"{}").unwrap();
        assert!(link.is_symlink() && fs::read(&file).unwrap() == b"{}");
        // Also where nothing is there yet.
        fs::remove_file(&file).unwrap();
        let outputs = [Output::whole("--csv", &file, Kind::Csv), Output::whole("--json", &link, Kind::Json)];
        let e = check_outputs(&outputs, &[]).unwrap_err();
        assert!(e.to_string().contains("--csv is written there too"), "{e}");
        write_whole(&link, b"{}").unwrap();
        assert!(link.is_symlink() && fs::read(&file).unwrap() == b"{}");
        check_writable("--json", &full, Way::Whole).unwrap();
        assert!(write_whole(&full, b"{}").unwrap_err().to_string().contains("No space left"));
        assert!(fs::metadata(&full).is_ok_and(|there| !there.is_file()) && full.is_symlink());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3);
    }

    #[test]
    fn what_is_open_already_is_not_written_from_its_start() {
        use std::os::fd::AsRawFd;
        let dir = tempfile::tempdir().unwrap();
        let [log, link, out] = ["log", "link", "out"].map(|name| dir.path().join(name));
        fs::write(&log, "precious").unwrap();
        let open = fs::OpenOptions::new().append(true).open(&log).unwrap();
        let descriptor = PathBuf::from(format!("/dev/fd/{}", open.as_raw_fd()));
        std::os::unix::fs::symlink(&descriptor, &link).unwrap();
        for (path, way) in [(&descriptor, Way::Growing), (&descriptor, Way::Whole), (&link, Way::Whole)] {
            let e = check_writable("--json", path, way).unwrap_err();
            assert!(e.code() == 2 && e.to_string().contains(&log.display().to_string()), "{e}");
        }
        assert_eq!(fs::read(&log).unwrap(), b"precious");
        std::os::unix::fs::symlink("/dev/stdout", &out).unwrap();
        check_writable("--json", &out, Way::Whole).unwrap();
        assert!(standard(&out).is_some() && standard(&log).is_none());
    }

    #[test]
    fn a_file_that_grows_needs_no_room_beside_it_and_stays_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.jsonl");
        check_writable("--metrics", &path, Way::Growing).unwrap();
        assert!(!path.exists());
        fs::write(&path, "old").unwrap();
        check_writable("--metrics", &path, Way::Growing).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"old");
        let e = check_writable("--metrics", dir.path(), Way::Growing).unwrap_err();
        assert!(e.code() == 2 && e.to_string().contains("is a directory"), "{e}");
        let e = check_writable("--metrics", Path::new("/proc/m"), Way::Growing).unwrap_err();
        assert!(e.code() == 2 && e.to_string().starts_with("--metrics /proc/m: "), "{e}");
    }
}
