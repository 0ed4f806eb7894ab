//! What torchrun leaves in the environment of a worker.

use super::super::hosts;
use super::{Environment, Identity, Launcher, Names};
use crate::error::Result;

impl Environment<'_> {
    /// The rank that torchrun gave this process, if it did: only its agents set the name of a run, and `RANK` alone may be
    /// anybody's.
    pub(super) fn torchrun(&self) -> Result<Option<Identity>> {
        let Some(run) = self.short("TORCHELASTIC_RUN_ID")? else { return Ok(None) };
        let names = Names {
            rank: "RANK",
            world: "WORLD_SIZE",
            local_rank: "LOCAL_RANK",
            local_size: "LOCAL_WORLD_SIZE",
        };
        let Some(mut me) = self.ranks(&names, Launcher::TorchRun)? else { return Ok(None) };
        let text = |name| self.text(name).unwrap_or_default();
        let (host, port) = (text("MASTER_ADDR"), text("MASTER_PORT"));
        // Runs that nobody names are all called alike, but two at once have not the same port; and one that has failed is
        // started again under its name.
        let job = format!("torchrun-{run}-{host}-{port}-{}", text("TORCHELASTIC_RESTART_COUNT"));
        if !host.is_empty() && me.local_size.is_some_and(|local| local < me.world) {
            // There is rank 0; at its port listens torchrun.
            me.rendezvous = Some(format!("{host}:{}", hosts::port_of(&job)));
        }
        me.job = Some(job);
        Ok(Some(me))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{SLURM, from, who};
    use super::*;

    const WORKER: [(&str, &str); 8] = [
        ("TORCHELASTIC_RUN_ID", "none"),
        ("TORCHELASTIC_RESTART_COUNT", "0"),
        ("RANK", "3"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("MASTER_ADDR", "node7"),
        ("MASTER_PORT", "29500"),
    ];

    fn with(name: &'static str, value: &'static str) -> Identity {
        from(&WORKER.map(|(k, v)| if k == name { (k, value) } else { (k, v) })).unwrap().unwrap()
    }

    #[test]
    fn a_worker_is_a_rank_also_within_a_step_of_srun() {
        assert_eq!(who(&WORKER), (3, 4, Some(1), Some(2), Launcher::TorchRun));
        assert_eq!(who(&[&SLURM[..], &WORKER].concat()), (3, 4, Some(1), Some(2), Launcher::TorchRun));
        // What else has such variables may have set them for others.
        assert_eq!(from(&WORKER[2..]).unwrap(), None);
    }

    #[test]
    fn workers_of_several_hosts_meet_at_rank_0s() {
        let me = with("RANK", "2");
        assert!(me.rendezvous.as_deref().unwrap().starts_with("node7:2"), "{me:?}");
        assert_eq!(me.rendezvous, with("RANK", "0").rendezvous);
        assert_eq!(with("LOCAL_WORLD_SIZE", "4").rendezvous, None);
        // Two runs without a name, and one that is started again.
        for (name, value) in [("MASTER_PORT", "29501"), ("TORCHELASTIC_RESTART_COUNT", "1")] {
            assert_ne!(with(name, value).job, me.job);
        }
    }
}
