//! What a rank knows of its peers: where they and their workers are.

use super::defaults::{elements, segments};
use crate::bootstrap::host_name;
use crate::error::{Error, Result};
use crate::transport::neighbours::Home;

/// What each rank tells the others of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Card {
    pub(super) home: Home,
    /// The name of its host, for words.
    pub(super) host: String,
    /// Whether this rank's `UCX_TLS` leaves out every shared-memory transport.
    pub(super) network_only: bool,
    /// By which [length of elements](elements) it sends over shared memory; empty where it does not.
    pub(super) elements: String,
    /// By which [lengths of segments](segments) it sends and receives over TCP; empty where it does not.
    pub(super) segments: String,
    /// What its UCX may use, for words.
    pub(super) chosen: Chosen,
    /// The worker's address.
    pub(super) address: Vec<u8>,
}

/// By which variables a rank says what UCX may use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chosen {
    pub(super) tls: String,
    pub(super) devices: String,
}

impl Chosen {
    fn of(variable: impl Fn(&str) -> Option<String>) -> Self {
        let value = |name| variable(name).unwrap_or_else(|| "all".into());
        Chosen { tls: value("UCX_TLS"), devices: value("UCX_NET_DEVICES") }
    }
}

impl std::fmt::Display for Chosen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "UCX_TLS={} UCX_NET_DEVICES={}", self.tls, self.devices)
    }
}

const VERSION: u8 = 7;
/// How many texts there are.
const TEXTS: usize = 5;
/// Version, home, whether only the network is used, and how many bytes of each text follow.
const FIXED: usize = 1 + Home::BYTES + 1 + TEXTS;

impl Card {
    /// With UCX of this version.
    pub(super) fn of_this_process(version: (u32, u32), address: Vec<u8>) -> Self {
        let variable = |name: &str| std::env::var(name).ok();
        Card {
            home: Home::of_this_process(),
            host: host_name(),
            network_only: network_only(variable("UCX_TLS").as_deref()),
            elements: elements(variable).unwrap_or_default(),
            segments: segments(version, variable).unwrap_or_default(),
            chosen: Chosen::of(variable),
            address,
        }
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut out = vec![VERSION];
        out.extend(self.home.to_bytes());
        let texts: [&String; TEXTS] =
            [&self.host, &self.elements, &self.segments, &self.chosen.tls, &self.chosen.devices];
        let texts = texts.map(|said| &said.as_bytes()[..said.len().min(u8::MAX.into())]);
        out.push(self.network_only as u8);
        out.extend(texts.map(|said| said.len() as u8));
        out.extend(texts.concat());
        out.extend(&self.address);
        out
    }

    pub(super) fn from_bytes(peer: usize, bytes: &[u8]) -> Result<Self> {
        Self::read(bytes).ok_or_else(|| {
            Error::Launch(format!(
                "rank {peer} sent {} bytes as its UCX address, which is not what this version of caravan sends; \
                 all ranks must run the same program",
                bytes.len()
            ))
        })
    }

    fn read(bytes: &[u8]) -> Option<Self> {
        let (&[VERSION, ref home @ .., network_only, a, b, c, d, e], mut rest) =
            bytes.split_first_chunk::<FIXED>()?
        else {
            return None;
        };
        let mut text = |bytes: u8| {
            let (said, more) = rest.split_at_checked(bytes.into())?;
            rest = more;
            Some(String::from_utf8_lossy(said).into_owned())
        };
        let (host, elements, segments) = (text(a)?, text(b)?, text(c)?);
        let chosen = Chosen { tls: text(d)?, devices: text(e)? };
        let (home, network_only) = (Home::from_bytes(*home), network_only != 0);
        let address = rest.to_vec();
        (!address.is_empty()).then_some(Card {
            home,
            host,
            network_only,
            elements,
            segments,
            chosen,
            address,
        })
    }

    /// Fails where this card's rank and that of `other` have queues in shared memory of unlike elements, or would send each
    /// other unlike segments.
    pub(super) fn fits(&self, rank: usize, other: &Card, peer: usize) -> Result<()> {
        let both = !self.elements.is_empty() && !other.elements.is_empty();
        if self.home.host == other.home.host && both && self.elements != other.elements {
            let (mine, theirs) = (&self.elements, &other.elements);
            return Err(Error::Launch(format!(
                "rank {rank} sends over UCX's shared memory with {mine}, rank {peer} of the same host with {theirs}, and UCX \
                 would mix up their messages; set these variables alike for all ranks, or for none"
            )));
        }
        // UCX tells nobody of them: what is longer than expected is written past the end of what it is received into.
        let both = !self.segments.is_empty() && !other.segments.is_empty();
        if both && self.segments != other.segments {
            let (mine, theirs) = (&self.segments, &other.segments);
            return Err(Error::Launch(format!(
                "rank {rank} sends over UCX's TCP with {mine}, rank {peer} with {theirs}, and UCX does not make them fit; set \
                 UCX_TCP_TX_SEG_SIZE and UCX_TCP_RX_SEG_SIZE alike for all ranks"
            )));
        }
        Ok(())
    }
}

/// Whether `UCX_TLS` allows no shared memory. Such transports can report a dead peer, shared memory cannot.
fn network_only(tls: Option<&str>) -> bool {
    const SHARED: [&str; 9] = ["all", "shm", "sm", "mm", "posix", "sysv", "xpmem", "cma", "knem"];
    let Some(tls) = tls else { return false };
    let list = tls.trim();
    !list.is_empty()
        && !list.starts_with('^')
        && list.split(',').all(|t| !SHARED.contains(&t.trim().trim_start_matches('\\')))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cards_survive_the_wire() {
        let card = Card::of_this_process((1, 13), vec![1, 2, 3]);
        assert_eq!(Card::from_bytes(0, &card.to_bytes()).unwrap(), card);
        for bad in [&[][..], &[VERSION; FIXED], &[VERSION; FIXED + VERSION as usize], &[9; 40]] {
            let text = Card::from_bytes(3, bad).unwrap_err().to_string();
            assert!(text.contains("rank 3") && text.contains("same program"), "{text}");
        }
    }

    #[test]
    fn queues_of_one_host_are_alike() {
        let card = Card::of_this_process((1, 13), vec![1]);
        let with = |elements: &str| Card { elements: elements.into(), ..card.clone() };
        let (ours, other) = (with("UCX_MM_FIFO_ELEM_SIZE=640"), with("UCX_MM_FIFO_ELEM_SIZE=128"));
        ours.fits(0, &ours, 1).unwrap();
        ours.fits(0, &with(""), 1).unwrap();
        let elsewhere = Home { host: other.home.host ^ 1, ..other.home };
        ours.fits(0, &Card { home: elsewhere, ..other.clone() }, 1).unwrap();
        let text = ours.fits(0, &other, 1).unwrap_err().to_string();
        assert!(text.contains("SIZE=640, rank 1") && text.contains("SIZE=128"), "{text}");
    }

    #[test]
    fn segments_of_all_hosts_are_alike() {
        let card = Card::of_this_process((1, 13), vec![1]);
        let elsewhere = Home { host: card.home.host ^ 1, ..card.home };
        let with = |segments: &str| Card { segments: segments.into(), home: elsewhere, ..card.clone() };
        let ours = Card { segments: "RX=264K".into(), ..card.clone() };
        ours.fits(0, &with("RX=264K"), 1).unwrap();
        ours.fits(0, &with(""), 1).unwrap();
        let text = ours.fits(0, &with("RX=32K"), 1).unwrap_err().to_string();
        assert!(text.contains("RX=264K, rank 1") && text.contains("RX=32K"), "{text}");
    }

    #[test]
    fn lists_of_transports_are_read() {
        for (tls, only) in [
            (None, false),
            (Some("all"), false),
            (Some("tcp"), true),
            (Some("tcp,self"), true),
            (Some("rc,ud"), true),
            (Some("tcp,cma"), false),
            (Some("^posix"), false),
            (Some("sm, tcp"), false),
            (Some(""), false),
        ] {
            assert_eq!(network_only(tls), only, "{tls:?}");
        }
    }
}
