//! Tuning tables: what was measured to be fastest on one machine, per transport, number of ranks and collective.
//!
//! The text form has a line per entry, so that it can be read, edited and merged by hand:
//!
//! ```text
//! caravan-tuning 1
//! # transport ranks collective up_to small large from to
//! shm 2 all_reduce 4096 direct-read-all direct-rs-ag 512 134217728
//! ```
//!
//! A transport is named with its nodes and its link, as `bench tune` writes it: `shm+ucx/4`, `shm+shm/4@latency=1us`.
//!
//! A rule holds for calls of `from` to `to` bytes, around the sizes that were tried; the cost model decides about others. A
//! line without these two, as one by hand may be and those of the first tables are, holds for every size.
//!
//! Bytes are those of a call's [`count`](super::Call::count): of one shard in `reduce_scatter` and `all_gather`, of one block
//! in `gather`, `scatter` and `all_to_all`, of the whole otherwise. `small` goes up to `up_to` of them, where `all` is every
//! size that the rule holds for, and `large` above.

use super::tuner::{Rule, Sizes, Tuning};
use super::{Algorithm, Kind};
use std::fmt;
use std::str::FromStr;

/// The first line of the text form.
const HEAD: &str = "caravan-tuning 1";

/// Rules per transport and number of ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TuningTable {
    entries: Vec<Entry>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    transport: String,
    ranks: usize,
    kind: Kind,
    rule: Rule,
}

impl Entry {
    /// Whether it is for the calls of another.
    fn is_of(&self, other: &Entry) -> bool {
        (&self.transport, self.ranks, self.kind) == (&other.transport, other.ranks, other.kind)
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Entry { transport, ranks, kind, rule } = self;
        write!(f, "{transport} {ranks} {kind} {rule}")
    }
}

impl TuningTable {
    /// Sets the rule of one collective, in place of any older one.
    pub fn set(&mut self, transport: &str, ranks: usize, kind: Kind, rule: Rule) {
        let new = Entry { transport: transport.into(), ranks, kind, rule };
        self.entries.retain(|e| !e.is_of(&new));
        self.entries.push(new);
        self.entries.sort_by(|a, b| {
            (&a.transport, a.ranks, a.kind as usize).cmp(&(&b.transport, b.ranks, b.kind as usize))
        });
    }

    /// `base` with this table's rules for a group; None when it has none for this transport and number of ranks.
    pub fn apply(&self, transport: &str, ranks: usize, base: Tuning) -> Option<Tuning> {
        let mut tuning = base;
        let mut any = false;
        for entry in self.entries.iter().filter(|e| e.transport == transport && e.ranks == ranks) {
            tuning.measured[entry.kind as usize] = Some(entry.rule);
            any = true;
        }
        any.then_some(tuning)
    }

    /// What `text`, a table in text form or nothing, becomes with these rules in place of its own for the same groups and
    /// collectives. All other lines stay as they are, also comments.
    ///
    /// # Errors
    /// As [`from_str`](Self::from_str).
    pub fn merged_into(&self, text: &str) -> Result<String, String> {
        if text.trim().is_empty() {
            return Ok(self.to_string());
        }
        text.parse::<TuningTable>()?;
        let mut new: Vec<Option<&Entry>> = self.entries.iter().map(Some).collect();
        let mut lines = Vec::new();
        for line in text.lines() {
            let found =
                entry(line.trim()).ok().and_then(|old| self.entries.iter().position(|e| e.is_of(&old)));
            match found {
                // A group's first line has the place; a later one would go before it.
                Some(at) => lines.extend(new[at].take().map(Entry::to_string)),
                None => lines.push(line.to_owned()),
            }
        }
        lines.extend(new.into_iter().flatten().map(Entry::to_string));
        Ok(lines.join("\n") + "\n")
    }

    /// The groups that it has rules for: transport and number of ranks.
    pub fn groups(&self) -> Vec<(&str, usize)> {
        let mut groups: Vec<_> = self.entries.iter().map(|e| (e.transport.as_str(), e.ranks)).collect();
        groups.dedup();
        groups
    }
}

impl fmt::Display for TuningTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{HEAD}\n# transport ranks collective up_to small large from to")?;
        self.entries.iter().try_for_each(|entry| writeln!(f, "{entry}"))
    }
}

impl FromStr for TuningTable {
    type Err = String;

    /// Reads the text form. Errors name the line, and what was expected there.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut lines =
            text.lines().map(str::trim).zip(1..).filter(|(l, _)| !l.is_empty() && !l.starts_with('#'));
        match lines.next() {
            Some((HEAD, _)) => {}
            Some((other, line)) => {
                return Err(format!("line {line} is '{}' instead of '{HEAD}'", shown(other)));
            }
            None => return Err(format!("it is empty instead of starting with '{HEAD}'")),
        }
        let mut table = TuningTable::default();
        for (content, line) in lines {
            let entry = entry(content).map_err(|problem| format!("line {line}: {problem}"))?;
            table.set(&entry.transport, entry.ranks, entry.kind, entry.rule);
        }
        Ok(table)
    }
}

/// A field as messages repeat it, for any file may be taken for a table: no more of it than says which.
fn shown(field: &str) -> String {
    const MOST: usize = 40;
    match field.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}…", &field[..end]),
        None => field.to_owned(),
    }
}

fn entry(line: &str) -> Result<Entry, String> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let ([transport, ranks, kind, up_to, small, large] | [transport, ranks, kind, up_to, small, large, _, _]) =
        fields[..]
    else {
        return Err(format!(
            "{} fields instead of 8, or 6 for every size: transport ranks collective up_to small large from to",
            fields.len()
        ));
    };
    let whole = |name: &str, text: &str| {
        text.parse::<usize>().map_err(|_| format!("{name} is '{}' instead of a whole number", shown(text)))
    };
    let ranks = whole("ranks", ranks)?;
    let found = Kind::ALL.into_iter().find(|k| k.name() == kind);
    let kind = found.ok_or_else(|| format!("unknown collective '{}'", shown(kind)))?;
    let up_to = if up_to == "all" { usize::MAX } else { whole("up_to", up_to)? };
    let sizes = match fields[6..] {
        [from, to] => Sizes { from: whole("from", from)?, to: whole("to", to)? },
        _ => Sizes::ALL,
    };
    if sizes.from > sizes.to {
        return Err(format!("from is {}, above to, which is {}", sizes.from, sizes.to));
    }
    let algorithm = |name: &str| shown(name).parse::<Algorithm>();
    let rule = Rule { small: algorithm(small)?, up_to, large: algorithm(large)?, sizes };
    let possible = Algorithm::anywhere(kind);
    if let Some(other) = [rule.small, rule.large].into_iter().find(|a| !possible.contains(a)) {
        let names: Vec<&str> = possible.into_iter().map(Algorithm::name).collect();
        return Err(format!("{other} cannot carry {kind}: {} can", names.join(", ")));
    }
    Ok(Entry { transport: transport.into(), ranks, kind, rule })
}

#[cfg(test)]
mod tests {
    use super::super::tuner::{Why, choose};
    use super::super::{Call, Group};
    use super::*;
    use crate::element::DType;
    use crate::transport::Nodes;
    use std::sync::Arc;

    fn sample() -> TuningTable {
        let mut table = TuningTable::default();
        let (small, large) = (Algorithm::DirectReadAll, Algorithm::DirectReduceScatterAllGather);
        table.set("shm", 2, Kind::AllReduce, Rule::new(small, 1, large));
        let sizes = Sizes { from: 512, to: 65536 };
        table.set("shm", 2, Kind::AllReduce, Rule { sizes, ..Rule::new(small, 4096, large) });
        let pairwise = Algorithm::Pairwise;
        table.set("shm", 4, Kind::AllGather, Rule::new(pairwise, usize::MAX, pairwise));
        table
    }

    #[test]
    fn the_text_form_round_trips() {
        let text = sample().to_string();
        assert_eq!(text.lines().count(), 4, "{text}");
        assert!(text.contains("shm 2 all_reduce 4096 direct-read-all direct-rs-ag 512 65536\n"), "{text}");
        assert!(text.contains("shm 4 all_gather all pairwise pairwise\n"), "{text}");
        assert_eq!(text.parse(), Ok(sample()));
        assert_eq!(sample().groups(), [("shm", 2), ("shm", 4)]);
    }

    #[test]
    fn what_others_wrote_into_a_table_stays() {
        let mut new = TuningTable::default();
        let linear = Rule::new(Algorithm::Linear, usize::MAX, Algorithm::Linear);
        new.set("shm", 2, Kind::Reduce, linear);
        new.set("ucx", 2, Kind::Reduce, linear);
        let old = "# ours\ncaravan-tuning 1\n\n# slow link\nucx 2 reduce 64 linear linear\nshm 4 reduce all linear linear\n\
                   ucx 2 reduce 65 linear linear\n  # end";
        let merged = "# ours\ncaravan-tuning 1\n\n# slow link\nucx 2 reduce all linear linear\n\
                      shm 4 reduce all linear linear\n  # end\nshm 2 reduce all linear linear\n";
        assert_eq!(new.merged_into(old).as_deref(), Ok(merged));
        assert_eq!(new.merged_into("\n"), Ok(new.to_string()));
        assert!(new.merged_into("caravan-tuning 1\nshm two").unwrap_err().contains("line 2"));
    }

    #[test]
    fn a_rule_decides_only_for_its_group_kind_and_sizes() {
        let tuning = sample().apply("shm", 2, Tuning::default()).unwrap();
        assert_eq!(sample().apply("shm", 3, Tuning::default()), None);
        assert_eq!(sample().apply("mpi", 2, Tuning::default()), None);
        let group = Group { direct: Some(4096), tuning, ..Group::plain(0, 2) };
        let of = |kind, bytes| choose(&Call::new(kind, DType::U8, bytes), &group, None);
        assert_eq!(of(Kind::AllReduce, 4096).why, Why::Measured(Sizes { from: 512, to: 4096 }));
        assert_eq!(of(Kind::AllReduce, 4096).algorithm, Algorithm::DirectReadAll);
        assert_eq!(of(Kind::AllReduce, 4097).why, Why::Measured(Sizes { from: 4097, to: 65536 }));
        assert_eq!(of(Kind::AllReduce, 4097).algorithm, Algorithm::DirectReduceScatterAllGather);
        assert_eq!(of(Kind::AllGather, 4096).why, Why::Direct);
        let barrier = of(Kind::Barrier, 0);
        assert_eq!((barrier.why, barrier.reason(Kind::Barrier).contains("read")), (Why::Direct, false));
        // Of what was not tried nothing is known, and the reason says so.
        let by_cost = Group { tuning: Tuning::default(), ..group.clone() };
        for bytes in [0, 511, 65537, 64 << 20] {
            let (choice, cost) = (
                of(Kind::AllReduce, bytes),
                choose(&Call::new(Kind::AllReduce, DType::U8, bytes), &by_cost, None),
            );
            assert_eq!((choice.algorithm, choice.why), (cost.algorithm, cost.why), "{bytes}");
            let words = format!(
                "{} (the tuning table's rule is for calls from 512 to 65536 bytes)",
                cost.reason(Kind::AllReduce)
            );
            assert_eq!(choice.reason(Kind::AllReduce), words);
        }
        for (bytes, words) in [(512, "from 512 to 4096 bytes"), (65536, "from 4097 to 65536 bytes")] {
            let words = format!("measured to be fastest {words}");
            assert_eq!(of(Kind::AllReduce, bytes).reason(Kind::AllReduce), words);
        }
        // Not even a table makes every rank get all of large inputs.
        let mut all = TuningTable::default();
        let small = Algorithm::DirectReadAll;
        all.set("shm", 2, Kind::AllReduce, Rule::new(small, usize::MAX, small));
        let group = Group { tuning: all.apply("shm", 2, Tuning::default()).unwrap(), ..group };
        let why = choose(&Call::new(Kind::AllReduce, DType::U8, 64), &group, None).reason(Kind::AllReduce);
        assert_eq!(why, "as the tuning table has it for every size");
        let of = |bytes| choose(&Call::new(Kind::AllReduce, DType::U8, bytes), &group, None).algorithm;
        assert_eq!((of(64 << 20), of(1 + (64 << 20))), (small, Algorithm::DirectReduceScatterAllGather));
        // Memory of peers cannot be read here, so the rule's algorithm cannot be had.
        let messages = Group { direct: None, ..group.clone() };
        let choice = choose(&Call::new(Kind::AllReduce, DType::U8, 64), &messages, None);
        assert_eq!(choice.algorithm, Algorithm::ExchangeAll);
    }

    #[test]
    fn sums_of_16_bits_go_over_nodes_only_where_they_pay_themselves() {
        let units = Algorithm::Hierarchical;
        let rule = Rule::new(Algorithm::HierarchicalExchange, 4096, units);
        let tuned = |size, block| {
            let mut table = TuningTable::default();
            for kind in [Kind::AllReduce, Kind::Reduce] {
                table.set("shm+ucx", size, kind, rule);
            }
            for kind in [Kind::ReduceScatter, Kind::AllGather] {
                table.set("shm+ucx", size, kind, Rule { small: units, ..rule });
            }
            let tuning = table.apply("shm+ucx", size, Tuning::default()).unwrap();
            let nodes = Some(Arc::new(Nodes::blocks(size, block).unwrap()));
            Group { nodes, tuning, ..Group::plain(0, size) }
        };
        let of = |kind, dtype: DType, bytes, group: &Group| {
            choose(&Call::new(kind, dtype, bytes / dtype.size()), group, None)
        };
        let measured = |why| matches!(why, Why::Measured(_));
        // Nodes have to save more than half: eight unrounded bf16 in one do, and four do not.
        for (size, block, pays) in [(8, 4, false), (16, 8, true)] {
            let group = tuned(size, block);
            for kind in [Kind::ReduceScatter, Kind::Reduce, Kind::AllReduce] {
                for bytes in [64, 1 << 20] {
                    let holds = |dtype| measured(of(kind, dtype, bytes, &group).why);
                    // Large sums of all ranks are made without nodes then, and gathered with them.
                    let anyway = kind == Kind::AllReduce && bytes > 4096;
                    assert_eq!(holds(DType::Bf16), pays || anyway, "{kind} of {bytes} over {size}");
                    assert_eq!(holds(DType::F16), pays || anyway, "{kind} of {bytes} over {size}");
                    assert!(holds(DType::F32) && holds(DType::F64) && holds(DType::I8), "{kind} of {bytes}");
                }
            }
            assert!(
                measured(of(Kind::AllGather, DType::Bf16, 1 << 20, &group).why),
                "what is moved has no other length"
            );
        }
        let choice = of(Kind::ReduceScatter, DType::Bf16, 1 << 20, &tuned(8, 4));
        assert_eq!((choice.algorithm, choice.why), (Algorithm::Pairwise, Why::Ranks));
    }

    #[test]
    fn what_cannot_be_read_is_named_with_its_line() {
        for (text, words) in [
            ("", "empty"),
            ("# comment\n\n", "empty"),
            ("something else", "line 1"),
            ("caravan-tuning 1\n\nshm 2 all_reduce 1", "line 3: 4 fields"),
            ("caravan-tuning 1\nshm 2 reduce 1 linear linear 1", "7 fields"),
            ("caravan-tuning 1\nshm 2 reduce 1 linear linear 1 all", "to is 'all'"),
            ("caravan-tuning 1\nshm 2 reduce 1 linear linear 2 1", "from is 2, above to, which is 1"),
            ("caravan-tuning 1\nshm two all_reduce 1 linear linear", "ranks is 'two'"),
            ("caravan-tuning 1\nshm 2 all_shrink 1 linear linear", "'all_shrink'"),
            ("caravan-tuning 1\nshm 2 reduce -1 linear linear", "up_to is '-1'"),
            ("caravan-tuning 1\nshm 2 reduce 1 linear fastest", "'fastest'"),
            (
                "caravan-tuning 1\nshm 2 all_gather 1 pairwise binomial",
                "line 2: binomial cannot carry all_gather: direct-read, pairwise, bruck, hierarchical can",
            ),
        ] {
            let error = text.parse::<TuningTable>().unwrap_err();
            assert!(error.contains(words), "{text:?} gave {error}");
        }
        // Some other file, with lines of any length.
        let long = "é".repeat(100_000);
        for text in [
            long.clone(),
            format!("{HEAD}\nshm 2 reduce 1 linear {long}"),
            format!("{HEAD}\nshm {long} reduce 1 a b"),
        ] {
            let error = text.parse::<TuningTable>().unwrap_err();
            assert!(error.contains("éé…'") && error.len() < 1000, "{error}");
        }
    }
}
