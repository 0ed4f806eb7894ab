//! Every CUDA kernel compiled to machine code, without a GPU: that the compilers accept it for each architecture, and
//! that it fits the registers. Shows what each kernel takes.

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

/// Every kernel: for all architectures with the types that training uses, and for one with the others that it is made
/// for. Or, if not `all` are wanted, those for one architecture with f32, and for all with bf16.
fn jobs(all: bool) -> Vec<(Module, Machine)> {
    let same = |a: &Source, b: &Source| a.name == b.name;
    // The slowest first, so that no processor is left with one of them at the end.
    let tiled = |element| {
        let of =
            move |head| sources::TILED.iter().map(move |source| Module::with_head(source, element, head));
        [128, 64].into_iter().flat_map(of)
    };
    let mut everywhere: Vec<Module> = tiled(DType::Bf16).collect();
    everywhere.extend([128, 64].map(|head| Module::with_head(&sources::ATTENTION_PLAIN, DType::F32, head)));
    let has_heads =
        |source| sources::TILED.iter().chain([&&sources::ATTENTION_PLAIN]).any(|s| same(s, source));
    for &source in sources::ALL {
        if !has_heads(source) {
            everywhere.extend([DType::Bf16, DType::F32].map(|element| Module::new(source, element)));
        }
    }
    everywhere.extend([DType::Bf16, DType::F32].map(Module::reduce));
    let rest = [DType::F64, DType::F16, DType::I32, DType::I64, DType::U32, DType::U64, DType::I8, DType::U8];
    let odd = [(DType::F32, 6), (DType::Bf16, 16), (DType::F16, 40)];
    let odd = odd.map(|(element, head)| Module::with_head(&sources::ATTENTION_PLAIN, element, head));
    let half = sources::ALL.iter().filter(|source| !has_heads(source));
    let half = half.map(|source| Module::new(source, DType::F16));
    let once = tiled(DType::F16).chain(rest.map(Module::reduce)).chain(odd).chain(half);
    let once = once.map(|module| (module, SM90)).filter(|_| all);
    let machines = |module: Module| {
        let suits = move |machine: &Machine| module.source.only.is_none_or(|only| only == *machine);
        let wanted = move |machine: &Machine| all || module.element == DType::Bf16 || *machine == SM90;
        [SM90, SM80, SM100].into_iter().filter(suits).filter(wanted).map(move |machine| (module, machine))
    };
    everywhere.into_iter().flat_map(machines).chain(once).collect()
}

#[test]
fn every_kernel_compiles_for_every_architecture_and_fits_its_registers() {
    let mut seen = Vec::new();
    // The toolkits that are supported; a driver for CUDA 12 cannot load what NVRTC 13 makes.
    for newest in [13, 12] {
        match Compiler::open(newest) {
            Ok(compiler) if seen.contains(&compiler.version()) => {}
            Ok(compiler) => {
                everything_compiles(&compiler, &jobs(seen.is_empty()));
                seen.push(compiler.version());
            }
            Err(error) => {
                harness::skip_all(
                    &format!("CUDA kernels to machine code with NVRTC {newest}"),
                    &error.to_string(),
                );
            }
        }
    }
}

fn everything_compiles(compiler: &Compiler, jobs: &[(Module, Machine)]) {
    let results: Vec<Mutex<Option<Compiled>>> = jobs.iter().map(|_| Mutex::default()).collect();
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |n| n.get()) {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let Some((module, machine)) = jobs.get(at) else { return };
                    *results[at].lock().unwrap() = Some(match compiler.compile(module, *machine) {
                        Ok((code, resources)) if code.starts_with(b"\x7fELF") => Ok(resources),
                        Ok(_) => Err(format!("{module} for {machine} is no ELF file")),
                        Err(error) => Err(error.to_string()),
                    });
                }
            });
        }
    });

    let (major, minor) = compiler.version();
    let mut table = format!("NVRTC {major}.{minor} ({})\n", compiler.file());
    table += &format!(
        "{:<26} {:<9} {:<24} {:>9} {:>6} {:>7} {:>7}\n",
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
            table += &format!(
                "{:<26} {:<9} {:<24} {:>9} {:>6} {:>7} {:>7}\n",
                module.to_string(),
                machine.to_string(),
                k.kernel,
                k.registers,
                k.stack,
                spilled,
                k.shared
            );
            if k.serialized {
                wrong.push(format!(
                    "{} of {module} waits for each product with NVRTC {major}.{minor}",
                    k.kernel
                ));
            }
            // The loops that training spends its time in must not spill; elsewhere the assembler may put aside a few words.
            let tuned = *machine != SM100;
            if spilled > if tuned { 0 } else { 32 } {
                wrong.push(format!(
                    "{} of {module} for {machine} with NVRTC {major}.{minor} spills {spilled} bytes",
                    k.kernel
                ));
            }
        }
    }
    // Past the capture of test output.
    let _ = std::io::stderr().write_all(table.as_bytes());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
