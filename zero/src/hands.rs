//! What ZeRO's own part of a step works with, and where its time goes.

use crate::error::Result;
use crate::kernels::{Activity, Kernels};
use crate::plan::Plan;
use collectives::{Communicator, Float, Pending};
use models::Model;
use std::time::{Duration, Instant};

/// Where everything is, who the ranks are, what computes, and the clock.
pub(crate) struct Hands<'a, T: Float> {
    pub plan: &'a Plan,
    pub comm: &'a Communicator,
    pub model: &'a dyn Model<T>,
    pub kernels: &'a mut dyn Kernels<T>,
    pub clock: &'a mut Clock,
}

impl<T: Float> Hands<'_, T> {
    /// Awaits a collective; a device's queue does.
    pub fn wait<B: Send + 'static>(&mut self, pending: Pending<B>) -> Result<B> {
        self.kernels.mark(Activity::Communication)?;
        Ok(self.clock.communicate(|| pending.wait())?)
    }

    /// Runs arithmetic that is part of computing the gradient.
    pub fn compute(&mut self, work: impl FnOnce(&mut dyn Kernels<T>) -> Result<()>) -> Result<()> {
        self.kernels.mark(Activity::Compute)?;
        let kernels = &mut *self.kernels;
        self.clock.compute(|| work(kernels))
    }

    /// The same with all of the model's threads.
    pub fn compute_on_all(
        &mut self,
        mut work: impl FnMut(&mut dyn Kernels<T>) -> Result<()> + Send,
    ) -> Result<()> {
        let model = self.model;
        self.compute(|kernels| {
            let mut done = Ok(());
            model.install(&mut || done = work(kernels));
            done
        })
    }
}

/// Where the wall time of this thread goes.
#[derive(Default)]
pub(crate) struct Clock {
    pub compute: Duration,
    pub communication: Duration,
}

impl Clock {
    /// Runs what computes the model, or adds up its gradients.
    pub fn compute<R>(&mut self, f: impl FnOnce() -> R) -> R {
        let start = Instant::now();
        let result = f();
        self.compute += start.elapsed();
        result
    }

    /// Runs what starts, advances or awaits collectives.
    pub fn communicate<R>(&mut self, f: impl FnOnce() -> R) -> R {
        let start = Instant::now();
        let result = f();
        self.communication += start.elapsed();
        result
    }

    /// Part of what was booked as compute was communication.
    pub fn correct(&mut self, communication: Duration) {
        self.compute = self.compute.saturating_sub(communication);
        self.communication += communication;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::grads::{Borrowed, Grads, Reduced};
    use crate::kernels::Update;
    use crate::plan::Home;
    use crate::stage::Stage;
    use collectives::{Account, Buffer, DType, View, ViewMut};
    use models::{Batch, Gradients, Init, TensorSpec, Unit, Weights};

    /// A model of which only the threads are asked for: none of its own.
    struct Nobody;

    impl Model<f32> for Nobody {
        fn units(&self) -> &[Unit] {
            &[]
        }
        fn begin(&mut self, _: &Batch<'_>, _: f32) {}
        fn forward_unit(&mut self, _: usize, _: &dyn Weights<f32>) {}
        fn backward_unit(&mut self, _: usize, _: &dyn Weights<f32>, _: &mut dyn Gradients<f32>) {}
        fn losses(&mut self) -> &[f32] {
            &[]
        }
        fn logits(&mut self, _: usize, _: &dyn Weights<f32>, _: &mut [f32]) {}
    }

    /// How long each piece of arithmetic takes.
    const WORK: Duration = Duration::from_millis(2);

    /// Kernels that write down what they are told to do.
    #[derive(Default)]
    struct Recorder {
        marked: Option<Activity>,
        done: Vec<(&'static str, Option<Activity>)>,
    }

    impl Recorder {
        fn work(&mut self, what: &'static str) -> Result<()> {
            std::thread::sleep(WORK);
            self.done.push((what, self.marked));
            Ok(())
        }
    }

    impl Kernels<f32> for Recorder {
        fn state(&mut self, len: usize) -> Result<Buffer<f32>> {
            Ok(Buffer::zeroed(len))
        }
        fn clear(&mut self, _: ViewMut<'_, f32>) -> Result<()> {
            self.work("clear")
        }
        fn add(&mut self, _: ViewMut<'_, f32>, _: View<'_, f32>) -> Result<()> {
            self.work("add")
        }
        fn round(&mut self, _: View<'_, f32>, _: ViewMut<'_, f32>) -> Result<()> {
            self.work("round")
        }
        fn squares(&mut self, _: Reduced<'_, f32>, _: ViewMut<'_, f64>) -> Result<()> {
            self.work("squares")
        }
        fn update(&mut self, _: Update<'_, f32>, _: Option<Reduced<'_, f32>>) -> Result<()> {
            self.work("update")
        }
        fn set(&mut self, _: &[f32], _: Option<ViewMut<'_, f32>>, _: ViewMut<'_, f32>) -> Result<()> {
            self.work("set")
        }
        fn mark(&mut self, activity: Activity) -> Result<()> {
            self.marked = Some(activity);
            Ok(())
        }
        fn put(&mut self, _: &[f64], _: ViewMut<'_, f64>) -> Result<()> {
            self.work("put")
        }
        fn numbers<'a>(&'a mut self, values: View<'a, f64>) -> Result<&'a [f64]> {
            Ok(values.host())
        }
        fn elements<'a>(&'a mut self, values: View<'a, f32>) -> Result<&'a [f32]> {
            Ok(values.host())
        }
    }

    #[test]
    fn adding_up_micro_batches_is_computing_and_no_communication() {
        let tensor = TensorSpec { name: "t".into(), shape: vec![1500], decay: false, init: Init::Ones };
        let unit = Unit { name: "u".into(), tensors: vec![tensor], uses: vec![], backward_reads: true };
        let units = vec![unit; 5];
        for (level, expected) in [(0, ["add", "round"]), (2, ["add", "clear"])] {
            let stage = Stage::try_from(level).unwrap();
            let config = Config { stage, accumulate: 2, ..Config::default() };
            let plan = &Plan::new(&units, DType::F32, &config, 0, 1);
            assert_eq!(plan.gradients[0] == Home::Whole, level == 0);
            let comm = &Communicator::threads(1).remove(0);
            let mut grads = Grads::<f32>::new(plan, comm, &Account::default(), &Account::default()).unwrap();
            let (mut kernels, mut clock) = (Recorder::default(), Clock::default());
            let mut hands = Hands { plan, comm, model: &Nobody, kernels: &mut kernels, clock: &mut clock };
            for micro_batch in 0..2 {
                grads.begin(micro_batch);
                for unit in (0..units.len()).rev() {
                    grads.open(&mut hands, unit).unwrap();
                    Borrowed { plan, comm, grads: &mut grads }.ready(unit, 0);
                    grads.close(unit).unwrap();
                }
            }
            grads.finish(&mut hands).unwrap();
            assert!(expected.iter().all(|what| kernels.done.iter().any(|(done, _)| done == what)));
            let adds = kernels.done.iter().filter(|(what, _)| *what == "add").count();
            assert_eq!(adds, units.len());
            for (what, marked) in &kernels.done {
                assert_eq!(*marked, Some(Activity::Compute), "{what} at stage {level}");
            }
            assert_eq!(
                kernels.marked == Some(Activity::Communication),
                level == 0,
                "what was waited for last"
            );
            assert!(clock.compute >= WORK * kernels.done.len() as u32, "{:?}", clock.compute);
        }
    }
}
