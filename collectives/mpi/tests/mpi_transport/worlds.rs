//! Worlds of one process: several at once or in turn, one that has no deadline, and one with more groups than there can be.

use collectives::bootstrap;
use collectives::transport::{Tag, Transport};
use collectives_mpi::{MpiTransport, Start};
use conformance::p2p;
use mpi::ffi::{self, MPI_Comm};
use std::os::raw::c_int;
use std::time::{Duration, Instant};

/// Longer than anything that a rank sent before its farewell is awaited.
const BUSY: Duration = Duration::from_secs(2);

fn another() -> MpiTransport {
    MpiTransport::world(&Start::default()).unwrap()
}

/// Who leaves one of two worlds is still in the other.
pub fn at_once(first: MpiTransport) {
    let mut second = another();
    drop(first);
    computes_and_is_not_missed(&mut second);
}

/// A world that comes after one whose farewells nobody has heard, while a group of that keeps MPI going.
pub fn in_turn(mut first: MpiTransport) {
    let all: Vec<usize> = (0..first.size()).collect();
    let group = first.subgroup(&all, 1, p2p::PATIENCE).unwrap();
    drop(first);
    let mut later = another();
    drop(group);
    computes_and_is_not_missed(&mut later);
}

/// Rank 0 computes for long, and is awaited meanwhile; of worlds that are gone no word is kept.
fn computes_and_is_not_missed(t: &mut MpiTransport) {
    if t.rank() == 0 {
        std::thread::sleep(BUSY);
    }
    p2p::barrier(t, 1);
    // The last words may still be on their way.
    let until = Instant::now() + Duration::from_millis(300);
    while Instant::now() < until {
        t.check().unwrap();
    }
    assert_eq!(t.untaken_words(), 0);
}

/// Who may wait for ever leaves as others do.
pub fn without_deadline() {
    let mut t = MpiTransport::world(&Start { call_timeout: Duration::MAX, ..Start::default() }).unwrap();
    p2p::barrier(&mut t, 1);
}

/// Forms groups until MPI has no more communicators, of which a rank by itself has taken all but some: that is quicker.
pub fn too_many_groups(mut t: MpiTransport) {
    let mut taken = all_communicators();
    for mut comm in taken.split_off(taken.len() - 200) {
        // SAFETY: made above, and used for nothing.
        assert_eq!(unsafe { ffi::MPI_Comm_free(&mut comm) }, ffi::MPI_SUCCESS as c_int);
    }
    let (rank, all) = (t.rank(), (0..t.size()).collect::<Vec<_>>());
    let mut refused = |number: u64| t.subgroup(&all, number, p2p::PATIENCE).err();
    let (count, error) = (0..).find_map(|number| Some((number, refused(number)?))).unwrap();
    let error = error.to_string();
    eprintln!("{count} groups beside {} communicators, then: {error}", taken.len());
    assert!(count >= 20 && taken.len() > 1000, "{count} and {}", taken.len());
    assert!(error.contains(&format!("on rank {rank}")) && error.contains("keep groups"), "{error}");
}

/// As many as MPI gives.
fn all_communicators() -> Vec<MPI_Comm> {
    let mut all = Vec::new();
    // SAFETY: MPI has been started; predefined handles, and places for the results.
    unsafe {
        ffi::MPI_Comm_set_errhandler(ffi::RSMPI_COMM_SELF, ffi::RSMPI_ERRORS_RETURN);
        let mut comm = ffi::RSMPI_COMM_NULL;
        while ffi::MPI_Comm_dup(ffi::RSMPI_COMM_SELF, &mut comm) == ffi::MPI_SUCCESS as c_int {
            all.push(comm);
        }
    }
    all
}

/// What ranks tell each other of themselves may be long: both send and receive at the same time.
pub fn exchanges(mut t: MpiTransport) {
    let blob = |rank: usize| vec![rank as u8 + 1; 100_000 + 1000 * rank];
    let right: Vec<Vec<u8>> = (0..t.size()).map(blob).collect();
    let mine = &right[t.rank()];
    for _ in 0..300 {
        let all = bootstrap::exchange(&mut t, mine, Duration::from_secs(5)).unwrap();
        assert!(all == right);
    }
}

/// Rank 0 leaves a group before what rank 1 sends in it has come, and is still in others.
pub fn left_before_it_comes(mut t: MpiTransport) {
    let mut data = vec![0u8; 512];
    let mut group = t.subgroup(&[0, 1], 1, p2p::PATIENCE).unwrap();
    if t.rank() == 0 {
        // SAFETY: `data` stays until the group has gone, which ends the receive.
        unsafe { group.recv(1, Tag(9), data.as_mut_ptr(), data.len()).unwrap() };
        drop(group);
        p2p::barrier(&mut t, 1);
    } else {
        p2p::barrier(&mut t, 1);
        // SAFETY: `data` stays until the group has gone, which waits until it was sent.
        unsafe { group.send(0, Tag(9), data.as_ptr(), data.len()).unwrap() };
    }
}
