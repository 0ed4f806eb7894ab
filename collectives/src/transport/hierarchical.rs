//! Two transports as one: what is fastest inside a node, and a network between nodes.
//!
//! Each message goes over the inner transport if its peer shares this rank's node and over the outer one otherwise,
//! so every algorithm works unchanged; those that treat nodes as units ask for
//! [`nodes`](Transport::nodes). Which ranks share a node is told by their rendezvous, or by hand
//! ([`Nodes::by_hand`]). Where all ranks share one node, peers' memory is read as the inner transport reads it.

use super::{Direct, LISTED, Nodes, Request, Tag, Transport, Waits};
use crate::buffer::Memory;
use crate::error::{Error, Result};
use std::time::Duration;

/// Where a message went, with the request there.
#[derive(Clone)]
enum Way {
    Free,
    Inner(Request),
    Outer(Request),
    /// Found complete, or impossible, while another one was asked for.
    Ended(Result<()>),
}

/// An inner transport among the ranks of one node and an outer one among all.
pub struct Hierarchical {
    name: String,
    /// None where this rank is alone on its node.
    inner: Option<Box<dyn Transport>>,
    outer: Box<dyn Transport>,
    nodes: Nodes,
    /// The rank in `inner` of each rank of the group that shares this node.
    local: Vec<Option<usize>>,
    ways: Vec<Way>,
    free: Vec<u32>,
    /// The place in `ways` of the request that was last looked at on behalf of one of the other transport.
    turn: usize,
}

impl Hierarchical {
    /// `outer` reaches all ranks; `inner` those of this rank's node, in their order, and may be missing where this rank
    /// is alone there. `name` is what users call the two together, the same on every rank.
    ///
    /// # Errors
    /// [`Error::Launch`] where the sizes contradict `nodes`, or the transports call a rank of the job differently.
    pub fn new(
        name: &str,
        inner: Option<Box<dyn Transport>>,
        outer: Box<dyn Transport>,
        nodes: Nodes,
    ) -> Result<Self> {
        let rank = outer.rank();
        if nodes.world() != outer.size() {
            let (known, joined) = (nodes.world(), outer.size());
            return Err(Error::Launch(format!(
                "the nodes of {known} ranks are known, but transport {} joins {joined}",
                outer.name()
            )));
        }
        let sharing = nodes.with(rank);
        let (place, joined) = inner.as_ref().map_or((0, 1), |t| (t.rank(), t.size()));
        if joined != sharing.len() || sharing[place] != rank {
            return Err(Error::Launch(format!(
                "ranks {sharing:?} share the node of rank {rank}, but the transport inside the node joins {joined}, \
                 with this rank as number {place}"
            )));
        }
        // Errors of either are passed on as they are.
        if let Some(inner) = &inner
            && let Some(at) = (0..joined).find(|&at| inner.job_rank(at) != outer.job_rank(sharing[at]))
        {
            let (one, other) = (inner.job_rank(at), outer.job_rank(sharing[at]));
            return Err(Error::Launch(format!("rank {one} inside a node is rank {other} between nodes")));
        }
        let local = (0..nodes.world()).map(|r| sharing.iter().position(|&s| s == r)).collect();
        let (ways, free) = (Vec::with_capacity(LISTED), Vec::with_capacity(LISTED));
        Ok(Hierarchical { name: name.into(), inner, outer, nodes, local, ways, free, turn: 0 })
    }

    /// The inner transport and the peer's rank in it, if that is the way to `peer`.
    fn inside(&mut self, peer: usize) -> Option<(&mut Box<dyn Transport>, usize)> {
        match (&mut self.inner, self.local.get(peer)) {
            (Some(inner), Some(&Some(local))) => Some((inner, local)),
            _ => None,
        }
    }

    fn note(&mut self, way: Way) -> Request {
        let index = self.free.pop().unwrap_or_else(|| {
            self.ways.push(Way::Free);
            self.ways.len() as u32 - 1
        });
        self.ways[index as usize] = way;
        Request(u64::from(index))
    }

    fn look(&mut self, way: &Way) -> Result<bool> {
        match (way, &mut self.inner) {
            (Way::Inner(request), Some(inner)) => {
                let request = *request;
                inner.test(request)
            }
            (Way::Outer(request), _) => self.outer.test(*request),
            (Way::Ended(Err(error)), _) => Err(error.clone()),
            _ => Ok(true),
        }
    }

    /// Moves the transport forward that `waiting` does not use: peers may wait for what this rank has posted there.
    fn move_other(&mut self, waiting: &Way) {
        let inner = matches!(waiting, Way::Outer(_));
        let other = |way: &Way| match way {
            Way::Inner(_) => inner,
            Way::Outer(_) => !inner,
            _ => false,
        };
        let count = self.ways.len();
        let found = (1..=count).map(|i| (self.turn + i) % count).find(|&i| other(&self.ways[i]));
        let Some(index) = found else { return };
        self.turn = index;
        let way = self.ways[index].clone();
        match self.look(&way) {
            Ok(false) => {}
            done => self.ways[index] = Way::Ended(done.map(drop)),
        }
    }
}

// SAFETY: as both transports inside keep the contract, to one of which each message goes.
unsafe impl Transport for Hierarchical {
    fn name(&self) -> &str {
        &self.name
    }

    fn rank(&self) -> usize {
        self.outer.rank()
    }

    fn size(&self) -> usize {
        self.outer.size()
    }

    fn nodes(&self) -> Option<&Nodes> {
        Some(&self.nodes)
    }

    fn job_rank(&self, member: usize) -> usize {
        self.outer.job_rank(member)
    }

    fn host(&mut self, job_rank: usize) -> Option<String> {
        self.outer.host(job_rank)
    }

    fn frame(&self) -> usize {
        self.outer.frame()
    }

    fn most_tag(&self) -> u32 {
        self.inner.as_ref().map_or(u32::MAX, |inner| inner.most_tag()).min(self.outer.most_tag())
    }

    fn window(&self) -> u64 {
        self.inner.as_ref().map_or(u64::MAX, |inner| inner.window()).min(self.outer.window())
    }

    fn alloc(&mut self, bytes: usize) -> Result<Memory> {
        match &mut self.inner {
            Some(inner) => inner.alloc(bytes),
            None => self.outer.alloc(bytes),
        }
    }

    fn leave_behind(&mut self, memory: Memory) -> Option<Memory> {
        match &mut self.inner {
            Some(inner) => inner.leave_behind(memory),
            None => self.outer.leave_behind(memory),
        }
    }

    unsafe fn send(&mut self, to: usize, tag: Tag, src: *const u8, bytes: usize) -> Result<Request> {
        // SAFETY: the caller's promise, both times.
        let way = unsafe {
            match self.inside(to) {
                Some((inner, to)) => Way::Inner(inner.send(to, tag, src, bytes)?),
                None => Way::Outer(self.outer.send(to, tag, src, bytes)?),
            }
        };
        Ok(self.note(way))
    }

    unsafe fn recv(&mut self, from: usize, tag: Tag, dst: *mut u8, bytes: usize) -> Result<Request> {
        // SAFETY: the caller's promise, both times.
        let way = unsafe {
            match self.inside(from) {
                Some((inner, from)) => Way::Inner(inner.recv(from, tag, dst, bytes)?),
                None => Way::Outer(self.outer.recv(from, tag, dst, bytes)?),
            }
        };
        Ok(self.note(way))
    }

    fn test(&mut self, request: Request) -> Result<bool> {
        let index = request.0 as usize;
        let Some(way) = self.ways.get(index).cloned() else { return Ok(true) };
        if matches!(way, Way::Free) {
            return Ok(true);
        }
        let done = self.look(&way);
        if let Ok(false) = done {
            self.move_other(&way);
            return Ok(false);
        }
        self.ways[index] = Way::Free;
        self.free.push(index as u32);
        if self.free.len() == self.ways.len() {
            // Or each look would go through as many as were ever under way at once.
            self.free.clear();
            self.ways.clear();
        }
        done
    }

    fn direct(&mut self) -> Option<&mut dyn Direct> {
        let all = self.outer.size();
        self.inner.as_mut().filter(|inner| inner.size() == all).and_then(|inner| inner.direct())
    }

    fn subgroup(&mut self, members: &[usize], context: u64, within: Duration) -> Result<Box<dyn Transport>> {
        // First the outer one, which complains about members that do not exist.
        let mut outer = self.outer.subgroup(members, context, within)?;
        let nodes = self.nodes.among(members);
        let sharing = nodes.with(outer.rank());
        let local: Vec<usize> = sharing.iter().filter_map(|&m| self.local[members[m]]).collect();
        let inner = match &mut self.inner {
            Some(inner) if local.len() > 1 => {
                let made = inner.subgroup(&local, context, within);
                // Or else ranks of other nodes would take this one's end in the new group for an orderly one.
                Some(made.inspect_err(|why| outer.abort(why))?)
            }
            _ => None,
        };
        Ok(Box::new(Hierarchical::new(&self.name, inner, outer, nodes)?))
    }

    fn check(&mut self) -> Result<()> {
        // The outer one knows all ranks, and so the cause.
        self.outer.check()?;
        self.inner.as_mut().map_or(Ok(()), |inner| inner.check())
    }

    fn check_hosts(&mut self) -> Result<()> {
        self.outer.check_hosts()?;
        self.inner.as_mut().map_or(Ok(()), |inner| inner.check())
    }

    fn waits(&mut self) -> Option<&mut dyn Waits> {
        // It knows all ranks, and each of them listens to it, whatever it waits for.
        self.outer.waits()
    }

    fn wakes(&self) -> bool {
        match &self.inner {
            Some(inner) if inner.size() == self.outer.size() => inner.wakes(),
            None => self.outer.wakes(),
            _ => false,
        }
    }

    fn park(&mut self, limit: Duration) {
        match &mut self.inner {
            Some(inner) if inner.size() == self.outer.size() => inner.park(limit),
            None => self.outer.park(limit),
            // What the network brings does not wake this rank.
            Some(inner) => inner.park(limit.min(Duration::from_micros(50))),
        }
    }

    fn abort(&mut self, why: &Error) {
        self.outer.abort(why);
        if let Some(inner) = &mut self.inner {
            inner.abort(why);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::threads;

    #[test]
    fn requests_that_are_over_leave_no_places() {
        let (inner, outer) = (threads::group(2), threads::group(2));
        let mut ranks: Vec<Hierarchical> = inner
            .into_iter()
            .zip(outer)
            .map(|(inner, outer)| {
                let nodes = Nodes::blocks(2, 2).unwrap();
                Hierarchical::new("both", Some(Box::new(inner)), Box::new(outer), nodes).unwrap()
            })
            .collect();
        let (given, mut got) = ([7u8; 100], [0u8; 100]);
        let mut under_way = Vec::new();
        for i in 0..100 {
            let tag = Tag(i as u64);
            // SAFETY: both arrays are left alone until the requests below are over.
            unsafe {
                under_way.push((0, ranks[0].send(1, tag, given.as_ptr().add(i), 1).unwrap()));
                under_way.push((1, ranks[1].recv(0, tag, got.as_mut_ptr().add(i), 1).unwrap()));
            }
        }
        let places = ranks[1].ways.len();
        while !under_way.is_empty() {
            under_way.retain(|&(rank, request)| !ranks[rank].test(request).unwrap());
        }
        assert_eq!((places, got), (100, given));
        assert!(ranks.iter().all(|rank| rank.ways.is_empty() && rank.free.is_empty()));
    }
}
