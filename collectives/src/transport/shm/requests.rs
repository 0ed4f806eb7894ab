//! Numbers for posted sends and receives, reused once they are done.

use super::mail::FEW;
use crate::error::{Error, Result};
use crate::transport::Request;

enum State {
    Free,
    Open,
    Done,
    Failed(Box<Error>),
}

/// The requests of one group. A number carries how often its place was used, so that a forgotten one is noticed.
pub(super) struct Requests {
    /// Who makes them.
    rank: usize,
    places: Vec<(State, u32)>,
    free: Vec<u32>,
}

impl Requests {
    pub fn none(rank: usize) -> Self {
        // Both ways.
        Requests { rank, places: Vec::with_capacity(2 * FEW), free: Vec::with_capacity(2 * FEW) }
    }

    pub fn open(&mut self) -> Request {
        let at = self.free.pop().unwrap_or_else(|| {
            self.places.push((State::Free, 0));
            self.places.len() as u32 - 1
        });
        let place = &mut self.places[at as usize];
        *place = (State::Open, place.1.wrapping_add(1));
        Request::of(at as usize, place.1)
    }

    pub fn complete(&mut self, request: Request) {
        self.end(request, State::Done);
    }

    pub fn fail(&mut self, request: Request, why: Error) {
        self.end(request, State::Failed(Box::new(why)));
    }

    fn end(&mut self, request: Request, how: State) {
        let place = &mut self.places[request.index()];
        debug_assert!(matches!(place.0, State::Open) && place.1 == request.generation());
        place.0 = how;
    }

    /// Nobody asks for it any more.
    pub fn forget(&mut self, request: Request) {
        self.end(request, State::Free);
        self.free.push(request.index() as u32);
    }

    /// Whether it is complete, or why it failed; then it is forgotten.
    pub fn take_done(&mut self, request: Request) -> Result<bool> {
        let (at, generation) = (request.index(), request.generation());
        match self.places.get_mut(at) {
            Some((State::Open, uses)) if *uses == generation => Ok(false),
            Some((state @ (State::Done | State::Failed(_)), uses)) if *uses == generation => {
                self.free.push(at as u32);
                match std::mem::replace(state, State::Free) {
                    State::Failed(why) => Err(*why),
                    _ => Ok(true),
                }
            }
            _ => Err(Error::Library {
                library: "shm".into(),
                call: "test",
                rank: self.rank,
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
        let mut requests = Requests::none(3);
        let (a, b) = (requests.open(), requests.open());
        assert_ne!(a, b);
        assert!(!requests.take_done(a).unwrap());
        requests.complete(a);
        assert!(requests.take_done(a).unwrap());
        let c = requests.open();
        assert_ne!(a, c);
        let stale = requests.take_done(a).unwrap_err();
        assert!(matches!(stale, Error::Library { rank: 3, .. }), "{stale}");
        assert!(!requests.take_done(c).unwrap());
        requests.fail(c, Error::Launch("of another length".into()));
        assert!(requests.take_done(c).unwrap_err().to_string().contains("of another length"));
        assert!(requests.take_done(c).unwrap_err().to_string().contains("is not open"));
        let d = requests.open();
        requests.forget(d);
        assert!(requests.take_done(d).unwrap_err().to_string().contains("is not open"));
        assert_ne!(requests.open(), d);
    }
}
