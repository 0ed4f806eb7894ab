//! A carrier that writes down which calls of the host are started, and how urgent they are: for tests of what goes first.

use collectives::schedule::Call;
use collectives::{Carrier, Communicator, Ends, Error, Memory, Place, Priority, Result, Stats};
use std::any::Any;
use std::sync::{Arc, Mutex};

/// Hears of the host's calls and takes none.
pub struct Listener {
    group: (usize, usize),
    pub calls: Mutex<Vec<(Call, Priority)>>,
}

impl Listener {
    /// Beside the host's group.
    pub fn of(comm: &Communicator) -> Self {
        Listener { group: (comm.rank(), comm.size()), calls: Mutex::default() }
    }
}

fn no_device() -> Error {
    Error::GivenUp("there is no device".into())
}

// SAFETY: it touches nothing.
unsafe impl Carrier for Listener {
    fn name(&self) -> &str {
        "listener"
    }
    fn group(&self) -> (usize, usize) {
        self.group
    }
    fn reaches(&self, _: Place) -> bool {
        false
    }
    fn alloc(&self, bytes: usize) -> Result<Memory> {
        Ok(Memory::host(bytes))
    }
    unsafe fn start(&self, _: Call, _: Ends, _: Option<u64>, _: Priority) -> Result<u32> {
        Err(no_device())
    }
    fn wait(&self, _: u32) -> Result<()> {
        Err(no_device())
    }
    fn is_done(&self, _: u32) -> bool {
        true
    }
    fn abandon(&self, _: u32, _: Box<dyn Any + Send>) {}
    unsafe fn start_of_host(
        &self,
        call: Call,
        _: Ends,
        _: Option<u64>,
        priority: Priority,
    ) -> Result<Option<u32>> {
        self.calls.lock().unwrap().push((call, priority));
        Ok(None)
    }
    fn progress(&self) -> Result<()> {
        Ok(())
    }
    fn abort(&self, _: &str) {}
    fn stats(&self, host: &dyn Fn() -> Stats) -> Stats {
        host()
    }
    fn split(&self, _: Option<&Communicator>, _: Option<u32>) -> Result<Option<Arc<dyn Carrier>>> {
        Err(no_device())
    }
}
