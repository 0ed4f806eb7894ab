//! What a training says in a trace of where its steps go.

use crate::toy::{Numbers, Toy, noise};
use collectives::trace::{Of, Span, Trace};
use collectives::{Communicator, Options, bf16};
use models::TensorSpec;
use zero::{Config, Doing, Ledger, Stage, Step, Trainer};

/// The spans of the traced steps of two ranks, and what those say of themselves.
fn traced(stage: Stage, accumulate: usize) -> Vec<(Vec<Span>, Vec<Step>, u64)> {
    let rank = |comm: Communicator| {
        let (rank, world) = (comm.rank(), comm.size());
        let mut source = |spec: &TensorSpec, range: std::ops::Range<usize>, out: &mut [f32]| {
            range.zip(out).for_each(|(i, x)| *x = noise(spec.name.len() as u32, 9, 9, i));
            Ok(())
        };
        let config = Config { stage, accumulate, bucket_bytes: 9000, ..Config::default() };
        let toy = Box::new(Toy::new(3, false));
        let mut trainer = Trainer::<bf16>::new(toy, comm, &config, Ledger::default(), &mut source).unwrap();
        let trace = Trace::new(1 << 12);
        trainer.trace(Some(&trace));
        let (mut steps, mut calls) = (Vec::new(), 0);
        for step in 0..4 {
            let wanted = (1..3).contains(&step);
            trace.want(wanted);
            let before = trainer.comm().stats();
            let done = trainer.step(&mut Numbers::new(step, rank, world, accumulate), 0.01).unwrap();
            if wanted {
                steps.push(done);
                calls += trainer.comm().stats().since(&before).calls;
            }
        }
        trainer.settle().unwrap();
        let (spans, lost) = trace.take();
        assert_eq!(lost.count, 0);
        (spans, steps, calls)
    };
    Communicator::on_threads(2, Options::default(), rank)
}

#[test]
fn a_step_is_made_of_passes_waits_and_an_update_and_has_its_calls() {
    let units = 5;
    for (stage, accumulate) in [(0, 1), (2, 3), (3, 2)] {
        for (spans, steps, calls) in traced(Stage::try_from(stage).unwrap(), accumulate) {
            let what = format!("stage {stage}, {accumulate} micro-batches");
            let of = |doing: Doing| -> Vec<(usize, Span)> {
                let found = spans.iter().filter_map(|span| Some((Doing::from(span.of)?, span)));
                found
                    .filter(|((found, _), _)| *found == doing)
                    .map(|((_, which), span)| (which, *span))
                    .collect()
            };
            let inside = |inner: &Span, outer: &Span| outer.begin <= inner.begin && inner.end <= outer.end;
            let all = of(Doing::Step);
            assert_eq!(all.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [2, 3], "{what}");
            for ((_, step), report) in all.iter().zip(&steps) {
                assert!((step.end - step.begin) as f64 * 1e-9 <= report.seconds, "{what}");
                let within =
                    |doing| of(doing).into_iter().filter(|(_, span)| inside(span, step)).collect::<Vec<_>>();
                // The head's forward is part of its backward.
                let forwards: Vec<usize> = within(Doing::Forward).iter().map(|(unit, _)| *unit).collect();
                assert_eq!(forwards, [0, 1, 2, 3].repeat(accumulate), "{what}");
                let backwards: Vec<usize> = within(Doing::Backward).iter().map(|(unit, _)| *unit).collect();
                assert_eq!(backwards, (0..units).rev().collect::<Vec<_>>().repeat(accumulate), "{what}");
                assert_eq!(within(Doing::Update).len(), 1, "{what}");
                let exposed: u64 = within(Doing::Exposed).iter().map(|(_, span)| span.end - span.begin).sum();
                let (exposed, told) = (exposed as f64 * 1e-9, report.exposed_communication_seconds);
                // What is shorter than a microsecond is not there.
                assert!(exposed > 0.0 && exposed <= told, "{what}: {exposed} of {told} s");
            }
            // Those that a step begins, whenever they are over.
            let begun =
                |span: &&Span| all.iter().any(|(_, step)| (step.begin..step.end).contains(&span.begin));
            let called = spans.iter().filter(|span| matches!(span.of, Of::Call(_))).filter(begun).count();
            assert_eq!(called as u64, calls, "{what}");
        }
    }
}
