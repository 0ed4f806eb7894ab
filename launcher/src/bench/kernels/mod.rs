//! `caravan bench kernels`: each kernel of a model on a GPU, against its definition on the processor (`--check`), and its
//! time against what bounds it.

mod choice;
mod show;

use super::args::KernelArgs;
use super::kept::Record;
use super::verdict::{self, Verdict};
use crate::device::{self, Place};
use crate::failure::{Failure, Result};
use crate::files::{self, Kind, Output};
use crate::gpus::Limits;
use crate::plan::at_least_one;
use crate::printed::Out;
use choice::{Named, choose};
use collectives::device::cuda::{Gpu, Properties, Stream};
use collectives::device::{Machine, Module, Queue, SharedQueue, Streams, Urgency};
use models::LlamaConfig;
use models::cuda::check::{self, Case};
use models::cuda::speed::{self, Scale, Shown, Work};
use serde_json::json;
use std::time::Instant;

/// Runs the subcommand.
///
/// # Errors
/// Usage, a device that cannot be used, or kernels that are wrong.
pub fn kernels(args: &KernelArgs) -> Result<()> {
    let config = LlamaConfig::preset(&args.model).map_err(|_| {
        let known = LlamaConfig::PRESETS.join(", ");
        Failure::usage(format!("--model '{}': kernels are measured of models by name: {known}", args.model))
    })?;
    at_least_one("--micro-batch", args.rows)?;
    at_least_one("--seq", args.length)?;
    models::check_on_device(args.rows, args.length).map_err(Failure::usage)?;
    let plan = Plan { args, config };
    // On any machine, before one is looked for.
    plan.choose(None)?;
    if let Some(path) = &args.json {
        files::check_outputs(&[Output::whole("--json", path, Kind::Json)], &[])?;
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
            let chosen = plan.choose(Some(properties))?;
            let scale = plan.scale(1 << 27, 7, 5e-3, properties.shared);
            plan.run(&queues, &chosen, &about, Limits::of(&properties.name), scale)
        }
        Place::Emulated(emulator) => {
            let queues = [0, 1, 2].map(|seed| SharedQueue::new(emulator.queue(seed)));
            let about = "emulated on the processor: times mean nothing";
            plan.run(
                &queues,
                &plan.choose(None)?,
                about,
                Limits::default(),
                plan.scale(8192, 1, 0.0, usize::MAX),
            )
        }
    }
}

/// Modules that a processor compiles before it is said that there are more by now.
const AT_ONCE: usize = 4;

/// What was asked for.
struct Plan<'a> {
    args: &'a KernelArgs,
    config: LlamaConfig,
}

impl Plan<'_> {
    fn scale(&self, elements: usize, batches: usize, seconds: f64, shared: usize) -> Scale {
        Scale { rows: self.args.rows, length: self.args.length, elements, batches, seconds, shared }
    }

    /// The names of the cases or groups that are asked for and that this GPU, if one is known, can run.
    ///
    /// # Errors
    /// Words that choose nothing.
    fn choose(&self, gpu: Option<&Properties>) -> Result<Vec<&'static str>> {
        let foreign = |suits: &dyn Fn(Machine, usize) -> bool| {
            let Properties { machine, shared, .. } = gpu?;
            match (suits(*machine, *shared), suits(*machine, usize::MAX)) {
                (true, _) => None,
                (_, true) => Some(format!(
                    "for blocks of more than {shared} bytes of shared memory, which this GPU has"
                )),
                _ => Some(format!("for {} alone, and this GPU is {machine}", Machine::HOPPER)),
            }
        };
        let case = |case: &Case<Stream>| Named {
            names: std::iter::once(case.name).chain(case.sources.iter().copied()).collect(),
            foreign: foreign(&|machine, shared| case.suits(machine, shared)),
        };
        let group = |group: &'static str| Named {
            names: vec![group],
            foreign: foreign(&|machine, _| speed::only(group).is_none_or(|only| only == machine)),
        };
        let all: Vec<Named> = match self.args.check {
            true => check::cases().iter().map(case).collect(),
            false => speed::GROUPS.map(group).into(),
        };
        let had = choose(&all, &self.args.only, &self.args.without)?;
        Ok(all.iter().zip(had).filter(|(_, had)| *had).map(|(named, _)| named.names[0]).collect())
    }

    fn run<Q: Streams>(
        &self,
        queues: &[SharedQueue<Q>],
        chosen: &[&'static str],
        about: &str,
        limits: Limits,
        scale: Scale,
    ) -> Result<()> {
        let mut out = Out::new();
        out.text(&format!("# {about}\n"));
        let (found, written) = match self.args.check {
            true => self.compare(queues, chosen, about, &mut out),
            false => self.measure(&queues[0], chosen, about, limits, scale, &mut out),
        };
        verdict::ended(found, written.and(out.end()))?.map_or(Ok(()), |found| Err(Failure::run(found)))
    }

    /// Runs the cases: whether some were wrong, or have not run because the device took no more work, and what came of writing
    /// that.
    fn compare<Q: Streams>(
        &self,
        queues: &[SharedQueue<Q>],
        chosen: &[&'static str],
        about: &str,
        out: &mut Out,
    ) -> (Verdict, Result<()>) {
        let cases: Vec<Case<Q>> =
            check::cases().into_iter().filter(|case| chosen.contains(&case.name)).collect();
        let rows = cases.iter().map(|case| show::state(case.name, "not run")).collect();
        let mut record = Record::new(self.args.json.as_deref(), json!({"device": about}), "checks", rows);
        record.keep();
        // Several at once, which processors compile side by side. What fails here fails again in its own case. The file is
        // written anew in between: on a slow processor all of them take minutes, and who watches it must not think that it hangs.
        let needed = |module: &Module| cases.iter().any(|case| case.sources.contains(&module.source.name));
        let modules: Vec<Module> = check::modules().into_iter().filter(needed).collect();
        let start = Instant::now();
        let mut whole = true;
        for some in modules.chunks(AT_ONCE * std::thread::available_parallelism().map_or(1, usize::from)) {
            whole &= queues[0].clone().prepare(some).is_ok();
            record.keep();
        }
        out.text(&show::compiled(modules.len(), whole, start.elapsed()));
        let (mut wrong, mut lost) = (0, None);
        for (i, case) in cases.iter().enumerate() {
            if lost.is_some() {
                out.text(&show::not_run(case.name));
                continue;
            }
            // Should it never end, its name is known.
            out.text(&show::begins(case.name));
            record.rows[i] = show::state(case.name, "not ended");
            record.keep();
            let start = Instant::now();
            let mut outcome = case.run(queues);
            lost = check::lost(queues).map(|why| (i + 1, why));
            // Whatever the case has seen: the next ones could not run after it.
            if let (Some((_, why)), true) = (&lost, outcome.wrong.is_empty()) {
                outcome.wrong.push(why.clone());
            }
            wrong += usize::from(!outcome.wrong.is_empty());
            out.text(&show::outcome(case.name, &outcome, start.elapsed()));
            record.rows[i] = show::checked(case.name, &outcome);
            record.keep();
        }
        let found = match (lost, wrong) {
            (Some((ran, why)), _) if ran < cases.len() => Some(format!(
                "{wrong} of {ran} checks of kernels failed, and {} were not run, because the device takes no more work \
                 in this process ({why}): give their names to another",
                cases.len() - ran
            )),
            (_, 0) => None,
            (_, n) => Some(format!("{n} of {} checks of kernels failed", cases.len())),
        };
        (found, record.write())
    }

    /// Times the groups: whether something could not be timed, and what came of writing the times.
    fn measure<Q: Streams>(
        &self,
        queue: &SharedQueue<Q>,
        chosen: &[&'static str],
        about: &str,
        mut limits: Limits,
        scale: Scale,
        out: &mut Out,
    ) -> (Verdict, Result<()>) {
        let about = json!({"device": about, "model": self.args.model});
        let mut record = Record::new(self.args.json.as_deref(), about, "times", Vec::new());
        record.keep();
        let (mut missing, mut begun) = (0, false);
        out.text(&show::heading());
        // The copy is what the others are compared with.
        let copied = !self.args.without.iter().any(|word| "copy".contains(word.as_str()));
        let wanted = |group: &str| group == "copy" && copied || chosen.contains(&group);
        let measured = speed::measure(queue, &self.config, scale, &wanted, &mut |shown| {
            // What has begun and not ended is the last row, until what came of it takes its place.
            if begun && matches!(shown, Shown::Ended(_)) {
                record.rows.pop();
            }
            begun = matches!(shown, Shown::Begins(..));
            match shown {
                Shown::Begins(group, name) => record.rows.push(show::json_of_begun(group, name)),
                Shown::Ended(Ok(row)) => {
                    if let (Work::Moved(bytes), "copy") = (row.work, row.group) {
                        limits.copy = Some(bytes as f64 / row.seconds);
                    }
                    out.text(&show::row(&row, &limits));
                    record.rows.push(show::json(&row, &limits));
                }
                Shown::Ended(Err(lacking)) => {
                    missing += 1;
                    out.text(&show::missing(&lacking));
                    record.rows.push(show::json_of_missing(&lacking));
                }
            }
            record.keep();
        });
        let written = match &measured {
            Ok(()) => record.write(),
            Err(_) => record.cut_short(),
        };
        let found = match (measured, missing) {
            (Err(why), _) => Some(format!(
                "what comes after it was not timed, because the device takes no more work ({why})"
            )),
            (Ok(()), 0) => None,
            (Ok(()), n) => Some(format!("{n} of {} kernels could not be timed", record.rows.len())),
        };
        (found, written)
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
