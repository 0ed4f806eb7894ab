//! The suite that every transport passes, over emulated links and over one transport inside nodes and another between
//! them; here over threads.

use collectives::conformance::{Case, cases};
use collectives::transport::emulated::Emulated;
use collectives::transport::hierarchical::Hierarchical;
use collectives::transport::{Nodes, Transport, threads};
use collectives::{Communicator, Options, Progress};
use std::time::Instant;

type Wrap = fn(Box<dyn Transport>, usize) -> Box<dyn Transport>;

/// Nodes of `per_node` ranks: one group of threads inside each, another among all.
fn nodes(outer: Box<dyn Transport>, per_node: usize) -> Box<dyn Transport> {
    hierarchical(outer, per_node, |outer| outer)
}

/// The same with an emulated network between nodes.
fn nodes_and_link(outer: Box<dyn Transport>, per_node: usize) -> Box<dyn Transport> {
    hierarchical(outer, per_node, |outer| {
        let apart = Nodes::apart(outer.size());
        let link = "latency=2us,bandwidth=5GB/s".parse().expect("a link");
        Box::new(Emulated::new("link", outer, link, apart).expect("a link"))
    })
}

fn hierarchical(
    mut outer: Box<dyn Transport>,
    per_node: usize,
    network: fn(Box<dyn Transport>) -> Box<dyn Transport>,
) -> Box<dyn Transport> {
    let nodes = Nodes::blocks(outer.size(), per_node).expect("nodes");
    let here = nodes.with(outer.rank());
    let inner = (here.len() > 1).then(|| outer.subgroup(&here, 77 + here[0] as u64).expect("a group"));
    Box::new(Hierarchical::new("threads+threads", inner, network(outer), nodes).expect("a transport"))
}

/// Links inside nodes and between them.
fn links(inner: Box<dyn Transport>, per_node: usize) -> Box<dyn Transport> {
    let nodes = Nodes::blocks(inner.size(), per_node).expect("nodes");
    let link = "latency=3us,bandwidth=4GB/s,inside-latency=500ns".parse().expect("a link");
    Box::new(Emulated::new("links", inner, link, nodes).expect("a link"))
}

fn run(case: &Case, n: usize, wrap: Wrap, per_node: usize, options: Options) {
    std::thread::scope(|scope| {
        for transport in threads::group(n) {
            let rank = transport.rank();
            let name = format!("{} on rank {rank} of {n}, {per_node} a node", case.name);
            let part = move || {
                let wrapped = wrap(Box::new(transport), per_node);
                (case.run)(Communicator::new(wrapped, options).expect("a communicator"));
            };
            std::thread::Builder::new().name(name).spawn_scoped(scope, part).expect("a thread");
        }
    });
}

/// Every case, at every size with every number of ranks per node.
fn suite(what: &str, wrap: Wrap, shapes: &[(usize, usize)]) {
    for &(n, per_node) in shapes {
        for case in cases() {
            // Who waits for a node waits for the rank that speaks for it: with more ranks a silent one is not named.
            if case.fails && !(2..=3).contains(&n) {
                continue;
            }
            let start = Instant::now();
            run(&case, n, wrap, per_node, (case.options)());
            println!("{what}, {n} ranks, {per_node} a node, {}: {:.2?}", case.name, start.elapsed());
        }
    }
}

#[test]
fn emulated_links() {
    suite("links", links, &[(1, 1), (2, 1), (3, 1), (5, 1)]);
}

#[test]
fn emulated_links_inside_and_between_nodes() {
    suite("links", links, &[(4, 2), (5, 3)]);
}

#[test]
fn nodes_of_one_rank_and_one_node() {
    suite("nodes", nodes, &[(1, 1), (2, 1), (2, 2), (3, 3)]);
}

#[test]
fn nodes_of_two_ranks() {
    suite("nodes", nodes, &[(3, 2), (4, 2), (5, 2)]);
}

#[test]
fn nodes_of_different_numbers_of_ranks() {
    suite("nodes", nodes, &[(4, 3), (5, 3), (5, 4)]);
}

#[test]
fn nodes_with_a_network_between_them() {
    suite("nodes and link", nodes_and_link, &[(3, 2), (4, 2)]);
}

#[test]
fn with_progress_threads() {
    for case in cases().iter().filter(|c| c.fails || c.name.contains("flight") || c.name.contains("large")) {
        let options = Options { progress: Progress::Thread { cpu: None }, ..(case.options)() };
        run(case, 3, nodes, 2, options);
    }
}

/// Deeper trees, whose nodes have no power of two of ranks.
#[test]
fn more_nodes() {
    let chosen = ["large reduce_scatter", "large all_reduce", "large all_gather"];
    for case in cases().iter().filter(|c| chosen.contains(&c.name)) {
        run(case, 9, nodes, 3, (case.options)());
    }
}
