//! The suite that every transport passes, over emulated links and over one transport inside nodes and another between
//! them; here over threads.

use collectives::transport::emulated::Emulated;
use collectives::transport::hierarchical::Hierarchical;
use collectives::transport::{Nodes, Transport, threads};
use collectives::{Communicator, Options, Progress};
use conformance::{Case, cases, each};
use std::sync::Barrier;
use std::time::Instant;

/// The node of each rank.
type Shape = &'static [usize];

type Wrap = fn(Box<dyn Transport>, Nodes) -> Box<dyn Transport>;

/// Nodes: one group of threads inside each, another among all.
fn nodes(outer: Box<dyn Transport>, nodes: Nodes) -> Box<dyn Transport> {
    hierarchical(outer, nodes, |outer| outer)
}

/// The same with an emulated network between nodes.
fn nodes_and_link(outer: Box<dyn Transport>, nodes: Nodes) -> Box<dyn Transport> {
    hierarchical(outer, nodes, |outer| {
        let apart = Nodes::apart(outer.size());
        let link = "latency=2us,bandwidth=5GB/s".parse().expect("a link");
        Box::new(Emulated::new("link", outer, link, apart).expect("a link"))
    })
}

fn hierarchical(
    mut outer: Box<dyn Transport>,
    nodes: Nodes,
    network: fn(Box<dyn Transport>) -> Box<dyn Transport>,
) -> Box<dyn Transport> {
    let here = nodes.with(outer.rank());
    let inner = (here.len() > 1)
        .then(|| outer.subgroup(here, 77 + here[0] as u64, Options::default().deadline).expect("a group"));
    Box::new(Hierarchical::new("threads+threads", inner, network(outer), nodes).expect("a transport"))
}

/// Links inside nodes and between them.
fn links(inner: Box<dyn Transport>, nodes: Nodes) -> Box<dyn Transport> {
    let link = "latency=3us,bandwidth=4GB/s,inside-latency=500ns".parse().expect("a link");
    Box::new(Emulated::new("links", inner, link, nodes).expect("a link"))
}

fn run(case: &Case, wrap: Wrap, shape: Shape, options: Options) {
    let n = shape.len();
    // Who comes late is not to be missed after the case's own deadline.
    let met = &Barrier::new(n);
    std::thread::scope(|scope| {
        for transport in threads::group(n) {
            let rank = transport.rank();
            let name = format!("{} on rank {rank}, nodes {shape:?}", case.name);
            let part = move || {
                let wrapped = wrap(Box::new(transport), Nodes::of(shape));
                met.wait();
                (case.run)(Communicator::new(wrapped, options).expect("a communicator"));
            };
            std::thread::Builder::new().name(name).spawn_scoped(scope, part).expect("a thread");
        }
    });
}

/// Whether nodes of more shapes are wanted.
fn all() -> bool {
    std::env::var_os("CARAVAN_ALL_RANKS").is_some()
}

/// Every case with nodes of a few shapes, or with `CARAVAN_ALL_RANKS` of these and `more`.
fn suite(what: &str, wrap: Wrap, few: &[Shape], more: &[Shape]) {
    for &shape in few.iter().chain(more.iter().filter(|_| all())) {
        // Who waits for a node waits for the rank that speaks for it: with more ranks a silent one is not named.
        let failing = (2..=3).contains(&shape.len());
        each(cases().iter().filter(|c| !c.fails || failing), |case| {
            let start = Instant::now();
            run(case, wrap, shape, (case.options)());
            println!("{what} {shape:?}, {}: {:.2?}", case.name, start.elapsed());
        });
    }
}

#[test]
fn emulated_links() {
    suite("links", links, &[&[0], &[0, 1, 2]], &[&[0, 1], &[0, 1, 2, 3], &[0, 1, 2, 3, 4]]);
}

#[test]
fn emulated_links_inside_and_between_nodes() {
    suite("links", links, &[&[0, 0, 0, 1, 1]], &[&[0, 0, 1], &[0, 0, 1, 1]]);
}

#[test]
fn nodes_of_one_rank_and_one_node() {
    suite("nodes", nodes, &[&[0], &[0, 1]], &[&[0, 0], &[0, 0, 0]]);
}

#[test]
fn nodes_of_two_ranks() {
    suite("nodes", nodes, &[&[0, 0, 1], &[0, 0, 1, 1]], &[]);
}

#[test]
fn nodes_of_different_numbers_of_ranks() {
    suite("nodes", nodes, &[&[0, 1, 1, 1, 2]], &[&[0, 0, 0, 1], &[0, 0, 0, 0, 1]]);
}

#[test]
fn ranks_dealt_to_nodes_in_turn() {
    suite("nodes", nodes, &[&[0, 1, 2, 0, 1]], &[&[0, 1, 0, 1]]);
}

#[test]
fn nodes_with_a_network_between_them() {
    suite("nodes and link", nodes_and_link, &[&[0, 1, 1, 0]], &[&[0, 0, 1]]);
}

#[test]
fn with_progress_threads() {
    let all = cases();
    let chosen = all.iter().filter(|c| c.fails || c.name.contains("flight") || c.name.contains("large"));
    each(chosen, |case| {
        let options = Options { progress: Progress::Thread { cpu: None }, ..(case.options)() };
        run(case, nodes, &[0, 0, 1], options);
    });
}

/// Deeper trees, whose nodes have no power of two of ranks.
#[test]
fn more_nodes() {
    let shapes = [&[0, 1, 1, 2, 0, 3, 0, 1, 0], &[0, 0, 0, 1, 1, 1, 2, 2, 2]];
    for case in cases().iter().filter(|c| c.name.contains("large")) {
        for shape in &shapes[..if all() { 2 } else { 1 }] {
            run(case, nodes, *shape, (case.options)());
        }
    }
}
