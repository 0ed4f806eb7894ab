//! Where we differ from UCX's own defaults, unless the user has set a variable.

use std::ffi::CStr;

/// By these users say how long an element is of the queue that each rank has in shared memory, and what we say.
const ELEMENTS: [&str; 4] = [
    "UCX_POSIX_FIFO_ELEM_SIZE",
    "UCX_SYSV_FIFO_ELEM_SIZE",
    "UCX_XPMEM_FIFO_ELEM_SIZE",
    "UCX_MM_FIFO_ELEM_SIZE",
];
const ELEMENT: &CStr = c"640";
/// By these users say how long the pieces are in which UCX sends over TCP, and what it receives them into; and what we say.
const SEGMENTS: [&str; 2] = ["UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE"];
const SENT: &CStr = c"136K";
const RECEIVED: &CStr = c"264K";

/// What to set, as [`ucp_config_modify`](ucx_sys::Ucp::ucp_config_modify) takes it, on a processor whose kernel copies
/// [fast](crate::simd::copies_fast) or not. `variable` looks up the environment.
pub(super) fn ours(
    version: (u32, u32),
    fast: bool,
    variable: impl Fn(&str) -> Option<String>,
) -> impl Iterator<Item = (&'static CStr, &'static CStr)> {
    let tcp = tcp_is_ours(version, &variable);
    // UCX refuses TCP where the longest that is sent is longer than the longest that is received.
    let segments = tcp && SEGMENTS.iter().all(|name| variable(name).is_none());
    let fetches = fast && cma_is_opened(variable("UCX_TLS"));
    let elements =
        memory_is_opened(variable("UCX_TLS")) && ELEMENTS.iter().all(|name| variable(name).is_none());
    let loopback = tcp && variable("UCX_NET_DEVICES").is_some_and(|devices| devices.trim() == "lo");
    [
        // A dead remote peer must be noticed within seconds, not UCX's 20.
        (true, "UCX_KEEPALIVE_INTERVAL", c"KEEPALIVE_INTERVAL", c"1s"),
        // And so must any of a thousand, of which UCX would look at 128 a second.
        (true, "UCX_KEEPALIVE_NUM_EPS", c"KEEPALIVE_NUM_EPS", c"inf"),
        // From here on receivers fetch what ranks of their host send: so all_to_all of 256 KiB between two ranks, messages of
        // half of it, takes 9.1 us instead of 19.2 over posix and cma, and Open MPI 9.1 and 8.5 beside it (Emerald Rapids; the
        // benches' results of 2026-11-26). Where the processor has no fast instruction for it, fetching was the slower; see
        // `ANNOUNCED`.
        (fetches, "UCX_RNDV_SEND_NBR_THRESH", c"RNDV_SEND_NBR_THRESH", c"32K"),
        // What fits into an element of a queue is there as soon as the element is; longer messages are in a buffer beside it.
        // With this instead of 128 bytes all_gather of messages of 128 takes 0.33 us instead of 0.40, of 512 0.41 instead of 0.43
        // (Zen 4, by hand, in turn). Still longer ones would not fit into the first cache all at once, and take longer where a
        // root runs ahead.
        (elements, "UCX_MM_FIFO_ELEM_SIZE", c"MM_FIFO_ELEM_SIZE", ELEMENT),
        // Where the loss of a peer is to be reported, UCX moves large messages over TCP as a row of short ones, each a
        // system call at both ends. Longer ones than 8K and 64K make that faster than what it does without reports; a
        // power of two fits with its header.
        (segments, "UCX_TCP_TX_SEG_SIZE", c"TX_SEG_SIZE", SENT),
        (segments, "UCX_TCP_RX_SEG_SIZE", c"RX_SEG_SIZE", RECEIVED),
        // The kernel lets a connection have megabytes under way. On the loopback device they go through two processors,
        // overtake each other, and are taken for lost. With this a stream of 64 KiB takes 11 us each in every run instead
        // of 11 to 31, exchanges of 16 MiB three quarters of the time; of 1 MiB, 1.03 to 1.08 times. 192K and more help less.
        (loopback, "UCX_TCP_SNDBUF", c"SNDBUF", c"128K"),
    ]
    .into_iter()
    .filter(move |(wanted, name, ..)| *wanted && variable(name).is_none())
    .map(|(_, _, name, value)| (name, value))
}

/// How long elements are of the queues in shared memory to which this rank sends, in the user's words or ours; none where it
/// opens no shared memory. A sender goes by its own length, and UCX does not look whether the receiver has another.
pub(super) fn elements(variable: impl Fn(&str) -> Option<String>) -> Option<String> {
    let ours = || format!("UCX_MM_FIFO_ELEM_SIZE={}", ELEMENT.to_string_lossy());
    memory_is_opened(variable("UCX_TLS")).then(|| said(&ELEMENTS, &variable).unwrap_or_else(ours))
}

/// The same of the pieces in which this rank sends over TCP, and of what it receives them into; none where TCP is not opened.
pub(super) fn segments(version: (u32, u32), variable: impl Fn(&str) -> Option<String>) -> Option<String> {
    let ours = || match tcp_is_ours(version, &variable) {
        true => {
            let [sent, received] = [SENT, RECEIVED].map(CStr::to_string_lossy);
            format!("{}={sent} {}={received}", SEGMENTS[0], SEGMENTS[1])
        }
        false => "lengths of UCX's own".into(),
    };
    is_among(variable("UCX_TLS"), &["tcp"]).then(|| said(&SEGMENTS, &variable).unwrap_or_else(ours))
}

/// What the user has set of `names`, if anything.
fn said(names: &[&str], variable: impl Fn(&str) -> Option<String>) -> Option<String> {
    let set = names.iter().filter_map(|name| variable(name).map(|value| format!("{name}={value}")));
    Some(set.collect::<Vec<_>>().join(" ")).filter(|said| !said.is_empty())
}

/// Whether our defaults for TCP hold. Later versions move messages over TCP in another way, and know these options by other
/// names.
fn tcp_is_ours(version: (u32, u32), variable: impl Fn(&str) -> Option<String>) -> bool {
    version < (1, 17) && tcp_is_opened(variable("UCX_TLS"), variable("UCX_NET_DEVICES"))
}

/// Whether UCX opens TCP, so that it does not warn of options that nothing has taken. Where it might not, it should be
/// left alone.
fn tcp_is_opened(tls: Option<String>, devices: Option<String>) -> bool {
    let devices = devices.unwrap_or_else(|| "all".into());
    // Ports of InfiniBand devices are written with a colon; interfaces are not.
    is_among(tls, &["tcp"])
        && devices.split(',').any(|d| !d.contains(':'))
        && !devices.trim().starts_with('^')
}

/// Whether UCX can have the kernel copy from another process.
fn cma_is_opened(tls: Option<String>) -> bool {
    is_among(tls, &["cma", "sm", "shm"])
}

/// Whether UCX makes queues in shared memory, of whichever kind.
fn memory_is_opened(tls: Option<String>) -> bool {
    ["posix", "sysv", "xpmem"].iter().any(|kind| is_among(tls.clone(), &[kind, "mm", "sm", "shm"]))
}

/// Whether the transports of `UCX_TLS` are some that have one of these `names`.
fn is_among(tls: Option<String>, names: &[&str]) -> bool {
    let tls = tls.unwrap_or_else(|| "all".into());
    let named = |list: &str| list.split(',').any(|t| names.contains(&t.trim().trim_start_matches('\\')));
    match tls.trim().strip_prefix('^') {
        Some(left_out) => !named(left_out),
        None => named(&tls) || tls.split(',').any(|t| t.trim() == "all"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(set: &[(&str, &str)]) -> impl Fn(&str) -> Option<String> {
        |name| set.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string())
    }

    /// What is set where the environment has these variables.
    fn set(version: (u32, u32), fast: bool, variables: &[(&str, &str)]) -> Vec<String> {
        ours(version, fast, of(variables)).map(|(name, _)| name.to_str().unwrap().into()).collect()
    }

    const ALIVE: [&str; 2] = ["KEEPALIVE_INTERVAL", "KEEPALIVE_NUM_EPS"];
    const SEGMENTS: [&str; 2] = ["TX_SEG_SIZE", "RX_SEG_SIZE"];
    const QUEUES: [&str; 1] = ["MM_FIFO_ELEM_SIZE"];

    #[test]
    fn what_is_opened_has_other_defaults() {
        for (list, segments, queues) in [
            ("tcp,self", true, false),
            ("all", true, true),
            ("^ib", true, true),
            ("\\tcp", true, false),
            ("posix,cma", false, true),
            ("^tcp", false, true),
            ("^tcp,posix", false, true),
            ("^tcp,mm", false, false),
            ("^sm", true, false),
            ("tcp,cma", true, false),
            ("rc,self,sm", false, true),
        ] {
            let mut all = ALIVE.to_vec();
            all.extend(queues.then_some(QUEUES).into_iter().flatten());
            all.extend(segments.then_some(SEGMENTS).into_iter().flatten());
            assert_eq!(set((1, 13), false, &[("UCX_TLS", list)]), all, "{list}");
        }
        assert_eq!(set((1, 13), false, &[]), [&ALIVE[..], &QUEUES, &SEGMENTS].concat());
        assert_eq!(set((1, 18), false, &[]), [&ALIVE[..], &QUEUES].concat());
    }

    #[test]
    fn devices_decide_about_tcp() {
        let tcp = |more: &[(&str, &str)]| set((1, 13), false, &[&[("UCX_TLS", "tcp")], more].concat());
        assert_eq!(tcp(&[("UCX_NET_DEVICES", "eth0")]), [ALIVE, SEGMENTS].concat());
        assert_eq!(tcp(&[("UCX_NET_DEVICES", "mlx5_0:1")]), ALIVE);
        assert_eq!(tcp(&[("UCX_NET_DEVICES", "lo")]), [&ALIVE[..], &SEGMENTS, &["SNDBUF"]].concat());
        let posix = [("UCX_NET_DEVICES", "lo"), ("UCX_TLS", "posix")];
        assert_eq!(set((1, 13), false, &posix), [&ALIVE[..], &QUEUES].concat());
    }

    #[test]
    fn what_the_kernel_copies_fast_is_fetched_earlier() {
        for (list, fetched) in [
            ("posix,cma", true),
            ("self,shm", true),
            ("all", true),
            ("^cma", false),
            ("tcp", false),
            ("posix", false),
        ] {
            for fast in [true, false] {
                let all = set((1, 13), fast, &[("UCX_TLS", list)]);
                assert_eq!(all.contains(&"RNDV_SEND_NBR_THRESH".into()), fetched && fast, "{list}");
            }
        }
    }

    #[test]
    fn the_users_own_stay() {
        let own = [("UCX_TLS", "posix,cma"), ("UCX_RNDV_SEND_NBR_THRESH", "256K")];
        assert_eq!(set((1, 13), true, &own), [&ALIVE[..], &QUEUES].concat());
        for name in ELEMENTS {
            assert_eq!(set((1, 13), false, &[("UCX_TLS", "posix"), (name, "256")]), ALIVE, "{name}");
        }
        // One of both alone could make them unfit for each other.
        let own = [("UCX_TLS", "tcp"), ("UCX_TCP_RX_SEG_SIZE", "64K"), ("UCX_KEEPALIVE_INTERVAL", "20s")];
        assert_eq!(set((1, 16), false, &own), [ALIVE[1]]);
        let own = [("UCX_TLS", "tcp"), ("UCX_TCP_TX_SEG_SIZE", "64K"), ("UCX_NET_DEVICES", "lo")];
        assert_eq!(set((1, 16), false, &own), [&ALIVE[..], &["SNDBUF"]].concat());
    }

    #[test]
    fn by_which_segments_a_rank_sends_is_said() {
        let said = |version, set: &[(&str, &str)]| segments((1, version), of(set));
        let ours = said(16, &[]).unwrap();
        assert_eq!(ours, "UCX_TCP_TX_SEG_SIZE=136K UCX_TCP_RX_SEG_SIZE=264K");
        assert_eq!(said(16, &[("UCX_TLS", "posix,cma")]), None);
        assert_eq!(
            said(16, &[("UCX_TLS", "tcp"), ("UCX_TCP_RX_SEG_SIZE", "32K")]).unwrap(),
            "UCX_TCP_RX_SEG_SIZE=32K"
        );
        // TCP is opened there, too, and with other segments.
        for others in [said(17, &[]), said(16, &[("UCX_NET_DEVICES", "^docker0")])] {
            assert_eq!(others.unwrap(), "lengths of UCX's own");
        }
    }

    #[test]
    fn by_which_elements_a_rank_sends_is_said() {
        let said = |set: &[(&str, &str)]| elements(of(set));
        assert_eq!(said(&[]).as_deref(), Some("UCX_MM_FIFO_ELEM_SIZE=640"));
        assert_eq!(said(&[("UCX_TLS", "tcp"), ("UCX_MM_FIFO_ELEM_SIZE", "256")]), None);
        let own = [("UCX_SYSV_FIFO_ELEM_SIZE", "256"), ("UCX_POSIX_FIFO_ELEM_SIZE", "1k")];
        assert_eq!(said(&own).as_deref(), Some("UCX_POSIX_FIFO_ELEM_SIZE=1k UCX_SYSV_FIFO_ELEM_SIZE=256"));
    }
}
