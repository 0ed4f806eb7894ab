//! The GPUs of a job: as many as its command uses.

use crate::args::SbatchArgs;
use crate::failure::{Failure, Result};

/// How many GPUs each node is asked for.
pub fn of_a_node(args: &SbatchArgs) -> Option<usize> {
    args.gpus_per_node.or(args.gpus_per_rank.map(|each| each * args.ranks_per_node))
}

/// Whether the job has the GPUs that its command, `name`, uses. Those are on GPUs by a `flag`, if that is `given`, and may
/// be `shared`.
///
/// # Errors
/// None, too few, or some that nobody uses.
pub fn check(args: &SbatchArgs, name: &str, (flag, given): (&str, bool), shared: bool) -> Result<()> {
    let ranks = args.ranks_per_node;
    let asked = [("--gpus-per-rank", args.gpus_per_rank), ("--gpus-per-node", args.gpus_per_node)];
    let asked = asked.into_iter().find_map(|(option, gpus)| Some((option, gpus?)));
    let refuse = |why: String| Err(Failure::usage(why));
    match (given, asked) {
        (false, None) => Ok(()),
        (false, Some((option, gpus))) => refuse(format!(
            "{option} {gpus}: this {name} uses no GPU: add {flag} to the command, or leave {option} away"
        )),
        (true, None) if shared => refuse(format!(
            "{flag} --share-gpus has ranks share GPUs, and the job has none: add --gpus-per-node 1 before --"
        )),
        (true, None) => refuse(format!(
            "{flag} takes a GPU for each rank, and the job has none: add --gpus-per-rank 1 before --"
        )),
        (true, Some(("--gpus-per-rank", 1))) => match shared && ranks > 1 {
            false => Ok(()),
            true => refuse(
                "--gpus-per-rank 1 leaves no rank a GPU to share: take --gpus-per-node 1, or leave --share-gpus away"
                    .to_owned(),
            ),
        },
        (true, Some(("--gpus-per-rank", more))) => {
            refuse(format!("--gpus-per-rank {more}: a rank uses one GPU: take --gpus-per-rank 1"))
        }
        (true, Some((_, gpus))) if gpus > ranks => {
            refuse(format!("--gpus-per-node {gpus}: a rank uses one GPU: take --gpus-per-node {ranks}"))
        }
        (true, Some((_, gpus))) if gpus < ranks && !shared => refuse(format!(
            "--gpus-per-node {gpus}: the {ranks} ranks of a node use one each: take --gpus-per-node {ranks}, or add \
             --share-gpus to the command"
        )),
        (true, Some(_)) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use crate::sbatch::tests::of;

    #[test]
    fn a_job_has_the_gpus_that_its_command_uses() {
        for command in [
            "train --device cuda",
            "train --device cuda --transport nccl",
            "eval --model m --data d --device cuda",
            "bench all_reduce --transport nccl --algo native",
        ] {
            assert!(of(&format!("caravan sbatch --gpus-per-rank 1 -- {command}")).is_ok(), "{command}");
            let e = of(&format!("caravan sbatch -- {command}")).expect_err(command).to_string();
            assert!(e.contains("add --gpus-per-rank 1"), "{e}");
            let e =
                of(&format!("caravan sbatch --gpus-per-rank 4 -- {command}")).expect_err(command).to_string();
            assert!(e.contains("--gpus-per-rank 4") && e.contains("take --gpus-per-rank 1"), "{e}");
        }
        for (command, flag) in [
            ("train", "--device cuda"),
            ("eval --model m --data d", "--device cuda"),
            ("bench all_reduce", "--transport nccl"),
        ] {
            let e =
                of(&format!("caravan sbatch --gpus-per-rank 1 -- {command}")).expect_err(command).to_string();
            assert!(e.contains("--gpus-per-rank 1") && e.contains(&format!("add {flag}")), "{e}");
        }
    }

    #[test]
    fn ranks_that_share_gpus_have_fewer_of_them() {
        let job =
            |flags: &str, command: &str| of(&format!("caravan sbatch {flags} -- {command} --share-gpus"));
        for command in ["bench all_reduce --transport nccl", "train --device cuda"] {
            for (flags, gpus) in [
                ("--ranks-per-node 2 --gpus-per-node 1", 1),
                ("--nodes 2 --ranks-per-node 4 --gpus-per-node 2", 2),
                ("--gpus-per-rank 1", 1),
            ] {
                let text = job(flags, command).unwrap();
                assert!(text.contains(&format!("#SBATCH --gpus-per-node={gpus}\n")), "{text}");
            }
            for (flags, words) in [
                ("--ranks-per-node 2", ["share GPUs", "add --gpus-per-node 1"]),
                ("--ranks-per-node 2 --gpus-per-rank 1", ["to share", "take --gpus-per-node 1"]),
                ("--ranks-per-node 2 --gpus-per-node 3", ["--gpus-per-node 3", "take --gpus-per-node 2"]),
                ("--gpus-per-node 2", ["a rank uses one GPU", "take --gpus-per-node 1"]),
                ("--gpus-per-node 0", ["--gpus-per-node 0", "1 to"]),
            ] {
                let e = job(flags, command).expect_err(flags);
                assert!(e.code() == 2 && words.iter().all(|w| e.to_string().contains(w)), "{e}");
            }
        }
        let e = of("caravan sbatch --ranks-per-node 2 --gpus-per-node 1 -- train --device cuda").unwrap_err();
        assert!(e.to_string().contains("add --share-gpus"), "{e}");
        assert!(of("caravan sbatch --ranks-per-node 2 --gpus-per-node 2 -- train --device cuda").is_ok());
        let e = of("caravan sbatch --gpus-per-node 1 -- train").unwrap_err();
        assert!(e.to_string().contains("leave --gpus-per-node away"), "{e}");
    }
}
