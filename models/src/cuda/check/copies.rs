//! What launches and products touch, copied to the device and back, so that they run on the memory that training has.

use collectives::device::{Launch, Product, Queue, Range, SharedQueue};
use collectives::{Buffer, Memory, Result, bytes_of};

/// Copies lie as far from a multiple of so many bytes as what they are of: kernels choose vectors by addresses.
const ALIGNMENT: u64 = 64;

/// Bytes of the host.
#[derive(Clone, Copy, Debug)]
struct Span {
    start: u64,
    bytes: u64,
    writable: bool,
}

impl Span {
    fn of(range: Range) -> Self {
        Span { start: range.start, bytes: range.bytes, writable: range.writable != 0 }
    }
}

/// Memory of the host that overlaps, and its copy.
struct Piece {
    start: u64,
    end: u64,
    _memory: Memory,
    /// Where the copy of its first byte is.
    at: u64,
}

/// Copies on a device of memory of the host.
struct Copies<'a, Q: Queue> {
    queue: &'a mut SharedQueue<Q>,
    spans: Vec<Span>,
    pieces: Vec<Piece>,
}

/// Runs `launches`, whose memory is the host's, on copies of it; when it returns, the host has what they wrote.
pub(super) fn launch<Q: Queue>(queue: &mut SharedQueue<Q>, launches: &[Launch<'_>]) -> Result<()> {
    let mut spans = Vec::new();
    for range in launches.iter().flat_map(Launch::ranges) {
        spans.push(Span::of(*range));
        if range.reaches != 0 {
            // SAFETY: the launch borrows the array, which holds addresses.
            let reached = unsafe { words(range.start, range.bytes) };
            spans.extend(reached.into_iter().map(|start| Span {
                start,
                bytes: range.reaches,
                writable: false,
            }));
        }
    }
    // SAFETY: launches borrow the memory that they may touch.
    let copies = unsafe { Copies::new(queue, spans)? };
    for range in launches.iter().flat_map(Launch::ranges).filter(|range| range.reaches != 0) {
        // SAFETY: as above; the copy is as long.
        unsafe {
            let moved: Vec<u64> = words(range.start, range.bytes).into_iter().map(|a| copies.at(a)).collect();
            let at = copies.at(range.start);
            copies.queue.upload(bytes_of(&moved), at)?;
        }
    }
    let place = copies.queue.place();
    for launch in launches {
        // SAFETY: all its arrays have copies, which live until everything is done; a case's launches are such as their kernels
        // take.
        unsafe { copies.queue.launch(&launch.moved(|address| copies.at(address), place))? };
    }
    copies.back()
}

/// The same with a product.
pub(super) fn multiply<Q: Queue>(queue: &mut SharedQueue<Q>, product: &Product<'_>) -> Result<()> {
    let spans = product.ranges().map(Span::of).collect();
    // SAFETY: the product borrows its matrices, which are that long.
    let copies = unsafe { Copies::new(queue, spans)? };
    let place = copies.queue.place();
    // SAFETY: all of them have copies, which live until everything is done.
    unsafe { copies.queue.product(&product.moved(|address| copies.at(address), place))? };
    copies.back()
}

/// # Safety
/// So many bytes of initialised words are there.
unsafe fn words(start: u64, bytes: u64) -> Vec<u64> {
    // SAFETY: by the caller.
    unsafe { std::slice::from_raw_parts(start as *const u64, bytes as usize / size_of::<u64>()) }.to_vec()
}

impl<'a, Q: Queue> Copies<'a, Q> {
    /// # Safety
    /// The spans are memory of the host that nobody else writes, or reads where they are writable, while this lives.
    unsafe fn new(queue: &'a mut SharedQueue<Q>, mut spans: Vec<Span>) -> Result<Self> {
        spans.sort_by_key(|span| span.start);
        let mut wholes: Vec<(u64, u64)> = Vec::new();
        for span in &spans {
            let end = span.start + span.bytes;
            match wholes.last_mut().filter(|(start, last)| span.start < *last || span.start == *start) {
                Some((_, last)) => *last = end.max(*last),
                None => wholes.push((span.start, end)),
            }
        }
        let mut pieces = Vec::new();
        for (start, end) in wholes {
            let (before, bytes) = (start % ALIGNMENT, (end - start) as usize);
            let mut memory = queue.memory(before as usize + bytes)?;
            let at = memory.as_mut_ptr() as u64 + before;
            // SAFETY: by the caller, and the copy is as long.
            unsafe { queue.upload(std::slice::from_raw_parts(start as *const u8, bytes), at)? };
            pieces.push(Piece { start, end, _memory: memory, at });
        }
        Ok(Copies { queue, spans, pieces })
    }

    /// Where the copy of a byte of the host is.
    fn at(&self, address: u64) -> u64 {
        let after = self.pieces.partition_point(|piece| piece.start <= address);
        let piece = &self.pieces[after - 1];
        assert!(address <= piece.end, "memory that was copied");
        piece.at + (address - piece.start)
    }

    /// Waits, and gives the host what was written.
    fn back(self) -> Result<()> {
        self.queue.synchronize()?;
        for span in self.spans.iter().filter(|span| span.writable) {
            // SAFETY: the span is borrowed for writing, and its copy is as long.
            unsafe {
                let to = std::slice::from_raw_parts_mut(span.start as *mut u8, span.bytes as usize);
                self.queue.download(self.at(span.start), to)?;
            }
        }
        Ok(())
    }
}

/// A buffer in the queue's memory with what `from` holds.
pub(super) fn up<T: collectives::Element, Q: Queue>(
    queue: &mut SharedQueue<Q>,
    from: &Buffer<T>,
) -> Result<Buffer<T>> {
    let mut buffer = Buffer::from_memory(queue.memory(from.len() * size_of::<T>())?);
    queue.fill(&mut buffer, from.host())?;
    Ok(buffer)
}

/// A buffer of the host with what one in the queue's memory holds.
pub(super) fn down<T: collectives::Element, Q: Queue>(
    queue: &mut SharedQueue<Q>,
    from: &Buffer<T>,
) -> Result<Buffer<T>> {
    let mut buffer = Buffer::<T>::zeroed(from.len());
    queue.fetch(from, buffer.host_mut())?;
    Ok(buffer)
}
