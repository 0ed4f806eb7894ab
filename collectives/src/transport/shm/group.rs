//! The ranks of one group as one of them sees them: its own control block and those of its peers.

use super::bell::Fences;
use super::layout::{self, Block, Layout};
use super::segments::Segments;
use crate::buffer::Memory;
use crate::error::{Error, Result};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// One group of this process.
pub(super) struct Group {
    pub segments: Arc<Segments>,
    /// Index on the host of each member.
    pub members: Vec<usize>,
    /// This process among the members.
    pub me: usize,
    pub layout: Layout,
    /// The own control block.
    pub own: Block,
    fences: Fences,
    /// Control blocks by member; those of a subgroup appear once their owners have created them.
    blocks: Vec<Option<Block>>,
    /// Key and offset of a subgroup's own block.
    subgroup: Option<(u64, usize)>,
    /// What members may still read when this process has left it.
    behind: Vec<Memory>,
}

impl Group {
    /// All ranks of the host.
    pub fn world(segments: Arc<Segments>) -> Self {
        segments.arrive();
        let me = segments.me;
        let blocks = (0..segments.size()).map(|i| Some(segments.world_block(i))).collect();
        let (own, layout, fences) = (segments.world_block(me), segments.world_layout(), segments.fences);
        Group {
            members: (0..segments.size()).collect(),
            me,
            layout,
            own,
            fences,
            blocks,
            subgroup: None,
            behind: Vec::new(),
            segments,
        }
    }

    /// Some members of this group, in their new order, this process as number `me`.
    pub fn subgroup(&self, members: &[usize], me: usize, context: u64) -> Result<Group> {
        let members: Vec<usize> = members.iter().map(|&m| self.members[m]).collect();
        let layout = Layout::new(members.len());
        let key = key_of(context, &members);
        let (own, offset) = self.segments.enter(key, layout)?;
        self.segments.arrive();
        let mut blocks = vec![None; members.len()];
        blocks[me] = Some(own);
        let (segments, fences) = (self.segments.clone(), self.fences);
        let (subgroup, behind) = (Some((key, offset)), Vec::new());
        Ok(Group { segments, members, me, layout, own, fences, blocks, subgroup, behind })
    }

    /// Takes what members may still read, until all have left a subgroup; the world's is the process's.
    pub fn leave_behind(&mut self, memory: Memory) -> Option<Memory> {
        if self.subgroup.is_none() {
            return Some(memory);
        }
        self.behind.push(memory);
        None
    }

    pub fn size(&self) -> usize {
        self.members.len()
    }

    /// How sleepers and wakers of this host see each other.
    #[inline(always)]
    pub fn fences(&self) -> Fences {
        self.fences
    }

    /// World rank of a member.
    pub fn rank_of(&self, member: usize) -> usize {
        self.segments.ranks[self.members[member]]
    }

    /// The control block of `member`, once it is there.
    #[inline(always)]
    pub fn block(&mut self, member: usize) -> Option<Block> {
        match self.blocks[member] {
            Some(block) => Some(block),
            None => self.find(member),
        }
    }

    /// Whether `member` has left this group in good order.
    pub fn left(&mut self, member: usize) -> bool {
        self.block(member).is_some_and(|block| block.left(member).load(Ordering::Acquire) != 0)
    }

    /// The control blocks that there are, the own one among them. Whoever has none yet has not looked at anything either.
    #[inline(always)]
    pub fn present(&mut self) -> impl Iterator<Item = Block> {
        (0..self.size()).filter_map(|member| self.block(member))
    }

    #[cold]
    fn find(&mut self, member: usize) -> Option<Block> {
        let (key, _) = self.subgroup?;
        self.blocks[member] = self.segments.find(self.members[member], key, self.layout);
        self.blocks[member]
    }

    /// The address here of a range in a member's segment, if it is inside.
    #[inline(always)]
    pub fn address(&self, member: usize, offset: u64, bytes: usize) -> Option<*const u8> {
        let map = self.segments.map(self.members[member]);
        let offset = usize::try_from(offset).ok()?;
        let inside =
            offset >= layout::HEADER && offset.checked_add(bytes).is_some_and(|end| end <= map.bytes());
        inside.then(|| map.at(offset, bytes).as_ptr().cast_const())
    }

    /// A peer's control words that make no sense: its memory was overwritten, or it runs another build.
    #[cold]
    pub fn corrupt(&self, member: usize, what: String) -> Error {
        Error::Library {
            library: "shm".into(),
            call: "progress",
            rank: self.segments.rank(),
            text: format!("rank {} shows {what}; its shared memory is damaged", self.rank_of(member)),
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        match self.subgroup {
            // Nobody is told that this rank left in good order, and what it has shown stays.
            _ if std::thread::panicking() => self.segments.give_up(self.segments.rank(), "panicked"),
            Some((key, offset)) => {
                let behind = std::mem::take(&mut self.behind);
                self.segments.leave((key, offset), self.layout, std::mem::take(&mut self.members), behind);
            }
            None => self.own.left(self.me).store(1, Ordering::Release),
        }
        self.segments.depart();
    }
}

/// What names a subgroup in the registries; never 0, which marks a free entry.
fn key_of(context: u64, members: &[usize]) -> u64 {
    let mix = |h: u64, v: u64| (h ^ v).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    members.iter().fold(mix(0x243f_6a88_85a3_08d3, context), |h, &m| mix(h, m as u64)).max(1)
}
