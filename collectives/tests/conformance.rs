//! The suite that every transport passes, here over threads.

use collectives::conformance::{Case, cases};
use collectives::{Communicator, Options, Progress};
use std::time::Instant;

fn run(case: &Case, n: usize, options: Options) {
    let ranks = Communicator::threads_with(n, options).expect("ranks");
    std::thread::scope(|scope| {
        for comm in ranks {
            let name = format!("{} on rank {} of {n}", case.name, comm.rank());
            let run = case.run;
            std::thread::Builder::new().name(name).spawn_scoped(scope, move || run(comm)).expect("a thread");
        }
    });
}

fn suite(n: usize) {
    for case in cases() {
        if case.fails && n == 1 {
            continue;
        }
        let start = Instant::now();
        run(&case, n, (case.options)());
        println!("{} ranks, {}: {:.2?}", n, case.name, start.elapsed());
    }
}

#[test]
fn one_rank() {
    suite(1);
}

#[test]
fn two_ranks() {
    suite(2);
}

#[test]
fn three_ranks() {
    suite(3);
}

#[test]
fn four_ranks() {
    suite(4);
}

#[test]
fn five_ranks() {
    suite(5);
}

/// Some of it again with a progress thread per rank: the same results.
#[test]
fn with_progress_threads() {
    for n in [2, 3] {
        for case in
            cases().iter().filter(|c| c.fails || c.name.contains("flight") || c.name.contains("large"))
        {
            run(case, n, Options { progress: Progress::Thread { cpu: None }, ..(case.options)() });
        }
        for case in cases().iter().filter(|c| ["dropped calls", "messages", "split"].contains(&c.name)) {
            run(case, n, Options { progress: Progress::Thread { cpu: Some(0) }, ..(case.options)() });
        }
    }
}

#[test]
fn a_processor_that_does_not_exist_is_an_error() {
    let options = Options { progress: Progress::Thread { cpu: Some(100_000) }, ..Options::default() };
    let error = Communicator::threads_with(1, options).expect_err("no such processor").to_string();
    assert!(error.contains("100000"), "{error}");
}

/// A panic on one rank ends the others with its name.
#[test]
fn a_panicking_rank_is_named() {
    let ranks = Communicator::threads(3);
    let handles: Vec<_> = ranks
        .into_iter()
        .map(|comm| {
            std::thread::spawn(move || {
                comm.barrier().expect("works");
                assert!(comm.rank() != 1, "on purpose");
                comm.barrier().expect_err("rank 1 is gone").to_string()
            })
        })
        .collect();
    for (rank, handle) in handles.into_iter().enumerate() {
        match handle.join() {
            Ok(text) => assert!(text.contains("rank 1 panicked"), "{text}"),
            Err(_) => assert_eq!(rank, 1),
        }
    }
}
