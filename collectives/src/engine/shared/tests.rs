//! Of waiting: what is no silence, what is enough, and what a panic leaves.

use super::*;
use crate::engine::QUANTUM;
use crate::schedule::{Algorithm, Kind};
use crate::transport::{Request, Tag, Tells, threads};
use crate::{Buffer, Communicator, DType};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;

/// The first of `size` ranks, which nobody else moves: what comes of looking at a message is as written.
struct Scripted<F> {
    size: usize,
    tells: Tells,
    looks: F,
    /// A peer is lost, as who asks for that hears.
    lost: bool,
    /// How long it was to sleep each time.
    parked: Arc<Mutex<Vec<Duration>>>,
    aborted: Arc<AtomicBool>,
}

impl<F: FnMut(Request) -> bool + Send + 'static> Scripted<F> {
    /// One that tells of collectives, where what `looks` says of a message is whether it has come.
    fn new(size: usize, looks: F) -> Self {
        let (parked, aborted) = Default::default();
        Scripted { size, tells: Tells::Collectives, looks, lost: false, parked, aborted }
    }

    fn with(self, options: Options) -> Communicator {
        Communicator::new(Box::new(self), options).unwrap()
    }
}

// SAFETY: nothing is moved at all.
unsafe impl<F: FnMut(Request) -> bool + Send> Transport for Scripted<F> {
    fn name(&self) -> &'static str {
        "scripted"
    }

    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        self.size
    }

    fn job_rank(&self, member: usize) -> usize {
        member
    }

    fn tells(&self) -> Tells {
        self.tells
    }

    unsafe fn send(&mut self, _: usize, _: Tag, _: *const u8, _: usize) -> Result<Request> {
        Ok(Request::DONE)
    }

    unsafe fn recv(&mut self, from: usize, _: Tag, _: *mut u8, _: usize) -> Result<Request> {
        Ok(Request(from as u64))
    }

    fn test(&mut self, request: Request) -> Result<bool> {
        Ok((self.looks)(request))
    }

    fn subgroup(&mut self, _: &[usize], _: u64, _: Duration) -> Result<Box<dyn Transport>> {
        Err(Error::Launch("there are no groups".into()))
    }

    fn check(&mut self) -> Result<()> {
        match self.lost {
            true => Err(Error::PeerLost { rank: 0, peer: 1, how: "has ended".into() }),
            false => Ok(()),
        }
    }

    fn park(&mut self, limit: Duration) {
        self.parked.lock().unwrap().push(limit);
        std::thread::sleep(limit.min(NAP));
    }

    fn abort(&mut self, _: &Error) {
        self.aborted.store(true, Ordering::Release);
    }
}

/// Of 50 ranks one message comes between two looks, and each look takes longer than a peer may be silent.
#[test]
fn a_call_that_moves_on_may_take_longer_than_a_silent_peer() {
    const DEADLINE: Duration = Duration::from_millis(1);
    let mut came = false;
    let slow = Scripted::new(50, move |_| {
        std::thread::sleep(2 * DEADLINE);
        came = !came;
        came
    });
    let comm = slow.with(Options { deadline: DEADLINE, ..Options::default() });
    let mut all = vec![0u64; comm.size()];
    comm.gather(&[7u64][..], Some((&mut all[..]).into()), 0).expect("somebody answers all the time");
}

#[test]
fn who_never_waits_hears_of_a_loss() {
    let comm = Scripted { lost: true, ..Scripted::new(50, |_| true) }.with(Options::default());
    let sent = (0..2000).try_for_each(|_| comm.send(&[7u8][..], 2, 0));
    assert!(matches!(sent, Err(Error::PeerLost { peer: 1, .. })), "{sent:?}");
}

/// Nothing comes before each message has been looked at: of what it has yet to ask a library for, a transport learns only so.
#[test]
fn each_message_that_a_call_waits_for_has_its_turn() {
    let mut looked = [false; 6];
    let shy = Scripted::new(looked.len(), move |request| {
        looked[request.0 as usize] = true;
        looked[1..].iter().all(|looked| *looked)
    });
    let comm = shy.with(Options { deadline: Duration::from_secs(5), ..Options::default() });
    let mut all = vec![0u64; comm.size()];
    comm.gather(&[7u64][..], Some((&mut all[..]).into()), 0).expect("each is looked at");
}

/// Or each place for calls would have for itself what few calls at once need.
#[test]
fn only_who_posts_very_many_messages_has_room_for_them() {
    const RANKS: usize = 3000;
    let transport = Box::new(Scripted::new(RANKS, |_| false));
    let handle = Handle::new(transport, Options::default(), Arc::default()).expect("an engine");
    let call = Call::new(Kind::AllGather, DType::U8, 1);
    let (mine, mut all) = ([7u8], vec![0u8; RANKS]);
    let ends = Ends { send: mine.as_ptr(), send_bytes: 1, recv: all.as_mut_ptr(), recv_bytes: RANKS };
    let mut engine = handle.shared.lock();
    engine.force(Kind::AllGather, Some(Algorithm::Pairwise)).expect("is possible");
    // SAFETY: the buffers outlive the engine, whose transport moves nothing.
    let id = unsafe { engine.start(&call, &ends, None, Priority::Low, 0) }.expect("starts") as usize;
    let rooms = engine.flights.iter().map(|flight| flight.state.posted.capacity());
    for (place, room) in rooms.enumerate() {
        let needed = RANKS - 1;
        assert!(if place == id { room >= needed } else { room < needed }, "{room} in place {place}");
    }
    engine.fail(Error::GivenUp("as meant".into()));
}

/// Sums of gradients that nobody waits for are started before weights are gathered, and what both wait for comes at once.
#[test]
fn urgent_calls_go_first_unless_somebody_waits_for_another() {
    const PART: usize = 3 * QUANTUM;
    for waits in [false, true] {
        let (gradients, mut sums) = (vec![1u8; 2 * PART], vec![0u8; PART]);
        let (own, mut weights) = (vec![1u8; PART], vec![0u8; 2 * PART]);
        let come = Arc::<AtomicBool>::default();
        let seen = Arc::clone(&come);
        let transport = Box::new(Scripted::new(2, move |_| seen.load(Ordering::Relaxed)));
        let handle = Handle::new(transport, Options::default(), Arc::default()).expect("an engine");
        let mut engine = handle.shared.lock();
        let mut start = |kind, send: &[u8], recv: &mut [u8], priority| {
            let (send_bytes, recv_bytes) = (send.len(), recv.len());
            let ends = Ends { send: send.as_ptr(), send_bytes, recv: recv.as_mut_ptr(), recv_bytes };
            // SAFETY: the buffers outlive the engine.
            unsafe { engine.start(&Call::new(kind, DType::U8, PART), &ends, None, priority, 0) }
                .expect("starts")
        };
        let low = start(Kind::ReduceScatter, &gradients, &mut sums, Priority::Low);
        let high = start(Kind::AllGather, &own, &mut weights, Priority::High);
        come.store(true, Ordering::Relaxed);
        let (first, last) = if waits { (low, high) } else { (high, low) };
        let mark = |engine: &Engine| engine.flights[last as usize].state.progress_mark();
        let (at_first, mut turns) = (mark(&engine), 0);
        while engine.flights[first as usize].stage == Stage::Running {
            assert_eq!(mark(&engine), at_first, "after {turns} turns, with somebody waiting: {waits}");
            engine.turn(waits.then_some(first)).expect("nobody fails");
            turns += 1;
        }
        assert!(turns > 1, "what comes first takes several turns");
        engine.poll(None).expect("nobody fails");
        assert!(engine.order.is_empty(), "both are over");
    }
}

#[test]
fn a_transport_that_panics_is_aborted_before_memory_goes() {
    let mut looks = 0;
    let breaking = Scripted::new(2, move |_| {
        looks += 1;
        assert!(looks < 3, "as meant");
        false
    });
    let breaking = Scripted { tells: Tells::Nothing, ..breaking };
    let aborted = Arc::clone(&breaking.aborted);
    let comm = breaking.with(Options::default());
    let mut data = [0f32; 8];
    let sum = AssertUnwindSafe(|| comm.all_reduce_in_place(&mut data[..], crate::ReduceOp::Sum));
    assert!(catch_unwind(sum).is_err() && aborted.load(Ordering::Acquire));
    let error = comm.barrier().expect_err("given up").to_string();
    assert!(error.contains("panicked"), "{error}");
}

/// The engines of two ranks.
fn two() -> [Handle; 2] {
    let engine = |transport| Handle::new(Box::new(transport), Options::default(), Arc::default());
    let mut ranks = threads::group(2).into_iter().map(|transport| engine(transport).expect("an engine"));
    [ranks.next().unwrap(), ranks.next().unwrap()]
}

/// A barrier that waits for the other rank.
fn barrier(shared: &Shared) -> u32 {
    let call = Call::new(Kind::Barrier, DType::U8, 0);
    let nothing = Ends { send: std::ptr::null(), send_bytes: 0, recv: std::ptr::null_mut(), recv_bytes: 0 };
    // SAFETY: a barrier has no buffers.
    unsafe { shared.start(&call, &nothing, None, Priority::Low) }.expect("starts")
}

#[test]
fn a_wait_that_has_been_enough_can_be_taken_up_again() {
    let [first, second] = two();
    let id = barrier(&first.shared);
    let looks = std::cell::Cell::new(0);
    let enough = || looks.replace(looks.get() + 1) == 2;
    assert!(!first.shared.wait_or(id, enough).expect("nobody fails"));
    assert!(!first.shared.is_over(id));
    let its = barrier(&second.shared);
    assert!(first.shared.wait_or(id, || false).expect("all have come"));
    second.shared.wait(its).expect("all have come");
}

#[test]
fn everybody_who_looks_sees_that_something_moved() {
    let [first, second] = two();
    let id = barrier(&first.shared);
    let at_first = first.shared.serve().mark;
    let its = barrier(&second.shared);
    let moved = first.shared.serve().mark;
    assert_ne!(moved, at_first);
    // Nothing new is no movement, nor is it one that a thread is at it.
    assert_eq!(first.shared.serve().mark, moved);
    let held = first.shared.lock();
    assert_eq!(first.shared.serve().mark, moved);
    drop(held);
    first.shared.wait(id).expect("all have come");
    second.shared.wait(its).expect("all have come");
}

/// Nobody wakes it for the other group, in which one of its calls is under way until it has slept thrice.
#[test]
fn who_waits_in_one_group_sleeps_shortly_while_another_needs_it() {
    let parked = Arc::<Mutex<Vec<Duration>>>::default();
    let family = Arc::<Family>::default();
    let group = |sleeps: usize| {
        let slept = Arc::clone(&parked);
        let silent = Scripted::new(2, move |_| slept.lock().unwrap().len() >= sleeps);
        let transport = Box::new(Scripted { parked: Arc::clone(&parked), ..silent });
        Handle::new(transport, Options::default(), Arc::clone(&family)).expect("an engine")
    };
    let [waiting, other] = [6, 3].map(group);
    let [awaited, its] = [&waiting, &other].map(|group| barrier(&group.shared));
    waiting.shared.wait(awaited).expect("all have come");
    assert!(other.shared.is_over(its));
    assert_eq!(*parked.lock().unwrap(), [NAP, NAP, NAP, PARK, PARK, PARK]);
}

#[test]
fn a_message_behind_another_holds_up_no_collective() {
    let mut options = Options { deadline: Duration::from_secs(20), ..Options::default() };
    // The first goes in several pieces, and the second needs memory of the engine.
    options.tuning.longest = 64 << 10;
    let (long, short) = (1 << 20, 6 << 10);
    Communicator::on_threads(2, options, |comm| {
        let add = || {
            // In place, of which it makes a copy that peers read.
            let mut all = vec![1f32; 50_000];
            comm.all_reduce_in_place(&mut all[..], crate::ReduceOp::Sum).unwrap();
            assert!(all.iter().all(|&x| x == 2.0));
        };
        if comm.rank() == 0 {
            let [first, second] =
                [long, short].map(|bytes| comm.start_recv(Buffer::<u8>::zeroed(bytes), 1, 7).unwrap());
            add();
            assert!(first.wait().unwrap().host().iter().all(|&x| x == 1));
            assert!(second.wait().unwrap().host().iter().all(|&x| x == 2));
        } else {
            add();
            comm.send(&vec![1u8; long][..], 0, 7).unwrap();
            comm.send(&vec![2u8; short][..], 0, 7).unwrap();
        }
    });
}
