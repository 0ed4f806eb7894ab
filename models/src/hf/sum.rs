//! What tells later whether a file is still as it was written.

use crate::error::{Error, Result};
use crate::regular::regular;
use crc32fast::Hasher;
use std::io::Read;
use std::path::Path;

/// Bytes read at once.
const CHUNK: usize = 1 << 20;

/// The length of a file, and the CRC-32 of its bytes, as gzip and zlib have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sum {
    /// How many bytes.
    pub bytes: u64,
    /// Of all of them.
    pub crc32: u32,
}

impl Sum {
    /// Of a file as it is now.
    ///
    /// # Errors
    /// The system's refusal, or no regular file.
    pub fn of_file(path: &Path) -> Result<Sum> {
        let (mut file, _) = regular(path)?;
        let (mut summing, mut piece) = (Summing::default(), vec![0; CHUNK]);
        loop {
            match file.read(&mut piece) {
                Ok(0) => return Ok(summing.sum()),
                Ok(n) => summing.add(&piece[..n]),
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => return Err(Error::system("read", path, e)),
            }
        }
    }
}

/// The same of bytes that come one after another.
#[derive(Clone, Debug, Default)]
pub(super) struct Summing {
    bytes: u64,
    hasher: Hasher,
}

impl Summing {
    pub(super) fn add(&mut self, bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        self.hasher.update(bytes);
    }

    /// Adds what follows, of which only the sum is known.
    pub(super) fn join(&mut self, next: Sum) {
        self.bytes += next.bytes;
        self.hasher.combine(&Hasher::new_with_initial_len(next.crc32, next.bytes));
    }

    pub(super) fn sum(&self) -> Sum {
        Sum { bytes: self.bytes, crc32: self.hasher.clone().finalize() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The check value of CRC-32/ISO-HDLC, and pieces of every length.
    #[test]
    fn sums_are_those_of_zlib_however_bytes_come() {
        let mut summing = Summing::default();
        summing.add(b"1234");
        summing.add(b"");
        summing.add(b"56789");
        let known = Sum { bytes: 9, crc32: 0xcbf4_3926 };
        assert_eq!(summing.sum(), known);
        let [mut joined, mut rest] = [Summing::default(), Summing::default()];
        joined.add(b"12");
        rest.add(b"3456789");
        joined.join(Summing::default().sum());
        joined.join(rest.sum());
        assert_eq!(joined.sum(), known);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), b"123456789").unwrap();
        assert_eq!(Sum::of_file(file.path()).unwrap(), known);
        std::fs::write(file.path(), vec![7; CHUNK + 5]).unwrap();
        let mut summing = Summing::default();
        (0..CHUNK + 5).for_each(|_| summing.add(&[7]));
        assert_eq!(Sum::of_file(file.path()).unwrap(), summing.sum());
    }
}
