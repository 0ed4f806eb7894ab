//! The suite that every transport passes, with shared memory inside nodes and messages between them: over shared
//! memory too, and over UCX where that is installed. Every rank is a process of this machine, cut into nodes.

use crate::ranks::{self, PATIENCE, identity, job, options, this_test, until};
use crate::ucx_processes::{available, ucx};
use collectives::bootstrap::{Ending, Rendezvous, nodes_of, shm_inside};
use collectives::transport::emulated::Emulated;
use collectives::transport::hierarchical::Hierarchical;
use collectives::transport::shm::ShmTransport;
use collectives::transport::{Nodes, PerNode, Transport};
use collectives::{Communicator, Error, Options, Result};
use conformance::{Case, cases};

/// What joins the nodes.
type Outer = fn(&mut Rendezvous) -> Result<Box<dyn Transport>>;

fn shm(rendezvous: &mut Rendezvous) -> Result<Box<dyn Transport>> {
    Ok(Box::new(ShmTransport::connect(rendezvous, &options())?))
}

/// Behind a link that holds every message back.
fn slow_ucx(rendezvous: &mut Rendezvous) -> Result<Box<dyn Transport>> {
    let (inner, apart) = (ucx(rendezvous)?, Nodes::apart(rendezvous.world()));
    let link = "latency=5us,bandwidth=2GB/s".parse().expect("a link");
    Ok(Box::new(Emulated::new("slow ucx", inner, link, apart)?))
}

/// The node of each rank.
type Shape = &'static [usize];

fn nodes(outer: Outer, shape: Shape) -> Result<Box<dyn Transport>> {
    let mut rendezvous = Rendezvous::join(&identity(), &options())?;
    let (outer, nodes) = (outer(&mut rendezvous)?, Nodes::of(shape));
    let inner = rendezvous.shm_inside(&nodes, &options())?;
    Ok(Box::new(Hierarchical::new("nodes", inner, outer, nodes)?))
}

/// Every case, or those `chosen`, that leaves its processes alive, each in a group of its own.
fn suite(test: &str, outer: Outer, shape: Shape, chosen: fn(&Case) -> bool) {
    let n = shape.len();
    let rank = || {
        let mut transport = nodes(outer, shape).expect("a group");
        let all: Vec<usize> = (0..n).collect();
        for (i, case) in cases().iter().filter(|c| !c.fails && chosen(c)).enumerate() {
            let group = transport.subgroup(&all, 1_000_000 + i as u64, PATIENCE).expect("a group");
            (case.run)(Communicator::new(group, (case.options)()).expect("a communicator"));
        }
    };
    for report in job(test, &[n], rank) {
        assert_eq!(report.exit_code(), 0, "{:?}", report.sentence());
    }
}

fn without_the_longest(case: &Case) -> bool {
    !["all_reduce", "reduce", "all_to_all"].contains(&case.name)
}

#[test]
fn nodes_of_two_over_shared_memory() {
    suite(this_test!(), shm, &[0, 0, 1, 1], |_| true);
}

#[test]
fn uneven_nodes_over_shared_memory() {
    suite(this_test!(), shm, &[0, 0, 0, 1, 1], without_the_longest);
}

#[test]
fn nodes_of_one_over_shared_memory() {
    suite(this_test!(), shm, &[0, 1], without_the_longest);
}

#[test]
fn one_node_over_shared_memory() {
    suite(this_test!(), shm, &[0, 0, 0], without_the_longest);
}

#[test]
fn uneven_nodes_over_ucx() {
    if available() {
        suite(this_test!(), ucx, &[0, 0, 1], without_the_longest);
    }
}

#[test]
fn scattered_nodes_over_ucx() {
    if available() {
        suite(this_test!(), ucx, &[0, 1, 0, 2, 1], without_the_longest);
    }
}

#[test]
fn emulated_links_over_ucx() {
    if available() {
        suite(this_test!(), slow_ucx, &[0, 1, 2], without_the_longest);
    }
}

#[test]
fn ranks_dealt_in_turn_behind_emulated_links_over_ucx() {
    if available() {
        suite(this_test!(), slow_ucx, &[0, 1, 0, 1], without_the_longest);
    }
}

#[test]
fn failures_of_nodes_over_shared_memory() {
    ranks::failures(this_test!(), &[3], || nodes(shm, &[0, 0, 1]));
}

#[test]
fn failures_of_nodes_over_ucx() {
    if available() {
        ranks::failures(this_test!(), &[4], || nodes(ucx, &[0, 1, 1, 0]));
    }
}

/// A rank of another node that gives up is named, with its reason.
#[test]
fn a_rank_of_another_node_that_fails_is_named() {
    let reports = job(this_test!(), &[4], || {
        let transport = nodes(shm, &[0, 0, 1, 1]).expect("a group");
        let rank = transport.rank();
        let comm = Communicator::new(transport, collectives::Options::default()).expect("a communicator");
        comm.barrier().expect("works");
        if rank == 3 {
            std::process::abort();
        }
        let error = comm.barrier().expect_err("rank 3 is gone").to_string();
        assert!(error.contains("rank 3"), "{error}");
        std::process::exit(0);
    });
    for report in reports {
        let text = report.sentence().expect("a failure");
        assert!(text.contains("rank 3"), "{text}");
        assert!(report.endings[..3].iter().all(|ending| *ending == Ending::Exited(0)), "{text}");
    }
}

/// A rank that is killed is named as the one that it is, also in a group of others, in which its number is another's.
fn a_killed_outsider_is_named(test: &str, outer: Outer) {
    let reports = job(test, &[4], || {
        let transport = nodes(outer, &[0, 0, 0, 1]).expect("a group");
        let rank = transport.rank();
        let comm = Communicator::new(transport, Options::default()).expect("a communicator");
        let others = comm.split((rank > 0).then_some(0), 0).expect("works");
        comm.barrier().expect("works");
        let Some(others) = others else { std::process::abort() };
        let error = loop {
            if let Err(error) = others.barrier() {
                break error.to_string();
            }
        };
        assert!(error.contains("rank 0 "), "{error}");
        std::process::exit(0);
    });
    for report in reports {
        let text = report.sentence().expect("a failure");
        assert!(text.contains("rank 0 was killed"), "{text}");
        assert!(report.endings[1..].iter().all(|ending| *ending == Ending::Exited(0)), "{text}");
    }
}

#[test]
fn a_killed_outsider_over_shared_memory() {
    a_killed_outsider_is_named(this_test!(), shm);
}

#[test]
fn a_killed_outsider_over_ucx() {
    if available() {
        a_killed_outsider_is_named(this_test!(), ucx);
    }
}

/// Without a number of ranks per node, the machine is one; with it, ranks are cut into nodes.
#[test]
fn hosts_are_nodes() {
    let reports = job(this_test!(), &[3], || {
        let mut rendezvous = Rendezvous::join(&identity(), &options()).expect("meets");
        let mut outer = shm(&mut rendezvous).expect("a group");
        for (per_node, of) in [(None, [0, 0, 0]), (Some(PerNode::Block(2)), [0, 0, 1])] {
            assert_eq!(nodes_of(&mut *outer, &options(), per_node).expect("nodes"), Nodes::of(&of));
            assert_eq!(rendezvous.nodes(per_node).expect("nodes"), Nodes::of(&of));
        }
        let none = Some(PerNode::Block(0));
        assert!(nodes_of(&mut *outer, &options(), none).is_err() && rendezvous.nodes(none).is_err());
    });
    assert!(reports.iter().all(|report| report.exit_code() == 0), "{:?}", reports[0].sentence());
}

/// Shells on one host, ssh and pdsh: what nothing names is told apart by its parent, of which each rank has its own.
#[test]
fn ranks_of_a_node_meet_whatever_each_calls_the_job() {
    let reports = job(this_test!(), &[3], || {
        let mut identity = identity();
        let mut outer = shm(&mut Rendezvous::join(&identity, &options()).expect("meets")).expect("a group");
        identity.job = Some(format!("parent-{}-of-{}", identity.rank, std::process::id()));
        let nodes = Nodes::of(&[0, 1, 0]);
        let inner = shm_inside(&mut *outer, &identity, &options(), &nodes).expect("meets");
        assert_eq!(inner.map(|inner| inner.size()), [Some(2), None, Some(2)][outer.rank()]);
    });
    assert!(reports.iter().all(|report| report.exit_code() == 0), "{:?}", reports[0].sentence());
}

/// The supervisor takes what a rank announces for that rank's own failure.
#[test]
fn who_stops_for_a_rank_of_another_node_does_not_announce_a_failure_of_its_own() {
    let reports = job(this_test!(), &[4], || {
        let mut t = nodes(shm, &[0, 0, 1, 1]).expect("a group");
        let meeting = t.subgroup(&[0, 1, 2, 3], 1, PATIENCE).expect("a group");
        let meeting = Communicator::new(meeting, Options::default()).expect("a communicator");
        meeting.barrier().expect("all come");
        if t.rank() == 0 {
            t.abort(&Error::PeerLost { rank: 0, peer: 3, how: "is gone".into() });
        } else {
            let heard = until(&mut *t, |_| Ok(None::<()>)).expect_err("rank 0 gave up").to_string();
            assert!(heard.contains("rank 3") && heard.contains("is gone"), "{heard}");
        }
    });
    for report in reports {
        assert_eq!((report.exit_code(), report.first_failure), (0, None));
    }
}
