use super::meeting::Hello;
use super::*;
use crate::bootstrap::alone::alone;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, connect, socket};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::os::fd::AsRawFd;
use std::time::Instant;

#[test]
fn a_limit_of_open_files_ends_the_rendezvous_at_once() {
    if !alone("bootstrap::star::tests::a_limit_of_open_files_ends_the_rendezvous_at_once") {
        return;
    }
    let name = format!("caravan-test-open-files-{}", std::process::id());
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
    let others = [(); 2].map(|()| socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap());
    let place = Place::Unix(name);
    let middle = std::thread::spawn(move || {
        let me = Member { ranks: &[0, 1, 2], index: 0, world: 3, token: "", job: "files", program: "p" };
        Star::meet(&place, &me, Duration::from_secs(600), None, None).map(|_| ())
    });
    while connect(&others[0], &address).is_err() {
        std::thread::sleep(Duration::from_millis(1));
    }
    // It listens, and opens nothing from now on.
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: Some(3), maximum }).unwrap();
    connect(&others[1], &address).unwrap();
    let said = middle.join().unwrap().expect_err("no connection more").to_string();
    assert!(said.contains("1 of 3 ranks have come") && said.contains("(ulimit -n) is 3"), "{said}");
}

/// A socket that has no other end yet.
fn unconnected() -> Stream {
    let socket = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    Stream::Unix(socket.into())
}

/// Connects it to the middle of a star, once that listens.
fn reach(stream: &Stream, name: &str) {
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
    let end = Instant::now() + Duration::from_secs(60);
    while let Err(error) = connect(stream.fd(), &address) {
        assert!(Instant::now() < end, "nobody listens: {error}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The middle of a star of two, which waits for the other.
fn middle_of_two(name: &str) -> std::thread::JoinHandle<Result<()>> {
    let place = Place::Unix(name.to_owned());
    std::thread::spawn(move || {
        let me = Member { ranks: &[0, 1], index: 0, world: 2, token: "right", job: "the-name", program: "p" };
        Star::meet(&place, &me, Duration::from_secs(600), None, None).map(|_| ())
    })
}

/// The two members of a star, of which the first is in the middle.
fn pair(what: &str) -> [Star; 2] {
    let name = format!("caravan-test-{what}-{}", std::process::id());
    let member = |index| {
        let place = Place::Unix(name.clone());
        std::thread::spawn(move || {
            let me = Member { ranks: &[0, 1], index, world: 2, token: "", job: "pair", program: "p" };
            Star::meet(&place, &me, Duration::from_secs(600), None, None).unwrap()
        })
    };
    [0, 1].map(member).map(|thread| thread.join().unwrap())
}

/// Joins that star with `token`; what the middle answers.
fn join(stream: &Stream, token: &str) -> (Kind, Vec<u8>) {
    let me = Member { ranks: &[0, 1], index: 1, world: 2, token, job: "mine", program: "p" };
    let wait = Wait::new(Duration::from_secs(600), 1, None);
    wire::write(stream, Kind::Hello, &Hello::encode(&me), &wait).unwrap();
    wire::read(stream, &wait).unwrap()
}

#[test]
fn ranks_of_different_programs_are_told_so() {
    let name = format!("caravan-test-programs-{}", std::process::id());
    let (ours, home) = (unconnected(), hosts::host_name());
    let middle = middle_of_two(&name);
    reach(&ours, &name);
    let me = Member { ranks: &[0, 1], index: 1, world: 2, token: "right", job: "mine", program: "q" };
    let wait = Wait::new(Duration::from_secs(600), 1, None);
    wire::write(&ours, Kind::Hello, &Hello::encode(&me), &wait).unwrap();
    let heard = wire::refusal(&wire::read(&ours, &wait).unwrap().1, 1).to_string();
    for said in [heard, middle.join().unwrap().unwrap_err().to_string()] {
        let words = format!("rank 1 on {home} runs q, rank 0 on {home} p: start the same program everywhere");
        assert!(said.contains(&words), "{said}");
    }
}

/// Joins it as the rank that it waits for.
fn completes(ours: &Stream, name: &str, middle: std::thread::JoinHandle<Result<()>>) {
    reach(ours, name);
    assert_eq!(join(ours, "right"), (Kind::Welcome, Vec::new()));
    middle.join().unwrap().unwrap();
}

#[test]
fn silent_strangers_make_room_for_a_rank() {
    if !alone("bootstrap::star::tests::silent_strangers_make_room_for_a_rank") {
        return;
    }
    let name = format!("caravan-test-silent-{}", std::process::id());
    let (strangers, ours) = ([(); 3].map(|()| unconnected()), unconnected());
    let middle = middle_of_two(&name);
    reach(&strangers[0], &name);
    // It listens, and from now on can open one descriptor more.
    let next = strangers[0].fd().try_clone_to_owned().unwrap().as_raw_fd() as u64;
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: Some(next + 1), maximum }).unwrap();
    strangers[1..].iter().for_each(|stranger| reach(stranger, &name));
    completes(&ours, &name, middle);
}

#[test]
fn who_was_sent_away_is_named_when_a_rank_does_not_come() {
    let name = format!("caravan-test-sent-away-{}", std::process::id());
    let place = Place::Unix(name.clone());
    let middle = std::thread::spawn(move || {
        let me = Member { ranks: &[0, 1], index: 0, world: 2, token: "right", job: "mine", program: "p" };
        Star::meet(&place, &me, Duration::from_secs(5), None, None).map(|_| ())
    });
    let [foreign, stranger] = [(); 2].map(|()| unconnected());
    let wait = Wait::new(Duration::from_secs(600), 1, None);
    reach(&foreign, &name);
    wire::write(&foreign, Kind::Hello, b"of something else", &wait).unwrap();
    assert_eq!(wire::read(&foreign, &wait).unwrap().0, Kind::Refused);
    reach(&stranger, &name);
    assert_eq!(join(&stranger, "wrong"), (Kind::Stranger, Vec::new()));
    let said = middle.join().unwrap().unwrap_err().to_string();
    let home = format!("process {} on {}", std::process::id(), hosts::host_name());
    for words in ["who came and was sent away: something that is no rank of caravan", &home, "CARAVAN_TOKEN"]
    {
        assert!(said.contains(words), "{said}");
    }
}

/// Of a name that a hello has no room for, all ranks compare the same part.
#[test]
fn ranks_of_one_program_meet_whatever_the_length_of_its_name() {
    for program in ["p".repeat(255), "p".repeat(300), "é".repeat(200)] {
        let place = Place::Unix(format!("caravan-test-names-{}-{}", std::process::id(), program.len()));
        let meet = |index: usize| {
            let (job, program) = ("mine", &*program);
            let me = Member { ranks: &[0, 1], index, world: 2, token: "right", job, program };
            Star::meet(&place, &me, Duration::from_secs(20), None, None).map(|_| ())
        };
        std::thread::scope(|scope| {
            let other = scope.spawn(|| meet(1));
            meet(0).unwrap();
            other.join().unwrap().unwrap();
        });
    }
}

/// What ranks of before have said of themselves is understood, to tell them so.
#[test]
fn hellos_of_another_version_are_read() {
    let me = Member { ranks: &[0, 1], index: 1, world: 2, token: "right", job: "mine", program: "p" };
    let now = Hello::encode(&me);
    let read = Hello::decode(&now).unwrap();
    assert_eq!((read.program(), read.host()), ("p", hosts::host_name().as_str()));
    let first = [b"caravan1", &now[8..8 + 16], b"righthome"].concat();
    let read = Hello::decode(&first).unwrap();
    assert_eq!((read.program(), read.host()), ("an older caravan", "home"));
    let later = [b"caravan9", &now[8..]].concat();
    assert_eq!(Hello::decode(&later).unwrap().program(), "p, which meets others in another way");
    assert!(Hello::decode(b"GET / HTTP/1.1").is_none());
}

#[test]
fn a_stranger_does_not_hear_the_name_of_the_job() {
    let name = format!("caravan-test-name-{}", std::process::id());
    let (stranger, ours) = (unconnected(), unconnected());
    let middle = middle_of_two(&name);
    reach(&stranger, &name);
    assert_eq!(join(&stranger, "guessed"), (Kind::Stranger, Vec::new()));
    completes(&ours, &name, middle);
}

#[test]
fn who_is_lost_before_descriptors_are_exchanged_is_named_by_all() {
    let name = format!("caravan-test-lost-{}", std::process::id());
    let member = |index| {
        let place = Place::Unix(name.clone());
        std::thread::spawn(move || {
            let me = Member { ranks: &[0, 1, 2], index, world: 3, token: "", job: "lost", program: "p" };
            let star = Star::meet(&place, &me, Duration::from_secs(600), None, None).unwrap();
            let own = [star.links[0].fd()];
            (index < 2).then(|| star.exchange_fds(&own).unwrap_err())
        })
    };
    let [zero, one, _] = [0, 1, 2].map(member).map(|thread| thread.join().unwrap());
    for error in [zero, one] {
        assert!(matches!(error, Some(Error::PeerLost { peer: 2, .. })), "{error:?}");
    }
}

#[test]
fn who_is_lost_is_named_while_others_are_silent() {
    let hour = Duration::from_secs(3600);
    for descriptors in [false, true] {
        let name = format!("caravan-test-silence-{descriptors}-{}", std::process::id());
        let member = |index| {
            let place = Place::Unix(name.clone());
            std::thread::spawn(move || {
                let me =
                    Member { ranks: &[0, 1, 2, 3], index, world: 4, token: "", job: "silence", program: "p" };
                Star::meet(&place, &me, hour, None, None).unwrap()
            })
        };
        let [zero, one, two, three] = [0, 1, 2, 3].map(member).map(|thread| thread.join().unwrap());
        // The second says its part and is lost, the first says nothing, as the third.
        if descriptors {
            // Not its own end, which then lasts.
            let fds = [three.links[0].fd()];
            wire::send_fds(&two.links[0], &fds, &Wait::new(hour, 2, None)).unwrap();
        } else {
            wire::write(&two.links[0], Kind::Data, b"mine", &Wait::new(hour, 2, None)).unwrap();
        }
        drop(two);
        let own = [one.links[0].fd()];
        let ended = |star: &Star| match descriptors {
            false => star.exchange(b"mine").unwrap_err(),
            true => star.exchange_fds(&own).unwrap_err(),
        };
        for error in [ended(&zero), ended(&one), ended(&three)] {
            assert!(matches!(error, Error::PeerLost { peer: 2, .. }), "{error:?}");
        }
    }
}

#[test]
fn who_is_lost_before_its_host_meets_is_named_by_all_hosts() {
    let hour = Duration::from_secs(3600);
    for lost in 0..4 {
        let name = format!("caravan-test-above-{lost}-{}", std::process::id());
        let member = |index| {
            let name = name.clone();
            std::thread::spawn(move || {
                let ranks = [0, 1, 2, 3];
                let me = Member { ranks: &ranks, index, world: 4, token: "", job: "above", program: "p" };
                let world = Star::meet(&Place::Unix(name.clone()), &me, hour, None, None).unwrap();
                if index == lost {
                    return None;
                }
                let (host, index) = (index / 2, index % 2);
                let me = Member {
                    ranks: &ranks[2 * host..][..2],
                    index,
                    world: 4,
                    token: "",
                    job: "above",
                    program: "p",
                };
                let place = Place::Unix(format!("{name}-{host}"));
                let met =
                    Star::meet(&place, &me, hour, None, Some(&world)).map_err(|error| world.tell(error));
                Some(met.and_then(|_| world.exchange(&[])).unwrap_err())
            })
        };
        for error in [0, 1, 2, 3].map(member).into_iter().filter_map(|thread| thread.join().unwrap()) {
            assert!(matches!(error, Error::PeerLost { peer, .. } if peer == lost), "{lost}: {error:?}");
        }
    }
}

#[test]
fn who_has_joined_and_ends_before_all_have_come_is_named_by_all() {
    let name = format!("caravan-test-ended-{}", std::process::id());
    let (ranks, hour) = ([0, 1, 2, 3], Duration::from_secs(3600));
    let member = |index| {
        let place = Place::Unix(name.clone());
        std::thread::spawn(move || {
            let me = Member { ranks: &ranks, index, world: 4, token: "", job: "ended", program: "p" };
            Star::meet(&place, &me, hour, None, None).map(|_| ()).unwrap_err()
        })
    };
    let wait = Wait::new(hour, 1, None);
    let hello = |stream: &Stream, index| {
        let me = Member { ranks: &ranks, index, world: 4, token: "", job: "ended", program: "p" };
        wire::write(stream, Kind::Hello, &Hello::encode(&me), &wait)
    };
    let zero = member(0);
    let [two, one, again] = [(); 3].map(|()| unconnected());
    [&two, &one, &again].into_iter().for_each(|stream| reach(stream, &name));
    hello(&two, 2).unwrap();
    hello(&one, 1).unwrap();
    drop(one);
    // Who started it has started it again, perhaps too late to be heard.
    let _ = hello(&again, 1);
    let (said, heard) = (zero.join().unwrap(), wire::read(&two, &wait).unwrap());
    assert!(matches!(said, Error::PeerLost { peer: 1, .. }), "{said:?}");
    let home = format!("(process {} on {})", std::process::id(), hosts::host_name());
    assert!(said.to_string().contains(&home), "{said}");
    let heard = wire::refusal(&heard.1, 2);
    assert!(matches!(heard, Error::PeerLost { rank: 2, peer: 1, .. }), "{heard:?}");
}

#[test]
fn a_blob_too_long_ends_the_exchange_of_all() {
    let name = format!("caravan-test-too-long-{}", std::process::id());
    for long in [0, 1] {
        let member = |index| {
            let place = Place::Unix(name.clone());
            std::thread::spawn(move || {
                let me = Member { ranks: &[0, 1], index, world: 2, token: "", job: "long", program: "p" };
                let star = Star::meet(&place, &me, Duration::from_secs(600), None, None).unwrap();
                let blob = vec![1; if index == long { wire::LONGEST_FRAME } else { 1 }];
                // It stays: nobody learns from its end.
                (star.exchange(&blob).unwrap_err().to_string(), star)
            })
        };
        let ends = [0, 1].map(member).map(|thread| thread.join().unwrap().0);
        assert!(ends.iter().all(|said| said.contains("a blob of 67108864 bytes")), "{ends:?}");
    }
}

#[test]
fn other_programs_at_the_address_of_rank_0_are_passed_by() {
    let other = harness::ports::listener();
    let place = Place::Tcp(other.local_addr().unwrap().to_string());
    let member = |index| {
        let place = place.clone();
        std::thread::spawn(move || {
            let me =
                Member { ranks: &[0, 1], index, world: 2, token: "ours", job: "passed-by", program: "p" };
            Star::meet(&place, &me, Duration::from_secs(60), None, None).map(|_| ())
        })
    };
    let one = member(1);
    let (mut talks, _) = other.accept().unwrap();
    std::io::Write::write_all(&mut talks, b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
    let (closes, _) = other.accept().unwrap();
    drop((talks, closes, other));
    let zero = member(0);
    one.join().unwrap().expect("it finds rank 0");
    zero.join().unwrap().expect("it is found");
}

#[test]
fn who_comes_late_to_an_exchange_hears_why_it_has_failed() {
    for descriptors in [false, true] {
        let [mut zero, one] = pair(&format!("late-{descriptors}"));
        zero.timeout = Duration::from_millis(10);
        let said = zero.exchange(b"here").unwrap_err().to_string();
        let home = hosts::host_name();
        let words = format!("exchange: rank 1 of 2, on {home}, did not answer within 10ms");
        assert!(said.contains(&words), "{said}");
        drop(zero);
        let own = [one.links[0].fd()];
        let error = match descriptors {
            false => one.exchange(b"late").unwrap_err(),
            true => one.exchange_fds(&own).unwrap_err(),
        };
        assert!(error.to_string().contains(&words), "{error}");
    }
}

#[test]
fn blobs_of_any_length_reach_every_member() {
    let name = format!("caravan-test-blobs-{}", std::process::id());
    let member = |index| {
        let place = Place::Unix(name.clone());
        std::thread::spawn(move || {
            let me = Member { ranks: &[0, 1, 2], index, world: 3, token: "", job: "blobs", program: "p" };
            let star = Star::meet(&place, &me, Duration::from_secs(600), None, None).unwrap();
            // More than a socket takes at once, and nothing.
            [3_000_000, 0, 1].map(|bytes| {
                let blob: Vec<u8> = (0..bytes).map(|i| (i * (index + 1) % 251) as u8).collect();
                star.exchange(&blob).unwrap()
            })
        })
    };
    for all in [0, 1, 2].map(member).map(|thread| thread.join().unwrap()) {
        for (blobs, bytes) in all.iter().zip([3_000_000, 0, 1]) {
            for (index, blob) in blobs.iter().enumerate() {
                assert!(blob.len() == bytes, "{} bytes of {bytes} from {index}", blob.len());
                assert!((0..bytes).all(|i| blob[i] == (i * (index + 1) % 251) as u8), "those of {index}");
            }
        }
    }
}

#[test]
fn what_fails_one_member_is_told_as_its_failure() {
    for who in [0, 1] {
        let pair = pair(&format!("own-{who}"));
        pair[who].tell(Error::system("opening files", "too many"));
        let heard = pair[1 - who].exchange(b"mine").unwrap_err().to_string();
        assert_eq!(heard, format!("rank {who} gave up: opening files: too many; rank {} stops", 1 - who));
    }
}

/// The middle's connections may end before its supervisor has seen its end.
#[test]
fn what_a_supervisor_says_of_the_middle_is_waited_for() {
    for descriptors in [false, true] {
        let [middle, mut leaf] = pair(&format!("board-{descriptors}"));
        let (board, _memory) = Board::create(2).unwrap();
        let board = Arc::new(board);
        leaf.board = Some(board.clone());
        drop(middle);
        let error = std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(50));
                board.record(0, crate::bootstrap::Ending::Killed(9));
            });
            let own = [leaf.links[0].fd()];
            match descriptors {
                false => leaf.exchange(b"mine").unwrap_err(),
                true => leaf.exchange_fds(&own).unwrap_err(),
            }
        });
        assert!(error.to_string().contains("was killed by signal 9"), "{error}");
    }
}
