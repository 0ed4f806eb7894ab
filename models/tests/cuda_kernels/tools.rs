//! Data, runs in several orders, and comparisons.

use crate::emulator::emulator;
use collectives::device::cuda::{self, Gpu};
use collectives::device::{Launch, Queue};
use collectives::{Buffer, Element, Float};
use std::cell::RefCell;
use std::io::Write;
use std::sync::OnceLock;

/// Says why tests are skipped, and adds it to the list that `tests/run` prints at the end.
pub fn skip(reason: &str) {
    eprintln!("skipped: {reason}");
    if let Some(list) = std::env::var_os("CARAVAN_SKIPS") {
        let file = std::fs::OpenOptions::new().append(true).create(true).open(list);
        file.and_then(|mut file| writeln!(file, "{reason}")).expect("the list of skips");
    }
}

/// The GPU, if there is one: then every case runs on it too.
pub fn gpu() -> Option<&'static Gpu> {
    static GPU: OnceLock<Option<Gpu>> = OnceLock::new();
    let opened = GPU.get_or_init(|| match Gpu::open(0) {
        Ok(gpu) => Some(gpu),
        Err(error) => {
            skip(&format!("CUDA kernels on a GPU: {error}"));
            None
        }
    });
    opened.as_ref()
}

/// Zeros where both the host and the device reach them, the GPU if there is one.
pub fn buffer<E: Element>(len: usize) -> Buffer<E> {
    match gpu() {
        Some(gpu) => Buffer::from_memory(gpu.pinned(len * size_of::<E>()).unwrap()),
        None => Buffer::from_memory(collectives::device::emulation::pinned(len * size_of::<E>())),
    }
}

/// The same with these elements.
pub fn copy_of<E: Element>(data: &[E]) -> Buffer<E> {
    let mut buffer = buffer(data.len());
    buffer.host_mut().copy_from_slice(data);
    buffer
}

/// Numbers that look random: functions of a seed and an index, roughly normal with deviation 1.
pub fn noise(seed: u64, index: usize) -> f64 {
    let mut sum = 0.0;
    for part in 0..4u64 {
        let mut x = (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
            ^ (seed * 4 + part).wrapping_mul(0xd134_2543_de82_ef95);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        sum += ((x ^ (x >> 31)) >> 11) as f64 / (1u64 << 53) as f64 - 0.5;
    }
    sum * 3f64.sqrt()
}

/// `len` elements of noise, `scale` wide.
pub fn random<T: Float>(seed: u64, len: usize, scale: f64) -> Buffer<T> {
    let mut buffer = buffer(len);
    for (i, x) in buffer.host_mut().iter_mut().enumerate() {
        *x = T::from_f32((noise(seed, i) * scale) as f32);
    }
    buffer
}

/// Elements that no kernel has written: NaN.
pub fn unwritten<T: Float>(len: usize) -> Buffer<T> {
    let mut buffer = buffer::<T>(len);
    buffer.host_mut().fill(T::from_f32(f32::NAN));
    buffer
}

/// What oracles compute with.
pub fn wide<T: Float>(buffer: &Buffer<T>) -> Vec<f64> {
    buffer.host().iter().map(|x| f64::from(x.to_f32())).collect()
}

/// The bytes of a buffer.
pub fn bytes<T: Element>(buffer: &Buffer<T>) -> Vec<u8> {
    collectives::oracle::bytes(buffer.host()).to_vec()
}

/// Runs launches one after the other, on one of the two devices.
pub struct Stream(RefCell<Box<dyn Queue>>);

impl Stream {
    /// Returns when they are done.
    pub fn run<'b>(&self, launches: impl IntoIterator<Item = Launch<'b>>) {
        let mut queue = self.0.borrow_mut();
        for launch in launches {
            queue.launch(&launch).unwrap_or_else(|error| panic!("{error}"));
        }
        queue.synchronize().unwrap_or_else(|error| panic!("{error}"));
    }
}

/// Runs `case` in the emulation in several orders of execution, and on a GPU twice; what it returns, the bytes of its
/// results, must always be the same on one device.
pub fn in_every_order(case: impl Fn(&Stream) -> Vec<Vec<u8>>) {
    let run = |queue: Box<dyn Queue>| case(&Stream(RefCell::new(queue)));
    if let Some(emulator) = emulator() {
        let first = run(Box::new(emulator.queue(0)));
        for seed in [1, 2] {
            let again = run(Box::new(emulator.queue(seed)));
            assert!(again == first, "the order of execution (seed {seed}) changes the result");
        }
    }
    if let Some(gpu) = gpu() {
        let queue = || Box::new(cuda::Stream::new(gpu, cuda::Urgency::Normal).unwrap());
        assert!(run(queue()) == run(queue()), "a second run on the GPU changes the result");
    }
}

/// The largest difference relative to |want|, the root mean square of all that is wanted, and `floor`.
pub fn distance<T: Float>(got: &Buffer<T>, want: &[f64], floor: f64) -> f64 {
    assert_eq!(got.len(), want.len());
    let rms = (want.iter().map(|x| x * x).sum::<f64>() / want.len() as f64).sqrt();
    let errors = got.host().iter().zip(want).map(|(got, want)| {
        let error = (f64::from(got.to_f32()) - want).abs() / (want.abs() + rms + floor + 1e-30);
        if error.is_nan() { f64::INFINITY } else { error }
    });
    errors.fold(0.0, f64::max)
}

/// What agreement means: one rounding of 16-bit results, and nearly all of f32.
pub fn assert_close<T: Float>(what: &str, got: &Buffer<T>, want: &[f64]) {
    assert_close_above(what, got, want, 0.0);
}

/// Agreement where terms of about the size `floor` may cancel.
pub fn assert_close_above<T: Float>(what: &str, got: &Buffer<T>, want: &[f64], floor: f64) {
    assert_within(what, got, want, floor, tolerance::<T>());
}

/// Agreement of sums of many products of 16-bit roundings: as a whole to the tolerance, and the worst of thousands of
/// elements to three times that.
pub fn assert_close_sums<T: Float>(what: &str, got: &Buffer<T>, want: &[f64], floor: f64) {
    let square = |x: f64| x * x;
    let errors = got.host().iter().zip(want).map(|(got, want)| square(f64::from(got.to_f32()) - want));
    let size: f64 = want.iter().map(|x| square(*x) + square(floor)).sum();
    let error = (errors.sum::<f64>() / size).sqrt();
    assert!(error < tolerance::<T>(), "{what} of {}: error {error:.2e} as a whole", T::DTYPE);
    assert_within(what, got, want, floor, 3.0 * tolerance::<T>());
}

fn tolerance<T: Float>() -> f64 {
    if size_of::<T>() == 2 { 1e-2 } else { 1e-5 }
}

fn assert_within<T: Float>(what: &str, got: &Buffer<T>, want: &[f64], floor: f64, tolerance: f64) {
    let error = distance(got, want, floor);
    assert!(error < tolerance, "{what} of {}: error {error:.2e}, {tolerance:.0e} allowed", T::DTYPE);
}
