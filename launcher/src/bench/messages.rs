//! Who sends to whom in `send_recv`.

use super::args::{Blocking, Calls, CollectiveArgs};
use super::operation::Operation;
use crate::failure::{Failure, Result};

/// The messages of one call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Messages {
    /// Every rank sends to the next and receives from the one before, all at once.
    #[default]
    Ring,
    /// Ranks 0, 2, … send to ranks 1, 3, ….
    OneWay,
    /// Ranks 0, 2, … send to ranks 1, 3, …, which answer with as much once they have received.
    PingPong,
}

impl Messages {
    /// To whom `rank` sends, if to anybody.
    pub fn to(self, rank: usize, ranks: usize) -> Option<usize> {
        match self {
            Messages::Ring => Some(next(rank, ranks)),
            Messages::OneWay => partner(rank, ranks).filter(|_| first(rank)),
            Messages::PingPong => partner(rank, ranks),
        }
    }

    /// From whom `rank` receives, if from anybody.
    pub fn from(self, rank: usize, ranks: usize) -> Option<usize> {
        match self {
            Messages::Ring => Some((rank + ranks - 1) % ranks),
            Messages::OneWay => partner(rank, ranks).filter(|_| !first(rank)),
            Messages::PingPong => partner(rank, ranks),
        }
    }

    /// Whether `rank` takes as long as the messages do: it has some, and sees the end of them. Who answers is done once the
    /// last is on its way. One who only sends counts too, though the last may not have arrived where a transport holds it.
    pub fn is_timed(self, rank: usize, ranks: usize) -> bool {
        match self {
            Messages::Ring => true,
            Messages::OneWay => self.to(rank, ranks).or(self.from(rank, ranks)).is_some(),
            Messages::PingPong => self.to(rank, ranks).is_some() && first(rank),
        }
    }

    /// Whether all ranks take as long as the messages do.
    pub fn all_timed(self, ranks: usize) -> bool {
        (0..ranks).all(|rank| self.is_timed(rank, ranks))
    }

    /// How many follow on each other in one call. A time is that of one, as the latency of OSU's and UCX's benchmarks is.
    pub const fn in_turn(self) -> usize {
        match self {
            Messages::Ring | Messages::OneWay => 1,
            Messages::PingPong => 2,
        }
    }

    /// What figures and `--csv` call them.
    pub const fn name(self) -> &'static str {
        match self {
            Messages::Ring => "ring",
            Messages::OneWay => "one-way",
            Messages::PingPong => "ping-pong",
        }
    }

    /// What the table says of those that are not the usual ones.
    pub const fn remark(self) -> Option<&'static str> {
        match self {
            Messages::Ring => None,
            Messages::OneWay => Some("Messages go from ranks 0, 2, … to ranks 1, 3, …, and not back"),
            Messages::PingPong => {
                Some("Messages go from ranks 0, 2, … to ranks 1, 3, … and then back: times are half of both")
            }
        }
    }
}

/// To whom `rank` sends in a ring.
pub const fn next(rank: usize, ranks: usize) -> usize {
    (rank + 1) % ranks
}

/// Whether this is the rank of a pair that begins.
pub const fn first(rank: usize) -> bool {
    rank.is_multiple_of(2)
}

/// The other of a pair; the last of an odd number of ranks has none.
fn partner(rank: usize, ranks: usize) -> Option<usize> {
    Some(rank ^ 1).filter(|&other| other < ranks)
}

/// The messages of `send_recv` that flags ask for, `aggregate` calls at once.
///
/// # Errors
/// Flags that are for other operations, or do not go together.
pub fn asked_for(
    operation: Operation,
    aggregate: usize,
    blocking: Blocking,
    args: &CollectiveArgs,
) -> Result<Messages> {
    let (asked, messages) = match (args.one_way, args.ping_pong) {
        (false, false) => return Ok(Messages::Ring),
        (true, false) => ("--one-way", Messages::OneWay),
        (false, true) => ("--ping-pong", Messages::PingPong),
        (true, true) => {
            return Err(Failure::usage(
                "--one-way and --ping-pong: messages come back or they do not, give one",
            ));
        }
    };
    if operation != Operation::SendRecv {
        let name = operation.name();
        return Err(Failure::usage(format!("{asked} is for send_recv: every rank of {name} has its part")));
    }
    let several = [("-m", aggregate > 1), ("--calls started", args.calls == Calls::Started)];
    match several.into_iter().find(|(_, asked)| *asked).filter(|_| messages == Messages::PingPong) {
        Some((other, _)) => Err(Failure::usage(format!(
            "--ping-pong answers each message before the next, and {other} is for several at once: leave it away"
        ))),
        None if messages == Messages::PingPong && blocking == Blocking::Barrier => Err(Failure::usage(
            "--ping-pong shows half of what two messages take, and -z 1 has a barrier in that time: take -z 0, 2 or 3",
        )),
        None => Ok(messages),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sent_is_received() {
        for messages in [Messages::Ring, Messages::OneWay, Messages::PingPong] {
            for ranks in 2..6 {
                for rank in 0..ranks {
                    let to = messages.to(rank, ranks);
                    assert!(to.is_none_or(|to| messages.from(to, ranks) == Some(rank)), "{messages:?}");
                    let from = messages.from(rank, ranks);
                    assert!(from.is_none_or(|from| messages.to(from, ranks) == Some(rank)), "{messages:?}");
                }
            }
        }
        assert_eq!([0, 1, 2].map(|rank| Messages::PingPong.to(rank, 3)), [Some(1), Some(0), None]);
        assert_eq!([0, 1, 2].map(|rank| Messages::PingPong.is_timed(rank, 3)), [true, false, false]);
        assert_eq!([0, 1, 2].map(|rank| Messages::OneWay.is_timed(rank, 3)), [true, true, false]);
        assert_eq!([0, 1, 2].map(|rank| Messages::OneWay.from(rank, 3)), [None, Some(0), None]);
        assert_eq!([2, 3].map(|ranks| Messages::OneWay.all_timed(ranks)), [true, false]);
        assert_eq!([2, 3].map(|ranks| Messages::Ring.all_timed(ranks)), [true, true]);
    }
}
