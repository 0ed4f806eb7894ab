//! Nobody leaves before all have entered.

use super::broadcast::{List, binomial};
use super::hierarchical::View;
use super::{Algorithm, Build, Peers, Span};

pub(super) fn build(b: &mut Build) {
    match b.algorithm() {
        Algorithm::Local => {}
        Algorithm::DirectRead => {
            let exposure = b.expose_nothing(0, 0);
            b.exchange(&exposure, Some(Peers::All), (Peers::All, false), |_| (), |_, _| ());
        }
        Algorithm::Hierarchical => over_nodes(b),
        _ => disseminate(b, &(0..b.group.size).collect::<Vec<usize>>(), 0),
    }
}

/// One of each node disseminates once all of its node have entered, and then lets them leave.
fn over_nodes(b: &mut Build) {
    let view = View::of(&b.group);
    let node = List(view.behind_speaker(0)).at(b.group.rank, binomial);
    for &child in &node.children {
        b.recv(child, Span::recv(0, 0), 0);
    }
    b.wait(0);
    match node.parent {
        Some(parent) => {
            b.recv(parent, Span::recv(0, 0), 1);
            b.send(parent, Span::send(0, 0), 1);
            b.wait(1);
        }
        None => disseminate(b, &view.speakers(0), 1),
    }
    let end = usize::MAX;
    for &child in &node.children {
        b.send(child, Span::send(0, 0), end);
    }
    b.wait(end);
}

/// After round k each of `ranks` knows of 2^(k+1) of them that have entered. Messages are of groups from `group` on.
fn disseminate(b: &mut Build, ranks: &[usize], mut group: usize) {
    let size = ranks.len();
    let me = ranks.iter().position(|&rank| rank == b.group.rank).expect("it is one of them");
    let mut distance = 1;
    while distance < size {
        b.recv(ranks[(me + size - distance) % size], Span::recv(0, 0), group);
        b.send(ranks[(me + distance) % size], Span::send(0, 0), group);
        b.wait(group);
        distance *= 2;
        group += 1;
    }
}
