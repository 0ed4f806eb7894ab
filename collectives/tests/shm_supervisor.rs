//! What a supervised job leaves behind when its supervisor is killed or interrupted: nothing. Not in the usual
//! harness, whose second thread would take the signals.

use collectives::bootstrap::spawn::{OnRequest, supervise};
use collectives::bootstrap::{Identity, Options, shm_group};
use harness::Bench;
use rustix::process::{Pid, Signal, kill_process};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio, exit};
use std::time::{Duration, Instant};

fn main() {
    // Whoever asks what there is, as tests/run does, runs nothing.
    if std::env::args().any(|word| word == "--list") {
        return;
    }
    match std::env::var("SUPERVISOR_TEST").as_deref() {
        Ok("supervisor") => supervise_ranks(),
        Ok(_) => wait_as_rank(),
        Err(_) => {
            for (signal, code) in [(Signal::KILL, None), (Signal::INT, Some(130)), (Signal::TERM, Some(143))]
            {
                assert_eq!(ended_by(signal), code, "{signal:?}");
                println!("test a supervisor ended by {signal:?} leaves nothing behind ... ok");
            }
            stops_and_goes_on();
            println!("test a stopped supervisor stops its ranks ... ok");
        }
    }
}

/// What ends all that a test has started when the test ends, however that does.
fn bench() -> Bench {
    Bench::new("none: each command is this program again")
}

/// This program in another role.
fn again(role: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("the test's own path"));
    // A group of its own, whose parent could let it go on: the kernel stops no other.
    command.process_group(0).env("SUPERVISOR_TEST", role);
    command
}

/// A supervisor of its own whose ranks write their numbers into the scratch folder and then wait; and those numbers.
fn supervisor(bench: &Bench) -> (Child, Vec<u32>) {
    let mut command = again("supervisor");
    bench.prepare(&mut command);
    command.env("PIDS", bench.path(".")).stdout(Stdio::inherit()).stderr(Stdio::inherit());
    let child = command.spawn().expect("a supervisor");
    let pid = |rank: usize| std::fs::read_to_string(bench.path(&rank.to_string())).ok()?.parse().ok();
    let all = || [0, 1, 2].into_iter().map(pid).collect::<Option<Vec<u32>>>();
    let mut pids = None;
    until("three ranks have begun", || {
        pids = all();
        pids.is_some()
    });
    (child, pids.expect("three ranks"))
}

fn supervise_ranks() {
    exit(
        supervise(3, OnRequest::EndAtOnce, |_| again("rank")).map_or(99, |report| report.exit_code().into()),
    );
}

fn wait_as_rank() {
    let me = Identity::from_env().expect("good variables").expect("a rank");
    let mut t = shm_group(&me, &Options::default()).expect("a group");
    let _memory = t.alloc(1 << 20).expect("memory");
    let directory = PathBuf::from(std::env::var_os("PIDS").expect("a directory"));
    let (partial, whole) =
        (directory.join(format!("{}.new", t.rank())), directory.join(t.rank().to_string()));
    std::fs::write(&partial, std::process::id().to_string()).expect("written");
    std::fs::rename(partial, whole).expect("renamed");
    // A rank that is busy elsewhere and notices nothing; it ends at last where nobody is left to end it.
    std::thread::sleep(Duration::from_secs(120));
}

/// The state of a process as ps shows it; Z when it is no more.
fn state(pid: u32) -> char {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()).unwrap_or('Z')
}

fn runs(pid: u32) -> bool {
    !matches!(state(pid), 'Z' | 'X')
}

/// Ctrl-Z at a terminal reaches only the supervisor.
fn stops_and_goes_on() {
    let bench = bench();
    let (child, pids) = supervisor(&bench);
    let parent = Pid::from_child(&child);
    let all_are = |wanted: fn(char) -> bool| {
        until("all are in that state", || pids.iter().chain([&child.id()]).all(|&p| wanted(state(p))));
    };
    kill_process(parent, Signal::TSTP).expect("sent");
    all_are(|s| s == 'T');
    kill_process(parent, Signal::CONT).expect("sent");
    all_are(|s| s != 'T');
    kill_process(parent, Signal::TERM).expect("sent");
    assert_eq!(bench.finish(child).code, Some(143));
    await_end(&pids);
}

fn await_end(pids: &[u32]) {
    until("no rank is left", || !pids.iter().any(|&p| runs(p)));
}

/// Waits until it is `done`, but not for ever.
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !done() {
        assert!(Instant::now() < end, "{what}: not within a minute");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Files in /dev/shm and abstract sockets that could be of the job that process `id` supervised.
fn left_behind(id: u32) -> Vec<String> {
    let files = std::fs::read_dir("/dev/shm").into_iter().flatten().flatten();
    let files = files.map(|f| f.file_name().to_string_lossy().into_owned());
    // What other jobs over UCX have there has their supervisors' numbers.
    let own = format!("caravan-ucx-{id}-");
    let ours = |name: &String| {
        name.contains("caravan") && (name.starts_with(&own) || !name.starts_with("caravan-ucx-"))
    };
    let files = files.filter(ours);
    let job = format!("spawn-{id}-");
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
    files.chain(sockets.lines().filter(|l| l.contains(&job)).map(str::to_owned)).collect()
}

fn ended_by(signal: Signal) -> Option<i32> {
    let bench = bench();
    let (child, pids) = supervisor(&bench);
    let id = child.id();
    kill_process(Pid::from_child(&child), signal).expect("sent");
    let outcome = bench.finish(child);
    await_end(&pids);
    assert_eq!(left_behind(id), Vec::<String>::new());
    outcome.code
}
