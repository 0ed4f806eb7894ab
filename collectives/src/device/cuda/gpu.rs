//! A device, its context, and the functions loaded into it.

use super::memory::Kept;
use crate::bootstrap::spawn::unsignalled;
use crate::device::cache::Cache;
use crate::device::compile::{Compiler, Machine, missing};
use crate::device::source::Module;
use crate::element::DType;
use crate::error::{Error, Result};
use crate::{locked, parallel};
use cuda_sys::driver::{self, Device, Driver, Handle, Status};
use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, CString, c_int};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

/// What there is to know about a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Properties {
    /// Its name.
    pub name: String,
    /// Its architecture.
    pub machine: Machine,
    /// Bytes of its memory.
    pub memory: usize,
    /// Its multiprocessors.
    pub multiprocessors: usize,
    /// Bytes of its second-level cache.
    pub cache: usize,
    /// Bytes of shared memory that a block may have.
    pub shared: usize,
}

/// A GPU. Clones are the same GPU.
#[derive(Clone)]
pub struct Gpu {
    inner: Arc<Inner>,
}

/// A kernel of a module, as a key.
type Entry = (&'static str, DType, usize, &'static str);

struct Inner {
    driver: Driver,
    ordinal: usize,
    device: Device,
    context: Handle,
    properties: Properties,
    /// The newest CUDA that the driver supports.
    newest: (u32, u32),
    compiler: OnceLock<Compiler>,
    cache: Cache,
    modules: Mutex<HashMap<(&'static str, DType, usize), SendHandle>>,
    functions: Mutex<HashMap<Entry, SendHandle>>,
    kept: Mutex<Kept>,
}

/// A handle of the driver, which any thread may use.
#[derive(Clone, Copy)]
struct SendHandle(Handle);

// SAFETY: the driver's objects belong to the context, not to a thread, and its functions may be called from any.
unsafe impl Send for SendHandle {}
// SAFETY: the context is only passed to the driver, which locks.
unsafe impl Send for Inner {}
// SAFETY: as above; everything that changes is behind a lock.
unsafe impl Sync for Inner {}

impl Gpu {
    /// GPU number `ordinal`, with the user's cache of kernels.
    ///
    /// # Errors
    /// No driver, no such GPU, or one below compute capability 8.0.
    pub fn open(ordinal: usize) -> Result<Self> {
        Gpu::open_with(ordinal, Cache::of_user())
    }

    /// GPU number `ordinal`, with a cache of kernels.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with(ordinal: usize, cache: Cache) -> Result<Self> {
        let driver = Driver::load().map_err(missing)?;
        let mut version = 0;
        let (mut device, mut context) = (0, std::ptr::null_mut());
        // SAFETY: valid places to write to.
        unsafe {
            check(&driver, "asking for the driver's version", (driver.driver_version)(&mut version))?;
            let mut count: c_int = 0;
            check(&driver, "counting GPUs", (driver.device_count)(&mut count))?;
            if ordinal >= count.max(0) as usize {
                return Err(missing(format!(
                    "GPU {ordinal} was asked for, and there are {count}, counted from 0"
                )));
            }
            check(&driver, "opening a GPU", (driver.device)(&mut device, ordinal as c_int))?;
        }
        let properties = properties(&driver, device)?;
        if properties.machine.capability < Machine::OLDEST.capability {
            return Err(missing(format!(
                "GPU {ordinal} ({}) is {}: the kernels need {} or newer",
                properties.name,
                properties.machine,
                Machine::OLDEST
            )));
        }
        // SAFETY: valid places to write to.
        unsafe { check(&driver, "starting a GPU's context", (driver.context_retain)(&mut context, device))? };
        let newest = (version as u32 / 1000, version as u32 % 1000 / 10);
        let inner = Inner {
            driver,
            ordinal,
            device,
            context,
            properties,
            newest,
            compiler: OnceLock::new(),
            cache,
            modules: Mutex::default(),
            functions: Mutex::default(),
            kept: Mutex::default(),
        };
        let gpu = Gpu { inner: Arc::new(inner) };
        gpu.enter()?;
        Ok(gpu)
    }

    /// How many GPUs there are. Threads that the driver starts for that take no signals: those are for this process.
    ///
    /// # Errors
    /// There is no driver.
    pub fn count() -> Result<usize> {
        unsignalled(|| {
            let driver = Driver::load().map_err(missing)?;
            let mut count: c_int = 0;
            // SAFETY: a valid place to write to.
            unsafe { check(&driver, "counting GPUs", (driver.device_count)(&mut count))? };
            Ok(count.max(0) as usize)
        })
    }

    /// What GPU number `ordinal` is, without using it.
    ///
    /// # Errors
    /// There is no driver, or no such GPU.
    pub fn look(ordinal: usize) -> Result<Properties> {
        let driver = Driver::load().map_err(missing)?;
        let mut device = 0;
        // SAFETY: a valid place to write to.
        unsafe { check(&driver, "opening a GPU", (driver.device)(&mut device, ordinal as c_int))? };
        properties(&driver, device)
    }

    /// Its number.
    pub fn ordinal(&self) -> usize {
        self.inner.ordinal
    }

    /// What it is.
    pub fn properties(&self) -> &Properties {
        &self.inner.properties
    }

    /// The newest CUDA that its driver supports: major and minor.
    pub fn newest_cuda(&self) -> (u32, u32) {
        self.inner.newest
    }

    /// What no other GPU or partition of one has.
    ///
    /// # Errors
    /// The driver's.
    pub fn uuid(&self) -> Result<[u8; 16]> {
        let mut uuid = [0; 16];
        // SAFETY: a place for sixteen bytes.
        let status = unsafe { (self.driver().device_uuid)(&mut uuid, self.inner.device) };
        self.check("asking for a GPU's identity", status).map(|()| uuid)
    }

    /// Bytes that are free, and all there are.
    ///
    /// # Errors
    /// The driver's.
    pub fn free_memory(&self) -> Result<(usize, usize)> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: valid places to write to.
        self.check("asking for free memory", unsafe { (self.driver().memory_info)(&mut free, &mut total) })?;
        Ok((free, total))
    }

    pub(super) fn driver(&self) -> &Driver {
        &self.inner.driver
    }

    /// Memory that is freed later.
    pub(super) fn kept(&self) -> MutexGuard<'_, Kept> {
        locked(&self.inner.kept)
    }

    /// Makes the GPU the calling thread's.
    pub(super) fn enter(&self) -> Result<()> {
        // SAFETY: the context lives as long as `inner`.
        self.check("entering a GPU's context", unsafe { (self.driver().context_use)(self.inner.context) })
    }

    /// What the driver says about a call, with the GPU's number.
    pub(super) fn check(&self, what: &str, status: Status) -> Result<()> {
        self.check_with(|| what.to_owned(), status)
    }

    /// The same of a call that takes more words.
    pub(super) fn check_with(&self, what: impl FnOnce() -> String, status: Status) -> Result<()> {
        match status {
            0 => Ok(()),
            _ => check(&self.inner.driver, &format!("{} (GPU {})", what(), self.inner.ordinal), status),
        }
    }

    /// Refuses more shared memory than a block may have here.
    pub(super) fn has_shared(&self, asked: usize, what: impl FnOnce() -> String) -> Result<()> {
        let Properties { shared, name, .. } = self.properties();
        match asked <= *shared {
            true => Ok(()),
            false => Err(Error::System {
                what: what(),
                source_text: format!(
                    "it needs {asked} bytes of shared memory a block, and {name} has {shared}"
                ),
            }),
        }
    }

    /// A kernel of a module, compiled, loaded and allowed its shared memory when first asked for.
    pub(super) fn function(&self, of: &Module, kernel: &'static str) -> Result<Handle> {
        let (name, element, head) = of.key();
        let entry = (name, element, head, kernel);
        if let Some(function) = self.inner.functions.lock().expect("no panic while locked").get(&entry) {
            return Ok(function.0);
        }
        let module = self.module(of)?;
        let what = format!("loading {kernel} of {of}");
        let kernel = CString::new(kernel).expect("a name without NUL");
        let (mut function, mut fixed) = (std::ptr::null_mut(), 0);
        let driver = self.driver();
        // The most that the launch of any shape can ask for, so that it is set once.
        // SAFETY: a loaded module, and valid places to write to.
        unsafe {
            self.check(&what, (driver.module_function)(&mut function, module, kernel.as_ptr()))?;
            let static_bytes = driver::FUNCTION_SHARED_BYTES;
            self.check(&what, (driver.function_attribute)(&mut fixed, static_bytes, function))?;
            let most = self.inner.properties.shared as c_int - fixed;
            let attribute = driver::FUNCTION_DYNAMIC_SHARED_BYTES;
            self.check(&what, (driver.function_set)(function, attribute, most))?;
        }
        self.inner.functions.lock().expect("no panic while locked").insert(entry, SendHandle(function));
        Ok(function)
    }

    /// Compiles what is neither loaded nor kept on disk, on all processors: a module takes seconds.
    pub(super) fn compile(&self, modules: &[Module]) -> Result<()> {
        let loaded =
            |m: &Module| self.inner.modules.lock().expect("no panic while locked").contains_key(&m.key());
        let mut keys = HashSet::new();
        let missing: Vec<&Module> = modules.iter().filter(|m| !loaded(m) && keys.insert(m.key())).collect();
        if missing.len() < 2 {
            return Ok(());
        }
        let (compiler, machine) = (self.compiler()?, self.inner.properties.machine);
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let code = |module: &&Module| self.inner.cache.load(compiler, module, machine);
        let codes = parallel::map(missing.iter(), processors, code);
        // Here and not later from the disk: it may have taken nothing. One that fails keeps no other from being there.
        let loaded: Vec<Result<Handle>> =
            missing.into_iter().zip(codes).map(|(module, code)| self.load(module, &code?)).collect();
        loaded.into_iter().try_for_each(|loaded| loaded.map(drop))
    }

    /// A module, compiled and loaded when first asked for.
    pub(super) fn module(&self, module: &Module) -> Result<Handle> {
        let loaded = |modules: &HashMap<_, SendHandle>| modules.get(&module.key()).map(|loaded| loaded.0);
        if let Some(loaded) = loaded(&self.inner.modules.lock().expect("no panic while locked")) {
            return Ok(loaded);
        }
        let code = self.inner.cache.load(self.compiler()?, module, self.inner.properties.machine)?;
        self.load(module, &code)
    }

    fn load(&self, module: &Module, code: &[u8]) -> Result<Handle> {
        let mut modules = self.inner.modules.lock().expect("no panic while locked");
        if let Some(loaded) = modules.get(&module.key()) {
            return Ok(loaded.0);
        }
        self.enter()?;
        let mut loaded = std::ptr::null_mut();
        // SAFETY: whole machine code, which the driver copies.
        let status = unsafe { (self.driver().module_load)(&mut loaded, code.as_ptr().cast()) };
        self.check(&format!("loading {module}"), status)?;
        modules.insert(module.key(), SendHandle(loaded));
        Ok(loaded)
    }

    /// NVRTC, opened when first needed.
    fn compiler(&self) -> Result<&Compiler> {
        if let Some(compiler) = self.inner.compiler.get() {
            return Ok(compiler);
        }
        let Properties { machine, name, .. } = self.properties();
        let compiler = Compiler::open_for(self.inner.newest.0, *machine, name)?;
        Ok(self.inner.compiler.get_or_init(|| compiler))
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let modules = std::mem::take(&mut *locked(&self.modules));
        // SAFETY: streams, events and memory hold the GPU, so none is left; an error changes nothing any more.
        unsafe {
            (self.driver.context_use)(self.context);
            for module in modules.into_values() {
                (self.driver.module_unload)(module.0);
            }
            (self.driver.context_release)(self.device);
        }
    }
}

fn check(driver: &Driver, what: &str, status: Status) -> Result<()> {
    match status {
        0 => Ok(()),
        _ => Err(Error::System { what: what.to_string(), source_text: driver.text(status) }),
    }
}

fn properties(driver: &Driver, device: Device) -> Result<Properties> {
    let mut name = [0; 256];
    let mut memory = 0;
    // SAFETY: valid places to write to, the name's as long as is said; it ends with a NUL.
    let name = unsafe {
        check(driver, "asking for a GPU's name", (driver.device_name)(name.as_mut_ptr(), 256, device))?;
        check(driver, "asking for a GPU's memory", (driver.device_memory)(&mut memory, device))?;
        CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned()
    };
    let attribute = |which| -> Result<usize> {
        let mut value = 0;
        // SAFETY: a valid place to write to.
        let status = unsafe { (driver.device_attribute)(&mut value, which, device) };
        check(driver, "asking for a GPU's properties", status)?;
        Ok(value.max(0) as usize)
    };
    let major = attribute(driver::DEVICE_CAPABILITY_MAJOR)?;
    let minor = attribute(driver::DEVICE_CAPABILITY_MINOR)?;
    Ok(Properties {
        name,
        machine: Machine { capability: (major * 10 + minor) as u32 },
        memory,
        multiprocessors: attribute(driver::DEVICE_MULTIPROCESSORS)?,
        cache: attribute(driver::DEVICE_L2_BYTES)?,
        shared: attribute(driver::DEVICE_SHARED_BYTES)?,
    })
}
