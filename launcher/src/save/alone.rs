//! What lies beside a tokenizer.json, so that transformers makes the tokens with it that the file alone makes: those that a
//! model was trained on.

use super::named::spelling;
use super::{TOKENIZER_CONFIG, TOKENS};
use crate::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

/// The class that takes a tokenizer.json as it is. A Llama's own, which transformers 4 takes where none is named, puts its
/// tokens where the file has others, or none.
const PLAIN: &str = "PreTrainedTokenizerFast";
/// The added tokens, with how each is found in a text, which the file says as well.
pub(super) const ADDED: &str = "added_tokens_decoder";
/// Whether a space is put before a text. Without the key transformers 4 puts none, whatever the file says.
const PREFIX: &str = "add_prefix_space";
/// What puts tokens around a text, takes special tokens apart, or has tokens made by something else than the file.
const OTHERWISE: [&str; 11] = [
    "add_bos_token",
    "add_eos_token",
    "add_special_tokens",
    "auto_map",
    "fix_mistral_regex",
    "from_slow",
    "init_inputs",
    "split_special_tokens",
    "tokenizer_file",
    "tokenizer_object",
    "vocab_file",
];
/// Special tokens that have no key of their own.
const FURTHER: [&str; 2] = ["additional_special_tokens", "extra_special_tokens"];

/// The file of this name, if it is one of those that say how `tokenizer` is to be used.
///
/// # Errors
/// It says nothing, and why.
pub(super) fn adapted(name: &str, content: Vec<u8>, tokenizer: &Tokenizer) -> Result<Vec<u8>, String> {
    if ![TOKENIZER_CONFIG, TOKENS].contains(&name) {
        return Ok(content);
    }
    let mut told: Map<String, Value> = serde_json::from_slice(&content).map_err(|e| e.to_string())?;
    told.retain(|key, value| match spelling(value) {
        // One that the file has not would become one more, behind those that the model knows.
        Some(spelling) if key.ends_with("_token") => tokenizer.token(spelling).is_some(),
        _ => true,
    });
    let is_known = |token: &Value| spelling(token).and_then(|token| tokenizer.token(token)).is_some();
    for key in FURTHER {
        match told.get_mut(key) {
            Some(Value::Array(tokens)) => tokens.retain(is_known),
            Some(Value::Object(tokens)) => tokens.retain(|_, token| is_known(token)),
            _ => {}
        }
    }
    if name == TOKENIZER_CONFIG {
        as_the_file(&mut told, tokenizer);
    }
    Ok(format!("{:#}\n", Value::Object(told)).into_bytes())
}

/// A tokenizer_config.json where there is none.
pub(super) fn config(tokenizer: &Tokenizer) -> Vec<u8> {
    let mut told = Map::new();
    as_the_file(&mut told, tokenizer);
    format!("{:#}\n", Value::Object(told)).into_bytes()
}

/// Has nothing in a tokenizer_config.json say otherwise than the file.
fn as_the_file(told: &mut Map<String, Value>, tokenizer: &Tokenizer) {
    told.retain(|key, _| key != PREFIX && !OTHERWISE.contains(&key.as_str()));
    told.insert("tokenizer_class".into(), json!(PLAIN));
    if let Some(prefix) = tokenizer.prefix_space() {
        told.insert(PREFIX.into(), json!(prefix));
    }
    if let Some(added) = told.get_mut(ADDED) {
        *added = tokenizer.added_tokens();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::save::TOKENIZER;

    /// A tokenizer of words and two added tokens with this in the place of what makes words.
    fn opened(pre_tokenizer: &Value) -> Tokenizer {
        let home = tempfile::tempdir().unwrap();
        let added = |id: u32, content: &str| {
            json!({"id": id, "content": content, "special": true, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false})
        };
        let file = json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
            "added_tokens": [added(2, "<|end|>"), added(3, "<|call|>")], "pre_tokenizer": pre_tokenizer, "decoder": null,
            "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "one": 1}, "unk_token": "[UNK]"},
        });
        let path = home.path().join(TOKENIZER);
        std::fs::write(&path, file.to_string()).unwrap();
        Tokenizer::open(path).unwrap()
    }

    fn adapt(name: &str, told: &Value, tokenizer: &Tokenizer) -> Value {
        let adapted = adapted(name, told.to_string().into_bytes(), tokenizer).unwrap();
        serde_json::from_slice(&adapted).unwrap()
    }

    #[test]
    fn what_would_have_tokens_made_otherwise_goes_and_all_else_stays() {
        let words = opened(&json!({"type": "Whitespace"}));
        let flags = |strips: bool| {
            json!({"content": "<|end|>", "lstrip": strips, "rstrip": strips, "normalized": false, "single_word": false,
                   "special": true})
        };
        let call = json!({"content": "<|call|>", "lstrip": false, "rstrip": false, "normalized": false, "single_word": false,
                          "special": true});
        let told = json!({
            "tokenizer_class": "LlamaTokenizer", "add_bos_token": true, "add_eos_token": true, "add_prefix_space": true,
            "split_special_tokens": true, "auto_map": {"AutoTokenizer": ["a.B", null]}, "tokenizer_file": "/elsewhere",
            "added_tokens_decoder": {"2": flags(true), "9": flags(true)}, "eos_token": flags(true), "pad_token": "[PAD]",
            "bos_token": null, "unk_token": "[UNK]", "additional_special_tokens": ["<|call|>", "[MASK]"],
            "extra_special_tokens": {"call_token": "<|call|>", "image_token": "<image>"}, "model_max_length": 64,
            "chat_template": "{{ messages }}", "clean_up_tokenization_spaces": true,
        });
        let expected = json!({
            "tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": {"2": flags(false), "3": call},
            "eos_token": flags(true), "bos_token": null, "unk_token": "[UNK]", "additional_special_tokens": ["<|call|>"],
            "extra_special_tokens": {"call_token": "<|call|>"}, "model_max_length": 64, "chat_template": "{{ messages }}",
            "clean_up_tokenization_spaces": true,
        });
        assert_eq!(adapt(TOKENIZER_CONFIG, &told, &words), expected);
        let special =
            json!({"eos_token": "<|end|>", "pad_token": "[PAD]", "additional_special_tokens": ["[MASK]"]});
        assert_eq!(
            adapt(TOKENS, &special, &words),
            json!({"eos_token": "<|end|>", "additional_special_tokens": []})
        );
        // What says nothing of tokens is as it was, and what is none of it is said.
        assert_eq!(adapted("chat_template.jinja", b"{{".to_vec(), &words).unwrap(), b"{{");
        for broken in ["", "[]", "{"] {
            assert!(adapted(TOKENIZER_CONFIG, broken.into(), &words).is_err(), "{broken}");
        }
    }

    fn of_bytes(prefix: bool) -> Value {
        json!({"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": true})
    }

    #[test]
    fn a_space_before_a_text_is_as_the_file_says() {
        for (file, told, expected) in [
            (of_bytes(true), json!({}), json!(true)),
            (of_bytes(true), json!({"add_prefix_space": false}), json!(true)),
            (of_bytes(false), json!({"add_prefix_space": true}), json!(false)),
            (json!({"type": "Whitespace"}), json!({"add_prefix_space": true}), Value::Null),
        ] {
            let tokenizer = opened(&file);
            assert_eq!(
                adapt(TOKENIZER_CONFIG, &told, &tokenizer)["add_prefix_space"],
                expected,
                "{file} {told}"
            );
            let alone: Value = serde_json::from_slice(&config(&tokenizer)).unwrap();
            assert_eq!((&alone["add_prefix_space"], &alone["tokenizer_class"]), (&expected, &json!(PLAIN)));
        }
    }
}
