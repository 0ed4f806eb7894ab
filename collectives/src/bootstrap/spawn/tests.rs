use super::*;
use crate::bootstrap::alone::alone;
use rustix::process::{Resource, Rlimit, WaitId, WaitIdOptions, getrlimit, setrlimit, waitid};

#[test]
fn ranks_of_a_process_that_ignores_its_children_are_watched() {
    if !alone("bootstrap::spawn::tests::ranks_of_a_process_that_ignores_its_children_are_watched") {
        return;
    }
    // SAFETY: a disposition, which this process has for itself.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
    let (board, _) = Board::create(1).unwrap();
    let (signals, mut sh) = (Signals::catch().unwrap(), Command::new("sh"));
    let child = sh.args(["-c", "sleep 0.05; exit 7"]).spawn().unwrap();
    let family = Family { board, on_request: OnRequest::EndAtOnce, members: vec![Member::new(child)] };
    assert_eq!(family.watch(&signals).endings, [Ending::Exited(7)]);
    drop(signals);
    assert!(ignored(libc::SIGCHLD));
}

#[test]
fn ranks_are_watched_where_the_kernel_refuses_to() {
    if !alone("bootstrap::spawn::tests::ranks_are_watched_where_the_kernel_refuses_to") {
        return;
    }
    let (board, _) = Board::create(1).unwrap();
    let (signals, mut sleep) = (Signals::catch().unwrap(), Command::new("sleep"));
    let family = Family {
        board,
        on_request: OnRequest::EndAtOnce,
        members: vec![Member::new(sleep.arg("0.05").spawn().unwrap())],
    };
    // As many descriptors as are to be watched are then too many.
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(0), maximum }).unwrap();
    let report = family.watch(&signals);
    assert_eq!((report.endings, report.first_failure), (vec![Ending::Exited(0)], None));
}

#[test]
fn what_a_rank_said_before_it_had_to_be_killed_stays_the_reason() {
    let (board, _) = Board::create(2).unwrap();
    let mut sleep = Command::new("sleep");
    let members = [(); 2].map(|()| Member::new(sleep.arg("600").spawn().unwrap()));
    board.announce(1, "disk full");
    let family = Family { board, on_request: OnRequest::EndAtOnce, members: members.into() };
    let report = family.watch(&Signals::catch().unwrap());
    assert_eq!(report.first_failure, Some((1, "failed: disk full".to_owned())));
    assert_eq!((report.killed.as_slice(), report.left.as_slice()), (&[0, 1][..], &[][..]));
    let said = report.sentence().unwrap();
    assert_eq!(said, "rank 1 failed: disk full; ranks 0 and 1 did not end by themselves and were killed");
}

#[test]
fn who_notes_the_failure_of_another_is_not_taken_for_the_first() {
    let (board, _) = Board::create(3).unwrap();
    let members = ["exit 1", "kill -ABRT $$", "exit 3"].map(|line| {
        let child = Command::new("sh").args(["-c", line]).spawn().unwrap();
        // All have ended at the first look.
        let of = WaitId::Pid(pid(&child).unwrap());
        waitid(of, WaitIdOptions::EXITED | WaitIdOptions::NOWAIT).unwrap();
        Member::new(child)
    });
    board.note(0, "rank 2 left before it sent");
    board.note(1, "rank 2 left before it sent");
    let family = Family { board, on_request: OnRequest::EndAtOnce, members: members.into() };
    let report = family.watch(&Signals::catch().unwrap());
    assert_eq!(report.first_failure, Some((2, "exited with code 3".to_owned())));
    assert_eq!(report.endings, [Ending::Exited(1), Ending::Killed(6), Ending::Exited(3)]);
}

/// A process that does not end when it is killed: another traces it, and does not look.
fn traced(child: &Child) -> Option<Pid> {
    let of = child.id() as libc::pid_t;
    let mut pipe = [0; 2];
    // SAFETY: the new process makes only system calls, and ends when it is killed; the descriptors are its own or closed here.
    unsafe {
        assert_eq!(libc::pipe2(pipe.as_mut_ptr(), libc::O_CLOEXEC), 0);
        let tracer = libc::fork();
        if tracer == 0 {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            // It stops nobody.
            let refused = libc::ptrace(libc::PTRACE_SEIZE, of, 0usize, 0usize) != 0;
            libc::write(pipe[1], [u8::from(refused)].as_ptr().cast(), 1);
            loop {
                libc::pause();
            }
        }
        let mut refused = [1u8];
        libc::read(pipe[0], refused.as_mut_ptr().cast(), 1);
        for fd in pipe {
            libc::close(fd);
        }
        let tracer = Pid::from_raw(tracer).unwrap();
        if refused == [0] {
            return Some(tracer);
        }
        end(tracer);
        None
    }
}

fn end(child: Pid) {
    kill_process(child, Signal::KILL).unwrap();
    rustix::process::waitpid(Some(child), rustix::process::WaitOptions::empty()).unwrap();
}

#[test]
fn nobody_waits_for_ever_for_who_cannot_be_killed() {
    if !alone("bootstrap::spawn::tests::nobody_waits_for_ever_for_who_cannot_be_killed") {
        return;
    }
    let (board, _) = Board::create(2).unwrap();
    let mut sleep = Command::new("sleep");
    let members = [(); 2].map(|()| Member::new(sleep.arg("600").spawn().unwrap()));
    let Some(tracer) = traced(&members[1].child) else {
        members.iter().for_each(|member| member.signal(Signal::KILL));
        return harness::skip("who cannot be killed: no process may trace another here");
    };
    let mut family = Family { board, on_request: OnRequest::EndAtOnce, members: members.into() };
    let signals = Signals::catch().unwrap();
    assert_eq!(family.kill(Some(&signals), Duration::from_secs(3)), [1]);
    assert_eq!(family.members.iter().filter_map(|m| m.ending).collect::<Vec<_>>(), [Ending::Killed(9); 2]);
    assert!(family.reap(), "nobody waits again");
    family.members[1].ending = None;
    // What cannot be collected wakes at once, and is looked at again only after a while.
    let begun = Instant::now();
    assert_eq!(family.wait(Some(&signals), None), None);
    assert!(begun.elapsed() >= BLIND);
    // A signal meanwhile makes it shorter.
    // SAFETY: a plain call; this thread blocks the signal.
    unsafe { libc::raise(libc::SIGTERM) };
    assert_eq!(family.kill(Some(&signals), Duration::from_secs(3600)), [1]);
    let report = Report {
        endings: vec![Ending::Killed(9); 2],
        first_failure: Some((0, "failed: no space".into())),
        announced: None,
        interrupted: None,
        asked: None,
        killed: vec![0, 1],
        left: vec![1],
    };
    let sentence = report.sentence().unwrap();
    assert!(sentence.contains("no space; rank 1 was killed and has not ended"), "{sentence}");
    end(tracer);
    drop(family);
}
