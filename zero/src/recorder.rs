//! Kernels that write down what they are told to do, and units for them: for tests of what happens when.

use crate::error::Result;
use crate::grads::{Borrowed, Grads, Reduced};
use crate::hands::{Hands, Meanwhile};
use crate::kernels::{Activity, Kernels, Update};
use collectives::{Buffer, Communicator, View, ViewMut};
use models::{Batch, Gradients, Init, Model, TensorSpec, Unit, Weights};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// So many units of one tensor.
pub fn units(count: usize) -> Vec<Unit> {
    let tensor = TensorSpec { name: "t".into(), shape: vec![1500], decay: false, init: Init::Ones };
    let unit = Unit { name: "u".into(), tensors: vec![tensor], uses: vec![], backward_reads: true };
    vec![unit; count]
}

/// One micro-batch of a model whose units have one tensor each, from the last to the first.
pub fn backward(grads: &mut Grads<f32>, hands: &mut Hands<'_, f32>, micro_batch: usize) {
    grads.begin(micro_batch);
    for unit in (0..hands.plan.layout.len()).rev() {
        grads.open(hands, unit).unwrap();
        let meanwhile = &Meanwhile::new(hands.comm);
        Borrowed { plan: hands.plan, meanwhile, grads }.ready(unit, 0);
        grads.close(unit).unwrap();
    }
}

/// A model of which only the threads are asked for: none of its own.
pub struct Nobody;

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
pub const WORK: Duration = Duration::from_millis(2);

/// What was done, and what a device was said to do meanwhile.
pub type Log = Arc<Mutex<Vec<(&'static str, Option<Activity>)>>>;

/// Kernels that write down what they are told to do.
#[derive(Default)]
pub struct Recorder {
    pub marked: Option<Activity>,
    pub log: Log,
    /// Given up while numbers are waited for, as by the watch of a wire between devices.
    pub loses: Option<Communicator>,
    /// Done in each bucket's update.
    pub updating: Option<Box<dyn FnMut() + Send>>,
}

impl Recorder {
    fn work(&mut self, what: &'static str) -> Result<()> {
        std::thread::sleep(WORK);
        self.log.lock().unwrap().push((what, self.marked));
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
    fn clear_words(&mut self, words: ViewMut<'_, u64>) -> Result<()> {
        words.host().fill(0);
        self.work("clear")
    }
    fn squares(&mut self, _: Reduced<'_, f32>, _: ViewMut<'_, u64>) -> Result<()> {
        self.work("squares")
    }
    fn update(&mut self, _: Update<'_, f32>, _: Option<Reduced<'_, f32>>) -> Result<()> {
        if let Some(updating) = &mut self.updating {
            updating();
        }
        self.work("update")
    }
    fn set(&mut self, _: &[f32], _: Option<ViewMut<'_, f32>>, _: ViewMut<'_, f32>) -> Result<()> {
        self.work("set")
    }
    fn mark(&mut self, activity: Activity) -> Result<()> {
        self.marked = Some(activity);
        Ok(())
    }
    fn put(&mut self, values: &[u64], to: ViewMut<'_, u64>) -> Result<()> {
        to.host().copy_from_slice(values);
        self.work("put")
    }
    fn numbers<'a>(&'a mut self, values: View<'a, u64>) -> Result<&'a [u64]> {
        if let Some(comm) = &self.loses {
            comm.abort("rank 1 is gone");
        }
        Ok(values.host())
    }
    fn elements<'a>(&'a mut self, values: View<'a, f32>) -> Result<&'a [f32]> {
        Ok(values.host())
    }
    fn load(&mut self, values: &[f32], to: ViewMut<'_, f32>) -> Result<()> {
        to.host().copy_from_slice(values);
        self.work("load")
    }
    fn floats<'a>(&'a mut self, values: View<'a, f32>) -> Result<&'a [f32]> {
        Ok(values.host())
    }
}
