//! Who am I: rank, world, place on the host and job, from what the launcher left in the environment.

mod innermost;
mod launcher;
mod pmi;
mod slurm;
mod torchrun;

use super::hosts;
use super::place::is_of_another_host;
use crate::error::{Error, Result};
use crate::watch::MAX_SIZE;
use innermost::Evidence;
pub use launcher::{Launcher, MARKS, marks};

/// Bytes that the name and the secret of a job may have each, which go together into a rank's first words.
const LONGEST: usize = 1024;

/// This process among the processes of its job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// This rank, from 0.
    pub rank: usize,
    /// Ranks in the job.
    pub world: usize,
    /// This rank among those of its host, where the launcher says so.
    pub local_rank: Option<usize>,
    /// Ranks on this host, where the launcher says so.
    pub local_size: Option<usize>,
    /// Who started it.
    pub launcher: Launcher,
    /// What names the job among others on the same machines, where the launcher names it.
    pub job: Option<String>,
    /// A secret that all ranks share and strangers do not, where there is one.
    pub token: Option<String>,
    /// Where rank 0 listens, as `host:port`, when the job spans hosts.
    pub rendezvous: Option<String>,
}

/// The environment variables of the own spawn; users of other launchers may set them too.
pub mod variables {
    /// This rank.
    pub const RANK: &str = "CARAVAN_RANK";
    /// Ranks in the job.
    pub const WORLD: &str = "CARAVAN_WORLD";
    /// This rank among those of its host.
    pub const LOCAL_RANK: &str = "CARAVAN_LOCAL_RANK";
    /// Ranks on this host.
    pub const LOCAL_SIZE: &str = "CARAVAN_LOCAL_SIZE";
    /// The job's name; overrides the launcher's.
    pub const JOB: &str = "CARAVAN_JOB";
    /// The job's secret; overrides the launcher's.
    pub const TOKEN: &str = "CARAVAN_TOKEN";
    /// `host:port` where rank 0 listens, for jobs of several hosts.
    pub const RENDEZVOUS: &str = "CARAVAN_RENDEZVOUS";
    /// The inherited file descriptor of the supervisor's job board.
    pub const BOARD_FD: &str = "CARAVAN_BOARD_FD";
}

impl Identity {
    /// One process on its own.
    pub fn alone() -> Self {
        Identity {
            rank: 0,
            world: 1,
            local_rank: Some(0),
            local_size: Some(1),
            launcher: Launcher::Alone,
            job: None,
            token: None,
            rendezvous: None,
        }
    }

    /// One of `world` ranks of `job`, all on this host.
    pub fn on_this_host(rank: usize, world: usize, job: &str) -> Self {
        let (local_rank, local_size) = (Some(rank), Some(world));
        Identity { rank, world, local_rank, local_size, job: Some(job.into()), ..Identity::alone() }
    }

    /// From this process's environment; None when no launcher left anything there. Where variables of srun and of another
    /// launcher contradict each other, that one is believed which really started this process: by the socket to a
    /// process manager that PMI_FD names, or by the nearest launcher among the processes above this one.
    ///
    /// # Errors
    /// [`Error::Launch`] naming the variables that are malformed, contradict each other or miss their partner.
    pub fn from_env() -> Result<Option<Self>> {
        let lookup = |name: &str| std::env::var_os(name).map(|v| v.to_string_lossy().into_owned());
        Self::found(&Environment { lookup: &lookup, evidence: Evidence::of_this_process() })
    }

    /// From any source of variables, and nothing else. The own variables win over torchrun's, those over Open MPI's, those
    /// over PMI's, those over Slurm's, as far as they do not contradict each other.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        Self::found(&Environment { lookup: &lookup, evidence: Evidence::none() })
    }

    fn found(env: &Environment<'_>) -> Result<Option<Self>> {
        let found = match env.caravan()? {
            Some(found) => Some(found),
            // Which itself is often a process of srun or mpirun on each node.
            None => env.torchrun()?.map_or_else(|| env.innermost(), |found| Ok(Some(found)))?,
        };
        let Some(mut found) = found else {
            if let Some(rank) = env.text("PMIX_RANK") {
                return Err(Error::Launch(format!(
                    "PMIX_RANK={rank} is set but nothing says how many ranks there are: set CARAVAN_RANK and CARAVAN_WORLD \
                     for each process, or leave it away ('env -u PMIX_RANK caravan ...') if something else was started with it"
                )));
            }
            return Ok(None);
        };
        found.job = env.short(variables::JOB)?.or(found.job);
        found.token = env.short(variables::TOKEN)?.or(found.token);
        if let Some(address) = env.text(variables::RENDEZVOUS) {
            found.rendezvous = Some(hosts::checked_address(variables::RENDEZVOUS, &address)?);
        }
        Ok(Some(found))
    }

    /// Whether this is rank 0 and others look for it on another host: on that of Open MPI's mpirun, which says so to all, and
    /// where nobody has set `CARAVAN_RENDEZVOUS`.
    pub fn is_sought_elsewhere(&self) -> bool {
        let told = std::env::var_os(variables::RENDEZVOUS).is_some();
        let sought = |address: &String| is_of_another_host(address);
        self.rank == 0
            && self.launcher == Launcher::OpenMpi
            && !told
            && self.rendezvous.as_ref().is_some_and(sought)
    }

    /// Ends the other ranks of the job, where its launcher has to be asked for that. Call it last, with the exit code:
    /// this process may be ended, too.
    pub fn end_job(&self, code: u8) {
        if self.launcher == Launcher::Pmi {
            hosts::pmi_abort(code);
        }
    }

    /// The name of the job for its rendezvous. Launchers that name no job are told apart by the process that
    /// manages the ranks of this host: Hydra's proxy, or the parent.
    pub fn job_name(&self) -> String {
        match (&self.job, self.launcher) {
            (Some(job), _) => job.clone(),
            (None, Launcher::Pmi) => format!("pmi-{}", hosts::pmi_manager().unwrap_or_else(parent)),
            (None, _) => format!("parent-{}", parent()),
        }
    }
}

fn parent() -> u32 {
    std::os::unix::process::parent_id()
}

/// A source of variables, with one reader per launcher.
struct Environment<'a> {
    lookup: &'a dyn Fn(&str) -> Option<String>,
    evidence: Evidence<'a>,
}

/// The variables of one launcher that say who this process is.
struct Names {
    rank: &'static str,
    world: &'static str,
    local_rank: &'static str,
    local_size: &'static str,
}

impl Environment<'_> {
    /// The value, if set and not empty.
    fn text(&self, name: &str) -> Option<String> {
        (self.lookup)(name).map(|v| v.trim().to_owned()).filter(|v| !v.is_empty())
    }

    /// The same of what ranks introduce themselves with, which has an end.
    fn short(&self, name: &str) -> Result<Option<String>> {
        match self.text(name) {
            Some(text) if text.len() > LONGEST => Err(Error::Launch(format!(
                "{name} has {} bytes: ranks introduce themselves with it, and it may have {LONGEST}",
                text.len()
            ))),
            text => Ok(text),
        }
    }

    fn number(&self, name: &str) -> Result<Option<usize>> {
        let Some(text) = self.text(name) else { return Ok(None) };
        match text.parse::<u32>() {
            Ok(n) => Ok(Some(n as usize)),
            Err(_) => {
                Err(Error::Launch(format!("{name}={text} is not a whole number from 0 to {}", u32::MAX)))
            }
        }
    }

    /// Rank and world of one launcher, both or neither, and consistent with the local pair.
    fn ranks(&self, names: &Names, launcher: Launcher) -> Result<Option<Identity>> {
        let (rank, world) = match (self.number(names.rank)?, self.number(names.world)?) {
            (Some(rank), Some(world)) => (rank, world),
            (None, None) => return Ok(None),
            (Some(rank), None) => {
                return Err(Error::Launch(format!(
                    "{}={rank} is set but {} is not: set both, or neither",
                    names.rank, names.world
                )));
            }
            (None, Some(world)) => {
                return Err(Error::Launch(format!(
                    "{}={world} is set but {} is not: set both, or neither",
                    names.world, names.rank
                )));
            }
        };
        below(names.rank, rank, names.world, world)?;
        if world > MAX_SIZE {
            return Err(Error::Launch(format!(
                "{}={world}: at most {MAX_SIZE} ranks can be one group",
                names.world
            )));
        }
        let local_rank = self.number(names.local_rank)?;
        let local_size = self.number(names.local_size)?;
        match (local_rank, local_size) {
            (Some(rank), Some(size)) => below(names.local_rank, rank, names.local_size, size)?,
            (Some(rank), None) => below(names.local_rank, rank, names.world, world)?,
            (None, _) => {}
        }
        if let Some(local_size) = local_size {
            fits(&format!("{}={local_size}", names.local_size), local_size, names.world, world)?;
        }
        let (job, token, rendezvous) = (None, None, None);
        Ok(Some(Identity { rank, world, local_rank, local_size, launcher, job, token, rendezvous }))
    }

    fn caravan(&self) -> Result<Option<Identity>> {
        let names = Names {
            rank: variables::RANK,
            world: variables::WORLD,
            local_rank: variables::LOCAL_RANK,
            local_size: variables::LOCAL_SIZE,
        };
        self.ranks(&names, Launcher::Caravan)
    }

    fn open_mpi(&self) -> Result<Option<Identity>> {
        let names = Names {
            rank: "OMPI_COMM_WORLD_RANK",
            world: "OMPI_COMM_WORLD_SIZE",
            local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
            local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
        };
        let Some(mut me) = self.ranks(&names, Launcher::OpenMpi)? else { return Ok(None) };
        if let Some(pmix) = self.number("PMIX_RANK")?
            && pmix != me.rank
        {
            return Err(Error::Launch(format!(
                "{}={} contradicts PMIX_RANK={pmix}; unset the one that does not belong to this mpirun",
                names.rank, me.rank
            )));
        }
        me.job =
            self.text("PMIX_NAMESPACE").or(self.text("OMPI_MCA_ess_base_jobid")).map(|j| format!("ompi-{j}"));
        if me.local_size.is_some_and(|local| local < me.world) {
            // Where mpirun runs; rank 0 is there, too, unless told otherwise.
            let uri = self.text("OMPI_MCA_orte_hnp_uri");
            let port = hosts::port_of(me.job.as_deref().unwrap_or_default());
            me.rendezvous = uri.and_then(|u| hosts::of_uri(&u)).map(|hosts| format!("{hosts}:{port}"));
        }
        // Open MPI draws this at random for each job and gives it to every rank, as a key between them.
        me.token = self.text("OMPI_MCA_orte_precondition_transports");
        Ok(Some(me))
    }
}

fn below(small_name: &str, small: usize, large_name: &str, large: usize) -> Result<()> {
    if small < large {
        return Ok(());
    }
    Err(Error::Launch(format!(
        "{small_name}={small} does not fit {large_name}={large}: ranks count from 0, to one below that"
    )))
}

/// Whether a host can have so many of `world` ranks.
fn fits(what: &str, count: usize, world_name: &str, world: usize) -> Result<()> {
    match (1..=world).contains(&count) {
        true => Ok(()),
        false => Err(Error::Launch(format!("{what} is not from 1 to {world_name}={world}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn from(table: &[(&str, &str)]) -> Result<Option<Identity>> {
        Identity::from_lookup(|name| table.iter().find(|(k, _)| *k == name).map(|(_, v)| v.to_string()))
    }

    pub(super) fn who(table: &[(&str, &str)]) -> (usize, usize, Option<usize>, Option<usize>, Launcher) {
        let me = from(table).unwrap().unwrap();
        (me.rank, me.world, me.local_rank, me.local_size, me.launcher)
    }

    #[test]
    fn nothing_set_is_nobody() {
        assert_eq!(from(&[]).unwrap(), None);
        assert_eq!(from(&[("PATH", "/bin"), ("CARAVAN_RANK", " ")]).unwrap(), None);
    }

    #[test]
    fn each_launcher_is_known() {
        assert_eq!(
            who(&[("CARAVAN_RANK", "2"), ("CARAVAN_WORLD", "3")]),
            (2, 3, None, None, Launcher::Caravan)
        );
        let ompi = [
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
            ("PMIX_RANK", "3"),
            ("PMIX_NAMESPACE", "1104347137"),
            ("OMPI_MCA_orte_precondition_transports", "725f-2d8b"),
        ];
        assert_eq!(who(&ompi), (3, 4, Some(1), Some(2), Launcher::OpenMpi));
        let me = from(&ompi).unwrap().unwrap();
        assert_eq!(me.job_name(), "ompi-1104347137");
        assert_eq!(me.token.as_deref(), Some("725f-2d8b"));
        let hydra =
            [("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "2")];
        assert_eq!(who(&hydra), (1, 2, Some(1), Some(2), Launcher::Pmi));
    }

    pub(super) const SLURM: [(&str, &str); 8] = [
        ("SLURM_JOB_ID", "77"),
        ("SLURM_STEP_ID", "1"),
        ("SLURM_PROCID", "5"),
        ("SLURM_STEP_NUM_TASKS", "7"),
        ("SLURM_LOCALID", "1"),
        ("SLURM_NODEID", "2"),
        ("SLURM_STEP_TASKS_PER_NODE", "2(x3),1"),
        ("SLURM_STEP_NODELIST", "node[01-03,7]"),
    ];

    #[test]
    fn the_innermost_launcher_wins() {
        let both = |extra: &[(&'static str, &'static str)]| {
            let mut table = SLURM.to_vec();
            table.extend_from_slice(extra);
            who(&table).4
        };
        // srun --mpi=pmi2: both speak of the same rank.
        assert_eq!(both(&[("PMI_RANK", "5"), ("PMI_SIZE", "7")]), Launcher::Slurm);
        // Hydra with a rank a node, whose proxies are a step of the same ranks.
        let hydra =
            [("PMI_RANK", "5"), ("PMI_SIZE", "7"), ("MPI_LOCALRANKID", "0"), ("MPI_LOCALNRANKS", "1")];
        assert_eq!(both(&hydra), Launcher::Pmi);
        assert_eq!(both(&[("CARAVAN_RANK", "0"), ("CARAVAN_WORLD", "1")]), Launcher::Caravan);
    }

    #[test]
    fn own_variables_override_job_token_and_address() {
        let mut table = SLURM.to_vec();
        table.extend([("CARAVAN_JOB", "j"), ("CARAVAN_TOKEN", "t"), ("CARAVAN_RENDEZVOUS", "h:9")]);
        let me = from(&table).unwrap().unwrap();
        assert_eq!(
            (me.job, me.token, me.rendezvous),
            (Some("j".into()), Some("t".into()), Some("h:9".into()))
        );
    }

    #[test]
    fn processes_that_start_ranks_are_known_beside_others_of_their_name() {
        for name in ["mpirun", "mpirun.openmpi", "mpiexec.openmpi", "prted"] {
            assert!(Launcher::OpenMpi.has(name), "{name}");
        }
        assert!(Launcher::Pmi.has("mpiexec.hydra") && Launcher::Pmi.has("hydra_pmi_proxy"));
        for name in ["torchrun", "python3.11"] {
            assert!(Launcher::TorchRun.has(name), "{name}");
        }
        assert!(!Launcher::OpenMpi.has("mpirunner") && !Launcher::Slurm.has("mpirun.openmpi"));
    }

    #[test]
    fn names_and_secrets_that_no_rank_could_introduce_itself_with_are_refused() {
        let given = |name, bytes| {
            let long = "x".repeat(bytes);
            from(&[("CARAVAN_RANK", "0"), ("CARAVAN_WORLD", "2"), (name, &long)])
        };
        for name in ["CARAVAN_JOB", "CARAVAN_TOKEN"] {
            assert!(given(name, LONGEST).is_ok());
            let text = given(name, 5000).unwrap_err().to_string();
            assert!(text.contains(&format!("{name} has 5000 bytes")) && text.contains("1024"), "{text}");
        }
    }

    #[test]
    fn nonsense_is_named() {
        for (table, words) in [
            (&[("CARAVAN_RANK", "1")][..], &["CARAVAN_RANK=1", "CARAVAN_WORLD"][..]),
            (&[("CARAVAN_WORLD", "2")], &["CARAVAN_WORLD=2", "CARAVAN_RANK"]),
            (&[("CARAVAN_RANK", "2"), ("CARAVAN_WORLD", "2")], &["CARAVAN_RANK=2", "CARAVAN_WORLD=2"]),
            (&[("CARAVAN_RANK", "-1"), ("CARAVAN_WORLD", "2")], &["CARAVAN_RANK=-1", "whole number"]),
            (&[("CARAVAN_RANK", "0"), ("CARAVAN_WORLD", "0")], &["CARAVAN_WORLD=0"]),
            (&[("PMI_RANK", "x"), ("PMI_SIZE", "2")], &["PMI_RANK=x"]),
            (
                &[("CARAVAN_RANK", "1"), ("CARAVAN_WORLD", "2"), ("CARAVAN_LOCAL_SIZE", "0")],
                &["CARAVAN_LOCAL_SIZE=0", "CARAVAN_WORLD=2"],
            ),
            (
                &[("CARAVAN_RANK", "0"), ("CARAVAN_WORLD", "1"), ("CARAVAN_LOCAL_RANK", "7")],
                &["CARAVAN_LOCAL_RANK=7", "CARAVAN_WORLD=1"],
            ),
            (
                &[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "2"), ("PMIX_RANK", "1")],
                &["OMPI_COMM_WORLD_RANK=0", "PMIX_RANK=1"],
            ),
            (
                &[("PMI_RANK", "0"), ("PMI_SIZE", "2"), ("MPI_LOCALRANKID", "0"), ("MPI_LOCALNRANKS", "3")],
                &["MPI_LOCALNRANKS=3", "PMI_SIZE=2"],
            ),
            (&[("PMIX_RANK", "0")], &["PMIX_RANK=0", "CARAVAN_WORLD", "'env -u PMIX_RANK caravan ...'"]),
            (
                &[("CARAVAN_RANK", "0"), ("CARAVAN_WORLD", "2"), ("CARAVAN_RENDEZVOUS", "nohost")],
                &["CARAVAN_RENDEZVOUS=nohost", "host:port"],
            ),
        ] {
            let text = match from(table) {
                Err(Error::Launch(text)) => text,
                other => panic!("{table:?} gave {other:?}"),
            };
            for word in words {
                assert!(text.contains(word), "{text:?} does not name {word}");
            }
        }
    }
}
