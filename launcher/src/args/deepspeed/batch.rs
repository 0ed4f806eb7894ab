//! Sequences of a step: the product of those of a micro-batch, the micro-batches of a rank, and the ranks. Of ranks a file
//! says nothing, so that what is missing is found once their number is known.

use super::document::{Document, Said};
use super::keys::Told;
use super::words::push;
use crate::human;
use crate::plan::with_ranks;

const ALL: &str = "train_batch_size";
const ROWS: &str = "train_micro_batch_size_per_gpu";
const STEPS: &str = "gradient_accumulation_steps";

/// What is known of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Batch {
    /// Sequences of all ranks together, if the file says.
    pub all: Option<usize>,
    /// Whether the file, or a flag, says how many a micro-batch has.
    pub rows: bool,
    /// And how many of them there are.
    pub accumulate: bool,
}

impl Batch {
    /// What a file says, beside flags that were `typed`, --micro-batch and --accumulate.
    ///
    /// # Errors
    /// A number that is none.
    pub fn read(document: &Document, typed: [bool; 2], told: &mut Told) -> Result<Self, String> {
        let mut known = typed;
        for (index, (flag, key)) in [("--micro-batch", ROWS), ("--accumulate", STEPS)].into_iter().enumerate()
        {
            let said = document.count(key)?.map(|count| count.to_string());
            known[index] |= matches!(said, Said::Value(_));
            push(document, told, (flag, key), said, None);
        }
        if [ALL, ROWS, STEPS].iter().all(|key| !document.has(key)) {
            told.left.push(ALL.to_owned());
        }
        let [rows, accumulate] = known;
        Ok(Batch { all: document.count(ALL)?.value(), rows, accumulate })
    }

    /// Sequences of a micro-batch and micro-batches of a rank, of `world` ranks, which something else has `started` or not;
    /// where the file does not say, as DeepSpeed finds them, or as `flags` have them.
    ///
    /// # Errors
    /// Numbers of which one is not the product of the others, with what would be.
    pub fn of(self, flags: (usize, usize), world: usize, started: bool) -> Result<(usize, usize), String> {
        let (rows, steps) = flags;
        let Some(all) = self.all else { return Ok(flags) };
        match (self.rows, self.accumulate) {
            (true, true) => {
                let product = rows.saturating_mul(steps);
                if product.checked_mul(world) == Some(all) {
                    return Ok(flags);
                }
                let made = product.saturating_mul(world);
                let ranks = all.is_multiple_of(product.max(1)).then_some(all / product.max(1));
                Err(format!(
                    "{ALL} {all} is not {ROWS} {rows} x {STEPS} {steps} x {}, which make {made}: {}",
                    human::several(world, "rank"),
                    ways(ranks, &[made], started)
                ))
            }
            (true, false) => divided(all, (ROWS, rows), world, started, STEPS).map(|steps| (rows, steps)),
            (false, true) => divided(all, (STEPS, steps), world, started, ROWS).map(|rows| (rows, steps)),
            (false, false) => divided(all, (STEPS, 1), world, started, ROWS).map(|rows| (rows, 1)),
        }
    }
}

/// What is left for the number that is missing.
fn divided(
    all: usize,
    (known, value): (&str, usize),
    world: usize,
    started: bool,
    missing: &str,
) -> Result<usize, String> {
    let product = value.saturating_mul(world);
    if product > 0 && all.is_multiple_of(product) {
        return Ok(all / product);
    }
    // The nearest number of ranks by which it can be divided, and its nearest numbers that these ranks divide.
    let whole = all.is_multiple_of(value.max(1)).then_some(all / value.max(1));
    let fits = |whole: usize| {
        let divides = |&ranks: &usize| whole.is_multiple_of(ranks);
        (1..world).rev().find(divides).or_else(|| (world + 1..=whole).find(divides))
    };
    let down = all / product.max(1) * product;
    let near = [down, down.saturating_add(product)];
    Err(format!(
        "{ALL} {all} cannot be divided by {known} {value} x {} into a whole {missing}: {}",
        human::several(world, "rank"),
        ways(whole.and_then(fits), if down > 0 { &near } else { &near[1..] }, started)
    ))
}

/// What would do.
fn ways(ranks: Option<usize>, sums: &[usize], started: bool) -> String {
    let ranks = ranks.map(|ranks| with_ranks(ranks as u64, started));
    let sums: Vec<String> = sums.iter().map(usize::to_string).collect();
    let sums = format!("take {ALL} {}", sums.join(" or "));
    ranks.into_iter().chain([sums]).collect::<Vec<_>>().join(", or ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn read(value: Value, typed: [bool; 2]) -> Batch {
        Batch::read(&Document(value), typed, &mut Told::default()).unwrap()
    }

    #[test]
    fn what_is_missing_is_found_as_deepspeed_finds_it() {
        let of = |all: Option<usize>, rows, accumulate, flags, world| {
            Batch { all, rows, accumulate }.of(flags, world, false).unwrap()
        };
        assert_eq!(of(Some(64), true, true, (4, 4), 4), (4, 4));
        assert_eq!(of(Some(64), true, false, (4, 1), 4), (4, 4));
        assert_eq!(of(Some(64), false, true, (12, 4), 4), (4, 4));
        assert_eq!(of(Some(64), false, false, (12, 1), 4), (16, 1));
        // What nobody says is left to the flags.
        assert_eq!(of(None, true, true, (3, 5), 4), (3, 5));
        assert_eq!(of(None, false, false, (12, 1), 4), (12, 1));
    }

    #[test]
    fn what_does_not_fit_is_refused_with_all_numbers_and_what_would() {
        let of = |all, rows, accumulate, flags, world, started| {
            Batch { all: Some(all), rows, accumulate }.of(flags, world, started).unwrap_err()
        };
        for (told, words) in [
            (
                of(64, true, true, (16, 4), 2, false),
                "train_batch_size 64 is not train_micro_batch_size_per_gpu 16 x gradient_accumulation_steps 4 x 2 ranks, which \
                 make 128: take --ranks 1, or take train_batch_size 128",
            ),
            (
                of(192, true, true, (16, 4), 2, true),
                "which make 128: start 3 ranks, or take train_batch_size 128",
            ),
            (of(65, true, true, (16, 4), 1, false), "x 1 rank, which make 64: take train_batch_size 64"),
            (
                of(256, false, true, (12, 16), 3, false),
                "train_batch_size 256 cannot be divided by gradient_accumulation_steps 16 x 3 ranks into a whole \
                 train_micro_batch_size_per_gpu: take --ranks 2, or take train_batch_size 240 or 288",
            ),
            (
                of(10, true, false, (4, 1), 2, false),
                "by train_micro_batch_size_per_gpu 4 x 2 ranks into a whole gradient_accumulation_steps: take train_batch_size 8 \
                 or 16",
            ),
            (of(3, false, false, (12, 1), 4, false), "take --ranks 3, or take train_batch_size 4"),
        ] {
            assert!(told.ends_with(words), "{told}");
        }
    }

    #[test]
    fn flags_say_what_a_file_does_not() {
        let file = json!({"train_batch_size": 64, "gradient_accumulation_steps": "auto"});
        assert_eq!(read(file.clone(), [false; 2]), Batch { all: Some(64), rows: false, accumulate: false });
        assert_eq!(read(file, [true, false]), Batch { all: Some(64), rows: true, accumulate: false });
        let file = json!({"train_micro_batch_size_per_gpu": 3, "train_batch_size": "auto"});
        assert_eq!(read(file, [false; 2]), Batch { all: None, rows: true, accumulate: false });
        let none = Batch::read(&Document(json!({"train_batch_size": 0})), [false; 2], &mut Told::default());
        assert_eq!(none.unwrap_err(), "train_batch_size 0: it must be at least 1");
    }
}
