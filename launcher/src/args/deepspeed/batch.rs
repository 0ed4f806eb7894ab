//! Sequences of a step: the product of those of a micro-batch, the micro-batches of a rank, and the ranks. Of ranks a file
//! says nothing, so that what is missing is found once their number is known.

use super::document::{Document, Said};
use super::keys::Told;
use super::words::push;
use crate::human;
use crate::plan::with_ranks;
use collectives::MAX_SIZE;

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
        // Which is refused as the flag that it becomes.
        if (self.rows && rows == 0) || (self.accumulate && steps == 0) {
            return Ok(flags);
        }
        match (self.rows, self.accumulate) {
            (true, true) => {
                let product = rows.checked_mul(steps);
                let made = product.and_then(|product| product.checked_mul(world));
                if made == Some(all) {
                    return Ok(flags);
                }
                let ranks = product.and_then(|product| whole(all, product));
                let make = made.map_or("more than can be counted".to_owned(), |made| made.to_string());
                Err(format!(
                    "{ALL} {all} is not {ROWS} {rows} x {STEPS} {steps} x {}, which make {make}: {}",
                    human::several(world, "rank"),
                    ways(ranks, made.into_iter(), started)
                ))
            }
            (true, false) => divided(all, (ROWS, rows), world, started, STEPS).map(|steps| (rows, steps)),
            (false, true) => divided(all, (STEPS, steps), world, started, ROWS).map(|rows| (rows, steps)),
            (false, false) => divided(all, (STEPS, 1), world, started, ROWS).map(|rows| (rows, 1)),
        }
    }
}

/// How many times `all` has `part`, if that is a whole number of times.
fn whole(all: usize, part: usize) -> Option<usize> {
    (part > 0 && all.is_multiple_of(part)).then(|| all / part)
}

/// What is left for the number that is missing.
fn divided(
    all: usize,
    (known, value): (&str, usize),
    world: usize,
    started: bool,
    missing: &str,
) -> Result<usize, String> {
    let product = value.checked_mul(world);
    if let Some(left) = product.and_then(|product| whole(all, product)) {
        return Ok(left);
    }
    // The nearest fewer ranks by which it can be divided, and its nearest numbers that these ranks divide.
    let ranks = whole(all, value).and_then(|rest| (1..world).rev().find(|&ranks| rest.is_multiple_of(ranks)));
    let down = product.map(|product| all / product * product);
    let up = product.zip(down).and_then(|(product, down)| down.checked_add(product));
    Err(format!(
        "{ALL} {all} cannot be divided by {known} {value} x {} into a whole {missing}: {}",
        human::several(world, "rank"),
        ways(ranks, down.filter(|&down| down > 0).into_iter().chain(up), started)
    ))
}

/// What would do, of ranks as many as there can be.
fn ways(ranks: Option<usize>, sums: impl Iterator<Item = usize>, started: bool) -> String {
    let ranks = ranks.filter(|ranks| (1..=MAX_SIZE).contains(ranks));
    let ranks = ranks.map(|ranks| with_ranks(ranks as u64, started));
    let sums: Vec<String> = sums.map(|sum| sum.to_string()).collect();
    let sums = (!sums.is_empty()).then(|| format!("take {ALL} {}", sums.join(" or ")));
    let ways: Vec<String> = ranks.into_iter().chain(sums).collect();
    if ways.is_empty() { "lower some of them".to_owned() } else { ways.join(", or ") }
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
        // What is refused as a flag's is not told to be some other number.
        assert_eq!(of(Some(64), true, true, (0, 4), 4), (0, 4));
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
            (of(16, true, true, (16, 1), 2, true), "start 1 rank, or take train_batch_size 32"),
            // No more ranks than there can be, and no numbers that there are not.
            (of(1 << 20, true, true, (1, 1), 2, false), "x 2 ranks, which make 2: take train_batch_size 2"),
            (
                of(3, true, true, (usize::MAX, 2), 2, false),
                "x 2 ranks, which make more than can be counted: lower some of them",
            ),
            (
                of(3, true, false, (usize::MAX, 1), 2, false),
                "gradient_accumulation_steps: lower some of them",
            ),
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
