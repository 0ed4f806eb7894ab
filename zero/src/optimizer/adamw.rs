//! AdamW on one range of a shard. Elementwise, so any split into ranges gives the same bits.

use collectives::Float;
use models::cuda::{Coefficients, LEAST_MOMENT};

/// AdamW as Loshchilov and Hutter define it and PyTorch implements it: decay is decoupled from the gradient,
/// `eps` is added outside the corrected root.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW {
    /// Decay rate of the first moment.
    pub beta1: f32,
    /// Decay rate of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay of the tensors that ask for it.
    pub weight_decay: f32,
}

impl Default for AdamW {
    /// PyTorch's defaults.
    fn default() -> Self {
        AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 }
    }
}

impl AdamW {
    /// Coefficients of optimizer step `t`, counted from 1.
    pub(crate) fn coefficients(&self, t: u64, lr: f32, gradient_factor: f32) -> Coefficients {
        // In f64: for beta 0.999 and t = 1 the corrections lose half of f32's digits.
        let correction = |beta: f32| 1.0 - power(f64::from(beta), t);
        Coefficients {
            one_minus_beta1: (1.0 - f64::from(self.beta1)) as f32,
            beta2: self.beta2,
            one_minus_beta2: (1.0 - f64::from(self.beta2)) as f32,
            eps: self.eps,
            step_size: (f64::from(lr) / correction(self.beta1)) as f32,
            root_correction: (1.0 / correction(self.beta2).sqrt()) as f32,
            keep: (1.0 - f64::from(lr) * f64::from(self.weight_decay)) as f32,
            gradient_factor,
        }
    }
}

/// `base` from 0 to 1 to the power of `exponent`, by IEEE additions and products only: the system's `pow` rounds otherwise on
/// other systems, and ranks that each update the same weights would drift apart.
fn power(base: f64, mut exponent: u64) -> f64 {
    // Squares of squares double their error each time, so all are sums of two numbers, the second of which is the rest.
    let (mut result, mut square) = ((1.0, 0.0), (base, 0.0));
    while exponent > 0 {
        if exponent & 1 == 1 {
            result = product(result, square);
        }
        square = product(square, square);
        exponent >>= 1;
    }
    result.0 + result.1
}

/// The product of two sums of two numbers each.
fn product(a: (f64, f64), b: (f64, f64)) -> (f64, f64) {
    // Dekker's: halves have so few digits that their products are exact.
    let halves = |x: f64| {
        let scaled = x * 134_217_729.0;
        let high = scaled - (scaled - x);
        (high, x - high)
    };
    let ((ah, al), (bh, bl)) = (halves(a.0), halves(b.0));
    let most = a.0 * b.0;
    let rest = ((ah * bh - most) + ah * bl + al * bh) + al * bl + (a.0 * b.1 + a.1 * b.0);
    (most + rest, rest - ((most + rest) - most))
}

/// One element: the new master weight.
#[inline(always)]
fn element(c: &Coefficients, w: f32, g: f32, m: &mut f32, v: &mut f32) -> f32 {
    let g = g * c.gradient_factor;
    let first = *m + (g - *m) * c.one_minus_beta1;
    let second = *v * c.beta2 + g * g * c.one_minus_beta2;
    *m = if first.abs() < LEAST_MOMENT { 0.0 } else { first };
    // As long as there are steps to be made, it keeps them short where `eps` is tiny, too.
    *v = if *m == 0.0 && second < f32::MIN_POSITIVE { 0.0 } else { second };
    w * c.keep - c.step_size * *m / (v.sqrt() * c.root_correction + c.eps)
}

/// Updates master weights, moments and the stored parameters of one range. A gradient kept wider than the
/// parameters (accumulated in f32) is rounded to `T` here, once, so that it equals one that was stored as `T`.
#[inline(always)]
fn mixed_body<T: Float, G: Float>(
    c: &Coefficients,
    grad: &[G],
    master: &mut [f32],
    m: &mut [f32],
    v: &mut [f32],
    param: &mut [T],
) {
    let n = param.len();
    let (grad, master, m, v) = (&grad[..n], &mut master[..n], &mut m[..n], &mut v[..n]);
    for i in 0..n {
        let g = T::from_f32(grad[i].to_f32()).to_f32();
        master[i] = element(c, master[i], g, &mut m[i], &mut v[i]);
        param[i] = T::from_f32(master[i]);
    }
}

/// As `mixed_body`, where the parameters are their own f32 master.
#[inline(always)]
fn single_body<T: Float, G: Float>(
    c: &Coefficients,
    grad: &[G],
    m: &mut [f32],
    v: &mut [f32],
    param: &mut [T],
) {
    let n = param.len();
    let (grad, m, v) = (&grad[..n], &mut m[..n], &mut v[..n]);
    for i in 0..n {
        let g = T::from_f32(grad[i].to_f32()).to_f32();
        param[i] = T::from_f32(element(c, param[i].to_f32(), g, &mut m[i], &mut v[i]));
    }
}

collectives::simd_dispatch! {
    /// Updates a range whose f32 master weights are kept beside the parameters.
    pub(crate) fn update_mixed<T: Float, G: Float>(
        c: &Coefficients,
        grad: &[G],
        master: &mut [f32],
        m: &mut [f32],
        v: &mut [f32],
        param: &mut [T],
    ) = mixed_body;

    /// Updates a range whose parameters are f32.
    pub(crate) fn update_single<T: Float, G: Float>(
        c: &Coefficients,
        grad: &[G],
        m: &mut [f32],
        v: &mut [f32],
        param: &mut [T],
    ) = single_body;
}

/// The state of one range, updated together.
pub(crate) struct Part<'a, T: Float, G: Float> {
    pub gradient: &'a [G],
    /// f32 weights, unless the parameters are f32 themselves.
    pub master: Option<&'a mut [f32]>,
    pub m: &'a mut [f32],
    pub v: &'a mut [f32],
    pub param: &'a mut [T],
}

impl<'a, T: Float, G: Float> Part<'a, T, G> {
    /// Elements that are not worth dividing.
    const GRAIN: usize = 1 << 14;

    /// Updates the range, with all threads of the pool that this thread is in, if any.
    pub(crate) fn update(self, c: &Coefficients) {
        if self.param.len() > Self::GRAIN && rayon::current_thread_index().is_some() {
            let (low, high) = self.halves();
            rayon::join(|| low.update(c), || high.update(c));
            return;
        }
        let Part { gradient, master, m, v, param } = self;
        match master {
            Some(master) => update_mixed(c, gradient, master, m, v, param),
            None => update_single(c, gradient, m, v, param),
        }
    }

    fn halves(self) -> (Self, Self) {
        let middle = self.param.len() / 2;
        let gradient = self.gradient.split_at(middle);
        let master = self.master.map(|master| master.split_at_mut(middle)).unzip();
        let m = self.m.split_at_mut(middle);
        let v = self.v.split_at_mut(middle);
        let param = self.param.split_at_mut(middle);
        (
            Part { gradient: gradient.0, master: master.0, m: m.0, v: v.0, param: param.0 },
            Part { gradient: gradient.1, master: master.1, m: m.1, v: v.1, param: param.1 },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The textbook formula in f64.
    fn reference(a: &AdamW, t: u64, lr: f64, w: f64, g: f64, m: &mut f64, v: &mut f64) -> f64 {
        let (b1, b2) = (f64::from(a.beta1), f64::from(a.beta2));
        *m = b1 * *m + (1.0 - b1) * g;
        *v = b2 * *v + (1.0 - b2) * g * g;
        let mhat = *m / (1.0 - b1.powi(t as i32));
        let vhat = *v / (1.0 - b2.powi(t as i32));
        w * (1.0 - lr * f64::from(a.weight_decay)) - lr * mhat / (vhat.sqrt() + f64::from(a.eps))
    }

    #[test]
    fn powers_are_those_of_the_system() {
        let exponents = (0..2000).chain([9_999, 123_456, 1 << 20, u64::from(u32::MAX)]);
        for (exponent, base) in
            exponents.flat_map(|e| [0.0f32, 0.5, 0.9, 0.95, 0.999, 0.99999].map(|b| (e, b)))
        {
            let base = f64::from(base);
            let (ours, theirs) = (power(base, exponent), base.powf(exponent as f64));
            assert!(
                (ours - theirs).abs() <= 1e-15 * theirs.max(1e-300),
                "{base}^{exponent}: {ours} {theirs}"
            );
        }
    }

    #[test]
    fn twenty_steps_follow_the_textbook() {
        let a = AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1 };
        let n = 37;
        let mut w: Vec<f32> = (0..n).map(|i| (i as f32 - 18.0) / 10.0).collect();
        let (mut m, mut v) = (vec![0f32; n], vec![0f32; n]);
        let mut want: Vec<(f64, f64, f64)> = w.iter().map(|&x| (f64::from(x), 0.0, 0.0)).collect();
        for t in 1..=20u64 {
            let g: Vec<f32> = (0..n).map(|i| ((i as f32 * 1.7 + t as f32).sin()) * 0.3).collect();
            let c = a.coefficients(t, 1e-2, 0.5);
            update_single(&c, &g, &mut m, &mut v, &mut w);
            for (x, &g) in want.iter_mut().zip(&g) {
                x.0 = reference(&a, t, 1e-2, x.0, f64::from(g) * 0.5, &mut x.1, &mut x.2);
            }
        }
        for (got, want) in w.iter().zip(&want) {
            assert!((f64::from(*got) - want.0).abs() < 2e-6, "{got} for {}", want.0);
        }
    }

    #[test]
    fn moments_of_what_is_not_seen_again_end_at_zero_and_are_never_subnormal() {
        let a = AdamW { beta1: 0.9, beta2: 0.99, ..AdamW::default() };
        let n = 37;
        let mut w: Vec<f32> = (0..n).map(|i| i as f32 - 18.0).collect();
        let (mut m, mut v) = (vec![0f32; n], vec![0f32; n]);
        let sums = |x: &[f32]| x.iter().filter(|x| **x != 0.0).count();
        for t in 1..=10_000u64 {
            let g: Vec<f32> = (0..n).map(|i| if t == 1 { (i as f32 - 17.5) * 1e-3 } else { 0.0 }).collect();
            let c = Coefficients { keep: 1.0, ..a.coefficients(t, 1e-4, 1.0) };
            update_single(&c, &g, &mut m, &mut v, &mut w);
            assert!(m.iter().chain(&v).all(|x| !x.is_subnormal()), "step {t}");
            assert!(t != 1 || (sums(&m), sums(&v)) == (n, n));
        }
        assert_eq!((sums(&m), sums(&v)), (0, 0));
        // What is not a number stays none.
        update_single(&a.coefficients(3, 1e-4, 1.0), &vec![f32::NAN; n], &mut m, &mut v, &mut w);
        assert!(m.iter().chain(&v).chain(&w).all(|x| x.is_nan()));
    }

    #[test]
    fn steps_stay_short_whose_gradients_and_eps_are_tiny() {
        let a = AdamW { eps: 1e-30, weight_decay: 0.0, ..AdamW::default() };
        let (mut w, mut m, mut v) = (vec![0f32], vec![0f32], vec![0f32]);
        for t in 1..=300 {
            let before = w[0];
            update_single(&a.coefficients(t, 1e-3, 1.0), &[1e-18f32], &mut m, &mut v, &mut w);
            assert!((w[0] - before).abs() < 2e-3, "step {t}: {}", w[0] - before);
        }
        assert!(v[0] > 0.0);
    }

    #[test]
    fn any_split_gives_the_same_bits() {
        let a = AdamW::default();
        let c = a.coefficients(3, 1e-3, 0.7);
        let n = 1000;
        let g: Vec<collectives::bf16> =
            (0..n).map(|i| collectives::bf16::from_f32((i as f32).sin())).collect();
        let start: Vec<f32> = (0..n).map(|i| (i as f32).cos()).collect();
        let run = |cuts: &[usize]| {
            let (mut w, mut m, mut v) = (start.clone(), vec![0.1f32; n], vec![0.2f32; n]);
            let mut p = vec![collectives::bf16::ZERO; n];
            for cut in cuts.windows(2) {
                let r = cut[0]..cut[1];
                let (m, v) = (&mut m[r.clone()], &mut v[r.clone()]);
                update_mixed(&c, &g[r.clone()], &mut w[r.clone()], m, v, &mut p[r]);
            }
            (w.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), p)
        };
        assert_eq!(run(&[0, n]), run(&[0, 1, 16, 17, 333, 999, n]));
    }

    #[test]
    fn threads_change_no_bit() {
        let c = AdamW::default().coefficients(2, 1e-3, 0.9);
        let n = 5 * Part::<f32, f32>::GRAIN + 3;
        let gradient: Vec<f32> = (0..n).map(|i| (i as f32).sin()).collect();
        let run = |threads: usize| {
            let mut w: Vec<f32> = gradient.iter().map(|x| 1.0 - x).collect();
            let (mut m, mut v, mut p) = (vec![0.1f32; n], vec![0.2f32; n], vec![collectives::bf16::ZERO; n]);
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let part =
                Part { gradient: &gradient, master: Some(&mut w), m: &mut m, v: &mut v, param: &mut p[..] };
            match threads {
                1 => part.update(&c),
                _ => pool.install(|| part.update(&c)),
            }
            (w.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), p)
        };
        assert_eq!(run(1), run(3));
    }
}
