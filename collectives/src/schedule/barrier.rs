//! Nobody leaves before all have entered.

use super::messages::Messages;
use super::{Algorithm, Build, Peers, Span};

pub(super) fn build(b: &mut Build) {
    let (rank, size) = (b.group.rank, b.group.size);
    match b.algorithm() {
        Algorithm::Local => {}
        Algorithm::DirectRead => {
            let exposure = b.expose_nothing(0, 0);
            b.exchange(&exposure, Some(Peers::All), (Peers::All, false), |_| (), |_, _| ());
        }
        _ => {
            // After round k each rank knows of 2^(k+1) ranks that have entered.
            let mut m = Messages::new(size);
            let mut distance = 1;
            let mut group = 0;
            while distance < size {
                b.recv(&mut m, (rank + size - distance) % size, Span::recv(0, 0), group);
                b.send(&mut m, (rank + distance) % size, Span::send(0, 0), group);
                b.wait(&mut m, group);
                distance *= 2;
                group += 1;
            }
        }
    }
}
