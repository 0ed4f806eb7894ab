//! Where the members of a star find each other: sockets of one host, and of several.

use super::wire::{Stream, Wait};
use crate::error::{Error, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType, sockopt};
use std::net::{IpAddr, Ipv6Addr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::{Duration, Instant};

/// Connections that may wait to be taken: many ranks come at once.
const BACKLOG: i32 = 4096;
/// How long what a name stands for is kept: thousands of ranks would ask a name server at every look.
const NAMED_FOR: Duration = Duration::from_secs(5);

/// Where a star meets.
#[derive(Clone, Debug)]
pub(super) enum Place {
    /// An abstract Unix socket: no file, gone with its process; only this host and network namespace see it.
    Unix(String),
    /// `host:port`, or `host,host:port` for a host of several names, of which one reaches it.
    Tcp(String),
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Place::Unix(name) => write!(f, "the Unix socket @{name}"),
            Place::Tcp(address) => write!(f, "{address}"),
        }
    }
}

/// Waits there for connections.
pub(super) enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl Listener {
    /// Listens at `place`.
    pub fn bind(place: &Place) -> std::io::Result<Self> {
        match place {
            Place::Unix(name) => {
                let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
                listener.set_nonblocking(true)?;
                Ok(Listener::Unix(listener))
            }
            Place::Tcp(address) => {
                let (_, port) = hosts_and_port(address)?;
                // Any address, not the one the name has here: /etc/hosts often says 127.0.1.1 for one's own name.
                let listener = both_families(port).or_else(|e| match e.raw_os_error() {
                    // Where somebody else has the port, other ranks might find him first, and tell him the job's secret.
                    Some(libc::EADDRINUSE) => Err(e),
                    // A system without IPv6 says so in one of several ways.
                    _ => TcpListener::bind(("0.0.0.0", port)),
                })?;
                listener.set_nonblocking(true)?;
                Ok(Listener::Tcp(listener))
            }
        }
    }

    /// Readable when somebody connects.
    pub fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Listener::Unix(l) => l.as_fd(),
            Listener::Tcp(l) => l.as_fd(),
        }
    }

    /// The next connection of somebody who may speak at all: on Unix sockets the kernel vouches for the user.
    ///
    /// # Errors
    /// Neither this process nor the system can have more files open: whoever waits would wait for ever.
    pub fn accept(&self) -> std::io::Result<Option<Stream>> {
        let accepted = match self {
            Listener::Unix(l) => l.accept().map(|(stream, _)| Stream::Unix(stream)),
            Listener::Tcp(l) => l.accept().map(|(stream, _)| Stream::Tcp(stream)),
        };
        match accepted {
            Ok(stream) => Ok(admissible(&stream).then_some(stream)),
            // Linux says so before it looks whether anybody waits.
            Err(e) if matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
                if self.somebody_waits() { Err(e) } else { Ok(None) }
            }
            // Nobody, or who has gone again.
            Err(_) => Ok(None),
        }
    }

    fn somebody_waits(&self) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(self.fd(), PollFlags::IN)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
    }
}

/// Whether somebody who has connected may speak, and can be listened to.
fn admissible(stream: &Stream) -> bool {
    match stream {
        Stream::Unix(stream) => {
            let of_this_user =
                peer_of(stream.as_fd()).is_ok_and(|peer| peer.uid == rustix::process::geteuid().as_raw());
            of_this_user && stream.set_nonblocking(true).is_ok()
        }
        Stream::Tcp(stream) => stream.set_nonblocking(true).and_then(|()| stream.set_nodelay(true)).is_ok(),
    }
}

/// Who the kernel says is at the other end of a Unix socket. A process that cannot be seen from here, in a container with
/// processes of its own, has the number 0, which rustix's structure has no room for.
pub(super) fn peer_of(socket: BorrowedFd<'_>) -> std::io::Result<libc::ucred> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: both live here, and the kernel writes no more than the length says.
    let done = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut length,
        )
    };
    match done {
        0 => Ok(peer),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// What stands before and after the last colon.
fn hosts_and_port(address: &str) -> std::io::Result<(&str, u16)> {
    let found = address.rsplit_once(':').and_then(|(hosts, port)| Some((hosts, port.parse().ok()?)));
    found.filter(|&(_, port)| port > 0).ok_or_else(|| {
        std::io::Error::new(
            std::io::ErrorKind::InvalidInput,
            "an address is host:port, with a port from 1 to 65535",
        )
    })
}

/// Whether this host surely has none of the addresses that `address` stands for: who looks for it there finds another host, or
/// nobody.
pub(super) fn is_of_another_host(address: &str) -> bool {
    let Ok((hosts, _)) = hosts_and_port(address) else { return false };
    let known = |host| format!("{host}:0").to_socket_addrs().ok();
    let lacks = |address: std::net::SocketAddr| {
        TcpListener::bind(address).is_err_and(|e| e.kind() == std::io::ErrorKind::AddrNotAvailable)
    };
    hosts.split(',').all(|host| known(host).is_some_and(|addresses| addresses.into_iter().all(lacks)))
}

/// Whether every host means itself by `address`, as far as can be told without looking up a name.
pub(super) fn is_of_every_host(address: &str) -> bool {
    let itself = |host: &str| match host.trim_matches(['[', ']']).parse::<IpAddr>() {
        Ok(address) => address.is_loopback() || address.is_unspecified(),
        Err(_) => host == "localhost",
    };
    hosts_and_port(address).is_ok_and(|(hosts, _)| hosts.split(',').all(itself))
}

/// Listens on IPv6 and IPv4, also where the system keeps them apart unless asked (`net.ipv6.bindv6only`).
fn both_families(port: u16) -> std::io::Result<TcpListener> {
    let socket = net::socket_with(AddressFamily::INET6, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // As the standard library does: the port of a job that has just ended is free.
    sockopt::set_socket_reuseaddr(&socket, true)?;
    sockopt::set_ipv6_v6only(&socket, false)?;
    net::bind(&socket, &std::net::SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)))?;
    net::listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

/// What a look at a place found.
pub(super) enum Found {
    Somebody(Stream),
    /// Nobody whom we look for listens yet.
    Nobody(Why),
}

/// Why nobody was found.
pub(super) enum Why {
    /// Nothing has the name yet.
    Unnamed(Error),
    /// Nobody took the connection; what the system says of that, where it says more than that nobody is there.
    Unanswered(Option<String>),
}

/// Looks for who listens at a place, as often as it takes.
pub(super) struct Search<'a> {
    place: &'a Place,
    /// What its names stood for, and since when that is known.
    named: Option<(Vec<std::net::SocketAddr>, Instant)>,
}

impl<'a> Search<'a> {
    pub fn new(place: &'a Place) -> Self {
        Search { place, named: None }
    }

    /// Connects to who listens there and is the one that `greet` looks for: where it gives nothing back, whoever listens at
    /// the next address may be. On Unix sockets the kernel says which user listens: a stranger there hears nothing, least of
    /// all the job's secret.
    pub fn look(
        &mut self,
        wait: &Wait<'_>,
        mut greet: impl FnMut(Stream) -> Result<Option<Stream>>,
    ) -> Result<Found> {
        let place = self.place;
        let refused = |e: std::io::Error| Error::system(format!("connecting to {place}"), e);
        match place {
            Place::Unix(name) => {
                let stream = match connect_here(name).map_err(refused)? {
                    Ok(stream) => stream,
                    Err(why) => return Ok(Found::Nobody(Why::Unanswered(why))),
                };
                let peer = peer_of(stream.as_fd()).map_err(refused)?;
                if peer.uid != rustix::process::geteuid().as_raw() {
                    return Err(Error::Launch(format!(
                        "user {} listens at {place}, where rank 0 of this job should: set CARAVAN_JOB to another name for \
                         all ranks",
                        peer.uid
                    )));
                }
                let met = greet(Stream::Unix(stream))?;
                Ok(met.map_or(Found::Nobody(Why::Unanswered(None)), Found::Somebody))
            }
            Place::Tcp(address) => {
                let (hosts, port) = hosts_and_port(address).map_err(refused)?;
                let addresses = match self.resolve(hosts, port, wait) {
                    Ok(addresses) => addresses,
                    // A name may come with the host that has it.
                    Err(e) => return Ok(Found::Nobody(Why::Unnamed(refused(e)))),
                };
                let mut last = None;
                for address in addresses {
                    let connect = || TcpStream::connect_timeout(&address, Duration::from_secs(1));
                    let stream = match wait.blocked(connect) {
                        Ok(stream) => stream,
                        Err(e) => {
                            last = Some(format!("{address} says: {e}"));
                            continue;
                        }
                    };
                    // Where nobody listens and the kernel picks that very port for this end, it joins both ends.
                    if stream.local_addr().ok() == Some(address) {
                        continue;
                    }
                    stream.set_nonblocking(true).map_err(refused)?;
                    stream.set_nodelay(true).map_err(refused)?;
                    if let Some(stream) = greet(Stream::Tcp(stream))? {
                        return Ok(Found::Somebody(stream));
                    }
                }
                Ok(Found::Nobody(Why::Unanswered(last)))
            }
        }
    }

    /// The addresses of `hosts`, which are names or addresses with commas between them.
    fn resolve(
        &mut self,
        hosts: &str,
        port: u16,
        wait: &Wait<'_>,
    ) -> std::io::Result<Vec<std::net::SocketAddr>> {
        if let Some((addresses, since)) = &self.named
            && since.elapsed() < NAMED_FOR
        {
            return Ok(addresses.clone());
        }
        let (mut addresses, mut failed) = (Vec::new(), None);
        for host in hosts.split(',') {
            match wait.blocked(|| format!("{host}:{port}").to_socket_addrs()) {
                Ok(found) => addresses.extend(found),
                Err(e) => failed = failed.or(Some(e)),
            }
        }
        match failed {
            Some(e) if addresses.is_empty() => return Err(e),
            // Who is missing may come.
            Some(_) => self.named = None,
            None => self.named = Some((addresses.clone(), Instant::now())),
        }
        Ok(addresses)
    }
}

/// Connects to who listens at this name on this host, or says why nobody takes the connection. It does not wait for room
/// among those that are to be taken: that has no end if nobody takes them.
fn connect_here(name: &str) -> std::io::Result<std::result::Result<UnixStream, Option<String>>> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    Ok(match net::connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?) {
        Ok(()) => Ok(socket.into()),
        Err(rustix::io::Errno::CONNREFUSED) => Err(None),
        Err(rustix::io::Errno::AGAIN) => Err(Some("who listens there takes no connections".into())),
        Err(e) => Err(Some(format!("the system says: {}", std::io::Error::from(e)))),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::Uid;

    /// Whoever listens there.
    fn connect(place: &Place) -> Result<Found> {
        Search::new(place).look(&Wait::new(Duration::from_secs(600), 1, None), |stream| Ok(Some(stream)))
    }

    #[test]
    fn a_port_that_somebody_else_has_on_one_family_is_not_listened_at_on_the_other() {
        let Ok(socket) = net::socket(AddressFamily::INET6, SocketType::STREAM, None) else {
            return harness::skip("there is no IPv6 here");
        };
        sockopt::set_ipv6_v6only(&socket, true).unwrap();
        net::bind(&socket, &std::net::SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0))).unwrap();
        net::listen(&socket, 1).unwrap();
        let taken = TcpListener::from(socket);
        let place = Place::Tcp(format!("localhost:{}", taken.local_addr().unwrap().port()));
        let refused = Listener::bind(&place).err().expect("the port is taken");
        assert_eq!(refused.kind(), std::io::ErrorKind::AddrInUse);
    }

    #[test]
    fn an_address_that_every_host_has_is_told_from_others() {
        for address in
            ["127.0.0.1:4000", "0.0.0.0:1", "[::1]:4000", "[::]:9", "localhost:80", "127.0.0.1,localhost:80"]
        {
            assert!(is_of_every_host(address), "{address}");
        }
        for address in ["10.0.0.1:4000", "node1:80", "[fd77::1]:4000", "127.0.0.1,10.0.0.1:80"] {
            assert!(!is_of_every_host(address), "{address}");
        }
    }

    #[test]
    fn an_address_without_a_port_is_no_place() {
        for bad in ["node1", "node1:", "node1:0", "node1:x", "node1:70000"] {
            let place = Place::Tcp(bad.into());
            let said = [
                Listener::bind(&place).err().unwrap().to_string(),
                connect(&place).err().unwrap().to_string(),
            ];
            assert!(said.iter().all(|text| text.contains("host:port")), "{bad}: {said:?}");
        }
    }

    #[test]
    fn addresses_of_other_hosts_are_known() {
        assert!(!is_of_another_host("127.0.0.1:4000") && !is_of_another_host("localhost:4000"));
        // For documents only.
        assert!(is_of_another_host("192.0.2.1:4000"));
        assert!(!is_of_another_host("192.0.2.1,127.0.0.1:4000"));
        // Who it is nobody knows.
        assert!(!is_of_another_host("no-such-host.invalid:4000"));
    }

    #[test]
    fn a_name_may_come_with_its_host() {
        let found = connect(&Place::Tcp("no-such-host.invalid:4000".into())).unwrap();
        let Found::Nobody(Why::Unnamed(why)) = found else { panic!("somebody there, or no reason") };
        assert!(why.to_string().contains("no-such-host.invalid:4000"), "{why}");
    }

    #[test]
    fn a_name_is_asked_for_again_once_it_is_old() {
        let wait = Wait::new(Duration::from_secs(600), 1, None);
        let place = Place::Tcp("localhost:4000".into());
        let mut search = Search::new(&place);
        let known = search.resolve("localhost", 4000, &wait).unwrap();
        assert!(!known.is_empty());
        // What is known is not asked for: this has no address.
        assert_eq!(search.resolve("no-such-host.invalid", 4000, &wait).unwrap(), known);
        search.named.as_mut().unwrap().1 -= NAMED_FOR;
        assert!(search.resolve("no-such-host.invalid", 4000, &wait).is_err());
    }

    #[test]
    fn what_the_system_says_of_a_host_that_does_not_answer_is_kept() {
        let free = format!("127.0.0.1:{}", harness::ports::free_port());
        let Found::Nobody(Why::Unanswered(Some(said))) = connect(&Place::Tcp(free.clone())).unwrap() else {
            panic!("somebody there, or no reason")
        };
        assert!(said.contains(&free) && said.contains("refused"), "{said}");
    }

    #[test]
    fn nobody_waits_for_who_takes_no_connections() {
        let name = format!("caravan-test-full-{}", std::process::id());
        let listener = net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        net::bind(&listener, &SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap()).unwrap();
        net::listen(&listener, 0).unwrap();
        let place = Place::Unix(name);
        let (whole, looked) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            // Whom it has room for stay.
            let mut taken = Vec::new();
            let said = loop {
                match connect(&place).unwrap() {
                    Found::Somebody(stream) => taken.push(stream),
                    Found::Nobody(Why::Unanswered(said)) => break said,
                    Found::Nobody(Why::Unnamed(error)) => panic!("{error}"),
                }
            };
            whole.send(said).unwrap();
        });
        let said = looked.recv_timeout(Duration::from_secs(60)).expect("no wait").expect("a reason");
        assert!(said.contains("takes no connections"), "{said}");
    }

    #[test]
    fn a_stranger_at_the_meeting_point_is_told_nothing() {
        if !harness::is_root() {
            return harness::skip("acting as another user needs root");
        }
        let place = Place::Unix(format!("caravan-test-stranger-{}", std::process::id()));
        let there = place.clone();
        // Only the thread is another user, as it begins to listen.
        let stranger = std::thread::spawn(move || {
            rustix::thread::set_thread_uid(Uid::from_raw(65534)).unwrap();
            Listener::bind(&there).unwrap()
        });
        let listener = stranger.join().unwrap();
        let text = connect(&place).err().unwrap().to_string();
        assert!(text.contains("user 65534 listens") && text.contains("CARAVAN_JOB"), "{text}");
        drop(listener);
    }
}
