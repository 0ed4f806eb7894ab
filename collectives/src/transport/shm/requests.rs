//! Numbers for posted sends and receives, reused once they are done.

use crate::error::{Error, Result};
use crate::transport::Request;

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Free,
    Open,
    Done,
}

/// The requests of one group. A number carries how often its place was used, so that a forgotten one is noticed.
#[derive(Default)]
pub(super) struct Requests {
    places: Vec<(State, u32)>,
    free: Vec<u32>,
}

impl Requests {
    pub fn open(&mut self) -> Request {
        let at = self.free.pop().unwrap_or_else(|| {
            self.places.push((State::Free, 0));
            self.places.len() as u32 - 1
        });
        let place = &mut self.places[at as usize];
        *place = (State::Open, place.1.wrapping_add(1));
        Request(u64::from(place.1) << 32 | u64::from(at))
    }

    pub fn complete(&mut self, request: Request) {
        let place = &mut self.places[request.0 as u32 as usize];
        debug_assert!(*place == (State::Open, (request.0 >> 32) as u32));
        place.0 = State::Done;
    }

    /// Whether it is complete; then it is forgotten.
    pub fn take_done(&mut self, request: Request) -> Result<bool> {
        let at = request.0 as u32;
        match self.places.get_mut(at as usize) {
            Some((state, uses)) if *uses == (request.0 >> 32) as u32 && *state != State::Free => {
                let done = *state == State::Done;
                if done {
                    *state = State::Free;
                    self.free.push(at);
                }
                Ok(done)
            }
            _ => Err(Error::Library {
                library: "shm".into(),
                call: "test",
                rank: 0,
                text: format!("{request:?} is not open: it was tested after it was complete"),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back_and_old_ones_are_noticed() {
        let mut requests = Requests::default();
        let (a, b) = (requests.open(), requests.open());
        assert_ne!(a, b);
        assert!(!requests.take_done(a).unwrap());
        requests.complete(a);
        assert!(requests.take_done(a).unwrap());
        let c = requests.open();
        assert_ne!(a, c);
        assert!(requests.take_done(a).is_err());
        assert!(!requests.take_done(c).unwrap());
    }
}
