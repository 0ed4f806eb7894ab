//! What a call is, in 64 bits that ranks compare, and for how long a silent peer is waited for.

use crate::element::{DType, ReduceOp};
use crate::schedule::{Call, Kind};
use std::fmt;
use std::time::{Duration, Instant};

/// How long a peer may be silent before the call fails, unless set otherwise.
pub const DEADLINE: Duration = Duration::from_secs(600);

/// The largest count that a fingerprint can hold.
pub const MAX_COUNT: usize = (1 << 37) - 1;
/// The most ranks of one group.
pub const MAX_SIZE: usize = 1 << 14;

/// How long this process has waited for something. What passes between two looks counts for at most a second: where a whole
/// job is stopped and goes on (Ctrl-Z, a suspended allocation), nobody was silent meanwhile.
#[derive(Clone, Copy, Debug)]
pub struct Waited {
    sum: Duration,
    last: Instant,
}

impl Waited {
    /// The most that passes between two looks of a process that runs.
    const GAP: Duration = Duration::from_secs(1);

    /// Nothing yet.
    pub fn begin() -> Self {
        Waited { sum: Duration::ZERO, last: Instant::now() }
    }

    /// What a call took that lets nobody look meanwhile, counts in full.
    pub fn blocked<T>(&mut self, call: impl FnOnce() -> T) -> T {
        self.so_far();
        let done = call();
        self.sum += self.last.elapsed();
        self.last = Instant::now();
        done
    }

    /// Until now.
    pub fn so_far(&mut self) -> Duration {
        let now = Instant::now();
        self.sum += now.duration_since(self.last).min(Self::GAP);
        self.last = now;
        self.sum
    }
}

/// A limit to how long this process [waits](Waited) for something.
pub struct Until {
    waited: Waited,
    limit: Duration,
}

impl Until {
    /// So long from now on.
    pub fn after(limit: Duration) -> Self {
        Until { waited: Waited::begin(), limit }
    }

    /// Whether it is over.
    pub fn is_over(&mut self) -> bool {
        self.waited.so_far() > self.limit
    }
}

/// A call in 64 bits: kind, type, operation, root and count, so that what a peer calls can be told in words.
///
/// The lowest bit is not part of the call: it says how a rank publishes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Fingerprint(u64);

impl Fingerprint {
    /// The bit that says that a round is staged.
    pub const STAGED: u64 = 1;

    /// Of a call whose count and root are within [`MAX_COUNT`] and [`MAX_SIZE`].
    pub fn of(call: &Call) -> Self {
        // Both sides of a message have the same fingerprint, which names no peer.
        let (kind, root) = match call.kind {
            Kind::Send | Kind::Recv => (Kind::Send, 0),
            kind => (kind, if kind.rooted() { call.root } else { 0 }),
        };
        let op = if kind.reduces() { call.op as u64 } else { 0 };
        let root = root as u64;
        let count = call.count as u64;
        // A kind of 0 would make all zeros a call.
        Fingerprint((kind as u64 + 1) << 59 | (call.dtype as u64) << 55 | op << 52 | root << 38 | count << 1)
    }

    /// The same with its root by its rank in the job, for words; where a peer names one that its group of `size` has.
    pub fn in_job(self, size: usize, job_rank: impl Fn(usize) -> usize) -> Self {
        match self.call() {
            Some(call) if call.kind.rooted() && call.root < size => Self::of(&call.in_job(job_rank)),
            _ => self,
        }
    }

    /// What it is of, where it is of a call: a message is that of its sender, to nobody in particular.
    fn call(self) -> Option<Call> {
        let kind = *Kind::ALL.get(((self.0 >> 59) as usize).checked_sub(1)?)?;
        let (dtype, op) = (dtype_of(self.0 >> 55 & 0xf)?, op_of(self.0 >> 52 & 7)?);
        let root = (self.0 >> 38 & 0x3fff) as usize;
        let count = (self.0 >> 1) as usize & MAX_COUNT;
        Some(Call { op, root, ..Call::new(kind, dtype, count) })
    }

    /// As it travels.
    #[inline]
    pub fn bits(self) -> u64 {
        self.0
    }

    /// From the wire, without the bit that says how the peer publishes.
    #[inline]
    pub fn from_bits(bits: u64) -> Self {
        Fingerprint(bits & !Self::STAGED)
    }
}

/// What a message that carries all of a call between two ranks belongs to, in the 16 bits of a tag that otherwise number
/// the messages of a call: what is called, and some bits of the length. Together with the length itself and the message's
/// direction it is the whole [`Fingerprint`], so that no fingerprint has to travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coded(u16);

impl Coded {
    /// Set in every one of them, and in no number of a message.
    const FLAG: u16 = 1 << 15;
    /// Bits of the length.
    const LENGTH: u32 = 7;

    /// Of a message of `bytes`, which is the count of the call in bytes; none for messages of the user.
    pub fn of(call: &Call, bytes: usize) -> Option<Self> {
        let (dtype, op) = (call.dtype as u16, call.op as u16);
        let what = match call.kind {
            Kind::ReduceScatter => dtype * 5 + op,
            Kind::AllReduce => 50 + dtype * 5 + op,
            Kind::Reduce => 100 + dtype * 5 + op,
            Kind::AllGather => 150 + dtype,
            Kind::Broadcast => 160 + dtype,
            Kind::Gather => 170 + dtype,
            Kind::Scatter => 180 + dtype,
            Kind::AllToAll => 190 + dtype,
            Kind::Barrier => 200,
            Kind::Send | Kind::Recv => return None,
        };
        // The upper bits of a product depend on all bits of the length.
        let length = (bytes as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - Self::LENGTH);
        Some(Coded(Self::FLAG | what << Self::LENGTH | length as u16))
    }

    /// From the low 16 bits of a tag, if those are not the number of a message.
    #[inline]
    pub fn from_slot(slot: u16) -> Option<Self> {
        (slot & Self::FLAG != 0).then_some(Coded(slot))
    }

    /// As the low 16 bits of a tag.
    #[inline]
    pub fn slot(self) -> u16 {
        self.0
    }

    /// What is called, without bits of the length.
    #[inline]
    pub fn what(self) -> u8 {
        (self.0 >> Self::LENGTH) as u8
    }

    /// The call that a message of `bytes` between these ranks belongs to; none if there is no such call.
    pub fn fingerprint(what: u8, bytes: usize, from: usize, to: usize) -> Option<Fingerprint> {
        let kinds = [Kind::AllGather, Kind::Broadcast, Kind::Gather, Kind::Scatter, Kind::AllToAll];
        let (kind, dtype, op) = match what {
            0..150 => {
                let kind = [Kind::ReduceScatter, Kind::AllReduce, Kind::Reduce][usize::from(what / 50)];
                (kind, dtype_of((what % 50 / 5).into())?, op_of((what % 5).into())?)
            }
            150..200 => (kinds[usize::from(what - 150) / 10], dtype_of((what % 10).into())?, ReduceOp::Sum),
            200 => (Kind::Barrier, DType::F32, ReduceOp::Sum),
            _ => return None,
        };
        let root = match kind {
            Kind::Broadcast | Kind::Scatter => from,
            Kind::Reduce | Kind::Gather => to,
            _ => 0,
        };
        Some(Fingerprint::of(&Call { op, root, ..Call::new(kind, dtype, bytes / dtype.size()) }))
    }
}

/// The element type of a user's message, in bits of its tag that are not the user's. Together with the message's length it
/// is the whole [`Fingerprint`].
pub struct Typed;

impl Typed {
    /// Where the bits are; the user's are below them.
    pub const SHIFT: u32 = 32;
    /// All of them.
    pub const MASK: u64 = 0xf << Self::SHIFT;

    /// Of a message of elements of `dtype`. Never 0, which says nothing.
    pub fn of(dtype: DType) -> u64 {
        (dtype as u64 + 1) << Self::SHIFT
    }

    /// What the sender of a message of `bytes` with this tag has called, if the tag says it.
    pub fn fingerprint(tag: u64, bytes: usize) -> Option<Fingerprint> {
        let dtype = dtype_of(((tag & Self::MASK) >> Self::SHIFT).checked_sub(1)?)?;
        Some(Fingerprint::of(&Call::new(Kind::Send, dtype, bytes / dtype.size())))
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.call() {
            None => write!(f, "something unknown ({:#x})", self.0),
            Some(Call { kind: Kind::Send, count, dtype, .. }) => write!(f, "a message of {count} {dtype}"),
            Some(call) => call.fmt(f),
        }
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({self})")
    }
}

fn dtype_of(code: u64) -> Option<DType> {
    DType::ALL.into_iter().find(|&dtype| dtype as u64 == code)
}

fn op_of(code: u64) -> Option<ReduceOp> {
    ReduceOp::ALL.into_iter().find(|&op| op as u64 == code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_was_stopped_has_not_waited() {
        let mut waited = Waited::begin();
        assert!(waited.so_far() < Duration::from_secs(100));
        let before = waited.sum;
        waited.last -= Duration::from_secs(600);
        assert_eq!(waited.so_far(), before + Waited::GAP);
        std::thread::sleep(Duration::from_millis(2));
        assert!(waited.so_far() >= before + Waited::GAP + Duration::from_millis(2));
    }

    #[test]
    fn words_name_a_root_by_its_rank_in_the_job() {
        let words = |kind, root| {
            let call = Call { root, ..Call::new(kind, DType::F32, 5) };
            Fingerprint::of(&call).in_job(3, |member| [7, 4, 9000][member]).to_string()
        };
        assert_eq!(words(Kind::Broadcast, 2), "broadcast of 5 f32, root 9000");
        assert_eq!(words(Kind::Reduce, 0), "reduce of 5 f32, sum, root 7");
        // What a peer names that the group does not have stays as it is.
        assert_eq!(words(Kind::Gather, 3), "gather of 5 f32, root 3");
        assert_eq!(words(Kind::AllGather, 0), "all_gather of 5 f32");
        assert_eq!(Fingerprint::from_bits(u64::MAX).in_job(3, |_| 0), Fingerprint::from_bits(u64::MAX));
    }

    #[test]
    fn a_coded_message_says_what_its_fingerprint_would() {
        let mut seen = std::collections::HashMap::new();
        for kind in Kind::ALL {
            for dtype in DType::ALL {
                for op in ReduceOp::ALL {
                    for count in [0, 1, 2, 1000, 1 << 30] {
                        let root = match kind {
                            Kind::Broadcast | Kind::Scatter => 3,
                            Kind::Reduce | Kind::Gather => 9,
                            _ => 0,
                        };
                        let count = if kind == Kind::Barrier { 0 } else { count };
                        let dtype = if kind == Kind::Barrier { DType::F32 } else { dtype };
                        let call = Call { op, root, ..Call::new(kind, dtype, count) };
                        let Some(coded) = Coded::of(&call, call.bytes()) else {
                            assert!(matches!(kind, Kind::Send | Kind::Recv));
                            continue;
                        };
                        assert_eq!(Coded::from_slot(coded.slot()), Some(coded));
                        let of = Fingerprint::of(&call);
                        assert_eq!(Coded::fingerprint(coded.what(), call.bytes(), 3, 9), Some(of));
                        let old = seen.insert((coded.slot(), call.bytes()), of);
                        assert!(old.is_none_or(|old| old == of), "{of} and {old:?}");
                    }
                }
            }
        }
        assert_eq!(Coded::from_slot(0x7fff), None);
        assert_eq!((201..=255).find_map(|what| Coded::fingerprint(what, 8, 0, 1)), None);
    }

    #[test]
    fn fingerprints_tell_calls_apart_and_name_them() {
        let mut seen = std::collections::HashMap::new();
        for kind in Kind::ALL {
            for dtype in DType::ALL {
                for op in ReduceOp::ALL {
                    for count in [0, 1, MAX_COUNT] {
                        for root in [0, MAX_SIZE - 1] {
                            let call = Call { op, root, ..Call::new(kind, dtype, count) };
                            let f = Fingerprint::of(&call);
                            assert_eq!(f.bits() & Fingerprint::STAGED, 0);
                            assert_eq!(Fingerprint::from_bits(f.bits() | Fingerprint::STAGED), f);
                            let text = f.to_string();
                            if matches!(kind, Kind::Barrier) {
                                continue;
                            }
                            let old = seen.insert(f.bits(), text.clone());
                            assert!(old.is_none_or(|old| old == text));
                            assert!(text.contains(&format!("{count} {dtype}")), "{text}");
                            assert_eq!(text.contains(&format!("root {root}")), kind.rooted(), "{text}");
                        }
                    }
                }
            }
        }
        let f = Fingerprint::of(&Call { op: ReduceOp::Max, ..Call::new(Kind::Reduce, DType::Bf16, 7) });
        assert_eq!(f.to_string(), "reduce of 7 bf16, max, root 0");
    }
}
