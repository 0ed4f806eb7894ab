//! What runs read besides regular files: pipes, the standard input, and names that are no text; and what is no data, or no
//! tokenizer for them.

use crate::{bench, word_tokenizer};
use harness::{Bench, Outcome, json_lines};
use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::process::Stdio;

/// Ranks read token files, tables and tokenizers each by itself, and have nothing on their standard input.
#[test]
fn what_no_rank_can_read_is_told_once() {
    let bench = bench();
    bench.text("text.txt", 20_000);
    bench.run("tokenize --data text.txt --out a.bin").success();
    bench.file("t.txt", "caravan-tuning 1\nshm 3 all_reduce 64 direct-read-all direct-rs-ag\n");
    let tokenizer = word_tokenizer(&bench, 64);
    let train = "train --model nano --steps 2 --micro-batch 1 --sample 0 --ranks 3";
    let run = |flags: &str, input: &std::path::Path| {
        let mut command = bench.command(&format!("{train} {flags}"));
        command.stdin(fs::File::open(input).unwrap());
        bench.outcome(&mut command)
    };
    for (flags, input, words) in [
        ("--data /dev/stdin", bench.path("a.bin"), ["--data /dev/stdin", "/a.bin"]),
        ("--data a.bin --tuning /dev/stdin", bench.path("t.txt"), ["--tuning /dev/stdin", "/t.txt"]),
        ("--data text.txt --tokenizer /dev/stdin", tokenizer, ["--tokenizer /dev/stdin", "/words-64.json"]),
    ] {
        run(flags, &input).refusal(2, &words);
    }
    // What is handed to ranks, and what ranks of this process read, may come from there.
    run("--data /dev/stdin", &bench.path("text.txt")).success();
    run("--data /dev/stdin --transport threads", &bench.path("a.bin")).success();
    bench.nothing_left();
}

/// A run with a pipe as its standard input, out of which this text comes.
fn piped(bench: &Bench, args: &str, variables: &[(&str, &str)], text: &[u8]) -> Outcome {
    let mut command = bench.command(args);
    let mut child = command.stdin(Stdio::piped()).envs(variables.iter().copied()).spawn().unwrap();
    // Who refuses it does not read it, and a pipe holds it whole.
    let _ = child.stdin.take().unwrap().write_all(text);
    bench.finish(child)
}

#[test]
fn text_out_of_a_pipe_is_read_once_and_trains_as_that_of_a_file() {
    let bench = bench();
    let text = fs::read(bench.text("text.txt", 20_000)).unwrap();
    word_tokenizer(&bench, 64);
    let train = "train --model nano --steps 2 --micro-batch 1 --sample 0 --ranks 2 --metrics m.jsonl --data";
    let losses = || {
        let steps = json_lines(&bench.path("m.jsonl"));
        steps.iter().map(|step| step["loss"].to_string()).collect::<Vec<_>>()
    };
    for flags in ["", "--transport threads", "--tokenizer words-64.json"] {
        bench.run(&format!("{train} text.txt {flags}")).success();
        let of_file = losses();
        piped(&bench, &format!("{train} /dev/stdin {flags}"), &[], &text).success();
        assert_eq!(losses(), of_file, "{flags}");
    }
    // As a shell names what a command writes, beside a file.
    assert!(std::process::Command::new("mkfifo").arg(bench.path("pipe")).status().unwrap().success());
    let run = bench.command(&format!("{train} text.txt pipe --save m")).spawn().unwrap();
    fs::write(bench.path("pipe"), &text).unwrap();
    bench.finish(run).success();
    let eval = "eval --model m --json --data";
    let of_file = bench.run(&format!("{eval} text.txt")).success().json();
    let of_pipe = piped(&bench, &format!("{eval} /dev/stdin"), &[], &text).success().json();
    assert_eq!(of_pipe["loss"], of_file["loss"]);
    // Ranks that others start would each take a part of it.
    let rank = [("CARAVAN_RANK", "0"), ("CARAVAN_WORLD", "2")];
    piped(&bench, &format!("{train} /dev/stdin --rendezvous-timeout 0.1"), &rank, &text)
        .refusal(2, &["--data /dev/stdin is a pipe", "'caravan tokenize'"]);
    // The only rank takes all of it, whoever started it.
    let train = train.replace(" --ranks 2", "");
    let rank = [("CARAVAN_RANK", "0"), ("CARAVAN_WORLD", "1")];
    bench.run(&format!("{train} text.txt --ranks 1")).success();
    let of_file = losses();
    piped(&bench, &format!("{train} /dev/stdin"), &rank, &text).success();
    assert_eq!(losses(), of_file);
    let of_pipe = piped(&bench, &format!("{eval} /dev/stdin"), &rank, &text).success().json();
    assert!(of_pipe["loss"].is_f64(), "{of_pipe}");
    bench.nothing_left();
}

/// The process that starts ranks makes the tokens; another tokenizer would be saved with the model, and name them otherwise.
#[test]
fn a_tokenizer_that_changes_before_ranks_start_is_not_taken_for_the_one_that_made_their_tokens() {
    let bench = bench();
    let text = fs::read(bench.text("text.txt", 20_000)).unwrap();
    word_tokenizer(&bench, 64);
    word_tokenizer(&bench, 63);
    fs::rename(bench.path("words-64.json"), bench.path("words.json")).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(bench.path("pipe")).status().unwrap().success());
    let train = "train --model nano --steps 2 --micro-batch 1 --sample 0 --ranks 2 --tokenizer words.json --data pipe";
    let run = bench.command(train).spawn().unwrap();
    // Who opens the pipe to read it has the tokenizer already.
    let mut pipe = fs::File::options().write(true).open(bench.path("pipe")).unwrap();
    fs::rename(bench.path("words-63.json"), bench.path("words.json")).unwrap();
    std::io::Write::write_all(&mut pipe, &text).unwrap();
    drop(pipe);
    bench.finish(run).refusal(2, &["words.json has changed since --data was made tokens"]);
    bench.nothing_left();
}

/// All of them would read the same files for that before they meet, and each say the same.
#[test]
fn of_ranks_that_others_start_rank_0_finds_tokens_that_the_model_does_not_know() {
    let bench = bench();
    let mut bytes = [20240520i32, 1, 4000].map(i32::to_le_bytes).concat();
    bytes.resize(1024, 0);
    bytes.extend((0..4000u16).flat_map(|i| if i == 77 { 300 } else { i % 256 }.to_le_bytes()));
    bench.file("large.bin", bytes);
    let start = |rank: &str| {
        let mut command =
            bench.command("train --model nano --data large.bin --steps 9 --micro-batch 1 --quiet");
        let job = format!("unknown-{}", std::process::id());
        command.envs([("CARAVAN_RANK", rank), ("CARAVAN_WORLD", "2"), ("CARAVAN_JOB", &job)]);
        command.spawn().unwrap()
    };
    let [zero, one] = ["0", "1"].map(start);
    let words = ["token 77", "large.bin", "300", "256"];
    bench.finish(zero).refusal(2, &words);
    bench.finish(one).refusal(1, &[&["rank 0"][..], &words].concat());
    bench.nothing_left();
}

#[test]
fn a_file_that_is_named_twice_is_not_read_twice() {
    let bench = bench();
    fs::create_dir(bench.path("d")).unwrap();
    bench.text("d/text.txt", 20_000);
    std::os::unix::fs::symlink("d/text.txt", bench.path("link.txt")).unwrap();
    fs::hard_link(bench.path("d/text.txt"), bench.path("other.txt")).unwrap();
    for (data, words) in [
        ("d d/text.txt", "d/text.txt twice"),
        ("d other.txt", "one file as d/text.txt and as other.txt"),
        ("link.txt ./d", "one file as link.txt and as ./d/text.txt"),
    ] {
        bench.run(&format!("train --model nano --data {data}")).refusal(2, &["--data names", words]);
        bench.run(&format!("tokenize --out t.bin --data {data}")).refusal(2, &["--data names", words]);
    }
    // Below one directory the first name counts.
    fs::hard_link(bench.path("d/text.txt"), bench.path("d/second.txt")).unwrap();
    let tokens = bench.run("tokenize --out t.bin --data d").success().stdout;
    assert!(tokens.contains("20000 tokens") || tokens.contains("from 20000 bytes"), "{tokens}");
}

#[test]
fn a_dash_is_no_name_of_a_stream() {
    let bench = bench();
    bench.text("text.txt", 20_000);
    for (args, words) in [
        ("train --data -", ["--data -:", "/dev/stdin"]),
        ("tokenize --data - --out t.bin", ["--data -:", "/dev/stdin"]),
        ("tokenize --data text.txt --out -", ["--out -:", "regular file"]),
        ("train --model nano --data text.txt --save -", ["--save -:", "directory"]),
        ("sbatch -- train --save -", ["--save -:", "./-"]),
        ("train --model nano --data text.txt --metrics -", ["--metrics -:", "/dev/stdout"]),
        ("bench all_reduce --json -", ["--json -:", "/dev/stdout"]),
        ("bench tune -o -", ["-o -:", "/dev/stdout"]),
        ("sbatch -- bench overlap --json -", ["--json -:", "/dev/stdout"]),
        ("sbatch -- bench tune -o -", ["-o -:", "/dev/stdout"]),
        ("sbatch -- bench all_reduce --csv -", ["--csv -:", "./-"]),
        ("sbatch -- train --metrics -", ["--metrics -:", "./-"]),
    ] {
        bench.run(args).refusal(2, &words);
    }
    assert_eq!(bench.names(), ["text.txt"]);
    bench.run("tokenize --data text.txt --out ./-").success();
    bench.run("train --model nano --data ./- --steps 1 --micro-batch 1 --sample 0 --quiet").success();
}

/// What is given in place of what was meant, by the name of what was meant.
#[test]
fn tokens_from_a_pipe_and_a_tokenizers_settings_are_told_from_text_and_tokenizers() {
    let bench = bench();
    bench.text("text.txt", 8000);
    bench.run("tokenize --data text.txt --out t.bin").success();
    let mut train = bench.command("train --model nano --steps 1 --data /dev/stdin");
    train.stdin(Stdio::piped());
    let mut child = train.spawn().unwrap();
    child.stdin.take().unwrap().write_all(&fs::read(bench.path("t.bin")).unwrap()).unwrap();
    bench
        .finish(child)
        .refusal(2, &["/dev/stdin is not UTF-8 text", "token files", "not come through a pipe"]);
    bench.file("tokenizer_config.json", r#"{"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>"}"#);
    let train = "train --model nano --data text.txt --tokenizer tokenizer_config.json";
    let alone = bench.run(train).refusal(2, &["tokenizer_config.json", "no \"model\""]);
    assert!(!alone.stderr.contains("may be meant"), "{}", alone.stderr);
    bench.file("tokenizer.json", "{}");
    bench.run(train).refusal(2, &["no \"model\": tokenizer.json may be meant"]);
}

/// As what is saved under such a name can be evaluated, it can be trained further.
#[test]
fn names_of_models_and_tokenizers_need_not_be_text() {
    let bench = bench();
    bench.text("text.txt", 8000);
    let [model, tokenizer] = [&b"m\xff"[..], b"t\xff.json"].map(OsStr::from_bytes);
    fs::rename(word_tokenizer(&bench, 64), bench.path(".").join(tokenizer)).unwrap();
    let train = "train --data text.txt --steps 1 --micro-batch 1 --sample 0 --quiet";
    let run = |args: &str, more: &[&OsStr]| {
        let mut command = bench.command(args);
        bench.outcome(command.args(more)).success()
    };
    let [flag, save] = ["--tokenizer", "--save"].map(OsStr::new);
    run(&format!("{train} --model nano"), &[flag, tokenizer, save, model]);
    run(train, &[OsStr::new("--model"), model]);
    run("eval --data text.txt --model", &[model, flag, tokenizer]);
    run("tokenize --data text.txt --out t.bin", &[flag, tokenizer]);
}

/// Valid UTF-8 by chance: what nanoGPT prepares of characters, what Windows writes as text, and llm.c's tokens of a machine of
/// the other byte order.
#[test]
fn what_has_zero_bytes_is_no_text() {
    let bench = bench();
    let text = fs::read(bench.text("text.txt", 8000)).unwrap();
    bench.file("train.bin", (0..4000u16).flat_map(|i| (i % 65 + 1).to_le_bytes()).collect::<Vec<_>>());
    bench.file("corpus/utf16.txt", text.iter().flat_map(|&byte| [byte, 0]).collect::<Vec<_>>());
    bench.file("corpus/text.txt", &text);
    let mut swapped = [20240520i32, 1, 4000].map(i32::to_be_bytes).concat();
    swapped.resize(1024, 0);
    swapped.extend((0..4000u16).flat_map(|i| (i % 256).to_be_bytes()));
    bench.file("swapped.bin", &swapped);
    let train = "train --model nano --steps 1 --micro-batch 1 --sample 0";
    bench.run(&format!("{train} --data text.txt --save m")).success();
    let commands = [train, "eval --model m", "tokenize --out t.bin"];
    for (data, words) in [
        (
            "train.bin",
            &["train.bin", "no text", "zero byte at offset 1;", "UTF-8 text", "those of nanoGPT lack"][..],
        ),
        ("corpus/utf16.txt", &["utf16.txt", "zero byte at offset 1;"]),
        ("corpus", &["utf16.txt", "zero byte at offset 1;"]),
        ("swapped.bin", &["swapped.bin", "token", "other byte order"]),
    ] {
        for command in commands {
            bench.run(&format!("{command} --data {data}")).refusal(2, words);
        }
    }
    bench.file("prepared/train.bin", fs::read(bench.path("train.bin")).unwrap());
    let prepared =
        "no text below prepared, and prepared/train.bin is no token file; token files (.bin) begin";
    bench.run(&format!("{train} --data prepared")).refusal(2, &[prepared]);
    bench.run("tokenize --data text.txt --out whole.bin").success();
    bench
        .run(&format!("{train} --data whole.bin train.bin"))
        .refusal(2, &["both token files and train.bin, which is none", "nanoGPT"]);
    for (from, words) in [("train.bin", "zero byte at offset 1;"), ("swapped.bin", "other byte order")] {
        let bytes = fs::read(bench.path(from)).unwrap();
        piped(&bench, &format!("{train} --data /dev/stdin"), &[], &bytes)
            .refusal(2, &["--data /dev/stdin", words]);
    }
    assert!(!bench.path("t.bin").exists());
    // Of what nobody named, it is left out.
    let mut command = bench.command(train);
    let told = bench.outcome(command.current_dir(bench.path("corpus"))).success();
    assert!(
        told.stderr.contains("without 1 that cannot be read or are no text, ./utf16.txt"),
        "{}",
        told.stderr
    );
}

/// A part of what was downloaded, or of what was being written.
#[test]
fn shards_that_are_no_token_files_are_not_left_out() {
    let bench = bench();
    bench.text("text.txt", 8000);
    fs::create_dir(bench.path("d")).unwrap();
    bench.run("tokenize --data text.txt --out d/b.bin").success();
    let train = "train --model nano --data d --steps 1 --micro-batch 1 --sample 0 --quiet";
    bench.run(&format!("{train} --save m")).success();
    for (shard, content, is) in [("a.bin", "", "is empty"), ("c.bin", "PK no tokens", "is no token file")] {
        bench.file(&format!("d/{shard}"), content);
        for command in [train, "eval --model m --data d"] {
            bench
                .run(command)
                .refusal(2, &["--data d has token files", &format!("d/{shard}, which {is}"), "name"]);
        }
        fs::remove_file(bench.path("d").join(shard)).unwrap();
    }
}

/// What a stream goes to has more in it, and somebody else holds it open.
#[test]
fn tokens_take_the_place_of_no_stream() {
    let bench = bench();
    bench.text("text.txt", 8000);
    bench.file("log", "before\n");
    std::os::unix::fs::symlink("/dev/stdout", bench.path("link")).unwrap();
    let program = env!("CARGO_BIN_EXE_caravan");
    for (out, to) in [("/dev/stdout", ">> log"), ("link", ">> log"), ("/dev/fd/3", "3>> log")] {
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", &format!("exec {program} tokenize --data text.txt --out {out} {to}")]);
        bench.prepare(&mut shell);
        bench
            .outcome(&mut shell)
            .refusal(2, &[&format!("--out {out} "), "stream", "a regular file by its name"]);
        assert_eq!(fs::read_to_string(bench.path("log")).unwrap(), "before\n", "{out}");
    }
}

#[test]
fn what_is_called_random_is_not_passed_over() {
    let bench = bench();
    bench.text("random", 8000);
    let train = "train --model nano --steps 1 --micro-batch 1 --sample 0 --data";
    bench.run(&format!("{train} random")).refusal(2, &["--data random", "./random for what lies here"]);
    let told = bench.run(&format!("{train} ./random")).success();
    assert!(!told.stderr.contains("random tokens"), "{}", told.stderr);
}

#[test]
fn a_link_to_a_directory_is_not_followed_and_said_where_nothing_else_is() {
    let bench = bench();
    bench.text("far/text.txt", 8000);
    fs::create_dir(bench.path("d")).unwrap();
    let train = "train --model nano --steps 1 --micro-batch 1 --sample 0 --data d";
    let told = bench.run(train).refusal(2, &["no text below d"]);
    assert!(!told.stderr.contains("link"), "{}", told.stderr);
    std::os::unix::fs::symlink("../far", bench.path("d/link")).unwrap();
    bench
        .run(train)
        .refusal(2, &["no text below d", "d/link is a link to a directory, which is not followed"]);
    bench.run(&format!("{train}/link")).success();
    for command in ["train", "eval", "tokenize"] {
        let help = bench.run(&format!("{command} --help")).success().stdout;
        let words = help.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains("links to directories"), "{command}: {help}");
    }
}

#[test]
fn a_tokenizer_that_does_not_fit_is_refused() {
    let bench = bench();
    bench.text("text.txt", 20_000);
    word_tokenizer(&bench, 300);
    bench.file("broken.json", "{}");
    let train = |flags: &str| bench.run(&format!("train --model nano --data text.txt --tokenizer {flags}"));
    train("words-300.json").refusal(2, &["words-300.json", "299", "vocabulary of 256"]);
    train("broken.json").refusal(2, &["broken.json", "tokenizer.json"]);
    train("none.json").refusal(2, &["none.json", "'bytes'"]);
    bench.run("tokenize --data text.txt --tokenizer none.json --out t.bin").refusal(2, &["none.json"]);
    bench.run("tokenize --data none.txt --out t.bin").refusal(2, &["none.txt"]);
    bench.file("blank.txt", "");
    let empty = "--data blank.txt is empty: there is nothing to make tokens of";
    bench.run("tokenize --data blank.txt --out t.bin").refusal(2, &[empty]);
    bench.run("tokenize --data text.txt --out no/dir/t.bin").refusal(2, &["--out", "no/dir"]);
    // Every word of the text is known, and none of its spaces is a word.
    bench.file("spaces.txt", " \n ");
    let nothing = "tokenize --data spaces.txt --tokenizer words-300.json --out t.bin";
    bench.run(nothing).refusal(2, &["words-300.json", "no tokens of 3 bytes"]);
    assert!(!bench.path("t.bin").exists());
}

#[test]
fn a_tokenizer_that_its_library_cannot_use_is_refused() {
    let bench = bench();
    bench.text("text.txt", 20_000);
    let whole: serde_json::Value =
        serde_json::from_slice(&fs::read(word_tokenizer(&bench, 100)).unwrap()).unwrap();
    let mut broken = whole.clone();
    broken["pre_tokenizer"] = serde_json::json!({"type": "FixedLength", "length": 0});
    bench.file("broken.json", broken.to_string());
    let mut random = whole;
    random["model"] = serde_json::json!({"type": "BPE", "dropout": 0.5, "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]});
    bench.file("random.json", random.to_string());
    for command in ["train --model nano", "tokenize --out t.bin"] {
        let with = |name: &str| bench.run(&format!("{command} --data text.txt --tokenizer {name}"));
        with("broken.json").refusal(2, &["broken.json"]);
        with("random.json").refusal(2, &["random.json", "dropout is 0.5"]);
    }
}
