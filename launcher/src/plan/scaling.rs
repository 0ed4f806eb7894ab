//! How the loss of a training is scaled: what `--loss-scale` says, and how that is told.

use super::usage;
use crate::args::{Precision, TrainArgs};
use crate::failure::Result;
use zero::Scaling;

/// What the flags of a training ask for, if its numbers are of a type that needs it.
///
/// # Errors
/// A scale for other numbers, or one that cannot be read or makes no sense.
pub fn asked(args: &TrainArgs) -> Result<Option<Scaling>> {
    match (args.dtype, &args.loss_scale) {
        (Precision::F16, text) => {
            let text = text.as_deref().unwrap_or("dynamic");
            read(text).map(Some).or_else(|why| usage(format!("--loss-scale {text}: {why}")))
        }
        (_, None) => Ok(None),
        (other, Some(text)) => usage(format!(
            "--loss-scale {text} is for --dtype f16: {} has small enough numbers for any gradient, so leave it away",
            other.name()
        )),
    }
}

/// What would be read.
const FORM: &str = "a number, 'dynamic', or settings of a dynamic one as in \
                    initial=65536,window=1000,hysteresis=2,min=1,consecutive=off";

/// A scale for all steps, or the settings of one that changes.
///
/// # Errors
/// What is wrong with it, as the end of a sentence.
pub fn read(text: &str) -> std::result::Result<Scaling, String> {
    if text == "dynamic" {
        return Ok(Scaling::default());
    }
    let positive = |value: &str| value.parse().ok().filter(|x: &f32| x.is_finite() && *x > 0.0);
    if let Ok(fixed) = text.parse::<f64>() {
        let scaling = positive(text).map(Scaling::fixed);
        return checked(scaling.ok_or_else(|| format!("{fixed} is not a number above 0 in 32 bits"))?);
    }
    let mut scaling = Scaling::default();
    let mut seen = Vec::new();
    for setting in text.split(',') {
        let (name, value) = setting.split_once('=').ok_or_else(|| format!("it has to be {FORM}"))?;
        let (name, value) = (name.trim(), value.trim());
        if seen.contains(&name) {
            return Err(format!("{name} is said twice"));
        }
        seen.push(name);
        let number = || positive(value).ok_or_else(|| format!("{name}={value}: a number above 0 is needed"));
        let count = || {
            let most = u32::MAX;
            value.parse().map_err(|_| format!("{name}={value}: a whole number up to {most} is needed"))
        };
        match name {
            "initial" => scaling.initial = number()?,
            "min" => scaling.least = number()?,
            "window" => scaling.window = count()?,
            "hysteresis" => scaling.hysteresis = count()?,
            "consecutive" => {
                scaling.consecutive = match value {
                    "on" => true,
                    "off" => false,
                    _ => return Err(format!("consecutive={value}: on or off is needed")),
                }
            }
            _ => return Err(format!("there is no {name}: it has to be {FORM}")),
        }
    }
    checked(scaling)
}

fn checked(scaling: Scaling) -> std::result::Result<Scaling, String> {
    scaling.check().map(|()| scaling)
}

/// As `--loss-scale` reads it again.
pub fn told(scaling: Option<Scaling>) -> String {
    match scaling {
        None => "none".to_owned(),
        Some(scaling) if scaling == Scaling::fixed(scaling.initial) => scaling.initial.to_string(),
        Some(Scaling { initial, least, window, hysteresis, consecutive }) => format!(
            "initial={initial},window={window},hysteresis={hysteresis},min={least},consecutive={}",
            if consecutive { "on" } else { "off" }
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::tests::train;

    fn of(flags: &str) -> std::result::Result<Option<Scaling>, String> {
        asked(&train(flags)).map_err(|e| e.to_string())
    }

    #[test]
    fn f16_is_scaled_as_one_says_and_nothing_else_is() {
        let dynamic = Scaling::default();
        for (flags, expected) in [
            ("", None),
            ("--dtype f32", None),
            ("--dtype f16", Some(dynamic)),
            ("--dtype f16 --loss-scale dynamic", Some(dynamic)),
            ("--dtype f16 --loss-scale 128", Some(Scaling::fixed(128.0))),
            ("--dtype f16 --loss-scale initial=4096", Some(Scaling { initial: 4096.0, ..dynamic })),
            (
                "--dtype f16 --loss-scale initial=32,window=50,hysteresis=1,min=0.5,consecutive=on",
                Some(Scaling { initial: 32.0, least: 0.5, window: 50, hysteresis: 1, consecutive: true }),
            ),
        ] {
            assert_eq!(of(flags), Ok(expected), "{flags}");
            if let Some(scaling) = expected {
                assert_eq!(read(&told(expected)), Ok(scaling), "{flags} is told as {}", told(expected));
            }
        }
    }

    #[test]
    fn what_cannot_be_a_scale_says_what_could() {
        for (flags, words) in [
            ("--loss-scale 128", &["--loss-scale 128 is for --dtype f16", "bf16", "leave it away"][..]),
            ("--dtype f16 --loss-scale 0", &["--loss-scale 0: ", "above 0"]),
            ("--dtype f16 --loss-scale=-4", &["--loss-scale -4: ", "above 0"]),
            ("--dtype f16 --loss-scale 1e60", &["above 0 in 32 bits"]),
            ("--dtype f16 --loss-scale 1e30", &["to 1.8446744e19"]),
            ("--dtype f16 --loss-scale big", &["a number, 'dynamic', or", "initial=65536"]),
            ("--dtype f16 --loss-scale windows=4", &["no windows", "window=1000"]),
            ("--dtype f16 --loss-scale window=4,window=5", &["window is said twice"]),
            ("--dtype f16 --loss-scale window=-4", &["window=-4: a whole number"]),
            (
                "--dtype f16 --loss-scale window=4294967296",
                &["window=4294967296: a whole number up to 4294967295 is needed"],
            ),
            ("--dtype f16 --loss-scale min=nan", &["min=nan: a number above 0"]),
            ("--dtype f16 --loss-scale initial=2,min=4", &["from 4", "the least"]),
            ("--dtype f16 --loss-scale hysteresis=0", &["number 0: at least 1"]),
            ("--dtype f16 --loss-scale consecutive=yes", &["on or off"]),
        ] {
            let said = of(flags).unwrap_err();
            assert!(words.iter().all(|word| said.contains(word)), "{said}");
        }
    }
}
