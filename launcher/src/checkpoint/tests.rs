//! Checkpoints of one rank, and what a file system may do to them.

use super::pen::{Pen, take_away_before};
use super::worker::Worker;
use super::writing::{Due, Lead, Manner, Writers, Writing};
use super::*;
use crate::device;
use crate::plan::TrainPlan;
use crate::plan::tests::plan;
use collectives::Communicator;
use models::Error;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use zero::{Ledger, Standing, Trainer};

fn nano() -> TrainPlan {
    plan(
        "--model nano --data random --tokenizer bytes --dtype f32 --seq 8 --micro-batch 1 --steps 9 --ranks 1 --transport threads",
    )
}

/// One that says of its weights that they have come through so many steps.
fn trainer(plan: &TrainPlan, steps: u64) -> Trainer<f32> {
    let comm = Communicator::threads(1).remove(0);
    let mut trainer =
        device::trainer::<f32>(plan, comm, Ledger::default(), &std::sync::mpsc::channel().0).unwrap();
    let standing = Standing { steps, ..Standing::default() };
    trainer.restore(standing, &mut |_, _, _, _| Ok(())).unwrap();
    trainer
}

/// So many in a directory.
fn keeping(keep: usize, dir: &Path) -> Checkpoints {
    Checkpoints { dir: dir.to_owned(), every: 0, keep, beside: false, from: None }
}

/// Writes the state after so many steps.
fn written(dir: &Path, steps: u64) {
    let plan = nano();
    write(&mut trainer(&plan, steps), &plan, &keeping(1, dir));
}

fn write(trainer: &mut Trainer<f32>, plan: &TrainPlan, checkpoints: &Checkpoints) {
    let (comm, mut worker) = (trainer.comm().clone(), Worker::start(Duration::ZERO).unwrap());
    let claim = Arc::new(Mutex::new(Claim::of(&checkpoints.dir).unwrap()));
    let lead = Lead { claim, companions: Arc::default() };
    let writers = Writers { lead: Some(&lead), worker: &worker };
    let mut writing = Writing::begin(trainer, due(plan, checkpoints), writers, Manner::Standing).unwrap();
    let (written, _) = loop {
        if let Some(written) = writing.end(&comm, &worker, true).unwrap() {
            break written;
        }
    };
    worker.rest();
    assert!(written.whole && written.refused.is_none() && written.remark.is_none());
}

/// What gives the state after so many steps its name.
fn pen(plan: &TrainPlan, checkpoints: &Checkpoints, steps: u64) -> Pen {
    let claim = Arc::new(Mutex::new(Claim::of(&checkpoints.dir).unwrap()));
    let standing = Standing { steps, ..Standing::default() };
    Pen::new(&due(plan, checkpoints), claim, standing)
}

/// The first of a run, which was evaluated.
fn due<'a>(plan: &'a TrainPlan, checkpoints: &'a Checkpoints) -> Due<'a> {
    Due { plan, checkpoints, evaluated: true, before: 0 }
}

/// What lies in a directory, in order.
fn there(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_checkpoint_whose_name_may_not_last_is_there_beside_those_before() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    written(dir, 3);
    written(dir, 4);
    assert_eq!(there(dir), ["step-4"]);
    // As it is before it gets its name.
    fs::rename(dir.join("step-4"), pen_place(dir, 4)).unwrap();
    written(dir.join("others").as_path(), 3);
    fs::rename(dir.join("others/step-3"), dir.join("step-3")).unwrap();
    fs::remove_dir(dir.join("others")).unwrap();
    let here = keeping(1, dir);
    let mut pen = pen(&nano(), &here, 4);
    let remark = pen.take_place(|dir| Err(Error::system("sync", dir, "Input/output error")));
    let remark = remark.unwrap().remark.expect("a remark");
    assert!(remark.starts_with("the state after step 4 is here, but its name may not survive"), "{remark}");
    assert!(remark.ends_with("Input/output error"), "{remark}");
    assert_eq!(there(dir), ["step-3", "step-4"]);
    drop(pen);
    // With the next that lasts they go.
    written(dir, 5);
    assert_eq!(there(dir), ["step-5"]);
}

#[test]
fn a_checkpoint_of_which_a_part_is_gone_takes_the_place_of_none() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    written(dir, 4);
    fs::rename(dir.join("step-4"), pen_place(dir, 4)).unwrap();
    fs::create_dir(dir.join("step-3")).unwrap();
    fs::remove_file(pen_place(dir, 4).join("first_moments/model.safetensors")).unwrap();
    let here = keeping(1, dir);
    let mut pen = pen(&nano(), &here, 4);
    let why = pen.take_place(|_| Ok(())).unwrap_err().to_string();
    assert!(why.contains("first_moments"), "{why}");
    assert_eq!(there(dir), [".step-4.unfinished", "step-3"]);
}

/// It would be half a state under a whole one's name.
#[test]
fn a_state_whose_name_cannot_be_taken_stays_whole_and_is_told_of() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    written(dir, 3);
    written(dir.join("others").as_path(), 4);
    fs::rename(dir.join("others/step-4"), dir.join("step-4")).unwrap();
    fs::remove_dir(dir.join("others")).unwrap();
    // Nothing takes the place of what is not empty.
    fs::create_dir_all(pen_place(dir, 3).join("another")).unwrap();
    let named = take_away_before(dir, 1, 4);
    let remark = named.remark.expect("a remark");
    assert!(remark.starts_with("the state after step 3, which was to go, stays: "), "{remark}");
    assert!(named.going.is_empty() && dir.join("step-3").join(TRAINING).is_file());
    fs::remove_dir_all(pen_place(dir, 3)).unwrap();
    let named = take_away_before(dir, 1, 4);
    assert_eq!((named.remark, named.going), (None, vec![pen_place(dir, 3)]));
    assert_eq!(there(dir), [".step-3.unfinished", "step-4"]);
}

/// Nor of another run, whose directory has that name by then.
#[test]
fn a_run_with_nothing_left_to_do_takes_nothing_away_where_its_last_state_is_not() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("c");
    let here = keeping(1, &dir);
    let settled = |lead: &Lead, step| {
        let mut worker = Worker::start(Duration::ZERO).unwrap();
        lead.settle(&here, step, &worker);
        worker.rest();
        there(&dir)
    };
    let claimed = |dir: &Path| Lead {
        claim: Arc::new(Mutex::new(Claim::of(dir).unwrap())),
        companions: Arc::default(),
    };
    let lead = claimed(&dir);
    let fill = || [1, 2].map(|step| fs::create_dir_all(dir.join(format!("{STEP}{step}"))).unwrap());
    fill();
    assert_eq!(settled(&lead, 3), ["step-1", "step-2"]);
    fs::rename(&dir, home.path().join("aside")).unwrap();
    fill();
    assert_eq!(settled(&lead, 2), ["step-1", "step-2"]);
    assert_eq!(settled(&claimed(&dir), 2), ["step-2"]);
}

/// Or a training would begin anew where it has come far.
#[test]
fn a_directory_that_cannot_be_read_to_its_end_is_not_taken_for_an_empty_one() {
    let names = |last| whole([Ok("step-3".into()), last].into_iter());
    let refused = names(Err(io::Error::other("Input/output error"))).unwrap_err();
    assert_eq!(unreadable(Path::new("ckpt"))(refused).to_string(), "--checkpoint ckpt: Input/output error");
    assert_eq!(names(Ok("step-4".into())).unwrap(), ["step-3", "step-4"]);
}

/// Between the plan and the claim another run may come and go.
#[test]
fn a_run_does_not_go_on_from_what_it_was_not_planned_with() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    let planned = || Checkpoints { from: State::last(dir).unwrap(), ..keeping(1, dir) };
    let none = planned();
    none.claim().unwrap();
    written(dir, 3);
    let third = planned();
    third.claim().unwrap();
    let why = none.claim().err().expect("a refusal").to_string();
    assert!(why.contains("had no state when") && why.contains("has the state after step 3 now"), "{why}");
    // A state of the same step that somebody else has made.
    fs::remove_dir_all(dir.join("step-3")).unwrap();
    written(dir, 3);
    let why = third.claim().err().expect("a refusal").to_string();
    assert!(why.ends_with("has the state after step 3 of another run now: start it again"), "{why}");
    written(dir, 5);
    let why = third.claim().err().expect("a refusal").to_string();
    assert!(why.contains("had the state after step 3") && why.contains("after step 5 now"), "{why}");
}

/// Which token is for padding follows the tokenizer, and how many states stay who starts a run.
#[test]
fn another_padding_token_and_other_kept_states_are_told_and_are_no_other_shape() {
    let home = tempfile::tempdir().unwrap();
    written(home.path(), 3);
    let state = State::last(home.path()).unwrap().expect("a state");
    let mut plan = nano();
    assert_eq!(state.differences(&plan), "");
    plan.model.config.padding = Some(3);
    state.check_shape(&plan.model).unwrap();
    assert_eq!(state.differences(&plan), "padding token 3 instead of none");
    // Fewer of those before it stay.
    plan.model.config.padding = None;
    plan.checkpoints = Some(keeping(5, home.path()));
    assert_eq!(state.differences(&plan), "--checkpoint-keep 5 instead of 1");
    plan.checkpoints = Some(keeping(1, home.path()));
    assert_eq!(state.differences(&plan), "");
    plan.model.config.layers = 3;
    let why = state.check_shape(&plan.model).unwrap_err().to_string();
    assert!(why.contains("another shape"), "{why}");
}

#[test]
fn as_many_stay_as_were_asked_for_and_room_is_asked_for_those() {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path();
    let plan = nano();
    let write = |steps, keep| {
        write(&mut trainer(&plan, steps), &plan, &keeping(keep, dir));
        there(dir)
    };
    assert_eq!(write(9, 3), ["step-9"]);
    write(10, 3);
    assert_eq!(write(11, 3), ["step-10", "step-11", "step-9"]);
    assert_eq!(write(12, 3), ["step-10", "step-11", "step-12"]);
    // What lies behind is of another way on, and nobody's but the user's.
    fs::remove_dir_all(dir.join("step-11")).unwrap();
    assert_eq!(write(11, 1), ["step-11", "step-12"]);
    assert_eq!(write(13, 1), ["step-13"]);
    let more = |every, keep, made: usize, there, last| {
        let from = (made > 0).then(|| State::after(made));
        Checkpoints { every, from, ..keeping(keep, dir) }.more(there, last)
    };
    for (every, keep, made, there, last, needed) in [
        (0, 1, 0, 0, 100, 1),
        (1000, 1, 0, 0, 100, 1),
        (10, 1, 0, 0, 100, 2),
        (10, 1, 50, 1, 100, 1),
        (10, 3, 0, 0, 100, 4),
        (50, 9, 0, 0, 100, 2),
        (50, 9, 10, 1, 101, 3),
        (10, 3, 50, 2, 100, 2),
        (10, 3, 50, 7, 100, 1),
        (10, usize::MAX, 0, 0, 100, 10),
        (1, 2, 0, 0, usize::MAX, 3),
        (7, 100, 13, 1, 28, 3),
    ] {
        assert_eq!(more(every, keep, made, there, last), needed, "{every} {keep} {made} {there} {last}");
    }
}
