//! What a step asks for when, and what it does not believe.

use super::*;
use crate::config::Config;
use crate::listener::Listener;
use crate::memory::Ledger;
use crate::plan::{Home, Plan};
use crate::recorder::{Log, Recorder, units};
use crate::stage::Stage;
use crate::standing::Standing;
use crate::trainer::{Kept, plan_for};
use collectives::schedule::{Algorithm, Kind, Tuning};
use collectives::{Communicator, DType, Options, Priority, ReduceOp};
use models::{Batch, Gradients, Model, TensorSpec, Unit, Weights};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

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
    fn micro_batch(&mut self, _: usize) -> std::result::Result<Batch<'_>, NoBatch> {
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
        let words = "before any update: the weights are not all finite";
        assert!(error.starts_with(&format!("step 1: the loss is {value} {words}")), "{error}");
        assert!(places(&log, "update").is_empty());
    }
}

/// The last of the ranks has no second micro-batch in the second step, or wants none: all hear of it there, and nothing is
/// updated.
#[test]
fn a_rank_without_a_micro_batch_is_heard_by_all_before_anything_is_updated() {
    struct Ends(usize, NoBatch);
    impl Batches for Ends {
        fn micro_batch(&mut self, _: usize) -> std::result::Result<Batch<'_>, NoBatch> {
            self.0 = self.0.checked_sub(1).ok_or_else(|| self.1.clone())?;
            Ok(BATCH)
        }
    }
    let failed =
        (NoBatch::Failed("é".repeat(600)), format!("has no tokens to train on: {}", "é".repeat(512)));
    let stops = [0, 15, 255].map(|why| (NoBatch::Stop(why), format!("is to stop (for reason {why})")));
    let cases = [(0, 1), (1, 2), (2, 3), (3, 3)];
    let whys = stops.iter().chain([&failed]);
    for ((level, world), (why, said)) in whys.flat_map(|why| cases.map(|case| (case, why))) {
        let rank = |comm: Communicator| {
            let (me, stage) = (comm.rank(), Stage::try_from(level).unwrap());
            let config = Config { stage, accumulate: 2, ..Config::default() };
            let (log, losses) = (Log::default(), VecDeque::from([1.0; 4]));
            let model = Scripted { units: units(3), losses, log: log.clone(), loses: None };
            let recorder = Recorder { log: log.clone(), ..Recorder::default() };
            let plan = plan_for(&model, &config, false, &comm).unwrap();
            let source = &mut |_: &TensorSpec, _, _: &mut [f32]| Ok(());
            let ledger = Ledger::default();
            let made = Trainer::with(Box::new(recorder), plan, Box::new(model), comm, ledger, source);
            let (mut trainer, mut batches) =
                (made.unwrap(), Ends(if me + 1 == world { 3 } else { 9 }, why.clone()));
            trainer.step(&mut batches, 1e-3).unwrap();
            let updates = places(&log, "update").len();
            let error = trainer.step(&mut batches, 1e-3).unwrap_err();
            assert_eq!(places(&log, "update").len(), updates, "stage {level}");
            error.to_string()
        };
        let words = format!("rank {} {said}", world - 1);
        for told in Communicator::on_threads(world, Options::default(), rank) {
            assert!(told.starts_with("step 2") && told.ends_with(&words), "{told}");
        }
    }
}

#[test]
fn micro_batches_of_a_step_have_one_shape() {
    struct Shrinks;
    impl Batches for Shrinks {
        fn micro_batch(&mut self, index: usize) -> std::result::Result<Batch<'_>, NoBatch> {
            Ok(Batch { tokens: &[0; 6][index..], targets: &[0; 6][index..], rows: 1, length: 6 - index })
        }
    }
    let (mut trainer, log) = trainer(1, &[1.0, 1.0], Loses::Nobody);
    let error = trainer.step(&mut Shrinks, 1e-3).unwrap_err().to_string();
    let words = "micro-batch 1 has 1 sequences of 5 tokens, those before it have 1 sequences of 6 tokens";
    assert!(error.ends_with(words) && places(&log, "update").is_empty(), "{error}");
}

/// A model that leaves a gradient unfinished would train on what was there before.
#[test]
fn a_gradient_that_is_never_ready_is_named() {
    struct Forgets(Scripted);
    impl Model<f32> for Forgets {
        fn units(&self) -> &[Unit] {
            &self.0.units
        }
        fn begin(&mut self, batch: &Batch<'_>, scale: f32) {
            self.0.begin(batch, scale);
        }
        fn forward_unit(&mut self, _: usize, _: &dyn Weights<f32>) {}
        fn backward_unit(&mut self, unit: usize, w: &dyn Weights<f32>, gradients: &mut dyn Gradients<f32>) {
            if unit != 1 {
                self.0.backward_unit(unit, w, gradients);
            }
        }
        fn losses(&mut self) -> &[f32] {
            &[]
        }
        fn loss(&mut self) -> f64 {
            1.0
        }
        fn logits(&mut self, _: usize, _: &dyn Weights<f32>, _: &mut [f32]) {}
    }
    for stage in Stage::ALL {
        Communicator::on_threads(2, Options::default(), |comm| {
            let (rank, config) = (comm.rank(), Config { stage, ..Config::default() });
            let (log, losses) = (Log::default(), VecDeque::from([1.0]));
            let scripted = Scripted { units: units(3), losses, log, loses: None };
            let model: Box<dyn Model<f32>> = match rank {
                0 => Box::new(scripted),
                _ => Box::new(Forgets(scripted)),
            };
            let plan = plan_for(&*model, &config, false, &comm).unwrap();
            let source = &mut |_: &TensorSpec, _, _: &mut [f32]| Ok(());
            let (kernels, ledger) = (Box::new(Recorder::default()), Ledger::default());
            let mut trainer = Trainer::with(kernels, plan, model, comm.clone(), ledger, source).unwrap();
            // The other waits for that gradient no longer than until it hears of it, and what is tried after it fails, too.
            let tried = [
                trainer.step(&mut Ones, 1e-3).unwrap_err(),
                trainer.step(&mut Ones, 1e-3).unwrap_err(),
                trainer.evaluate(Some(&BATCH)).unwrap_err(),
                trainer.logits(&BATCH, 0, &mut []).unwrap_err(),
                trainer.export(None).unwrap_err(),
                trainer.export_state(Kept::Weights, &mut |_, _, _| Ok(())).unwrap_err(),
                trainer.settle().unwrap_err(),
            ];
            for error in tried.map(|error| error.to_string()) {
                assert!(
                    error.contains("unit 1") && error.contains("ready"),
                    "rank {rank}, {stage:?}: {error}"
                );
            }
            comm.barrier().expect_err("it is given up");
        });
    }
}

/// What a device has failed in is half done, of which the group knows nothing.
#[test]
fn after_a_device_s_failure_all_else_fails_too() {
    struct Fails(Scripted, AtomicBool);
    impl Model<f32> for Fails {
        fn units(&self) -> &[Unit] {
            &self.0.units
        }
        fn begin(&mut self, _: &Batch<'_>, _: f32) {}
        fn forward_unit(&mut self, unit: usize, _: &dyn Weights<f32>) {
            self.1.store(unit == 1, Ordering::Relaxed);
        }
        fn backward_unit(&mut self, _: usize, _: &dyn Weights<f32>, _: &mut dyn Gradients<f32>) {}
        fn losses(&mut self) -> &[f32] {
            &[]
        }
        fn logits(&mut self, _: usize, _: &dyn Weights<f32>, _: &mut [f32]) {}
        fn check(&self) -> collectives::Result<()> {
            match self.1.swap(false, Ordering::Relaxed) {
                true => Err(collectives::Error::GivenUp("the device is gone".into())),
                false => Ok(()),
            }
        }
    }
    for (stage, of_step) in Stage::ALL.into_iter().flat_map(|stage| [(stage, true), (stage, false)]) {
        // Of so many units some are on their way by then.
        Communicator::on_threads(2, Options::default(), |comm| {
            let config = Config { stage, ..Config::default() };
            let scripted = Scripted { units: units(8), losses: [].into(), log: Log::default(), loses: None };
            let model = Fails(scripted, AtomicBool::new(false));
            let plan = plan_for(&model, &config, false, &comm).unwrap();
            let source = &mut |_: &TensorSpec, _, _: &mut [f32]| Ok(());
            let (kernels, ledger) = (Box::new(Recorder::default()), Ledger::default());
            let made = Trainer::with(kernels, plan, Box::new(model), comm.clone(), ledger, source);
            let mut trainer = made.unwrap();
            let first = match of_step {
                true => trainer.step(&mut Ones, 1e-3).unwrap_err(),
                false => trainer.evaluate(Some(&BATCH)).unwrap_err(),
            };
            assert_eq!(first.to_string(), "the device is gone");
            let tried = [
                trainer.step(&mut Ones, 1e-3).unwrap_err(),
                trainer.evaluate(Some(&BATCH)).unwrap_err(),
                trainer.logits(&BATCH, 0, &mut []).unwrap_err(),
                trainer.export(None).unwrap_err(),
                trainer.export_state(Kept::Weights, &mut |_, _, _| Ok(())).unwrap_err(),
                trainer.restore(Standing::default(), &mut |_, _, _, _| Ok(())).unwrap_err(),
                trainer.settle().unwrap_err(),
            ];
            for error in tried.map(|error| error.to_string()) {
                assert!(
                    error.contains("a trainer that has failed (the device is gone)"),
                    "{stage:?}: {error}"
                );
            }
        });
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

/// A pass waits for weights, and nothing but the update for sums of gradients.
#[test]
fn gathers_of_weights_go_before_sums_of_gradients() {
    for stage in Stage::ALL {
        Communicator::on_threads(2, Options::default(), |comm| {
            let (units, losses) = (units(8), VecDeque::from([1.0]));
            let model = Scripted { units, losses, log: Log::default(), loses: None };
            let config = Config { stage, ..Config::default() };
            let plan = plan_for(&model, &config, false, &comm).unwrap();
            // It is planned without, as one goes with a device.
            let listener = Arc::new(Listener::of(&comm));
            let comm = comm.with_carrier(listener.clone());
            let source = &mut |_: &TensorSpec, _, _: &mut [f32]| Ok(());
            let (kernels, ledger) = (Box::new(Recorder::default()), Ledger::default());
            let made = Trainer::with(kernels, plan, Box::new(model), comm, ledger, source);
            made.unwrap().step(&mut Ones, 1e-3).unwrap();
            let calls = listener.calls.lock().unwrap();
            // What the norm and agreements need is of another type.
            let elements = || calls.iter().filter(|(call, _)| call.dtype == DType::F32);
            for (call, priority) in elements() {
                let urgent = call.kind == Kind::AllGather;
                assert_eq!(*priority == Priority::High, urgent, "{call} at {stage:?}");
            }
            let any = |gathers| elements().any(|(call, _)| (call.kind == Kind::AllGather) == gathers);
            assert_eq!([any(true), any(false)], [stage.shards_optimizer, true], "{stage:?}");
        });
    }
}

/// A model that computes for long: rank 0 is in the backward of the last unit until rank 1 is in that of unit `far`.
struct Busy {
    units: Vec<Unit>,
    rank: usize,
    far: usize,
    ahead: Arc<AtomicBool>,
}

impl Model<f32> for Busy {
    fn units(&self) -> &[Unit] {
        &self.units
    }
    fn begin(&mut self, _: &Batch<'_>, _: f32) {}
    fn forward_unit(&mut self, _: usize, _: &dyn Weights<f32>) {}
    fn backward_unit(&mut self, unit: usize, weights: &dyn Weights<f32>, gradients: &mut dyn Gradients<f32>) {
        gradients.tensor(unit, 0).host().fill(1.0);
        gradients.ready(unit, 0);
        if self.rank == 1 && unit == self.far {
            self.ahead.store(true, Ordering::Release);
        }
        let start = Instant::now();
        while self.rank == 0 && unit + 1 == self.units.len() && !self.ahead.load(Ordering::Acquire) {
            assert!(start.elapsed() < Duration::from_secs(20), "messages move while this rank computes");
            weights.tensor(unit, 0);
            std::thread::yield_now();
        }
    }
    fn losses(&mut self) -> &[f32] {
        &[]
    }
    fn logits(&mut self, _: usize, _: &dyn Weights<f32>, _: &mut [f32]) {}
}

/// Rank 1 comes to the backward of a unit whose gradient takes the last one's place only when that one's reduction is over,
/// which takes more rounds than are begun at once; and rank 0 waits for nothing meanwhile.
#[test]
fn a_reduction_of_many_rounds_goes_on_while_a_unit_computes() {
    let ahead = Arc::new(AtomicBool::new(false));
    let progress = [collectives::Progress::Inline, collectives::Progress::Thread { cpu: None }];
    for progress in progress {
        let tuning = Tuning { round: 512, window: 512, windowed: 512, piece: 64, ..Tuning::default() };
        let options = Options { progress, tuning, ..Default::default() };
        ahead.store(false, Ordering::Release);
        Communicator::on_threads(2, options, |comm| {
            comm.force(Kind::ReduceScatter, Some(Algorithm::Pairwise)).unwrap();
            let (config, units) = (Config { stage: Stage::ALL[2], ..Config::default() }, units(8));
            let gradients = Plan::new(&units, DType::F32, &config, comm.rank(), 2).gradients;
            let far = gradients[..7].iter().rposition(|place| *place == gradients[7]).unwrap();
            assert_ne!(gradients[7], Home::Whole);
            let model = Box::new(Busy { units, rank: comm.rank(), far, ahead: Arc::clone(&ahead) });
            let source = &mut |_: &TensorSpec, _, _: &mut [f32]| Ok(());
            let mut trainer = Trainer::new(model, comm, &config, Ledger::default(), source).unwrap();
            trainer.step(&mut Ones, 1e-3).unwrap();
        });
    }
}

/// A call of another group of the same family stands for what was published before: it moves only when somebody looks.
#[test]
fn what_is_under_way_goes_on_while_buckets_are_updated() {
    const BUCKETS: usize = 24;
    let tuning = Tuning { round: 512, window: 512, windowed: 512, piece: 64, ..Tuning::default() };
    let options = Options { tuning, ..Default::default() };
    let over = Arc::new(AtomicBool::new(false));
    let rank = |comm: Communicator| {
        comm.force(Kind::ReduceScatter, Some(Algorithm::Pairwise)).unwrap();
        let alone = comm.split(Some(comm.rank() as u32), 0).unwrap().expect("a group of this rank");
        let [input, output] = [2048, 1024].map(|n| comm.alloc::<f32>(n).unwrap());
        if comm.rank() == 1 {
            comm.start_reduce_scatter(input, output, ReduceOp::Sum).unwrap().wait().unwrap();
            return over.store(true, Ordering::Release);
        }
        let (mut buffers, mut updates, over) = (Some((input, output)), 0, Arc::clone(&over));
        let mut pending = None;
        let updating = move || {
            updates += 1;
            if let Some((input, output)) = buffers.take() {
                pending = Some(comm.start_reduce_scatter(input, output, ReduceOp::Sum).unwrap());
            }
            let start = Instant::now();
            while start.elapsed() < Duration::from_millis(300) && !over.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            assert!(updates < BUCKETS || over.load(Ordering::Acquire), "it is over by the last update");
            if updates == BUCKETS {
                pending.take().expect("was started").wait().unwrap();
            }
        };
        let recorder = Box::new(Recorder { updating: Some(Box::new(updating)), ..Recorder::default() });
        let (units, losses) = (units(BUCKETS), VecDeque::from([1.0]));
        let model = Scripted { units, losses, log: Log::default(), loses: None };
        let config = Config { stage: Stage::ALL[1], ..Config::default() };
        let plan = plan_for(&model, &config, false, &alone).unwrap();
        let source = &mut |_: &TensorSpec, _, _: &mut [f32]| Ok(());
        let made = Trainer::with(recorder, plan, Box::new(model), alone, Ledger::default(), source);
        made.unwrap().step(&mut Ones, 1e-3).unwrap();
    };
    Communicator::on_threads(2, options, rank);
}

/// One rank's weights cannot be read: the others, which have called for what it never will, hear why, also while it keeps a
/// communicator of the group.
#[test]
fn a_trainer_that_cannot_be_made_holds_nobody_up() {
    for stage in Stage::ALL {
        Communicator::on_threads(3, Options::default(), |comm| {
            let rank = comm.rank();
            let model = Scripted { units: units(4), losses: [].into(), log: Log::default(), loses: None };
            let config = Config { stage, ..Config::default() };
            let source = &mut |_: &TensorSpec, _, _: &mut [f32]| match rank {
                1 => Err("no such file".to_owned()),
                _ => Ok(()),
            };
            let made = Trainer::new(Box::new(model), comm.clone(), &config, Ledger::default(), source);
            let error = match made.and_then(|mut trainer| trainer.settle()) {
                Err(error) => error.to_string(),
                Ok(()) => comm.barrier().expect_err("rank 1 has no trainer").to_string(),
            };
            assert!(error.contains("no such file"), "rank {rank} at {stage:?}: {error}");
            assert!(rank == 1 || error.contains("rank 1"), "rank {rank} at {stage:?}: {error}");
        });
    }
}
