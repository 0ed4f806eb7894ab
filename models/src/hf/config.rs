//! config.json, in the spellings of transformers 4 and 5, to and from [`LlamaConfig`].

use super::fields::Fields;
use super::remarks::{OF_BYTES, Remarks, TOKEN_IDS, no_token_ids};
use super::rope::{ORIGINAL, parse_rope, rope_scaling};
use crate::config::LlamaConfig;
use crate::error::{Error, Result};
use collectives::DType;
use serde_json::{Map, Value, json};
use std::path::Path;

/// What a saved model says under other names, or would not be true of it, as that files of code lie beside it. Nor would be
/// where it came from, in keys that begin with `_`.
const OLD: [&str; 5] = ["auto_map", "dtype", "rope_parameters", ORIGINAL, "transformers_version"];

/// The shape in the text of a config.json, and what else we want of it. `path` is for errors.
///
/// # Errors
/// No JSON, a missing or mistyped field, a feature that is not supported (another architecture, biases,
/// activation, rope type, quantisation), or a shape that [`LlamaConfig::validate`] refuses; each is named.
pub(super) fn parse(path: &Path, text: &str) -> Result<(LlamaConfig, Remarks)> {
    let value: Value = serde_json::from_str(text).map_err(|e| {
        let python = ["NaN", "Infinity"].iter().any(|word| text.contains(word));
        let remark = if python { ": JSON has no NaN and no Infinity, which Python writes" } else { "" };
        Error::format(path, format!("not a Hugging Face configuration: {e}{remark}"))
    })?;
    let map = value
        .as_object()
        .ok_or_else(|| Error::format(path, "not a Hugging Face configuration: the JSON is not an object"))?;
    let fields = Fields { path, inside: "", map };
    check_supported(&fields)?;

    let hidden = fields.required_size("hidden_size")?;
    let heads = fields.required_size("num_attention_heads")?;
    let at = |e: Error| Error::format(path, e.to_string());
    let head_dim = match fields.size("head_dim")? {
        Some(width) => width,
        None => LlamaConfig::default_head_dim(hidden, heads).map_err(at)?,
    };
    // The defaults are those of transformers' LlamaConfig.
    let context = fields.size("max_position_embeddings")?.unwrap_or(2048);
    check_token_ids(&fields)?;
    let vocab = fields.required_size("vocab_size")?;
    let config = LlamaConfig {
        hidden,
        layers: fields.required_size("num_hidden_layers")?,
        heads,
        kv_heads: fields.size("num_key_value_heads")?.unwrap_or(heads),
        head_dim,
        ffn: fields.required_size("intermediate_size")?,
        vocab,
        context,
        rope: parse_rope(&fields, context)?,
        norm_eps: fields.single("rms_norm_eps")?.unwrap_or(1e-6),
        tied: fields.flag("tie_word_embeddings")?.unwrap_or(false),
        padding: padding(&fields, vocab)?,
    };
    config.validate().map_err(at)?;
    let new = Remarks::default();
    let initializer_range = fields.number("initializer_range")?.unwrap_or(new.initializer_range);
    if !(0.0..=1.0).contains(&initializer_range) {
        let wanted = "it must be between 0 and 1";
        return Err(fields.wrong("initializer_range", &json!(initializer_range), wanted));
    }
    let mut remarks = Remarks {
        token_ids: TOKEN_IDS.iter().filter_map(|k| map.get(*k).map(|v| (k.to_string(), v.clone()))).collect(),
        of_bytes: map.get(OF_BYTES.0).is_some_and(|tokenizer| tokenizer == OF_BYTES.1),
        use_cache: fields.flag("use_cache")?.unwrap_or(new.use_cache),
        dropout: fields.number("attention_dropout")?.unwrap_or(new.dropout),
        initializer_range,
        ..new
    };
    let ours = written(&config, DType::F32, &remarks);
    let other = |key: &str| !(ours.contains_key(key) || OLD.contains(&key) || key.starts_with('_'));
    remarks.others =
        map.iter().filter(|(key, _)| other(key)).map(|(key, value)| (key.clone(), value.clone())).collect();
    Ok((config, remarks))
}

/// Refuses everything that would change what a model computes and that we do not compute.
fn check_supported(fields: &Fields<'_>) -> Result<()> {
    let only = "only LlamaForCausalLM is supported";
    let architectures = fields.get("architectures");
    if let Some(value) = architectures {
        let names: Option<Vec<&str>> =
            value.as_array().and_then(|list| list.iter().map(Value::as_str).collect());
        // transformers writes an empty list for a configuration that no model was made of.
        if !matches!(names.as_deref(), Some([] | ["LlamaForCausalLM"])) {
            return Err(fields.wrong("architectures", value, only));
        }
    }
    match fields.text("model_type")? {
        Some("llama") => {}
        Some(other) => return Err(fields.wrong("model_type", &json!(other), only)),
        None if architectures.is_some_and(|names| *names != json!([])) => {}
        None => {
            let problem = format!("neither architectures nor model_type is given: {only}");
            return Err(Error::format(fields.path, problem));
        }
    }
    for key in ["attention_bias", "mlp_bias"] {
        if fields.flag(key)? == Some(true) {
            return Err(fields.wrong(key, &json!(true), "linear layers with a bias are not supported"));
        }
    }
    if fields.flag("is_causal")? == Some(false) {
        let only = "only causal attention is supported";
        return Err(fields.wrong("is_causal", &json!(false), only));
    }
    if let Some(value) = fields.get("layer_types") {
        let (kinds, layers) = (value.as_array(), fields.required_size("num_hidden_layers")?);
        if kinds.is_none_or(|kinds| kinds.iter().any(|kind| kind != "full_attention")) {
            return Err(fields.wrong("layer_types", value, "only full_attention is supported"));
        }
        // transformers 5 would not load it.
        if let Some(n) = kinds.map(Vec::len).filter(|n| *n != layers) {
            let wanted =
                format!("it lists {n} and num_hidden_layers is {layers}: list as many, or give none");
            return Err(fields.wrong("layer_types", value, &wanted));
        }
    }
    if let Some(value) = fields.get("per_layer_config") {
        return Err(fields.wrong("per_layer_config", value, "all layers have the same configuration here"));
    }
    match fields.text("hidden_act")? {
        None | Some("silu" | "swish") => {}
        Some(other) => {
            return Err(fields.wrong("hidden_act", &json!(other), "only silu (SwiGLU) is supported"));
        }
    }
    if fields.get("quantization_config").is_some() {
        let problem =
            "quantization_config is given: quantised weights are not supported, only f32, f16 and bf16";
        return Err(Error::format(fields.path, problem));
    }
    Ok(())
}

/// Refuses special tokens that transformers would not load a model with.
fn check_token_ids(fields: &Fields<'_>) -> Result<()> {
    let one = |id: &Value| id.as_i64().is_some();
    for key in TOKEN_IDS {
        let Some(value) = fields.get(key) else { continue };
        let several = key == "eos_token_id" && value.as_array().is_some_and(|ids| ids.iter().all(one));
        if !(one(value) || several) {
            return Err(fields.wrong(key, value, "it must be the number of a token"));
        }
    }
    Ok(())
}

/// The row of the embedding that is `pad_token_id`'s, counted from the end where that is negative: the only special token that
/// a model knows.
fn padding(fields: &Fields<'_>, vocab: usize) -> Result<Option<u32>> {
    let Some(id) = fields.get("pad_token_id").and_then(Value::as_i64) else { return Ok(None) };
    let rows = i64::try_from(vocab).unwrap_or(i64::MAX);
    let row = if id < 0 { id.saturating_add(rows) } else { id };
    match (0..rows).contains(&row).then(|| u32::try_from(row)) {
        Some(Ok(row)) => Ok(Some(row)),
        _ => Err(fields.wrong("pad_token_id", &json!(id), &format!("vocab_size is {vocab}"))),
    }
}

/// Whether transformers, 4 and 5, load a model of this shape. What only 4 does can be read and trained here.
///
/// # Errors
/// A hidden size that is no multiple of the heads, which 5 refuses whatever `head_dim` is.
pub fn check_loadable(config: &LlamaConfig) -> Result<()> {
    let (hidden, heads) = (config.hidden, config.heads);
    match hidden.is_multiple_of(heads) {
        true => Ok(()),
        false => Err(Error::config(format!(
            "transformers 5 would not load what is saved, because the hidden size {hidden} is no multiple of the {heads} \
             heads: a model whose heads divide its hidden size can be saved"
        ))),
    }
}

/// A config.json that transformers 4 and 5 both read (so in the older spelling).
pub(super) fn render(config: &LlamaConfig, dtype: DType, remarks: &Remarks) -> String {
    let mut all = remarks.others.clone();
    all.extend(written(config, dtype, remarks));
    format!("{:#}\n", Value::Object(all))
}

/// What this program has to say in it.
fn written(config: &LlamaConfig, dtype: DType, remarks: &Remarks) -> Map<String, Value> {
    let value = json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": false,
        "attention_dropout": remarks.dropout,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "initializer_range": remarks.initializer_range,
        "intermediate_size": config.ffn,
        "max_position_embeddings": config.context,
        "mlp_bias": false,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.kv_heads,
        // Shortest decimal that is this f32, so that 1e-5 is not written as 9.999999747378752e-6.
        "rms_norm_eps": config.norm_eps.to_string().parse::<f64>().unwrap_or(f64::from(config.norm_eps)),
        "rope_scaling": rope_scaling(config.rope.scaling),
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tied,
        "torch_dtype": match dtype {
            DType::F16 => "float16",
            DType::Bf16 => "bfloat16",
            _ => "float32",
        },
        "use_cache": remarks.use_cache,
        "vocab_size": config.vocab,
    });
    let Value::Object(mut map) = value else { unreachable!("an object above") };
    map.extend(remarks.token_ids.iter().map(|(k, v)| (k.clone(), v.clone())));
    if remarks.of_bytes {
        // LlamaConfig's own default would end a text at byte 2.
        for (key, none) in no_token_ids() {
            map.entry(key).or_insert(none);
        }
        map.insert(OF_BYTES.0.into(), json!(OF_BYTES.1));
    }
    map
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Rope, RopeScaling};

    fn with(changes: Value) -> String {
        let mut value = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 176, "vocab_size": 97,
        });
        value.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        value.to_string()
    }

    fn config(changes: Value) -> LlamaConfig {
        parse(Path::new("config.json"), &with(changes)).unwrap().0
    }

    fn refusal(changes: Value) -> String {
        parse(Path::new("config.json"), &with(changes)).unwrap_err().to_string()
    }

    #[test]
    fn defaults_are_those_of_transformers() {
        let c = config(json!({}));
        assert_eq!((c.kv_heads, c.head_dim, c.context), (4, 16, 2048));
        assert_eq!((c.rope, c.norm_eps, c.tied), (Rope::plain(1e4), 1e-6, false));
    }

    #[test]
    fn both_spellings_of_rope_mean_the_same() {
        let linear = Rope { theta: 5e5, scaling: RopeScaling::Linear { factor: 4.0 } };
        let llama3 = Rope {
            theta: 5e5,
            scaling: RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_context: 8192,
            },
        };
        let l3 = json!({"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192});
        let cases = [
            (json!({"rope_theta": 5e5}), Rope::plain(5e5)),
            (json!({"rope_theta": 500000, "rope_scaling": null}), Rope::plain(5e5)),
            (json!({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}), Rope::plain(5e5)),
            (json!({"rope_parameters": {"rope_theta": 5e5}}), Rope::plain(5e5)),
            (json!({"rope_theta": 5e5, "rope_scaling": {"type": "default", "factor": 8}}), Rope::plain(5e5)),
            (json!({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}), linear),
            (json!({"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4}}), linear),
            (json!({"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}}), linear),
            (json!({"rope_theta": 5e5, "rope_scaling": l3}), llama3),
            (json!({"rope_parameters": l3}), llama3),
            (json!({"rope_parameters": l3, "rope_scaling": l3}), llama3),
            (json!({"rope_theta": 5e5, "rope_parameters": l3, "rope_scaling": {}}), llama3),
            (json!({"rope_theta": 5e5, "rope_parameters": {}}), Rope::plain(5e5)),
        ];
        for (changes, rope) in cases {
            assert_eq!(config(changes.clone()).rope, rope, "{changes}");
        }
    }

    #[test]
    fn llama3_s_first_context_may_lie_beside_its_object_or_be_the_context() {
        let l3 =
            json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0});
        let first = |changes: Value| match config(changes).rope.scaling {
            RopeScaling::Llama3 { original_context, .. } => original_context,
            other => panic!("{other:?}"),
        };
        let beside = |original: Option<usize>| {
            json!({
                "rope_parameters": l3, "max_position_embeddings": 4096,
                "original_max_position_embeddings": original,
            })
        };
        assert_eq!((first(beside(Some(512))), first(beside(None))), (512, 4096));
    }

    #[test]
    fn an_empty_list_of_architectures_and_dropout_are_accepted() {
        let plain = config(json!({}));
        assert_eq!(config(json!({"architectures": []})), plain);
        let text = with(json!({"attention_dropout": 0.1}));
        let (config, remarks) = parse(Path::new("config.json"), &text).unwrap();
        assert_eq!((config, remarks.dropout), (plain, 0.1));
    }

    #[test]
    fn what_is_not_supported_is_named() {
        let kinds = |kinds: &[&str]| json!({"layer_types": kinds});
        let cases = [
            (json!({"architectures": ["MistralForCausalLM"]}), "MistralForCausalLM"),
            (json!({"architectures": "LlamaForCausalLM"}), "architectures"),
            (json!({"model_type": "qwen2"}), "qwen2"),
            (json!({"architectures": null, "model_type": null}), "neither architectures nor model_type"),
            (json!({"attention_bias": true}), "attention_bias"),
            (json!({"is_causal": false}), "is_causal"),
            (json!({"per_layer_config": {"0": {"rms_norm_eps": 1.0}}}), "per_layer_config"),
            (
                json!({"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}),
                "rope_parameters.full_attention",
            ),
            (json!({"mlp_bias": true}), "mlp_bias"),
            (json!({"hidden_act": "gelu"}), "gelu"),
            (json!({"architectures": [], "model_type": null}), "neither architectures nor model_type"),
            (json!({"quantization_config": {"bits": 4}}), "quantization_config"),
            (json!({"rope_scaling": {"type": "yarn", "factor": 2.0}}), "rope_scaling.type is \"yarn\""),
            (json!({"rope_parameters": {"rope_type": "dynamic"}}), "dynamic"),
            (
                json!({"rope_parameters": {"partial_rotary_factor": 0.5}}),
                "rope_parameters.partial_rotary_factor is 0.5",
            ),
            (json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor is 0.5: only 1"),
            (json!({"rope_scaling": {"type": "linear"}}), "rope_scaling.factor is missing"),
            (json!({"rope_scaling": {"factor": 8.0}}), "rope_scaling.factor is 8.0: rope_type is missing"),
            (
                json!({"rope_scaling": {"rope_type": "default", "type": "linear", "factor": 4.0}}),
                "rope_scaling.type is \"linear\": rope_type is default",
            ),
            (
                json!({"rope_scaling": {"type": "linear", "factor": 4.0, "rope_theta": 5e5}}),
                "rope_scaling.rope_theta is 500000.0: transformers 4",
            ),
            (json!({"rope_parameters": {"low_freq_factor": 1}}), "low_freq_factor is 1: rope_type is"),
            (
                json!({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 1e4}}),
                "disagree",
            ),
            (
                json!({ORIGINAL: 4096, "rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                       "high_freq_factor": 4.0, ORIGINAL: 8192}}),
                "original_max_position_embeddings is 8192: beside it stands 4096",
            ),
            (
                json!({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}),
                "rope_parameters.rope_theta is 500000.0: beside it stands 10000.0: one of them must go",
            ),
            (json!({"hidden_size": null}), "hidden_size is missing"),
            (json!({"hidden_size": "64"}), "hidden_size is \"64\""),
            (json!({"hidden_size": -64}), "hidden_size is -64"),
            (json!({"hidden_size": 64.5}), "hidden_size is 64.5"),
            (json!({"num_attention_heads": 5}), "split into 5 heads"),
            (json!({"num_attention_heads": 0}), "heads is 0"),
            (json!({"num_key_value_heads": 3}), "3 key/value heads"),
            (json!({"initializer_range": -0.02}), "initializer_range is -0.02"),
            (json!({"initializer_range": 1.5}), "initializer_range is 1.5: it must be between 0 and 1"),
            (json!({"initializer_range": 1e39}), "initializer_range is 1e+39"),
            (json!({"rms_norm_eps": 1e-46}), "rms_norm_eps is 1e-46: as an f32 it is 0"),
            (json!({"rope_theta": 1e-50}), "it must be a positive number that f32 holds"),
            (json!({"rope_scaling": {"type": "linear", "factor": 1e-46}}), "rope scaling factor is 1e-46: "),
            (json!({"vocab_size": 1e15}), "vocab is 1000000000000000"),
            (json!({"pad_token_id": 97}), "pad_token_id is 97: vocab_size is 97"),
            (json!({"pad_token_id": -98}), "pad_token_id is -98"),
            (json!({"bos_token_id": [1]}), "bos_token_id is [1]"),
            (json!({"pad_token_id": 2.5}), "pad_token_id is 2.5: it must be the number of a token"),
            (kinds(&["full_attention", "sliding_attention"]), "only full_attention is supported"),
            (kinds(&["full_attention"; 3]), "it lists 3 and num_hidden_layers is 2: list as many"),
            (kinds(&[]), "layer_types is []: it lists 0 and num_hidden_layers is 2"),
            (json!({"eos_token_id": 2.0}), "eos_token_id is 2.0: it must be the number of a token"),
        ];
        for (changes, expected) in cases {
            let text = refusal(changes.clone());
            assert!(text.contains(expected) && text.starts_with("config.json"), "{changes}: {text}");
        }
        for garbage in ["", "[1]", "{", "\u{0}"] {
            assert!(parse(Path::new("c"), garbage).is_err());
        }
        let infinite = with(json!({"more": 0.5})).replace("0.5", "Infinity");
        assert!(
            parse(Path::new("c"), &infinite)
                .unwrap_err()
                .to_string()
                .contains("JSON has no NaN and no Infinity")
        );
        for (changes, padding) in [
            (kinds(&["full_attention"; 2]), None),
            (json!({"pad_token_id": null}), None),
            (json!({"pad_token_id": 0}), Some(0)),
            (json!({"pad_token_id": 96}), Some(96)),
            (json!({"pad_token_id": -97}), Some(0)),
        ] {
            assert_eq!(config(changes).padding, padding);
        }
    }

    /// Fields as in the config.json of meta-llama's repositories.
    #[test]
    fn presets_are_the_published_models() {
        let published = json!({
            "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
            "bos_token_id": 128000, "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu",
            "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
            "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
            "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1,
            "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0,
            "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
            "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
            "transformers_version": "4.45.0.dev0", "use_cache": true, "vocab_size": 128256,
        });
        let config = parse(Path::new("c"), &published.to_string()).unwrap().0;
        assert_eq!(config, LlamaConfig::preset("llama-3.2-1b").unwrap());
        let published = json!({
            "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
            "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
            "max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
            "rope_scaling": null, "tie_word_embeddings": false, "torch_dtype": "float16",
            "transformers_version": "4.31.0.dev0", "use_cache": true, "vocab_size": 32000,
        });
        let config = parse(Path::new("c"), &published.to_string()).unwrap().0;
        assert_eq!(config, LlamaConfig::preset("llama-2-7b").unwrap());
    }

    #[test]
    fn what_is_written_is_read_back() {
        for name in LlamaConfig::PRESETS {
            let config = LlamaConfig::preset(name).unwrap();
            let ids = json!({"bos_token_id": 1, "eos_token_id": [2, 3]}).as_object().unwrap().clone();
            for of_bytes in [false, true] {
                let remarks = Remarks {
                    token_ids: ids.clone(),
                    of_bytes,
                    use_cache: of_bytes,
                    initializer_range: 0.006,
                    dropout: 0.1,
                    others: json!({"num_labels": 3, "torch": null}).as_object().unwrap().clone(),
                };
                let text = render(&config, DType::Bf16, &remarks);
                assert_eq!(parse(Path::new("c"), &text), Ok((config.clone(), remarks)), "{text}");
            }
        }
        let linear = Rope { theta: 1e4, scaling: RopeScaling::Linear { factor: 2.5 } };
        let config = LlamaConfig { rope: linear, head_dim: 6, ..LlamaConfig::preset("nano").unwrap() };
        let text = render(&config, DType::F32, &Remarks::default());
        assert_eq!(parse(Path::new("c"), &text), Ok((config, Remarks::default())));
        assert!(text.contains("\"initializer_range\": 0.02,"), "{text}");
        // To the last digit.
        let text = with(json!({"initializer_range": 0.02})).replace("0.02", "0.013975424859373685");
        let (config, remarks) = parse(Path::new("c"), &text).unwrap();
        let text = render(&config, DType::F32, &remarks);
        assert!(text.contains("\"initializer_range\": 0.013975424859373685,"), "{text}");
    }

    #[test]
    fn what_means_nothing_here_is_kept_and_what_would_no_longer_be_true_is_not() {
        let changes = json!({"num_labels": 3, "pretraining_tp": 1, "_name_or_path": "somewhere", "dtype": "float16",
            "transformers_version": "5.0.0", "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}});
        let (config, remarks) = parse(Path::new("c"), &with(changes)).unwrap();
        assert_eq!(Value::Object(remarks.others.clone()), json!({"num_labels": 3, "pretraining_tp": 1}));
        let text = render(&config, DType::Bf16, &remarks);
        assert!(text.contains("\"num_labels\": 3") && text.contains("\"rope_theta\": 500.0"), "{text}");
        assert_eq!(parse(Path::new("c"), &text), Ok((config, remarks)), "{text}");
    }

    /// A key that is null means none to transformers, and one that is not there its default.
    #[test]
    fn special_tokens_that_were_not_named_stay_so_unless_they_would_be_bytes() {
        let config = LlamaConfig::preset("nano").unwrap();
        let kept = |ids: Value, of_bytes| {
            let token_ids = ids.as_object().unwrap().clone();
            let text = render(&config, DType::F32, &Remarks { token_ids, of_bytes, ..Remarks::default() });
            Value::Object(parse(Path::new("c"), &text).unwrap().1.token_ids)
        };
        for ids in [json!({}), json!({"eos_token_id": 7}), json!({"bos_token_id": null, "pad_token_id": 0})] {
            assert_eq!(kept(ids.clone(), false), ids);
        }
        assert_eq!(kept(json!({}), true), json!({"bos_token_id": null, "eos_token_id": null}));
        assert_eq!(kept(json!({"eos_token_id": 7}), true), json!({"bos_token_id": null, "eos_token_id": 7}));
        assert_eq!(no_token_ids().len(), 2);
    }
}
