//! What the engine holds for calls is what was said beforehand, on every transport but MPI, whose launcher has a test of
//! its own.

use crate::ranks::{connect, identity, job, options, this_test};
use crate::ucx_processes::{available, ucx};
use collectives::bootstrap::{Rendezvous, shm_inside};
use collectives::transport::hierarchical::Hierarchical;
use collectives::{Communicator, Result};

use collectives::transport::{Nodes, Transport};
use conformance::{planned, standard};

fn over(test: &str, sizes: &[usize], transport: fn() -> Result<Box<dyn Transport>>) {
    let body = || {
        planned::rank(Communicator::new(transport().expect("a group"), standard()).expect("a communicator"))
    };
    for report in job(test, sizes, body) {
        assert_eq!(report.exit_code(), 0, "{:?}", report.sentence());
    }
}

#[test]
fn over_threads() {
    for size in 2..=4 {
        std::thread::scope(|scope| {
            for comm in Communicator::threads(size) {
                scope.spawn(|| planned::rank(comm));
            }
        });
    }
}

#[test]
fn over_shared_memory() {
    over(this_test!(), &[2, 3], connect);
}

fn over_messages() -> Result<Box<dyn Transport>> {
    ucx(&mut Rendezvous::join(&identity(), &options())?)
}

/// Ranks dealt to two nodes in turn.
fn nodes() -> Result<Box<dyn Transport>> {
    let mut outer = over_messages()?;
    let nodes = Nodes::of(&(0..outer.size()).map(|rank| rank % 2).collect::<Vec<usize>>());
    let inner = shm_inside(&mut *outer, &identity(), &options(), &nodes)?;
    Ok(Box::new(Hierarchical::new("nodes", inner, outer, nodes)?))
}

#[test]
fn over_ucx() {
    if available() {
        over(this_test!(), &[2, 3], over_messages);
    }
}

#[test]
fn over_nodes() {
    if available() {
        over(this_test!(), &[3, 4], nodes);
    }
}
