//! Wrong usage: each ends with exit code 2 and one sentence that says what was asked and what is possible, before
//! any rank starts.

use crate::{bench, word_tokenizer};
use std::fs;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::process::Command;

#[test]
fn flags_that_make_no_sense_are_refused() {
    let bench = bench();
    bench.text("text.txt", 20_000);
    let cases: &[(&str, &[&str])] = &[
        ("--model llama-9", &["'llama-9'", "nano", "llama-3.1-8b"]),
        ("--model no/such/dir", &["no/such/dir", "config.json", "nano"]),
        ("--ranks 0", &["--ranks 0", "1 to"]),
        ("--ranks 99999", &["--ranks 99999", "1 to"]),
        ("--threads 0", &["--threads 0"]),
        ("--transport carrier-pigeon", &["carrier-pigeon", "shm and threads"]),
        ("--transport nccl-over-post", &["nccl-over-post", "mpi and ucx"]),
        ("--stage 4", &["4", "0, 1, 2 or 3"]),
        ("--stage two", &["two", "0, 1, 2 or 3"]),
        ("--steps 0", &["--steps 0"]),
        ("--micro-batch 0", &["--micro-batch 0"]),
        ("--accumulate 0", &["--accumulate 0"]),
        ("--seq 0", &["--seq 0"]),
        ("--seq 65", &["--seq 65", "context of 64"]),
        ("--lr -1", &["--lr -1: ", "above 0"]),
        ("--lr 1e-400", &["'1e-400'", "--lr", "too small"]),
        ("--lr 1e-50", &["--lr 1e-50", "in 32 bits"]),
        ("--lr nan", &["--lr nan: it must be a number above 0"]),
        ("--lr inf", &["--lr inf", "finite"]),
        ("--lr 1e39", &["--lr 1e39", "finite in 32 bits"]),
        ("--min-lr 1", &["--min-lr 1", "from 0 to --lr 0.001"]),
        ("--min-lr 1e-4 --schedule constant", &["--min-lr 1e-4 ", "--schedule linear or cosine"]),
        ("--eval-every 5 --val-fraction 0", &["--eval-every 5", "--val-fraction 0.1"]),
        ("--eval-every 5 --order sequential", &["--eval-every 5", "--val-fraction 0.1"]),
        ("--eval-tokens 5 --val-fraction 0", &["--eval-tokens 5", "--val-fraction 0.1"]),
        ("--beta1 1", &["--beta1 1", "below 1"]),
        ("--beta2 -0.1", &["--beta2 -0.1"]),
        ("--eps 0", &["--eps 0", "above 0"]),
        ("--eps 1e-50", &["--eps 1e-50", "in 32 bits"]),
        ("--weight-decay -0.1", &["--weight-decay -0.1"]),
        ("--clip -1", &["--clip -1", "0 clips nothing"]),
        ("--clip 1e-30", &["--clip 1e-30", "its square is above 0 in 32 bits"]),
        ("--eval-tokens 0", &["--eval-tokens 0"]),
        (
            "--eval-tokens 5 --steps 500",
            &["--eval-tokens 5", "500 --steps", "lower --eval-every, which is 500"],
        ),
        ("--eval-tokens 5 --eval-every 0", &["--eval-tokens 5", "lower --eval-every, which is 0"]),
        ("--steps 10 --warmup 11", &["--warmup 11", "10"]),
        ("--steps 10 --warmup 10 --min-lr 1e-4", &["--min-lr 1e-4 ", "lower --warmup"]),
        ("--val-fraction 1", &["--val-fraction 1", "below 1"]),
        ("--bucket-size 0", &["--bucket-size 0"]),
        ("--bucket-size lots", &["'lots'", "64K"]),
        ("--rendezvous-timeout 0", &["--rendezvous-timeout 0"]),
        ("--call-timeout NaN", &["--call-timeout NaN", "at least 0.001"]),
        ("--emulate-link bandwidth=1B/s", &["bandwidth=1B/s", "--call-timeout 600", "bandwidth=55926B/s"]),
        ("--metrics no/such/dir/m.jsonl", &["--metrics", "no/such/dir"]),
        ("--metrics .", &["--metrics", "directory"]),
        ("--metrics /proc/m.jsonl", &["--metrics /proc/m.jsonl"]),
        ("--save text.txt", &["--save: ", "text.txt", "not a directory"]),
        (
            "--model llama-3.1-405b --data random --seq 64 --micro-batch 1",
            &["2 ranks would hold", "optimizer's state alone take 5.", "TiB, so take a smaller --model"],
        ),
        (
            "--model nano --data random --seq 64 --micro-batch 4000000 --stage 2 --recompute full",
            &[
                "2 ranks would hold",
                "fewer --ranks, or a higher --stage",
                "; 'caravan plan' with the same flags",
            ],
        ),
        (
            "--model nano --data random --seq 64 --micro-batch 4000000 --stage 2 --ranks 1",
            &["1 rank would hold", "smaller --model, --micro-batch or --seq, or --recompute full"],
        ),
        ("--micro-batch 1 --accumulate 1000", &["1000 micro-batches", "lower --accumulate"]),
        ("--micro-batch 1000000000 --accumulate 1000000000", &["2^40", "--micro-batch"]),
    ];
    for (flags, words) in cases {
        // A flag that the case gives itself is not given twice.
        let model = if flags.contains("--model") { "" } else { "--model nano" };
        let data = if flags.contains("--data") { "" } else { "--data text.txt" };
        bench.run(&format!("train {model} {data} {flags}")).refusal(2, words);
    }
    bench.nothing_left();
    let left: Vec<_> = fs::read_dir(bench.path(".")).unwrap().flatten().map(|e| e.file_name()).collect();
    assert_eq!(left, ["text.txt"], "nothing was written");
}

#[test]
fn unknown_flags_and_commands_are_refused_by_name() {
    let bench = bench();
    for (args, word) in
        [("train --speed 11", "--speed"), ("fly", "fly"), ("train --dtype f8", "f8"), ("", "Usage")]
    {
        let outcome = bench.run(args);
        assert_eq!(outcome.code, Some(2), "{args}");
        assert!(outcome.stderr.contains(word), "{args}: {}", outcome.stderr);
    }
}

#[test]
fn a_launcher_that_disagrees_is_named() {
    let bench = bench();
    bench.text("text.txt", 20_000);
    let run = |flags: &str, variables: &[(&str, &str)]| {
        let mut command = bench.command(&format!("train --model nano --data text.txt {flags}"));
        command.envs(variables.iter().copied());
        bench.outcome(&mut command)
    };
    let two = [("CARAVAN_RANK", "0"), ("CARAVAN_WORLD", "2")];
    let words = [
        "rank 0 on ",
        "--ranks 3",
        "one of 2 ranks that whoever set CARAVAN_RANK started",
        "-u CARAVAN_RANK",
    ];
    run("--ranks 3 --rendezvous-timeout 0.1", &two).refusal(2, &words);
    // An interactive shell is a step of one task; what the sentence names starts ranks there.
    let step = [("SLURM_STEP_ID", "0"), ("SLURM_STEPID", "0"), ("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1")];
    run("--ranks 2", &step)
        .refusal(2, &["--ranks 2", "srun", "env -u SLURM_STEP_ID -u SLURM_STEPID caravan"]);
    run("--steps 1 --micro-batch 1 --sample 0 --ranks 2", &step[2..]).success();
    // What a shell of Slurm's leaves is not taken for that of a step which was started from it.
    let left = [&step[..3], &[("SLURM_NTASKS", "4"), ("PMI_RANK", "0"), ("PMI_SIZE", "1")]].concat();
    // A launcher above these tests would decide it.
    let above = ["SLURM_JOB_ID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"];
    if above.iter().any(|name| std::env::var_os(name).is_some()) {
        harness::skip("variables that an outer launcher has left: these tests have one above them");
    } else {
        let words = ["rank 0 of 4", "rank 0 of 1", "'env -u PMI_RANK -u PMI_SIZE caravan ...'"];
        run("", &left).refusal(2, &words);
    }
    let slurmstepd = bench.path("slurmstepd");
    std::os::unix::fs::symlink("/bin/sh", &slurmstepd).unwrap();
    let mut command = Command::new(slurmstepd);
    bench.prepare(&mut command);
    let line = format!(
        "'{}' train --model nano --data text.txt --ranks 3 --rendezvous-timeout 0.1; exit $?",
        env!("CARGO_BIN_EXE_caravan")
    );
    command.args(["-c", &line]).envs(left);
    bench.outcome(&mut command).refusal(2, &["--ranks 3", "one of 4 ranks that srun started"]);
    // Ranks of PyTorch's that no torchrun has started would each be a run.
    let torch = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "node7")];
    run("", &torch).refusal(2, &["RANK=1", "CARAVAN_RANK=1", "CARAVAN_RENDEZVOUS=node7:PORT", "--ranks N"]);
    run("--steps 1 --micro-batch 1 --sample 0 --ranks 2", &torch).success();
    // Of Flux's and PALS's that got no PMI, too.
    let flux = [("FLUX_TASK_RANK", "1"), ("FLUX_JOB_SIZE", "2")];
    for one in [&flux[..], &[("PALS_RANKID", "1")]] {
        run("", one).refusal(2, &[&format!("{}=1 is set", one[0].0), "CARAVAN_WORLD", "--ranks N"]);
    }
    run("--transport threads", &two).refusal(2, &["threads", "--transport shm"]);
    run("", &[("CARAVAN_RANK", "2"), ("CARAVAN_WORLD", "2")]).refusal(2, &["caravan: CARAVAN_RANK=2"]);
    // Variables may be left in a shell of what runs no more; and only some commands come late because they read data.
    let (left, slow) = ("'env -u CARAVAN_RANK -u CARAVAN_WORLD caravan ...'", "if it still reads its data");
    run("--rendezvous-timeout 0.2", &two).refusal(1, &["rank 0", "rank 1", left, slow]);
    let mut command = bench.command("bench all_reduce --rendezvous-timeout 0.2");
    let told = bench.outcome(command.envs(two)).refusal(1, &["rank 1 of 2 did not arrive", left]);
    assert!(!told.stderr.contains(slow), "{}", told.stderr);
}

/// Where something else starts ranks, `--ranks` would be refused.
#[test]
fn what_is_advised_of_ranks_is_not_refused_next() {
    let bench = bench();
    let run = |args: &str, world: Option<&str>| {
        let mut command = bench.command(args);
        command.envs(world.into_iter().flat_map(|world| [("CARAVAN_RANK", "0"), ("CARAVAN_WORLD", world)]));
        bench.outcome(&mut command)
    };
    for args in ["bench send_recv", "bench tune"] {
        run(&format!("{args} --ranks 1"), None).refusal(2, &["take --ranks 2 or more"]);
        let told = run(args, Some("1")).refusal(2, &["start 2 ranks or more"]);
        assert!(!told.stderr.contains("--ranks"), "{}", told.stderr);
    }
    run("bench all_reduce -g 8", None).refusal(2, &["take --ranks 8"]);
    run("bench all_reduce -g 8 --rendezvous-timeout 0.1", Some("2")).refusal(2, &["start 16 ranks"]);
}

/// Such as one for padding, which nobody wrote into a text.
#[test]
fn added_tokens_outside_the_vocabulary_are_refused_with_the_text_that_has_one() {
    let bench = bench();
    bench.text("text.txt", 8000);
    let words = fs::read(word_tokenizer(&bench, 256)).unwrap();
    let mut padded: serde_json::Value = serde_json::from_slice(&words).unwrap();
    padded["added_tokens"] = serde_json::json!([{
        "id": 256, "content": "<pad>", "special": true, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false,
    }]);
    bench.file("padded.json", padded.to_string());
    let train = "train --model nano --tokenizer padded.json --steps 1 --micro-batch 1 --sample 400";
    bench.run(&format!("{train} --data text.txt --save m")).success();
    bench.run("eval --model m --data text.txt").success();
    bench.file("odd.txt", "one model\n".repeat(300) + "and <pad> there");
    for run in [&*format!("{train} --data text.txt odd.txt"), "eval --model m --data text.txt odd.txt"] {
        bench.run(run).refusal(2, &["odd.txt has '<pad>'", ".json", "token 256", "larger vocabulary"]);
    }
}

/// Each host looks whether it can hold its own ranks, whoever starts them.
#[test]
fn ranks_of_a_launcher_that_a_host_cannot_hold_are_refused() {
    let bench = bench();
    let train = "train --model llama-3.1-405b --data random --seq 64 --micro-batch 1";
    let huge = harness::more_than_memory();
    for (local, holds) in [("4", "4 ranks would hold"), ("2", "2 ranks would hold")] {
        let bench_all = ["all_reduce", "overlap", "tune"].map(|name| format!("bench {name} -e {huge}G"));
        for args in bench_all.iter().map(String::as_str).chain([train]) {
            let mut command = bench.command(&format!("{args} --rendezvous-timeout 0.1"));
            command.envs([("CARAVAN_RANK", "0"), ("CARAVAN_WORLD", "8"), ("CARAVAN_LOCAL_SIZE", local)]);
            bench.outcome(&mut command).refusal(2, &[holds, "TiB", "this machine has"]);
        }
    }
    bench.nothing_left();
}

#[test]
fn ranks_with_other_weights_or_another_tokenizer_are_named() {
    let bench = bench();
    bench.text("text.txt", 20_000);
    for seed in [1, 2] {
        let flags = "--model nano --data text.txt --steps 1 --micro-batch 1 --sample 0 --quiet --ranks 1";
        bench.run(&format!("train {flags} --seed {seed} --save m{seed}")).success();
    }
    bench.run("tokenize --data text.txt --out t.bin").success();
    word_tokenizer(&bench, 100);
    word_tokenizer(&bench, 200);
    let train = "train --model nano --data t.bin --steps 1 --micro-batch 1 --sample 0 --quiet";
    // A tokenizer is also for what is generated.
    let sampled = train.replace("--sample 0 --quiet", "--sample 1");
    for (job, [first, second], word) in [
        (
            "eval",
            ["eval --model m1 --data t.bin", "eval --model m2 --data t.bin"].map(str::to_owned),
            "weights of --model",
        ),
        ("train", ["m1", "m2"].map(|m| train.replace("nano", m)), "weights of --model"),
        ("recompute", ["none", "full"].map(|r| format!("{train} --recompute {r}")), "--recompute"),
        ("metrics", [train.to_owned(), format!("{train} --metrics m.jsonl")], "--metrics"),
        ("tokenizer", [100, 200].map(|n| format!("{sampled} --tokenizer words-{n}.json")), "--tokenizer"),
    ] {
        let start = |rank: &str, args: &str| {
            let mut command = bench.command(args);
            let job = format!("mixed-{job}-{}", std::process::id());
            command.envs([("CARAVAN_RANK", rank), ("CARAVAN_WORLD", "2"), ("CARAVAN_JOB", &job)]);
            command.spawn().unwrap()
        };
        for rank in [start("0", &first), start("1", &second)] {
            bench.finish(rank).refusal(2, &["different arguments", &format!("rank 1 with '{word} ")]);
        }
    }
    bench.nothing_left();
}

#[test]
fn data_that_cannot_be_used_are_refused() {
    let bench = bench();
    bench.text("short.txt", 100);
    bench.text("middling.txt", 200);
    bench.text("long.txt", 20_000);
    bench.file("empty.txt", "");
    bench.file("latin1.txt", b"na\xefve ".repeat(2000));
    bench.file("void/picture.png", "no text");
    bench.file("torn.bin", [20240520i32, 1, 5].map(i32::to_le_bytes).concat());
    let cases: &[(&str, &[&str])] = &[
        ("--data none.txt", &["none.txt", "no such file"]),
        ("--data empty.txt", &["empty", "empty.txt"]),
        ("--data latin1.txt", &["latin1.txt", "not UTF-8", "0xef at offset 2"]),
        ("--data void", &["no text below void", "token files (.bin)"]),
        ("--data /dev/null", &["--data /dev/null", "not a regular file", "--data takes UTF-8 text"]),
        ("--data torn.bin", &["torn.bin", "12 bytes"]),
        ("--data short.txt", &["shorter than one batch", "2 ranks", "--micro-batch"]),
        (
            "--data long.txt --micro-batch 1 --val-fraction 0.999",
            &["20 for training beside 19980 that are", "--ranks or --val-fraction"],
        ),
        ("--data middling.txt --micro-batch 1", &["holds out 20 of 200", "--val-fraction 0"]),
        (
            "--data middling.txt --micro-batch 1 --val-fraction 1e-2",
            &["--val-fraction 1e-2 holds out 2 of 200"],
        ),
        ("--data random short.txt", &["random"]),
        ("", &["no text below"]),
    ];
    for (flags, words) in cases {
        let mut command = bench.command(&format!("train --model nano {flags}"));
        if flags.is_empty() {
            command.current_dir(bench.path("void"));
        }
        bench.outcome(&mut command).refusal(2, words);
    }
    // Only what can be lower, and helps, is advised: nobody here chooses how many ranks another starts.
    for (flags, variables, advice) in [
        (
            "--micro-batch 1",
            &[("CARAVAN_RANK", "0"), ("CARAVAN_WORLD", "1")][..],
            "give more --data or lower --seq or --val-fraction",
        ),
        ("--micro-batch 1 --seq 1 --accumulate 100 --ranks 1", &[], "give more --data or lower --accumulate"),
        ("--micro-batch 1", &[], "give more --data or lower --seq or --ranks"),
    ] {
        let mut command =
            bench.command(&format!("train --model nano --data short.txt --val-fraction 0.5 {flags}"));
        let told = bench.outcome(command.envs(variables.iter().copied()));
        let told = told.refusal(2, &["shorter than one batch", advice]);
        assert!(told.stderr.trim_end().ends_with(advice), "{}", told.stderr);
    }
    // A file with no blocks on the disk.
    let many = fs::File::create(bench.path("many.txt")).unwrap();
    many.set_len(1 << 31).unwrap();
    bench
        .run("tokenize --data many.txt --out many.bin")
        .refusal(2, &["2147483648 bytes of text", "at most 2147483647", "several"]);
}

#[test]
fn what_is_read_is_not_overwritten_and_what_is_saved_is_not_lost() {
    let bench = bench();
    let text = fs::read(bench.text("text.txt", 8000)).unwrap();
    std::os::unix::fs::symlink("text.txt", bench.path("link.txt")).unwrap();
    std::os::unix::fs::symlink("nothing", bench.path("dangling")).unwrap();
    let train = "train --model nano --data text.txt --steps 1 --micro-batch 1 --sample 0 --quiet";
    bench.run(&format!("{train} --metrics text.txt")).refusal(2, &["--metrics text.txt", "overwrite"]);
    bench.run(&format!("{train} --metrics link.txt")).refusal(2, &["link.txt", "text.txt", "overwrite"]);
    bench.run("tokenize --data text.txt --out link.txt").refusal(2, &["--out link.txt", "overwrite"]);
    bench.run("tokenize --data text.txt --out /dev/null").refusal(2, &["/dev/null", "no regular file"]);
    assert_eq!(fs::read(bench.path("text.txt")).unwrap(), text);
    // Each of these would have been found out after training only.
    bench.run(&format!("{train} --save dangling")).refusal(2, &["dangling", "link to nothing"]);
    bench.run(&format!("{train} --save m")).success();
    bench.run(&format!("{train} --save m --metrics m/m.jsonl")).refusal(2, &["m/m.jsonl", "--save", "/m,"]);
    bench.run(&format!("{train} --save n --metrics n")).refusal(2, &["--metrics n ", "--save", "/n,"]);
    bench.run(&format!("{train} --save p --metrics p/m.jsonl")).refusal(2, &["p/m.jsonl", "--save", "/p,"]);
    bench.run(&format!("{train} --save o/n --metrics o")).refusal(2, &["--metrics o ", "--save", "/o/n,"]);
    // By another way to the same place, too.
    std::os::unix::fs::symlink(".", bench.path("here")).unwrap();
    fs::create_dir(bench.path("runs")).unwrap();
    for flags in
        ["--save here/n --metrics here/n", "--save here/o/n --metrics o", "--save runs/../n --metrics n"]
    {
        bench.run(&format!("{train} {flags}")).refusal(2, &["lies in the way of --save", "/n,"]);
    }
    // What a model is read from, too.
    word_tokenizer(&bench, 100);
    let weights = fs::read(bench.path("m/model.safetensors")).unwrap();
    let again = train.replace("nano", "m");
    bench
        .run(&format!("{again} --metrics m/model.safetensors"))
        .refusal(2, &["overwrite m/model.safetensors"]);
    bench
        .run(&format!("{train} --tokenizer words-100.json --metrics words-100.json"))
        .refusal(2, &["overwrite"]);
    bench
        .run("tokenize --data text.txt --tokenizer words-100.json --out words-100.json")
        .refusal(2, &["overwrite"]);
    assert_eq!(fs::read(bench.path("m/model.safetensors")).unwrap(), weights);
    bench
        .run(&format!("{train} --save m --metrics new/"))
        .refusal(2, &["--metrics new/", "names a directory"]);
    // As shells complete a directory's name.
    bench.run(&format!("{train} --save new/ --metrics m.jsonl")).success();
    assert!(bench.path("new/config.json").is_file());
    // A name that is no text is as good as any.
    let name = std::ffi::OsStr::from_bytes(b"m\xff");
    let mut command = bench.command(&format!("{train} --metrics run.jsonl"));
    bench.outcome(command.arg("--save").arg(name)).success();
    assert!(bench.path(".").join(name).join("config.json").is_file());
    assert!(fs::read_to_string(bench.path("run.jsonl")).unwrap().contains("m\u{fffd}"));
}

#[test]
fn token_files_and_text_do_not_mix_and_tokens_fit_the_vocabulary() {
    let bench = bench();
    bench.text("text.txt", 8000);
    bench.run("tokenize --data text.txt --out a.bin").success();
    bench.run("train --model nano --data a.bin text.txt").refusal(2, &["text.txt", "caravan tokenize"]);
    // Tokens of a larger vocabulary than the model's are found before ranks start.
    let header = [20240520i32, 1, 4000].map(i32::to_le_bytes).concat();
    let tokens = (0..4000u16).flat_map(|i| if i == 77 { 300 } else { i % 256 }.to_le_bytes());
    let mut bytes = header;
    bytes.resize(1024, 0);
    bytes.extend(tokens);
    bench.file("large.bin", bytes);
    let flags = "train --model nano --data large.bin --steps 9 --micro-batch 1 --order sequential --quiet";
    bench.run(flags).refusal(2, &["token 77", "large.bin", "300", "256"]);
    bench.run(&format!("{flags} --transport threads")).refusal(2, &["token 77", "large.bin", "300", "256"]);
    bench.nothing_left();
}

#[test]
fn what_only_other_commands_take_is_told_so() {
    let bench = bench();
    bench.text("text.txt", 20_000);
    bench.run("tokenize --data text.txt --out t.bin").success();
    bench
        .run("train --model nano --data text.txt --steps 1 --micro-batch 1 --sample 0 --quiet --save m")
        .success();
    let outcome = bench.run("eval --model m --data random").refusal(2, &["--data random", "'caravan train'"]);
    assert!(!outcome.stderr.contains("nor is it"), "{}", outcome.stderr);
    bench.run("tokenize --data random --out r.bin").refusal(2, &["--data random", "'caravan train'"]);
    let outcome =
        bench.run("tokenize --data t.bin --out r.bin").refusal(2, &["t.bin", "tokenize takes UTF-8 text"]);
    assert!(!outcome.stderr.contains("made by"), "{}", outcome.stderr);
    // A file of the name that random tokens go by in reports.
    bench.text("random tokens", 20_000);
    let mut command = bench.command("eval --model m --json --data");
    command.arg("random tokens");
    let told = bench.outcome(&mut command).success().json();
    assert_eq!(told["data"]["source"], "random tokens");
    let mut command = bench.command("train --model nano --steps 1 --micro-batch 1 --sample 0 --data");
    command.arg("random tokens");
    let told = bench.outcome(&mut command).success();
    assert!((told.stdout + &told.stderr).contains("tokens of random tokens"));
}

#[test]
fn a_model_directory_that_is_not_whole_is_refused() {
    let bench = bench();
    bench.text("text.txt", 8000);
    bench
        .run("train --model nano --data text.txt --steps 1 --micro-batch 1 --sample 0 --save m --quiet")
        .success();
    let config = fs::read_to_string(bench.path("m/config.json")).unwrap();
    let with = |from: &str, to: &str| {
        assert!(config.contains(from), "{from} in {config}");
        fs::write(bench.path("m/config.json"), config.replace(from, to)).unwrap();
    };
    let refused = |words: &[&str]| {
        bench.run("train --model m --data text.txt").refusal(2, words);
        bench.run("eval --model m --data text.txt").refusal(2, words);
    };
    with("\"num_attention_heads\": 4", "\"num_attention_heads\": 3");
    refused(&["3 heads", "2 key/value heads"]);
    with("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3");
    refused(&["model.layers.2."]);
    with("\"intermediate_size\": 176", "\"intermediate_size\": 172");
    refused(&["mlp", "172"]);
    fs::write(bench.path("m/config.json"), &config).unwrap();
    fs::remove_file(bench.path("m/model.safetensors")).unwrap();
    refused(&["model.safetensors"]);
    fs::remove_file(bench.path("m/config.json")).unwrap();
    refused(&["config.json"]);
    bench.run("eval --model none --data text.txt").refusal(2, &["--model none is not there"]);
    bench
        .run("eval --model nano --data text.txt")
        .refusal(2, &["--model nano is a shape", "no weights", "train --save"]);
}

/// A process manager is asked to end the job only by what other ranks would wait for.
#[test]
fn a_typing_error_ends_the_job_only_where_there_are_ranks() {
    let bench = bench();
    for (args, ends) in [
        ("", false),
        ("doctor --bogus", false),
        ("tokenize", false),
        ("report", false),
        ("sbatch --bogus", false),
        ("bench plot", false),
        ("bench kernels --bogus", false),
        ("train --bogus", true),
        ("bench all_reduce --bogus", true),
    ] {
        let (theirs, mut manager) = UnixStream::pair().unwrap();
        rustix::io::fcntl_setfd(&theirs, rustix::io::FdFlags::empty()).unwrap();
        let mut command = bench.command(args);
        let variables = [("PMI_RANK", "0".to_owned()), ("PMI_SIZE", "2".to_owned())];
        command.envs(variables).env("PMI_FD", theirs.as_raw_fd().to_string());
        assert_eq!(bench.outcome(&mut command).code, Some(2), "{args}");
        manager.set_nonblocking(true).unwrap();
        let mut said = [0; 64];
        let bytes = manager.read(&mut said).unwrap_or(0);
        let said = String::from_utf8_lossy(&said[..bytes]);
        assert_eq!(said.contains("cmd=abort"), ends, "caravan {args} said {said:?}");
    }
}
