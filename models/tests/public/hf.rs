//! Loading Hugging Face directories: what is written is read back, and what is wrong is named.

use collectives::{DType, Float, bf16, f16};
use models::hf::{Checkpoint, SaveOptions, Writer};
use models::{LlamaConfig, Result, TensorSpec, init_range};
use proptest::prelude::*;
use std::fs;
use std::path::Path;
use std::sync::LazyLock;

const EMBEDDING: &str = "model.embed_tokens.weight";

pub(super) fn tiny() -> LlamaConfig {
    LlamaConfig {
        hidden: 8,
        layers: 2,
        heads: 2,
        kv_heads: 1,
        head_dim: 4,
        ffn: 12,
        vocab: 11,
        ..LlamaConfig::preset("nano").unwrap()
    }
}

pub(super) fn tensors(config: &LlamaConfig) -> Vec<TensorSpec> {
    config.units().into_iter().flat_map(|u| u.tensors).collect()
}

/// Other values for each seed, also in the norms.
pub(super) fn values(spec: &TensorSpec, seed: u64) -> Vec<f32> {
    let spec = TensorSpec { init: models::Init::Normal(1.0), ..spec.clone() };
    let mut out = vec![0.0; spec.len()];
    init_range(&spec, seed, 0..spec.len(), &mut out);
    out
}

pub(super) fn save(
    dir: &Path,
    config: &LlamaConfig,
    dtype: DType,
    options: &SaveOptions,
    seed: u64,
) -> Result<()> {
    let mut writer = Writer::create(dir, config, dtype, options)?;
    for spec in tensors(config) {
        // In uneven pieces, as ranks would send them.
        for piece in values(&spec, seed).chunks(37) {
            writer.add(&spec.name, piece)?;
        }
    }
    writer.finish()
}

pub(super) fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

pub(super) fn check_content(dir: &Path, config: &LlamaConfig, seed: u64, round: impl Fn(f32) -> f32) {
    let checkpoint = Checkpoint::open(dir).unwrap();
    assert_eq!(checkpoint.config(), config);
    for spec in tensors(config) {
        let expected: Vec<f32> = values(&spec, seed).into_iter().map(&round).collect();
        let mut got = vec![0.0f32; spec.len()];
        checkpoint.read_range(&spec.name, 0..spec.len(), &mut got).unwrap();
        assert_eq!(got, expected, "{}", spec.name);
        let (a, b) = (spec.len() / 3, spec.len() - 1);
        checkpoint.read_range(&spec.name, a..b, &mut got[..b - a]).unwrap();
        assert_eq!(got[..b - a], expected[a..b], "{}", spec.name);
        let mut narrow = vec![bf16::ZERO; spec.len()];
        checkpoint.read_range(&spec.name, 0..spec.len(), &mut narrow).unwrap();
        assert!(narrow.iter().zip(&expected).all(|(a, &b)| *a == bf16::from_f32(b)), "{}", spec.name);
    }
}

#[test]
fn every_type_and_split_is_read_back() {
    let home = tempfile::tempdir().unwrap();
    for (i, config) in [tiny(), LlamaConfig { tied: true, ..tiny() }].iter().enumerate() {
        for limit in [u64::MAX, 1000, 0] {
            let options = SaveOptions { file_limit: limit, ..SaveOptions::default() };
            let dir = home.path().join(format!("{i}-{limit}"));
            save(&dir, config, DType::F32, &options, 1).unwrap();
            check_content(&dir, config, 1, |x| x);
            assert_eq!(names(&dir).contains(&"model.safetensors".to_string()), limit == u64::MAX);
            // Replaced in place by the same model in other types.
            save(&dir, config, DType::Bf16, &options, 2).unwrap();
            check_content(&dir, config, 2, |x| bf16::from_f32(x).to_f32());
            save(&dir, config, DType::F16, &SaveOptions::default(), 3).unwrap();
            check_content(&dir, config, 3, |x| Float::to_f32(f16::from_f32(x)));
            assert_eq!(names(&dir), ["config.json", "model.safetensors"]);
        }
    }
    assert_eq!(names(home.path()).len(), 6, "nothing temporary stays");
}

#[test]
fn a_tensor_longer_than_one_chunk_survives() {
    let home = tempfile::tempdir().unwrap();
    let config = LlamaConfig { vocab: 40_001, ..tiny() };
    let dir = home.path().join("m");
    let mut writer = Writer::create(&dir, &config, DType::Bf16, &SaveOptions::default()).unwrap();
    for spec in tensors(&config) {
        writer.add(&spec.name, &values(&spec, 7)).unwrap();
    }
    writer.finish().unwrap();
    check_content(&dir, &config, 7, |x| bf16::from_f32(x).to_f32());
}

/// Rewrites a safetensors file with its tensors changed.
fn rewrite(path: &Path, change: impl Fn(&mut Vec<(String, safetensors::Dtype, Vec<usize>, Vec<u8>)>)) {
    let bytes = fs::read(path).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut list: Vec<_> = file
        .tensors()
        .into_iter()
        .map(|(name, view)| (name, view.dtype(), view.shape().to_vec(), view.data().to_vec()))
        .collect();
    change(&mut list);
    let views = list.iter().map(|(name, dtype, shape, data)| {
        (name.as_str(), safetensors::tensor::TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    fs::write(path, safetensors::serialize(views, None).unwrap()).unwrap();
}

pub(super) fn saved(config: &LlamaConfig) -> (tempfile::TempDir, std::path::PathBuf) {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("model");
    save(&dir, config, DType::F32, &SaveOptions::default(), 1).unwrap();
    (home, dir)
}

const INDEX: &str = "model.safetensors.index.json";

/// A model in several files, its index changed.
fn sharded(change: &dyn Fn(&mut serde_json::Value)) -> (tempfile::TempDir, std::path::PathBuf) {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("m");
    let options = SaveOptions { file_limit: 1500, ..SaveOptions::default() };
    save(&dir, &tiny(), DType::F32, &options, 1).unwrap();
    let path = dir.join(INDEX);
    let mut index: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut index);
    fs::write(&path, index.to_string()).unwrap();
    (home, dir)
}

fn refusal(dir: &Path) -> String {
    Checkpoint::open(dir).unwrap_err().to_string()
}

#[test]
fn a_wrong_weight_is_named() {
    let f32s = |shape: &[usize]| {
        (safetensors::Dtype::F32, shape.to_vec(), vec![0; shape.iter().product::<usize>() * 4])
    };
    let named = |name: &str, (dtype, shape, data)| (name.to_string(), dtype, shape, data);

    let (_home, dir) = saved(&tiny());
    rewrite(&dir.join("model.safetensors"), |list| {
        list.retain(|t| t.0 != "model.layers.1.mlp.up_proj.weight")
    });
    let text = refusal(&dir);
    assert!(text.contains("missing: model.layers.1.mlp.up_proj.weight"), "{text}");

    let (_home, dir) = saved(&tiny());
    rewrite(&dir.join("model.safetensors"), |list| list.retain(|t| !t.0.starts_with("model.layers.1.")));
    let text = refusal(&dir);
    assert!(text.contains("model.layers.1.input_layernorm.weight") && text.contains("and 6 more"), "{text}");

    let (_home, dir) = saved(&tiny());
    rewrite(&dir.join("model.safetensors"), |list| {
        list.push(named("model.layers.2.input_layernorm.weight", f32s(&[8])))
    });
    let text = refusal(&dir);
    assert!(text.contains("does not ask for: model.layers.2.input_layernorm.weight"), "{text}");

    let (_home, dir) = saved(&tiny());
    rewrite(&dir.join("model.safetensors"), |list| {
        list.iter_mut().filter(|t| t.0 == "lm_head.weight").for_each(|t| t.2 = vec![8, 11])
    });
    let text = refusal(&dir);
    assert!(text.contains("lm_head.weight has the shape [8, 11]") && text.contains("[11, 8]"), "{text}");

    let (_home, dir) = saved(&tiny());
    rewrite(&dir.join("model.safetensors"), |list| {
        for t in list.iter_mut().filter(|t| t.0 == "model.norm.weight") {
            (t.1, t.3) = (safetensors::Dtype::F64, vec![0; 64]);
        }
    });
    let text = refusal(&dir);
    assert!(text.contains("model.norm.weight is of type F64"), "{text}");
}

#[test]
fn harmless_extras_are_accepted() {
    let config = LlamaConfig { tied: true, ..tiny() };
    let (_home, dir) = saved(&config);
    rewrite(&dir.join("model.safetensors"), |list| {
        let embedding = list.iter().find(|t| t.0 == EMBEDDING).unwrap().3.clone();
        list.push(("lm_head.weight".into(), safetensors::Dtype::F32, vec![11, 8], embedding));
        let name = "model.layers.0.self_attn.rotary_emb.inv_freq";
        list.push((name.into(), safetensors::Dtype::F32, vec![2], vec![0; 8]));
    });
    check_content(&dir, &config, 1, |x| x);
    rewrite(&dir.join("model.safetensors"), |list| {
        list.iter_mut().filter(|t| t.0 == "lm_head.weight").for_each(|t| t.2 = vec![8, 11])
    });
    assert!(refusal(&dir).contains("lm_head.weight has the shape"));

    // What is shared is stored once, perhaps under the head's name.
    let (_home, dir) = saved(&config);
    rewrite(&dir.join("model.safetensors"), |list| {
        list.iter_mut().filter(|t| t.0 == EMBEDDING).for_each(|t| t.0 = "lm_head.weight".into());
    });
    check_content(&dir, &config, 1, |x| x);
    rewrite(&dir.join("model.safetensors"), |list| {
        list.iter_mut().filter(|t| t.0 == "lm_head.weight").for_each(|t| t.2 = vec![8, 11])
    });
    assert!(refusal(&dir).contains("lm_head.weight has the shape [8, 11]"));
    rewrite(&dir.join("model.safetensors"), |list| list.retain(|t| t.0 != "lm_head.weight"));
    assert!(refusal(&dir).contains("weights that are missing: model.embed_tokens.weight"));
}

#[test]
fn buffers_that_an_old_index_lists_are_ignored_wherever_they_are() {
    let name = |layer: usize| format!("model.layers.{layer}.self_attn.rotary_emb.inv_freq");
    let (_home, dir) = sharded(&|index| {
        let shard = index["weight_map"][EMBEDDING].clone();
        (0..2).for_each(|layer| index["weight_map"][name(layer)] = shard.clone());
    });
    let index = fs::read(dir.join(INDEX)).unwrap();
    let index: serde_json::Value = serde_json::from_slice(&index).unwrap();
    let shard = dir.join(index["weight_map"][EMBEDDING].as_str().unwrap());
    // One is where the index says, the other was left out when the shards were written again.
    rewrite(&shard, |list| list.push((name(0), safetensors::Dtype::F32, vec![2], vec![0; 8])));
    check_content(&dir, &tiny(), 1, |x| x);
}

#[test]
fn a_tied_model_with_another_head_is_refused() {
    let (_home, dir) = saved(&LlamaConfig { tied: true, ..tiny() });
    rewrite(&dir.join("model.safetensors"), |list| {
        let mut head = list.iter().find(|t| t.0 == "model.embed_tokens.weight").unwrap().3.clone();
        *head.last_mut().unwrap() ^= 1;
        list.push(("lm_head.weight".into(), safetensors::Dtype::F32, vec![11, 8], head));
    });
    let text = refusal(&dir);
    assert!(text.contains("lm_head.weight is another") && text.contains("tie_word_embeddings"), "{text}");
    // Stored as other types they are compared as numbers: here the embedding as the upper halves of the head's.
    rewrite(&dir.join("model.safetensors"), |list| {
        let head = list.iter_mut().find(|t| t.0 == "lm_head.weight").unwrap();
        head.3.chunks_exact_mut(4).for_each(|value| value[..2].fill(0));
        let upper = head.3.chunks_exact(4).flat_map(|value| [value[2], value[3]]).collect();
        let embedding = list.iter_mut().find(|t| t.0 == EMBEDDING).unwrap();
        (embedding.1, embedding.3) = (safetensors::Dtype::BF16, upper);
    });
    Checkpoint::open(&dir).unwrap();
    rewrite(&dir.join("model.safetensors"), |list| {
        *list.iter_mut().find(|t| t.0 == EMBEDDING).unwrap().3.last_mut().unwrap() ^= 1;
    });
    assert!(refusal(&dir).contains("lm_head.weight is another"));
}

#[test]
fn a_wrong_directory_or_index_is_named() {
    let home = tempfile::tempdir().unwrap();
    assert!(refusal(&home.path().join("none")).contains("not a directory"));
    assert!(refusal(home.path()).contains("has no config.json"));

    let (_home, dir) = saved(&tiny());
    let weights = dir.join("model.safetensors");
    let config = fs::read(dir.join("config.json")).unwrap();
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 132\n";
    // What goes with the weights goes with those of another directory, too.
    for (file, content) in [("tokenizer.json", pointer), ("generation_config.json", "{}")] {
        fs::write(dir.join(file), content).unwrap();
    }
    let here = Checkpoint::open(&dir).unwrap().companions().unwrap();
    assert_eq!(here, [("generation_config.json".to_owned(), b"{}".to_vec())]);
    for file in ["model.safetensors", "config.json"] {
        fs::write(dir.join(file), pointer).unwrap();
        let text = refusal(&dir);
        assert!(text.contains(&format!("{file}: a pointer")) && text.contains("'git lfs pull'"), "{text}");
    }
    fs::write(dir.join("config.json"), config).unwrap();
    fs::remove_file(weights).unwrap();
    assert!(refusal(&dir).contains("has a config.json and no weights"));
    fs::write(dir.join("pytorch_model.bin"), "").unwrap();
    assert!(refusal(&dir).contains("has neither model.safetensors nor"));

    let opened = |change: &dyn Fn(&mut serde_json::Value)| {
        let (_home, dir) = sharded(change);
        Checkpoint::open(&dir).map(drop).map_err(|e| e.to_string())
    };
    opened(&|_| ()).unwrap();
    type Change<'a> = &'a dyn Fn(&mut serde_json::Value);
    let cases: [(Change<'_>, &str); 5] = [
        (
            &|i| i["weight_map"]["lm_head.weight"] = "model-00001-of-00004.safetensors".into(),
            "lm_head.weight should be in",
        ),
        (
            &|i| i["weight_map"]["lm_head.weight"] = "../x.safetensors".into(),
            "not in a file of this directory",
        ),
        (&|i| i["weight_map"]["lm_head.weight"] = 7.into(), "not in a file of this directory"),
        (
            &|i| i["weight_map"]["lm_head.weight"] = "absent.safetensors".into(),
            "absent.safetensors, which is not there",
        ),
        (&|i| *i = serde_json::json!([]), "no weight_map"),
    ];
    for (change, expected) in cases {
        let text = opened(change).unwrap_err();
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn a_link_to_nothing_is_there_and_cannot_be_opened() {
    let (_home, dir) = saved(&tiny());
    std::os::unix::fs::symlink("blobs/gone", dir.join("generation_config.json")).unwrap();
    let text = Checkpoint::open(&dir).unwrap().companions().unwrap_err().to_string();
    assert!(text.contains("generation_config.json: No such file"), "{text}");
    for name in ["config.json", "model.safetensors"] {
        let (_home, dir) = saved(&tiny());
        fs::remove_file(dir.join(name)).unwrap();
        std::os::unix::fs::symlink("blobs/gone", dir.join(name)).unwrap();
        let text = refusal(&dir);
        assert!(text.starts_with("cannot open") && text.contains(&format!("{name}: No such file")), "{text}");
        assert!(models::hf::has_weights(&dir));
    }
}

#[test]
fn truncated_files_are_errors_also_after_opening() {
    let (_home, dir) = saved(&tiny());
    let path = dir.join("model.safetensors");
    let whole = fs::read(&path).unwrap();
    let checkpoint = Checkpoint::open(&dir).unwrap();
    for len in [0, 7, 8, 100, whole.len() - 1] {
        fs::write(&path, &whole[..len]).unwrap();
        let text = refusal(&dir);
        assert!(text.contains("not a whole safetensors file"), "{len}: {text}");
    }
    // The disk's file shrank under an open checkpoint.
    let mut out = [0.0f32; 88];
    let text = checkpoint.read_range("lm_head.weight", 0..88, &mut out).unwrap_err().to_string();
    assert!(text.contains("lm_head.weight"), "{text}");
}

#[test]
fn ranges_outside_are_errors() {
    let (_home, dir) = saved(&tiny());
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let mut out = [0.0f32; 4];
    let reversed = std::ops::Range { start: 3, end: 1 };
    for range in [5..9, 4..7, reversed, 0..usize::MAX] {
        assert!(checkpoint.read_range("model.norm.weight", range, &mut out).is_err());
    }
    assert!(checkpoint.read_range("model.norm", 0..4, &mut out).is_err());
    checkpoint.read_range("model.norm.weight", 4..8, &mut out).unwrap();
}

type Files = Vec<(String, Vec<u8>)>;

/// The files of a small model in files of at most `limit` bytes.
fn saved_files(limit: u64) -> Files {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("m");
    save(&dir, &tiny(), DType::F32, &SaveOptions { file_limit: limit, ..SaveOptions::default() }, 1).unwrap();
    names(&dir).into_iter().map(|name| (name.clone(), fs::read(dir.join(name)).unwrap())).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever bytes change, opening and reading either work or say why; they never panic.
    #[test]
    fn mutated_files_never_panic(
        which in 0usize..3,
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
        header_only in any::<bool>(),
    ) {
        // Saved once, because saving waits for the disk, and copied for each case.
        static SAVED: LazyLock<[Files; 2]> = LazyLock::new(|| [u64::MAX, 1500].map(saved_files));
        let home = tempfile::tempdir().unwrap();
        let dir = home.path();
        for (name, content) in &SAVED[usize::from(which == 2)] {
            fs::write(dir.join(name), content).unwrap();
        }
        let path = dir.join(["config.json", "model.safetensors", "model.safetensors.index.json"][which]);
        let mut bytes = fs::read(&path).unwrap();
        // Most bytes are weights, where any change is valid: aim at headers as well.
        let reach = if header_only { bytes.len().min(600) } else { bytes.len() };
        for (index, byte) in edits {
            let at = index.index(reach);
            bytes[at] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        fs::write(&path, &bytes).unwrap();
        if let Ok(checkpoint) = Checkpoint::open(dir) {
            for spec in tensors(checkpoint.config()) {
                let mut out = vec![0.0f32; spec.len()];
                checkpoint.read_range(&spec.name, 0..spec.len(), &mut out).unwrap();
            }
        }
    }
}
