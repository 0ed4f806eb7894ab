//! The harness itself: what it finds, kills and keeps from programs.

use super::*;

/// Rust sources below a folder, without what is built.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let of = |entry: fs::DirEntry| {
        let (path, name) = (entry.path(), entry.file_name());
        let name = name.to_string_lossy();
        match entry.file_type().unwrap().is_dir() {
            true if name.starts_with('.') || name == "target" => vec![],
            true => sources(&path),
            false if name.ends_with(".rs") => vec![path],
            false => vec![],
        }
    };
    entries.flat_map(of).collect()
}

/// What a test panics with.
fn panics(test: impl FnOnce()) -> String {
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(test)).expect_err("it panics");
    caught.downcast_ref::<String>().cloned().unwrap_or_default()
}

fn shell(bench: &Bench, line: &str) -> Child {
    let mut command = Command::new("sh");
    command.args(["-c", line]);
    bench.prepare(&mut command);
    command.spawn().unwrap()
}

#[test]
fn what_outlives_the_program_is_named_and_killed() {
    let bench = Bench::new("sh");
    let child = shell(&bench, "sleep 1000 & exit 0");
    let said = panics(|| drop(bench.finish_within(child, Duration::from_secs(1))));
    assert!(said.contains("has ended (exit status: 0)") && said.contains(" (sleep) are left"), "{said}");
    bench.nothing_left();
    let child = shell(&bench, "echo this >&2; exec sleep 1000");
    let said = panics(|| drop(bench.finish_within(child, Duration::from_secs(1))));
    assert!(said.contains("hangs after 1s; it said: this"), "{said}");
    bench.nothing_left();
}

#[test]
fn a_program_that_ends_while_something_is_waited_for_is_no_hang() {
    let bench = Bench::new("sh");
    let said = panics(|| drop(bench.until(shell(&bench, "echo why; exit 3"), "it sings", || false)));
    assert!(said.contains("ended by itself before it sings") && said.contains("why"), "{said}");
    let mut asked = 0;
    let child = bench.until(shell(&bench, "exec sleep 1000"), "it is asked thrice", || {
        asked += 1;
        asked == 3
    });
    signal(child.id(), Signal::KILL);
    assert_eq!(bench.finish(child).code, None);
}

#[test]
fn a_segment_of_ucx_that_a_program_leaves_is_seen() {
    let bench = Bench::new("sh");
    let child = shell(&bench, "true");
    let names = [child.id(), std::process::id()].map(|id| format!("/dev/shm/caravan-ucx-{id}-test"));
    bench.finish(child);
    // That of a process of another test is not ours.
    fs::write(&names[1], "").unwrap();
    bench.nothing_left();
    fs::write(&names[0], "").unwrap();
    let said = panics(|| bench.nothing_left());
    names.iter().for_each(|name| fs::remove_file(name).unwrap());
    assert!(
        said.contains("segments are left") && said.contains(names[0].trim_start_matches("/dev/shm/")),
        "{said}"
    );
}

#[test]
fn programs_hear_nothing_of_a_launcher_of_the_tests() {
    let bench = Bench::new("sh");
    // As the tests' own process has it below a launcher.
    let mut tests = Command::new(std::env::current_exe().unwrap());
    tests.args(["--exact", "tests::programs_hear_what_they_are_told", "--nocapture"]);
    bench.prepare(&mut tests);
    for name in ["SLURM_PROCID", "OMPI_COMM_WORLD_SIZE", "PMI_FD", "PMIX_RANK", "MPI_LOCALRANKID", "UCX_TLS"]
    {
        tests.env(name, "heard");
    }
    tests.env("CARAVAN_TUNING", "heard").env("CARAVAN_CACHE", "kept");
    let said = bench.outcome(&mut tests).success().stdout;
    assert!(said.contains("CARAVAN_CACHE=kept") && said.contains("UCX_TLS=chosen"), "{said}");
    assert!(!said.contains("=heard"), "{said}");
}

/// Also the other half of that test, which runs it below what looks like a launcher and reads what it says.
#[test]
fn programs_hear_what_they_are_told() {
    let bench = Bench::new("sh");
    let mut command = Command::new("env");
    command.env("UCX_TLS", "chosen");
    bench.prepare(&mut command);
    let said = bench.outcome(&mut command).success().stdout;
    assert!(said.contains("UCX_TLS=chosen\n") && said.contains("CARAVAN_TEST"), "{said}");
    print!("{said}");
}

#[test]
fn whoever_skips_tells_it_where_it_is_counted() {
    let all = sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join(".."));
    assert!(all.len() > 100, "{}", all.len());
    for source in all {
        let text = fs::read_to_string(&source).unwrap();
        // In two pieces, or this line would be one of those that it looks for.
        let silent = text.contains(concat!("println!(\"", "skipped"));
        assert!(!silent, "{}: libtest swallows this line: call harness::skip", source.display());
    }
}
