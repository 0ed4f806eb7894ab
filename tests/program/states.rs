//! `caravan checkpoint`: what a state is of, whether it is as it was written, and its weights as a model.

use crate::disks::{CARAVAN, with_disk};
use crate::saving::as_nobody;
use crate::{bench, word_tokenizer};
use harness::Bench;
use serde_json::Value;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

const TRAIN: &str =
    "train --model nano --data text.txt --seq 16 --micro-batch 1 --sample 0 --quiet --ranks 2 --steps 3";

fn trained(flags: &str) -> Bench {
    let bench = bench();
    bench.text("text.txt", 3000);
    bench.run(&format!("{TRAIN} --checkpoint ckpt {flags}")).success();
    bench
}

/// CRC-32 bit by bit, as its definition has it.
fn crc32(bytes: &[u8]) -> u32 {
    let one = |crc: u32, _| (crc >> 1) ^ (0xedb8_8320 & 0u32.wrapping_sub(crc & 1));
    !bytes.iter().fold(!0, |crc, &byte| (0..8).fold(crc ^ u32::from(byte), one))
}

/// Names of files below a directory, and their bytes.
fn files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let mut all = Vec::new();
    for part in ["first_moments", "second_moments", "weights"] {
        for entry in fs::read_dir(dir.join(part)).unwrap() {
            let entry = entry.unwrap();
            let name = format!("{part}/{}", entry.file_name().to_string_lossy());
            all.push((name, fs::read(entry.path()).unwrap()));
        }
    }
    all.sort();
    all
}

#[test]
fn a_state_tells_of_every_file_what_was_written() {
    let bench = trained("--dtype bf16 --save saved");
    let said = bench.run("checkpoint ckpt --json").success().json();
    assert_eq!((&said["training"]["step"], &said["verified"]), (&Value::from(3), &Value::from(false)));
    assert_eq!(said["training"]["settings"]["--dtype"], "bf16");
    let there = files(&bench.path("ckpt/step-3"));
    let told = said["training"]["files"].as_object().unwrap();
    assert_eq!(told.len(), there.len());
    for (name, bytes) in &there {
        assert_eq!(told[name]["bytes"], bytes.len(), "{name}");
        assert_eq!(told[name]["crc32"], format!("{:08x}", crc32(bytes)), "{name}");
    }
    let all: usize = there.iter().map(|(_, bytes)| bytes.len()).sum();
    assert_eq!(said["bytes"], all);
    // In words, of the directory of the step itself too.
    let text = bench.run("checkpoint ckpt/step-3 --verify").success().stdout;
    assert!(text.starts_with("ckpt/step-3: the state after step 3, written 20"), "{text}");
    let tokens = said["training"]["tokens"].as_u64().unwrap();
    let by = format!("trained by     2 ranks, on {tokens} tokens\n");
    assert!(text.contains(&by) && text.contains("--dtype bf16 "), "{text}");
    assert_eq!(text.matches("as written").count(), there.len(), "{text}");
    bench.nothing_left();
}

/// The weights that a training saves are those of its last state, rounded.
#[test]
fn the_weights_of_a_state_become_the_model_that_the_training_saves() {
    for dtype in ["bf16", "f32", "f16"] {
        let bench = trained(&format!("--dtype {dtype} --save saved"));
        bench.run("checkpoint ckpt --save model").success();
        let content = |dir: &str| {
            let mut names: Vec<_> =
                fs::read_dir(bench.path(dir)).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            names
                .into_iter()
                .map(|name| (fs::read(bench.path(dir).join(&name)).unwrap(), name))
                .collect::<Vec<_>>()
        };
        assert!(content("model") == content("saved"), "{dtype}");
        // In the place of a model, and otherwise than the training computed.
        let said = bench.run("checkpoint ckpt --save model --dtype f32 --json").success().json();
        assert_eq!(said["saved"]["dtype"], "f32");
        assert!(content("model") == content("ckpt/step-3/weights"), "{dtype}");
        bench.nothing_left();
    }
}

#[test]
fn a_state_that_is_not_as_it_was_written_is_found_out_and_becomes_no_model() {
    let bench = trained("");
    let change = |file: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let path = bench.path("ckpt/step-3").join(file);
        let whole = fs::read(&path).unwrap();
        let mut changed = whole.clone();
        change(&mut changed);
        fs::write(&path, changed).unwrap();
        (path, whole)
    };
    for (file, of_weights) in [
        ("weights/model.safetensors", true),
        ("first_moments/model.safetensors", false),
        ("second_moments/model.safetensors", false),
    ] {
        // A single bit of a number in its midst.
        let (path, whole) = change(file, &|bytes| *bytes.iter_mut().nth_back(5000).unwrap() ^= 4);
        let words = [file, "is not as it was written: the CRC-32"];
        bench.run("checkpoint ckpt --verify").refusal(1, &words);
        // Without that nothing is read but what is needed.
        bench.run("checkpoint ckpt").success();
        let saved = bench.run("checkpoint ckpt --save model");
        if of_weights {
            saved.refusal(1, &words);
            assert!(!bench.path("model").exists());
        } else {
            saved.success();
        }
        fs::write(path, whole).unwrap();
    }
    let (path, whole) = change("weights/config.json", &|bytes| bytes.push(b'\n'));
    let lengths = format!("{} bytes were written, and {} are there", whole.len(), whole.len() + 1);
    bench.run("checkpoint ckpt --verify").refusal(1, &["weights/config.json", &lengths]);
    fs::write(path, whole).unwrap();
    bench.run("checkpoint ckpt --verify").success();
    // Of what nothing is told, or nothing that can be read, nobody says that it is as it was.
    for (entry, words) in [
        ("/files/weights~1model.safetensors", "what was written as weights/model.safetensors is not told"),
        ("/files/weights~1config.json", "what was written as weights/config.json is not told"),
        ("/files", "what was written as"),
        (
            "/files/weights~1model.safetensors/crc32",
            "what training.json tells of weights/model.safetensors is no length and CRC-32",
        ),
    ] {
        let (path, whole) = change("training.json", &|bytes| {
            let mut told: Value = serde_json::from_slice(bytes).unwrap();
            let (above, name) = entry.rsplit_once('/').unwrap();
            let above = told.pointer_mut(above).unwrap().as_object_mut().unwrap();
            above.remove(&name.replace("~1", "/")).unwrap();
            *bytes = told.to_string().into_bytes();
        });
        for flags in ["--verify", "--save model2", "--json --verify"] {
            bench.run(&format!("checkpoint ckpt {flags}")).refusal(1, &[words]);
        }
        fs::write(path, whole).unwrap();
    }
    assert!(!bench.path("model2").exists());
    // So are states that cannot be read, and who reads JSON is told, too; without that question they are no arguments.
    for (file, left, words) in [
        ("weights/model.safetensors", 5000, "weights/model.safetensors"),
        ("second_moments/model.safetensors", 5000, "second_moments/model.safetensors"),
        ("training.json", 0, "training.json: EOF"),
        ("training.json", 2, "training.json is not that of step 3"),
    ] {
        let (path, whole) = change(file, &|bytes| {
            bytes.truncate(left);
            if left == 2 {
                *bytes = b"{}".to_vec();
            }
        });
        bench.run("checkpoint ckpt --verify").refusal(1, &[words]);
        let told = bench.run("checkpoint ckpt --verify --json").refusal(1, &[words]).json();
        assert_eq!((&told["dir"], &told["verified"]), (&"ckpt/step-3".into(), &false.into()));
        assert!(told["wrong"].as_str().unwrap().contains(words), "{told}");
        assert_eq!(bench.run("checkpoint ckpt --json").refusal(2, &[words]).stdout, "");
        fs::write(path, whole).unwrap();
    }
    fs::remove_file(bench.path("ckpt/step-3/training.json")).unwrap();
    for named in ["ckpt", "ckpt/step-3"] {
        bench
            .run(&format!("checkpoint {named} --verify"))
            .refusal(1, &["step-3: training.json: No such file"]);
    }
    bench.nothing_left();
}

#[test]
fn what_is_no_state_or_no_place_for_a_model_is_refused() {
    let bench = trained("--save saved");
    fs::create_dir(bench.path("empty")).unwrap();
    let before = files(&bench.path("ckpt/step-3"));
    for (flags, words) in [
        ("missing", "checkpoint missing: is no directory: name what 'caravan train --checkpoint' was given"),
        ("empty", "checkpoint empty: has no state: name"),
        ("empty --verify", "checkpoint empty: has no state: name"),
        ("saved", "checkpoint saved: has no state: name"),
        ("text.txt", "checkpoint text.txt: is no directory: name"),
        ("ckpt --dtype f32", "--save"),
        ("ckpt --save text.txt", "exists and is not a directory"),
        ("ckpt --save ckpt/model", "lie in each other"),
        ("ckpt --save ckpt", "lie in each other"),
        ("ckpt/step-3 --save ckpt/step-3/weights", "lie in each other"),
        ("ckpt/step-3 --save ckpt/model", "lie in each other"),
        ("ckpt/step-3 --save ckpt/step-9", "lie in each other"),
        ("ckpt --save model --dtype f8", "f8"),
    ] {
        bench.run(&format!("checkpoint {flags}")).refusal(2, &[words]);
    }
    assert!(files(&bench.path("ckpt/step-3")) == before && !bench.path("model").exists());
    // Of a name that it has not.
    fs::rename(bench.path("ckpt/step-3"), bench.path("ckpt/step-4")).unwrap();
    bench.run("checkpoint ckpt").refusal(2, &["training.json is not that of step 4"]);
    // One that lies alone is beside whatever is there.
    fs::rename(bench.path("ckpt/step-4"), bench.path("step-3")).unwrap();
    bench.run("checkpoint step-3 --save model").success();
    bench.nothing_left();
}

/// Whoever opens a pipe waits for its writer.
#[test]
fn what_tells_of_a_state_is_a_file() {
    let bench = trained("");
    let told = bench.path("ckpt/step-3/training.json");
    fs::remove_file(&told).unwrap();
    for special in ["/dev/zero", "pipe"] {
        match special {
            "pipe" => assert!(Command::new("mkfifo").arg(&told).status().unwrap().success()),
            device => symlink(device, &told).unwrap(),
        }
        bench.run("checkpoint ckpt").refusal(2, &["ckpt/step-3: training.json: it is no regular file"]);
        bench
            .run("checkpoint ckpt --verify")
            .refusal(1, &["ckpt/step-3: training.json: it is no regular file"]);
        bench
            .run(&format!("{TRAIN} --checkpoint ckpt --resume"))
            .refusal(2, &["training.json: it is no regular file"]);
        fs::remove_file(&told).unwrap();
    }
    bench.nothing_left();
}

/// So are those whose sums are told.
#[test]
fn what_is_compared_is_a_file() {
    let bench = bench();
    bench.text("text.txt", 3000);
    let words = word_tokenizer(&bench, 256);
    let words = words.file_name().unwrap().to_str().unwrap();
    bench.run(&format!("{TRAIN} --checkpoint ckpt --tokenizer {words}")).success();
    bench.run("checkpoint ckpt --verify").success();
    let beside = bench.path("ckpt/step-3/weights/tokenizer.json");
    fs::remove_file(&beside).unwrap();
    assert!(Command::new("mkfifo").arg(&beside).status().unwrap().success());
    for flags in ["--verify", "--save model"] {
        bench
            .run(&format!("checkpoint ckpt {flags}"))
            .refusal(1, &["weights/tokenizer.json", "not a regular file"]);
    }
    bench.nothing_left();
}

#[test]
fn names_that_are_almost_a_state_s_and_links_to_nothing_are_told_as_such() {
    let bench = trained("");
    // A copy of somebody's own, which no training takes away.
    fs::rename(bench.path("ckpt/step-3"), bench.path("ckpt/step-03")).unwrap();
    bench.run("checkpoint ckpt").refusal(2, &["checkpoint ckpt: has no state"]);
    let go_on = format!("{TRAIN} --checkpoint ckpt --resume");
    bench.run(&go_on).refusal(2, &["--checkpoint ckpt: has step-03, which is no checkpoint"]);
    fs::remove_dir_all(bench.path("ckpt/step-03")).unwrap();
    symlink("/nonexistent/step-9", bench.path("ckpt/step-9")).unwrap();
    for flag in ["", "--verify"] {
        let code = if flag.is_empty() { 2 } else { 1 };
        bench.run(&format!("checkpoint ckpt {flag}")).refusal(code, &["step-9: training.json: No such file"]);
    }
    bench.nothing_left();
}

#[test]
fn what_a_state_tells_gives_a_terminal_no_orders() {
    let bench = trained("");
    let told = bench.path("ckpt/step-3/training.json");
    let text = fs::read_to_string(&told).unwrap();
    let changed = text.replacen("\"--seed\": \"", "\"--seed\": \"\\u001b[31m", 1);
    assert_ne!(text, changed);
    fs::write(&told, changed).unwrap();
    let said = bench.run("checkpoint ckpt").success().stdout;
    assert!(said.contains("--seed \\u{1b}[31m") && !said.contains('\u{1b}'), "{said}");
}

/// It is none that has no state.
#[test]
fn a_directory_that_may_not_be_read_is_told_as_that() {
    let bench = trained("");
    symlink("loop", bench.path("loop")).unwrap();
    let said = "checkpoint loop: Too many levels of symbolic links";
    bench.run("checkpoint loop").refusal(2, &[said]);
    bench.run("checkpoint loop --verify").refusal(1, &[said]);
    let allow = |path: &str, mode: u32| {
        fs::set_permissions(bench.path(path), Permissions::from_mode(mode)).unwrap();
    };
    allow(".", 0o755);
    // What is in it may be opened and not listed, or neither.
    for (mode, named) in [(0o111, "ckpt"), (0, "ckpt"), (0, "ckpt/step-3")] {
        allow("ckpt", mode);
        let said = format!("checkpoint {named}: Permission denied");
        let Some(outcome) = as_nobody(&bench, &format!("checkpoint {named}")) else { break };
        outcome.refusal(2, &[&said]);
        let outcome = as_nobody(&bench, &format!("checkpoint {named} --verify --json")).unwrap();
        let told = outcome.refusal(1, &[&said]).json();
        assert_eq!((&told["dir"], &told["verified"]), (&named.into(), &false.into()));
    }
    if let Some(outcome) = as_nobody(&bench, &format!("{TRAIN} --checkpoint ckpt --resume")) {
        outcome.refusal(2, &["--checkpoint ckpt: Permission denied"]);
    }
    allow("ckpt", 0o755);
    // Or only listed.
    allow("ckpt/step-3", 0o744);
    if let Some(outcome) = as_nobody(&bench, "checkpoint ckpt/step-3") {
        outcome.refusal(2, &["checkpoint ckpt/step-3: Permission denied"]);
    }
    allow("ckpt/step-3", 0o755);
    bench.run("checkpoint ckpt --verify").success();
    bench.nothing_left();
}

/// Beyond 65504 there is no f16.
#[test]
fn weights_that_the_type_does_not_hold_become_no_model() {
    let bench = trained("--lr 3e4 --clip 0 --warmup 0");
    bench
        .run("checkpoint ckpt --save model --dtype f16")
        .refusal(1, &["--save", "inf as f16: take another --dtype"]);
    assert!(!bench.path("model").exists());
    bench.nothing_left();
}

#[test]
fn a_full_disk_takes_no_half_a_model() {
    let bench = trained("");
    // There is room for the weights, and not for all that goes with them.
    let run =
        format!("{CARAVAN} checkpoint ckpt --dtype bf16 --save disk/model; code=$?; ls -A disk; exit $code");
    let Some(outcome) = with_disk(&bench, "248k", &run) else { return };
    let outcome = outcome.refusal(1, &["--save", "disk/model", "No space left"]);
    assert!(!outcome.stdout.contains("model\n") && !outcome.stdout.contains("saved"), "{}", outcome.stdout);
    bench.nothing_left();
}

#[test]
fn what_lies_beside_weights_is_compared_and_goes_with_the_model() {
    let bench = bench();
    bench.text("text.txt", 3000);
    let tokenizer = word_tokenizer(&bench, 200);
    let beside = bench.path("tok");
    fs::create_dir_all(beside.join("additional_chat_templates")).unwrap();
    fs::copy(tokenizer, beside.join("tokenizer.json")).unwrap();
    fs::write(beside.join("additional_chat_templates/tool.jinja"), "{{ messages }}").unwrap();
    bench.run(&format!("{TRAIN} --tokenizer tok/tokenizer.json --checkpoint ckpt")).success();
    let template = "weights/additional_chat_templates/tool.jinja";
    let said = bench.run("checkpoint ckpt --verify").success().stdout;
    assert!(
        said.contains(&format!("  {template}\n")) && said.contains("  weights/tokenizer.json\n"),
        "{said}"
    );
    bench.run("checkpoint ckpt --save model").success();
    for name in ["tokenizer.json", "tokenizer_config.json", "additional_chat_templates/tool.jinja"] {
        let [there, saved] =
            ["ckpt/step-3/weights", "model"].map(|dir| fs::read(bench.path(dir).join(name)).unwrap());
        assert_eq!(there, saved, "{name}");
    }
    fs::write(bench.path("ckpt/step-3").join(template), "{{ message  }}").unwrap();
    bench.run("checkpoint ckpt --save model").refusal(1, &[template, "is not as it was written"]);
    bench.nothing_left();
}

#[test]
fn a_training_goes_back_to_an_earlier_state_that_it_has_kept() {
    let bench = bench();
    bench.text("text.txt", 3000);
    let train = |steps: usize, flags: &str| {
        let line = TRAIN.replace("--steps 3", &format!("--steps {steps} --warmup 1 --schedule constant"));
        bench.run(&format!("{line} --checkpoint ckpt --checkpoint-every 1 {flags}")).success();
    };
    let kept = || {
        let mut names: Vec<_> =
            fs::read_dir(bench.path("ckpt")).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        names
    };
    train(5, "--checkpoint-keep 3");
    assert_eq!(kept(), ["step-3", "step-4", "step-5"]);
    let text = bench.run("checkpoint ckpt").success().stdout;
    assert!(
        text.starts_with("ckpt/step-5: ") && text.contains("  beside it      step-3, step-4\n"),
        "{text}"
    );
    let others = bench.run("checkpoint ckpt/step-4 --json").success().json();
    assert_eq!(others["others"], serde_json::json!(["step-3", "step-5"]));
    let last = files(&bench.path("ckpt/step-5"));
    for step in ["step-4", "step-5"] {
        fs::remove_dir_all(bench.path("ckpt").join(step)).unwrap();
    }
    train(5, "--checkpoint-keep 2 --resume");
    assert_eq!(kept(), ["step-4", "step-5"]);
    assert!(files(&bench.path("ckpt/step-5")) == last);
    train(6, "--resume");
    assert_eq!(kept(), ["step-6"]);
    bench.nothing_left();
}
