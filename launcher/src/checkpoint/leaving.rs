//! States that are not to stay, on their way off the disk.

use super::{Checkpoints, pen_place, steps};
use std::fs;
use std::path::PathBuf;
use std::thread::{self, JoinHandle};

/// States whose names are gone, while a thread removes what is in them: that takes long of many bytes. Waited for where it is
/// dropped.
#[derive(Default)]
#[must_use = "what is dropped is waited for"]
pub struct Leaving(Option<JoinHandle<()>>);

impl Checkpoints {
    /// Takes away what is not to stay beside the state after `step`, which is there, whatever becomes of these; over NFS what
    /// somebody has open stays.
    pub fn take_away_before(&self, step: usize) -> Leaving {
        let mut before = steps(&self.dir).unwrap_or_default();
        before.retain(|(other, _)| *other < step);
        before.sort_unstable();
        before.truncate((before.len() + 1).saturating_sub(self.keep));
        // Each goes whole: who reads it finds all of it, or nothing.
        let gone = |(other, dir): (usize, PathBuf)| {
            let going = pen_place(&self.dir, other);
            if fs::rename(&dir, &going).is_ok() { going } else { dir }
        };
        let going: Vec<PathBuf> = before.into_iter().map(gone).collect();
        if going.is_empty() {
            return Leaving(None);
        }
        let remove = move || going.iter().for_each(|dir| drop(fs::remove_dir_all(dir)));
        // What no thread removes now goes with what else is not whole, before the next.
        Leaving(thread::Builder::new().name("checkpoint".into()).spawn(remove).ok())
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            let _ = thread.join();
        }
    }
}
