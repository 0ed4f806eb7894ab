//! What ranks have called, compared now and then. Where nobody waits for the one that calls something else, such as in
//! broadcasts of two ranks that each take themselves for the root, a call ends well on all of them; this tells it a little
//! later, before a message that nobody took could be taken for one of a later call.
//!
//! After every so many collectives a rank sends their fingerprints to the next rank, and compares with its own what the one
//! before it sends. If no rank finds a difference, there is none around the ring. No call waits for that. The messages have
//! numbers of their own among those of collectives, so a transport tells them apart as it does those.

use super::Engine;
use super::diverged::in_words_of_the_job;
use crate::error::{Error, Result};
use crate::transport::{Request, Tag, Transport};
use crate::watch::Fingerprint;
use std::collections::VecDeque;

/// Collectives between two comparisons, as a power of two, where the transport can tell twice as many apart.
const SPAN: u32 = 7;
/// The number of these messages within their call. The first message of a call, to which others may come in its place, has
/// another.
const SLOT: u64 = 1;

/// The collectives of one group.
pub(super) struct History {
    /// Collectives between two comparisons, as a power of two.
    span: u32,
    /// Comparisons that were begun.
    begun: u64,
    /// Fingerprints of the collectives since.
    called: Vec<u64>,
    under_way: VecDeque<Comparison>,
    spare: Vec<Comparison>,
    /// Those that a rank has left; their memory is the transport's still.
    left: Vec<Comparison>,
}

/// One comparison with both neighbours.
struct Comparison {
    nth: u64,
    mine: Vec<u64>,
    theirs: Vec<u64>,
    /// The messages; none before they are posted.
    requests: Option<[Request; 2]>,
}

impl History {
    /// Of a group whose transport tells `window` collectives apart.
    pub(super) fn new(window: u64) -> Self {
        let span = SPAN.min((window / 2).max(1).ilog2());
        History {
            span,
            begun: 0,
            called: Vec::with_capacity(1 << span),
            under_way: VecDeque::with_capacity(1),
            spare: vec![Comparison::new(span)],
            left: Vec::new(),
        }
    }

    /// The number in its tag of the collective `sequence`.
    #[inline(always)]
    pub(super) fn number(&self, sequence: u64) -> u64 {
        sequence + (sequence >> self.span)
    }

    /// Whether comparisons are under way.
    #[inline(always)]
    pub(super) fn busy(&self) -> bool {
        !self.under_way.is_empty()
    }

    /// Takes note of a collective; true when it is time to compare.
    #[inline(always)]
    pub(super) fn note(&mut self, called: Fingerprint) -> bool {
        self.called.push(called.bits());
        self.called.len() == 1 << self.span
    }

    fn begin(&mut self) {
        let mut comparison = self.spare.pop().unwrap_or_else(|| Comparison::new(self.span));
        comparison.nth = self.begun;
        std::mem::swap(&mut comparison.mine, &mut self.called);
        self.called.clear();
        self.begun += 1;
        self.under_way.push_back(comparison);
    }
}

impl Comparison {
    fn new(span: u32) -> Self {
        Comparison { nth: 0, mine: Vec::with_capacity(1 << span), theirs: vec![0; 1 << span], requests: None }
    }

    /// Its number, after that of the last collective that it is about.
    fn number(&self, span: u32) -> u64 {
        ((self.nth + 1) << span) + self.nth
    }

    fn post(&mut self, transport: &mut dyn Transport, number: u64) -> Result<()> {
        let (rank, size, bytes) = (transport.rank(), transport.size(), size_of_val(&self.mine[..]));
        let tag = Tag(number << 16 | SLOT);
        // SAFETY: both lists stay as they are until the messages are over, or until the transport is, which the engine drops
        // before them.
        self.requests = Some(unsafe {
            let (to, from) = ((rank + 1) % size, (rank + size - 1) % size);
            let came = transport.recv(from, tag, self.theirs.as_mut_ptr().cast(), bytes)?;
            [came, transport.send(to, tag, self.mine.as_ptr().cast(), bytes)?]
        });
        Ok(())
    }

    /// Whether both messages are over.
    fn test(&mut self, transport: &mut dyn Transport) -> Result<bool> {
        let Some(requests) = &mut self.requests else { return Ok(false) };
        for request in requests.iter_mut() {
            if *request != Request::DONE && !transport.test(*request)? {
                return Ok(false);
            }
            *request = Request::DONE;
        }
        Ok(true)
    }
}

impl Engine {
    /// Compares what the last collectives were.
    #[cold]
    pub(super) fn begin_comparison(&mut self) -> Result<()> {
        self.history.begin();
        self.compare()
    }

    /// Moves comparisons on. A neighbour that has left in good order has nothing to compare any more.
    #[cold]
    pub(super) fn compare(&mut self) -> Result<()> {
        if self.failed.is_some() {
            return Ok(());
        }
        let oldest = self.oldest().map(|flight| flight.state.number());
        let span = self.history.span;
        let mut at = 0;
        while let Some(comparison) = self.history.under_way.get_mut(at) {
            let number = comparison.number(span);
            let moved = match comparison.requests {
                None if oldest.is_some_and(|oldest| number >= oldest.saturating_add(self.window)) => break,
                None => comparison.post(&mut *self.transport, number).map(|()| false),
                Some(_) => comparison.test(&mut *self.transport),
            };
            match moved {
                Ok(false) => at += 1,
                Ok(true) => {
                    let comparison = self.history.under_way.remove(at).expect("it was there");
                    let differs = (0..1 << span).find(|&i| comparison.mine[i] != comparison.theirs[i]);
                    if let Some(i) = differs {
                        let error = self.called_otherwise(&comparison, i);
                        return Err(self.fail(error));
                    }
                    self.history.spare.push(Comparison { requests: None, ..comparison });
                }
                Err(Error::PeerLost { .. }) => {
                    let comparison = self.history.under_way.remove(at).expect("it was there");
                    self.history.left.push(comparison);
                }
                Err(error) => return Err(self.fail(error)),
            }
        }
        Ok(())
    }

    /// Whether a comparison has to be posted before anything of a collective of this `number`.
    pub(super) fn is_after_a_comparison(&self, number: u64) -> bool {
        let waiting = self.history.under_way.iter().find(|comparison| comparison.requests.is_none());
        waiting.is_some_and(|first| number >= first.number(self.history.span).saturating_add(self.window))
    }

    fn called_otherwise(&self, comparison: &Comparison, i: usize) -> Error {
        let job_rank = |member| self.transport.job_rank(member);
        let words = |call| in_words_of_the_job(Fingerprint::from_bits(call), &*self.transport);
        let (rank, size) = (self.group.rank, self.group.size);
        Error::Diverged {
            sequence: (comparison.nth << self.history.span) + i as u64,
            rank: job_rank(rank),
            mine: words(comparison.mine[i]),
            peer: job_rank((rank + size - 1) % size),
            theirs: words(comparison.theirs[i]),
        }
    }
}
