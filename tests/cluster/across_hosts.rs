//! Two hosts on one machine: network name spaces joined by a pair of virtual interfaces whose rate a token bucket
//! limits to 1 Gbit/s. mpirun reaches the second through an agent that enters its name space.

use crate::{CARAVAN, Mpirun, PROMISED, bench, same, traced};
use harness::{Bench, ENDLESS, Outcome, installed, is_root, json_lines, signal, skip};
use rustix::process::Signal;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Which ranks a host gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ranks {
    /// Ranks that follow each other, this many.
    Block(usize),
    /// This many, every other one.
    Dealt(usize),
}

/// The two hosts; gone with this.
pub(crate) struct Hosts<'a> {
    bench: &'a Bench,
    pub(crate) names: [String; 2],
    pub(crate) addresses: [String; 2],
}

impl<'a> Hosts<'a> {
    /// Nothing, and a skip, where they cannot be made.
    pub(crate) fn make(bench: &'a Bench) -> Option<Self> {
        if !["ip", "tc", "unshare"].iter().all(|p| installed(p)) {
            return None;
        }
        if !is_root() {
            skip("making hosts of network name spaces needs root");
            return None;
        }
        let id = std::process::id();
        static MADE: AtomicU32 = AtomicU32::new(0);
        let made = MADE.fetch_add(1, Ordering::Relaxed);
        let names = [0, 1].map(|i| format!("caravan-{id}-{made}-{i}"));
        let (a, b) = (id / 250 % 250, id % 250);
        let addresses = [1, 2].map(|i| format!("10.{}.{}.{i}", 64 + a % 64, b));
        let hosts = Hosts { bench, names, addresses };
        let [h0, h1] = &hosts.names;
        let [v0, v1] = [0, 1].map(|i| format!("cv{id}x{made}-{i}"));
        let mut lines = vec![
            format!("ip netns add {h0}"),
            format!("ip netns add {h1}"),
            format!("ip link add {v0} netns {h0} type veth peer name {v1} netns {h1}"),
        ];
        for (host, (device, address)) in
            [h0, h1].into_iter().zip([&v0, &v1].into_iter().zip(&hosts.addresses))
        {
            lines.push(format!("ip -n {host} addr add {address}/24 dev {device}"));
            lines.push(format!("ip -n {host} link set lo up"));
            lines.push(format!("ip -n {host} link set {device} up"));
            lines.push(format!(
                "tc -n {host} qdisc add dev {device} root tbf rate 1gbit burst 128k latency 50ms"
            ));
        }
        for line in lines {
            let outcome = hosts.run(&line);
            if outcome.code != Some(0) {
                skip(&format!("two hosts cannot be made here: '{line}': {}", outcome.stderr.trim()));
                return None;
            }
        }
        // A device is listed a moment before it carries anything, and UCX looks only once.
        let until = Instant::now() + Duration::from_secs(10);
        for (host, device) in [(h0, &v0), (h1, &v1)] {
            while !hosts.run(&format!("ip -n {host} link show dev {device}")).stdout.contains("state UP") {
                assert!(Instant::now() < until, "{device} does not come up");
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        // A host has a name and shared memory of its own, too.
        let enter = "#!/bin/sh\nhost=$1; shift\nexec ip netns exec $host unshare --uts --mount sh -c \
                     'hostname $0 && mount -t tmpfs none /dev/shm && exec \"$@\"' $host \"$@\"\n";
        let agent = format!(
            "#!/bin/sh\nwhile :; do case $1 in -*) shift;; *) break;; esac; done\nhost=$1; shift\n\
             case $host in {}) name={h0};; {}) name={h1};; *) echo no host $host >&2; exit 1;; esac\n\
             exec {} $name sh -c \"$*\"\n",
            hosts.addresses[0],
            hosts.addresses[1],
            bench.path("enter").display()
        );
        for (name, text) in [("enter", enter), ("agent", &agent)] {
            let path = bench.file(name, text);
            std::fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
        }
        let outcome = hosts.run(&format!("{} {h0} true", bench.path("enter").display()));
        if outcome.code != Some(0) {
            skip(&format!("a host of its own cannot be entered here: {}", outcome.stderr.trim()));
            return None;
        }
        Some(hosts)
    }

    pub(crate) fn run(&self, line: &str) -> Outcome {
        self.bench.outcome(&mut self.command(line))
    }

    pub(crate) fn command(&self, line: &str) -> Command {
        let mut words = line.split_whitespace();
        let mut command = Command::new(words.next().expect("a program"));
        command.args(words);
        self.bench.prepare(&mut command);
        command.env("TMPDIR", self.bench.path("."));
        command
    }

    /// mpirun on the first host, with ranks on both.
    fn mpirun(&self, mpirun: Mpirun, ranks: Ranks, line: &str) -> Outcome {
        self.run(&self.line_of(mpirun, ranks, line))
    }

    fn line_of(&self, mpirun: Mpirun, ranks: Ranks, line: &str) -> String {
        let (each, dealt) = match ranks {
            Ranks::Block(each) => (each, false),
            Ranks::Dealt(each) => (each, true),
        };
        // UCX takes two name spaces of one machine for one host.
        let mut settings = vec![("UCX_TLS", "tcp,self".to_owned())];
        let [one, two] = &self.addresses;
        let agent = self.bench.path("agent").display().to_string();
        let [subnet, all] = [format!("{one}/24"), (2 * each).to_string()];
        let enter = self.bench.path("enter").display().to_string();
        let mut words = vec![enter, self.names[0].clone(), mpirun.program().to_owned()];
        words.extend(mpirun.flags().iter().map(|&f| f.to_owned()));
        match mpirun {
            Mpirun::OpenMpi => {
                words.extend(["--host".into(), format!("{one}:{each},{two}:{each}")]);
                if dealt {
                    words.extend(["--map-by", "node"].map(Into::into));
                }
                for (name, value) in [
                    ("plm_rsh_agent", agent.as_str()),
                    ("oob_tcp_if_include", &subnet),
                    ("btl_tcp_if_include", &subnet),
                    ("btl", "self,vader,tcp"),
                    ("pml", "ob1"),
                ] {
                    words.extend(["--mca".into(), name.into(), value.into()]);
                }
                words.extend(settings.iter().flat_map(|(n, v)| ["-x".to_owned(), format!("{n}={v}")]));
            }
            Mpirun::Mpich => {
                // Open MPI says where it runs; Hydra does not.
                settings
                    .push(("CARAVAN_RENDEZVOUS", format!("{one}:{}", 20_000 + std::process::id() % 10_000)));
                // Inside an allocation srun starts its proxies, whose variables the ranks inherit.
                let proxy = [("JOB_ID", "1"), ("STEP_ID", "0"), ("PROCID", "0"), ("STEP_NUM_TASKS", "2")];
                let slurm = proxy.map(|(name, value)| (format!("SLURM_{name}"), value.to_owned()));
                // It goes round the hosts until all ranks have one.
                let turn = if dealt { 1 } else { each };
                words.extend(["-hosts".into(), format!("{one}:{turn},{two}:{turn}")]);
                words.extend(
                    ["-launcher", "ssh", "-launcher-exec", &agent, "-localhost", one].map(Into::into),
                );
                let settings = settings.into_iter().map(|(name, value)| (name.to_owned(), value));
                words.extend(settings.chain(slurm).flat_map(|(n, v)| ["-genv".to_owned(), n, v]));
            }
        }
        words.extend(["-n".into(), all]);
        format!("{} {line}", words.join(" "))
    }
}

impl Hosts<'_> {
    /// The network interface of host `at`.
    pub(crate) fn device(&self, at: usize) -> String {
        let shown = self.run(&format!("ip -n {} -o addr show to {}", self.names[at], self.addresses[at]));
        shown.stdout.split_whitespace().nth(1).expect("a device").to_owned()
    }
}

impl Drop for Hosts<'_> {
    fn drop(&mut self) {
        for name in &self.names {
            // The devices go with their name space.
            let _ = self.run(&format!("ip netns del {name}"));
        }
    }
}

#[test]
fn ranks_of_two_hosts_give_the_same_bits_over_a_slow_link() {
    let bench = bench();
    let Some(hosts) = Hosts::make(&bench) else { return };
    bench.text("text.txt", 6000);
    bench.run(&traced("own-2", "--ranks 2")).success();
    bench.run(&traced("own-4", "--ranks 4")).success();
    let between = between();
    for mpirun in Mpirun::tried() {
        for transport in &between {
            for ranks in [Ranks::Block(1), Ranks::Block(2)] {
                trains_the_same(&hosts, mpirun, ranks, transport);
            }
            measures(
                &hosts,
                mpirun,
                Ranks::Block(1),
                &format!("all_reduce -b 64K -e 1M --transport {transport}"),
            );
        }
        // Also with shared memory inside each host, whose ranks are found by its name, whichever they are.
        for transport in between.iter().map(|t| format!("shm+{t}")) {
            for ranks in [Ranks::Block(1), Ranks::Block(2), Ranks::Dealt(2)] {
                trains_the_same(&hosts, mpirun, ranks, &transport);
            }
            treats_hosts_as_units(&hosts, mpirun, &transport);
            // By itself the program takes what reaches, and inside each host its memory.
            let table = measures(&hosts, mpirun, Ranks::Block(1), "all_reduce -b 64K -e 64K");
            assert!(table.contains(&format!("transport {transport} ")), "{table}");
        }
        // Shared memory says that it ends at the host.
        let line = format!("{CARAVAN} bench all_reduce -b 64K -e 64K -n 3 --transport shm");
        let outcome = hosts.mpirun(mpirun, Ranks::Block(1), &line);
        assert_ne!(outcome.code, Some(0));
        assert!(
            outcome.stderr.contains("it joins ranks of one host, and these are on 2")
                && outcome.stderr.contains("(--transport)"),
            "{}",
            outcome.stderr
        );
    }
    drop(hosts);
    bench.nothing_left();
}

#[test]
fn of_two_hosts_a_rank_that_does_not_come_or_is_killed_is_named() {
    let bench = bench();
    let Some(hosts) = Hosts::make(&bench) else { return };
    for mpirun in Mpirun::tried() {
        for transport in between() {
            names_a_rank_that_does_not_come(&hosts, mpirun, transport);
            for victim in [0, 3] {
                ends_when_one_is_killed(&hosts, mpirun, transport, victim);
            }
        }
    }
    drop(hosts);
    bench.nothing_left();
}

/// The transports that reach from one host to the other.
fn between() -> Vec<&'static str> {
    Mpirun::transports().into_iter().filter(|&transport| transport != "shm").collect()
}

/// A training run has the bits of one without hosts.
fn trains_the_same(hosts: &Hosts<'_>, mpirun: Mpirun, ranks: Ranks, transport: &str) {
    let name = format!("{}-{transport}-{ranks:?}", mpirun.program()).replace(['(', ')'], "-");
    let line = format!("{CARAVAN} {}", traced(&name, &format!("--transport {transport}")));
    hosts.mpirun(mpirun, ranks, &line).success();
    let (Ranks::Block(each) | Ranks::Dealt(each)) = ranks;
    same(hosts.bench, &format!("own-{}", 2 * each), &name);
}

/// The other ranks say which one they wait for, whoever brings them together.
fn names_a_rank_that_does_not_come(hosts: &Hosts<'_>, mpirun: Mpirun, transport: &str) {
    // Of two that have not come both would be named: the first begins to wait when the other two have begun.
    let begun = |rank| hosts.bench.path(&format!("begun-{rank}"));
    let script = format!(
        "#!/bin/sh\ncase $OMPI_COMM_WORLD_RANK$PMI_RANK in\n\
         0) until [ -e {one} ] && [ -e {two} ]; do sleep 0.01; done;;\n\
         3) exec sleep 60;;\n\
         *) : > {folder}/begun-$OMPI_COMM_WORLD_RANK$PMI_RANK;;\nesac\nexec \"$@\"\n",
        one = begun(1).display(),
        two = begun(2).display(),
        folder = hosts.bench.path(".").display(),
    );
    let late = hosts.bench.file("late", script);
    std::fs::set_permissions(&late, PermissionsExt::from_mode(0o755)).unwrap();
    let flags = format!("--transport {transport} --rendezvous-timeout 4 -n 1");
    let since = Instant::now();
    let outcome = hosts.mpirun(
        mpirun,
        Ranks::Block(2),
        &format!("{} {CARAVAN} bench all_reduce {flags}", late.display()),
    );
    for rank in [1, 2] {
        std::fs::remove_file(begun(rank)).expect("a rank that has begun");
    }
    assert!(outcome.code.is_some_and(|code| code != 0), "{outcome:?}");
    let named = outcome.stderr.contains("rank 3 of 4 did not arrive");
    assert!(named, "{transport}: {}", outcome.stderr);
    assert!(since.elapsed() < Duration::from_secs(30), "{transport}: {:?}", since.elapsed());
}

/// Whichever host the rank is on that is killed, none of the other is left soon after.
fn ends_when_one_is_killed(hosts: &Hosts<'_>, mpirun: Mpirun, transport: &str, victim: usize) {
    let line = format!("{CARAVAN} {ENDLESS} --quiet --transport {transport}");
    let run = hosts.bench.endless(hosts.command(&hosts.line_of(mpirun, Ranks::Block(2), &line)));
    let ranks = hosts.bench.ranks_by(mpirun.rank_variable());
    assert_eq!(ranks.len(), 4);
    signal(ranks[victim].1, Signal::KILL);
    let outcome = hosts.bench.finish(run);
    assert_ne!(outcome.code, Some(0), "{outcome:?}");
    mpirun.names_the_killed(victim, &outcome.stderr);
    hosts.bench.nothing_left();
    json_lines(&hosts.bench.path("m.jsonl"));
    assert!(!hosts.bench.path("out").exists());
    let took = outcome.took;
    assert!(took < PROMISED, "{transport} under {}, rank {victim}: {took:?}", mpirun.program());
    std::fs::remove_file(hosts.bench.path("m.jsonl")).expect("the metrics of a run");
}

/// The table of a measurement whose results are right.
fn measures(hosts: &Hosts<'_>, mpirun: Mpirun, ranks: Ranks, what: &str) -> String {
    let table = hosts.mpirun(mpirun, ranks, &format!("{CARAVAN} bench {what} -n 3")).success().stdout;
    assert!(table.contains("# Out of bounds values : 0 OK"), "{table}");
    table
}

/// Ranks dealt to the hosts in turn are said to be there, and collectives cross between hosts as those over nodes do.
fn treats_hosts_as_units(hosts: &Hosts<'_>, mpirun: Mpirun, transport: &str) {
    for what in
        ["all_reduce", "all_gather", "reduce_scatter --algo hierarchical", "all_to_all --algo hierarchical"]
    {
        let flags = format!("-b 256K -e 256K --transport {transport}");
        let table = measures(hosts, mpirun, Ranks::Dealt(2), &format!("{what} {flags}"));
        let [one, two] = &hosts.names;
        let ranks: Vec<&str> = table.lines().filter(|line| line.starts_with("#  Rank ")).collect();
        assert_eq!(ranks.len(), 4, "{table}");
        for (line, host) in ranks.iter().zip([one, two, one, two]) {
            assert!(line.contains(&format!(" {host} ")), "{table}");
        }
        assert!(table.contains("bytes out-of-place: hierarchical, "), "{table}");
    }
}
