//! The kernel sources of this crate.

use collectives::device::{Header, Machine, Source};

macro_rules! header {
    ($file:literal) => {
        Header { name: $file, text: include_str!(concat!("kernels/", $file)) }
    };
}

const HEADERS: &[Header] = &[
    Header::DEVICE,
    Header::VECTOR,
    Header::WARPGROUP,
    header!("block.cuh"),
    header!("elementwise.cuh"),
    header!("tile.cuh"),
    header!("wgmma.cuh"),
];

macro_rules! only {
    () => {
        None
    };
    ($machine:ident) => {
        Some(Machine::$machine)
    };
}

macro_rules! sources {
    ($($(#[$doc:meta])* $name:ident $file:literal $(for $only:ident)?;)*) => {
        $(
            $(#[$doc])*
            pub static $name: Source = Source {
                name: $file,
                text: include_str!(concat!("kernels/", $file, ".cu")),
                headers: HEADERS,
                only: only!($($only)?),
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
    /// The same on products of warpgroups, but for its deltas.
    ATTENTION_BACKWARD_WGMMA "attention_backward_wgmma" for HOPPER;
    /// Attention forward on tensor cores: 16-bit floats, heads of 64 and 128.
    ATTENTION_FORWARD "attention_forward";
    /// The same on products of warpgroups.
    ATTENTION_FORWARD_WGMMA "attention_forward_wgmma" for HOPPER;
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
    /// The sum of squares.
    SQUARES "squares";
    /// SwiGLU.
    SWIGLU "swiglu";
}

/// Attention on tensor cores.
pub static TILED: &[&Source] =
    &[&ATTENTION_BACKWARD, &ATTENTION_BACKWARD_WGMMA, &ATTENTION_FORWARD, &ATTENTION_FORWARD_WGMMA];
