//! The segments of all ranks of a host, mapped here; what all groups and buffers of this process share.

use super::arena::{self, Arena};
use super::bell::Fences;
use super::layout::{self, Block, Layout};
use super::{budget, peers::Lives};
use crate::bootstrap::memfd::{self, SharedMap};
use crate::bootstrap::{Board, Options, Rendezvous};
use crate::buffer::{HUGE, Memory, Place};
use crate::error::{Error, Result};
use crate::locked;
use crate::transport::blame;
use rustix::mm::{Advice, madvise};
use rustix::process::{Resource, getrlimit};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// All addresses of a process are below this on the machines we run on; all segments together take half of it.
const ADDRESS_SPACE: u64 = 1 << 47;

/// Before the card of a rank that could make what it has to; another says why not.
const MADE: &str = "+";

/// One per process and job: the mapped segments, and who owns them. Indices are those of the host's ranks.
pub(super) struct Segments {
    /// This process's index.
    pub me: usize,
    /// World rank of each index.
    pub ranks: Vec<usize>,
    maps: Vec<SharedMap>,
    arena: Arena,
    world: Layout,
    /// Life signs of the other processes.
    pub lives: Lives,
    pub board: Option<Arc<Board>>,
    pub fences: Fences,
    /// Transports of this process over these segments; the last one to go departs.
    users: AtomicUsize,
    retired: Mutex<Vec<Retired>>,
}

/// The control block of a subgroup that this process has left and whose memory peers may still touch.
struct Retired {
    key: u64,
    offset: usize,
    layout: Layout,
    /// Indices of the members, in group order.
    members: Vec<usize>,
    /// Places in the group that have not been told yet, because their block was not there.
    untold: Vec<usize>,
    /// What members may read until they have left, too.
    behind: Vec<Memory>,
}

impl Segments {
    /// Creates this rank's segment and maps those of all ranks of the host. Where one of them cannot, none can.
    pub fn connect(rendezvous: &mut Rendezvous, options: &Options) -> Result<Arc<Self>> {
        let ranks = rendezvous.local_ranks();
        let rank = rendezvous.rank();
        let size = ranks.len();
        let me = ranks.iter().position(|&r| r == rank).expect("a rank is one of its host's");
        let world = Layout::new(size);
        let fixed = control_bytes(size);
        let (arena_bytes, limit) = arena_bytes(options, size, fixed);
        let bytes = fixed.next_multiple_of(HUGE) + arena_bytes;

        let (life, card) = Lives::of_this_process();
        let card = format!("{} {card}", u8::from(Fences::register()));
        let ((fd, own), cards) = together(rendezvous, &ranks, &card, create(rank, fixed, bytes))?;
        let all_fence = cards.iter().all(|card| card.first() == Some(&b'1'));
        // Without pidfds (Linux before 5.3) the segment goes twice, so that all send equally many.
        let second: &OwnedFd = life.as_ref().unwrap_or(&fd);
        let fds = rendezvous.exchange_fds(&[fd.as_fd(), second.as_fd()])?;

        let (mut maps, mut lives) = (Vec::with_capacity(size), Lives::default());
        let mut own = Some(own);
        let mapped = fds.into_iter().zip(cards).enumerate().try_for_each(|(index, (mut fds, card))| {
            let pidfd = fds.pop();
            let fd = fds.pop().ok_or_else(|| Error::Launch("a rank sent no segment".into()))?;
            let map = match own.take_if(|_| index == me) {
                Some(own) => own,
                None => SharedMap::new(fd.as_fd())?,
            };
            check_segment(&map, ranks[index], fixed)?;
            advise(&map, fixed, index == me);
            maps.push(map);
            if index != me {
                lives.add(index, card.get(2..).unwrap_or_default(), pidfd);
            }
            Ok(())
        });
        together(rendezvous, &ranks, "", mapped)?;
        Ok(Arc::new(Segments {
            me,
            ranks,
            arena: Arena::new(fixed, bytes, limit),
            maps,
            world,
            lives,
            board: rendezvous.board(),
            fences: if all_fence { Fences::Sleeper } else { Fences::Both },
            users: AtomicUsize::new(0),
            retired: Mutex::new(Vec::new()),
        }))
    }

    pub fn size(&self) -> usize {
        self.ranks.len()
    }

    /// World rank of this process.
    pub fn rank(&self) -> usize {
        self.ranks[self.me]
    }

    pub fn own(&self) -> &SharedMap {
        &self.maps[self.me]
    }

    pub fn map(&self, index: usize) -> &SharedMap {
        &self.maps[index]
    }

    /// The control block of the world group in the segment of `index`.
    pub fn world_block(&self, index: usize) -> Block {
        // SAFETY: reserved at the start of every segment; whoever holds the block holds these segments.
        unsafe { Block::new(self.maps[index].at(layout::HEADER, self.world.bytes()), self.world) }
    }

    pub fn world_layout(&self) -> Layout {
        self.world
    }

    /// The offset in the own segment of a range, if it is inside the part that `alloc` hands out.
    #[inline(always)]
    pub fn offset_of(&self, src: *const u8, bytes: usize) -> Option<usize> {
        let map = self.own();
        let offset = (src as usize).wrapping_sub(map.at(0, 0).as_ptr() as usize);
        (offset >= layout::HEADER && offset.checked_add(bytes).is_some_and(|end| end <= map.bytes()))
            .then_some(offset)
    }

    /// A buffer in the own segment.
    pub fn alloc(self: &Arc<Self>, bytes: usize) -> Result<Memory> {
        let taken = || self.arena.alloc(self.own(), bytes, self.rank());
        let offset = taken().or_else(|_| {
            // Groups that all have left hold theirs until somebody looks.
            self.reap(&mut self.lock_retired());
            taken()
        })?;
        let ptr = self.own().at(offset, bytes);
        let owner = Range { segments: self.clone(), offset, bytes };
        // SAFETY: a range of its own, zero, page-aligned, mapped for as long as the owner holds the segments.
        Ok(unsafe { Memory::from_raw(ptr, bytes, Place::Shared { offset }, Box::new(owner)) })
    }

    /// Creates the own control block of a subgroup and shows it to the other members.
    pub fn enter(&self, key: u64, layout: Layout) -> Result<(Block, usize)> {
        // Also that no other thread of this rank, which may form a group of its own, takes the same entry.
        let mut retired = self.lock_retired();
        self.reap(&mut retired);
        let (own, what) = (self.own(), format!("rank {}: forming a group over shared memory", self.rank()));
        if self.find(self.me, key, layout).is_some() {
            let problem = "one with this context and these members is still in use";
            return Err(Error::system(what, problem));
        }
        let offset = self.arena.alloc(own, layout.bytes(), self.rank())?;
        let Some(entry) = entries().find(|&e| own.u64(e).load(Ordering::Relaxed) == 0) else {
            self.arena.release(own, offset, layout.bytes());
            let most = layout::REGISTRY_ENTRIES;
            let problem =
                format!("it is in {most} already, or left them before others did, and that is the most");
            return Err(Error::system(what, problem));
        };
        own.u64(entry + 8).store(offset as u64, Ordering::Relaxed);
        own.u64(entry).store(key, Ordering::Release);
        // SAFETY: allocated and zero; released only after every member has left.
        Ok((unsafe { Block::new(own.at(offset, layout.bytes()), layout) }, offset))
    }

    /// The control block that `index` shows for a subgroup, once it does.
    pub fn find(&self, index: usize, key: u64, layout: Layout) -> Option<Block> {
        let map = &self.maps[index];
        let entry = entries().find(|&e| map.u64(e).load(Ordering::Acquire) == key)?;
        let offset = map.u64(entry + 8).load(Ordering::Relaxed) as usize;
        let inside = offset.checked_add(layout.bytes()).is_some_and(|end| end <= map.bytes());
        // SAFETY: inside the mapping and, by its owner's entry, a block of this layout that stays until all have left.
        (inside && offset.is_multiple_of(layout::LINE))
            .then(|| unsafe { Block::new(map.at(offset, layout.bytes()), layout) })
    }

    /// Leaves a subgroup. The own block, and what is left behind, is freed when all members have left too.
    pub fn leave(
        &self,
        (key, offset): (u64, usize),
        layout: Layout,
        members: Vec<usize>,
        behind: Vec<Memory>,
    ) {
        let untold = (0..members.len()).collect();
        let mut retired = self.lock_retired();
        retired.push(Retired { key, offset, layout, members, untold, behind });
        self.reap(&mut retired);
    }

    /// Tells those who could not be told before, and frees blocks that nobody will touch again.
    fn reap(&self, retired: &mut Vec<Retired>) {
        retired.retain_mut(|old| {
            let mine = old.members.iter().position(|&m| m == self.me).expect("a rank is in its groups");
            old.untold.retain(|&place| match self.find(old.members[place], old.key, old.layout) {
                Some(block) => {
                    block.left(mine).store(1, Ordering::Release);
                    false
                }
                None => true,
            });
            let own = self.own();
            // SAFETY: the block has not been released yet.
            let block = unsafe { Block::new(own.at(old.offset, old.layout.bytes()), old.layout) };
            let all_left = (0..old.members.len()).all(|m| block.left(m).load(Ordering::Acquire) != 0);
            let over = old.untold.is_empty() && all_left;
            if over {
                if let Some(entry) = entries().find(|&e| own.u64(e).load(Ordering::Relaxed) == old.key) {
                    own.u64(entry).store(0, Ordering::Release);
                }
                self.arena.release(own, old.offset, old.layout.bytes());
                old.behind.clear();
            }
            !over
        });
    }

    fn lock_retired(&self) -> std::sync::MutexGuard<'_, Vec<Retired>> {
        locked(&self.retired)
    }

    /// One more transport uses the segments.
    pub fn arrive(&self) {
        self.users.fetch_add(1, Ordering::Relaxed);
    }

    /// One less; the last tells the peers, unless it goes because of a panic.
    pub fn depart(&self) {
        if self.users.fetch_sub(1, Ordering::AcqRel) == 1 && !std::thread::panicking() {
            self.own().u32(layout::DEPARTED).store(1, Ordering::Release);
        }
    }

    /// Whether `index` left in good order.
    pub fn departed(&self, index: usize) -> bool {
        self.maps[index].u32(layout::DEPARTED).load(Ordering::Acquire) != 0
    }

    /// The index of a world rank, if it is of this host.
    pub fn index_of(&self, rank: usize) -> Option<usize> {
        self.ranks.iter().position(|&r| r == rank)
    }

    /// Where `index` says for whom it waits.
    pub fn waits(&self, index: usize) -> &AtomicU64 {
        self.maps[index].u64(layout::WAITS)
    }

    /// Shows the peers that this process gives up because of world rank `culprit`, and how that one failed.
    pub fn give_up(&self, culprit: usize, how: &str) {
        // The board first: a peer that sees the note may end, and be taken for the cause where there is none yet.
        if culprit == self.rank()
            && let Some(board) = &self.board
        {
            board.announce(culprit, how.strip_prefix("failed: ").unwrap_or(how));
        }
        self.own().note(layout::ABORT).write(culprit as u32, how);
    }

    /// Whether this process gives up, or is about to.
    fn gives_up(&self) -> bool {
        std::thread::panicking() || !self.own().note(layout::ABORT).is_blank()
    }

    /// Why `index` gave up, if it did.
    pub fn gave_up(&self, index: usize) -> Option<(usize, String)> {
        self.maps[index].note(layout::ABORT).read().map(|(culprit, how)| (culprit as usize, how))
    }
}

fn entries() -> impl Iterator<Item = usize> {
    (0..layout::REGISTRY_ENTRIES).map(|i| layout::REGISTRY + 16 * i)
}

/// A range of the own segment, given back when its buffer drops; but where this process gives up it stays as it is until
/// the last process has gone, because a peer that has not heard of that may still read what it was shown.
struct Range {
    segments: Arc<Segments>,
    offset: usize,
    bytes: usize,
}

impl Drop for Range {
    fn drop(&mut self) {
        if !self.segments.gives_up() {
            self.segments.arena.release(self.segments.own(), self.offset, self.bytes);
        }
    }
}

/// Bytes that each of `size` ranks of a host takes beside its buffers.
pub fn control_bytes(size: usize) -> usize {
    layout::HEADER + Layout::new(size).bytes()
}

/// Address space for one rank's buffers: what the machine has, unless told otherwise, and so little that all
/// segments fit into a process, also under `ulimit -v`, and each beside what is `fixed` into a file, also under
/// `ulimit -f`. Which of the two leaves less than is wanted, if one does.
fn arena_bytes(options: &Options, size: usize, fixed: usize) -> (usize, Option<&'static str>) {
    let limit = |of| getrlimit(of).current.unwrap_or(u64::MAX);
    let space = limit(Resource::As).min(ADDRESS_SPACE) / 2 / size as u64;
    let file = limit(Resource::Fsize).saturating_sub((fixed.next_multiple_of(HUGE) + HUGE) as u64);
    let wanted = options.segment_limit.map_or_else(budget::total, |l| l as u64);
    let by = match wanted.min(space).min(file) {
        least if least == wanted => None,
        least if least == file => Some("file sizes (ulimit -f)"),
        // What any process has.
        _ if limit(Resource::As) > ADDRESS_SPACE => None,
        _ => Some("address space (ulimit -v)"),
    };
    ((wanted.min(space).min(file) as usize).next_multiple_of(HUGE), by)
}

/// What this rank has made, and the card of every rank of the host, once all have made theirs. Who alone could not would
/// leave the others waiting for it.
fn together<T>(
    rendezvous: &mut Rendezvous,
    ranks: &[usize],
    card: &str,
    made: Result<T>,
) -> Result<(T, Vec<Vec<u8>>)> {
    let mine = match &made {
        Ok(_) => format!("{MADE}{card}"),
        Err(why) => blame::told(why),
    };
    let cards = rendezvous.exchange_local(mine.as_bytes());
    let (made, cards) = (made.map_err(|why| rendezvous.tell(why))?, cards?);
    let made_by = |(index, card): (usize, &Vec<u8>)| match card.strip_prefix(MADE.as_bytes()) {
        Some(card) => Ok(card.to_vec()),
        None => {
            let heard = blame::heard(rendezvous.rank(), ranks[index], &String::from_utf8_lossy(card));
            Err(rendezvous.tell(heard))
        }
    };
    let cards: Result<Vec<Vec<u8>>> = cards.iter().enumerate().map(made_by).collect();
    Ok((made, cards?))
}

/// The file of rank `rank`'s segment, and where it is mapped.
fn create(rank: usize, fixed: usize, bytes: usize) -> Result<(OwnedFd, SharedMap)> {
    let fd = memfd::create("caravan", bytes)?;
    let own = SharedMap::new(fd.as_fd())?.keeping(fd.try_clone().map_err(|e| Error::system("dup", e))?);
    arena::reserve(&own, 0, fixed).map_err(|why| {
        let fixed = budget::human(fixed as u64);
        Error::system(format!("reserving {fixed} of shared memory for the channels of rank {rank}"), why)
    })?;
    own.u64(8).store(u64::from(layout::VERSION), Ordering::Relaxed);
    own.u64(16).store(rank as u64, Ordering::Relaxed);
    own.u64(0).store(layout::MAGIC, Ordering::Release);
    Ok((fd, own))
}

fn check_segment(map: &SharedMap, rank: usize, fixed: usize) -> Result<()> {
    let bad = |what: String| {
        Err(Error::Launch(format!(
            "the shared segment of rank {rank} {what}; start all ranks from the same build"
        )))
    };
    if map.bytes() < fixed || map.u64(0).load(Ordering::Acquire) != layout::MAGIC {
        return bad("is not one of caravan's".into());
    }
    let version = map.u64(8).load(Ordering::Relaxed);
    if version != u64::from(layout::VERSION) {
        return bad(format!("has layout {version} instead of {}", layout::VERSION));
    }
    let owner = map.u64(16).load(Ordering::Relaxed);
    if owner != rank as u64 {
        return bad(format!("belongs to rank {owner}"));
    }
    Ok(())
}

/// Asks for huge pages where the system gives them on request, and keeps the peers' memory out of this process's
/// core dump: each rank's own holds it. Neither is needed for anything to work.
fn advise(map: &SharedMap, fixed: usize, own: bool) {
    let start = fixed.next_multiple_of(HUGE);
    let bytes = map.bytes().saturating_sub(start);
    let range = map.at(start, bytes).as_ptr().cast();
    // SAFETY: advice about a range inside the mapping; changes no byte.
    unsafe {
        let _ = madvise(range, bytes, Advice::LinuxHugepage);
        if !own {
            let _ = madvise(range, bytes, Advice::LinuxDontDump);
        }
    }
}
