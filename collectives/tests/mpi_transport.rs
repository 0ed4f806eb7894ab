//! The MPI transport under the mpirun of the library that this is built against. The ranks are this test program
//! again, as `rank_process`. Needs the feature `mpi`; both libraries are tested by building twice:
//! `MPICC=mpicc.openmpi cargo test --features mpi` and `MPICC=mpicc.mpich cargo test --features mpi`, each with a
//! target folder of its own.
#![cfg(feature = "mpi")]

mod p2p;

use collectives::bootstrap::Identity;
use collectives::conformance::{Case, cases};
use collectives::schedule::{Call, Kind};
use collectives::transport::mpi::{MpiTransport, library};
use collectives::transport::{Tag, Transport};
use collectives::{Buffer, Communicator, DType, Error, Options, Progress, ReduceOp, bf16};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

const CASE: &str = "CARAVAN_TEST_CASE";
/// Where ranks leave a file each when they are done.
const FOLDER: &str = "CARAVAN_TEST_FOLDER";

/// The launcher that belongs to the library, with what it needs to start any number of ranks here.
fn launcher() -> Option<Command> {
    let (names, flags): (&[&str], &[&str]) = match library() {
        l if l.starts_with("Open MPI") => {
            (&["mpirun.openmpi", "mpirun"], &["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"])
        }
        l if l.starts_with("MPICH") => (&["mpirun.mpich", "mpirun"], &[]),
        l => {
            println!("skipped: no launcher is known for {l}");
            return None;
        }
    };
    let found = |name: &&&str| {
        Command::new(name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
    };
    match names.iter().find(found) {
        None => {
            println!("skipped: {} is not there", names.join(" or "));
            None
        }
        Some(name) => {
            let mut command = Command::new(name);
            command.args(flags);
            Some(command)
        }
    }
}

/// Runs `ranks` ranks of `case`; nothing where there is no launcher.
fn run(case: &str, ranks: usize) -> Option<Output> {
    let folder = tempfile::tempdir().unwrap();
    let mut child = launcher()?
        .args(["-n", &ranks.to_string()])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "rank_process", "--nocapture"])
        .env(CASE, case)
        .env(FOLDER, folder.path())
        // This program's own backtraces would bury what is looked for.
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let pipes = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let reader = |mut pipe: Box<dyn std::io::Read + Send>| {
        std::thread::spawn(move || {
            let mut all = Vec::new();
            pipe.read_to_end(&mut all).map(|_| all)
        })
    };
    let (out, err) = (reader(Box::new(pipes.0)), reader(Box::new(pipes.1)));
    let until = Instant::now() + 3 * p2p::PATIENCE;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > until {
            // The launcher ends its ranks when it is asked to end.
            let _ = Command::new("kill").args(["-TERM", &child.id().to_string()]).status();
            std::thread::sleep(Duration::from_secs(2));
            let _ = child.kill();
            panic!("{case} with {ranks} ranks hangs");
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    Some(Output { status, stdout: out.join().unwrap().unwrap(), stderr: err.join().unwrap().unwrap() })
}

fn text(output: &Output) -> String {
    format!("{}\n{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn passes(case: &str, ranks: usize) {
    if let Some(output) = run(case, ranks) {
        let all = text(&output);
        assert!(output.status.success(), "{case} with {ranks} ranks ({}):\n{all}", library());
        // Each rank has really run it.
        assert_eq!(all.matches("rank done").count(), ranks, "{case} with {ranks} ranks:\n{all}");
    }
}

/// One rank of the case that the environment names; nothing when this is run as an ordinary test.
#[test]
fn rank_process() {
    let Ok(case) = std::env::var(CASE) else { return };
    if case == "one_thread" {
        return one_thread();
    }
    let mut t = MpiTransport::world().unwrap();
    match case.as_str() {
        "suite" => {
            // The launcher's view and MPI's agree.
            let me = Identity::from_env().unwrap().unwrap();
            assert_eq!((me.rank, me.world), (t.rank(), t.size()));
            p2p::suite(&mut t);
            // Large messages in several parts.
            t.split_above(20_000);
            p2p::suite(&mut t);
        }
        "wrong_lengths" => p2p::wrong_lengths(&mut t),
        "conformance" => conformance(&mut t, |case| !case.fails, Progress::Inline),
        "threads" => conformance(
            &mut t,
            |case| case.name.contains("flight") || case.name == "split",
            Progress::Thread { cpu: None },
        ),
        "native" => native(&t),
        "second_start" => {
            let again = MpiTransport::world().unwrap();
            assert_eq!((again.rank(), again.size()), (t.rank(), t.size()));
            drop((t, again));
            let error = MpiTransport::world().err().expect("MPI cannot start again").to_string();
            assert!(error.contains("cannot be started again"), "{error}");
            println!("rank done");
            return;
        }
        "users_tags" => users_tags(t),
        "own_words" => {
            // SAFETY: MPI looks at the address and refuses, so nothing is read.
            let error =
                unsafe { t.send(0, Tag(1), std::ptr::null(), 100) }.expect_err("no address").to_string();
            for words in [library().as_str(), "MPI_Isend on rank", "nvalid buffer pointer"] {
                assert!(error.contains(words), "'{words}' is not in: {error}");
            }
            p2p::barrier(&mut t, 1);
        }
        "early_leaver" => return early_leaver(t),
        // The last rank dies without a word; the launcher must end the others, who wait for it.
        "killed" => {
            if t.rank() == t.size() - 1 {
                p2p::barrier(&mut t, 1);
                std::process::abort();
            }
            let from = t.size() - 1;
            println!("error: {}", p2p::barrier_and_wait_for_nothing(&mut t, from));
        }
        "panics" => {
            if t.rank() == 1 {
                p2p::barrier(&mut t, 1);
                panic!("something impossible");
            }
            println!("error: {}", p2p::barrier_and_wait_for_nothing(&mut t, 1));
        }
        // An error that unwinds as errors do: told to the peers, then the transport goes, then a code for the launcher.
        "fails" => {
            let code = if t.rank() == 1 {
                p2p::barrier(&mut t, 1);
                let error = Error::system("writing the checkpoint", "No space left on device");
                t.abort(&error);
                eprintln!("error: {error}");
                1
            } else {
                let error = p2p::barrier_and_wait_for_nothing(&mut t, 0);
                eprintln!("error: {error}");
                2
            };
            drop(t);
            std::process::exit(code);
        }
        // One case after which MPI may be of no use any more.
        other => {
            let all = cases();
            let case = all.iter().find(|c| c.fails && c.name == other).expect("a known case");
            let group = t.subgroup(&(0..t.size()).collect::<Vec<_>>(), 1).unwrap();
            (case.run)(Communicator::new(group, (case.options)()).unwrap());
            all_are_done(&t);
        }
    }
    println!("rank done");
}

/// MPI that was started for one thread works there, and refuses others.
fn one_thread() {
    let mut t = MpiTransport::world_of_this_thread().unwrap();
    p2p::sizes(&mut t, &[3, 5000, 100_000]);
    conformance(&mut t, |case| !case.fails && case.name.contains("all_reduce"), Progress::Inline);
    let group = t.subgroup(&(0..t.size()).collect::<Vec<_>>(), 1).unwrap();
    let comm = Communicator::new(group, Options::default()).unwrap();
    comm.barrier().unwrap();
    let elsewhere = std::thread::scope(|scope| scope.spawn(|| comm.barrier()).join().unwrap());
    let text = elsewhere.expect_err("another thread").to_string();
    assert!(text.contains("of one thread only"), "{text}");
    all_are_done(&t);
}

fn conformance(t: &mut MpiTransport, wanted: fn(&Case) -> bool, progress: Progress) {
    let all: Vec<usize> = (0..t.size()).collect();
    for (number, case) in cases().iter().enumerate() {
        if !wanted(case) {
            continue;
        }
        if t.rank() == 0 {
            eprintln!("{}", case.name);
        }
        let group = t.subgroup(&all, number as u64).unwrap();
        let options = Options { progress, ..(case.options)() };
        (case.run)(Communicator::new(group, options).unwrap());
    }
}

/// Returns when all ranks have come here, without MPI: a launcher ends the others when one ends without MPI_Finalize.
fn all_are_done(t: &MpiTransport) -> ! {
    let (rank, size) = (t.rank(), t.size());
    println!("rank done");
    let folder = std::path::PathBuf::from(std::env::var(FOLDER).unwrap());
    std::fs::write(folder.join(rank.to_string()), "").unwrap();
    let until = Instant::now() + p2p::PATIENCE;
    while !(0..size).all(|r| folder.join(r.to_string()).exists()) {
        assert!(Instant::now() < until, "the other ranks are not done");
        std::thread::sleep(Duration::from_millis(5));
    }
    std::process::exit(0);
}

/// Exactly summable data, so that MPI's order of summation does not matter.
fn native(t: &MpiTransport) {
    let (rank, n) = (t.rank(), t.size());
    let native = t.native().unwrap();
    let count = 1000;
    let whole: Vec<f32> = (0..n * count).map(|i| (i % 97 + rank) as f32).collect();
    let sum: Vec<f32> = (0..n * count).map(|i| (0..n).map(|r| (i % 97 + r) as f32).sum()).collect();
    let own = rank * count..(rank + 1) * count;
    let gathered: Vec<f32> = (0..n * count).map(|i| (i % 97 + i / count) as f32).collect();
    let shard: Vec<f32> = gathered[own.clone()].to_vec();
    let call = |kind, count| Call::new(kind, DType::F32, count);
    let rooted = |kind, count| Call { root: n - 1, ..call(kind, count) };

    let mut out = vec![0.0; count];
    native.run(call(Kind::ReduceScatter, count), &whole, &mut out).unwrap();
    assert_eq!(out, sum[own.clone()]);
    let mut data = whole.clone();
    native.run_in_place(call(Kind::ReduceScatter, count), &mut data).unwrap();
    assert_eq!(data[own.clone()], sum[own.clone()]);
    let mut all = vec![0.0; n * count];
    native.run(call(Kind::AllGather, count), &shard, &mut all).unwrap();
    assert_eq!(all, gathered);
    let mut data = vec![0.0; n * count];
    data[own.clone()].copy_from_slice(&shard);
    native.run_in_place(call(Kind::AllGather, count), &mut data).unwrap();
    assert_eq!(data, gathered);
    let mut out = vec![0.0; n * count];
    native.run(call(Kind::AllReduce, n * count), &whole, &mut out).unwrap();
    assert_eq!(out, sum);
    let mut data = whole.clone();
    native.run_in_place(call(Kind::AllReduce, n * count), &mut data).unwrap();
    assert_eq!(data, sum);
    let max = Call { op: ReduceOp::Max, ..call(Kind::AllReduce, count) };
    native.run(max, &whole[..count], &mut out[..count]).unwrap();
    assert_eq!(out[..count], (0..count).map(|i| (i % 97 + n - 1) as f32).collect::<Vec<_>>());
    let mut data = if rank == n - 1 { sum.clone() } else { vec![0.0; n * count] };
    native.run_in_place(rooted(Kind::Broadcast, n * count), &mut data).unwrap();
    assert_eq!(data, sum);
    let mut out = vec![0.0; if rank == n - 1 { count } else { 0 }];
    native.run(rooted(Kind::Reduce, count), &whole[..count], &mut out).unwrap();
    assert!(rank < n - 1 || out == sum[..count]);
    let mut out = vec![0.0; if rank == n - 1 { n * count } else { 0 }];
    native.run(rooted(Kind::Gather, count), &shard, &mut out).unwrap();
    assert!(rank < n - 1 || out == gathered);
    let mut out = vec![0.0; count];
    let empty: &[f32] = &[];
    native
        .run(rooted(Kind::Scatter, count), if rank == n - 1 { &gathered } else { empty }, &mut out)
        .unwrap();
    assert_eq!(out, shard);
    let mut out = vec![0.0; n * count];
    native.run(call(Kind::AllToAll, count), &whole, &mut out).unwrap();
    let expected: Vec<f32> =
        (0..n * count).map(|i| ((rank * count + i % count) % 97 + i / count) as f32).collect();
    assert_eq!(out, expected);
    native.run::<f32>(call(Kind::Barrier, 0), &[], &mut []).unwrap();

    let started = native
        .start(call(Kind::ReduceScatter, count), Buffer::copy_of(&whole), Buffer::<f32>::zeroed(count))
        .unwrap();
    let (_, out) = started.wait().unwrap();
    assert_eq!(out.host(), &sum[own]);
    // One that nobody waits for runs to its end and frees its memory then.
    let dropped =
        native.start(call(Kind::AllReduce, count), Buffer::copy_of(&whole[..count]), Buffer::zeroed(count));
    drop(dropped.unwrap());

    // 16-bit floats can be moved but not added.
    let half = vec![bf16::from_f32(rank as f32); count];
    let mut halves = vec![bf16::ZERO; n * count];
    native.run(Call::new(Kind::AllGather, DType::Bf16, count), &half, &mut halves).unwrap();
    assert!((0..n * count).all(|i| halves[i].to_f32() == (i / count) as f32));
    let one = &[0.0f32; 1];
    let refused = [
        (native.run(Call::new(Kind::AllReduce, DType::Bf16, count), &half, &mut halves), "bf16"),
        (
            native.run(Call { op: ReduceOp::Average, ..call(Kind::AllReduce, 1) }, one, &mut [0.0]),
            "no average",
        ),
        (native.run(call(Kind::AllGather, 1 << 40), one, &mut [0.0]), "take up to 2147483647"),
        (native.run(call(Kind::AllGather, 10), &[0.0f32; 9], &mut [0.0; 99]), "9 elements in"),
        (native.run(Call { root: n, ..call(Kind::Reduce, 1) }, one, &mut [0.0]), "root"),
        (native.run(call(Kind::Send, 1), one, &mut [0.0]), "not a collective of MPI"),
    ];
    for (result, words) in refused {
        let text = result.expect_err(words).to_string();
        assert!(text.contains(words), "{text}");
    }
}

/// Users' messages have a communicator of their own, and a tag beyond the library's limit is refused.
fn users_tags(mut t: MpiTransport) {
    let user = |tag: u64| Tag(1 << 63 | tag);
    let (rank, n) = (t.rank(), t.size());
    let (to, from) = ((rank + 1) % n, (rank + n - 1) % n);
    let out = [[rank as u8, 1], [rank as u8, 2]];
    let mut into = [[0u8; 2]; 2];
    // SAFETY: the buffers stay until the wait is over.
    let requests = unsafe {
        [
            t.send(to, Tag(7), out[0].as_ptr(), 2).unwrap(),
            t.send(to, user(7), out[1].as_ptr(), 2).unwrap(),
            t.recv(from, user(7), into[1].as_mut_ptr(), 2).unwrap(),
            t.recv(from, Tag(7), into[0].as_mut_ptr(), 2).unwrap(),
        ]
    };
    p2p::wait(&mut t, &requests).unwrap();
    assert_eq!(into, [[from as u8, 1], [from as u8, 2]]);
    // SAFETY: refused, so nothing is posted.
    let error = unsafe { t.send(to, user(u32::MAX as u64), out[0].as_ptr(), 2) }.unwrap_err().to_string();
    assert!(error.contains("4294967295") && error.contains("takes 0 to"), "{error}");
    // SAFETY: as above.
    let error = unsafe {
        t.send(to, Tag(1 << 40), out[0].as_ptr(), 0).unwrap();
        t.send(to, Tag(0), out[0].as_ptr(), 0).unwrap_err().to_string()
    };
    assert!(error.contains("wait for some"), "{error}");
    let mut nothing = [0u8; 1];
    // SAFETY: nothing is received.
    let last = unsafe { t.recv(from, Tag(1 << 40), nothing.as_mut_ptr(), 0).unwrap() };
    p2p::wait(&mut t, &[last]).unwrap();
}

/// A group that a rank leaves: what it sent arrives, its end is no loss, and who waits for more learns that it left.
fn early_leaver(mut t: MpiTransport) {
    let rank = t.rank();
    let all: Vec<usize> = (0..t.size()).collect();
    let mut group = t.subgroup(&all, 3).unwrap();
    let data = p2p::message(0, 1, 9, 200_000);
    let mut space = vec![0u8; 200_000];
    if rank == 0 {
        // SAFETY: `data` stays until the transport is gone, which waits for it.
        unsafe { group.send(1, Tag(9), data.as_ptr(), data.len()).unwrap() };
        drop(group);
    } else {
        if rank == 1 {
            std::thread::sleep(Duration::from_millis(50));
            // SAFETY: `space` stays until the wait is over.
            let request = unsafe { group.recv(0, Tag(9), space.as_mut_ptr(), space.len()).unwrap() };
            p2p::wait(&mut *group, &[request]).unwrap();
            p2p::assert_message(&space, 0, 1, 9);
        }
        let until = Instant::now() + Duration::from_millis(100);
        while Instant::now() < until {
            group.check().expect("rank 0 left in order");
        }
        let error = p2p::wait_for_nothing(&mut *group, 0).to_string();
        assert!(error.contains("rank 0 left the group"), "{error}");
        t.forgive();
        drop(group);
    }
    p2p::barrier(&mut t, 1);
    println!("rank done");
}

#[test]
fn messages_of_every_size_and_order() {
    for ranks in [1, 2, 4] {
        passes("suite", ranks);
    }
}

#[test]
fn other_threads_are_refused() {
    for ranks in [2, 3] {
        let Some(output) = run("one_thread", ranks) else { return };
        let all = text(&output);
        assert_eq!(all.matches("rank done").count(), ranks, "{all}");
    }
}

#[test]
fn other_lengths_are_errors() {
    passes("wrong_lengths", 2);
}

#[test]
fn conformance_suite() {
    for ranks in 1..=5 {
        passes("conformance", ranks);
    }
}

#[test]
fn conformance_suite_with_progress_threads() {
    for ranks in [2, 3] {
        passes("threads", ranks);
    }
}

#[test]
fn conformance_suite_where_something_goes_wrong() {
    for ranks in [2, 3] {
        // One job each: neither library can take back a large message that nobody will receive.
        for case in cases().iter().filter(|c| c.fails) {
            // The launcher may kill ranks that end a moment after the first, but not before all are done.
            let Some(output) = run(case.name, ranks) else { return };
            let all = text(&output);
            assert_eq!(all.matches("rank done").count(), ranks, "{} with {ranks} ranks:\n{all}", case.name);
        }
    }
}

#[test]
fn native_collectives() {
    for ranks in [1, 3] {
        passes("native", ranks);
    }
}

#[test]
fn mpi_starts_once() {
    passes("second_start", 2);
}

#[test]
fn tags_of_users() {
    passes("users_tags", 2);
}

#[test]
fn mpi_explains_itself_in_its_own_words() {
    passes("own_words", 2);
}

#[test]
fn leaving_early_loses_nothing() {
    passes("early_leaver", 3);
}

#[test]
fn a_killed_rank_ends_the_job() {
    let Some(output) = run("killed", 3) else { return };
    assert!(!output.status.success(), "{}", text(&output));
}

#[test]
fn a_panicking_rank_ends_the_job_with_its_message() {
    let Some(output) = run("panics", 3) else { return };
    let all = text(&output);
    assert!(!output.status.success() && all.contains("something impossible"), "{all}");
}

#[test]
fn a_failing_rank_ends_the_job_with_its_reason() {
    let Some(output) = run("fails", 3) else { return };
    let all = text(&output);
    // The launcher ends all ranks as soon as one has ended, which may be any of them; each would say why.
    assert!(!output.status.success() && all.contains("No space left on device"), "{all}");
    for line in all.lines().filter(|l| l.contains("error: rank 1 gave up")) {
        assert!(line.contains("No space left"), "{line}");
    }
}
