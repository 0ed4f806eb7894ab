//! `bench tune`: which algorithm is fastest at which size here, written as a table that `auto` goes by.

use super::args::{Average, Calls, TuneArgs};
use super::calls::{self, Party, Work};
use super::kept::is_replaced;
use super::measure::over_ranks;
use super::operation::Operation;
use super::plan::Repeats;
use super::slot::Slot;
use super::start::Start;
use super::statistics::median;
use super::sweep::Sweep;
use crate::agree;
use crate::failure::{Failure, Result};
use crate::files::{self, Way};
use crate::human;
use crate::machine::Machine;
use crate::plan::{Ranks, with_ranks};
use crate::printed::Printed;
use crate::tuning;
use collectives::schedule::{Algorithm, Kind, Rule, Sizes, Tuning, TuningTable};
use collectives::{Communicator, DType};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Rounds over all algorithms of a size: the best round counts, so that a disturbance hits one of them only.
const ROUNDS: usize = 3;
/// A change of algorithm has to gain this much, as a sum of logarithms over sizes: 5 per cent at one size.
const WORTH: f64 = 0.05;

/// Measures and writes the table.
///
/// # Errors
/// Usage, or what a call said.
pub fn tune(args: &TuneArgs) -> Result<()> {
    // The environment may name the table that is still to be written.
    let mut start = Start::on_hosts("bench tune", &args.ranks, false)?;
    let world = start.ranks.world;
    let repeats = check(args, world, start.identity.is_some())?;
    start.bind(repeats.bind, false)?;
    let of = |operation| {
        let works = forms(operation, repeats.sweep.largest(), world);
        calls::footprint(&works, size_of::<f32>(), world)
    };
    // One operation follows the other. Of what is tried some gives everybody all inputs at once, and packs some of them
    // into messages; their memory stays.
    let tried = repeats.sweep.largest().min(Algorithm::Bruck.most(world)) as u64;
    let inputs = 2 * tried * (world * world) as u64;
    let bytes = Operation::ALL.into_iter().map(of).max().unwrap_or(0).saturating_add(inputs);
    let lower = human::either([(repeats.sweep.end_flags(), true), ("--ranks", start.fewer(2))]);
    start.check_memory(bytes, &format!("lower {lower}"))?;
    // What is no file, a pipe or the screen, has no table to go on from, nor has a file that was only made.
    let blank = |file: PathBuf| std::fs::read_to_string(file).is_ok_and(|text| text.trim().is_empty());
    if files::place(&args.out).is_some_and(|file| file.exists() && !blank(file)) {
        tuning::read(&args.out)?;
    }
    start.go(&|| files::check_writable("-o", &args.out, Way::Whole), &|comm, _| {
        rank(args, &repeats, &start.ranks, comm)?;
        Ok(None)
    })
}

/// What is repeated between `world` ranks, which something else has `started` or will.
///
/// # Errors
/// Flags that describe no sweep, one that leaves a rank nothing, or one rank.
pub fn check(args: &TuneArgs, world: usize, started: bool) -> Result<Repeats> {
    if let Some(table) = &args.ranks.tuning {
        return Err(Failure::usage(format!(
            "--tuning {}: bench tune measures every algorithm itself and writes the table that -o names; leave --tuning \
             away",
            table.display()
        )));
    }
    if world < 2 {
        let way = with_ranks(2, started);
        return Err(Failure::usage(format!("one rank has nothing to tune: {way} or more")));
    }
    let repeats = Repeats::plan(&args.sweep)?;
    for operation in Operation::ALL {
        repeats.sweep.check(operation, DType::F32, world).map_err(Failure::usage)?;
    }
    Ok(repeats)
}

fn rank(args: &TuneArgs, repeats: &Repeats, ranks: &Ranks, comm: Communicator) -> Result<()> {
    let (mut table, group) = (TuningTable::default(), ranks.group(comm.nodes()));
    let mut signature = vec![("operation", "tune".to_owned())];
    signature.extend(repeats.signature());
    agree::check(&comm, &signature)?;
    let party = Party { comm: comm.clone(), native: None, device: None };
    let lead = comm.rank() == 0;
    let place = Place { group: format!("{group} {}", comm.size()), machine: Machine::probe() };
    let out = Printed::new(&comm, args.ranks.quiet)?;
    out.text(&format!(
        "# caravan version {} tuning transport {} ranks {}\n# {:>15} {:>12}  time (us) per algorithm, out of place/in place, \
         best first\n",
        env!("CARGO_PKG_VERSION"),
        group,
        comm.size(),
        "collective",
        "size (B)"
    ))?;
    for operation in Operation::ALL {
        let kind = operation.kind();
        let algorithms = comm.algorithms(kind);
        if algorithms.len() < 2 {
            continue;
        }
        let rule = measure(operation, repeats, algorithms, &party, &out)?;
        out.text(&format!("# {}\n", sentence(operation, &rule)))?;
        table.set(&group, comm.size(), kind, rule);
        // What ends a run ends it between two collectives at best. Whether the file can be written is said at the end.
        let mut remark = String::new();
        if lead && is_replaced(&args.out) {
            let there = write(&args.out, &table, &place).unwrap_or_default();
            if let Some(sizes) = lost(&there, &group, comm.size(), kind, rule.sizes) {
                let (name, sizes) = (operation.name(), sizes.of(kind));
                remark =
                    format!("# {name}: in place of a rule for calls {sizes}, also where nothing was tried\n");
            }
        }
        out.text(&remark)?;
    }
    if lead {
        write(&args.out, &table, &place)?;
    }
    out.last(&format!("# written to {}; use it with --tuning or {}\n", args.out.display(), tuning::VARIABLE));
    out.end()
}

/// A group as its rules begin, and the machine that they are measured on.
struct Place {
    group: String,
    machine: Machine,
}

impl Place {
    /// The text of a table with a comment before the group's rules that says where they are from, in place of the one of an
    /// earlier run. Nothing reads it: it is for who wonders why a table does not suit another machine.
    fn noted(&self, table: &str) -> String {
        let Place { group, machine } = self;
        let start = format!("# {group} last measured on ");
        let mut lines: Vec<&str> = table.lines().filter(|line| !line.starts_with(&start)).collect();
        let note = format!("{start}{}, {}", machine.host, machine.cpu);
        let of_group =
            |line: &&str| line.strip_prefix(group.as_str()).is_some_and(|rest| rest.starts_with(' '));
        let first = lines.iter().position(of_group).unwrap_or(lines.len());
        lines.insert(first, &note);
        lines.join("\n") + "\n"
    }
}

/// Puts the table's rules into the file, in place of those for the same collectives of the same group; what was there.
fn write(out: &Path, table: &TuningTable, place: &Place) -> Result<String> {
    let mut there = String::new();
    // Others may have written there since this run began.
    files::change_whole(out, |old| {
        there.push_str(old);
        let broken = |e| Failure::run(format!("tuning table {}: {e}", out.display()));
        table.merged_into(old).map(|new| place.noted(&new)).map_err(broken)
    })?;
    Ok(there)
}

/// The sizes of the rule that the table had for a collective, if the new rule is not for all of them.
fn lost(table: &str, group: &str, ranks: usize, kind: Kind, new: Sizes) -> Option<Sizes> {
    let old = table.parse::<TuningTable>().ok()?.apply(group, ranks, Tuning::default())?;
    let old = old.measured[kind as usize]?.sizes;
    (old.from < new.from || new.to < old.to).then_some(old)
}

fn sentence(operation: Operation, rule: &Rule) -> String {
    let (name, small) = (operation.name(), rule.small);
    match (operation, rule.up_to) {
        // It has no sizes.
        (Operation::Barrier, _) => format!("{name}: {small}"),
        (_, usize::MAX) => format!("{name}: {small} {}", rule.sizes.of(operation.kind())),
        (_, up_to) => {
            let below = Sizes { to: up_to, ..rule.sizes }.of(operation.kind());
            format!("{name}: {small} {below}, {} up to {}", rule.large, rule.sizes.to)
        }
    }
}

/// One size of one collective: the call's bytes, and what each algorithm costs.
#[derive(Clone, Debug)]
struct Point {
    bytes: usize,
    costs: Vec<f64>,
}

impl Point {
    /// Of the `seconds` that each algorithm takes in each form.
    fn new(bytes: usize, seconds: &[Vec<f64>]) -> Self {
        Point { bytes, costs: costs(seconds) }
    }
}

/// How many times as long as by the fastest algorithm a call takes by each, in the form where that is more. A rule is for calls
/// in place and out of place alike, and trainings make both: by the sum of the two it could lose much in one, for a little less
/// in the other.
fn costs(seconds: &[Vec<f64>]) -> Vec<f64> {
    let fastest =
        |form: usize| seconds.iter().map(|times| times[form]).fold(f64::INFINITY, f64::min).max(1e-9);
    let cost =
        |times: &Vec<f64>| times.iter().enumerate().map(|(form, s)| s / fastest(form)).fold(1.0, f64::max);
    seconds.iter().map(cost).collect()
}

/// A call of so many bytes in each form that there is: out of place and in place, or the only one.
fn forms(operation: Operation, bytes: usize, ranks: usize) -> Vec<Work> {
    let work = Work::new(operation, Calls::Blocking, bytes, size_of::<f32>(), ranks);
    let mut placements = operation.placements(Calls::Blocking, false).to_vec();
    placements.dedup();
    placements.into_iter().map(|placement| Work { placement, ..work }).collect()
}

/// Tries all algorithms at all sizes of the sweep, and says which rule they make.
fn measure(
    operation: Operation,
    repeats: &Repeats,
    algorithms: &[Algorithm],
    party: &Party,
    out: &Printed<'_>,
) -> Result<Rule> {
    let comm = &party.comm;
    let forms = |bytes: usize| forms(operation, bytes, comm.size());
    let sweep = if operation == Operation::Barrier { Sweep::NOTHING } else { repeats.sweep };
    let (send, receive) = Slot::<f32>::capacity(forms(sweep.largest()).into_iter(), comm.rank());
    let mut slot = Slot::<f32>::new(comm, send, receive, true)?;
    slot.touch();
    let asked =
        |bytes: usize| operation.counts(bytes, size_of::<f32>(), comm.size()).count * size_of::<f32>();
    let tried: Vec<usize> = sweep.filled(operation, size_of::<f32>(), comm.size()).collect();
    let mut points = Vec::new();
    for &bytes in &tried {
        let (works, asked) = (forms(bytes), asked(bytes));
        // What `auto` may not take for so many bytes is not measured, and never the least.
        let mut seconds = vec![vec![f64::INFINITY; works.len()]; algorithms.len()];
        for _ in 0..ROUNDS {
            let all = seconds.iter_mut().zip(algorithms);
            for (times, &algorithm) in all.filter(|(_, algorithm)| algorithm.suits(asked, comm.size())) {
                comm.force(operation.kind(), Some(algorithm))?;
                for (best, work) in times.iter_mut().zip(&works) {
                    slot.fit(work, comm.rank());
                    *best = best.min(time(work, &mut slot, repeats, bytes, party)?);
                }
            }
        }
        comm.force(operation.kind(), None)?;
        let point = Point::new(asked, &seconds);
        out.text(&row(&works[0], (&seconds, &point.costs), algorithms))?;
        points.push(point);
    }
    let (first, last) = (tried.first().copied().unwrap_or(0), tried.last().copied().unwrap_or(0));
    let (before, after) = sweep.beside(first, last);
    let sizes = Sizes { from: between(asked(before), asked(first)), to: between(asked(last), asked(after)) };
    Ok(Rule { sizes, ..fit(&points, algorithms) })
}

/// Where what is known of one size ends and what is known of the other begins: of the sizes between the two nothing was tried,
/// and their geometric mean is the fairest guess. Nothing has none.
fn between(below: usize, above: usize) -> usize {
    if below == 0 { above / 2 } else { (below as f64 * above as f64).sqrt() as usize }
}

/// The median over calls of the slowest rank's time: the same on all ranks, as the table has to be.
fn time(work: &Work, slot: &mut Slot<f32>, repeats: &Repeats, bytes: usize, party: &Party) -> Result<f64> {
    let comm = &party.comm;
    // Three rounds of a fifth each take about as long as a plain run.
    let iterations = repeats.iterations(bytes).div_ceil(5).max(3);
    for _ in 0..repeats.warmup(bytes).div_ceil(5).max(2) {
        work.once(party, slot)?;
    }
    let mut mine = Vec::with_capacity(iterations);
    for _ in 0..iterations {
        slot.renew(work, comm.rank());
        comm.barrier()?;
        let start = Instant::now();
        work.once(party, slot)?;
        mine.push(start.elapsed().as_secs_f64());
    }
    Ok(median(&over_ranks(comm, &mine, Average::Max)?))
}

fn row(work: &Work, (seconds, costs): (&[Vec<f64>], &[f64]), algorithms: &[Algorithm]) -> String {
    let mut sorted: Vec<_> = costs.iter().zip(seconds).zip(algorithms).collect();
    sorted.retain(|((cost, _), _)| cost.is_finite());
    sorted.sort_by(|((a, _), _), ((b, _), _)| a.total_cmp(b));
    let us = |times: &[f64]| times.iter().map(|s| format!("{:.2}", s * 1e6)).collect::<Vec<_>>().join("/");
    let times: Vec<String> = sorted.iter().map(|((_, times), a)| format!("{a} {}", us(times))).collect();
    let size = work.counts.bytes(size_of::<f32>());
    format!("{:>17} {size:>12}  {}\n", work.operation.name(), times.join("  "))
}

/// The two algorithms and the size between them that cost least over all sizes, each size weighing the same: the
/// least sum of logarithms of costs. One algorithm for all unless two are worth it.
fn fit(points: &[Point], algorithms: &[Algorithm]) -> Rule {
    let cost =
        |algorithm: usize, range: &[Point]| -> f64 { range.iter().map(|p| p.costs[algorithm].ln()).sum() };
    let best = |range: &[Point]| {
        (0..algorithms.len())
            .map(|a| (cost(a, range), a))
            .min_by(|x, y| x.0.total_cmp(&y.0))
            .unwrap_or((0.0, 0))
    };
    let (alone, single) = best(points);
    let mut rule = Rule::new(algorithms[single], usize::MAX, algorithms[single]);
    let mut least = alone - WORTH;
    for split in 1..points.len() {
        let ((below, small), (above, large)) = (best(&points[..split]), best(&points[split..]));
        if below + above < least {
            least = below + above;
            let up_to = between(points[split - 1].bytes, points[split].bytes);
            rule = Rule::new(algorithms[small], up_to, algorithms[large]);
        }
    }
    rule
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::calls::Placement;

    const TWO: [Algorithm; 2] = [Algorithm::Linear, Algorithm::Pairwise];

    /// Of what each of the two takes in the only form of a call.
    fn points(seconds: &[[f64; 2]]) -> Vec<Point> {
        let point = |(i, times): (usize, &[f64; 2])| Point::new(1024 << (2 * i), &times.map(|s| vec![s]));
        seconds.iter().enumerate().map(point).collect()
    }

    #[test]
    fn a_rule_changes_where_the_measurements_cross() {
        let rule = fit(&points(&[[1.0, 5.0], [2.0, 6.0], [20.0, 7.0], [90.0, 20.0]]), &TWO);
        assert_eq!(rule, Rule::new(TWO[0], 8192, TWO[1]));
    }

    #[test]
    fn a_rule_loses_least_in_the_form_in_which_it_loses_more() {
        // A little faster out of place, and twice as slow in place, as where what peers read has to be copied first.
        let point = Point::new(1024, &[vec![1.0, 8.0], vec![1.25, 4.0]]);
        assert_eq!(point.costs, [2.0, 1.25]);
        let all = Rule::new(TWO[1], usize::MAX, TWO[1]);
        assert_eq!(fit(&[point], &TWO), all);
        // The sum of both forms, or of their logarithms, would have been the first one's.
        assert_eq!(costs(&[vec![1.0, 2.0], vec![1.5, 1.75], vec![4.0, 1.0]]), [2.0, 1.75, 4.0]);
        // What was not tried is never the least.
        assert_eq!(costs(&[vec![f64::INFINITY; 2], vec![3.0, 4.0]]), [f64::INFINITY, 1.0]);
    }

    #[test]
    fn both_forms_of_a_call_are_tried_where_there_are_two() {
        use Placement::{In, Out};
        for (operation, placements) in [
            (Operation::AllReduce, &[Out, In][..]),
            (Operation::AllGather, &[Out, In]),
            (Operation::Broadcast, &[In]),
            (Operation::Barrier, &[Out]),
        ] {
            let tried: Vec<_> = forms(operation, 1024, 2).iter().map(|work| work.placement).collect();
            assert_eq!(tried, placements, "{operation:?}");
        }
    }

    #[test]
    fn what_is_known_of_large_sizes_is_not_known_of_the_smallest() {
        assert_eq!(between(1 << 10, 4 << 10), 2 << 10);
        // As below a first size of no more than -i adds.
        assert_eq!((between(0, 2 << 20), between(0, 0)), (1 << 20, 0));
    }

    #[test]
    fn a_table_says_once_for_each_group_where_it_was_measured() {
        let of = |group: &str, host: &str| {
            let machine = Machine { host: host.into(), cpu: "A Processor".into(), ..Machine::probe() };
            Place { group: group.into(), machine }
        };
        let table = "caravan-tuning 1\n# ours\nshm 21 barrier all direct-read direct-read\n\
                     shm 2 reduce all linear linear\nshm 2 barrier all direct-read direct-read\n";
        let once = of("shm 2", "first").noted(table);
        let noted =
            table.replace("shm 2 reduce", "# shm 2 last measured on first, A Processor\nshm 2 reduce");
        assert_eq!(once, noted);
        let twice = of("shm 2", "second").noted(&of("shm 21", "first").noted(&once));
        let noted = noted.replace("first", "second");
        let both = noted.replace("shm 21 b", "# shm 21 last measured on first, A Processor\nshm 21 b");
        assert_eq!(twice, both);
        // Who reads a table passes over it.
        assert_eq!(twice.parse::<TuningTable>(), table.parse());
    }

    #[test]
    fn a_rule_that_loses_sizes_says_which() {
        let table = "caravan-tuning 1\nshm 2 reduce all linear linear 512 131072\nshm 2 barrier all dissemination dissemination\n";
        let lost = |kind, from, to| lost(table, "shm", 2, kind, Sizes { from, to });
        let old = Some(Sizes { from: 512, to: 131_072 });
        assert_eq!(lost(Kind::Reduce, 512, 2048), old);
        assert_eq!(lost(Kind::Reduce, 1024, 1 << 30), old);
        assert_eq!(lost(Kind::Reduce, 0, 131_072), None);
        assert_eq!(lost(Kind::Broadcast, 1, 1), None);
        assert_eq!(lost(Kind::Barrier, 0, 0), Some(Sizes::ALL));
        let sizes = Sizes { from: 512, to: 131_072 };
        let one = Rule { sizes, ..Rule::new(TWO[0], usize::MAX, TWO[0]) };
        assert_eq!(sentence(Operation::Reduce, &one), "reduce: linear from 512 to 131072 bytes");
        let two = Rule { up_to: 8192, large: TWO[1], ..one };
        let words = "all_to_all: linear from 512 to 8192 bytes a part, pairwise up to 131072";
        assert_eq!(sentence(Operation::AllToAll, &two), words);
    }

    #[test]
    fn one_algorithm_stays_one_rule_and_noise_does_not_split_it() {
        let all = Rule::new(TWO[1], usize::MAX, TWO[1]);
        assert_eq!(fit(&points(&[[2.0, 1.0], [3.0, 2.0], [9.0, 4.0]]), &TWO), all);
        assert_eq!(fit(&points(&[[0.99, 1.0], [3.0, 2.0], [9.0, 4.0]]), &TWO), all);
        assert_eq!(fit(&points(&[[2.0, 1.0]]), &TWO), all);
    }
}
