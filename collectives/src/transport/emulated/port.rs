//! When messages leave and arrive: arithmetic on nanoseconds.

use super::link::Hop;

/// Times in which a port is busy that are remembered. Older ones are taken for free, which only a message that was
/// heard of long after its arrival could notice.
const MOST: usize = 256;

/// One rank's port to a network: until when it sends, and when it receives.
#[derive(Debug)]
pub(super) struct Port {
    out: u64,
    /// From and to, ascending, with gaps between them.
    into: Vec<(u64, u64)>,
}

impl Default for Port {
    fn default() -> Self {
        // One more until the oldest goes.
        Port { out: 0, into: Vec::with_capacity(MOST + 1) }
    }
}

impl Port {
    /// A message of `bytes` is posted at `now`: when its first byte leaves, and when it has left.
    pub fn depart(&mut self, hop: &Hop, now: u64, bytes: usize) -> (u64, u64) {
        let start = now.max(self.out);
        self.out = start.saturating_add(hop.port_time(bytes));
        (start, self.out)
    }

    /// When a message of `bytes` whose first byte left at `start` is there. It takes the port for the first stretch of
    /// time that is free from its arrival on and long enough, so that messages which do not contend take as long as
    /// each alone, in whichever order this rank hears of them.
    pub fn arrive(&mut self, hop: &Hop, start: u64, bytes: usize) -> u64 {
        let long = hop.port_time(bytes);
        let mut from = start.saturating_add(hop.flight_time());
        if long == 0 {
            return from;
        }
        let mut at = 0;
        while let Some(&(busy, free)) = self.into.get(at) {
            if from.saturating_add(long) <= busy {
                break;
            }
            from = from.max(free);
            at += 1;
        }
        let end = from.saturating_add(long);
        self.into.insert(at, (from, end));
        self.join(at);
        if at > 0 {
            self.join(at - 1);
        }
        if self.into.len() > MOST {
            self.into.remove(0);
        }
        end
    }

    /// Makes one of a stretch and the next if they touch.
    fn join(&mut self, at: usize) {
        if let (Some(&(from, end)), Some(&(next, to))) = (self.into.get(at), self.into.get(at + 1))
            && end == next
        {
            self.into[at] = (from, to);
            self.into.remove(at + 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn hop(latency: u64) -> Hop {
        // A byte per nanosecond.
        Hop { latency: Duration::from_nanos(latency), bandwidth: 1e9 }
    }

    #[test]
    fn one_message_takes_latency_and_length() {
        let (mut a, mut b) = (Port::default(), Port::default());
        let (start, left) = a.depart(&hop(40_000), 1000, 5000);
        assert_eq!((start, left), (1000, 6000));
        assert_eq!(b.arrive(&hop(40_000), start, 5000), 1000 + 40_000 + 5000);
    }

    #[test]
    fn messages_follow_one_another_through_a_port() {
        let h = hop(10_000);
        let (mut a, mut b, mut c) = (Port::default(), Port::default(), Port::default());
        // From a to b and c: the second leaves when the first has left.
        let (first, _) = a.depart(&h, 0, 1000);
        let (second, left) = a.depart(&h, 200, 1000);
        assert_eq!((first, second, left), (0, 1000, 2000));
        assert_eq!(b.arrive(&h, first, 1000), 11_000);
        assert_eq!(c.arrive(&h, second, 1000), 12_000);
        // From two ports to one at once: the second waits at the receiver.
        let mut f = Port::default();
        assert_eq!((f.arrive(&h, 0, 1000), f.arrive(&h, 0, 1000)), (11_000, 12_000));
        // A free port does not wait, and the two directions do not share it.
        assert_eq!(f.depart(&h, 500, 10), (500, 510));
    }

    #[test]
    fn who_is_heard_of_late_is_not_late_for_that() {
        let h = hop(0);
        let mut p = Port::default();
        assert_eq!(p.arrive(&h, 5000, 1000), 6000);
        // It came first, and the port was free then.
        assert_eq!(p.arrive(&h, 1000, 1000), 2000);
        // The stretch between them holds 3000 and no more.
        assert_eq!(p.arrive(&h, 1500, 3001), 9001);
        assert_eq!(p.arrive(&h, 1500, 3000), 5000);
        assert_eq!(p.into, [(1000, 9001)]);
        // Nothing takes no time, wherever it comes.
        assert_eq!(p.arrive(&h, 3000, 0), 3000);
    }

    #[test]
    fn a_port_carries_no_more_than_its_bandwidth_whatever_the_order() {
        let h = hop(100);
        let mut messages: Vec<(u64, usize)> =
            (0..200).map(|i| (i * 7919 % 5000, (i * 31 % 90) as usize)).collect();
        for turn in 0..5 {
            messages.rotate_left(turn * 37);
            let mut p = Port::default();
            let mut taken: Vec<(u64, u64)> = messages
                .iter()
                .map(|&(start, bytes)| (p.arrive(&h, start, bytes), bytes as u64, start))
                .inspect(|&(due, bytes, start)| assert!(due >= start + 100 + bytes))
                .map(|(due, bytes, _)| (due - bytes, due))
                .filter(|(from, to)| from < to)
                .collect();
            taken.sort_unstable();
            assert!(taken.windows(2).all(|w| w[0].1 <= w[1].0), "no two at once");
        }
    }
}
