//! Ports for tests that need to know one before anybody listens there.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};

/// A listener on this host at a port below those that the kernel gives to clients, which others would be given as soon as it is
/// free again: each time another one, and other ones than those of processes started about now.
pub fn listener() -> TcpListener {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let port = || 20_000 + (97 * std::process::id() + NEXT.fetch_add(1, Ordering::Relaxed)) % 12_000;
    let free = |_| TcpListener::bind(("127.0.0.1", port() as u16)).ok();
    (0..100).find_map(free).expect("one of a hundred ports is free")
}

/// Such a port, where nobody listens.
pub fn free_port() -> u16 {
    listener().local_addr().expect("an address").port()
}
