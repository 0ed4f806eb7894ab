//! That the emulation notices mistakes, so that its silence means something.

use crate::emulator::emulator;
use collectives::Buffer;
use collectives::device::Range;
use collectives::device::emulation::Parts;

fn parts<'a>(kernel: &'a str, blocks: u32, slots: &'a [u64], ranges: &'a [Range]) -> Parts<'a> {
    Parts { module: "faults", kernel, grid: [blocks, 1, 1], threads: 64, shared: 1024, slots, ranges }
}

/// Runs a kernel of 128 threads that may write 64 numbers.
fn multiply(kernel: &str, seed: u64) -> Result<Vec<f32>, String> {
    let Some(emulator) = emulator() else { return Ok(vec![16.0; 64]) };
    let mut x = Buffer::<f32>::zeroed(64);
    let range = Range { start: x.host_mut().as_mut_ptr() as u64, bytes: 256, writable: 1, reaches: 0 };
    let (slots, ranges) = ([range.start, 0, 64], [range]);
    let parts = Parts { threads: 128, shared: 8192, ..parts(kernel, 1, &slots, &ranges) };
    // SAFETY: the ranges are buffers of this function.
    unsafe { emulator.run(&parts, seed) }.map(|()| x.host().to_vec())
}

#[test]
fn mistakes_with_products_of_warpgroups_are_noticed() {
    let mistakes = [
        ("product_without_proxy_fence", "without a fence and a barrier between"),
        ("product_without_fence", "without a fence of the warpgroup"),
        ("product_without_wait", "ends with a product under way"),
        ("product_of_what_is_overwritten", "barrier between"),
        ("product_without_swizzle", "without the 128-byte swizzle"),
        ("product_of_different_matrices", "multiplies other matrices than thread"),
    ];
    for seed in 0..4 {
        // Ones times ones, which are not there before somebody waits for them.
        assert_eq!(multiply("product", seed), Ok(vec![16.0; 64]));
        for (kernel, message) in mistakes.iter().filter(|_| emulator().is_some()) {
            let error = multiply(kernel, seed).expect_err(kernel);
            assert!(error.contains(message), "{kernel}: {error}");
        }
    }
}

#[test]
fn every_kind_of_mistake_is_noticed() {
    let Some(emulator) = emulator() else { return };
    let (mut x, y) = (Buffer::<f32>::zeroed(32), Buffer::copy_of(&[1f32; 32]));
    let run = |kernel: &str, seed: u64, x: &mut Buffer<f32>| {
        let (start_x, start_y) = (x.host_mut().as_mut_ptr() as u64, y.host().as_ptr() as u64);
        let range = |start, writable| Range { start, bytes: 128, writable, reaches: 0 };
        let ranges = [range(start_x, 1), range(start_y, 0)];
        // SAFETY: as above.
        unsafe { emulator.run(&parts(kernel, 2, &[start_x, start_y, 32], &ranges), seed) }
    };
    let mistakes = [
        ("out_of_bounds", "writes 4 bytes at byte 128 of array 0, which has 128 bytes"),
        ("write_to_input", "writes 4 bytes of array 1, which is read-only"),
        ("misaligned", "not aligned"),
        ("no_barrier", "without a barrier between"),
        ("no_warp_barrier", "without a barrier between"),
        ("overwrite_too_early", "without a barrier between"),
        ("nobody_wrote", "that nobody wrote"),
        ("no_wait", "into which a copy is under way"),
        ("waits_for_too_few", "into which a copy is under way"),
        ("outside_shared", "outside the block's 1024 bytes"),
        ("written_twice", "writes an element that thread"),
        ("result_of_another_block", "reads a result of another block"),
        ("diverges", "waits for ever"),
        ("meets_at_different_places", "another warp operation"),
        ("leaves_before_the_barrier", "waits for ever"),
        ("no_such_kernel", "no kernel no_such_kernel in module faults"),
    ];
    for seed in 0..4 {
        for (kernel, message) in mistakes {
            let error = run(kernel, seed, &mut x).expect_err(kernel);
            assert!(error.contains(message), "{kernel}: {error}");
        }
        // After each mistake the emulation goes on as if nothing had happened. One block, or both would write x.
        run("correct", seed, &mut x).expect_err("two blocks write the same elements");
    }
    let ranges = [
        Range { start: x.host_mut().as_mut_ptr() as u64, bytes: 128, writable: 1, reaches: 0 },
        Range { start: y.host().as_ptr() as u64, bytes: 128, writable: 0, reaches: 0 },
    ];
    let slots = [ranges[0].start, ranges[1].start, 32];
    for seed in 0..4 {
        // SAFETY: as above.
        unsafe { emulator.run(&parts("correct", 1, &slots, &ranges), seed) }.unwrap();
        assert!(x.host().iter().enumerate().all(|(i, x)| *x == 64.0 - i as f32));
    }
}
