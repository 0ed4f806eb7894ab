//! Flags of a training, read into what it does.

use super::*;
use crate::args::tests::train;
use crate::data::Input;
use crate::tokenizer::Share;
use models::tokens::{self, Windows};

/// What these flags come to where nothing else has started ranks.
pub fn plan(flags: &str) -> TrainPlan {
    TrainPlan::new(&train(flags), None).unwrap_or_else(|e| panic!("{flags}: {e}"))
}

#[test]
fn tokens_of_text_are_held_once_by_ranks_of_one_start_and_by_each_of_others() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("t.txt");
    std::fs::write(&file, "many ranks ".repeat(1000)).unwrap();
    let text = Input::Text { files: vec![file], left_out: None };
    let feed = Feed::open(text, None, None, 256, Share::of(None)).unwrap();
    let (own, started) =
        (tokens_in_memory(&feed, 3, None), tokens_in_memory(&feed, 3, Some(&Identity::alone())));
    assert!((11_000..12_100).contains(&own) && started == 3 * own, "{own} {started}");
    assert_eq!(tokens_in_memory(&Feed::random(1, 256, 11_000), 3, None), 0);
    // They are worth a word where they count.
    assert!(machine::text_advice(own, 2 * own).contains("'caravan tokenize'"));
    assert_eq!(machine::text_advice(own, 20 * own), "");
}

#[test]
fn batches_are_of_the_tokens_for_training_alone_in_the_order_and_by_the_seed_that_were_asked_for() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("t.txt");
    std::fs::write(&file, "many ranks\n".repeat(100).split_at(1000).0).unwrap();
    let usual = format!(
        "--data {} --model nano --seq 8 --micro-batch 3 --accumulate 2 --ranks 4 --transport threads",
        file.display()
    );
    let shuffled = |seed| tokens::Order::Shuffled { seed };
    for (flags, held_out, order) in [
        ("", 100, shuffled(1337)),
        ("--seed 7", 100, shuffled(7)),
        ("--val-fraction 0.6", 600, shuffled(1337)),
        ("--val-fraction 0 --seed 0", 0, shuffled(0)),
        ("--order shuffled --seed 7", 100, shuffled(7)),
        ("--order sequential", 0, tokens::Order::Sequential),
        ("--order sequential --val-fraction 0.25 --seed 7", 250, tokens::Order::Sequential),
    ] {
        let plan = plan(&format!("{usual} {flags}"));
        let windows = Windows::new(0..1000 - held_out, 8).unwrap();
        assert_eq!(plan.batches, BatchPlan::new(windows, order, 3, 2, 4).unwrap(), "{flags}");
        // Epochs later, too.
        assert!((0..10_000).all(|n| plan.batches.start(n) + 8 < 1000 - held_out), "{flags}");
        assert_eq!(plan.feed.held_out_tokens(), held_out, "{flags}");
    }
}
