//! Which types and reductions a run goes through: those that were asked for, less those of an `all` that the library
//! cannot carry.

use super::plan::Plan;
use super::table::{dtype_name, op_name};
use crate::failure::{Failure, Result};
use collectives::{DType, ReduceOp};

/// Types with their reductions, which are None once where nothing is reduced.
pub struct Cases {
    pub of: Vec<(DType, Vec<Option<ReduceOp>>)>,
    /// What is left out, and why.
    pub skipped: Vec<String>,
}

impl Cases {
    /// Those of `plan`, where `obstacle` says what is in the way of one.
    ///
    /// # Errors
    /// Nothing is left.
    pub fn new(plan: &Plan, obstacle: &dyn Fn(DType, Option<ReduceOp>) -> Option<String>) -> Result<Self> {
        let (mut of, mut skipped, mut first) = (Vec::new(), Vec::new(), None);
        for &dtype in &plan.dtypes {
            let mut able = Vec::new();
            for &op in &plan.ops {
                match obstacle(dtype, op) {
                    None => able.push(op),
                    Some(why) => {
                        skipped.push(format!("{} {}: {why}", dtype_name(dtype), op_name(op)));
                        first = first.or(Some(why));
                    }
                }
            }
            if !able.is_empty() {
                of.push((dtype, able));
            }
        }
        match first {
            Some(why) if of.is_empty() => {
                Err(Failure::usage(format!("--algo native: {why} (-d, -o, -e, --algo auto)")))
            }
            _ => Ok(Cases { of, skipped }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::plan::tests::plan;

    /// The cases of flags where there are no 16-bit sums and no averages.
    fn cases(flags: &str) -> Result<Cases> {
        Cases::new(&plan(flags).expect(flags), &|dtype, op| match op {
            Some(ReduceOp::Average) => Some("no average".to_owned()),
            Some(_) if dtype.size() == 2 => Some(format!("no {dtype}")),
            _ => None,
        })
    }

    #[test]
    fn all_leaves_out_what_cannot_be_and_says_so() {
        let all = cases("all_reduce -d all -o all").unwrap();
        assert_eq!(all.of.iter().map(|(_, ops)| ops.len()).collect::<Vec<_>>(), [4; 8]);
        assert_eq!(all.skipped.len(), 50 - 8 * 4);
        assert!(all.skipped.contains(&"bfloat16 sum: no bf16".to_owned()), "{:?}", all.skipped);
        let sums = cases("reduce -d all").unwrap();
        assert_eq!((sums.of.len(), sums.skipped.len()), (8, 2));
        // What is only moved is moved in any type.
        let moved = cases("all_gather -d all -o all").unwrap();
        assert_eq!((moved.of.len(), moved.skipped.len()), (10, 0));
    }

    #[test]
    fn one_that_cannot_be_is_refused_with_the_flags_that_help() {
        for (flags, why) in [
            ("-d half", "no f16"),
            ("-o avg", "no average"),
            ("-d half -o all", "no f16"),
            ("-d all -o avg", "no average"),
        ] {
            let e = cases(&format!("all_reduce {flags}")).err().expect(flags);
            let said = format!("--algo native: {why} (-d, -o, -e, --algo auto)");
            assert_eq!((e.code(), e.to_string()), (2, said));
        }
    }
}
