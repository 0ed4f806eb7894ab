//! Values by the paths of their keys, `zero_optimization.stage`, as the types that they have to have.

use serde_json::Value;

/// What a file says of a key.
#[derive(Clone, Debug, PartialEq)]
pub enum Said<T> {
    /// Nothing.
    Absent,
    /// "auto": what the flags say.
    Auto,
    /// This.
    Value(T),
}

impl<T> Said<T> {
    /// The same as something else.
    pub fn map<U>(self, other: impl FnOnce(T) -> U) -> Said<U> {
        match self {
            Said::Absent => Said::Absent,
            Said::Auto => Said::Auto,
            Said::Value(value) => Said::Value(other(value)),
        }
    }

    /// What it says, if it says something.
    pub fn value(self) -> Option<T> {
        match self {
            Said::Value(value) => Some(value),
            Said::Absent | Said::Auto => None,
        }
    }
}

/// A configuration.
pub struct Document(pub Value);

/// The largest whole number, up to which f64 has all of them: any may be written as 5e8.
const MOST: usize = 1 << 53;

/// A value as it stands in the file.
pub fn shown(value: &Value) -> String {
    match value {
        Value::Object(_) => "{...}".to_owned(),
        Value::Number(n) if n.is_f64() => plain(n.as_f64().unwrap_or_default()),
        value => value.to_string(),
    }
}

/// A number as people write it, and flags take it, with all digits that tell it from others.
pub fn plain(number: f64) -> String {
    // Of the two zeros the one that has no sign.
    let number = number + 0.0;
    match number.abs() {
        1e-4.. | 0.0 => number.to_string(),
        _ => format!("{number:e}"),
    }
}

/// Whether it is for people only.
pub fn is_comment(key: &str) -> bool {
    key.starts_with('_') || key == "comment"
}

impl Document {
    /// The value at a path.
    pub fn get(&self, path: &str) -> Option<&Value> {
        path.split('.').try_fold(&self.0, |value, key| value.get(key))
    }

    /// Whether something is there.
    pub fn has(&self, path: &str) -> bool {
        self.get(path).is_some_and(|value| !value.is_null())
    }

    /// Whether keys are there.
    pub fn is_block(&self, path: &str) -> bool {
        self.get(path).is_some_and(Value::is_object)
    }

    /// What is said at a path, of the kind that `read` takes; null says nothing.
    fn said<T>(
        &self,
        path: &str,
        needed: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Said<T>, String> {
        match self.get(path) {
            None | Some(Value::Null) => Ok(Said::Absent),
            Some(Value::String(text)) if text == "auto" => Ok(Said::Auto),
            Some(value) => match read(value) {
                Some(read) => Ok(Said::Value(read)),
                None => Err(format!("{path} {}: {needed} is needed", shown(value))),
            },
        }
    }

    /// A whole number, which may be written as 5e8.
    pub fn whole(&self, path: &str) -> Result<Said<usize>, String> {
        self.whole_to(path, MOST)
    }

    fn whole_to(&self, path: &str, most: usize) -> Result<Said<usize>, String> {
        let whole = |value: &Value| value.as_f64().filter(|x| *x >= 0.0 && x.fract() == 0.0);
        let needed = match self.get(path).and_then(whole) {
            Some(_) => format!("a whole number up to {most}"),
            None => "a whole number from 0".to_owned(),
        };
        self.said(path, &needed, |value| {
            let count = value.as_u64().map(|x| x as usize).or_else(|| whole(value).map(|x| x as usize));
            count.filter(|count| *count <= most)
        })
    }

    /// One that is not 0.
    pub fn count(&self, path: &str) -> Result<Said<usize>, String> {
        self.count_to(path, MOST)
    }

    /// One that is not 0, nor above `most`.
    pub fn count_to(&self, path: &str, most: usize) -> Result<Said<usize>, String> {
        match self.whole_to(path, most)? {
            Said::Value(0) => Err(format!("{path} 0: it must be at least 1")),
            said => Ok(said),
        }
    }

    /// A number.
    pub fn number(&self, path: &str) -> Result<Said<f64>, String> {
        self.said(path, "a number", Value::as_f64)
    }

    /// Two numbers.
    pub fn pair(&self, path: &str) -> Result<Said<[f64; 2]>, String> {
        self.said(path, "a list of two numbers", |value| match value.as_array()?.as_slice() {
            [one, other] => Some([one.as_f64()?, other.as_f64()?]),
            _ => None,
        })
    }

    /// Yes or no.
    pub fn switch(&self, path: &str) -> Result<Said<bool>, String> {
        self.said(path, "true or false", Value::as_bool)
    }

    /// A word.
    pub fn text(&self, path: &str) -> Result<Said<String>, String> {
        self.said(path, "a word in quotes", |value| value.as_str().map(str::to_owned))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn numbers_are_written_shortly_with_all_digits_that_tell_them_from_others() {
        let written = [1e-8, 0.001, 0.0, -0.0, 5e8, 2f64.powi(100), 0.1 + 0.2].map(plain);
        let words = [
            "1e-8",
            "0.001",
            "0",
            "0",
            "500000000",
            "1267650600228229400000000000000",
            "0.30000000000000004",
        ];
        assert_eq!(written, words);
    }

    #[test]
    fn values_have_the_types_that_are_asked_for_or_are_told_with_what_is_needed() {
        let of = |value: Value| Document(json!({"a": {"b": value}}));
        assert_eq!(of(json!(5e8)).whole("a.b"), Ok(Said::Value(500_000_000)));
        assert_eq!(of(json!(1u64 << 53)).whole("a.b"), Ok(Said::Value(1 << 53)));
        assert_eq!(of(json!("auto")).whole("a.b"), Ok(Said::Auto));
        assert_eq!(
            (of(json!(null)).number("a.b"), of(json!(1)).number("a.c")),
            (Ok(Said::Absent), Ok(Said::Absent))
        );
        assert_eq!(of(json!(2)).number("a.b"), Ok(Said::Value(2.0)));
        assert_eq!(of(json!([0.9, 0.95])).pair("a.b"), Ok(Said::Value([0.9, 0.95])));
        for (told, words) in [
            (of(json!(1.5)).whole("a.b").unwrap_err(), "a.b 1.5: a whole number from 0 is needed"),
            (
                of(json!(1e30)).whole("a.b").unwrap_err(),
                "a.b 1000000000000000000000000000000: a whole number up to 9007199254740992 is needed",
            ),
            (
                of(json!(u64::MAX)).count("a.b").unwrap_err(),
                "a.b 18446744073709551615: a whole number up to 9007199254740992 is needed",
            ),
            (of(json!(9)).count_to("a.b", 8).unwrap_err(), "a.b 9: a whole number up to 8 is needed"),
            (of(json!(-1)).whole("a.b").unwrap_err(), "a.b -1: a whole number from 0 is needed"),
            (of(json!(0)).count("a.b").unwrap_err(), "a.b 0: it must be at least 1"),
            (of(json!("1e-3")).number("a.b").unwrap_err(), "a.b \"1e-3\": a number is needed"),
            (of(json!([1])).pair("a.b").unwrap_err(), "a.b [1]: a list of two numbers is needed"),
            (of(json!(1)).switch("a.b").unwrap_err(), "a.b 1: true or false is needed"),
            (of(json!({})).text("a.b").unwrap_err(), "a.b {...}: a word in quotes is needed"),
        ] {
            assert_eq!(told, words);
        }
    }
}
