//! `bench` asked for what cannot be: one sentence, the right exit code, and nothing left behind.

use harness::{Bench, signal};
use rustix::process::Signal;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

fn bench() -> Bench {
    Bench::new(env!("CARGO_BIN_EXE_caravan"))
}

#[test]
fn nonsense_is_refused_before_any_rank_starts() {
    let bench = bench();
    bench.file("bad.json", "{}");
    bench.file("bad.txt", "something else");
    bench.file("run", "{}");
    bench.file("table.txt", "caravan-tuning 1\nshm 2 all_reduce 64 direct-read-all direct-rs-ag\n");
    let huge = harness::more_than_memory();
    // To the digit where that is the same everywhere.
    let tebibytes = |n: u64| if huge == 1024 { format!("{n}.00 TiB") } else { "TiB".to_owned() };
    for (flags, words) in [
        ("all_reduce -b 2M -e 1M", &["-e 1048576", "-b 2097152"][..]),
        ("all_reduce -b 1022", &["-b 1022", "f32", "1024"]),
        ("all_gather -b 24 -e 40", &["of this sweep, 24, leaves all_gather", "least size is 32 (-b, -e)"]),
        ("all_reduce -d f12", &["-d f12", "bf16", "all"]),
        ("all_reduce -o xor", &["-o xor", "sum", "all"]),
        ("broadcast -r 2 --ranks 2", &["-r 2", "from 0 to 1"]),
        ("all_reduce -b 64X", &["-b", "'64X'"]),
        ("all_reduce -b 8T", &["-b '8T'", "K, M or G"]),
        ("all_reduce -f 1", &["-f 1"]),
        ("all_reduce -c -1", &["-c -1"]),
        ("all_reduce --rendezvous-timeout -1", &["--rendezvous-timeout -1", "at least 0.001"]),
        ("all_reduce -b 0 -e 0 --plot x.svg", &["--plot", "raise -e"]),
        ("barrier --min-busbw 1", &["--min-busbw", "leave it away"]),
        ("all_reduce -b 0", &["-b 0", "-i"]),
        ("all_reduce -n 0", &["-n 0"]),
        (&*format!("all_reduce -b 1G -e {huge}G"), &["2 ranks would hold", &tebibytes(4), "lower -e"]),
        (&format!("all_reduce -b {huge}G"), &["2 ranks would hold", "lower -b and -e"]),
        ("all_to_all -b 1G -e 1G -m 1000 --ranks 64", &["64 ranks would hold 125.0 TiB", "-m"]),
        (
            &format!("overlap --transport threads -b 1G -e {huge}G"),
            &["2 ranks would hold", &tebibytes(4), "lower -e"],
        ),
        (&format!("tune -b 1G -e {huge}G --ranks 3"), &["3 ranks would hold", "TiB", "lower -e"]),
        (&format!("all_reduce -b 4 -i 4 -e {huge}G --ranks 1"), &["1 rank would hold", &tebibytes(2)]),
        (&format!("all_reduce -b 4 -e {huge}G -m 2 --ranks 1"), &["1 rank would hold", "lower -e or -m"]),
        (
            "all_reduce -n 10000000 -N 10000 --json x",
            &["2 ranks would hold", "TiB", "lower -e, -n, -N or --ranks"],
        ),
        ("overlap -w 0 -n 18446744073709551615", &["-n 18446744073709551615", "to 10000000"]),
        ("all_reduce -z 9", &["-z 9", "0 to 3"]),
        ("all_reduce --ranks 0", &["--ranks 0"]),
        ("send_recv --ranks 1", &["send_recv", "--ranks 2"]),
        ("all_reduce --transport carrier-pigeon", &["'carrier-pigeon'", "shm"]),
        ("all_reduce --json no/such/folder/r.json", &["--json", "no/such/folder/r.json"]),
        ("all_reduce --json no/r.json", &["--json", "there is no directory no", "make it"]),
        ("all_reduce --json x --csv x", &["--csv x", "--json is written there too"]),
        ("all_reduce --json x.svg --plot ./x.svg", &["--plot ./x.svg", "--json is written there too"]),
        ("all_reduce --plot .", &["--plot", "directory"]),
        ("all_reduce --plot x.png", &["--plot x.png", "SVG", "x.svg"]),
        ("plot x.json -o x.pdf", &["-o x.pdf", "SVG", "x.svg"]),
        ("all_reduce --tuning none.txt", &["none.txt"]),
        ("all_reduce --tuning none.txt --ranks 1", &["none.txt"]),
        ("all_reduce --tuning bad.txt", &["bad.txt", "line 1"]),
        ("all_reduce -b 1K -e 1K -N 0 -q", &["-N 0", "--quiet"]),
        ("all_reduce --transport ucx+shm", &["ucx+shm", "shm+ucx", "shm+mpi"]),
        ("all_reduce --transport shm --ranks-per-node 2", &["--ranks-per-node 2", "--emulate-link"]),
        ("all_reduce --transport shm+shm --ranks-per-node 0", &["--ranks-per-node 0", "at least 1"]),
        (
            "all_reduce --transport shm+shm --ranks-per-node 9",
            &["--ranks-per-node 9", "2 ranks", "from 1 to 2"],
        ),
        (
            "all_reduce --transport shm+shm --ranks-per-node 2 --emulate-link latency=1us",
            &["--ranks-per-node 2", "one node", "below 2"],
        ),
        (
            "all_reduce --transport nccl --emulate-link latency=1us",
            &["--emulate-link", "NCCL", "--transport shm"],
        ),
        ("all_reduce --emulate-link latency=20", &["--emulate-link latency=20", "ns, us, ms, s"]),
        ("all_reduce --emulate-link width=1us", &["width is unknown", "latency, bandwidth"]),
        ("all_reduce --emulate-link latency=1us --algo native", &["--algo native"]),
        ("all_reduce --algo native", &["--algo native", "--transport mpi"]),
        // Whether or not NCCL is here, which would then be of no use.
        (
            "overlap --transport nccl",
            &["--transport nccl", "bench overlap sends none", "take --transport auto"],
        ),
        ("tune --transport nccl+shm", &["--transport nccl+shm", "sends none", "take --transport shm"]),
        ("overlap -d all", &["-d all"]),
        ("overlap -t 20", &["-t 20", "a thread moves calls", "--progress inline"]),
        ("tune --ranks 1", &["--ranks 2"]),
        ("overlap --transport shm --tuning table.txt --json table.txt", &["--json table.txt", "overwrite"]),
        ("all_reduce --transport shm --tuning table.txt --csv table.txt", &["--csv table.txt", "overwrite"]),
        ("overlap --share-gpus", &["--share-gpus", "nccl"]),
        ("all_reduce --threads 2", &["--threads 2", "train and eval"]),
        ("overlap --threads 1", &["--threads 1", "train and eval"]),
        ("tune --threads 2 -o t.txt", &["--threads 2", "train and eval"]),
        ("tune --tuning bad.txt", &["--tuning bad.txt", "-o"]),
        ("plot bad.json -o x.svg", &["bad.json", "'results'"]),
        ("plot none.json -o x.svg", &["none.json"]),
        ("plot run -o run", &["-o run", "overwrite"]),
        ("all_reduce --tuning /dev/null", &["/dev/null", "no regular file"]),
    ] {
        bench.run(&format!("bench {flags}")).refusal(2, words);
        bench.nothing_left();
    }
    assert!(!bench.path("x.svg").exists());
}

#[test]
fn an_algorithm_that_cannot_carry_the_operation_names_those_that_can() {
    for (flags, words) in [
        (
            "all_gather --algo binomial --ranks 2",
            &["--algo binomial", "all_gather", "direct-read, pairwise"][..],
        ),
        (
            "all_reduce --algo hierarchical --transport threads",
            &["--algo hierarchical", "threads with 2 ranks"],
        ),
        ("all_reduce --algo ring", &["--algo ring", "pairwise", "native"]),
    ] {
        let outcome = bench().run(&format!("bench {flags}")).refusal(2, words);
        let said = format!("caravan: {}: ", words[0]);
        assert!(outcome.stdout.is_empty() && outcome.stderr.starts_with(&said), "{outcome:?}");
    }
}

#[test]
fn inputs_of_all_others_that_do_not_fit_are_refused() {
    let bench = bench();
    let limit = collectives::transport::shm::memory_limit().map_or(u64::MAX, |bytes| bytes >> 10);
    let kibibytes = harness::memory().min(limit);
    // 24 ranks have two buffers each, together half of the memory, and 23 inputs of others.
    let flags = "--transport threads --ranks 24 --algo exchange-all -n 1 -w 0 -c 0";
    let run = format!(
        "ulimit -v {}; exec {} bench all_reduce -b {}K {flags}",
        kibibytes / 20 * 19,
        env!("CARGO_BIN_EXE_caravan"),
        kibibytes / 100
    );
    let mut command = Command::new("bash");
    command.args(["-c", &run]);
    bench.prepare(&mut command);
    let words = ["24 ranks would hold", "lower -b and -e or --ranks", "take --algo auto"];
    bench.outcome(&mut command).refusal(2, &words);
    bench.nothing_left();
}

#[test]
fn a_bandwidth_below_the_gate_fails_after_the_table() {
    let bench = bench();
    for transport in ["shm", "threads"] {
        let gate = format!("--min-busbw 1e9 --json {transport}.json --transport {transport}");
        let outcome = bench
            .run(&format!("bench all_reduce -b 1K -e 4K -n 3 {gate}"))
            .refusal(1, &["GB/s, below --min-busbw 1000000000"]);
        assert!(outcome.stdout.contains(" FAILED\n#\n"), "{}", outcome.stdout);
        // A verdict, and no rank's failure.
        let sentence = "caravan: the average bus bandwidth of all_reduce is ";
        assert!(outcome.stderr.starts_with(sentence) && outcome.stderr.lines().count() == 1, "{outcome:?}");
        assert!(bench.path(&format!("{transport}.json")).exists(), "what was measured is kept");
    }
    bench.nothing_left();
    // Also where the table cannot be written.
    let mut full = bench.command("bench all_reduce -b 1K -e 4K -n 3 --min-busbw 1e9");
    let said = bench.outcome(full.stdout(std::fs::File::create("/dev/full").unwrap())).stderr;
    for words in ["GB/s, below --min-busbw 1000000000; ", "writing to standard output"] {
        assert!(said.contains(words), "{said}");
    }
    let outcome = bench.run("bench all_reduce -b 1K -e 4K -n 3 --min-busbw 0").success();
    assert!(outcome.stdout.contains(" OK\n#\n# Collective test concluded"), "{}", outcome.stdout);
}

/// A rank that another launcher would have started.
fn rank(bench: &Bench, job: &str, rank: usize, world: usize, args: &str) -> Child {
    let mut command = bench.command(args);
    command
        .env("CARAVAN_RANK", rank.to_string())
        .env("CARAVAN_WORLD", world.to_string())
        .env("CARAVAN_LOCAL_RANK", rank.to_string())
        .env("CARAVAN_LOCAL_SIZE", world.to_string())
        .env("CARAVAN_JOB", job);
    command.spawn().expect("the program starts")
}

#[test]
fn ranks_with_different_arguments_name_the_difference() {
    for (flags, words) in [
        (["-e 4K", "-e 8K"], ["rank 1 with '-e 8192'", "rank 0 with '-e 4096'"]),
        (["-n 5", "-n 6"], ["rank 1 with '-n 6'", "rank 0 with '-n 5'"]),
        (["-d float", "-d half"], ["rank 1 with '-d f16'", "rank 0 with '-d f32'"]),
        (["-o sum", "-o max"], ["rank 1 with '-o max'", "rank 0 with '-o sum'"]),
        (["-n 5", "-n 5 --min-busbw 1"], ["rank 1 with '--min-busbw 1'", "rank 0 with '--min-busbw none'"]),
        (["-I 1", "-I 0"], ["rank 1 with '-I 0'", "rank 0 with '-I 1'"]),
        (["-S 0", "-S 1"], ["rank 1 with '-S 1'", "rank 0 with '-S 0'"]),
        (["-n 5", "-n 5 --csv r.csv"], ["rank 1 with '--csv given'", "rank 0 with '--csv not given'"]),
        (
            ["--tuning all.txt", "--tuning few.txt"],
            [
                "rank 1 with '--tuning all_reduce 64 direct-read-all",
                "rank 0 with '--tuning all_reduce all direct",
            ],
        ),
        (
            ["--tuning all.txt", "-q"],
            [
                "rank 1 with '--tuning all_reduce by the cost model'",
                "rank 0 with '--tuning all_reduce all direct",
            ],
        ),
        (
            ["--emulate-link latency=1us", "--emulate-link latency=2us"],
            ["rank 1 with '--transport shm@latency=2us'", "rank 0 with '--transport shm@latency=1us'"],
        ),
    ] {
        let bench = bench();
        let table = |rule| format!("caravan-tuning 1\nshm 2 all_reduce {rule}\n");
        bench.file("all.txt", table("all direct-read-all direct-read-all"));
        bench.file("few.txt", table("64 direct-read-all direct-rs-ag"));
        let job = format!("mixed-{}-{}", std::process::id(), flags[1].replace(' ', ""));
        let args = |i: usize| format!("bench all_reduce {}", flags[i]);
        let both = [0, 1].map(|r| rank(&bench, &job, r, 2, &args(r)));
        for child in both {
            bench.finish(child).refusal(2, &words);
        }
        bench.nothing_left();
    }
    let bench = bench();
    let job = format!("mixed-{}-operation", std::process::id());
    let both = ["all_reduce", "all_gather"].map(|op| format!("bench {op} -n 2 -e 4K"));
    let both = [0, 1].map(|r| rank(&bench, &job, r, 2, &both[r]));
    for child in both {
        bench.finish(child).refusal(2, &["'operation all_gather'", "'operation all_reduce'"]);
    }
}

/// Containers that share a network have processes of their own, of which the kernel tells others no numbers.
#[test]
fn ranks_that_cannot_see_each_others_processes_meet() {
    if !harness::is_root() {
        return harness::skip("a process namespace needs root");
    }
    let apart = ["--pid", "--fork"];
    match Command::new("unshare").args(apart).arg("true").output() {
        Ok(tried) if tried.status.success() => {}
        Ok(tried) => return harness::skip(String::from_utf8_lossy(&tried.stderr).trim()),
        Err(e) => return harness::skip(&format!("unshare cannot be started: {e}")),
    }
    let bench = bench();
    let start = |rank: usize| {
        let mut command = Command::new("unshare");
        command.args(apart).args([env!("CARGO_BIN_EXE_caravan"), "bench", "barrier", "-n", "2"]);
        command.args(["--rendezvous-timeout", "20"]);
        bench.prepare(&mut command);
        let job = format!("apart-{}", std::process::id());
        command.env("CARAVAN_RANK", rank.to_string()).env("CARAVAN_WORLD", "2").env("CARAVAN_JOB", job);
        command.spawn().expect("unshare starts")
    };
    let both = [0, 1].map(start);
    both.into_iter().for_each(|child| drop(bench.finish(child).success()));
    bench.nothing_left();
}

#[test]
fn an_interrupt_leaves_nothing() {
    for command in ["all_reduce -N 0 -n 100", "overlap -n 1000000", "tune -n 1000000"] {
        let bench = bench();
        let child = bench.command(&format!("bench {command} --ranks 3 -b 64K")).spawn().unwrap();
        let child = bench.until(child, "three ranks are there", || bench.ranks().len() == 3);
        // Somewhere in the middle.
        std::thread::sleep(Duration::from_millis(200));
        signal(child.id(), Signal::INT);
        let outcome = bench.finish(child);
        assert_eq!(outcome.code, Some(130), "{}", outcome.stderr);
        bench.nothing_left();
        assert_eq!(std::fs::read_dir(bench.path(".")).unwrap().count(), 0);
    }
}

#[test]
fn a_run_that_is_ended_leaves_the_rows_that_it_had() {
    for (command, list, last) in [
        ("all_reduce -N 100000 -b 1K -e 1K -n 100 --csv r.csv --plot r.svg", "results", "r.svg"),
        // The last size takes half a minute.
        ("overlap all_gather -b 64K -e 16M -f 16 -n 500", "overlap", "r.json"),
    ] {
        let bench = bench();
        let child = bench.command(&format!("bench {command} --ranks 2 --json r.json")).spawn().unwrap();
        let child = bench.until(child, "there are rows", || bench.path(last).exists());
        signal(child.id(), Signal::TERM);
        let outcome = bench.finish(child);
        assert_eq!(outcome.code, Some(143), "{}", outcome.stderr);
        let left = bench.json("r.json");
        assert_eq!(left["complete"], false, "{left}");
        assert!(!left[list].as_array().unwrap().is_empty() && left["end_time"].is_string(), "{left}");
        if list == "results" {
            let text = |name| std::fs::read_to_string(bench.path(name)).unwrap();
            assert!(text("r.csv").lines().count() >= 3 && text("r.csv").ends_with('\n'));
            assert!(text("r.svg").contains(", unfinished") && text("r.svg").trim_end().ends_with("</svg>"));
        }
        bench.nothing_left();
    }
}

#[test]
fn a_tuning_that_is_ended_leaves_the_collectives_that_it_measured() {
    let bench = bench();
    let child = bench.command("bench tune -b 64K -e 64K -n 5000 --ranks 2 -o t.txt").spawn().unwrap();
    let table = || std::fs::read_to_string(bench.path("t.txt"));
    let child = bench.until(child, "a collective is measured", || table().is_ok());
    signal(child.id(), Signal::TERM);
    assert_eq!(bench.finish(child).code, Some(143));
    assert!(table().unwrap().lines().filter(|line| line.starts_with("shm 2 ")).count() >= 1);
    bench.run("bench all_reduce -b 1K -e 1K -n 3 --ranks 2 --tuning t.txt").success();
    bench.nothing_left();
}

#[test]
fn many_ranks_need_no_higher_limit_of_open_files() {
    let bench = bench();
    let run =
        format!("ulimit -Sn 24; exec {} bench barrier --ranks 16 -n 2 -q", env!("CARGO_BIN_EXE_caravan"));
    let mut command = Command::new("bash");
    command.args(["-c", &run]);
    bench.prepare(&mut command);
    bench.outcome(&mut command).success();
}

#[test]
fn a_limit_of_file_sizes_below_the_memory_is_none_of_what_ranks_need() {
    let bench = bench();
    let run =
        format!("ulimit -f 200000; exec {} bench all_reduce -e 1M -n 2 -q", env!("CARGO_BIN_EXE_caravan"));
    let mut command = Command::new("bash");
    command.args(["-c", &run]);
    bench.prepare(&mut command);
    bench.outcome(&mut command).success();
}

#[test]
fn a_terminal_that_stops_what_writes_in_the_background_does_not_stop_ranks() {
    if !harness::installed("script") {
        return harness::skip("script gives a program a terminal (apt install bsdutils)");
    }
    let bench = bench();
    let run = format!("stty tostop; exec {} bench barrier -n 2", env!("CARGO_BIN_EXE_caravan"));
    let mut command = Command::new("script");
    command.args(["-qec", &run, "/dev/null"]).stdin(Stdio::null());
    bench.prepare(&mut command);
    let outcome = bench.outcome(&mut command).success();
    assert!(outcome.stdout.contains("# Avg bus bandwidth"), "{}", outcome.stdout);
}

#[test]
fn a_reader_that_pauses_stops_no_rank() {
    let bench = bench();
    let start = |flags: &str| {
        let mut command = Command::new("bash");
        // Into a pipe that is full already.
        let run = format!("head -c 65536 /dev/zero; exec {} bench {flags}", env!("CARGO_BIN_EXE_caravan"));
        command.args(["-c", &format!("{run} --ranks 2 --call-timeout 2")]);
        bench.prepare(&mut command);
        command.spawn().unwrap()
    };
    let all = [
        "all_reduce -b 8 -e 8 -n 1 -w 0 -N 9 --json r.json",
        "overlap all_gather -b 64K -e 64K -n 1 -w 0",
        "tune -b 1K -e 1K -n 1 -w 0 -o t.txt",
    ]
    .map(start);
    let all = all.map(|child| bench.until(child, "all ranks are there", || bench.ranks().len() == 6));
    // Longer than a call may take.
    std::thread::sleep(Duration::from_secs(4));
    for child in all {
        let outcome = bench.finish(child).success();
        assert!(outcome.stdout.contains("\0# caravan version"), "{}", outcome.stdout);
    }
    bench.nothing_left();
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let bench = bench();
    let (_, unread) = std::io::pipe().unwrap();
    let ended = bench.outcome(bench.command("bench all_reduce -b 1K -e 16K -n 3 -N 50").stdout(unread));
    assert_eq!((ended.code, &*ended.stderr), (Some(0), ""));
    bench.nothing_left();
    // A sweep that is only shown ends with who reads it: this one would take minutes.
    for (flags, shown) in [
        ("all_reduce -b 1K -e 64M -f 2 -n 10000 -d all", 2),
        ("all_reduce -b 1K -e 1K -n 3 -N 0", 5),
        ("overlap -b 1K -e 64M -f 2 -n 5000", 1),
    ] {
        let reader = format!("grep -v -m {shown} '^#'");
        let run =
            format!("{} bench {flags} | {reader}; exit ${{PIPESTATUS[0]}}", env!("CARGO_BIN_EXE_caravan"));
        let mut command = Command::new("bash");
        command.args(["-c", &run]);
        bench.prepare(&mut command);
        let ended = bench.outcome(&mut command);
        assert_eq!(
            (ended.code, ended.stdout.lines().count(), &*ended.stderr),
            (Some(0), shown, ""),
            "{flags}"
        );
        bench.nothing_left();
    }
}
