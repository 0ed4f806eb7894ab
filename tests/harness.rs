//! What tests share: running the program with a way out of hangs, looking for what it left behind, and saying
//! which tests are skipped and why.

mod counting;
mod fake_cuda;
mod outcome;
pub mod ports;

pub use counting::Counting;
pub use fake_cuda::{fake_cuda, fake_nvrtc};
pub use outcome::{Outcome, Waited};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// A program that runs longer than this hangs. No test measures time by it.
const HANG: Duration = Duration::from_secs(240);
/// How often is looked at a program that runs.
const LOOK: Duration = Duration::from_millis(5);
/// The variable by which processes of one test are found.
const TAG: &str = "CARAVAN_TEST_TAG";

/// What begins like this tells a program of a launcher, or how to run: the tests may themselves run below one.
const FOREIGN: [&str; 9] =
    ["CARAVAN_", "OMPI_", "PMI_", "PMIX_", "MPI_LOCAL", "MV2_COMM_WORLD_", "SLURM_", "NCCL_TESTS_", "UCX_"];
/// And what of it is for tests, or says where something lies.
const KEPT: [&str; 3] = ["CARAVAN_CUDA_LIBRARIES", "CARAVAN_CACHE", "CARAVAN_SKIPS"];

const NO_CXX: &str = "no C++ compiler ($CXX, c++, g++ or clang++)";

/// Operations of `caravan bench` that move data.
pub const OPERATIONS: [&str; 9] = [
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "send_recv",
];

/// `caravan train` for ever, which writes metrics and would save a model. [`Bench::endless`] starts it.
pub const ENDLESS: &str = "train --model nano --data text.txt --steps 100000000 --micro-batch 1 --metrics m.jsonl \
                           --save out";

/// One program under test, with a scratch folder that goes when it goes.
pub struct Bench {
    program: PathBuf,
    folder: tempfile::TempDir,
    tag: String,
    /// Processes whose end was waited for, whose shared memory has to be gone.
    ended: Mutex<Vec<u32>>,
}

/// A test that fails between two waits leaves nothing that would slow down those after it.
impl Drop for Bench {
    fn drop(&mut self) {
        self.kill_all();
    }
}

impl Bench {
    /// For the program at this path, usually `env!("CARGO_BIN_EXE_caravan")`.
    pub fn new(program: &str) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let tag = format!("{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let folder = tempfile::tempdir().expect("a scratch folder");
        Bench { program: program.into(), folder, tag, ended: Mutex::default() }
    }

    /// A path in the scratch folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes a file in the scratch folder.
    pub fn file(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(&path, content).expect("a file");
        path
    }

    /// A file of the scratch folder that holds one JSON value.
    #[track_caller]
    pub fn json(&self, name: &str) -> Value {
        let text = fs::read_to_string(self.path(name)).expect("the file is there");
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e} in: {text}"))
    }

    /// Text of this many bytes that a model can learn something from, the same on every call.
    pub fn text(&self, name: &str, bytes: usize) -> PathBuf {
        let words = ["many", "ranks", "carry", "one", "model", "over", "the", "pass", "before", "winter"];
        let mut text = String::new();
        let mut state = 7u32;
        while text.len() < bytes {
            state = state.wrapping_mul(1664525).wrapping_add(1013904223);
            text.push_str(words[(state >> 24) as usize % words.len()]);
            text.push(if state >> 29 == 0 { '\n' } else { ' ' });
        }
        self.file(name, &text.as_bytes()[..bytes])
    }

    /// The program with these arguments, in the scratch folder, not yet started. Arguments are split at spaces.
    pub fn command(&self, args: &str) -> Command {
        let mut command = Command::new(&self.program);
        command.args(args.split_whitespace());
        self.prepare(&mut command);
        command
    }

    /// Sets folder, environment, pipes and signals of any command of this test.
    pub fn prepare(&self, command: &mut Command) {
        command
            .current_dir(self.folder.path())
            .env(TAG, &self.tag)
            .env_remove("RUST_BACKTRACE")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        for (name, _) in std::env::vars_os() {
            let foreign =
                |name: &str| FOREIGN.iter().any(|begin| name.starts_with(begin)) && !KEPT.contains(&name);
            let chosen = command.get_envs().any(|(set, _)| set == name);
            if !chosen && name.to_str().is_some_and(foreign) {
                command.env_remove(name);
            }
        }
        take_signals(command);
    }

    /// Runs the program to its end.
    #[track_caller]
    pub fn run(&self, args: &str) -> Outcome {
        self.outcome(&mut self.command(args))
    }

    /// Runs a command of this test to its end.
    #[track_caller]
    pub fn outcome(&self, command: &mut Command) -> Outcome {
        self.finish(command.spawn().expect("the program starts"))
    }

    /// Waits for a started command of this test; kills it, and fails, if it hangs, or if what it started keeps its output
    /// open when it has ended. A stream that goes elsewhere, or that the test has taken, counts as empty.
    #[track_caller]
    pub fn finish(&self, child: Child) -> Outcome {
        self.finish_within(child, HANG)
    }

    #[track_caller]
    fn finish_within(&self, mut child: Child, patience: Duration) -> Outcome {
        let collect = |stream: Option<Box<dyn Read + Send>>| {
            let (whole, output) = channel();
            std::thread::spawn(move || {
                let mut bytes = Vec::new();
                let read = stream.map_or(Ok(0), |mut stream| stream.read_to_end(&mut bytes));
                // Nobody takes it where the test has failed meanwhile.
                let _ = whole.send(read.map(|_| String::from_utf8_lossy(&bytes).into_owned()));
            });
            output
        };
        let stdout = collect(child.stdout.take().map(|stream| Box::new(stream) as _));
        let stderr = collect(child.stderr.take().map(|stream| Box::new(stream) as _));
        let mut waited = Waited::begin();
        let status = loop {
            let took = waited.so_far();
            if let Some(status) = child.try_wait().expect("a child to wait for") {
                break status;
            }
            if took > patience {
                self.kill_all();
                let _ = child.wait();
                let said =
                    stderr.recv_timeout(patience).map(|text| text.unwrap_or_default()).unwrap_or_default();
                panic!("the program hangs after {patience:?}; it said: {said}");
            }
            std::thread::sleep(LOOK);
        };
        self.ended.lock().expect("no test has failed in it").push(child.id());
        let since = waited.so_far();
        let mut text = |output: Receiver<std::io::Result<String>>| loop {
            let text = output.recv_timeout(LOOK);
            let took = waited.so_far() - since;
            match text {
                Ok(text) => break text.expect("output"),
                Err(_) if took <= patience => {}
                Err(_) => {
                    let left = self.kill_all();
                    panic!(
                        "the program has ended ({status}), and its output is open after {patience:?}: {left} are left"
                    );
                }
            }
        };
        let (stdout, stderr) = (text(stdout), text(stderr));
        Outcome { code: status.code(), stdout, stderr, took: waited.so_far() }
    }

    /// Kills what is left of this test; gives it by number and name.
    fn kill_all(&self) -> String {
        let named = |pid: &u32| {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            signal(*pid, Signal::KILL);
            format!("{pid} ({})", name.trim())
        };
        self.processes().iter().map(named).collect::<Vec<_>>().join(", ")
    }

    /// Returns a started command of this test once `happened`; fails if it ends before that, or hangs. `what` is what has to
    /// happen.
    #[track_caller]
    pub fn until(&self, mut child: Child, what: &str, mut happened: impl FnMut() -> bool) -> Child {
        let deadline = Instant::now() + HANG;
        while !happened() {
            if child.try_wait().expect("a child to wait for").is_some() {
                panic!("the run ended by itself before {what}: {:?}", self.finish(child));
            }
            if Instant::now() > deadline {
                self.kill_all();
                panic!("not within {HANG:?}: {what}; {:?}", self.finish(child));
            }
            std::thread::sleep(LOOK);
        }
        child
    }

    /// Whether the program can use this transport here; a skip with the reason if not.
    pub fn offers(&self, transport: &str) -> bool {
        let doctor = self.run("doctor --json").success().json();
        let rows = doctor["transports"].as_array().cloned().unwrap_or_default();
        let row = rows.into_iter().find(|row| row["name"] == transport).expect("a row about it");
        if row["usable"] == false {
            skip(&format!("{transport}: {}", row["remark"].as_str().unwrap_or_default()));
        }
        row["usable"] == true
    }

    /// Starts a command that runs [`ENDLESS`] and waits until its first steps are done.
    #[track_caller]
    pub fn endless(&self, mut command: Command) -> Child {
        self.text("text.txt", 20_000);
        let child = command.spawn().expect("the program starts");
        let steps = || fs::read_to_string(self.path("m.jsonl")).map_or(0, |text| text.lines().count());
        self.until(child, "its first steps are done", || steps() > 3)
    }

    /// Fails the test if an endless run that was ended left a process, a segment, a model, or half a line.
    #[track_caller]
    pub fn nothing_half_written(&self) {
        self.nothing_left();
        json_lines(&self.path("m.jsonl"));
        assert_eq!(self.names(), ["m.jsonl", "text.txt"]);
    }

    /// What a training of four steps has left: losses and norms with all digits, and the bytes of the `saved` weights.
    #[track_caller]
    pub fn trace(&self, metrics: &str, saved: &str) -> (Vec<String>, Vec<u8>) {
        let lines = json_lines(&self.path(metrics));
        let shown = |l: &Value| format!("{} {}", l["loss"], l["grad_norm"]);
        let mut steps: Vec<String> = lines.iter().filter(|l| l["step"].is_u64()).map(shown).collect();
        assert_eq!(steps.len(), 4, "{metrics}");
        steps.push(lines[lines.len() - 1]["summary"]["validation_loss"].to_string());
        (steps, fs::read(self.path(saved).join("model.safetensors")).expect("weights"))
    }

    /// What is in the scratch folder, sorted.
    pub fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.folder.path()).expect("the scratch folder").flatten();
        let mut names: Vec<_> = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    /// Processes that this test started and that still run, the program's ranks among them.
    pub fn processes(&self) -> Vec<u32> {
        let mark = format!("{TAG}={}\0", self.tag);
        let ids = fs::read_dir("/proc").expect("/proc").flatten();
        let ids = ids.filter_map(|entry| entry.file_name().to_string_lossy().parse::<u32>().ok());
        let ours = |pid: &u32| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.windows(mark.len()).any(|w| w == mark.as_bytes())
        };
        ids.filter(ours).collect()
    }

    /// Those of [`processes`](Self::processes) that run this program.
    pub fn processes_of(&self, program: &str) -> Vec<u32> {
        let runs = |pid: &u32| {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            name.trim() == program
        };
        self.processes().into_iter().filter(runs).collect()
    }

    /// The ranks among [`processes`](Self::processes) that the program started itself: (rank, process).
    pub fn ranks(&self) -> Vec<(usize, u32)> {
        self.ranks_by("CARAVAN_RANK")
    }

    /// Those whose rank is in this variable of their environment.
    pub fn ranks_by(&self, variable: &str) -> Vec<(usize, u32)> {
        let variable = format!("{variable}=");
        let rank_of = |pid: u32| {
            let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
            let mut entries = environment.split(|&b| b == 0);
            let entry = entries.find_map(|e| e.strip_prefix(variable.as_bytes()))?;
            Some((std::str::from_utf8(entry).ok()?.parse().ok()?, pid))
        };
        let mut ranks: Vec<(usize, u32)> = self.processes().into_iter().filter_map(rank_of).collect();
        ranks.sort();
        ranks
    }

    /// Fails the test if a process or a shared-memory segment outlived the program.
    #[track_caller]
    pub fn nothing_left(&self) {
        // What was killed may still be leaving.
        let deadline = Instant::now() + Duration::from_secs(5);
        while !self.processes().is_empty() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(self.processes(), Vec::<u32>::new(), "processes are left");
        // What is UCX's names the process whose it is, perhaps one of another test.
        let ended = self.ended.lock().expect("no test has failed in it");
        let ours = |name: &str| match name.strip_prefix("caravan-ucx-") {
            Some(of) => ended.iter().any(|id| of.starts_with(&format!("{id}-"))),
            None => true,
        };
        let left: Vec<_> = in_shared_memory("caravan").into_iter().filter(|name| ours(name)).collect();
        assert!(left.is_empty(), "segments are left: {left:?}");
    }
}

/// Has the command take the signals that end a run, also where this process ignores them, as what a script starts in the
/// background does.
pub fn take_signals(command: &mut Command) {
    unsafe extern "C" {
        /// The C library's, with which every Rust program is linked.
        fn signal(number: i32, handler: usize) -> usize;
    }
    const DEFAULT: usize = 0;
    let reset = || {
        for name in [Signal::INT, Signal::QUIT, Signal::TERM, Signal::USR1, Signal::HUP] {
            // SAFETY: an async-signal-safe call that touches no memory.
            unsafe { signal(name.as_raw(), DEFAULT) };
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes only system calls.
    unsafe { command.pre_exec(reset) };
}

/// Names in `/dev/shm` that begin like this.
pub fn in_shared_memory(prefix: &str) -> Vec<String> {
    let names = fs::read_dir("/dev/shm").into_iter().flatten().flatten().map(|e| e.file_name());
    names.map(|name| name.to_string_lossy().into_owned()).filter(|name| name.starts_with(prefix)).collect()
}

/// Sends a signal to a process that a test started.
pub fn signal(pid: u32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid as i32) {
        // It may be gone already.
        let _ = kill_process(pid, signal);
    }
}

/// The lines of a metrics file.
#[track_caller]
pub fn json_lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    // Nothing yet where the program was ended before its first line.
    assert!(text.is_empty() || text.ends_with('\n'), "the last line of {} is whole", path.display());
    text.lines().map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{e} in: {l}"))).collect()
}

/// Whether this program can be started here; a skip if not.
pub fn installed(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let there = std::env::split_paths(&path).any(|dir| dir.join(program).is_file());
    if !there {
        skip(&format!("{program} is not installed"));
    }
    there
}

/// The C++ compiler that emulated devices would take, if there is one; a skip of `what` if not.
pub fn cxx(what: &str) -> Option<String> {
    let names = std::env::var("CXX").into_iter().chain(["c++", "g++", "clang++"].map(String::from));
    let found = names.into_iter().find(|name| Command::new(name).arg("--version").output().is_ok());
    if found.is_none() {
        skip(&format!("{what}: {NO_CXX}"));
    }
    found
}

/// What a C++ compiler has made, if there is one; a skip of all of `what` if not.
pub fn made_by_cxx<T>(what: &str, made: Option<T>) -> Option<T> {
    if made.is_none() {
        skip_all(what, NO_CXX);
    }
    made
}

/// Says that the current test is skipped and why, past the capture of test output; `tests/run` repeats it.
pub fn skip(reason: &str) {
    skip_all(std::thread::current().name().unwrap_or("a test"), reason);
}

/// The same of several tests that miss the same: `what` they are about. Call it once for all of them.
pub fn skip_all(what: &str, reason: &str) {
    let line = format!("{what}: {reason}\n");
    let _ = std::io::stderr().write_all(format!("skipped {line}").as_bytes());
    if let Some(path) = std::env::var_os("CARAVAN_SKIPS") {
        let file = fs::OpenOptions::new().append(true).create(true).open(path);
        let _ = file.and_then(|mut f| f.write_all(line.as_bytes()));
    }
}

/// A file of the `shared` folder beside the checkout, or a skip that says that it is missing.
pub fn shared(name: &str) -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared").join(name);
    let path = path.canonicalize().ok();
    if path.is_none() {
        skip(&format!("there is no ../shared/{name} beside this checkout"));
    }
    path
}

/// GiB beyond the memory of this machine; 1024 on most.
pub fn more_than_memory() -> u64 {
    (memory() >> 20).next_power_of_two().max(512) * 2
}

/// KiB of this machine's memory.
pub fn memory() -> u64 {
    let told = fs::read_to_string("/proc/meminfo").expect("/proc/meminfo");
    let total = told.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB"));
    total.and_then(|text| text.parse().ok()).expect("MemTotal in /proc/meminfo")
}

/// Whether this process may do what only root may.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Whether this machine has NVIDIA's driver: the kernel's part, or a library that the loader finds (as under WSL2).
pub fn nvidia_driver() -> bool {
    const LIBRARY: &str = "libcuda.so.1";
    let known = |ldconfig: &str| {
        let told = Command::new(ldconfig).arg("-p").output();
        told.is_ok_and(|told| String::from_utf8_lossy(&told.stdout).contains(LIBRARY))
    };
    let folders = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    fs::exists("/proc/driver/nvidia/version").unwrap_or(false)
        || std::env::split_paths(&folders).any(|folder| folder.join(LIBRARY).exists())
        || ["ldconfig", "/sbin/ldconfig"].into_iter().any(known)
}

#[cfg(test)]
#[path = "harness/tests.rs"]
mod tests;
