//! One message between two ranks.

use super::messages::Messages;
use super::{Build, Span};

pub(super) fn build_send(b: &mut Build) {
    let mut m = Messages::new(b.group.size);
    let to = b.call.root;
    b.send(&mut m, to, Span::send(0, b.call.bytes()), 0);
    b.wait(&mut m, 0);
}

pub(super) fn build_recv(b: &mut Build) {
    let mut m = Messages::new(b.group.size);
    let from = b.call.root;
    b.recv(&mut m, from, Span::recv(0, b.call.bytes()), 0);
    b.wait(&mut m, 0);
}
