//! What `caravan plan` says is what `caravan train` then holds and sends, and it needs nothing of what trains.

use crate::{bench, devices};
use harness::{Bench, Outcome, json_lines};
use serde_json::Value;

/// What stage `stage` of these flags comes to.
fn planned(bench: &Bench, flags: &str) -> Vec<Value> {
    let outcome = bench.run(&format!("plan --json {flags}")).success();
    let plan: Value = serde_json::from_str(&outcome.stdout).expect("one object");
    let stages = plan["stages"].as_array().expect("stages").clone();
    assert_eq!(stages.iter().map(|at| at["stage"].as_u64()).collect::<Vec<_>>(), [0, 1, 2, 3].map(Some));
    stages
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("a number, not {value}"))
}

/// Trains a step at each of these stages, and compares.
fn compare(flags: &str, stages: &[usize]) {
    compare_by(Bench::run, flags, stages);
}

fn compare_by(run: impl Fn(&Bench, &str) -> Outcome, flags: &str, stages: &[usize]) {
    let bench = bench();
    let flags = format!("--model nano --seq 16 --data random --steps 1 --sample 0 --threads 1 {flags}");
    let plan = planned(&bench, &flags);
    for &stage in stages {
        run(&bench, &format!("train --quiet --metrics m.jsonl --stage {stage} {flags}")).success();
        let lines = json_lines(&bench.path("m.jsonl"));
        let ranks = lines[lines.len() - 1]["summary"]["ranks"].as_array().expect("ranks");
        let most = ranks.iter().max_by_key(|rank| number(&rank["memory"]["total"])).expect("a rank");
        assert_eq!(plan[stage]["memory"], most["memory"], "stage {stage}, {flags}");
        let sent = ranks.iter().map(|rank| number(&rank["bytes_sent"])).max();
        assert_eq!(Some(number(&plan[stage]["bytes_sent"])), sent, "stage {stage}, {flags}");
    }
}

#[test]
fn ranks_of_a_host_hold_and_send_what_was_planned() {
    compare("--ranks 2 --micro-batch 3", &[0, 1, 2, 3]);
    compare("--ranks 3 --accumulate 2 --dtype f32 --transport threads --bucket-size 20K", &[0, 2, 3]);
    compare("--ranks 1 --recompute full --accumulate 2", &[0, 3]);
    compare("--ranks 2 --accumulate 9 --reproducible --bucket-size 20K", &[1, 3]);
}

#[test]
fn ranks_of_nodes_hold_and_send_what_was_planned() {
    compare("--ranks 5 --transport shm+shm --ranks-per-node 2:cyclic --bucket-size 20K", &[0, 3]);
    compare(
        "--ranks 4 --transport threads --ranks-per-node 2 --emulate-link latency=20us,bandwidth=1GB/s",
        &[0, 2],
    );
    if bench().offers("ucx") {
        compare("--ranks 2 --transport ucx", &[0, 3]);
        compare("--ranks 4 --transport shm+ucx --ranks-per-node 2 --accumulate 2", &[1, 3]);
    }
}

#[test]
fn ranks_on_gpus_hold_and_send_what_was_planned() {
    if devices::can_emulate() {
        let emulated = |bench: &Bench, args: &str| devices::run(bench, "2,256M", args);
        compare_by(emulated, "--device cuda --ranks 2 --transport threads --micro-batch 2", &[0, 3]);
        compare_by(emulated, "--device cuda --ranks 2 --offload optimizer --accumulate 2", &[1]);
    }
}

#[test]
fn a_plan_needs_neither_gpus_nor_hosts_nor_data() {
    let bench = bench();
    let flags = "--model llama-3.1-70b --device cuda --offload optimizer --transport nccl+ucx --ranks 512 --data nowhere \
                 --micro-batch 1 --seq 4096 --recompute full";
    let stages = planned(&bench, flags);
    let of_gpu = |at: &Value| number(&at["gpu_bytes"]);
    assert!(stages.iter().map(of_gpu).is_sorted_by(|a, b| a >= b));
    // Parameters in bf16, with a little padding, and the optimizer's state, which is not there.
    let held = |at: &Value| number(&at["memory"]["parameters"]);
    let (parameters, gib) = (70_553_706_496 * 2, 1 << 30);
    assert!((parameters..parameters + gib).contains(&held(&stages[0])), "{}", stages[0]);
    assert!(of_gpu(&stages[0]) > 2 * parameters && of_gpu(&stages[3]) < 40 * gib, "{stages:?}");

    // Of more ranks than a host has GPUs some are on others, also where nobody says what is between those.
    let over = |transport: &str| {
        let flags = format!("--model 32m --device cuda --ranks 64 --transport {transport}");
        bench.run(&format!("plan --json {flags}")).success().json()
    };
    let [plain, between] = ["nccl", "nccl+ucx"].map(over);
    assert_eq!((&plain["ranks_of_a_host"], &between["ranks_of_a_host"]), (&Value::Null, &Value::Null));
    assert_eq!(of_gpu(&plain["stages"][3]), of_gpu(&between["stages"][3]));

    // NCCL keeps as much for the neighbours on other hosts as for those on the same.
    let of = |transport: &str| {
        let flags = format!("--model 32m --device cuda --ranks 16 --share-gpus --transport {transport}");
        let plan = bench.run(&format!("plan --json {flags}")).success().json();
        (plan["ranks_of_a_host"].clone(), of_gpu(&plan["stages"][3]))
    };
    let ((eight, over_two), (sixteen, over_one)) = (of("nccl+shm+ucx --ranks-per-node 8"), of("nccl+shm"));
    assert_eq!((eight, sixteen), (8.into(), 16.into()));
    let peer = 2 * 32 * (12 << 20);
    assert_eq!(over_one - over_two, (15 - (7 + 2)) * peer);

    let table =
        bench.run("plan --model 32m --ranks 64 --transport shm+ucx --ranks-per-node 8").success().stdout;
    for words in [
        "32m (31.6M parameters) in bf16 on 64 ranks with ",
        " over shm+ucx/8\n",
        "stage 0     stage 1     stage 2     stage 3\n",
        "\n  the 8 ranks of a host ",
        "\nsent by a rank\n  a step ",
    ] {
        assert!(table.contains(words), "'{words}' is not in {table}");
    }
    // Columns stand below each other.
    let wide = table.lines().find(|line| line.contains("stage 3")).expect("a header").len();
    assert!(
        table.lines().filter(|line| line.contains("  ") && line.contains('B')).all(|line| line.len() == wide)
    );

    bench.run("plan --ranks 64 --transport shm+ucx").refusal(2, &["shm+ucx", "add --ranks-per-node K"]);
    bench.nothing_left();
}

/// ZeRO's arithmetic, of parameters alone: Rajbhandari et al., 2020. In 16 bits 2 bytes a parameter, 2 of its gradient and 12 of
/// the optimizer, f32 weights and both moments; in 32 bits 4, 4 and 8. What a rank holds beside that is padding.
#[test]
fn each_stage_divides_what_the_textbook_says_and_the_rest_is_padding() {
    let bench = bench();
    let parameters = 6_738_415_616;
    // Bytes of a parameter on each rank, and those that ranks divide among them.
    for (dtype, ranks, stages) in
        [("bf16", 8, [(16, 0), (4, 12), (2, 14), (0, 16)]), ("f32", 3, [(16, 0), (8, 8), (4, 12), (0, 16)])]
    {
        let flags = format!("--model llama-2-7b --dtype {dtype} --ranks {ranks}");
        for (at, (each, divided)) in planned(&bench, &flags).iter().zip(stages) {
            let classes = ["parameters", "gradients", "optimizer"].map(|name| number(&at["memory"][name]));
            let (held, padding) = (classes.iter().sum::<u64>(), number(&at["padding_bytes"]));
            assert_eq!(held - padding, parameters * (ranks * each + divided) / ranks, "{dtype}: {at}");
            assert!(0 < padding && padding < held / 1000, "{dtype}: {at}");
        }
        let table = bench.run(&format!("plan {flags}")).success().stdout;
        let names = table.lines().map(|line| line.trim_start().split("  ").next().unwrap_or_default());
        let names: Vec<&str> = names.skip_while(|name| *name != "optimizer").take(2).collect();
        assert_eq!(names, ["optimizer", "of which padding"], "{table}");
    }
    bench.nothing_left();
}

/// It would be refused when ranks meet.
#[test]
fn a_table_with_what_cannot_carry_its_collective_is_no_plan() {
    let bench = bench();
    bench.file("t.txt", "caravan-tuning 1\nthreads 2 reduce_scatter all direct-read direct-read\n");
    let flags = "--model nano --data random --seq 16 --micro-batch 1 --steps 1 --ranks 2 --transport threads --tuning t.txt";
    let words =
        ["direct-read for reduce_scatter of threads with 2 ranks, which cannot carry it here (pairwise"];
    bench.run(&format!("plan {flags}")).refusal(2, &words);
    bench.run(&format!("train {flags} --sample 0")).refusal(2, &words);
}
