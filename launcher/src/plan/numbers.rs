//! The numbers among a training's flags, checked without the machine and the files that it needs.

use super::{EVAL_EVERY, scaling, usage};
use crate::args::{Number, Order, Rise, Shape, Switch, TrainArgs};
use crate::data;
use crate::failure::{Failure, Result};
use crate::human;
use crate::rate::Rate;

/// What the numbers say.
#[derive(Debug)]
pub struct Numbers {
    /// The learning rate of each step.
    pub rate: Rate,
    /// The part of the tokens that is held out.
    pub val_fraction: f64,
    /// The trainer's part, as on a processor.
    pub zero: zero::Config,
}

impl Numbers {
    /// Checks those of a run of `world` ranks.
    ///
    /// # Errors
    /// The first that makes no sense, with its flag and what would.
    pub fn check(args: &TrainArgs, world: usize) -> Result<Self> {
        at_least_one("--steps", args.steps)?;
        at_least_one("--micro-batch", args.micro_batch)?;
        at_least_one("--accumulate", args.accumulate)?;
        args.seq.map_or(Ok(()), |seq| at_least_one("--seq", seq))?;
        args.eval_tokens.map_or(Ok(()), |tokens| at_least_one("--eval-tokens", tokens))?;
        Ok(Numbers { rate: rate(args)?, val_fraction: val_fraction(args)?, zero: zero_config(args, world)? })
    }
}

/// What `zero` needs to know, for the processor.
fn zero_config(args: &TrainArgs, world: usize) -> Result<zero::Config> {
    let bucket_bytes =
        human::parse_bytes(&args.bucket_size).map_err(|e| Failure::usage(format!("--bucket-size: {e}")))?;
    if bucket_bytes == 0 {
        return usage("--bucket-size 0: a bucket holds at least 1 byte".into());
    }
    let adamw = zero::AdamW {
        beta1: decay("--beta1", &args.beta1)?,
        beta2: decay("--beta2", &args.beta2)?,
        eps: number("--eps", &args.eps, "above 0 in 32 bits", |x| x as f32 > 0.0)? as f32,
        weight_decay: number("--weight-decay", &args.weight_decay, "at least 0", |x| x >= 0.0)? as f32,
    };
    // Gradients that small have no squares in the optimizer, which is of 32 bits.
    let clip = number(
        "--clip",
        &args.clip,
        "so large that its square is above 0 in 32 bits, or 0 (0 clips nothing)",
        |x| x == 0.0 || x > 0.0 && (x as f32).powi(2) > 0.0,
    )?;
    let stage = args.stage.parse().map_err(|e| Failure::usage(format!("--stage {}: {e}", args.stage)))?;
    Ok(zero::Config {
        stage,
        bucket_bytes,
        prefetch: prefetch(args.prefetch, stage)?,
        accumulate: args.accumulate,
        reproducible: reproducible(args, world)?,
        scaling: scaling::asked(args)?,
        adamw,
        clip: (clip > 0.0).then_some(clip as f32),
        placement: zero::Placement::Host,
    })
}

/// Whether numbers of ranks change no bit, where ranks are as many as that can be had for.
fn reproducible(args: &TrainArgs, world: usize) -> Result<bool> {
    if args.reproducible && !world.is_power_of_two() {
        let (fewer, more) = (1 << world.ilog2(), world.next_power_of_two());
        return usage(format!(
            "--reproducible with {world} ranks: the bits are the same on powers of two of ranks: take {fewer} or {more}"
        ));
    }
    Ok(args.reproducible)
}

/// The learning rate of each step.
fn rate(args: &TrainArgs) -> Result<Rate> {
    let peak = number("--lr", &args.lr, "above 0 in 32 bits, or 0 (0 learns nothing)", |x| {
        x == 0.0 || x as f32 > 0.0
    })?;
    let range = format!("from 0 to --lr {}", args.lr);
    let start = match &args.warmup_from {
        Some(start) => number("--warmup-from", start, &range, |x| (0.0..=peak).contains(&x))?,
        None => 0.0,
    };
    let floor = match (args.schedule, &args.min_lr) {
        (shape, Some(floor)) if !shape.has_floor() => {
            return usage(format!(
                "--min-lr {floor} with --schedule {}, which never comes down to it: leave --min-lr away, or take --schedule \
                 linear or cosine",
                shape.name()
            ));
        }
        (Shape::WarmupDecayLr, None) => start,
        (shape, None) if !shape.has_floor() => peak,
        (_, Some(asked)) => number("--min-lr", asked, &range, |x| (0.0..=peak).contains(&x))?,
        (_, None) => peak / 10.0,
    };
    warm_up_of_steps(args)?;
    if let Some(steps) = args.schedule_steps {
        at_least_one("--schedule-steps", steps)?;
        if !args.schedule.comes_down() {
            return usage(format!(
                "--schedule-steps {steps} with --schedule {}, which never comes down: leave --schedule-steps away, or take \
                 another --schedule",
                args.schedule.name()
            ));
        }
    }
    let steps = args.schedule_steps.unwrap_or(args.steps);
    let warmup = args.warmup.unwrap_or((steps / 10).min(100));
    let rise = args.warmup_shape.unwrap_or(Rise::Linear);
    let rate = Rate { peak, floor, start, warmup, rise, steps, shape: args.schedule };
    // DeepSpeed's warm-ups may be longer than a run.
    if rate.shape.of_deepspeed() {
        return Ok(rate);
    }
    let named = if args.schedule_steps.is_some() { "--schedule-steps" } else { "--steps" };
    if warmup > steps {
        return usage(format!("--warmup {warmup}: there are {steps} {named}, so at most that"));
    }
    if warmup == steps && args.steps > steps {
        return usage(format!(
            "--warmup {warmup} of {steps} {named}, which leaves no step in which the rate comes down, and --steps {} go on: lower \
             --warmup, or take more {named}",
            args.steps
        ));
    }
    // The first step after the warm-up is at the peak.
    if let (Some(floor), true) = (&args.min_lr, warmup + 1 >= steps) {
        return usage(format!(
            "--min-lr {floor} with a --warmup of {warmup} of {steps} {named}, after which no step comes down to it: leave \
             --min-lr away, take more {named}, or lower --warmup"
        ));
    }
    Ok(rate)
}

/// Whether a warm-up for which something was asked has steps. DeepSpeed's always have two.
fn warm_up_of_steps(args: &TrainArgs) -> Result<()> {
    if args.warmup != Some(0) || args.schedule.of_deepspeed() {
        return Ok(());
    }
    let (shape, start) = (args.warmup_shape, args.warmup_from.as_ref());
    let shape = shape.map(|shape| ("--warmup-shape", shape.name()));
    match shape.or(start.map(|start| ("--warmup-from", start.to_string()))) {
        Some((flag, value)) => usage(format!(
            "{flag} {value} with --warmup 0, with which nothing rises: leave {flag} away, or take a longer --warmup"
        )),
        None => Ok(()),
    }
}

/// Whether the next unit is gathered early, where units are gathered at all.
fn prefetch(asked: Option<Switch>, stage: zero::Stage) -> Result<bool> {
    match asked {
        Some(_) if !stage.shards_parameters => usage(format!(
            "--prefetch at --stage {}, which holds all parameters and gathers none of them early: leave it away, or take \
             --stage 3",
            stage
        )),
        asked => Ok(asked != Some(Switch::Off)),
    }
}

/// The fraction that is held out, as given or by the order's habit; nothing where files are named for that.
fn val_fraction(args: &TrainArgs) -> Result<f64> {
    let named = !args.val_data.is_empty();
    let habit =
        if named || args.order == Order::Sequential || data::is_random(&args.data) { 0.0 } else { 0.1 };
    let fits = |x| (0.0..1.0).contains(&x);
    let asked = args.val_fraction.as_ref();
    let fraction =
        asked.map_or(Ok(habit), |asked| number("--val-fraction", asked, "from 0 to below 1", fits))?;
    let every = args.eval_every.filter(|&steps| steps > 0).map(|steps| ("--eval-every", steps));
    let asked = every.or(args.eval_tokens.map(|tokens| ("--eval-tokens", tokens)));
    if let Some((flag, value)) = asked.filter(|_| fraction == 0.0 && !named) {
        let files = if data::is_random(&args.data) { "" } else { " or --val-data" };
        return usage(format!(
            "{flag} {value}: nothing is held out to evaluate on: add --val-fraction 0.1{files}, or leave {flag} away"
        ));
    }
    let (every, steps) = (args.eval_every.unwrap_or(EVAL_EVERY), args.steps);
    match args.eval_tokens.filter(|_| every == 0 || every >= steps) {
        Some(tokens) => usage(format!(
            "--eval-tokens {tokens}: of {steps} --steps none has an evaluation behind it but the last, which takes all \
             that is held out: lower --eval-every, which is {every}, or leave --eval-tokens away"
        )),
        None => Ok(fraction),
    }
}

/// A finite number in a range.
fn number(flag: &str, asked: &Number, range: &str, fits: impl Fn(f64) -> bool) -> Result<f64> {
    let value = asked.value();
    // What is finite in f64 may not be in the f32 that kernels take.
    match ((value as f32).is_finite(), fits(value)) {
        (true, true) => Ok(value),
        (true, false) => usage(format!("{flag} {asked}: it must be {range}")),
        (false, _) if value.is_nan() => usage(format!("{flag} {asked}: it must be a number {range}")),
        (false, _) => usage(format!("{flag} {asked}: it must be finite in 32 bits, and {range}")),
    }
}

/// What a moment keeps of itself.
fn decay(flag: &str, asked: &Number) -> Result<f32> {
    let fits = |x: f64| (0.0..1.0).contains(&x) && (x as f32) < 1.0;
    Ok(number(flag, asked, "from 0 to below 1 in 32 bits", fits)? as f32)
}

/// A count that makes no sense as 0.
pub fn at_least_one(flag: &str, value: usize) -> Result<()> {
    match value {
        0 => usage(format!("{flag} 0: it must be at least 1")),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::tests::train;
    use zero::{AdamW, Config};

    fn check(flags: &str) -> Numbers {
        Numbers::check(&train(flags), 2).unwrap_or_else(|e| panic!("{flags}: {e}"))
    }

    /// As `--help` has them.
    const RATE: Rate = Rate {
        peak: 1e-3,
        floor: 1e-4,
        start: 0.0,
        warmup: 100,
        rise: Rise::Linear,
        steps: 1000,
        shape: Shape::Cosine,
    };
    const ADAMW: AdamW = AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1 };

    #[test]
    fn each_flag_of_the_optimizer_reaches_its_setting_and_no_other() {
        // The trainer's own defaults are no flags': none may stand in for what was not passed on.
        let usual = Config { adamw: ADAMW, clip: Some(1.0), ..check("").zero };
        let clip = |clip| Config { clip, ..usual.clone() };
        let adamw = |adamw| Config { adamw, ..usual.clone() };
        for (flags, expected) in [
            ("", usual.clone()),
            ("--beta1 0.8", adamw(AdamW { beta1: 0.8, ..ADAMW })),
            ("--beta1 0", adamw(AdamW { beta1: 0.0, ..ADAMW })),
            ("--beta2 0.95", adamw(AdamW { beta2: 0.95, ..ADAMW })),
            ("--eps 1e-5", adamw(AdamW { eps: 1e-5, ..ADAMW })),
            ("--weight-decay 0.02", adamw(AdamW { weight_decay: 0.02, ..ADAMW })),
            ("--weight-decay 0", adamw(AdamW { weight_decay: 0.0, ..ADAMW })),
            ("--clip 0.25", clip(Some(0.25))),
            ("--clip 3", clip(Some(3.0))),
            ("--clip 0", clip(None)),
            ("--reproducible", Config { reproducible: true, ..usual.clone() }),
        ] {
            assert_eq!(check(flags).zero, expected, "{flags}");
            assert_eq!(check(flags).rate, RATE, "{flags}");
        }
    }

    #[test]
    fn what_is_reproducible_has_a_power_of_two_of_ranks() {
        for (world, ways) in [(3, "take 2 or 4"), (6, "take 4 or 8"), (100, "take 64 or 128")] {
            let e = Numbers::check(&train("--reproducible"), world).err().unwrap();
            assert!(e.code() == 2 && e.to_string().ends_with(ways), "{e}");
            assert!(Numbers::check(&train(""), world).is_ok());
        }
        for world in [1, 2, 64] {
            assert!(Numbers::check(&train("--reproducible"), world).is_ok());
        }
    }

    #[test]
    fn each_flag_of_the_schedule_reaches_its_part_of_the_rate_and_no_other() {
        for (flags, expected) in [
            ("", RATE),
            // The floor comes along where nobody asked for one.
            ("--lr 2e-2", Rate { peak: 2e-2, floor: 2e-3, ..RATE }),
            ("--lr 0", Rate { peak: 0.0, floor: 0.0, ..RATE }),
            ("--min-lr 3e-5", Rate { floor: 3e-5, ..RATE }),
            ("--min-lr 0", Rate { floor: 0.0, ..RATE }),
            ("--warmup 7", Rate { warmup: 7, ..RATE }),
            ("--warmup 0", Rate { warmup: 0, ..RATE }),
            ("--schedule cosine", RATE),
            ("--schedule linear", Rate { shape: Shape::Linear, ..RATE }),
            ("--schedule linear --min-lr 3e-5", Rate { shape: Shape::Linear, floor: 3e-5, ..RATE }),
            ("--schedule constant", Rate { shape: Shape::Constant, floor: 1e-3, ..RATE }),
            ("--warmup-shape log", Rate { rise: Rise::Log, ..RATE }),
            ("--warmup-from 3e-5", Rate { start: 3e-5, ..RATE }),
            (
                "--schedule WarmupLR --warmup 0 --warmup-shape log",
                Rate { shape: Shape::WarmupLr, floor: 1e-3, warmup: 0, rise: Rise::Log, ..RATE },
            ),
            // A tenth of those, too.
            ("--schedule-steps 300", Rate { steps: 300, warmup: 30, ..RATE }),
            ("--schedule-steps 50 --min-lr 0", Rate { steps: 50, warmup: 5, floor: 0.0, ..RATE }),
            ("--schedule-steps 3000", Rate { steps: 3000, ..RATE }),
            ("--schedule-steps 100 --warmup 99", Rate { steps: 100, warmup: 99, ..RATE }),
            ("--steps 100 --schedule-steps 100 --warmup 100", Rate { steps: 100, ..RATE }),
            // DeepSpeed's come down to where they began, or not at all, and warm up for as long as they are told to.
            ("--schedule WarmupLR", Rate { shape: Shape::WarmupLr, floor: 1e-3, ..RATE }),
            ("--schedule warmupdecaylr", Rate { shape: Shape::WarmupDecayLr, floor: 0.0, ..RATE }),
            ("--schedule WarmupCosineLR", Rate { shape: Shape::WarmupCosineLr, ..RATE }),
            (
                "--schedule WarmupLR --warmup 9999",
                Rate { shape: Shape::WarmupLr, floor: 1e-3, warmup: 9999, ..RATE },
            ),
            // A tenth of the steps, where that is less.
            ("--steps 58", Rate { steps: 58, warmup: 5, ..RATE }),
            ("--steps 5000", Rate { steps: 5000, ..RATE }),
        ] {
            assert_eq!(check(flags).rate, expected, "{flags}");
            assert_eq!(check(flags).zero, check("").zero, "{flags}");
        }
    }
    #[test]
    fn what_would_change_no_rate_is_refused() {
        for (flags, words) in [
            (
                "--schedule constant --schedule-steps 5",
                "--schedule-steps 5 with --schedule constant, which never comes down: leave",
            ),
            ("--schedule WarmupLR --schedule-steps 5", "with --schedule WarmupLR, which never comes down"),
            ("--warmup 0 --warmup-shape log --warmup-from 1e-5", "--warmup-shape log with --warmup 0"),
            ("--warmup 0 --warmup-from 1e-5", "--warmup-from 1e-5 with --warmup 0, with which nothing rises"),
            (
                "--warmup 90 --schedule-steps 90",
                "--warmup 90 of 90 --schedule-steps, which leaves no step in which the rate",
            ),
        ] {
            let e = Numbers::check(&train(flags), 2).err().unwrap();
            assert!(e.code() == 2 && e.to_string().contains(words), "{e}");
        }
    }
}
