//! Whether all ranks were started with the same arguments, and who they are.

use crate::failure::{Failure, Result};
use collectives::{Communicator, ReduceOp};

/// What must be the same on every rank: flags with their meaning, in a fixed order.
pub type Signature = Vec<(&'static str, String)>;

/// Bytes of texts that go at once: what ranks of a host show each other without room that the engine would make and keep, which no
/// plan counts.
const AT_ONCE: usize = 512;

/// Every rank's text, in rank order.
///
/// # Errors
/// The transport's.
pub fn exchange(comm: &Communicator, text: &str) -> Result<Vec<String>> {
    let mut longest = [0u64];
    comm.all_reduce(&[text.len() as u64][..], &mut longest[..], ReduceOp::Max)?;
    // A length, the text, and zeros up to the longest.
    let width = longest[0] as usize + 8;
    let mut mine = vec![0u8; width];
    mine[..8].copy_from_slice(&(text.len() as u64).to_le_bytes());
    mine[8..8 + text.len()].copy_from_slice(text.as_bytes());
    let mut all = vec![0u8; width * comm.size()];
    let mut room = vec![0u8; AT_ONCE * comm.size()];
    for (start, mine) in (0..).step_by(AT_ONCE).zip(mine.chunks(AT_ONCE)) {
        let theirs = &mut room[..mine.len() * comm.size()];
        comm.all_gather(mine, &mut theirs[..])?;
        for (text, theirs) in all.chunks_exact_mut(width).zip(theirs.chunks_exact(mine.len())) {
            text[start..][..mine.len()].copy_from_slice(theirs);
        }
    }
    let decode = |part: &[u8]| {
        let (head, body) = part.split_at(8);
        let length = u64::from_le_bytes(head.try_into().unwrap_or_default()) as usize;
        String::from_utf8_lossy(&body[..length.min(body.len())]).into_owned()
    };
    Ok(all.chunks_exact(width).map(decode).collect())
}

/// Numbers that go at once, 2 KiB: the engine has room for such a message anyway. For a longer one it would make and keep some,
/// which no plan counts.
const PART: usize = 256;
/// Under this tag.
const TAG: u32 = 1;

/// Every rank's numbers, in rank order, on rank 0.
///
/// # Errors
/// The transport's.
pub fn gather(comm: &Communicator, mine: &[u64]) -> Result<Option<Vec<Vec<u64>>>> {
    let mut counts = vec![0u64; comm.size()];
    comm.all_gather(&[mine.len() as u64][..], &mut counts[..])?;
    if comm.rank() > 0 {
        mine.chunks(PART).try_for_each(|part| comm.send(part, 0, TAG))?;
        return Ok(None);
    }
    let theirs = |(rank, &count): (usize, &u64)| {
        let mut all = vec![0; count as usize];
        match rank {
            0 => all.copy_from_slice(mine),
            _ => all.chunks_mut(PART).try_for_each(|part| comm.recv(part, rank, TAG))?,
        }
        Ok(all)
    };
    counts.iter().enumerate().map(theirs).collect::<Result<_>>().map(Some)
}

/// Fails, on every rank alike, unless all ranks have the same signature.
///
/// # Errors
/// The first rank that differs from rank 0, in what, and both values.
pub fn check(comm: &Communicator, signature: &Signature) -> Result<()> {
    let text = text(signature);
    // A digest is enough in the usual case; the text is exchanged only when digests differ.
    let mut all = vec![0u64; comm.size()];
    comm.all_gather(&[collectives::digest(text.bytes())][..], &mut all[..])?;
    if all.iter().all(|&d| d == all[0]) {
        return Ok(());
    }
    let texts = exchange(comm, &text)?;
    let other = texts.iter().enumerate().find(|(_, t)| *t != &texts[0]);
    match other.and_then(|(rank, other)| difference(&texts[0], (rank, other))) {
        Some(sentence) => Err(Failure::Common(sentence)),
        None => Ok(()),
    }
}

/// The same of `rank` before there is a communicator, with what tells every rank's blob. Of thousands of ranks each hears a
/// digest of all the others' arguments, and only where those differ two of them in words.
///
/// # Errors
/// As [`check`], and those of `exchange`.
pub fn check_by(
    rank: usize,
    mut exchange: impl FnMut(&[u8]) -> collectives::Result<Vec<Vec<u8>>>,
    signature: &Signature,
) -> Result<()> {
    let text = text(signature);
    let digests = exchange(&collectives::digest(text.bytes()).to_le_bytes())?;
    let Some(other) = digests.iter().position(|digest| *digest != digests[0]) else { return Ok(()) };
    let words = if rank == 0 || rank == other { text.as_bytes() } else { &[] };
    let texts = exchange(words)?;
    let [zero, other_text] = [0, other].map(|rank| String::from_utf8_lossy(&texts[rank]));
    difference(&zero, (other, &other_text)).map_or(Ok(()), |sentence| Err(Failure::Common(sentence)))
}

fn text(signature: &Signature) -> String {
    let lines: Vec<String> = signature.iter().map(|(flag, value)| format!("{flag} {value}")).collect();
    lines.join("\n")
}

/// What of these texts differs first, that of rank 0 and that of another.
fn difference(zero: &str, (rank, other): (usize, &str)) -> Option<String> {
    let (first, other): (Vec<&str>, Vec<&str>) = (zero.lines().collect(), other.lines().collect());
    let at = (0..first.len().max(other.len())).find(|&i| first.get(i) != other.get(i))?;
    let show = |lines: &[&str]| lines.get(at).map_or("nothing".to_owned(), |l| format!("'{l}'"));
    Some(format!(
        "ranks were started with different arguments: rank {rank} with {}, rank 0 with {}; start all ranks alike",
        show(&other),
        show(&first)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use collectives::transport::threads;
    use collectives::{Options, bootstrap};

    fn on_ranks<R: Send>(n: usize, body: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
        Communicator::on_threads(n, Options::default(), body)
    }

    #[test]
    fn texts_of_different_lengths_reach_every_rank() {
        // Also those that go in several parts, of which the last is whole or not.
        for step in [5, 251, 252, 1000] {
            let text = |rank| "é".repeat(rank * step);
            for texts in on_ranks(3, |comm| exchange(&comm, &text(comm.rank())).unwrap()) {
                assert_eq!(texts, [0, 1, 2].map(text));
            }
        }
    }

    #[test]
    fn what_differs_is_named_before_there_is_a_communicator_too() {
        let signature = |rule: &str| vec![("--transport", "mpi".to_owned()), ("--tuning", rule.to_owned())];
        let on_ranks = |rules: [&'static str; 3]| -> Vec<Result<()>> {
            let one = |(mut member, rule): (threads::Threads, &'static str)| {
                std::thread::spawn(move || {
                    let timeout = std::time::Duration::from_secs(60);
                    let rank = collectives::transport::Transport::rank(&member);
                    let mut longest = 0;
                    let exchange = |blob: &[u8]| {
                        let all = bootstrap::exchange(&mut member, blob, timeout)?;
                        longest = longest.max(all.iter().map(Vec::len).sum::<usize>());
                        Ok(all)
                    };
                    let done = check_by(rank, exchange, &signature(rule));
                    // Ranks that agree say so in few bytes.
                    assert!(done.is_err() || longest == 3 * 8, "{longest} bytes");
                    done
                })
            };
            let all: Vec<_> = threads::group(3).into_iter().zip(rules).map(one).collect();
            all.into_iter().map(|thread| thread.join().unwrap()).collect()
        };
        assert!(on_ranks(["all_reduce 64 a b"; 3]).iter().all(Result::is_ok));
        for done in on_ranks(["all_reduce 64 a b", "all_reduce 64 a b", "all_reduce 4096 a b"]) {
            let text = done.unwrap_err().to_string();
            let words =
                "rank 2 with '--tuning all_reduce 4096 a b', rank 0 with '--tuning all_reduce 64 a b'";
            assert!(text.contains(words), "{text}");
        }
    }

    #[test]
    fn the_rank_and_flag_that_differ_are_named_on_every_rank() {
        let signature = |e: usize| vec![("-b", "1024".to_owned()), ("-e", e.to_string())];
        let all = on_ranks(3, |comm| check(&comm, &signature(4096 + 4096 * (comm.rank() / 2))));
        for done in all {
            let e = done.unwrap_err();
            assert!(e.code() == 2, "{e:?}");
            let text = e.to_string();
            assert!(text.contains("rank 2 with '-e 8192', rank 0 with '-e 4096'"), "{text}");
        }
        assert!(on_ranks(3, |comm| check(&comm, &signature(1))).iter().all(Result::is_ok));
        let longer = on_ranks(2, |comm| check(&comm, &signature(1)[comm.rank()..].to_vec()));
        assert!(
            longer[0].as_ref().unwrap_err().to_string().contains("rank 1 with '-e 1', rank 0 with '-b 1024'")
        );
    }
}
