//! Which launcher started this process, where several have left variables: what starts a launcher, a shell or a job hands
//! its own down, and then they are of another process.

use super::super::{hosts, processors};
use super::{Environment, Identity, Launcher};
use crate::error::{Error, Result};

/// What tells which launcher started a process, beside its variables.
pub(super) struct Evidence<'a> {
    /// Whether this value of PMI_FD is a socket to a process manager.
    manager: &'a dyn Fn(&str) -> bool,
    /// The name of the process at the other end of that socket, where it can be seen.
    manages: &'a dyn Fn() -> Option<String>,
    /// The names of the processes above it, the nearest first.
    above: &'a dyn Fn() -> Vec<String>,
}

impl Evidence<'_> {
    pub fn of_this_process() -> Self {
        Evidence {
            manager: &|number| hosts::connected(number).is_some(),
            manages: &|| processors::name_of(hosts::pmi_manager()?),
            above: &|| processors::ancestors().collect(),
        }
    }

    /// Of variables that are those of no process.
    pub fn none() -> Self {
        Evidence { manager: &|_| false, manages: &|| None, above: &Vec::new }
    }
}

impl Environment<'_> {
    /// Open MPI's rank, or PMI's, or else Slurm's, but for those that something outside a step of srun's left behind.
    ///
    /// # Errors
    /// Variables that are malformed; those of srun and another that say different things, where nothing tells which of
    /// them started this process.
    pub(super) fn innermost(&self) -> Result<Option<Identity>> {
        // Open MPI hands no sockets down: a rank that has one of PMI's manager is that one's.
        if !self.is_managed()
            && self.started(Launcher::OpenMpi)?
            && let Some(me) = self.open_mpi()?
        {
            return Ok(Some(me));
        }
        if self.started(Launcher::Pmi)?
            && let Some(me) = self.pmi()?
        {
            return Ok(Some(me));
        }
        self.slurm()
    }

    /// Whether the variables of `launcher`, if there are any, are those of this process.
    fn started(&self, launcher: Launcher) -> Result<bool> {
        let [rank, world] = names(launcher);
        if self.text(rank).is_none() && self.text(world).is_none() {
            return Ok(false);
        }
        let nearest = self.nearest(launcher);
        // What Slurm left that makes no sense contradicts nobody. The shell of a batch job is no step; what it has come by where
        // the job was submitted is of no process in it.
        if !matches!(self.step(), Ok(Some(_))) {
            return Ok(nearest != Some(Launcher::Slurm));
        }
        match nearest {
            Some(nearest) => Ok(nearest == launcher),
            None => self.agreed(launcher),
        }
    }

    /// Whether the nearest of Slurm's processes above this one is a job's script or salloc, and none that starts ranks. Slurm
    /// names no step to either, so that the one in which the job was submitted, if it was in one, still stands there.
    pub(super) fn is_of_a_script(&self) -> bool {
        let script = |name: &String| match name.as_str() {
            "slurm_script" | "salloc" => Some(true),
            name => Launcher::Slurm.has(name).then_some(false),
        };
        (self.evidence.above)().iter().find_map(script) == Some(true)
    }

    /// Whether this process has a socket of PMI's manager.
    fn is_managed(&self) -> bool {
        self.text("PMI_RANK").is_some() && self.text("PMI_FD").is_some_and(|fd| (self.evidence.manager)(&fd))
    }

    /// Whether that manager is none of Slurm's, as far as that can be seen.
    pub(super) fn is_of_another_manager(&self) -> bool {
        self.is_managed() && (self.evidence.manages)().is_some_and(|name| !Launcher::Slurm.has(&name))
    }

    /// Which of srun and `launcher` started this process, as far as that can be seen.
    fn nearest(&self, launcher: Launcher) -> Option<Launcher> {
        // Slurm's own, which `srun --mpi=pmi2` brings, is of this very step.
        if launcher == Launcher::Pmi && self.is_managed() {
            return Some(launcher);
        }
        self.above(launcher)
    }

    /// The same by the names of the processes above this one.
    pub(super) fn above(&self, launcher: Launcher) -> Option<Launcher> {
        let of = |name: &String| [Launcher::Slurm, launcher].into_iter().find(|one| one.has(name));
        (self.evidence.above)().iter().find_map(of)
    }

    /// Whether it says the same as Slurm: true, or an error.
    fn agreed(&self, launcher: Launcher) -> Result<bool> {
        let [rank, world] = names(launcher);
        let (Ok(Some(slurm)), Some(at), Some(of)) = (self.slurm(), self.number(rank)?, self.number(world)?)
        else {
            return Ok(true);
        };
        if (slurm.rank, slurm.world) == (at, of) {
            return Ok(true);
        }
        // A container may hide what is above. Several ranks that do not belong together would not find each other and say
        // so; one that takes itself for all would not.
        if launcher == Launcher::OpenMpi && of > 1 {
            return Ok(true);
        }
        let steps = ["SLURM_STEP_ID", "SLURM_STEPID"].into_iter().filter(|name| self.text(name).is_some());
        let steps: Vec<String> = steps.map(|name| format!("-u {name}")).collect();
        Err(Error::Launch(format!(
            "srun says that this is rank {} of {} (SLURM_PROCID), {} that it is rank {at} of {of} ({rank}, {world}), and \
             nothing tells which of them started it: take 'env -u {rank} -u {world} caravan ...' if srun did, or \
             'env {} caravan ...' if the other did",
            slurm.rank,
            slurm.world,
            launcher.name(),
            steps.join(" ")
        )))
    }
}

/// The variables in which a launcher other than Slurm says who a process is.
fn names(launcher: Launcher) -> [&'static str; 2] {
    match launcher {
        Launcher::OpenMpi => ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"],
        _ => ["PMI_RANK", "PMI_SIZE"],
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::SLURM;
    use super::*;

    const OMPI: [(&str, &str); 2] = [("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "2")];
    const PMI: [(&str, &str); 3] = [("PMI_RANK", "0"), ("PMI_SIZE", "1"), ("PMI_FD", "9")];

    /// Who is a process in rank 5 of 7 of a step, with variables of another launcher beside.
    fn found(other: &[(&str, &str)], manager: bool, above: &[&str]) -> Result<Identity> {
        let table = [&SLURM, other].concat();
        let lookup = |name: &str| table.iter().find(|(k, _)| *k == name).map(|(_, v)| v.to_string());
        let above = || above.iter().map(|name| name.to_string()).collect();
        let evidence = Evidence { manager: &|fd| manager && fd == "9", above: &above, ..Evidence::none() };
        Identity::found(&Environment { lookup: &lookup, evidence }).map(|me| me.unwrap())
    }

    #[test]
    fn what_was_left_behind_outside_a_step_is_not_believed() {
        for left in [&OMPI[..], &PMI, &[&OMPI[..], &PMI].concat()] {
            let me = found(left, false, &["bash", "slurmstepd", "systemd", "mpirun"]).unwrap();
            assert_eq!((me.launcher, me.rank, me.world), (Launcher::Slurm, 5, 7), "{left:?}");
        }
        // Nor where another rank of the step is of the same number, nor what contradicts it in other words.
        let same = [("OMPI_COMM_WORLD_RANK", "5"), ("OMPI_COMM_WORLD_SIZE", "7"), ("PMIX_RANK", "1")];
        assert_eq!(found(&same, false, &["slurmstepd"]).unwrap().launcher, Launcher::Slurm);
        let hydra =
            [("PMI_RANK", "5"), ("PMI_SIZE", "7"), ("MPI_LOCALRANKID", "0"), ("MPI_LOCALNRANKS", "1")];
        assert_eq!(found(&hydra, false, &["slurmstepd"]).unwrap().launcher, Launcher::Slurm);
    }

    /// The manager is srun's own, and what Hydra says of a host is of a shell that it has started.
    #[test]
    fn what_hydra_left_behind_says_nothing_of_the_hosts_of_a_step() {
        let pmi2 = [
            ("PMI_RANK", "5"),
            ("PMI_SIZE", "7"),
            ("PMI_FD", "9"),
            ("MPI_LOCALRANKID", "0"),
            ("MPI_LOCALNRANKS", "1"),
        ];
        let local = |above: &[&str]| {
            let me = found(&pmi2, true, above).unwrap();
            (me.launcher, me.local_rank, me.local_size)
        };
        let slurm = found(&[], false, &[]).unwrap();
        assert_ne!(slurm.local_size, Some(1));
        let of_slurm = (Launcher::Slurm, slurm.local_rank, slurm.local_size);
        assert_eq!(local(&["bash", "slurmstepd", "hydra_pmi_proxy"]), of_slurm);
        // One proxy a rank, of each of which srun knows as much.
        assert_eq!(local(&["hydra_pmi_proxy", "slurmstepd"]), (Launcher::Pmi, Some(0), Some(1)));
    }

    /// A rank of Flux's, whose brokers are a step, may have the numbers of its broker.
    #[test]
    fn a_manager_that_is_none_of_slurms_is_believed_where_its_rank_has_the_numbers_of_a_step() {
        let same = [("PMI_RANK", "5"), ("PMI_SIZE", "7"), ("PMI_FD", "9")];
        let local = [("FLUX_TASK_RANK", "5"), ("FLUX_JOB_SIZE", "7"), ("FLUX_JOB_NNODES", "1")];
        let table = [&SLURM[..], &same, &local].concat();
        let of = |name: Option<&str>| {
            let lookup = |name: &str| table.iter().find(|(k, _)| *k == name).map(|(_, v)| v.to_string());
            let manages = || name.map(str::to_owned);
            let evidence = Evidence { manager: &|_| true, manages: &manages, ..Evidence::none() };
            let me = Identity::found(&Environment { lookup: &lookup, evidence }).unwrap().unwrap();
            (me.launcher, me.local_size, me.rendezvous.is_some())
        };
        assert_eq!(of(Some("flux-shell")), (Launcher::Pmi, Some(7), false));
        for slurms in [Some("slurmstepd"), None] {
            assert_eq!(of(slurms), (Launcher::Slurm, Some(2), true));
        }
    }

    #[test]
    fn what_was_left_behind_where_a_batch_job_was_submitted_is_not_believed() {
        let batch = [("SLURM_JOB_ID", "77"), ("SLURM_NTASKS", "2")];
        for left in [&OMPI[..], &PMI] {
            let lookup = |name: &str| {
                [&batch[..], left].concat().iter().find(|(k, _)| *k == name).map(|(_, v)| v.to_string())
            };
            let who = |above: &[&str]| {
                let above = || above.iter().map(|name| name.to_string()).collect();
                let evidence = Evidence { above: &above, ..Evidence::none() };
                Identity::found(&Environment { lookup: &lookup, evidence }).unwrap().map(|me| me.rank)
            };
            assert_eq!(who(&["slurm_script", "slurmstepd", "systemd"]), None);
            assert_eq!(who(&["mpirun", "slurm_script", "slurmstepd"]), Some(0));
            // A container may hide what is above.
            assert_eq!(who(&["init"]), Some(0));
        }
    }

    #[test]
    fn the_step_in_which_a_job_was_submitted_is_not_that_of_its_script() {
        let rank = |above: &[&str]| {
            let above = || above.iter().map(|name| name.to_string()).collect();
            let lookup = |name: &str| SLURM.iter().find(|(k, _)| *k == name).map(|(_, v)| v.to_string());
            let evidence = Evidence { above: &above, ..Evidence::none() };
            Identity::found(&Environment { lookup: &lookup, evidence }).unwrap().map(|me| me.rank)
        };
        assert_eq!(rank(&["slurm_script", "slurmstepd"]), None);
        assert_eq!(rank(&["bash", "salloc", "bash", "slurmstepd"]), None);
        assert_eq!(rank(&["bash", "slurmstepd", "slurm_script"]), Some(5));
        // A container may hide what is above.
        assert_eq!(rank(&["init"]), Some(5));
    }

    #[test]
    fn what_runs_inside_a_step_is_believed() {
        // srun starts the daemons of both, whose ranks inherit its variables.
        let orted = found(&OMPI, false, &["sh", "orted", "slurmstepd"]).unwrap();
        assert_eq!((orted.launcher, orted.rank, orted.world), (Launcher::OpenMpi, 0, 2));
        let by_name = found(&PMI, false, &["hydra_pmi_proxy", "slurmstepd"]).unwrap();
        let by_socket = found(&PMI, true, &["container", "slurmstepd"]).unwrap();
        for me in [by_name, by_socket] {
            assert_eq!((me.launcher, me.rank, me.world), (Launcher::Pmi, 0, 1));
        }
    }

    #[test]
    fn ranks_in_a_container_that_hides_their_launcher_are_believed() {
        let me = found(&OMPI, false, &["container"]).unwrap();
        assert_eq!((me.launcher, me.rank, me.world), (Launcher::OpenMpi, 0, 2));
    }

    #[test]
    fn a_manager_inside_another_launcher_is_believed() {
        let lookup = |name: &str| {
            [&OMPI[..], &PMI].concat().iter().find(|(k, _)| *k == name).map(|(_, v)| v.to_string())
        };
        for (lives, launcher) in [(true, Launcher::Pmi), (false, Launcher::OpenMpi)] {
            let evidence = Evidence { manager: &|_| lives, ..Evidence::none() };
            let me = Identity::found(&Environment { lookup: &lookup, evidence }).unwrap().unwrap();
            assert_eq!(me.launcher, launcher);
        }
    }

    #[test]
    fn a_contradiction_that_nothing_decides_is_refused() {
        let alone = [("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1")];
        for (other, words) in [
            (
                &alone[..],
                ["rank 0 of 1", "mpirun (Open MPI)", "-u OMPI_COMM_WORLD_RANK -u OMPI_COMM_WORLD_SIZE"],
            ),
            (&PMI, ["rank 0 of 1", "mpirun (PMI)", "'env -u PMI_RANK -u PMI_SIZE caravan ...' if srun did"]),
        ] {
            let text = found(other, false, &["sh", "init"]).unwrap_err().to_string();
            let all = words.into_iter().chain(["srun", "rank 5 of 7", "'env -u SLURM_STEP_ID caravan ...'"]);
            all.for_each(|word| assert!(text.contains(word), "{text} has no {word}"));
        }
    }
}
