//! Machine code kept on disk, by what it depends on: sources, macros, options, architecture, and the compiler's version, which
//! does not tell the updates of one minor version apart.

use super::compile::{Compiler, Machine, options};
use super::source::Module;
use crate::digest::digest;
use crate::error::Result;
use std::io::Write;
use std::path::{Path, PathBuf};

/// What a file starts with; another version of the format has another one.
const MAGIC: &[u8; 8] = b"caravan1";

/// A folder of compiled kernels. Files are written whole or not at all, so that ranks may share it; one that is
/// damaged is compiled again.
#[derive(Clone, Debug)]
pub struct Cache {
    /// `None`: nothing is kept.
    folder: Option<PathBuf>,
}

impl Cache {
    /// The user's: `$CARAVAN_CACHE`, `$XDG_CACHE_HOME/caravan/kernels` or `~/.cache/caravan/kernels`. Without any of
    /// these nothing is kept.
    pub fn of_user() -> Self {
        let variable = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let folder = variable("CARAVAN_CACHE")
            .or_else(|| variable("XDG_CACHE_HOME").map(|p| p.join("caravan/kernels")))
            .or_else(|| variable("HOME").map(|p| p.join(".cache/caravan/kernels")));
        Cache { folder }
    }

    /// One in a given folder, which need not exist yet.
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Cache { folder: Some(folder.into()) }
    }

    /// Where it is.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// The module's machine code: from the folder, or compiled now and kept. That it cannot be kept (a full or
    /// read-only disk) costs the next run time, and is no error.
    ///
    /// # Errors
    /// It has to be compiled and cannot be.
    pub fn load(&self, compiler: &Compiler, module: &Module, machine: Machine) -> Result<Vec<u8>> {
        let key = key(module, machine, compiler.version());
        let path =
            self.folder.as_ref().map(|folder| folder.join(format!("{:016x}{:016x}.cubin", key[0], key[1])));
        if let Some(code) = path.as_deref().and_then(|path| read(path, key)) {
            return Ok(code);
        }
        let (code, _) = compiler.compile(module, machine)?;
        if let Some(path) = path {
            let _ = write(&path, key, &code);
        }
        Ok(code)
    }
}

/// Two 64-bit hashes of what the machine code depends on.
fn key(module: &Module, machine: Machine, compiler: (u32, u32)) -> [u64; 2] {
    let mut all: Vec<u8> = Vec::new();
    let mut add = |text: &str| {
        all.extend(text.len().to_le_bytes());
        all.extend(text.as_bytes());
    };
    add(module.source.name);
    add(module.source.text);
    module.source.headers.iter().for_each(|h| {
        add(h.name);
        add(h.text);
    });
    module.macros().iter().for_each(|m| add(m));
    options(machine).iter().for_each(|o| add(o));
    add(&format!("{}.{}", compiler.0, compiler.1));
    [0, 1].map(|variant: u8| digest(std::iter::once(variant).chain(all.iter().copied())))
}

/// The code of a file that is whole and made for this key.
fn read(path: &Path, key: [u64; 2]) -> Option<Vec<u8>> {
    let mut bytes = std::fs::read(path).ok()?;
    let header = bytes.get(..32)?;
    let number = |i: usize| u64::from_le_bytes(header[i..i + 8].try_into().expect("8 bytes"));
    if header[..8] != *MAGIC || [number(8), number(16)] != key {
        return None;
    }
    let sum = number(24);
    let code = bytes.split_off(32);
    (!code.is_empty() && digest(code.iter().copied()) == sum).then_some(code)
}

fn write(path: &Path, key: [u64; 2], code: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().expect("a file in a folder");
    std::fs::create_dir_all(folder)?;
    let unfinished = folder.join(format!("{:016x}.{}.unfinished", key[0], who()));
    let written = std::fs::File::create(&unfinished).and_then(|mut file| {
        file.write_all(MAGIC)?;
        let sum = digest(code.iter().copied());
        [key[0], key[1], sum].iter().try_for_each(|n| file.write_all(&n.to_le_bytes()))?;
        file.write_all(code)?;
        file.sync_all()?;
        std::fs::rename(&unfinished, path)
    });
    if written.is_err() {
        let _ = std::fs::remove_file(&unfinished);
    }
    written
}

/// What tells apart those who write one file at once: processes, and threads of one.
pub(super) fn who() -> String {
    let thread = format!("{:?}", std::thread::current().id());
    let number: String = thread.chars().filter(char::is_ascii_digit).collect();
    format!("{}-{number}", std::process::id())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::source::{Header, Source};
    use crate::element::DType;

    #[test]
    fn what_is_written_is_read_and_damage_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("deep/er/code.cubin");
        let key = [1, u64::MAX];
        assert_eq!(read(&path, key), None);
        write(&path, key, b"machine code").unwrap();
        assert_eq!(read(&path, key).as_deref(), Some(&b"machine code"[..]));
        assert_eq!(read(&path, [1, 2]), None, "made for another key");
        let whole = std::fs::read(&path).unwrap();
        for cut in 0..whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            assert_eq!(read(&path, key), None, "cut to {cut} bytes");
        }
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            std::fs::write(&path, &damaged).unwrap();
            assert_eq!(read(&path, key), None, "damaged at {at}");
        }
        let left: Vec<_> = std::fs::read_dir(path.parent().unwrap()).unwrap().collect();
        assert_eq!(left.len(), 1, "nothing unfinished stays");
    }

    #[test]
    fn keys_differ_with_everything_that_matters() {
        let (module, sm90) = (Module::reduce(DType::F32), Machine { capability: 90 });
        let first = key(&module, sm90, (12, 9));
        assert_eq!(key(&module, sm90, (12, 9)), first);
        assert_ne!(key(&Module::reduce(DType::Bf16), sm90, (12, 9)), first);
        assert_ne!(key(&Module { head: 64, ..module }, sm90, (12, 9)), first);
        assert_ne!(key(&module, Machine { capability: 80 }, (12, 9)), first);
        assert_ne!(key(&module, sm90, (13, 0)), first);
    }

    #[test]
    fn one_byte_of_a_source_or_a_header_makes_another_key() {
        let (module, sm90) = (Module::reduce(DType::F32), Machine { capability: 90 });
        let first = key(&module, sm90, (12, 9));
        let changed = |text: &'static str, at: usize| -> &'static str {
            let mut bytes = text.as_bytes().to_vec();
            bytes[at] ^= 1;
            String::from_utf8(bytes).expect("sources are ASCII").leak()
        };
        let of =
            |source: Source| key(&Module { source: Box::leak(Box::new(source)), ..module }, sm90, (12, 9));
        let source = || Source { ..*module.source };
        assert_eq!(of(source()), first);
        for at in [0, source().text.len() / 2, source().text.len() - 1] {
            assert_ne!(of(Source { text: changed(source().text, at), ..source() }), first, "byte {at}");
        }
        assert!(!source().headers.is_empty());
        for odd in 0..source().headers.len() {
            let with = |i: usize, h: &Header| match i == odd {
                true => Header { text: changed(h.text, h.text.len() / 2), ..*h },
                false => Header { ..*h },
            };
            let headers: Vec<Header> = source().headers.iter().enumerate().map(|(i, h)| with(i, h)).collect();
            assert_ne!(of(Source { headers: headers.leak(), ..source() }), first, "header {odd}");
        }
    }
}
