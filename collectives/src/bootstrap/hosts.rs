//! Hosts: Slurm's compressed lists, addresses, and what tells one host from another.

use crate::digest::digest;
use crate::error::{Error, Result};
use std::net::Ipv6Addr;
use std::os::fd::BorrowedFd;
use std::path::Path;

/// Nobody lists more hosts than this; a range beyond it is a mistake, not a cluster.
const MOST_HOSTS: usize = 1 << 20;

/// Slurm's `node[01-03,7],login` as `node01 node02 node03 node7 login`.
pub(super) fn expand(variable: &str, list: &str) -> Result<Vec<String>> {
    let bad = |why: &str| Error::Launch(format!("{variable}={list}: {why}"));
    let mut hosts = Vec::new();
    for entry in split_outside_brackets(list).ok_or_else(|| bad("brackets do not match"))? {
        let mut names = vec![String::new()];
        let mut rest = entry;
        while let Some(open) = rest.find('[') {
            let close = rest.find(']').ok_or_else(|| bad("brackets do not match"))?;
            let parts = numbers(&rest[open + 1..close]).ok_or_else(|| bad("a range is not like 01-03,7"))?;
            if names.len().saturating_mul(parts.len()).saturating_add(hosts.len()) > MOST_HOSTS {
                return Err(bad("more than a million hosts"));
            }
            let prefix = &rest[..open];
            names = names.iter().flat_map(|n| parts.iter().map(move |p| format!("{n}{prefix}{p}"))).collect();
            rest = &rest[close + 1..];
        }
        hosts.extend(names.into_iter().map(|name| name + rest).filter(|name| !name.is_empty()));
    }
    if hosts.is_empty() {
        return Err(bad("no host in the list"));
    }
    Ok(hosts)
}

/// Splits at the commas that are not between brackets; None when brackets do not match.
fn split_outside_brackets(list: &str) -> Option<Vec<&str>> {
    let (mut parts, mut start, mut inside) = (Vec::new(), 0, false);
    for (at, c) in list.char_indices() {
        match c {
            '[' if inside => return None,
            '[' => inside = true,
            ']' if !inside => return None,
            ']' => inside = false,
            ',' if !inside => {
                parts.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&list[start..]);
    (!inside).then_some(parts)
}

/// `01-03,7` as `01 02 03 7`: leading zeros are kept as they are in the first number of a range.
fn numbers(text: &str) -> Option<Vec<String>> {
    let mut all = Vec::new();
    for part in text.split(',') {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        if from.is_empty() || !from.bytes().all(|b| b.is_ascii_digit()) {
            return None;
        }
        let (first, last): (usize, usize) = (from.parse().ok()?, to.parse().ok()?);
        if last < first || last - first >= MOST_HOSTS {
            return None;
        }
        all.extend((first..=last).map(|n| format!("{n:0width$}", width = from.len())));
    }
    Some(all)
}

/// Slurm's `2(x3),1` as `2 2 2 1`.
pub(super) fn tasks_per_node(variable: &str, text: &str) -> Result<Vec<usize>> {
    let parse = || {
        let mut all = Vec::new();
        for part in text.split(',') {
            let (count, times) = match part.split_once("(x") {
                Some((count, times)) => (count, times.strip_suffix(')')?.parse().ok()?),
                None => (part, 1usize),
            };
            if times > MOST_HOSTS {
                return None;
            }
            all.extend(std::iter::repeat_n(count.parse::<usize>().ok()?, times));
        }
        Some(all)
    };
    parse().ok_or_else(|| Error::Launch(format!("{variable}={text} is not a list like 2(x3),1")))
}

/// `host:port`, or an error that names the variable.
pub(super) fn checked_address(variable: &str, text: &str) -> Result<String> {
    // What follows its last colon may be a port or not.
    if text.parse::<Ipv6Addr>().is_ok() {
        let with_port = text.rsplit_once(':').filter(|(host, port)| {
            host.parse::<Ipv6Addr>().is_ok() && port.parse::<u16>().is_ok_and(|port| port > 0)
        });
        let meant = match with_port {
            Some((host, port)) => format!("[{host}]:{port} or [{text}]:4000"),
            None => format!("[{text}]:4000"),
        };
        return Err(Error::Launch(format!(
            "{variable}={text} is an address of IPv6, which takes brackets before its port, as in {meant}"
        )));
    }
    match text.rsplit_once(':').map(|(host, port)| (host, port.parse::<u16>())) {
        Some((host, Ok(port))) if !host.is_empty() && !host.contains(['/', ' ']) && port > 0 => {
            Ok(text.to_owned())
        }
        _ => Err(Error::Launch(format!(
            "{variable}={text} is not of the form host:port, with a port from 1 to 65535"
        ))),
    }
}

/// A port all ranks compute alike, so that jobs on one host rarely meet; below the ports that the kernel hands out
/// to clients by itself.
pub(super) fn port_of(job: &str) -> u16 {
    20000 + (digest(job.bytes()) % 12000) as u16
}

/// The addresses in Open MPI's `1234.0;tcp://10.0.0.1,192.168.0.1:4711;tcp6://…`, as `10.0.0.1,192.168.0.1`.
pub(super) fn of_uri(uri: &str) -> Option<String> {
    let (addresses, _port) = uri.split(';').find_map(|part| part.strip_prefix("tcp://"))?.rsplit_once(':')?;
    let fine = |a: &str| a.parse::<std::net::Ipv4Addr>().is_ok();
    (!addresses.is_empty() && addresses.split(',').all(fine)).then(|| addresses.to_owned())
}

/// What two processes have in common exactly when they share the boot of a kernel and one kind of its namespaces.
pub(crate) fn boot_and_space(kind: &str) -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok();
    let space =
        std::fs::read_link(format!("/proc/self/ns/{kind}")).ok().map(|path| path.display().to_string());
    // A kernel that does not know this kind has one for all.
    let space = space.or_else(|| Path::new("/proc/self/ns").is_dir().then(String::new));
    in_common(boot.as_deref(), space.as_deref(), &host_name())
}

/// Where a sandbox hides one of them, hosts are told apart by their `name`.
fn in_common(boot: Option<&str>, space: Option<&str>, name: &str) -> String {
    match (boot, space) {
        (Some(boot), Some(space)) => format!("{} {space}", boot.trim()),
        (boot, space) => format!("{} {} {name}", boot.unwrap_or_default().trim(), space.unwrap_or_default()),
    }
}

/// What two processes have in common exactly when they can meet at an abstract socket and share memory: the same
/// boot of the same kernel and the same network namespace.
pub(super) fn host_key() -> String {
    boot_and_space("net")
}

/// The host's name as users know it.
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// A variable that Hydra gives its ranks, and no other manager that speaks PMI: how many of them are on the host.
pub const OF_HYDRA: &str = "MPI_LOCALNRANKS";

/// The socket to the process manager that speaks PMI, as PMI_FD names it.
pub fn pmi_socket() -> Option<BorrowedFd<'static>> {
    connected(&std::env::var("PMI_FD").ok()?)
}

/// The descriptor with this number, if it is a connected socket: a number that was inherited without what it stood for may be
/// a file's by now, which is not to be written to.
pub(super) fn connected(number: &str) -> Option<BorrowedFd<'static>> {
    let number = number.parse().ok().filter(|&fd| fd > 2)?;
    // SAFETY: a manager's socket is open as long as this process, which never closes it; of what is none the kernel is asked
    // once, which leaves it as it is, and nobody gets it.
    let fd = unsafe { BorrowedFd::borrow_raw(number) };
    rustix::net::getpeername(fd).is_ok().then_some(fd)
}

/// The process id of Hydra's proxy on this host: the other end of the socket it left in PMI_FD, also when a shell
/// stands between it and this process. None where it cannot be seen from here.
pub(super) fn pmi_manager() -> Option<u32> {
    let peer = super::place::peer_of(pmi_socket()?).ok()?;
    u32::try_from(peer.pid).ok().filter(|&pid| pid > 0)
}

/// Asks the process manager that speaks PMI to end the job with this exit code, if there is one. Hydra waits for the
/// other ranks otherwise, whatever they do.
pub(super) fn pmi_abort(code: u8) {
    if let Some(fd) = pmi_socket() {
        // Where it cannot be asked nothing else is to be done.
        let _ = rustix::io::write(fd, format!("cmd=abort exitcode={code}\n").as_bytes());
    }
}

/// `rank 3`, `ranks 1, 2 and 5`, `ranks 1, 128-255 and 300`: of ranks in their order.
pub(super) fn list(ranks: &[usize]) -> String {
    let neighbours = ranks.chunk_by(|a, b| a + 1 == *b);
    let parts: Vec<String> = neighbours
        .flat_map(|run| match run {
            [first, _, .., last] => vec![format!("{first}-{last}")],
            few => few.iter().map(usize::to_string).collect(),
        })
        .collect();
    match (ranks, &parts[..]) {
        ([], _) => "none".into(),
        ([one], _) => format!("rank {one}"),
        (_, parts) => format!("ranks {}", prose(parts)),
    }
}

/// More hosts than this are not listed one by one.
const MOST_LISTED: usize = 8;

/// The names of hosts, each once, in the order in which they come first: `node1 and node2`, or some and how many more.
pub(super) fn places<'a>(homes: impl Iterator<Item = &'a str>) -> String {
    let (mut seen, mut names) = (std::collections::HashSet::new(), Vec::new());
    for home in homes.filter(|&home| seen.insert(home)) {
        if names.len() < MOST_LISTED {
            names.push(home.to_owned());
        }
    }
    if seen.len() > names.len() {
        names.push(format!("{} more", seen.len() - names.len()));
    }
    prose(&names)
}

/// `1, 2 and 5`.
fn prose(parts: &[String]) -> String {
    match parts {
        [] => String::new(),
        [one] => one.clone(),
        [first @ .., last] => format!("{} and {last}", first.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn hosts_that_hide_what_they_are_go_by_their_names() {
        let (boot, space) = (Some("b\n"), Some("net:[1]"));
        assert_eq!(in_common(boot, space, "one"), in_common(boot, space, "two"));
        assert_ne!(in_common(boot, space, "one"), in_common(boot, Some("net:[2]"), "one"));
        for (boot, space) in [(None, space), (boot, None), (None, None)] {
            assert_ne!(in_common(boot, space, "one"), in_common(boot, space, "two"));
            assert_eq!(in_common(boot, space, "one"), in_common(boot, space, "one"));
        }
    }

    #[test]
    fn slurm_lists_expand() {
        let e = |list| expand("SLURM_NODELIST", list).unwrap().join(" ");
        assert_eq!(e("node[01-03,7]"), "node01 node02 node03 node7");
        assert_eq!(e("a,b[2-3],c"), "a b2 b3 c");
        assert_eq!(e("r[1-2]n[08-10]x"), "r1n08x r1n09x r1n10x r2n08x r2n09x r2n10x");
        assert_eq!(e("n[098-101]"), "n098 n099 n100 n101");
        assert_eq!(e("login.example.org"), "login.example.org");
    }

    #[test]
    fn broken_lists_are_named() {
        for bad in
            ["n[1", "n1]", "n[3-1]", "n[a-b]", "n[]", "", ",", "n[[1]]", "n[1-99999999]", "n][", "n[-3]"]
        {
            let error = expand("SLURM_NODELIST", bad).unwrap_err().to_string();
            assert!(error.contains(&format!("SLURM_NODELIST={bad}")), "{error}");
        }
    }

    #[test]
    fn addresses_of_mpirun_are_found() {
        let of = |uri| of_uri(uri);
        assert_eq!(of("955.0;tcp://10.0.0.1,172.17.0.2:4711").as_deref(), Some("10.0.0.1,172.17.0.2"));
        assert_eq!(of("955.0;tcp6://[fe80::1]:1;tcp://10.0.0.1:2").as_deref(), Some("10.0.0.1"));
        for bad in
            ["", "955.0", "955.0;tcp://", "955.0;tcp://:1", "955.0;tcp://host:1", "955.0;tcp6://[::1]:1"]
        {
            assert_eq!(of(bad), None, "{bad}");
        }
    }

    #[test]
    fn tasks_expand() {
        assert_eq!(tasks_per_node("V", "2(x3),1").unwrap(), [2, 2, 2, 1]);
        assert_eq!(tasks_per_node("V", "4").unwrap(), [4]);
        for bad in ["", "x", "2(x", "2(x)", "2x3", "2(x99999999999)"] {
            assert!(tasks_per_node("V", bad).unwrap_err().to_string().contains("V="), "{bad}");
        }
    }

    #[test]
    fn addresses_are_checked() {
        assert_eq!(checked_address("V", "node1:4000").unwrap(), "node1:4000");
        assert_eq!(checked_address("V", "[::1]:4000").unwrap(), "[::1]:4000");
        assert_eq!(checked_address("V", "fd77::1:24061").unwrap(), "fd77::1:24061");
        for bad in ["node1", ":1", "n:0", "n:70000", "n:x", "http://n:80", "n :80"] {
            let text = checked_address("V", bad).unwrap_err().to_string();
            assert!(text.contains("not of the form host:port"), "{text}");
        }
        for (bad, meant) in [
            ("fd77::1", "[fd77::1]:4000"),
            ("::1", "[::1]:4000"),
            // It may have its port already.
            ("::1:2999", "[::1]:2999 or [::1:2999]:4000"),
            ("fd77::1:2406", "[fd77::1]:2406 or [fd77::1:2406]:4000"),
            ("fd77::1:0", "in [fd77::1:0]:4000"),
        ] {
            let text = checked_address("V", bad).unwrap_err().to_string();
            assert!(text.contains(&format!("V={bad} is an address of IPv6, which takes brackets")), "{text}");
            assert!(text.ends_with(meant), "{text}");
        }
    }

    #[test]
    fn only_a_connected_socket_is_a_process_manager() {
        let (socket, _manager) = std::os::unix::net::UnixStream::pair().unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        let found = |number: i32| connected(&number.to_string()).is_some();
        assert!(found(socket.as_raw_fd()) && !found(file.as_raw_fd()) && !found(i32::MAX) && !found(1));
        assert!(connected("").is_none());
    }

    #[test]
    fn ranks_read_as_prose() {
        assert_eq!(list(&[3]), "rank 3");
        assert_eq!(list(&[1, 2, 5]), "ranks 1, 2 and 5");
        assert_eq!(list(&[0, 1, 2]), "ranks 0-2");
        let many: Vec<usize> = [1].into_iter().chain(128..256).chain([300, 301]).collect();
        assert_eq!(list(&many), "ranks 1, 128-255, 300 and 301");
    }

    #[test]
    fn hosts_read_as_prose() {
        assert_eq!(places(["a", "a"].into_iter()), "a");
        assert_eq!(places(["b", "a", "b"].into_iter()), "b and a");
        let many: Vec<String> = (0..30).map(|i| format!("n{}", i / 2)).collect();
        let said = places(many.iter().map(String::as_str));
        assert_eq!(said, "n0, n1, n2, n3, n4, n5, n6, n7 and 7 more");
    }
}
