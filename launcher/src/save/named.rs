//! Which of a tokenizer's tokens begin and end a text: what lies beside a tokenizer.json says so, and not the file itself.

use super::{TOKENIZER_CONFIG, TOKENS};
use crate::tokenizer::Tokenizer;
use serde_json::{Map, Value};

/// The token that these files, by name, have under `key`, such as `eos_token`, if the tokenizer has it. As to transformers,
/// special_tokens_map.json goes before tokenizer_config.json, unless that lists all added tokens.
pub(super) fn token(files: &[(String, Vec<u8>)], key: &str, tokenizer: &Tokenizer) -> Option<u32> {
    let [config, tokens] = [TOKENIZER_CONFIG, TOKENS].map(|name| read(files, name));
    let first = tokens.get(key).filter(|told| !told.is_null() && !config.contains_key(super::alone::ADDED));
    tokenizer.token(spelling(first.or(config.get(key))?)?)
}

/// The object in the file of this name; an empty one where there is none.
pub(super) fn read(files: &[(String, Vec<u8>)], name: &str) -> Map<String, Value> {
    let file = files.iter().find(|(other, _)| other == name);
    file.and_then(|(_, content)| serde_json::from_slice(content).ok()).unwrap_or_default()
}

/// How a token is written, which stands there by itself or with how it is found in a text.
pub(super) fn spelling(token: &Value) -> Option<&str> {
    token.as_str().or(token["content"].as_str())
}
