//! Writes a Hugging Face directory that transformers loads: streaming, and all or nothing.
//!
//! Files have no names until all are whole and synced to the disk; then they come together in `DIR.tmp-…` beside the
//! destination, which takes its place in one rename. Until then the destination is as it was, and whatever ends the
//! process before they come together leaves nothing; then, the temporary directory, until the next save. Where the file
//! system has no nameless files, that is there from the start ([`unfinished`](crate::unfinished)).

use super::config;
use super::layout::{Planned, encode, index, plan};
use super::load::{CONFIG, INDEX, SINGLE};
use super::names::{COMPANIONS, TEMPLATES, is_companion, is_shard};
use super::remarks::Remarks;
use super::staging::{Staging, is_movable};
use crate::config::LlamaConfig;
use crate::error::{Error, Result};
use crate::unfinished::is_mount_point;
use collectives::{DType, Float};
use rustix::fs::Access;
use rustix::process::geteuid;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

/// Elements converted and written at once.
const CHUNK: usize = 256 << 10;
/// Of a directory's mode: what is in it is moved and removed by its owner only, as in `/tmp`.
const STICKY: u32 = 0o1000;
/// Bytes of a directory's name: file systems take 255, and until it is whole it has an ending.
const LONGEST: usize = 220;

/// How a directory is written.
#[derive(Clone, Debug)]
pub struct SaveOptions {
    /// Weights above this many bytes go to several files with an index; 5 GB, as transformers long had it.
    pub file_limit: u64,
    /// What config.json says beside the shape, such as [`Checkpoint::remarks`](super::Checkpoint::remarks) of the model that
    /// was trained on.
    pub remarks: Remarks,
}

impl Default for SaveOptions {
    fn default() -> Self {
        SaveOptions { file_limit: 5_000_000_000, remarks: Remarks::default() }
    }
}

/// A directory in the making. Dropping it before [`finish`](Self::finish) removes all traces.
pub struct Writer {
    target: PathBuf,
    /// The file being written. Before `staging`, so that it is closed when the directory that it may be in is removed:
    /// over NFS what is open stays there under another name, and so would the directory.
    file: Option<File>,
    staging: Staging,
    dtype: DType,
    plan: Vec<Planned>,
    config: String,
    /// Bytes of all weights, and how many are written.
    total: u64,
    written: u64,
    /// The next place to write to: file, tensor, element.
    at: (usize, usize, usize),
    /// What is at the next place may not be what is to be there.
    broken: bool,
    bytes: Vec<u8>,
}

impl Writer {
    /// Starts the directory `target` for a model of this shape, its weights stored as `dtype` (f32, f16 or bf16).
    /// An existing model directory is replaced as a whole, at the end; any other existing thing is refused.
    ///
    /// # Errors
    /// Those of [`check_loadable`](super::check_loadable) and [`check_destination`], an unfit `dtype`, or the system's refusal to
    /// create files there.
    pub fn create(
        target: impl AsRef<Path>,
        config: &LlamaConfig,
        dtype: DType,
        options: &SaveOptions,
    ) -> Result<Self> {
        config::check_loadable(config)?;
        let total = config.parameters().saturating_mul(dtype.size() as u64);
        let target = check_destination(target.as_ref(), total)?;
        let plan = plan(&target, config, dtype, options.file_limit)?;
        Ok(Writer {
            file: None,
            staging: Staging::create(&target)?,
            target,
            dtype,
            plan,
            config: config::render(config, dtype, &options.remarks),
            total,
            written: 0,
            at: (0, 0, 0),
            broken: false,
            bytes: vec![],
        })
    }

    /// Writes the next `values` of the weight `name`, converted to the stored type. Weights come in the order of
    /// [`LlamaConfig::units`] and may come in pieces, row-major, so that no whole tensor need be held.
    ///
    /// # Errors
    /// Another weight is due, more values than it has, or the system's refusal, such as a full disk.
    pub fn add<T: Float>(&mut self, name: &str, values: &[T]) -> Result<()> {
        let (file, tensor, element) = self.at;
        let Some(planned) = self.plan.get(file) else {
            return Err(Error::format(&self.target, format!("{name} comes after the last weight")));
        };
        let (due, len) = &planned.tensors[tensor];
        if due != name || values.len() > len - element {
            return Err(Error::format(
                &self.target,
                format!(
                    "{} values of {name} were given, and {} of {due} are due",
                    values.len(),
                    len - element
                ),
            ));
        }
        if std::mem::replace(&mut self.broken, true) {
            return Err(Error::format(&self.target, format!("{name} comes after what could not be written")));
        }
        if self.file.is_none() {
            self.file = Some(self.start_file(file)?);
        }
        for part in values.chunks(CHUNK) {
            encode(self.dtype, part, &mut self.bytes);
            if let Some(out) = &mut self.file {
                out.write_all(&self.bytes).map_err(|e| self.refused(file, e))?;
            }
            self.written += self.bytes.len() as u64;
        }
        self.advance(values.len())?;
        self.broken = false;
        Ok(())
    }

    /// Adds a companion file, such as `tokenizer.json`, `generation_config.json` or one of the
    /// [`templates`](super::templates).
    ///
    /// # Errors
    /// Another name, or the system's refusal.
    pub fn add_file(&mut self, name: &str, content: &[u8]) -> Result<()> {
        check_companion(&self.target, name)?;
        self.staging.write(name, content)
    }

    /// Completes the directory and puts it in its place.
    ///
    /// # Errors
    /// A weight that never came whole, a destination that meanwhile holds something else, or the system's refusal.
    pub fn finish(mut self) -> Result<()> {
        if self.broken {
            return Err(Error::format(&self.target, "a part of the model could not be written"));
        }
        if let Some(planned) = self.plan.get(self.at.0) {
            let (due, len) = &planned.tensors[self.at.1];
            let text = format!("the weight {due} is not complete: {} of {len} elements came", self.at.2);
            return Err(Error::format(&self.target, text));
        }
        if self.plan.len() > 1 {
            self.staging.write(INDEX, index(&self.plan, self.total).as_bytes())?;
        }
        self.staging.write(CONFIG, self.config.as_bytes())?;
        self.staging.replace()
    }

    fn start_file(&mut self, index: usize) -> Result<File> {
        let planned = &self.plan[index];
        let mut file = self.staging.open(&planned.name)?;
        file.write_all(&planned.header).map_err(|e| self.refused(index, e))?;
        Ok(file)
    }

    fn advance(&mut self, elements: usize) -> Result<()> {
        let (file, mut tensor, mut element) = self.at;
        element += elements;
        let tensors = &self.plan[file].tensors;
        if element == tensors[tensor].1 {
            (tensor, element) = (tensor + 1, 0);
        }
        if tensor < tensors.len() {
            self.at = (file, tensor, element);
            return Ok(());
        }
        if let Some(done) = self.file.take() {
            let name = &self.plan[file].name;
            self.staging.keep(name, done).map_err(|e| self.refused(file, e))?;
        }
        self.at = (file + 1, 0, 0);
        Ok(())
    }

    fn refused(&self, file: usize, error: std::io::Error) -> Error {
        let (name, total, written) = (&self.plan[file].name, self.total, self.written);
        let what =
            format!("write {name} ({total} bytes of weights are needed in all, {written} were written) to");
        Error::system(what, &self.target, error)
    }
}

/// Whether a model of `bytes` bytes of weights can be written to `dir`: it can be created there or is a model
/// directory that can be replaced, the place is writable and has the room. Gives back the path with links
/// resolved, also those above what is not there yet. Called before a training run, it finds in time what would lose the
/// run's result.
///
/// # Errors
/// What is in the way, in one sentence.
pub fn check_destination(dir: &Path, bytes: u64) -> Result<PathBuf> {
    let target = resolve(dir)?;
    let (Some(name), Some(parent)) = (target.file_name(), target.parent()) else {
        return Err(Error::format(dir, "cannot be a model directory: give it a name of its own"));
    };
    if name.len() > LONGEST {
        let has = name.len();
        return Err(Error::format(dir, format!("its name has {has} bytes: {LONGEST} are possible")));
    }
    if is_mount_point(&target) {
        let text = "a file system is mounted there, so it cannot be replaced: name a directory inside";
        return Err(Error::format(dir, text));
    }
    // Links are resolved in both.
    if std::env::current_dir().is_ok_and(|here| here.starts_with(&target)) {
        let text = "this run is in it, and would be left in nothing when it is replaced: start from outside and name it";
        return Err(Error::format(dir, text));
    }
    check_replaceable(&target, parent)?;
    // Missing parents will be created below the first that exists.
    let Some(existing) = parent.ancestors().find(|p| p.exists()) else {
        return Err(Error::format(dir, "no part of this path exists"));
    };
    if !existing.is_dir() {
        return Err(Error::format(existing, format!("not a directory: {} cannot be in it", dir.display())));
    }
    rustix::fs::access(existing, Access::WRITE_OK | Access::EXEC_OK)
        .map_err(|e| Error::system("write a model into", existing, e))?;
    let disk =
        rustix::fs::statvfs(existing).map_err(|e| Error::system("look at the disk of", existing, e))?;
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    // One without a limit, as a tmpfs may be, has no blocks.
    if disk.f_blocks > 0 && free < bytes {
        let text = format!("the model's weights need {bytes} bytes, and its disk has {free} free");
        return Err(Error::format(dir, text));
    }
    Ok(target)
}

/// Where a directory is or will be: absolute, without links and without a slash at its end, which would put inside what is
/// written beside it. So what is compared with it cannot miss it for another way to the same place.
fn resolve(dir: &Path) -> Result<PathBuf> {
    let refused = |e| Error::system("resolve", dir, e);
    let absolute: PathBuf = std::path::absolute(dir).map_err(refused)?.components().collect();
    let mut existing = absolute.as_path();
    let mut there = loop {
        match (fs::canonicalize(existing), existing.parent()) {
            (Ok(there), _) => break there,
            (Err(e), Some(parent)) if e.kind() == ErrorKind::NotFound => {
                if existing.is_symlink() {
                    return Err(Error::format(
                        existing,
                        "a link to nothing: a model is saved to a directory",
                    ));
                }
                existing = parent;
            }
            (Err(e), _) => return Err(refused(e)),
        }
    };
    let made = absolute.components().skip(existing.components().count());
    if made.clone().any(|part| part == Component::ParentDir) {
        let text = "leads back out of a directory that is not there: name where it ends";
        return Err(Error::format(dir, text));
    }
    there.extend(made);
    Ok(there)
}

/// Whether a file of this name goes with the weights in the directory `dir`.
pub(super) fn check_companion(dir: &Path, name: &str) -> Result<()> {
    match is_companion(name) {
        true => Ok(()),
        false => {
            let known = COMPANIONS.join(", ");
            let text = format!("{name} does not belong into a model directory: known are {known}");
            Err(Error::format(dir, text))
        }
    }
}

/// Nothing, an empty directory, or a directory with nothing but a model, which this user may replace.
fn check_replaceable(target: &Path, parent: &Path) -> Result<()> {
    let there = match fs::metadata(target) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(Error::system("open", target, e)),
        Ok(m) if !m.is_dir() => {
            return Err(Error::format(
                target,
                "exists and is not a directory: a model is saved to a directory",
            ));
        }
        Ok(there) => there,
    };
    let around = fs::metadata(parent).map_err(|e| Error::system("open", parent, e))?;
    if !may_move(geteuid().as_raw(), &there, &around) {
        let text = format!(
            "belongs to another user, who alone may replace it in {}, which is sticky: name another directory",
            parent.display()
        );
        return Err(Error::format(target, text));
    }
    let names = names_below(target, "")?;
    let ours = |name: &str| [CONFIG, SINGLE, INDEX].contains(&name) || is_companion(name) || is_shard(name);
    if let Some(name) = names.iter().find(|name| !ours(name) || target.join(name).is_dir()) {
        let text =
            format!("exists and has {name}, which is no part of a model: name a new or a model directory");
        return Err(Error::format(target, text));
    }
    let Some(first) = names.iter().min() else { return Ok(()) };
    let has = |name: &str| names.iter().any(|there| there == name);
    // Any of these names alone may be that of something else.
    let lacks = match (has(CONFIG), has(SINGLE) || has(INDEX)) {
        (true, true) => None,
        (false, _) => Some(CONFIG),
        (true, false) => Some("model.safetensors or index of several"),
    };
    if let Some(lacks) = lacks {
        let text = format!(
            "exists and has {first} and no {lacks}, so it is no model: name a new, an empty or a model directory"
        );
        return Err(Error::format(target, text));
    }
    // What it had is removed once it is replaced.
    rustix::fs::access(target, Access::WRITE_OK | Access::EXEC_OK).map_err(|e| {
        Error::format(target, format!("this user may not remove what is in it ({e}): name another directory"))
    })?;
    if !is_movable(target) {
        let text = "is part of the image that this container was made of, and cannot be replaced: name a new directory";
        return Err(Error::format(target, text));
    }
    Ok(())
}

/// What a directory has, after `inside`, and for [`TEMPLATES`] what is in that.
fn names_below(dir: &Path, inside: &str) -> Result<Vec<String>> {
    let listed = |e| Error::system("list", dir, e);
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).map_err(listed)? {
        let entry = entry.map_err(listed)?;
        let name = format!("{inside}{}", entry.file_name().to_string_lossy());
        match name == TEMPLATES && entry.path().is_dir() {
            true => names.extend(names_below(&entry.path(), &format!("{TEMPLATES}/"))?),
            false => names.push(name),
        }
    }
    Ok(names)
}

/// Whether a user who may write to the directory `around` may give another name to what is `there` in it.
fn may_move(user: u32, there: &fs::Metadata, around: &fs::Metadata) -> bool {
    around.mode() & STICKY == 0 || user == 0 || [there, around].iter().any(|owned| owned.uid() == user)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Or else what is written again would come after what was written in part.
    #[test]
    fn nothing_is_added_to_what_could_not_be_written() {
        let home = tempfile::tempdir().unwrap();
        let target = home.path().join("m");
        let config = LlamaConfig::preset("nano").unwrap();
        let mut writer = Writer::create(&target, &config, DType::F32, &SaveOptions::default()).unwrap();
        writer.file = Some(File::options().write(true).open("/dev/full").unwrap());
        let units = config.units();
        let tensor = &units[0].tensors[0];
        let values = vec![1f32; tensor.len()];
        for words in ["No space left", "comes after what could not be written"] {
            let text = writer.add(&tensor.name, &values).unwrap_err().to_string();
            assert!(text.contains(words), "{text}");
        }
        let text = writer.finish().unwrap_err().to_string();
        assert!(text.contains("could not be written") && !target.exists(), "{text}");
    }
}
