//! A model directory whose weights, in f32, several write at once, each its own ranges.
//!
//! One [begins](Parts::begin) it: all files are there then, at their whole lengths and with all but weights. Each writes to
//! its [`Part`] what is its own, and tells what that was; of what all have told, the sums of whole files are [made](Parts::sums),
//! which are those of a directory that one has written. It has its name from the start: who begins it names it finished.

use super::config;
use super::layout::{Planned, encode, index, plan};
use super::load::{CONFIG, INDEX};
use super::names::is_template;
use super::save::{SaveOptions, check_companion, check_destination};
use super::sum::{Sum, Summing};
use crate::config::LlamaConfig;
use crate::error::{Error, Result};
use collectives::DType;
use rustix::fs::FallocateFlags;
use rustix::io::{Errno, retry_on_intr};
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Write;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Elements converted and written at once.
const CHUNK: usize = 256 << 10;
/// Bytes of an element.
const F32: u64 = DType::F32.size() as u64;

/// What all who write know of the directory.
#[derive(Clone)]
pub struct Parts(Arc<Known>);

struct Known {
    dir: PathBuf,
    files: Vec<Planned>,
    /// Of each weight its file, its first byte there, and its elements.
    places: HashMap<String, (usize, u64, usize)>,
    config: String,
    /// Bytes of all weights.
    total: u64,
}

/// Bytes of a file of weights that were written one after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Which file.
    file: usize,
    /// Its first byte there.
    at: u64,
    /// What was written.
    sum: Sum,
}

impl Piece {
    /// As numbers, for others.
    pub fn pack(self) -> [u64; 4] {
        [self.file as u64, self.at, self.sum.bytes, self.sum.crc32.into()]
    }

    /// What another has packed.
    pub fn unpack([file, at, bytes, crc32]: [u64; 4]) -> Self {
        Piece { file: file as usize, at, sum: Sum { bytes, crc32: crc32 as u32 } }
    }
}

impl Parts {
    /// Of the directory `dir`, for a model of this shape, which may be one that transformers refuses.
    ///
    /// # Errors
    /// A header that cannot be written.
    pub fn plan(dir: &Path, config: &LlamaConfig, options: &SaveOptions) -> Result<Self> {
        let files = plan(dir, config, DType::F32, options.file_limit)?;
        let mut places = HashMap::new();
        for (file, planned) in files.iter().enumerate() {
            let mut at = planned.header.len() as u64;
            for (name, elements) in &planned.tensors {
                places.insert(name.clone(), (file, at, *elements));
                at += *elements as u64 * F32;
            }
        }
        let total = config.parameters().saturating_mul(F32);
        let config = config::render(config, DType::F32, &options.remarks);
        Ok(Parts(Arc::new(Known { dir: dir.to_owned(), files, places, config, total })))
    }

    /// Makes the directory, with all but weights and with these `companions`, and tells of all files but those of weights. Those
    /// have their whole lengths, and where the file system can say so their room.
    ///
    /// # Errors
    /// Those of [`check_destination`]; something has its name, a companion that is none, or the system's refusal.
    pub fn begin(&self, companions: &[(String, Vec<u8>)]) -> Result<Vec<(String, Sum)>> {
        let Known { dir, files, config, total, .. } = &*self.0;
        check_destination(dir, *total)?;
        fs::create_dir(dir).map_err(|e| Error::system("create", dir, e))?;
        for planned in files {
            let name = dir.join(&planned.name);
            let made = File::create_new(&name).map_err(|e| Error::system("create", &name, e))?;
            let room = reserve(&made, planned.bytes()).and_then(|()| made.write_all_at(&planned.header, 0));
            room.and_then(|()| made.sync_all()).map_err(|e| self.refused(&planned.name, e))?;
        }
        let mut sums = Vec::new();
        for (name, content) in companions {
            check_companion(dir, name)?;
            sums.push(self.whole(name, content)?);
        }
        if files.len() > 1 {
            sums.push(self.whole(INDEX, index(files, *total).as_bytes())?);
        }
        sums.push(self.whole(CONFIG, config.as_bytes())?);
        Ok(sums)
    }

    /// Writes a file, and tells of it.
    fn whole(&self, name: &str, content: &[u8]) -> Result<(String, Sum)> {
        let place = self.0.dir.join(name);
        let refused = |e| Error::system(format!("write {name} ({} bytes) to", content.len()), &self.0.dir, e);
        if is_template(name) {
            fs::create_dir_all(crate::parent(&place)).map_err(refused)?;
        }
        let mut file = File::create_new(&place).map_err(refused)?;
        file.write_all(content).and_then(|()| file.sync_all()).map_err(refused)?;
        let mut summing = Summing::default();
        summing.add(content);
        Ok((name.to_owned(), summing.sum()))
    }

    /// To write to, once it is begun.
    pub fn part(&self) -> Part {
        Part { parts: self.clone(), file: None, under_way: None, pieces: vec![], bytes: vec![] }
    }

    /// The sums of all files of weights, of all pieces that all have told.
    ///
    /// # Errors
    /// Some bytes were written by nobody, or more than once.
    pub fn sums(&self, mut pieces: Vec<Piece>) -> Result<Vec<(String, Sum)>> {
        pieces.sort_by_key(|piece| (piece.file, piece.at));
        let mut pieces = pieces.into_iter().peekable();
        let of_file = |(file, planned): (usize, &Planned)| {
            let mut summing = Summing::default();
            summing.add(&planned.header);
            let follows = |piece: &Piece, end| (piece.file, piece.at) == (file, end);
            while let Some(piece) = pieces.next_if(|piece| follows(piece, summing.sum().bytes)) {
                summing.join(piece.sum);
            }
            let (sum, all) = (summing.sum(), planned.bytes());
            if sum.bytes != all || pieces.peek().is_some_and(|piece| piece.file == file) {
                let text = format!("of the {all} bytes of {} those from {} on", planned.name, sum.bytes);
                return Err(Error::format(&self.0.dir, format!("{text} were not written once each")));
            }
            Ok((planned.name.clone(), sum))
        };
        self.0.files.iter().enumerate().map(of_file).collect()
    }

    fn refused(&self, name: &str, error: std::io::Error) -> Error {
        let what = format!("write {name} ({} bytes of weights are needed in all) to", self.0.total);
        Error::system(what, &self.0.dir, error)
    }
}

/// What one writes of it.
pub struct Part {
    parts: Parts,
    /// The file that was written to last.
    file: Option<(usize, File)>,
    /// The piece that is being written: its file, where it begins, and what it has.
    under_way: Option<(usize, u64, Summing)>,
    pieces: Vec<Piece>,
    bytes: Vec<u8>,
}

impl Part {
    /// Writes a range of the elements of the weight `name`.
    ///
    /// # Errors
    /// No such weight, or fewer elements; the system's refusal, such as a full disk.
    pub fn write(&mut self, name: &str, range: Range<usize>, values: &[f32]) -> Result<()> {
        let parts = self.parts.clone();
        let place = parts.0.places.get(name).copied();
        let Some((file, first, _)) =
            place.filter(|(.., all)| range.end <= *all && range.len() == values.len())
        else {
            let text = format!("{} values for {range:?} of {name}, which is no such weight", values.len());
            return Err(Error::format(&parts.0.dir, text));
        };
        let mut at = first + range.start as u64 * F32;
        self.turn_to(file, at)?;
        for chunk in values.chunks(CHUNK) {
            encode(DType::F32, chunk, &mut self.bytes);
            let (Some((_, out)), Some((.., summing))) = (&self.file, &mut self.under_way) else { break };
            let written = out.write_all_at(&self.bytes, at);
            written.map_err(|e| parts.refused(&parts.0.files[file].name, e))?;
            summing.add(&self.bytes);
            at += self.bytes.len() as u64;
        }
        Ok(())
    }

    /// Has the file `file` open, and a piece under way that ends at `at`.
    fn turn_to(&mut self, file: usize, at: u64) -> Result<()> {
        let goes_on =
            |(of, start, summing): &(usize, u64, Summing)| (*of, start + summing.sum().bytes) == (file, at);
        if !self.under_way.as_ref().is_some_and(goes_on) {
            self.end_piece();
            self.under_way = Some((file, at, Summing::default()));
        }
        if self.file.as_ref().is_none_or(|(open, _)| *open != file) {
            self.close()?;
            let name = self.parts.0.dir.join(&self.parts.0.files[file].name);
            // To write only: what is read of a page, over NFS, would be written again with it.
            let open = File::options().write(true).open(&name);
            self.file = Some((file, open.map_err(|e| Error::system("open", &name, e))?));
        }
        Ok(())
    }

    fn end_piece(&mut self) {
        let piece = self.under_way.take().map(|(file, at, summing)| Piece { file, at, sum: summing.sum() });
        self.pieces.extend(piece.filter(|piece| piece.sum.bytes > 0));
    }

    /// Brings to the disk what was written to the last file.
    fn close(&mut self) -> Result<()> {
        let Some((file, open)) = self.file.take() else { return Ok(()) };
        open.sync_all().map_err(|e| self.parts.refused(&self.parts.0.files[file].name, e))
    }

    /// Brings all of it to the disk, and tells what was written.
    ///
    /// # Errors
    /// The system's refusal.
    pub fn finish(mut self) -> Result<Vec<Piece>> {
        self.end_piece();
        self.close()?;
        Ok(self.pieces)
    }
}

/// Gives a file its length, and its room where the file system can.
fn reserve(file: &File, bytes: u64) -> std::io::Result<()> {
    match retry_on_intr(|| rustix::fs::fallocate(file, FallocateFlags::empty(), 0, bytes)) {
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => file.set_len(bytes),
        reserved => Ok(reserved?),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Writer;
    use super::*;

    const COMPANION: [(&str, &str); 2] =
        [("tokenizer.json", "{}"), ("additional_chat_templates/tools.jinja", "too")];

    fn options() -> SaveOptions {
        // Several files.
        SaveOptions { file_limit: 20_000, ..SaveOptions::default() }
    }

    fn nano() -> LlamaConfig {
        LlamaConfig::preset("nano").unwrap()
    }

    /// An element of a tensor.
    fn value(tensor: usize, element: usize) -> f32 {
        (tensor as f32 + 1.0) / (element as f32 - 0.5)
    }

    /// A directory that so many have begun and written, each a range of every tensor, and what they have told.
    fn written(dir: &Path, writers: usize) -> (Parts, Vec<(String, Sum)>, Vec<Piece>) {
        let parts = Parts::plan(dir, &nano(), &options()).unwrap();
        let companions = COMPANION.map(|(name, content)| (name.to_owned(), content.as_bytes().to_vec()));
        let sums = parts.begin(&companions).unwrap();
        let mut pieces = Vec::new();
        for writer in 0..writers {
            let mut part = parts.part();
            for (tensor, spec) in nano().units().into_iter().flat_map(|unit| unit.tensors).enumerate() {
                let own = writer * spec.len() / writers..(writer + 1) * spec.len() / writers;
                // As it comes from a trainer, in several pieces.
                for start in own.clone().step_by(1000) {
                    let range = start..own.end.min(start + 1000);
                    let values: Vec<f32> = range.clone().map(|element| value(tensor, element)).collect();
                    part.write(&spec.name, range, &values).unwrap();
                }
            }
            pieces.extend(part.finish().unwrap());
        }
        (parts, sums, pieces)
    }

    fn files(dir: &Path) -> Vec<(String, Vec<u8>)> {
        let mut all = Vec::new();
        let mut dirs = vec![dir.to_owned()];
        while let Some(inside) = dirs.pop() {
            for entry in fs::read_dir(inside).unwrap() {
                let path = entry.unwrap().path();
                match path.is_dir() {
                    true => dirs.push(path),
                    false => {
                        let name = path.strip_prefix(dir).unwrap().to_string_lossy().into_owned();
                        all.push((name, fs::read(&path).unwrap()));
                    }
                }
            }
        }
        all.sort();
        all
    }

    #[test]
    fn what_several_write_is_what_one_writes_and_so_are_its_sums() {
        let home = tempfile::tempdir().unwrap();
        let alone = home.path().join("alone");
        let mut writer = Writer::create(&alone, &nano(), DType::F32, &options()).unwrap();
        COMPANION.iter().for_each(|(name, content)| writer.add_file(name, content.as_bytes()).unwrap());
        for (tensor, spec) in nano().units().into_iter().flat_map(|unit| unit.tensors).enumerate() {
            let values: Vec<f32> = (0..spec.len()).map(|element| value(tensor, element)).collect();
            writer.add(&spec.name, &values).unwrap();
        }
        writer.finish().unwrap();
        let sum = |name: &str| Sum::of_file(&alone.join(name)).unwrap();
        let expected: Vec<_> =
            files(&alone).into_iter().map(|(name, _)| (name.clone(), sum(&name))).collect();
        for writers in [1, 2, 7] {
            let dir = home.path().join(format!("by-{writers}"));
            let (parts, mut sums, pieces) = written(&dir, writers);
            let told = pieces.into_iter().map(|piece| Piece::unpack(piece.pack())).collect();
            sums.extend(parts.sums(told).unwrap());
            sums.sort_by(|one, other| one.0.cmp(&other.0));
            assert!(files(&dir) == files(&alone), "{writers}");
            assert_eq!(sums, expected, "{writers}");
        }
    }

    #[test]
    fn what_nobody_or_two_have_written_is_found_out() {
        let home = tempfile::tempdir().unwrap();
        let (parts, _, pieces) = written(&home.path().join("m"), 3);
        let told = |pieces: &[Piece]| parts.sums(pieces.to_vec()).unwrap_err().to_string();
        for gone in 0..pieces.len() {
            let mut others = pieces.clone();
            let piece = others.remove(gone);
            let said = told(&others);
            assert!(said.contains("were not written once each"), "{gone}: {said}");
            let said = told(&[&pieces[..], &[piece]].concat());
            assert!(said.contains("were not written once each"), "{gone}: {said}");
        }
    }

    #[test]
    fn nothing_is_written_that_is_no_weight_or_lies_beyond_one_and_a_directory_in_use_is_refused() {
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("m");
        let (parts, ..) = written(&dir, 1);
        let before = files(&dir);
        let first = &nano().units()[0].tensors[0];
        let mut part = parts.part();
        for (name, range, values) in
            [("none", 0..1, 1), (&*first.name, first.len()..first.len() + 1, 1), (&*first.name, 0..2, 1)]
        {
            let said = part.write(name, range, &vec![1.0; values]).unwrap_err().to_string();
            assert!(said.contains("which is no such weight"), "{said}");
        }
        assert_eq!(part.finish().unwrap(), []);
        assert!(files(&dir) == before);
        let said = parts.begin(&[]).unwrap_err().to_string();
        assert!(said.contains("File exists"), "{said}");
        let said = Parts::plan(&home.path().join("o"), &nano(), &options()).unwrap();
        let said = said.begin(&[("x".into(), vec![])]).unwrap_err().to_string();
        assert!(said.contains("x does not belong"), "{said}");
    }
}
