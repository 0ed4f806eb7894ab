//! Kernels to machine code, with NVRTC. No GPU is needed.

use super::source::Module;
use crate::error::{Error, Result};
use cuda_sys::nvrtc::{Nvrtc, Program, Status};
use std::ffi::{CString, c_char};
use std::fmt;

/// A GPU architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Machine {
    /// Ten times the major number of the compute capability, plus the minor number: 80, 90, 100.
    pub capability: u32,
}

impl Machine {
    /// The oldest that the kernels are for.
    pub const OLDEST: Machine = Machine { capability: 80 };
    /// Hopper: H100, H200.
    pub const HOPPER: Machine = Machine { capability: 90 };
}

/// `sm_80`, `sm_90a`: with the instructions that only this architecture has, where there are such.
impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let own = if self.capability >= 90 { "a" } else { "" };
        write!(f, "sm_{}{own}", self.capability)
    }
}

/// What a kernel takes of a multiprocessor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resources {
    /// The kernel.
    pub kernel: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of a thread's stack in local memory, spills included.
    pub stack: u32,
    /// Bytes stored when registers ran out.
    pub spill_stores: u32,
    /// Bytes loaded again.
    pub spill_loads: u32,
    /// Bytes of static shared memory of a block.
    pub shared: u32,
    /// Whether each product of a warpgroup is waited for at once, because the assembler could not tell who has its registers.
    pub serialized: bool,
}

/// An opened NVRTC.
pub struct Compiler {
    nvrtc: Nvrtc,
}

impl Compiler {
    /// Opens the first NVRTC that is found of the newest major version up to `newest`: machine code of a newer toolkit does
    /// not load in an older driver.
    ///
    /// # Errors
    /// There is none; the text says where was looked and what brings it.
    pub fn open(newest: u32) -> Result<Self> {
        Ok(Compiler { nvrtc: knowing(newest, &[]).map_err(missing)? })
    }

    /// The first of those that makes machine code for `machine`, which the GPU of this name is.
    ///
    /// # Errors
    /// There is none, or the GPU is newer than all of them; the text says what brings one that knows it.
    pub fn open_for(newest: u32, machine: Machine, name: &str) -> Result<Self> {
        Ok(Compiler { nvrtc: knowing(newest, &[(machine, name)]).map_err(missing)? })
    }

    /// Major and minor version.
    pub fn version(&self) -> (u32, u32) {
        self.nvrtc.number()
    }

    /// The file that was opened.
    pub fn file(&self) -> &str {
        self.nvrtc.file()
    }

    /// Machine code for `machine`, and what each kernel takes.
    ///
    /// # Errors
    /// The compiler's own words: an architecture that it does not know, or a mistake in a kernel.
    pub fn compile(&self, module: &Module, machine: Machine) -> Result<(Vec<u8>, Vec<Resources>)> {
        if let Some(only) = module.source.only.filter(|only| *only != machine) {
            return Err(self.error(module, machine, &format!("these kernels are for {only} alone")));
        }
        let text = |s: &str| CString::new(s).expect("sources without NUL");
        let name = text(&format!("{}.cu", module.source.name));
        let source = text(module.source.text);
        let headers: Vec<CString> = module.source.headers.iter().map(|h| text(h.text)).collect();
        let names: Vec<CString> = module.source.headers.iter().map(|h| text(h.name)).collect();
        let pointers =
            |strings: &[CString]| strings.iter().map(|s| s.as_ptr()).collect::<Vec<*const c_char>>();
        let (headers, names) = (pointers(&headers), pointers(&names));
        let mut options: Vec<CString> = options(machine).iter().map(|o| text(o)).collect();
        options.extend(module.macros().iter().map(|o| text(o)));

        let mut program = OwnedProgram { nvrtc: &self.nvrtc, program: std::ptr::null_mut() };
        // SAFETY: NUL-terminated strings that outlive the call, as many as is said.
        let status = unsafe {
            let count = headers.len() as i32;
            (self.nvrtc.create)(
                &mut program.program,
                source.as_ptr(),
                name.as_ptr(),
                count,
                headers.as_ptr(),
                names.as_ptr(),
            )
        };
        self.check(module, machine, status, "")?;
        let options = pointers(&options);
        // SAFETY: a program of this library, and as many strings as is said.
        let status = unsafe { (self.nvrtc.compile)(program.program, options.len() as i32, options.as_ptr()) };
        let log = program.bytes(self.nvrtc.log_size, self.nvrtc.log);
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_string();
        self.check(module, machine, status, &log)?;
        let cubin = program.bytes(self.nvrtc.cubin_size, self.nvrtc.cubin);
        if cubin.is_empty() {
            return Err(self.error(module, machine, "no machine code came out"));
        }
        Ok((cubin, resources(&log)))
    }

    fn check(&self, module: &Module, machine: Machine, status: Status, log: &str) -> Result<()> {
        match status {
            0 => Ok(()),
            _ => Err(self.error(module, machine, &format!("{}\n{log}", self.nvrtc.text(status)))),
        }
    }

    fn error(&self, module: &Module, machine: Machine, why: &str) -> Error {
        let (major, minor) = self.version();
        Error::System {
            what: format!("compiling {module} for {machine} with NVRTC {major}.{minor}"),
            source_text: why.trim().to_string(),
        }
    }
}

/// The first NVRTC of the newest major version up to `newest` that makes machine code for all these GPUs, each an architecture and
/// a name: an older one may be found before it, as beside PyTorch.
pub(super) fn knowing(newest: u32, gpus: &[(Machine, &str)]) -> std::result::Result<Nvrtc, String> {
    let mut too_new = false;
    let found = Nvrtc::load(newest, |nvrtc| {
        let known = nvrtc.known();
        // One that says nothing is asked by compiling.
        let knows = |machine: &Machine| known.is_empty() || known.contains(&machine.capability);
        let Some((machine, name)) = gpus.iter().find(|(machine, _)| !knows(machine)) else { return Ok(()) };
        too_new = true;
        let (major, minor) = nvrtc.number();
        Err(format!("{} is NVRTC {major}.{minor}, which does not know {machine}, as {name} is", nvrtc.file()))
    });
    found.map_err(|why| match too_new {
        true => format!(
            "{why} (CUDA_VISIBLE_DEVICES can hide it): a newer CUDA toolkit or nvidia-cuda-nvrtc package \
             (nvidia-cuda-nvrtc-cu12 for CUDA 12) does, whose folder CARAVAN_CUDA_LIBRARIES can name"
        ),
        false => why,
    })
}

/// Something of CUDA's is not there.
pub(super) fn missing(why: String) -> Error {
    Error::System { what: "CUDA cannot be used".into(), source_text: why }
}

/// The compiler's options, the same for all kernels.
pub(super) fn options(machine: Machine) -> [String; 3] {
    [format!("--gpu-architecture={machine}"), "--std=c++17".to_string(), "--ptxas-options=-v".to_string()]
}

/// A program that is destroyed when dropped.
struct OwnedProgram<'a> {
    nvrtc: &'a Nvrtc,
    program: Program,
}

impl OwnedProgram<'_> {
    /// What the library gives as a size and then as bytes; nothing if it gives none.
    fn bytes(
        &self,
        size: unsafe extern "C" fn(Program, *mut usize) -> Status,
        get: unsafe extern "C" fn(Program, *mut c_char) -> Status,
    ) -> Vec<u8> {
        let mut length = 0;
        // SAFETY: a program of this library, and places as large as it says.
        unsafe {
            if size(self.program, &mut length) != 0 {
                return Vec::new();
            }
            let mut bytes = vec![0u8; length];
            if get(self.program, bytes.as_mut_ptr().cast()) != 0 {
                bytes.clear();
            }
            bytes
        }
    }
}

impl Drop for OwnedProgram<'_> {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: a program of this library, used no more.
            unsafe { (self.nvrtc.destroy)(&mut self.program) };
        }
    }
}

/// Reads what the assembler says of each kernel.
fn resources(log: &str) -> Vec<Resources> {
    // The number before a word.
    let before = |line: &str, word: &str| -> Option<u32> {
        let at = line.find(word)?;
        line[..at].split_whitespace().next_back()?.parse().ok()
    };
    let mut kernels: Vec<Resources> = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let kernel = rest.split('\'').next().unwrap_or_default().to_string();
            let (registers, stack, spill_stores, spill_loads, shared) = (0, 0, 0, 0, 0);
            let words = format!("in the function '{kernel}'");
            let serialized = log.lines().any(|line| line.contains("are serialized") && line.contains(&words));
            kernels.push(Resources {
                kernel,
                registers,
                stack,
                spill_stores,
                spill_loads,
                shared,
                serialized,
            });
        }
        let Some(kernel) = kernels.last_mut() else { continue };
        if let Some(stack) = before(line, "bytes stack frame") {
            kernel.stack = stack;
            kernel.spill_stores = before(line, "bytes spill stores").unwrap_or(0);
            kernel.spill_loads = before(line, "bytes spill loads").unwrap_or(0);
        }
        if let Some(registers) = before(line, "registers") {
            kernel.registers = registers;
            kernel.shared = before(line, "bytes smem").unwrap_or(0);
        }
    }
    kernels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_assemblers_words_are_understood() {
        let log = "ptxas info    : (C7515) Potential Performance Loss: wgmma.mma_async instructions are serialized due to \
                   non wgmma instructions in the function 'b'\n\
                   ptxas info    : 0 bytes gmem\n\
                   ptxas info    : Compiling entry function 'a' for 'sm_90a'\n\
                   ptxas info    : Function properties for a\n\
                   ptxas         .     16 bytes stack frame, 48 bytes spill stores, 44 bytes spill loads\n\
                   ptxas info    : Used 255 registers, used 1 barriers, 16 bytes cumulative stack size, 512 bytes smem\n\
                   ptxas info    : Compiling entry function 'b' for 'sm_90a'\n\
                   ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
                   ptxas info    : Used 8 registers, used 0 barriers, 360 bytes cmem[0]\n";
        let kernel = |name: &str, registers, stack, spill_stores, spill_loads, shared| Resources {
            kernel: name.into(),
            registers,
            stack,
            spill_stores,
            spill_loads,
            shared,
            serialized: name == "b",
        };
        assert_eq!(resources(log), [kernel("a", 255, 16, 48, 44, 512), kernel("b", 8, 0, 0, 0, 0)]);
        assert_eq!(resources("nonsense\n"), []);
    }

    #[test]
    fn architectures_have_the_compilers_names() {
        let names = [80, 90, 100].map(|capability| Machine { capability }.to_string());
        assert_eq!(names, ["sm_80", "sm_90a", "sm_100a"]);
    }
}
