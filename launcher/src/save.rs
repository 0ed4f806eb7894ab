//! Writing the trained model as a Hugging Face directory.

mod alone;
mod named;

use crate::failure::{Failure, Result};
use crate::files::is_there;
use crate::plan::{ModelChoice, TrainPlan};
use crate::tokenizer::{Tokenizer, bytes};
use collectives::{Float, ReduceOp};
use models::hf::{Remarks, SaveOptions, Writer};
use serde_json::{Map, Value};
use std::fmt::Display;
use std::path::{Path, PathBuf};
use zero::Trainer;

/// The tokenizer's file in a model directory.
pub const TOKENIZER: &str = "tokenizer.json";
/// What says how the tokenizer is to be used.
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// Which tokens are special, as older directories say it beside that.
const TOKENS: &str = "special_tokens_map.json";
/// What names the token that ends a text there.
const EOS: &str = "eos_token";
/// What belongs to a tokenizer.json, where its directory has it.
const WITH_TOKENIZER: [&str; 3] = [TOKENIZER_CONFIG, TOKENS, "chat_template.jinja"];
/// How a model is sampled: among others with which tokens a text begins and ends.
const GENERATION: &str = "generation_config.json";

/// What goes with the weights.
#[derive(Default)]
pub struct Companions {
    /// Files beside them, by name.
    files: Vec<(String, Vec<u8>)>,
    /// What config.json says beside the shape.
    remarks: Remarks,
}

impl Companions {
    /// What config.json says beside the shape.
    pub fn remarks(&self) -> Remarks {
        self.remarks.clone()
    }

    /// The files, by name.
    pub fn files(&self) -> &[(String, Vec<u8>)] {
        &self.files
    }

    /// The tokens that end a text: of generation_config.json, or else of config.json, or where neither names one, as of a model
    /// that is trained further, the tokenizer's, where transformers' `generate` would go on, or take Llama's 2.
    pub fn ends(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        const KEY: &str = "eos_token_id";
        let ids = |named: &Value| -> Vec<u32> {
            let several = named.as_array().map_or(std::slice::from_ref(named), Vec::as_slice);
            several.iter().filter_map(|id| u32::try_from(id.as_u64()?).ok()).collect()
        };
        let generation = named::read(&self.files, GENERATION);
        let of_model = [generation.get(KEY), self.remarks.token_ids.get(KEY)].map(|ids_of| ids_of.map(&ids));
        match of_model.into_iter().flatten().find(|named| !named.is_empty()) {
            Some(named) => named,
            None => named::token(&self.files, EOS, tokenizer).into_iter().collect(),
        }
    }

    /// Names the tokens of `tokenizer` that begin and end a text where config.json names none: without the keys LlamaConfig has
    /// tokens 1 and 2 do that, and with null `generate` never ends. A token that the model does not know is none.
    fn name_tokens(&mut self, tokenizer: &Tokenizer, vocab: usize) {
        for (key, token) in [("bos_token_id", "bos_token"), ("eos_token_id", EOS)] {
            let known = named::token(&self.files, token, tokenizer).filter(|&id| (id as usize) < vocab);
            let id = self.remarks.token_ids.entry(key).or_insert(Value::Null);
            if id.is_null() {
                *id = known.into();
            }
        }
    }
}

/// What goes with the weights: the tokenizer's file and what belongs to it, and what the directory that the training started
/// from has, but for what is of a tokenizer that was not used. Read before the training, whatever happens to it meanwhile.
///
/// # Errors
/// A file that cannot be read, or is not what transformers takes.
pub fn companions(model: &ModelChoice, tokenizer: Option<&Tokenizer>) -> Result<Companions> {
    let mut own = Companions { remarks: model.remarks.clone(), files: Vec::new() };
    if let Some(weights) = &model.weights {
        own.files = weights.companions().map_err(Failure::usage)?;
    }
    own.remarks.of_bytes = matches!(tokenizer, Some(Tokenizer::Bytes));
    let Some(tokenizer) = tokenizer else { return Ok(own) };
    let another = is_of_another(model, &own.files, tokenizer.file());
    let there = own.files.iter().any(|(name, _)| *name == TOKENIZER);
    if another || !there {
        own.files.retain(|(name, _)| *name == GENERATION && !another);
        own.files.extend(of_tokenizer(tokenizer)?);
    }
    if another {
        own.remarks.forget_tokens();
    }
    if another || model.weights.is_none() {
        own.name_tokens(tokenizer, model.config.vocab);
    }
    Ok(own)
}

/// The files with which transformers makes the tokens of `tokenizer`: its own, what belongs to that and lies beside it, and for
/// bytes what says the same.
fn of_tokenizer(tokenizer: &Tokenizer) -> Result<Vec<(String, Vec<u8>)>> {
    let Some(used) = tokenizer.file() else {
        return Ok(vec![(TOKENIZER.into(), bytes::file()), (TOKENIZER_CONFIG.into(), bytes::config())]);
    };
    let mut files = vec![(TOKENIZER.into(), used.to_vec())];
    for (name, path) in beside(tokenizer)? {
        let adapted = alone::adapted(&name, content(&path)?, tokenizer);
        files.push((name, adapted.map_err(|why| no_object(&path, why))?));
    }
    if !files.iter().any(|(name, _)| *name == TOKENIZER_CONFIG) {
        files.push((TOKENIZER_CONFIG.into(), alone::config(tokenizer)));
    }
    Ok(files)
}

fn no_object(path: &Path, why: impl Display) -> Failure {
    Failure::usage(format!("{} is no JSON object, as transformers reads it: {why}", path.display()))
}

/// The token that ends a text of `tokenizer`, if what lies beside its file names one.
///
/// # Errors
/// A file that cannot be read, or says nothing.
pub fn end_token(tokenizer: &Tokenizer) -> Result<Option<u32>> {
    let read = |(name, path): (String, PathBuf)| {
        let content = content(&path)?;
        let said: serde_json::Result<Map<String, Value>> = serde_json::from_slice(&content);
        said.map(|_| (name, content)).map_err(|why| no_object(&path, why))
    };
    let says = |(name, _): &(String, PathBuf)| [TOKENIZER_CONFIG, TOKENS].contains(&name.as_str());
    let files = beside(tokenizer)?.into_iter().filter(says).map(read).collect::<Result<Vec<_>>>()?;
    Ok(named::token(&files, EOS, tokenizer))
}

/// Whether the special tokens that the model's config.json names are those of another tokenizer than this.
///
/// # Errors
/// A file that cannot be read.
pub fn names_others_tokens(model: &ModelChoice, tokenizer: &Tokenizer) -> Result<bool> {
    let companions = model.weights.as_ref().map(|weights| weights.companions().map_err(Failure::usage));
    Ok(is_of_another(model, &companions.transpose()?.unwrap_or_default(), tokenizer.file()))
}

/// The same of a model with these files beside its weights, and the tokenizer.json that is `used`.
fn is_of_another(model: &ModelChoice, files: &[(String, Vec<u8>)], used: Option<&[u8]>) -> bool {
    let theirs = match model.described().map(|shape| shape.with_file_name(TOKENIZER)) {
        // Beside a shape lies the tokenizer that its special tokens are of; of one that cannot be read nobody says that it is used.
        Some(beside) => is_there(&beside).then(|| content(&beside).unwrap_or_default()),
        None => files.iter().find(|(name, _)| *name == TOKENIZER).map(|(_, content)| content.clone()),
    };
    // A model without a tokenizer.json may have had the same tokenizer in another form.
    match &theirs {
        Some(theirs) if bytes::is(theirs) => used.is_some(),
        Some(theirs) => Some(&theirs[..]) != used,
        None => used.is_none() && !model.remarks.of_bytes,
    }
}

/// A file whole.
fn content(path: &Path) -> Result<Vec<u8>> {
    models::hf::check_fetched(path).map_err(Failure::usage)?;
    std::fs::read(path).map_err(|e| Failure::usage(format!("cannot read {}: {e}", path.display())))
}

/// What the directory of a tokenizer.json has that belongs to it; beside a file of another name lies what is others'.
///
/// # Errors
/// A directory that cannot be read.
pub fn beside(tokenizer: &Tokenizer) -> Result<Vec<(String, PathBuf)>> {
    let Some(file) = tokenizer.path().filter(|file| file.ends_with(TOKENIZER)) else { return Ok(vec![]) };
    let templates = models::hf::templates(models::parent(&file)).map_err(Failure::usage)?;
    let named = WITH_TOKENIZER.map(str::to_owned).into_iter().chain(templates);
    let there = named.map(|name| (name.clone(), file.with_file_name(name)));
    Ok(there.filter(|(_, path)| is_there(path)).collect())
}

/// What came of writing a model.
pub struct Saved {
    /// How many of its weights are NaN or infinite.
    pub not_finite: usize,
    /// Whether it is there now. What was there before is, where nothing was refused and it is not.
    pub kept: bool,
    /// What rank 0 was refused. It comes as a value, and on rank 0 alone, because the ranks still stand together then; nothing
    /// of the model stays.
    pub written: Result<()>,
}

/// Which models are written.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// Whatever its weights are, but in the place of nothing if some are not finite.
    Any,
    /// One whose weights are all finite, where there is nothing yet: it may be worth less than what is there.
    Rescued,
}

/// Writes the model; rank 0 holds the pen, and nobody goes on before it has put it down: a rank that fails meanwhile would
/// end it, too.
///
/// # Errors
/// The ranks cannot bring the weights together.
pub fn model<T: Float>(
    trainer: &mut Trainer<T>,
    plan: &TrainPlan,
    dir: &Path,
    companions: &Companions,
    wanted: Wanted,
) -> Result<Saved> {
    // Exact as a number of f64: there are fewer weights than 2^53.
    let mut not_finite = 0f64;
    let written = if trainer.comm().rank() > 0 {
        trainer.export(None)?;
        Ok(false)
    } else {
        // What cannot come to anything would only take its time and its place on the disk.
        let mut writer = match wanted == Wanted::Rescued && is_taken(dir) {
            true => None,
            false => Some(begin::<T>(plan, dir, companions)),
        };
        trainer.export(Some(&mut |spec, values| {
            not_finite += values.iter().filter(|value| !value.to_f32().is_finite()).count() as f64;
            // After a refusal the others are still accompanied through the rest.
            if let Some(Ok(open)) = &mut writer
                && let Err(e) = open.add(&spec.name, values)
            {
                writer = Some(Err(e));
            }
            Ok(())
        }))?;
        // Something may have come there meanwhile.
        let unwanted = match wanted {
            Wanted::Any => not_finite > 0.0 && is_taken(dir),
            Wanted::Rescued => not_finite > 0.0 || is_taken(dir),
        };
        match writer {
            Some(writer) if !unwanted => writer.and_then(Writer::finish).map(|()| true),
            _ => Ok(false),
        }
    };
    let written = written.map_err(|e: models::Error| Failure::run(format!("--save: {e}")));
    // The others have seen no values and add nothing, and wait here for the pen.
    let mut known = [not_finite, if let Ok(true) = written { 1.0 } else { 0.0 }];
    trainer.comm().all_reduce_in_place(&mut known[..], ReduceOp::Sum)?;
    let [not_finite, kept] = known;
    Ok(Saved { not_finite: not_finite as usize, kept: kept > 0.0, written: written.map(|_| ()) })
}

/// Whether something is there that a model would replace: an empty directory, such as a script makes before, is nothing.
fn is_taken(dir: &Path) -> bool {
    match dir.read_dir() {
        Ok(mut entries) => entries.next().is_some(),
        Err(_) => is_there(dir),
    }
}

/// The directory, with all but weights.
fn begin<T: Float>(plan: &TrainPlan, dir: &Path, companions: &Companions) -> models::Result<Writer> {
    let options = SaveOptions { remarks: companions.remarks(), ..SaveOptions::default() };
    let mut writer = Writer::create(dir, &plan.model.config, T::DTYPE, &options)?;
    companions.files().iter().try_for_each(|(name, content)| writer.add_file(name, content))?;
    Ok(writer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_text_ends_with_what_the_model_is_generated_with_or_else_with_what_its_tokenizer_says() {
        let home = tempfile::tempdir().unwrap();
        let words = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
            "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "one": 1, "</s>": 2}, "unk_token": "[UNK]"},
        });
        let file = home.path().join(TOKENIZER);
        std::fs::write(&file, words.to_string()).unwrap();
        let tokenizer = Tokenizer::open(file).unwrap();
        let of_words = json!({"eos_token": "</s>"});
        for (generation, config, of_tokenizer, expected) in [
            (json!({}), Value::Null, json!({}), &[][..]),
            (json!({}), Value::Null, of_words.clone(), &[2]),
            (json!({}), Value::Null, json!({"eos_token": {"content": "</s>", "lstrip": false}}), &[2]),
            (json!({}), Value::Null, json!({"eos_token": "<|end|>"}), &[]),
            (json!({}), Value::Null, json!({"eos_token": null}), &[]),
            (json!({}), json!(7), of_words.clone(), &[7]),
            (json!({}), json!([7, 8, -1]), of_words.clone(), &[7, 8]),
            (json!({"eos_token_id": null}), json!(7), of_words.clone(), &[7]),
            (json!({"eos_token_id": [5, 6]}), json!(7), of_words.clone(), &[5, 6]),
            (json!("broken"), json!(7), of_words.clone(), &[7]),
        ] {
            let files = [(GENERATION, &generation), (TOKENIZER_CONFIG, &of_tokenizer)];
            let files = files.map(|(name, told)| (name.to_owned(), told.to_string().into_bytes())).to_vec();
            let mut companions = Companions { files, ..Companions::default() };
            companions.remarks.token_ids.insert("eos_token_id".into(), config.clone());
            assert_eq!(companions.ends(&tokenizer), expected, "{generation} {config} {of_tokenizer}");
        }
        // As transformers reads them.
        let map = json!({"eos_token": "one"});
        for (config, expected) in [
            (json!({}), 1),
            (of_words.clone(), 1),
            (json!({"eos_token": "</s>", "added_tokens_decoder": {}}), 2),
        ] {
            let files = [(TOKENS, &map), (TOKENIZER_CONFIG, &config)];
            let files = files.map(|(name, told)| (name.to_owned(), told.to_string().into_bytes())).to_vec();
            let companions = Companions { files, ..Companions::default() };
            assert_eq!(companions.ends(&tokenizer), [expected], "{config}");
        }
        assert_eq!(Companions::default().ends(&tokenizer), [0u32; 0]);
        assert_eq!(tokenizer.token("one"), Some(1));
    }

    #[test]
    fn a_new_model_names_the_tokens_of_its_tokenizer_that_it_knows() {
        let home = tempfile::tempdir().unwrap();
        let words = json!({
            "version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 2},
            "unk_token": "a"},
        });
        let file = home.path().join(TOKENIZER);
        std::fs::write(&file, words.to_string()).unwrap();
        let tokenizer = Tokenizer::open(file).unwrap();
        let config = json!({"bos_token": "b", "eos_token": "c"}).to_string().into_bytes();
        let none = json!({"bos_token_id": null, "eos_token_id": null});
        for (before, files, vocab, after) in [
            (none.clone(), true, 3, json!({"bos_token_id": 1, "eos_token_id": 2})),
            (json!({}), true, 3, json!({"bos_token_id": 1, "eos_token_id": 2})),
            (json!({"eos_token_id": [0, 2]}), true, 3, json!({"bos_token_id": 1, "eos_token_id": [0, 2]})),
            (json!({}), true, 2, json!({"bos_token_id": 1, "eos_token_id": null})),
            (json!({}), false, 3, none),
        ] {
            let mut companions = Companions::default();
            companions.remarks.token_ids = before.as_object().unwrap().clone();
            companions.files.extend(files.then(|| (TOKENIZER_CONFIG.to_owned(), config.clone())));
            companions.name_tokens(&tokenizer, vocab);
            assert_eq!(Value::Object(companions.remarks.token_ids), after, "{before} {vocab}");
        }
    }
}
