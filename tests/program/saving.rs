//! Where a model may be saved: whatever cannot take it at the end, or would be lost under it, is refused before the run.

use crate::bench;
use std::fs;

const TRAIN: &str =
    "train --model nano --data text.txt --steps 1 --micro-batch 1 --sample 0 --quiet --ranks 1 --save";

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
    kept("app", &["has config.json and no weights"]);
    bench.file("shape/config.json", "{}");
    bench.file("shape/tokenizer.json", "{}");
    kept("shape", &["no weights, so it is no model", "a new, an empty or a model directory"]);
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
        bench
            .run(&format!("{TRAIN} m").replace("text.txt", data))
            .refusal(2, &["--save ", "/m would replace", ".txt, which --data", "another directory"]);
    }
    assert_eq!(fs::read(bench.path("m/merges.txt")).unwrap(), text);
    // The model that goes on there may, and one that nobody reads.
    bench.run(&format!("{TRAIN} m").replace("nano", "m")).success();
    bench.run(&format!("{TRAIN} m")).success();
}
