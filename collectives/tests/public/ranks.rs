//! Runs a test's body as several processes: the test starts its own executable again, once per rank.

use collectives::bootstrap::spawn::{OnRequest, Report, supervise};
use collectives::bootstrap::{Ending, Identity, Options, shm_group};
use collectives::transport::{Request, Transport};
use collectives::{Communicator, Result};
use conformance::{Case, cases, each};
use harness::Waited;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Says to a process which test's rank it is.
const ROLE: &str = "CARAVAN_TEST_ROLE";
/// Says to a rank where its [`folder`] is.
const FOLDER: &str = "CARAVAN_TEST_FOLDER";

/// The name by which the harness knows the test that this is written in.
macro_rules! this_test {
    () => {{
        fn here() {}
        // "program::module::test::here"
        let name = std::any::type_name_of_val(&here);
        let test = name.split_once("::").and_then(|(_, name)| name.strip_suffix("::here"));
        // Of a closure's name there is no test, and no rank would run.
        test.filter(|test| !test.contains('{')).expect("a path of a test")
    }};
}
pub(crate) use this_test;

/// The command that runs the part of `test` that only a rank runs.
pub fn rank_of(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("the test's own path"));
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(ROLE, test).stdout(Stdio::null());
    command
}

/// Whether this process is a rank of `test`.
pub fn is_rank(test: &str) -> bool {
    std::env::var(ROLE).is_ok_and(|role| role == test)
}

/// In a rank: runs `body`. In the test itself: starts jobs of each size, and says how they ended.
pub fn job(test: &str, sizes: &[usize], body: impl FnOnce()) -> Vec<Report> {
    if is_rank(test) {
        body();
        // The ranks are done; what the test does with the reports is not theirs.
        std::process::exit(0);
    }
    let job_of = |&n: &usize| {
        let folder = tempfile::tempdir().expect("a folder");
        let rank = |_| {
            let mut command = rank_of(test);
            command.env(FOLDER, folder.path());
            command
        };
        supervise(n, OnRequest::EndAtOnce, rank).expect("a job")
    };
    sizes.iter().map(job_of).collect()
}

/// In a rank: the folder of its job, which goes with the job.
pub fn folder() -> PathBuf {
    std::env::var_os(FOLDER).expect("a folder").into()
}

/// As `job` with the connected transport, where every rank must succeed.
pub fn run(test: &str, sizes: &[usize], body: impl FnOnce(Box<dyn Transport>)) {
    for report in job(test, sizes, || body(connect().expect("a group"))) {
        assert_eq!(report.exit_code(), 0, "{:?}", report.sentence());
    }
}

/// Runs the cases after which nothing of a job works any more, each in jobs of its own, of these sizes. Some rank fails, as
/// it should; but none panics over it, has to be killed or hangs.
pub fn failures(test: &str, sizes: &[usize], connect: impl FnOnce() -> Result<Box<dyn Transport>>) {
    const CASE: &str = "CARAVAN_TEST_CASE";
    let failing: Vec<Case> = cases().into_iter().filter(|c| c.fails).collect();
    if is_rank(test) {
        let name = std::env::var(CASE).expect("a case");
        let case = failing.iter().find(|c| c.name == name).expect("a known case");
        let mut transport = connect().expect("a group");
        // Once all have come: who is still on the way would be told of the failure there.
        let all: Vec<usize> = (0..transport.size()).collect();
        let meeting = transport.subgroup(&all, 1, PATIENCE).expect("a group");
        let meeting = Communicator::new(meeting, collectives::Options::default()).expect("a communicator");
        meeting.barrier().expect("all come");
        (case.run)(Communicator::new(transport, (case.options)()).expect("a communicator"));
        std::process::exit(0);
    }
    each(&failing, |case| {
        for &n in sizes {
            let start = Instant::now();
            let with_case = |_| {
                let mut command = rank_of(test);
                command.env(CASE, case.name);
                command
            };
            let report = supervise(n, OnRequest::EndAtOnce, with_case).expect("a job");
            let fine = report.killed.is_empty() && report.endings.iter().all(|e| *e == Ending::Exited(0));
            assert!(fine, "{} with {n} ranks: {:?}", case.name, report.sentence());
            println!("{n} ranks, {}: {:.2?}", case.name, start.elapsed());
        }
    });
}

/// The transport of this rank.
pub fn connect() -> Result<Box<dyn Transport>> {
    shm_group(&identity(), &options())
}

/// This rank's identity.
pub fn identity() -> Identity {
    Identity::from_env().expect("good variables").expect("a rank")
}

/// A hang should fail soon.
pub const PATIENCE: Duration = Duration::from_secs(30);

pub fn options() -> Options {
    Options { timeout: PATIENCE, ..Options::default() }
}

/// A rank that waits for longer, or that is waited for as long, hangs.
const HANG: Duration = PATIENCE.saturating_mul(4);

/// Fails a rank that hangs: called at each look at what it waits for.
pub fn not_for_ever(waited: &mut Waited) {
    assert!(waited.so_far() < HANG, "not within {HANG:?}");
}

/// Waits for processes that were started by hand, killing those that hang.
pub fn finish(children: Vec<Child>) -> Vec<Output> {
    let mut waited = Waited::begin();
    let end = |mut child: Child| {
        while child.try_wait().expect("a child").is_none() {
            if waited.so_far() > HANG {
                child.kill().expect("our own");
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        child.wait_with_output().expect("ended")
    };
    children.into_iter().map(end).collect()
}

/// Waits as an engine does: looks, spins a little, yields, parks, and notices lost peers. Fails when that hangs.
pub fn until<T>(
    transport: &mut dyn Transport,
    mut look: impl FnMut(&mut dyn Transport) -> Result<Option<T>>,
) -> Result<T> {
    let mut waited = Waited::begin();
    for tries in 0u64.. {
        if let Some(found) = look(transport)? {
            return Ok(found);
        }
        match tries {
            0..100 => std::hint::spin_loop(),
            100..110 => std::thread::yield_now(),
            _ => {
                if let Err(lost) = transport.check() {
                    // What the peer sent before it went may be all that was missing.
                    return look(transport)?.ok_or(lost);
                }
                not_for_ever(&mut waited);
                transport.park(Duration::from_millis(50));
            }
        }
    }
    unreachable!("u64 tries")
}

/// Waits for a request.
pub fn wait(transport: &mut dyn Transport, request: Request) -> Result<()> {
    until(transport, |t| Ok(t.test(request)?.then_some(())))
}

/// Bytes that differ for each rank and call.
pub fn pattern(rank: usize, call: u64, bytes: usize) -> Vec<u8> {
    let mut state = call.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (rank as u64 + 1) << 40;
    (0..bytes)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .collect()
}
