//! Reads the reference data of this folder (layout in README.md). Tests of any crate of the workspace include it, such as:
//! `#[path = "../../../models/tests/reference/mod.rs"] mod reference;`

use models::hf::Checkpoint;
use safetensors::{Dtype, SafeTensors};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// The names of the models, which are the names of the folders.
pub const VARIANTS: [&str; 6] = ["gqa", "mha", "tied", "linear", "llama3", "padded"];

/// What PyTorch computed for one model.
pub struct Reference {
    /// The folder, a Hugging Face directory with `reference.safetensors` beside.
    pub dir: PathBuf,
    tensors: HashMap<String, (Dtype, Vec<usize>, Vec<u8>)>,
    metadata: HashMap<String, String>,
}

/// The settings of the AdamW trace; weight decay is for matrices only.
#[derive(Clone, Copy, Debug)]
pub struct Optimizer {
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    /// The largest global norm of the gradient.
    pub clip: f64,
}

/// One batch, inputs and targets (rows, length).
#[derive(Clone, Debug)]
pub struct Tokens {
    pub rows: usize,
    pub length: usize,
    pub inputs: Vec<u32>,
    pub targets: Vec<u32>,
}

impl Reference {
    /// The data of one of [`VARIANTS`].
    pub fn open(name: &str) -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"))
            .ancestors()
            .map(|a| a.join("models/tests/reference"))
            .find(|p| p.is_dir())
            .expect("models/tests/reference above this crate");
        let dir = root.join(name);
        let bytes = std::fs::read(dir.join("reference.safetensors")).expect("reference data");
        let (_, metadata) = SafeTensors::read_metadata(&bytes).expect("reference data");
        let metadata = metadata.metadata().clone().unwrap_or_default();
        let file = SafeTensors::deserialize(&bytes).expect("reference data");
        let tensors = file
            .tensors()
            .into_iter()
            .map(|(name, v)| (name, (v.dtype(), v.shape().to_vec(), v.data().to_vec())))
            .collect();
        Reference { dir, tensors, metadata }
    }

    /// The weights.
    pub fn checkpoint(&self) -> Checkpoint {
        Checkpoint::open(&self.dir).expect("a Hugging Face directory")
    }

    /// A tensor as f32, from f32 or bf16.
    pub fn floats(&self, key: &str) -> Vec<f32> {
        let (dtype, _, bytes) = self.get(key);
        match dtype {
            Dtype::F32 => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            Dtype::BF16 => {
                let wide = |b: &[u8; 2]| f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
                bytes.as_chunks::<2>().0.iter().map(wide).collect()
            }
            other => panic!("{key} is of type {other}"),
        }
    }

    /// A tensor of f64.
    pub fn doubles(&self, key: &str) -> Vec<f64> {
        let (dtype, _, bytes) = self.get(key);
        assert_eq!(*dtype, Dtype::F64, "{key}");
        bytes.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b)).collect()
    }

    /// How far PyTorch's bf16 trace of `what` is from its f32 one; of the ways in which it computes the same, the farthest.
    pub fn bf16_distance(&self, what: &str) -> f64 {
        let exact = self.doubles(&format!("f32.trace.{what}"));
        let ways = self.doubles(&format!("bf16.trace.{what}"));
        ways.chunks(exact.len()).map(|way| distance(way, &exact)).fold(0.0, f64::max)
    }

    /// Whether there is such a tensor.
    pub fn has(&self, key: &str) -> bool {
        self.tensors.contains_key(key)
    }

    /// How many batches there are; step s of the trace takes batch s modulo this.
    pub fn batches(&self) -> usize {
        self.get("tokens").1[0]
    }

    /// One batch. Logits and gradients are those of batch 0.
    pub fn batch(&self, batch: usize) -> Tokens {
        let (dtype, shape, bytes) = self.get("tokens");
        assert_eq!(*dtype, Dtype::I32);
        let (rows, length) = (shape[1], shape[2] - 1);
        let all: Vec<u32> = bytes.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
        let mut tokens = Tokens { rows, length, inputs: vec![], targets: vec![] };
        for row in all.chunks_exact(length + 1).skip(batch * rows).take(rows) {
            tokens.inputs.extend(&row[..length]);
            tokens.targets.extend(&row[1..]);
        }
        tokens
    }

    /// The settings of the trace.
    pub fn optimizer(&self) -> Optimizer {
        let number = |key: &str| self.metadata[key].parse().expect("a number");
        Optimizer {
            lr: number("lr"),
            beta1: number("beta1"),
            beta2: number("beta2"),
            eps: number("eps"),
            weight_decay: number("weight_decay"),
            clip: number("clip"),
        }
    }

    fn get(&self, key: &str) -> &(Dtype, Vec<usize>, Vec<u8>) {
        self.tensors.get(key).unwrap_or_else(|| panic!("{key} in the reference data"))
    }
}

/// The relative distance ||a - b|| / ||b||.
pub fn distance<A: Copy + Into<f64>, B: Copy + Into<f64>>(a: &[A], b: &[B]) -> f64 {
    assert_eq!(a.len(), b.len());
    let square = |x: f64| x * x;
    let difference: f64 = a.iter().zip(b).map(|(&a, &b)| square(a.into() - b.into())).sum();
    let norm: f64 = b.iter().map(|&b| square(b.into())).sum();
    // A NaN anywhere must not pass for a small distance.
    assert!(norm > 0.0 && !difference.is_nan(), "a reference of zeros, or no numbers");
    (difference / norm).sqrt()
}
