//! A model directory before it has its name: nothing half-written is seen or stays, and what is whole is not lost.

use super::names::{TEMPLATES, is_template};
use super::save::check_destination;
use crate::error::{Error, Result};
use crate::unfinished::{
    self, GiveName, first_free, give_name, keep_rights, nameless, parent, remove_unfinished, takes_nameless,
};
use rustix::fs::{CWD, RenameFlags};
use rustix::io::Errno;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// What becomes a model directory; dropped before it is, it leaves nothing.
pub(super) struct Staging {
    target: PathBuf,
    /// Whether files have no names before the end.
    late: bool,
    /// Whole files that have no names yet, and the name that each will have.
    nameless: Vec<(String, File)>,
    /// Where files have their names; not before the end, if the file system has nameless ones.
    dir: Option<Dir>,
    /// After all that is in them.
    parents: Parents,
}

/// Directories that were made for the destination to be in, the innermost first; they go again unless it came.
struct Parents(Vec<PathBuf>);

impl Parents {
    fn create(parent: &Path) -> Result<Self> {
        let missing = parent.ancestors().take_while(|dir| !dir.exists()).map(Path::to_owned).collect();
        // Also of a creation that fails half-way.
        let parents = Parents(missing);
        fs::create_dir_all(parent).map_err(|e| Error::system("create", parent, e))?;
        Ok(parents)
    }
}

impl Drop for Parents {
    fn drop(&mut self) {
        // One that somebody uses meanwhile is not empty and stays.
        for dir in &self.0 {
            let _ = fs::remove_dir(dir);
        }
    }
}

/// A temporary directory, removed when dropped unless it took the destination's place, and its lock.
struct Dir {
    path: PathBuf,
    _lock: File,
}

impl Staging {
    pub(super) fn create(target: &Path) -> Result<Self> {
        Self::create_with(target, give_name)
    }

    /// The same where files are named so.
    fn create_with(target: &Path, give_name: GiveName) -> Result<Self> {
        let parents = Parents::create(parent(target))?;
        remove_unfinished(target);
        let late = takes_nameless(parent(target), give_name);
        Ok(Staging { target: target.to_owned(), late, nameless: vec![], dir: None, parents })
    }

    fn dir(&mut self) -> Result<&Path> {
        let dir = match &mut self.dir {
            Some(dir) => dir,
            none => {
                let made = unfinished::directory(&self.target);
                let (path, lock) =
                    made.map_err(|e| Error::system("create a directory for", &self.target, e))?;
                none.insert(Dir { path, _lock: lock })
            }
        };
        Ok(&dir.path)
    }

    /// A file to write to.
    pub(super) fn open(&mut self, name: &str) -> Result<File> {
        let file = match self.late.then(|| nameless(parent(&self.target))).flatten() {
            Some(file) => file,
            None => {
                let path = place(self.dir()?, name)?;
                File::create_new(&path).map_err(|e| Error::system("create", &path, e))?
            }
        };
        let replaced = self.target.join(name);
        keep_rights(&file, &replaced).map_err(|e| Error::system("create", &replaced, e))?;
        Ok(file)
    }

    /// Takes back what was opened for `name`, and is whole.
    pub(super) fn keep(&mut self, name: &str, file: File) -> std::io::Result<()> {
        file.sync_all()?;
        if file.metadata()?.nlink() == 0 {
            self.nameless.push((name.to_owned(), file));
        }
        Ok(())
    }

    pub(super) fn write(&mut self, name: &str, content: &[u8]) -> Result<()> {
        let mut file = self.open(name)?;
        let written = file.write_all(content).and_then(|()| self.keep(name, file));
        let what = format!("write {name} ({} bytes) to", content.len());
        written.map_err(|e| Error::system(what, &self.target, e))
    }

    /// Takes the place of the destination, in one step where the file system can exchange two names.
    pub(super) fn replace(self) -> Result<()> {
        self.replace_with(sync_dir)
    }

    /// The same with `sync` to bring a directory to the disk.
    fn replace_with(mut self, sync: impl Fn(&Path) -> Result<()>) -> Result<()> {
        let path = self.dir()?.to_owned();
        let named = self.give_names(&path);
        let what = match &named {
            // Nothing has a name.
            Err(_) if fs::remove_dir(&path).is_ok() => return named,
            Err(_) => "those files of the finished model that have names were",
            Ok(()) => "the finished model was",
        };
        // From here on what has names is whole, and is kept whatever happens.
        let made = std::mem::take(&mut self.parents.0);
        let moved = named
            .and_then(|()| sync(&path))
            .and_then(|()| match path.join(TEMPLATES) {
                inside if inside.is_dir() => sync(&inside),
                _ => Ok(()),
            })
            .and_then(|()| check_destination(&self.target, 0))
            .and_then(|_| replace(&path, &self.target, exchange));
        if let Err(error) = moved {
            let (stays, error) = keep(path, &self.target, what, error);
            if stays {
                std::mem::forget(self.dir.take());
            }
            return Err(error);
        }
        // What was replaced lies where we were, and goes when `self` drops.
        let mut named_in = std::iter::once(&self.target).chain(&made).map(|named| parent(named));
        named_in.try_for_each(sync).map_err(|e| {
            let text = format!("the model is here, but its name may not survive a power failure: {e}");
            Error::format(&self.target, text)
        })
    }

    /// Names all files that can be named, in the directory `dir`.
    fn give_names(&mut self, dir: &Path) -> Result<()> {
        let name = |(name, file): (String, File)| {
            let name = place(dir, &name)?;
            give_name(&file, &name).map_err(|e| Error::system("create", &name, e))
        };
        // Also those after one that is refused.
        self.nameless.drain(..).map(name).fold(Ok(()), Result::and)
    }
}

/// Where `name` lies in `dir`, with the directory that it may be in there.
fn place(dir: &Path, name: &str) -> Result<PathBuf> {
    let place = dir.join(name);
    if is_template(name) {
        fs::create_dir_all(parent(&place)).map_err(|e| Error::system("create", parent(&place), e))?;
    }
    Ok(place)
}

/// Gives each of two names what the other has, in one step.
fn exchange(one: &Path, other: &Path) -> std::io::Result<()> {
    Ok(rustix::fs::renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE)?)
}

/// Moves a directory to the place of another, if there is one, which then lies where the directory was; with `exchange`
/// if the file system has that.
fn replace(path: &Path, target: &Path, exchange: impl Fn(&Path, &Path) -> std::io::Result<()>) -> Result<()> {
    let refused = |e: std::io::Error| Error::system("move the finished model to", target, e);
    if !target.exists() {
        return fs::rename(path, target).map_err(refused);
    }
    // What is empty gives way by itself, also where it cannot be moved (see `is_movable`).
    if exchange(path, target).is_ok() || fs::rename(path, target).is_ok() {
        return Ok(());
    }
    // For a moment no model has the name: both lie under names that nobody cleans up by then, whoever is killed.
    let new = set_aside(path, target, "new").map_err(refused)?;
    let moved = set_aside(target, target, "old").map_err(refused).and_then(|old| {
        let moved = fs::rename(&new, target).map_err(|e| {
            // The old model goes back; should that fail as well, it is still whole under its other name.
            let what = match fs::rename(&old, target) {
                Ok(()) => "move the finished model to".to_owned(),
                Err(_) => format!("move the finished model (the old is {}) to", old.display()),
            };
            Error::system(what, target, e)
        });
        moved.map(|()| old)
    });
    let old = moved.map_err(|error| match fs::rename(&new, path) {
        Ok(()) => error,
        Err(_) => Error::format(&new, format!("the finished model was left here: {error}")),
    })?;
    // The new one has its place, whatever becomes of the old.
    let _ = fs::rename(&old, path).or_else(|_| fs::remove_dir_all(&old));
    Ok(())
}

/// Whether the file system lets the directory `target` be moved: overlayfs, on which containers lie, does not where it is part
/// of an image.
pub(super) fn is_movable(target: &Path) -> bool {
    let Ok((path, lock)) = unfinished::directory(target) else { return true };
    let full = Dir { path, _lock: lock };
    if fs::create_dir(full.path.join("full")).is_err() {
        return true;
    }
    // Nothing takes the place of a directory that is not empty: whoever would let it go refuses for that.
    match fs::rename(target, &full.path) {
        Err(e) => e.kind() != ErrorKind::CrossesDevices,
        Ok(()) => {
            let _ = fs::rename(&full.path, target);
            std::mem::forget(full);
            true
        }
    }
}

/// Gives a directory the first name of this kind beside `target` that is free.
fn set_aside(path: &Path, target: &Path, kind: &str) -> std::io::Result<PathBuf> {
    let renamed = first_free(target, kind, |name| match name.exists() {
        true => Err(ErrorKind::AlreadyExists.into()),
        false => fs::rename(path, name),
    });
    renamed.map(|(name, ())| name)
}

/// Gives what of a finished model could not be moved to `target` a name that nobody cleans up. Whether it got none and
/// stays where it is, and what to say.
fn keep(path: PathBuf, target: &Path, what: &str, error: Error) -> (bool, Error) {
    // It has its place: a network file system can refuse what it has done.
    if !path.exists() {
        return (false, error);
    }
    let renamed = set_aside(&path, target, "new");
    let (kept, stays) = renamed.map_or((path, true), |name| (name, false));
    (stays, Error::format(&kept, format!("{what} left here: {error}")))
}

impl Drop for Dir {
    fn drop(&mut self) {
        // Gone already when it was renamed. A refusal here has nobody to tell; what it leaves goes with the next save.
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Brings the names in a directory to the disk, where the file system can be asked to: CIFS and WSL's drvfs cannot, nor who may
/// write in a directory and not read it.
///
/// # Errors
/// The system's refusal of what it can be asked.
pub fn sync_dir(path: &Path) -> Result<()> {
    let unasked = |e: &std::io::Error| {
        matches!(Errno::from_io_error(e), Some(Errno::INVAL | Errno::OPNOTSUPP | Errno::ACCESS))
    };
    match File::open(path).and_then(|dir| dir.sync_all()) {
        Err(e) if !unasked(&e) => Err(Error::system("sync", path, e)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unfinished::beside;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn directories_that_have_no_way_to_the_disk_are_no_failure() {
        sync_dir(Path::new("/proc")).unwrap();
        let text = sync_dir(Path::new("/none")).unwrap_err().to_string();
        assert!(text.contains("cannot sync /none"), "{text}");
    }

    fn read(path: PathBuf) -> String {
        fs::read_to_string(path).unwrap()
    }

    #[test]
    fn files_that_could_be_named_are_kept_when_another_could_not() {
        let home = tempfile::tempdir().unwrap();
        let target = home.path().join("made/m");
        let staging = |names: &[&str]| {
            let mut staging = Staging::create(&target).unwrap();
            for name in names {
                let origin = home.path().join(name.replace('/', "-"));
                fs::write(&origin, name).unwrap();
                staging.nameless.push(((*name).to_owned(), File::open(origin).unwrap()));
            }
            staging
        };
        let text = staging(&["none/config"]).replace().unwrap_err().to_string();
        assert!(text.contains("cannot create") && !text.contains("left here"), "{text}");
        assert!(!home.path().join("made").exists(), "nothing was kept");
        let text = staging(&["first", "none/config", "last"]).replace().unwrap_err().to_string();
        let left = beside(&target, &format!("new-{}-0", std::process::id()));
        let said =
            format!("{}: those files of the finished model that have names were left here", left.display());
        assert!(text.starts_with(&said) && text.contains("none/config"), "{text}");
        assert_eq!(["first", "last"].map(|name| read(left.join(name))), ["first", "last"]);
        assert!(!target.exists());
    }

    #[test]
    fn where_nameless_files_cannot_be_named_they_have_names_from_the_start() {
        let home = tempfile::tempdir().unwrap();
        let target = home.path().join("m");
        let mut staging = Staging::create_with(&target, |_, _| Err(Errno::PERM.into())).unwrap();
        staging.write("config", b"new").unwrap();
        assert!(staging.nameless.is_empty() && staging.dir.is_some());
        staging.write("additional_chat_templates/tools.jinja", b"too").unwrap();
        staging.replace().unwrap();
        let read = |name: &str| read(target.join(name));
        assert_eq!([read("config"), read("additional_chat_templates/tools.jinja")], ["new", "too"]);
        assert_eq!(fs::read_dir(home.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_model_whose_name_may_not_last_is_said_to_be_there() {
        let home = tempfile::tempdir().unwrap();
        let target = home.path().join("made/m");
        let mut staging = Staging::create(&target).unwrap();
        staging.write("config", b"new").unwrap();
        let refused = |dir: &Path| match target.starts_with(dir) {
            true => Err(Error::system("sync", dir, "Input/output error")),
            false => sync_dir(dir),
        };
        let text = staging.replace_with(refused).unwrap_err().to_string();
        assert!(text.starts_with(&format!("{}: the model is here, but", target.display())), "{text}");
        assert!(text.ends_with("made: Input/output error"), "{text}");
        assert_eq!(read(target.join("config")), "new");
        assert_eq!(fs::read_dir(home.path().join("made")).unwrap().count(), 1);
    }

    #[test]
    fn what_is_abandoned_as_it_gets_its_place_leaves_what_was_there() {
        let home = tempfile::tempdir().unwrap();
        let target = home.path().join("m");
        fs::create_dir(&target).unwrap();
        fs::write(target.join("config"), "old").unwrap();
        let mut staging = Staging::create(&target).unwrap();
        staging.write("config", b"new").unwrap();
        let abandoned = |_: &Path| {
            unfinished::abandon(&target);
            Ok(())
        };
        staging.replace_with(abandoned).unwrap_err();
        assert_eq!(read(target.join("config")), "old");
        assert_eq!(fs::read_dir(home.path()).unwrap().count(), 1);
    }

    #[test]
    fn directories_that_were_made_are_brought_to_the_disk_where_they_are() {
        let home = tempfile::tempdir().unwrap();
        let target = home.path().join("made/inside/m");
        let mut staging = Staging::create(&target).unwrap();
        staging.write("config", b"new").unwrap();
        let synced = std::cell::RefCell::new(Vec::new());
        let record = |dir: &Path| {
            synced.borrow_mut().push(dir.to_owned());
            Ok(())
        };
        staging.replace_with(record).unwrap();
        for dir in ["", "made", "made/inside"] {
            assert!(synced.borrow().contains(&home.path().join(dir)), "{dir}: {synced:?}");
        }
        assert_eq!(read(target.join("config")), "new");
    }

    #[test]
    fn what_was_closed_to_others_stays_so() {
        let home = tempfile::tempdir().unwrap();
        let target = home.path().join("m");
        let save = |weights: &[u8]| {
            let mut staging = Staging::create(&target).unwrap();
            staging.write("config.json", b"{}").unwrap();
            staging.write("model.safetensors", weights).unwrap();
            staging.replace().unwrap();
        };
        save(b"old");
        let weights = target.join("model.safetensors");
        for rights in [0o600, 0o644] {
            fs::set_permissions(&weights, Permissions::from_mode(rights)).unwrap();
            save(b"new");
            let there = weights.metadata().unwrap().permissions().mode() & 0o777;
            assert_eq!((there, read(weights.clone())), (rights, "new".into()));
        }
    }

    #[test]
    fn without_an_exchange_the_old_model_lies_where_the_new_was_too() {
        let home = tempfile::tempdir().unwrap();
        let [path, target] = ["m.tmp", "m"].map(|name| home.path().join(name));
        for (dir, text) in [(&path, "new"), (&target, "old")] {
            fs::create_dir(dir).unwrap();
            fs::write(dir.join("config"), text).unwrap();
        }
        replace(&path, &target, |_, _| Err(ErrorKind::InvalidInput.into())).unwrap();
        assert_eq!([&target, &path].map(|dir| read(dir.join("config"))), ["new", "old"]);
        assert_eq!(fs::read_dir(home.path()).unwrap().count(), 2);
    }
}
