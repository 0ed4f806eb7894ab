//! How many ranks there are, and how they reach each other.

use super::launched::{check_alone, elsewhere};
use super::{Asked, usage};
use crate::agree::Signature;
use crate::args::{DeviceKind, Mover, RankArgs};
use crate::bind::Binding;
use crate::failure::Result;
use crate::files;
use crate::gpus;
use crate::layers::Layers;
use crate::machine::VERSION;
use crate::transports::{self, Transport};
use crate::tuning::{self, ByLayout};
use collectives::bootstrap::spawn::OnRequest;
use collectives::bootstrap::{self, Identity};
use collectives::schedule::{Group, Kind};
use collectives::transport::{self, Nodes};
use collectives::{Communicator, MAX_SIZE, Progress};
use std::path::PathBuf;
use std::time::Duration;

/// Ranks that are started where nobody says how many, and nothing else does.
pub const UNASKED: usize = 2;

/// More ranks than this that one machine is to start are a typing error.
const MOST_HERE: usize = 1024;

/// How many ranks, and how they reach each other.
#[derive(Clone, Debug)]
pub struct Ranks {
    /// All ranks of the run.
    pub world: usize,
    /// What reaches every one of them.
    pub transport: Transport,
    /// What lies over that.
    pub layers: Layers,
    /// The name of both together, in output and in tuning tables.
    pub label: String,
    /// Compute threads of each.
    pub threads: usize,
    /// Whether ranks compute with those, which nobody asked for: each with its share of its host's processors.
    shared: bool,
    /// How long they wait for each other at the start.
    pub rendezvous_timeout: Duration,
    /// How their communicators behave.
    pub options: collectives::Options,
    /// The tuning table of ranks whose nodes are found out once they have met.
    pub by_layout: Option<ByLayout>,
    /// Whether the transport's own collectives are wanted beside ours.
    pub native: bool,
    /// Whether only the thread that connects a rank calls its communicator, which then need not be ready for others.
    pub one_caller: bool,
    /// Whether each of them reads data before they meet, as train's and eval's do, so that one may come late.
    pub reads_data: bool,
    /// What they do when they are asked to end.
    pub on_request: OnRequest,
    /// Whether ranks that are started here stay each on its share of the processors.
    pub bind: Binding,
    /// Whether memory of GPUs goes over NCCL, and only the rest over the transport.
    pub nccl: bool,
    /// Whether ranks may share a GPU.
    pub share_gpus: bool,
}

impl Ranks {
    /// Checks the flags, and reads the tuning table if there is one. `identity` is this process's place among the ranks,
    /// if something has started those; if nothing has, and nobody says how many there are to be, there are `unasked`.
    ///
    /// # Errors
    /// No ranks, too many, a transport that cannot be used, or a table that says nothing about it.
    pub fn plan(args: &RankArgs, unasked: usize, identity: Option<&Identity>) -> Result<Self> {
        let mut ranks = Self::untuned(args, unasked, identity)?;
        if let Some(path) = tuning::named(args.tuning.as_ref()) {
            ranks.go_by(path, identity).map_err(|e| tuning::told(args.tuning.as_ref(), e))?;
        }
        Ok(ranks)
    }

    /// Reads the table at `path`.
    fn go_by(&mut self, path: PathBuf, identity: Option<&Identity>) -> Result<()> {
        if self.world > 1 {
            let tune = self.tune(identity.is_some());
            if self.layers.found() {
                self.by_layout = Some(ByLayout::load(&path, &self.label, self.world, tune)?);
            } else {
                let tuning = &mut self.options.tuning;
                *tuning = tuning::load(&path, &self.label, self.world, &tune, *tuning)?;
            }
        } else {
            // One rank has nothing to choose, and may yet have been given what is no table.
            tuning::read(&path)?;
        }
        self.check_inputs("--tuning", &[path], identity)
    }

    /// The same without a tuning table, which need not be there yet.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    pub fn untuned(args: &RankArgs, unasked: usize, identity: Option<&Identity>) -> Result<Self> {
        let world = match (args.ranks, identity) {
            (Some(asked), Some(there)) if asked != there.world => {
                return usage(elsewhere(asked, there));
            }
            (_, Some(there)) => there.world,
            (Some(asked), None) => asked,
            (None, None) => {
                check_alone(|name| std::env::var(name).ok())?;
                unasked
            }
        };
        if identity.is_none() && (world == 0 || world > MOST_HERE) {
            return usage(format!(
                "--ranks {world}: one machine starts from 1 to {MOST_HERE} ranks; mpirun and srun start up to {MAX_SIZE} \
                 on several"
            ));
        }
        // The processors of this host are for its own ranks, and a rank may be bound to some of them.
        let here = identity.and_then(|i| i.local_size).unwrap_or(world).max(1);
        let processors = bootstrap::processors_of_host(identity);
        let crowded = Some(here > processors);
        let threads = args.threads.unwrap_or_else(|| share(processors, here));
        let asked = Asked::new(args, world)?;
        let Asked { nccl, transport, mut layers, rendezvous_timeout, deadline } = asked;
        if nccl && let Some(why) = gpus::obstacle() {
            return usage(format!("transport nccl cannot be used: {why}"));
        }
        let automatic = transport.is_none();
        let transport = Transport::choose(transport, identity, &|other| asked.with(other))?;
        // Behind a link every rank is a node, unless nodes were asked for.
        let alone = layers.link.is_some() && layers.per_node.is_none();
        if automatic && !alone && matches!(transport, Transport::Mpi | Transport::Ucx) {
            layers.inside = Some(Transport::Shm);
        }
        let (label, tuning) = (layers.label(transport), layers.tuning(world));
        Ok(Ranks {
            world,
            transport,
            layers,
            label,
            threads,
            shared: false,
            rendezvous_timeout,
            options: collectives::Options { crowded, deadline, tuning, ..Default::default() },
            by_layout: None,
            native: false,
            one_caller: false,
            reads_data: false,
            on_request: OnRequest::EndAtOnce,
            bind: Binding::None,
            nccl,
            share_gpus: args.share_gpus,
        })
    }

    /// Ranks that compute on the host take their share of its processors, unless `asked` for others.
    pub fn compute_on(&mut self, device: DeviceKind, asked: Option<usize>) {
        self.shared = device == DeviceKind::Cpu && asked.is_none();
        if self.shared {
            self.threads = self.computing(self.threads);
        }
    }

    /// How many of a rank's `processors` compute.
    fn computing(&self, processors: usize) -> usize {
        computing(processors, self.options.progress)
    }

    /// The same for ranks of a launcher that has not said how many of them a host has, once this one has met the others and
    /// `here` are on its host: until then, that might have been all. What it computes with was planned by then; also gives
    /// what helps where that is less than its share.
    pub fn met(&self, here: usize, identity: &Identity) -> (Self, Option<String>) {
        let mut ranks = self.clone();
        if identity.local_size.is_some() {
            return (ranks, None);
        }
        let processors = bootstrap::processors_of_host(Some(identity));
        ranks.options.crowded = Some(here > processors);
        let (threads, share) = (self.threads, self.computing(share(processors, here)));
        let advice = (self.shared && share > threads).then(|| {
            format!(
                "ranks compute with --threads {threads}, as if all {} shared a host, for nothing said how many do (here \
                 {here}): set CARAVAN_LOCAL_SIZE and CARAVAN_LOCAL_RANK for each, or take --threads {share}",
                self.world
            )
        });
        (ranks, advice)
    }

    /// Whether there can be fewer ranks, of which there have to be `least`: others that started these have chosen.
    pub fn fewer(&self, least: usize, identity: Option<&Identity>) -> bool {
        identity.is_none() && self.world > least
    }

    /// Whether each rank can read what this process reads from these files, each by itself.
    ///
    /// # Errors
    /// One of them is the standard input, and ranks are to be processes that this one starts.
    pub fn check_inputs(&self, flag: &str, files: &[PathBuf], identity: Option<&Identity>) -> Result<()> {
        if identity.is_some() || self.transport == Transport::Threads {
            return Ok(());
        }
        files.iter().try_for_each(|file| files::check_named(flag, file))
    }

    /// The group of rank 0, as far as it is known before ranks have met.
    ///
    /// # Errors
    /// Nodes that there cannot be.
    pub fn expected(&self) -> Result<Option<Group>> {
        let expected = self.layers.expected(self.transport, self.world)?;
        Ok(expected.map(|expected| expected.group(0, self.world, self.options.tuning)))
    }

    /// Bytes in which each of them keeps what ranks of a host see of each other, `here` of which are on this one.
    pub fn control_bytes(&self, here: usize) -> usize {
        self.layers.control_bytes(self.transport, self.world, here)
    }

    /// What these ranks are called in tuning tables, on these nodes: of nodes that were found, as of those by hand.
    pub fn group(&self, nodes: Option<&Nodes>) -> String {
        match nodes.filter(|_| self.layers.found()) {
            Some(nodes) => format!("{}/{}", self.label, nodes.layout()),
            None => self.label.clone(),
        }
    }

    /// The communicator over what joins all ranks, with what was measured of such ones.
    ///
    /// # Errors
    /// A tuning table that is for other nodes, or names an algorithm that cannot carry its collective here; the
    /// transport's.
    pub fn communicator(&self, transport: Box<dyn transport::Transport>) -> Result<Communicator> {
        let mut options = self.options;
        if let Some(table) = &self.by_layout {
            let group = self.group(transport.nodes());
            options.tuning = table.of(&group, self.world, options.tuning)?;
        }
        let comm = Communicator::new(transport, options)?;
        tuning::check(&comm.group(), || self.group(comm.nodes()))?;
        Ok(comm)
    }

    /// What measures such ranks. Which nodes those get that something has `started` depends on more than their number: the same
    /// launcher with other flags may lay them out otherwise.
    fn tune(&self, started: bool) -> String {
        let (flags, world) = (self.layers.flags(self.transport), self.world);
        match started {
            true => format!("'caravan bench tune {flags} -o FILE', started as these {world} ranks are,"),
            false => format!("'caravan bench tune --ranks {world} {flags} -o FILE'"),
        }
    }

    /// The transport that was asked for, as `--transport` takes it.
    pub fn asked(&self) -> String {
        format!("{}{}", transports::nccl_prefix(self.nccl), self.label)
    }

    /// What must be the same on every rank before any call: who differs would make other calls for one that all make,
    /// and wait for messages that nobody sends, or read what is something else.
    pub fn signature(&self) -> Signature {
        let mut all = vec![
            ("version", VERSION.to_owned()),
            ("--transport", self.asked()),
            ("--share-gpus", self.share_gpus.to_string()),
        ];
        // As they are in a table. What else the choice of algorithms goes by follows from the transport.
        all.extend(Kind::ALL.into_iter().zip(self.options.tuning.measured).map(|(kind, rule)| {
            let rule = rule.map_or("by the cost model".to_owned(), |rule| rule.to_string());
            ("--tuning", format!("{kind} {rule}"))
        }));
        let rules = self.by_layout.iter().flat_map(|table| table.rules(&self.label, self.world));
        all.extend(rules.map(|rule| ("--tuning", rule)));
        // The library is made ready for it by all ranks together.
        all.extend(self.native.then(|| ("--algo", "native".to_owned())));
        all
    }
}

/// How many of a rank's `processors` compute: a thread that moves calls has one of them.
fn computing(processors: usize, progress: Progress) -> usize {
    match progress {
        Progress::Inline => processors,
        Progress::Thread { .. } => (processors - 1).max(1),
    }
}

/// With how many threads each of `here` ranks of a host computes that nobody gave any, where they have so many `processors`
/// between them.
pub fn unasked_threads(processors: usize, here: usize, device: DeviceKind, progress: Mover) -> usize {
    let share = share(processors, here);
    if device == DeviceKind::Cpu { computing(share, progress.options()) } else { share }
}

/// The threads of one of `ranks` that have so many processors between them.
fn share(processors: usize, ranks: usize) -> usize {
    (processors / ranks).clamp(1, bootstrap::processors())
}

/// How to get so many ranks: those that something else has `started`, or will, are not `caravan`'s to choose.
pub fn with_ranks(ranks: u64, started: bool) -> String {
    match (started, ranks) {
        (true, 1) => "start 1 rank".to_owned(),
        (true, _) => format!("start {ranks} ranks"),
        (false, _) => format!("take --ranks {ranks}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::tests::train;
    use collectives::bootstrap::Launcher;

    fn args(flags: &str) -> RankArgs {
        train(flags).ranks
    }

    fn plan(flags: &str) -> Result<Ranks> {
        Ranks::plan(&args(flags), UNASKED, None)
    }

    #[test]
    fn a_machine_starts_fewer_ranks_than_a_run_may_have() {
        let at = |flags, world| {
            let launched = |name: &str| match name {
                "SLURM_PROCID" => Some("0".to_owned()),
                "SLURM_NTASKS" | "SLURM_STEP_NUM_TASKS" => Some(format!("{world}")),
                "SLURM_JOB_ID" | "SLURM_STEP_ID" => Some("1".to_owned()),
                _ => None,
            };
            Identity::from_lookup(launched)
                .map(|identity| Ranks::plan(&args(flags), UNASKED, identity.as_ref()))
        };
        assert_eq!(at("--transport shm", MAX_SIZE).unwrap().unwrap().world, MAX_SIZE);
        let text = at("--transport shm", MAX_SIZE + 1).err().unwrap().to_string();
        assert!(text.contains("=16385: at most 16384 ranks"), "{text}");
        assert_eq!(plan("--ranks 1024").unwrap().world, 1024);
        for ranks in ["0", "1025"] {
            let text = plan(&format!("--ranks {ranks}")).unwrap_err().to_string();
            let words = [&format!("--ranks {ranks}:"), "from 1 to 1024", "up to 16384"];
            assert!(words.iter().all(|w| text.contains(w)), "{text}");
        }
    }

    #[test]
    fn ranks_whose_hosts_nobody_named_learn_from_each_other_who_shares_one() {
        let processors = bootstrap::processors();
        let world = 2 * processors;
        let there = Identity { world, launcher: Launcher::Caravan, ..Identity::alone() };
        let unknown = Identity { local_size: None, ..there.clone() };
        let plan =
            |flags: &str, identity: &Identity| Ranks::plan(&args(flags), UNASKED, Some(identity)).unwrap();
        let ranks = Ranks { shared: true, ..plan("", &unknown) };
        assert_eq!((ranks.options.crowded, ranks.threads), (Some(true), 1));
        let (met, advice) = ranks.met(1, &unknown);
        assert_eq!(met.options.crowded, Some(1 > bootstrap::processors_of_host(Some(&unknown))));
        assert_eq!(advice.is_some(), processors > 1, "{advice:?}");
        if let Some(advice) = advice {
            let words = ["--threads 1, as if all", "(here 1)", &format!("--threads {processors}")];
            assert!(words.iter().all(|word| advice.contains(word)), "{advice}");
        }
        // What was asked for stays or is of no use, and so does what was right, and what a launcher has said.
        assert_eq!(plan("", &unknown).met(1, &unknown).1, None);
        let (met, advice) = ranks.met(world, &unknown);
        assert_eq!((met.options.crowded, advice), (Some(true), None));
        let known = Identity { local_size: Some(world), ..there };
        let (met, advice) = Ranks { shared: true, ..plan("", &known) }.met(1, &known);
        assert_eq!((met.options.crowded, advice), (Some(true), None));
    }

    #[test]
    fn ranks_compare_what_changes_their_calls() {
        let signature = |flags: &str| plan(flags).unwrap().signature();
        for flags in ["--share-gpus", "--transport threads", "--emulate-link latency=1us"] {
            assert_ne!(signature(flags), signature(""), "{flags}");
        }
        assert_eq!(signature("--threads 3 --call-timeout 7 --quiet"), signature(""));
        assert_ne!(Ranks { native: true, ..plan("").unwrap() }.signature(), signature(""));
    }

    #[test]
    fn a_table_leaves_the_rounds_of_an_emulated_link() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("table");
        let link = "latency=1000us,bandwidth=10GB/s";
        let rule = format!("threads@{link} 2 all_reduce all exchange-all exchange-all\n");
        std::fs::write(&path, format!("caravan-tuning 1\n{rule}")).unwrap();
        let flags = format!("--transport threads --emulate-link {link}");
        let by_cost = plan(&flags).unwrap().options.tuning;
        let measured = plan(&format!("{flags} --tuning {}", path.display())).unwrap().options.tuning;
        assert!(by_cost.round > collectives::schedule::Tuning::default().round);
        assert_eq!(measured.measured.iter().flatten().count(), 1);
        assert_eq!(collectives::schedule::Tuning { measured: by_cost.measured, ..measured }, by_cost);
    }
}
