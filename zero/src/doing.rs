//! What a rank of a training does, as it stands in a [`Trace`].

use collectives::trace::{Of, Trace};

/// What a span of a training is of. Those of a step lie in it, and waits in whatever is held up by them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doing {
    /// A step, counted from 1.
    Step,
    /// The forward of a unit.
    Forward,
    /// The backward of a unit.
    Backward,
    /// Starting, advancing or awaiting collectives: what overlap did not hide. Less than a microsecond is left out.
    Exposed,
    /// All that comes after a step's last backward: the rest of its reductions, the norm and the update.
    Update,
}

/// Looks at calls that found nothing to do.
const SHORTEST: u64 = 1000;

impl Doing {
    /// In the order of their numbers.
    const ALL: [Doing; 5] = [Doing::Step, Doing::Forward, Doing::Backward, Doing::Exposed, Doing::Update];

    /// As a trace has it, with the number of the step or the unit.
    pub fn of(self, which: usize) -> Of {
        Of::Work(self as u32, which as u32)
    }

    /// What a trace has, and of which step or unit; None of a call, or of another program's doings.
    pub fn from(of: Of) -> Option<(Self, usize)> {
        match of {
            Of::Work(what, which) => Some((*Doing::ALL.get(what as usize)?, which as usize)),
            Of::Call(_) => None,
        }
    }

    /// In a word.
    pub fn name(self) -> &'static str {
        match self {
            Doing::Step => "step",
            Doing::Forward => "forward",
            Doing::Backward => "backward",
            Doing::Exposed => "exposed communication",
            Doing::Update => "update",
        }
    }

    /// Does it, and says so to `trace`.
    pub(crate) fn traced<R>(self, which: usize, trace: Option<&Trace>, work: impl FnOnce() -> R) -> R {
        let begun = trace.map(|trace| (trace, trace.begin()));
        let done = work();
        if let Some((trace, begun)) = begun
            && (self != Doing::Exposed || begun.so_far() >= SHORTEST)
        {
            trace.end(self.of(which), begun);
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use collectives::trace::Span;

    #[test]
    fn what_is_done_is_told_from_calls_and_from_each_other() {
        for doing in Doing::ALL {
            let span = Span { of: doing.of(300), begin: 1, end: 2 };
            assert_eq!(Doing::from(Span::unpack(span.pack()).of), Some((doing, 300)));
        }
        assert_eq!(Doing::from(Of::Work(5, 0)), None);
    }
}
