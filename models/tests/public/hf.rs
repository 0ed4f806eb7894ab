//! Hugging Face directories: what is written is read back, what is wrong is named, nothing half-written stays.

use collectives::{DType, Float, bf16, f16};
use models::hf::{Checkpoint, SaveOptions, Writer, check_destination};
use models::{Error, LlamaConfig, Result, TensorSpec, init_range};
use proptest::prelude::*;
use std::fs;
use std::path::Path;
use std::sync::LazyLock;

fn tiny() -> LlamaConfig {
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

fn tensors(config: &LlamaConfig) -> Vec<TensorSpec> {
    config.units().into_iter().flat_map(|u| u.tensors).collect()
}

/// Other values for each seed, also in the norms.
fn values(spec: &TensorSpec, seed: u64) -> Vec<f32> {
    let spec = TensorSpec { init: models::Init::Normal(1.0), ..spec.clone() };
    let mut out = vec![0.0; spec.len()];
    init_range(&spec, seed, 0..spec.len(), &mut out);
    out
}

fn save(dir: &Path, config: &LlamaConfig, dtype: DType, options: &SaveOptions, seed: u64) -> Result<()> {
    let mut writer = Writer::create(dir, config, dtype, options)?;
    for spec in tensors(config) {
        // In uneven pieces, as ranks would send them.
        for piece in values(&spec, seed).chunks(37) {
            writer.add(&spec.name, piece)?;
        }
    }
    writer.finish()
}

fn fill(writer: &mut Writer, seed: u64) {
    tensors(&tiny()).iter().for_each(|spec| writer.add(&spec.name, &values(spec, seed)).unwrap());
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn check_content(dir: &Path, config: &LlamaConfig, seed: u64, round: impl Fn(f32) -> f32) {
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

/// Rewrites model.safetensors with its tensors changed.
fn rewrite(dir: &Path, change: impl Fn(&mut Vec<(String, safetensors::Dtype, Vec<usize>, Vec<u8>)>)) {
    let path = dir.join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
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
    fs::write(&path, safetensors::serialize(views, None).unwrap()).unwrap();
}

fn saved(config: &LlamaConfig) -> (tempfile::TempDir, std::path::PathBuf) {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("model");
    save(&dir, config, DType::F32, &SaveOptions::default(), 1).unwrap();
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
    rewrite(&dir, |list| list.retain(|t| t.0 != "model.layers.1.mlp.up_proj.weight"));
    let text = refusal(&dir);
    assert!(text.contains("missing: model.layers.1.mlp.up_proj.weight"), "{text}");

    let (_home, dir) = saved(&tiny());
    rewrite(&dir, |list| list.retain(|t| !t.0.starts_with("model.layers.1.")));
    let text = refusal(&dir);
    assert!(text.contains("model.layers.1.input_layernorm.weight") && text.contains("and 6 more"), "{text}");

    let (_home, dir) = saved(&tiny());
    rewrite(&dir, |list| list.push(named("model.layers.2.input_layernorm.weight", f32s(&[8]))));
    let text = refusal(&dir);
    assert!(text.contains("does not ask for: model.layers.2.input_layernorm.weight"), "{text}");

    let (_home, dir) = saved(&tiny());
    rewrite(&dir, |list| list.iter_mut().filter(|t| t.0 == "lm_head.weight").for_each(|t| t.2 = vec![8, 11]));
    let text = refusal(&dir);
    assert!(text.contains("lm_head.weight has the shape [8, 11]") && text.contains("[11, 8]"), "{text}");

    let (_home, dir) = saved(&tiny());
    rewrite(&dir, |list| {
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
    rewrite(&dir, |list| {
        let embedding = list.iter().find(|t| t.0 == "model.embed_tokens.weight").unwrap().3.clone();
        list.push(("lm_head.weight".into(), safetensors::Dtype::F32, vec![11, 8], embedding));
        let name = "model.layers.0.self_attn.rotary_emb.inv_freq";
        list.push((name.into(), safetensors::Dtype::F32, vec![2], vec![0; 8]));
    });
    check_content(&dir, &config, 1, |x| x);
    rewrite(&dir, |list| list.iter_mut().filter(|t| t.0 == "lm_head.weight").for_each(|t| t.2 = vec![8, 11]));
    assert!(refusal(&dir).contains("lm_head.weight has the shape"));
}

#[test]
fn a_tied_model_with_another_head_is_refused() {
    let (_home, dir) = saved(&LlamaConfig { tied: true, ..tiny() });
    rewrite(&dir, |list| {
        let mut head = list.iter().find(|t| t.0 == "model.embed_tokens.weight").unwrap().3.clone();
        *head.last_mut().unwrap() ^= 1;
        list.push(("lm_head.weight".into(), safetensors::Dtype::F32, vec![11, 8], head));
    });
    let text = refusal(&dir);
    assert!(text.contains("lm_head.weight is another") && text.contains("tie_word_embeddings"), "{text}");
}

#[test]
fn a_wrong_directory_or_index_is_named() {
    let home = tempfile::tempdir().unwrap();
    assert!(refusal(&home.path().join("none")).contains("not a directory"));
    assert!(refusal(home.path()).contains("has no config.json"));

    let (_home, dir) = saved(&tiny());
    let weights = dir.join("model.safetensors");
    fs::write(&weights, "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 132\n").unwrap();
    let text = refusal(&dir);
    assert!(text.contains("model.safetensors: a pointer") && text.contains("'git lfs pull'"), "{text}");
    fs::remove_file(weights).unwrap();
    assert!(refusal(&dir).contains("has a config.json and no weights"));
    fs::write(dir.join("pytorch_model.bin"), "").unwrap();
    assert!(refusal(&dir).contains("has neither model.safetensors nor"));

    let sharded = |change: &dyn Fn(&mut serde_json::Value)| {
        let home = tempfile::tempdir().unwrap();
        let dir = home.path().join("m");
        let options = SaveOptions { file_limit: 1500, ..SaveOptions::default() };
        save(&dir, &tiny(), DType::F32, &options, 1).unwrap();
        let path = dir.join("model.safetensors.index.json");
        let mut index: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        change(&mut index);
        fs::write(&path, index.to_string()).unwrap();
        Checkpoint::open(&dir).map_err(|e| e.to_string())
    };
    sharded(&|_| ()).unwrap();
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
        (&|i| i["weight_map"]["lm_head.weight"] = "absent.safetensors".into(), "absent.safetensors"),
        (&|i| *i = serde_json::json!([]), "no weight_map"),
    ];
    for (change, expected) in cases {
        let text = sharded(change).unwrap_err();
        assert!(text.contains(expected), "{text}");
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

#[test]
fn weights_come_in_order_and_whole() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("m");
    let create = || Writer::create(&dir, &tiny(), DType::F32, &SaveOptions::default()).unwrap();
    let text = create().add("lm_head.weight", &[0.0f32]).unwrap_err().to_string();
    assert!(text.contains("lm_head.weight") && text.contains("model.embed_tokens.weight"), "{text}");
    assert!(create().add("model.embed_tokens.weight", &[0.0f32; 89]).is_err());
    let text = create().finish().unwrap_err().to_string();
    assert!(text.contains("model.embed_tokens.weight is not complete: 0 of 88"), "{text}");
    let mut writer = create();
    fill(&mut writer, 1);
    assert!(writer.add("lm_head.weight", &[0.0f32]).is_err());
    assert!(writer.add_file("../evil", b"").is_err());
    writer.add_file("tokenizer.json", b"{}").unwrap();
    writer.finish().unwrap();
    assert_eq!(names(&dir), ["config.json", "model.safetensors", "tokenizer.json"]);
    assert!(Writer::create(&dir, &tiny(), DType::I32, &SaveOptions::default()).is_err());
    assert_eq!(names(home.path()), ["m"]);
}

#[test]
fn what_transformers_writes_beside_a_model_is_replaced_and_carried() {
    let (_home, dir) = saved(&tiny());
    let beside = ["added_tokens.json", "chat_template.jinja", "generation_config.json", "tokenizer.model"];
    beside.iter().for_each(|name| fs::write(dir.join(name), name).unwrap());
    let companions = Checkpoint::open(&dir).unwrap().companions().unwrap();
    assert_eq!(companions, beside.map(|name| (name, name.as_bytes().to_vec())));
    let mut writer = Writer::create(&dir, &tiny(), DType::F32, &SaveOptions::default()).unwrap();
    fill(&mut writer, 2);
    companions[..3].iter().for_each(|(name, content)| writer.add_file(name, content).unwrap());
    writer.finish().unwrap();
    assert_eq!(names(&dir), [&beside[..2], &["config.json"], &beside[2..3], &["model.safetensors"]].concat());
    check_content(&dir, &tiny(), 2, |x| x);
}

#[test]
fn a_failed_save_leaves_no_parents_that_it_made() {
    let home = tempfile::tempdir().unwrap();
    let create =
        || Writer::create(home.path().join("a/b/m"), &tiny(), DType::F32, &SaveOptions::default()).unwrap();
    create().finish().unwrap_err();
    assert!(names(home.path()).is_empty());
    let writer = create();
    fs::write(home.path().join("a/notes"), "somebody's").unwrap();
    drop(writer);
    assert_eq!(names(&home.path().join("a")), ["notes"]);
}

#[test]
fn an_abandoned_save_leaves_the_old_model() {
    let (home, dir) = saved(&tiny());
    let mut writer = Writer::create(&dir, &tiny(), DType::F32, &SaveOptions::default()).unwrap();
    writer.add("model.embed_tokens.weight", &[0.0f32; 88]).unwrap();
    assert!(names(home.path()).len() <= 2, "at most a temporary directory lies beside");
    drop(writer);
    assert_eq!(names(home.path()), ["model"]);
    check_content(&dir, &tiny(), 1, |x| x);
}

#[test]
fn what_a_killed_save_left_goes_and_a_living_one_stays() {
    let (home, dir) = saved(&tiny());
    let living = home.path().join("model.tmp-2-0");
    std::fs::create_dir(&living).unwrap();
    let lock = std::fs::File::open(living).unwrap();
    lock.lock().unwrap();
    let kept = names(home.path());
    let stale = home.path().join("model.tmp-1-0");
    std::fs::create_dir(&stale).unwrap();
    std::fs::write(stale.join("model.safetensors"), b"half").unwrap();
    // Another model's, and a user's own.
    let others = ["model.tmp-1", "model.tmp-1-0-old", "model.tmp-old", "model2.tmp-1-0"];
    others.iter().for_each(|name| std::fs::create_dir(home.path().join(name)).unwrap());
    models::remove_unfinished(&dir);
    let mut expected: Vec<String> = kept.into_iter().chain(others.map(Into::into)).collect();
    expected.sort();
    assert_eq!(names(home.path()), expected);
    // Its process has ended: the next save takes it away.
    drop(lock);
    drop(Writer::create(&dir, &tiny(), DType::F32, &SaveOptions::default()).unwrap());
    assert_eq!(names(home.path()), [&["model"][..], &others].concat());
}

#[test]
fn only_model_directories_are_replaced() {
    let (home, dir) = saved(&tiny());
    let refusal = |path: &Path| {
        let by_check = check_destination(path, 0).unwrap_err().to_string();
        let by_save = save(path, &tiny(), DType::F32, &SaveOptions::default(), 2).unwrap_err().to_string();
        assert_eq!(by_check, by_save);
        by_check
    };
    fs::write(dir.join("thesis.tex"), "years of work").unwrap();
    assert!(refusal(&dir).contains("has thesis.tex, which is no part of a model"));
    assert!(refusal(&dir.join("thesis.tex")).contains("not a directory"));
    assert!(refusal(&dir.join("thesis.tex/model")).contains("Not a directory"));
    assert!(refusal(Path::new("/")).contains("name of its own"));
    assert_eq!(fs::read_to_string(dir.join("thesis.tex")).unwrap(), "years of work");
    fs::remove_file(dir.join("thesis.tex")).unwrap();

    // Something else appeared while the model was being written.
    let mut writer = Writer::create(&dir, &tiny(), DType::F32, &SaveOptions::default()).unwrap();
    fill(&mut writer, 2);
    fs::write(dir.join("notes.txt"), "x").unwrap();
    assert!(writer.finish().unwrap_err().to_string().contains("notes.txt"));
    check_content(&dir, &tiny(), 1, |x| x);

    // An empty directory, a missing parent and a link to a model directory are fine.
    let empty = home.path().join("empty");
    fs::create_dir(&empty).unwrap();
    save(&empty, &tiny(), DType::F32, &SaveOptions::default(), 3).unwrap();
    check_content(&empty, &tiny(), 3, |x| x);
    save(&home.path().join("a/b/c"), &tiny(), DType::F32, &SaveOptions::default(), 4).unwrap();
    check_content(&home.path().join("a/b/c"), &tiny(), 4, |x| x);
    let link = home.path().join("link");
    std::os::unix::fs::symlink(&empty, &link).unwrap();
    save(&link, &tiny(), DType::F32, &SaveOptions::default(), 5).unwrap();
    check_content(&empty, &tiny(), 5, |x| x);
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(names(home.path()), ["a", "empty", "link", "model"]);
}

#[test]
fn too_large_a_model_is_refused_before_writing() {
    let home = tempfile::tempdir().unwrap();
    let huge = LlamaConfig { layers: 1 << 14, ..LlamaConfig::preset("llama-3.1-405b").unwrap() };
    let dir = home.path().join("m");
    let Err(error) = Writer::create(&dir, &huge, DType::F32, &SaveOptions::default()) else {
        panic!("a disk with room for {} bytes", huge.parameters() * 4)
    };
    assert!(matches!(&error, Error::Format { problem, .. } if problem.contains("its disk has")), "{error}");
    assert_eq!(names(home.path()).len(), 0);
}

/// A disk that fills while the model is being written, in a private mount of 256 KiB.
#[test]
fn a_full_disk_leaves_nothing() {
    const DIR: &str = "MODELS_TEST_SMALL_DISK";
    if let Ok(disk) = std::env::var(DIR) {
        let disk = Path::new(&disk);
        let mut writer =
            Writer::create(disk.join("m"), &tiny(), DType::F32, &SaveOptions::default()).unwrap();
        // Somebody else fills it after the check.
        fs::write(disk.join("other"), vec![1; 254 << 10]).unwrap();
        let first = &tensors(&tiny())[0];
        let failure = tensors(&tiny()).iter().find_map(|s| writer.add(&s.name, &values(s, 1)).err());
        let text = match failure {
            Some(error) => error.to_string(),
            None => writer.finish().unwrap_err().to_string(),
        };
        assert!(text.contains("No space left") && text.contains("bytes"), "{text} ({})", first.name);
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let script = format!(
        "mount -t tmpfs -o size=256k none '{0}' || exit 77; {DIR}='{0}' '{1}' --exact hf::a_full_disk_leaves_nothing || \
         exit 1; test \"$(ls -A '{0}')\" = other",
        home.path().display(),
        std::env::current_exe().unwrap().display(),
    );
    match std::process::Command::new("unshare").args(["-rm", "sh", "-c", &script]).output() {
        Ok(out) if out.status.success() => {}
        Ok(out) if out.status.code() == Some(77) || out.stderr.starts_with(b"unshare") => {
            harness::skip(&format!("no private mount here: {}", String::from_utf8_lossy(&out.stderr).trim()));
        }
        Ok(out) => panic!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr)),
        Err(e) => harness::skip(&format!("no unshare command here: {e}")),
    }
}
