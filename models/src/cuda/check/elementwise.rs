//! RMSNorm, the rotary embedding and SwiGLU against their definitions.

use super::bed::*;
use crate::cuda;
use crate::ops::{Normed, Turn};
use collectives::device::Queue;
use collectives::{Float, bf16, f16};

/// y, d_x (without what it is added to) and d_weight.
fn norm_oracle(x: &[f64], weight: &[f64], eps: f64, dy: &[f64]) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let h = weight.len();
    let (mut y, mut dx, mut dw) = (vec![0.0; x.len()], vec![0.0; x.len()], vec![0.0; h]);
    for (row, x) in x.chunks_exact(h).enumerate() {
        let scale = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / h as f64 + eps).sqrt();
        let dy = &dy[row * h..(row + 1) * h];
        let along = (0..h).map(|i| x[i] * weight[i] * dy[i]).sum::<f64>() / h as f64 * scale.powi(3);
        for i in 0..h {
            y[row * h + i] = x[i] * scale * weight[i];
            dx[row * h + i] = scale * weight[i] * dy[i] - along * x[i];
            dw[i] += dy[i] * x[i] * scale;
        }
    }
    (y, dx, dw)
}

fn check_norm<T: Float, Q: Queue>(bed: &Bed<Q>, rows: usize, width: usize) {
    let n = rows * width;
    let (x, weight) = (bed.random::<T>(1, n, 2.0), bed.random::<T>(2, width, 1.0));
    let (dy, before) = (bed.random::<T>(3, n, 1.0), bed.random::<T>(4, n, 1.0));
    let (y, dx, dw) = norm_oracle(&wide(&x), &wide(&weight), 1e-5, &wide(&dy));
    let name = format!("norm of {rows} x {width}");
    bed.in_every_order(&name, &mut |stream| {
        let mut out = bed.unwritten::<T>(n);
        stream.run([cuda::norm(x.view(), None, weight.view(), 1e-5, out.view_mut())]);
        bed.close(&name, &out, &y);
        let mut results = vec![bytes(&out)];
        for add in [false, true] {
            let mut d_x = if add { bed.random::<T>(4, n, 1.0) } else { bed.unwritten::<T>(n) };
            let (mut d_weight, parts) = (bed.unwritten::<T>(width), cuda::norm_partials(rows));
            let mut partials = bed.unwritten::<f32>(parts * width);
            stream.run(cuda::norm_backward(
                Normed { x: x.view(), weight: weight.view(), eps: 1e-5 },
                dy.view(),
                d_x.view_mut(),
                add,
                d_weight.view_mut(),
                &mut partials.view_mut(),
            ));
            let want: Vec<f64> =
                dx.iter().zip(wide(&before)).map(|(d, b)| if add { d + b } else { *d }).collect();
            // In rows of one element the two terms of the gradient cancel.
            bed.close_above(&format!("{name}: d_x"), &d_x, &want, if width == 1 { 1.0 } else { 0.0 });
            bed.close(&format!("{name}: d_weight"), &d_weight, &dw);
            results.extend([bytes(&d_x), bytes(&d_weight)]);
        }
        results
    });
}

pub fn norms<Q: Queue>(bed: &Bed<Q>) {
    for (rows, width) in
        [(1, 1), (3, 7), (5, 64), (2, 65), (37, 200), (3, 2048), (70, 520), (2, 4104), (2, 8200)]
    {
        check_norm::<f32, Q>(bed, rows, width);
        check_norm::<bf16, Q>(bed, rows, width);
    }
    check_norm::<f16, Q>(bed, 20, 72);
}

fn check_residual<Q: Queue>(bed: &Bed<Q>, rows: usize, width: usize) {
    let n = rows * width;
    let (x, r) = (bed.random::<bf16>(1, n, 1.0), bed.random::<bf16>(2, n, 1.0));
    let weight = bed.random::<bf16>(3, width, 1.0);
    let added: Vec<bf16> =
        x.host().iter().zip(r.host()).map(|(a, b)| Float::from_f32(a.to_f32() + b.to_f32())).collect();
    let want = norm_oracle(
        &added.iter().map(|x| f64::from(x.to_f32())).collect::<Vec<_>>(),
        &wide(&weight),
        1e-6,
        &vec![0.0; n],
    )
    .0;
    let name = format!("norm of a sum of {rows} x {width}");
    bed.in_every_order(&name, &mut |stream| {
        let (mut sum, mut out) = (bed.unwritten::<bf16>(n), bed.unwritten::<bf16>(n));
        let residual = Some((r.view(), sum.view_mut()));
        stream.run([cuda::norm(x.view(), residual, weight.view(), 1e-6, out.view_mut())]);
        bed.that(sum.host() == added, || format!("{name}: the sum is not rounded once"));
        bed.close(&name, &out, &want);
        vec![bytes(&out)]
    });
}

pub fn a_residual_is_added_before_the_norm<Q: Queue>(bed: &Bed<Q>) {
    for (rows, width) in [(6, 136), (3, 65), (2, 8200)] {
        check_residual(bed, rows, width);
    }
}

fn check_rope<T: Float, Q: Queue>(bed: &Bed<Q>, rows: usize, length: usize, heads: usize, width: usize) {
    let n = rows * length * heads * width;
    let x = bed.random::<T>(1, n, 1.0);
    // One position more than is used.
    let angle = |position: usize, pair: usize| (position as f64 * 0.37 + 1.0) / (pair as f64 + 1.3);
    let mut angles = bed.buffer::<f32>((length + 1) * width);
    for (i, a) in angles.host_mut().iter_mut().enumerate() {
        let (position, pair) = (i / width, i % width % (width / 2));
        *a = if i % width < width / 2 { angle(position, pair).cos() } else { angle(position, pair).sin() }
            as f32;
    }
    let turned = |x: &[f64], sign: f64| -> Vec<f64> {
        let mut y = x.to_vec();
        for (head, y) in y.chunks_exact_mut(width).enumerate() {
            for pair in 0..width / 2 {
                let (sin, cos) = (angle(head / heads % length, pair) * sign).sin_cos();
                let (a, b) = (y[pair], y[pair + width / 2]);
                (y[pair], y[pair + width / 2]) = (a * cos - b * sin, b * cos + a * sin);
            }
        }
        y
    };
    let name = format!("rope of {heads} heads of {width}");
    bed.in_every_order(&name, &mut |stream| {
        [(Turn::Forward, 1.0), (Turn::Back, -1.0)]
            .map(|(turn, sign)| {
                let mut y = bed.random::<T>(1, n, 1.0);
                stream.run([cuda::rope(y.view_mut(), angles.view(), heads, width, length, turn)]);
                bed.close(&name, &y, &turned(&wide(&x), sign));
                bytes(&y)
            })
            .to_vec()
    });
}

pub fn rotary_embeddings<Q: Queue>(bed: &Bed<Q>) {
    for (rows, length, heads, width) in
        [(1, 1, 1, 2), (2, 7, 3, 6), (1, 63, 2, 64), (3, 5, 1, 128), (2, 9, 5, 16)]
    {
        check_rope::<f32, Q>(bed, rows, length, heads, width);
        check_rope::<bf16, Q>(bed, rows, length, heads, width);
    }
    check_rope::<f16, Q>(bed, 1, 20, 2, 32);
}

fn check_swiglu<T: Float, Q: Queue>(bed: &Bed<Q>, n: usize, offset: usize) {
    let (gate, up, d) = (
        bed.random::<T>(1, n + offset, 3.0),
        bed.random::<T>(2, n + offset, 1.0),
        bed.random::<T>(3, n + offset, 1.0),
    );
    let sigmoid = |g: f64| 1.0 / (1.0 + (-g).exp());
    let (g, u, w) = (wide(&gate), wide(&up), wide(&d));
    let each = |f: &dyn Fn(usize) -> f64| (offset..n + offset).map(f).collect::<Vec<f64>>();
    let want_out = each(&|i| g[i] * sigmoid(g[i]) * u[i]);
    let want_up = each(&|i| w[i] * g[i] * sigmoid(g[i]));
    let want_gate = each(&|i| {
        let s = sigmoid(g[i]);
        w[i] * u[i] * s * (1.0 + g[i] * (1.0 - s))
    });
    let all = offset..n + offset;
    bed.in_every_order(&format!("swiglu of {n}"), &mut |stream| {
        let mut out = bed.unwritten::<T>(n);
        stream.run([cuda::swiglu(
            gate.view().slice(all.clone()),
            up.view().slice(all.clone()),
            out.view_mut(),
        )]);
        bed.close(&format!("swiglu of {n}"), &out, &want_out);
        let mut results = vec![bytes(&out)];
        let mut inout = [
            bed.random::<T>(1, n + offset, 3.0),
            bed.random::<T>(2, n + offset, 1.0),
            bed.random::<T>(3, n + offset, 1.0),
        ];
        let [a, b, c] = inout.each_mut().map(|x| x.view_mut().slice(all.clone()));
        stream.run([cuda::swiglu_backward(a, b, c)]);
        for (x, want) in inout.iter().zip([&want_gate, &want_up, &want_out]) {
            let part = bed.copy_of(&x.host()[all.clone()]);
            bed.close(&format!("swiglu backward of {n}"), &part, want);
            results.push(bytes(x));
        }
        results
    });
}

pub fn swiglu_and_its_backward<Q: Queue>(bed: &Bed<Q>) {
    for n in [1, 7, 63, 65, 200, 3000] {
        check_swiglu::<f32, Q>(bed, n, 0);
        check_swiglu::<bf16, Q>(bed, n, 0);
    }
    check_swiglu::<bf16, Q>(bed, 777, 1);
    check_swiglu::<f16, Q>(bed, 129, 0);
}
