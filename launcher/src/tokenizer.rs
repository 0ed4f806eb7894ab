//! Text to tokens and back: bytes, or a Hugging Face tokenizer.json.

mod batch;
pub mod bytes;
mod eod;
mod guarded;
mod local;
mod segments;
mod share;

pub use batch::Batch;
#[cfg(feature = "mpi")]
pub use guarded::catches;
pub use share::Share;

use crate::failure::{Failure, Result};
use guarded::guarded;
use serde_json::{Map, Value};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use tokenizers::ModelWrapper;

/// Bytes of memory that the library takes for a byte of text, about: where each piece of it lies before and after
/// normalising, and each token's text.
const MEMORY_OF_A_BYTE: u64 = 150;
/// Bytes of text that fit everywhere.
const SHORT: u64 = 16 << 20;

/// Turns text into tokens and tokens into text.
pub enum Tokenizer {
    /// Each byte is a token.
    Bytes,
    /// A Hugging Face tokenizer.json.
    HuggingFace(Box<HuggingFace>),
}

/// A Hugging Face tokenizer.json.
pub struct HuggingFace {
    inner: tokenizers::Tokenizer,
    /// Where it came from, and what was there: it may be another when ranks, or who saves a model, come to it.
    path: PathBuf,
    content: Vec<u8>,
    /// The same, as reports show it.
    name: String,
    /// One more than its largest token.
    vocab: usize,
    /// The same of a text in which none of its added tokens is written out.
    plain: usize,
    /// Whether it puts a space before a text, where the part of it that would says so.
    prefix_space: Option<bool>,
    /// What is put behind each text that data are made of.
    eod: Option<u32>,
    /// What it puts before and after a text, where that is known.
    around: Option<(Vec<u32>, Vec<u32>)>,
    /// Whether a long text may be cut into segments.
    local: bool,
}

impl HuggingFace {
    fn open(path: &Path) -> Result<Self> {
        models::hf::check_fetched(path).map_err(|e| Failure::usage(format!("tokenizer {e}")))?;
        let name = path.display().to_string();
        let refuse = |why: String| {
            Failure::usage(format!("tokenizer '{name}' is not a Hugging Face tokenizer.json: {why}"))
        };
        let content = std::fs::read(path).map_err(|e| refuse(e.to_string()))?;
        let opened = guarded(|| tokenizers::Tokenizer::from_bytes(&content)).map_err(refuse)?;
        let mut inner = opened.map_err(|e| refuse(why_not(path, &content, &e.to_string())))?;
        let around = serde_json::to_value(inner.get_post_processor()).map_err(|e| refuse(e.to_string()))?;
        if let ModelWrapper::BPE(bpe) = inner.get_model()
            && let Some(dropout) = bpe.dropout.filter(|&dropout| dropout > 0.0)
        {
            return Err(refuse(format!(
                "its dropout is {dropout}, by which a text is other tokens each time: set \"dropout\" in it to null"
            )));
        }
        if let Some(piece) = unknown_piece(&around) {
            return Err(refuse(format!(
                "its post_processor puts {piece} around a text, which it does not define"
            )));
        }
        // A limit in the file is for batches of texts; transformers does not apply it either unless asked to.
        inner.with_padding(None).with_truncation(None).map_err(|e| refuse(e.to_string()))?;
        // Some settings panic at the first text. What it refuses otherwise is told with the text that it refuses.
        let trial = |text: &str| {
            let tokens = inner.encode_fast(text, true).map(|e| e.get_ids().to_vec()).unwrap_or_default();
            let _ = inner.decode(&tokens, true);
            tokens
        };
        guarded(|| trial("A trial of 1 line: é, 世.\n")).map_err(refuse)?;
        // What stands around a text may be no part of the vocabulary.
        let around = guarded(|| trial("")).map_err(refuse)?;
        let known = inner.get_vocab(true);
        let Some(&largest) = known.values().chain(&around).max() else {
            return Err(refuse("its vocabulary is empty".into()));
        };
        let vocab = largest as usize + 1;
        let plain = inner.get_vocab(false);
        let plain = plain.values().chain(&around).max().map_or(0, |&largest| largest as usize + 1);
        let value = |part: serde_json::Result<Value>| part.map_err(|e| refuse(e.to_string()));
        let normalizer = value(serde_json::to_value(inner.get_normalizer()))?;
        let pre_tokenizer = value(serde_json::to_value(inner.get_pre_tokenizer()))?;
        let local = local::is_local(&normalizer, &pre_tokenizer);
        let prefix_space = pre_tokenizer["add_prefix_space"].as_bool();
        let around = guarded(|| segments::around(&inner)).map_err(refuse)?;
        Ok(HuggingFace {
            inner,
            path: path.to_owned(),
            content,
            name,
            vocab,
            plain,
            prefix_space,
            eod: None,
            around,
            local,
        })
    }

    /// A text of any length, as data have it.
    fn encode(&self, text: &str, share: &Share) -> Result<Vec<u32>> {
        Ok(eod::ended(self.bare(text, share)?, self.eod))
    }

    /// The same by itself.
    fn bare(&self, text: &str, share: &Share) -> Result<Vec<u32>> {
        let sizes = segments::Sizes::USUAL;
        if sizes.is_long(text)
            && self.local
            && let Some((before, after)) = &self.around
            && let Some(mut tokens) = segments::encode(self, text, sizes, share)?
        {
            tokens.splice(..0, before.iter().copied());
            tokens.extend(after);
            return Ok(tokens);
        }
        share.fits(text.len() as u64).map_err(|e| self.refused(e))?;
        self.whole(text)
    }

    /// A text in one piece.
    fn whole(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.run(|inner| inner.encode_fast(text, true))?.get_ids().to_vec())
    }

    /// What the library makes of a text, or refuses it for.
    fn run<T>(&self, work: impl FnOnce(&tokenizers::Tokenizer) -> tokenizers::Result<T>) -> Result<T> {
        let done = guarded(|| work(&self.inner)).map_err(|e| self.refused(e))?;
        done.map_err(|e| Failure::run(self.named(e.to_string())))
    }

    fn refused(&self, why: String) -> Failure {
        Failure::usage(self.named(why))
    }

    fn named(&self, why: String) -> String {
        format!("tokenizer '{}': {why}", self.name)
    }
}

impl Tokenizer {
    /// `bytes`, or the path of a tokenizer.json, of which one of [bytes](bytes::file) is no other.
    ///
    /// # Errors
    /// A file that is missing or is no tokenizer.
    pub fn open(spec: impl AsRef<Path>) -> Result<Self> {
        let path = spec.as_ref();
        if path == Path::new("bytes") {
            return Ok(Tokenizer::Bytes);
        }
        let what = match path.metadata() {
            Ok(there) if there.is_file() => {
                let of_bytes = || std::fs::read(path).is_ok_and(|content| bytes::is(&content));
                if there.len() <= bytes::LONGEST && of_bytes() {
                    return Ok(Tokenizer::Bytes);
                }
                return Ok(Tokenizer::HuggingFace(Box::new(HuggingFace::open(path)?)));
            }
            Err(e) if e.kind() != ErrorKind::NotFound => format!("cannot be opened ({e})"),
            Err(_) if path.is_symlink() => "is a link to nothing".to_owned(),
            _ => "is no file".to_owned(),
        };
        Err(Failure::usage(format!(
            "tokenizer '{}' {what}: give 'bytes' or the path of a Hugging Face tokenizer.json",
            path.display()
        )))
    }

    /// What to call it in reports.
    pub fn name(&self) -> &str {
        match self {
            Tokenizer::Bytes => "bytes",
            Tokenizer::HuggingFace(t) => &t.name,
        }
    }

    /// Its tokenizer.json.
    pub fn path(&self) -> Option<PathBuf> {
        match self {
            Tokenizer::Bytes => None,
            Tokenizer::HuggingFace(t) => Some(t.path.clone()),
        }
    }

    /// The content of the tokenizer.json, for a saved model; None for bytes.
    pub fn file(&self) -> Option<&[u8]> {
        match self {
            Tokenizer::Bytes => None,
            Tokenizer::HuggingFace(t) => Some(&t.content),
        }
    }

    /// What tells it from others, wherever their files lie.
    pub fn fingerprint(&self) -> String {
        match self.file() {
            Some(content) => format!("a file, digest {:016x}", collectives::digest(content.iter().copied())),
            None => self.name().to_owned(),
        }
    }

    /// One more than the largest token it can make.
    pub fn vocab(&self) -> usize {
        match self {
            Tokenizer::Bytes => 256,
            Tokenizer::HuggingFace(t) => t.vocab,
        }
    }

    /// One more than the largest token of a text in which none of its added tokens, such as one for padding, is written
    /// out.
    pub fn plain_vocab(&self) -> usize {
        match self {
            Tokenizer::Bytes => 256,
            Tokenizer::HuggingFace(t) => t.plain,
        }
    }

    /// What a token stands for, in the tokenizer's own spelling.
    pub fn spelling(&self, token: u32) -> String {
        let own = match self {
            Tokenizer::Bytes => None,
            Tokenizer::HuggingFace(t) => t.inner.id_to_token(token),
        };
        own.unwrap_or_else(|| self.decode(&[token]))
    }

    /// The token of this spelling.
    pub fn token(&self, spelling: &str) -> Option<u32> {
        match self {
            Tokenizer::Bytes => None,
            Tokenizer::HuggingFace(t) => t.inner.token_to_id(spelling),
        }
    }

    /// Whether its file says that a space is put before a text, or that none is.
    pub fn prefix_space(&self) -> Option<bool> {
        match self {
            Tokenizer::Bytes => None,
            Tokenizer::HuggingFace(t) => t.prefix_space,
        }
    }

    /// Its added tokens, with how each is found in a text, as a tokenizer_config.json has them.
    pub fn added_tokens(&self) -> Value {
        let added = match self {
            Tokenizer::Bytes => Value::Null,
            Tokenizer::HuggingFace(t) => {
                serde_json::to_value(t.inner.get_added_tokens_decoder()).unwrap_or_default()
            }
        };
        if added.is_null() { Value::Object(Map::new()) } else { added }
    }

    /// The tokens of a text in one piece, as the file alone has them: with whatever its post_processor puts around a text.
    /// transformers may put its first and last token there by `add_bos_token` and `add_eos_token` of a
    /// tokenizer_config.json, which is not read here.
    ///
    /// # Errors
    /// Text that the tokenizer refuses.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match self {
            Tokenizer::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Tokenizer::HuggingFace(t) => t.whole(text),
        }
    }

    /// The tokens of a text that is to be continued: without what the tokenizer puts after one.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn prompt(&self, text: &str) -> Result<Vec<u32>> {
        let mut tokens = self.encode(text)?;
        if let Tokenizer::HuggingFace(t) = self
            && let Some((_, after)) = &t.around
        {
            tokens.truncate(tokens.len() - after.len());
        }
        Ok(tokens)
    }

    /// Readable text for tokens; what is no text shows as replacement characters.
    pub fn decode(&self, tokens: &[u32]) -> String {
        match self {
            Tokenizer::Bytes => {
                // A model may have a larger vocabulary than bytes; its other tokens stand for nothing.
                let bytes: Vec<u8> = tokens.iter().map(|&t| u8::try_from(t).unwrap_or(0xff)).collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
            Tokenizer::HuggingFace(t) => {
                let text = guarded(|| t.inner.decode(tokens, true).map_err(|e| e.to_string()));
                text.flatten().unwrap_or_else(|e| format!("(not decodable: {e})"))
            }
        }
    }
}

/// What there is instead of a tokenizer's description; of JSON without a model, the library only says where it gives up.
fn why_not(path: &Path, content: &[u8], said: &str) -> String {
    match serde_json::from_slice(content) {
        Ok(Value::Object(fields)) if !fields.contains_key("model") => {
            let beside = path.with_file_name("tokenizer.json");
            let meant =
                (beside != path && beside.is_file()).then(|| format!(": {} may be meant", beside.display()));
            format!("it describes no \"model\"{}", meant.unwrap_or_default())
        }
        _ => said.to_owned(),
    }
}

/// What a template, alone or among other post-processors, puts around a single text without saying what that is: the
/// library takes such a template, and would panic at the first text.
fn unknown_piece(processor: &Value) -> Option<&Value> {
    if let Some(several) = processor["processors"].as_array() {
        return several.iter().find_map(unknown_piece);
    }
    let known = |piece: &Value| match (&piece["SpecialToken"]["id"], &piece["Sequence"]["id"]) {
        (Value::String(token), _) => processor["special_tokens"].get(token).is_some(),
        (_, text) => text == "A",
    };
    processor["single"].as_array()?.iter().find(|piece| !known(piece))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A tokenizer of two words with this beside its vocabulary.
    fn opened(extra: Value) -> Result<Tokenizer> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        let mut text = json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": [],
            "normalizer": null,
            "pre_tokenizer": {"type": "Whitespace"},
            "post_processor": null,
            "decoder": null,
            "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "one": 1, "two": 2, "[B]": 3}, "unk_token": "[UNK]"},
        });
        for (key, value) in extra.as_object().unwrap() {
            text[key] = value.clone();
        }
        std::fs::write(&path, text.to_string()).unwrap();
        Tokenizer::open(path.to_str().unwrap())
    }

    /// With what Python's library makes of them.
    #[test]
    fn patterns_are_those_of_python() {
        for (regex, text, pieces) in [
            (r"\p{N}{1,3}+", "123456", &["123456"][..]),
            (r"^\w+", "a b\nc d", &["a", " b\n", "c", " d"]),
            (r"[[:alpha:]]+", "aé", &["aé"]),
            (r"\w+", "x½", &["x½"]),
        ] {
            let vocab: Map<String, Value> =
                ["?"].iter().chain(pieces).enumerate().map(|(i, p)| (p.to_string(), json!(i))).collect();
            let split = json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
            let model = json!({"type": "WordLevel", "vocab": vocab, "unk_token": "?"});
            let tokenizer = opened(json!({"pre_tokenizer": split, "model": model})).unwrap();
            let expected: Vec<u32> = (1..=pieces.len() as u32).collect();
            assert_eq!(tokenizer.encode(text).unwrap(), expected, "{regex}");
        }
    }

    fn template(single: Value) -> Value {
        let begin = json!({"id": "[B]", "ids": [3], "tokens": ["[B]"]});
        json!({"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {"[B]": begin}})
    }

    #[test]
    fn limits_for_batches_do_not_shorten_or_fill_a_text() {
        let truncation =
            json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
        let padding = json!({
            "strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
            "pad_type_id": 0, "pad_token": "[UNK]",
        });
        let limited = opened(json!({"truncation": truncation, "padding": padding})).unwrap();
        assert_eq!(limited.encode("one two two one two").unwrap(), [1, 2, 2, 1, 2]);
    }

    #[test]
    fn a_template_has_to_define_what_it_puts_around_a_text() {
        let text = json!({"Sequence": {"id": "A", "type_id": 0}});
        let token = |id| json!({"SpecialToken": {"id": id, "type_id": 0}});
        let other = json!({"Sequence": {"id": "B", "type_id": 0}});
        let fine = template(json!([token("[B]"), text]));
        let both =
            opened(json!({"post_processor": template(json!([token("[B]"), text, token("[B]")]))})).unwrap();
        assert_eq!((both.encode("one").unwrap(), both.prompt("one").unwrap()), (vec![3, 1, 3], vec![3, 1]));
        assert_eq!(opened(json!({"post_processor": fine})).unwrap().encode("two one").unwrap(), [3, 2, 1]);
        for (single, named) in [(json!([token("[C]"), text]), "[C]"), (json!([text, other]), "\"B\"")] {
            let alone = template(single);
            let among = json!({"type": "Sequence", "processors": [fine, alone]});
            for post_processor in [alone, among] {
                let Err(e) = opened(json!({"post_processor": post_processor})) else {
                    panic!("{named} opened")
                };
                assert!(e.code() == 2 && e.to_string().contains(named), "{e}");
            }
        }
    }

    #[test]
    fn what_the_library_panics_of_is_an_error() {
        let cases = [
            json!({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}),
            json!({"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}}),
            json!({"pre_tokenizer": {"type": "FixedLength", "length": 0}}),
        ];
        for extra in cases {
            let opened = opened(extra.clone());
            let Err(e) = opened else { panic!("{extra} opened") };
            assert!(e.code() == 2 && e.to_string().contains("tokenizer.json"), "{extra}: {e}");
        }
        // The library may or may not mind these, by the text; whatever it does, it does not end the process.
        let nothing = json!({"type": "Replace", "pattern": {"String": ""}, "content": "x"});
        for extra in [json!({"normalizer": nothing}), json!({"decoder": nothing})] {
            let told = opened(extra).and_then(|t| Ok(t.decode(&t.encode("one two é")?)));
            assert!(told.map_or_else(|e| e.code() == 2, |text| !text.is_empty()));
        }
        assert!(guarded::<()>(|| panic!("of {}", 7)).is_err_and(|e| e.contains("of 7")));
    }

    #[test]
    fn the_vocabulary_counts_what_stands_around_a_text_and_is_not_empty() {
        let mut far = template(json!([
            {"SpecialToken": {"id": "[B]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
        ]));
        assert_eq!(opened(json!({"post_processor": far})).unwrap().vocab(), 4);
        far["special_tokens"]["[B]"]["ids"] = json!([900]);
        assert_eq!(opened(json!({"post_processor": far})).unwrap().vocab(), 901);
        assert_eq!(opened(json!({"post_processor": far})).unwrap().plain_vocab(), 901);
        let pad = json!({"id": 4, "content": "<pad>", "special": true, "single_word": false, "lstrip": false,
                         "rstrip": false, "normalized": false});
        let padded = opened(json!({"added_tokens": [pad]})).unwrap();
        assert_eq!((padded.vocab(), padded.plain_vocab()), (5, 4));
        assert_eq!(padded.encode("one <pad> two").unwrap(), [1, 4, 2]);
        assert_eq!(padded.spelling(4), "<pad>");
        let none = json!({"model": {"type": "WordLevel", "vocab": {}, "unk_token": "[UNK]"}});
        let Err(e) = opened(none) else { panic!("an empty vocabulary opened") };
        assert!(e.code() == 2 && e.to_string().contains("vocabulary is empty"), "{e}");
    }

    #[test]
    fn bytes_come_back_as_they_were() {
        let text = "Grüße, 世界\n";
        let tokens = Tokenizer::Bytes.encode(text).unwrap();
        assert_eq!(tokens.len(), text.len());
        assert_eq!(Tokenizer::Bytes.decode(&tokens), text);
        assert!(tokens.iter().all(|&t| (t as usize) < Tokenizer::Bytes.vocab()));
        assert_eq!(Tokenizer::Bytes.decode(&[300, 65]), "\u{fffd}A");
    }

    #[test]
    fn what_git_lfs_left_of_a_tokenizer_is_told() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n")
            .unwrap();
        let Err(e) = Tokenizer::open(file.path()) else { panic!("a pointer opened") };
        let words = ["tokenizer ", "a pointer that git-lfs left", "'git lfs pull'"];
        assert!(e.code() == 2 && words.iter().all(|word| e.to_string().contains(word)), "{e}");
    }

    #[test]
    fn what_is_no_tokenizer_is_an_error_that_names_it() {
        for spec in ["word", "/nonexistent/tokenizer.json", "Cargo.toml"] {
            let Err(e) = Tokenizer::open(spec) else { panic!("{spec} opened") };
            assert_eq!(e.code(), 2);
            assert!(e.to_string().contains(&format!("'{spec}'")), "{e}");
        }
    }
}
