//! DeepSpeed's learning-rate schedules as flags.

use super::document::{Document, Said, plain};
use super::keys::Told;
use super::words::{Beside, Word, outcome, push};

/// Those that there are, with the keys that each takes beside `warmup_num_steps` and `warmup_type`.
const SCHEDULES: [(&str, &[&str]); 3] = [
    ("WarmupLR", &["warmup_min_lr", "warmup_max_lr"]),
    ("WarmupDecayLR", &["total_num_steps", "warmup_min_lr", "warmup_max_lr"]),
    ("WarmupCosineLR", &["total_num_steps", "warmup_min_ratio", "cos_min_ratio"]),
];

/// Keys that not every schedule takes.
const SOME: [&str; 5] =
    ["total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_min_ratio", "cos_min_ratio"];

fn param(name: &str) -> String {
    format!("scheduler.params.{name}")
}

/// Which schedule, if the file says.
///
/// # Errors
/// One that there is not.
pub fn schedule_type(document: &Document) -> Result<Option<&'static str>, String> {
    let key = "scheduler.type";
    let kind = match document.text(key)? {
        Said::Value(kind) => kind,
        Said::Auto => "auto".to_owned(),
        Said::Absent if document.is_block("scheduler") => {
            return Err(format!(
                "{key} is not there: take \"WarmupLR\", \"WarmupDecayLR\" or \"WarmupCosineLR\""
            ));
        }
        // What is no block is told as such.
        Said::Absent => return Ok(None),
    };
    match SCHEDULES.iter().find(|(name, _)| *name == kind) {
        Some((name, _)) => Ok(Some(name)),
        None => Err(format!(
            "{key} \"{kind}\" is not supported: take \"WarmupLR\", \"WarmupDecayLR\" or \"WarmupCosineLR\""
        )),
    }
}

/// The learning rate, of the optimizer or of the schedule, and how it goes.
///
/// # Errors
/// What a schedule needs and has not, or cannot have.
pub fn read(document: &Document, beside: &Beside, told: &mut Told) -> Result<(), String> {
    let kind = schedule_type(document)?;
    peak(document, kind, told)?;
    let Some(kind) = kind else { return Ok(()) };
    let taken = SCHEDULES.iter().find(|(name, _)| *name == kind).map_or(&[][..], |(_, keys)| keys);
    if let Some(other) = SOME.iter().find(|name| !taken.contains(name) && document.has(&param(name))) {
        return Err(format!("{} is no key of {kind}, which takes {}", param(other), taken.join(", ")));
    }
    push(document, told, ("--schedule", "scheduler.type"), Said::Value(kind.to_owned()), None);
    let key = param("warmup_num_steps");
    // To DeepSpeed fewer than two are two, as to our rate of its schedules.
    let steps = document.whole(&key)?.map(|steps| steps.to_string());
    push(document, told, ("--warmup", &key), steps, Some("1000"));
    let key = param("warmup_type");
    let rise = document.text(&key)?;
    if let Said::Value(other) = &rise
        && !["linear", "log"].contains(&other.as_str())
    {
        return Err(format!("{key} \"{other}\": take \"linear\" or \"log\""));
    }
    push(document, told, ("--warmup-shape", &key), rise, Some("log"));
    let key = param("total_num_steps");
    if taken.contains(&"total_num_steps") {
        let total = document.count(&key)?.map(|total| total.to_string());
        if total == Said::Absent {
            return Err(format!("{key} is not there: {kind} needs it, or \"auto\" for --steps"));
        }
        push(document, told, ("--schedule-steps", &key), total, None);
    }
    if kind == "WarmupCosineLR" {
        ratios(document, beside, told)
    } else {
        let key = param("warmup_min_lr");
        push(document, told, ("--warmup-from", &key), document.number(&key)?.map(plain), Some("0"));
        Ok(())
    }
}

/// What the learning rate rises to.
fn peak(document: &Document, kind: Option<&str>, told: &mut Told) -> Result<(), String> {
    let (own, of_schedule) = ("optimizer.params.lr", param("warmup_max_lr"));
    let optimizer = document.number(own)?;
    let highest = match kind {
        Some("WarmupLR" | "WarmupDecayLR") => document.number(&of_schedule)?,
        _ => Said::Absent,
    };
    // Only one of them has a highest rate of its own, unless it is told that it has none.
    let usual = kind == Some("WarmupDecayLR") && document.get(&of_schedule).is_none();
    if highest.clone().value().is_some() || usual {
        push(document, told, ("--lr", &of_schedule), highest.map(plain), Some("0.001"));
        if optimizer.value().is_some() {
            told.ignore(own, "the schedule's warmup_max_lr takes its place");
        }
        return Ok(());
    }
    if highest == Said::Absent && document.get(&of_schedule).is_some() {
        told.same.push(of_schedule);
    }
    let unsaid = document.has("optimizer").then_some("0.001");
    push(document, told, ("--lr", own), optimizer.map(plain), unsaid);
    Ok(())
}

/// Parts of the highest rate as rates.
fn ratios(document: &Document, beside: &Beside, told: &mut Told) -> Result<(), String> {
    let lr = outcome(told, "--lr", &beside.lr);
    let lr: f64 = lr.parse().map_err(|_| format!("--lr {lr}: a number is needed"))?;
    for (flag, name, usual) in
        [("--warmup-from", "warmup_min_ratio", 0.0), ("--min-lr", "cos_min_ratio", 1e-4)]
    {
        let key = param(name);
        match document.number(&key)? {
            Said::Value(ratio) if !(0.0..=1.0).contains(&ratio) => {
                return Err(format!("{key} {ratio}: it is a part of the highest rate, from 0 to 1"));
            }
            Said::Value(ratio) => push(document, told, (flag, &key), Said::Value(plain(ratio * lr)), None),
            Said::Auto => {}
            Said::Absent => told.words.push(Word::unsaid(flag, &plain(usual * lr), &key)),
        }
    }
    Ok(())
}
