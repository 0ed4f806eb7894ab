//! Schedules that were already built: a steady state of repeated calls builds and allocates nothing.

use super::{Call, Kind, Local, Schedule};
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::rc::Rc;

/// Beyond this many different calls, or steps of them all, some 30 MB, the cache starts anew rather than grow without bound:
/// those of many ranks in many rounds are long.
const MOST: usize = 4096;
const MOST_STEPS: usize = 1 << 19;

/// Schedules are counted without atomics, which would take a tenth of a short call: they never leave the engine that has
/// this cache.
#[derive(Default)]
pub(crate) struct Cache {
    known: HashMap<(Call, Local), Rc<Schedule>, BuildHasherDefault<Mix>>,
    /// Steps and their operands.
    steps: usize,
    /// The last of each kind: programs take turns between kinds.
    last: [Option<(Call, Local, Rc<Schedule>)>; Kind::ALL.len()],
}

impl Cache {
    /// The schedule for these arguments, built by `build` the first time.
    pub fn get(&mut self, call: &Call, local: Local, build: impl FnOnce() -> Schedule) -> &Rc<Schedule> {
        let same = |(c, l, _): &(Call, Local, Rc<Schedule>)| c == call && *l == local;
        let last = &mut self.last[call.kind as usize];
        if !last.as_ref().is_some_and(same) {
            let full = self.known.len() >= MOST || self.steps >= MOST_STEPS;
            if full && !self.known.contains_key(&(*call, local)) {
                self.known.clear();
                self.steps = 0;
            }
            let steps = &mut self.steps;
            let found = self.known.entry((*call, local)).or_insert_with(|| {
                let built = build();
                *steps += built.steps.len() + built.operands.len();
                Rc::new(built)
            });
            *last = Some((*call, local, Rc::clone(found)));
        }
        &last.as_ref().expect("just set or found").2
    }

    pub fn clear(&mut self) {
        *self = Cache::default();
    }
}

impl Hash for Local {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u8(u8::from(self.send_registered) | u8::from(self.recv_registered) << 1);
    }
}

/// A few multiplications: keys come from the program itself, so nobody attacks this table.
#[derive(Default)]
struct Mix(u64);

impl Mix {
    fn mix(&mut self, x: u64) {
        self.0 = (self.0.rotate_left(5) ^ x).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for &b in bytes {
            self.mix(b.into());
        }
    }
    fn write_u8(&mut self, x: u8) {
        self.mix(x.into());
    }
    fn write_usize(&mut self, x: usize) {
        self.mix(x as u64);
    }
    fn write_isize(&mut self, x: isize) {
        self.mix(x as u64);
    }
}
