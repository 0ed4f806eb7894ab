//! Runs that go through and are yet no success: the verdict is about what was measured, and no rank has failed.

use super::native::Native;
use super::plan::Plan;
use super::record::Run;
use super::table::significant;
use crate::failure::{Failure, Result};
use crate::plan::Ranks;
use crate::ranks;
use collectives::Communicator;
use collectives::bootstrap::Identity;

/// What makes a run no success, if something does.
pub type Verdict = Option<String>;

/// What makes a run of an operation no success.
pub fn of(plan: &Plan, run: &Run) -> Verdict {
    let (wrong, average) = (run.found.wrong, run.found.average_bus_bandwidth());
    if wrong > 0 {
        return Some(format!(
            "{wrong} elements of {} over {} were wrong, in {} of {} measurements",
            plan.operation.name(),
            run.transport,
            run.found.failures,
            run.found.halves
        ));
    }
    match plan.min_busbw {
        Some(least) if average < least => Some(format!(
            "the average bus bandwidth of {} is {} GB/s, below --min-busbw {least}",
            plan.operation.name(),
            significant(average)
        )),
        _ => None,
    }
}

/// What was found, if anything was, also where it could not be `written`.
///
/// # Errors
/// It could not: with what was found before.
pub fn ended(found: Verdict, written: Result<()>) -> Result<Verdict> {
    match (found, written) {
        (Some(found), Err(unwritten)) => Err(Failure::run(format!("{found}; {unwritten}"))),
        (found, written) => written.map(|()| found),
    }
}

/// Runs `body` as every rank, as [`ranks::launch_with_native`] does.
///
/// # Errors
/// The failure of the rank that failed first, else the verdict of the one that has it.
pub fn launch(
    ranks: &Ranks,
    identity: Option<&Identity>,
    body: &(dyn Fn(Communicator, Option<Native>) -> Result<Verdict> + Sync),
) -> Result<()> {
    ranks::launch_with_native(ranks, identity, vec![], &|comm, native| {
        body(comm, native)?.map_or(Ok(()), |text| Err(Failure::Verdict(text)))
    })
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::args::tests::bench;
    use crate::bench::args::Task;
    use crate::bench::calls::Party;
    use crate::bench::record::tests::{example, of_rows};
    use crate::bench::{footer, rank};
    use crate::plan::UNASKED;
    use collectives::Result;
    use collectives::transport::threads::{self, Threads};
    use collectives::transport::{Request, Tag, Transport};
    use std::sync::Mutex;
    use std::time::Duration;

    /// What ranks say of themselves and of their times is shorter.
    const LONG: usize = 8192;

    /// Carries the last byte of each long message wrongly.
    struct Spoiling {
        inner: Threads,
        sent: Vec<Vec<u8>>,
    }

    // SAFETY: as the transport inside keeps the contract; what is sent in place of a message stays as long as this.
    unsafe impl Transport for Spoiling {
        fn name(&self) -> &str {
            self.inner.name()
        }

        fn rank(&self) -> usize {
            self.inner.rank()
        }

        fn size(&self) -> usize {
            self.inner.size()
        }

        fn job_rank(&self, member: usize) -> usize {
            self.inner.job_rank(member)
        }

        unsafe fn send(&mut self, to: usize, tag: Tag, src: *const u8, bytes: usize) -> Result<Request> {
            let mut src = src;
            if bytes >= LONG {
                // SAFETY: the caller's promise.
                let mut copy = unsafe { std::slice::from_raw_parts(src, bytes) }.to_vec();
                copy[bytes - 1] ^= 0x40;
                src = copy.as_ptr();
                self.sent.push(copy);
            }
            // SAFETY: the caller's promise, and a copy stays as long as this.
            unsafe { self.inner.send(to, tag, src, bytes) }
        }

        unsafe fn recv(&mut self, from: usize, tag: Tag, dst: *mut u8, bytes: usize) -> Result<Request> {
            // SAFETY: the caller's promise.
            unsafe { self.inner.recv(from, tag, dst, bytes) }
        }

        fn test(&mut self, request: Request) -> Result<bool> {
            self.inner.test(request)
        }

        fn subgroup(
            &mut self,
            members: &[usize],
            context: u64,
            within: Duration,
        ) -> Result<Box<dyn Transport>> {
            self.inner.subgroup(members, context, within)
        }

        fn check(&mut self) -> Result<()> {
            self.inner.check()
        }

        fn abort(&mut self, why: &collectives::Error) {
            self.inner.abort(why);
        }
    }

    /// What `bench` says of a run in which long messages are carried wrongly.
    pub fn of_spoiled(
        ranks: &Ranks,
        body: &(dyn Fn(Communicator) -> crate::failure::Result<Verdict> + Sync),
    ) -> Failure {
        let members: Vec<_> =
            threads::group(ranks.world).into_iter().map(|member| Mutex::new(Some(member))).collect();
        let spoiled = |comm: Communicator, _| {
            let inner = members[comm.rank()].lock().unwrap().take().unwrap();
            body(Communicator::new(Box::new(Spoiling { inner, sent: Vec::new() }), ranks.options)?)
        };
        launch(ranks, None, &spoiled).expect_err("a verdict")
    }

    /// The same of an operation with these flags.
    fn of_flags(flags: &str) -> Failure {
        let args = bench(flags);
        let Task::Operation(operation, args) = args.command.task() else { panic!("no operation") };
        let plan = Plan::new(operation, args).unwrap();
        let ranks = Ranks::plan(&args.ranks, UNASKED, None).unwrap();
        of_spoiled(&ranks, &|comm| {
            rank(&plan, args, &Party { comm, native: None, device: None }, &|_| Ok(()))
        })
    }

    #[test]
    fn wrong_elements_are_found_written_and_end_in_exit_code_1() {
        let dir = tempfile::tempdir().unwrap();
        let json = dir.path().join("r.json");
        for operation in ["all_reduce", "all_gather", "broadcast", "all_to_all", "send_recv"] {
            let flags =
                format!("{operation} -b 64K -e 64K -n 2 -q --transport threads --json {}", json.display());
            let failure = of_flags(&flags);
            let text = failure.to_string();
            let words = [&format!(" elements of {operation} over threads were wrong"), "2 of 2 measurements"];
            assert!(failure.code() == 1 && words.iter().all(|word| text.contains(*word)), "{text}");
            let written: serde_json::Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
            assert_eq!(written["out_of_bounds"], serde_json::json!({"count": 2, "okay": "false"}));
        }
    }

    #[test]
    fn wrong_elements_are_told_also_where_no_file_can_be_written() {
        let dir = tempfile::tempdir().unwrap();
        let gone = dir.path().join("gone/r.json");
        let flags = format!("-b 64K -e 64K -n 2 -q --transport threads --json {}", gone.display());
        let words = [" elements of all_reduce over threads were wrong", "; --json: writing "];
        let told = of_flags(&format!("all_reduce {flags}")).to_string();
        assert!(words.iter().all(|word| told.contains(word)), "{told}");
    }

    #[test]
    fn a_footer_that_says_failed_and_a_verdict_go_together() {
        let args = bench("all_gather --min-busbw 1");
        let Task::Operation(operation, args) = args.command.task() else { panic!("no operation") };
        let plan = Plan::new(operation, args).unwrap();
        let right = example("shm", &[(1 << 20, 1e-6), (1 << 20, 1e-6)]);
        let mut rows = right.rows.clone();
        rows[1].out_of_place.half.wrong = Some(3);
        let wrong = of_rows("shm", rows);
        let slow = example("shm", &[(1024, 1.0)]);
        for (run, out_of_bounds, words) in [
            (right, "0 OK", None),
            (wrong, "1 FAILED", Some("3 elements of all_gather over shm were wrong, in 1 of 4")),
            (slow, "0 OK", Some("is 5.12e-07 GB/s, below --min-busbw 1")),
        ] {
            let (text, verdict) = (footer(&plan, &run), of(&plan, &run));
            assert!(text.contains(&format!("# Out of bounds values : {out_of_bounds}\n")), "{text}");
            assert_eq!(verdict.is_some(), text.contains("FAILED"), "{text}");
            assert_eq!(verdict.is_some(), words.is_some());
            assert!(words.is_none_or(|words| verdict.as_ref().unwrap().contains(words)), "{verdict:?}");
        }
    }
}
