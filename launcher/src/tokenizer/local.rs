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
                Some(Escape::Char(_)) => wide = false,
                Some(Escape::Class(takes)) => wide = takes.is_wide(),
            },
            '[' => match class(&mut rest) {
                None => return false,
                Some(takes) => wide = takes.is_wide(),
            },
            '(' => {
                // What stands behind a question mark there are flags, a name, or which way it looks.
                if rest.next_if_eq(&'?').is_some() {
                    let flags: String = rest.by_ref().take_while(|c| !":=!>)".contains(*c)).collect();
                    // With the one, spaces of the expression are none; the other runs up to something.
                    if flags.contains(['x', '~']) {
                        return false;
                    }
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
                // One that bounds nothing is a brace, and what stands behind it is of the expression.
                if bounds.is_empty() || !bounds.chars().all(|c| c == ',' || c.is_ascii_digit()) {
                    return false;
                }
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

/// What a class of characters takes.
#[derive(Clone, Copy)]
struct Takes {
    /// Some spaces.
    space: bool,
    /// Some characters of words.
    word: bool,
    /// All spaces, so that what takes all but these stops at each.
    every_space: bool,
}

impl Takes {
    const NEITHER: Takes = Takes { space: false, word: false, every_space: false };
    const SPACES: Takes = Takes { space: true, ..Takes::NEITHER };
    const EVERY_SPACE: Takes = Takes { every_space: true, ..Takes::SPACES };
    const WORDS: Takes = Takes { word: true, ..Takes::NEITHER };
    const BOTH: Takes = Takes { word: true, ..Takes::SPACES };

    fn is_wide(self) -> bool {
        self.space && self.word
    }

    fn or(self, other: Takes) -> Takes {
        Takes {
            space: self.space || other.space,
            word: self.word || other.word,
            every_space: self.every_space || other.every_space,
        }
    }

    /// All but this. Which words that are is not told.
    fn negated(self) -> Takes {
        Takes { space: !self.every_space, ..Takes::WORDS }
    }

    fn char(c: char) -> Takes {
        Takes { space: c.is_whitespace(), word: c.is_alphanumeric(), ..Takes::NEITHER }
    }

    /// Between letters of a script lie spaces that its texts hardly have: only those of ASCII count.
    fn range(from: char, to: char) -> Takes {
        let any = |kind: fn(char) -> bool| (from..=to).any(kind);
        let space = any(|c| c.is_ascii_whitespace());
        Takes { space, word: any(char::is_alphanumeric), ..Takes::NEITHER }
    }
}

/// What a backslash and what follows it mean.
enum Escape {
    /// This character, or a place that takes none.
    Char(char),
    Class(Takes),
}

type Rest<'a> = std::iter::Peekable<std::str::Chars<'a>>;

/// What follows a backslash; None for what repeats something from elsewhere.
fn escape(rest: &mut Rest<'_>) -> Option<Escape> {
    let c = rest.next()?;
    let named = |rest: &mut Rest<'_>| match rest.next_if_eq(&'{') {
        Some(_) => rest.by_ref().take_while(|&c| c != '}').collect(),
        None => rest.next().map_or(String::new(), String::from),
    };
    Some(Escape::Class(match c {
        's' => Takes::EVERY_SPACE,
        // Of hexadecimal digits is the second.
        'w' | 'h' | 'd' => Takes::WORDS,
        'p' => match named(rest) {
            name if name.starts_with('^') => Takes::BOTH,
            name if name.starts_with('L') || name.starts_with('N') || name.starts_with('M') => Takes::WORDS,
            // None of which ends a line.
            name if name.starts_with('Z') => Takes::SPACES,
            name if name.starts_with(['P', 'S']) && name.len() < 3 => Takes::NEITHER,
            _ => Takes::BOTH,
        },
        'P' => {
            named(rest);
            Takes::BOTH
        }
        // It stops at spaces.
        'S' => Takes::WORDS,
        'W' | 'D' | 'H' | 'N' | 'O' | 'X' | 'R' => Takes::BOTH,
        // Characters by their numbers.
        'x' | 'u' | 'o' | '0' | 'c' | 'C' | 'M' => Takes::BOTH,
        'k' | 'g' | '1'..='9' => return None,
        'n' => return Some(Escape::Char('\n')),
        'r' => return Some(Escape::Char('\r')),
        't' => return Some(Escape::Char('\t')),
        'v' => return Some(Escape::Char('\x0b')),
        'f' => return Some(Escape::Char('\x0c')),
        other => return Some(Escape::Char(other)),
    }))
}

/// What a class takes; None where that is not told.
fn class(rest: &mut Rest<'_>) -> Option<Takes> {
    let negated = rest.next_if_eq(&'^').is_some();
    let (mut takes, mut first) = (Takes::NEITHER, true);
    // With which a range may begin.
    let mut from = None;
    loop {
        let c = rest.next()?;
        let (part, next) = match (c, from) {
            (']', _) if !first => break,
            ('-', Some(from)) if rest.peek() != Some(&']') => match rest.next()? {
                '[' | '&' => return None,
                '\\' => match escape(rest)? {
                    Escape::Char(to) => (Takes::range(from, to), None),
                    Escape::Class(_) => (Takes::BOTH, None),
                },
                to => (Takes::range(from, to), None),
            },
            ('\\', _) => match escape(rest)? {
                Escape::Char(c) => (Takes::char(c), Some(c)),
                Escape::Class(takes) => (takes, None),
            },
            // A named class, or one in another.
            ('[', _) if rest.next_if_eq(&':').is_some() => {
                let name: String = rest.by_ref().take_while(|&c| c != ']').collect();
                let takes = match name.trim_end_matches(':') {
                    "space" => Takes::EVERY_SPACE,
                    "blank" => Takes::SPACES,
                    "alpha" | "alnum" | "digit" | "lower" | "upper" | "word" => Takes::WORDS,
                    "punct" => Takes::NEITHER,
                    _ => Takes::BOTH,
                };
                (takes, None)
            }
            ('[', _) => (class(rest)?, None),
            ('&', _) if rest.peek() == Some(&'&') => return None,
            (c, _) => (Takes::char(c), Some(c)),
        };
        takes = takes.or(part);
        (from, first) = (next, false);
    }
    Some(if negated { takes.negated() } else { takes })
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
            r"[a-zA-Z0-9-_]+|[-+]\d+|[!-~]+|[^[:space:]]+|[+\-.\\]+|[\n-]+",
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
            r"{[^}]*}",
            r"{.+}|\w+",
            r"a{{.*?}}",
            r"a{",
            r"[\w&&[^a]]+",
            r"\p{^L}+",
            r"[\P{L}]+",
            r"[[:print:]]+",
            "\"[^\"\n]*\"",
            r#""[^"\n]*""#,
            r#""[^"\t ]*""#,
            r"[^a-z]+",
            r"[^\p{Zs}]+",
            r#""[ -~]*""#,
            r#""[\x20-\x7e]*""#,
            r"[\t-z]+",
            r"[[^\s] ]+",
            r"[\h ]+",
            r"(?x) . +",
            r"<(?~>)>",
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
