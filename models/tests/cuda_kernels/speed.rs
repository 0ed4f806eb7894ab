//! That everything that is timed runs, on small shapes: times mean nothing on the emulation.

use crate::emulator::emulator;
use collectives::device::SharedQueue;
use models::LlamaConfig;
use models::cuda::speed::{GROUPS, Scale, Shown, Work, measure};

#[test]
fn every_kernel_can_be_timed() {
    let Some(emulator) = emulator() else { return };
    let config = LlamaConfig { head_dim: 64, heads: 2, kv_heads: 1, ..LlamaConfig::preset("nano").unwrap() };
    let scale = Scale { rows: 1, length: 16, elements: 8192, batches: 1, seconds: 0.0, shared: usize::MAX };
    let queue = SharedQueue::new(emulator.queue(0));
    let (mut rows, mut begun) = (Vec::new(), Vec::new());
    measure(&queue, &config, scale, &|_| true, &mut |shown| match shown {
        Shown::Begins(group, name) => begun.push((group, name.to_owned())),
        Shown::Ended(row) => rows.push(row.unwrap()),
    })
    .unwrap();
    assert_eq!(begun, rows.iter().map(|row| (row.group, row.name.clone())).collect::<Vec<_>>());
    for group in GROUPS {
        assert!(rows.iter().any(|row| row.group == group), "{group} was not timed");
    }
    for row in &rows {
        assert!(row.seconds > 0.0, "{row:?}");
        let work = match row.work {
            Work::Moved(bytes) => bytes as f64,
            Work::Computed(flops) => flops,
        };
        assert!(work > 0.0, "{row:?}");
    }
    let mut norms = Vec::new();
    measure(&queue, &config, scale, &|group| group == "norm", &mut |shown| {
        if let Shown::Ended(row) = shown {
            norms.push(row.unwrap().group);
        }
    })
    .unwrap();
    assert_eq!(norms, ["norm", "norm"]);
}
