//! Numbers among flags, with the text that they were typed as: what is refused is told as it was asked for.

use crate::human;
use std::fmt;
use std::str::FromStr;

/// A number, and how it was typed.
#[derive(Clone, Debug, PartialEq)]
pub struct Number {
    value: f64,
    text: String,
}

impl Number {
    /// The number.
    pub fn value(&self) -> f64 {
        self.value
    }
}

impl FromStr for Number {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let value = text.parse::<f64>().map_err(|e| e.to_string())?;
        match human::vanishes(text, value) {
            true => Err("it is not zero, and too small to be told from it".to_owned()),
            false => Ok(Number { value, text: text.to_owned() }),
        }
    }
}

impl fmt::Display for Number {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_told_as_it_was_typed() {
        for (text, value) in [("-1", -1.0), ("1e300", 1e300), ("1e-4", 1e-4), ("0e-9", 0.0), ("-0.0", 0.0)] {
            let number: Number = text.parse().unwrap();
            assert_eq!((number.value(), number.to_string().as_str()), (value, text));
        }
    }

    #[test]
    fn what_is_not_zero_is_not_read_as_zero() {
        for text in ["1e-400", "-2.5E-400", "0.0001e-330"] {
            assert!(text.parse::<Number>().unwrap_err().contains("too small"), "{text}");
        }
        assert!("1e-400x".parse::<Number>().is_err() && "4e-324".parse::<Number>().is_ok());
    }
}
