//! Where a few steps of a training go, as a file for Perfetto and Chrome: of each rank what it computes and waits for, and
//! below that its calls in flight.

use crate::about::generator;
use crate::agree;
use crate::failure::Result;
use crate::files;
use crate::human;
use crate::plan::{Traced, TrainPlan};
use collectives::trace::{Of, Span, Trace};
use collectives::{Communicator, Float};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write;
use zero::{Doing, Trainer};

/// Spans of all ranks together, some 200 MiB as text.
const MOST: usize = 1 << 20;
/// And of one.
const MOST_OF_A_RANK: usize = 1 << 18;
/// Rank 0 fetches the others' under this tag.
const TAG: u32 = 1;

/// A trace under way on one rank.
pub struct Tracing<'a> {
    wanted: &'a Traced,
    trace: Trace,
    /// When all ranks had met for it.
    origin: u64,
}

/// The spans of one rank.
struct OfRank {
    rank: usize,
    host: String,
    spans: Vec<Span>,
    /// What its times are told from.
    origin: u64,
}

impl<'a> Tracing<'a> {
    /// Has `trainer` say what it does, once that is wanted. All ranks call it.
    ///
    /// # Errors
    /// Another rank is gone.
    pub fn begin<T: Float>(wanted: &'a Traced, trainer: &mut Trainer<T>) -> Result<Self> {
        let trace = Trace::new(MOST_OF_A_RANK.min(MOST / trainer.comm().size()));
        trainer.trace(&trace);
        // Clocks of different hosts have nothing else in common.
        trainer.comm().barrier()?;
        Ok(Tracing { wanted, trace, origin: Trace::now() })
    }

    /// Before a step, counted from 1. All ranks call it.
    pub fn before(&self, step: usize) {
        self.trace.want(self.wanted.steps.contains(&step));
    }

    /// After it: writes the file if that was the last one, and gives rank 0 what to say. All ranks call it.
    ///
    /// # Errors
    /// Another rank is gone; as the inner one, a file that cannot be written.
    pub fn after(
        &self,
        step: usize,
        plan: &TrainPlan,
        comm: &Communicator,
    ) -> Result<Option<Result<String>>> {
        if step != *self.wanted.steps.end() {
            return Ok(None);
        }
        self.trace.want(false);
        let (spans, lost) = self.trace.take();
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let host = collectives::bootstrap::host_name();
        let said =
            agree::exchange(comm, &format!("{} {} {lost} {} {host}", spans.len(), self.origin, boot.trim()))?;
        let packed: Vec<u64> = spans.iter().flat_map(|span| span.pack()).collect();
        if comm.rank() > 0 {
            comm.send(&packed[..], 0, TAG)?;
            return Ok(None);
        }
        let (mut ranks, mut lost) = (Vec::with_capacity(comm.size()), 0);
        let first: Vec<&str> = said[0].split(' ').collect();
        for (rank, text) in said.iter().enumerate() {
            let words: Vec<&str> = text.split(' ').collect();
            let number =
                |at: usize| words.get(at).and_then(|word| word.parse::<u64>().ok()).unwrap_or_default();
            let mut theirs = vec![0u64; 4 * number(0) as usize];
            match rank {
                0 => theirs.copy_from_slice(&packed),
                _ => comm.recv(&mut theirs[..], rank, TAG)?,
            }
            let (spans, _) = theirs.as_chunks::<4>();
            let spans = spans.iter().map(|&numbers| Span::unpack(numbers)).collect();
            lost += number(2);
            // Ranks of one host share its clock.
            let origin = if words.get(3) == first.get(3) { self.origin } else { number(1) };
            let host = words.get(4).copied().unwrap_or_default().to_owned();
            ranks.push(OfRank { rank: comm.job_rank(rank), host, spans, origin });
        }
        Ok(Some(self.write(&ranks, lost, plan)))
    }

    fn write(&self, ranks: &[OfRank], lost: u64, plan: &TrainPlan) -> Result<String> {
        let Traced { path, steps } = self.wanted;
        let count = steps.clone().count();
        let units: Vec<String> = plan.model.config.units().into_iter().map(|unit| unit.name).collect();
        let overlap = overlap(ranks, count);
        let about = [
            ("generator", generator()),
            ("args", std::env::args_os().map(|arg| arg.to_string_lossy().into_owned()).collect()),
            ("steps", json!([steps.start(), steps.end()])),
            ("spans_without_room", lost.into()),
            ("overlap", overlap.iter().map(Overlap::json).collect()),
            ("displayTimeUnit", "ms".into()),
        ];
        let mut text = String::from("{\n");
        for (name, value) in about {
            let _ = writeln!(text, "{}: {value},", Value::from(name));
        }
        text.push_str("\"traceEvents\": [\n");
        ranks.iter().for_each(|rank| rank.events(&units, &mut text));
        text.truncate(text.trim_end_matches([',', '\n']).len());
        text.push_str("\n]\n}\n");
        files::write_whole(path, text.as_bytes())?;
        let all = overlap.iter().find(|overlap| overlap.of.is_none());
        let said = all.map_or(String::new(), |all| {
            format!(
                ": calls are in flight for {} of a step, and computing waits for {} of that",
                human::seconds(all.in_flight),
                human::seconds(all.exposed)
            )
        });
        let without = match lost {
            0 => String::new(),
            lost => format!(" (without {lost} spans, for which there was no room)"),
        };
        Ok(format!(
            "trace of steps {} to {} in {}{without}{said}",
            steps.start(),
            steps.end(),
            path.display()
        ))
    }
}

impl OfRank {
    /// Its events, each on a line that ends with a comma.
    fn events(&self, units: &[String], text: &mut String) {
        let pid = self.rank;
        let mut name = |what: &str, tid: usize, name: &str| {
            let event = json!({"ph": "M", "pid": pid, "tid": tid, "name": what, "args": {"name": name}});
            let _ = writeln!(text, "{event},");
        };
        name("process_name", 0, &format!("rank {pid} on {}", self.host));
        name("thread_name", 0, "step");
        let mut calls: Vec<(&Span, String)> = self.spans.iter().filter_map(called).collect();
        calls.sort_by_key(|(span, _)| span.begin);
        // Those in flight at once, each in a row that is free.
        let mut rows: Vec<u64> = Vec::new();
        let mut placed = Vec::with_capacity(calls.len());
        for (span, call) in calls {
            let free = rows.iter().position(|&until| until <= span.begin);
            let row = free.unwrap_or_else(|| {
                rows.push(0);
                name("thread_name", rows.len(), "calls in flight");
                rows.len() - 1
            });
            rows[row] = span.end;
            placed.push((span, 1 + row, call));
        }
        let doings = self.spans.iter().filter_map(|span| {
            let (doing, which) = Doing::from(span.of)?;
            let name = match doing {
                Doing::Step => format!("step {which}"),
                Doing::Forward | Doing::Backward => {
                    format!("{} {}", doing.name(), units.get(which).map_or("", String::as_str))
                }
                Doing::Exposed | Doing::Update => doing.name().to_owned(),
            };
            Some((span, 0, name))
        });
        for (span, tid, name) in doings.chain(placed) {
            // Microseconds; what began before all had met for it is told from there.
            let begin = span.begin.saturating_sub(self.origin) as f64 / 1e3;
            let lasted = (span.end - span.begin) as f64 / 1e3;
            let name = Value::from(name);
            let _ = writeln!(
                text,
                r#"{{"ph":"X","pid":{pid},"tid":{tid},"ts":{begin:.3},"dur":{lasted:.3},"name":{name}}},"#
            );
        }
    }
}

/// A call, and what it is.
fn called(span: &Span) -> Option<(&Span, String)> {
    match span.of {
        Of::Call(call) => Some((span, call.to_string())),
        Of::Work(..) => None,
    }
}

/// How long calls were in flight, and how long of that nothing was computed.
#[derive(Debug, PartialEq)]
struct Overlap {
    /// What they are calls of; all kinds for None.
    of: Option<String>,
    /// How many, of a rank in a step.
    calls: f64,
    /// Seconds of a step, of the mean rank, in which one or more were in flight.
    in_flight: f64,
    /// Of them, those in which computing waited for communication.
    exposed: f64,
}

impl Overlap {
    fn json(&self) -> Value {
        json!({
            "calls": self.of.as_deref().unwrap_or("all"),
            "calls_per_step": self.calls,
            "in_flight_seconds_per_step": self.in_flight,
            "exposed_seconds_per_step": self.exposed,
        })
    }
}

/// The same of each kind of call, and of all of them, over so many steps.
fn overlap(ranks: &[OfRank], steps: usize) -> Vec<Overlap> {
    let mut sums: BTreeMap<Option<String>, [u64; 3]> = BTreeMap::new();
    for OfRank { spans, .. } in ranks {
        let exposed = spans.iter().filter(|span| matches!(Doing::from(span.of), Some((Doing::Exposed, _))));
        let exposed = union(exposed.map(|span| (span.begin, span.end)));
        let mut calls: BTreeMap<Option<String>, Vec<(u64, u64)>> = BTreeMap::new();
        for (span, call) in spans.iter().filter_map(called) {
            let kind = call.split(' ').next().unwrap_or_default().to_owned();
            for of in [Some(kind), None] {
                calls.entry(of).or_default().push((span.begin, span.end));
            }
        }
        for (of, calls) in calls {
            let count = calls.len() as u64;
            let in_flight = union(calls.into_iter());
            let sum = sums.entry(of).or_default();
            let more = [count, length(&in_flight), length(&both(&in_flight, &exposed))];
            sum.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
        }
    }
    let each = (ranks.len() * steps) as f64;
    let of = |(of, [calls, in_flight, exposed]): (Option<String>, [u64; 3])| Overlap {
        of,
        calls: calls as f64 / each,
        in_flight: in_flight as f64 / each / 1e9,
        exposed: exposed as f64 / each / 1e9,
    };
    sums.into_iter().map(of).collect()
}

/// The same times without overlaps, in order.
fn union(times: impl Iterator<Item = (u64, u64)>) -> Vec<(u64, u64)> {
    let mut all: Vec<(u64, u64)> = times.collect();
    all.sort_unstable();
    let mut apart: Vec<(u64, u64)> = Vec::new();
    for (begin, end) in all {
        match apart.last_mut() {
            Some((_, last)) if begin <= *last => *last = end.max(*last),
            _ => apart.push((begin, end)),
        }
    }
    apart
}

/// The times that are in both of these, which are in order and without overlaps.
fn both(one: &[(u64, u64)], other: &[(u64, u64)]) -> Vec<(u64, u64)> {
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

fn length(times: &[(u64, u64)]) -> u64 {
    times.iter().map(|(begin, end)| end - begin).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use collectives::DType;
    use collectives::schedule::{Call, Kind};
    use collectives::watch::Fingerprint;

    fn span(of: Of, begin: u64, end: u64) -> Span {
        Span { of, begin, end }
    }

    fn call(kind: Kind) -> Of {
        Of::Call(Fingerprint::of(&Call::new(kind, DType::Bf16, 8)))
    }

    #[test]
    fn times_are_joined_and_cut() {
        let joined = union([(5, 7), (0, 3), (2, 4), (4, 5), (9, 10)].into_iter());
        assert_eq!(joined, [(0, 7), (9, 10)]);
        assert_eq!(both(&joined, &[(1, 2), (6, 9), (9, 20)]), [(1, 2), (6, 7), (9, 10)]);
        assert_eq!(both(&joined, &[]), []);
        assert_eq!(length(&joined), 8);
    }

    #[test]
    fn what_is_exposed_of_calls_is_where_nothing_is_computed_beside_them() {
        let second = 1_000_000_000;
        let spans = vec![
            span(call(Kind::AllGather), 0, 4 * second),
            span(call(Kind::AllGather), 2 * second, 6 * second),
            span(call(Kind::ReduceScatter), 5 * second, 10 * second),
            span(Doing::Exposed.of(0), 3 * second, 5 * second),
            span(Doing::Exposed.of(0), 9 * second, 12 * second),
            span(Doing::Backward.of(1), 0, 12 * second),
        ];
        let rank = |rank, spans| OfRank { rank, host: "h".into(), spans, origin: 0 };
        let found = overlap(&[rank(0, spans), rank(1, vec![])], 2);
        let of = |of: Option<&str>, calls, in_flight, exposed| Overlap {
            of: of.map(str::to_owned),
            calls,
            in_flight,
            exposed,
        };
        let expected = [
            of(None, 0.75, 2.5, 0.75),
            of(Some("all_gather"), 0.5, 1.5, 0.5),
            of(Some("reduce_scatter"), 0.25, 1.25, 0.25),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn calls_that_are_in_flight_at_once_are_in_rows_of_their_own() {
        let spans = vec![
            span(call(Kind::AllGather), 2000, 5000),
            span(call(Kind::ReduceScatter), 1000, 3000),
            span(call(Kind::AllGather), 3000, 4000),
            span(Doing::Step.of(3), 500, 6000),
            span(Doing::Forward.of(1), 600, 900),
        ];
        let mut text = String::new();
        OfRank { rank: 4, host: "n7".into(), spans, origin: 500 }
            .events(&["embed".into(), "b\"0".into()], &mut text);
        let events: Value =
            serde_json::from_str(&format!("[{}]", text.trim_end().trim_end_matches(','))).unwrap();
        let rows: Vec<(u64, f64, f64, &str)> = events
            .as_array()
            .unwrap()
            .iter()
            .filter(|event| event["ph"] == "X")
            .map(|event| {
                let number = |name: &str| event[name].as_f64().unwrap();
                (event["tid"].as_u64().unwrap(), number("ts"), number("dur"), event["name"].as_str().unwrap())
            })
            .collect();
        let expected = [
            (0, 0.0, 5.5, "step 3"),
            (0, 0.1, 0.3, "forward b\"0"),
            (1, 0.5, 2.0, "reduce_scatter of 8 bf16, sum"),
            (2, 1.5, 3.0, "all_gather of 8 bf16"),
            (1, 2.5, 1.0, "all_gather of 8 bf16"),
        ];
        assert_eq!(rows, expected);
        assert_eq!(events[0]["args"]["name"], "rank 4 on n7");
    }
}
