//! MPI's own collectives, for comparison with ours: the library's algorithms, in its order of
//! reduction, so the bits are the library's affair. There are no 16-bit floats and no average in MPI.
//!
//! Blocking calls block inside MPI: no progress of anything else, and where a rank is lost or nothing returns for
//! [`call_timeout`](super::Start::call_timeout) no way out but the end of the process. Both are reasons for our own
//! schedules.

use super::blocked::{Place, Watch};
use super::codes::{OK, test};
use super::comm::Comm;
use super::ffi;
use super::library::{SMALL_HANDLES, family};
use crate::family::{Family, is_mpich_4_0};
use collectives::Buffer;
use collectives::schedule::{Call, Kind};
use collectives::{DType, Element, ReduceOp};
use collectives::{Error, Result};
use std::cell::Cell;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::os::raw::c_int;
use std::time::Duration;

/// `MPI_IN_PLACE`, a macro, which the bindings lack. There are two binary interfaces with their values of it.
const IN_PLACE: *const c_void = if SMALL_HANDLES { -1isize } else { 1 } as *const c_void;

/// MPI's collectives on one group.
pub struct Native {
    comm: Comm,
    watch: Watch,
    rank: usize,
    size: usize,
    /// The library takes unsigned integers for signed ones in minimum and maximum, as MPICH 4.0.2 does.
    signed_only: bool,
    /// The library's `MPI_IN_PLACE` is one of the two.
    in_place_known: bool,
    /// The library multiplies what it is given for a rank by the ranks, as Open MPI does.
    multiplies: bool,
    /// The library ends the process in a reduce in place to another root than rank 0, as MPICH 4.0.2 does.
    root_zero_only: bool,
    /// One thread at a time: a call that returns ends the watch of another's.
    one_thread: PhantomData<Cell<()>>,
}

/// A collective under way, with its buffers.
pub struct Started<'n, T: Element> {
    native: &'n Native,
    request: Option<ffi::MPI_Request>,
    buffers: Option<(Buffer<T>, Buffer<T>)>,
}

/// The arguments as MPI takes them.
struct Arguments {
    send: *const c_void,
    recv: *mut c_void,
    count: c_int,
    dtype: ffi::MPI_Datatype,
    op: Option<ffi::MPI_Op>,
    root: c_int,
}

impl Native {
    pub(super) fn new(comm: Comm, rank: usize, size: usize, watch: Watch) -> Self {
        let root_zero_only = is_mpich_4_0(comm.session().library());
        let signed_only = comm.session().turn().is_ok_and(|_turn| takes_unsigned_for_signed());
        // Asked once: the library writes its name anew each time, which takes longer than its shortest calls.
        let family = family();
        // One that wraps another may have a value of its own.
        let in_place_known = family != Family::Unknown;
        let multiplies = matches!(family, Family::OpenMpi | Family::Unknown);
        let one_thread = PhantomData;
        Native {
            in_place_known,
            multiplies,
            signed_only,
            root_zero_only,
            one_thread,
            comm,
            watch,
            rank,
            size,
        }
    }

    /// What has to be done otherwise than asked, because this library cannot.
    pub fn caveat(&self) -> Option<&'static str> {
        self.root_zero_only.then_some(
            "a reduce in place to another root than rank 0 is made from a copy, because this version crashes in it",
        )
    }

    /// Whether MPI has what `call` does, on elements of its type.
    ///
    /// # Errors
    /// [`Error::Argument`] for 16-bit floats that are reduced, averages, more than 2^31-1 elements, and what this library
    /// gets wrong.
    pub fn check(&self, call: &Call) -> Result<()> {
        self.count(call)?;
        self.dtype(call)?;
        self.op(call).map(drop)
    }

    /// Runs `call` from `send` into `recv`, whose lengths are those of our collectives: `reduce_scatter` takes n times
    /// `count` elements and gives `count`, `all_gather` the other way round, `all_to_all` n times `count` both ways,
    /// `gather` and `scatter` n times `count` on the root, all others `count`. Where a rank has nothing to give or to
    /// get, its slice may be empty. `broadcast` is in place only.
    ///
    /// # Errors
    /// [`Error::Argument`] for what MPI cannot do (16-bit floats, averages, more than 2^31-1 elements, messages) and for
    /// lengths that do not fit; [`Error::Library`] with MPI's text.
    pub fn run<T: Element>(&self, call: Call, send: &[T], recv: &mut [T]) -> Result<()> {
        let arguments = self.arguments(&call, send, recv)?;
        // SAFETY: lengths were checked, and the slices are borrowed until the call has returned.
        unsafe { self.blocking(&call, &arguments) }
    }

    /// Runs `call` in one buffer: `reduce_scatter` leaves the result at the start of `data`, as MPI has it, and not in
    /// this rank's part, as ours does; `all_gather` takes that part. See also [`caveat`](Self::caveat).
    ///
    /// # Errors
    /// As [`run`](Self::run), and for kinds that have no such form.
    pub fn run_in_place<T: Element>(&self, call: Call, data: &mut [T]) -> Result<()> {
        if call.kind == Kind::Reduce && call.root > 0 && call.root == self.rank && self.root_zero_only {
            let copy = data.get(..call.count).unwrap_or(data).to_vec();
            return self.run(call, &copy, data);
        }
        let arguments = self.arguments_in_place(&call, data)?;
        // SAFETY: the length was checked, and the slice is borrowed until the call has returned.
        unsafe { self.blocking(&call, &arguments) }
    }

    /// Starts `call`; the buffers come back from [`Started::wait`].
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn start<T: Element>(
        &self,
        call: Call,
        send: Buffer<T>,
        mut recv: Buffer<T>,
    ) -> Result<Started<'_, T>> {
        let arguments = self.arguments(&call, send.host(), recv.host_mut())?;
        // SAFETY: lengths were checked; `Started` owns the buffers until the call is complete.
        let request = unsafe { self.nonblocking(&call, &arguments)? };
        Ok(Started { native: self, request: Some(request), buffers: Some((send, recv)) })
    }

    fn refuse(&self, call: &Call, problem: String) -> Error {
        Error::Argument { call: call.kind.name(), rank: self.comm.session().rank(), problem }
    }

    fn common<T: Element>(&self, call: &Call) -> Result<Arguments> {
        if call.dtype != T::DTYPE {
            let problem = format!("the call says {}, the buffers hold {}", call.dtype, T::DTYPE);
            return Err(self.refuse(call, problem));
        }
        if call.root >= self.size {
            return Err(self.refuse(call, format!("root {} of {} ranks", call.root, self.size)));
        }
        let (count, dtype, op) = (self.count(call)?, self.dtype(call)?, self.op(call)?);
        let (send, recv) = (std::ptr::null(), std::ptr::null_mut());
        Ok(Arguments { send, recv, count, dtype, op, root: call.root as c_int })
    }

    fn arguments<T: Element>(&self, call: &Call, send: &[T], recv: &mut [T]) -> Result<Arguments> {
        let mut arguments = self.common::<T>(call)?;
        if call.kind == Kind::Broadcast {
            return Err(self.refuse(call, "MPI broadcasts in place only".into()));
        }
        let (sends, receives) = self.lengths(call);
        if send.len() < sends || recv.len() < receives {
            let (s, r) = (send.len(), recv.len());
            let problem =
                format!("{s} elements in and {r} out were given, {sends} and {receives} are needed");
            return Err(self.refuse(call, problem));
        }
        (arguments.send, arguments.recv) = (input(send), output(recv));
        Ok(arguments)
    }

    fn arguments_in_place<T: Element>(&self, call: &Call, data: &mut [T]) -> Result<Arguments> {
        let mut arguments = self.common::<T>(call)?;
        let (sends, receives) = self.lengths(call);
        if data.len() < sends.max(receives) {
            let problem = format!("{} elements were given, {} are needed", data.len(), sends.max(receives));
            return Err(self.refuse(call, problem));
        }
        (arguments.send, arguments.recv) = (input(data), output(data));
        match call.kind {
            Kind::Broadcast | Kind::Barrier => {}
            Kind::Reduce if self.rank != call.root => {}
            Kind::ReduceScatter | Kind::AllGather | Kind::AllReduce | Kind::AllToAll | Kind::Reduce => {
                arguments.send = self.in_place_known.then_some(IN_PLACE).ok_or_else(|| {
                    let library = self.comm.session().library();
                    self.refuse(
                        call,
                        format!("in place over {library}, whose MPI_IN_PLACE is not known here"),
                    )
                })?;
            }
            _ => return Err(self.refuse(call, "MPI's form of it is out of place here".into())),
        }
        Ok(arguments)
    }

    /// Elements in and out.
    fn lengths(&self, call: &Call) -> (usize, usize) {
        let (one, all) = (call.count, call.count * self.size);
        let at_root = self.rank == call.root;
        match call.kind {
            Kind::ReduceScatter => (all, one),
            Kind::AllGather => (one, all),
            Kind::AllToAll => (all, all),
            Kind::AllReduce => (one, one),
            Kind::Broadcast => (one, one),
            Kind::Reduce => (one, if at_root { one } else { 0 }),
            Kind::Gather => (one, if at_root { all } else { 0 }),
            Kind::Scatter => (if at_root { all } else { 0 }, one),
            Kind::Barrier | Kind::Send | Kind::Recv => (0, 0),
        }
    }

    /// The number that MPI takes. Of a reduce_scatter the whole has to be one as well, and over Open MPI of whatever has a part
    /// for each rank: it multiplies so, and would read and write elsewhere.
    fn count(&self, call: &Call) -> Result<c_int> {
        let parts = match call.kind {
            Kind::ReduceScatter => self.size,
            Kind::AllGather | Kind::AllToAll | Kind::Gather | Kind::Scatter if self.multiplies => self.size,
            _ => 1,
        };
        let whole = call.count.saturating_mul(parts);
        match (c_int::try_from(call.count), c_int::try_from(whole)) {
            (Ok(count), Ok(_)) => Ok(count),
            _ => {
                let problem = format!("{whole} elements; MPI's own collectives take up to {}", c_int::MAX);
                Err(self.refuse(call, problem))
            }
        }
    }

    fn dtype(&self, call: &Call) -> Result<ffi::MPI_Datatype> {
        // SAFETY: predefined values of the library.
        unsafe {
            Ok(match call.dtype {
                DType::F32 => ffi::RSMPI_FLOAT,
                DType::F64 => ffi::RSMPI_DOUBLE,
                DType::I8 => ffi::RSMPI_INT8_T,
                DType::I32 => ffi::RSMPI_INT32_T,
                DType::I64 => ffi::RSMPI_INT64_T,
                DType::U8 => ffi::RSMPI_UINT8_T,
                DType::U32 => ffi::RSMPI_UINT32_T,
                DType::U64 => ffi::RSMPI_UINT64_T,
                // Moving bits needs no arithmetic.
                DType::F16 | DType::Bf16 if !call.kind.reduces() => ffi::RSMPI_UINT16_T,
                DType::F16 | DType::Bf16 => {
                    let problem =
                        format!("MPI has no {}; use f32, or our own algorithms, which have it", call.dtype);
                    return Err(self.refuse(call, problem));
                }
            })
        }
    }

    fn op(&self, call: &Call) -> Result<Option<ffi::MPI_Op>> {
        if !call.kind.reduces() {
            return Ok(None);
        }
        let compares = matches!(call.op, ReduceOp::Min | ReduceOp::Max);
        if self.signed_only && compares && matches!(call.dtype, DType::U8 | DType::U32 | DType::U64) {
            let problem = format!(
                "{} compares {} as if it were signed; use our own algorithms, which do not",
                self.comm.session().library(),
                call.dtype
            );
            return Err(self.refuse(call, problem));
        }
        // SAFETY: predefined values of the library.
        unsafe {
            Ok(Some(match call.op {
                ReduceOp::Sum => ffi::RSMPI_SUM,
                ReduceOp::Product => ffi::RSMPI_PROD,
                ReduceOp::Min => ffi::RSMPI_MIN,
                ReduceOp::Max => ffi::RSMPI_MAX,
                ReduceOp::Average => {
                    let problem = "MPI has no average; use sum, or our own algorithms, which have it".into();
                    return Err(self.refuse(call, problem));
                }
            }))
        }
    }

    /// # Safety
    /// The arguments are valid for `call`.
    unsafe fn blocking(&self, call: &Call, a: &Arguments) -> Result<()> {
        let (comm, n, t) = (self.comm.raw, a.count, a.dtype);
        let op = a.op;
        let session = self.comm.session();
        let _turn = session.turn()?;
        let inside = self.watch.enter(Place::Collective);
        // SAFETY: by the caller; `op` is there for the kinds that reduce.
        let (name, code) = unsafe {
            match (call.kind, op) {
                (Kind::ReduceScatter, Some(op)) => (
                    "MPI_Reduce_scatter_block",
                    ffi::MPI_Reduce_scatter_block(a.send, a.recv, n, t, op, comm),
                ),
                (Kind::AllReduce, Some(op)) => {
                    ("MPI_Allreduce", ffi::MPI_Allreduce(a.send, a.recv, n, t, op, comm))
                }
                (Kind::Reduce, Some(op)) => {
                    ("MPI_Reduce", ffi::MPI_Reduce(a.send, a.recv, n, t, op, a.root, comm))
                }
                (Kind::AllGather, _) => {
                    ("MPI_Allgather", ffi::MPI_Allgather(a.send, n, t, a.recv, n, t, comm))
                }
                (Kind::AllToAll, _) => ("MPI_Alltoall", ffi::MPI_Alltoall(a.send, n, t, a.recv, n, t, comm)),
                (Kind::Broadcast, _) => ("MPI_Bcast", ffi::MPI_Bcast(a.recv, n, t, a.root, comm)),
                (Kind::Gather, _) => {
                    ("MPI_Gather", ffi::MPI_Gather(a.send, n, t, a.recv, n, t, a.root, comm))
                }
                (Kind::Scatter, _) => {
                    ("MPI_Scatter", ffi::MPI_Scatter(a.send, n, t, a.recv, n, t, a.root, comm))
                }
                (Kind::Barrier, _) => ("MPI_Barrier", ffi::MPI_Barrier(comm)),
                _ => return Err(self.refuse(call, "not a collective of MPI".into())),
            }
        };
        drop(inside);
        session.check(name, code)
    }

    /// # Safety
    /// The arguments are valid for `call` and stay so until the request is complete.
    unsafe fn nonblocking(&self, call: &Call, a: &Arguments) -> Result<ffi::MPI_Request> {
        let (comm, n, t) = (self.comm.raw, a.count, a.dtype);
        let session = self.comm.session();
        let _turn = session.turn()?;
        // SAFETY: a predefined value.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        let r = &mut request;
        // SAFETY: by the caller; `op` is there for the kinds that reduce.
        let (name, code) = unsafe {
            match (call.kind, a.op) {
                (Kind::ReduceScatter, Some(op)) => (
                    "MPI_Ireduce_scatter_block",
                    ffi::MPI_Ireduce_scatter_block(a.send, a.recv, n, t, op, comm, r),
                ),
                (Kind::AllReduce, Some(op)) => {
                    ("MPI_Iallreduce", ffi::MPI_Iallreduce(a.send, a.recv, n, t, op, comm, r))
                }
                (Kind::Reduce, Some(op)) => {
                    ("MPI_Ireduce", ffi::MPI_Ireduce(a.send, a.recv, n, t, op, a.root, comm, r))
                }
                (Kind::AllGather, _) => {
                    ("MPI_Iallgather", ffi::MPI_Iallgather(a.send, n, t, a.recv, n, t, comm, r))
                }
                (Kind::AllToAll, _) => {
                    ("MPI_Ialltoall", ffi::MPI_Ialltoall(a.send, n, t, a.recv, n, t, comm, r))
                }
                (Kind::Gather, _) => {
                    ("MPI_Igather", ffi::MPI_Igather(a.send, n, t, a.recv, n, t, a.root, comm, r))
                }
                (Kind::Scatter, _) => {
                    ("MPI_Iscatter", ffi::MPI_Iscatter(a.send, n, t, a.recv, n, t, a.root, comm, r))
                }
                (Kind::Barrier, _) => ("MPI_Ibarrier", ffi::MPI_Ibarrier(comm, r)),
                _ => return Err(self.refuse(call, "not a non-blocking collective of MPI".into())),
            }
        };
        session.check(name, code)?;
        Ok(request)
    }
}

/// Where nothing is read or written. An empty slice of bytes may have the address 1, which is MPI_IN_PLACE.
static NOTHING: u64 = 0;

fn input<T>(data: &[T]) -> *const c_void {
    if data.is_empty() { (&raw const NOTHING).cast() } else { data.as_ptr().cast() }
}

fn output<T>(data: &mut [T]) -> *mut c_void {
    if data.is_empty() { (&raw const NOTHING).cast_mut().cast() } else { data.as_mut_ptr().cast() }
}

/// Whether the library finds 3000000000 less than 5.
fn takes_unsigned_for_signed() -> bool {
    let (one, mut least) = (3_000_000_000u32, 5u32);
    // SAFETY: MPI is initialised, by whoever has a communicator; one number each, of the type that is named.
    let code = unsafe {
        let (from, to) = ((&raw const one).cast(), (&raw mut least).cast());
        ffi::MPI_Reduce_local(from, to, 1, ffi::RSMPI_UINT32_T, ffi::RSMPI_MIN)
    };
    code == OK && least != 5
}

impl<T: Element> Started<'_, T> {
    /// Moves it forward; whether it is complete.
    ///
    /// # Errors
    /// MPI's.
    pub fn test(&mut self) -> Result<bool> {
        let Some(request) = &mut self.request else { return Ok(true) };
        let session = self.native.comm.session();
        let _turn = session.turn()?;
        // SAFETY: a request that was posted and not yet reported complete.
        let tested = unsafe { test(request) };
        if tested != Ok(false) {
            self.request = None;
        }
        tested.map_err(|code| {
            // What a peer that is left has sent may still arrive in it.
            std::mem::forget(self.buffers.take());
            session.error("MPI_Test", code)
        })
    }

    /// Returns the buffers (in, out) once it is complete.
    ///
    /// # Errors
    /// MPI's.
    pub fn wait(mut self) -> Result<(Buffer<T>, Buffer<T>)> {
        let mut looks = 0u32;
        let _inside = self.native.watch.enter(Place::Collective);
        while !self.test()? {
            looks += 1;
            if looks > 1000 {
                std::thread::yield_now();
            }
        }
        Ok(self.buffers.take().expect("taken only here"))
    }
}

impl<T: Element> Drop for Started<'_, T> {
    fn drop(&mut self) {
        // MPI cannot cancel a collective: it has to run, unless the job fails, and then the memory stays.
        let _inside = self.request.is_some().then(|| self.native.watch.enter(Place::Collective));
        while self.request.is_some() {
            if self.native.comm.session().has_failed() || self.test().is_err() {
                std::mem::forget(self.buffers.take());
                return;
            }
            std::thread::sleep(Duration::from_micros(20));
        }
    }
}
