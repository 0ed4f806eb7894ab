//! Own spawn: one parent starts the ranks of a job on this host, watches them, and leaves nothing behind.

use super::board::{Board, Ending};
use super::identity::variables;
use crate::error::{Error, Result};
use crate::watch::MAX_SIZE;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How long the other ranks may take to end by themselves, with their own message, once one has failed.
pub const GRACE: Duration = Duration::from_secs(3);

/// Whether this process was started by [`supervise`], which has looked at all that it will look at.
pub fn supervised() -> bool {
    std::env::var_os(variables::BOARD_FD).is_some()
}

/// How a supervised job ended.
#[derive(Clone, Debug)]
pub struct Report {
    /// How each rank ended.
    pub endings: Vec<Ending>,
    /// The rank that failed first, and how, as the end of a sentence that starts with its name.
    pub first_failure: Option<(usize, String)>,
    /// What that rank itself said of it.
    pub announced: Option<String>,
    /// The signal to this process that ended the job: Ctrl-C is 2.
    pub interrupted: Option<i32>,
    /// Ranks that had to be killed because they did not end by themselves in time.
    pub killed: Vec<usize>,
}

impl Report {
    /// What this process should exit with: 128 + the signal that interrupted it, else the code of the rank that
    /// failed first (1 if a signal killed it), else 0.
    pub fn exit_code(&self) -> u8 {
        if let Some(signal) = self.interrupted {
            return 128 + signal as u8;
        }
        match &self.first_failure {
            None => 0,
            Some((rank, _)) => match self.endings[*rank] {
                // A rank that announced a failure and yet exited with 0 does not make it a success.
                Ending::Exited(0) | Ending::Killed(_) => 1,
                Ending::Exited(code) => code,
            },
        }
    }

    /// One sentence for the user, unless everything went well.
    pub fn sentence(&self) -> Option<String> {
        if let Some(signal) = self.interrupted {
            return Some(format!(
                "interrupted by signal {signal}; all {} ranks have ended",
                self.endings.len()
            ));
        }
        let (rank, how) = self.first_failure.as_ref()?;
        let rest = match self.endings.len() - 1 {
            0 => String::new(),
            _ if !self.killed.is_empty() => {
                format!("; {} did not end by itself and was killed", super::hosts::list(&self.killed))
            }
            _ => "; the other ranks were stopped".into(),
        };
        Some(format!("rank {rank} {how}{rest}"))
    }
}

/// Starts `ranks` processes, each the command that `command` makes for its rank, with the job's variables added
/// (see [`variables`]) and no standard input, and returns when all have ended.
///
/// When one fails, the others learn how from the job board, get [`GRACE`] to end by themselves, and are then
/// killed. SIGINT, SIGTERM and SIGHUP are passed on likewise, a stop (Ctrl-Z) too, but for those that this process was
/// started to ignore (nohup, a script's `&`). If this process dies in any way, the kernel kills the ranks. Call it from
/// the main thread before starting others: the signals are blocked in this thread only, and the ranks die with the thread
/// that started them.
///
/// # Errors
/// [`Error::Launch`] for 0 ranks or more than [`MAX_SIZE`], [`Error::System`] when a process cannot be started (those
/// started are killed).
pub fn supervise(ranks: usize, mut command: impl FnMut(usize) -> Command) -> Result<Report> {
    if ranks == 0 || ranks > MAX_SIZE {
        return Err(Error::Launch(format!("cannot start {ranks} ranks; 1 to {MAX_SIZE} are possible")));
    }
    let (board, board_fd) = Board::create(ranks)?;
    let (job, token) = (format!("spawn-{}-{}", std::process::id(), random_hex(4)?), random_hex(16)?);
    let signals = Signals::catch()?;
    let mut family = Family { board, members: Vec::with_capacity(ranks) };
    for rank in 0..ranks {
        let mut command = command(rank);
        command
            .env(variables::RANK, rank.to_string())
            .env(variables::WORLD, ranks.to_string())
            .env(variables::LOCAL_RANK, rank.to_string())
            .env(variables::LOCAL_SIZE, ranks.to_string())
            .env(variables::JOB, &job)
            .env(variables::TOKEN, &token)
            .env(variables::BOARD_FD, board_fd.as_raw_fd().to_string())
            .env_remove(variables::RENDEZVOUS)
            .stdin(Stdio::null())
            // Ctrl-C at a terminal goes to whole groups; the ranks get it from here, once.
            .process_group(0);
        let (parent, inherited, mask) = (std::process::id(), board_fd.as_raw_fd(), signals.before);
        // SAFETY: between fork and exec the closure makes only system calls: no allocation, no locks.
        unsafe { command.pre_exec(move || before_exec(parent, inherited, &mask)) };
        let child = command.spawn().map_err(|e| {
            Error::system(format!("starting rank {rank} of {ranks} ({:?})", command.get_program()), e)
        })?;
        family.members.push(Member::new(child));
    }
    drop(board_fd);
    Ok(family.watch(&signals))
}

/// Runs in the child: it must not outlive the parent, takes signals as usual, and keeps the board over exec.
fn before_exec(parent: u32, board: RawFd, mask: &libc::sigset_t) -> std::io::Result<()> {
    // SAFETY: an async-signal-safe call with a valid set.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, mask, std::ptr::null_mut()) };
    // A terminal may stop background groups that write to it, which ranks are (`stty tostop`).
    // SAFETY: an async-signal-safe call that touches no memory.
    unsafe { libc::signal(libc::SIGTTOU, libc::SIG_IGN) };
    let_writes_fail();
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    // The parent may have died before the line above; then nobody would ever send the signal.
    if std::os::unix::process::parent_id() != parent {
        return Err(std::io::ErrorKind::BrokenPipe.into());
    }
    // SAFETY: the descriptor is open: the parent holds it until all ranks have been started.
    let board = unsafe { std::os::fd::BorrowedFd::borrow_raw(board) };
    rustix::io::fcntl_setfd(board, rustix::io::FdFlags::empty())?;
    Ok(())
}

/// Makes a write to a file that may not grow (`ulimit -f`) an error that says so, where the system would end the process.
pub fn let_writes_fail() {
    // SAFETY: an async-signal-safe call that touches no memory.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

fn random_hex(bytes: usize) -> Result<String> {
    let mut random = vec![0u8; bytes];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut f| f.read_exact(&mut random))
        .map_err(|e| Error::system("reading /dev/urandom for the job's secret", e))?;
    Ok(random.iter().map(|b| format!("{b:02x}")).collect())
}

/// How often to look at ranks whose end wakes nobody.
const BLIND: Duration = Duration::from_millis(20);

struct Member {
    child: Child,
    /// Readable when the process has ended; None on kernels before 5.3, where the loop looks at intervals instead.
    pidfd: Option<OwnedFd>,
    ending: Option<Ending>,
}

impl Member {
    fn new(child: Child) -> Self {
        let pidfd = pid(&child).and_then(|p| pidfd_open(p, PidfdFlags::empty()).ok());
        Member { child, pidfd, ending: None }
    }

    fn signal(&self, signal: Signal) {
        if let (None, Some(pid)) = (self.ending, pid(&self.child)) {
            // It may have ended meanwhile, and is then still a zombie of ours: never another process.
            let _ = kill_process(pid, signal);
        }
    }
}

fn pid(child: &Child) -> Option<Pid> {
    Pid::from_raw(child.id() as i32)
}

fn ending_of(status: ExitStatus) -> Ending {
    match (status.code(), status.signal()) {
        (Some(code), _) => Ending::Exited(code as u8),
        (None, signal) => Ending::Killed(signal.unwrap_or(0) as u8),
    }
}

/// The started ranks. Dropped early (a later rank could not be started), it kills and reaps them.
struct Family {
    board: Board,
    members: Vec<Member>,
}

impl Family {
    fn watch(mut self, signals: &Signals) -> Report {
        let mut deadline: Option<Instant> = None;
        let (mut interrupted, mut killed) = (None, Vec::new());
        while !self.reap() {
            if deadline.is_none() && self.board.first_failure().is_some() {
                deadline = Some(Instant::now() + GRACE);
            }
            if deadline.is_some_and(|d| Instant::now() >= d) {
                killed = self.alive();
                self.signal_all(Signal::KILL);
                self.reap_blocking();
                break;
            }
            match self.wait(signals, deadline) {
                None => {}
                Some(Signal::TSTP) => {
                    self.signal_all(Signal::STOP);
                    stop_here();
                    self.signal_all(Signal::CONT);
                }
                Some(signal) => {
                    interrupted = interrupted.or(Some(signal.as_raw()));
                    deadline = deadline.or(Some(Instant::now() + GRACE));
                    self.signal_all(signal);
                }
            }
        }
        let endings: Vec<Ending> = self.members.iter().filter_map(|m| m.ending).collect();
        let first = self.board.first_failure();
        let first_failure = first.map(|r| (r, self.board.how(r).unwrap_or_else(|| endings[r].to_string())));
        let announced = first.and_then(|r| self.board.announced(r));
        Report { endings, first_failure, announced, interrupted, killed }
    }

    /// Sleeps until a rank has ended, a signal came or the deadline passed.
    fn wait(&self, signals: &Signals, deadline: Option<Instant>) -> Option<Signal> {
        let running = self.members.iter().filter(|m| m.ending.is_none());
        let blind = running.clone().any(|m| m.pidfd.is_none());
        let mut fds = vec![PollFd::new(&signals.fd, PollFlags::IN)];
        fds.extend(running.filter_map(|m| m.pidfd.as_ref()).map(|fd| PollFd::new(fd, PollFlags::IN)));
        // A rank announces its failure on the board without waking us, so look now and then.
        let most = if blind { BLIND } else { Duration::from_millis(250) };
        let left = deadline.map_or(most, |d| d.saturating_duration_since(Instant::now()).min(most));
        let timeout = rustix::event::Timespec { tv_sec: 0, tv_nsec: i64::from(left.subsec_nanos()) };
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            // The kernel has no memory for it now, or a limit of open files has sunk: look at intervals instead.
            Err(_) => std::thread::sleep(left.min(BLIND)),
        }
        signals.next()
    }

    /// Collects who has ended; true when all have. When several ended since the last look, one that a signal
    /// killed comes before those that exited, which may have noticed its death.
    fn reap(&mut self) -> bool {
        let mut seen: Vec<(usize, Ending)> = Vec::new();
        for (rank, member) in self.members.iter_mut().enumerate().filter(|(_, m)| m.ending.is_none()) {
            if let Ok(Some(status)) = member.child.try_wait() {
                let ending = ending_of(status);
                member.ending = Some(ending);
                seen.push((rank, ending));
            }
        }
        seen.sort_by_key(|(rank, ending)| (!matches!(ending, Ending::Killed(_)), *rank));
        for (rank, ending) in seen {
            self.board.record(rank, ending);
        }
        self.members.iter().all(|m| m.ending.is_some())
    }

    fn reap_blocking(&mut self) {
        for (rank, member) in self.members.iter_mut().enumerate().filter(|(_, m)| m.ending.is_none()) {
            let ending = member.child.wait().map_or(Ending::Killed(9), ending_of);
            member.ending = Some(ending);
            self.board.record(rank, ending);
        }
    }

    fn alive(&self) -> Vec<usize> {
        (0..self.members.len()).filter(|&r| self.members[r].ending.is_none()).collect()
    }

    fn signal_all(&self, signal: Signal) {
        self.members.iter().for_each(|m| m.signal(signal));
    }
}

impl Drop for Family {
    fn drop(&mut self) {
        self.signal_all(Signal::KILL);
        self.reap_blocking();
    }
}

/// The signals that the supervisor passes on, blocked and read from a descriptor for as long as this lives.
struct Signals {
    fd: OwnedFd,
    before: libc::sigset_t,
    /// This process was started to ignore the end of its children: the kernel would say of none how it ended.
    childless: bool,
}

/// Does `work`; threads that it starts never get a signal that ends a job or stops it.
pub(crate) fn unsignalled<T>(work: impl FnOnce() -> T) -> T {
    let blocked = block(&Signals::CAUGHT);
    let done = work();
    if let Ok((_, before)) = blocked {
        // SAFETY: the set that was there before.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut()) };
    }
    done
}

/// Keeps signals from this thread, and from those that it starts; their set, and what was kept from it before.
fn block(signals: &[libc::c_int]) -> Result<(libc::sigset_t, libc::sigset_t)> {
    // SAFETY: plain libc calls on sets that live here; a zeroed sigset_t is what sigemptyset expects.
    unsafe {
        let (mut set, mut before): (libc::sigset_t, libc::sigset_t) = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        for &signal in signals {
            libc::sigaddset(&mut set, signal);
        }
        match libc::pthread_sigmask(libc::SIG_BLOCK, &set, &mut before) {
            0 => Ok((set, before)),
            failed => Err(Error::system("blocking signals", std::io::Error::from_raw_os_error(failed))),
        }
    }
}

/// Stops this process as Ctrl-Z does, and returns once it goes on. Where nobody could let it go on, as in `ssh -t host
/// caravan` without a shell that minds its jobs, the kernel discards a stop from the terminal (not a SIGSTOP), and this
/// returns at once. The signal is one that this thread blocks.
fn stop_here() {
    // SAFETY: plain libc calls on structures that live here, of which a zeroed one is valid, and as an action the
    // default; what was there before is put back.
    unsafe {
        let (mut stop, mut before): (libc::sigset_t, libc::sigset_t) = std::mem::zeroed();
        let (default, mut action): (libc::sigaction, libc::sigaction) = std::mem::zeroed();
        libc::sigemptyset(&mut stop);
        libc::sigaddset(&mut stop, libc::SIGTSTP);
        libc::sigaction(libc::SIGTSTP, &default, &mut action);
        libc::raise(libc::SIGTSTP);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &stop, &mut before);
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
        libc::sigaction(libc::SIGTSTP, &action, std::ptr::null_mut());
    }
}

impl Signals {
    const CAUGHT: [libc::c_int; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGTSTP];

    fn catch() -> Result<Self> {
        // A descriptor gets ignored signals too. nohup has a job stay when its terminal goes, and a script what it started
        // in the background when Ctrl-C ends the script.
        let caught = Self::CAUGHT.into_iter().filter(|&signal| !ignored(signal));
        let (set, before) = block(&caught.collect::<Vec<_>>())?;
        // SAFETY: plain libc calls on sets that live here.
        unsafe {
            let fd = libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
            if fd < 0 {
                let error = std::io::Error::last_os_error();
                libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
                return Err(Error::system("signalfd", error));
            }
            let childless = ignored(libc::SIGCHLD);
            if childless {
                libc::signal(libc::SIGCHLD, libc::SIG_DFL);
            }
            Ok(Signals { fd: OwnedFd::from_raw_fd(fd), before, childless })
        }
    }

    fn next(&self) -> Option<Signal> {
        let mut info = [0u8; size_of::<libc::signalfd_siginfo>()];
        match rustix::io::read(&self.fd, &mut info) {
            // The signal's number is the structure's first field.
            Ok(n) if n == info.len() => {
                Signal::from_named_raw(i32::from_ne_bytes(info[..4].try_into().expect("four bytes")))
            }
            _ => None,
        }
    }
}

/// Whether this process was started to ignore a signal.
fn ignored(signal: libc::c_int) -> bool {
    // SAFETY: it only asks; a zeroed structure is valid, and is filled where the call succeeds.
    unsafe {
        let mut now: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &mut now) == 0 && now.sa_sigaction == libc::SIG_IGN
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        // SAFETY: restores what `catch` found.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, std::ptr::null_mut());
            if self.childless {
                libc::signal(libc::SIGCHLD, libc::SIG_IGN);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::alone::alone;
    use super::*;
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    #[test]
    fn ranks_of_a_process_that_ignores_its_children_are_watched() {
        if !alone("bootstrap::spawn::tests::ranks_of_a_process_that_ignores_its_children_are_watched") {
            return;
        }
        // SAFETY: a disposition, which this process has for itself.
        unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
        let (board, _) = Board::create(1).unwrap();
        let (signals, mut sh) = (Signals::catch().unwrap(), Command::new("sh"));
        let child = sh.args(["-c", "sleep 0.05; exit 7"]).spawn().unwrap();
        let family = Family { board, members: vec![Member::new(child)] };
        assert_eq!(family.watch(&signals).endings, [Ending::Exited(7)]);
        drop(signals);
        assert!(ignored(libc::SIGCHLD));
    }

    #[test]
    fn ranks_are_watched_where_the_kernel_refuses_to() {
        if !alone("bootstrap::spawn::tests::ranks_are_watched_where_the_kernel_refuses_to") {
            return;
        }
        let (board, _) = Board::create(1).unwrap();
        let (signals, mut sleep) = (Signals::catch().unwrap(), Command::new("sleep"));
        let family = Family { board, members: vec![Member::new(sleep.arg("0.05").spawn().unwrap())] };
        // As many descriptors as are to be watched are then too many.
        let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(0), maximum }).unwrap();
        let report = family.watch(&signals);
        assert_eq!((report.endings, report.first_failure), (vec![Ending::Exited(0)], None));
    }
}
