//! Bytes as a Hugging Face tokenizer.json has them, for who reads no other tokenizer.

use serde_json::{Map, Value, json};

/// No file that is one of these is longer, however it is laid out.
pub const LONGEST: u64 = 1 << 16;

/// The tokenizer.json by which each byte of a text is the token of its value.
pub fn file() -> Vec<u8> {
    format!("{:#}\n", described()).into_bytes()
}

/// The tokenizer_config.json beside it. Spaces before marks, which a clean-up would take away, are tokens, too.
pub fn config() -> Vec<u8> {
    let config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": false, "clean_up_tokenization_spaces": false,
    });
    format!("{config:#}\n").into_bytes()
}

/// Whether this is a tokenizer.json of bytes, however it is laid out.
pub fn is(content: &[u8]) -> bool {
    content.len() as u64 <= LONGEST
        && serde_json::from_slice::<Value>(content)
            .is_ok_and(|described_there| described_there == described())
}

/// All that the library would write of it.
fn described() -> Value {
    let vocab: Map<String, Value> =
        (0..=255u8).zip(alphabet()).map(|(byte, letter)| (letter.into(), json!(byte))).collect();
    let bytes =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": bytes, "post_processor": null, "decoder": bytes,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": [],
        },
    })
}

/// The letters that ByteLevel has for bytes: those of Latin-1 that can be seen are themselves, the others come in their order
/// from U+0100 on.
fn alphabet() -> impl Iterator<Item = char> {
    let mut others = '\u{100}'..;
    (0..=255u8).filter_map(move |byte| match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae.. => Some(char::from(byte)),
        _ => others.next(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;

    #[test]
    fn the_file_makes_each_byte_its_token_and_text_of_it_again() {
        let library = tokenizers::Tokenizer::from_bytes(file()).unwrap();
        // All characters of up to three bytes, and some of four: every byte that UTF-8 has.
        let text: String = ('\0'..='\u{1ffff}').chain(['\u{10ffff}', '\u{c0000}']).collect();
        let text = format!(" \u{20}a , b .\n\n{text}");
        let tokens = library.encode_fast(&*text, true).unwrap();
        assert!(tokens.get_ids().iter().copied().eq(text.bytes().map(u32::from)));
        assert!(library.decode(tokens.get_ids(), true).unwrap() == text);
        assert_eq!(
            alphabet().collect::<std::collections::HashSet<_>>(),
            ByteLevel::alphabet().into_iter().collect()
        );
    }

    #[test]
    fn it_is_known_again_however_it_is_laid_out_and_nothing_else_is_taken_for_it() {
        let library = tokenizers::Tokenizer::from_bytes(file()).unwrap();
        assert!(is(&file()) && is(library.to_string(false).unwrap().as_bytes()));
        let others = [
            (&["added_tokens"][..], json!([{"id": 256, "content": "<|end|>"}])),
            (&["pre_tokenizer", "add_prefix_space"], json!(true)),
            (&["model", "vocab", "a"], json!(98)),
            (&["post_processor"], json!({"type": "ByteLevel"})),
        ];
        for (path, other) in others {
            let mut changed = described();
            *path.iter().fold(&mut changed, |inner, key| &mut inner[*key]) = other;
            assert!(!is(changed.to_string().as_bytes()), "{path:?}");
        }
        assert!(!is(b"") && !is(b"{}") && !is(&vec![b' '; 1 << 17]));
    }
}
