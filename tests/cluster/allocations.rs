//! A real Slurm on this machine: munged, slurmctld and a slurmd for each of two nodes, started by hand in a scratch
//! folder and taken down with it.

use crate::{CARAVAN, Mpirun, PROMISED, TRAIN, bench, same, traced};
use harness::{Bench, ENDLESS, Outcome, Waited, installed, is_root, skip};
use rustix::process::Signal;
use std::fs;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The running daemons.
struct Slurm<'a> {
    bench: &'a Bench,
    daemons: Vec<Child>,
    /// Names of nodes that this machine resolves.
    nodes: usize,
}

impl<'a> Slurm<'a> {
    /// Nothing, and a skip, where it cannot run.
    fn start(bench: &'a Bench) -> Option<Self> {
        let programs = ["munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "setpriv"];
        if !programs.iter().all(|p| installed(p)) {
            return None;
        }
        if !is_root() {
            skip("starting a Slurm needs root");
            return None;
        }
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        // A second node needs a second name that resolves.
        let second = "localhost";
        let resolves = std::net::ToSocketAddrs::to_socket_addrs(&(host.as_str(), 1)).is_ok();
        let nodes = if resolves && host != second { vec![host.as_str(), second] } else { vec![second] };
        if nodes.len() == 1 {
            skip(&format!("a Slurm of two nodes: the host's name {host} does not resolve"));
        }
        let folder = bench.path("slurm");
        fs::create_dir(&folder).unwrap();
        fs::create_dir(folder.join("state")).unwrap();
        let at = folder.to_str().unwrap();
        // Below the ports that the kernel gives to clients, and other than those of a Slurm next door.
        let port = 10_000 + std::process::id() % 6000 * 3;
        let mut conf = format!(
            "ClusterName=caravan\n\
             SlurmctldHost={host}(127.0.0.1)\n\
             SlurmUser=root\nSlurmdUser=root\n\
             AuthType=auth/munge\nAuthInfo=socket={at}/munge.socket\nCredType=cred/munge\n\
             SlurmctldPort={port}\n\
             SlurmctldPidFile={at}/slurmctld.pid\nSlurmdPidFile={at}/slurmd-%n.pid\n\
             StateSaveLocation={at}/state\nSlurmdSpoolDir={at}/spool-%n\n\
             SlurmctldLogFile={at}/slurmctld.log\nSlurmdLogFile={at}/slurmd-%n.log\n\
             ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\n\
             JobAcctGatherType=jobacct_gather/none\nAccountingStorageType=accounting_storage/none\n\
             SwitchType=switch/none\nMpiDefault=none\n\
             SelectType=select/cons_tres\nSelectTypeParameters=CR_CPU\n\
             ReturnToService=2\nSlurmdParameters=config_overrides\nPropagateResourceLimits=NONE\n\
             KillWait=2\nUnkillableStepTimeout=10\n"
        );
        for (i, node) in nodes.iter().enumerate() {
            let port = port + 1 + i as u32;
            conf += &format!("NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8\n");
        }
        conf += "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n";
        fs::write(folder.join("slurm.conf"), conf).unwrap();
        let key: Vec<u8> = (0..1024u32).map(|i| (i.wrapping_mul(2654435761) >> 13) as u8).collect();
        fs::write(folder.join("munge.key"), key).unwrap();
        let private = std::os::unix::fs::PermissionsExt::from_mode(0o400);
        fs::set_permissions(folder.join("munge.key"), private).unwrap();

        let mut slurm = Slurm { bench, daemons: Vec::new(), nodes: nodes.len() };
        slurm.daemon(&format!(
            "munged --foreground --force --key-file={at}/munge.key --socket={at}/munge.socket \
             --pid-file={at}/munge.pid --log-file={at}/munge.log --seed-file={at}/munge.seed"
        ));
        slurm.daemon(&format!("slurmctld -D -f {at}/slurm.conf"));
        for node in &nodes {
            slurm.daemon(&format!("slurmd -D -N {node} -f {at}/slurm.conf"));
        }
        let until = Instant::now() + Duration::from_secs(120);
        loop {
            let listed = slurm.run("sinfo --noheader --Node --format=%T");
            let idle = listed.stdout.lines().filter(|l| l.trim() == "idle").count();
            if idle == nodes.len() {
                return Some(slurm);
            }
            if Instant::now() > until {
                let said = |name: &str| {
                    let text = fs::read_to_string(folder.join(name)).unwrap_or_default();
                    text.lines().rev().find(|l| l.contains("error") || l.contains("fatal")).map(str::to_owned)
                };
                let logs =
                    ["munge.log".to_owned(), "slurmctld.log".into(), format!("slurmd-{}.log", nodes[0])];
                let why: Vec<String> = logs.iter().filter_map(|name| said(name)).collect();
                skip(&format!("Slurm does not start here: {} {}", listed.stderr.trim(), why.join("; ")));
                return None;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    fn daemon(&mut self, line: &str) {
        // Dies with the test, whatever becomes of that.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]).args(line.split_whitespace());
        self.bench.prepare(&mut command);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        self.daemons.push(command.spawn().expect("setpriv starts"));
    }

    /// A command of Slurm's, split at spaces.
    fn command(&self, line: &str) -> Command {
        let mut words = line.split_whitespace();
        let mut command = Command::new(words.next().expect("a program"));
        command.args(words);
        self.bench.prepare(&mut command);
        command.env("SLURM_CONF", self.bench.path("slurm/slurm.conf"));
        command
    }

    fn run(&self, line: &str) -> Outcome {
        self.bench.outcome(&mut self.command(line))
    }

    /// How Slurm says that a job has ended, submitted `inside` another command or none; `sbatch --wait` asks seconds later.
    fn batch(&self, inside: &str, flags: &str) -> String {
        let job = self.run(&format!("{inside} sbatch --parsable {flags}")).success().stdout;
        let until = Instant::now() + Duration::from_secs(120);
        loop {
            let shown = self.run(&format!("scontrol show job {}", job.trim())).success().stdout;
            let state = shown.split_whitespace().find_map(|word| word.strip_prefix("JobState="));
            match state.expect("a state") {
                "PENDING" | "CONFIGURING" | "RUNNING" | "COMPLETING" => {
                    assert!(Instant::now() < until, "it does not end: {shown}");
                    std::thread::sleep(Duration::from_millis(50));
                }
                ended => return ended.to_owned(),
            }
        }
    }
}

impl Drop for Slurm<'_> {
    fn drop(&mut self) {
        let _ = self.run("scancel --user=root --signal=KILL");
        // The nodes first, then who rules them, then who vouches for all.
        for daemon in self.daemons.iter().rev() {
            harness::signal(daemon.id(), Signal::TERM);
            std::thread::sleep(Duration::from_millis(20));
        }
        let until = Instant::now() + Duration::from_secs(10);
        for daemon in &mut self.daemons {
            while daemon.try_wait().is_ok_and(|ended| ended.is_none()) && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(10));
            }
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}

/// One Slurm for all of it, because starting one takes seconds.
#[test]
fn srun_and_sbatch() {
    let bench = bench();
    let Some(slurm) = Slurm::start(&bench) else { return };
    bench.text("text.txt", 6000);
    bench.run(&traced("own-2", "--ranks 2")).success();
    bench.run(&traced("own-4", "--ranks 4")).success();
    let plugins = slurm.run("srun --mpi=list").success();
    let plugins = plugins.stdout + &plugins.stderr;
    let ucx = crate::bench().offers("ucx");

    let runs = match Mpirun::built_in() {
        Some(mpirun) => vec![(mpirun.plugin(), "mpi")],
        None if ucx => {
            vec![("none", "auto"), ("none", "ucx"), ("pmi2", "shm"), ("pmix", "auto"), ("pmix", "ucx")]
        }
        None => vec![("none", "auto"), ("pmi2", "shm"), ("pmix", "auto")],
    };
    for (plugin, transport) in runs {
        if !plugins.split_whitespace().any(|p| p == plugin) {
            skip(&format!("this Slurm has no --mpi={plugin}"));
            continue;
        }
        for ranks in [2, 4] {
            let name = format!("{plugin}-{transport}-{ranks}");
            let train = traced(&name, &format!("--transport {transport}"));
            slurm.run(&format!("srun -N 1 -n {ranks} --mpi={plugin} {CARAVAN} {train}")).success();
            same(&bench, &format!("own-{ranks}"), &name);
        }
        // Who brings a rank PMI or PMIx is srun, whatever else may be at the other end.
        let doctor = slurm.run(&format!("srun -n 1 --mpi={plugin} {CARAVAN} doctor --json")).success().json();
        assert_eq!(doctor["identity"]["launcher"], "srun", "{plugin}: {}", doctor["identity"]);
        let flags = format!("-b 1K -e 64K -n 3 --transport {transport}");
        let table = slurm
            .run(&format!("srun -n 2 --mpi={plugin} {CARAVAN} bench all_reduce {flags}"))
            .success()
            .stdout;
        assert!(table.contains("ranks 2") && table.contains("# Out of bounds values : 0 OK"), "{table}");
    }
    let plugin = match Mpirun::built_in() {
        None => {
            left_behind(&slurm);
            submitted_inside_a_step(&slurm);
            refusals(&slurm);
            if slurm.nodes == 2 && ucx {
                two_nodes(&slurm);
            }
            let nodes = if slurm.nodes == 2 && ucx { 2 } else { 1 };
            script(&slurm, nodes, "auto");
            "none"
        }
        Some(mpirun) => mpirun.plugin(),
    };
    if plugins.split_whitespace().any(|p| p == plugin) {
        if plugin != "none" {
            script(&slurm, 1, "mpi");
            another_plugin(&slurm, plugin);
        }
        for transport in Mpirun::transports() {
            killed(&slurm, plugin, transport);
        }
        if Mpirun::built_in().is_some() {
            killed_inside_mpi(&slurm, plugin);
        }
    }
    drop(slurm);
    bench.nothing_left();
}

/// Slurm leaves the other ranks alone when one is killed, so they have to end by themselves; a job that is asked to end keeps
/// its model.
fn killed(slurm: &Slurm<'_>, plugin: &str, transport: &str) {
    let bench = slurm.bench;
    let start = || {
        let _ = fs::remove_file(bench.path("m.jsonl"));
        let run =
            format!("srun -N 1 -n 3 --mpi={plugin} {CARAVAN} {ENDLESS} --quiet --transport {transport}");
        let run = bench.endless(slurm.command(&run));
        let ranks = bench.ranks_by("SLURM_PROCID");
        assert_eq!(ranks.iter().map(|r| r.0).collect::<Vec<_>>(), [0, 1, 2]);
        (run, ranks)
    };
    let (run, ranks) = start();
    harness::signal(ranks[1].1, Signal::KILL);
    let outcome = bench.finish(run);
    assert!(outcome.code.is_some_and(|code| code != 0), "{outcome:?}");
    // Open MPI's runtime may end the others before they have found out; nobody tells MPICH of a death.
    let ended_by_runtime = transport == "mpi" && plugin == "pmix";
    assert!(ended_by_runtime || outcome.stderr.contains("rank 1"), "{}", outcome.stderr);
    assert!(!outcome.stderr.contains("panicked"), "{}", outcome.stderr);
    let took = outcome.took;
    assert!(took < PROMISED, "over {transport}: all of it ended after {took:?}");

    // A job's time is nearly up (sbatch --signal), or it is cancelled: its ranks are asked to end before they are killed.
    let (run, _) = start();
    slurm.run("scancel --user=root --signal=USR1").success();
    let outcome = bench.finish(run);
    assert_eq!(outcome.code, Some(138), "{outcome:?}");
    let said = outcome.stderr.contains("caravan: interrupted by signal 10; the weights after step ");
    assert!(said && outcome.stderr.contains(" were saved to out"), "{}", outcome.stderr);
    fs::remove_dir_all(bench.path("out")).unwrap();

    let (run, _) = start();
    slurm.run("scancel --user=root").success();
    assert_ne!(bench.finish(run).code, Some(0));
    let mut waited = Waited::begin();
    while !bench.ranks_by("SLURM_PROCID").is_empty() {
        assert!(waited.so_far() < PROMISED, "ranks outlive their job");
        std::thread::sleep(Duration::from_millis(10));
    }
    let lines = harness::json_lines(&bench.path("m.jsonl"));
    assert_eq!(lines.last().unwrap()["summary"]["saved"], "out");
    bench.run("eval --model out --data text.txt --quiet").success();
    fs::remove_dir_all(bench.path("out")).unwrap();
}

/// The same where the others wait inside a collective of MPI's own, which never returns.
fn killed_inside_mpi(slurm: &Slurm<'_>, plugin: &str) {
    let bench = slurm.bench;
    let flags = "all_reduce -b 4K -e 64M -f 16384 -n 500 --transport mpi --algo native";
    let line = format!("srun -N 1 -n 2 --mpi={plugin} --output=table.txt {CARAVAN} bench {flags}");
    let run = slurm.command(&line).spawn().expect("srun starts");
    // The first size has been measured, and the second one takes long.
    let row = |line: &str| line.trim_start().starts_with(|c: char| c.is_ascii_digit());
    let table = || fs::read_to_string(bench.path("table.txt")).unwrap_or_default();
    let run = bench.until(run, "the first size is measured", || table().lines().any(row));
    let ranks = bench.ranks_by("SLURM_PROCID");
    harness::signal(ranks[1].1, Signal::KILL);
    let outcome = bench.finish(run);
    assert!(outcome.code.is_some_and(|code| code != 0), "{outcome:?}");
    // Both streams go there.
    let said = table();
    assert!(plugin == "pmix" || said.contains("rank 1 ended (process"), "{said}");
    assert!(outcome.took < PROMISED, "all of it ended after {:?}", outcome.took);
}

/// What launchers outside have left in the environment that srun hands down is not who its ranks are.
fn left_behind(slurm: &Slurm<'_>) {
    let left = [
        "PMI_RANK=0 PMI_SIZE=1",
        "OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 PMIX_RANK=0",
        "PMI_RANK=3 PMI_SIZE=4",
    ];
    for left in left {
        let table = slurm
            .run(&format!("env {left} srun -N 1 -n 4 --mpi=none {CARAVAN} bench barrier -n 3"))
            .success();
        assert!(table.stdout.contains(" ranks 4 "), "{left}: {}", table.stdout);
    }
}

/// A job's script is no rank of the step in which it was submitted, and neither is the shell of an allocation.
fn submitted_inside_a_step(slurm: &Slurm<'_>) {
    let line = format!("{CARAVAN} bench barrier -n 3 --ranks 2");
    slurm.bench.file("inside.sh", format!("#!/bin/bash\n{line} > inside.out 2>&1\n"));
    slurm.batch("srun -n 1", "inside.sh");
    let said = fs::read_to_string(slurm.bench.path("inside.out")).unwrap_or_default();
    assert!(said.contains(" ranks 2 "), "{said}");
    let table = slurm.run(&format!("srun -n 1 salloc --quiet -n 1 {line}")).success();
    assert!(table.stdout.contains(" ranks 2 "), "{}", table.stdout);
}

/// What goes wrong names its rank, and ends the step.
fn refusals(slurm: &Slurm<'_>) {
    let line = format!("{CARAVAN} {TRAIN}");
    let mixed = |one: &str, other: &str, words: &[&str]| {
        slurm.bench.file("ranks.conf", format!("0 {one}\n1 {other}\n"));
        let outcome = slurm.run("srun -N 1 -n 2 --kill-on-bad-exit=1 --multi-prog ranks.conf");
        assert_ne!(outcome.code, Some(0));
        for word in words {
            assert!(outcome.stderr.contains(word), "'{word}' is not in: {}", outcome.stderr);
        }
    };
    mixed(&line, &format!("{line} --stage 1"), &["different arguments", "'--stage 1'", "'--stage 3'"]);
    let late = format!("{line} --rendezvous-timeout 1");
    mixed(&late, "/bin/sleep 100", &["rank 1 of 2 did not arrive", "within 1s"]);
    let full = format!("{line} --metrics /dev/full");
    mixed(&full, &full, &["rank 0 on ", ": cannot write metrics"]);
    mixed(&full, &line, &["different arguments", "'--metrics given'", "'--metrics not given'"]);
    // Also where srun does not end the others: the rank itself tells them.
    let lost = format!("{CARAVAN} train --data nowhere.txt");
    for (who, ranks) in [(1, [&line, &lost]), (0, [&lost, &line])] {
        slurm.bench.file("ranks.conf", format!("0 {}\n1 {}\n", ranks[0], ranks[1]));
        let outcome = slurm.run("srun -N 1 -n 2 --multi-prog ranks.conf");
        let told = [&format!("rank {who} on "), ": --data nowhere.txt"];
        let told = told.iter().all(|words| outcome.stderr.contains(*words));
        assert!(outcome.code == Some(2) && told, "{outcome:?}");
    }
}

/// Ranks of two nodes meet at the first node's address.
fn two_nodes(slurm: &Slurm<'_>) {
    for tls in ["tcp", "all"] {
        let name = format!("nodes-{tls}");
        let train = traced(&name, "");
        let run = format!("srun -N 2 -n 4 --ntasks-per-node=2 --export=ALL,UCX_TLS={tls} {CARAVAN} {train}");
        slurm.run(&run).success();
        same(slurm.bench, "own-4", &name);
    }
    // Ranks dealt out in turn. Both nodes are this host, so the flag says once more what Slurm has done.
    let cyclic = "srun -N 2 -n 4 --ntasks-per-node=2 --distribution=cyclic";
    let nodes = slurm.run(&format!("{cyclic} --label printenv SLURM_NODEID")).success().stdout;
    let mut nodes: Vec<&str> = nodes.lines().map(str::trim).collect();
    nodes.sort_unstable();
    assert_eq!(nodes, ["0: 0", "1: 1", "2: 0", "3: 1"]);
    let by_hand = "--transport shm+ucx --ranks-per-node 2:cyclic";
    for (name, flags) in [("cyclic", ""), ("cyclic-nodes", by_hand)] {
        slurm.run(&format!("{cyclic} {CARAVAN} {}", traced(name, flags))).success();
        same(slurm.bench, "own-4", name);
    }
    let bench = format!("{cyclic} {CARAVAN} bench all_gather -b 256K -e 256K -n 3 {by_hand}");
    let table = slurm.run(&bench).success().stdout;
    let said = "hierarchical, because up to 2 ranks share a node";
    assert!(table.contains(said) && table.contains("# Out of bounds values : 0 OK"), "{table}");
    slurm
        .run(&format!("srun -N 2 -n 2 --kill-on-bad-exit=1 {CARAVAN} {TRAIN} --transport threads"))
        .code
        .filter(|&c| c != 0)
        .expect("threads do not span processes");
}

/// Under another plugin than its own, an MPI knows nothing of the other ranks, or does not start.
fn another_plugin(slurm: &Slurm<'_>, plugin: &str) {
    let run = format!("srun -N 1 -n 2 --kill-on-bad-exit=1 --mpi=none {CARAVAN} {TRAIN} --transport mpi");
    let outcome = slurm.run(&run);
    assert_ne!(outcome.code, Some(0), "{outcome:?}");
    assert!(outcome.stderr.contains(&format!("take srun --mpi={plugin}")), "{}", outcome.stderr);
}

/// What `caravan sbatch` prints is a script that Slurm runs.
fn script(slurm: &Slurm<'_>, nodes: usize, transport: &str) {
    let bench = slurm.bench;
    let per_node = 4 / nodes;
    let train = traced("batch", &format!("--transport {transport}"));
    let print = format!("sbatch --nodes {nodes} --ranks-per-node {per_node} --output job.out -- {train}");
    let text = bench.run(&print).success().stdout;
    bench.file("job.sh", &text);
    let mut shell = Command::new("bash");
    shell.args(["-n", "job.sh"]);
    bench.prepare(&mut shell);
    bench.outcome(&mut shell).success();
    // Also where jobs take nothing from the environment of who submits them.
    let export = if nodes == 1 { "ALL" } else { "NONE" };
    // As in a shell that is itself a step, whose binding srun would refuse here.
    let step = "SLURM_CPU_BIND=of-a-step,SLURM_CPU_BIND_LIST=0x1";
    // And in an allocation that asked for more, or otherwise, than this job does.
    let outer = "SLURM_MEM_PER_CPU=100,SLURM_MEM_PER_NODE=200,SLURM_DISTRIBUTION=cyclic,SLURM_GPUS_PER_TASK=1,\
                 SLURM_GPUS=16,SLURM_GPUS_PER_NODE=8,SLURM_NTASKS_PER_GPU=1,SLURM_GRES=gpu:8";
    let ended = slurm.batch("", &format!("--export={export},{step},{outer} job.sh"));
    let said = fs::read_to_string(bench.path("job.out")).unwrap_or_default();
    assert_eq!(ended, "COMPLETED", "{said}");
    same(bench, "own-4", "batch");
    if nodes == 2 {
        let (before, _) = text.split_once(&format!(" {CARAVAN} ")).expect("its ranks are started");
        bench.file("where.sh", format!("{before} --label printenv SLURM_NODEID\n"));
        slurm.batch("", &format!("--export={export},{outer} --output=where.out where.sh"));
        let said = fs::read_to_string(bench.path("where.out")).unwrap_or_default();
        let mut nodes: Vec<&str> = said.lines().map(str::trim).collect();
        nodes.sort_unstable();
        assert_eq!(nodes, ["0: 0", "1: 0", "2: 1", "3: 1"]);
    }
    // A job whose ranks fail is a failed job.
    let failing = print.replace("batch.jsonl", "/dev/full").replace("job.out", "bad.out");
    bench.file("bad.sh", bench.run(&failing).success().stdout);
    assert_eq!(slurm.batch("", "bad.sh"), "FAILED");
    let said = fs::read_to_string(bench.path("bad.out")).unwrap_or_default();
    assert!(said.contains("cannot write metrics"), "{said}");
}

#[test]
fn scripts_are_valid_for_the_shell() {
    let bench = bench();
    for flags in [
        "--nodes 2 --ranks-per-node 8 --gpus-per-rank 1 -- train --device cuda",
        "--nodes 64 --ranks-per-node 8 --cpus-per-rank 4 --time 2-00:00:00 --partition all --account a -- train --data $(x) 'y",
        "-- bench all_reduce",
    ] {
        bench.file("job.sh", bench.run(&format!("sbatch {flags}")).success().stdout);
        let mut shell = Command::new("bash");
        shell.args(["-n", "job.sh"]);
        bench.prepare(&mut shell);
        bench.outcome(&mut shell).success();
    }
    bench.run("sbatch --nodes 2 --ranks-per-node 4 -- train --ranks 3").refusal(2, &["--ranks 3", "8"]);
    bench.run("sbatch --nodes 2 -- doctor").refusal(2, &["no ranks"]);
}
