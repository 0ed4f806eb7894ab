use super::*;
use crate::bootstrap::alone::alone;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, connect, socket};
use rustix::process::{Rlimit, setrlimit};

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
        let me = Member { ranks: &[0, 1, 2], index: 0, world: 3, token: "", job: "files" };
        Star::meet(&place, &me, Duration::from_secs(600), None).map(|_| ())
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

#[test]
fn who_is_lost_before_descriptors_are_exchanged_is_named_by_all() {
    let name = format!("caravan-test-lost-{}", std::process::id());
    let member = |index| {
        let place = Place::Unix(name.clone());
        std::thread::spawn(move || {
            let me = Member { ranks: &[0, 1, 2], index, world: 3, token: "", job: "lost" };
            let star = Star::meet(&place, &me, Duration::from_secs(600), None).unwrap();
            let own = [star.links[0].fd()];
            (index < 2).then(|| star.exchange_fds(&own, Duration::from_secs(600), None).unwrap_err())
        })
    };
    let [zero, one, _] = [0, 1, 2].map(member).map(|thread| thread.join().unwrap());
    for error in [zero, one] {
        assert!(matches!(error, Some(Error::PeerLost { peer: 2, .. })), "{error:?}");
    }
}
