//! Schedules as text.

use super::{Group, Operand, Peers, Schedule, Space, Span, Step};
use crate::reduce::Stage;
use std::fmt;

impl fmt::Display for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Space::Send => "send",
            Space::Recv => "recv",
            Space::Scratch => "scratch",
        })
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{}..{}]", self.space, self.offset, self.offset + self.bytes)
    }
}

impl fmt::Display for Peers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Peers::All => f.write_str("all peers"),
            Peers::One(peer) => write!(f, "rank {peer}"),
        }
    }
}

impl fmt::Display for Operand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Operand::Own(space, offset) => write!(f, "{space}[{offset}..]"),
            Operand::Peer(r) => write!(f, "rank{}[{}|{}..]", r.peer, r.in_place, r.staged),
        }
    }
}

impl fmt::Display for Schedule {
    /// One line per step; in `rank3[64|0..]` the first number is the offset in what rank 3 published in place,
    /// the second that in a staged round.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Group { rank, size, .. } = self.group;
        let (call, choice) = (self.call, self.choice);
        writeln!(f, "{call} on rank {rank} of {size}: {}, {}", choice.algorithm, choice.reason(call.kind))?;
        for (i, step) in self.steps.iter().enumerate() {
            write!(f, "{i:4}  ")?;
            match step {
                Step::Frame { at, payload } => writeln!(f, "frame {payload} at scratch[{at}..]")?,
                Step::Send { to, slot, group, span } => {
                    writeln!(f, "send {span} to rank {to}, slot {slot}, group {group}")?;
                }
                Step::Recv { from, slot, group, span } => {
                    let first = if step.fingerprint_at().is_some() { "its fingerprint in " } else { "" };
                    writeln!(f, "receive {first}{span} from rank {from}, slot {slot}, group {group}")?;
                }
                Step::Wait { group } => writeln!(f, "wait for group {group}")?,
                Step::Copy { from, to } => writeln!(f, "copy {from} to {to}")?,
                Step::Reduce { first, inputs, out, count } => {
                    write!(f, "reduce {count} of")?;
                    for operand in &self.operands[*first..first + inputs] {
                        write!(f, " {operand}")?;
                    }
                    writeln!(f, " into {out}")?;
                }
                Step::Join { stage, first, inputs, out, count } => {
                    let what = match stage {
                        Stage::First => "contributions to a partial result",
                        Stage::Middle => "partial results to one",
                        Stage::Last => "partial results to the result",
                    };
                    write!(f, "join {count} of")?;
                    for operand in &self.operands[*first..first + inputs] {
                        write!(f, " {operand}")?;
                    }
                    writeln!(f, ", {what}, into {out}")?;
                }
                Step::Claim => writeln!(f, "claim the scratch")?,
                Step::Publish { round, span, staged } => {
                    let how = if *staged { "staged" } else { "in place" };
                    writeln!(f, "publish {span} for round {round}, {how}")?;
                }
                Step::Await { round, peers, .. } => writeln!(f, "await round {round} of {peers}")?,
                Step::UnlessInPlace { peers, go } => writeln!(f, "unless {peers} in place, go to {go}")?,
                Step::Go { to } => writeln!(f, "go to {to}")?,
                Step::Read { from, to } => {
                    writeln!(f, "read {} into {to}", Operand::Peer(*from))?;
                }
                Step::Finish { first, last } => writeln!(f, "finish rounds {first}..={last}")?,
                Step::Released { round, peers } => writeln!(f, "wait until {peers} finished round {round}")?,
            }
        }
        Ok(())
    }
}
