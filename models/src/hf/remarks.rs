//! What a config.json says of a model beside its shape.

use crate::units::DEVIATION;
use serde_json::{Map, Value};

/// The keys that name special tokens: kept for a saved model as they stand there. Training knows the last.
pub(super) const TOKEN_IDS: [&str; 3] = ["bos_token_id", "eos_token_id", "pad_token_id"];

/// Other keys of which each names tokens, beside those that end in `_token_id`: how a model is sampled once lay there.
const OF_TOKENS: [&str; 5] =
    ["bad_words_ids", "begin_suppress_tokens", "force_words_ids", "forced_decoder_ids", "suppress_tokens"];

/// The key that says that a model's tokens are bytes, whatever lies beside it: ours, and ignored by transformers.
pub(super) const OF_BYTES: (&str, &str) = ("caravan_tokenizer", "bytes");

/// What a config.json says of a model beside its shape; by default what is so of a new one.
#[derive(Clone, Debug, PartialEq)]
pub struct Remarks {
    /// `bos_token_id`, `eos_token_id` and `pad_token_id` as they stand there; by default explicitly none. For a key that is
    /// not there transformers has a default of its own.
    pub token_ids: Map<String, Value>,
    /// Whether the model's tokens are bytes.
    pub of_bytes: bool,
    /// Whether who generates with it is to remember keys and values.
    pub use_cache: bool,
    /// Of attention, in training.
    pub dropout: f64,
    /// The standard deviation of new weights.
    pub initializer_range: f64,
    /// What stands there besides and means nothing here, such as the names of a classifier's labels.
    pub others: Map<String, Value>,
}

impl Default for Remarks {
    fn default() -> Self {
        Remarks {
            token_ids: no_token_ids(),
            of_bytes: false,
            use_cache: true,
            dropout: 0.0,
            initializer_range: DEVIATION,
            others: Map::new(),
        }
    }
}

impl Remarks {
    /// Names no token any more, as of a new model: those of its tokenizer are others now.
    pub fn forget_tokens(&mut self) {
        self.token_ids = no_token_ids();
        self.others.retain(|key, _| !(key.ends_with("_token_id") || OF_TOKENS.contains(&key.as_str())));
    }
}

/// That no token begins or ends a text: without these keys LlamaConfig has tokens 1 and 2 do that.
pub(super) fn no_token_ids() -> Map<String, Value> {
    ["bos_token_id", "eos_token_id"].into_iter().map(|key| (key.to_owned(), Value::Null)).collect()
}
