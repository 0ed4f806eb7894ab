//! `cargo bench -p caravan-benches`: `reduce` (sums in canonical order) and `step` (whole training steps).
