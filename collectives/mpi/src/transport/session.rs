//! MPI as a process has it: started once, finalised once, and called by one thread at a time.
//!
//! MPI is state of the whole process, and so are the statics here.

use super::blocked::{Place, Ranks, Start, Watch};
use super::codes::{OK, text};
use super::control::Control;
use super::fatal;
use super::{ffi, library};
use crate::family::is_mpich_4_0;
use collectives::bootstrap::{OF_HYDRA, pmi_socket};
use collectives::transport::farewell::LINGER_FAILED;
use collectives::transport::neighbours::{Home, Neighbours};
use collectives::{Error, Result, locked};
use mpi::Threading;
use mpi::environment::Universe;
use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::raw::c_int;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, TryLockError, Weak};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

thread_local! {
    /// Of the thread that started MPI for its own calls only; asking for a thread's handle takes longer.
    static SELF: Cell<Option<ThreadId>> = const { Cell::new(None) };
}

/// Held around each call of MPI: `MPI_THREAD_SERIALIZED` asks its users to take turns, whoever they are.
static TURN: Mutex<()> = Mutex::new(());
/// Set around each call of MPI where only one thread may call it, and so needs no lock.
static INSIDE: AtomicBool = AtomicBool::new(false);
/// The session that transports of this process share.
static CURRENT: Mutex<Weak<Session>> = Mutex::new(Weak::new());
/// Whether a panic has to take the job down.
static RUNNING: AtomicBool = AtomicBool::new(false);
/// MPI was used to its end, whether or not it was finalised.
static ENDED: AtomicBool = AtomicBool::new(false);
static HOOK: Once = Once::new();

/// MPI between `MPI_Init_thread` and `MPI_Finalize`.
pub(super) struct Session {
    universe: Mutex<Option<Universe>>,
    library: String,
    rank: usize,
    control: Mutex<Control>,
    /// The processes of the job's other ranks on this host: within a host MPI does not say that one of them has ended.
    neighbours: Arc<Mutex<Neighbours>>,
    start: Start,
    failed: AtomicBool,
    /// Why, where that is known.
    cause: Mutex<Option<Error>>,
    /// A message of a failed group could not be ended: MPI must not move any further in this process.
    given_up: AtomicBool,
    /// All ranks of the job share a host, as far as MPI knows.
    one_host: bool,
    /// MPI cannot be finalised without a hang.
    without_end: bool,
    /// Where fewer than all may call MPI: the only thread that may.
    only: Option<ThreadId>,
}

/// A thread's turn to call MPI, until this is dropped.
pub(super) struct Turn(Option<MutexGuard<'static, ()>>);

impl Drop for Turn {
    fn drop(&mut self) {
        if self.0.is_none() {
            INSIDE.store(false, Ordering::Release);
        }
    }
}

impl Session {
    /// The running session, or a new one.
    pub(super) fn start(start: &Start) -> Result<Arc<Self>> {
        let mut current = locked(&CURRENT);
        if let Some(session) = current.upgrade() {
            return Ok(session);
        }
        let unavailable = |why: &str| Error::Unavailable { name: "mpi".into(), why: why.into() };
        if mpi::environment::is_finalized() || ENDED.load(Ordering::SeqCst) {
            return Err(unavailable("MPI was ended in this process, and it cannot be started again"));
        }
        // A library that knows of one caller takes no locks; other threads of the process never call it.
        let wanted = if start.one_thread { Threading::Single } else { Threading::Serialized };
        let watch = Watch::of(Place::Start, start, None)?;
        let (universe, granted) = mpi::initialize_with_threading(wanted).ok_or_else(|| {
            unavailable(
                "MPI was started by something else in this process; start it through this transport only",
            )
        })?;
        // Until there is a session an error leaves MPI as it is: to finalise it would wait for the other ranks, and the
        // reason would not be told.
        let universe = ManuallyDrop::new(universe);
        ENDED.store(true, Ordering::SeqCst);
        let library = library::library();
        let (mut rank, mut size) = (0, 0);
        // SAFETY: MPI is initialised, and the places are valid.
        let control = unsafe {
            // Errors of requests, which have no communicator any more, go to one of these two in MPICH.
            ffi::MPI_Comm_set_errhandler(ffi::RSMPI_COMM_WORLD, ffi::RSMPI_ERRORS_RETURN);
            ffi::MPI_Comm_set_errhandler(ffi::RSMPI_COMM_SELF, ffi::RSMPI_ERRORS_RETURN);
            ffi::MPI_Comm_rank(ffi::RSMPI_COMM_WORLD, &mut rank);
            ffi::MPI_Comm_size(ffi::RSMPI_COMM_WORLD, &mut size);
            let mut comm = ffi::RSMPI_COMM_NULL;
            let code = ffi::MPI_Comm_dup(ffi::RSMPI_COMM_WORLD, &mut comm);
            if code != OK {
                return Err(unavailable(&format!("MPI_Comm_dup: {}", text(code))));
            }
            Mutex::new(Control::on(comm, size as usize))
        };
        let homes =
            homes(size as usize).map_err(|code| unavailable(&format!("MPI_Allgather: {}", text(code))))?;
        let neighbours = Arc::new(Mutex::new(Neighbours::of(rank as usize, homes)?));
        let one_host = ranks_here() == Some(size);
        drop(watch);
        let without_end = is_mpich_4_0(&library) && !one_host;
        let one = start.one_thread || granted < Threading::Serialized;
        let only = one.then(|| std::thread::current().id());
        SELF.set(only);
        RUNNING.store(true, Ordering::SeqCst);
        HOOK.call_once(|| install_hook(start.caught));
        let session = Arc::new(Session {
            universe: Mutex::new(Some(ManuallyDrop::into_inner(universe))),
            library,
            rank: rank as usize,
            control,
            neighbours,
            start: start.clone(),
            failed: AtomicBool::new(false),
            cause: Mutex::new(None),
            given_up: AtomicBool::new(false),
            one_host,
            without_end,
            only,
        });
        fatal::name_the_lost(start, session.ranks());
        ENDED.store(false, Ordering::SeqCst);
        *current = Arc::downgrade(&session);
        Ok(session)
    }

    /// Whether all ranks of the job share a host, as far as MPI knows.
    pub(super) fn one_host(&self) -> bool {
        self.one_host
    }

    /// This thread's turn to call MPI.
    #[inline(always)]
    pub(super) fn turn(&self) -> Result<Turn> {
        let turn = if self.only.is_some() {
            if SELF.get() != self.only {
                return Err(self.not_this_thread());
            }
            INSIDE.store(true, Ordering::Relaxed);
            Turn(None)
        } else {
            // A thread that panicked in its turn has left MPI as it was between two calls.
            Turn(Some(locked(&TURN)))
        };
        // Only now: another thread may have given up while this one waited.
        if self.given_up.load(Ordering::Acquire) {
            return Err(self.given_up());
        }
        Ok(turn)
    }

    #[cold]
    fn given_up(&self) -> Error {
        match self.cause() {
            // As peers hear it.
            Some(why) => why.in_another_group(),
            None => self.error_text("progress", "messages of a failed group could not be ended".into()),
        }
    }

    #[cold]
    fn not_this_thread(&self) -> Error {
        if self.is_given_up() {
            return self.given_up();
        }
        let why = format!(
            "{} was started for calls of one thread only, and this is not that thread; use progress without a thread, \
             from the thread that made the communicator",
            self.library
        );
        Error::Unavailable { name: "mpi".into(), why }
    }

    /// The channel for words between ranks; for the thread whose turn it is.
    pub(super) fn control(&self) -> MutexGuard<'_, Control> {
        locked(&self.control)
    }

    /// The processes of the job's other ranks on this host.
    pub(super) fn neighbours(&self) -> MutexGuard<'_, Neighbours> {
        locked(&self.neighbours)
    }

    /// The way out of calls that wait for other ranks inside MPI.
    pub(super) fn watch(&self) -> Result<Watch> {
        Watch::new(&self.start, Some(self.ranks()))
    }

    /// The same for one call that begins now, or several in a row, and returns before this is dropped.
    pub(super) fn watch_of(&self, place: Place) -> Result<Watch> {
        Watch::of(place, &self.start, Some(self.ranks()))
    }

    /// This rank of the job.
    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    /// How long a call may take.
    pub(super) fn call_timeout(&self) -> Duration {
        self.start.call_timeout
    }

    /// The loss of the rank of this host that ended first, once it was seen to have ended `grace` ago.
    pub(super) fn lost(&self, grace: Duration) -> Option<Error> {
        self.ranks().lost(grace)
    }

    fn ranks(&self) -> Ranks {
        Ranks { rank: self.rank, neighbours: self.neighbours.clone() }
    }

    /// MPI's name and version.
    pub(super) fn library(&self) -> &str {
        &self.library
    }

    /// MPI's refusal, in its own words.
    pub(super) fn error(&self, call: &'static str, code: c_int) -> Error {
        self.error_text(call, text(code))
    }

    /// A refusal in our own words.
    pub(super) fn error_text(&self, call: &'static str, text: String) -> Error {
        Error::Library { library: self.library.clone(), call, rank: self.rank, text }
    }

    /// The result of a call.
    pub(super) fn check(&self, call: &'static str, code: c_int) -> Result<()> {
        if code == OK { Ok(()) } else { Err(self.error(call, code)) }
    }

    /// From now on the job cannot end in order: its end must not wait for the others.
    pub(super) fn fail(&self, why: &Error) {
        locked(&self.cause).get_or_insert_with(|| why.clone());
        self.failed.store(true, Ordering::SeqCst);
    }

    /// Why a group of this process has failed, if one has.
    pub(super) fn cause(&self) -> Option<Error> {
        locked(&self.cause).clone()
    }

    /// Tells the job's other ranks why this one will not be heard of any more.
    fn stay_away(&self) {
        let why = Error::last_word(self.cause().as_ref());
        self.control().stay_away(self, &why);
    }

    /// Nothing calls MPI from now on. The others are told before, who may wait for this rank in other groups.
    pub(super) fn give_up(&self) {
        self.failed.store(true, Ordering::SeqCst);
        let turn = self.turn();
        if turn.is_ok() {
            self.stay_away();
        }
        // Still in that turn: the memory of what is under way is the caller's again as soon as this returns.
        self.given_up.store(true, Ordering::SeqCst);
        if turn.is_err() {
            // The only thread that may call MPI may do so now. It says that before it looks whether it still may, which takes no
            // time that could be measured.
            let until = Instant::now() + LINGER_FAILED;
            std::thread::sleep(Duration::from_millis(1));
            while INSIDE.load(Ordering::Acquire) && Instant::now() < until {
                std::thread::sleep(Duration::from_micros(20));
            }
        }
    }

    /// The failure was expected, and is over.
    pub(super) fn forgive(&self) {
        *locked(&self.cause) = None;
        self.failed.store(false, Ordering::SeqCst);
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::SeqCst) || self.is_given_up()
    }

    /// Whether nothing calls MPI any more.
    pub(super) fn is_given_up(&self) -> bool {
        self.given_up.load(Ordering::SeqCst)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        ENDED.store(true, Ordering::SeqCst);
        let _turn = locked(&TURN);
        let universe = locked(&self.universe).take();
        let failed = self.has_failed() || std::thread::panicking();
        let allowed = self.only.is_none() || SELF.get() == self.only;
        if failed && !self.is_given_up() && allowed {
            self.stay_away();
        }
        let parted = if failed || !allowed { Ok(false) } else { self.control().end(self) };
        match parted {
            Err(why) => {
                // Nobody is left who could be given it.
                (self.start.tell)(&why);
                // SAFETY: ends the process. What would run at an orderly end is MPI's too, which waits for who was lost.
                unsafe { libc::_exit(1) };
            }
            Ok(false) => {
                // Finalising would wait for ranks that may wait for this one, or is another thread's to do. The process
                // ends without it, with its own message and exit code, and the launcher then ends the rest of the job.
                self.control().abandon();
                std::mem::forget(universe);
            }
            Ok(true) => {
                // Where no thread can be had, the launcher ends what hangs.
                let _watch = self.watch_of(Place::End).ok();
                self.control().clear();
                if self.without_end {
                    // In MPICH 4.0, MPI_Finalize over UCX's tcp often hangs as soon as ranks of two hosts have exchanged
                    // anything. All have come here, by `end`; the process ends with MPI as it is.
                    std::mem::forget(universe);
                    leave_hydra();
                } else {
                    drop(universe);
                }
                RUNNING.store(false, Ordering::SeqCst);
            }
        }
    }
}

/// Tells MPICH's launcher that this process ends in order, as MPI_Finalize would: it kills the other ranks of the host
/// otherwise. One line each way, over the descriptor that it has named.
fn leave_hydra() {
    // Slurm, which gives such a descriptor as well, speaks another language there and needs no goodbye.
    if std::env::var_os(OF_HYDRA).is_none() {
        return;
    }
    // MPI, the only other user, is not called any more.
    let Some(fd) = pmi_socket() else { return };
    let mut answer = [0u8; 64];
    // A launcher that has gone needs no goodbye.
    let _ = rustix::io::write(fd, b"cmd=finalize\n").and_then(|_| rustix::io::read(fd, &mut answer));
}

/// Where the ranks of the job run; MPI's code where it does not carry that. All ranks call this together.
fn homes(size: usize) -> std::result::Result<Vec<Home>, c_int> {
    let (mine, mut all) = (Home::of_this_process().to_bytes(), vec![[0; Home::BYTES]; size]);
    let bytes = Home::BYTES as c_int;
    // SAFETY: MPI is initialised, by the only caller; as many bytes as are named, from each rank of the communicator.
    let code = unsafe {
        let (from, to) = (mine.as_ptr().cast(), all.as_mut_ptr().cast());
        ffi::MPI_Allgather(
            from,
            bytes,
            ffi::RSMPI_UINT8_T,
            to,
            bytes,
            ffi::RSMPI_UINT8_T,
            ffi::RSMPI_COMM_WORLD,
        )
    };
    if code != OK {
        return Err(code);
    }
    Ok(all.into_iter().map(Home::from_bytes).collect())
}

/// How many ranks of the job share this rank's host, where MPI knows. All ranks call this together.
fn ranks_here() -> Option<c_int> {
    // SAFETY: MPI is initialised, by the only caller; valid places, and what is made is freed.
    unsafe {
        let (mut here, mut size) = (ffi::RSMPI_COMM_NULL, 0);
        let (world, kind) = (ffi::RSMPI_COMM_WORLD, ffi::MPI_COMM_TYPE_SHARED as c_int);
        let made = ffi::MPI_Comm_split_type(world, kind, 0, ffi::RSMPI_INFO_NULL, &mut here);
        let known = made == OK && ffi::MPI_Comm_size(here, &mut size) == OK;
        known.then(|| {
            ffi::MPI_Comm_free(&mut here);
            size
        })
    }
}

/// After a panic's own message: the job ends, because the other ranks would wait for this one for ever.
fn install_hook(caught: fn() -> bool) {
    let previous = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        previous(info);
        if !caught() && RUNNING.load(Ordering::SeqCst) {
            abort_job();
        }
    }));
}

/// Ends all ranks of the job with the exit code of a panic.
fn abort_job() -> ! {
    // Another thread may be inside MPI; it gets a moment to come out, but no more.
    let until = Instant::now() + Duration::from_secs(1);
    let _turn = loop {
        match TURN.try_lock() {
            Ok(_) if INSIDE.load(Ordering::Acquire) && Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(1))
            }
            Ok(turn) => break Some(turn),
            Err(TryLockError::Poisoned(turn)) => break Some(turn.into_inner()),
            Err(TryLockError::WouldBlock) if Instant::now() > until => break None,
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(1)),
        }
    };
    let_launcher_read();
    // SAFETY: MPI is initialised and not finalised, by RUNNING.
    unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, 101) };
    std::process::abort()
}

/// Waits a moment until the launcher has read what this rank has printed: Hydra ends an aborted job at once, and what its
/// ranks' pipes still hold is lost, such as the panic's message.
fn let_launcher_read() {
    let until = Instant::now() + Duration::from_millis(200);
    let unread = |fd: BorrowedFd<'_>| rustix::io::ioctl_fionread(fd).is_ok_and(|bytes| bytes > 0);
    let (out, err) = (std::io::stdout(), std::io::stderr());
    while (unread(out.as_fd()) || unread(err.as_fd())) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(1));
    }
}
