//! What srun leaves in the environment of a rank.

use super::super::hosts;
use super::{Environment, Identity, Launcher, Names, below, fits, variables};
use crate::error::{Error, Result};

/// Slurm numbers its batch, interactive and external pseudo-steps from here upwards, or from -1 downwards since 26.05; a
/// process in one of them was not started by srun as a rank, although SLURM_PROCID is 0 there.
const PSEUDO_STEPS: i64 = 0xffff_fff0;

impl Environment<'_> {
    /// The step that srun started this process in, if it did.
    pub(super) fn step(&self) -> Result<Option<i64>> {
        let Some(text) = self.text("SLURM_STEP_ID").or(self.text("SLURM_STEPID")) else { return Ok(None) };
        let step: i64 =
            text.parse().map_err(|_| Error::Launch(format!("SLURM_STEP_ID={text} is not a whole number")))?;
        Ok(((0..PSEUDO_STEPS).contains(&step) && !self.is_of_a_script()).then_some(step))
    }

    pub(super) fn slurm(&self) -> Result<Option<Identity>> {
        let Some(step) = self.step()? else { return Ok(None) };
        let world =
            if self.text("SLURM_STEP_NUM_TASKS").is_some() { "SLURM_STEP_NUM_TASKS" } else { "SLURM_NTASKS" };
        let names = Names {
            rank: "SLURM_PROCID",
            world,
            local_rank: "SLURM_LOCALID",
            // Slurm has no such number; it is computed from the list of tasks per node below.
            local_size: "",
        };
        let Some(mut me) = self.ranks(&names, Launcher::Slurm)? else { return Ok(None) };
        let job = self.text("SLURM_JOB_ID").or(self.text("SLURM_JOBID")).unwrap_or_else(|| "0".into());
        me.job = Some(format!("slurm-{job}.{step}"));
        let node = self.number("SLURM_NODEID")?;
        let hosts = self.first(&["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"]);
        let hosts = hosts.map(|(name, text)| hosts::expand(name, &text)).transpose()?.unwrap_or_default();
        // Those of heterogeneous steps are sorted, and their nodes are numbered component by component: so a node has the place
        // of its name, if it has one there.
        let here = self.text("SLURMD_NODENAME").filter(|_| !hosts.is_empty());
        let place = match &here {
            None => node,
            Some(here) => {
                let mut places = (0..hosts.len()).filter(|&at| hosts[at] == *here);
                let (Some(place), None) = (places.next(), places.next()) else { return Ok(Some(me)) };
                Some(place)
            }
        };
        let per_node = self.first(&["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"]);
        if let (Some((name, text)), Some(place)) = (per_node, place) {
            let counts = hosts::tasks_per_node(name, &text)?;
            if let Some(&count) = counts.get(place) {
                fits(&format!("{name}={text}: {count} of node {place}"), count, names.world, me.world)?;
                if let Some(local_rank) = me.local_rank {
                    below("SLURM_LOCALID", local_rank, &format!("{name}={text}: node {place} has"), count)?;
                }
                me.local_size = Some(count);
            }
        }
        // All ranks look for the first one there.
        if let (0, Some(here)) = (me.rank, here)
            && here != hosts[0]
            && me.local_size != Some(me.world)
            && self.text(variables::RENDEZVOUS).is_none()
        {
            return Err(Error::Launch(format!(
                "rank 0 is on {here} and Slurm's list of this step's hosts begins with {}, as of heterogeneous steps: set \
                 {}={here}:PORT for all ranks",
                hosts[0],
                variables::RENDEZVOUS
            )));
        }
        if me.local_size != Some(me.world) && hosts.len() > 1 {
            me.rendezvous = Some(format!("{}:{}", hosts[0], hosts::port_of(&format!("{job}.{step}"))));
        }
        Ok(Some(me))
    }

    /// The first of `names` that is set, and its value.
    fn first(&self, names: &[&'static str]) -> Option<(&'static str, String)> {
        names.iter().find_map(|&name| self.text(name).map(|text| (name, text)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{SLURM, from, who};
    use super::*;

    #[test]
    fn slurm_gives_place_job_and_meeting_point() {
        let me = from(&SLURM).unwrap().unwrap();
        assert_eq!(who(&SLURM), (5, 7, Some(1), Some(2), Launcher::Slurm));
        assert_eq!(me.job.as_deref(), Some("slurm-77.1"));
        assert!(me.rendezvous.unwrap().starts_with("node01:"));
        // On one host there is nothing to meet at.
        let one = [
            ("SLURM_STEP_ID", "0"),
            ("SLURM_PROCID", "1"),
            ("SLURM_NTASKS", "2"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_NODEID", "0"),
            ("SLURM_TASKS_PER_NODE", "2"),
            ("SLURM_JOB_NODELIST", "n1"),
        ];
        assert_eq!(from(&one).unwrap().unwrap().rendezvous, None);
    }

    #[test]
    fn a_node_has_some_of_the_tasks() {
        for count in ["0", "4", "9(x2)"] {
            let table = [
                ("SLURM_STEP_ID", "0"),
                ("SLURM_PROCID", "0"),
                ("SLURM_NTASKS", "3"),
                ("SLURM_NODEID", "0"),
                ("SLURM_STEP_TASKS_PER_NODE", count),
            ];
            let text = from(&table).unwrap_err().to_string();
            assert!(
                text.contains(&format!("PER_NODE={count}: ")) && text.contains("1 to SLURM_NTASKS=3"),
                "{text}"
            );
        }
    }

    #[test]
    fn a_batch_script_is_not_a_rank() {
        // Slurm sets SLURM_PROCID=0 in batch scripts and interactive shells, whose steps have reserved numbers.
        assert_eq!(from(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")]).unwrap(), None);
        for step in ["4294967291", "4294967290", "-5", "-6"] {
            let batch = [("SLURM_STEP_ID", step), ("SLURM_PROCID", "0"), ("SLURM_NTASKS", "8")];
            assert_eq!(from(&batch).unwrap(), None, "{step}");
        }
    }

    #[test]
    fn a_node_has_the_place_of_its_name() {
        let on = |rank, local, host| {
            let mut table: Vec<_> = SLURM.iter().filter(|(name, _)| !name.ends_with("ID")).copied().collect();
            // Nodes of a heterogeneous step are numbered component by component.
            table.extend([("SLURM_STEP_ID", "1"), ("SLURM_NODEID", "0")]);
            table.extend([("SLURM_PROCID", rank), ("SLURM_LOCALID", local), ("SLURMD_NODENAME", host)]);
            from(&table)
        };
        let fine = |rank, local, host| on(rank, local, host).unwrap().unwrap();
        assert_eq!(
            (fine("5", "1", "node03").local_size, fine("6", "0", "node7").local_size),
            (Some(2), Some(1))
        );
        assert_eq!(fine("6", "0", "node7").rendezvous, fine("0", "0", "node01").rendezvous);
        // A list of other names says nothing.
        assert_eq!((fine("5", "1", "other").local_size, fine("5", "1", "other").rendezvous), (None, None));
        let Err(Error::Launch(text)) = on("0", "0", "node02") else {
            panic!("rank 0 is not where others look")
        };
        assert!(
            text.contains("rank 0 is on node02") && text.contains("CARAVAN_RENDEZVOUS=node02:PORT"),
            "{text}"
        );
    }
}
