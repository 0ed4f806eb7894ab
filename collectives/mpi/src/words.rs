//! What ranks say to each other beside the messages, as bytes.

use collectives::transport::blame;

/// Bytes of a word at most, and of what stands before its text.
pub(super) const LARGEST: usize = 1 << 10;
const HEADER: usize = 8 + 4 + 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    /// The sender leaves in order.
    Farewell = 0,
    /// The sender gives up; the text says why.
    Failure = 1,
    /// The sender has come to form a group.
    Meeting = 2,
    /// The sender asks for whom the other waits.
    Ask = 3,
    /// The sender, which was asked, waits for the rank in the text.
    Answer = 4,
}

impl Kind {
    const ALL: [Kind; 5] = [Kind::Farewell, Kind::Failure, Kind::Meeting, Kind::Ask, Kind::Answer];
}

/// Something a rank said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Word {
    /// Which group it is about.
    pub(super) group: u64,
    pub(super) kind: Kind,
    /// The sender's rank in that group.
    pub(super) from: usize,
    pub(super) text: String,
}

impl Word {
    pub(super) fn to_bytes(&self) -> Box<[u8]> {
        let text = blame::cut(&self.text, LARGEST - HEADER);
        let (group, from) = (self.group.to_le_bytes(), (self.from as u32).to_le_bytes());
        [&group[..], &from, &[self.kind as u8], text.as_bytes()].concat().into()
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Word> {
        let (group, rest) = bytes.split_first_chunk()?;
        let (from, rest) = rest.split_first_chunk()?;
        let (kind, text) = rest.split_first()?;
        let kind = Kind::ALL.into_iter().find(|k| *k as u8 == *kind)?;
        let (group, from) = (u64::from_le_bytes(*group), u32::from_le_bytes(*from) as usize);
        Some(Word { group, kind, from, text: String::from_utf8_lossy(text).into_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_survive_the_wire() {
        for (kind, text) in [(Kind::Farewell, ""), (Kind::Failure, "größe"), (Kind::Meeting, "x")] {
            let word = Word { group: 0xfedc_ba98_7654_3210, kind, from: 70_000, text: text.into() };
            assert_eq!(Word::from_bytes(&word.to_bytes()), Some(word));
        }
        // Cut between characters.
        let long = Word { group: 1, kind: Kind::Failure, from: 0, text: "é".repeat(5000) };
        let bytes = long.to_bytes();
        assert!(bytes.len() <= LARGEST);
        assert!(Word::from_bytes(&bytes).unwrap().text.chars().all(|c| c == 'é'));
        for bad in [&[][..], &[0; 12], &[9; 13]] {
            assert_eq!(Word::from_bytes(bad), None);
        }
    }
}
