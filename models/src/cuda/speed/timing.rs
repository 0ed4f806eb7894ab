//! Device memory with something in it, and the time of work on a queue.

use super::{Missing, Row, Scale, Shown, Work};
use collectives::device::{Launch, Product, Queue, SharedQueue, Streams};
use collectives::{Buffer, Element, Error, Float, Result, bytes_of};

/// A queue with what is measured on it.
pub(super) struct Bench<'a, Q: Streams> {
    pub queue: SharedQueue<Q>,
    pub scale: Scale,
    events: (Q::Event, Q::Event),
    wanted: &'a dyn Fn(&str) -> bool,
    show: &'a mut dyn FnMut(Shown<'_>),
}

/// The queue as what is timed has it.
pub(super) struct Timed<Q>(pub SharedQueue<Q>);

impl<Q: Queue> Timed<Q> {
    /// Runs a launch that is timed.
    pub fn launch(&mut self, launch: &Launch<'_>) -> Result<()> {
        // SAFETY: what is timed are launches that this crate has made for their kernels, on buffers of the bench, which only such
        // work uses, and which the queue's memory keeps until it is done; tokens among them are in the vocabulary.
        unsafe { self.0.launch(launch) }
    }

    /// Multiplies what is timed.
    pub fn product(&mut self, product: &Product<'_>) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.0.product(product) }
    }
}

impl<'a, Q: Streams> Bench<'a, Q> {
    pub fn new(
        queue: &SharedQueue<Q>,
        scale: Scale,
        wanted: &'a dyn Fn(&str) -> bool,
        show: &'a mut dyn FnMut(Shown<'_>),
    ) -> Result<Self> {
        let events = (queue.timed_event()?, queue.timed_event()?);
        Ok(Bench { queue: queue.clone(), scale, events, wanted, show })
    }

    /// Zeros on the device.
    pub fn zeros<E: Element>(&mut self, len: usize) -> Result<Buffer<E>> {
        Ok(Buffer::from_memory(self.queue.memory(len * size_of::<E>())?))
    }

    /// Data of the host on the device, as training has it: read in place, they would come from far.
    pub fn given<E: Element>(&mut self, data: &[E]) -> Result<Buffer<E>> {
        let mut buffer = self.zeros::<E>(data.len())?;
        self.queue.fill(&mut buffer, data)?;
        Ok(buffer)
    }

    /// Noise of the given width on the device: a pattern of a few megabytes, repeated. Random bits matter: products of
    /// zeros run faster than any real ones.
    pub fn noise<T: Float>(&mut self, len: usize, width: f32) -> Result<Buffer<T>> {
        let pattern: Vec<T> = (0..len.min(1 << 20))
            .map(|i| {
                let bits = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
                let bits = (bits ^ (bits >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40;
                T::from_f32((bits as f32 / (1 << 24) as f32 - 0.5) * 2.0 * width)
            })
            .collect();
        let mut buffer = self.zeros::<T>(len)?;
        let start = buffer.view_mut().as_mut_ptr() as u64;
        let mut done = size_of_val(&pattern[..]);
        // SAFETY: all ranges are inside the buffer, which is kept.
        unsafe {
            self.queue.upload(bytes_of(&pattern), start)?;
            while done < len * size_of::<T>() {
                let part = done.min(len * size_of::<T>() - done);
                self.queue.copy(start, start + done as u64, part)?;
                done += part;
            }
        }
        self.queue.synchronize()?;
        Ok(buffer)
    }

    /// Times one call of `work` if its group is wanted, and shows it, or that it is missing.
    ///
    /// # Errors
    /// The device takes no more work.
    pub fn time(
        &mut self,
        group: &'static str,
        name: impl Into<String>,
        bound: Work,
        work: impl FnMut(&mut Timed<Q>) -> Result<()>,
    ) -> Result<()> {
        if (self.wanted)(group) {
            let name = name.into();
            self.begins(group, &name);
            match self.seconds(work) {
                Ok(seconds) => self.show(group, name, seconds, bound, None),
                Err(why) => self.miss(group, name, why)?,
            }
        }
        Ok(())
    }

    /// Shows what is timed next.
    pub fn begins(&mut self, group: &'static str, name: &str) {
        (self.show)(Shown::Begins(group, name));
    }

    /// Shows what could not be timed.
    ///
    /// # Errors
    /// The device takes no more work.
    pub fn miss(&mut self, group: &'static str, name: String, why: Error) -> Result<()> {
        (self.show)(Shown::Ended(Err(Missing { group, name, why })));
        self.queue.synchronize()
    }

    /// Shows what was timed.
    pub fn show(
        &mut self,
        group: &'static str,
        name: String,
        seconds: f64,
        work: Work,
        best: Option<(usize, f64)>,
    ) {
        (self.show)(Shown::Ended(Ok(Row { group, name, seconds, work, best })));
    }

    /// The time of one call of `work`: the median over batches that are long enough to time.
    pub fn seconds(&mut self, mut work: impl FnMut(&mut Timed<Q>) -> Result<()>) -> Result<f64> {
        let mut timed = Timed(self.queue.clone());
        let mut batch = |calls: usize| -> Result<f64> {
            let (start, end) = &self.events;
            self.queue.record(start)?;
            (0..calls).try_for_each(|_| work(&mut timed))?;
            self.queue.record(end)?;
            self.queue.synchronize()?;
            Ok(Q::seconds(start, end)? / calls as f64)
        };
        // The first call loads the kernel, the next say how long one takes.
        batch(1)?;
        let once = batch(2)?.max(1e-9);
        let calls = ((self.scale.seconds / once) as usize).clamp(1, 1000);
        let mut times = (0..self.scale.batches.max(1)).map(|_| batch(calls)).collect::<Result<Vec<f64>>>()?;
        times.sort_by(f64::total_cmp);
        Ok(times[times.len() / 2])
    }
}
