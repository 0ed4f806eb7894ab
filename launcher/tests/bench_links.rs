//! Emulated links and nodes as users ask for them. Times are only bounded from below, which holds on any machine.

use harness::Bench;
use serde_json::Value;
use std::fs;

fn bench() -> Bench {
    Bench::new(env!("CARGO_BIN_EXE_caravan"))
}

/// What `--json` wrote.
fn results(bench: &Bench) -> Value {
    bench.json("r.json")
}

/// The time and bus bandwidth of each half of each row.
fn halves(json: &Value) -> Vec<(f64, f64)> {
    let rows = json["results"].as_array().unwrap();
    let halves = rows.iter().flat_map(|row| [&row["out_of_place"], &row["in_place"]]);
    halves
        .map(|half| {
            assert_eq!(half["nwrong"], 0, "{half}");
            (half["time"].as_f64().unwrap(), half["bus_bw"].as_f64().unwrap())
        })
        .collect()
}

#[test]
fn a_link_bounds_time_and_bandwidth() {
    let link = "latency=500us,hops=2,bandwidth=200MB/s";
    for (flags, label, least_us) in [
        // 1 ms and 1 MiB at 200 MB/s; sums of two ranks send half of it twice, or all of it once.
        ("send_recv --transport threads", "threads", 1000.0 + 5242.88),
        ("send_recv --transport shm", "shm", 1000.0 + 5242.88),
        ("all_reduce --transport shm", "shm", 1000.0 + 5242.88),
        ("all_gather --transport shm+shm --ranks-per-node 1", "shm+shm/1", 1000.0 + 2621.44),
        // Behind a link a rank is a node.
        ("all_gather --transport shm+shm", "shm+shm/1", 1000.0 + 2621.44),
        ("all_gather --transport threads+threads", "threads+threads/1", 1000.0 + 2621.44),
    ] {
        let bench = bench();
        let flags =
            format!("{flags} --emulate-link {link} -b 1M -e 1M -n 3 -w 1 -a 3 --ranks 2 --json r.json");
        let outcome = bench.run(&format!("bench {flags}")).success();
        let json = results(&bench);
        // The link as it is understood: without its hops in front.
        let label = format!("{label}@latency=500us,bandwidth=0.2GB/s,hops=2");
        assert_eq!(json["transport"], label.as_str());
        assert!(outcome.stdout.contains(&format!(" transport {label} ranks 2 ")), "{}", outcome.stdout);
        for (time, busbw) in halves(&json) {
            assert!(time >= least_us && busbw <= 0.2, "{flags}: {time} us, {busbw} GB/s");
        }
        bench.nothing_left();
    }
}

#[test]
fn nodes_are_told_and_used() {
    let bench = bench();
    let nodes = "--ranks 5 --transport shm+shm --ranks-per-node 3 --json r.json";
    bench.run(&format!("bench all_gather -b 64K -e 1M -f 16 -n 3 {nodes}")).success();
    let json = results(&bench);
    assert_eq!(json["transport"], "shm+shm/3");
    for row in json["results"].as_array().unwrap() {
        assert_eq!(row["out_of_place"]["algorithm"], "hierarchical", "{row}");
        assert!(row["out_of_place"]["why"].as_str().unwrap().contains("3 ranks share a node"), "{row}");
    }
    assert_eq!(halves(&json).len(), 4);
    for algo in ["hierarchical", "hierarchical-exchange"] {
        bench.run(&format!("bench all_reduce -b 4K -e 4K -n 3 -o all {nodes} --algo {algo}")).success();
        assert_eq!(halves(&results(&bench)).len(), 10);
    }
    // One node: memory is read directly, as over shm alone.
    bench.run("bench all_reduce -b 1M -e 1M -n 2 --ranks 2 --transport shm+shm --json r.json").success();
    let why = results(&bench)["results"][0]["out_of_place"]["why"].to_string();
    assert!(why.contains("volume decides"), "{why}");
    bench.nothing_left();
}

#[test]
fn a_table_is_for_the_nodes_it_was_measured_on() {
    let bench = bench();
    let nodes = "--transport threads+threads --ranks 3";
    let other = "# by hand\ncaravan-tuning 1\n# of the cluster\nucx 9 reduce all linear linear\n";
    bench.file("t.txt", other);
    bench.run(&format!("bench tune -b 1K -e 1K -n 5 {nodes} -o t.txt")).success();
    let table = fs::read_to_string(bench.path("t.txt")).unwrap();
    assert!(table.starts_with(other) && table.contains("\nthreads+threads/3 3 all_reduce "), "{table}");
    let run = |file| bench.run(&format!("bench all_reduce -b 1K -e 1K -n 3 {nodes} --tuning {file}"));
    let measured = run("t.txt").success().stdout;
    assert!(measured.contains("measured to be fastest"), "{measured}");
    bench.file("other.txt", table.replace("threads+threads/3", "threads+threads/2"));
    run("other.txt")
        .refusal(2, &["other.txt", "not for threads+threads/3 with 3 ranks", "another layout", "bench tune"]);
    bench.file("none.txt", table.replace("threads+threads/3", "threads+threads"));
    run("none.txt").refusal(2, &["none.txt", "not for threads+threads/K with 3 ranks", "bench tune"]);
    bench.file("odd.txt", "caravan-tuning 1\nthreads+threads/3 3 all_reduce all binomial binomial\n");
    run("odd.txt").refusal(2, &["odd.txt", "binomial cannot carry all_reduce"]);
    // What only messages need, where peers' memory can be read.
    bench.file("messages.txt", "caravan-tuning 1\nshm 2 all_gather all hierarchical hierarchical\n");
    bench.run("bench all_gather -b 1K -e 1K -n 3 --ranks 2 --transport shm --tuning messages.txt").refusal(
        2,
        &["hierarchical for all_gather of shm with 2 ranks", "cannot carry it here (", "bench tune"],
    );
}

#[test]
fn a_table_is_for_the_link_it_was_measured_over() {
    let bench = bench();
    let link = "--ranks 3 --transport threads --emulate-link latency=50us,bandwidth=1GB/s";
    bench.run(&format!("bench tune -b 1K -e 64K -f 64 -n 5 {link} -o t.txt")).success();
    let table = fs::read_to_string(bench.path("t.txt")).unwrap();
    assert!(table.contains("\nthreads@latency=50us,bandwidth=1GB/s 3 all_reduce "), "{table}");
    let outcome = bench.run(&format!("bench all_reduce -b 1K -e 1K -n 3 {link} --tuning t.txt")).success();
    assert!(outcome.stdout.contains("measured to be fastest"), "{}", outcome.stdout);
    bench.run("bench all_reduce --transport threads --ranks 3 --tuning t.txt").refusal(
        2,
        &[
            "t.txt",
            "threads@latency=50us,bandwidth=1GB/s with 3 ranks",
            "'caravan bench tune --ranks 3 --transport threads -o FILE' measures that",
        ],
    );
    // Without a table the link's cost decides: 52 us at 1 GB/s are worth more bytes than a machine's own latency.
    let by_cost = bench.run(&format!("bench all_reduce -b 32K -e 32K -n 3 {link}")).success();
    assert!(by_cost.stdout.contains("exchange-all, because up to"), "{}", by_cost.stdout);
}
