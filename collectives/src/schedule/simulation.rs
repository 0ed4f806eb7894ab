//! The schedules of all ranks carried out in one thread, on memory of symbols: for groups of more ranks than a test can
//! start.
//!
//! An element is a number that tells of which rank and place it is, and what two are joined to tells which two and, but for
//! integers, in which order. So a result has the right bits only if it is the canonical tree over all contributions.
//!
//! Peers are as unkind as a transport may be: a message goes only once its receive is posted, what it leaves has to stay until
//! it is waited for, and where it arrives is rubbish until then.

mod cases;

use super::{Operand, Peers, Remote, Schedule, Space, Span, Step};
use crate::digest::mix;
use crate::element::DType;
use crate::reduce::{Stage, accumulator};
use std::collections::{HashMap, HashSet};

/// How elements of one type are joined.
#[derive(Clone, Copy)]
struct Symbols {
    dtype: DType,
}

impl Symbols {
    /// The bits of `x` that an element of so many bytes holds.
    fn kept(x: u64, bytes: usize) -> u64 {
        if bytes == 8 { x } else { x & ((1 << (8 * bytes)) - 1) }
    }

    /// What `rank` gives at `index`.
    fn given(self, rank: usize, index: usize) -> u64 {
        Self::kept(mix((rank as u64) << 40 | index as u64 | 1 << 63), self.dtype.size())
    }

    fn wide(self) -> usize {
        accumulator(self.dtype).size()
    }

    /// The canonical tree over these, in an element of an accumulator.
    fn tree(self, values: &[u64]) -> u64 {
        let joined = match values {
            [one] => *one,
            _ => {
                let (low, high) = values.split_at(values.len().next_power_of_two() / 2);
                let (low, high) = (self.tree(low), self.tree(high));
                match self.dtype.is_integer() {
                    true => low.wrapping_add(high),
                    false => mix(low.wrapping_mul(3) ^ mix(high)),
                }
            }
        };
        Self::kept(joined, self.wide())
    }
}

/// What a rank lets others read in one round.
struct Shown {
    round: usize,
    span: Span,
    staged: bool,
    /// What was there then.
    bytes: Vec<u8>,
    /// Whether that is what others read, as of little, or the memory itself.
    copied: bool,
}

/// A message that is posted.
struct Posted {
    group: usize,
    /// From whom to whom, and which of theirs.
    key: (usize, usize, usize),
    span: Span,
    incoming: bool,
    /// Whether it brings the fingerprint of its sender.
    framed: bool,
}

/// A rank in the middle of its schedule.
struct Rank {
    schedule: Schedule,
    /// By [`Space`]; in place the first is unused.
    memory: [Vec<u8>; 3],
    at: usize,
    posted: Vec<Posted>,
    shown: Vec<Shown>,
    /// Which of what each rank shows is read from now on.
    seen: Vec<usize>,
    /// How many rounds it has finished.
    finished: usize,
    /// The most messages that were posted at once.
    most: usize,
}

impl Rank {
    fn place(&self, space: Space) -> usize {
        match space {
            Space::Send if !self.schedule.call.in_place => 0,
            Space::Send | Space::Recv => 1,
            Space::Scratch => 2,
        }
    }

    fn read(&self, span: Span) -> &[u8] {
        &self.memory[self.place(span.space)][span.offset..span.offset + span.bytes]
    }

    fn post(&mut self, posted: Posted) {
        self.posted.push(posted);
        self.most = self.most.max(self.posted.len());
    }

    fn write(&mut self, span: Span, bytes: &[u8]) {
        assert_eq!(span.bytes, bytes.len());
        let place = self.place(span.space);
        self.memory[place][span.offset..span.offset + span.bytes].copy_from_slice(bytes);
    }
}

/// All ranks in the middle of a call.
pub(super) struct Simulation {
    ranks: Vec<Rank>,
    symbols: Symbols,
    /// All messages that were sent.
    sent: HashMap<(usize, usize, usize), Vec<u8>>,
    /// All whose receives are or were posted.
    wanted: HashSet<(usize, usize, usize)>,
}

/// Element `i` of elements of so many bytes.
fn element(memory: &[u8], bytes: usize, i: usize) -> u64 {
    let mut word = [0; 8];
    word[..bytes].copy_from_slice(&memory[i * bytes..(i + 1) * bytes]);
    u64::from_le_bytes(word)
}

impl Simulation {
    /// Ranks with these schedules and buffers: what each passes in and gets back.
    fn new(schedules: Vec<Schedule>, buffers: Vec<[Vec<u8>; 2]>) -> Self {
        let (symbols, size) = (Symbols { dtype: schedules[0].call.dtype }, schedules.len());
        let rank = |(schedule, [send, recv]): (Schedule, [Vec<u8>; 2])| Rank {
            // What was there before is of another call.
            memory: [send, recv, (0..schedule.scratch).map(|i| mix(i as u64) as u8).collect()],
            schedule,
            at: 0,
            posted: Vec::new(),
            shown: Vec::new(),
            seen: vec![0; size],
            finished: 0,
            most: 0,
        };
        let ranks = schedules.into_iter().zip(buffers).map(rank).collect();
        Simulation { ranks, symbols, sent: HashMap::new(), wanted: HashSet::new() }
    }

    /// Carries all out, in turns in this order of ranks, each as far as it goes or step by step; the others if `held` is a
    /// rank that does not begin. How many steps were taken.
    fn run(&mut self, order: &[usize], stepwise: bool, held: Option<usize>) -> usize {
        let mut steps = 0;
        loop {
            let before = steps;
            for &rank in order.iter().filter(|&&rank| Some(rank) != held) {
                while self.ranks[rank].at < self.ranks[rank].schedule.steps.len() && self.step(rank) {
                    steps += 1;
                    if stepwise {
                        break;
                    }
                }
            }
            if steps == before {
                return steps;
            }
        }
    }

    fn is_done(&self, rank: usize) -> bool {
        let Rank { at, schedule, .. } = &self.ranks[rank];
        *at == schedule.steps.len()
    }

    /// Takes the next step of `rank`, unless that has to wait.
    fn step(&mut self, rank: usize) -> bool {
        let me = &mut self.ranks[rank];
        let step = me.schedule.steps[me.at];
        match step {
            Step::Frame { at, payload } => {
                let bits = me.schedule.fingerprint.bits().to_le_bytes();
                let frame = [&bits[..], me.read(payload)].concat();
                me.write(Span::scratch(at, frame.len()), &frame);
            }
            Step::Send { to, slot, group, span } => {
                let key = (rank, to, slot);
                let other = self.sent.insert(key, me.read(span).to_vec());
                assert_eq!(other, None, "two messages {key:?}");
                me.post(Posted { group, key, span, incoming: false, framed: false });
            }
            Step::Recv { from, slot, group, span } => {
                let key = (from, rank, slot);
                // It may come at any time from now on.
                me.write(span, &vec![0xa5; span.bytes]);
                assert!(self.wanted.insert(key), "two receives {key:?}");
                me.post(Posted { group, key, span, incoming: true, framed: step.fingerprint_at().is_some() });
            }
            Step::Wait { group } => {
                if !self.arrived(rank, group) {
                    return false;
                }
            }
            Step::Copy { from, to } => {
                let bytes = me.read(from).to_vec();
                me.write(to, &bytes);
            }
            Step::Reduce { first, inputs, out, count } => {
                let sizes = (self.symbols.dtype.size(), me.schedule.call.out_size());
                self.reduce(rank, (first, inputs), sizes, (out, count));
            }
            Step::Join { stage, first, inputs, out, count } => {
                let (size, wide) = (self.symbols.dtype.size(), self.symbols.wide());
                let sizes = match stage {
                    Stage::First => (size, wide),
                    Stage::Middle => (wide, wide),
                    Stage::Last => (wide, me.schedule.call.out_size()),
                };
                self.reduce(rank, (first, inputs), sizes, (out, count));
            }
            Step::Claim => {}
            Step::Publish { round, span, staged } => {
                let copied = !staged && span.bytes <= me.schedule.group.direct.unwrap_or(0);
                me.shown.push(Shown { round, span, staged, bytes: me.read(span).to_vec(), copied });
            }
            Step::Await { round, first, peers } => {
                // Who shows its memory itself shows all of it in the first round.
                let awaited = |&peer: &usize| first || self.seen(rank, peer).staged;
                let awaited: Vec<usize> = self.others(rank, peers).filter(awaited).collect();
                for peer in awaited {
                    let shown = self.ranks[peer].shown.iter().position(|shown| shown.round == round);
                    let Some(shown) = shown else { return false };
                    self.ranks[rank].seen[peer] = shown;
                }
            }
            Step::UnlessInPlace { peers, go } => {
                if self.others(rank, peers).any(|peer| self.seen(rank, peer).staged) {
                    self.ranks[rank].at = go;
                    return true;
                }
            }
            Step::Go { to } => {
                me.at = to;
                return true;
            }
            Step::Read { from, to } => {
                let bytes = self.remote(rank, from, to.bytes).to_vec();
                self.ranks[rank].write(to, &bytes);
            }
            Step::Finish { last, .. } => me.finished = last + 1,
            Step::Released { round, peers } => {
                if !self.others(rank, peers).all(|peer| self.ranks[peer].finished > round) {
                    return false;
                }
            }
        }
        self.ranks[rank].at += 1;
        true
    }

    fn others(&self, rank: usize, peers: Peers) -> impl Iterator<Item = usize> + use<> {
        let size = self.ranks.len();
        (0..size).filter(move |&peer| peer != rank && (peers == Peers::All || peers == Peers::One(peer)))
    }

    /// What `rank` reads of a peer.
    fn seen(&self, rank: usize, peer: usize) -> &Shown {
        &self.ranks[peer].shown[self.ranks[rank].seen[peer]]
    }

    /// Whether all messages of a group of `rank` have met their receives, which then are over.
    fn arrived(&mut self, rank: usize, group: usize) -> bool {
        let (sent, wanted) = (&self.sent, &self.wanted);
        let met = |posted: &Posted| sent.contains_key(&posted.key) && wanted.contains(&posted.key);
        let me = &mut self.ranks[rank];
        if !me.posted.iter().all(|posted| posted.group != group || met(posted)) {
            return false;
        }
        let over: Vec<Posted> = me.posted.extract_if(.., |posted| posted.group == group).collect();
        for Posted { key, span, incoming, framed, .. } in over {
            let bytes = &sent[&key];
            if !incoming {
                assert_eq!(me.read(span), bytes, "{key:?} was overwritten while it was sent");
                continue;
            }
            me.write(span, bytes);
            let bits = me.schedule.fingerprint.bits().to_le_bytes();
            assert!(!framed || bytes[..8] == bits, "{key:?} brings no fingerprint");
        }
        true
    }

    /// So many bytes of what a peer shows.
    fn remote(&self, rank: usize, remote: Remote, bytes: usize) -> &[u8] {
        let (peer, shown) = (remote.peer as usize, self.seen(rank, remote.peer as usize));
        let offset = if shown.staged { remote.staged } else { remote.in_place };
        let then = &shown.bytes[offset..offset + bytes];
        let now = self.ranks[peer].read(shown.span.slice(offset, bytes));
        assert!(shown.copied || then == now, "rank {peer} changed what rank {rank} reads");
        then
    }

    fn reduce(
        &mut self,
        rank: usize,
        (first, inputs): (usize, usize),
        (size, out_size): (usize, usize),
        (out, count): (Span, usize),
    ) {
        let me = &self.ranks[rank];
        let contribution = |operand: &Operand| match *operand {
            Operand::Own(space, offset) => me.read(Span { space, offset, bytes: count * size }),
            Operand::Peer(remote) => self.remote(rank, remote, count * size),
        };
        let operands = &me.schedule.operands[first..first + inputs];
        let given: Vec<&[u8]> = operands.iter().map(contribution).collect();
        let mut values = vec![0; inputs];
        let mut result = Vec::with_capacity(count * out_size);
        for i in 0..count {
            values.iter_mut().zip(&given).for_each(|(value, given)| *value = element(given, size, i));
            result.extend_from_slice(&self.symbols.tree(&values).to_le_bytes()[..out_size]);
        }
        self.ranks[rank].write(out, &result);
    }
}
