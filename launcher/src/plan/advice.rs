//! What would make a run take less memory.

use super::MicroBatch;
use crate::human;

/// What would make a run of `world` ranks, which may be `fewer`, take less memory of the host, of that which it does not do
/// yet.
pub fn of_memory(zero: &zero::Config, batch: &MicroBatch, world: usize, fewer: bool) -> String {
    // Beside a device only the optimizer's state, and what goes through the host, is there.
    let computes = zero.placement == zero::Placement::Host;
    let smaller = [("--model", true), ("--micro-batch", computes && batch.rows > 1), ("--seq", computes)];
    let mut advice = format!("take a smaller {}", human::either(smaller));
    if fewer {
        advice += ", or fewer --ranks";
    }
    // The highest stage that takes something off.
    let shards = match zero.placement {
        zero::Placement::Host if world > 1 => 3,
        // One rank keeps sums over micro-batches and no whole gradients.
        zero::Placement::Host if zero.accumulate > 1 => 2,
        zero::Placement::Offloaded if world > 1 => 1,
        _ => 0,
    };
    if zero.stage.level() < shards {
        advice += ", or a higher --stage";
    }
    if computes && zero.sums() > 1 {
        advice += ", or no --reproducible";
    }
    if computes && zero.accumulate > 1 {
        advice += ", or --accumulate 1";
    }
    if computes && batch.recompute == models::Recompute::None {
        advice += ", or --recompute full";
    }
    advice
}

#[cfg(test)]
mod tests {
    use super::*;
    use models::{MatmulPrecision, Recompute};
    use zero::{Placement, Stage};

    #[test]
    fn what_is_advised_of_memory_would_help() {
        let advice = |placement, stage, accumulate, rows, world| {
            let (stage, reproducible) = (Stage::ALL[stage], accumulate > 2);
            let zero = zero::Config { placement, stage, accumulate, reproducible, ..zero::Config::default() };
            let precision = MatmulPrecision::Highest;
            let batch = MicroBatch { rows, length: 64, recompute: Recompute::None, precision, threads: 1 };
            of_memory(&zero, &batch, world, world > 1)
        };
        for (run, words) in [
            (
                advice(Placement::Host, 2, 1, 4, 2),
                "--model, --micro-batch or --seq, or fewer --ranks, or a higher --stage, or --recompute full",
            ),
            (advice(Placement::Host, 3, 1, 1, 2), "--model or --seq, or fewer --ranks, or --recompute full"),
            (advice(Placement::Host, 0, 1, 1, 1), "--model or --seq, or --recompute full"),
            (
                advice(Placement::Host, 1, 2, 1, 1),
                "--model or --seq, or a higher --stage, or --accumulate 1, or --recompute full",
            ),
            (advice(Placement::Host, 2, 2, 1, 1), "--model or --seq, or --accumulate 1, or --recompute full"),
            (
                advice(Placement::Host, 2, 4, 1, 1),
                "--model or --seq, or no --reproducible, or --accumulate 1, or --recompute full",
            ),
            // No more sums than without.
            (advice(Placement::Host, 2, 3, 1, 1), "--model or --seq, or --accumulate 1, or --recompute full"),
            (advice(Placement::Offloaded, 0, 1, 4, 2), "--model, or fewer --ranks, or a higher --stage"),
            (advice(Placement::Offloaded, 1, 1, 4, 2), "--model, or fewer --ranks"),
            (advice(Placement::Device, 0, 2, 4, 1), "--model"),
        ] {
            assert_eq!(run, format!("take a smaller {words}"));
        }
    }
}
