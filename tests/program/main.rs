//! The program as users run it: whole processes, their output, their exit codes and what they leave behind.

mod bits;
mod checkpoints;
mod deepspeed;
mod devices;
mod disks;
mod diverging;
mod doctor;
mod documents;
mod elastic;
mod endings;
mod evaluated_states;
mod forecasts;
mod held_out;
mod help;
mod idle;
mod inputs;
mod leftovers;
mod limits;
mod models;
mod output;
mod own_parts;
mod pauses;
mod progress;
mod rates;
mod reports;
mod saving;
mod states;
mod stopping;
mod traces;
mod training;
mod usage;

use harness::Bench;

/// The program under test.
fn bench() -> Bench {
    Bench::new(env!("CARGO_BIN_EXE_caravan"))
}

/// A Hugging Face tokenizer of whole words: the bench's text, and as many further words as it takes to reach
/// `vocab`.
fn word_tokenizer(bench: &Bench, vocab: usize) -> std::path::PathBuf {
    let known =
        ["[UNK]", "many", "ranks", "carry", "one", "model", "over", "the", "pass", "before", "winter"];
    let words = (0..vocab).map(|i| known.get(i).map_or(format!("w{i}"), |w| w.to_string()));
    let map: serde_json::Map<_, _> = words.enumerate().map(|(i, w)| (w, i.into())).collect();
    let tokenizer = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": map, "unk_token": "[UNK]"},
    });
    bench.file(&format!("words-{vocab}.json"), tokenizer.to_string())
}

/// A shape that transformers 5 refuses, whose heads do not divide its hidden size, as `odd.json`.
fn odd_shape(bench: &Bench) {
    let shape = serde_json::json!({
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 5, "head_dim": 16,
        "intermediate_size": 176, "max_position_embeddings": 64, "vocab_size": 256,
    });
    bench.file("odd.json", shape.to_string());
}
