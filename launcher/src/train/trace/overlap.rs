//! How much of its communication a training hides behind computing, from the spans of some steps.

use crate::human;
use collectives::trace::{Of, Span};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt;
use zero::Doing;

/// Means over the steps of all ranks that are whole, in seconds; of calls, what lies in a step.
#[derive(Debug, PartialEq)]
pub struct Overlap {
    /// How many steps, each rank's counted.
    steps: usize,
    /// What a step takes.
    step: f64,
    /// Of it, what starting, advancing and awaiting calls holds computing up for.
    exposed: f64,
    /// Of all calls together, and of each kind.
    calls: Vec<Calls>,
}

/// The same of some calls.
#[derive(Debug, PartialEq)]
struct Calls {
    /// Of which.
    of: String,
    /// How many a step begins.
    count: f64,
    /// For how long one or more are in flight.
    in_flight: f64,
    /// Of it, while communication holds computing up.
    exposed: f64,
}

/// What all calls are together.
const ALL: &str = "all";

/// Times without overlaps, in order.
type Times = Vec<(u64, u64)>;

impl Overlap {
    /// Of the spans of each rank, and when the first began that there was no room for. None where no step is whole.
    pub fn of<'a>(ranks: impl Iterator<Item = (&'a [Span], Option<u64>)>) -> Option<Self> {
        let (mut steps, mut totals) = (0, [0u64; 2]);
        let mut sums: BTreeMap<String, [u64; 3]> = BTreeMap::new();
        for (spans, lost) in ranks {
            let of = |wanted: Doing| {
                let found =
                    spans.iter().filter(move |span| Doing::from(span.of).is_some_and(|(d, _)| d == wanted));
                found.map(|span| (span.begin, span.end))
            };
            // A step that was not over by then may lack some of what lies in it, and so may all later ones.
            let whole = || of(Doing::Step).filter(|&(_, end)| lost.is_none_or(|since| end <= since));
            steps += whole().count();
            let within = union(whole());
            let exposed = both(&union(of(Doing::Exposed)), &within);
            let more = [length(&within), length(&exposed)];
            totals.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
            let mut calls: BTreeMap<String, Times> = BTreeMap::new();
            for span in spans {
                if let Of::Call(call) = span.of {
                    let kind = call.to_string().split(' ').next().unwrap_or_default().to_owned();
                    for of in [kind, ALL.to_owned()] {
                        calls.entry(of).or_default().push((span.begin, span.end));
                    }
                }
            }
            for (of, calls) in calls {
                let count = calls.iter().filter(|&&(begin, _)| is_in(begin, &within)).count() as u64;
                let in_flight = both(&union(calls.into_iter()), &within);
                let more = [count, length(&in_flight), length(&both(&in_flight, &exposed))];
                sums.entry(of).or_default().iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
            }
        }
        if steps == 0 {
            return None;
        }
        let mean = |sum: u64| sum as f64 / steps as f64;
        let calls = |(of, [count, in_flight, exposed]): (String, [u64; 3])| Calls {
            of,
            count: mean(count),
            in_flight: mean(in_flight) / 1e9,
            exposed: mean(exposed) / 1e9,
        };
        let calls = sums.into_iter().map(calls).collect();
        Some(Overlap { steps, step: mean(totals[0]) / 1e9, exposed: mean(totals[1]) / 1e9, calls })
    }

    /// How many steps it is of, each rank's counted.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// All of it.
    pub fn json(&self) -> Value {
        let of = |calls: &Calls| {
            json!({
                "calls": calls.of,
                "calls_per_step": calls.count,
                "in_flight_seconds_per_step": calls.in_flight,
                "exposed_seconds_per_step": calls.exposed,
            })
        };
        json!({
            "steps_of_ranks": self.steps,
            "seconds_per_step": self.step,
            "exposed_seconds_per_step": self.exposed,
            "of": self.calls.iter().map(of).collect::<Vec<_>>(),
        })
    }
}

impl fmt::Display for Overlap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = self.calls.iter().find(|calls| calls.of == ALL);
        write!(
            f,
            "a step takes {}, calls are in flight for {} of it, and computing is held up for {}",
            human::seconds(self.step),
            human::seconds(all.map_or(0.0, |all| all.in_flight)),
            human::seconds(self.exposed)
        )
    }
}

/// The same times without overlaps, in order.
fn union(times: impl Iterator<Item = (u64, u64)>) -> Times {
    let mut all: Times = times.collect();
    all.sort_unstable();
    let mut apart = Times::new();
    for (begin, end) in all {
        match apart.last_mut() {
            Some((_, last)) if begin <= *last => *last = end.max(*last),
            _ => apart.push((begin, end)),
        }
    }
    apart
}

/// The times that are in both of these, which are in order and without overlaps.
fn both(one: &[(u64, u64)], other: &[(u64, u64)]) -> Times {
    let (mut one, mut other) = (one.iter().peekable(), other.iter().peekable());
    let mut all = Vec::new();
    while let (Some(&&(a, b)), Some(&&(c, d))) = (one.peek(), other.peek()) {
        if a.max(c) < b.min(d) {
            all.push((a.max(c), b.min(d)));
        }
        if b < d {
            one.next()
        } else {
            other.next()
        };
    }
    all
}

/// Whether a moment is in times which are in order and without overlaps.
fn is_in(moment: u64, times: &[(u64, u64)]) -> bool {
    let begun = times.partition_point(|&(begin, _)| begin <= moment);
    begun > 0 && moment < times[begun - 1].1
}

fn length(times: &[(u64, u64)]) -> u64 {
    times.iter().map(|(begin, end)| end - begin).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use collectives::DType;
    use collectives::schedule::{Call, Kind};
    use collectives::watch::Fingerprint;

    #[test]
    fn times_are_joined_and_cut() {
        let joined = union([(5, 7), (0, 3), (2, 4), (4, 5), (9, 10)].into_iter());
        assert_eq!(joined, [(0, 7), (9, 10)]);
        assert_eq!(both(&joined, &[(1, 2), (6, 9), (9, 20)]), [(1, 2), (6, 7), (9, 10)]);
        assert_eq!(both(&joined, &[]), []);
        assert_eq!(length(&joined), 8);
    }

    #[test]
    fn a_moment_is_in_times_where_it_shares_something_with_them() {
        for times in [&[][..], &[(3, 3)], &[(2, 4), (5, 5), (7, 9)], &[(0, 1), (4, 6)]] {
            for moment in 0..12 {
                let shares = !both(&[(moment, moment + 1)], times).is_empty();
                assert_eq!(is_in(moment, times), shares, "{moment} in {times:?}");
            }
        }
    }

    #[test]
    fn what_lies_in_steps_counts_and_what_holds_computing_up_is_exposed() {
        let second = 1_000_000_000;
        let span = |of: Of, begin: u64, end: u64| Span { of, begin: begin * second, end: end * second };
        let call = |kind: Kind| Of::Call(Fingerprint::of(&Call::new(kind, DType::Bf16, 8)));
        let spans = [
            span(Doing::Step.of(1), 10, 20),
            span(Doing::Step.of(2), 25, 35),
            // Under way when the first step begins, between two steps, and when the last ends.
            span(call(Kind::AllGather), 8, 14),
            span(call(Kind::AllGather), 12, 16),
            span(call(Kind::AllGather), 21, 24),
            span(call(Kind::ReduceScatter), 15, 19),
            span(call(Kind::ReduceScatter), 33, 40),
            span(Doing::Exposed.of(0), 9, 13),
            span(Doing::Exposed.of(0), 18, 19),
            span(Doing::Exposed.of(0), 22, 23),
            // With nothing in flight.
            span(Doing::Exposed.of(0), 30, 31),
            span(Doing::Backward.of(1), 10, 20),
        ];
        let other = [span(Doing::Step.of(1), 10, 18), span(Doing::Step.of(2), 26, 38)];
        let of_all = |lost| Overlap::of([(&spans[..], None), (&other, lost)].into_iter());
        let found = of_all(None).unwrap();
        let of = |of: &str, count, in_flight, exposed| Calls { of: of.to_owned(), count, in_flight, exposed };
        let expected = Overlap {
            steps: 4,
            step: 10.0,
            exposed: 5.0 / 4.0,
            calls: vec![
                of("all", 0.75, 11.0 / 4.0, 1.0),
                of("all_gather", 0.25, 6.0 / 4.0, 3.0 / 4.0),
                of("reduce_scatter", 0.5, 6.0 / 4.0, 1.0 / 4.0),
            ],
        };
        assert_eq!(found, expected);
        let said =
            "a step takes 10.0 s, calls are in flight for 2.8 s of it, and computing is held up for 1.2 s";
        assert_eq!(found.to_string(), said);
        // Of a rank whose room ended in its second step only the first counts, and its times not as 0.
        let found = of_all(Some(30 * second)).unwrap();
        assert_eq!((found.steps, found.step), (3, 28.0 / 3.0));
        assert_eq!(Overlap::of([(&other[..], Some(11 * second))].into_iter()), None);
        assert_eq!(Overlap::of([].into_iter()), None);
    }
}
