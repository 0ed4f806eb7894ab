//! On a device, in the order of its compute queue.

use super::host::round;
use super::meter::Meter;
use super::{Activity, Elapsed, Kernels, Needs, PART, Update};
use crate::error::Result;
use crate::grads::Reduced;
use collectives::device::{Launch, Module, Queue, SharedQueue, Streams};
use collectives::{Account, Buffer, DType, Element, Float, View, ViewMut, bytes_of, bytes_of_mut};
use models::cuda::{self, sources};

/// Everything in memory of a device.
pub struct Device<Q: Streams> {
    pub(super) queue: SharedQueue<Q>,
    meter: Meter<Q>,
    /// The norm's numbers on the host.
    numbers: Buffer<u64>,
    /// Weights on their way to the host.
    passing: Buffer<u8>,
}

impl<Q: Streams> Device<Q> {
    /// Compiles and loads the kernels; memory of the host is booked on `account`.
    ///
    /// # Errors
    /// Something of CUDA is missing, or memory.
    pub fn new<T: Float>(mut queue: SharedQueue<Q>, needs: &Needs, account: &Account) -> Result<Self> {
        let modules = [
            Module::new(&sources::ADAMW, T::DTYPE),
            Module::new(&sources::SQUARES, T::DTYPE),
            Module::new(&sources::CAST, T::DTYPE),
            Module::new(&sources::CAST, DType::F32),
        ];
        queue.prepare(&modules)?;
        let numbers = Buffer::from_memory(queue.host_memory(needs.numbers * size_of::<u64>())?);
        let passing = Buffer::from_memory(queue.host_memory(PART * size_of::<T>())?);
        let (numbers, passing) = (numbers.booked(account), passing.booked(account));
        Ok(Device { queue, meter: Meter::default(), numbers, passing })
    }

    /// Runs a launch of this file, which is made by functions that have checked lengths.
    fn run(&mut self, launch: &Launch<'_>) -> Result<()> {
        // SAFETY: their launches are such as the kernels take; the arrays' owner keeps them as long as the queue, which what
        // else uses them is ordered with.
        unsafe { self.queue.launch(launch)? };
        Ok(())
    }

    fn zero<E: Element>(&mut self, mut out: ViewMut<'_, E>) -> Result<()> {
        // SAFETY: the view is that long, and its owner keeps it as long as the queue.
        unsafe { self.queue.zero(out.as_mut_ptr() as u64, out.len() * size_of::<E>())? };
        Ok(())
    }

    /// Copies from the host.
    pub(super) fn upload<E: Element>(&mut self, values: &[E], mut to: ViewMut<'_, E>) -> Result<()> {
        assert_eq!(values.len(), to.len(), "as much memory as is uploaded");
        // SAFETY: the view is that long, and its owner keeps it as long as the queue.
        unsafe { self.queue.upload(bytes_of(values), to.as_mut_ptr() as u64)? };
        Ok(())
    }

    /// Copies to the host, after everything before: as much as `passing` has room for.
    fn download<E: Float>(&mut self, values: View<'_, E>) -> Result<&[E]> {
        // SAFETY: any bytes are elements, and memory of the host is aligned for them all; the call waits.
        unsafe {
            let (_, to, _) = self.passing.host_mut().align_to_mut::<E>();
            let to = &mut to[..values.len()];
            self.queue.download(values.as_ptr() as u64, bytes_of_mut(to))?;
            Ok(to)
        }
    }
}

impl<T: Float, Q: Streams> Kernels<T> for Device<Q> {
    fn state(&mut self, len: usize) -> Result<Buffer<f32>> {
        Ok(Buffer::from_memory(self.queue.memory(len * size_of::<f32>())?))
    }

    fn clear(&mut self, out: ViewMut<'_, T>) -> Result<()> {
        self.zero(out)
    }

    fn add(&mut self, sum: ViewMut<'_, f32>, x: View<'_, f32>) -> Result<()> {
        self.run(&cuda::accumulate::<f32>(x, sum))
    }

    fn round(&mut self, from: View<'_, f32>, to: ViewMut<'_, T>) -> Result<()> {
        self.run(&cuda::narrow::<T>(from, to))
    }

    fn clear_words(&mut self, words: ViewMut<'_, u64>) -> Result<()> {
        self.zero(words)
    }

    fn squares(&mut self, gradient: Reduced<'_, T>, sum: ViewMut<'_, u64>) -> Result<()> {
        self.run(&match gradient {
            Reduced::Stored(g) => cuda::squares::<T, T>(g, sum),
            Reduced::Wide(g) => cuda::squares::<T, f32>(g, sum),
        })
    }

    fn update(&mut self, bucket: Update<'_, T>, _: Option<Reduced<'_, T>>) -> Result<()> {
        let Update { coefficients, gradient, mut master, mut m, mut v, mut param, ranges } = bucket;
        for (range, keep) in ranges {
            let c = cuda::Coefficients { keep: *keep, ..*coefficients };
            let master = master.as_mut().map(ViewMut::reborrow);
            let (m, v, param, range) = (m.reborrow(), v.reborrow(), param.reborrow(), range.clone());
            self.run(&match gradient {
                Reduced::Stored(g) => cuda::adamw::<T, T>(&c, g, master, m, v, param, range),
                Reduced::Wide(g) => cuda::adamw::<T, f32>(&c, g, master, m, v, param, range),
            })?;
        }
        Ok(())
    }

    fn set(&mut self, values: &[f32], master: Option<ViewMut<'_, f32>>, param: ViewMut<'_, T>) -> Result<()> {
        if let Some(master) = master {
            self.upload(values, master)?;
        }
        let mut rounded = vec![T::default(); values.len()];
        round(&mut rounded, values);
        self.upload(&rounded, param)
    }

    fn mark(&mut self, activity: Activity) -> Result<()> {
        self.meter.mark(&self.queue, activity)
    }

    fn elapsed(&mut self) -> Result<Option<Elapsed>> {
        self.meter.take(&self.queue).map(Some)
    }

    fn put(&mut self, values: &[u64], to: ViewMut<'_, u64>) -> Result<()> {
        self.upload(values, to)
    }

    fn numbers<'a>(&'a mut self, values: View<'a, u64>) -> Result<&'a [u64]> {
        let to = &mut self.numbers.host_mut()[..values.len()];
        // SAFETY: both are that long, and the call waits.
        unsafe { self.queue.download(values.as_ptr() as u64, bytes_of_mut(to))? };
        self.meter.reach();
        Ok(to)
    }

    fn elements<'a>(&'a mut self, values: View<'a, T>) -> Result<&'a [T]> {
        self.download(values)
    }

    fn load(&mut self, values: &[f32], to: ViewMut<'_, f32>) -> Result<()> {
        self.upload(values, to)
    }

    fn floats<'a>(&'a mut self, values: View<'a, f32>) -> Result<&'a [f32]> {
        self.download(values)
    }
}
