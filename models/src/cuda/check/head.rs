//! The embedding and the cross-entropy against their definitions.

use super::bed::*;
use crate::cuda;
use crate::ops::NO_ROW;
use collectives::device::Queue;
use collectives::{Float, bf16, f16};

/// Lookups of `padding` teach no row.
fn check_embedding<T: Float, Q: Queue>(
    bed: &Bed<Q>,
    n: usize,
    (vocab, padding): (usize, Option<u32>),
    width: usize,
) {
    let table = bed.random::<T>(1, vocab * width, 1.0);
    // One token is in half of the places.
    let tokens: Vec<u32> = (0..n)
        .map(|i| if i % 2 == 0 { 3 % vocab as u32 } else { (i * i + 5) as u32 % vocab as u32 })
        .collect();
    let tokens = bed.copy_of(&tokens);
    let d_out = bed.random::<T>(2, n * width, 1.0);
    let row = |&token: &u32| if padding == Some(token) { NO_ROW } else { token };
    let rows: Vec<u32> = tokens.host().iter().map(row).collect();
    let mut order: Vec<u64> =
        rows.iter().enumerate().map(|(i, &row)| u64::from(row) << 32 | i as u64).collect();
    order.sort_unstable();
    let order = bed.copy_of(&order);
    let mut sums = vec![0.0; vocab * width];
    for (i, &row) in rows.iter().enumerate().filter(|(_, row)| **row != NO_ROW) {
        for c in 0..width {
            sums[row as usize * width + c] += f64::from(d_out.host()[i * width + c].to_f32());
        }
    }
    let name = format!("embedding of {n} tokens x {width}, padding {padding:?}");
    bed.in_every_order(&name, &mut |stream| {
        let mut out = bed.unwritten::<T>(n * width);
        stream.run([cuda::embed(tokens.view(), table.view(), out.view_mut())]);
        for (i, &t) in tokens.host().iter().enumerate() {
            let t = t as usize;
            let same = out.host()[i * width..][..width] == table.host()[t * width..][..width];
            bed.that(same, || format!("{name}: row {i} is not that of token {t}"));
        }
        let mut results = vec![bytes(&out)];
        for add in [false, true] {
            // Rows of tokens that do not occur stay as they are.
            let mut d_table = bed.random::<T>(9, vocab * width, 1.0);
            let before = wide(&d_table);
            stream.run([cuda::embed_backward(order.view(), d_out.view(), d_table.view_mut(), add)]);
            let want: Vec<f64> = (0..vocab * width)
                .map(|i| {
                    let occurs = rows.contains(&((i / width) as u32));
                    if occurs && !add { sums[i] } else { before[i] + sums[i] }
                })
                .collect();
            bed.close(&name, &d_table, &want);
            results.push(bytes(&d_table));
        }
        results
    });
}

pub fn embeddings<Q: Queue>(bed: &Bed<Q>) {
    for (n, vocab, width) in [(1, 1, 1), (7, 11, 5), (63, 50, 8), (200, 17, 72), (65, 300, 264), (70, 4, 40)]
    {
        check_embedding::<f32, Q>(bed, n, (vocab, None), width);
        check_embedding::<bf16, Q>(bed, n, (vocab, None), width);
    }
    check_embedding::<f16, Q>(bed, 30, (9, None), 40);
    // The one in half of the places; another; and all that there are.
    for (vocab, padding) in [(17, 3), (17, 5), (1, 0)] {
        check_embedding::<bf16, Q>(bed, 70, (vocab, Some(padding)), 72);
    }
}

/// The first `masked` logits of every row are minus infinity.
fn check_cross_entropy<T: Float, Q: Queue>(bed: &Bed<Q>, rows: usize, vocab: usize, masked: usize) {
    let mut logits = bed.random::<T>(1, rows * vocab, 4.0);
    logits
        .host_mut()
        .chunks_exact_mut(vocab)
        .for_each(|row| row[..masked].fill(T::from_f32(f32::NEG_INFINITY)));
    let targets: Vec<u32> = (0..rows).map(|i| ((i * 7919 + vocab - 1) % vocab) as u32).collect();
    let targets = bed.copy_of(&targets);
    let scale = 1.0 / 13.0;
    let (mut losses, mut gradient) = (Vec::new(), Vec::new());
    for (row, &target) in wide(&logits).chunks_exact(vocab).zip(targets.host()) {
        let most = row.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b));
        let sum: f64 = row.iter().map(|x| (x - most).exp()).sum();
        losses.push(sum.ln() + most - row[target as usize]);
        let hit = |i: usize| if i == target as usize { 1.0 } else { 0.0 };
        gradient.extend(row.iter().enumerate().map(|(i, x)| ((x - most).exp() / sum - hit(i)) * scale));
    }
    bed.in_every_order(&format!("cross-entropy of {rows} x {vocab}"), &mut |stream| {
        let (mut got, mut d) = (bed.unwritten::<f32>(rows), bed.copy_of(logits.host()));
        let scale = Some(scale as f32);
        stream.run([cuda::cross_entropy(d.view_mut(), targets.view(), got.view_mut(), scale)]);
        // With one word nothing is left of the loss but the absolute error of a logarithm.
        bed.close_above(
            &format!("loss of {rows} x {vocab}"),
            &got,
            &losses,
            if vocab == 1 { 1.0 } else { 0.0 },
        );
        bed.close(&format!("d_logits of {rows} x {vocab}"), &d, &gradient);
        let (mut alone, mut kept) = (bed.unwritten::<f32>(rows), bed.copy_of(logits.host()));
        stream.run([cuda::cross_entropy(kept.view_mut(), targets.view(), alone.view_mut(), None)]);
        bed.that(alone.host() == got.host() && bytes(&kept) == bytes(&logits), || {
            format!(
                "loss of {rows} x {vocab}: it depends on whether the gradient is wanted, or logits change"
            )
        });
        vec![bytes(&got), bytes(&d)]
    });
}

pub fn cross_entropies<Q: Queue>(bed: &Bed<Q>) {
    for (rows, vocab) in [(1, 1), (3, 7), (5, 256), (2, 1001), (3, 8192), (1, 5000)] {
        check_cross_entropy::<f32, Q>(bed, rows, vocab, 0);
        check_cross_entropy::<bf16, Q>(bed, rows, vocab, 0);
    }
    check_cross_entropy::<f16, Q>(bed, 2, 515, 0);
    // More than all threads read at first, one by one and in vectors.
    check_cross_entropy::<f32, Q>(bed, 2, 2001, 1500);
    check_cross_entropy::<bf16, Q>(bed, 1, 16384, 9000);
    // More than they have under way at once.
    check_cross_entropy::<f32, Q>(bed, 1, 20000, 0);
    check_cross_entropy::<bf16, Q>(bed, 1, 41000, 0);
}

pub fn a_target_outside_the_vocabulary_gives_nan<Q: Queue>(bed: &Bed<Q>) {
    let targets = bed.copy_of(&[10u32, 3]);
    bed.in_every_order("a target outside the vocabulary", &mut |stream| {
        let (mut losses, mut logits) = (bed.unwritten::<f32>(2), bed.random::<bf16>(1, 20, 1.0));
        stream.run([cuda::cross_entropy(logits.view_mut(), targets.view(), losses.view_mut(), None)]);
        let fine = losses.host()[0].is_nan() && losses.host()[1].is_finite();
        bed.that(fine, || format!("losses with a target outside the vocabulary: {:?}", losses.host()));
        vec![bytes(&losses)]
    });
}
