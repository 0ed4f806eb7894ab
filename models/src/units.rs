//! The units of a Llama and their tensors, under their Hugging Face names.

use crate::config::LlamaConfig;
use crate::unit::{Init, TensorSpec, Unit};

/// The standard deviation of a new matrix: transformers' `initializer_range`.
pub(crate) const DEVIATION: f64 = 0.02;

impl LlamaConfig {
    /// The units in forward order: `embed`, `block.0` and so on, `head`.
    ///
    /// * `embed`: the token table (vocab, hidden).
    /// * `block.i`: input norm, q, k, v, o, post-attention norm, gate, up, down, in the order of use.
    /// * `head`: the final norm and, unless tied, the head's matrix (vocab, hidden); tied, it uses `embed`.
    ///
    /// Matrices start normal with deviation 0.02, but for the row of the token that is padding, and decay; norms start as
    /// ones and do not decay (as in nanoGPT and llm.c, only tensors of two dimensions decay).
    pub fn units(&self) -> Vec<Unit> {
        let (hidden, ffn) = (self.hidden, self.ffn);
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let mut table = matrix("model.embed_tokens.weight", self.vocab, hidden);
        if let Some(padding) = self.padding {
            table.init = Init::Padded { deviation: DEVIATION as f32, row: padding as usize };
        }
        let mut units = vec![Unit {
            name: "embed".into(),
            tensors: vec![table],
            uses: vec![],
            // It only scatters.
            backward_reads: false,
        }];
        for layer in 0..self.layers {
            let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
            units.push(Unit {
                name: format!("block.{layer}"),
                tensors: vec![
                    norm(name("input_layernorm"), hidden),
                    matrix(name("self_attn.q_proj"), q, hidden),
                    matrix(name("self_attn.k_proj"), kv, hidden),
                    matrix(name("self_attn.v_proj"), kv, hidden),
                    matrix(name("self_attn.o_proj"), hidden, q),
                    norm(name("post_attention_layernorm"), hidden),
                    matrix(name("mlp.gate_proj"), ffn, hidden),
                    matrix(name("mlp.up_proj"), ffn, hidden),
                    matrix(name("mlp.down_proj"), hidden, ffn),
                ],
                uses: vec![],
                backward_reads: true,
            });
        }
        let mut head = vec![norm("model.norm.weight", hidden)];
        if !self.tied {
            head.push(matrix("lm_head.weight", self.vocab, hidden));
        }
        let uses = if self.tied { vec![0] } else { vec![] };
        units.push(Unit { name: "head".into(), tensors: head, uses, backward_reads: true });
        units
    }
}

fn matrix(name: impl Into<String>, rows: usize, columns: usize) -> TensorSpec {
    TensorSpec {
        name: name.into(),
        shape: vec![rows, columns],
        decay: true,
        init: Init::Normal(DEVIATION as f32),
    }
}

fn norm(name: impl Into<String>, length: usize) -> TensorSpec {
    TensorSpec { name: name.into(), shape: vec![length], decay: false, init: Init::Ones }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_add_up_to_the_parameter_count() {
        for name in LlamaConfig::PRESETS {
            let config = LlamaConfig::preset(name).unwrap();
            let units = config.units();
            assert_eq!(units.len(), config.layers + 2);
            let sum: u64 = units.iter().flat_map(|u| &u.tensors).map(|t| t.len() as u64).sum();
            assert_eq!(sum, config.parameters(), "{name}");
            assert_eq!(units.last().unwrap().uses, if config.tied { vec![0] } else { vec![] });
        }
    }

    #[test]
    fn only_matrices_decay() {
        let config = LlamaConfig::preset("nano").unwrap();
        for tensor in config.units().iter().flat_map(|u| &u.tensors) {
            assert_eq!(tensor.decay, tensor.shape.len() == 2, "{}", tensor.name);
        }
    }
}
