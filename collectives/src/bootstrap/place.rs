//! Where the members of a star find each other: sockets of one host, and of several.

use super::wire::Stream;
use crate::error::{Error, Result};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

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
                let port: u16 = address.rsplit_once(':').and_then(|(_, p)| p.parse().ok()).unwrap_or(0);
                // Any address, not the one the name has here: /etc/hosts often says 127.0.1.1 for one's own name.
                let listener =
                    TcpListener::bind(("::", port)).or_else(|_| TcpListener::bind(("0.0.0.0", port)))?;
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
    pub fn accept(&self) -> Option<Stream> {
        match self {
            Listener::Unix(l) => {
                let (stream, _) = l.accept().ok()?;
                stream.set_nonblocking(true).ok()?;
                let peer = rustix::net::sockopt::socket_peercred(&stream).ok()?;
                (peer.uid == rustix::process::geteuid()).then_some(Stream::Unix(stream))
            }
            Listener::Tcp(l) => {
                let (stream, _) = l.accept().ok()?;
                stream.set_nonblocking(true).ok()?;
                stream.set_nodelay(true).ok()?;
                Some(Stream::Tcp(stream))
            }
        }
    }
}

/// Connects to whoever listens at `place`; none: nobody does yet.
pub(super) fn connect(place: &Place) -> Result<Option<Stream>> {
    let refused = |e: std::io::Error| Error::system(format!("connecting to {place}"), e);
    match place {
        Place::Unix(name) => {
            let address = SocketAddr::from_abstract_name(name).map_err(refused)?;
            let Ok(stream) = UnixStream::connect_addr(&address) else { return Ok(None) };
            stream.set_nonblocking(true).map_err(refused)?;
            Ok(Some(Stream::Unix(stream)))
        }
        Place::Tcp(address) => {
            let (hosts, port) = address.rsplit_once(':').unwrap_or((address, "0"));
            let (mut resolved, mut failed) = (Vec::new(), None);
            for host in hosts.split(',') {
                match format!("{host}:{port}").to_socket_addrs() {
                    Ok(addresses) => resolved.extend(addresses),
                    Err(e) => failed = failed.or(Some(e)),
                }
            }
            if let (true, Some(e)) = (resolved.is_empty(), failed) {
                return Err(refused(e));
            }
            for address in resolved {
                if let Ok(stream) = TcpStream::connect_timeout(&address, Duration::from_secs(1)) {
                    stream.set_nonblocking(true).map_err(refused)?;
                    stream.set_nodelay(true).map_err(refused)?;
                    return Ok(Some(Stream::Tcp(stream)));
                }
            }
            Ok(None)
        }
    }
}
