//! The benchmark's table as nccl-tests' parsers read it, and its numbers against each other.

use harness::{Bench, OPERATIONS};
use serde_json::{Value, json};
use std::fs;
use std::time::Instant;

fn bench() -> Bench {
    Bench::new(env!("CARGO_BIN_EXE_caravan"))
}

/// One half of a row.
#[derive(Debug)]
struct Half {
    time: f64,
    algbw: f64,
    busbw: f64,
    wrong: Option<u64>,
}

#[derive(Debug)]
struct Row {
    size: usize,
    count: usize,
    dtype: String,
    redop: String,
    root: i64,
    halves: [Half; 2],
}

#[derive(Debug)]
struct Table {
    rows: Vec<Row>,
    out_of_bounds: u64,
    average: f64,
}

/// The first and last column of each field of nccl-tests' row: "%12li  %12li  %8s  %6s  %6s" and twice
/// "  %7s  %6s  %6s  %6g".
const FIELDS: [(usize, usize); 13] = [
    (0, 12),
    (14, 26),
    (28, 36),
    (38, 44),
    (46, 52),
    (54, 61),
    (63, 69),
    (71, 77),
    (79, 85),
    (87, 94),
    (96, 102),
    (104, 110),
    (112, 118),
];

/// Reads what nccl-tests would have printed, and nothing else.
fn parse(text: &str) -> Table {
    let mut rows = Vec::new();
    let (mut out_of_bounds, mut average, mut names, mut units) = (None, None, None, None);
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# Out of bounds values : ") {
            let (count, verdict) = rest.split_once(' ').expect("a count and a verdict");
            let count: u64 = count.parse().expect("a count");
            assert_eq!(verdict, if count == 0 { "OK" } else { "FAILED" });
            assert!(out_of_bounds.replace(count).is_none(), "one such line");
        } else if let Some(rest) = line.strip_prefix("# Avg bus bandwidth    : ") {
            let number = rest.split(' ').next().expect("a number");
            assert!(average.replace(number.parse().expect("a number")).is_none(), "one such line");
        } else if line.starts_with("#       size") {
            names = Some(line.to_owned());
        } else if line.starts_with("#        (B)") {
            units = Some(line.to_owned());
        } else if !line.is_empty() && !line.starts_with('#') {
            assert!(out_of_bounds.is_none(), "a row after the footer: {line}");
            assert!(names.is_some() && units.is_some(), "a row before the header: {line}");
            rows.push(row(line));
        }
    }
    let names = names.expect("a header");
    // Each name ends where its column ends.
    for ((_, end), name) in FIELDS.into_iter().zip([
        "size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong", "time", "algbw",
        "busbw", "#wrong",
    ]) {
        assert!(names[..end].ends_with(name), "column {name} of: {names}");
    }
    Table { rows, out_of_bounds: out_of_bounds.expect("a footer"), average: average.expect("a footer") }
}

fn row(line: &str) -> Row {
    // Where nothing was checked nccl-tests prints a column less.
    let line = &line.replace("    N/A", "     N/A");
    assert_eq!(line.len(), 118, "{line}");
    let mut last = 0;
    let fields = FIELDS.map(|(from, to)| {
        assert!(line[last..from].bytes().all(|b| b == b' '), "between columns of: {line}");
        last = to;
        let field = &line[from..to];
        assert!(!field.ends_with(' '), "fields are flush right in: {line}");
        field.trim_start()
    });
    let half = |at: usize| {
        let number = |i: usize| fields[at + i].parse::<f64>().unwrap_or_else(|e| panic!("{e} in {line}"));
        let wrong = (fields[at + 3] != "N/A").then(|| number(3) as u64);
        Half { time: number(0), algbw: number(1), busbw: number(2), wrong }
    };
    Row {
        size: fields[0].parse().unwrap(),
        count: fields[1].parse().unwrap(),
        dtype: fields[2].to_owned(),
        redop: fields[3].to_owned(),
        root: fields[4].parse().unwrap(),
        halves: [half(5), half(9)],
    }
}

/// From nccl-tests' documentation of bus bandwidth, written down again.
fn factor(operation: &str, n: f64) -> f64 {
    match operation {
        "all_reduce" => 2.0 * (n - 1.0) / n,
        "reduce_scatter" | "all_gather" | "gather" | "scatter" | "all_to_all" => (n - 1.0) / n,
        "broadcast" | "reduce" | "send_recv" => 1.0,
        other => panic!("{other}"),
    }
}

/// Whether a printed quotient follows from printed numbers that were rounded: `shown` within half of its last
/// digit of `size / time * factor` for some time within half of its last digit.
fn follows(size: usize, time: f64, factor: f64, shown: f64) {
    let (half_time, half_shown) =
        (if time < 9999.0 { 0.005 } else { 0.5 }, if shown < 999.0 { 0.00501 } else { 0.51 });
    let of = |time: f64| size as f64 / 1e3 / time * factor;
    assert!(
        of(time + half_time) - half_shown <= shown,
        "{size} B in {time} us times {factor} is not {shown}"
    );
    if time > half_time {
        assert!(
            shown <= of(time - half_time) + half_shown,
            "{size} B in {time} us times {factor} is not {shown}"
        );
    }
}

#[test]
fn every_operation_prints_nccl_tests_table_with_consistent_numbers() {
    for operation in OPERATIONS {
        let bench = bench();
        let began = Instant::now();
        let outcome = bench
            .run(&format!("bench {operation} -b 1K -e 256K -f 16 -n 7 -w 2 --ranks 3 --json r.json"))
            .success();
        let wall_us = began.elapsed().as_secs_f64() * 1e6;
        let table = parse(&outcome.stdout);
        let json = bench.json("r.json");
        assert_eq!((table.rows.len(), table.out_of_bounds), (3, 0), "{}", outcome.stdout);
        let factor = factor(operation, 3.0);
        let mut measured_us = 0.0;
        let mut busbw = Vec::new();
        for (row, exact) in table.rows.iter().zip(json["results"].as_array().unwrap()) {
            assert_eq!(exact["size"], row.size);
            assert_eq!(exact["count"], row.count);
            assert_eq!((row.dtype.as_str(), row.redop.as_str()), ("float", exact["redop"].as_str().unwrap()));
            // nccl-tests shows send_recv with -o, which it has no use for.
            let reduces = ["all_reduce", "reduce_scatter", "reduce", "send_recv"].contains(&operation);
            assert_eq!(row.redop, if reduces { "sum" } else { "none" });
            let rooted = ["broadcast", "reduce", "gather", "scatter"].contains(&operation);
            assert_eq!(row.root, if rooted { 0 } else { -1 });
            for (half, name) in row.halves.iter().zip(["out_of_place", "in_place"]) {
                assert_eq!(half.wrong, Some(0), "{operation}");
                follows(row.size, half.time, 1.0, half.algbw);
                follows(row.size, half.time, factor, half.busbw);
                // Every digit, from the JSON: bandwidths follow from size and time, the time from single calls.
                let number = |key: &str| exact[name][key].as_f64().unwrap();
                let near =
                    |a: f64, b: f64| assert!((a - b).abs() <= 1e-9 * b.abs(), "{operation} {name}: {a} {b}");
                near(number("alg_bw"), row.size as f64 / 1e3 / number("time"));
                near(number("bus_bw"), number("alg_bw") * factor);
                let calls: Vec<f64> = exact[format!("{name}_calls")]["times_us"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|t| t.as_f64().unwrap())
                    .collect();
                assert_eq!(calls.len(), 7);
                near(number("time"), calls.iter().sum::<f64>() / 7.0);
                // Of seven the fourth is in the middle, and less than the longest are not 95 of 100.
                let mut sorted = calls.clone();
                sorted.sort_by(f64::total_cmp);
                let summary = &exact[format!("{name}_calls")];
                assert_eq!([&summary["p50_us"], &summary["p95_us"]], [sorted[3], sorted[6]], "{summary}");
                assert!((half.time - number("time")).abs() <= 0.5, "{half:?}");
                measured_us += calls.iter().sum::<f64>();
                busbw.push(number("bus_bw"));
                assert!(!exact[name]["algorithm"].as_str().unwrap().is_empty());
                assert!(!exact[name]["why"].as_str().unwrap().is_empty());
            }
        }
        // Seen from outside: what was timed took place while the program ran.
        assert!(measured_us > 0.0 && measured_us <= wall_us, "{measured_us} us inside {wall_us} us");
        let average = busbw.iter().sum::<f64>() / busbw.len() as f64;
        assert!((table.average - average).abs() <= 1e-5 * average, "{} {average}", table.average);
        assert_eq!(json["average_bus_bandwidth"]["okay"], "unchecked");
        assert_eq!(json["out_of_bounds"]["okay"], "true");
        assert_eq!(json.get("nccl_version"), Some(&Value::Null), "there is no NCCL in this");
        let machine = &json["machine"];
        assert_eq!(machine["arch"], std::env::consts::ARCH);
        assert!(machine["cores"].as_u64() > Some(0) && machine["cpu"].is_string(), "{machine}");
        assert!(machine["memory_bytes"].as_u64() > Some(0) && machine["host"].is_string(), "{machine}");
    }
}

/// Only odd ranks get something, and what they get is right; with four ranks two messages go at once.
#[test]
fn messages_can_go_one_way_with_a_window() {
    let bench = bench();
    for ranks in [2, 3, 4] {
        let line =
            format!("bench send_recv --one-way -m 4 -b 1K -e 64K -f 8 -n 5 --ranks {ranks} --json r.json");
        let table = parse(&bench.run(&line).success().stdout);
        assert_eq!((table.rows.len(), table.out_of_bounds), (3, 0));
        assert!(table.rows.iter().flat_map(|r| &r.halves).all(|h| h.wrong == Some(0)));
        let json = bench.json("r.json");
        assert_eq!(
            (&json["config"]["one_way"], &json["config"]["aggregated_iterations"]),
            (&true.into(), &4.into())
        );
    }
    bench.run("bench all_reduce --one-way").refusal(2, &["--one-way", "send_recv", "all_reduce"]);
}

/// What comes back is right too. On a link of 20 ms each way two messages in turn take 40 ms, of which the table has half: what
/// was timed would else not fit in the time that the program ran.
#[test]
fn messages_can_go_there_and_back() {
    let bench = bench();
    for (ranks, transport) in [(2, "shm"), (3, "threads"), (4, "shm")] {
        let line = format!(
            "bench send_recv --ping-pong -b 8 -e 512K -f 256 -n 5 --ranks {ranks} --transport {transport} --json r.json"
        );
        let table = parse(&bench.run(&line).success().stdout);
        assert_eq!((table.rows.len(), table.out_of_bounds), (3, 0));
        assert!(table.rows.iter().flat_map(|r| &r.halves).all(|h| h.wrong == Some(0)));
        let json = bench.json("r.json");
        assert_eq!(json["config"]["ping_pong"], true);
    }
    let line = "bench send_recv --ping-pong -b 8 -e 8 -n 25 -w 0 -c 0 --emulate-link latency=20ms";
    let start = Instant::now();
    let slow = parse(&bench.run(line).success().stdout);
    let wall_us = start.elapsed().as_secs_f64() * 1e6;
    let times = slow.rows[0].halves.each_ref().map(|half| half.time);
    assert!(times.iter().all(|&time| time >= 20e3), "{times:?}");
    assert!(times.iter().sum::<f64>() * 2.0 * 25.0 <= wall_us, "{times:?} us inside {wall_us} us");
    for (flags, words) in [
        ("all_reduce --ping-pong", ["--ping-pong", "send_recv", "all_reduce"]),
        ("send_recv --ping-pong -m 2", ["--ping-pong", "-m", "leave it away"]),
        ("send_recv --ping-pong --calls started", ["--ping-pong", "--calls started", "leave it away"]),
        ("send_recv --ping-pong -z 1", ["--ping-pong", "-z 1", "-z 0, 2 or 3"]),
        ("send_recv --ping-pong --one-way", ["--ping-pong", "--one-way", "give one"]),
    ] {
        bench.run(&format!("bench {flags}")).refusal(2, &words);
    }
}

#[test]
fn counts_are_rounded_as_nccl_tests_rounds() {
    // Over 3 ranks 1000 bytes are 250 floats, 83 a rank, and 80 after rounding to 16 bytes.
    for (operation, size, count) in
        [("all_gather", 960, 80), ("all_reduce", 1000, 250), ("reduce_scatter", 960, 80)]
    {
        let outcome = bench().run(&format!("bench {operation} -b 1000 -e 1000 -n 1 --ranks 3")).success();
        let table = parse(&outcome.stdout);
        assert_eq!((table.rows[0].size, table.rows[0].count), (size, count), "{operation}");
    }
    // Of what is less than that nothing is left.
    let outcome = bench().run("bench all_gather -b 8 -e 64 -f 2 -n 1 --ranks 2").success();
    let sizes: Vec<usize> = parse(&outcome.stdout).rows.iter().map(|row| row.size).collect();
    assert_eq!(sizes, [0, 0, 32, 64]);
}

#[test]
fn four_ranks_finish_every_operation_in_every_form() {
    for operation in OPERATIONS {
        for form in ["", "--calls started -m 3", "-z 1", "-z 2 -R 0", "-z 3 -a 3 -c 3"] {
            let outcome = bench()
                .run(&format!("bench {operation} -b 256 -e 64K -f 16 -n 5 --ranks 4 -r all {form}"))
                .success();
            let table = parse(&outcome.stdout);
            assert_eq!(table.out_of_bounds, 0);
            let roots = if table.rows[0].root >= 0 { 4 } else { 1 };
            assert_eq!(table.rows.len(), 3 * roots, "{operation} {form}");
            assert!(
                table.rows.iter().flat_map(|r| &r.halves).all(|h| h.wrong == Some(0)),
                "{operation} {form}"
            );
        }
    }
    let text = bench().run("bench barrier -b 5 -e 1 -n 50 --ranks 4").success().stdout;
    assert!(text.contains(" minBytes 0 maxBytes 0 "), "{text}");
    let barrier = parse(&text);
    assert_eq!((barrier.rows.len(), barrier.rows[0].size, barrier.rows[0].halves[0].wrong), (1, 0, None));
}

#[test]
fn every_type_and_reduction_is_exact_on_every_transport() {
    for transport in ["shm", "threads"] {
        for operation in ["all_reduce", "reduce_scatter", "reduce"] {
            let run = format!(
                "bench {operation} -d all -o all -b 3K -e 3K -n 1 -w 1 --ranks 3 --transport {transport}"
            );
            let table = parse(&bench().run(&run).success().stdout);
            assert_eq!(table.rows.len(), 50);
            assert!(table.rows.iter().flat_map(|r| &r.halves).all(|h| h.wrong == Some(0)), "{operation}");
        }
        let run = format!("bench all_to_all -d all -b 3K -e 3K -n 1 --ranks 3 --transport {transport}");
        assert_eq!(parse(&bench().run(&run).success().stdout).rows.len(), 10);
    }
}

#[test]
fn each_algorithm_can_be_asked_for_and_is_reported() {
    for (operation, algorithms) in [
        ("all_reduce", &["direct-read-all", "direct-rs-ag", "exchange-all", "bruck", "pairwise-rs-ag"][..]),
        ("all_gather", &["direct-read", "pairwise", "bruck"]),
        ("broadcast", &["direct-read", "binomial", "chain"]),
    ] {
        for algorithm in algorithms {
            let bench = bench();
            let flags =
                format!("-b 1K -e 64K -f 64 -n 3 --algo {algorithm} --json r.json --csv r.csv --ranks 3");
            let outcome = bench.run(&format!("bench {operation} {flags}")).success();
            assert!(outcome.stdout.contains(&format!(": {algorithm}, as asked for\n")), "{}", outcome.stdout);
            let json = bench.json("r.json");
            assert_eq!(json["results"][0]["in_place"]["algorithm"], *algorithm);
            assert_eq!(fs::read_to_string(bench.path("r.csv")).unwrap().lines().count(), 1 + 2 * 2);
        }
    }
}

#[test]
fn optional_columns_and_repeated_sweeps_are_there_when_asked_for() {
    let outcome = bench().run("bench all_reduce -b 1K -e 4K -n 4 -N 2 -I 1 -S 1").success();
    let rows: Vec<&str> = outcome.stdout.lines().filter(|l| !l.starts_with('#') && !l.is_empty()).collect();
    assert_eq!(rows.len(), 4);
    let report = "\n# Per-Iteration Report: host clock timing; i_* uses max over ranks \n";
    assert!(outcome.stdout.contains(report), "{}", outcome.stdout);
    for row in rows {
        let fields: Vec<&str> = row.split_whitespace().collect();
        assert_eq!(fields.len(), 5 + 8 + 8 + 2, "{row}");
        let number = |i: usize| fields[i].parse::<f64>().unwrap();
        assert!(number(9) <= number(11) && number(11) <= number(10), "least, 99th percentile, most: {row}");
        assert!(number(5) <= number(10) + 0.01, "the mean over ranks and the slowest's most: {row}");
    }
}

#[test]
fn figures_show_one_run_or_several() {
    let bench = bench();
    for (name, transport) in [("a", "shm"), ("b", "threads")] {
        let flags = format!("--transport {transport} --json {name}.json --plot {name}.svg --csv {name}.csv");
        bench.run(&format!("bench reduce_scatter -b 1K -e 64K -n 2 {flags}")).success();
    }
    bench.run("bench plot a.json b.json -o both.svg").success();
    let one = fs::read_to_string(bench.path("a.svg")).unwrap();
    let both = fs::read_to_string(bench.path("both.svg")).unwrap();
    for (figure, lines) in [(&one, 2), (&both, 4)] {
        assert!(figure.starts_with("<svg") && figure.trim_end().ends_with("</svg>"));
        // Four sizes in each line of both panels, and one mark beside each name.
        assert_eq!(figure.matches("<circle").count(), lines * (4 * 2 + 1));
    }
    assert!(both.contains("reduce_scatter shm") && both.contains("reduce_scatter threads"));
    for (name, messages) in [("ring", ""), ("back", "--ping-pong")] {
        bench.run(&format!("bench send_recv {messages} -b 8 -e 64 -n 2 --json {name}.json")).success();
    }
    bench.run("bench plot ring.json back.json -o messages.svg").success();
    let figure = fs::read_to_string(bench.path("messages.svg")).unwrap();
    assert!(figure.contains("\nsend_recv shm float 2 ranks\n"), "{figure}");
    assert!(figure.contains("\nsend_recv ping-pong shm float 2 ranks\n"), "{figure}");
}

#[test]
fn a_tuning_table_is_measured_and_then_used() {
    let bench = bench();
    let by_variable = |args: &str| bench.outcome(bench.command(args).env("CARAVAN_TUNING", "t.txt"));
    // The variable may be set before there is a table, or an entry in it.
    // As mktemp makes it.
    bench.file("t.txt", "");
    let shown = by_variable("bench tune -b 1K -e 64K -f 8 -n 10 --ranks 2 -o t.txt").success().stdout;
    for (name, both) in [("all_reduce", true), ("all_gather", true), ("broadcast", false)] {
        // Out of place and in place, where a collective has two forms.
        let rows: Vec<&str> = shown.lines().filter(|line| line.trim_start().starts_with(name)).collect();
        assert_eq!(rows.len(), 3, "{shown}");
        assert!(rows.iter().all(|row| row.contains('/') == both), "{shown}");
    }
    by_variable("bench tune -b 1K -e 1K -n 5 --ranks 3 -o t.txt").success();
    bench.file("blank.txt", "\n \n");
    bench.run("bench tune -b 1K -e 1K -n 1 -w 0 --ranks 2 -o blank.txt").success();
    bench.run("bench all_reduce -b 1K -e 1K -n 1 --ranks 2 --tuning blank.txt").success();
    // What was not tried is left to the cost model, whatever was fastest beside it.
    let far = by_variable("bench all_reduce -b 64K -e 1M -f 16 -n 3 --ranks 2").success().stdout;
    let said = |words: &str| assert!(far.contains(words), "{words}: {far}");
    said(" to 185363 bytes\n");
    said("1048576 bytes out-of-place: direct-rs-ag, because above ");
    said(" (the tuning table's rule is for calls from 362 to 185363 bytes)\n");
    by_variable("bench all_reduce -b 1K -e 1K -n 3 --ranks 1").success();
    let table = fs::read_to_string(bench.path("t.txt")).unwrap();
    assert!(table.contains("\nshm 2 all_reduce ") && table.contains("\nshm 3 all_reduce "), "{table}");
    for group in ["shm 2", "shm 3"] {
        assert_eq!(table.matches(&format!("\n# {group} last measured on ")).count(), 1, "{table}");
    }
    let outcome = bench.run("bench all_reduce -b 1K -e 1K -n 3 --ranks 2 --tuning t.txt").success();
    assert!(outcome.stdout.contains("measured to be fastest"), "{}", outcome.stdout);
    let outcome = by_variable("bench all_reduce -b 1K -e 1K -n 3 --ranks 2").success();
    assert!(outcome.stdout.contains("measured to be fastest"), "{}", outcome.stdout);
    // A table that no flag names is for who goes by one, and its variable is told.
    by_variable("bench all_reduce -b 1K -e 1K -n 3 --ranks 4 --algo bruck").success();
    by_variable("bench all_reduce --ranks 4")
        .refusal(2, &["shm with 4 ranks", "the variable CARAVAN_TUNING"]);
    // A narrower run says what it replaces.
    let narrow = bench.run("bench tune -b 1K -e 1K -n 5 --ranks 2 -o t.txt").success().stdout;
    let words =
        "# all_reduce: in place of a rule for calls from 362 to 185363 bytes, also where nothing was tried\n";
    assert!(narrow.contains(words) && !narrow.contains("# barrier: in place"), "{narrow}");
    let shown = bench.run("bench tune -b 1K -e 1K -n 5 --ranks 2 -q -o /dev/stdout").success().stdout;
    assert!(shown.starts_with("caravan-tuning 1\n"), "{shown}");
    bench
        .run("bench all_reduce --tuning t.txt --csv t.txt")
        .refusal(2, &["--csv t.txt would overwrite t.txt"]);
    bench.run("bench all_reduce --ranks 4 --tuning t.txt").refusal(
        2,
        &["t.txt", "shm with 2 ranks, shm with 3 ranks", "not for shm with 4 ranks", "bench tune"],
    );
}

#[test]
fn overlap_is_reported_by_both_formulas_and_in_time() {
    for (progress, tests) in [("thread", 0), ("inline -t 3", 3), ("inline -t 1000000", 1_000_000)] {
        let bench = bench();
        let flags = "-b 64K -e 1M -f 16 -n 10 -w 2 --json o.json --ranks 2";
        let outcome = bench.run(&format!("bench overlap {flags} --progress {progress}")).success();
        let rows = outcome.stdout.lines().filter(|l| !l.starts_with('#') && !l.is_empty());
        let fields: Vec<Vec<&str>> = rows.map(|l| l.split_whitespace().collect()).collect();
        assert_eq!(fields.len(), 3 * 2, "{}", outcome.stdout);
        let json = bench.json("o.json");
        for (shown, row) in fields.iter().zip(json["overlap"].as_array().unwrap()) {
            assert_eq!(shown.len(), 14, "{shown:?}");
            let n = |key: &str| row[key].as_f64().unwrap();
            let (pure, alone, overall) = (n("pure_us"), n("compute_alone_us"), n("overall_us"));
            let computed = n("compute_total_us") - n("test_us");
            let means = ["pure", "overall", "compute_total", "test"]
                .map(|part| row[format!("{part}_per_iter")]["avg_us"].as_f64());
            let [mean_pure, mean_overall, mean_total, mean_test] = means.map(Option::unwrap);
            let osu = |pure: f64, overall: f64, computed: f64| {
                (100.0 - (overall - computed) / pure * 100.0).max(0.0)
            };
            let near = |key: &str, value: f64| assert!((n(key) - value).abs() < 1e-6, "{key}: {row}");
            near("osu_overlap_pct", osu(mean_pure, mean_overall, mean_total - mean_test));
            near("osu_overlap_median_pct", osu(pure, overall, computed));
            let slowest: Vec<f64> =
                row["imb_times_us"].as_array().unwrap().iter().map(|t| t.as_f64().unwrap()).collect();
            let [slow_pure, slow_cpu, slow_overall] = slowest[..] else { panic!("{row}") };
            let hidden = (slow_pure + slow_cpu - slow_overall) / slow_pure.max(slow_cpu);
            near("imb_overlap_pct", 100.0 * hidden.clamp(0.0, 1.0));
            assert!(slow_overall >= mean_overall - 1e-6, "the slowest is not faster than the mean: {row}");
            near("exposed_us", overall - alone);
            near("slowdown", computed / alone);
            assert_eq!(n("nwrong"), 0.0);
            assert!(pure > 0.0 && alone > 0.0 && overall > 0.0 && n("products") >= 1.0);
            // Between two products one look at most: without products between them they would be what is measured.
            assert_eq!(n("tests"), f64::min(n("products") - 1.0, f64::from(tests)), "{row}");
            // Every rank's times, what they come to, and what carried the calls.
            for part in ["pure", "compute_alone", "overall", "init", "compute_total", "wait"] {
                let counts =
                    row["times_us"].as_array().unwrap().iter().map(|of| of[part].as_array().unwrap().len());
                assert_eq!(counts.collect::<Vec<_>>(), [10, 10]);
                let at = |percent: &str| row[format!("{part}_per_iter")][percent].as_f64().unwrap();
                assert!(0.0 < at("p50_us") && at("p50_us") <= at("p95_us") && at("p95_us") <= at("p99_us"));
            }
            assert!(["algorithm", "why"].iter().all(|key| !row[*key].as_str().unwrap().is_empty()), "{row}");
        }
        assert_eq!(json["complete"], true);
        let asked = json!({
            "minimum_bytes": 64 << 10, "maximum_bytes": 1 << 20, "step_factor": 16, "warmup_iters": 2, "iterations": 10,
            "iterations_by_size": false, "bind": "core", "type": "float",
            "operations": ["reduce_scatter", "all_gather", "all_reduce"],
        });
        assert_eq!(json["config"], asked);
        assert!(json["env"].is_array() && json["args"].is_array() && json["machine"].is_object());
        assert_eq!(json.get("transport_library"), Some(&Value::Null), "shared memory has no library");
    }
    let twice = bench().run("bench overlap all_gather all_gather -b 64K -e 64K -n 2").success().stdout;
    assert_eq!(twice.lines().filter(|l| !l.starts_with('#') && !l.is_empty()).count(), 1, "{twice}");
}
