//! What lies between ranks: one transport for all of them, or one inside nodes and another between, with emulated
//! links if asked for.

use crate::args::RankArgs;
use crate::failure::{Failure, Result};
use crate::human::{quoted, several};
use crate::transports::{self, Transport};
use collectives::schedule::Tuning;
use collectives::transport::emulated::{Emulated, Link};
use collectives::transport::hierarchical::Hierarchical;
use collectives::transport::{self, Expected, Nodes, PerNode, shm};

/// What was asked for beside the transport that reaches every rank.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Layers {
    /// Inside nodes, where that is another.
    pub inside: Option<Transport>,
    /// Ranks of a node, where not the hosts decide.
    pub per_node: Option<PerNode>,
    /// Emulated, between nodes or between all ranks.
    pub link: Option<Link>,
}

impl Layers {
    /// Checks what goes over `transport` between `world` ranks; also gives the name of the transport between nodes.
    ///
    /// # Errors
    /// Transports that do not go together, nodes that nothing asks about or that there cannot be, a link that cannot be
    /// read or has nothing between its ends.
    pub fn plan<'a>(transport: &'a str, args: &RankArgs, world: usize) -> Result<(Self, &'a str)> {
        let (inside, between) = match transport.split_once('+') {
            None => (None, transport),
            Some(("shm", between @ ("shm" | "ucx" | "mpi"))) => (Some(Transport::Shm), between),
            Some(("threads", "threads")) => (Some(Transport::Threads), "threads"),
            Some(_) => {
                return Err(Failure::usage(format!(
                    "--transport {transport}: inside nodes and between them there are shm+ucx and shm+mpi, and to try \
                     out nodes on one host shm+shm and threads+threads"
                )));
            }
        };
        let nccl = transports::nccl_prefix(transports::beside_nccl(&args.transport).is_some());
        let emulated = |text: &String| {
            text.parse().map_err(|e| Failure::usage(format!("--emulate-link {}: {e}", quoted(text))))
        };
        let link: Option<Link> = args.emulate_link.as_ref().map(emulated).transpose()?;
        let by_hand = |text: &String| {
            text.parse().map_err(|e| {
                Failure::usage(format!(
                    "--ranks-per-node {text}: {e}; it is like 4, or 4:cyclic for ranks dealt in turn"
                ))
            })
        };
        let mut per_node: Option<PerNode> = args.ranks_per_node.as_ref().map(by_hand).transpose()?;
        if let (Some(given), None, None) = (per_node, inside, link) {
            let what = match between {
                "auto" => "--transport auto takes nodes from hosts".to_owned(),
                _ => format!("transport {between} makes no difference between nodes"),
            };
            // Which NCCL's messages go past.
            let link = if nccl.is_empty() { ", or add --emulate-link" } else { "" };
            return Err(Failure::usage(format!(
                "--ranks-per-node {given} says which ranks share a node, and {what}: take --transport {nccl}shm+ucx or \
                 {nccl}shm+mpi, or on one host {nccl}shm+shm or {nccl}threads+threads{link}"
            )));
        }
        if link.is_some_and(|link| link.inside.is_some()) && per_node.is_none() {
            return Err(Failure::usage(
                "--emulate-link has a link inside nodes, but every rank is a node: give --ranks-per-node",
            ));
        }
        if let Some(given) = per_node {
            possible(given, world, link.is_some())?;
        }
        // What is asked for is a link between ranks: hosts would leave none between those of one.
        if link.is_some() && inside.is_some() {
            per_node = per_node.or(Some(PerNode::Block(1)));
        }
        Ok((Layers { inside, per_node, link }, between))
    }

    /// What the transport as a whole is called, in output and in tuning tables: `shm`, `shm+ucx`, `shm+ucx/8` with
    /// nodes by hand, `ucx@latency=20us,bandwidth=1.25GB/s` with a link.
    pub fn label(&self, between: Transport) -> String {
        let inside = self.inside.map_or(String::new(), |inside| format!("{}+", inside.name()));
        let per_node = self.per_node.map_or(String::new(), |k| format!("/{k}"));
        let link = self.link.map_or(String::new(), |link| format!("@{link}"));
        format!("{inside}{}{per_node}{link}", between.name())
    }

    /// Whether hosts say which ranks share a node, which is known once ranks have met.
    pub fn found(&self) -> bool {
        self.inside.is_some() && self.per_node.is_none()
    }

    /// The flags that lead here again.
    pub fn flags(&self, between: Transport) -> String {
        let inside = self.inside.map_or(String::new(), |inside| format!("{}+", inside.name()));
        let per_node = self.per_node.map_or(String::new(), |k| format!(" --ranks-per-node {k}"));
        let link = self.link.map_or(String::new(), |link| format!(" --emulate-link {link}"));
        format!("--transport {inside}{}{per_node}{link}", between.name())
    }

    /// What is known of costs before anything is measured.
    pub fn tuning(&self, ranks: usize) -> Tuning {
        let plain = Tuning::default();
        self.link.map_or(plain, |l| plain.for_link(ranks, l.between.latency, l.between.bandwidth))
    }

    /// What schedules will go by between `world` ranks that have not met; None where hosts are to say who shares a node.
    ///
    /// # Errors
    /// Nodes that there cannot be.
    pub fn expected(&self, between: Transport, world: usize) -> Result<Option<Expected>> {
        if self.found() {
            return Ok(None);
        }
        let nodes = match (self.per_node, self.link) {
            (Some(given), _) => Some(Nodes::by_hand(world, given)?),
            (None, Some(_)) => Some(Nodes::apart(world)),
            (None, None) => None,
        };
        let (between, inside) = (between.medium(), self.inside.map(Transport::medium));
        Ok(Some(Expected { between, inside, nodes, link: self.link.is_some() }))
    }

    /// Bytes in which each of `world` ranks keeps what ranks of a host, of which `here` are on it, see of each other.
    pub fn control_bytes(&self, between: Transport, world: usize, here: usize) -> usize {
        let of = |transport, ranks| if transport == Transport::Shm { shm::control_bytes(ranks) } else { 0 };
        let by_hand = self.per_node.map_or(here, |(PerNode::Block(most) | PerNode::Cyclic(most))| most);
        of(between, world) + self.inside.map_or(0, |inside| of(inside, by_hand.min(here)))
    }

    /// Puts the layers over `outer`, which reaches every rank. `nodes` finds out who shares a node, and `inner` joins
    /// the ranks of one; both are asked only where that matters.
    ///
    /// # Errors
    /// Theirs.
    pub fn over(
        &self,
        label: &str,
        mut outer: Box<dyn transport::Transport>,
        nodes: impl FnOnce(&mut dyn transport::Transport) -> collectives::Result<Nodes>,
        inner: impl FnOnce(
            &mut dyn transport::Transport,
            &Nodes,
        ) -> collectives::Result<Option<Box<dyn transport::Transport>>>,
    ) -> Result<Box<dyn transport::Transport>> {
        let world = outer.size();
        if self.inside.is_none() {
            let Some(link) = self.link else { return Ok(outer) };
            let nodes = self.per_node.map_or(Ok(Nodes::apart(world)), |k| Nodes::by_hand(world, k))?;
            return Ok(Box::new(Emulated::new(label, outer, link, nodes)?));
        }
        let made = nodes(&mut *outer).and_then(|nodes| Ok((inner(&mut *outer, &nodes)?, nodes)));
        let (mut inner, nodes) = made.inspect_err(|error| {
            // Or else ranks of other nodes would take this one's end for an orderly one.
            outer.abort(error);
        })?;
        if let Some(link) = self.link {
            outer = Box::new(Emulated::new(label, outer, link, Nodes::apart(world))?);
            if let Some(hop) = link.inside {
                let link = Link { between: hop, hops: 1, inside: None };
                inner = match inner {
                    None => None,
                    Some(plain) => {
                        let apart = Nodes::apart(plain.size());
                        Some(Box::new(Emulated::new(label, plain, link, apart)?))
                    }
                };
            }
        }
        Ok(Box::new(Hierarchical::new(label, inner, outer, nodes)?))
    }
}

/// Whether `world` ranks can have nodes of so many, and whether something is between those if a link is.
fn possible(given: PerNode, world: usize, link: bool) -> Result<()> {
    let (PerNode::Block(each) | PerNode::Cyclic(each)) = given;
    let ranks = several(world, "rank");
    if each > world {
        return Err(Failure::usage(format!(
            "--ranks-per-node {given}: with {ranks} in all, a node has from 1 to {world}"
        )));
    }
    if link && world > 1 && each == world {
        return Err(Failure::usage(format!(
            "--ranks-per-node {given} puts all {ranks} on one node, and --emulate-link is between nodes: take a number \
             below {world}"
        )));
    }
    Ok(())
}

/// The transport between nodes, out of a label or what `--transport` says.
pub fn between(label: &str) -> &str {
    let name = label.split(['/', '@']).next().unwrap_or_default();
    name.rsplit('+').next().unwrap_or_default()
}

/// Whether ranks over the transport of this label are threads of one process.
pub fn in_one_process(label: &str) -> bool {
    between(label) == Transport::Threads.name()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::tests::train;

    fn plan(flags: &str) -> Result<(Layers, String)> {
        let args = train(flags);
        let (transport, world) = (args.ranks.transport.clone(), args.ranks.ranks.unwrap_or(8));
        Layers::plan(&transport, &args.ranks, world).map(|(layers, between)| (layers, between.to_owned()))
    }

    #[test]
    fn shared_memory_is_of_as_many_ranks_as_a_node_by_hand_has() {
        let bytes = |flags: &str| {
            let (layers, between) = plan(&format!("--ranks 1024 {flags}")).unwrap();
            layers.control_bytes(Transport::named(&between).unwrap().unwrap(), 1024, 1024)
        };
        let (of_all, of_four) = (shm::control_bytes(1024), shm::control_bytes(4));
        assert_eq!(bytes("--transport shm"), of_all);
        assert_eq!(bytes("--transport ucx"), 0);
        assert_eq!(bytes("--transport shm+shm --ranks-per-node 4"), of_all + of_four);
        assert_eq!(bytes("--transport shm+ucx --ranks-per-node 4:cyclic"), of_four);
        assert_eq!(bytes("--transport shm+ucx"), of_all);
    }

    #[test]
    fn labels_tell_layers_apart_and_flags_lead_back() {
        let link = "latency=20us,bandwidth=1.25GB/s";
        for (flags, label) in [
            ("--transport shm", "shm".to_owned()),
            ("--transport shm+ucx", "shm+ucx".into()),
            ("--transport shm+ucx --ranks-per-node 4", "shm+ucx/4".into()),
            ("--transport shm+ucx --ranks-per-node 4:cyclic", "shm+ucx/4:cyclic".into()),
            (&format!("--transport ucx --emulate-link {link}"), format!("ucx@{link}")),
            (
                &format!("--transport shm --ranks-per-node 2 --emulate-link {link},inside-latency=1us"),
                format!("shm/2@{link},inside-latency=1us"),
            ),
        ] {
            let (layers, between) = plan(flags).expect(flags);
            let transport = match between.as_str() {
                "ucx" => Transport::Ucx,
                _ => Transport::Shm,
            };
            assert_eq!(layers.label(transport), label);
            assert_eq!(layers.flags(transport), flags);
            assert_eq!(super::between(&label), between);
        }
    }

    #[test]
    fn a_rank_that_cannot_join_its_node_says_so_to_all() {
        let layers = Layers { inside: Some(Transport::Threads), ..Layers::default() };
        let mut ranks = transport::threads::group(2);
        let mut other = ranks.pop().unwrap();
        let rank = Box::new(ranks.pop().unwrap());
        let inner = |_: &mut dyn transport::Transport, _: &Nodes| {
            Err(collectives::Error::PeerLost { rank: 0, peer: 5, how: "had no shared memory".into() })
        };
        let failed = layers.over("threads+threads", rank, |_| Ok(Nodes::apart(2)), inner).err().unwrap();
        assert!(failed.to_string().starts_with("rank 5 had no shared memory"), "{failed}");
        // Whose it is, and not who has noticed.
        let heard = transport::Transport::check(&mut other).unwrap_err().to_string();
        assert!(heard.starts_with("rank 5 had no shared memory"), "{heard}");
    }

    #[test]
    fn behind_a_link_every_rank_is_a_node_unless_told_otherwise() {
        let label = |flags: &str| plan(flags).expect(flags).0.label(Transport::Shm);
        let link = "--emulate-link latency=1us";
        assert_eq!(label(&format!("--transport shm+shm {link}")), "shm+shm/1@latency=1us");
        assert_eq!(label(&format!("--transport shm+shm --ranks-per-node 4 {link}")), "shm+shm/4@latency=1us");
        assert_eq!(label("--transport shm+shm"), "shm+shm");
        assert_eq!(label("--transport shm+shm --ranks-per-node 8"), "shm+shm/8");
    }

    #[test]
    fn what_does_not_go_together_is_refused_with_what_would() {
        for (flags, words) in [
            ("--transport ucx+shm", &["ucx+shm", "shm+ucx"][..]),
            ("--transport shm+pigeon", &["shm+pigeon", "shm+mpi"]),
            ("--transport shm --ranks-per-node 2", &["--ranks-per-node 2", "--emulate-link"]),
            ("--transport shm+ucx --ranks-per-node 0", &["--ranks-per-node 0", "at least 1"]),
            ("--transport shm+ucx --ranks-per-node 2:plane", &["2:plane", "block", "4:cyclic"]),
            ("--emulate-link latency=fast", &["--emulate-link latency=fast", "'fast' is not like 20us"]),
            ("--emulate-link latency=1us,inside-latency=1us", &["inside nodes", "--ranks-per-node"]),
            (
                "--transport shm+shm --emulate-link latency=1us,inside-latency=1us",
                &["inside nodes", "--ranks-per-node"],
            ),
            (
                "--ranks 4 --transport shm+shm --ranks-per-node 9",
                &["--ranks-per-node 9", "4 ranks", "from 1 to 4"],
            ),
            (
                "--ranks 4 --transport shm+shm --ranks-per-node 4:cyclic --emulate-link latency=1us",
                &["--ranks-per-node 4:cyclic", "all 4 ranks on one node", "below 4"],
            ),
            (
                "--ranks 2 --transport shm --ranks-per-node 2 --emulate-link latency=1us",
                &["--ranks-per-node 2", "all 2 ranks on one node", "below 2"],
            ),
        ] {
            let e = plan(flags).expect_err(flags);
            assert!(e.code() == 2 && words.iter().all(|w| e.to_string().contains(w)), "{flags}: {e}");
        }
    }
}
