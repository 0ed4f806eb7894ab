//! Reading the fields of a JSON object, each as what it must be.

use crate::error::{Error, Result};
use serde_json::{Map, Value};
use std::path::Path;

/// The fields of one JSON object, with errors that name file, key and what was found.
pub(super) struct Fields<'a> {
    pub path: &'a Path,
    pub inside: &'a str,
    pub map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// A value that is there and not null.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|v| !v.is_null())
    }

    pub fn wrong(&self, key: &str, value: &Value, wanted: &str) -> Error {
        let mut shown = value.to_string();
        if shown.len() > 80 {
            shown = format!("{}…", shown.chars().take(80).collect::<String>());
        }
        Error::format(self.path, format!("{}{key} is {shown}: {wanted}", self.inside))
    }

    pub fn missing(&self, key: &str) -> Error {
        Error::format(self.path, format!("{}{key} is missing", self.inside))
    }

    pub fn size(&self, key: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        // transformers 4 writes some sizes as floats, such as 8192.0.
        let number = value.as_u64().or_else(|| {
            value.as_f64().filter(|x| x.fract() == 0.0 && (0.0..=1e15).contains(x)).map(|x| x as u64)
        });
        match number.map(usize::try_from) {
            Some(Ok(n)) => Ok(Some(n)),
            _ => Err(self.wrong(key, value, "it must be a whole number")),
        }
    }

    pub fn required_size(&self, key: &str) -> Result<usize> {
        self.size(key)?.ok_or_else(|| self.missing(key))
    }

    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_f64().map(Some).ok_or_else(|| self.wrong(key, value, "it must be a number"))
    }

    /// A number that is used as an f32, in which none becomes another altogether.
    pub fn single(&self, key: &str) -> Result<Option<f32>> {
        match self.number(key)? {
            Some(number) if number != 0.0 && number as f32 == 0.0 => Err(self.wrong(
                key,
                &number.into(),
                "as an f32 it is 0, which would have to be given as such",
            )),
            number => Ok(number.map(|number| number as f32)),
        }
    }

    /// What these fields have under `key`, or those `beside` them: versions of transformers differ about which of two they
    /// take.
    pub fn or_beside<T: PartialEq + Copy + Into<Value>>(
        &self,
        beside: &Fields<'a>,
        key: &str,
        read: fn(&Fields<'a>, &str) -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        match (read(self, key)?, read(beside, key)?) {
            (Some(inner), Some(other)) if inner != other => {
                let wanted = format!("beside it stands {}: one of them must go", Into::<Value>::into(other));
                Err(self.wrong(key, &inner.into(), &wanted))
            }
            (inner, other) => Ok(inner.or(other)),
        }
    }

    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.wrong(key, value, "it must be true or false"))
    }

    pub fn text(&self, key: &str) -> Result<Option<&'a str>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.wrong(key, value, "it must be a string"))
    }

    pub fn object(&self, key: &str) -> Result<Option<&'a Map<String, Value>>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_object().map(Some).ok_or_else(|| self.wrong(key, value, "it must be an object"))
    }
}
