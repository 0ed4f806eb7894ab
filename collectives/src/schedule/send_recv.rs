//! One message between two ranks.

use super::{Build, Span};

pub(super) fn build_send(b: &mut Build) {
    let to = b.call.root;
    b.send(to, Span::send(0, b.call.bytes()), 0);
    b.wait(0);
}

pub(super) fn build_recv(b: &mut Build) {
    let from = b.call.root;
    b.recv(from, Span::recv(0, b.call.bytes()), 0);
    b.wait(0);
}
