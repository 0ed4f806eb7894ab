//! Collectives on memory of a device, emulated on the processor: whatever its queues have not ordered happens in several
//! orders, none before somebody waits for it.

use collectives::device::emulation::{EmulatedQueue, EmulatedWire, Emulator};
use collectives::device::{Module, PRODUCT_WORKSPACE, Queue, SharedQueue};
use collectives::schedule::Call;
use collectives::{
    Account, Alone, Buffer, Communicator, DType, Lane, Memory, Message, Options, Order, Progress, ReduceOp,
    Result, Staged, Wire, Wired,
};
use conformance::{
    calls_that_wait_for_places, device, groups_in_any_order, groups_while_others_wait, host_among_device,
    messages_and_calls, standard,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// After which a rank is missed that is to be: longer than others get no processor.
const DEADLINE: Duration = Duration::from_secs(2);

pub fn emulator() -> Option<&'static Emulator> {
    static EMULATOR: OnceLock<Option<Emulator>> = OnceLock::new();
    let build = || {
        let types = [DType::F32, DType::Bf16, DType::F16, DType::I64, DType::U8];
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let built = Emulator::build(&types.map(Module::reduce), folder).expect("builds");
        harness::made_by_cxx("collectives of an emulated device", built)
    };
    EMULATOR.get_or_init(build).as_ref()
}

fn staged(n: usize, options: Options, queue: impl Fn(usize) -> EmulatedQueue + Sync) {
    Communicator::on_threads(n, options, |comm| {
        let queue = SharedQueue::new(queue(comm.rank()));
        let carrier = Staged::new(&comm, queue.clone()).expect("a carrier");
        device(&comm.with_carrier(Arc::new(carrier)), &queue);
    });
}

#[test]
fn through_the_host_in_any_order() {
    let Some(emulator) = emulator() else { return };
    for n in 1..=4 {
        staged(n, standard(), |rank| emulator.late_queue((10 * n + rank) as u64));
    }
    staged(3, standard(), |_| emulator.queue(0));
}

#[test]
fn through_the_host_with_progress_threads() {
    let Some(emulator) = emulator() else { return };
    let options = Options { progress: Progress::Thread { cpu: None }, ..standard() };
    staged(2, options, |rank| emulator.late_queue(5 + rank as u64));
}

/// What `n` ranks do through the host, with late queues of their own.
fn late(n: usize, planned: Option<usize>, body: fn(&Communicator, &SharedQueue<EmulatedQueue>)) {
    let Some(emulator) = emulator() else { return };
    let options = Options { deadline: Duration::from_secs(10), ..standard() };
    Communicator::on_threads(n, options, |comm| {
        let queue = SharedQueue::new(emulator.late_queue(7 + comm.rank() as u64));
        let carrier = match planned {
            Some(largest) => Staged::planned(&comm, queue.clone(), largest, &Account::default()),
            None => Staged::new(&comm, queue.clone()),
        };
        body(&comm.with_carrier(Arc::new(carrier.expect("a carrier"))), &queue);
    });
}

#[test]
fn groups_through_the_host_in_any_order() {
    late(3, None, groups_in_any_order);
}

#[test]
fn groups_through_the_host_move_on_whoever_is_waited_for() {
    late(3, None, groups_while_others_wait);
}

#[test]
fn messages_do_not_take_the_places_of_planned_calls() {
    late(2, Some(4096), messages_and_calls);
}

#[test]
fn who_starts_a_call_or_waits_for_a_message_holds_no_other_call_up() {
    late(2, Some(4096), calls_that_wait_for_places);
}

#[test]
fn calls_of_the_host_keep_their_order_among_those_of_a_device() {
    late(3, None, host_among_device);
}

#[test]
fn one_rank_alone() {
    let Some(emulator) = emulator() else { return };
    for queue in [emulator.queue(0), emulator.late_queue(1), emulator.late_queue(2)] {
        let comm = Communicator::threads(1).remove(0);
        let queue = SharedQueue::new(queue);
        let carrier = Alone::new(&comm, queue.clone()).expect("a carrier");
        device(&comm.with_carrier(Arc::new(carrier)), &queue);
    }
}

#[test]
fn a_rank_that_gives_up_is_heard() {
    let Some(emulator) = emulator() else { return };
    Communicator::on_threads(2, Options::default(), |comm| {
        let queue = SharedQueue::new(emulator.late_queue(comm.rank() as u64));
        let carrier = Staged::new(&comm, queue).expect("a carrier");
        let comm = comm.with_carrier(Arc::new(carrier));
        if comm.rank() == 1 {
            return comm.abort("the disk is full");
        }
        let buffer = comm.alloc::<f32>(2000).expect("memory");
        let dropped = comm.start_all_gather_in_place(comm.alloc::<f32>(2000).expect("memory"));
        drop(dropped);
        let started = comm.start_all_gather_in_place(buffer);
        let error = started.and_then(|started| started.wait()).unwrap_err().to_string();
        assert!(error.contains("the disk is full"), "{error}");
        let again = comm.start_all_gather_in_place(comm.alloc::<f32>(2).expect("memory"));
        assert_eq!(again.err().map(|e| e.to_string()), Some(error));
    });
}

/// Runs `body` as every rank of a group whose devices are joined by a wire, with so much scratch memory.
fn wired(
    n: usize,
    options: Options,
    scratch: usize,
    queue: impl Fn(usize) -> EmulatedQueue + Sync,
    body: impl Fn(Communicator, &SharedQueue<EmulatedQueue>) + Sync,
) {
    let ranks = Communicator::threads_with(n, options).expect("ranks");
    let met = &Barrier::new(n);
    std::thread::scope(|scope| {
        for (comm, wire) in ranks.into_iter().zip(EmulatedWire::group(n)) {
            let (queue, body) = (&queue, &body);
            scope.spawn(move || {
                let queue = SharedQueue::new(queue(comm.rank()));
                met.wait();
                let (order, compute) = (Order::Canonical, queue.clone());
                let carrier = Wired::with_scratch(&comm, compute, wire, order, scratch).expect("a carrier");
                // What ends badly ends after all have begun.
                comm.barrier().expect("all come");
                body(comm.with_carrier(Arc::new(carrier)), &queue);
            });
        }
    });
}

#[test]
fn over_a_wire_in_any_order() {
    let Some(emulator) = emulator() else { return };
    for n in 1..=4 {
        // The least scratch memory sums in many pieces.
        for scratch in [0, 1 << 20] {
            let queue = |rank| emulator.late_queue((10 * n + rank + scratch) as u64);
            wired(n, standard(), scratch, queue, |comm, queue| device(&comm, queue));
        }
    }
    wired(3, standard(), 1 << 20, |_| emulator.queue(0), |comm, queue| device(&comm, queue));
}

/// What ends a call over a wire in which only rank 0 takes part.
fn end_of_a_call(n: usize, deadline: Duration, others: impl Fn(&Communicator) + Sync) -> Option<String> {
    let emulator = emulator()?;
    let options = Options { deadline, ..standard() };
    let said = Mutex::new(String::new());
    wired(
        n,
        options,
        0,
        |rank| emulator.late_queue(rank as u64),
        |comm, queue| {
            if comm.rank() > 0 {
                return others(&comm);
            }
            let buffer = comm.alloc::<f32>(4 * n).expect("memory");
            let started = comm.start_reduce_scatter_in_place(buffer, ReduceOp::Sum).expect("starts");
            let waited = started.wait();
            // The host did not wait; the queue does, and goes on when the call is given up.
            let _ = queue.clone().synchronize();
            let error = comm.progress().unwrap_err();
            assert!(waited.is_ok() && comm.carrier().is_some());
            let again = comm.start_all_gather_in_place(comm.alloc::<f32>(n).expect("memory"));
            assert_eq!(again.err().map(|e| e.to_string()), Some(error.to_string()));
            *said.lock().unwrap() = error.to_string();
        },
    );
    Some(said.into_inner().unwrap())
}

#[test]
fn a_rank_that_does_not_take_part_is_named_in_time() {
    let said = end_of_a_call(3, DEADLINE, |comm| {
        if comm.rank() == 2 {
            let buffer = comm.alloc::<f32>(12).expect("memory");
            let started = comm.start_reduce_scatter_in_place(buffer, ReduceOp::Sum).expect("starts");
            let _ = started.wait();
        }
        // The others are busy with something else, until they hear of the end.
        while comm.progress().is_ok() {
            std::thread::sleep(Duration::from_millis(5));
        }
    });
    let named = |said: &String| said.contains(&format!("no answer from rank 1 within {DEADLINE:?}"));
    assert!(said.as_ref().is_none_or(named), "{said:?}");
}

#[test]
fn ranks_that_call_something_else_are_told_both_calls() {
    let said = end_of_a_call(2, standard().deadline, |comm| {
        let buffer = comm.alloc::<f32>(12).expect("memory");
        let started = comm.start_reduce_scatter_in_place(buffer, ReduceOp::Max).expect("starts");
        let _ = started.wait();
        while comm.progress().is_ok() {
            std::thread::sleep(Duration::from_millis(5));
        }
    });
    let words = ["reduce_scatter of 4 f32, sum", "reduce_scatter of 6 f32, max"];
    let both = |said: &String| words.iter().all(|word| said.contains(word));
    assert!(said.as_ref().is_none_or(both), "{said:?}");
}

/// Of calls that move as many bytes each comes to its end. The wire's watch sees only those that are under way.
#[test]
fn ranks_that_called_something_else_hear_of_it_over_a_wire() {
    let Some(emulator) = emulator() else { return };
    let queue = |rank| emulator.late_queue(rank as u64);
    let said = Mutex::new(Vec::new());
    wired(2, standard(), 0, queue, |comm, queue| {
        let op = if comm.rank() == 0 { ReduceOp::Sum } else { ReduceOp::Max };
        let call = |op| {
            let mut buffer = comm.alloc::<f32>(4).expect("memory");
            comm.all_reduce_in_place(&mut buffer, op)?;
            let _ = queue.clone().synchronize();
            comm.progress()
        };
        call(op).expect("nobody knows yet");
        let heard = loop {
            if let Err(error) = call(ReduceOp::Sum) {
                break error.to_string();
            }
        };
        said.lock().unwrap().push(heard);
    });
    let said = said.into_inner().unwrap();
    let both =
        |said: &String| ["sum", "max"].iter().all(|op| said.contains(&format!("all_reduce of 4 f32, {op}")));
    assert!(said.len() == 2 && said.iter().all(both), "{said:?}");
}

#[test]
fn a_rank_that_gives_up_ends_calls_over_a_wire() {
    let said = end_of_a_call(2, standard().deadline, |comm| comm.abort("the disk is full"));
    assert!(said.as_ref().is_none_or(|said| said.contains("the disk is full")), "{said:?}");
}

/// Watches go on meeting; that must not pass for an answer.
#[test]
fn a_rank_that_the_host_waits_for_is_named_beside_a_wire() {
    let Some(emulator) = emulator() else { return };
    let options = Options { deadline: DEADLINE, ..standard() };
    let queue = |rank| emulator.late_queue(rank as u64);
    let named = AtomicBool::new(false);
    wired(2, options, 0, queue, |comm, _| match comm.rank() {
        0 => {
            let said = comm.barrier().unwrap_err().to_string();
            named.store(true, Ordering::Relaxed);
            assert!(said.contains("no answer from rank 1"), "{said}");
        }
        // Busy with something else, and not looking.
        _ => {
            let until = Instant::now() + 20 * DEADLINE;
            while !named.load(Ordering::Relaxed) {
                assert!(Instant::now() < until, "rank 0 waits for ever");
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    });
}

/// A wire on which nothing that rank 1 should send ever goes.
struct Cut(EmulatedWire, usize);

// SAFETY: the other wire does what this one does.
unsafe impl Wire<EmulatedQueue> for Cut {
    fn name(&self) -> &str {
        "cut"
    }

    fn group(&self) -> (usize, usize) {
        self.0.group()
    }

    unsafe fn exchange(&self, lane: Lane, queue: &mut EmulatedQueue, messages: &[Message]) -> Result<()> {
        let goes = |message: &&Message| self.1 != 1 || !message.outgoing;
        let messages: Vec<Message> = messages.iter().filter(goes).copied().collect();
        // SAFETY: by the caller.
        unsafe { self.0.exchange(lane, queue, &messages) }
    }

    unsafe fn native(
        &self,
        lane: Lane,
        queue: &mut EmulatedQueue,
        call: &Call,
        send: *const u8,
        recv: *mut u8,
    ) -> Result<()> {
        // SAFETY: by the caller.
        unsafe { self.0.native(lane, queue, call, send, recv) }
    }

    fn check(&self) -> Result<()> {
        self.0.check()
    }

    fn abort(&self) {
        Wire::<EmulatedQueue>::abort(&self.0);
    }

    fn split(&self, host: Option<&Communicator>, color: Option<u32>) -> Result<Option<Self>> {
        Ok(Wire::<EmulatedQueue>::split(&self.0, host, color)?.map(|wire| Cut(wire, self.1)))
    }
}

#[test]
fn a_wire_of_another_group_is_refused() {
    let Some(emulator) = emulator() else { return };
    let host = Communicator::threads(2).remove(0);
    let queue = SharedQueue::new(emulator.late_queue(0));
    for (size, rank) in [(4, 0), (2, 1)] {
        let wire = EmulatedWire::group(size).remove(rank);
        let refused =
            Wired::new(&host, queue.clone(), wire, Order::Native).err().expect("a refusal").to_string();
        let said =
            format!("a carrier for rank 0 of 2 was given the end of rank {rank} of {size} over emulated");
        assert!(refused.contains(&said), "{refused}");
    }
}

#[test]
fn what_a_queue_is_given_comes_back_and_only_its_own_memory_is_filled() {
    let Some(emulator) = emulator() else { return };
    for queue in [emulator.queue(0), emulator.late_queue(1)] {
        let mut queue = SharedQueue::new(queue);
        let mut there = Buffer::<f32>::from_memory(queue.memory(12).unwrap());
        queue.fill(&mut there, &[1.0, 2.0, 3.0]).unwrap();
        let mut back = [0.0; 3];
        queue.fetch(&there, &mut back).unwrap();
        assert_eq!(back, [1.0, 2.0, 3.0]);
        let panics = |body: &mut dyn FnMut()| catch_unwind(AssertUnwindSafe(body)).is_err();
        assert!(panics(&mut || queue.fill(&mut Buffer::<f32>::zeroed(3), &back).unwrap()));
        assert!(panics(&mut || queue.fill(&mut there, &[0.0; 4]).unwrap()));
        assert!(panics(&mut || queue.fetch(&there, &mut [0.0; 4]).unwrap()));
        assert!(panics(&mut || queue.fetch(&Buffer::<f32>::zeroed(3), &mut [0.0; 3]).unwrap()));
    }
}

#[test]
fn what_products_are_lent_is_on_their_device() {
    let Some(emulator) = emulator() else { return };
    let mut queue = emulator.queue(0);
    let own = queue.memory(PRODUCT_WORKSPACE).expect("memory");
    queue.lend(own);
    let lends = AssertUnwindSafe(|| queue.lend(Memory::host(PRODUCT_WORKSPACE)));
    assert!(catch_unwind(lends).is_err(), "memory of the host");
}

#[test]
fn devices_that_do_not_reach_each_other_are_told_at_the_start() {
    let Some(emulator) = emulator() else { return };
    let options = Options { deadline: DEADLINE, ..standard() };
    let ranks = Communicator::threads_with(2, options).expect("ranks");
    let met = &Barrier::new(2);
    std::thread::scope(|scope| {
        for (rank, (host, wire)) in ranks.into_iter().zip(EmulatedWire::group(2)).enumerate() {
            scope.spawn(move || {
                let queue = SharedQueue::new(emulator.late_queue(rank as u64));
                let wire = Cut(wire, rank);
                met.wait();
                let wired = Wired::with_scratch(&host, queue, wire, Order::Canonical, 0);
                if rank == 0 {
                    let said = wired.err().expect("nothing comes").to_string();
                    assert!(said.contains(&format!("is not done after {DEADLINE:?}")), "{said}");
                } else {
                    // Everything has come to this one, which is busy with something else then.
                    let heard = || {
                        (0..2000).find_map(|_| {
                            std::thread::sleep(Duration::from_millis(5));
                            host.progress().err()
                        })
                    };
                    let said = wired.err().or_else(heard).expect("rank 0 gives up").to_string();
                    assert!(said.contains("rank 0"), "{said}");
                }
            });
        }
    });
}

#[test]
fn a_rank_that_fails_after_it_has_left_a_wire_is_heard() {
    let Some(emulator) = emulator() else { return };
    let options = Options { deadline: Duration::from_secs(60), ..standard() };
    let ranks = Communicator::threads_with(2, options).expect("ranks");
    std::thread::scope(|scope| {
        for (host, wire) in ranks.into_iter().zip(EmulatedWire::group(2)) {
            scope.spawn(move || {
                let queue = SharedQueue::new(emulator.late_queue(host.rank() as u64));
                let wired = Wired::with_scratch(&host, queue.clone(), wire, Order::Canonical, 0);
                let comm = host.clone().with_carrier(Arc::new(wired.expect("a carrier")));
                comm.barrier().expect("all come");
                if comm.rank() == 1 {
                    drop(comm);
                    return host.abort("the disk is full");
                }
                let buffer = comm.alloc::<f32>(8).expect("memory");
                let started = comm.start_reduce_scatter_in_place(buffer, ReduceOp::Sum);
                let waited = started.and_then(|started| started.wait());
                let _ = queue.clone().synchronize();
                let said = waited.err().or(comm.progress().err()).expect("a failure").to_string();
                assert!(said.contains("the disk is full"), "{said}");
            });
        }
    });
}
