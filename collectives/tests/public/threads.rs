//! The suite that every transport passes, here over threads.

use collectives::schedule::{Algorithm, Call, Kind, Rule, Sizes, Why};
use collectives::{Communicator, DType, Options, Progress};
use conformance::{Case, cases, each, windowed};
use std::sync::Barrier;
use std::time::Instant;

fn run(case: &Case, n: usize, options: Options) {
    let ranks = Communicator::threads_with(n, options).expect("ranks");
    // Who comes late is not to be missed after the case's own deadline.
    let met = &Barrier::new(n);
    std::thread::scope(|scope| {
        for comm in ranks {
            let name = format!("{} on rank {} of {n}", case.name, comm.rank());
            let run = case.run;
            let part = move || {
                met.wait();
                run(comm);
            };
            std::thread::Builder::new().name(name).spawn_scoped(scope, part).expect("a thread");
        }
    });
}

fn suite(n: usize) {
    each(cases().iter().filter(|c| !c.fails || n > 1), |case| {
        let start = Instant::now();
        run(case, n, (case.options)());
        println!("{} ranks, {}: {:.2?}", n, case.name, start.elapsed());
    });
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

#[test]
fn default_windows() {
    let case = windowed();
    for n in [2, 3] {
        run(&case, n, (case.options)());
    }
}

/// Some of it again with a progress thread per rank: the same results.
#[test]
fn with_progress_threads() {
    let all = cases();
    let chosen = |c: &&Case| c.fails || c.name.contains("flight") || c.name.contains("large");
    for n in [2, 3] {
        each(all.iter().filter(chosen), |case| {
            run(case, n, Options { progress: Progress::Thread { cpu: None }, ..(case.options)() });
        });
        for case in all.iter().filter(|c| ["dropped calls", "messages", "split"].contains(&c.name)) {
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
                let first = comm.barrier();
                assert!(comm.rank() != 1, "on purpose");
                // The others may hear of it before they have left the first one.
                first.and_then(|()| comm.barrier()).expect_err("rank 1 is gone").to_string()
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

/// While one thread of a rank waits for an answer, another one sends the question.
#[test]
fn a_thread_that_waits_leaves_the_engine_to_others() {
    const ROUNDS: u32 = 5;
    let ranks = Communicator::threads(2);
    std::thread::scope(|scope| {
        for comm in &ranks {
            let (peer, rank) = (1 - comm.rank(), comm.rank());
            scope.spawn(move || {
                let mut word = [0u32];
                for round in 0..ROUNDS {
                    comm.recv(&mut word[..], peer, 1 - rank as u32).expect("a word");
                    assert_eq!(word[0], round);
                    if rank == 1 {
                        comm.send(&word[..], peer, 1).expect("an answer");
                    }
                }
            });
        }
        scope.spawn(|| {
            for round in 0..ROUNDS {
                // Long enough for the other thread to sleep in its wait.
                std::thread::sleep(std::time::Duration::from_millis(8));
                ranks[0].send(&[round][..], 1, 0).expect("a question");
            }
        });
    });
}

#[test]
fn what_was_measured_stays_with_as_many_ranks() {
    let alone = Algorithm::PairwiseReduceScatterAllGather;
    let mut options = Options::default();
    options.tuning.measured[Kind::AllReduce as usize] = Some(Rule::new(alone, usize::MAX, alone));
    Communicator::on_threads(4, options, |comm| {
        let call = Call::new(Kind::AllReduce, DType::F32, 4);
        let why = |comm: &Communicator| comm.choice(&call).expect("a call").why;
        let part = |color| comm.split(Some(color), 0).expect("a group").expect("this rank is in it");
        assert_eq!(why(&comm), Why::Measured(Sizes::ALL));
        assert_eq!(why(&part(0)), Why::Measured(Sizes::ALL));
        assert!(matches!(why(&part(comm.rank() as u32 / 2)), Why::Latency(_)));
    });
}
