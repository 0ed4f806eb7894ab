//! Starts ranks under the launcher of the library that is built in, and says how they ended.

use collectives_mpi::{Family, family, library};
use conformance::p2p;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Which case a rank runs.
pub const CASE: &str = "CARAVAN_TEST_CASE";
/// Where ranks leave a file each when they are done.
pub const FOLDER: &str = "CARAVAN_TEST_FOLDER";

/// The launcher that belongs to the library, with what it needs to start any number of ranks here.
fn launcher() -> Option<Command> {
    let (names, flags): (&[&str], &[&str]) = match family() {
        Family::OpenMpi => {
            (&["mpirun.openmpi", "mpirun"], &["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"])
        }
        Family::Mpich | Family::CrayMpich => (&["mpirun.mpich", "mpirun"], &[]),
        Family::Unknown => {
            harness::skip(&format!("no launcher is known for {}", library()));
            return None;
        }
    };
    let found = |name: &&&str| {
        Command::new(name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
    };
    match names.iter().find(found) {
        None => {
            harness::skip(&format!("{} is not there", names.join(" or ")));
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
pub fn run(case: &str, ranks: usize) -> Option<Output> {
    run_in(&[], case, ranks)
}

/// The same where the launcher does not see a rank that is killed by SIGABRT, and sees those that fail only when all others
/// have failed as well, for which they have time, and what they said has been passed on: a shell stays in the place of each.
pub fn run_unseen(case: &str, ranks: usize) -> Option<Output> {
    // Its name is how many they are.
    const STAYS: &str = "\"$@\"; code=$?; failed=$CARAVAN_TEST_FOLDER/failed
        case $code in 134) sleep 30;; 0) ;; *)
            : > $failed-$$
            for i in $(seq 100); do [ $(ls $failed-* | wc -l) = $0 ] && break; sleep 0.1; done
            sleep 2;;
        esac; exit $code";
    run_in(&["sh", "-c", STAYS, &(ranks - 1).to_string()], case, ranks)
}

fn run_in(shell: &[&str], case: &str, ranks: usize) -> Option<Output> {
    let folder = tempfile::tempdir().unwrap();
    let mut child = launcher()?
        .args(["-n", &ranks.to_string()])
        .args(shell)
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

/// The same over an MPI that finds out which ranks have ended, on whichever host (see `ulfm.c`); nothing where no compiler for
/// the library is there.
pub fn run_over_ulfm(case: &str, ranks: usize) -> Option<Output> {
    let usual = if family() == Family::OpenMpi { "mpicc.openmpi" } else { "mpicc.mpich" };
    let compiler = std::env::var("MPICC").unwrap_or(usual.into());
    let folder = tempfile::tempdir().unwrap();
    let made = folder.path().join("libulfm.so");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/mpi_transport/ulfm.c");
    match Command::new(&compiler).args(["-shared", "-fPIC", "-o"]).arg(&made).arg(source).status() {
        Err(e) => {
            harness::skip(&format!("{compiler} is not there: {e}"));
            None
        }
        Ok(status) => {
            assert!(status.success(), "{compiler} cannot compile {source}");
            run_in(&["env", &format!("LD_PRELOAD={}", made.display())], case, ranks)
        }
    }
}

pub fn text(output: &Output) -> String {
    format!("{}\n{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

pub fn passes(case: &str, ranks: usize) {
    passed(case, ranks, run(case, ranks));
}

/// As [`passes`], below a program that starts another.
pub fn passes_in(shell: &[&str], case: &str, ranks: usize) {
    passed(case, ranks, run_in(shell, case, ranks));
}

/// As [`passes`], where Open MPI sends its messages over UCX, as it does by itself only where there is InfiniBand.
pub fn passes_over_ucx(case: &str, ranks: usize) {
    const OVER_UCX: [&str; 5] = [
        "env",
        "OMPI_MCA_pml=ucx",
        "OMPI_MCA_osc=^ucx",
        "OMPI_MCA_pml_ucx_tls=any",
        "OMPI_MCA_pml_ucx_devices=any",
    ];
    if family() != Family::OpenMpi {
        return;
    }
    let known = Command::new("ompi_info").output();
    match known.is_ok_and(|known| String::from_utf8_lossy(&known.stdout).contains("MCA pml: ucx")) {
        true => passes_in(&OVER_UCX, case, ranks),
        false => harness::skip("Open MPI was built without UCX (ompi_info knows no 'MCA pml: ucx')"),
    }
}

fn passed(case: &str, ranks: usize, output: Option<Output>) {
    if let Some(output) = output {
        let all = text(&output);
        assert!(output.status.success(), "{case} with {ranks} ranks ({}):\n{all}", library());
        // Each rank has really run it.
        assert_eq!(all.matches("rank done").count(), ranks, "{case} with {ranks} ranks:\n{all}");
    }
}
