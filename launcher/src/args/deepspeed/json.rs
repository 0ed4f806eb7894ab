//! A file's JSON, in which no key may stand twice: which of two values was meant nobody can tell.

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::fmt;

/// The one value of a text.
///
/// # Errors
/// Where it stops to be JSON, or the key that stands twice, with line and column.
pub fn parse(text: &str) -> Result<Value, String> {
    // Editors of some systems begin a text with a mark.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    // What is JSON, and too large or too deep to be read.
    let beyond = |e: &serde_json::Error| {
        let told = e.to_string();
        ["number out of range", "recursion limit exceeded"].iter().any(|begin| told.starts_with(begin))
    };
    match serde_json::from_str::<Checked>(text) {
        Ok(Checked(value)) => Ok(value),
        Err(e) if e.is_data() || beyond(&e) => Err(e.to_string()),
        Err(e) => Err(format!("{e}: it has to be JSON, without comments")),
    }
}

struct Checked(Value);

impl<'de> Deserialize<'de> for Checked {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyValue).map(Checked)
    }
}

struct AnyValue;

impl<'de> Visitor<'de> for AnyValue {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Value, A::Error> {
        let mut all = Vec::new();
        while let Some(Checked(value)) = list.next_element()? {
            all.push(value);
        }
        Ok(Value::Array(all))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut block: A) -> Result<Value, A::Error> {
        let mut all = Map::new();
        while let Some(key) = block.next_key::<String>()? {
            if all.contains_key(&key) {
                return Err(A::Error::custom(format_args!("the key '{key}' stands twice")));
            }
            let Checked(value) = block.next_value()?;
            all.insert(key, value);
        }
        Ok(Value::Object(all))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn values_are_read_as_they_stand() {
        let text = r#"{"a": {"b": [1, -2, 5e8, "auto", null, true]}, "c": {}}"#;
        assert_eq!(parse(text).unwrap(), json!({"a": {"b": [1, -2, 5e8, "auto", null, true]}, "c": {}}));
    }

    #[test]
    fn a_mark_of_an_editor_is_no_text() {
        assert_eq!(parse("\u{feff}{\"a\": 1}").unwrap(), json!({"a": 1}));
    }

    #[test]
    fn what_is_json_and_cannot_be_read_is_not_told_to_be_none() {
        for (text, words) in [
            ("{\"a\": 1e999}".to_owned(), "number out of range at line 1"),
            ("[".repeat(200) + &"]".repeat(200), "recursion limit exceeded at line 1"),
        ] {
            let told = parse(&text).unwrap_err();
            assert!(told.starts_with(words) && !told.contains("it has to be JSON"), "{told}");
        }
    }

    #[test]
    fn what_is_no_json_is_told_with_its_place() {
        for (text, words) in [
            ("{\n  \"a\": 1,\n  \"a\": 2\n}", "the key 'a' stands twice at line 3 column 5"),
            ("{\"z\": {\"a\": 1, \"a\": 1}}", "the key 'a' stands twice at line 1 column"),
            ("{\n  # HJSON\n}", "at line 2 column 3: it has to be JSON, without comments"),
            ("{\"a\": 1,}", "trailing comma at line 1 column 9: it has to be JSON, without comments"),
            ("{\"a\": NaN}", "at line 1 column 7"),
            ("", "at line 1 column 0: it has to be JSON"),
        ] {
            let told = parse(text).unwrap_err();
            assert!(told.contains(words), "{told}");
        }
    }
}
