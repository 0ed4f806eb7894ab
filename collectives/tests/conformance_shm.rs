//! The suite that every transport passes, here over shared memory, where each rank is a process.

mod shm_ranks;

use collectives::conformance::{Case, cases, standard, windowed};
use collectives::{Communicator, Options, Progress};
use shm_ranks::{PATIENCE, connect, run};
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
    suite("one_rank", 1, |_| true, Progress::Inline);
}

#[test]
fn two_ranks() {
    suite("two_ranks", 2, |_| true, Progress::Inline);
}

#[test]
fn three_ranks() {
    suite("three_ranks", 3, |_| true, Progress::Inline);
}

#[test]
fn four_ranks() {
    suite("four_ranks", 4, |_| true, Progress::Inline);
}

#[test]
fn five_ranks() {
    suite("five_ranks", 5, |_| true, Progress::Inline);
}

#[test]
fn default_windows() {
    run("default_windows", &[3], |transport| {
        (windowed().run)(Communicator::new(transport, standard()).expect("a communicator"));
    });
}

#[test]
fn with_progress_threads() {
    let chosen = |case: &Case| !["reduce", "all_reduce", "reduce_scatter"].contains(&case.name);
    suite("with_progress_threads", 2, chosen, Progress::Thread { cpu: None });
}

#[test]
fn failures() {
    shm_ranks::failures("failures", &[2, 3], connect);
}
