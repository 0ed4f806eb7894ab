//! Nobody leaves before all have entered.

use super::broadcast::{List, binomial};
use super::hierarchical::View;
use super::messages::Messages;
use super::{Algorithm, Build, Peers, Span};

pub(super) fn build(b: &mut Build) {
    let mut m = Messages::new(b.group.size);
    match b.algorithm() {
        Algorithm::Local => {}
        Algorithm::DirectRead => {
            let exposure = b.expose_nothing(0, 0);
            b.exchange(&exposure, Some(Peers::All), (Peers::All, false), |_| (), |_, _| ());
        }
        Algorithm::Hierarchical => over_nodes(b, &mut m),
        _ => disseminate(b, &mut m, &(0..b.group.size).collect::<Vec<usize>>(), 0),
    }
}

/// One of each node disseminates once all of its node have entered, and then lets them leave.
fn over_nodes(b: &mut Build, m: &mut Messages) {
    let view = View::of(&b.group);
    let node = List(view.behind_speaker(0)).at(b.group.rank, binomial);
    for &child in &node.children {
        b.recv(m, child, Span::recv(0, 0), 0);
    }
    b.wait(m, 0);
    match node.parent {
        Some(parent) => {
            b.recv(m, parent, Span::recv(0, 0), 1);
            b.send(m, parent, Span::send(0, 0), 1);
            b.wait(m, 1);
        }
        None => disseminate(b, m, &view.speakers(0), 1),
    }
    let end = usize::MAX;
    for &child in &node.children {
        b.send(m, child, Span::send(0, 0), end);
    }
    b.wait(m, end);
}

/// After round k each of `ranks` knows of 2^(k+1) of them that have entered. Messages are of groups from `group` on.
fn disseminate(b: &mut Build, m: &mut Messages, ranks: &[usize], mut group: usize) {
    let size = ranks.len();
    let me = ranks.iter().position(|&rank| rank == b.group.rank).expect("it is one of them");
    let mut distance = 1;
    while distance < size {
        b.recv(m, ranks[(me + size - distance) % size], Span::recv(0, 0), group);
        b.send(m, ranks[(me + distance) % size], Span::send(0, 0), group);
        b.wait(m, group);
        distance *= 2;
        group += 1;
    }
}
