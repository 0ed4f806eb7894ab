//! Pages of trainings side by side.

use crate::bench;
use harness::json_lines;
use serde_json::Value;
use std::fs;

const TRAIN: &str = "train --model nano --data text.txt --seq 16 --micro-batch 2 --warmup 1 --schedule constant --sample 0 --quiet";

/// What stands between tags, and whether every tag that is opened is closed, in order.
fn well_formed(page: &str) -> Vec<String> {
    let (mut open, mut texts) = (Vec::new(), Vec::new());
    let mut rest = page.strip_prefix("<!DOCTYPE html>").expect("HTML");
    while let Some((text, tag)) = rest.split_once('<') {
        texts.push(text.trim().to_owned());
        if let Some(comment) = tag.strip_prefix("!--") {
            rest = comment.split_once("-->").expect("an end").1;
            continue;
        }
        let (tag, after) = tag.split_once('>').expect("an end");
        match tag.strip_prefix('/') {
            Some(name) => assert_eq!(open.pop(), Some(name.to_owned()), "before {after:.80}"),
            None if tag.ends_with('/') => {}
            None => open.push(tag.split_whitespace().next().expect("a name").to_owned()),
        }
        rest = after;
    }
    assert_eq!(open, Vec::<String>::new());
    texts.retain(|text| !text.is_empty());
    texts
}

#[test]
fn trainings_stand_side_by_side_with_what_their_metrics_say() {
    let bench = bench();
    bench.text("text.txt", 6000);
    bench.run(&format!("{TRAIN} --steps 6 --stage 1 --eval-every 3 --metrics one.jsonl")).success();
    // The second goes on after step 2, and makes step 3 again.
    let other =
        format!("{TRAIN} --stage 3 --ranks 3 --dtype f16 --checkpoint state --resume --metrics other.jsonl");
    bench.run(&format!("{other} --steps 2")).success();
    let lines = fs::read_to_string(bench.path("other.jsonl")).unwrap();
    let lost = lines
        .lines()
        .find(|line| line.contains("\"step\":2,"))
        .unwrap()
        .replace("\"step\":2,", "\"step\":3,");
    fs::write(bench.path("other.jsonl"), format!("{lines}{lost}\n")).unwrap();
    bench.run(&format!("{other} --steps 4")).success();

    let said = bench.run("report one.jsonl other.jsonl --title Stages").success().stdout;
    assert_eq!(said, "2 trainings in report.html\n");
    let page = fs::read_to_string(bench.path("report.html")).unwrap();
    let texts = well_formed(&page);
    let after = |name: &str, n: usize| {
        let at = texts.iter().position(|text| text == name).unwrap_or_else(|| panic!("{name} in {texts:?}"));
        texts[at + 1..at + 1 + n].to_vec()
    };
    let metrics = ["one.jsonl", "other.jsonl"].map(|file| json_lines(&bench.path(file)));
    let last = |of: &dyn Fn(&Value) -> Option<f64>| {
        metrics
            .each_ref()
            .map(|lines| format!("{:.4}", lines.iter().rev().find_map(of).expect("a line")))
            .to_vec()
    };
    assert_eq!(
        after("training loss, last step", 2),
        last(&|line| line["step"].is_u64().then(|| line["loss"].as_f64())?)
    );
    assert_eq!(after("held-out loss, last", 2), last(&|line| line["evaluation"]["loss"].as_f64()));
    assert_eq!(after("steps", 2), ["6", "4"]);
    assert_eq!(after("stage", 2), ["1", "3"]);
    assert_eq!(after("steps skipped", 2)[0], "0");
    assert!(page.contains("2 runs that went on with each other; 1 step made again"), "{texts:?}");
    assert!(page.contains("<title>Stages</title>") && !page.contains("not at its end"));
    // Five figures for both and the scale of f16, one of times each; each step a point of the line of losses.
    assert_eq!(page.matches("<svg").count(), 6 + 2);
    let lengths = page.split("<polyline").skip(1).map(|line| {
        let points = line.split_once("points=\"").expect("points").1.split('"').next().unwrap();
        points.split_whitespace().count()
    });
    let lengths: Vec<usize> = lengths.collect();
    assert!(lengths.contains(&6) && lengths.contains(&4) && !lengths.contains(&5), "{lengths:?}");
    // Nothing is loaded from elsewhere.
    let elsewhere = page.replace("http://www.w3.org/", "");
    assert!(!["http", "src=", "href", "url(", "@import"].iter().any(|word| elsewhere.contains(word)));

    // The same again takes its place; one that is under way is shown so far.
    let half = fs::read_to_string(bench.path("one.jsonl")).unwrap();
    let cut = half.find("\"step\":4,").unwrap();
    fs::write(bench.path("half.jsonl"), &half[..cut]).unwrap();
    bench.run("report half.jsonl -o report.html").success();
    let page = fs::read_to_string(bench.path("report.html")).unwrap();
    well_formed(&page);
    assert!(page.contains("not at its end: step 3 of 6"), "{page}");
    let printed = bench.run("report half.jsonl -o /dev/stdout").success().stdout;
    assert_eq!(printed, page);
}

#[test]
fn what_is_no_metrics_makes_no_page() {
    let bench = bench();
    bench.text("text.txt", 6000);
    bench.run(&format!("{TRAIN} --steps 2 --metrics m.jsonl")).success();
    bench.file("notes.html", "mine");
    bench.file("x.jsonl", "{}\n");
    for n in 0..8 {
        fs::copy(bench.path("m.jsonl"), bench.path(&format!("m{n}.jsonl"))).unwrap();
    }
    let eight = "report m0.jsonl m1.jsonl m2.jsonl m3.jsonl m4.jsonl m5.jsonl m6.jsonl m7.jsonl";
    for (args, words) in [
        ("report", "<RUN.jsonl>"),
        ("report none.jsonl", "none.jsonl cannot be read"),
        ("report text.txt", "text.txt is no metrics: its line 1 is not JSON"),
        ("report x.jsonl", "line 1 comes before any that begins with \"run\""),
        ("report m.jsonl m.jsonl", "m.jsonl twice"),
        ("report - ", "/dev/stdin"),
        ("report m.jsonl -o m.jsonl", "m.jsonl"),
        ("report m.jsonl -o notes.html", "page of 'caravan report'"),
        ("report m.jsonl -o nowhere/r.html", "there is no directory"),
        (eight, "a page tells 7 trainings apart, and 8 were given"),
    ] {
        bench.run(args).refusal(2, &[words]);
        assert!(!bench.path("report.html").exists(), "{args}");
    }
    assert_eq!(fs::read_to_string(bench.path("notes.html")).unwrap(), "mine");
}
