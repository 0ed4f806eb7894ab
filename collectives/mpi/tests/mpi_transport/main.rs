//! The MPI transport under the mpirun of the library that this is built against. The ranks are this test program
//! again, as `rank_process`. Needs the feature `mpi`; both libraries are tested by building twice, as `tests/run` does:
//! `MPICC=mpicc.openmpi cargo test -p caravan-mpi --features mpi --test mpi_transport`, and the same with
//! `mpicc.mpich`, each with a target folder of its own.
#![cfg(feature = "mpi")]

mod launch;
mod leaving;
mod native;
mod rank;
mod strict;
mod worlds;

use collectives_mpi::{Family, family, library};
use conformance::{cases, p2p};
use harness::Counting;
use launch::{CASE, passes, passes_in, passes_over_ucx, run, run_over_ulfm, run_unseen, text};
use rank::NODES;
use std::time::{Duration, Instant};

#[global_allocator]
static COUNTING: Counting = Counting;

/// One rank of the case that the environment names; nothing when this is run as an ordinary test.
#[test]
fn rank_process() {
    if let Ok(case) = std::env::var(CASE) {
        rank::plays(&case);
    }
}

#[test]
fn messages_of_every_size_and_order() {
    for ranks in [1, 2, 4] {
        passes("suite", ranks);
    }
}

#[test]
fn other_threads_are_refused() {
    for ranks in [2, 3] {
        let Some(output) = run("one_thread", ranks) else { return };
        let all = text(&output);
        assert_eq!(all.matches("rank done").count(), ranks, "{all}");
    }
}

#[test]
fn a_message_that_another_thread_awaits_ends_all_use_of_mpi_and_its_memory_is_not_written_to() {
    for case in ["sent_too_late", "awaited_elsewhere"] {
        let Some(output) = run(case, 2) else { return };
        let all = text(&output);
        assert_eq!(all.matches("rank done").count(), 2, "{case}: {all}");
    }
}

#[test]
fn ranks_that_have_left_do_not_wait_for_one_that_failed() {
    for case in ["stays_away", "stays_away_from_a_message"] {
        let Some(output) = run(case, 3) else { return };
        let all = text(&output);
        assert!(!output.status.success() && all.matches("got out").count() == 2, "{case}: {all}");
    }
}

#[test]
fn a_rank_that_leaves_says_who_does_not_take_its_message() {
    let Some(output) = run("leaves a message late", 2) else { return };
    let all = text(&output);
    // Hydra has been seen to end with 0 of itself.
    let said = "to leave a group with a message under way on rank 0: no answer from rank 1 within 1s";
    assert!(all.contains(said), "{all}");
}

#[test]
fn other_lengths_are_errors() {
    passes("wrong_lengths", 2);
}

/// Between processes and to a process itself.
#[test]
fn other_lengths_are_errors_also_where_a_user_lets_open_mpi_send_less_at_once() {
    const LESS: [&str; 3] =
        ["env", "OMPI_MCA_btl_vader_eager_limit=1024", "OMPI_MCA_btl_self_eager_limit=512"];
    if family() == Family::OpenMpi {
        for case in ["wrong_lengths", "suite"] {
            passes_in(&LESS, case, 2);
        }
    }
}

#[test]
fn a_group_that_a_rank_does_not_come_to_is_an_error() {
    passes("half_a_group", 2);
}

#[test]
fn a_rank_that_has_come_down_is_named_though_it_lives_on() {
    let Some(output) = run("outlived_panic", 2) else { return };
    let all = text(&output);
    assert_eq!(all.matches("rank done").count(), 2, "{all}");
}

#[test]
fn conformance_suite() {
    for ranks in 1..=5 {
        passes("conformance", ranks);
    }
}

#[test]
fn conformance_suite_with_progress_threads() {
    for ranks in [2, 3] {
        passes("threads", ranks);
    }
}

#[test]
fn conformance_suite_in_default_windows() {
    passes("windowed", 3);
}

#[test]
fn conformance_suite_with_shared_memory_inside_nodes() {
    // Nodes of two ranks and of one.
    passes("nodes", 3);
    passes("nodes in turn", 4);
}

/// Every case in which something goes wrong, two at a time: their ranks wait for deadlines more than they compute.
fn goes_wrong(over: &str, ranks: usize) {
    let cases = cases();
    let next = std::sync::Mutex::new(cases.iter().filter(|c| c.fails));
    let take = || next.lock().unwrap().next();
    // One job each: neither library can take back a large message that nobody will receive.
    let jobs = || {
        while let Some(case) = take() {
            // The launcher may kill ranks that end a moment after the first, but not before all are done.
            let name = format!("{over}{}", case.name);
            let Some(output) = run(&name, ranks) else { return };
            let all = text(&output);
            assert_eq!(all.matches("rank done").count(), ranks, "{name} with {ranks} ranks:\n{all}");
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(jobs);
        }
    });
}

#[test]
fn conformance_suite_where_something_goes_wrong_between_two() {
    goes_wrong("", 2);
}

#[test]
fn conformance_suite_where_something_goes_wrong_among_three() {
    goes_wrong("", 3);
}

#[test]
fn conformance_suite_where_something_goes_wrong_between_nodes() {
    goes_wrong(NODES, 3);
}

#[test]
fn calls_further_ahead_than_tags_reach_wait() {
    for ranks in [2, 3] {
        passes("far_ahead", ranks);
    }
}

#[test]
fn large_messages_pass_each_other_also_where_the_library_sends_them_over_ucx() {
    for ranks in [2, 3, 4] {
        passes("in_rounds", ranks);
        passes_over_ucx("in_rounds", ranks);
    }
    passes_over_ucx("conformance", 3);
}

#[test]
fn native_collectives() {
    for ranks in [1, 3] {
        passes("native", ranks);
    }
}

#[test]
fn scratch_is_as_planned() {
    for ranks in [2, 3] {
        passes("planned", ranks);
    }
}

#[test]
fn mpi_starts_once() {
    passes("second_start", 2);
}

#[test]
fn who_leaves_a_world_is_still_in_others() {
    for case in ["worlds_at_once", "worlds_in_turn"] {
        passes(case, 2);
    }
}

#[test]
fn a_world_without_deadline_ends_in_order() {
    passes("without_deadline", 2);
}

#[test]
fn a_group_too_many_is_refused_with_what_helps() {
    passes("too_many_groups", 2);
}

#[test]
fn long_blobs_pass_each_other() {
    passes("exchanges", 2);
}

#[test]
fn mpi_does_not_complain_of_what_nobody_has_received() {
    let Some(output) = run("left_before_it_comes", 2) else { return };
    let all = text(&output);
    assert!(output.status.success() && all.matches("rank done").count() == 2, "{all}");
    // UCX below MPICH.
    assert!(!all.contains("not matched"), "{all}");
}

#[test]
fn tags_of_users() {
    passes("users_tags", 2);
}

#[test]
fn mpi_explains_itself_in_its_own_words() {
    passes("own_words", 2);
}

#[test]
fn leaving_early_loses_nothing() {
    passes("early_leaver", 3);
}

#[test]
fn who_leaves_does_not_wait_until_busy_peers_have_heard_of_it() {
    passes("busy_peers", 3);
}

#[test]
fn words_for_groups_that_are_gone_are_not_kept() {
    passes("groups_in_turn", 3);
}

#[test]
fn a_killed_rank_ends_the_job() {
    let Some(output) = run("killed", 3) else { return };
    let all = text(&output);
    // In each launcher's own words.
    let ended = ["Aborted", "BAD TERMINATION"].iter().any(|words| all.contains(words));
    assert!(!output.status.success() && ended, "{all}");
}

#[test]
fn a_rank_that_mpi_itself_finds_to_have_ended_is_named() {
    for case in ["found by MPI", "found by MPI at its end"] {
        let Some(output) = run_over_ulfm(case, 3) else { return };
        let all = text(&output);
        assert!(!output.status.success() && !all.contains("got out"), "{case}: {all}");
        assert!(all.contains("rank 2 ended without leaving the group, as MPI has found"), "{case}: {all}");
    }
}

#[test]
fn a_rank_that_is_killed_while_others_are_inside_mpi_is_named_by_them() {
    for how in ["inside MPI", "inside MPI, started", "inside MPI at its end"] {
        let since = Instant::now();
        let Some(output) = run_unseen(how, 5) else { return };
        let all = text(&output);
        assert!(!output.status.success() && !all.contains("got out"), "{how}: {all}");
        let (says, right) =
            (all.matches("ended (process").count(), all.matches("rank 4 ended (process").count());
        // One that gets no processor for half a second may see another end as well.
        assert!(says == 4 && right >= 3, "{how}: {all}");
        assert!(since.elapsed() < Duration::from_secs(20), "{how}: {:?}", since.elapsed());
    }
}

#[test]
fn a_rank_that_does_not_come_ends_collectives_of_mpi_by_the_deadline() {
    for how in ["inside MPI, late", "inside MPI, started, late"] {
        let Some(output) = run(how, 3) else { return };
        let all = text(&output);
        assert!(!output.status.success() && !all.contains("got out"), "{how}: {all}");
        assert!(all.contains("it did not return within 1s") && all.contains(&library()), "{how}: {all}");
    }
}

#[test]
fn a_panicking_rank_ends_the_job_with_its_message() {
    let Some(output) = run("panics", 3) else { return };
    let all = text(&output);
    assert!(!output.status.success() && all.contains("something impossible"), "{all}");
}

#[test]
fn a_panic_that_its_rank_does_not_see_ends_the_job_with_its_message() {
    let since = Instant::now();
    let Some(output) = run("panics elsewhere", 3) else { return };
    let all = text(&output);
    assert!(!output.status.success() && all.contains("something impossible"), "{all}");
    // All ranks would else wait for this long.
    assert!(since.elapsed() < p2p::PATIENCE / 2, "{:?}", since.elapsed());
}

#[test]
fn a_failing_rank_ends_the_job_with_its_reason() {
    let Some(output) = run("fails", 3) else { return };
    let all = text(&output);
    // The launcher ends all ranks as soon as one has ended, which may be any of them; each would say why.
    assert!(!output.status.success() && all.contains("No space left on device"), "{all}");
    for line in all.lines().filter(|l| l.contains("error: rank 1 gave up")) {
        assert!(line.contains("No space left"), "{line}");
    }
}
