//! What a step asks for when, and what it does not believe.

use super::*;
use crate::recorder::{Log, Recorder, units};
use crate::stage::Stage;
use models::{Gradients, Unit};
use std::collections::VecDeque;

/// A model whose micro-batches have these losses, and which writes down when it was asked for them.
struct Scripted {
    units: Vec<Unit>,
    losses: VecDeque<f64>,
    log: Log,
    /// Given up while a number is waited for.
    loses: Option<Communicator>,
}

impl Scripted {
    fn lose(&self) {
        if let Some(comm) = &self.loses {
            comm.abort("rank 1 is gone");
        }
    }
}

impl Model<f32> for Scripted {
    fn units(&self) -> &[Unit] {
        &self.units
    }
    fn begin(&mut self, _: &Batch<'_>, _: f32) {
        self.log.lock().unwrap().push(("begin", None));
    }
    fn forward_unit(&mut self, _: usize, _: &dyn Weights<f32>) {}
    fn backward_unit(&mut self, unit: usize, _: &dyn Weights<f32>, gradients: &mut dyn Gradients<f32>) {
        gradients.ready(unit, 0);
    }
    fn losses(&mut self) -> &[f32] {
        self.lose();
        &[]
    }
    fn loss(&mut self) -> f64 {
        self.log.lock().unwrap().push(("loss", None));
        self.losses.pop_front().expect("a loss a micro-batch")
    }
    fn logits(&mut self, _: usize, _: &dyn Weights<f32>, _: &mut [f32]) {
        self.lose();
    }
}

const BATCH: Batch<'static> = Batch { tokens: &[0], targets: &[0], rows: 1, length: 1 };

struct Ones;

impl Batches for Ones {
    fn micro_batch(&mut self, _: usize) -> std::result::Result<Batch<'_>, String> {
        Ok(BATCH)
    }
}

/// Who loses its peer, and when.
#[derive(Clone, Copy, PartialEq)]
enum Loses {
    Nobody,
    Kernels,
    Model,
}

/// A trainer alone, for micro-batches with these losses, and what is done by it.
fn trainer(level: u8, losses: &[f64], loses: Loses) -> (Trainer<f32>, Log) {
    let stage = Stage::try_from(level).unwrap();
    let config = Config { stage, accumulate: losses.len(), ..Config::default() };
    let comm = Communicator::threads(1).remove(0);
    let given_up = |by| (loses == by).then(|| comm.clone());
    let recorder = Recorder { loses: given_up(Loses::Kernels), ..Recorder::default() };
    let (log, units) = (recorder.log.clone(), units(3));
    let losses = losses.iter().copied().collect();
    let model = Scripted { units, losses, log: log.clone(), loses: given_up(Loses::Model) };
    let plan = plan_for(&model, &config, false, &comm).unwrap();
    let source = &mut |_: &TensorSpec, _, _: &mut [f32]| Ok(());
    let ledger = Ledger::default();
    let made = Trainer::with(Box::new(recorder), plan, Box::new(model), comm.clone(), ledger, source);
    log.lock().unwrap().clear();
    (made.unwrap(), log)
}

/// Where each of that name is in the log.
fn places(log: &Log, name: &str) -> Vec<usize> {
    let log = log.lock().unwrap();
    log.iter().enumerate().filter(|(_, (what, _))| *what == name).map(|(at, _)| at).collect()
}

/// Whoever waits for a loss waits for a device, which has to have everything by then that needs no loss: what goes through
/// the host moves on only while somebody waits for that.
#[test]
fn a_step_s_last_loss_is_waited_for_once_everything_before_the_norm_has_begun() {
    for level in 0..4 {
        let (mut trainer, log) = trainer(level, &[1.0, 2.5], Loses::Nobody);
        let step = trainer.step(&mut Ones, 1e-3).unwrap();
        assert_eq!(step.loss, (1.0 + 2.5) / 2.0);
        let [losses, squares, put] = ["loss", "squares", "put"].map(|name| places(&log, name));
        assert_eq!((losses.len(), squares.len(), put.len()), (2, 3, 1), "stage {level}");
        assert!(losses[0] < places(&log, "begin")[1], "before its place is taken");
        assert!(
            squares[2] < losses[1] && losses[1] < put[0],
            "stage {level}: {losses:?} {squares:?} {put:?}"
        );
    }
}

#[test]
fn numbers_of_calls_that_were_given_up_meanwhile_are_not_believed() {
    let (mut of_step, log) = trainer(0, &[1.0], Loses::Kernels);
    let error = of_step.step(&mut Ones, 1e-3).unwrap_err().to_string();
    assert!(error.contains("rank 1 is gone"), "{error}");
    assert!(places(&log, "squares").len() == 3 && places(&log, "update").is_empty());
    let lost = || trainer(0, &[1.0], Loses::Model).0;
    let error = lost().evaluate(Some(&BATCH)).unwrap_err().to_string();
    assert!(error.contains("rank 1 is gone"), "{error}");
    let error = lost().logits(&BATCH, 0, &mut []).unwrap_err().to_string();
    assert!(error.contains("rank 1 is gone"), "{error}");
}

#[test]
fn a_loss_that_is_not_finite_is_told_before_anything_is_updated() {
    for value in [f64::NAN, f64::INFINITY] {
        let (mut trainer, log) = trainer(2, &[value], Loses::Nobody);
        let error = trainer.step(&mut Ones, 1e-3).unwrap_err().to_string();
        assert!(error.starts_with(&format!("step 1: the loss is {value}, so the update")), "{error}");
        assert!(places(&log, "update").is_empty());
    }
}

/// A device is said to wait for collectives only where there are some that it waits for.
#[test]
fn weights_that_are_there_are_not_waited_for() {
    for (level, waits) in [(0, false), (1, true), (3, true)] {
        let (mut trainer, _) = trainer(level, &[1.0], Loses::Nobody);
        let plan = trainer.plan.clone();
        let all = || (0..3).map(Action::Gather);
        // What was published at the start is under way, once.
        let waited = all().any(|gather| trainer.activity(gather) == Activity::Communication);
        assert_eq!(waited, waits, "stage {level}");
        for unit in 0..3 {
            trainer.params.gather(&plan, unit).unwrap();
        }
        assert!(all().all(|gather| trainer.activity(gather) == Activity::Compute), "stage {level}");
    }
}
