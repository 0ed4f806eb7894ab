//! Whether ranks may share a GPU: NCCL refuses it, unless told otherwise in its environment.

use crate::digest::digest;
use crate::error::{Error, Result};
use cuda_sys::nccl::{Nccl, SHARED_GPU};

/// What lets NCCL take several ranks on one GPU.
const PERMISSION: &str = "NCCL_MULTI_RANK_GPU_ENABLE";
/// What older versions tell hosts apart by.
const HOST: &str = "NCCL_HOSTID";

/// Variables of the environment with which NCCL of this version (see [`Survey`](super::super::Survey)) lets `rank` share
/// a GPU with other processes. They have to be set before NCCL is opened. `None` is a process that is no rank itself;
/// ranks that it starts inherit what it sets.
///
/// Newer versions have a switch, and few blocks a kernel leave room for the kernels of the other ranks. To older ones
/// every rank is a host of its own, and messages go over the loopback network: for trying things out only.
pub fn share_gpu(version: u32, rank: Option<usize>) -> Vec<(&'static str, String)> {
    if version >= SHARED_GPU {
        return vec![
            (PERMISSION, "1".into()),
            ("NCCL_MAX_CTAS", "4".into()),
            ("NCCL_NVLS_ENABLE", "0".into()),
        ];
    }
    let Some(rank) = rank else { return Vec::new() };
    vec![
        (HOST, format!("caravan-rank-{rank}")),
        ("NCCL_SOCKET_IFNAME", "lo".into()),
        ("NCCL_IB_DISABLE", "1".into()),
        ("NCCL_MAX_CTAS", "4".into()),
    ]
}

/// Why ranks can share GPUs on one host only, if NCCL of this version has no other way.
pub fn share_gpu_on_one_host(version: u32) -> Option<String> {
    let [here, needed] = [version, SHARED_GPU].map(Nccl::numbers);
    (version < SHARED_GPU).then(|| {
        format!(
            "NCCL {here} lets ranks share one only with messages over the loopback network of their host, and newer ones, from \
             {needed} on, by themselves"
        )
    })
}

/// What ranks tell each other before they meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Card {
    pub version: u32,
    pub gpu: [u8; 16],
    /// NCCL takes ranks on one GPU.
    permitted: bool,
    /// What NCCL is told this host is, if anything.
    host: u64,
}

pub(super) const WORDS: usize = 5;

impl Card {
    /// This rank's, by its environment.
    pub fn new(version: u32, gpu: [u8; 16]) -> Self {
        let value = |name| std::env::var(name).unwrap_or_default();
        Card::with(version, gpu, &value(PERMISSION), &value(HOST))
    }

    fn with(version: u32, gpu: [u8; 16], permission: &str, host: &str) -> Self {
        let permitted = version >= SHARED_GPU && !["", "0"].contains(&permission);
        Card { version, gpu, permitted, host: if host.is_empty() { 0 } else { digest(host.bytes()) } }
    }

    pub fn words(&self) -> [u64; WORDS] {
        let half = |at: usize| u64::from_le_bytes(self.gpu[at..at + 8].try_into().expect("eight bytes"));
        [u64::from(self.version), half(0), half(8), u64::from(self.permitted), self.host]
    }

    pub fn from_words(words: &[u64]) -> Self {
        let mut gpu = [0; 16];
        gpu[..8].copy_from_slice(&words[1].to_le_bytes());
        gpu[8..].copy_from_slice(&words[2].to_le_bytes());
        Card { version: words[0] as u32, gpu, permitted: words[3] != 0, host: words[4] }
    }
}

/// Whether the ranks with these cards can be one group; all of them come to the same result.
pub(super) fn check(cards: &[Card], job_rank: impl Fn(usize) -> usize) -> Result<()> {
    for (member, card) in cards.iter().enumerate() {
        let rank = job_rank(member);
        if card.version != cards[0].version {
            let [a, b] = [cards[0].version, card.version].map(Nccl::numbers);
            return Err(Error::Launch(format!(
                "rank {} has NCCL {a} and rank {rank} NCCL {b}: all ranks need the same version",
                job_rank(0)
            )));
        }
        for (other, earlier) in cards[..member].iter().enumerate() {
            let apart = card.host != earlier.host && card.host != 0 && earlier.host != 0;
            if card.gpu != earlier.gpu || card.permitted && earlier.permitted || apart {
                continue;
            }
            let version = Nccl::numbers(card.version);
            let permission = match card.version >= SHARED_GPU {
                true => format!("{PERMISSION}=1"),
                false => format!("another {HOST} for every rank (NCCL {version} knows no other way)"),
            };
            return Err(Error::Launch(format!(
                "ranks {} and {rank} have the same GPU, and NCCL {version} wants one for each: start as many ranks \
                 as there are GPUs, or, to try things out, let ranks share one with {permission} in the environment",
                job_rank(other)
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(cards: &[Card]) -> String {
        check(cards, |member| member).map_or_else(|e| e.to_string(), |()| "fine".into())
    }

    #[test]
    fn ranks_share_a_gpu_only_with_permission() {
        let [a, b] = [[1; 16], [2; 16]];
        let new = |gpu, permission: &str| Card::with(23100, gpu, permission, "");
        let old = |gpu, host: &str| Card::with(22700, gpu, "1", host);
        assert_eq!(said(&[new(a, ""), new(b, "")]), "fine");
        assert_eq!(said(&[new(a, "1"), new(a, "1")]), "fine");
        let text = said(&[new(b, ""), new(a, "0"), new(a, "1")]);
        assert!(text.contains("ranks 1 and 2") && text.contains("NCCL_MULTI_RANK_GPU_ENABLE=1"), "{text}");
        assert_eq!(said(&[old(a, "x"), old(a, "y")]), "fine");
        for host in ["", "x"] {
            let text = said(&[old(a, "x"), old(a, host)]);
            assert!(text.contains("ranks 0 and 1") && text.contains("NCCL_HOSTID"), "{text}");
        }
        let text = said(&[new(a, ""), old(b, "")]);
        assert!(text.contains("NCCL 2.31.0") && text.contains("rank 1 NCCL 2.27.0"), "{text}");
    }

    #[test]
    fn cards_survive_the_way() {
        let card = Card::with(23003, std::array::from_fn(|i| i as u8 * 17), "1", "here");
        assert_eq!(Card::from_words(&card.words()), card);
    }

    #[test]
    fn what_shares_a_gpu_depends_on_the_version() {
        let names =
            |version, rank| share_gpu(version, rank).into_iter().map(|(name, _)| name).collect::<Vec<_>>();
        for rank in [None, Some(3)] {
            assert!(names(23003, rank).contains(&PERMISSION) && !names(23003, rank).contains(&HOST));
        }
        assert!(names(23002, Some(3)).contains(&HOST));
        assert!(share_gpu(23002, Some(3))[0].1 != share_gpu(23002, Some(4))[0].1);
        // All ranks would inherit one name.
        assert!(names(23002, None).is_empty());
        assert_eq!(share_gpu_on_one_host(23003), None);
        assert!(share_gpu_on_one_host(22809).unwrap().contains("2.28.9"));
    }
}
