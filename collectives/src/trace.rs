//! What a rank did when: its calls, from their start to their end, and what its program says that it did meanwhile. For
//! whoever wants to see how communication overlaps with computation; nothing is measured for anybody else.

use crate::locked;
use crate::watch::Fingerprint;
use rustix::time::{ClockId, clock_gettime};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Where spans go while they are wanted; clones are the same trace. Takes no memory after it was made: what it has no room
/// for is counted.
#[derive(Clone, Debug)]
pub struct Trace(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    wanted: AtomicBool,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    spans: Vec<Span>,
    /// How many more there is room for, and how many of those for which that is kept free.
    room: usize,
    reserved: usize,
    lost: Lost,
}

/// What there was no room for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lost {
    /// How many spans.
    pub count: u64,
    /// When the first of them began: all that was over by then is there.
    pub since: Option<u64>,
}

/// From when to when something was under way, in nanoseconds of the clock that [`Trace::now`] reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// What.
    pub of: Of,
    /// When it began.
    pub begin: u64,
    /// When it was over.
    pub end: u64,
}

/// When something began that is under way.
#[derive(Clone, Copy, Debug)]
pub struct Begun {
    at: u64,
    wanted: bool,
}

impl Begun {
    /// Nanoseconds since.
    pub fn so_far(self) -> u64 {
        Trace::now() - self.at
    }
}

/// What was under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Of {
    /// A collective, or a message, from its start until this rank had done its part and had what it was to get.
    Call(Fingerprint),
    /// Something that the program has a number for, and a number of that.
    Work(u32, u32),
}

impl Trace {
    /// With room for so many spans.
    pub fn new(capacity: usize) -> Self {
        Trace::reserving(capacity, 0)
    }

    /// With room for so many, and for so many more (`reserved`) that [`Trace::end_reserved`] ends: what lies around others ends
    /// after them, and would be the first to be lost.
    pub fn reserving(capacity: usize, reserved: usize) -> Self {
        let spans = Vec::with_capacity(capacity + reserved);
        let kept = Kept { spans, room: capacity, reserved, lost: Lost::default() };
        Trace(Arc::new(Inner { wanted: AtomicBool::new(false), kept: Mutex::new(kept) }))
    }

    /// Whether spans from now on are wanted, also of what is under way.
    pub fn want(&self, wanted: bool) {
        self.0.wanted.store(wanted, Ordering::Relaxed);
    }

    fn is_wanted(&self) -> bool {
        self.0.wanted.load(Ordering::Relaxed)
    }

    /// Nanoseconds of a clock that all processes of a host share.
    pub fn now() -> u64 {
        let now = clock_gettime(ClockId::Monotonic);
        now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
    }

    /// Something begins.
    pub fn begin(&self) -> Begun {
        Begun { at: Trace::now(), wanted: self.is_wanted() }
    }

    /// What began then is over: a span, if it was wanted at its begin or is now.
    pub fn end(&self, of: Of, begun: Begun) {
        self.over(of, begun, false);
    }

    /// The same of one for which there is room even when there is none for others, as long as that lasts.
    pub fn end_reserved(&self, of: Of, begun: Begun) {
        self.over(of, begun, true);
    }

    fn over(&self, of: Of, begun: Begun, reserved: bool) {
        if !(begun.wanted || self.is_wanted()) {
            return;
        }
        let span = Span { of, begin: begun.at, end: Trace::now() };
        let mut kept = locked(&self.0.kept);
        let Kept { spans, room, reserved: kept_free, lost } = &mut *kept;
        let left = if reserved && *kept_free > 0 { kept_free } else { room };
        match left.checked_sub(1) {
            Some(less) => {
                *left = less;
                spans.push(span);
            }
            None => {
                lost.count += 1;
                lost.since = Some(lost.since.map_or(span.begin, |since| since.min(span.begin)));
            }
        }
    }

    /// All spans so far, in the order of their ends, and what there was no room for. No room is left: what ends later is lost.
    pub fn take(&self) -> (Vec<Span>, Lost) {
        let mut kept = locked(&self.0.kept);
        let Kept { spans, lost, .. } = std::mem::take(&mut *kept);
        (spans, lost)
    }
}

impl Span {
    /// As numbers, for other ranks.
    pub fn pack(self) -> [u64; 4] {
        let (which, what) = match self.of {
            Of::Call(call) => (0, call.bits()),
            Of::Work(what, which) => (1 + u64::from(which), u64::from(what)),
        };
        [which, what, self.begin, self.end]
    }

    /// From those numbers.
    pub fn unpack([which, what, begin, end]: [u64; 4]) -> Self {
        let of = match which {
            0 => Of::Call(Fingerprint::from_bits(what)),
            _ => Of::Work(what as u32, (which - 1) as u32),
        };
        Span { of, begin, end }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::{DType, ReduceOp};
    use crate::schedule::{Call, Kind};
    use crate::{Communicator, Options};

    #[test]
    fn spans_are_kept_while_they_are_wanted_and_there_is_room() {
        let trace = Trace::new(2);
        let work = |which| (Of::Work(7, which), trace.begin());
        let ((of, begun), early) = (work(9), work(0));
        trace.end(of, begun);
        trace.want(true);
        trace.end(early.0, early.1);
        let late = work(1);
        trace.want(false);
        trace.end(late.0, late.1);
        trace.end(of, begun);
        trace.want(true);
        trace.end(of, trace.begin());
        let (spans, lost) = trace.take();
        assert_eq!((spans.len(), lost.count), (2, 1));
        for (span, which) in spans.iter().zip(0..) {
            assert!(span.of == Of::Work(7, which) && span.begin <= span.end, "{span:?}");
            assert_eq!(Span::unpack(span.pack()), *span);
        }
    }

    #[test]
    fn what_lies_around_others_has_room_of_its_own_and_the_first_that_has_none_is_known() {
        let trace = Trace::reserving(2, 1);
        trace.want(true);
        let around = trace.begin();
        for which in 0..2 {
            trace.end(Of::Work(1, which), trace.begin());
        }
        let first = trace.begin();
        trace.end(Of::Work(1, 3), trace.begin());
        trace.end(Of::Work(1, 2), first);
        trace.end_reserved(Of::Work(0, 0), around);
        trace.end_reserved(Of::Work(0, 1), trace.begin());
        let (spans, lost) = trace.take();
        let kept: Vec<Of> = spans.iter().map(|span| span.of).collect();
        assert_eq!(kept, [Of::Work(1, 0), Of::Work(1, 1), Of::Work(0, 0)]);
        assert_eq!(lost, Lost { count: 3, since: Some(first.at) });
        // Where none is kept free, it has what room there is.
        let trace = Trace::new(1);
        trace.want(true);
        trace.end_reserved(Of::Work(0, 0), trace.begin());
        let (spans, lost) = trace.take();
        assert_eq!((spans.len(), lost), (1, Lost::default()));
    }

    #[test]
    fn calls_are_traced_from_their_start_to_their_end() {
        let mut ranks = Communicator::threads_with(2, Options::default()).unwrap().into_iter();
        let (comm, other) = (ranks.next().unwrap(), ranks.next().unwrap());
        let trace = Trace::new(8);
        comm.trace(Some(&trace));
        let start = |comm: &Communicator| {
            let buffer = comm.alloc::<f32>(1000).unwrap();
            comm.start_all_reduce_in_place(buffer, ReduceOp::Sum).unwrap()
        };
        // One that is over when spans are wanted.
        let (mine, theirs) = (start(&comm), start(&other));
        std::thread::scope(|scope| {
            scope.spawn(|| theirs.wait().unwrap());
            mine.wait().unwrap();
        });
        trace.want(true);
        let before = Trace::now();
        let mine = start(&comm);
        std::thread::sleep(std::time::Duration::from_millis(5));
        let late = Trace::now();
        std::thread::scope(|scope| {
            scope.spawn(|| start(&other).wait().unwrap());
            mine.wait().unwrap();
        });
        let (spans, lost) = trace.take();
        let [span] = spans[..] else { panic!("{spans:?}") };
        let call = Call { in_place: true, ..Call::new(Kind::AllReduce, DType::F32, 1000) };
        assert_eq!((span.of, lost), (Of::Call(Fingerprint::of(&call)), Lost::default()));
        assert!(before <= span.begin && span.begin < late && span.end > late, "{span:?}");
        assert_eq!(Span::unpack(span.pack()), span);
    }
}
