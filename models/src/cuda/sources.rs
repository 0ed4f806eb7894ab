//! The kernel sources of this crate.

use collectives::device::{Header, Source};

macro_rules! header {
    ($file:literal) => {
        Header { name: $file, text: include_str!(concat!("kernels/", $file)) }
    };
}

const HEADERS: &[Header] =
    &[Header::DEVICE, Header::VECTOR, header!("block.cuh"), header!("elementwise.cuh"), header!("tile.cuh")];

macro_rules! sources {
    ($($(#[$doc:meta])* $name:ident $file:literal;)*) => {
        $(
            $(#[$doc])*
            pub static $name: Source = Source {
                name: $file,
                text: include_str!(concat!("kernels/", $file, ".cu")),
                headers: HEADERS,
            };
        )*

        /// All of them.
        pub static ALL: &[&Source] = &[$(&$name),*];
    };
}

sources! {
    /// AdamW.
    ADAMW "adamw";
    /// Attention backward on tensor cores: 16-bit floats, heads of 64 and 128.
    ATTENTION_BACKWARD "attention_backward";
    /// Attention forward on tensor cores: 16-bit floats, heads of 64 and 128.
    ATTENTION_FORWARD "attention_forward";
    /// Attention without tensor cores, forward and backward, for any head.
    ATTENTION_PLAIN "attention_plain";
    /// Scaled copies, sums, and the search for what is not finite.
    CAST "cast";
    /// Loss and gradient of logits.
    CROSS_ENTROPY "cross_entropy";
    /// Rows of a table.
    EMBEDDING "embedding";
    /// RMSNorm.
    RMSNORM "rmsnorm";
    /// Rotary position embedding.
    ROPE "rope";
    /// Sums of squares of blocks.
    SQUARES "squares";
    /// SwiGLU.
    SWIGLU "swiglu";
}
