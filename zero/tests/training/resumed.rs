//! A training that goes on in other trainers, at another stage, on other ranks or in another place, as if nothing had been.

use crate::device::a_run;
use crate::run::{Ran, Run, emulator, train};
use crate::toy::{Numbers, Over, Toy, noise};
use collectives::{Communicator, Float, Options, ReduceOp, bf16};
use models::TensorSpec;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use zero::{AdamW, Config, Error, Kept, Ledger, Placement, Stage, Standing, Trainer};

/// What a training leaves, of what each rank was shown of it.
#[derive(Default)]
pub struct State {
    pub standing: Standing,
    kept: [HashMap<String, Vec<f32>>; 3],
}

impl State {
    /// Of a trainer on every rank, which all have it.
    pub fn of<T: Float>(trainer: &mut Trainer<T>) -> State {
        let mut state = State { standing: trainer.standing(), ..State::default() };
        let held = trainer.ledger().held();
        let mut shown = Vec::new();
        for kept in Kept::ALL {
            let before = shown.len();
            let mut last: Option<(String, usize)> = None;
            let mut take = |spec: &TensorSpec, range: Range<usize>, values: &[f32]| {
                assert_eq!(range.len(), values.len());
                let follows =
                    last.as_ref().is_none_or(|(name, end)| *name != spec.name || *end == range.start);
                assert!(follows, "{} comes apart", spec.name);
                last = Some((spec.name.clone(), range.end));
                shown.push((kept, spec.clone(), range, values.to_vec()));
                Ok(())
            };
            trainer.export_state(kept, &mut take).unwrap();
            let elements: usize = shown[before..].iter().map(|(.., values)| values.len()).sum();
            assert!(elements <= trainer.plan().shown_at_most());
        }
        assert_eq!(trainer.ledger().held(), held, "what is exported takes no memory");
        // Of each element its bits, and how many ranks have shown it.
        let comm = trainer.comm().clone();
        let mut specs = Vec::new();
        let mut tell = |spec: &TensorSpec, _: &[T]| {
            specs.push(spec.clone());
            Ok(())
        };
        trainer.export(Some(&mut tell)).unwrap();
        specs.dedup_by(|one, other| one.name == other.name);
        for spec in specs {
            for kept in Kept::ALL {
                let mut all = vec![0u32; 2 * spec.len()];
                for (_, _, range, values) in
                    shown.iter().filter(|(k, s, ..)| (k, &s.name) == (&kept, &spec.name))
                {
                    for (i, x) in range.clone().zip(values) {
                        (all[i], all[spec.len() + i]) = (x.to_bits(), all[spec.len() + i] + 1);
                    }
                }
                comm.all_reduce_in_place(&mut all[..], ReduceOp::Sum).unwrap();
                let (bits, times) = all.split_at(spec.len());
                assert!(times.iter().all(|&times| times == 1), "{kept} of {} is not shown once", spec.name);
                let values = bits.iter().map(|&bits| f32::from_bits(bits)).collect();
                state.kept[kept as usize].insert(spec.name.clone(), values);
            }
        }
        state
    }

    /// Fills a range of a tensor.
    pub fn give(&self, kept: Kept, spec: &TensorSpec, range: Range<usize>, out: &mut [f32]) {
        let all = &self.kept[kept as usize][&spec.name];
        assert_eq!(all.len(), spec.len(), "{kept} of {}", spec.name);
        out.copy_from_slice(&all[range]);
    }

    /// Lets a trainer that was made with these weights go on.
    pub fn restore<T: Float>(&self, trainer: &mut Trainer<T>) {
        let mut source = |kept: Kept, spec: &TensorSpec, range: Range<usize>, out: &mut [f32]| {
            self.give(kept, spec, range, out);
            Ok(())
        };
        trainer.restore(self.standing, &mut source).unwrap();
        assert_eq!(trainer.standing(), self.standing);
    }

    pub fn bits(&self) -> (u64, [HashMap<&str, Vec<u32>>; 3]) {
        let of = |all: &[f32]| all.iter().map(|x| x.to_bits()).collect();
        let bits = self.kept.each_ref().map(|all| all.iter().map(|(k, x)| (&**k, of(x))).collect());
        (self.standing.steps, bits)
    }
}

fn after(steps: u64) -> Standing {
    Standing { steps, ..Standing::default() }
}

/// How a training is divided.
#[derive(Clone, Copy, Debug)]
struct Way {
    world: usize,
    over: Over,
    stage: u8,
    micro_batches: usize,
    vocabulary: usize,
}

impl Way {
    fn config(self) -> Config {
        Config {
            stage: Stage::try_from(self.stage).unwrap(),
            bucket_bytes: [9000, 1 << 30][usize::from(self.stage) % 2],
            accumulate: self.micro_batches / self.world,
            reproducible: true,
            adamw: AdamW { beta1: 0.9, beta2: 0.99, eps: 1e-8, weight_decay: 0.1 },
            clip: Some(0.5),
            ..Config::default()
        }
    }

    /// Until `steps` steps are made, from the start or a state: loss and norm of each, weights, and the state of rank 0.
    fn train<T: Float>(self, from: Option<&State>, steps: usize) -> Trained {
        let rank = |comm| {
            let mut trainer = self.trainer::<T>(comm, from);
            let (rank, accumulate) = (trainer.comm().rank(), trainer.plan().config.accumulate);
            let first = from.map_or(0, |from| from.standing.steps as usize);
            let step = |step| {
                let mut batches = Numbers::new(step, rank, self.world, accumulate);
                let done = trainer.step(&mut batches, 0.01).unwrap();
                (done.loss.to_bits(), done.grad_norm.to_bits())
            };
            let numbers = (first..steps).map(step).collect();
            // Right after a step, whose parameters are still on their way.
            let state = State::of(&mut trainer);
            Trained { numbers, state, weights: crate::weights(&mut trainer) }
        };
        let all = std::thread::scope(|scope| {
            let ranks = self.over.ranks(self.world).into_iter();
            let handles: Vec<_> = ranks.map(|comm| scope.spawn(move || rank(comm()))).collect();
            handles.into_iter().map(|h| h.join().unwrap()).collect::<Vec<_>>()
        });
        for other in &all {
            assert!(
                other.numbers == all[0].numbers && other.weights == all[0].weights,
                "{self:?}: ranks differ"
            );
        }
        all.into_iter().next().unwrap()
    }

    fn trainer<T: Float>(self, comm: Communicator, from: Option<&State>) -> Trainer<T> {
        let mut source = |spec: &TensorSpec, range: Range<usize>, out: &mut [f32]| {
            match from {
                Some(from) => from.give(Kept::Weights, spec, range, out),
                None => range.zip(out).for_each(|(i, x)| *x = noise(spec.name.len() as u32, 9, 9, i)),
            }
            Ok(())
        };
        let toy = Box::new(Toy::of_vocabulary(self.vocabulary, 2, false));
        let mut trainer = Trainer::new(toy, comm, &self.config(), Ledger::default(), &mut source).unwrap();
        if let Some(from) = from {
            from.restore(&mut trainer);
        }
        trainer
    }
}

struct Trained {
    numbers: Vec<(u64, u64)>,
    state: State,
    weights: Vec<u32>,
}

/// Stops at three steps in each way, and goes on in the way after it.
fn check<T: Float>(ways: &[Way]) {
    let straight = ways[0].train::<T>(None, 6);
    let half = ways[0].train::<T>(None, 3);
    for (i, &way) in ways.iter().enumerate() {
        let next = ways[(i + 1) % ways.len()];
        let what = format!("{} from {way:?} to {next:?}", T::DTYPE);
        let first = way.train::<T>(None, 3);
        assert!(first.state.bits() == half.state.bits(), "{what}: another state");
        let resumed = next.train::<T>(Some(&first.state), 6);
        assert_eq!(resumed.numbers, straight.numbers[3..], "{what}: losses and norms");
        assert!(resumed.weights == straight.weights, "{what}: other weights");
        assert!(resumed.state.bits() == straight.state.bits(), "{what}: another state in the end");
    }
    // Each of them says something, or nothing was compared.
    let [weights, first, second] = straight.state.bits().1;
    assert!(weights != first && first != second && straight.state.bits() != half.state.bits());
    let lengths = |i: usize| straight.state.kept[i].values().map(Vec::len).sum::<usize>();
    assert_eq!([0, 1, 2].map(lengths), [straight.weights.len(); 3]);
}

/// Every number of ranks after every other at some stage, over messages and memory.
fn ways(worlds: &[usize], micro_batches: usize) -> Vec<Way> {
    let of = |stage: u8| {
        worlds.iter().enumerate().map(move |(i, &world)| {
            let (over, stage) =
                ([Over::Threads, Over::Shm][(i + usize::from(stage)) % 2], (stage + i as u8) % 4);
            Way { world, over, stage, micro_batches, vocabulary: 7001 }
        })
    };
    (0..4).flat_map(of).collect()
}

#[test]
fn f32_goes_on_at_any_stage_on_any_power_of_two_of_ranks() {
    check::<f32>(&ways(&[1, 4, 2], 4));
}

#[test]
fn bf16_goes_on_at_any_stage_on_any_power_of_two_of_ranks() {
    check::<bf16>(&ways(&[1, 4, 2], 4));
}

#[test]
fn three_ranks_go_on_at_any_stage() {
    check::<f32>(&ways(&[3], 3));
    check::<bf16>(&ways(&[3], 6));
}

/// More elements than go at once.
#[test]
fn large_tensors_go_on() {
    let large = |way: Way| Way { vocabulary: 200_003, ..way };
    check::<f32>(&ways(&[2], 2).into_iter().map(large).collect::<Vec<_>>());
    check::<bf16>(&ways(&[1], 1).into_iter().map(large).collect::<Vec<_>>()[..2]);
}

/// Where they would go on with other sums, too, ranks hand on the state that they were given.
#[test]
fn a_state_passes_through_any_number_of_ranks() {
    let state = ways(&[2], 2)[1].train::<bf16>(None, 2).state;
    for way in ways(&[3, 1, 4], 12) {
        let passed = way.train::<bf16>(Some(&state), 2).state;
        assert!(passed.bits() == state.bits(), "{way:?}");
    }
}

/// With the host's state in memory of a device, or of the host beside it.
#[test]
fn a_device_goes_on() {
    if emulator().is_none() {
        return;
    }
    fn check<T: Float>(places: &[(usize, u8, Placement)]) {
        let of = |(world, stage, placement), steps, from: Option<&Arc<State>>| -> Ran {
            let from = from.cloned();
            let usual = a_run(world, stage, 4 / world, placement);
            let late = Some(3 * world as u64);
            let run = Run { steps, from, keep: true, ragged: false, late, ..usual };
            train::<T>(&run).remove(0)
        };
        let straight = of(places[0], 4, None);
        for (i, &place) in places.iter().enumerate() {
            let next = places[(i + 1) % places.len()];
            let half = Arc::new(of(place, 2, None).state.unwrap());
            let resumed = of(next, 4, Some(&half));
            let what = format!("{} from {place:?} to {next:?}", T::DTYPE);
            let (losses, norms, evaluation, weights) = straight.bits();
            let expected = (losses[2..].to_vec(), &norms[2..], evaluation, weights);
            assert!(resumed.bits() == expected, "{what}: other bits");
            let states = [&straight, &resumed].map(|ran| ran.state.as_ref().unwrap().bits());
            assert!(states[0] == states[1], "{what}: another state");
        }
    }
    let places = [
        (1, 0, Placement::Device),
        (2, 3, Placement::Offloaded),
        (2, 1, Placement::Device),
        (1, 2, Placement::Offloaded),
    ];
    check::<f32>(&places);
    check::<bf16>(&places);
}

/// What each rank of two at a stage says when it is restored as `restore` does, and to a step after it.
fn told(
    stage: u8,
    restore: impl Fn(&mut Trainer<f32>, usize) -> zero::Result<()> + Sync,
) -> Vec<(Option<String>, Option<String>)> {
    let way = Way { world: 2, over: Over::Threads, stage, micro_batches: 2, vocabulary: 7001 };
    Communicator::on_threads(2, Options::default(), |comm| {
        let rank = comm.rank();
        let mut trainer = way.trainer(comm, None);
        let said = restore(&mut trainer, rank).err().map(|e| e.to_string());
        let step = trainer.step(&mut Numbers::new(0, rank, 2, 1), 0.01);
        (said, step.err().map(|e| e.to_string()))
    })
}

#[test]
fn a_state_that_is_not_whole_on_all_ranks_is_refused_by_all() {
    let no_step = "a trainer whose state was not restored as a whole: restore it, or make another";
    let both = |said: &str| vec![(Some(said.to_owned()), Some(no_step.to_owned())); 2];
    let zeros = &mut |_: Kept, _: &TensorSpec, _: Range<usize>, out: &mut [f32]| {
        out.fill(0.0);
        Ok::<_, String>(())
    };
    for stage in 0..4 {
        let of_rank_1 = |trainer: &mut Trainer<f32>, rank| {
            let mut source = |kept, spec: &TensorSpec, _: Range<usize>, out: &mut [f32]| {
                out.fill(0.0);
                match rank == 1 && kept == Kept::SecondMoments && spec.name == "out" {
                    true => Err("it ends early".to_owned()),
                    false => Ok(()),
                }
            };
            trainer.restore(after(3), &mut source)
        };
        let said =
            "rank 1 cannot go on from the state that was kept: the second moments of out: it ends early";
        assert_eq!(told(stage, of_rank_1), both(said), "stage {stage}");

        let steps = |trainer: &mut Trainer<f32>, rank: usize| {
            trainer.restore(after(3 + rank as u64), &mut |_, _, _, out| {
                out.fill(0.0);
                Ok(())
            })
        };
        let said = "rank 1 cannot go on from the state that was kept: it is to go on after 4 steps, and rank 0 after 3";
        assert_eq!(told(stage, steps), both(said), "stage {stage}");

        let nowhere = |trainer: &mut Trainer<f32>, rank: usize| {
            let standing = Standing { skipped: 9 * rank as u64, ..after(3) };
            trainer.restore(standing, &mut |_, _, _, out| {
                out.fill(0.0);
                Ok(())
            })
        };
        let said = "rank 1 cannot go on from the state that was kept: Standing { steps: 3, skipped: 9, scale: None }: no \
                    training stands there";
        assert_eq!(told(stage, nowhere), both(said), "stage {stage}");
    }
    let moments = |trainer: &mut Trainer<f32>, rank: usize| {
        trainer.restore(after(3), &mut |_, _, _, out| {
            out.fill(rank as f32);
            Ok(())
        })
    };
    let said = "rank 1 cannot go on from the state that was kept: its moments are not those of rank 0, and at stage 0 each \
                keeps its own";
    assert_eq!(told(0, moments), both(said));
    let again = |trainer: &mut Trainer<f32>, rank: usize| {
        moments(trainer, rank).unwrap_err();
        assert!(
            trainer.export_state(Kept::Weights, &mut |_, _, _| Ok(())).is_err(),
            "state that is not whole is not exported"
        );
        trainer.restore(after(3), &mut |_, _, _, out| {
            out.fill(0.0);
            Ok(())
        })
    };
    assert_eq!(told(0, again), vec![(None, None); 2]);

    let way = Way { world: 1, over: Over::Threads, stage: 0, micro_batches: 1, vocabulary: 7001 };
    let mut trainer = way.trainer::<f32>(Communicator::threads(1).remove(0), None);
    trainer.step(&mut Numbers::new(0, 0, 1, 1), 0.01).unwrap();
    let said = trainer.restore(after(7), zeros).unwrap_err().to_string();
    assert_eq!(said, "a trainer after 1 steps, to be restored to 7: only one before its first step can be");
}

/// What a rank has, it shows itself: of the optimizer's state nothing is sent, and none has more of it than another but for
/// what pads the shards.
#[test]
fn each_rank_shows_its_own_part_and_sends_nothing() {
    check_own_parts::<f32>();
    check_own_parts::<bf16>();
}

fn check_own_parts<T: Float>() {
    for stage in 0..4 {
        let way = Way { world: 4, over: Over::Threads, stage, micro_batches: 4, vocabulary: 200_003 };
        let made = |comm| {
            let mut trainer = way.trainer::<T>(comm, None);
            let before = trainer.comm().stats();
            let mut shown = 0;
            for kept in Kept::ALL {
                let mut count = |_: &TensorSpec, range: Range<usize>, _: &[f32]| {
                    shown += range.len();
                    Ok(())
                };
                trainer.export_state(kept, &mut count).unwrap();
            }
            assert!(shown <= 3 * trainer.plan().shown_at_most());
            let did = trainer.comm().stats().since(&before);
            // But for the barriers, in which all go from unit to unit.
            let barriers = Kept::ALL.len() * trainer.plan().layout.len();
            (did.calls - barriers as u64, did.bytes_sent, shown)
        };
        let all = std::thread::scope(|scope| {
            let ranks = way.over.ranks(way.world).into_iter();
            let handles: Vec<_> = ranks.map(|comm| scope.spawn(move || made(comm()))).collect();
            handles.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
        });
        let shares: Vec<usize> = all.iter().map(|rank| rank.2).collect();
        assert!(all.iter().all(|rank| (rank.0, rank.1) == (0, 0)), "stage {stage}: {all:?}");
        let (least, most) = (shares.iter().min().unwrap(), shares.iter().max().unwrap());
        assert!(most - least < most / 10, "stage {stage}: {shares:?}");
    }
}

/// Nobody but its own rank hears of it, and the training goes on.
#[test]
fn a_sink_that_fails_holds_nobody_up() {
    for (stage, kept) in (0..4).flat_map(|stage| Kept::ALL.map(|kept| (stage, kept))) {
        let said = told(stage, |trainer, rank| {
            let mut shown = 0;
            let mut sink = |_: &TensorSpec, _: Range<usize>, _: &[f32]| {
                shown += 1;
                if rank == 0 { Err("no space".to_owned()) } else { Ok(()) }
            };
            let done = trainer.export_state(kept, &mut sink);
            assert!(rank != 0 || shown == 1, "{shown} calls of a sink that fails");
            assert!(rank != 0 || matches!(done, Err(Error::Export { .. })));
            trainer.export_state(kept, &mut |_, _, _| Ok(())).unwrap();
            done
        });
        let failed = Some("writing table: no space".to_owned());
        assert_eq!(said, [(failed, None), (None, None)], "stage {stage}, {kept}");
    }
    for stage in 0..4 {
        let said = told(stage, |trainer, rank| {
            let mut shown = 0;
            let mut sink = |_: &TensorSpec, _: &[f32]| {
                shown += 1;
                Err("no space".to_owned())
            };
            let done = trainer.export(if rank == 0 { Some(&mut sink) } else { None });
            assert_eq!(shown, usize::from(rank == 0), "calls of a sink that fails");
            trainer.export(None).unwrap();
            done
        });
        let failed = Some("writing table: no space".to_owned());
        assert_eq!(said, [(failed, None), (None, None)], "stage {stage}");
    }
}
