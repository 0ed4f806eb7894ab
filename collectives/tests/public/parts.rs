//! A split that a carrier of device memory cannot follow on one rank.

use collectives::schedule::Call;
use collectives::{Carrier, Communicator, Ends, Error, Memory, Options, Place, Priority, Result, Stats};
use std::any::Any;
use std::sync::Arc;

/// Carries nothing. That of rank 1 has no part for a part of its group.
struct Idle {
    rank: usize,
    size: usize,
    /// How many more ranks than there are a part of the group has by its words.
    more: usize,
}

fn nothing_is_given() -> Error {
    Error::GivenUp("it carries nothing".into())
}

// SAFETY: it touches nothing.
unsafe impl Carrier for Idle {
    fn name(&self) -> &str {
        "idle"
    }

    fn group(&self) -> (usize, usize) {
        (self.rank, self.size)
    }

    fn reaches(&self, _: Place) -> bool {
        false
    }

    fn alloc(&self, _: usize) -> Result<Memory> {
        Err(nothing_is_given())
    }

    unsafe fn start(&self, _: Call, _: Ends, _: Option<u64>, _: Priority) -> Result<u32> {
        Err(nothing_is_given())
    }

    fn wait(&self, _: u32) -> Result<()> {
        Err(nothing_is_given())
    }

    fn is_done(&self, _: u32) -> bool {
        true
    }

    fn abandon(&self, _: u32, _: Box<dyn Any + Send>) {}

    fn progress(&self) -> Result<()> {
        Ok(())
    }

    fn abort(&self, _: &str) {}

    fn stats(&self, host: &dyn Fn() -> Stats) -> Stats {
        host()
    }

    fn split(&self, host: Option<&Communicator>, _: Option<u32>) -> Result<Option<Arc<dyn Carrier>>> {
        match self.rank {
            1 => Err(Error::GivenUp("the device has no queue left".into())),
            _ => {
                let part =
                    |host: &Communicator| Idle { size: host.size() + self.more, rank: host.rank(), more: 0 };
                Ok(host.map(|host| Arc::new(part(host)) as Arc<dyn Carrier>))
            }
        }
    }
}

/// Buffers of its calls would be of another length.
#[test]
#[should_panic(expected = "rank and size of idle and of its group")]
fn a_part_of_another_group_is_refused() {
    let whole = Communicator::threads(1).remove(0).with_carrier(Arc::new(Idle { rank: 0, size: 1, more: 1 }));
    let _ = whole.split(Some(0), 0);
}

/// Its peer has its part of the group by then, and waits in it or in the whole.
#[test]
fn a_rank_that_cannot_split_is_heard_with_its_reason() {
    Communicator::on_threads(2, Options::default(), |host| {
        let (rank, size) = (host.rank(), host.size());
        let comm = host.with_carrier(Arc::new(Idle { rank, size, more: 0 }));
        let part = comm.split(Some(0), 0);
        assert_eq!(part.is_err(), rank == 1);
        let in_it = part.and_then(|part| part.expect("all are in it").barrier());
        for said in [in_it.unwrap_err(), comm.barrier().unwrap_err()] {
            assert!(said.to_string().contains("no queue left"), "{said}");
        }
    });
}
