//! The operations that `bench` measures: what each counts, moves and is divided by, as in nccl-tests.

use collectives::schedule::Kind;

/// One operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    AllReduce,
    ReduceScatter,
    AllGather,
    Broadcast,
    Reduce,
    Gather,
    Scatter,
    AllToAll,
    /// Every rank sends to the next and receives from the one before.
    SendRecv,
    Barrier,
}

/// Elements that one rank sends and receives for one size of the sweep, after rounding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    /// What a rank passes in (what the root does, for scatter).
    pub send: usize,
    /// What a rank gets back (what the root does, for gather).
    pub receive: usize,
    /// The count that the call is named by, the `count` column: a rank's part where parts are exchanged.
    pub count: usize,
}

impl Operation {
    /// In the order of the documentation.
    pub const ALL: [Operation; 10] = [
        Operation::AllReduce,
        Operation::ReduceScatter,
        Operation::AllGather,
        Operation::Broadcast,
        Operation::Reduce,
        Operation::Gather,
        Operation::Scatter,
        Operation::AllToAll,
        Operation::SendRecv,
        Operation::Barrier,
    ];

    /// The collective that carries it.
    pub const fn kind(self) -> Kind {
        match self {
            Operation::AllReduce => Kind::AllReduce,
            Operation::ReduceScatter => Kind::ReduceScatter,
            Operation::AllGather => Kind::AllGather,
            Operation::Broadcast => Kind::Broadcast,
            Operation::Reduce => Kind::Reduce,
            Operation::Gather => Kind::Gather,
            Operation::Scatter => Kind::Scatter,
            Operation::AllToAll => Kind::AllToAll,
            Operation::SendRecv => Kind::Send,
            Operation::Barrier => Kind::Barrier,
        }
    }

    /// The name on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Operation::SendRecv => "send_recv",
            other => other.kind().name(),
        }
    }

    /// Whether ranks' contributions are combined, so that `-o` means something.
    pub const fn reduces(self) -> bool {
        self.kind().reduces()
    }

    /// Whether one rank is special, so that `-r` means something.
    pub const fn rooted(self) -> bool {
        self.kind().rooted()
    }

    /// Whether the operation exchanges one part per rank, and so rounds each part down to 16 bytes.
    pub const fn parted(self) -> bool {
        self.kind().counts_a_part()
    }

    /// What `bytes` of elements of `element` bytes mean over `ranks`, rounded as nccl-tests rounds.
    pub fn counts(self, bytes: usize, element: usize, ranks: usize) -> Counts {
        let all = bytes / element;
        let part = all / ranks / (16 / element) * (16 / element);
        match self {
            Operation::AllReduce | Operation::Broadcast | Operation::Reduce | Operation::SendRecv => {
                Counts { send: all, receive: all, count: all }
            }
            Operation::ReduceScatter | Operation::Scatter => {
                Counts { send: part * ranks, receive: part, count: part }
            }
            Operation::AllGather | Operation::Gather => {
                Counts { send: part, receive: part * ranks, count: part }
            }
            Operation::AllToAll => Counts { send: part * ranks, receive: part * ranks, count: part },
            Operation::Barrier => Counts { send: 0, receive: 0, count: 0 },
        }
    }

    /// The fewest bytes that leave every rank at least one element after rounding.
    pub fn least_bytes(self, element: usize, ranks: usize) -> usize {
        if self.parted() { 16 * ranks } else { element }
    }

    /// What algorithm bandwidth is multiplied by to compare with the rate of the links.
    pub fn bus_factor(self, ranks: usize) -> f64 {
        let n = ranks as f64;
        match self {
            Operation::AllReduce => 2.0 * (n - 1.0) / n,
            Operation::ReduceScatter
            | Operation::AllGather
            | Operation::Gather
            | Operation::Scatter
            | Operation::AllToAll => (n - 1.0) / n,
            Operation::Broadcast | Operation::Reduce | Operation::SendRecv | Operation::Barrier => 1.0,
        }
    }
}

impl Counts {
    /// The `size` column: the larger of what goes in and what comes out.
    pub fn bytes(&self, element: usize) -> usize {
        self.send.max(self.receive) * element
    }
}

/// Algorithm and bus bandwidth in decimal GB/s of `bytes` in `seconds`.
pub fn bandwidth(operation: Operation, bytes: usize, seconds: f64, ranks: usize) -> (f64, f64) {
    let algorithm = if seconds > 0.0 { bytes as f64 / 1e9 / seconds } else { 0.0 };
    (algorithm, algorithm * operation.bus_factor(ranks))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_rounded_down_to_sixteen_bytes_a_rank() {
        // 1000 bytes of f32 over 3 ranks: 250 elements, 83 a rank, 80 after rounding to 4 elements.
        for (operation, send, receive) in [
            (Operation::AllGather, 80, 240),
            (Operation::Gather, 80, 240),
            (Operation::ReduceScatter, 240, 80),
            (Operation::Scatter, 240, 80),
            (Operation::AllToAll, 240, 240),
        ] {
            let counts = operation.counts(1000, 4, 3);
            assert_eq!(counts, Counts { send, receive, count: 80 }, "{operation:?}");
            assert_eq!(counts.bytes(4), 960);
        }
        for operation in [Operation::AllReduce, Operation::Broadcast, Operation::Reduce, Operation::SendRecv]
        {
            assert_eq!(operation.counts(1003, 4, 3), Counts { send: 250, receive: 250, count: 250 });
        }
        assert_eq!(Operation::Barrier.counts(1024, 4, 3).bytes(4), 0);
    }

    #[test]
    fn the_least_size_is_the_least_that_leaves_an_element() {
        for operation in Operation::ALL.into_iter().filter(|&o| o != Operation::Barrier) {
            for element in [1, 2, 4, 8] {
                for ranks in 1..6 {
                    let least = operation.least_bytes(element, ranks);
                    assert!(
                        operation.counts(least, element, ranks).count > 0,
                        "{operation:?} {element} {ranks}"
                    );
                    assert_eq!(operation.counts(least - 1, element, ranks).count, 0, "{operation:?}");
                }
            }
        }
    }

    #[test]
    fn bus_factors_are_those_of_nccl_tests() {
        let at_4 = Operation::ALL.map(|o| o.bus_factor(4));
        assert_eq!(at_4, [1.5, 0.75, 0.75, 1.0, 1.0, 0.75, 0.75, 0.75, 1.0, 1.0]);
        let (algorithm, bus) = bandwidth(Operation::AllReduce, 1_000_000_000, 0.5, 4);
        assert_eq!((algorithm, bus), (2.0, 3.0));
    }
}
