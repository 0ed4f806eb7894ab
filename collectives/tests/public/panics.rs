//! A transport that panics while it is moved on for another group.

use super::device::emulator;
use collectives::device::SharedQueue;
use collectives::transport::threads::{self, Threads};
use collectives::transport::{Request, Tag, Transport};
use collectives::{Communicator, Error, Options, ReduceOp, Result, Staged};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Ranks as threads. Groups that are made from it panic as soon as they are told to and look for a message.
struct Fragile {
    inner: Box<dyn Transport>,
    panics: Option<Arc<AtomicBool>>,
    told: Arc<AtomicBool>,
}

impl Fragile {
    fn world(inner: Threads, told: &Arc<AtomicBool>) -> Fragile {
        Fragile { inner: Box::new(inner), panics: None, told: Arc::clone(told) }
    }
}

// SAFETY: the transport inside keeps the contract.
unsafe impl Transport for Fragile {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn size(&self) -> usize {
        self.inner.size()
    }

    fn job_rank(&self, member: usize) -> usize {
        self.inner.job_rank(member)
    }

    unsafe fn send(&mut self, to: usize, tag: Tag, src: *const u8, bytes: usize) -> Result<Request> {
        // SAFETY: the caller's promise.
        unsafe { self.inner.send(to, tag, src, bytes) }
    }

    unsafe fn recv(&mut self, from: usize, tag: Tag, dst: *mut u8, bytes: usize) -> Result<Request> {
        // SAFETY: the caller's promise.
        unsafe { self.inner.recv(from, tag, dst, bytes) }
    }

    fn test(&mut self, request: Request) -> Result<bool> {
        assert!(!self.panics.as_ref().is_some_and(|told| told.load(Ordering::Relaxed)), "as meant");
        self.inner.test(request)
    }

    fn subgroup(&mut self, members: &[usize], context: u64, within: Duration) -> Result<Box<dyn Transport>> {
        let (inner, told) = (self.inner.subgroup(members, context, within)?, Arc::clone(&self.told));
        Ok(Box::new(Fragile { inner, panics: Some(Arc::clone(&told)), told }))
    }

    fn check(&mut self) -> Result<()> {
        self.inner.check()
    }

    fn abort(&mut self, why: &Error) {
        self.inner.abort(why);
    }
}

/// The call that was waited for goes with its buffers, so it must be over then, although its own group is in order.
#[test]
fn a_call_of_a_device_is_over_when_waiting_for_it_panics() {
    let Some(emulator) = emulator() else { return };
    std::thread::scope(|scope| {
        for transport in threads::group(2) {
            scope.spawn(move || {
                let told = Arc::<AtomicBool>::default();
                let options = Options { deadline: Duration::from_secs(10), ..Options::default() };
                let comm =
                    Communicator::new(Box::new(Fragile::world(transport, &told)), options).expect("a rank");
                let queue = SharedQueue::new(emulator.late_queue(comm.rank() as u64));
                let carrier = Staged::new(&comm, queue).expect("a carrier");
                let comm = comm.with_carrier(Arc::new(carrier));
                let other = comm.split(Some(0), 0).expect("splits").expect("a group");
                if comm.rank() == 1 {
                    let said = comm.barrier().expect_err("rank 0 gives up").to_string();
                    return assert!(said.contains("panicked"), "{said}");
                }
                let waits = other.start_barrier().expect("starts");
                let mut buffer = comm.alloc::<f32>(2000).expect("memory");
                told.store(true, Ordering::Relaxed);
                let sum = AssertUnwindSafe(|| comm.all_reduce_in_place(&mut buffer, ReduceOp::Sum));
                assert!(catch_unwind(sum).is_err());
                let next = comm.start_all_gather_in_place(comm.alloc::<f32>(2).expect("memory"));
                let said = next.expect_err("a carrier that has given up").to_string();
                assert!(said.contains("panicked"), "{said}");
                drop(waits);
            });
        }
    });
}
