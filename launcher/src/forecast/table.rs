//! A forecast for people: a column for each stage.

use super::{Forecast, Outcome};
use crate::device::Device;
use crate::human;
use crate::machine;
use zero::Placement;

/// What a cell says of a stage.
type Cell<'a> = &'a dyn Fn(&Outcome) -> u64;

impl Forecast {
    /// The table, and what it is of.
    pub fn text(&self) -> String {
        let mut rows: Vec<(String, Vec<String>)> = Vec::new();
        let mut row = |name: &str, cell: Option<Cell<'_>>| {
            let cells = cell.iter().flat_map(|cell| self.stages.iter().map(cell));
            rows.push((name.to_owned(), cells.map(human::bytes).collect()));
        };
        for (index, (class, _)) in self.stages[0].memory.classes().iter().enumerate() {
            let name = match (*class, self.zero.placement) {
                ("host", Placement::Host) => continue,
                ("host", _) => "for transfers, on the host",
                ("optimizer", Placement::Offloaded) => "optimizer, on the host",
                (name, _) => name,
            };
            row(&format!("  {name}"), Some(&|at| at.memory.classes()[index].1 as u64));
        }
        row("  all classes", Some(&|at| at.memory.total() as u64));
        if self.zero.placement.on_device() {
            row("  of a GPU, with libraries", Some(&|at| at.gpu as u64));
        }
        if let Some(here) = self.here.filter(|&here| here > 1) {
            let beside = if self.device == Device::Cpu { "" } else { ", beside GPUs" };
            let name = format!("  the {here} ranks of a host{beside}");
            row(&name, Some(&|at| (here * self.on_host(at)) as u64));
        }
        row("sent by a rank", None);
        row("  a step", Some(&|at| at.sent));

        let wide = rows.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
        let line = |name: &str, cells: &[String]| {
            let cells: String = cells.iter().map(|cell| format!("  {cell:>10}")).collect();
            format!("{}\n", format!("{name:<wide$}{cells}").trim_end())
        };
        let stages: Vec<String> = self.stages.iter().map(|at| format!("stage {}", at.stage)).collect();
        let head = line("held by a rank", &stages);
        let rows: String = rows.iter().map(|(name, cells)| line(name, cells)).collect();
        self.headline() + &head + &rows + &self.remark(machine::free().bytes)
    }

    /// Bytes that a rank holds beside its GPU.
    fn on_host(&self, at: &Outcome) -> usize {
        at.memory.total() - at.memory.on_device(self.zero.placement)
    }

    fn headline(&self) -> String {
        let micro = match self.zero.accumulate {
            1 => String::new(),
            n => format!("{n} micro-batches x "),
        };
        let recomputed = match self.batch.recompute {
            models::Recompute::Full => ", activations computed again",
            _ => "",
        };
        format!(
            "{} ({} parameters) in {} on {} with {}{} over {}\na step of {micro}{} x {} of each rank{recomputed}\n",
            self.model.name,
            human::count(self.model.config.parameters() as f64),
            self.dtype.name(),
            human::several(self.world, "rank"),
            human::several(self.batch.threads, "thread"),
            if self.device == Device::Cpu { "" } else { " and a GPU each" },
            self.label,
            human::several(self.batch.rows, "sequence"),
            human::several(self.batch.length, "token"),
        )
    }

    /// Whether a machine that has so many bytes `free`, as this one has now, could hold the ranks of a host.
    fn remark(&self, free: u64) -> String {
        let Some(here) = self.here.filter(|_| self.device == Device::Cpu && free < u64::MAX) else {
            return String::new();
        };
        // A higher one never holds more.
        let enough = match self.stages.iter().find(|at| (here * self.on_host(at)) as u64 <= free) {
            None => "too little at any stage".to_owned(),
            Some(at) if at.stage.level() == 0 => "enough at every stage".to_owned(),
            Some(at) => format!("enough from stage {} on", at.stage),
        };
        format!("this machine has {} of memory free: {enough}\n", human::bytes(free))
    }
}
