//! Every CUDA kernel compiled to machine code, without a GPU: that the compiler accepts it for each architecture, and
//! that the loops of attention fit the registers. Prints what each kernel takes; `--nocapture` shows it.

use collectives::DType;
use collectives::device::{Compiler, Machine, Module, Resources, Source};
use models::cuda::sources;
use std::io::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

const SM80: Machine = Machine { capability: 80 };
const SM90: Machine = Machine { capability: 90 };
const SM100: Machine = Machine { capability: 100 };

/// What a module's kernels take, or why it does not compile.
type Compiled = Result<Vec<Resources>, String>;

/// What training needs, for the architectures that the kernels are tuned for or must run on.
fn jobs() -> Vec<(Module, Machine)> {
    let mut jobs = Vec::new();
    let same = |a: &Source, b: &Source| a.name == b.name;
    // The slowest first, so that no processor is left with one of them at the end.
    for source in [&sources::ATTENTION_BACKWARD, &sources::ATTENTION_FORWARD] {
        for head in [128, 64] {
            jobs.extend([SM90, SM80, SM100].map(|m| (Module::with_head(source, DType::Bf16, head), m)));
        }
    }
    jobs.push((Module::with_head(&sources::ATTENTION_FORWARD, DType::F16, 64), SM90));
    jobs.extend([DType::F32, DType::Bf16, DType::I8].map(|element| (Module::reduce(element), SM90)));
    jobs.extend([SM80, SM90].map(|m| (Module::with_head(&sources::ATTENTION_PLAIN, DType::F32, 128), m)));
    for &source in sources::ALL {
        let special = [&sources::ATTENTION_BACKWARD, &sources::ATTENTION_FORWARD, &sources::ATTENTION_PLAIN];
        if special.iter().any(|s| same(s, source)) {
            continue;
        }
        for element in [DType::Bf16, DType::F32] {
            jobs.extend([SM80, SM90].map(|machine| (Module::new(source, element), machine)));
        }
    }
    jobs
}

#[test]
fn every_kernel_compiles_and_attention_fits_its_registers() {
    let compiler = match Compiler::open(u32::MAX) {
        Ok(compiler) => compiler,
        Err(error) => return skip(&format!("CUDA kernels to machine code: {error}")),
    };
    let jobs = jobs();
    let results: Vec<Mutex<Option<Compiled>>> = jobs.iter().map(|_| Mutex::default()).collect();
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |n| n.get()) {
            scope.spawn(|| {
                while let Some((module, machine)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let compiled = compiler.compile(module, *machine);
                    let at = jobs.iter().position(|j| std::ptr::eq(&j.0, module)).expect("a job of the list");
                    *results[at].lock().unwrap() = Some(match compiled {
                        Ok((code, resources)) if code.starts_with(b"\x7fELF") => Ok(resources),
                        Ok(_) => Err(format!("{module} for {machine} is no ELF file")),
                        Err(error) => Err(error.to_string()),
                    });
                }
            });
        }
    });

    let (major, minor) = compiler.version();
    println!("NVRTC {major}.{minor} ({})", compiler.file());
    println!(
        "{:<24} {:<9} {:<24} {:>9} {:>6} {:>7} {:>7}",
        "module", "machine", "kernel", "registers", "stack", "spilled", "shared"
    );
    let mut wrong = Vec::new();
    for ((module, machine), result) in jobs.iter().zip(results) {
        let kernels = match result.into_inner().unwrap().expect("every job was done") {
            Ok(kernels) => kernels,
            Err(error) => {
                wrong.push(error);
                continue;
            }
        };
        if kernels.is_empty() {
            wrong.push(format!("the assembler said nothing of {module} for {machine}"));
        }
        for k in kernels {
            let spilled = k.spill_stores.max(k.spill_loads);
            println!(
                "{:<24} {:<9} {:<24} {:>9} {:>6} {:>7} {:>7}",
                module.to_string(),
                machine.to_string(),
                k.kernel,
                k.registers,
                k.stack,
                spilled,
                k.shared
            );
            if spilled > 0 && *machine == SM90 {
                wrong.push(format!("{} of {module} for {machine} spills {spilled} bytes", k.kernel));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Says why the test is skipped, and adds it to the list that `tests/run` prints at the end.
fn skip(reason: &str) {
    eprintln!("skipped: {reason}");
    if let Some(list) = std::env::var_os("CARAVAN_SKIPS") {
        let file = std::fs::OpenOptions::new().append(true).create(true).open(list);
        file.and_then(|mut file| writeln!(file, "{reason}")).expect("the list of skips");
    }
}
