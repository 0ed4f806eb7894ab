//! The ring of records from one rank to another, apart from what the records mean.
//!
//! The sender writes records from its tail on, never beyond the receiver's head plus the ring's size, and then shows
//! the new tail with release; the receiver acquires the tail, reads, and releases its head. Records start at cache
//! lines and do not wrap: what is left at the end is skipped.

use super::bell;
use super::group::Group;
use super::layout::Block;
use crate::error::Result;
use crate::transport::Tag;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

/// Bytes at the start of a record: kind and number, tag, bytes, offset.
pub(super) const HEADER: usize = 32;

/// A message, with its bytes behind the header.
pub(super) const MESSAGE: u64 = 1;
/// A message that lies in the sender's segment.
pub(super) const RANGE: u64 = 2;
/// A message that will come in pieces.
pub(super) const STAGED: u64 = 3;
/// A piece of one.
pub(super) const PIECE: u64 = 4;
/// To the sender of a STAGED one: a receive is posted.
pub(super) const READY: u64 = 5;
/// To the sender of a RANGE: it was copied.
pub(super) const DONE: u64 = 6;
/// Nothing up to the end of the ring.
pub(super) const SKIP: u64 = 7;

/// What is written into a ring, without the bytes that may follow.
#[derive(Debug)]
pub(super) struct Record {
    pub kind: u64,
    /// Of a large message, counted by its sender for this receiver.
    pub number: u32,
    pub tag: Tag,
    pub bytes: usize,
    pub offset: u64,
}

impl Record {
    pub fn new(kind: u64, number: u32, bytes: usize) -> Self {
        Record { kind, number, tag: Tag(0), bytes, offset: 0 }
    }

    /// Bytes that follow the header.
    fn payload(&self) -> usize {
        if matches!(self.kind, MESSAGE | PIECE) { self.bytes } else { 0 }
    }

    /// Bytes that the record takes in the ring.
    fn length(&self) -> usize {
        self.payload().checked_add(HEADER + 63).map_or(usize::MAX, |l| l & !63)
    }

    fn words(&self) -> [u64; 4] {
        [self.kind | u64::from(self.number) << 32, self.tag.0, self.bytes as u64, self.offset]
    }

    fn from_words([first, tag, bytes, offset]: [u64; 4]) -> Self {
        let (kind, number) = (first & 0xffff_ffff, (first >> 32) as u32);
        Record { kind, number, tag: Tag(tag), bytes: bytes as usize, offset }
    }
}

/// The sender's end.
#[derive(Default)]
pub(super) struct Writer {
    tail: u64,
    shown: u64,
    /// The receiver's head when last looked at.
    head: u64,
}

impl Writer {
    /// Writes one record, with the bytes at `src` behind it if it carries any, without showing it yet; false when
    /// the ring is full.
    ///
    /// # Safety
    /// `record.bytes` are readable at `src` if the record carries them; they are at most a quarter of the ring less
    /// [`HEADER`].
    pub unsafe fn write(
        &mut self,
        group: &Group,
        to: usize,
        peer: Block,
        record: &Record,
        src: *const u8,
    ) -> bool {
        let ring = group.layout.ring_bytes() as u64;
        let payload = record.payload();
        let len = (HEADER + payload).next_multiple_of(64) as u64;
        debug_assert!(len <= ring / 4);
        let to_end = ring - self.tail % ring;
        let needed = if len <= to_end { len } else { to_end + len };
        if self.tail + needed - self.head > ring {
            self.head = peer.head(group.me).load(Ordering::Acquire);
            if self.tail + needed - self.head > ring {
                return false;
            }
        }
        let base = group.own.ring(to);
        if len > to_end {
            let skip = Record::new(SKIP, 0, to_end as usize);
            // SAFETY: the rest of the ring, at least one line, which the receiver has read.
            unsafe { base.add((self.tail % ring) as usize).cast().write(skip.words()) };
            self.tail += to_end;
        }
        // SAFETY: `len` bytes inside the ring that the receiver has read; the caller's source is readable.
        unsafe {
            let place = base.add((self.tail % ring) as usize);
            place.cast().write(record.words());
            if payload > 0 {
                place.add(HEADER).as_ptr().copy_from_nonoverlapping(src, payload);
            }
        }
        self.tail += len;
        true
    }

    /// Lets the receiver see what was written, and says whether that was anything.
    pub fn show(&mut self, group: &Group, to: usize, peer: Block) -> bool {
        if self.shown == self.tail {
            return false;
        }
        self.shown = self.tail;
        group.own.tail(to).store(self.tail, Ordering::Release);
        group.fences().changed();
        bell::ring(peer);
        true
    }
}

/// The receiver's end.
#[derive(Clone, Copy, Default)]
pub(super) struct Reader {
    head: u64,
}

impl Reader {
    /// How far the sender has shown.
    pub fn tail(group: &Group, peer: Block) -> u64 {
        peer.tail(group.me).load(Ordering::Acquire)
    }

    /// Bytes between two positions.
    pub fn since(self, start: Reader) -> u64 {
        self.head - start.head
    }

    /// The next record before `tail` and where its payload starts, checked to be inside the ring. It stays readable
    /// until [`done`](Self::done).
    pub fn next(
        &mut self,
        group: &Group,
        from: usize,
        peer: Block,
        tail: u64,
    ) -> Result<Option<(Record, *const u8)>> {
        let ring = group.layout.ring_bytes() as u64;
        loop {
            if self.head == tail {
                return Ok(None);
            }
            let (at, to_end) = ((self.head % ring) as usize, (ring - self.head % ring) as usize);
            // SAFETY: inside the ring, aligned to a line; written before the tail that was acquired, and kept until
            // the head passes.
            let (record, data) = unsafe {
                let place: NonNull<u8> = peer.ring(group.me).add(at);
                (Record::from_words(place.cast().read()), place.add(HEADER).as_ptr().cast_const())
            };
            match record.kind {
                SKIP if record.bytes == to_end => self.head += to_end as u64,
                MESSAGE..=DONE if record.length() <= to_end => return Ok(Some((record, data))),
                _ => {
                    return Err(
                        group.corrupt(from, format!("{record:?} with {to_end} bytes left in its ring"))
                    );
                }
            }
        }
    }

    /// Gives the room of `record` back, record by record, so that the sender fills it while the next one is read.
    pub fn done(&mut self, group: &Group, from: usize, record: &Record) {
        self.head += record.length() as u64;
        group.own.head(from).store(self.head, Ordering::Release);
    }
}
