//! Ranks as threads of one process: the oracle that other transports are compared with.
//!
//! Messages only, through one mailbox per rank. A short message is copied into the mailbox, as long as there is room; any
//! other is copied once, from the sender's memory to the receiver's, by whichever of the two comes second. A rank that leaves
//! or gives up first waits for the copies that others are making of its memory, so that nobody touches it later.

mod mailbox;

use super::{Request, Tag, Transport, Wait, Waits, blame, place_among, waits, wrong_length};
use crate::error::{Error, Result};
use crate::locked;
use mailbox::{Body, EAGER, Letter, Mailbox, Posted, State};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// One rank of a group of threads.
pub struct Threads {
    rank: usize,
    group: Arc<Group>,
    /// What this rank last saw of its mailbox's events: news since then keep it from parking.
    seen: u64,
}

/// `n` ranks, to be moved to as many threads.
pub fn group(n: usize) -> Vec<Threads> {
    let waits = (0..n).map(|_| AtomicU64::new(0)).collect();
    let family = Family { failed: AtomicBool::new(false), failure: Mutex::new(None), waits };
    let group = Arc::new(Group::new((0..n).collect(), Arc::new(family)));
    (0..n).map(|rank| Threads { rank, group: Arc::clone(&group), seen: 0 }).collect()
}

/// A subgroup's context and its members.
type Name = (u64, Vec<usize>);

struct Group {
    /// Per rank, its number in the first group.
    members: Vec<usize>,
    boxes: Vec<Mailbox>,
    family: Arc<Family>,
    /// Subgroups that not all of their members have joined yet, and how many have.
    joining: Mutex<HashMap<Name, (Arc<Group>, usize)>>,
}

/// All groups that come from one.
struct Family {
    failed: AtomicBool,
    /// Who failed first, as numbered in the first group, and why.
    failure: Mutex<Option<(usize, String)>>,
    /// Whom each of its ranks waits for; see [`waits`].
    waits: Vec<AtomicU64>,
}

impl Group {
    fn new(members: Vec<usize>, family: Arc<Family>) -> Self {
        let boxes = members.iter().map(|_| Mailbox::default()).collect();
        Group { members, boxes, family, joining: Mutex::default() }
    }
}

impl Threads {
    fn mine(&self) -> &Mailbox {
        &self.group.boxes[self.rank]
    }

    fn lost(&self, peer: usize) -> Error {
        match self.failure() {
            Some(error) => error,
            None => {
                let (rank, peer) = (self.job_rank(self.rank), self.job_rank(peer));
                Error::PeerLost { rank, peer, how: "left".into() }
            }
        }
    }

    /// What another rank of any group failed with.
    fn failure(&self) -> Option<Error> {
        let family = &self.group.family;
        if !family.failed.load(Ordering::Acquire) {
            return None;
        }
        let failure = locked(&family.failure);
        let (peer, how) = failure.clone()?;
        Some(Error::PeerLost { rank: self.job_rank(self.rank), peer, how })
    }

    /// A message of `from` was to have `bytes`.
    fn wrong_length(&self, bytes: usize, from: usize, sent: usize) -> Error {
        wrong_length(self.job_rank(self.rank), bytes, self.job_rank(from), Some(sent))
    }

    /// The other rank's memory is safe to touch between `enter` and `leave`.
    fn enter(&self, owner: usize) -> bool {
        let mut inner = self.group.boxes[owner].lock();
        if !inner.closed {
            inner.copying += 1;
        }
        !inner.closed
    }

    fn leave(&self, owner: usize, request: usize, state: State) {
        let mailbox = &self.group.boxes[owner];
        let mut inner = mailbox.lock();
        inner.copying -= 1;
        inner.requests[request] = state;
        mailbox.ring(&mut inner);
    }

    /// After this nobody touches this rank's memory.
    fn close(&mut self) {
        let mailbox = self.mine();
        let mut inner = mailbox.lock();
        inner.closed = true;
        inner.posted.clear();
        while inner.copying > 0 {
            inner = mailbox.bell.wait(inner).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        inner.arrived.clear();
    }

    fn wake_all(&self) {
        for mailbox in &self.group.boxes {
            mailbox.ring(&mut mailbox.lock());
        }
    }

    fn announce(&self, culprit: usize, how: String) {
        let family = &self.group.family;
        let mut failure = locked(&family.failure);
        failure.get_or_insert((culprit, how));
        drop(failure);
        family.failed.store(true, Ordering::Release);
        self.wake_all();
    }
}

// SAFETY: a request is done once its bytes are copied, under locks, and a closed mailbox lets copies under way end first.
unsafe impl Transport for Threads {
    fn name(&self) -> &'static str {
        "threads"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.group.members.len()
    }

    fn job_rank(&self, member: usize) -> usize {
        self.group.members[member]
    }

    unsafe fn send(&mut self, to: usize, tag: Tag, src: *const u8, bytes: usize) -> Result<Request> {
        let from = self.rank;
        let mailbox = &self.group.boxes[to];
        let mut own = (bytes > EAGER).then(|| self.mine().lock().request(to));
        let (mut inner, index) = loop {
            let mut inner = mailbox.lock();
            if inner.closed {
                return Err(self.lost(to));
            }
            let waiting = inner.posted.iter().position(|p| p.from == from && p.tag == tag);
            if let Some(index) = waiting {
                break (inner, index);
            }
            let body = if let Some(request) = own {
                Body::Long { src, bytes, request }
            } else if let Some(place) = inner.spare.pop() {
                let there = inner.place(place).as_mut_ptr().cast();
                // SAFETY: readable by this function's contract, and no longer than the place.
                unsafe { std::ptr::copy_nonoverlapping(src, there, bytes) };
                Body::Short { place, bytes }
            } else {
                // Not under the receiver's lock: no thread ever holds two.
                drop(inner);
                own = Some(self.mine().lock().request(to));
                continue;
            };
            inner.arrived.push(Letter { from, tag, body });
            mailbox.ring(&mut inner);
            return Ok(own.map_or(Request::DONE, |request| Request(request as u64)));
        };
        let posted = inner.posted.remove(index);
        inner.copying += 1;
        drop(inner);
        // SAFETY: both are valid by the contracts of `send` and `recv`; the receiver does not close meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(src, posted.dst, bytes.min(posted.bytes)) };
        // The receiver, which sees what came, reports a length that it did not expect.
        let fits = posted.bytes == bytes;
        let state = match fits {
            true => State::Done,
            false => {
                State::Failed(wrong_length(self.job_rank(to), posted.bytes, self.job_rank(from), Some(bytes)))
            }
        };
        self.leave(to, posted.request, state);
        if let Some(request) = own {
            self.mine().lock().requests[request] = State::Free;
        }
        Ok(Request::DONE)
    }

    unsafe fn recv(&mut self, from: usize, tag: Tag, dst: *mut u8, bytes: usize) -> Result<Request> {
        let mut inner = self.mine().lock();
        let Some(index) = inner.arrived.iter().position(|l| l.from == from && l.tag == tag) else {
            let request = inner.request(from);
            inner.posted.push(Posted { from, tag, dst, bytes, request });
            return Ok(Request(request as u64));
        };
        match inner.arrived.remove(index).body {
            Body::Short { place, bytes: sent } => {
                // SAFETY: writable by this function's contract; the sender has filled so much of the place.
                unsafe {
                    std::ptr::copy_nonoverlapping(inner.place(place).as_ptr().cast(), dst, bytes.min(sent));
                }
                inner.spare.push(place);
                if sent != bytes {
                    return Err(self.wrong_length(bytes, from, sent));
                }
            }
            Body::Long { src, bytes: sent, request } => {
                drop(inner);
                if !self.enter(from) {
                    return Err(self.lost(from));
                }
                // SAFETY: as for a short one; the sender's memory stays until its request is done.
                unsafe { std::ptr::copy_nonoverlapping(src, dst, bytes.min(sent)) };
                self.leave(from, request, State::Done);
                if sent != bytes {
                    return Err(self.wrong_length(bytes, from, sent));
                }
            }
        }
        Ok(Request::DONE)
    }

    fn test(&mut self, request: Request) -> Result<bool> {
        if request == Request::DONE {
            return Ok(true);
        }
        let index = request.0 as usize;
        let group = Arc::clone(&self.group);
        let mut inner = group.boxes[self.rank].lock();
        self.seen = inner.events;
        match &inner.requests[index] {
            State::Waiting { peer } => {
                let peer = *peer;
                if !group.boxes[peer].left.load(Ordering::Acquire) {
                    return Ok(false);
                }
                // What it did before it left is done; whoever comes second finds it so.
                drop(inner);
                let inner = group.boxes[self.rank].lock();
                match inner.requests[index] {
                    State::Waiting { .. } => Err(self.lost(peer)),
                    _ => {
                        drop(inner);
                        self.test(request)
                    }
                }
            }
            State::Done => {
                inner.requests[index] = State::Free;
                Ok(true)
            }
            State::Failed(error) => Err(error.clone()),
            State::Free => Err(Error::Library {
                library: "threads".into(),
                call: "test",
                rank: self.job_rank(self.rank),
                text: format!("request {index} is not in flight"),
            }),
        }
    }

    fn subgroup(&mut self, members: &[usize], context: u64, _within: Duration) -> Result<Box<dyn Transport>> {
        let rank = place_among(members, self)?;
        let mut joining = locked(&self.group.joining);
        let (group, joined) = joining.entry((context, members.to_vec())).or_insert_with(|| {
            let members = members.iter().map(|&m| self.group.members[m]).collect();
            (Arc::new(Group::new(members, Arc::clone(&self.group.family))), 0)
        });
        *joined += 1;
        let group = Arc::clone(group);
        if *joined == members.len() {
            joining.remove(&(context, members.to_vec()));
        }
        Ok(Box::new(Threads { rank, group, seen: 0 }))
    }

    fn check(&mut self) -> Result<()> {
        self.failure().map_or(Ok(()), Err)
    }

    fn waits(&mut self) -> Option<&mut dyn Waits> {
        Some(self)
    }

    fn wakes(&self) -> bool {
        true
    }

    fn park(&mut self, limit: Duration) {
        let mailbox = &self.group.boxes[self.rank];
        let mut inner = mailbox.lock();
        if inner.events == self.seen {
            let woken = mailbox.bell.wait_timeout(inner, limit);
            inner = woken.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
        }
        self.seen = inner.events;
    }

    fn abort(&mut self, why: &Error) {
        // Before closing: who finds this rank closed must find the reason too.
        let (culprit, how) = blame::of(why, self.job_rank(self.rank));
        self.announce(culprit, how);
        self.close();
        self.wake_all();
    }
}

impl Waits for Threads {
    fn note(&mut self, wait: Wait) {
        waits::note(&self.group.family.waits[self.job_rank(self.rank)], wait);
    }

    fn ask(&mut self, peer: usize) -> u64 {
        self.group.family.waits[peer].load(Ordering::Relaxed)
    }

    fn answer(&mut self, peer: usize, asked: u64) -> Option<Wait> {
        waits::noted_since(&self.group.family.waits[peer], asked)
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.announce(self.job_rank(self.rank), "panicked".into());
        }
        self.close();
        self.mine().left.store(true, Ordering::Release);
        self.wake_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(10);

    fn exchange(bytes: usize) {
        let mut ranks = group(2);
        let (mut b, mut a) = (ranks.pop().unwrap(), ranks.pop().unwrap());
        let (src, mut dst) = (vec![7u8; bytes], vec![0u8; bytes]);
        // SAFETY: both buffers outlive the requests.
        let sent = unsafe { a.send(1, Tag(3), src.as_ptr(), bytes) }.unwrap();
        assert_eq!(a.test(sent).unwrap(), bytes <= EAGER);
        // SAFETY: as above.
        let received = unsafe { b.recv(0, Tag(3), dst.as_mut_ptr(), bytes) }.unwrap();
        assert!(b.test(received).unwrap());
        assert_eq!(dst, src);
        if bytes > EAGER {
            assert!(a.test(sent).unwrap());
        }
    }

    #[test]
    fn short_messages_wait_in_the_mailbox_and_long_ones_at_the_sender() {
        exchange(0);
        exchange(EAGER);
        exchange(EAGER + 1);
    }

    #[test]
    fn short_messages_that_find_no_room_wait_at_the_sender() {
        let mut ranks = group(2);
        let (mut b, mut a) = (ranks.pop().unwrap(), ranks.pop().unwrap());
        let words: Vec<u8> = (0..=mailbox::ROOM as u8 + 1).collect();
        // SAFETY: the bytes outlive the requests.
        let send = |a: &mut Threads, word: &u8| unsafe { a.send(1, Tag(u64::from(*word)), word, 1) }.unwrap();
        let sent: Vec<Request> = words.iter().map(|word| send(&mut a, word)).collect();
        for (word, request) in words.iter().zip(&sent) {
            assert_eq!(a.test(*request).unwrap(), usize::from(*word) < mailbox::ROOM);
        }
        let mut heard = vec![0u8; words.len()];
        for (word, heard) in words.iter().zip(&mut heard) {
            // SAFETY: as above.
            let received = unsafe { b.recv(0, Tag(u64::from(*word)), heard, 1) }.unwrap();
            assert!(b.test(received).unwrap());
        }
        assert_eq!(heard, words);
        assert!(sent[mailbox::ROOM..].iter().all(|request| a.test(*request).unwrap()));
        // There is room again.
        let again = send(&mut a, &words[0]);
        assert!(a.test(again).unwrap());
    }

    #[test]
    fn a_rank_that_left_is_named_but_its_last_words_arrive() {
        let mut ranks = group(3);
        let mut c = ranks.pop().unwrap();
        let (mut b, _a) = (ranks.pop().unwrap(), ranks.pop().unwrap());
        let (word, mut heard) = (5u8, 0u8);
        // SAFETY: both bytes outlive the requests.
        unsafe { b.send(2, Tag(1), &word, 1) }.unwrap();
        drop(b);
        // SAFETY: as above.
        let first = unsafe { c.recv(1, Tag(1), &mut heard, 1) }.unwrap();
        assert!(c.test(first).unwrap());
        assert_eq!(heard, 5);
        // SAFETY: as above.
        let second = unsafe { c.recv(1, Tag(1), &mut heard, 1) }.unwrap();
        let error = c.test(second).unwrap_err();
        assert!(matches!(error, Error::PeerLost { rank: 2, peer: 1, .. }), "{error}");
        assert!(c.check().is_ok(), "leaving is not failing");
    }

    #[test]
    fn an_abort_is_seen_by_all_groups_of_the_family() {
        let mut ranks = group(3);
        let mut c = ranks.pop().unwrap();
        let (mut b, mut a) = (ranks.pop().unwrap(), ranks.pop().unwrap());
        let mut ab = a.subgroup(&[1, 0], 9, PATIENCE).unwrap();
        let mut ba = b.subgroup(&[1, 0], 9, PATIENCE).unwrap();
        assert_eq!((ab.rank(), ba.rank()), (1, 0));
        ba.abort(&Error::Launch("no disk".into()));
        let seen = c.check().unwrap_err().to_string();
        assert!(seen.contains("rank 1 failed: launch: no disk"), "{seen}");
        let seen = ab.check().unwrap_err().to_string();
        assert!(seen.contains("rank 1 failed"), "{seen}");
    }

    #[test]
    fn groups_of_other_members_are_others_whatever_their_context() {
        let mut ranks = group(4);
        let mut joined = Vec::new();
        for (rank, members) in [(0, [0, 1]), (2, [2, 3]), (1, [0, 1]), (3, [2, 3])] {
            joined.push(ranks[rank].subgroup(&members, 7, PATIENCE).unwrap());
        }
        let named: Vec<_> = joined.iter().map(|t| (t.rank(), t.job_rank(0), t.job_rank(1))).collect();
        assert_eq!(named, [(0, 0, 1), (0, 2, 3), (1, 0, 1), (1, 2, 3)]);
    }

    #[test]
    fn memory_that_is_not_there_is_an_error_of_the_rank() {
        let mut ranks = group(2);
        for bytes in [1 << 60, usize::MAX] {
            let refused = ranks[1].alloc(bytes).map(drop).unwrap_err().to_string();
            assert!(refused.contains(&format!("{bytes} bytes")) && refused.contains("rank 1"), "{refused}");
        }
        assert_eq!(ranks[1].alloc(100).unwrap().bytes(), 100);
    }

    #[test]
    fn the_receiver_reports_another_length_and_has_what_came() {
        let mut ranks = group(2);
        let (mut b, mut a) = (ranks.pop().unwrap(), ranks.pop().unwrap());
        let mut dst = [0u8; 8];
        // SAFETY: the buffer outlives the requests.
        let request = unsafe { b.recv(0, Tag(0), dst.as_mut_ptr(), 8) }.unwrap();
        // SAFETY: as above.
        unsafe { a.send(1, Tag(0), [1u8; 4].as_ptr(), 4) }.unwrap();
        assert!(matches!(b.test(request), Err(Error::Diverged { rank: 1, peer: 0, .. })));
        assert_eq!(dst, [1, 1, 1, 1, 0, 0, 0, 0]);
    }
}
