//! Which model, with which weights, and what a micro-batch of it is.

use super::usage;
use crate::args::Precision;
use crate::checkpoint;
use crate::device::{self, Device};
use crate::failure::{Failure, Result};
use crate::files;
use crate::save;
use crate::tokenizer::Tokenizer;
use collectives::{Float, parallel};
use models::hf::{Checkpoint, Remarks};
use models::{Accounts, Footprint, Llama, LlamaConfig, MatmulPrecision, Model, TensorSpec};
use std::io::ErrorKind;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// What a source of weights gives back.
type Source = std::result::Result<(), String>;

/// The largest micro-batch, and how it is computed.
#[derive(Clone, Copy, Debug)]
pub struct MicroBatch {
    /// Sequences.
    pub rows: usize,
    /// Tokens of a sequence.
    pub length: usize,
    /// Which activations backward computes again.
    pub recompute: models::Recompute,
    /// How close products of f32 are.
    pub precision: MatmulPrecision,
    /// Compute threads.
    pub threads: usize,
}

impl MicroBatch {
    /// As `--matmul-precision` names how close its products are to be, where they are of f32.
    pub fn matmul_precision(&self, dtype: Precision) -> Option<&'static str> {
        (dtype == Precision::F32).then_some(named(self.precision))
    }

    /// The same of how close they are on `device`: no processor but those with AMX is faster with less.
    pub fn products(&self, dtype: Precision, device: &Device) -> Option<&'static str> {
        let whole = *device == Device::Cpu && !models::has_faster_products();
        let precision = if whole { MatmulPrecision::Highest } else { self.precision };
        (dtype == Precision::F32).then_some(named(precision))
    }

    /// What is to be said of that, where it was chosen.
    pub fn products_remark(&self, device: &Device) -> &'static str {
        match (self.precision, self.products(Precision::F32, device)) {
            (MatmulPrecision::Highest, _) => "",
            (_, Some("high")) => " with products of high precision",
            _ => " with products of the highest precision, as no others are faster on this processor",
        }
    }

    /// Bytes of its tokens and of those that it predicts, on the host.
    pub fn token_bytes(&self) -> usize {
        2 * self.rows * self.length * size_of::<u32>()
    }
}

/// As `--matmul-precision` names it.
fn named(precision: MatmulPrecision) -> &'static str {
    match precision {
        MatmulPrecision::Highest => "highest",
        MatmulPrecision::High => "high",
    }
}

/// A model by name, directory or config.json.
pub struct ModelChoice {
    /// As the user named it.
    pub name: String,
    /// Its shape.
    pub config: LlamaConfig,
    /// What else is said of it.
    pub remarks: Remarks,
    /// Its weights, if it came from a directory.
    pub weights: Option<Checkpoint>,
    /// The config.json that was named by itself: weights are new.
    described: Option<PathBuf>,
}

impl ModelChoice {
    /// A model of this shape with new weights.
    pub fn new(name: &str, config: LlamaConfig) -> Self {
        let remarks = Remarks::default();
        ModelChoice { name: name.to_owned(), config, remarks, weights: None, described: None }
    }

    /// A known name, whatever else may have it here, a Hugging Face directory, or a config.json by itself.
    ///
    /// # Errors
    /// An unknown name, a directory whose content is not a whole model, or a file that is no configuration.
    pub fn open(path: &Path) -> Result<Self> {
        let name = &*path.to_string_lossy();
        let unknown = match LlamaConfig::preset(name) {
            Ok(config) => return Ok(Self::new(name, config)),
            Err(e) => e,
        };
        let what = match path.metadata() {
            Ok(there) if there.is_dir() => {
                return Self::directory(path).map_err(|e| without_weights(path, e));
            }
            Ok(_) if path.extension().is_some_and(|kind| kind == "json") => return Self::shape(path),
            Err(e) if e.kind() == ErrorKind::NotFound && !name.contains('/') => {
                return Err(Failure::usage(unknown));
            }
            Err(e) if e.kind() != ErrorKind::NotFound => format!("cannot be opened ({e})"),
            _ => "is no directory and no config.json".to_owned(),
        };
        usage(format!(
            "--model {name} {what}: give a Hugging Face directory with config.json and model.safetensors, a config.json \
             for new weights, or one of {}",
            LlamaConfig::PRESETS.join(", ")
        ))
    }

    /// A Hugging Face directory.
    ///
    /// # Errors
    /// Whatever makes it not a whole model.
    pub fn directory(path: &Path) -> Result<Self> {
        let weights = Checkpoint::open(path).map_err(|e| match checkpoint::weights_in(path) {
            Some(weights) => Failure::usage(format!(
                "{e}; a state of --checkpoint has it in its weights: --model {}",
                weights.display()
            )),
            None => Failure::usage(e),
        })?;
        Ok(Self::of(weights))
    }

    /// One that was opened.
    pub fn of(weights: Checkpoint) -> Self {
        let (config, remarks) = (weights.config().clone(), weights.remarks().clone());
        let name = weights.dir().display().to_string();
        ModelChoice { remarks, weights: Some(weights), ..Self::new(&name, config) }
    }

    /// The shape in a config.json, with new weights.
    fn shape(path: &Path) -> Result<Self> {
        let (config, remarks) = models::hf::read_config(path).map_err(Failure::usage)?;
        let described = Some(path.to_owned());
        Ok(ModelChoice { remarks, described, ..Self::new(&path.display().to_string(), config) })
    }

    /// The config.json that was named by itself.
    pub fn described(&self) -> Option<&Path> {
        self.described.as_deref()
    }

    /// The model without weights, its memory booked on `accounts`.
    ///
    /// # Errors
    /// A micro-batch that is too large to be computed, or threads that cannot be started.
    pub fn build<T: Float>(&self, batch: &MicroBatch, accounts: &Accounts) -> Result<Box<dyn Model<T>>> {
        let MicroBatch { rows, length, recompute, precision, threads } = *batch;
        let model = Llama::<T>::new(&self.config, rows, length, recompute, threads, accounts);
        Ok(Box::new(model.map_err(Failure::run)?.precise_to(precision)))
    }

    /// What [`build`](Self::build) will hold.
    ///
    /// # Errors
    /// A micro-batch that is too large to be computed, or a model that the device's kernels do not take.
    pub fn footprint(&self, batch: &MicroBatch, dtype: Precision, device: &Device) -> Result<Footprint> {
        let MicroBatch { rows, length, recompute, threads, .. } = *batch;
        let config = &self.config;
        let footprint = match device {
            Device::Cpu => models::footprint(config, rows, length, dtype.dtype(), recompute, threads),
            Device::Cuda(gpus) | Device::Emulated(gpus) => {
                device::check_kernels(gpus, config, dtype, recompute)?;
                models::device_footprint(config, rows, length, dtype.dtype(), recompute)
            }
        };
        footprint.map_err(Failure::usage)
    }

    /// Where first weights come from: the directory, or the seed, drawn by `threads` threads.
    pub fn source(
        &self,
        seed: u64,
        threads: usize,
    ) -> impl FnMut(&TensorSpec, Range<usize>, &mut [f32]) -> Source + '_ {
        move |spec, range, out| match &self.weights {
            Some(weights) => weights.read_range(&spec.name, range, out).map_err(|e| e.to_string()),
            None => {
                let init = spec.init.with_deviation(self.remarks.initializer_range as f32);
                draw(&TensorSpec { init, ..spec.clone() }, seed, range, out, threads);
                Ok(())
            }
        }
    }

    /// What tells these weights from others of the same shape: a digest of some of each tensor.
    pub fn fingerprint(&self) -> String {
        /// Values that are looked at in the middle of each tensor.
        const LOOK: usize = 16;
        let Some(weights) = &self.weights else {
            return format!("new, initializer_range {}", self.remarks.initializer_range);
        };
        let mut seen = Vec::new();
        for spec in self.config.units().into_iter().flat_map(|unit| unit.tensors) {
            let mut some = [0f32; LOOK];
            let count = LOOK.min(spec.len());
            let start = (spec.len() - count) / 2;
            // Weights that cannot be read are found where they are used.
            if weights.read_range(&spec.name, start..start + count, &mut some[..count]).is_ok() {
                seen.extend(some[..count].iter().map(|value| value.to_bits()));
            }
        }
        format!("of a directory, digest {:016x}", collectives::digest(seen))
    }

    /// The files that it is read from.
    pub fn files(&self) -> Vec<PathBuf> {
        let weights = self.weights.iter().flat_map(Checkpoint::files);
        weights.chain(self.described.clone()).collect()
    }

    /// The tokenizer that was asked for; by default that beside the model's weights or config.json, and bytes for text and a
    /// model that is new or of bytes. None where nothing says how tokens were made, or what does is of no use, and nobody has
    /// to know.
    ///
    /// # Errors
    /// No tokenizer, none for text, or only one in a form that is not read, or one with more tokens than the model knows.
    pub fn tokenizer(&self, asked: Option<&Path>, for_text: bool) -> Result<Option<Tokenizer>> {
        let beside = self.described.as_ref().map(|shape| shape.with_file_name(save::TOKENIZER));
        let own = self.weights.as_ref().map(|w| w.dir().join(save::TOKENIZER)).or(beside);
        let own = own.filter(|path| files::is_there(path));
        let chosen = asked.or(own.as_deref());
        if for_text
            && chosen.is_none()
            && !self.remarks.of_bytes
            && let Some(other) = self.unread_tokenizer()
        {
            return usage(format!(
                "{} has a tokenizer in {}, which is not read, and no tokenizer.json: name one with --tokenizer, or 'bytes'",
                self.name,
                other.display()
            ));
        }
        // Those that were saved before this was recorded have this vocabulary.
        let likely = self.weights.is_none() || self.config.vocab == 256;
        let of_bytes = self.remarks.of_bytes || (for_text && likely);
        let spec = chosen.or(of_bytes.then_some(Path::new("bytes")));
        let Some(spec) = spec else {
            let (name, vocab) = (&self.name, self.config.vocab);
            return match for_text {
                false => Ok(None),
                true => usage(format!(
                    "{name} has no tokenizer.json and a vocabulary of {vocab}, so nothing says how text \
                     becomes its tokens: name its tokenizer.json with --tokenizer, or 'bytes'"
                )),
            };
        };
        match self.fitting(spec) {
            Err(_) if asked.is_none() && !for_text => Ok(None),
            opened => opened.map(Some),
        }
    }

    /// What lies beside the model's weights or config.json and has a tokenizer in another form than a tokenizer.json.
    fn unread_tokenizer(&self) -> Option<PathBuf> {
        let beside = self.described.as_deref().map(models::parent);
        let dir = self.weights.as_ref().map(Checkpoint::dir).or(beside)?;
        let forms = ["tokenizer.model", "vocab.json", "merges.txt"].map(|name| dir.join(name));
        forms.into_iter().find(|path| files::is_there(path))
    }

    /// A tokenizer that makes no more tokens than the model knows, but of texts that have its added tokens: those are
    /// refused with the text.
    fn fitting(&self, spec: &Path) -> Result<Tokenizer> {
        let tokenizer = Tokenizer::open(spec)?;
        self.check_knows(&tokenizer)?;
        Ok(tokenizer)
    }

    /// Has its tokenizer put the token behind each text that ends one.
    ///
    /// # Errors
    /// There is no text, or no such token, or one that the model does not know.
    pub fn append_eod(&self, tokenizer: Option<&mut Tokenizer>, for_text: bool) -> Result<()> {
        match tokenizer {
            Some(tokenizer) if for_text => {
                tokenizer.append_eod()?;
                self.check_knows(tokenizer)
            }
            _ => usage(
                "--append-eod puts a token behind each text, and --data has none: leave it away, and make token files that \
                 have it with 'caravan tokenize --append-eod'"
                    .into(),
            ),
        }
    }

    /// Whether the model knows all tokens of texts that have none of the tokenizer's added ones.
    fn check_knows(&self, tokenizer: &Tokenizer) -> Result<()> {
        let (has, fits) = (tokenizer.plain_vocab(), self.config.vocab);
        if has > fits {
            let new = match self.weights {
                None => ", such as new weights of a config.json that --model names",
                Some(_) => "",
            };
            return usage(format!(
                "tokenizer {} makes tokens up to {}, but model {} has a vocabulary of {fits}: take a tokenizer \
                 with at most {fits} tokens or a model with at least {has}{new}",
                tokenizer.name(),
                has - 1,
                self.name
            ));
        }
        Ok(())
    }

    /// Whether it can be trained as it was.
    ///
    /// # Errors
    /// A configuration with dropout.
    pub fn check_trainable(&self) -> Result<()> {
        match self.remarks.dropout {
            0.0 => Ok(()),
            rate => usage(format!(
                "--model {}: its config.json has attention_dropout {rate}, and training here has none: set it to 0",
                self.name
            )),
        }
    }

    /// The sequence length that was asked for, or the model's context up to `most`.
    ///
    /// # Errors
    /// Nothing, or more than the model's context.
    pub fn sequence(&self, asked: Option<usize>, most: usize) -> Result<usize> {
        let context = self.config.context;
        match asked.unwrap_or(context.min(most)) {
            0 => usage("--seq 0: a sequence has at least 1 token".into()),
            seq if seq > context => {
                let name = &self.name;
                usage(format!("--seq {seq}: model {name} has a context of {context} tokens, so at most that"))
            }
            seq => Ok(seq),
        }
    }
}

/// Why a directory is no model; what else can be had of one that only describes a model.
fn without_weights(dir: &Path, why: Failure) -> Failure {
    let config = dir.join("config.json");
    match !models::hf::has_weights(dir) && models::hf::read_config(&config).is_ok() {
        true => {
            Failure::usage(format!("{why}; --model {} means new weights of that shape", config.display()))
        }
        false => why,
    }
}

/// New weights, each a function of its index alone: by as many threads as that pays for.
fn draw(spec: &TensorSpec, seed: u64, range: Range<usize>, out: &mut [f32], threads: usize) {
    // Drawing so many takes longer than starting a thread.
    const LEAST: usize = 1 << 15;
    let part = out.len().div_ceil(threads.max(1)).max(LEAST);
    parallel::map(out.chunks_mut(part).enumerate(), threads, |(i, out)| {
        let start = range.start + i * part;
        models::init_range(spec, seed, start..start + out.len(), out);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use collectives::DType;
    use models::hf::{SaveOptions, Writer};

    /// A model directory with a vocabulary of so many.
    fn saved(vocab: usize, of_bytes: bool) -> (tempfile::TempDir, ModelChoice) {
        let home = tempfile::tempdir().unwrap();
        let config = LlamaConfig { vocab, layers: 1, ..LlamaConfig::preset("nano").unwrap() };
        let remarks = Remarks { of_bytes, ..Remarks::default() };
        let options = SaveOptions { remarks, ..SaveOptions::default() };
        let mut writer = Writer::create(home.path().join("m"), &config, DType::F32, &options).unwrap();
        for spec in config.units().into_iter().flat_map(|unit| unit.tensors) {
            writer.add(&spec.name, &vec![0f32; spec.len()]).unwrap();
        }
        writer.finish().unwrap();
        let model = ModelChoice::directory(&home.path().join("m")).unwrap();
        (home, model)
    }

    #[test]
    fn a_config_by_itself_is_a_shape_whose_new_weights_are_as_wide_as_it_says() {
        let home = tempfile::tempdir().unwrap();
        let shape = serde_json::json!({
            "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
            "intermediate_size": 176, "vocab_size": 97, "initializer_range": 0.5, "eos_token_id": 3, "pad_token_id": 5,
        });
        let file = home.path().join("shape.json");
        std::fs::write(&file, shape.to_string()).unwrap();
        let model = ModelChoice::open(&file).unwrap();
        assert_eq!((model.config.vocab, model.config.hidden, model.files()), (97, 64, vec![file]));
        assert_eq!(model.remarks.token_ids["eos_token_id"], 3);
        let drawn = |model: &ModelChoice| {
            let embedding = &model.config.units()[0].tensors[0];
            let mut values = vec![0f32; embedding.len()];
            model.source(1, 1)(embedding, 0..embedding.len(), &mut values).unwrap();
            assert!(values[5 * 64..6 * 64].iter().all(|&x| (x == 0.0) == model.config.padding.is_some()));
            values.iter().map(|x| x * x).sum::<f32>() / values.len() as f32
        };
        let usual = ModelChoice::new("usual", LlamaConfig { padding: None, ..model.config.clone() });
        assert!((drawn(&model).sqrt() - 0.5).abs() < 0.02 && (drawn(&usual).sqrt() - 0.02).abs() < 1e-3);
        assert_ne!(model.fingerprint(), usual.fingerprint());
    }

    #[test]
    fn text_is_bytes_only_where_a_model_is_of_bytes() {
        let chosen = |model: &ModelChoice, for_text| {
            let tokenizer = model.tokenizer(None, for_text)?;
            Ok::<_, Failure>(tokenizer.map(|t| t.name().to_owned()))
        };
        let bytes = Some("bytes".to_owned());
        let new = ModelChoice::open(Path::new("32m")).unwrap();
        assert_eq!((chosen(&new, true).unwrap(), chosen(&new, false).unwrap()), (bytes.clone(), None));
        let (_home, recorded) = saved(300, true);
        assert_eq!(chosen(&recorded, true).unwrap(), bytes);
        assert_eq!(chosen(&recorded, false).unwrap(), bytes);
        let (_home, narrow) = saved(256, false);
        assert_eq!((chosen(&narrow, true).unwrap(), chosen(&narrow, false).unwrap()), (bytes.clone(), None));
        let (_home, other) = saved(300, false);
        assert_eq!(chosen(&other, false).unwrap(), None);
        let e = chosen(&other, true).unwrap_err();
        assert!(e.code() == 2 && e.to_string().contains("vocabulary of 300"), "{e}");
        assert!(e.to_string().contains("--tokenizer, or 'bytes'"), "{e}");
        assert!(matches!(other.tokenizer(Some(Path::new("bytes")), true), Ok(Some(Tokenizer::Bytes))));
    }
}
