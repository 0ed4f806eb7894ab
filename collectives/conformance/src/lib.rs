//! One suite for every transport: each case is what one rank does, with a communicator of any size.
//!
//! A case computes on its own what all ranks bring and must get, so ranks may be threads or processes. Results
//! are compared bit for bit with the [`oracle`](collectives::oracle). A case panics where something is wrong.

mod calls;
mod device;
mod edges;
mod every;
mod failures;
mod flights;
mod groups;
pub mod p2p;
pub mod planned;
mod random;

pub use device::{
    calls_that_wait_for_places, device, groups_in_any_order, groups_while_others_wait, host_among_device,
    messages_and_calls,
};

use collectives::schedule::Tuning;
use collectives::{Buffer, Communicator, Element, Options, bf16, bytes_of, f16};
use std::time::Duration;

/// What one rank does.
#[derive(Clone, Copy)]
pub struct Case {
    /// Its name in messages.
    pub name: &'static str,
    /// Its part; takes the communicator, because some cases end it.
    pub run: fn(Communicator),
    /// The options of its communicator, the same on every rank.
    pub options: fn() -> Options,
    /// Whether the communicator is unusable afterwards and the case needs two ranks to make sense.
    pub fails: bool,
}

impl Case {
    /// Whether its ranks wait until a deadline: that takes seconds, and no processor.
    pub fn waits(&self) -> bool {
        (self.options)().deadline < standard().deadline
    }
}

/// Runs these cases one after the other, and at the end, all at once, those that wait.
pub fn each<'a>(cases: impl IntoIterator<Item = &'a Case>, run: impl Fn(&Case) + Sync) {
    let (waiting, others): (Vec<&Case>, Vec<&Case>) = cases.into_iter().partition(|case| case.waits());
    others.into_iter().for_each(&run);
    std::thread::scope(|scope| {
        for case in waiting {
            let run = &run;
            scope.spawn(move || run(case));
        }
    });
}

/// Every case.
pub fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for (name, run) in calls::CASES {
        all.push(Case { name, run: *run, options: small, fails: false });
    }
    let others = [edges::CASES, every::CASES, flights::CASES, groups::CASES, random::CASES];
    for (name, run) in others.into_iter().flatten() {
        all.push(Case { name, run: *run, options: small, fails: false });
    }
    for (name, run) in random::PIECES {
        all.push(Case { name, run: *run, options: pieces, fails: false });
    }
    for (name, run) in calls::LARGE.iter().chain(groups::LARGE).chain(random::LARGE) {
        all.push(Case { name, run: *run, options: standard, fails: false });
    }
    for (name, run, options) in failures::CASES {
        all.push(Case { name, run: *run, options: *options, fails: true });
    }
    all
}

/// Reductions below, at and above the default size from which they go through windows. Not among [`cases`], which many
/// groups of ranks go through: it moves megabytes a rank.
pub fn windowed() -> Case {
    Case { name: "windowed", run: calls::windowed, options: standard, fails: false }
}

/// Default sizes; a deadline that turns a hang into a failure.
pub fn standard() -> Options {
    Options { deadline: Duration::from_secs(60), ..Options::default() }
}

/// Algorithms change, rounds and frames end within a few hundred bytes, and caches keep no more, so that short calls go through
/// all of it, with elements of one byte too.
pub fn small() -> Options {
    let tuning = Tuning {
        staging: 1024,
        round: 1024,
        window: 512,
        piece: 128,
        frame: 256,
        longest: 10_000,
        read_all: 512,
        exchange_all: 512,
        tree: 512,
        handled: 64,
        windowed: 1500,
        ..Tuning::default()
    };
    Options { tuning, stream: Some(250), ..standard() }
}

/// As by default, but that messages of more than a few pages go in pieces.
pub fn pieces() -> Options {
    let tuning = Tuning { longest: 10_000, ..Tuning::default() };
    Options { tuning, ..standard() }
}

/// A case that leaves the communicator usable.
type Part = (&'static str, fn(Communicator));

/// An element made from noise.
trait Sample: Element {
    fn sample(noise: u64) -> Self;
}

macro_rules! sample {
    ($($t:ty: $make:expr;)*) => {$(
        impl Sample for $t {
            fn sample(noise: u64) -> Self {
                $make(noise)
            }
        }
    )*};
}

fn unit(noise: u64) -> f64 {
    noise as f64 / (1u64 << 53) as f64 * 4.0 - 2.0
}

sample! {
    f32: |x| unit(x) as f32;
    f64: unit;
    f16: |x| f16::from_f64(unit(x));
    bf16: |x| bf16::from_f64(unit(x));
    i32: |x| x as i32;
    u32: |x| x as u32;
    i64: |x: u64| (x as i64).wrapping_mul(2049);
    u64: |x: u64| x.wrapping_mul(2049);
    i8: |x| x as i8;
    u8: |x| x as u8;
}

/// What `rank` brings.
fn data<T: Sample>(seed: usize, rank: usize, len: usize) -> Vec<T> {
    let mut state = (seed as u64 * 1_000_003 + rank as u64 * 7919 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            T::sample(state >> 11)
        })
        .collect()
}

/// What every rank brings.
fn everyone<T: Sample>(seed: usize, size: usize, len: usize) -> Vec<Vec<T>> {
    (0..size).map(|rank| data(seed, rank, len)).collect()
}

#[track_caller]
fn same<T: Element>(found: &[T], expected: &[T], what: impl std::fmt::Display) {
    if bytes_of(found) != bytes_of(expected) {
        assert_eq!(found.len(), expected.len(), "{what}: length");
        let at = (0..found.len()).find(|&i| bytes_of(&found[i..=i]) != bytes_of(&expected[i..=i]));
        let at = at.expect("some element differs");
        panic!("{what}: element {at} of {} is {:?}, not {:?}", found.len(), found[at], expected[at]);
    }
}

/// Where a rank keeps its buffers: ranks need not agree.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Keep {
    /// In memory that the transport knows nothing about.
    Plain,
    /// In memory from `alloc`.
    Transport,
    /// Even ranks the one, odd ranks the other.
    Mixed,
}

impl Keep {
    const ALL: [Keep; 3] = [Keep::Plain, Keep::Transport, Keep::Mixed];

    fn buffer<T: Element>(self, comm: &Communicator, content: &[T]) -> Buffer<T> {
        let plain = match self {
            Keep::Plain => true,
            Keep::Transport => false,
            Keep::Mixed => comm.rank() % 2 == 1,
        };
        let mut buffer = match plain {
            true => Buffer::zeroed(content.len()),
            false => comm.alloc(content.len()).expect("memory for a test"),
        };
        buffer.host_mut().copy_from_slice(content);
        buffer
    }

    fn empty<T: Element>(self, comm: &Communicator, len: usize) -> Buffer<T> {
        self.buffer(comm, &vec![T::default(); len])
    }
}

/// A little irregularity: now and then a rank comes late.
fn dawdle(comm: &Communicator, step: usize) {
    let noise = (step * 31 + comm.rank() * 17).wrapping_mul(0x9e37_79b9) >> 7;
    match noise % 16 {
        0 => std::thread::sleep(Duration::from_micros(noise as u64 % 300)),
        1..4 => std::thread::yield_now(),
        _ => {}
    }
}
