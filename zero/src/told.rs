//! What one rank has to say, on all of them.

use crate::error::Result;
use collectives::Communicator;

/// The `words` of a rank, of which others hear the first 1024 bytes.
pub(crate) fn told_by(rank: usize, comm: &Communicator, words: &str) -> Result<String> {
    let mut room = [0u8; 1024];
    let cut = (0..=words.len().min(room.len())).rfind(|&at| words.is_char_boundary(at)).unwrap_or(0);
    room[..cut].copy_from_slice(&words.as_bytes()[..cut]);
    comm.broadcast(&mut room[..], rank)?;
    let end = room.iter().position(|&byte| byte == 0).unwrap_or(room.len());
    Ok(String::from_utf8_lossy(&room[..end]).into_owned())
}
