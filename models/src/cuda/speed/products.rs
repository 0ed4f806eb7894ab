//! The products of a step: of each matrix of weights the forward, and the gradients of the matrix and of what it was
//! multiplied with.

use super::Work::Computed;
use super::timing::Bench;
use crate::config::LlamaConfig;
use crate::llama::chunk;
use collectives::device::{Product, Queue, Streams};
use collectives::{Result, bf16};

type T = bf16;

/// What a product adds.
#[derive(Clone, Copy)]
enum Plus {
    Nothing,
    Old,
    Other,
}

pub(super) fn products<Q: Streams>(b: &mut Bench<'_, Q>, config: &LlamaConfig, n: usize) -> Result<()> {
    use Plus::{Nothing, Old, Other};
    let LlamaConfig { hidden: h, ffn: f, vocab, .. } = *config;
    let (q, kv, chunk) = (config.heads * config.head_dim, config.kv_heads * config.head_dim, chunk(n, vocab));
    // Values are as keys, and up as gate, whose gradients are added up. Of several chunks all but the first add theirs.
    let matrices = [
        ("queries", [n, h, q], [Nothing, Nothing, Nothing]),
        ("keys", [n, h, kv], [Nothing, Nothing, Old]),
        ("attended", [n, q, h], [Other, Nothing, Nothing]),
        ("gate", [n, h, f], [Nothing, Nothing, Nothing]),
        ("down", [n, f, h], [Other, Nothing, Nothing]),
        ("logits", [chunk, h, vocab], [Nothing, Old, Nothing]),
    ];
    for (name, [tokens, inputs, outputs], [forward, of, before]) in matrices {
        // out (tokens, outputs) = x * w^T
        time(b, name.to_owned(), [tokens, inputs, outputs], (false, true), forward)?;
        // d_w (outputs, inputs) = d_out^T * x
        time(b, format!("gradient of {name}"), [outputs, tokens, inputs], (true, false), of)?;
        // d_x (tokens, inputs) = d_out * w
        time(b, format!("gradient before {name}"), [tokens, outputs, inputs], (false, false), before)?;
    }
    Ok(())
}

/// Times a product (m, k) * (k, n) as the model has it, and the other ways in which the device's library would compute it.
fn time<Q: Streams>(
    b: &mut Bench<'_, Q>,
    name: String,
    [m, k, n]: [usize; 3],
    (left_transposed, right_transposed): (bool, bool),
    plus: Plus,
) -> Result<()> {
    let (left, right) = (b.noise::<T>(m * k, 1.0)?, b.noise::<T>(k * n, 1.0)?);
    let other = matches!(plus, Plus::Other).then(|| b.noise::<T>(m * n, 1.0)).transpose()?;
    let mut out = b.zeros::<T>(m * n)?;
    let operands = ((left.view(), left_transposed), (right.view(), right_transposed));
    let product = Product::new([m, k, n], operands.0, operands.1, out.view_mut());
    let product = match (plus, &other) {
        (_, Some(other)) => product.plus(other.view()),
        (Plus::Old, _) => product.plus_old(),
        _ => product,
    };
    let flops = Computed(2.0 * m as f64 * k as f64 * n as f64);
    let name = format!("product {name} {m} x {k} x {n}");
    b.begins("product", &name);
    match ways(b, &product) {
        Ok((seconds, best)) => b.show("product", name, seconds, flops, Some(best)),
        Err(why) => b.miss("product", name, why)?,
    }
    Ok(())
}

/// Seconds of the way that is taken; how many there are, and seconds of the fastest.
fn ways<Q: Streams>(b: &mut Bench<'_, Q>, product: &Product<'_>) -> Result<(f64, (usize, f64))> {
    let seconds = b.seconds(|queue| queue.product(product))?;
    let ways = b.queue.ways(product)?;
    let mut best = seconds;
    for way in 1..ways {
        best = best.min(b.seconds(|queue| queue.product(&product.by(way)))?);
    }
    Ok((seconds, (ways, best)))
}
