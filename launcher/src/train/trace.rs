//! Where a few steps of a training go, as a file for Perfetto and Chrome: of each rank what it computes and waits for, and
//! below that its calls in flight.

mod overlap;

use crate::about::generator;
use crate::agree;
use crate::failure::Result;
use crate::files;
use crate::plan::{Traced, TrainPlan};
use collectives::trace::{Lost, Of, Span, Trace};
use collectives::{Communicator, Float};
use overlap::Overlap;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fmt::Write;
use std::ops::RangeInclusive;
use zero::{Doing, Trainer};

/// Spans of all ranks together, some 200 MiB as text.
const MOST: usize = 1 << 20;
/// And of one.
const MOST_OF_A_RANK: usize = 1 << 18;
/// A step has at least itself, a forward, a backward and an update.
const LEAST_OF_A_STEP: usize = 4;

/// A trace under way on one rank.
pub struct Tracing<'a> {
    wanted: &'a Traced,
    trace: Trace,
    /// When all ranks had met for the first of its steps.
    origin: u64,
    over: bool,
}

/// The spans of one rank.
struct OfRank {
    rank: usize,
    host: String,
    spans: Vec<Span>,
    /// Those for which there was no room.
    lost: Lost,
    /// What its times are told from.
    origin: u64,
}

/// A trace of these steps, with room for so many spans. Some of it is for the steps themselves, which end after all that
/// lies in them and would be the first to be lost.
fn room(steps: &RangeInclusive<usize>, spans: usize) -> Trace {
    let reserved = steps.clone().count().min(spans / LEAST_OF_A_STEP);
    Trace::reserving(spans - reserved, reserved)
}

impl<'a> Tracing<'a> {
    /// Has `trainer` say what it does, once that is wanted.
    pub fn begin<T: Float>(wanted: &'a Traced, trainer: &mut Trainer<T>) -> Self {
        let trace = room(&wanted.steps, MOST_OF_A_RANK.min(MOST / trainer.comm().size()));
        trainer.trace(Some(&trace));
        Tracing { wanted, trace, origin: 0, over: false }
    }

    /// Before a step, counted from 1. All ranks call it.
    ///
    /// # Errors
    /// Another rank is gone.
    pub fn before(&mut self, step: usize, comm: &Communicator) -> Result<()> {
        if step == *self.wanted.steps.start() {
            // Clocks of different hosts have nothing else in common.
            comm.barrier()?;
            self.origin = Trace::now();
        }
        self.trace.want(self.wanted.steps.contains(&step));
        Ok(())
    }

    /// After it: writes the file if that was the last one, and gives rank 0 what to say. All ranks call it.
    ///
    /// # Errors
    /// Another rank is gone; as the inner one, a file that cannot be written.
    pub fn after<T: Float>(
        &mut self,
        step: usize,
        plan: &TrainPlan,
        trainer: &mut Trainer<T>,
    ) -> Result<Option<Result<String>>> {
        // What lies between steps is no part of them.
        self.trace.want(false);
        if step != *self.wanted.steps.end() {
            return Ok(None);
        }
        self.over = true;
        // What the step has begun is told, too.
        trainer.settle()?;
        trainer.trace(None);
        let ranks = self.collect(trainer.comm())?;
        Ok(ranks.map(|ranks| self.write(&ranks, plan)))
    }

    /// What is to be said of a run that ends before its time.
    pub fn missing(&self) -> Option<String> {
        let Traced { path, steps } = self.wanted;
        let last = steps.end();
        let why = || format!("no trace was written to {}, for step {last} was not made", path.display());
        (!self.over).then(why)
    }

    /// All ranks' spans, on rank 0.
    fn collect(&self, comm: &Communicator) -> Result<Option<Vec<OfRank>>> {
        let (spans, lost) = self.trace.take();
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let (boot, host) = (boot.trim(), collectives::bootstrap::host_name());
        let since = lost.since.map_or("-".to_owned(), |since| since.to_string());
        let said = agree::exchange(comm, &format!("{} {} {since} {boot} {host}", self.origin, lost.count))?;
        let packed: Vec<u64> = spans.iter().flat_map(|span| span.pack()).collect();
        let Some(all) = agree::gather(comm, &packed)? else { return Ok(None) };
        let mut ranks = Vec::with_capacity(comm.size());
        let mut origins: HashMap<&str, u64> = HashMap::new();
        for (rank, (text, theirs)) in said.iter().zip(all).enumerate() {
            let words: Vec<&str> = text.split(' ').collect();
            let word = |at: usize| words.get(at).copied().unwrap_or_default();
            let number = |at: usize| word(at).parse::<u64>().unwrap_or_default();
            let (spans, _) = theirs.as_chunks::<4>();
            let spans = spans.iter().map(|&numbers| Span::unpack(numbers)).collect();
            let lost = Lost { count: number(1), since: word(2).parse().ok() };
            // Ranks of one host share its clock.
            let origin = *origins.entry(word(3)).or_insert(number(0));
            ranks.push(OfRank { rank: comm.job_rank(rank), host: word(4).to_owned(), spans, lost, origin });
        }
        Ok(Some(ranks))
    }

    fn write(&self, ranks: &[OfRank], plan: &TrainPlan) -> Result<String> {
        let Traced { path, steps } = self.wanted;
        let units: Vec<String> = plan.model.config.units().into_iter().map(|unit| unit.name).collect();
        let overlap = Overlap::of(ranks.iter().map(|rank| (&rank.spans[..], rank.lost.since)));
        let lost: u64 = ranks.iter().map(|rank| rank.lost.count).sum();
        let about = [
            // By which it is told from other files of this program.
            ("displayTimeUnit", "ms".into()),
            ("generator", generator()),
            ("args", std::env::args_os().map(|arg| arg.to_string_lossy().into_owned()).collect()),
            ("steps", json!([steps.start(), steps.end()])),
            ("spans_without_room", lost.into()),
            ("overlap", overlap.as_ref().map_or(Value::Null, Overlap::json)),
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
        let (first, last) = (steps.start(), steps.end());
        let found = found(overlap.as_ref(), lost, ranks.len() * steps.clone().count());
        Ok(format!("trace of steps {first} to {last} in {}{found}", path.display()))
    }
}

/// What a trace is without, and what it shows of the steps that it has whole, of `all`, each rank's counted.
fn found(overlap: Option<&Overlap>, lost: u64, all: usize) -> String {
    let without = format!("without {lost} spans, for which there was no room");
    match overlap {
        Some(overlap) if lost == 0 => format!(": {overlap}"),
        Some(overlap) => format!(
            " ({without}): by the {} of {all} steps of ranks that are whole, {overlap}",
            overlap.steps()
        ),
        None => format!(
            " ({without}): no step of a rank is whole, so that nothing can be said of its communication; fewer --trace-steps \
             take less room"
        ),
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
            // Microseconds. What was under way before is told from where all had met for the trace.
            let begun = span.begin.max(self.origin);
            let begin = (begun - self.origin) as f64 / 1e3;
            let lasted = span.end.saturating_sub(begun) as f64 / 1e3;
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
    fn calls_that_are_in_flight_at_once_are_in_rows_of_their_own() {
        let spans = vec![
            span(call(Kind::AllGather), 2000, 5000),
            span(call(Kind::ReduceScatter), 1000, 3000),
            span(call(Kind::AllGather), 3000, 4000),
            span(Doing::Step.of(3), 500, 6000),
            span(Doing::Forward.of(1), 600, 900),
        ];
        let mut text = String::new();
        OfRank { rank: 4, host: "n7".into(), spans, lost: Lost::default(), origin: 500 }
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

    #[test]
    fn steps_that_are_whole_are_summed_up_where_there_is_no_room_for_all() {
        // Steps of six spans each.
        let traced = |steps: RangeInclusive<usize>, spans: usize| {
            let trace = room(&steps, spans);
            trace.want(true);
            for step in steps.clone() {
                let begun = trace.begin();
                for unit in 0..5 {
                    trace.end(Doing::Forward.of(unit), trace.begin());
                }
                trace.end_reserved(Doing::Step.of(step), begun);
            }
            let (spans, lost) = trace.take();
            let overlap = Overlap::of([(&spans[..], lost.since)].into_iter());
            (
                spans.len(),
                overlap.as_ref().map(Overlap::steps),
                found(overlap.as_ref(), lost.count, steps.count()),
            )
        };
        let (spans, whole, said) = traced(3..=6, 24);
        assert!((spans, whole) == (24, Some(4)) && said.starts_with(": a step takes "), "{said}");
        let (spans, whole, said) = traced(3..=6, 17);
        let words = " (without 7 spans, for which there was no room): by the 2 of 4 steps of ranks that are whole, a step takes ";
        assert!((spans, whole) == (17, Some(2)) && said.starts_with(words), "{said}");
        let (_, whole, said) = traced(3..=6, 5);
        assert!(whole.is_none() && said.contains("no step of a rank is whole"), "{said}");
        // What is reserved for steps leaves room for what lies in them.
        let (spans, whole, _) = traced(1..=1000, 60);
        assert_eq!((spans, whole), (60, Some(9)));
    }
}
