//! Where CUDA's libraries are: the loader's own search, Python environments, and the usual folders.

use libloading::os::unix::Library;
use std::collections::HashSet;
use std::ffi::OsStr;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

/// An opened library. It stays in memory: NVIDIA's leave threads and handlers of a context's or a process's end behind,
/// which would run code that is no longer there.
pub struct Opened {
    library: ManuallyDrop<Library>,
    file: String,
}

impl Opened {
    /// # Safety
    /// `F` is the type of the symbol; `name` ends with a NUL.
    pub(crate) unsafe fn symbol<F: Copy>(&self, name: &str) -> Result<F, String> {
        // SAFETY: by the caller.
        let symbol = unsafe { self.library.get::<F>(name.as_bytes()) };
        symbol.map(|s| *s).map_err(|_| {
            format!(
                "{} has no function {}: another version is needed",
                self.file,
                name.trim_end_matches('\0')
            )
        })
    }

    /// What was opened: a path, or the name that the loader found.
    pub fn file(&self) -> &str {
        &self.file
    }
}

/// Opens the first of `names` that is found: any of them in the folders that the user lists, and then for each name in turn
/// by the loader (`LD_LIBRARY_PATH`, the system's folders) and in the other [`folders`]. `what` and `hint` are for the
/// error: what the library is, and what brings it. It will look for the `companions`, files whose names start so, by name
/// only: where the loader would not find them, we do.
pub fn open(what: &str, names: &[&str], companions: &[&str], hint: &str) -> Result<Opened, String> {
    open_accepted(what, names, companions, hint, Ok)
}

/// The same of the first that `accept` makes something of; if it does of none, the error has its words for all of them.
pub fn open_accepted<T>(
    what: &str,
    names: &[&str],
    companions: &[&str],
    hint: &str,
    accept: impl FnMut(Opened) -> Result<T, String>,
) -> Result<T, String> {
    open_in(&listed(), &folders(), what, names, companions, hint, accept)
}

/// The same with the folders that the user lists, and all.
fn open_in<T>(
    listed: &[PathBuf],
    folders: &[PathBuf],
    what: &str,
    names: &[&str],
    companions: &[&str],
    hint: &str,
    mut accept: impl FnMut(Opened) -> Result<T, String>,
) -> Result<T, String> {
    let (mut problem, mut seen, mut refused) = (None, HashSet::new(), Vec::new());
    let chosen = names.iter().flat_map(|name| listed.iter().map(move |folder| folder.join(name)));
    let found = names.iter().flat_map(|name| {
        std::iter::once(PathBuf::from(name)).chain(folders.iter().map(move |folder| folder.join(name)))
    });
    // A name without a folder is for the loader.
    let worth = |candidate: &PathBuf| candidate.parent() == Some(Path::new("")) || candidate.exists();
    for candidate in chosen.chain(found).filter(worth) {
        // SAFETY: NVIDIA's libraries are made to be opened like this; their initialisers have no conditions.
        match unsafe { Library::new(&candidate) } {
            Ok(library) => {
                let handle = library.into_raw();
                // By another name it is no other library.
                if !seen.insert(handle) {
                    continue;
                }
                // SAFETY: just opened, and closed by nobody.
                let library = ManuallyDrop::new(unsafe { Library::from_raw(handle) });
                match accept(Opened { library, file: candidate.display().to_string() }) {
                    Ok(accepted) => {
                        companions.iter().for_each(|start| accompany(&candidate, start, folders));
                        return Ok(accepted);
                    }
                    Err(why) => refused.push(why),
                }
            }
            // A file that is there and cannot be opened says more than one that is not.
            Err(error) if candidate.is_absolute() => problem = Some(error.to_string()),
            Err(_) => {}
        }
    }
    if !refused.is_empty() {
        return Err(refused.join("; "));
    }
    let tried = names.join(", ");
    Err(match problem {
        Some(problem) => format!("{what} is there but cannot be opened: {problem}"),
        None => format!(
            "{what} was not found ({tried}, in the loader's path, Python environments and /usr/local/cuda): {hint}"
        ),
    })
}

/// Opens what lies beside a library, or else in the first folder that has it; the loader then knows it by its name. Who
/// looks for it says if it is missing.
fn accompany(library: &Path, start: &str, folders: &[PathBuf]) {
    let beside = library.parent().filter(|folder| folder.is_absolute());
    for folder in beside.into_iter().chain(folders.iter().map(PathBuf::as_path)) {
        // SAFETY: as for the library itself.
        let opened =
            children(folder, start).into_iter().filter_map(|file| unsafe { Library::new(file) }.ok());
        if opened.map(std::mem::forget).count() > 0 {
            return;
        }
    }
}

/// The folders of `CARAVAN_CUDA_LIBRARIES`, which go before the loader's.
fn listed() -> Vec<PathBuf> {
    let listed = std::env::var_os("CARAVAN_CUDA_LIBRARIES").unwrap_or_default();
    std::env::split_paths(&listed).filter(|folder| folder.is_dir()).collect()
}

/// Folders that hold CUDA's libraries: those of `CARAVAN_CUDA_LIBRARIES` (separated by colons), of Python packages, which
/// NVIDIA's wheels are, and of toolkits.
pub fn folders() -> Vec<PathBuf> {
    let mut folders = listed();
    for packages in python_packages() {
        folders.extend(children(&packages.join("nvidia"), "").into_iter().map(|package| package.join("lib")));
    }
    let mut toolkits = children(Path::new("/usr/local"), "cuda");
    // The plain name is the one that the administrator chose; then the newest.
    toolkits.sort_by_key(|path| {
        (path.file_name().is_some_and(|name| name != "cuda"), std::cmp::Reverse(path.clone()))
    });
    let named = ["CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX"];
    for root in named.into_iter().filter_map(std::env::var_os).map(PathBuf::from).chain(toolkits) {
        folders.extend(
            ["lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"].map(|lib| root.join(lib)),
        );
    }
    // Where containers get the driver's own libraries.
    folders.extend(["/usr/local/nvidia/lib64", "/usr/local/nvidia/lib"].map(PathBuf::from));
    folders.retain(|folder| folder.is_dir());
    let mut seen = HashSet::new();
    folders.retain(|folder| seen.insert(folder.clone()));
    folders
}

/// Where Python's packages lie: on its own search path, and in environments.
fn python_packages() -> Vec<PathBuf> {
    let mut packages = searched("PYTHONPATH");
    for prefix in python_prefixes() {
        for lib in ["lib", "lib64", "local/lib"] {
            for python in children(&prefix.join(lib), "python3") {
                packages.extend(["site-packages", "dist-packages"].map(|name| python.join(name)));
            }
        }
    }
    packages
}

/// Where Python lives: the active environments, whatever `python3` in the path belongs to, and the user's own packages.
fn python_prefixes() -> Vec<PathBuf> {
    let environments =
        ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(std::env::var_os).map(PathBuf::from);
    let mut prefixes: Vec<PathBuf> = environments.collect();
    for folder in searched("PATH") {
        let python = folder.join("python3");
        if python.exists() {
            prefixes.extend(links(python).filter_map(|file| Some(file.parent()?.parent()?.to_path_buf())));
        }
    }
    prefixes.extend(std::env::var_os("HOME").map(|home| Path::new(&home).join(".local")));
    prefixes
}

/// The folders of a variable, but none that depends on where the program was started.
fn searched(variable: &str) -> Vec<PathBuf> {
    absolute(&std::env::var_os(variable).unwrap_or_default())
}

fn absolute(folders: &OsStr) -> Vec<PathBuf> {
    std::env::split_paths(folders).filter(|folder| folder.is_absolute()).collect()
}

/// A file as named, and what it links to, link by link: a python in the path may be a link to an environment's, which is
/// a link to the system's.
fn links(file: PathBuf) -> impl Iterator<Item = PathBuf> {
    // As many as the kernel follows.
    const MOST: usize = 40;
    let whole = file.canonicalize().ok();
    let next = |file: &PathBuf| Some(file.parent()?.join(file.read_link().ok()?));
    std::iter::successors(Some(file), next).take(MOST).chain(whole)
}

/// Entries of a folder whose names start with `start`, sorted; none if it cannot be read.
fn children(folder: &Path, start: &str) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(start))
        .map(|entry| entry.path())
        .collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::OnceLock;

    /// A library that every program here has opened, so that the loader finds it by its name, libgcc_s.so.1. It is read before
    /// any test opens a copy, which would be among what is open, too.
    fn a_library() -> &'static [u8] {
        static READ: OnceLock<Vec<u8>> = OnceLock::new();
        READ.get_or_init(|| {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            let opened = maps.split_whitespace().find(|word| word.ends_with("/libgcc_s.so.1"));
            std::fs::read(opened.unwrap()).unwrap()
        })
    }

    #[test]
    fn what_is_not_there_is_said_to_be_missing() {
        let error = open("a test", &["libcaravan-no-such-thing.so.1"], &[], "install it").err().unwrap();
        assert!(error.contains("libcaravan-no-such-thing.so.1") && error.contains("install it"), "{error}");
    }

    #[test]
    fn folders_that_the_user_lists_go_before_the_loader_and_that_before_the_others() {
        let root = tempfile::tempdir().unwrap();
        let [listed, other] = ["listed", "other"].map(|name| root.path().join(name));
        for folder in [&listed, &other] {
            std::fs::create_dir(folder).unwrap();
            for name in ["libgcc_s.so.1", "libcaravan-older.so.1"] {
                std::fs::write(folder.join(name), a_library()).unwrap();
            }
        }
        let both = [listed.clone(), other.clone()];
        let file = |listed: &[PathBuf], folders: &[PathBuf], names: &[&str]| {
            open_in(listed, folders, "a test", names, &[], "", Ok).unwrap().file().to_owned()
        };
        let at = |folder: &Path, name: &str| folder.join(name).display().to_string();
        let name = "libgcc_s.so.1";
        assert_eq!(file(&both[..1], &both, &[name]), at(&listed, name));
        assert_eq!(file(&[], &both, &[name]), name);
        let older = "libcaravan-older.so.1";
        assert_eq!(file(&[], &both[1..], &[older]), at(&other, older));
        // An older version that the user has chosen, too.
        std::fs::remove_file(listed.join(name)).unwrap();
        assert_eq!(file(&both[..1], &both, &[name, older]), at(&listed, older));
    }

    #[test]
    fn what_is_not_accepted_gives_way_to_the_next_and_is_named_once() {
        let root = tempfile::tempdir().unwrap();
        let name = "libcaravan-accepted.so.1";
        let folders = ["first", "link", "second"].map(|folder| root.path().join(folder));
        let files = folders.each_ref().map(|folder| folder.join(name).display().to_string());
        for folder in &folders {
            std::fs::create_dir(folder).unwrap();
        }
        std::fs::write(&files[0], a_library()).unwrap();
        std::os::unix::fs::symlink(&files[0], &files[1]).unwrap();
        std::fs::write(&files[2], a_library()).unwrap();
        let from = |first: usize| {
            open_in(&folders[..1], &folders, "a test", &[name], &[], "", |opened| {
                match files.iter().position(|file| file == opened.file()) >= Some(first) {
                    true => Ok(opened.file().to_owned()),
                    false => Err(opened.file().to_owned()),
                }
            })
        };
        assert_eq!((from(0), from(1)), (Ok(files[0].clone()), Ok(files[2].clone())));
        assert_eq!(from(3), Err(format!("{}; {}", files[0], files[2])));
    }

    #[test]
    fn a_missing_function_names_the_file() {
        let opened = open("the C library", &["libc.so.6"], &[], "").unwrap();
        // SAFETY: the type is never used, because the symbol is not there.
        let error = unsafe { opened.symbol::<usize>("caravan_no_such_function\0") }.unwrap_err();
        assert!(error.contains("libc.so.6") && error.contains("caravan_no_such_function"), "{error}");
    }

    #[test]
    fn a_python_is_followed_link_by_link() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().canonicalize().unwrap().join(name);
        for folder in ["path", "environment/bin", "system/bin"] {
            std::fs::create_dir_all(at(folder)).unwrap();
        }
        std::fs::write(at("system/bin/python3.12"), "").unwrap();
        let link = |to: &str, from: &str| std::os::unix::fs::symlink(to, at(from)).unwrap();
        link("python3.12", "system/bin/python3");
        link(at("system/bin/python3").to_str().unwrap(), "environment/bin/python3");
        link("../environment/bin/python3", "path/python3");
        link("loop", "path/loop");
        let folders: Vec<PathBuf> =
            links(at("path/python3")).map(|file| file.parent().unwrap().canonicalize().unwrap()).collect();
        for folder in ["path", "environment/bin", "system/bin"] {
            assert!(folders.contains(&at(folder)), "{folder} is not in {folders:?}");
        }
        assert!(links(at("path/loop")).count() <= 41);
    }

    #[test]
    fn nothing_is_searched_where_the_program_was_started() {
        let folders = |text: &str| absolute(OsStr::new(text));
        assert!(folders("").is_empty());
        assert_eq!(folders(":/a:b:.:/c"), [PathBuf::from("/a"), PathBuf::from("/c")]);
    }

    #[test]
    fn folders_exist_and_are_listed_once() {
        let folders = folders();
        assert!(folders.iter().all(|folder| folder.is_dir()));
        let set: std::collections::HashSet<_> = folders.iter().collect();
        assert_eq!(set.len(), folders.len());
    }
}
