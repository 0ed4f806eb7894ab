//! Which sizes a run goes through, and how often it repeats each.

use super::operation::Operation;
use collectives::DType;

/// How sizes grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Each is the last times this.
    Factor(usize),
    /// Each is the last plus this many bytes.
    Bytes(usize),
}

/// Sizes from `begin` to `end`, both included where they are hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sweep {
    pub begin: usize,
    pub end: usize,
    pub step: Step,
}

impl Sweep {
    /// Of what has no data.
    pub const NOTHING: Sweep = Sweep { begin: 0, end: 0, step: Step::Factor(2) };

    /// Checks what can be checked before the number of ranks is known.
    ///
    /// # Errors
    /// A sentence about flags that describe no sweep.
    pub fn new(begin: usize, end: usize, step: Step) -> Result<Self, String> {
        if end < begin {
            return Err(format!("-e {end} is below -b {begin}: a sweep goes up from -b to -e"));
        }
        match step {
            Step::Factor(factor) if factor < 2 && begin < end => Err(format!(
                "-f {factor} never grows: give a factor of at least 2, or -i with a step in bytes"
            )),
            Step::Factor(_) if begin == 0 && end > 0 => {
                Err("-b 0 never grows by a factor: give -b at least 1, or -i with a step in bytes".into())
            }
            Step::Bytes(0) if begin < end => {
                Err("-i 0 never grows: give a step of at least one element, or -f with a factor".into())
            }
            _ => Ok(Sweep { begin, end, step }),
        }
    }

    /// The flags that set the largest size: without -e, or where both are the same, -b does too.
    pub fn end_flags(&self) -> &'static str {
        if self.begin == self.end { "-b and -e" } else { "-e" }
    }

    /// Checks the sizes against what is measured.
    ///
    /// # Errors
    /// A sentence when a size is no whole number of elements, or the largest leaves a rank none.
    pub fn check(&self, operation: Operation, dtype: DType, ranks: usize) -> Result<(), String> {
        if operation == Operation::Barrier {
            return Ok(());
        }
        let element = dtype.size();
        let whole = |flag: &str, bytes: usize| match bytes % element {
            0 => Ok(()),
            rest => Err(format!(
                "{flag} {bytes} does not divide into elements of {dtype}, which have {element} bytes: the next \
                 that does is {}",
                bytes + element - rest
            )),
        };
        whole("-b", self.begin)?;
        if let (Step::Bytes(step), true) = (self.step, self.begin < self.end) {
            whole("-i", step)?;
        }
        let (largest, least) = (self.largest(), operation.least_bytes(element, ranks));
        if self.begin > 0 && largest < least {
            let why = match operation.parted() {
                true => format!("each of {ranks} ranks has a part of a multiple of 16 bytes"),
                false => format!("an element of {dtype} has {element} bytes"),
            };
            return Err(format!(
                "the largest size of this sweep, {largest}, leaves {} no element: {why}, so the least size is {least} (-b, \
                 -e)",
                operation.name()
            ));
        }
        Ok(())
    }

    /// The largest size in bytes.
    pub fn largest(&self) -> usize {
        match self.step {
            // There may be more sizes than can be gone through.
            Step::Bytes(step) if step > 0 => self.end - (self.end - self.begin) % step,
            _ => self.sizes().last().unwrap_or(self.begin),
        }
    }

    /// How many sizes there are up to so many bytes.
    pub fn up_to(&self, bytes: usize) -> usize {
        let end = self.end.min(bytes);
        match self.step {
            _ if end < self.begin => 0,
            // There may be more than can be gone through.
            Step::Bytes(step) if step > 0 => (end - self.begin) / step + 1,
            _ => Sweep { end, ..*self }.sizes().count(),
        }
    }

    /// The sizes that would come before `first` and after `last`.
    pub fn beside(&self, first: usize, last: usize) -> (usize, usize) {
        match self.step {
            Step::Factor(factor) => (first / factor.max(1), last.saturating_mul(factor.max(1))),
            Step::Bytes(bytes) => (first.saturating_sub(bytes), last.saturating_add(bytes)),
        }
    }

    /// The sizes that leave every rank an element, or the size that is meant to be nothing. nccl-tests' table has the
    /// smaller ones as rows of no bytes; elsewhere such rows would say nothing.
    pub fn filled(
        &self,
        operation: Operation,
        element: usize,
        ranks: usize,
    ) -> impl Iterator<Item = usize> + use<> {
        let least = operation.least_bytes(element, ranks);
        self.sizes().filter(move |&size| size == 0 || size >= least)
    }

    /// The sizes in bytes, ascending.
    pub fn sizes(&self) -> impl Iterator<Item = usize> + use<> {
        let Sweep { end, step, .. } = *self;
        std::iter::successors(Some(self.begin), move |&size| match step {
            Step::Factor(factor) => size.checked_mul(factor).filter(|&next| next > size),
            Step::Bytes(bytes) => size.checked_add(bytes).filter(|&next| next > size),
        })
        .take_while(move |&size| size <= end)
    }
}

/// Up to which size calls are repeated how often when the user does not say: OSU's habit of many short calls and fewer long
/// ones, because twenty calls of a microsecond say nothing.
pub const DEFAULT_ITERATIONS: [(usize, usize); 3] = [(8192, 1000), (1 << 20, 100), (usize::MAX, 20)];

/// How often calls of this size are.
pub fn default_iterations(bytes: usize) -> usize {
    let of = DEFAULT_ITERATIONS.iter().find(|(most, _)| bytes <= *most);
    of.map_or(1, |(_, calls)| *calls)
}

/// Untimed calls before the timed ones of a size when the user does not say: a tenth, at least two.
pub fn default_warmup(iterations: usize) -> usize {
    (iterations / 10).max(2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_grow_by_factor_or_step_and_include_both_ends() {
        let by = |begin, end, step| {
            let sweep = Sweep::new(begin, end, step).unwrap();
            let sizes: Vec<usize> = sweep.sizes().collect();
            assert_eq!(sizes.last(), Some(&sweep.largest()));
            for most in [0, 7, 1024, 5000, usize::MAX] {
                assert_eq!(sweep.up_to(most), sizes.iter().filter(|&&size| size <= most).count());
            }
            sizes
        };
        assert_eq!(by(1024, 65536, Step::Factor(4)), [1024, 4096, 16384, 65536]);
        assert_eq!(by(8, 20, Step::Factor(2)), [8, 16]);
        assert_eq!(by(0, 12, Step::Bytes(4)), [0, 4, 8, 12]);
        assert_eq!(by(1, 12, Step::Bytes(4)), [1, 5, 9]);
        assert_eq!(by(7, 7, Step::Bytes(0)), [7]);
        assert_eq!(by(0, 0, Step::Factor(2)), [0]);
        let beside = |step| Sweep::new(8, 8, step).unwrap().beside(8, 64);
        assert_eq!([Step::Factor(2), Step::Bytes(12)].map(beside), [(4, 128), (0, 76)]);
        assert_eq!([Step::Factor(0), Step::Factor(1)].map(beside), [(8, 64), (8, 64)]);
        assert_eq!(by(usize::MAX / 2, usize::MAX, Step::Factor(4)), [usize::MAX / 2]);
    }

    #[test]
    fn sweeps_that_make_no_sense_are_refused() {
        for (begin, end, step, words) in [
            (2048, 1024, Step::Factor(2), &["-e 1024", "-b 2048"]),
            (8, 1024, Step::Factor(1), &["-f 1", "-i"]),
            (8, 1024, Step::Factor(0), &["-f 0", "-i"]),
            (0, 1024, Step::Factor(2), &["-b 0", "-i"]),
            (8, 1024, Step::Bytes(0), &["-i 0", "-f"]),
        ] {
            let text = Sweep::new(begin, end, step).unwrap_err();
            assert!(words.iter().all(|w| text.contains(w)), "{text}");
        }
        // One size need not grow: -f 1 is nccl-tests' own default.
        let one = Sweep::new(8, 8, Step::Factor(1)).unwrap();
        assert!(one.sizes().eq([8]) && one.largest() == 8);
    }

    #[test]
    fn sizes_must_fit_elements_and_ranks() {
        let sweep = |begin| Sweep::new(begin, 1 << 20, Step::Factor(2)).unwrap();
        assert_eq!(sweep(8).check(Operation::AllReduce, DType::F32, 2), Ok(()));
        let e = sweep(6).check(Operation::AllReduce, DType::F32, 2).unwrap_err();
        assert!(e.contains("-b 6") && e.contains("f32") && e.contains("is 8"), "{e}");
        assert_eq!(sweep(8).check(Operation::AllGather, DType::F32, 2), Ok(()));
        let little = Sweep::new(8, 31, Step::Factor(2)).unwrap();
        let e = little.check(Operation::AllGather, DType::F32, 2).unwrap_err();
        assert!(
            e.contains("of this sweep, 16, leaves all_gather") && e.contains("size is 32 (-b, -e)"),
            "{e}"
        );
        // Not what -e says: the size after 24 is above it.
        let beyond = Sweep::new(24, 40, Step::Factor(4)).unwrap();
        assert!(
            beyond.check(Operation::AllGather, DType::F32, 2).unwrap_err().contains("of this sweep, 24,")
        );
        assert_eq!(little.check(Operation::Broadcast, DType::F32, 2), Ok(()));
        let filled = |operation| sweep(8).filled(operation, 4, 2).next();
        assert_eq!((filled(Operation::AllGather), filled(Operation::AllReduce)), (Some(32), Some(8)));
        assert_eq!(Sweep::NOTHING.filled(Operation::AllGather, 4, 2).count(), 1);
        let stepped = Sweep::new(16, 1 << 20, Step::Bytes(10)).unwrap();
        assert!(stepped.check(Operation::Reduce, DType::F64, 2).unwrap_err().contains("-i 10"));
        assert_eq!(sweep(1).check(Operation::Barrier, DType::F64, 2), Ok(()));
    }

    #[test]
    fn short_calls_are_repeated_more_often() {
        let counts = [0, 8192, 8193, 1 << 20, (1 << 20) + 1].map(default_iterations);
        assert_eq!(counts, [1000, 1000, 100, 100, 20]);
        assert_eq!([1000, 20, 1].map(default_warmup), [100, 2, 2]);
    }
}
