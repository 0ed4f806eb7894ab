//! Collectives on memory of a device, emulated on the processor: whatever its queues have not ordered happens in several
//! orders, none before somebody waits for it.

use collectives::conformance::{device, standard};
use collectives::device::SharedQueue;
use collectives::device::emulation::{EmulatedQueue, Emulator};
use collectives::{Alone, Communicator, Options, Progress, Staged};
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// Says why tests are skipped, and adds it to the list that `tests/run` prints at the end.
fn skip(reason: &str) {
    eprintln!("skipped: {reason}");
    if let Some(list) = std::env::var_os("CARAVAN_SKIPS") {
        let file = std::fs::OpenOptions::new().append(true).create(true).open(list);
        file.and_then(|mut file| writeln!(file, "{reason}")).expect("the list of skips");
    }
}

fn emulator() -> Option<&'static Emulator> {
    static EMULATOR: OnceLock<Option<Emulator>> = OnceLock::new();
    let build = || {
        let emulator = Emulator::build(&[], Path::new(env!("CARGO_TARGET_TMPDIR"))).expect("builds");
        if emulator.is_none() {
            skip("collectives of an emulated device: no C++ compiler ($CXX, c++, g++ or clang++)");
        }
        emulator
    };
    EMULATOR.get_or_init(build).as_ref()
}

fn staged(n: usize, options: Options, queue: impl Fn(usize) -> EmulatedQueue + Sync) {
    let ranks = Communicator::threads_with(n, options).expect("ranks");
    std::thread::scope(|scope| {
        for comm in ranks {
            let queue = &queue;
            scope.spawn(move || {
                let queue = SharedQueue::new(queue(comm.rank()));
                let carrier = Staged::new(&comm, queue.clone()).expect("a carrier");
                device(&comm.with_carrier(Arc::new(carrier)), &queue);
            });
        }
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
    let ranks = Communicator::threads(2);
    std::thread::scope(|scope| {
        for comm in ranks {
            scope.spawn(move || {
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
    });
}
