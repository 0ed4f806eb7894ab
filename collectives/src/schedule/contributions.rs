//! Where peers' contributions to a reduction arrive.

use super::{Build, Operand, Space, Span};

/// One round of contributions is reduced while the next arrives, so there is memory for two.
pub(super) struct Contributions {
    windows: [Vec<Option<Span>>; 2],
    arrived: [Vec<Span>; 2],
    /// Whether the first that is posted in a round arrives where its result will be instead of in scratch, so that less
    /// passes through the caches.
    lands: bool,
    /// The last round in which one does.
    landed: Option<usize>,
}

impl Contributions {
    /// For a call whose result may take a contribution before: unless that is this rank's input or has elements of another
    /// size.
    pub fn new(b: &Build) -> Self {
        let size = b.group.size;
        Contributions {
            windows: [vec![None; size], vec![None; size]],
            arrived: [vec![Span::scratch(0, 0); size], vec![Span::scratch(0, 0); size]],
            lands: !b.call.in_place && b.out_size() == b.call.dtype.size(),
            landed: None,
        }
    }

    /// Posts the receive of `bytes` from `from` in round `k`, whose result goes to `out`. Rounds get no longer, so the first
    /// one's memory serves all.
    pub fn recv(&mut self, b: &mut Build, from: usize, bytes: usize, k: usize, out: Span) {
        let mut landing = Some(out);
        let window = match self.lands && self.landed != Some(k) {
            true => &mut landing,
            false => &mut self.windows[k % 2][from],
        };
        self.landed = Some(k);
        self.arrived[k % 2][from] = b.recv_scratch(from, bytes, k, window);
    }

    /// What each rank contributes to round `k`: this one its input from `own` on.
    pub fn of(&self, rank: usize, own: usize, k: usize) -> impl Fn(usize) -> Operand {
        let arrived = &self.arrived[k % 2];
        move |r| match r {
            r if r == rank => Operand::Own(Space::Send, own),
            r => Operand::Own(arrived[r].space, arrived[r].offset),
        }
    }
}
