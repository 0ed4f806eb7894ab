//! What process managers that speak PMI leave in the environment of a rank: Hydra's, and others.

use super::super::hosts;
use super::{Environment, Identity, Launcher, Names};
use crate::error::Result;

impl Environment<'_> {
    pub(super) fn pmi(&self) -> Result<Option<Identity>> {
        // Hydra's, those of HPE's PALS, and MVAPICH's.
        let locals = [
            ("MPI_LOCALRANKID", hosts::OF_HYDRA),
            ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
            ("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
        ];
        let said = |&(_, size): &(&'static str, &'static str)| self.text(size).is_some();
        let found = locals.into_iter().find(said);
        let of_flux = found.is_none() && self.is_of_flux();
        let (local_rank, local_size) = match found {
            // Which has no such number.
            None if of_flux => ("FLUX_TASK_LOCAL_ID", ""),
            found => found.unwrap_or(locals[0]),
        };
        let names = Names { rank: "PMI_RANK", world: "PMI_SIZE", local_rank, local_size };
        let Some(mut me) = self.ranks(&names, Launcher::Pmi)? else { return Ok(None) };
        if of_flux {
            me.local_size = match self.number("FLUX_JOB_NNODES")? {
                Some(1) => Some(me.world),
                Some(nodes) if nodes == me.world && me.local_rank == Some(0) => Some(1),
                _ => None,
            };
        }
        // `srun --mpi=pmi2` sets PMI_RANK too, and then Slurm knows more. Under another manager inside an allocation the Slurm
        // variables are those of its process on this node: where that is one a rank, they agree.
        if let Some(slurm) = self.slurm()?
            && (slurm.rank, slurm.world) == (me.rank, me.world)
        {
            let of_srun = self.text(hosts::OF_HYDRA).is_none() && !self.is_of_another_manager();
            if of_srun || self.above(Launcher::Pmi) == Some(Launcher::Slurm) {
                return Ok(Some(slurm));
            }
            // Of several on a node only one agrees, and the others would not look there.
            if me.local_size.is_none_or(|local| local == 1) {
                me.rendezvous = slurm.rendezvous;
            }
        }
        me.job = self.text("PMI_JOBID").map(|j| format!("pmi-{j}"));
        Ok(Some(me))
    }

    /// Whether what Flux says of a rank is of this one.
    fn is_of_flux(&self) -> bool {
        let same = |one, other| self.text(one).is_some_and(|said| self.text(other) == Some(said));
        same("FLUX_TASK_RANK", "PMI_RANK") && same("FLUX_JOB_SIZE", "PMI_SIZE")
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::who;

    #[test]
    fn each_process_manager_counts_the_ranks_of_a_host_by_its_own_names() {
        let with = |extra: &[(&'static str, &'static str)]| {
            let (_, _, rank, size, _) = who(&[&[("PMI_RANK", "5"), ("PMI_SIZE", "8")], extra].concat());
            (rank, size)
        };
        assert_eq!(with(&[("PMI_LOCAL_RANK", "1"), ("PMI_LOCAL_SIZE", "4")]), (Some(1), Some(4)));
        let mvapich = [("MV2_COMM_WORLD_LOCAL_RANK", "2"), ("MV2_COMM_WORLD_LOCAL_SIZE", "3")];
        assert_eq!(with(&mvapich), (Some(2), Some(3)));
        let hydra = [&mvapich[..], &[("MPI_LOCALRANKID", "0"), ("MPI_LOCALNRANKS", "2")]].concat();
        assert_eq!(with(&hydra), (Some(0), Some(2)));
        let flux = |nodes, local| {
            let task = [("FLUX_TASK_RANK", "5"), ("FLUX_JOB_SIZE", "8")];
            [&task[..], &[("FLUX_JOB_NNODES", nodes), ("FLUX_TASK_LOCAL_ID", local)]].concat()
        };
        assert_eq!(with(&flux("1", "5")), (Some(5), Some(8)));
        assert_eq!(with(&flux("8", "0")), (Some(0), Some(1)));
        assert_eq!(with(&flux("3", "2")), (Some(2), None));
        // Of another task, which has started this one's manager.
        assert_eq!(with(&[&flux("1", "5")[..], &hydra].concat()), (Some(0), Some(2)));
        assert_eq!(with(&flux("1", "5")[1..]), (None, None));
    }
}
