//! Ranks that something else has started, where other ones are asked for or nobody says which this is.

use super::usage;
use crate::failure::Result;
use collectives::bootstrap::{self, Identity, variables};

/// Refuses to be a run of its own where something else than torchrun has made this process one of several of PyTorch's, or
/// Flux or PALS one of theirs without PMI: each of them would be such a run, without a word. The same where it was told how to
/// meet others, and not which rank it is.
pub(super) fn check_alone(variable: impl Fn(&str) -> Option<String>) -> Result<()> {
    let set = |name: &str| variable(name).filter(|v| !v.trim().is_empty());
    let several = |size: &str| set(size).is_some_and(|n| n.trim().parse().is_ok_and(|n: usize| n > 1));
    let first = |names: &[&'static str]| names.iter().find_map(|&name| Some((name, set(name)?)));
    let launched: &[_] = match several("FLUX_JOB_SIZE") {
        true => &["PALS_RANKID", "FLUX_TASK_RANK"],
        false => &["PALS_RANKID"],
    };
    if let Some((name, value)) = first(launched) {
        return usage(format!(
            "{name}={value} is set without PMI_RANK and PMI_SIZE, and this would be a run of its own: have what starts ranks set \
             those, or set {} and {} for each process, or take --ranks N for a run of this process",
            variables::RANK,
            variables::WORLD
        ));
    }
    let others = [variables::RENDEZVOUS, variables::LOCAL_RANK, variables::LOCAL_SIZE];
    if let Some((name, value)) = first(&others) {
        return usage(format!(
            "{name}={value} is set and nothing says which of how many ranks this is, so that it would be a run of its own: set \
             {} and {} for each process, or take --ranks N for a run of this process",
            variables::RANK,
            variables::WORLD
        ));
    }
    match (set("RANK"), set("WORLD_SIZE"), set("MASTER_ADDR")) {
        (Some(rank), Some(world), Some(host)) if several("WORLD_SIZE") => usage(format!(
            "RANK={rank} of WORLD_SIZE={world} is set, not by torchrun, and this would be a run of its own: for ranks that \
             meet set CARAVAN_RANK={rank}, CARAVAN_WORLD={world}, CARAVAN_JOB and CARAVAN_RENDEZVOUS={host}:PORT, or take \
             --ranks N for a run of this process"
        )),
        _ => Ok(()),
    }
}

/// Why `asked` ranks cannot be had where a launcher started others: also a shell that it gave to a user is one of them.
pub(super) fn elsewhere(asked: usize, there: &Identity) -> String {
    let (name, world) = (there.launcher.name(), there.world);
    let itself = by_itself(bootstrap::marks());
    match world {
        1 => format!(
            "--ranks {asked}, but this process is the only rank that {name} started: start {asked} with it, or {itself}"
        ),
        _ => format!(
            "--ranks {asked}, but this process is one of {world} ranks that {name} started: leave --ranks away if all of \
             them run caravan, or {itself}"
        ),
    }
}

/// How a shell with these marks of a launcher has caravan start ranks.
pub fn by_itself(marks: impl Iterator<Item = &'static str>) -> String {
    let marks: Vec<String> = marks.map(|name| format!("-u {name}")).collect();
    format!("take 'env {} caravan ...', which starts them itself", marks.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use collectives::bootstrap::{Launcher, MARKS};

    #[test]
    fn other_ranks_than_the_launcher_started_are_refused_with_a_way() {
        for (world, words) in
            [(1, "start 4 with it, or"), (8, "one of 8 ranks that srun started: leave --ranks away")]
        {
            let there = Identity { world, launcher: Launcher::Slurm, ..Identity::alone() };
            let text = elsewhere(4, &there);
            let words = ["--ranks 4", words, "take 'env", "caravan ...', which starts them itself"];
            assert!(words.iter().all(|w| text.contains(w)), "{text}");
        }
    }

    #[test]
    fn who_leaves_the_marks_away_is_nobodys_rank_and_not_refused() {
        let pmi = [("PMI_RANK", "0"), ("PMI_SIZE", "2")];
        let torch = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "n")];
        let own = [("CARAVAN_RANK", "0"), ("CARAVAN_WORLD", "2")];
        for (launched, beside) in [
            (&torch[..], &[("TORCHELASTIC_RUN_ID", "none")][..]),
            (&own, &[("CARAVAN_RENDEZVOUS", "n:9")]),
            (&own, &[("CARAVAN_JOB", "j"), ("CARAVAN_LOCAL_RANK", "0"), ("CARAVAN_LOCAL_SIZE", "2")]),
            (&pmi, &[("PALS_RANKID", "0")]),
            (&pmi, &[("FLUX_TASK_RANK", "0"), ("FLUX_JOB_SIZE", "2")]),
            (&pmi, &torch),
            (&[("SLURM_STEP_ID", "0"), ("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2")], &pmi),
            (&[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "2"), ("PMIX_RANK", "0")], &own),
        ] {
            let all = [launched, beside].concat();
            let value = |name: &str| all.iter().find(|(k, _)| *k == name).map(|(_, v)| v.to_string());
            assert_eq!(Identity::from_lookup(value).unwrap().unwrap().world, 2, "{all:?}");
            let left = |name: &str| value(name).filter(|_| !MARKS.contains(&name));
            assert_eq!(Identity::from_lookup(left).unwrap(), None, "{all:?}");
            assert!(check_alone(left).is_ok(), "{all:?}: {:?}", check_alone(left));
        }
    }
}
