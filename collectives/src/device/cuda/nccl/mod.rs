//! NCCL as a wire between GPUs: two communicators, so that sums and gathers do not wait for each other.

mod comm;
mod sharing;

pub use sharing::{share_gpu, share_gpu_on_one_host};

/// The variable of NCCL's that goes before what a communicator is told: unless it is 0, calls may wait for peers without an end.
pub const BLOCKING: &str = "NCCL_COMM_BLOCKING";

use super::gpu::Gpu;
use super::stream::Stream;
use crate::communicator::{Communicator, Lane, Message, Wire};
use crate::element::{DType, ReduceOp};
use crate::error::{Error, Result};
use crate::schedule::{Call, Kind};
use comm::{Comm, Context, End};
use cuda_sys::nccl::{self, Status, UniqueId};
use sharing::Card;
use std::ffi::{OsString, c_int};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The oldest version that keeps apart what a thread has begun on the two communicators of a split group: before, the second
/// takes the list of the first for its own, and reads what is no address.
const SPLITS: u32 = 22700;

/// How much longer than for peers the host waits until a call is in its stream, for which NCCL first connects the ranks: the
/// watch of the calls, which knows who has not come, is to speak first.
const AFTER_WATCH: Duration = Duration::from_secs(5);

/// This rank's end of NCCL's group.
pub struct Nccl {
    name: String,
    context: Context,
    /// The group over the host's transport.
    host: Communicator,
    /// In the group.
    rank: usize,
    lanes: [Comm; 2],
    /// How long peers may take.
    limit: Duration,
}

impl Nccl {
    /// Joins the ranks of `host`, each with its GPU, within `timeout`. All ranks call it together.
    ///
    /// # Errors
    /// No NCCL or one that is too old, or whose calls would wait ([`BLOCKING`]), other versions on other ranks, two ranks with one
    /// GPU that were not allowed to share it, a rank that does not come.
    pub fn connect(host: &Communicator, gpu: &Gpu, timeout: Duration) -> Result<Self> {
        waits(std::env::var_os(BLOCKING)).map_or(Ok(()), |why| Err(unavailable(why)))?;
        let library = nccl::Nccl::load().map_err(unavailable)?;
        let (rank, size) = (host.rank(), host.size());
        let context = Context { library: Arc::new(library), gpu: gpu.clone(), rank: host.job_rank(rank) };
        let card = Card::new(context.library.number(), gpu.uuid()?);
        let mut words = vec![0u64; size * sharing::WORDS];
        host.all_gather(&card.words()[..], &mut words[..])?;
        let cards: Vec<Card> = words.chunks(sharing::WORDS).map(Card::from_words).collect();
        sharing::check(&cards, |member| host.job_rank(member))?;
        gpu.enter()?;
        let lane = || -> Result<Comm> {
            let mut name = UniqueId { bytes: [0; 128] };
            if rank == 0 {
                // SAFETY: a valid place to write to.
                let status = unsafe { (context.library.unique_id)(&mut name) };
                context.started("ncclGetUniqueId", status)?;
            }
            host.broadcast(&mut name.bytes[..], 0)?;
            Comm::join(&context, name, rank, size, host, timeout)
        };
        let lanes = [lane()?, lane()?];
        Ok(Nccl::with(context, host, lanes))
    }

    fn with(context: Context, host: &Communicator, lanes: [Comm; 2]) -> Self {
        let name = format!("nccl {}", nccl::Nccl::numbers(context.library.number()));
        let limit = host.deadline();
        Nccl { name, context, host: host.clone(), rank: host.rank(), lanes, limit }
    }

    /// Gives one lane's stream what `work` calls, and returns when it is there. The host waits for peers only while NCCL
    /// connects to them, at the first calls of a kind.
    fn give(
        &self,
        lane: Lane,
        call: &'static str,
        work: impl FnOnce(&nccl::Nccl, nccl::Comm) -> Status,
    ) -> Result<()> {
        let comm = &self.lanes[lane as usize];
        comm.with(call, |handle| work(&self.context.library, handle))?;
        let limit = self.limit.saturating_add(AFTER_WATCH);
        comm.settled(call, &self.host, limit, "the call was not in its stream")
    }
}

/// What NCCL calls a type.
fn data_type(dtype: DType) -> c_int {
    match dtype {
        DType::F32 => nccl::TYPE_F32,
        DType::F64 => nccl::TYPE_F64,
        DType::F16 => nccl::TYPE_F16,
        DType::Bf16 => nccl::TYPE_BF16,
        DType::I32 => nccl::TYPE_I32,
        DType::I64 => nccl::TYPE_I64,
        DType::U32 => nccl::TYPE_U32,
        DType::U64 => nccl::TYPE_U64,
        DType::I8 => nccl::TYPE_I8,
        DType::U8 => nccl::TYPE_U8,
    }
}

/// What NCCL calls an operation.
fn operation(op: ReduceOp) -> c_int {
    match op {
        ReduceOp::Sum => nccl::SUM,
        ReduceOp::Average => nccl::AVERAGE,
        ReduceOp::Product => nccl::PRODUCT,
        ReduceOp::Min => nccl::MIN,
        ReduceOp::Max => nccl::MAX,
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        let until = Instant::now() + comm::GRACE;
        // One after the other, as every rank does: before 2.27 NCCL keeps what a thread has begun in one list, and would begin
        // the first lane's end again with the second's.
        let ended = self.lanes.iter().all(|lane| lane.finalize() && lane.finalized(until));
        comm::end(&self.lanes, if ended { End::Free } else { End::Abort });
    }
}

/// Whether NCCL of this version, which all ranks have, can split groups.
fn check_split(version: u32) -> Result<()> {
    if version >= SPLITS {
        return Ok(());
    }
    let [has, wants] = [version, SPLITS].map(nccl::Nccl::numbers);
    Err(unavailable(format!(
        "NCCL {has} crashes as a rank uses both communicators of a split group: take NCCL {wants} or newer"
    )))
}

/// Why NCCL is not used with this value of [`BLOCKING`], if it is not.
fn waits(value: Option<OsString>) -> Option<String> {
    let value = value.filter(|value| value != "0")?;
    let value = value.to_string_lossy();
    Some(format!(
        "{BLOCKING}={value} lets its calls wait for peers that may never come: unset it, or set it to 0"
    ))
}

fn unavailable(why: String) -> Error {
    Error::Unavailable { name: "nccl".into(), why }
}

// SAFETY: both communicators are of this rank in the group of `host`, and NCCL's work is the stream's.
unsafe impl Wire<Stream> for Nccl {
    fn name(&self) -> &str {
        &self.name
    }

    fn group(&self) -> (usize, usize) {
        (self.rank, self.host.size())
    }

    unsafe fn exchange(&self, lane: Lane, queue: &mut Stream, messages: &[Message]) -> Result<()> {
        let stream = queue.handle()?;
        self.give(lane, "ncclGroupEnd", |library, comm| {
            let fine = |status: Status| [nccl::SUCCESS, nccl::IN_PROGRESS].contains(&status);
            // SAFETY: a live communicator and stream; ranges by the caller. A group that was begun is ended.
            unsafe {
                let mut status = (library.group_start)();
                for m in messages {
                    if !fine(status) {
                        break;
                    }
                    let (bytes, peer) = (m.bytes, m.peer as c_int);
                    status = match m.outgoing {
                        true => (library.send)(m.at.cast(), bytes, nccl::TYPE_U8, peer, comm, stream),
                        false => (library.recv)(m.at.cast(), bytes, nccl::TYPE_U8, peer, comm, stream),
                    };
                }
                let ended = (library.group_end)();
                // What went wrong in the middle says more than that the group failed.
                if fine(status) { ended } else { status }
            }
        })
    }

    unsafe fn native(
        &self,
        lane: Lane,
        queue: &mut Stream,
        call: &Call,
        send: *const u8,
        recv: *mut u8,
    ) -> Result<()> {
        let (stream, dtype, op) = (queue.handle()?, data_type(call.dtype), operation(call.op));
        let Call { kind, count, root, in_place, .. } = *call;
        // In place, a rank's own shard is at its place in the whole.
        let own = self.rank * call.bytes();
        let (from, to) = match (kind, in_place) {
            (Kind::AllGather, true) => (recv.wrapping_add(own).cast_const(), recv),
            (Kind::ReduceScatter, true) => (send, recv.wrapping_add(own)),
            _ => (send, recv),
        };
        let (from, to, root) = (from.cast(), to.cast(), root as c_int);
        let name = match kind {
            Kind::AllGather => "ncclAllGather",
            Kind::Broadcast => "ncclBroadcast",
            Kind::ReduceScatter => "ncclReduceScatter",
            Kind::AllReduce => "ncclAllReduce",
            Kind::Reduce => "ncclReduce",
            kind => return Err(unavailable(format!("it has no {kind} of its own"))),
        };
        // SAFETY: a live communicator and stream, buffers by the caller.
        self.give(lane, name, |library, comm| unsafe {
            match kind {
                Kind::AllGather => (library.all_gather)(from, to, count, dtype, comm, stream),
                Kind::Broadcast => (library.broadcast)(from, to, count, dtype, root, comm, stream),
                Kind::ReduceScatter => (library.reduce_scatter)(from, to, count, dtype, op, comm, stream),
                Kind::AllReduce => (library.all_reduce)(from, to, count, dtype, op, comm, stream),
                _ => (library.reduce)(from, to, count, dtype, op, root, comm, stream),
            }
        })
    }

    fn check(&self) -> Result<()> {
        self.lanes.iter().try_for_each(|comm| comm.state("a call that is under way").map(drop))
    }

    fn abort(&self) {
        comm::end(&self.lanes, End::Abort);
    }

    fn split(&self, host: Option<&Communicator>, color: Option<u32>) -> Result<Option<Self>> {
        check_split(self.context.library.number())?;
        // NCCL's colors are fewer than ours.
        let mut colors = vec![0i64; self.host.size()];
        self.host.all_gather(&[color.map_or(-1, i64::from)][..], &mut colors[..])?;
        let mine = color.map(|color| {
            let first = colors.iter().position(|&c| c == i64::from(color));
            first.expect("this rank's own color is among them")
        });
        // The order of the host's group, which has seen the keys.
        let key = host.map_or(0, Communicator::rank);
        let split = |lane: Lane| self.lanes[lane as usize].split(mine, key, &self.host, self.limit);
        let lanes = [split(Lane::Gathers)?, split(Lane::Reductions)?];
        let ([Some(a), Some(b)], Some(host)) = (lanes, host) else { return Ok(None) };
        Ok(Some(Nccl::with(self.context.clone(), host, [a, b])))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_that_wait_for_peers_are_refused() {
        assert!([None, Some("0".into())].into_iter().all(|value| waits(value).is_none()));
        let why = waits(Some("1".into())).expect("a reason");
        assert!(why.starts_with("NCCL_COMM_BLOCKING=1 lets") && why.contains("unset it"), "{why}");
    }

    #[test]
    fn groups_are_split_where_nccl_survives_it() {
        assert!(check_split(22703).is_ok() && check_split(23004).is_ok());
        let refused = check_split(22602).unwrap_err().to_string();
        assert!(refused.contains("NCCL 2.26.2") && refused.contains("2.27.0 or newer"), "{refused}");
    }
}
