//! The bindings against the vendors' own headers, where these are: beside the libraries, in folders named `include`. A C++
//! compiler describes what the headers declare, each argument by its kind and size, and that must be what we declare.
//!
//! `tests/run` brings the small wheels, for the driver and NVRTC. With the large ones too (nvidia-cublas, nvidia-nccl-cu13,
//! nvidia-cuda-crt) and `CARAVAN_CUDA_LIBRARIES` naming their `lib` folders everything is compared.

use crate::cublaslt::{self as lt, Choice, CublasLt};
use crate::driver::{self as cu, Driver};
use crate::find;
use crate::nccl::{self, Config, Nccl};
use crate::nvrtc::Nvrtc;
use std::collections::HashMap;
use std::ffi::c_void;
use std::mem::offset_of;
use std::path::{Path, PathBuf};
use std::process::Command;

/// How a type is passed: `i4` is an integer or enum of four bytes, `s128` a struct of 128, `p>i8` a pointer to an integer.
trait Passed {
    fn text() -> String;
}

macro_rules! passed {
    ($($text:literal: $($type:ty),*;)*) => {
        $($(impl Passed for $type {
            fn text() -> String {
                $text.into()
            }
        })*)*
    };
}

// Nothing is said of what is only pointed to: the configuration is longer in newer headers, and says so itself.
passed! {
    "": c_void, Config;
    "i1": i8, u8;
    "i4": i32, u32;
    "i8": i64, u64, usize;
    "f4": f32;
    "s16": [u8; 16];
    "s64": lt::Algorithm;
    "s96": Choice;
    "s128": nccl::UniqueId;
}

fn pointer(to: String) -> String {
    if to.is_empty() { "p".into() } else { format!("p>{to}") }
}

impl<T: Passed> Passed for *const T {
    fn text() -> String {
        pointer(T::text())
    }
}

impl<T: Passed> Passed for *mut T {
    fn text() -> String {
        pointer(T::text())
    }
}

/// What a function returns, then its arguments.
pub(crate) trait Signature {
    fn texts() -> Vec<String>;
}

macro_rules! signatures {
    ($($($argument:ident)*;)*) => {
        $(impl<R: Passed, $($argument: Passed),*> Signature for unsafe extern "C" fn($($argument),*) -> R {
            fn texts() -> Vec<String> {
                vec![R::text(), $($argument::text()),*]
            }
        })*
    };
}

signatures! {
    ;
    A;
    A B;
    A B C;
    A B C D;
    A B C D E;
    A B C D E F;
    A B C D E F G;
    A B C D E F G H;
    A B C D E F G H I J;
    A B C D E F G H I J K;
    A B C D E F G H I J K L M N O P;
}

/// A constant's name in C, and its value here.
type Constant = (&'static str, i64);

macro_rules! constants {
    ($($module:ident: $($ours:ident $theirs:literal)*;)*) => {
        vec![$($(($theirs, i64::from($module::$ours))),*),*]
    };
}

/// What describes a header. Newer headers rename functions by macros; internally they declare all versions of them.
const DESCRIBE: &str = r#"
#include <cstddef>
#include <cstdio>
#include <string>
#include <type_traits>
template <class T, class = void> struct Known : std::false_type {};
template <class T> struct Known<T, std::void_t<decltype(sizeof(T))>> : std::true_type {};
template <class T> std::string text() {
    if constexpr (std::is_pointer_v<T>) {
        std::string to = text<std::remove_pointer_t<T>>();
        return to.empty() ? "p" : "p>" + to;
    } else if constexpr (std::is_void_v<T> || !Known<T>::value) {
        return "";
    } else {
        const char *kind = std::is_floating_point_v<T> ? "f" : std::is_class_v<T> ? "s" : "i";
        return kind + std::to_string(sizeof(T));
    }
}
template <class F> struct Function;
template <class R, class... A> struct Function<R(A...)> {
    static void show(const char *name) {
        std::printf("%s %s", name, text<R>().c_str());
        (std::printf(" %s", text<A>().c_str()), ...);
        std::puts("");
    }
};
#define FUNCTION(name) Function<decltype(name)>::show(#name);
#define CONSTANT(value) std::printf("%s = %lld\n", #value, (long long)(value));
int main() {
"#;

/// Compares with every copy of `header` that is found; says so if there is none.
fn compare(header: &str, functions: &[(&str, Vec<String>)], constants: &[Constant]) {
    let mut includes: Vec<PathBuf> =
        find::folders().iter().filter_map(|lib| Some(lib.parent()?.join("include"))).collect();
    includes.retain(|folder| folder.is_dir());
    let with_header: Vec<&PathBuf> = includes.iter().filter(|folder| folder.join(header).exists()).collect();
    if with_header.is_empty() {
        return harness::skip(&format!("there is no {header} beside CUDA's libraries"));
    }
    let Some(cxx) = harness::cxx(&format!("what {header} says")) else { return };
    let mut program = format!("#define __CUDA_API_VERSION_INTERNAL\n#include <{header}>\n{DESCRIBE}");
    functions.iter().for_each(|(name, _)| program += &format!("FUNCTION({name})\n"));
    constants.iter().for_each(|(name, _)| program += &format!("CONSTANT(({name}))\n"));
    program += "}\n";
    for folder in with_header {
        let described = match describe(&cxx, &program, folder, &includes) {
            Ok(described) => described,
            Err(why) if why.contains("No such file") => {
                let line = why.lines().find(|line| line.contains("No such file")).unwrap_or_default();
                harness::skip(&format!("{header} in {folder:?} needs another header: {line}"));
                continue;
            }
            Err(why) => panic!("{header} in {folder:?}: {why}"),
        };
        for (name, ours) in functions {
            let theirs: Vec<&str> = described[*name].split(' ').collect();
            let fits = |(ours, theirs): (&String, &&str)| {
                // A pointer to anything may stand for a pointer to something.
                ours == theirs || ours.ends_with('p') && theirs.starts_with(&format!("{ours}>"))
            };
            let same = ours.len() == theirs.len() && ours.iter().zip(&theirs).all(fits);
            assert!(same, "{name} of {header} in {folder:?} is {theirs:?}, here {ours:?}");
        }
        for (name, ours) in constants {
            let theirs = &described[&format!("({name}) =")];
            assert_eq!(theirs, &ours.to_string(), "{name} of {header} in {folder:?}");
        }
    }
}

/// What 16-bit floats include of a library that few have, and that no declaration depends on: bodies for the device.
const TARGET: &str =
    "#define NV_IF_TARGET(...)\n#define NV_IF_ELSE_TARGET(...)\n#define NV_DISPATCH_TARGET(...)\n";

/// What the program that `cxx` compiles says of each name, with the header of `folder` and others from `includes`; or the
/// compiler's words.
fn describe(
    cxx: &str,
    program: &str,
    folder: &Path,
    includes: &[PathBuf],
) -> std::result::Result<HashMap<String, String>, String> {
    let work = tempfile::tempdir().expect("a folder");
    let (source, binary) = (work.path().join("describe.cpp"), work.path().join("describe"));
    std::fs::write(&source, program).expect("a file");
    std::fs::create_dir(work.path().join("nv")).expect("a folder");
    std::fs::write(work.path().join("nv/target"), TARGET).expect("a file");
    let mut compiler = Command::new(cxx);
    compiler.args(["-std=c++17", "-w", "-I"]).arg(folder);
    includes.iter().for_each(|other| {
        compiler.arg("-I").arg(other);
    });
    compiler.arg("-idirafter").arg(work.path());
    let done = compiler.arg(&source).arg("-o").arg(&binary).output().expect("the compiler starts");
    if !done.status.success() {
        return Err(String::from_utf8_lossy(&done.stderr).into_owned());
    }
    let said = Command::new(binary).output().expect("the program starts").stdout;
    let line = |line: &str| {
        // A constant's name may hold spaces; its value does not.
        let at = if line.contains(" = ") { line.rfind(' ') } else { line.find(' ') };
        let (name, rest) = line.split_at(at.expect("a name and what it is"));
        (name.to_owned(), rest.trim().to_owned())
    };
    Ok(String::from_utf8(said).expect("text").lines().map(line).collect())
}

#[test]
fn the_driver_is_that_of_its_header() {
    let constants = constants! {
        cu: OUT_OF_MEMORY "CUDA_ERROR_OUT_OF_MEMORY"
            NOT_READY "CUDA_ERROR_NOT_READY"
            STREAM_NON_BLOCKING "CU_STREAM_NON_BLOCKING"
            EVENT_DISABLE_TIMING "CU_EVENT_DISABLE_TIMING"
            EVENT_DEFAULT "CU_EVENT_DEFAULT"
            CAPTURE_THREAD_LOCAL "CU_STREAM_CAPTURE_MODE_THREAD_LOCAL"
            HOST_PORTABLE "CU_MEMHOSTALLOC_PORTABLE"
            HOST_PORTABLE "CU_MEMHOSTREGISTER_PORTABLE"
            DEVICE_MULTIPROCESSORS "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT"
            DEVICE_L2_BYTES "CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE"
            DEVICE_CAPABILITY_MAJOR "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR"
            DEVICE_CAPABILITY_MINOR "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR"
            DEVICE_SHARED_BYTES "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"
            FUNCTION_SHARED_BYTES "CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES"
            FUNCTION_DYNAMIC_SHARED_BYTES "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES";
    };
    compare("cuda.h", &Driver::signatures(), &constants);
}

#[test]
fn the_compiler_of_kernels_is_that_of_its_header() {
    compare("nvrtc.h", &Nvrtc::signatures(), &[("NVRTC_SUCCESS", 0)]);
}

#[test]
fn products_are_those_of_their_header() {
    let mut constants = constants! {
        lt: TYPE_F32 "CUDA_R_32F"
            TYPE_F16 "CUDA_R_16F"
            TYPE_BF16 "CUDA_R_16BF"
            COMPUTE_F32 "CUBLAS_COMPUTE_32F"
            COMPUTE_TF32 "CUBLAS_COMPUTE_32F_FAST_TF32"
            OPERATION_NONE "CUBLAS_OP_N"
            OPERATION_TRANSPOSE "CUBLAS_OP_T"
            PRODUCT_LEFT "CUBLASLT_MATMUL_DESC_TRANSA"
            PRODUCT_RIGHT "CUBLASLT_MATMUL_DESC_TRANSB"
            PREFERENCE_WORKSPACE "CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES"
            PREFERENCE_REDUCTIONS "CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK"
            REDUCTIONS_IN_COMPUTE_TYPE "CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE"
            PREFERENCE_ALIGNMENT_LEFT "CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES"
            PREFERENCE_ALIGNMENT_RIGHT "CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES"
            PREFERENCE_ALIGNMENT_ADDED "CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES"
            PREFERENCE_ALIGNMENT_RESULT "CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES";
    };
    constants.extend([
        ("CUBLAS_STATUS_NOT_INITIALIZED", 1),
        ("CUBLAS_STATUS_ALLOC_FAILED", 3),
        ("CUBLAS_STATUS_INVALID_VALUE", 7),
        ("CUBLAS_STATUS_ARCH_MISMATCH", 8),
        ("CUBLAS_STATUS_EXECUTION_FAILED", 13),
        ("CUBLAS_STATUS_INTERNAL_ERROR", 14),
        ("CUBLAS_STATUS_NOT_SUPPORTED", 15),
        ("sizeof(cublasLtMatmulHeuristicResult_t)", size_of::<Choice>() as i64),
        ("offsetof(cublasLtMatmulHeuristicResult_t, workspaceSize)", offset_of!(Choice, workspace) as i64),
        ("offsetof(cublasLtMatmulHeuristicResult_t, state)", offset_of!(Choice, status) as i64),
        ("offsetof(cublasLtMatmulHeuristicResult_t, wavesCount)", offset_of!(Choice, waves) as i64),
    ]);
    compare("cublasLt.h", &CublasLt::signatures(), &constants);
}

#[test]
fn nccl_is_that_of_its_header() {
    let mut constants = constants! {
        nccl: SUCCESS "ncclSuccess"
            IN_PROGRESS "ncclInProgress"
            OLDEST "NCCL_VERSION(2, 18, 0)"
            SHARED_GPU "NCCL_VERSION(2, 30, 3)"
            UNDEFINED "NCCL_CONFIG_UNDEF_INT"
            NO_COLOR "NCCL_SPLIT_NOCOLOR"
            TYPE_I8 "ncclInt8"
            TYPE_U8 "ncclUint8"
            TYPE_I32 "ncclInt32"
            TYPE_U32 "ncclUint32"
            TYPE_I64 "ncclInt64"
            TYPE_U64 "ncclUint64"
            TYPE_F16 "ncclFloat16"
            TYPE_F32 "ncclFloat32"
            TYPE_F64 "ncclFloat64"
            TYPE_BF16 "ncclBfloat16"
            SUM "ncclSum"
            PRODUCT "ncclProd"
            MAX "ncclMax"
            MIN "ncclMin"
            AVERAGE "ncclAvg";
    };
    let ours = Config::non_blocking();
    constants.extend([
        ("(ncclConfig_t NCCL_CONFIG_INITIALIZER).magic", i64::from(ours.magic)),
        ("offsetof(ncclConfig_t, size)", offset_of!(Config, size) as i64),
        ("offsetof(ncclConfig_t, magic)", offset_of!(Config, magic) as i64),
        ("offsetof(ncclConfig_t, version)", offset_of!(Config, version) as i64),
        ("offsetof(ncclConfig_t, blocking)", offset_of!(Config, blocking) as i64),
        ("offsetof(ncclConfig_t, cgaClusterSize)", offset_of!(Config, cluster) as i64),
        ("offsetof(ncclConfig_t, minCTAs)", offset_of!(Config, min_blocks) as i64),
        ("offsetof(ncclConfig_t, maxCTAs)", offset_of!(Config, max_blocks) as i64),
        ("offsetof(ncclConfig_t, netName)", offset_of!(Config, network) as i64),
        ("offsetof(ncclConfig_t, splitShare)", offset_of!(Config, split_share) as i64),
    ]);
    compare("nccl.h", &Nccl::signatures(), &constants);
}
