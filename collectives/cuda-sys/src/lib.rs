//! Bindings of the parts of CUDA that training needs, opened at run time so that a build never needs CUDA and one
//! binary serves machines with and without it, with CUDA 12 and 13, with libraries of the system or of a Python
//! environment. Nothing here is safe or clever: it is the C interfaces as Rust types, status codes as integers (a
//! newer library may return codes that no enum of today has).
//!
//! `caravan-collectives` builds its devices on it.
#![warn(missing_docs)]

/// Declares the functions of a library as a struct of pointers, and how they are resolved.
macro_rules! functions {
    (
        $(#[$doc:meta])* $table:ident of $library:literal;
        $($(#[$fdoc:meta])* $name:ident = $symbol:literal: fn($($arg:ty),* $(,)?) -> $ret:ty;)*
    ) => {
        $(#[$doc])*
        pub struct $table {
            $($(#[$fdoc])* pub $name: unsafe extern "C" fn($($arg),*) -> $ret,)*
            // Last, so that the functions above never outlive what they point into.
            opened: $crate::find::Opened,
        }

        impl $table {
            fn resolve(opened: $crate::find::Opened) -> Result<Self, String> {
                // SAFETY: names and types are those of the library's headers.
                unsafe {
                    Ok($table {
                        $($name: opened.symbol(concat!($symbol, "\0"))?,)*
                        opened,
                    })
                }
            }

            /// Each function's name and how its result and arguments are passed.
            #[cfg(test)]
            pub(crate) fn signatures() -> Vec<(&'static str, Vec<String>)> {
                vec![$(
                    ($symbol, <unsafe extern "C" fn($($arg),*) -> $ret as $crate::headers::Signature>::texts())
                ),*]
            }

            /// The file that was opened, as far as it is known.
            pub fn file(&self) -> &str {
                self.opened.file()
            }
        }
    };
}

pub mod cublaslt;
pub mod driver;
pub mod find;
#[cfg(test)]
mod headers;
pub mod nccl;
pub mod nvrtc;
