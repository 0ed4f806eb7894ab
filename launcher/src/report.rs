//! What each rank held, what it sent and where its time went: gathered over the ranks, shown as a table.

mod lines;

use crate::human;
use crate::layers;
use collectives::Communicator;
pub use lines::{Lines, classes};
use serde_json::{Value, json};
use zero::{Memory, Placement};

/// More ranks than this are shown as least, mean and most, and so are fewer that a terminal has no room for.
const COLUMNS: usize = 6;

/// One rank's account of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankReport {
    /// Bytes held per class, as measured.
    pub memory: Memory,
    /// Bytes held in all, as predicted.
    pub predicted: usize,
    /// The process's peak resident set in bytes, shared memory included; None where the system does not say, and where the
    /// process is another rank's too, which says it.
    pub peak_rss: Option<u64>,
    /// Bytes sent over all steps.
    pub bytes_sent: u64,
    /// Seconds of all steps: in forward and backward.
    pub compute: f64,
    /// In collectives that nothing hid.
    pub exposed: f64,
    /// In clipping and the optimizer.
    pub optimizer: f64,
    /// In making batches.
    pub data: f64,
    /// In evaluation.
    pub evaluation: f64,
    /// Standing still for checkpoints.
    pub checkpoints: f64,
    /// Of the whole loop.
    pub total: f64,
}

impl RankReport {
    /// Numbers of one rank on the wire.
    const WIDTH: usize = 17;

    fn pack(&self) -> [f64; Self::WIDTH] {
        let mut wire = [0.0; Self::WIDTH];
        for (place, (_, bytes)) in wire.iter_mut().zip(self.memory.classes()) {
            *place = bytes as f64;
        }
        let rest = [
            self.predicted as f64,
            self.peak_rss.map_or(-1.0, |bytes| bytes as f64),
            self.bytes_sent as f64,
            self.compute,
            self.exposed,
            self.optimizer,
            self.data,
            self.evaluation,
            self.checkpoints,
            self.total,
        ];
        wire[7..].copy_from_slice(&rest);
        wire
    }

    fn unpack(wire: &[f64]) -> Self {
        RankReport {
            memory: Memory {
                parameters: wire[0] as usize,
                gradients: wire[1] as usize,
                optimizer: wire[2] as usize,
                buckets: wire[3] as usize,
                activations: wire[4] as usize,
                workspace: wire[5] as usize,
                host: wire[6] as usize,
            },
            predicted: wire[7] as usize,
            peak_rss: (wire[8] >= 0.0).then_some(wire[8] as u64),
            bytes_sent: wire[9] as u64,
            compute: wire[10],
            exposed: wire[11],
            optimizer: wire[12],
            data: wire[13],
            evaluation: wire[14],
            checkpoints: wire[15],
            total: wire[16],
        }
    }

    /// The accounts of all ranks, on every rank. Byte counts below 2^53 travel exactly.
    pub fn gather(&self, comm: &Communicator) -> collectives::Result<Vec<RankReport>> {
        let mut all = vec![0.0f64; Self::WIDTH * comm.size()];
        comm.all_gather(&self.pack()[..], &mut all[..])?;
        Ok(all.chunks(Self::WIDTH).map(Self::unpack).collect())
    }

    /// What was neither compute, nor communication, nor any other named thing.
    fn other(&self) -> f64 {
        let named =
            [self.compute, self.exposed, self.optimizer, self.data, self.evaluation, self.checkpoints];
        (self.total - named.iter().sum::<f64>()).max(0.0)
    }

    /// The same as JSON.
    pub fn json(&self, rank: usize) -> Value {
        json!({
            "rank": rank,
            "memory": memory_json(&self.memory),
            "predicted_bytes": self.predicted,
            "peak_rss_bytes": self.peak_rss,
            "bytes_sent": self.bytes_sent,
            "compute_seconds": self.compute,
            "exposed_communication_seconds": self.exposed,
            "optimizer_seconds": self.optimizer,
            "data_seconds": self.data,
            "evaluation_seconds": self.evaluation,
            "checkpoint_seconds": self.checkpoints,
            "seconds": self.total,
        })
    }
}

/// Bytes per class by name, and their sum.
pub fn memory_json(memory: &Memory) -> Value {
    let mut map: serde_json::Map<String, Value> =
        memory.classes().iter().map(|(name, bytes)| (name.to_string(), json!(bytes))).collect();
    map.insert("total".into(), json!(memory.total()));
    Value::Object(map)
}

/// The peak resident set in bytes of the process of this rank of `comm`, if the system says it, and of ranks that are threads of
/// one process only on the first: the others have no memory of their own that could be told from it.
pub fn peak_rss(comm: &Communicator) -> Option<u64> {
    if comm.rank() > 0 && layers::in_one_process(comm.transport_name()) {
        return None;
    }
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib << 10)
}

/// Whether the peak of the first of these ranks is of the process of them all.
fn share_process(ranks: &[RankReport]) -> bool {
    matches!(ranks, [first, others @ ..] if first.peak_rss.is_some()
        && !others.is_empty() && others.iter().all(|rank| rank.peak_rss.is_none()))
}

/// One part of a rank's time.
type Seconds = fn(&RankReport) -> f64;

/// The table of a run of `steps` steps, with what is on the device and what on the host where there are both. On a terminal of
/// so many columns (`room`) its lines are not longer than that, if they need not be.
pub fn table(ranks: &[RankReport], steps: usize, placement: Placement, room: Option<usize>) -> String {
    let spread = ranks.len() > COLUMNS;
    let whole = Table::of(ranks, steps, placement, spread);
    match room {
        Some(room) if !spread && ranks.len() > SPREAD.len() && whole.lines.width() > room => {
            Table::of(ranks, steps, placement, true).lines.text()
        }
        _ => whole.lines.text(),
    }
}

/// What many ranks are shown as.
const SPREAD: [&str; 3] = ["least", "mean", "most"];

/// The ranks of a table, and what there is of it.
struct Table<'a> {
    ranks: &'a [RankReport],
    spread: bool,
    lines: Lines,
}

impl<'a> Table<'a> {
    /// Every rank's column, or the `spread` over them.
    fn of(ranks: &'a [RankReport], steps: usize, placement: Placement, spread: bool) -> Self {
        let names = match spread {
            false => (0..ranks.len()).map(|r| format!("rank {r}")).collect(),
            true => SPREAD.map(String::from).to_vec(),
        };
        let mut table = Table { ranks, spread, lines: Lines::new("held", names) };
        for (index, name) in classes(placement) {
            table.row(name, |r| r.memory.classes()[index].1 as f64, |x| human::bytes(x as u64));
        }
        if placement.on_device() {
            let on_device = |r: &RankReport| r.memory.on_device(placement);
            table.row("on the device", |r| on_device(r) as f64, |x| human::bytes(x as u64));
            let on_host = |r: &RankReport| (r.memory.total() - on_device(r)) as f64;
            table.row("on the host", on_host, |x| human::bytes(x as u64));
        }
        table.row("all classes", |r| r.memory.total() as f64, |x| human::bytes(x as u64));
        table.row("as predicted", |r| r.predicted as f64, |x| human::bytes(x as u64));
        let (name, unsaid) = match share_process(ranks) {
            true => ("peak resident, all ranks", ranks[0].peak_rss),
            false => ("peak resident", None),
        };
        let peak = |r: &RankReport| r.peak_rss.or(unsaid).map_or(f64::NAN, |bytes| bytes as f64);
        table.row(name, peak, |x| if x.is_nan() { "-".to_owned() } else { human::bytes(x as u64) });
        table.lines.title("sent");
        table.row("a step", |r| r.bytes_sent as f64 / steps.max(1) as f64, |x| human::bytes(x as u64));
        table.row("in all", |r| r.bytes_sent as f64, |x| human::bytes(x as u64));
        table.lines.title("time");
        let parts: [(&str, Seconds); 7] = [
            ("compute", |r| r.compute),
            ("exposed communication", |r| r.exposed),
            ("optimizer", |r| r.optimizer),
            ("data", |r| r.data),
            ("evaluation", |r| r.evaluation),
            ("checkpoints", |r| r.checkpoints),
            ("other", RankReport::other),
        ];
        let whole = ranks.iter().map(|r| r.total).fold(0.0, f64::max).max(1e-9);
        for (name, of) in parts {
            table.row(name, of, |x| format!("{} {:>3.0}%", human::seconds(x), 100.0 * x / whole));
        }
        table
    }

    fn columns(&self, of: impl Fn(&RankReport) -> f64) -> Vec<f64> {
        let values: Vec<f64> = self.ranks.iter().map(of).collect();
        if !self.spread {
            return values;
        }
        // Of those that say it; none do where it is not a number.
        let said: Vec<f64> = values.into_iter().filter(|x| !x.is_nan()).collect();
        let least = said.iter().copied().fold(f64::NAN, f64::min);
        let most = said.iter().copied().fold(f64::NAN, f64::max);
        vec![least, said.iter().sum::<f64>() / said.len() as f64, most]
    }

    fn row(&mut self, name: &str, of: impl Fn(&RankReport) -> f64, show: impl Fn(f64) -> String) {
        let cells = self.columns(of).into_iter().map(show).collect();
        self.lines.row(name, cells);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use collectives::Options;

    fn report(rank: usize) -> RankReport {
        RankReport {
            memory: Memory {
                parameters: (rank + 1) << 20,
                gradients: 2 << 20,
                optimizer: 3 << 20,
                buckets: 4,
                activations: 5,
                workspace: 6,
                host: 1,
            },
            predicted: 7,
            peak_rss: Some(8),
            bytes_sent: 1 << 30,
            compute: 6.0,
            exposed: 1.0,
            optimizer: 1.5,
            data: 0.25,
            evaluation: 0.25,
            checkpoints: 0.5,
            total: 10.0,
        }
    }

    #[test]
    fn reports_travel_whole() {
        let r = report(3);
        assert_eq!(RankReport::unpack(&r.pack()), r);
        assert_eq!(r.other(), 0.5);
        assert_eq!(r.json(3)["memory"]["total"], (9 << 20) + 16);
        let unsaid = RankReport { peak_rss: None, ..r };
        assert_eq!(RankReport::unpack(&unsaid.pack()), unsaid);
        assert_eq!(
            (&r.json(3)["peak_rss_bytes"], &unsaid.json(3)["peak_rss_bytes"]),
            (&json!(8), &Value::Null)
        );
    }

    #[test]
    fn what_a_process_holds_is_not_shown_as_that_of_each_of_its_ranks() {
        let row = |ranks: &[RankReport]| {
            let text = table(ranks, 1, Placement::Host, None);
            let line = text.lines().find(|line| line.contains("peak resident")).unwrap();
            line.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        let (own, unsaid) = (report(0), RankReport { peak_rss: None, ..report(0) });
        assert_eq!(row(&[own, own]), "peak resident 8 B 8 B");
        assert_eq!(row(&[own]), "peak resident 8 B");
        assert_eq!(row(&[own, unsaid, unsaid]), "peak resident, all ranks 8 B 8 B 8 B");
        let mut many = vec![unsaid; 9];
        assert_eq!(row(&many), "peak resident - - -");
        many[0] = own;
        assert_eq!(row(&many), "peak resident, all ranks 8 B 8 B 8 B");
        // Over threads the first rank speaks for all, and over anything else each for itself.
        let said = Communicator::on_threads(2, Options::default(), |comm| peak_rss(&comm));
        assert!(said[0].is_some_and(|bytes| bytes > 1 << 20) && said[1].is_none(), "{said:?}");
    }

    #[test]
    fn the_table_has_a_column_a_rank_or_the_spread_of_many() {
        let two = table(&[report(0), report(1)], 512, Placement::Host, None);
        let line = |text: &str, name: &str| {
            let line = text.lines().find(|l| l.trim_start().starts_with(name)).unwrap();
            line.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        assert_eq!(line(&two, "held"), "held rank 0 rank 1");
        assert_eq!(line(&two, "parameters"), "parameters 1.00 MiB 2.00 MiB");
        assert_eq!(line(&two, "a step"), "a step 2.00 MiB 2.00 MiB");
        assert_eq!(line(&two, "compute"), "compute 6.0 s 60% 6.0 s 60%");
        assert_eq!(line(&two, "checkpoints"), "checkpoints 500 ms 5% 500 ms 5%");
        assert_eq!(line(&two, "other"), "other 500 ms 5% 500 ms 5%");
        let long = RankReport { compute: 1000.0, total: 1020.0, ..report(0) };
        let two = table(&[long, long], 512, Placement::Host, None);
        assert_eq!(line(&two, "compute"), "compute 16 min 40 s 98% 16 min 40 s 98%");
        let many: Vec<_> = (0..9).map(report).collect();
        let many = table(&many, 1, Placement::Host, None);
        assert!(!many.contains("on the"), "{many}");
        assert_eq!(line(&many, "held"), "held least mean most");
        assert_eq!(line(&many, "parameters"), "parameters 1.00 MiB 5.00 MiB 9.00 MiB");
    }

    #[test]
    fn the_table_says_what_is_on_the_device_and_what_on_the_host() {
        let line = |placement, name: &str| {
            let text = table(&[report(0)], 1, placement, None);
            let line = text.lines().find(|l| l.trim_start().starts_with(name)).unwrap();
            line.split_whitespace().collect::<Vec<_>>().join(" ")
        };
        assert_eq!(line(Placement::Device, "on the device"), "on the device 6.00 MiB");
        assert_eq!(line(Placement::Device, "on the host"), "on the host 1 B");
        assert_eq!(line(Placement::Device, "optimizer"), "optimizer 3.00 MiB");
        assert_eq!(line(Placement::Offloaded, "on the device"), "on the device 3.00 MiB");
        assert_eq!(line(Placement::Offloaded, "on the host"), "on the host 3.00 MiB");
        assert_eq!(line(Placement::Offloaded, "optimizer,"), "optimizer, on the host 3.00 MiB");
    }

    /// Where the cells of a table's lines end.
    fn aligned(text: &str) -> usize {
        let ends: Vec<usize> = text.lines().filter(|line| line.contains("  ")).map(str::len).collect();
        let rows = ends.iter().filter(|&&end| end > 40).count();
        assert!(rows > 12 && ends.iter().all(|end| *end == ends[0]), "{text}");
        ends[0]
    }

    #[test]
    fn columns_stand_below_each_other_whatever_their_labels() {
        let long = RankReport { compute: 1000.0, total: 1020.0, ..report(0) };
        for placement in [Placement::Host, Placement::Device, Placement::Offloaded] {
            let text = table(&[report(0), long], 1, placement, None);
            aligned(&text);
            // A label runs into no cell.
            assert!(text.lines().all(|line| !line.contains("host1") && !line.contains("host 1")), "{text}");
        }
    }

    #[test]
    fn a_table_has_as_many_ranks_as_a_terminal_has_room_for() {
        let long = RankReport { compute: 1000.0, total: 1020.0, ..report(0) };
        let ranks = |n: usize| vec![long; n];
        let of = |n: usize, room| table(&ranks(n), 1, Placement::Host, room);
        assert!(of(6, None).contains("rank 5") && of(6, Some(200)).contains("rank 5"));
        for n in 4..=6 {
            let text = of(n, Some(80));
            assert!(aligned(&text) <= 80 && text.contains("least"), "{text}");
        }
        // Three columns are as many as the spread has.
        assert!(of(3, Some(80)).contains("rank 2") && of(3, Some(20)).contains("rank 2"));
    }
}
