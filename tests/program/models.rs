//! Which model a run starts from, and what is in the directory that it saves.

use crate::{bench, odd_shape, word_tokenizer};
use harness::{Bench, json_lines, skip};
use serde_json::json;
use std::fs;
use std::path::Path;
use std::process::Command;

#[test]
fn a_name_of_a_shape_means_new_weights_and_a_path_those_of_a_directory() {
    let bench = bench();
    bench.text("text.txt", 8000);
    let train = |model: &str| {
        let flags = "--data text.txt --steps 2 --micro-batch 1 --sample 0 --metrics m.jsonl";
        let outcome = bench.run(&format!("train --model {model} {flags} --save nano")).success();
        (outcome.stderr, json_lines(&bench.path("m.jsonl"))[1]["loss"].to_string())
    };
    let (said, first) = train("nano");
    assert!(
        said.contains("new weights") && said.contains(", tokenizer bytes; 2 steps of 2 ranks x 1 sequence x"),
        "{said}"
    );
    assert_eq!(train("nano").1, first);
    let words = "the evaluation at the end takes all 800 tokens that are held out, and training 256: a lower --val-fraction";
    assert!(said.contains(words), "{said}");
    let (said, further) = train("./nano");
    assert!(said.contains("weights of ./nano, a new optimizer)"), "{said}");
    assert_ne!(further, first);
}

/// It has to be known before the training, whose result would be lost.
#[test]
fn a_shape_that_transformers_would_refuse_is_trained_and_not_saved() {
    let bench = bench();
    bench.text("text.txt", 8000);
    odd_shape(&bench);
    let train = "train --model odd.json --data text.txt --steps 1 --micro-batch 1 --sample 0";
    bench.run(train).success();
    bench
        .run(&format!("{train} --save m"))
        .refusal(2, &["--save", "transformers 5", "64", "5 heads", "divide", "trained without that"]);
    assert!(!bench.path("m").exists());
}

#[test]
fn a_model_that_is_trained_further_keeps_what_lies_beside_it() {
    let bench = bench();
    bench.text("text.txt", 8000);
    word_tokenizer(&bench, 200);
    let flags = "--data text.txt --steps 1 --micro-batch 1 --sample 0 --quiet --save m";
    bench.run(&format!("train --model nano --tokenizer words-200.json {flags}")).success();
    // transformers takes the file as it is.
    let with = fs::read_to_string(bench.path("m/tokenizer_config.json")).unwrap();
    assert!(with.contains("\"tokenizer_class\": \"PreTrainedTokenizerFast\""), "{with}");
    for name in ["chat_template.jinja", "generation_config.json", "tokenizer_config.json"] {
        bench.file(&format!("m/{name}"), name);
    }
    let names = || {
        let mut names: Vec<_> =
            fs::read_dir(bench.path("m")).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let before = names();
    let config = || fs::read_to_string(bench.path("m/config.json")).unwrap();
    let other = config().replace("\"eos_token_id\": null", "\"eos_token_id\": 2");
    bench.file("m/config.json", other.replace("\"initializer_range\": 0.02", "\"initializer_range\": 0.006"));
    bench.run(&format!("train --model m {flags}")).success();
    assert_eq!((names(), before.len()), (before, 6));
    assert!(config().contains("\"eos_token_id\": 2") && config().contains("\"initializer_range\": 0.006"));
    // A key that is not there has a default, which null is not.
    bench.file("m/config.json", config().replace("\"eos_token_id\": 2,", ""));
    bench.run(&format!("train --model m {flags}")).success();
    assert!(
        !config().contains("eos_token_id") && config().contains("\"bos_token_id\": null"),
        "{}",
        config()
    );
    // With another tokenizer, the old one's files and tokens would mislead.
    bench.run(&format!("train --model m --tokenizer bytes {flags}")).success();
    assert_eq!(names(), ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]);
    assert!(config().contains("\"eos_token_id\": null"));
}

/// As transformers' `generate` does: before a token that the model's files name, on whatever ranks.
#[test]
fn a_sample_stops_where_the_model_ends_its_text() {
    let bench = bench();
    bench.text("text.txt", 3000);
    let flags = "--data text.txt --seq 16 --micro-batch 1 --warmup 1 --steps 1 --reproducible";
    bench.run(&format!("train --model nano {flags} --quiet --save m")).success();
    let sample = |ranks: &str| {
        let said = bench.run(&format!("train --model m {flags} {ranks}")).success().stdout;
        let (_, sample) = said.rsplit_once("sample").expect("a sample");
        sample.to_owned()
    };
    let (alone, shared) = ("--ranks 1 --accumulate 2", "--ranks 2");
    let whole = sample(alone);
    assert!(whole.starts_with('\n') && whole == sample(shared), "{whole}");
    // Half of all bytes: hardly any text is without them for long.
    let config = fs::read_to_string(bench.path("m/config.json")).unwrap();
    let ends: Vec<u8> = (0..128).collect();
    let ends = format!("\"eos_token_id\": {ends:?}");
    let named = config.replace("\"eos_token_id\": null", &ends);
    assert_ne!(named, config);
    bench.file("m/config.json", named);
    let short = sample(alone);
    assert!(short.contains(" of 240 tokens: the text ends there)\n") && short == sample(shared), "{short}");
    let (_, text) = short.split_once('\n').unwrap();
    assert!(!text.trim().contains(|c: char| c.is_ascii()), "{text}");
    // What is generated with goes before that.
    bench.file("m/generation_config.json", "{\"eos_token_id\": 256}");
    assert_eq!(sample(alone), whole);
    bench.nothing_left();
}

/// How a tokenizer is to be used lies beside it.
#[test]
fn a_new_model_is_saved_with_what_belongs_to_its_tokenizer() {
    let bench = bench();
    bench.text("text.txt", 8000);
    let words = fs::read(word_tokenizer(&bench, 200)).unwrap();
    for name in ["d/tokenizer.json", "d/other.json"] {
        bench.file(name, &words);
    }
    let belong = ["additional_chat_templates/tools.jinja", "chat_template.jinja"];
    for name in belong {
        bench.file(&format!("d/{name}"), name);
    }
    let told = json!({"tokenizer_class": "LlamaTokenizer", "add_bos_token": true, "eos_token": "over", "pad_token": "none"});
    bench.file("d/tokenizer_config.json", told.to_string());
    bench.file("d/special_tokens_map.json", json!({"bos_token": "many", "pad_token": "none"}).to_string());
    bench.file("d/generation_config.json", "of another model");
    let train = "train --model nano --data text.txt --steps 1 --micro-batch 1 --sample 0 --quiet --save m --tokenizer";
    bench.run(&format!("{train} d/tokenizer.json")).success();
    for name in belong {
        assert_eq!(fs::read_to_string(bench.path("m").join(name)).unwrap(), name);
    }
    assert!(!bench.path("m/generation_config.json").exists());
    // But for what would have transformers make other tokens than the file; and the model names its own of them.
    let saved = |name: &str| json_of(&bench.path("m").join(name));
    let expected = json!({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "over"});
    assert_eq!(saved("tokenizer_config.json"), expected);
    assert_eq!(saved("special_tokens_map.json"), json!({"bos_token": "many"}));
    let ids = || {
        let config = saved("config.json");
        [config["bos_token_id"].clone(), config["eos_token_id"].clone()]
    };
    assert_eq!(ids(), [1, 6].map(|id| json!(id)));
    // So does one of a shape that names none, and keeps those that it names.
    let mut shape = saved("config.json");
    for (named, expected) in [(None, [1, 6]), (Some(9), [1, 9])] {
        shape.as_object_mut().unwrap().retain(|key, _| !key.ends_with("_token_id"));
        shape["eos_token_id"] = json!(named);
        bench.file("shape.json", shape.to_string());
        bench.run(&format!("{} d/tokenizer.json", train.replace("nano", "shape.json"))).success();
        assert_eq!(ids(), expected.map(|id| json!(id)));
    }
    bench.file("d/tokenizer_config.json", "broken");
    bench
        .run(&format!("{train} d/tokenizer.json"))
        .refusal(2, &["d/tokenizer_config.json is no JSON object", "transformers"]);
    // Beside a file of another name lies what may belong to another.
    bench.run(&format!("{train} d/other.json")).success();
    let config = fs::read_to_string(bench.path("m/tokenizer_config.json")).unwrap();
    assert!(config.contains("PreTrainedTokenizerFast"), "{config}");
    assert!(!bench.path("m/chat_template.jinja").exists());
}

/// The JSON in a file.
fn json_of(path: &Path) -> serde_json::Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// For others: here it is bytes without that, too.
#[test]
fn a_model_of_bytes_has_a_file_that_says_so_and_stays_one_of_bytes() {
    let bench = bench();
    bench.text("text.txt", 8000);
    let train = "train --data text.txt --steps 1 --micro-batch 1 --sample 0";
    bench.run(&format!("{train} --model nano --save m --checkpoint c")).success();
    let vocab = &json_of(&bench.path("m/tokenizer.json"))["model"]["vocab"];
    assert_eq!(
        (&vocab["a"], &vocab["\u{120}"], vocab.as_object().unwrap().len()),
        (&json!(97), &json!(32), 256)
    );
    let eval = |model: &str| {
        let said = bench.run(&format!("eval --model {model} --data text.txt --json")).success().json();
        ["loss", "tokens", "data"].map(|key| said[key].clone())
    };
    let loss = eval("m");
    let generation = bench.file("m/generation_config.json", "{\"eos_token_id\": 10}");
    for tokenizer in ["", "--tokenizer m/tokenizer.json", "--tokenizer bytes"] {
        let said = bench.run(&format!("{train} --model m --save n {tokenizer}")).success().stderr;
        assert!(said.contains(", tokenizer bytes; "), "{said}");
        for name in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
            assert!(
                fs::read(bench.path("m").join(name)).unwrap()
                    == fs::read(bench.path("n").join(name)).unwrap()
            );
        }
        assert_eq!(json_of(&bench.path("n/config.json"))["caravan_tokenizer"], "bytes");
    }
    fs::remove_file(generation).unwrap();
    bench.run("tokenize --data text.txt --tokenizer m/tokenizer.json --out t.bin --json").success();
    bench.run("tokenize --data text.txt --out u.bin").success();
    assert!(fs::read(bench.path("t.bin")).unwrap() == fs::read(bench.path("u.bin")).unwrap());
    // A state has them beside its weights, and gives them to a model of it.
    bench.run("checkpoint c --save s").success();
    assert!(
        fs::read(bench.path("s/tokenizer.json")).unwrap()
            == fs::read(bench.path("m/tokenizer.json")).unwrap()
    );
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::remove_file(bench.path("m").join(name)).unwrap();
    }
    assert_eq!(eval("m"), loss);
    bench.run(&format!("{train} --model m --save n")).success();
    assert!(bench.path("n/tokenizer.json").is_file());
}

/// From whose directory the new one takes the tokenizer only.
#[test]
fn a_model_that_lies_beside_a_tokenizer_is_not_replaced_by_another() {
    let bench = bench();
    bench.text("text.txt", 8000);
    word_tokenizer(&bench, 200);
    let train = "train --data text.txt --steps 1 --micro-batch 1 --sample 0 --quiet";
    bench.run(&format!("{train} --model nano --tokenizer words-200.json --save m")).success();
    let before = fs::read(bench.path("m/model.safetensors")).unwrap();
    std::os::unix::fs::symlink("m", bench.path("link")).unwrap();
    for flags in ["--tokenizer m/tokenizer.json --save m", "--tokenizer link/tokenizer.json --save ./m/"] {
        bench
            .run(&format!("{train} --model nano {flags}"))
            .refusal(2, &["--save", "/m would replace", "tokenizer.json", "only the tokenizer", "another"]);
    }
    assert!(fs::read(bench.path("m/model.safetensors")).unwrap() == before);
    // The model that goes on there may.
    bench.run(&format!("{train} --model link --tokenizer m/tokenizer.json --save m")).success();
    assert!(fs::read(bench.path("m/model.safetensors")).unwrap() != before);
}

#[test]
fn a_config_json_by_itself_is_a_shape_with_new_weights() {
    let bench = bench();
    bench.text("text.txt", 8000);
    word_tokenizer(&bench, 300);
    let shape = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 176, "max_position_embeddings": 64, "vocab_size": 300,
        "initializer_range": 0.03, "bos_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": 2, "suppress_tokens": [3],
    });
    bench.file("d/config.json", shape.to_string());
    let flags = "--data text.txt --tokenizer words-300.json --steps 1 --micro-batch 1 --sample 0";
    // Who looks for such a model is told of it.
    bench
        .run(&format!("train --model nano {flags}"))
        .refusal(2, &["a model with at least 300, such as", "config.json"]);
    let words = ["no weights", "model.safetensors", "--model d/config.json means new weights of that shape"];
    bench.run(&format!("train --model d {flags}")).refusal(2, &words);
    let said = bench.run(&format!("train --model d/config.json {flags} --save out")).success().stderr;
    assert!(said.contains("training d/config.json") && said.contains("new weights"), "{said}");
    bench.run("eval --model out --data text.txt").success();
    let saved = fs::read(bench.path("out/config.json")).unwrap();
    let saved: serde_json::Value = serde_json::from_slice(&saved).unwrap();
    for key in ["hidden_size", "vocab_size", "initializer_range", "bos_token_id", "eos_token_id"] {
        assert_eq!(saved[key], shape[key], "{key}");
    }
    // What lies beside it is used, and not replaced by what comes of it.
    fs::copy(bench.path("words-300.json"), bench.path("d/tokenizer.json")).unwrap();
    let own = "train --model d/config.json --data text.txt --steps 1 --micro-batch 1 --sample 0";
    bench.run(&format!("{own} --save own")).success();
    let tokenizer = |dir: &str| fs::read(bench.path(dir).join("tokenizer.json")).unwrap();
    assert_eq!(tokenizer("own"), tokenizer("d"));
    for (from, words) in [("d", "so it is no model"), ("own", "would replace")] {
        let train = own.replace("d/config.json", &format!("{from}/config.json"));
        bench.run(&format!("{train} --save {from}")).refusal(2, &["--save", from, words, "config.json"]);
    }
    assert!(!tokenizer("d").is_empty());
    // Its special tokens are of that tokenizer, and another has others.
    let ids = |dir: &str| {
        let saved: serde_json::Value =
            serde_json::from_slice(&fs::read(bench.path(dir).join("config.json")).unwrap()).unwrap();
        ["eos_token_id", "forced_eos_token_id", "suppress_tokens"].map(|key| saved[key].clone())
    };
    let [own_ids, none] = [[json!(2), json!(2), json!([3])], [json!(null), json!(null), json!(null)]];
    assert_eq!(ids("own"), own_ids);
    word_tokenizer(&bench, 100);
    bench.run(&format!("{own} --tokenizer words-100.json --save other")).success();
    assert!(ids("other") == none && bench.path("other/tokenizer.json").is_file());
    bench.run(&format!("{own} --tokenizer words-300.json --save same")).success();
    assert_eq!(ids("same"), own_ids);
    // Neither is a file of another kind a shape, nor a shape what an evaluation takes.
    bench.run("train --model text.txt --data text.txt").refusal(2, &["--model text.txt is no directory"]);
    bench
        .run("eval --model d/config.json --data text.txt")
        .refusal(2, &["d/config.json", "directory is needed"]);
    bench.file("d/config.json", shape.to_string().replace("llama", "other"));
    let refused = bench.run(&format!("train --model d {flags}")).refusal(2, &["d/config.json", "other"]);
    assert!(!refused.stderr.contains("new weights"), "{}", refused.stderr);
    bench.run(&format!("train --model d/config.json {flags}")).refusal(2, &["d/config.json", "other"]);
}

/// A tokenizer in `d`, with all beside it that has transformers make other tokens than it makes.
fn misleading(bench: &Bench) {
    let mut file = json_of(&word_tokenizer(bench, 198));
    let flags = |strips: bool, content: &str| {
        json!({"content": content, "lstrip": strips, "rstrip": strips, "normalized": false, "single_word": false,
               "special": true})
    };
    let added = [(198, "<|begin|>"), (199, "<|end|>")].map(|(id, content)| {
        let mut token = flags(false, content);
        token["id"] = json!(id);
        token
    });
    file["added_tokens"] = json!(added);
    file["post_processor"] = json!({
        "type": "TemplateProcessing", "pair": [], "special_tokens": {"[B]": {"id": "[B]", "ids": [198], "tokens": ["<|begin|>"]}},
        "single": [{"SpecialToken": {"id": "[B]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    });
    bench.file("d/tokenizer.json", file.to_string());
    let mut end = flags(true, "<|end|>");
    end["__type"] = json!("AddedToken");
    let told = json!({
        "tokenizer_class": "LlamaTokenizer", "add_bos_token": true, "add_eos_token": true, "add_prefix_space": true,
        "bos_token": "<|begin|>", "eos_token": end, "pad_token": "[PAD]", "split_special_tokens": true,
        "additional_special_tokens": ["[MASK]"], "added_tokens_decoder": {"199": flags(true, "<|end|>")},
    });
    bench.file("d/tokenizer_config.json", told.to_string());
}

/// With the weights, the shape and the tokenizer that it had here, so that it finds the same text as likely.
#[test]
fn what_is_saved_loads_in_transformers_and_has_the_same_loss() {
    let python = std::env::var("CARAVAN_PYTHON").unwrap_or("python3".into());
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/program/load_saved.py");
    let bench = bench();
    bench.text("text.txt", 8000);
    bench.file("held.txt", "many ranks <|end|> carry [PAD] [MASK] over <|begin|> winter");
    word_tokenizer(&bench, 200);
    misleading(&bench);
    for flags in [
        "--dtype f32",
        "--dtype bf16",
        "--dtype f32 --tokenizer words-200.json",
        "--dtype f32 --tokenizer d/tokenizer.json",
    ] {
        let train =
            "train --model nano --data text.txt --steps 3 --micro-batch 1 --sample 0 --quiet --save m";
        bench.run(&format!("{train} {flags}")).success();
        let loss = bench.run("eval --model m --data held.txt --json --dtype f32").success().json()["loss"]
            .to_string();
        let mut command = Command::new(&python);
        command.arg(&script).args([bench.path("m"), bench.path("held.txt")]).arg(loss);
        let out = match command.output() {
            Ok(out) => out,
            Err(e) => return skip(&format!("no {python}: {e}; CARAVAN_PYTHON can name another")),
        };
        let said = String::from_utf8_lossy(&out.stdout);
        match out.status.code() {
            Some(0) => println!("{}", said.trim()),
            Some(77) => return skip(&format!("{python}: {}; CARAVAN_PYTHON can name another", said.trim())),
            _ => panic!("{flags}: {said}{}", String::from_utf8_lossy(&out.stderr)),
        }
    }
}

#[test]
fn a_model_with_dropout_is_evaluated_and_not_trained() {
    let bench = bench();
    bench.text("text.txt", 8000);
    bench
        .run("train --model nano --data text.txt --steps 1 --micro-batch 1 --sample 0 --save m --quiet")
        .success();
    let path = bench.path("m/config.json");
    let config = fs::read_to_string(&path).unwrap();
    let changed = config.replace("\"attention_dropout\": 0.0", "\"attention_dropout\": 0.1");
    assert_ne!(config, changed);
    fs::write(path, changed).unwrap();
    bench.run("eval --model m --data text.txt").success();
    bench.run("train --model m --data text.txt").refusal(2, &["--model m", "attention_dropout 0.1"]);
}

/// As a snapshot of a hub's cache leaves them, whose links lead to what was cleared away.
#[test]
fn what_belongs_to_a_model_and_cannot_be_opened_is_not_taken_for_absent() {
    let bench = bench();
    bench.text("text.txt", 8000);
    word_tokenizer(&bench, 200);
    let train = "train --data text.txt --steps 1 --micro-batch 1 --sample 0 --quiet";
    bench.run(&format!("{train} --model nano --tokenizer words-200.json --save m")).success();
    let dangle = |name: &str| {
        let _ = fs::remove_file(bench.path(name));
        std::os::unix::fs::symlink("../blobs/gone", bench.path(name)).unwrap();
    };
    dangle("m/generation_config.json");
    bench.run(&format!("{train} --model m")).success();
    let words = ["m/generation_config.json", "No such file"];
    bench.run(&format!("{train} --model m --save n")).refusal(2, &words);
    fs::remove_file(bench.path("m/generation_config.json")).unwrap();
    dangle("m/tokenizer.json");
    let words = ["/tokenizer.json' is a link to nothing", "'bytes'"];
    for model in ["m", "m/config.json"] {
        bench.run(&format!("{train} --model {model}")).refusal(2, &words);
        bench.run(&format!("{train} --model {model} --tokenizer bytes")).success();
    }
    bench.run("eval --model m --data text.txt").refusal(2, &words);
    // What belongs to a tokenizer, too.
    fs::create_dir(bench.path("t")).unwrap();
    fs::copy(bench.path("words-200.json"), bench.path("t/tokenizer.json")).unwrap();
    dangle("t/tokenizer_config.json");
    bench
        .run(&format!("{train} --model nano --tokenizer t/tokenizer.json --save n"))
        .refusal(2, &["t/tokenizer_config.json", "No such file"]);
    assert!(!bench.path("n").exists());
}

/// Bytes are not what its special tokens are of, and nobody has asked for them.
#[test]
fn a_tokenizer_in_another_form_beside_a_shape_is_not_passed_over() {
    let bench = bench();
    bench.text("text.txt", 8000);
    let train = "train --model d/config.json --data text.txt --steps 1 --micro-batch 1 --sample 0 --quiet";
    bench.run(&train.replace("d/config.json", "nano --save m")).success();
    fs::create_dir(bench.path("d")).unwrap();
    let config = fs::read_to_string(bench.path("m/config.json")).unwrap();
    bench.file("d/config.json", config.replace("\"caravan_tokenizer\": \"bytes\"", "\"was\": 1"));
    bench.run(train).success();
    word_tokenizer(&bench, 200);
    for form in ["tokenizer.model", "vocab.json", "merges.txt"] {
        let path = bench.file(&format!("d/{form}"), "another form");
        let words = [&*format!("d/{form}"), "not read", "--tokenizer", "tokenizer.json", "'bytes'"];
        bench.run(train).refusal(2, &words);
        for tokenizer in ["bytes", "words-200.json"] {
            bench.run(&format!("{train} --tokenizer {tokenizer}")).success();
        }
        fs::remove_file(path).unwrap();
    }
}

/// A config.json's `pad_token_id` is a token of the tokenizer beside it, and of no other.
#[test]
fn padding_is_heeded_only_where_its_tokenizer_is_used() {
    let bench = bench();
    bench.text("text.txt", 4000);
    bench.run("tokenize --data text.txt --out t.bin").success();
    let shape = |pad: serde_json::Value| {
        serde_json::json!({
            "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 64, "vocab_size": 256, "pad_token_id": pad,
        })
    };
    // Of a space, which is in all texts.
    bench.file("with.json", shape(32.into()).to_string());
    bench.file("without.json", shape(serde_json::Value::Null).to_string());
    let weights = |model: &str, data: &str| {
        bench
            .run(&format!(
                "train --model {model}.json --data {data} --seq 16 --micro-batch 2 --steps 2 --sample 0 --quiet --save out"
            ))
            .success();
        fs::read(bench.path("out/model.safetensors")).unwrap()
    };
    assert!(weights("with", "text.txt") == weights("without", "text.txt"), "bytes are another's tokens");
    assert!(weights("with", "t.bin") != weights("without", "t.bin"), "tokens are taken for the model's");
}
