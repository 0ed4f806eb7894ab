//! `caravan bench kernels`: each kernel of a model on a GPU, against its definition on the processor (`--check`), and its
//! time against what bounds it.

pub mod limits;
mod show;

use super::Out;
use super::args::KernelArgs;
use crate::device::{self, Place};
use crate::failure::{Failure, Result};
use crate::files::{self, Way};
use collectives::device::cuda::{Gpu, Stream};
use collectives::device::{Machine, Module, Queue, SharedQueue, Streams, Urgency};
use limits::Limits;
use models::LlamaConfig;
use models::cuda::check::{self, Case};
use models::cuda::speed::{self, Row, Scale, Work};
use serde_json::{Value, json};
use std::time::Instant;

/// Runs the subcommand.
///
/// # Errors
/// Usage, a device that cannot be used, or kernels that are wrong.
pub fn kernels(args: &KernelArgs) -> Result<()> {
    let config = LlamaConfig::preset(&args.model).map_err(Failure::usage)?;
    if args.rows == 0 || args.length == 0 {
        return Err(Failure::usage("--micro-batch and --seq are at least 1"));
    }
    let plan = Plan { args, config, machine: None };
    plan.check_filter()?;
    if let Some(path) = &args.json {
        files::check_writable("--json", path, Way::Whole)?;
    }
    match device::alone()? {
        Place::Gpu => {
            let gpu = Gpu::open(0)?;
            let properties = gpu.properties();
            let (major, minor) = gpu.newest_cuda();
            let about = format!(
                "{}, {}, {} multiprocessors, {:.1} GiB, driver for CUDA {major}.{minor}",
                properties.name,
                properties.machine,
                properties.multiprocessors,
                properties.memory as f64 / (1u64 << 30) as f64
            );
            let stream = || Ok(SharedQueue::new(Stream::new(&gpu, Urgency::Low)?));
            let queues: Vec<_> = [stream(), stream()].into_iter().collect::<Result<_>>()?;
            let plan = Plan { machine: Some(properties.machine), ..plan };
            plan.check_machine()?;
            let scale = plan.scale(1 << 27, 7, 5e-3);
            plan.run(&queues, &about, Limits::of(&properties.name), scale)
        }
        Place::Emulated(emulator) => {
            let queues = [0, 1, 2].map(|seed| SharedQueue::new(emulator.queue(seed)));
            let about = "emulated on the processor: times mean nothing";
            plan.run(&queues, about, Limits::default(), plan.scale(8192, 1, 0.0))
        }
    }
}

/// What was asked for.
struct Plan<'a> {
    args: &'a KernelArgs,
    config: LlamaConfig,
    /// The GPU's architecture; an emulated one has what any has.
    machine: Option<Machine>,
}

impl Plan<'_> {
    fn scale(&self, elements: usize, batches: usize, seconds: f64) -> Scale {
        Scale { rows: self.args.rows, length: self.args.length, elements, batches, seconds }
    }

    /// Whether something of this name was asked for.
    fn wants(&self, name: &str) -> bool {
        self.args.only.is_empty() || self.args.only.iter().any(|word| name.contains(word))
    }

    fn wants_case<Q: Queue>(&self, case: &Case<Q>) -> bool {
        let named = self.wants(case.name) || case.sources.iter().any(|source| self.wants(source));
        named && self.machine.is_none_or(|machine| case.suits(machine))
    }

    fn wants_group(&self, group: &str) -> bool {
        let lacking = |machine| speed::only(group).is_some_and(|only| only != machine);
        self.wants(group) && !self.machine.is_some_and(lacking)
    }

    /// Refuses words that name only what another architecture can run.
    fn check_machine(&self) -> Result<()> {
        let some = match self.args.check {
            true => check::cases::<Stream>().iter().any(|case| self.wants_case(case)),
            false => speed::GROUPS.iter().any(|group| self.wants_group(group)),
        };
        match (some, self.machine) {
            (false, Some(machine)) => Err(Failure::usage(format!(
                "'{}' names kernels for {} alone, and this GPU is {machine}",
                self.args.only.join(" "),
                Machine::HOPPER
            ))),
            _ => Ok(()),
        }
    }

    /// Refuses words that name nothing.
    fn check_filter(&self) -> Result<()> {
        let cases = check::cases::<Stream>();
        for word in &self.args.only {
            let of_case = |case: &Case<Stream>| {
                case.name.contains(word) || case.sources.iter().any(|source| source.contains(word))
            };
            let known = match self.args.check {
                true => cases.iter().any(of_case),
                false => speed::GROUPS.iter().any(|group| group.contains(word)),
            };
            if !known {
                let names: Vec<&str> = match self.args.check {
                    true => cases.iter().map(|case| case.name).collect(),
                    false => speed::GROUPS.to_vec(),
                };
                return Err(Failure::usage(format!("no kernel is called '{word}': {}", names.join(", "))));
            }
        }
        Ok(())
    }

    fn run<Q: Streams>(
        &self,
        queues: &[SharedQueue<Q>],
        about: &str,
        limits: Limits,
        scale: Scale,
    ) -> Result<()> {
        let mut out = Out::new(false);
        out.text(&format!("# {about}\n"));
        let (rows, wrong) = match self.args.check {
            true => self.compare(queues, &mut out)?,
            false => (self.measure(&queues[0], limits, scale, &mut out)?, 0),
        };
        if let Some(path) = &self.args.json {
            let text = match self.args.check {
                true => json!({"device": about, "checks": rows}),
                false => json!({"device": about, "model": self.args.model, "times": rows}),
            };
            let text = serde_json::to_string_pretty(&text).map_err(Failure::run)?;
            files::write_whole(path, text.as_bytes())?;
        }
        out.end()?;
        match wrong {
            0 => Ok(()),
            n => Err(Failure::run(format!("{n} of {} checks of kernels failed", rows.len()))),
        }
    }

    /// Runs the cases; returns what they have shown, and how many were wrong.
    fn compare<Q: Streams>(&self, queues: &[SharedQueue<Q>], out: &mut Out) -> Result<(Vec<Value>, usize)> {
        let cases: Vec<Case<Q>> = check::cases().into_iter().filter(|case| self.wants_case(case)).collect();
        // All at once, which several processors compile side by side.
        let needed = |module: &Module| cases.iter().any(|case| case.sources.contains(&module.source.name));
        let modules: Vec<Module> = check::modules().into_iter().filter(needed).collect();
        let start = Instant::now();
        queues[0].clone().prepare(&modules)?;
        out.text(&show::compiled(modules.len(), start.elapsed()));
        let (mut rows, mut wrong) = (Vec::new(), 0);
        for case in &cases {
            let start = Instant::now();
            let outcome = case.run(queues);
            wrong += usize::from(!outcome.wrong.is_empty());
            out.text(&show::outcome(case.name, &outcome, start.elapsed()));
            let [half, single] = outcome.worst;
            rows.push(json!({
                "case": case.name, "comparisons": outcome.comparisons, "worst_16_bit": half, "worst_f32": single,
                "wrong": outcome.wrong,
            }));
        }
        Ok((rows, wrong))
    }

    fn measure<Q: Streams>(
        &self,
        queue: &SharedQueue<Q>,
        mut limits: Limits,
        scale: Scale,
        out: &mut Out,
    ) -> Result<Vec<Value>> {
        let mut rows = Vec::new();
        out.text(&show::heading());
        // The copy is what the others are compared with.
        let wanted = |group: &str| group == "copy" || self.wants_group(group);
        speed::measure(queue, &self.config, scale, &wanted, &mut |row: Row| {
            if let (Work::Moved(bytes), "copy") = (row.work, row.group) {
                limits.copy = Some(bytes as f64 / row.seconds);
            }
            out.text(&show::row(&row, &limits));
            rows.push(show::json(&row, &limits));
        })?;
        Ok(rows)
    }
}

#[cfg(test)]
mod tests {
    use crate::args::Cli;
    use crate::failure::sentence;

    #[test]
    fn checks_have_shapes_of_their_own() {
        let read = |flags: &str| {
            Cli::read(["caravan", "bench", "kernels"].into_iter().chain(flags.split_whitespace()))
        };
        for flag in ["--model nano", "--seq 64", "--micro-batch 1"] {
            let text = sentence(&read(&format!("--check {flag}")).unwrap_err());
            let name = flag.split(' ').next().unwrap();
            assert!(text.contains("'--check' cannot be used with") && text.contains(name), "{text}");
            read(flag).unwrap();
        }
        read("--check norm --json checks.json").unwrap();
    }
}
