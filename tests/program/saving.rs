//! Where a model may be saved: whatever cannot take it at the end, or would be lost under it, is refused before the run.

use crate::bench;
use harness::{Bench, Outcome, is_root, skip};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;

const TRAIN: &str =
    "train --model nano --data text.txt --steps 1 --micro-batch 1 --sample 0 --quiet --ranks 1 --save";
/// Who has nothing here.
const NOBODY: u32 = 65534;

/// A directory may have a file of such a name for another reason.
#[test]
fn what_is_no_whole_model_is_not_replaced() {
    let bench = bench();
    bench.text("text.txt", 8000);
    let kept = |dir: &str, words: &[&str]| {
        let names = || {
            let entries = fs::read_dir(bench.path(dir)).unwrap().flatten();
            entries.map(|entry| entry.file_name()).collect::<Vec<_>>()
        };
        let before = names();
        bench.run(&format!("{TRAIN} {dir}")).refusal(2, &[&["--save: ", dir][..], words].concat());
        assert_eq!(names(), before);
    };
    bench.file("words/vocab.json", "of a lexicon");
    kept("words", &["has vocab.json and no config.json, so it is no model"]);
    bench.file("app/config.json", "{}");
    kept("app", &["has config.json and no model.safetensors or index"]);
    bench.file("shape/config.json", "{}");
    bench.file("shape/tokenizer.json", "{}");
    kept(
        "shape",
        &[
            "no model.safetensors or index of several, so it is no model",
            "a new, an empty or a model directory",
        ],
    );
    fs::create_dir(bench.path("m")).unwrap();
    bench.run(&format!("{TRAIN} m")).success();
    for odd in ["model-notes.safetensors", "model-1-of-2.safetensors", "model-0000a-of-00002.safetensors"] {
        let path = bench.file(&format!("m/{odd}"), "years of work");
        kept("m", &[odd, "no part of a model"]);
        fs::remove_file(path).unwrap();
    }
    // As larger models have.
    bench.file("m/model-00001-of-00002.safetensors", "");
    bench.run(&format!("{TRAIN} m")).success();
}

#[test]
fn data_that_lie_in_a_model_are_not_replaced_by_another() {
    let bench = bench();
    bench.text("text.txt", 8000);
    bench.run(&format!("{TRAIN} m")).success();
    let text = fs::read(bench.text("m/merges.txt", 9000)).unwrap();
    std::os::unix::fs::symlink("m/merges.txt", bench.path("link.txt")).unwrap();
    for data in ["m/merges.txt", "m", "link.txt", "text.txt m/merges.txt"] {
        bench.run(&format!("{TRAIN} m").replace("text.txt", data)).refusal(
            2,
            &["--save ", "/m would replace", ".txt, which is among the data", "another directory"],
        );
    }
    assert_eq!(fs::read(bench.path("m/merges.txt")).unwrap(), text);
    // The model that goes on there may, and one that nobody reads.
    bench.run(&format!("{TRAIN} m").replace("nano", "m")).success();
    bench.run(&format!("{TRAIN} m")).success();
}

/// Whoever stands in it would stand in nothing.
#[test]
fn the_directory_that_a_run_is_in_is_not_replaced() {
    let bench = bench();
    bench.text("text.txt", 8000);
    bench.run(&format!("{TRAIN} m")).success();
    fs::create_dir_all(bench.path("empty/inner")).unwrap();
    let train = TRAIN.replace("text.txt", bench.path("text.txt").to_str().unwrap());
    for (from, save) in
        [("m", "."), ("m", "../m"), ("empty/inner", "."), ("empty/inner", "./"), ("empty/inner", "..")]
    {
        let mut command = bench.command(&format!("{train} {save}"));
        bench
            .outcome(command.current_dir(bench.path(from)))
            .refusal(2, &[&format!("--save: {save}"), "this run is in it", "from outside"]);
    }
    let mut command = bench.command(&format!("{train} ../../m"));
    bench.outcome(command.current_dir(bench.path("empty/inner"))).success();
}

/// Runs as a user who has nothing in the scratch folder, or has no more rights than anybody. None, and a skip, where that
/// cannot be.
pub fn as_nobody(bench: &Bench, args: &str) -> Option<Outcome> {
    let start = |args: &str| {
        let mut command = bench.command(args);
        if is_root() {
            command.uid(NOBODY).gid(NOBODY);
        }
        command.spawn()
    };
    match start("--version") {
        Ok(child) => bench.finish(child).success(),
        Err(e) => {
            skip(&format!("another user cannot start the program: {e}"));
            return None;
        }
    };
    Some(bench.finish(start(args).unwrap()))
}

#[test]
fn a_model_that_its_user_may_not_replace_is_found_before_training() {
    let bench = bench();
    bench.text("text.txt", 8000);
    let allow = |path: &str, mode: u32| {
        fs::set_permissions(bench.path(path), Permissions::from_mode(mode)).unwrap();
    };
    allow(".", 0o777);
    for dir in ["m", "theirs"] {
        bench.run(&format!("{TRAIN} {dir}")).success();
    }
    fs::create_dir(bench.path("empty")).unwrap();
    allow("m", 0o555);
    let Some(outcome) = as_nobody(&bench, &format!("{TRAIN} m")) else { return };
    outcome.refusal(2, &["--save: ", "/m: ", "may not", "Permission denied", "another directory"]);
    if !is_root() {
        allow("m", 0o755);
        return skip("giving a directory to another user needs root");
    }
    // In such as /tmp each may move only what is theirs.
    let before = bench.names();
    allow(".", 0o1777);
    for dir in ["m", "empty"] {
        allow(dir, 0o777);
        let outcome = as_nobody(&bench, &format!("{TRAIN} {dir}")).unwrap();
        outcome
            .refusal(2, &["--save: ", &format!("/{dir}: "), "another user", "sticky", "another directory"]);
    }
    std::os::unix::fs::chown(bench.path("theirs"), Some(NOBODY), None).unwrap();
    for dir in ["theirs", "new"] {
        as_nobody(&bench, &format!("{TRAIN} {dir}")).unwrap().success();
    }
    bench.run(&format!("{TRAIN} theirs")).success();
    assert_eq!(bench.names(), [&before[..2], &["new".to_owned()], &before[2..]].concat());
}

/// A name that was mistyped costs no file: each output takes the place of its own kind only.
#[test]
fn outputs_replace_nothing_that_is_something_else() {
    let bench = bench();
    bench.text("text.txt", 8000);
    let precious = "{\"model_type\": \"llama\"}\n";
    let measure = "bench all_reduce -b 64 -e 64 -n 1 -w 0 --ranks 2 --transport threads";
    let train = "train --model nano --data text.txt --steps 1 --micro-batch 1 --sample 0 --transport threads";
    for (command, flag, name, what) in [
        (train, "--metrics", "config.json", "no metrics of a run"),
        (measure, "--json", "precious.txt", "no JSON of 'caravan bench'"),
        (measure, "--csv", "precious.csv", "no CSV of 'caravan bench'"),
        (measure, "--plot", "precious.svg", "no SVG"),
        ("tokenize --data text.txt", "--out", "precious.bin", "no token file"),
        (
            "bench overlap -b 64 -e 64 -n 1 --transport threads",
            "--json",
            "o.json",
            "no JSON of 'caravan bench'",
        ),
    ] {
        let line = format!("{command} {flag} {name}");
        bench.file(name, precious);
        let words = [&format!("{flag} {name}: "), what, "take another name or remove it"];
        bench.run(&line).refusal(2, &words);
        assert_eq!(fs::read_to_string(bench.path(name)).unwrap(), precious);
        // What is empty, and its own, it may.
        bench.file(name, "");
        bench.run(&line).success();
        let own = fs::read(bench.path(name)).unwrap();
        assert!(!own.is_empty());
        bench.run(&line).success();
    }
    bench.file("figure.svg", precious);
    bench.run("bench plot precious.txt -o figure.svg").refusal(2, &["-o figure.svg: ", "no SVG"]);
    bench.run("bench plot precious.txt -o precious.svg").success();
    bench.run(&format!("{train} --metrics /dev/null")).success();
    bench.nothing_left();
}
