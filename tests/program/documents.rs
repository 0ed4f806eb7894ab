//! Where a text ends and the next begins, and what in a file is text.

use crate::{bench, word_tokenizer};
use harness::{Bench, json_lines};
use serde_json::{Value, json};
use std::fs;

/// A tokenizer of words in `d`, beside which is said that "winter", its token 10, ends a text.
fn tokenizer(bench: &Bench) {
    let words = fs::read(word_tokenizer(bench, 200)).unwrap();
    bench.file("d/tokenizer.json", words);
    bench.file("d/tokenizer_config.json", json!({"eos_token": "winter"}).to_string());
}

/// The tokens of a file of 16-bit ones.
fn tokens(bench: &Bench, file: &str) -> Vec<u16> {
    let bytes = fs::read(bench.path(file)).unwrap();
    bytes[1024..].as_chunks::<2>().0.iter().map(|token| u16::from_le_bytes(*token)).collect()
}

#[test]
fn a_text_goes_on_as_the_next_unless_a_token_is_put_behind_it() {
    let bench = bench();
    tokenizer(&bench);
    for (name, text) in [("a", "many ranks carry"), ("b", ""), ("c", "the winter"), ("d", "one model\n")] {
        bench.file(&format!("text/{name}.txt"), text);
    }
    let texts = "text/a.txt text/b.txt text/c.txt text/d.txt";
    let tokenize = |flags: &str| {
        let made = bench.run(&format!("tokenize --data {texts} --out t.bin --json {flags}")).success().json();
        let tokens = tokens(&bench, "t.bin");
        assert_eq!(made["tokens"], tokens.len());
        (made["append_eod"].clone(), tokens)
    };
    let own = "--tokenizer d/tokenizer.json";
    assert_eq!(tokenize(own), (Value::Null, vec![1, 2, 3, 7, 10, 4, 5]));
    let ended = (json!(10), vec![1, 2, 3, 10, 7, 10, 4, 5, 10]);
    assert_eq!(tokenize(&format!("{own} --append-eod")), ended);
    // One that is put there by the tokenizer itself is there once.
    let mut file: Value = serde_json::from_slice(&fs::read(bench.path("d/tokenizer.json")).unwrap()).unwrap();
    file["post_processor"] = json!({
        "type": "TemplateProcessing", "pair": [], "special_tokens": {"E": {"id": "E", "ids": [10], "tokens": ["winter"]}},
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "E", "type_id": 0}}],
    });
    bench.file("d/tokenizer.json", file.to_string());
    let by_itself = tokenize(own);
    assert_eq!(by_itself.1, [1, 2, 3, 10, 10, 7, 10, 10, 4, 5, 10]);
    let asked = tokenize(&format!("{own} --append-eod")).1;
    assert_eq!(asked, by_itself.1);
}

#[test]
fn ranks_train_on_the_same_tokens_with_one_behind_each_text_however_many_they_are() {
    let bench = bench();
    tokenizer(&bench);
    bench.text("a.txt", 3000);
    bench.text("b.txt", 2000);
    let data = "--data a.txt b.txt --tokenizer d/tokenizer.json";
    bench.run(&format!("tokenize {data} --append-eod --out t.bin")).success();
    let train = "train --model nano --seq 16 --micro-batch 2 --steps 3 --sample 0 --reproducible --metrics m.jsonl --quiet";
    let run = |flags: &str| {
        bench.run(&format!("{train} {flags}")).success();
        let lines = json_lines(&bench.path("m.jsonl"));
        let losses: Vec<_> = lines[1..4].iter().map(|line| line["loss"].to_string()).collect();
        let data = &lines[0]["run"]["data"];
        (data["tokens"].clone(), data["digest"].clone(), losses)
    };
    let one = run(&format!("{data} --append-eod --ranks 1 --accumulate 2"));
    assert_eq!(one, run(&format!("{data} --append-eod --ranks 2")));
    assert_eq!(one, run("--data t.bin --ranks 2 --transport threads"));
    let without = run(&format!("{data} --ranks 2"));
    assert!(
        without.0.as_u64().unwrap() + 2 == one.0.as_u64().unwrap() && without.2 != one.2,
        "{without:?} {one:?}"
    );
    // Also held out, and evaluated.
    let held = "--data t.bin --val-data b.txt --tokenizer d/tokenizer.json --append-eod --ranks 2 --save m";
    bench.run(&format!("{train} {held}")).success();
    let val = json_lines(&bench.path("m.jsonl"))[0]["run"]["val_data"]["tokens"].as_u64().unwrap();
    let eval = |flags: &str| {
        let said = bench.run(&format!("eval --model m --data b.txt --json {flags}")).success().json();
        said["data"]["tokens"].as_u64().unwrap()
    };
    assert_eq!((eval("--append-eod"), eval("")), (val, val - 1));
    // Who goes on otherwise is told.
    let train = format!("{} --checkpoint c", train.replace(" --quiet", ""));
    bench.run(&format!("{train} {data} --ranks 2")).success();
    let said = bench
        .run(&format!("{train} {data} --append-eod --ranks 2 --steps 4 --resume").replace("--steps 3 ", ""));
    let said = said.success().stderr;
    assert!(said.contains("--append-eod token 10 instead of off"), "{said}");
    bench.nothing_left();
}

#[test]
fn there_has_to_be_a_text_and_a_token_that_ends_it() {
    let bench = bench();
    tokenizer(&bench);
    bench.text("text.txt", 3000);
    bench.run("tokenize --data text.txt --out t.bin").success();
    let train =
        "train --model nano --steps 1 --micro-batch 1 --sample 0 --val-fraction 0 --append-eod --save m";
    let bytes = ["--append-eod", "bytes have none that ends one"];
    let tokens = ["--append-eod", "--data has none", "'caravan tokenize --append-eod'"];
    bench.run(&format!("{train} --data text.txt")).refusal(2, &bytes);
    bench.run("tokenize --data text.txt --append-eod --out u.bin").refusal(2, &bytes);
    for data in ["t.bin", "random"] {
        bench.run(&format!("{train} --data {data}")).refusal(2, &tokens);
    }
    bench.run(&train.replace(" --append-eod", " --data text.txt --quiet")).success();
    bench.run("eval --model m --data t.bin --append-eod").refusal(2, &tokens);
    bench.run("eval --model m --data text.txt --append-eod").refusal(2, &bytes);
    // Beside a file of another name lies what may belong to another.
    let none =
        ["--append-eod: tokenizer", "words-200.json has no token that ends a text", "names its eos_token"];
    bench.run(&format!("{train} --data text.txt --tokenizer words-200.json")).refusal(2, &none);
    bench.file("d/tokenizer_config.json", json!({"eos_token": "unheard"}).to_string());
    let own = "--data text.txt --tokenizer d/tokenizer.json";
    bench.run(&format!("{train} {own}")).refusal(2, &["has no token that ends a text"]);
    // An added token that no text has need not be the model's, but this one is in all.
    let mut file: Value = serde_json::from_slice(&fs::read(word_tokenizer(&bench, 256)).unwrap()).unwrap();
    file["added_tokens"] = json!([{"id": 256, "content": "<|end|>", "special": true, "single_word": false, "lstrip": false,
                                   "rstrip": false, "normalized": false}]);
    bench.file("d/tokenizer.json", file.to_string());
    bench.file("d/tokenizer_config.json", json!({"eos_token": "<|end|>"}).to_string());
    bench.run(&format!("{train} {own}").replace(" --append-eod", " --quiet")).success();
    bench.run(&format!("{train} {own}")).refusal(2, &["tokens up to 256", "vocabulary of 256"]);
}

/// As llm.c's scripts leave them, which no file alone could hold.
#[test]
fn tokens_of_several_files_are_those_of_one() {
    let bench = bench();
    tokenizer(&bench);
    bench.text("text.txt", 8000);
    for tokenizer in ["bytes", "d/tokenizer.json"] {
        let tokenize = |flags: &str| {
            let line = format!("tokenize --data text.txt --tokenizer {tokenizer} --out t.bin {flags}");
            bench.run(&line)
        };
        let count = tokenize("--json").success().json()["tokens"].as_u64().unwrap();
        let whole = tokens(&bench, "t.bin");
        let made = tokenize("--json --shard-tokens 5e2").success().json();
        let files: Vec<&str> =
            made["files"].as_array().unwrap().iter().map(|file| file.as_str().unwrap()).collect();
        assert_eq!((made["tokens"].as_u64().unwrap(), files.len() as u64), (count, count.div_ceil(500)));
        assert_eq!(files[..2], ["t-00001.bin", "t-00002.bin"]);
        let parts: Vec<Vec<u16>> = files.iter().map(|file| tokens(&bench, file)).collect();
        assert!(parts.concat() == whole && parts[..parts.len() - 1].iter().all(|part| part.len() == 500));
        // What is there already is not what the file alone is.
        tokenize("--shard-tokens 500")
            .refusal(2, &["--out t.bin: t-00001.bin is there already", "remove it"]);
        let train = "train --model nano --seq 16 --micro-batch 2 --steps 2 --sample 0 --quiet --metrics m.jsonl --data";
        let run = |data: &str| {
            bench.run(&format!("{train} {data}")).success();
            let lines = json_lines(&bench.path("m.jsonl"));
            (lines[0]["run"]["data"]["digest"].clone(), lines[2]["loss"].clone())
        };
        assert_eq!(run(&files.join(" ")), run("t.bin"));
        files.iter().for_each(|file| fs::remove_file(bench.path(file)).unwrap());
        let said = tokenize("--shard-tokens 500").success().stdout;
        let last = files.last().unwrap();
        assert!(said.ends_with(&format!(" in {} files, t-00001.bin to {last}\n", files.len())), "{said}");
        files.iter().for_each(|file| fs::remove_file(bench.path(file)).unwrap());
    }
    bench
        .run("tokenize --data text.txt --out new/ --shard-tokens 500")
        .refusal(2, &["--out new/", "directory"]);
    for number in ["0", "0.5", "-1", "3e9"] {
        bench
            .run(&format!("tokenize --data text.txt --out u.bin --shard-tokens {number}"))
            .refusal(2, &[&format!("--shard-tokens {number}: "), "between 1 and 2147483647"]);
    }
    bench.nothing_left();
}

#[test]
fn who_names_a_file_that_is_not_all_text_is_told_what_is_learnt_of_it() {
    let bench = bench();
    bench.file("a.jsonl", json!({"text": "many ranks carry one model"}).to_string().repeat(100));
    let remark =
        "a.jsonl is taken as it is, so that its quotes and keys are learnt as text: \"jq -r .text a.jsonl";
    let train = "train --model nano --data a.jsonl --steps 1 --micro-batch 1 --sample 0";
    for command in [train, "tokenize --data a.jsonl --out t.bin"] {
        let said = bench.run(command).success().stderr;
        assert!(said.contains(remark), "{said}");
    }
    bench.text("text.txt", 3000);
    let said = bench.run(&train.replace("a.jsonl", "text.txt")).success().stderr;
    assert!(!said.contains("as it is"), "{said}");
}
