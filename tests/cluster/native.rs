//! `--algo native`: MPI's own collectives in the same table.

use crate::{CARAVAN, Mpirun, bench};
use harness::OPERATIONS;

/// The program built against some MPI, and its launcher; nothing in a build without.
fn launcher() -> Option<Mpirun> {
    Mpirun::built_in().filter(|mpirun| harness::installed(mpirun.program()))
}

#[test]
fn every_operation_is_exact_in_every_form() {
    exact(|operation| if operation == "broadcast" { &["", "-z 3"] } else { &[""] });
}

#[test]
fn every_operation_is_exact_when_its_calls_are_started() {
    exact(|operation| match operation {
        "broadcast" => &[],
        _ => &["--calls started", "--calls started -m 3"],
    });
}

/// Operations have no wrong element in these forms.
fn exact(forms: fn(&str) -> &'static [&'static str]) {
    let Some(mpirun) = launcher() else { return };
    let bench = bench();
    // MPI has no collective like the last one.
    for operation in OPERATIONS.into_iter().filter(|&operation| operation != "send_recv") {
        for form in forms(operation) {
            let line = format!(
                "{CARAVAN} bench {operation} -b 1K -e 256K -f 16 -n 3 -w 1 -r all --transport mpi --algo native \
                 --json r.json {form}"
            );
            let outcome = bench.outcome(&mut mpirun.run(&bench, &[(3, &line)]));
            let outcome = outcome.success();
            assert!(outcome.stdout.contains("# Out of bounds values : 0 OK"), "{}", outcome.stdout);
            let json = bench.json("r.json");
            let library = json["transport_library"].as_str().unwrap();
            assert!(["Open MPI ", "MPICH "].iter().any(|l| library.starts_with(l)), "{library}");
            let rows = json["results"].as_array().unwrap();
            assert!(!rows.is_empty() && rows.len().is_multiple_of(3), "{} rows", rows.len());
            for row in rows {
                assert_eq!(row["in_place"]["algorithm"], "native");
                assert_eq!(
                    (&row["in_place"]["nwrong"], &row["out_of_place"]["nwrong"]),
                    (&0.into(), &0.into())
                );
            }
        }
    }
    let line = format!("{CARAVAN} bench barrier -n 20 --transport mpi --algo native");
    bench.outcome(&mut mpirun.run(&bench, &[(3, &line)])).success();
    bench.nothing_left();
}

/// Our own schedules with more ranks than most machines of tests have processors: they end, with every element right.
#[test]
fn four_ranks_finish_every_operation_over_mpi() {
    let Some(mpirun) = launcher() else { return };
    let bench = bench();
    for operation in OPERATIONS.into_iter().chain(["barrier"]) {
        let sizes = if operation == "barrier" { "" } else { "-b 1K -e 1M -f 32" };
        let line = format!("{CARAVAN} bench {operation} {sizes} -n 5 -w 1 --transport mpi");
        let table = bench.outcome(&mut mpirun.run(&bench, &[(4, &line)])).success().stdout;
        assert!(table.contains("# Out of bounds values : 0 OK"), "{table}");
    }
    bench.nothing_left();
}

#[test]
fn types_that_mpi_reduces_are_exact() {
    let Some(mpirun) = launcher() else { return };
    let bench = bench();
    for dtype in ["float", "int8", "uint32", "int64"] {
        for op in ["sum", "prod", "min", "max"] {
            let line = format!(
                "{CARAVAN} bench all_reduce -d {dtype} -o {op} -b 3K -e 3K -n 1 -w 1 --transport mpi --algo native"
            );
            let outcome = bench.outcome(&mut mpirun.run(&bench, &[(2, &line)]));
            // What a library gets wrong is refused instead.
            let signed_only = mpirun == Mpirun::Mpich && outcome.code != Some(0);
            if signed_only && dtype == "uint32" && ["min", "max"].contains(&op) {
                assert!(outcome.stderr.contains("compares u32 as if it were signed"), "{}", outcome.stderr);
                assert!(!outcome.stdout.contains("FAILED"), "{}", outcome.stdout);
            } else {
                outcome.success();
            }
        }
    }
}

/// Not by a rank that waits for the others in a call that only `native` makes.
#[test]
fn one_rank_with_native_is_named_at_once() {
    let Some(mpirun) = launcher() else { return };
    let bench = bench();
    let line = format!("{CARAVAN} bench all_reduce -b 1K -e 1K -n 1 --transport mpi --call-timeout 30");
    let parts = [(1, line.as_str()), (1, &format!("{line} --algo native"))];
    let since = std::time::Instant::now();
    let outcome = bench.outcome(&mut mpirun.run(&bench, &parts));
    assert!(outcome.code.is_some_and(|code| code != 0), "{outcome:?}");
    let said = "different arguments: rank 1 with '--algo native', rank 0 with nothing";
    assert!(outcome.stderr.contains(said), "{}", outcome.stderr);
    assert!(since.elapsed().as_secs() < 20, "{:?}", since.elapsed());
    bench.nothing_left();
}

#[test]
fn what_mpi_cannot_do_is_refused_by_name() {
    let Some(mpirun) = launcher() else { return };
    let bench = bench();
    for (flags, words) in [
        ("all_reduce -d bfloat16", &["bf16", "MPI", "-d", "--algo auto"][..]),
        ("all_reduce -o avg", &["average", "-o", "--algo auto"]),
        ("reduce -d half -o all", &["f16", "MPI"]),
        ("send_recv", &["send_recv", "--algo auto"]),
        ("broadcast -m 2", &["broadcast", "blocking", "-m"]),
    ] {
        let line = format!("{CARAVAN} bench {flags} -b 1K -e 1K --transport mpi --algo native");
        let outcome = bench.outcome(&mut mpirun.run(&bench, &[(2, &line)]));
        assert!(outcome.code.is_some_and(|c| c != 0), "{outcome:?}");
        assert!(!outcome.stdout.contains("# Collective test"), "before the table: {}", outcome.stdout);
        for word in words {
            assert!(outcome.stderr.contains(word), "'{word}' is not in: {}", outcome.stderr);
        }
        bench.nothing_left();
    }
}

/// Not after minutes of rows that are then written nowhere.
#[test]
fn more_elements_than_mpi_counts_are_refused_before_the_first_row() {
    let Some(mpirun) = launcher() else { return };
    let bench = bench();
    let line = format!(
        "{CARAVAN} bench broadcast -d int8 -b 525K -e 2100M -f 4096 -n 1 -w 0 -c 0 --transport mpi --algo native"
    );
    let outcome = bench.outcome(&mut mpirun.run(&bench, &[(1, &line)]));
    assert_eq!(outcome.code, Some(2), "{outcome:?}");
    assert!(!outcome.stdout.contains("# Collective test"), "before the table: {}", outcome.stdout);
    for words in ["elements; MPI's own collectives take up to 2147483647", "-e", "--algo auto"] {
        assert!(outcome.stderr.contains(words), "'{words}' is not in: {}", outcome.stderr);
    }
    bench.nothing_left();
}

#[test]
fn all_types_and_reductions_leave_out_what_mpi_lacks() {
    let Some(mpirun) = launcher() else { return };
    let bench = bench();
    let line = format!(
        "{CARAVAN} bench reduce_scatter -d all -o all -b 3K -e 3K -n 1 -w 1 --transport mpi --algo native --json r.json"
    );
    let table = bench.outcome(&mut mpirun.run(&bench, &[(3, &line)])).success().stdout;
    assert!(table.contains("# skipped bfloat16 sum: MPI has no bf16"), "{table}");
    assert!(table.contains("# skipped float avg: MPI has no average"), "{table}");
    assert!(table.contains("# Out of bounds values : 0 OK"), "{table}");
    let json = bench.json("r.json");
    let (rows, skipped) = (&json["results"], &json["config"]["skipped"]);
    assert_eq!(rows.as_array().unwrap().len() + skipped.as_array().unwrap().len(), 10 * 5, "{json}");
    bench.nothing_left();
}
