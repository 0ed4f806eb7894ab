//! A forecast for people: a column for each stage.

use super::{Forecast, Outcome};
use crate::device::Device;
use crate::human;
use crate::machine;
use crate::report::{Lines, classes};

/// What a cell says of a stage.
type Cell<'a> = &'a dyn Fn(&Outcome) -> u64;

impl Forecast {
    /// The table, and what it is of.
    pub fn text(&self) -> String {
        let stages = self.stages.iter().map(|at| format!("stage {}", at.stage)).collect();
        let mut lines = Lines::new("held by a rank", stages);
        let mut row = |name: &str, cell: Cell<'_>| {
            lines.row(name, self.stages.iter().map(|at| human::bytes(cell(at))).collect());
        };
        for (index, name) in classes(self.zero.placement) {
            row(name, &|at| at.memory.classes()[index].1 as u64);
            // Of the state of the model: that class is the last of those.
            if name.starts_with("optimizer") {
                row("  of which padding", &|at| at.padding as u64);
            }
        }
        row("all classes", &|at| at.memory.total() as u64);
        if self.zero.placement.on_device() {
            row("of a GPU, with libraries", &|at| at.gpu as u64);
        }
        if let Some(here) = self.here.filter(|&here| here > 1) {
            let beside = if self.device == Device::Cpu { "" } else { ", beside GPUs" };
            row(&format!("the {here} ranks of a host{beside}"), &|at| self.on_host(at, here));
        }
        lines.title("sent by a rank");
        lines.row("a step", self.stages.iter().map(|at| human::bytes(at.sent)).collect());
        self.headline() + &lines.text() + &self.remark(machine::free().bytes) + &self.configuration()
    }

    /// Bytes that `here` ranks hold beside their GPUs, with what they see of each other.
    fn on_host(&self, at: &Outcome, here: usize) -> u64 {
        let each = at.memory.total() - at.memory.on_device(self.zero.placement) + self.control;
        (each as u64).saturating_mul(here as u64)
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

    /// What became of a configuration.
    fn configuration(&self) -> String {
        let batch = (self.batch.rows, self.zero.accumulate);
        self.configuration.as_ref().map_or(String::new(), |file| file.lines(batch, self.world) + "\n")
    }

    /// Whether a machine that has so many bytes `free`, as this one has now, could hold the ranks of a host.
    fn remark(&self, free: u64) -> String {
        let Some(here) = self.here.filter(|_| self.device == Device::Cpu && free < u64::MAX) else {
            return String::new();
        };
        // A higher one never holds more.
        let enough = match self.stages.iter().find(|at| self.on_host(at, here) <= free) {
            None => "too little at any stage".to_owned(),
            Some(at) if at.stage.level() == 0 => "enough at every stage".to_owned(),
            Some(at) => format!("enough from stage {} on", at.stage),
        };
        format!("this machine has {} of memory free: {enough}\n", human::bytes(free))
    }
}
