//! Schedules that were already built: a steady state of repeated calls builds and allocates nothing.

use super::{Call, Kind, Local, Schedule};
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::rc::Rc;

/// Beyond this many different calls, or steps of them all, some 30 MB, those go that were not used for longest: schedules of
/// many ranks in many rounds are long.
const MOST: usize = 4096;
const MOST_STEPS: usize = 1 << 19;

/// Schedules are counted without atomics, which would take a tenth of a short call: they never leave the engine that has
/// this cache.
#[derive(Default)]
pub(crate) struct Cache {
    known: HashMap<(Call, Local), Known, BuildHasherDefault<Mix>>,
    /// Steps and their operands.
    steps: usize,
    /// Grows with each that is looked up.
    now: u64,
    /// The last of each kind: programs take turns between kinds. The only place of one that is too long to be known, which
    /// all others would have to go for.
    last: [Option<(Call, Local, Rc<Schedule>)>; Kind::ALL.len()],
}

/// One that was built.
struct Known {
    schedule: Rc<Schedule>,
    /// When it was looked up last.
    used: u64,
}

fn steps_of(schedule: &Schedule) -> usize {
    schedule.steps.len() + schedule.operands.len()
}

impl Cache {
    /// The schedule for these arguments, built by `build` the first time.
    pub fn get(&mut self, call: &Call, local: Local, build: impl FnOnce() -> Schedule) -> &Rc<Schedule> {
        let same = |(c, l, _): &(Call, Local, Rc<Schedule>)| c == call && *l == local;
        let last = &self.last[call.kind as usize];
        if !last.as_ref().is_some_and(same) {
            self.now += 1;
            let found = match self.known.get_mut(&(*call, local)) {
                Some(known) => {
                    known.used = self.now;
                    Rc::clone(&known.schedule)
                }
                None => {
                    let built = Rc::new(build());
                    self.keep((*call, local), Rc::clone(&built));
                    built
                }
            };
            let last = &mut self.last[call.kind as usize];
            *last = Some((*call, local, found));
        }
        &self.last[call.kind as usize].as_ref().expect("just set or found").2
    }

    /// Keeps one that was not known, in place of those that were not used for longest.
    fn keep(&mut self, key: (Call, Local), schedule: Rc<Schedule>) {
        let steps = steps_of(&schedule);
        if steps > MOST_STEPS {
            return;
        }
        while self.known.len() >= MOST || self.steps + steps > MOST_STEPS {
            let longest_ago = self.known.iter().min_by_key(|(_, known)| known.used).map(|(&key, _)| key);
            let gone =
                longest_ago.and_then(|key| self.known.remove(&key)).expect("without any there is room");
            self.steps -= steps_of(&gone.schedule);
        }
        self.steps += steps;
        self.known.insert(key, Known { schedule, used: self.now });
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::DType;
    use crate::schedule::{Group, Step};

    /// Looks up a gather of so many bytes, whose schedule has so many steps; whether it was still known.
    fn knows(cache: &mut Cache, bytes: usize, steps: usize) -> bool {
        let call = Call::new(Kind::AllGather, DType::U8, bytes);
        let mut known = true;
        let found = cache.get(&call, Local::default(), || {
            known = false;
            let schedule = Schedule::new(call, &Group::plain(0, 1), Local::default(), None);
            Schedule { steps: vec![Step::Go { to: 0 }; steps], ..schedule }
        });
        assert_eq!((found.call, found.steps.len()), (call, steps));
        known
    }

    #[test]
    fn what_was_used_lately_stays_when_there_are_too_many() {
        let mut cache = Cache::default();
        for other in 1..MOST + 100 {
            assert_eq!(knows(&mut cache, 0, 1), other > 1, "after {other} others");
            assert!(!knows(&mut cache, other, 1));
        }
        let kept = (1..MOST + 100).rev().take_while(|&other| knows(&mut cache, other, 1)).count();
        assert_eq!(kept, MOST - 1);
    }

    #[test]
    fn long_schedules_take_the_place_of_no_more_than_they_need() {
        let mut cache = Cache::default();
        let third = MOST_STEPS / 3;
        (0..3).for_each(|bytes| assert!(!knows(&mut cache, bytes, third)));
        assert!(!knows(&mut cache, 3, third) && cache.steps <= MOST_STEPS);
        (1..4).for_each(|bytes| assert!(knows(&mut cache, bytes, third), "{bytes}"));
        // One that is too long by itself takes nobody's, and is found as long as no other of its kind is called.
        assert!(!knows(&mut cache, 4, MOST_STEPS + 1) && knows(&mut cache, 4, MOST_STEPS + 1));
        (1..4).for_each(|bytes| assert!(knows(&mut cache, bytes, third), "{bytes}"));
        assert_eq!(cache.steps, 3 * third);
    }
}
