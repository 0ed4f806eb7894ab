//! What a rank knows of its peers: where they and their workers are.

use crate::error::{Error, Result};
use crate::transport::neighbours::Home;

/// What each rank tells the others of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Card {
    pub(super) home: Home,
    /// Whether this rank's `UCX_TLS` leaves out every shared-memory transport.
    pub(super) network_only: bool,
    /// The worker's address.
    pub(super) address: Vec<u8>,
}

const VERSION: u8 = 3;
const FIXED: usize = 1 + Home::BYTES + 1;

impl Card {
    pub(super) fn of_this_process(address: Vec<u8>) -> Self {
        Card {
            home: Home::of_this_process(),
            network_only: network_only(std::env::var("UCX_TLS").ok().as_deref()),
            address,
        }
    }

    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut out = vec![VERSION];
        out.extend(self.home.to_bytes());
        out.push(self.network_only as u8);
        out.extend(&self.address);
        out
    }

    pub(super) fn from_bytes(peer: usize, bytes: &[u8]) -> Result<Self> {
        if bytes.len() <= FIXED || bytes[0] != VERSION {
            return Err(Error::Launch(format!(
                "rank {peer} sent {} bytes as its UCX address, which is not what this version of caravan sends; \
                 all ranks must run the same program",
                bytes.len()
            )));
        }
        Ok(Card {
            home: Home::from_bytes(bytes[1..FIXED - 1].try_into().expect("a home's bytes")),
            network_only: bytes[FIXED - 1] != 0,
            address: bytes[FIXED..].to_vec(),
        })
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
        let card = Card::of_this_process(vec![1, 2, 3]);
        assert_eq!(Card::from_bytes(0, &card.to_bytes()).unwrap(), card);
        for bad in [&[][..], &[VERSION; FIXED], &[9; 40]] {
            let text = Card::from_bytes(3, bad).unwrap_err().to_string();
            assert!(text.contains("rank 3") && text.contains("same program"), "{text}");
        }
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
