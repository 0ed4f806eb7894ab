//! Flags and variables that would have no effect where they are given: refused, so that nobody takes a result for theirs.

use crate::{bench, word_tokenizer};

#[test]
fn flags_that_would_do_nothing_are_refused() {
    let bench = bench();
    bench.text("text.txt", 20_000);
    bench.run("tokenize --data text.txt --out t.bin").success();
    word_tokenizer(&bench, 100);
    let train = "train --model nano --micro-batch 1 --sample 0 --quiet --ranks 1";
    bench.run(&format!("{train} --data text.txt --steps 1 --save m")).success();
    let text = format!("{train} --data text.txt");
    let cases: &[(String, &[&str])] = &[
        (format!("{text} --stage 2 --prefetch off"), &["--prefetch at --stage 2", "--stage 3"]),
        // The step after the warm-up is at the peak.
        (format!("{text} --steps 3 --warmup 2 --min-lr 0"), &["--min-lr 0", "--warmup of 2 of 3 --steps"]),
        (format!("{text} --steps 1 --min-lr 0"), &["--min-lr 0", "more --steps"]),
        (
            format!("{train} --data t.bin --tokenizer words-100.json"),
            &["--tokenizer words-100.json", "tokens already"],
        ),
        // A quiet run shows no sample.
        (
            format!("{} --data t.bin --tokenizer words-100.json", train.replace("--sample 0", "--sample 9")),
            &["--tokenizer words-100.json", "--quiet"],
        ),
        ("eval --model m --data t.bin --tokenizer bytes".into(), &["--tokenizer bytes", "tokens already"]),
        ("bench all_reduce --color never".into(), &["--color", "bench draws no bar"]),
    ];
    for (args, words) in cases {
        bench.run(args).refusal(2, words);
    }
    // With another step there is one that comes down, and what is saved or generated is of the tokenizer.
    bench.run(&format!("{text} --steps 3 --warmup 1 --min-lr 0")).success();
    bench.run(&format!("{train} --data t.bin --tokenizer words-100.json --steps 1 --save other")).success();
    bench.nothing_left();
}

#[test]
fn who_knows_where_to_meet_but_not_who_it_is_is_no_run_of_its_own() {
    let bench = bench();
    bench.text("text.txt", 20_000);
    let run = |flags: &str, variable: (&str, &str)| {
        let train = "train --model nano --data text.txt --steps 1 --micro-batch 1 --sample 0 --quiet";
        let mut command = bench.command(&format!("{train} {flags}"));
        command.envs([variable]);
        bench.outcome(&mut command)
    };
    for variable in
        [("CARAVAN_RENDEZVOUS", "head:29500"), ("CARAVAN_LOCAL_RANK", "0"), ("CARAVAN_LOCAL_SIZE", "3")]
    {
        let words = [variable.0, variable.1, "CARAVAN_RANK", "CARAVAN_WORLD", "--ranks N"];
        run("", variable).refusal(2, &words);
        run("--ranks 1", variable).success();
    }
}

#[test]
fn kernels_are_refused_that_no_grid_can_have() {
    let bench = bench();
    for (flags, words) in [
        ("--micro-batch 4294967296 --seq 4294967296", &["4294967296 sequences", "65535"][..]),
        ("--micro-batch 1 --seq 18446744073709551615", &["sequences of 18446744073709551615", "524280"]),
        ("--micro-batch 65535 --seq 524280", &["2^28 tokens"]),
        ("--micro-batch 0", &["--micro-batch 0", "at least 1"]),
        ("--model config.json", &["'config.json'", "by name", "nano"]),
    ] {
        let model = if flags.contains("--model") { "" } else { "--model nano" };
        bench.run(&format!("bench kernels {model} {flags}")).refusal(2, words);
    }
}

#[test]
fn a_figure_shows_each_file_once_by_whatever_name() {
    let bench = bench();
    bench.run("bench barrier -n 1 -w 0 --ranks 1 --json one.json").success();
    bench.run("bench plot one.json ./one.json -o figure.svg").refusal(2, &["one.json and as ./one.json"]);
    bench.run("bench plot - -o figure.svg").refusal(2, &["/dev/stdin"]);
    bench.nothing_left();
}
