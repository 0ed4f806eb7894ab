//! Where we differ from UCX's own defaults, unless the user has set a variable.

use std::ffi::CStr;

/// What to set, as [`ucp_config_modify`](ucx_sys::Ucp::ucp_config_modify) takes it, on a processor whose kernel copies
/// [fast](crate::simd::copies_fast) or not. `variable` looks up the environment.
pub(super) fn ours(
    version: (u32, u32),
    fast: bool,
    variable: impl Fn(&str) -> Option<String>,
) -> impl Iterator<Item = (&'static CStr, &'static CStr)> {
    // Later versions move messages over TCP in another way, and know these options by other names.
    let tcp = version < (1, 17) && tcp_is_opened(variable("UCX_TLS"), variable("UCX_NET_DEVICES"));
    // UCX refuses TCP where the longest that is sent is longer than the longest that is received.
    let segments =
        tcp && ["UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE"].iter().all(|name| variable(name).is_none());
    let fetches = fast && cma_is_opened(variable("UCX_TLS"));
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
        // Where the loss of a peer is to be reported, UCX moves large messages over TCP as a row of short ones, each a
        // system call at both ends. Longer ones than 8K and 64K make that faster than what it does without reports; a
        // power of two fits with its header.
        (segments, "UCX_TCP_TX_SEG_SIZE", c"TX_SEG_SIZE", c"136K"),
        (segments, "UCX_TCP_RX_SEG_SIZE", c"RX_SEG_SIZE", c"264K"),
        // The kernel lets a connection have megabytes under way. On the loopback device they go through two processors,
        // overtake each other, and are taken for lost. With this a stream of 64 KiB takes 11 us each in every run instead
        // of 11 to 31, exchanges of 16 MiB three quarters of the time; of 1 MiB, 1.03 to 1.08 times. 192K and more help less.
        (loopback, "UCX_TCP_SNDBUF", c"SNDBUF", c"128K"),
    ]
    .into_iter()
    .filter(move |(wanted, name, ..)| *wanted && variable(name).is_none())
    .map(|(_, _, name, value)| (name, value))
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

    #[test]
    fn tcp_has_other_defaults_where_it_is_opened() {
        let counted = |version, fast, set: &[(&str, &str)]| {
            let set: Vec<(String, String)> =
                set.iter().map(|(n, v)| (n.to_string(), v.to_string())).collect();
            ours(version, fast, move |name| set.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone()))
                .count()
        };
        let count = |version, set: &[(&str, &str)]| counted(version, false, set);
        let tls = |list: &str| count((1, 13), &[("UCX_TLS", list)]);
        for (list, settings) in [
            ("tcp,self", 4),
            ("all", 4),
            ("^ib", 4),
            ("\\tcp", 4),
            ("posix,cma", 2),
            ("^tcp", 2),
            ("rc,self,sm", 2),
        ] {
            assert_eq!(tls(list), settings, "{list}");
        }
        assert_eq!(count((1, 13), &[]), 4);
        assert_eq!(count((1, 13), &[("UCX_NET_DEVICES", "eth0")]), 4);
        assert_eq!(count((1, 13), &[("UCX_NET_DEVICES", "mlx5_0:1")]), 2);
        assert_eq!(count((1, 13), &[("UCX_NET_DEVICES", "lo")]), 5);
        assert_eq!(count((1, 13), &[("UCX_NET_DEVICES", "lo"), ("UCX_TLS", "posix")]), 2);
        assert_eq!(count((1, 18), &[]), 2);
        for (list, more) in
            [("posix,cma", 1), ("self,shm", 1), ("all", 1), ("^cma", 0), ("tcp", 0), ("posix", 0)]
        {
            let set = [("UCX_TLS", list)];
            assert_eq!(counted((1, 13), true, &set), counted((1, 13), false, &set) + more, "{list}");
        }
        let set = [("UCX_TLS", "posix,cma"), ("UCX_RNDV_SEND_NBR_THRESH", "256K")];
        assert_eq!(counted((1, 13), true, &set), 2, "the user's");
        // One of both alone could make them unfit for each other.
        assert_eq!(count((1, 16), &[("UCX_TCP_RX_SEG_SIZE", "64K"), ("UCX_KEEPALIVE_INTERVAL", "20s")]), 1);
        assert_eq!(count((1, 16), &[("UCX_TCP_TX_SEG_SIZE", "64K"), ("UCX_NET_DEVICES", "lo")]), 3);
    }
}
