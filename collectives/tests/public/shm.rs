//! The suite that every transport passes, here over shared memory, where each rank is a process.

use crate::ranks::{self, PATIENCE, connect, run, this_test};
use collectives::{Communicator, Options, Progress};
use conformance::{Case, cases, standard, windowed};
use std::time::Instant;

/// Runs every case that leaves its processes alive, each in a group of its own.
fn suite(test: &str, n: usize, chosen: fn(&Case) -> bool, progress: Progress) {
    run(test, &[n], |mut transport| {
        let (rank, all) = (transport.rank(), (0..n).collect::<Vec<usize>>());
        for (i, case) in cases().iter().filter(|c| !c.fails && chosen(c)).enumerate() {
            let start = Instant::now();
            let group = transport.subgroup(&all, 1_000_000 + i as u64, PATIENCE).expect("a group");
            let options = Options { progress, ..(case.options)() };
            (case.run)(Communicator::new(group, options).expect("a communicator"));
            if rank == 0 {
                eprintln!("{n} ranks, {}: {:.2?}", case.name, start.elapsed());
            }
        }
    });
}

#[test]
fn one_rank() {
    suite(this_test!(), 1, |_| true, Progress::Inline);
}

#[test]
fn two_ranks() {
    suite(this_test!(), 2, |_| true, Progress::Inline);
}

#[test]
fn three_ranks() {
    suite(this_test!(), 3, |_| true, Progress::Inline);
}

#[test]
fn four_ranks() {
    suite(this_test!(), 4, |_| true, Progress::Inline);
}

#[test]
fn five_ranks() {
    suite(this_test!(), 5, |_| true, Progress::Inline);
}

#[test]
fn default_windows() {
    run(this_test!(), &[3], |transport| {
        (windowed().run)(Communicator::new(transport, standard()).expect("a communicator"));
    });
}

#[test]
fn with_progress_threads() {
    let chosen = |case: &Case| !["reduce", "all_reduce", "reduce_scatter"].contains(&case.name);
    suite(this_test!(), 2, chosen, Progress::Thread { cpu: None });
}

#[test]
fn failures() {
    ranks::failures(this_test!(), &[2, 3], connect);
}
