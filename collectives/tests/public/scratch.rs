//! What the engine holds for calls is what was said beforehand, also before ranks had met, on every transport but MPI, whose
//! launcher has a test of its own.

use crate::ranks::{connect, identity, job, options, this_test};
use crate::ucx_processes::{available, ucx};
use collectives::bootstrap::{Rendezvous, shm_inside};
use collectives::schedule::Tuning;
use collectives::transport::hierarchical::Hierarchical;
use collectives::transport::{Expected, Medium, Nodes, Transport};
use collectives::{Communicator, Options, Result};
use conformance::{planned, standard};

/// A group in which nothing lies between ranks but this.
fn plain(between: Medium) -> Expected {
    Expected { between, inside: None, nodes: None, link: false }
}

fn rank(comm: Communicator, expected: &Expected) {
    assert_eq!(comm.group(), expected.group(comm.rank(), comm.size(), Tuning::default()));
    planned::rank(comm);
}

fn over(
    test: &str,
    sizes: &[usize],
    transport: fn() -> Result<Box<dyn Transport>>,
    expected: fn(usize) -> Expected,
) {
    let body = || {
        let comm = Communicator::new(transport().expect("a group"), standard()).expect("a communicator");
        let expected = expected(comm.size());
        rank(comm, &expected);
    };
    for report in job(test, sizes, body) {
        assert_eq!(report.exit_code(), 0, "{:?}", report.sentence());
    }
}

#[test]
fn over_threads() {
    for size in 2..=4 {
        Communicator::on_threads(size, Options::default(), |comm| rank(comm, &plain(Medium::Threads)));
    }
}

#[test]
fn over_shared_memory() {
    over(this_test!(), &[2, 3], connect, |_| plain(Medium::Shm));
}

fn over_messages() -> Result<Box<dyn Transport>> {
    ucx(&mut Rendezvous::join(&identity(), &options())?)
}

/// Ranks dealt to two nodes in turn.
fn two_nodes(size: usize) -> Nodes {
    Nodes::of(&(0..size).map(|rank| rank % 2).collect::<Vec<usize>>())
}

fn nodes() -> Result<Box<dyn Transport>> {
    let mut outer = over_messages()?;
    let nodes = two_nodes(outer.size());
    let inner = shm_inside(&mut *outer, &identity(), &options(), &nodes)?;
    Ok(Box::new(Hierarchical::new("nodes", inner, outer, nodes)?))
}

#[test]
fn over_ucx() {
    if available() {
        over(this_test!(), &[2, 3], over_messages, |_| plain(Medium::Ucx));
    }
}

#[test]
fn over_nodes() {
    if available() {
        over(this_test!(), &[3, 4], nodes, |size| Expected {
            inside: Some(Medium::Shm),
            nodes: Some(two_nodes(size)),
            ..plain(Medium::Ucx)
        });
    }
}
