//! What starts ranks.

use super::super::processors;
use super::super::spawn::supervised;
use super::variables;
use crate::error::{Error, Result};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{PidfdFlags, pidfd_open};

/// Who started this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// [`supervise`](crate::bootstrap::spawn::supervise), or a user who sets `CARAVAN_RANK` and `CARAVAN_WORLD`.
    Caravan,
    /// Open MPI's mpirun (`OMPI_COMM_WORLD_*`).
    OpenMpi,
    /// MPICH's Hydra, or another process manager that speaks PMI (`PMI_RANK`, `PMI_SIZE`).
    Pmi,
    /// Slurm's srun (`SLURM_PROCID` inside a step).
    Slurm,
    /// PyTorch's torchrun, or what else runs torchelastic's agents (`TORCHELASTIC_RUN_ID`).
    TorchRun,
    /// Nobody: one process, started by hand.
    Alone,
}

impl Launcher {
    /// The command a user knows it by.
    pub fn name(self) -> &'static str {
        match self {
            Launcher::Caravan if supervised() => "caravan",
            Launcher::Caravan => "whoever set CARAVAN_RANK",
            Launcher::OpenMpi => "mpirun (Open MPI)",
            Launcher::Pmi => "mpirun (PMI)",
            Launcher::Slurm => "srun",
            Launcher::TorchRun => "torchrun",
            Launcher::Alone => "by hand",
        }
    }

    /// Whether a process of this name is one of those by which it starts ranks. Several are installed beside each other
    /// with what tells them apart after a dot: `mpirun.openmpi`, `mpiexec.hydra`.
    pub(crate) fn has(self, name: &str) -> bool {
        // The kernel keeps 15 characters of a name.
        let names: &[_] = match self {
            Launcher::OpenMpi => &["mpirun", "mpiexec", "orterun", "orted", "prterun", "prted", "prte"],
            Launcher::Pmi => &["mpirun", "mpiexec", "hydra_pmi_proxy", "hydra_bstrap_pr", "mpispawn"],
            Launcher::Slurm => &["slurmstepd"],
            // A Python by its own name, or by that of its script or of PyTorch's main thread.
            Launcher::TorchRun => &["torchrun", "pt_main_thread", "python", "python3"],
            Launcher::Caravan | Launcher::Alone => &[],
        };
        names.contains(&name.split_once('.').map_or(name, |(before, _)| before))
    }

    /// Lets a thread call `ended` once the nearest process above this one by which the launcher starts ranks has ended. Nothing
    /// where none can be seen, or the system (Linux before 5.3) gives no sign of its end.
    ///
    /// # Errors
    /// No thread can be had.
    pub fn on_end(self, ended: impl FnOnce() + Send + 'static) -> Result<()> {
        let Some(process) = processors::nearest_above(|name| self.has(name)) else { return Ok(()) };
        let Ok(sign) = pidfd_open(process, PidfdFlags::empty()) else { return Ok(()) };
        let wait = move || {
            let mut asked = [PollFd::new(&sign, PollFlags::IN)];
            let seen = loop {
                match poll(&mut asked, None) {
                    Err(Errno::INTR) => {}
                    seen => break seen,
                }
            };
            if seen.is_ok() {
                ended();
            }
        };
        let started = std::thread::Builder::new().name("launcher".into()).spawn(wait);
        started.map(drop).map_err(|e| Error::start("start a thread that watches the launcher", e))
    }

    /// Whether users may see nothing of that process: Slurm's is root's, and `/proc` may show them their own only (hidepid).
    pub(crate) fn is_hidden(self) -> bool {
        self == Launcher::Slurm
    }
}

/// Variables by which a process is some launcher's rank, or is taken for one that does not know which: what starts a launcher,
/// a shell or a job hands its own down, so that several launchers may have left some.
pub const MARKS: [&str; 16] = [
    variables::RANK,
    variables::WORLD,
    variables::LOCAL_RANK,
    variables::LOCAL_SIZE,
    variables::RENDEZVOUS,
    "TORCHELASTIC_RUN_ID",
    // Which torchrun sets, too: what else starts PyTorch's processes sets nothing but that and its like.
    "RANK",
    "SLURM_STEP_ID",
    "SLURM_STEPID",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "PMIX_RANK",
    "PALS_RANKID",
    "FLUX_TASK_RANK",
];

/// Those of [`MARKS`] that this process's environment has: without them it would be nobody's rank.
pub fn marks() -> impl Iterator<Item = &'static str> {
    MARKS.into_iter().filter(|name| std::env::var_os(name).is_some())
}
