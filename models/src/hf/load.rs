//! Reads a Hugging Face directory: every header is checked on opening, weights are read by range.
//!
//! Weights are read with positioned reads, not mapped: the same page cache serves all ranks of a machine, and a
//! file that shrinks or a disk that fails meanwhile is an error instead of a SIGBUS.

use super::config;
use super::names::{COMPANIONS, TEMPLATES, is_template};
use super::remarks::Remarks;
use crate::config::LlamaConfig;
use crate::error::{Error, Result};
use crate::regular::{is_there, regular};
use crate::unit::TensorSpec;
use collectives::{DType, Float, bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::Metadata;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File};
use std::io::Read;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf};

pub(super) const CONFIG: &str = "config.json";
pub(super) const SINGLE: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";
/// The limit of the safetensors format.
const HEADER_LIMIT: u64 = 100_000_000;
/// Bytes read and converted at once: stays in the first-level cache's neighbourhood.
const CHUNK: usize = 64 << 10;
/// Bytes that are compared at once.
const RAW: usize = 1 << 20;
/// The head of a model that is not tied.
const HEAD: &str = "lm_head.weight";

/// An open Hugging Face directory whose weights are exactly those of its configuration.
///
/// It holds open files and no weights; [`read_range`](Self::read_range) may be called from many threads.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    config: LlamaConfig,
    remarks: Remarks,
    files: Vec<(PathBuf, File)>,
    tensors: HashMap<String, Stored>,
}

/// Where a tensor lies.
#[derive(Debug)]
struct Stored {
    /// What it is called in its file.
    name: String,
    file: usize,
    dtype: DType,
    shape: Vec<usize>,
    /// Of its first byte in the file.
    offset: u64,
}

impl Checkpoint {
    /// Opens a directory with `config.json` and either `model.safetensors` or the files that
    /// `model.safetensors.index.json` lists. Weights may be f32, f16 or bf16, each as it likes.
    ///
    /// A tied model's `lm_head.weight` may be absent, be the embedding again, or be there in its stead, and
    /// `rotary_emb.inv_freq` buffers of old checkpoints are ignored.
    ///
    /// # Errors
    /// A file that is missing, truncated or corrupt; a configuration with an unsupported feature; a weight that
    /// is missing, surplus, or of a wrong shape or type. Each is named.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        if !dir.is_dir() {
            return Err(Error::format(dir, "not a directory: a Hugging Face model directory is needed"));
        }
        let path = dir.join(CONFIG);
        if !is_there(&path) {
            let problem =
                "has no config.json: a Hugging Face model directory has one, with model.safetensors";
            return Err(Error::format(dir, problem));
        }
        let (config, remarks) = read_config(&path)?;
        let mut checkpoint =
            Checkpoint { dir: dir.to_owned(), config, remarks, files: vec![], tensors: HashMap::new() };
        if is_there(&dir.join(SINGLE)) {
            checkpoint.add_file(SINGLE)?;
        } else if is_there(&dir.join(INDEX)) {
            checkpoint.add_indexed()?;
        } else {
            return Err(Error::format(dir, without_weights(dir)));
        }
        checkpoint.check_weights()?;
        Ok(checkpoint)
    }

    /// The shape in config.json.
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The files that it is read from, as far as they are here.
    pub fn files(&self) -> Vec<PathBuf> {
        // Of those that cannot be listed none is written over either.
        let templates = templates(&self.dir).unwrap_or_default();
        let named = [CONFIG, INDEX].into_iter().chain(COMPANIONS).map(str::to_owned).chain(templates);
        let named = named.map(|name| self.dir.join(name));
        self.files.iter().map(|(path, _)| path.clone()).chain(named.filter(|path| path.exists())).collect()
    }

    /// What config.json says beside the shape.
    pub fn remarks(&self) -> &Remarks {
        &self.remarks
    }

    /// The files beside weights and config.json that belong to a model and are here, by name: what git-lfs left in the
    /// place of one is none.
    ///
    /// # Errors
    /// One that cannot be read, such as a link to nothing.
    pub fn companions(&self) -> Result<Vec<(String, Vec<u8>)>> {
        let names = COMPANIONS.into_iter().map(str::to_owned).chain(templates(&self.dir)?);
        let here = names.map(|name| (name.clone(), self.dir.join(name)));
        let read = |(name, path): (_, PathBuf)| {
            let mut content = Vec::new();
            let read = regular(&path)?.0.read_to_end(&mut content);
            read.map(|_| (name, content)).map_err(|e| Error::system("read", &path, e))
        };
        let found: Result<Vec<_>> = here.filter(|(_, path)| is_there(path)).map(read).collect();
        Ok(found?.into_iter().filter(|(_, content)| !content.starts_with(POINTER)).collect())
    }

    /// Reads elements `range` (row-major) of the weight `name` into `out`, converted to its type: widening is
    /// exact, narrowing rounds to nearest even.
    ///
    /// # Errors
    /// An unknown name, a range outside the tensor or of another length than `out`, or a read that fails.
    pub fn read_range<T: Float>(&self, name: &str, range: Range<usize>, out: &mut [T]) -> Result<()> {
        let problem = |text: String| Error::format(&self.dir, text);
        let stored = self.tensors.get(name).ok_or_else(|| problem(format!("has no weight {name}")))?;
        let len: usize = stored.shape.iter().product();
        if range.start > range.end || range.end > len || range.len() != out.len() {
            let place = out.len();
            let text =
                format!("elements {range:?} of {name}, which has {len}, do not fit a buffer of {place}");
            return Err(problem(text));
        }
        let (path, file) = &self.files[stored.file];
        let size = stored.dtype.size();
        let mut bytes = vec![0u8; CHUNK.min(out.len() * size)];
        let mut offset = stored.offset + (range.start * size) as u64;
        for part in out.chunks_mut(CHUNK / size) {
            let bytes = &mut bytes[..part.len() * size];
            file.read_exact_at(bytes, offset)
                .map_err(|e| Error::system(format!("read {} from", stored.name), path, e))?;
            decode(stored.dtype, bytes, part);
            offset += bytes.len() as u64;
        }
        Ok(())
    }

    /// Adds all files of the index, checking that each weight lies where the index says.
    fn add_indexed(&mut self) -> Result<()> {
        let path = self.dir.join(INDEX);
        let problem = |text: String| Error::format(&path, text);
        let index: Value = serde_json::from_str(&read_text(&path)?)
            .map_err(|e| problem(format!("not an index of safetensors files: {e}")))?;
        let map = index
            .get("weight_map")
            .and_then(Value::as_object)
            .ok_or_else(|| problem("not an index of safetensors files: it has no weight_map".into()))?;
        let mut places = BTreeMap::new();
        for (name, file) in map.iter().filter(|(name, _)| !is_buffer(name)) {
            let file = file.as_str().unwrap_or_default();
            // Only names inside the directory: an index must not reach elsewhere.
            let mut parts = Path::new(file).components();
            if !matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None)) {
                return Err(problem(format!(
                    "the weight {name} is not in a file of this directory: {file:?}"
                )));
            }
            places.insert(name.as_str(), file);
        }
        let files: BTreeSet<&str> = places.values().copied().collect();
        for file in files {
            if !is_there(&self.dir.join(file)) {
                return Err(problem(format!("it lists {file}, which is not there: fetch it as well")));
            }
            self.add_file(file)?;
        }
        for (name, file) in places {
            let found = self.tensors.get(name).map(|t| &self.files[t.file].0);
            if found != Some(&self.dir.join(file)) {
                return Err(problem(format!("the weight {name} should be in {file}, and is not")));
            }
        }
        Ok(())
    }

    /// Reads one file's header and adds its tensors.
    fn add_file(&mut self, name: &str) -> Result<()> {
        let path = self.dir.join(name);
        let (file, data, metadata) = read_header(&path)?;
        let index = self.files.len();
        for (name, info) in metadata.tensors() {
            if is_buffer(&name) {
                continue;
            }
            let dtype = match info.dtype {
                Dtype::F32 => DType::F32,
                Dtype::F16 => DType::F16,
                Dtype::BF16 => DType::Bf16,
                other => {
                    let text =
                        format!("the weight {name} is of type {other}: only F32, F16 and BF16 are read");
                    return Err(Error::format(&path, text));
                }
            };
            let offset = data + info.data_offsets.0 as u64;
            let stored = Stored { name: name.clone(), file: index, dtype, shape: info.shape.clone(), offset };
            if let Some(other) = self.tensors.insert(name.clone(), stored) {
                let text = format!("the weight {name} is also in {}", self.files[other.file].0.display());
                return Err(Error::format(&path, text));
            }
        }
        self.files.push((path, file));
        Ok(())
    }

    /// Every weight of the configuration is there in its shape, and no other.
    fn check_weights(&mut self) -> Result<()> {
        let units = self.config.units();
        let embedding = &units[0].tensors[0];
        // Who stores what two names share once keeps the first of them in the alphabet.
        if self.config.tied
            && !self.tensors.contains_key(&embedding.name)
            && let Some(stored) = self.tensors.remove(HEAD)
        {
            self.tensors.insert(embedding.name.clone(), stored);
        }
        let mut specs: HashMap<&str, &TensorSpec> =
            units.iter().flat_map(|u| &u.tensors).map(|t| (t.name.as_str(), t)).collect();
        let missing = specs.keys().filter(|name| !self.tensors.contains_key(**name));
        if let Some(names) = listed(missing.copied()) {
            return Err(Error::format(
                &self.dir,
                format!("config.json asks for weights that are missing: {names}"),
            ));
        }
        if self.config.tied {
            specs.insert(HEAD, embedding);
        }
        let surplus = self.tensors.keys().map(String::as_str).filter(|name| !specs.contains_key(name));
        if let Some(names) = listed(surplus) {
            let text = format!("there are weights that config.json does not ask for: {names}");
            return Err(Error::format(&self.dir, text));
        }
        let mut wrong: Vec<_> =
            self.tensors.iter().filter(|(name, stored)| stored.shape != specs[name.as_str()].shape).collect();
        wrong.sort_by_key(|(name, _)| name.as_str());
        if let Some((name, stored)) = wrong.first() {
            return Err(Error::format(
                &self.dir,
                format!(
                    "the weight {} has the shape {:?}: config.json asks for {:?}",
                    stored.name,
                    stored.shape,
                    specs[name.as_str()].shape
                ),
            ));
        }
        match self.config.tied && self.tensors.contains_key(HEAD) {
            true => self.check_head(embedding),
            false => Ok(()),
        }
    }

    /// A tied model has no head of its own: one that is stored all the same is the embedding.
    fn check_head(&self, embedding: &TensorSpec) -> Result<()> {
        let (head, own) = (&self.tensors[HEAD], &self.tensors[&embedding.name]);
        let same = match head.dtype == own.dtype {
            true => self.have_the_same_bytes(head, own)?,
            false => self.have_the_same_values(embedding)?,
        };
        if same {
            return Ok(());
        }
        let text = format!(
            "config.json ties the head to {}, and {HEAD} is another: set tie_word_embeddings to false, or remove {HEAD}",
            embedding.name
        );
        Err(Error::format(&self.dir, text))
    }

    /// Whether two weights of one type and length are one: every rank asks, so nothing is converted for it.
    fn have_the_same_bytes(&self, a: &Stored, b: &Stored) -> Result<bool> {
        let bytes = a.shape.iter().product::<usize>() * a.dtype.size();
        let mut parts = [vec![0u8; RAW], vec![0u8; RAW]];
        for start in (0..bytes).step_by(RAW) {
            let here = RAW.min(bytes - start);
            for (part, stored) in parts.iter_mut().zip([a, b]) {
                let (path, file) = &self.files[stored.file];
                file.read_exact_at(&mut part[..here], stored.offset + start as u64)
                    .map_err(|e| Error::system(format!("read {} from", stored.name), path, e))?;
            }
            if parts[0][..here] != parts[1][..here] {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The same of types that differ.
    fn have_the_same_values(&self, embedding: &TensorSpec) -> Result<bool> {
        let mut parts = [vec![0f32; CHUNK], vec![0f32; CHUNK]];
        for start in (0..embedding.len()).step_by(CHUNK) {
            let range = start..embedding.len().min(start + CHUNK);
            for (part, name) in parts.iter_mut().zip([HEAD, &embedding.name]) {
                part.truncate(range.len());
                self.read_range(name, range.clone(), part)?;
            }
            if parts[0].iter().zip(&parts[1]).any(|(a, b)| a.to_bits() != b.to_bits()) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// The shape that a config.json describes, and what else it says of a model.
///
/// # Errors
/// A file that cannot be read, is no configuration, or asks for something that is not supported; each is named.
pub fn read_config(path: &Path) -> Result<(LlamaConfig, Remarks)> {
    config::parse(path, &read_text(path)?)
}

/// Whether a directory has weights of the kind that is read.
pub fn has_weights(dir: &Path) -> bool {
    [SINGLE, INDEX].iter().any(|name| is_there(&dir.join(name)))
}

/// The chat templates of a model directory beside `chat_template.jinja`, each as `additional_chat_templates/NAME.jinja`.
///
/// # Errors
/// A directory of them that cannot be read.
pub fn templates(dir: &Path) -> Result<Vec<String>> {
    let place = dir.join(TEMPLATES);
    if !place.is_dir() {
        return Ok(vec![]);
    }
    let name = |entry: fs::DirEntry| Some(format!("{TEMPLATES}/{}", entry.file_name().to_str()?));
    let entries = fs::read_dir(&place).and_then(|entries| entries.collect::<std::io::Result<Vec<_>>>());
    let entries = entries.map_err(|e| Error::system("list", &place, e))?;
    let is_one = |name: &String| is_template(name) && dir.join(name).is_file();
    let mut found: Vec<String> = entries.into_iter().filter_map(name).filter(is_one).collect();
    found.sort();
    Ok(found)
}

/// Whether old checkpoints have it, in their files and in their index, and no model needs it: it follows from the
/// configuration.
fn is_buffer(name: &str) -> bool {
    name.ends_with("rotary_emb.inv_freq")
}

/// What to say of a directory without weights that are read.
fn without_weights(dir: &Path) -> &'static str {
    let others = ["bin", "pt", "pth", "gguf", "h5", "msgpack"];
    let other = |path: PathBuf| path.extension().is_some_and(|e| others.iter().any(|o| e == *o));
    match std::fs::read_dir(dir).into_iter().flatten().flatten().any(|entry| other(entry.path())) {
        true => {
            "has neither model.safetensors nor model.safetensors.index.json: other formats are not read, \
             save_pretrained(…, safe_serialization=True) writes these"
        }
        false => {
            "has a config.json and no weights: model.safetensors, or model.safetensors.index.json and the files that \
             it lists, have to be downloaded to it too"
        }
    }
}

/// The first few of `names` in order, and how many more there are; none when there are none.
fn listed<'a>(names: impl Iterator<Item = &'a str>) -> Option<String> {
    let names: BTreeSet<&str> = names.collect();
    let shown: Vec<&str> = names.iter().take(3).copied().collect();
    match names.len() {
        0 => None,
        n if n > 3 => Some(format!("{} and {} more", shown.join(", "), n - 3)),
        _ => Some(shown.join(", ")),
    }
}

fn read_text(path: &Path) -> Result<String> {
    let mut text = String::new();
    let (mut file, _) = regular(path)?;
    file.read_to_string(&mut text).map_err(|e| Error::system("read", path, e))?;
    match text.as_bytes().starts_with(POINTER) {
        true => Err(Error::format(path, LEFT_BY_LFS)),
        false => Ok(text),
    }
}

/// Whether a file that belongs to a model is here itself.
///
/// # Errors
/// A pointer that git-lfs left in its place, or the system's refusal to read it.
pub fn check_fetched(path: impl AsRef<Path>) -> Result<()> {
    let path = path.as_ref();
    let mut start = Vec::with_capacity(POINTER.len());
    let read = regular(path)?.0.take(POINTER.len() as u64).read_to_end(&mut start);
    read.map_err(|e| Error::system("read", path, e))?;
    if start == POINTER { Err(Error::format(path, LEFT_BY_LFS)) } else { Ok(()) }
}

/// How what git-lfs leaves in the place of a file begins.
const POINTER: &[u8] = b"version https://git-lfs.github.com/spec/v1";
const LEFT_BY_LFS: &str =
    "a pointer that git-lfs left in the place of the file: 'git lfs pull' in its directory fetches it";

/// The file, where its data begins, and its checked header.
fn read_header(path: &Path) -> Result<(File, u64, Metadata)> {
    let problem = |text: String| Error::format(path, format!("not a whole safetensors file: {text}"));
    let (file, len) = regular(path)?;
    if len < 8 {
        return Err(problem(format!("it has only {len} bytes")));
    }
    let read = |bytes: &mut [u8], offset| {
        file.read_exact_at(bytes, offset).map_err(|e| Error::system("read the header of", path, e))
    };
    let mut length = [0u8; 8];
    read(&mut length, 0)?;
    // No safetensors file has a header of so many bytes.
    if POINTER.starts_with(&length) {
        return Err(Error::format(path, LEFT_BY_LFS));
    }
    let length = u64::from_le_bytes(length);
    if length > HEADER_LIMIT || length > len - 8 {
        return Err(problem(format!("it has {len} bytes and announces a header of {length}")));
    }
    let mut header = vec![0u8; length as usize];
    read(&mut header, 8)?;
    let metadata: Metadata =
        serde_json::from_slice(&header).map_err(|e| problem(format!("its header is wrong: {e}")))?;
    let data = 8 + length;
    let described = data.saturating_add(metadata.data_len() as u64);
    if described != len {
        return Err(problem(format!("it has {len} bytes and its header describes {described}")));
    }
    Ok((file, data, metadata))
}

/// Little-endian `bytes` of type `dtype` as `out.len()` elements.
fn decode<T: Float>(dtype: DType, bytes: &[u8], out: &mut [T]) {
    fn each<T: Float, const N: usize>(bytes: &[u8], out: &mut [T], widen: impl Fn([u8; N]) -> f32) {
        for (value, bytes) in out.iter_mut().zip(bytes.as_chunks::<N>().0) {
            *value = T::from_f32(widen(*bytes));
        }
    }
    match dtype {
        DType::F16 => each(bytes, out, |b| Float::to_f32(f16::from_le_bytes(b))),
        DType::Bf16 => each(bytes, out, |b| Float::to_f32(bf16::from_le_bytes(b))),
        _ => each(bytes, out, f32::from_le_bytes),
    }
}
