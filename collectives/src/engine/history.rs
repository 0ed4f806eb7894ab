//! What ranks have called, compared now and then. Where nobody waits for the one that calls something else, such as in
//! broadcasts of two ranks that each take themselves for the root, a call ends well on all of them; this tells it a little
//! later.
//!
//! After every [`SPAN`] collectives a rank sends their fingerprints to the next rank, and compares with its own what the one
//! before it sends. If no rank finds a difference, there is none around the ring. No call waits for that,
//! but of a rank that is further ahead of the others than its transport tells calls apart. The messages have numbers of their
//! own among those of collectives, so a transport tells them apart as it does those.

use super::Engine;
use super::diverged::in_words_of_the_job;
use crate::error::{Error, Result};
use crate::schedule::Call;
use crate::transport::{Request, Tag, Transport};
use crate::watch::Fingerprint;
use std::collections::VecDeque;

/// Collectives between two comparisons; the same on every rank, because tags are numbered by it.
const SPAN: usize = 1 << SPAN_BITS;
const SPAN_BITS: u32 = 6;
/// So many have messages under way at most. A rank that is further ahead of those before it has the rest wait, and calls
/// that are a window of the transport's after them.
const POSTED: usize = 16;
/// Lists for so many are kept.
const SPARE: usize = 2;
/// The number of these messages within their call. The first message of a call, to which others may come in its place, has
/// another.
const SLOT: u64 = 1;

/// The number in its tag of the collective `sequence`.
#[inline(always)]
pub(super) fn number(sequence: u64) -> u64 {
    sequence + (sequence >> SPAN_BITS)
}

/// The collectives of one group.
pub(super) struct History {
    /// Fingerprints of the last collectives, each at its number modulo [`SPAN`], and how many there were in all.
    called: [u64; SPAN],
    count: u64,
    /// In order; those that have been posted come first, and end in order.
    under_way: VecDeque<Comparison>,
    /// How many of them have been posted.
    posted: usize,
    spare: Vec<Comparison>,
}

/// One comparison with both neighbours.
struct Comparison {
    nth: u64,
    mine: Vec<u64>,
    theirs: Vec<u64>,
    /// The messages that are under way.
    sent: Half,
    came: Half,
}

/// One of its messages.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Half {
    UnderWay(Request),
    Over,
    /// The neighbour has left in good order, and has nothing to compare any more.
    Left,
}

impl Half {
    fn posted(request: Result<Request>) -> Result<Half> {
        match request {
            Ok(Request::DONE) => Ok(Half::Over),
            Ok(request) => Ok(Half::UnderWay(request)),
            Err(Error::PeerLost { .. }) => Ok(Half::Left),
            Err(error) => Err(error),
        }
    }

    /// Whether it is over, one way or the other.
    fn test(&mut self, transport: &mut dyn Transport) -> Result<bool> {
        let Half::UnderWay(request) = *self else { return Ok(true) };
        *self = match transport.test(request) {
            Ok(false) => return Ok(false),
            Ok(true) => Half::Over,
            Err(Error::PeerLost { .. }) => Half::Left,
            Err(error) => return Err(error),
        };
        Ok(true)
    }
}

impl History {
    /// Of a group of `size`, with all that it needs as long as no rank is far ahead.
    pub(super) fn new(size: usize) -> Self {
        let few = if size > 1 { SPARE } else { 0 };
        History {
            called: [0; SPAN],
            count: 0,
            under_way: VecDeque::with_capacity(few),
            posted: 0,
            spare: (0..few).map(|_| Comparison::new()).collect(),
        }
    }

    /// Whether comparisons are under way.
    #[inline(always)]
    pub(super) fn busy(&self) -> bool {
        !self.under_way.is_empty()
    }

    /// Takes note of a collective; true when it is time to compare.
    #[inline(always)]
    pub(super) fn note(&mut self, called: Fingerprint) -> bool {
        self.called[self.count as usize % SPAN] = called.bits();
        self.count += 1;
        self.count.is_multiple_of(SPAN as u64)
    }

    /// The last collectives before the one of number `sequence`, as far as they are known; the latest comes last.
    pub(super) fn last_before(&self, sequence: u64) -> impl Iterator<Item = u64> {
        let known = self.count.saturating_sub(SPAN as u64)..self.count.min(sequence);
        known.map(|number| self.called[number as usize % SPAN])
    }

    fn begin(&mut self) {
        let mut comparison = self.spare.pop().unwrap_or_else(Comparison::new);
        comparison.nth = (self.count >> SPAN_BITS) - 1;
        comparison.mine.copy_from_slice(&self.called);
        self.under_way.push_back(comparison);
    }
}

impl Comparison {
    fn new() -> Self {
        let (mine, theirs) = (vec![0; SPAN], vec![0; SPAN]);
        Comparison { nth: 0, mine, theirs, sent: Half::Over, came: Half::Over }
    }

    /// Its number, after that of the last collective that it is about.
    fn number(&self) -> u64 {
        ((self.nth + 1) << SPAN_BITS) + self.nth
    }

    fn post(&mut self, transport: &mut dyn Transport) -> Result<()> {
        let (rank, size, bytes) = (transport.rank(), transport.size(), size_of_val(&self.mine[..]));
        let (to, from) = ((rank + 1) % size, (rank + size - 1) % size);
        let tag = Tag(self.number() << 16 | SLOT);
        // SAFETY: both lists stay as they are until the messages are over, or until the transport has gone, which the
        // engine drops before them.
        let (came, sent) = unsafe {
            let came = transport.recv(from, tag, self.theirs.as_mut_ptr().cast(), bytes);
            (came, transport.send(to, tag, self.mine.as_ptr().cast(), bytes))
        };
        (self.came, self.sent) = (Half::posted(came)?, Half::posted(sent)?);
        Ok(())
    }
}

impl Engine {
    /// Takes note of a collective that something else carries than this engine, on all ranks, as of one of its own.
    pub fn note_other(&mut self, call: &Call) -> Result<()> {
        if let Some(failed) = &self.failed {
            return Err(failed.clone());
        }
        self.sequence += 1;
        if self.group.size > 1 && self.history.note(Fingerprint::of(call)) {
            self.history.begin();
        }
        self.compare_notes()
    }

    /// Moves comparisons on, if any are under way, and nothing else.
    #[inline(always)]
    pub fn compare_notes(&mut self) -> Result<()> {
        if self.history.busy() { self.compare() } else { Ok(()) }
    }

    /// Compares what the last collectives were.
    #[cold]
    pub(super) fn begin_comparison(&mut self) -> Result<()> {
        self.history.begin();
        self.compare()
    }

    /// Moves comparisons on: posts all that may be, and looks whether the oldest is over.
    #[cold]
    pub(super) fn compare(&mut self) -> Result<()> {
        if self.failed.is_some() {
            return Ok(());
        }
        match self.post_comparisons().and_then(|()| self.end_comparisons()) {
            Ok(None) => Ok(()),
            Ok(Some(error)) | Err(error) => Err(self.fail(error)),
        }
    }

    fn post_comparisons(&mut self) -> Result<()> {
        let oldest = self.oldest().map(|flight| flight.state.number());
        let window = self.window;
        let History { under_way, posted, .. } = &mut self.history;
        while *posted < POSTED
            && let Some(comparison) = under_way.get_mut(*posted)
        {
            if oldest.is_some_and(|oldest| comparison.number() >= oldest.saturating_add(window)) {
                break;
            }
            *posted += 1;
            comparison.post(&mut *self.transport)?;
        }
        Ok(())
    }

    /// The first difference, if there is one.
    fn end_comparisons(&mut self) -> Result<Option<Error>> {
        while self.history.posted > 0
            && let Some(first) = self.history.under_way.front_mut()
        {
            let over = first.came.test(&mut *self.transport)? && first.sent.test(&mut *self.transport)?;
            if !over {
                break;
            }
            let comparison = self.history.under_way.pop_front().expect("it was there");
            self.history.posted -= 1;
            let differs = (0..SPAN).find(|&i| comparison.mine[i] != comparison.theirs[i]);
            if let Some(i) = differs.filter(|_| comparison.came == Half::Over) {
                return Ok(Some(self.called_otherwise(&comparison, i)));
            }
            // Where a neighbour has left, its memory may be the transport's still.
            match (comparison.came, comparison.sent) {
                (Half::Over, Half::Over) => self.history.spare.push(comparison),
                _ => std::mem::forget(comparison),
            }
            self.history.spare.truncate(SPARE);
        }
        Ok(None)
    }

    /// Whether a neighbour may need this rank to get what it is to compare.
    pub(super) fn owes_a_comparison(&mut self) -> bool {
        let (transport, posted) = (&mut *self.transport, self.history.posted);
        let mut under_way = self.history.under_way.iter_mut().enumerate();
        under_way.any(|(at, one)| at >= posted || matches!(one.sent.test(transport), Ok(false)))
    }

    /// The rank that has to compare before anything of a collective of this `number` can be posted, if one has to.
    pub(super) fn compared_first(&self, number: u64) -> Option<usize> {
        let waiting = self.history.under_way.get(self.history.posted)?;
        let (rank, size) = (self.group.rank, self.group.size);
        (number >= waiting.number().saturating_add(self.window)).then_some((rank + size - 1) % size)
    }

    fn called_otherwise(&self, comparison: &Comparison, i: usize) -> Error {
        let job_rank = |member| self.transport.job_rank(member);
        let words = |call| in_words_of_the_job(Fingerprint::from_bits(call), &*self.transport);
        let (rank, size) = (self.group.rank, self.group.size);
        Error::Diverged {
            sequence: (comparison.nth << SPAN_BITS) + i as u64,
            rank: job_rank(rank),
            mine: words(comparison.mine[i]),
            peer: job_rank((rank + size - 1) % size),
            theirs: words(comparison.theirs[i]),
            past: self.in_words(comparison.mine[..i].iter().copied()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::threads::{self, Threads};
    use crate::{Buffer, Communicator, Options, Progress};
    use std::time::Duration;

    /// Tells few collectives apart, and refuses what has been overtaken, as MPI's tags make it.
    struct Windowed {
        inner: Threads,
        newest: u64,
    }

    impl Windowed {
        const WINDOW: u64 = 16;

        fn admit(&mut self, tag: Tag) -> Result<()> {
            let number = tag.0 >> 16;
            if tag.0 >> 63 == 0 {
                if number + Self::WINDOW <= self.newest {
                    return Err(Error::GivenUp(format!("{number} has been overtaken by {}", self.newest)));
                }
                self.newest = self.newest.max(number);
            }
            Ok(())
        }
    }

    // SAFETY: that of what it is around.
    unsafe impl Transport for Windowed {
        fn name(&self) -> &'static str {
            "windowed"
        }

        fn rank(&self) -> usize {
            self.inner.rank()
        }

        fn size(&self) -> usize {
            self.inner.size()
        }

        fn job_rank(&self, member: usize) -> usize {
            self.inner.job_rank(member)
        }

        fn window(&self) -> u64 {
            Self::WINDOW
        }

        unsafe fn send(&mut self, to: usize, tag: Tag, src: *const u8, bytes: usize) -> Result<Request> {
            self.admit(tag)?;
            // SAFETY: the caller's promise.
            unsafe { self.inner.send(to, tag, src, bytes) }
        }

        unsafe fn recv(&mut self, from: usize, tag: Tag, dst: *mut u8, bytes: usize) -> Result<Request> {
            self.admit(tag)?;
            // SAFETY: the caller's promise.
            unsafe { self.inner.recv(from, tag, dst, bytes) }
        }

        fn test(&mut self, request: Request) -> Result<bool> {
            self.inner.test(request)
        }

        fn subgroup(
            &mut self,
            members: &[usize],
            context: u64,
            within: Duration,
        ) -> Result<Box<dyn Transport>> {
            self.inner.subgroup(members, context, within)
        }

        fn check(&mut self) -> Result<()> {
            self.inner.check()
        }

        fn abort(&mut self, why: &Error) {
            self.inner.abort(why);
        }
    }

    /// Runs `of` as each of `n` ranks.
    fn ranks(n: usize, progress: Progress, of: impl Fn(Communicator) + Sync) {
        std::thread::scope(|scope| {
            for inner in threads::group(n) {
                let of = &of;
                scope.spawn(move || {
                    let options = Options { progress, ..Options::default() };
                    of(Communicator::new(Box::new(Windowed { inner, newest: 0 }), options).expect("a group"));
                });
            }
        });
    }

    const PROGRESS: [Progress; 2] = [Progress::Inline, Progress::Thread { cpu: None }];

    #[test]
    fn calls_and_comparisons_keep_to_the_window() {
        for progress in PROGRESS {
            ranks(2, progress, |comm| {
                let me = comm.rank() as u64;
                for round in 0..3 {
                    // One rank has started all, and waits, before the other begins.
                    if me == round % 2 {
                        comm.recv(&mut [0u8][..], 1 - me as usize, 7).expect("a word");
                    }
                    let start = |i: u64| {
                        comm.start_all_gather(Buffer::copy_of(&[i + me]), Buffer::zeroed(2)).expect("starts")
                    };
                    let pending: Vec<_> = (0..300).map(start).collect();
                    if me != round % 2 {
                        comm.send(&[1u8][..], 1 - me as usize, 7).expect("a word");
                    }
                    for (i, call) in (0..).zip(pending) {
                        assert_eq!(call.wait().expect("works").1.host(), [i, i + 1]);
                    }
                }
            });
        }
    }
}
