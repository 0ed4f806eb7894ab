//! Directories cross the border both ways: transformers' saves load here, and ours load in transformers.

use crate::reference::{Reference, VARIANTS};
use collectives::DType;
use models::hf::{Checkpoint, Remarks, SaveOptions, Writer};
use models::{LlamaConfig, RopeScaling};
use safetensors::{Dtype, SafeTensors};
use std::path::Path;
use std::process::Command;

fn copy(from: &Checkpoint, to: &Path, dtype: DType, file_limit: u64) {
    let remarks = Remarks { of_bytes: true, ..from.remarks().clone() };
    let options = SaveOptions { file_limit, remarks };
    let mut writer = Writer::create(to, from.config(), dtype, &options).unwrap();
    for spec in from.config().units().into_iter().flat_map(|u| u.tensors) {
        let mut values = vec![0.0f32; spec.len()];
        from.read_range(&spec.name, 0..spec.len(), &mut values).unwrap();
        writer.add(&spec.name, &values).unwrap();
    }
    writer.finish().unwrap();
}

#[test]
fn what_transformers_saved_loads() {
    let base = LlamaConfig {
        hidden: 48,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 12,
        ffn: 80,
        vocab: 61,
        context: 64,
        norm_eps: 1e-5,
        ..LlamaConfig::preset("nano").unwrap()
    };
    for name in VARIANTS {
        let reference = Reference::open(name);
        let checkpoint = reference.checkpoint();
        let mut expected = base.clone();
        match name {
            "mha" => {
                (expected.hidden, expected.ffn, expected.layers) = (40, 52, 3);
                (expected.kv_heads, expected.head_dim) = (4, 16);
            }
            "tied" => (expected.tied, expected.rope.theta) = (true, 500.0),
            "padded" => (expected.layers, expected.padding) = (1, Some(3)),
            "linear" => {
                (expected.kv_heads, expected.rope.scaling) = (1, RopeScaling::Linear { factor: 4.0 });
            }
            "llama3" => {
                (expected.heads, expected.kv_heads, expected.head_dim) = (3, 1, 32);
                expected.rope.theta = 1000.0;
                expected.rope.scaling = RopeScaling::Llama3 {
                    factor: 8.0,
                    low_freq_factor: 1.0,
                    high_freq_factor: 4.0,
                    original_context: 32,
                };
            }
            _ => {}
        }
        assert_eq!(checkpoint.config(), &expected, "{name}");
        // Of both types, each of which is read.
        let stored = if matches!(name, "gqa" | "tied") { Dtype::F32 } else { Dtype::BF16 };
        assert_eq!(stored_norm(&reference.dir), stored, "{name}");
    }
}

/// The type in which the last norm's weight is stored, in whichever file has it.
fn stored_norm(dir: &Path) -> Dtype {
    let files = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let weights = files.filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with("model"));
    let found =
        weights.filter(|path| path.extension().is_some_and(|e| e == "safetensors")).find_map(|path| {
            let bytes = std::fs::read(path).unwrap();
            let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
            metadata.info("model.norm.weight").map(|info| info.dtype)
        });
    found.expect("a norm")
}

#[test]
fn what_we_saved_loads_in_transformers() {
    let python = std::env::var("CARAVAN_PYTHON").unwrap_or("python3".into());
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/reference/check_saved.py");
    let home = tempfile::tempdir().unwrap();
    let mut command = Command::new(&python);
    command.arg(&script);
    for name in VARIANTS {
        let reference = Reference::open(name);
        let dir = home.path().join(name);
        // All weights are bf16 numbers, so any of these loses nothing.
        let (dtype, limit) = match name {
            "gqa" => (DType::F32, u64::MAX),
            "llama3" => (DType::F32, 50_000),
            "tied" => (DType::Bf16, 20_000),
            _ => (DType::Bf16, u64::MAX),
        };
        copy(&reference.checkpoint(), &dir, dtype, limit);
        command.arg(&dir).arg(reference.dir.join("reference.safetensors"));
    }
    let out = match command.output() {
        Ok(out) => out,
        Err(e) => return harness::skip(&format!("no {python}: {e}; CARAVAN_PYTHON can name another")),
    };
    let said = String::from_utf8_lossy(&out.stdout);
    match out.status.code() {
        Some(0) => println!("{}", said.trim()),
        Some(77) => harness::skip(&format!("{python}: {}; CARAVAN_PYTHON can name another", said.trim())),
        _ => panic!("{said}{}", String::from_utf8_lossy(&out.stderr)),
    }
}
