//! Which kernel sources exist, and how each is compiled.

use collectives::DType;
use std::fmt;

/// A file of kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Source {
    /// AdamW.
    AdamW,
    /// Attention backward on tensor cores.
    AttentionBackward,
    /// Attention forward on tensor cores.
    AttentionForward,
    /// Attention without tensor cores, forward and backward.
    AttentionPlain,
    /// Scaled copies, sums, and the search for what is not finite.
    Cast,
    /// Loss and gradient of logits.
    CrossEntropy,
    /// Rows of a table.
    Embedding,
    /// Reductions of several inputs in canonical order.
    Reduce,
    /// RMSNorm.
    RmsNorm,
    /// Rotary position embedding.
    Rope,
    /// Sums of squares of blocks.
    Squares,
    /// SwiGLU.
    SwiGlu,
}

macro_rules! sources {
    ($($variant:ident $file:literal;)*) => {
        impl Source {
            /// Every file.
            pub const ALL: &[Source] = &[$(Source::$variant),*];

            /// Its name, without the folder.
            pub const fn file(self) -> &'static str {
                match self { $(Source::$variant => $file),* }
            }

            /// What is in it.
            pub const fn text(self) -> &'static str {
                match self { $(Source::$variant => include_str!(concat!("kernels/", $file))),* }
            }
        }
    };
}

sources! {
    AdamW "adamw.cu";
    AttentionBackward "attention_backward.cu";
    AttentionForward "attention_forward.cu";
    AttentionPlain "attention_plain.cu";
    Cast "cast.cu";
    CrossEntropy "cross_entropy.cu";
    Embedding "embedding.cu";
    Reduce "reduce.cu";
    RmsNorm "rmsnorm.cu";
    Rope "rope.cu";
    Squares "squares.cu";
    SwiGlu "swiglu.cu";
}

/// What the kernels include: names and texts.
pub const HEADERS: [(&str, &str); 5] = [
    ("device.cuh", include_str!("kernels/device.cuh")),
    ("vector.cuh", include_str!("kernels/vector.cuh")),
    ("block.cuh", include_str!("kernels/block.cuh")),
    ("elementwise.cuh", include_str!("kernels/elementwise.cuh")),
    ("tile.cuh", include_str!("kernels/tile.cuh")),
];

/// A source with the values of its macros: what is compiled, cached and loaded as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Module {
    /// The file.
    pub source: Source,
    /// ELEMENT.
    pub element: DType,
    /// HEAD, for the sources that have it; else 0.
    pub head: usize,
}

impl Module {
    /// A source that has no HEAD.
    pub const fn new(source: Source, element: DType) -> Self {
        Module { source, element, head: 0 }
    }

    /// A source that has a HEAD.
    pub const fn with_head(source: Source, element: DType, head: usize) -> Self {
        Module { source, element, head }
    }

    /// Its macros: names and values.
    pub fn macros(&self) -> impl Iterator<Item = (&'static str, String)> + use<> {
        let element = [("ELEMENT", c_type(self.element).to_string())];
        let accumulator = (self.source == Source::Reduce).then(|| {
            let acc = match self.element {
                DType::F16 | DType::Bf16 => DType::F32,
                other => other,
            };
            ("ACCUMULATOR", c_type(acc).to_string())
        });
        let head = (self.head > 0).then(|| ("HEAD", self.head.to_string()));
        element.into_iter().chain(accumulator).chain(head)
    }
}

/// `rope:bf16`, `attention_forward:bf16:64`.
impl fmt::Display for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.source.file().trim_end_matches(".cu");
        match self.head {
            0 => write!(f, "{name}:{}", self.element),
            head => write!(f, "{name}:{}:{head}", self.element),
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
