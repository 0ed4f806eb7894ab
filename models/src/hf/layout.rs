//! Which weights a model directory has in which file, and as which bytes.

use super::load::SINGLE;
use crate::config::LlamaConfig;
use crate::error::{Error, Result};
use collectives::{DType, Float, bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::path::Path;

/// One file of weights as planned.
pub(super) struct Planned {
    pub(super) name: String,
    /// Length, JSON and padding.
    pub(super) header: Vec<u8>,
    /// Names and elements in file order.
    pub(super) tensors: Vec<(String, usize)>,
    /// Bytes of an element.
    size: usize,
}

impl Planned {
    /// Its length.
    pub(super) fn bytes(&self) -> u64 {
        let elements: usize = self.tensors.iter().map(|(_, elements)| elements).sum();
        (self.header.len() + elements * self.size) as u64
    }
}

/// What tells in which of several files each weight is.
pub(super) fn index(files: &[Planned], total: u64) -> String {
    let named = files.iter().flat_map(|p| p.tensors.iter().map(|(t, _)| (t.clone(), json!(p.name))));
    let map: Map<String, Value> = named.collect();
    format!("{:#}\n", json!({"metadata": {"total_size": total}, "weight_map": map}))
}

/// Distributes the weights over files of at most `limit` bytes (a larger weight has a file of its own).
pub(super) fn plan(target: &Path, config: &LlamaConfig, dtype: DType, limit: u64) -> Result<Vec<Planned>> {
    let stored = match dtype {
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::Bf16 => Dtype::BF16,
        other => {
            let text = format!("weights cannot be saved as {other}: f32, f16 and bf16 are possible");
            return Err(Error::format(target, text));
        }
    };
    let mut files: Vec<Vec<(String, TensorInfo)>> = vec![];
    let mut end = 0;
    for tensor in config.units().into_iter().flat_map(|u| u.tensors) {
        let bytes = tensor.len() * dtype.size();
        if files.is_empty() || (end + bytes) as u64 > limit {
            files.push(vec![]);
            end = 0;
        }
        let info = TensorInfo { dtype: stored, shape: tensor.shape, data_offsets: (end, end + bytes) };
        end += bytes;
        if let Some(file) = files.last_mut() {
            file.push((tensor.name, info));
        }
    }
    let count = files.len();
    let names = (1..).map(|i| match count {
        1 => SINGLE.to_string(),
        _ => format!("model-{i:05}-of-{count:05}.safetensors"),
    });
    let size = dtype.size();
    files.into_iter().zip(names).map(|(tensors, name)| plan_file(target, name, tensors, size)).collect()
}

fn plan_file(
    target: &Path,
    name: String,
    tensors: Vec<(String, TensorInfo)>,
    size: usize,
) -> Result<Planned> {
    let sizes = tensors.iter().map(|(name, info)| (name.clone(), info.shape.iter().product())).collect();
    // transformers refuses files that do not say which framework's layout they have.
    let format = HashMap::from([("format".to_string(), "pt".to_string())]);
    let wrong = |e: &dyn std::fmt::Display| Error::format(target, format!("no header for {name}: {e}"));
    let metadata = Metadata::new(Some(format), tensors).map_err(|e| wrong(&e))?;
    let mut json = serde_json::to_vec(&metadata).map_err(|e| wrong(&e))?;
    // Data begins at a multiple of 8.
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.append(&mut json);
    Ok(Planned { name, header, tensors: sizes, size })
}

/// The values in a type, in the place of what `bytes` has.
pub(super) fn encode<T: Float>(dtype: DType, values: &[T], bytes: &mut Vec<u8>) {
    match dtype {
        DType::F16 => encode_by(values, bytes, |x| <f16 as Float>::from_f32(x).to_le_bytes()),
        DType::Bf16 => encode_by(values, bytes, |x| <bf16 as Float>::from_f32(x).to_le_bytes()),
        _ => encode_by(values, bytes, f32::to_le_bytes),
    }
}

fn encode_by<T: Float, const N: usize>(values: &[T], bytes: &mut Vec<u8>, of: impl Fn(f32) -> [u8; N]) {
    bytes.resize(values.len() * N, 0);
    let (out, _) = bytes.as_chunks_mut::<N>();
    out.iter_mut().zip(values).for_each(|(out, x)| *out = of(x.to_f32()));
}
