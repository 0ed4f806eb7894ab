//! Files of tokens: llm.c's format (256 little-endian int32 of header, then the tokens), or plain bytes.
//!
//! Tokens are read with positioned reads, not mapped: the same page cache serves all ranks of a machine, and a file
//! that shrinks meanwhile is an error instead of a SIGBUS.

use crate::error::{Error, Result};
use crate::regular::regular;
use crate::unfinished::NewFile;
use std::fs::{self, File};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const HEADER: usize = 256 * 4;
/// Tokens that one file holds at most: the count is an int32.
pub const MOST_TOKENS: u64 = i32::MAX as u64;
/// Bytes read and widened at once, on the stack.
const CHUNK: usize = 4096;

/// How wide a token of llm.c's format is; `U8` is text without a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenWidth {
    /// One byte a token, and no header.
    U8,
    /// Magic 20240520, version 1: GPT-2 and other vocabularies up to 65536.
    U16,
    /// Magic 20240801, version 7: Llama 3 and other large vocabularies.
    U32,
}

impl TokenWidth {
    /// The narrowest of llm.c's two that holds this vocabulary.
    pub fn for_vocab(vocab: usize) -> Self {
        if vocab <= 1 << 16 { TokenWidth::U16 } else { TokenWidth::U32 }
    }

    /// Tokens that it tells apart.
    pub(super) fn vocab(self) -> usize {
        1 << (8 * self.bytes())
    }

    fn bytes(self) -> usize {
        match self {
            TokenWidth::U8 => 1,
            TokenWidth::U16 => 2,
            TokenWidth::U32 => 4,
        }
    }

    fn header(self) -> usize {
        if self == TokenWidth::U8 { 0 } else { HEADER }
    }

    /// The header of llm.c's format for `count` tokens, for those who write elsewhere than to a path; nothing for `U8`.
    ///
    /// # Errors
    /// More tokens than the format can count.
    pub fn header_for(self, count: usize) -> Result<Vec<u8>> {
        if self == TokenWidth::U8 {
            return Ok(vec![]);
        }
        let count = i32::try_from(count).map_err(|_| {
            Error::config(format!(
                "{count} tokens are too many for one file of tokens: it holds {MOST_TOKENS}"
            ))
        })?;
        let (magic, version) = self.magic_and_version();
        let mut header: Vec<u8> = [magic, version, count].iter().flat_map(|x| x.to_le_bytes()).collect();
        header.resize(self.header(), 0);
        Ok(header)
    }

    fn magic_and_version(self) -> (i32, i32) {
        match self {
            TokenWidth::U8 => (0, 0),
            TokenWidth::U16 => (20_240_520, 1),
            TokenWidth::U32 => (20_240_801, 7),
        }
    }
}

/// What to say of what [`is_swapped`].
pub const OTHER_ORDER: &str = "a token file of the other byte order, big-endian, and the format is little-endian: write it \
     anew with its bytes swapped";

/// Whether this is the start of a file in llm.c's format as a machine of the other byte order writes it, which is no text even
/// where it happens to be UTF-8.
pub fn is_swapped(start: &[u8]) -> bool {
    start.first_chunk().is_some_and(|bytes| is_magic(i32::from_be_bytes(*bytes)))
}

fn is_magic(number: i32) -> bool {
    [TokenWidth::U16, TokenWidth::U32].iter().any(|w| w.magic_and_version().0 == number)
}

/// An open file of tokens. One that is replaced by another of its name stays what it was; one that is written to while
/// it is open changes.
#[derive(Debug)]
pub struct TokenFile {
    path: PathBuf,
    file: File,
    width: TokenWidth,
    len: usize,
}

impl TokenFile {
    /// Opens a file in llm.c's format.
    ///
    /// # Errors
    /// A magic or version of no such format, or a size other than the header's count asks for.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let (file, size) = regular(path)?;
        let problem = |text: String| Error::format(path, format!("not a file of tokens: {text}"));
        if size < HEADER as u64 {
            return Err(problem(format!("it has {size} bytes, and the header alone has {HEADER}")));
        }
        let mut header = [0u8; 12];
        file.read_exact_at(&mut header, 0).map_err(|e| Error::system("read", path, e))?;
        let field = |i: usize| header.as_chunks::<4>().0.get(i).map_or(0, |b| i32::from_le_bytes(*b));
        let (magic, version, count) = (field(0), field(1), field(2));
        let known = [TokenWidth::U16, TokenWidth::U32];
        if is_swapped(&header) {
            return Err(Error::format(path, OTHER_ORDER));
        }
        let Some(width) = known.into_iter().find(|w| w.magic_and_version().0 == magic) else {
            return Err(problem(format!(
                "its magic number is {magic}, and 20240520 (16-bit tokens) or 20240801 (32-bit) would fit"
            )));
        };
        if version != width.magic_and_version().1 {
            let wanted = width.magic_and_version().1;
            return Err(problem(format!("magic {magic} comes with version {wanted}, and it has {version}")));
        }
        let expected = u64::try_from(count).ok().map(|n| HEADER as u64 + n * width.bytes() as u64);
        if expected != Some(size) {
            let expected = expected.map_or("an impossible size".into(), |n| format!("{n} bytes"));
            return Err(problem(format!(
                "its header counts {count} tokens, so {expected}, and it has {size} bytes"
            )));
        }
        Ok(TokenFile { path: path.to_owned(), width, len: count as usize, file })
    }

    /// Opens any file as tokens of one byte each.
    ///
    /// # Errors
    /// The system's refusal, or no regular file.
    pub fn open_bytes(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let (file, size) = regular(path)?;
        Ok(TokenFile { path: path.to_owned(), width: TokenWidth::U8, len: size as usize, file })
    }

    /// Whether a file starts like llm.c's format, in whichever byte order, so that [`open`](Self::open) is the way to read it
    /// or to be told why not.
    ///
    /// # Errors
    /// The system's refusal, or no regular file.
    pub fn looks_like(path: impl AsRef<Path>) -> Result<bool> {
        let path = path.as_ref();
        let mut start = [0u8; 4];
        match regular(path)?.0.read_exact(&mut start) {
            Ok(()) => {}
            Err(e) if e.kind() == ErrorKind::UnexpectedEof => return Ok(false),
            Err(e) => return Err(Error::system("read", path, e)),
        }
        Ok(is_magic(i32::from_le_bytes(start)) || is_swapped(&start))
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How it stores tokens.
    pub fn width(&self) -> TokenWidth {
        self.width
    }

    /// Tokens.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no tokens.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Tokens `start..start + out.len()`, which are below `len`. Allocates nothing unless it fails.
    ///
    /// # Errors
    /// The system's refusal, or a file that became shorter since it was opened.
    pub fn read(&self, start: usize, out: &mut [u32]) -> Result<()> {
        let size = self.width.bytes();
        let mut bytes = [0u8; CHUNK];
        let mut offset = (self.width.header() + start * size) as u64;
        for part in out.chunks_mut(CHUNK / size) {
            let bytes = &mut bytes[..part.len() * size];
            self.file.read_exact_at(bytes, offset).map_err(|e| self.unreadable(e))?;
            offset += bytes.len() as u64;
            match self.width {
                TokenWidth::U8 => part.iter_mut().zip(bytes).for_each(|(t, b)| *t = u32::from(*b)),
                TokenWidth::U16 => {
                    let stored = bytes.as_chunks::<2>().0;
                    part.iter_mut().zip(stored).for_each(|(t, b)| *t = u32::from(u16::from_le_bytes(*b)));
                }
                TokenWidth::U32 => {
                    let stored = bytes.as_chunks::<4>().0;
                    part.iter_mut().zip(stored).for_each(|(t, b)| *t = u32::from_le_bytes(*b));
                }
            }
        }
        Ok(())
    }

    fn unreadable(&self, error: std::io::Error) -> Error {
        match error.kind() {
            ErrorKind::UnexpectedEof => Error::format(
                &self.path,
                format!(
                    "had {} tokens when it was opened and has fewer now: a file must not change during a run",
                    self.len
                ),
            ),
            _ => Error::system("read", &self.path, error),
        }
    }
}

/// Writes a file in llm.c's format, streaming; it appears under its name only when it is complete.
#[derive(Debug)]
pub struct TokenWriter {
    path: PathBuf,
    new: NewFile,
    width: TokenWidth,
    count: u64,
    /// Whether no token was refused.
    whole: bool,
    bytes: Vec<u8>,
}

impl TokenWriter {
    /// Starts the file `path`, which is replaced at the end if it exists.
    ///
    /// # Errors
    /// `width` is `U8`, or the system's refusal.
    pub fn create(path: impl AsRef<Path>, width: TokenWidth) -> Result<Self> {
        let mut path = path.as_ref().to_owned();
        if width == TokenWidth::U8 {
            return Err(Error::format(&path, "the format has 16-bit and 32-bit tokens, no 8-bit ones"));
        }
        match fs::metadata(&path) {
            // A link stays one: what it names is replaced.
            Ok(there) if there.is_file() => {
                path = fs::canonicalize(&path).map_err(|e| Error::system("resolve", &path, e))?;
            }
            Ok(_) => return Err(Error::format(&path, "no regular file: tokens are written to one")),
            Err(_) if path.file_name().is_none() => {
                return Err(Error::format(&path, "a directory: tokens are written to a file"));
            }
            Err(_) => {}
        }
        let mut new = NewFile::create(&path).map_err(|e| Error::system("create", &path, e))?;
        let written = new.file().write_all(&[0; HEADER]);
        let writer = TokenWriter { path, new, width, count: 0, whole: true, bytes: vec![] };
        written.map_err(|e| writer.refused(e))?;
        Ok(writer)
    }

    /// Appends tokens, all of them or none but where the system refuses some, after which the file cannot be finished.
    ///
    /// # Errors
    /// A token that the width does not hold, more tokens than the format can count, or the system's refusal.
    pub fn push(&mut self, tokens: &[u32]) -> Result<()> {
        if self.count + tokens.len() as u64 > MOST_TOKENS {
            let text = format!("the format holds at most {MOST_TOKENS} tokens: write several files");
            return Err(Error::format(&self.path, text));
        }
        let narrow = self.width == TokenWidth::U16;
        if let Some(large) = tokens.iter().find(|&&t| narrow && t > u32::from(u16::MAX)) {
            let text = format!("token {large} does not fit 16 bits: the 32-bit format would hold it");
            return Err(Error::format(&self.path, text));
        }
        for part in tokens.chunks(1 << 16) {
            self.bytes.clear();
            match narrow {
                true => self.bytes.extend(part.iter().flat_map(|&t| (t as u16).to_le_bytes())),
                false => self.bytes.extend(part.iter().flat_map(|t| t.to_le_bytes())),
            }
            self.whole = false;
            self.new.file().write_all(&self.bytes).map_err(|e| self.refused(e))?;
            (self.whole, self.count) = (true, self.count + part.len() as u64);
        }
        Ok(())
    }

    /// Whether no token came yet.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Writes the header, syncs, and gives the file its name; gives back the number of tokens.
    ///
    /// # Errors
    /// The system's refusal, now or of tokens before.
    pub fn finish(mut self) -> Result<u64> {
        self.seal()?;
        self.new.finish().map_err(|e| Error::system("create", &self.path, e))?;
        Ok(self.count)
    }

    /// Does all of that but for the name, as for several files before the first has its own.
    ///
    /// # Errors
    /// As there.
    pub fn seal(&mut self) -> Result<()> {
        self.bytes = vec![];
        if !self.whole {
            return Err(self.refused(std::io::Error::other("some were refused before")));
        }
        let header = self.width.header_for(self.count as usize)?;
        let file = self.new.file();
        let complete = file.seek(SeekFrom::Start(0)).and_then(|_| file.write_all(&header));
        let complete = complete.and_then(|()| file.seek(SeekFrom::End(0)));
        complete.and_then(|_| file.sync_all()).map_err(|e| self.refused(e))?;
        Ok(())
    }

    fn refused(&self, error: std::io::Error) -> Error {
        let after = if self.is_empty() { String::new() } else { format!(" (after {})", self.count) };
        Error::system(format!("write tokens{after} to"), &self.path, error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: &Path, width: TokenWidth, tokens: &[u32]) {
        let mut writer = TokenWriter::create(path, width).unwrap();
        tokens.chunks(7).for_each(|part| writer.push(part).unwrap());
        assert_eq!(writer.finish().unwrap(), tokens.len() as u64);
    }

    #[test]
    fn both_formats_are_read_back_and_have_llm_c_s_layout() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("t.bin");
        let tokens: Vec<u32> = (0..70_000u32).map(|i| i % 65_536).collect();
        for (width, magic, version, size) in
            [(TokenWidth::U16, 20240520, 1, 2), (TokenWidth::U32, 20240801, 7, 4)]
        {
            write(&path, width, &tokens);
            let bytes = fs::read(&path).unwrap();
            let header: Vec<i32> =
                bytes[..1024].as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect();
            assert_eq!(header[..3], [magic, version, 70_000]);
            assert!(header[3..].iter().all(|&x| x == 0));
            assert_eq!(bytes.len(), 1024 + 70_000 * size);
            assert_eq!(bytes[1024 + 258 * size..][..2], [2, 1]);
            assert!(TokenFile::looks_like(&path).unwrap());
            let file = TokenFile::open(&path).unwrap();
            let mut out = vec![0; 70_000];
            file.read(0, &mut out).unwrap();
            assert_eq!(out, tokens);
            file.read(69_999, &mut out[..1]).unwrap();
            assert_eq!(out[0], tokens[69_999]);
        }
        assert_eq!(TokenWidth::for_vocab(65_536), TokenWidth::U16);
        assert_eq!(TokenWidth::for_vocab(65_537), TokenWidth::U32);
        assert_eq!(fs::read_dir(home.path()).unwrap().count(), 1, "nothing temporary stays");
    }

    #[test]
    fn of_tokens_that_are_refused_none_are_written() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("t.bin");
        let mut writer = TokenWriter::create(&path, TokenWidth::U16).unwrap();
        let mut tokens = vec![7; 100_000];
        tokens[80_000] = 70_000;
        let refused = writer.push(&tokens).unwrap_err().to_string();
        assert!(refused.contains("token 70000 does not fit 16 bits"), "{refused}");
        writer.push(&[1, 2]).unwrap();
        assert_eq!(writer.finish().unwrap(), 2);
        assert_eq!(fs::read(&path).unwrap()[1024..], [1, 0, 2, 0]);
    }

    #[test]
    fn wrong_files_are_named() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("t.bin");
        write(&path, TokenWidth::U16, &[1, 2, 3]);
        let whole = fs::read(&path).unwrap();
        let with = |at: usize, value: i32| {
            let mut bytes = whole.clone();
            bytes[at * 4..at * 4 + 4].copy_from_slice(&value.to_le_bytes());
            bytes
        };
        let cases = [
            (whole[..whole.len() - 1].to_vec(), "3 tokens, so 1030 bytes, and it has 1029"),
            ([whole.clone(), vec![0]].concat(), "it has 1031"),
            (whole[..100].to_vec(), "it has 100 bytes"),
            (vec![], "it has 0 bytes"),
            (with(0, 7), "magic number is 7"),
            (with(1, 2), "version 1, and it has 2"),
            (with(2, -1), "an impossible size"),
            (with(2, i32::MAX), "2147483647 tokens"),
            (with(0, 20240801), "comes with version 7"),
        ];
        for (bytes, expected) in cases {
            fs::write(&path, bytes).unwrap();
            let text = TokenFile::open(&path).unwrap_err().to_string();
            assert!(text.contains(expected), "{text}");
        }
        for path in [home.path(), &home.path().join("none")] {
            assert!(TokenFile::open(path).is_err());
            assert!(TokenFile::open_bytes(path).is_err());
            assert!(TokenFile::looks_like(path).is_err());
        }
    }

    #[test]
    fn a_file_of_the_other_byte_order_is_said_to_be_one() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("t.bin");
        for (magic, version) in [(20240520i32, 1i32), (20240801, 7)] {
            let mut bytes = [magic, version, 2].map(i32::to_be_bytes).concat();
            bytes.resize(HEADER + 8, 0);
            fs::write(&path, bytes).unwrap();
            assert!(TokenFile::looks_like(&path).unwrap());
            let text = TokenFile::open(&path).unwrap_err().to_string();
            assert!(text.contains("t.bin: a token file of the other byte order"), "{text}");
        }
        assert!(!is_swapped(b"") && !is_swapped(&20240520i32.to_le_bytes()));
    }

    #[test]
    fn any_file_is_tokens_of_a_byte() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("t.txt");
        fs::write(&path, "aé").unwrap();
        assert!(!TokenFile::looks_like(&path).unwrap());
        let file = TokenFile::open_bytes(&path).unwrap();
        let mut out = [0; 3];
        file.read(0, &mut out).unwrap();
        assert_eq!((out, file.len()), ([97, 0xc3, 0xa9], 3));
        fs::write(home.path().join("empty"), "").unwrap();
        assert!(TokenFile::open_bytes(home.path().join("empty")).unwrap().is_empty());
    }

    #[test]
    fn a_file_that_shrinks_is_an_error_and_one_that_is_replaced_stays() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("t.bin");
        let mut out = [0; 3];
        write(&path, TokenWidth::U16, &[1, 2, 3]);
        let file = TokenFile::open(&path).unwrap();
        write(&path, TokenWidth::U16, &[4]);
        file.read(0, &mut out).unwrap();
        assert_eq!(out, [1, 2, 3]);
        let file = TokenFile::open(&path).unwrap();
        File::options().write(true).open(&path).unwrap().set_len(1025).unwrap();
        let text = file.read(0, &mut out[..1]).unwrap_err().to_string();
        assert!(text.contains("t.bin") && text.contains("had 1 tokens when it was opened"), "{text}");
    }

    #[test]
    fn an_unfinished_or_impossible_file_leaves_nothing() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("t.bin");
        fs::write(&path, "old").unwrap();
        let mut writer = TokenWriter::create(&path, TokenWidth::U16).unwrap();
        writer.push(&[1, 2]).unwrap();
        assert!(writer.push(&[65_536]).unwrap_err().to_string().contains("65536 does not fit 16 bits"));
        drop(writer);
        assert_eq!(fs::read_to_string(&path).unwrap(), "old");
        assert_eq!(fs::read_dir(home.path()).unwrap().count(), 1);
        assert!(TokenWriter::create(home.path(), TokenWidth::U16).is_err());
        assert!(TokenWriter::create(home.path().join("no/t.bin"), TokenWidth::U16).is_err());
        assert!(TokenWriter::create(&path, TokenWidth::U8).is_err());
    }

    #[test]
    fn links_and_devices_stay_what_they_are() {
        let home = tempfile::tempdir().unwrap();
        let (path, link, device) =
            (home.path().join("t.bin"), home.path().join("l.bin"), home.path().join("null"));
        fs::write(&path, "old").unwrap();
        std::os::unix::fs::symlink(&path, &link).unwrap();
        write(&link, TokenWidth::U16, &[1, 2, 3]);
        assert!(link.is_symlink() && TokenFile::open(&path).unwrap().len() == 3);
        std::os::unix::fs::symlink("/dev/null", &device).unwrap();
        let e = TokenWriter::create(&device, TokenWidth::U16).err().unwrap().to_string();
        assert!(e.contains("no regular file"), "{e}");
    }
}
