//! Kernel sources, and how they are compiled.

use super::compile::Machine;
use crate::element::DType;
use crate::reduce::accumulator;
use std::fmt;

/// A file of kernels with everything that it includes.
#[derive(Debug)]
pub struct Source {
    /// Its name, without `.cu`.
    pub name: &'static str,
    /// What is in it.
    pub text: &'static str,
    /// What it, and what it includes, may include.
    pub headers: &'static [Header],
    /// The one architecture that it is for, if it uses what others lack.
    pub only: Option<Machine>,
}

impl Source {
    /// The names of its kernels: `KERNEL(threads, blocks, name, …)`.
    pub(super) fn kernels(&self) -> impl Iterator<Item = &'static str> {
        self.text.split("KERNEL(").skip(1).filter_map(|entry| entry.split(',').nth(2).map(str::trim))
    }
}

/// A file that kernels include.
#[derive(Clone, Copy, Debug, Hash)]
pub struct Header {
    /// The name by which it is included.
    pub name: &'static str,
    /// What is in it.
    pub text: &'static str,
}

impl Header {
    /// Everything that is special to the device.
    pub const DEVICE: Header = Header { name: "device.cuh", text: include_str!("kernels/device.cuh") };
    /// 16 bytes of elements at a time.
    pub const VECTOR: Header = Header { name: "vector.cuh", text: include_str!("kernels/vector.cuh") };
    /// Products of warpgroups, for sources of sm_90a.
    pub const WARPGROUP: Header =
        Header { name: "warpgroup.cuh", text: include_str!("kernels/warpgroup.cuh") };
}

/// Reductions of several inputs in canonical order.
pub(super) static REDUCE: Source = Source {
    name: "reduce",
    text: include_str!("kernels/reduce.cu"),
    headers: &[Header::DEVICE, Header::VECTOR],
    only: None,
};

/// A source with the values of its macros: what is compiled, kept and loaded as one.
#[derive(Clone, Copy, Debug)]
pub struct Module {
    /// The file.
    pub source: &'static Source,
    /// ELEMENT, the type that the kernels are for; also gives ACCUMULATOR.
    pub element: DType,
    /// HEAD, the width of a head, for sources that have it; else 0.
    pub head: usize,
    /// The most bytes of shared memory that launches ask for, where not every device has as much. It tells no modules
    /// apart.
    pub shared: usize,
}

impl Module {
    /// A source that has no HEAD.
    pub const fn new(source: &'static Source, element: DType) -> Self {
        Module { source, element, head: 0, shared: 0 }
    }

    /// A source that has a HEAD.
    pub const fn with_head(source: &'static Source, element: DType, head: usize) -> Self {
        Module { source, element, head, shared: 0 }
    }

    /// With launches of up to so many bytes of shared memory.
    pub const fn shared(self, bytes: usize) -> Self {
        Module { shared: bytes, ..self }
    }

    /// The reductions of this type.
    pub fn reduce(element: DType) -> Self {
        Module::new(&REDUCE, element)
    }

    /// Its macros, as a compiler's options.
    pub fn macros(&self) -> Vec<String> {
        let mut macros = vec![
            format!("-DELEMENT={}", c_type(self.element)),
            format!("-DACCUMULATOR={}", c_type(accumulator(self.element))),
        ];
        if self.head > 0 {
            macros.push(format!("-DHEAD={}", self.head));
        }
        macros
    }

    /// What tells modules apart: names are unique among sources.
    pub(super) fn key(&self) -> (&'static str, DType, usize) {
        (self.source.name, self.element, self.head)
    }
}

impl PartialEq for Module {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for Module {}

/// `rope:bf16`, `attention_forward:bf16:64`.
impl fmt::Display for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.head {
            0 => write!(f, "{}:{}", self.source.name, self.element),
            head => write!(f, "{}:{}:{head}", self.source.name, self.element),
        }
    }
}

fn c_type(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float",
        DType::F64 => "double",
        DType::F16 => "f16",
        DType::Bf16 => "bf16",
        DType::I32 => "int",
        DType::I64 => "i64",
        DType::U32 => "u32",
        DType::U64 => "u64",
        DType::I8 => "signed char",
        DType::U8 => "u8",
    }
}
