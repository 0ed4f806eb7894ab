//! NCCL's communicators, none of whose calls waits for a peer: what is still under way is asked about.

use crate::communicator::Communicator;
use crate::device::cuda::Gpu;
use crate::error::{Error, Result};
use crate::locked;
use crate::watch::Waited;
use cuda_sys::nccl::{self, Config, Status, UniqueId};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

/// For how long to look again at once: the library hands most calls to a thread of its own, which soon has put their
/// kernels into streams, and a sleep takes several times as long.
const SPIN: Duration = Duration::from_micros(200);
/// Between two looks afterwards.
const LOOK: Duration = Duration::from_micros(20);
/// For how long that goes on: what takes longer waits for other ranks to come.
const SOON: Duration = Duration::from_millis(20);
/// Between two looks then.
const NAP: Duration = Duration::from_millis(2);
/// How long a communicator may take to come to its end.
pub(super) const GRACE: Duration = Duration::from_secs(10);
/// How long one that has come to its end may take to be freed.
const FREED: Duration = Duration::from_secs(1);
const FINALIZE: &str = "ncclCommFinalize";

/// What all communicators of a rank share.
#[derive(Clone)]
pub(super) struct Context {
    pub library: Arc<nccl::Nccl>,
    pub gpu: Gpu,
    /// In the job, for errors.
    pub rank: usize,
}

impl Context {
    pub fn error(&self, call: &'static str, text: String) -> Error {
        let library = format!("NCCL {}", nccl::Nccl::numbers(self.library.number()));
        Error::Library { library, call, rank: self.rank, text }
    }

    /// Fails unless everything is done or under way.
    pub fn started(&self, call: &'static str, status: Status) -> Result<()> {
        match status {
            nccl::SUCCESS | nccl::IN_PROGRESS => Ok(()),
            _ => Err(self.error(call, self.library.text(status))),
        }
    }
}

/// One of NCCL's communicators.
pub(super) struct Comm {
    context: Context,
    /// None once it was aborted or destroyed.
    handle: Mutex<Option<Handle>>,
}

/// Which any thread may use, one at a time.
#[derive(Clone, Copy)]
pub(super) struct Handle(pub nccl::Comm);

// SAFETY: communicators belong to no thread; the lock lets one at a time use them.
unsafe impl Send for Handle {}

impl Comm {
    /// Joins the group of this name, within `limit`; `host` tells of peers that will not come.
    pub fn join(
        context: &Context,
        name: UniqueId,
        rank: usize,
        size: usize,
        host: &Communicator,
        limit: Duration,
    ) -> Result<Self> {
        context.gpu.enter()?;
        let (mut handle, mut config) = (std::ptr::null_mut(), Config::non_blocking());
        // SAFETY: valid places, and a name that rank 0 has made.
        let status =
            unsafe { (context.library.init)(&mut handle, size as i32, name, rank as i32, &mut config) };
        let comm = Comm { context: context.clone(), handle: Mutex::new(Some(Handle(handle))) };
        context.started("ncclCommInitRankConfig", status)?;
        comm.settled("ncclCommInitRankConfig", host, limit, "not all ranks came")?;
        Ok(comm)
    }

    /// The communicator of the ranks with this color, ordered by `key`; `None` for a rank without one.
    pub fn split(
        &self,
        color: Option<usize>,
        key: usize,
        host: &Communicator,
        limit: Duration,
    ) -> Result<Option<Self>> {
        const CALL: &str = "ncclCommSplit";
        // NCCL writes it while the call is under way.
        let mut handle = Box::new(std::ptr::null_mut());
        let mut config = Config::non_blocking();
        let color_or_none = color.map_or(nccl::NO_COLOR, |color| color as i32);
        self.with(CALL, |parent| {
            // SAFETY: a live communicator, and places that stay until the call is done.
            unsafe {
                (self.context.library.split)(parent, color_or_none, key as i32, &mut *handle, &mut config)
            }
        })?;
        if let Err(error) = self.settled(CALL, host, limit, "not all ranks came") {
            // NCCL may still write to it.
            std::mem::forget(handle);
            return Err(error);
        }
        if color.is_none() {
            return Ok(None);
        }
        let comm = Comm { context: self.context.clone(), handle: Mutex::new(Some(Handle(*handle))) };
        comm.settled(CALL, host, limit, "not all ranks came")?;
        Ok(Some(comm))
    }

    pub fn lock(&self) -> MutexGuard<'_, Option<Handle>> {
        locked(&self.handle)
    }

    /// Calls something that may go on in the background.
    pub fn with(&self, call: &'static str, work: impl FnOnce(nccl::Comm) -> Status) -> Result<()> {
        self.context.gpu.enter()?;
        let handle = self.lock();
        let Some(Handle(comm)) = *handle else { return Err(self.given_up(call)) };
        let status = work(comm);
        drop(handle);
        self.context.started(call, status)
    }

    fn given_up(&self, call: &'static str) -> Error {
        self.context.error(call, "the communicator was given up".into())
    }

    /// How it is doing: done with everything, still at it, or what went wrong.
    pub fn state(&self, call: &'static str) -> Result<bool> {
        let handle = self.lock();
        let Some(Handle(comm)) = *handle else { return Err(self.given_up(call)) };
        let mut state = nccl::SUCCESS;
        // SAFETY: a live communicator, and a valid place to write to.
        let status = unsafe { (self.context.library.async_error)(comm, &mut state) };
        drop(handle);
        self.context.started("ncclCommGetAsyncError", status)?;
        self.context.started(call, state)?;
        Ok(state == nccl::SUCCESS)
    }

    /// Returns when nothing is under way any more on the host's side: kernels are then in their streams.
    pub fn settled(
        &self,
        call: &'static str,
        host: &Communicator,
        limit: Duration,
        late: &str,
    ) -> Result<()> {
        let mut waited = Waited::begin();
        let mut looks = 0u32;
        while !self.state(call)? {
            looks += 1;
            if looks.is_multiple_of(64) {
                host.progress()?;
            }
            let so_far = waited.so_far();
            if so_far > limit {
                return Err(self.context.error(call, format!("{late} within {limit:?}")));
            }
            match so_far {
                waited if waited < SPIN => std::thread::yield_now(),
                waited if waited < SOON => std::thread::sleep(LOOK),
                _ => std::thread::sleep(NAP),
            }
        }
        Ok(())
    }

    /// Starts to come to its end; whether it could.
    pub fn finalize(&self) -> bool {
        // SAFETY: a live communicator.
        self.with(FINALIZE, |comm| unsafe { (self.context.library.finalize)(comm) }).is_ok()
    }

    /// Whether it has come to its end by `until`: a peer may be gone, or too late.
    pub fn finalized(&self, until: Instant) -> bool {
        loop {
            match self.state(FINALIZE) {
                Ok(false) if Instant::now() < until => std::thread::sleep(LOOK),
                state => return matches!(state, Ok(true)),
            }
        }
    }

    /// Ends it on a thread of its own, or on this one where there is none to be had; `over` is dropped then.
    fn begin_end(&self, how: End, over: Sender<()>) {
        let Some(handle) = self.lock().take() else { return };
        let ending = Arc::new(Mutex::new(Some((handle, self.context.clone(), over))));
        let beside = Arc::clone(&ending);
        let end = move |ending: &Mutex<Option<(Handle, Context, Sender<()>)>>| {
            let ending = locked(ending).take();
            let Some((Handle(comm), Context { library, gpu, .. }, over)) = ending else { return };
            let _ = gpu.enter();
            // SAFETY: a live communicator, finalised if it is to be freed, which nobody can use any more.
            unsafe {
                match how {
                    End::Free => (library.destroy)(comm),
                    End::Abort => (library.abort)(comm),
                };
            }
            drop(over);
        };
        if std::thread::Builder::new().name("nccl-end".into()).spawn(move || end(&beside)).is_err() {
            end(&ending);
        }
    }
}

/// How a communicator ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// It has come to its end, and is freed.
    Free,
    /// What is under way ends, wherever it is.
    Abort,
}

/// Ends communicators side by side, because to end one may wait for what stands behind a call of another, and waits for that,
/// but not for long: a thread of NCCL's stays in it until the other ranks of the host have come to the end of theirs. Who has
/// failed must get to where it says so.
pub(super) fn end(comms: &[Comm], how: End) {
    let (over, ended) = mpsc::channel();
    comms.iter().for_each(|comm| comm.begin_end(how, over.clone()));
    drop(over);
    // Nothing is sent: all have ended when nobody can any more.
    let _ = ended.recv_timeout(if how == End::Free { FREED } else { GRACE });
}

/// Of one that did not come to its end with the others of its group.
impl Drop for Comm {
    fn drop(&mut self) {
        end(std::slice::from_ref(self), End::Abort);
    }
}
