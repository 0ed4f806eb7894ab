//! Device memory with something in it, and the time of work on a stream.

use collectives::device::Queue;
use collectives::device::cuda::{Event, Gpu, Stream};
use collectives::{Buffer, Element, Float, Result};

/// The dense 16-bit FLOP/s that the vendor promises, where it is known.
pub fn peak(name: &str) -> Option<f64> {
    let known = [("H200", 989e12), ("H100", 989e12), ("A100", 312e12), ("B200", 2250e12)];
    known.iter().find(|(part, _)| name.contains(part)).map(|(_, peak)| *peak)
}

/// Zeros on the GPU.
pub fn zeros<E: Element>(gpu: &Gpu, len: usize) -> Result<Buffer<E>> {
    Ok(Buffer::from_memory(gpu.memory(len * size_of::<E>())?))
}

/// Noise of the given width on the GPU: a pattern of a few megabytes, repeated. Random bits matter: products of zeros
/// run faster than any real ones.
pub fn noise<T: Float>(gpu: &Gpu, stream: &mut Stream, len: usize, width: f32) -> Result<Buffer<T>> {
    let pattern: Vec<T> = (0..len.min(1 << 20))
        .map(|i| {
            let bits = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let bits = (bits ^ (bits >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40;
            T::from_f32((bits as f32 / (1 << 24) as f32 - 0.5) * 2.0 * width)
        })
        .collect();
    let mut buffer = zeros::<T>(gpu, len)?;
    let start = buffer.view_mut().as_mut_ptr() as u64;
    let mut done = size_of_val(&pattern[..]);
    // SAFETY: all ranges are inside the buffer, which is kept; elements are plain numbers.
    unsafe {
        stream.upload(std::slice::from_raw_parts(pattern.as_ptr().cast(), done), start)?;
        while done < len * size_of::<T>() {
            let part = done.min(len * size_of::<T>() - done);
            stream.copy(start, start + done as u64, part)?;
            done += part;
        }
    }
    stream.synchronize()?;
    Ok(buffer)
}

/// The median seconds of one call of `work`, over batches that are long enough to time.
pub fn seconds(stream: &mut Stream, mut work: impl FnMut(&mut Stream) -> Result<()>) -> Result<f64> {
    let gpu = stream.gpu().clone();
    let (start, end) = (Event::timed(&gpu)?, Event::timed(&gpu)?);
    let mut batch = |stream: &mut Stream, calls: usize| -> Result<f64> {
        stream.record(&start)?;
        (0..calls).try_for_each(|_| work(stream))?;
        stream.record(&end)?;
        end.wait()?;
        Ok(end.seconds_since(&start)? / calls as f64)
    };
    batch(stream, 3)?;
    let calls = ((5e-3 / batch(stream, 3)?) as usize).clamp(1, 1000);
    let mut times = (0..7).map(|_| batch(stream, calls)).collect::<Result<Vec<f64>>>()?;
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}
