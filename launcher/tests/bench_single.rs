//! Single calls (`-I 1`): the table's columns, and what the file has of each rank.

use harness::Bench;
use serde_json::Value;

fn bench() -> Bench {
    Bench::new(env!("CARGO_BIN_EXE_caravan"))
}

#[test]
fn columns_of_single_calls_are_of_the_slowest_rank_as_in_nccl_tests() {
    let bench = bench();
    let line = "bench all_reduce -b 1K -e 64K -n 20 -a 2 -I 1 --ranks 3 --json r.json";
    let text = bench.run(line).success().stdout;
    let json = bench.json("r.json");
    assert_eq!(json["config"]["per_iter_timing"], "true");
    let rows: Vec<&str> = text.lines().filter(|l| !l.starts_with('#') && !l.is_empty()).collect();
    let mut greater = 0;
    for (row, exact) in rows.iter().zip(json["results"].as_array().unwrap()) {
        let fields: Vec<f64> = row.split_whitespace().skip(5).map(|field| field.parse().unwrap()).collect();
        for (half, name) in fields.chunks_exact(8).zip(["out_of_place", "in_place"]) {
            for (shown, key) in half[4..7].iter().zip(["min_us", "max_us", "p99_us"]) {
                let of = |kind: &str| exact[format!("{name}_{kind}")][key].as_f64().unwrap();
                // The file says the same by nccl-tests' name, and by ours what the fastest rank took, by -a 2.
                let (slowest, fastest) = (of("per_iter"), of("calls"));
                assert!((*shown - slowest).abs() <= 0.5, "{key} {shown} {slowest}");
                assert!(slowest >= fastest, "{key} {slowest} {fastest}");
                greater += usize::from(slowest > fastest);
            }
            let single = &exact[format!("{name}_per_iter")];
            assert_eq!(single["skipped_iterations"], 0);
            // Each rank's, of which the slowest are the row's.
            let numbers = |times: &Value| {
                times.as_array().unwrap().iter().map(|time| time.as_f64().unwrap()).collect::<Vec<_>>()
            };
            let each: Vec<Vec<f64>> =
                single["per_process_max_times_us"].as_array().unwrap().iter().map(numbers).collect();
            let times = numbers(&single["times_us"]);
            assert!(each.len() == 3 && each.iter().all(|times| times.len() == 20), "{single}");
            for (call, slowest) in times.iter().enumerate() {
                assert!(each.iter().any(|times| times[call] == *slowest), "{call} {slowest} {each:?}");
                assert!(each.iter().all(|times| times[call] <= *slowest), "{call} {slowest} {each:?}");
            }
        }
    }
    assert!(rows.len() == 4 && greater > 0, "{text}");
}

/// Of messages and their answers only who began is timed, and only its times are the row's.
#[test]
fn lists_of_ranks_are_there_where_all_ranks_are_timed() {
    for (messages, ranks, timed) in [
        ("", 3, true),
        ("--one-way", 2, true),
        ("--one-way", 3, false),
        ("--ping-pong", 2, false),
        ("--ping-pong", 4, false),
    ] {
        let bench = bench();
        let line = format!("bench send_recv {messages} -b 8 -e 8 -n 9 -I 1 --ranks {ranks} --json r.json");
        let text = bench.run(&line).success().stdout;
        let over = if timed { "max over ranks " } else { "max over timed ranks " };
        assert!(text.contains(over), "{text}");
        let json = bench.json("r.json");
        for half in ["out_of_place_per_iter", "in_place_per_iter"] {
            let single = &json["results"][0][half];
            let numbers = |times: &Value| -> Vec<f64> {
                times.as_array().unwrap().iter().map(|time| time.as_f64().unwrap()).collect()
            };
            let times = numbers(&single["times_us"]);
            let each = single["per_process_max_times_us"].as_array();
            assert_eq!(each.map(Vec::len), timed.then_some(ranks), "{messages} {single}");
            let each: Vec<Vec<f64>> = each.into_iter().flatten().map(numbers).collect();
            let slowest = |call: usize| each.iter().map(|times| times[call]).fold(0.0, f64::max);
            assert!(
                times.len() == 9 && (0..9).all(|call| !timed || slowest(call) == times[call]),
                "{single}"
            );
        }
    }
}
