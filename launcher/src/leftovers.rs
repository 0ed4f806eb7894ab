//! What a command that runs alone would leave if it is ended midway, where a file has a name before it is whole: over NFS and
//! Lustre, which have no files without names, and of a directory everywhere.

use collectives::bootstrap::spawn;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::low_level::{emulate_default_handler, pipe};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread::Builder;

/// What this process has under way.
static TARGETS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// From here on Ctrl-C and its like end this process only after what it has under way is taken away. Where the system has no
/// threads left for that, they end it as they do without.
pub fn listen() {
    // What a process is started to ignore it is to outlive.
    for signal in [SIGHUP, SIGINT, SIGTERM].into_iter().filter(|&signal| !spawn::ignored(signal)) {
        let Ok((mut heard, told)) = std::io::pipe() else { return };
        let end = move || {
            if heard.read_exact(&mut [0]).is_ok() {
                targets(|all| {
                    all.iter().for_each(models::abandon);
                    // It ends as if nobody had listened.
                    let _ = emulate_default_handler(signal);
                });
            }
        };
        // Nothing is heard before there is somebody who hears it; who cannot be told hears that at once, and ends.
        if Builder::new().spawn(end).is_ok() {
            let _ = pipe::register(signal, told);
        }
    }
}

/// What is made of `target` before it is whole is taken away, if this process is ended.
pub fn go_with(target: &Path) {
    targets(|all| all.push(target.to_owned()));
}

/// What is done without being ended in its midst by what this process [listens](listen) for.
pub fn in_one_piece<R>(work: impl FnOnce() -> R) -> R {
    targets(|_| work())
}

fn targets<R>(look: impl FnOnce(&mut Vec<PathBuf>) -> R) -> R {
    look(&mut TARGETS.lock().unwrap_or_else(PoisonError::into_inner))
}
