//! One launch of a kernel, as a value.

use super::source::Module;
use crate::buffer::{Place, View, ViewMut};
use crate::element::Element;
use std::marker::PhantomData;

/// A kernel with its grid and arguments, ready to run. The lifetime is that of the memory it touches. Whether the kernel takes
/// them, who runs it answers for ([`Queue::launch`](super::Queue::launch)).
#[derive(Clone, Debug)]
pub struct Launch<'a> {
    /// What to load.
    pub module: Module,
    /// The entry in it.
    pub kernel: &'static str,
    /// Blocks in x, y, z; a launch with none of them does nothing.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
    slots: [u64; Launch::MOST],
    arguments: usize,
    ranges: [Range; Launch::MOST],
    /// Which argument each array is.
    arguments_of: [u8; Launch::MOST],
    arrays: usize,
    place: Option<Place>,
    _memory: PhantomData<&'a ()>,
}

/// An array that a launch may touch.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Range {
    /// Its address.
    pub start: u64,
    /// Its length.
    pub bytes: u64,
    /// 1 if the kernel writes it, else 0.
    pub writable: u64,
    /// If not 0: the array holds addresses of arrays of so many bytes, which the kernel reads.
    pub reaches: u64,
}

impl Launch<'_> {
    /// Arguments that a launch can have.
    pub const MOST: usize = 20;
}

impl<'a> Launch<'a> {
    /// A launch of `threads` threads in each block, still without arguments, which are added in the kernel's order.
    ///
    /// # Panics
    /// 2^32 blocks or more.
    pub fn new(module: Module, kernel: &'static str, grid: [usize; 3], threads: usize) -> Self {
        let size = |n: usize| u32::try_from(n).expect("a grid below 2^32 blocks");
        Launch {
            module,
            kernel,
            grid: grid.map(size),
            threads: size(threads),
            shared: 0,
            slots: [0; Launch::MOST],
            arguments: 0,
            ranges: [Range::default(); Launch::MOST],
            arguments_of: [0; Launch::MOST],
            arrays: 0,
            place: None,
            _memory: PhantomData,
        }
    }

    /// With so many bytes of dynamic shared memory.
    pub fn shared(mut self, bytes: usize) -> Self {
        self.shared = bytes as u32;
        self
    }

    fn slot(mut self, bits: u64) -> Self {
        self.slots[self.arguments] = bits;
        self.arguments += 1;
        self
    }

    fn array(mut self, start: u64, bytes: usize, place: Place, writable: bool) -> Self {
        let known = self.place.unwrap_or(place);
        self.place = together(known, place);
        assert!(self.place.is_some(), "{} with arrays in {known:?} and {place:?}", self.kernel);
        self.ranges[self.arrays] =
            Range { start, bytes: bytes as u64, writable: u64::from(writable), reaches: 0 };
        self.arguments_of[self.arrays] = self.arguments as u8;
        self.arrays += 1;
        self.slot(start)
    }

    /// An array that is read.
    pub fn read<E: Element>(self, view: View<'a, E>) -> Self {
        self.array(address(view), view.len() * size_of::<E>(), view.place(), false)
    }

    /// An array that is written, and perhaps read.
    pub fn write<E: Element>(self, view: ViewMut<'a, E>) -> Self {
        let view = view.as_view();
        self.array(address(view), view.len() * size_of::<E>(), view.place(), true)
    }

    /// An array that is read, or a null pointer.
    pub fn maybe_read<E: Element>(self, view: Option<View<'a, E>>) -> Self {
        match view {
            Some(view) => self.read(view),
            None => self.slot(0),
        }
    }

    /// An array that is written, or a null pointer.
    pub fn maybe_write<E: Element>(self, view: Option<ViewMut<'a, E>>) -> Self {
        match view {
            Some(view) => self.write(view),
            None => self.slot(0),
        }
    }

    /// An array of addresses of arrays of `bytes` bytes.
    pub fn read_addresses(self, view: View<'a, u64>, bytes: usize) -> Self {
        let mut launch = self.read(view);
        launch.ranges[launch.arrays - 1].reaches = bytes as u64;
        launch
    }

    /// A 32-bit integer.
    ///
    /// # Panics
    /// 2^31 or more.
    pub fn int(self, x: usize) -> Self {
        let x = i32::try_from(x).unwrap_or_else(|_| panic!("{x} as a 32-bit argument"));
        self.slot(x as u64)
    }

    /// A 64-bit integer.
    pub fn long(self, x: usize) -> Self {
        self.slot(x as u64)
    }

    /// A 32-bit float.
    pub fn float(self, x: f32) -> Self {
        self.slot(u64::from(x.to_bits()))
    }

    /// A 32-bit integer, 0 or 1.
    pub fn flag(self, x: bool) -> Self {
        self.slot(u64::from(x))
    }

    /// The arguments, each in the low bytes of a word.
    pub fn slots(&self) -> &[u64] {
        &self.slots[..self.arguments]
    }

    /// The arrays that it may touch.
    pub fn ranges(&self) -> &[Range] {
        &self.ranges[..self.arrays]
    }

    /// Where its arrays are.
    pub fn place(&self) -> Option<Place> {
        self.place
    }

    /// The same launch on other memory, all of which `place` reaches: `to` says where an array has gone.
    ///
    /// # Safety
    /// Arrays as long are there, as the launch's lifetime says; an array of addresses holds those of the new place.
    pub unsafe fn moved(&self, to: impl Fn(u64) -> u64, place: Place) -> Self {
        let mut launch = self.clone();
        for (range, argument) in launch.ranges[..self.arrays].iter_mut().zip(self.arguments_of) {
            range.start = to(range.start);
            launch.slots[usize::from(argument)] = range.start;
        }
        Launch { place: Some(place), ..launch }
    }

    /// Whether there is nothing to do.
    pub fn is_empty(&self) -> bool {
        self.grid.contains(&0)
    }
}

/// From where both are reached: a device reaches pinned memory too, the host everything but a device's.
pub(super) fn together(a: Place, b: Place) -> Option<Place> {
    match (a, b) {
        (Place::Device(x), Place::Device(y)) => (x == y).then_some(a),
        (Place::Device(_), Place::Pinned) => Some(a),
        (Place::Pinned, Place::Device(_)) => Some(b),
        (Place::Device(_), _) | (_, Place::Device(_)) => None,
        (Place::Pinned, other) | (other, _) => Some(other),
    }
}

/// Whether a kernel may move 16 bytes at once at all of these addresses.
pub fn aligned(addresses: &[u64]) -> bool {
    addresses.iter().all(|a| a % 16 == 0)
}

/// The address of a view's first element.
pub fn address<E: Element>(view: View<'_, E>) -> u64 {
    view.as_ptr() as u64
}

/// The same memory for two launches that run one after the other.
///
/// # Safety
/// Both are only given to launches, of one queue.
pub unsafe fn twice<'a, E: Element>(mut view: ViewMut<'a, E>) -> [ViewMut<'a, E>; 2] {
    let (ptr, len, place) = (view.as_mut_ptr(), view.len(), view.place());
    // SAFETY: the exclusive borrow is consumed, and launches of one queue run in order, so that by the caller the two are
    // never in use at once.
    unsafe { [ViewMut::from_raw(ptr, len, place), ViewMut::from_raw(ptr, len, place)] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_move_and_other_arguments_stay() {
        let module = Module::reduce(crate::element::DType::F32);
        let [a, b] = [vec![0f32; 4], vec![0f32; 4]];
        let start = a.as_ptr() as u64;
        // SAFETY: never launched.
        let view = |data: &[f32]| unsafe { View::from_raw(data.as_ptr(), data.len(), Place::Host) };
        let launch =
            Launch::new(module, "a_kernel", [1; 3], 32).long(start as usize).read(view(&a)).read(view(&b));
        // SAFETY: as above.
        let moved = unsafe { launch.moved(|address| address + 1024, Place::Device(0)) };
        assert_eq!(moved.slots(), [start, start + 1024, b.as_ptr() as u64 + 1024]);
        assert_eq!(moved.ranges().iter().map(|range| range.start).collect::<Vec<_>>(), moved.slots()[1..]);
        assert_eq!((moved.place(), moved.ranges()[0].bytes), (Some(Place::Device(0)), 16));
    }

    #[test]
    fn places_go_together_where_both_are_reached() {
        let (host, pinned, gpu) = (Place::Host, Place::Pinned, Place::Device(0));
        assert_eq!(together(gpu, pinned), Some(gpu));
        assert_eq!(together(pinned, gpu), Some(gpu));
        assert_eq!(together(pinned, pinned), Some(pinned));
        assert_eq!(together(pinned, host), Some(host));
        assert_eq!(together(host, Place::Shared { offset: 64 }), Some(host));
        assert_eq!(together(gpu, host), None);
        assert_eq!(together(host, gpu), None);
        assert_eq!(together(gpu, Place::Device(1)), None);
    }
}
