//! Data, runs in several orders, and comparisons that are counted.

use super::copies;
use collectives::device::{Launch, Product, Queue, SharedQueue};
use collectives::{Buffer, Element, Float, Place, Result, mix};
use std::cell::{Cell, RefCell};

/// What a case has shown.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Results that were compared.
    pub comparisons: usize,
    /// The largest error of a 16-bit result relative to what is wanted, its root mean square, and where terms cancel
    /// their size; and of an f32 result. What is compared bit for bit is in neither.
    pub worst: [f64; 2],
    /// What disagrees, one sentence each.
    pub wrong: Vec<String>,
}

/// Where cases run: queues of one device, on each of which a case must give the same bits.
pub struct Bed<Q: Queue> {
    queues: Vec<SharedQueue<Q>>,
    outcome: RefCell<Outcome>,
    /// The device takes no more work.
    lost: Cell<bool>,
}

impl<Q: Queue> Bed<Q> {
    pub fn new(queues: Vec<SharedQueue<Q>>) -> Self {
        Bed { queues, outcome: RefCell::default(), lost: Cell::new(false) }
    }

    pub fn outcome(self) -> Outcome {
        self.outcome.into_inner()
    }

    pub fn queues(&self) -> &[SharedQueue<Q>] {
        &self.queues
    }

    /// Zeros of the host, which a run copies to the device and back.
    pub fn buffer<E: Element>(&self, len: usize) -> Buffer<E> {
        Buffer::zeroed(len)
    }

    /// Zeros that the device reaches where they are.
    pub fn pinned<E: Element>(&self, len: usize) -> Result<Buffer<E>> {
        Ok(Buffer::from_memory(self.queues[0].clone().host_memory(len * size_of::<E>())?))
    }

    /// The same with these elements.
    pub fn copy_of<E: Element>(&self, data: &[E]) -> Buffer<E> {
        let mut buffer = self.buffer(data.len());
        buffer.host_mut().copy_from_slice(data);
        buffer
    }

    /// `len` elements of noise, `scale` wide.
    pub fn random<T: Float>(&self, seed: u64, len: usize, scale: f64) -> Buffer<T> {
        let mut buffer = self.buffer(len);
        for (i, x) in buffer.host_mut().iter_mut().enumerate() {
            *x = T::from_f32((noise(seed, i) * scale) as f32);
        }
        buffer
    }

    /// Elements that no kernel has written: NaN.
    pub fn unwritten<T: Float>(&self, len: usize) -> Buffer<T> {
        let mut buffer = self.buffer::<T>(len);
        buffer.host_mut().fill(T::from_f32(f32::NAN));
        buffer
    }

    /// Runs `case` on every queue; what it returns, the bytes of its results, must always be the same. Cases are many, and
    /// this is compiled for all of them at once.
    pub fn in_every_order(&self, name: &str, case: &mut dyn FnMut(&Stream<'_, Q>) -> Vec<Vec<u8>>) {
        let mut run = |queue: &SharedQueue<Q>| case(&Stream { bed: self, queue });
        let Some((first, others)) = self.queues.split_first().filter(|_| !self.lost.get()) else { return };
        let first = run(first);
        for (i, queue) in others.iter().enumerate() {
            if self.lost.get() {
                return;
            }
            let same = run(queue) == first;
            self.that(same, || format!("{name}: run {} gives other bits than the first", i + 2));
        }
    }

    /// Says what the device, or the code that drives it, has refused.
    pub fn refused(&self, why: String) {
        self.that(false, || why);
        self.lost.set(super::lost(&self.queues).is_some());
    }

    /// Counts a comparison; once the device takes no more work none, as nothing has come of it.
    pub fn that(&self, holds: bool, otherwise: impl FnOnce() -> String) {
        if self.lost.get() {
            return;
        }
        let mut outcome = self.outcome.borrow_mut();
        outcome.comparisons += 1;
        if !holds {
            outcome.wrong.push(otherwise());
        }
    }

    /// Agreement: to one rounding of 16-bit results, and nearly all digits of f32.
    pub fn close<T: Float>(&self, what: &str, got: &Buffer<T>, want: &[f64]) {
        self.close_above(what, got, want, 0.0);
    }

    /// Agreement where terms of about the size `floor` may cancel.
    pub fn close_above<T: Float>(&self, what: &str, got: &Buffer<T>, want: &[f64], floor: f64) {
        self.within(what, got, want, floor, tolerance::<T>());
    }

    /// Agreement of sums of many products of 16-bit roundings: as a whole to the tolerance, and the worst of thousands
    /// of elements to three times that.
    pub fn close_sums<T: Float>(&self, what: &str, got: &Buffer<T>, want: &[f64], floor: f64) {
        let square = |x: f64| x * x;
        let errors = got.host().iter().zip(want).map(|(got, want)| square(f64::from(got.to_f32()) - want));
        let size: f64 = want.iter().map(|x| square(*x) + square(floor)).sum();
        let error = (errors.sum::<f64>() / size).sqrt();
        self.record::<T>(error);
        let fine = error < tolerance::<T>();
        self.that(fine, || format!("{what} of {}: error {error:.2e} as a whole", T::DTYPE));
        let worst = distance(got, want, floor);
        let fine = worst < 3.0 * tolerance::<T>();
        self.that(fine, || format!("{what} of {}: error {worst:.2e} of an element", T::DTYPE));
    }

    /// Agreement to another tolerance than the type's.
    pub fn within<T: Float>(&self, what: &str, got: &Buffer<T>, want: &[f64], floor: f64, tolerance: f64) {
        let error = distance(got, want, floor);
        self.record::<T>(error);
        self.that(error < tolerance, || {
            format!("{what} of {}: error {error:.2e}, {tolerance:.0e} allowed", T::DTYPE)
        });
    }

    /// An error of a result of this type, of which the largest is told.
    pub fn record<T: Float>(&self, error: f64) {
        if self.lost.get() {
            return;
        }
        let worst = &mut self.outcome.borrow_mut().worst[usize::from(size_of::<T>() > 2)];
        *worst = worst.max(error);
    }
}

/// Runs launches one after the other.
pub struct Stream<'a, Q: Queue> {
    bed: &'a Bed<Q>,
    queue: &'a SharedQueue<Q>,
}

impl<Q: Queue> Stream<'_, Q> {
    /// Returns when they are done. What the device refuses is wrong.
    pub fn run<'b>(&self, launches: impl IntoIterator<Item = Launch<'b>>) {
        let mut queue = self.queue.clone();
        let launches: Vec<Launch<'_>> = launches.into_iter().collect();
        // What is page-locked is read in place.
        let done = match launches.iter().any(|launch| launch.place() == Some(Place::Host)) {
            true => copies::launch(&mut queue, &launches),
            false => {
                // SAFETY: a case's launches are such as their kernels take, and borrow their memory until the wait below.
                let given = launches.iter().try_for_each(|launch| unsafe { queue.launch(launch) });
                given.and(queue.synchronize())
            }
        };
        self.settle(done);
    }

    /// Returns when it is done.
    pub fn multiply(&self, product: &Product<'_>) {
        let mut queue = self.queue.clone();
        self.settle(copies::multiply(&mut queue, product));
    }

    fn settle(&self, done: Result<()>) {
        match done {
            Ok(()) => self.bed.that(true, String::new),
            Err(error) => self.bed.refused(error.to_string()),
        }
    }
}

/// Numbers that look random: functions of a seed and an index, roughly normal with deviation 1.
pub fn noise(seed: u64, index: usize) -> f64 {
    let mut sum = 0.0;
    for part in 0..4u64 {
        let x = (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
            ^ (seed * 4 + part).wrapping_mul(0xd134_2543_de82_ef95);
        sum += (mix(x) >> 11) as f64 / (1u64 << 53) as f64 - 0.5;
    }
    sum * 3f64.sqrt()
}

/// What definitions compute with.
pub fn wide<T: Float>(buffer: &Buffer<T>) -> Vec<f64> {
    buffer.host().iter().map(|x| f64::from(x.to_f32())).collect()
}

/// The bytes of a buffer.
pub fn bytes<T: Element>(buffer: &Buffer<T>) -> Vec<u8> {
    collectives::bytes_of(buffer.host()).to_vec()
}

/// The largest difference relative to |want|, the root mean square of all that is wanted, and `floor`.
fn distance<T: Float>(got: &Buffer<T>, want: &[f64], floor: f64) -> f64 {
    if got.len() != want.len() {
        return f64::INFINITY;
    }
    let rms = (want.iter().map(|x| x * x).sum::<f64>() / want.len().max(1) as f64).sqrt();
    let errors = got.host().iter().zip(want).map(|(got, want)| {
        let error = (f64::from(got.to_f32()) - want).abs() / (want.abs() + rms + floor + 1e-30);
        if error.is_nan() { f64::INFINITY } else { error }
    });
    errors.fold(0.0, f64::max)
}

fn tolerance<T: Float>() -> f64 {
    if size_of::<T>() == 2 { 1e-2 } else { 1e-5 }
}
