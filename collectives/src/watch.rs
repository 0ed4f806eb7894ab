//! What a call is, in 64 bits that ranks compare, and for how long a silent peer is waited for.

use crate::element::{DType, ReduceOp};
use crate::schedule::{Call, Kind};
use std::fmt;
use std::time::Duration;

/// How long a peer may be silent before the call fails, unless set otherwise.
pub const DEADLINE: Duration = Duration::from_secs(600);

/// The largest count that a fingerprint can hold.
pub const MAX_COUNT: usize = (1 << 37) - 1;
/// The most ranks of one group.
pub const MAX_SIZE: usize = 1 << 14;

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

    /// As it travels.
    pub fn bits(self) -> u64 {
        self.0
    }

    /// From the wire, without the bit that says how the peer publishes.
    pub fn from_bits(bits: u64) -> Self {
        Fingerprint(bits & !Self::STAGED)
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = (self.0 >> 59).checked_sub(1).and_then(|k| Kind::ALL.get(k as usize));
        let dtype = DTYPES.get((self.0 >> 55 & 0xf) as usize);
        let op = OPS.get((self.0 >> 52 & 7) as usize);
        let root = self.0 >> 38 & 0x3fff;
        let count = self.0 >> 1 & MAX_COUNT as u64;
        let (Some(&kind), Some(dtype), Some(op)) = (kind, dtype, op) else {
            return write!(f, "something unknown ({:#x})", self.0);
        };
        match kind {
            Kind::Barrier => return f.write_str("barrier"),
            Kind::Send => return write!(f, "a message of {count} {dtype}"),
            _ => write!(f, "{kind} of {count} {dtype}")?,
        }
        if kind.reduces() {
            write!(f, ", {op}")?;
        }
        if kind.rooted() {
            write!(f, ", root {root}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({self})")
    }
}

/// In the order of their discriminants.
const DTYPES: [DType; 10] = [
    DType::F32,
    DType::F64,
    DType::F16,
    DType::Bf16,
    DType::I32,
    DType::I64,
    DType::U32,
    DType::U64,
    DType::I8,
    DType::U8,
];
const OPS: [ReduceOp; 5] =
    [ReduceOp::Sum, ReduceOp::Average, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fingerprints_tell_calls_apart_and_name_them() {
        let mut seen = std::collections::HashMap::new();
        for kind in Kind::ALL {
            for (d, &dtype) in DTYPES.iter().enumerate() {
                assert_eq!(dtype as usize, d);
                for (o, &op) in OPS.iter().enumerate() {
                    assert_eq!(op as usize, o);
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
