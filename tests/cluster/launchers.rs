//! mpirun of Open MPI and of MPICH on this host: the same bits as own ranks, and every way to end early.

use crate::{CARAVAN, Mpirun, PROMISED, TRAIN, bench, same, traced};
use harness::{Bench, ENDLESS, Outcome, Waited, is_root, signal, skip};
use rustix::process::Signal;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

#[test]
fn every_launcher_and_transport_gives_the_same_bits() {
    let bench = bench();
    bench.text("text.txt", 6000);
    bench.run(&traced("own", "--ranks 4 --transport shm")).success();
    if Mpirun::built_in().is_none() && crate::bench().offers("ucx") {
        bench.run(&traced("own-ucx", "--ranks 4 --transport ucx")).success();
        same(&bench, "own", "own-ucx");
    }
    for mpirun in Mpirun::tried() {
        for transport in Mpirun::transports().into_iter().chain(["auto"]) {
            let name = format!("{}-{transport}", mpirun.program());
            let args = traced(&name, &format!("--transport {transport}"));
            let run = mpirun.run(&bench, &[(4, &format!("{CARAVAN} {args}"))]).spawn().unwrap();
            bench.finish(run).success();
            same(&bench, "own", &name);
        }
    }
    bench.nothing_left();
}

#[test]
fn every_stage_over_mpi_gives_the_same_bits() {
    let Some(mpirun) = Mpirun::built_in().filter(|m| harness::installed(m.program())) else { return };
    let bench = bench();
    bench.text("text.txt", 6000);
    for (ranks, variants) in [
        (1, &["--stage 3"][..]),
        (2, &["--stage 0", "--stage 2", "--stage 3 --bucket-size 4K"]),
        (3, &["--stage 1 --bucket-size 4K", "--stage 3 --prefetch off --bucket-size 20K"]),
        (4, &["--stage 0 --bucket-size 20K", "--stage 1", "--stage 2"]),
    ] {
        let own = format!("own-{ranks}");
        bench.run(&traced(&own, &format!("--ranks {ranks} --transport threads --stage 0"))).success();
        for (i, flags) in variants.iter().enumerate() {
            let name = format!("mpi-{ranks}-{i}");
            let line = format!("{CARAVAN} {}", traced(&name, &format!("--transport mpi {flags}")));
            bench.outcome(&mut mpirun.run(&bench, &[(ranks, &line)])).success();
            same(&bench, &own, &name);
        }
    }
    bench.nothing_left();
}

/// Ranks with a GPU each, which the program emulates: the host carries what they exchange, by calls of other threads than the
/// one that trains.
#[test]
fn devices_under_every_launcher_give_the_same_bits() {
    if harness::cxx("ranks on emulated GPUs under mpirun").is_none() {
        return;
    }
    let bench = bench();
    // What is held out of it is evaluated, and emulating takes its time.
    bench.text("text.txt", 1500);
    let run = |mut command: Command| {
        command.env("CARAVAN_EMULATED_DEVICE", "2,256M").env("CARAVAN_CACHE", env!("CARGO_TARGET_TMPDIR"));
        bench.outcome(&mut command).success();
    };
    let cuda = "--device cuda --stage 2 --threads 1";
    run(bench.command(&traced("own", &format!("{cuda} --ranks 2 --transport shm"))));
    for mpirun in Mpirun::tried() {
        for transport in Mpirun::transports() {
            let name = format!("{}-{transport}", mpirun.program());
            let args = traced(&name, &format!("{cuda} --transport {transport}"));
            run(mpirun.run(&bench, &[(2, &format!("{CARAVAN} {args}"))]));
            same(&bench, "own", &name);
        }
    }
    bench.nothing_left();
}

/// Shared memory inside nodes and MPI between them, on one host that is taken for two nodes of two ranks.
#[test]
fn shared_memory_inside_nodes_and_mpi_between_them() {
    let Some(mpirun) = Mpirun::built_in().filter(|m| harness::installed(m.program())) else { return };
    let bench = bench();
    bench.text("text.txt", 6000);
    bench.run(&traced("own", "--ranks 4")).success();
    let nodes = "--transport shm+mpi --ranks-per-node 2";
    let line = format!("{CARAVAN} {}", traced("nodes", nodes));
    bench.outcome(&mut mpirun.run(&bench, &[(4, &line)])).success();
    same(&bench, "own", "nodes");
    for operation in ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"] {
        let line = format!("{CARAVAN} bench {operation} -b 1K -e 1M -f 32 -n 3 -w 1 {nodes}");
        let table = bench.outcome(&mut mpirun.run(&bench, &[(4, &line)])).success().stdout;
        assert!(table.contains("# Out of bounds values : 0 OK"), "{table}");
    }
    bench.nothing_left();
}

/// A link that holds MPI's messages back, between all ranks, inside nodes and between them.
#[test]
fn emulated_links_over_mpi() {
    let Some(mpirun) = Mpirun::built_in().filter(|m| harness::installed(m.program())) else { return };
    let bench = bench();
    bench.text("text.txt", 6000);
    bench.run(&traced("own", "--ranks 4")).success();
    let link = "latency=20us,bandwidth=1GB/s";
    for (name, flags, label) in [
        ("link", format!("--transport mpi --emulate-link {link}"), format!("mpi@{link}")),
        (
            "links",
            format!("--transport mpi --ranks-per-node 2 --emulate-link {link},inside-latency=1us"),
            format!("mpi/2@{link},inside-latency=1us"),
        ),
        (
            "nodes",
            format!("--transport shm+mpi --ranks-per-node 2 --emulate-link {link}"),
            format!("shm+mpi/2@{link}"),
        ),
    ] {
        let run = |args: &str| {
            let line = format!("{CARAVAN} {args} {flags}");
            bench.outcome(&mut mpirun.run(&bench, &[(4, &line)])).success()
        };
        run(&traced(name, ""));
        same(&bench, "own", name);
        for operation in
            ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send_recv"]
        {
            let table = run(&format!("bench {operation} -b 1K -e 1M -f 32 -n 3 -w 1")).stdout;
            assert!(table.contains(&format!(" transport {label} ranks 4 ")), "{table}");
            assert!(table.contains("# Out of bounds values : 0 OK"), "{table}");
        }
    }
    bench.nothing_left();
}

#[test]
fn eval_and_overlap_run_under_every_launcher() {
    let bench = bench();
    bench.text("text.txt", 6000);
    bench.run(&traced("own", "--ranks 2")).success();
    let expected = bench.run("eval --model own --data text.txt --seq 16 --json --ranks 2").success().json();
    for mpirun in Mpirun::tried() {
        for transport in Mpirun::transports() {
            let run = |args: &str| {
                let line = format!("{CARAVAN} {args} --transport {transport}");
                bench.outcome(&mut mpirun.run(&bench, &[(3, &line)])).success()
            };
            let found = run("eval --model own --data text.txt --seq 16 --json").json();
            assert_eq!(found["loss"], expected["loss"], "{} {transport}", mpirun.program());
            let shown = run("bench overlap all_reduce -b 64K -e 64K -n 5 -w 1").stdout;
            // An MPI library may say something there too.
            let is_row = |line: &&str| line.trim_start().starts_with(|c: char| c.is_ascii_digit());
            assert_eq!(shown.lines().filter(is_row).count(), 1, "{shown}");
        }
    }
}

/// What ranks say that fail together: one sentence each, of which the launcher may let only some through.
fn fails(outcome: &Outcome, words: &[&str]) {
    assert!(outcome.code.is_some_and(|c| c != 0), "{outcome:?}");
    assert!(
        !outcome.stderr.contains("panicked") && !outcome.stderr.contains("Assertion"),
        "{}",
        outcome.stderr
    );
    // Launchers pass lines on in pieces.
    for word in words {
        assert!(outcome.stderr.contains(word), "'{word}' is not in: {}", outcome.stderr);
    }
}

#[test]
fn a_failing_rank_takes_the_job_down_with_its_reason() {
    for mpirun in Mpirun::tried() {
        for transport in Mpirun::transports() {
            let bench = bench();
            bench.text("text.txt", 6000);
            let line = format!("{CARAVAN} {TRAIN} --transport {transport} --metrics /dev/full");
            let outcome = bench.outcome(&mut mpirun.run(&bench, &[(3, &line)]));
            fails(&outcome, &["rank 0 on ", ": cannot write metrics to /dev/full", "No space left"]);
            bench.nothing_left();
        }
    }
}

/// `part` with every launcher and transport, all at the same time: it mostly waits.
fn at_once(part: impl Fn(Mpirun, &str) + Sync) {
    std::thread::scope(|scope| {
        for mpirun in Mpirun::tried() {
            for transport in Mpirun::transports() {
                let part = &part;
                scope.spawn(move || part(mpirun, transport));
            }
        }
    });
}

/// A run that takes for ever, started and under way.
fn endless(bench: &Bench, mpirun: Mpirun, transport: &str) -> Child {
    bench.endless(mpirun.run(bench, &[(3, &format!("{CARAVAN} {ENDLESS} --quiet --transport {transport}"))]))
}

#[test]
fn an_interrupt_of_mpirun_leaves_nothing() {
    for mpirun in Mpirun::tried() {
        for transport in Mpirun::transports() {
            let bench = bench();
            let run = endless(&bench, mpirun, transport);
            signal(run.id(), Signal::INT);
            let outcome = bench.finish(run);
            // Hydra passes the signal on, ends, and has been seen to end with 0 of itself.
            if mpirun == Mpirun::OpenMpi {
                assert_ne!(outcome.code, Some(0), "{outcome:?}");
            }
            bench.nothing_half_written();
        }
    }
}

/// As by Ctrl-\, or where memory is short; also of ranks that a shell waits for, which outlives it.
#[test]
fn an_mpirun_that_is_killed_leaves_no_ranks() {
    if Mpirun::built_in().is_some() {
        // Ranks over MPI are ended by it, and leave segments of its own in shared memory then.
        return;
    }
    for mpirun in Mpirun::tried() {
        for (i, transport) in Mpirun::transports().into_iter().enumerate() {
            let bench = bench();
            let run = match i {
                0 => endless(&bench, mpirun, transport),
                _ => {
                    let rank =
                        format!("#!/bin/sh\n{CARAVAN} {ENDLESS} --quiet --transport {transport}\nexit $?\n");
                    let script = bench.file("rank.sh", rank);
                    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
                    bench.endless(mpirun.run(&bench, &[(3, &script.display().to_string())]))
                }
            };
            let mut waited = Waited::begin();
            signal(run.id(), Signal::KILL);
            while !bench.processes_of("caravan").is_empty() {
                let so_far = waited.so_far();
                assert!(so_far < PROMISED, "{transport} under {}: {so_far:?}", mpirun.program());
                std::thread::sleep(Duration::from_millis(5));
            }
            bench.finish(run);
        }
    }
}

/// mpirun passes this signal on to all ranks, where others make it end them.
#[test]
fn a_job_that_is_asked_to_end_keeps_its_model() {
    at_once(|mpirun, transport| {
        let bench = bench();
        let run = endless(&bench, mpirun, transport);
        signal(run.id(), Signal::USR1);
        // Hydra has been seen to end with 0 of itself.
        let said = bench.finish(run).stderr;
        let words = ["caravan: interrupted by signal 10; the weights after step ", " were saved to out"];
        assert!(words.iter().all(|word| said.contains(word)), "{said}");
        bench.run("eval --model out --data text.txt --quiet").success();
        bench.nothing_left();
    });
}

#[test]
fn a_killed_rank_takes_the_job_down() {
    for mpirun in Mpirun::tried() {
        for (i, transport) in Mpirun::transports().into_iter().enumerate() {
            for victim in if i == 0 { 0..3 } else { 1..2 } {
                let bench = bench();
                let run = endless(&bench, mpirun, transport);
                let ranks = bench.ranks_by(mpirun.rank_variable());
                assert_eq!(ranks.len(), 3);
                signal(ranks[victim].1, Signal::KILL);
                let outcome = bench.finish(run);
                assert_ne!(outcome.code, Some(0), "{outcome:?}");
                mpirun.names_the_killed(victim, &outcome.stderr);
                bench.nothing_half_written();
                let took = outcome.took;
                assert!(took < PROMISED, "{transport} under {}: {took:?}", mpirun.program());
            }
        }
    }
}

/// Hydra would wait for it.
#[test]
fn a_rank_that_hangs_is_named_and_ended() {
    at_once(|mpirun, transport| {
        let bench = bench();
        let line = format!("{CARAVAN} {ENDLESS} --quiet --transport {transport} --call-timeout 3");
        let run = bench.endless(mpirun.run(&bench, &[(2, &line)]));
        let ranks = bench.ranks_by(mpirun.rank_variable());
        signal(ranks[1].1, Signal::STOP);
        fails(&bench.finish(run), &["no answer from rank 1 within 3s"]);
        bench.nothing_left();
    });
}

#[test]
fn a_mixed_launch_names_the_difference() {
    at_once(|mpirun, transport| {
        let bench = bench();
        bench.text("text.txt", 6000);
        bench.file("other.txt", "quite another text ".repeat(400));
        let other_text = TRAIN.replace("text.txt", "other.txt");
        let train = format!("{CARAVAN} {TRAIN} --transport {transport}");
        let mixed = |one: &str, other: &str, words: &[&str]| {
            let outcome = bench.outcome(&mut mpirun.run(&bench, &[(1, one), (1, other)]));
            fails(&outcome, words);
            fails(&outcome, &["ranks were started with different arguments"]);
            bench.nothing_left();
        };
        mixed(&train, &format!("{train} --stage 2"), &["'--stage 2'", "'--stage 3'"]);
        mixed(&train, &format!("{train} --seed 2"), &["'--seed 2'", "'--seed 1337'"]);
        mixed(
            &train,
            &format!("{CARAVAN} {other_text} --transport {transport}"),
            &["'--data of 7600 tokens"],
        );
        let bench_command = format!("{CARAVAN} bench all_reduce --transport {transport}");
        mixed(&train, &bench_command, &["'command train'", "'operation all_reduce'"]);
        if transport != "shm" {
            let words = [format!("'--transport {transport}'"), "'--transport shm'".to_owned()];
            let line = format!("{CARAVAN} {TRAIN} --transport shm");
            mixed(&train, &line, &[&words[0], &words[1]]);
        }
    });
}

/// A rank whose flags make no sense never comes, and nobody waits for it.
#[test]
fn one_rank_with_nonsense_ends_the_job() {
    for mpirun in Mpirun::tried() {
        for nonsense in ["-o xor", "--speed 11"] {
            let bench = bench();
            let line = format!("{CARAVAN} bench all_reduce -b 1K -e 1K -n 1 --rendezvous-timeout 30");
            let since = Instant::now();
            let parts = [(1, line.as_str()), (1, &format!("{line} {nonsense}"))];
            let outcome = bench.outcome(&mut mpirun.run(&bench, &parts));
            fails(&outcome, &[nonsense.split(' ').next().unwrap_or_default()]);
            assert!(since.elapsed().as_secs() < 20, "{} {nonsense}: {outcome:?}", mpirun.program());
            bench.nothing_left();
        }
    }
}

#[test]
fn a_rank_that_never_arrives_is_named() {
    at_once(|mpirun, transport| {
        let bench = bench();
        bench.text("text.txt", 6000);
        let line = format!("{CARAVAN} {TRAIN} --transport {transport} --rendezvous-timeout 1");
        // The one that does not come is ended with the job.
        // One that comes: of two, one could be late as well.
        let parts = [(1, line.as_str()), (1, "sleep 1000")];
        let outcome = bench.outcome(&mut mpirun.run(&bench, &parts));
        fails(&outcome, &["rank 1 of 2 did not arrive", "within 1s"]);
        bench.nothing_left();
    });
}

#[test]
fn another_librarys_mpirun_is_named() {
    let Some(built_in) = Mpirun::built_in() else { return };
    let bench = bench();
    bench.text("text.txt", 6000);
    for mpirun in Mpirun::ALL.into_iter().filter(|m| *m != built_in && harness::installed(m.program())) {
        let line = format!("{CARAVAN} {TRAIN} --transport mpi");
        let outcome = bench.outcome(&mut mpirun.run(&bench, &[(2, &line)]));
        fails(&outcome, &["of 2, but", "says rank 0 of 1", "take the mpirun of that library"]);
        bench.nothing_left();
    }
    // And with none, the sentence says which.
    bench.run(&format!("{TRAIN} --transport mpi --ranks 2")).refusal(2, &["mpirun -n 2 caravan"]);
}

#[test]
fn mpi_that_is_not_built_in_names_its_feature() {
    if cfg!(feature = "mpi") {
        return;
    }
    let bench = bench();
    bench.run(&format!("{TRAIN} --transport mpi")).refusal(2, &["mpi", "--features mpi", "libopenmpi-dev"]);
    bench.run("bench all_reduce --transport mpi").refusal(2, &["--features mpi", "libclang"]);
}

#[test]
fn a_missing_ucx_names_its_package() {
    if !crate::bench().offers("ucx") {
        let bench = bench();
        bench.run("bench all_reduce --transport ucx").refusal(2, &["ucx", "libucp.so.0", "libucx0"]);
        return;
    }
    if !is_root() {
        return skip("hiding libucp.so.0 needs root");
    }
    if Mpirun::built_in() == Some(Mpirun::Mpich) {
        return skip(
            "a missing libucp.so.0: Debian's MPICH is linked to it, so that the program does not even start without",
        );
    }
    let bench = bench();
    let run = format!(
        "set -e; for f in $(ldconfig -p | sed -n 's/.*libucp[.]so[.]0 .*=> //p'); do mount --bind /dev/null $f; done; \
         exec {CARAVAN} bench all_reduce --transport ucx"
    );
    let mut command = Command::new("unshare");
    command.args(["--mount", "bash", "-c", &run]);
    bench.prepare(&mut command);
    let outcome = bench.outcome(&mut command);
    if outcome.stderr.contains("unshare:") || outcome.stderr.contains("mount:") {
        return skip(&format!("this machine lets root mount nothing: {}", outcome.stderr.trim()));
    }
    outcome.refusal(2, &["ucx", "libucp.so.0", "libucx0"]);
}
