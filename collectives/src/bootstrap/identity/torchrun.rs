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
        let several = me.local_size.is_some_and(|local| local < me.world);
        // Runs that nobody names are all called alike, but two at once have not the same port. One that has failed is started
        // again under its name: how often, each agent counts for itself, by the failures that it sees.
        let again = if several { String::new() } else { text("TORCHELASTIC_RESTART_COUNT") };
        let job = format!("torchrun-{run}-{host}-{port}-{again}");
        if !host.is_empty() && several {
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
        // Two runs without a name.
        assert_ne!(with("MASTER_PORT", "29501").job, me.job);
        // One that is started again, which only of a single agent all ranks count alike.
        assert_eq!(with("TORCHELASTIC_RESTART_COUNT", "1").job, me.job);
        let alone = |count| {
            let worker = WORKER.map(|(name, value)| match name {
                "LOCAL_WORLD_SIZE" => (name, "4"),
                "TORCHELASTIC_RESTART_COUNT" => (name, count),
                _ => (name, value),
            });
            from(&worker).unwrap().unwrap().job
        };
        assert_ne!(alone("0"), alone("1"));
    }
}
