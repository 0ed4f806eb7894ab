//! Parameters and gradients on a device, the optimizer's state in memory of the host, which updates it.
//!
//! While the processor updates a bucket, the next one's gradient is copied down and the last one's parameters are copied
//! up, each by a queue of its own. The host has f32 weights of all parameters, also of those that are f32 themselves, so
//! that parameters need not come down.

use super::host::on_host;
use super::{Activity, Device, Elapsed, Kernels, Needs, UNDER_WAY, Update};
use crate::error::{Error, Result};
use crate::grads::Reduced;
use collectives::device::{Queue, SharedQueue, Streams, Urgency};
use collectives::{Account, Buffer, Float, View, ViewMut};
use rayon::{ThreadPool, ThreadPoolBuilder};

/// Everything but the optimizer's state in memory of a device.
pub struct Offloaded<T: Float, Q: Streams> {
    device: Device<Q>,
    compute: SharedQueue<Q>,
    down: Q,
    up: Q,
    /// The gradients are reduced, or the last step's parameters read.
    ready: Q::Event,
    places: [Place<T, Q::Event>; UNDER_WAY],
    /// Whose turn it is.
    turn: usize,
    threads: Option<ThreadPool>,
}

/// Memory of the host for one bucket.
struct Place<T: Float, E> {
    /// A gradient of `T` or f32.
    gradient: Buffer<f32>,
    param: Buffer<T>,
    /// The gradient is here.
    lowered: E,
    /// The parameters are on the device.
    raised: E,
    /// The address of the gradient that is here or on its way.
    holds: Option<u64>,
}

impl<T: Float, Q: Streams> Offloaded<T, Q> {
    /// With `threads` threads to update; memory of the host is booked on `account`.
    ///
    /// # Errors
    /// Memory or threads are missing.
    pub fn new(device: Device<Q>, needs: &Needs, threads: usize, account: &Account) -> Result<Self> {
        let mut compute = device.queue.clone();
        let mut place = || -> Result<Place<T, Q::Event>> {
            let gradient = compute.host_memory(needs.bucket * needs.gradient)?.booked(account);
            let param = compute.host_memory(needs.bucket * size_of::<T>())?.booked(account);
            Ok(Place {
                gradient: Buffer::from_memory(gradient),
                param: Buffer::from_memory(param),
                lowered: compute.event()?,
                raised: compute.event()?,
                holds: None,
            })
        };
        let places = [place()?, place()?];
        let threads = match threads {
            0 | 1 => None,
            n => {
                let name = |i| format!("optimizer-{i}");
                let built = ThreadPoolBuilder::new().num_threads(n).thread_name(name).build();
                Some(built.map_err(|e| {
                    Error::from(collectives::Error::system(format!("start {n} threads of the optimizer"), e))
                })?)
            }
        };
        Ok(Offloaded {
            down: compute.sibling(Urgency::Normal)?,
            up: compute.sibling(Urgency::High)?,
            ready: compute.event()?,
            compute,
            device,
            places,
            turn: 0,
            threads,
        })
    }

    /// Starts to copy a gradient down, unless it is on its way. A step's first one comes after everything that the compute
    /// queue has been given, and so after the reductions of all of them: what that queue is given later, above all to wait
    /// for parameters on their way up, none of them has to wait for.
    fn fetch(&mut self, at: usize, gradient: Reduced<'_, T>, first: bool) -> Result<()> {
        let (from, bytes) = match gradient {
            Reduced::Stored(g) => (g.as_ptr() as u64, g.len() * size_of::<T>()),
            Reduced::Wide(g) => (g.as_ptr() as u64, g.len() * size_of::<f32>()),
        };
        let place = &mut self.places[at];
        if place.holds == Some(from) {
            return Ok(());
        }
        if first {
            self.compute.record(&self.ready)?;
            self.down.after(&self.ready)?;
        }
        let to = place.gradient.view_mut().as_mut_ptr() as u64;
        // SAFETY: the gradient stays as it is during the update, and the place is as long as the largest.
        unsafe { self.down.copy(from, to, bytes)? };
        self.down.record(&place.lowered)?;
        place.holds = Some(from);
        Ok(())
    }
}

impl<T: Float, Q: Streams> Kernels<T> for Offloaded<T, Q> {
    fn state(&mut self, len: usize) -> Result<Buffer<f32>> {
        Ok(Buffer::from_memory(self.compute.host_memory(len * size_of::<f32>())?))
    }

    fn update(&mut self, bucket: Update<'_, T>, next: Option<Reduced<'_, T>>) -> Result<()> {
        let at = self.turn;
        self.turn = (at + 1) % UNDER_WAY;
        // Every other bucket's gradient is on its way since the one before.
        self.fetch(at, bucket.gradient, true)?;
        if let Some(next) = next {
            self.fetch(self.turn, next, false)?;
        }
        let Offloaded { compute, up, ready, places, threads, .. } = self;
        let place = &mut places[at];
        Q::reach(&place.raised)?;
        Q::reach(&place.lowered)?;
        place.holds = None;

        let Update { coefficients, gradient, master, m, v, mut param, ranges } = bucket;
        let (len, to) = (param.len(), param.as_mut_ptr() as u64);
        let mut here = place.param.view_mut().slice(0..len);
        let from = here.as_mut_ptr() as u64;
        let held = place.gradient.view();
        let update = Update { coefficients, gradient, master, m, v, param: here, ranges };
        let work = || match gradient {
            Reduced::Stored(_) => on_host(update, seen_as::<T>(held, len)),
            Reduced::Wide(_) => on_host(update, seen_as::<f32>(held, len)),
        };
        match threads {
            Some(threads) => threads.install(work),
            None => work(),
        }

        // Whatever the device still reads of the old parameters comes first, whatever it reads later after the new ones.
        compute.record(ready)?;
        up.after(ready)?;
        for (range, _) in ranges {
            let (offset, bytes) = ((range.start * size_of::<T>()) as u64, range.len() * size_of::<T>());
            // SAFETY: ranges of the place and of the parameters, which stay; the place is not written before `raised`.
            unsafe { up.copy(from + offset, to + offset, bytes)? };
        }
        up.record(&place.raised)?;
        Ok(compute.after(&place.raised)?)
    }

    fn set(&mut self, values: &[f32], master: Option<ViewMut<'_, f32>>, param: ViewMut<'_, T>) -> Result<()> {
        if let Some(master) = master {
            master.host().copy_from_slice(values);
        }
        self.device.set(values, None, param)
    }

    fn clear(&mut self, out: ViewMut<'_, T>) -> Result<()> {
        self.device.clear(out)
    }

    fn add(&mut self, sum: ViewMut<'_, f32>, x: View<'_, f32>) -> Result<()> {
        Kernels::<T>::add(&mut self.device, sum, x)
    }

    fn round(&mut self, from: View<'_, f32>, to: ViewMut<'_, T>) -> Result<()> {
        self.device.round(from, to)
    }

    fn clear_words(&mut self, words: ViewMut<'_, u64>) -> Result<()> {
        Kernels::<T>::clear_words(&mut self.device, words)
    }

    fn squares(&mut self, gradient: Reduced<'_, T>, sum: ViewMut<'_, u64>) -> Result<()> {
        self.device.squares(gradient, sum)
    }

    fn mark(&mut self, activity: Activity) -> Result<()> {
        Kernels::<T>::mark(&mut self.device, activity)
    }

    fn elapsed(&mut self) -> Result<Option<Elapsed>> {
        Kernels::<T>::elapsed(&mut self.device)
    }

    fn put(&mut self, values: &[u64], to: ViewMut<'_, u64>) -> Result<()> {
        Kernels::<T>::put(&mut self.device, values, to)
    }

    fn numbers<'a>(&'a mut self, values: View<'a, u64>) -> Result<&'a [u64]> {
        Kernels::<T>::numbers(&mut self.device, values)
    }

    fn elements<'a>(&'a mut self, values: View<'a, T>) -> Result<&'a [T]> {
        self.device.elements(values)
    }

    fn load(&mut self, values: &[f32], to: ViewMut<'_, f32>) -> Result<()> {
        to.host().copy_from_slice(values);
        Ok(())
    }

    fn floats<'a>(&'a mut self, values: View<'a, f32>) -> Result<&'a [f32]> {
        Ok(values.host())
    }
}

/// The first `len` elements of another type.
fn seen_as<G: Float>(bytes: View<'_, f32>, len: usize) -> &[G] {
    let host = bytes.host();
    assert!(len * size_of::<G>() <= size_of_val(host), "a place as long as the gradient");
    // SAFETY: long enough, aligned for f32 and so for every float, and any bits are a number; the borrow is kept.
    unsafe { std::slice::from_raw_parts(host.as_ptr().cast(), len) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::AdamW;
    use collectives::device::emulation::{EmulatedQueue, Emulator};

    #[test]
    fn a_gradient_comes_down_while_parameters_are_still_on_their_way_up() {
        const LEN: usize = 1024;
        let folder = std::env::current_exe().unwrap().with_file_name("emulated");
        let built = Emulator::build(&[], &folder).unwrap();
        let Some(emulator) = harness::made_by_cxx("an offloaded optimizer", built) else { return };
        // Queues that do things only while somebody waits.
        let mut queue = SharedQueue::new(emulator.late_queue(1));
        let needs = Needs { numbers: 1, bucket: LEN, gradient: size_of::<f32>() };
        let account = Account::default();
        let device = Device::new::<f32>(queue.clone(), &needs, &account).unwrap();
        let mut offloaded = Offloaded::<f32, EmulatedQueue>::new(device, &needs, 1, &account).unwrap();
        let mut on_device = || Buffer::<f32>::from_memory(queue.memory(LEN * size_of::<f32>()).unwrap());
        let (gradients, mut params) = ([(); 3].map(|()| on_device()), [(); 2].map(|()| on_device()));
        // Parameters in so many pieces that they take longest.
        let ranges: Vec<_> = (0..LEN).map(|i| (i..i + 1, 1.0)).collect();
        let coefficients = AdamW::default().coefficients(1, 1e-3, 1.0);
        // Memory that goes ends what may still use it.
        let mut states = [(); 2].map(|()| [(); 3].map(|()| offloaded.state(LEN).unwrap()));
        for (bucket, (param, [master, m, v])) in params.iter_mut().zip(&mut states).enumerate() {
            let [gradient, next] = [0, 1].map(|i| Reduced::Stored(gradients[bucket + i].view()));
            let update = Update {
                coefficients: &coefficients,
                gradient,
                master: Some(master.view_mut()),
                m: m.view_mut(),
                v: v.view_mut(),
                param: param.view_mut(),
                ranges: &ranges,
            };
            offloaded.update(update, Some(next)).unwrap();
        }
        offloaded.down.synchronize().unwrap();
        let raised = &offloaded.places[0].raised;
        assert!(
            !EmulatedQueue::happened(raised).unwrap(),
            "the third gradient waited for the first parameters"
        );
        EmulatedQueue::reach(raised).unwrap();
    }
}
