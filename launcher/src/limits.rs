//! What the system limits a process to, before it opens anything.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Takes the limit of open files as far up as this user may: token files stay open, a rank opens some for every other,
/// and many systems grant a few hundred unless asked.
pub fn allow_files() {
    let maximum = getrlimit(Resource::Nofile).maximum;
    // Where it cannot be raised, what is opened one day says so.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}
