//! A configuration's keys against the table of those that there are: what is not known, or not supported, is refused, and of
//! everything else it is told what becomes of it.

use super::document::{Document, is_comment, plain, shown};
use super::table::{ALL, Keys, Rule};
use super::words::Word;
use serde_json::{Map, Value};

/// Words that are less alike than this are not meant for each other.
const ALIKE: f64 = 0.8;

/// What becomes of keys.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Told {
    /// Flags that they stand for.
    pub words: Vec<Word>,
    /// Keys that ask for what there is anyway.
    pub same: Vec<String>,
    /// Keys that are left to the flags, by "auto" or because they are not there.
    pub left: Vec<String>,
    /// Why keys change nothing, and which.
    pub ignored: Vec<(String, Vec<String>)>,
}

impl Told {
    /// A key that changes nothing.
    pub fn ignore(&mut self, key: &str, why: &str) {
        match self.ignored.iter_mut().find(|(other, _)| other == why) {
            Some((_, keys)) => keys.push(key.to_owned()),
            None => self.ignored.push((why.to_owned(), vec![key.to_owned()])),
        }
    }
}

/// Goes through all keys but those that are read together with others.
///
/// # Errors
/// The first that is not known, or has a value that is not supported.
pub fn check(document: &Document) -> Result<Told, String> {
    let Value::Object(block) = &document.0 else {
        return Err("a block of keys, {...}, is needed".to_owned());
    };
    let mut told = Told::default();
    walk(document, "", block, ALL, &mut told)?;
    Ok(told)
}

fn walk(
    document: &Document,
    above: &str,
    block: &Map<String, Value>,
    keys: &[Keys],
    told: &mut Told,
) -> Result<(), String> {
    for (key, value) in block.iter().filter(|(key, _)| !is_comment(key)) {
        let path = if above.is_empty() { key.clone() } else { format!("{above}.{key}") };
        let Some(Keys(_, rule)) = keys.iter().find(|Keys(names, _)| names.contains(&key.as_str())) else {
            return Err(unknown(above, key, keys));
        };
        // The value of a block that is none is read as such.
        match (rule, value) {
            (Rule::Block(keys), Value::Object(block)) => walk(document, &path, block, keys, told)?,
            (Rule::Block(_), Value::Null) => {}
            (Rule::Block(_), Value::Bool(_)) if key == "zero_optimization" => {}
            (Rule::Block(_), value) => {
                return Err(format!("{path} {}: a block of keys, {{...}}, is needed", shown(value)));
            }
            (Rule::Ignored(why), _) => told.ignore(&path, why),
            (_, Value::String(text)) if text == "auto" => told.left.push(path),
            (Rule::Flag(flag), value) => {
                if let Some(number) = document.number(&path)?.value() {
                    told.words.push(Word::new(flag, plain(number), &path, value));
                }
            }
            (Rule::Only(values, _), value) if values.iter().any(|text| is(value, text)) => {
                told.same.push(path)
            }
            (Rule::Off(_), value) if is_off(value) => told.ignore(&path, "it is switched off"),
            (Rule::Switched(_), value) if !is_switched_on(value) => {
                told.ignore(&path, "it is switched off");
            }
            (Rule::Only(_, instead) | Rule::Off(instead) | Rule::Switched(instead), value) => {
                return Err(format!("{path} {} is not supported: {instead}", shown(value)));
            }
            (Rule::Read, _) => {}
        }
    }
    Ok(())
}

/// Whether a value is the one that a text of the table stands for: 1 is 1.0.
fn is(value: &Value, text: &str) -> bool {
    match (value.as_f64(), text.parse::<f64>()) {
        (Some(value), Ok(other)) => value == other,
        (None, _) => serde_json::from_str::<Value>(text).is_ok_and(|other| other == *value),
        (Some(_), Err(_)) => false,
    }
}

/// Whether a block has nothing, or says somewhere that it is not enabled, and nowhere that it is.
fn is_off(value: &Value) -> bool {
    /// Whether some block in it has a switch that is so.
    fn some(value: &Value, so: fn(&Value) -> bool) -> bool {
        let Value::Object(block) = value else { return false };
        block.iter().any(|(key, value)| key == "enabled" && so(value) || some(value, so))
    }
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Object(block) => {
            block.is_empty() || some(value, is_off_or_auto) && !some(value, |value| !is_off_or_auto(value))
        }
        _ => false,
    }
}

/// Whether a block is switched on by its own `enabled`, without which it is off.
fn is_switched_on(value: &Value) -> bool {
    match value {
        Value::Object(block) => block.get("enabled").is_some_and(|value| !is_off_or_auto(value)),
        value => !is_off(value),
    }
}

/// Whether a switch is off, or left to flags, of which none switches it on.
fn is_off_or_auto(value: &Value) -> bool {
    value.is_null() || *value == false || *value == "auto"
}

/// A key's name as people find it: an odd one as it stands in the file.
fn named(key: &str) -> String {
    let odd = |c: char| c.is_whitespace() || c.is_control() || c == '"';
    if key.is_empty() || key.contains(odd) { Value::from(key).to_string() } else { key.to_owned() }
}

/// What is said of a key that is not known here, with one that may have been meant.
fn unknown(above: &str, key: &str, here: &[Keys]) -> String {
    let below = |name: &str| if above.is_empty() { name.to_owned() } else { format!("{above}.{name}") };
    let path = below(&named(key));
    let all = places(ALL, "");
    // A path is no key.
    if let Some((block, name)) = key.rsplit_once('.')
        && all.contains(&key.to_owned())
    {
        return format!("{path} is no key of DeepSpeed's: take the key {name} in the block {block}");
    }
    let names =
        |keys: &[Keys]| keys.iter().flat_map(|Keys(names, _)| names.iter().copied()).collect::<Vec<_>>();
    let alike = |name: &&str| strsim::jaro_winkler(key, name);
    let nearest = names(here).into_iter().max_by(|one, other| alike(one).total_cmp(&alike(other)));
    // The same name elsewhere says more than another one here.
    let elsewhere = all.into_iter().find(|place| place.rsplit('.').next() == Some(key));
    let meant = elsewhere.or_else(|| {
        let near = nearest.filter(|name| alike(name) >= ALIKE)?;
        Some(below(near))
    });
    match meant {
        Some(meant) => format!("{path} is no key of DeepSpeed's: a similar one exists: {meant}"),
        None => format!(
            "{path} is no key of DeepSpeed's: leave it away, or begin its name with _ if it is a comment"
        ),
    }
}

/// All paths below `above`.
fn places(keys: &[Keys], above: &str) -> Vec<String> {
    let mut all = Vec::new();
    for Keys(names, rule) in keys {
        for name in *names {
            let path = if above.is_empty() { (*name).to_owned() } else { format!("{above}.{name}") };
            if let Rule::Block(keys) = rule {
                all.extend(places(keys, &path));
            }
            all.push(path);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn of(value: Value) -> Result<Told, String> {
        check(&Document(value))
    }

    /// A configuration with one key.
    fn only(path: &str, value: Value) -> Value {
        path.rsplit('.').fold(value, |value, key| json!({ key: value }))
    }

    #[test]
    fn every_key_of_the_table_is_taken_with_a_value_that_it_may_have_and_told_of() {
        fn visit(keys: &[Keys], above: &str, seen: &mut usize) {
            for Keys(names, rule) in keys {
                for name in *names {
                    let path = if above.is_empty() { (*name).to_owned() } else { format!("{above}.{name}") };
                    *seen += 1;
                    match rule {
                        Rule::Block(keys) => {
                            assert!(
                                of(only(&path, json!(3))).unwrap_err().contains("a block of keys"),
                                "{path}"
                            );
                            visit(keys, &path, seen);
                        }
                        Rule::Ignored(why) => {
                            let told = of(only(&path, json!(true))).unwrap();
                            assert_eq!(told.ignored, [(why.to_string(), vec![path.clone()])]);
                        }
                        Rule::Only(values, instead) => {
                            for text in *values {
                                let value =
                                    serde_json::from_str(text).unwrap_or_else(|e| panic!("{text}: {e}"));
                                assert_eq!(of(only(&path, value)).unwrap().same, std::slice::from_ref(&path));
                            }
                            assert_eq!(
                                of(only(&path, json!("auto"))).unwrap().left,
                                std::slice::from_ref(&path)
                            );
                            let told = of(only(&path, json!(7))).unwrap_err();
                            assert_eq!(told, format!("{path} 7 is not supported: {instead}"));
                        }
                        Rule::Off(instead) => {
                            for off in [
                                json!(null),
                                json!(false),
                                json!({}),
                                json!({"enabled": false, "x": 1}),
                                json!({"x": {"enabled": "auto"}}),
                            ] {
                                assert_eq!(of(only(&path, off)).unwrap().ignored.len(), 1, "{path}");
                            }
                            assert!(of(only(&path, json!({"x": 1}))).is_err(), "{path}");
                            let told = of(only(&path, json!({"enabled": true}))).unwrap_err();
                            assert_eq!(told, format!("{path} {{...}} is not supported: {instead}"));
                        }
                        Rule::Switched(instead) => {
                            for off in [
                                json!(null),
                                json!(false),
                                json!({}),
                                json!({"enabled": false}),
                                json!({"x": 1, "y": {"enabled": true}}),
                                json!({"enabled": "auto", "x": "auto"}),
                            ] {
                                let told = of(only(&path, off)).unwrap();
                                assert_eq!(
                                    told.ignored,
                                    [("it is switched off".to_owned(), vec![path.clone()])]
                                );
                            }
                            for on in [json!({"enabled": true}), json!({"enabled": 1}), json!(true)] {
                                let told = of(only(&path, on)).unwrap_err();
                                assert!(told.ends_with(&format!(" is not supported: {instead}")), "{told}");
                            }
                        }
                        Rule::Flag(flag) => {
                            let told = of(only(&path, json!(2))).unwrap();
                            assert_eq!((told.words[0].flag, &*told.words[0].value), (*flag, "2"));
                            assert!(
                                of(only(&path, json!("much"))).unwrap_err().contains("a number is needed")
                            );
                        }
                        Rule::Read => {
                            assert_eq!(of(only(&path, json!(1))).unwrap(), Told::default(), "{path}")
                        }
                    }
                }
            }
        }
        let mut seen = 0;
        visit(ALL, "", &mut seen);
        assert_eq!(seen, places(ALL, "").len());
        assert!(seen > 200);
    }

    #[test]
    fn a_key_that_there_is_not_is_refused_with_the_one_that_may_be_meant() {
        for (path, words) in [
            (
                "zero_optimization.stge",
                "zero_optimization.stge is no key of DeepSpeed's: a similar one exists: zero_optimization.stage",
            ),
            ("train_batchsize", "a similar one exists: train_batch_size"),
            ("bf16.loss_scale", "a similar one exists: fp16.loss_scale"),
            ("zero_optimization.aio", "a similar one exists: aio"),
            ("stage", "a similar one exists: zero_optimization.stage"),
            (
                "banana",
                "banana is no key of DeepSpeed's: leave it away, or begin its name with _ if it is a comment",
            ),
        ] {
            let told = of(only(path, json!(1))).unwrap_err();
            assert!(told.contains(words), "{told}");
        }
        for (config, words) in [
            (
                json!({"zero_optimization.stage": 2}),
                "zero_optimization.stage is no key of DeepSpeed's: take the key stage in the block zero_optimization",
            ),
            (json!({"fp16": {"fp16.enable": true}}), "fp16.fp16.enable is no key of DeepSpeed's: "),
            (json!({"": 1}), "\"\" is no key of DeepSpeed's: leave it away"),
            (json!({"fp16": {"a\nb": 1}}), "fp16.\"a\\nb\" is no key of DeepSpeed's: leave it away"),
        ] {
            let told = of(config).unwrap_err();
            assert!(told.starts_with(words) && !told.contains("fp16.fp16.enabled"), "{told}");
        }
    }

    #[test]
    fn of_a_block_that_changes_nothing_no_key_is_looked_at() {
        let told = of(json!({"aio": {"block_size": 1048576, "a_later_one": true}})).unwrap();
        assert_eq!(told.ignored, [("nothing lies on NVMe".to_owned(), vec!["aio".to_owned()])]);
    }

    #[test]
    fn comments_are_no_keys() {
        let told = of(json!({"_why": 1, "comment": "x", "zero_optimization": {"_stge": 3}}));
        assert_eq!(told.unwrap(), Told::default());
    }

    #[test]
    fn a_configuration_is_a_block() {
        assert!(of(json!([1])).unwrap_err().contains("a block of keys"));
        // Of old, and read as such.
        assert!(of(json!({"zero_optimization": true})).is_ok());
        assert!(of(json!({"optimizer": true})).is_err());
    }
}
