//! Whether a tokenizer cuts a text by what is near: then a text may be cut into segments. A pattern that can run over words
//! and the spaces between them, such as markup or a comment, may begin so far away that a segment does not show it.

use serde_json::Value;

/// Whether what changes a text and what cuts it, as a tokenizer.json has them, look only near a place. What is not known
/// does not.
pub(super) fn is_local(normalizes: &Value, cuts: &Value) -> bool {
    normalizer(normalizes) && pre_tokenizer(cuts)
}

fn all(parts: &Value, each: fn(&Value) -> bool) -> bool {
    parts.as_array().is_some_and(|parts| parts.iter().all(each))
}

fn normalizer(value: &Value) -> bool {
    match value["type"].as_str() {
        None => value.is_null(),
        Some("Sequence") => all(&value["normalizers"], normalizer),
        Some("Replace") => pattern(&value["pattern"]),
        Some(
            "NFC" | "NFD" | "NFKC" | "NFKD" | "Nmt" | "Lowercase" | "Strip" | "StripAccents" | "Prepend"
            | "Precompiled" | "BertNormalizer" | "ByteLevel",
        ) => true,
        Some(_) => false,
    }
}

fn pre_tokenizer(value: &Value) -> bool {
    match value["type"].as_str() {
        None => value.is_null(),
        Some("Sequence") => all(&value["pretokenizers"], pre_tokenizer),
        Some("Split") => pattern(&value["pattern"]),
        Some(
            "ByteLevel" | "Whitespace" | "WhitespaceSplit" | "Metaspace" | "Punctuation" | "Digits"
            | "BertPreTokenizer" | "CharDelimiterSplit" | "UnicodeScripts",
        ) => true,
        // Of a fixed length every cut depends on all cuts before.
        Some(_) => false,
    }
}

fn pattern(value: &Value) -> bool {
    match (value["String"].as_str(), value["Regex"].as_str()) {
        (Some(_), _) => true,
        (_, Some(regex)) => is_bounded(regex),
        _ => false,
    }
}

/// Whether nothing in a regular expression is repeated without end that takes both words and spaces.
fn is_bounded(regex: &str) -> bool {
    let mut rest = regex.chars().peekable();
    // Whether what a quantifier would repeat takes both.
    let mut wide = false;
    while let Some(c) = rest.next() {
        match c {
            '\\' => match escape(&mut rest) {
                None => return false,
                Some(escape) => wide = escape == Escape::Wide,
            },
            '[' => match class(&mut rest) {
                None => return false,
                Some(class) => wide = class,
            },
            '(' => {
                // What stands behind a question mark there are flags, a name, or which way it looks.
                if rest.next_if_eq(&'?').is_some() {
                    rest.find(|c| ":=!>)".contains(*c));
                }
            }
            '.' | ')' => wide = true,
            '*' | '+' => {
                if wide {
                    return false;
                }
                rest.next_if(|c| "+?".contains(*c));
            }
            '?' => {
                rest.next_if(|c| "+?".contains(*c));
            }
            '{' => {
                let bounds: String = rest.by_ref().take_while(|&c| c != '}').collect();
                let most = bounds.rsplit(',').next().and_then(|most| most.parse::<usize>().ok());
                // Repeated in turn by what follows, if that is a quantifier.
                if wide && most.is_none_or(|most| most > 64) {
                    return false;
                }
            }
            _ => wide = false,
        }
    }
    true
}

#[derive(PartialEq)]
enum Escape {
    Space,
    Word,
    Wide,
    Other,
}

type Rest<'a> = std::iter::Peekable<std::str::Chars<'a>>;

/// What follows a backslash; None for what repeats something from elsewhere.
fn escape(rest: &mut Rest<'_>) -> Option<Escape> {
    let c = rest.next()?;
    let named = |rest: &mut Rest<'_>| match rest.next_if_eq(&'{') {
        Some(_) => rest.by_ref().take_while(|&c| c != '}').collect(),
        None => rest.next().map_or(String::new(), String::from),
    };
    Some(match c {
        's' | 'n' | 'r' | 't' | 'v' | 'f' | 'h' => Escape::Space,
        'w' | 'd' => Escape::Word,
        'p' => match named(rest) {
            name if name.starts_with('^') => Escape::Wide,
            name if name.starts_with('L') || name.starts_with('N') || name.starts_with('M') => Escape::Word,
            name if name.starts_with('Z') => Escape::Space,
            name if name.starts_with(['P', 'S']) && name.len() < 3 => Escape::Other,
            _ => Escape::Wide,
        },
        'P' => {
            named(rest);
            Escape::Wide
        }
        // It stops at spaces.
        'S' => Escape::Word,
        'W' | 'D' | 'H' | 'N' | 'O' | 'X' | 'R' => Escape::Wide,
        'k' | 'g' | '1'..='9' => return None,
        _ => Escape::Other,
    })
}

/// Whether a class takes words and spaces; None where that is not told.
fn class(rest: &mut Rest<'_>) -> Option<bool> {
    let negated = rest.next_if_eq(&'^').is_some();
    let (mut space, mut word, mut wide, mut first) = (false, false, false, true);
    loop {
        match rest.next()? {
            ']' if !first => break,
            '\\' => match escape(rest)? {
                Escape::Space => space = true,
                Escape::Word => word = true,
                Escape::Wide => wide = true,
                Escape::Other => {}
            },
            '[' => {
                // A named class, or one in another.
                if rest.next_if_eq(&':').is_some() {
                    let name: String = rest.by_ref().take_while(|&c| c != ']').collect();
                    match name.trim_end_matches(':') {
                        "space" | "blank" => space = true,
                        "alpha" | "alnum" | "digit" | "lower" | "upper" | "word" => word = true,
                        "punct" => {}
                        _ => wide = true,
                    }
                } else {
                    // Which is as wide as it is by itself.
                    wide |= class(rest)?;
                }
            }
            '&' if rest.peek() == Some(&'&') => return None,
            c if c.is_whitespace() => space = true,
            c if c.is_alphanumeric() => word = true,
            _ => {}
        }
        first = false;
    }
    // All but spaces stops at them, and all but words at those.
    Some(if negated { !space && !word } else { wide || space && word })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn patterns_of_models_look_near_a_place() {
        for regex in [
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+",
            r" ?[^(\s|[.,!?…。，、।۔،])]+",
            r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
            r"\s?\p{L}+|\s?\p{P}+|[一-龥ࠀ-一가-퟿]+|\p{N}{1,3}",
            r"[[:alpha:]]+|[[:space:]]+",
            r" {2,}",
        ] {
            assert!(is_bounded(regex), "{regex}");
        }
    }

    #[test]
    fn what_runs_over_words_and_spaces_does_not() {
        for regex in [
            r"<!--[\s\S]*?-->",
            r"(?s:.*)",
            r"(\p{L}+ )+x",
            r"[a-z ]+",
            r"(a)\1",
            r"\W+",
            r"[^\p{P}]{3,}",
            r".{0,1000}",
            r"[\w&&[^a]]+",
            r"\p{^L}+",
            r"[\P{L}]+",
            r"[[:print:]]+",
        ] {
            assert!(!is_bounded(regex), "{regex}");
        }
        let split = |regex: &str| json!({"type": "Split", "pattern": {"Regex": regex}});
        let several = |cuts: Value| json!({"type": "Sequence", "pretokenizers": [{"type": "Digits"}, cuts]});
        assert!(is_local(&Value::Null, &several(split(r"\s+"))));
        assert!(!is_local(&Value::Null, &several(split(".*"))));
        assert!(!is_local(&Value::Null, &several(json!({"type": "FixedLength", "length": 5}))));
        let replace = json!({"type": "Replace", "pattern": {"Regex": ".+"}, "content": " "});
        assert!(!is_local(&json!({"type": "Sequence", "normalizers": [replace]}), &split(r"\s+")));
    }
}
