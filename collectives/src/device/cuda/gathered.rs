//! Work that a stream keeps before it gives it to the driver, and the graphs that such lists become.
//!
//! Every launch takes the host time, which small kernels may not take on the GPU; a graph is launched as one. With the limits
//! below that made small steps 1.58 times as fast on an H200, and large ones, whose kernels take longer than their launches,
//! no slower. A stream that gathers keeps launches, products and fills
//! as values ([`Item`]), and gives the driver the list ([`Gathered::give`]) as soon as anything else is asked of it, or the
//! list is long: so whoever waits for the stream, by an event, another stream or the host, finds what it would have found
//! without. A list is issued item by item when it is new, and recorded as a graph when it comes again with the same kernels,
//! arguments and addresses: a list whose arguments change with every step (the rate of learning) never becomes one. At its
//! second time everything that it needs has been loaded, which a capture would not permit. The work and its order are the
//! same either way, so that a stream whose graphs the GPU has no memory for makes no more of them, and says so.
//!
//! What a list uses must not be freed before the driver knows of it: a stream holds the GPU's memory while it keeps one
//! ([`Hold`]). A graph needs no such care, for it is launched only where somebody has just asked for the same addresses.

use super::gpu::Gpu;
use super::memory::Hold;
use super::product::Call;
use super::stream::Stream;
use crate::device::launch::Launch;
use crate::device::source::Module;
use crate::error::{Error, Result};
use cuda_sys::driver::{self, Handle};
use std::collections::{HashMap, HashSet};
use std::ffi::c_void;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::mpsc::Sender;

/// A list of fewer items is issued item by item.
const LEAST: usize = 4;
/// So many are given at once, so that the GPU does not wait for long while a list grows.
const MOST: usize = 64;
/// Graphs that a stream keeps; a step of a large model is a few hundred lists.
const GRAPHS: usize = 1024;
/// Lists that are remembered until they come again. They are forgotten all at once, more than any step has.
const SEEN: usize = 4096;

/// One thing for a stream to do.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Item {
    Kernel(Kernel),
    Product(Call),
    Zero { at: u64, bytes: usize },
}

/// A launch, without what it borrows.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Kernel {
    function: Handle,
    grid: [u32; 3],
    threads: u32,
    shared: u32,
    slots: [u64; Launch::MOST],
    arguments: usize,
    /// For errors.
    module: Module,
    name: &'static str,
}

impl Kernel {
    /// `function` is what `launch` launches.
    pub(super) fn new(launch: &Launch<'_>, function: Handle) -> Self {
        let Launch { module, kernel, grid, threads, shared, .. } = *launch;
        let (mut slots, arguments) = ([0; Launch::MOST], launch.slots().len());
        slots[..arguments].copy_from_slice(launch.slots());
        Kernel { function, grid, threads, shared, slots, arguments, module, name: kernel }
    }

    /// Gives it to the driver.
    pub(super) fn launch(&self, gpu: &Gpu, stream: Handle) -> Result<()> {
        let mut arguments = [std::ptr::null_mut::<c_void>(); Launch::MOST];
        for (argument, slot) in arguments.iter_mut().zip(&self.slots[..self.arguments]) {
            *argument = std::ptr::from_ref(slot).cast_mut().cast();
        }
        let ([x, y, z], null) = (self.grid, std::ptr::null_mut());
        // SAFETY: the kernel has these parameters, as who gave the launch promised (tests launch the same values in the
        // emulation, which counts them); each is read from the low bytes of its slot before the call returns.
        let status = unsafe {
            (gpu.driver().launch)(
                self.function,
                x,
                y,
                z,
                self.threads,
                1,
                1,
                self.shared,
                stream,
                arguments.as_mut_ptr(),
                null,
            )
        };
        if status == 0 {
            return Ok(());
        }
        let what = || format!("launching {} of {}", self.name, self.module);
        // The driver would say only that a value is invalid.
        gpu.has_shared(self.shared as usize, what)?;
        gpu.check(&what(), status)
    }
}

/// What tells launches apart.
impl Hash for Kernel {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.function, self.grid).hash(state);
        self.slots[..self.arguments].hash(state);
    }
}

/// What a stream keeps.
pub(super) struct Gathered {
    pending: Vec<Item>,
    /// As long as something is pending.
    hold: Option<Hold>,
    /// The hashes of lists that came once. Two lists of one hash would only be recorded earlier.
    seen: HashSet<u64>,
    /// By the hashes of their lists.
    graphs: HashMap<u64, (Box<[Item]>, Graph)>,
    /// Who hears why no more graphs are made; none once that was said.
    remarks: Option<Sender<String>>,
}

impl Gathered {
    /// With room for all that steps need later.
    pub(super) fn new(remarks: Sender<String>) -> Self {
        Gathered {
            pending: Vec::with_capacity(MOST),
            hold: None,
            seen: HashSet::with_capacity(SEEN),
            graphs: HashMap::with_capacity(GRAPHS),
            remarks: Some(remarks),
        }
    }

    /// Keeps an item; true when it is time to give what there is.
    pub(super) fn keep(&mut self, gpu: &Gpu, item: Item) -> bool {
        self.hold.get_or_insert_with(|| gpu.hold());
        self.pending.push(item);
        self.pending.len() == MOST
    }

    /// Gives the driver all that is pending. After an error it is pending no more.
    pub(super) fn give(&mut self, stream: &mut Stream) -> Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let given = stream.gpu().enter().and_then(|()| self.give_list(stream));
        self.pending.clear();
        self.hold = None;
        given
    }

    fn give_list(&mut self, stream: &mut Stream) -> Result<()> {
        let list = &self.pending[..];
        if list.len() < LEAST {
            return issue(list, stream);
        }
        let mut hasher = DefaultHasher::new();
        list.hash(&mut hasher);
        let hash = hasher.finish();
        match self.graphs.get(&hash) {
            Some((items, graph)) if **items == *list => {
                if graph.launch(list, stream)? {
                    return Ok(());
                }
            }
            Some(_) => return issue(list, stream),
            None if self.graphs.len() == GRAPHS || self.remarks.is_none() => return issue(list, stream),
            None if !self.seen.remove(&hash) => {
                if self.seen.len() == SEEN {
                    self.seen.clear();
                }
                self.seen.insert(hash);
                return issue(list, stream);
            }
            None => {
                // Before its first launch a graph is not on the GPU, where there may be no place for it either.
                if let Some(graph) = Graph::record(list, stream)?
                    && graph.launch(list, stream)?
                {
                    self.graphs.insert(hash, (list.into(), graph));
                    return Ok(());
                }
            }
        }
        if let Some(remarks) = self.remarks.take() {
            // Nobody may be there any more to hear it.
            let _ = remarks.send(format!(
                "GPU {} has no memory left for {}; the run goes on without more CUDA graphs",
                stream.gpu().ordinal(),
                described(list)
            ));
        }
        issue(list, stream)
    }
}

fn issue(list: &[Item], stream: &mut Stream) -> Result<()> {
    list.iter().try_for_each(|item| stream.issue(item))
}

/// For errors: what a list is.
fn described(list: &[Item]) -> String {
    let first = list.iter().find_map(|item| match item {
        Item::Kernel(kernel) => Some(format!(", among them {} of {}", kernel.name, kernel.module)),
        _ => None,
    });
    format!("a graph of {} launches{}", list.len(), first.unwrap_or_default())
}

/// A list that was recorded and is launched as one.
struct Graph {
    gpu: Gpu,
    handle: Handle,
}

impl Graph {
    /// Records a list without running it; none if the driver has no memory for one more.
    fn record(list: &[Item], stream: &mut Stream) -> Result<Option<Self>> {
        let gpu = stream.gpu().clone();
        let (driver, handle) = (gpu.driver(), stream.handle()?);
        let what = || format!("recording {}", described(list));
        // SAFETY: a live stream.
        let begun = unsafe { (driver.capture_begin)(handle, driver::CAPTURE_THREAD_LOCAL) };
        gpu.check_with(what, begun)?;
        let issued = issue(list, stream);
        let (mut graph, mut ready) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the capture began above and ends in any case; valid places to write to. The graph, which is null if
        // something went wrong, is not needed any more once it is ready to run.
        let (ended, made) = unsafe {
            let ended = (driver.capture_end)(handle, &mut graph);
            let made = match ended == 0 && issued.is_ok() {
                true => (driver.graph_instantiate)(&mut ready, graph, 0),
                false => 0,
            };
            if !graph.is_null() {
                (driver.graph_destroy)(graph);
            }
            (ended, made)
        };
        issued.map_err(recording)?;
        gpu.check_with(what, ended)?;
        if made == driver::OUT_OF_MEMORY {
            return Ok(None);
        }
        gpu.check_with(what, made)?;
        Ok(Some(Graph { gpu, handle: ready }))
    }

    /// Gives a stream the whole list, which is the one that was recorded; or nothing of it, and false, if the driver has no
    /// memory for that.
    fn launch(&self, list: &[Item], stream: &mut Stream) -> Result<bool> {
        let handle = stream.handle()?;
        // SAFETY: a live graph and stream; whoever has asked for the list keeps what it uses.
        let status = unsafe { (self.gpu.driver().graph_launch)(self.handle, handle) };
        if status == driver::OUT_OF_MEMORY {
            return Ok(false);
        }
        self.gpu.check_with(|| format!("launching {}", described(list)), status).map(|()| true)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: a live graph; the driver keeps it until it has run.
        unsafe {
            let _ = self.gpu.enter();
            (self.gpu.driver().graph_exec_destroy)(self.handle);
        }
    }
}

/// The same error, of something that was being recorded.
fn recording(error: Error) -> Error {
    match error {
        Error::System { what, source_text } => {
            Error::System { what: format!("recording a graph, {what}"), source_text }
        }
        other => other,
    }
}
