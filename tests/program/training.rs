//! Training, evaluation and tokens, end to end.

use crate::{bench, word_tokenizer};
use harness::json_lines;
use serde_json::json;
use std::fs;

/// The text of the sample; a machine with much else to do may not make all of it in the time that it gets.
fn sample(stdout: &str) -> &str {
    let (_, rest) = stdout.split_once("\nsample").expect("a sample at the end");
    rest.split_once('\n').expect("a line of its own").1
}

/// All but the number of steps, of which the default takes minutes in a program that is not optimised.
#[test]
fn without_flags_it_trains_on_the_text_that_is_here() {
    let bench = bench();
    bench.text("text.txt", 30_000);
    let outcome = bench.run("train --steps 3").success();
    for words in [
        "training baby (",
        "on 2 ranks x ",
        " over shm, ZeRO stage 3, bf16\n",
        "tokens of ./text.txt, ",
        "tokenizer bytes; 3 steps of 2 ranks x 12 sequences x 64 tokens\n",
        "step 3/3 ",
        "step 3  validation loss ",
    ] {
        assert!(outcome.stderr.contains(words), "'{words}' is not in {}", outcome.stderr);
    }
    let columns = outcome.stdout.lines().next().unwrap_or_default().split_whitespace().collect::<Vec<_>>();
    assert_eq!(columns, ["held", "rank", "0", "rank", "1"], "{}", outcome.stdout);
    assert!(sample(&outcome.stdout).len() > 20, "{}", outcome.stdout);
    assert_eq!(bench.names(), ["text.txt"]);
    bench.nothing_left();
}

#[test]
fn metrics_have_a_run_every_step_and_a_summary() {
    let bench = bench();
    bench.text("text.txt", 30_000);
    let mut command = bench.command(
        "train --model nano --data text.txt --steps 12 --micro-batch 2 --eval-every 5 --sample 20 --metrics m.jsonl",
    );
    let outcome = bench.outcome(command.env("NCCL_DEBUG", "WARN")).success();
    for word in
        ["parameters", "optimizer", "as predicted", "exposed communication", "validation loss", "sample"]
    {
        assert!(outcome.stdout.contains(word), "'{word}' in {}", outcome.stdout);
    }
    assert!(outcome.stderr.contains("step 1/12"), "{}", outcome.stderr);
    let lines = json_lines(&bench.path("m.jsonl"));
    let run = &lines[0]["run"];
    assert_eq!(
        (&run["model"]["parameters"], &run["ranks"], &run["stage"]),
        (&125_248.into(), &2.into(), &3.into())
    );
    // What tells it from models of the same sizes.
    let model = ["rope", "norm_eps", "initializer_range"].map(|key| &run["model"][key]);
    assert_eq!(model, [&json!({"theta": 10_000.0, "scaling": null}), &json!(1e-6), &json!(0.02)]);
    assert!(run["machine"]["cores"].is_u64() && run["versions"]["caravan"].is_string());
    // What was started where, and what it went by.
    let words: Vec<_> = run["args"].as_array().unwrap().iter().map(|word| word.as_str().unwrap()).collect();
    assert_eq!(words[1..4], ["train", "--model", "nano"]);
    assert!(
        run["start_time"].as_str().is_some_and(|time| time.starts_with("20") && time.len() == 19),
        "{run}"
    );
    assert_eq!(run["hosts"], json!([{"host": run["machine"]["host"], "ranks": [0, 1]}]));
    assert_eq!((&run["launcher"], &run["cuda"]), (&json!("caravan"), &json!(null)));
    assert_eq!(run["transport_library"], json!(null));
    let told: Vec<_> = run["env"].as_array().unwrap().iter().map(|line| line.as_str().unwrap()).collect();
    assert!(told.contains(&"NCCL_DEBUG=WARN"), "{told:?}");
    assert!(!told.iter().any(|line| line.contains("TOKEN") || line.starts_with("CARAVAN_RANK=")), "{told:?}");
    // Nor what the program itself has set.
    for line in ["UCX_LOG_FILE=stderr", "NCCL_COMM_BLOCKING=0"] {
        assert!(!told.contains(&line), "{told:?}");
    }
    for (setting, value) in [
        ("transport", json!("shm")),
        ("sample", json!(20)),
        ("save", json!(null)),
        ("eval_every", json!(5)),
        ("eval_tokens", json!(1 << 20)),
        ("val_fraction", json!(0.1)),
        ("val_data", json!(null)),
        ("tuning", json!(null)),
        ("rendezvous_timeout", json!(60.0)),
        ("call_timeout", json!(600.0)),
        ("share_gpus", json!(false)),
        ("ranks_per_node", json!(null)),
        ("emulate_link", json!(null)),
        ("beta1", json!(0.9)),
        ("eps", json!(1e-8)),
        ("flops_per_token", json!(6.0 * 125_248.0 + 12.0 * 2.0 * 64.0 * 64.0)),
    ] {
        assert_eq!(run.get(setting), Some(&value), "{setting}");
    }
    assert_eq!(run["data"]["paths"], json!(["text.txt"]));
    let digest = run["data"]["digest"].as_str().map(str::len);
    assert_eq!((digest, &run["data"]["held_out"]), (Some(16), &json!(3000)), "{run}");
    let steps: Vec<_> = lines.iter().filter(|l| l["step"].is_u64()).collect();
    assert_eq!(steps.len(), 12);
    for (index, line) in steps.iter().enumerate() {
        assert_eq!((&line["step"], &line["tokens"]), (&(index + 1).into(), &(2 * 2 * 64).into()));
        let number = |key: &str| line[key].as_f64().unwrap_or_else(|| panic!("{key} in {line}"));
        let parts =
            number("compute_seconds") + number("exposed_communication_seconds") + number("optimizer_seconds");
        assert!(parts <= number("seconds") * 1.001, "{line}");
        let speed = number("tokens") / number("seconds");
        assert!((number("tokens_per_second") / speed - 1.0).abs() < 1e-9);
        assert!(number("loss") > 0.0 && number("grad_norm") > 0.0 && number("lr") > 0.0);
        assert!(number("bytes_sent") > 0.0);
        let memory = line["memory"].as_object().unwrap();
        let classes = ["parameters", "gradients", "optimizer", "buckets", "activations", "workspace"];
        let sum: u64 = classes.iter().map(|c| memory[*c].as_u64().unwrap()).sum();
        assert_eq!(memory["total"], sum);
    }
    let evaluations: Vec<_> = lines.iter().filter_map(|l| l.get("evaluation")).collect();
    assert_eq!(evaluations.iter().map(|e| e["step"].as_u64().unwrap()).collect::<Vec<_>>(), [5, 10, 12]);
    let summary = &lines[lines.len() - 1]["summary"];
    assert_eq!(summary["tokens"], 12 * 2 * 2 * 64);
    assert_eq!(summary["validation_loss"], evaluations[2]["loss"]);
    let number = |key: &str| summary[key].as_f64().unwrap_or_else(|| panic!("{key} in {summary}"));
    let training = number("seconds") - number("evaluation_seconds");
    assert!(number("evaluation_seconds") > 0.0);
    assert!((number("tokens_per_second") * training / number("tokens") - 1.0).abs() < 1e-9, "{summary}");
    for rank in summary["ranks"].as_array().unwrap() {
        assert_eq!(rank["memory"]["total"], rank["predicted_bytes"], "held as predicted");
    }
    bench.nothing_left();
}

#[test]
fn an_evaluation_of_many_batches_takes_no_memory_beside_the_plan() {
    let bench = bench();
    bench.text("text.txt", 100_000);
    bench
        .run("train --model nano --data text.txt --steps 2 --micro-batch 1 --val-fraction 0.7 --sample 0 --metrics m.jsonl")
        .success();
    let lines = json_lines(&bench.path("m.jsonl"));
    for rank in lines[lines.len() - 1]["summary"]["ranks"].as_array().unwrap() {
        assert_eq!(rank["memory"]["total"], rank["predicted_bytes"], "held as predicted");
    }
}

#[test]
fn a_model_learns_the_text_and_writes_it() {
    let bench = bench();
    bench.text("text.txt", 60_000);
    let outcome = bench
        .run("train --model nano --data text.txt --steps 150 --micro-batch 6 --lr 3e-3 --sample 200 --metrics m.jsonl")
        .success();
    let lines = json_lines(&bench.path("m.jsonl"));
    let first = lines[1]["loss"].as_f64().unwrap();
    let validation = lines[lines.len() - 1]["summary"]["validation_loss"].as_f64().unwrap();
    // Untrained, every byte is as likely as any other: ln 256 = 5.55. The words alone get it below 2.
    assert!((first - 5.55).abs() < 0.2 && validation < 2.0, "{first} to {validation}");
    let sample = sample(&outcome.stdout);
    assert!(sample.len() > 20, "{sample}");
    let letters = sample.chars().filter(|c| c.is_ascii_lowercase() || *c == ' ' || *c == '\n').count();
    assert!(letters * 10 > sample.len() * 9, "{sample}");
}

#[test]
fn a_saved_model_evaluates_as_it_did_when_trained() {
    let bench = bench();
    let text = fs::read(bench.text("text.txt", 30_090)).unwrap();
    // The part that train holds out: int(0.9 * n) on, which leaves no shorter window behind the last.
    bench.file("held-out.txt", &text[27_081..]);
    for dtype in ["bf16", "f32"] {
        let flags =
            format!("--data text.txt --steps 5 --micro-batch 3 --dtype {dtype} --seq 32 --sample 0 --quiet");
        bench.run(&format!("train --model nano {flags} --metrics m.jsonl --save saved")).success();
        let lines = json_lines(&bench.path("m.jsonl"));
        let trained = lines[lines.len() - 1]["summary"]["validation_loss"].as_f64().unwrap();
        // As many windows at once as one likes.
        for ranks in ["--ranks 1", "--ranks 2 --micro-batch 5", "--ranks 3 --transport threads"] {
            let eval = format!("eval --model saved --data held-out.txt --dtype {dtype} --seq 32");
            let json = bench.run(&format!("{eval} {ranks} --json")).success().json();
            assert_eq!(json["loss"].as_f64().unwrap().to_bits(), trained.to_bits(), "{dtype} {ranks}");
        }
        // What was saved is what a further run starts from.
        bench.run(&format!("train --model saved {flags} --lr 0 --metrics m.jsonl --save again")).success();
        let weights = |dir: &str| fs::read(bench.path(dir).join("model.safetensors")).unwrap();
        assert_eq!(weights("saved"), weights("again"), "{dtype}");
    }
    bench.nothing_left();
}

#[test]
fn token_files_train_and_evaluate_like_the_text_they_were_made_of() {
    let bench = bench();
    bench.text("text.txt", 30_000);
    word_tokenizer(&bench, 200);
    let text = "--data text.txt --tokenizer words-200.json";
    let made = bench.run(&format!("tokenize {text} --out words.bin --json")).success().json();
    assert_eq!(made["token_bits"], 16);
    assert!(made["tokens"].as_u64().unwrap() > 4000, "{made}");
    let steps = |data: &str, ranks: &str| {
        bench
            .run(&format!("train --model nano {data} {ranks} --steps 3 --micro-batch 2 --quiet --metrics m.jsonl --save out"))
            .success();
        let lines = json_lines(&bench.path("m.jsonl"));
        lines[1..4].iter().map(|l| l["loss"].to_string()).collect::<Vec<_>>()
    };
    let from_text = steps(text, "");
    // With its tokenizer, a model directory tells later commands how to read text.
    assert!(bench.path("out/tokenizer.json").is_file());
    let eval = |data: &str| bench.run(&format!("eval --model out --data {data} --json")).success().json();
    assert_eq!(eval("text.txt")["loss"], eval("words.bin")["loss"]);
    assert_eq!(eval("text.txt")["tokens"], eval("words.bin")["tokens"]);
    // Every rank holds the whole model and its own batch.
    bench.text("long.txt", 8 << 20);
    let large = "eval --model out --data long.txt --micro-batch 100000 --ranks 1024";
    bench.run(large).refusal(2, &["1024 ranks would hold", "TiB", "lower", "--micro-batch"]);
    assert_eq!(from_text, steps("--data words.bin", ""));
    assert_eq!(from_text, steps(text, "--transport threads"));
}

/// llm.c's format of vocabularies above 65536, which its header tells.
#[test]
fn tokens_of_32_bits_train_and_evaluate_like_those_of_16() {
    let bench = bench();
    bench.text("text.txt", 20_000);
    bench.run("tokenize --data text.txt --out narrow.bin").success();
    let narrow = fs::read(bench.path("narrow.bin")).unwrap();
    let (header, tokens) = narrow.split_at(1024);
    let mut wide = [20240801i32, 7].map(i32::to_le_bytes).concat();
    wide.extend(&header[8..]);
    wide.extend(tokens.chunks(2).flat_map(|token| [token[0], token[1], 0, 0]));
    bench.file("wide.bin", wide);
    let losses = |data: &str| {
        let flags = "--steps 3 --micro-batch 2 --seq 32 --sample 0 --quiet --metrics m.jsonl --save m";
        bench.run(&format!("train --model nano --data {data} {flags}")).success();
        let lines = json_lines(&bench.path("m.jsonl"));
        let mut losses: Vec<_> = lines[1..4].iter().map(|line| line["loss"].to_string()).collect();
        losses.push(lines[lines.len() - 1]["summary"]["validation_loss"].to_string());
        let eval = bench.run(&format!("eval --model m --data {data} --json")).success().json();
        assert_eq!(eval["tokens"], 19_999);
        losses.push(eval["loss"].to_string());
        losses
    };
    assert_eq!(losses("wide.bin"), losses("narrow.bin"));
}

/// By the definition: window s of length T + 1 starts at token s * T, and each micro-batch takes the next B windows.
#[test]
fn steps_in_sequential_order_take_the_tokens_one_after_the_other() {
    let bench = bench();
    let text = fs::read(bench.text("text.txt", 20_000)).unwrap();
    let flags = "--data text.txt --order sequential --dtype f32 --lr 0 --steps 3 --seq 32 --sample 0 --quiet";
    for (split, step) in
        [("--ranks 2 --micro-batch 3 --accumulate 2", 2 * 3 * 2 * 32), ("--ranks 3 --micro-batch 1", 3 * 32)]
    {
        bench.run(&format!("train --model nano {flags} {split} --metrics m.jsonl --save m")).success();
        let lines = json_lines(&bench.path("m.jsonl"));
        assert_eq!(
            (&lines[0]["run"]["data"]["held_out"], &lines[0]["run"]["order"]),
            (&json!(0), &json!("sequential"))
        );
        assert_eq!(lines[lines.len() - 1]["summary"]["validation_loss"], json!(null));
        let mut losses = Vec::new();
        for (k, line) in lines[1..4].iter().enumerate() {
            bench.file("step.txt", &text[k * step..(k + 1) * step + 1]);
            let eval =
                bench.run("eval --model m --data step.txt --dtype f32 --seq 32 --json").success().json();
            assert_eq!((&eval["tokens"], &line["tokens"]), (&json!(step), &json!(step)));
            let (trained, evaluated) = (line["loss"].as_f64().unwrap(), eval["loss"].as_f64().unwrap());
            assert!((trained - evaluated).abs() < 1e-6, "step {}: {trained} {evaluated}", k + 1);
            losses.push(trained);
        }
        // What lies elsewhere has another loss.
        assert!((losses[0] - losses[1]).abs() > 1e-5 && (losses[1] - losses[2]).abs() > 1e-5, "{losses:?}");
    }
}

#[test]
fn each_class_of_memory_is_as_predicted() {
    let bench = bench();
    bench.text("text.txt", 20_000);
    for flags in [
        "--stage 0 --dtype f32",
        "--stage 1 --accumulate 2",
        "--stage 2 --dtype f32 --accumulate 2 --bucket-size 20K",
        "--stage 2 --recompute full",
        "--stage 3 --transport threads --threads 2",
        "--stage 3 --recompute full --bucket-size 20K --prefetch off",
        "--stage 3 --ranks 1",
        "--stage 2 --ranks 1 --accumulate 2",
    ] {
        let common =
            "--data text.txt --steps 2 --micro-batch 2 --sample 0 --quiet --metrics m.jsonl --save m";
        bench.run(&format!("train --model nano {common} {flags}")).success();
        let lines = json_lines(&bench.path("m.jsonl"));
        let summary = &lines[lines.len() - 1]["summary"];
        assert_eq!(summary["ranks"][0]["memory"], summary["predicted_memory"], "{flags}");
        assert_eq!(lines[2]["memory"], summary["predicted_memory"], "{flags}");
        for class in ["parameters", "gradients", "optimizer", "activations", "workspace"] {
            assert!(summary["predicted_memory"][class].as_u64().unwrap() > 0, "{flags}: {class}");
        }
    }
}

#[test]
fn nothing_that_was_asked_for_is_left_out_in_silence() {
    let bench = bench();
    bench.file("corpus/small.txt", "many ranks carry one model ".repeat(200));
    bench.file("corpus/large.txt", "many ranks carry one model\n".repeat(40_000));
    let made = bench.run("tokenize --data corpus --out corpus.bin --json").success().json();
    assert_eq!(made["text_bytes"], 27 * 40_200);
    // Of what nobody named, what is no text is left out and told, and giants are no sources.
    bench.file("corpus/latin1.txt", b"na\xefve");
    let flags = "--steps 1 --micro-batch 1 --sample 0 --ranks 2";
    let mut command = bench.command(&format!("train --model nano {flags}"));
    command.current_dir(bench.path("corpus"));
    let said = bench.outcome(&mut command).success().stderr;
    assert!(
        said.contains("5400 tokens of ./small.txt (without 1 that") && said.contains("latin1.txt"),
        "{said}"
    );
    bench.run(&format!("train --model nano --data corpus {flags}")).refusal(2, &["latin1.txt", "not UTF-8"]);
}

#[test]
fn token_files_of_a_directory_train_and_show_no_sample_without_their_tokenizer() {
    let bench = bench();
    bench.text("text.txt", 8000);
    bench.run("tokenize --data text.txt --out tokens/a.bin").refusal(2, &["tokens/a.bin"]);
    fs::create_dir(bench.path("tokens")).unwrap();
    bench.run("tokenize --data text.txt --out tokens/a.bin").success();
    let train = "train --model nano --data tokens --steps 1 --micro-batch 1 --metrics m.jsonl --save m";
    let outcome = bench.run(train).success();
    assert!(outcome.stderr.contains("no sample will be shown (--tokenizer names it)"), "{}", outcome.stderr);
    assert!(!outcome.stdout.contains("sample"), "{}", outcome.stdout);
    let config = || fs::read_to_string(bench.path("m/config.json")).unwrap();
    assert!(!config().contains("caravan_tokenizer"));
    let outcome = bench.run(&format!("{train} --tokenizer bytes --sample 8")).success();
    assert!(outcome.stdout.contains("sample"), "{}", outcome.stdout);
    assert!(config().contains("\"caravan_tokenizer\": \"bytes\""));
}

/// Each stays open while it is read.
#[test]
fn more_token_files_than_a_process_may_have_open_at_first_are_as_good_as_few() {
    let bench = bench();
    bench.text("text.txt", 400);
    fs::create_dir(bench.path("tokens")).unwrap();
    bench.run("tokenize --data text.txt --out tokens/0.bin").success();
    for i in 1..100 {
        fs::copy(bench.path("tokens/0.bin"), bench.path(&format!("tokens/{i}.bin"))).unwrap();
    }
    let program = env!("CARGO_BIN_EXE_caravan");
    let train = "train --model nano --data tokens --steps 1 --micro-batch 1 --quiet";
    let mut command = std::process::Command::new("bash");
    command.args(["-c", &format!("ulimit -Sn 64; exec {program} {train}")]);
    bench.prepare(&mut command);
    bench.outcome(&mut command).success();
}

/// The directory's own tokenizer is for text: where none is read, one that is of no use keeps nobody from tokens.
#[test]
fn a_tokenizer_that_nobody_needs_is_in_nobody_s_way() {
    let bench = bench();
    bench.text("text.txt", 8000);
    bench.run("tokenize --data text.txt --out t.bin").success();
    let flags = "--steps 1 --micro-batch 1 --metrics m.jsonl";
    bench.run(&format!("train --model nano --data t.bin {flags} --quiet --save m")).success();
    let loss = || bench.run("eval --model m --data t.bin --json").success().json()["loss"].clone();
    let before = loss();
    let large = fs::read(word_tokenizer(&bench, 300)).unwrap();
    for (content, words) in
        [(&large[..], ["vocabulary of 256", "tokens up to 299"]), (b"{}", ["m/tokenizer.json", "not a"])]
    {
        bench.file("m/tokenizer.json", content);
        assert_eq!(loss(), before);
        for data in ["t.bin", "random"] {
            let said = bench.run(&format!("train --model m --data {data} {flags} --save n")).success();
            assert!(said.stderr.contains("tokenizer not known: no sample will be shown"), "{}", said.stderr);
            assert!(fs::read(bench.path("n/tokenizer.json")).unwrap() == content);
        }
        bench.run("eval --model m --data text.txt").refusal(2, &words);
        bench.run(&format!("train --model m --data text.txt {flags}")).refusal(2, &words);
        let asked = format!("train --model m --data t.bin --tokenizer m/tokenizer.json {flags}");
        bench.run(&asked).refusal(2, &words);
    }
}

#[test]
fn an_evaluation_takes_every_token_that_has_one_before_it() {
    let bench = bench();
    bench.text("text.txt", 8000);
    bench
        .run("train --model nano --data text.txt --steps 1 --micro-batch 1 --sample 0 --save m --quiet")
        .success();
    let eval = |flags: &str| bench.run(&format!("eval --model m --json --seq 64 {flags}")).success().json();
    let text = fs::read(bench.path("text.txt")).unwrap();
    for (count, windows) in [(1000, 16), (961, 15), (40, 1), (2, 1)] {
        bench.file("some.txt", &text[..count]);
        let one = eval("--data some.txt --ranks 1");
        assert_eq!((&one["tokens"], &one["windows"]), (&json!(count - 1), &json!(windows)));
        for flags in ["--ranks 3 --transport threads", "--ranks 2 --micro-batch 3 --threads 2"] {
            assert_eq!(eval(&format!("--data some.txt {flags}"))["loss"], one["loss"], "{count} {flags}");
        }
    }
    // To people it is told with fewer digits.
    let one = eval("--data some.txt");
    let (loss, perplexity) = (one["loss"].as_f64().unwrap(), one["perplexity"].as_f64().unwrap());
    assert!((perplexity / std::f64::consts::E.powf(loss) - 1.0).abs() < 1e-12, "{one}");
    let told = bench.run("eval --model m --seq 64 --data some.txt").success().stdout;
    let words = format!("loss {loss:.6} (perplexity {perplexity:.4}) on 1 token in 1 window of 1, f32");
    assert!(told.starts_with(&words), "'{words}' is not in {told}");
    // The mean of both parts, by hand.
    bench.file("first.txt", &text[..961]);
    bench.file("last.txt", &text[960..1000]);
    bench.file("some.txt", &text[..1000]);
    let loss = |name: &str| eval(&format!("--data {name}"))["loss"].as_f64().unwrap();
    let mean = (loss("first.txt") * 960.0 + loss("last.txt") * 39.0) / 999.0;
    assert!((loss("some.txt") - mean).abs() < 1e-6, "{} {mean}", loss("some.txt"));
    bench.file("some.txt", "a");
    bench.run("eval --model m --data some.txt").refusal(2, &["one token", "--data"]);
}

#[test]
fn evaluations_on_the_way_are_bounded_and_the_last_is_whole() {
    let bench = bench();
    bench.text("text.txt", 8000);
    bench
        .run(
            "train --model nano --data text.txt --steps 3 --micro-batch 1 --eval-every 1 --eval-tokens 200 \
             --sample 0 --metrics m.jsonl --quiet",
        )
        .success();
    let lines = json_lines(&bench.path("m.jsonl"));
    let tokens: Vec<_> = lines.iter().filter_map(|l| l["evaluation"]["tokens"].as_u64()).collect();
    assert_eq!(tokens, [192, 192, 799]);
}

#[test]
fn random_tokens_stay_at_the_loss_of_guessing() {
    let bench = bench();
    bench
        .run("train --model nano --data random --steps 3 --micro-batch 4 --lr 0 --metrics m.jsonl --quiet")
        .success();
    let lines = json_lines(&bench.path("m.jsonl"));
    assert_eq!(lines[lines.len() - 1]["summary"]["validation_loss"], serde_json::Value::Null);
    // There are as many as a run takes, whatever it holds out.
    for fraction in ["0.001", "0.5", "0.99"] {
        let flags = "--data random --steps 1 --micro-batch 4 --metrics m.jsonl --quiet";
        bench.run(&format!("train --model nano {flags} --val-fraction {fraction}")).success();
        assert!(json_lines(&bench.path("m.jsonl")).last().unwrap()["summary"]["validation_loss"].is_number());
    }
    for line in &lines[1..4] {
        assert!((line["loss"].as_f64().unwrap() - 5.55).abs() < 0.1, "{line}");
    }
    let loss = |i: usize| lines[i]["loss"].to_string();
    assert!(loss(1) != loss(2) && loss(2) != loss(3), "each step has its own tokens");
}
