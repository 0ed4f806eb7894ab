//! The processes of peers on this host, watched through their pidfds.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::OwnedFd;

/// How many are asked about at once: the list lives on the stack, so that waiting allocates nothing.
const AT_ONCE: usize = 64;

/// Watched processes, each with its caller's number for it.
#[derive(Default)]
pub(super) struct Processes {
    watched: Vec<(usize, OwnedFd)>,
}

impl Processes {
    /// Watches the process of `pidfd` too.
    pub(super) fn watch(&mut self, number: usize, pidfd: OwnedFd) {
        self.watched.push((number, pidfd));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.watched.is_empty()
    }

    /// Tells `found` the numbers of those that have ended, also where nobody has reaped them yet.
    pub(super) fn ended(&self, mut found: impl FnMut(usize)) {
        for group in self.watched.chunks(AT_ONCE) {
            let mut fds: [PollFd<'_>; AT_ONCE] =
                std::array::from_fn(|i| PollFd::new(&group[i.min(group.len() - 1)].1, PollFlags::IN));
            let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
            // What fails now is asked again at the next look.
            if !matches!(poll(&mut fds[..group.len()], Some(&at_once)), Ok(n) if n > 0) {
                continue;
            }
            let ready = group.iter().zip(&fds).filter(|(_, fd)| !fd.revents().is_empty());
            ready.for_each(|((number, _), _)| found(*number));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::{Pid, PidfdFlags, pidfd_open};
    use std::process::{Child, Command};

    #[test]
    fn the_ended_among_many_are_found() {
        let mut processes = Processes::default();
        let mut children: Vec<Child> = Vec::new();
        // More than are asked about at once; some wait for their input to end.
        for number in 0..AT_ONCE + 10 {
            let mut command = Command::new("cat");
            let child = command.stdin(std::process::Stdio::piped()).spawn().unwrap();
            let pid = Pid::from_raw(child.id() as i32).unwrap();
            processes.watch(number, pidfd_open(pid, PidfdFlags::empty()).unwrap());
            children.push(child);
        }
        let ends = [3, AT_ONCE - 1, AT_ONCE + 7];
        ends.iter().for_each(|&number| children[number].kill().unwrap());
        let mut found = Vec::new();
        while found.len() < ends.len() {
            found.clear();
            processes.ended(|number| found.push(number));
        }
        assert_eq!(found, ends);
        for mut child in children {
            drop(child.stdin.take());
            child.wait().unwrap();
        }
    }
}
