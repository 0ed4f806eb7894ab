//! A long text in segments that are tokenised side by side, with the tokens of the whole text.
//!
//! A tokenizer cuts a text into words from its start to its end and makes tokens of each word by itself. Where it cuts
//! next depends on the last cut and on the text around, not on the cuts before: others (`local.rs`) get a text in one
//! piece. So a segment that begins anywhere has the
//! words of the whole text from the first cut on that it shares with the segment before, which has them up to where its
//! end comes into play. Segments overlap so far that there is such a cut; where there is none, two become one. A tokenizer
//! that makes no words of a text gets it in one piece.

use super::{HuggingFace, Share};
use crate::failure::Result;
use collectives::parallel;
use std::ops::Range;

/// How a text is cut.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    /// Bytes of a segment.
    pub(super) segment: usize,
    /// Bytes that it has in common with the one before; in the quarters at both ends no seam is made.
    pub(super) overlap: usize,
    /// Bytes at most of segments that became one.
    pub(super) longest: usize,
}

impl Sizes {
    pub(super) const USUAL: Sizes = Sizes { segment: 1 << 20, overlap: 16 << 10, longest: 16 << 20 };

    /// Whether a text is worth cutting.
    pub(super) fn is_long(&self, text: &str) -> bool {
        text.len() > 2 * self.segment
    }
}

/// A tokenizer that makes fewer words of the first segment does not cut at words.
const FEWEST_WORDS: usize = 16;
/// So many words have to be the same on both sides of a seam.
const SAME_WORDS: usize = 4;

/// The tokens of one segment.
struct Segment {
    /// Its bytes of the text.
    range: Range<usize>,
    ids: Vec<u32>,
    /// The words: where in the text each begins, and its first token.
    words: Vec<(usize, usize)>,
}

impl Segment {
    fn encode(tokenizer: &HuggingFace, text: &str, range: Range<usize>) -> Result<Self> {
        let encoding = tokenizer.run(|inner| inner.encode(&text[range.clone()], false))?;
        let (ids, of, places) = (encoding.get_ids(), encoding.get_word_ids(), encoding.get_offsets());
        let begins = |&i: &usize| i == 0 || of[i].is_none() || of[i] != of[i - 1];
        let begin = |i: usize| (range.start + places[i].0, i);
        let mut words: Vec<(usize, usize)> = (0..ids.len()).filter(begins).map(begin).collect();
        if !words.is_sorted() {
            // Who does not keep to the text's order shows no cuts of it.
            words.clear();
        }
        Ok(Segment { ids: ids.to_vec(), words, range })
    }

    /// The words that begin in this part of the text.
    fn words_in(&self, part: &Range<usize>) -> &[(usize, usize)] {
        let at = |place: usize| self.words.partition_point(|w| w.0 < place);
        &self.words[at(part.start)..at(part.end).max(at(part.start))]
    }

    /// The tokens of these words.
    fn tokens_of(&self, words: &[(usize, usize)]) -> &[u32] {
        let Some(first) = words.first() else { return &[] };
        let after = self.words.partition_point(|w| w.1 <= words[words.len() - 1].1);
        let end = self.words.get(after).map_or(self.ids.len(), |w| w.1);
        &self.ids[first.1..end]
    }
}

/// Where `next` takes over from `last`: the first tokens of a word that both have.
fn seam(last: &Segment, next: &Segment) -> Option<(usize, usize)> {
    let margin = (last.range.end - next.range.start) / 4;
    let part = next.range.start + margin..last.range.end - margin;
    let (before, after) = (last.words_in(&part), next.words_in(&part));
    let (i, j) = before.iter().enumerate().find_map(|(i, word)| {
        let j = after.binary_search_by_key(&word.0, |w| w.0).ok()?;
        Some((i, j))
    })?;
    let (before, after) = (&before[i..], &after[j..]);
    let same = before.len() == after.len()
        && before.iter().zip(after).all(|(a, b)| a.0 == b.0)
        && last.tokens_of(before) == next.tokens_of(after);
    (same && before.len() >= SAME_WORDS).then(|| (before[0].1, after[0].1))
}

/// The tokens of `text`, without what stands around a text, in this share of the machine; None where it cannot be cut.
///
/// # Errors
/// Text that the tokenizer refuses, or that has more tokens than fit in memory.
pub(super) fn encode(
    tokenizer: &HuggingFace,
    text: &str,
    sizes: Sizes,
    share: &Share,
) -> Result<Option<Vec<u32>>> {
    let (ranges, threads, text_bytes) = (cut(text, sizes), share.threads, text.len() as u64);
    let longest = share.longest().min(sizes.longest as u64);
    let (mut tokens, mut last, mut from) = (Vec::new(), None::<Segment>, 0);
    for wave in ranges.chunks(threads.max(1)) {
        let segment = |range: &Range<usize>| Segment::encode(tokenizer, text, range.clone());
        for next in parallel::map(wave.iter(), threads, segment) {
            let next = next?;
            let Some(before) = last.take() else {
                if next.words.len() < FEWEST_WORDS {
                    return Ok(None);
                }
                last = Some(next);
                continue;
            };
            if let Some((end, begin)) = seam(&before, &next).filter(|seam| seam.0 >= from) {
                tokens.extend_from_slice(&before.ids[from..end]);
                share.holds(text_bytes, tokens.len()).map_err(|e| tokenizer.refused(e))?;
                (last, from) = (Some(next), begin);
                continue;
            }
            let range = before.range.start..next.range.end;
            if range.len() as u64 > longest {
                return Ok(None);
            }
            let both = Segment::encode(tokenizer, text, range)?;
            if both.ids.get(..from) != before.ids.get(..from) {
                return Ok(None);
            }
            last = Some(both);
        }
    }
    tokens.extend(last.iter().flat_map(|last| &last.ids[from..]));
    Ok(Some(tokens))
}

/// Segments, each with an end of the one before, between characters.
fn cut(text: &str, sizes: Sizes) -> Vec<Range<usize>> {
    let between =
        |at: usize| (0..=at.min(text.len())).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
    let segments = text.len().div_ceil(sizes.segment);
    let range = |k: usize| {
        between((k * sizes.segment).saturating_sub(sizes.overlap))..between((k + 1) * sizes.segment)
    };
    (0..segments).map(range).collect()
}

/// What a tokenizer puts before and after a text, where that can be told from the text's own tokens.
pub(super) fn around(tokenizer: &tokenizers::Tokenizer) -> Option<(Vec<u32>, Vec<u32>)> {
    let ids = |special| Some(tokenizer.encode_fast("a1", special).ok()?.get_ids().to_vec());
    let (bare, full) = (ids(false)?, ids(true)?);
    let spare = full.len().checked_sub(bare.len())?;
    let mut places = (0..=spare).filter(|&at| full[at..].starts_with(&bare));
    let (at, None) = (places.next()?, places.next()) else { return None };
    Some((full[..at].to_vec(), full[at + bare.len()..].to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;

    const SMALL: Sizes = Sizes { segment: 800, overlap: 240, longest: 8000 };

    /// Bytes, some of which go together, after these.
    fn byte_pairs(normalizer: Value, pre_tokenizer: Value, post_processor: Value) -> HuggingFace {
        let mut alphabet: Vec<String> = ByteLevel::alphabet().into_iter().map(String::from).collect();
        alphabet.extend(["\u{2581}", "\u{4e16}"].map(String::from));
        alphabet.sort();
        let merges = [
            ("\u{120}", "t"),
            ("h", "e"),
            ("\u{120}t", "he"),
            ("1", "2"),
            ("12", "3"),
            ("\u{120}", "\u{120}"),
        ];
        let merged = merges.iter().map(|(a, b)| format!("{a}{b}"));
        let vocab: serde_json::Map<String, Value> =
            alphabet.iter().cloned().chain(merged).enumerate().map(|(i, t)| (t, json!(i))).collect();
        let end = json!({"id": vocab.len(), "content": "<|end|>", "special": true, "single_word": false,
                         "lstrip": false, "rstrip": false, "normalized": false});
        let merges: Vec<_> = merges.iter().map(|(a, b)| json!([a, b])).collect();
        let text = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [end], "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer, "post_processor": post_processor, "decoder": null,
            "model": {"type": "BPE", "vocab": vocab, "merges": merges, "unk_token": null},
        });
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        std::fs::write(&path, text.to_string()).unwrap();
        HuggingFace::open(&path).unwrap()
    }

    fn byte_level(prefix: bool, regex: bool) -> Value {
        json!({"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": regex})
    }

    /// The pattern of Llama 3.
    fn by_pattern() -> Value {
        let pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
        let split =
            json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
        json!({"type": "Sequence", "pretokenizers": [split, byte_level(false, false)]})
    }

    fn by(threads: usize) -> Share {
        Share { threads, ..Share::of(None) }
    }

    fn whole(tokenizer: &HuggingFace, text: &str) -> Vec<u32> {
        tokenizer.run(|inner| inner.encode_fast(text, false)).unwrap().get_ids().to_vec()
    }

    /// A text of such pieces.
    fn text(seed: u64, pieces: &[&str], count: usize) -> String {
        let mut state = seed;
        let piece = |_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            pieces[(state >> 33) as usize % pieces.len()]
        };
        (0..count).map(piece).collect()
    }

    #[test]
    fn segments_have_the_tokens_of_the_whole_text() {
        let none = || Value::Null;
        let trim = byte_level(false, true);
        let metaspace =
            json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "first", "split": true});
        let both = json!({"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": true}, trim]});
        let tokenizers = [
            byte_pairs(none(), byte_level(false, true), trim.clone()),
            byte_pairs(none(), byte_level(true, true), none()),
            byte_pairs(json!({"type": "NFC"}), by_pattern(), none()),
            byte_pairs(json!({"type": "Lowercase"}), by_pattern(), trim),
            byte_pairs(none(), metaspace, none()),
            byte_pairs(none(), both, none()),
        ];
        let words = [
            "the ", " the", "\n\n", "  ", "12", "34567", "x", "don't", "\u{4e16}", "e\u{301}", ". ",
            "<|end|>", "\t",
        ];
        for (i, tokenizer) in tokenizers.iter().enumerate() {
            for seed in 0..20 {
                let text = text(seed, &words, 3000);
                let found = encode(tokenizer, &text, SMALL, &by(2))
                    .unwrap()
                    .unwrap_or_else(|| panic!("{i} {seed}: not cut"));
                assert!(found == whole(tokenizer, &text), "tokenizer {i}, text {seed}");
            }
        }
    }

    #[test]
    fn what_is_longer_than_a_seam_is_not_cut() {
        let tokenizer = byte_pairs(Value::Null, by_pattern(), Value::Null);
        let prose = text(1, &["the cat ", "12 ", "sat. "], 300);
        for run in ["1".repeat(1000), " ".repeat(1501), "a".repeat(3000), "\n".repeat(999)] {
            for shift in 0..4 {
                let text = format!("{}{prose}{run}{prose}{run}{prose}", "b".repeat(shift));
                let found = encode(&tokenizer, &text, SMALL, &by(3)).unwrap().expect("joined");
                assert!(found == whole(&tokenizer, &text), "{}", &run[..1]);
            }
        }
        let endless = format!("{prose}{}", "a".repeat(2 * SMALL.longest));
        assert_eq!(encode(&tokenizer, &endless, SMALL, &by(2)).unwrap(), None);
        // One word, whatever the text.
        let wordless = byte_pairs(Value::Null, Value::Null, Value::Null);
        assert_eq!(encode(&wordless, &prose, SMALL, &by(2)).unwrap(), None);
    }

    #[test]
    fn what_takes_more_memory_than_a_rank_has_is_refused() {
        let tokenizer = byte_pairs(Value::Null, by_pattern(), Value::Null);
        let prose = text(1, &["cat ", "12 ", "sat. "], 1000);
        let share = |ranks, memory| Share { ranks, memory, threads: 1 };
        // Letters without a seam, which one of few ranks joins.
        let run = format!("{prose}{}{prose}", "a".repeat(5000));
        let found = encode(&tokenizer, &run, SMALL, &share(1, 1 << 30)).unwrap().expect("joined");
        assert!(found == whole(&tokenizer, &run));
        assert_eq!(encode(&tokenizer, &run, SMALL, &share(1 << 12, 1 << 30)).unwrap(), None);
        let size = prose.len() as u64;
        assert!(encode(&tokenizer, &prose, SMALL, &share(1, 5 * size)).unwrap().is_some());
        let told = encode(&tokenizer, &prose, SMALL, &share(1, 3 * size)).unwrap_err().to_string();
        assert!(
            told.contains("and its tokens, which are more than") && told.contains("split it into smaller"),
            "{told}"
        );
    }

    #[test]
    fn what_stands_around_a_text_stands_there_once() {
        let token = |id: &str| json!({"SpecialToken": {"id": id, "type_id": 0}});
        let ids = json!({"a": {"id": "a", "ids": [7, 8], "tokens": ["a", "b"]}, "c": {"id": "c", "ids": [9], "tokens": ["c"]}});
        let template = json!({"type": "TemplateProcessing", "pair": [], "special_tokens": ids,
                              "single": [token("a"), {"Sequence": {"id": "A", "type_id": 0}}, token("c")]});
        let tokenizer = byte_pairs(Value::Null, by_pattern(), template);
        assert_eq!(tokenizer.around, Some((vec![7, 8], vec![9])));
        let text = text(3, &["before ", "1234", " behind", "\n"], 450_000);
        assert!(text.len() > 2 * Sizes::USUAL.segment);
        let all = tokenizer.run(|inner| inner.encode_fast(text.as_str(), true)).unwrap();
        assert!(tokenizer.encode(&text, &Share::of(None)).unwrap() == all.get_ids());
        assert!(encode(&tokenizer, &text, Sizes::USUAL, &by(2)).unwrap().is_some());
    }
}
